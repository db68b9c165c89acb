"""Vendors' kernels for NVIDIA's GPUs: cuDNN, FlashAttention-2 (flash-attn-jax) and FlashAttention-4 (fa4-jax).

Each calls its package's functions for one device. The packages' own primitives add partitioning, vmap rules and
derivatives, which `dispatch/` has for all kernels.
"""

import ctypes
import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from .._imports import private_names
from ..call._kernel import (
    Capability,
    capability_of,
    check_capability,
    cuda_version,
    target_capability,
)
from ..call._operands import KernelCall
from ..masks._ready import Lengths
from ..masks._structure import WINDOWS
from ._adapter import VendorGPU, check_plain, lengths, sides_of

FA4_WIDEST = {8: 256, 9: 256, 10: 128, 12: 256}  # head width, by major compute capability
FEWEST_ROWS = 64  # of queries and of keys; other kernels split the keys of few rows
# The widest calls, by the major compute capability, of both forwards and backwards, from cuDNN's documentation:
# https://docs.nvidia.com/deeplearning/cudnn/frontend/latest/operations/Attention.html.
CUDNN_WIDEST, WIDE = {9: 256}, 128
LEAST_CUDNN_OF_WIDE = 91300  # cuDNN 9.13; some of the wide backwards were wrong in earlier versions
BROKEN_CUDNN = (91000, 91001)


class CuDNN(VendorGPU):
    """cuDNN's flash attention: 16 bits, plain or causal, with a window to the left, and rows of any length.

    For GPUs of compute capability 8.0 or above. The gradients of queries are summed in an order that changes from run
    to run, unless `--xla_gpu_exclude_nondeterministic_ops` is set. A cotangent of lse takes a second backward.
    """

    name = "cudnn"
    masks = (*WINDOWS, Lengths)

    def check(self, call: KernelCall) -> None:
        operands, mask = call.operands, call.settings.mask
        check_capability(self.name, (8, 0))
        capability = target_capability()
        check_plain(
            self, call, 256 if capability is None else CUDNN_WIDEST.get(capability[0], WIDE)
        )
        _check_cudnn(operands.query.shape[-1])
        for name, x in (("query", operands.query), ("key", operands.key)):
            if x.shape[1] < FEWEST_ROWS:
                raise NotImplementedError(
                    f"{name}: wanted at least {FEWEST_ROWS} rows, got {x.shape[1]}"
                )
        left, right = mask.window
        if mask.constrains and right != 0:
            raise NotImplementedError(
                f"local_window_size: wanted no keys after the query's, got {(left, right)}"
            )
        private_names("cudnn")

    def attend(self, call: KernelCall) -> tuple[Array, Array]:
        arrays, options = _cudnn_inputs(call)
        return tuple(private_names("cudnn").forward.bind(*arrays, **options, is_training=True))

    def pull_back(
        self, call: KernelCall, lse: Array, out: Array, d_out: Array
    ) -> tuple[Array, Array, Array]:
        arrays, options = _cudnn_inputs(call)
        return tuple(private_names("cudnn").backward.bind(*arrays, lse, out, d_out, **options))


def _check_cudnn(width: int) -> None:
    """Raises `NotImplementedError` for versions of cuDNN with known faults; passes where none is installed."""
    version = cuda_version("cudnn")
    if version is None:
        return
    if version in BROKEN_CUDNN:
        raise NotImplementedError(
            f"cudnn: wanted a version other than 9.10.0 and 9.10.1, got {version}"
        )
    if width > WIDE and version < LEAST_CUDNN_OF_WIDE:
        raise NotImplementedError(
            f"query: wanted a width up to {WIDE} before cuDNN 9.13, got {width} and cuDNN {version}"
        )


