"""The mask by any function of positions."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from .._checks import (
    broadcasts,
    check_array,
    check_boolean,
    check_function,
    check_hashable,
    check_integer,
    received,
)
from ._abstract import AbstractMask


class Function(AbstractMask):
    r"""The mask that a function computes: $\mathrm{visible}_{ij} = f(p_i, p_j, \theta)$.

    Blocks of keys that it hides are not read: the function is evaluated for all pairs, once in a call. Pallas
    kernels compute what depends on one position alone (`ids[query]`) once in a call, too, and the rest in
    tiles; they decline tables by query and key (`table[query, key]`).

    Args:
        function: `function(query_positions, key_positions, *parameters)`, elementwise on int32 arrays
            that broadcast, to booleans that broadcast to them. It is part of the program: the same
            function is the same program, and a new `lambda` a new one.
        *parameters: integers or booleans, or arrays of them. Traced values have to be passed here, as
            values that the function closes over are constants.
        batched: whether all parameters have a first axis of the batch, 1 or `B`, of which the function
            gets an entry.

    Raises:
        TypeError: no function, one that takes other arguments, or a parameter that is no array of
            integers or booleans: a mask has no derivative.
        ValueError: a function that cannot be hashed.

    Source: flex attention (arXiv 2412.05496), the masks by function.

    Examples:
        >>> import jax.numpy as jnp
        >>> from energy_attn import masks
        >>> strided = masks.Function(lambda query, key, step: (query - key) % step == 0, 3)
        >>> (masks.Causal() & strided).visible(jnp.array([[6]]), jnp.arange(8)[None]).astype(int).tolist()
        [[1, 0, 0, 1, 0, 0, 1, 0]]
    """

    function: Callable[..., Any] = eqx.field(static=True)
    parameters: tuple[Any, ...]
    batched: bool = eqx.field(static=True)

    def __init__(
        self,
        function: Callable[..., Any],
        *parameters: int | Array | np.ndarray | np.generic,
        batched: bool = False,
    ) -> None:
        self.function = function
        self.parameters = tuple(map(_parameter, parameters))
        self.batched = batched
        if batched and not all(x.ndim for x in self.parameters):
            raise ValueError("parameters: wanted a first axis of the batch in each, got a scalar")
        check_function("function", function, "query", "key", *("parameter",) * len(parameters))
        check_hashable("function", function)

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(x.ndim - self.batched for x in self.parameters)

    def visible(self, query: Int[Array, "..."], key: Int[Array, "..."]) -> Bool[Array, "..."]:
        """The function's result. Raises if it is not boolean or does not broadcast."""
        result = check_boolean("function's result", self.function(query, key, *self.parameters))
        shape = jnp.broadcast_shapes(query.shape, key.shape)
        if not broadcasts(result.shape, shape):
            raise ValueError(
                f"function: wanted a result with axes of 1 or those of {shape}, got {received(result)}"
            )
        return jnp.broadcast_to(result, shape)


def _parameter(x: object) -> Any:
    if isinstance(x, bool):
        return np.asarray(x)
    if isinstance(x, int):
        return np.asarray(check_integer("parameters", x), np.int32)
    array = x if isinstance(x, np.generic) else check_array("parameters", x)
    if not (jnp.issubdtype(array.dtype, jnp.integer) or array.dtype == jnp.bool_):
        raise TypeError(
            f"parameters: wanted integers or booleans, as a mask has no derivative, got {received(x)}"
        )
    return array
