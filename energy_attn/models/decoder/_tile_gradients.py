"""The gradients of a function of rows: those of rows tile by tile, those of weights folded over tiles by one tree."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
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

from ._over_devices import Axes, device_count, folded_across, over_devices

TOKENS = 128  # of a tile: of one sequence, from a multiple of it on


class Share(NamedTuple):
    """How devices share the tiles of sequences, in units that are whole subtrees; static.

    Attributes:
        tiles: the index of each tile of a unit, those of a sequence after those of the one before; -1 for none,
            `[units, most]`.
        numbers: in the tree over all, likewise. Those of a sequence are a whole subtree.
    """

    tiles: np.ndarray
    numbers: np.ndarray


def shared(batch: int, count: int, devices: int) -> Share:
    """`count` tiles of each of `batch` sequences, among devices."""
    places = 1 << (count - 1).bit_length()
    numbers = (np.arange(batch)[:, None] * places + np.arange(count)).reshape(-1)
    size = 1 << (batch * places - 1).bit_length()
    while -(-batch * places // size) < devices and size > 1:
        size //= 2
    units = -(-batch * places // size)
    units += -units % devices
    here = [np.flatnonzero(numbers // size == unit) for unit in range(units)]
    # two at least: of one XLA knows which, and fuses what it reads of it with what is around
    most = max(2, *map(len, here))
    tiles = np.stack([np.pad(x, (0, most - len(x)), constant_values=-1) for x in here])
    return Share(tiles, np.where(tiles < 0, -1, numbers[tiles]).astype(np.int32))


def gradients(
    program: ClosedJaxpr,
    consts: list[Array],
    rows: list[Array],
    cotangents: list[Array],
    axes: Axes,
) -> tuple[list[Array | None], list[Array | None]]:
    """Those of the weights and rows of a program of `TOKENS` rows; None for arrays that have none.

    Tiles of a sequence are a whole subtree, so that the halves of a batch have the sums of which that of all is one.
    """
    varying = sorted(frozenset().union(*map(varying_axes, rows)))
    if varying:
        raise NotImplementedError(
            "reproducible: wanted False for gradients inside jax.shard_map, whose sums over devices have "
            f"an order of their own, got True and tokens that vary over {varying}"
        )
    batch, time = rows[0].shape[:2]
    count = -(-time // TOKENS)
    share = shared(batch, count, device_count(axes))
    kinds = [_has_gradient(x) for x in (*consts, *rows)]

    def pulled(*arrays: Array) -> list[Array]:
        inputs, change = arrays[: len(kinds)], arrays[len(kinds) :]
        moved = [x for x, kind in zip(inputs, kinds, strict=True) if kind]

        def f(*moved: Array) -> list[Array]:
            flat = iter(moved)
            values = [next(flat) if k else x for x, k in zip(inputs, kinds, strict=True)]
            closed = ClosedJaxpr(program.jaxpr, values[: len(consts)])
            return jaxpr_as_fun(closed)(*values[len(consts) :])

        return list(jax.vjp(f, *moved)[1](list(change)))

    tiles = [_in_tiles(x, count) for x in (*rows, *cotangents)]
    backward = jax.make_jaxpr(pulled)(*consts, *(x[0] for x in tiles))
    weights = sum(kinds[: len(consts)])
    none = [jnp.zeros(x.shape, lse_dtype(x.dtype)) for x in backward.out_avals[:weights]]
    depth = share.numbers.max().item().bit_length() + 1

    def of_unit(
        consts: list[Array], numbers: Array, tiles: list[Array]
    ) -> tuple[list[Array], list[Array]]:
        """The sum of the gradients of weights, and those of the rows of each tile."""

        def one(n: Array, carry: tuple[list[Array], Fold]) -> tuple[list[Array], Fold]:
            found, fold = carry
            at = lax.optimization_barrier([x[n] for x in tiles])
            inputs = [*lax.optimization_barrier(consts), *at]
            results = evaluated(backward.jaxpr, backward.consts, inputs)
            results = lax.optimization_barrier(results)
            found = [
                lax.dynamic_update_index_in_dim(xs, x, n, 0)
                for xs, x in zip(found, results[weights:], strict=True)
            ]
            item = [x.astype(y.dtype) for x, y in zip(results[:weights], none, strict=True)]
            return found, insert(fold, numbers[n], item, _plus)

        kinds = backward.out_avals[weights:]
        found = [jnp.zeros((len(numbers), *x.shape), x.dtype) for x in kinds]
        live = (numbers >= 0).sum(dtype=jnp.int32)
        begin = found, start(none, depth, numbers[0])
        found, fold = lax.fori_loop(jnp.int32(0), lax.optimization_barrier(live), one, begin)
        return result(fold, _plus), found

    def of_device(
        consts: list[Array], given: tuple[Array, list[Array]]
    ) -> tuple[list[Array], list[Array]]:
        numbers, tiles = given
        units = [of_unit(consts, numbers[i], [x[i] for x in tiles]) for i in range(len(numbers))]
        nodes, found = (
            [jnp.stack(x) for x in zip(*y, strict=True)] for y in zip(*units, strict=True)
        )
        if not axes:
            return [x[0] for x in nodes], found
        return folded_across(nodes, numbers[:, 0], axes), found

    run = over_devices(of_device, axes, (jax.P(), jax.P(axes))) if axes else of_device
    of_units = [x[share.tiles] for x in tiles]  # of absent ones anything
    total, found = run(consts, (jnp.asarray(share.numbers), of_units))
    order = np.argsort(share.tiles.reshape(-1), kind="stable")[-batch * count :]
    found = [_from_tiles(lax.collapse(x, 0, 2)[order], batch, time) for x in found]
    flat = iter([x.astype(y.dtype) for x, y in zip(total, backward.out_avals, strict=False)])
    d_consts = [next(flat) if kind else None for kind in kinds[: len(consts)]]
    flat = iter(found)
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
