"""The reductions that observables are built from: state, covariance and means at a source.

Each takes a prepared call, works for every implementation, and is merged over the mesh of the call.
"""

import functools
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
    sharded_reduction,
)
from energy_attn.kernels import AttentionState, CovarianceState
from energy_attn.kernels.internal import (
    BlockTerm,
    CheckedCall,
    Operands,
    Settings,
    centred,
    check_floating,
    check_shape,
    covariance,
    expectation,
    holds_keys,
    lse_dtype,
    support_function,
)

from ..core._free_energy import Arrays, Prepared, check_at, prepare, state_at


def prepare_widened(
    query: Any, key: Any, value: Any, bias: Any = None, mask: Any = None, **options: Any
) -> tuple[Prepared, Arrays]:
    """As `prepare`, with 16-bit arrays widened to float32, the precision of energies.

    Raises as `free_energy` does.
    """
    call, arrays = prepare(query, key, value, bias, mask, **options)
    wide = functools.partial(jnp.asarray, dtype=lse_dtype(arrays.query.dtype))
    query, key, value = map(wide, arrays[:3])
    return call, arrays._replace(query=query, key=key, value=value)


def prepare_with_source(
    query: Any, key: Any, value: Any, source: Any, bias: Any, mask: Any, **options: Any
) -> tuple[Prepared, Array | None, Arrays]:
    """As `prepare_widened`, and the source (or None) in the dtype of the arrays.

    Raises as `free_energy` does.
    """
    call, arrays = prepare_widened(query, key, value, bias, mask, **options)
    return call, None if source is None else check_row_vectors("source", source, arrays), arrays


def check_row_vectors(name: str, x: Any, arrays: Arrays) -> Array:
    """Returns an array with one vector of the values' width per row, in the dtype of the arrays.

    Raises `TypeError` if it is not a floating array and `ValueError` for a wrong shape.
    """
    check_shape(name, check_floating(name, x), (*arrays.query.shape[:-1], arrays.value.shape[-1]))
    return jnp.asarray(x, arrays.query.dtype)


def covariance_at(call: Prepared, source: Any, arrays: Arrays) -> CovarianceState:
    r"""$\nabla^2 F$, $\nabla F$ and $F$ at a source. Raises as the kernels do."""
    reduction = Reduction(HashablePartial(covariance, (call.names,)), fold_covariances)
    return run_reduction(call, reduction, check_at(call, source, arrays))


def covariance_product(
    call: Prepared, source: Any, arrays: Arrays, tangent: Array
) -> tuple[AttentionState, Array]:
    r"""The state at a source, and $\nabla^2 F\, u$: attention and its pullback along $u$.

    The Hessian is symmetric, so the pullback of a cotangent by $\nabla F$ is the derivative of
    $\nabla F$ along it. Raises as the kernels do.
    """
    middle, origin = centred(arrays)
    zero = jnp.zeros_like(tangent)  # a traced zero, which can be differentiated in
    found, pull_back = jax.vjp(
        lambda source: state_at(call, source, middle), zero if source is None else source
    )
    (product,) = pull_back(AttentionState(tangent, jnp.zeros_like(found.lse)))
    number = arrays.query.shape[-2]
    heads = *origin.shape[:-1], number // origin.shape[-2], origin.shape[-1]
    origin = jnp.broadcast_to(origin[..., None, :], heads)
    origin = origin.reshape(*origin.shape[:-3], number, origin.shape[-1])
    out = jnp.where(holds_keys(found.lse)[..., None], found.out + origin, 0.0)
    lse = found.lse if source is None else found.lse + (source * origin).sum(-1)
    return AttentionState(out, lse), product


def expectation_at(
    call: Prepared, source: Any, arrays: Arrays, term: BlockTerm, width: int, *rows: Array
) -> AttentionState:
    """The mean of a block term (see `kernels.internal.expectation`), and the energies.

    `rows` are `[*B, T, N, W]`. Raises as the kernels do.
    """
    reduction = Reduction(HashablePartial(expectation, (term, width, call.names)), fold_states)
    return run_reduction(call, reduction, check_at(call, source, arrays), *rows)


def support_at(call: Prepared, arrays: Arrays, direction: Array) -> Array:
    r"""$\max_a u \cdot v_a$ over the keys that a row sees; minus infinity in a fully masked row."""
    reduction = Reduction(HashablePartial(support_function), fold_maxima)
    return run_reduction(
        call, reduction, check_at(call, None, arrays), jax.lax.stop_gradient(direction)
    )


class HashablePartial(NamedTuple):
    """A function with its first arguments; unlike `functools.partial` it compares by value."""

    function: Callable[..., Any]
    first: tuple[Any, ...] = ()

    def __call__(self, settings: Settings, operands: Operands, *rows: Array) -> Any:
        return self.function(*self.first, settings, operands, *rows)


def run_reduction(call: Prepared, reduction: Reduction, given: CheckedCall, *rows: Array) -> Any:
    """Runs a reduction on a checked call; the result has a batch axis if the arrays had one.

    Raises as the reduction does.
    """
    if given.batched:
        return sharded_reduction(call.plan, reduction, given, *rows)
    found = sharded_reduction(call.plan, reduction, given, *(x[None] for x in rows))
    return jax.tree.map(lambda x: x[0], found)
