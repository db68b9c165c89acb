"""Conjugate, rate and mode of a union of keys under a tilt, against dense float64 NumPy over all keys at once.

The tilt is by `A`. With ζ for the source of a point z of the tilted measure, ∇F(A + ζ) = z:

    I_A(z) = z·ζ - F(A + ζ) + F(A) = KL(P_{A+ζ}‖P_A) = I(z) - z·A + F(A) - F(0).
"""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import energy_attn as ea
from energy_attn import masks
from energy_attn.bayes import gamma, saddle_attention
from energy_attn.distributed import SequenceParallel
from energy_attn.solvers import Newton, Optax
from tests.energy_attn.bayes.problem import CONVERGED, NO_KEYS, POINT, PROBLEM, SEEN, SOLID, kl
from tests.support.arrays import array
from tests.support.observables import measure
from tests.support.reference import dense, dense_vjp, rows

random = np.random.default_rng(0)
A, B = (0.7 * random.standard_normal(POINT.shape) for _ in range(2))
TILTED = replace(PROBLEM, source=A)
OUT, LSE = dense(TILTED)
EIGHT = Mesh(np.array(jax.devices()), ("x",))


def union(key, value, cuts=(4, 8), parallel=None, implementation=None):
    """The problem's measure as the union of measures over its keys between the cuts, the first over the mesh."""
    parts = []
    for keys in map(slice, (0, *cuts), (*cuts, None)):
        part = measure(
            jnp.asarray(PROBLEM.query),
            key[:, keys],
            value[:, keys],
            bias=jnp.asarray(PROBLEM.bias[..., keys]),
            mask=jnp.asarray(PROBLEM.mask[..., keys]),
            query_positions=jnp.asarray(PROBLEM.query_positions),
            key_positions=jnp.asarray(PROBLEM.key_positions[:, keys]),
            is_causal=True,
            parallel=None if parts else parallel,
            implementation=implementation,
        )
        parts.append(part)
    return functools.reduce(ea.Gibbs.merge, parts)


def rate_and_gradients(options, point, source, key, value):
    """The rate of a tilted union, and its gradients."""

    def total(point, source, key, value):
        solution = union(key, value, **options).tilt(source).rate(point)
        return jnp.where(SEEN, solution.value, 0.0).sum(), solution

    return jax.grad(total, (0, 1, 2, 3), has_aux=True)(point, source, key, value)


ARGUMENTS = tuple(map(array, (POINT, A, PROBLEM.key, PROBLEM.value)))


@pytest.fixture(scope="module")
def solved():
    """All that is asked of the measure, in one program."""

    @jax.jit
    def everything(point, source, key, value):
        F, here = union(key, value), jnp.asarray(B)
        tilted = F.tilt(source)
        attained = F.tilt(here).attention()
        return {
            "rate": rate_and_gradients({}, point, source, key, value),
            "conjugate": tilted.conjugate(point),
            "of attention": (attained, F(here), F.conjugate(attained), F.conjugate(point)),
            "map": tilted.map(regulariser=0.8),
            "saddle": saddle_attention(tilted, solver=Newton()),
            "gamma": gamma(tilted, here, point),
        }

    return jax.tree.map(np.asarray, everything(*ARGUMENTS))


def rate_is_right(gradients, solution):
    point, source, key, value = gradients
    assert (solution.result == np.where(SEEN, CONVERGED, NO_KEYS)).all()
    there = replace(PROBLEM, source=A + solution.source)
    some = SEEN[..., None]
    np.testing.assert_allclose(dense(there)[0], np.where(some, POINT, 0), atol=1e-9)
    wanted = kl(rows(there).weights, rows(TILTED).weights).transpose(0, 2, 1)
    np.testing.assert_allclose(solution.value, np.where(SEEN, wanted, np.inf), atol=1e-9)
    np.testing.assert_allclose(point, np.where(some, solution.source, 0), atol=1e-9)
    np.testing.assert_allclose(source, np.where(some, OUT - POINT, 0), atol=1e-9)
    zero, ones = np.zeros_like(POINT), np.ones(SEEN.shape)
    before, after = (dense_vjp(problem, zero, ones) for problem in (TILTED, there))
    np.testing.assert_allclose(key, before["key"] - after["key"], atol=1e-9)
    np.testing.assert_allclose(value, before["value"] - after["value"], atol=1e-9)


def optimum_is_right(solution):
    """At ∇F(A), with the value -F(A)."""
    assert (solution.result == np.where(SEEN, CONVERGED, NO_KEYS)).all()
    np.testing.assert_allclose(solution.point, OUT, atol=1e-8)
    np.testing.assert_allclose(solution.value, np.where(SEEN, -LSE, np.inf), atol=1e-9)


def gamma_is_right(value):
    """Γ_A(ζ, z) = ζ·z - F(A + ζ)."""
    wanted = (B * POINT).sum(-1) - dense(replace(PROBLEM, source=A + B))[1]
    np.testing.assert_allclose(value, np.where(SEEN, wanted, np.inf), atol=1e-12)


def test_two_parts():
    """Keys of one part that do not count, a tilt lost or counted twice: in the rate and its gradients, and in Γ."""
    options = {"cuts": (4,), "implementation": "reference"}

    @jax.jit
    def run(point, source, key, value):
        tilted = union(key, value, **options).tilt(source)
        rate = rate_and_gradients(options, point, source, key, value)
        return rate, gamma(tilted, jnp.asarray(B), point)

    rate, value = jax.tree.map(np.asarray, run(*ARGUMENTS))
    rate_is_right(*rate)
    gamma_is_right(value)


