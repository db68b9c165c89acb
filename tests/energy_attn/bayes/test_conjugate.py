"""The conjugate and the rate function, against the identities that define them, in dense float64 NumPy.

What the solver finds is judged, not how: that the tilted distribution `P_ζ` at the source has the point as its mean,
that the value is the relative entropy `KL(P_ζ‖P)`, and that no other distribution with that mean has less of it. The
derivatives are judged by the implicit function theorem, with the judge's own covariances and Jacobians.
"""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import energy_attn as ea
from energy_attn.distributed import SequenceParallel
from energy_attn.solvers import Newton, Optax
from tests.energy_attn.bayes.problem import (
    CONVERGED,
    INVERSE_TEMPERATURES,
    NO_KEYS,
    OUTSIDE,
    POINT,
    PROBLEM,
    SEEN,
    SOLID,
    kl,
    points_inside,
    random_keys,
)
from tests.support.compare import close
from tests.support.complaints import complains
from tests.support.observables import measure
from tests.support.problems import Problem
from tests.support.reference import dense, dense_covariance, dense_jvp, dense_vjp, rows, visible
from tests.support.selection import few

ONE_STEP = Newton(max_steps=1)


def gibbs(problem: Problem, **options):
    arrays = {name: jnp.asarray(x) for name, x in problem.arrays.items()}
    return measure(**arrays, **problem.options, **options)


def quickly(name, problem: Problem, point, solving=None, **options):
    """A method of the problem's measure, in one program."""

    def run():
        F = gibbs(problem, **options)
        return getattr(F, name)(jnp.asarray(point), **(solving or {}))

    return jax.tree.map(np.asarray, jax.jit(run)())


def rate(point, query, value):
    return gibbs(replace(PROBLEM, query=query, value=value)).rate(point)


def total(point, query, value):
    solution = rate(point, query, value)
    return jnp.where(SEEN, solution.value, 0.0).sum(), solution


@functools.cache
def of_points():
    """A program for the rate at points, and its gradients in them, the query and the values."""
    return jax.jit(jax.grad(total, (0, 1, 2), has_aux=True))


def solve(point):
    found = of_points()(point, jnp.asarray(PROBLEM.query), jnp.asarray(PROBLEM.value))
    return jax.device_get(found)


@pytest.fixture(scope="module")
def solved():
    """The rate at POINT and its gradients."""
    first, solution = solve(POINT)
    return solution, first


WEIGHTS = np.random.default_rng(1).standard_normal(POINT.shape)


@pytest.mark.smoke
def test_rate_is_relative_entropy(solved):
    """∇F(ζ) = z and I(z) = KL(P_ζ‖P) ≥ 0, in rows of every kind: a hull that is a point, a segment, a polygon; bias,
    mask, causality. A fully masked row has plus infinity, not NaN.
    """
    solution, _ = solved
    tilted, plain = (rows(replace(PROBLEM, source=x)).weights for x in (solution.source, None))
    wanted = np.where(SEEN, kl(tilted, plain).transpose(0, 2, 1), np.inf)
    close(solution.value, wanted, tolerance=1e-9)
    assert solution.value.min() > -1e-12
    out, _ = dense(replace(PROBLEM, source=solution.source))
    close(out, np.where(SEEN[..., None], POINT, 0), tolerance=1e-9)
    assert (solution.result == np.where(SEEN, CONVERGED, NO_KEYS)).all()


def test_gradients_are_those_at_the_source(solved):
    """∇I = ζ in the point; in query and value, F(0)'s gradient minus F(ζ)'s; zeros in fully masked rows."""
    solution, (point, query, value) = solved
    close(point, np.where(SEEN[..., None], solution.source, 0), tolerance=1e-9)
    zero = np.zeros_like(POINT)
    tilted = dense_vjp(replace(PROBLEM, source=solution.source), zero, np.ones(SEEN.shape))
    plain = dense_vjp(PROBLEM, zero, np.ones(SEEN.shape))
    close(query, plain["query"] - tilted["query"], tolerance=1e-9)
    close(value, plain["value"] - tilted["value"], tolerance=1e-9)


def pseudo_inverse(solution):
    covariance = dense_covariance(replace(PROBLEM, source=solution.source))
    return np.linalg.pinv(covariance, rcond=1e-9, hermitian=True)


