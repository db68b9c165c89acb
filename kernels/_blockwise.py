"""The blockwise implementation: XLA alone, memory O(T·block), any platform.

Forward and backward walk over blocks of scores and keep running statistics; the `T×S` matrix never
exists (online softmax: Milakov and Gimelshein, arXiv 1805.02867; FlashAttention-2: Dao,
arXiv 2307.08691).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from ._arguments import Operands, Settings
from ._blocks import (
    Blocks,
    Index,
    cut_keys,
    cut_queries,
    join_keys,
    join_queries,
    outer,
    product,
)
from ._state import AttentionState, lse_dtype


def forward(operands: Operands, settings: Settings) -> AttentionState:
    """`(out, lse)` by online softmax over blocks of keys; takes every call. Raises nothing.

    Differentiated as it stands it would store every block: see `_flash` for the derivative.
    """
    batch, rows, heads, _ = operands.query.shape
    value = operands.value
    if rows == 0 or operands.key.shape[1] == 0:
        return _without_keys(operands)
    blocks = Blocks(operands, settings)
    g = blocks.grid
    wide = lse_dtype(operands.query.dtype)
    # Values stand on their side with a row of ones below: one product of [width + 1, keys] and
    # [keys, rows] gives numerator and denominator. The probabilities stay in the wide dtype.
    ones = jnp.ones((*value.shape[:-1], 1), wide)
    values = cut_keys(g, jnp.concatenate([value.astype(wide), ones], -1)).swapaxes(-1, -2)

    def one_block_of_queries(at: Index) -> tuple[Array, Array]:
        def one_block_of_keys(carry: tuple[Array, Array], j: Array) -> Any:
            here = at._replace(key=j)

            def attend(maximum: Array, sums: Array) -> tuple[Array, Array]:
                scores = blocks.scores(here)
                new = jnp.maximum(maximum, scores.max(0))
                shift = jnp.where(jnp.isfinite(new), new, 0.0)
                weights = jnp.exp(scores - shift[None])
                decay = jnp.exp(maximum - shift)
                here_sums = product(values[here.batch, here.head, j], weights)
                return new, sums * decay[None] + here_sums

            return when(blocks.meet(here), attend, *carry), None

        start = blocks.full(-jnp.inf, g.rows), blocks.full(0.0, value.shape[-1] + 1, g.rows)
        (maximum, sums), _ = lax.scan(one_block_of_keys, start, jnp.arange(g.key_blocks))
        numerator, denominator = sums[:-1], sums[-1]
        seen = denominator > 0
        denominator = jnp.where(seen, denominator, 1.0)
        lse = jnp.where(seen, maximum + jnp.log(denominator), -jnp.inf)
        return (numerator / denominator[None]).T.astype(value.dtype), lse[:, None]

    out, lse = over_heads_and_queries(blocks, one_block_of_queries)
    return AttentionState(join_queries(g, out, rows), join_queries(g, lse, rows)[..., 0])


def _without_keys(operands: Operands) -> AttentionState:
    shape = (*operands.query.shape[:-1], operands.value.shape[-1])
    out = lax.full_like(operands.value, 0.0, shape=shape)
    wide = lse_dtype(operands.query.dtype)
    return AttentionState(out, lax.full_like(out, -jnp.inf, shape=shape[:-1], dtype=wide))


def backward(
    operands: Operands,
    settings: Settings,
    state: AttentionState,
    cotangent: AttentionState,
) -> Operands:
    r"""The vector-Jacobian product of `(out, lse)` with both cotangents, in blocks.

    With $P_a = e^{s_a - F}$ and $\delta = \dot{out}\cdot out - \dot{lse}$,

    $$\dot s_a = P_a (\dot{out}\cdot v_a - \delta), \quad \dot v_a = \sum P_a \dot{out}, \quad
      \dot q = \mathrm{scale} \sum_a \dot s_a k_a, \quad \dot k_a = \mathrm{scale} \sum \dot s_a q.$$

    Returns the cotangents in the form of the operands, None for masks and positions. It is
    differentiable JAX itself, so second derivatives in reverse mode are right. Raises nothing.
    """
    query, key, value, bias = operands[:4]
    zeros: list[Any] = [None if x is None else jnp.zeros_like(x) for x in operands[:4]]
    none = Operands(*zeros, mask=None, query_positions=None, key_positions=None)
    rows, columns = query.shape[1], key.shape[1]
    if rows == 0 or columns == 0:
        return none
    blocks = Blocks(operands, settings)
    g = blocks.grid
    wide = lse_dtype(query.dtype)
    # Rows that see no key, and rows that fill the last block, have lse = +inf here: P = 0.
    seen = jnp.isfinite(state.lse)
    lse = jnp.where(seen, state.lse, jnp.inf)
    delta = (cotangent.out.astype(wide) * state.out.astype(wide)).sum(-1) - cotangent.lse
    delta = jnp.where(seen, delta, 0.0)
    lse = cut_queries(g, lse[..., None], fill=jnp.inf)[..., 0]
    delta = cut_queries(g, delta[..., None])[..., 0]
    outs = cut_queries(g, cotangent.out)
    values = cut_keys(g, value)
    keys_on_side = cut_keys(g, key.astype(wide)).swapaxes(-1, -2)

    def one_block_of_keys(at: Index, queries: Array, biases: Array | None) -> Any:
        def one_block_of_queries(carry: Any, i: Array) -> Any:
            here = at._replace(query=i)
            where = here.batch, here.head, i

            def attend(keys: Array, values_: Array, queries: Array, biases: Any) -> Any:
                weights = jnp.exp(blocks.scores(here) - lse[where][None])
                gradient = outer(values[here.batch, here.head, here.key], outs[where])
                gradient = weights * (gradient - delta[where][None])
                if biases is not None:
                    biases = blocks.add_to_bias(biases, gradient, here)
                keys += product(gradient, blocks.query[where].astype(wide))
                values_ += product(weights, outs[where].astype(wide))
                new = product(keys_on_side[here.batch, here.head, here.key], gradient)
                queries = queries.at[i].add(new)
                return keys, values_, queries, biases

            return when(blocks.meet(here), attend, *carry), None

        start = (
            blocks.full(0.0, g.keys, key.shape[-1]),
            blocks.full(0.0, g.keys, value.shape[-1]),
            queries,
            biases,
        )
        (keys, values_, queries, biases), _ = lax.scan(
            one_block_of_queries, start, jnp.arange(g.query_blocks)
        )
        return (queries, biases), (keys, values_)

    def one_head(biases: Array | None, i: Array) -> Any:
        at = Index(i // g.kv_heads, i % g.kv_heads, i, i)

        def step(carry: Any, j: Array) -> Any:
            return one_block_of_keys(at._replace(key=j), *carry)

        queries = blocks.full(0.0, g.query_blocks, key.shape[-1], g.rows)
        (queries, biases), found = lax.scan(step, (queries, biases), jnp.arange(g.key_blocks))
        return biases, (queries.swapaxes(-1, -2), *found)

    biases = None if blocks.bias is None else blocks.full(0.0, *blocks.bias.shape)
    biases, found = lax.scan(one_head, biases, jnp.arange(g.batch * g.kv_heads))
    queries, keys, values_ = (x.reshape(g.batch, g.kv_heads, *x.shape[1:]) for x in found)
    if bias is not None and biases is not None:
        biases = biases[:, :, : bias.shape[2], : bias.shape[3]].astype(bias.dtype)
    return none._replace(
        query=(join_queries(g, queries, rows) * settings.scale).astype(query.dtype),
        key=(join_keys(g, keys, columns) * settings.scale).astype(key.dtype),
        value=join_keys(g, values_, columns).astype(value.dtype),
        bias=biases,
    )


def over_heads_and_queries(blocks: Blocks, f: Any) -> Any:
    """Maps `f(Index)` over batch, key heads and blocks of queries; results lead with those axes."""
    g = blocks.grid

    def one_head(i: Array) -> Any:
        return lax.map(
            lambda t: f(Index(i // g.kv_heads, i % g.kv_heads, t, t)), jnp.arange(g.query_blocks)
        )

    found = lax.map(one_head, jnp.arange(g.batch * g.kv_heads))
    return jax.tree.map(lambda x: x.reshape(g.batch, g.kv_heads, *x.shape[1:]), found)


def when(condition: Array | None, f: Any, *carry: Any) -> Any:
    """`f(*carry)` where `condition` holds or is None, else `carry`. Raises nothing."""
    if condition is None:
        return f(*carry)
    return lax.cond(condition, f, lambda *carry: carry, *carry)
