"""Positions, segments and lengths of queries and keys, and the leaves of reproducible calls."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from .._checks import as_ids, as_int32, check_int32, check_integral, check_shape, received

LEAF = 256  # keys of a leaf: a constant of the format


class Tokens(NamedTuple):
    """Positions, segments and lengths of queries and keys, each with a batch axis of `B` or 1.

    Lengths are given only where positions are None and count from 0.

    Attributes:
        query_positions: None, or int32 `[B, T]`; given together with the keys'. Where the mask compares positions
            and None is given, they count from 0. Negative where a query is absent.
        key_positions: None, or int32 `[B, S]` likewise.
        query_segments: None, or int32 `[B, T]`; given together with the keys'. Of 64 bits if they are traced and
            may need them, for kernels made of XLA's operations alone.
        key_segments: None, or `[B, S]` likewise.
        query_lengths: None, or int32 `[B]`: queries from this index on are absent. A kernel gets positions in their
            place, unless `Lengths` is one of its `masks`.
        key_lengths: None, or int32 `[B]` likewise.

    Examples:
        >>> import jax.numpy as jnp
        >>> from energy_attn.kernels import Tokens
        >>> Tokens(key_lengths=jnp.array([2])).with_positions(1, 3).key_positions.tolist()
        [[0, 1, -1]]
    """

    query_positions: Array | None = None
    key_positions: Array | None = None
    query_segments: Array | None = None
    key_segments: Array | None = None
    query_lengths: Array | None = None
    key_lengths: Array | None = None

    @property
    def has_lengths(self) -> bool:
        """Whether lengths say which queries or keys are there."""
        return self.query_lengths is not None or self.key_lengths is not None

    def with_positions(self, query_len: int, key_len: int) -> "Tokens":
        """Tokens with positions of both sides in place of lengths; counted from 0 where none are given."""
        sides = (
            (self.query_positions, self.query_lengths, query_len),
            (self.key_positions, self.key_lengths, key_len),
        )
        queries, keys = (
            shortened(jnp.arange(size, dtype=jnp.int32)[None] if x is None else x, length)
            for x, length, size in sides
        )
        return Tokens(queries, keys, self.query_segments, self.key_segments)

    def with_lengths_by_index(self, query_len: int, key_len: int) -> "Tokens":
        """Tokens with positions on both sides if one has some; those at indices from a length on are absent."""
        if self.query_positions is None and self.key_positions is None:
            return self
        queries = _before(self.query_positions, self.query_lengths, query_len)
        keys = _before(self.key_positions, self.key_lengths, key_len)
        return Tokens(queries, keys, self.query_segments, self.key_segments)

    def with_lengths(
        self, queries: Array | np.ndarray | None, keys: Array | np.ndarray | None
    ) -> "Tokens":
        """Tokens that are absent from a position, the length `[B or 1]`, on; None: no token is."""
        if self.query_positions is None or self.key_positions is None:
            return self._replace(
                query_lengths=_shorter(self.query_lengths, queries),
                key_lengths=_shorter(self.key_lengths, keys),
            )
        return self._replace(
            query_positions=shortened(self.query_positions, queries),
            key_positions=shortened(self.key_positions, keys),
        )

    def map_queries(self, f: Callable[[Array], Any]) -> "Tokens":
        """`f` of the positions and segments of queries that are given."""
        return self._mapped(f, "query_positions", "query_segments")

    def map_keys(self, f: Callable[[Array], Any]) -> "Tokens":
        """`f` of the positions and segments of keys that are given."""
        return self._mapped(f, "key_positions", "key_segments")

    def _mapped(self, f: Callable[[Array], Any], *names: str) -> "Tokens":
        given = ((name, getattr(self, name)) for name in names)
        return self._replace(**{name: f(x) for name, x in given if x is not None})


NO_TOKENS = Tokens()


def check_tokens(
    options: Mapping[str, Any], batch: int, query_len: int, key_len: int, batched: bool
) -> Tokens:
    """Tokens of the options of a call, checked. Raises `TypeError` and `ValueError` naming the option."""
    if (options.get("query_segment_ids") is None) != (options.get("key_segment_ids") is None):
        side = "query" if options.get("query_segment_ids") is None else "key"
        raise ValueError(
            f"{side}_segment_ids: wanted an integer array beside the other's, got None"
        )

    def numbers(name: str, size: int, narrow: Callable[[Any], Any]) -> Array | None:
        x = options.get(name)
        if x is None:
            return None
        check_int32(name, x)
        wanted = (batch, size) if batched else (size,)
        if x.shape not in (wanted, (1, size)):
            raise ValueError(f"{name}: wanted shape {wanted}, got {received(x)}")
        return jnp.asarray(narrow(x if x.ndim == 2 else x[None]))

    def lengths(name: str, size: int) -> Array | None:
        x = options.get(name)
        if x is None:
            return None
        check_integral(name, x)
        if not batched and x.ndim == 0:
            x = x[None]
        else:
            check_shape(name, x, (batch,))
        if not isinstance(x, jax.core.Tracer):
            values = np.asarray(x)
            if values.size and not 0 <= values.min() <= values.max() <= size:
                raise ValueError(f"{name}: wanted lengths from 0 to {size}, got {values.tolist()}")
        return jnp.asarray(as_int32(x))

    return Tokens(
        numbers("query_positions", query_len, as_int32),
        numbers("key_positions", key_len, as_int32),
        numbers("query_segment_ids", query_len, as_ids),
        numbers("key_segment_ids", key_len, as_ids),
        lengths("query_seq_lengths", query_len),
        lengths("key_value_seq_lengths", key_len),
    )


def shortened(positions: Array, lengths: Array | np.ndarray | None) -> Array:
    """Positions `[B or 1, L]`, absent from a length `[B or 1]` on."""
    return positions if lengths is None else jnp.where(positions < lengths[:, None], positions, -1)


def _shorter(x: Array | None, y: Array | np.ndarray | None) -> Any:
    if x is None or y is None:
        return y if x is None else x
    return jnp.minimum(x, y)


def _before(positions: Array | None, lengths: Array | None, size: int) -> Array:
    """Positions, absent at indices from a length on; counted from 0 where none are given."""
    places = jnp.arange(size, dtype=jnp.int32)[None]
    positions = places if positions is None else positions
    return positions if lengths is None else jnp.where(places < lengths[:, None], positions, -1)


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
