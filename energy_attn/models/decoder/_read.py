"""The forward passes of a decoder: without a cache, with one, in chunks, and of a tree."""

import abc
import dataclasses
import functools
from collections.abc import Callable, Iterable
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
from energy_attn.kernels.internal import CallPolicy, call_policy, checks

from ...functional._by_rows import rows_of
from ...functional._tag import placed, recorders
from ...prefix_tree import PrefixTree, tree_decode
from ...prefix_tree._tree import gather_slots
from ._cache import DecoderCache, Trace, TreeOutput, check_cache, growing, stacked
from ._config import AbstractModel
from ._images import Images, seen_causally

PLAIN = call_policy(None)


@dataclasses.dataclass(frozen=True)
class See:
    """The attention of a layer, called with its queries, keys, values and options."""

    attend: Callable[..., tuple[Array, Any]]  # returns the output of attention and an extra result
    # the mesh axes that the layer's tokens are sharded over, or None
    parallel: SequenceParallel | None
    rows: Callable[..., Any]  # computes the rest of the layer, as `rows_of` says

    def __call__(self, query: Array, key: Array, value: Array, **options: Any) -> tuple[Array, Any]:
        return self.attend(query, key, value, **options)


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


def _through(
    model: AbstractLayers,
    x: Array,
    rope: Any,
    attends: Iterable[Callable[..., tuple[Array, Any]]],
    policy: CallPolicy,
    parallel: SequenceParallel | None = None,
) -> tuple[Array, list[Any]]:
    """Final hidden states, with one attention function per layer, and the layers' extra results."""
    rows, extras = rows_of(policy), []
    sharded = None if policy.row_tiles else parallel  # tiles of rows are never sharded
    for i, (layer, attend) in enumerate(zip(model.layers, attends, strict=True)):
        with placed(f"layers[{i}]"):
            x, extra = layer(x, rope, See(attend, sharded, rows))
        extras.append(extra)
    return rows(model.norm, x), extras


def read_alone(
    model: AbstractLayers,
    tokens: Array,
    positions: Array | None,
    parallel: SequenceParallel | None,
    policy: CallPolicy,
    attend: Callable[..., Any],
    images: Images | None = None,
) -> tuple[Array, Trace]:
    """Final hidden states of tokens that see each other causally, and a trace of attention."""
    batch, time = check_tokens("tokens", tokens).shape
    token_positions = jnp.arange(time, dtype=jnp.int32)[None]
    if positions is not None:
        token_positions = positions = checks.as_int32(check_tokens("positions", positions))
        checks.check_broadcastable("positions", token_positions, (batch, time))
    bound = policy.bind(attend)
    call_options = {"query_positions": positions, "key_positions": positions, "parallel": parallel}

    def see(query: Array, key: Array, value: Array, **of_layer: Any) -> tuple[Array, Trace]:
        options = {**call_options, **of_layer}
        options |= seen_causally(images, options.pop("local_window_size", None))
        out, energy = bound(query, key, value, **options, return_energy=True)
        return out, Trace(query, out, energy)

    rows = rows_of(policy)
    rope = rows(lambda x: model.rope(x, time), token_positions)
    x = rows(model.embed_tokens, tokens)
    x = x if images is None else images.put(x, token_positions)
    x, traces = _through(model, x, rope, [see] * len(model.layers), policy, parallel)
    return x, stacked(traces)


