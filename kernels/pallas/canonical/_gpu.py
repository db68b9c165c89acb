"""The fold of tiles on NVIDIA's GPUs: the waiting nodes of the tree are in global memory, which the cache holds."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Ref, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, PyTree

from .._common import result_like
from ._programs import Blocks, Item, Program, is_below, present
from ._tiles import Seen, Side, Walk

PROGRAMS = 256  # at most, each of which folds own tiles in turn


def fold(
    program: Program, own: Side, other: Side, walk: Walk, seen: Seen, *, interpret: bool
) -> list[Array]:
    """The results of a program for each own tile and part, `[B, tiles, parts, size, K(, W)]`."""
    batch, tiles, parts = walk.first.shape
    like = next(iter(own.arrays.values()))
    size, heads = like.shape[2:4]
    total = batch * tiles * parts * heads
    programs, depth = min(total, PROGRAMS), walk.depth
    sizes = tiles, parts, heads, walk.numbers.shape[1], total, programs
    shapes = [(size, heads) if x.width is None else (size, heads, x.width) for x in program.results]
    scratch = [
        *(((programs * depth, size, n), jnp.float32) for n in program.widths),
        ((programs * depth,), jnp.int32),
    ]
    types = [
        ((total // heads, *shape), x.dtype)
        for x, shape in zip(program.results, shapes, strict=True)
    ] + scratch
    (found,) = pl.pallas_call(
        functools.partial(_kernel, program, seen, interpret),
        grid=(programs,),
        out_shape=([result_like(like, *x) for x in types],),
        compiler_params=triton.CompilerParams(num_warps=max(4, size // 8), num_stages=1),
        interpret=interpret,
        name=f"attention_canonical_{program.name}",
    )(
        jnp.stack([jnp.int32(x) for x in (*sizes, depth)]),
        *(x.reshape(-1) for x in walk[:3]),
        *((_flat(x.arrays), _flat(x.ids)) for x in (own, other)),
    )
    pairs = zip(found, shapes, strict=False)
    return [x.reshape(batch, tiles, parts, *shape) for x, shape in pairs]


def _flat(arrays: PyTree[Array]) -> Any:
    """Arrays with their first two axes as one, so that no stride depends on the sizes of a call."""
    return jax.tree.map(lambda x: lax.collapse(x, 0, 2), arrays)


def _kernel(
    program: Program,
    seen: Seen,
    interpret: bool,
    sizes: Ref,
    numbers: Ref,
    first: Ref,
    stop: Ref,
    own: tuple[Blocks, tuple[Ref, ...]],
    other: tuple[Blocks, tuple[Ref, ...]],
    refs: list[Ref],
) -> None:
    """The own tiles of a program, one after the other.

    `forks` has for each node that waits the bits in which the numbers of the items beside it differ, of which the
    highest is its level in the tree.
    """
    tiles, parts, heads, others, total, programs, depth = (sizes[i] for i in range(7))
    results = refs[: len(program.results)]
    *waiting, forks = refs[len(results) :]
    size = results[0].shape[1]
    this = pl.program_id(0)
    base = this * depth

    def top(count: Array) -> Array:
        return forks[base + jnp.maximum(count - 1, 0)]

    def raised(node: Item, count: Array, fork: Array | None) -> tuple[Array, Item]:
        """The node joined with those that wait at lower levels than that of a fork; with all."""

        def is_lower(carry: tuple[Array, Array, Item]) -> Array:
            count, low, _ = carry
            there = count > 0
            return there if fork is None else there & is_below(low, fork)

        def climb(carry: tuple[Array, Array, Item]) -> tuple[Array, Array, Item]:
            count, node = carry[0] - 1, carry[2]
            left = tuple(triton.load(_block(x, base + count)) for x in waiting)
            return count, top(count), program.join(left, node)

        count, _, node = lax.while_loop(is_lower, climb, (count, top(count), node))
        return count, node

    def one(turn: Array, _: Array) -> Array:
        work = this + turn * programs
        at, head = _divided(work, heads)
        tile, part = _divided(at, parts)
        batch = lax.div(tile, tiles)
        blocks, ids = _loaded(own, tile, head)

        def step(index: Array, carry: tuple[Array, Array, Item]) -> tuple[Array, Array, Item]:
            count, last, node = carry
            place = batch * others + index
            there, other_ids = _loaded(other, place, head)
            pairs = seen(tuple(x.T for x in ids), other_ids)
            item = program.term(blocks, there, pairs)
            number = numbers[place]
            fork = number ^ last
            count, node = raised(node, count, fork)
            # what is written before the first item is never read
            for ref, x in zip(waiting, node, strict=True):
                triton.store(_block(ref, base + count), x)
            triton.store(forks.at[base + count], fork)
            if not interpret:
                triton.debug_barrier()
            return jnp.where(index == begin, 0, count + 1), number, item

        begin, end = first[at], stop[at]
        nothing = tuple(
            jnp.full((size, n), x, jnp.float32)
            for n, x in zip(program.widths, program.identity, strict=True)
        )
        start = jnp.int32(0), numbers[batch * others], nothing
        count, _, node = lax.fori_loop(begin, end, step, start)
        _, node = raised(node, count, None)
        for ref, x in zip(results, program.finish(blocks, node), strict=True):
            x = x.reshape(x.shape[1:]) if x.shape[0] == 1 else x
            triton.store(_block(ref, at, head), x.astype(ref.dtype))
        return turn

    turns = lax.div(total - this + programs - 1, programs)
    lax.fori_loop(0, turns, one, jnp.int32(0))


def _divided(x: Array, size: Array) -> tuple[Array, Array]:
    return lax.div(x, size), lax.rem(x, size)


def _loaded(
    side: tuple[Blocks, tuple[Ref, ...]], tile: Array, head: Array
) -> tuple[Blocks, tuple[Array, ...]]:
    """The arrays of a tile and a head, with zeros where there is nothing, and its ids, numbers as rows of two axes."""
    arrays, refs = side
    found = {name: triton.load(_block(x, tile, head)) for name, x in arrays.items()}
    found = {name: x if x.ndim == 2 else x[None] for name, x in found.items()}
    ids = tuple(triton.load(_block(x, tile))[None] for x in refs)
    return present(found, ids), ids


def _block(ref: Ref, place: Array, head: Array | None = None) -> Any:
    """An entry along the first axis, and of a head along the third, if there is one."""
    rows, *rest = (lax.iota(jnp.int32, size) for size in ref.shape[1:])
    if head is not None:
        rest[0] = head
    if rest and rest[-1].ndim:
        rows, rest[-1] = rows[:, None], rest[-1][None]
    return ref.at[place, rows, *rest]
