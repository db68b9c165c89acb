"""The monoid of attention states: its laws, in values and in derivatives, for every dtype.

The judge is the definition in NumPy long doubles: weights `w_i = e^{lse_i − lse}` of the parts that hold keys, and with
cotangents `(dout, dlse)` of the folded state

    out = Σ w_i out_i,   dout_i = w_i dout,   dlse_i = w_i (dlse + dout·(out_i − out)).

A result may err by a few roundings of the terms whose sum it is, and of the largest lse.
"""

import functools
from typing import NamedTuple

import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energy_attn.kernels import AttentionState, as_state, empty_state, merge, merge_all
from tests.support.compare import close, same
from tests.support.naive import assert_close
from tests.support.reference import largest
from tests.support.selection import few

# The dtypes of out, and of lse beside it.
DTYPES = [
    ("float16", "float32"),
    ("bfloat16", "float32"),
    ("float32", "float32"),
    ("float64", "float64"),
    ("float32", "float64"),
]
every_dtype = pytest.mark.parametrize("dtypes", few(DTYPES, DTYPES[1], DTYPES[4]), ids="-".join)
PARTS, ROWS, WIDTH = 8, 3, 2


class Parts(NamedTuple):
    """Parts to be merged and cotangents of the result, in NumPy, in their dtypes in JAX."""

    out: np.ndarray  # [parts, rows, width]
    lse: np.ndarray  # [parts, rows]
    dout: np.ndarray  # [rows, width]
    dlse: np.ndarray  # [rows]

    def at(self, i) -> AttentionState:
        return AttentionState(self.out[i], self.lse[i])


def typed(parts: Parts, dtypes) -> Parts:
    wide, narrow = dtypes[1], jnp.dtype(dtypes[0])
    return Parts(*(x.astype(narrow if i % 2 == 0 else wide) for i, x in enumerate(parts)))


def random_parts(seed=0, parts=PARTS, rows=ROWS) -> Parts:
    rng = np.random.default_rng(seed)
    shapes = (parts, rows, WIDTH), (parts, rows), (rows, WIDTH), (rows,)
    return Parts(*(rng.standard_normal(shape) for shape in shapes))


def with_empty(parts: Parts) -> Parts:
    """Two parts hold no keys in one row each, and no part does in the last row; their out is NaN there."""
    empty = np.zeros(parts.lse.shape, bool)
    empty[0, 0] = empty[1, 1] = empty[:, -1] = True
    lse = np.where(empty, -np.inf, parts.lse)
    return parts._replace(out=np.where(empty[..., None], np.nan, parts.out), lse=lse)


@st.composite
def some_parts(draw, most=PARTS) -> Parts:
    """Up to `most` parts; about a third hold no keys, and their out may be anything."""
    count = draw(st.integers(1, most))
    anything = st.sampled_from([np.nan, np.inf, -np.inf, 0.0, 1.0])
    number = st.floats(-8, 8, width=16, allow_subnormal=False)
    finite = st.floats(-30, 30, width=32, allow_subnormal=False) | st.sampled_from([0.0, -1e4, 1e4])
    lse = draw(hnp.arrays(float, (count, ROWS), elements=finite | st.just(-np.inf)))
    out = draw(hnp.arrays(float, (count, ROWS, WIDTH), elements=number))
    junk = draw(hnp.arrays(float, (count, ROWS, WIDTH), elements=anything))
    out = np.where(np.isfinite(lse)[..., None], out, junk)
    dout = draw(hnp.arrays(float, (ROWS, WIDTH), elements=number))
    dlse = draw(hnp.arrays(float, (ROWS,), elements=number))
    return Parts(out, lse, dout, dlse)


@st.composite
def parts_and_trees(draw):
    """Parts, and a tree of pairs with each of them once: any order, any brackets."""
    parts = draw(some_parts())
    nodes = list(draw(st.permutations(range(len(parts.lse)))))
    while len(nodes) > 1:
        i = draw(st.integers(0, len(nodes) - 2))
        nodes[i : i + 2] = [(nodes[i], nodes[i + 1])]
    return parts, nodes[0]


