"""The fold of tiles on TPUs; waiting nodes of the tree stay in VMEM."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Ref, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from ..._varying import result_like
from ...fold._programs import Blocks, FoldProgram
from ...fold._tree import is_below
from ..tpu._kernel import LEAST_GRANTED, target_chip
from ._sides import OfPairs, Side, Walk

# Depth of the stack: one node per level of the tree over 2^16 consecutive tiles, or over all positions.
IN_A_ROW, DEPTH = 17, 24


def fold(
    program: FoldProgram, kept: Side, iterated: Side, walk: Walk, pair: OfPairs, *, interpret: bool
) -> list[Array]:
    """Returns the results of a fold program per kept tile and part, `[B, tiles, parts, size, K(, W)]`."""
    # one `pallas_call` with its specs, read top to bottom; index maps take the grid's indices and the prefetched tables
    batch, tiles, parts = walk.first.shape
    like = next(iter(kept.arrays.values()))
    size, heads = like.shape[2:4]
    depth = IN_A_ROW if walk.consecutive else DEPTH
    if walk.consecutive and walk.depth > depth:
        raise NotImplementedError(
            f"reproducible: wanted at most {2 ** (depth - 1)} tiles on a device, got {walk.most}"
        )
    tables = (
        jnp.stack([jnp.int32(x) for x in (tiles, parts, walk.numbers.shape[1])]),
        walk.numbers.reshape(-1),
        walk.first.reshape(-1),
        walk.stop.reshape(-1),
    )

    def of_kept(b: Array, k: Array, t: Array, p: Array, j: Array, *_: Ref) -> tuple[Any, ...]:
        return b, t, k

    def of_iterated(
        b: Array, k: Array, t: Array, p: Array, j: Array, sizes: Ref, _: Ref, first: Ref, stop: Ref
    ) -> tuple[Any, ...]:
        at = (b * sizes[0] + t) * sizes[1] + p
        # steps past the end repeat the last tile, which Mosaic then does not copy again
        return b, jnp.minimum(first[at] + j, jnp.maximum(stop[at] - 1, 0)), k

    def of_result(b: Array, k: Array, t: Array, p: Array, j: Array, *_: Ref) -> tuple[Any, ...]:
        return b, t, p, k, 0, 0

    def specs(side: Side, place: Callable[..., tuple[Any, ...]]) -> tuple[Any, Any]:
        def spec(x: Array) -> pl.BlockSpec:
            return pl.BlockSpec((None, None, None, *x.shape[3:]), lambda *at: (*place(*at), 0, 0))

        def of_ids(x: Array) -> pl.BlockSpec:
            return pl.BlockSpec((None, None, 1, x.shape[-1]), lambda *at: (*place(*at)[:2], 0, 0))

        return jax.tree.map(spec, side.arrays), jax.tree.map(of_ids, side.ids)

    sides = [_as_read(side) for side in (kept, iterated)]
    blocks = [(1, size) if x.width is None else (size, x.width) for x in program.results]
    shape = batch, tiles, parts, heads
    (results,) = pl.pallas_call(
        functools.partial(_kernel, program, pair),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(tables),
            grid=(batch, heads, tiles, parts, walk.most),
            in_specs=[specs(sides[0], of_kept), specs(sides[1], of_iterated)],
            out_specs=([pl.BlockSpec((None, None, None, None, *x), of_result) for x in blocks],),
            scratch_shapes=[
                [pltpu.VMEM((size, n), jnp.float32) for n in program.sizes],
                [pltpu.VMEM((depth, size, n), jnp.float32) for n in program.sizes],
                pltpu.SMEM((depth,), jnp.int32),
                pltpu.SMEM((2,), jnp.int32),
            ],
        ),
        out_shape=(
            [
                result_like(like, (*shape, *block), x.dtype)
                for x, block in zip(program.results, blocks, strict=True)
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",) * 4 + ("arbitrary",),
            vmem_limit_bytes=max(LEAST_GRANTED, target_chip().memory // 2),
        ),
        interpret=interpret,
        name=f"attention_canonical_{program.name}",
    )(*tables, *((x.arrays, x.ids) for x in sides))
    pairs = zip(results, program.results, strict=True)
    return [(x.squeeze(-2) if kind.width is None else x).swapaxes(3, 4) for x, kind in pairs]


def _as_read(side: Side) -> Side:
    """Moves heads before the rows of a tile; numbers and ids become rows `[1, size]`."""
    arrays = {name: x.swapaxes(2, 3) for name, x in side.arrays.items()}
    arrays = {name: x if x.ndim == 5 else x[..., None, :] for name, x in arrays.items()}
    return Side(arrays, tuple(x[:, :, None] for x in side.ids))


def _kernel(
    program: FoldProgram,
    of_pairs: OfPairs,
    sizes: Ref,
    numbers: Ref,
    first: Ref,
    stop: Ref,
    kept: tuple[Blocks, tuple[Ref, ...]],
    iterated: tuple[Blocks, tuple[Ref, ...]],
    results: list[Ref],
    node: list[Ref],
    waiting: list[Ref],
    forks: Ref,
    state: Ref,
) -> None:
    # One grid step: folds the partial of one kept tile and one iterated tile into the tree.
    # `state` holds the number of waiting nodes and the tile number of the last item. `forks` holds, per waiting node,
    # the XOR of the tile numbers on both sides of its end; its highest bit is the node's level.
    # The parameters are the refs that `pl.pallas_call` passes: tables, inputs, results, scratch.
    b, t, p, j = (pl.program_id(axis) for axis in (0, 2, 3, 4))
    at = (b * sizes[0] + t) * sizes[1] + p
    index = first[at] + j

    def raise_node(fork: Array | None) -> None:
        # Merges the node with the waiting nodes below the level of `fork`; with all if it is None.
        def top(count: Array) -> Array:
            return forks[jnp.maximum(count - 1, 0)]

        def is_lower(carry: tuple[Array, Array]) -> Array:
            count, low = carry
            waits = count > 0
            return waits if fork is None else waits & is_below(low, fork)

        def climb(carry: tuple[Array, Array]) -> tuple[Array, Array]:
            count = carry[0] - 1
            left = tuple(x[count] for x in waiting)
            _write(node, program.merge(left, tuple(x[...] for x in node)))
            return count, top(count)

        state[0] = lax.while_loop(is_lower, climb, (state[0], top(state[0])))[0]

    @pl.when(j == 0)
    def _() -> None:
        for ref, x in zip(node, program.identity, strict=True):
            ref[...] = jnp.full(ref.shape, x, ref.dtype)
        state[0] = jnp.int32(0)

    @pl.when(index < stop[at])
    def _() -> None:
        blocks, ids = _loaded(*kept)
        iterated_blocks, iterated_ids = _loaded(*iterated)
        pairs = of_pairs(tuple(x.T for x in ids), iterated_ids)
        item = program.term(blocks, iterated_blocks, pairs)
        number = numbers[b * sizes[2] + index]

        @pl.when(j > 0)
        def _() -> None:
            fork = number ^ state[1]
            raise_node(fork)
            count = state[0]
            for ref, x in zip(waiting, node, strict=True):
                ref[count] = x[...]
            forks[count] = fork
            state[0] = count + 1

        _write(node, item)
        state[1] = number

    @pl.when(j == pl.num_programs(4) - 1)
    def _() -> None:
        raise_node(None)
        blocks, _ = _loaded(*kept)
        output = program.finish(blocks, tuple(x[...] for x in node))
        for ref, x in zip(results, output, strict=True):
            ref[...] = x.astype(ref.dtype)


def _loaded(arrays: Blocks, ids: tuple[Ref, ...]) -> tuple[Blocks, tuple[Array, ...]]:
    """Loads a tile, with zeros for absent tokens, and its ids."""
    loaded = tuple(x[...] for x in ids)
    blocks = {name: x[...] for name, x in arrays.items()}
    if not loaded:
        return blocks, loaded
    present = loaded[0] >= 0

    def kept(x: Array) -> Array:
        return jnp.where(present if x.shape[0] == 1 else present.T, x, jnp.zeros((), x.dtype))

    return {name: kept(x) for name, x in blocks.items()}, loaded


def _write(refs: list[Ref], arrays: tuple[Array, ...]) -> None:
    for ref, x in zip(refs, arrays, strict=True):
        ref[...] = x
