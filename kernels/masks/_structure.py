"""The static structure of a mask: the rule without its arrays."""

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import jax
from jaxtyping import Array

from ._abstract import AbstractMask, And
from ._all import All
from ._causal import Causal
from ._interval import FAR
from ._table import BlockTable
from ._window import Window

# Rules of these classes are windows: how far a query sees before and after it says all.
WINDOWS = (All, Causal, Window)


class Structure:
    """A rule without its arrays; hashable. Rules of equal structure have the same object.

    Attributes:
        classes: those of the rule and of the rules that it joins.
        constrains: whether it compares positions.
        window: how far a query sees before and after its own position at most; a large number where
            the rule sets no bound.
        is_window: whether the rule hides nothing else than keys outside of the window.
        block: the least block of the tables that it holds; None without any.
    """

    def __init__(self, tree: Any):
        self._tree = tree
        rule = jax.tree.unflatten(tree, [None] * tree.num_leaves)
        self.classes = frozenset(type(x) for x in parts(rule))
        self.constrains = not isinstance(rule, All)
        self.window = _window(rule)
        self.is_window = isinstance(rule, WINDOWS)
        blocks = (x.block for x in parts(rule) if isinstance(x, BlockTable))
        self.block = min(blocks, default=None)

    def bind(self, arrays: Sequence[Array] = ()) -> AbstractMask:
        """The rule with its arrays, in the order of its leaves."""
        return jax.tree.unflatten(self._tree, arrays)

    def __repr__(self) -> str:
        return f"Structure({self._tree})"


# Each lives as long as a program that holds it.
_KNOWN: "weakref.WeakValueDictionary[Any, Structure]" = weakref.WeakValueDictionary()


def structure_of(rule: AbstractMask) -> Structure:
    """The structure of a rule, whose arrays are its leaves."""
    tree = jax.tree.structure(rule)
    found = _KNOWN.get(tree)
    return _KNOWN.setdefault(tree, Structure(tree)) if found is None else found


@functools.lru_cache(maxsize=256)
def window_structure(left: int | None = None, right: int | None = None) -> Structure:
    """The structure of `window_mask(left, right)`."""
    return structure_of(window_mask(left, right))


def window_mask(left: int | None, right: int | None) -> AbstractMask:
    """The rule by which a query sees `left` keys before and `right` after it; None: all."""
    if left is None and right is None:
        return All()
    return Causal() if left is None and right == 0 else Window(left, right)


def parts(rule: AbstractMask) -> list[AbstractMask]:
    """A rule, and all rules that it joins."""
    return [rule, *(x for inner in _inner(rule) for x in parts(inner))]


def told_by_intervals(rule: AbstractMask) -> bool:
    """Whether intervals of positions tell which blocks are read: of all rules that it joins, or by a table."""
    if isinstance(rule, BlockTable):
        return True
    return rule.by_intervals and all(map(told_by_intervals, _inner(rule)))


def _inner(rule: AbstractMask) -> list[AbstractMask]:
    fields = tuple(vars(rule).values())
    found = jax.tree.leaves(fields, is_leaf=lambda x: isinstance(x, AbstractMask))
    return [x for x in found if isinstance(x, AbstractMask)]


def _window(rule: AbstractMask) -> tuple[int, int]:
    if isinstance(rule, And):
        return tuple(map(min, _window(rule.first), _window(rule.second)))  # pyright: ignore[reportReturnType]  # two
    if isinstance(rule, Causal):
        return FAR, 0
    if isinstance(rule, Window):
        left, right = (FAR if x is None else min(x, FAR) for x in (rule.left, rule.right))
        return left, right
    return FAR, FAR