# The judge.
def fold(out, lse):
    """`(out, lse, weights)` of the union of all parts (the first axis), in long doubles."""
    out, lse = np.asarray(out, np.longdouble), np.asarray(lse, np.longdouble)
    there = np.isfinite(lse)
    out, lse = np.where(there[..., None], out, 0), np.where(there, lse, -np.inf)
    largest_lse = lse.max(0, initial=-np.inf)
    shift = np.where(np.isfinite(largest_lse), largest_lse, 0)
    weights = np.exp(lse - shift)
    total = weights.sum(0)
    seen = total > 0
    weights = weights / np.where(seen, total, 1)
    whole = np.where(seen, shift + np.log(np.where(seen, total, 1)), -np.inf)
    return (weights[..., None] * out).sum(0), whole, weights


def exact(parts: Parts) -> dict[str, np.ndarray]:
    """The merged state, and the gradients of `<dout, out> + <dlse, lse>` in the parts."""
    out, lse, weights = fold(parts.out, parts.lse)
    dout, dlse = parts.dout.astype(np.longdouble), parts.dlse.astype(np.longdouble)
    given = np.where(np.isfinite(parts.lse)[..., None], parts.out.astype(np.longdouble), 0)
    along = (dout * (given - out)).sum(-1)
    return {
        "out": out,
        "lse": lse,
        "dout": weights[..., None] * dout,
        "dlse": weights * (dlse + along),
    }


# What is judged.
MERGE = jax.jit(merge)
MERGE_ALL = jax.jit(merge_all, static_argnames="axis")


def nothing(like: AttentionState) -> AttentionState:
    """The empty state for merging with `like`."""
    empty = empty_state(like.out.shape, like.out.dtype)
    return empty._replace(lse=empty.lse.astype(like.lse.dtype))


def as_jax(parts: Parts):
    out, lse, dout, dlse = map(jnp.asarray, parts)
    return AttentionState(out, lse), AttentionState(dout, dlse)


@functools.partial(jax.jit, static_argnames="axis")
def state_and_gradients(state, cotangent, axis=0):
    whole, back = jax.vjp(lambda state: merge_all(state, axis), state)
    (gradient,) = back(cotangent)
    return {"out": whole.out, "lse": whole.lse, "dout": gradient.out, "dlse": gradient.lse}


def along_tree(parts: Parts, tree) -> dict[str, np.ndarray]:
    """State and gradients of the merge in pairs along the tree."""

    def evaluate(leaves, node):
        if not isinstance(node, tuple):
            return MERGE(leaves[node], nothing(leaves[node]))
        return MERGE(*(evaluate(leaves, child) for child in node))

    def folded(leaves):
        return evaluate(leaves, tree)

    leaves = [AttentionState(*map(jnp.asarray, parts.at(i))) for i in range(len(parts.lse))]
    whole, back = jax.vjp(folded, leaves)
    (gradients,) = back(as_jax(parts)[1])
    dout, dlse = (np.stack([g[field] for g in gradients]) for field in (0, 1))
    return {"out": whole.out, "lse": whole.lse, "dout": dout, "dlse": dlse}


def check(found, parts: Parts, what, roundings=1):
    """All of `found` is within a few roundings of the terms in sums, and of the exact merge's shape and dtypes.

    More than one are those of merges in a tree, which round `out` and its cotangent to their own dtype in between.
    """
    wanted = exact(parts)
    lse = max(1.0, largest(parts.lse))
    out = max(1.0, largest(np.where(np.isfinite(parts.lse)[..., None], parts.out, 0)))
    dout, dlse = max(1.0, largest(parts.dout)), max(1.0, largest(parts.dlse))
    between = 1.0
    if roundings > 1:
        between = float(jnp.finfo(parts.out.dtype).eps / jnp.finfo(parts.lse.dtype).eps)
    along = 2 * WIDTH * dout * out * between
    sizes = {"out": out, "lse": lse, "dout": dout, "dlse": dlse + along}
    assert set(found) == set(sizes)
    for name, array in found.items():
        assert_close(
            array,
            wanted[name],
            wanted[name].astype(getattr(parts, name).dtype),
            magnitude=8 * roundings * sizes[name],
            scores=0.0 if name == "lse" else lse,
            what=f"{what}, {name}",
        )


# The laws.
@pytest.mark.parametrize("dtypes", few(DTYPES, DTYPES[1]), ids="-".join)
@given(case=parts_and_trees())
@settings(max_examples=12)
def test_associativity(dtypes, case):
    """A merge that depends on order or brackets, or gives weight to an empty part, in values or in gradients."""
    parts, tree = case
    parts = typed(parts, dtypes)
    found = along_tree(parts, tree)
    check(found, parts, f"merged along {tree}", roundings=len(parts.lse) + 1)


