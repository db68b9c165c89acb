"""Attention over keys and values of eight bits, which few queries on a TPU or a GPU read as they are stored."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from ..autodiff._function import AbstractFunction, function_call
from ..call._kernel import AbstractKernel
from ..call._operands import Operands, Settings, dequantized, hide_unreachable, is_static
from ..call._state import AttentionState
from ..xla._reference import dense_state
from ._derivative import Attention

Attend = Callable[[tuple[Any, ...], Settings, Operands], AttentionState]  # hashable


def attend_eight_bits(
    attend: Attend,
    names: tuple[Any, ...],
    kernels: tuple[AbstractKernel, ...],
    settings: Settings,
    operands: Operands,
) -> AttentionState:
    """The state of operands with scales, by the first of `kernels` that fits.

    Derivatives are those of dequantized operands, of which `attend(names, settings, operands)` gives the state, in both
    modes. Raises as `run_when_lowered` does, and there as `attend`.
    """
    return function_call(_EightBits(attend, names, kernels, settings), operands)


@dataclasses.dataclass(frozen=True)
class _EightBits(AbstractFunction):
    attend: Attend
    names: tuple[Any, ...]
    kernels: tuple[AbstractKernel, ...]
    settings: Settings

    def apply(self, args: Operands) -> AttentionState:
        if "decode" not in self.names or not _pays(args):
            return self._by_kernel(args)
        return lax.platform_dependent(
            args,
            tpu=functools.partial(_in_place, settings=self.settings),
            default=self._by_kernel,
        )

    def jvp(self, primals: Operands, tangents: Operands) -> tuple[AttentionState, AttentionState]:
        leaves, tree = jax.tree.flatten(primals)
        changes = tree.flatten_up_to(tangents)
        moved = [i for i, change in enumerate(changes) if change is not None]

        def run(*moving: Any) -> AttentionState:
            found = dict(zip(moved, moving, strict=True))
            return self._of_dequantized(
                tree.unflatten(found.get(i, x) for i, x in enumerate(leaves))
            )

        return jax.jvp(run, [leaves[i] for i in moved], [changes[i] for i in moved])

    def _by_kernel(self, operands: Operands) -> AttentionState:
        return Attention(self.kernels, self.settings).apply(operands)

    def _of_dequantized(self, operands: Operands) -> AttentionState:
        return self.attend(self.names, self.settings, dequantized(operands))


# XLA:TPU casts eight bits inside a product. Of eight bits times their scale it still writes keys or values
# to memory (libtpu 0.0.52), and for a Pallas kernel both: so scores and weights are scaled in their place. Red with
# keys and values dequantized: `test_nothing_is_dequantized` of tests/tpu.
def _in_place(operands: Operands, settings: Settings) -> AttentionState:
    return dense_state(settings, hide_unreachable(operands, settings))


def _pays(operands: Operands) -> bool:
    """Whether the scores take at most a quarter of the memory that dequantized keys and values would.

    In float16 weights times a scale would underflow; float64 is no dtype of TPUs.
    """
    query, key, value = operands.qkv
    if query.dtype.name not in ("bfloat16", "float32") or not is_static(*query.shape, *key.shape):
        return False
    widths = key.shape[2] * (key.shape[3] + value.shape[3])
    return 4 * 4 * query.shape[1] * query.shape[2] <= widths * query.dtype.itemsize
