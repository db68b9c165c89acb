r"""The Llama decoder in its standard form, with attention by this library.

Names of fields and parameters are those of Hugging Face's `LlamaConfig` and `LlamaForCausalLM`, and
so are the conventions: weights `(out, in)`, rotary embedding of the two halves of a head.
"""

import os
from collections.abc import Callable
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, PRNGKeyArray

from energy_attn.distributed import KVCache, SequenceParallel
from energy_attn.distributed.internal import check_mesh
from energy_attn.kernels.internal import (
    check_broadcastable,
    check_floating_dtype,
    check_integer,
    check_integral,
    check_key,
    check_shape,
    lse_dtype,
    received,
)

from ...core._attention import attention
from ...core._citation import cite
from ...prefix_tree import PrefixTree
from ...prefix_tree._tree import check_tree
from ..checkpoint._load import load
from ..checkpoint._save import save
from ..generation._cache import LlamaCache, TreeOutput, check_cache
from ..generation._continue import fitting, read_chunks, read_on, read_tree
from ..generation._output import LlamaOutput, LlamaTrace, joined
from ._config import LlamaConfig
from ._layers import Embedding, Linear, LlamaLayer, RMSNorm, dot
from ._rope import frequencies, rotary


class Llama(eqx.Module):
    r"""A Llama decoder: tokens in, logits out.

    $$x \mathrel{+}= W_O \nabla F(\mathrm{norm}(x)), \qquad
      x \mathrel{+}= \mathrm{SwiGLU}(\mathrm{norm}(x))$$

    Args:
        config: its sizes.
        dtype: of all weights.
        key: for the initial weights: normal, of deviation 0.02; biases are 0.

    Paths of weights are Hugging Face's names: `layers[0].self_attn.q_proj.weight`. `lm_head` is None
    where the embedding serves as output projection too.

    Raises:
        TypeError: if `config` is no `LlamaConfig`, `dtype` is not floating, or `key` is no key.

    Computed as Hugging Face's `LlamaForCausalLM`: norms, softmax and rotary embedding in float32, or
    in float64 where the weights are. With weights of fewer bits cosines and sines are not rounded
    to them, as they are there.

    Source: Touvron et al. (arXiv 2302.13971), section 2.2.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from energy_attn.models import Llama, LlamaConfig
        >>> config = LlamaConfig(256, 32, 64, num_hidden_layers=2, num_attention_heads=4)
        >>> model = Llama(config, key=jax.random.key(0))
        >>> model(jnp.zeros((1, 8), jnp.int32)).logits.shape
        (1, 8, 256)
        >>> cache = model.empty_cache(batch=1, slots=16)
        >>> out = model.prefill(jnp.zeros((1, 8), jnp.int32), cache)
        >>> out = model(jnp.argmax(out.logits, -1), cache=out.cache)  # one decode step
        >>> out.cache.lengths.tolist()
        [9]
    """

    config: LlamaConfig = eqx.field(static=True)
    embed_tokens: Embedding
    layers: tuple[LlamaLayer, ...]
    norm: RMSNorm
    lm_head: Linear | None

    def __init__(self, config: LlamaConfig, dtype: Any = jnp.float32, *, key: PRNGKeyArray):
        if not isinstance(config, LlamaConfig):
            raise TypeError(f"config: wanted a LlamaConfig, got {received(config)}")
        check_floating_dtype("dtype", dtype)
        cite("llama")
        self.config = config
        embed, layers, head = jax.random.split(check_key("key", key), 3)
        vocab, width = config.vocab_size, config.hidden_size
        self.embed_tokens = Embedding(vocab, width, dtype, key=embed)
        keys = jax.random.split(layers, config.num_hidden_layers)
        self.layers = tuple(LlamaLayer(config, dtype, key=key) for key in keys)
        self.norm = RMSNorm(width, config.rms_norm_eps, dtype)
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else Linear(width, vocab, dtype, key=head)

    @classmethod
    def load(
        cls,
        directory: str | os.PathLike[str],
        *,
        mesh: Mesh | None = None,
        dtype: Any = None,
        tensor: str = "tensor",
        progress: bool | Callable[[float, str], Any] | None = None,
    ) -> "Llama":
        """Reads a checkpoint of Hugging Face's: `config.json`, and one or several safetensors files.

        All is checked before the first weight is read, and nothing is unpickled. A weight is read
        once, by each process what its devices hold of it; beside the weights the host holds no more
        than one at a time. Frequencies in old files are passed over, and so is the output
        projection where it is tied to the embedding.

        Args:
            directory: the folder.
            mesh: of the devices that get the weights, as [`shard`][energy_attn.models.shard]
                places them; None: the mesh in force, else the default device.
            dtype: of the weights; None: that of the files, which is then one. float64 is float32
                where JAX's 64 bits are off.
            tensor: the axis that weights are split over, if the mesh has it.
            progress: a bar on standard error, or a function of the share that is done and a name;
                None: a bar if standard error is a terminal.

        Raises:
            TypeError: an argument of another type.
            ValueError: as [`from_json`][energy_attn.models.LlamaConfig.from_json]; no weights, or only
                pickled ones; a file that is truncated, no safetensors, a pointer of Git LFS, outside
                of the folder or of another `save` than the rest; more layers than the files have;
                tensors that are missing, not expected, or of another shape or dtype; or a mesh
                that `shard` refuses.

        Examples:
            >>> import jax, tempfile
            >>> from energy_attn.models import Llama, LlamaConfig
            >>> config = LlamaConfig(16, 8, 16, num_hidden_layers=1, num_attention_heads=2)
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     Llama(config, key=jax.random.key(0)).save(folder)
            ...     model = Llama.load(folder)
            >>> model.config == config
            True
        """

        def build(config: LlamaConfig) -> Llama:
            return eqx.filter_eval_shape(Llama, config, key=jax.random.key(0))

        cite("llama")
        return load(directory, build, mesh=mesh, dtype=dtype, tensor=tensor, progress=progress)

    def save(self, directory: str | os.PathLike[str], *, max_shard_size: int = 5 * 10**9) -> None:
        """Writes a checkpoint that `load` and transformers read.

        Files are on disk before the weights' file, or the index of several, takes the place of the
        old one: a save that is killed leaves the old checkpoint or the new one, `load` refuses files
        of different saves, and the next save clears up. Weights are brought together one at a time.
        Where there are several processes all call it, and the first one writes.

        Args:
            directory: the folder, made if need be; other files in it stay.
            max_shard_size: bytes of weights in a file; there are more files where one is not enough.

        Raises:
            TypeError: an argument of another type, or a weight that is traced or abstract.
            ValueError: `max_shard_size` below 1.
            OSError: a file cannot be written, on all processes; what was there before still is.
        """
        save(self, directory, max_shard_size)

    def __call__(
        self,
        tokens: Int[Array, "batch time"],
        positions: Int[Array, "#batch time"] | None = None,
        cache: LlamaCache | None = None,
        *,
        lengths: Int[Array, " batch"] | None = None,
        parallel: SequenceParallel | None = None,
        return_energies: bool = False,
        attend: Callable[..., Any] = attention,
    ) -> LlamaOutput:
        """Logits for the token after each of `tokens`.

        Without a cache the tokens see themselves, causally: the form for training. With one they
        are written to its next slots and see what it holds: prefill and decode.

        Args:
            tokens: any integer dtype.
            positions: their global positions, any integer dtype; negative = not there. They count
                from 0 if not given. A cache counts by itself.
            cache: from `empty_cache` or an earlier call; donate it to a jitted step.
            lengths: with a cache, `[batch]`: how many of the tokens each row really has, in front;
                None means all. Logits behind them mean nothing.
            parallel: None, or the `SequenceParallel` whose mesh axes the tokens' keys are spread
                over. A cache has its own.
            return_energies: whether to return the free energies of all layers, or what else
                `attend` returns beside its outputs.
            attend: what computes attention, called as [`attention`][energy_attn.attention] is; a
                `functools.partial` of that chooses an implementation or a window. What it returns
                beside its outputs may be any arrays: `energies` are those.

        Raises:
            TypeError: if `tokens`, `positions` or `lengths` is no integer array, or `cache` no
                `LlamaCache`.
            ValueError: if shapes do not fit, or there are both a cache and `positions`, or another
                `parallel` than the cache's.
            RuntimeError: (Equinox's, when it runs) the cache has too few slots left.
                `EQX_ON_ERROR=off` leaves this check out; the logits of such rows are NaN then.
        """
        if cache is None:
            if lengths is not None:
                raise ValueError(f"lengths: wanted None without a cache, got {received(lengths)}")
            x, trace = self._read(tokens, positions, parallel, attend)
        else:
            if positions is not None:
                raise ValueError(
                    f"positions: wanted None beside a cache, which counts, got {received(positions)}"
                )
            check_tokens("tokens", tokens)
            counts, wrong = fitting(self, tokens, cache, lengths, parallel=parallel)
            x, cache, trace = read_on(self, tokens, cache, counts, attend)
            x = jnp.where(wrong[:, None, None], jnp.asarray(jnp.nan, x.dtype), x)
        return LlamaOutput(self.logits(x), cache, trace.energy if return_energies else None)

    def prefill(
        self,
        tokens: Int[Array, "batch time"],
        cache: LlamaCache,
        *,
        lengths: Int[Array, " batch"] | None = None,
        chunk_size: int = 1024,
        attend: Callable[..., Any] = attention,
    ) -> LlamaOutput:
        """Reads a prompt into the cache, chunk by chunk; returns the last token's logits only.

        Args:
            tokens: the prompt, any integer dtype.
            cache: what came before, usually nothing.
            lengths: `[batch]`, how many of the tokens each row really has, in front, at least one;
                None means all. The logits are those of each row's own last token.
            chunk_size: tokens read at a time, which bounds the memory of activations.
            attend: as in a call.

        Raises:
            TypeError: if `chunk_size` is no integer, or as a call does.
            ValueError: if there is no token, `chunk_size` is below 1, or as a call does.
            RuntimeError: as a call does.
        """
        time = check_tokens("tokens", tokens).shape[1]
        check_integer("chunk_size", chunk_size, 1)
        if time < 1:
            raise ValueError(f"tokens: wanted at least one token, got {received(tokens)}")
        counts, wrong = fitting(self, tokens, cache, lengths, at_once=chunk_size)
        x, cache = read_chunks(self, tokens, cache, counts, chunk_size, attend)
        x = jnp.where(wrong[:, None, None], jnp.asarray(jnp.nan, x.dtype), x)
        return LlamaOutput(self.logits(x), cache, None)

    def read_tree(self, tree: PrefixTree, cache: LlamaCache) -> TreeOutput:
        """Logits for the token after each node of a prefix tree that goes on from the cache.

        Each node is read once, and sees the whole context and its ancestors. The cache is not
        changed: its `commit` writes what is accepted of the tree.

        Args:
            tree: of tokens behind those of the cache.
            cache: from `empty_cache` or an earlier call.

        Raises:
            TypeError: if `tree` is no `PrefixTree`, or `cache` no `LlamaCache`.
            ValueError: if they do not fit each other, or the model.

        Source: SpecInfer (arXiv 2305.09781): a token tree is read in one pass.

        Examples:
            >>> import jax, jax.numpy as jnp
            >>> from energy_attn.models import Llama, LlamaConfig
            >>> from energy_attn.prefix_tree import accept_greedy, pack
            >>> config = LlamaConfig(16, 32, 64, num_hidden_layers=1, num_attention_heads=4)
            >>> model = Llama(config, key=jax.random.key(0))
            >>> tree = pack(jnp.array([[[3, 1, 4], [3, 1, 5]]]))
            >>> read = model.read_tree(tree, model.empty_cache(batch=1, slots=16))
            >>> read.logits.shape, accept_greedy(tree, read.logits).path.shape
            ((1, 6, 16), (1, 3))
        """
        check_tree("tree", tree)
        check_cache(cache, self.config, len(tree.tokens))
        return read_tree(self, tree, cache)

    def empty_cache(
        self,
        batch: int,
        slots: int,
        *,
        parallel: SequenceParallel | None = None,
        block_size: int | None = None,
        quantize: Literal["int8"] | None = None,
        window: int | None = None,
    ) -> LlamaCache:
        """A cache that holds nothing yet, in the dtype of the weights.

        Args:
            batch: number of sequences.
            slots: number of tokens that it can hold, rounded up to whole blocks on every device.
            parallel: the axes of the mesh in force to spread the slots over; None: not at all.
            block_size: consecutive tokens that lie on one device; None: 128, or fewer where a
                device holds fewer.
            quantize: as in [`KVCache.empty`][energy_attn.distributed.KVCache.empty].
            window: likewise.

        Raises:
            TypeError: an argument of another type.
            ValueError: sizes below one, or as `KVCache.empty` does.
        """
        if block_size is None:
            devices = 1 if parallel is None else check_mesh(parallel)
            block_size = min(128, -(-check_integer("slots", slots, 1) // devices))

        def make() -> KVCache:
            return KVCache.empty(
                batch,
                slots,
                self.config.num_key_value_heads,
                self.config.head_dim,
                dtype=self._dtype,
                quantize=quantize,
                window=window,
                parallel=parallel,
                block_size=block_size,
            )

        # arrays of their own, so that the cache can be donated
        return LlamaCache(tuple(make() for _ in range(self.config.num_hidden_layers)))

    @property
    def _dtype(self) -> jnp.dtype:
        return self.embed_tokens.weight.dtype

    def _read(
        self,
        tokens: Array,
        positions: Array | None,
        parallel: SequenceParallel | None,
        attend: Callable[..., Any],
    ) -> tuple[Array, LlamaTrace]:
        """Final hidden states of tokens that see themselves, and what attention did."""
        batch, time = check_tokens("tokens", tokens).shape
        turns = jnp.arange(time, dtype=jnp.int32)[None]
        if positions is not None:
            turns = positions = check_tokens("positions", positions).astype(jnp.int32)
            check_broadcastable("positions", positions, (batch, time))
        rope = self.rope(turns)

        def see(query: Array, key: Array, value: Array) -> tuple[Array, LlamaTrace]:
            out, energy = attend(
                query,
                key,
                value,
                is_causal=True,
                query_positions=positions,
                key_positions=positions,
                parallel=parallel,
                return_energy=True,
            )
            return out, LlamaTrace(query, out, energy)

        x, traces = self.embed_tokens(tokens), []
        for layer in self.layers:
            x, trace = layer(x, rope, see)
            traces.append(trace)
        return self.norm(x), joined(traces)

    def rope(self, positions: Int[Array, "batch time"]) -> tuple[Array, Array]:
        """Cosine and sine of the rotary embedding, `[batch, time, 1, head_dim / 2]`. Raises nothing."""
        config = self.config
        dtype = lse_dtype(self._dtype)
        turns = frequencies(config.head_dim, config.rope_theta, config.rope_scaling, dtype)
        return rotary(positions, turns)

    def logits(self, x: Float[Array, "batch time width"]) -> Float[Array, "batch time vocab"]:
        """The output projection of final hidden states, in float32 or wider. Raises nothing."""
        return dot(x, (self.lm_head or self.embed_tokens).weight)


def check_tokens(name: str, x: Any) -> Any:
    """Returns `x`, integers `[batch, time]`; raises `TypeError` or `ValueError` for another."""
    x = check_integral(name, x)
    check_shape(name, x, ("batch", "time"))
    return x
