"""`Gibbs`: the function of a source whose gradient is attention, the pytree, and the monoid of disjoint key sets.

Observables of one key set are tested by `test_observables.py`; here, that those of a union or of a tilted measure are
those of all keys at once, by the definitions in float64.
"""

import functools
from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import energy_attn as ea
from tests.support.compare import close
from tests.support.complaints import a, complaining
from tests.support.observables import answers, directions, exact, few_answers, measure
from tests.support.problems import PROBLEMS, Problem, cast, cotangents
from tests.support.reference import dense_vjp, rows
from tests.support.selection import few, few_rows

# Bias, mask, source, causality, a window, ragged rows, segments, grouped heads, fully masked rows.
PROBLEM = PROBLEMS["everything"]
CUTS = (5, 8)


def placed(problem: Problem) -> Problem:
    """The same with positions in place of lengths, which would count the keys of each part from its first one."""

    def positions(lengths, size):
        return np.where(np.arange(size) < lengths[:, None], np.arange(size), -1).astype(np.int32)

    return replace(
        problem,
        query_positions=positions(problem.query_seq_lengths, problem.query.shape[1]),
        key_positions=positions(problem.key_value_seq_lengths, problem.key.shape[1]),
        query_seq_lengths=None,
        key_value_seq_lengths=None,
    )


def parts(arrays, mask, problem: Problem, cuts=CUTS, **energy) -> list[ea.Gibbs]:
    """A measure for the keys between each two cuts, without a source."""
    options = placed(problem).options
    options |= {"mask": jnp.asarray(mask), "bias": arrays["bias"]} | energy
    found = []
    for keys in map(slice, (0, *cuts), (*cuts, None)):
        own = {name: options[name][..., keys] for name in ("mask", "bias")}
        own |= {name: options[name][:, keys] for name in ("key_positions", "key_segment_ids")}
        key, value = arrays["key"][:, keys], arrays["value"][:, keys]
        found.append(measure(arrays["query"], key, value, **options | own))
    return found


def everything(F: ea.Gibbs, along) -> dict:
    return {"energy": F(), "attention": F.attention(), **answers(F, along)}


ARRAYS, ALONG, MASK = PROBLEM.arrays, directions(PROBLEM), PROBLEM.mask


# The monoid.
@functools.partial(jax.jit, static_argnames="ask")
def union_of_two(arrays, mask, ask):
    A, B = parts(arrays, mask, PROBLEM, cuts=(5,))
    F = (A | B).tilt(arrays["source"])
    merged = jnp.logaddexp(A(arrays["source"]), B(arrays["source"]))
    return ask(F, ALONG), merged


@pytest.mark.parametrize("ask", few([few_answers, everything], few_answers))
@settings(max_examples=8)
@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.sampled_from([1.0, 1e-3, 30.0]),
    hidden=st.sampled_from(["some", "first", "second", "all"]),
)
def test_union_is_the_whole(ask, seed, size, hidden):
    """Means or central moments that are added where they must be merged; a part that a row does not see, as NaN.

    Against the definitions over all keys, with a bias, masks, positions, segments, a tilt and grouped heads. The energy
    is log(exp F + exp G).
    """
    rng = np.random.default_rng(seed)
    given = {n: size**0.5 * rng.standard_normal(x.shape) for n, x in ARRAYS.items()}
    mask = rng.random(MASK.shape) < 0.8
    parts = {"some": slice(0), "first": slice(5), "second": slice(5, None), "all": slice(None)}
    mask[..., parts[hidden]] = False
    found, merged = jax.device_get(union_of_two(given, mask, ask))
    whole = replace(PROBLEM, **given, mask=mask)
    close(found, exact(whole, found), f"{size} {hidden}", tolerance=1e-10)
    np.testing.assert_allclose(merged, found["energy"], rtol=1e-12)


@pytest.mark.full
def test_laws():
    """A union that depends on the order of its parts or merges; tilts that do not add, or reach the wrong part."""

    @jax.jit
    def run(arrays, split):
        source = arrays["source"]
        A, B, C = parts(arrays, MASK, PROBLEM)
        measures = {
            "(A | B) | C": ((A | B) | C).tilt(source),
            "A | (B | C), each tilted": A.tilt(source) | (B | C).tilt(source),
            "C | A | B, tilted twice": (C | A | B).tilt(split).tilt(source - split),
        }
        A, B = parts(arrays, MASK, PROBLEM, cuts=(5,))
        own = {"A tilted | B": A.tilt(source) | B, "B | A tilted": B | A.tilt(source)}
        return [{name: everything(F, ALONG) for name, F in x.items()} for x in (measures, own)]

    whole, own = run(ARRAYS, 0.3 * ARRAYS["source"])
    for law, found in whole.items():
        close(found, exact(PROBLEM), law, tolerance=1e-10)
    # the tilt of one part is a bias of its keys
    value = np.repeat(PROBLEM.value[:, :5], 2, axis=2)  # grouped heads
    bias = np.array(np.broadcast_to(PROBLEM.bias, MASK.shape[:1] + rows(PROBLEM).scores.shape[1:]))
    bias[..., :5] += np.einsum("btnv,bsnv->bnts", PROBLEM.source, value)
    for law, found in own.items():
        close(found, exact(replace(PROBLEM, source=None, bias=bias)), law, tolerance=1e-10)


