"""The scores of tiles in the GPU kernels: scaled products, or a function of them with its derivatives."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Ref, lax
from jaxtyping import Array

from .._score_program import Numbers
from .._tiles import LOG2_E
from ._plan import TritonPlan, power
from ._tile import TritonProgram, TritonRows, load, numbers

# Where a tile may see; None: everywhere.
Visible = Array | None


class RowInputs(NamedTuple):
    """The inputs of a tile's scores that depend on its rows."""

    rows: TritonRows
    position: Array | None
    numbers: Numbers  # without tables


class TritonScores:
    """The scores of a program's tiles; `[keys, rows]` in a program of keys."""

    def __init__(self, program: TritonProgram, score_numbers: Numbers):
        self._program, self._numbers, self._plan = program, score_numbers, program.plan
        self._score = program.plan.score
        self._row_axis = int(program.of_keys)

    def row_inputs(self, rows: TritonRows) -> RowInputs | None:
        """The inputs that are read once for a tile of rows; None without a score."""
        if self._score is None:
            return None
        position, positions = rows.time, self._program.visibility.row_positions
        if self._score.uses_positions and positions is not None:
            position = self._program.read(positions, rows.time, rows.in_bounds)
        return RowInputs(rows, position, self.row_numbers(self._numbers, rows))

    def row_numbers(self, score_numbers: Numbers, rows: TritonRows) -> Numbers:
        def read(refs: Sequence[Ref]) -> tuple[Array, ...]:
            return tuple(load(x, self._heads(x, rows.head), None) for x in refs)

        return Numbers(read(score_numbers.floats), (), read(score_numbers.fixed))

    @property
    def unit(self) -> float:
        """The unit of `scores`, in bits. It is positive: the largest score has the most units."""
        scale = self._plan.settings.scale
        return scale * LOG2_E if scale > 0 and self._score is None else LOG2_E

    def scores(self, product: Array, row_inputs: RowInputs | None, tile: Array) -> Array:
        """The scores of a tile of keys, or of rows in a program of keys, in units."""
        scale = self._plan.settings.scale
        if row_inputs is None or self._score is None:
            return product if scale > 0 else product * scale
        places, inputs, _ = self._read(row_inputs, tile, product.shape)
        return self._score.score(product * scale, places, inputs)

    def vjp(
        self, product: Array, row_inputs: RowInputs | None, tile: Array
    ) -> tuple[Array, Callable[[Array, Visible], tuple[Array, Numbers]]]:
        """`scores`, and the pullback to cotangents of scaled products and to terms of `no_sums`.

        The latter are empty if keys come first.
        """
        if row_inputs is None or self._score is None:
            scores = self.scores(product, row_inputs, tile)
            return scores, lambda cotangent, visible: (cotangent, Numbers())
        # dx = g'(x) ds, dn_i = Σ_a ds_ia ∂g/∂n; of tables by entry
        places, inputs, indices = self._read(row_inputs, tile, product.shape)
        raw = product * self._plan.settings.scale
        scores, pullback = self._score.vjp(raw, places, inputs)

        def back(cotangent: Array, visible: Visible) -> tuple[Array, Numbers]:
            d_raw, floats, entries = jax.tree.map(
                lambda x: _zero_hidden(x, visible), pullback(cotangent)
            )
            if self._row_axis == 1:
                return d_raw, Numbers()
            tables = map(_by_entry, entries, indices, self._sizes)
            return d_raw, Numbers(tuple(x.sum(1) for x in floats), tuple(tables))

        return scores, back

    def jvp(
        self,
        change: Array | None,
        product: Array,
        row_inputs: RowInputs | None,
        tile: Array,
        visible: Visible,
        directions: tuple[Numbers, Numbers] | None,
    ) -> Array | None:
        """Tangent of the scores, given tangents of the scaled products, numbers and tables."""
        if row_inputs is None or self._score is None:
            return change
        # ds = g'(x) dx + ∂g/∂n dn
        places, inputs, indices = self._read(row_inputs, tile, product.shape)
        changes = None
        if directions is not None:
            d_numbers, row_directions = directions
            floats = (self._across(x, product.shape) for x in row_directions.floats)
            entries = self._entries(d_numbers.tables, indices, row_inputs.rows, 0.0)
            changes = Numbers(tuple(floats), entries)
        raw = product * self._plan.settings.scale
        return _zero_hidden(self._score.jvp(raw, places, inputs, change, changes), visible)

    def no_sums(self) -> Numbers:
        """Zero cotangents of the numbers and of the entries of tables, for each row."""
        rows = self._plan.rows
        return Numbers(
            tuple(jnp.zeros(rows, jnp.float32) for _ in self._numbers.floats),
            tuple(jnp.zeros((rows, power(size)), jnp.float32) for size in self._sizes),
        )

    def store(self, refs: Numbers, rows: TritonRows, sums: Numbers) -> None:
        for ref, x in zip(refs.floats, sums.floats, strict=True):
            self._program.store_numbers(ref, rows, x)
        for ref, x, size in zip(refs.tables, sums.tables, self._sizes, strict=True):
            self._program.store_rows(ref, rows, x, size)

    @property
    def _sizes(self) -> tuple[int, ...]:
        return () if self._score is None else self._score.sizes

    def _read(
        self, row_inputs: RowInputs, tile: Array, shape: tuple[int, ...]
    ) -> tuple[dict[str, Array], Numbers, list[Array]]:
        """Positions, numbers and table entries broadcast to a tile, and the indices of the entries."""
        assert self._score is not None
        places = {}
        if self._score.uses_positions and row_inputs.position is not None:
            key = self._program.key_numbers(tile)
            if (positions := self._program.visibility.key_positions) is not None:
                key = self._program.read(positions, key, None)
            key = jnp.expand_dims(key, self._row_axis)
            places = {
                "query": self._across(row_inputs.position, shape),
                "key": jnp.broadcast_to(key, shape),
            }
        inputs = jax.tree.map(lambda x: self._across(x, shape), row_inputs.numbers)
        indices = self._score.indices(places, inputs)
        entries = self._entries(self._numbers.tables, indices, row_inputs.rows, jnp.nan)
        return places, inputs._replace(tables=entries), indices

    def _across(self, x: Array, shape: tuple[int, ...]) -> Array:
        """Broadcasts one number per row to a tile."""
        return jnp.broadcast_to(jnp.expand_dims(x, 1 - self._row_axis) if x.ndim else x, shape)

    def _heads(self, x: Ref, head: Array) -> tuple[Array, Array]:
        # idle rows read the last head, as the score of a missing number might be NaN
        head = jnp.minimum(head, x.shape[1] - 1)
        batch, none = self._program.batch, jnp.zeros_like(self._program.batch)
        return batch if x.shape[0] > 1 else none, head if x.shape[1] > 1 else none

    def _entries(
        self, tables: Sequence[Ref], indices: Sequence[Array], rows: TritonRows, other: float
    ) -> tuple[Array, ...]:
        entries = []
        for table, index in zip(tables, indices, strict=True):
            head = jnp.expand_dims(rows.head, 1 - self._row_axis)
            clipped = jnp.minimum(jnp.maximum(index, 0), table.shape[2] - 1)
            entry = load(table, (*self._heads(table, head), clipped), None)
            entries.append(jnp.where(index == clipped, entry, other))
        return tuple(entries)


def sums_like(plan: TritonPlan, score_numbers: Numbers, like: Array) -> Numbers:
    """The types of the sums, `[B, T, N]` and `[B, T, N, D]`."""
    shape, sizes = like.shape[:3], () if plan.score is None else plan.score.sizes
    return Numbers(
        tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for _ in score_numbers.floats),
        tuple(jax.ShapeDtypeStruct((*shape, size), jnp.float32) for size in sizes),
    )


def _zero_hidden(x: Array, visible: Visible) -> Array:
    # Zeros where hidden, as products there may be NaN.
    return x if visible is None else jnp.where(visible, x, 0.0)


def _by_entry(x: Array, index: Array, size: int) -> Array:
    """Sums over the keys of a tile by table entry, `[rows, D]`."""
    column = numbers(power(size))[None, :]

    def add(entry: Array, total: Array) -> Array:
        entry_sums = jnp.where(index == entry, x, 0.0).sum(1)
        return total + jnp.where(column == entry, entry_sums[:, None], 0.0)

    start = jnp.zeros((len(x), power(size)), jnp.float32)
    return lax.fori_loop(jnp.int32(0), jnp.int32(size), add, start)
