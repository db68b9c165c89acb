"""The tiles that the GPU kernels have unless they are given others: by shapes and shared memory alone."""

from typing import NamedTuple

from ._chip import Chip
from ._sizes import LEAST, GPUTiles, KernelKind

# Sums over many rows: a program keeps OWN rows, or keys, and iterates over as many keys; over half in the
# backward and the tangent, which have twice as many operands and sums.
OWN = 128
# Float32 is not for tensor cores, and each 32 terms of a product are an instruction of their own: larger
# tiles would only lengthen the program.
FLOAT32 = 16
# Rows of one tile: each key is read once, and reading is all that counts. Products of WARP_GROUP rows or more
# are of four warps together, which want wider tiles.
WARP_GROUP = 64
KEYS_OF_WARPS, KEYS_OF_WARP_GROUPS = 32, 64
# Float32 sums in registers: more than this many go to twice the threads. With more than four times
# as many, 128 in each thread, registers would be spilled.
SUMS = 8192
# Bytes of shared memory: what CUDA takes beside each program's, and what a program may need beside its tiles.
RESERVED, SCRATCH = 1024, 1024
LEAST_STEPS = 4


class Need(NamedTuple):
    """The memory that one kernel of a call holds and reads.

    A program keeps an own tile, of rows, and iterates over others, of keys; the other way round in the
    kernel of the gradients in keys and values.

    Attributes:
        kind: which kernel.
        rows, keys: those of a key head, up to a power of two.
        tiled: the key heads of the batch, each of which has tiles of its own.
        own_bytes, other_bytes: those of one row, or key, of both tiles.
        pair_bytes: those of the tables of a score, which are loaded for each pair.
        sums: the float32 numbers that a program sums for a row, or key, of its own.
        float32: whether products are of float32.
        scored: whether there is a score.
        listed: whether the tiles that a tile meets are in a list, whose next entry is loaded first.
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
    def own(self) -> int:
        """The rows, or keys, that programs keep."""
        return self.keys if self.kind == "key" else self.rows

    @property
    def others(self) -> int:
        """The keys, or rows, that programs iterate over."""
        return self.rows if self.kind == "key" else self.keys

    def memory(self, own: int, other: int, stages: int) -> int:
        """The bytes of shared memory of a program.

        Triton holds a tile for each stage where the products of warp groups read them from shared
        memory, and one less, of three stages or more, where few rows go through products of single warps. These
        exchange 16-bit weights there. Of eight bits it holds one less, and a cast tile, which is as large.
        """
        by_groups = own >= WARP_GROUP and not self.float32
        held = stages if by_groups or stages < 3 else stages - 1
        weights = 0 if by_groups or self.float32 else 2 * own * other
        tiles = held * other * (self.other_bytes + own * self.pair_bytes)
        return own * self.own_bytes + tiles + weights

    def fitting(self, own: int, other: int, stages: int, chip: Chip) -> int:
        """How many programs' shared memory a multiprocessor holds; 0: that of one is too much."""
        needed = self.memory(own, other, stages)
        return (
            0 if needed + SCRATCH > chip.memory else (chip.memory + RESERVED) // (needed + RESERVED)
        )

    def warps(self, own: int, other: int) -> int:
        """Those of a program: so many that its sums, and its scores, are in registers."""
        # three products over the width at once, each a long run of instructions in float32; or conversions to it
        long = self.float32 and (self.kind == "tangent" or self.eight_bits)
        scores = 2 * other if self.kind == "query" else other  # and their cotangents
        many = own * max(self.sums, scores) > SUMS or long
        return 8 if many else 4


def default_tiles(need: Need, chip: Chip) -> GPUTiles | None:
    """The tiles of a kernel on a GPU; None if none are so small."""
    of_state = need.kind in ("forward", "tangent")
    own = FLOAT32 if need.float32 else min(OWN, need.own)
    while own * need.sums > 4 * SUMS and own > LEAST:
        own //= 2
    reads = of_state and need.rows <= OWN
    found = _of_few_rows(need, own, chip) if reads else None
    return found or _of_many_rows(need, own, chip)


def _of_few_rows(need: Need, own: int, chip: Chip) -> GPUTiles | None:
    """Those with most bytes on their way to a multiprocessor, by few programs with many or many with few."""
    by_groups = own >= WARP_GROUP
    other = min(need.others, KEYS_OF_WARP_GROUPS if by_groups else KEYS_OF_WARPS)
    if need.float32:
        other = FLOAT32
    warps = need.warps(own, other)
    # as many as registers allow: those of warp groups have the sums and the scores of 16 rows for each warp
    most = 4 if not by_groups else 8 // warps
    choices = [
        (programs * (stages - 1), programs, stages)
        for stages in (4, 3)
        if (programs := min(need.fitting(own, other, stages, chip), most))
    ]
    if not choices:
        return None
    _, programs, stages = max(choices)
    # more than one to a multiprocessor only where each fills its stages twice
    tiles, steps = need.tiled * -(-need.own // own), -(-need.others // other)
    wanted = min(programs * chip.multiprocessors, tiles * steps // (2 * stages))
    return GPUTiles(
        need.kind, own, other, warps, stages, max(wanted, chip.multiprocessors), LEAST_STEPS
    )


def _of_many_rows(need: Need, own: int, chip: Chip) -> GPUTiles | None:
    """Large tiles, in three stages where these fit: with two, loads wait for the products before them.

    With three, a list would take one, and its tiles would wait all the same, in more registers.
    """
    other = FLOAT32 if need.float32 else OWN if need.kind == "forward" else OWN // 2
    # registers also hold what the score's derivative is of; or all the sums that they can, of width 256
    crowded = need.scored or (own < OWN and own * need.sums == 4 * SUMS)
    if need.kind == "key" and crowded and not need.float32:
        other //= 2
    other = min(other, need.others)
    while not need.fitting(own, other, 2, chip) and max(own, other) > LEAST:
        own, other = (own // 2, other) if own > other else (own, other // 2)
    if not need.fitting(own, other, 2, chip):
        return None
    stages = 3 if need.fitting(own, other, 3, chip) and not need.listed else 2
    rows, keys = (other, own) if need.kind == "key" else (own, other)
    return GPUTiles(
        need.kind, rows, keys, need.warps(own, other), stages, chip.multiprocessors, LEAST_STEPS
    )
