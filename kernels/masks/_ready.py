"""Masks: windows of distances, lengths, prefixes, segments of documents in one row, and spans that see each other."""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int

from .._checks import as_ids, as_int32, check_int32, check_integer, is_concrete, received
from ._abstract import FAR, AbstractComparison, AbstractMask, And, Function, Interval


def _unless_none(check: Callable[[str, object], Any], name: str) -> Callable[[object], Any]:
    def convert(x: object) -> Any:  # Equinox takes the parameter's type from here
        return None if x is None else check(name, x)

    return convert


def ids(name: str, x: object) -> Any:
    return as_ids(_of_rank(name, x, 1))


def integers(name: str, x: object, rank: int) -> Any:
    """Returns an array of integers of `rank` axes, or one more for the batch, as int32."""
    return as_int32(_of_rank(name, x, rank))


def lengths(name: str, x: object) -> Any:
    """A scalar array of numbers from 0 on, or one with a batch axis; an int becomes an array, and is not static."""
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
    if array.ndim < rank:
        axes = ", ".join(("*B", *("L",) * rank))
        raise ValueError(f"{name}: wanted shape ({axes}), got {received(x)}")
    return array


class All(AbstractComparison):
    """Every query sees every key: the neutral mask of `&`; `~All()` hides everything.

    Examples:
        >>> import jax.numpy as jnp
        >>> from energy_attn import masks
        >>> masks.All().visible(jnp.array([0]), jnp.array([7])).tolist()
        [True]
    """


class Causal(AbstractComparison):
    r"""A query sees keys at its own position and before: $p_j \le p_i$. `is_causal=True` builds it.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import energy_attn as ea
        >>> q = jax.random.normal(jax.random.key(0), (1, 5, 2, 4))
        >>> out = ea.attention(q, q, q, mask=ea.masks.Causal())
        >>> bool(jnp.allclose(out, ea.attention(q, q, q, is_causal=True)))
        True
    """

    def any_visible(self, query: Interval, key: Interval) -> Bool[Array, "..."]:
        """Whether the first key is not after the last query."""
        return key.low <= query.high


def _side(x: object) -> int | None:
    if isinstance(x, (jax.Array, np.ndarray)):
        raise TypeError(
            f"left and right: wanted ints, got {received(x)}; TracedWindow(left, right) takes arrays"
        )
    if isinstance(x, (int, np.integer)) and x < 0:
        raise ValueError(f"left and right: wanted at least 0, or None for any distance, got {x}")
    return None if x is None else check_integer("left and right", x, is_wide=True)


class Window(AbstractComparison):
    r"""A query sees the keys near to it: $p_i - \mathrm{left} \le p_j \le p_i + \mathrm{right}$.

    `local_window_size=(left, right)` builds it.

    Attributes:
        left: how far before a query its keys may lie; None: any distance.
        right: how far after it its keys may lie; None: any distance.

    Raises:
        TypeError: a side is neither an int nor None.
        ValueError: a negative side.

    Examples:
        >>> import jax.numpy as jnp
        >>> from energy_attn import masks
        >>> masks.Window(1, 0).visible(jnp.array([[5]]), jnp.arange(7)[None]).tolist()
        [[False, False, False, False, True, True, False]]
    """

    left: int | None = eqx.field(static=True, converter=_side)
    right: int | None = eqx.field(static=True, converter=_side)

    def any_visible(self, query: Interval, key: Interval) -> Bool[Array, "..."]:
        """Whether the interval of the keys meets the windows of the queries."""
        # min p_i - left <= max p_j and min p_j <= max p_i + right. Differences of positions cannot overflow; the sum of
        # a position and a window might.
        left, right = sides(self)
        return (key.high - query.low >= -left) & (key.low - query.high <= right)


def sides(window: Window) -> tuple[int, int]:
    left, right = (FAR if x is None else min(x, FAR) for x in (window.left, window.right))
    return left, right


