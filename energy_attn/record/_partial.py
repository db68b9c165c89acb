"""A transformed function: a pytree, as the function may be a module, and hashable, as `jax.jit` wants it."""

from collections.abc import Callable
from typing import Any

import equinox as eqx


class Partial(eqx.Module):
    """`run` with its first arguments; unlike `equinox.Partial`, hashable if they are."""

    run: Callable[..., Any] = eqx.field(static=True)
    first: tuple[Any, ...]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """`run(*first, *args, **kwargs)`."""
        return self.run(*self.first, *args, **kwargs)
