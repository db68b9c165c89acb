"""Custom functions whose bits do not depend on the program around them."""

import functools
from collections.abc import Callable
from typing import TypeVar

from energy_attn.kernels.internal import checks, computed

Function = TypeVar("Function", bound=Callable[..., object])


def reproducible(function: Function) -> Function:
    """The function, with results whose bits do not depend on the program that it is part of.

    XLA computes `a * b + c` with one rounding where it fuses the two, and with two elsewhere, depending on the program
    and the number of devices. Here each product is rounded. For what is neither attention nor a layer, such as the
    update of an optimiser, in which weights are whole on every device. A program for a TPU or a GPU raises
    `NotImplementedError` for operations whose order is XLA's there, loops and branches among them.

    Args:
        function: of trees of arrays, made of JAX's operations. Its own loops and branches are left as they are.

    Returns:
        The same function. It is differentiated as any other; the bits of its derivatives are those of the program.

    Raises:
        TypeError: `function` is none.

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
