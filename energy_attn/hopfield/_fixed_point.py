"""The fixed-point iteration of a Hopfield network, its derivative, and the energy that it descends."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from energy_attn.kernels import Operands
from energy_attn.kernels.internal import autodiff, holds_keys, outer, precision, product, reductions

from ..functional._free_energy import StaticCall, directional, unmoved
from ..observables._at_source import covariance_at, mean_over_keys, state_at, support_at

# The allowed rounding error of energies, in multiples of the dtype's precision.
_ROUNDING = 64.0
# The index of a memory is read from attention in digits, each exact in float32.
_BASE, _DIGITS = 1024, 3


class RetrievalOptions(NamedTuple):
    """The static options of a retrieval; hashable."""

    call: StaticCall
    max_steps: int
    tolerance: float


class Progress(NamedTuple):
    """The state of the iteration for each row."""

    passes: Array  # the number of steps of all rows together
    steps: Array
    residual: Array
    path: Array  # path[k] is the energy after k steps, for k below `passes`
    last: Array  # the energy of the last pass
    rose: Array  # whether an energy rose by more than rounding
    running: Array  # whether the row still moves


class MemoryStats(NamedTuple):
    """The constants of each row's energy."""

    log_count: Array  # the logarithm of the number of memories that it sees
    square: Array  # the squared length of the longest memory


def state_at_point(call: StaticCall, beta: Array, operands: Operands, point: Array) -> Any:
    return state_at((call,), None, (operands._replace(query=beta * point),))


def memory_stats(call: StaticCall, operands: Operands) -> MemoryStats:
    squares = (operands.value**2).sum(-1, keepdims=True)
    ones = jnp.ones_like(operands.query[..., :1])
    # with zero scores all memories have equal weights, and F is the logarithm of their number
    uniform = operands._replace(query=jnp.zeros_like(ones), key=squares, value=squares)
    longest, lse = _furthest_along(call, uniform, ones, 0.0)
    return MemoryStats(lse, longest[..., 0])


# E = |x|²/2 + (log S - F)/β + M²/2
def point_energy(beta: Array, point: Array, lse: Array, stats: MemoryStats) -> Array:
    empty = jnp.isneginf(stats.log_count)
    entropic = jnp.where(empty, 0.0, stats.log_count) - jnp.where(empty, 0.0, lse)
    energies = 0.5 * (point**2).sum(-1) + entropic / beta + 0.5 * stats.square
    return jnp.where(empty, jnp.inf, energies)


# The point is an implicit function of memories and β, x = G(x, θ) with G = ∇F, and so
#     dx = J dx + ∂G/∂θ dθ,   J = ∂G/∂x = β Cov_P(m),   dx = (1 - J)⁻¹ ∂G/∂θ dθ.
# The rule consists of differentiable calls, this function among them, so that it can be differentiated
# again.
@dataclasses.dataclass(frozen=True)
class FixedPointMap(autodiff.AbstractFunction):
    """The fixed point of each row, starting from the query of the operands, and the iteration's state.

    Only the point has a derivative; the caller must stop derivatives of the rest.
    """

    static: RetrievalOptions

    def apply(self, args: tuple[Array, Operands, MemoryStats]) -> tuple[Array, Progress]:
        return _iterate(self.static, *args)

    def jvp(self, primals: tuple[Array, Operands, MemoryStats], tangents: Any) -> tuple[Any, Any]:
        beta, operands, _ = primals
        result: tuple[Array, Progress] = autodiff.function_call(self, primals)
        call = self.static.call
        # The iteration stops within tolerance / (1 - contraction) of the fixed point; a step of Newton ends closer.
        jacobian, mean = _linearised(call, beta, operands, result[0])
        step = jnp.linalg.solve(jacobian, (mean - result[0])[..., None])[..., 0]
        point = result[0] + jnp.where(result[1].running[..., None], 0.0, step)
        # the point has taken the query's place
        inputs, changes = ((x[0], x[1]._replace(query=None)) for x in (primals, tangents))
        state = directional(lambda x: state_at_point(call, x[0], x[1], point), inputs, changes)
        if state is None:
            return result, unmoved(result)
        jacobian, _ = _linearised(call, beta, operands, point)
        along = jnp.linalg.solve(jacobian, state[1].out[..., None])[..., 0]
        return result, (along, unmoved(result[1]))


def _linearised(
    call: StaticCall, beta: Array, operands: Operands, point: Array
) -> tuple[Array, Array]:
    """$1 - J$ and $G(x)$ at a point."""
    state = covariance_at((call,), None, (operands._replace(query=beta * point),))
    ones = jnp.eye(point.shape[-1], dtype=point.dtype)
    return jnp.expand_dims(ones, range(point.ndim - 1)) - beta * state.covariance, state.out


