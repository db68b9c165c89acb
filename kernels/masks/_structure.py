"""The static structure of a mask, and its split into numbers of tokens and a comparison.

Pallas kernels read tiles of numbers, for queries and for keys, and compare them; they cannot index a table by
both. What depends on one token alone (the id of its segment, whether it is before a length) is computed outside
of the kernel, by any of XLA's operations.
"""

import functools
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn
from jaxtyping import Array, Bool, Int

from .._varying import vary_together
from ..program._jaxpr import (
    ProgramValue,
    bind,
    bind_in_kernel,
    inputs_of,
    needed,
    operations_of,
    run,
    value_of,
    without_mesh,
)
from ._abstract import FAR, AbstractMask, And, parts
from ._ready import WINDOWS, All, Causal, Window, sides
from ._visibility import BlockTable


class MaskStructure:
    """A mask without its arrays; hashable. Masks of equal structure have the same object.

    Attributes:
        classes: the classes of the mask and of the masks that it joins.
        constrains: whether it compares positions.
        window: how far a query sees before and after its own position at most; `FAR` where nothing bounds it.
        is_window: whether the mask hides nothing else than keys outside of the window.
        block: the smallest block of its block tables; None without a table.
    """

    def __init__(self, tree: Any):
        self._tree = tree
        mask = jax.tree.unflatten(tree, [None] * tree.num_leaves)
        self.classes = frozenset(type(x) for x in parts(mask))
        self.constrains = not isinstance(mask, All)
        self.window = _window(mask)
        self.is_window = isinstance(mask, WINDOWS)
        blocks = (x.block for x in parts(mask) if isinstance(x, BlockTable))
        self.block = min(blocks, default=None)

    def bind(self, arrays: Sequence[Array] = ()) -> AbstractMask:
        """The mask with its arrays, in the order of its leaves."""
        return jax.tree.unflatten(self._tree, arrays)

    def __repr__(self) -> str:
        return f"MaskStructure({self._tree})"


# A structure lives as long as a program that holds it.
_KNOWN: "weakref.WeakValueDictionary[Any, MaskStructure]" = weakref.WeakValueDictionary()


def structure_of(mask: AbstractMask) -> MaskStructure:
    tree = jax.tree.structure(mask)
    structure = _KNOWN.get(tree)
    return _KNOWN.setdefault(tree, MaskStructure(tree)) if structure is None else structure


@functools.lru_cache(maxsize=256)
def window_structure(left: int | None = None, right: int | None = None) -> MaskStructure:
    return structure_of(window_mask(left, right))


def window_mask(left: int | None, right: int | None) -> AbstractMask:
    """The mask of `left` keys before and `right` after each query; None: all."""
    if left is None and right is None:
        return All()
    return Causal() if left is None and right == 0 else Window(left, right)


def _window(mask: AbstractMask) -> tuple[int, int]:
    if isinstance(mask, And):
        return tuple(map(min, _window(mask.first), _window(mask.second)))  # pyright: ignore[reportReturnType]  # two
    if isinstance(mask, Causal):
        return FAR, 0
    if isinstance(mask, Window):
        return sides(mask)
    return FAR, FAR


# Each number is an array in memory, of which a tile is read with each tile of queries or keys.
MOST_NUMBERS = 16
# The operations that kernels apply to tiles of pairs, and those that do not change arrays of one element.
_ELEMENTWISE = frozenset(
    "and or xor not eq ne lt le gt ge add sub mul neg abs sign max min clamp div rem shift_left "
    "shift_right_arithmetic shift_right_logical select_n convert_element_type".split()
)
_SAME = frozenset(
    "broadcast_in_dim reshape squeeze expand_dims transpose copy copy_p pcast pvary".split()
)
_BOTH = frozenset(("query", "key"))


class Features(NamedTuple):
    """The int32 numbers of queries and of keys that a kernel compares, in addition to positions."""

    queries: tuple[Int[Array, "b T"], ...] = ()
    keys: tuple[Int[Array, "c S"], ...] = ()


