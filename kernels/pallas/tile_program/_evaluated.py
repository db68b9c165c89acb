"""Evaluates a jaxpr with deterministic primitives on TPUs and GPUs: each output depends only on its inputs.

Pallas computes matrix products, sums and functions, in tiles of one shape. XLA computes float32 additions and
multiplications, selections and explicit roundings, whose bits do not depend on what it fuses.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.typing import DTypeLike
from jaxtyping import Array

from ...call._state import lse_dtype, unfused
from ...program._jaxpr import CALLS_WITH_RULES, as_array, bind, interpret, without_shardings
from ...xla._loops import rows_of_groups, sums_of_groups

_ROWS_OF_A_GROUP = 64  # in a product of a group's matrix, of which each is read once

# primitives that are exact or only move data
_EXACT = frozenset(
    "abs bitcast_convert_type broadcast_in_dim clamp concatenate copy copy_p cummax cummin dynamic_slice "
    "dynamic_update_slice expand_dims gather iota max min neg optimization_barrier pad reduce_max reduce_min "
    "reshape rev select_n sign slice sort split squeeze stop_gradient top_k transpose ceil floor round".split()
)
# elementwise primitives, correctly rounded
_ROUNDED = frozenset("add add_any sub mul square convert_element_type".split())
# elementwise primitives, with implementation-defined rounding
_APPROXIMATED = frozenset(
    "div integer_pow sqrt rsqrt pow exp exp2 log log1p logistic tanh sin cos".split()
)
_PRODUCTS = "dot_general", "ragged_dot_general"  # of numbers as they are
_SCANNED = 128  # numbers of which a product makes cumulative sums
_OF_TYPES = "pvary", "pcast", "reshard"  # which change no number
_FLOATS = [jnp.dtype(x) for x in ("bfloat16", "float16", "float32")]
_CONTROL = frozenset("cond while scan".split())


class TileArithmetic(NamedTuple):
    """A platform's float32 operations on tiles of one shape; products also take 16-bit numbers."""

    product: Callable[[Array, Array, bool], Array]  # of `[M, K]` and `[K, N]`, or `[N, K]` if set
    sums: Callable[[Array], Array]  # of rows `[M, N]`
    entries: Callable[..., Array]  # a function by its name, of arrays of one shape, entry by entry


def chip_for(platform: str, *, interpret: bool) -> TileArithmetic:
    """Returns the arithmetic of a platform; raises `NotImplementedError` if it has none."""
    if platform == "tpu":
        from . import _tpu as tiles
    elif platform == "cuda":
        from . import _gpu as tiles
    else:
        raise NotImplementedError(
            f"reproducible: wanted a program for CPUs, TPUs or NVIDIA's GPUs, got one for {platform}"
        )
    functions = tiles.product, tiles.sums, tiles.entries
    return TileArithmetic(*(functools.partial(f, interpret=interpret) for f in functions))


def evaluated(
    jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any], platform: str, chip: TileArithmetic
) -> list[Any]:
    """Evaluates a jaxpr; raises `NotImplementedError` for operations whose order XLA chooses."""
    options: Any = {"calls": CALLS_WITH_RULES, "constant": as_array}
    return interpret(jaxpr, consts, args, functools.partial(_results, platform, chip), **options)


