"""Benchmarks of observables, compared with dense formulas and one attention pass."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

import energy_attn

from .attention import SQUARE, Job, on_arrays
from .runner import ONE_PASS, OURS, Case

DENSE = "jax.numpy"


def _weights(query: Array, key: Array) -> tuple[Array, Array, Array]:
    """Scores and weights `[B, N, T, S]` and energies `[B, N, T]`, the plain way."""
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) / query.shape[-1] ** 0.5
    return scores, jax.nn.softmax(scores), jax.nn.logsumexp(scores, -1)


def _entropy(query: Array, key: Array, value: Array) -> Array:
    scores, weights, energy = _weights(query, key)
    return (energy - (weights * scores).sum(-1)).transpose(0, 2, 1)


def _heat_capacity(query: Array, key: Array, value: Array) -> Array:
    scores, weights, _ = _weights(query, key)
    mean = (weights * scores).sum(-1, keepdims=True)
    return (weights * (scores - mean) ** 2).sum(-1).transpose(0, 2, 1)


def _projections(query: Array, key: Array, value: Array) -> tuple[Array, Array]:
    """The weights, and the values along the query, which is the tangent, minus their mean."""
    _, weights, _ = _weights(query, key)
    projections = jnp.einsum("btnh,bsnh->bnts", query, value)
    return weights, projections - (weights * projections).sum(-1, keepdims=True)


def _covariance(query: Array, key: Array, value: Array) -> Array:
    weights, projections = _projections(query, key, value)
    return jnp.einsum("bnts,bsnh->btnh", weights * projections, value)


def _third(query: Array, key: Array, value: Array) -> Array:
    weights, projections = _projections(query, key, value)
    return (weights * projections**3).sum(-1).transpose(0, 2, 1)


def _gradient(entropy: Job) -> Job:
    return jax.grad(lambda q, k, v: entropy(q, k, v).sum(), argnums=(0, 1))


_at = energy_attn.FreeEnergy().at

# The job of each case: ours, and the formula.
JOBS: dict[str, tuple[Job, Job]] = {
    "entropy": (lambda *x: _at(*x).entropy(), _entropy),
    "gradient of entropy": (_gradient(lambda *x: _at(*x).entropy()), _gradient(_entropy)),
    "heat capacity": (lambda *x: _at(*x).score_moments().variance, _heat_capacity),
    "covariance product": (lambda q, k, v: _at(q, k, v).covariance(q), _covariance),
    "third cumulant": (lambda q, k, v: _at(q, k, v).cumulant((q, q, q)), _third),
}
CASES = tuple(
    Case(
        name,
        "float32",
        SQUARE,
        on_arrays({OURS: ours, DENSE: dense, ONE_PASS: energy_attn.attention}),
    )
    for name, (ours, dense) in JOBS.items()
)
