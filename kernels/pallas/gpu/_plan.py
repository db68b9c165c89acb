"""How the GPU kernels cut a call into tiles and programs, by shapes alone; without Pallas."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from ...call._operands import Operands, Settings, bound, hide_unreachable
from ...masks._abstract import AbstractMask
from ...masks._interval import Interval, interval
from ...masks._pairwise import Features, Pairwise
from ...masks._visibility import must_meet
from .._rows import (
    BlockList,
    Visibility,
    block_list,
    block_spans,
    features_of,
    meeting_blocks,
    pad_to_blocks,
    pairs_of,
)
from .._score import score_of
from .._score_program import ScoreProgram, Target

# Shared memory that one program may take of a multiprocessor, in KiB, by compute capability; other
# GPUs get the smallest. Without a GPU at hand, programs are for the class of H100.
MEMORY = {"8.0": 163, "8.7": 163, "9.0": 227, "10.0": 227, "10.3": 227}
LEAST_MEMORY, DEFAULT_CAPABILITY = 99, "9.0"
# With so few rows, reading keys is all that counts: four programs on each multiprocessor, each with
# three tiles on their way.
FEW_ROWS, KEYS_OF_FEW_ROWS = 32, 32
LEAST = 16  # the smallest tile that tensor cores take
# Float32 sums in registers: more than this many go to twice the threads. With more than four times
# as many, 128 in each thread, registers would be spilled.
SUMS = 8192
# Parts of many rows are large: their keys are split only if some multiprocessor would be idle.
LEAST_PROGRAMS = 132
# What Triton has, in all versions of JAX, for a score and its derivatives (1 - x² in them since JAX 0.12).
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


class TileSizes(NamedTuple):
    """How large tiles may be, and how many programs a call is split into; static.

    Attributes:
        own: the tile that a program keeps: rows, or keys in the backward of keys. Two warp groups
            multiply 128 by 128.
        other: a tile that it iterates over, in the forward pass.
        other_backward: the same in the backward, which has twice as many operands and sums.
        float32: all of these, in float32. Tensor cores do not take it, and each 32 terms of a product are
            an instruction of their own: larger tiles would only lengthen the program.
        programs: how many fill a large chip: four for each of the 132 multiprocessors of an H100.
            Where tiles are fewer, several programs share the iteration of one.
        least_steps: the steps that each of them has at least.
    """

    own: int = 128
    other: int = 128
    other_backward: int = 64
    float32: int = 16
    programs: int = 4 * 132
    least_steps: int = 4


TILE_SIZES = TileSizes()


class Plan(NamedTuple):
    """The static properties of a call and its tiles.

    The rows of a tile are `row_times` consecutive queries of `row_heads` of the query heads that
    share a key head, in memory order; the rest of `rows` is idle.

    Attributes:
        settings: those of the call.
        pairs: its rule for tiles, unless its sides tell it.
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
        """Tiles of keys."""
        return math.ceil(self.key_len / self.keys)

    @property
    def full_rows(self) -> bool:
        """Whether no tile has idle rows."""
        return (
            self.row_times * self.row_heads == self.rows
            and self.query_len % self.row_times == 0
            and self.group % self.row_heads == 0
        )

    @property
    def full_keys(self) -> bool:
        """Whether all tiles of keys are full."""
        return self.key_len % self.keys == 0


def power(size: int) -> int:
    """The least power of two that holds `size`."""
    return max(LEAST, 1 << (size - 1).bit_length())


