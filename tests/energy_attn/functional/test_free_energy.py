"""The free energy and its derivatives, by the public calls, against the dense float64 judge of `support/reference.py`.

`F(ζ) = log Σ_a exp(s_a + ζ·v_a)`, so `∇F` is attention (tilted, away from ζ = 0), `∇²F` the covariance of the values,
and with cotangents `(dout, dlse)` of the pair `(∇F, F)` all first and second derivatives follow from `dense_vjp`. The
kernels have tests of their own; here the energy's own rule is at stake, and the zero source that is never materialised.
"""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import energy_attn as ea
from energy_attn.kernels import local_attention
from tests.support.compare import close
from tests.support.naive import assert_all_close
from tests.support.problems import PROBLEMS, Problem, cast, cotangents
from tests.support.programs import instructions
from tests.support.reference import (
    dense,
    dense_covariance,
    dense_vjp,
    rows,
    visible,
)
from tests.support.selection import few, few_rows

CUSTOM = ("decode", "blockwise")  # those with a derivative of their own
EVERY = (*CUSTOM, "reference")

# First a kernel with a derivative of its own at a source, one at zero, and one without. The kernels' tests have the
# other masks, lengths, heads and positions, which are nothing to the energy's own rule.
CHOSEN = [
    pytest.param("blockwise", "everything", marks=pytest.mark.smoke),
    ("decode", "decode_cache"),
    ("reference", "value_narrower"),
    ("blockwise", "mask_nothing"),
    ("blockwise", "positions_causal"),
    ("decode", "decode_source"),
    (None, "no_keys"),
    (None, "primes"),
]
chosen = pytest.mark.parametrize(("implementation", "name"), few_rows(CHOSEN, 3))


def energies(arrays, problem: Problem, implementation, **options):
    options = {**problem.options, **options}
    return ea.free_energy(**arrays, **options, implementation=implementation)


def attend(arrays, problem: Problem, implementation):
    """`(∇F, F)` by `jax.grad` in the source: at the problem's, or at a NumPy zero."""
    rest = dict(arrays)
    source = rest.pop("source", zero(problem))

    def total(source):
        energy = energies(rest | {"source": source}, problem, implementation)
        return energy.sum(), energy

    return jax.grad(total, has_aux=True)(source)


def zero(problem: Problem, dtype=np.float64) -> np.ndarray:
    return np.zeros((*problem.query.shape[:-1], problem.value.shape[-1]), dtype)


def with_source(problem: Problem) -> Problem:
    return problem if problem.source is not None else replace(problem, source=zero(problem))


def blind_rows(problem: Problem) -> np.ndarray:
    """`[B, T, N]`: which rows are fully masked."""
    return ~visible(problem).any(axis=-1).transpose(0, 2, 1)


def check_gradients(found, exact, problem: Problem, scale_gradient=None):
    """Gradients by name against the judge's, finite, and exactly zero in fully masked rows."""
    for name, gradient in found.items():
        close(gradient, exact[name] if name != "scale" else scale_gradient, name)
    for name in {"query", "source"} & set(found):
        assert not np.asarray(found[name])[blind_rows(problem)].any(), name


@chosen
def test_energy_and_its_gradients(implementation, name):
    """A wrong energy, or a wrong gradient of it in any argument: query, key, value, bias, scale or source.

    The source is the problem's or a NumPy zero, whose gradient is attention; then also a zero that is traced.
    """
    problem = PROBLEMS[name]
    arrays, _ = cast(problem, jnp.float64)
    scale = problem.query.shape[-1] ** -0.5 if problem.scale is None else problem.scale
    _, dlse = cotangents(problem, jnp.float64)

    @jax.jit
    def run(arrays, scale, traced, dlse):
        def energy(arrays, scale):
            return energies(arrays, problem, implementation, scale=scale)

        known = {"source": zero(problem)} | arrays
        energy_, back = jax.vjp(energy, known, scale)
        gradients, slope = back(dlse)
        alone = jax.grad(
            lambda x: (dlse * energies(arrays | {"source": x}, problem, implementation)).sum()
        )(traced)
        return energy_, gradients | {"scale": slope}, alone

    traced = arrays.get("source", jnp.asarray(zero(problem)))
    energy, gradients, alone = run(arrays, jnp.asarray(scale), traced, dlse)
    close(energy, dense(problem)[1], "energy")
    exact = dense_vjp(with_source(problem), 0 * dense(problem)[0], dlse)
    # scores are homogeneous in the query: scale ∂F/∂scale = q·∂F/∂q
    slope = np.sum(exact["query"] * problem.query) / scale
    check_gradients(gradients, exact, problem, slope)
    close(alone, exact["source"], "source, alone and traced")


