"""The convex conjugate of the free energy, and the rate function, which differs by a constant."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from energy_attn.kernels.internal import check_flag

from ..core._free_energy import Calls, Parts
from ..core._solution import Result, Solution, raise_on_failure, without_derivative
from ..observables._at_source import check_row_vectors, prepare_widened, state_at
from ..solvers import Newton, Optax
from ..solvers._abstract import check_solver
from ._checks import check_regulariser, check_solver_mesh
from ._maximise import SolverInputs, SolverOptions, attained_value, maximum


def conjugate(
    point: Float[Array, "*B T N Hv"],
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K Hv"],
    *,
    bias: Float[Array, "..."] | None = None,
    mask: Bool[Array, "..."] | None = None,
    regulariser: float | Float[Array, ""] = 0.0,
    solver: Newton | Optax = Newton(),
    throw: bool = True,
    **options: Any,
) -> Solution:
    r"""The convex conjugate of the free energy at a point, for each query and head.

    $$F_\lambda^*(z) = \sup_\zeta \left\{z \cdot \zeta - F_\lambda(\zeta)\right\}, \qquad
      F_\lambda(\zeta) = F(\zeta) + \tfrac{\lambda}{2} |\zeta|^2$$

    The supremum is attained at the source $\hat\zeta(z)$ whose tilted attention is the point,
    $\nabla F(\hat\zeta) + \lambda \hat\zeta = z$. All rows are solved together, each with its own step
    length: by damped Newton, or by any Optax optimiser with a separate state for each row.

    Without a regulariser the conjugate is finite on the convex hull of the values that the row
    sees and plus infinity outside it. Outside, the solver stops at a certificate: a vector $u$
    with $u \cdot z > \max_a u \cdot v_a$. At an extreme value $v_a$ the supremum, $-\log P_a - F(0)$, is
    approached as the source grows without bound; the solver stops when it reaches the point to
    within the tolerance. With a regulariser above zero the conjugate is finite everywhere: it is
    the Moreau envelope of the conjugate without one.

    Differentiable twice, in reverse mode, by a custom rule: the gradient in $z$ is $\hat\zeta$,
    whose derivative is $(\Sigma(\hat\zeta) + \lambda)^{-1}$, and the gradients in query, key, value,
    bias and `scale` are those of $-F(\hat\zeta)$. `source` is differentiable as well. Take second
    derivatives by `jax.jacrev(jax.jacrev(f))`. Where the conjugate is infinite all derivatives are
    zero; where the hull has a lower dimension than the values, they are those along the hull.

    Args:
        point: $z$, `[B, T, N, Hv]` or `[T, N, Hv]`, one for each query and head.
        query: `[B, T, N, H]` or `[T, N, H]`.
        key: `[B, S, K, H]` or `[S, K, H]`.
        value: `[B, S, K, Hv]` or `[S, K, Hv]`.
        bias: as in [`free_energy`][energy_attn.free_energy], as is `mask`.
        mask: boolean, True where a key takes part.
        regulariser: $\lambda \ge 0$, in the unit of the values squared; a number or a floating scalar.
        solver: [`Newton`][energy_attn.solvers.Newton] or [`Optax`][energy_attn.solvers.Optax]. Its
            residual is $|\nabla F_\lambda(\hat\zeta) - z|$, relative to the size of point and values; its
            tolerance is raised to the rounding error where that is larger.
        throw: whether to raise if a row does not converge.
        **options: those of [`free_energy`][energy_attn.free_energy]: `scale`, `is_causal`,
            lengths, positions, `implementation`, `parallel`.

    Returns:
        A [`Solution`][energy_attn.Solution] with `value` `[B, T, N]` in nats and `source`
        `[B, T, N, Hv]`, in float32 (float64); `result`: `converged`, or `outside_hull` (`value` is
        plus infinity, `source` the certificate $u$), or `no_keys` (plus infinity, and zeros).
        `stats`: `steps` and `residual` of each row, and `path`, `[max_steps + 1, B, T, N]`: the value
        after each step, starting with $-F(0)$.

    Raises:
        TypeError: an argument of the wrong type, another solver, or an unknown option.
        ValueError: shapes that do not match, a negative regulariser.
        NotImplementedError: an Optax optimiser with arrays that are sharded over explicit mesh axes.
        RuntimeError: a row did not converge and `throw` is set; inside jit, when the program runs.
            Inside jit with keys sharded over a mesh, the row's value is NaN instead.

    Source: Tree Attention (arXiv 2408.04093), equations 21 to 26, and equation 30 of the later
    text: the supremum over sources of what the paper calls the log-likelihood.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import energy_attn as ea
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 9, 2, 4))
        >>> solution = ea.conjugate(ea.attention(q, k, v), q, k, v)  # at attention: zero tilt
        >>> bool(jnp.allclose(solution.value, -ea.free_energy(q, k, v), atol=1e-4))
        True
    """
    call, arrays = prepare_widened(query, key, value, bias, mask, **options)
    check_flag("throw", throw)
    found = _solve(point, call, arrays, regulariser, solver)
    return raise_on_failure(
        found, throw, "conjugate", collective=any(x.plan is not None for x in call)
    )


def rate(
    point: Float[Array, "*B T N Hv"],
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K Hv"],
    *,
    bias: Float[Array, "..."] | None = None,
    mask: Bool[Array, "..."] | None = None,
    regulariser: float | Float[Array, ""] = 0.0,
    solver: Newton | Optax = Newton(),
    throw: bool = True,
    **options: Any,
) -> Solution:
    r"""The rate function: how unlikely a point is as the mean of values drawn by attention.

    $$I(z) = \sup_\zeta \left\{z \cdot \zeta - F(\zeta)\right\} + F(0)
           = \mathrm{KL}(P_{\hat\zeta} \,\|\, P)
           = \min_p \Big\{\mathrm{KL}(p \,\|\, P) : \sum_a p_a v_a = z\Big\} \ge 0$$

    It is zero at attention and nowhere else. The mean of $n$ values drawn from the attention
    weights $P$ is near $z$ with probability $e^{-n I(z)}$ to leading order (Cramér, Sanov), so
    attention is the most probable mean. `jax.grad` in the point gives $\hat\zeta$, whose derivative
    is $\Sigma(\hat\zeta)^{-1}$.

    Args:
        point: $z$, `[B, T, N, Hv]` or `[T, N, Hv]`.
        query: `[B, T, N, H]` or `[T, N, H]`.
        key: `[B, S, K, H]` or `[S, K, H]`.
        value: `[B, S, K, Hv]` or `[S, K, Hv]`.
        bias: as in [`free_energy`][energy_attn.free_energy], as is `mask`.
        mask: boolean, True where a key takes part.
        regulariser: $\lambda \ge 0$. Above zero: $I$ smoothed, its Moreau envelope
            $\min_w \{I(w) + |z - w|^2 / 2\lambda\}$, which is finite everywhere and has the same minimiser.
        solver: as in [`conjugate`][energy_attn.conjugate].
        throw: whether to raise if a row does not converge.
        **options: those of [`free_energy`][energy_attn.free_energy].

    Returns:
        A [`Solution`][energy_attn.Solution] as that of [`conjugate`][energy_attn.conjugate], with
        `value` in nats, below zero by rounding at most. It is plus infinity outside the hull of
        the values and for a fully masked row. `path` is that of the conjugate plus $F(0)$.

    Raises:
        TypeError: an argument of the wrong type, another solver, or an unknown option.
        ValueError: shapes that do not match, a negative regulariser.
        RuntimeError: as [`conjugate`][energy_attn.conjugate].

    Source: the theorems of Cramér and Sanov; Dembo and Zeitouni, Large Deviations Techniques and
    Applications, sections 2.1 and 2.2.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import energy_attn as ea
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 9, 1, 2))
        >>> solution = ea.rate(jnp.zeros((9, 1, 2)) + v.mean(0), q, k, v)
        >>> bool((solution.value > 0).all())
        True
    """
    call, arrays = prepare_widened(query, key, value, bias, mask, **options)
    check_flag("throw", throw)
    found = _solve(point, call, arrays, regulariser, solver)
    lse = state_at(call, None, arrays).lse
    lse = jnp.where(found.result == Result.no_keys, 0.0, lse)
    stats = found.stats | {"path": found.stats["path"] + lse[None]}
    found = Solution(found.value + lse, found.source, None, found.result, stats)
    return raise_on_failure(found, throw, "rate", collective=any(x.plan is not None for x in call))


def _solve(point: Any, call: Calls, arrays: Parts, regulariser: Any, solver: Any) -> Solution:
    point = check_row_vectors("point", point, arrays)
    regulariser, bounded = check_regulariser(regulariser, point.dtype)
    solver = check_solver(solver, Newton, Optax)
    check_solver_mesh(call, solver)
    static = SolverOptions(call, solver, bounded)
    inputs = SolverInputs(arrays, point, regulariser)
    found = maximum(static, inputs)
    stats = {"steps": found.steps, "residual": found.residual, "path": found.path}
    value = attained_value(static, inputs, found)
    return Solution(
        value, found.source, None, found.result, without_derivative(stats, inputs, "conjugate")
    )
