"""Splits a score into numbers by batch and head, tables by position, and the operations on each entry.

The numbers and the tables are computed outside of the kernel, so that the kernel has no gathers.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr
from jaxtyping import Array

from .._program import without_mesh
from ..scores._structure import ScoreStructure, floating
from ._score_steps import Name, Step, reads, run, traced, value

MOST_ENTRIES = 64  # of a table by position: each is a sum over a tile in the backward
_INSIDE = frozenset({"raw", "query", "key", "table"})
_POSITIONS = frozenset({"query", "key", "batch", "head"})
_SAME = "reshape", "squeeze", "broadcast_in_dim", "expand_dims"
_TYPES = "float32", "int32", "bool"


class Target(NamedTuple):
    """The primitives and dtypes that the compiler of a kernel supports, by name."""

    primitives: frozenset[str]
    dtypes: frozenset[str]


class Numbers(NamedTuple):
    """The inputs of a score that depend on batch and head alone.

    Attributes:
        floats: floating numbers.
        tables: floating tables, with a last axis of entries.
        fixed: int32 numbers, without derivatives.
    """

    floats: tuple[Any, ...] = ()
    tables: tuple[Any, ...] = ()
    fixed: tuple[Any, ...] = ()


class _Lookup(NamedTuple):
    """One entry of a table: at `index` of `axis`, and at `starts` of the other axes."""

    table: Any
    starts: tuple[Any, ...]
    axis: int
    index: Any
    fill: bool  # NaN beyond the end; else the nearest entry
    output: Name

    @property
    def size(self) -> int:
        return self.table.shape[self.axis]


class ScoreProgram:
    """A score as a kernel computes it, on tiles that all have the same shape.

    Attributes:
        name: of the score.
        compares: whether it reads positions.
        sizes: the lengths of its tables.
    """

    def __init__(self, structure: ScoreStructure, types: tuple[Any, ...]):
        self.name, self.compares = structure.name, structure.compares
        program = traced(structure, types)
        self._inputs, self._arrays, self._known = program.inputs, program.arrays, program.known
        self._outside: list[Step] = []
        self._inside: list[Step] = []
        self._lookups: list[_Lookup] = []
        self._same: dict[Any, Any] = {}
        self._joined: dict[Any, tuple[Any, ...]] = {}
        for step in program.steps:
            self._sort(step)
        self._output = self._of(program.output)
        used = [x for step in self._inside for x in step.inputs]
        used += [x.index for x in self._lookups] + [self._output]
        numbers = dict.fromkeys(x for x in used if isinstance(x, Name) and not x.reads & _INSIDE)
        for x in numbers:
            if x.dtype.name not in _TYPES or math.prod(x.shape) != 1:
                raise self._declined(
                    f"float32 and int32 numbers for each head, got {x.dtype}{list(x.shape)}"
                )
        self._constants = {
            x: np.asarray(self._known[x]).reshape(())[()] for x in numbers if x in self._known
        }
        numbers = [x for x in numbers if x not in self._known]
        self._floats = [x for x in numbers if floating(x)]
        self._fixed = [x for x in numbers if not floating(x)]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(x.size for x in self._lookups)

    def outside(self, arrays: Sequence[Array], batch: Array, head: Array) -> Numbers:
        """Numbers `[B or 1, N or 1]` and tables `[B or 1, N or 1, D]`, for indices `[B]` and `[N]`."""

        def one(batch: Array, head: Array) -> Numbers:
            values = self._known | dict(zip(self._arrays, arrays, strict=True))
            values |= {self._inputs["batch"]: batch, self._inputs["head"]: head}
            run(self._outside, values)
            floats = (values[x].reshape(()) for x in self._floats)
            fixed = (values[x].reshape(()).astype(jnp.int32) for x in self._fixed)
            return Numbers(
                tuple(floats), tuple(_row(x, values) for x in self._lookups), tuple(fixed)
            )

        def cut(x: Array, reads: frozenset[str]) -> Array:
            x = x if "batch" in reads else x[:1]
            return x if "head" in reads else x[:, :1]

        over_heads = jax.vmap(one, (None, 0))
        numbers = jax.vmap(over_heads, (0, None))(batch, head)
        depends_on = Numbers(
            tuple(x.reads for x in self._floats),
            tuple(reads((x.table, *x.starts)) for x in self._lookups),
            tuple(x.reads for x in self._fixed),
        )
        return Numbers(*(tuple(map(cut, *x)) for x in zip(numbers, depends_on, strict=True)))

    def indices(self, places: dict[str, Array], numbers: Numbers) -> list[Array]:
        """The index of each table; with tiles of positions "query" and "key" and of numbers."""
        if not self._lookups:
            return []

        def one(places: dict[str, Array], numbers: Numbers) -> list[Array]:
            values = self._inputs_of(places, numbers)
            run([x for x in self._inside if x.reads <= _POSITIONS], values)
            return [
                jnp.broadcast_to(value(values, x.index), ()).astype(jnp.int32)
                for x in self._lookups
            ]

        indices = _each(one)(places, numbers)
        return [
            index if x.fill else jnp.clip(index, 0, x.size - 1)
            for index, x in zip(indices, self._lookups, strict=True)
        ]

    def score(self, raw: Array, places: dict[str, Array], numbers: Numbers) -> Array:
        """The scores of a tile of scaled products; `numbers.tables` holds the entries looked up."""

        def one(raw: Array, places: dict[str, Array], numbers: Numbers) -> Array:
            values = self._inputs_of(places, numbers)
            values[self._inputs["raw"]] = raw
            values |= {x.output: y for x, y in zip(self._lookups, numbers.tables, strict=True)}
            run(self._inside, values)
            return jnp.broadcast_to(value(values, self._output), ())

        return _each(one)(raw, places, numbers)

    def vjp(
        self, raw: Array, places: dict[str, Array], numbers: Numbers
    ) -> tuple[Array, Callable[[Array], Any]]:
        """The scores, and the pullback to the cotangents of products, floats and entries."""

        def score_of(raw: Array, floats: Any, entries: Any) -> Array:
            return self.score(raw, places, Numbers(floats, entries, numbers.fixed))

        return jax.vjp(score_of, raw, numbers.floats, numbers.tables)

    def jvp(
        self,
        raw: Array,
        places: dict[str, Array],
        numbers: Numbers,
        change: Array | None,
        changes: Numbers | None,
    ) -> Array:
        """The derivative of the scores in a direction of the products, of floats and entries, or of both."""

        def score_of(raw: Array, floats: Any, entries: Any) -> Array:
            return self.score(raw, places, Numbers(floats, entries, numbers.fixed))

        primals = raw, numbers.floats, numbers.tables
        if changes is None:
            assert change is not None
            return jax.jvp(lambda raw: score_of(raw, *primals[1:]), primals[:1], (change,))[1]
        if change is None:
            return jax.jvp(functools.partial(score_of, raw), primals[1:], changes[:2])[1]
        return jax.jvp(score_of, primals, (change, *changes[:2]))[1]

    def check(self, target: Target) -> None:
        """Raises `NotImplementedError` for what the target lacks, in the score or either derivative."""
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

        self._check(jax.make_jaxpr(self.score)(raw, places, numbers).jaxpr, target)
        self._check(jax.make_jaxpr(derivatives)(raw, places, numbers).jaxpr, target)

    def _check(self, jaxpr: Any, target: Target) -> None:
        for eqn in jaxpr.eqns:
            if eqn.primitive.name not in target.primitives:
                raise self._declined(f"functions that kernels compute, got {eqn.primitive.name}")
            for x in eqn.outvars:
                if x.aval.dtype.name not in target.dtypes:
                    dtypes = " or ".join(sorted(target.dtypes))
                    raise self._declined(f"numbers of {dtypes}, got {x.aval.dtype}")
            for inner in eqn.params.values():
                if isinstance(inner, ClosedJaxpr):
                    self._check(inner.jaxpr, target)

    def _declined(self, reason: str) -> NotImplementedError:
        return NotImplementedError(f"score: wanted {reason} in {self.name} (blockwise takes it)")

    def _of(self, x: Any) -> Any:
        return self._same.get(x, x) if isinstance(x, Name) else x

    def _inputs_of(self, places: dict[str, Array], numbers: Numbers) -> dict[Any, Any]:
        values = dict(self._constants)
        values |= {self._inputs[name]: x for name, x in places.items()}
        values |= zip(self._floats, numbers.floats, strict=True)
        for name, x in zip(self._fixed, numbers.fixed, strict=True):
            values[name] = x != 0 if name.dtype == jnp.bool_ else x
        return values

    def _sort(self, step: Step) -> None:
        """Adds a step to those outside of the kernel, those inside, or the lookups."""
        step = step._replace(inputs=tuple(map(self._of, step.inputs)))
        for x in step.outputs:
            x.reads = step.reads
        kind = step.primitive.name
        first, output = step.inputs[0] if step.inputs else None, step.outputs[0]
        small = all(math.prod(x.shape) == 1 for x in step.outputs)
        if not step.reads & _INSIDE:
            self._outside.append(step)
            if all(not isinstance(x, Name) or x in self._known for x in step.inputs) and small:
                with jax.ensure_compile_time_eval():
                    run([step], self._known)
                for x in step.outputs:
                    self._known[x] = np.asarray(self._known[x])
        elif kind in _SAME and math.prod(output.shape) == 1:
            self._same[output] = first
        elif kind == "concatenate" and jnp.issubdtype(output.dtype, jnp.integer):
            self._joined[output] = sum((self._parts(x) for x in step.inputs), ())
        elif kind == "convert_element_type" and first in self._joined:
            self._joined[output] = self._joined[first]
        elif kind in ("gather", "dynamic_slice") and not reads((first,)) & _INSIDE:
            self._lookups.append(self._looked_up(step))
        elif small:
            self._inside.append(step)
        else:
            shape = list(output.shape)
            raise self._declined(f"numbers at each query and key, got {kind} to an array {shape}")

    def _parts(self, x: Any) -> tuple[Any, ...]:
        if x in self._joined:
            return self._joined[x]
        if math.prod(x.shape) != 1:
            raise self._declined(f"indices put together of numbers, got an array {list(x.shape)}")
        return (x,)

    def _looked_up(self, step: Step) -> _Lookup:
        table, *starts = step.inputs
        sizes, fill = step.params["slice_sizes"], False
        shape, order = table.shape, range(len(table.shape))
        if step.primitive.name == "gather":
            numbers = step.params["dimension_numbers"]
            order, starts = numbers.start_index_map, self._parts(starts[0])
            fill = step.params["mode"] == lax.GatherScatterMode.FILL_OR_DROP
            if numbers.operand_batching_dims or step.params.get("fill_value") is not None:
                raise self._declined("tables by head and position, got gather of several")
        by_axis: list[Any] = [np.int32(0)] * len(shape)
        for axis, x in zip(order, starts, strict=True):
            by_axis[axis] = x
        moving = [axis for axis, x in enumerate(by_axis) if reads((x,)) & _INSIDE]
        if len(moving) != 1 or set(sizes) != {1} or not floating(table):
            raise self._declined(
                f"floating tables by head and one index, got {step.primitive.name} of "
                f"{table.dtype}{list(shape)}"
            )
        axis = moving[0]
        if not reads((by_axis[axis],)) <= _POSITIONS:
            raise self._declined("tables by position, got an index by the product")
        if shape[axis] > MOST_ENTRIES:
            raise self._declined(f"tables of at most {MOST_ENTRIES} entries, got {shape[axis]}")
        output = step.outputs[0]
        output.reads = output.reads | {"table"}
        return _Lookup(table, tuple(by_axis), axis, by_axis[axis], fill, output)


def _row(x: _Lookup, values: dict[Any, Any]) -> Array:
    """The entries of a table at a batch and head."""
    table = jnp.asarray(value(values, x.table))
    starts = [
        jnp.int32(0) if i == x.axis else jnp.asarray(value(values, y)).reshape(()).astype(jnp.int32)
        for i, y in enumerate(x.starts)
    ]
    sizes = [x.size if i == x.axis else 1 for i in range(table.ndim)]
    row = lax.dynamic_slice(table, starts, sizes).reshape(x.size)
    if not x.fill:
        return row
    inside = [(y >= 0) & (y < n) for y, n in zip(starts, table.shape, strict=True)]
    return jnp.where(functools.reduce(jnp.logical_and, inside), row, jnp.nan)


def _each(f: Callable[..., Any]) -> Callable[..., Any]:
    """`f`, mapped over the entries of a tile."""
    return jax.vmap(jax.vmap(f))


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
