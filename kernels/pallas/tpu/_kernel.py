"""The pallas_tpu implementation: our own kernels for TPUs, written in Pallas on Mosaic."""

import dataclasses

from ...call._kernel import AbstractKernel, check_operands
from ...call._operands import KernelCall, Operands
from ...call._state import AttentionState
from ...masks._abstract import AbstractMask
from ._layout import LayoutSizes, make_layout

_DTYPES = ("bfloat16", "float32")  # the compiler does not load float16


@dataclasses.dataclass(frozen=True)
class PallasTPU(AbstractKernel):
    """Flash attention, and decoding that reads the cache in place.

    For up to 256 queries times heads, keys and values are read once and in place, in XLA's layout of
    such arrays, without padding the width to 128. (One of them is copied if its width is a multiple
    of 128 and the other's is not, both for rare numbers of key heads.) For more rows, a copy moves
    the key heads to the front if the width is a multiple of 128.
    """

    sizes: LayoutSizes | None = None  # the largest blocks; None: those for the chip

    name = "pallas_tpu"
    platforms = ("tpu",)
    interpreted = ("cpu", "cuda", "rocm")
    exported = True
    masks = (AbstractMask,)
    scores = True

    def check(self, call: KernelCall) -> None:
        operands, settings, _ = call
        check_operands(operands, _DTYPES, ("bias", "mask"))
        for kind in ("forward", "backward"):
            make_layout(operands, settings, kind, self.sizes)

    def forward(self, call: KernelCall) -> AttentionState:
        operands, settings, platform = call
        from ._forward import forward  # late: Pallas takes long to import

        layout = make_layout(operands, settings, "forward", self.sizes)
        return forward(operands, layout, interpret=platform != "tpu")

    def backward(
        self, call: KernelCall, state: AttentionState, cotangent: AttentionState
    ) -> Operands:
        operands, settings, platform = call
        from ._backward import backward

        layout = make_layout(operands, settings, "backward", self.sizes)
        return backward(operands, layout, state, cotangent, interpret=platform != "tpu")

    def tangent(
        self, call: KernelCall, state: AttentionState, directions: Operands
    ) -> AttentionState | None:
        """One pass over blocks of keys.

        None for the widest calls, whose blocks and directions do not fit on the chip together.
        """
        operands, settings, platform = call
        from ._tangent import tangent

        try:
            layout = make_layout(operands, settings, "tangent", self.sizes)
        except NotImplementedError:
            return None
        return tangent(operands, layout, state, directions, interpret=platform != "tpu")
