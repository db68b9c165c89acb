"""Applies functions of rows, the values of tokens, directly or in tiles in which no other row changes a bit.

The devices of the mesh in force share the tiles, and have weights whole. Gradients of weights are sums over tiles of
tokens, folded by one tree.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap
from jax.extend.core import ClosedJaxpr
from jax.sharding import AbstractMesh, AxisType
from jaxtyping import Array, PyTree

from energy_attn.kernels.internal import (
    CallPolicy,
    canonical_tree,
    each,
    evaluated,
    jaxprs,
    lse_dtype,
    mesh_axes,
)

Axes = tuple[str, ...]
# Rows of a tile: as few as hold all rows, within these bounds, as a row has the same bits in tiles of all these sizes.
_LEAST, _MOST = 8, 128
_TOKENS = 128  # of a tile of gradients: of one sequence, from a multiple of it on


def rows_of(policy: CallPolicy) -> Callable[..., Any]:
    """Called as `rows(f, *arrays)`, with a function of arrays `[#batch, time, ...]` that maps each row by itself."""
    return by_rows if policy.row_tiles else apply_directly


def apply_directly(f: Callable[..., Any], *rows: PyTree) -> Any:
    return f(*rows)


def by_rows(f: Callable[..., Any], *rows: PyTree) -> Any:
    """`f(*rows)`, where `f` maps arrays `[#batch, time, ...]` to such arrays row by row: in tiles `[1, size, ...]`."""
    leaves, form = jax.tree.flatten(rows)
    batch, time = np.broadcast_shapes(*(x.shape[:2] for x in leaves))
    if not batch * time:  # no row, no bit
        return f(*rows)
    leaves = mesh_axes.vary_together([jnp.broadcast_to(x, (batch, *x.shape[1:])) for x in leaves])
    size = min(_MOST, max(_LEAST, 1 << (batch * time - 1).bit_length()))
    axes = _mesh_axes()

    def traced(size: int) -> tuple[ClosedJaxpr, Any]:
        tile = [_in_tiles(x, size)[0] for x in leaves]
        program = jax.make_jaxpr(lambda *x: f(*jax.tree.unflatten(form, x)), return_shape=True)
        with _on_one_device(axes):
            return program(*tile)

    program, out = traced(size)
    of_tokens = program if size == _TOKENS else traced(_TOKENS)[0]

    @jax.custom_vjp
    def apply(consts: list[Array], rows: list[Array]) -> list[Array]:
        tiles, run = [_in_tiles(x, size) for x in rows], _run(program)
        if axes and len(tiles[0]) > 1:  # one tile is computed by all devices
            devices = _device_count(axes)
            tiles = [_padded(x, 0, -len(x) % devices) for x in tiles]
            run = _over_devices(run, axes, jax.P(axes))
        elif axes:
            run = _over_devices(run, (), jax.P())
        return [_from_tiles(x, batch, time) for x in run(consts, tiles)]

    def forward(consts: list[Array], rows: list[Array]) -> tuple[list[Array], tuple]:
        return apply(consts, rows), (consts, rows)

    def backward(saved: tuple, cotangents: list[Array]) -> tuple[list, list]:
        @custom_vmap
        def run(saved: tuple, cotangents: list[Array]) -> tuple[list, list]:
            consts, rows = saved
            return _gradients(of_tokens, consts, rows, cotangents, axes)

        @run.def_vmap
        def _(*_: object) -> Any:
            raise NotImplementedError(
                "reproducible: wanted False for gradients of a decoder under jax.vmap, whose sums over what is "
                "mapped have an order of their own, got True; a batch has one"
            )

        return run(saved, cotangents)

    apply.defvjp(forward, backward)
    found = apply([jnp.asarray(x) for x in program.consts], leaves)
    return jax.tree.unflatten(jax.tree.structure(out), found)


def _run(program: ClosedJaxpr) -> Callable[..., list[Array]]:
    """The program of each tile, in a loop. `jax.vmap` gives it more tiles."""

    @custom_vmap
    def run(consts: list[Array], tiles: list[Array]) -> list[Array]:
        def tile(n: Array) -> list[Array]:
            # apart, as weights do not vary over the mesh axes of `jax.shard_map` that rows do
            weights = lax.optimization_barrier(consts)
            given = lax.optimization_barrier([x[n] for x in tiles])
            return lax.optimization_barrier(evaluated(program.jaxpr, weights, given))

        return each(tile, len(tiles[0]), tiles[0], anywhere=True)

    @run.def_vmap
    def _(size: int, mapped: list, consts: list, tiles: list) -> tuple[list[Array], list[bool]]:
        if any(mapped[0]):
            raise NotImplementedError(
                "reproducible: wanted False where jax.vmap maps over weights, got True"
            )
        tiles = [
            x if is_mapped else jnp.broadcast_to(x, (size, *x.shape))
            for x, is_mapped in zip(tiles, mapped[1], strict=True)
        ]
        found = run(consts, [lax.collapse(x, 0, 2) for x in tiles])
        return [x.reshape(size, -1, *x.shape[1:]) for x in found], [True] * len(found)

    return run


def _in_tiles(x: Array, size: int) -> Array:
    """`[B, T, ...]` as `[tiles, 1, size, ...]`, with zeros behind the last row."""
    x = lax.collapse(x, 0, 2)
    x = _padded(x, 0, -len(x) % size)
    return x.reshape(-1, 1, size, *x.shape[1:])


def _from_tiles(x: Array, batch: int, time: int) -> Array:
    x = lax.collapse(x, 0, 3)[: batch * time]
    return x.reshape(batch, time, *x.shape[1:])


def _padded(x: Array, axis: int, count: int) -> Array:
    pads = [(0, 0)] * x.ndim
    pads[axis] = 0, count
    return jnp.pad(x, pads)


def _mesh_axes() -> Axes:
    """The axes of the mesh in force, unless a surrounding `jax.shard_map` has taken them.

    Raises `NotImplementedError` for explicit ones, by whose types arrays of tiles would have to be sharded.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if AxisType.Explicit in mesh.axis_types:
        raise NotImplementedError(
            f"reproducible: wanted a mesh of automatic axes for a decoder, got {mesh}"
        )
    return () if AxisType.Manual in mesh.axis_types else mesh.axis_names