def test_second_derivatives_are_implicit(solved):
    """∇²I = Σ⁻¹ in the point, and in point and query what follows from ∇F(ζ) = z, by the judge's Jacobian of ∇F."""
    solution, _ = solved

    @jax.jit
    @functools.partial(jax.grad, argnums=(0, 1))
    def slopes(point, query):
        found = rate(point, query, jnp.asarray(PROBLEM.value))
        return (found.source * WEIGHTS).sum()

    point, query = jax.device_get(slopes(jnp.asarray(POINT), jnp.asarray(PROBLEM.query)))
    inverse = pseudo_inverse(solution)
    wanted = np.einsum("btnvw,btnw->btnv", inverse, WEIGHTS)
    np.testing.assert_allclose(point[SOLID], wanted[SOLID], rtol=1e-6)
    np.testing.assert_allclose(point, wanted, atol=1e-6 * abs(wanted).max())
    assert abs(wanted[SOLID]).min() > 0
    tilted = replace(PROBLEM, source=solution.source)
    step = np.random.default_rng(3).standard_normal(PROBLEM.query.shape)
    moved, _ = dense_jvp(tilted, {"query": step})
    wanted = -np.einsum("btnv,btnvw,btnw->", WEIGHTS, inverse, moved)
    np.testing.assert_allclose((query * step).sum(), wanted, rtol=1e-7)


@pytest.mark.full
def test_outside_of_the_hull():
    """+inf and a hyperplane between the point and every value: off a point, off a segment, beyond a polygon."""
    rng = np.random.default_rng(4)
    outside = POINT + 5 * rng.standard_normal(POINT.shape)

    def total(point):
        solution = gibbs(PROBLEM).rate(point)
        finite = jnp.where(jnp.isfinite(solution.value), solution.value, 0.0)
        return finite.sum() + (solution.source**2).sum(), solution

    program = jax.jit(jax.grad(total, has_aux=True))
    gradient, solution = jax.tree.map(np.asarray, program(jnp.asarray(outside)))
    normal = np.asarray(solution.source)
    along = np.einsum("btnv,bsnv->bnts", normal, rows(PROBLEM).value)
    highest = np.where(visible(PROBLEM), along, -np.inf).max(-1).transpose(0, 2, 1)
    flagged = np.asarray(solution.result) == OUTSIDE
    separated = (normal * outside).sum(-1) > highest
    result = np.asarray(solution.result)
    assert flagged.sum() > 0.7 * SEEN.sum() and (result[~flagged & SEEN] == 0).all()
    assert separated[flagged].all() and np.isposinf(np.asarray(solution.value)[flagged]).all()
    assert not np.asarray(gradient)[flagged].any() and np.isfinite(np.asarray(gradient)).all()
    one = visible(PROBLEM).sum(-1).transpose(0, 2, 1) == 1
    assert flagged[one].all()


def test_regularised_is_the_moreau_envelope():
    """M_λ(z) = min_w {I(w) + |z - w|²/2λ}, attained at ∇F(ζ); finite outside the hull, where nothing is flagged.

    The conjugate is that less F(0), and its derivative in λ is -|ζ|²/2; of a fully masked row it is plus infinity.
    """
    strength = 0.7
    outside = POINT + np.random.default_rng(4).standard_normal(POINT.shape)

    @jax.jit
    @functools.partial(jax.grad, has_aux=True)
    def run(strength):
        solution = gibbs(PROBLEM).conjugate(jnp.asarray(outside), regulariser=strength)
        return jnp.where(SEEN, solution.value, 0.0).sum(), solution

    slope, solution = jax.device_get(run(strength))
    assert (np.asarray(solution.result)[SEEN] == CONVERGED).all()
    source = np.asarray(solution.source)
    close(slope, -0.5 * (source[SEEN] ** 2).sum(), "derivative in λ", 1e-9)
    nearest, _ = dense(replace(PROBLEM, source=source))

    def objective(source):
        tilted = replace(PROBLEM, source=source)
        rate = kl(rows(tilted).weights, rows(PROBLEM).weights).transpose(0, 2, 1)
        return rate + ((outside - dense(tilted)[0]) ** 2).sum(-1) / (2 * strength)

    np.testing.assert_allclose((nearest + strength * source)[SEEN], outside[SEEN], atol=1e-8)
    envelope = solution.value[SEEN] + dense(PROBLEM)[1][SEEN]
    np.testing.assert_allclose(envelope, objective(source)[SEEN], atol=1e-8)
    other = objective(source + 0.3 * np.random.default_rng(6).standard_normal(source.shape))
    assert (other[SOLID] > objective(source)[SOLID]).all()
    assert np.isposinf(solution.value[~SEEN]).all() and not source[~SEEN].any()


