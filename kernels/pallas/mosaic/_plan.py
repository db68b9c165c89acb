"""How the Hopper kernels cut a call into tiles and programs, by shapes alone; without Pallas."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from ...call._operands import Operands, Settings, with_default_positions
from ...call._state import AttentionState

ROWS = 64  # the rows that one group of warps multiplies at a time
# Bytes of shared memory that tiles may take, of 227 KiB that a program may take of a multiprocessor:
# the rest is for barriers, and for sums over the warps of a group.
SHARED = 225 * 1024


@dataclasses.dataclass(frozen=True)
class TileSizes:
    """How large tiles are, and how many programs a call is split into; static.

    Attributes:
        consumers: the warp groups of a program that compute, each on 64 rows of its own.
        keys: the keys of a tile at most, in the forward pass.
        keys_backward: the same in the backward and the tangent, which hold more.
        stages: the tiles of keys that are on their way or in use at most.
        stages_of_few: the same for programs of one consumer, which are bound by memory.
        programs: how many fill a chip: one for each of the 132 multiprocessors of an H100. Where tiles
            of rows are fewer, several programs share the keys of one.
        least_steps: the tiles of keys that each of them has at least.
    """

    consumers: int = 2
    keys: int = 128
    keys_backward: int = 64
    stages: int = 2
    stages_of_few: int = 5
    programs: int = 132
    least_steps: int = 4


TILE_SIZES = TileSizes()


class Plan(NamedTuple):
    """The static properties of a call and its tiles.

    Attributes:
        settings: those of the call.
        packed: whether the queries that share a key head are rows of one head, which is so where they
            are few: a tile then reads each key once for all of them.
        batch, query_len, key_len: `B`, `T` and `S`, of the packed call.
        heads, kv_heads: `N` and `K`, likewise.
        width, value_width: `H` and `Hv`.
        consumers: the warp groups that compute, each on 64 rows, which are successive queries of a head.
        keys, stages: the tile of keys, and how many are in shared memory.
        splits: how many programs share the keys of a tile of rows.
    """

    settings: Settings
    packed: bool
    batch: int
    query_len: int
    key_len: int
    heads: int
    kv_heads: int
    width: int
    value_width: int
    consumers: int
    keys: int
    stages: int
    splits: int = 1

    # what `tile_ranges` and `visibility_of` read besides
    pairs: None = None
    head_tiles: int = 1

    @property
    def group(self) -> int:
        """The heads of queries of a key head."""
        return self.heads // self.kv_heads

    @property
    def row_times(self) -> int:
        """The rows of a program."""
        return ROWS * self.consumers

    @property
    def row_tiles(self) -> int:
        """Tiles of rows of a head."""
        return math.ceil(self.query_len / self.row_times)

    @property
    def key_tiles(self) -> int:
        """Tiles of keys."""
        return math.ceil(self.key_len / self.keys)


def make_plan(operands: Operands, settings: Settings, sizes: TileSizes = TILE_SIZES) -> Plan:
    """The plan of the forward pass of a call.

    Raises `NotImplementedError` for widths whose tiles do not fit on the chip.
    """
    query, _, value = operands[:3]
    batch, query_len, heads, width = query.shape
    _, key_len, kv_heads, value_width = value.shape
    check_widths(width, value_width)
    packed = heads > kv_heads and query_len < ROWS * sizes.consumers
    if packed:
        query_len, heads = query_len * (heads // kv_heads), kv_heads
    consumers = 1 if query_len <= ROWS else sizes.consumers
    # sums and scores are in registers, half a number of each column in each thread
    keys = min(sizes.keys, ROWS if consumers == 1 or value_width > 128 else 128)
    stages = sizes.stages_of_few if consumers == 1 else sizes.stages
    itemsize = value.dtype.itemsize
    own = consumers * ROWS * (width * itemsize + chunk(value_width) * 4)  # results in float32
    key_bytes = (width + value_width) * itemsize
    while keys > ROWS and own + 2 * keys * key_bytes > SHARED:
        keys //= 2
    stages = fitting(own, keys * key_bytes, stages)
    found = Plan(
        *(settings, packed, batch, query_len, key_len, heads, kv_heads, width, value_width),
        *(consumers, keys, stages),
    )
    programs = batch * heads * found.row_tiles
    if programs >= sizes.programs:
        return found
    return found._replace(
        splits=max(min(sizes.programs // programs, found.key_tiles // sizes.least_steps), 1)
    )


def check_widths(width: int, value_width: int) -> None:
    """Declines widths that the instructions for copies and products do not take."""
    for name, size, most in (("query", width, 512), ("value", value_width, 256)):
        if size % 16 or size > most:
            raise NotImplementedError(
                f"{name}: wanted a width that 16 divides, of at most {most}, got {size}"
            )


def fitting(held: int, step: int, most: int) -> int:
    """How many tiles of `step` bytes fit into shared memory beside `held` bytes: 2 to `most`.

    Raises `NotImplementedError` if two do not.
    """
    stages = min((SHARED - held) // step, most)
    if stages < 2:
        raise NotImplementedError(
            f"query: wanted widths whose tiles fit into {SHARED >> 10} KiB of shared memory, "
            f"got {held} bytes of rows beside {step} of keys and values"
        )
    return stages


def chunk(width: int) -> int:
    """The columns of a result that leave through shared memory at a time."""
    return math.gcd(width, 64)


def pack_heads(operands: Operands, settings: Settings) -> Operands:
    """The operands with the queries that share a key head as rows of one head, in order (time, head).

    Positions and segments are repeated.
    """
    query, key = operands[:2]
    batch, query_len, heads, width = query.shape
    kv_heads = key.shape[2]
    group = heads // kv_heads
    operands = with_default_positions(operands, settings)

    def rows(x: Array | None) -> Any:
        return None if x is None else jnp.repeat(x, group, axis=1)

    query = query.reshape(batch, query_len, kv_heads, group, width).swapaxes(2, 3)
    return operands._replace(
        query=query.reshape(batch, query_len * group, kv_heads, width),
        query_positions=rows(operands.query_positions),
        query_segments=rows(operands.query_segments),
    )


def unpack_heads(state: AttentionState, operands: Operands) -> AttentionState:
    """The state of operands of the state of their packed form."""
    batch, query_len, heads, _ = operands.query.shape
    kv_heads = operands.key.shape[2]

    def heads_apart(x: Array) -> Array:
        rest = x.shape[3:]
        x = x.reshape(batch, query_len, heads // kv_heads, kv_heads, *rest).swapaxes(2, 3)
        return x.reshape(batch, query_len, heads, *rest)

    return AttentionState(*map(heads_apart, state))
