"""The functions that a decoder computes by: attention, and what computes everything else."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxtyping import Array

from energy_attn import attention
from energy_attn.distributed import SequenceParallel
from energy_attn.distributed.internal import AbstractTokens
from energy_attn.kernels.internal import reproducible_kernels

from ._by_rows import by_rows, together


@dataclass(frozen=True)
class How:
    """How a decoder computes; static."""

    function: Callable[..., Any] = attention  # computes attention, called as `attention` is
    reproducible: bool = False  # whether the bits of a row depend on its tokens alone

    @property
    def attend(self) -> Callable[..., Any]:
        if not self.reproducible:
            return self.function
        return functools.partial(self.function, implementation=reproducible_kernels())

    def attend_to(self, cache: AbstractTokens) -> Callable[..., Any]:
        """The function of attention to the keys and values of a cache."""
        if not self.reproducible:
            return self.function
        return functools.partial(self.function, implementation=reproducible_kernels(cache._run()))

    @property
    def rows(self) -> Callable[..., Any]:
        """Called as `rows(f, *arrays)`, with a function of arrays `[#batch, time, ...]`, for all but attention."""
        return by_rows if self.reproducible else together

    def see(
        self, attend: Callable[..., tuple[Array, Any]], parallel: SequenceParallel | None = None
    ) -> "See":
        """The attention of a layer whose tokens are sharded over these axes; tiles of rows never are."""
        return See(attend, None if self.reproducible else parallel, self.rows)


PLAIN = How()


@dataclass(frozen=True)
class See:
    """The attention of a layer, called with its queries, keys, values and options."""

    attend: Callable[..., tuple[Array, Any]]  # returns the output of attention and an extra result
    # the mesh axes that the tokens of the layer are sharded over; None: none
    parallel: SequenceParallel | None = None
    rows: Callable[..., Any] = together  # computes the rest of the layer, as `How.rows`

    def __call__(self, query: Array, key: Array, value: Array, **options: Any) -> tuple[Array, Any]:
        return self.attend(query, key, value, **options)
