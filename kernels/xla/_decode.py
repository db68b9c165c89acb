"""The decode implementations: few queries and many keys, each read once."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from .._slice import slice_at
from ..call._kernel import AbstractKernel, check_operands, of_rows_with_keys
from ..call._operands import (
    KernelCall,
    Operands,
    Settings,
    dequantize,
    dequantized,
    hide_unreachable,
    is_static,
    map_some,
    out_dtype,
    present_keys,
    with_moved,
)
from ..call._state import AttentionState, divided, exp_from, lse_dtype, safe_shift
from ..fold._tree import following
from ..masks._abstract import AbstractMask
from ._blockwise import Blockwise
from ._loops import PRODUCTS, Products, row_maximum, row_sum, scores_of, weighed_sum
from ._reference import dense_state, masked, normalised

MOST_ROWS = 64  # queries times heads, of which all scores are in memory; chosen by measurement
MOST_CPU_ROWS = 1024
# With more rows of a key head `blockwise` is faster, which multiplies them by larger blocks.
PREFERRED_ROWS = 32


class AbstractDecode(AbstractKernel):
    """Few queries and many keys, with any mask and score; subclasses define `forward`."""

    interpreted = ()
    exported = True
    masks = (AbstractMask,)
    scores = True

    def backward(
        self, call: KernelCall, state: AttentionState, cotangent: AttentionState
    ) -> Operands:
        """The blockwise backward, with energies recomputed from the same products that it computes."""
        # P = e^{s - F} sums to 1 only if F is of the scores as the backward rounds them
        blockwise, operands = Blockwise(), call.operands
        no_values = call._replace(operands=operands._replace(value=operands.value[..., :0]))
        (_, lse), rounding = blockwise.forward_and_rest(no_values)
        state, cotangent = state._replace(lse=lse), divided(cotangent, jnp.exp(-rounding))
        return blockwise.backward(call, state, cotangent)


class Decode(AbstractDecode):
    """XLA's operations, for at most 64 queries times heads; reads each key and value once.

    Memory O(T·N·S), small compared with the keys.
    """

    name = "decode"
    platforms = ()

    def check(self, call: KernelCall) -> None:
        _check_rows(call, MOST_ROWS)

    def forward(self, call: KernelCall) -> AttentionState:
        operands, settings = call.operands, call.settings
        return dense_state(settings, hide_unreachable(operands, settings))

    def tangent(
        self, call: KernelCall, state: AttentionState, directions: Operands
    ) -> AttentionState:
        """JAX's derivative of the dense state: a loop over blocks gathers all keys in a program that XLA partitions."""
        settings = call.settings.needing(unrounded=True)

        def state_of(moved: Operands) -> AttentionState:
            operands = hide_unreachable(with_moved(call.operands, moved), settings)
            value = operands.value.astype(state.lse.dtype)  # so that sums are rounded once
            return dense_state(settings, operands._replace(value=value))

        primals = map_some(lambda _, x: x, directions, call.operands)
        change = of_rows_with_keys(state, jax.jvp(state_of, (primals,), (directions,))[1])
        return change._replace(out=change.out.astype(state.out.dtype))


def _check_rows(call: KernelCall, most: int) -> None:
    query_len, heads = call.operands.query.shape[1:3]
    if not is_static(query_len) or query_len * heads > most:
        raise NotImplementedError(
            f"query: wanted at most {most} rows times heads, "
            f"got {query_len} × {heads} = {query_len * heads}"
        )
    if call.settings.scored_width is not None:
        raise NotImplementedError("source: wanted None with a score, got an array")


class _OnlineSoftmax(NamedTuple):
    """The online softmax of each row of the batch over the keys read so far, in the dtype of the scores."""

    maximum: Float[Array, "B rows"]
    total: Float[Array, "B rows"]
    weighed: Float[Array, "B K R W"]


