"""Checks a user's arguments and turns them into the operands that every implementation takes."""

from collections.abc import Callable
from types import NoneType
from typing import Any, NamedTuple, Unpack

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from .._checks import (
    broadcasts,
    check_boolean,
    check_broadcastable,
    check_finite_number,
    check_flag,
    check_floating,
    check_shape,
    received,
)
from ..masks._abstract import AbstractMask
from ..masks._ready import TracedWindow
from ..masks._ready import lengths as checked_lengths
from ..scores._structure import check_score
from ._batch import BatchAxes, broadcast_axes, check_batched, flattened, joined
from ._operands import NO_SCALES, Operands, Scales, Settings, dequantized
from ._options import MergedOptions, RowOptions, check_options
from ._source import (
    active_token_scores,
    check_sink,
    sharded_as,
    with_source,
    with_token_scores,
)
from ._state import lse_dtype
from ._tokens import (
    NO_RULES,
    NO_TOKENS,
    PositionRules,
    Tokens,
    check_leaves,
    check_tokens,
    least,
    position_rules,
    split_mask,
)

# (tokens, whether masks, scores or key lengths read positions) to the tokens with the positions of a layout
PlaceFn = Callable[[Tokens, bool], Tokens]


class CheckedArrays(NamedTuple):
    """Query, key and value with one batch axis, and the user's batch axes."""

    query: Array
    key: Array
    value: Array
    axes: BatchAxes


class CheckedCall(NamedTuple):
    """A checked call, and the user's batch axes."""

    operands: Operands
    settings: Settings
    axes: BatchAxes


def check_call(
    query: object,
    key: object,
    value: object,
    source: Array | np.ndarray | None = None,
    bias: object = None,
    mask: object = None,
    scales: Scales = NO_SCALES,
    place: PlaceFn | None = None,
    **options: Unpack[MergedOptions],
) -> CheckedCall:
    """Checks every argument of `local_attention` but `implementation`, and a sink.

    `scales`: the scales of int8 keys and values, which are dequantized if there is a source or an array `scale`.
    Raises `TypeError` or `ValueError` naming the argument, what was wanted and what was given.
    """
    check_options(options, MergedOptions, "source", "bias", "mask")
    arrays = check_arrays(query, key, value, scales)
    if source is not None:
        as_given: Any = query, key, value
        check_source(source, *as_given)
    call = check_scored(arrays, bias, mask, scales, place, **options)
    if source is None:
        return call
    source = jnp.asarray(joined(source, len(call.axes)))
    settings, operands = with_source(call.settings, call.operands, source)
    return call._replace(settings=settings, operands=operands)


def check_arrays(
    query: object, key: object, value: object, scales: Scales = NO_SCALES
) -> CheckedArrays:
    """Checks query, key and value against each other. Raises as `check_call`."""
    query = jnp.asarray(check_floating("query", query))
    named: Any = ("key", key, scales.key), ("value", value, scales.value)
    checked: list[Array] = []
    for name, x, scale in named:
        array = jnp.asarray(check_floating(name, x) if scale is None else x)
        if scale is None and array.dtype != query.dtype:
            raise TypeError(
                f"{name}: wanted the dtype of query, {query.dtype}, got {received(array)}"
            )
        checked.append(array)
    key, value = checked
    if query.ndim < 3:
        raise ValueError(f"query: wanted shape (B, T, N, H) or (T, N, H), got {received(query)}")
    axes = broadcast_axes(query, key, value)
    if not all(axes[1:]):
        raise ValueError(f"query: wanted batch axes after the first above 0, got {received(query)}")
    heads, width = query.shape[-2:]
    check_batched("query", query, axes, ("T", "N", "H"))
    check_batched("key", key, axes, ("S", "K", width))
    key_len, kv_heads = key.shape[-3:-1]
    check_batched("value", value, axes, (key_len, kv_heads, "Hv"))
    if kv_heads == 0 or heads % kv_heads != 0:
        raise ValueError(
            f"query: wanted a number of heads that is a multiple of the {kv_heads} "
            f"key/value heads, got {received(query)}"
        )
    for name, x in (("query", query), ("value", value)):
        if x.shape[-1] == 0:
            raise ValueError(f"{name}: wanted a width above zero, got {received(x)}")
    whole = [joined(_over_batch(x, axes, query), len(axes)) for x in (query, key, value)]
    return CheckedArrays(whole[0], whole[1], whole[2], axes)


def _over_batch(x: Array, axes: BatchAxes, query: Array) -> Array:
    """Repeats an array over the batch axes that it broadcasts along, split over a mesh as the query is."""
    shape = *axes, *x.shape[len(axes) :]
    return x if x.shape == shape else sharded_as(jnp.broadcast_to(x, shape), query, len(axes))


