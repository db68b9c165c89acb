"""The loop over tokens, and the queue of prompts in which a row whose prompt is complete takes the next one."""

import functools
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from energy_attn.distributed import SequenceParallel, fetch
from energy_attn.distributed.internal import positions_from
from energy_attn.kernels.internal import CallPolicy, call_policy, checks

from ...functional._by_rows import rows_of
from ...prefix_tree._accept import longest_chosen_path
from ...prefix_tree._tree import check_tree, gather_slots
from ..decoder._cache import DecoderCache, log_probabilities
from ..decoder._decoder import AbstractDecoder
from ..decoder._images import Images
from ..decoder._read import read_chunks, read_on
from ._drafters import AbstractDrafter, last_of
from ._sampling import Sampling, SeenTokens, choose, seen_in, with_new
from ._stream import raise_error, tell_read, tell_wrote


class Decoding(eqx.Module):
    """The inputs that all passes share."""

    model: AbstractDecoder
    drafter: (
        AbstractDrafter | None
    )  # drafts the tree that a pass verifies; None: a pass reads one token
    sampling: Sampling
    stop: Array  # `[number]`, the tokens that end a row
    watch: Array | None  # the number of a listener, or None
    reproducible: bool = eqx.field(static=True, default=False)

    @property
    def policy(self) -> CallPolicy:
        return call_policy(None, self.reproducible)

    @property
    def rows(self) -> Callable[..., Any]:
        return rows_of(self.policy)


class Loop(NamedTuple):
    """The state of the loop. The last known token is not in the cache: the next pass reads it."""

    text: Array  # `[B, slots]`, prompt and generated tokens
    start: Array  # `[B]`, the length of the prompt
    lengths: Array  # `[B]`, the number of known tokens
    left: Array  # `[B]`, the number of tokens still to generate; 0 after a stop
    cache: DecoderCache  # of the model, with all known tokens but the last
    state: Any  # of the drafter
    counts: Array  # `[3, B]`: passes, drafted nodes, accepted nodes
    numbers: Array | None = None  # `[B]`, the number of the prompt in each row; None: 0, 1, ...
    seen: SeenTokens = SeenTokens(None, None)  # the tokens that penalties count
    logprobs: Array | None = None  # `[B, slots]` float32, of the generated tokens, or None


@functools.partial(jax.jit, static_argnums=(4, 5), donate_argnums=3)
def begin(
    by: Decoding,
    tokens: Array,
    lengths: Array,
    cache: DecoderCache,
    most: int,
    chunk_size: int,
    numbers: Array | None = None,
    images: Images | None = None,
) -> Loop:
    """Reads the prompts, and chooses the first of at most `most` tokens of each row.

    With `numbers` of the prompts, chunks without a token are skipped. A row whose prompt has a length out of range, or
    a token outside the vocabulary, gets no tokens.
    """
    batch, time = tokens.shape
    exists = jnp.arange(time, dtype=jnp.int32)[None] < lengths[:, None]
    out_of_vocabulary = (tokens < 0) | (tokens >= by.model.config.vocab_size)
    invalid = (exists & out_of_vocabulary).any(1) | (lengths < 1) | (lengths > time)
    lengths = jnp.clip(lengths, 1, time)
    tell = functools.partial(tell_read, by.watch)
    is_ragged = numbers is not None
    options: Any = {"tell": tell, "is_ragged": is_ragged, "images": images}
    x, cache = read_chunks(by.model, tokens, cache, lengths, chunk_size, by.policy, **options)
    seen = seen_in(by.sampling, tokens, exists & ~out_of_vocabulary, by.model.config.vocab_size)
    logits = by.rows(by.model.logits, x)
    first = choose(by.sampling, by.rows, logits, seen, numbers, lengths - 1, None)
    text = jnp.pad(tokens, ((0, 0), (0, most)))
    drafter, slots = by.drafter, time + most
    state = None if drafter is None else drafter.start(tokens, lengths, slots, cache.parallel)
    left, counts = jnp.full(batch, most, jnp.int32), jnp.zeros((3, batch), jnp.int32)
    left = jnp.where(invalid, 0, left)
    logprobs = jnp.zeros(text.shape, jnp.float32) if by.sampling.is_scored else None
    loop = Loop(text, lengths, lengths, left, cache, state, counts, numbers, seen, logprobs)
    return _extended(by, loop, first, logits, jnp.minimum(left, 1))[0]


@functools.partial(jax.jit, donate_argnums=1)
def run(by: Decoding, loop: Loop, is_waiting: Array | bool | None = None) -> Loop:
    """Runs passes until all rows are complete, or one where a prompt is waiting; raises as the drafter does."""

    def goes_on(loop: Loop) -> Array:
        incomplete = loop.left > 0
        if is_waiting is None:
            return incomplete.any()
        return jnp.where(is_waiting, incomplete.all(), incomplete.any())

    one_pass = _read if by.drafter is None else _verify
    return lax.while_loop(goes_on, functools.partial(one_pass, by), loop)


def _read(by: Decoding, loop: Loop) -> Loop:
    number = jnp.minimum(loop.left, 1)
    x, cache, _ = read_on(by.model, last_of(loop.text, loop.lengths), loop.cache, number, by.policy)
    logits = by.rows(by.model.logits, x)
    new = choose(by.sampling, by.rows, logits, loop.seen, loop.numbers, loop.lengths - 1, None)
    zeros = jnp.zeros_like(number)
    loop = loop._replace(cache=cache, counts=loop.counts + jnp.stack([number, zeros, zeros]))
    return _extended(by, loop, new, logits, number)[0]


