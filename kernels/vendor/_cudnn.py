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
from ..call._kernel import AbstractKernel
from ..call._operands import Operands, Settings
from ..call._state import AttentionState
from ..call._target import check_capability, target_capability
from ..masks._structure import SIDED
from ..pallas.gpu._kernel import PallasGPU
from ._adapter import check_plain, pull_back, push_forward, vendor_state, window_side

FEWEST_ROWS = 64  # of queries and of keys; other kernels split the keys of few rows
# The widest calls, backwards too, by the major capability; of a GPU that is not known yet, the largest. What cuDNN
# says of itself: https://docs.nvidia.com/deeplearning/cudnn/frontend/latest/operations/Attention.html. From 10.0 on,
# forwards take more than backwards.
WIDEST, WIDE = {9: 256}, 128
LEAST_OF_WIDE = 91300  # before, some of the wide backwards were wrong; as cuDNN counts its versions
BROKEN = (91000, 91001)


class CuDNN(AbstractKernel):
    """cuDNN's flash attention: 16 bits, plain or causal, with a window to the left.

    For GPUs of compute capability 8.0 or above. The gradients of queries are summed in an order
    that changes from run to run, unless `--xla_gpu_exclude_nondeterministic_ops` is set. A cotangent
    of lse takes a second backward.
    """

    name = "cudnn"
    platforms = ("cuda",)
    interpreted = ()
    exported = False
    masks = SIDED

    def check(self, operands: Operands, settings: Settings) -> None:
        """Raises `NotImplementedError` for dtypes other than float16 and bfloat16; arrays of masks,
        biases, positions or segments; widths above 256, or above 128 on GPUs other than those of compute
        capability 9.0; fewer than 64 queries or keys; windows to the right; older GPUs than 8.0; versions of
        cuDNN that compute it wrongly; and versions of JAX without these primitives.
        """
        check_capability(self.name, (8, 0))
        found = target_capability()
        check_plain(operands, settings, 256 if found is None else WIDEST.get(found[0], WIDE))
        _check_version(operands.query.shape[-1])
        for name, x in (("query", operands.query), ("key", operands.key)):
            if x.shape[1] < FEWEST_ROWS:
                raise NotImplementedError(
                    f"{name}: wanted at least {FEWEST_ROWS} rows, got {x.shape[1]}"
                )
        left, right = settings.rule.sides
        if settings.rule.constrains and right != 0:
            raise NotImplementedError(
                f"local_window_size: wanted no keys after the query's, got {(left, right)}"
            )
        private_names("cudnn")

    def forward(
        self, operands: Operands, settings: Settings, platform: str | None
    ) -> AttentionState:
        """One call of cuDNN."""
        out, lse = _forward(*operands[:3], **_options(settings, operands.key.shape[1]))
        return vendor_state(out, lse.swapaxes(1, 2), operands, settings)

    def backward(
        self,
        operands: Operands,
        settings: Settings,
        state: AttentionState,
        cotangent: AttentionState,
        platform: str | None,
    ) -> Operands:
        """One call of cuDNN for each cotangent."""
        options = _options(settings, operands.key.shape[1])
        lse = state.lse.swapaxes(1, 2)

        def pull(value: Array, out: Array, d_out: Array) -> Any:
            return _backward(*operands[:2], value, lse, out, d_out, **options)

        return pull_back(pull, operands, state, cotangent)

    def tangent(
        self,
        operands: Operands,
        settings: Settings,
        state: AttentionState,
        directions: Operands,
        platform: str | None,
    ) -> AttentionState | None:
        """That of pallas_gpu: the vendor has none."""
        return push_forward(PallasGPU(), operands, settings, state, directions, platform)


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


def _forward(query: Array, key: Array, value: Array, **options: object) -> Any:
    """`(out, lse)`. The unused operands are biases, lengths and pages."""
    unused = (jnp.zeros(0, query.dtype),) * 7
    return private_names("cudnn").forward.bind(
        query, key, value, *unused, **options, is_training=True
    )


def _backward(
    query: Array,
    key: Array,
    value: Array,
    lse: Array,
    out: Array,
    d_out: Array,
    **options: object,
) -> Any:
    """The cotangents of query, key and value."""
    unused = (jnp.zeros(0, query.dtype),) * 7
    return private_names("cudnn").backward.bind(
        query, key, value, *unused, lse, out, d_out, **options
    )


def _options(settings: Settings, keys: int) -> dict[str, Any]:
    """The parameters of both primitives."""
    (left, right), found = settings.rule.sides, private_names("cudnn")
    left = window_side(left, keys)
    # since JAX 0.12: functions of the scores that cuDNN compiles into its kernel
    newer = {"score_mod_name", "score_mod_jaxpr"} & inspect.signature(
        found.lowering
    ).parameters.keys()
    return {
        "scale": settings.scale,
        "seed": 0,
        "dropout_rate": 0.0,
        "variadic_args": (False, False),  # no bias, and no gradient of one
        "mask_type": found.Mask.CAUSAL if right == 0 else found.Mask.NO_MASK,
        "layout": found.Layout.BTNH.value,
        # the query's own key is included
        "sliding_window_length": None if left is None else left + 1,
    } | dict.fromkeys(newer)
