"""The derivative that every forward-only kernel shares: recompute the scores in blocks."""

import functools
from collections.abc import Callable

import jax

from . import _blockwise
from ._arguments import Operands, Settings
from ._state import AttentionState

Forward = Callable[[Operands, Settings], AttentionState]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def flash(forward: Forward, settings: Settings, operands: Operands) -> AttentionState:
    """`forward` with the blockwise derivative: both `out` and `lse` are differentiable outputs.

    First derivatives cost O(T·block) memory. Reverse over reverse differentiates the blockwise
    backward and is right; forward mode through a custom_vjp raises JAX's `TypeError`, never a zero.
    Raises what `forward` raises.
    """
    return forward(operands, settings)


# Compiled as one: in a loop, JAX (0.8 to 0.10) confuses the arguments of the rule inside a rule
# with constants of the loop when it differentiates for the second time.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _save(
    forward: Forward, settings: Settings, operands: Operands
) -> tuple[AttentionState, tuple[Operands, AttentionState]]:
    # through `flash`, not `forward`: the saved state enters the backward and must itself be
    # differentiable when the backward is differentiated
    state: AttentionState = flash(forward, settings, operands)
    return state, (operands, state)


def _pull_back(
    forward: Forward,
    settings: Settings,
    saved: tuple[Operands, AttentionState],
    cotangent: AttentionState,
) -> tuple[Operands]:
    operands, state = saved
    return (_blockwise.backward(operands, settings, state, cotangent),)


flash.defvjp(_save, _pull_back)
