"""One of several processes: runs scenarios over a mesh of all devices, and prints a line of results for each.

Started by `test_processes.py` as `examples/cluster/launch.py -n … -- -m tests.support.process NAME…`.
"""

import contextlib
import dataclasses
import functools
import json
import os
import shutil
import signal
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils

import energy_attn as ea
from energy_attn.distributed import (
    KVCache,
    SequenceParallel,
    collectives,
    fetch,
    initialize,
    make_mesh,
    methods,
    place,
    sharded_attention,
)
from energy_attn.distributed.internal import STRATEGIES, files
from energy_attn.models import Llama, LlamaConfig
from tests.support.problems import Problem, everything, tangents
from tests.support.reference import dense, dense_jvp, dense_vjp

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


def prefill() -> dict:
    """Causal attention in forward mode, where each process holds a part of the sequence, of results and of tangents."""
    problem = Problem("prefill", SEQUENCE.query, SEQUENCE.key, SEQUENCE.value, is_causal=True)
    moving = tangents(problem)
    sharded, changes = (
        [place(mine(tree[name]), KEYS) for name in ("query", "key", "value")]
        for tree in (problem.arrays, moving)
    )
    positions = place(np.arange(16, dtype=np.int32)[None], KEYS, replicated=True)

    @jax.jit
    @functools.partial(jax.shard_map, in_specs=(KEYS,) * 4, out_specs=KEYS)
    def attend(q, k, v, at):
        options = {"is_causal": True, "query_positions": at, "key_positions": at}
        return sharded_attention(q, k, v, axis_name=AXES, method=methods.Ring("keys"), **options)

    @jax.jit
    def both(sharded, changes, positions):
        return jax.jvp(lambda *x: attend(*x, positions), sharded, changes)

    found = jax.tree.leaves(both(sharded, changes, positions))
    exact = *dense(problem), *dense_jvp(problem, moving)
    names = "out", "lse", "tangent of out", "tangent of lse"
    return {"errors": dict(zip(names, map(worst, found, exact), strict=True))}


def sequence(method: str) -> dict:
    """Causal attention of a sequence that no process has whole, and its gradients, by one method."""
    problem = Problem("sequence", SEQUENCE.query, SEQUENCE.key, SEQUENCE.value, is_causal=True)
    sharded = {name: place(mine(x), KEYS) for name, x in problem.arrays.items()}
    rng = problem.rng("cotangents")
    given = [rng.standard_normal(x.shape) for x in dense(problem)]
    weights = place(tuple(map(mine, given)), KEYS)

    @jax.jit
    def step(sharded, weights):
        def loss(sharded):
            parallel = SequenceParallel(method=method)
            state = ea.attention(**sharded, is_causal=True, parallel=parallel, return_energy=True)
            return sum((x * w).sum() for x, w in zip(state, weights, strict=True)), state

        return jax.grad(loss, has_aux=True)(sharded)

    gradients, (out, energy) = step(sharded, weights)
    exact = dense_vjp(problem, *given)
    errors = {name: worst(gradients[name], exact[name]) for name in sharded}
    for name, x, y in zip(("out", "energy"), (out, energy), dense(problem), strict=True):
        errors[name] = worst(x, y)
    return {"errors": errors}


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
    with shared_folder("cache") as folder:
        for _ in range(2):
            held.save(folder)  # when it returns, all have written
            assert len(list(folder.iterdir())) >= jax.process_count() + 1
        again = KVCache.load(folder, parallel=SequenceParallel(), block_size=2)
        out = jax.jit(lambda cache, query: cache.attend(query).out)(again, place(new[0], jax.P()))
        errors["out of the cache read"] = worst(out, exact)
        multihost_utils.sync_global_devices("read")
        assert len(list(folder.iterdir())) == jax.process_count() + 1
    return {"errors": errors}


