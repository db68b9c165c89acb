"""The reductions of observables, at a source: state, covariance and means over the keys of prepared calls."""

# The calls have disjoint keys. A reduction works for every implementation, and is merged over the mesh of each call and
# over the calls by the same algebra.

import functools
import operator
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from energy_attn.distributed.internal import Reduction
from energy_attn.kernels import AttentionState, CovarianceState, Operands, Settings, merge
from energy_attn.kernels.internal import (
    CallPolicy,
    Tokens,
    additions,
    attend_and_maximum,
    batches,
    checks,
    holds_keys,
    lse_dtype,
    outer,
    precision,
    reductions,
    score_sums,
    window_structure,
)

from ..functional._free_energy import Calls, Parts, Source, StaticCall, row_shape, state_at


def promoted(parts: Parts) -> Parts:
    """Promotes the arrays to the precision of energies."""
    dtype = lse_dtype(*(x.query.dtype for x in parts))

    def promote(x: Array) -> Array:
        same = isinstance(x, jax.Array) and x.dtype == dtype
        return x if same else jnp.asarray(x, dtype)

    return tuple(
        x._replace(query=promote(x[0]), key=promote(x[1]), value=promote(x[2])) for x in parts
    )


def check_row_vectors(name: str, x: object, calls: Calls, parts: Parts) -> Array:
    """Returns an array with one vector of the values' width per row, in the dtype of the arrays."""
    first, array = parts[0], checks.check_floating(name, x)
    checks.check_shape(name, array, row_shape(calls[0], first, first.value.shape[-1]))
    return jnp.asarray(array, first.query.dtype)


def covariance_at(calls: Calls, source: Source, parts: Parts) -> CovarianceState:
    return _over_parts(
        lambda call: HashablePartial(reductions.covariance, (call.policy.kernels,)),
        *("states", merge, calls, source, parts),
    )


def covariance_product(
    calls: Calls, source: Source, parts: Parts, tangent: Array
) -> tuple[AttentionState, Array]:
    r"""The state at a source, and $\nabla^2 F\, u$: attention and its pullback along $u$.

    The Hessian is symmetric, so the pullback of a cotangent by $\nabla F$ is the derivative of
    $\nabla F$ along it.
    """
    middle, origin = centred_parts(parts)
    origin = batches.restored(origin, calls[0].axes)
    zero = jnp.zeros_like(tangent)  # a traced zero, which can be differentiated in
    result, pull_back = jax.vjp(
        lambda source: state_at(calls, source, middle), zero if source is None else source
    )
    (product,) = pull_back(AttentionState(tangent, jnp.zeros_like(result.lse)))
    # not `jnp.repeat`, which refuses heads over explicit mesh axes
    *rows, kv_heads, width = origin.shape
    heads = parts[0].query.shape[-2]
    grouped = *rows, kv_heads, heads // kv_heads, width
    origin = jnp.broadcast_to(origin[..., None, :], grouped).reshape(*rows, heads, width)
    out = jnp.where(holds_keys(result.lse)[..., None], result.out + origin, 0.0)
    lse = result.lse if source is None else result.lse + (source * origin).sum(-1)
    return AttentionState(out, lse), product


def centred_parts(parts: Parts) -> tuple[Parts, Array]:
    """Values relative to the middle of the range of the first part's, and that origin."""
    first, origin = reductions.centred(parts[0])
    return (first, *(x._replace(value=x.value - origin) for x in parts[1:])), origin


def mean_over_keys(
    calls: Calls, source: Source, parts: Parts, term: reductions.BlockTerm, width: int, *rows: Array
) -> AttentionState:
    """The mean over all keys of a block term that is linear in the weights, and the energies.

    `rows`, `[*B, T, N, W]`, are passed to the term.
    """
    # The means of parts and devices, each with the weights of its own keys, are merged by their shares. That is wrong
    # for a term that is not linear in the weights: use `sum_over_keys`.
    return _over_parts(
        lambda call: HashablePartial(reductions.expectation, (term, width, call.policy.kernels)),
        *("states", merge, calls, source, parts, *rows),
    )


def sum_over_keys(
    calls: Calls, source: Source, parts: Parts, term: Callable[..., Array], width: int, *rows: Array
) -> Array:
    """The sum over all keys of any function `term(scores, value, *rows)` of a score, `[*B, T, N, width]`.

    `rows`, `[*B, T, N, W]`, are numbers of all keys, such as the energy F in `exp(s - F)`.
    """
    find = HashablePartial(score_sums, (term, width))
    return _over_parts(lambda _: find, "sums", operator.add, calls, source, parts, *rows)


def squared_distances(value: Array, mean: Array) -> Array:
    """The squared distances `[B, rows, keys]` of a block's values from a vector for each row."""
    # |v - m|² = |v|² - 2 v·m + |m|², with the block's mean as the origin
    origin = value.mean(1, keepdims=True)
    value, mean = value - origin, mean - origin
    cross = outer(mean, value, precision(mean.dtype))
    squares = (value**2).sum(-1)[:, None, :] + (mean**2).sum(-1, keepdims=True)
    return squares - 2 * cross