def _on_one_device(axes: Axes) -> AbstractContextManager[None]:
    """A context without the mesh of these axes, to trace a tile: experts that are sharded over one are whole."""
    return jax.sharding.use_abstract_mesh(AbstractMesh((), ())) if axes else nullcontext()


def _device_count(axes: Axes) -> int:
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[axis] for axis in axes)


def _over_devices(
    run: Callable[[list[Array], Any], Any], axes: Axes, out_specs: PyTree[jax.P]
) -> Callable[..., Any]:
    """`run(weights, tiles)` on each device, with the weights whole and its part of the tiles, or all of them."""
    # a traced program says nothing of what varies over devices
    in_specs = jax.P(), jax.P(axes)
    return jax.shard_map(run, in_specs=in_specs, out_specs=out_specs, check_vma=False)


class TileAssignment(NamedTuple):
    """The tiles of each device, in units that are whole subtrees; static.

    Attributes:
        tiles: the index of each tile of a unit, the tiles of a sequence after the sequence before; -1 for none,
            `[units, most]`.
        numbers: the number of each in the tree over all, or -1. A sequence is a whole subtree.
    """

    tiles: np.ndarray
    numbers: np.ndarray


def _assigned(batch: int, count: int, devices: int) -> TileAssignment:
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
    return TileAssignment(tiles, np.where(tiles < 0, -1, numbers[tiles]).astype(np.int32))


