"""Functions of which each product is rounded: XLA fuses products with sums in some programs only."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, Literal

from ..call._state import unfused

_PRODUCTS = "mul", "div", "integer_pow", "square"  # XLA divides by a constant as it multiplies
_CALLS = "jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call"


def rounded_products(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)` of arrays, where XLA fuses no product with what follows.

    Not inside of loops and branches that the function has.
    """
    program, struct = jax.make_jaxpr(function, return_shape=True)(*args)
    found = _evaluated(program.jaxpr, program.consts, jax.tree.leaves(args))
    return jax.tree.unflatten(jax.tree.structure(struct), found)


def _evaluated(program: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    known: dict[Any, Any] = dict(
        zip([*program.constvars, *program.invars], [*consts, *args], strict=True)
    )

    def read(x: Any) -> Any:
        return x.val if isinstance(x, Literal) else known[x]

    for step in program.eqns:
        given, name = [read(x) for x in step.invars], step.primitive.name
        if name in _CALLS:
            inner = step.params.get("jaxpr") or step.params["call_jaxpr"]
            found = _evaluated(inner.jaxpr, inner.consts, given)
        else:
            found = step.primitive.bind(*given, **step.params)
            found = found if step.primitive.multiple_results else [found]
        if name in _PRODUCTS:
            found = [unfused(x) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in found]
        known |= dict(zip(step.outvars, found, strict=True))
    return [read(x) for x in program.outvars]
