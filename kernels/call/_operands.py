"""The call of a kernel: its arrays, its static settings, and what its caller needs."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array

from ..masks._abstract import AbstractMask
from ..masks._structure import MaskStructure
from ..masks._visibility import reachable
from ..scores._structure import BoundScore, ScoreStructure, floating
from ._state import lse_dtype
from ._tokens import Tokens


class Scales(NamedTuple):
    """Scales of keys and values of eight bits, `[B, S, K]`; None for others."""

    key: Array | None = None
    value: Array | None = None


NO_SCALES = Scales()


class PartIndices(NamedTuple):
    """Indices of a part in the whole batch, `[B]`, and among all heads of queries, `[N]`; None: from 0."""

    batch: Array | None = None
    heads: Array | None = None


class Operands(NamedTuple):
    """The arrays of one call, all with a batch axis.

    Attributes:
        query: `[B, T, N, H]`.
        key: `[B, S, K, H]`, of the dtype of `query`.
        value: `[B, S, K, Hv]`, of any floating dtype.
        bias: None, or floating of four axes that broadcast to `[B, N, T, S]`.
        mask: None, or boolean of four axes that broadcast to `[B, N, T, S]`.
        tokens: the positions, segments and lengths of queries and keys.
        mask_arrays: the arrays of the mask of the settings, each with a first axis of `B` or 1.
        score_arrays: the arrays of the score of the settings.
        indices: for a score, the indices of a part in the whole batch, `indices.batch`, int32 `[B]`, and among all
            heads of queries, `indices.heads`, int32 `[N]`; each may be None: from 0.
        scales: where key and value are int8, `scales.key` and `scales.value`, float32 `[B, S, K]`: the numbers of a
            key are multiples of its scale. A kernel gets keys and values in the dtype of the query, and no scales,
            unless its `reads_eight_bits` says so; then only its forward gets them.
        sink: None, or floating `[N]` or `[B, N]`: the score of one more outcome, of value zero, which is merged once
            with the state of all keys. Only the canonical kernel gets it.

    Examples:
        >>> import jax.numpy as jnp
        >>> from energy_attn.kernels import Operands
        >>> x = jnp.ones((1, 6, 2, 4))
        >>> Operands(x, x, x).mask_arrays
        ()
    """

    query: Array
    key: Array
    value: Array
    bias: Array | None = None
    mask: Array | None = None
    tokens: Tokens = Tokens()
    mask_arrays: tuple[Array, ...] = ()
    score_arrays: tuple[Any, ...] = ()
    indices: PartIndices = PartIndices()
    scales: Scales = NO_SCALES
    sink: Array | None = None

    @property
    def qkv(self) -> tuple[Any, Any, Any]:
        """Query, key and value: arrays, or their shapes; among cotangents and directions also None."""
        return self.query, self.key, self.value

    def named(self) -> dict[str, Any]:
        """The operands by name, each of the tokens by its own."""
        fields = self._asdict()
        tokens = fields.pop("tokens")
        return fields | tokens._asdict()

    def positioned(self, read: bool = True) -> "Operands":
        """Operands with positions in place of lengths; if positions are `read`, counted from 0 where none are given."""
        if self.tokens.query_positions is not None or not (read or self.tokens.has_lengths):
            return self
        tokens = self.tokens.with_positions(self.query.shape[1], self.key.shape[1])
        return self._replace(tokens=tokens)

    def map_queries(self, f: Callable[[Array, int], Any]) -> "Operands":
        """`f(x, axis)` of each array and its axis of queries, which broadcasts where it is 1."""
        tokens = self.tokens.map_queries(lambda x: f(x, 1))
        return self._mapped(f, query=1, bias=2, mask=2)._replace(tokens=tokens)

    def map_keys(self, f: Callable[[Array, int], Any]) -> "Operands":
        """`f(x, axis)` of each array and its axis of keys, which broadcasts where it is 1."""
        tokens = self.tokens.map_keys(lambda x: f(x, 1))
        scales = Scales(*(x if x is None else f(x, 1) for x in self.scales))
        mapped = self._mapped(f, key=1, value=1, bias=3, mask=3)
        return mapped._replace(tokens=tokens, scales=scales)

    def _mapped(self, f: Callable[[Array, int], Any], **axes: int) -> "Operands":
        fields = ((name, axis, getattr(self, name)) for name, axis in axes.items())
        return self._replace(**{name: f(x, axis) for name, axis, x in fields if x is not None})

    def part_indices(self) -> tuple[Array, Array]:
        """Indices in the whole batch, `[B]`, and among all heads, `[N]`."""
        batch, _, heads = self.query.shape[:3]
        pairs = zip(self.indices, (batch, heads), strict=True)
        batches, heads = (jnp.arange(n, dtype=jnp.int32) if x is None else x for x, n in pairs)
        return batches, heads


class Needs(NamedTuple):
    """Needs of the caller of a kernel.

    Attributes:
        unrounded: whether `out` has the dtype of `lse`, for merging, instead of that of `value`.
        score_grad: whether a backward has to compute the cotangents of the score's arrays; otherwise zeros will do.
        bias_grad: whether it has to compute the cotangent of the bias.
        sink_grad: whether it has to compute the cotangent of the sink.
        part: whether the queries are a slice of a larger array: a kernel that needs another layout copies only
            the slice.
        maximum: whether the program may ask for the largest scores, too, which the same pass then computes.
    """

    unrounded: bool = False
    score_grad: bool = True
    bias_grad: bool = True
    sink_grad: bool = True
    part: bool = False
    maximum: bool = False


class Settings(NamedTuple):
    """The static options of a call; hashable.

    Attributes:
        scale: the factor of the scores.
        mask: the static structure of the mask. Its `window` is how far a query sees before and after
            it; a kernel that takes no other masks than `All`, `Causal` and `Window` needs no more.
        score: the static structure of the score; None: the scaled product itself. Where a source is given, only the
            first `width` features of query and key enter the score's product; the product of the other features (source
            and value) is added to the score.
        needs: what the caller needs of the call.

    Examples:
        >>> from energy_attn.kernels import Settings
        >>> Settings._fields
        ('scale', 'mask', 'score', 'needs')
    """

    scale: float
    mask: MaskStructure
    score: ScoreStructure | None = None
    needs: Needs = Needs()

    @property
    def uses_positions(self) -> bool:
        """Whether the mask or the score reads positions."""
        return self.mask.constrains or (self.score is not None and self.score.uses_positions)

    @property
    def scored_width(self) -> int | None:
        """The number of features of query and key whose product the score reads; None: all."""
        return None if self.score is None else self.score.width

    def needing(self, **needs: bool) -> "Settings":
        """Returns a copy of the settings with some of the caller's needs replaced."""
        return self._replace(needs=self.needs._replace(**needs))


