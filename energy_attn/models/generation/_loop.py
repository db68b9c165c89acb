"""The loop over tokens: a pass of the model, what it accepts, and the same again."""

import functools
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from energy_attn.distributed.internal import positions_from
from energy_attn.kernels.internal import check_shape

from ...prefix_tree._accept import follow
from ...prefix_tree._sampling import warp
from ...prefix_tree._tree import check_tree, take
from ..llama._llama import Llama
from ._cache import LlamaCache
from ._continue import read_chunks, read_on
from ._drafters import AbstractDrafter, last_of
from ._stream import tell_wrote


class Sampling(eqx.Module):
    """How tokens are chosen: `key` is None for the likeliest one."""

    key: Any = None
    temperature: Any = None
    top_p: Any = None
    top_k: int | None = eqx.field(static=True, default=None)


class Loop(NamedTuple):
    """What a pass changes. The last known token is not in the cache: it is read next.

    Attributes:
        text: `[B, slots]`, prompt and what was generated.
        start: `[B]`, where the latter begins.
        known: `[B]`, how many tokens of it there are.
        left: `[B]`, how many are wanted; 0 behind a stop.
        cache: of the model, with all known tokens but the last.
        state: the drafter's.
        counts: `[3, B]`: passes, nodes drafted, nodes accepted.
    """

    text: Array
    start: Array
    known: Array
    left: Array
    cache: LlamaCache
    state: Any
    counts: Array


@functools.partial(jax.jit, static_argnums=(8, 9), donate_argnums=4)
def begin(
    model: Llama,
    drafter: AbstractDrafter | None,
    tokens: Array,
    lengths: Array,
    cache: LlamaCache,
    sampling: Sampling,
    stop: Array,
    watch: Array | None,
    most: int,
    chunk_size: int,
) -> Loop:
    """Reads the prompts, and chooses the first of `most` tokens of each row.

    A row whose prompt has no token, more than there are, or one outside the vocabulary, gets none.
    Raises nothing.
    """
    batch, time = tokens.shape
    there = jnp.arange(time, dtype=jnp.int32)[None] < lengths[:, None]
    outside = (tokens < 0) | (tokens >= model.config.vocab_size)
    wrong = (there & outside).any(1) | (lengths < 1) | (lengths > time)
    lengths = jnp.clip(lengths, 1, time)
    x, cache = read_chunks(model, tokens, cache, lengths, chunk_size, watch=watch)
    depth = jnp.zeros((batch, 1), jnp.int32)
    first = _choose(sampling, model.logits(x), lengths - 1, depth, 1)
    text = jnp.pad(tokens, ((0, 0), (0, most)))
    state = None if drafter is None else drafter.start(tokens, lengths, time + most, cache.parallel)
    left, counts = jnp.full(batch, most, jnp.int32), jnp.zeros((3, batch), jnp.int32)
    loop = Loop(text, lengths, lengths, jnp.where(wrong, 0, left), cache, state, counts)
    return _extended(loop, first, *_ended(first, jnp.minimum(loop.left, 1), stop), watch)


@functools.partial(jax.jit, donate_argnums=5)
def run(
    model: Llama,
    drafter: AbstractDrafter | None,
    sampling: Sampling,
    stop: Array,
    watch: Array | None,
    loop: Loop,
) -> Loop:
    """Pass after pass, until no row wants more. Raises as the drafter does."""

    def one(loop: Loop) -> Loop:
        if drafter is None:
            return _read(model, sampling, stop, watch, loop)
        return _verify(model, drafter, sampling, stop, watch, loop)

    return lax.while_loop(lambda loop: (loop.left > 0).any(), one, loop)


def _read(model: Llama, sampling: Sampling, stop: Array, watch: Array | None, loop: Loop) -> Loop:
    """One token of each row that wants one."""
    number = jnp.minimum(loop.left, 1)
    x, cache, _ = read_on(model, last_of(loop.text, loop.known), loop.cache, number)
    depth = jnp.zeros(x.shape[:2], jnp.int32)
    new = _choose(sampling, model.logits(x), loop.known - 1, depth, 1)
    none = jnp.zeros_like(number)
    loop = loop._replace(cache=cache, counts=loop.counts + jnp.stack([number, none, none]))
    return _extended(loop, new, *_ended(new, number, stop), watch)


