"""Loops over blocks of words, and sums over all words with derivatives of any order in both modes.

Arrays of rows have an entry for each token, arrays of words one for each word of the vocabulary. A loop visits the
words in blocks, so that no array of tokens x vocabulary is made, in no derivative.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, PyTree

from energy_attn.kernels.internal import autodiff, mesh_axes, slice_at

# Numbers in one array of a block, words x tokens. XLA keeps some such arrays: on CPUs in a cache, elsewhere in memory.
_MOST = {"cpu": 1 << 20, "other": 1 << 25}
_LEAST = 128  # words in a block: a side of the tiles of matrix products


class Block(NamedTuple):
    """Consecutive words. The last block overlaps the one before it, whose words it has again."""

    words: Any  # the arrays of these words, `[words, ...]`
    number: Int[Array, " words"]  # the number of each word in the vocabulary
    is_new: (
        Bool[Array, " words"] | None
    )  # False for a word of an earlier block; None: no block overlaps
    first: int | Int[Array, ""] = 0  # the place of the first word in the arrays of this device


class BlockSize(NamedTuple):
    """The number of words in a block, in programs for CPUs and for other platforms."""

    cpu: int
    other: int


class WordBlocks(NamedTuple):
    """How words are split: in blocks, and inside a `jax.shard_map` over the devices of mesh axes; static."""

    size: BlockSize
    split: tuple[str, ...] = ()  # the axes that words are sharded over
    gathered: tuple[str, ...] = ()  # those of them over which each block is gathered

    def whole(self, block: Block) -> Block:
        """The block of all devices of the axes `gathered`."""
        if not self.gathered:
            return block
        words, number = jax.tree.map(
            lambda x: lax.all_gather(x, self.gathered, tiled=True), (block.words, block.number)
        )
        is_new = block.is_new
        if is_new is not None:
            is_new = jnp.tile(is_new, len(number) // len(is_new))
        return block._replace(words=words, number=number, is_new=is_new)


# From arrays of rows and a block to sums over its words, and to arrays with an entry for each of its words.
Term = Callable[[Any, Block], tuple[Any, Any]]


def block_size(rows: int, words: int) -> BlockSize:
    """The number of words in a block, so that an array of a block has few numbers."""
    sizes = (
        max(most // max(rows, 1) // _LEAST, 1) * _LEAST for most in (_MOST["cpu"], _MOST["other"])
    )
    return BlockSize(*(min(x, words) for x in sizes))


def over_blocks(
    step: Callable[[Any, Block], Any], carry: PyTree, words: PyTree[Array], blocks: WordBlocks
) -> Any:
    """The last carry of `step(carry, block)` over the blocks of all words."""

    def of_size(size: int) -> Callable[..., Any]:
        return lambda carry, words: _over_blocks(step, carry, words, size, blocks.split)

    cpu, other = blocks.size
    if cpu == other:
        return of_size(cpu)(carry, words)
    return lax.platform_dependent(carry, words, cpu=of_size(cpu), default=of_size(other))


def _over_blocks(
    step: Callable[[Any, Block], Any],
    carry: PyTree,
    words: PyTree[Array],
    size: int,
    split: tuple[str, ...],
) -> Any:
    count = len(jax.tree.leaves(words)[0])
    index = jnp.arange(size, dtype=jnp.int32)
    if split:
        index += lax.axis_index(split) * count
    if count == size:
        return step(carry, Block(words, index, None))

    def one(number: Array, carry: PyTree) -> Any:
        first = jnp.minimum(number * size, count - size)
        is_new = None
        if count % size:
            is_new = jnp.arange(size, dtype=jnp.int32) + first >= number * size
        block = jax.tree.map(lambda x: _slice(x, first, size), words)
        return step(carry, Block(block, first + index, is_new, first))

    return lax.fori_loop(0, -(-count // size), one, carry)


def sums_over_words(
    term: Term, rows: PyTree[Array], words: PyTree[Array], blocks: WordBlocks
) -> Any:
    """The sums over all words of a static, hashable term, differentiable to any order in both modes."""
    args = mesh_axes.vary_together((rows, words))
    return autodiff.function_call(Sums(term, blocks), args)[0]


@dataclasses.dataclass(frozen=True)
class Sums(autodiff.AbstractFunction):
    """From arrays of rows and of words to the sums of a term, and to its arrays with an entry for each word."""

    term: Term
    blocks: WordBlocks

    def apply(self, args: PyTree) -> Any:
        rows, words = args
        like = jax.tree.leaves(args)[0]
        first = jax.tree.map(lambda x: x[:1], words)
        index = jnp.arange(len(jax.tree.leaves(first)[0]), dtype=jnp.int32)
        sums, columns = jax.eval_shape(lambda x: self.term(rows, Block(x, index, None)), first)
        count = len(jax.tree.leaves(words)[0])
        columns = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((count, *x.shape[1:]), x.dtype), columns
        )
        bits = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, _bits(x.dtype)), columns)
        zeros = jax.tree.map(lambda x: lax.full_like(like, 0, x.dtype, x.shape), (sums, bits))

        def step(carry: PyTree, block: Block) -> Any:
            new_sums, new_columns = self.term(rows, block)
            sums, columns = carry
            sums = jax.tree.map(jnp.add, sums, new_sums)
            return sums, jax.tree.map(lambda x, new: _written(x, new, block), columns, new_columns)

        sums, bits = over_blocks(step, zeros, words, self.blocks)
        return sums, jax.tree.map(lambda x, kind: _cast_bits(x, kind.dtype), bits, columns)

    def jvp(self, primals: PyTree, tangents: PyTree) -> tuple[Any, Any]:
        result = autodiff.function_call(self, primals)
        return result, autodiff.linear_call(
            TangentOfSums(self.term, self.blocks), primals, tangents
        )


def _slice(x: Array, first: Array, size: int) -> Array:
    corner = first, *(jnp.zeros_like(first) for _ in x.shape[1:])
    return slice_at(x, corner, (size, *x.shape[1:]))


# XLA:CPU updates 16-bit floats, but not integers, through a float32 copy of the whole array.
def _bits(dtype: jnp.dtype) -> jnp.dtype:
    is_narrow = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize == 2
    return jnp.dtype(jnp.uint16) if is_narrow else dtype


def _cast_bits(x: Array, dtype: jnp.dtype) -> Array:
    return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)


def _written(x: Array, new: Array, block: Block) -> Array:
    new = _cast_bits(new, x.dtype)
    if block.is_new is not None:
        is_new = block.is_new.reshape(-1, *(1,) * (x.ndim - 1))
        new = jnp.where(is_new, new, lax.dynamic_slice_in_dim(x, block.first, len(new)))
    return lax.dynamic_update_slice_in_dim(x, new, block.first, 0)


@dataclasses.dataclass(frozen=True)
class TangentOfSums(autodiff.AbstractLinearMap):
    """The derivative of the sums of a term; `fixed` and `moving` are pairs of arrays of rows and of words."""

    term: Term
    blocks: WordBlocks

    def _of_pairs(self, fixed: PyTree, moving: PyTree) -> tuple[Sums, Any]:
        pairs = tuple(zip(fixed, moving, strict=True))
        return Sums(_TangentTerm(self.term), self.blocks), pairs

    def apply(self, fixed: PyTree, moving: PyTree) -> Any:
        function, args = self._of_pairs(fixed, moving)
        return function.apply(args)

    def plain(self, fixed: PyTree, moving: PyTree) -> Any:
        return autodiff.function_call(*self._of_pairs(fixed, moving))

    def transpose(self, fixed: PyTree, moving: PyTree, cotangent: PyTree) -> Any:
        needed = jax.tree.structure(jax.tree.map(lambda x: 0, moving))
        function = Sums(CotangentTerm(self.term, needed), self.blocks)
        return autodiff.function_call(function, tuple(zip(fixed, cotangent, strict=True)))


@dataclasses.dataclass(frozen=True)
class _TangentTerm:
    """The tangent of a term, from pairs of arrays and of their tangents, which are None where they are zero."""

    term: Term

    def __call__(self, rows: PyTree, block: Block) -> Any:
        (rows, row_tangents), (words, word_tangents) = rows, block.words
        arrays, form = jax.tree.flatten((rows, words))

        def run(*arrays: Array) -> Any:
            rows, words = form.unflatten(arrays)
            return self.term(rows, block._replace(words=words))

        return autodiff.jvp_of_some(run, arrays, form.flatten_up_to((row_tangents, word_tangents)))[
            1
        ]


@dataclasses.dataclass(frozen=True)
class CotangentTerm:
    """The cotangents of arrays of rows and of words, from pairs of those arrays and of cotangents of the sums.

    Cotangents of the sums are None where they are zero.
    """

    term: Term
    needed: Any  # the structure of the arrays whose cotangents are needed, in which others are None

    def __call__(self, rows: PyTree, block: Block) -> Any:
        (rows, of_sums), (words, of_columns) = rows, block.words
        arrays, form = jax.tree.flatten((rows, words))
        is_needed = form.flatten_up_to(self.needed.unflatten([True] * self.needed.num_leaves))

        def run(some: list[Array]) -> list[Any]:
            given = iter(some)
            both = [
                next(given) if needed else x for needed, x in zip(is_needed, arrays, strict=True)
            ]
            rows, words = form.unflatten(both)
            results = self.term(rows, block._replace(words=words))
            tree = jax.tree.structure(results)
            pairs = zip(
                tree.flatten_up_to((of_sums, of_columns)), jax.tree.leaves(results), strict=True
            )
            return [x for cotangent, x in pairs if cotangent is not None]

        backward = jax.vjp(run, [x for needed, x in zip(is_needed, arrays, strict=True) if needed])[
            1
        ]
        (cotangents,) = backward(jax.tree.leaves((of_sums, of_columns)))
        return self.needed.unflatten(cotangents)