def make_plan(
    operands: Operands, settings: Settings, kind: str, sizes: TileSizes = TILE_SIZES
) -> Plan:
    """The plan of one kernel of a call.

    `kind` is "forward" for the kernel of the state, "query" for that of the gradient in the queries,
    "key" for that of the gradients in keys and values, "tangent" for that of the state's derivative
    in a direction, whose arrays take as much memory again.

    Raises `NotImplementedError` if no tiles fit into shared memory, or for a rule or a score that tiles
    do not tell.
    """
    score = score_of(operands, settings, TARGET)
    query, _, value = operands[:3]
    batch, query_len, heads, width = query.shape
    _, key_len, kv_heads, value_width = value.shape
    group = heads // kv_heads
    wide, value_wide = power(width), power(value_width)
    query_bytes = wide * query.dtype.itemsize
    row_bytes = query_bytes + value_wide * value.dtype.itemsize
    of_state, moving = kind in ("forward", "tangent"), 2 if kind == "tangent" else 1
    own_bytes = moving * query_bytes if of_state else row_bytes
    rows, keys = power(query_len * group), power(key_len)
    few = of_state and rows <= FEW_ROWS
    own, other = sizes.own, sizes.other if kind == "forward" else sizes.other_backward
    if score is not None and kind == "key":
        other //= 2  # beside weights, what the score's derivative is of
    float32 = max(query.dtype.itemsize, value.dtype.itemsize) > 2
    if float32:
        own = other = sizes.float32
    if few:
        other = min(other, KEYS_OF_FEW_ROWS)
    own, other = (
        (min(own, keys), min(other, rows)) if kind == "key" else (min(own, rows), min(other, keys))
    )
    # that of the tangent holds one sum, and products of rows and of their directions
    both = wide + value_wide
    sums = {"forward": value_wide, "query": wide, "key": both, "tangent": both}[kind]
    while own * sums > 4 * SUMS and own > LEAST:
        own //= 2
    # Triton holds a tile for each stage where the products of warp groups read them from shared
    # memory, and one less where few rows go through products of single warps.
    held = 3 if few else 2
    memory = shared_memory() * 1024
    tables = 0 if score is None else moving * len(score.sizes)

    def needed() -> int:
        entries = tables * own * other * 4  # of tables, which are loaded ahead as keys are
        return own * own_bytes + held * (other * moving * row_bytes + entries)

    while needed() > (memory // 4 if few else memory) and max(own, other) > LEAST:
        own, other = (own // 2, other) if own > other else (own, other // 2)
    if needed() > memory:
        raise NotImplementedError(
            f"query: wanted widths whose tiles fit into {memory >> 10} KiB of shared memory, "
            f"got {width} beside values of {value_width}"
        )
    # three products over the width at once, each a long run of instructions in float32
    many = own * sums > SUMS or (float32 and kind == "tangent")
    rows, keys = (other, own) if kind == "key" else (own, other)
    row_heads = min(group, rows)
    found = Plan(
        settings,
        pairs_of(operands, settings),
        *(batch, query_len, key_len, kv_heads, group, width, value_width),
        *(rows // row_heads, row_heads, rows, keys),
        *(1, 8 if many else 4, 4 if few else 2, score),
    )
    tiles, steps = found.row_tiles, found.key_tiles
    if kind == "key":
        tiles, steps = steps, tiles
    programs = batch * kv_heads * tiles
    if programs >= LEAST_PROGRAMS and not few:
        return found
    return found._replace(
        splits=max(min(sizes.programs // programs, steps // sizes.least_steps), 1)
    )


def shared_memory() -> int:
    """The shared memory that a program may take on the GPU at hand, in KiB."""
    capability = getattr(jax.devices()[0], "compute_capability", DEFAULT_CAPABILITY)
    return MEMORY.get(capability, LEAST_MEMORY)


def visibility_of(operands: Operands, plan: Plan) -> Visibility:
    """Positions and segments of queries and of keys, padded to whole tiles.

    Positions that are not given stay None: kernels count them.
    """
    tokens = operands.query_positions, operands.query_segments, plan.pairs
    if any(x is not None for x in tokens):
        operands = hide_unreachable(operands, plan.settings)
    features = features_of(operands, plan.pairs)

    def fill(x: Array | None, tile: int, value: int) -> Any:
        return None if x is None else pad_to_blocks(x, 1, tile, value)

    return Visibility(
        fill(operands.query_positions, plan.row_times, -1),
        fill(operands.key_positions, plan.keys, -1),
        fill(operands.query_segments, plan.row_times, 0),
        fill(operands.key_segments, plan.keys, 0),
        Features(
            tuple(fill(x, plan.row_times, 0) for x in features.queries),
            tuple(fill(x, plan.keys, 0) for x in features.keys),
        ),
    )


def tile_ranges(
    operands: Operands, visibility: Visibility, plan: Plan, *, of_keys: bool
) -> Int[Array, "4 b tiles"] | BlockList | None:
    """The range of tiles that each tile of queries, or of keys, iterates over; None without arrays.

    First and one past the last tile that it might see; then first and one past the last of a run of
    them that needs no mask, because every present row sees every key. Under a rule that its sides do
    not tell, a list of tiles, in numbers of tiles of queries.
    """
    rule = bound(plan.settings, operands)
    meets = meeting_blocks(visibility, rule, plan.row_times, plan.keys)
    if meets is None:
        return None
    whole = jnp.broadcast_to(_whole(visibility, rule, plan), meets.shape)
    if of_keys:
        meets, whole = meets.swapaxes(1, 2), whole.swapaxes(1, 2)
    if plan.pairs is not None:
        return block_list(meets, whole)
    first = whole.argmax(-1).astype(jnp.int32)
    after = jnp.arange(whole.shape[-1], dtype=jnp.int32)[None, None, :] >= first[..., None]
    broken = ~whole & after
    stop = jnp.where(broken.any(-1), broken.argmax(-1), whole.shape[-1]).astype(jnp.int32)
    found = jnp.stack([*block_spans(meets), first, jnp.where(whole.any(-1), stop, first)])
    # the same queries are in a tile for each group of heads
    return found * plan.head_tiles if of_keys else found


def _whole(
    visibility: Visibility, rule: AbstractMask, plan: Plan
) -> Bool[Array, "b row_tiles key_tiles"]:
    """The pairs of tiles in which all present rows see all keys."""
    query_len, keys = plan.row_times, plan.keys
    whole = jnp.arange(plan.key_tiles, dtype=jnp.int32) < plan.key_len // keys
    whole = whole[None, None, :]
    if visibility.row_positions is not None and visibility.key_positions is not None:
        of_rows = interval(_tiles(visibility.row_positions, query_len))
        of_keys = _ends(visibility.key_positions, keys)
        whole &= must_meet(rule, *_facing(of_rows, of_keys))
    if visibility.row_segments is not None and visibility.key_segments is not None:
        of_rows, of_keys = _facing(
            _ends(visibility.row_segments, query_len), _ends(visibility.key_segments, keys)
        )
        # as low <= high, all four are then equal
        whole &= (of_rows.low == of_keys.high) & (of_rows.high == of_keys.low)
    return whole


def _tiles(x: Array, tile: int) -> Array:
    return x.reshape(len(x), -1, tile)


def _ends(x: Array, tile: int) -> Interval:
    x = _tiles(x, tile)
    return Interval(x.min(-1), x.max(-1))


def _facing(rows: Interval, keys: Interval) -> tuple[Interval, Interval]:
    return Interval(*(x[:, :, None] for x in rows)), Interval(*(x[:, None, :] for x in keys))
