"""Scores in the Pallas kernels: which they take, and states and derivatives in several tiles against dense arrays."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from energy_attn import scores
from energy_attn.kernels import local_attention
from energy_attn.kernels.call._arguments import check_call
from energy_attn.kernels.call._kernel import check_call_of
from energy_attn.kernels.dispatch import _registry
from tests.support.problems import _make, cast
from tests.support.scores import BATCH, CASES, HEADS, Case, dense_energy
from tests.support.traits import SMALL


def _twice(score, at, table, shift):
    """A table for each batch entry beside one of all, the first read beyond its end, and integers."""
    index = at.batch + jnp.abs(at.query - at.key)
    entry = table.at[at.batch, index].get(mode="clip") * shift[at.head].astype(score.dtype)
    return jnp.where(at.key > at.query, score, jax.nn.relu(score)) + entry


RNG = np.random.default_rng(0)
TWICE = Case(
    lambda p: scores.Function(_twice, p["table"], jnp.arange(HEADS)),
    lambda s, b, h, i, j, p: (
        jnp.where(j > i, s, jnp.maximum(s, 0)) + p["table"][b, np.minimum(b + abs(i - j), 3)] * h
    ),
    {"table": RNG.standard_normal((BATCH, 4))},
)
CASES = CASES | {"twice": TWICE}
# What each kernel takes.
TAKES = {"pallas_gpu": set(CASES), "pallas_tpu": set(CASES)}
SHAPE = {"T": 19, "S": 37, "N": HEADS, "K": 2, "H": 3, "V": 2}  # several tiles, the last not full
PROBLEM = _make("scores in tiles", **SHAPE)
QUERIES, KEYS = (RNG.permutation(n)[None].astype(np.int32) for n in (40, 60))
QUERIES, KEYS = QUERIES[:, :19], KEYS[:, :37]
QUERIES[:, 4] = KEYS[:, 30] = -1  # absent
# Counted positions, of which most tiles need no mask; positions that are given, with what is not there.
FORMS = {
    "counted": ({"is_causal": True}, np.arange(19)[None], np.arange(37)[None]),
    "given": (
        {"query_positions": jnp.asarray(QUERIES), "key_positions": jnp.asarray(KEYS)},
        *(QUERIES, KEYS),
    ),
}


def functions(case, kernel, form):
    """The state by a kernel and by dense arrays, of `(arrays, parameters)`."""
    options, queries, keys = FORMS[form]
    seen = np.broadcast_to(queries[:, None, :, None] >= 0, (1, 1, 19, 37)) & (
        keys[:, None, None, :] >= 0
    )
    if form == "counted":
        seen = seen & (keys[:, None, None, :] <= queries[:, None, :, None])

    def ours(arrays, parameters):
        if form == "given":  # nothing of what is absent is read
            arrays = {
                name: x if name == "query" else x.at[:, 30].set(jnp.nan)
                for name, x in arrays.items()
            }
        given = options | {"score": case.make(parameters), "implementation": SMALL[kernel]}
        return tuple(local_attention(**arrays, scale=0.6, **given))

    def theirs(arrays, parameters):
        same = dataclasses.replace(case, dense=lambda s, *x: case.dense(s, *x).astype(s.dtype))
        options = {"scale": 0.6, "seen": seen, "queries": queries, "keys": keys}
        return dense_energy(same, arrays, parameters, **options)

    return ours, theirs


def number(f, x):
    out, energy = f(*x)
    energy = jnp.where(energy == -jnp.inf, 0.0, jnp.cos(energy))
    return jnp.sin(out.astype(energy.dtype)).sum() + energy.sum()


def everything(f, x, u, *, second):
    g = functools.partial(number, f)
    (_, derivative), gradient = jax.jvp(g, (x,), (u,)), jax.grad(g)(x)
    found = {"state": f(*x), "tangent": derivative, "gradient": gradient}
    return found | ({"second": jax.jvp(jax.grad(g), (x,), (u,))[1]} if second else {})


def wide(tree):
    return jax.tree.map(lambda a: a.astype(jnp.float64), tree)


COUNTED = {"composed", "function", "t5"}  # of the others, only the full suite
PRODUCT = [
    pytest.param(
        kernel, name, form, marks=[pytest.mark.full] * (form != "given" and name not in COUNTED)
    )
    for kernel, taken in TAKES.items()
    for name in sorted(taken)
    for form in FORMS
]


@pytest.mark.product
@pytest.mark.parametrize(("kernel", "name", "form"), PRODUCT)
def test_derivatives(kernel, name, form):
    """A number of another head or batch entry, a position of another tile, a sum that a tile is missing from."""
    case = CASES[name]
    x = cast(PROBLEM, jnp.float32)[0], jax.tree.map(jnp.float32, case.parameters)
    u = jax.tree.map(lambda a: jnp.cos(jnp.arange(a.size, dtype=a.dtype) + 1).reshape(a.shape), x)
    ours, theirs = functions(case, kernel, form)
    second = name in ("function", "t5") and form == "counted"
    run = functools.partial(everything, second=second)
    found, naive = (jax.jit(functools.partial(run, f))(x, u) for f in (ours, theirs))
    exact = jax.jit(functools.partial(run, theirs))(wide(x), wide(u))
    assert jax.tree.structure(found) == jax.tree.structure(exact)
    for ours, rough, wanted in zip(*map(jax.tree.leaves, (found, naive, exact)), strict=True):
        np.testing.assert_array_equal(np.isneginf(ours), np.isneginf(wanted))
        ours, rough, wanted = (np.where(np.isneginf(a), 0, a) for a in (ours, rough, wanted))
        error, usual = (np.abs(np.asarray(a, np.float64) - wanted).max() for a in (ours, rough))
        assert error <= 4 * usual + 8 * np.finfo(np.float32).eps * np.abs(wanted).max()


@pytest.mark.parametrize("kernel", TAKES)
def test_which(kernel):
    """A score that a kernel declines without need, or takes and then cannot compile."""
    arrays = {name: jnp.float32(x) for name, x in PROBLEM.arrays.items()}
    taken = set()
    for name, case in CASES.items():
        call = check_call(**arrays, score=case.make(jax.tree.map(jnp.float32, case.parameters)))
        try:
            check_call_of(_registry._REGISTRY[kernel], call.operands, call.settings)
        except NotImplementedError as reason:
            assert str(reason).startswith("score: wanted ")
        else:
            taken.add(name)
    assert taken == TAKES[kernel]


def _by(f, *parameters):
    return scores.Function(f, *parameters)


TABLE = jnp.ones((HEADS, 65), jnp.float32)


@pytest.mark.parametrize("kernel", TAKES)
@pytest.mark.parametrize(
    ("score", "reason"),
    [
        (scores.RelativeBias(TABLE), "at most 64 entries, got 65 in RelativeBias"),
        (_by(lambda s, at, x: s + x[at.key, at.query], jnp.ones((9, 9))), "one index, got"),
        (_by(lambda s, at, x: s + x[at.head, s.astype(jnp.int32)], TABLE[:, :9]), "by the product"),
        (_by(lambda s, at: jax.lax.erf_inv(s)), "got erf_inv in Function"),
        (_by(lambda s, at: s + at.key.astype(jnp.float64).astype(s.dtype)), "got float64"),
        (
            _by(lambda s, at: s * at.head[..., None, 0].astype(s.dtype)),
            "single numbers, got Function",
        ),
    ],
    ids=range(6),
)
def test_reasons(kernel, score, reason):
    """A score that is found out only when it is lowered, or a reason that names something else."""
    arrays = {name: jnp.float32(x) for name, x in PROBLEM.arrays.items()}
    call = check_call(**arrays, score=score)
    with pytest.raises(NotImplementedError, match=f"^score: wanted .*{reason}"):
        check_call_of(_registry._REGISTRY[kernel], call.operands, call.settings)


@pytest.mark.parametrize("kernel", TAKES)
def test_source(kernel):
    """A source that the score is applied to."""
    arrays = {name: jnp.float32(x) for name, x in PROBLEM.arrays.items()}
    source = jnp.ones((2, 19, HEADS, 2), jnp.float32)
    call = check_call(**arrays, source=source, score=scores.SoftCap(2.0))
    with pytest.raises(NotImplementedError, match=r"^score: wanted None beside a source, got Soft"):
        check_call_of(_registry._REGISTRY[kernel], call.operands, call.settings)


@pytest.mark.parametrize("kernel", TAKES)
def test_sixteen_bits(kernel):
    """Scores computed in 16 bits, or parameters summed in them."""
    case = CASES["composed"]
    x = cast(PROBLEM, jnp.bfloat16)[0], jax.tree.map(jnp.bfloat16, case.parameters)
    ours, theirs = functions(case, kernel, "counted")
    gradients = [jax.grad(functools.partial(number, f)) for f in (ours, theirs)]
    found, naive, wanted = (
        jax.jit(f)(y) for f, y in zip((*gradients, gradients[1]), (x, x, wide(x)), strict=True)
    )
    for ours, rough, exact in zip(*map(jax.tree.leaves, (found, naive, wanted)), strict=True):
        assert ours.dtype == jnp.bfloat16
        error, usual = (np.abs(np.asarray(a, np.float64) - exact).max() for a in (ours, rough))
        assert error <= 2 * usual + float(jnp.finfo(jnp.bfloat16).eps) * np.abs(exact).max()