@pytest.mark.full
def test_three_parts(solved):
    """The same with the default kernels; a minimum of the rate at the attention of one part, or at that of no tilt."""
    rate_is_right(*solved["rate"])
    optimum_is_right(solved["saddle"])
    optimum_is_right(solved["map"])
    gamma_is_right(solved["gamma"])


@pytest.mark.full
def test_fenchel_young(solved):
    """F(ζ) + F*(z) ≥ ζ·z, and equality, with ζ as the source, at z = ∇F(ζ)."""
    attained, energy, conjugate, elsewhere = solved["of attention"]
    out, lse = dense(replace(PROBLEM, source=B))
    np.testing.assert_allclose(attained, out, atol=1e-12)
    np.testing.assert_allclose(energy, lse, atol=1e-12)
    np.testing.assert_allclose(conjugate.value[SEEN], ((B * out).sum(-1) - lse)[SEEN], atol=1e-9)
    np.testing.assert_allclose(conjugate.source[SOLID], B[SOLID], atol=1e-5)
    gap = lse[SEEN] + elsewhere.value[SEEN] - (B * POINT).sum(-1)[SEEN]
    assert gap.min() > -1e-12 and gap.max() > 0.1


@pytest.mark.full
def test_conjugate(solved):
    """F_A*(z) = I_A(z) - F(A), the supremum over sources of Γ_A."""
    rate, conjugate = solved["rate"][1], solved["conjugate"]
    np.testing.assert_allclose(conjugate.value[SEEN], (rate.value - LSE)[SEEN], atol=1e-9)
    np.testing.assert_array_equal(conjugate.source, rate.source)
    assert (solved["gamma"][SEEN] <= conjugate.value[SEEN] + 1e-12).all()


@pytest.mark.full
def test_steps_of_a_union_are_those_of_the_whole():
    """Another default regulariser, or start, for keys that are held in parts."""
    run = jax.jit(lambda F: F.map().stats)
    whole, parts = (run(union(*ARGUMENTS[2:], cuts=cuts)) for cuts in ((), (3,)))
    np.testing.assert_array_equal(parts["steps"], whole["steps"])
    np.testing.assert_allclose(parts["path"], whole["path"], atol=1e-8)


@pytest.mark.full
def test_outside_of_the_hull_of_the_union():
    """A certificate that separates the point from the values of one part alone."""
    value = jnp.asarray([0.0, 1.0, 2.0, 3.0]).reshape(4, 1, 1)
    zero = jnp.zeros((3, 1, 1))
    F = measure(zero, value[:2], value[:2]) | measure(zero, value[2:], value[2:])
    solution = F.rate(jnp.asarray([-0.5, 1.5, 3.5]).reshape(3, 1, 1))
    outside = ea.Result.outside_hull
    assert solution.result[:, 0].tolist() == [outside, CONVERGED, outside]
    np.testing.assert_allclose(solution.value[:, 0], [np.inf, 0, np.inf], atol=1e-12)
    assert solution.source[0] < 0 < solution.source[2]


@pytest.mark.full
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_one_part_over_eight_devices(kind):
    """Eight keys over the mesh and one beside them: a part that is merged on each device once more, or not at all."""
    mesh = Mesh(EIGHT.devices, EIGHT.axis_names, axis_types=(kind,))
    parallel = SequenceParallel(axes=("x",)) if kind == AxisType.Auto else None
    with jax.set_mesh(mesh):
        point, _, key, value = ARGUMENTS
        if kind == AxisType.Auto:
            options = {"parallel": parallel, "cuts": (8,)}
            run = jax.jit(functools.partial(rate_and_gradients, options))
            rate_is_right(*jax.tree.map(np.asarray, run(*ARGUMENTS)))
            return
        spread, beside = slice(8), slice(8, None)
        one = measure(
            jnp.asarray(PROBLEM.query),
            *(
                jax.device_put(x[:, spread], NamedSharding(mesh, P(None, "x")))
                for x in (key, value)
            ),
        )
        F = one | measure(jnp.asarray(PROBLEM.query), key[:, beside], value[:, beside])
        point = value.mean(1, keepdims=True).repeat(2, 2) + jnp.zeros_like(point)
        solution = jax.jit(lambda F: F.rate(point))(F)
        bare = replace(PROBLEM, bias=None, mask=None, is_causal=False)
        there = replace(bare, query_positions=None, key_positions=None, source=solution.source)
        np.testing.assert_allclose(dense(there)[0], point, atol=1e-9)
        with pytest.raises(NotImplementedError, match="solver: wanted energy_attn.solvers.Newton"):
            F.rate(point, solver=Optax(optax.sgd(0.1)))


@pytest.mark.full
def test_rules():
    """A rule with arrays in one part: of the derivatives too, of which it has none."""
    query, key, value = (jnp.asarray(x) for x in (PROBLEM.query, PROBLEM.key, PROBLEM.value))
    lengths = np.asarray([5, 3])
    shown = (np.arange(4) < lengths[:, None])[:, None, None]
    point = jnp.asarray(np.repeat(PROBLEM.value[:, :1] + PROBLEM.value[:, -1:], 2, 2) / 2)

    @jax.jit
    @functools.partial(jax.grad, has_aux=True)
    def run(query, mask):
        first = measure(query, key[:, :4], value[:, :4], mask=mask)
        F = first | measure(query, key[:, 4:], value[:, 4:])
        solution = F.rate(jnp.broadcast_to(point, POINT.shape))
        return solution.value.sum(), (solution.value, F.map().point)

    found = run(query, masks.Prefix(jnp.asarray(lengths)))
    wanted = run(query, jnp.asarray(shown))
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-9)
