"""The decode implementation for CPUs: blocks of keys that some query sees are read once, at the speed of memory."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from ..call._kernel import check_operands
from ..call._operands import (
    KernelCall,
    Settings,
    dequantized,
    hide_unreachable,
    out_dtype,
    present_keys,
)
from ..call._state import AttentionState, exp_from, lse_dtype, safe_shift
from ._decode import AbstractDecode, check_rows
from ._live import Block, live_blocks, take_block
from ._products import PRODUCTS, Products, row_maximum, row_sum, scores_of, weighed_sum
from ._reference import masked
from ._softmax import normalised

MOST_ROWS = 1024
# With more rows of a key head `blockwise` is faster, which multiplies them by larger blocks.
PREFERRED_ROWS = 32


class _OnlineSoftmax(NamedTuple):
    """The online softmax of each row of the batch over the keys read so far, in the dtype of the scores."""

    maximum: Float[Array, "B rows"]
    total: Float[Array, "B rows"]
    weighed: Float[Array, "B K R W"]


@dataclasses.dataclass(frozen=True)
class DecodeCPU(AbstractDecode):
    """XLA's operations as XLA:CPU runs them fastest, for few queries and many keys.

    A loop over the blocks of keys of each row of the batch of which some query sees a key: the others are not read, so
    that a step over a cache takes as long as what is in it. Memory O(T·N·keys). Programs that XLA partitions have
    `decode`: there the loop would send blocks between devices.

    Attributes:
        keys: in a block.
        products: how a block is multiplied.
    """

    keys: int = 512
    products: Products = PRODUCTS

    name = "decode_cpu"
    platforms = ("cpu",)

    def check(self, call: KernelCall) -> None:
        operands, settings, _ = call
        plain = operands if operands.scales.key is None else jax.eval_shape(dequantized, operands)
        check_operands(plain, ("float32", "bfloat16", "float16", "float64"), without=())
        check_rows(operands, settings, MOST_ROWS)

    def check_preferred(self, call: KernelCall) -> None:
        query_len, heads = call.operands.query.shape[1:3]
        rows = query_len * heads // call.operands.key.shape[2]
        if rows > PREFERRED_ROWS:
            raise NotImplementedError(
                f"query: wanted at most {PREFERRED_ROWS} rows a key head, where this is faster than blockwise, "
                f"got {rows}"
            )

    def reads_eight_bits(self, call: KernelCall) -> bool:
        """Always: a block is dequantized when it is read."""
        del call
        return True

    def forward(self, call: KernelCall) -> AttentionState:
        operands, settings, _ = call
        operands = hide_unreachable(operands.positioned(settings.compares), settings)
        query, value = operands.query, operands.value
        batch, query_len, heads = query.shape[:3]
        key_len, kv_heads, width = value.shape[1:]
        group = heads // kv_heads
        size = min(self.keys, key_len)
        blocks = live_blocks(present_keys(operands), batch, key_len, size)

        def add_block(i: Array, sums: _OnlineSoftmax) -> _OnlineSoftmax:
            row, index = blocks.at(i)
            # the last block overlaps the one before; keys in both count once
            first = jnp.minimum(index * size, key_len - size)
            is_new = jnp.arange(size, dtype=jnp.int32) + first >= index * size
            block = take_block(operands, row, first, size)
            old = _OnlineSoftmax(*(lax.dynamic_index_in_dim(x, row, keepdims=False) for x in sums))
            new = self._added(old, block, is_new if key_len % size else None, settings)
            pairs = zip(sums, new, strict=True)
            return _OnlineSoftmax(
                *(lax.dynamic_update_index_in_dim(x, y, row, 0) for x, y in pairs)
            )

        def full(fill: float, *shape: int) -> Array:
            return lax.full_like(query, fill, dtype=lse_dtype(query.dtype), shape=(batch, *shape))

        rows = heads * query_len
        start = _OnlineSoftmax(
            full(-jnp.inf, rows), full(0.0, rows), full(0.0, kv_heads, group * query_len, width)
        )
        sums = lax.fori_loop(jnp.int32(0), blocks.total, add_block, start)
        total, lse, _ = normalised(sums.total, sums.maximum)
        total, lse = (x.reshape(batch, heads, query_len).transpose(0, 2, 1) for x in (total, lse))
        weighed = sums.weighed.reshape(batch, heads, query_len, width).transpose(0, 2, 1, 3)
        out = weighed / total[..., None]
        return AttentionState(out.astype(out_dtype(operands, settings)), lse)

    def _added(
        self, old: _OnlineSoftmax, block: Block, is_new: Array | None, settings: Settings
    ) -> _OnlineSoftmax:
        """The sums of a row with a block of its keys, of which those that are not new count already."""
        operands = block.operands
        query_len, heads = operands.query.shape[1:3]
        size, kv_heads = operands.key.shape[1:3]
        query = operands.query.reshape(query_len, kv_heads, -1, operands.query.shape[-1])
        query = query.transpose(1, 2, 0, 3).reshape(kv_heads, -1, query.shape[-1])
        raw = scores_of(query, operands.key[0], self.products).reshape(size, -1)
        raw = raw.T.reshape(1, heads, query_len, size)
        scores = masked(raw, operands, settings).reshape(-1, size)
        is_present = present_keys(operands)
        if is_new is not None:
            scores = jnp.where(is_new, scores, -jnp.inf)
            is_present = is_new[None] if is_present is None else is_present & is_new[None]
        # Barriers: else XLA computes scores and weights again wherever they are used.
        scores = lax.optimization_barrier(scores)
        maximum = jnp.maximum(old.maximum, row_maximum(scores))
        shift = safe_shift(maximum)
        weights = lax.optimization_barrier(exp_from(scores, shift[:, None]))
        decay = jnp.exp(old.maximum - shift)
        weighed = weighed_sum(
            weights.reshape(kv_heads, -1, size),
            block.value,
            None if is_present is None else is_present[0],
            self.products,
        )
        return _OnlineSoftmax(
            maximum,
            old.total * decay + row_sum(weights),
            old.weighed * decay.reshape(kv_heads, -1, 1) + weighed,
        )
