"""Scores in kernels: states and every derivative against dense arrays, who declines, memory, and wrong ones."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import energy_attn as ea
from energy_attn import scores
from energy_attn.kernels import KernelCall, local_attention
from energy_attn.kernels.call._arguments import check_call
from energy_attn.kernels.call._kernel import check_call_of
from energy_attn.kernels.dispatch import _registry
from energy_attn.kernels.xla._blockwise import Blockwise
from energy_attn.kernels.xla._grid import BlockSizes
from tests.support.arrays import array
from tests.support.compare import close
from tests.support.complaints import complains
from tests.support.problems import Problem, _make, cast
from tests.support.reference import dense, dense_vjp
from tests.support.scores import BATCH, CASES, HEADS, _t5, dense_energy
from tests.support.selection import few, few_rows

# Grouped heads; a key that none sees; a row that sees none.
MASK = np.random.default_rng(0).random((2, 1, 5, 7)) < 0.7
MASK[:, :, 3] = MASK[..., 6] = False
PROBLEM = _make(
    "scores", N=HEADS, K=2, H=3, V=2, source=True, bias=(1, HEADS, 1, 7), mask=MASK, scale=0.6
)
BLOCKS = Blockwise(BlockSizes(rows=4, least_rows=2, keys=3, keys_of_few_rows=3))
KERNELS = {"reference": "reference", "blocks": BLOCKS, "decode": "decode"}


def arrays_of(kernel, dtype=jnp.float64):
    arrays, _ = cast(PROBLEM, dtype)
    if kernel == "decode":  # declines a source beside a score
        del arrays["source"]
    return arrays


def both(case, kernel, **options):
    """The state by a kernel and by dense arrays, as functions of `(arrays, parameters)`."""

    def ours(arrays, parameters):
        given = options | {"score": case.make(parameters), "implementation": kernel}
        return tuple(local_attention(**arrays, scale=0.6, mask=jnp.asarray(MASK), **given))

    def theirs(arrays, parameters):
        return dense_energy(case, arrays, parameters, scale=0.6, seen=MASK)

    return ours, theirs


def number(f, x):
    out, energy = f(*x)
    out = out.astype(jnp.float64)
    energy = energy.astype(jnp.float64)
    return jnp.sin(out).sum() + jnp.where(energy == -jnp.inf, 0.0, jnp.cos(energy)).sum()


def directions(x):
    return jax.tree.map(lambda a: array(np.cos(np.arange(a.size) + 1.0).reshape(a.shape)), x)


def tilted(x):
    return jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape)


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
            return found, back(tilted(found)), jax.jvp(f, x, u)[1]

        return of(ours), of(theirs)

    found, wanted = derivatives(x, directions(x))
    close(found, wanted, name, tolerance=1e-12)
    assert all(np.abs(y).max() > 1e-3 for y in jax.tree.leaves(wanted[1]))  # none is zero by chance


PAIRS = [
    ("blocks", "function"),
    ("reference", "t5"),
    ("decode", "composed"),
    *((kernel, name) for kernel in ("blocks", "decode") for name in CASES),
]


@pytest.mark.parametrize(("kernel", "name"), few_rows(list(dict.fromkeys(PAIRS)), 3))
def test_derivatives(kernel, name):
    """A score that is skipped, applied to the source or bias too, or without a derivative in some argument or mode."""
    case = CASES[name]
    x = arrays_of(kernel), jax.tree.map(array, case.parameters)
    second = name in ("function", "t5")

    def derivatives(f):
        g = functools.partial(number, f)

        @jax.jit
        def run(x, u):
            gradient = jax.grad(g)
            if second:
                return f(*x), jax.jvp(g, (x,), (u,)), jax.jvp(gradient, (x,), (u,))
            return f(*x), jax.jvp(g, (x,), (u,)), gradient(x)

        return run(x, directions(x))

    found, wanted = map(derivatives, both(case, KERNELS[kernel]))
    close(found, wanted, name)


@pytest.mark.parametrize("kernel", few(["blocks", "decode"], "blocks"))
def test_sixteen_bits(kernel):
    """Parameters rounded to 16 bits in each block, or scores computed in them."""
    case = CASES["composed"]
    low = (
        arrays_of(kernel, jnp.bfloat16),
        jax.tree.map(lambda a: array(a, jnp.bfloat16), case.parameters),
    )
    ours, theirs = both(case, KERNELS[kernel])
    gradients = [jax.jit(jax.grad(functools.partial(number, f))) for f in (ours, theirs)]
    found, naive = (f(low) for f in gradients)
    wanted = gradients[1](jax.tree.map(lambda a: array(a, np.float64), low))
    for x, y, z in zip(*map(jax.tree.leaves, (found, wanted, naive)), strict=True):
        assert x.dtype == jnp.bfloat16
        least = float(jnp.finfo(jnp.bfloat16).eps) * np.abs(y).max()
        error, usual = (np.abs(np.asarray(a, np.float64) - y).max() for a in (x, z))
        assert error <= 2 * usual + least


def test_transformations():
    """A score that `vmap`, `scan` or `checkpoint` loses, or whose parameters they do not batch."""
    case = CASES["function"]
    arrays = arrays_of("blocks")
    ours, theirs = both(case, "blockwise")
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
@pytest.mark.parametrize(
    "kernel", few(["decode_cpu", "pallas_tpu", "pallas_gpu"], "decode_cpu", "pallas_tpu")
)
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


@pytest.mark.parametrize("name", ["pallas_gpu", "pallas_tpu", "cudnn", "flash", "fa4", "splash"])
def test_who_declines(name):
    """A kernel that ignores a score: a wrong answer, and fast."""
    x = jnp.ones((1, 128, 2, 64), jnp.bfloat16)
    call = check_call(
        x, x, x, score=scores.Function(lambda s, at, table: s + table[at.key], jnp.ones(128))
    )
    with pytest.raises(NotImplementedError, match=r"^score: wanted "):
        check_call_of(_registry._REGISTRY[name], KernelCall(call.operands, call.settings))


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
            lambda: scores.Function(jnp.tanh, jnp.ones(2, complex)),
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
