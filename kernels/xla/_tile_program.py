"""Evaluates a function on a tile of rows so that the bits of a row do not depend on the size of the tile.

A function is traced, and evaluated primitive by primitive, so that scores and layers are written as they are
elsewhere. The insides of its loops and branches are left as they are.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn
from jaxtyping import Array

from .._varying import vary_together
from ..call._state import of_each, unfused
from ..program._jaxpr import (
    CALLS_WITH_RULES,
    as_array,
    bind,
    evaluate_by,
    interpret,
    without_shardings,
)
from ._loops import row_sum

# XLA:CPU computes these differently in scalar and in vector instructions; the loop that they are fused into decides.
_APPROXIMATED = {
    *("pow", "exp", "exp2", "expm1", "log", "log1p", "logistic", "tanh"),
    *("erf", "erfc", "erf_inv", "sin", "cos", "rsqrt", "cbrt"),
}
# XLA fuses these with sums in some programs only.
_PRODUCTS = "mul", "div", "integer_pow", "square"
_LEAST = 8  # rows of an operand of a matrix product


def computed(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)` of arrays, by the programs below."""
    return evaluate_by(evaluated, function, *args)


def evaluated(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """The results of a jaxpr, with the programs below for its matrix products and sums."""
    options: Any = {"calls": CALLS_WITH_RULES, "constant": as_array}
    return interpret(jaxpr, consts, args, _results, **options)


def _results(eqn: JaxprEqn, args: list[Any]) -> Sequence[Any]:
    name, params = eqn.primitive.name, without_shardings(eqn.params)
    if name == "reshard":  # to the mesh that the function was traced for
        return args
    args = vary_together(args)  # constants of the function do not
    if name == "dot_general" and jnp.issubdtype(args[0].dtype, jnp.inexact):
        a, b = args
        return [_matrix_product(a, b, params)]
    if name == "reduce_sum" and jnp.issubdtype(args[0].dtype, jnp.floating):
        return [_sum(args[0], [int(axis) for axis in params["axes"]])]
    if name in _APPROXIMATED:
        of_arrays = functools.partial(of_each, functools.partial(eqn.primitive.bind, **params))
        return [_alone(of_arrays, *jnp.broadcast_arrays(*args))]
    if name == "div":  # otherwise XLA multiplies by the inverse in some programs
        args = list(lax.optimization_barrier(args))
    result = bind(eqn, args, params)
    if name in _PRODUCTS and jnp.issubdtype(result[0].dtype, jnp.floating):
        return [unfused(result[0])]
    return result


def _matrix_product(a: Array, b: Array, params: dict[str, Any]) -> Array:
    # Computes `lax.dot_general` in a form that XLA:CPU sums in one order for any height. Both operands become rows that
    # contract their last axes, at least `_LEAST` of them. XLA:CPU's library packs the second operand of this form
    # always, and the order depends on its shape alone. In other forms the library packs it only if the first operand
    # has many rows; matrix-vector products are compiled by LLVM.
    (a_over, b_over), (a_batch, b_batch) = params["dimension_numbers"]
    x, y = _rows(a, a_batch, a_over), _rows(b, b_batch, b_over)
    batch = [*range(len(a_batch))]
    pads = [(0, 0)] * len(batch)
    padded = [jnp.pad(z, (*pads, (0, max(_LEAST - z.shape[-2], 0)), (0, 0))) for z in (x, y)]
    result = lax.dot_general(
        *lax.optimization_barrier(tuple(padded)),
        dimension_numbers=(((x.ndim - 1,), (x.ndim - 1,)), (batch, batch)),
        precision=params["precision"],
        preferred_element_type=params["preferred_element_type"],
    )
    result = lax.optimization_barrier(result)[..., : x.shape[-2], : y.shape[-2]]
    return result.reshape(*x.shape[:-2], *_others(a, a_batch, a_over), *_others(b, b_batch, b_over))


def _rows(x: Array, batch: Sequence[int], over: Sequence[int]) -> Array:
    """Transposes an array to `[*batch, rows, over]`."""
    kept = [i for i in range(x.ndim) if i not in (*batch, *over)]
    x = x.transpose(*batch, *kept, *over)
    sizes = x.shape[len(batch) : len(batch) + len(kept)], x.shape[len(batch) + len(kept) :]
    return x.reshape(*x.shape[: len(batch)], *map(math.prod, sizes))


def _others(x: Array, *axes: Sequence[int]) -> list[int]:
    return [size for i, size in enumerate(x.shape) if i not in itertools.chain(*axes)]


def _alone(f: Callable[..., Array], *x: Array) -> Array:
    # Computes `f(*x)` in a branch of an opaque condition, which XLA fuses with nothing outside.
    kind: Any = jax.eval_shape(f, *x)

    def other(*x: Array) -> Array:
        return lax.full_like(x[-1], 0, kind.dtype, kind.shape)

    return lax.cond(lax.optimization_barrier(True), f, other, *x)


def _sum(x: Array, axes: Sequence[int]) -> Array:
    return row_sum(_rows(x, (), axes)).reshape(_others(x, axes))
