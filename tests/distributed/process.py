"""One of several processes: runs scenarios over a mesh of all their devices, and says what it found, a line each.

Started by `test_processes.py` as `python -m energy_attn launch -n … -- -m tests.distributed.process NAME…`.
"""

import functools
import json
import os
import shutil
import sys
import tempfile
import zlib
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

import energy_attn as ea
from energy_attn.distributed import (
    KVCache,
    SequenceParallel,
    collectives,
    fetch,
    initialize,
    make_mesh,
    place,
    ring_attention,
)

from ..problems import PROBLEMS, Problem, everything
from ..reference import dense, dense_vjp

AXES = ("node", "device")
KEYS = jax.P(None, AXES)  # [B, S, …], S over all devices of all processes
DECODE = everything("processes decode", B=2, T=3, S=32)  # the arrays alone, without the options
SEQUENCE = everything("processes sequence", B=2, T=16, S=16)


def mine(x: np.ndarray) -> np.ndarray:
    """The part of a sequence that this process would have read from its own disk."""
    size = x.shape[1] // jax.process_count()
    return x[:, jax.process_index() * size :][:, :size]


def decode(merge: str) -> dict:
    """A step of decoding: each process brings its own keys, every one gets the whole answer."""
    problem = Problem("decode", DECODE.query, DECODE.key, DECODE.value, DECODE.source)
    replicated = place({"query": problem.query, "source": problem.source}, jax.P())
    keys = place({"key": mine(problem.key), "value": mine(problem.value)}, KEYS)

    @jax.jit
    def step(source, arrays):
        def total(source):
            energy = ea.free_energy(**arrays, source=source, parallel=SequenceParallel(merge=merge))
            return energy.sum(), energy

        return jax.grad(total, has_aux=True)(source)

    compiled = step.lower(replicated.pop("source"), replicated | keys).compile()
    out, energy = compiled(place(problem.source, jax.P()), replicated | keys)
    exact_out, exact_energy = dense(problem)
    return {
        "errors": {"out": worst(out, exact_out), "energy": worst(energy, exact_energy)},
        "bits": zlib.crc32(fetch(out).tobytes()),
        "largest group": max(c.group_size for c in collectives(compiled)),
    }


def padded() -> dict:
    """Replicated arrays whose keys are fewer than fill the devices: 13, with positions and a window."""
    problem = PROBLEMS["decode_source"]
    arrays, given = place((problem.arrays, array_options(problem)), jax.P())
    options = problem.options | given

    @jax.jit
    def step(arrays):
        return ea.free_energy(**arrays, **options, parallel=SequenceParallel())

    return {"errors": {"energy": worst(step(arrays), dense(problem)[1])}}


def prefill() -> dict:
    """Queries and keys sharded, causal: each process holds its part of the sequence alone, results included."""
    problem = Problem("prefill", SEQUENCE.query, SEQUENCE.key, SEQUENCE.value, is_causal=True)
    sharded = [place(mine(x), KEYS) for x in (problem.query, problem.key, problem.value)]
    positions = place(np.arange(16, dtype=np.int32)[None], KEYS, replicated=True)

    @jax.jit
    @functools.partial(jax.shard_map, in_specs=(KEYS,) * 4, out_specs=KEYS)
    def attend(q, k, v, at):
        options = {"is_causal": True, "query_positions": at, "key_positions": at}
        return ring_attention(q, k, v, axis_name=AXES, rotate="keys", **options)

    state = attend(*sharded, positions)
    exact_out, exact_lse = dense(problem)
    return {"errors": {"out": worst(state.out, exact_out), "lse": worst(state.lse, exact_lse)}}


