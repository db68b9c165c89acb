"""Primitives that run, outside of other programs, as programs of their own."""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Primitive


def run_compiled(primitive: Primitive, static: tuple[str, ...]) -> Callable[..., Any]:
    """Compiles calls of a primitive, with these parameters that are no arrays, when it runs; returns its `bind`."""
    bind = jax.jit(primitive.bind, static_argnames=static)

    @primitive.def_impl
    def _(*flat: Any, **params: Any) -> Any:
        # it has no other implementation, also where `jax.disable_jit` is in force
        with jax.disable_jit(False):
            return bind(*flat, **params)

    return bind