@every_dtype
@given(parts=some_parts(most=2))
def test_identity_and_commutativity(dtypes, parts):
    """The sigmoid form has no left identity; a product that XLA fuses into the sum shows the order in the last bit."""
    parts = typed(parts, dtypes)
    states = [AttentionState(*map(jnp.asarray, parts.at(i))) for i in range(len(parts.lse))]
    empty = nothing(states[0])
    for state in states:
        there = np.isfinite(state.lse)
        wanted = AttentionState(
            np.where(there[:, None], state.out, state.out.dtype.type(0)),
            np.where(there, state.lse, state.lse.dtype.type(-np.inf)),
        )
        same(MERGE(state, empty), wanted)
        same(MERGE(empty, state), wanted)
    first, last = states[0], states[-1]
    same(MERGE(first, last), MERGE(last, first))


@pytest.mark.parametrize("broken", [np.nan, np.inf])
@pytest.mark.parametrize("beside", [0.5, -np.inf, np.nan])
def test_what_is_broken_reaches_the_whole(broken, beside):
    """A part with NaN or overflow that counts as empty: a finite but wrong answer from the other parts."""
    parts = random_parts(parts=2)
    parts.lse[:, 1] = broken, beside
    (one, other), cotangent = (AttentionState(*parts.at(i)) for i in (0, 1)), as_jax(parts)[1]
    whole = random_parts(parts=2)
    for state in (MERGE(one, other), MERGE(other, one), MERGE_ALL(as_jax(parts)[0])):
        out, lse = map(np.asarray, state)
        assert np.isnan(out[1]).all() and np.isnan(lse[1])
        close(lse[::2], fold(whole.out, whole.lse)[1][::2], tolerance=1e-14)
    found = state_and_gradients(as_jax(parts)[0], cotangent)
    dout, dlse = (np.asarray(found[name]) for name in ("dout", "dlse"))
    assert np.isnan(dlse[0, 1])
    assert np.isfinite(dout[:, ::2]).all() and np.isfinite(dlse[:, ::2]).all()


FOREIGN = {
    "flash_attention_2": {"base": np.e, "empty": np.inf, "layout": "BNT"},
    "flash_attention": {"library": "flash_attention"},
    "log2": {"base": 2},
    "flashinfer": {"library": "flashinfer"},
    "vllm": {"library": "vllm"},
    "nan_for_empty": {"base": 10.0, "empty": np.nan},
}


@pytest.mark.product
@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_states_from_elsewhere(kind, dtype):
    """Another base, another order of axes, energies of 16 bits, another mark of empty rows; NaN stays NaN."""
    options = FOREIGN[kind]
    named = {
        "flash_attention": "flash_attention_2",
        "vllm": "flash_attention_2",
        "flashinfer": "log2",
    }
    said = FOREIGN[named.get(kind, kind)]
    base, empty = said["base"], said.get("empty", -np.inf)
    rng = np.random.default_rng(0)
    out = np.asarray(rng.standard_normal((2, 3, 4, WIDTH)), jnp.dtype(dtype))
    natural = rng.standard_normal((2, 3, 4))
    lse = natural / np.log(base)
    lse[0, 1] = empty
    if np.isinf(empty):
        out[1, 2, 0], lse[1, 2, 0] = np.nan, np.inf
    if said.get("layout") == "BNT":
        lse = lse.swapaxes(1, 2)
    small = "bfloat16" if dtype == "bfloat16" else dtype
    state = jax.jit(functools.partial(as_state, **options))(
        jnp.asarray(out), jnp.asarray(lse, small)
    )
    assert state.out.dtype == dtype
    assert state.lse.dtype == ("float64" if dtype == "float64" else "float32")
    found = np.asarray(state.lse, float)
    assert np.isneginf(found[0, 1]).all() and not np.asarray(state.out[0, 1], float).any()
    if np.isinf(empty):
        assert np.isnan(found[1, 2, 0])
    there = np.isfinite(found)
    assert there.sum() == 24 - 4 - np.isinf(empty)
    eps = 4 * float(jnp.finfo(small).eps)
    np.testing.assert_allclose(found[there], natural[there], rtol=eps, atol=eps)
    np.testing.assert_array_equal(np.asarray(state.out, float)[there], out.astype(float)[there])