@dataclasses.dataclass(frozen=True)
class DecodeCPU(AbstractDecode):
    """XLA's operations as XLA:CPU runs them fastest, for few queries and many keys.

    A loop over the blocks of keys in which some query sees a key; others are not read, so that the time of a step
    grows with the filled part of a cache. Memory O(T·N·keys). Partitioned programs use `decode`, as the loop would
    send blocks between devices.
    """

    keys: int = 512  # in a block
    products: Products = PRODUCTS  # how a block is multiplied

    name = "decode_cpu"
    platforms = ("cpu",)

    def check(self, call: KernelCall) -> None:
        operands = call.operands
        plain = operands if operands.scales.key is None else jax.eval_shape(dequantized, operands)
        check_operands(plain, ("float32", "bfloat16", "float16", "float64"), without=())
        _check_rows(call, MOST_CPU_ROWS)

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
        operands, settings = call.operands, call.settings
        operands = hide_unreachable(operands.positioned(settings.uses_positions), settings)
        query, value = operands.query, operands.value
        batch, query_len, heads = query.shape[:3]
        key_len, kv_heads, width = value.shape[1:]
        group = heads // kv_heads
        size = min(self.keys, key_len)
        live = _live_blocks(present_keys(operands), batch, key_len, size)
        blocks = jnp.int32(-(-key_len // size))  # of each row of the batch

        def add_block(carry: tuple[Array, _OnlineSoftmax]) -> tuple[Array, _OnlineSoftmax]:
            i, sums = carry
            row, index = lax.div(i, blocks), lax.rem(i, blocks)
            # the last block overlaps the one before; keys in both count once
            first = jnp.minimum(index * size, key_len - size)
            is_new = jnp.arange(size, dtype=jnp.int32) + first >= index * size
            block, value = _take_block(operands, row, first, size)
            old = _OnlineSoftmax(*(lax.dynamic_index_in_dim(x, row, keepdims=False) for x in sums))
            new = self._added(old, block, value, is_new if key_len % size else None, settings)
            pairs = zip(sums, new, strict=True)
            new = (lax.dynamic_update_index_in_dim(x, y, row, 0) for x, y in pairs)
            return i + 1 if live is None else live[i + 1], _OnlineSoftmax(*new)

        def full(fill: float, *shape: int) -> Array:
            return lax.full_like(query, fill, dtype=lse_dtype(query.dtype), shape=(batch, *shape))

        rows = heads * query_len
        start = _OnlineSoftmax(
            full(-jnp.inf, rows), full(0.0, rows), full(0.0, kv_heads, group * query_len, width)
        )
        first = jnp.int32(0) if live is None else live[0]
        _, sums = lax.while_loop(lambda carry: carry[0] < batch * blocks, add_block, (first, start))
        total, lse, _ = normalised(sums.total, sums.maximum)  # lse = m + log l
        total, lse = (x.reshape(batch, heads, query_len).transpose(0, 2, 1) for x in (total, lse))
        weighed = sums.weighed.reshape(batch, heads, query_len, width).transpose(0, 2, 1, 3)
        out = weighed / total[..., None]  # o / l
        return AttentionState(out.astype(out_dtype(operands, settings)), lse)

    def _added(
        self,
        old: _OnlineSoftmax,
        operands: Operands,
        value: Callable[[], Array],
        is_new: Array | None,
        settings: Settings,
    ) -> _OnlineSoftmax:
        """The sums of a row with the new keys of a block; the others are in `old`."""
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
        # m' = max(m, max s), w = e^{s - m'}, l' = e^{m - m'} l + Σ w, o' = e^{m - m'} o + Σ w v
        # Barriers: without them XLA computes scores and weights again at each use.
        scores = lax.optimization_barrier(scores)
        maximum = jnp.maximum(old.maximum, row_maximum(scores))
        shift = safe_shift(maximum)
        weights = lax.optimization_barrier(exp_from(scores, shift[:, None]))
        decay = jnp.exp(old.maximum - shift)
        weighed = weighed_sum(
            weights.reshape(kv_heads, -1, size),
            value,
            None if is_present is None else is_present[0],
            self.products,
        )
        return _OnlineSoftmax(
            maximum,
            old.total * decay + row_sum(weights),
            old.weighed * decay.reshape(kv_heads, -1, 1) + weighed,
        )


def _live_blocks(
    present: Bool[Array, "#B #S"] | None, batch: int, key_len: int, size: int
) -> Int[Array, " following"] | None:
    """The next block with a present key, from each block on, of the blocks of all rows; None if all have one."""
    if present is None:
        return None
    present = jnp.broadcast_to(present, (batch, key_len))
    present = jnp.pad(present, ((0, 0), (0, -key_len % size)))
    return following(present.reshape(-1, size).any(-1))


def _take_block(
    operands: Operands, row: Array, first: Array, size: int
) -> tuple[Operands, Callable[[], Array]]:
    # The operands with `size` keys from `first` on of a row of the batch, and the values of all keys. The second is the
    # values of these keys, `[size, K, W]`, taken again by each call: otherwise XLA copies them for a branch that is
    # seldom taken.
    zero = jnp.zeros_like(row)

    def cut(x: Any, keys: int | None = None) -> Any:
        if x is None:
            return None
        starts = {0: row} if x.shape[0] > 1 else {}
        sizes: dict[int, Any] = {0: 1}
        if keys is not None and x.shape[keys] > 1:
            starts[keys], sizes[keys] = first, size
        corner = tuple(starts.get(axis, zero) for axis in range(x.ndim))
        return slice_at(x, corner, tuple(sizes.get(axis, x.shape[axis]) for axis in range(x.ndim)))

    def plain(x: Array, scale: Array | None) -> Array:
        return dequantize(cut(x, 1), cut(scale, 1), operands.query.dtype)

    scales, indices = operands.scales, operands.indices
    batches = row[None]
    if indices.batch is not None:
        batches = lax.dynamic_slice(indices.batch, (row,), (1,))
    part = operands._replace(
        query=cut(operands.query),
        key=plain(operands.key, scales.key),
        bias=cut(operands.bias, 3),
        mask=cut(operands.mask, 3),
        tokens=operands.tokens.map_queries(cut).map_keys(lambda x: cut(x, 1)),
        mask_arrays=jax.tree.map(cut, operands.mask_arrays),
        indices=indices._replace(batch=batches),
        scales=scales._replace(key=None),
    )
    return part, lambda: plain(operands.value, scales.value)[0]
