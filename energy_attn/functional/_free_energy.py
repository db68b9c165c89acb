"""The free energy, and attention as its gradient."""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple, Unpack

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Bool, Float

from energy_attn.distributed.internal import (
    ShardingPlan,
    attend_sharded,
    check_order,
    in_shard_map,
    local_sharding_plan,
    near_plan,
    place_tokens,
    sharding_plan,
    unbatched,
    warn_of_idle_devices,
)
from energy_attn.kernels import AttentionState, merge
from energy_attn.kernels.internal import (
    CallPolicy,
    Operands,
    Settings,
    call_policy,
    check_arrays,
    check_options,
    check_scored,
    check_source,
    differentiated_by_jax,
    is_static,
    received,
    split_mask,
    varying_axes,
    with_source,
)
from energy_attn.kernels.masks import AbstractMask

from ._citation import cite
from ._directions import directional
from ._options import AttentionOptions
from ._tag import recorders, tagged


class StaticCall(NamedTuple):
    """The static part of a checked call; its arrays are `Operands`.

    `batched`: whether the user's arrays had a batch axis. `at_zero`: whether the source is zero although it is a JAX
    array.
    """

    policy: CallPolicy
    plan: ShardingPlan | None
    settings: Settings
    batched: bool
    at_zero: bool = False


# A NumPy array is known to be zero or not when a call is traced; None is zero.
Source = Array | np.ndarray | None
# Calls with the same rows and disjoint keys, and the arrays of each.
Calls = tuple[StaticCall, ...]
Parts = tuple[Operands, ...]


def free_energy(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K Hv"],
    *,
    source: Float[Array | np.ndarray, "*B T N Hv"] | None = None,
    bias: Float[Array, "..."] | None = None,
    mask: Bool[Array, "..."] | AbstractMask | None = None,
    **options: Unpack[AttentionOptions],
) -> Float[Array, "*B T N"]:
    r"""The free energy of each query and head, whose gradient in the source is attention.

    $$F(\zeta) = \log \sum_a \exp(\mathrm{scale}\; q \cdot k_a + b_a + \zeta \cdot v_a), \qquad
      \frac{\partial F}{\partial \zeta} = \sum_a P_{\zeta,a}\, v_a$$

    $F - F(0)$ is the cumulant generating function of the values under $P = \mathrm{softmax}(s)$, and
    $F(0)$ is the log partition function. `jax.grad` in the source costs one kernel pass and compiles
    to the same program as a direct call of the kernel. Differentiable in query, key, value, source,
    bias, `scale` and `sink`, in both modes and to any order.

    A source that is known to be zero when the call is traced (None, or a NumPy array of zeros) is
    never materialised: `jax.grad(f)(np.zeros(shape))` reads only the values.

    Args:
        query: `[B, T, N, H]` or `[T, N, H]`; float16, bfloat16, float32 or float64.
        key: `[B, S, K, H]` or `[S, K, H]`; `K` divides `N` (grouped heads).
        value: `[B, S, K, Hv]` or `[S, K, Hv]`.
        source: $\zeta$, `[B, T, N, Hv]`, one for each query and head; None is zero.
        bias: added to the scaled scores; of four axes, each 1 or that of `[B, N, T, S]`.
        mask: a mask of [`masks`][energy_attn.kernels.masks.AbstractMask], as `Causal() | Prefix(n)`; or
            boolean, shaped like `bias`, True where a key takes part.
        **options: the keys of `AttentionOptions`, which says what each does.

    Returns:
        Energies `[B, T, N]` in nats; float32, or float64 for float64 inputs. The energy of a fully
        masked row is minus infinity, and its gradients are zero.

    Raises:
        TypeError: an argument is not an array or has the wrong dtype, or an unknown option.
        ValueError: shapes that do not match, values out of range, unknown names.
        NotImplementedError: the named implementation declines the call.

    Source: Tree Attention (arXiv 2408.04093), equations 6 and 15; with one source per query and
    head, equations 16 to 19.

    Examples:
        >>> import jax, jax.numpy as jnp, numpy as np
        >>> import energy_attn as ea
        >>> q, k, v = (jax.random.normal(x, (5, 2, 4)) for x in jax.random.split(jax.random.key(0), 3))
        >>> total = lambda source: ea.free_energy(q, k, v, source=source).sum()
        >>> out = jax.grad(total)(np.zeros(q.shape, q.dtype))
        >>> bool(jnp.allclose(out, jax.nn.dot_product_attention(q, k, v), atol=1e-5))
        True
    """
    check_options(options, AttentionOptions, "source", "bias", "mask")
    arguments = query, key, value, bias, mask
    call, operands = prepare_recorded("free_energy", source, *arguments, **options)
    return energy_at((call,), source, (operands,))