def test_the_base_of_foreign_energies_is_said():
    """A forgotten base: states of a log2 lse merge to a wrong result without an error."""
    rng = np.random.default_rng(1)
    scores, values = rng.standard_normal((2, 3, 6)), rng.standard_normal((2, 6, WIDTH))
    weights = np.exp(scores)
    parts = []
    for x in (slice(4), slice(4, 6)):
        total = weights[..., x].sum(-1)
        out = np.einsum("brk,bkw->brw", weights[..., x], values[:, x]) / total[..., None]
        parts.append(as_state(jnp.asarray(out), jnp.log2(total), base=2))
    whole = np.einsum("brk,bkw->brw", weights, values) / weights.sum(-1)[..., None]
    np.testing.assert_allclose(merge(*parts).out, whole, rtol=1e-13, atol=1e-13)
    with pytest.raises(TypeError, match=r"base: wanted the base of lse, 2 for log2 .*got neither"):
        as_state(parts[0].out, parts[0].lse, layout="BTN")
    with pytest.raises(ValueError, match="library: wanted either it or base"):
        as_state(parts[0].out, parts[0].lse, library="flashinfer", base=2)
    with pytest.raises(ValueError, match="library: wanted one of 'flash_attention', "):
        as_state(parts[0].out, parts[0].lse, library="flashinfer2")


@pytest.mark.parametrize("shift", [0.0, 1e4, -1e4])
@every_dtype
def test_shift(dtypes, shift):
    """Without the maximum taken out, e^{1e4} overflows, and with lse ≈ −1e4 every part looks empty; a NaN from parts
    without keys, some of a row or all. Values and gradients are those of `merge` in turn."""
    parts = random_parts()
    parts = typed(with_empty(parts._replace(lse=parts.lse + shift)), dtypes)
    found = state_and_gradients(*as_jax(parts))
    check(found, parts, f"shifted by {shift}")
    if shift and dtypes[1] == "float64":  # which the shift rounds by 1e-12, float32 by 1e-3
        still = state_and_gradients(*as_jax(parts._replace(lse=parts.lse - shift)))
        np.testing.assert_allclose(found["lse"], still["lse"] + shift, rtol=0, atol=1e-10)
        for name in ("out", "dout", "dlse"):
            np.testing.assert_allclose(found[name], still[name], rtol=0, atol=1e-6)


def test_far_apart():
    """The smaller of two lse far apart underflows: its share is 0, and nothing is NaN near the edge of float32."""
    edge = float(np.finfo(np.float32).max)
    lse = np.array([[1e4, -1e4, edge], [-1e4, 1e4, -edge]], np.float32)
    parts = typed(random_parts(parts=2), ("float32", "float32"))._replace(lse=lse)
    found = state_and_gradients(*as_jax(parts))
    nearer = np.array([0, 1, 0])
    same((found["out"], found["lse"]), (parts.out[nearer, [0, 1, 2]], lse.max(0)))
    same((found["dout"][nearer, [0, 1, 2]],), (parts.dout,))
    np.testing.assert_allclose(found["dlse"][nearer, [0, 1, 2]], parts.dlse, rtol=0, atol=1e-6)
    further = found["dout"][1 - nearer, [0, 1, 2]], found["dlse"][1 - nearer, [0, 1, 2]]
    assert not any(np.asarray(x).any() for x in further)


# Derivatives beyond the first gradient; in float64, where a wrong term cannot hide in rounding.
def gradient_difference(parts: Parts, tangent: AttentionState, step=2.0**-7):
    """The Hessian of `<dout, out> + <dlse, lse>` times `tangent`: differences of the exact gradient, extrapolated."""

    def difference(h):
        ahead, behind = (
            exact(
                parts._replace(
                    out=parts.out + s * np.longdouble(h) * tangent.out,
                    lse=parts.lse + s * np.longdouble(h) * tangent.lse,
                )
            )
            for s in (1, -1)
        )
        return [(ahead[name] - behind[name]) / (2 * np.longdouble(h)) for name in ("dout", "dlse")]

    coarse, fine = difference(step), difference(step / 2)
    return AttentionState(*((4 * b - a) / 3 for a, b in zip(coarse, fine, strict=True)))