@pytest.mark.parametrize(("implementation", "name"), few_rows(CHOSEN))
def test_attention_and_its_gradients(implementation, name):
    """Attention that is not ∇F, or second derivatives of F that are zero or wrong: what training needs.

    Differentiating `<dout, ∇F> + <dlse, F>` takes the derivative of the energy's own rule. Where the problem has a
    source, its gradient is the Hessian's product with dout.
    """
    problem = PROBLEMS[name]
    arrays, _ = cast(problem, jnp.float64)
    out, energy = dense(problem)

    @jax.jit
    def run(arrays, cotangent):
        pair, back = jax.vjp(lambda arrays: attend(arrays, problem, implementation), arrays)
        return pair, back(cotangent)[0]

    dout, dlse = cotangents(problem, jnp.float64)
    for given in ((dout, dlse), (dout, 0 * dlse)):
        found, gradients = run(arrays, given)
        close(found[0], out, "attention")
        close(found[1], energy, "energy beside attention")
        check_gradients(gradients, dense_vjp(problem, *map(np.asarray, given)), problem)
    assert not np.asarray(found[0])[blind_rows(problem)].any()


@pytest.mark.full
def test_low_precision():
    """A rule of the energy that loses the kernel's precision, for example by rounding `out` before its use."""
    problem, dtype = PROBLEMS["everything"], jnp.dtype("bfloat16")
    arrays, _ = cast(problem, dtype)

    @jax.jit
    def run(arrays, cotangent):
        pair, back = jax.vjp(lambda arrays: attend(arrays, problem, "blockwise"), arrays)
        return dict(zip(("out", "lse"), pair, strict=True)) | back(cotangent)[0]

    found = run(arrays, cotangents(problem, dtype))
    assert_all_close(found, problem, dtype, "both", label="energy")


@pytest.mark.parametrize(
    ("implementation", "name"),
    few_rows(
        [
            ("blockwise", "decode_cache"),
            (None, "decode_cache"),
            ("decode", "decode_source"),
            ("reference", "decode_source"),
        ]
    ),
)
def test_derivatives_in_the_source(implementation, name):
    """∇²F that is anything but the covariance of the values, a tangent that is not attention, a lost third cumulant.

    From a NumPy zero, where a zero would be silent, or from the problem's source; in either mode, and in each again.
    """
    problem = PROBLEMS[name]
    arrays, _ = cast(problem, jnp.float64)
    source = np.asarray(arrays.pop("source", zero(problem)))
    step = problem.rng("direction").standard_normal(source.shape)

    def energy(source):
        return energies(arrays | {"source": source}, problem, implementation)

    def total(source):
        return energy(source).sum()

    hessian = jax.hessian if implementation == "reference" else lambda f: jax.jacrev(jax.grad(f))

    @jax.jit
    def run(source_, time):
        third = jax.grad(jax.grad(jax.grad(lambda time: total(source_ + time * step))))(time)
        product = jax.jvp(jax.grad(total), (source_,), (step,))[1]
        return hessian(total)(source_), jax.jvp(energy, (source,), (step,))[1], product, third

    found, rate, product, third = jax.device_get(run(source, 0.0))
    covariance, r = dense_covariance(problem), rows(problem)
    diagonal = np.einsum("btnvbtnw->btnvw", found)
    close(diagonal, covariance)
    np.testing.assert_allclose(np.abs(found).sum(), np.abs(diagonal).sum(), err_msg="rows mix")
    close(rate, (dense(problem)[0] * step).sum(-1), "out · dζ")
    close(product, np.einsum("btnvw,btnw->btnv", covariance, step), "Σ dζ")
    # of u·v in each row: Σ_a P_a (u·(v_a − out))³
    centred = np.einsum("btnv,bsnv->bnts", step, r.value)
    centred -= np.einsum("btnv,btnv->bnt", step, r.out)[..., None]
    close(third, np.sum(r.weights * centred**3), "third cumulant")


