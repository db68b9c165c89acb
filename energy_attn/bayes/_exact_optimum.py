"""The optimum that `map` and `saddle_attention` look for: its derivative, and where to start."""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from energy_attn.kernels.internal import AbstractFunction, Operands, function_call

from ..functional._directions import directional
from ..functional._free_energy import Calls, Parts
from ..observables._at_source import state_at


# The optimum is at z = ∇F(0), where the objective is -F(0) and the source is zero, for every
# regulariser and start. Its derivatives of every order are therefore those of ∇F(0) and -F(0),
# and the values that the solver found are returned unchanged.
def with_exact_derivative(
    calls: Calls, parts: Parts, value: Array, point: Array
) -> tuple[Array, Array]:
    """The value and point that a solver has found, with the derivatives of the exact ones."""
    return function_call(_Optimum(calls), (parts, value, point))


@dataclasses.dataclass(frozen=True)
class _Optimum(AbstractFunction):
    calls: Calls

    def apply(self, args: tuple[Parts, Array, Array]) -> tuple[Array, Array]:
        return args[1:]

    def jvp(self, primals: tuple[Parts, Array, Array], tangents: Any) -> tuple[Any, Any]:
        found = function_call(self, primals)
        state = directional(functools.partial(state_at, self.calls, None), primals[0], tangents[0])
        return found, (None, None) if state is None else (-state[1].lse, state[1].out)


def default_start(calls: Calls, parts: Parts) -> Array:
    """The unweighted mean of the values that each row sees, a point of their hull.

    Raises as the kernels do.
    """
    return state_at(calls, None, tuple(map(_without_scores, parts))).out


def _without_scores(operands: Operands) -> Operands:
    bias = operands.bias
    if bias is not None:  # a bias of minus infinity hides a key
        bias = jnp.where(jnp.isneginf(bias), bias, 0.0)
    return operands._replace(query=jnp.zeros_like(operands.query), bias=bias)
