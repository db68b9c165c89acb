"""Tiles and programs of a call for the Triton kernels, chosen by shapes and by the program's GPU."""

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import Literal, NamedTuple, get_args

import jax

from ...call._kernel import target_device
from ...call._operands import Operands, Settings
from ...masks._structure import Pairwise
from .._rows import pairs_of
from .._score import score_of
from .._score_program import ScoreProgram, Target
from .._tiles import TilePlan, sizes_of, split

KernelKind = Literal["forward", "query", "key", "tangent"]
KINDS: tuple[KernelKind, ...] = get_args(KernelKind)
LEAST = 16  # the smallest tile that tensor cores take

# With many rows, a program keeps KEPT rows (or keys) and iterates over tiles of as many keys; over half as many
# in the backward and the tangent, which have twice the operands and sums.
KEPT = 128
# Tiles of float32, which do not use the tensor cores: larger ones would only lengthen the program, as each 32
# terms of a product are an instruction.
FLOAT32 = 16
# With few rows, each key is read once and the kernel is bound by memory. Products of WARP_GROUP rows or more
# are computed by four warps together, which need wider tiles.
WARP_GROUP = 64
KEYS_OF_WARPS, KEYS_OF_WARP_GROUPS = 32, 64
# Float32 sums in registers: more than four times as many, 128 in each of 256 threads, would spill registers.
SUMS = 8192
# Bytes of shared memory that CUDA reserves for each program, and that a program may need in addition to its tiles.
RESERVED, SCRATCH = 1024, 1024
LEAST_STEPS = 4


# Shared memory that one program may take of a multiprocessor, in KiB, by compute capability; other
# GPUs get the smallest.
_MEMORY = {"8.0": 163, "8.7": 163, "9.0": 227, "10.0": 227, "10.3": 227}
_LEAST_MEMORY = 99


class GPUChip(NamedTuple):
    """A GPU; an H100 by default, for programs whose devices are not known."""

    memory: int = 227 * 1024  # bytes of shared memory that one program may take of a multiprocessor
    multiprocessors: int = 132
    kind: str | None = None  # as in `jax.Device.device_kind`


def target_chip() -> GPUChip:
    """Returns the GPU that the program is lowered for, attached or not; the default while tracing."""
    device = target_device()
    capability = getattr(device, "compute_capability", None)
    if device is None or capability is None:  # interpreted on another platform
        return GPUChip()
    memory = _MEMORY.get(capability, _LEAST_MEMORY) * 1024
    cores = getattr(device, "core_count", None) or GPUChip().multiprocessors
    return GPUChip(memory, cores, device.device_kind)


@contextlib.contextmanager
def named_gpu(platform: str | None) -> Iterator[None]:
    """Names a GPU to JAX if none is attached, so that a machine without one can lower the program."""
    # JAX 0.11 and newer ask the abstract device (https://github.com/jax-ml/jax/pull/38799) for its compute capability;
    # older ones assume 9.0. The kernels do not depend on it: XLA compiles them for the program's GPU. To check: lower
    # in tests/cuda without this context.
    mesh = jax.sharding.get_abstract_mesh()
    default_device = jax.config.jax_default_device or jax.local_devices()[0]  # pyright: ignore[reportAttributeAccessIssue]
    devices = (default_device, mesh.abstract_device)
    has_gpu = platform != "cuda" or "gpu" in (getattr(x, "platform", x) for x in devices)
    if has_gpu or jax.__version_info__ < (0, 11):
        yield
        return
    gpu = jax.sharding.AbstractDevice("NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu")
    with jax.sharding.use_abstract_mesh(mesh.update(abstract_device=gpu)):
        yield


class GPUTiles(NamedTuple):
    r"""How one of the GPU kernels splits a call into tiles and programs.

    A row is a query of one head, and $T N / K$ rows share a key head. A program keeps a tile of `rows` and
    iterates over tiles of `keys`; that of the gradients in keys and values keeps `keys` and iterates over `rows`.

    Attributes:
        kind: the kernel: `"forward"` of the state, `"query"` of the gradient in queries, `"key"` of those in
            keys and values, `"tangent"` of the state's derivative in a direction.
        rows, keys: of a tile; powers of two, at least 16.
        warps: the threads of a program in units of 32: 1, 2, 4, 8 or 16.
        stages: the number of steps of an iteration that overlap, 1 to 8, whose tiles are in shared memory.
        programs: where a call has fewer tiles to keep, the iteration of each is split over several programs,
            up to this number in all, and their parts are merged.
        least_steps: the least number of tiles that each of these iterates over.
    """

    kind: KernelKind
    rows: int
    keys: int
    warps: int = 4
    stages: int = 2
    programs: int = 132
    least_steps: int = 4


