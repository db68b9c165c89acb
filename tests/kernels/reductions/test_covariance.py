"""The monoid of covariance states: its laws, and agreement with covariances of unions of keys."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from energy_attn.kernels import AttentionState, CovarianceState, merge, merge_all

EMPTY = CovarianceState(jnp.zeros((3, 3)), jnp.zeros(3), jnp.asarray(-jnp.inf))
_merge = jax.jit(merge)


def state_of(scores: np.ndarray, values: np.ndarray) -> CovarianceState:
    """By the definition."""
    if scores.size == 0:
        return EMPTY
    lse = np.logaddexp.reduce(scores)
    weights = np.exp(scores - lse)
    out = weights @ values
    apart = values - out
    return CovarianceState(*map(jnp.asarray, ((weights[:, None] * apart).T @ apart, out, lse)))


def drawn(seed: int, keys: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.normal(0, 10, keys), rng.normal(5, 2, (keys, 3))


def close(a: CovarianceState, b: CovarianceState, tolerance=1e-12):
    for x, y in zip(a, b, strict=True):
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


@given(st.integers(0, 2**32), st.tuples(*[st.integers(0, 5)] * 3))
def test_laws(seed, sizes):
    """A merge that depends on order or grouping, or omits the distance between the means of its parts."""
    parts = [drawn(seed + i, size) for i, size in enumerate(sizes)]
    a, b, c = (state_of(*part) for part in parts)
    whole = state_of(*map(np.concatenate, zip(*parts, strict=True)))
    close(_merge(_merge(a, b), c), whole)
    close(_merge(a, _merge(b, c)), whole)
    close(merge_all(jax.tree.map(lambda *x: jnp.stack(x), a, b, c)), whole)
    for x, y in zip(_merge(a, b), _merge(b, a), strict=True):
        assert np.array_equal(x, y)  # bitwise: devices that exchange states must agree
    for some in (a, EMPTY):
        for merged in (_merge(some, EMPTY), _merge(EMPTY, some)):
            close(merged, some, 0)


def test_gradient_of_empty_parts():
    """A NaN in the derivative of a merge with empty parts, whatever their arrays hold."""
    some = state_of(*drawn(0, 4))
    hollow = CovarianceState(jnp.full((3, 3), jnp.nan), jnp.full(3, jnp.nan), EMPTY.lse)
    for parts in ((some, EMPTY), (EMPTY, EMPTY), (hollow, some)):
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *parts)

        def total(stacked):
            merged = merge_all(stacked)
            return sum(jnp.where(jnp.isfinite(x), x, 0.0).sum() for x in merged)

        gradient = jax.grad(total)(stacked)
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradient))


@pytest.mark.usefixtures("unchecked")
def test_bad_states():
    """Two kinds of state merged with each other, or covariances of two widths."""
    some = state_of(*drawn(0, 4))
    with pytest.raises(TypeError, match="b: wanted the kind of state of a, CovarianceState, got "):
        merge(some, AttentionState(*some[1:]))
    with pytest.raises(ValueError, match=r"a.covariance: wanted shape \(3, 3\), got "):
        merge(some._replace(covariance=jnp.zeros((3, 2))), some)
    with pytest.raises(TypeError, match="stacked.covariance: wanted a .* array, got int64"):
        merge_all(some._replace(covariance=jnp.zeros((3, 3), int)))


def test_batched():
    """Axes of the covariance mistaken for batch axes."""
    parts = [[state_of(*drawn(10 * i + j, 3)) for j in range(2)] for i in range(4)]
    rows = [jax.tree.map(lambda *x: jnp.stack(x), *row) for row in parts]
    together = merge_all(jax.tree.map(lambda *x: jnp.stack(x, 1), *rows), axis=-1)
    for j in range(2):
        alone = functools.reduce(merge, [row[j] for row in parts])
        close(jax.tree.map(lambda x, j=j: x[j], together), alone)
