"""A round of speculative decoding: trees that grow, attention of their nodes, and the accepted path appended."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from energy_attn.distributed import KVCache
from energy_attn.distributed.internal import (
    ShardingPlan,
    attend_sharded,
    check_reach,
    check_stored,
    reshard_explicit,
    sharding_plan,
)
from energy_attn.kernels import AttentionState, merge
from energy_attn.kernels.internal import (
    CallPolicy,
    Candidate,
    Scales,
    arguments,
    call_policy,
    checks,
    lse_dtype,
)
from energy_attn.kernels.scores import AbstractScore

from ..functional._citation import cite
from ._accept import Accepted
from ._tree import (
    PrefixTree,
    check_logits,
    check_tree,
    gather_slots,
    tree_from_checked_parents,
)


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
    # [B, L, V]: the score of each token under each node; -inf if it cannot be added
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


def tree_decode(
    query: Float[Array, "B L N H"],
    key: Float[Array, "B L K H"],
    value: Float[Array, "B L K Hv"],
    *,
    tree: PrefixTree,
    cache: KVCache,
    source: Float[Array, "B L N Hv"] | None = None,
    sink: Float[Array, "..."] | None = None,
    scale: float | Float[Array, ""] | Float[Array, " N"] | None = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    score: AbstractScore | None = None,
    implementation: Candidate | Sequence[Candidate] | None = None,
) -> AttentionState:
    r"""The attention of a tree's nodes over the cache and over their own ancestors.

    $$F_n(\zeta) = \log \Big( \sum_{a \in \text{cache}} e^{s_{na} + \zeta_n \cdot v_a}
      + \sum_{a \preceq n} e^{s_{na} + \zeta_n \cdot v_a} \Big), \qquad
      s_{na} = \mathrm{scale}\; q_n \cdot k_a$$

    where $a \preceq n$ are the node itself and its ancestors. Every node sees the whole context, so
    that part is computed as by `cache.attend`, with the same collectives. The tree's part is one more
    state, of `L` × `L` scores on each device. The cache is unchanged;
    [`commit`][energy_attn.prefix_tree.commit] appends to it.

    A node's position is `cache.lengths + tree.depth`. Differentiable in query, key, value, source, and in the cache.

    Args:
        query: `[B, L, N, H]` of the nodes, in the cache's `dtype`; `K` divides `N`.
        key: `[B, L, K, H]` of the nodes, not yet in the cache.
        value: `[B, L, K, Hv]`.
        tree: of `B` rows and `L` slots.
        cache: the context. Rows may have different lengths, and may be empty.
        source: the source $\zeta$, `[B, L, N, Hv]`; None is zero.
        sink: $b$, `[N]` or `[B, N]`: the score of one more outcome of each node, whose value is zero;
            None: there is none.
        scale: the factor of $q \cdot k$, a number, a scalar array or `[N]`; None is $1/\sqrt{H}$.
        local_window_size: `(left, right)` or one int: a node sees at most `left` positions before
            its own, in the context and among its ancestors. None is the cache's window, if any.
        score: a [score][energy_attn.kernels.scores.AbstractScore] of the scaled product, for context
            and nodes.
        implementation: a name of [`implementations`][energy_attn.kernels.implementations], for the
            context. The tree's part uses it as well, or `"blockwise"` if it does not take masks.

    Returns:
        `out` `[B, L, N, Hv]` in the cache's `dtype`, and the energies `lse` `[B, L, N]` in float32
        (float64). Unused slots attend only to themselves: their results are finite and meaningless.

    Raises:
        TypeError: an argument is not an array, a tree or a cache, or has the wrong dtype.
        ValueError: shapes that do not fit the tree or the cache, a window wider than the cache's,
            or the mesh, as for the cache's `append`.
        NotImplementedError: the named implementation declines the context.

    Source: tree attention in the sense of SpecInfer (arXiv 2305.09781), combined with Tree
    Attention (arXiv 2408.04093), Algorithm 3, by merging states.

    Examples:
        >>> import jax.numpy as jnp
        >>> from energy_attn.distributed import KVCache
        >>> from energy_attn.prefix_tree import PrefixTree, tree_decode
        >>> tree = PrefixTree.from_beam(jnp.array([[[5, 7], [5, 8]]]), capacity=3)
        >>> cache = KVCache.empty(1, 16, 2, 8, dtype=jnp.float32, block_size=16)
        >>> cache = cache.append(jnp.zeros((1, 6, 2, 8)), jnp.ones((1, 6, 2, 8)))
        >>> q, k = jnp.ones((1, 3, 4, 8)), jnp.zeros((1, 3, 2, 8))
        >>> state = tree_decode(q, k, k, tree=tree, cache=cache)
        >>> jnp.exp(state.lse[0, :, 0]).round().tolist()  # six tokens, and the ancestors
        [7.0, 8.0, 8.0]
    """
    cite("specinfer")
    _check_cache(cache)
    checks.check_shape("tree.tokens", check_tree("tree", tree).tokens, (len(cache.lengths), "L"))
    batch, slots = tree.tokens.shape
    cache._check_new(key, value, slots)
    check_stored("query", query, cache.dtype)
    checks.check_shape("query", query, (batch, slots, "N", cache.key.shape[-1]))
    policy = call_policy(implementation)
    reach = check_reach(local_window_size, cache.window)
    plan = sharding_plan(cache.parallel, query, cache.key, cache.value)
    if plan is not None:
        # on explicit mesh axes rows and heads stay sharded, and each device has all slots of a tree
        spec = PartitionSpec(plan.batch or None, None, plan.heads or None)
        nodes = query, key, value, source
        query, key, value, source = reshard_explicit(plan.mesh, plan.axes, nodes, spec)

    used = jnp.arange(slots, dtype=jnp.int32)[None] < tree.size[:, None]
    mask = tree.mask
    if reach is not None and reach[0] is not None:
        mask = mask & (tree.depth[:, :, None] - tree.depth[:, None, :] <= reach[0])
    positions = cache.lengths[:, None] + tree.depth
    scored: Any = {"source": source, "scale": scale, "score": score}
    reads: Any = {"query_positions": jnp.where(used, positions, -1), "sink": sink}
    context = _context_state(policy, cache, query, local_window_size=reach, **reads, **scored)
    nodes = _node_state(plan, policy, query, key, value, mask, positions, **scored)
    out, lse = merge(context, nodes)
    return AttentionState(out.astype(cache.dtype), lse)


# The context precedes all nodes, so that no causal mask is needed.
def _context_state(
    policy: CallPolicy, cache: KVCache, query: Array, **options: Any
) -> AttentionState:
    scales = Scales(cache.key_scale, cache.value_scale)
    options |= {"scales": scales, "key_positions": cache.positions}
    call = arguments.check_call(query, cache.key, cache.value, **options)
    plan = sharding_plan(cache.parallel, query, cache.key, cache.value)
    return _partial_state(plan, policy, call)


def _node_state(
    plan: ShardingPlan | None,
    policy: CallPolicy,
    query: Array,
    key: Array,
    value: Array,
    mask: Array,
    positions: Array,
    **options: Any,
) -> AttentionState:
    if options["score"] is not None:  # the mask replaces positions, which only a score reads
        options |= {"query_positions": positions, "key_positions": positions}
    call = arguments.check_call(query, key, value, mask=mask[:, None], **options)
    if plan is not None:  # each device has all nodes
        plan = plan._replace(sequence=(), queries=False) if plan.batch + plan.heads else None
    return _partial_state(plan, CallPolicy((*policy.kernels, "blockwise")), call)


def _partial_state(
    plan: ShardingPlan | None, policy: CallPolicy, call: arguments.CheckedCall
) -> AttentionState:
    return attend_sharded(plan, policy, call.settings.needing(unrounded=True), call.operands)


def commit(
    cache: KVCache,
    accepted: Accepted,
    key: Float[Array, "B L K H"],
    value: Float[Array, "B L K Hv"],
) -> KVCache:
    r"""Appends the keys and values of each row's accepted path to the cache.

    `key[b, path[b, i]]` for $i <$ `length[b]` are appended to row $b$. Nothing is communicated.

    Args:
        cache: the cache that was passed to [`tree_decode`][energy_attn.prefix_tree.tree_decode].
        accepted: the result of [`verify`][energy_attn.prefix_tree.verify]; rows may accept none.
        key: `[B, L, K, H]` of the nodes, in the cache's `dtype`.
        value: `[B, L, K, Hv]`.

    Returns:
        The new cache. Donate the old one to `jax.jit` (`donate_argnums=`) to update it in place.

    Raises:
        TypeError: an argument is not an array, a cache or an `Accepted`, or has the wrong dtype.
        ValueError: shapes that do not fit the cache or each other; paths that are longer than the
            cache has room for in addition to its window.
        RuntimeError: as for the cache's `append`, a row has no room for its path.

    Source: the cache update of SpecInfer (arXiv 2305.09781).

    Examples:
        >>> import jax.numpy as jnp
        >>> from energy_attn.distributed import KVCache
        >>> from energy_attn.prefix_tree import Accepted, commit
        >>> cache = KVCache.empty(2, 16, 2, 8, dtype=jnp.float32, block_size=16)
        >>> key = jnp.ones((2, 5, 2, 8))  # of five nodes
        >>> path = jnp.array([[0, 2, 4], [0, -1, -1]], jnp.int32)
        >>> accepted = Accepted(path, jnp.array([3, 1], jnp.int32), jnp.array([6, 7], jnp.int32))
        >>> commit(cache, accepted, key, key).lengths.tolist()
        [3, 1]
    """
    _check_cache(cache)
    if not isinstance(accepted, Accepted):
        raise TypeError(f"accepted: wanted an Accepted, got {checks.received(accepted)}")
    rows = len(cache.lengths)
    checks.check_shape(
        "accepted.path", checks.check_integral("accepted.path", accepted.path), (rows, "C")
    )
    checks.check_shape(
        "accepted.length", checks.check_integral("accepted.length", accepted.length), (rows,)
    )
    cache._check_new(key, value, "L")

    return cache.append(*gather_path(cache, accepted.path, key, value), lengths=accepted.length)


def gather_path(cache: KVCache, path: Array, key: Array, value: Array) -> tuple[Array, Array]:
    """Keys and values of the slots of `path` `[B, C]`, zeros for -1, sharded as for `cache.append`."""

    def taken(key: Array, value: Array, path: Array) -> tuple[Array, Array]:
        return gather_slots(key, path), gather_slots(value, path)

    arrays, sharding = map(jnp.asarray, (key, value, path)), cache._sharding()
    in_specs = sharding.new, sharding.new, sharding.rows
    return sharding.map(taken, in_specs, sharding.new, *arrays)


def _check_cache(cache: object) -> None:
    if not isinstance(cache, KVCache):
        raise TypeError(f"cache: wanted a KVCache, got {checks.received(cache)}")
