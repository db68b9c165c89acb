"""The pallas_gpu implementation: our own kernels for NVIDIA's GPUs, written in Pallas on Triton."""

import dataclasses

import jax

from ...call._kernel import AbstractKernel, check_capability, check_operands
from ...call._operands import KernelCall, Operands, dequantized
from ...call._state import AttentionState
from ...masks._abstract import AbstractMask
from ._plan import KEPT, GPUTiles, KernelKind, TritonPlan, make_plan, named_gpu

# Not 8 bits: Pallas computes offsets in signed 32 bits for arrays of up to 2^32 bytes, here as many numbers.
DTYPES = ("float16", "bfloat16", "float32")


@dataclasses.dataclass(frozen=True)
class PallasGPU(AbstractKernel):
    r"""Flash attention, and decoding with the keys of a query split over the chip.

    Forward, backward and tangent with masks by position, segment and mask. Keys and values are read in place,
    never copied; those of eight bits with scales as they are stored, where rows are few. Programs skip tiles
    that their rows cannot see, and mask only tiles that need it. Gradients and tangents have a relative error of about
    $10^{-7}\,\lvert F\rvert$, which is large for large scores: 1% from $10^5$ on.

    Attributes:
        tiles: those of some of its kernels, to compare; others are chosen by shapes.

    Source: FlashAttention-2 (arXiv 2307.08691), and Flash-Decoding for the split of keys.
    """

    tiles: tuple[GPUTiles, ...] = ()

    name = "pallas_gpu"
    platforms = ("cuda",)
    interpreted = ("cpu", "tpu")
    exported = False
    masks = (AbstractMask,)
    scores = True

    def check(self, call: KernelCall) -> None:
        check_capability(self.name, (8, 0))
        operands = call.operands
        if operands.scales.key is not None:
            operands = jax.eval_shape(dequantized, operands)
        check_operands(operands, DTYPES, ("bias", "mask"))
        self._plan(call, "forward")
        for kind in ("query", "key"):
            self._plan(call._replace(operands=operands), kind)
        try:
            # imported late: JAX deprecates its Triton backend, and a later version may lack it
            from . import _backward, _forward  # noqa: F401
        except ImportError as reason:
            raise NotImplementedError(
                f"pallas_gpu: wanted a JAX with Pallas on Triton, got {reason}"
            ) from reason

    def reads_eight_bits(self, call: KernelCall) -> bool:
        """Whether queries are bfloat16 or float32 and fit into one tile of rows, which reads each key once.

        In float16, weights times a scale would underflow. Pallas computes offsets in signed 32 bits for
        arrays of up to 2^32 bytes, so arrays of more than 2^31 and at most 2^32 numbers are dequantized.
        """
        query, key, value = call.operands.qkv
        few_rows = query.shape[1] * query.shape[2] <= KEPT * key.shape[2]
        counted = not any(2**31 < x.size <= 2**32 for x in (key, value))
        return query.dtype.name in ("bfloat16", "float32") and few_rows and counted

    def forward(self, call: KernelCall) -> AttentionState:
        from ._forward import forward

        plan = self._plan(call, "forward")
        with named_gpu(call.platform):
            return forward(call.operands, plan, interpret=call.platform != "cuda")

    def backward(
        self, call: KernelCall, state: AttentionState, cotangent: AttentionState
    ) -> Operands:
        from ._backward import backward

        plans = self._plan(call, "query"), self._plan(call, "key")
        with named_gpu(call.platform):
            return backward(
                call.operands, *plans, state, cotangent, interpret=call.platform != "cuda"
            )

    def tangent(
        self, call: KernelCall, state: AttentionState, directions: Operands
    ) -> AttentionState | None:
        """One kernel, and a sum of its parts if few rows see many keys.

        None for the widest calls, whose tiles and directions do not fit on the chip together.
        """
        from ._forward import tangent

        try:
            plan = self._plan(call, "tangent")
        except NotImplementedError:
            return None
        with named_gpu(call.platform):
            return tangent(
                call.operands, plan, state, directions, interpret=call.platform != "cuda"
            )

    def _plan(self, call: KernelCall, kind: KernelKind) -> TritonPlan:
        return make_plan(call.operands, call.settings, kind, self.tiles)
