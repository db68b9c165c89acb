"""The choice of the next token: logits with bias and penalties, the largest or a draw."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from energy_attn.kernels.internal import lse_dtype

from ...prefix_tree import PrefixTree
from ...prefix_tree._sampling import process_logits
from ...prefix_tree._tree import gather_slots
from ._options import Sampling


class Seen(NamedTuple):
    """Which tokens each text has, `[B, V]`; None if nobody asks.

    Attributes:
        text: in the prompt or generated.
        generated: in what was generated.
    """

    text: Array | None
    generated: Array | None


def seen_in(sampling: Sampling, tokens: Array, exists: Array, vocab: int) -> Seen:
    """The tokens of prompts `[B, T]`, as far as they exist."""
    nothing = jnp.zeros((len(tokens), vocab), bool)
    text = None if sampling.repetition_penalty is None else _marked(nothing, tokens, exists)
    return Seen(text, None if sampling.presence_penalty is None else nothing)


def with_new(seen: Seen, new: Array, exists: Array) -> Seen:
    """The tokens seen, and `new` ones `[B, n]`, as far as they exist."""
    return Seen(*(None if x is None else _marked(x, new, exists) for x in seen))


def _marked(seen: Array, tokens: Array, exists: Array) -> Array:
    """`seen` `[B, V]`, and True at those of `tokens` `[B, n]` that exist."""
    rows = jnp.arange(len(seen), dtype=jnp.int32)[:, None]
    where = jnp.where(exists, tokens, seen.shape[1])
    return seen.at[rows, where].set(True, mode="drop")


def choose(
    sampling: Sampling,
    rows: Callable[..., Any],
    logits: Array,
    seen: Seen,
    numbers: Array | None,
    first: Array,
    tree: PrefixTree | None,
) -> Array:
    """The next token `[B, L]` of each node of a tree whose root is at position `first` `[B]`.

    Without a tree, of the root alone. Nodes of one depth share their noise, and penalties count their ancestors,
    so that the text does not depend on the tree.
    """
    logits = _penalized(sampling, logits, seen, tree)
    if sampling.key is None:
        return lax.argmax(logits, 2, jnp.int32)

    def process(logits: Array) -> Array:
        temperature, top_k = sampling.temperature, sampling.top_k
        return process_logits(logits, temperature, top_k, sampling.top_p, sampling.min_p)

    def draw(number: Array, position: Array) -> Array:
        key = jax.random.fold_in(jax.random.fold_in(sampling.key, number), position)
        return jax.random.gumbel(key, processed.shape[2:], processed.dtype)

    processed = rows(process, logits)
    if numbers is None:
        numbers = jnp.arange(len(logits), dtype=jnp.int32)
    levels = 1 if tree is None else tree.unpacker.shape[2]
    positions = first[:, None] + jnp.arange(levels, dtype=jnp.int32)[None]
    numbers = jnp.broadcast_to(numbers[:, None], positions.shape)
    noise = rows(jax.vmap(jax.vmap(draw)), numbers, positions)
    noise = noise if tree is None else gather_slots(noise, tree.depth)
    return lax.argmax(processed + noise, 2, jnp.int32)


def _penalized(sampling: Sampling, logits: Array, seen: Seen, tree: PrefixTree | None) -> Array:
    """Logits with the bias and the penalties, in float32 or wider; the same array without any."""
    dtype = lse_dtype(logits.dtype)
    if sampling.logit_bias is not None:
        logits = logits.astype(dtype) + sampling.logit_bias.astype(dtype)[None, None]
    if seen.text is not None:
        logits, penalty = logits.astype(dtype), jnp.asarray(sampling.repetition_penalty, dtype)
        repeated = jnp.where(logits < 0, logits * penalty, logits / penalty)
        logits = jnp.where(_along(seen.text, tree), repeated, logits)
    if seen.generated is not None:
        logits, penalty = logits.astype(dtype), jnp.asarray(sampling.presence_penalty, dtype)
        logits = jnp.where(_along(seen.generated, tree), logits - penalty, logits)
    return logits


def _along(seen: Array, tree: PrefixTree | None) -> Array:
    """The tokens `[B, L, V]` that each node sees: those of the text, its ancestors' and its own."""
    if tree is None:
        return seen[:, None]
    batch, slots = tree.tokens.shape
    nodes = jnp.repeat(seen, slots, axis=0)
    tokens = jnp.broadcast_to(tree.tokens[:, None], tree.mask.shape).reshape(-1, slots)
    return _marked(nodes, tokens, tree.mask.reshape(-1, slots)).reshape(batch, slots, -1)
