"""Attention with a derivative, made of a kernel's `forward` and `backward`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from ..call._kernel import AbstractKernel
from ..call._operands import Operands, Settings, cotangents
from ..call._state import AttentionState
from ..xla._blockwise import Blockwise, empty_like
from ._lowering import run_when_lowered

Kernels = tuple[AbstractKernel, ...]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def differentiable_attention(
    kernels: Kernels, settings: Settings, operands: Operands
) -> AttentionState:
    """The state by the first of `kernels` that fits; both `out` and `lse` are differentiable.

    First derivatives are the kernel's own `backward`; second derivatives in reverse mode
    differentiate the blockwise backward. Forward mode raises JAX's `TypeError` for a custom_vjp.
    Raises as `run_when_lowered`.
    """
    return run_when_lowered(_forward, empty_like, kernels, settings, operands)


def _forward(
    kernel: AbstractKernel, settings: Settings, platform: str | None, operands: Operands
) -> AttentionState:
    return kernel.forward(operands, settings, platform)


def _save(kernels: Kernels, settings: Settings, operands: Operands) -> Any:
    leaves, tree = jax.tree.flatten(operands, is_leaf=lambda x: hasattr(x, "perturbed"))
    return _run_and_save(kernels, settings, tree.unflatten(x.value for x in leaves))


# In a jit of its own: in a loop that is differentiated twice, JAX 0.8 to 0.10 confuses the arguments
# of a rule inside a rule with constants of the loop.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _run_and_save(kernels: Kernels, settings: Settings, operands: Operands) -> Any:
    # `differentiable_attention`, not `run_when_lowered`: the saved state enters the backward, and is
    # differentiated with it
    state: AttentionState = differentiable_attention(kernels, settings, operands)
    return state, (operands, state)


def _pull_back(
    kernels: Kernels,
    settings: Settings,
    saved: tuple[Operands, AttentionState],
    cotangent: AttentionState,
) -> tuple[Operands]:
    operands, state = saved
    out, lse = (None if isinstance(x, SymbolicZero) else x for x in cotangent)
    if out is None:
        out = jnp.zeros_like(state.out)
    return (_backward(kernels, settings, operands, state, AttentionState(out, lse)),)  # pyright: ignore[reportArgumentType]  # lse may be None


# With symbolic zeros, a cotangent of `out` alone (nearly all training) is recognised, and one call of
# a vendor's backward, which takes no cotangent of lse, is enough.
differentiable_attention.defvjp(_save, _pull_back, symbolic_zeros=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _backward(
    kernels: Kernels,
    settings: Settings,
    operands: Operands,
    state: AttentionState,
    cotangent: AttentionState,
) -> Operands:
    return run_when_lowered(_run_backward, _zeros, kernels, settings, operands, state, cotangent)


def _run_backward(
    kernel: AbstractKernel,
    settings: Settings,
    platform: str | None,
    operands: Operands,
    state: AttentionState,
    cotangent: AttentionState,
) -> Operands:
    return kernel.backward(operands, settings, state, cotangent, platform)


def _zeros(settings: Settings, operands: Operands, *others: AttentionState) -> Operands:
    del settings
    return cotangents(*(None if x is None else jnp.zeros_like(x) for x in operands[:4]))


# All kernels compute the same function, so the derivative of any backward is that of the blockwise
# one, which is written in JAX.
def _save_backward(
    kernels: Kernels, settings: Settings, *saved: Operands | AttentionState
) -> tuple[Operands, tuple[Operands | AttentionState, ...]]:
    return _backward(kernels, settings, *saved), saved


def _pull_back_backward(
    kernels: Kernels,
    settings: Settings,
    saved: tuple[Operands | AttentionState, ...],
    cotangent: Operands,
) -> Any:
    blockwise = next((kernel for kernel in kernels if isinstance(kernel, Blockwise)), Blockwise())

    def backward(operands: Operands, state: AttentionState, cotangent: AttentionState) -> Operands:
        return blockwise.backward(operands, settings, state, cotangent, None)

    return jax.vjp(backward, *saved)[1](cotangent)


_backward.defvjp(_save_backward, _pull_back_backward)
