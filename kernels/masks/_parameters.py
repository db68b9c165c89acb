"""The arrays of rules, from numbers and arrays of integers."""

from typing import Any

import jax.core
import jax.numpy as jnp
import numpy as np

from .._checks import check_int32, check_integer, received


def integers(name: str, x: object, rank: int) -> Any:
    """Returns an int or an array of integers of `rank` axes, or one more for the batch, as int32.

    An int becomes an array: another number is then no new program.

    Raises `TypeError` for anything else, and `ValueError` for another number of axes.
    """
    if rank == 0 and isinstance(x, int):
        return np.asarray(check_integer(name, x), np.int32)
    array = check_int32(name, x)
    if array.ndim not in (rank, rank + 1):
        wanted = ", ".join(("L",) * rank)
        raise ValueError(
            f"{name}: wanted shape ({wanted}) or ({', '.join(('B', *('L',) * rank))}), got {received(x)}"
        )
    return array.astype(np.int32) if isinstance(x, np.ndarray) else jnp.asarray(array, jnp.int32)


def lengths(name: str, x: object) -> Any:
    """`integers` of rank 0 that, where they are known, are not negative; else `ValueError`."""
    found = integers(name, x, 0)
    if not isinstance(found, jax.core.Tracer) and found.size:
        if (least := int(np.asarray(found).min())) < 0:
            raise ValueError(f"{name}: wanted at least 0, got {least}")
    return found
