"""Splits a score into numbers per batch entry and head, tables by position, and elementwise operations.

Numbers and tables are computed outside the kernel, so that the kernel has no gathers.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr
from jaxtyping import Array

from ..program._jaxpr import (
    Operation,
    ProgramValue,
    bind_in_kernel,
    equations,
    inputs_of,
    operations_of,
    reads,
    run,
    value_of,
    without_mesh,
)
from ..scores._abstract import ScoreIndices
from ..scores._structure import ScoreStructure, floating

MOST_ENTRIES = 64  # of a table by position: the backward sums over a tile for each entry
_NAMES: tuple[str, ...] = "raw", "query", "key", "batch", "head"
_INSIDE = frozenset({"raw", "query", "key", "table"})
_POSITIONS = frozenset({"query", "key", "batch", "head"})
_SAME = "reshape", "squeeze", "broadcast_in_dim", "expand_dims"
_TYPES = "float32", "int32", "bool"


class Target(NamedTuple):
    primitives: frozenset[str]
    dtypes: frozenset[str]


class Numbers(NamedTuple):
    """Inputs of a score that depend only on batch entry and head."""

    floats: tuple[Any, ...] = ()
    tables: tuple[Any, ...] = ()  # floating, with a last axis of entries
    fixed: tuple[Any, ...] = ()  # int32, without derivatives


class _Lookup(NamedTuple):
    """A lookup in a table at indices `starts`; the index along `axis` depends on positions."""

    table: ProgramValue
    starts: tuple[ProgramValue, ...]
    axis: int
    fill: bool  # NaN beyond the end; else the nearest entry
    output: ProgramValue

    @property
    def size(self) -> int:
        return self.table.shape[self.axis]

    @property
    def place(self) -> ProgramValue:
        return self.starts[self.axis]


class ScoreProgram:
    """A score as a kernel computes it, elementwise on tiles of one shape."""

    def __init__(self, structure: ScoreStructure, types: tuple[Any, ...]):
        self.name, self.uses_positions = structure.name, structure.uses_positions
        program = _traced(structure, types)
        inputs = inputs_of(program, *_NAMES)
        self._inputs = dict(zip(_NAMES, inputs, strict=False))
        self._arrays = inputs[len(_NAMES) :]
        self._outside: list[Operation] = []
        self._inside: list[Operation] = []
        self._lookups: list[_Lookup] = []
        self._same: dict[ProgramValue, ProgramValue] = {}
        self._joined: dict[ProgramValue, tuple[ProgramValue, ...]] = {}
        operations, (output,) = operations_of(program, inputs, foldable=1)
        for x in operations:
            self._sort(x)
        self._output = self._same.get(output, output)
        used = [y for x in self._inside for y in x.inputs]
        used += [x.place for x in self._lookups] + [self._output]
        numbers = [x for x in dict.fromkeys(used) if not x.reads & _INSIDE]
        self._constants = {
            x: x.known.reshape(())[()] for x in numbers if x.known is not None and x.size == 1
        }
        numbers = [x for x in numbers if x not in self._constants]
        for x in numbers:
            if x.dtype.name not in _TYPES or x.size != 1:
                raise self._declined(
                    f"float32 and int32 numbers for each head, got {x.dtype}{list(x.shape)}"
                )
        self._floats = [x for x in numbers if floating(x)]
        self._fixed = [x for x in numbers if not floating(x)]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Lengths of the tables."""
        return tuple(x.size for x in self._lookups)

    def outside(self, arrays: Sequence[Array], batch: Array, head: Array) -> Numbers:
        """Returns numbers `[B or 1, N or 1]` and tables `[B or 1, N or 1, D]`, for indices `[B]` and `[N]`."""

        def one(batch: Array, head: Array) -> Numbers:
            values: dict[ProgramValue, Any] = dict(zip(self._arrays, arrays, strict=True))
            values |= {self._inputs["batch"]: batch, self._inputs["head"]: head}
            run(self._outside, values, bind_in_kernel)
            floats = tuple(values[x].reshape(()) for x in self._floats)
            fixed = tuple(values[x].reshape(()).astype(jnp.int32) for x in self._fixed)
            return Numbers(floats, tuple(_row(x, values) for x in self._lookups), fixed)

        def unbroadcast(x: Array, reads: frozenset[str]) -> Array:
            x = x if "batch" in reads else x[:1]
            return x if "head" in reads else x[:, :1]

        over_heads = jax.vmap(one, (None, 0))
        numbers = jax.vmap(over_heads, (0, None))(batch, head)
        depends_on = Numbers(
            tuple(x.reads for x in self._floats),
            tuple(reads((x.table, *x.starts)) for x in self._lookups),
            tuple(x.reads for x in self._fixed),
        )
        return Numbers(
            *(tuple(map(unbroadcast, *x)) for x in zip(numbers, depends_on, strict=True))
        )

    def indices(self, places: dict[str, Array], numbers: Numbers) -> list[Array]:
        """Returns the index into each table, given tiles of positions "query" and "key" and of numbers."""
        if not self._lookups:
            return []

        def one(places: dict[str, Array], numbers: Numbers) -> list[Array]:
            values = self._inputs_of(places, numbers)
            run([x for x in self._inside if x.reads <= _POSITIONS], values, bind_in_kernel)
            starts = (value_of(values, x.place) for x in self._lookups)
            return [jnp.broadcast_to(x, ()).astype(jnp.int32) for x in starts]

        indices = jax.vmap(jax.vmap(one))(places, numbers)
        return [
            index if x.fill else jnp.clip(index, 0, x.size - 1)
            for index, x in zip(indices, self._lookups, strict=True)
        ]

    def score(self, raw: Array, places: dict[str, Array], numbers: Numbers) -> Array:
        """Returns the scores of a tile of scaled products; `numbers.tables` holds the entries looked up."""

        def one(raw: Array, places: dict[str, Array], numbers: Numbers) -> Array:
            values = self._inputs_of(places, numbers)
            values[self._inputs["raw"]] = raw
            values |= {x.output: y for x, y in zip(self._lookups, numbers.tables, strict=True)}
            run(self._inside, values, bind_in_kernel)
            return jnp.broadcast_to(value_of(values, self._output), ())

        return jax.vmap(jax.vmap(one))(raw, places, numbers)

    def _of_numbers(
        self, places: dict[str, Array], fixed: tuple[Any, ...]
    ) -> Callable[[Array, Any, Any], Array]:
        return lambda raw, floats, entries: self.score(raw, places, Numbers(floats, entries, fixed))

    def vjp(
        self, raw: Array, places: dict[str, Array], numbers: Numbers
    ) -> tuple[Array, Callable[[Array], Any]]:
        """Returns scores, and the pullback to cotangents of products, floats and table entries."""
        score = self._of_numbers(places, numbers.fixed)
        return jax.vjp(score, raw, numbers.floats, numbers.tables)

    def jvp(
        self,
        raw: Array,
        places: dict[str, Array],
        numbers: Numbers,
        change: Array | None,
        changes: Numbers | None,
    ) -> Array:
        """Returns the tangent of the scores, given tangents of products (`change`), of numbers (`changes`), or both."""
        score = self._of_numbers(places, numbers.fixed)
        if changes is None:
            assert change is not None
            return jax.jvp(lambda raw: score(raw, *numbers[:2]), (raw,), (change,))[1]
        if change is None:
            return jax.jvp(functools.partial(score, raw), numbers[:2], changes[:2])[1]
        return jax.jvp(score, (raw, *numbers[:2]), (change, *changes[:2]))[1]

    def check(self, target: Target) -> None:
        """Raises `NotImplementedError` for operations or dtypes that the target lacks, derivatives included."""
        tile = 8, 128
        raw = jnp.zeros(tile, jnp.float32)
        places = {x: jnp.zeros(tile, jnp.int32) for x in ("query", "key")}
        numbers = Numbers(
            (raw,) * len(self._floats),
            (raw,) * len(self._lookups),
            (places["key"],) * len(self._fixed),
        )

        def derivatives(raw: Array, places: dict[str, Array], numbers: Numbers) -> Any:
            scores, pullback = self.vjp(raw, places, numbers)
            tangent = self.jvp(raw, places, numbers, raw, numbers)
            return self.indices(places, numbers), scores, pullback(raw), tangent

        programs = (jax.make_jaxpr(f)(raw, places, numbers) for f in (self.score, derivatives))
        for equation in itertools.chain.from_iterable(map(equations, programs)):
            if (name := equation.primitive.name) not in target.primitives:
                raise self._declined(f"functions that kernels compute, got {name}")
            types: list[Any] = [x.aval for x in equation.outvars]
            for x in types:
                if x.dtype.name not in target.dtypes:
                    dtypes = " or ".join(sorted(target.dtypes))
                    raise self._declined(f"numbers of {dtypes}, got {x.dtype}")

    def _declined(self, reason: str) -> NotImplementedError:
        return NotImplementedError(f"score: wanted {reason} in {self.name} (blockwise takes it)")

    def _inputs_of(self, places: dict[str, Array], numbers: Numbers) -> dict[ProgramValue, Any]:
        values: dict[ProgramValue, Any] = dict(self._constants)
        values |= {self._inputs[name]: x for name, x in places.items()}
        values |= zip(self._floats, numbers.floats, strict=True)
        for x, y in zip(self._fixed, numbers.fixed, strict=True):
            values[x] = y != 0 if x.dtype == jnp.bool_ else y
        return values

    def _sort(self, operation: Operation) -> None:
        """Sorts an operation into those outside the kernel, those inside, or the lookups."""
        inputs = tuple(self._same.get(x, x) for x in operation.inputs)
        operation = operation._replace(inputs=inputs)
        for x in operation.outputs:
            x.reads = operation.reads  # a table, too
        kind = operation.name
        if not operation.outputs:
            raise self._declined(f"functions that kernels compute, got {kind}")
        if operation.is_known:
            return
        output = operation.outputs[0]
        first = operation.inputs[0] if operation.inputs else output
        if not operation.reads & _INSIDE:
            self._outside.append(operation)
        elif kind in _SAME and output.size == 1:
            self._same[output] = first
        elif kind == "concatenate" and jnp.issubdtype(output.dtype, jnp.integer):
            self._joined[output] = sum((self._parts(x) for x in operation.inputs), ())
        elif kind == "convert_element_type" and first in self._joined:
            self._joined[output] = self._joined[first]
        elif kind in ("gather", "dynamic_slice") and not first.reads & _INSIDE:
            self._lookups.append(self._looked_up(operation))
        elif all(x.size == 1 for x in operation.outputs):
            self._inside.append(operation)
        else:
            shape = list(output.shape)
            raise self._declined(f"numbers at each query and key, got {kind} to an array {shape}")

    def _parts(self, x: ProgramValue) -> tuple[ProgramValue, ...]:
        if x in self._joined:
            return self._joined[x]
        if x.size != 1:
            raise self._declined(f"indices put together of numbers, got an array {list(x.shape)}")
        return (x,)

    def _looked_up(self, operation: Operation) -> _Lookup:
        table, *starts = operation.inputs
        params, fill = operation.equation.params, False
        shape, order = table.shape, range(len(table.shape))
        if operation.name == "gather":
            numbers = params["dimension_numbers"]
            order, starts = numbers.start_index_map, self._parts(starts[0])
            fill = params["mode"] == lax.GatherScatterMode.FILL_OR_DROP
            if numbers.operand_batching_dims or params.get("fill_value") is not None:
                raise self._declined("tables by head and position, got gather of several")
        zero = np.zeros((), np.int32)
        by_axis = [ProgramValue(zero, known=zero) for _ in shape]
        for axis, x in zip(order, starts, strict=True):
            by_axis[axis] = x
        moving = [axis for axis, x in enumerate(by_axis) if x.reads & _INSIDE]
        if len(moving) != 1 or set(params["slice_sizes"]) != {1} or not floating(table):
            raise self._declined(
                f"floating tables by head and one index, got {operation.name} of "
                f"{table.dtype}{list(shape)}"
            )
        (axis,) = moving
        if not by_axis[axis].reads <= _POSITIONS:
            raise self._declined("tables by position, got an index by the product")
        if shape[axis] > MOST_ENTRIES:
            raise self._declined(f"tables of at most {MOST_ENTRIES} entries, got {shape[axis]}")
        (output,) = operation.outputs
        output.reads |= {"table"}
        return _Lookup(table, tuple(by_axis), axis, fill, output)


