"""Mirror descent."""

import dataclasses

import jax

from ._abstract import AbstractSolver, check_stopping


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
