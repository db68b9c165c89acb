"""The decode implementation: few queries and many keys, which are read once and in place."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from ..call._kernel import AbstractKernel
from ..call._operands import (
    KernelCall,
    Operands,
    Settings,
    bound_score,
    hide_unreachable,
    is_static,
    out_dtype,
    present_keys,
    zero_absent,
)
from ..call._state import AttentionState, divided, holds_keys, lse_dtype, precision
from ..masks._abstract import AbstractMask
from . import _blockwise
from ._blocks import inner, outer, product
from ._reference import masked, masked_scores, score_index
from ._softmax import softmax
from ._tangent import tangent_of

# With more query rows (queries times heads) the block-diagonal product wastes more arithmetic than it
# saves in bandwidth; chosen by measurement.
MOST_ROWS = 64
# A sum that is not finite is computed again in at least this many pieces, of at least and at most so
# many keys. Memory for a piece is allocated in any case, so pieces are small.
PIECES, LEAST_PIECE, MOST_PIECE = 8, 128, 1024


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
        operands, settings, _ = call
        no_values = operands._replace(value=operands.value[..., :0])
        (_, lse), rounding = _blockwise.forward(no_values, settings)
        state, cotangent = state._replace(lse=lse), divided(cotangent, rounding)
        return _blockwise.backward(operands, settings, state, cotangent)

    def tangent(
        self, call: KernelCall, state: AttentionState, directions: Operands
    ) -> AttentionState:
        """One product for each change of the scores and of the outputs."""
        operands, settings, _ = call
        return _tangent(operands, settings, state, directions)


class Decode(AbstractDecode):
    """XLA's operations, for at most 64 queries times heads; reads each key and value once.

    Memory O(T·N·S), small beside the keys. On CPUs all heads are in one product. Other platforms
    batch products over heads, and would copy the values to join heads and widths.
    """

    name = "decode"
    platforms = ()

    def check(self, call: KernelCall) -> None:
        """Raises `NotImplementedError` for more than 64 queries times heads, or a score with a source."""
        operands, settings, _ = call
        check_rows(operands, settings, MOST_ROWS)

    def forward(self, call: KernelCall) -> AttentionState:
        """One product for all scores and one for all outputs."""
        operands, settings, _ = call
        return lax.platform_dependent(
            hide_unreachable(operands, settings),
            cpu=functools.partial(_block_diagonal, settings=settings),
            default=functools.partial(per_head, settings=settings),
        )


def check_rows(operands: Operands, settings: Settings, most: int) -> None:
    """Raises `NotImplementedError` for more than `most` queries times heads, or a score with a source."""
    query_len, heads = operands.query.shape[1:3]
    if not is_static(query_len) or query_len * heads > most:
        raise NotImplementedError(
            f"query: wanted at most {most} rows times heads, "
            f"got {query_len} × {heads} = {query_len * heads}"
        )
    if settings.scored_width is not None:
        raise NotImplementedError("source: wanted None beside a score, got an array")


def _block_diagonal(operands: Operands, settings: Settings) -> AttentionState:
    # Each row has products with the values of all key heads; those with the values of its own are selected.
    query, value = operands.query, operands.value
    batch, query_len, heads, _ = query.shape
    key_len, kv_heads, value_width = value.shape[1:]
    # XLA:CPU multiplies 32 bits fastest with weights as [S, rows], and 16 bits as [rows, S]: otherwise it
    # casts all values first.
    keys_first = query.dtype.itemsize != 2
    scores = diagonal_scores(operands, settings, keys_first)
    value = value.reshape(batch, key_len, kv_heads * value_width)
    if not keys_first:
        weights, total, lse = softmax(scores)
        weighted_sum = functools.partial(product, precision=None)
        out, total = _summed(weighted_sum, weights, value, 2, operands), total[..., 0]
    else:
        weights, total, lse = softmax(scores, axis=1)
        weighted_sum = functools.partial(inner, precision=precision(query.dtype))
        out, total = _summed(weighted_sum, weights, value, 1, operands), total[:, 0]
    out = out.reshape(batch, kv_heads, heads // kv_heads, query_len, kv_heads, value_width)
    out = jnp.einsum("bkgtkh->bkgth", out)
    return state_of_rows(out, total, lse, operands, settings)


def state_of_rows(
    sums: Array, total: Array, lse: Array, operands: Operands, settings: Settings
) -> AttentionState:
    """The state, from outputs before division `[B, K, N/K, T, W]`, totals and energies `[B, N·T]`."""
    batch, query_len, heads = operands.query.shape[:3]
    out = sums.transpose(0, 3, 1, 2, 4).reshape(batch, query_len, heads, sums.shape[-1])
    total, lse = (x.reshape(batch, heads, query_len).transpose(0, 2, 1) for x in (total, lse))
    out = out.astype(total.dtype) / total[..., None]
    return AttentionState(out.astype(out_dtype(operands, settings)), lse)


def diagonal_scores(operands: Operands, settings: Settings, keys_first: bool) -> Array:
    """The scores of all heads by one product, `[B, S, N·T]`, or `[B, N·T, S]` where keys are not first.

    Rows are ordered by (key head, head of its group, time). Queries are laid out block-diagonally, so that keys keep
    their layout [S, K·H] and are read in order, where a product per head would stride through them.
    """
    query, key = operands[:2]
    batch, query_len, heads, width = query.shape
    key_len, kv_heads = key.shape[1:3]
    identity = jnp.eye(kv_heads, dtype=query.dtype)[None, :, None, None, :, None]
    query = query.reshape(batch, query_len, kv_heads, heads // kv_heads, width)
    query = query.transpose(0, 2, 3, 1, 4)[:, :, :, :, None, :] * identity
    # the barrier keeps XLA from rebuilding this array inside the product
    query = lax.optimization_barrier(query.reshape(batch, heads * query_len, kv_heads * width))
    key, exact = key.reshape(batch, key_len, kv_heads * width), precision(query.dtype)
    # XLA fuses both transpositions into the loop that masks the scores
    scores = outer(key, query, exact).swapaxes(1, 2) if keys_first else outer(query, key, exact)
    by_head = scores.reshape(batch, heads, query_len, key_len)
    scores = masked(by_head, operands, settings).reshape(scores.shape)
    return scores.swapaxes(1, 2) if keys_first else scores


def _summed(
    weighted_sum: Callable[[Array, Array], Array],
    weights: Array,
    value: Array,
    axis: int,
    operands: Operands,
) -> Array:
    """`weighed(weights, value)` without absent slots; `axis` of the weights is that of the keys.

    The weight of an absent slot is zero, but its value may not be finite, and copying all values with
    zeros there would take as long as the sum. So the sum includes absent slots, and is computed again in
    pieces, with zeros, only if it is not finite.
    """
    weights, present, key_len = weights.astype(value.dtype), present_keys(operands), value.shape[1]
    if present is not None and not is_static(key_len):
        value = jnp.where(present[:, :, None], value, 0)
    out = weighted_sum(weights, value)
    if present is None or not is_static(key_len) or key_len == 0:
        return out
    piece = min(max(-(-key_len // PIECES), LEAST_PIECE), MOST_PIECE, key_len)
    present = jnp.broadcast_to(present, value.shape[:2])

    def sum_in_pieces() -> Array:
        def add(i: Array, total: Array) -> Array:
            # the last piece overlaps the one before; keys in both count once
            first = jnp.minimum(i * piece, key_len - piece)
            is_new = jnp.arange(piece)[None] + first >= i * piece
            values, present_piece = (
                lax.dynamic_slice_in_dim(x, first, piece, 1) for x in (value, present)
            )
            values = jnp.where((present_piece & is_new)[:, :, None], values, 0)
            parts = lax.dynamic_slice_in_dim(weights, first, piece, axis)
            return total + weighted_sum(parts, values)

        return lax.fori_loop(0, -(-key_len // piece), add, lax.full_like(out, 0))

    return lax.cond(not_finite(out), sum_in_pieces, lambda: out)


# One condition for everything that is vmapped over: with a condition for each, lax.cond becomes a
# select, and both branches always run.
@jax.custom_batching.custom_vmap
def not_finite(x: Array) -> Array:
    return ~jnp.isfinite(x).all()


@not_finite.def_vmap
def _not_finite_of_all(size: int, batched: list[bool], x: Array) -> tuple[Array, bool]:
    del size, batched
    return not_finite(x), False


def per_head(operands: Operands, settings: Settings) -> AttentionState:
    """The state by products batched over heads; keys and values of eight bits are cast inside the products."""
    # Scores as [B, T, N, S]: heads and keys fill the tiles of a TPU, which T = 1 does not.
    query, key, value = operands[:3]
    batch, query_len, heads, width = query.shape
    kv_heads = key.shape[2]
    grouped = query.reshape(batch, query_len, kv_heads, heads // kv_heads, width)
    dtype = lse_dtype(query.dtype)
    einsum = functools.partial(
        jnp.einsum, precision=precision(query.dtype), preferred_element_type=dtype
    )
    present = zero_absent(operands)
    if operands.value_scale is None:
        value = present.value  # other platforms than CPUs fuse the zeros into the product
    else:
        key, value = key.astype(query.dtype), value.astype(query.dtype)  # exact, and likewise
    scores = _times(einsum("btkgh,bskh->btkgs", grouped, key), operands.key_scale)
    scores = scores.reshape(batch, query_len, heads, key.shape[1])
    scores = masked(scores.transpose(0, 2, 1, 3), operands, settings).transpose(0, 2, 1, 3)
    weights, total, lse = softmax(scores)
    weights = _times(weights.reshape(*grouped.shape[:-1], key.shape[1]), present.value_scale)
    out = einsum("btkgs,bskv->btkgv", weights.astype(value.dtype), value)
    out = out.reshape(batch, query_len, heads, value.shape[-1]) / total
    return AttentionState(out.astype(out_dtype(operands, settings)), lse)


def _times(x: Array, scale: Array | None) -> Array:
    """Scores or weights `[B, T, K, N/K, S]` times the scale `[B, S, K]` of their keys or values, if any."""
    return x if scale is None else x * scale.transpose(0, 2, 1)[:, None, :, None, :]


def _tangent(
    operands: Operands, settings: Settings, state: AttentionState, directions: Operands
) -> AttentionState:
    """The derivative of `(out, lse)` in the directions that are not None; memory O(T·N·S).

    The formulas are those of the blockwise `tangent`.
    """
    operands = hide_unreachable(operands, settings)
    has_keys, dtype = holds_keys(state.lse)[..., None], state.lse.dtype
    directions_present = zero_absent(
        operands._replace(query=directions.query, key=directions.key, value=directions.value)
    )
    query, key, value = zero_absent(operands)[:3]
    query = jnp.where(has_keys, query, 0)
    batch, query_len, heads = query.shape[:3]
    kv_heads, key_len = key.shape[2], key.shape[1]
    einsum = functools.partial(
        jnp.einsum, precision=precision(query.dtype), preferred_element_type=dtype
    )

    def products(query: Array, key: Array) -> Array:
        grouped = query.reshape(batch, query_len, kv_heads, heads // kv_heads, query.shape[-1])
        return einsum("btkgh,bskh->bkgts", grouped, key).reshape(batch, heads, query_len, key_len)

    def mean(weights: Array, value: Array) -> Array:
        grouped = weights.reshape(batch, kv_heads, heads // kv_heads, query_len, key_len)
        out = einsum("bkgts,bskv->btkgv", grouped, value.astype(dtype))
        return out.reshape(batch, query_len, heads, value.shape[-1])

    pairs: list[tuple[Array, Array]] = []
    if directions_present.query is not None:
        pairs.append((jnp.where(has_keys, directions_present.query, 0), key))
    if directions_present.key is not None:
        pairs.append((query, directions_present.key))
    changes = [products(*x) * settings.scale for x in pairs]
    scores, score = products(query, key) * settings.scale, bound_score(settings, operands)
    if score is not None:
        change = functools.reduce(jnp.add, changes) if changes else None
        index = score_index(operands, settings)
        scores, d_scores = score.jvp(scores, index, change, directions.score_arrays)
        changes = [] if d_scores is None else [d_scores]
    weights, total, _ = softmax(masked_scores(scores, operands, None, settings))
    if directions.bias is not None:
        changes.append(directions.bias.astype(dtype))
    sums, energy = jnp.zeros_like(state.out, dtype=dtype), jnp.zeros_like(state.lse)
    if changes:
        terms = weights * sum(changes)
        sums, energy = mean(terms, value), terms.sum(-1).transpose(0, 2, 1)
    if directions_present.value is not None:
        sums = sums + mean(weights, directions_present.value)
    total = total.transpose(0, 2, 1, 3)
    return tangent_of(state, AttentionState(sums / total, energy / total[..., 0]))
