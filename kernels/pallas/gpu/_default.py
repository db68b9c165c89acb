"""The tiles of the GPU kernels, chosen by shapes and shared memory alone."""

from typing import Literal, NamedTuple, get_args

from ._chip import GPUChip

KernelKind = Literal["forward", "query", "key", "tangent"]
KINDS: tuple[KernelKind, ...] = get_args(KernelKind)
LEAST = 16  # the smallest tile that tensor cores take

# With many rows, a program keeps OWN rows (or keys) and iterates over tiles of as many keys; over half as many
# in the backward and the tangent, which have twice the operands and sums.
OWN = 128
# Tiles of float32, which do not use the tensor cores: larger ones would only lengthen the program, as each 32
# terms of a product are an instruction.
FLOAT32 = 16
# With few rows, each key is read once and the kernel is bound by memory. Products of WARP_GROUP rows or more
# are computed by four warps together, which need wider tiles.
WARP_GROUP = 64
KEYS_OF_WARPS, KEYS_OF_WARP_GROUPS = 32, 64
# Float32 sums in registers: more than four times as many, 128 in each of 256 threads, would spill registers.
SUMS = 8192
# Bytes of shared memory that CUDA reserves for each program, and that a program may need beside its tiles.
RESERVED, SCRATCH = 1024, 1024
LEAST_STEPS = 4


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
    """The memory that one kernel of a call holds and reads.

    A program keeps a tile of rows and iterates over tiles of keys; the other way round in the kernel of
    the gradients in keys and values.

    Attributes:
        kind: which kernel.
        rows, keys: those of a key head, rounded up to a power of two.
        tiled: the number of key heads in the batch, each of which is tiled separately.
        own_bytes, other_bytes: the bytes of a row (or key) of the kept tile, and of the iterated tiles.
        pair_bytes: those of the tables of a score, which are loaded for each pair.
        sums: the float32 numbers that a program sums for each row (or key) that it keeps.
        float32: whether products are of float32.
        scored: whether there is a score.
        listed: whether the tiles to iterate over are in a `BlockList`, whose next entry is loaded first.
        eight_bits: whether keys and values are of eight bits, and cast in registers.
    """

    kind: KernelKind
    rows: int
    keys: int
    tiled: int
    own_bytes: int
    other_bytes: int
    pair_bytes: int
    sums: int
    float32: bool
    scored: bool
    listed: bool
    eight_bits: bool

    @property
    def kept(self) -> int:
        return self.keys if self.kind == "key" else self.rows

    @property
    def iterated(self) -> int:
        return self.rows if self.kind == "key" else self.keys

    def memory(self, kept: int, other: int, stages: int) -> int:
        """The bytes of shared memory of a program.

        Products of warp groups read their tiles from shared memory, where Triton holds one for each stage.
        Products of single warps need one fewer of three stages or more, and exchange 16-bit weights there.
        With eight bits there is one stored tile fewer, and a cast tile of the same size.
        """
        by_groups = kept >= WARP_GROUP and not self.float32
        buffered = stages if by_groups or stages < 3 else stages - 1
        weights = 0 if by_groups or self.float32 else 2 * kept * other
        tiles = buffered * other * (self.other_bytes + kept * self.pair_bytes)
        return kept * self.own_bytes + tiles + weights

    def fitting(self, kept: int, other: int, stages: int, chip: GPUChip) -> int:
        """How many programs fit into the shared memory of a multiprocessor; 0: not even one."""
        needed = self.memory(kept, other, stages)
        return (
            0 if needed + SCRATCH > chip.memory else (chip.memory + RESERVED) // (needed + RESERVED)
        )

    def warps(self, kept: int, other: int) -> int:
        """The warps of a program: enough to hold its sums and its scores in registers."""
        # three products over the width, or conversions, are long sequences of instructions in float32
        long_products = self.float32 and (self.kind == "tangent" or self.eight_bits)
        # and their derivatives, or what they are made of
        twice = self.kind != "forward" or self.scored or self.eight_bits
        numbers = kept * (2 * self.sums + (2 * other if twice else other))  # sums stay, scores pass
        return 8 if numbers > 4 * SUMS or long_products else 4


def power(size: int) -> int:
    """The least power of two that holds `size`, at least `LEAST`."""
    return max(LEAST, 1 << (size - 1).bit_length())


def default_tiles(need: Need, chip: GPUChip) -> GPUTiles | None:
    """The tiles of a kernel on a GPU; None if not even the smallest fit."""
    of_state = need.kind in ("forward", "tangent")
    kept = FLOAT32 if need.float32 else min(OWN, need.kept)
    while kept * need.sums > 4 * SUMS and kept > LEAST:
        kept //= 2
    few_rows = of_state and need.rows <= OWN
    tiles = _of_few_rows(need, kept, chip) if few_rows else None
    return tiles or _of_many_rows(need, kept, chip)


def _of_few_rows(need: Need, kept: int, chip: GPUChip) -> GPUTiles | None:
    """The tiles that keep the most bytes in flight to a multiprocessor."""
    by_groups = kept >= WARP_GROUP
    other = min(need.iterated, KEYS_OF_WARP_GROUPS if by_groups else KEYS_OF_WARPS)
    if need.float32:
        other = FLOAT32
    warps = need.warps(kept, other)
    # bound by registers: each warp of a group holds the sums and the scores of 16 rows
    most = 4 if not by_groups else 8 // warps
    choices = [
        (programs * (stages - 1), programs, stages)
        for stages in (4, 3)
        if (programs := min(need.fitting(kept, other, stages, chip), most))
    ]
    if not choices:
        return None
    _, programs, stages = max(choices)
    # more than one program for each multiprocessor only where each fills its stages twice
    tiles, steps = need.tiled * -(-need.kept // kept), -(-need.iterated // other)
    split_programs = min(programs * chip.multiprocessors, tiles * steps // (2 * stages))
    return GPUTiles(
        need.kind,
        kept,
        other,
        warps,
        stages,
        max(split_programs, chip.multiprocessors),
        LEAST_STEPS,
    )


def _of_many_rows(need: Need, kept: int, chip: GPUChip) -> GPUTiles | None:
    """Large tiles, in three stages where they fit: with two, loads wait for the preceding products.

    A list of tiles gets two stages, as its next entry would occupy one of three.
    """
    other = FLOAT32 if need.float32 else OWN if need.kind == "forward" else OWN // 2
    # registers also hold the residuals of the score's derivative, or all the sums that they can, of width 256
    crowded = need.scored or (kept < OWN and kept * need.sums == 4 * SUMS)
    if need.kind == "key" and crowded and not need.float32:
        other //= 2
    other = min(other, need.iterated)
    while not need.fitting(kept, other, 2, chip) and max(kept, other) > LEAST:
        kept, other = (kept // 2, other) if kept > other else (kept, other // 2)
    if not need.fitting(kept, other, 2, chip):
        return None
    stages = 3 if need.fitting(kept, other, 3, chip) and not need.listed else 2
    rows, keys = (other, kept) if need.kind == "key" else (kept, other)
    return GPUTiles(
        need.kind, rows, keys, need.warps(kept, other), stages, chip.multiprocessors, LEAST_STEPS
    )
