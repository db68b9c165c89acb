"""The fold of tiles on NVIDIA's GPUs: the waiting nodes of the tree are in global memory, which the cache holds."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Ref, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, PyTree

from ..._varying import result_like
from ._gpu_memory import Place, Waiting
from ._programs import Blocks, Item, Program
from ._tiles import OfPairs, Side, Walk

PROGRAMS = 264  # at most, each of which folds own blocks in turn
BLOCKS = {2: 64, 4: 32}  # rows or keys that are in registers at once, by the bytes of a number
ROWS_OF_ITEMS, GROUP = 8, 8  # likewise, and how many items
WARPS = {"to_keys": 8}  # of a program, others have 4
STAGES = 3  # of copies to shared memory


def fold(
    program: Program, own: Side, other: Side, walk: Walk, of_pairs: OfPairs, *, interpret: bool
) -> list[Array]:
    """The results of a program for each own tile and part, `[B, tiles, parts, size, K(, W)]`."""
    batch, tiles, parts = walk.first.shape
    like = next(iter(own.arrays.values()))
    size, heads = like.shape[2:4]
    most = ROWS_OF_ITEMS if program.of_items else BLOCKS[like.dtype.itemsize]
    block = min(most, size)
    blocks = block, min(most, next(iter(other.arrays.values())).shape[2])
    total = batch * tiles * parts * heads * (size // block)
    programs, depth = min(total, PROGRAMS), walk.depth
    sizes = tiles, parts, heads, walk.numbers.shape[1], total, programs, depth, walk.consecutive
    shapes = [(size, heads) if x.width is None else (size, heads, x.width) for x in program.results]
    items = batch * tiles * parts
    types = [
        *(((items, *shape), x.dtype) for x, shape in zip(program.results, shapes, strict=True)),
        *(((programs * depth, block, n), jnp.float32) for n in program.widths),
        ((programs * depth,), jnp.int32),
    ]
    (found,) = pl.pallas_call(
        functools.partial(_kernel, program, of_pairs, blocks, interpret),
        grid=(programs,),
        out_shape=([result_like(like, *x) for x in types],),
        compiler_params=triton.CompilerParams(
            num_warps=WARPS.get(program.name, 4), num_stages=STAGES
        ),
        interpret=interpret,
        name=f"attention_canonical_{program.name}",
    )(
        jnp.stack([jnp.int32(x) for x in sizes]),
        # one more is read, and not used, where the last tile meets nothing
        jnp.pad(walk.numbers.reshape(-1), (0, 1)),
        *(x.reshape(-1) for x in (walk.first, walk.stop)),
        *((_flat(x.arrays), _flat(x.ids)) for x in (own, other)),
    )
    pairs = zip(found, shapes, strict=False)
    return [x.reshape(batch, tiles, parts, *shape) for x, shape in pairs]


def _flat(arrays: PyTree[Array]) -> Any:
    """Arrays with their first two axes as one, so that no stride depends on the sizes of a call."""
    return jax.tree.map(lambda x: lax.collapse(x, 0, 2), arrays)


class _Tiles(NamedTuple):
    """The arrays and ids of a side, of which a block at a time is in registers."""

    arrays: Blocks
    ids: tuple[Ref, ...]
    block: int

    @property
    def blocks(self) -> int:
        """Of each tile."""
        return next(iter(self.arrays.values())).shape[1] // self.block

    def load(self, place: Place) -> tuple[Blocks, tuple[Array, ...]]:
        """The arrays of a block, with zeros where there is nothing, and its ids, numbers as rows of two axes."""
        ids = tuple(triton.load(place._replace(head=None).of(x)) for x in self.ids)
        arrays = place.load(self.arrays.values(), ids[0] >= 0 if ids else None)
        found = zip(self.arrays, arrays, strict=True)
        return {n: x if x.ndim == 2 else x[None] for n, x in found}, tuple(x[None] for x in ids)


def _kernel(
    program: Program,
    of_pairs: OfPairs,
    blocks: tuple[int, int],
    interpret: bool,
    sizes: Ref,
    numbers: Ref,
    first: Ref,
    stop: Ref,
    own: tuple[Blocks, tuple[Ref, ...]],
    other: tuple[Blocks, tuple[Ref, ...]],
    refs: list[Ref],
) -> None:
    """The own blocks of a program, one after the other; the tiles of the other side are folded by the tree."""
    tiles, parts, heads, others, total, programs, depth, dense = (sizes[i] for i in range(8))
    results = refs[: len(program.results)]
    *waiting, forks = refs[len(results) :]
    rows, keys = (_Tiles(*side, block) for side, block in zip((own, other), blocks, strict=True))
    this = pl.program_id(0)
    nothing = tuple(
        jnp.full((rows.block, n), x, jnp.float32)
        for n, x in zip(program.widths, program.identity, strict=True)
    )

    def barrier() -> None:
        if not interpret:
            triton.debug_barrier()

    def one(turn: Array, _: Array) -> Array:
        work, block = _divided(this + turn * programs, rows.blocks)
        at, head = _divided(work, heads)
        tile, part = _divided(at, parts)
        batch = lax.div(tile, tiles)
        place = Place(tile, head, block * rows.block, rows.block)
        loaded, ids = rows.load(place)
        there = ids[0][0] >= 0 if ids else None
        ids = tuple(x.T for x in ids)
        stack = Waiting(
            waiting, forks, this * depth, there, program.join, program.identity, barrier
        )
        begin, end = first[at], stop[at]
        start = batch * others

        def one_tile(index: Array) -> tuple[Item, Array]:
            """The item of a tile, block after block."""
            entry = start + begin + index

            def more(block: Array | int, before: Item | None) -> Item:
                place = Place(entry, head, block * keys.block, keys.block)
                others, other_ids = keys.load(place)
                return program.term(loaded, others, of_pairs(ids, other_ids), before)

            several = keys.blocks > 1
            item = lax.fori_loop(0, keys.blocks, more, nothing) if several else more(0, None)
            return item, numbers[entry]

        def some_items(index: Array) -> tuple[Item, Array]:
            """The node over the items of a subtree of `GROUP`, or of one of these where numbers have gaps."""
            number = numbers[start + begin + (1 - dense) * index]
            group = lax.div(number, jnp.int32(GROUP)) + dense * index
            nodes = []
            for slot in range(GROUP):
                entry = begin + jnp.where(dense == 1, group * GROUP + slot - number, index)
                is_here = (dense == 1) | (lax.rem(number, jnp.int32(GROUP)) == slot)
                is_here &= (begin <= entry) & (entry < end)
                mask = jnp.broadcast_to(is_here, (rows.block,))
                mask = mask if there is None else mask & there
                at = place._replace(entry=start + jnp.where(is_here, entry, begin))
                nodes.append(at.load(keys.arrays.values(), mask, program.identity))
            while len(nodes) > 1:
                pairs = zip(nodes[::2], nodes[1::2], strict=True)
                nodes = [program.join(*map(_as_columns, x)) for x in pairs]
            return nodes[0], jnp.where(dense == 1, group * GROUP, number)

        item_of, count = one_tile, end - begin
        if program.of_items:
            number = numbers[start + begin]
            low, high = (lax.div(number + x, jnp.int32(GROUP)) for x in (0, end - begin - 1))
            item_of = some_items
            count = jnp.where((dense == 1) & (count > 0), high - low + 1, count)

        def step(index: Array, carry: tuple[Array, Array, Item]) -> tuple[Array, Array, Item]:
            count, last, node = carry
            item, number = item_of(index)
            fork = number ^ last

            def beside() -> tuple[Array, Item]:
                return count, program.join(node, item)

            def above() -> tuple[Array, Item]:
                left = stack.below(count, fork)
                stack.push(stack.joined(node, count, left), left, fork)
                return left + 1, item

            # two leaves of one node, or the first one, need not wait
            is_beside = (index == 0) | (fork <= 1)
            count, node = lax.cond(is_beside, beside, above)
            return count, number, node

        carry = lax.fori_loop(0, count, step, (jnp.int32(0), numbers[start], nothing))
        node = stack.joined(carry[2], carry[0], jnp.int32(0))
        found = (x[0] if x.shape[0] == 1 else x for x in program.finish(loaded, node))
        place._replace(entry=at).store(results, found, there if program.to_items else None)
        return turn

    turns = lax.div(total - this + programs - 1, programs)
    lax.fori_loop(0, turns, one, jnp.int32(0))


def _as_columns(item: Sequence[Array]) -> Item:
    """An item as its program has it, of which numbers were loaded as such."""
    return tuple(x if x.ndim == 2 else x[:, None] for x in item)


def _divided(x: Array, size: Array | int) -> tuple[Array, Array]:
    size = jnp.int32(size)
    return lax.div(x, size), lax.rem(x, size)
