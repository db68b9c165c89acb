"""The leaves of reproducible calls: keys of `LEAF` successive positions."""

import jax
import jax.core
import numpy as np
from jaxtyping import Array, Int

LEAF = 256  # keys of a leaf: a constant of the format


def leaves_for(tokens: int, size: int = LEAF) -> int:
    """Number of successive leaves that `tokens` may span: one more than they fill, as they may begin inside a leaf."""
    return -(-tokens // size) + 1


def check_leaves(positions: Int[Array, "b keys"] | None) -> None:
    """Raises `ValueError` for known positions that repeat, or span more leaves than there is room for."""
    if positions is None or isinstance(positions, jax.core.Tracer):
        return
    for row in np.asarray(positions):
        present, count = np.unique(row[row >= 0], return_counts=True)
        if not present.size:
            continue
        if count.max() > 1:
            raise ValueError(
                "key_positions: wanted one key of each position beside reproducible=True, got "
                f"{count.max()} of {present[count.argmax()]}; documents have segment ids and positions that go on"
            )
        leaves, most = present[-1] // LEAF - present[0] // LEAF + 1, leaves_for(len(row))
        if leaves > most:
            raise ValueError(
                f"key_positions: wanted at most {most} times {LEAF} positions for {len(row)} keys beside "
                f"reproducible=True, got {leaves}; append keys of position -1 up to {(leaves - 2) * LEAF + 1}"
            )
