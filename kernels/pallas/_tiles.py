"""Plans of calls on GPUs, the index of a program, the tiles that it visits, and products of tiles."""

import dataclasses
import functools
import math
import operator
from typing import Any, NamedTuple, TypeVar

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from ..call._operands import Operands, Settings, bound, hide_unreachable
from ..masks._structure import Pairwise
from ._rows import (
    BlockList,
    Visibility,
    block_list,
    block_run,
    block_spans,
    features_of,
    meeting_blocks,
    open_blocks,
    padded_visibility,
)

LOG2_E = float(np.log2(np.e))  # kernels keep scores in bits: the hardware has exp2 only


@dataclasses.dataclass(frozen=True, kw_only=True)
class TilePlan:
    """Static properties of a call, and the tiles of one of its kernels.

    A program holds a tile of rows and iterates over tiles of keys, or holds keys and iterates over rows.
    """

    settings: Settings
    pairs: Pairwise | None = None  # the mask, unless that is a window
    batch: int
    query_len: int
    key_len: int
    kv_heads: int
    group: int  # query heads that share a key head
    width: int
    value_width: int
    row_times: int  # consecutive queries in a row tile
    keys: int  # keys in a key tile
    stages: int = 2  # steps of the loop that overlap
    splits: int = 1  # programs that share the loop of one tile

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def head_tiles(self) -> int:
        """Number of tiles for the query heads of a key head, if a tile holds rows of several heads."""
        return 1

    @property
    def row_tiles(self) -> int:
        return math.ceil(self.query_len / self.row_times) * self.head_tiles

    @property
    def key_tiles(self) -> int:
        return math.ceil(self.key_len / self.keys)


Plan = TypeVar("Plan", bound=TilePlan)


