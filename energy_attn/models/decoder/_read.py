"""The forward passes of a decoder: without a cache, with one, in chunks, and of a tree."""

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from energy_attn import attention
from energy_attn.distributed import ForkedCache, KVCache, SequenceParallel
from energy_attn.distributed.internal import (
    check_counts,
    check_mesh,
    check_reach,
    positions_from,
    split_along,
)
from energy_attn.kernels.internal import (
    as_int32,
    check_broadcastable,
    check_int32,
    check_shape,
    received,
)

from ...functional._tag import placed, recorders
from ...prefix_tree import PrefixTree, tree_decode
from ._cache import DecoderCache, Trace, TreeOutput, check_cache, growing, joined
from ._config import AbstractModel
from ._paths import attend_paths
from ._see import PLAIN, How


class AbstractLayers(AbstractModel):
    """The parts of a decoder that its forward passes run, as `AbstractDecoder` describes them."""

    embed_tokens: eqx.AbstractVar[Any]
    layers: eqx.AbstractVar[tuple[Callable[..., Any], ...]]
    norm: eqx.AbstractVar[Any]

    @abc.abstractmethod
    def rope(self, positions: Int[Array, "batch time"], length: int) -> Any:
        """The rotary embedding at these positions of a text of at most `length` tokens, as the layers take it."""

    @abc.abstractmethod
    def logits(self, x: Float[Array, "batch time width"]) -> Float[Array, "batch time vocab"]:
        """The output projection of normed hidden states, in float32 or wider."""


def read_alone(
    model: AbstractLayers,
    tokens: Array,
    positions: Array | None,
    parallel: SequenceParallel | None,
    how: How,
) -> tuple[Array, Trace]:
    """Final hidden states of tokens that see each other causally, and a trace of attention."""
    batch, time = check_tokens("tokens", tokens).shape
    token_positions = jnp.arange(time, dtype=jnp.int32)[None]
    if positions is not None:
        token_positions = positions = as_int32(check_tokens("positions", positions))
        check_broadcastable("positions", token_positions, (batch, time))
    rope = how.rows(lambda x: model.rope(x, time), token_positions)

    def see(query: Array, key: Array, value: Array, **options: Any) -> tuple[Array, Trace]:
        out, energy = how.attend(
            query,
            key,
            value,
            **options,
            is_causal=True,
            query_positions=positions,
            key_positions=positions,
            parallel=parallel,
            return_energy=True,
        )
        return out, Trace(query, out, energy)

    x, traces = how.rows(model.embed_tokens, tokens), []
    for i, layer in enumerate(model.layers):
        with placed(f"layers[{i}]"):
            x, trace = layer(x, rope, how.see(see, parallel))
        traces.append(trace)
    return how.rows(model.norm, x), joined(traces)


def read_on(
    model: AbstractLayers,
    tokens: Array,
    cache: DecoderCache,
    counts: Array,
    how: How = PLAIN,
    *,
    split: bool = False,
) -> tuple[Array, DecoderCache, Trace]:
    """Final hidden states of tokens that follow those of the cache, the new cache, and a trace.

    The cache has room for `counts` tokens of each row. With `split`, each of the cache's devices
    reads its share of the tokens, whose number they divide; otherwise every device reads them all.
    """
    parallel = cache.parallel
    positions = positions_from(cache.lengths, counts, tokens.shape[1])
    x = how.rows(model.embed_tokens, tokens)
    if split and parallel is not None:
        parallel = dataclasses.replace(parallel, queries_sharded=True)
        x, positions = (split_along(array, 1, parallel) for array in (x, positions))
    rope = how.rows(lambda x: model.rope(x, cache.length), positions)
    layers, traces = [], []
    for i, (layer, stored) in enumerate(zip(model.layers, cache.layers, strict=True)):

        def see(
            query: Array,
            key: Array,
            value: Array,
            stored: KVCache | ForkedCache = stored,
            **options: Any,
        ) -> tuple:
            stored = stored._written(key, value, counts)
            if isinstance(stored, ForkedCache):
                options |= _options_of(how.attend)
                out, energy = stored.attend(query, query_positions=positions, **options)
                return out, (stored, Trace(query, out, energy))
            reach = check_reach(options.pop("local_window_size", None), stored.window)
            out, energy = how.attend_to(stored)(
                query,
                stored.keys(),
                stored.values(),
                **options,
                is_causal=True,
                local_window_size=reach,
                query_positions=positions,
                key_positions=stored.positions,
                parallel=parallel,
                return_energy=True,
            )
            return out, (stored, Trace(query, out, energy))

        with placed(f"layers[{i}]"):
            x, (stored, trace) = layer(x, rope, how.see(see, parallel if split else None))
        layers.append(stored)
        traces.append(trace)
    return how.rows(model.norm, x), cache.with_layers(layers), joined(traces)


def _options_of(attend: Callable[..., Any]) -> dict[str, Any]:
    """The options of `attention`, or of a `functools.partial` of it, for the attention over a fork.

    Raises `ValueError` for another function, and `NotImplementedError` where energies are recorded.
    """
    if recorders.value:
        raise NotImplementedError(
            "cache: wanted one that is no fork where energies are recorded, got a ForkedCache"
        )
    if attend is attention:
        return {}
    if isinstance(attend, functools.partial) and attend.func is attention and not attend.args:
        return attend.keywords
    raise ValueError(
        "attend: wanted attention, or a functools.partial of it with options, beside a cache that is "
        f"a fork, got {received(attend)}"
    )


