"""The solvers of iterative functions, for `solver=`.

A solver is frozen, hashable, equal to another with the same fields, and a pytree without leaves.
A program is compiled once for equal solvers. Each function names the solvers that it takes.

Examples:
    >>> import jax
    >>> import energy_attn as ea
    >>> F = ea.FreeEnergy().at(*jax.random.normal(jax.random.key(0), (3, 9, 2, 4)))
    >>> solution = F.map(solver=ea.solvers.Mirror(max_steps=40))
    >>> bool(solution.converged.all())
    True
"""

from ._solvers import AbstractSolver as AbstractSolver
from ._solvers import Extragradient as Extragradient
from ._solvers import FixedPoint as FixedPoint
from ._solvers import Mirror as Mirror
from ._solvers import Newton as Newton
from ._solvers import Optax as Optax
from ._solvers import Optimistic as Optimistic
