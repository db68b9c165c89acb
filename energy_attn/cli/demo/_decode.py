"""Decoding in one program, a loop over bytes, compiled ahead of time so that its communication can be counted.

Parts of the time of a byte are differences of programs with and without a part, timed in turn.
"""

import contextlib
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from energy_attn.distributed import SequenceParallel, collectives
from energy_attn.kernels.internal import Attention, equations, explain, platform_here

from ... import attention
from ...models import DecoderCache, Llama
from ...models.decoder._cache import Trace
from ...models.decoder._read import read_on


def kernels(traced: jax.stages.Traced) -> str:
    """The names of the kernels that a program runs on this machine, each once, in order, joined by commas.

    Neither `reference`, which leaves only its operations in a program, nor any under `jax.vmap`.
    """
    found = []
    for equation in equations(traced.jaxpr):
        call: Any = equation.params.get("call")
        if isinstance(getattr(call, "owner", None), Attention):
            avals: Any = (x.aval for x in equation.invars)
            (operands,) = call.split(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals)
            names, settings = [kernel.name for kernel in call.owner.kernels], call.owner.settings
            chosen = explain(names, settings, operands, platform_here(), jax.devices()[0])
            found.append(chosen.name)
    return ", ".join(dict.fromkeys(found))


_CHUNK = 512  # bytes of the prompt read at a time
_TEMPERATURE, _SEED = 0.5, 0  # of the draws: greedy text soon repeats itself


class CacheContent(NamedTuple):
    key: np.ndarray  # `[layers, S, K, H]`
    value: np.ndarray
    positions: np.ndarray  # `[S]`, -1 if empty


class Decoded(NamedTuple):
    tokens: np.ndarray  # int `[count]`, the decoded bytes
    prefill_seconds: float  # the time for the prompt, without compilation
    prefill_kernels: str  # the kernels that read the prompt; empty without any of this library's
    kernels: str  # those of a step
    traces: Trace  # query, output and energy of each layer and step, on the host
    cache_content: CacheContent  # the content of the cache after the last step, on the host
    # the model, the first byte and the cache of the prompt, from which the loop decodes
    start: tuple[Llama, Array, DecoderCache]
    loop: jax.stages.Compiled  # the compiled loop, which consumes the cache that it is given

    @property
    def slots(self) -> int:
        return self.start[2].capacity


class Sent(NamedTuple):
    """The communication of a step of a compiled loop, and the loop's peak memory, on one device."""

    kinds: tuple[str, ...]
    operations: int
    bytes: int
    peak: int


def one_device(
    query: Array,
    key: Array,
    value: Array,
    *,
    query_positions: Array,
    key_positions: Array,
    **_: object,
) -> tuple[Array, Array]:
    """Attention by `jax.nn.dot_product_attention`; its energies are NaN."""
    seen = key_positions[:, None, :] <= query_positions[:, :, None]
    seen &= (key_positions >= 0)[:, None, :]
    out = jax.nn.dot_product_attention(query, key, value, mask=seen[:, None])
    return out, jnp.full(query.shape[:-1], jnp.nan, jnp.float32)


def gathered(query: Array, key: Array, value: Array, **options: Any) -> Any:
    """Attention after an all-gather of keys and values, to compare tree reduction with."""
    options["parallel"] = None
    key, value, options["key_positions"] = (
        jax.lax.with_sharding_constraint(x, P()) for x in (key, value, options["key_positions"])
    )
    return attention(query, key, value, **options)


def unmerged(query: Array, key: Array, value: Array, **options: Any) -> Any:
    """Attention of each device to its own keys alone, whose states nothing merges: only to be timed."""
    parallel, options["parallel"] = options["parallel"], None
    names = "query_positions", "key_positions"
    queries, keys = (options.pop(name) for name in names)

    def local_attention(query: Array, key: Array, value: Array, *positions: Array) -> Any:
        return attention(query, key, value, **options, **dict(zip(names, positions, strict=True)))

    split = P(None, parallel.axes)
    specs = P(), split, split, P(), split
    mapped = jax.shard_map(local_attention, in_specs=specs, out_specs=P(), check_vma=False)
    return mapped(query, key, value, queries, keys)


def absent(query: Array, key: Array, value: Array, **_: object) -> tuple[Array, Array]:
    """No attention: the query itself. Only to be timed."""
    return query, query[..., 0]


def _drawn(logits: Array, cache: DecoderCache) -> Array:
    key = jax.random.fold_in(jax.random.key(_SEED), cache.lengths[0])
    return jax.random.categorical(key, logits / _TEMPERATURE).astype(jnp.int32)


def trace_loop(
    model: Llama,
    slots: int,
    count: int,
    parallel: SequenceParallel | None,
    attend: Callable[..., Any],
) -> jax.stages.Traced:
    """The loop of `count` bytes for a cache of `slots`, which is donated."""

    def loop(model: Llama, first: Array, cache: DecoderCache) -> tuple[Array, Trace, DecoderCache]:
        one = jnp.ones(1, jnp.int32)

        def step(carry: tuple[Array, DecoderCache], _: None) -> tuple[Any, tuple[Array, Trace]]:
            token, cache = carry
            x, new_cache, trace = read_on(model, token, cache, one, attend=attend)
            return (_drawn(model.logits(x), new_cache), new_cache), (token[0, 0], trace)

        (_, cache), (tokens, traces) = lax.scan(step, (first, cache), None, length=count)
        return tokens, traces, cache

    cache = model.empty_cache(1, slots, parallel=parallel)
    return jax.jit(loop, donate_argnums=2).trace(model, jnp.zeros((1, 1), jnp.int32), cache)


