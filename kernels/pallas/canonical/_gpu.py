"""The fold of tiles on NVIDIA's GPUs; waiting nodes of the tree are in global memory, and so in the L2 cache."""

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Ref, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, PyTree

from ..._varying import result_like
from ...fold._programs import Blocks, FoldProgram, Partial
from ...fold._tree import is_below
from ._sides import OfPairs, Side, Walk


class Place(NamedTuple):
    """A block of rows: their index on axis 0 (the tile) and, for arrays with heads, on axis 2."""

    entry: Array
    head: Array | None
    first: Array | int
    size: int

    def of(self, ref: Ref) -> Any:
        rows, *rest = (lax.iota(jnp.int32, size) for size in (self.size, *ref.shape[2:]))
        rows += self.first
        if self.head is not None:
            rest[0] = self.head
        if rest and rest[-1].ndim:
            rows, rest[-1] = rows[:, None], rest[-1][None]
        return ref.at[self.entry, rows, *rest]

    def load(
        self, refs: Iterable[Ref], present: Array | None, fill: Sequence[float] | None = None
    ) -> tuple[Array, ...]:
        """Loads the rows of arrays; zeros or `fill` in absent rows."""
        if present is None:
            return tuple(triton.load(self.of(x)) for x in refs)
        refs = tuple(refs)
        fills = zip(refs, fill or [0] * len(refs), strict=True)
        return tuple(
            triton.load(self.of(x), mask=self._mask(x, present), other=y) for x, y in fills
        )

    def store(
        self, refs: Iterable[Ref], arrays: Iterable[Array], present: Array | None = None
    ) -> None:
        for ref, x in zip(refs, arrays, strict=True):
            mask = None if present is None else self._mask(ref, present)
            triton.store(self.of(ref), x.astype(ref.dtype), mask=mask)

    def _mask(self, ref: Ref, present: Array) -> Array:
        matrix = len(ref.shape) - (self.head is not None) == 3
        return jnp.broadcast_to(present[:, None], (self.size, ref.shape[-1])) if matrix else present


class NodeStack(NamedTuple):
    """The stack of tree nodes that wait for their right neighbours, one stack per GPU program."""

    refs: Sequence[Ref]  # of the arrays of all programs' nodes
    forks: Ref  # per node: XOR of the leaf numbers on both sides of its end; the highest bit is its level
    base: Array  # the first node of this program
    present: Array | None  # which rows are present; None: all
    program: FoldProgram
    interpret: bool

    def below(self, count: Array, fork: Array) -> Array:
        """Returns how many of the `count` waiting nodes stay: those whose level is not below the fork's."""

        def top(count: Array) -> Array:
            return self.forks[self.base + jnp.maximum(count - 1, 0)]

        def is_lower(carry: tuple[Array, Array]) -> Array:
            return (carry[0] > 0) & is_below(carry[1], fork)

        def down(carry: tuple[Array, Array]) -> tuple[Array, Array]:
            return carry[0] - 1, top(carry[0] - 1)

        # The loop carries scalars: JAX 0.11 crashes when it lowers a while loop that carries arrays to Triton. To see
        # whether this is still so, carry `node` here and run tests/cuda/test_canonical_programs.py.
        return lax.while_loop(is_lower, down, (count, top(count)))[0]

    def merged(self, node: Partial, count: Array, left: Array) -> Partial:
        """`node` merged with the waiting nodes from `count` down to `left`."""

        def merge(index: Array, node: Partial) -> Partial:
            place = self._at(count - 1 - index)
            left = place.load(self.refs, self.present, self.program.identity)
            return self.program.merge(left, node)

        return lax.fori_loop(0, count - left, merge, node)

    def push(self, node: Partial, count: Array, fork: Array) -> None:
        self._wait()
        self._at(count).store(self.refs, node, self.present)
        triton.store(self.forks.at[self.base + count], fork)
        self._wait()

    def _wait(self) -> None:
        if not self.interpret:
            triton.debug_barrier()

    def _at(self, count: Array) -> Place:
        return Place(self.base + count, None, 0, self.refs[0].shape[1])


PROGRAMS = 264  # at most; each loops over blocks of kept rows
BLOCKS = {2: 64, 4: 32}  # rows or keys held in registers, by bytes per number
# rows, and partials of the iterated side, held in registers when partials are folded
ROWS_OF_ITEMS, GROUP = 8, 8
WARPS = {"to_keys": 8}  # per program; 4 for the others
STAGES = 3  # pipelined copies to shared memory