class Pairwise:
    """A mask as a kernel computes it: numbers of tokens, and operations on tiles of pairs; static.

    It evaluates the jaxpr of `visible` for one pair, so that all operations on pairs are elementwise.

    Attributes:
        problem: why no kernel computes it; None if one does.
        of_queries: the number of numbers of each query that it compares.
        of_keys: the number of numbers of each key that it compares.
    """

    def __init__(self, structure: MaskStructure, arrays: Sequence[jax.ShapeDtypeStruct]):
        def one_pair(query: Array, key: Array, *arrays: Array) -> Array:
            return structure.bind(arrays).visible(query, key)

        one = jax.ShapeDtypeStruct((1, 1), jnp.int32)
        program = jax.make_jaxpr(one_pair)(one, one, *arrays)
        inputs = inputs_of(program, "query", "key")
        self._query, self._key, *self._arrays = inputs
        # tiles would read from memory what is not folded
        operations, (self._result,) = operations_of(program, inputs)
        operations = [x for x in operations if not x.is_known]
        self._of_tokens = [x for x in operations if x.reads != _BOTH]
        of_pairs = [x for x in operations if x.reads == _BOTH]
        self._of_pairs, read = needed(of_pairs, [self._result])
        numbers = [*self._arrays, *(y for x in self._of_tokens for y in x.outputs)]
        numbers = [x for x in numbers if x in read]
        self._of_query = [x for x in numbers if "key" not in x.reads]
        self._of_key = [x for x in numbers if "key" in x.reads]
        self.of_queries, self.of_keys = len(self._of_query), len(self._of_key)
        self.problem = self._problem()

    def features(
        self, arrays: Sequence[Array], queries: Int[Array, "b T"], keys: Int[Array, "c S"]
    ) -> Features:
        """The numbers of queries and keys from their positions, and the arrays of the mask.

        Arrays have a first axis of the batch, of 1 or `B`. Numbers of absent tokens mean nothing.
        """
        return Features(
            self._evaluated(self._query, self._of_query, arrays, queries),
            self._evaluated(self._key, self._of_key, arrays, keys),
        )

    def visible(
        self,
        query: Int[Array, "..."],
        key: Int[Array, "..."],
        of_query: Sequence[Array],
        of_key: Sequence[Array],
    ) -> Bool[Array, "..."]:
        """Whether queries see keys, by their positions and numbers; all of them broadcast."""
        values: dict[ProgramValue, Any] = {self._query: query, self._key: key}
        numbers = zip((*self._of_query, *self._of_key), (*of_query, *of_key), strict=True)
        values |= {x: y != 0 if x.dtype == jnp.bool_ else y for x, y in numbers}

        def tile(x: Any) -> Array:
            is_constant = isinstance(x, np.ndarray)
            return lax.full((1,) * query.ndim, x.item(), x.dtype) if is_constant else x

        def on_tiles(equation: JaxprEqn, inputs: list[Any]) -> list[Array]:
            return [_on_tiles(equation, list(map(tile, inputs)))]

        run(self._of_pairs, values, on_tiles)
        return (query >= 0) & (key >= 0) & tile(value_of(values, self._result))

    def _problem(self) -> str | None:
        expected = "mask: wanted a mask that compares numbers of a query with numbers of a key, got"
        for x in self._of_pairs:
            many_cases = x.name == "select_n" and len(x.inputs) > 3
            if many_cases or x.name not in _ELEMENTWISE | _SAME:
                return f"{expected} the operation {x.name} of both"
            for y in (*x.inputs, *x.outputs):
                if y.dtype not in (jnp.bool_, jnp.int32):
                    return f"{expected} {y.dtype}" + " of both" * (y.reads == _BOTH)
        of_pairs = [y for x in self._of_pairs for y in (*x.inputs, *x.outputs)]
        for x in (*of_pairs, *self._of_query, *self._of_key):
            if x.size != 1:
                shape = ",".join(map(str, x.shape))
                return f"{expected} {x.dtype}[{shape}] in place of one number"
        most = max(self.of_queries, self.of_keys)
        if most > MOST_NUMBERS:
            return f"mask: wanted a mask that compares at most {MOST_NUMBERS} numbers, got {most}"
        return None

    def _evaluated(
        self,
        token: ProgramValue,
        numbers: list[ProgramValue],
        arrays: Sequence[Array],
        positions: Int[Array, "b L"],
    ) -> tuple[Array, ...]:
        operations, _ = needed(self._of_tokens, numbers)

        def one_token(position: Array, arrays: Sequence[Array]) -> tuple[Array, ...]:
            values: dict[ProgramValue, Any] = {token: position.reshape(1, 1)}
            values |= zip(self._arrays, arrays, strict=True)
            run(operations, values, lambda equation, x: bind(equation, vary_together(x)))
            return tuple(values[x].reshape(()).astype(jnp.int32) for x in numbers)

        if not numbers:
            return ()
        batched = positions, tuple(arrays)
        one_batch = all(x.shape[0] == 1 for x in jax.tree.leaves(batched))
        axes = jax.tree.map(lambda x: None if x.shape[0] == 1 else 0, batched)
        batched = jax.tree.map(lambda x: x[0] if x.shape[0] == 1 else x, batched)
        # numbers that do not depend on the position are repeated
        one_row = jax.vmap(one_token, in_axes=(0, None))
        if one_batch:
            return tuple(x[None] for x in one_row(*batched))
        return jax.vmap(one_row, in_axes=axes)(*batched)


@functools.lru_cache(maxsize=256)
def _pairwise(structure: MaskStructure, types: tuple[tuple[Any, Any], ...]) -> Pairwise:
    with without_mesh():
        return Pairwise(structure, [jax.ShapeDtypeStruct(*x) for x in types])


def pairwise(structure: MaskStructure, arrays: Sequence[Array | jax.ShapeDtypeStruct]) -> Pairwise:
    """The mask as kernels compute it, cached by structure and types; arrays have a batch axis."""
    return _pairwise(structure, tuple((x.shape[1:], jnp.dtype(x.dtype)) for x in arrays))


def _on_tiles(equation: JaxprEqn, values: Sequence[Array]) -> Array:
    name = equation.primitive.name
    if name in _SAME:
        return values[0]
    if name == "convert_element_type":
        new = equation.params["new_dtype"]
        return values[0] != 0 if new == jnp.bool_ else values[0].astype(new)
    shape = jnp.broadcast_shapes(*(x.shape for x in values))
    values = [jnp.broadcast_to(x, shape) for x in values]
    if name == "select_n" and values[1].dtype == jnp.bool_:
        # compilers of kernels only select numbers
        condition, if_false, if_true = values
        return (condition & if_true) | (~condition & if_false)
    return bind_in_kernel(equation, values)[0]
