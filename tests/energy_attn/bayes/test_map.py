"""Attention as an optimum: of the smoothed rate function, a minimum; of Γ, a saddle."""

import functools
import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import energy_attn as ea
from energy_attn.bayes import gamma, saddle_attention
from energy_attn.solvers import Extragradient, Mirror, Newton, Optax, Optimistic
from papers.tree_attention.map import table
from tests.energy_attn.bayes.problem import (
    CONVERGED,
    INVERSE_TEMPERATURES,
    NO_KEYS,
    POINT,
    PROBLEM,
    SEEN,
    random_keys,
)
from tests.support.arrays import array
from tests.support.complaints import complains
from tests.support.observables import measure
from tests.support.reference import dense, dense_vjp, rows, visible
from tests.support.selection import few

ROOT = Path(__file__).resolve().parents[3]
OUT, LSE = dense(PROBLEM)
RESULT = np.where(SEEN, CONVERGED, NO_KEYS)
ARRAYS = {name: array(x) for name, x in PROBLEM.arrays.items()}


def gibbs(**changed):
    return measure(**ARRAYS | changed, **PROBLEM.options)


def solve(f, **options):
    def run():
        return f(gibbs(), **options)

    return jax.tree.map(np.asarray, jax.jit(run)())


@pytest.mark.parametrize(
    "solver",
    [
        Newton(tolerance=1e-9),
        pytest.param(Mirror(tolerance=1e-9), marks=pytest.mark.full),
        pytest.param(Optax(optax.lbfgs(), 64, 1e-9), marks=pytest.mark.full),
    ],
    ids=lambda solver: type(solver).__name__,
)
def test_minimiser_is_attention(solver):
    """Each solver ends at ∇F(0), with M_λ = -F(0) there and a zero source, from another point."""
    solution = solve(ea.Gibbs.map, solver=solver, regulariser=0.8)
    assert (solution.result == RESULT).all()
    np.testing.assert_allclose(solution.point, OUT, atol=1e-7)
    np.testing.assert_allclose(solution.source, np.zeros_like(OUT), atol=1e-7)
    np.testing.assert_allclose(solution.value, np.where(SEEN, -LSE, np.inf), atol=1e-9)
    path = solution.stats["path"][:, SEEN]
    assert path.shape[0] == 65 and (path[0] - path[-1]).max() > 0.05
    assert (np.diff(path, axis=0) <= 1e-9).all(), "the objective rises on its way"
    assert (solution.stats["inner_steps"][SEEN] > 0).any()


@pytest.mark.full
def test_start_is_the_plain_mean():
    """By default the path starts at the mean of the values that a row sees, for any scores."""
    seen = visible(PROBLEM) / np.maximum(visible(PROBLEM).sum(-1, keepdims=True), 1)
    mean = jnp.asarray(np.einsum("bnts,bsnv->btnv", seen, rows(PROBLEM).value))

    def run():
        solution = gibbs().map(regulariser=0.8)
        there = gibbs().conjugate(mean, regulariser=0.8)
        return solution.stats["path"][0], there.value

    found, wanted = jax.jit(run)()
    np.testing.assert_allclose(found, wanted, atol=1e-7)


@pytest.mark.full
@pytest.mark.parametrize("dtype", few(["float64", "float32"], "float64"))
def test_newton_needs_few_steps(dtype):
    """Exact attention to 1e-9 (1e-5 in float32) at each inverse temperature in 4 steps at most, by default and in any
    unit of the values; with a regulariser of 1, in 7.
    """
    query, key, value, _ = random_keys(dtype)

    @functools.partial(jax.jit, static_argnames="regulariser")
    def run(scale, regulariser, value=value):
        F = measure(query, key, value, scale=scale)
        return F.map(regulariser=regulariser, throw=False), F.attention()

    for beta in INVERSE_TEMPERATURES:
        scale = jnp.asarray(beta / np.sqrt(8), dtype)
        for regulariser, median, most in ((1.0, 4, 7), (None, 3, 4)):
            solution, exact = run(scale, regulariser)
            steps = np.asarray(solution.stats["steps"])
            assert (np.asarray(solution.result) == CONVERGED).all()
            assert np.median(steps) <= median and steps.max() <= most and (steps <= 5).mean() >= 0.9
            error = abs(np.asarray(solution.point) - np.asarray(exact)).max()
            assert error <= (1e-9 if dtype == "float64" else 1e-5)
        # by a power of two, so that nothing is rounded otherwise
        larger, _ = run(scale, None, 256 * value)
        np.testing.assert_array_equal(larger.stats["steps"], solution.stats["steps"])


@pytest.mark.parametrize("f", [ea.Gibbs.map, saddle_attention])
def test_derivatives_are_those_of_attention(f):
    """The optimum moves as ∇F(0) does, and its value as -F(0): no derivative is lost in the solver, nor in rows
    without keys.
    """
    rng = np.random.default_rng(0)
    weights, slopes = rng.standard_normal(OUT.shape), rng.standard_normal(LSE.shape)
    slopes = np.where(SEEN, slopes, 0)

    def total(query, value):
        solution = f(gibbs(query=query, value=value))
        energy = jnp.where(SEEN, solution.value, 0.0)
        return (solution.point * weights).sum() + (energy * slopes).sum()

    found = jax.jit(jax.grad(total, (0, 1)))(ARRAYS["query"], ARRAYS["value"])
    wanted = dense_vjp(PROBLEM, weights, -slopes)
    for gradient, name in zip(found, ("query", "value"), strict=True):
        np.testing.assert_allclose(gradient, wanted[name], atol=1e-9)


