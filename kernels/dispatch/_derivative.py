"""Derivatives of attention in both modes: a tangent and a backward, each the transpose of the other."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from ..autodiff._function import (
    AbstractFunction,
    AbstractLinearMap,
    function_call,
    jvp_of_some,
    linear_call,
)
from ..call._kernel import AbstractKernel
from ..call._operands import (
    KernelCall,
    Operands,
    Settings,
    dequantized,
    differentiated,
    hide_unreachable,
    is_static,
    map_some,
    with_moved,
)
from ..call._state import AttentionState
from ..fold._call import empty_like
from ..xla._blocks import score_maximum
from ..xla._blockwise import Blockwise
from ..xla._reference import dense_state
from ._lowering import run_when_lowered

Kernels = tuple[AbstractKernel, ...]
Attend = Callable[[tuple[Any, ...], Settings, Operands], AttentionState]  # hashable


CHECKPOINT_NAMES = ("energy_attn_out", "energy_attn_lse")
"""The names, by `jax.ad_checkpoint.checkpoint_name`, of the residuals of a call's derivative in addition to its
operands: `out`, and arrays of the size of `lse`.

A policy of `jax.checkpoint` that keeps them, as `jax.checkpoint_policies.save_only_these_names(*CHECKPOINT_NAMES)`, or
one that offloads them, has a backward that computes all else again, but no attention: the derivative needs
queries, keys and values, which are cheap, and the state, which is not. On a mesh the states before and after a merge
have these names; a tree's merge of sharded queries recomputes its maxima.

Examples:
    >>> import jax, jax.numpy as jnp
    >>> import energy_attn as ea
    >>> policy = jax.checkpoint_policies.save_only_these_names(*ea.CHECKPOINT_NAMES)
    >>> layer = jax.checkpoint(lambda x: ea.attention(x, x, x).sum(), policy=policy)
    >>> jax.grad(layer)(jnp.ones((3, 2, 4))).shape
    (3, 2, 4)
"""


def with_checkpoint_names(state: AttentionState) -> AttentionState:
    return AttentionState(*map(checkpoint_name, state, CHECKPOINT_NAMES))


def with_lse_name(rest: Array) -> Array:
    return checkpoint_name(rest, CHECKPOINT_NAMES[1])


class Saved(NamedTuple):
    """The residuals that the derivatives of a state are computed from.

    `rest`: the rounding error of its energies, `[B, T, N]`, or None where it is not known. The weights of a backward
    are `exp(s - lse)`, whose sum is off by as much as `lse`.
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
    def backward(self, saved: Saved, cotangent: AttentionState, needs_grad: Operands) -> Operands:
        """The cotangents of the operands that are not None in `needs_grad`; others are dropped."""

    @abc.abstractmethod
    def plain(self) -> "AbstractDerivative":
        """The derivative in JAX's operations, which JAX differentiates again."""


def tangent_along(
    derivative: AbstractDerivative, saved: Saved, changes: Operands
) -> AttentionState:
    """The tangent of a state, for tangents of its operands that are None where they are zero.

    Operands without a tangent cost nothing, in either mode.
    """
    directions = differentiated(changes)  # masks, positions and segments have no tangents
    if not jax.tree.leaves(directions):
        return jax.tree.map(jnp.zeros_like, saved.state)
    return linear_call(Tangent(derivative), saved, directions)


def keep_needed(result: Operands, needs_grad: Operands) -> Operands:
    """Keeps the cotangents that are not None in `needs_grad`, and replaces the others by None."""
    # a kernel that takes no scores may return None for their arrays
    result = result._replace(score_arrays=result.score_arrays or ())
    return map_some(lambda _, x: x, needs_grad, result)


def needing(settings: Settings, needs_grad: Operands) -> Settings:
    """The settings of a backward that computes the cotangents in `needs_grad`."""
    return settings.needing(
        score_grad=any(x is not None for x in needs_grad.score_arrays),
        bias_grad=needs_grad.bias is not None,
        sink_grad=needs_grad.sink is not None,
    )


@dataclasses.dataclass(frozen=True)
class Tangent(AbstractLinearMap):
    derivative: AbstractDerivative

    def apply(self, fixed: Saved, moving: Operands) -> AttentionState:
        return self.derivative.tangent(fixed, moving)

    def plain(self, fixed: Saved, moving: Operands) -> AttentionState:
        return self.derivative.plain().tangent(fixed, moving)

    def transpose(self, fixed: Saved, moving: Operands, cotangent: AttentionState) -> Operands:
        # (dout, dF) = J dx, and J^T is the backward
        needs_grad = jax.tree.map(lambda _: True, moving)
        return linear_call(Pullback(self.derivative, needs_grad), fixed, cotangent)