@pytest.mark.full
@pytest.mark.product
@pytest.mark.parametrize("implementation", ["blockwise", "reference"])
def test_numpy_zero_is_no_constant(implementation):
    """A source that was zero when traced, taken for a constant: its second derivatives would be silent zeros.

    Every way that a NumPy zero can come into a nested derivative: traced, batched, rematerialised, carried by a loop.
    """
    problem = PROBLEMS["value_narrower"]
    arrays, _ = cast(problem, jnp.float64)
    direction = problem.rng("direction").standard_normal(zero(problem).shape)
    source = zero(problem)

    def total(source):
        return energies(arrays | {"source": source}, problem, implementation).sum()

    def slope(source, total=total):
        return (direction * jax.grad(total)(source)).sum()

    def one_row(source, query, key, value):
        return ea.free_energy(query, key, value, source=source, implementation=implementation).sum()

    def slope_of_a_row(source, direction, *row):
        return (direction * jax.grad(one_row)(source, *row)).sum()

    def scan(f, source):  # the source is the carry, and the slope is summed on the way
        return jax.lax.scan(lambda s, _: (s, f(s)), source, None, length=2)[1].mean()

    def mixed(query):  # a NumPy zero inside, and the derivative is taken in something else
        def total(source):
            rest = arrays | {"query": query, "source": source}
            return energies(rest, problem, implementation).sum()

        return (direction * jax.grad(total)(zero(problem))).sum()

    def inside(around):  # within the slope
        return jax.grad(functools.partial(slope, total=around(total)))

    def branched(source):
        return jax.lax.cond(source.sum() == 0, slope, lambda s: 0 * s.sum(), source)

    def around(carry, _):
        return carry, jax.grad(slope)(source)

    row, of_a_row = [arrays[n] for n in ("query", "key", "value")], jax.grad(slope_of_a_row)
    one = jax.vmap(of_a_row, in_axes=(None, 0, 0, 0, 0))
    ways = {
        "grad": lambda: jax.grad(slope)(source),
        "jit": lambda: jax.grad(jax.jit(slope))(source),
        "jit inside": lambda: inside(jax.jit)(source),
        "jit of grad": lambda: jax.jit(jax.grad(slope))(source),
        "vjp": lambda: jax.vjp(slope, source)[1](jnp.ones(()))[0],
        "pulled back": lambda: jax.vjp(jax.grad(total), source)[1](direction)[0],
        "remat": lambda: jax.grad(jax.checkpoint(slope))(source),
        "remat inside": lambda: inside(jax.checkpoint)(source),
        "vmap": lambda: jax.vmap(of_a_row)(source, direction, *row),
        "vmap, one source": lambda: one(source[0], direction, *row),
        "scan": lambda: jax.grad(functools.partial(scan, slope))(source),
        "scan inside": lambda: inside(lambda f: functools.partial(scan, f))(source),
        "scan around": lambda: jax.lax.scan(around, 0.0, None, length=2)[1][-1],
        "cond": lambda: jax.grad(branched)(source),
    }
    product = np.einsum("btnvw,btnw->btnv", dense_covariance(problem), direction)
    # One program, whose equal parts XLA joins; each way is traced by itself.
    together = jax.jit(lambda: {way: f() for way, f in ways.items()})()
    for way, found in together.items():
        close(found, product, way)
    for way in ("grad", "vjp"):
        close(ways[way](), product, f"{way}, not jitted")
    exact = dense_vjp(problem, direction, np.zeros(direction.shape[:-1]))
    close(jax.jit(jax.grad(mixed))(arrays["query"]), exact["query"])