def fold(
    program: FoldProgram, kept: Side, iterated: Side, walk: Walk, pair: OfPairs, *, interpret: bool
) -> list[Array]:
    """Returns the results of a fold program per kept tile and part, `[B, tiles, parts, size, K(, W)]`."""
    batch, tiles, parts = walk.first.shape
    like = next(iter(kept.arrays.values()))
    size, heads = like.shape[2:4]
    most = ROWS_OF_ITEMS if program.of_partials else BLOCKS[like.dtype.itemsize]
    block = min(most, size)
    blocks = block, min(most, next(iter(iterated.arrays.values())).shape[2])
    total = batch * tiles * parts * heads * (size // block)
    programs, depth = min(total, PROGRAMS), walk.depth
    sizes = tiles, parts, heads, walk.numbers.shape[1], total, programs, depth, walk.consecutive
    shapes = [(size, heads) if x.width is None else (size, heads, x.width) for x in program.results]
    items = batch * tiles * parts
    types = [
        *(((items, *shape), x.dtype) for x, shape in zip(program.results, shapes, strict=True)),
        *(((programs * depth, block, n), jnp.float32) for n in program.sizes),
        ((programs * depth,), jnp.int32),
    ]
    (result,) = pl.pallas_call(
        functools.partial(_kernel, program, pair, blocks, interpret),
        grid=(programs,),
        out_shape=([result_like(like, *x) for x in types],),
        compiler_params=triton.CompilerParams(
            num_warps=WARPS.get(program.name, 4), num_stages=STAGES
        ),
        interpret=interpret,
        name=f"attention_canonical_{program.name}",
    )(
        jnp.stack([jnp.int32(x) for x in sizes]),
        # padded by one: a tile that meets nothing reads the number after the last, and does not use it
        jnp.pad(walk.numbers.reshape(-1), (0, 1)),
        *(x.reshape(-1) for x in (walk.first, walk.stop)),
        *((_flat(x.arrays), _flat(x.ids)) for x in (kept, iterated)),
    )
    pairs = zip(result, shapes, strict=False)
    return [x.reshape(batch, tiles, parts, *shape) for x, shape in pairs]


def _flat(arrays: PyTree[Array]) -> Any:
    # Merges the first two axes, so that no stride in a kernel depends on the sizes of the call.
    return jax.tree.map(lambda x: lax.collapse(x, 0, 2), arrays)


class _Tiles(NamedTuple):
    """Arrays and ids of one side, loaded into registers one block at a time."""

    arrays: Blocks
    ids: tuple[Ref, ...]
    block: int

    @property
    def blocks(self) -> int:
        return next(iter(self.arrays.values())).shape[1] // self.block

    def load(self, place: Place) -> tuple[Blocks, tuple[Array, ...]]:
        """Loads a block, zeros for absent tokens, and its ids; numbers per token become rows `[1, block]`."""
        ids = tuple(triton.load(place._replace(head=None).of(x)) for x in self.ids)
        arrays = place.load(self.arrays.values(), ids[0] >= 0 if ids else None)
        named = zip(self.arrays, arrays, strict=True)
        return {n: x if x.ndim == 2 else x[None] for n, x in named}, tuple(x[None] for x in ids)


def _kernel(
    program: FoldProgram,
    of_pairs: OfPairs,
    blocks: tuple[int, int],
    interpret: bool,
    sizes: Ref,
    numbers: Ref,
    first: Ref,
    stop: Ref,
    kept: tuple[Blocks, tuple[Ref, ...]],
    iterated: tuple[Blocks, tuple[Ref, ...]],
    refs: list[Ref],
) -> None:
    # Folds the iterated side in tree order, for each kept block of this program.
    # A carry-save fold: `node` is the newest partial, and the stack holds the nodes left of it. Between leaves `i` and
    # `j` lie the levels up to the highest bit of `i ^ j`; nodes below that level are complete and are merged first.
    # The closures share the block that is in registers: Triton has no calls, so what would be a function's argument
    # is a value of this trace. The parameters are the refs that `pl.pallas_call` passes, in its order.
    # `length`: iterated tiles of a batch entry
    tiles, parts, heads, length, total, programs, depth, dense = (sizes[i] for i in range(8))
    results = refs[: len(program.results)]
    *waiting, forks = refs[len(results) :]
    rows, keys = _Tiles(*kept, blocks[0]), _Tiles(*iterated, blocks[1])
    program_id = pl.program_id(0)
    nothing = tuple(
        jnp.full((rows.block, n), x, jnp.float32)
        for n, x in zip(program.sizes, program.identity, strict=True)
    )

    def fold_block(turn: Array, _: Array) -> Array:
        work, block = _divided(program_id + turn * programs, rows.blocks)
        at, head = _divided(work, heads)
        tile, part = _divided(at, parts)
        batch = lax.div(tile, tiles)
        place = Place(tile, head, block * rows.block, rows.block)
        loaded, ids = rows.load(place)
        present = ids[0][0] >= 0 if ids else None
        ids = tuple(x.T for x in ids)
        stack = NodeStack(waiting, forks, program_id * depth, present, program, interpret)
        begin, end = first[at], stop[at]
        start = batch * length

        def one_tile(index: Array) -> tuple[Partial, Array]:
            entry = start + begin + index

            def more(block: Array | int, before: Partial | None) -> Partial:
                place = Place(entry, head, block * keys.block, keys.block)
                key_blocks, key_ids = keys.load(place)
                return program.term(loaded, key_blocks, of_pairs(ids, key_ids), before)

            several = keys.blocks > 1
            item = lax.fori_loop(0, keys.blocks, more, nothing) if several else more(0, None)
            return item, numbers[entry]

        def some_items(index: Array) -> tuple[Partial, Array]:
            # the node over `GROUP` partials of a subtree, or over a single one where numbers have gaps
            number = numbers[start + begin + (1 - dense) * index]
            group = lax.div(number, jnp.int32(GROUP)) + dense * index
            nodes = []
            for slot in range(GROUP):
                entry = begin + jnp.where(dense == 1, group * GROUP + slot - number, index)
                is_here = (dense == 1) | (lax.rem(number, jnp.int32(GROUP)) == slot)
                is_here &= (begin <= entry) & (entry < end)
                mask = jnp.broadcast_to(is_here, (rows.block,))
                mask = mask if present is None else mask & present
                at = place._replace(entry=start + jnp.where(is_here, entry, begin))
                nodes.append(at.load(keys.arrays.values(), mask, program.identity))
            while len(nodes) > 1:
                pairs = zip(nodes[::2], nodes[1::2], strict=True)
                nodes = [program.merge(*map(_as_columns, x)) for x in pairs]
            return nodes[0], jnp.where(dense == 1, group * GROUP, number)

        item_of, count = one_tile, end - begin
        if program.of_partials:
            number = numbers[start + begin]
            low, high = (lax.div(number + x, jnp.int32(GROUP)) for x in (0, end - begin - 1))
            item_of = some_items
            count = jnp.where((dense == 1) & (count > 0), high - low + 1, count)

        def step(index: Array, carry: tuple[Array, Array, Partial]) -> tuple[Array, Array, Partial]:
            count, last, node = carry
            item, number = item_of(index)
            fork = number ^ last

            def merge_pair() -> tuple[Array, Partial]:
                return count, program.merge(node, item)

            def push_node() -> tuple[Array, Partial]:
                left = stack.below(count, fork)
                stack.push(stack.merged(node, count, left), left, fork)
                return left + 1, item

            # the first item, and the right one of two sibling leaves, merge without the stack
            is_pair = (index == 0) | (fork <= 1)
            count, node = lax.cond(is_pair, merge_pair, push_node)
            return count, number, node

        carry = lax.fori_loop(0, count, step, (jnp.int32(0), numbers[start], nothing))
        node = stack.merged(carry[2], carry[0], jnp.int32(0))
        output = (x[0] if x.shape[0] == 1 else x for x in program.finish(loaded, node))
        place._replace(entry=at).store(results, output, present if program.to_partials else None)
        return turn

    turns = lax.div(total - program_id + programs - 1, programs)
    lax.fori_loop(0, turns, fold_block, jnp.int32(0))


def _as_columns(item: Sequence[Array]) -> Partial:
    """Returns the partial with one number per row as a column `[rows, 1]`."""
    return tuple(x if x.ndim == 2 else x[:, None] for x in item)


def _divided(x: Array, size: Array | int) -> tuple[Array, Array]:
    size = jnp.int32(size)
    return lax.div(x, size), lax.rem(x, size)
