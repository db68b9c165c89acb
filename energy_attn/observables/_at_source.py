"""The reductions that observables are built from: state, covariance and means at a source.

Each takes prepared calls, whose keys are disjoint, works for every implementation, is merged over
the mesh of each call, and over the calls by the same algebra.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from energy_attn.distributed.internal import (
    Reduction,
    fold_covariances,
    fold_maxima,
    fold_states,
    fold_sums,
    sharded_reduction,
)
from energy_attn.kernels import AttentionState, CovarianceState, merge
from energy_attn.kernels.internal import (
    BlockTerm,
    Operands,
    attention_and_expectation,
    centred,
    check_floating,
    check_shape,
    covariance,
    expectation,
    holds_keys,
    lse_dtype,
    score_maximum,
    score_sums,
    support_function,
    with_source,
)

from ..functional._free_energy import Calls, Parts, Source, StaticCall, row_shape, state_at


def promoted(parts: Parts) -> Parts:
    """Arrays with 16-bit ones promoted to float32, the precision of energies."""
    dtype = lse_dtype(*(x.query.dtype for x in parts))

    def promote(x: Array) -> Array:
        same = isinstance(x, jax.Array) and x.dtype == dtype
        return x if same else jnp.asarray(x, dtype)

    return tuple(
        x._replace(query=promote(x[0]), key=promote(x[1]), value=promote(x[2])) for x in parts
    )


def check_row_vectors(name: str, x: object, calls: Calls, parts: Parts) -> Array:
    """Returns an array with one vector of the values' width per row, in the dtype of the arrays.

    Raises `TypeError` if it is not a floating array and `ValueError` for a wrong shape.
    """
    first, array = parts[0], check_floating(name, x)
    check_shape(name, array, row_shape(calls[0], first, first.value.shape[-1]))
    return jnp.asarray(array, first.query.dtype)


def covariance_at(calls: Calls, source: Source, parts: Parts) -> CovarianceState:
    r"""$\nabla^2 F$, $\nabla F$ and $F$ at a source. Raises as the kernels do."""

    def one(call: StaticCall, operands: Operands) -> CovarianceState:
        reduction = Reduction(HashablePartial(covariance, (call.policy.kernels,)), fold_covariances)
        return run_reduction(call, reduction, source, operands)

    return functools.reduce(merge, map(one, calls, parts))


def covariance_product(
    calls: Calls, source: Source, parts: Parts, tangent: Array
) -> tuple[AttentionState, Array]:
    r"""The state at a source, and $\nabla^2 F\, u$: attention and its pullback along $u$.

    The Hessian is symmetric, so the pullback of a cotangent by $\nabla F$ is the derivative of
    $\nabla F$ along it. Raises as the kernels do.
    """
    middle, origin = centred_parts(parts)
    origin = origin if calls[0].batched else origin[0]
    zero = jnp.zeros_like(tangent)  # a traced zero, which can be differentiated in
    found, pull_back = jax.vjp(
        lambda source: state_at(calls, source, middle), zero if source is None else source
    )
    (product,) = pull_back(AttentionState(tangent, jnp.zeros_like(found.lse)))
    number = parts[0].query.shape[-2]
    heads = *origin.shape[:-1], number // origin.shape[-2], origin.shape[-1]
    origin = jnp.broadcast_to(origin[..., None, :], heads)
    origin = origin.reshape(*origin.shape[:-3], number, origin.shape[-1])
    out = jnp.where(holds_keys(found.lse)[..., None], found.out + origin, 0.0)
    lse = found.lse if source is None else found.lse + (source * origin).sum(-1)
    return AttentionState(out, lse), product


def centred_parts(parts: Parts) -> tuple[Parts, Array]:
    """All values relative to the middle of the range of the first part's, and that origin."""
    first, origin = centred(parts[0])
    return (first, *(x._replace(value=x.value - origin) for x in parts[1:])), origin


def attention_and_mean_over_keys(
    call: StaticCall, operands: Operands, term: BlockTerm, width: int
) -> AttentionState:
    """The state of a call, and behind its `out` the mean of a block term: two walks over the keys."""
    find = HashablePartial(attention_and_expectation, (term, width, call.policy.kernels))
    return run_reduction(call, Reduction(find, fold_states), None, operands)


def mean_over_keys(
    calls: Calls, source: Source, parts: Parts, term: BlockTerm, width: int, *rows: Array
) -> AttentionState:
    """The mean of what a block term, which is linear in the weights, sums; and the energies.

    The means of parts and devices, each with weights of its own keys alone, are merged by their shares: of a function
    of the weights that is not linear that is another number, and `sum_over_keys` the right way. `rows` are
    `[*B, T, N, W]`. See `kernels.internal.expectation`. Raises as the kernels do.
    """

    def one(call: StaticCall, operands: Operands) -> AttentionState:
        reduction = Reduction(
            HashablePartial(expectation, (term, width, call.policy.kernels)), fold_states
        )
        return run_reduction(call, reduction, source, operands, *rows)

    return functools.reduce(merge, map(one, calls, parts))


def sum_over_keys(
    calls: Calls,
    source: Source,
    parts: Parts,
    term: Callable[..., Array],
    width: int,
    *rows: Array,
) -> Array:
    """The sum over all keys of `term(scores, value, *rows)`, `[*B, T, N, width]`: of any function of a score.

    What the function needs to know of all keys, as the energy of a row in `exp(s - F)`, are `rows`, `[*B, T, N, W]`.
    See `kernels.internal.score_sums`.
    """

    def one(call: StaticCall, operands: Operands) -> Array:
        reduction = Reduction(HashablePartial(score_sums, (term, width)), fold_sums)
        return run_reduction(call, reduction, source, operands, *rows)

    return functools.reduce(operator.add, map(one, calls, parts))


def support_at(calls: Calls, parts: Parts, direction: Array) -> Array:
    r"""$\max_a u \cdot v_a$ over the keys that a row sees; minus infinity in a fully masked row."""
    direction = jax.lax.stop_gradient(direction)

    def one(call: StaticCall, operands: Operands) -> Array:
        reduction = Reduction(HashablePartial(support_function), fold_maxima)
        return run_reduction(call, reduction, None, operands, direction)

    return functools.reduce(jnp.maximum, map(one, calls, parts))


def score_maximum_at(calls: Calls, parts: Parts, source: Source = None) -> Array:
    r"""$\max_a s_a$ over the keys that a row sees; minus infinity in a fully masked row."""

    def one(call: StaticCall, operands: Operands) -> Array:
        reduction = Reduction(HashablePartial(score_maximum), fold_maxima)
        return run_reduction(call, reduction, source, operands)

    return functools.reduce(jnp.maximum, map(one, calls, parts))


class HashablePartial(NamedTuple):
    """A function with its first arguments; unlike `functools.partial` it compares by value."""

    function: Callable[..., Any]
    first: tuple[Any, ...] = ()

    def __call__(self, *others: Any) -> Any:
        return self.function(*self.first, *others)


def run_reduction(
    call: StaticCall, reduction: Reduction, source: Source, operands: Operands, *rows: Array
) -> Any:
    """Runs a reduction at a source; that, the rows and the result have a batch axis if the user's arrays had one.

    Raises as the reduction does.
    """
    if not call.batched:
        source, rows = jax.tree.map(lambda x: x[None], (source, rows))
    source = None if source is None else jnp.asarray(source)
    at = with_source(call.settings, operands, source)
    found = sharded_reduction(call.plan, reduction, *at, *rows)
    return found if call.batched else jax.tree.map(lambda x: x[0], found)
