"""The static structure of a score, without its arrays, and the check of a score by its jaxpr."""

import functools
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr
from jaxtyping import Array

from .._checks import received
from ..autodiff._function import jvp_of_some
from ..program._jaxpr import (
    CALLS_WITH_RULES,
    Operation,
    ProgramValue,
    closed,
    inputs_of,
    operations_of,
    programs,
    without_mesh,
)
from ._abstract import AbstractScore, ScoreIndices

_ARRAYS = jax.Array, np.ndarray, np.generic


class ScoreStructure:
    """A score without its arrays; hashable. Scores of equal structure have the same object.

    `width`: the number of features of query and key in its products; None: all.
    """

    def __init__(self, tree: Any, static: tuple[Any, ...], width: int | None = None):
        self._tree = tree
        self._static = static  # for each leaf, whether it is an array, and its value if not
        self.width = width
        score = self.bind([None] * sum(array for array, _ in static))
        self.name = type(score).__name__
        self.uses_positions = bool(score.uses_positions)

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
    result = _KNOWN.get(key)
    return _KNOWN.setdefault(key, ScoreStructure(tree, static, width)) if result is None else result


def split_score(score: object) -> tuple[ScoreStructure | None, tuple[Any, ...]]:
    """The structure of a score and its arrays, in the order of its leaves; None and () of None."""
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

    def __call__(self, raw: Array, at: ScoreIndices) -> Array:
        return self.structure.bind(self._cast(raw.dtype))(raw, at)

    def vjp(self, raw: Array, at: ScoreIndices) -> tuple[Array, Any]:
        """The scores, and the pullback to the cotangents of the products and of the arrays."""
        # dx = g'(x) ds, dθ = Σ ds ∂g/∂θ
        arrays = self._cast(raw.dtype)

        def scores(raw: Array, arrays: Sequence[Any] = arrays) -> Array:
            return self.structure.bind(arrays)(raw, at)

        result, pullback = jax.vjp(scores, *((raw, arrays) if self.needs_grad else (raw,)))

        def cotangents(cotangent: Array) -> tuple[Array, tuple[Any, ...]]:
            d_raw, *rest = pullback(cotangent)
            d_arrays = rest[0] if rest else map(jnp.zeros_like, arrays)
            pairs = zip(d_arrays, arrays, strict=True)
            return d_raw, tuple(d_array if floating(x) else None for d_array, x in pairs)

        return result, cotangents

    def jvp(
        self, raw: Array, at: ScoreIndices, change: Array | None, changes: Sequence[Any]
    ) -> tuple[Array, Array | None]:
        """The scores, and their derivative in directions of products and arrays; None: no directions."""
        # ds = g'(x) dx + ∂g/∂θ dθ
        tangents = change, *(x if x is None else x.astype(raw.dtype) for x in changes)
        if all(x is None for x in tangents):
            return self(raw, at), None

        def scores(raw: Array, *arrays: Any) -> Array:
            return self.structure.bind(arrays)(raw, at)

        return jvp_of_some(scores, (raw, *self._cast(raw.dtype)), tangents)

    def _cast(self, dtype: jnp.dtype) -> tuple[Any, ...]:
        return tuple(jnp.asarray(x, dtype) if floating(x) else x for x in self.arrays)


def floating(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.floating))


_FOLLOWED = 2**16  # entries of indices that are followed, at most
# Operations that mix entries of an array, so that a score would depend on the other keys in its block.
_MIXING = (
    *("dot_general", "conv_general_dilated", "sort", "top_k", "rev", "transpose", "slice"),
    *("dynamic_slice", "dynamic_update_slice", "pad", "scatter", "scatter-add", "fft"),
)
_MIXING_STARTS = "reduce_", "cum", "arg"


