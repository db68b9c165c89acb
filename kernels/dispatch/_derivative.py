"""Derivatives of attention in both modes: a tangent and a backward, each the transpose of the other."""

import abc
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ..autodiff._function import AbstractFunction, function_call
from ..autodiff._linear import AbstractLinearMap, linear_call
from ..call._checkpoint import named, named_rest
from ..call._kernel import AbstractKernel, as_read
from ..call._operands import (
    KernelCall,
    Operands,
    Settings,
    cotangents,
    differentiated,
)
from ..call._state import AttentionState
from ..fold._call import empty_like
from ..xla._blockwise import Blockwise
from ._lowering import run_when_lowered

Kernels = tuple[AbstractKernel, ...]


class Saved(NamedTuple):
    """The residuals that the derivatives of a state are computed from.

    Attributes:
        operands: of the call.
        state: its state.
        rest: what rounding took from its energies, `[B, T, N]`; None: it is not known. The weights of a backward are
            `exp(s - lse)`, whose sum is off by as much as `lse`.
    """

    operands: Operands
    state: AttentionState
    rest: Array | None = None


class AbstractDerivative(abc.ABC):
    """The derivative of a state of attention at given operands; static and hashable."""

    @abc.abstractmethod
    def tangent(self, saved: Saved, directions: Operands) -> AttentionState:
        """The derivative in the directions that are not None."""

    @abc.abstractmethod
    def backward(self, saved: Saved, cotangent: AttentionState, moved: Operands) -> Operands:
        """The cotangents of what is differentiated; those that `moved` does not name are dropped."""

    @abc.abstractmethod
    def plain(self) -> "AbstractDerivative":
        """The same derivative in JAX's operations, of which JAX takes those of higher order."""


def tangent_along(
    derivative: AbstractDerivative, saved: Saved, changes: Operands
) -> AttentionState:
    """The tangent of a state, for tangents of its operands that are None where they are zero.

    What does not move costs nothing, in this mode or in the other.
    """
    directions = differentiated(changes)  # masks, positions and segments do not move
    if not jax.tree.leaves(directions):
        return jax.tree.map(jnp.zeros_like, saved.state)
    return linear_call(Tangent(derivative), saved, directions)


def keep_moved(found: Operands, moved: Operands) -> Operands:
    """Those of the cotangents that are True in `moved`; None for the others."""
    names = "query", "key", "value", "bias", "sink"
    kept = {name: getattr(found, name) if getattr(moved, name) else None for name in names}
    # a kernel that takes no scores may return None for their arrays
    pairs = zip(found.score_arrays or (), moved.score_arrays, strict=True)
    return cotangents(**kept, score_arrays=tuple(x if some else None for x, some in pairs))


def needing_moved(settings: Settings, moved: Operands) -> Settings:
    """The settings of a backward of which the cotangents in `moved` are kept."""
    return settings.needing(
        score_grad=any(x is not None for x in moved.score_arrays),
        bias_grad=moved.bias is not None,
        sink_grad=moved.sink is not None,
    )


@dataclasses.dataclass(frozen=True)
class Tangent(AbstractLinearMap):
    """The derivative of a state in a direction, at given operands and state."""

    derivative: AbstractDerivative

    def apply(self, fixed: Saved, moving: Operands) -> AttentionState:
        """The tangent."""
        return self.derivative.tangent(fixed, moving)

    def plain(self, fixed: Saved, moving: Operands) -> AttentionState:
        """The tangent in JAX's operations."""
        return self.derivative.plain().tangent(fixed, moving)

    def transpose(self, fixed: Saved, moving: Operands, cotangent: AttentionState) -> Operands:
        """The backward."""
        moved = jax.tree.map(lambda _: True, moving)
        return linear_call(Pullback(self.derivative, moved), fixed, cotangent)


@dataclasses.dataclass(frozen=True)
class Pullback(AbstractLinearMap):
    """The cotangents of the operands that are True in `moved`, and not None, from those of a state.

    A cotangent of `lse` that is None is zero: then one call of a vendor's backward, which takes none,
    is enough.
    """

    derivative: AbstractDerivative
    moved: Operands

    def apply(self, fixed: Saved, moving: AttentionState) -> Operands:
        """The backward."""
        return self._of(self.derivative, fixed, moving)

    def plain(self, fixed: Saved, moving: AttentionState) -> Operands:
        """The backward in JAX's operations."""
        return self._of(self.derivative.plain(), fixed, moving)

    def _of(self, derivative: AbstractDerivative, fixed: Saved, moving: AttentionState) -> Operands:
        if moving.out is None:
            moving = moving._replace(out=jnp.zeros_like(fixed.state.out))
        found = derivative.backward(fixed, moving, self.moved)
        return keep_moved(found, self.moved)

    def transpose(
        self, fixed: Saved, moving: AttentionState, cotangent: Operands
    ) -> AttentionState:
        """The tangent."""
        found = linear_call(Tangent(self.derivative), fixed, cotangent)
        kept = zip(moving, found, strict=True)
        return AttentionState._make(None if x is None else y for x, y in kept)


