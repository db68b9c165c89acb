"""The splash implementation: JAX's TPU kernels for training and prefill, tuned by their authors.

Their backward kernels take the energies and $\\delta$, so that the cotangent of lse is exact. JAX's
function around them computes $\\delta$ from `out` alone, so this calls the two kernels directly.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from .._imports import private_names
from ..call._kernel import AbstractKernel
from ..call._operands import KernelCall, Operands, Settings
from ..call._state import AttentionState
from ..masks._ready import Lengths
from ..masks._segments import Segments
from ..masks._structure import WINDOWS
from ..pallas.tpu._kernel import PallasTPU
from ..xla._blockwise_derivatives import backward_delta
from ._adapter import (
    check_plain,
    keep_rows,
    present_cotangents,
    push_forward,
    sides_of,
    vendor_state,
    without_empty,
    zero_beyond,
)

_LEAST = 128  # rows per block
_MOST = 32768  # rows: the package splits masks into blocks on the host, one by one
# Fully masked rows have a lower lse: a hidden pair scores -0.7 times the largest float32.
_NO_KEY = -1e38


@dataclasses.dataclass(frozen=True)
class Splash(AbstractKernel):
    """JAX's splash attention: bfloat16, whole blocks of 128 rows, a scale that is a power of two.

    The kernels take scaled queries, which rounds them unless the scale is a power of two. The default
    scale is one for widths of 64 and 256, but not for 128.
    """

    blocks: tuple[int, ...] = (1024, 512, 256, _LEAST)  # the first fitting that divides the rows
    computed: int = 512  # keys of a block that are multiplied at once
    fewest: int = (
        8  # least number of blocks larger than `computed` in the keys that a query may see
    )

    name = "splash"
    platforms = ("tpu",)
    interpreted = ("cpu", "cuda", "rocm")
    exported = True
    masks = (*WINDOWS, Lengths, Segments)

    def check(self, call: KernelCall) -> None:
        operands, settings = call.operands, call.settings
        check_plain(self, call, widest=256)
        if operands.tokens.has_lengths and operands.tokens.query_segments is not None:
            raise NotImplementedError("query_segment_ids: wanted None with lengths, got an array")
        if operands.query.dtype != "bfloat16":
            raise NotImplementedError(f"query: wanted bfloat16, got {operands.query.dtype}")
        for name, x in (("query", operands.query), ("key", operands.key)):
            if x.shape[1] % _LEAST != 0 or x.shape[1] > _MOST:
                raise NotImplementedError(
                    f"{name}: wanted a multiple of {_LEAST} rows up to {_MOST}, got {x.shape[1]}"
                )
        if math.frexp(settings.scale)[0] != 0.5:
            raise NotImplementedError(f"scale: wanted a power of two, got {settings.scale}")
        private_names("splash")

    def forward(self, call: KernelCall) -> AttentionState:
        operands, (kernel, *scaled) = call.operands, self._scaled(call)
        with _splash_config():
            out, (lse,) = jax.vmap(kernel)(*scaled, _segments(operands))
        state = vendor_state(out.swapaxes(1, 2), lse.swapaxes(1, 2), call)
        if operands.tokens.query_segments is None:
            return state
        return keep_rows(~(state.lse < _NO_KEY), state, -jnp.inf)

    def backward(
        self, call: KernelCall, state: AttentionState, cotangent: AttentionState
    ) -> Operands:
        """Runs the dQ and dK/dV kernels, or one fused kernel if the keys are one block."""
        operands, (kernel, query, key, value) = call.operands, self._scaled(call)
        vendor_rows, cotangent = without_empty(operands, state, cotangent)
        d_out = cotangent.out.astype(value.dtype)
        # δ = dout·out - dlse: one backward takes both cotangents
        rows = (vendor_rows.lse, d_out, backward_delta(vendor_rows, cotangent))
        with _splash_config():
            cotangents = jax.vmap(functools.partial(_backward, kernel))(
                _segments(operands), query, key, value, *(x.swapaxes(1, 2) for x in rows)
            )
        query, key, value = (x.swapaxes(1, 2) for x in cotangents)
        return present_cotangents(operands, state, query * call.settings.scale, key, value)

    def tangent(
        self, call: KernelCall, state: AttentionState, directions: Operands
    ) -> AttentionState | None:
        """Uses the tangent of pallas_tpu: splash has none."""
        with _splash_config():
            return push_forward(PallasTPU(), call, state, directions)

    def _scaled(self, call: KernelCall) -> tuple[Any, ...]:
        """Returns the kernel and operands `[B, N, T, H]`; scaling queries by a power of two is exact."""
        settings, (query, key, value) = call.settings, zero_beyond(call.operands).qkv
        query, key, value = (x.swapaxes(1, 2) for x in (query * settings.scale, key, value))
        blocks = self._blocks(query, key, settings)
        return _kernel(settings.mask.window, blocks, call.platform != "tpu"), query, key, value

    def _blocks(self, query: Array, key: Array, settings: Settings) -> "_Blocks":
        rows, keys = query.shape[2], key.shape[2]
        seen = min(keys, sum(settings.mask.window) + 1)

        def fits(block: int) -> bool:
            all_keys = block == keys and not settings.mask.constrains
            return block <= self.computed or self.fewest * block <= seen or all_keys

        row_block, key_block = (
            next(b for b in self.blocks if n % b == 0 and fits(b)) for n in (rows, keys)
        )
        return _Blocks(rows, keys, row_block, key_block, min(key_block, self.computed))


class _Blocks(NamedTuple):
    rows: int
    keys: int
    row_block: int
    key_block: int
    computed: int  # keys that are multiplied at once

    @property
    def fused(self) -> bool:
        """Whether one kernel computes all gradients.

        It rounds the gradients of queries to bfloat16 for each block of keys, so only one block is exact.
        """
        return self.keys == self.key_block


def _segments(operands: Operands) -> Any:
    """Returns segment ids of queries and keys, or None; with lengths, 0 within them and -1 beyond."""
    ids: Any = operands.tokens.query_segments, operands.tokens.key_segments
    if operands.tokens.has_lengths:
        with_positions: Any = operands.positioned().tokens
        ids = (
            jnp.minimum(x, 0)
            for x in (with_positions.query_positions, with_positions.key_positions)
        )
    elif operands.tokens.query_segments is None:
        return None
    rows = operands.query.shape[0]
    return private_names("splash").SegmentIds(
        *(jnp.broadcast_to(x, (rows, x.shape[1])) for x in ids)
    )


def _backward(kernel: Any, segments: Any, query: Array, *rest: Array) -> tuple[Array, Array, Array]:
    """Returns the cotangents of scaled queries, keys and values of one batch entry."""
    key, value, lse, d_out, delta = rest
    options, blocks = dict(kernel.kwargs), kernel.kwargs["block_sizes"]
    for name in ("block_sizes", "save_residuals", "residual_checkpoint_name"):
        del options[name]
    options |= {x: getattr(blocks, x) for x in ("q_layout", "k_layout", "v_layout")}
    arrays = (query, key, value, segments, None, lse, d_out, delta)
    d_query, d_key, d_value = private_names("splash").backward_key(
        *arrays,
        bq=blocks.block_q_dkv,
        bkv=blocks.block_kv_dkv,
        bkv_compute=blocks.block_kv_dkv_compute,
        mask_info=kernel.dkv_mask_info,
        use_fused_bwd_kernel=blocks.use_fused_bwd_kernel,
        **options,
    )
    if d_query is not None:
        return d_query, d_key, d_value
    d_query = private_names("splash").backward_query(
        *arrays,
        bq=blocks.block_q_dq,
        bkv=blocks.block_kv_dq,
        mask_info=kernel.dq_mask_info,
        **options,
    )
    return d_query, d_key, d_value


@functools.lru_cache(maxsize=32)
def _kernel(window: tuple[int, int], blocks: _Blocks, interpret: bool) -> Any:
    splash = private_names("splash")
    query_kernel_block = None if blocks.fused else blocks.row_block
    sizes = splash.BlockSizes(
        block_q=blocks.row_block,
        block_kv=blocks.key_block,
        block_kv_compute=blocks.computed,
        block_q_dkv=blocks.row_block,
        block_kv_dkv=blocks.key_block,
        block_kv_dkv_compute=blocks.computed,
        block_q_dq=query_kernel_block,
        block_kv_dq=query_kernel_block and blocks.key_block,
        use_fused_bwd_kernel=blocks.fused,
    )
    # One mask serves all heads. The result is cached across traces, so it must not be traced.
    with jax.ensure_compile_time_eval():
        kernel = splash.make(
            mask=splash.masks.MultiHeadMask([_mask(splash.masks, window, blocks[:2])]),
            block_sizes=sizes,
            save_residuals=True,
            head_shards=1,
            q_seq_shards=1,
            interpret=interpret,
        )
        return jax.tree.map(np.asarray, kernel)


def _mask(masks: Any, window: tuple[int, int], shape: tuple[int, int]) -> Any:
    left, right = sides_of(window, shape[1])
    if left is None and right is None:
        return masks.FullMask(shape)
    if left is None and right == 0:
        return masks.CausalMask(shape)
    return masks.LocalMask(shape, (left, right), 0)


@contextlib.contextmanager
def _splash_config() -> Iterator[None]:
    # These kernels expect 32 bits, and free promotion of dtypes and ranks. Their results do not state which mesh axes
    # of a `jax.shard_map` they vary over, so that check is off.
    with (
        jax.enable_x64(False),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
        private_names("splash").check_varying(False),
    ):
        yield
