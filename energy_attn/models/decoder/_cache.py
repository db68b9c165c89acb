"""The cache of a decoder: the keys and values of each layer."""

from typing import NamedTuple

import equinox as eqx
from jaxtyping import Array, Bool, Float, Int

from energy_attn.distributed import KVCache, SequenceParallel
from energy_attn.kernels.internal import check_shape, received

from ...prefix_tree import Accepted, commit
from ...prefix_tree._decode import gather_path
from ._config import AbstractDecoderConfig


class TreeOutput(NamedTuple):
    """The result of a decoder's `read_tree`; the cache does not hold it yet.

    Attributes:
        logits: for the token after each node; float32, or float64 where the weights are.
        keys: of each layer, after the rotary embedding.
        values: of each layer.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from energy_attn.models import Llama, LlamaConfig
        >>> from energy_attn.prefix_tree import pack
        >>> config = LlamaConfig(16, 8, 16, num_hidden_layers=2, num_attention_heads=2)
        >>> model = Llama(config, key=jax.random.key(0))
        >>> tree = pack(jnp.array([[[3, 1, 4], [3, 1, 5]]]))
        >>> read = model.read_tree(tree, model.empty_cache(batch=1, slots=16))
        >>> read.logits.shape, len(read.keys), read.keys[0].shape
        ((1, 6, 16), 2, (1, 6, 2, 4))
    """

    logits: Float[Array, "batch nodes vocab"]
    keys: tuple[Float[Array, "batch nodes kv_heads width"], ...]
    values: tuple[Float[Array, "batch nodes kv_heads width"], ...]


class DecoderCache(eqx.Module):
    """The keys and values of the tokens read so far: one cache for each layer.

    Attributes:
        layers: a [`KVCache`][energy_attn.distributed.KVCache] for each layer; keys are stored after
            the rotary embedding.

    Examples:
        >>> import jax
        >>> from energy_attn.models import Llama, LlamaConfig
        >>> config = LlamaConfig(256, 32, 64, num_hidden_layers=2, num_attention_heads=4)
        >>> cache = Llama(config, key=jax.random.key(0)).empty_cache(batch=1, slots=16)
        >>> len(cache.layers), cache.layers[0].key.shape, cache.lengths.tolist()
        (2, (1, 16, 4, 8), [0])
    """

    layers: tuple[KVCache, ...]

    @property
    def lengths(self) -> Int[Array, " B"]:
        """The number of tokens that each row has been given, `[B]`."""
        return self.layers[0].lengths

    @property
    def capacity(self) -> int:
        """The number of tokens that each row has room for."""
        return self.layers[0].capacity

    @property
    def parallel(self) -> SequenceParallel | None:
        """The mesh axes that the slots are sharded over."""
        return self.layers[0].parallel

    def reset(self, rows: Bool[Array, " B"] | Int[Array, " n"]) -> "DecoderCache":
        """The cache with some of its rows empty, for other prompts.

        Arguments and errors are those of [`KVCache.reset`][energy_attn.distributed.KVCache.reset].
        """
        return DecoderCache(tuple(stored.reset(rows) for stored in self.layers))

    def replace(self, rows: Int[Array, " n"], other: "DecoderCache") -> "DecoderCache":
        """The cache with the rows of another one in the place of some of its own.

        So a prompt that was read into a cache of one row enters a batch that is being decoded.

        Args:
            rows: `[n]`, which rows give way.
            other: a cache of `n` rows of the same model, made with the same slots, as
                [`KVCache.replace`][energy_attn.distributed.KVCache.replace] says.

        Raises:
            TypeError: `other` is not a `DecoderCache`, or as that `replace` does.
            ValueError: `other` has another number of layers, or as that `replace` does.
        """
        if not isinstance(other, DecoderCache):
            raise TypeError(f"other: wanted a DecoderCache, got {received(other)}")
        _check_layers("other", len(self.layers), len(other.layers))
        pairs = zip(self.layers, other.layers, strict=True)
        return DecoderCache(tuple(mine.replace(rows, theirs) for mine, theirs in pairs))

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
        if not isinstance(read, TreeOutput):
            raise TypeError(f"read: wanted a TreeOutput, got {received(read)}")
        _check_layers("read", len(self.layers), len(read.keys))
        new = zip(self.layers, read.keys, read.values, strict=True)
        return DecoderCache(
            tuple(commit(stored, accepted, key, value) for stored, key, value in new)
        )

    def append_path(self, path: Array, read: TreeOutput, counts: Array) -> "DecoderCache":
        """Appends the first `counts` nodes of a path, for which the cache has room."""
        new = zip(self.layers, read.keys, read.values, strict=True)
        layers = (
            stored._written(*gather_path(stored, path, key, value), counts)
            for stored, key, value in new
        )
        return DecoderCache(tuple(layers))


def _check_layers(name: str, wanted: int, given: int) -> None:
    """Raises `ValueError` for another number of layers."""
    if given != wanted:
        raise ValueError(f"{name}: wanted the {wanted} layers of the cache, got {given}")


def check_cache(cache: object, config: AbstractDecoderConfig, batch: int) -> None:
    """Raises `TypeError` for another type, `ValueError` for the cache of another model or batch."""
    if not isinstance(cache, DecoderCache):
        raise TypeError(f"cache: wanted a DecoderCache, got {received(cache)}")
    if len(cache.layers) != config.num_hidden_layers:
        raise ValueError(
            f"cache: wanted the {config.num_hidden_layers} layers of the model, "
            f"got {len(cache.layers)}"
        )
    shape = batch, "slots", config.num_key_value_heads, config.head_dim
    check_shape("cache.layers[0].key", cache.layers[0].key, shape)
