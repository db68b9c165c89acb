"""The abstract decoder: logits of tokens, without a cache, with one, or of a tree."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Int

from energy_attn import attention
from energy_attn.distributed import KVCache, SequenceParallel
from energy_attn.distributed.internal import check_mesh
from energy_attn.kernels.internal import call_policy, checks

from ...functional._by_rows import rows_of
from ...prefix_tree import PrefixTree
from ...prefix_tree._tree import check_tree
from ._cache import DecoderCache, DecoderOutput, TreeOutput, check_cache
from ._config import AbstractModel, AbstractModelConfig
from ._images import Images, check_images, check_one_chunk
from ._loss import AbstractLanguageModel
from ._read import (
    check_tokens,
    fitting,
    read_alone,
    read_chunks,
    read_on,
    read_tree,
)

# Blocks (whole leaves) on a device: each sends a root in each step, so that communication does not grow with the cache.
_MOST_BLOCKS = 8


class AbstractDecoder(AbstractLanguageModel):
    """A decoder of any family whose attention is this library's.

    [`generate`][energy_attn.models.generate], the drafters, checkpoints and
    [`energy_report`][energy_attn.energy_report] work with any decoder. A family has fields under
    Hugging Face's names, which are the names of weights in its checkpoints, and two methods:

    - `config`, static: vocabulary, layers, heads, and the tokens that end a text;
    - `embed_tokens`, a module with a `weight`: tokens `[B, T]` to `[B, T, D]`;
    - `layers`: each called as `layer(x, rope, see)`. `see(query, key, value, **options)` computes attention, with
      options of [`attention`][energy_attn.attention] such as the layer's `local_window_size`, and returns its output
      and an extra result, which the layer returns after its own output. `see.parallel` says how tokens are sharded,
      or is None. Everything but attention is computed as `see.rows(f, *arrays)`, with functions of arrays
      `[#batch, time, ...]` that map each token separately;
    - `norm`: of the final hidden states;
    - `rope(positions, length)`: the rotary embedding that layers apply to queries and keys;
    - `logits(x)`: the output projection of normed hidden states;
    - `output(x, parallel, reproducible)`, if its losses shall make no array of logits: the same as a `Categorical`.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from energy_attn.models import AbstractDecoder, Llama, LlamaConfig
        >>> config = LlamaConfig(256, 32, 64, num_hidden_layers=2, num_attention_heads=4)
        >>> model: AbstractDecoder = Llama(config, key=jax.random.key(0))
        >>> model(jnp.zeros((1, 8), jnp.int32)).logits.shape
        (1, 8, 256)
        >>> cache = model.empty_cache(batch=1, slots=16)
        >>> out = model.prefill(jnp.zeros((1, 8), jnp.int32), cache)
        >>> out = model(jnp.argmax(out.logits, -1), cache=out.cache)  # one decode step
        >>> out.cache.lengths.tolist()
        [9]
    """

    config: eqx.AbstractVar[Any]  # an `AbstractDecoderConfig`

    def __call__(
        self,
        tokens: Int[Array, "batch time"],
        positions: Int[Array, "#batch time"] | None = None,
        cache: DecoderCache | None = None,
        *,
        lengths: Int[Array, " batch"] | None = None,
        parallel: SequenceParallel | None = None,
        return_energies: bool = False,
        reproducible: bool = False,
        attend: Callable[..., Any] = attention,
        images: Images | None = None,
    ) -> DecoderOutput:
        """Logits for the token after each of `tokens`.

        Without a cache the tokens see each other, causally; this is the form for training. With a
        cache they are written to its next slots and see its content: prefill and decode.

        Args:
            tokens: of any integer dtype.
            positions: their global positions, of any integer dtype; negative for absent tokens. By default
                they count from 0. A cache has its own.
            cache: from `empty_cache` or an earlier call; donate it to a jitted step.
            lengths: with a cache, `[batch]`: the number of tokens that each row really has, in
                front; None means all. The logits after them are undefined.
            parallel: None, or the `SequenceParallel` whose mesh axes the keys of the tokens are
                sharded over. A cache has its own.
            return_energies: whether to return the free energies of all layers, or the second result of
                `attend`.
            reproducible: whether a token's logits are bitwise reproducible and batch-invariant: they then depend
                only on the tokens that it sees, for the same weights, dtypes, version and kind of device; not
                on the number of tokens read at once, the batch, padding or the capacity of the cache. Gradients
                are summed in a fixed order. There is no derivative in forward mode.
            attend: the function that computes attention, called as
                [`attention`][energy_attn.attention] is; a `functools.partial` of it chooses an
                implementation or a window. Its second result becomes `energies`.
            images: the [`Images`][energy_attn.models.Images] in the text, whose tokens see each other; with a cache, in
                tokens that are read in one call. Later calls need them only to read on inside an image.

        Returns:
            A named tuple: `logits`, `[batch, time, vocab]`, float32, or float64 where the weights are; `cache`, with
            these tokens, or None without one; `energies`, the free energies `[layers, batch, time, heads]` in nats,
            or None unless asked for. With another `attend`, these are its second results, stacked over layers.

        Raises:
            NotImplementedError: `reproducible` under a `jax.vmap` over weights, with options of attention that
                are not reproducible, or, in a program for TPUs or GPUs, with a layer whose operations XLA orders.
            TypeError: `tokens`, `positions` or `lengths` is not an integer array, or `cache` not a
                `DecoderCache`.
            ValueError: shapes do not fit, both a cache and `positions` are passed, or `parallel` differs from
                the cache's.
            RuntimeError: (Equinox's, when it runs, on CPUs and outside of `jax.jit`) the cache has too
                few slots left. On GPUs and TPUs, and with `EQX_ON_ERROR=off`, the logits of such rows are
                NaN, then and later.
        """
        policy = call_policy(None, reproducible)
        check_images(images, tokens, cache)
        if cache is None:
            if lengths is not None:
                raise ValueError(
                    f"lengths: wanted None without a cache, got {checks.received(lengths)}"
                )
            x, trace = read_alone(self, tokens, positions, parallel, policy, attend, images)
        else:
            if positions is not None:
                raise ValueError(
                    f"positions: wanted None with a cache, which has its own, got {checks.received(positions)}"
                )
            check_tokens("tokens", tokens)
            counts, wrong = fitting(self, tokens, cache, lengths, parallel=parallel)
            x, cache, trace = read_on(self, tokens, cache, counts, policy, attend, images=images)
            x = jnp.where(wrong[:, None, None], jnp.asarray(jnp.nan, x.dtype), x)
        logits = rows_of(policy)(self.logits, x)
        return DecoderOutput(logits, cache, trace.energy if return_energies else None)

    def prefill(
        self,
        tokens: Int[Array, "batch time"],
        cache: DecoderCache,
        *,
        lengths: Int[Array, " batch"] | None = None,
        chunk_size: int = 1024,
        reproducible: bool = False,
        attend: Callable[..., Any] = attention,
        images: Images | None = None,
    ) -> DecoderOutput:
        """Reads a prompt into the cache, chunk by chunk; returns the logits of the last token only.

        Args:
            tokens: the prompt, of any integer dtype.
            cache: the context before it, usually empty.
            lengths: `[batch]`, the number of tokens that each row really has, in front, at least
                one; None means all. The logits are those of each row's own last token.
            chunk_size: tokens read at a time, which bounds the memory of activations.
            reproducible: as in a call.
            attend: as in a call.
            images: as in a call, of a prompt that is one chunk.

        Returns:
            As a call: `logits` `[batch, 1, vocab]` and `cache`; `energies` is None.

        Raises:
            TypeError: `chunk_size` is not an integer, or as a call does.
            ValueError: there is no token, `chunk_size` is below 1, or below the prompt's length with images, or as a
                call does.
            RuntimeError: as a call does.
        """
        time = check_tokens("tokens", tokens).shape[1]
        checks.check_integer("chunk_size", chunk_size, 1)
        policy = call_policy(None, reproducible)
        if time < 1:
            raise ValueError(f"tokens: wanted at least one token, got {checks.received(tokens)}")
        check_images(images, tokens, cache)
        check_one_chunk(images, time, chunk_size)
        counts, wrong = fitting(self, tokens, cache, lengths, chunk_size=chunk_size)
        x, cache = read_chunks(
            self, tokens, cache, counts, chunk_size, policy, attend, images=images
        )
        x = jnp.where(wrong[:, None, None], jnp.asarray(jnp.nan, x.dtype), x)
        return DecoderOutput(rows_of(policy)(self.logits, x), cache, None)

    def read_tree(
        self, tree: PrefixTree, cache: DecoderCache, *, reproducible: bool = False
    ) -> TreeOutput:
        """Logits for the token after each node of a prefix tree that continues the cache.

        Each node is read once, and sees the whole context and its ancestors. The cache stays as it
        is: its `commit` writes the accepted nodes.

        Args:
            tree: of tokens that follow those of the cache.
            cache: from `empty_cache` or an earlier call.
            reproducible: as in a call; each path is then read by itself. Over a mesh, or with a cache of eight
                bits, its keys are temporarily written to the cache: logits of nodes without room are NaN.

        Returns:
            A named tuple: `logits` for the token after each node, `[batch, nodes, vocab]`, float32, or float64 where
            the weights are; `keys`, after the rotary embedding, and `values` of each layer,
            `[batch, nodes, kv_heads, width]`, which `commit` takes.

        Raises:
            TypeError: `tree` is not a `PrefixTree`, or `cache` not a `DecoderCache`.
            ValueError: they do not fit each other, or the model; `reproducible` with paths that would be written
                over the window of such a cache.

        Source: SpecInfer (arXiv 2305.09781): a token tree is read in one pass.

        Examples:
            >>> import jax, jax.numpy as jnp
            >>> from energy_attn.models import Llama, LlamaConfig
            >>> from energy_attn.prefix_tree import PrefixTree, accept_greedy
            >>> config = LlamaConfig(16, 32, 64, num_hidden_layers=1, num_attention_heads=4)
            >>> model = Llama(config, key=jax.random.key(0))
            >>> tree = PrefixTree.from_beam(jnp.array([[[3, 1, 4], [3, 1, 5]]]))
            >>> read = model.read_tree(tree, model.empty_cache(batch=1, slots=16))
            >>> read.logits.shape, accept_greedy(tree, read.logits).path.shape
            ((1, 6, 16), (1, 3))
        """
        check_tree("tree", tree)
        check_cache(cache, self.config, len(tree.tokens))
        return read_tree(self, tree, cache, call_policy(None, reproducible))

    def empty_cache(
        self,
        batch: int,
        slots: int,
        *,
        parallel: SequenceParallel | None = None,
        block_size: int | None = None,
        quantize: Literal["int8"] | None = None,
        window: int | None = None,
        reproducible: bool = False,
    ) -> DecoderCache:
        """An empty cache in the dtype of the weights.

        Args:
            batch: number of sequences.
            slots: number of tokens that it can hold, rounded up to whole blocks on every device.
            parallel: the axes of the mesh in force to shard the slots over; None: not at all.
            block_size: consecutive tokens on one device; None: 128, or fewer where a device holds fewer, or as
                `reproducible` says.
            quantize: as in [`KVCache.empty`][energy_attn.distributed.KVCache.empty].
            window: as in [`KVCache.empty`][energy_attn.distributed.KVCache.empty].
            reproducible: whether it is for calls with `reproducible=True`. Over a mesh, a block then has at least
                256 tokens, and a device at most 8 blocks: a step sends a few numbers per block, and no keys.
                Results are bitwise the same with any block size.

        Raises:
            TypeError: an argument of another type.
            ValueError: sizes below one, or as `KVCache.empty` does.
        """
        leaf = call_policy(None, reproducible).leaf
        if block_size is None:
            devices = 1 if parallel is None else check_mesh(parallel)
            share = -(-checks.check_integer("slots", slots, 1) // devices)
            block_size = min(128, share)
            if leaf is not None and devices > 1:
                block_size = leaf << ((share - 1) // (_MOST_BLOCKS * leaf)).bit_length()
        config, dtype = self.config, self.embed_tokens.weight.dtype
        sizes = config.num_key_value_heads, config.head_dim, config.value_dim
        options: Any = {"quantize": quantize, "window": window, "parallel": parallel}
        # separate arrays for each layer, so that the cache can be donated
        layers = (
            KVCache.empty(batch, slots, *sizes, dtype=dtype, block_size=block_size, **options)
            for _ in range(config.num_hidden_layers)
        )
        return DecoderCache(tuple(layers), slots)


class Family(NamedTuple):
    """The functions that read the checkpoints of one `model_type`."""

    # returns the configuration that the fields of a `config.json` describe; raises `TypeError` or `ValueError` for
    # what the family does not compute
    read: Callable[[Mapping[str, Any]], AbstractModelConfig]
    # returns the model of a configuration, called as `build(config, key=key)`
    build: Callable[..., AbstractModel]
    # returns the tensors of the model under its names, of those in the files; others are not read
    tensors: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda tensors: tensors
