"""Convex duals of the free energy, as methods of the measure."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from energy_attn.kernels.internal import checks

from ..functional._free_energy import state_at
from ..functional._solution import Result, Solution, raise_on_failure
from ..observables._at_source import check_row_vectors
from ..observables._measure import AbstractMeasure
from ..solvers import Mirror, Newton, Optax
from ..solvers._solvers import check_solver
from ._extrema import default_start, mean_square_deviation, minimise, with_exact_derivative
from ._maximise import SolverInputs, SolverOptions, check_regulariser, conjugate


class AbstractConjugate(AbstractMeasure):
    r"""A measure whose free energy $F$ has a convex conjugate, a rate function and a mode.

    All rows of a call are solved together, each with its own step length and its own end.
    """

    def conjugate(
        self,
        point: Float[Array, "*B T N Hv"],
        *,
        regulariser: float | Float[Array, ""] = 0.0,
        solver: Newton | Optax = Newton(),
        throw: bool = True,
    ) -> Solution:
        r"""The convex conjugate of the free energy at a point, for each query and head.

        $$F_\lambda^*(z) = \sup_\zeta \left\{z \cdot \zeta - F_\lambda(\zeta)\right\}, \qquad
          F_\lambda(\zeta) = F(\zeta) + \tfrac{\lambda}{2} |\zeta|^2$$

        The supremum is attained at the source $\hat\zeta(z)$ whose tilted attention is the point,
        $\nabla F(\hat\zeta) + \lambda \hat\zeta = z$.

        Without a regulariser the conjugate is finite on the convex hull of the values that the row
        sees, and plus infinity outside it: there the solver stops at a certificate, a vector $u$ with
        $u \cdot z > \max_a u \cdot v_a$. At an extreme value $v_a$ the supremum, $-\log P_a - F(0)$, is
        approached as the source grows without bound; the solver stops when it reaches the point to within
        the tolerance. With a regulariser above zero the conjugate is finite everywhere: the Moreau envelope
        of the one without.

        Differentiable in both modes and to any order, without a derivative of the iteration: the
        gradient in $z$ is $\hat\zeta$, whose derivative is $(\Sigma(\hat\zeta) + \lambda)^{-1}$, and the
        gradients in the arrays of the measure are those of $-F(\hat\zeta)$. `source` is differentiable as well.
        Where the conjugate is infinite all derivatives are zero. Where the hull has a lower dimension, only
        derivatives along the hull are nonzero.

        Args:
            point: $z$, `[B, T, N, Hv]` or `[T, N, Hv]`, one for each query and head.
            regulariser: $\lambda \ge 0$, in the unit of the values squared; a number or a floating scalar.
            solver: [`Newton`][energy_attn.solvers.Newton] or [`Optax`][energy_attn.solvers.Optax].
                Its residual is $|\nabla F_\lambda(\hat\zeta) - z|$, relative to the size of point and
                values; its tolerance is raised to the rounding error where that is larger.
            throw: whether to raise if a row does not converge.

        Returns:
            A [`Solution`][energy_attn.Solution] with `value` `[B, T, N]` in nats and `source`
            `[B, T, N, Hv]`, in float32 (float64); `result`: `converged`, or `outside_hull` (`value`
            is plus infinity, `source` the certificate $u$), or `no_keys` (plus infinity, and zeros).
            `stats`: `steps` and `residual` of each row, and `path`, `[max_steps + 1, B, T, N]`: the
            value after each step, starting with $-F(0)$.

        Raises:
            TypeError: an argument of the wrong type, or another solver.
            ValueError: shapes that do not match, a negative regulariser.
            NotImplementedError: `Optax` with arrays that are sharded over explicit mesh axes.
            RuntimeError: a row did not converge and `throw` is set; inside jit, when the program
                runs. Inside jit with keys sharded over a mesh, the row's value is NaN instead.

        Source: Tree Attention (arXiv 2408.04093), equations 21 to 26, and equation 30 of the later
        text: the supremum over sources of what the paper calls the log-likelihood.

        Examples:
            >>> import jax, jax.numpy as jnp
            >>> import energy_attn as ea
            >>> F = ea.FreeEnergy().at(*jax.random.normal(jax.random.key(0), (3, 9, 2, 4)))
            >>> solution = F.conjugate(F.attention())  # at attention: zero tilt
            >>> bool(jnp.allclose(solution.value, -F(), atol=1e-4))
            True
        """
        calls, parts = self._prepared()
        solution = conjugate(calls, parts, point, regulariser, solver, throw)
        return raise_on_failure(solution, throw, "conjugate", calls)

    def rate(
        self,
        point: Float[Array, "*B T N Hv"],
        *,
        regulariser: float | Float[Array, ""] = 0.0,
        solver: Newton | Optax = Newton(),
        throw: bool = True,
    ) -> Solution:
        r"""The rate function: how unlikely a point is as the mean of values drawn by attention.

        $$I(z) = \sup_\zeta \left\{z \cdot \zeta - F(\zeta)\right\} + F(0)
               = \mathrm{KL}(P_{\hat\zeta} \,\|\, P)
               = \min_p \Big\{\mathrm{KL}(p \,\|\, P) : \sum_a p_a v_a = z\Big\} \ge 0$$

        It is zero at attention and nowhere else. The mean of $n$ values drawn from the attention
        weights $P$ is near $z$ with probability $e^{-n I(z)}$ to leading order (Cramér, Sanov), so
        attention is the most probable mean. The gradient in the point is $\hat\zeta$, whose derivative is
        $\Sigma(\hat\zeta)^{-1}$.

        Args:
            point: $z$, `[B, T, N, Hv]` or `[T, N, Hv]`.
            regulariser: $\lambda \ge 0$. Above zero: the Moreau envelope of $I$,
                $\min_w \{I(w) + |z - w|^2 / 2\lambda\}$, which has the same minimiser.
            solver: as for `conjugate`.
            throw: whether to raise if a row does not converge. Errors as for `conjugate`.

        Returns:
            A [`Solution`][energy_attn.Solution] as from `conjugate`, with `value` in nats, below
            zero by rounding at most. It is plus infinity outside the hull of the values and for a
            fully masked row. `path` is the conjugate's path plus $F(0)$.

        Source: the theorems of Cramér and Sanov; Dembo and Zeitouni, Large Deviations Techniques and
        Applications, sections 2.1 and 2.2.

        Examples:
            >>> import jax, jax.numpy as jnp
            >>> import energy_attn as ea
            >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 9, 1, 2))
            >>> solution = ea.FreeEnergy().at(q, k, v).rate(jnp.zeros((9, 1, 2)) + v.mean(0))
            >>> bool((solution.value > 0).all())
            True
        """
        calls, parts = self._prepared()
        solution = conjugate(calls, parts, point, regulariser, solver, throw)
        lse = state_at(calls, None, parts).lse
        lse = jnp.where(solution.result == Result.no_keys, 0.0, lse)
        stats = solution.stats | {"path": solution.stats["path"] + lse[None]}
        solution = Solution(solution.value + lse, solution.source, None, solution.result, stats)
        return raise_on_failure(solution, throw, "rate", calls)

    def map(
        self,
        *,
        regulariser: float | Float[Array, ""] | None = None,
        solver: Newton | Mirror | Optax = Newton(),
        start: Float[Array, "*B T N Hv"] | None = None,
        throw: bool = True,
    ) -> Solution:
        r"""Attention as a maximum a posteriori: the point that maximises $e^{-n M_\lambda(z)}$.

        $$M_\lambda(z) = \sup_\zeta \left\{z \cdot \zeta - F(\zeta)
            - \tfrac{\lambda}{2} |\zeta|^2\right\}, \qquad
          \arg\min_z M_\lambda(z) = \nabla F(0) = \mathrm{attention}$$

        $M_\lambda + F(0)$ is the rate function of the mean of $n$ values drawn by attention and seen
        through Gaussian noise of variance $\lambda / n$. It is finite everywhere, and its minimiser is
        exactly attention for every $\lambda > 0$, because the penalty is flat at $\zeta = 0$: what
        `attention` computes in one pass is found by optimisation, for study.

        `Newton` steps from $z$ to $z - (\Sigma(\hat\zeta) + \lambda)\, \hat\zeta$, with a searched
        length; each evaluation solves for the point's source $\hat\zeta(z) = \nabla M_\lambda(z)$, the
        gradient that `Optax` follows. `Mirror` halves the source in each step.

        Differentiable as attention is, in both modes and to any order: `point` is $\nabla F(0)$ and `value` is
        $-F(0)$ for every regulariser and start.

        Args:
            regulariser: $\lambda > 0$, in the unit of the values squared; a number or a floating scalar.
                None is the mean square distance of the values from their mean.
            solver: [`Newton`][energy_attn.solvers.Newton], [`Mirror`][energy_attn.solvers.Mirror] or
                [`Optax`][energy_attn.solvers.Optax]. Its residual is the remaining step
                $|(\Sigma + \lambda)\, \hat\zeta|$, relative to the size of point and values; its
                tolerance is raised to the rounding error where that is larger.
            start: `[B, T, N, Hv]`, the first point; None is the unweighted mean of the values that a
                row sees.
            throw: whether to raise if a row does not converge. Errors as for `conjugate`, and a `ValueError`
                for a regulariser that is not above zero.

        Returns:
            A [`Solution`][energy_attn.Solution] with `point` `[B, T, N, Hv]`, its `source` (zero up
            to the residual) and `value` $M_\lambda$ `[B, T, N]`, in float32 (float64). `stats`:
            `steps`, `inner_steps` (the sum over a row's inner solves for sources), `residual`, and
            `path`, `[max_steps + 1, B, T, N]`: $M_\lambda$ after each step. A fully masked row has the
            result `no_keys`, the value plus infinity and the point zero.

        Source: Tree Attention (arXiv 2408.04093), equations 22 to 26, which aim at this; the paper's
        own objective has a saddle there, see [`saddle_attention`][energy_attn.bayes.saddle_attention].

        Examples:
            >>> import jax, jax.numpy as jnp
            >>> import energy_attn as ea
            >>> F = ea.FreeEnergy().at(*jax.random.normal(jax.random.key(0), (3, 9, 2, 4)))
            >>> bool(jnp.allclose(F.map().point, F.attention(), atol=1e-4))
            True
        """
        checks.check_flag("throw", throw)
        calls, parts = self._prepared()
        regulariser = mean_square_deviation(parts) if regulariser is None else regulariser
        regulariser, _ = check_regulariser(regulariser, parts[0].query.dtype, positive=True)
        solver = check_solver(solver, calls, Newton, Mirror, Optax)
        if start is None:
            point = default_start(calls, parts)
        else:
            point = check_row_vectors("start", start, calls, parts)
        solution = minimise(
            SolverOptions(calls, solver, True), SolverInputs(parts, point, regulariser)
        )
        return with_exact_derivative(solution, calls, parts, throw, "map")