def compile_loop(*args: Any) -> jax.stages.Compiled:
    return trace_loop(*args).lower().compile()


def decode(
    model: Llama,
    prompt: np.ndarray,
    count: int,
    parallel: SequenceParallel | None = None,
    attend: Callable[..., Any] = attention,
) -> Decoded:
    """Reads `prompt` and decodes `count` bytes; with `parallel`, over the mesh in force."""

    def prefill(model: Llama, tokens: Array, cache: DecoderCache) -> tuple[Array, DecoderCache]:
        out = model.prefill(tokens, cache, chunk_size=_CHUNK, attend=attend)
        assert out.cache is not None
        return _drawn(out.logits, out.cache), out.cache

    slots = len(prompt) + count
    step = trace_loop(model, slots, count, parallel, attend)
    loop = step.lower().compile()
    cache = model.empty_cache(1, slots, parallel=parallel)
    tokens = jnp.asarray(prompt[None], jnp.int32)
    reading = jax.jit(prefill, donate_argnums=2).trace(model, tokens, cache)
    read = reading.lower().compile()

    began = time.perf_counter()
    first, cache = jax.block_until_ready(read(model, tokens, cache))
    prefill_seconds = time.perf_counter() - began
    decoded, traces, final_cache = loop(model, first, copied(cache))
    steps = jax.tree.map(lambda x: np.moveaxis(np.asarray(x)[:, :, :, 0], 0, 2), traces)
    key, value = (
        np.stack([np.asarray(getattr(layer, name)[0]) for layer in final_cache.layers])
        for name in ("key", "value")
    )
    cache_content = CacheContent(key, value, np.asarray(final_cache.layers[0].positions[0]))
    text = np.asarray(decoded).astype(np.uint8)
    start, names = (model, first, cache), (kernels(reading), kernels(step))
    return Decoded(text, prefill_seconds, *names, steps, cache_content, start, loop)


@jax.jit
def copied(cache: DecoderCache) -> DecoderCache:
    return jax.tree.map(jnp.copy, cache)


def sent(loop: jax.stages.Compiled, count: int) -> Sent:
    operations = collectives(loop)
    memory: Any = loop.memory_analysis()
    peak = memory.argument_size_in_bytes + memory.output_size_in_bytes
    peak += memory.temp_size_in_bytes - memory.alias_size_in_bytes
    return Sent(
        tuple(sorted({c.kind for c in operations})),
        sum(c.count or 0 for c in operations) // count,
        sum(c.bytes * (c.count or 0) for c in operations) // count,
        peak,
    )


_ROUNDS = 5


class TimedLoop(NamedTuple):
    """A compiled loop over bytes, its start, and the number of calls in a row."""

    decoded: Decoded
    loop: jax.stages.Compiled
    calls: int = 1


class Parts(NamedTuple):
    """The parts of the time of a byte over a mesh, in seconds."""

    # how much longer a step takes than one in which each device attends to its own keys, and nothing is merged
    merging: float
    attending: float  # the time of attention without merges, less that of attention on one device
    # the time of a step without attention, which every device computes, less that on one device. The three sum up to
    # the difference from one device.
    repeating: float
    calling: float  # how much longer a byte takes where each is a call of a program
    calling_one: float  # as `calling`, on one device


def parts(tree: Decoded, alone: Decoded, mesh: jax.sharding.Mesh, over: SequenceParallel) -> Parts:
    count = len(tree.tokens)

    def made(decoded: Decoded, attend: Callable[..., Any], calls: int = 1) -> TimedLoop:
        parallel, sizes = over if decoded is tree else None, (decoded.slots, count // calls)
        with jax.set_mesh(mesh) if decoded is tree else contextlib.nullcontext():
            loop = compile_loop(decoded.start[0], *sizes, parallel, attend)
        return TimedLoop(decoded, loop, calls)

    runs = {"tree": TimedLoop(tree, tree.loop), "alone": TimedLoop(alone, alone.loop)}
    for decoded, suffix in ((tree, ""), (alone, " alone")):
        runs[f"bare{suffix}"] = made(decoded, absent)
        runs[f"calls{suffix}"] = made(decoded, attention, count)
    runs["unmerged"] = made(tree, unmerged)
    took = medians(runs)
    alone_attending = took["alone"] - took["bare alone"]
    return Parts(
        took["tree"] - took["unmerged"],
        took["unmerged"] - took["bare"] - alone_attending,
        took["bare"] - took["bare alone"],
        took["calls"] - took["tree"],
        took["calls alone"] - took["alone"],
    )


def medians(runs: dict[str, TimedLoop]) -> dict[str, float]:
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(_ROUNDS):
        first = turn % len(runs)  # none is always the first
        for name in (*runs, *runs)[first : first + len(runs)]:
            seconds[name].append(_seconds(runs[name]))
    return {name: statistics.median(each) for name, each in seconds.items()}


def _seconds(run: TimedLoop) -> float:
    model, first, cache = run.decoded.start
    cache = jax.block_until_ready(copied(cache))
    began = time.perf_counter()
    for _ in range(run.calls):
        *_, cache = jax.block_until_ready(run.loop(model, first, cache))
    return (time.perf_counter() - began) / len(run.decoded.tokens)
