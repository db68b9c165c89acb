"""The pallas_tpu implementation: our own kernels for TPUs, written in Pallas on Mosaic."""

import dataclasses

from ...call._arguments import Operands, Settings
from ...call._kernel import AbstractKernel, check_operands
from ...call._state import AttentionState
from ._layout import LAYOUT_SIZES, LayoutSizes, layout

_DTYPES = ("bfloat16", "float32")  # the compiler does not load float16


@dataclasses.dataclass(frozen=True)
class PallasTPU(AbstractKernel):
    """Our own kernel for TPUs, in Pallas.

    Up to 256 queries times heads read keys and values once, where they lie and as XLA lays such
    arrays out, of any width: no copy fills it up to 128. (There is one of either if its width is a
    multiple of 128 and the other's is not, and of both for rare numbers of key heads.) More rows
    move key heads to the front first, by one copy, where the width is a multiple of 128.
    """

    sizes: LayoutSizes = LAYOUT_SIZES

    name = "pallas_tpu"
    platforms = ("tpu",)
    interpreted = ("cpu", "cuda", "rocm")
    exported = True

    def check(self, operands: Operands, settings: Settings) -> None:
        """Raises `NotImplementedError` for biases, masks, float16, float64, or no rows or keys."""
        check_operands(operands, _DTYPES, ("bias", "mask"))
        for is_backward in (False, True):
            layout(operands, settings, backward=is_backward, sizes=self.sizes)

    def forward(
        self, operands: Operands, settings: Settings, platform: str | None
    ) -> AttentionState:
        """The online softmax over blocks of keys. Raises nothing."""
        from ._forward import forward  # late: Pallas takes long to import

        found = layout(operands, settings, backward=False, sizes=self.sizes)
        return forward(operands, found, interpret=platform != "tpu")

    def backward(
        self,
        operands: Operands,
        settings: Settings,
        state: AttentionState,
        cotangent: AttentionState,
        platform: str | None,
    ) -> Operands:
        """Two kernels, one over the keys of each row and one over the rows of each key.

        Raises nothing.
        """
        from ._backward import backward

        found = layout(operands, settings, backward=True, sizes=self.sizes)
        return backward(operands, found, state, cotangent, interpret=platform != "tpu")
