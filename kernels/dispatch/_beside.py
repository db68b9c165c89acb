"""Transfers between devices beside products."""

import dataclasses
from typing import Any, TypeVar

from jax import lax

from ._function import AbstractFunction, function_call

Found = TypeVar("Found")
Tree = TypeVar("Tree")


def beside(found: Found, arriving: Tree) -> tuple[Found, Tree]:
    """What is computed, and what arrives meanwhile from other devices; neither is used before both are there.

    XLA:TPU starts a transfer only as early as it thinks is needed, behind all products if there are sums
    or copies of their results. None of these can now be beside the transfer, so the products are.
    """
    return function_call(_Beside(), (found, arriving))


@dataclasses.dataclass(frozen=True)
class _Beside(AbstractFunction):
    def apply(self, args: tuple[Any, Any]) -> tuple[Any, Any]:
        return lax.optimization_barrier(args)

    def jvp(self, primals: Any, tangents: Any) -> tuple[Any, Any]:
        # JAX's rule would make arrays of tangents that are zero, which a ring would then send
        return function_call(self, primals), tangents
