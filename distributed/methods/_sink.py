"""A sink, merged once with the state of all keys."""

from collections.abc import Callable, Sequence

from energy_attn.kernels import AttentionState
from energy_attn.kernels.internal import (
    Candidate,
    Operands,
    Settings,
    is_reproducible,
    with_sink,
)

from ._arguments import rounded


def beside_sink(
    run: Callable[[Settings, Operands], AttentionState],
    names: Sequence[Candidate],
    settings: Settings,
    operands: Operands,
) -> AttentionState:
    """`run(settings, operands)` of the keys alone, merged with the sink of the call, if it has one, and then rounded.

    Where bits are to be reproducible the sink is one more item of each row's fold, and is left to `run`.
    """
    if operands.sink is None or is_reproducible(names):
        return run(settings, operands)
    state = run(settings.needing(unrounded=True), operands._replace(sink=None))
    rows = operands.positioned(read=False).tokens.query_positions
    return rounded(with_sink(state, operands.sink, rows), operands, settings)
