"""The mosaic_gpu implementation: our own kernels for NVIDIA's Hopper GPUs, in Pallas on Mosaic GPU."""

import dataclasses

from ...call._kernel import AbstractKernel, check_capability, check_operands, cuda_version
from ...call._operands import KernelCall, Operands
from ...call._state import AttentionState
from ...masks._structure import WINDOWS
from ...xla._blockwise import Blockwise
from .._rows import moving_arrays
from ._plan import (
    TILE_SIZES,
    MosaicPlan,
    MosaicSizes,
    key_plan,
    make_plan,
    query_plan,
    tangent_plan,
)

_DTYPES = ("float16", "bfloat16")
# CUDA's compiler miscompiles loops with masks in these versions of the runtime, 12.8.0 to 12.9; see
# `jax.experimental.pallas.ops.gpu.attention_mgpu`, which refuses them.
_MISCOMPILED = range(12080, 12091)
PREFERRED_ROWS = 256


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
        # neither a source, which makes queries and keys float32
        check_operands(operands, _DTYPES, ("bias", "mask"))
        query, value = operands.query, operands.value
        if query.dtype != value.dtype:
            raise NotImplementedError(f"value: wanted query's {query.dtype}, got {value.dtype}")
        _check_target()
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
        """Two kernels: one for the gradient of queries, one for the others.

        That of the blockwise implementation for the widest calls, whose sums do not fit on the chip.
        """
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


def _check_target() -> None:
    """Raises `NotImplementedError` for GPUs of another capability, and for a CUDA that miscompiles."""
    check_capability("mosaic_gpu", (9, 0), (10, 0))
    version = cuda_version("cuda_runtime")
    if version is not None and version in _MISCOMPILED:
        raise NotImplementedError(
            f"mosaic_gpu: wanted CUDA before 12.8 or from 13.0 on, as these compile loops with masks "
            f"right, got {version // 1000}.{version % 1000 // 10}"
        )
