"""Optimisers of Optax."""

import dataclasses

import jax
import optax

from energy_attn.kernels.internal import received

from ._abstract import AbstractSolver, check_stopping


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