def _cudnn_inputs(call: KernelCall) -> tuple[list[Array], dict[str, Any]]:
    operands, names = call.operands, private_names("cudnn")
    # bias, lengths of queries and keys, offsets and pages; all are empty except the lengths
    unused = [jnp.zeros(0, operands.query.dtype)] * 7
    if operands.tokens.has_lengths:
        unused[1:3] = lengths(operands)
    left, right = sides_of(call.settings.mask.window, call.operands.key.shape[1])
    padding = "PADDING_" if operands.tokens.has_lengths else ""
    mask = f"{padding}CAUSAL" if right == 0 else "PADDING" if padding else "NO_MASK"
    # parameters of newer versions of JAX for functions of the scores
    parameters = inspect.signature(names.lowering).parameters
    score_options = {"score_mod_name", "score_mod_jaxpr"} & parameters.keys()
    options = {
        "scale": call.settings.scale,
        "seed": 0,
        "dropout_rate": 0.0,
        "variadic_args": (False, False),  # no bias, and no gradient of one
        "mask_type": names.Mask[mask],
        "layout": names.Layout.BTNH.value,
        # the query's own key is included
        "sliding_window_length": None if left is None else left + 1,
    }
    return [*operands.qkv, *unused], options | dict.fromkeys(score_options)


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
        flash_package()

    def attend(self, call: KernelCall) -> tuple[Array, Array]:
        return flash_package().forward(*call.operands.qkv, **_flash_options(call))

    def pull_back(
        self, call: KernelCall, lse: Array, out: Array, d_out: Array
    ) -> tuple[Array, Array, Array]:
        return flash_package().backward(d_out, *call.operands.qkv, out, lse, **_flash_options(call))


def _flash_options(call: KernelCall) -> dict[str, Any]:
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
def flash_package() -> Any:
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


class FA4(VendorGPU):
    """FlashAttention-4 and its relatives: 16 bits, plain, causal or with a window.

    For GPUs of compute capability 8, 9, 10.0, 10.3 and 12. The gradients of queries, and those of keys and values of
    grouped heads, are summed in an order that changes from run to run. A cotangent of lse takes a second backward.
    """

    name = "fa4"

    def check(self, call: KernelCall) -> None:
        capability = target_capability()
        if capability is not None:
            _check_attached(capability)
        check_plain(self, call, FA4_WIDEST[9 if capability is None else capability[0]])
        fa4_package()

    def attend(self, call: KernelCall) -> tuple[Array, Array]:
        config, backend = _fa4_config(call)
        return backend.fwd_lse(config, *call.operands.qkv, ())

    def pull_back(
        self, call: KernelCall, lse: Array, out: Array, d_out: Array
    ) -> tuple[Array, Array, Array]:
        config, backend = _fa4_config(call)
        return backend.vjp(config, *call.operands.qkv, out, lse, d_out, None, ())


def _check_attached(capability: Capability) -> None:
    # Raises `NotImplementedError` for GPUs without kernels, and for others than the attached one. The package compiles
    # its kernels for the GPU that JAX lists first.
    attached = capability_of(jax.devices()[0])
    if capability != attached or capability[0] not in FA4_WIDEST:
        raise NotImplementedError(
            f"fa4: wanted a program for the GPU at hand, and one of compute capability "
            f"{', '.join(map(str, FA4_WIDEST))}, got a program for {capability} and {attached} at hand"
        )


def _fa4_config(call: KernelCall) -> tuple[Any, Any]:
    left, right = sides_of(call.settings.mask.window, call.operands.key.shape[1])
    causal = left is None and right == 0
    window = (None, None) if causal else (left, right)
    config = fa4_package().Config(
        causal=causal,
        local=window != (None, None),
        window=window,
        scale=call.settings.scale,
        mask=None,
        backend="cute",
    )
    return config, fa4_package().backend("cute")


def fa4_package() -> Any:
    try:
        return private_names("fa4")
    except NotImplementedError as reason:
        raise NotImplementedError(
            f"fa4: wanted fa4-jax 0.1 (pip install 'fa4-jax[cu13]'; it needs Python 3.12), got {reason}"
        ) from reason
