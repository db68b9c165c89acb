"""What the kernels of vendors have in common: what they decline, and the cotangent of lse.

They know one width, positions that count from 0, and a backward for the cotangent of `out` alone.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from ..call._arguments import Operands, Settings, cotangents, out_dtype
from ..call._kernel import check_operands
from ..call._state import AttentionState

_DTYPES = ("float16", "bfloat16")

# From value, out and the cotangent of out to the cotangents of query, key and value.
Pull = Callable[[Array, Array, Array], tuple[Array, Array, Array]]


def check_plain(operands: Operands, settings: Settings, widest: int) -> None:
    """Declines all that a vendor's kernel for widths up to `widest` does not know or get right.

    Raises `NotImplementedError`, saying why.
    """
    query, key, value = operands[:3]
    check_operands(operands, _DTYPES, Operands._fields[3:])
    width = query.shape[-1]
    if width > widest or width % 8 != 0:
        raise NotImplementedError(
            f"query: wanted a width that is a multiple of 8 up to {widest}, got {width}"
        )
    if value.shape[-1] != width:
        raise NotImplementedError(f"value: wanted query's width, {width}, got {value.shape[-1]}")
    # The largest score is found before the scale is applied.
    if not settings.scale > 0:
        raise NotImplementedError(f"scale: wanted a number above 0, got {settings.scale}")
    # Of fewer or more queries than keys, some kernels count from the first of each, some from the
    # last. With as many of each, every row sees its own key at least.
    if settings.rule.constrains and query.shape[1] != key.shape[1]:
        raise NotImplementedError(
            "query: wanted as many queries as keys where positions are compared, got "
            f"{query.shape[1]} and {key.shape[1]}"
        )


def window_side(size: int, keys: int) -> int | None:
    """One side of a window; None if it reaches over all keys. Raises nothing."""
    return size if size < keys - 1 else None


def vendor_state(out: Array, lse: Array, operands: Operands, settings: Settings) -> AttentionState:
    """What a vendor's kernel gave, as states are: in a call that `check_plain` lets pass every row
    sees a key, and an energy that is not finite is a broken number, whatever a vendor writes
    for one (FlashAttention-2 writes plus infinity, as for no keys). Raises nothing.
    """
    broken = ~jnp.isfinite(lse)
    lse = jnp.where(broken, jnp.nan, lse)
    out = jnp.where(broken[..., None], jnp.nan, out.astype(out_dtype(operands, settings)))
    return AttentionState(out, lse)


def pull_back(
    pull: Pull, operands: Operands, state: AttentionState, cotangent: AttentionState
) -> Operands:
    r"""Both cotangents by a backward that knows that of `out` alone. Raises nothing.

    Its $\dot s_a = P_a (\dot{out}\cdot v_a - \dot{out}\cdot out)$ is linear in $\dot{out}$, for
    any values and any $out$ that it is given. So with $v_a = (1, 1, 0, \dots)$, $out = 0$ and
    $\dot{out} = (high, low, 0, \dots)$, where $high + low = \dot{lse}$, it gives the rest,
    $P_a \dot{lse}$: exact, but for the last bits of two 16-bit numbers, and at no greater width.
    """
    out, d_out = (x.astype(operands.value.dtype) for x in (state.out, cotangent.out))
    query, key, value = pull(operands.value, out, d_out)
    if cotangent.lse is not None:
        ones, zero, parts = _lse_operands(operands.value, out, cotangent.lse)
        more_query, more_key, _ = pull(ones, zero, parts)
        query, key = _add(query, more_query), _add(key, more_key)
    return cotangents(query, key, value, None)


def _lse_operands(value: Array, out: Array, lse: Any) -> tuple[Array, Array, Array]:
    wide, width = lse.dtype, out.shape[-1]
    high = lse.astype(out.dtype)
    low = (lse - high.astype(wide)).astype(out.dtype)
    parts = jnp.stack([high, low], -1)
    parts = jnp.pad(parts, [(0, 0)] * 3 + [(0, width - 2)])
    ones = (jnp.arange(width) < 2).astype(value.dtype)
    return jnp.zeros_like(value) + ones[None, None, None], jnp.zeros_like(out), parts


def _add(x: Array, y: Array) -> Array:
    return (x.astype(jnp.float32) + y.astype(jnp.float32)).astype(x.dtype)
