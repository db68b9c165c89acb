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

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import energy_attn as ea
from energy_attn.distributed import KVCache, SequenceParallel, make_mesh
from energy_attn.models import Llama, LlamaConfig

Call = tuple[Callable[..., Any], tuple[Any, ...]]


def arrays(
    length: int = 256, heads: int = 4, kv_heads: int = 2, dtype: str = "float32"
) -> tuple[Array, Array, Array]:
    """Queries, keys and values of ones."""
    query = jnp.ones((2, length, heads, 32), dtype)
    key = jnp.ones((2, length, kv_heads, 32), dtype)
    return query, key, key


def loss(**options: Any) -> Callable[..., Array]:
    """A sum over attention and energies, to be differentiated."""

    def total(query: Array, key: Array, value: Array, **others: Any) -> Array:
        out, energy = ea.attention(query, key, value, return_energy=True, **{**options, **others})
        return out.sum() + energy.sum()

    return total


def gradient(**options: Any) -> Callable[..., Any]:
    """The gradients of `loss` in queries, keys and values."""
    return jax.grad(loss(**options), (0, 1, 2))


def decode(parallel: SequenceParallel | None = None, **options: Any) -> Call:
    """A scan of decode steps over a cache."""
    cache = KVCache.empty(2, 1024, 2, 32, dtype=jnp.float32, parallel=parallel)
    query, key, value = (x[:, :1] for x in arrays())

    def steps(cache: KVCache, query: Array, key: Array, value: Array) -> tuple[KVCache, Array]:
        def step(cache: KVCache, _: None) -> tuple[KVCache, Array]:
            cache = cache.append(key, value)
            return cache, cache.attend(query, **options).out

        return jax.lax.scan(step, cache, None, length=4)

    return steps, (cache, query, key, value)


def sharded(method: Any, **options: Any) -> Call:
    """A training step's attention over eight devices."""
    parallel = SequenceParallel(("node", "device"), method=method)
    return gradient(parallel=parallel, is_causal=True, **options), arrays(1024, 8, 8)


def calls() -> dict[str, Callable[[], Call]]:
    """The calls by name."""
    mask = np.tril(np.ones((256, 256), bool))
    segments = jnp.zeros((2, 256), jnp.int32)
    tree = SequenceParallel(("node", "device"))
    table: dict[str, dict[str, Any]] = {
        "plain": {},
        "causal": {"is_causal": True},
        "window": {"is_causal": True, "local_window_size": (64, 0)},
        "mask": {"mask": mask},
        "segments": {"query_segment_ids": segments, "key_segment_ids": segments},
        "lengths": {"key_value_seq_lengths": jnp.asarray([100, 256])},
        "soft cap": {"is_causal": True, "score": ea.scores.SoftCap(30.0)},
        "alibi": {"is_causal": True, "score": ea.scores.ALiBi(jnp.geomspace(0.5, 0.03, 4))},
        "sink": {"is_causal": True, "sink": jnp.zeros(4)},
        "reproducible": {"is_causal": True, "reproducible": True},
    }
    made: dict[str, Callable[[], Call]] = {}
    for name, options in table.items():
        made[name] = lambda options=options: (loss(**options), arrays())
        made[f"gradient, {name}"] = lambda options=options: (gradient(**options), arrays())

    def of_bias() -> Call:
        total = lambda bias, *x: loss(is_causal=True)(*x, bias=bias)  # noqa: E731
        return jax.grad(total, (0, 1)), (jnp.ones((1, 4, 256, 256)), *arrays())

    def second() -> Call:
        total = lambda *x: sum(y.sum() for y in gradient(is_causal=True)(*x))  # noqa: E731
        return jax.grad(total, (0, 1, 2)), arrays()

    def tangent() -> Call:
        return lambda *x: jax.jvp(loss(is_causal=True), x, x), arrays()

    def measure(method: str) -> Call:
        energy = ea.FreeEnergy(is_causal=True)
        return lambda *x: getattr(energy.at(*x), method)(), arrays()

    def layer() -> Call:
        attend = ea.nn.MultiheadAttention(4, 64, is_causal=True, key=jax.random.key(0))
        total = eqx.filter_grad(lambda layer, x: layer(x, x, x).sum())
        return lambda x: total(attend, x), (jnp.ones((64, 64)),)

    def llama() -> Call:
        config = LlamaConfig(64, 64, 128, 2, 4, 2)
        model = Llama(config, key=jax.random.key(0))
        return lambda tokens: model(tokens).logits, (jnp.zeros((2, 32), jnp.int32),)

    def recorded() -> Call:
        return ea.record(functools.partial(ea.attention, is_causal=True), "entropy"), arrays()

    return made | {
        "gradient of a bias": of_bias,
        "gradient of a gradient": second,
        "tangent": tangent,
        "entropy": lambda: measure("entropy"),
        "covariance": lambda: measure("covariance"),
        "layer": layer,
        "llama": llama,
        "record": recorded,
        "bfloat16": lambda: (gradient(is_causal=True), arrays(dtype="bfloat16")),
        "decode": decode,
        "decode, tree": lambda: decode(tree),
        "decode, reproducible": lambda: decode(reproducible=True),
        **{
            x: functools.partial(sharded, x)
            for x in ("tree", "ring", "ulysses", "gather", "hybrid")
        },
        "ring, reproducible": lambda: sharded("ring", reproducible=True),
    }


def program(make: Callable[[], Call]) -> str:
    """The optimised HLO of a call, with instructions numbered in their order and without metadata."""
    with jax.set_mesh(make_mesh((2, 4), ("node", "device"))):
        function, args = make()
        dynamic, static = eqx.partition(args, eqx.is_array)
        text = (
            jax.jit(lambda x: eqx.filter(function(*eqx.combine(x, static)), eqx.is_array))
            .lower(dynamic)
            .compile()
            .as_text()
        )
    text = re.sub(
        r", metadata=\{[^}]*\}|, backend_config=\{.*\}|^HloModule.*$", "", text, flags=re.M
    )
    text = re.sub(r"\n(FileNames|FunctionNames|FileLocations|StackFrames)\n(?:\d.*\n)*", "\n", text)
    numbers: dict[str, str] = {}
    return re.sub(r"%[\w.-]+", lambda x: numbers.setdefault(x[0], f"%{len(numbers)}"), text)


def main() -> None:
    """Prints the hashes of all calls, or the program of one."""
    made = calls()
    if sys.argv[1:]:
        print(program(made[sys.argv[1]]))
        return
    for name, make in made.items():
        try:
            text = program(make)
        except Exception as error:
            print(f"{type(error).__name__:<10} {'':>6}  {name}: {str(error)[:200]}")
            continue
        digest = hashlib.sha256(text.encode()).hexdigest()[:10]
        print(f"{digest} {text.count(' = '):>6}  {name}", flush=True)


if __name__ == "__main__":
    main()
