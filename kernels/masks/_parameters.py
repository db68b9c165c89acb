"""The arrays of masks, from numbers and arrays of integers."""

from typing import Any

import jax.core
import numpy as np

from .._checks import as_ids, as_int32, check_int32, check_integer, received


def ids(name: str, x: object) -> Any:
    """Returns a table of ids, `[L]` or `[B, L]`, that are only compared for equality. Raises as `integers`."""
    return as_ids(_of_rank(name, x, 1))


def integers(name: str, x: object, rank: int) -> Any:
    """Returns an array of integers of `rank` axes, or one more for the batch, as int32.

    Raises `TypeError` for anything else, and `ValueError` for another number of axes.
    """
    return as_int32(_of_rank(name, x, rank))


def lengths(name: str, x: object) -> Any:
    """A scalar array of integers, or one with a batch axis; an int becomes an array, and is not static.

    Raises as `integers`, and `ValueError` for negative numbers unless they are traced.
    """
    array: Any
    if isinstance(x, int):
        array = np.asarray(integers(name, np.asarray(check_integer(name, x)), 0))
    else:
        array = integers(name, x, 0)
    if not isinstance(array, jax.core.Tracer) and array.size:
        if (least := int(np.asarray(array).min())) < 0:
            raise ValueError(f"{name}: wanted at least 0, got {least}")
    return array


def _of_rank(name: str, x: object, rank: int) -> Any:
    array = check_int32(name, x)
    if array.ndim not in (rank, rank + 1):
        axes = ", ".join(("L",) * rank)
        raise ValueError(
            f"{name}: wanted shape ({axes}) or ({', '.join(('B', *('L',) * rank))}), got {received(x)}"
        )
    return array