def _results(platform: str, chip: TileArithmetic, eqn: JaxprEqn, args: list[Any]) -> Sequence[Any]:
    name, params = eqn.primitive.name, without_shardings(eqn.params)
    if name == "cond" and (branch := _for_platform(params, platform)):
        return evaluated(branch.jaxpr, branch.consts, args[1:], platform, chip)
    if name in _OF_TYPES:
        return args
    kinds: list[Any] = [x.aval for x in eqn.outvars]
    of_floats = any(map(_is_floating, kinds))
    is_taken = any(name in names for names in (_EXACT, _ROUNDED, _APPROXIMATED, _ORDERED))
    if name in _CONTROL or (of_floats and not is_taken):
        raise NotImplementedError(
            f"reproducible: wanted operations whose order is known in a program for {platform}, got {name}"
        )
    kept = not of_floats or name in _EXACT or name == "convert_element_type"
    for x in (*args, *kinds):
        is_known = x.dtype in _FLOATS or (kept and x.dtype == jnp.float64)
        if jnp.issubdtype(x.dtype, jnp.inexact) and not is_known:
            raise NotImplementedError(
                f"reproducible: wanted numbers of bfloat16, float16 or float32 in a program for {platform}, "
                f"got {name} of {x.dtype}"
            )
    if of_floats and name not in _EXACT and all(x.size for x in args):
        kind = kinds[0].dtype
        args = args if name in _PRODUCTS else [_wide(x) for x in args]
        if name == "convert_element_type":
            result = args[0].astype(lse_dtype(kind))
        elif name in _ROUNDED:
            # a product is rounded before it is added to another number
            result = unfused(*bind(eqn, args, params))
        elif name in _APPROXIMATED:
            f = functools.partial(eqn.primitive.bind, **params)
            result = unfused(chip.entries(name, f, *jnp.broadcast_arrays(*args)))
        else:
            result = _ORDERED[name](params, chip, *args)
        return [narrowed(result, kind)]
    return bind(eqn, args, params)


def _for_platform(params: dict[str, Any], platform: str) -> ClosedJaxpr | None:
    """Returns the branch of `jax.lax.platform_dependent` for a platform; None for other conditionals."""
    platforms = params.get("branches_platforms")
    if platforms is None:
        return None
    pairs = zip(params["branches"], platforms, strict=True)
    return next((x for x, names in pairs if names is None or platform in names), None)


def _wide(x: Array) -> Array:
    # rounded, whatever XLA leaves out before
    return _rounded(x.astype(lse_dtype(x.dtype)), x.dtype) if _is_floating(x) else x


def narrowed(x: Array, kind: DTypeLike) -> Array:
    """Rounds float32 to `kind` explicitly: XLA may drop a conversion to 16 bits and back."""
    return _rounded(x, kind).astype(kind)


def _rounded(x: Array, kind: DTypeLike) -> Array:
    kind = jnp.dtype(kind)  # a name is not equal to `jnp.float16`
    if kind == jnp.bfloat16:
        return lax.reduce_precision(x, 8, 7)
    if kind == jnp.float16:
        # the spacing of the numbers around 0.75 is that of the smallest of float16
        small = jnp.copysign(unfused(x + 0.75) - 0.75, x)
        return jnp.where(jnp.abs(x) < 2.0**-14, small, lax.reduce_precision(x, 5, 10))
    return x


