"""Policies of calls: kernels, sharding method, and runs of keys."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from ..call._kernel import Candidate
from ..call._tokens import LEAF
from ._registry import candidates, is_reproducible, reproducible_kernels


@dataclasses.dataclass(frozen=True)
class CallPolicy:
    """How a call is computed; static. By default by these kernels, and otherwise as the call says.

    Attributes:
        kernels: the implementations to try, or kernels.
        method: the name of the method by which keys are sharded; None: as the call says.
        folds_sinks: whether kernels take in a sink as one more key; else it is merged with the state of all keys.
        attention_only: whether energies and attention, and no other observable, can be computed so.
        row_tiles: whether functions of rows, as the layers of a decoder, are computed in tiles of one size.
        leaf: the least number of successive keys that lie on one device of a mesh; None: any.
        reads_trees: whether the nodes of a prefix tree are read at once, by a mask; else path by path.
    """

    kernels: tuple[Candidate, ...]

    method: ClassVar[str | None] = None
    folds_sinks: ClassVar[bool] = False
    attention_only: ClassVar[bool] = False
    row_tiles: ClassVar[bool] = False
    leaf: ClassVar[int | None] = None
    reads_trees: ClassVar[bool] = True

    @property
    def run(self) -> int | None:
        """The length of runs of successive keys that kernels rely on, or None."""
        return None

    def laid_out(self, run: int | None) -> "CallPolicy":
        """The policy for keys that lie in runs of this many successive positions; None: in no such runs."""
        del run
        return self

    def bind(self, attend: Callable[..., Any], run: int | None = None) -> Callable[..., Any]:
        """A function that is called as `attention`, with the kernels that the policy demands for keys in such runs."""
        del run
        return attend


@dataclasses.dataclass(frozen=True)
class ReproduciblePolicy(CallPolicy):
    """The bits of a row depend on the row and the keys that it sees: by canonical kernels alone."""

    method = "reproducible"
    folds_sinks = True
    attention_only = True
    row_tiles = True
    leaf = LEAF
    reads_trees = False

    @property
    def run(self) -> int | None:
        kernel: Any = self.kernels[-1]
        return kernel.run

    def laid_out(self, run: int | None) -> "ReproduciblePolicy":
        return ReproduciblePolicy(reproducible_kernels(run))

    def bind(self, attend: Callable[..., Any], run: int | None = None) -> Callable[..., Any]:
        return functools.partial(attend, implementation=reproducible_kernels(run))


def call_policy(
    implementation: Candidate | Sequence[Candidate] | None, reproducible: bool = False
) -> CallPolicy:
    """The policy for the user's `implementation=` and `reproducible=`. Raises as `candidates`."""
    kernels = candidates(implementation, reproducible)
    return ReproduciblePolicy(kernels) if is_reproducible(kernels) else CallPolicy(kernels)
