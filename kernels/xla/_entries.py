"""Functions of the entries of a batch."""

from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array


def each_entry(f: Callable[..., Any], first: Array, *rest: Array | None) -> Any:
    """`f` of each entry of a batch; of a single one without a batch axis, as XLA:CPU runs its operations fastest."""
    if first.shape[0] != 1:
        return jax.vmap(f)(first, *rest)
    one = f(first[0], *(x if x is None else x[0] for x in rest))
    return jax.tree.map(lambda x: x[None], one)