class KernelCall(NamedTuple):
    """A call of a kernel, whose methods take it.

    Attributes:
        operands: the arrays; in `check` they may be `jax.ShapeDtypeStruct`s.
        settings: the static options.
        platform: what the program is lowered for; None if not yet known, which happens only to kernels of
            XLA's operations, and to `check`.

    Examples:
        >>> from energy_attn.kernels import KernelCall
        >>> KernelCall._fields
        ('operands', 'settings', 'platform')
    """

    operands: Operands
    settings: Settings
    platform: str | None = None


def dequantize(x: Array, scale: Array | None, dtype: DTypeLike) -> Array:
    """Stored keys or values: int8 `[..., H]` times a scale `[...]`, rounded to `dtype`; without one, `x`."""
    if scale is None:
        return x
    return (x.astype(jnp.float32) * scale[..., None]).astype(dtype)


def dequantized(operands: Operands) -> Operands:
    """Operands with keys and values in the dtype of the query, in place of eight bits and scales."""
    dtype = operands.query.dtype
    return operands._replace(
        key=dequantize(operands.key, operands.scales.key, dtype),
        value=dequantize(operands.value, operands.scales.value, dtype),
        scales=NO_SCALES,
    )


def cotangents(
    query: Array | None,
    key: Array | None,
    value: Array | None,
    bias: Array | None = None,
    score_arrays: tuple[Array | None, ...] = (),
    sink: Array | None = None,
) -> Operands:
    """Cotangents in the form of the operands: None for masks, positions and segments."""
    arrays: Any = {"query": query, "key": key, "value": value, "mask_arrays": None}
    return Operands(**arrays, bias=bias, score_arrays=score_arrays, sink=sink)