class Need(NamedTuple):
    """Memory that one kernel of a call holds and reads.

    A program holds a tile of rows and iterates over tiles of keys; in the dK/dV kernel it holds keys.
    """

    kind: KernelKind
    rows: int  # per key head, rounded up to a power of two
    keys: int  # rounded up to a power of two
    tiled: int  # batch entries times key heads, each tiled separately
    kept_bytes: int  # per row (or key) of the kept tile
    iterated_bytes: int  # per key (or row) of the iterated tiles
    pair_bytes: int  # per (row, key) pair: entries of the score's tables
    sums: int  # float32 sums per row (or key) that a program keeps
    float32: bool  # whether products are of float32
    scored: bool
    listed: bool  # whether the tiles are in a `BlockList`, whose next entry is loaded first
    eight_bits: bool  # whether keys and values are of eight bits, and cast in registers

    @property
    def kept(self) -> int:
        return self.keys if self.kind == "key" else self.rows

    @property
    def iterated(self) -> int:
        return self.rows if self.kind == "key" else self.keys

    def memory(self, kept: int, iterated: int, stages: int) -> int:
        """The bytes of shared memory of a program.

        Products of warp groups read their tiles from shared memory, where Triton holds one for each stage.
        Products of single warps need one fewer of three stages or more, and exchange 16-bit weights there.
        With eight bits there is one stored tile fewer, and a cast tile of the same size.
        """
        by_groups = kept >= WARP_GROUP and not self.float32
        buffered = stages if by_groups or stages < 3 else stages - 1
        weights = 0 if by_groups or self.float32 else 2 * kept * iterated
        tiles = buffered * iterated * (self.iterated_bytes + kept * self.pair_bytes)
        return kept * self.kept_bytes + tiles + weights

    def fitting(self, kept: int, iterated: int, stages: int, chip: GPUChip) -> int:
        """Number of programs that fit into the shared memory of a multiprocessor."""
        needed = self.memory(kept, iterated, stages)
        if needed + SCRATCH > chip.memory:
            return 0
        return (chip.memory + RESERVED) // (needed + RESERVED)

    def warps(self, kept: int, iterated: int) -> int:
        """Number of warps that hold a program's sums and scores in registers."""
        # three products over the width, or conversions, are long sequences of instructions in float32
        long_products = self.float32 and (self.kind == "tangent" or self.eight_bits)
        # and their derivatives, or what they are made of
        twice = self.kind != "forward" or self.scored or self.eight_bits
        # sums stay in registers, scores pass through them
        numbers = kept * (2 * self.sums + (2 * iterated if twice else iterated))
        return 8 if numbers > 4 * SUMS or long_products else 4


def power(size: int) -> int:
    """Returns the smallest power of two that is at least `size` and `LEAST`."""
    return max(LEAST, 1 << (size - 1).bit_length())


def default_tiles(need: Need, chip: GPUChip) -> GPUTiles | None:
    """Returns the tiles of a kernel on a GPU; None if not even the smallest fit."""
    of_state = need.kind in ("forward", "tangent")
    kept = FLOAT32 if need.float32 else min(KEPT, need.kept)
    while kept * need.sums > 4 * SUMS and kept > LEAST:
        kept //= 2
    few_rows = of_state and need.rows <= KEPT
    tiles = _of_few_rows(need, kept, chip) if few_rows else None
    return tiles or _of_many_rows(need, kept, chip)


