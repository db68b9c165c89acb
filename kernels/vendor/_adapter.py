"""Helpers of the vendor adapters: checks, lengths, the cotangent of lse, the tangent.

Vendors' kernels take one width, positions that count from 0, and a cotangent of `out` alone, and have no
derivative in a direction.
"""

import abc
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from ..call._kernel import AbstractKernel, check_operands
from ..call._operands import KernelCall, Operands, cotangents, out_dtype, zero_absent
from ..call._state import AttentionState, holds_keys
from ..masks._segments import Segments
from ..masks._structure import WINDOWS
from ..pallas.gpu._kernel import PallasGPU

_DTYPES = ("float16", "bfloat16")

# lse of a fully masked row in a backward: e^(s - FAR) is 0, where e^(s + inf) would be NaN.
FAR = 1e30


class VendorGPU(AbstractKernel):
    """Flash attention of a vendor, from its forward and from its backward, which takes no cotangent of lse."""

    platforms = ("cuda",)
    interpreted = ()
    exported = False
    masks = WINDOWS

    @abc.abstractmethod
    def attend(self, call: KernelCall) -> tuple[Array, Array]:
        """Returns `out` `[B, T, N, H]` and float32 `lse` `[B, N, T]`; any value in fully masked rows."""

    @abc.abstractmethod
    def pull_back(
        self, call: KernelCall, lse: Array, out: Array, d_out: Array
    ) -> tuple[Array, Array, Array]:
        """Returns the cotangents of query, key and value; any value for absent tokens. `lse` is `[B, N, T]`."""

    def forward(self, call: KernelCall) -> AttentionState:
        out, lse = self.attend(call._replace(operands=zero_beyond(call.operands)))
        return vendor_state(out, lse.swapaxes(1, 2), call)

    def backward(
        self, call: KernelCall, state: AttentionState, cotangent: AttentionState
    ) -> Operands:
        r"""One call for each cotangent, of `out` and of `lse`.

        A vendor's $\dot s_a = P_a (\dot{out}\cdot v_a - \dot{out}\cdot out)$ is linear in $\dot{out}$, for
        any values and any $out$. So a second call with $v_a = (1, 1, 0, \dots)$, $out = 0$ and
        $\dot{out} = (high, low, 0, \dots)$, where $high + low = \dot{lse}$ in two 16-bit numbers, gives
        the missing term $P_a \dot{lse}$ at the same width.
        """
        operands = call.operands
        present = zero_beyond(operands)
        vendor_rows, cotangent = without_empty(operands, state, cotangent)
        lse, dtype = vendor_rows.lse.swapaxes(1, 2), operands.value.dtype
        out, d_out = vendor_rows.out.astype(dtype), cotangent.out.astype(dtype)
        query, key, value = self.pull_back(call._replace(operands=present), lse, out, d_out)
        if cotangent.lse is not None:
            ones, zero, parts = _lse_operands(operands.value, out, cotangent.lse)
            other = call._replace(operands=present._replace(value=ones))
            more_query, more_key, _ = self.pull_back(other, lse, zero, parts)
            query, key = _add(query, more_query), _add(key, more_key)
        return present_cotangents(operands, state, query, key, value)

    def tangent(
        self, call: KernelCall, state: AttentionState, directions: Operands
    ) -> AttentionState | None:
        """Uses the tangent of pallas_gpu: vendors have none, or not for all widths."""
        return push_forward(PallasGPU(), call, state, directions)


def check_plain(kernel: AbstractKernel, call: KernelCall, widest: int) -> None:
    """Raises `NotImplementedError` for calls that vendor kernels of width up to `widest` do not support."""
    operands, settings = call.operands, call.settings
    query, key, value = operands.qkv
    supported = {"query", "key", "value", "query_lengths", "key_lengths"}
    supported |= {"query_segments", "key_segments"} if Segments in kernel.masks else set()
    check_operands(operands, _DTYPES, [x for x in operands.named() if x not in supported])
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
    if settings.mask.constrains and query.shape[1] != key.shape[1]:
        raise NotImplementedError(
            "query: wanted as many queries as keys where positions are compared, got "
            f"{query.shape[1]} and {key.shape[1]}"
        )


def sides_of(window: tuple[int, int], keys: int) -> list[int | None]:
    """Returns the sides of a window; None for a side that covers all keys."""
    return [size if size < keys - 1 else None for size in window]


