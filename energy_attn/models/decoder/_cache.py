"""The cache of a decoder, the keys and values of each layer, and its outputs."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from energy_attn.distributed import ForkedCache, KVCache, SequenceParallel
from energy_attn.distributed.internal import AbstractTokens
from energy_attn.kernels.internal import checks, lse_dtype

from ...prefix_tree import Accepted, commit
from ...prefix_tree._decode import gather_path
from ._config import AbstractDecoderConfig, check_type


class TreeOutput(NamedTuple):
    """The result of `AbstractDecoder.read_tree`, whose documentation describes the fields."""

    logits: Float[Array, "batch nodes vocab"]
    keys: tuple[Float[Array, "batch nodes kv_heads width"], ...]
    values: tuple[Float[Array, "batch nodes kv_heads width"], ...]


class DecoderCache(eqx.Module):
    """The keys and values of the tokens read so far: one cache for each layer.

    Attributes:
        layers: a [`KVCache`][energy_attn.distributed.KVCache] for each layer, or, after a `fork`, a
            [`ForkedCache`][energy_attn.distributed.ForkedCache]; keys are stored after the rotary embedding.
        slots: the number of tokens that it was made for, for which rotary embeddings that depend on the length of
            the text are computed; None: its capacity.

    Examples:
        >>> import jax
        >>> from energy_attn.models import Llama, LlamaConfig
        >>> config = LlamaConfig(256, 32, 64, num_hidden_layers=2, num_attention_heads=4)
        >>> cache = Llama(config, key=jax.random.key(0)).empty_cache(batch=1, slots=16)
        >>> len(cache.layers), cache.layers[0].key.shape, cache.lengths.tolist()
        (2, (1, 16, 4, 8), [0])
    """

    layers: tuple[KVCache | ForkedCache, ...]
    slots: int | None = eqx.field(static=True, default=None)

    @property
    def length(self) -> int:
        """The number of tokens that a text in it may have."""
        return self.capacity if self.slots is None else self.slots

    def with_layers(self, layers: Iterable[KVCache | ForkedCache]) -> "DecoderCache":
        """Returns the cache with other layers."""
        return DecoderCache(tuple(layers), self.slots)

    @property
    def lengths(self) -> Int[Array, " B"]:
        """The number of tokens read so far in each row, `[B]`."""
        return self.layers[0].lengths

    @property
    def capacity(self) -> int:
        """The number of tokens that each row has room for; in a fork, without the shared prompt."""
        return self.layers[0].capacity

    @property
    def parallel(self) -> SequenceParallel | None:
        """The mesh axes that the slots are sharded over."""
        return growing(self.layers[0]).parallel

    def reset(self, rows: Bool[Array, " B"] | Int[Array, " n"]) -> "DecoderCache":
        """Empties some rows, for other prompts.

        Arguments and errors are those of [`KVCache.reset`][energy_attn.distributed.KVCache.reset].
        """
        return self.with_layers(stored.reset(rows) for stored in self.layers)

    def replace(self, rows: Int[Array, " n"], other: "DecoderCache") -> "DecoderCache":
        """Replaces some rows by the rows of another cache.

        This is how a prompt that was read into a cache of one row enters a batch that is being decoded.

        Args:
            rows: `[n]`, the rows to replace.
            other: a cache of `n` rows of the same model, made with the same slots, as
                [`KVCache.replace`][energy_attn.distributed.KVCache.replace] says.

        Raises:
            TypeError: `other` is not a `DecoderCache`, or as that `replace` does.
            ValueError: `other` has another number of layers, or as that `replace` does.
        """
        check_type("other", other, DecoderCache, "a DecoderCache")
        _check_layers("other", len(self.layers), len(other.layers))
        pairs = zip(self.unforked("replace"), other.unforked("replace"), strict=True)
        return self.with_layers(layer.replace(rows, new) for layer, new in pairs)

    def fork(self, count: int, *, capacity: int, block_size: int | None = None) -> "DecoderCache":
        """Makes `count` rows of each row, which share its tokens.

        A decoder reads on with the fork as with any cache, and a step reads each prompt once for all rows that
        continue it. `read_tree` does not take a fork.

        Args:
            count: the number of consecutive rows that share the tokens of one.
            capacity: the number of tokens that each of them has room for after the shared ones.
            block_size: consecutive tokens of a row on one device; None: as in this cache, or fewer where a
                device holds fewer.

        Raises:
            TypeError: an argument is not an integer, or the cache is a fork.
            ValueError: a number below one, or a mesh that [`KVCache.fork`][energy_attn.distributed.KVCache.fork]
                refuses.

        Examples:
            >>> import jax, jax.numpy as jnp
            >>> from energy_attn.models import Llama, LlamaConfig
            >>> config = LlamaConfig(16, 8, 16, num_hidden_layers=1, num_attention_heads=2)
            >>> model = Llama(config, key=jax.random.key(0))
            >>> out = model.prefill(jnp.array([[3, 1, 4]]), model.empty_cache(batch=1, slots=4))
            >>> def step(state, key):
            ...     cache, logits = state
            ...     token = jax.random.categorical(key, logits[:, -1])[:, None]
            ...     out = model(token, cache=cache)
            ...     return (out.cache, out.logits), token[:, 0]
            >>> state = out.cache.fork(64, capacity=8), out.logits.repeat(64, 0)
            >>> _, tokens = jax.lax.scan(step, state, jax.random.split(jax.random.key(1), 5))
            >>> tokens.shape  # five tokens of 64 continuations
            (5, 64)
        """
        forks = (
            stored.fork(count, capacity=capacity, block_size=block_size)
            for stored in self.unforked("fork")
        )
        return DecoderCache(tuple(forks), self.length)

    def commit(self, accepted: Accepted, read: TreeOutput) -> "DecoderCache":
        """Appends the accepted nodes of a tree to the cache of every layer.

        As in [`commit`][energy_attn.prefix_tree.commit], nothing is sent between devices.

        Args:
            accepted: the accepted path of the tree.
            read: the result of [`read_tree`][energy_attn.models.AbstractDecoder] for that tree.

        Raises:
            TypeError: `read` is not a `TreeOutput`, or as that `commit` does.
            ValueError: `read` has another number of layers, or as that `commit` does.
            RuntimeError: (Equinox's, when it runs) a row has no room for its nodes.
        """
        check_type("read", read, TreeOutput, "a TreeOutput")
        _check_layers("read", len(self.layers), len(read.keys))
        new = zip(self.unforked("commit"), read.keys, read.values, strict=True)
        return self.with_layers(commit(stored, accepted, key, value) for stored, key, value in new)

    def append_path(self, path: Array, read: TreeOutput, counts: Array) -> "DecoderCache":
        """Appends the first `counts` nodes of a path, for which the cache has room."""
        new = zip(self.unforked("append_path"), read.keys, read.values, strict=True)
        layers = (
            stored._written(*gather_path(stored, path, key, value), counts)
            for stored, key, value in new
        )
        return self.with_layers(layers)

    def unforked(self, method: str) -> tuple[KVCache, ...]:
        """The layers; raises `TypeError` for the method of this name if they are forks."""
        layers = tuple(x for x in self.layers if isinstance(x, KVCache))
        if len(layers) != len(self.layers):
            raise TypeError(f"cache: wanted one that is no fork for {method}, got a ForkedCache")
        return layers


def growing(stored: KVCache | ForkedCache) -> AbstractTokens:
    return stored.own if isinstance(stored, ForkedCache) else stored


def _check_layers(name: str, wanted: int, actual: int, of: str = "cache") -> None:
    if actual != wanted:
        raise ValueError(f"{name}: wanted the {wanted} layers of the {of}, got {actual}")


def check_cache(cache: Any, config: AbstractDecoderConfig, batch: int) -> None:
    check_type("cache", cache, DecoderCache, "a DecoderCache")
    _check_layers("cache", config.num_hidden_layers, len(cache.layers), "model")
    prefix = "own." if isinstance(cache.layers[0], ForkedCache) else ""
    stored = growing(cache.layers[0])
    for name, width in (("key", config.head_dim), ("value", config.value_dim)):
        shape = batch, "slots", config.num_key_value_heads, width
        checks.check_shape(f"cache.layers[0].{prefix}{name}", getattr(stored, name), shape)


class DecoderOutput(NamedTuple):
    """The result of calling a decoder: see `AbstractDecoder.__call__`."""

    logits: Float[Array, "batch time vocab"]
    cache: DecoderCache | None
    energies: PyTree[Float[Array, "layers batch time heads"]] | None


class Trace(NamedTuple):
    """The queries, outputs and energies of each layer's attention."""

    query: Float[Array, "layers batch time heads width"]
    out: Float[Array, "layers batch time heads width"]
    energy: PyTree[Float[Array, "layers batch time heads"]]


def stacked(traces: Sequence[Trace]) -> Trace:
    return jax.tree.map(lambda *each: jnp.stack(each), *traces)


def log_probabilities(logits: Array, tokens: Array) -> Array:
    """The log-softmax `[B, n]`, in float32 or wider, at `tokens` `[B, n]`, of logits `[B, n, V]`."""
    log_p = jax.nn.log_softmax(logits.astype(lse_dtype(logits.dtype)))
    return jnp.take_along_axis(log_p, tokens[:, :, None], axis=2)[:, :, 0]
