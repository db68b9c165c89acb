"""The monoid of covariance states: its laws, and agreement with covariances of unions of keys; and those of a call."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from energy_attn.kernels import AttentionState, CovarianceState, merge, merge_all
from energy_attn.kernels.internal import reductions
from tests.support.compare import close, same
from tests.support.problems import _make, call_of, cast
from tests.support.reference import dense, dense_covariance

EMPTY = CovarianceState(np.zeros((3, 3)), np.zeros(3), np.asarray(-np.inf))
_merge = jax.jit(merge)
_merge_all = jax.jit(merge_all, static_argnames="axis")


def stacked(*parts: CovarianceState, axis: int = 0) -> CovarianceState:
    return jax.tree.map(lambda *x: np.stack(x, axis), *parts)


def state_of(scores: np.ndarray, values: np.ndarray) -> CovarianceState:
    """By the definition."""
    if scores.size == 0:
        return EMPTY
    lse = np.logaddexp.reduce(scores)
    weights = np.exp(scores - lse)
    out = weights @ values
    apart = values - out
    return CovarianceState((weights[:, None] * apart).T @ apart, out, lse)


def drawn(seed: int, keys: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.normal(0, 10, keys), rng.normal(5, 2, (keys, 3))


@given(st.integers(0, 2**32), st.tuples(*[st.integers(0, 5)] * 3))
def test_laws(seed, sizes):
    """A merge that depends on order or grouping, or omits the distance between the means of its parts."""
    parts = [drawn(seed + i, size) for i, size in enumerate(sizes)]
    a, b, c = (state_of(*part) for part in parts)
    whole = state_of(*map(np.concatenate, zip(*parts, strict=True)))
    close(_merge(_merge(a, b), c), whole, tolerance=1e-12)
    close(_merge(a, _merge(b, c)), whole, tolerance=1e-12)
    close(_merge_all(stacked(a, b, c)), whole, tolerance=1e-12)
    same(_merge(a, b), _merge(b, a))  # devices that exchange states must agree
    for some in (a, EMPTY):
        for merged in (_merge(some, EMPTY), _merge(EMPTY, some)):
            same(merged, some)


def test_gradient_of_empty_parts():
    """A NaN in the derivative of a merge with empty parts, whatever their arrays hold."""
    some = state_of(*drawn(0, 4))
    hollow = CovarianceState(np.full((3, 3), np.nan), np.full(3, np.nan), EMPTY.lse)

    @jax.jit
    @jax.grad
    def gradient(parts):
        merged = merge_all(parts)
        return sum(jnp.where(jnp.isfinite(x), x, 0.0).sum() for x in merged)

    for parts in ((some, EMPTY), (EMPTY, EMPTY), (hollow, some)):
        found = gradient(stacked(*parts))
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(found))


@pytest.mark.usefixtures("unchecked")
def test_bad_states():
    """Two kinds of state merged with each other, or covariances of two widths."""
    some = CovarianceState(*map(jnp.asarray, state_of(*drawn(0, 4))))
    with pytest.raises(TypeError, match="b: wanted the kind of state of a, CovarianceState, got "):
        merge(some, AttentionState(*some[1:]))
    with pytest.raises(ValueError, match=r"a.covariance: wanted shape \(3, 3\), got "):
        merge(some._replace(covariance=jnp.zeros((3, 2))), some)
    with pytest.raises(TypeError, match="stacked.covariance: wanted a .* array, got int64"):
        merge_all(some._replace(covariance=jnp.zeros((3, 3), int)))


def test_batched():
    """Axes of the covariance mistaken for batch axes."""
    parts = [[state_of(*drawn(10 * i + j, 3)) for j in range(2)] for i in range(4)]
    together = _merge_all(stacked(*(stacked(*row) for row in parts), axis=1), axis=-1)
    for j in range(2):
        alone = functools.reduce(_merge, [row[j] for row in parts])
        close(jax.tree.map(lambda x, j=j: x[j], together), alone, tolerance=1e-12)


@pytest.mark.smoke
def test_covariance_of_a_call():
    """The middle of another key head's values, or that middle for a row that sees none."""
    problem = _make("covariance", T=4, N=4, K=2, V=3, local_window_size=(0, 1))
    away = np.arange(2 * 2 * 3).reshape(2, 1, 2, 3)
    mask = np.arange(4)[:, None] != 2
    problem = dataclasses.replace(problem, value=problem.value + away, mask=mask[None, None])
    arrays, _ = cast(problem, jnp.float64)

    @jax.jit
    def run(arrays):
        call = call_of(**arrays, **problem.options)
        return reductions.covariance(("reference",), call.settings, call.operands)

    close(run(arrays), (dense_covariance(problem), *dense(problem)))
