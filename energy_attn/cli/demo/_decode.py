"""Decoding by a step that is compiled ahead of time, so that its communication can be counted."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from energy_attn.distributed import SequenceParallel, collectives

from ... import attention
from ...models import Llama, LlamaCache
from ...models.decoder._output import Trace
from ...models.decoder._read import read_on

_CHUNK = 512  # bytes of the prompt read at a time
_TEMPERATURE, _SEED = 0.5, 0  # of the draws: greedy text soon repeats itself
Step = Callable[[Llama, Array, LlamaCache], tuple[Array, LlamaCache, Trace]]


class Held(NamedTuple):
    """The content of a cache: keys and values `[layers, S, K, H]`, and positions `[S]`, -1 if empty."""

    key: np.ndarray
    value: np.ndarray
    positions: np.ndarray


class Decoded(NamedTuple):
    """The results of decoding.

    Attributes:
        tokens: int `[count]`, the decoded bytes.
        seconds: `[count]`, the time of each step.
        prefill_seconds: the time for the prompt, without compilation.
        traces: query, output and energy of each layer and step, on the host.
        held: the content of the cache after the last step, on the host.
        slots: number of slots of the cache.
        step: the compiled step.
    """

    tokens: np.ndarray
    seconds: np.ndarray
    prefill_seconds: float
    traces: Trace
    held: Held
    slots: int
    step: jax.stages.Compiled


class Sent(NamedTuple):
    """The communication of a compiled step and its peak memory, on one device."""

    kinds: tuple[str, ...]
    operations: int
    bytes: int
    peak: int


def one_device(query: Array, key: Array, value: Array, **options: Any) -> tuple[Array, Array]:
    """Attention by `jax.nn.dot_product_attention`, with the signature of ours; its energies are NaN."""
    queries, keys = options["query_positions"], options["key_positions"]
    seen = (keys[:, None, :] <= queries[:, :, None]) & (keys >= 0)[:, None, :]
    out = jax.nn.dot_product_attention(query, key, value, mask=seen[:, None])
    return out, jnp.full(query.shape[:-1], jnp.nan, jnp.float32)


def gathered(query: Array, key: Array, value: Array, **options: Any) -> Any:
    """Attention after an all-gather of keys and values, to compare tree reduction with."""
    options["parallel"] = None
    key, value, options["key_positions"] = (
        jax.lax.with_sharding_constraint(x, P()) for x in (key, value, options["key_positions"])
    )
    return attention(query, key, value, **options)


def step_of(attend: Callable[..., Any]) -> Step:
    """A step: reads a token `[B, 1]` and draws the next one."""

    def step(model: Llama, token: Array, cache: LlamaCache) -> tuple[Array, LlamaCache, Trace]:
        one = jnp.ones(1, jnp.int32)
        x, after, trace = read_on(model, token, cache, one, attend)
        return _drawn(model.logits(x), after), after, trace

    return step


def _drawn(logits: Array, cache: LlamaCache) -> Array:
    """Draws the byte behind those of the cache; the noise depends on its position alone."""
    key = jax.random.fold_in(jax.random.key(_SEED), cache.lengths[0])
    return jax.random.categorical(key, logits / _TEMPERATURE).astype(jnp.int32)


def compile_step(
    model: Llama, slots: int, parallel: SequenceParallel | None, attend: Callable[..., Any]
) -> jax.stages.Compiled:
    """The compiled step for a cache of `slots`, which is donated."""
    cache = model.empty_cache(1, slots, parallel=parallel)
    step = jax.jit(step_of(attend), donate_argnums=2)
    return step.lower(model, jnp.zeros((1, 1), jnp.int32), cache).compile()


def decode(
    model: Llama,
    prompt: np.ndarray,
    count: int,
    parallel: SequenceParallel | None = None,
    attend: Callable[..., Any] = attention,
) -> Decoded:
    """Reads `prompt` and decodes `count` bytes; with `parallel`, over the mesh in force.

    The model lies on the devices of the cache.
    """

    def prefill(model: Llama, tokens: Array, cache: LlamaCache) -> tuple[Array, LlamaCache]:
        out = model.prefill(tokens, cache, chunk_size=_CHUNK, attend=attend)
        assert out.cache is not None
        return _drawn(out.logits, out.cache), out.cache

    slots = len(prompt) + count
    step = compile_step(model, slots, parallel, attend)
    cache = model.empty_cache(1, slots, parallel=parallel)
    tokens = jnp.asarray(prompt[None], jnp.int32)
    read = jax.jit(prefill, donate_argnums=2).lower(model, tokens, cache).compile()

    began = time.perf_counter()
    token, cache = jax.block_until_ready(read(model, tokens, cache))
    prefill_seconds = time.perf_counter() - began
    decoded, seconds, traces = [], [], []
    for _ in range(count):
        decoded.append(int(token[0, 0]))
        began = time.perf_counter()
        token, cache, trace = jax.block_until_ready(step(model, token, cache))
        seconds.append(time.perf_counter() - began)
        traces.append(jax.tree.map(np.asarray, trace))
    joined = jax.tree.map(lambda *steps: np.concatenate(steps, axis=2), *traces)
    key, value = (
        np.stack([np.asarray(getattr(layer, name)[0]) for layer in cache.layers])
        for name in ("key", "value")
    )
    held = Held(key, value, np.asarray(cache.layers[0].positions[0]))
    return Decoded(
        np.array(decoded, np.uint8),
        np.array(seconds),
        prefill_seconds,
        joined,
        held,
        cache.capacity,
        step,
    )


def sent(step: jax.stages.Compiled) -> Sent:
    """Counts the collectives of a compiled step, their bytes, and its peak memory."""
    found = collectives(step)
    memory: Any = step.memory_analysis()
    peak = memory.argument_size_in_bytes + memory.output_size_in_bytes
    peak += memory.temp_size_in_bytes - memory.alias_size_in_bytes
    return Sent(
        tuple(sorted({c.kind for c in found})),
        sum(c.count or 0 for c in found),
        sum(c.bytes * (c.count or 0) for c in found),
        peak,
    )
