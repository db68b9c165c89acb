"""The extragradient method."""

import dataclasses

import jax

from ._abstract import AbstractSolver, check_step_size, check_stopping


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
