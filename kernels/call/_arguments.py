"""Checks a user's arguments and turns them into the operands that every implementation takes."""

import contextlib
from collections.abc import Callable, Iterator
from types import NoneType
from typing import Any, NamedTuple, Unpack

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
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
from ._canonical import canonical_mask, split_mask
from ._eight_bits import dequantize
from ._leaves import check_leaves
from ._operands import NO_SCALES, Operands, Scales, Settings
from ._options import KernelOptions, check_options
from ._sink import check_sink
from ._source import with_source
from ._state import lse_dtype
from ._tokens import Tokens
from ._weighing import with_token_scores

# What a layout says of a call's tokens, and whether masks, scores or lengths of keys read their positions.
Place = Callable[[Tokens, bool], Tokens]


class CheckedArrays(NamedTuple):
    """Query, key and value with a batch axis, and whether the user's arrays had one."""

    query: Array
    key: Array
    value: Array
    batched: bool


class CheckedCall(NamedTuple):
    """A checked call.

    Attributes:
        operands: the arrays.
        settings: the static options.
        batched: whether the user's arrays had a batch axis.
    """

    operands: Operands
    settings: Settings
    batched: bool


def check_call(
    query: object,
    key: object,
    value: object,
    source: Array | np.ndarray | None = None,
    bias: object = None,
    mask: object = None,
    scales: Scales = NO_SCALES,
    place: Place | None = None,
    sink: object = None,
    **options: Unpack[KernelOptions],
) -> CheckedCall:
    """Checks every argument of `local_attention` but `implementation`; returns operands and settings.

    `scales`: of keys and values that are int8, which are dequantized if a source or an array for `scale` has to be
    joined to them.

    Raises `TypeError` or `ValueError` naming the argument, what was wanted and what was given.
    """
    check_options(options, KernelOptions, "source", "bias", "mask")
    arrays = check_arrays(query, key, value, scales)
    if source is not None:
        shape = (*arrays.query.shape[:-1], arrays.value.shape[-1])
        check_shape("source", check_floating("source", source), shape[0 if arrays.batched else 1 :])
        source = jnp.asarray(source if arrays.batched else source[None])
    call = check_scored(arrays, bias, mask, scales, place, sink, **options)
    settings, operands = with_source(call.settings, call.operands, source)
    return call._replace(settings=settings, operands=operands)


def check_arrays(
    query: object, key: object, value: object, scales: Scales = NO_SCALES
) -> CheckedArrays:
    """Checks query, key and value against each other. Raises as `check_call`."""
    query = jnp.asarray(check_floating("query", query))
    key = _of_keys("key", key, scales.key, query)
    value = _of_keys("value", value, scales.value, query)
    if query.ndim not in (3, 4):
        raise ValueError(f"query: wanted shape (B, T, N, H) or (T, N, H), got {received(query)}")
    *lead, _, heads, width = query.shape
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
    if query.ndim == 4:
        return CheckedArrays(query, key, value, True)
    return CheckedArrays(query[None], key[None], value[None], False)


def check_scored(
    arrays: CheckedArrays,
    bias: object = None,
    mask: object = None,
    scales: Scales = NO_SCALES,
    place: Place | None = None,
    sink: object = None,
    **options: Unpack[KernelOptions],
) -> CheckedCall:
    """Checks all else, by which checked arrays are scored. Raises as `check_call`."""
    query, key, value, batched = arrays
    batch, query_len, heads, _ = query.shape
    key_len = key.shape[1]
    scores = (batch, heads, query_len, key_len)
    predicate, mask = split_mask(mask)
    bias, mask = check_scores(bias, mask, scores)
    bias = with_token_scores(bias, batch, key_len)
    is_causal = check_flag("is_causal", options.get("is_causal", False))
    window = check_window(options.get("local_window_size"))
    score, score_arrays = check_score(options.get("score"), scores, lse_dtype(query.dtype))

    tokens = _check_tokens(options, batch, query_len, key_len, batched)
    if place is not None:
        reads = is_causal or window is not None or predicate is not None
        reads = reads or options.get("reproducible", False)  # keys are in leaves by position
        reads = reads or (score is not None and score.compares)
        tokens = place(tokens, reads or tokens.key_lengths is not None)
    if tokens.query_positions is not None or tokens.key_positions is not None:
        tokens = tokens._replace(
            query_positions=_among(tokens.query_positions, tokens.query_lengths, query_len),
            key_positions=_among(tokens.key_positions, tokens.key_lengths, key_len),
            query_lengths=None,
            key_lengths=None,
        )
    if options.get("reproducible", False) and options.get("key_positions") is not None:
        check_leaves(tokens.key_positions)
    canonical = canonical_mask(predicate, is_causal, window, tokens, batch, query_len, key_len)

    if isinstance(options.get("scale"), jax.Array):
        if options.get("reproducible", False):
            raise NotImplementedError(
                "scale: wanted a number beside reproducible=True; scores.Temperature takes an array of one for each "
                f"head, got {received(options.get('scale'))}"
            )
        key, value = (
            dequantize(x, scale, query.dtype) for x, scale in zip((key, value), scales, strict=True)
        )
        scales = NO_SCALES
    query, key, scale = _scaled(query, key, options.get("scale"), canonical.tokens)
    operands = Operands(
        *(query, key, value, bias, mask, canonical.tokens, canonical.arrays, score_arrays),
        scales=scales,
        sink=check_sink(sink, query.shape[0 if batched else 1 : -1]),
    )
    return CheckedCall(operands, Settings(scale, canonical.structure, score=score), batched)


