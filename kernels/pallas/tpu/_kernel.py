"""The pallas_tpu implementation: kernels for TPUs, in Pallas on Mosaic, and the layout of their calls."""

import dataclasses
import math
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from ...call._kernel import AbstractKernel, check_operands, target_device
from ...call._operands import KernelCall, Operands, Settings
from ...call._state import AttentionState
from ...masks._abstract import AbstractMask
from ...masks._structure import Pairwise
from .._rows import pad_to_blocks, pairs_of
from .._score import score_of
from .._score_program import ScoreProgram, Target

_DTYPES = ("bfloat16", "float32")  # the compiler does not load float16

# The memory that every chip grants a kernel. The ranges of blocks may take half of the 1 MiB for scalars, at 16
# bytes for each block.
LEAST_GRANTED = 16 * 2**20
MOST_RANGES = 2**15
MOST_LISTED = 2**16  # of four bytes each, in addition to the ranges


# The primitives that every supported JAX lowers to Mosaic, for a score and its derivatives. Without `sign`, the
# derivative of abs, which is not lowered ahead of time (`test_functions_of_scores` of tests/tpu).
TARGET = Target(
    frozenset(
        "abs add add_any and broadcast_in_dim ceil clamp convert_element_type cos custom_jvp_call div "
        "eq exp exp2 floor ge gt integer_pow is_finite jit le log log1p logistic lt max min mul ne neg "
        "not one_minus_square or pjit pow rem reshape rsqrt select_n sin sqrt square squeeze sub tan tanh "
        "xor".split()
    ),
    frozenset({"float32", "int32", "bool"}),
)


class TPUChip(NamedTuple):
    """A TPU core; by default the smallest, for programs whose devices are not known."""

    memory: int = 16 * 2**20  # bytes of VMEM, its vector memory
    columns: int = 128  # of a matrix unit


_V5E, _V5P = TPUChip(128 * 2**20), TPUChip(64 * 2**20)
_V6E, _7X = TPUChip(128 * 2**20, 256), TPUChip(64 * 2**20, 256)
# by `jax.Device.device_kind`; older ones have no more than the smallest
_CHIPS = {
    "TPU v5 lite": _V5E,
    "TPU v5e": _V5E,
    "TPU v5": _V5P,
    "TPU v5p": _V5P,
    "TPU v6 lite": _V6E,
    "TPU v6e": _V6E,
    "TPU7x": _7X,
}


def chip_of(kind: str | None) -> TPUChip:
    return TPUChip() if kind is None else _CHIPS.get(kind, TPUChip())


def target_chip() -> TPUChip:
    """The TPU of the program being lowered, which need not be attached; the smallest while tracing."""
    device = target_device()
    return chip_of(None if device is None else device.device_kind)


class LayoutSizes(NamedTuple):
    rows: int = 512  # queries times heads, in a block
    keys: int = 1024
    # the most rows for which reading keys takes longer than computing with them, even where every row is compared with
    # the keys of all heads; reading a block of so many keys takes several times the overhead of a step
    few_rows: int = 256
    keys_of_few_rows: int = 4096
    keys_backward: int = 512
    memory: int = (
        LEAST_GRANTED * 3 // 4
    )  # bytes of the arrays of a step; the compiler gets the rest
    lanes: int = 128  # the last axis of the chip's tiles
    sublanes: int = 16  # the axis before it


LAYOUT_SIZES = LayoutSizes()


def sizes_on(chip: TPUChip) -> LayoutSizes:
    """The largest blocks on a chip, whose kernels may take half of its memory.

    Larger blocks mean fewer steps. In the forward, XLA's schedules have fewer instructions for each key
    only on chips with matrix units of 256 columns.
    """
    if chip.memory // 2 <= LEAST_GRANTED:
        return LAYOUT_SIZES
    return LayoutSizes(
        keys=8 * chip.columns,
        keys_of_few_rows=16384,
        keys_backward=1024,
        memory=chip.memory // 2 * 3 // 4,
    )


class Layout(NamedTuple):
    """The static properties of a call and its blocks.

    A TPU computes with tiles of 8 or 16 by 128 of an array's last two axes, so an axis of heads
    before the width has to be folded into another or moved to the front. XLA chooses the memory
    layout of keys `[B, S, K, H]` such that tiles are full:

    - `H` a multiple of 128 and `K` 1, 2, 4 or a multiple of 8: as written, and so as
      `[B, S·K, H]`. With few rows all heads are folded into the axis of keys, and a row sees only
      the keys of its head. With more rows a copy moves the key heads to the front.
    - `H` a multiple of 128 and another `K`: as `[B, K, S, H]`, heads in front already.
    - Another `H`, and many keys: as `[B, K, H, S]`, called tall here.

    Query heads that share a key head are folded into the axis of queries.
    """

    heads: int  # the axis in front, `P`: 1, or the number of key heads
    row_fold: int  # query heads folded into queries, `N / P`
    key_fold: int  # key heads folded into keys, `K / P`
    rows: int  # the length of the axis of queries, `T·N / P`
    keys: int  # the length of the axis of keys, `S·K / P`
    tall_key: bool  # whether keys are `[P, H, C]`, not `[P, C, H]`
    tall_value: bool
    row_block: int
    key_block: int
    granted: int  # bytes of the chip's memory that the kernels ask for
    bounded: bool  # whether keys past the end are hidden by their index, as there are no positions
    pairs: Pairwise | None  # the mask, unless that is a window
    settings: Settings
    score: ScoreProgram | None

    @property
    def row_blocks(self) -> int:
        return math.ceil(self.rows / self.row_block)

    @property
    def key_blocks(self) -> int:
        return math.ceil(self.keys / self.key_block)

    @property
    def width_axes(self) -> tuple[int, int]:
        """The axes of the widths in a block of keys and in one of values."""
        return int(not self.tall_key), int(not self.tall_value)