def prepare_recorded(
    name: str,
    source: Source,
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None,
    mask: object,
    **options: Unpack[AttentionOptions],
) -> tuple[StaticCall, Operands]:
    """`prepare` for a call at a source, which is checked, and with what recorders at work ask of it by its name."""
    query = tagged(name, source, query, key, value, bias, mask, **options)
    prepared = prepare(query, key, value, bias, mask, **options)
    if source is not None:
        check_source(source, query, value)
    return prepared


def prepare(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: object = None,
    **options: Unpack[AttentionOptions],
) -> tuple[StaticCall, Operands]:
    """Checks the arguments of a call before any tracing, so that errors name the user's argument.

    Returns the static part of the call and its arrays. Raises as `free_energy` does.
    """
    scored: dict[str, Any] = dict(options)
    policy = call_policy(scored.pop("implementation", None), scored.get("reproducible", False))
    parallel = scored.pop("parallel", None)
    inside = in_shard_map(parallel)
    if inside:
        _check_inside(bias, mask, options)
    arrays = check_arrays(query, key, value)
    sizes = arrays.query.shape[1], arrays.key.shape[1]
    plan = (local_sharding_plan if inside else sharding_plan)(parallel, *arrays[:3])
    place = None
    if parallel is not None:
        place = functools.partial(place_tokens, parallel, plan, *sizes)
    call = check_scored(arrays, bias, mask, place=place, **scored)
    given = any(options.get(name) is not None for name in ("query_positions", "key_positions"))
    rule = None if given else split_mask(mask)[0]
    plan = plan if given else near_plan(plan, parallel, call.settings, call.operands, rule)
    if plan is not None and plan.sequence and options.get("key_positions") is None:
        layout = "contiguous" if parallel is None else parallel.layout
        policy = policy.laid_out(plan.run(layout, sizes[1]))
    if call.operands.sink is not None:
        cite("sinks")
    if not differentiated_by_jax(policy.kernels):
        cite("milakov", "flash")
    if plan is not None and plan.axes:
        cite(plan.method.name)
        if parallel is not None:
            check_order(parallel, plan, options, *sizes)
            warn_of_idle_devices(parallel, plan, call.settings.mask.window, options, *sizes)
    return StaticCall(policy, plan, call.settings, call.batched), call.operands


def _check_inside(bias: object, mask: object, options: Mapping[str, Any]) -> None:
    """Raises `ValueError` for arguments that a single device of a `jax.shard_map` cannot give for all keys."""
    arrays = {"bias": bias, "mask": split_mask(mask)[1], **options}
    for name in ("bias", "mask", "query_seq_lengths", "key_value_seq_lengths"):
        if arrays.get(name) is not None:
            other = "sharded_attention" if name in ("bias", "mask") else "positions"
            raise ValueError(
                f"{name}: wanted None where parallel's axes are those of a surrounding "
                f"jax.shard_map, got {received(arrays[name])}; {other} will do"
            )


def energy_at(calls: Calls, source: Source, parts: Parts) -> Array:
    """The energies of prepared calls over the union of their keys, at a checked source."""
    return (
        _shared(*state_at(calls, source, parts))[1]
        if source is None
        else _energy(calls, source, parts)
    )


def attention_and_energy(calls: Calls, parts: Parts, source: Source = None) -> tuple[Array, Array]:
    """Attention, the gradient of the energies in the source at one (None is zero), and the energies."""
    if source is None:
        calls, source = _at_zero(calls, parts)

    def total(source: Array) -> tuple[Array, Array]:
        energy = _energy(calls, source, parts)
        return energy.sum(), energy

    return _shared(*jax.grad(total, has_aux=True)(source))


def _at_zero(calls: Calls, parts: Parts) -> tuple[Calls, Any]:
    """A source of zeros, and the calls, which know that it is zero."""
    value = parts[0].value
    shape = row_shape(calls[0], parts[0], value.shape[-1])
    zero: Any
    if is_static(*shape):
        # one element, broadcast: known to be zero, and it takes no memory
        zero = np.broadcast_to(np.zeros((), value.dtype), shape)
    else:
        zero = jnp.zeros(shape, value.dtype)
    # Inside shard_map the energies vary between devices, and so must the source: the gradient in
    # a source that does not vary would be summed over the devices.
    varying = frozenset().union(*map(_varying, calls, parts))
    if varying:
        zero = lax.pcast(jnp.asarray(zero), tuple(sorted(varying)), to="varying")
    if isinstance(zero, jax.Array):
        calls = tuple(
            x._replace(at_zero=not differentiated_by_jax(x.policy.kernels)) for x in calls
        )
    return calls, zero