@pytest.mark.smoke
def test_each_part_has_its_own_energy():
    """The scale or the masks of the first part for all: a prompt that all see, and a suffix that is causal."""
    problem = PROBLEMS["grouped"]
    arrays, _ = cast(problem, jnp.float64)
    along, cut = directions(problem), 3

    @jax.jit
    def run(query, key, value):
        prompt = ea.FreeEnergy(scale=0.5).at(query, key[:, :cut], value[:, :cut])
        suffix = ea.FreeEnergy(scale=2.0, is_causal=True, implementation="reference")
        return few_answers(prompt | suffix.at(query, key[:, cut:], value[:, cut:]), along)

    scores = np.einsum("btnh,bsnh->bnts", problem.query, np.repeat(problem.key, 3, axis=2))
    keys = np.arange(scores.shape[-1])
    causal = keys - cut <= np.arange(scores.shape[-2])[:, None]
    whole = replace(
        problem,
        scale=0.0,
        bias=scores * np.where(keys < cut, 0.5, 2.0),
        mask=(causal | (keys < cut))[None, None],
    )
    found = run(**arrays)
    close(found, exact(whole, found), "own energies", tolerance=1e-10)


@pytest.mark.parametrize("hidden", few([False, True], True))
def test_nothing_in_one_part(hidden):
    """NaN, or a gradient, from keys that are not there or that no row sees, before the others and after them."""
    problem = PROBLEMS["one_query"]
    arrays, given = problem.arrays, cotangents(problem, jnp.float64)
    key, value = arrays["key"], arrays["value"]
    unseen = (key + 1, value - 1) if hidden else (key[:, :0], value[:, :0])
    mask = jnp.zeros((1, 1, 1, 1), bool) if hidden else None

    @jax.jit
    def run(arrays, *unseen):
        def total(arrays, *unseen):
            query = jnp.asarray(arrays["query"])
            nothing = measure(query, *unseen, mask=mask)
            F = nothing | measure(**arrays) | nothing
            found = few_answers(F, directions(problem))
            return sum(map(jnp.vdot, given, F.attention(return_energy=True))), found

        return jax.grad(total, (0, 1, 2), has_aux=True)(arrays, *unseen)

    (gradients, *of_unseen), found = jax.device_get(run(arrays, *unseen))
    close(found, exact(problem, found), "beside nothing", tolerance=1e-10)
    close(gradients, dense_vjp(problem, *map(np.asarray, given)))
    assert not any(np.any(x) for x in of_unseen)


def state_and_product(F, along):
    return {"energy": F(), "attention": F.attention(), "product": F.covariance(along[0])}


@pytest.mark.parametrize(
    ("dtype", "ask"), few_rows([("bfloat16", state_and_product), ("float16", few_answers)])
)
def test_union_in_sixteen_bits(dtype, ask, user_settings, unchecked):
    """States of 16 bits that are merged, or a tilt that is rounded to 16 bits: an error that one measure has not."""
    problem = PROBLEMS["positions_causal"]
    arrays, rounded = cast(problem, dtype)
    along = [jnp.asarray(u, jnp.float32) for u in directions(problem)]
    tilt = jnp.asarray(problem.source, jnp.float32)

    @jax.jit
    def run(arrays):
        whole, *halves = (
            measure(
                arrays["query"],
                arrays["key"][:, keys],
                arrays["value"][:, keys],
                is_causal=True,
                query_positions=jnp.asarray(problem.query_positions),
                key_positions=jnp.asarray(problem.key_positions[:, keys]),
            )
            for keys in (slice(None), slice(3), slice(3, None))
        )
        A, B = halves
        return [ask(F, along) for F in (whole.tilt(tilt), A.tilt(tilt) | B.tilt(tilt))]

    one, joined = jax.device_get(run(arrays))
    assert {n: x.dtype for n, x in joined.items()} == {n: x.dtype for n, x in one.items()}
    tilted = replace(rounded, source=np.asarray(tilt, np.float64))
    for name, x in exact(tilted, one).items():
        own, rough = (np.asarray(y[name], np.float64) for y in (joined, one))
        seen = np.isfinite(x)
        np.testing.assert_array_equal(own[~seen], x[~seen])
        error, allowed = (np.abs(y[seen] - x[seen]).max() for y in (own, rough))
        assert error <= 2 * allowed + 1e-5, (name, error, allowed)


