"""The prefix tree: candidate continuations with shared prefixes stored once."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Integer, Shaped

from energy_attn.kernels.internal import (
    check_array,
    check_boolean,
    check_floating,
    check_integral,
    check_shape,
    is_concrete,
    received,
)


class PrefixTree(NamedTuple):
    r"""Drafted candidates as a tree whose nodes are distinct prefixes, in a fixed number of slots.

    A node sees the context and its ancestors, so one pass of a model over the nodes verifies all
    candidates and reads a shared prefix once.

    A parent's slot comes before its children's. Slots from `size` on are unused: they hold the pad
    token, depth 0 and parent -1, and attend only to themselves.

    Attributes:
        tokens: `[B, L]`, the token of each node.
        mask: `[B, L, L]`, True where the node of the row attends to that of the column: to itself
            and its ancestors.
        depth: `[B, L]` int32, the number of ancestors: a node's position is the length of the
            context plus its depth.
        parent: `[B, L]` int32, the parent's slot; -1 at roots.
        unpacker: `[B, M, C]` int32, the slot of each entry of each candidate; -1 for entries that
            do not exist or exceed the capacity.
        size: `[B]` int32, the number of used slots.

    Source: the prefix tree of speculative decoding, as in SpecInfer (arXiv 2305.09781) and Medusa
    (arXiv 2401.10774).

    Examples:
        >>> import jax.numpy as jnp
        >>> from energy_attn.prefix_tree import pack
        >>> tree = pack(jnp.array([[[5, 7, 7], [5, 7, 8]]]))
        >>> tree.tokens.tolist(), tree.depth.tolist(), tree.size.tolist()
        ([[5, 7, 7, 8, 0, 0]], [[0, 1, 2, 2, 0, 0]], [4])
    """

    tokens: Integer[Array, "B L"]
    mask: Bool[Array, "B L L"]
    depth: Int[Array, "B L"]
    parent: Int[Array, "B L"]
    unpacker: Int[Array, "B M C"]
    size: Int[Array, " B"]


def tree_from_ancestors(
    tokens: Array, ancestors: Array, unpacker: Array, size: Array
) -> PrefixTree:
    """The tree whose node `n` has the ancestors `ancestors[:, n]`, root first and itself last.

    `ancestors` is `[B, L, C]`, padded with -1; only the first `size` slots are read.
    """
    slots = ancestors.shape[1]
    slot_index = jnp.arange(slots, dtype=jnp.int32)[None]
    used = slot_index < size[:, None]
    ancestors = jnp.where(used[:, :, None], ancestors, -1)
    count = (ancestors >= 0).sum(-1, dtype=jnp.int32)
    is_ancestor = (ancestors[:, :, None] == slot_index[:, None, :, None]).any(-1)
    mask = is_ancestor | jnp.eye(slots, dtype=bool)[None]
    depth = jnp.maximum(count - 1, 0)
    above = jnp.take_along_axis(ancestors, jnp.maximum(count - 2, 0)[:, :, None], axis=2)[:, :, 0]
    parent = jnp.where(count > 1, above, -1)
    return PrefixTree(tokens, mask, depth, parent, unpacker, size)


def unpack(x: Shaped[Array, "B L ..."], tree: PrefixTree) -> Shaped[Array, "B M C ..."]:
    r"""Rearranges an array over nodes into one over candidates: `x[b, unpacker[b, m, c]]`.

    `unpack(tree.tokens, tree)` is the beam that was packed.

    Args:
        x: `[B, L, ...]` of any dtype, for each node: logits, hidden states, energies.
        tree: the tree.

    Returns:
        `[B, M, C, ...]`; zeros for entries without a node.

    Raises:
        TypeError: `x` is not an array, or `tree` not a `PrefixTree`.
        ValueError: `x` does not have the tree's batch and slots, or the tree is invalid.

    Examples:
        >>> import jax.numpy as jnp
        >>> from energy_attn.prefix_tree import pack, unpack
        >>> beam = jnp.array([[[5, 7, 7], [5, 7, 8]]])
        >>> bool((unpack((tree := pack(beam)).tokens, tree) == beam).all())
        True
    """
    check_tree("tree", tree)
    x = check_array("x", x)
    check_shape("x", x, (*tree.tokens.shape, *x.shape[2:]))
    return gather_slots(x, tree.unpacker)


def gather_slots(x: Array, slots: Array) -> Array:
    """`x[b, slots[b, ...]]` for `x` `[B, L, ...]`; zeros where a slot is -1."""
    rows = jnp.arange(len(x), dtype=jnp.int32).reshape(-1, *[1] * (slots.ndim - 1))
    exists = slots >= 0
    values = x[rows, jnp.where(exists, slots, 0)]
    exists = exists.reshape(*exists.shape, *[1] * (values.ndim - exists.ndim))
    return jnp.where(exists, values, jnp.zeros((), x.dtype))


def check_tree(name: str, tree: object) -> PrefixTree:
    """Returns `tree`, a `PrefixTree` of arrays that fit together."""
    if not isinstance(tree, PrefixTree):
        raise TypeError(f"{name}: wanted a PrefixTree, got {received(tree)}")
    for field in ("tokens", "depth", "parent", "unpacker", "size"):
        check_integral(f"{name}.{field}", getattr(tree, field))
    check_slots(f"{name}.tokens", tree.tokens)
    batch, slots = tree.tokens.shape
    check_shape(f"{name}.mask", check_boolean(f"{name}.mask", tree.mask), (batch, slots, slots))
    check_shape(f"{name}.depth", tree.depth, (batch, slots))
    check_shape(f"{name}.parent", tree.parent, (batch, slots))
    check_shape(f"{name}.unpacker", tree.unpacker, (batch, "M", "C"))
    check_shape(f"{name}.size", tree.size, (batch,))
    check_parents(f"{name}.parent", tree.parent)
    check_range(f"{name}.size", tree.size, 0, slots)
    check_range(f"{name}.unpacker", tree.unpacker, -1, slots - 1)
    return tree


def check_logits(tree: PrefixTree, logits: Array) -> int:
    """Returns the vocabulary size of floating `logits` `[B, L, V]` of the nodes of `tree`."""
    check_tree("tree", tree)
    check_shape("logits", check_floating("logits", logits), (*tree.tokens.shape, "V"))
    if logits.shape[2] == 0:
        raise ValueError(f"logits: wanted a vocabulary of at least 1 token, got {received(logits)}")
    return logits.shape[2]


def check_slots(name: str, tokens: Array) -> None:
    check_shape(name, tokens, ("B", "L"))
    if tokens.shape[1] == 0:
        raise ValueError(f"{name}: wanted at least 1 slot, got {received(tokens)}")


def check_parents(name: str, parent: Array) -> None:
    """Raises `ValueError` if the array is concrete and a parent does not come before its child."""
    if not is_concrete(parent):
        return
    slots = np.asarray(parent)
    wrong = np.argwhere((slots < -1) | (slots >= np.arange(slots.shape[1])))
    if len(wrong):
        row, slot = wrong[0].tolist()
        raise ValueError(
            f"{name}: wanted -1 or a slot before the child's, got {slots[row, slot]} "
            f"for slot {slot} of row {row}"
        )


def check_range(name: str, x: Array | np.ndarray, least: int, most: int) -> None:
    """Raises `ValueError` if the array is concrete and one of its integers is out of range."""
    if not is_concrete(x):
        return
    values = np.asarray(x)
    invalid = np.argwhere((values < least) | (values > most))
    if len(invalid):
        index = tuple(invalid[0].tolist())
        raise ValueError(
            f"{name}: wanted integers from {least} to {most}, got {values[index]} at {list(index)}"
        )
