"""Functions of rows, a row being what a token has: computed together, or in tiles, which no bit of a row depends on."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap
from jax.extend.core import ClosedJaxpr
from jaxtyping import Array, PyTree

from energy_attn.kernels.internal import each, evaluated, vary_together

from ._over_devices import device_count, mesh_axes, on_one_device, over_devices, padded
from ._tile_gradients import TOKENS, gradients

# Rows of a tile: as few as hold all rows, within these bounds, as a row has the same bits in tiles of all these sizes.
_LEAST, _MOST = 8, 128


def together(f: Callable[..., Any], *rows: PyTree) -> Any:
    """`f(*rows)`: the bits of a row may depend on the others."""
    return f(*rows)


def by_rows(f: Callable[..., Any], *rows: PyTree) -> Any:
    """`f(*rows)`, where `f` maps arrays `[#batch, time, ...]` to such arrays row by row: in tiles `[1, size, ...]`.

    Gradients of what `f` closes over are sums over tiles of tokens, folded by one tree. The devices of the mesh in
    force share the tiles, and have weights whole.
    """
    leaves, form = jax.tree.flatten(rows)
    batch, time = np.broadcast_shapes(*(x.shape[:2] for x in leaves))
    if not batch * time:  # no row, no bit
        return f(*rows)
    leaves = vary_together([jnp.broadcast_to(x, (batch, *x.shape[1:])) for x in leaves])
    size = min(_MOST, max(_LEAST, 1 << (batch * time - 1).bit_length()))

    axes = mesh_axes()

    def traced(size: int) -> tuple[ClosedJaxpr, Any]:
        tile = [_in_tiles(x, size)[0] for x in leaves]
        program = jax.make_jaxpr(lambda *x: f(*jax.tree.unflatten(form, x)), return_shape=True)
        with on_one_device(axes):
            return program(*tile)

    program, out = traced(size)
    of_tokens = program if size == TOKENS else traced(TOKENS)[0]

    @jax.custom_vjp
    def apply(consts: list[Array], rows: list[Array]) -> list[Array]:
        tiles, run = [_in_tiles(x, size) for x in rows], _run(program)
        if axes and len(tiles[0]) > 1:  # one tile is computed by all devices
            tiles = [padded(x, device_count(axes)) for x in tiles]
            run = over_devices(run, axes, jax.P(axes))
        elif axes:
            run = over_devices(run, (), jax.P())
        return [_from_tiles(x, batch, time) for x in run(consts, tiles)]

    def forward(consts: list[Array], rows: list[Array]) -> tuple[list[Array], tuple]:
        return apply(consts, rows), (consts, rows)

    def backward(saved: tuple, cotangents: list[Array]) -> tuple[list, list]:
        @custom_vmap
        def run(saved: tuple, cotangents: list[Array]) -> tuple[list, list]:
            consts, rows = saved
            return gradients(of_tokens, consts, rows, cotangents, axes)

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
    x = jnp.pad(x, ((0, -len(x) % size), *[(0, 0)] * (x.ndim - 1)))
    return x.reshape(-1, 1, size, *x.shape[1:])


def _from_tiles(x: Array, batch: int, time: int) -> Array:
    x = lax.collapse(x, 0, 3)[: batch * time]
    return x.reshape(batch, time, *x.shape[1:])
