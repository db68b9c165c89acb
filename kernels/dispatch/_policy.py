"""Policies of calls: kernels, sharding method, and runs of keys."""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

from ..call._kernel import Candidate
from ._registry import candidates, is_reproducible, reproducible_kernels


@dataclasses.dataclass(frozen=True)
class CallPolicy:
    """How a call is computed; static. By default by these kernels, and otherwise as the call says.

    Attributes:
        kernels: the implementations to try, or kernels.
        method: the name of the method by which keys are sharded; None: as the call says.
        folds_sinks: whether kernels take in a sink as one more key; else it is merged with the state of all keys.
        attention_only: whether energies and attention, and no other observable, can be computed so.
    """

    kernels: tuple[Candidate, ...]

    method: ClassVar[str | None] = None
    folds_sinks: ClassVar[bool] = False
    attention_only: ClassVar[bool] = False

    @property
    def run(self) -> int | None:
        """The length of runs of successive keys that kernels rely on, or None."""
        return None

    def laid_out(self, run: int | None) -> "CallPolicy":
        """The policy for keys that lie in runs of this many successive positions; None: in no such runs."""
        del run
        return self


@dataclasses.dataclass(frozen=True)
class ReproduciblePolicy(CallPolicy):
    """The bits of a row depend on the row and the keys that it sees: by canonical kernels alone."""

    method = "reproducible"
    folds_sinks = True
    attention_only = True

    @property
    def run(self) -> int | None:
        kernel: Any = self.kernels[-1]
        return kernel.run

    def laid_out(self, run: int | None) -> "ReproduciblePolicy":
        return ReproduciblePolicy(reproducible_kernels(run))


def call_policy(
    implementation: Candidate | Sequence[Candidate] | None, reproducible: bool = False
) -> CallPolicy:
    """The policy for the user's `implementation=` and `reproducible=`. Raises as `candidates`."""
    kernels = candidates(implementation, reproducible)
    return ReproduciblePolicy(kernels) if is_reproducible(kernels) else CallPolicy(kernels)
