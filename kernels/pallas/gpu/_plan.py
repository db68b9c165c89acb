"""How the GPU kernels cut a call into tiles and programs: shapes alone, nothing of Pallas."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from ...call._arguments import Operands, Settings, hide_unreachable
from ...call._mask import Interval, interval, must_meet
from .._rows import Visibility, block_spans, meeting_blocks, pad_to_blocks

# Shared memory of a multiprocessor that one program may take, in KiB, by compute capability; the
# rest is as small as the smallest. Where no GPU is at hand, programs are for the class of H100.
MEMORY = {"8.0": 163, "8.7": 163, "9.0": 227, "10.0": 227, "10.3": 227}
LEAST_MEMORY, HERE_WITHOUT = 99, "9.0"
# Tiles: what stays (rows in the forward pass), and what is walked over. Two warp groups multiply
# 128 by 128; backward there are twice as many operands and sums.
STILL, MOVING, MOVING_BACKWARD = 128, 128, 64
# Rows so few that reading keys is all that counts: four programs on each multiprocessor, of which
# each has three tiles on their way and is done with one long before.
FEW_ROWS, KEYS_OF_FEW_ROWS = 32, 32
# Float32 goes through no tensor cores but is multiplied out, an instruction for each 32 terms:
# larger tiles would only lengthen the program.
FLOAT32 = 16
LEAST = 16  # the smallest that tensor cores take
# Float32 sums in registers: more than this many go to twice the threads, and with more than four
# times as many, 128 in each thread, registers would be spilled.
SUMS = 8192
# Programs that fill a large chip: four for each of the 132 multiprocessors of an H100. Where tiles
# are fewer, programs share the walk of one, if each then has a few steps at least; but the parts of
# many rows are large, and not worth it unless some multiprocessor were idle.
PROGRAMS, LEAST_PROGRAMS = 4 * 132, 132
LEAST_WALK = 4


class Plan(NamedTuple):
    """What a kernel knows of a call when it is traced.

    The rows of a tile are `row_times` consecutive queries of `row_heads` of the query heads that
    share a key head, ordered as they lie in memory; what they do not fill of `rows` is idle.

    Attributes:
        settings: those of the call.
        batch, query_len, key_len, kv_heads, group: `B`, `T`, `S`, `K` and `N / K`.
        width, value_width: `H` and `Hv`.
        row_times, row_heads, rows, keys: the tiles of rows and of keys; the last two are powers
            of two.
        splits: how many programs share the walk over what a tile meets.
        warps, stages: threads of a program in units of 32, and steps that overlap.
    """

    settings: Settings
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

    @property
    def head_tiles(self) -> int:
        """Tiles that the heads of a key head make."""
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
    """The least power of two that a tile of `size` fits into. Raises nothing."""
    return max(LEAST, 1 << (size - 1).bit_length())


def make_plan(operands: Operands, settings: Settings, kind: str) -> Plan:
    """The plan of the kernel that computes the state ("forward"), `kind` "query" or "key" the
    gradients in the queries or in keys and values.

    Raises `NotImplementedError` if no tiles fit into shared memory.
    """
    query, _, value = operands[:3]
    batch, query_len, heads, width = query.shape
    _, key_len, kv_heads, value_width = value.shape
    group = heads // kv_heads
    wide, value_wide = power(width), power(value_width)
    query_bytes = wide * query.dtype.itemsize
    row_bytes = query_bytes + value_wide * value.dtype.itemsize
    still_bytes = query_bytes if kind == "forward" else row_bytes
    rows, keys = power(query_len * group), power(key_len)
    few = kind == "forward" and rows <= FEW_ROWS
    still, moving = STILL, MOVING if kind == "forward" else MOVING_BACKWARD
    if max(query.dtype.itemsize, value.dtype.itemsize) > 2:
        still = moving = FLOAT32
    if few:
        moving = min(moving, KEYS_OF_FEW_ROWS)
    still, moving = (
        (min(still, keys), min(moving, rows))
        if kind == "key"
        else (min(still, rows), min(moving, keys))
    )
    sums = {"forward": value_wide, "query": wide, "key": wide + value_wide}[kind]
    while still * sums > 4 * SUMS and still > LEAST:
        still //= 2
    # Triton holds as many tiles as there are stages where the products of warp groups read them
    # from shared memory, and one less where few rows go through those of single warps.
    held = 3 if few else 2
    memory = shared_memory() * 1024

    def needed() -> int:
        return still * still_bytes + held * moving * row_bytes

    while needed() > (memory // 4 if few else memory) and max(still, moving) > LEAST:
        still, moving = (still // 2, moving) if still > moving else (still, moving // 2)
    if needed() > memory:
        raise NotImplementedError(
            f"query: wanted widths of which tiles fit into {memory >> 10} KiB of shared memory, "
            f"got {width} beside values of {value_width}"
        )
    rows, keys = (moving, still) if kind == "key" else (still, moving)
    row_heads = min(group, rows)
    found = Plan(
        settings,
        *(batch, query_len, key_len, kv_heads, group, width, value_width),
        *(rows // row_heads, row_heads, rows, keys),
        *(1, 8 if still * sums > SUMS else 4, 4 if few else 2),
    )
    tiles, walk = found.row_tiles, found.key_tiles
    if kind == "key":
        tiles, walk = walk, tiles
    programs = batch * kv_heads * tiles
    if programs >= LEAST_PROGRAMS and not few:
        return found
    return found._replace(splits=max(min(PROGRAMS // programs, walk // LEAST_WALK), 1))


def shared_memory() -> int:
    """What a program may take on the GPU at hand, in KiB. Raises nothing."""
    capability = getattr(jax.devices()[0], "compute_capability", HERE_WITHOUT)
    return MEMORY.get(capability, LEAST_MEMORY)


def visibility_of(operands: Operands, plan: Plan) -> Visibility:
    """Positions and segments of queries and of keys, filled up to whole tiles.

    Without segments, kernels count positions that are not given by themselves. Raises nothing.
    """
    if operands.query_positions is not None or operands.query_segments is not None:
        operands = hide_unreachable(operands, plan.settings)

    def fill(x: Array | None, tile: int, value: int) -> Array | None:
        return None if x is None else pad_to_blocks(x, 1, tile, value)

    return Visibility(
        fill(operands.query_positions, plan.row_times, -1),
        fill(operands.key_positions, plan.keys, -1),
        fill(operands.query_segments, plan.row_times, 0),
        fill(operands.key_segments, plan.keys, 0),
    )


def tile_ranges(
    visibility: Visibility, plan: Plan, *, of_keys: bool
) -> Int[Array, "4 b tiles"] | None:
    """What each tile of queries, or of keys, walks over; None without visibility.

    First and one past the last tile that it might meet; and first and one past the last of a run
    of them in which every row that is there sees every key. Raises nothing.
    """
    meets = meeting_blocks(visibility, plan.settings, plan.row_times, plan.keys)
    if meets is None:
        return None
    whole = jnp.broadcast_to(_whole(visibility, plan), meets.shape)
    if of_keys:
        meets, whole = meets.swapaxes(1, 2), whole.swapaxes(1, 2)
    first = whole.argmax(-1).astype(jnp.int32)
    after = jnp.arange(whole.shape[-1], dtype=jnp.int32)[None, None, :] >= first[..., None]
    broken = ~whole & after
    stop = jnp.where(broken.any(-1), broken.argmax(-1), whole.shape[-1]).astype(jnp.int32)
    found = jnp.stack([*block_spans(meets), first, jnp.where(whole.any(-1), stop, first)])
    # rows are in as many tiles as their heads make
    return found * plan.head_tiles if of_keys else found


def _whole(visibility: Visibility, plan: Plan) -> Bool[Array, "b row_tiles key_tiles"]:
    """In which pairs of tiles all rows that are there see all keys."""
    query_len, keys = plan.row_times, plan.keys
    whole = jnp.arange(plan.key_tiles, dtype=jnp.int32) < plan.key_len // keys
    whole = whole[None, None, :]
    if visibility.row_positions is not None and visibility.key_positions is not None:
        of_rows = interval(_tiles(visibility.row_positions, query_len))
        whole &= must_meet(
            plan.settings.rule, *_facing(of_rows, _ends(visibility.key_positions, keys))
        )
    if visibility.row_segments is not None and visibility.key_segments is not None:
        of_rows, of_keys = _facing(
            _ends(visibility.row_segments, query_len), _ends(visibility.key_segments, keys)
        )
        # low <= high: then all four are equal
        whole &= (of_rows.low == of_keys.high) & (of_rows.high == of_keys.low)
    return whole


def _tiles(x: Array, tile: int) -> Array:
    return x.reshape(len(x), -1, tile)


def _ends(x: Array, tile: int) -> Interval:
    x = _tiles(x, tile)
    return Interval(x.min(-1), x.max(-1))


def _facing(rows: Interval, keys: Interval) -> tuple[Interval, Interval]:
    return Interval(*(x[:, :, None] for x in rows)), Interval(*(x[:, None, :] for x in keys))
