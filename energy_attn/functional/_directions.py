"""The derivative of a function of a tree in those of its leaves that move."""

from collections.abc import Callable
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array


def unmoved(tree: Any) -> Any:
    """The tangents of what does not move: None for every leaf."""
    return jax.tree.map(lambda _: None, tree)


def directional(
    function: Callable[[Any], Any], primals: Any, tangents: Any
) -> tuple[Any, Any] | None:
    """`jax.jvp` for tangents that are None or symbolic zeros where they are zero; None if all are."""
    flat, tree = jax.tree.flatten(primals)
    moving: dict[int, Array] = {}
    for i, x in enumerate(tree.flatten_up_to(tangents)):
        if x is not None and not isinstance(x, SymbolicZero):
            moving[i] = x
    if not moving:
        return None

    def of_moving(moved: dict[int, Array]) -> Any:
        return function(tree.unflatten({**dict(enumerate(flat)), **moved}.values()))

    return jax.jvp(of_moving, ({i: flat[i] for i in moving},), (moving,))
