"""Retrieval from a modern Hopfield network: the fixed points of attention to memories."""

import dataclasses
import functools
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from energy_attn.kernels import Operands
from energy_attn.kernels.internal import RowOptions, autodiff, checks, holds_keys
from energy_attn.kernels.masks import AbstractMask

from ..core._gibbs import prepare_at
from ..core._module import FreeEnergy, energy_of
from ..functional._citation import cite
from ..functional._solution import Result, Solution, raise_on_failure, without_derivative
from ..observables._at_source import promoted
from ..solvers import FixedPoint
from ..solvers._solvers import check_solver, tolerance_in
from ._fixed_point import (
    FixedPointMap,
    RetrievalOptions,
    energy_rises,
    memory_stats,
    nearest_memory,
    point_energy,
    state_at_point,
)


def retrieve(
    state: Float[Array, "*B T N H"],
    memories: Float[Array, "*B S K H"],
    *,
    mask: Bool[Array, "..."] | AbstractMask | None = None,
    scale: float | Float[Array, ""] | None = None,
    energy: FreeEnergy | None = None,
    solver: FixedPoint = FixedPoint(),
    throw: bool = True,
    **rows: Unpack[RowOptions],
) -> Solution:
    r"""The fixed point of a modern Hopfield network that a state converges to.

    $$x \leftarrow \nabla F(x) = \sum_a P_a m_a, \quad P = \mathrm{softmax}(\beta\, x \cdot m_a),
      \qquad E(x) = \tfrac12 |x|^2 - \tfrac1\beta F(x) + \tfrac1\beta \log S + \tfrac12 M^2$$

    Attention whose keys and values are both the memories $m_a$, iterated to a fixed point: a single
    memory, or a mixture of memories. No step raises $E$, and $0 \le E \le 2 M^2$ at states within
    the radius $M = \max_a |m_a|$; $S$ is the number of memories. A step is one kernel pass, and rows
    that have converged do not move.

    `point` and `value` are differentiable in the memories and $\beta$, in both modes and to any
    order, by the implicit function theorem,
    $\mathrm{d}x = (1 - \beta\,\mathrm{Cov}_P(m))^{-1}\, \partial \nabla F$: one `H×H` system for each row.
    A fixed point does not change with the state that leads to it, so the derivative in `state` is 0. The
    stats `steps`, `residual` and `path` have no derivative.

    Args:
        state: the first $x$, `[B, T, N, H]` or `[T, N, H]`; float16, bfloat16, float32 or float64.
            The arithmetic is in float32 or wider.
        memories: `[B, S, K, H]` or `[S, K, H]`; `K` divides `N` (grouped heads).
        mask: the memories that each state sees, as for [`free_energy`][energy_attn.free_energy].
        scale: $\beta$, positive, the inverse temperature. None is the scale of `energy`, or 1 without one.
        energy: the [`FreeEnergy`][energy_attn.FreeEnergy] of states and memories: its `scale` is
            $\beta$, $1/\sqrt H$ if None; the steps use its masks, kernel and `parallel`.
        solver: [`FixedPoint`][energy_attn.solvers.FixedPoint]. A state has converged when a step is at
            most `tolerance` times $M$ long.
        throw: whether to raise if a state does not converge.
        **rows: positions, lengths and segments; `key_value_seq_lengths` are for the memories.

    Returns:
        A [`Solution`][energy_attn.Solution]: `value` is $E$ `[B, T, N]`, `point` the fixed point
        `[B, T, N, H]`, both in float32 (float64). A fully masked row has $E = \infty$, the point 0
        and the result `no_keys`. In `stats`, each `[B, T, N]` unless stated otherwise:

        - `steps`: int32, the number of steps. `residual`: the length of the last step, over $M$.
        - `path`: `[max_steps + 1, B, T, N]`, $E$ at the start and after each step; it does not rise.
        - `effective`: $e^H$, the number of memories that the point averages over, by the entropy of
          their weights: 1 at a single memory, more at a metastable state, $S$ at the global average.
        - `nearest`: int32, the memory of largest weight; -1 where several share it.
        - `weight`: that largest weight. `overlap`: the cosine between the memory and the point.

        The point lies within tolerance / $(1 - c)$ of the fixed point, in units of $M$, where $c$ is the contraction of
        a step there, the largest eigenvalue of $\beta\,\mathrm{Cov}_P(m)$: close to 1 near a critical temperature.
        Derivatives are those of the fixed point itself, up to rounding of about $\epsilon / (1 - c)^2$.

    Raises:
        TypeError: an argument is not an array or has the wrong dtype, another solver, or an unknown
            option.
        ValueError: shapes that do not match, values out of range, a scale that is given twice.
        RuntimeError: with `throw`, a state did not converge in `max_steps`, met a number that is not
            finite, or its energy rose by more than rounding; inside jit, when the program runs.
            Inside jit with memories sharded over a mesh, the row's value is NaN instead.

    Source: Ramsauer et al., Hopfield Networks is All You Need (arXiv 2008.02217): the energy, its
    bounds, the update and its convergence (Theorems 1 and 2), and the three kinds of fixed point.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import energy_attn as ea
        >>> memories = jax.random.normal(jax.random.key(0), (20, 1, 16))
        >>> probe = memories[3:4] + 0.3 * jax.random.normal(jax.random.key(1), (1, 1, 16))
        >>> found = ea.hopfield.retrieve(probe, memories, scale=2.0)
        >>> found.stats["nearest"].item(), bool(found.stats["weight"] > 0.99)
        (3, True)
    """
    _check_arrays(state, memories)
    energy, beta = _energy_and_beta(energy, scale, state.shape[-1])
    solver = check_solver(solver, (), FixedPoint)
    throw = checks.check_flag("throw", throw)
    call, operands = prepare_at(energy, state, memories, memories, None, mask, rows)
    (operands,) = promoted((operands,))
    dtype = operands.query.dtype
    cite("ramsauer")
    static = RetrievalOptions(call, solver.max_steps, tolerance_in(dtype, solver))
    solution = _solve(static, jnp.asarray(beta, dtype), operands)
    return raise_on_failure(solution, throw, "retrieve", (call,))


