"""The cudnn implementation: NVIDIA's flash attention, as XLA calls it, with lse in float32.

`jax.nn.dot_product_attention(implementation="cudnn", return_residual=True)` rounds lse to 16 bits
and gives it no derivative, and asks the GPU at hand what it can do, where a program may be compiled
for another. Beneath it lie JAX's two primitives for one device, forward with the statistics in
float32 and backward from them: these are called here, and are looked for before they are.
"""

import inspect
from typing import Any

import jax.numpy as jnp

from .._private import private_names
from ..call._arguments import Operands, Settings
from ..call._kernel import AbstractKernel
from ..call._mask import Rule
from ..call._state import AttentionState
from ._adapter import check_plain, pull_back, vendor_state, window_side

FEWEST_ROWS = 64  # queries and keys; few rows are for kernels that split the keys


class CuDNN(AbstractKernel):
    """cuDNN's flash attention: 16 bits, plain or causal, with a window to the left.

    Needs a GPU of compute capability 8.0 or above. The gradients of the queries are added up in an
    order that changes from run to run, unless XLA is told to be deterministic
    (`--xla_gpu_exclude_nondeterministic_ops`). A cotangent of lse takes a second backward.
    """

    name = "cudnn"
    platforms = ("cuda",)
    interpreted = ()
    exported = False

    def check(self, operands: Operands, settings: Settings) -> None:
        """Raises `NotImplementedError` for dtypes but float16 and bfloat16; arrays of masks,
        biases, positions or segments; widths above 128, which not all GPUs have; fewer than 64
        queries or keys; windows to the right; and versions of JAX without what is called here.
        """
        check_plain(operands, settings, widest=128)
        for name, x in (("query", operands.query), ("key", operands.key)):
            if x.shape[1] < FEWEST_ROWS:
                raise NotImplementedError(
                    f"{name}: wanted at least {FEWEST_ROWS} rows, got {x.shape[1]}"
                )
        rule = settings.rule
        if rule.window is not None and not _looks_back(rule):
            raise NotImplementedError(
                f"local_window_size: wanted no keys after the query's, got {rule.window}"
            )
        private_names("cudnn")

    def forward(
        self, operands: Operands, settings: Settings, platform: str | None
    ) -> AttentionState:
        """One call of cuDNN, with its softmax statistics. Raises nothing."""
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
        """One call of cuDNN for each cotangent. Raises nothing."""
        options = _options(settings, operands.key.shape[1])
        lse = state.lse.swapaxes(1, 2)

        def pull(value: Any, out: Any, d_out: Any) -> Any:
            return _backward(*operands[:2], value, lse, out, d_out, **options)

        return pull_back(pull, operands, state, cotangent)


def _looks_back(rule: Rule) -> bool:
    return rule.is_causal or (rule.window is not None and rule.window[1] == 0)


def _forward(query: Any, key: Any, value: Any, **options: Any) -> Any:
    """`(out, lse)`. The operands not used are those of biases, lengths and pages."""
    unused = (jnp.zeros(0, query.dtype),) * 7
    return private_names("cudnn").forward.bind(
        query, key, value, *unused, **options, is_training=True
    )


def _backward(
    query: Any, key: Any, value: Any, lse: Any, out: Any, d_out: Any, **options: Any
) -> Any:
    """The cotangents of query, key and value."""
    unused = (jnp.zeros(0, query.dtype),) * 7
    return private_names("cudnn").backward.bind(
        query, key, value, *unused, lse, out, d_out, **options
    )


def _options(settings: Settings, keys: int) -> dict[str, Any]:
    """The parameters of both."""
    rule, found = settings.rule, private_names("cudnn")
    left = None if rule.window is None else window_side(rule.window[0], keys)
    # from 0.12 on: functions of the scores, of which cuDNN makes a part of its kernel
    newer = {"score_mod_name", "score_mod_jaxpr"} & inspect.signature(
        found.lowering
    ).parameters.keys()
    return {
        "scale": settings.scale,
        "seed": 0,
        "dropout_rate": 0.0,
        "variadic_args": (False, False),  # no bias, and no gradient of one
        "mask_type": found.Mask.CAUSAL if _looks_back(rule) else found.Mask.NO_MASK,
        "layout": found.Layout.BTNH.value,
        # the query's own key counts
        "sliding_window_length": None if left is None else left + 1,
    } | dict.fromkeys(newer)