def _verify(
    model: Llama,
    drafter: AbstractDrafter,
    sampling: Sampling,
    stop: Array,
    watch: Array | None,
    loop: Loop,
) -> Loop:
    """What the model accepts of a tree behind each row, and the token that it puts behind that."""
    tree, state = drafter.draft(loop.text, loop.known, loop.state)
    check_shape(
        "drafter: its tree's tokens", check_tree("drafter", tree).tokens, (len(loop.known), "L")
    )
    root = last_of(loop.text, loop.known)[:, 0]
    # Whatever was drafted, a pass goes on from the last token, and so by one at least.
    tokens = tree.tokens.astype(jnp.int32).at[:, 0].set(root)
    tree = tree._replace(tokens=tokens, size=jnp.maximum(tree.size, 1))
    levels = tree.unpacker.shape[2]
    # A token outside the vocabulary is never chosen; it must not be read as NaN, which all would see.
    known = tree._replace(tokens=jnp.clip(tokens, 0, model.config.vocab_size - 1))
    read = model.read_tree(known, loop.cache)
    choice = _choose(sampling, read.logits, loop.known - 1, tree.depth, levels)
    accepted = follow(tree, choice, root)
    each = jnp.arange(levels, dtype=jnp.int32)[None]
    behind_root = jnp.roll(take(tree.tokens, accepted.path), -1, 1)
    is_next = each == accepted.length[:, None] - 1
    new = jnp.where(is_next, accepted.token[:, None], behind_root)
    number, stopped = _ended(new, jnp.minimum(accepted.length, loop.left), stop)
    kept = jnp.minimum(number, accepted.length - 1)
    counts = jnp.stack([jnp.ones_like(kept), tree.size - 1, kept])
    counts = loop.counts + jnp.where((loop.left > 0)[None], counts, 0)
    # The root, and of the new tokens all but the last: that is the next root.
    cache = loop.cache.along(accepted.path, read, number)
    loop = loop._replace(cache=cache, state=state, counts=counts)
    return _extended(loop, new, number, stopped, watch)


def _ended(new: Array, number: Array, stop: Array) -> tuple[Array, Array]:
    """`number` cut behind the first of `new` that stops a row, and whether there is one."""
    each = jnp.arange(new.shape[1], dtype=jnp.int32)[None]
    stops = (new[:, :, None] == stop[None, None]).any(2) & (each < number[:, None])
    stopped = stops.any(1)
    return jnp.where(stopped, lax.argmax(stops, 1, jnp.int32) + 1, number), stopped


def _extended(loop: Loop, new: Array, number: Array, stopped: Array, watch: Array | None) -> Loop:
    """With the first `number` of `new` behind the text, of which `watch` is told."""
    places = positions_from(loop.known, number, new.shape[1])
    nowhere = jnp.int32(loop.text.shape[1])
    rows = jnp.arange(len(new), dtype=jnp.int32)[:, None]
    text = loop.text.at[rows, jnp.where(places < 0, nowhere, places)].set(new, mode="drop")
    goes_on = tell_wrote(watch, jnp.where(places < 0, -1, new))
    left = jnp.where(stopped | ~jnp.asarray(goes_on), 0, loop.left - number)
    return loop._replace(text=text, known=loop.known + number, left=left)


def _choose(sampling: Sampling, logits: Array, first: Array, depth: Array, levels: int) -> Array:
    """A token `[B, L]` after each node, `depth` positions behind `first` `[B]`.

    Nodes of one depth share their noise: whatever the tree, the text is that of one walk.
    """
    if sampling.key is None:
        return lax.argmax(logits, 2, jnp.int32)
    warped = warp(logits, sampling.temperature, sampling.top_k, sampling.top_p)

    def row(number: Array, first: Array) -> Array:
        key = jax.random.fold_in(sampling.key, number)
        places = first + jnp.arange(levels, dtype=jnp.int32)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, places)
        return jax.vmap(lambda key: jax.random.gumbel(key, warped.shape[2:], warped.dtype))(keys)

    noise = jax.vmap(row)(jnp.arange(len(logits), dtype=jnp.int32), first)
    return lax.argmax(warped + take(noise, depth), 2, jnp.int32)