def test_gamma_is_what_it_says():
    """Γ = ζ·z - F(ζ) of each query and head, and its gradients; plus infinity in fully masked rows, and no NaN."""
    source = np.random.default_rng(1).standard_normal(POINT.shape)
    out, lse = dense(replace(PROBLEM, source=source))

    def total(source, point):
        value = gamma(gibbs(), source, point)
        return jnp.where(SEEN, value, 0.0).sum(), value

    program = jax.jit(jax.grad(total, (0, 1), has_aux=True))
    slopes, value = program(jnp.asarray(source), jnp.asarray(POINT))
    wanted = np.where(SEEN, (source * POINT).sum(-1) - lse, np.inf)
    np.testing.assert_allclose(value, wanted, atol=1e-9)
    some = SEEN[..., None]
    np.testing.assert_allclose(slopes[0], np.where(some, POINT - out, 0), atol=1e-9)
    np.testing.assert_allclose(slopes[1], np.where(some, source, 0), atol=1e-9)


@pytest.mark.parametrize(
    "solver",
    few([Extragradient, Optimistic, Newton], Extragradient, Newton),
    ids=lambda solver: solver.__name__,
)
def test_saddle_is_attention(solver):
    """Each solver ends at (0, ∇F(0)) from elsewhere, where Γ = -F(0); Newton's takes two steps."""
    start = tuple(jnp.asarray(x) for x in (0.3 * POINT[..., ::-1], POINT))
    solution = solve(saddle_attention, solver=solver(tolerance=1e-7), start=start)
    assert (solution.result == RESULT).all()
    np.testing.assert_allclose(solution.point, OUT, atol=1e-6)
    np.testing.assert_allclose(solution.source, np.zeros_like(OUT), atol=1e-6)
    np.testing.assert_allclose(solution.value, np.where(SEEN, -LSE, np.inf), atol=1e-6)
    if solver is Newton:
        assert solution.stats["steps"].max() == 2


@pytest.mark.full
def test_extragradient_finds_its_step():
    """From hot to cold, 50 of 50 rows converge with adaptive steps."""
    query, key, value, _ = random_keys("float64")

    @jax.jit
    def run(scale):
        F = measure(query, key, value, scale=scale)
        solution = saddle_attention(F, solver=Extragradient(tolerance=1e-8), throw=False)
        return solution, F.attention()

    for beta in INVERSE_TEMPERATURES:
        solution, exact = run(jnp.asarray(beta / np.sqrt(8)))
        assert (np.asarray(solution.result) == CONVERGED).all()
        np.testing.assert_allclose(solution.point, exact, atol=1e-6)


@pytest.mark.parametrize(
    ("f", "name"),
    [
        (ea.Gibbs.map, "path"),
        (saddle_attention, "residual"),
        (lambda F, **options: F.conjugate(jnp.asarray(POINT), **options), "path"),
    ],
    ids=["map", "saddle_attention", "conjugate"],
)
def test_statistics_have_no_derivative(f, name):
    """A zero in place of a derivative that does not exist, for example with a residual in a loss."""

    def total(query):
        solution = f(gibbs(query=query), solver=Newton(max_steps=1), throw=False)
        return jnp.where(jnp.isfinite(solution.stats[name]), solution.stats[name], 0.0).sum()

    with pytest.raises(RuntimeError, match=f"stats: wanted no derivative, .* got one of {name}"):
        jax.make_jaxpr(jax.grad(total))(ARRAYS["query"])


def test_figures_are_those_in_the_page():
    """The table in docs/bayes.md shows the measured figures, and the page's statements about them hold."""
    figures = json.loads((ROOT / "papers/tree_attention/map.json").read_text(encoding="utf-8"))
    page = (ROOT / "docs" / "bayes.md").read_text(encoding="utf-8")
    assert table(figures) in page
    most = {"float64": 1e-9, "float32": 1e-5}
    for row in figures["rows"]:
        assert row["conjugate, Newton"]["converged"] == row["outside"] == figures["seeds"] == 50
        for name in ("MAP, Newton", "MAP, Newton, λ = 1", "MAP, mirror descent"):
            assert row[name]["converged"] == 50 and row[name]["error"] <= most[row["dtype"]]
        assert row["MAP, Newton"]["most"] <= 4


@pytest.mark.parametrize(
    ("f", "changed", "error", "name", "received", "wanted"),
    [
        (ea.Gibbs.map, {"regulariser": 0.0}, ValueError, "regulariser", "0.0", "above 0"),
        (ea.Gibbs.map, {"regulariser": -1}, ValueError, "regulariser", "-1", "above 0"),
        (ea.Gibbs.map, {"start": array(np.ones(3))}, ValueError, "start", "[3]", "(2, 5, 4, 2)"),
        (ea.Gibbs.map, {"throw": 1}, TypeError, "throw", "int 1", "True or False"),
        (saddle_attention, {"start": 1.0}, TypeError, "start", "1.0", "pair"),
        (gamma, {"source": 1.0, "point": 1.0}, TypeError, "source", "1.0", "array"),
    ],
)
def test_bad_input(f, changed, error, name, received, wanted, unchecked):
    """Each error names the argument, what was wanted and what it got."""
    complains(lambda: f(gibbs(), **changed), error, name, received, wanted)
