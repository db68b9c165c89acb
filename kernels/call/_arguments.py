"""Checks a user's arguments and turns them into the operands that every implementation takes."""

from collections.abc import Callable
from typing import Any, NamedTuple, Unpack

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from .._checks import (
    as_ids,
    as_int32,
    broadcasts,
    check_boolean,
    check_broadcastable,
    check_finite_number,
    check_flag,
    check_floating,
    check_int32,
    check_integral,
    check_shape,
    received,
)
from ..scores._check import check_score
from ._canonical import Tokens, canonical_mask, split_mask, with_lengths
from ._eight_bits import dequantize
from ._operands import Operands, Settings
from ._options import KernelOptions, check_options
from ._state import lse_dtype


class CheckedCall(NamedTuple):
    """A checked call.

    Attributes:
        operands: the arrays.
        settings: the static options.
        batched: whether the user's arrays had a batch axis.
        compares: whether a mask, a score, or lengths of keys, say something of positions.
    """

    operands: Operands
    settings: Settings
    batched: bool
    compares: bool


def check_call(
    query: object,
    key: object,
    value: object,
    source: Array | np.ndarray | None = None,
    bias: object = None,
    mask: object = None,
    scored_width: int | None = None,
    scales: tuple[Array | None, Array | None] = (None, None),
    **options: Unpack[KernelOptions],
) -> CheckedCall:
    """Checks every argument of `local_attention` but `implementation`; returns operands and settings.

    `scored_width`: of the settings, where a source is in query and key already. `scales`: of keys and
    values that are int8, which are dequantized here if a source or an array for `scale` has to be joined to them.

    Raises `TypeError` or `ValueError` naming the argument, what was wanted and what was given.
    """
    check_options(options, KernelOptions)
    query = jnp.asarray(check_floating("query", query))
    key = _of_keys("key", key, scales[0], query)
    value = _of_keys("value", value, scales[1], query)
    if query.ndim not in (3, 4):
        raise ValueError(f"query: wanted shape (B, T, N, H) or (T, N, H), got {received(query)}")
    batched = query.ndim == 4
    *lead, query_len, heads, width = query.shape
    check_shape("key", key, (*lead, "S", "K", width))
    key_len, kv_heads = key.shape[-3:-1]
    check_shape("value", value, (*lead, key_len, kv_heads, "Hv"))
    if kv_heads == 0 or heads % kv_heads != 0:
        raise ValueError(
            f"query: wanted a number of heads that is a multiple of the {kv_heads} "
            f"key/value heads, got {received(query)}"
        )
    for name, x in (("query", query), ("value", value)):
        if x.shape[-1] == 0:
            raise ValueError(f"{name}: wanted a width above zero, got {received(x)}")
    if source is not None:
        check_source(source, query, value)
        source = jnp.asarray(source)
    if not batched:
        query, key, value = query[None], key[None], value[None]
        source = None if source is None else source[None]

    batch = query.shape[0]
    scores = (batch, heads, query_len, key_len)
    predicate, mask = split_mask(mask)
    bias, mask = check_scores(bias, mask, scores)
    is_causal = check_flag("is_causal", options.get("is_causal", False))
    window = check_window(options.get("local_window_size"))

    query_positions, key_positions = (
        _numbers(name, options.get(name), batch, size, batched)
        for name, size in (("query_positions", query_len), ("key_positions", key_len))
    )
    lengths = tuple(
        _lengths(name, options.get(name), batch, size, batched)
        for name, size in (("query_seq_lengths", query_len), ("key_value_seq_lengths", key_len))
    )

    query_segment_ids = options.get("query_segment_ids")
    key_segment_ids = options.get("key_segment_ids")
    if (query_segment_ids is None) != (key_segment_ids is None):
        missing = "query_segment_ids" if query_segment_ids is None else "key_segment_ids"
        raise ValueError(f"{missing}: wanted an integer array beside the other's, got None")
    tokens = Tokens(
        query_positions,
        key_positions,
        _numbers("query_segment_ids", query_segment_ids, batch, query_len, batched, as_ids),
        _numbers("key_segment_ids", key_segment_ids, batch, key_len, batched, as_ids),
    )
    if query_positions is None and key_positions is None:
        tokens = with_lengths(tokens, *lengths)
    else:
        tokens = tokens._replace(
            query_positions=_among(query_positions, lengths[0], query_len),
            key_positions=_among(key_positions, lengths[1], key_len),
        )
    canonical = canonical_mask(predicate, is_causal, window, tokens, batch, query_len, key_len)

    if source is not None or isinstance(options.get("scale"), jax.Array):
        key, value = (
            dequantize(x, scale, query.dtype) for x, scale in zip((key, value), scales, strict=True)
        )
        scales = None, None
    query, key, scale = _scaled(query, key, options.get("scale"), canonical.tokens)
    if source is not None:
        scored_width = scored_width or query.shape[-1]
        query, key, scale = _with_source(query, key, value, source, scale)
    score, score_arrays = check_score(options.get("score"), scores, lse_dtype(query.dtype))
    operands = Operands(
        query, key, value, bias, mask, *canonical.tokens[:4], canonical.arrays, score_arrays
    )
    operands = operands._replace(
        key_scale=scales[0],
        value_scale=scales[1],
        query_lengths=canonical.tokens.query_lengths,
        key_lengths=canonical.tokens.key_lengths,
    )
    settings = Settings(scale, canonical.structure)
    if score is not None:
        settings = settings._replace(score=score, scored_width=scored_width)
    compares = settings.compares or lengths[1] is not None or predicate is not None
    return CheckedCall(operands, settings, batched, compares)


