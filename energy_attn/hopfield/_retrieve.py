"""Retrieval from a modern Hopfield network: where attention to the memories comes to rest."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from energy_attn.kernels.internal import (
    check_finite_number,
    check_flag,
    check_floating,
    check_integer,
    check_shape,
    holds_keys,
    received,
)

from ..core._citation import cite
from ..core._solution import Result, Solution, checked, held
from ..observables._observe import prepare_wide
from ._arguments import check_positive
from ._descent import Settings, at, energy, nearest, rest, rises, scale_of

# The step at which a state counts as at rest, unless the caller says otherwise.
_AT_REST = {"float32": 1e-5, "float64": 1e-10}


def retrieve(
    state: Float[Array, "*B T N H"],
    memories: Float[Array, "*B S K H"],
    *,
    mask: Bool[Array, "..."] | None = None,
    scale: float | Float[Array, ""] = 1.0,
    max_steps: int = 100,
    tolerance: float | None = None,
    throw: bool = True,
    **options: Any,
) -> Solution:
    r"""The memory, or the mixture of memories, that a state settles to in a modern Hopfield network.

    $$x \leftarrow \nabla F(x) = \sum_a P_a m_a, \quad P = \mathrm{softmax}(\beta\, x \cdot m_a),
      \qquad E(x) = \tfrac12 |x|^2 - \tfrac1\beta F(x) + \tfrac1\beta \log S + \tfrac12 M^2$$

    Attention whose keys and values are both the memories $m_a$, repeated until it rests. No step
    raises $E$, and $0 \le E \le 2 M^2$ at states within the radius $M = \max_a |m_a|$; $S$ is the
    number of memories. A step is one pass of the kernel, and rows that rest stay put.

    `point` and `value` are differentiable in the memories and $\beta$, in reverse mode, by the
    implicit function theorem, $\mathrm{d}x = (1 - \beta\,\mathrm{Cov}_P(m))^{-1}\, \partial \nabla F$: no step is
    stored, and one `H×H` system is solved for each row; right when differentiated again.
    A resting point does not change with the state that leads to it, so its derivative there is 0.
    The stats `steps`, `residual` and `path` have no derivative and raise if asked for one.

    Args:
        state: $x$ at the start, `[B, T, N, H]` or `[T, N, H]`; float16, bfloat16, float32, float64.
            The arithmetic is in float32 or wider.
        memories: `[B, S, K, H]` or `[S, K, H]`; `K` divides `N` (grouped heads).
        mask: boolean, of four axes, each 1 or that of `[B, N, T, S]`; True where a state may see a
            memory.
        scale: $\beta$, positive: how sharply memories are told apart.
        max_steps: the number of steps to take at most.
        tolerance: a state is at rest when a step is at most this multiple of $M$ long; None is
            1e-5 in float32 and 1e-10 in float64.
        throw: whether to raise if a state does not come to rest.
        **options: lengths, positions, segments, `implementation` and `parallel`, as for
            [`free_energy`][energy_attn.free_energy]; `key_value_seq_lengths` are the memories'.

    Returns:
        A [`Solution`][energy_attn.Solution]: `value` is $E$ `[B, T, N]`, `point` the state at rest
        `[B, T, N, H]`, both in float32 (float64). A row that sees no memory has $E = \infty$, the
        point 0 and the result `no_keys`. In `stats`, each `[B, T, N]` unless said otherwise:

        - `steps`: int32, how many were taken. `residual`: the length of the last, over $M$.
        - `path`: `[max_steps + 1, B, T, N]`, $E$ at the start and after each step; it does not rise.
        - `effective`: $e^H$, the number of memories that the point averages over, by the entropy of
          their weights: 1 at a single memory, between at a metastable state, $S$ at the global
          average.
        - `nearest`: int32, the memory of largest weight; -1 where several share it.
        - `weight`: that largest weight. `overlap`: the cosine between the memory and the point.

    Raises:
        TypeError: an argument is no array or of another dtype, or an unknown option.
        ValueError: shapes that do not belong together, values out of range, unknown names.
        RuntimeError: with `throw`, a state did not come to rest in `max_steps`, met a number that
            is not finite, or its energy rose by more than rounding; inside jit, when the program runs.
            Where memories are spread over a mesh, inside jit, the row's value is NaN instead.

    Source: Ramsauer et al., Hopfield Networks is All You Need (arXiv 2008.02217): the energy, its
    bounds, the update and its convergence (Theorems 1 and 2), and the three kinds of fixed point.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import energy_attn as ea
        >>> memories = jax.random.normal(jax.random.key(0), (20, 1, 16))
        >>> probe = memories[3:4] + 0.3 * jax.random.normal(jax.random.key(1), (1, 1, 16))
        >>> found = ea.retrieve(probe, memories, scale=2.0)
        >>> found.stats["nearest"].item(), bool(found.stats["weight"] > 0.99)
        (3, True)
    """
    _check_arrays(state, memories)
    beta = check_positive("scale", scale)
    max_steps = check_integer("max_steps", max_steps, least=1)
    throw = check_flag("throw", throw)
    call, arrays = prepare_wide(state, memories, memories, None, mask, scale=1.0, **options)
    wide = arrays.query.dtype
    if tolerance is None:
        tolerance = _AT_REST[wide.name]
    else:
        tolerance = float(check_positive("tolerance", check_finite_number("tolerance", tolerance)))
    cite("ramsauer")
    settings = Settings(call, max_steps, tolerance)
    solution = _solve(settings, jnp.asarray(beta, wide), arrays)
    return checked(solution, throw, "retrieve", collective=call.place is not None)


def _check_arrays(state: Any, memories: Any) -> None:
    check_floating("state", state)
    if state.ndim not in (3, 4):
        raise ValueError(f"state: wanted shape (B, T, N, H) or (T, N, H), got {received(state)}")
    check_floating("memories", memories)
    if memories.dtype != state.dtype:
        raise TypeError(
            f"memories: wanted the dtype of state, {state.dtype}, got {received(memories)}"
        )
    *lead, _, heads, width = state.shape
    check_shape("memories", memories, (*lead, "S", "K", width))
    if width == 0:
        raise ValueError(f"state: wanted a width above zero, got {received(state)}")
    kept = memories.shape[-2]
    if kept == 0 or heads % kept:
        raise ValueError(
            f"state: wanted a number of heads that is a multiple of the {kept} of memories, "
            f"got {received(state)}"
        )


# Compiled here, so that a call outside of jit is traced and compiled once for its shapes.
@functools.partial(jax.jit, static_argnums=0)
def _solve(settings: Settings, beta: Array, arrays: Any) -> Solution:
    call = settings.call
    scale = scale_of(call, arrays)
    found: Any = rest(settings, beta, arrays, scale)
    point, trace = found
    here = at(call, beta, arrays, point)
    value = energy(beta, point, here.lse, scale)
    seen = holds_keys(here.lse)
    # Scores are β x·m, and the mean of m is `out`: their mean needs no pass of its own.
    entropy = jnp.where(seen, here.lse - beta * (point * here.out).sum(-1), 0.0)
    after = (
        jnp.arange(settings.max_steps + 1, dtype=jnp.int32).reshape(-1, *[1] * value.ndim)
        >= trace.passes
    )
    path = jnp.where(after, value[None], jnp.concatenate([trace.path, value[None]]))
    counted = {"steps": trace.steps, "residual": trace.residual, "path": path}
    stats = {
        **held(counted, (beta, arrays), "retrieve"),
        "effective": jnp.where(seen, jnp.exp(entropy), 0.0),
        **nearest(call, beta, arrays, point, scale),
    }
    result = jnp.where(trace.running, int(Result.max_steps_reached), int(Result.converged))
    rose = trace.rose | rises(trace, value, beta, point, here.lse, scale)
    result = jnp.where(rose, int(Result.energy_rose), result)
    result = jnp.where(jnp.isfinite(value), result, int(Result.not_finite))
    result = jnp.where(jnp.isneginf(scale.log_count), int(Result.no_keys), result)
    return Solution(value, None, point, result.astype(jnp.int32), stats)
