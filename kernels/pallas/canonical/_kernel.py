"""The canonical kernel on TPUs and on NVIDIA's GPUs, written in Pallas."""

import abc
import dataclasses
from types import ModuleType
from typing import Any, ClassVar, Never

from jaxtyping import Array

from ...call._kernel import check_capability, check_operands
from ...call._operands import KernelCall, Operands
from ...call._state import AttentionState
from ...call._tokens import LEAF
from ...fold._call import AbstractRowsFold
from ...fold._kernel import AbstractCanonical, check_whole
from ...masks._abstract import AbstractMask
from .._rows import pairs_of
from .._score_program import Target
from ..gpu._plan import TARGET as gpu_target
from ..gpu._plan import named_gpu
from ..tpu._kernel import TARGET as tpu_target
from ._schedule import PallasSchedule
from ._sides import FormatSizes, scores_of

MOST_WIDTH = 256  # widest heads whose tiles fit on a chip together


@dataclasses.dataclass(frozen=True)
class AbstractCanonicalPallas(AbstractCanonical):
    """Attention whose bits depend on a row and the keys that it sees, as `Canonical` on CPUs.

    A tile of rows and a leaf of keys are one program, in which no constant depends on the sizes of a call. The
    canonical tree merges the partials that it returns.
    """

    sizes: ClassVar[dict[int, FormatSizes]]  # constants of the format, by the bytes of a number
    dtypes: ClassVar[tuple[str, ...]]
    target: ClassVar[Target]
    least_tiles: ClassVar[int]  # with fewer tiles of rows, a fold over keys is split into parts
    masks = (AbstractMask,)

    def check(self, call: KernelCall) -> None:
        """Raises `NotImplementedError` for partial rows, array biases and masks, other dtypes, heads wider than
        `MOST_WIDTH`, and masks or scores that Pallas kernels do not compute.
        """
        operands, settings = call.operands, call.settings
        check_whole(settings)
        check_operands(operands, self.dtypes, ("bias", "mask"))
        pairs_of(operands, settings)
        scores_of(operands, settings, self.target)
        for name in ("query", "value"):
            if (width := getattr(operands, name).shape[-1]) > MOST_WIDTH:
                raise NotImplementedError(
                    f"{name}: wanted a width of at most {MOST_WIDTH}, got {width}"
                )

    def corrected(self, cotangent: AttentionState, rest: Array) -> AttentionState:
        """Unchanged, as the rounding error of energies is not known."""
        del rest
        return cotangent

    def array_cotangents(self, call: KernelCall, *states: AttentionState) -> Never:
        raise _not_learnt(call)

    def tangent_fold(
        self, call: KernelCall, state: AttentionState, directions: Operands
    ) -> AbstractRowsFold:
        """Raises `NotImplementedError` in a direction of a score's arrays."""
        if any(x is not None for x in directions.score_arrays):
            raise _not_learnt(call)
        return super().tangent_fold(call, state, directions)

    def schedule(self, call: KernelCall, in_order: bool) -> PallasSchedule:
        scores = scores_of(call.operands, call.settings, self.target)
        leaves = max((self.run or LEAF) // LEAF, 1)
        subtree = leaves & -leaves if in_order else 0  # the most leaves that are one of each run
        sizes = self.sizes[call.operands.query.dtype.itemsize]
        return PallasSchedule(self, call, scores, sizes, subtree)

    def fold(self, call: KernelCall, *args: Any) -> list[Array]:
        with named_gpu(call.platform):
            return self.folds().fold(*args, interpret=call.platform not in self.platforms)

    @staticmethod
    @abc.abstractmethod
    def folds() -> ModuleType:
        """The module that folds tiles on the platform."""


class CanonicalTPU(AbstractCanonicalPallas):
    """The canonical kernel for TPUs: tiles of 128 rows and leaves of 256 keys."""

    name = "canonical_tpu"
    platforms = ("tpu",)
    interpreted = ("cpu", "cuda", "rocm")
    exported = True
    sizes: ClassVar[dict[int, FormatSizes]] = {2: FormatSizes(128, 128), 4: FormatSizes(128, 128)}
    dtypes = ("bfloat16", "float32")
    target = tpu_target
    least_tiles = 1

    @staticmethod
    def folds() -> ModuleType:
        from . import _tpu

        return _tpu


class CanonicalGPU(AbstractCanonicalPallas):
    """The canonical kernel for GPUs: tiles of 64 rows by 64 keys of a leaf at a time; 16 by 32 in float32."""

    name = "canonical_gpu"
    platforms = ("cuda",)
    interpreted = ("cpu", "tpu")
    exported = False
    # float32 products have no tensor cores: larger tiles unroll into too many instructions
    sizes: ClassVar[dict[int, FormatSizes]] = {2: FormatSizes(64, 256), 4: FormatSizes(16, 256)}
    dtypes = ("bfloat16", "float16", "float32")
    target = gpu_target
    least_tiles = 512

    def check(self, call: KernelCall) -> None:
        """Raises also for GPUs older than compute capability 8.0, and for JAX without Pallas on Triton."""
        check_capability(self.name, (8, 0))
        super().check(call)
        try:
            from . import _gpu  # noqa: F401
        except ImportError as reason:
            raise NotImplementedError(
                f"reproducible: wanted a JAX with Pallas on Triton, got {reason}"
            ) from reason

    @staticmethod
    def folds() -> ModuleType:
        from . import _gpu

        return _gpu


def _not_learnt(call: KernelCall) -> NotImplementedError:
    return NotImplementedError(
        "score: wanted one whose arrays have no derivatives with reproducible=True in a program for "
        f"{call.platform}, got theirs"
    )