def _iterate(
    static: RetrievalOptions, beta: Array, operands: Operands, stats: MemoryStats
) -> tuple[Array, Progress]:
    call = static.call
    length = jnp.sqrt(stats.square)
    unit = jnp.where(length > 0, length, 1.0)

    def under_way(carry: tuple[Array, Progress]) -> Array:
        _, progress = carry
        return (progress.passes < static.max_steps) & progress.running.any()

    def step(carry: tuple[Array, Progress]) -> tuple[Array, Progress]:
        point, progress = carry
        state = state_at_point(call, beta, operands, point)
        energies = point_energy(beta, point, state.lse, stats)
        rose = energy_rises(progress, energies, beta, point, state.lse, stats)
        distance = jnp.sqrt(((state.out - point) ** 2).sum(-1))
        running = progress.running
        new = Progress(
            progress.passes + 1,
            progress.steps + running.astype(jnp.int32),
            jnp.where(running, distance / unit, progress.residual),
            lax.dynamic_update_index_in_dim(progress.path, energies, progress.passes, 0),
            energies,
            progress.rose | (running & rose),
            running & (distance > static.tolerance * length),
        )
        return jnp.where(running[..., None], state.out, point), new

    zero = jnp.zeros_like(stats.log_count)
    start = Progress(
        jnp.zeros((), jnp.int32),
        zero.astype(jnp.int32),
        zero,
        jnp.broadcast_to(zero, (static.max_steps, *zero.shape)),
        zero + jnp.inf,
        jnp.zeros_like(zero, bool),
        stats.log_count > -jnp.inf,
    )
    # a fully masked row does not move, and ends at 0
    point = jnp.where(start.running[..., None], operands.query, 0.0)
    return lax.while_loop(under_way, step, (point, start))


def energy_rises(
    progress: Progress, energies: Array, beta: Array, point: Array, lse: Array, stats: MemoryStats
) -> Array:
    """Whether the energies of a point whose F is `lse` exceed the last ones by more than rounding."""
    terms = (point**2).sum(-1) + stats.square + (jnp.abs(lse) + stats.log_count) / beta
    return energies > progress.last + _ROUNDING * jnp.finfo(energies.dtype).eps * terms


def nearest_memory(
    call: StaticCall, beta: Array, operands: Operands, point: Array, stats: MemoryStats
) -> dict[str, Array]:
    """The memory of largest weight at a point: its index, its weight, and its cosine with the point."""
    memories, width = operands.value, point.shape[-1]
    index = jnp.arange(memories.shape[-3], dtype=jnp.int32)
    digits = jnp.stack([index // _BASE**i % _BASE for i in range(_DIGITS)], -1)
    digits = digits.astype(memories.dtype)
    digits = jnp.concatenate([digits, (digits**2).sum(-1, keepdims=True)], -1)
    digits = jnp.zeros_like(memories[..., :1]) + jnp.expand_dims(
        digits, (*range(memories.ndim - 3), -2)
    )
    marked = operands._replace(query=beta * point, value=jnp.concatenate([memories, digits], -1))
    direction = jnp.concatenate([point, jnp.zeros_like(point, shape=(*point.shape[:-1], 4))], -1)
    doubt = jnp.sqrt((point**2).sum(-1) * stats.square)
    result, lse = _furthest_along(call, marked, direction, doubt)
    memory, digits, squares = jnp.split(result, [width, width + _DIGITS], -1)
    # memories that share the largest score show as a variance of the indices
    digits, squares = lax.stop_gradient((digits, squares[..., 0]))
    unique = jnp.isfinite(lse) & (squares - (digits**2).sum(-1) < 0.1)
    units = jnp.asarray([_BASE**i for i in range(_DIGITS)], jnp.int32)
    which = jnp.round(digits).astype(jnp.int32) * jnp.expand_dims(units, range(lse.ndim))
    along = (point * memory).sum(-1)
    lengths = (point**2).sum(-1) * (memory**2).sum(-1)
    some = lengths != 0
    cosine = jnp.where(some, along / jnp.sqrt(jnp.where(some, lengths, 1.0)), 0.0)
    score = jnp.where(holds_keys(lse), beta * along - lse, -jnp.inf)
    return {
        "nearest": jnp.where(unique, which.sum(-1).astype(jnp.int32), -1),
        "weight": jnp.exp(jnp.minimum(score, 0.0)),
        "overlap": cosine,
    }


def _furthest_along(
    call: StaticCall, operands: Operands, direction: Array, doubt: float | Array
) -> tuple[Array, Array]:
    # the value that is furthest along a direction (the weighted mean of several, within rounding of `doubt`), and F
    top = support_at((call,), (operands,), direction)
    floor = top - _ROUNDING * jnp.finfo(top.dtype).eps * lax.stop_gradient(doubt)
    rows = lax.stop_gradient(direction), floor[..., None]
    width = 1 + operands.value.shape[-1]
    state = mean_over_keys((call,), None, (operands,), _sum_furthest, width, *rows)
    total, values = state.out[..., :1], state.out[..., 1:]
    return values / jnp.where(total > 0, total, 1.0), state.lse


def _sum_furthest(block: reductions.ScoreBlock, direction: Array, floor: Array) -> Array:
    exact = precision(direction.dtype)
    furthest = outer(direction, block.value, exact) >= floor
    weights = jnp.where(furthest, block.weights, 0.0)
    total = weights.sum(-1, keepdims=True)
    return jnp.concatenate([total, product(weights, block.value, exact)], -1)