def train() -> dict:
    """A step of gradient descent on a layer whose weights every process has, over a sequence that none has whole."""
    problem = Problem("train", SEQUENCE.query, SEQUENCE.key, SEQUENCE.value)
    rate = 0.1
    _, _, N, H = problem.query.shape
    weight = np.random.default_rng(0).standard_normal((H, H))
    given = place(weight, jax.P())
    sharded = [place(mine(x), KEYS) for x in (problem.query, problem.key, problem.value)]

    @jax.jit
    def step(weight, query, key, value):
        def loss(weight):
            out = jax.shard_map(
                lambda q, k, v: ring_attention(q, k, v, axis_name=AXES, rotate="keys").out,
                in_specs=(KEYS,) * 3,
                out_specs=KEYS,
            )(query @ weight, key, value)
            return (out**2).sum()

        return weight - rate * jax.grad(loss)(weight)

    after = step(given, *sharded)
    moved = replace(problem, query=problem.query @ weight)
    out = dense(moved)[0]
    dquery = dense_vjp(moved, 2 * out, np.zeros(out.shape[:3]))["query"]
    exact = weight - rate * np.einsum("btnh,btng->hg", problem.query, dquery)
    return {"errors": {"weight": worst(after, exact)}, "bits": zlib.crc32(fetch(after).tobytes())}


def cache() -> dict:
    """Tokens appended to a cache that lies over all processes, attended to, saved, and read in other blocks."""
    whole = everything("cache", B=2, T=6, S=6)
    (_, _, K, H), V = whole.key.shape, whole.value.shape[-1]
    held = KVCache.empty(
        2, 32, K, H, V, dtype=np.float64, parallel=SequenceParallel(), block_size=1
    )

    @functools.partial(jax.jit, donate_argnums=0)
    def step(held, query, key, value):
        held = held.append(key, value)
        return held, held.attend(query).out

    errors = {}
    for n in range(0, 6, 2):
        new = [x[:, n : n + 2] for x in (whole.query, whole.key, whole.value)]
        held, out = step(held, *place(new, jax.P()))
        exact = dense(
            Problem(
                "so far", new[0], whole.key[:, : n + 2], whole.value[:, : n + 2],
                is_causal=True, query_positions=np.tile(np.arange(n, n + 2), (2, 1)),
                key_positions=np.tile(np.arange(n + 2), (2, 1)),
            )
        )[0]  # fmt: skip
        errors[f"out at {n}"] = worst(out, exact)
    assert fetch(held.lengths).tolist() == [6, 6]
    run = os.environ["JAX_COORDINATOR_ADDRESS"].replace(":", "-")
    folder = Path(tempfile.gettempdir()) / f"energy_attn-cache-{run}"
    for _ in range(2):
        held.save(folder)  # when it returns, all have written
        assert len(list(folder.iterdir())) >= jax.process_count() + 1
    again = KVCache.load(folder, parallel=SequenceParallel(), block_size=2)
    out = jax.jit(lambda cache, query: cache.attend(query).out)(again, place(new[0], jax.P()))
    errors["out of the cache read"] = worst(out, exact)
    multihost_utils.sync_global_devices("read")
    assert len(list(folder.iterdir())) == jax.process_count() + 1
    multihost_utils.sync_global_devices("counted")
    shutil.rmtree(folder, ignore_errors=True)
    return {"errors": errors}


def array_options(problem: Problem) -> dict[str, np.ndarray]:
    return {name: np.asarray(x) for name, x in problem.options.items() if isinstance(x, jax.Array)}


def worst(x: jax.Array, exact: np.ndarray) -> float:
    got = fetch(x)
    assert got.shape == exact.shape and got.dtype == np.float64
    return float(np.abs(got - exact).max())


SCENARIOS = {
    **{
        f"decode {merge}": functools.partial(decode, merge)
        for merge in ("allreduce", "gather", "butterfly", "hierarchical")
    },
    "padded": padded,
    "prefill": prefill,
    "train": train,
    "cache": cache,
}


def main(names: list[str]) -> None:
    jax.config.update("jax_enable_x64", True)
    initialize()
    mesh = make_mesh()
    rows = [[d.process_index for d in row] for row in mesh.devices]
    print(json.dumps({"mesh": dict(mesh.shape), "processes of its rows": rows}), flush=True)
    with jax.set_mesh(mesh):
        for name in names:
            print(json.dumps({"scenario": name, **SCENARIOS[name]()}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
