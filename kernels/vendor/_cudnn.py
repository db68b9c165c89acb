"""The cudnn implementation: NVIDIA's flash attention, with lse in float32.

`jax.nn.dot_product_attention(implementation="cudnn", return_residual=True)` rounds lse to 16 bits, has no
derivative of it, and queries the attached GPU rather than the program's. This calls the two primitives beneath
it instead: a forward with softmax statistics in float32, and a backward from them.
"""

import inspect
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from .._private import private_names
from ..call._kernel import check_capability, cuda_version, target_capability
from ..call._operands import KernelCall
from ..masks._ready import Lengths
from ..masks._structure import WINDOWS
from ._adapter import VendorGPU, check_plain, lengths, sides_of

FEWEST_ROWS = 64  # of queries and of keys; other kernels split the keys of few rows
# The widest calls, by the major compute capability, of both forwards and backwards, from cuDNN's documentation:
# https://docs.nvidia.com/deeplearning/cudnn/frontend/latest/operations/Attention.html.
WIDEST, WIDE = {9: 256}, 128
LEAST_OF_WIDE = 91300  # cuDNN 9.13; some of the wide backwards were wrong in earlier versions
BROKEN = (91000, 91001)


class CuDNN(VendorGPU):
    """cuDNN's flash attention: 16 bits, plain or causal, with a window to the left, and rows of any length.

    For GPUs of compute capability 8.0 or above. The gradients of queries are summed in an order
    that changes from run to run, unless `--xla_gpu_exclude_nondeterministic_ops` is set. A cotangent
    of lse takes a second backward.
    """

    name = "cudnn"
    masks = (*WINDOWS, Lengths)

    def check(self, call: KernelCall) -> None:
        operands, mask = call.operands, call.settings.mask
        check_capability(self.name, (8, 0))
        capability = target_capability()
        check_plain(self, call, 256 if capability is None else WIDEST.get(capability[0], WIDE))
        _check_version(operands.query.shape[-1])
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
        arrays, options = _inputs(call)
        return tuple(private_names("cudnn").forward.bind(*arrays, **options, is_training=True))

    def pull_back(
        self, call: KernelCall, lse: Array, out: Array, d_out: Array
    ) -> tuple[Array, Array, Array]:
        arrays, options = _inputs(call)
        return tuple(private_names("cudnn").backward.bind(*arrays, lse, out, d_out, **options))


def _check_version(width: int) -> None:
    """Raises `NotImplementedError` for versions of cuDNN with known faults; passes where none is installed."""
    version = cuda_version("cudnn")
    if version is None:
        return
    if version in BROKEN:
        raise NotImplementedError(
            f"cudnn: wanted a version other than 9.10.0 and 9.10.1, got {version}"
        )
    if width > WIDE and version < LEAST_OF_WIDE:
        raise NotImplementedError(
            f"query: wanted a width up to {WIDE} before cuDNN 9.13, got {width} and cuDNN {version}"
        )


def _inputs(call: KernelCall) -> tuple[list[Array], dict[str, Any]]:
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
