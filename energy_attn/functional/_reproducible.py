"""Custom functions whose bits do not depend on the program around them."""

import functools
from collections.abc import Callable
from typing import TypeVar

from energy_attn.kernels.internal import checks, computed

Function = TypeVar("Function", bound=Callable[..., object])


def reproducible(function: Function) -> Function:
    """Transforms a function so that the bits of its results do not depend on the program around it.

    XLA computes `a * b + c` with one rounding where it fuses the operations, and with two elsewhere, depending on the
    program and the number of devices. The transformed function rounds each product. It is for functions outside of
    attention and layers, such as the update of an optimiser with replicated weights. A program for a TPU or a GPU
    raises `NotImplementedError` for loops, branches and other operations whose order XLA chooses.

    Args:
        function: a function of trees of arrays, made of JAX's operations. Its own loops and branches do not change.

    Returns:
        The function. Its derivatives are not reproducible.

    Raises:
        TypeError: `function` is not callable.

    Examples:
        >>> import jax, jax.numpy as jnp, optax
        >>> import energy_attn as ea
        >>> adam = optax.adam(1e-3)
        >>> @jax.jit
        ... @ea.reproducible
        ... def update(gradient, weights, state):
        ...     change, state = adam.update(gradient, state, weights)
        ...     return optax.apply_updates(weights, change), state
        >>> weights = {"w": jnp.ones(3)}
        >>> weights, state = update({"w": jnp.ones(3)}, weights, adam.init(weights))
        >>> weights["w"].shape
        (3,)
    """
    if not callable(function):
        raise TypeError(f"function: wanted a function of arrays, got {checks.received(function)}")

    @functools.wraps(function)
    def run(*args: object) -> object:
        return computed(function, *args)

    return run  # pyright: ignore[reportReturnType]
