"""The mosaic_gpu implementation: kernels for Hopper GPUs, in Pallas on Mosaic GPU, and the plans of their calls."""

import dataclasses
import math
from collections.abc import Container
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from ...call._kernel import AbstractKernel, check_capability, check_operands, cuda_version
from ...call._operands import KernelCall, Operands, Settings, hide_unreachable, zero_absent
from ...call._state import AttentionState
from ...masks._structure import WINDOWS
from ...xla._blockwise import Blockwise
from .._rows import moving_arrays, pad_to_blocks
from .._tiles import TilePlan, sizes_of, split

_DTYPES = ("float16", "bfloat16")
# CUDA's compiler miscompiles loops with masks in these versions of the runtime, 12.8.0 to 12.9; see
# `jax.experimental.pallas.ops.gpu.attention_mgpu`, which refuses them.
_MISCOMPILED = range(12080, 12091)
PREFERRED_ROWS = 256
ROWS = 64  # the rows that one group of warps multiplies at a time
# Bytes of shared memory for tiles, of the 227 KiB that a program may use; the rest is for barriers, and for
# sums over the warps of a group.
SHARED = 225 * 1024
# The registers of a thread for the tiles of a gradient, where one group of warps computes and where two do.
# The rest, of 255 and of 168, is for addresses, masks and numbers of rows: CUDA 13 ignores `set_max_registers`, which
# would move registers between the groups (https://github.com/NVIDIA/cutlass/issues/3406: C7508).
REGISTERS, REGISTERS_OF_TWO = 208, 144
# The keys or rows of a step of a gradient; the least that products of rows of 128 bytes take.
STEP = 64
NUMBERS = 8  # the bytes of a row's lse and delta in the backward


@dataclasses.dataclass(frozen=True)
class MosaicSizes:
    """Sizes of tiles, and the number of programs that a call is split into; static."""

    consumers: int = 2  # warp groups of a program that compute, each on 64 rows of its own
    keys: int = 128  # of a tile at most, in the forward pass
    stages: int = 2  # most tiles of keys in flight or in use
    stages_backward: int = 4  # the same for keys or rows in the backward
    stages_of_few: int = 5  # the same for programs of one consumer, which are bound by memory
    # Programs that fill a chip, one for each of the 132 multiprocessors of an H100. Where there are fewer tiles of
    # rows, several programs share the keys of a tile, `least_steps` tiles of keys or more each.
    programs: int = 132
    least_steps: int = 4


TILE_SIZES = MosaicSizes()


@dataclasses.dataclass(frozen=True, kw_only=True)
class MosaicPlan(TilePlan):
    """A plan whose programs have several groups of warps that compute, each on 64 rows of one head.

    They compute on 64 keys in the dK and dV kernel. The tiles of a program are shared by its groups, and those that it
    iterates over are copied: `stages` of them are in shared memory. Sizes are those of the packed call.
    """

    # whether queries that share a key head are rows of one head, as they are where rows are few: a tile then reads
    # each key once for all of them
    packed: bool
    consumers: int  # the warp groups that compute

    def hides(self, key_positions: Any) -> bool:
        """Whether there may be keys that no row of the call sees, whose values may be NaN."""
        mask = self.settings.mask
        return key_positions is not None or self.key_len > self.query_len + mask.window[1]


def make_plan(
    operands: Operands, settings: Settings, sizes: MosaicSizes = TILE_SIZES
) -> MosaicPlan:
    """Returns the plan of the forward kernel."""
    plan = _rows_plan(operands, settings, sizes)
    value_width = plan.value_width
    # sums and scores are in registers: each thread has half a number for every column
    if value_width > 128:
        plan = dataclasses.replace(plan, consumers=1, row_times=ROWS)
    single = plan.consumers == 1
    keys = min(sizes.keys, ROWS if single else 128)
    itemsize = operands.value.dtype.itemsize
    bytes_per_row = plan.width * itemsize + chunk(value_width) * 4  # results in float32
    row_bytes, bytes_per_key = plan.row_times * bytes_per_row, (plan.width + value_width) * itemsize
    while keys > ROWS and row_bytes + 2 * keys * bytes_per_key > SHARED:
        keys //= 2
    most = sizes.stages_of_few if single else sizes.stages
    stages = fitting(row_bytes, keys * bytes_per_key, most)
    return _split(dataclasses.replace(plan, keys=keys, stages=stages), sizes)


