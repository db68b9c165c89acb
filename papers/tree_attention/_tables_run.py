"""The protocol of tables 1 and 2 on the available devices: a prompt, then ten tokens by each method.

    python examples/cluster/launch.py -n 2 -- papers/tree_attention/_tables_run.py PROMPTS RESULT

is what `tables.py` runs for several processes; the first process writes the results. Each repetition reads the
prompt once, and every method decodes from a copy of the resulting cache.
"""

import collections
import json
import math
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _tables_paper import TOKENS, attention_of
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec as P

import energy_attn as ea
from energy_attn.distributed import (
    SequenceParallel,
    collectives,
    cost,
    initialize,
    make_mesh,
    methods,
    place,
    sharded_attention,
)
from energy_attn.models import Llama, LlamaConfig

AXIS = "device"
REPETITIONS = 10
CHUNK = 1024  # tokens of a prompt that are read at a time
# The byte-level model of the library, and modules of Python that it was not trained on.
FOLDER = resources.files("energy_attn") / "cli" / "demo" / "model"
HELD_OUT = ("argparse.py", "dataclasses.py", "tarfile.py", "typing.py")


def ring(rotate: Any) -> Callable[..., Any]:
    """Attention for a model's `attend=`, by a ring in which keys, or the queries' states, travel."""

    def attend(query: Any, key: Any, value: Any, **options: Any) -> Any:
        def shard_attention(query: Any, key: Any, value: Any, queries: Any, keys: Any) -> Any:
            return tuple(
                sharded_attention(
                    *(query, key, value),
                    axis_name=AXIS,
                    method=methods.Ring(rotate),
                    queries_sharded=False,
                    is_causal=options["is_causal"],
                    query_positions=queries,
                    key_positions=keys,
                )
            )

        sharded = P(None, AXIS)
        mapped = jax.shard_map(
            shard_attention,
            in_specs=(P(), sharded, sharded, P(), sharded),
            out_specs=P(),
            axis_names={AXIS},
            check_vma=False,  # each device folds the keys in the order in which they come
        )
        return mapped(query, key, value, options["query_positions"], options["key_positions"])

    return attend


METHODS = {"tree": ea.attention, "ring, keys": ring("keys"), "ring, queries": ring("queries")}


def reader(chunk: int) -> Callable[..., Any]:
    """A function that reads a prompt into a cache and returns the next token and the cache."""

    def read(model: Any, tokens: Any, cache: Any) -> tuple[Any, Any]:
        out = model.prefill(tokens, cache, chunk_size=chunk)
        return lax.argmax(out.logits, 2, jnp.int32), out.cache

    return read


def decoder(attend: Callable[..., Any], tokens: int) -> Callable[..., Any]:
    """Decode steps after a token: the likeliest ones, the logits of each, and the cache."""

    def decode(model: Any, first: Any, cache: Any) -> tuple[Any, Any, Any]:
        def step(carry: Any, _: None) -> Any:
            out = model(carry[0], cache=carry[1], attend=attend)
            token = lax.argmax(out.logits, 2, jnp.int32)
            return (token, out.cache), (token, out.logits)

        (_, cache), outputs = lax.scan(step, (first, cache), None, length=tokens)
        return *outputs, cache

    return decode


def summary(seconds: Sequence[float]) -> dict[str, float]:
    """The mean of several times, and its standard error."""
    error = statistics.stdev(seconds) / math.sqrt(len(seconds))
    return {"mean": statistics.mean(seconds), "error": error}


def sent(compiled: Any, steps: int = 1) -> dict[str, dict[str, int]]:
    """The collectives and bytes that a program sends in one of its steps, by kind."""
    kinds: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for collective in collectives(compiled):
        assert collective.count is not None and collective.count % steps == 0, collective
        count = collective.count // steps
        kinds[collective.kind].update({"rounds": count, "bytes": count * collective.bytes})
    return {kind: dict(counts) for kind, counts in kinds.items()}


def predicted(
    method: str, config: LlamaConfig, keys: int, dtype: str, topology: cost.Topology
) -> dict[str, dict[str, int]]:
    """The collectives and bytes of a step by one of `METHODS`, as the cost model predicts them."""
    shape = attention_of(config, keys, dtype)
    name, _, merge = method.partition(", ")
    merge = merge or cost.choose_merge(shape, topology)
    kinds: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for transfer in cost.transfers(name, merge, shape, topology):
        count = config.num_hidden_layers * transfer.count
        kinds[transfer.kind].update({"rounds": count, "bytes": count * transfer.bytes})
    return {kind: dict(counts) for kind, counts in kinds.items()}


