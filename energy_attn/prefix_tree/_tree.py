"""The prefix tree: candidate continuations whose shared prefixes are stored once."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int, Integer, Shaped

from energy_attn.kernels.internal import checks

from ._checks import (
    check_beam,
    check_choices,
    check_parents,
    check_paths,
    check_range,
    check_slots,
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
        >>> from energy_attn.prefix_tree import PrefixTree
        >>> tree = PrefixTree.from_beam(jnp.array([[[5, 7, 7], [5, 7, 8]]]))
        >>> tree.tokens.tolist(), tree.depth.tolist(), tree.size.tolist()
        ([[5, 7, 7, 8, 0, 0]], [[0, 1, 2, 2, 0, 0]], [4])
    """

    tokens: Integer[Array, "B L"]
    mask: Bool[Array, "B L L"]
    depth: Int[Array, "B L"]
    parent: Int[Array, "B L"]
    unpacker: Int[Array, "B M C"]
    size: Int[Array, " B"]

    @classmethod
    def from_beam(
        cls,
        beam: Integer[Array, "B M C"],
        *,
        capacity: int | None = None,
        lengths: Integer[Array, "B M"] | None = None,
        pad_token: int = 0,
    ) -> "PrefixTree":
        r"""Packs a beam of candidates into a prefix tree: each distinct prefix once.

        $$\mathrm{owner}_{mc} = \min\{j : x_{j,0..c} = x_{m,0..c}\}$$

        The entry $(m, c)$ is a new node if it is its own owner, and else the node of its owner. Slots are
        numbered by first occurrence, row after row, so that a parent precedes its children and any
        capacity cuts off whole branches. Different first tokens make several roots. The cost is of the order
        of `B M² C` and of the mask's size.

        Args:
            beam: `[B, M, C]` integers of any dtype: `M` candidates of `C` tokens.
            capacity: the number of slots `L`, static; None is `M C`, which holds every tree.
            lengths: `[B, M]` integers from 0 to `C`: the number of tokens of each candidate. None is
                `C`.
            pad_token: the token of unused slots.

        Returns:
            The tree, with `beam`'s dtype in `tokens`. If `capacity` is too small, it is the tree of the
            first slots, and the entries cut off have -1 in `unpacker`.

        Raises:
            TypeError: `beam` or `lengths` is not an array of integers, `capacity` or `pad_token` not an
                integer.
            ValueError: a beam of another rank, without candidates or tokens, or with more entries than
                int32 can number; a capacity below 1; concrete lengths out of range; a pad token that
                the beam's dtype cannot represent.

        Source: token trees as in SpecInfer (arXiv 2305.09781).

        Examples:
            >>> import jax.numpy as jnp
            >>> from energy_attn.prefix_tree import PrefixTree
            >>> words = "Mars is a red", "Mars is reddish when", "Mars is dark red"
            >>> names = ["Mars", "is", "a", "red", "reddish", "when", "dark"]
            >>> beam = jnp.array([[[names.index(word) for word in row.split()] for row in words]])
            >>> tree = PrefixTree.from_beam(beam)
            >>> " ".join(names[token] for token in tree.tokens[0, : tree.size[0]])
            'Mars is a red reddish when dark red'
            >>> tree.unpacker[0].tolist()
            [[0, 1, 2, 3], [0, 1, 4, 5], [0, 1, 6, 7]]
        """
        beam, lengths = check_beam(beam, lengths)
        entries = beam.shape[1] * beam.shape[2]
        slots = entries if capacity is None else checks.check_integer("capacity", capacity, least=1)
        pad = checks.check_integer("pad_token", pad_token, is_wide=True)
        limits = jnp.iinfo(beam.dtype)
        if not limits.min <= pad <= limits.max:
            raise ValueError(f"pad_token: wanted a value of {beam.dtype}, beam's dtype, got {pad}")

        return _packed(slots, beam, lengths, jnp.asarray(pad, beam.dtype))

    @classmethod
    def from_parents(
        cls,
        tokens: Integer[Array, "B L"],
        parent: Integer[Array, "B L"],
        depth: int,
        size: Integer[Array, " B"] | None = None,
    ) -> "PrefixTree":
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
            >>> from energy_attn.prefix_tree import PrefixTree
            >>> tree = PrefixTree.from_parents(jnp.array([[5, 7, 8, 9]]), jnp.array([[-1, 0, 0, 2]]), 3)
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
        check_paths(parent, sizes, depth)
        parents, used = (jnp.asarray(checks.as_int32(x)) for x in (parent, sizes))
        return tree_from_checked_parents(depth, jnp.asarray(tokens), parents, used)

    @classmethod
    def from_choices(
        cls,
        choices: Sequence[Sequence[int]],
        root: Integer[Array, " B"],
        candidates: Integer[Array, "B D R"],
    ) -> "PrefixTree":
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
            >>> from energy_attn.prefix_tree import PrefixTree
            >>> tree = PrefixTree.from_choices([(0,), (1,), (0, 1)], jnp.array([5]), jnp.array([[[7, 8], [3, 4]]]))
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
        paths = check_choices(choices, *candidates.shape[1:])
        slot = {path: n for n, path in enumerate(paths, start=1)}
        parent = np.array([-1, *(slot.get(path[:-1], 0) for path in paths)], np.int32)
        depth = 1 + max(map(len, paths), default=0)
        ends = np.array([(len(path) - 1, path[-1]) for path in paths], np.int32).reshape(-1, 2)
        chosen = jnp.asarray(candidates)[:, ends[:, 0], ends[:, 1]]
        tokens = jnp.concatenate([jnp.asarray(root)[:, None], chosen], axis=1)
        parent = jnp.broadcast_to(jnp.asarray(parent)[None], tokens.shape)
        size = jnp.full(len(root), tokens.shape[1], jnp.int32)
        return tree_from_checked_parents(depth, tokens, parent, size)

    def unpack(self, x: Shaped[Array, "B L ..."]) -> Shaped[Array, "B M C ..."]:
        r"""Rearranges an array over nodes into one over candidates: `x[b, unpacker[b, m, c]]`.

        `tree.unpack(tree.tokens)` is the beam that the tree was made from.

        Args:
            x: `[B, L, ...]` of any dtype, for each node: logits, hidden states, energies.

        Returns:
            `[B, M, C, ...]`; zeros for entries without a node.

        Raises:
            TypeError: `x` is not an array.
            ValueError: `x` does not have the tree's batch and slots, or the tree is invalid.

        Examples:
            >>> import jax.numpy as jnp
            >>> from energy_attn.prefix_tree import PrefixTree
            >>> beam = jnp.array([[[5, 7, 7], [5, 7, 8]]])
            >>> tree = PrefixTree.from_beam(beam)
            >>> bool((tree.unpack(tree.tokens) == beam).all())
            True
        """
        check_tree("tree", self)
        x = checks.check_array("x", x)
        checks.check_shape("x", x, (*self.tokens.shape, *x.shape[2:]))
        return gather_slots(x, self.unpacker)


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
    parent = jnp.take_along_axis(ancestors, jnp.maximum(count - 2, 0)[:, :, None], axis=2)[:, :, 0]
    parent = jnp.where(count > 1, parent, -1)
    return PrefixTree(tokens, mask, depth, parent, unpacker, size)


