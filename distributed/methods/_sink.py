"""A sink, merged once with the state of all keys."""

from energy_attn.kernels import AttentionState
from energy_attn.kernels.internal import (
    Operands,
    Settings,
    with_sink,
    with_unrounded_out,
    without_lengths,
)

from ._arguments import rounded


def keys_beside_sink(settings: Settings, operands: Operands) -> tuple[Settings, Operands]:
    """The call of the keys alone, whose state is rounded once it is merged with that of the sink."""
    if operands.sink is None:
        return settings, operands
    return with_unrounded_out(settings), operands._replace(sink=None)


def with_merged_sink(
    state: AttentionState, settings: Settings, operands: Operands
) -> AttentionState:
    """The state of all keys of a call, merged with that of its sink, if it has one."""
    if operands.sink is None:
        return state
    rows = without_lengths(operands).query_positions
    return rounded(with_sink(state, operands.sink, rows), operands, settings)
