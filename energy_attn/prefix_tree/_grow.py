"""Draft trees that grow by their likeliest nodes."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from energy_attn.kernels.internal import checks, lse_dtype

from ._tree import PrefixTree, check_logits, gather_slots, tree_from_checked_parents


def grow(tree: PrefixTree, logits: Float[Array, "B L V"], count: int) -> PrefixTree:
    r"""Adds the `count` likeliest nodes to a tree.

    $$\mathrm{score}(n) = \sum_{a \text{ on the path to } n,\ \text{no root}}
      \log P(x_a \mid \mathrm{parent}(a))$$

    Candidates are all tokens under all nodes, except those in the tree already. To draft a tree, begin
    with [`from_parents`][energy_attn.prefix_tree.PrefixTree.from_parents] of a root in `L` slots, and
    grow it once for each level.

    Args:
        tree: a tree whose `unpacker` is `[B, L, C]`, as from `from_parents`. Paths have at
            most `C` nodes.
        logits: `[B, L, V]`, floating: the drafter's after each node; those of unused slots are not
            read.
        count: the number of nodes to add to each row, static; fewer are added if slots or
            candidates run out.

    Returns:
        The tree with the new nodes after the others, best first; ties in order of parent and token.

    Raises:
        TypeError: `tree` is not a `PrefixTree`, `logits` not a floating array or `count` not an
            integer.
        ValueError: logits of another shape, a tree whose candidates are not its nodes, or a count
            below 1.

    Source: the dynamic draft trees of EAGLE-2 (arXiv 2406.16858).

    Examples:
        >>> import jax.numpy as jnp
        >>> from energy_attn.prefix_tree import PrefixTree, grow
        >>> slots = jnp.zeros((1, 4), int)
        >>> tree = PrefixTree.from_parents(slots + 5, slots - 1, 3, jnp.array([1]))
        >>> logits = jnp.log(jnp.array([[[0.1, 0.6, 0.3], *[[0.2, 0.1, 0.7]] * 3]]))
        >>> tree = grow(tree, logits, 1)  # token 1, with probability 0.6
        >>> tree = grow(tree, logits, 2)  # its child 2, with 0.42, and its sibling 2, with 0.3
        >>> tree.tokens.tolist(), tree.parent.tolist()
        ([[5, 1, 2, 2]], [[-1, 0, 1, 0]])
    """
    check_logits(tree, logits)
    checks.check_shape("tree.unpacker", tree.unpacker, (*tree.tokens.shape, "C"))
    count = checks.check_integer("count", count, least=1)
    return _grown(count, tree, jnp.asarray(logits))


@functools.partial(jax.jit, static_argnums=0)
def _grown(count: int, tree: PrefixTree, logits: Array) -> PrefixTree:
    batch, slots = tree.tokens.shape
    # at most `count` of the best are children of one node
    scores = _scores(tree, logits)
    scores, tokens = lax.top_k(scores, min(count, scores.shape[2]))
    candidates = scores.shape[2]
    entries = slots * candidates
    scores, best = lax.top_k(scores.reshape(batch, entries), min(count, entries))
    added = (scores > -jnp.inf).sum(-1, dtype=jnp.int32)

    rank = jnp.arange(slots, dtype=jnp.int32)[None] - tree.size[:, None]
    is_new = (rank >= 0) & (rank < added[:, None])
    selected = gather_slots(best, jnp.where(is_new, rank, -1))
    token = gather_slots(tokens.reshape(batch, entries), selected).astype(tree.tokens.dtype)
    return tree_from_checked_parents(
        tree.unpacker.shape[2],
        jnp.where(is_new, token, tree.tokens),
        jnp.where(is_new, selected // candidates, tree.parent),
        jnp.minimum(tree.size + added, slots),
    )


def _scores(tree: PrefixTree, logits: Array) -> Array:
    # [B, L, V]: of each token under each node; -inf if it cannot be added
    slots, vocabulary = logits.shape[1:]
    log_p = jax.nn.log_softmax(logits.astype(lse_dtype(logits.dtype)), axis=-1)
    rows = jnp.arange(len(log_p), dtype=jnp.int32)[:, None]
    used = jnp.arange(slots, dtype=jnp.int32)[None] < tree.size[:, None]
    is_child = used & (tree.parent >= 0)
    index = jnp.where(is_child, tree.parent, slots), checks.as_int32(tree.tokens)
    edge = log_p.at[rows, *index].get(mode="fill", fill_value=0)
    path = gather_slots(edge, tree.unpacker).sum(-1)
    scores = jnp.where(jnp.isneginf(log_p), -jnp.inf, path[:, :, None] + log_p)
    scores = scores.at[rows, *index].set(-jnp.inf, mode="drop")
    can_grow = used & (tree.depth < tree.unpacker.shape[2] - 1)
    return jnp.where(can_grow[:, :, None], scores, -jnp.inf)
