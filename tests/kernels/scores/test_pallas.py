"""Scores in the Pallas kernels: which they take, how they are taken apart, and states and derivatives in several tiles.

The judge is dense arrays.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from energy_attn import scores
from energy_attn.kernels import KernelCall, local_attention
from energy_attn.kernels.call._arguments import check_call
from energy_attn.kernels.call._kernel import check_call_of
from energy_attn.kernels.dispatch import _registry
from tests.support.arrays import array
from tests.support.compare import close
from tests.support.problems import _make, cast
from tests.support.scores import BATCH, CASES, HEADS, Case, dense_energy
from tests.support.selection import few, few_rows
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
# Counted positions, of which most tiles need no mask, or which the score alone reads; positions that are given, with
# what is not there.
FORMS = {
    "counted": ({"is_causal": True}, np.arange(19)[None], np.arange(37)[None]),
    "free": ({}, np.arange(19)[None], np.arange(37)[None]),
    "given": (
        {"query_positions": QUERIES, "key_positions": KEYS},
        *(QUERIES, KEYS),
    ),
}


def functions(case, kernel, form):
    """The state by a kernel and by dense arrays, of `(arrays, parameters)`."""
    options, queries, keys = FORMS[form]
    options = {n: array(x) if isinstance(x, np.ndarray) else x for n, x in options.items()}
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
    """Values, and derivatives along a direction, in all arrays and, if asked for, of second order."""

    def with_state(x):
        state = f(*x)
        return number(lambda: state, ()), state

    gradient = jax.grad(with_state, has_aux=True)
    found = {"tangent": jax.jvp(functools.partial(number, f), (x,), (u,))[1]}
    if not second:
        found["gradient"], found["state"] = gradient(x)
        return found
    (found["gradient"], found["state"]), (found["second"], _) = jax.jvp(gradient, (x,), (u,))
    return found


FIRST = ("pallas_tpu", "t5", "counted")
PRODUCT = [  # positions in both forms, tables and numbers of each kind, and either kernel
    ("pallas_gpu", "twice", "given"),
    *((kernel, name, "given") for kernel, taken in TAKES.items() for name in sorted(taken)),
    *((kernel, name, "counted") for kernel in TAKES for name in ("composed", "function", "t5")),
    *((kernel, "t5", "free") for kernel in TAKES),
]


ROWS = [
    pytest.param(*FIRST, marks=pytest.mark.smoke),
    *few_rows([x for x in dict.fromkeys(PRODUCT) if x != FIRST]),
]


@pytest.mark.parametrize(("kernel", "name", "form"), ROWS)
def test_derivatives(kernel, name, form):
    """A number of another head or batch entry, a position of another tile, a sum that a tile is missing from."""
    case = CASES[name]
    x, u = inputs(case, jnp.float32)
    ours, theirs = functions(case, kernel, form)
    second = name == "function" and form == "counted"
    run = functools.partial(everything, second=second)
    found = jax.jit(functools.partial(run, ours))(x, u)
    wide = jax.tree.map(lambda a: array(a, np.float64), (x, u))
    exact = jax.jit(functools.partial(run, theirs))(*wide)
    close(found, jax.tree.map(np.asarray, exact), name, tolerance=3e-6)


def inputs(case, dtype):
    """Arrays and parameters, and a direction."""
    x = cast(PROBLEM, dtype)[0], jax.tree.map(lambda a: array(a, dtype), case.parameters)
    u = jax.tree.map(lambda a: array(np.cos(np.arange(a.size) + 1.0).reshape(a.shape), dtype), x)
    return x, u


@pytest.mark.parametrize("kernel", TAKES)
def test_which(kernel):
    """A score that a kernel declines without need, or takes and then cannot compile."""
    arrays, _ = cast(PROBLEM, jnp.float32)
    taken = set()
    for name, case in CASES.items():
        call = check_call(**arrays, score=case.make(inputs(case, jnp.float32)[0][1]))
        try:
            check_call_of(_registry._REGISTRY[kernel], KernelCall(call.operands, call.settings))
        except NotImplementedError as reason:
            assert str(reason).startswith("score: wanted ")
        else:
            taken.add(name)
    assert taken == TAKES[kernel]


def _by(f, *parameters):
    return lambda: scores.Function(f, *map(array, parameters))


TABLE = np.ones((HEADS, 65), np.float32)


@pytest.mark.parametrize("kernel", TAKES)
@pytest.mark.parametrize(
    ("score", "reason"),
    [
        (lambda: scores.RelativeBias(array(TABLE)), "at most 64 entries, got 65 in RelativeBias"),
        (_by(lambda s, at, x: s + x[at.key, at.query], np.ones((9, 9))), "one index, got"),
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
    arrays, _ = cast(PROBLEM, jnp.float32)
    call = check_call(**arrays, score=score())
    with pytest.raises(NotImplementedError, match=f"^score: wanted .*{reason}"):
        check_call_of(_registry._REGISTRY[kernel], KernelCall(call.operands, call.settings))


@pytest.mark.parametrize("kernel", TAKES)
def test_source(kernel):
    """A source that the score is applied to."""
    arrays, _ = cast(PROBLEM, jnp.float32)
    source = array(np.ones((2, 19, HEADS, 2)), np.float32)
    call = check_call(**arrays, source=source, score=scores.SoftCap(2.0))
    with pytest.raises(NotImplementedError, match=r"^score: wanted None with a source, got Soft"):
        check_call_of(_registry._REGISTRY[kernel], KernelCall(call.operands, call.settings))


@pytest.mark.parametrize("kernel", few(list(TAKES), "pallas_gpu"))
def test_sixteen_bits(kernel):
    """Scores computed in 16 bits, or parameters summed in them."""
    case = CASES["composed"]
    x, _ = inputs(case, jnp.bfloat16)
    ours, theirs = (
        jax.jit(jax.grad(functools.partial(number, f))) for f in functions(case, kernel, "counted")
    )
    wanted = theirs(jax.tree.map(lambda a: array(a, np.float64), x))
    for one, rough, exact in zip(*map(jax.tree.leaves, (ours(x), theirs(x), wanted)), strict=True):
        assert one.dtype == jnp.bfloat16
        error, usual = (np.abs(np.asarray(a, np.float64) - exact).max() for a in (one, rough))
        assert error <= 2 * usual + float(jnp.finfo(jnp.bfloat16).eps) * np.abs(exact).max()
