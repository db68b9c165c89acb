"""The time of a decoded byte and of its parts: programs with and without a part, timed in turn."""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from energy_attn.distributed import SequenceParallel

from ... import attention
from ._decode import Decoded, absent, compile_loop, copied, unmerged

_ROUNDS = 5


class TimedLoop(NamedTuple):
    """A compiled loop over bytes, its start, and the number of calls in a row."""

    decoded: Decoded
    loop: jax.stages.Compiled
    calls: int = 1


class Parts(NamedTuple):
    """The parts of the time of a byte over a mesh, in seconds."""

    # how much longer a step takes than one in which each device attends to its own keys, and nothing is merged
    merging: float
    attending: float  # the time of attention without merges, less that of attention on one device
    # the time of a step without attention, which every device computes, less that on one device. The three sum up to
    # the difference from one device.
    repeating: float
    calling: float  # how much longer a byte takes where each is a call of a program
    calling_one: float  # the same on one device


def parts(tree: Decoded, alone: Decoded, mesh: jax.sharding.Mesh, over: SequenceParallel) -> Parts:
    count = len(tree.tokens)

    def made(attend: Callable[..., Any], calls: int = 1) -> tuple[TimedLoop, TimedLoop]:
        with jax.set_mesh(mesh):
            sharded = _made(tree, over, attend, calls)
        return sharded, _made(alone, None, attend, calls)

    runs = {"tree": TimedLoop(tree, tree.loop), "alone": TimedLoop(alone, alone.loop)}
    runs["bare"], runs["bare alone"] = made(absent)
    runs["calls"], runs["calls alone"] = made(attention, count)
    with jax.set_mesh(mesh):
        runs["unmerged"] = _made(tree, over, unmerged)
    took = medians(runs)
    alone_attending = took["alone"] - took["bare alone"]
    return Parts(
        took["tree"] - took["unmerged"],
        took["unmerged"] - took["bare"] - alone_attending,
        took["bare"] - took["bare alone"],
        took["calls"] - took["tree"],
        took["calls alone"] - took["alone"],
    )


def _made(
    decoded: Decoded, over: SequenceParallel | None, attend: Callable[..., Any], calls: int = 1
) -> TimedLoop:
    count, model = len(decoded.tokens) // calls, decoded.start[0]
    return TimedLoop(decoded, compile_loop(model, decoded.slots, count, over, attend), calls)


def medians(runs: dict[str, TimedLoop]) -> dict[str, float]:
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(_ROUNDS):
        first = turn % len(runs)  # none is always the first
        for name in (*runs, *runs)[first : first + len(runs)]:
            seconds[name].append(_seconds(runs[name]))
    return {name: statistics.median(each) for name, each in seconds.items()}


def _seconds(run: TimedLoop) -> float:
    model, first, cache = run.decoded.start
    cache = jax.block_until_ready(copied(cache))
    began = time.perf_counter()
    for _ in range(run.calls):
        *_, cache = jax.block_until_ready(run.loop(model, first, cache))
    return (time.perf_counter() - began) / len(run.decoded.tokens)
