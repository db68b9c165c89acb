#!/usr/bin/env python3
"""Print a hash of the optimised program of each of some thirty calls, to compare before and after a change.

    python tools/program_hashes.py            a line for each call: hash, instructions, name
    python tools/program_hashes.py NAME       the program itself
    (cd OTHER && python .../program_hashes.py)    those of another checkout

Names of instructions, source lines and metadata do not count. The programs are those of eight simulated CPU devices.
"""

import functools
import hashlib
import os
import re
import sys
from collections.abc import Callable
from typing import Any

sys.path.insert(0, os.getcwd())
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np

import energy_attn as ea
from energy_attn.distributed import KVCache, SequenceParallel, make_mesh

SEGMENTS = np.zeros((2, 256), np.int32)
# Options of `ea.attention`, whose forward and gradient programs are hashed.
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"is_causal": True, "local_window_size": (64, 0)},
    "mask": {"mask": np.tril(np.ones((256, 256), bool))},
    "segments": {"query_segment_ids": SEGMENTS, "key_segment_ids": SEGMENTS},
    "lengths": {"key_value_seq_lengths": np.asarray([100, 256])},
    "soft cap": {"is_causal": True, "score": ea.scores.SoftCap(30.0)},
    "alibi": {"is_causal": True, "score": ea.scores.ALiBi(jnp.geomspace(0.5, 0.03, 4))},
    "sink": {"is_causal": True, "sink": np.zeros(4, np.float32)},
    "reproducible": {"is_causal": True, "reproducible": True},
}
Call = tuple[Callable[..., Any], tuple[Any, ...]]


def attend(length: int = 256, heads: int = 4, kv_heads: int = 2, **options: Any) -> Call:
    """A sum over attention and energies, and its arguments."""
    query, key = (jnp.ones((2, length, n, 32)) for n in (heads, kv_heads))

    def loss(*args: Any) -> jax.Array:
        out, energy = ea.attention(*args, return_energy=True, **options)
        return out.sum() + energy.sum()

    return loss, (query, key, key)


def gradient(function: Callable[..., Any], args: tuple[Any, ...]) -> Call:
    """The gradient of a sum of what a call returns."""
    total = lambda *x: sum(y.sum() for y in jax.tree.leaves(function(*x)))  # noqa: E731
    return jax.grad(total, tuple(range(len(args)))), args


def decode(parallel: SequenceParallel | None = None, **options: Any) -> Call:
    """A scan of decode steps over a cache."""
    cache = KVCache.empty(2, 1024, 2, 32, dtype=jnp.float32, parallel=parallel)
    query, key = (jnp.ones((2, 1, heads, 32)) for heads in (4, 2))

    def step(cache: KVCache, _: None) -> tuple[KVCache, Any]:
        cache = cache.append(key, key)
        return cache, cache.attend(query, **options).out

    return lambda cache: jax.lax.scan(step, cache, None, length=4), (cache,)


def sharded(method: Any, **options: Any) -> Call:
    """A training step's attention over eight devices."""
    parallel = SequenceParallel(("node", "device"), method=method)
    return gradient(*attend(1024, 8, 8, parallel=parallel, is_causal=True, **options))


def calls() -> dict[str, Callable[[], Call]]:
    """The calls by name."""
    causal = functools.partial(attend, is_causal=True)
    measure = ea.FreeEnergy(is_causal=True)
    return {
        **{name: functools.partial(attend, **x) for name, x in OPTIONS.items()},
        **{f"gradient, {name}": lambda x=x: gradient(*attend(**x)) for name, x in OPTIONS.items()},
        "gradient of a gradient": lambda: gradient(*gradient(*causal())),
        "tangent": lambda: (lambda *x: jax.jvp(causal()[0], x, x), causal()[1]),
        "entropy": lambda: (lambda *x: measure.at(*x).entropy(), causal()[1]),
        "covariance": lambda: (lambda *x: measure.at(*x).covariance(), causal()[1]),
        "decode": decode,
        "decode, tree": lambda: decode(SequenceParallel(("node", "device"))),
        "decode, reproducible": lambda: decode(reproducible=True),
        **{x: lambda x=x: sharded(x) for x in ("tree", "ring", "ulysses", "gather", "hybrid")},
        "ring, reproducible": lambda: sharded("ring", reproducible=True),
    }


def program(call: Call) -> str:
    """The optimised HLO of a call, with instructions numbered in their order and without metadata."""
    function, args = call
    text = jax.jit(function).lower(*args).compile().as_text()
    text = re.sub(r"(?m), metadata=\{[^}]*\}|, backend_config=\{.*\}|^HloModule.*$", "", text)
    text = re.sub(r"\n(FileNames|FunctionNames|FileLocations|StackFrames)\n(?:\d.*\n)*", "\n", text)
    numbers: dict[str, str] = {}
    return re.sub(r"%[\w.-]+", lambda x: numbers.setdefault(x[0], f"%{len(numbers)}"), text)


if __name__ == "__main__":
    jax.set_mesh(make_mesh((2, 4), ("node", "device")))
    for name, call in calls().items():
        if sys.argv[1:] in ([], [name]):
            text = program(call())
            digest = hashlib.sha256(text.encode()).hexdigest()[:10]
            print(text if sys.argv[1:] else f"{digest} {text.count(' = '):>6}  {name}", flush=True)
