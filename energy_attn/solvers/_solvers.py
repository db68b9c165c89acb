"""The solvers, and the check that a function supports the one that it is given."""

import abc
import dataclasses
from typing import TypeVar

import jax
import jax.numpy as jnp
import optax

from energy_attn.distributed.internal import is_explicit
from energy_attn.kernels.internal import checks

from ..functional._free_energy import Calls


class AbstractSolver(abc.ABC):
    """How an iterative function iterates, and when it stops.

    Attributes:
        max_steps: the largest number of steps of a row.
        tolerance: the largest residual that counts as converged; each function defines its residual.
            None is 1e-10 in float64, and in float32 2e-6 (1e-5 for `FixedPoint`).

    Raises:
        TypeError: a field of the wrong type.
        ValueError: `max_steps` below 1, a tolerance that is negative or not finite, or a step size that
            is not above zero.

    Examples:
        >>> from energy_attn import solvers
        >>> isinstance(solvers.Newton(), solvers.AbstractSolver)
        True
    """

    max_steps: int
    tolerance: float | None

    def __post_init__(self) -> None:
        for name, x in vars(self).items():
            if x is None and getattr(type(self), name, 0) is None:
                continue  # the default of a field that may be None
            if name == "max_steps":
                checks.check_integer(name, x, least=1)
            elif name == "optimiser":
                if not isinstance(x, optax.GradientTransformation):
                    raise TypeError(
                        f"{name}: wanted an optax.GradientTransformation, got {checks.received(x)}"
                    )
            elif name == "step_size" and checks.check_finite_number(name, x) <= 0:
                raise ValueError(f"{name}: wanted a number above 0, got {x}")
            elif name == "tolerance" and checks.check_finite_number(name, x) < 0:
                raise ValueError(f"{name}: wanted a number of at least 0, got {x}")


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Newton(AbstractSolver):
    r"""Newton's method, each row with its own step length.

    $$\zeta \leftarrow \zeta - t\, (\nabla^2 f(\zeta) + \mu)^{-1}\, \nabla f(\zeta)$$

    For a minimum the step length $t$ is searched (Armijo), and the damping $\mu$ vanishes with the
    gradient. For a saddle the steps are whole and undamped.

    Fields and errors: see [`AbstractSolver`][energy_attn.solvers.AbstractSolver].

    Source: Nocedal and Wright, Numerical Optimization, chapter 3.

    Examples:
        >>> import jax
        >>> import energy_attn as ea
        >>> F = ea.FreeEnergy().at(*jax.random.normal(jax.random.key(0), (3, 9, 2, 4)))
        >>> bool(F.map(solver=ea.solvers.Newton(tolerance=1e-4)).converged.all())
        True
    """

    max_steps: int = 64
    tolerance: float | None = None


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Mirror(AbstractSolver):
    r"""Mirror descent: each step halves the source, and the point follows it.

    $$\zeta \leftarrow \tfrac12 \zeta, \qquad z = \nabla F_\lambda(\zeta)$$

    The mirror map is $\nabla F_\lambda^*$ and the step length ½. A step solves nothing, and gains one bit.

    Fields and errors: see [`AbstractSolver`][energy_attn.solvers.AbstractSolver].

    Source: Nemirovski and Yudin, Problem Complexity and Method Efficiency in Optimization (1983).

    Examples:
        >>> import jax
        >>> import energy_attn as ea
        >>> F = ea.FreeEnergy().at(*jax.random.normal(jax.random.key(0), (3, 9, 2, 4)))
        >>> bool(F.map(solver=ea.solvers.Mirror()).converged.all())
        True
    """

    max_steps: int = 64
    tolerance: float | None = None


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Optax(AbstractSolver):
    r"""An optimiser of Optax, with a separate state and line search for each row.

    $$\zeta \leftarrow \zeta + \mathrm{update}(\nabla f(\zeta))$$

    Optimisers are compared as Optax makes them, by identity: make one and keep it, since two calls of
    `optax.lbfgs()` are two programs to compile.

    Args:
        optimiser: an `optax.GradientTransformation`, such as `optax.lbfgs()`.

    Other fields and errors: see [`AbstractSolver`][energy_attn.solvers.AbstractSolver].

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


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Extragradient(AbstractSolver):
    r"""The extragradient method for saddle points: a step by the gradient at a trial point ahead.

    $$x' = x - \eta\, g(x), \qquad x \leftarrow x - \eta\, g(x')$$

    Args:
        step_size: $\eta$, well below 1 and below the inverse of the largest eigenvalue of the
            covariance. None adapts the step of each row (Khobotov's rule).

    Other fields and errors: see [`AbstractSolver`][energy_attn.solvers.AbstractSolver].

    Source: Korpelevich (1976); Khobotov (1987) for the step size.

    Examples:
        >>> import jax
        >>> import energy_attn as ea
        >>> F = ea.FreeEnergy().at(*jax.random.normal(jax.random.key(0), (3, 9, 2, 4)))
        >>> bool(ea.bayes.saddle_attention(F, solver=ea.solvers.Extragradient(tolerance=1e-4)).converged.all())
        True
    """

    step_size: float | None = None
    max_steps: int = 4096
    tolerance: float | None = None


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Optimistic(AbstractSolver):
    r"""Optimistic gradients for saddle points: each step extrapolates from the gradient before.

    $$x_{i+1} = x_i - \eta\, (2 g(x_i) - g(x_{i-1}))$$

    It is `optax.optimistic_gradient_descent` with the sign of the source's gradient reversed.

    Args:
        step_size: $\eta$, as of [`Extragradient`][energy_attn.solvers.Extragradient], but not None.

    Other fields and errors: see [`AbstractSolver`][energy_attn.solvers.AbstractSolver].

    Source: Daskalakis et al. (arXiv 1711.00141).

    Examples:
        >>> import jax
        >>> import energy_attn as ea
        >>> F = ea.FreeEnergy().at(*jax.random.normal(jax.random.key(0), (3, 9, 2, 4)))
        >>> bool(ea.bayes.saddle_attention(F, solver=ea.solvers.Optimistic(tolerance=1e-3)).converged.all())
        True
    """

    step_size: float = 0.1
    max_steps: int = 4096
    tolerance: float | None = None


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class FixedPoint(AbstractSolver):
    r"""Iteration of a map until a step is short.

    $$x \leftarrow G(x)$$

    Args:
        max_steps: the largest number of steps.
        tolerance: the longest step that counts as converged; None is 1e-10 in float64 and 1e-5 in float32.

    Errors: see [`AbstractSolver`][energy_attn.solvers.AbstractSolver].

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


Solver = TypeVar("Solver", bound=AbstractSolver)


def check_solver(x: object, calls: Calls, *known: type[Solver]) -> Solver:
    """Returns the solver of prepared calls; raises `TypeError` unless it is one of the `known` classes.

    Raises `NotImplementedError` for Optax's methods on explicit mesh axes, where their branches cannot be batched.
    """
    if not isinstance(x, known):
        names = " or ".join(f"energy_attn.solvers.{kind.__name__}(...)" for kind in known)
        raise TypeError(f"solver: wanted {names}, got {checks.received(x)}")
    plans = [call.plan for call in calls if call.plan is not None]
    if isinstance(x, (Optax, Optimistic)) and any(is_explicit(y.mesh, y.axes) for y in plans):
        raise NotImplementedError(
            f"solver: wanted energy_attn.solvers.{Newton.__name__}(...) where arrays are split over "
            f"explicit mesh axes, got {checks.received(x)}"
        )
    return x


def tolerance_in(dtype: jnp.dtype, solver: AbstractSolver) -> float:
    """The tolerance of a solver; None is the default for the dtype."""
    if solver.tolerance is not None:
        return float(solver.tolerance)
    if dtype == jnp.float64:
        return 1e-10
    return 1e-5 if isinstance(solver, FixedPoint) else 2e-6
