"""The optimum that `map` and `saddle_attention` look for: its derivative, and where to start."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from energy_attn.kernels import AttentionState

from ..core._free_energy import Arrays, Calls, Parts
from ..observables._at_source import state_at


# The optimum is at z = ∇F(0), where the objective is -F(0) and the source is zero, for every
# regulariser and start. Its derivatives of every order are therefore those of ∇F(0) and -F(0),
# and the values that the solver found are returned unchanged.
def with_exact_derivative(
    calls: Calls, parts: Parts, value: Array, point: Array
) -> tuple[Array, Array]:
    """The value and point that a solver has found, with the derivatives of the exact ones."""
    found: Any = _with_exact_derivative(calls, parts, value, point)
    return found


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_exact_derivative(
    calls: Calls, parts: Parts, value: Array, point: Array
) -> tuple[Array, Array]:
    return value, point


def _forward(calls: Calls, parts: Parts, value: Array, point: Array) -> tuple[Any, Parts]:
    return with_exact_derivative(calls, parts, value, point), parts


def _backward(calls: Calls, parts: Parts, cotangent: tuple[Array, Array]) -> Any:
    value, point = cotangent
    _, pull_back = jax.vjp(lambda parts: state_at(calls, None, parts), parts)
    (found,) = pull_back(AttentionState(point, -value))
    return found, None, None


_with_exact_derivative.defvjp(_forward, _backward)


def default_start(calls: Calls, parts: Parts) -> Array:
    """The unweighted mean of the values that each row sees, a point of their hull.

    Raises as the kernels do.
    """
    return state_at(calls, None, tuple(map(_without_scores, parts))).out


def _without_scores(arrays: Arrays) -> Arrays:
    bias = arrays.bias
    if bias is not None:  # a bias of minus infinity hides a key
        bias = jnp.where(jnp.isneginf(bias), bias, 0.0)
    return arrays._replace(query=jnp.zeros_like(arrays.query), bias=bias)
