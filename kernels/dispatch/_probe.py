"""Finds out whether the installed JAX can lower a kernel, by lowering a small call of it once.

A private function that still exists may have another signature, and abstract evaluation may not
notice. So before a kernel is first used in a process, a program of its forward and backward is
lowered for the platform, which needs no device.
"""

import functools
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from ..call._kernel import AbstractKernel
from ..call._operands import KernelCall, Operands, Settings
from ..masks._structure import window_structure

_ROWS, _HEADS, _WIDTH = 640, 2, 64  # sizes that all vendors' kernels take, in several blocks


def obstacle(kernel: AbstractKernel, platform: str) -> str | None:
    """Why programs with a kernel cannot be lowered for one of its platforms; None if they can."""
    return _tried(kernel, platform, jax.config.jax_enable_x64)  # pyright: ignore[reportAttributeAccessIssue]


@functools.cache
def _tried(kernel: AbstractKernel, platform: str, x64: bool) -> str | None:
    # In a new thread, which has the default mesh and configuration: this is called while another
    # program is lowered, under its own.
    def run() -> str | None:
        with jax.enable_x64(x64):
            return _try(kernel, platform)

    with ThreadPoolExecutor(1) as alone:
        return alone.submit(run).result()


def _try(kernel: AbstractKernel, platform: str) -> str | None:
    query, key = (
        jax.ShapeDtypeStruct((1, _ROWS, heads, _WIDTH), jnp.bfloat16) for heads in (_HEADS, 1)
    )
    operands = Operands(query, key, key)  # pyright: ignore[reportArgumentType]
    settings = Settings(_WIDTH**-0.5, window_structure(right=0))
    try:
        kernel.check(KernelCall(operands, settings))
    except NotImplementedError:
        return None  # a call that the kernel declines says nothing about the others

    def run(operands: Operands) -> Any:
        call = KernelCall(operands, settings, platform)
        state = kernel.forward(call)
        return state, kernel.backward(call, state, state)

    wanted = query, jax.ShapeDtypeStruct(query.shape[:-1], jnp.float32), operands
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # lowering the user's program shows them
            lowered = jax.eval_shape(run, operands)
            jax.jit(run).trace(operands).lower(lowering_platforms=(platform,))
    except Exception as reason:
        # any exception: the code called is not ours, and the next kernel can take the call
        return f"wanted a JAX that lowers it, got {jax.__version__}: {reason or type(reason)}"
    if _types(lowered) != _types(wanted):
        return f"wanted a JAX that makes {_types(wanted)} of it, got {_types(lowered)}"
    return None


def _types(tree: PyTree) -> list[str]:
    return [f"{x.dtype}{list(x.shape)}" for x in jax.tree.leaves(tree)]