def differentiated(operands: Operands) -> Operands:
    arrays = (x if x is None or floating(x) else None for x in operands.score_arrays)
    return cotangents(*operands.qkv, operands.bias, tuple(arrays), operands.sink)


def map_some(f: Callable[..., Any], first: Operands, *rest: Operands) -> Operands:
    """Maps `f` over the leaves of `first` that are not None, with the leaves of `rest` in their places."""

    def of(x: object, *others: object) -> Any:
        return None if x is None else f(x, *others)

    return jax.tree.map(of, first, *rest, is_leaf=lambda x: x is None)


def with_moved(operands: Operands, moved: Operands) -> Operands:
    """Replaces operands by those that are not None in `moved`."""

    def of(new: object, old: object) -> object:
        return old if new is None else new

    return jax.tree.map(of, moved, operands, is_leaf=lambda x: x is None)


def bound(settings: Settings, operands: Operands) -> AbstractMask:
    """The mask of a call, whose arrays have a first axis of the batch, for `visible` and `meeting`."""
    return settings.mask.bind(operands.mask_arrays)


def bound_score(settings: Settings, operands: Operands) -> BoundScore | None:
    if settings.score is None:
        return None
    return BoundScore(settings.score, operands.score_arrays, settings.needs.score_grad)


def all_meet(operands: Operands, settings: Settings) -> bool:
    """Whether positions count from 0, and by a window each query sees a key and each key is seen."""
    query_len, key_len = operands.query.shape[1], operands.key.shape[1]
    left, right = settings.mask.window
    counted = operands.tokens.query_positions is None and settings.mask.is_window
    counted = counted and is_static(query_len, key_len)
    return counted and query_len - key_len <= left and key_len - query_len <= right


def hide_unreachable(operands: Operands, settings: Settings) -> Operands:
    """Positions where the mask reads them, and position -1 (absent, never read) for keys that no query sees."""
    if settings.mask.constrains:
        operands = operands.positioned()
    tokens = operands.tokens
    queries, keys = tokens.query_positions, tokens.key_positions
    if queries is None or keys is None or queries.shape[1] == 0:
        return operands
    seen = reachable(bound(settings, operands), queries, keys)
    return operands._replace(tokens=tokens._replace(key_positions=jnp.where(seen, keys, -1)))


def zero_absent(operands: Operands) -> Operands:
    """Zeros rows and slots that are absent or seen by no query, so that a weight of zero makes no NaN."""
    keys = present_keys(operands)

    def kept(x: Any, some: Array | None) -> Any:
        if x is None or some is None:
            return x
        return jnp.where(jnp.expand_dims(some, tuple(range(2, x.ndim))), x, 0)

    rows = operands.tokens.query_positions
    return operands._replace(
        query=kept(operands.query, None if rows is None else rows >= 0),
        key=kept(operands.key, keys),
        value=kept(operands.value, keys),
        scales=Scales(*(kept(x, keys) for x in operands.scales)),
    )


def present_keys(operands: Operands) -> Array | None:
    """Mask of the keys that some query may see, `[B or 1, S or 1]`; None if all."""
    positions = operands.tokens.key_positions
    result = None if positions is None else positions >= 0
    if operands.mask is None:
        return result
    # hidden from XLA, which takes seconds to fold a reduction of a mask that a program closes over
    shown = lax.optimization_barrier(operands.mask).any((1, 2))
    return shown if result is None else result & shown


def out_dtype(operands: Operands, settings: Settings) -> jnp.dtype:
    """Returns the dtype of `out`: as `lse` where it stays unrounded, else as the dequantized `value`."""
    read = operands.value if operands.scales.value is None else operands.query
    if settings.needs.unrounded:
        return lse_dtype(operands.query.dtype, read.dtype)
    return jnp.dtype(read.dtype)


def is_static(*sizes: object) -> bool:
    """Whether all sizes are numbers, not symbols of `jax.export.symbolic_shape`."""
    return set(map(type, sizes)) <= {int}