@pytest.mark.full
@pytest.mark.parametrize("optimiser", [optax.lbfgs(), optax.adam(0.1)], ids=["lbfgs", "adam"])
def test_solvers_of_optax(optimiser):
    """Every row is its own problem, with its own line search: rows of very different sizes are all solved."""
    problem = replace(PROBLEM, value=PROBLEM.value * np.array([1.0, 0.3])[:, None, None, None])
    point = points_inside(problem)
    solver = Optax(optimiser, max_steps=1000, tolerance=1e-5)
    found = quickly("rate", problem, point, {"solver": solver, "regulariser": 0.1})
    wanted = quickly("rate", problem, point, {"regulariser": 0.1})
    assert (np.asarray(found.result) == np.where(SEEN, CONVERGED, NO_KEYS)).all()
    np.testing.assert_allclose(found.value, wanted.value, atol=1e-7)
    assert len(np.unique(np.asarray(found.stats["steps"])[SEEN])) > 1


def scores_of(query, key) -> np.ndarray:
    """q·k of each seed, `[seeds, keys]`, in float64."""
    query, key = (np.asarray(x, np.float64)[:, :, 0] for x in (query, key))
    return np.einsum("bth,bsh->bs", query, key)


@pytest.fixture(scope="module", params=few(["float64", "float32"], "float32"))
def solver(request):
    """The dtype, and the rate of 50 rows of 64 keys of width 8, compiled once for all tests of figures."""

    @jax.jit
    def solve(point, query, key, value, scale, lengths):
        F = measure(query, key, value, scale=scale, key_value_seq_lengths=lengths)
        return F.rate(point, throw=False)

    def run(point, query, key, value, beta=1.0, lengths=64):
        scale = jnp.asarray(beta / np.sqrt(8), request.param)
        point = jnp.asarray(point, request.param)
        lengths = jnp.broadcast_to(jnp.asarray(lengths, jnp.int32), (50,))
        return jax.tree.map(np.asarray, solve(point, query, key, value, scale, lengths))

    return jnp.dtype(request.param), run


def test_newton_converges_from_hot_to_cold(solver):
    """50 of 50 rows at each inverse temperature, within the steps that were measured, and no NaN anywhere."""
    dtype, run = solver
    query, key, value, generators = random_keys(dtype)
    weights = np.stack([rng.dirichlet(np.ones(64)) for rng in generators])
    point = np.einsum("bs,bsv->bv", weights, np.asarray(value[:, :, 0], np.float64))[:, None, None]
    for beta, most in zip(INVERSE_TEMPERATURES, (4, 5, 7, 11, 19), strict=True):
        solution = run(point, query, key, value, beta)
        assert (solution.result == CONVERGED).all()
        assert np.median(solution.stats["steps"]) <= most
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(solution))


def test_vertices(solver):
    """At an extreme value I(v_a) = -log P_a, although no source attains it."""
    dtype, run = solver
    query, key, value, generators = random_keys(dtype)
    # extreme: the furthest along some direction
    normals = np.stack([rng.standard_normal(8) for rng in generators])
    values = np.asarray(value[:, :, 0], np.float64)
    chosen = np.einsum("bsv,bv->bs", values, normals).argmax(-1)
    point = values[np.arange(50), chosen][:, None, None]
    for beta in (0.25, 4.0, 64.0):
        solution = run(point, query, key, value, beta)
        scores = scores_of(query, key) * float(np.asarray(beta / np.sqrt(8), dtype))
        scores -= scores.max(-1, keepdims=True)
        log_share = scores[np.arange(50), chosen] - np.log(np.exp(scores).sum(-1))
        assert (solution.result == CONVERGED).all()
        tolerance = 1e-8 if dtype == np.float64 else 1e-3 + 3e-6 * abs(scores).max()
        np.testing.assert_allclose(solution.value[:, 0, 0], -log_share, atol=tolerance)


