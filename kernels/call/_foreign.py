"""Converts states of other libraries' kernels."""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._checks import check_choice, check_finite_number, check_floating, check_shape, received
from ._state import AttentionState, lse_dtype

LAYOUTS = ("BTN", "BNT")


def as_state(
    out: Float[Array, "... H"],
    lse: Float[Array, "..."],
    *,
    base: float = math.e,
    empty: float = -math.inf,
    layout: str = "BTN",
) -> AttentionState:
    r"""An attention state from the outputs of another library's kernel.

    $$F = \log(\mathrm{base}) \cdot \mathrm{lse}$$

    | library | its `lse` | no keys | options |
    |---|---|---|---|
    | FlashAttention-2 | `[B, N, T]`, natural | plus infinity | `empty=jnp.inf, layout="BNT"` |
    | FlashInfer | `[T, N]`, of base 2 | minus infinity | `base=2` |
    | vLLM's `merge_attn_states` | `[N, T]`, natural | either infinity | `empty=jnp.inf, layout="BNT"` |

    A row holds no keys if its `lse` is `empty` or minus infinity. Any other value that is not finite becomes NaN, and
    so does every state it is merged with. With `empty` plus infinity, a row whose `out` is not finite also becomes NaN:
    FlashAttention-2 writes the same `lse` for no keys and for a NaN among the scores.

    Args:
        out: attention over some keys, `[..., H]`, usually `[B, T, N, H]`; any floating dtype.
        lse: their free energy in units of `log(base)`; any floating dtype. It becomes float32, or
            float64 where `out` is.
        base: the base of the logarithm in `lse`; above 0, and not 1.
        empty: the value of `lse` in a row without keys: an infinity, or NaN.
        layout: the order of the axes of `lse`: `"BTN"` as in `out`, or `"BNT"` with the last two
            swapped. Leading axes may be missing.

    Returns:
        The state, with `out = 0` and `lse = -inf` for rows without keys.

    Raises:
        TypeError: `out` or `lse` is not a floating array, `base` or `empty` is not a number.
        ValueError: shapes do not fit, `base` is not above 0 or is 1, `empty` is finite, or the layout is unknown.

    Source: FlashAttention-2 (Dao, arXiv 2307.08691), FlashInfer (Ye et al., arXiv 2501.01005).

    Examples:
        >>> import jax.numpy as jnp
        >>> from energy_attn.kernels import as_state, merge
        >>> out, lse = jnp.ones((1, 3, 2, 4)), jnp.zeros((1, 2, 3)).at[0, 0, 0].set(jnp.inf)
        >>> state = as_state(out, lse, base=2, empty=jnp.inf, layout="BNT")
        >>> state.lse[0, :2].tolist()
        [[-inf, 0.0], [0.0, 0.0]]
        >>> merge(state, state).out.shape
        (1, 3, 2, 4)
    """
    out, lse = jnp.asarray(check_floating("out", out)), jnp.asarray(check_floating("lse", lse))
    if out.ndim == 0:
        raise ValueError(f"out: wanted at least the width axis, got {received(out)}")
    check_choice("layout", layout, LAYOUTS)
    shape = list(out.shape[:-1])
    if layout == "BNT":
        if len(shape) < 2:
            raise ValueError(f"out: wanted shape (..., T, N, H) for 'BNT', got {received(out)}")
        shape[-2:] = shape[:-3:-1]
    check_shape("lse", lse, tuple(shape))
    check_finite_number("base", base)
    if base <= 0 or base == 1:
        raise ValueError(f"base: wanted a number above 0 that is not 1, got {base}")
    if not isinstance(empty, (float, np.floating)):
        raise TypeError(f"empty: wanted an infinity or NaN, got {received(empty)}")
    if math.isfinite(empty):
        raise ValueError(f"empty: wanted an infinity or NaN, got {empty}")
    if layout == "BNT":
        lse = lse.swapaxes(-1, -2)
    lse = lse.astype(lse_dtype(out.dtype))
    if math.isnan(empty):
        without_keys = jnp.isnan(lse)
    else:  # a NaN among the scores shows in `out` (https://github.com/Dao-AILab/flash-attention/pull/978)
        without_keys = (lse == float(empty)) & jnp.isfinite(out).all(-1)
    without_keys |= lse == -jnp.inf
    lse = jnp.where(lse == jnp.inf, jnp.nan, lse * math.log(base))
    lse = jnp.where(without_keys, -jnp.inf, lse)
    return AttentionState(jnp.where(without_keys[..., None], 0, out), lse)
