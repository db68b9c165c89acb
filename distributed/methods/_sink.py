"""A sink, merged once with the state of all keys."""

from jaxtyping import Array

from energy_attn.kernels import AttentionState
from energy_attn.kernels.internal import (
    CheckedCall,
    Settings,
    with_sink,
    with_unrounded_out,
    without_lengths,
)

from ._arguments import rounded, unbatched


def settings_beside(sink: Array | None, call: CheckedCall) -> Settings:
    """The settings of the keys of a call, whose state is rounded once it is merged with that of a sink."""
    return call.settings if sink is None else with_unrounded_out(call.settings)


def finished(state: AttentionState, sink: Array | None, call: CheckedCall) -> AttentionState:
    """The state of all keys of a call, merged with that of a checked sink, with a batch axis if the call had one."""
    if sink is not None:
        rows = without_lengths(call.operands).query_positions
        state = rounded(with_sink(state, sink, rows), call.operands, call.settings)
    return state if call.batched else unbatched(state)
