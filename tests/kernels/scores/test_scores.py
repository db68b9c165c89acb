"""Scores in kernels: states and every derivative against dense arrays, who declines, memory, and wrong ones."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import energy_attn as ea
from energy_attn import scores
from energy_attn.kernels import local_attention
from energy_attn.kernels.internal import check_call_of
from tests.support.arrays import array
from tests.support.compare import close
from tests.support.complaints import complains
from tests.support.problems import Problem, _make, call_of, cast
from tests.support.reference import dense, dense_vjp
from tests.support.scores import BATCH, CASES, HEADS, Case, _t5, dense_energy
from tests.support.selection import few, few_rows
from tests.support.traits import SMALL, BlockSizes, Blockwise, kernel_of


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
BLOCKS = Blockwise(BlockSizes(rows=4, least_rows=2, keys=3, keys_of_few_rows=3))
KERNELS = {"reference": "reference", "blocks": BLOCKS, "decode": "decode", **SMALL}
PALLAS = ("pallas_gpu", "pallas_tpu")


class Form(NamedTuple):
    """A call without its score: a problem, options, which pair is seen, and positions."""

    problem: Problem
    options: dict
    seen: np.ndarray
    queries: np.ndarray
    keys: np.ndarray


def form_of(problem, queries, keys, **options):
    seen = (queries[:, None, :, None] >= 0) & (keys[:, None, None, :] >= 0)
    if "is_causal" in options:
        seen = seen & (keys[:, None, None, :] <= queries[:, None, :, None])
    return Form(problem, options, seen, queries, keys)


# Grouped heads; a key that none sees; a row that sees none.
MASK = RNG.random((2, 1, 5, 7)) < 0.7
MASK[:, :, 3] = MASK[..., 6] = False
ARRAYS = _make("scores", N=HEADS, K=2, H=3, V=2, source=True, bias=(1, HEADS, 1, 7))
# several tiles, the last not full
TILES = _make("scores in tiles", T=19, S=37, N=HEADS, K=2, H=3, V=2)
QUERIES, KEYS = (RNG.permutation(n)[None].astype(np.int32) for n in (40, 60))
QUERIES, KEYS = QUERIES[:, :19], KEYS[:, :37]
QUERIES[:, 4] = KEYS[:, 30] = -1  # absent
COUNTED = np.arange(19)[None], np.arange(37)[None]
# Arrays of all kinds; counted positions, of which most tiles need no mask, or which the score alone reads; positions
# that are given, with what is not there.
FORMS = {
    "arrays": Form(ARRAYS, {"mask": MASK}, MASK, np.arange(5)[None], np.arange(7)[None]),
    "counted": form_of(TILES, *COUNTED, is_causal=True),
    "free": form_of(TILES, *COUNTED),
    "given": form_of(TILES, QUERIES, KEYS, query_positions=QUERIES, key_positions=KEYS),
}


def functions(case, kernel, form):
    """The state by a kernel and by dense arrays, as functions of `(arrays, parameters)`."""
    _, options, seen, queries, keys = FORMS[form]
    kernel = KERNELS.get(kernel, kernel)
    options = {n: array(x) if isinstance(x, np.ndarray) else x for n, x in options.items()}

    def ours(arrays, parameters):
        if form == "given":  # nothing of what is absent is read
            arrays = {
                name: x if name == "query" else x.at[:, 30].set(jnp.nan)
                for name, x in arrays.items()
            }
        given = options | {"score": case.make(parameters), "implementation": kernel}
        return tuple(local_attention(**arrays, scale=0.6, **given))

    def theirs(arrays, parameters):
        same = dataclasses.replace(case, dense=lambda s, *x: case.dense(s, *x).astype(s.dtype))
        options = {"scale": 0.6, "seen": seen, "queries": queries, "keys": keys}
        return dense_energy(same, arrays, parameters, **options)

    return ours, theirs


def inputs(case, kernel, form, dtype):
    """Arrays and parameters, and a direction."""
    arrays, _ = cast(FORMS[form].problem, dtype)
    if kernel == "decode":  # declines a source beside a score
        del arrays["source"]
    x = arrays, jax.tree.map(lambda a: array(a, dtype), case.parameters)
    return x, directions(x)


def directions(x):
    return jax.tree.map(
        lambda a: array(np.cos(np.arange(a.size) + 1.0).reshape(a.shape), a.dtype), x
    )


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


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.smoke] * (x == "t5")) for x in CASES]
)
def test_definitions(name):
    """A score that is another function of the product, of a head, an entry of the batch or a distance; or a derivative
    of it in the product or a parameter."""
    case, rng = CASES[name], np.random.default_rng(0)
    x = array(rng.standard_normal((BATCH, HEADS, 5, 7))), jax.tree.map(array, case.parameters)
    places = [np.arange(n).reshape(np.roll([n, 1, 1, 1], i)) for i, n in enumerate(x[0].shape)]
    at = scores.ScoreIndices(*(array(n, np.int32) for n in places))

    def ours(raw, parameters):
        return case.make(parameters)(raw, at)

    def theirs(raw, parameters):
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return case.dense(raw, *places, parameters)

    @jax.jit
    def derivatives(x, u):
        def of(f):
            found, back = jax.vjp(f, *x)
            along = jnp.cos(jnp.arange(found.size, dtype=found.dtype)).reshape(found.shape)
            return found, back(along), jax.jvp(f, x, u)[1]

        return of(ours), of(theirs)

    found, wanted = derivatives(x, directions(x))
    close(found, wanted, name, tolerance=1e-12)
    assert all(np.abs(y).max() > 1e-3 for y in jax.tree.leaves(wanted[1]))  # none is zero by chance


FIRST = [
    ("blocks", "function", "arrays"),
    ("reference", "t5", "arrays"),
    ("decode", "composed", "arrays"),
    ("pallas_gpu", "twice", "given"),
]
# positions in all forms, tables and numbers of each kind, and each kernel
PRODUCT = [
    *FIRST,
    *((kernel, name, "arrays") for kernel in ("blocks", "decode") for name in CASES),
    *((kernel, name, "given") for kernel in PALLAS for name in CASES),
    *((kernel, name, "counted") for kernel in PALLAS for name in ("composed", "function")),
    ("pallas_gpu", "t5", "counted"),
    *((kernel, "t5", "free") for kernel in PALLAS),
]
SECOND = {("function", "arrays"), ("t5", "arrays"), ("function", "counted")}


@pytest.mark.parametrize(
    ("kernel", "name", "form"),
    [
        pytest.param("pallas_tpu", "t5", "counted", marks=pytest.mark.smoke),
        *few_rows(list(dict.fromkeys(PRODUCT)), len(FIRST)),
    ],
)
def test_derivatives(kernel, name, form):
    """A score that is skipped, applied to the source or bias too, or without a derivative in some argument or mode; a
    number of another head or batch entry, a position of another tile, a sum that a tile is missing from."""
    case, dtype = CASES[name], jnp.float32 if kernel in PALLAS else jnp.float64
    x, u = inputs(case, kernel, form, dtype)
    ours, theirs = functions(case, kernel, form)
    run = functools.partial(everything, second=(name, form) in SECOND)
    found = jax.jit(functools.partial(run, ours))(x, u)
    wide = jax.tree.map(lambda a: array(a, np.float64), (x, u))
    exact = jax.tree.map(np.asarray, jax.jit(functools.partial(run, theirs))(*wide))
    close(found, exact, name, tolerance=3e-6 if kernel in PALLAS else 1e-11)


@pytest.mark.parametrize(
    ("kernel", "form"),
    few_rows(
        [
            ("blocks", "arrays"),
            ("pallas_gpu", "counted"),
            ("decode", "arrays"),
            ("pallas_tpu", "counted"),
        ],
        2,
    ),
)
def test_sixteen_bits(kernel, form):
    """Scores computed in 16 bits, or parameters summed in them or rounded to them in each block."""
    case = CASES["composed"]
    x, _ = inputs(case, kernel, form, jnp.bfloat16)
    ours, theirs = (
        jax.jit(jax.grad(functools.partial(number, f))) for f in functions(case, kernel, form)
    )
    wanted = theirs(jax.tree.map(lambda a: array(a, np.float64), x))
    for one, rough, exact in zip(*map(jax.tree.leaves, (ours(x), theirs(x), wanted)), strict=True):
        assert one.dtype == jnp.bfloat16
        error, usual = (np.abs(np.asarray(a, np.float64) - exact).max() for a in (one, rough))
        assert error <= 2 * usual + float(jnp.finfo(jnp.bfloat16).eps) * np.abs(exact).max()


def test_transformations():
    """A score that `vmap`, `scan` or `checkpoint` loses, or whose parameters they do not batch."""
    case = CASES["function"]
    (arrays, _), _ = inputs(case, "blocks", "arrays", jnp.float64)
    ours, theirs = functions(case, "blockwise", "arrays")
    many = jax.tree.map(lambda a: array(np.stack([a, 2 * a, -a])), case.parameters)
    g, h = (jax.grad(lambda p, x, f=f: number(f, (x, p))) for f in (ours, theirs))

    @jax.jit
    def run(many, arrays):
        mapped = jax.vmap(lambda p: g(p, arrays))(many)
        return mapped, jax.lax.scan(lambda c, p: (c, jax.checkpoint(g)(p, arrays)), 0, many)[1]

    alone = jax.jit(h)
    wanted = [alone(jax.tree.map(lambda a, i=i: a[i], many), arrays) for i in range(3)]
    wanted = jax.tree.map(lambda *x: np.stack(x), *wanted)
    close(run(many, arrays), (wanted, wanted), tolerance=1e-12)


def drawn_slopes():
    """Three calls, of two rows each: slopes of their own, a bias for both rows, and queries and keys."""
    rng = np.random.default_rng(3)
    shapes = (3, 2), (3, 1, 2, 1, 13), (3, 2, 1, 2, 16), (3, 2, 13, 2, 16)
    return tuple(rng.standard_normal(shape).astype(np.float32) for shape in shapes)


ROUNDED = 64 * float(jnp.finfo(jnp.float32).eps)


def judged(bias, query, key, dout=0.0, dlse=1.0):
    """Energies summed, and gradients in the bias, queries and keys, where the keys are the values."""
    arrays = (np.asarray(x, np.float64) for x in (query, key, key, bias))
    problem = Problem("mapped", **dict(zip(("query", "key", "value", "bias"), arrays, strict=True)))
    _, lse = dense(problem)
    found = dense_vjp(problem, np.full(query.shape, dout), np.full(lse.shape, dlse))
    return lse.sum(), found["bias"], found["query"], found["key"] + found["value"]


@pytest.mark.parametrize("axis", few([0, None], 0))
@pytest.mark.parametrize("kernel", few(["decode_cpu", *PALLAS], "decode_cpu", "pallas_tpu"))
def test_vmap(kernel, axis):
    """Slopes of one mapped call, or of one row, for all; their gradients summed over calls, or a bias over rows."""
    slopes, bias, query, key = drawn_slopes()
    slopes = slopes if axis == 0 else slopes[0]
    with_bias = kernel == "decode_cpu"

    def energy(slopes, bias, query, key):
        more = {"bias": bias} if with_bias else {}
        options = {"score": scores.ALiBi(slopes), "implementation": kernel}
        return local_attention(query, key, key, **options, **more).lse.sum()

    run = jax.value_and_grad(energy, argnums=(0, 1, 2, 3))
    found = jax.jit(jax.vmap(run, (axis, 0, 0, 0)))(slopes, bias, query, key)
    wanted = []
    for i in range(3):
        slope = slopes[i] if axis == 0 else slopes
        far = np.arange(13.0)
        total = with_bias * bias[i] - slope[None, :, None, None] * far
        value, of_bias, *others = judged(total, query[i], key[i])
        of_slopes = -(of_bias * far).sum((0, 2, 3))
        wanted.append((value, (of_slopes, with_bias * of_bias, *others)))
    close(found, jax.tree.map(lambda *x: np.stack(x), *wanted), tolerance=ROUNDED)


@pytest.mark.parametrize("kernel", few(["decode_cpu", "pallas_tpu"], "decode_cpu"))
def test_vmap_of_a_score_without_arrays(kernel):
    """Entries of a batch that a score counts over all mapped calls."""
    _, _, query, key = drawn_slopes()
    score = scores.Function(lambda s, at: s * (1 + at.batch).astype(s.dtype))

    def energy(query, key):
        return local_attention(query, key, key, score=score, implementation=kernel).lse.sum()

    found = jax.jit(jax.vmap(jax.value_and_grad(energy, argnums=(0, 1))))(query, key)
    times = np.arange(1.0, 3.0).reshape(2, 1, 1, 1)
    wanted = []
    for x, y in zip(query, key, strict=True):
        value, _, of_query, of_key = judged(np.zeros((1, 1, 1, 1)), x * times, y)
        wanted.append((value, (of_query * times, of_key)))
    close(found, jax.tree.map(lambda *x: np.stack(x), *wanted), tolerance=ROUNDED)


@pytest.mark.parametrize("kernel", PALLAS)
def test_which(kernel):
    """A score that a kernel declines without need."""
    for case in CASES.values():
        (arrays, parameters), _ = inputs(case, kernel, "free", jnp.float32)
        check_call_of(kernel_of(kernel), call_of(**arrays, score=case.make(parameters)))


def _by(f, *parameters):
    return lambda: scores.Function(f, *map(array, parameters))


TABLE = np.ones((HEADS, 65), np.float32)
WIDE = _by(lambda s, at, table: s + table[at.key], np.ones(128, np.float32))
REASONS = [
    (lambda: scores.RelativeBias(array(TABLE)), "at most 64 entries, got 65 in RelativeBias"),
    (_by(lambda s, at, x: s + x[at.key, at.query], np.ones((9, 9))), "one index, got"),
    (_by(lambda s, at, x: s + x[at.head, s.astype(jnp.int32)], TABLE[:, :9]), "by the product"),
    (_by(lambda s, at: jax.lax.erf_inv(s)), "got erf_inv in Function"),
    (_by(lambda s, at: s + at.key.astype(jnp.float64).astype(s.dtype)), "got float64"),
    (_by(lambda s, at: s * at.head[..., None, 0].astype(s.dtype)), "single numbers, got Function"),
]


@pytest.mark.parametrize(
    ("kernel", "score", "reason"),
    [
        *((kernel, *row) for kernel in PALLAS for row in REASONS),
        *((kernel, WIDE, "") for kernel in (*PALLAS, "cudnn", "flash", "fa4", "splash")),
    ],
    ids=lambda x: (
        x if isinstance(x, str) and x in (*PALLAS, "cudnn", "flash", "fa4", "splash") else ""
    ),
)
def test_reasons(kernel, score, reason):
    """A kernel that ignores a score: a wrong answer, and fast; one that is found out only when a program is lowered."""
    x = array(np.ones((1, 128, HEADS, 64)), jnp.bfloat16 if reason == "" else np.float32)
    with pytest.raises(NotImplementedError, match=f"^score: wanted .*{reason}"):
        check_call_of(kernel_of(kernel), call_of(x, x, x, score=score()))


@pytest.mark.parametrize("kernel", PALLAS)
def test_source(kernel):
    """A source that the score is applied to."""
    arrays, _ = cast(TILES, jnp.float32)
    source = array(np.ones((2, 19, HEADS, 2)), np.float32)
    call = call_of(**arrays, source=source, score=scores.SoftCap(2.0))
    with pytest.raises(NotImplementedError, match=r"^score: wanted None with a source, got Soft"):
        check_call_of(kernel_of(kernel), call)


def test_what_is_not_learnt():
    """The gradient of slopes that none asks for, summed in every block: half as much time again for a backward."""
    x = jnp.ones((1, 80, HEADS, 8), jnp.float32)

    def scatters(score, moved):
        def loss(x, slopes):
            given = None if score is None else score(slopes)
            return ea.attention(x, x, x, score=given, implementation="blockwise").sum()

        program = jax.jit(jax.grad(loss, moved)).lower(x, jnp.ones(HEADS, jnp.float32))
        return program.as_text().count("stablehlo.scatter")

    assert scatters(scores.ALiBi, 0) == scatters(None, 0) < scatters(scores.ALiBi, (0, 1))


def test_memory():
    """A learned relative bias that is written out: 32k x 32k scores are 4 GiB."""
    rows = jax.ShapeDtypeStruct((1, 2**15, 1, 8), jnp.float32)
    table = jax.ShapeDtypeStruct((1, 257), jnp.float32)

    def loss(q, k, v, table):
        return ea.attention(q, k, v, score=scores.RelativeBias(table), is_causal=True).sum()

    program = jax.jit(jax.grad(loss, (0, 1, 2, 3))).lower(rows, rows, rows, table).compile()
    assert program.memory_analysis().temp_size_in_bytes < 100 * 2**20


def test_buckets():
    """Buckets other than those of T5, whose tables people load."""
    i, j = np.meshgrid(np.arange(300), np.arange(300), indexing="ij")
    found = scores.RelativeBias.t5_buckets()(jnp.asarray(j - i, jnp.int32))
    np.testing.assert_array_equal(found, _t5(i, j, 32, 128))
    before = scores.RelativeBias.t5_buckets(16, 128, bidirectional=False)(
        jnp.asarray(j - i, jnp.int32)
    )
    np.testing.assert_array_equal(before, np.where(j > i, 0, _t5(np.maximum(i, j), j, 32, 128)))


def test_slopes():
    """Other slopes than the paper's, for a number of heads that is no power of two."""
    close(scores.ALiBi(num_heads=8).slopes, 2.0 ** -np.arange(1, 9), tolerance=1e-7)
    twelve = np.concatenate([2.0 ** -np.arange(1, 9), 2.0 ** -(np.arange(4) + 0.5)])
    close(scores.ALiBi(num_heads=12).slopes, twelve, tolerance=1e-7)


