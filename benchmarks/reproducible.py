"""Times of `reproducible=True` and of the same programs without it: attention, and decoders as a whole."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

import energy_attn
from energy_attn.distributed import KVCache
from energy_attn.models import Llama, LlamaConfig

from .runner import OURS, Case, Run, Sides

REPRODUCIBLE = "our reproducible"
STEPS = 32


def _draw(dtype: str, *shapes: tuple[int, ...]) -> list[Array]:
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [jax.random.normal(key, x, dtype) for key, x in zip(keys, shapes, strict=True)]


def _prompt(reproducible: bool, *arrays: Array) -> Array:
    return energy_attn.attention(*arrays, is_causal=True, reproducible=reproducible)


def _gradients(reproducible: bool, *arrays: Array) -> Any:
    def loss(*arrays: Array) -> Array:
        return _prompt(reproducible, *arrays).astype(jnp.float32).sum()

    return jax.grad(loss, (0, 1, 2))(*arrays)


def _steps(reproducible: bool, cache: KVCache, *tokens: Array) -> Array:
    def step(cache: KVCache, token: tuple[Array, ...]) -> tuple[KVCache, Array]:
        query, key, value = token
        cache = cache.append(key, value)
        return cache, cache.attend(query, reproducible=reproducible).out

    return lax.scan(step, cache, tokens)[1]


def _both(program: Callable[..., Any], *arrays: Any) -> Sides:
    def side(reproducible: bool) -> Run:
        return functools.partial(jax.jit(functools.partial(program, reproducible)), *arrays)

    sides = {OURS: False, REPRODUCIBLE: True}
    return {name: functools.partial(side, flag) for name, flag in sides.items()}


def of_attention(
    program: Callable[..., Any], dtype: str, B: int, T: int, N: int, K: int, H: int
) -> Sides:
    """A causal prompt, or its gradients."""
    return _both(program, *_draw(dtype, (B, T, N, H), (B, T, K, H), (B, T, K, H)))


def of_steps(dtype: str, B: int, S: int, N: int, K: int, H: int) -> Sides:
    """Decode steps over a cache of `S` slots, which the steps leave almost full."""
    S = max(S, 4 * STEPS)
    key, value = _draw(dtype, *[(B, S - 2 * STEPS, K, H)] * 2)
    cache = KVCache.empty(B, S, K, H, dtype=dtype).append(key, value)
    return _both(_steps, cache, *_draw(dtype, *((STEPS, B, 1, n, H) for n in (N, K, K))))


def _model(dtype: str, T: int, layers: int, N: int, K: int, H: int) -> tuple[Llama, Array]:
    """A random Llama with a vocabulary of 8,192, and a text of `T` tokens."""
    width = N * H
    config = LlamaConfig(8192, width, 3 * width, layers, N, K, H)
    tokens = jax.random.randint(jax.random.key(1), (1, T), 0, config.vocab_size, jnp.int32)
    return Llama(config, jnp.dtype(dtype), key=jax.random.key(0)), tokens


def _read(reproducible: bool, model: Llama, tokens: Array) -> Array:
    cache = model.empty_cache(*tokens.shape, reproducible=reproducible)
    return model.prefill(tokens, cache, reproducible=reproducible).logits


def _decode(reproducible: bool, model: Llama, tokens: Array) -> Array:
    """Logits of the tokens, read one at a time in a scan; the cache holds them twice."""
    cache = model.empty_cache(1, 2 * tokens.shape[1], reproducible=reproducible)

    def step(cache: Any, token: Array) -> tuple[Any, Array]:
        out = model(token[None, None], cache=cache, reproducible=reproducible)
        return out.cache, out.logits[0, 0]

    return lax.scan(step, cache, tokens[0])[1][None]


def _train(reproducible: bool, model: Llama, tokens: Array) -> Any:
    def loss(model: Llama) -> Array:
        return -model.log_probs(tokens, reproducible=reproducible).mean()

    return jax.grad(loss)(model)


def of_decoder(program: Callable[..., Any], dtype: str, **sizes: int) -> Sides:
    """A program of a Llama."""
    return _both(program, *_model(dtype, **sizes))


SIDES = {
    "prompt": functools.partial(of_attention, _prompt),
    "gradients": functools.partial(of_attention, _gradients),
    "steps": of_steps,
    "decoder's prompt": functools.partial(of_decoder, _read),
    "decoder's steps": functools.partial(of_decoder, _decode),
    "decoder's gradients": functools.partial(of_decoder, _train),
}


def _case(name: str, dtype: str, B: int, length: int, N: int, K: int, H: int) -> Case:
    axis = "S" if name == "steps" else "T"
    return Case(name, dtype, {"B": B, axis: length, "N": N, "K": K, "H": H}, SIDES[name])


CPU = tuple(
    _case(name, dtype, 1, length, 8, K, 64)
    for name, dtype, length, K in (
        *(("prompt", dtype, 256, 2) for dtype in ("float32", "bfloat16")),
        *(("prompt", dtype, 1024, K) for dtype in ("float32", "bfloat16") for K in (2, 8)),
        *(("gradients", dtype, 1024, 2) for dtype in ("float32", "bfloat16")),
        *(("steps", dtype, 1024, K) for dtype in ("float32", "bfloat16") for K in (2, 8)),
    )
)
GPU = tuple(
    _case(*case)
    for case in (
        ("prompt", "bfloat16", 4, 1024, 8, 2, 64),
        *(("prompt", "bfloat16", 1, length, 32, 8, 128) for length in (1024, 4096, 16384)),
        *(("gradients", "bfloat16", 1, length, 32, 8, 128) for length in (1024, 4096)),
        ("steps", "bfloat16", 1, 1024, 8, 2, 64),
        *(("steps", "bfloat16", 1, length, 32, 8, 128) for length in (8192, 65536)),
        ("steps", "bfloat16", 16, 8192, 8, 4, 64),
        ("prompt", "float32", 1, 1024, 8, 2, 64),
        ("gradients", "float32", 1, 1024, 8, 2, 64),
        ("steps", "float32", 1, 4096, 8, 2, 64),
    )
)
DECODER = tuple(
    Case(
        f"decoder's {program}",
        dtype,
        {"T": T, "layers": 4, "N": N, "K": 4, "H": 64},
        SIDES[f"decoder's {program}"],
    )
    for N in (8, 32)
    for dtype in ("float32", "bfloat16")
    for program, T in (("prompt", 1024), ("steps", 32), ("gradients", 1024))
)