def split(plan: Plan, kept: int, steps: int, programs: int, least_steps: int) -> Plan:
    """Returns the plan with each loop of `steps` split if the `kept` tiles are fewer than `programs`."""
    splits = min(programs // kept, steps // least_steps)
    return dataclasses.replace(plan, splits=max(splits, 1))


def sizes_of(operands: Operands) -> dict[str, Any]:
    """Returns the fields of a plan that are sizes of the call."""
    batch, query_len, heads, width = operands.query.shape
    _, key_len, kv_heads, value_width = operands.value.shape
    sizes = {"batch": batch, "query_len": query_len, "key_len": key_len, "kv_heads": kv_heads}
    return sizes | {"group": heads // kv_heads, "width": width, "value_width": value_width}


def visibility_of(operands: Operands, plan: TilePlan) -> Visibility:
    """Positions and segments of queries and of keys, padded to whole tiles.

    Positions that are None stay None: the kernels then count from 0.
    """
    compared = operands.tokens.query_positions, operands.tokens.query_segments, plan.pairs
    if any(x is not None for x in compared):
        operands = hide_unreachable(operands, plan.settings)
    return padded_visibility(operands, features_of(operands, plan.pairs), plan.row_times, plan.keys)


def tile_ranges(
    operands: Operands, visibility: Visibility, plan: TilePlan, *, of_keys: bool
) -> Int[Array, "4 b tiles"] | BlockList | None:
    """The range of tiles that each tile of queries, or of keys, iterates over; None without arrays.

    The four numbers are the first and one past the last tile that it might see, then the first and one
    past the last of a run of tiles in which every present row sees every key, so that no mask is
    needed. Under a mask that is not a window, returns a `BlockList` of tiles of queries.
    """
    mask = bound(plan.settings, operands)
    may_meet = meeting_blocks(visibility, mask, plan.row_times, plan.keys)
    if may_meet is None:
        return None
    all_visible = jnp.arange(plan.key_tiles, dtype=jnp.int32) < plan.key_len // plan.keys
    all_visible = all_visible[None, None, :]
    all_seen = open_blocks(visibility, mask, plan.row_times, plan.keys)
    all_visible = all_visible if all_seen is None else all_visible & all_seen
    all_visible = jnp.broadcast_to(all_visible, may_meet.shape)
    if of_keys:
        may_meet, all_visible = may_meet.swapaxes(1, 2), all_visible.swapaxes(1, 2)
    if plan.pairs is not None:
        return block_list(may_meet, all_visible)
    ranges = jnp.stack([*block_spans(may_meet), *block_run(all_visible)])
    # each tile of queries occurs once for every tile of heads
    return ranges * plan.head_tiles if of_keys else ranges


class TileIndex(NamedTuple):
    tile: Array
    head: Array
    batch: Array
    split: Array


def tile_index(
    plan: TilePlan, program: Array, tiles: int, heads: int, *, last_first: bool
) -> TileIndex:
    """Returns the index of a program; tiles vary fastest, `last_first` if the last ones see the most keys."""
    i, tile = divide(program, tiles)
    i, head = divide(i, heads)
    split, batch = divide(i, plan.batch)
    return TileIndex(tiles - 1 - tile if last_first else tile, head, batch, split)


def divide(x: Array, size: int) -> tuple[Array, Array]:
    """Returns quotients and remainders of non-negative numbers."""
    if size == 1:
        return x, jnp.zeros_like(x)
    quotient = lax.div(x, lax.full_like(x, size))
    return quotient, x - quotient * size


class Bounds(NamedTuple):
    """The tiles of a loop, `first` to `stop`, and among them a run, `begin` to `end`, that needs no mask."""

    first: Any
    stop: Any
    begin: Any
    end: Any


def counted_bounds(plan: TilePlan, tile: Array, *, of_keys: bool) -> Bounds:
    """Returns the tiles that a tile sees by the mask alone, with positions that count from 0.

    The bounds are NumPy numbers if they are static.
    """
    sides = (plan.row_times, plan.query_len), (plan.keys, plan.key_len)
    (kept_block, kept_len), (block, length) = sides[::-1] if of_keys else sides
    unit = plan.head_tiles if of_keys else 1
    if not plan.settings.mask.constrains:
        # rows mask the keys that pad the last tile; keys need not mask the rows that do
        all_visible = -(-length // block) if of_keys else length // block
        known = 0, -(-length // block), 0, all_visible
        return Bounds(*(np.int32(unit * x) for x in known))
    # a query sees the keys of a window around it, and a key is seen by those of its reflection
    left, right = (min(side, kept_len + length) for side in plan.settings.mask.window)
    if of_keys:
        left, right = right, left
    least, most = tile * kept_block, jnp.minimum((tile + 1) * kept_block, kept_len) - 1
    first, _ = divide(jnp.maximum(least - left, 0), block)
    stop, _ = divide(jnp.minimum(most + right + 1, length) + (block - 1), block)
    begin, _ = divide(jnp.maximum(most - left, 0) + (block - 1), block)
    end, _ = divide(jnp.minimum(least + right + 1, length), block)
    return Bounds(*(unit * x for x in (jnp.minimum(first, stop), stop, begin, end)))


def split_bounds(plan: TilePlan, bounds: Bounds, split: Array) -> Bounds:
    first, stop, begin, end = bounds
    if plan.splits > 1:
        # the same number of consecutive tiles for each program, fewer for the last
        steps, _ = divide(jnp.asarray(stop - first + (plan.splits - 1), jnp.int32), plan.splits)
        first = first + split * steps
        stop = jnp.minimum(first + steps, stop)
    if not isinstance(first, np.integer):
        # the run is within the part, even if either is empty
        begin = jnp.minimum(jnp.maximum(begin, first), jnp.maximum(first, stop))
        end = jnp.maximum(jnp.minimum(end, stop), begin)
    return Bounds(first, stop, begin, end)


def batch_of(x: Any, index: TileIndex, axis: int = 0) -> Any:
    """Returns the batch index for an array whose batch axis may be 1."""
    return 0 if x.shape[axis] == 1 else index.batch


def dot(a: Array, b: Array, over: tuple[int, int]) -> Float[Array, "i j"]:
    """Returns the product of two tiles over an axis of each, summed in float32.

    If one tile is float32 and the other bfloat16 (cotangents and weights), the first is split exactly into three
    bfloat16 tiles of 8 bits each: three 16-bit products are much faster than one in float32.
    """
    kinds = {x.dtype.name for x in (a, b)}
    if kinds == {"bfloat16", "float32"}:
        wide, narrow = (a, b) if a.dtype == jnp.float32 else (b, a)
        # x = a + b + c of 8 bits each: x y = c y + b y + a y.
        # 0 · inf is NaN and smaller parts may be 0, so only the last, largest part multiplies non-finite entries
        finite = jnp.where(jnp.abs(narrow.astype(jnp.float32)) < jnp.inf, narrow, 0)
        pairs = zip(_thirds(wide), (finite, finite, narrow), strict=True)
        parts = (dot(x, y, over) if wide is a else dot(y, x, over) for x, y in pairs)
        return functools.reduce(operator.add, parts)
    if len(kinds) > 1:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    axes = ((over[0],), (over[1],)), ((), ())
    return lax.dot_general(a, b, axes, precision, jnp.float32)


def _thirds(x: Array) -> list[Array]:
    parts = []
    for _ in range(3):
        bits = lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(-(1 << 16))
        part = lax.bitcast_convert_type(bits, jnp.float32)
        parts.insert(0, part.astype(jnp.bfloat16))
        x = jnp.where(jnp.abs(x) == jnp.inf, 0.0, x - part)
    return parts
