"""What a kernel is given: the arrays of a call, and its static options."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from ..masks._abstract import AbstractMask
from ..masks._structure import Structure
from ..masks._visibility import reachable
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
            the rule compares positions and None is given, they count from 0.
        key_positions: None, or int32 `[B, S]` or `[1, S]`.
        query_segments: None, or int32 `[B, T]` or `[1, T]`; given together with the keys'.
        key_segments: None, or int32 `[B, S]` or `[1, S]`.
        rule_arrays: those of the rule of the settings, each with a first axis of `B` or 1. A kernel
            that knows no rule with arrays gets none.

    Examples:
        >>> import jax.numpy as jnp
        >>> from energy_attn.kernels import Operands
        >>> x = jnp.ones((1, 6, 2, 4))
        >>> Operands(x, x, x, None, None, None, None).rule_arrays
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
    rule_arrays: tuple[Array, ...] = ()


class Settings(NamedTuple):
    """The static options of a call; hashable.

    Attributes:
        scale: the factor of the scores.
        rule: what is static in the rule that says which key positions a query position sees. Its
            `sides` are how far a query sees before and after it; a kernel that knows no other rules than
            `All`, `Causal` and `Window` needs no more.
        wide: whether `out` has the dtype of `lse`, for merging, instead of that of `value`.

    Examples:
        >>> from energy_attn.kernels import Settings
        >>> Settings._fields
        ('scale', 'rule', 'wide')
    """

    scale: float
    rule: Structure
    wide: bool = False


def cotangents(
    query: Array | None, key: Array | None, value: Array | None, bias: Array | None
) -> Operands:
    """Cotangents in the form of the operands: None for masks, positions, segments and rules."""
    arrays: Any = query, key, value, bias, *[None] * 6
    return Operands(*arrays)


def bound(settings: Settings, operands: Operands) -> AbstractMask:
    """The rule of a call, whose arrays have a first axis of the batch, for `visible` and its like."""
    return settings.rule.bind(operands.rule_arrays)


def with_default_positions(operands: Operands, settings: Settings) -> Operands:
    """Operands with positions, counted from 0 where the rule compares them and none are given."""
    if operands.query_positions is not None or not settings.rule.constrains:
        return operands
    query_positions, key_positions = (
        jnp.arange(x.shape[1], dtype=jnp.int32)[None] for x in operands[:2]
    )
    return operands._replace(query_positions=query_positions, key_positions=key_positions)


def hide_unreachable(operands: Operands, settings: Settings) -> Operands:
    """`with_default_positions`, and position -1 (absent, never read) for keys that no query sees."""
    operands = with_default_positions(operands, settings)
    queries, keys = operands.query_positions, operands.key_positions
    if queries is None or keys is None or queries.shape[1] == 0:
        return operands
    seen = reachable(bound(settings, operands), queries, keys)
    return operands._replace(key_positions=jnp.where(seen, keys, -1))


def zero_absent(operands: Operands) -> Operands:
    """Operands with zeros in absent rows and slots, whose products are weighted by zero.

    A key that a mask hides from all queries counts as absent.
    """
    keys = present_keys(operands)

    def kept(x: Any, some: Array | None) -> Any:
        return x if x is None or some is None else jnp.where(some[:, :, None, None], x, 0)

    rows = operands.query_positions
    return operands._replace(
        query=kept(operands.query, None if rows is None else rows >= 0),
        key=kept(operands.key, keys),
        value=kept(operands.value, keys),
    )


def present_keys(operands: Operands) -> Array | None:
    """Which keys some query may see, `[B or 1, S or 1]`; None if all."""
    found = None if operands.key_positions is None else operands.key_positions >= 0
    if operands.mask is None:
        return found
    shown = operands.mask.any((1, 2))
    return shown if found is None else found & shown


def out_dtype(operands: Operands, settings: Settings) -> jnp.dtype:
    """The dtype of `out`: that of `value`, or that of `lse` where the settings are wide."""
    if settings.wide:
        return lse_dtype(operands.query.dtype, operands.value.dtype)
    return jnp.dtype(operands.value.dtype)


def with_wide_out(settings: Settings) -> Settings:
    """Settings of a part that will be merged, so that `out` is rounded once, after the merge."""
    return settings._replace(wide=True)


def is_static(*sizes: object) -> bool:
    """Whether all sizes are numbers, not symbols of `jax.export.symbolic_shape`."""
    return all(isinstance(size, int) for size in sizes)
