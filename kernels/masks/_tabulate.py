"""Tables of the blocks of masks."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from .._checks import check_integer, received
from ._abstract import AbstractMask
from ._table import BlockTable
from ._visibility import in_blocks, tabulated


def tabulate(
    mask: AbstractMask, query_len: int, key_len: int | None = None, *, block: int = 128
) -> BlockTable:
    r"""The same mask with a table of its blocks, to be used in many calls: layers, heads and steps.

    $$\mathrm{some}_{xy} = \bigvee_{i \in x,\, j \in y} \mathrm{visible}_{ij}, \qquad
      \mathrm{whole}_{xy} = \bigwedge_{i \in x,\, j \in y} \mathrm{visible}_{ij}$$

    The mask is evaluated once for all pairs, one block at a time, so memory is that of the table. The
    table is an argument of a compiled program, like all arrays of masks.

    Args:
        mask: any mask; its arrays may have a batch axis, as those of a call.
        query_len: positions of queries from 0 that the table is made for.
        key_len: those of keys; None: the same.
        block: the number of queries, and of keys, in a block. Smaller ones skip more of the pairs that
            are hidden, as far as the blocks of a kernel follow them.

    Raises:
        TypeError: no mask, or sizes that are not ints.
        ValueError: sizes below 1.

    Source: `create_block_mask` of flex attention (arXiv 2412.05496).

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import energy_attn as ea
        >>> from energy_attn import masks
        >>> strided = masks.Function(lambda query, key: query // 4 % 3 == key // 4 % 3)
        >>> table = masks.tabulate(masks.Causal() & strided, 24, block=4)
        >>> q = jax.random.normal(jax.random.key(0), (1, 24, 2, 4))
        >>> out = ea.attention(q, q, q, mask=table)
        >>> bool(jnp.allclose(out, ea.attention(q, q, q, mask=table.mask), atol=1e-6))
        True
    """
    if not isinstance(mask, AbstractMask):
        raise TypeError(f"mask: wanted a mask of energy_attn.masks, got {received(mask)}")
    query_len = check_integer("query_len", query_len, least=1)
    key_len = query_len if key_len is None else check_integer("key_len", key_len, least=1)
    block = check_integer("block", block, least=1)
    leaves, tree = jax.tree.flatten(mask)
    ranks = mask.ranks
    arrays = [
        jnp.asarray(x)[None] if x.ndim == rank else jnp.asarray(x)
        for x, rank in zip(leaves, ranks, strict=True)
    ]
    batched = any(x.ndim > rank for x, rank in zip(leaves, ranks, strict=True))
    tokens = [
        in_blocks(jnp.arange(size, dtype=jnp.int32)[None], block) for size in (query_len, key_len)
    ]
    some, whole = (
        _corners(x) for x in tabulated(jax.tree.unflatten(tree, arrays), tokens[0], tokens[1])
    )
    if not batched:
        some, whole = some[0], whole[0]
    return BlockTable(mask, some, whole, block, query_len, key_len)


def _corners(x: Array) -> Array:
    """How many blocks before each corner are true, `[b, x + 1, y + 1]`."""
    sums = x.astype(np.int32).cumsum(1, dtype=np.int32).cumsum(2, dtype=np.int32)
    return jnp.pad(sums, ((0, 0), (1, 0), (1, 0)))