@dataclasses.dataclass(frozen=True)
class Pullback(AbstractLinearMap):
    """The cotangents of the operands that are True in `needs_grad`, given a cotangent of the state.

    A cotangent of `lse` that is None is zero: one call of a vendor's backward, which takes none, is enough.
    """

    derivative: AbstractDerivative
    needs_grad: Operands

    def apply(self, fixed: Saved, moving: AttentionState) -> Operands:
        return self._of(self.derivative, fixed, moving)

    def plain(self, fixed: Saved, moving: AttentionState) -> Operands:
        return self._of(self.derivative.plain(), fixed, moving)

    def _of(self, derivative: AbstractDerivative, fixed: Saved, moving: AttentionState) -> Operands:
        if moving.out is None:
            moving = moving._replace(out=jnp.zeros_like(fixed.state.out))
        result = derivative.backward(fixed, moving, self.needs_grad)
        return keep_needed(result, self.needs_grad)

    def transpose(
        self, fixed: Saved, moving: AttentionState, cotangent: Operands
    ) -> AttentionState:
        # (J^T)^T = J
        result = linear_call(Tangent(self.derivative), fixed, cotangent)
        kept = zip(moving, result, strict=True)
        return AttentionState._make(None if x is None else y for x, y in kept)


@dataclasses.dataclass(frozen=True)
class Attention(AbstractFunction):
    """The state by the first of `kernels` that fits; `out` and `lse` are differentiable, in both modes.

    `has_rest`: whether the rounding error of `lse`, a constant for derivatives, is returned, too. First derivatives are
    the kernel's own `tangent` and `backward`, each of which is the transpose of the other; derivatives of higher order
    are JAX's, of the blockwise ones. Raises as `run_when_lowered`.
    """

    kernels: Kernels
    settings: Settings
    has_rest: bool = False

    def apply(self, args: Operands) -> Any:
        method, like = (_with_rest, like_rest) if self.has_rest else (_forward, empty_like)
        return run_when_lowered(method, like, self.kernels, self.settings, args)

    def jvp(self, primals: Operands, tangents: Operands) -> tuple[Any, Any]:
        state, rest = function_call(dataclasses.replace(self, has_rest=True), primals)
        if not self.has_rest:
            state, rest = with_checkpoint_names(state), with_lse_name(rest)
        derivative = KernelDerivative(self.kernels, self.settings)
        change = tangent_along(derivative, Saved(primals, state, rest), tangents)
        return ((state, rest), (change, None)) if self.has_rest else (state, change)


@dataclasses.dataclass(frozen=True)
class AttentionAndMaximum(AbstractFunction):
    """The state, the rounding error of `lse` and the largest score of each row, by the first of `kernels` that fits.

    The state is differentiated as that of `Attention`, and the largest score by a walk over the keys.
    """

    kernels: Kernels
    settings: Settings

    def apply(self, args: Operands) -> tuple[AttentionState, Array, Array]:
        return run_when_lowered(_with_maximum, _like_maximum, self.kernels, self.settings, args)

    def jvp(self, primals: Operands, tangents: Operands) -> tuple[Any, Any]:
        result = function_call(self, primals)
        derivative = KernelDerivative(self.kernels, self.settings)
        change = tangent_along(derivative, Saved(primals, *result[:2]), tangents)
        directions, moved = differentiated(tangents), None
        if jax.tree.leaves(directions):
            moved = linear_call(_MaximumTangent(self.settings), primals, directions)
        return result, (change, None, moved)


@dataclasses.dataclass(frozen=True)
class _MaximumTangent(AbstractLinearMap):
    """The derivative of the largest score: of one of the scores that are largest."""

    settings: Settings

    def apply(self, fixed: Operands, moving: Operands) -> Array:
        return jax.jvp(*self._of(fixed, moving), (moving,))[1]

    def plain(self, fixed: Operands, moving: Operands) -> Array:
        return self.apply(fixed, moving)

    def transpose(self, fixed: Operands, moving: Operands, cotangent: Array) -> Operands:
        f, primals = self._of(fixed, moving)
        return jax.vjp(f, *primals)[1](cotangent)[0]

    def _of(self, fixed: Operands, moving: Operands) -> tuple[Callable[..., Array], Any]:
        def largest(moved: Operands) -> Array:
            return score_maximum(self.settings, with_moved(fixed, moved))

        return largest, (map_some(lambda _, x: x, moving, fixed),)


