"""The free energy, and attention as its gradient."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Unpack

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Bool, Float

from energy_attn.distributed import SequenceParallel
from energy_attn.distributed.internal import (
    ShardingPlan,
    attend_sharded,
    fit_plan,
    place_by,
    plan_call,
)
from energy_attn.kernels import AttentionState, Operands, Settings, merge
from energy_attn.kernels.internal import (
    CallPolicy,
    MergedScoreOptions,
    RowOptions,
    additions,
    all_computed,
    arguments,
    batches,
    call_policy,
    check_options,
    differentiated_by_jax,
    is_static,
    mesh_axes,
    tried,
)
from energy_attn.kernels.masks import AbstractMask

from ._citation import cite
from ._tag import recorders, tagged


class EnergyOptions(MergedScoreOptions, total=False):
    """The options of an energy, which do not depend on queries and keys."""

    parallel: SequenceParallel | None
    """How keys are sharded over the current mesh. None: they are not, unless the type of `key` says
    that its sequence is sharded (explicit mesh axes)."""


class ModuleOptions(EnergyOptions, total=False):
    """The fields of a `FreeEnergy`."""

    mask: AbstractMask | None
    """A mask of `energy_attn.masks`, besides causality, the window and the mask of a call."""


class AttentionOptions(EnergyOptions, RowOptions, total=False):
    """The options of an energy, and the positions, lengths and segments of its rows and keys."""


class StaticCall(NamedTuple):
    """The static part of a checked call; its arrays are `Operands`."""

    policy: CallPolicy
    plan: ShardingPlan | None
    settings: Settings
    axes: batches.BatchAxes  # the batch axes of the user's arrays
    at_zero: bool = False  # whether the source is a JAX array of zeros


_TRIED = CallPolicy(tried())  # the policy of a call without `implementation=`

# A NumPy array is known to be zero or not when a call is traced; None is zero.
Source = Array | np.ndarray | None
# Calls with the same rows and disjoint keys, and the arrays of each.
Calls = tuple[StaticCall, ...]
Parts = tuple[Operands, ...]


def free_energy(
    query: Float[Array, "*#B T N H"],
    key: Float[Array, "*#B S K H"],
    value: Float[Array, "*#B S K Hv"],
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
        query: `[*B, T, N, H]` with any number of batch axes, also none; float16, bfloat16, float32 or float64.
        key: `[*B, S, K, H]`; `K` divides `N` (grouped heads). Batch axes of size 1 broadcast among the three arrays.
        value: `[*B, S, K, Hv]`.
        source: $\zeta$, `[B, T, N, Hv]`, one for each query and head; None is zero.
        bias: added to the scaled scores; broadcastable to `[B, N, T, S]`, with all four axes.
        mask: a mask of [`masks`][energy_attn.kernels.masks.AbstractMask], as `Causal() | Prefix(n)`; or
            boolean, shaped like `bias`, True where a key takes part.
        **options: the keys of `AttentionOptions`.

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
    call, operands = prepare(
        query, key, value, bias, mask, name="free_energy", source=source, **options
    )
    return energy_at((call,), source, (operands,))


def prepare(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: object = None,
    *,
    name: str | None = None,
    source: Source = None,
    **options: Unpack[AttentionOptions],
) -> tuple[StaticCall, Operands]:
    """Checks a call before any tracing; returns its static part and its arrays. Raises as `free_energy` does.

    A recording lists the call, at its source, under `name`.
    """
    scored: dict[str, Any] = dict(options)
    implementation, parallel = scored.pop("implementation", None), scored.pop("parallel", None)
    policy = _TRIED
    if implementation is not None or scored.get("reproducible", False) is not False:
        policy = call_policy(implementation, scored.get("reproducible", False))
    arrays = arguments.check_arrays(query, key, value)
    plan = plan_call(parallel, arrays, bias, mask, options)
    place = None if parallel is None else place_by(parallel, plan, arrays)
    checked = arguments.check_scored(arrays, bias, mask, place=place, **scored)
    if plan is not None:
        plan, policy = fit_plan(plan, parallel, policy, checked, mask, options)
    axes = (-1, *checked.axes[1:]) if checked.axes else ()  # one program for all sizes of a shard
    call, operands = StaticCall(policy, plan, checked.settings, axes), checked.operands
    if operands.sink is not None:
        cite("sinks")
    if not differentiated_by_jax(policy.kernels):
        cite("milakov", "flash")
    if plan is not None and plan.axes:
        cite(plan.method.name)
    if source is not None:
        arguments.check_source(source, query, key, value)
    if name is not None and recorders.value:
        call = call._replace(settings=call.settings.needing(maximum=True))
        operands = operands._replace(query=tagged(operands.query, name, call, operands, source))
    return call, operands


def energy_at(calls: Calls, source: Source, parts: Parts) -> Array:
    """The energies of prepared calls over the union of their keys, at a checked source."""
    if source is not None:
        return _energy(calls, source, parts)
    state = state_at(calls, None, parts)
    return both_computed(*state)[1] if recorders.value else state.lse


def attention_and_energy(calls: Calls, parts: Parts, source: Source = None) -> tuple[Array, Array]:
    """Attention, the gradient of the energies with respect to the source (None: at zero), and the energies."""
    if source is None:
        calls, source = _at_zero(calls, parts)

    def total(source: Array) -> tuple[Array, Array]:
        energy = _energy(calls, source, parts)
        return energy.sum(), energy

    result = jax.grad(total, has_aux=True)(source)
    return both_computed(*result) if recorders.value else result


def _at_zero(calls: Calls, parts: Parts) -> tuple[Calls, Any]:
    """The calls at a zero source, and that source."""
    value = parts[0].value
    shape = row_shape(calls[0], parts[0], value.shape[-1])
    zero: Any
    if is_static(*shape):
        # one element, broadcast: known to be zero, and it takes no memory
        zero = np.broadcast_to(np.zeros((), value.dtype), shape)
    else:
        zero = jnp.zeros(shape, value.dtype)
    if not jax.sharding.get_abstract_mesh().empty:
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
    """The shape of an array with an entry for each row, `[*B, T, N, ...]`."""
    return (*batches.restored_shape(operands.query.shape[:-1], call.axes), *widths)


def _varying(call: StaticCall, operands: Operands) -> frozenset[str]:
    """Mesh axes of a surrounding `jax.shard_map` that the energies of a call vary over."""
    varying = frozenset().union(*map(mesh_axes.varying_axes, jax.tree.leaves(operands)))
    if call.plan is not None and call.plan.local and not call.plan.queries:
        varying -= frozenset(call.plan.sequence)  # what is merged does not vary
    return varying


def state_at(calls: Calls, source: Source, parts: Parts) -> AttentionState:
    r"""$\nabla F$ and $F$ at a source, over the union of the keys of prepared calls. Raises as kernels do."""
    axes, value = calls[0].axes, parts[0].value
    source = None if calls[0].at_zero else _unless_zero(source)
    if source is not None:
        source = jnp.asarray(batches.joined(source, len(axes)))
    states = []
    for call, operands in zip(calls, parts, strict=True):
        settings = call.settings
        if source is not None:
            settings, operands = additions.with_source(settings, operands, source)
        settings = settings.needing(unrounded=len(calls) > 1)  # rounded once, after the merge
        states.append(attend_sharded(call.plan, call.policy, settings, operands))
    out, lse = functools.reduce(merge, states)
    return AttentionState(
        batches.restored(out.astype(value.dtype), axes), batches.restored(lse, axes)
    )


def both_computed(out: Array, lse: Array) -> tuple[Array, Array]:
    """Returns both arrays unchanged; a traced program that uses one of them computes both."""
    return _both(out, lse) if isinstance(lse, jax.core.Tracer) else (out, lse)  # pyright: ignore[reportReturnType]  # two


@jax.custom_jvp
def _both(out: Array, lse: Array) -> tuple[Array, ...]:
    return all_computed(out, lse)


@functools.partial(_both.defjvp, symbolic_zeros=True)
def _both_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    return _both(*primals), tangents


def _unless_zero(source: Any) -> Source:
    # A NumPy array is concrete, and nothing differentiates with respect to it here: a derivative of
    # any order would have passed a tracer instead.
    if source is None or isinstance(source, jax.Array):
        return source
    # JAX before 0.9 wraps NumPy arrays during differentiation (https://github.com/jax-ml/jax/pull/29882)
    source = np.asarray(source)
    return source if source.any() else None


# F and its gradient in the source are the two outputs of one kernel pass: dF = out · dζ + the terms of the
# other arguments, by the kernel's own derivative, which runs only for arguments that are
# differentiated. `out` is itself a differentiable function of all arguments, so that attention can be
# differentiated again. A `custom_jvp` does not convert a NumPy source; where JAX loses its rule (see
# `function_call`), the derivative of the function itself is the same.
@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _energy(calls: Calls, source: Source, parts: Parts) -> Array:
    return state_at(calls, source, parts).lse


@functools.partial(_energy.defjvp, symbolic_zeros=True)
def _energy_jvp(
    calls: Calls, primals: tuple[Any, Any], tangents: tuple[Any, Any]
) -> tuple[Array, Array]:
    parts, (change, changes) = primals[1], tangents
    moves = not isinstance(change, SymbolicZero)
    by_jax = moves
    for call in calls:
        by_jax = by_jax and differentiated_by_jax(call.policy.kernels)
    if by_jax:
        result: Any = directional(lambda x: state_at(calls, *x), primals, tangents)
        return result[0].lse, result[1].lse
    state = functools.partial(state_at, calls, primals[0])
    result, along = directional(state, parts, changes) or (state(parts), None)
    rate = None if along is None else along.lse
    if moves:
        by_source = (result.out.astype(result.lse.dtype) * change.astype(result.lse.dtype)).sum(-1)
        rate = by_source if rate is None else by_source + rate
    return result.lse, jnp.zeros_like(result.lse) if rate is None else rate


def unmoved(tree: Any) -> Any:
    """Tangents of a constant tree: None for every leaf."""
    return jax.tree.map(lambda _: None, tree)


def directional(
    function: Callable[[Any], Any], primals: Any, tangents: Any
) -> tuple[Any, Any] | None:
    """`jax.jvp` for tangents that are None or symbolic zeros where they are zero; None if all are."""
    flat, tree = jax.tree.flatten(primals)
    nonzero: dict[int, Array] = {}
    for i, x in enumerate(tree.flatten_up_to(tangents)):
        if x is not None and not isinstance(x, SymbolicZero):
            nonzero[i] = x
    if not nonzero:
        return None

    def of_nonzero(values: dict[int, Array]) -> Any:
        return function(tree.unflatten({**dict(enumerate(flat)), **values}.values()))

    return jax.jvp(of_nonzero, ({i: flat[i] for i in nonzero},), (nonzero,))
