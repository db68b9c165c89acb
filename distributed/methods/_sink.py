"""A sink, merged once with the state of all keys."""

from collections.abc import Callable

from jaxtyping import Array

from energy_attn.kernels import AttentionState
from energy_attn.kernels.internal import (
    CheckedCall,
    Settings,
    with_sink,
    with_unrounded_out,
    without_lengths,
)

from ._arguments import rounded


def attend_with_sink(
    run: Callable[[Settings], AttentionState], call: CheckedCall, sink: Array | None
) -> AttentionState:
    """`run(call.settings)`, the state of all keys of a call, merged with that of a checked sink."""
    if sink is None:
        return run(call.settings)
    rows = without_lengths(call.operands).query_positions
    state = with_sink(run(with_unrounded_out(call.settings)), sink, rows)
    return rounded(state, call.operands, call.settings)