def _energy_and_beta(
    energy: FreeEnergy | None, scale: float | Array | None, width: int
) -> tuple[FreeEnergy, float | Array]:
    """The energy at a scale of one, and β. A step multiplies its state by β, which may be differentiated."""
    beta = 1.0 if energy is None else width**-0.5
    energy = energy_of(energy, {})
    if scale is not None and energy.scale is not None:
        raise ValueError(
            f"scale: wanted None where energy has the scale {checks.received(energy.scale)}, "
            f"got {checks.received(scale)}"
        )
    for name, x in (("scale", scale), ("energy.scale", energy.scale)):
        beta = beta if x is None else checks.check_positive(name, x)
    return dataclasses.replace(energy, scale=1.0), beta


def _check_arrays(state: Array, memories: Array) -> None:
    checks.check_floating("state", state)
    if state.ndim not in (3, 4):
        raise ValueError(
            f"state: wanted shape (B, T, N, H) or (T, N, H), got {checks.received(state)}"
        )
    checks.check_floating("memories", memories)
    if memories.dtype != state.dtype:
        raise TypeError(
            f"memories: wanted the dtype of state, {state.dtype}, got {checks.received(memories)}"
        )
    *lead, _, heads, width = state.shape
    checks.check_shape("memories", memories, (*lead, "S", "K", width))
    if width == 0:
        raise ValueError(f"state: wanted a width above zero, got {checks.received(state)}")
    kept = memories.shape[-2]
    if kept == 0 or heads % kept:
        raise ValueError(
            f"state: wanted a number of heads that is a multiple of the {kept} of memories, "
            f"got {checks.received(state)}"
        )


# Compiled here, so that a call outside jit is traced and compiled once for its shapes.
@functools.partial(jax.jit, static_argnums=0)
def _solve(static: RetrievalOptions, beta: Array, operands: Operands) -> Solution:
    batched, call = static.call.axes != (), static.call._replace(axes=(-1,))
    static = static._replace(call=call)
    memory = memory_stats(call, operands)
    fixed_point: Any = autodiff.function_call(FixedPointMap(static), (beta, operands, memory))
    point, progress = fixed_point
    state = state_at_point(call, beta, operands, point)
    value = point_energy(beta, point, state.lse, memory)
    seen = holds_keys(state.lse)
    # scores are β x·m and the mean of m is `out`, so the mean score needs no pass of its own
    entropy = jnp.where(seen, state.lse - beta * (point * state.out).sum(-1), 0.0)
    after = (
        jnp.arange(static.max_steps + 1, dtype=jnp.int32).reshape(-1, *[1] * value.ndim)
        >= progress.passes
    )
    path = jnp.where(after, value[None], jnp.concatenate([progress.path, value[None]]))
    counted = {"steps": progress.steps, "residual": progress.residual, "path": path}
    stats = {
        **without_derivative(counted, (beta, operands), "retrieve"),
        "effective": jnp.where(seen, jnp.exp(entropy), 0.0),
        **nearest_memory(call, beta, operands, point, memory),
    }
    result = jnp.where(progress.running, int(Result.max_steps_reached), int(Result.converged))
    rose = progress.rose | energy_rises(progress, value, beta, point, state.lse, memory)
    result = jnp.where(rose, int(Result.energy_rose), result)
    result = jnp.where(jnp.isfinite(value), result, int(Result.not_finite))
    result = jnp.where(jnp.isneginf(memory.log_count), int(Result.no_keys), result)
    solution = Solution(value, None, point, result.astype(jnp.int32), stats)
    if batched:
        return solution
    first = jax.tree.map(lambda x: x[0], solution)
    return dataclasses.replace(first, stats=first.stats | {"path": stats["path"][:, 0]})