@pytest.mark.smoke
def test_second_derivatives():
    """A NaN that `where` hides in the gradient shows in the second derivative; so does a weight held constant there."""
    parts = with_empty(random_parts(parts=5, rows=4))
    direction = random_parts(seed=1, parts=5, rows=4)
    tangent = AttentionState(direction.out, direction.lse)
    state, cotangent = as_jax(parts)

    def gradient(state):
        return jax.vjp(merge_all, state)[1](cotangent)[0]

    @jax.jit
    def products(state, tangent):
        forward = jax.jvp(gradient, (state,), (tangent,))[1]
        reverse = jax.vjp(gradient, state)[1](tangent)[0]
        return forward, reverse

    there = np.isfinite(parts.lse)
    wanted = gradient_difference(parts, tangent)
    for product in products(state, tangent):
        for actual, expected, mask in zip(product, wanted, (there[..., None], there), strict=True):
            close(actual, np.where(mask, expected, 0), tolerance=1e-7)


# Shapes.
@pytest.mark.parametrize("axis", few([-3, -2, -1, 0, 1, 2], -1, 1))
def test_merge_all_over_any_axis(axis):
    """The axis is one of lse's: counted among out's, which has one more, −1 would sum the width."""
    rng = np.random.default_rng(0)
    out, lse = rng.standard_normal((2, 3, 4, WIDTH)), rng.standard_normal((2, 3, 4))
    found = MERGE_ALL(AttentionState(jnp.asarray(out), jnp.asarray(lse)), axis=axis)
    front = axis % 3
    wanted = fold(np.moveaxis(out, front, 0), np.moveaxis(lse, front, 0))
    close(found.out, wanted[0], tolerance=1e-15)
    close(found.lse, wanted[1], tolerance=4e-15)


@pytest.mark.parametrize("axis", few([0, 1, -1], -1))
def test_merge_all_of_none_and_of_one(axis):
    """A maximum over no part raises; a merge of one part is that part, to the bit."""
    dtypes = "bfloat16", "float32"
    shape = [ROWS, ROWS]
    shape[axis] = 0
    none = AttentionState(jnp.zeros((*shape, WIDTH), dtypes[0]), jnp.zeros(shape, dtypes[1]))
    same(
        MERGE_ALL(none, axis=axis),
        (np.zeros((ROWS, WIDTH), dtypes[0]), np.full(ROWS, -np.inf, dtypes[1])),
    )
    parts = typed(random_parts(parts=1), dtypes)
    one = AttentionState(
        jnp.asarray(np.moveaxis(parts.out, 0, axis if axis >= 0 else 1)),
        jnp.asarray(np.moveaxis(parts.lse, 0, axis)),
    )
    same(MERGE_ALL(one, axis=axis), parts.at(0))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_empty_state(dtype):
    """An identity in the wrong dtype would promote, or refuse, every state merged with it."""
    out, lse = empty_state((2, 3, 4), dtype)
    assert out.dtype == dtype and lse.dtype == ("float64" if dtype == "float64" else "float32")
    assert out.shape == (2, 3, 4) and lse.shape == (2, 3)
    assert not np.asarray(out, float).any() and np.isneginf(lse).all()
    assert empty_state((0, 4)).lse.shape == (0,) and empty_state((4,)).lse.shape == ()
    assert empty_state((4,)).out.dtype == jnp.float32


@pytest.mark.smoke
def test_states_of_any_rank_and_scan():
    """A state is a pytree that maps, scans and carries, a single row included."""
    parts = typed(random_parts(), ("float32", "float32"))
    state, _ = as_jax(parts)
    start = empty_state((ROWS, WIDTH))

    @jax.jit
    def folds(state):
        scanned = jax.lax.scan(lambda carry, part: (merge(carry, part), None), start, state)[0]
        mapped = jax.vmap(lambda row: merge_all(row, -1), in_axes=1)(state)
        row = merge_all(jax.tree.map(lambda x: x[:, 0], state))
        return scanned, mapped, row

    scanned, mapped, row = folds(state)
    whole = MERGE_ALL(state)
    for other in (scanned, mapped):
        close(other, whole, tolerance=1e-6)
    assert row.lse.shape == () and abs(row.lse - whole.lse[0]) < 1e-6