@dataclasses.dataclass(frozen=True)
class Attention(AbstractFunction):
    """The state by the first of `kernels` that fits; `out` and `lse` are differentiable, in both modes.

    First derivatives are the kernel's own `tangent` and `backward`, each of which is the transpose of
    the other; those of higher order are JAX's, of the blockwise ones. Raises as `run_when_lowered`.
    """

    kernels: Kernels
    settings: Settings

    def apply(self, args: Operands) -> AttentionState:
        first = self.kernels[0]
        if first.platforms:
            return run_when_lowered(_forward, empty_like, self.kernels, self.settings, args)
        return first.forward(as_read(first, KernelCall(args, self.settings)))

    def jvp(self, primals: Operands, tangents: Operands) -> tuple[AttentionState, AttentionState]:
        state, rest = function_call(_WithRest(self.kernels, self.settings), primals)
        state, rest = named(state), named_rest(rest)
        saved = Saved(primals, state, rest)
        return state, tangent_along(_OfKernels(self.kernels, self.settings), saved, tangents)


@dataclasses.dataclass(frozen=True)
class _WithRest(AbstractFunction):
    """The same, and what rounding took from its energies, which does not move."""

    kernels: Kernels
    settings: Settings

    def apply(self, args: Operands) -> tuple[AttentionState, Array]:
        return run_when_lowered(_with_rest, _like_rest, self.kernels, self.settings, args)

    def jvp(self, primals: Operands, tangents: Operands) -> tuple[Any, Any]:
        found: tuple[AttentionState, Array] = function_call(self, primals)
        derivative = _OfKernels(self.kernels, self.settings)
        return found, (tangent_along(derivative, Saved(primals, *found), tangents), None)


@dataclasses.dataclass(frozen=True)
class _OfKernels(AbstractDerivative):
    """The derivative by the first of `kernels` that fits."""

    kernels: Kernels
    settings: Settings

    def tangent(self, saved: Saved, directions: Operands) -> AttentionState:
        of = self.kernels, self.settings, saved.operands
        return run_when_lowered(_tangent, _like_state, *of, saved.state, directions)

    def backward(self, saved: Saved, cotangent: AttentionState, moved: Operands) -> Operands:
        of = self.kernels, needing_moved(self.settings, moved), saved.operands
        return run_when_lowered(_backward, _like_operands, *of, saved.state, saved.rest, cotangent)

    def plain(self) -> AbstractDerivative:
        # All kernels compute the same function, so the derivative of any tangent or backward is that
        # of the blockwise one, which is written in JAX.
        if self.kernels[-1].reproducible:
            raise NotImplementedError(
                "reproducible: wanted False for second derivatives, whose sums would be in another order, got True"
            )
        blockwise = next((x for x in self.kernels if isinstance(x, Blockwise)), Blockwise())
        return _OfKernels((blockwise,), self.settings)


def _forward(kernel: AbstractKernel, call: KernelCall) -> AttentionState:
    return kernel.forward(call)


def _with_rest(kernel: AbstractKernel, call: KernelCall) -> tuple[AttentionState, Array]:
    return kernel.forward_and_rest(call)


def _like_rest(settings: Settings, operands: Operands) -> tuple[AttentionState, Array]:
    state = empty_like(settings, operands)
    return state, state.lse


def _tangent(
    kernel: AbstractKernel, call: KernelCall, state: AttentionState, directions: Operands
) -> AttentionState:
    found = kernel.tangent(call, state, directions)
    if found is not None:
        return found
    call = call._replace(operands=call.operands.positioned(read=False))
    return Blockwise().tangent(call, state, directions)


def _backward(
    kernel: AbstractKernel,
    call: KernelCall,
    state: AttentionState,
    rest: Array,
    cotangent: AttentionState,
) -> Operands:
    return kernel.backward(call, state, kernel.corrected(cotangent, rest))


def _like_state(settings: Settings, operands: Operands, state: AttentionState, *_: Any) -> Any:
    return jax.tree.map(jnp.zeros_like, state)


def _like_operands(settings: Settings, operands: Operands, *_: Any) -> Operands:
    return jax.tree.map(jnp.zeros_like, differentiated(operands))
