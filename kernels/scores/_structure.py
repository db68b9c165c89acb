"""The static structure of a score: the score without its arrays."""

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from .._checks import received
from ._abstract import AbstractScore, At

_ARRAYS = jax.Array, np.ndarray, np.generic


class ScoreStructure:
    """A score without its arrays; hashable. Scores of equal structure have the same object.

    Attributes:
        name: of its class.
        compares: whether it reads positions.
        width: how many features of query and key make the products that it is of; None: all.
    """

    def __init__(self, tree: Any, static: tuple[Any, ...], width: int | None = None):
        self._tree = tree
        self._static = static  # for each leaf, whether it is an array, and its value if not
        self.width = width
        score = self.bind([None] * sum(array for array, _ in static))
        self.name = type(score).__name__
        self.compares = bool(score.compares)

    def bind(self, arrays: Sequence[Any]) -> AbstractScore:
        """The score with its arrays, in the order of its leaves."""
        remaining = iter(arrays)
        return self._tree.unflatten([next(remaining) if array else x for array, x in self._static])

    def within(self, width: int) -> "ScoreStructure":
        """A structure of the same score, for products of `width` features."""
        return _known(self._tree, self._static, width)

    def __repr__(self) -> str:
        return f"ScoreStructure({self._tree})"


# A structure lives as long as a program that holds it.
_KNOWN: "weakref.WeakValueDictionary[Any, ScoreStructure]" = weakref.WeakValueDictionary()


def _known(tree: Any, static: tuple[Any, ...], width: int | None = None) -> ScoreStructure:
    key = tree, tuple((array, type(x), x) for array, x in static), width  # 1 is not True
    found = _KNOWN.get(key)
    return _KNOWN.setdefault(key, ScoreStructure(tree, static, width)) if found is None else found


def split_score(score: object) -> tuple[ScoreStructure | None, tuple[Any, ...]]:
    """The structure of a score and its arrays, which are those of its leaves; None and () of None.

    Raises `TypeError` for anything else than a score, and for a leaf that is neither an array nor
    hashable.
    """
    if score is None:
        return None, ()
    if not isinstance(score, AbstractScore):
        hint = ""
        if isinstance(score, type) and issubclass(score, AbstractScore):
            hint = f"; {score.__name__}(...) makes one"
        elif callable(score):
            hint = "; scores.Function(function, *parameters) makes one of a function"
        raise TypeError(
            f"score: wanted a score of energy_attn.scores or None, got {received(score)}{hint}"
        )
    leaves, tree = jax.tree.flatten(score)
    arrays = tuple(x for x in leaves if isinstance(x, _ARRAYS))
    static = tuple((True, None) if isinstance(x, _ARRAYS) else (False, x) for x in leaves)
    try:
        hash((tree, static))
    except TypeError as reason:
        raise TypeError(
            f"score: wanted a module of arrays and of what can be hashed, got {received(score)}: "
            f"{reason}"
        ) from None
    return _known(tree, static), arrays


class BoundScore(NamedTuple):
    """A score with arrays: a function of scaled products, with both derivatives.

    Floating arrays are cast to the dtype of the products. Without `needs_grad`, `vjp` returns zeros for them, as XLA
    does not remove sums that are not read from a loop.
    """

    structure: ScoreStructure
    arrays: tuple[Any, ...]
    needs_grad: bool = True

    def __call__(self, raw: Array, at: At) -> Array:
        """The scores of scaled products."""
        return self._scores(raw, self.arrays, at)

    def vjp(self, raw: Array, at: At) -> tuple[Array, Any]:
        """The scores, and the pullback to the cotangents of the products and of the arrays."""
        arrays = self._cast(raw.dtype)
        if not self.needs_grad:
            scores, pullback_raw = jax.vjp(lambda raw: self._scores(raw, arrays, at), raw)
            zeros = tuple(jnp.zeros_like(x) if floating(x) else None for x in arrays)
            return scores, lambda cotangent: (*pullback_raw(cotangent), zeros)
        scores, pullback = jax.vjp(lambda raw, arrays: self._scores(raw, arrays, at), raw, arrays)

        def floating_cotangents(cotangent: Array) -> tuple[Array, tuple[Any, ...]]:
            d_raw, d_arrays = pullback(cotangent)
            return d_raw, tuple(
                d_array if floating(x) else None
                for d_array, x in zip(d_arrays, arrays, strict=True)
            )

        return scores, floating_cotangents

    def jvp(
        self, raw: Array, at: At, change: Array | None, changes: Sequence[Any]
    ) -> tuple[Array, Array | None]:
        """The scores, and their derivative in directions of products and arrays; None: no directions."""
        arrays = self._cast(raw.dtype)
        tangents: Any = {i: x.astype(raw.dtype) for i, x in enumerate(changes) if x is not None}
        primals: Any = {i: arrays[i] for i in tangents}
        if change is not None:
            primals, tangents = primals | {-1: raw}, tangents | {-1: change}
        if not tangents:
            return self(raw, at), None

        def scores(primals: dict[int, Array]) -> Array:
            replaced = tuple(primals.get(i, x) for i, x in enumerate(arrays))
            return self._scores(primals.get(-1, raw), replaced, at)

        return jax.jvp(scores, (primals,), (tangents,))

    def _cast(self, dtype: jnp.dtype) -> tuple[Any, ...]:
        return tuple(x.astype(dtype) if floating(x) else x for x in self.arrays)

    def _scores(self, raw: Array, arrays: Sequence[Any], at: At) -> Array:
        cast = [jnp.asarray(x, raw.dtype) if floating(x) else x for x in arrays]
        return self.structure.bind(cast)(raw, at)


def floating(x: Any) -> bool:
    """Whether an array is differentiated."""
    return bool(jnp.issubdtype(x.dtype, jnp.floating))