def _of_keys(name: str, x: Any, scale: Array | None, query: Array) -> Array:
    if scale is not None:
        return jnp.asarray(x)
    x = jnp.asarray(check_floating(name, x))
    if x.dtype != query.dtype:
        raise TypeError(f"{name}: wanted the dtype of query, {query.dtype}, got {received(x)}")
    return x


def check_scores(
    bias: object, mask: object, shape: tuple[int, int, int, int]
) -> tuple[Array | None, Array | None]:
    """Returns bias and mask, where given, with four axes that broadcast to `shape`.

    Raises `TypeError` for another dtype and `ValueError` for a shape that does not broadcast.
    """
    if bias is not None:
        bias = _four_axes("bias", check_floating("bias", bias), shape)
    if mask is not None:
        mask = _four_axes("mask", check_boolean("mask", mask), shape)
    return bias, mask


def check_source(source: object, query: Array, value: Array) -> None:
    """Checks a source against a checked query and value.

    Raises `TypeError` if it is not a floating array and `ValueError` for a wrong shape.
    """
    check_shape("source", check_floating("source", source), (*query.shape[:-1], value.shape[-1]))


def check_scale(scale: object) -> Any:
    """Returns `scale` if it is None, a finite number or a floating scalar array.

    Raises `TypeError` for another type or dtype, `ValueError` for an infinity, NaN (where values
    are known) or an array with axes.
    """
    if scale is None:
        return None
    if not isinstance(scale, jax.Array):
        return check_finite_number("scale", scale)
    if scale.ndim != 0:
        raise ValueError(f"scale: wanted a number or a floating scalar, got {received(scale)}")
    check_floating("scale", scale)
    if not isinstance(scale, jax.core.Tracer):
        check_finite_number("scale", float(scale))
    return scale


def _scaled(
    query: Array, key: Array, scale: float | Array | None, tokens: Tokens
) -> tuple[Array, Array, float]:
    scale, dtype = check_scale(scale), lse_dtype(query.dtype)
    if scale is None:
        return query, key, query.shape[-1] ** -0.5
    if not isinstance(scale, jax.Array):
        if abs(scale) > float(jnp.finfo(dtype).max):
            raise ValueError(f"scale: wanted a number within {dtype}, got {scale}")
        return query, key, scale
    # An array may be traced and differentiated (an inverse temperature). It multiplies the query,
    # in the dtype of the scores, so that it rounds no more than a number would. Its derivative sums over all
    # queries, so that what an absent one holds is left out here already.
    if tokens.query_positions is not None or tokens.query_lengths is not None:
        positions: Any = tokens.with_positions(query.shape[1], key.shape[1]).query_positions
        query = jnp.where(positions[:, :, None, None] >= 0, query, 0)
    return query.astype(dtype) * scale.astype(dtype), key.astype(dtype), 1.0