def read_chunks(
    model: AbstractLayers,
    tokens: Array,
    cache: DecoderCache,
    counts: Array,
    chunk_size: int,
    how: How = PLAIN,
    tell: Callable[[Array | int], None] = lambda number: None,
    is_ragged: bool = False,
) -> tuple[Array, DecoderCache]:
    """The final hidden state of each row's last token, `[B, 1, D]`, and the cache with all tokens.

    Reads `chunk_size` tokens at a time, split over the cache's devices. `tell` is called behind each
    chunk, inside the compiled program, with the number of tokens read. With `is_ragged`, chunks of
    which no row has a token are not read, and `tell` gets the tokens of the longest row.
    """
    parallel, time = cache.parallel, tokens.shape[1]
    # queries to a fork lie side by side with those of other rows, so that each device reads them all
    forked = isinstance(cache.layers[0], ForkedCache)
    devices = 1 if parallel is None or forked else check_mesh(parallel)

    def read(carry: tuple[Array, Array, DecoderCache], chunk: Array) -> tuple[tuple, None]:
        last, remaining, cache = carry
        split = devices > 1 and chunk.shape[1] >= devices
        length = chunk.shape[1]
        if split:
            chunk = jnp.pad(chunk, ((0, 0), (0, -length % devices)))
        count = jnp.clip(remaining, -1, length)
        positions = positions_from(cache.lengths, count, chunk.shape[1])
        last_position = jnp.maximum(cache.lengths + count - 1, 0)[:, None]
        x, cache, _ = read_on(model, chunk, cache, count, how, split=split)
        if split and parallel is not None:
            positions = split_along(positions, 1, parallel)
        # a sum over devices, as indexing would gather all tokens
        last_position = jnp.where((positions == last_position)[:, :, None], x, 0).sum(
            1, keepdims=True
        )
        last = jnp.where(count[:, None, None] > 0, last_position, last)
        tell(count.max() if is_ragged else length)
        return (last, remaining - count, cache), None

    # the short chunk comes first, so that those of one size can be scanned
    size = min(chunk_size, time)
    short = time % size
    carry = model.embed_tokens(tokens[:, :1]), counts, cache
    if short:
        carry, _ = read(carry, tokens[:, :short])
    chunks = tokens[:, short:].reshape(tokens.shape[0], -1, size).swapaxes(0, 1)
    if is_ragged:
        needed = -(-carry[1].max() // size)
        x, _, cache = lax.fori_loop(0, needed, lambda i, carry: read(carry, chunks[i])[0], carry)
        return x, cache
    (x, _, cache), _ = lax.scan(read, carry, chunks)
    return x, cache


def read_tree(
    model: AbstractLayers, tree: PrefixTree, cache: DecoderCache, how: How = PLAIN
) -> TreeOutput:
    """Logits after each node of a tree that follows the cache, and the keys and values of the nodes."""
    x = how.rows(model.embed_tokens, tree.tokens)
    positions = cache.lengths[:, None] + tree.depth
    rope = how.rows(lambda x: model.rope(x, cache.length), positions)
    keys, values = [], []
    for layer, stored in zip(model.layers, cache.unforked("read_tree"), strict=True):

        def see(
            query: Array, key: Array, value: Array, stored: KVCache = stored, **options: Any
        ) -> tuple:
            nodes = query, key, value
            if how.reproducible:
                out = attend_paths(how, tree, stored, nodes, **options)
            else:
                out = tree_decode(*nodes, tree=tree, cache=stored, **options).out
            return out, (key, value)

        x, (key, value) = layer(x, rope, how.see(see))
        keys.append(key)
        values.append(value)
    logits = how.rows(model.logits, how.rows(model.norm, x))
    return TreeOutput(logits, tuple(keys), tuple(values))


def fitting(
    model: AbstractLayers,
    tokens: Array,
    cache: DecoderCache,
    lengths: object,
    *,
    chunk_size: int | None = None,
    parallel: SequenceParallel | None = None,
) -> tuple[Array, Array]:
    """How many of `tokens` each row of the cache gets, and the rows at fault, where that is -1.

    With a window, the cache needs room for `chunk_size` tokens only. Raises as a call of the model does.
    """
    batch, time = tokens.shape
    check_cache(cache, model.config, batch)
    first = growing(cache.layers[0])
    if parallel is not None and parallel != first.parallel:
        raise ValueError(
            f"parallel: wanted None or the cache's, {first.parallel}, got {received(parallel)}"
        )
    needed = time if first.window is None or chunk_size is None else min(time, chunk_size)
    room = first.capacity - (first.window or 0)
    if needed > room:
        raise ValueError(
            f"cache: wanted room for {needed} tokens at once, of {received(tokens)}, got {room}"
        )
    requested = check_counts(lengths, batch, time)
    counts = first._fitting(requested, time)
    return counts, counts < 0


def check_tokens(name: str, x: object) -> Any:
    """Returns `x`, integers `[batch, time]`; raises `TypeError` or `ValueError` for anything else."""
    array = check_int32(name, x)
    check_shape(name, array, ("batch", "time"))
    return array
