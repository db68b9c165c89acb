"""Decode steps in a `lax.scan` over layers of caches: ours by default, by each kernel, and jax.nn."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from energy_attn.distributed import KVCache

from .runner import JAX_NN, OURS, Case, Run, Sides

LAYERS, STEPS, FREE = 4, 24, 64  # slots that are free before the first step


def _ours(T: int, N: int, K: int, H: int, dtype: str, implementation: str | None) -> Run:
    query, tokens = _inputs(T, N, K, H, dtype)
    cache = KVCache.empty(1, T, K, H, dtype=query.dtype, block_size=64).append(tokens, tokens)

    def step(carry: Any, _: None) -> tuple[Any, None]:
        caches, x = carry
        layers = []
        for layer in caches:
            layers.append(layer.append(x[:, :, :K], x[:, :, :K]))
            x = layers[-1].attend(x, implementation=implementation).out
        return (layers, x), None

    @jax.jit
    def run(caches: Any, x: Array) -> Array:
        return lax.scan(step, (caches, x), length=STEPS)[0][1]

    return functools.partial(run, [cache] * LAYERS, query)


def _jax_nn(T: int, N: int, K: int, H: int, dtype: str) -> Run:
    query, tokens = _inputs(T, N, K, H, dtype)
    cache = jnp.pad(tokens, [(0, 0), (0, FREE), (0, 0), (0, 0)])

    def step(carry: Any, end: Array) -> tuple[Any, None]:
        caches, x = carry
        layers = []
        for pair in caches:
            keys, values = (
                lax.dynamic_update_slice_in_dim(y, x[:, :, :K], end, axis=1) for y in pair
            )
            lengths = (end + 1)[None]
            x = jax.nn.dot_product_attention(x, keys, values, key_value_seq_lengths=lengths)
            layers.append((keys, values))
        return (layers, x), None

    @jax.jit
    def run(caches: Any, x: Array) -> Array:
        ends = T - FREE + jnp.arange(STEPS, dtype=jnp.int32)
        return lax.scan(step, (caches, x), ends)[0][1]

    return functools.partial(run, [(cache, cache)] * LAYERS, query)


def _inputs(T: int, N: int, K: int, H: int, dtype: str) -> tuple[Array, Array]:
    keys = jax.random.split(jax.random.key(0))
    query = jax.random.normal(keys[0], (1, 1, N, H), dtype)
    return query, jax.random.normal(keys[1], (1, T - FREE, K, H), dtype)


def _case(dtype: str, T: int, N: int, K: int, H: int) -> Case:
    def sides(T: int, dtype: str, **sizes: Any) -> Sides:
        T = max(T, 2 * FREE)
        of: dict[str, str | None] = {OURS: None}
        of |= {f"our {name}": name for name in ("decode_cpu", "decode", "blockwise")}
        runs = {
            side: functools.partial(_ours, T, **sizes, dtype=dtype, implementation=name)
            for side, name in of.items()
        }
        return {**runs, JAX_NN: functools.partial(_jax_nn, T, **sizes, dtype=dtype)}

    return Case(
        f"{STEPS} decode steps, {LAYERS} caches", dtype, {"T": T, "N": N, "K": K, "H": H}, sides
    )


CASES = tuple(
    _case(dtype, T, *heads)
    for heads in ((4, 2, 32), (8, 4, 64), (32, 8, 64), (32, 8, 128), (16, 16, 64))
    for dtype in ("float32", "bfloat16")
    for T in (1024, 8192)
)
