"""Converts states of other libraries' kernels."""

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._checks import check_choice, check_finite_number, check_floating, check_shape, received
from ._state import AttentionState, lse_dtype

LAYOUTS = ("BTN", "BNT")


class _Convention(NamedTuple):
    """How a library writes `lse`."""

    base: float
    empty: float = -math.inf
    layout: str = "BTN"


_LIBRARIES = {
    "flash_attention": _Convention(math.e, math.inf, "BNT"),
    "flashinfer": _Convention(2.0),
    "vllm": _Convention(math.e, math.inf, "BNT"),
}


def as_state(
    out: Float[Array, "... H"],
    lse: Float[Array, "..."],
    *,
    library: str | None = None,
    base: float | None = None,
    empty: float | None = None,
    layout: str | None = None,
) -> AttentionState:
    r"""An attention state from the outputs of another library's kernel: FlashInfer, FlashAttention, FlashMLA, vLLM.

    $$F = \log(\mathrm{base}) \cdot \mathrm{lse}$$

    No array shows the base of `lse` (natural, or log2), and a wrong base is a wrong result without an error. So a call
    names the library, or says the base.

    | library | its `lse` | no keys | options |
    |---|---|---|---|
    | FlashAttention-2 | `[B, N, T]`, natural | plus infinity | `library="flash_attention"` |
    | FlashInfer | `[T, N]`, log2 | minus infinity | `library="flashinfer"` |
    | vLLM's `merge_attn_states` | `[N, T]`, natural | either infinity | `library="vllm"` |
    | FlashMLA's `flash_mla_sparse_fwd` | `[T, N]`, log2 | not documented | `base=2` |

    A row holds no keys if its `lse` is `empty` or minus infinity. Any other value that is not finite becomes NaN, and
    so does every state it is merged with. With `empty` plus infinity, a row whose `out` is not finite also becomes NaN:
    FlashAttention-2 writes the same `lse` for no keys and for a NaN among the scores.

    Args:
        out: attention over some keys, `[..., H]`, usually `[B, T, N, H]`; any floating dtype.
        lse: their free energy in units of `log(base)`; any floating dtype. It becomes float32, or
            float64 where `out` is.
        library: `"flash_attention"`, `"flashinfer"` or `"vllm"`, whose base, empty rows and layout are in the table.
        base: the base of the logarithm in `lse`; above 0, and not 1. Required without `library`: 2 for a log2 `lse`,
            `math.e` for a natural one.
        empty: the value of `lse` in a row without keys: an infinity, or NaN. None: minus infinity.
        layout: the order of the axes of `lse`: `"BTN"` as in `out`, or `"BNT"` with the last two
            swapped. Leading axes may be missing. None: `"BTN"`.

    Returns:
        The state, with `out = 0` and `lse = -inf` for rows without keys.

    Raises:
        TypeError: `out` or `lse` is not a floating array, `base` or `empty` is not a number.
            Neither `library` nor `base` is given.
        ValueError: shapes do not fit, `base` is not above 0 or is 1, `empty` is finite, or the layout or library is
            unknown. Both `library` and another option are given.

    Source: FlashAttention-2 (Dao, arXiv 2307.08691), FlashInfer (Ye et al., arXiv 2501.01005).

    Examples:
        >>> import jax.numpy as jnp
        >>> from energy_attn.kernels import as_state, merge
        >>> out, lse = jnp.ones((1, 3, 2, 4)), jnp.zeros((1, 2, 3)).at[0, 0, 0].set(jnp.inf)
        >>> state = as_state(out, lse, library="flash_attention")
        >>> state.lse[0, :2].tolist()
        [[-inf, 0.0], [0.0, 0.0]]
        >>> merge(state, state).out.shape
        (1, 3, 2, 4)
    """
    base, empty, layout = _convention(library, base, empty, layout)
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


def _convention(
    library: str | None, base: float | None, empty: float | None, layout: str | None
) -> _Convention:
    if library is not None:
        check_choice("library", library, tuple(_LIBRARIES))
        if not base is empty is layout is None:
            raise ValueError(
                "library: wanted either it or base, empty and layout, got both; "
                f"{library!r} is {tuple(_LIBRARIES[library])}"
            )
        return _LIBRARIES[library]
    if base is None:
        raise TypeError(
            "base: wanted the base of lse, 2 for log2 (FlashInfer) or math.e for a natural logarithm, or "
            f"library=, one of {', '.join(map(repr, _LIBRARIES))}, got neither"
        )
    check_finite_number("base", base)
    return _Convention(
        base, -math.inf if empty is None else empty, "BTN" if layout is None else layout
    )
