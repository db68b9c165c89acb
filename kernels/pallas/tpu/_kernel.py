"""The pallas_tpu implementation: our own kernels for TPUs, written in Pallas on Mosaic."""

import dataclasses

from ...call._kernel import AbstractKernel, check_operands
from ...call._operands import KernelCall, Operands
from ...call._state import AttentionState
from ...masks._abstract import AbstractMask
from ._layout import Layout, LayoutSizes, make_layout

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