def row_shape(call: StaticCall, operands: Operands, *widths: int) -> tuple[int, ...]:
    """The shape of an array with numbers for each row, `[*B, T, N, ...]`."""
    rows = operands.query.shape[:-1]
    return (*(rows if call.batched else rows[1:]), *widths)


def _varying(call: StaticCall, operands: Operands) -> frozenset[str]:
    """The mesh axes of a surrounding `jax.shard_map` that the energies of a call vary over."""
    varying = frozenset().union(*map(varying_axes, jax.tree.leaves(operands)))
    if call.plan is not None and call.plan.local and not call.plan.queries:
        varying -= frozenset(call.plan.sequence)  # what is merged does not vary
    return varying


def state_at(calls: Calls, source: Source, parts: Parts) -> AttentionState:
    r"""$\nabla F$ and $F$ at a source, over the union of the keys of prepared calls.

    Both are differentiable. Raises as kernels do.
    """
    batched, value = calls[0].batched, parts[0].value
    source = None if calls[0].at_zero else _unless_zero(source)
    if source is not None:
        source = jnp.asarray(source if batched else source[None])
    states = []
    for call, operands in zip(calls, parts, strict=True):
        settings, operands = with_source(call.settings, operands, source)
        settings = settings._replace(unrounded=len(calls) > 1)  # rounded once, after the merge
        states.append(attend_sharded(call.plan, call.policy, settings, operands))
    out, lse = functools.reduce(merge, states)
    state = AttentionState(out.astype(value.dtype), lse)
    return state if batched else unbatched(state)


def _shared(out: Array, lse: Array) -> tuple[Array, Array]:
    """The same arrays; what is recorded of a call finds both in its pass."""
    return both_computed(out, lse) if recorders.value else (out, lse)


def both_computed(out: Array, lse: Array) -> tuple[Array, Array]:
    """The same arrays, of which a traced program computes both if it uses one."""
    return _both(out, lse) if isinstance(lse, jax.core.Tracer) else (out, lse)


# JAX leaves out of a program what is not used of a result. One that uses `lse` of a call and, from
# the same call made again, `out` would then hold two different loops, of which XLA makes no single one.
@jax.custom_jvp
def _both(out: Array, lse: Array) -> tuple[Array, Array]:
    known = lax.optimization_barrier(jnp.asarray(True))
    return (
        jnp.where(known, out, lse[..., None].astype(out.dtype)),
        jnp.where(known, lse, out[..., 0].astype(lse.dtype)),
    )


@functools.partial(_both.defjvp, symbolic_zeros=True)
def _both_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    return _both(*primals), tangents


def _unless_zero(source: Any) -> Source:
    # A NumPy array is concrete, and nothing differentiates with respect to it here: a derivative of
    # any order would have passed a tracer instead.
    if source is None or isinstance(source, jax.Array):
        return source
    source = np.asarray(source)  # JAX before 0.9 wraps NumPy arrays during differentiation
    return source if source.any() else None


# F and its gradient in the source are the two outputs of one kernel pass: dF = out · dζ + what the
# other arguments add, by the kernel's own derivative, which runs only for those that are
# differentiated. `out` is itself a differentiable function of all arguments, so that attention can be
# differentiated again. A `custom_jvp` leaves a NumPy source as it is; where JAX loses its rule (see
# `function_call`), the derivative of the function itself is the same.
@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _energy(calls: Calls, source: Source, parts: Parts) -> Array:
    return state_at(calls, source, parts).lse


@functools.partial(_energy.defjvp, symbolic_zeros=True)
def _energy_jvp(
    calls: Calls, primals: tuple[Any, Any], tangents: tuple[Any, Any]
) -> tuple[Array, Array]:
    source, parts = _unless_zero(primals[0]), primals[1]
    change, changes = jax.tree.map(lambda x: None if isinstance(x, SymbolicZero) else x, tangents)
    at_source, state = change is not None, functools.partial(state_at, calls, source)
    if at_source and all(differentiated_by_jax(call.policy.kernels) for call in calls):
        both, at_source = (
            directional(lambda x: state_at(calls, *x), primals, (change, changes)),
            False,
        )
    else:
        both = directional(state, parts, changes)
    found, along = (state(parts), None) if both is None else both
    if not at_source:
        return found.lse, jnp.zeros_like(found.lse) if along is None else along.lse
    rate = (found.out.astype(found.lse.dtype) * change.astype(found.lse.dtype)).sum(-1)
    return found.lse, rate if along is None else rate + along.lse
