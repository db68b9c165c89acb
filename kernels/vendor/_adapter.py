"""What the adapters of vendors' kernels share: the calls they decline, the cotangent of lse, the tangent.

Those kernels take one width, positions that count from 0, and a cotangent of `out` alone. None has a
derivative in a direction.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array

from ..call._kernel import AbstractKernel, check_operands
from ..call._operands import Operands, Settings, cotangents, out_dtype
from ..call._state import AttentionState

_DTYPES = ("float16", "bfloat16")

# From value, out and the cotangent of out to the cotangents of query, key and value.
Pull = Callable[[Array, Array, Array], tuple[Array, Array, Array]]


def check_plain(operands: Operands, settings: Settings, widest: int) -> None:
    """Declines calls that a vendor's kernel for widths up to `widest` does not compute correctly.

    Raises `NotImplementedError` with the reason.
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
    # the kernels take the maximum of the scores before they apply the scale
    if not settings.scale > 0:
        raise NotImplementedError(f"scale: wanted a number above 0, got {settings.scale}")
    # With unequal numbers of queries and keys, some kernels align the first of each and some the last.
    # With equal numbers, every row sees at least its own key.
    if settings.rule.constrains and query.shape[1] != key.shape[1]:
        raise NotImplementedError(
            "query: wanted as many queries as keys where positions are compared, got "
            f"{query.shape[1]} and {key.shape[1]}"
        )


def window_side(size: int, keys: int) -> int | None:
    """One side of a window; None if it covers all keys."""
    return size if size < keys - 1 else None


def vendor_state(out: Array, lse: Array, operands: Operands, settings: Settings) -> AttentionState:
    """The state from a vendor's outputs, with NaN where the energy is not finite.

    Every row sees a key in calls that pass `check_plain`, so such an energy comes from a NaN or an
    overflow, for which FlashAttention-2 writes plus infinity, as for no keys.
    """
    broken = ~jnp.isfinite(lse)
    lse = jnp.where(broken, jnp.nan, lse)
    out = jnp.where(broken[..., None], jnp.nan, out.astype(out_dtype(operands, settings)))
    return AttentionState(out, lse)


def pull_back(
    pull: Pull, operands: Operands, state: AttentionState, cotangent: AttentionState
) -> Operands:
    r"""Both cotangents by a backward that takes that of `out` alone.

    Its $\dot s_a = P_a (\dot{out}\cdot v_a - \dot{out}\cdot out)$ is linear in $\dot{out}$, for
    any values and any $out$. So a second call with $v_a = (1, 1, 0, \dots)$, $out = 0$ and
    $\dot{out} = (high, low, 0, \dots)$, where $high + low = \dot{lse}$ in two 16-bit numbers, gives
    the missing term $P_a \dot{lse}$ at the same width.
    """
    out, d_out = (x.astype(operands.value.dtype) for x in (state.out, cotangent.out))
    query, key, value = pull(operands.value, out, d_out)
    if cotangent.lse is not None:
        ones, zero, parts = _lse_operands(operands.value, out, cotangent.lse)
        more_query, more_key, _ = pull(ones, zero, parts)
        query, key = _add(query, more_query), _add(key, more_key)
    return cotangents(query, key, value, None)


def push_forward(
    kernel: AbstractKernel,
    operands: Operands,
    settings: Settings,
    state: AttentionState,
    directions: Operands,
    platform: str | None,
) -> AttentionState | None:
    """The tangent of `kernel`, one of ours; None if it declines the call."""
    try:
        kernel.check(operands, settings)
    except NotImplementedError:
        return None
    return kernel.tangent(operands, settings, state, directions, platform)


def _lse_operands(value: Array, out: Array, lse: Array) -> tuple[Array, Array, Array]:
    wide, width = lse.dtype, out.shape[-1]
    high = lse.astype(out.dtype)
    low = (lse - high.astype(wide)).astype(out.dtype)
    parts = jnp.stack([high, low], -1)
    parts = jnp.pad(parts, [(0, 0)] * 3 + [(0, width - 2)])
    ones = (jnp.arange(width) < 2).astype(value.dtype)
    return jnp.zeros_like(value) + ones[None, None, None], jnp.zeros_like(out), parts


def _add(x: Array, y: Array) -> Array:
    return (x.astype(jnp.float32) + y.astype(jnp.float32)).astype(x.dtype)
