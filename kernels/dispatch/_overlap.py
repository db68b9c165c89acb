"""Transfers between devices that overlap with computation."""

import dataclasses
from typing import Any, TypeVar

from jax import lax

from ..autodiff._function import AbstractFunction, function_call

Computed = TypeVar("Computed")
Tree = TypeVar("Tree")


def overlap_transfer(computed: Computed, in_flight: Tree) -> tuple[Computed, Tree]:
    """Returns both behind an optimization barrier, so that XLA overlaps the transfer with the computation.

    XLA:TPU starts a transfer as late as it can, after all products if sums or copies of their results could
    hide it. Behind the barrier these cannot, so the products do (red without: `test_a_ring_sends_while_it_computes`).
    """
    return function_call(_OverlapTransfer(), (computed, in_flight))


@dataclasses.dataclass(frozen=True)
class _OverlapTransfer(AbstractFunction):
    def apply(self, args: tuple[Any, Any]) -> tuple[Any, Any]:
        return lax.optimization_barrier(args)

    def jvp(self, primals: Any, tangents: Any) -> tuple[Any, Any]:
        # JAX's rule would make arrays of tangents that are zero, which a ring would then send
        return function_call(self, primals), tangents
