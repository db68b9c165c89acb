"""The free energy, and attention as its gradient."""

import functools
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
    in_shard_map,
    local_sharding_plan,
    sharding_plan,
    warn_of_idle_devices,
    with_local_positions,
    with_positions,
)
from energy_attn.kernels import AttentionState, merge
from energy_attn.kernels.internal import (
    Candidate,
    CheckedCall,
    RowOptions,
    ScoreStructure,
    candidates,
    check_call,
    check_options,
    check_sink,
    check_source,
    differentiated_by_jax,
    is_static,
    received,
    split_mask,
    split_score,
    varying_axes,
    with_unrounded_out,
)
from energy_attn.kernels.masks import AbstractMask

from ._citation import cite
from ._directions import directional
from ._options import AttentionOptions
from ._tag import recorders, tagged


class Prepared(NamedTuple):
    """The static part of a checked call.

    `score`: what is static in the score. `at_zero`: whether the source is zero although it is a JAX
    array. `scored_width`: how much of query and key the score is of, where a source is in them.
    """

    names: tuple[Candidate, ...]
    plan: ShardingPlan | None
    options: tuple[tuple[str, Any], ...]
    score: ScoreStructure | None = None
    at_zero: bool = False
    scored_width: int | None = None


class Arrays(NamedTuple):
    """The arrays of a call, which may be traced, batched and differentiated; without the source.

    `sink`: the scores of the outcome without a value, which no kernel is given.
    """

    query: Any
    key: Any
    value: Any
    bias: Any
    mask: Any
    options: dict[str, Any]
    sink: Any = None


# A NumPy array is known to be zero or not when a call is traced; None is zero.
Source = Array | np.ndarray | None
# Calls with the same rows and disjoint keys, and the arrays of each.
Calls = tuple[Prepared, ...]
Parts = tuple[Arrays, ...]


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
    query = tagged("free_energy", source, query, key, value, bias, mask, **options)
    call, arrays = prepare(query, key, value, bias, mask, **options)
    if source is not None:
        check_source(source, query, value)
    return energy_at((call,), source, (arrays,))


def prepare(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: object = None,
    **options: Unpack[AttentionOptions],
) -> tuple[Prepared, Arrays]:
    """Checks the arguments of a call before any tracing, so that errors name the user's argument.

    Returns the static part of the call and its arrays. Raises as `free_energy` does.
    """
    check_options(options, AttentionOptions)
    parallel, scale = options.get("parallel"), options.get("scale")
    static: dict[str, Any] = {
        "is_causal": options.get("is_causal", False),
        "local_window_size": options.get("local_window_size"),
    }
    traced: dict[str, Any] = {name: options.get(name) for name in RowOptions.__annotations__}
    (traced if isinstance(scale, jax.Array) else static)["scale"] = scale
    score, traced["score"] = split_score(options.get("score"))
    call = Prepared(candidates(options.get("implementation")), None, tuple(static.items()), score)
    arrays = Arrays(query, key, value, bias, mask, traced)
    inside = in_shard_map(parallel)
    if inside:
        _check_inside(arrays)
    given = check_at(call, None, arrays)
    arrays = arrays._replace(sink=check_sink(options.get("sink"), query))
    if arrays.sink is not None:
        cite("sinks")
    if inside:
        plan = local_sharding_plan(parallel, query, key, value)
    else:
        plan = sharding_plan(parallel, query, key, value)
    if not differentiated_by_jax(call.names):
        cite("milakov", "flash")
    if plan is not None and plan.axes:
        cite(plan.method.name)
    rows = given.operands.key_positions, given.operands.query_lengths
    compares = given.compares or any(x is not None for x in rows)
    if parallel is not None and compares:
        size = query.shape[-3], key.shape[-3]
        if plan is not None:
            warn_of_idle_devices(parallel, plan, given.settings.mask.window, traced, *size)
        if plan is not None and plan.local:
            traced = with_local_positions(parallel, plan.queries, traced, *size)
        else:
            traced = with_positions(parallel, traced, *size)
    return call._replace(plan=plan), arrays._replace(options=traced)