def query_plan(
    operands: Operands, settings: Settings, sizes: MosaicSizes = TILE_SIZES
) -> MosaicPlan:
    """Returns the plan of the dQ kernel."""
    plan = _rows_plan(operands, settings, sizes)
    bytes_per_key = (plan.width + plan.value_width) * operands.value.dtype.itemsize
    most = _consumers(sizes, plan.width)
    return _over_keys(plan, sizes, most, bytes_per_key + chunk(plan.width) * 4, bytes_per_key)


def tangent_plan(
    operands: Operands, settings: Settings, moving: Container[str], sizes: MosaicSizes = TILE_SIZES
) -> MosaicPlan:
    """Returns the plan of the tangent kernel, for directions of the operands named in `moving`."""
    plan = _rows_plan(operands, settings, sizes)
    width, value_width = plan.width, plan.value_width
    itemsize = operands.value.dtype.itemsize
    bytes_per_row = (1 + ("query" in moving)) * width * itemsize + chunk(value_width) * 4
    widths = width, value_width * scores_move(moving)
    widths += width * ("key" in moving), value_width * ("value" in moving)
    # rows wider than 128 leave neither the memory nor the registers for a second group
    excess = max(width - 128, 0)
    most = min(_consumers(sizes, value_width + excess // 4), 1 if excess else sizes.consumers)
    return _over_keys(plan, sizes, most, bytes_per_row, sum(widths) * itemsize)


def scores_move(moving: Container[str]) -> bool:
    return "query" in moving or "key" in moving


def key_plan(operands: Operands, settings: Settings, sizes: MosaicSizes = TILE_SIZES) -> MosaicPlan:
    """Returns the plan of the dK and dV kernel."""
    plan = _rows_plan(operands, settings, sizes)
    width, value_width, itemsize = plan.width, plan.value_width, operands.value.dtype.itemsize
    most = 1 if plan.key_len <= ROWS else sizes.consumers
    consumers = min(most, _consumers(sizes, width + value_width))
    bytes_per_key = (width + value_width) * itemsize
    stages = _stages(sizes, consumers * ROWS * bytes_per_key, bytes_per_key + NUMBERS)
    return dataclasses.replace(
        plan, consumers=consumers, row_times=STEP, keys=consumers * ROWS, stages=stages
    )


def _over_keys(
    plan: MosaicPlan, sizes: MosaicSizes, consumers: int, bytes_per_row: int, bytes_per_key: int
) -> MosaicPlan:
    """A plan whose programs iterate over keys, by the bytes of shared memory of a row and of a key."""
    consumers = min(plan.consumers, consumers)
    rows = consumers * ROWS
    stages = _stages(sizes, rows * bytes_per_row, bytes_per_key)
    plan = dataclasses.replace(plan, consumers=consumers, row_times=rows, keys=STEP, stages=stages)
    return _split(plan, sizes)


def _rows_plan(operands: Operands, settings: Settings, sizes: MosaicSizes) -> MosaicPlan:
    """A plan whose programs have rows, packed where these are few."""
    of_call = sizes_of(operands)
    # of the instructions for copies and products
    for name, key, most in (("query", "width", 512), ("value", "value_width", 256)):
        if (size := of_call[key]) % 16 or size > most:
            raise NotImplementedError(
                f"{name}: wanted a width that 16 divides, of at most {most}, got {size}"
            )
    query_len, group = of_call["query_len"], of_call["group"]
    packed = group > 1 and query_len < ROWS * sizes.consumers
    if packed:
        of_call |= {"query_len": query_len * group, "group": 1}
    consumers = 1 if of_call["query_len"] <= ROWS else sizes.consumers
    return MosaicPlan(
        settings=settings,
        packed=packed,
        consumers=consumers,
        row_times=consumers * ROWS,
        keys=sizes.keys,
        **of_call,
    )


def _split(plan: MosaicPlan, sizes: MosaicSizes) -> MosaicPlan:
    """A plan that splits the keys of each tile of rows over programs if the tiles alone do not fill the chip."""
    kept = plan.batch * plan.heads * plan.row_tiles
    return split(plan, kept, plan.key_tiles, sizes.programs, sizes.least_steps)


def _consumers(sizes: MosaicSizes, columns: int) -> int:
    """Most warp groups that compute in a kernel of a derivative, by the columns of their sums.

    Raises `NotImplementedError` if not even one has the registers.
    """
    # besides the sums there are two tiles of products, and one of 16 bits
    registers = columns // 2 + STEP + STEP // 4
    if registers > REGISTERS:
        raise NotImplementedError(
            f"query: wanted widths whose sums fit into {REGISTERS} registers, got {registers}"
        )
    return 1 if registers > REGISTERS_OF_TWO else sizes.consumers


def _stages(sizes: MosaicSizes, resident_bytes: int, bytes_per_item: int) -> int:
    return fitting(resident_bytes, STEP * bytes_per_item, sizes.stages_backward)


def fitting(resident_bytes: int, step_bytes: int, most: int) -> int:
    """The number of tiles of `step_bytes` that fit into shared memory with `resident_bytes`: 2 to `most`.

    Raises `NotImplementedError` if two do not.
    """
    stages = min((SHARED - resident_bytes) // step_bytes, most)
    if stages < 2:
        raise NotImplementedError(
            f"query: wanted widths whose tiles fit into {SHARED >> 10} KiB of shared memory, "
            f"got {resident_bytes} bytes of rows with {step_bytes} of keys and values"
        )
    return stages


def chunk(width: int) -> int:
    """The number of columns of a result that are written through shared memory at a time."""
    return math.gcd(width, 64)


def pack_heads(operands: Operands, settings: Settings) -> Operands:
    """The operands with the queries that share a key head as rows of one head, in order (time, head).

    Positions and segments are repeated.
    """
    kv_heads = operands.key.shape[2]
    group = operands.query.shape[2] // kv_heads
    tokens = operands.positioned(settings.uses_positions).tokens
    return operands._replace(
        query=stack_heads(operands.query, kv_heads),
        tokens=tokens.map_queries(lambda x: jnp.repeat(x, group, axis=1)),
    )


def stack_heads(x: Array, kv_heads: int) -> Array:
    """`[B, T, N, ...]` to `[B, T * N / K, K, ...]`."""
    batch, query_len, heads, *trailing = x.shape
    group = heads // kv_heads
    x = x.reshape(batch, query_len, kv_heads, group, *trailing).swapaxes(2, 3)
    return x.reshape(batch, query_len * group, kv_heads, *trailing)


def unstack_heads(x: Array, query_len: int) -> Array:
    batch, rows, kv_heads, *trailing = x.shape
    x = x.reshape(batch, query_len, rows // query_len, kv_heads, *trailing).swapaxes(2, 3)
    return x.reshape(batch, query_len, rows // query_len * kv_heads, *trailing)


def aligned(x: Array) -> Array:
    """`[B, L, N, H]` padded to a multiple of 8 tokens, as copies need, unless there are fewer than 8."""
    return x if x.shape[1] < 8 else pad_to_blocks(x, 1, 8, 0)


def zero_hidden_keys(operands: Operands, plan: MosaicPlan, arrays: Operands) -> Operands:
    """Operands, or directions, with zeros for keys that no row of the call sees, which may be NaN."""
    if not plan.hides(operands.tokens.key_positions):
        return arrays
    hidden = hide_unreachable(operands, plan.settings)
    return zero_absent(hidden._replace(query=arrays.query, key=arrays.key, value=arrays.value))


def numbers_of_rows(
    x: Float[Array, "B T N"], plan: MosaicPlan, fill: float
) -> Float[Array, "B N R"]:
    """One float32 number for each row, padded to whole tiles."""
    x = x.astype(jnp.float32).swapaxes(1, 2)
    return pad_to_blocks(x, 2, plan.row_times, fill)


def sum_of_parts(x: Array, plan: MosaicPlan, dtype: DTypeLike) -> Array:
    """The sum of the results of the programs that share the keys of a tile."""
    if plan.splits == 1:
        return x
    # the weights of all parts are relative to the lse of the whole row, so that parts add up
    return x.reshape(plan.splits, plan.batch, *x.shape[1:]).sum(0).astype(dtype)


@dataclasses.dataclass(frozen=True)
class MosaicGPU(AbstractKernel):
    """Flash attention for compute capability 9.0, with its copy engine and its products of warp groups.

    Forward, backward and tangent with masks by position and segment; where rows are few, their keys are
    split over the chip. The widest heads use the derivatives of the blockwise implementation.

    Attributes:
        sizes: the tiles; by default `TILE_SIZES`.
    """

    sizes: MosaicSizes = TILE_SIZES

    name = "mosaic_gpu"
    platforms = ("cuda",)
    interpreted = ()
    exported = False  # JAX would, but the program runs on Hopper alone
    masks = WINDOWS

    def check(self, call: KernelCall) -> None:
        operands = call.operands
        # a source makes queries and keys float32, which these dtypes exclude too
        check_operands(operands, _DTYPES, ("bias", "mask"))
        query, value = operands.query, operands.value
        if query.dtype != value.dtype:
            raise NotImplementedError(f"value: wanted query's {query.dtype}, got {value.dtype}")
        check_capability(self.name, (9, 0), (10, 0))
        version = cuda_version("cuda_runtime")
        if version is not None and version in _MISCOMPILED:
            raise NotImplementedError(
                f"mosaic_gpu: wanted CUDA before 12.8 or from 13.0 on, as these compile loops with masks "
                f"right, got {version // 1000}.{version % 1000 // 10}"
            )
        make_plan(operands, call.settings, self.sizes)
        try:
            # imported late: not all versions of JAX have Mosaic GPU
            from . import _backward, _forward  # noqa: F401
        except (ImportError, AttributeError) as reason:
            raise NotImplementedError(
                f"mosaic_gpu: wanted a JAX with Pallas on Mosaic GPU, got {reason}"
            ) from reason

    def check_preferred(self, call: KernelCall) -> None:
        """Leaves few rows to `pallas_gpu`, which is as fast there, and heads too wide for its own derivatives."""
        query, key = call.operands.query, call.operands.key
        rows = query.shape[1] * query.shape[2] // key.shape[2]
        if rows < PREFERRED_ROWS:
            raise NotImplementedError(
                f"query: wanted at least {PREFERRED_ROWS} rows a key head, where this is faster than "
                f"pallas_gpu, got {rows}"
            )
        self._backward_plans(call)
        tangent_plan(call.operands, call.settings, moving_arrays(call.operands), self.sizes)

    def _backward_plans(self, call: KernelCall) -> tuple[MosaicPlan, MosaicPlan]:
        operands, settings = call.operands, call.settings
        return query_plan(operands, settings, self.sizes), key_plan(operands, settings, self.sizes)

    def forward(self, call: KernelCall) -> AttentionState:
        from ._forward import forward

        plan = make_plan(call.operands, call.settings, self.sizes)
        return forward(call.operands, plan, interpret=call.platform != "cuda")

    def backward(
        self, call: KernelCall, state: AttentionState, cotangent: AttentionState
    ) -> Operands:
        """Runs two kernels, dQ and dK/dV; `Blockwise` for the widest heads, whose sums do not fit on the chip."""
        try:
            plans = self._backward_plans(call)
        except NotImplementedError:
            return Blockwise().backward(call, state, cotangent)
        from ._backward import backward

        interpret = call.platform != "cuda"
        return backward(call.operands, *plans, state, cotangent, interpret=interpret)

    def tangent(
        self, call: KernelCall, state: AttentionState, directions: Operands
    ) -> AttentionState | None:
        """One kernel, and a sum of its parts if few rows see many keys.

        None for the widest calls, whose tiles and directions do not fit on the chip together.
        """
        try:
            moving = moving_arrays(directions)
            plan = tangent_plan(call.operands, call.settings, moving, self.sizes)
        except NotImplementedError:
            return None
        from ._forward import tangent

        interpret = call.platform != "cuda"
        return tangent(call.operands, plan, state, directions, interpret=interpret)