def checkpoint() -> dict:
    """Each process reads its part of the weights; all gather them, the first writes, and all learn if it fails."""
    config = LlamaConfig(8, 8, 4, num_hidden_layers=1, num_attention_heads=2)
    model = Llama(config, dtype=np.float64, key=jax.random.key(0))
    wanted = [np.asarray(x) for x in jax.tree.leaves(model)]
    mesh = make_mesh((2, jax.device_count() // 2), ("tensor", "sequence"))
    with shared_folder("model") as folder, jax.set_mesh(mesh):
        model.save(folder / "given")
        read = Llama.load(folder / "given", mesh=mesh)
        assert not read.lm_head.weight.is_fully_addressable
        full = OSError("no space left")
        with mock.patch.object(files, "write", side_effect=full), pytest.raises(OSError):
            read.save(folder / "saved")
        read.save(folder / "saved")
        again = Llama.load(folder / "saved")  # at once: the others wait until the first has written
        errors = {
            f"{name} {i}": worst(x, exact)
            for name, found in (("read", read), ("again", again))
            for i, (x, exact) in enumerate(zip(jax.tree.leaves(found), wanted, strict=True))
        }
    return {"errors": errors}


def bits(parallel: SequenceParallel | None = None) -> dict[str, int]:
    """Checksums of attention over a sequence, of its energies and gradients, and of a step; None: on one device."""
    rng = np.random.default_rng(0)
    sizes = [(2, 1024, heads, 16) for heads in (4, 2, 2, 4)] + [(2, 1024, 4), (2, 1, 4, 16)]
    *given, last = (2 * rng.standard_normal(x, np.float32) for x in sizes)
    if parallel is not None:
        given, last = place([mine(x) for x in given], KEYS), place(last, jax.P())

    @jax.jit
    def run(query, key, value, d_out, d_energy, last):
        def state(*arrays, parallel=parallel, is_causal=True):
            options = {"is_causal": is_causal, "parallel": parallel, "reproducible": True}
            return ea.attention(*arrays, **options, return_energy=True)

        found, back = jax.vjp(state, query, key, value)
        everywhere = parallel and dataclasses.replace(parallel, queries_sharded=False)
        step = state(last, key, value, parallel=everywhere, is_causal=False)
        return *found, *back((d_out, d_energy)), *step

    found = run(*given, last)
    found = jax.tree.map(np.asarray, found) if parallel is None else fetch(found)
    names = "out", "energy", "d_query", "d_key", "d_value", "out of a step", "energy of a step"
    return {name: zlib.crc32(x.tobytes()) for name, x in zip(names, found, strict=True)}


def output_layer() -> tuple[np.ndarray, ...]:
    """Hidden states, an output matrix, and labels."""
    rng = np.random.default_rng(1)
    sizes = (2, 8, 6), (64, 6)
    hidden, weight = (rng.standard_normal(x) for x in sizes)
    return hidden, weight, rng.integers(0, 64, (2, 8), np.int32)


def vocabulary() -> dict:
    """A loss whose words lie over all processes, and in parts with the tokens, and its gradients."""
    hidden, weight, labels = output_layer()

    def dense(hidden, weight):
        log_p = jax.nn.log_softmax(hidden @ weight.T)
        entropy = -(jax.numpy.exp(log_p) * log_p).sum(-1)
        at = jax.numpy.take_along_axis(log_p, labels[..., None], -1)[..., 0]
        return (at * entropy).mean()

    exact = jax.device_get(jax.value_and_grad(dense, (0, 1))(hidden, weight))
    kinds = {
        "words": ea.VocabularyParallel(AXES),
        "both": ea.VocabularyParallel("node", jax.P(None, "device")),
        "parts": ea.VocabularyParallel(AXES, jax.P(None, AXES)),
    }
    errors = {}
    for name, parallel in kinds.items():
        rows = place(weight, jax.P())

        @jax.jit
        def step(hidden, weight, parallel=parallel):
            weight = jax.lax.with_sharding_constraint(weight, jax.P(parallel.words))

            def loss(hidden, weight):
                p = ea.Categorical(hidden, weight, parallel=parallel)
                return (p.log_prob(labels) * p.entropy()).mean()

            return jax.value_and_grad(loss, (0, 1))(hidden, weight)

        value, slopes = step(place(hidden, jax.P()), rows)
        for part, x, y in zip(
            ("loss", "d_hidden", "d_weight"), (value, *slopes), (exact[0], *exact[1]), strict=True
        ):
            errors[f"{part}, {name}"] = worst(x, y)
    return {"errors": errors}


def bits_of_a_loss(parallel: ea.VocabularyParallel | None) -> dict[str, int]:
    """Checksums of a reproducible loss over a vocabulary and of its gradients; None: on one device."""
    hidden, weight, labels = (
        x.astype(np.float32) if x.dtype == float else x for x in output_layer()
    )
    if parallel is not None:
        hidden, weight, labels = place((hidden, weight, labels), jax.P())

    @jax.jit
    def step(hidden, weight, labels):
        def loss(hidden, weight):
            options = {"parallel": parallel, "reproducible": True}
            return ea.softmax_cross_entropy(hidden, weight, labels, **options)

        return jax.value_and_grad(loss, (0, 1))(hidden, weight)

    value, slopes = step(hidden, weight, labels)
    found = (np.asarray(x) if parallel is None else fetch(x) for x in (value, *slopes))
    names = "loss", "d_hidden", "d_weight"
    return {name: zlib.crc32(x.tobytes()) for name, x in zip(names, found, strict=True)}


def reproducible() -> dict:
    """Checksums on one device and over all processes."""
    words = ea.VocabularyParallel("device", jax.P(None, "node"))
    mesh = jax.sharding.get_abstract_mesh()
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        alone = bits_of_a_loss(None)
    assert not mesh.empty
    return {
        "one": bits() | alone,
        "all": bits(SequenceParallel(method="ring")) | bits_of_a_loss(words),
    }


def lost() -> dict:
    """The second process is killed while the others wait for it: the last scenario of any run."""
    x = place(np.arange(4.0), jax.NamedSharding(make_mesh(), jax.P(AXES)))
    fetch(x)
    if jax.process_index() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        fetch(x)


@contextlib.contextmanager
def shared_folder(name: str) -> Iterator[Path]:
    """A folder that all processes of this run have in common, until all are done with it."""
    run = os.environ["JAX_COORDINATOR_ADDRESS"].replace(":", "-")
    folder = Path(tempfile.gettempdir()) / f"energy_attn-{name}-{run}"
    yield folder
    multihost_utils.sync_global_devices(name)
    shutil.rmtree(folder, ignore_errors=True)


def worst(x: jax.Array, exact: np.ndarray) -> float:
    got = fetch(x)
    assert got.shape == exact.shape and got.dtype == np.float64
    return float(np.abs(got - exact).max())


SCENARIOS = {
    **{f"decode {merge}": functools.partial(decode, merge) for merge in STRATEGIES},
    "prefill": prefill,
    **{method: functools.partial(sequence, method) for method in ("hybrid", "gather")},
    "cache": cache,
    "checkpoint": checkpoint,
    "vocabulary": vocabulary,
}
APART = {
    "lost": lost,
    "reproducible": reproducible,
}


def main(names: list[str]) -> None:
    jax.config.update("jax_enable_x64", True)
    initialize()
    mesh = make_mesh()
    rows = [[d.process_index for d in row] for row in mesh.devices]
    print(json.dumps({"mesh": dict(mesh.shape), "processes of its rows": rows}), flush=True)
    with jax.set_mesh(mesh):
        for name in names:
            print(json.dumps({"scenario": name, **(SCENARIOS | APART)[name]()}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