X = np.ones((1, 3, 2, 4), np.float32)


def asked(score):
    return lambda: ea.attention(array(X), array(X), array(X), score=score)


def _read(s, at, w):
    return s * w[at.head]


def function(f, *parameters):
    return asked(scores.Function(f, *parameters))


@pytest.mark.parametrize(
    ("call", "error", "name", "received", "wanted"),
    [
        (asked(jnp.tanh), TypeError, "score", "scores.Function", "a score"),
        (asked(scores.SoftCap), TypeError, "score", "SoftCap(...) makes one", "a score"),
        (function(lambda s, at: s.sum()), ValueError, "score", "()", "shape"),
        (function(lambda s, at: s - s.max()), ValueError, "score", "reduce_max", "elementwise"),
        (function(lambda s, at: jnp.roll(s, 1, -1)), ValueError, "score", "slice", "elementwise"),
        (function(lambda s, at: s.astype(jnp.float64)), TypeError, "score", "float64", "float32"),
        (function(lambda s, at: s > 0), TypeError, "score", "bool", "float32"),
        (lambda: function(_read, jnp.ones(1))(), ValueError, "score", "0 to 1", "0 to 0"),
        (lambda: asked(scores.ALiBi(jnp.ones(3)))(), ValueError, "score", "[3]", "2 heads"),
        (lambda: scores.SoftCap(0.0), ValueError, "cap", "0.0", "above 0"),
        (lambda: scores.SoftCap("50"), TypeError, "cap", "50", "number"),
        (lambda: scores.ALiBi(), TypeError, "slopes", "None", "num_heads"),
        (lambda: scores.RelativeBias(jnp.ones((2, 4))), ValueError, "table", "4", "odd"),
        (lambda: scores.Compose(jnp.tanh), TypeError, "scores", "", "scores"),
        (lambda: scores.Function(3), TypeError, "function", "3", "function"),
        (
            lambda: scores.Function(len, jnp.ones(2, complex)),
            TypeError,
            "parameters",
            "complex",
            "",
        ),
        (lambda: ea.FreeEnergy(score=jnp.tanh), TypeError, "score", "", "a score"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_wrong(call, error, name, received, wanted):
    """A wrong score that is taken, or an error that does not name it."""
    complains(call, error, name, received, wanted)


def test_closed_over():
    """A parameter that is traced, closed over, and so without a gradient."""

    def loss(w):
        return function(lambda s, at: s * w)().sum()

    complains(lambda: jax.grad(loss)(1.0), ValueError, "score", "closes over", "parameters")