def _traced(structure: ScoreStructure, types: tuple[Any, ...]) -> ClosedJaxpr:
    """The program of a score of single numbers in float32, with arrays of shapes and dtypes `types`.

    Raises `NotImplementedError` for a score that takes no single numbers.
    """

    def score(raw: Any, query: Any, key: Any, batch: Any, head: Any, *arrays: Any) -> Any:
        arrays_float32 = [x.astype(jnp.float32) if floating(x) else x for x in arrays]
        index = ScoreIndices(batch, head, query, key)
        if not structure.uses_positions:
            index = ScoreIndices(batch, head, None, None)  # pyright: ignore[reportArgumentType]
        return structure.bind(arrays_float32)(raw, index)

    number = jax.ShapeDtypeStruct((), jnp.int32)
    array_types = (jax.ShapeDtypeStruct(*x) for x in types)
    raw = jax.ShapeDtypeStruct((), jnp.float32)
    try:
        return jax.make_jaxpr(score)(raw, *[number] * 4, *array_types)
    except (TypeError, ValueError, IndexError) as reason:
        raise NotImplementedError(
            f"score: wanted a function that takes single numbers, got {structure.name} with {reason} "
            "(blockwise takes it)"
        ) from reason


def _row(x: _Lookup, values: dict[ProgramValue, Any]) -> Array:
    table = jnp.asarray(value_of(values, x.table))
    starts = [
        jnp.int32(0)
        if i == x.axis
        else jnp.asarray(value_of(values, y)).reshape(()).astype(jnp.int32)
        for i, y in enumerate(x.starts)
    ]
    sizes = [x.size if i == x.axis else 1 for i in range(table.ndim)]
    row = lax.dynamic_slice(table, starts, sizes).reshape(x.size)
    if not x.fill:
        return row
    inside = [(y >= 0) & (y < n) for y, n in zip(starts, table.shape, strict=True)]
    return jnp.where(functools.reduce(jnp.logical_and, inside), row, jnp.nan)


@functools.lru_cache(maxsize=256)
def score_program(
    structure: ScoreStructure, types: tuple[Any, ...], target: Target, x64: bool
) -> ScoreProgram:
    """The program of a score with arrays of shapes and dtypes `types`.

    Raises `NotImplementedError` if kernels for the target cannot run it.
    """
    del x64  # a key of the cache, as it changes what is traced
    with without_mesh():
        program = ScoreProgram(structure, types)
        program.check(target)
    return program