def timed(run: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    """Seconds until the last process has the result of `run`, and the result."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("begin")
    start = time.perf_counter()
    result = jax.block_until_ready(run(*arguments))
    seconds = np.float64(time.perf_counter() - start)
    if jax.process_count() > 1:
        seconds = multihost_utils.process_allgather(seconds).max()
    return float(seconds), result


def measure(
    model: Any,
    text: np.ndarray,
    prompt: int,
    count: int = TOKENS,
    repetitions: int = REPETITIONS,
    chunk: int = CHUNK,
) -> dict[str, Any]:
    """Times a prompt of one length and `count` tokens after it, on the mesh in force."""
    topology = cost.topology(jax.sharding.get_mesh())
    tokens = place(text[None, :prompt].astype(np.int32), P(), replicated=True)
    slots = prompt + count

    def empty() -> Any:
        return model.empty_cache(1, slots, parallel=SequenceParallel(AXIS))

    copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))
    read = jax.jit(reader(chunk), donate_argnums=2).lower(model, tokens, empty()).compile()
    first, cache = read(model, tokens, empty())
    programs = {
        name: jax.jit(decoder(attend, count), donate_argnums=2).lower(model, first, cache).compile()
        for name, attend in METHODS.items()
    }
    reading: list[float] = []
    decoding: dict[str, list[float]] = {name: [] for name in METHODS}
    results: dict[str, Any] = {}
    for repetition in range(-1, repetitions):  # the first does not count
        blank = jax.block_until_ready(empty())
        seconds, (first, cache) = timed(read, model, tokens, blank)
        reading.append(seconds)
        turn = repetition % len(METHODS)  # none is always the first
        for name in (*METHODS, *METHODS)[turn : turn + len(METHODS)]:
            copied = jax.block_until_ready(copy(cache))
            seconds, results[name] = timed(programs[name], model, first, copied)
            decoding[name].append(seconds)
    reading, totals = reading[1:], {}
    for name, seconds in decoding.items():
        decoding[name] = seconds[1:]
        totals[name] = [x + y for x, y in zip(reading, seconds[1:], strict=True)]
    (capacity,) = {stored.capacity for stored in cache.layers}
    dtype = cache.layers[0].dtype.name
    return {
        "prompt": prompt,
        "slots": capacity,
        "tokens": np.asarray(results["tree"][0].addressable_data(0)).ravel().tolist(),
        "prompt_s": summary(reading),
        "methods": {
            name: {
                "decode_s": summary(decoding[name]),
                "total_s": summary(totals[name]),
                "repetitions_s": decoding[name],
                "sent_per_step": sent(program, count),
                "predicted_per_step": predicted(name, model.config, capacity, dtype, topology),
                **compared(results[name], results["tree"]),
            }
            for name, program in programs.items()
        },
    }


def compared(result: Any, tree: Any) -> dict[str, Any]:
    """Compares tokens on all devices with the tree's, and logits by their largest difference."""
    token, logits, _ = result
    expected, expected_logits = (np.asarray(x.addressable_data(0)) for x in tree[:2])
    same = [np.array_equal(shard.data, expected) for shard in token.addressable_shards]
    error = [
        abs(np.asarray(shard.data) - expected_logits).max() for shard in logits.addressable_shards
    ]
    return {"same_tokens": all(same), "logits_differ_by": float(max(error))}


def run(prompts: Sequence[int]) -> dict[str, Any]:
    """All lengths of prompt, over all devices of all processes."""
    initialize()
    mesh = make_mesh((jax.device_count(),), (AXIS,))
    library = Path(sysconfig.get_paths()["stdlib"])
    text = np.frombuffer(b"\0".join((library / name).read_bytes() for name in HELD_OUT), np.uint8)
    with jax.set_mesh(mesh):
        model = Llama.load(str(FOLDER), mesh=mesh)
        rows = [measure(model, text, prompt) for prompt in prompts]
    return {
        "platform": jax.default_backend(),
        "devices": jax.device_count(),
        "processes": jax.process_count(),
        "rows": rows,
    }


if __name__ == "__main__":
    measured = run(json.loads(sys.argv[1]))
    if jax.process_index() == 0:
        Path(sys.argv[2]).write_text(json.dumps(measured))
