"""The flash implementation: FlashAttention-2's own kernels, from flash-attn-jax.

What is called is the package's functions for one device: around these it lays a primitive with
partitioning and a vmap rule of its own (whose gradients come back in another order), neither of
which has a use where `_choice` has folded the batch and knows the program to be for one device.
"""

import ctypes
import functools
from typing import Any

from .._private import private_names
from ..call._arguments import Operands, Settings
from ..call._kernel import AbstractKernel
from ..call._mask import Rule
from ..call._state import AttentionState
from ._adapter import check_plain, pull_back, vendor_state, window_side


class FlashAttn(AbstractKernel):
    """FlashAttention-2: 16 bits, plain, causal or with a window.

    For GPUs of compute capability 8.0 to 9.0. The gradients of the queries are added up in an order
    that changes from run to run; those of keys and values are made for each query head, rounded,
    and summed. A cotangent of lse takes a second backward.
    """

    name = "flash"
    platforms = ("cuda",)
    interpreted = ()
    exported = False

    def check(self, operands: Operands, settings: Settings) -> None:
        """Raises `NotImplementedError` for dtypes but float16 and bfloat16; arrays of masks,
        biases, positions or segments; widths above 192, for which few GPUs have a backward; and if
        flash-attn-jax or a library of CUDA is missing.
        """
        check_plain(operands, settings, widest=192)
        _package()

    def forward(
        self, operands: Operands, settings: Settings, platform: str | None
    ) -> AttentionState:
        """One call, with the energies in float32. Raises nothing."""
        options = _options(settings, operands.key.shape[1])
        out, lse = _package().forward(*operands[:3], **options)
        return vendor_state(out, lse.swapaxes(1, 2), operands, settings)

    def backward(
        self,
        operands: Operands,
        settings: Settings,
        state: AttentionState,
        cotangent: AttentionState,
        platform: str | None,
    ) -> Operands:
        """One call for each cotangent. Raises nothing."""
        options = _options(settings, operands.key.shape[1])
        lse = state.lse.swapaxes(1, 2)

        def pull(value: Any, out: Any, d_out: Any) -> Any:
            return _package().backward(d_out, *operands[:2], value, out, lse, **options)

        return pull_back(pull, operands, state, cotangent)


def _options(settings: Settings, keys: int) -> dict[str, Any]:
    left, right = _window(settings.rule, keys)
    return {
        "softmax_scale": settings.scale,
        "is_causal": settings.rule.is_causal,
        "window_size_left": left,
        "window_size_right": right,
    }


def _window(rule: Rule, keys: int) -> tuple[int, int]:
    """The sides of the window as FlashAttention counts them: -1 for one without end."""
    left, right = (
        (None, None) if rule.window is None else (window_side(x, keys) for x in rule.window)
    )
    right = 0 if rule.is_causal else right
    return (-1 if left is None else left), (-1 if right is None else right)


@functools.cache
def _package() -> Any:
    """What is called of flash-attn-jax; lse is `[B, N, T]` there."""
    try:
        found = private_names("flash")
        # by which it asks for the number of multiprocessors when a program is lowered
        ctypes.CDLL("libcudart.so")
    except (NotImplementedError, OSError) as reason:
        raise NotImplementedError(
            "flash: wanted flash-attn-jax 0.6 (pip install flash-attn-jax einops; it needs JAX 0.8 "
            "or older), libcudart.so.12 (pip install nvidia-cuda-runtime-cu12) and libcudart.so "
            f"of a CUDA toolkit, got {reason}"
        ) from reason
    return found