def check_scored(
    arrays: CheckedArrays,
    bias: object = None,
    mask: object = None,
    scales: Scales = NO_SCALES,
    place: PlaceFn | None = None,
    **options: Unpack[MergedOptions],
) -> CheckedCall:
    """Checks how checked arrays are scored; raises as `check_call`."""
    query, key, value, axes = arrays
    batch, query_len, heads, _ = query.shape
    shape = batch, heads, query_len, key.shape[1]
    rule, score, score_arrays = None, None, ()
    if mask is not None:
        rule, mask = split_mask(mask)
    if bias is not None or mask is not None:
        bias, mask = check_scores(bias, mask, (*(axes or (1,)), *shape[1:]))
    if active_token_scores.value:
        bias = with_token_scores(bias, batch, key.shape[1])
    if options.get("score") is not None:
        score, score_arrays = check_score(options.get("score"), shape, lse_dtype(query.dtype))
    uses_positions = score is not None and score.uses_positions
    tokens, rules = _checked_tokens(arrays, rule, uses_positions, place, options)
    sink = options.get("sink")
    if sink is not None:
        sink = check_sink(sink, (*axes, query_len, heads))
    fields: Any = query, key, value, bias, mask, tokens, rules.arrays, score_arrays
    operands = Operands(*fields, scales=scales, sink=sink)
    scale = options.get("scale")
    if scale is None:
        scale = query.shape[-1] ** -0.5
    else:
        operands, scale = _scaled(operands, scale, options.get("reproducible", False))
    return CheckedCall(operands, Settings(scale, rules.structure, score), axes)


def _checked_tokens(
    arrays: CheckedArrays,
    rule: AbstractMask | None,
    uses_positions: bool,
    place: PlaceFn | None,
    options: MergedOptions,
) -> tuple[Tokens, PositionRules]:
    """The tokens of a call, and the rules that hide some of them. `uses_positions`: whether a score reads positions."""
    query_len, axes = arrays.query.shape[1], arrays.axes
    key_len, reproducible = arrays.key.shape[1], options.get("reproducible", False)
    tokens, rules, window = NO_TOKENS, NO_RULES, options.get("local_window_size")
    if not options.keys().isdisjoint(RowOptions.__annotations__):
        tokens = check_tokens(options, axes, query_len, key_len)
    is_causal = check_flag("is_causal", options.get("is_causal", False))
    if window is not None or options.get("max_window") is not None:
        window, rule = _split_window(window, options.get("max_window"), rule)
    if rule is not None or is_causal or window is not None:
        rules = position_rules(rule, is_causal, window, axes, tokens)
    if place is not None:
        # reproducible keys are in leaves by position
        reads = rules.reads or uses_positions or reproducible or tokens.key_lengths is not None
        tokens = place(tokens, reads)
    if tokens.query_positions is not None or tokens.key_positions is not None:
        tokens = tokens.with_positions(query_len, key_len)
    if reproducible and options.get("key_positions") is not None:
        check_leaves(tokens.key_positions)
    if rules is not NO_RULES:
        tokens = rules.marked(tokens, query_len, key_len)
    return tokens, rules


def check_scores(
    bias: object, mask: object, shape: tuple[int, ...]
) -> tuple[Array | None, Array | None]:
    """Returns bias and mask, which broadcast to `shape`, where given, with one batch axis: `[B or 1, N, T, S]`."""
    hint = "an array that is added to the scores is bias="
    return (
        _of_scores("bias", bias, shape, check_floating, "a boolean array is mask="),
        _of_scores("mask", mask, shape, check_boolean, hint),
    )


def check_source(source: object, query: Any, key: Any, value: Any) -> None:
    rows = *broadcast_axes(query, key, value), *query.shape[-3:-1]
    check_shape("source", check_floating("source", source), (*rows, value.shape[-1]))


def check_scale(scale: object) -> Any:
    """Returns `scale` if it is None, a finite number, or a floating array of finite numbers: a scalar or `[N]`."""
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


