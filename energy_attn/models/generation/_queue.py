"""A queue of prompts: a row of the loop whose prompt is complete takes the next one."""

import functools
from collections import deque
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from energy_attn.distributed import SequenceParallel, fetch

from ._loop import Decoding, Loop, begin, read_or_verify
from ._stream import raise_error


def check_rows(rows: int, given: Any, parallel: SequenceParallel | None) -> None:
    """Raises `ValueError` where `rows` cannot serve a queue: inside `jax.jit`, or split over devices.

    `given` is what the programs take, and an array made here, which is traced inside `jax.jit`.
    """
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(given)):
        raise ValueError(
            "batch_size: wanted None or the number of prompts inside jax.jit, as the host refills "
            f"rows, got {rows}"
        )
    if parallel is not None and parallel.batch:
        raise ValueError(
            "batch_size: wanted None or the number of prompts where parallel.batch splits the rows "
            f"over {parallel.batch}, got {rows}"
        )


def serve(
    by: Decoding,
    tokens: Array,
    lengths: Array,
    rows: int,
    parallel: SequenceParallel | None,
    most: int,
    chunk_size: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
    """`text`, `start`, `lengths`, `counts` and `logprobs` of a `Loop` of all prompts, `rows` at a time.

    There are more prompts than rows. Raises the error of a listener.
    """
    prompts, starts = fetch((tokens, lengths))
    text = np.pad(prompts, ((0, 0), (0, most)))
    ends, counts = np.zeros_like(starts), np.zeros((3, len(prompts)), np.int32)
    logprobs = np.zeros(text.shape, np.float32) if by.sampling.is_scored else None

    def store(loop: Loop) -> np.ndarray:
        """Stores what is known so far; returns the rows that are complete."""
        known = fetch(loop._replace(cache=(), state=(), seen=()))
        raise_error(by.watch)
        text[known.numbers], ends[known.numbers] = known.text, known.lengths
        counts[:, known.numbers] = known.counts
        if logprobs is not None:
            logprobs[known.numbers] = known.logprobs
        return np.flatnonzero(known.left == 0)

    loop, free = None, deque(range(rows))
    for number, (prompt, length) in enumerate(zip(prompts, starts, strict=True)):
        if loop is not None and not free:
            loop = _run(by, loop, True)
            free.extend(store(loop))
        one = _begin(by, prompt, length, np.int32(number), parallel, most, chunk_size)
        loop = _put(_complete(one, rows) if loop is None else loop, one, np.int32(free.popleft()))
    assert loop is not None
    store(_run(by, loop, False))
    return text, starts, ends, counts, logprobs


@functools.partial(jax.jit, static_argnums=(4, 5, 6))
def _begin(
    by: Decoding,
    tokens: Array,
    length: Array,
    number: Array,
    parallel: SequenceParallel | None,
    most: int,
    chunk_size: int,
) -> Loop:
    """A loop of one row, which has read this prompt and chosen its first token."""
    slots, exact = len(tokens) + most, by.how.reproducible
    cache = by.model.empty_cache(1, slots, parallel=parallel, reproducible=exact)
    return begin(by, tokens[None], length[None], cache, most, chunk_size, number[None])


@functools.partial(jax.jit, donate_argnums=1)
def _run(by: Decoding, loop: Loop, is_waiting: Array | bool) -> Loop:
    """Runs passes until a row is complete, or all rows if no prompt is waiting."""

    def goes_on(loop: Loop) -> Array:
        incomplete = loop.left > 0
        return jnp.where(is_waiting, incomplete.all(), incomplete.any())

    return lax.while_loop(goes_on, functools.partial(read_or_verify, by), loop)


@functools.partial(jax.jit, static_argnums=1)
def _complete(one: Loop, rows: int) -> Loop:
    """A loop of `rows` complete rows, as large as those of `one`, which has a row.

    Raises `ValueError` if an array of the drafter's state has no axis of rows in front.
    """
    for x in jax.tree.leaves(one.state):
        if x.shape[:1] != (1,):
            raise ValueError(
                "drafter: wanted a state of arrays whose first axis is the batch, of which a queue "
                f"refills single rows, got one of shape {x.shape} for a row"
            )

    def repeated(x: Array) -> Array:
        return jnp.broadcast_to(x, (rows, *x.shape[1:]))

    loop = jax.tree.map(repeated, one._replace(counts=one.counts.T))
    return loop._replace(left=jnp.zeros_like(loop.left), counts=loop.counts.T)


@functools.partial(jax.jit, donate_argnums=0)
def _put(loop: Loop, one: Loop, row: Array) -> Loop:
    """The loop with this row, cache and all, in the place of another."""

    def put(x: Array, new: Array) -> Array:
        return lax.dynamic_update_slice_in_dim(x, new, row, 0)

    rows = jax.tree.map(put, loop._replace(counts=loop.counts.T), one._replace(counts=one.counts.T))
    return rows._replace(counts=rows.counts.T)
