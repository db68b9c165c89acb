"""The safe softmax and the shifted energies of the paper's Appendix 11, against the definitions in NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import energy_attn as ea
from energy_attn.functional import shifted_energy
from tests.support.compare import close
from tests.support.naive import assert_close
from tests.support.reference import largest
from tests.support.selection import few

# Rows of five scores: ordinary ones, some hidden, one key left, all hidden, far from zero.
SCORES = np.random.default_rng(0).standard_normal((6, 5))
SCORES[1, ::2] = SCORES[2, 1:] = SCORES[3] = -np.inf
SCORES[4] += 500
SCORES[5] -= 500
DTYPES = ["float16", "bfloat16", "float32", "float64"]
every_dtype = pytest.mark.parametrize("dtype", few(DTYPES, "bfloat16", "float64"))


def softmax(scores):
    """`(P, F)` over the last axis, in long doubles."""
    scores = np.asarray(scores, np.longdouble)
    shift = scores.max(-1, keepdims=True, initial=-np.inf)
    shift = np.where(np.isfinite(shift), shift, 0)
    weights = np.exp(scores - shift)
    total = weights.sum(-1, keepdims=True)
    seen = total > 0
    total = np.where(seen, total, 1)
    return weights / total, np.where(seen, shift + np.log(total), -np.inf)[..., 0]


def wide(dtype):
    return np.float64 if dtype == "float64" else np.float32


def rounded(x, dtype):
    """The best possible result in float32 (float64), in `dtype`: the yardstick of errors."""
    return np.asarray(jnp.asarray(np.asarray(x, wide(dtype)), dtype))


def slack(dtype):
    """Some roundings of the largest term, in the dtype of the arithmetic; less than one in a narrower one."""
    return 4.0 if dtype == np.dtype(wide(dtype)).name else 0.25


@jax.jit
def derivatives(scores, cotangent, tangent):
    """P, its gradient, and the directional derivatives of both: of the gradient forward and in reverse."""

    def gradient(scores):
        return jax.vjp(ea.safe_softmax, scores)[1](cotangent)[0]

    found = ea.safe_softmax(scores), jax.jvp(ea.safe_softmax, (scores,), (tangent,))[1]
    second = jax.jvp(gradient, (scores,), (tangent,))[1], jax.vjp(gradient, scores)[1](tangent)[0]
    return *found, gradient(scores), *second


@every_dtype
def test_softmax_and_its_derivatives(dtype):
    """exp(−inf + inf) and 0/0 in a fully masked row: NaN, which `jax.nn.softmax` spreads to parameters."""
    scores = jnp.asarray(SCORES, dtype)
    rng = np.random.default_rng(1)
    cotangent, tangent = (jnp.asarray(rng.standard_normal(SCORES.shape), dtype) for _ in range(2))
    exact, _ = softmax(np.asarray(scores, float))
    c, t = (np.asarray(x, np.longdouble) for x in (cotangent, tangent))

    def along(direction):  # the derivative of P, a symmetric matrix, times `direction`
        return exact * (direction - (exact * direction).sum(-1, keepdims=True))

    mean = (exact * c).sum(-1, keepdims=True)
    second = along(t) * (c - mean) - exact * (along(t) * c).sum(-1, keepdims=True)
    wanted = exact, along(t), along(c), second, second
    names = "values", "forward mode", "gradient", "forward over reverse", "reverse over reverse"
    sizes = 1.0, largest(t), largest(c), 4 * largest(t) * largest(c), 4 * largest(t) * largest(c)
    found = derivatives(scores, cotangent, tangent)
    for name, mine, want, size in zip(names, found, wanted, sizes, strict=True):
        rough = rounded(want, dtype)
        size = size * slack(dtype)
        assert_close(mine, want, rough, magnitude=size, multiple=2, what=f"{dtype} {name}")
        assert not np.asarray(mine, float)[3].any(), f"{name} of a row without keys"


@pytest.mark.product
@pytest.mark.parametrize("axis", [-3, -1, 0, 1])
@pytest.mark.parametrize("shape", [None, (3, 1, 5), (4, 1), ()])
def test_axis_and_where(axis, shape):
    """A mask aligned to the wrong axis; NaN in what the mask hides, forward or backward."""
    rng = np.random.default_rng(2)
    scores = rng.standard_normal((3, 4, 5))
    where = None if shape is None else rng.random(shape) < 0.5
    hidden = np.zeros(scores.shape, bool)
    if where is not None:
        hidden = ~np.broadcast_to(where, scores.shape)
    below = np.where(hidden, np.nan, scores)

    @jax.jit
    def value_and_gradient(scores, cotangent):
        options = {"where": None if where is None else jnp.asarray(where), "axis": axis}
        value, back = jax.vjp(lambda s: ea.safe_softmax(s, **options), scores)
        return value, back(cotangent)[0], shifted_energy(scores, **options)

    cotangent = rng.standard_normal(scores.shape)
    given = jnp.asarray(below), jnp.asarray(cotangent)
    value, gradient, (energy, shift) = value_and_gradient(*given)
    exact, lse = softmax(np.moveaxis(np.where(hidden, -np.inf, scores), axis, -1))
    exact = np.moveaxis(exact, -1, axis)
    slope = exact * (cotangent - (exact * cotangent).sum(axis, keepdims=True))
    np.testing.assert_allclose(value, exact.astype(float), rtol=0, atol=1e-15)
    np.testing.assert_allclose(gradient, slope.astype(float), rtol=0, atol=1e-14)
    np.testing.assert_allclose(energy + shift, lse.astype(float), rtol=0, atol=1e-14)


@pytest.mark.smoke
def test_no_scores():
    """A maximum over nothing raises; a row of no keys is fully masked."""
    shapes = (0,), (3, 0), (0, 3)

    @jax.jit
    def run(*scores):
        return [(ea.safe_softmax(x), *shifted_energy(x)) for x in scores]

    for shape, (weights, energy, shift) in zip(shapes, run(*map(np.zeros, shapes)), strict=True):
        assert weights.shape == shape
        assert energy.shape == shift.shape == shape[:-1]
        assert np.isneginf(energy).all() and not np.asarray(shift).any()


# The three facts, for one row of scores s_a + ζ·v_a, which are differentiated in the source ζ.
S, V = (np.random.default_rng(3).standard_normal(shape) for shape in ((7,), (7, 3)))
SOURCE = np.array([0.3, -0.2, 0.1])


def tilted(source):
    return S + V @ source


def attention(source):
    return np.asarray(softmax(tilted(source))[0] @ np.asarray(V, np.longdouble), float)


@every_dtype
def test_adding_the_shift_restores_the_energy(dtype):
    """F′ reported for F is wrong by m; in float32 or wider even for narrow scores, and −∞ (not NaN) without keys."""
    scores = jnp.asarray(SCORES, dtype)
    given = jnp.asarray(np.linspace(-1, 1, 6), dtype)
    exact = softmax(np.asarray(scores, float))[1]
    naive = rounded(exact, wide(dtype).__name__)
    for shift in (None, given):
        energy, shift = jax.jit(shifted_energy)(scores, shift)
        assert energy.dtype == shift.dtype == wide(dtype)
        assert_close(energy + shift, exact, naive, magnitude=2e3, what=f"{dtype}, F′ + m")
        assert np.isneginf(energy[3]) and np.isfinite(shift[3])
    default = jax.jit(shifted_energy)(scores)
    np.testing.assert_array_equal(default.shift[:3], scores[:3].max(-1).astype(wide(dtype)))


def test_constant_shift_changes_no_gradient():
    """Fact 1: for a constant m, ∇F′ = ∇F = attention, to any order; e^{700} must not overflow on the way."""

    @jax.jit
    def first_and_second(source, shift=None):
        gradient = jax.grad(lambda source: shifted_energy(tilted(source), shift).energy)
        return gradient(source), jax.jacfwd(gradient)(source)

    weights = np.asarray(softmax(tilted(SOURCE))[0], float)
    centred = V - attention(SOURCE)[None]
    covariance = np.einsum("a,ai,aj->ij", weights, centred, centred)
    for shift in ((), (0.0,), (3.0,), (-700.0,)):
        # exponents s - m are rounded
        tolerance = max(1e-14, np.spacing(np.abs(sum(shift))))
        wanted = attention(SOURCE), covariance
        close(first_and_second(SOURCE, *shift), wanted, str(shift), tolerance)


def test_differentiating_through_the_maximum_gives_another_gradient():
    """Fact 3, where Appendix 11 errs: if m = max s may vary, ∇F′ is attention minus the value of the largest score."""

    def shifted(source):
        scores = tilted(source)
        return shifted_energy(scores, scores.max())

    @jax.jit
    def gradients(source):
        # the energy itself, m added back, has the right gradient whatever m depends on,
        # and the library's own shift is held constant
        return (
            jax.grad(lambda source: shifted(source).energy)(source),
            jax.grad(lambda source: sum(shifted(source)))(source),
            jax.grad(lambda source: shifted_energy(tilted(source)).energy)(source),
        )

    best, right = V[int(np.argmax(tilted(SOURCE)))], attention(SOURCE)
    wrong, *found = jax.device_get(gradients(SOURCE))
    close(wrong, right - best, tolerance=1e-14)
    assert largest(wrong - right) > 0.1  # not a matter of rounding
    close(found, [right, right], tolerance=1e-14)


def test_shifted_energy_without_keys():
    """−∞ − (−∞) in a hidden row: its gradients are zero, and second derivatives too, not NaN."""
    scores = jnp.asarray(SCORES)
    total = functools.partial(shifted_energy, shift=None)

    @jax.jit
    def first_and_second(scores):
        gradient = jax.grad(lambda s: total(s).energy.sum(where=jnp.isfinite(s.max(-1))))
        second = jax.jvp(gradient, (scores,), (jnp.ones_like(scores),))[1]
        return gradient(scores), second, jax.jacrev(lambda s: total(s).energy)(scores)

    gradient, second, jacobian = first_and_second(scores)
    close(gradient, softmax(SCORES)[0].astype(float), tolerance=1e-14)
    # Σ_b ∂²F/∂s_a∂s_b = 0: a common shift changes no probability
    close(second, np.zeros_like(SCORES), tolerance=1e-14)
    assert not np.asarray(jacobian[3]).any() and np.isfinite(np.asarray(jacobian)).all()
