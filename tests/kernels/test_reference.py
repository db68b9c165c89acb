"""The judge is judged: `reference.py` against finite differences, SciPy, and identities of the free energy."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from tests.support.masks import RULES
from tests.support.naive import assert_close, expected
from tests.support.problems import PROBLEMS, Problem, tangents
from tests.support.reference import (
    dense,
    dense_covariance,
    dense_hvp,
    dense_jvp,
    dense_vjp,
    rows,
    shifted,
    visible,
)

problems = pytest.mark.parametrize("problem", list(PROBLEMS.values()), ids=str)


def _cotangents(problem: Problem):
    rng, (out, lse) = problem.rng("judge"), dense(problem)
    return rng.standard_normal(out.shape), rng.standard_normal(lse.shape)


def _objective(problem: Problem, dout, dlse):
    """`<dout, out> + <dlse, lse>` over the rows that see a key."""
    out, lse = dense(problem, np.longdouble)
    return np.sum(dout * out) + np.sum(dlse * _finite(lse))


def _difference(function):
    """The derivative of `function` at 0 by central differences, extrapolated once: its error is O(step⁴)."""
    step = np.longdouble(2.0**-10)
    coarse, fine = ((function(h) - function(-h)) / (2 * h) for h in (step, step / 2))
    return np.asarray((4 * fine - coarse) / 3, np.float64)


def _directional(problem, direction, dout, dlse):
    """The derivative of the objective along `direction`."""
    return _difference(lambda h: _objective(shifted(problem, direction, h), dout, dlse))


def _finite(lse):
    return np.where(np.isneginf(lse), 0, lse)


@problems
def test_derivatives_against_finite_differences(problem):
    """A slip in the hand-derived rules would make every kernel's tests check the wrong thing."""
    dout, dlse = _cotangents(problem)
    gradient = dense_vjp(problem, dout, dlse)
    assert set(gradient) == set(problem.arrays)
    for name, array in problem.arrays.items():
        direction = problem.rng(name).standard_normal(array.shape)
        numeric = _directional(problem, {name: direction}, dout, dlse)
        assert gradient[name].shape == direction.shape
        found = np.sum(gradient[name] * direction)
        np.testing.assert_allclose(found, numeric, rtol=1e-8, atol=1e-8)
    direction = tangents(problem)

    def state(h):
        out, lse = dense(shifted(problem, direction, h), np.longdouble)
        return np.concatenate([out, _finite(lse)[..., None]], -1)

    dout, dlse = dense_jvp(problem, direction)
    numeric = _difference(state)
    np.testing.assert_allclose(np.concatenate([dout, dlse[..., None]], -1), numeric, atol=1e-8)


@pytest.mark.parametrize("name", ["everything", "grouped", "window_causal", "one_key"])
def test_closed_second_derivatives(name):
    """The differenced Hessian against closed forms: `∇²_ζ F = Cov_P(v)`, `∂_q ∇_ζ F = scale Cov_P(v, k)`."""
    problem = PROBLEMS[name]
    shape = (*problem.query.shape[:3], problem.value.shape[-1])
    if problem.source is None:
        problem = replace(problem, source=np.zeros(shape))
    r, along = rows(problem), problem.rng("along").standard_normal(shape)
    product = dense_hvp(problem, np.zeros_like(r.out), np.ones_like(r.lse), {"source": along})
    covariance = dense_covariance(problem)
    wanted = np.einsum("btnvw,btnw->btnv", covariance, along)
    np.testing.assert_allclose(product["source"], wanted, atol=1e-10)
    mean_key = np.einsum("bnts,bsnh->btnh", r.weights, r.key)
    value_along = np.einsum("bsnv,btnv->btsn", r.value, along)
    value_along -= np.einsum("btnv,btnv->btn", r.out, along)[:, :, None]
    centred = r.key[:, None] - mean_key[:, :, None]
    mixed = np.einsum("bnts,btsn,btsnh->btnh", r.weights, value_along, centred)
    np.testing.assert_allclose(product["query"], r.scale * mixed, atol=1e-10)


