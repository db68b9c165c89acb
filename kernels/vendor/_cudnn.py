"""The cudnn implementation: NVIDIA's flash attention, with lse in float32.

`jax.nn.dot_product_attention(implementation="cudnn", return_residual=True)` rounds lse to 16 bits,
has no derivative of it, and queries the GPU at hand, where a program may be compiled for another. So
this calls the two primitives of JAX beneath it, for one device: a forward with softmax statistics in
float32, and a backward from them.
"""

import functools
import inspect
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from .._private import private_names
from ..call._operands import KernelCall, Operands, Settings, has_lengths
from ..call._target import check_capability, target_capability
from ..masks._lengths import Lengths
from ..masks._structure import WINDOWS
from ._adapter import VendorGPU, check_plain, lengths, window_side

FEWEST_ROWS = 64  # of queries and of keys; other kernels split the keys of few rows
# The widest calls, backwards too, by the major capability; of a GPU that is not known yet, the largest. What cuDNN
# says of itself: https://docs.nvidia.com/deeplearning/cudnn/frontend/latest/operations/Attention.html. From 10.0 on,
# forwards take more than backwards.
WIDEST, WIDE = {9: 256}, 128
LEAST_OF_WIDE = 91300  # before, some of the wide backwards were wrong; as cuDNN counts its versions
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
        """Raises `NotImplementedError` for dtypes other than float16 and bfloat16; arrays of masks,
        biases, positions or segments; widths above 256, or above 128 on GPUs other than those of compute
        capability 9.0; fewer than 64 queries or keys; windows to the right; older GPUs than 8.0; versions of
        cuDNN that compute it wrongly; and versions of JAX without these primitives.
        """
        operands, settings, _ = call
        check_capability(self.name, (8, 0))
        found = target_capability()
        check_plain(self, operands, settings, 256 if found is None else WIDEST.get(found[0], WIDE))
        _check_version(operands.query.shape[-1])
        for name, x in (("query", operands.query), ("key", operands.key)):
            if x.shape[1] < FEWEST_ROWS:
                raise NotImplementedError(
                    f"{name}: wanted at least {FEWEST_ROWS} rows, got {x.shape[1]}"
                )
        left, right = settings.mask.window
        if settings.mask.constrains and right != 0:
            raise NotImplementedError(
                f"local_window_size: wanted no keys after the query's, got {(left, right)}"
            )
        private_names("cudnn")

    def attend(self, call: KernelCall) -> tuple[Array, Array]:
        """The primitive of the forward."""
        operands, settings, _ = call
        query, key, value = operands[:3]
        given = query, key, value, *_unused_but_lengths(operands)
        options = _options(operands, settings)
        return tuple(private_names("cudnn").forward.bind(*given, **options, is_training=True))

    def pull(
        self, call: KernelCall, lse: Array, out: Array, d_out: Array
    ) -> tuple[Array, Array, Array]:
        """The primitive of the backward."""
        operands, settings, _ = call
        query, key, value = operands[:3]
        given = query, key, value, *_unused_but_lengths(operands), lse, out, d_out
        found = private_names("cudnn").backward.bind(*given, **_options(operands, settings))
        return tuple(found)


def _check_version(width: int) -> None:
    """Declines versions of cuDNN with known faults. Where none is installed, a later one will run the program."""
    version = _version()
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


@functools.cache
def _version() -> int | None:
    try:
        return private_names("cuda_versions").versions.cudnn_get_version()
    except Exception:  # whatever is raised where no CUDA is, or no cuDNN
        return None


def _unused_but_lengths(operands: Operands) -> list[Array]:
    """Bias, lengths of queries and keys, offsets and pages, of which none is used but lengths."""
    unused = [jnp.zeros(0, operands.query.dtype)] * 7
    if has_lengths(operands):
        unused[1:3] = lengths(operands)
    return unused


def _options(operands: Operands, settings: Settings) -> dict[str, Any]:
    """The parameters of both primitives."""
    (left, right), found = settings.mask.window, private_names("cudnn")
    left = window_side(left, operands.key.shape[1])
    padding = "PADDING_" if has_lengths(operands) else ""
    mask = f"{padding}CAUSAL" if right == 0 else "PADDING" if padding else "NO_MASK"
    # since JAX 0.12: functions of the scores that cuDNN compiles into its kernel
    newer = {"score_mod_name", "score_mod_jaxpr"} & inspect.signature(
        found.lowering
    ).parameters.keys()
    return {
        "scale": settings.scale,
        "seed": 0,
        "dropout_rate": 0.0,
        "variadic_args": (False, False),  # no bias, and no gradient of one
        "mask_type": found.Mask[mask],
        "layout": found.Layout.BTNH.value,
        # the query's own key is included
        "sliding_window_length": None if left is None else left + 1,
    } | dict.fromkeys(newer)
