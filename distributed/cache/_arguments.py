"""Checks of the arguments of a cache."""

from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from energy_attn.kernels.internal import (
    CallPolicy,
    MergedScoreOptions,
    arguments,
    call_policy,
    check_options,
    checks,
)
from energy_attn.kernels.masks import AbstractMask

from ._layout import Slots
from ._write import positions_from


def check_room(window: object, slots: Slots) -> int | None:
    if window is None:
        return None
    window = checks.check_integer("window", window, least=0)
    if window >= slots.capacity:
        raise ValueError(
            f"window: wanted less than the capacity, {slots.capacity}, so that there is room for a "
            f"new token, got {window}"
        )
    return window


def check_counts(lengths: object, rows: int, tokens: int, name: str = "lengths") -> Array:
    if lengths is None:
        return jnp.full(rows, tokens, jnp.int32)
    counts = check_whole(name, lengths, rows)
    if counts.ndim == 0:
        raise ValueError(f"{name}: wanted shape ({rows}), got {checks.received(lengths)}")
    if not isinstance(counts, jax.core.Tracer) and (np.asarray(counts) > tokens).any():
        raise ValueError(f"{name}: wanted 0 to {tokens}, got {np.asarray(lengths).tolist()}")
    return counts


def check_whole(name: str, x: object, rows: int) -> Array:
    """Numbers of at least 0, for all rows or one each, as int32."""
    if isinstance(x, (int, np.integer)):
        number = checks.check_integer(name, x, least=0, is_wide=True)
        return jnp.asarray(checks.as_int32(np.asarray(number)))
    numbers = checks.check_integral(name, x)
    if numbers.ndim:
        checks.check_shape(name, numbers, (rows,))
    if not isinstance(x, jax.core.Tracer) and (np.asarray(x) < 0).any():
        raise ValueError(f"{name}: wanted no negative numbers, got {np.asarray(x).tolist()}")
    return jnp.asarray(checks.as_int32(numbers))


def check_stored(name: str, x: object, dtype: jnp.dtype) -> Array:
    array = checks.check_floating(name, x)
    if array.dtype != dtype:
        raise TypeError(f"{name}: wanted the dtype of the cache, {dtype}, got {checks.received(x)}")
    return array


def check_importance(x: object, key: Array) -> Array:
    """Importance of each slot, `[B, S, 1]`, or `[B, S, K]` for each head."""
    array = jnp.asarray(checks.check_floating("importance", x))
    if array.shape not in (key.shape[:2], key.shape[:3]):
        raise ValueError(
            f"importance: wanted shape {key.shape[:2]} or {key.shape[:3]}, got {checks.received(x)}"
        )
    return array if array.ndim == 3 else array[..., None]


def check_reach(size: object, window: int | None) -> tuple[Any, Any] | None:
    """The window of queries, at most the window of the cache, unless it is an array."""
    reach = arguments.check_window(size)
    if window is None:
        return reach
    if reach is None:
        return window, 0
    left, right = reach
    if arguments.is_array(left):
        return left, right
    if left is not None and left > window:
        raise ValueError(
            f"local_window_size: wanted at most the cache's window, {window}, to the left, got {size}"
        )
    return window if left is None else left, right


def check_rows(name: str, rows: object, count: int) -> Array:
    """Booleans `[count]`, from booleans or indices of rows; traced indices may be out of range."""
    if jnp.issubdtype(checks.check_array(name, rows).dtype, jnp.bool_):
        checks.check_shape(name, checks.check_boolean(name, rows), (count,))
        return jnp.asarray(rows)
    indices = check_indices(name, rows, count)
    return (indices[:, None] == jnp.arange(count, dtype=jnp.int32)[None]).any(0)


def check_indices(name: str, rows: object, count: int, *, unique: bool = False) -> Array:
    """Indices of rows as int32; traced ones may be out of range, and repeat."""
    indices = checks.check_integral(name, rows)
    checks.check_shape(name, indices, ("n",))
    if not isinstance(rows, jax.core.Tracer):
        known = np.asarray(indices)
        if ((known < 0) | (known >= count)).any():
            raise ValueError(f"{name}: wanted rows from 0 to {count - 1}, got {known.tolist()}")
        if unique and len(set(known.tolist())) < len(known):
            raise ValueError(f"{name}: wanted different rows, got {known.tolist()}")
    return jnp.asarray(checks.as_int32(indices))


def check_scores(
    options: MergedScoreOptions, mask: Array | AbstractMask | None, window: int | None
) -> tuple[CallPolicy, MergedScoreOptions]:
    """The policy, and the options with a cache's causality and window."""
    check_options(options, MergedScoreOptions)
    policy = call_policy(options.get("implementation"), options.get("reproducible", False))
    reach = check_reach(options.get("local_window_size"), window)
    causal = options.get("is_causal", mask is None)
    options = {**options, "is_causal": causal, "local_window_size": reach}
    if reach is not None and arguments.is_array(reach[0]) and window is not None:
        # slots of older tokens are overwritten
        left, right = arguments.check_window(options.get("max_window"), "max_window") or (
            None,
            None,
        )
        options["max_window"] = arguments.least(left, window), right
    return policy, options


def check_queries(
    query: object,
    key: Array,
    dtype: jnp.dtype,
    cache_lengths: Int[Array, " B"],
    lengths: Int[Array, " B"] | None,
    positions: Int[Array, "..."] | None,
) -> Int[Array, "..."]:
    """The positions of checked queries to a cache with such keys; by default, of the tokens appended last."""
    query = check_stored("query", query, dtype)
    checks.check_shape("query", query, (len(cache_lengths), "T", "N", key.shape[-1]))
    if positions is None:
        counts = check_counts(lengths, len(cache_lengths), query.shape[1])
        return positions_from(cache_lengths - counts, counts, query.shape[1])
    if lengths is not None:
        raise ValueError(
            "lengths: wanted None with query_positions, which say what queries are absent, "
            f"got {checks.received(lengths)}"
        )
    return positions