def _scaled(operands: Operands, scale: float | Array, reproducible: bool) -> tuple[Operands, float]:
    """Multiplies an array `scale` into the query; returns the operands and the number that remains."""
    if isinstance(scale, jax.Array) and reproducible:
        raise NotImplementedError(
            "scale: wanted a number with reproducible=True; scores.Temperature takes an array of one for each "
            f"head, got {received(scale)}"
        )
    scale, dtype = check_scale(scale), lse_dtype(operands.query.dtype)
    if not isinstance(scale, jax.Array):
        if abs(scale) > float(jnp.finfo(dtype).max):
            raise ValueError(f"scale: wanted a number within {dtype}, got {scale}")
        return operands, scale
    if scale.ndim == 1:
        heads = operands.query.shape[2]
        if scale.shape != (heads,):
            raise ValueError(f"scale: wanted a scalar or shape ({heads},), got {received(scale)}")
        scale = scale[None, None, :, None]
    operands = dequantized(operands)
    query, tokens = operands.query, operands.tokens
    # An array may be traced and differentiated (an inverse temperature). It multiplies the query,
    # in the dtype of the scores, so that it rounds no more than a number would. Its derivative sums over all
    # queries, so the numbers of absent queries are zeroed here.
    if tokens.query_positions is not None or tokens.query_lengths is not None:
        positions: Any = operands.positioned().tokens.query_positions
        query = jnp.where(positions[:, :, None, None] >= 0, query, 0)
    query = query.astype(dtype) * scale.astype(dtype)
    return operands._replace(query=query, key=operands.key.astype(dtype)), 1.0


def _of_scores(
    name: str,
    x: object,
    shape: tuple[int, ...],
    check: Callable[[str, object], Any],
    hint: str,
) -> Any:
    """An array that broadcasts to this shape, with one batch axis. As in jax.nn, leading axes may be left out."""
    if x is None:
        return None
    try:
        array = check(name, x)
    except TypeError as wrong:
        raise TypeError(f"{wrong}; {hint}") from None
    try:
        check_broadcastable(name, array, shape, leading=False)
    except ValueError as wrong:
        # Other libraries accept shapes without these axes. Two axes may have one length, so users have to write them.
        batch, (query_len, key_len) = shape[0], shape[-2:]
        if broadcasts(array.shape, (batch, key_len)):
            hint = f"(batch, keys) write {name}[:, None, None, :]"
        elif broadcasts(array.shape, (batch, query_len, key_len)):
            hint = f"(batch, queries, keys) write {name}[:, None]"
        else:
            raise
        raise ValueError(f"{wrong}; for {hint}") from None
    array = jnp.asarray(array)
    missing = len(shape) - array.ndim
    return flattened(array[(None,) * missing] if missing else array, shape[:-3])


# A side of a window: a distance, an array of one, or None for any distance.
Side = int | Array | np.ndarray | None


def _split_window(
    size: object, most: object, rule: AbstractMask | None
) -> tuple[tuple[int | None, int | None], AbstractMask | None]:
    """The sides of a window that are static, with their bound, and the mask joined with those that are arrays."""
    sides, bounds = (
        check_window(size) or (None, None),
        check_window(most, "max_window", arrays=False),
    )
    arrays = [x if is_array(x) else None for x in sides]
    if arrays != [None, None]:
        traced = TracedWindow(*arrays)
        rule = traced if rule is None else rule & traced
    left, right = (
        least(None if is_array(x) else x, bound)
        for x, bound in zip(sides, bounds or (None, None), strict=True)
    )
    return (left, right), rule


def is_array(x: object) -> bool:
    return isinstance(x, (jax.Array, np.ndarray))


def check_window(
    size: object, name: str = "local_window_size", *, arrays: bool = True
) -> tuple[Any, Any] | None:
    """Returns the window as `(left, right)`, or None; None for a side is any distance.

    `arrays`: whether sides may be integer scalar arrays, or both one array `[2]`.
    """
    if size is None:
        return None
    sides: Any = size
    if isinstance(sides, (int, np.integer)) or (is_array(sides) and sides.ndim == 0):
        sides = sides, sides
    elif is_array(sides) and sides.shape == (2,):
        sides = sides[0], sides[1]
    kinds = (int, np.integer, NoneType, *((jax.Array, np.ndarray) if arrays else ()))
    if not (isinstance(sides, tuple) and len(sides) == 2) or any(
        isinstance(x, bool) or not isinstance(x, kinds) for x in sides
    ):
        wanted = "an int, an integer scalar array or a pair" if arrays else "an int or a pair"
        hint = "" if arrays else "; masks.TracedWindow(left, right) takes arrays"
        raise TypeError(
            f"{name}: wanted {wanted} (left, right) of these, or None for any distance, got {received(size)}{hint}"
        )
    for x in sides:
        if is_array(x):
            check_shape(name, checked_lengths(name, x), ())
        elif x is not None and x < 0:
            raise ValueError(
                f"{name}: wanted sides of at least 0, or None for any distance, got {size}"
            )
    left, right = (x if x is None or is_array(x) else int(x) for x in sides)
    return left, right