def make_layout(
    operands: Operands, settings: Settings, kind: str, sizes: LayoutSizes | None = None
) -> Layout:
    """The layout and the blocks of a call's kernels: "forward", "backward" or "tangent".

    Sizes default to those for the chip that the program is lowered for. Raises `NotImplementedError` if no block fits
    into its memory, or too many are needed, or for a mask or a score that the kernels do not compute.
    """
    sizes = sizes or sizes_on(target_chip())
    score = score_of(operands, settings, TARGET)
    pairs = pairs_of(operands, settings)
    batch, query_len, heads, width = operands.query.shape
    _, key_len, kv_heads, value_width = operands.value.shape
    few_rows = query_len * heads <= sizes.few_rows
    tall = bool(width % sizes.lanes), bool(value_width % sizes.lanes)
    as_written = kv_heads in (1, 2, 4) or (
        kv_heads % 8 == 0 and math.lcm(sizes.lanes, kv_heads) <= sizes.keys
    )
    front = 1 if few_rows and as_written and not any(tall) else kv_heads
    row_fold, key_fold = heads // front, kv_heads // front
    rows, keys = query_len * row_fold, key_len * key_fold
    name = "keys" if kind == "forward" else "keys_backward"
    if few_rows and kind != "backward":
        name = "keys_of_few_rows"
    # blocks larger than on the smallest chip only where a row sees four of them: the first is not overlapped
    # with computation, and a causal mask or a window hides a part of the last
    seen = min(keys, (sum(settings.mask.window) + 1) * key_fold)
    most_keys = min(getattr(sizes, name), max(getattr(LAYOUT_SIZES, name), seen // 4))
    unit = math.lcm(sizes.lanes, key_fold)  # a block holds all heads of its keys
    most_rows = sizes.rows
    while True:
        row_block = _even(rows, most_rows, sizes.sublanes if rows <= most_rows else sizes.lanes)
        key_block = _even(keys, most_keys, unit)
        needed = _memory(operands, score, row_block, key_block, sizes.lanes, kind)
        if needed <= sizes.memory:
            break
        # the longer side is halved, down to a row of the chip's tiles
        if key_block > unit and (key_block >= row_block or row_block <= sizes.lanes):
            most_keys = key_block // 2
        elif row_block > sizes.lanes:
            most_rows = row_block // 2
        else:
            raise NotImplementedError(
                f"query: wanted widths whose blocks fit into {sizes.memory >> 20} MiB, got {width} "
                f"with values of {value_width}"
            )
    positions = operands.tokens.query_positions is not None or settings.uses_positions
    bounded = keys % key_block > 0 and not positions
    granted = max(LEAST_GRANTED, needed * 4 // 3)
    numbers = front, row_fold, key_fold, rows, keys, *tall, row_block, key_block, granted
    layout = Layout(*numbers, bounded, pairs, settings, score)
    _check_ranges(layout, batch, of_keys=kind == "backward")
    return layout


def _check_ranges(layout: Layout, batch: int, *, of_keys: bool) -> None:
    blocks = f"blocks of {layout.row_block} rows"
    ranges = batch * max(layout.row_blocks, layout.key_blocks if of_keys else 0)
    if ranges > MOST_RANGES:
        raise NotImplementedError(
            f"query: wanted at most {MOST_RANGES} {blocks} or {layout.key_block} keys in a batch, got {ranges}"
        )
    listed = batch * layout.row_blocks * layout.key_blocks
    if layout.pairs is not None and listed > MOST_LISTED:
        raise NotImplementedError(
            f"query: wanted at most {MOST_LISTED} pairs of {blocks} and {layout.key_block} keys in a "
            f"batch under a mask other than causality and windows, got {listed}"
        )


def _even(size: int, most: int, unit: int) -> int:
    number = math.ceil(size / max(most // unit * unit, unit))
    return math.ceil(math.ceil(size / number) / unit) * unit


def _memory(
    operands: Operands,
    score: ScoreProgram | None,
    row_block: int,
    key_block: int,
    lanes: int,
    kind: str,
) -> int:
    query, key, value = operands.qkv
    width, value_width = (math.ceil(x.shape[-1] / lanes) * lanes for x in (query, value))
    a_row = width * query.dtype.itemsize + value_width * value.dtype.itemsize
    a_key = width * key.dtype.itemsize + value_width * value.dtype.itemsize
    # double buffers: blocks are copied while others are computed with
    blocks = 2 * (row_block * a_row + key_block * a_key)
    sums = row_block * (value_width + 2 * lanes) * 4
    if kind == "backward":
        blocks += 2 * max(row_block * a_row, key_block * a_key)
        sums = max(row_block * width, key_block * (width + value_width)) * 4
    if kind == "tangent":  # the directions, and the result in addition to the state
        blocks *= 2
    # scores and arrays of their size; float32 products take three 16-bit parts of each operand
    is_float32 = query.dtype.itemsize == 4
    arrays = (4 if kind == "forward" else 6) + is_float32
    if score is not None:  # products, positions, and each table's entries and indices
        arrays += 4 + 2 * len(score.sizes)
        blocks += 4 * row_block * 4 * sum(max(size, 8) for size in (8, *score.sizes))
    scores = row_block * key_block * 4 * arrays
    parts = 6 * (row_block + key_block) * (width + value_width) if is_float32 else 0
    return blocks + sums + scores + parts


def fold_rows(x: Array, layout: Layout, fill: float = 0) -> Array:
    """`[B, T, N, ...]` to rows `[B, P, R, ...]`, ordered by (time, head).

    Blocks then cover short intervals of positions, so that fewer pairs of them meet under a causal mask.
    """
    batch, query_len, heads, *trailing = x.shape
    x = x.reshape(batch, query_len, layout.heads, layout.row_fold, *trailing)
    x = jnp.moveaxis(x, 2, 1).reshape(batch, layout.heads, layout.rows, *trailing)
    return pad_to_blocks(x, 2, layout.row_block, fill)


def unfold_rows(x: Array, layout: Layout) -> Array:
    batch, _, _, *trailing = x.shape
    x = x[:, :, : layout.rows].reshape(batch, layout.heads, -1, layout.row_fold, *trailing)
    return jnp.moveaxis(x, 1, 2).reshape(batch, -1, layout.heads * layout.row_fold, *trailing)


def fold_keys(x: Array, layout: Layout, *, tall: bool) -> Array:
    """`[B, S, K, W]` to `[B, P, C, W]`, or to `[B, P, W, C]` if `tall`."""
    x = x.reshape(x.shape[0], layout.keys, layout.heads, x.shape[-1]).swapaxes(1, 2)
    return x.swapaxes(2, 3) if tall else x


def unfold_keys(x: Array, layout: Layout, *, tall: bool) -> Array:
    x = x.swapaxes(2, 3) if tall else x
    return x.swapaxes(1, 2).reshape(len(x), -1, layout.heads * layout.key_fold, x.shape[-1])


@dataclasses.dataclass(frozen=True)
class PallasTPU(AbstractKernel):
    """Flash attention, and decoding that reads the cache in place.

    For up to 256 queries times heads, keys and values are read once and in place, in XLA's layout of
    such arrays, without padding the width to 128. (If only one of the two widths is a multiple of 128,
    that array is copied; for rare numbers of key heads both are.) For more rows, a copy moves the key
    heads to the front if the width is a multiple of 128.
    """

    sizes: LayoutSizes | None = None  # the largest blocks; None: those for the chip

    name = "pallas_tpu"
    platforms = ("tpu",)
    interpreted = ("cpu", "cuda", "rocm")
    exported = True
    masks = (AbstractMask,)
    scores = True

    def check(self, call: KernelCall) -> None:
        check_operands(call.operands, _DTYPES, ("bias", "mask"))
        for kind in ("forward", "backward"):
            self._layout(call, kind)

    def _layout(self, call: KernelCall, kind: str) -> Layout:
        return make_layout(call.operands, call.settings, kind, self.sizes)

    def forward(self, call: KernelCall) -> AttentionState:
        from ._forward import forward  # late: Pallas takes long to import

        layout, interpret = self._layout(call, "forward"), call.platform != "tpu"
        return forward(call.operands, layout, interpret=interpret)

    def backward(
        self, call: KernelCall, state: AttentionState, cotangent: AttentionState
    ) -> Operands:
        from ._backward import backward

        layout, interpret = self._layout(call, "backward"), call.platform != "tpu"
        return backward(call.operands, layout, state, cotangent, interpret=interpret)

    def tangent(
        self, call: KernelCall, state: AttentionState, directions: Operands
    ) -> AttentionState | None:
        """One pass over blocks of keys.

        None for the widest calls, whose blocks and directions do not fit on the chip together.
        """
        from ._forward import tangent

        try:
            layout = self._layout(call, "tangent")
        except NotImplementedError:
            return None
        interpret = call.platform != "tpu"
        return tangent(call.operands, layout, state, directions, interpret=interpret)