def _verify(by: Decoding, loop: Loop) -> Loop:
    """Adds the nodes of a drafted tree that the model accepts, and the token that it chooses next."""
    assert by.drafter is not None
    tree, state = by.drafter.draft(loop.text, loop.lengths, loop.state)
    checks.check_shape(
        "drafter: its tree's tokens", check_tree("drafter", tree).tokens, (len(loop.lengths), "L")
    )
    root = last_of(loop.text, loop.lengths)[:, 0]
    # The root is always the last token, so that a pass adds at least one token.
    tokens = checks.as_int32(tree.tokens).at[:, 0].set(root)
    tree = tree._replace(tokens=tokens, size=jnp.maximum(tree.size, 1))
    levels = tree.unpacker.shape[2]
    # Tokens outside the vocabulary are never accepted, but their NaN would spread to all nodes.
    clipped = tree._replace(tokens=jnp.clip(tokens, 0, by.model.config.vocab_size - 1))
    read = by.model.read_tree(clipped, loop.cache, reproducible=by.reproducible)
    first = loop.lengths - 1
    choice = choose(by.sampling, by.rows, read.logits, loop.seen, loop.numbers, first, clipped)
    accepted = longest_chosen_path(tree, choice, root)
    level = jnp.arange(levels, dtype=jnp.int32)[None]
    behind_root = jnp.roll(gather_slots(tree.tokens, accepted.path), -1, 1)
    is_next = level == accepted.length[:, None] - 1
    new = jnp.where(is_next, accepted.token[:, None], behind_root)
    logits = None if loop.logprobs is None else gather_slots(read.logits, accepted.path)
    most = jnp.minimum(accepted.length, loop.left)
    extended, number = _extended(by, loop, new, logits, most)
    num_accepted = jnp.minimum(number, accepted.length - 1)
    counts = jnp.stack([jnp.ones_like(num_accepted), tree.size - 1, num_accepted])
    counts = loop.counts + jnp.where((loop.left > 0)[None], counts, 0)
    # the root and all new tokens but the last, which is the next root
    cache = loop.cache.append_path(accepted.path, read, number)
    return extended._replace(cache=cache, state=state, counts=counts)


def _extended(
    by: Decoding, loop: Loop, new: Array, logits: Array | None, number: Array
) -> tuple[Loop, Array]:
    """Appends `number` of `new` tokens, chosen from `logits`, up to the first that ends a row; returns how many.

    A row ends at a token of `by.stop`, or where the listener, which is told of the tokens, says so.
    """
    index = jnp.arange(new.shape[1], dtype=jnp.int32)[None]
    stops = (new[:, :, None] == by.stop[None, None]).any(2) & (index < number[:, None])
    stopped = stops.any(1)
    number = jnp.where(stopped, lax.argmax(stops, 1, jnp.int32) + 1, number)
    if by.watch is not None:
        told = jnp.where(index < number[:, None], new, -1)
        is_last = stopped | (number >= loop.left)
        number, ended = tell_wrote(by.watch, told, is_last, loop.numbers)
        stopped |= ended
    slots = positions_from(loop.lengths, number, new.shape[1])
    outside = jnp.int32(loop.text.shape[1])
    rows = jnp.arange(len(new), dtype=jnp.int32)[:, None]
    place = rows, jnp.where(slots < 0, outside, slots)
    text = loop.text.at[place].set(new, mode="drop")
    logprobs = loop.logprobs
    if logprobs is not None and logits is not None:
        log_p = by.rows(log_probabilities, logits, new)
        logprobs = logprobs.at[place].set(log_p.astype(logprobs.dtype), mode="drop")
    left = jnp.where(stopped, 0, loop.left - number)
    seen = with_new(loop.seen, new, slots >= 0)
    lengths = loop.lengths + number
    loop = loop._replace(text=text, lengths=lengths, left=left, seen=seen, logprobs=logprobs)
    return loop, number


def serve(
    by: Decoding,
    tokens: Array,
    lengths: Array,
    rows: int,
    parallel: SequenceParallel | None,
    most: int,
    chunk_size: int,
) -> Loop:
    """Runs the loop for all prompts, `rows` at a time; returns it without caches, on the host."""
    prompts, starts = fetch((tokens, lengths))
    text = np.pad(prompts, ((0, 0), (0, most)))
    ends, counts = np.zeros_like(starts), np.zeros((3, len(prompts)), np.int32)
    logprobs = np.zeros(text.shape, np.float32) if by.sampling.is_scored else None

    def store(loop: Loop) -> np.ndarray:
        """Stores the rows known so far; returns those that are complete."""
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
            loop = run(by, loop, True)
            free.extend(store(loop))
        one = _begin(by, prompt, length, np.int32(number), parallel, most, chunk_size)
        loop = _put(_complete(one, rows) if loop is None else loop, one, np.int32(free.popleft()))
    assert loop is not None
    store(run(by, loop, False))
    return loop._replace(
        text=text, start=starts, lengths=ends, counts=counts, logprobs=logprobs, cache=(), state=()
    )


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
    slots, exact = len(tokens) + most, by.reproducible
    cache = by.model.empty_cache(1, slots, parallel=parallel, reproducible=exact)
    return begin(by, tokens[None], length[None], cache, most, chunk_size, number[None])


@functools.partial(jax.jit, static_argnums=1)
def _complete(one: Loop, rows: int) -> Loop:
    """A loop of `rows` complete rows, each as large as the row of `one`."""
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
    """Replaces a row of the loop, its cache included."""

    def put(x: Array, new: Array) -> Array:
        return lax.dynamic_update_slice_in_dim(x, new, row, 0)

    rows = jax.tree.map(put, loop._replace(counts=loop.counts.T), one._replace(counts=one.counts.T))
    return rows._replace(counts=rows.counts.T)
