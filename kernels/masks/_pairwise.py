"""Splits a mask into numbers of queries, numbers of keys, and the comparison of the two.

Pallas kernels read tiles of numbers, for queries and for keys, and compare them; they cannot index a table by
both. What depends on one token alone (the id of its segment, whether it is before a length) is computed outside
of the kernel, by any of XLA's operations.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn
from jaxtyping import Array, Bool, Int

from .._program import bind, inlined, without_mesh
from .._varying import vary_together
from ._structure import MaskStructure

# Each number is an array in memory, of which a tile is read with each tile of queries or keys.
MOST_NUMBERS = 16
# The operations that kernels apply to tiles of pairs, and those that do not change arrays of one element.
_ELEMENTWISE = frozenset(
    "and or xor not eq ne lt le gt ge add sub mul neg abs sign max min clamp div rem shift_left "
    "shift_right_arithmetic shift_right_logical".split()
)
_SAME = frozenset(
    "broadcast_in_dim reshape squeeze expand_dims transpose copy copy_p pcast pvary".split()
)
_QUERY, _KEY = 1, 2  # flags: whether a value depends on the query, on the key


class Features(NamedTuple):
    """The int32 numbers of queries and of keys that a kernel compares, in addition to positions.

    Attributes:
        queries: each `[B, T]` or `[1, T]`.
        keys: each `[B, S]` or `[1, S]`.
    """

    queries: tuple[Int[Array, "b T"], ...] = ()
    keys: tuple[Int[Array, "c S"], ...] = ()


class _Step(NamedTuple):
    equation: JaxprEqn
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class Pairwise:
    """A mask as a kernel computes it: numbers of tokens, and operations on tiles of pairs; static.

    It evaluates the jaxpr of `visible` for one pair, so that all operations on pairs are elementwise.

    Attributes:
        problem: why no kernel computes it; None if one does.
        of_queries: how many numbers of each query it compares.
        of_keys: how many numbers of each key.
    """

    def __init__(self, structure: MaskStructure, arrays: Sequence[jax.ShapeDtypeStruct]):
        def one_pair(query: Array, key: Array, arrays: Sequence[Array]) -> Array:
            return structure.bind(arrays).visible(query, key)

        one = jax.ShapeDtypeStruct((1, 1), jnp.int32)
        program = jax.make_jaxpr(one_pair)(one, one, tuple(arrays))
        self._types: list[Any] = []
        self._sides: list[int] = []
        self._known: dict[int, Any] = {}
        self._steps: list[_Step] = []
        sides = [_QUERY, _KEY] + [0] * len(arrays)
        inputs = [
            self._slot(x.aval, side) for x, side in zip(program.jaxpr.invars, sides, strict=True)
        ]
        self._query, self._key, *self._arrays = inputs
        constant = self._constant
        (self._result,) = inlined(program, inputs, constant, lambda x: constant(x.val), self._add)
        self._of_pairs, needed = self._live([self._result], pairs=True)
        numbers = sorted(needed - {self._query, self._key} - self._known.keys())
        self._numbers = tuple(
            tuple(x for x in numbers if (self._sides[x] == _KEY) == of_keys) for of_keys in (0, 1)
        )
        self.of_queries, self.of_keys = map(len, self._numbers)
        self.problem = self._problem()

    def features(
        self, arrays: Sequence[Array], queries: Int[Array, "b T"], keys: Int[Array, "c S"]
    ) -> Features:
        """The numbers of queries and keys from their positions, and the arrays of the mask.

        Arrays have a first axis of the batch, of 1 or `B`. Numbers of absent tokens mean nothing.
        """
        return Features(
            self._evaluated(self._query, self._numbers[0], arrays, queries),
            self._evaluated(self._key, self._numbers[1], arrays, keys),
        )

    def visible(
        self,
        query: Int[Array, "..."],
        key: Int[Array, "..."],
        of_query: Sequence[Array],
        of_key: Sequence[Array],
    ) -> Bool[Array, "..."]:
        """Which queries see which keys, by their positions and numbers; all of them broadcast."""
        values: dict[int, Any] = {self._query: query, self._key: key}
        for slots, numbers in zip(self._numbers, (of_query, of_key), strict=True):
            for slot, x in zip(slots, numbers, strict=True):
                values[slot] = x != 0 if self._types[slot].dtype == jnp.bool_ else x

        def read(slot: int) -> Array:
            if slot in values:
                return values[slot]
            type_ = self._types[slot]
            return lax.full((1,) * query.ndim, np.asarray(self._known[slot]).item(), type_.dtype)

        for equation, inputs, outputs in self._of_pairs:
            values[outputs[0]] = _on_tiles(equation, [read(x) for x in inputs])
        return (query >= 0) & (key >= 0) & read(self._result)

    def _slot(self, type_: Any, side: int) -> int:
        self._types.append(type_)
        self._sides.append(side)
        return len(self._types) - 1

    def _constant(self, value: Any) -> int:
        slot = self._slot(jax.typeof(value), 0)
        self._known[slot] = value if isinstance(value, jax.Array) else np.asarray(value)
        return slot

    def _add(self, equation: JaxprEqn, inputs: tuple[int, ...]) -> list[int]:
        side = functools.reduce(int.__or__, (self._sides[x] for x in inputs), 0)
        outputs = [self._slot(x.aval, side) for x in equation.outvars]
        if all(x in self._known for x in inputs):
            # fold constants, which tiles would otherwise read from memory
            with jax.ensure_compile_time_eval():
                values = bind(equation.primitive, equation.params, [self._known[x] for x in inputs])
            # as NumPy arrays: JAX's would be on the current mesh, and the mask may be used on another
            constants = (
                x if jnp.issubdtype(x.dtype, jax.dtypes.extended) else np.asarray(x) for x in values
            )
            self._known.update(zip(outputs, constants, strict=True))
        else:
            self._steps.append(_Step(equation, inputs, tuple(outputs)))
        return outputs

    def _live(self, results: Sequence[int], *, pairs: bool) -> tuple[list[_Step], set[int]]:
        """The steps that compute `results`, of pairs or of single tokens, and the inputs of these steps."""
        needed, steps = set(results), []
        for step in reversed(self._steps):
            of_pairs = self._sides[step.outputs[0]] == _QUERY | _KEY if step.outputs else False
            if of_pairs == pairs and needed & set(step.outputs):
                needed = needed - set(step.outputs) | set(step.inputs)
                steps.append(step)
        return steps[::-1], needed

    def _problem(self) -> str | None:
        def of_both(x: int) -> bool:
            return self._sides[x] == _QUERY | _KEY

        expected = "mask: wanted a mask that compares numbers of a query with numbers of a key, got"
        for equation, inputs, outputs in self._of_pairs:
            name = equation.primitive.name
            many_cases = name == "select_n" and len(inputs) > 3
            if many_cases or name not in _ELEMENTWISE | _SAME | {
                "select_n",
                "convert_element_type",
            }:
                return f"{expected} the operation {name} of both"
            for x in (*inputs, *outputs):
                if self._types[x].dtype not in (jnp.bool_, jnp.int32):
                    return f"{expected} {self._types[x].dtype}" + " of both" * of_both(x)
        numbers = [*self._of_pairs, _Step(None, self._numbers[0] + self._numbers[1], ())]  # pyright: ignore[reportArgumentType]
        for _, inputs, outputs in numbers:
            for x in (*inputs, *outputs):
                if self._types[x].size != 1:
                    shape = ",".join(map(str, self._types[x].shape))
                    return f"{expected} {self._types[x].dtype}[{shape}] in place of one number"
        most = max(self.of_queries, self.of_keys)
        if most > MOST_NUMBERS:
            return f"mask: wanted a mask that compares at most {MOST_NUMBERS} numbers, got {most}"
        return None

    def _evaluated(
        self,
        token: int,
        numbers: tuple[int, ...],
        arrays: Sequence[Array],
        positions: Int[Array, "b L"],
    ) -> tuple[Array, ...]:
        steps, _ = self._live(numbers, pairs=False)

        def one_token(position: Array, arrays: Sequence[Array]) -> tuple[Array, ...]:
            values = self._known | {token: position.reshape(1, 1)}
            values |= dict(zip(self._arrays, arrays, strict=True))
            for equation, inputs, outputs in steps:
                operands = vary_together([values[x] for x in inputs])
                operands = bind(equation.primitive, equation.params, operands)
                values |= dict(zip(outputs, operands, strict=True))
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
    if (
        name == "sign"
    ):  # Mosaic does not lower it ahead of time; see TARGET in kernels/pallas/tpu/_layout.py
        (x,) = values
        return (x > 0).astype(x.dtype) - (x < 0).astype(x.dtype)
    shape = jnp.broadcast_shapes(*(x.shape for x in values))
    values = [jnp.broadcast_to(x, shape) for x in values]
    if name == "select_n" and values[1].dtype == jnp.bool_:
        # compilers of kernels only select numbers
        condition, if_false, if_true = values
        return (condition & if_true) | (~condition & if_false)
    return bind(equation.primitive, equation.params, values)[0]
