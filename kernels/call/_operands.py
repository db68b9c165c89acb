"""The operands of a kernel, which are the arrays of a call, and its static settings."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ..masks._abstract import AbstractMask
from ..masks._structure import MaskStructure
from ..masks._visibility import reachable
from ..scores._structure import BoundScore, ScoreStructure, floating
from ._canonical import Tokens
from ._state import lse_dtype


class Operands(NamedTuple):
    """The arrays of one call, all with a batch axis.

    Attributes:
        query: `[B, T, N, H]`.
        key: `[B, S, K, H]`, of the dtype of `query`.
        value: `[B, S, K, Hv]`, of any floating dtype.
        bias: None, or floating of four axes that broadcast to `[B, N, T, S]`.
        mask: None, or boolean of four axes that broadcast to `[B, N, T, S]`.
        query_positions: None, or int32 `[B, T]` or `[1, T]`; given together with the keys'. Where
            the mask compares positions and None is given, they count from 0.
        key_positions: None, or int32 `[B, S]` or `[1, S]`.
        query_segments: None, or int32 `[B, T]` or `[1, T]`; given together with the keys'. Of 64 bits if
            they are traced and may need them, for kernels made of XLA's operations alone.
        key_segments: None, or `[B, S]` or `[1, S]` likewise.
        mask_arrays: those of the mask of the settings, each with a first axis of `B` or 1. A kernel
            that knows no mask with arrays gets none.
        score_arrays: those of the score of the settings. A kernel that knows no scores gets none.
        batch_indices: None, or int32 `[B]`, for a score: which entries of the whole batch these are;
            None: from 0.
        head_indices: None, or int32 `[N]` likewise: which of all heads of queries.
        key_scale: None; or, where key and value are int8, float32 `[B, S, K]`: the numbers of a key are
            multiples of it. A kernel gets keys and values in the dtype of the query, and no scales, unless its
            `reads_eight_bits` says so; then only its forward gets them.
        value_scale: likewise.
        query_lengths: None, or int32 `[B]` or `[1]`, and no positions are given: queries from this index on are
            absent. A kernel gets positions in their place, unless `Lengths` is one of its `masks`.
        key_lengths: likewise.
        sink: None, or floating `[N]` or `[B, N]`: the score of one more outcome, of value zero, which is merged once
            with the state of all keys. Only the canonical kernel gets it.

    Examples:
        >>> import jax.numpy as jnp
        >>> from energy_attn.kernels import Operands
        >>> x = jnp.ones((1, 6, 2, 4))
        >>> Operands(x, x, x, None, None, None, None).mask_arrays
        ()
    """

    query: Array
    key: Array
    value: Array
    bias: Array | None
    mask: Array | None
    query_positions: Array | None
    key_positions: Array | None
    query_segments: Array | None = None
    key_segments: Array | None = None
    mask_arrays: tuple[Array, ...] = ()
    score_arrays: tuple[Any, ...] = ()
    batch_indices: Array | None = None
    head_indices: Array | None = None
    key_scale: Array | None = None
    value_scale: Array | None = None
    query_lengths: Array | None = None
    key_lengths: Array | None = None
    sink: Array | None = None


class Settings(NamedTuple):
    """The static options of a call; hashable.

    Attributes:
        scale: the factor of the scores.
        mask: the static structure of the mask. Its `window` is how far a query sees before and after
            it; a kernel that takes no other masks than `All`, `Causal` and `Window` needs no more.
        unrounded: whether `out` has the dtype of `lse`, for merging, instead of that of `value`.
        score: what is static in the score, or None: the scaled product itself.
        scored_width: where a score and a source are given, how many features of query and key make
            the product that the score is of; the product of the others, the source and the value, is
            added to it. None: all.
        learnt: whether a backward has to compute the cotangents of the score's arrays; otherwise zeros
            will do.
        bias_learnt: whether it has to compute that of the bias.
        sink_learnt: whether it has to compute that of the sink.
        part: whether these are some of the queries of a larger array: a kernel that wants another layout
            then copies them alone.

    Examples:
        >>> from energy_attn.kernels import Settings
        >>> Settings._fields
        ('scale', 'mask', 'unrounded', 'score', 'scored_width', 'learnt', 'bias_learnt', 'sink_learnt', 'part')
    """

    scale: float
    mask: MaskStructure
    unrounded: bool = False
    score: ScoreStructure | None = None
    scored_width: int | None = None
    learnt: bool = True
    bias_learnt: bool = True
    sink_learnt: bool = True
    part: bool = False

    @property
    def compares(self) -> bool:
        """Whether the mask or the score reads positions."""
        return self.mask.constrains or (self.score is not None and self.score.compares)


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


def cotangents(
    query: Array | None,
    key: Array | None,
    value: Array | None,
    bias: Array | None,
    score_arrays: tuple[Array | None, ...] = (),
    sink: Array | None = None,
) -> Operands:
    """Cotangents in the form of the operands: None for masks, positions and segments."""
    arrays: Any = query, key, value, bias, *[None] * 6, score_arrays
    return Operands(*arrays, sink=sink)


def differentiated(operands: Operands) -> Operands:
    """Those of operands, or of their tangents, that are differentiated; None for the others."""
    arrays = (x if x is None or floating(x) else None for x in operands.score_arrays)
    return cotangents(*operands[:4], tuple(arrays), operands.sink)


def map_some(f: Callable[..., Any], first: Operands, *rest: Any) -> Operands:
    """`f` of what is not None in `first`, with what is in its place in the others; else None."""

    def of(x: Any, *others: Any) -> Any:
        return None if x is None else f(x, *others)

    return jax.tree.map(of, first, *rest, is_leaf=lambda x: x is None)


def with_moved(operands: Operands, moved: Operands) -> Operands:
    """Operands with those that are not None in `moved` in their places."""
    arrays = (
        x if y is None else y
        for x, y in zip(operands.score_arrays, moved.score_arrays, strict=True)
    )
    some = {name: x for name, x in moved._asdict().items() if x is not None}
    return operands._replace(**some | {"score_arrays": tuple(arrays)})


def bound(settings: Settings, operands: Operands) -> AbstractMask:
    """The mask of a call, whose arrays have a first axis of the batch, for `visible` and its like."""
    return settings.mask.bind(operands.mask_arrays)


def bound_score(settings: Settings, operands: Operands) -> BoundScore | None:
    """The score of a call with its arrays; None: there is none."""
    if settings.score is None:
        return None
    return BoundScore(settings.score, operands.score_arrays, settings.learnt)


def with_default_positions(operands: Operands, settings: Settings) -> Operands:
    """Operands with positions in place of lengths, and counted from 0 where mask or score read them.

    For operands of which each device gets a part.
    """
    return positioned(operands) if settings.compares else without_lengths(operands)


def has_lengths(operands: Operands) -> bool:
    """Whether lengths say which queries or keys are there."""
    return operands.query_lengths is not None or operands.key_lengths is not None


def without_lengths(operands: Operands) -> Operands:
    """Operands with positions in place of lengths, if there are any."""
    return positioned(operands) if has_lengths(operands) else operands


def positioned(operands: Operands) -> Operands:
    """Operands with positions in place of lengths, counted from 0 where none are given."""
    if operands.query_positions is not None:
        return operands
    tokens = Tokens._make(getattr(operands, name) for name in Tokens._fields)
    found = tokens.with_positions(operands.query.shape[1], operands.key.shape[1])
    return operands._replace(**found._asdict())


def all_meet(operands: Operands, settings: Settings) -> bool:
    """Whether positions count from 0, and by a window each query sees a key and each key is seen."""
    query_len, key_len = operands.query.shape[1], operands.key.shape[1]
    left, right = settings.mask.window
    counted = operands.query_positions is None and settings.mask.is_window
    counted = counted and is_static(query_len, key_len)
    return counted and query_len - key_len <= left and key_len - query_len <= right


def hide_unreachable(operands: Operands, settings: Settings) -> Operands:
    """Positions where the mask reads them, and position -1 (absent, never read) for keys that no query sees."""
    if settings.mask.constrains:
        operands = positioned(operands)
    queries, keys = operands.query_positions, operands.key_positions
    if queries is None or keys is None or queries.shape[1] == 0:
        return operands
    seen = reachable(bound(settings, operands), queries, keys)
    return operands._replace(key_positions=jnp.where(seen, keys, -1))


def zero_absent(operands: Operands) -> Operands:
    """Operands with zeros in absent rows and slots, whose products are weighted by zero.

    A key that a mask hides from all queries counts as absent. Scales get zeros likewise.
    """
    keys = present_keys(operands)

    def kept(x: Any, some: Array | None) -> Any:
        if x is None or some is None:
            return x
        return jnp.where(jnp.expand_dims(some, tuple(range(2, x.ndim))), x, 0)

    rows = operands.query_positions
    return operands._replace(
        query=kept(operands.query, None if rows is None else rows >= 0),
        key=kept(operands.key, keys),
        value=kept(operands.value, keys),
        key_scale=kept(operands.key_scale, keys),
        value_scale=kept(operands.value_scale, keys),
    )


def present_keys(operands: Operands) -> Array | None:
    """Which keys some query may see, `[B or 1, S or 1]`; None if all."""
    found = None if operands.key_positions is None else operands.key_positions >= 0
    if operands.mask is None:
        return found
    shown = operands.mask.any((1, 2))
    return shown if found is None else found & shown


def out_dtype(operands: Operands, settings: Settings) -> jnp.dtype:
    """The dtype of `out`: that of `value` as it is read, or that of `lse` where it stays unrounded."""
    read = operands.query if operands.value_scale is not None else operands.value
    if settings.unrounded:
        return lse_dtype(operands.query.dtype, read.dtype)
    return jnp.dtype(read.dtype)


def with_unrounded_out(settings: Settings) -> Settings:
    """Settings of a part that will be merged, so that `out` is rounded once, after the merge."""
    return settings._replace(unrounded=True)


def is_static(*sizes: object) -> bool:
    """Whether all sizes are numbers, not symbols of `jax.export.symbolic_shape`."""
    return set(map(type, sizes)) <= {int}