# The pytree.
def small(batch=3, **rows):
    """A tilted measure of a batch, with arrays for all that has a batch axis."""
    rng = np.random.default_rng(1)
    q, k, v, source = (jnp.asarray(rng.standard_normal((batch, 4, 2, 3))) for _ in range(4))
    mask = jnp.asarray(rng.random((batch, 2, 4, 4)) < 0.8)
    lengths = jnp.asarray(rng.integers(1, 5, batch), jnp.int32)
    energy = ea.FreeEnergy(scale=jnp.asarray(0.6), is_causal=True)
    return energy.at(q, k, v, mask=mask, key_value_seq_lengths=lengths, **rows).tilt(source)


def three(F):
    return F(), F.attention(), F.entropy()


def twice(F):
    return jax.tree.map(lambda x: jnp.stack([x, x]), F)


IN_AXES = functools.partial(jax.tree.map, lambda x: 0 if jnp.ndim(x) else None)
TRANSFORMED = {
    "jit": lambda F: jax.jit(three)(F),
    "filter_jit": lambda F: eqx.filter_jit(three)(F),
    "vmap": lambda F: jax.jit(jax.vmap(three, in_axes=(IN_AXES(F),)))(F),
    "filter_vmap": lambda F: eqx.filter_vmap(three, in_axes=(IN_AXES(F),))(F),
    "carry": lambda F: jax.lax.scan(lambda F, _: (F.tilt(0 * F.source), three(F)), F, length=2)[1],
    "xs": lambda F: jax.lax.scan(lambda _, F: (None, three(F)), None, twice(F))[1],
    "donated": lambda F: jax.jit(three, donate_argnums=0)(jax.tree.map(jnp.copy, F)),
    "flattened": lambda F: three(jax.tree.unflatten(*reversed(jax.tree.flatten(F)))),
}


@pytest.mark.parametrize("way", few(list(TRANSFORMED), "vmap", "carry"))
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_passes_transformations(way):
    """A leaf that is an option, or an option that is a leaf: a measure that cannot be traced, mapped or carried."""
    F = small()
    wanted = jax.device_get(jax.jit(three)(F))
    if way in ("carry", "xs"):
        wanted = jax.tree.map(lambda x: np.stack([x, x]), wanted)
    close(jax.device_get(TRANSFORMED[way](F)), wanted, way, 1e-12)


def test_saved_and_loaded(tmp_path):
    """A leaf that is not written, or is read into another's place."""
    F, path = small(), tmp_path / "measure.eqx"
    eqx.tree_serialise_leaves(path, F)
    found = eqx.tree_deserialise_leaves(path, jax.tree.map(jnp.zeros_like, F))
    assert jax.tree.structure(found) == jax.tree.structure(F)
    jax.tree.map(np.testing.assert_array_equal, found, F)


# Mistakes.
def at(query=(2, 3, 4, 5), value_width=6, heads=2, dtype="float32", **rows):
    query = a(*query, dtype=dtype)
    key = a(*query.shape[:-3], 7, heads, query.shape[-1], dtype=dtype)
    value = a(*query.shape[:-3], 7, heads, value_width, dtype=dtype)
    return ea.FreeEnergy().at(query, key, value, **rows)


ROW = a(2, 3, 4, 6)
BAD = {
    "no measure": (lambda: at().merge(3), TypeError, "other", "int 3", "a Gibbs"),
    "rows": (lambda: at() | at((2, 2, 4, 5)), ValueError, "other", "[2,2,4,5]", "(2, 3, 4, 5)"),
    "batch": (lambda: at() | at((3, 4, 5)), ValueError, "other", "[3,4,5]", "(2, 3, 4, 5)"),
    "width": (lambda: at() | at(value_width=5), ValueError, "other", "[2,7,2,5]", "(2, 7, 2, 6)"),
    "heads": (lambda: at() | at(heads=4), ValueError, "other", "[2,7,4,6]", "(2, 7, 2, 6)"),
    "dtype": (lambda: at() | at(dtype="bfloat16"), TypeError, "other", "bfloat16", "float32"),
    "source": (lambda: at()(a(2, 3, 4, 5)), ValueError, "source", "[2,3,4,5]", "(2, 3, 4, 6)"),
    "tilt": (lambda: at().tilt(ROW[0]), ValueError, "source", "[3,4,6]", "(2, 3, 4, 6)"),
    "integers": (lambda: at().tilt(ROW.astype(int)), TypeError, "source", "int32", "float32"),
    "a number": (lambda: at().tilt(0.0), TypeError, "source", "float 0.0", "array"),
    "row option": (lambda: at(lengths=ROW), TypeError, "lengths", "", "key_value_seq_lengths"),
    "energy's option": (lambda: at(is_causal=True), TypeError, "is_causal", "", "FreeEnergy(is_c"),
    "flag": (lambda: at().attention(return_energy=1), TypeError, "return_energy", "1", "True or"),
}


# A mistake that surfaces as an error of XLA's, or as the measure of something else.
test_bad_input = complaining(BAD, "user_settings")


def test_or_with_something_else(unchecked):
    """An AttributeError, where Python says that the operands do not go together."""
    with pytest.raises(TypeError, match=r"unsupported operand type\(s\) for \|: 'Gibbs' and 'int'"):
        at() | 3
