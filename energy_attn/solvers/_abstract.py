"""The base class of all solvers, and the check that a function supports the one it is given."""

import abc
from typing import TypeVar

from energy_attn.kernels.internal import check_finite_number, check_integer, received


class AbstractSolver(abc.ABC):
    """How an iterative function iterates, and when it stops.

    Attributes:
        max_steps: the largest number of steps of a row.
        tolerance: the largest residual that counts as converged; the function that is called says of
            what, and relative to what. None is a default for the dtype.

    Examples:
        >>> from energy_attn import solvers
        >>> isinstance(solvers.Newton(), solvers.AbstractSolver)
        True
    """

    max_steps: int
    tolerance: float | None


Solver = TypeVar("Solver", bound=AbstractSolver)


def check_solver(x: object, *known: type[Solver]) -> Solver:
    """Returns the solver; raises `TypeError` unless it is an instance of one of the classes `known`."""
    if not isinstance(x, known):
        wanted = " or ".join(f"energy_attn.solvers.{kind.__name__}(...)" for kind in known)
        raise TypeError(f"solver: wanted {wanted}, got {received(x)}")
    return x


def check_stopping(solver: AbstractSolver) -> None:
    """Raises `TypeError` if `max_steps` is not an integer or `tolerance` not a number, `ValueError`
    for a number out of range.
    """
    check_integer("max_steps", solver.max_steps, least=1)
    tolerance = solver.tolerance
    if tolerance is not None and check_finite_number("tolerance", tolerance) < 0:
        raise ValueError(f"tolerance: wanted a number of at least 0, got {tolerance}")


def check_step_size(x: object) -> None:
    """Raises `TypeError` if a step size is not a real number, `ValueError` if it is not above zero."""
    if check_finite_number("step_size", x) <= 0:
        raise ValueError(f"step_size: wanted a number above 0, got {x}")