@dataclasses.dataclass(frozen=True)
class KernelDerivative(AbstractDerivative):
    kernels: Kernels
    settings: Settings

    def tangent(self, saved: Saved, directions: Operands) -> AttentionState:
        of = self.kernels, self.settings, saved.operands
        return run_when_lowered(_tangent, like_state, *of, saved.state, directions)

    def backward(self, saved: Saved, cotangent: AttentionState, needs_grad: Operands) -> Operands:
        of = self.kernels, needing(self.settings, needs_grad), saved.operands
        return run_when_lowered(_backward, _like_operands, *of, saved.state, saved.rest, cotangent)

    def plain(self) -> AbstractDerivative:
        return KernelDerivative((second_order_kernel(self.kernels),), self.settings)


def second_order_kernel(kernels: Kernels) -> AbstractKernel:
    """The kernel whose derivatives JAX differentiates in second and higher order."""
    if kernels[0].differentiated_by_jax:
        return kernels[0]
    # All kernels compute the same function, so the derivative of any tangent or backward is that
    # of the blockwise one, which is written in JAX.
    if kernels[-1].reproducible:
        raise NotImplementedError(
            "reproducible: wanted False for second derivatives, whose sums would be in another order, got True"
        )
    return next((x for x in kernels if isinstance(x, Blockwise)), Blockwise())


def _forward(kernel: AbstractKernel, call: KernelCall) -> AttentionState:
    return kernel.forward(call)


def _with_rest(kernel: AbstractKernel, call: KernelCall) -> tuple[AttentionState, Array]:
    return kernel.forward_and_rest(call)


def _with_maximum(kernel: AbstractKernel, call: KernelCall) -> tuple[AttentionState, Array, Array]:
    state, rest, maximum = kernel.forward_and_maximum(call)
    return state, rest, score_maximum(call.settings, call.operands) if maximum is None else maximum


def _like_maximum(settings: Settings, operands: Operands) -> tuple[AttentionState, Array, Array]:
    state, rest = like_rest(settings, operands)
    return state, rest, state.lse


def like_rest(settings: Settings, operands: Operands) -> tuple[AttentionState, Array]:
    state = empty_like(settings, operands)
    return state, state.lse


def _tangent(
    kernel: AbstractKernel, call: KernelCall, state: AttentionState, directions: Operands
) -> AttentionState:
    result = kernel.tangent(call, state, directions)
    if result is not None:
        return result
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


def like_state(settings: Settings, operands: Operands, state: AttentionState, *_: object) -> Any:
    return jax.tree.map(jnp.zeros_like, state)


def _like_operands(settings: Settings, operands: Operands, *_: object) -> Operands:
    return jax.tree.map(jnp.zeros_like, differentiated(operands))


@dataclasses.dataclass(frozen=True)
class EightBits(AbstractFunction):
    """The state of operands with scales, by the first of `kernels` that fits.

    Few queries on a TPU or a GPU read keys and values of eight bits as they are stored. Derivatives in both modes are
    those of `attend(names, settings, operands)` at the dequantized operands.
    """

    attend: Attend
    names: tuple[Any, ...]
    kernels: tuple[AbstractKernel, ...]
    settings: Settings

    def apply(self, args: Operands) -> AttentionState:
        by_kernel = Attention(self.kernels, self.settings).apply
        if "decode" not in self.names or not _pays(args):
            return by_kernel(args)

        # XLA:TPU casts eight bits inside a product. Of eight bits times their scale it still writes keys or values
        # to memory (libtpu 0.0.52), and for a Pallas kernel both: so scores and weights are scaled in their place.
        # `test_nothing_is_dequantized` of tests/tpu fails with keys and values dequantized.
        def in_place(args: Operands) -> AttentionState:
            return dense_state(self.settings, hide_unreachable(args, self.settings))

        return lax.platform_dependent(args, tpu=in_place, default=by_kernel)

    def jvp(self, primals: Operands, tangents: Operands) -> tuple[AttentionState, AttentionState]:
        leaves, tree = jax.tree.flatten(primals)

        def run(*leaves: Array) -> AttentionState:
            return self.attend(self.names, self.settings, dequantized(tree.unflatten(leaves)))

        return jvp_of_some(run, leaves, tree.flatten_up_to(tangents))


def _pays(operands: Operands) -> bool:
    # Whether the scores take at most a quarter of the memory that dequantized keys and values would. In float16 weights
    # times a scale would underflow; float64 is no dtype of TPUs.
    query, key, value = operands.qkv
    if query.dtype.name not in ("bfloat16", "float32") or not is_static(*query.shape, *key.shape):
        return False
    widths = key.shape[2] * (key.shape[3] + value.shape[3])
    return 4 * 4 * query.shape[1] * query.shape[2] <= widths * query.dtype.itemsize
