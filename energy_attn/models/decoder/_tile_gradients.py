"""The gradients of a function of rows: those of rows tile by tile, those of weights folded over tiles by one"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jaxtyping import Array

from energy_attn.kernels.internal import (
    Fold,
    evaluated,
    insert,
    lse_dtype,
    result,
    start,
    varying_axes,
)

TOKENS = 128  # of a tile: of one sequence, from a multiple of it on


def gradients(
    program: ClosedJaxpr, consts: list[Array], rows: list[Array], cotangents: list[Array]
) -> tuple[list[Array | None], list[Array | None]]:
    """Those of the weights and rows of a program of `TOKENS` rows; None for arrays that have none.

    Tiles of a sequence are a whole subtree, so that the halves of a batch have the sums of which that of all is one.
    """
    axes = sorted(frozenset().union(*map(varying_axes, rows)))
    if axes:
        raise NotImplementedError(
            "reproducible: wanted False for gradients inside jax.shard_map, whose sums over devices have "
            f"an order of their own, got True and tokens that vary over {axes}"
        )
    batch, time = rows[0].shape[:2]
    count = -(-time // TOKENS)
    bits = (count - 1).bit_length()
    kinds = [_has_gradient(x) for x in (*consts, *rows)]
    given = [_in_tiles(x, count) for x in rows]
    changes = [_in_tiles(x, count) for x in cotangents]

    def pulled(*arrays: Array) -> list[Array]:
        inputs, change = arrays[: len(kinds)], arrays[len(kinds) :]
        moved = [x for x, kind in zip(inputs, kinds, strict=True) if kind]

        def f(*moved: Array) -> list[Array]:
            flat = iter(moved)
            values = [next(flat) if k else x for x, k in zip(inputs, kinds, strict=True)]
            closed = ClosedJaxpr(program.jaxpr, values[: len(consts)])
            return jaxpr_as_fun(closed)(*values[len(consts) :])

        return list(jax.vjp(f, *moved)[1](list(change)))

    tile = [x[0] for x in (*given, *changes)]
    backward = jax.make_jaxpr(pulled)(*consts, *tile)
    weights = sum(kinds[: len(consts)])

    def one(n: Array, carry: tuple[list[Array], Fold]) -> tuple[list[Array], Fold]:
        found, fold = carry
        at = lax.optimization_barrier([x[n] for x in (*given, *changes)])
        inputs = [*lax.optimization_barrier(consts), *at]
        results = evaluated(backward.jaxpr, backward.consts, inputs)
        results = lax.optimization_barrier(results)
        found = [
            lax.dynamic_update_index_in_dim(xs, x, n, 0)
            for xs, x in zip(found, results[weights:], strict=True)
        ]
        item = [x.astype(lse_dtype(x.dtype)) for x in results[:weights]]
        number = (lax.div(n, jnp.int32(count)) << bits) + lax.rem(n, jnp.int32(count))
        return found, insert(fold, number, item, _plus)

    shapes = backward.out_avals
    none = [jnp.zeros(x.shape, lse_dtype(x.dtype)) for x in shapes[:weights]]
    found = [jnp.zeros((batch * count, *x.shape), x.dtype) for x in shapes[weights:]]
    levels = bits + (batch - 1).bit_length() + 1
    begin = found, start(none, levels, jnp.int32(0))
    number = lax.optimization_barrier(jnp.int32(batch * count))
    found, fold = lax.fori_loop(jnp.int32(0), number, one, begin)
    total = result(fold, _plus)
    flat = iter([x.astype(y.dtype) for x, y in zip(total, shapes, strict=False)])
    d_consts = [next(flat) if kind else None for kind in kinds[: len(consts)]]
    flat = iter([_from_tiles(x, batch, time) for x in found])
    return d_consts, [next(flat) if kind else None for kind in kinds[len(consts) :]]


def _plus(a: list[Array], b: list[Array]) -> list[Array]:
    return [x + y for x, y in zip(a, b, strict=True)]


def _has_gradient(x: Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _in_tiles(x: Array, count: int) -> Array:
    """`[B, T, ...]` as `[B * count, 1, TOKENS, ...]`, with zeros behind the last token."""
    pads = [(0, 0)] * x.ndim
    pads[1] = 0, count * TOKENS - x.shape[1]
    return jnp.pad(x, pads).reshape(-1, 1, TOKENS, *x.shape[2:])


def _from_tiles(x: Array, batch: int, time: int) -> Array:
    return x.reshape(batch, -1, *x.shape[3:])[:, :time]
