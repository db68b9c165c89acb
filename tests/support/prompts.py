"""Prompts for `Canonical`, caches of them, and what is computed of them, to compare byte by byte."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from energy_attn.kernels import local_attention
from energy_attn.kernels.internal import Canonical
from tests.support.arrays import array

LENGTH, HEADS, KEY_HEADS, WIDTH, VALUE_WIDTH = 2100, 4, 2, 16, 24  # nine leaves, the last in part
SHORT = 1100  # for derivatives: five leaves, many tiles of queries
DTYPES = "float32", "bfloat16", "float16", "float64"
OPTIONS: dict[str, Any] = {
    "causal": {"is_causal": True},
    "window": {"local_window_size": (1300, 0)},
    "segments": {"is_causal": True},
    "full": {},
}


class Tokens(NamedTuple):
    """Of one prompt: arrays of NumPy or, traced, of JAX."""

    query: Any
    key: Any
    value: Any
    positions: Any
    segments: Any

    def at(self, index) -> "Tokens":
        """Some of them."""
        return Tokens._make(x[index] for x in self)


@functools.cache
def prompt(dtype: str, seed: int = 0) -> Tokens:
    """A random one, whose scores are large enough for exponentials of all sizes."""
    rng = np.random.default_rng(seed)
    sizes = (HEADS, WIDTH), (KEY_HEADS, WIDTH), (KEY_HEADS, VALUE_WIDTH)
    arrays = (np.asarray(array(2 * rng.standard_normal((LENGTH, *x)), dtype)) for x in sizes)
    segments = np.cumsum(rng.random(LENGTH) < 0.002).astype(np.int32)
    return Tokens._make((*arrays, np.arange(LENGTH, dtype=np.int32), segments))


def attend(option: str, rows: Tokens, keys: Tokens, kernel: Any = None, **more: Any):
    """The state of rows over keys, both `[T, ...]` or `[B, T, ...]`."""
    rows, keys = (Tokens._make(map(jnp.asarray, x)) for x in (rows, keys))
    segments: dict[str, Any] = {}
    if option == "segments":
        segments = {"query_segment_ids": rows.segments, "key_segment_ids": keys.segments}
    return local_attention(
        *(rows.query, keys.key, keys.value),
        query_positions=rows.positions,
        key_positions=keys.positions,
        implementation=kernel or Canonical(),
        **OPTIONS[option],
        **more,
        **segments,
    )


@functools.cache
def whole(dtype: str, option: str):
    """The state of a prompt, computed at once."""
    return jax.jit(functools.partial(attend, option))(prompt(dtype), prompt(dtype))


def in_batch(tokens: Tokens, others: list[Tokens]) -> Tokens:
    """Caches of one capacity in a batch."""
    return Tokens._make(np.stack(x) for x in zip(tokens, *others, strict=True))


def junk_like(x: np.ndarray, capacity: int, rng: np.random.Generator) -> np.ndarray:
    """What slots hold that have no token: some numbers, or none."""
    junk = 50 * rng.standard_normal((capacity, *x.shape[1:]))
    if x.dtype != np.int32:
        junk[rng.random(capacity) < 0.3] = np.nan
    return junk.astype(x.dtype)


def cache_of(tokens: Tokens, capacity: int, rng: np.random.Generator, first: int = 0) -> Tokens:
    """The tokens in a cache from slot `first` on, with junk in the others."""
    slots = np.arange(first, first + len(tokens.positions))
    filled = []
    for x in tokens:
        junk = junk_like(x, capacity, rng)
        junk[slots] = x
        filled.append(junk)
    positions = np.full(capacity, -1, np.int32)
    positions[slots] = tokens.positions
    return Tokens._make(filled)._replace(positions=positions)


def same_bytes(found, wanted):
    """Each array has the bytes of the other, signs of zeros included; none is NaN."""
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        assert not np.isnan(y.astype(np.float64)).any()
        different = x.view(np.uint8).reshape(*x.shape, -1) != y.view(np.uint8).reshape(*x.shape, -1)
        assert not different.any(), f"{different.any(-1).mean():.1%} of the entries differ"


def at(state, index):
    """Some rows of a state."""
    return jax.tree.map(lambda x: x[index], state)


def gradients(option, rows, keys, weights, **more):
    """Those of query, key and value, from cotangents of both results."""

    def loss(query, key, value):
        state = attend(
            option, rows._replace(query=query), keys._replace(key=key, value=value), **more
        )
        wide = state.lse.dtype
        return sum(
            jnp.vdot(x.astype(wide), y.astype(wide)) for x, y in zip(weights, state, strict=True)
        )

    return jax.grad(loss, (0, 1, 2))(rows.query, keys.key, keys.value)


def tangent(option, rows, keys, seed, **more):
    """The derivative of the state in a direction of all three."""
    primals = rows.query, keys.key, keys.value

    def state(query, key, value):
        return attend(
            option, rows._replace(query=query), keys._replace(key=key, value=value), **more
        )

    return jax.jvp(state, primals, seed)[1]
