"""The solvers, and the check that a function supports the one that it is given."""

import abc
import dataclasses
from typing import TypeVar

import jax
import optax

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


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Newton(AbstractSolver):
    r"""Newton's method, each row with its own step length.

    $$\zeta \leftarrow \zeta - t\, (\nabla^2 f(\zeta) + \mu)^{-1}\, \nabla f(\zeta)$$

    For a minimum the step length $t$ is searched (Armijo), and the damping $\mu$ vanishes with the
    gradient. For a saddle the steps are whole and undamped.

    Args:
        max_steps: the largest number of steps of a row.
        tolerance: the largest residual that counts as converged; None is 1e-10 in float64 and 2e-6 in
            float32.

    Raises:
        TypeError: a field of the wrong type.
        ValueError: `max_steps` below 1, or a tolerance that is negative or not finite.

    Source: Nocedal and Wright, Numerical Optimization, chapter 3.

    Examples:
        >>> import jax
        >>> import energy_attn as ea
        >>> F = ea.FreeEnergy().at(*jax.random.normal(jax.random.key(0), (3, 9, 2, 4)))
        >>> solution = F.map(solver=ea.solvers.Newton(tolerance=1e-4))
        >>> bool(solution.converged.all())
        True
    """

    max_steps: int = 64
    tolerance: float | None = None

    def __post_init__(self) -> None:
        check_stopping(self)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Mirror(AbstractSolver):
    r"""Mirror descent: the source is halved in each step, and the point moves to that of the source.

    $$\zeta \leftarrow \tfrac12 \zeta, \qquad z = \nabla F_\lambda(\zeta)$$

    The mirror map is $\nabla F_\lambda^*$ and the step length ½. A step solves nothing, and gains one bit.

    Args:
        max_steps: the largest number of steps of a row.
        tolerance: the largest residual that counts as converged; None is 1e-10 in float64 and 2e-6 in
            float32.

    Raises:
        TypeError: a field of the wrong type.
        ValueError: `max_steps` below 1, or a tolerance that is negative or not finite.

    Source: Nemirovski and Yudin, Problem Complexity and Method Efficiency in Optimization (1983).

    Examples:
        >>> import jax
        >>> import energy_attn as ea
        >>> F = ea.FreeEnergy().at(*jax.random.normal(jax.random.key(0), (3, 9, 2, 4)))
        >>> solution = F.map(solver=ea.solvers.Mirror())
        >>> bool(solution.converged.all())
        True
    """

    max_steps: int = 64
    tolerance: float | None = None

    def __post_init__(self) -> None:
        check_stopping(self)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Optax(AbstractSolver):
    r"""An optimiser of Optax, with a separate state and line search for each row.

    $$\zeta \leftarrow \zeta + \mathrm{update}(\nabla f(\zeta))$$

    Optimisers are compared as Optax makes them, by identity: make one and keep it, since two calls of
    `optax.lbfgs()` are two programs to compile.

    Args:
        optimiser: an `optax.GradientTransformation`, such as `optax.lbfgs()`.
        max_steps: the largest number of steps of a row.
        tolerance: the largest residual that counts as converged; None is 1e-10 in float64 and 2e-6 in
            float32.

    Raises:
        TypeError: a field of the wrong type.
        ValueError: `max_steps` below 1, or a tolerance that is negative or not finite.

    Examples:
        >>> import jax, optax
        >>> import energy_attn as ea
        >>> F = ea.FreeEnergy().at(*jax.random.normal(jax.random.key(0), (3, 9, 2, 4)))
        >>> lbfgs = ea.solvers.Optax(optax.lbfgs(), tolerance=1e-3)
        >>> bool(F.map(solver=lbfgs).converged.all())
        True
    """

    optimiser: optax.GradientTransformation
    max_steps: int = 256
    tolerance: float | None = None

    def __post_init__(self) -> None:
        check_stopping(self)
        if not isinstance(self.optimiser, optax.GradientTransformation):
            raise TypeError(
                f"optimiser: wanted an optax.GradientTransformation, got {received(self.optimiser)}"
            )


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Extragradient(AbstractSolver):
    r"""The extragradient method for saddle points: a step by the gradient at a trial point ahead.

    $$x' = x - \eta\, g(x), \qquad x \leftarrow x - \eta\, g(x')$$

    Args:
        step_size: $\eta$, well below 1 and below the inverse of the largest eigenvalue of the
            covariance. None adapts the step of each row (Khobotov's rule).
        max_steps: the largest number of steps of a row.
        tolerance: the largest residual that counts as converged; None is 1e-10 in float64 and 2e-6 in
            float32.

    Raises:
        TypeError: a field of the wrong type.
        ValueError: a step size that is not above zero, `max_steps` below 1, or a tolerance that is
            negative or not finite.

    Source: Korpelevich (1976); Khobotov (1987) for the step size.

    Examples:
        >>> import jax
        >>> import energy_attn as ea
        >>> F = ea.FreeEnergy().at(*jax.random.normal(jax.random.key(0), (3, 9, 2, 4)))
        >>> solution = ea.bayes.saddle_attention(F, solver=ea.solvers.Extragradient(tolerance=1e-4))
        >>> bool(solution.converged.all())
        True
    """

    step_size: float | None = None
    max_steps: int = 4096
    tolerance: float | None = None

    def __post_init__(self) -> None:
        check_stopping(self)
        if self.step_size is not None:
            check_step_size(self.step_size)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Optimistic(AbstractSolver):
    r"""Optimistic gradients for saddle points: each step extrapolates from the gradient before.

    $$x_{i+1} = x_i - \eta\, (2 g(x_i) - g(x_{i-1}))$$

    It is `optax.optimistic_gradient_descent` with the sign of the source's gradient reversed.

    Args:
        step_size: $\eta$, well below 1 and below the inverse of the largest eigenvalue of the
            covariance.
        max_steps: the largest number of steps of a row.
        tolerance: the largest residual that counts as converged; None is 1e-10 in float64 and 2e-6 in
            float32.

    Raises:
        TypeError: a field of the wrong type.
        ValueError: a step size that is not above zero, `max_steps` below 1, or a tolerance that is
            negative or not finite.

    Source: Daskalakis et al. (arXiv 1711.00141).

    Examples:
        >>> import jax
        >>> import energy_attn as ea
        >>> F = ea.FreeEnergy().at(*jax.random.normal(jax.random.key(0), (3, 9, 2, 4)))
        >>> solution = ea.bayes.saddle_attention(F, solver=ea.solvers.Optimistic(tolerance=1e-3))
        >>> bool(solution.converged.all())
        True
    """

    step_size: float = 0.1
    max_steps: int = 4096
    tolerance: float | None = None

    def __post_init__(self) -> None:
        check_stopping(self)
        check_step_size(self.step_size)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class FixedPoint(AbstractSolver):
    r"""Iteration of a map until a step is short.

    $$x \leftarrow G(x)$$

    Args:
        max_steps: the largest number of steps.
        tolerance: the longest step that counts as none; None is 1e-10 in float64 and 1e-5 in float32.

    Raises:
        TypeError: a field of the wrong type.
        ValueError: `max_steps` below 1, or a tolerance that is negative or not finite.

    Examples:
        >>> import jax
        >>> import energy_attn as ea
        >>> memories = jax.random.normal(jax.random.key(0), (20, 1, 16))
        >>> solver = ea.solvers.FixedPoint(max_steps=50)
        >>> found = ea.hopfield.retrieve(memories[:3], memories, solver=solver)
        >>> found.stats["path"].shape
        (51, 3, 1)
    """

    max_steps: int = 100
    tolerance: float | None = None

    def __post_init__(self) -> None:
        check_stopping(self)


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
