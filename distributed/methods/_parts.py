"""A call inside `jax.shard_map`, whose arrays are one device's part."""

from collections.abc import Callable, Sequence
from typing import Any

from jaxtyping import Array

from energy_attn.kernels import AttentionState
from energy_attn.kernels.internal import (
    Candidate,
    KernelOptions,
    Operands,
    Settings,
    check_sink,
)

from ..spec._arguments import Scores, check_local, unbatched
from ._sink import attend_with_sink


def attend_parts(
    run: Callable[[tuple[Candidate, ...], Settings, Operands], AttentionState],
    arrays: Sequence[Any],
    options: KernelOptions,
    sink: Array | None,
    *,
    queries: bool,
    scores: Callable[[Operands], Scores],
) -> AttentionState:
    """The state by `run`, with the sink, of arrays from query to mask.

    `queries` and `scores` are those of `check_local`. Raises as `check_local` and `run` do.
    """
    names, call = check_local(arrays, options, queries=queries, scores=scores)
    sink = check_sink(sink, arrays[0])
    state = attend_with_sink(lambda settings: run(names, settings, call.operands), call, sink)
    return state if call.batched else unbatched(state)
