"""The static structure of a mask: the mask without its arrays."""

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import jax
from jaxtyping import Array

from ._abstract import AbstractMask, And, parts
from ._interval import FAR
from ._table import BlockTable
from ._window import WINDOWS, All, Causal, Window, sides


class MaskStructure:
    """A mask without its arrays; hashable. Masks of equal structure have the same object.

    Attributes:
        classes: those of the mask and of the masks that it joins.
        constrains: whether it compares positions.
        window: how far a query sees before and after its own position at most; a large number where
            the mask sets no bound.
        is_window: whether the mask hides nothing else than keys outside of the window.
        block: the least block of the tables that it holds; None without any.
    """

    def __init__(self, tree: Any):
        self._tree = tree
        mask = jax.tree.unflatten(tree, [None] * tree.num_leaves)
        self.classes = frozenset(type(x) for x in parts(mask))
        self.constrains = not isinstance(mask, All)
        self.window = _window(mask)
        self.is_window = isinstance(mask, WINDOWS)
        blocks = (x.block for x in parts(mask) if isinstance(x, BlockTable))
        self.block = min(blocks, default=None)

    def bind(self, arrays: Sequence[Array] = ()) -> AbstractMask:
        """The mask with its arrays, in the order of its leaves."""
        return jax.tree.unflatten(self._tree, arrays)

    def __repr__(self) -> str:
        return f"MaskStructure({self._tree})"


# A structure lives as long as a program that holds it.
_KNOWN: "weakref.WeakValueDictionary[Any, MaskStructure]" = weakref.WeakValueDictionary()


def structure_of(mask: AbstractMask) -> MaskStructure:
    """The structure of a mask, whose arrays are its leaves."""
    tree = jax.tree.structure(mask)
    structure = _KNOWN.get(tree)
    return _KNOWN.setdefault(tree, MaskStructure(tree)) if structure is None else structure


@functools.lru_cache(maxsize=256)
def window_structure(left: int | None = None, right: int | None = None) -> MaskStructure:
    """The structure of `window_mask(left, right)`."""
    return structure_of(window_mask(left, right))


def window_mask(left: int | None, right: int | None) -> AbstractMask:
    """The mask by which a query sees `left` keys before and `right` after it; None: all."""
    if left is None and right is None:
        return All()
    return Causal() if left is None and right == 0 else Window(left, right)


def _window(mask: AbstractMask) -> tuple[int, int]:
    if isinstance(mask, And):
        return tuple(map(min, _window(mask.first), _window(mask.second)))  # pyright: ignore[reportReturnType]  # two
    if isinstance(mask, Causal):
        return FAR, 0
    if isinstance(mask, Window):
        return sides(mask)
    return FAR, FAR
