"""The arrays of masks, from numbers and arrays of integers."""

from typing import Any

import jax.core
import numpy as np

from .._checks import as_ids, as_int32, check_int32, check_integer, received


def ids(name: str, x: object) -> Any:
    """Returns a table of ids, `[L]` or `[B, L]`, of which only equality counts. Raises as `integers`."""
    return as_ids(_of_rank(name, x, 1))


def integers(name: str, x: object, rank: int) -> Any:
    """Returns an array of integers of `rank` axes, or one more for the batch, as int32.

    Raises `TypeError` for anything else, and `ValueError` for another number of axes.
    """
    return as_int32(_of_rank(name, x, rank))


def lengths(name: str, x: object) -> Any:
    """`integers` of no axis, or an int, that are not negative where they are known; else `ValueError`.

    An int becomes an array: another number is then no new program.
    """
    found: Any
    if isinstance(x, int):
        found = np.asarray(integers(name, np.asarray(check_integer(name, x)), 0))
    else:
        found = integers(name, x, 0)
    if not isinstance(found, jax.core.Tracer) and found.size:
        if (least := int(np.asarray(found).min())) < 0:
            raise ValueError(f"{name}: wanted at least 0, got {least}")
    return found


def _of_rank(name: str, x: object, rank: int) -> Any:
    array = check_int32(name, x)
    if array.ndim not in (rank, rank + 1):
        wanted = ", ".join(("L",) * rank)
        raise ValueError(
            f"{name}: wanted shape ({wanted}) or ({', '.join(('B', *('L',) * rank))}), got {received(x)}"
        )
    return array
