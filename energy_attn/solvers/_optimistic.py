"""Optimistic gradient descent."""

import dataclasses

import jax

from ._abstract import AbstractSolver, check_step_size, check_stopping


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