def _with_source(
    query: Array, key: Array, value: Array, source: Array, scale: float
) -> tuple[Array, Array, float]:
    # scale q·k + ζ·v = [scale q, ζ]·[k, v]: a source is extra width of query and key, again in the
    # dtype of the scores.
    dtype = lse_dtype(query.dtype, source.dtype)
    source, value = _as_split(source, query), _as_split(value, key)
    query = jnp.concatenate([query.astype(dtype) * scale, source.astype(dtype)], -1)
    key = jnp.concatenate([key.astype(dtype), value.astype(dtype)], -1)
    return query, key, 1.0


def _as_split(x: Array, like: Array) -> Array:
    """`x` with all axes but the last sharded over explicit mesh axes as those of `like`."""
    sharding: Any = jax.typeof(like).sharding
    parts = sharding.spec[: like.ndim - 1]
    mine = jax.typeof(x).sharding.spec[: like.ndim - 1]
    if tuple(mine) == tuple(parts):
        return x
    return jax.reshard(x, NamedSharding(sharding.mesh, PartitionSpec(*parts)))


def _four_axes(name: str, x: Array | np.ndarray, shape: tuple[int, int, int, int]) -> Array:
    # as in jax.nn: leading axes may be left out
    try:
        check_broadcastable(name, x, shape, leading=False)
    except ValueError as wrong:
        # other libraries leave these axes out; two may have one length, so here they are written
        batch, _, query_len, key_len = shape
        if broadcasts(x.shape, (batch, key_len)):
            hint = f"(batch, keys) write {name}[:, None, None, :]"
        elif broadcasts(x.shape, (batch, query_len, key_len)):
            hint = f"(batch, queries, keys) write {name}[:, None]"
        else:
            raise
        raise ValueError(f"{wrong}; for {hint}") from None
    x = jnp.asarray(x)
    return x if x.ndim >= 4 else x[(None,) * (4 - x.ndim)]


def check_window(size: object) -> tuple[int, int] | None:
    """Returns the window as `(left, right)`, or None.

    Raises `TypeError` for anything but an int or a pair, `ValueError` for negative sizes.
    """
    if size is None:
        return None
    sides = (size, size) if isinstance(size, (int, np.integer)) else size
    if not (
        isinstance(sides, tuple)
        and len(sides) == 2
        and all(isinstance(x, (int, np.integer)) and not isinstance(x, bool) for x in sides)
    ):
        raise TypeError(
            f"local_window_size: wanted an int or a pair (left, right), got {received(size)}"
        )
    if min(sides) < 0:
        raise ValueError(f"local_window_size: wanted sizes of at least 0, got {size}")
    return int(sides[0]), int(sides[1])


def _lengths(
    name: str, lengths: Array | np.ndarray | None, batch: int, size: int, batched: bool
) -> Array | None:
    if lengths is None:
        return None
    check_integral(name, lengths)
    if not batched and lengths.ndim == 0:
        lengths = lengths[None]
    else:
        check_shape(name, lengths, (batch,))
    if not isinstance(lengths, jax.core.Tracer):
        values = np.asarray(lengths)
        if values.size and not 0 <= values.min() <= values.max() <= size:
            raise ValueError(f"{name}: wanted lengths from 0 to {size}, got {values.tolist()}")
    return jnp.asarray(as_int32(lengths))


def _among(positions: Array | None, lengths: Array | None, size: int) -> Array:
    """Positions, of which those from the index of a length on are absent; counted from 0 where none are given."""
    places = jnp.arange(size, dtype=jnp.int32)[None]
    positions = places if positions is None else positions
    return positions if lengths is None else jnp.where(places < lengths[:, None], positions, -1)


def _numbers(
    name: str,
    x: Array | np.ndarray | None,
    batch: int,
    size: int,
    batched: bool,
    narrow: Callable[[Any], Any] = as_int32,
) -> Array | None:
    if x is None:
        return None
    check_int32(name, x)
    wanted = (batch, size) if batched else (size,)
    if x.shape not in (wanted, (1, size)):
        raise ValueError(f"{name}: wanted shape {wanted}, got {received(x)}")
    return jnp.asarray(narrow(x if x.ndim == 2 else x[None]))
