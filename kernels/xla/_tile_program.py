"""The program of a tile of rows, which gives a row the same bits in tiles of all sizes.

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
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from jaxtyping import Array

from .._varying import vary_together
from ..call._state import of_each, unfused
from ._products import row_sum

# calls of a function, by name, and where they have its jaxpr
_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",  # the name before JAX 0.7
    "closed_call": "call_jaxpr",
    "remat2": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}
# XLA:CPU computes these otherwise in scalar than in vector instructions, which loops that it fuses them into decide.
_APPROXIMATED = {
    *("pow", "exp", "exp2", "expm1", "log", "log1p", "logistic", "tanh"),
    *("erf", "erfc", "erf_inv", "sin", "cos", "rsqrt", "cbrt"),
}
# XLA fuses these with sums in some programs only.
_PRODUCTS = "mul", "div", "integer_pow", "square"
_LEAST = 8  # rows of an operand of a matrix product


def computed(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)` of arrays, by the programs below."""
    program, struct = jax.make_jaxpr(function, return_shape=True)(*args)
    found = evaluated(program.jaxpr, program.consts, jax.tree.leaves(args))
    return jax.tree.unflatten(jax.tree.structure(struct), found)


def evaluated(jaxpr: Jaxpr, consts: Sequence[Any], given: Sequence[Any]) -> list[Any]:
    """The results of a jaxpr, with the programs below for its matrix products and sums."""
    return walked(jaxpr, consts, given, _results)


def walked(
    jaxpr: Jaxpr,
    consts: Sequence[Any],
    given: Sequence[Any],
    results: Callable[[JaxprEqn, list[Any]], Sequence[Any]],
) -> list[Any]:
    """The results of a jaxpr by those of each equation, and of those of the functions that it calls."""
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *given), strict=True))

    def read(x: Any) -> Any:
        kind: Any = x.aval
        return jnp.asarray(x.val, kind.dtype) if isinstance(x, Literal) else values[x]

    for eqn in jaxpr.eqns:
        found = _called(eqn, [read(x) for x in eqn.invars], results)
        values.update(zip(eqn.outvars, found, strict=True))
    return [read(x) for x in jaxpr.outvars]


def _called(
    eqn: JaxprEqn, given: list[Any], results: Callable[[JaxprEqn, list[Any]], Sequence[Any]]
) -> Sequence[Any]:
    if eqn.primitive.name == "reshard":  # to a place of the mesh that the function was traced for
        return given
    if eqn.primitive.name not in _CALLS:
        return results(eqn, given)
    inner = eqn.params[_CALLS[eqn.primitive.name]]
    if isinstance(inner, ClosedJaxpr):
        return walked(inner.jaxpr, inner.consts, given, results)
    return walked(inner, (), given, results)


def without_shardings(params: dict[str, Any]) -> dict[str, Any]:
    """The parameters of an equation without those of the mesh that its function was traced for."""
    return {**params, **dict.fromkeys({"sharding", "out_sharding"} & params.keys())}


def _results(eqn: JaxprEqn, given: list[Any]) -> Sequence[Any]:
    name, params = eqn.primitive.name, without_shardings(eqn.params)
    given = vary_together(given)  # constants of the function do not
    if name == "dot_general" and jnp.issubdtype(given[0].dtype, jnp.inexact):
        a, b = given
        return [_matrix_product(a, b, params)]
    if name == "reduce_sum" and jnp.issubdtype(given[0].dtype, jnp.floating):
        return [_sum(given[0], [int(axis) for axis in params["axes"]])]
    if name in _APPROXIMATED:
        of_arrays = functools.partial(of_each, functools.partial(eqn.primitive.bind, **params))
        return [_alone(of_arrays, *jnp.broadcast_arrays(*given))]
    if name == "div":  # or XLA divides by a product with the inverse, here and there
        given = list(lax.optimization_barrier(given))
    found = eqn.primitive.bind(*given, **params)
    if name in _PRODUCTS and jnp.issubdtype(found.dtype, jnp.floating):
        return [unfused(found)]
    return found if eqn.primitive.multiple_results else [found]


def _matrix_product(a: Array, b: Array, params: dict[str, Any]) -> Array:
    """Computes `lax.dot_general` in a form that XLA:CPU sums in one order for any height.

    Both operands become rows that contract their last axes, at least `_LEAST` of them. XLA:CPU's library packs the
    second operand of this form always, and the order depends on its shape alone. In other forms the library packs it
    only if the first operand has many rows; matrix-vector products are compiled by LLVM.
    """
    (a_over, b_over), (a_batch, b_batch) = params["dimension_numbers"]
    x, y = _rows(a, a_batch, a_over), _rows(b, b_batch, b_over)
    batch = [*range(len(a_batch))]
    pads = [(0, 0)] * len(batch)
    padded = [jnp.pad(z, (*pads, (0, max(_LEAST - z.shape[-2], 0)), (0, 0))) for z in (x, y)]
    found = lax.dot_general(
        *lax.optimization_barrier(tuple(padded)),
        dimension_numbers=(((x.ndim - 1,), (x.ndim - 1,)), (batch, batch)),
        precision=params["precision"],
        preferred_element_type=params["preferred_element_type"],
    )
    found = lax.optimization_barrier(found)[..., : x.shape[-2], : y.shape[-2]]
    return found.reshape(*x.shape[:-2], *_others(a, a_batch, a_over), *_others(b, b_batch, b_over))


def _rows(x: Array, batch: Sequence[int], over: Sequence[int]) -> Array:
    """Transposes an array to `[*batch, rows, over]`."""
    kept = [i for i in range(x.ndim) if i not in (*batch, *over)]
    x = x.transpose(*batch, *kept, *over)
    sizes = x.shape[len(batch) : len(batch) + len(kept)], x.shape[len(batch) + len(kept) :]
    return x.reshape(*x.shape[: len(batch)], *map(math.prod, sizes))


def _others(x: Array, *axes: Sequence[int]) -> list[int]:
    """The sizes of the other axes of an array."""
    return [size for i, size in enumerate(x.shape) if i not in itertools.chain(*axes)]


def _alone(f: Callable[..., Array], *x: Array) -> Array:
    """`f(*x)` in a branch, of which XLA fuses nothing with what is outside. It does not know which branch is taken."""
    kind: Any = jax.eval_shape(f, *x)

    def other(*x: Array) -> Array:
        return lax.full_like(x[-1], 0, kind.dtype, kind.shape)

    return lax.cond(lax.optimization_barrier(True), f, other, *x)


def _sum(x: Array, axes: Sequence[int]) -> Array:
    """Computes a sum in an order of this library."""
    return row_sum(_rows(x, (), axes)).reshape(_others(x, axes))
