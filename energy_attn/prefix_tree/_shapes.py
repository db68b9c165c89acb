"""Trees from parents, from a fixed set of choices, and grown by their likeliest nodes."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Integer

from energy_attn.kernels.internal import checks, lse_dtype

from ._tree import (
    PrefixTree,
    check_logits,
    check_parents,
    check_range,
    check_slots,
    gather_slots,
    tree_from_ancestors,
)


def tree_from_parents(
    tokens: Integer[Array, "B L"],
    parent: Integer[Array, "B L"],
    depth: int,
    size: Integer[Array, " B"] | None = None,
) -> PrefixTree:
    """The prefix tree of nodes with given parents.

    Each node is a candidate, the path that ends in it, so `unpacker` is `[B, L, depth]`.

    Args:
        tokens: `[B, L]` integers of any dtype.
        parent: `[B, L]` integers: the slot of each node's parent, which comes before it; -1 at
            roots.
        depth: the largest number of nodes on a path, at most `L`; static.
        size: `[B]` integers from 0 to `L`: the number of used slots. None is `L`.

    Returns:
        The tree; unused slots hold token 0.

    Raises:
        TypeError: arrays that are not of integers, or a depth that is not an integer.
        ValueError: shapes that do not match, no slots, a depth below 1 or above `L` or, for concrete
            arrays, a parent that does not come before its child, a longer path, or sizes out of range.

    Source: token trees as in SpecInfer (arXiv 2305.09781).

    Examples:
        >>> import jax.numpy as jnp
        >>> from energy_attn.prefix_tree import tree_from_parents
        >>> tree = tree_from_parents(jnp.array([[5, 7, 8, 9]]), jnp.array([[-1, 0, 0, 2]]), 3)
        >>> tree.depth.tolist(), tree.unpacker[0, 3].tolist()
        ([[0, 1, 1, 2]], [0, 2, 3])
    """
    check_slots("tokens", checks.check_integral("tokens", tokens))
    checks.check_shape("parent", checks.check_integral("parent", parent), tokens.shape)
    check_parents("parent", parent)
    depth, slots = checks.check_integer("depth", depth, least=1), tokens.shape[1]
    if depth > slots:
        raise ValueError(f"depth: wanted at most the {slots} slots of tokens, got {depth}")
    sizes = np.full(len(tokens), slots, np.int32) if size is None else size
    checks.check_shape("size", checks.check_integral("size", sizes), tokens.shape[:1])
    check_range("size", sizes, 0, slots)
    _check_paths(parent, sizes, depth)
    above, used = (jnp.asarray(checks.as_int32(x)) for x in (parent, sizes))
    return tree_from_checked_parents(depth, jnp.asarray(tokens), above, used)


def token_tree(
    choices: Sequence[Sequence[int]],
    root: Integer[Array, " B"],
    candidates: Integer[Array, "B D R"],
) -> PrefixTree:
    r"""The tree of a fixed set of choices among ranked candidates for each position, as in Medusa.

    $$\mathrm{token}(r_0, \dots, r_d) = \mathrm{candidates}_{d, r_d}$$

    Args:
        choices: paths of ranks, `(0,)`, `(1,)`, `(0, 0)` and so on, in any order; they include the
            parent of each. The shape of the tree is static.
        root: `[B]` integers: the tokens at the root, sampled already.
        candidates: `[B, D, R]` integers of the dtype of `root`: the tokens for each of the next `D`
            positions, by rank.

    Returns:
        The tree of `1 + len(choices)` slots, all used: the root, then the choices, shorter ones
        first and those of one length in order of their ranks. If candidates repeat a token, so do
        siblings; the first counts.

    Raises:
        TypeError: choices that are not sequences of integers, or arrays not of integers.
        ValueError: an empty choice, one that is repeated or whose parent is missing, ranks or
            lengths beyond the candidates, or shapes that do not match.

    Source: the tree attention of Medusa (arXiv 2401.10774).

    Examples:
        >>> import jax.numpy as jnp
        >>> from energy_attn.prefix_tree import token_tree
        >>> tree = token_tree([(0,), (1,), (0, 1)], jnp.array([5]), jnp.array([[[7, 8], [3, 4]]]))
        >>> tree.tokens.tolist(), tree.parent.tolist()
        ([[5, 7, 8, 4]], [[-1, 0, 0, 1]])
    """
    checks.check_shape("root", checks.check_integral("root", root), ("B",))
    checks.check_shape(
        "candidates", checks.check_integral("candidates", candidates), (len(root), "D", "R")
    )
    if candidates.dtype != root.dtype:
        raise TypeError(
            f"candidates: wanted the dtype of root, {root.dtype}, got {checks.received(candidates)}"
        )
    paths = _check_choices(choices, *candidates.shape[1:])
    slot = {path: n for n, path in enumerate(paths, start=1)}
    parent = np.array([-1, *(slot.get(path[:-1], 0) for path in paths)], np.int32)
    depth = 1 + max(map(len, paths), default=0)
    ends = np.array([(len(path) - 1, path[-1]) for path in paths], np.int32).reshape(-1, 2)
    chosen = jnp.asarray(candidates)[:, ends[:, 0], ends[:, 1]]
    tokens = jnp.concatenate([jnp.asarray(root)[:, None], chosen], axis=1)
    parent = jnp.broadcast_to(jnp.asarray(parent)[None], tokens.shape)
    size = jnp.full(len(root), tokens.shape[1], jnp.int32)
    return tree_from_checked_parents(depth, tokens, parent, size)


@functools.partial(jax.jit, static_argnums=0)
def tree_from_checked_parents(depth: int, tokens: Array, parent: Array, size: Array) -> PrefixTree:
    slots = tokens.shape[1]
    slot_index = jnp.arange(slots, dtype=jnp.int32)[None]
    used = slot_index < size[:, None]
    # of the type of `parent`, in a shard_map too
    node = jnp.where(used, slot_index + 0 * parent, -1)

    def go_up(node: Array, _: None) -> tuple[Array, Array]:
        return jnp.where(node >= 0, gather_slots(parent, node), -1), node

    # each node, its parent, the parent's parent ...
    _, up = lax.scan(go_up, node, length=depth, unroll=8)
    ancestors_upward = jnp.moveaxis(up, 0, -1)
    count = (ancestors_upward >= 0).sum(-1, dtype=jnp.int32)[:, :, None]
    level = jnp.arange(depth, dtype=jnp.int32)[None, None]
    from_root = jnp.take_along_axis(ancestors_upward, jnp.maximum(count - 1 - level, 0), 2)
    ancestors = jnp.where(level < count, from_root, -1)
    tokens = jnp.where(used, tokens, jnp.zeros((), tokens.dtype))
    return tree_from_ancestors(tokens, ancestors, ancestors, size)


def _check_paths(parent: Array, size: Array | np.ndarray, depth: int) -> None:
    if not (checks.is_concrete(parent) and checks.is_concrete(size)):
        return
    rows = zip(np.asarray(parent).tolist(), np.asarray(size).tolist(), strict=True)
    for row, (above, used) in enumerate(rows):
        nodes: list[int] = []
        for slot, up in enumerate(above[:used]):
            nodes.append(1 if up < 0 else nodes[up] + 1)
            if nodes[-1] > depth:
                raise ValueError(
                    f"parent: wanted paths of at most depth = {depth} nodes, "
                    f"got {nodes[-1]} to slot {slot} of row {row}"
                )


def _check_choices(choices: object, levels: int, ranks: int) -> list[tuple[int, ...]]:
    # in order of length, then of ranks
    if not isinstance(choices, Sequence) or isinstance(choices, str):
        raise TypeError(
            f"choices: wanted a sequence of tuples of ranks, got {checks.received(choices)}"
        )
    paths = []
    for choice in choices:
        if not isinstance(choice, Sequence) or isinstance(choice, str):
            raise TypeError(f"choices: wanted tuples of ranks, got {checks.received(choice)}")
        path = tuple(checks.check_integer("choices", rank) for rank in choice)
        if not 1 <= len(path) <= levels or not all(0 <= rank < ranks for rank in path):
            raise ValueError(
                f"choices: wanted 1 to {levels} ranks below {ranks}, "
                f"the shape of candidates, got {path}"
            )
        paths.append(path)
    distinct = set(paths)
    if len(distinct) < len(paths):
        repeated = next(path for path in paths if paths.count(path) > 1)
        raise ValueError(f"choices: wanted each choice once, got {repeated} twice")
    for path in paths:
        if len(path) > 1 and path[:-1] not in distinct:
            raise ValueError(f"choices: wanted {path[:-1]}, the parent, among them, got {path}")
    return sorted(paths, key=lambda path: (len(path), path))


def grow(tree: PrefixTree, logits: Float[Array, "B L V"], count: int) -> PrefixTree:
    r"""Adds the `count` likeliest nodes to a tree.

    $$\mathrm{score}(n) = \sum_{a \text{ on the path to } n,\ \text{no root}}
      \log P(x_a \mid \mathrm{parent}(a))$$

    Candidates are all tokens under all nodes, except those in the tree already. To draft a tree, begin
    with [`tree_from_parents`][energy_attn.prefix_tree.tree_from_parents] of a root in `L` slots, and
    grow it once for each level.

    Args:
        tree: a tree whose `unpacker` is `[B, L, C]`, as from `tree_from_parents`. Paths have at
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
        >>> from energy_attn.prefix_tree import grow, tree_from_parents
        >>> slots = jnp.zeros((1, 4), int)
        >>> tree = tree_from_parents(slots + 5, slots - 1, 3, jnp.array([1]))
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
