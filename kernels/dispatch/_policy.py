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
    """Static choices of how a call is computed; by default only the kernels.

    Attributes:
        kernels: the implementations to try, or kernels.
        method: the name of the method by which keys are sharded; None: as the call says.
        folds_sinks: whether kernels fold a sink as one more key; otherwise it is merged with the state of all keys.
        attention_only: whether the policy supports only energies and attention, no other observables.
        row_tiles: whether token-wise functions, such as a decoder's layers, run in tiles of one size.
        leaf: the least number of successive keys per device of a mesh; None: any.
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
        """The policy for keys in runs of this many successive positions; None: in any order."""
        del run
        return self

    def bind(self, attend: Callable[..., Any], run: int | None = None) -> Callable[..., Any]:
        """Returns `attend` with the kernels of the policy for keys in runs of `run` positions."""
        del run
        return attend


@dataclasses.dataclass(frozen=True)
class ReproduciblePolicy(CallPolicy):
    """Bitwise reproducible rows, by canonical kernels alone."""

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
