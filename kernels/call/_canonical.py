"""The mask of a call: from `mask=`, `is_causal=` and `local_window_size=` to what kernels take."""

import functools
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from .._checks import received
from ..masks._abstract import AbstractMask, And, check_mask
from ..masks._lengths import Lengths
from ..masks._segments import Segments, looked_up
from ..masks._structure import WINDOWS, MaskStructure, structure_of, window_mask, window_structure
from ..masks._visibility import visible
from ..masks._window import All, Causal, Window
from ._tokens import Tokens


class Masks(NamedTuple):
    """An energy's mask and a call's array, both of which hide keys."""

    mask: AbstractMask
    array: Any


def join_masks(own: AbstractMask | None, mask: object) -> Any:
    """A mask, or None, and what `mask=` is, in one mask for `split_mask`."""
    given, array = split_mask(mask)
    if own is None:
        return mask
    both = own if given is None else own & given
    return both if array is None else Masks(both, array)


def split_mask(mask: object) -> tuple[AbstractMask | None, Any]:
    """`mask=` as a mask or None, and as anything else or None.

    Raises `TypeError` for anything that is neither a mask nor an array.
    """
    if isinstance(mask, Masks):
        return mask
    if mask is None or isinstance(mask, (jax.Array, np.ndarray)):
        return None, mask
    return check_mask("mask", mask, "a mask of energy_attn.masks or a boolean array"), None


class PositionRules(NamedTuple):
    """The mask of a call as kernels take it; its segments and lengths become the tokens'."""

    structure: MaskStructure
    arrays: tuple[Array, ...] = ()
    segments: Segments | None = None
    lengths: tuple[Lengths, ...] = ()

    @property
    def reads(self) -> bool:
        """Whether they read positions."""
        return self.structure.constrains or self.segments is not None or self.lengths != ()

    def marked(self, tokens: Tokens, query_len: int, key_len: int) -> Tokens:
        """Tokens with the rules' segments and lengths."""
        for x in self.lengths:
            tokens = tokens.with_lengths(x.queries, x.keys)
        if self.segments is None:
            return tokens
        return _with_segments(self.segments, tokens, query_len, key_len)


NO_RULES = PositionRules(window_structure())


def position_rules(
    mask: AbstractMask | None,
    is_causal: bool,
    window: tuple[int | None, int | None] | None,
    batch: int,
    tokens: Tokens,
) -> PositionRules:
    """Returns the conjunction of a mask, causality and a window, in the form that most kernels take.

    Of the masks that `&` joins, `Causal` and `Window` become one; `Segments` and `Lengths` are for the tokens, but
    segments beside those that `tokens` have. Raises `TypeError` and `ValueError` for arrays of the mask that do not fit
    the call.
    """
    left, right = window or (None, None)
    right = 0 if is_causal else right
    if mask is None:
        return PositionRules(window_structure(left, right))
    segments, lengths = None, ()
    rest: list[AbstractMask] = []
    for x in _joined(_with_batch(mask, batch)):
        if isinstance(x, Causal):
            right = 0
        elif isinstance(x, Window):
            left, right = _least(left, x.left), _least(right, x.right)
        elif isinstance(x, Lengths):
            lengths = (*lengths, x)
        elif isinstance(x, Segments) and segments is None and tokens.query_segments is None:
            segments = x
        elif not isinstance(x, All):
            rest.append(x)
    window_rule = window_mask(left, right)
    mask = rest.pop(0) if rest and isinstance(window_rule, All) else window_rule
    for x in rest:
        mask = mask & x
    arrays, structure = tuple(jax.tree.leaves(mask)), structure_of(mask)
    if not isinstance(mask, WINDOWS):
        _check_traceable(structure, tuple((x.shape, x.dtype) for x in arrays))
    return PositionRules(structure, arrays, segments, lengths)


def _with_batch(mask: AbstractMask, batch: int) -> AbstractMask:
    leaves, tree = jax.tree.flatten_with_path(mask)
    arrays = []
    for (path, x), rank in zip(leaves, mask.ranks, strict=True):
        name = f"mask{jax.tree_util.keystr(path)}"
        if not (
            isinstance(x, (jax.Array, np.ndarray))
            and (x.dtype == jnp.bool_ or jnp.issubdtype(x.dtype, jnp.integer))
        ):
            raise TypeError(f"{name}: wanted an array of integers or booleans, got {received(x)}")
        if x.ndim == rank:
            x = x[None]
        elif x.ndim != rank + 1 or x.shape[0] not in (1, batch):
            lead = "" if x.ndim == rank + 1 else f"{rank} axes, or "
            raise ValueError(
                f"{name}: wanted {lead}a first axis of the batch, {batch}, got {received(x)}"
            )
        arrays.append(jnp.asarray(x))
    return jax.tree.unflatten(tree, arrays)


def _joined(mask: AbstractMask) -> list[AbstractMask]:
    if isinstance(mask, And):
        return _joined(mask.first) + _joined(mask.second)
    return [mask]


def _least(a: int | None, b: int | None) -> int | None:
    return min((x for x in (a, b) if x is not None), default=None)


def _with_segments(mask: Segments, tokens: Tokens, query_len: int, key_len: int) -> Tokens:
    of_queries: Any = mask.query_ids
    of_keys: Any = of_queries if mask.key_ids is None else mask.key_ids
    known = isinstance(query_len, int) and isinstance(key_len, int)  # not symbols
    named = ("query_ids", of_queries, query_len), ("key_ids", of_keys, key_len)
    short = [x for x in named if known and x[1].shape[1] < x[2]]
    counted = tokens.query_positions is None and tokens.key_positions is None
    if counted and known and not (tokens.has_lengths and short):
        for name, ids, size in short:
            raise ValueError(
                f"mask.{name}: wanted an id for each position from 0 to {size - 1}, "
                f"got {received(ids)}"
            )
        return tokens._replace(
            query_segments=of_queries[:, :query_len], key_segments=of_keys[:, :key_len]
        )
    tokens = tokens.with_positions(query_len, key_len)

    def found(ids: Array, positions: Any) -> tuple[Array, Array]:
        (batch,) = jnp.broadcast_shapes(ids.shape[:1], positions.shape[:1])
        segments, inside = jax.vmap(looked_up)(
            *(jnp.broadcast_to(x, (batch, x.shape[1])) for x in (ids, positions))
        )
        return segments, jnp.where(inside, positions, -1)

    query_segments, query_positions = found(of_queries, tokens.query_positions)
    key_segments, key_positions = found(of_keys, tokens.key_positions)
    return Tokens(query_positions, key_positions, query_segments, key_segments)


@functools.lru_cache(maxsize=256)
def _check_traceable(structure: MaskStructure, arrays: tuple[Any, ...]) -> None:
    """Raises `ValueError` if a mask closes over traced values, and the errors of the mask itself."""

    def run(query: Array, key: Array, *arrays: Array) -> Array:
        return visible(structure.bind(arrays), query, key)

    shapes = ((1, 3, 1), jnp.int32), ((1, 1, 2), jnp.int32), *arrays
    closed = jax.make_jaxpr(run)(*(jax.ShapeDtypeStruct(*x) for x in shapes)).consts
    if any(isinstance(x, jax.core.Tracer) for x in closed):
        raise ValueError(
            "function: wanted arrays that are traced as parameters, "
            f"masks.Function(function, *arrays), got a function that closes over {received(closed[0])}"
        )