def test_certificates(solver):
    """150 of 150 points beyond an extreme value are flagged, near and far, hot and cold."""
    dtype, run = solver
    query, key, value, generators = random_keys(dtype)
    values = np.asarray(value[:, :, 0], np.float64)
    flagged = 0
    for beta, distance in ((1.0, 1.0), (16.0, 0.1), (4.0, 0.001)):
        normals = np.stack([rng.standard_normal(8) for rng in generators])
        normals /= np.linalg.norm(normals, axis=-1, keepdims=True)
        chosen = np.einsum("bsv,bv->bs", values, normals).argmax(-1)
        point = values[np.arange(50), chosen] + distance * normals
        solution = run(point[:, None, None], query, key, value, beta)
        flagged += (solution.result == OUTSIDE).sum()
        assert np.isposinf(solution.value).all()
        assert all(not np.isnan(x).any() for x in jax.tree.leaves(solution))
    assert flagged == 150


def test_few_keys(solver):
    """One to d + 1 keys, whose hull is a simplex of low dimension: right inside, flagged outside."""
    dtype, run = solver
    query, key, value, generators = random_keys(dtype)
    lengths = 1 + np.arange(50) % 9
    values = np.asarray(value[:, :, 0], np.float64)
    weights = np.stack([rng.exponential(size=64) for rng in generators])
    weights *= np.arange(64) < lengths[:, None]
    weights /= weights.sum(-1, keepdims=True)
    point = np.einsum("bs,bsv->bv", weights, values)
    inside = run(point[:, None, None], query, key, value, 1.0, lengths)
    assert (inside.result == CONVERGED).all()
    scores = scores_of(query, key) / np.sqrt(8)
    share = np.where(np.arange(64) < lengths[:, None], np.exp(scores), 0)
    share /= share.sum(-1, keepdims=True)
    # in a simplex one distribution alone has the mean
    tolerance = 1e-8 if dtype == np.float64 else 3e-4
    np.testing.assert_allclose(inside.value[:, 0, 0], kl(weights, share), atol=tolerance)
    off = np.stack([rng.standard_normal(8) for rng in generators])
    solid = lengths == 9  # that simplex fills the space: beyond its highest corner
    height = np.where(np.arange(64) < 9, np.einsum("bsv,bv->bs", values, off), -np.inf).argmax(-1)
    point = np.where(solid[:, None], values[np.arange(50), height], point) + 0.05 * off
    outside = run(point[:, None, None], query, key, value, 1.0, lengths)
    assert (outside.result == OUTSIDE).all()


def test_both_sides_of_a_facet(solver):
    """Near the middle of a facet of a cube: a little inside is solved, and a little outside flagged, not solved too."""
    dtype, run = solver
    corners = np.stack(np.meshgrid(*[[-1.0, 1.0]] * 6), -1).reshape(64, 6)
    value = jnp.asarray(np.pad(corners, ((0, 0), (0, 2)))[None, :, None].repeat(50, 0), dtype)
    query, key, *_ = random_keys(dtype)
    distance = np.logspace(-4, 0, 50) * np.where(np.arange(50) % 2, 1, -1)
    point = np.pad(np.full((50, 5), 0.3), ((0, 0), (1, 2)))
    point[:, 0] = 1 + distance
    solution = run(point[:, None, None], query, key, value)
    wanted = np.where(distance > 0, OUTSIDE, CONVERGED)
    np.testing.assert_array_equal(solution.result[:, 0, 0], wanted)


