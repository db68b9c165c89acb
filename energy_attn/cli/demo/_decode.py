"""Decoding in one program, a loop over bytes, compiled ahead of time so that its communication can be counted.

The time of a part of a step is the difference between programs with and without it, timed alternately. The checks are
attention in float64 NumPy, the predicted communication, and the loss on the text.
"""

import contextlib
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, PyTree

from energy_attn.distributed import SequenceParallel, collectives
from energy_attn.kernels.internal import derivatives, explain, jaxprs, platform_here

from ... import attention
from ...models import DecoderCache, Llama, LlamaConfig
from ...models.decoder._cache import Trace
from ...models.decoder._read import read_on


def kernels(traced: jax.stages.Traced) -> str:
    """The distinct names of the kernels that a program runs on this machine, in order, joined by commas.

    It finds neither `reference`, which leaves only its operations in a program, nor kernels under `jax.vmap`.
    """
    names = []
    for equation in jaxprs.equations(traced.jaxpr):
        call: Any = equation.params.get("call")
        if isinstance(getattr(call, "owner", None), derivatives.Attention):
            avals: Any = (x.aval for x in equation.invars)
            (operands,) = call.split(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals)
            tried, settings = [kernel.name for kernel in call.owner.kernels], call.owner.settings
            chosen = explain(tried, settings, operands, platform_here(), jax.devices()[0])
            names.append(chosen.name)
    return ", ".join(dict.fromkeys(names))


_CHUNK = 512  # bytes of the prompt read at a time
_TEMPERATURE, _SEED = 0.5, 0  # of the draws: greedy text soon repeats itself
_EPS = float(np.finfo(np.float32).eps)
_ROUNDS = 5
WINDOW = 512  # bytes of a piece in most of the training of the library's model


class CacheContent(NamedTuple):
    key: np.ndarray  # `[layers, S, K, H]`
    value: np.ndarray
    positions: np.ndarray  # `[S]`, -1 if empty


class Decoded(NamedTuple):
    tokens: np.ndarray  # int `[count]`, the decoded bytes
    prefill_seconds: float  # the time for the prompt, without compilation
    prefill_kernels: str  # the kernels that read the prompt; empty if none is this library's
    kernels: str  # the kernels of a step
    traces: Trace  # query, output and energy of each layer and step, on the host
    cache_content: CacheContent  # the content of the cache after the last step, on the host
    start: tuple[
        Llama, Array, DecoderCache
    ]  # the model, the first byte and the cache of the prompt
    loop: jax.stages.Compiled  # the compiled loop, whose cache is donated

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
    """Attention of each device to its own keys, without a merge: for timing only."""
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
    """Returns the query in place of attention: for timing only."""
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


class TimedLoop(NamedTuple):
    decoded: Decoded  # has the start of the loop
    loop: jax.stages.Compiled
    calls: int = 1  # the number of calls in a row


class Parts(NamedTuple):
    """The parts of the time of a byte over a mesh, in seconds."""

    # the first three sum up to the difference from one device
    merging: float  # a step, minus a step without merges
    attending: float  # attention without merges, minus attention on one device
    repeating: (
        float  # a step without attention, which every device computes, minus that on one device
    )
    calling: float  # a byte in a call of a program for each, minus a byte in the loop
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
        first = turn % len(runs)  # each is the first in turn
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


def float64_attention(
    query: np.ndarray, key: np.ndarray, value: np.ndarray, seen: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    r"""$F = \log\sum_a e^{q \cdot k_a / \sqrt{H}}$ and $\nabla F = \sum_a P_a v_a$, by definition.

    Args:
        query: `[T, N, H]`.
        key: `[S, K, H]`; query head `n` reads key head `n // (N / K)`.
        value: `[S, K, H]`.
        seen: `[T, S]`, True where a key takes part.

    Returns:
        `out` `[T, N, H]`, `energy` `[T, N]` and the scores `[N, T, S]`, all float64.
    """
    heads = query.shape[1] // key.shape[1]
    key, value = (np.repeat(x.astype(np.float64), heads, axis=1) for x in (key, value))
    query = query.astype(np.float64) / np.sqrt(query.shape[-1])
    scores = np.matmul(query.transpose(1, 0, 2), key.transpose(1, 2, 0))
    scores = np.where(seen, scores, -np.inf)
    highest = scores.max(-1, keepdims=True)
    weights = np.exp(scores - highest)
    total = weights.sum(-1, keepdims=True)
    out = np.matmul(weights / total, value.transpose(1, 0, 2))
    return out.transpose(1, 0, 2), (highest + np.log(total))[..., 0].T, scores


def errors(trace: Trace, cache_content: CacheContent, first: int) -> list[tuple[float, float]]:
    """The largest error of an energy and of an output, each with the error that rounding allows."""
    query, outs, energies = (np.asarray(x)[:, 0] for x in trace)
    steps = first + np.arange(query.shape[1])
    seen = (cache_content.positions >= 0) & (cache_content.positions <= steps[:, None])
    worst = np.zeros((len(query), 4))
    for layer, (key, value) in enumerate(zip(cache_content.key, cache_content.value, strict=True)):
        out, energy, scores = float64_attention(query[layer], key, value, seen)
        differences = energies[layer] - energy, outs[layer] - out
        worst[layer] = [np.abs(x).max() for x in (*differences, scores[:, seen], value)]
    energy, out, score, size = worst.max(0)  # NaN if any is
    # A score is a sum of H products, rounded relative to their size. An error of the scores changes F
    # by as much, and the weights, hence the output relative to the values, by twice as much.
    allowed = 16 * _EPS * max(1.0, score)
    return [(energy, allowed), (out, 2 * allowed * max(1.0, size))]


def expected(config: LlamaConfig, batch: int = 1, time: int = 1) -> tuple[int, int]:
    """The number of collectives of tree reduction in a step, and their bytes, on one device.

    Each layer has one gather of states, `B T N (H + 1)` numbers in float32, which `merge="auto"` chooses for
    a few rows on the devices of one process.
    """
    layers, heads, width = config.num_hidden_layers, config.num_attention_heads, config.head_dim
    return layers, layers * batch * time * heads * (width + 1) * 4


def parameters(model: PyTree) -> int:
    return sum(x.size for x in jax.tree.leaves(eqx.filter(model, eqx.is_array)))


def surprise(model: Llama, tokens: Int[Array, "batch read"]) -> Float[Array, "batch time"]:
    r"""$-\log P$ of each byte after those before it, in nats."""
    logits = model(tokens[:, :-1]).logits
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])


class Score(NamedTuple):
    """The loss on the last `WINDOW` bytes, given up to `WINDOW` bytes before each, and given all, by `kernels`."""

    near: float
    far: float
    kernels: str


def score(model: Llama, text: np.ndarray) -> Score:
    half = WINDOW // 2
    pieces = np.stack([text[-WINDOW - half - 1 : -half], text[-WINDOW - 1 :]])
    losses = jax.jit(surprise)
    near = losses(model, jnp.asarray(pieces, jnp.int32))[:, -half:]
    whole = losses.trace(model, jnp.asarray(text[None], jnp.int32))
    far = losses(model, jnp.asarray(text[None], jnp.int32))[:, -WINDOW:]
    return Score(float(near.mean()), float(far.mean()), kernels(whole))