def support_at(calls: Calls, parts: Parts, direction: Array) -> Array:
    r"""$\max_a u \cdot v_a$ over the keys that a row sees; minus infinity in a fully masked row."""
    direction, find = jax.lax.stop_gradient(direction), HashablePartial(reductions.support_function)
    return _over_parts(lambda _: find, "maxima", jnp.maximum, calls, None, parts, direction)


def score_maximum_at(calls: Calls, parts: Parts, source: Source = None) -> Array:
    r"""$\max_a s_a$ over the keys that a row sees; minus infinity in a fully masked row."""
    find = HashablePartial(reductions.score_maximum)
    return _over_parts(lambda _: find, "maxima", reductions.larger, calls, source, parts)


def state_and_maximum_at(
    call: StaticCall, operands: Operands, *, unrounded: bool = False
) -> tuple[AttentionState, Array]:
    """The state of a prepared call without its sink, and the largest score of each row; one pass on one device."""
    has_sink, operands = operands.sink is not None, operands._replace(sink=None)
    if call.plan is not None:
        return state_at((call,), None, (operands,)), score_maximum_at((call,), (operands,))
    checks.check_taylor(operands)
    # rounded as by `state_at`, so that XLA computes equal calls once
    settings = call.settings.needing(unrounded=unrounded or has_sink)
    result = attend_and_maximum(call.policy.kernels, settings, operands)
    return jax.tree.map(lambda x: batches.restored(x, call.axes), result)


def largest_scores(calls: Calls, parts: Parts) -> Array:
    """`score_maximum_at`, from the pass that computes attention where there is one on one device."""

    def of_part(call: StaticCall, operands: Operands) -> Array:
        if call.plan is not None:
            return score_maximum_at((call,), (operands,))
        return state_and_maximum_at(call, operands, unrounded=len(calls) > 1)[1]

    return functools.reduce(reductions.larger, map(of_part, calls, parts))


class HashablePartial(NamedTuple):
    """A function with its first arguments; unlike `functools.partial` it compares by value."""

    function: Callable[..., Any]
    first: tuple[Any, ...] = ()

    def __call__(self, *others: Any) -> Any:
        return self.function(*self.first, *others)


def _over_parts(
    find: Callable[[StaticCall], HashablePartial],
    fold: Literal["states", "sums", "maxima"],
    join: Callable[[Any, Any], Any],
    calls: Calls,
    source: Source,
    parts: Parts,
    *rows: Array,
) -> Any:
    result = (
        run_reduction(call, Reduction(find(call), fold), source, operands, *rows)
        for call, operands in zip(calls, parts, strict=True)
    )
    return functools.reduce(join, result)


def run_reduction(
    call: StaticCall, reduction: Reduction, source: Source, operands: Operands, *rows: Array
) -> Any:
    """Runs a reduction at a source; source, rows and result have a batch axis if the user's arrays had one."""
    source, rows = jax.tree.map(lambda x: batches.joined(x, len(call.axes)), (source, rows))
    at = call.settings, operands
    if source is not None:
        at = additions.with_source(*at, jnp.asarray(source))
    result = reduction.over(call.plan, *at, *rows)
    return jax.tree.map(lambda x: batches.restored(x, call.axes), result)


def sinks_as_keys(calls: Calls, parts: Parts) -> tuple[Calls, Parts]:
    """Returns the measure without sinks: each becomes a part of one key, after all other parts, in order.

    A sink of plus infinity has the largest score that there is: all the weight, and differences of scores
    that are numbers.
    """
    plain = tuple(operands._replace(sink=None) for operands in parts)
    sinks = [_as_key(*x) for x in zip(calls, parts, strict=True) if x[1].sink is not None]
    return (*calls, *(call for call, _ in sinks)), (*plain, *(operands for _, operands in sinks))


def _as_key(call: StaticCall, operands: Operands) -> tuple[StaticCall, Operands]:
    """A key of zeros with the value zero and the sink as its bias, for the queries that are present."""
    key, value = (
        jnp.zeros((len(x), 1, *x.shape[2:]), x.dtype) for x in (operands.key, operands.value)
    )
    sink = jnp.asarray(operands.sink, lse_dtype(operands.query.dtype))
    bias = jnp.where(jnp.isposinf(sink), jnp.finfo(sink.dtype).max, sink)[..., None, None]
    bias, positions = bias if bias.ndim == 4 else bias[None], operands.tokens.query_positions
    at = None if positions is None else jnp.zeros((1, 1), positions.dtype)
    tokens = Tokens(positions, at, query_lengths=operands.tokens.query_lengths)
    sinks = Operands(operands.query, key, value, bias, tokens=tokens)
    # replicated, so that nothing is folded over devices; one column of scores is dense
    plan = None if call.plan is None else call.plan._replace(sequence=(), queries=False)
    settings = Settings(1.0, window_structure())
    return call._replace(policy=CallPolicy(("reference",)), plan=plan, settings=settings), sinks