def lengths(operands: Operands) -> tuple[Array, Array]:
    """Returns the lengths of queries and keys, `[B]`, clipped to the arrays."""
    batch, query_len = operands.query.shape[:2]
    tokens, key_len = operands.tokens, operands.key.shape[1]
    pairs = (tokens.query_lengths, query_len), (tokens.key_lengths, key_len)
    queries, keys = (
        jnp.broadcast_to(size if x is None else jnp.clip(x, 0, size), batch) for x, size in pairs
    )
    return queries.astype(jnp.int32), keys.astype(jnp.int32)


def zero_beyond(operands: Operands) -> Operands:
    """Zeros operands beyond the lengths, where a weight of 0 would multiply NaN."""
    if not operands.tokens.has_lengths:
        return operands
    query, key, value = zero_absent(operands.positioned()).qkv
    return operands._replace(query=query, key=key, value=value)


def vendor_state(out: Array, lse: Array, call: KernelCall) -> AttentionState:
    """Returns the state of a vendor's outputs, with NaN where lse is not finite.

    Rows that lengths mask fully get lse = -inf. `check_plain` lets through no other fully masked rows, so a
    non-finite lse is a NaN or an overflow, for which FlashAttention-2 writes +inf.
    """
    # https://github.com/Dao-AILab/flash-attention/pull/978
    operands, broken = call.operands, ~jnp.isfinite(lse)
    lse = jnp.where(broken, jnp.nan, lse)
    out = jnp.where(broken[..., None], jnp.nan, out.astype(out_dtype(operands, call.settings)))
    state = AttentionState(out, lse)
    if not operands.tokens.has_lengths:
        return state
    # the queries that are present and see a key: under a window, their first one
    queries, keys = (x[:, None] for x in lengths(operands))
    rows = jnp.arange(operands.query.shape[1], dtype=jnp.int32)[None]
    first = jnp.maximum(rows - min(call.settings.mask.window[0], operands.key.shape[1]), 0)
    return keep_rows(((rows < queries) & (first < keys))[..., None], state, -jnp.inf)


def keep_rows(rows: Array, state: AttentionState, lse: float) -> AttentionState:
    """Returns a state or cotangent with `out` 0 and the given `lse` outside `rows`, `[B, T, N or 1]`."""
    out = jnp.where(rows[..., None], state.out, 0)
    energies = None if state.lse is None else jnp.where(rows, state.lse, lse)
    return AttentionState(out, energies)  # pyright: ignore[reportArgumentType]


def may_be_empty(operands: Operands) -> bool:
    return operands.tokens.has_lengths or operands.tokens.query_segments is not None


def without_empty(
    operands: Operands, state: AttentionState, cotangent: AttentionState
) -> tuple[AttentionState, AttentionState]:
    """Returns state and cotangent with which fully masked rows contribute 0 to a vendor's backward."""
    if not may_be_empty(operands):
        return state, cotangent
    rows = holds_keys(state.lse)
    return keep_rows(rows, state, FAR), keep_rows(rows, cotangent, 0)


def present_cotangents(
    operands: Operands, state: AttentionState, query: Array, key: Array, value: Array
) -> Operands:
    """Zeros cotangents beyond the lengths and in fully masked rows."""
    if may_be_empty(operands):
        query = jnp.where(holds_keys(state.lse)[..., None], query, 0)
    if operands.tokens.has_lengths:
        keys: Any = operands.positioned().tokens.key_positions
        key, value = (jnp.where(keys[..., None, None] >= 0, x, 0) for x in (key, value))
    return cotangents(query, key, value)


def push_forward(
    kernel: AbstractKernel, call: KernelCall, state: AttentionState, directions: Operands
) -> AttentionState | None:
    """Returns the tangent by `kernel`; None if it declines the call."""
    call = call._replace(operands=call.operands.positioned(read=False))
    try:
        kernel.check(call)
    except NotImplementedError:
        return None
    return kernel.tangent(call, state, directions)


def _lse_operands(value: Array, out: Array, lse: Array) -> tuple[Array, Array, Array]:
    # dout·v_a = high + low = dlse and dout·out = 0, so that a vendor's ds_a is P_a dlse
    dtype, width = lse.dtype, out.shape[-1]
    high = lse.astype(out.dtype)
    low = (lse - high.astype(dtype)).astype(out.dtype)
    parts = jnp.stack([high, low], -1)
    parts = jnp.pad(parts, [(0, 0)] * 3 + [(0, width - 2)])
    ones = (jnp.arange(width) < 2).astype(value.dtype)
    return jnp.zeros_like(value) + ones[None, None, None], jnp.zeros_like(out), parts


def _add(x: Array, y: Array) -> Array:
    return (x.astype(jnp.float32) + y.astype(jnp.float32)).astype(x.dtype)
