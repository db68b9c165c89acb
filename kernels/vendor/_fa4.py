"""The fa4 implementation: FlashAttention-4's kernels in CuTe, from fa4-jax.

This calls the package's functions for one device, without its primitives around them, which add derivatives and a vmap
rule: `dispatch/` has its own.
"""

from typing import Any

import jax
from jaxtyping import Array

from .._private import private_names
from ..call._kernel import Capability, capability_of, target_capability
from ..call._operands import KernelCall
from ._adapter import VendorGPU, check_plain, sides_of

WIDEST = {8: 256, 9: 256, 10: 128, 12: 256}  # by the major compute capability


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
        check_plain(self, call, WIDEST[9 if capability is None else capability[0]])
        _package()

    def attend(self, call: KernelCall) -> tuple[Array, Array]:
        config, backend = _configured(call)
        return backend.fwd_lse(config, *call.operands.qkv, ())

    def pull_back(
        self, call: KernelCall, lse: Array, out: Array, d_out: Array
    ) -> tuple[Array, Array, Array]:
        config, backend = _configured(call)
        return backend.vjp(config, *call.operands.qkv, out, lse, d_out, None, ())


def _check_attached(capability: Capability) -> None:
    """Raises `NotImplementedError` for GPUs without kernels, and for others than the attached one.

    The package compiles its kernels for the GPU that JAX lists first.
    """
    attached = capability_of(jax.devices()[0])
    if capability != attached or capability[0] not in WIDEST:
        raise NotImplementedError(
            f"fa4: wanted a program for the GPU at hand, and one of compute capability "
            f"{', '.join(map(str, WIDEST))}, got a program for {capability} and {attached} at hand"
        )


def _configured(call: KernelCall) -> tuple[Any, Any]:
    left, right = sides_of(call.settings.mask.window, call.operands.key.shape[1])
    causal = left is None and right == 0
    window = (None, None) if causal else (left, right)
    config = _package().Config(
        causal=causal,
        local=window != (None, None),
        window=window,
        scale=call.settings.scale,
        mask=None,
        backend="cute",
    )
    return config, _package().backend("cute")


def _package() -> Any:
    try:
        return private_names("fa4")
    except NotImplementedError as reason:
        raise NotImplementedError(
            f"fa4: wanted fa4-jax 0.1 (pip install 'fa4-jax[cu13]'; it needs Python 3.12), got {reason}"
        ) from reason