@functools.partial(jax.jit, static_argnums=0)
def _packed(slots: int, beam: Array, lengths: Array, pad: Array) -> PrefixTree:
    batch, rows, levels = beam.shape
    row = jnp.arange(rows, dtype=jnp.int32)[None, :, None]
    level = jnp.arange(levels, dtype=jnp.int32)[None, None]
    # the length of the prefix that two candidates share: the first level where they differ
    differ = beam[:, :, None] != beam[:, None]
    common = jnp.where(differ, level[:, None], levels).min(-1)
    common = jnp.minimum(common, jnp.minimum(lengths[:, :, None], lengths[:, None]))
    owner = jnp.where(common[..., None] > level[:, None], row[:, None], rows).min(2)

    is_new = (owner == row).reshape(batch, rows * levels)
    number = jnp.cumsum(is_new, -1, dtype=jnp.int32) - 1
    size = jnp.minimum(number[:, -1] + 1, slots)
    slot = gather_slots(number, jnp.where(owner < rows, owner * levels + level, -1))
    unpacker = jnp.where((owner < rows) & (slot < slots), slot, -1)

    # the first entry of each slot, counted row after row; 0 if it has none
    entry = jnp.broadcast_to(jnp.arange(rows * levels, dtype=jnp.int32)[None], is_new.shape)
    at = jnp.arange(batch, dtype=jnp.int32)[:, None], jnp.where(is_new, number, slots)
    first = jnp.zeros((batch, slots), jnp.int32).at[at].set(entry, mode="drop")
    used = jnp.arange(slots, dtype=jnp.int32)[None] < size[:, None]
    tokens = gather_slots(beam.reshape(is_new.shape), first)
    tokens = jnp.where(used, tokens, pad)
    ancestors = gather_slots(unpacker, first // levels)
    ancestors = jnp.where(level <= (first % levels)[:, :, None], ancestors, -1)
    return tree_from_ancestors(tokens, ancestors, unpacker, size)


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


def gather_slots(x: Array, slots: Array) -> Array:
    """`x[b, slots[b, ...]]` for `x` `[B, L, ...]`; zeros where a slot is -1."""
    rows = jnp.arange(len(x), dtype=jnp.int32).reshape(-1, *[1] * (slots.ndim - 1))
    exists = slots >= 0
    values = x[rows, jnp.where(exists, slots, 0)]
    exists = exists.reshape(*exists.shape, *[1] * (values.ndim - exists.ndim))
    return jnp.where(exists, values, jnp.zeros((), x.dtype))


def check_tree(name: str, tree: object) -> PrefixTree:
    if not isinstance(tree, PrefixTree):
        raise TypeError(f"{name}: wanted a PrefixTree, got {checks.received(tree)}")
    for field in ("tokens", "depth", "parent", "unpacker", "size"):
        checks.check_integral(f"{name}.{field}", getattr(tree, field))
    check_slots(f"{name}.tokens", tree.tokens)
    batch, slots = tree.tokens.shape
    checks.check_shape(
        f"{name}.mask", checks.check_boolean(f"{name}.mask", tree.mask), (batch, slots, slots)
    )
    for field in ("depth", "parent"):
        checks.check_shape(f"{name}.{field}", getattr(tree, field), (batch, slots))
    checks.check_shape(f"{name}.unpacker", tree.unpacker, (batch, "M", "C"))
    checks.check_shape(f"{name}.size", tree.size, (batch,))
    check_parents(f"{name}.parent", tree.parent)
    check_range(f"{name}.size", tree.size, 0, slots)
    check_range(f"{name}.unpacker", tree.unpacker, -1, slots - 1)
    return tree


def check_logits(tree: PrefixTree, logits: Array, context_logits: Array | None = None) -> None:
    check_tree("tree", tree)
    checks.check_shape("logits", checks.check_floating("logits", logits), (*tree.tokens.shape, "V"))
    if logits.shape[2] == 0:
        raise ValueError(
            f"logits: wanted a vocabulary of at least 1 token, got {checks.received(logits)}"
        )
    if context_logits is not None:
        checks.check_floating("context_logits", context_logits)
        checks.check_shape("context_logits", context_logits, (len(tree.tokens), logits.shape[2]))