class TracedWindow(AbstractComparison):
    r"""A window whose sides are arrays: layers with different windows are one program, or one `jax.lax.scan`.

    $$p_i - \mathrm{left} \le p_j \le p_i + \mathrm{right}$$

    `local_window_size=array` builds it. Blocks of keys outside are skipped when the program runs. The sides have no
    derivative. They bound nothing that is static: over a mesh all keys are sent, unless a static window is joined, as
    `Window(4096, 0) & TracedWindow(left, 0)` or by `max_window=`; keys outside of either are hidden. Kernels of vendors
    decline it.

    Attributes:
        left: how far before a query its keys may lie: an int or an integer array, a scalar for all rows or `[B]`;
            None: any distance.
        right: how far after it, as `left`.

    Raises:
        TypeError: a side of another type.
        ValueError: a negative side, unless it is traced: a query then sees only keys farther away on the other side.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import energy_attn as ea
        >>> q = jax.random.normal(jax.random.key(0), (1, 9, 2, 4))
        >>> def layer(x, window):
        ...     return ea.attention(x, x, x, mask=ea.masks.TracedWindow(window, 0)), None
        >>> out, _ = jax.lax.scan(layer, q, jnp.array([3, 9, 3]))  # three layers
        >>> bool(jnp.allclose(layer(q, jnp.array(3))[0], ea.attention(q, q, q, local_window_size=(3, 0))))
        True
    """

    left: Int[Array | np.ndarray, "*B"] | None = eqx.field(converter=_unless_none(lengths, "left"))
    right: Int[Array | np.ndarray, "*C"] | None = eqx.field(
        converter=_unless_none(lengths, "right")
    )

    def any_visible(self, query: Interval, key: Interval) -> Bool[Array, "..."]:
        """Whether the interval of the keys meets the windows of the queries."""
        # as in `Window`, without the sum of a position and a side
        seen = jnp.ones(jnp.broadcast_shapes(query.low.shape, key.low.shape), bool)
        if self.left is not None:
            seen &= key.high - query.low >= -self.left
        if self.right is not None:
            seen &= key.low - query.high <= self.right
        return seen


# Masks of these classes are fully described by their window.
WINDOWS = (All, Causal, Window)


class Lengths(AbstractComparison):
    r"""Hides tokens at positions from a length on; others take part: $p_j < n$, and $p_i < m$ if $m$ is given.

    `key_value_seq_lengths=` and `query_seq_lengths=` say the same of indices.

    Attributes:
        keys: $n$, an int or an integer array: a scalar for all rows, or `[B]`.
        queries: $m$, as `keys`, by keyword only; None: all queries take part.

    Raises:
        TypeError: a length of another type.
        ValueError: a negative one, or an array of another rank.

    Examples:
        >>> import jax.numpy as jnp
        >>> import energy_attn as ea
        >>> x = jnp.ones((2, 4, 1, 2))
        >>> energy = ea.free_energy(x, x, x, scale=0.0, mask=ea.masks.Lengths(jnp.array([1, 4])))
        >>> jnp.exp(energy[:, 0, 0]).round().tolist()  # the number of keys
        [1.0, 4.0]
    """

    keys: Int[Array | np.ndarray, "*B"] = eqx.field(converter=functools.partial(lengths, "keys"))
    queries: Int[Array | np.ndarray, "*C"] | None = eqx.field(
        default=None, converter=_unless_none(lengths, "queries"), kw_only=True
    )

    def any_visible(self, query: Interval, key: Interval) -> Bool[Array, "..."]:
        """Whether the first of both are below their lengths."""
        below = key.low < self.keys
        return below if self.queries is None else below & (query.low < self.queries)


class Prefix(AbstractComparison):
    r"""Every query sees the keys at positions below a length: $p_j < n$.

    `Causal() | Prefix(n)` is the mask of a prefix-LM, whose first `n` tokens see each other.

    Attributes:
        length: $n$, an int or an integer array: a scalar for all rows, or `[B]`.

    Raises:
        TypeError: a length of another type.
        ValueError: a negative one, or an array of another rank.

    Source: Exploring the Limits of Transfer Learning (arXiv 1910.10683), figure 4.

    Examples:
        >>> import jax.numpy as jnp
        >>> from energy_attn import masks
        >>> mask, tokens = masks.Causal() | masks.Prefix(2), jnp.arange(3)
        >>> mask.visible(tokens[:, None], tokens[None]).astype(int).tolist()
        [[1, 1, 0], [1, 1, 0], [1, 1, 1]]
    """

    length: Int[Array | np.ndarray, "*B"] = eqx.field(
        converter=functools.partial(lengths, "length")
    )

    def any_visible(self, query: Interval, key: Interval) -> Bool[Array, "..."]:
        """Whether the first key is below the length."""
        return key.low < self.length


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
        default=None, converter=_unless_none(ids, "key_ids")
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
        self.first, self.last = span_ends(_of_rank("ids", ids, 1))

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
