"""The result of a solver: the value, where it is attained, and statistics."""

import dataclasses
import enum
import textwrap
from typing import Any, NoReturn

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from energy_attn.kernels.internal import autodiff

from ._free_energy import Calls


class Result(enum.IntEnum):
    """How a solver ended, for each of the problems that it solved together.

    `solution.result == Result.converged` is a boolean array; `Result(int(r)).message` explains an entry.

    Examples:
        >>> import energy_attn as ea
        >>> ea.Result.outside_hull.message
        'the point is outside the convex hull of the values: its conjugate is plus infinity'
    """

    converged = 0, "the solver converged"
    max_steps_reached = 1, "the solver took all of max_steps without converging"
    outside_hull = (
        2,
        "the point is outside the convex hull of the values: its conjugate is plus infinity",
    )
    no_keys = 3, "the query sees no key: there is nothing to solve"
    not_finite = 4, "the solver met values that are not finite"
    energy_rose = 5, "an energy that cannot rise rose by more than rounding"

    message: str

    def __new__(cls, code: int, message: str) -> "Result":
        member = int.__new__(cls, code)
        member._value_ = code
        member.message = message
        return member


class Solution(eqx.Module):
    """The result of a solver, whether it converged, and its statistics.

    Attributes:
        value: the optimal value of each problem.
        source: the source at which it is attained; None if the problem has none.
        point: the point at which it is attained; None if the point was given.
        result: int32, the code of a [`Result`][energy_attn.Result] for each problem.
        stats: the solver's statistics by name. Unless a docstring says otherwise they have no
            derivative: in reverse mode differentiating one raises `RuntimeError`, and in forward
            mode its tangent is NaN.

    Examples:
        >>> import jax
        >>> import energy_attn as ea
        >>> F = ea.FreeEnergy().at(*jax.random.normal(jax.random.key(0), (3, 1, 9, 2, 4)))
        >>> solution = F.conjugate(F.attention())
        >>> bool(solution.converged.all())
        True
    """

    value: Float[Array, "..."]
    source: Float[Array, "..."] | None
    point: Float[Array, "..."] | None
    result: Int[Array, "..."]
    stats: dict[str, Array]

    @property
    def converged(self) -> Bool[Array, "..."]:
        """Whether the solver converged, for each problem."""
        return self.result == int(Result.converged)

    def __repr__(self) -> str:
        """The fields as Equinox prints them, and how many problems ended in which result, by name."""
        fields = dataclasses.fields(self)
        shown = {x.name: eqx.tree_pformat(getattr(self, x.name)) for x in fields}
        known = isinstance(self.result, jax.Array) and not isinstance(self.result, jax.core.Tracer)
        if known and self.result.is_fully_addressable:
            codes, counts = np.unique(np.asarray(self.result), return_counts=True)
            names = {int(x): x.name for x in Result}
            ends = (f"{n} {names.get(x, x)}" for x, n in zip(codes, counts, strict=True))
            shown["result"] = f"{shown['result']} ({', '.join(ends)})"
        inside = ",\n".join(f"{name}={x}" for name, x in shown.items())
        return f"Solution(\n{textwrap.indent(inside, '  ')}\n)"


# The results without an answer. A point outside the hull has one (plus infinity), and so has a
# fully masked row (its result says so, and its value is documented).
_FAILURES = (Result.max_steps_reached, Result.not_finite, Result.energy_rose)


def raise_on_failure(solution: Solution, throw: bool, what: str, calls: Calls) -> Solution:
    """Returns the solution; if `throw` is set, raises `RuntimeError` if any of its problems failed.

    Outside jit it raises at once; inside jit when the program runs and uses the solution, as
    `equinox.error_if` does. A program with collectives does not raise inside jit, since a device that
    raises would leave the others waiting: the values of failed problems are NaN.
    """
    if not throw:
        return solution
    collective = any(call.plan is not None for call in calls)
    for result in _FAILURES:
        failed = solution.result == int(result)
        more = "raise max_steps of its solver, or " if result == Result.max_steps_reached else ""
        complaint = f"{what}: {result.message}; {more}throw=False returns what it has"
        if not isinstance(failed, jax.core.Tracer):
            if bool(np.asarray(failed.any())):
                raise RuntimeError(complaint)
        elif collective:
            value = jnp.where(failed, jnp.nan, solution.value)
            solution = dataclasses.replace(solution, value=value)
        else:
            solution = eqx.error_if(solution, failed.any(), complaint)
    return solution


def without_derivative(stats: dict[str, Array], inputs: PyTree, what: str) -> dict[str, Array]:
    """Statistics of an iteration, whose derivative with respect to `inputs` raises `RuntimeError`; tangents are NaN."""
    return autodiff.function_call(_Statistics(what), (stats, inputs))


@dataclasses.dataclass(frozen=True)
class _Statistics(autodiff.AbstractFunction):
    what: str

    def apply(self, args: tuple[dict[str, Array], PyTree]) -> dict[str, Array]:
        return args[0]

    def jvp(self, primals: tuple[dict[str, Array], PyTree], tangents: Any) -> tuple[Any, Any]:
        stats, _ = primals
        floating = {name: x for name, x in stats.items() if jnp.issubdtype(x.dtype, jnp.floating)}
        unknown = autodiff.linear_call(_Unknown(self.what), floating, jax.tree.leaves(tangents))
        return autodiff.function_call(self, primals), dict.fromkeys(stats) | unknown


# Forward mode computes the tangents of all results of a solver, used or not, and so cannot
# raise; reverse mode calls the transpose only for used results.
@dataclasses.dataclass(frozen=True)
class _Unknown(autodiff.AbstractLinearMap):
    """The tangents of statistics: NaN, with a transpose that raises `RuntimeError`."""

    what: str

    def apply(self, fixed: dict[str, Array], moving: list[Array | None]) -> dict[str, Array]:
        return {name: x * jnp.nan for name, x in fixed.items()}

    def plain(self, fixed: dict[str, Array], moving: list[Array | None]) -> dict[str, Array]:
        return self.apply(fixed, moving)

    def transpose(
        self, fixed: dict[str, Array], moving: Any, cotangent: dict[str, Array | None]
    ) -> NoReturn:
        names = ", ".join(name for name, x in cotangent.items() if x is not None)
        raise RuntimeError(
            f"stats: wanted no derivative, as those of {self.what} have none, got one of {names}"
        )