def _check_inside(arrays: Arrays) -> None:
    """Raises `ValueError` for arguments that a single device of a `jax.shard_map` cannot give for all keys."""
    given = {"bias": arrays.bias, "mask": split_mask(arrays.mask)[1], **arrays.options}
    for name in ("bias", "mask", "query_seq_lengths", "key_value_seq_lengths"):
        if given[name] is not None:
            other = "sharded_attention" if name in ("bias", "mask") else "positions"
            raise ValueError(
                f"{name}: wanted None where parallel's axes are those of a surrounding "
                f"jax.shard_map, got {received(given[name])}; {other} will do"
            )


def energy_at(calls: Calls, source: Source, parts: Parts) -> Array:
    """The energies of prepared calls over the union of their keys, at a checked source."""
    if source is None or all(differentiated_by_jax(call.names) for call in calls):
        return _shared(*state_at(calls, source, parts))[1]
    return _energy(calls, source, parts)


def attention_and_energy(calls: Calls, parts: Parts, source: Source = None) -> tuple[Array, Array]:
    """Attention, the gradient of the energies in the source at one (None is zero), and the energies."""
    if source is None:
        calls, source = _at_zero(calls, parts)

    def total(source: Array) -> tuple[Array, Array]:
        energy = energy_at(calls, source, parts)
        return energy.sum(), energy

    return _shared(*jax.grad(total, has_aux=True)(source))


def _at_zero(calls: Calls, parts: Parts) -> tuple[Calls, Any]:
    """A source of zeros, and the calls, which know that it is zero."""
    query, value = parts[0].query, parts[0].value
    shape = (*query.shape[:-1], value.shape[-1])
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
        calls = tuple(x._replace(at_zero=not differentiated_by_jax(x.names)) for x in calls)
    return calls, zero


def _varying(call: Prepared, arrays: Arrays) -> frozenset[str]:
    """The mesh axes of a surrounding `jax.shard_map` that the energies of a call vary over."""
    varying = frozenset().union(*map(varying_axes, jax.tree.leaves(arrays)))
    if call.plan is not None and call.plan.local and not call.plan.queries:
        varying -= frozenset(call.plan.sequence)  # what is merged does not vary
    return varying


def check_at(call: Prepared, source: Source, arrays: Arrays) -> CheckedCall:
    """A prepared call at a source, in the form that kernels take."""
    score = None if call.score is None else call.score.bind(arrays.options["score"])
    options: Any = dict(call.options) | arrays.options | {"score": score}
    return check_call(*arrays[:3], source, *arrays[3:5], call.scored_width, **options)


def state_at(calls: Calls, source: Source, parts: Parts) -> AttentionState:
    r"""$\nabla F$ and $F$ at a source, over the union of the keys of prepared calls.

    Both are differentiable. Raises as kernels do.
    """
    source = None if calls[0].at_zero else _unless_zero(source)
    if len(calls) == 1:
        call, arrays = calls[0], parts[0]
        return attend_sharded(call.plan, call.names, check_at(call, source, arrays), arrays.sink)

    def unrounded(call: Prepared, arrays: Arrays) -> AttentionState:
        given = check_at(call, source, arrays)
        given = given._replace(settings=with_unrounded_out(given.settings))
        return attend_sharded(call.plan, call.names, given, arrays.sink)

    out, lse = functools.reduce(merge, map(unrounded, calls, parts))
    return AttentionState(out.astype(parts[0].value.dtype), lse)


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
    state = functools.partial(state_at, calls, source)
    both = directional(state, parts, changes)
    found, along = (state(parts), None) if both is None else both
    if change is None:
        return found.lse, jnp.zeros_like(found.lse) if along is None else along.lse
    rate = (found.out.astype(found.lse.dtype) * change.astype(found.lse.dtype)).sum(-1)
    return found.lse, rate if along is None else rate + along.lse
