"""The tiles and programs of a call for the GPU kernels, by shapes alone; does not import Pallas."""

import math
from typing import NamedTuple

from ...call._operands import Operands, Settings
from ...masks._structure import Pairwise
from .._rows import pairs_of
from .._score import score_of
from .._score_program import ScoreProgram, Target
from ._chip import GPUChip, target_chip
from ._default import GPUTiles, KernelKind, Need, default_tiles, power

# The primitives that every supported JAX lowers to Triton, for a score and its derivatives.
TARGET = Target(
    frozenset(
        "abs add add_any and atan2 broadcast_in_dim cbrt ceil clamp convert_element_type cos cosh "
        "custom_jvp_call div eq exp exp2 expm1 floor ge gt integer_pow is_finite jit le log log1p "
        "logistic lt max min mul ne neg not one_minus_square or pjit pow rem reshape rsqrt select_n sign sin sinh "
        "sqrt square squeeze sub tan tanh xor".split()
    ),
    # Python's integers are int64 where JAX has 64 bits
    frozenset({"float32", "int32", "int64", "bool"}),
)


class TritonPlan(NamedTuple):
    """The static properties of a call and its tiles.

    The rows of a tile are `row_times` consecutive queries of `row_heads` of the query heads that
    share a key head, in memory order; the rest of `rows` is idle.

    Attributes:
        settings: those of the call.
        pairs: its mask for tiles, None if that is a window.
        batch, query_len, key_len, kv_heads, group: `B`, `T`, `S`, `K` and `N / K`.
        width, value_width: `H` and `Hv`.
        row_times, row_heads, rows, keys: the tiles of rows and of keys; the last two are powers
            of two.
        splits: how many programs share the iteration of a tile over others.
        warps, stages: the threads of a program in units of 32, and the steps that overlap.
        score: the call's score, if it has one.
    """

    settings: Settings
    pairs: Pairwise | None
    batch: int
    query_len: int
    key_len: int
    kv_heads: int
    group: int
    width: int
    value_width: int
    row_times: int
    row_heads: int
    rows: int
    keys: int
    splits: int
    warps: int
    stages: int
    score: ScoreProgram | None

    @property
    def head_tiles(self) -> int:
        """Tiles for the query heads of a key head."""
        return math.ceil(self.group / self.row_heads)

    @property
    def row_tiles(self) -> int:
        """Tiles of rows of a key head, ordered by (time, head)."""
        return math.ceil(self.query_len / self.row_times) * self.head_tiles

    @property
    def key_tiles(self) -> int:
        return math.ceil(self.key_len / self.keys)

    @property
    def full_rows(self) -> bool:
        return (
            self.row_times * self.row_heads == self.rows
            and self.query_len % self.row_times == 0
            and self.group % self.row_heads == 0
        )

    @property
    def full_keys(self) -> bool:
        return self.key_len % self.keys == 0


def make_plan(
    operands: Operands, settings: Settings, kind: KernelKind, given: tuple[GPUTiles, ...] = ()
) -> TritonPlan:
    """The plan of one kernel of a call, with the given tiles if some are for it, else the default ones.

    Raises `NotImplementedError` if no tiles fit into shared memory, or the given ones do not, or for a mask
    or a score that the kernels do not compute.
    """
    score = score_of(operands, settings, TARGET)
    query, value = operands.query, operands.value
    batch, query_len, heads, width = query.shape
    _, key_len, kv_heads, value_width = value.shape
    group = heads // kv_heads
    pairs = pairs_of(operands, settings)
    need, chip = need_of(operands, settings, kind, score, pairs), target_chip()
    tiles = next((x for x in given if x.kind == kind), None)
    tiles = default_tiles(need, chip) if tiles is None else _no_larger(tiles, need, chip)
    if tiles is None:
        raise NotImplementedError(
            f"query: wanted widths whose tiles fit into {chip.memory >> 10} KiB of shared memory, "
            f"got {width} beside values of {value_width}"
        )
    row_heads = min(group, tiles.rows)
    plan = TritonPlan(
        settings,
        pairs,
        *(batch, query_len, key_len, kv_heads, group, width, value_width),
        *(tiles.rows // row_heads, row_heads, tiles.rows, tiles.keys),
        *(1, tiles.warps, tiles.stages, score),
    )
    kept, steps = plan.row_tiles, plan.key_tiles
    if kind == "key":
        kept, steps = steps, kept
    programs = batch * kv_heads * kept
    splits = min(tiles.programs // programs, steps // tiles.least_steps)
    return plan._replace(splits=max(splits, 1))


def need_of(
    operands: Operands,
    settings: Settings,
    kind: KernelKind,
    score: ScoreProgram | None,
    pairs: Pairwise | None,
) -> Need:
    query, key, value = operands.qkv
    width, value_width = power(query.shape[3]), power(value.shape[3])
    query_bytes = width * query.dtype.itemsize
    row_bytes = width * key.dtype.itemsize + value_width * value.dtype.itemsize
    moving = 2 if kind == "tangent" else 1
    # the tangent holds one sum, and products of rows and of their directions
    width_sum = width + value_width
    return Need(
        kind,
        power(query.shape[1] * (query.shape[2] // key.shape[2])),
        power(key.shape[1]),
        key.shape[0] * key.shape[2],
        moving * query_bytes if kind in ("forward", "tangent") else row_bytes,
        moving * row_bytes + 4 * _numbers(operands, settings, kind, pairs),
        0 if score is None else 4 * moving * len(score.sizes),
        {"forward": value_width, "query": width, "key": width_sum, "tangent": width_sum}[kind],
        max(query.dtype.itemsize, value.dtype.itemsize) > 2,
        score is not None,
        pairs is not None,
        operands.scales.key is not None,
    )


def _numbers(
    operands: Operands, settings: Settings, kind: KernelKind, pairs: Pairwise | None
) -> int:
    """The 32-bit numbers that a program loads beside each key, or row, that it iterates over."""
    compared = 0
    if pairs is not None:
        compared = pairs.of_queries if kind == "key" else pairs.of_keys
    segments = int(operands.tokens.key_segments is not None)
    placed = operands.tokens.key_positions is not None
    if settings.mask.constrains and (segments or pairs is not None):
        placed = True  # by `hide_unreachable`
    energies = 2 if kind == "key" else 0  # of rows, lse and delta
    scales = sum(x is not None for x in operands.scales)
    return compared + segments + int(placed) + energies + scales


def _no_larger(tiles: GPUTiles, need: Need, chip: GPUChip) -> GPUTiles:
    """Returns tiles that are no larger than the call; raises `NotImplementedError` unless they fit on the chip."""
    tiles = tiles._replace(rows=min(tiles.rows, need.rows), keys=min(tiles.keys, need.keys))
    sides = (tiles.keys, tiles.rows) if need.kind == "key" else (tiles.rows, tiles.keys)
    if not need.fitting(*sides, tiles.stages, chip):
        needed = need.memory(*sides, tiles.stages)
        raise NotImplementedError(
            f"tiles: wanted tiles of {need.kind!r} that fit into {chip.memory >> 10} KiB of shared memory, got "
            f"{tiles.rows} rows, {tiles.keys} keys and {tiles.stages} stages, which take {needed / 1024:.0f}"
        )
    return tiles