def read_on(
    model: AbstractLayers,
    tokens: Array,
    cache: DecoderCache,
    counts: Array,
    policy: CallPolicy = PLAIN,
    attend: Callable[..., Any] = attention,
    *,
    split: bool = False,
    images: Images | None = None,
) -> tuple[Array, DecoderCache, Trace]:
    """Final hidden states of tokens that follow a cache, the cache with them, and a trace of attention.

    The cache has room for `counts` tokens of each row. With `split`, each of the cache's devices reads an equal share
    of the tokens; otherwise every device reads them all.
    """
    parallel, rows = cache.parallel, rows_of(policy)
    positions = positions_from(cache.lengths, counts, tokens.shape[1])
    x = rows(model.embed_tokens, tokens)
    x = x if images is None else images.put(x, positions)
    if split and parallel is not None:
        parallel = dataclasses.replace(parallel, queries_sharded=True)
        x, positions = (split_along(array, 1, parallel) for array in (x, positions))
    rope = rows(lambda x: model.rope(x, cache.length), positions)

    def see(
        stored: KVCache | ForkedCache, query: Array, key: Array, value: Array, **options: Any
    ) -> tuple[Array, tuple[KVCache | ForkedCache, Trace]]:
        stored = stored._written(key, value, counts)
        if isinstance(stored, ForkedCache):
            options |= _options_of(policy.bind(attend))
            out, energy = stored.attend(query, query_positions=positions, **options)
            return out, (stored, Trace(query, out, energy))
        bound = policy.bind(attend, stored._run_length)
        options |= {"query_positions": positions, "parallel": parallel, "return_energy": True}
        out, energy = _attend_causally(
            bound, stored.window, query, _stored(stored), images, **options
        )
        return out, (stored, Trace(query, out, energy))

    attends = (functools.partial(see, stored) for stored in cache.layers)
    x, extras = _through(model, x, rope, attends, policy, parallel if split else None)
    layers, traces = zip(*extras, strict=True)
    return x, cache.with_layers(layers), stacked(traces)


Stored = tuple[Array, Array, Array]  # keys, values, and positions of keys


def _stored(cache: KVCache) -> Stored:
    return cache.keys(), cache.values(), cache.positions


def _attend_causally(
    attend: Callable[..., Any],
    window: int | None,
    query: Array,
    stored: Stored,
    images: Images | None = None,
    **options: Any,
) -> Any:
    key, value, positions = stored
    reach = check_reach(options.pop("local_window_size", None), window)
    options |= seen_causally(images, reach)
    return attend(query, key, value, **options, key_positions=positions)


def _options_of(attend: Callable[..., Any]) -> dict[str, Any]:
    """The options that `attend`, a `functools.partial` of `attention`, adds; raises for what a fork does not take."""
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
        f"a fork, got {checks.received(attend)}"
    )


def read_chunks(
    model: AbstractLayers,
    tokens: Array,
    cache: DecoderCache,
    counts: Array,
    chunk_size: int,
    policy: CallPolicy = PLAIN,
    attend: Callable[..., Any] = attention,
    tell: Callable[[Array | int], None] = lambda number: None,
    is_ragged: bool = False,
    images: Images | None = None,
) -> tuple[Array, DecoderCache]:
    """The final hidden state of each row's last token, `[B, 1, D]`, and the cache with all tokens.

    Reads `chunk_size` tokens at a time, split over the cache's devices. `tell` is called after each chunk, inside the
    compiled program, with the number of tokens read. With `is_ragged`, chunks without a token in any row are skipped,
    and `tell` gets the tokens of the longest row.
    """
    parallel, time = cache.parallel, tokens.shape[1]
    # a fork attends with the queries of several rows at once, so that each device reads all tokens
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
        x, cache, _ = read_on(
            model, chunk, cache, count, policy, attend, split=split, images=images
        )
        if split and parallel is not None:
            positions = split_along(positions, 1, parallel)
        # a sum over devices, as indexing would gather all tokens
        last_position = jnp.where((positions == last_position)[:, :, None], x, 0).sum(
            1, keepdims=True
        )
        last = jnp.where(count[:, None, None] > 0, last_position, last)
        tell(count.max() if is_ragged else length)
        return (last, remaining - count, cache), None

    # the short chunk comes first, so that the others have one size and can be scanned
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
    model: AbstractLayers, tree: PrefixTree, cache: DecoderCache, policy: CallPolicy = PLAIN
) -> TreeOutput:
    """Logits after each node of a tree that follows the cache, and the keys and values of the nodes."""
    rows = rows_of(policy)
    x = rows(model.embed_tokens, tree.tokens)
    positions = cache.lengths[:, None] + tree.depth
    rope = rows(lambda x: model.rope(x, cache.length), positions)

    def see(
        stored: KVCache, query: Array, key: Array, value: Array, **options: Any
    ) -> tuple[Array, tuple[Array, Array]]:
        if policy.reads_trees:
            out = tree_decode(query, key, value, tree=tree, cache=stored, **options).out
        else:
            out = _attend_paths(policy, tree, stored, (query, key, value), **options)
        return out, (key, value)

    attends = (functools.partial(see, stored) for stored in cache.unforked("read_tree"))
    x, extras = _through(model, x, rope, attends, policy)
    keys, values = zip(*extras, strict=True)
    return TreeOutput(rows(model.logits, x), keys, values)


