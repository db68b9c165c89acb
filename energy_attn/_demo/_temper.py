"""Attention over many more keys than the model was trained with."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

WINDOW = 512  # bytes that the model is trained to see


def inverse_temperature(positions: Int[Array, "batch time"]) -> Float[Array, "batch time"]:
    r"""$\beta = \max(1, \log n / \log W)$ for a query that sees $n$ keys; float32.

    The entropy of a row of attention grows with $\log n$ if its scores stay as they are: after 8192
    bytes every head looks at everything. Scores that grow as $\log n$ do not let it (Su 2021, "log-n
    scaling"; Llama 4's temperature tuning is of this kind). Raises nothing.
    """
    seen = positions.astype(jnp.float32) + 1.0
    return jnp.maximum(1.0, jnp.log(seen) / jnp.log(jnp.float32(WINDOW)))


def tempered(attend: Callable[..., Any]) -> Callable[..., Any]:
    """`attend` with each query multiplied by its inverse temperature. Raises nothing."""

    def attend_tempered(
        query: Array, *arrays: Array, query_positions: Array, **options: Any
    ) -> Any:
        beta = inverse_temperature(query_positions)[:, :, None, None].astype(query.dtype)
        return attend(query * beta, *arrays, query_positions=query_positions, **options)

    return attend_tempered
