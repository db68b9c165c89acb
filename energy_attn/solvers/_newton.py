"""Newton's method."""

import dataclasses

import jax

from ._abstract import AbstractSolver, check_stopping


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