def _attend_paths(
    policy: CallPolicy,
    tree: PrefixTree,
    stored: KVCache,
    nodes: tuple[Array, Array, Array],
    **options: Any,
) -> Array:
    """Attention of the `nodes` (queries, keys and values) over a cache and their ancestors, one path at a time.

    Siblings share a position, so that no call may have the keys of two. Slots on no path are zero. Over a mesh, a path
    is written to the cache, so that each of its leaves is on one device; and so is a path to a cache of eight bits,
    whose keys are rounded. Nodes without room are NaN. Raises `ValueError` for paths that would be written over the
    window of a cache.
    """
    levels = tree.unpacker.shape[2]
    level = jnp.arange(levels, dtype=jnp.int32)[None]
    is_written = stored.parallel is not None or stored.key_scale is not None
    if is_written and stored.window is not None:
        room = stored.capacity - stored.window
        if levels > room:
            raise ValueError(f"cache: wanted room for paths of {levels} nodes, got {room}")

    def one(slots: Array) -> Array:
        query, key, value = (gather_slots(x, slots) for x in nodes)
        positions = jnp.where(slots >= 0, stored.lengths[:, None] + level, -1)
        if not is_written:
            both = zip(_stored(stored), (key, value, positions), strict=True)
            tokens: Any = tuple(jnp.concatenate(x, 1) for x in both)
            more = {**options, "query_positions": positions}
            bound = policy.bind(attention)
            return _attend_causally(bound, stored.window, query, tokens, **more)
        counts = (slots >= 0).sum(1, dtype=jnp.int32)
        if stored.window is None:
            room = stored.capacity - (stored.lengths - stored.starts)
            positions = jnp.where(level < room[:, None], positions, -1)
            counts = jnp.minimum(counts, room)
        longer = stored._written(key, value, counts)
        more = {**options, "query_positions": positions, "parallel": stored.parallel}
        bound = policy.bind(attention, longer._run_length)
        out = _attend_causally(bound, stored.window, query, _stored(longer), **more)
        missing = (slots >= 0) & (positions < 0)
        return jnp.where(missing[:, :, None, None], jnp.nan, out)

    slots = tree.unpacker.swapaxes(0, 1)
    outs = lax.map(one, slots)
    zeros = jnp.zeros((*nodes[0].shape[:3], outs.shape[-1]), outs.dtype)
    rows = jnp.arange(len(zeros), dtype=jnp.int32)[None, :, None]
    return zeros.at[rows, jnp.where(slots < 0, zeros.shape[1], slots)].set(outs, mode="drop")


def fitting(
    model: AbstractLayers,
    tokens: Array,
    cache: DecoderCache,
    lengths: object,
    *,
    chunk_size: int | None = None,
    parallel: SequenceParallel | None = None,
) -> tuple[Array, Array]:
    """The number of `tokens` that each row of the cache gets, and the rows without room, where that is -1.

    With a window, the cache needs room for `chunk_size` tokens only. Raises as a call of the model does.
    """
    batch, time = tokens.shape
    check_cache(cache, model.config, batch)
    first = growing(cache.layers[0])
    if parallel is not None and parallel != first.parallel:
        raise ValueError(
            f"parallel: wanted None or the cache's, {first.parallel}, got {checks.received(parallel)}"
        )
    needed = time if first.window is None or chunk_size is None else min(time, chunk_size)
    room = first.capacity - (first.window or 0)
    if needed > room:
        raise ValueError(
            f"cache: wanted room for {needed} tokens at once, of {checks.received(tokens)}, got {room}"
        )
    counts = first._fitting(check_counts(lengths, batch, time), time)
    return counts, counts < 0


def check_tokens(name: str, x: object) -> Any:
    """Returns `x`, integers `[batch, time]`; raises `TypeError` or `ValueError` for anything else."""
    array = checks.check_int32(name, x)
    checks.check_shape(name, array, ("batch", "time"))
    return array