@pytest.mark.parametrize(
    ("implementation", "dtype", "source_dtype"),
    few_rows(
        [
            ("blockwise", "bfloat16", "float32"),
            ("decode", "float32", "float64"),
            ("reference", "bfloat16", "float32"),
        ]
    ),
)
def test_source_of_another_dtype(implementation, dtype, source_dtype):
    """A gradient in the dtype of the values, which cannot be added to others of a wider source."""
    problem = PROBLEMS["decode_source"]
    arrays, rounded = cast(problem, jnp.dtype(dtype))
    source = jnp.asarray(problem.source, source_dtype)

    def total(source, weight):
        energy = energies(arrays | {"source": source}, problem, implementation)
        return energy.sum().astype(source_dtype) + weight * (source**2).sum()

    exact, _ = dense(replace(rounded, source=np.asarray(source, np.float64)))
    at_zero, _ = dense(replace(rounded, source=None))
    for given, at in ((source, exact), (np.zeros_like(source), at_zero)):
        run = jax.jit(lambda weight, given=given: jax.grad(total)(given, weight))
        found = run(jnp.ones((), source_dtype))
        assert found.dtype == source_dtype
        np.testing.assert_allclose(found, at + 2 * np.asarray(given), rtol=0, atol=0.02)


@pytest.mark.parametrize("implementation", few([None, "blockwise"], None))
def test_jit_and_eager_agree(implementation):
    """A decision by values at trace time, or one that is kept for the next call: zero and nonzero sources in turn."""
    problem = PROBLEMS["decode_source"]
    arrays, _ = cast(problem, jnp.float64)
    source = np.asarray(arrays.pop("source"))
    gradient = jax.value_and_grad(
        lambda x: energies(arrays | {"source": x}, problem, implementation).sum()
    )
    compiled = jax.jit(gradient)
    tilted, plain = dense(problem), dense(replace(problem, source=None))
    for given, (out, energy) in ((0 * source, plain), (source, tilted), (0 * source, plain)):
        for call in (gradient, compiled):
            for kind in (np.asarray, jnp.asarray):
                value, found = call(kind(given))
                close(found, out)
                close(value, energy.sum())


@pytest.mark.parametrize(
    ("shape", "dtype"),
    few_rows(
        [
            ((1, 1, 4096, 8, 2, 64), "float32"),
            ((1, 1, 4096, 8, 8, 32), "bfloat16"),
            ((1, 600, 1100, 4, 2, 32), "float32"),
        ]
    ),
    ids=["decode", "decode-bfloat16", "prefill"],
)
def test_gradient_is_the_kernel(shape, dtype):
    """`jax.grad` of F costing more than the kernel: a second pass, or a source of zeros in memory.

    The compiled programs are compared: operations, bytes, buffers, and every array that one makes and the other does
    not. A traced source, which must cost more, shows that the comparison sees it.
    """
    B, T, S, N, K, H = shape
    query, key = (jax.ShapeDtypeStruct(x, dtype) for x in ((B, T, N, H), (B, S, K, H)))

    def gradient(query, key, value, source=None, energy=False):
        def total(source):
            energy = ea.free_energy(query, key, value, source=source)
            return energy.sum(), energy

        zeros = np.zeros((B, T, N, H), dtype) if source is None else source
        found = jax.grad(total, has_aux=True)(zeros)
        return found if energy else found[0]

    def compile_(f, *more):
        return jax.jit(f).lower(query, key, key, *more).compile()

    def cost(compiled):
        analysis, memory = compiled.cost_analysis(), compiled.memory_analysis()
        sizes = [getattr(memory, f"{x}_size_in_bytes") for x in ("temp", "argument", "output")]
        return np.array([analysis["flops"], analysis["bytes accessed"], *sizes])

    def of_measure(query, key, value):
        F = ea.FreeEnergy().at(query, key, value)
        return jax.grad(lambda source: F(source).sum())(np.zeros((B, T, N, H), dtype))

    both = functools.partial(gradient, energy=True)
    with_energy = functools.partial(ea.attention, return_energy=True)
    by_hand = compile_(lambda *x: local_attention(*x).out)
    state = compile_(lambda *x: tuple(local_attention(*x)))
    same = [(f, by_hand) for f in (gradient, of_measure, ea.attention)]
    same += [(f, state) for f in (both, with_energy)]
    for function, kernel in same:
        compiled = compile_(function)
        np.testing.assert_allclose(cost(compiled), cost(kernel), rtol=0.02)
        extra = instructions(compiled) - instructions(kernel)
        assert not extra, f"makes arrays that the kernel does not: {extra}"
    traced = compile_(gradient, query)
    assert cost(traced)[0] > 1.2 * cost(by_hand)[0]
    assert instructions(traced) - instructions(by_hand)