def _check_tokens(
    options: KernelOptions, batch: int, query_len: int, key_len: int, batched: bool
) -> Tokens:
    """Positions, segments and lengths as they are given."""
    sizes = ("query", query_len), ("key", key_len)
    of_queries, of_keys = (options.get(f"{side}_segment_ids") for side, _ in sizes)
    if (of_queries is None) != (of_keys is None):
        missing = "query_segment_ids" if of_queries is None else "key_segment_ids"
        raise ValueError(f"{missing}: wanted an integer array beside the other's, got None")
    numbers = (
        _numbers(name, options.get(name), batch, size, batched, narrow)
        for narrow, kind in ((as_int32, "positions"), (as_ids, "segment_ids"))
        for name, size in ((f"{side}_{kind}", size) for side, size in sizes)
    )
    lengths = (
        _lengths(name, options.get(name), batch, size, batched)
        for name, size in (("query_seq_lengths", query_len), ("key_value_seq_lengths", key_len))
    )
    return Tokens(*numbers, *lengths)


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
        with _hint("a boolean array is mask="):
            check_floating("bias", bias)
        bias = _four_axes("bias", bias, shape)
    if mask is not None:
        with _hint("an array that is added to the scores is bias="):
            check_boolean("mask", mask)
        mask = _four_axes("mask", mask, shape)
    return bias, mask


@contextlib.contextmanager
def _hint(hint: str) -> Iterator[None]:
    """Adds to a `TypeError` what else may have been meant."""
    try:
        yield
    except TypeError as wrong:
        raise TypeError(f"{wrong}; {hint}") from None


def check_source(source: object, query: Array, value: Array) -> None:
    """Checks a source against a checked query and value.

    Raises `TypeError` if it is not a floating array and `ValueError` for a wrong shape.
    """
    check_shape("source", check_floating("source", source), (*query.shape[:-1], value.shape[-1]))


def check_scale(scale: object) -> Any:
    """Returns `scale` if it is None, a finite number, or a floating array: a scalar or `[N]`.

    Raises `TypeError` for another type or dtype, `ValueError` for an infinity, NaN (where values
    are known) or an array with more axes.
    """
    if scale is None:
        return None
    if not isinstance(scale, jax.Array):
        return check_finite_number("scale", scale)
    if scale.ndim > 1:
        raise ValueError(
            f"scale: wanted a number, or a floating scalar or array of shape (N,), got {received(scale)}"
        )
    check_floating("scale", scale)
    if not isinstance(scale, jax.core.Tracer) and not np.isfinite(scale).all():
        raise ValueError(f"scale: wanted finite numbers, got {scale}")
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
    if scale.ndim == 1:
        if scale.shape != query.shape[2:3]:
            raise ValueError(
                f"scale: wanted a scalar or shape ({query.shape[2]},), got {received(scale)}"
            )
        scale = scale[None, None, :, None]
    # An array may be traced and differentiated (an inverse temperature). It multiplies the query,
    # in the dtype of the scores, so that it rounds no more than a number would. Its derivative sums over all
    # queries, so that what an absent one holds is left out here already.
    if tokens.query_positions is not None or tokens.query_lengths is not None:
        positions: Any = tokens.with_positions(query.shape[1], key.shape[1]).query_positions
        query = jnp.where(positions[:, :, None, None] >= 0, query, 0)
    return query.astype(dtype) * scale.astype(dtype), key.astype(dtype), 1.0


def _four_axes(name: str, x: Any, shape: tuple[int, int, int, int]) -> Array:
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


def check_window(size: object) -> tuple[int | None, int | None] | None:
    """Returns the window as `(left, right)`, or None; None for a side is any distance.

    Raises `TypeError` for anything but an int or a pair of sides, `ValueError` for negative sides.
    """
    if size is None:
        return None
    sides = (size, size) if isinstance(size, (int, np.integer)) else size
    wanted = "an int or a pair (left, right) of ints, or None for any distance"
    if not (isinstance(sides, tuple) and len(sides) == 2):
        raise TypeError(f"local_window_size: wanted {wanted}, got {received(size)}")
    for side in sides:
        if isinstance(side, bool) or not isinstance(side, (int, np.integer, NoneType)):
            raise TypeError(f"local_window_size: wanted {wanted}, got {received(size)}")
        if side is not None and side < 0:
            raise ValueError(
                f"local_window_size: wanted sides of at least 0, or None for any distance, got {size}"
            )
    left, right = (None if side is None else int(side) for side in sides)
    return left, right


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
    narrow: Callable[[Any], Any],
) -> Array | None:
    if x is None:
        return None
    check_int32(name, x)
    wanted = (batch, size) if batched else (size,)
    if x.shape not in (wanted, (1, size)):
        raise ValueError(f"{name}: wanted shape {wanted}, got {received(x)}")
    return jnp.asarray(narrow(x if x.ndim == 2 else x[None]))
