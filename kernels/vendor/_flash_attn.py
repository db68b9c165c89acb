"""The flash implementation: FlashAttention-2's own kernels, from flash-attn-jax.

This calls the package's functions for one device, without its primitive around them, which adds partitioning
and a vmap rule: `dispatch/_lowering.py` has its own.
"""

import ctypes
import functools
from typing import Any

from jaxtyping import Array

from .._private import private_names
from ..call._kernel import check_capability
from ..call._operands import KernelCall
from ._adapter import VendorGPU, check_plain, sides_of


class FlashAttn(VendorGPU):
    """FlashAttention-2: 16 bits, plain, causal or with a window.

    For GPUs of compute capability 8.0 to 9.0. The gradients of queries are summed in an order that
    changes from run to run; those of keys and values are computed for each query head, rounded, and
    summed. A cotangent of lse takes a second backward.
    """

    name = "flash"

    def check(self, call: KernelCall) -> None:
        check_capability(self.name, (8, 0), below=(10, 0))
        check_plain(self, call, widest=192)  # few GPUs have a wider backward
        _package()

    def attend(self, call: KernelCall) -> tuple[Array, Array]:
        return _package().forward(*call.operands.qkv, **_options(call))

    def pull_back(
        self, call: KernelCall, lse: Array, out: Array, d_out: Array
    ) -> tuple[Array, Array, Array]:
        return _package().backward(d_out, *call.operands.qkv, out, lse, **_options(call))


def _options(call: KernelCall) -> dict[str, Any]:
    # -1 for an unbounded side
    left, right = (
        -1 if size is None else size
        for size in sides_of(call.settings.mask.window, call.operands.key.shape[1])
    )
    return {
        "softmax_scale": call.settings.scale,
        "is_causal": right == 0,
        "window_size_left": left,
        "window_size_right": right,
    }


@functools.cache
def _package() -> Any:
    """The functions of flash-attn-jax, whose lse is `[B, N, T]`."""
    try:
        functions = private_names("flash")
        # the package loads this library when it lowers a program
        ctypes.CDLL("libcudart.so")
    except (NotImplementedError, OSError) as reason:
        raise NotImplementedError(
            "flash: wanted flash-attn-jax 0.6 (pip install flash-attn-jax einops; it needs JAX 0.8 "
            "or older), libcudart.so.12 (pip install nvidia-cuda-runtime-cu12) and libcudart.so "
            f"of a CUDA toolkit, got {reason}"
        ) from reason
    return functions