def _is_floating(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _dot_general(params: dict[str, Any], chip: TileArithmetic, a: Array, b: Array) -> Array:
    (over_a, over_b), batch = params["dimension_numbers"]
    if any(batch):
        raise NotImplementedError(
            "reproducible: wanted matrix products of rows and weights in a program for TPUs or GPUs, "
            f"got one over batch axes of {a.shape} and {b.shape}"
        )
    free_a, free_b = (
        [i for i in range(x.ndim) if i not in axes] for x, axes in ((a, over_a), (b, over_b))
    )
    shape = [*(a.shape[i] for i in free_a), *(b.shape[i] for i in free_b)]
    depth = math.prod(a.shape[i] for i in over_a)
    a, b = (x if _is_floating(x) else x.astype(jnp.float32) for x in (a, b))
    a = a.transpose(*free_a, *over_a).reshape(-1, depth)
    # no transpose of the weights if the contracted axes are already last
    if is_transposed := list(over_b) == list(range(b.ndim - len(over_b), b.ndim)):
        b = b.reshape(-1, depth)
    else:
        b = b.transpose(*over_b, *free_b).reshape(depth, -1)
    return chip.product(a, b, is_transposed).reshape(shape)


def _ragged_dot_general(
    params: dict[str, Any], chip: TileArithmetic, a: Array, b: Array, sizes: Array
) -> Array:
    """Multiplies rows by the matrix of their group, or sums the outer products of each group."""
    numbers, tile = params["ragged_dot_dimension_numbers"], min(len(a), _ROWS_OF_A_GROUP)
    over, groups = numbers.dot_dimension_numbers[0], list(numbers.rhs_group_dimensions)
    if (a.ndim, b.ndim, groups) == (2, 3, [0]) and over in [((1,), (1,)), ((1,), (2,))]:
        is_transposed = over[1] == (2,)
        return rows_of_groups(lambda x, y: chip.product(x, y, is_transposed), a, b, sizes, tile)
    if (a.ndim, b.ndim, groups, over) == (2, 2, [], ((0,), (0,))):
        return sums_of_groups(lambda x, y: chip.product(x, y, False), a, b, sizes, tile)
    raise NotImplementedError(
        f"reproducible: wanted rows of groups in a program for TPUs or GPUs, got {numbers} of {a.shape} and {b.shape}"
    )


def _reduce_sum(params: dict[str, Any], chip: TileArithmetic, x: Array) -> Array:
    axes = params["axes"]
    kept = [i for i in range(x.ndim) if i not in axes]
    shape = [x.shape[i] for i in kept]
    return chip.sums(x.transpose(*kept, *axes).reshape(math.prod(shape), -1)).reshape(shape)


def _cumsum(params: dict[str, Any], chip: TileArithmetic, x: Array) -> Array:
    axis = params["axis"]
    x = jnp.moveaxis(lax.rev(x, [axis]) if params["reverse"] else x, axis, -1)
    result = jnp.moveaxis(_cumulative(chip, x.reshape(-1, x.shape[-1])).reshape(x.shape), -1, axis)
    return lax.rev(result, [axis]) if params["reverse"] else result


def _cumulative(chip: TileArithmetic, x: Array) -> Array:
    # sums are a product with a triangle of ones: 0 · inf = NaN would reach the sums before the entry
    high, low, no = (
        lax.cummax(y.astype(jnp.int32), axis=1) > 0
        for y in (x == jnp.inf, x == -jnp.inf, jnp.isnan(x))
    )
    result = _cumulative_finite(chip, jnp.where(jnp.isfinite(x), x, 0.0))
    result = jnp.where(high, jnp.inf, jnp.where(low, -jnp.inf, result))
    return jnp.where(no | (high & low), jnp.nan, result)


def _cumulative_finite(chip: TileArithmetic, x: Array) -> Array:
    """Adds the sums within parts to the sums of the parts before."""
    rows, count = x.shape
    parts = jnp.pad(x, ((0, 0), (0, -count % _SCANNED))).reshape(-1, _SCANNED)
    below = jnp.tri(_SCANNED, dtype=jnp.float32)
    result = chip.product(parts, below, True).reshape(rows, -1, _SCANNED)
    if result.shape[1] > 1:
        before = _cumulative_finite(chip, result[:, :-1, -1])
        result += jnp.pad(before, ((0, 0), (1, 0)))[..., None]
    return result.reshape(rows, -1)[:, :count]


def _scatter_add(
    params: dict[str, Any], chip: TileArithmetic, x: Array, indices: Array, updates: Array
) -> Array:
    # Adds updates one by one: XLA adds updates of the same entry in any order.
    del chip
    numbers = params["dimension_numbers"]
    update_axes = [i for i in range(updates.ndim) if i not in numbers.update_window_dims]
    turns = [i for i in range(indices.ndim - 1) if i not in numbers.scatter_indices_batching_dims]
    sizes = [indices.shape[i] for i in turns]

    def one(turn: Array, x: Array) -> Array:
        place, update, index = indices, updates, turn
        for axis, size in zip(reversed(turns), reversed(sizes), strict=True):
            offset, index = lax.rem(index, jnp.int32(size)), lax.div(index, jnp.int32(size))
            place = lax.dynamic_slice_in_dim(place, offset, 1, axis)
            update = lax.dynamic_slice_in_dim(update, offset, 1, update_axes[axis])
        return lax.scatter_add(x, place, update, numbers, unique_indices=True, mode=params["mode"])

    return lax.fori_loop(jnp.int32(0), jnp.int32(math.prod(sizes)), one, x)


_ORDERED: dict[str, Callable[..., Array]] = {
    "dot_general": _dot_general,
    "ragged_dot_general": _ragged_dot_general,
    "reduce_sum": _reduce_sum,
    "cumsum": _cumsum,
    "scatter-add": _scatter_add,
}