def _of_few_rows(need: Need, kept: int, chip: GPUChip) -> GPUTiles | None:
    # The tiles that keep the most bytes in flight to each multiprocessor.
    by_groups = kept >= WARP_GROUP
    iterated = min(need.iterated, KEYS_OF_WARP_GROUPS if by_groups else KEYS_OF_WARPS)
    if need.float32:
        iterated = FLOAT32
    warps = need.warps(kept, iterated)
    # bound by registers: each warp of a group holds the sums and the scores of 16 rows
    most = 4 if not by_groups else 8 // warps
    choices = [
        (programs * (stages - 1), programs, stages)
        for stages in (4, 3)
        if (programs := min(need.fitting(kept, iterated, stages, chip), most))
    ]
    if not choices:
        return None
    _, programs, stages = max(choices)
    # more than one program for each multiprocessor only where each fills its stages twice
    tiles, steps = need.tiled * -(-need.kept // kept), -(-need.iterated // iterated)
    split_programs = min(programs * chip.multiprocessors, tiles * steps // (2 * stages))
    split_programs = max(split_programs, chip.multiprocessors)
    return GPUTiles(need.kind, kept, iterated, warps, stages, split_programs, LEAST_STEPS)


def _of_many_rows(need: Need, kept: int, chip: GPUChip) -> GPUTiles | None:
    # Large tiles, in three stages if they fit: with two, loads wait for the previous products. A `BlockList` gets two
    # stages: loading its next entry takes one of three.
    iterated = FLOAT32 if need.float32 else KEPT if need.kind == "forward" else KEPT // 2
    # registers also hold the residuals of the score's derivative, or all the sums that they can, of width 256
    crowded = need.scored or (kept < KEPT and kept * need.sums == 4 * SUMS)
    if need.kind == "key" and crowded and not need.float32:
        iterated //= 2
    iterated = min(iterated, need.iterated)
    while not need.fitting(kept, iterated, 2, chip) and max(kept, iterated) > LEAST:
        kept, iterated = (kept // 2, iterated) if kept > iterated else (kept, iterated // 2)
    if not need.fitting(kept, iterated, 2, chip):
        return None
    stages = 3 if need.fitting(kept, iterated, 3, chip) and not need.listed else 2
    rows, keys = (iterated, kept) if need.kind == "key" else (kept, iterated)
    return GPUTiles(
        need.kind, rows, keys, need.warps(kept, iterated), stages, chip.multiprocessors, LEAST_STEPS
    )


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class TritonPlan(TilePlan):
    """A plan whose tiles of rows are `row_times` queries of `row_heads` of the heads that share a key head.

    These are in memory order; the rest of `rows` is idle. `rows` and `keys` are powers of two.
    """

    rows: int
    row_heads: int
    warps: int  # the threads of a program in units of 32
    score: ScoreProgram | None

    @property
    def head_tiles(self) -> int:
        return math.ceil(self.group / self.row_heads)

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
    operands: Operands, settings: Settings, kind: KernelKind, chosen: tuple[GPUTiles, ...] = ()
) -> TritonPlan:
    """The plan of one kernel of a call, with the given tiles if some are for it, else the default ones.

    Raises `NotImplementedError` if no tiles fit into shared memory, or the given ones do not, or for a mask
    or a score that the kernels do not compute.
    """
    score, pairs = score_of(operands, settings, TARGET), pairs_of(operands, settings)
    sizes = sizes_of(operands)
    need, chip = need_of(operands, settings, kind, score, pairs), target_chip()
    tiles = next((x for x in chosen if x.kind == kind), None)
    tiles = default_tiles(need, chip) if tiles is None else _no_larger(tiles, need, chip)
    if tiles is None:
        raise NotImplementedError(
            f"query: wanted widths whose tiles fit into {chip.memory >> 10} KiB of shared memory, "
            f"got {sizes['width']} with values of {sizes['value_width']}"
        )
    row_heads = min(sizes["group"], tiles.rows)
    plan = TritonPlan(
        settings=settings,
        pairs=pairs,
        score=score,
        row_times=tiles.rows // row_heads,
        row_heads=row_heads,
        rows=tiles.rows,
        keys=tiles.keys,
        warps=tiles.warps,
        stages=tiles.stages,
        **sizes,
    )
    kept, steps = plan.row_tiles, plan.key_tiles
    if kind == "key":
        kept, steps = steps, kept
    kept *= plan.batch * plan.kv_heads
    return split(plan, kept, steps, tiles.programs, tiles.least_steps)


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
    """Number of 32-bit numbers that a program loads per key (or row) that it iterates over."""
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
