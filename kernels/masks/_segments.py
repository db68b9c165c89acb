"""Masks of packed rows: segments that see themselves alone, and spans that see each other."""

import functools
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int

from .._checks import as_int32, check_int32, check_integer, is_concrete, received
from ._abstract import FAR, AbstractComparison, AbstractMask, And, Function, Interval
from ._ready import Causal, Lengths, ids, of_rank, unless_none


class Segments(AbstractMask):
    r"""A query sees the keys of its own segment: $s(p_i) = s'(p_j)$.

    The ids are a table by position, as in `Causal() & Segments(documents)` for documents packed into one row. A
    position past its end is in no segment. `query_segment_ids=` and `key_segment_ids=` say the same of indices.

    Attributes:
        query_ids: $s$, integers `[L]` for all rows, or `[B, L]`.
        key_ids: $s'$, as `query_ids`; None: the same table.

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
    key_ids: Int[Array | np.ndarray, "*C M"] | None = eqx.field(
        default=None, converter=unless_none(ids, "key_ids")
    )

    @property
    def ranks(self) -> tuple[int, ...]:
        return (1,) if self.key_ids is None else (1, 1)

    @staticmethod
    def from_cu_seqlens(
        cu_seqlens: Int[Array | np.ndarray, " n"],
        length: int,
        *,
        cu_seqlens_k: Int[Array | np.ndarray, " n"] | None = None,
        key_length: int | None = None,
        is_causal: bool = False,
    ) -> And:
        r"""The mask of sequences packed into one row, from the offsets of FlashAttention's varlen functions.

        A token at position $p$ is in sequence $s$ where $\mathrm{cu}_s \le p < \mathrm{cu}_{s+1}$, and a query sees the
        keys of its own sequence. Tokens from the last offset on are absent.

        Args:
            cu_seqlens: $\mathrm{cu}$, `[n + 1]` integers that begin with 0 and do not decrease; may be traced. An
                offset that repeats is an empty sequence.
            length: the number of tokens in the row, sequences and padding.
            cu_seqlens_k: the offsets of keys (`cu_seqlens` is then `cu_seqlens_q`); None: those of queries.
            key_length: the number of keys in the row; None: `length`.
            is_causal: whether a query sees no key after its own. As in FlashAttention, the last query of a sequence
                then sees its last key, where a sequence has more keys than queries. `Causal()` and windows compare
                positions in the row, which is the same for equal offsets only.

        Returns:
            `Segments(ids) & Lengths(last offset)`, and the causal mask; joined with others by `&`.

        Raises:
            TypeError: offsets that are no integer array, or sizes that are no integers.
            ValueError: offsets of another rank or number; known ones that decrease, or do not span 0 to at most the
                number of tokens.

        Source: `flash_attn_varlen_func` of FlashAttention-2 (arXiv 2307.08691).

        Examples:
            >>> import jax, jax.numpy as jnp
            >>> import energy_attn as ea
            >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 8, 2, 4))  # 3 and 4 tokens, and padding
            >>> packed = ea.masks.Segments.from_cu_seqlens(jnp.array([0, 3, 7]), 8, is_causal=True)
            >>> out = ea.attention(q, k, v, mask=packed)
            >>> second = ea.attention(q[3:7], k[3:7], v[3:7], is_causal=True)
            >>> bool(jnp.allclose(out[3:7], second, atol=1e-6)), bool((out[7] == 0).all())
            (True, True)
        """
        queries, of_queries = _offsets("cu_seqlens", cu_seqlens, "length", length)
        if cu_seqlens_k is None and key_length is None:
            end = queries[-1:].reshape(())
            mask = Segments(of_queries) & Lengths(end, queries=end)
            return mask & Causal() if is_causal else mask
        offsets = cu_seqlens if cu_seqlens_k is None else cu_seqlens_k
        size = length if key_length is None else key_length
        keys, of_keys = _offsets("cu_seqlens_k", offsets, "key_length", size)
        if keys.shape != queries.shape:
            raise ValueError(
                f"cu_seqlens_k: wanted as many as cu_seqlens, {queries.shape}, got {received(keys)}"
            )
        mask = Segments(of_queries, of_keys) & Lengths(
            keys[-1:].reshape(()), queries=queries[-1:].reshape(())
        )
        # the last query of a sequence sees its last key
        shift = (keys - queries)[1:][of_queries.clip(0, len(keys) - 2)]
        return mask & Function(_not_after, shift) if is_causal else mask

    def visible(self, query: Int[Array, "..."], key: Int[Array, "..."]) -> Bool[Array, "..."]:
        """Whether both positions are in the tables, with equal ids."""
        keys = self.query_ids if self.key_ids is None else self.key_ids
        query_id, query_in_table = looked_up(self.query_ids, query)
        key_id, key_in_table = looked_up(keys, key)
        return (query_id == key_id) & query_in_table & key_in_table


class Spans(AbstractComparison):
    r"""Tokens of one span see each other, in both directions: the tokens of an image in a text.

    $$\mathrm{first}(p_i) \le p_j \le \mathrm{last}(p_i)$$

    for a query in a span. A span is a run of equal positive ids. Tokens of other ids, and positions past the end, see
    nothing by this mask: `Causal() | Spans(ids)` is causal but inside images, and with `& Window(left, None)` its keys
    are also in a window, as in layers of Gemma 3 that have one.

    Args:
        ids: integers by position, `[L]` for all rows, or `[B, L]`, as transformers' `token_type_ids`: 0 for text.
            Images that touch have different ids.

    Attributes:
        first: the first position of the span at each position, or of the next one.
        last: the last position of the span at each position, or of the one before.

    Raises:
        TypeError: ids of another type.
        ValueError: an array of another rank.

    Source: Gemma 3 (arXiv 2503.19786), section 2; `create_masks_for_vision_model` of transformers.

    Examples:
        >>> import jax.numpy as jnp
        >>> from energy_attn import masks
        >>> mask, tokens = masks.Causal() | masks.Spans(jnp.array([0, 1, 1, 0])), jnp.arange(4)
        >>> mask.visible(tokens[:, None], tokens[None]).astype(int).tolist()
        [[1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    """

    first: Int[Array | np.ndarray, "*B L"]
    last: Int[Array | np.ndarray, "*B L"]

    def __init__(self, ids: Int[Array | np.ndarray, "*B L"]) -> None:
        self.first, self.last = span_ends(of_rank("ids", ids, 1))

    @property
    def ranks(self) -> tuple[int, ...]:
        return 1, 1

    def any_visible(self, query: Interval, key: Interval) -> Bool[Array, "..."]:
        """Whether the keys meet the positions from the first span of the queries to the last one."""
        # both ends grow with the position, so that pairs of single positions are decided exactly
        size = len(self.first)
        if size == 0:
            return jnp.zeros(jnp.broadcast_shapes(query.low.shape, key.low.shape), bool)
        low, high = (jnp.clip(x, 0, size - 1) for x in query)
        first = jnp.where(query.low < size, jnp.asarray(self.first)[low], FAR)
        return (first <= key.high) & (key.low <= jnp.asarray(self.last)[high])


def span_ends(ids: Array | np.ndarray) -> tuple[Any, Any]:
    """The first and the last position of the span at each position; of NumPy arrays, NumPy arrays.

    Outside of spans, the first position of the next span, and the last position of the one before.
    """
    known = isinstance(ids, np.ndarray)
    xp: Any = np if known else jnp
    axis, inside = ids.ndim - 1, ids > 0
    place = xp.broadcast_to(xp.arange(ids.shape[-1], dtype=np.int32), ids.shape)
    edge, changes = xp.ones_like(inside[..., :1]), ids[..., 1:] != ids[..., :-1]
    begins = inside & xp.concatenate([edge, changes], -1)
    ends = inside & xp.concatenate([changes, edge], -1)

    def before(marks: Any) -> Any:
        x = xp.where(marks, place, np.int32(-1))
        return np.maximum.accumulate(x, -1) if known else lax.cummax(x, axis)

    def after(marks: Any) -> Any:
        x = xp.where(marks, place, np.int32(FAR))
        if known:
            return np.minimum.accumulate(x[..., ::-1], -1)[..., ::-1]
        return lax.cummin(x, axis, reverse=True)

    first = xp.where(inside, before(begins), after(begins))
    return first, xp.where(inside, after(ends), before(ends))


def looked_up(table: Array | np.ndarray, positions: Array) -> tuple[Array, Array]:
    """The ids at positions, from a table `[L]`, and whether the table has them."""
    in_table = (positions >= 0) & (positions < len(table))
    if len(table) == 0:
        return positions, in_table
    return jnp.asarray(table)[jnp.where(in_table, positions, 0)], in_table


def _offsets(name: str, x: object, size_name: str, size: object) -> tuple[Any, Any]:
    """Checked offsets of sequences as int32, and the index of the sequence of each token of a row."""
    offsets, size = check_int32(name, x), check_integer(size_name, size, least=0)
    if offsets.ndim != 1 or len(offsets) < 2:
        raise ValueError(f"{name}: wanted shape (n + 1,) for n > 0 sequences, got {received(x)}")
    if is_concrete(offsets):
        known = np.asarray(offsets)
        if known[0] != 0 or (np.diff(known) < 0).any() or known[-1] > size:
            raise ValueError(
                f"{name}: wanted offsets from 0 to at most {size_name}, {size}, that do not decrease, "
                f"got {known.tolist()}"
            )
    offsets = as_int32(offsets)
    numpy: Any = np if isinstance(offsets, np.ndarray) else jnp
    tokens = numpy.arange(size, dtype=np.int32)
    ids = numpy.searchsorted(offsets, tokens, side="right").astype(np.int32) - 1
    return offsets, ids


def _not_after(query: Array, key: Array, shift: Array) -> Array:
    return key <= query + shift[jnp.clip(query, 0, len(shift) - 1)]
