r"""The Llama decoder in its standard form, with attention by this library.

Names of fields and parameters are those of Hugging Face's `LlamaConfig` and `LlamaForCausalLM`, and
so are the conventions: weights `(out, in)`, rotary embedding of the two halves of a head.
"""

import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int, PRNGKeyArray

from .._attention import attention
from .._citation import cite
from ..distributed import SequenceParallel
from ..distributed._placement import check_mesh
from ..kernels._errors import (
    check_broadcastable,
    check_floating_dtype,
    check_integer,
    check_integral,
    check_key,
    check_shape,
    received,
)
from ..kernels._state import lse_dtype
from ._cache import LlamaCache, append, slots_at
from ._config import LlamaConfig
from ._layers import Embedding, Linear, LlamaLayer, RMSNorm, dot, rotary
from ._output import LlamaOutput, LlamaTrace


class Llama(eqx.Module):
    r"""A Llama decoder: tokens in, logits out.

    $$x \mathrel{+}= W_O \nabla F(\mathrm{norm}(x)), \qquad
      x \mathrel{+}= \mathrm{SwiGLU}(\mathrm{norm}(x))$$

    Args:
        config: its sizes.
        dtype: of all weights.
        key: for the initial weights: normal, of deviation 0.02.

    `layers` holds all layers' weights stacked along a leading axis; `lm_head` is None where the
    embedding serves as output projection too.

    Raises:
        TypeError: if `config` is no `LlamaConfig`, `dtype` is not floating, or `key` is no key.

    Source: Touvron et al. (arXiv 2302.13971), section 2.2; computed as Hugging Face's
    `LlamaForCausalLM` without rope scaling.

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
        >>> int(out.cache.length)
        9
    """

    config: LlamaConfig = eqx.field(static=True)
    embed_tokens: Embedding
    layers: LlamaLayer
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
        self.layers = eqx.filter_vmap(lambda key: LlamaLayer(config, dtype, key=key))(
            jax.random.split(layers, config.num_hidden_layers)
        )
        self.norm = RMSNorm(width, config.rms_norm_eps, dtype)
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else Linear(width, vocab, dtype, key=head)

    def __call__(
        self,
        tokens: Int[Array, "batch time"],
        positions: Int[Array, "#batch time"] | None = None,
        cache: LlamaCache | None = None,
        *,
        parallel: SequenceParallel | None = None,
        return_energies: bool = False,
        attend: Callable[..., Any] = attention,
    ) -> LlamaOutput:
        """Logits for the token after each of `tokens`.

        Without a cache the tokens see themselves, causally: the form for training. With one they
        are written to its next slots and see what it holds: prefill and decode.

        Args:
            tokens: any integer dtype.
            positions: their global positions, any integer dtype; negative = not there. They go on
                from the cache's length, or from 0, if not given.
            cache: from `empty_cache` or an earlier call; donate it to a jitted step.
            parallel: None, or the `SequenceParallel` whose mesh axes the cache's slots (without a
                cache, the tokens' keys) are spread over.
            return_energies: whether to return the free energies of all layers, or what else
                `attend` returns beside its outputs.
            attend: what computes attention, called as [`attention`][energy_attn.attention] is; a
                `functools.partial` of that chooses an implementation or a window. What it returns
                beside its outputs may be any arrays: `energies` are those.

        Raises:
            TypeError: if `tokens` or `positions` is no integer array, or `cache` no `LlamaCache`.
            ValueError: if shapes do not fit, or the cache has too few slots left. In a compiled
                step the latter is not known when it is traced: the logits are NaN then.
        """
        x, cache, trace = self._read(
            tokens, positions, cache, parallel=parallel, attend=attend, record=return_energies
        )
        return LlamaOutput(self._logits(x), cache, trace.energy if trace else None)

    def prefill(
        self,
        tokens: Int[Array, "batch time"],
        cache: LlamaCache,
        *,
        chunk_size: int = 1024,
        parallel: SequenceParallel | None = None,
        attend: Callable[..., Any] = attention,
    ) -> LlamaOutput:
        """Reads a prompt into the cache, chunk by chunk; returns the last token's logits only.

        Args:
            tokens: the prompt, any integer dtype.
            cache: what came before, usually nothing.
            chunk_size: tokens read at a time, which bounds the memory of activations.
            parallel: as in a call.
            attend: as in a call.

        Raises:
            TypeError: if `chunk_size` is no integer, or as a call does.
            ValueError: if there is no token, `chunk_size` is below 1, or as a call does.
        """
        time = _check_tokens("tokens", tokens).shape[1]
        check_integer("chunk_size", chunk_size, 1)
        if time < 1:
            raise ValueError(f"tokens: wanted at least one token, got {received(tokens)}")
        self._check_cache(cache, tokens)

        def read(carry: tuple[Array, LlamaCache], chunk: Array) -> tuple[tuple, None]:
            x, cache, _ = self._read(chunk, None, carry[1], parallel=parallel, attend=attend)
            assert cache is not None
            return (x[:, -1:], cache), None

        # the short chunk comes first, so that the last token ends a whole one
        size = min(chunk_size, time)
        short = time % size
        carry = self.embed_tokens(tokens[:, :1]), cache
        if short:
            carry, _ = read(carry, tokens[:, :short])
        chunks = tokens[:, short:].reshape(len(tokens), -1, size).swapaxes(0, 1)
        (x, cache), _ = lax.scan(read, carry, chunks)
        return LlamaOutput(self._logits(x), cache, None)

    def empty_cache(
        self, batch: int, slots: int, *, parallel: SequenceParallel | None = None
    ) -> LlamaCache:
        """A cache that holds nothing yet, in the dtype of the weights.

        Args:
            batch: number of sequences.
            slots: number of tokens that it can hold. With `parallel` it is rounded up to a
                multiple of the devices, and each device of the mesh in force holds its share.
            parallel: as in a call.

        Raises:
            TypeError: if a size is no integer, or `parallel` no `SequenceParallel`.
            ValueError: if a size is negative, or an axis of `parallel` is not in the mesh in force.
        """
        check_integer("batch", batch, 0)
        check_integer("slots", slots, 0)
        if parallel is not None:
            check_mesh(parallel)
            sizes = jax.sharding.get_abstract_mesh().shape
            slots += -slots % math.prod(sizes[axis] for axis in parallel.axes)
        heads, width = self.config.num_key_value_heads, self.config.head_dim
        shape = (self.config.num_hidden_layers, batch, slots, heads, width)

        def make() -> LlamaCache:
            key, value = (jnp.zeros(shape, self.embed_tokens.weight.dtype) for _ in range(2))
            positions = jnp.full((batch, slots), -1, jnp.int32)
            return LlamaCache(key, value, positions, jnp.zeros((), jnp.int32))

        if parallel is None:
            return make()
        whole, turns = slots_at(2, parallel), slots_at(1, parallel)
        layout: Any = (whole, whole, turns, P())
        return jax.jit(make, out_shardings=LlamaCache(*layout))()

    def _read(
        self,
        tokens: Array,
        positions: Array | None,
        cache: LlamaCache | None,
        *,
        parallel: SequenceParallel | None,
        attend: Callable[..., Any],
        record: bool = False,
    ) -> tuple[Array, LlamaCache | None, LlamaTrace | None]:
        """Final hidden states, the cache with these tokens, and what attention did if wanted."""
        batch, time = _check_tokens("tokens", tokens).shape
        if positions is not None:
            positions = _check_tokens("positions", positions).astype(jnp.int32)
            check_broadcastable("positions", positions, (batch, time))
        x = self.embed_tokens(tokens)
        start, key_positions = jnp.zeros((), jnp.int32), positions
        if cache is not None:
            full = self._check_cache(cache, tokens)
            start, x = cache.length, jnp.where(full, jnp.asarray(jnp.nan, x.dtype), x)
        turns = start + jnp.arange(time, dtype=jnp.int32)[None] if positions is None else positions
        if cache is not None:
            positions = jnp.broadcast_to(turns, (batch, time))
            key_positions = append(cache.positions, positions, (0, start), parallel)
            cache = cache._replace(positions=key_positions, length=start + time)
        width, dtype = self.layers.self_attn.head_dim, self.embed_tokens.weight.dtype
        rope = rotary(turns, width, self.config.rope_theta, lse_dtype(dtype))

        def step(carry: tuple, scanned: tuple) -> tuple[tuple, LlamaTrace | None]:
            (x, cache), (layer, index) = carry, scanned
            query, key, value = layer.self_attn.project(layer.input_layernorm(x), rope)
            if cache is not None:
                keys = append(cache.key, key[None], (index, 0, start), parallel)
                values = append(cache.value, value[None], (index, 0, start), parallel)
                cache = cache._replace(key=keys, value=values)
                key, value = keys[index], values[index]
            out, energy = attend(
                query,
                key,
                value,
                is_causal=True,
                query_positions=positions,
                key_positions=key_positions,
                parallel=parallel,
                return_energy=True,
            )
            x = x + layer.self_attn.o_proj(lax.collapse(out, 2))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
            return (x, cache), LlamaTrace(query, out, energy) if record else None

        layers = self.layers, jnp.arange(self.config.num_hidden_layers, dtype=jnp.int32)
        (x, cache), trace = lax.scan(step, (x, cache), layers)
        return self.norm(x), cache, trace

    def _logits(self, x: Array) -> Array:
        return dot(x, (self.lm_head or self.embed_tokens).weight)

    def _check_cache(self, cache: Any, tokens: Array) -> Array:
        """Checks that `tokens` fit the cache, as far as can be; whether its slots are exceeded."""
        if not isinstance(cache, LlamaCache):
            raise TypeError(f"cache: wanted a LlamaCache, got {received(cache)}")
        (batch, time), config = tokens.shape, self.config
        heads, width = config.num_key_value_heads, config.head_dim
        shape = (config.num_hidden_layers, batch, "slots", heads, width)
        check_shape("cache.key", cache.key, shape)
        slots = cache.key.shape[2]
        full = f"cache: wanted {time} slots left of {slots} for tokens {received(tokens)}"
        if time > slots:
            raise ValueError(f"{full}, got {slots}")
        if isinstance(cache.length, Tracer):
            # Not eqx.error_if: in a program with collectives its error hangs the devices that wait
            # for the one that raised it (jax 0.10, CPU). NaN is as loud.
            return cache.length > slots - time
        if int(cache.length) + time > slots:
            raise ValueError(f"{full}, got {slots - int(cache.length)}")
        return jnp.zeros((), bool)


def _check_tokens(name: str, x: Any) -> Array:
    x = check_integral(name, x)
    check_shape(name, x, ("batch", "time"))
    return x