def _gradients(
    program: ClosedJaxpr,
    consts: list[Array],
    rows: list[Array],
    cotangents: list[Array],
    axes: Axes,
) -> tuple[list[Array | None], list[Array | None]]:
    """Gradients of the weights and rows of a program of `_TOKENS` rows; None for arrays that have none.

    Tiles of a sequence are a whole subtree, so that the sum over a batch is that of the sums over its halves.
    """
    varying = sorted(frozenset().union(*map(mesh_axes.varying_axes, rows)))
    if varying:
        raise NotImplementedError(
            "reproducible: wanted False for gradients inside jax.shard_map, whose sums over devices have "
            f"an order of their own, got True and tokens that vary over {varying}"
        )
    batch, time = rows[0].shape[:2]
    count = -(-time // _TOKENS)
    share = _assigned(batch, count, _device_count(axes))
    kinds = [jnp.issubdtype(x.dtype, jnp.floating) for x in (*consts, *rows)]

    def pulled(*arrays: Array) -> list[Array]:
        inputs, change = arrays[: len(kinds)], arrays[len(kinds) :]

        def f(*moved: Array) -> list[Array]:
            flat = iter(moved)
            values = [next(flat) if k else x for x, k in zip(inputs, kinds, strict=True)]
            return jaxprs.function_of(program.jaxpr)(*values)

        moved = [x for x, kind in zip(inputs, kinds, strict=True) if kind]
        return list(jax.vjp(f, *moved)[1](list(change)))

    tiles = [_in_tiles(_padded(x, 1, -time % _TOKENS), _TOKENS) for x in (*rows, *cotangents)]
    backward = jax.make_jaxpr(pulled)(*consts, *(x[0] for x in tiles))
    weights = sum(kinds[: len(consts)])
    none = [jnp.zeros(x.shape, lse_dtype(x.dtype)) for x in backward.out_avals[:weights]]
    depth = share.numbers.max().item().bit_length() + 1

    def of_unit(
        consts: list[Array], numbers: Array, tiles: list[Array]
    ) -> tuple[list[Array], list[Array]]:
        """The sum of the weights' gradients, and the rows' gradients of each tile."""

        def one(
            n: Array, carry: tuple[list[Array], canonical_tree.Fold]
        ) -> tuple[list[Array], canonical_tree.Fold]:
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
            return found, canonical_tree.insert(fold, numbers[n], item, _plus)

        kinds = backward.out_avals[weights:]
        found = [jnp.zeros((len(numbers), *x.shape), x.dtype) for x in kinds]
        live = (numbers >= 0).sum(dtype=jnp.int32)
        begin = found, canonical_tree.start(none, depth, numbers[0])
        found, fold = lax.fori_loop(jnp.int32(0), lax.optimization_barrier(live), one, begin)
        return canonical_tree.result(fold, _plus), found

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
        return _folded_across(nodes, numbers[:, 0], axes), found

    run = _over_devices(of_device, axes, (jax.P(), jax.P(axes))) if axes else of_device
    of_units = [x[share.tiles] for x in tiles]  # of absent ones anything
    total, found = run(consts, (jnp.asarray(share.numbers), of_units))
    order = np.argsort(share.tiles.reshape(-1), kind="stable")[-batch * count :]
    found = [_from_tiles(lax.collapse(x, 0, 2)[order], batch, count * _TOKENS) for x in found]
    flat = iter(x.astype(y.dtype) for x, y in zip(total, backward.out_avals, strict=False))
    d_consts = [next(flat) if kind else None for kind in kinds[: len(consts)]]
    flat = iter(x[:, :time] for x in found)
    return d_consts, [next(flat) if kind else None for kind in kinds[len(consts) :]]


def _plus(a: list[Array], b: list[Array]) -> list[Array]:
    return [x + y for x, y in zip(a, b, strict=True)]


def _folded_across(nodes: list[Array], numbers: Array, axes: Axes) -> list[Array]:
    """The sums by one tree of the nodes `[units, ...]` of all devices; nodes of negative number are absent.

    Each device folds a part of every weight: as much is sent and held as by an all-reduce.
    """
    devices = _device_count(axes)
    everyone = lax.all_gather(numbers, axes, tiled=True)

    def of_part(x: Array) -> Array:
        units, shape = len(x), x.shape[1:]
        flat = x.reshape(units, -1)
        size = flat.shape[1]
        flat = _padded(flat, 1, -size % devices).reshape(units, devices, -1)
        mine = lax.all_to_all(flat, axes, 1, 0, tiled=False)  # [devices, units, part]
        items = mine.reshape(devices * units, -1)
        total = canonical_tree.folded(everyone, items, jnp.zeros_like(items[0]), jnp.add)
        whole = lax.all_gather(total, axes, tiled=True)
        return whole[:size].reshape(shape)

    return [of_part(x) for x in nodes]
