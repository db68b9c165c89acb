"""Applies token-wise functions directly, or in tiles of rows, which makes each row bitwise batch-invariant.

The devices of the current mesh share the tiles; weights are replicated. Gradients of weights are sums over tiles of
tokens, folded by one tree.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext
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
# Bounds of the rows of a tile, which is as small as holds all rows: bits of a row are the same in tiles of these sizes.
_LEAST, _MOST = 8, 128
_TOKENS = 128  # rows of a tile of gradients: consecutive tokens of one sequence


def rows_of(policy: CallPolicy) -> Callable[..., Any]:
    """Returns `rows(f, *arrays)`, for a function of arrays `[#batch, time, ...]` that maps each token separately."""
    return by_rows if policy.row_tiles else apply_directly


def apply_directly(f: Callable[..., Any], *rows: PyTree) -> Any:
    return f(*rows)


def by_rows(f: Callable[..., Any], *rows: PyTree) -> Any:
    """Computes `f(*rows)`, where `f` maps each row of `[#batch, time, ...]` separately, in tiles `[1, size, ...]`."""
    leaves, form = jax.tree.flatten(rows)
    batch, time = np.broadcast_shapes(*(x.shape[:2] for x in leaves))
    if not batch * time:
        return f(*rows)
    leaves = mesh_axes.vary_together([jnp.broadcast_to(x, (batch, *x.shape[1:])) for x in leaves])
    size = min(_MOST, max(_LEAST, 1 << (batch * time - 1).bit_length()))
    axes = _mesh_axes()

    def traced(size: int) -> tuple[ClosedJaxpr, Any]:
        tile = [_in_tiles(x, size)[0] for x in leaves]
        program = jax.make_jaxpr(lambda *x: f(*jax.tree.unflatten(form, x)), return_shape=True)
        # a tile is computed on one device: without a mesh, sharded experts are whole
        alone = jax.sharding.use_abstract_mesh(AbstractMesh((), ())) if axes else nullcontext()
        with alone:
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
                "reproducible: wanted False for gradients under jax.vmap, got True; use the batch axis "
                "instead of vmap"
            )

        return run(saved, cotangents)

    apply.defvjp(forward, backward)
    results = apply([jnp.asarray(x) for x in program.consts], leaves)
    return jax.tree.unflatten(jax.tree.structure(out), results)


def _run(program: ClosedJaxpr) -> Callable[..., list[Array]]:
    """Returns a loop that runs the program for each tile; under `jax.vmap` it has more tiles."""

    @custom_vmap
    def run(consts: list[Array], tiles: list[Array]) -> list[Array]:
        def tile(n: Array) -> list[Array]:
            # two barriers, as rows vary over mesh axes of `jax.shard_map` that weights do not
            weights = lax.optimization_barrier(consts)
            rows = lax.optimization_barrier([x[n] for x in tiles])
            return lax.optimization_barrier(evaluated(program.jaxpr, weights, rows))

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
        results = run(consts, [lax.collapse(x, 0, 2) for x in tiles])
        return [x.reshape(size, -1, *x.shape[1:]) for x in results], [True] * len(results)

    return run


def _in_tiles(x: Array, size: int) -> Array:
    """Reshapes `[B, T, ...]` to `[tiles, 1, size, ...]`, padded with zeros."""
    x = lax.collapse(x, 0, 2)
    x = _padded(x, 0, -len(x) % size)
    return x.reshape(-1, 1, size, *x.shape[1:])


def _from_tiles(x: Array, batch: int, time: int) -> Array:
    x = lax.collapse(x, 0, 3)[: batch * time]
    return x.reshape(batch, time, *x.shape[1:])


def _padded(x: Array, axis: int, count: int) -> Array:
    return jnp.pad(x, [(0, count if i == axis else 0) for i in range(x.ndim)])


def _mesh_axes() -> Axes:
    """The axes of the current mesh, or none inside `jax.shard_map`; raises `NotImplementedError` for explicit axes."""
    mesh = jax.sharding.get_abstract_mesh()
    if AxisType.Explicit in mesh.axis_types:
        raise NotImplementedError(f"reproducible: wanted a mesh of automatic axes, got {mesh}")
    return () if AxisType.Manual in mesh.axis_types else mesh.axis_names


def _device_count(axes: Axes) -> int:
    return math.prod(jax.sharding.get_abstract_mesh().shape[axis] for axis in axes)


def _over_devices(
    run: Callable[[list[Array], Any], Any], axes: Axes, out_specs: PyTree[jax.P]
) -> Callable[..., Any]:
    """Runs `run(weights, tiles)` on each device of `axes`, with all weights and its share of the tiles."""
    # a traced program does not tell which values vary over devices
    in_specs = jax.P(), jax.P(axes)
    return jax.shard_map(run, in_specs=in_specs, out_specs=out_specs, check_vma=False)


class TileAssignment(NamedTuple):
    """The tiles of each device, in units that are whole subtrees, as a sequence is one; static."""

    tiles: np.ndarray  # `[units, most]`, indices of the tiles of all sequences in order; -1: none
    numbers: np.ndarray  # the number of each tile in the tree over all, or -1


def _assigned(batch: int, count: int, devices: int) -> TileAssignment:
    """Assigns `count` tiles of each of `batch` sequences to devices."""
    places = 1 << (count - 1).bit_length()
    numbers = (np.arange(batch)[:, None] * places + np.arange(count)).reshape(-1)
    size = 1 << (batch * places - 1).bit_length()
    while -(-batch * places // size) < devices and size > 1:
        size //= 2
    units = -(-batch * places // size)
    units += -units % devices
    of_units = [np.flatnonzero(numbers // size == unit) for unit in range(units)]
    # at least two: a single tile has a static index, and XLA fuses reads of it with other operations
    most = max(2, *map(len, of_units))
    tiles = np.stack([np.pad(x, (0, most - len(x)), constant_values=-1) for x in of_units])
    return TileAssignment(tiles, np.where(tiles < 0, -1, numbers[tiles]).astype(np.int32))


# One long function: the derivative's program, its loop and the order of its results all depend on `kinds`.
def _gradients(
    program: ClosedJaxpr,
    consts: list[Array],
    rows: list[Array],
    cotangents: list[Array],
    axes: Axes,
) -> tuple[list[Array | None], list[Array | None]]:
    """Returns a program's gradients in its weights and its rows; None for arrays without one.

    The tiles of a sequence are a whole subtree: the sums over the halves of a batch add up to the sum over it.
    """
    varying = sorted(frozenset().union(*map(mesh_axes.varying_axes, rows)))
    if varying:
        raise NotImplementedError(
            "reproducible: wanted False for gradients inside jax.shard_map, got True and tokens that vary "
            f"over {varying}"
        )
    batch, time = rows[0].shape[:2]
    count = -(-time // _TOKENS)
    assignment = _assigned(batch, count, _device_count(axes))
    kinds = [jnp.issubdtype(x.dtype, jnp.floating) for x in (*consts, *rows)]

    def pulled(*arrays: Array) -> list[Array]:
        inputs, change = arrays[: len(kinds)], arrays[len(kinds) :]

        def f(*primals: Array) -> list[Array]:
            flat = iter(primals)
            values = [next(flat) if k else x for x, k in zip(inputs, kinds, strict=True)]
            return jaxprs.function_of(program.jaxpr)(*values)

        primals = [x for x, kind in zip(inputs, kinds, strict=True) if kind]
        return list(jax.vjp(f, *primals)[1](list(change)))

    tiles = [_in_tiles(_padded(x, 1, -time % _TOKENS), _TOKENS) for x in (*rows, *cotangents)]
    backward = jax.make_jaxpr(pulled)(*consts, *(x[0] for x in tiles))
    weights = sum(kinds[: len(consts)])
    zeros = [jnp.zeros(x.shape, lse_dtype(x.dtype)) for x in backward.out_avals[:weights]]
    depth = assignment.numbers.max().item().bit_length() + 1

    def of_unit(
        consts: list[Array], numbers: Array, tiles: list[Array]
    ) -> tuple[list[Array], list[Array]]:
        """Returns the sum of the weights' gradients, and the rows' gradients of each tile."""

        def one(
            n: Array, carry: tuple[list[Array], canonical_tree.Fold]
        ) -> tuple[list[Array], canonical_tree.Fold]:
            d_rows, fold = carry
            tile = lax.optimization_barrier([x[n] for x in tiles])
            inputs = [*lax.optimization_barrier(consts), *tile]
            results = evaluated(backward.jaxpr, backward.consts, inputs)
            results = lax.optimization_barrier(results)
            d_rows = [
                lax.dynamic_update_index_in_dim(xs, x, n, 0)
                for xs, x in zip(d_rows, results[weights:], strict=True)
            ]
            item = [x.astype(y.dtype) for x, y in zip(results[:weights], zeros, strict=True)]
            return d_rows, canonical_tree.insert(fold, numbers[n], item, _plus)

        avals = backward.out_avals[weights:]
        d_rows = [jnp.zeros((len(numbers), *x.shape), x.dtype) for x in avals]
        live = (numbers >= 0).sum(dtype=jnp.int32)
        begin = d_rows, canonical_tree.start(zeros, depth, numbers[0])
        d_rows, fold = lax.fori_loop(jnp.int32(0), lax.optimization_barrier(live), one, begin)
        return canonical_tree.result(fold, _plus), d_rows

    def of_device(
        consts: list[Array], numbered: tuple[Array, list[Array]]
    ) -> tuple[list[Array], list[Array]]:
        numbers, tiles = numbered
        units = [of_unit(consts, numbers[i], [x[i] for x in tiles]) for i in range(len(numbers))]
        nodes, d_rows = (
            [jnp.stack(x) for x in zip(*y, strict=True)] for y in zip(*units, strict=True)
        )
        if not axes:
            return [x[0] for x in nodes], d_rows
        return _folded_across(nodes, numbers[:, 0], axes), d_rows

    run = _over_devices(of_device, axes, (jax.P(), jax.P(axes))) if axes else of_device
    of_units = [x[assignment.tiles] for x in tiles]  # any tile where absent
    total, d_rows = run(consts, (jnp.asarray(assignment.numbers), of_units))
    order = np.argsort(assignment.tiles.reshape(-1), kind="stable")[-batch * count :]
    d_rows = [_from_tiles(lax.collapse(x, 0, 2)[order], batch, count * _TOKENS) for x in d_rows]
    flat = iter(x.astype(y.dtype) for x, y in zip(total, backward.out_avals, strict=False))
    d_consts = [next(flat) if kind else None for kind in kinds[: len(consts)]]
    flat = iter(x[:, :time] for x in d_rows)
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
        parts = lax.all_to_all(flat, axes, 1, 0, tiled=False)  # [devices, units, part]
        items = parts.reshape(devices * units, -1)
        total = canonical_tree.folded(everyone, items, jnp.zeros_like(items[0]), jnp.add)
        whole = lax.all_gather(total, axes, tiled=True)
        return whole[:size].reshape(shape)

    return [of_part(x) for x in nodes]