@problems
def test_against_scipy(problem):
    """The state by another hand: SciPy's softmax and logsumexp, row by row over the visible keys alone."""
    out, lse = dense(problem)
    r, mask = rows(problem), visible(problem)
    for b, n, t in np.ndindex(mask.shape[:3]):
        keys = mask[b, n, t] & np.isfinite(r.scores[b, n, t])
        if not keys.any():
            assert lse[b, t, n] == -np.inf and not out[b, t, n].any()
            continue
        group = n // (problem.query.shape[2] // problem.key.shape[2])
        scores = r.scores[b, n, t, keys]
        wanted = scipy.special.logsumexp(scores)
        np.testing.assert_allclose(lse[b, t, n], wanted, rtol=1e-13, atol=1e-13)
        exact = scipy.special.softmax(scores) @ problem.value[b, keys, group]
        np.testing.assert_allclose(out[b, t, n], exact, rtol=1e-10, atol=1e-12)


def test_visibility_by_loops():
    """An off-by-one in a window or a swapped left and right: the predicate evaluated pair by pair, as in the words."""
    for problem in PROBLEMS.values():
        seen = visible(problem)
        window = problem.local_window_size
        left, right = (window, window) if isinstance(window, int) else (window or (np.inf, np.inf))
        for b, n, t, s in np.ndindex(seen.shape):
            i = t if problem.query_positions is None else int(problem.query_positions[b, t])
            j = s if problem.key_positions is None else int(problem.key_positions[b, s])
            lengths = (problem.query_seq_lengths, t), (problem.key_value_seq_lengths, s)
            wanted = all(length is None or index < length[b] for length, index in lengths)
            wanted = wanted and i >= 0 and j >= 0 and i - left <= j <= i + right
            wanted = wanted and (j <= i or not problem.is_causal)
            if problem.query_segment_ids is not None:
                wanted = wanted and problem.query_segment_ids[b, t] == problem.key_segment_ids[b, s]
            if problem.rule is not None:
                wanted = wanted and RULES[problem.rule].sees(b, i, j)
            if problem.mask is not None:
                wanted = wanted and np.broadcast_to(problem.mask, seen.shape)[b, n, t, s]
            assert seen[b, n, t, s] == wanted, (problem, b, n, t, s)


def test_problems_cover_the_corners():
    """A list that loses its corners passes everything: rows that see nothing, some and all keys all occur."""
    states = {name: dense(problem)[1] for name, problem in PROBLEMS.items()}
    empty = {name for name, lse in states.items() if np.isneginf(lse).any()}
    corners = "window_diagonal ragged positions_causal mask bias_infinite everything no_keys"
    assert set(corners.split()) <= empty
    blind = {name for name, lse in states.items() if lse.size and np.isneginf(lse).all()}
    assert blind == {"no_keys", "mask_nothing"}
    assert len(PROBLEMS) >= 50


@pytest.mark.product
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["plain", "everything", "mask_nothing", "scale_negative_source"])
def test_naive_agrees(name, dtype):
    """A yardstick that is itself wrong forgives a wrong kernel `multiple` times its own mistake."""
    problem = PROBLEMS[name]
    exact, rough, magnitude = expected(problem, jnp.dtype(dtype), "both")
    for quantity, array in exact.items():
        rounded = np.asarray(rough[quantity]).astype(np.float64)
        eps = float(jnp.finfo(jnp.dtype(dtype)).eps)
        bound = 8 * eps * magnitude[quantity] * (1 + magnitude["scores"])
        blind = np.isneginf(array)
        np.testing.assert_array_equal(np.isneginf(rounded), blind)
        error = np.abs(np.where(blind, 0, rounded) - np.where(blind, 0, array).astype(np.float64))
        assert np.all(error <= bound), (quantity, np.max(error), bound)


def test_assert_close_fails():
    """A comparison that cannot fail: NaN, a wrong shape, dtype or infinity, and an error beyond the bound must."""
    exact = np.asarray([1.0, -np.inf, 3.0])
    rough = exact + np.asarray([1e-15, 0, 0])
    options = {"magnitude": 1.0, "what": "a test"}
    assert_close(rough, exact, rough, **options)
    for actual, complaint in (
        (np.asarray([1.0, -np.inf, np.nan]), "NaN"),
        (exact[:2], "shape"),
        (exact.astype(np.float32), "dtype"),
        (np.asarray([1.0, -1e300, 3.0]), "infinite"),
        (np.asarray([1.0, -np.inf, np.inf]), "infinite"),
        (np.asarray([1.0, np.inf, 3.0]), "infinite"),
        (exact + np.asarray([0, 0, 1e-12]), "exceeds"),
    ):
        with pytest.raises(AssertionError, match=complaint):
            assert_close(actual, exact, rough, **options)
