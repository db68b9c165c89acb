"""Acceptance of a path of a prefix tree: greedy, or exactly with the model's distribution of tokens."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from energy_attn.kernels.internal import checks, lse_dtype

from ._tree import PrefixTree, check_logits


def process_logits(
    logits: Array,
    temperature: float | Array,
    top_k: int | None,
    top_p: float | Array | None,
    min_p: float | Array | None = None,
) -> Array:
    r"""Logits `[..., V]` whose softmax is the sampling distribution; minus infinity for excluded tokens.

    $$\ell \mapsto (\ell - \max \ell) / T$$

    Then the `top_k` largest are kept, of these the fewest whose probability reaches `top_p`, at least one,
    and of these those that are at least `min_p` times as likely as the likeliest. Ties go to the lower token,
    so that exactly that many are kept. The result is in float32 or wider. A row of minus infinities is
    unchanged; NaN is never excluded. The settings must have passed `check_sampling`.
    """
    dtype = lse_dtype(logits.dtype)
    logits = logits.astype(dtype)
    # Relative to the largest, and with a temperature that is not flushed to zero: a small one gives
    # minus infinity for the others, and no NaN.
    largest = logits.max(-1, keepdims=True)
    largest = jnp.where(jnp.isfinite(largest), largest, 0)
    temperature = jnp.maximum(jnp.asarray(temperature, dtype), jnp.finfo(dtype).tiny)
    scaled = (logits - largest) / temperature
    # the logit of the likeliest token is 0
    least = None if min_p is None else jnp.log(jnp.asarray(min_p, dtype))
    count = scaled.shape[-1] if top_k is None else min(top_k, scaled.shape[-1])
    if count == scaled.shape[-1] and top_p is None:
        return scaled if least is None else jnp.where(scaled < least, -jnp.inf, scaled)
    scaled = jnp.where(scaled == 0, 0, scaled)  # sorting distinguishes -0 from 0
    values, tokens = lax.top_k(scaled, count)  # ties in order of their tokens
    last = jnp.full((*scaled.shape[:-1], 1), count - 1, jnp.int32)
    if top_p is not None:
        top_p = jnp.asarray(top_p, dtype)
        reached = jnp.cumsum(jax.nn.softmax(values, -1), -1)
        below = (reached < top_p).sum(-1, keepdims=True, dtype=jnp.int32)
        # the sum may round up to 1 before the last token
        last = jnp.where(top_p < 1, jnp.minimum(below, last), last)
    value, token = (jnp.take_along_axis(x, last, -1) for x in (values, tokens))
    token_index = lax.broadcasted_iota(jnp.int32, scaled.shape, scaled.ndim - 1)
    excluded = (scaled < value) | ((scaled == value) & (token_index > token))
    if least is not None:
        excluded |= scaled < least
    return jnp.where(excluded, -jnp.inf, scaled)


@functools.partial(jax.jit, static_argnames="top_k")
def sample_tokens(
    key: Array,
    logits: Array,
    temperature: float | Array,
    top_k: int | None,
    top_p: float | Array | None,
) -> Array:
    processed = process_logits(logits, temperature, top_k, top_p)
    return jax.random.categorical(key, processed, axis=-1).astype(jnp.int32)


def check_sampling(
    temperature: object, top_k: object, top_p: object
) -> tuple[Any, int | None, Any]:
    """Returns the settings of `process_logits`: Python numbers, scalar arrays, or None for all tokens."""
    temperature = checks.check_positive("temperature", temperature)
    top_k = None if top_k is None else checks.check_integer("top_k", top_k, least=1)
    top_p = None if top_p is None else checks.check_positive("top_p", top_p, 1)
    is_all = isinstance(top_p, float) and top_p == 1  # avoids a sort
    return temperature, top_k, None if is_all else top_p


class Accepted(NamedTuple):
    """The accepted path of a tree, and the model's token after it.

    Attributes:
        path: `[B, C]` int32, the slots of the accepted nodes, root first; -1 after the end.
        length: `[B]` int32, the number of nodes on the path.
        token: `[B]` int32, the next token, which the model chose after the path and which is not
            in the tree; -1 if it is unknown: for an empty tree without `context_logits`.

    Source: speculative decoding, Leviathan et al. (arXiv 2211.17192), over token trees as in
    SpecInfer (arXiv 2305.09781).

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from energy_attn.prefix_tree import PrefixTree, accept_greedy
        >>> tree = PrefixTree.from_beam(jnp.array([[[5, 1, 2], [5, 3, 4]]]))
        >>> chosen = jnp.array([[3, 0, 0, 4, 9, 0]])  # after each node, in order of slots
        >>> accepted = accept_greedy(tree, jax.nn.one_hot(chosen, 10))
        >>> accepted.path.tolist(), accepted.length.tolist(), accepted.token.tolist()
        ([[0, 3, 4]], [3], [9])
    """

    path: Int[Array, "B C"]
    length: Int[Array, " B"]
    token: Int[Array, " B"]


def accept_greedy(
    tree: PrefixTree,
    logits: Float[Array, "B L V"],
    *,
    context_logits: Float[Array, "B V"] | None = None,
) -> Accepted:
    r"""The longest path on which each token is the model's most likely one.

    $$x_n = \arg\max_v \ell_{\mathrm{parent}(n), v} \quad \text{for each node of the path but a root}$$

    The path's tokens and the next token are those of greedy decoding, token for token.

    Args:
        tree: the drafted candidates.
        logits: `[B, L, V]`, floating: the model's after each node; those of unused slots are not
            read.
        context_logits: `[B, V]`: the model's after the context, which roots must match. None: roots
            count as sampled already; of several roots, the one of the longest path is taken.

    Returns:
        Path, length and next token. Ties go to the path of the smallest slot, which is the first
        candidate row, and to the smallest token. With `context_logits` the length may be 0. NaN
        counts as the largest, as in `jnp.argmax`.

    Raises:
        TypeError: `tree` is not a `PrefixTree`, or logits are not a floating array.
        ValueError: logits of another shape, or an invalid tree.

    Source: the greedy verification of token trees in SpecInfer (arXiv 2305.09781).

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from energy_attn.prefix_tree import PrefixTree, accept_greedy
        >>> tree = PrefixTree.from_beam(jnp.array([[[5, 1, 2], [5, 3, 4]]]))
        >>> accepted = accept_greedy(tree, jax.nn.one_hot(jnp.full((1, 6), 7), 10))
        >>> accepted.length.tolist(), accepted.token.tolist()  # the root, and the token after it
        ([1], [7])
    """
    check_logits(tree, logits, context_logits)
    context = None if context_logits is None else _largest(context_logits)
    return longest_chosen_path(tree, _largest(logits), context)


def accept_sampling(
    tree: PrefixTree,
    logits: Float[Array, "B L V"],
    key: PRNGKeyArray,
    temperature: float | Float[Array, ""] = 1.0,
    top_k: int | None = None,
    top_p: float | Float[Array, ""] | None = None,
    *,
    context_logits: Float[Array, "B V"] | None = None,
) -> Accepted:
    r"""A path whose tokens, and the next one, have exactly the distribution of the model's sampling.

    $$y_n \sim P(\cdot \mid n), \qquad n \to \text{the child that holds } y_n, \text{ else emit } y_n$$

    One token is drawn for each node from its logits, after temperature, `top_k` and `top_p` (in this
    order), and the path descends while a child holds the drawn token. So every token is a draw from the
    target distribution; the candidates decide only how many tokens a call yields.

    Args:
        tree: the drafted candidates.
        logits: as in [`accept_greedy`][energy_attn.prefix_tree.accept_greedy], with its result and errors.
        key: a `jax.random.key`.
        temperature: above 0; may be traced.
        top_k: how many of the likeliest tokens to keep, static; None or above `V` keeps all.
        top_p: keep the fewest of the likeliest tokens that have this probability; in (0, 1], may
            be traced. None keeps all.
        context_logits: `[B, V]`: the model's after the context, from which the root is drawn. None:
            slot 0 counts as sampled already, and other roots are ignored (to choose the root with
            the longest path would change the distribution).

    Returns:
        Path, length and next token. With `context_logits` the length may be 0.

    Raises:
        TypeError: `key` is not a key, or a setting not a number.
        ValueError: a setting out of range.

    Source: speculative sampling, Leviathan et al. (arXiv 2211.17192), with the drafts of a tree as
    fixed proposals.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from energy_attn.prefix_tree import PrefixTree, accept_sampling
        >>> tree = PrefixTree.from_beam(jnp.array([[[5, 1, 2], [5, 3, 4]]]))
        >>> logits = jax.nn.one_hot(jnp.array([[3, 0, 0, 4, 9, 0]]), 10)
        >>> accept_sampling(tree, logits, jax.random.key(0), top_k=1).path.tolist()
        [[0, 3, 4]]
    """
    check_logits(tree, logits, context_logits)
    checks.check_key("key", key)
    temperature, top_k, top_p = check_sampling(temperature, top_k, top_p)
    context_key, node_key = jax.random.split(key)
    choice = sample_tokens(node_key, jnp.asarray(logits), temperature, top_k, top_p)
    if context_logits is None:
        context = jnp.where(tree.size > 0, checks.as_int32(tree.tokens[:, 0]), -1)
    else:
        context = sample_tokens(context_key, jnp.asarray(context_logits), temperature, top_k, top_p)
    return longest_chosen_path(tree, choice, context)


def verify(
    tree: PrefixTree,
    logits: Float[Array, "B L V"],
    key: PRNGKeyArray | None = None,
    *,
    temperature: float | Float[Array, ""] = 0.0,
    top_k: int | None = None,
    top_p: float | Float[Array, ""] | None = None,
    context_logits: Float[Array, "B V"] | None = None,
) -> Accepted:
    """[`accept_greedy`][energy_attn.prefix_tree.accept_greedy] at temperature 0, else
    [`accept_sampling`][energy_attn.prefix_tree.accept_sampling], with their arguments, results and errors.

    Args:
        key: a `jax.random.key`; not needed at temperature 0, where `top_k` and `top_p` are unused.
        temperature: a number; or an array, which is above 0.

    Raises:
        TypeError: a missing key.

    Source: the verification of token trees in SpecInfer (arXiv 2305.09781).

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from energy_attn.prefix_tree import PrefixTree, verify
        >>> tree = PrefixTree.from_beam(jnp.array([[[5, 1, 2], [5, 3, 4]]]))
        >>> verify(tree, jax.nn.one_hot(jnp.array([[3, 0, 0, 4, 9, 0]]), 10)).token.tolist()
        [9]
    """
    if isinstance(temperature, (int, float, np.number)) and temperature == 0:
        return accept_greedy(tree, logits, context_logits=context_logits)
    if key is None:
        raise TypeError(f"key: wanted a jax.random.key at temperature {temperature}, got None")
    return accept_sampling(
        tree, logits, key, temperature, top_k, top_p, context_logits=context_logits
    )


@jax.jit
def longest_chosen_path(tree: PrefixTree, choice: Array, context_choice: Array | None) -> Accepted:
    """The longest path whose tokens were all chosen: `choice` `[B, L]` int32 after each node.

    `context_choice` `[B]` int32 is the choice after the context; with None every root was chosen.
    Of siblings with equal tokens the first counts.
    """
    slots, levels = tree.tokens.shape[1], tree.unpacker.shape[2]
    slot_index, level = (jnp.arange(n, dtype=jnp.int32)[None] for n in (slots, levels))
    used, tokens = slot_index < tree.size[:, None], checks.as_int32(tree.tokens)
    same_edge = tree.tokens[:, :, None] == tree.tokens[:, None]
    same_edge &= tree.parent[:, :, None] == tree.parent[:, None]
    is_first = ~(same_edge & (slot_index[:, None] < slot_index[..., None])).any(-1)
    is_root = tree.parent < 0
    chosen = jnp.take_along_axis(choice, jnp.where(is_root, 0, tree.parent), 1)
    roots = tokens if context_choice is None else context_choice[:, None]
    chosen = jnp.where(is_root, roots, chosen)
    matched = used & is_first & (chosen == tokens)
    # a node is reached if it and all of its ancestors match
    reached = matched & ~(tree.mask & ~matched[:, None]).any(-1)
    nodes = jnp.where(reached, tree.depth + 1, 0)
    end = lax.argmax(nodes, 1, jnp.int32)  # the smallest slot of those with the longest path
    length = nodes.max(1)
    ancestors = jnp.take_along_axis(tree.mask, end[:, None, None], 1) & (length > 0)[:, None, None]
    on_level = ancestors & (tree.depth[:, None] == level[..., None])
    path = jnp.where(on_level, slot_index[:, None], -1).max(-1)
    next_token = jnp.take_along_axis(choice, end[:, None], 1)[:, 0]
    fallback = jnp.asarray(-1, jnp.int32) if context_choice is None else context_choice
    return Accepted(path, length, jnp.where(length > 0, next_token, fallback))


def _largest(logits: Array) -> Array:
    logits = jnp.asarray(logits)
    return lax.argmax(logits, logits.ndim - 1, jnp.int32)
