"""Options of a decoder's loss, and how its output layer is sharded."""

import math
from typing import Any, TypedDict

import jax
from jaxtyping import Array

from energy_attn import VocabularyParallel
from energy_attn.distributed import SequenceParallel
from energy_attn.distributed.internal import check_mesh, is_explicit


class LossOptions(TypedDict, total=False):
    """Options of [`AbstractDecoder.loss`][energy_attn.models.AbstractDecoder.loss]."""

    label_smoothing: float
    """The share of the uniform distribution, from 0 to 1."""

    z_loss: float
    """The factor of the square of the log-partition function."""


def vocabulary_parallel(
    words: int, x: Array, parallel: SequenceParallel | None
) -> VocabularyParallel | None:
    """How the output layer is sharded where tokens are sharded as `parallel` says."""
    if parallel is None:
        return None
    check_mesh(parallel)
    mesh: Any = jax.sharding.get_abstract_mesh()
    if is_explicit(mesh, parallel.batch + parallel.axes + parallel.heads):
        return None  # types say it

    def fitting(axes: tuple[str, ...], size: int) -> tuple[str, ...]:
        return axes if axes and size % math.prod(mesh.shape[x] for x in axes) == 0 else ()

    over = fitting(parallel.heads, words)
    sizes = zip((parallel.batch, parallel.axes), x.shape, strict=False)
    return VocabularyParallel(over, jax.P(*(fitting(axes, size) or None for axes, size in sizes)))
