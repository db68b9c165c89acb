"""Whether the JAX that is installed can lower a kernel: found by lowering a small call of it, once.

A name that is still there may want other arguments than it did, and abstract evaluation may let
them pass. So before a kernel's first use in a process, a program of its forward and backward is
lowered for the platform in question, which needs no device of it.
"""

import functools
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

from ..call._arguments import Operands, Settings
from ..call._kernel import AbstractKernel
from ..call._mask import Rule

_ROWS, _HEADS, _WIDTH = 128, 2, 64  # that all vendors' kernels take


def obstacle(kernel: AbstractKernel, platform: str) -> str | None:
    """Why programs with a kernel cannot be lowered for a platform of its own; None if they can."""
    return _tried(kernel, platform, jax.config.jax_enable_x64)  # pyright: ignore[reportAttributeAccessIssue]


@functools.cache
def _tried(kernel: AbstractKernel, platform: str, x64: bool) -> str | None:
    # In a thread of its own: this is asked while another program is lowered, under that one's
    # mesh and switches, of which a new thread has none.
    def run() -> str | None:
        with jax.enable_x64(x64):
            return _try(kernel, platform)

    with ThreadPoolExecutor(1) as alone:
        return alone.submit(run).result()


def _try(kernel: AbstractKernel, platform: str) -> str | None:
    query, key = (
        jax.ShapeDtypeStruct((1, _ROWS, heads, _WIDTH), jnp.bfloat16) for heads in (_HEADS, 1)
    )
    operands = Operands(query, key, key, None, None, None, None)  # pyright: ignore[reportArgumentType]
    settings = Settings(_WIDTH**-0.5, Rule(is_causal=True))
    try:
        kernel.check(operands, settings)
    except NotImplementedError:
        return None  # of the calls that it does take, this says nothing

    def run(operands: Operands) -> Any:
        state = kernel.forward(operands, settings, platform)
        return state, kernel.backward(operands, settings, state, state, platform)

    wanted = query, jax.ShapeDtypeStruct(query.shape[:-1], jnp.float32), operands
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # whoever lowers a program of theirs sees them
            found = jax.eval_shape(run, operands)
            jax.jit(run).trace(operands).lower(lowering_platforms=(platform,))
    except Exception as reason:
        # whatever it is: what is called is not ours, and the next kernel is there
        return f"wanted a JAX that lowers it, got {jax.__version__}: {reason or type(reason)}"
    if _types(found) != _types(wanted):
        return f"wanted a JAX that makes {_types(wanted)} of it, got {_types(found)}"
    return None


def _types(tree: Any) -> list[str]:
    return [f"{x.dtype}{list(x.shape)}" for x in jax.tree.leaves(tree)]