def test_units_and_origin_of_values_do_not_matter(solver):
    """Values a thousand times as large, or far from zero, take the same steps to the same rates."""
    dtype, run = solver
    query, key, value, generators = random_keys(dtype)
    weights = np.stack([rng.dirichlet(np.ones(64)) for rng in generators])

    def solve(value):
        point = np.einsum("bs,bsv->bv", weights, np.asarray(value[:, :, 0], np.float64))
        return run(point[:, None, None], query, key, value)

    plain = solve(value)
    for moved in (value * 1024, value / 1024, value + 4):
        solution = solve(moved)
        assert (solution.result == CONVERGED).all()
        assert abs(solution.stats["steps"] - plain.stats["steps"]).max() <= 1
        tolerance = 1e-9 if dtype == np.float64 else 1e-4
        np.testing.assert_allclose(solution.value, plain.value, atol=tolerance)


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_rounding_is_allowed_for(dtype):
    """With a tolerance of zero the solver stops at the rounding error and reports that it converged."""
    query, key, value, generators = random_keys(dtype, seeds=20)
    weights = np.stack([rng.dirichlet(np.ones(64)) for rng in generators])
    point = np.einsum("bs,bsv->bv", weights, np.asarray(value[:, :, 0], np.float64))
    point = jnp.asarray(point[:, None, None], dtype)
    exact = Newton(tolerance=0.0)
    program = jax.jit(lambda x: measure(query, key, value, scale=x).rate(point, solver=exact))
    for beta in INVERSE_TEMPERATURES:
        assert program(jnp.asarray(beta / np.sqrt(8), dtype)).converged.all()


@pytest.mark.full
def test_sixteen_bits_are_widened():
    """bfloat16 arrays are solved, and answered, in float32; so is an unbatched call."""
    given = POINT, PROBLEM.query, PROBLEM.key, PROBLEM.value
    arrays = [jnp.asarray(x[0], jnp.bfloat16) for x in given]
    program = jax.jit(lambda point, *arrays: measure(*arrays).rate(point))
    solution = program(*arrays)
    wide = program(*(x.astype(jnp.float32) for x in arrays))
    assert solution.value.dtype == solution.source.dtype == jnp.float32
    assert solution.value.shape == (5, 4)
    np.testing.assert_allclose(solution.value, wide.value, rtol=1e-4)


@pytest.mark.full
def test_failure_is_told():
    """A row that does not converge raises, in and out of jit; in a program with collectives its value is NaN."""
    value = jnp.arange(8.0)[None, :, None, None] * jnp.ones(3)[None, None, None]
    one = jnp.ones((1, 1, 1, 3))
    point, arrays = 6 * one, (one, value, value)
    with pytest.raises(RuntimeError, match="rate: the solver took all of max_steps"):
        measure(*arrays).rate(point, solver=ONE_STEP)
    with pytest.raises(Exception, match="rate: the solver took all of max_steps"):
        program = jax.jit(lambda: measure(*arrays).rate(point, solver=ONE_STEP).value)
        jax.block_until_ready(program())
    solution = measure(*arrays).rate(point, solver=ONE_STEP, throw=False)
    assert (np.asarray(solution.result) == ea.Result.max_steps_reached).all()
    assert np.isfinite(solution.value).all()
    with jax.set_mesh(Mesh(np.array(jax.devices()), ("x",))):
        F = measure(*arrays, parallel=SequenceParallel(axes=("x",)))
        program = jax.jit(lambda F: F.rate(point, solver=ONE_STEP).value)
        assert np.isnan(program(F)).all()


@pytest.mark.parametrize(
    ("changed", "error", "name", "received", "wanted"),
    [
        ({"point": None}, TypeError, "point", "None", "array"),
        ({"point": np.ones((2, 5, 4, 2), int)}, TypeError, "point", "int64", "float32"),
        ({"point": np.ones((2, 5, 4, 3))}, ValueError, "point", "float64[2,5,4,3]", "(2, 5, 4, 2)"),
        ({"regulariser": -1.0}, ValueError, "regulariser", "-1.0", "at least 0"),
        ({"regulariser": float("nan")}, ValueError, "regulariser", "nan", "finite"),
        ({"regulariser": "small"}, TypeError, "regulariser", "small", "real number"),
        ({"regulariser": np.ones(2)}, TypeError, "regulariser", "float64[2]", "real number"),
        ({"throw": None}, TypeError, "throw", "None", "True or False"),
    ],
)
def test_bad_input(changed, error, name, received, wanted, unchecked):
    """Each error names the argument, what was wanted and what it got."""
    F = gibbs(PROBLEM)
    for f in (F.conjugate, F.rate):
        complains(lambda f=f: f(**{"point": POINT, **changed}), error, name, received, wanted)
