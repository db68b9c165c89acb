"""The attention that a layer is called with."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxtyping import Array

from energy_attn.distributed import SequenceParallel


@dataclass(frozen=True)
class See:
    """The attention of a layer, called with its queries, keys, values and options.

    Attributes:
        attend: returns the output of attention and an extra result.
        parallel: the mesh axes that the tokens of the layer are sharded over; None: none.
    """

    attend: Callable[..., tuple[Array, Any]]
    parallel: SequenceParallel | None = None

    def __call__(self, query: Array, key: Array, value: Array, **options: Any) -> tuple[Array, Any]:
        """Returns the output of attention and an extra result."""
        return self.attend(query, key, value, **options)
