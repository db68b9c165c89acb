"""A transformed function: a pytree, as the function may be a module, and hashable, as `jax.jit` wants it."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
from jaxtyping import PyTree


class Partial(eqx.Module):
    """`run` with its first arguments; unlike `equinox.Partial`, hashable if they are."""

    run: Callable[..., Any] = eqx.field(static=True)
    first: tuple[Any, ...]

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """`run(*first, *args, **kwargs)`."""
        return self.run(*self.first, *args, **kwargs)
