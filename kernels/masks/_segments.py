"""The mask of documents that are packed into one row."""

import functools
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from ._abstract import AbstractMask
from ._parameters import ids


def _key_ids(x: object) -> Any:
    return None if x is None else ids("key_ids", x)


class Segments(AbstractMask):
    r"""A query sees the keys of its own segment: $s(p_i) = s'(p_j)$.

    The ids are a table by position, as in `Causal() & Segments(documents)` for documents packed into one
    row. A position past its end is in no segment. `query_segment_ids=` and `key_segment_ids=` say the
    same of indices.

    Attributes:
        query_ids: $s$, integers `[L]` for all rows, or `[B, L]`.
        key_ids: $s'$, likewise; None: the same table.

    Raises:
        TypeError: ids of another type.
        ValueError: an array of another rank.

    Examples:
        >>> import jax.numpy as jnp
        >>> from energy_attn import masks
        >>> documents, tokens = masks.Segments(jnp.array([7, 7, 8])), jnp.arange(4)
        >>> documents.visible(tokens[:, None], tokens[None]).astype(int).tolist()
        [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]]
    """

    query_ids: Int[Array | np.ndarray, "*B L"] = eqx.field(
        converter=functools.partial(ids, "query_ids")
    )
    key_ids: Int[Array | np.ndarray, "*C M"] | None = eqx.field(default=None, converter=_key_ids)

    @property
    def ranks(self) -> tuple[int, ...]:
        return (1,) if self.key_ids is None else (1, 1)

    def visible(self, query: Int[Array, "..."], key: Int[Array, "..."]) -> Bool[Array, "..."]:
        """Whether both positions are in the tables, with equal ids."""
        keys = self.query_ids if self.key_ids is None else self.key_ids
        query_id, query_in_table = looked_up(self.query_ids, query)
        key_id, key_in_table = looked_up(keys, key)
        return (query_id == key_id) & query_in_table & key_in_table


def looked_up(table: Array | np.ndarray, positions: Array) -> tuple[Array, Array]:
    """The ids at positions, from a table `[L]`, and whether the table has them."""
    in_table = (positions >= 0) & (positions < len(table))
    if len(table) == 0:
        return positions, in_table
    return jnp.asarray(table)[jnp.where(in_table, positions, 0)], in_table