def check_score(
    score: object, shape: tuple[Any, Any, Any, Any], dtype: jnp.dtype
) -> tuple[ScoreStructure | None, tuple[Any, ...]]:
    """The structure and the arrays of a checked score for scores `(B, N, T, S)` of `dtype`, or None and ()."""
    structure, arrays = split_score(score)
    if structure is None or not isinstance(score, AbstractScore):
        return None, ()
    for x in arrays:
        kinds = (jnp.integer, jnp.bool_)
        if not floating(x) and not any(jnp.issubdtype(x.dtype, kind) for kind in kinds):
            raise TypeError(f"score: wanted arrays of real numbers, got {received(x)}")
    for x in score.per_head():
        if x.shape[0] != shape[1]:
            raise ValueError(
                f"score: wanted arrays of {structure.name} with an entry for each of the {shape[1]} "
                f"heads, got {received(x)}"
            )
    batch_and_heads = shape[:2] if all(isinstance(x, int) for x in shape[:2]) else (1, shape[1])
    _check(structure, tuple((x.shape, x.dtype) for x in arrays), batch_and_heads, jnp.dtype(dtype))
    return structure, tuple(jnp.asarray(x) for x in arrays)


@functools.lru_cache(maxsize=256)
def _check(
    structure: ScoreStructure, arrays: tuple[Any, ...], size: tuple[int, int], dtype: jnp.dtype
) -> None:
    batch, heads = size
    shape = batch, heads, 3, 2
    axes = (np.arange(x, dtype=np.int32) for x in shape)
    numbers: Any = np.meshgrid(*axes, indexing="ij", sparse=True)
    indices_of_scores = ScoreIndices(*numbers)
    if not structure.uses_positions:
        indices_of_scores = ScoreIndices(*indices_of_scores[:2], None, None)  # pyright: ignore[reportArgumentType]

    def run(score: Array, at: ScoreIndices, *arrays: Array) -> Array:
        cast = (x.astype(dtype) if floating(x) else x for x in arrays)
        return structure.bind(tuple(cast))(score, at)

    types = [jax.ShapeDtypeStruct(*x) for x in arrays]
    traced = jax.make_jaxpr(run, return_shape=True)
    with without_mesh():
        program, out = traced(jax.ShapeDtypeStruct(shape, dtype), indices_of_scores, *types)
    if not hasattr(out, "dtype") or out.shape != shape:
        raise ValueError(
            f"score: wanted scores of the shape that {structure.name} was given, {shape}, "
            f"got {out if hasattr(out, 'shape') else received(out)}"
        )
    if out.dtype != dtype:
        raise TypeError(
            f"score: wanted scores of the dtype that {structure.name} was given, {dtype}, got "
            f"{out.dtype}"
        )
    if any(isinstance(x, jax.core.Tracer) for x in program.consts):
        raise ValueError(
            f"score: wanted arrays that are traced as parameters of {structure.name}, got a function "
            "that closes over them"
        )
    inputs = inputs_of(program, *("score",) * (1 + len(jax.tree.leaves(indices_of_scores))))
    inputs[1].known, inputs[2].known = indices_of_scores[:2]
    _check_program(structure.name, program, inputs)


def _check_program(name: str, program: ClosedJaxpr, inputs: Sequence[ProgramValue]) -> None:
    """Checks each operation; values that have an entry for each score read "score"."""
    options: Any = {"calls": CALLS_WITH_RULES, "foldable": _FOLLOWED}
    for x in operations_of(program, inputs, **options)[0]:
        _check_operation(name, x)
        for inner in map(closed, programs(x.equation)):
            variables = inner.jaxpr.invars
            if len(variables) == len(x.inputs):
                pairs = zip(variables, x.inputs, strict=True)
                _check_program(name, inner, [ProgramValue(y.aval, z.reads) for y, z in pairs])


def _check_operation(name: str, operation: Operation) -> None:
    step = operation.name
    mixes = step in _MIXING or step.startswith(_MIXING_STARTS)
    # indices are concatenated from several arrays
    if step == "concatenate":
        mixes = not jnp.issubdtype(operation.outputs[0].dtype, jnp.integer)
    if (mixes and operation.reads) or (step == "gather" and operation.inputs[0].reads):
        raise ValueError(
            f"score: wanted an elementwise function of scores and places, got {name}, which takes "
            f"{step} of them"
        )
    if step == "gather" and operation.inputs[1].known is not None:
        sizes, index = operation.inputs[0].shape, operation.inputs[1].known
        for place, axis in enumerate(
            operation.equation.params["dimension_numbers"].start_index_map
        ):
            least, most = index[..., place].min(), index[..., place].max()
            if not 0 <= least <= most < sizes[axis]:
                raise ValueError(
                    f"score: wanted indices of {name} by head or batch from 0 to {sizes[axis] - 1}, "
                    f"the length of the array that it reads, {sizes}, got {least} to {most}"
                )
