"""The protocol of the paper's tables 1 and 2 on the available devices: a prompt, then ten tokens by each method.

    export EQX_ON_ERROR=off
    python examples/cluster/launch.py -n 1 --devices 8 -- -m papers.tree_attention.tables --prompts 8192 16384
    python examples/cluster/launch.py -n 4 -- -m papers.tree_attention.tables --prompts 8192 16384

A prompt is read, and tokens are decoded from a cache that is sharded over all devices of the job: by the tree, by the
ring of keys that the paper compares with, and by a ring of the queries' states. Each repetition reads the prompt once,
and every method decodes from a copy of the resulting cache. Times are means of ten repetitions with their standard
errors, without compilation and a first repetition. The model is the library's model of bytes.

The results include the paper's times and the cost model's predictions for its machines.
"""

import argparse
import collections
import math
import os
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
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

from ._paper import TOKENS, attention_of, paper_rows
from ._results import add

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


def by_kind(transfers: Iterable[tuple[str, int, float]]) -> dict[str, dict[str, float]]:
    """The numbers and bytes of collectives, each a kind, a number and the bytes of one."""
    kinds: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for kind, count, size in transfers:
        kinds[kind].update({"rounds": count, "bytes": count * size})
    return {kind: dict(counts) for kind, counts in kinds.items()}


def sent(compiled: Any, steps: int = 1) -> dict[str, dict[str, float]]:
    """The collectives and bytes that a program sends in one of its steps, by kind."""
    found = collectives(compiled)
    assert all(x.count is not None and x.count % steps == 0 for x in found), found
    return by_kind((x.kind, (x.count or 0) // steps, x.bytes) for x in found)


def predicted(
    method: str, config: LlamaConfig, keys: int, dtype: str, topology: cost.Topology
) -> dict[str, dict[str, float]]:
    """The collectives and bytes of a step by one of `METHODS`, as the cost model predicts them."""
    shape = attention_of(config, keys, dtype)
    name, _, merge = method.partition(", ")
    merge = merge or cost.choose_merge(shape, topology)
    layers = config.num_hidden_layers
    transfers = cost.transfers(name, merge, shape, topology)
    return by_kind((x.kind, layers * x.count, x.bytes) for x in transfers)


def timed(run: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    """Seconds until the last process has the result of `run`, and the result."""
    multihost_utils.sync_global_devices("begin")
    start = time.perf_counter()
    result = jax.block_until_ready(run(*arguments))
    seconds = np.float64(time.perf_counter() - start)
    return float(multihost_utils.process_allgather(seconds).max()), result


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

    def empty() -> Any:
        return model.empty_cache(1, prompt + count, parallel=SequenceParallel(AXIS))

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
    (capacity,) = {stored.capacity for stored in cache.layers}
    dtype = cache.layers[0].dtype.name
    return {
        "prompt": prompt,
        "slots": capacity,
        "tokens": np.asarray(results["tree"][0].addressable_data(0)).ravel().tolist(),
        "prompt_s": summary(reading[1:]),
        "methods": {
            name: {
                "decode_s": summary(decoding[name][1:]),
                "repetitions_s": decoding[name][1:],
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


def main() -> int:
    """Measures all lengths of prompt, and adds a run to a file; returns 1 if tokens differ from the tree's."""
    parser = argparse.ArgumentParser(description="The protocol of the paper's tables 1 and 2.")
    parser.add_argument("--prompts", type=int, nargs="+", required=True, help="lengths, in tokens")
    parser.add_argument("--out", type=Path, default=Path("tables.json"), help="file of results")
    args = parser.parse_args()
    if os.environ.get("EQX_ON_ERROR") != "off":
        parser.error(
            "EQX_ON_ERROR: wanted off, for the cache's check for room waits for the device"
        )
    initialize()
    library = Path(sysconfig.get_paths()["stdlib"])
    text = np.frombuffer(b"\0".join((library / name).read_bytes() for name in HELD_OUT), np.uint8)
    mesh = make_mesh((jax.device_count(),), (AXIS,))
    with jax.set_mesh(mesh):
        model = Llama.load(str(FOLDER), mesh=mesh)
        rows = [measure(model, text, prompt) for prompt in args.prompts]
    if jax.process_index() == 0:
        devices = {"devices": jax.device_count(), "processes": jax.process_count()}
        run = {"platform": jax.default_backend(), **devices, "rows": rows}
        about = {"tokens": TOKENS, "repetitions": REPETITIONS, "paper": paper_rows()}
        add(args.out, "runs", [run], tuple(devices), **about)
    same = all(x["same_tokens"] for row in rows for x in row["methods"].values())
    if not same:
        print("tables: tokens differ from the tree's", file=sys.stderr)
    return int(not same)


if __name__ == "__main__":
    sys.exit(main())
