"""Fixed-point iteration."""

import dataclasses

import jax

from ._abstract import AbstractSolver, check_stopping


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
