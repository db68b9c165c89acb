"""The scores of tiles in the GPU kernels: scaled products, or a function of them with its derivatives."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Ref, lax
from jax.experimental.pallas import triton
from jaxtyping import Array

from ..._varying import result_like
from .._rows import Visibility
from .._score_program import Numbers, ScoreProgram
from . import _tile as tiles
from ._default import power
from ._plan import TritonPlan

# Where a tile may see; None: everywhere.
Visible = Array | None


class RowInputs(NamedTuple):
    """The inputs of a tile's scores that depend on its rows."""

    rows: tiles.RowsOfTile
    position: Array | None
    numbers: Numbers  # without tables


class TritonScores:
    """The scores of a program's tiles; `[keys, rows]` if `keys_first`."""

    def __init__(
        self,
        plan: TritonPlan,
        numbers: Numbers,
        visibility: Visibility,
        program: tiles.ProgramIndex,
        *,
        keys_first: bool = False,
    ):
        self._plan, self._numbers = plan, numbers
        self._visibility, self._program = visibility, program
        self._row_axis = int(keys_first)

    def row_inputs(self, rows: tiles.RowsOfTile) -> RowInputs | None:
        """The inputs that are read once for a tile of rows; None without a score."""
        score = self._plan.score
        if score is None:
            return None
        position = rows.time
        if score.compares and self._visibility.row_positions is not None:
            position = self._position(self._visibility.row_positions, rows.time, rows.in_bounds)
        return RowInputs(rows, position, self.row_numbers(self._numbers, rows))

    def row_numbers(self, numbers: Numbers, rows: tiles.RowsOfTile) -> Numbers:
        def read(refs: Sequence[Ref]) -> tuple[Array, ...]:
            return tuple(tiles.load(x, self._heads(x, rows.head), None) for x in refs)

        return Numbers(read(numbers.floats), (), read(numbers.fixed))

    @property
    def unit(self) -> float:
        """How many bits the unit of `scores` is. Bits are positive, so that the largest score has most of them."""
        scale = self._plan.settings.scale
        return scale * tiles.LOG2_E if scale > 0 and self._plan.score is None else tiles.LOG2_E

    def scores(self, product: Array, row_inputs: RowInputs | None, tile: Array) -> Array:
        """The scores of a tile of keys, or those of a tile of rows, in units."""
        scale = self._plan.settings.scale
        if row_inputs is None or self._plan.score is None:
            return product if scale > 0 else product * scale
        places, numbers, _ = self._read(row_inputs, tile, product.shape)
        return self._plan.score.score(product * scale, places, numbers)

    def vjp(
        self, product: Array, row_inputs: RowInputs | None, tile: Array
    ) -> tuple[Array, Callable[[Array, Visible], tuple[Array, Numbers]]]:
        """`scores`, and the pullback to cotangents of scaled products and to terms of `no_sums`.

        The latter are empty if keys come first.
        """
        if row_inputs is None or self._plan.score is None:
            scores = self.scores(product, row_inputs, tile)
            return scores, lambda cotangent, visible: (cotangent, Numbers())
        places, numbers, indices = self._read(row_inputs, tile, product.shape)
        raw = product * self._plan.settings.scale
        scores, pullback = self._plan.score.vjp(raw, places, numbers)

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
        """The change of the scores by that of the scaled products and of numbers and tables."""
        if row_inputs is None or self._plan.score is None:
            return change
        places, numbers, indices = self._read(row_inputs, tile, product.shape)
        changes = None
        if directions is not None:
            d_numbers, row_directions = directions
            floats = (self._across(x, product.shape) for x in row_directions.floats)
            entries = self._entries(d_numbers.tables, indices, row_inputs.rows, 0.0)
            changes = Numbers(tuple(floats), entries)
        raw = product * self._plan.settings.scale
        return _zero_hidden(self._plan.score.jvp(raw, places, numbers, change, changes), visible)

    def no_sums(self) -> Numbers:
        """Zeros, to which cotangents are added: for each row, one for each number and each entry of a table."""
        rows = self._plan.rows
        return Numbers(
            tuple(jnp.zeros(rows, jnp.float32) for _ in self._numbers.floats),
            tuple(jnp.zeros((rows, power(size)), jnp.float32) for size in self._sizes),
        )

    def store(self, refs: Numbers, rows: tiles.RowsOfTile, sums: Numbers) -> None:
        for ref, x in zip(refs.floats, sums.floats, strict=True):
            index = (self._program.split, self._program.batch, rows.time, rows.head)
            triton.store(ref.at[index], x, mask=rows.in_bounds)
        for ref, x, size in zip(refs.tables, sums.tables, self._sizes, strict=True):
            tiles.store_rows(ref, self._program, rows, x, size)

    @property
    def _sizes(self) -> tuple[int, ...]:
        return () if self._plan.score is None else self._plan.score.sizes

    def _read(
        self, row_inputs: RowInputs, tile: Array, shape: tuple[int, ...]
    ) -> tuple[dict[str, Array], Numbers, list[Array]]:
        """Positions, numbers and entries in the shape of a tile, and the indices of the entries."""
        score: ScoreProgram | None = self._plan.score
        assert score is not None
        places = {}
        if score.compares and row_inputs.position is not None:
            key = tile * self._plan.keys + tiles.numbers(self._plan.keys)
            if self._visibility.key_positions is not None:
                key = self._position(self._visibility.key_positions, key, None)
            key = jnp.expand_dims(key, self._row_axis)
            places = {
                "query": self._across(row_inputs.position, shape),
                "key": jnp.broadcast_to(key, shape),
            }
        numbers = jax.tree.map(lambda x: self._across(x, shape), row_inputs.numbers)
        indices = score.indices(places, numbers)
        entries = self._entries(self._numbers.tables, indices, row_inputs.rows, jnp.nan)
        return places, numbers._replace(tables=entries), indices

    def _across(self, x: Array, shape: tuple[int, ...]) -> Array:
        """One number for each row, in the shape of a tile."""
        return jnp.broadcast_to(jnp.expand_dims(x, 1 - self._row_axis) if x.ndim else x, shape)

    def _heads(self, x: Ref, head: Array) -> tuple[Array, Array]:
        # idle rows read the last head: of a number that they have not, a score might be NaN
        head = jnp.minimum(head, x.shape[1] - 1)
        batch, none = self._program.batch, jnp.zeros_like(self._program.batch)
        return batch if x.shape[0] > 1 else none, head if x.shape[1] > 1 else none

    def _position(self, x: Array | Ref, index: Array, in_bounds: Array | None) -> Array:
        return tiles.load(x, (self._program.batch if x.shape[0] > 1 else 0, index), in_bounds, -1)

    def _entries(
        self, tables: Sequence[Ref], indices: Sequence[Array], rows: tiles.RowsOfTile, other: float
    ) -> tuple[Array, ...]:
        entries = []
        for table, index in zip(tables, indices, strict=True):
            head = jnp.expand_dims(rows.head, 1 - self._row_axis)
            clipped = jnp.minimum(jnp.maximum(index, 0), table.shape[2] - 1)
            entry = tiles.load(table, (*self._heads(table, head), clipped), None)
            entries.append(jnp.where(index == clipped, entry, other))
        return tuple(entries)


def sums_like(plan: TritonPlan, numbers: Numbers, like: Array) -> Numbers:
    """The types of the sums of all programs, `[splits, B, T, N]` and `[splits, B, T, N, D]`."""
    shape = (plan.splits, *like.shape[:3])
    sizes = () if plan.score is None else plan.score.sizes
    return Numbers(
        tuple(result_like(like, shape, jnp.float32) for _ in numbers.floats),
        tuple(result_like(like, (*shape, size), jnp.float32) for size in sizes),
    )


def _zero_hidden(x: Array, visible: Visible) -> Array:
    """Zeros where hidden, as products there may be NaN."""
    return x if visible is None else jnp.where(visible, x, 0.0)


def _by_entry(x: Array, index: Array, size: int) -> Array:
    """The sums over keys `[rows, D]` of a tile, by the entry that each is of."""
    column = tiles.numbers(power(size))[None, :]

    def add(entry: Array, total: Array) -> Array:
        entry_sums = jnp.where(index == entry, x, 0.0).sum(1)
        return total + jnp.where(column == entry, entry_sums[:, None], 0.0)

    start = jnp.zeros((len(x), power(size)), jnp.float32)
    return lax.fori_loop(jnp.int32(0), jnp.int32(size), add, start)
