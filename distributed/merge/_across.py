"""Folds the states of all devices, inside `jax.shard_map`."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from energy_attn.kernels import AttentionState, CovarianceState
from energy_attn.kernels.internal import (
    State,
    autodiff,
    check_state,
    checks,
    covariance_term,
    derivatives,
    holds_keys,
    share,
)

from ..cost._interconnects import usual_topology
from ..cost._network import Topology
from ..cost._shape import Shape
from ._abstract import AbstractMessageMerge, Axes, narrowed, packed, transfer, unpacked
from ._strategies import COVARIANCE_MERGES, STRATEGIES, MergeOption, check_merge, fastest_merge

AxisName = str | Axes


def merge_across(
    state: State,
    axis_name: AxisName,
    merge: MergeOption = "auto",
    *,
    topology: Topology | None = None,
) -> State:
    r"""The state of all keys, from the state of each device's own.

    $$m = \max_i F_i, \qquad
      \mathrm{out} = \frac{\sum_i \mathrm{out}_i\, e^{F_i - m}}{\sum_i e^{F_i - m}}, \qquad
      F = m + \log \sum_i e^{F_i - m}$$

    No strategy sends anything that depends on the number of keys;
    [`cost.transfers`][energy_attn.distributed.cost.transfers] predicts the collectives of each strategy, and
    [choosing](../choosing.md#what-each-strategy-sends) describes them. All but `"allreduce"` only move
    states, and fold them in the same order everywhere: the results on all devices are bitwise equal.
    `"gather"`, `"hierarchical"` and `"ring"` move states in their own dtypes. With `out` in `lse`'s dtype,
    as a [`Tree`][energy_attn.distributed.methods.Tree] passes it, the result is rounded once.

    Derivatives, of any order and in both modes, are the same for all strategies. The gradient with respect
    to a device's own state needs no communication: with $w_i = e^{F_i - F}$,

    $$\mathrm{d}F = \sum_i w_i\, \mathrm{d}F_i, \qquad \mathrm{d\,out} = \sum_i w_i
      \left(\mathrm{d\,out}_i + (\mathrm{out}_i - \mathrm{out})\, \mathrm{d}F_i\right)$$

    Args:
        state: this device's `out` `[..., H]` and `lse` `[...]`. A device that holds no keys
            passes the empty state. A [`CovarianceState`][energy_attn.kernels.CovarianceState] folds
            by `"gather"` or `"butterfly"` (`"auto"`), with $R (H^2 + H + 1)$ numbers to a state.
        axis_name: the mesh axis, or several, slow ones first: they are folded together.
        merge: the strategy, a name of the table in [choosing](../choosing.md#what-each-strategy-sends), or
            `"auto"`: the fastest by [`cost`][energy_attn.distributed.cost.choose_merge].
        topology: latency and bandwidth of the axes, for `"auto"`; None: those usual for the
            platform in use.

    Returns:
        The folded state, equal on all devices of the axes: `out` in its own dtype (the sums are in
        `lse`'s), `lse` in float32 (float64).

    Raises:
        TypeError: `state` is no `AttentionState`, `axis_name` no name, `topology` no topology.
        ValueError: an axis repeats or is not bound (called outside `jax.shard_map`), an unknown
            strategy, `"hierarchical"` over a single axis, or a strategy by which covariances do not
            fold.

    Source: Tree Attention (arXiv 2408.04093), Algorithm 3 with $m = \max_i F_i$.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from energy_attn.distributed import make_mesh, merge_across
        >>> from energy_attn.kernels import AttentionState
        >>> spec = jax.sharding.PartitionSpec("device")
        >>> def f(out, lse):
        ...     return merge_across(AttentionState(out[0], lse[0]), "device", "butterfly")
        >>> mesh = make_mesh((jax.device_count(),), ("device",))
        >>> parts = jnp.ones((jax.device_count(), 3, 4)), jnp.zeros((jax.device_count(), 3))
        >>> with jax.set_mesh(mesh):
        ...     jax.shard_map(f, in_specs=spec, out_specs=jax.P())(*parts).out.shape
        (3, 4)
    """
    check_state("state", state)
    axes = check_axes(axis_name)
    check_merge(merge, len(axes))
    check_topology(topology, len(axes))
    if isinstance(state, CovarianceState) and merge not in (*COVARIANCE_MERGES, "auto"):
        names = ", ".join(map(repr, COVARIANCE_MERGES))
        raise ValueError(f"merge: wanted {names} or 'auto' for covariances, got {merge!r}")
    return fold_across(resolve_merge(merge, state, axes, topology), axes, state)


def logsumexp_across(
    lse: Float[Array, "..."],
    axis_name: AxisName,
    merge: MergeOption = "auto",
    *,
    topology: Topology | None = None,
) -> Float[Array, "..."]:
    r"""The free energy of all keys, from the free energy of each device's own keys.

    $$F = m + \log \sum_i e^{F_i - m}, \qquad m = \max_i F_i$$

    with $m$ held constant in every derivative, which changes none. `jax.grad` of this in a
    replicated source is Algorithm 2: one more all-reduce sums the devices' gradients.

    Args:
        lse: this device's energies, of any shape, float32 or float64; minus infinity for no keys. Other arguments and
            errors are those of [`merge_across`][energy_attn.distributed.merge_across].

    Returns:
        The energies, equal on all devices of the axes.

    Source: Tree Attention (arXiv 2408.04093), Algorithm 1 with $m$ added back.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from energy_attn.distributed import logsumexp_across, make_mesh
        >>> n = jax.device_count()
        >>> with jax.set_mesh(make_mesh((n,), ("device",))):
        ...     f = jax.shard_map(
        ...         lambda x: logsumexp_across(x, "device"),
        ...         in_specs=jax.P("device"), out_specs=jax.P(),
        ...     )
        ...     bool(jnp.allclose(f(jnp.zeros(n)), jnp.log(n)))
        True
    """
    lse = checks.check_floating("lse", lse)
    if lse.dtype not in (jnp.float32, jnp.float64):
        raise TypeError(f"lse: wanted a float32 or float64 array, got {checks.received(lse)}")
    axes = check_axes(axis_name)
    check_merge(merge, len(axes))
    check_topology(topology, len(axes))
    lse = jnp.asarray(lse)
    state = AttentionState(jnp.zeros((*lse.shape, 0), lse.dtype), lse)  # an output of no width
    return fold_across(resolve_merge(merge, state, axes, topology), axes, state).lse


def check_axes(axis_name: object) -> Axes:
    """Returns the axis names as a tuple; raises unless they differ and the surrounding `shard_map` binds them."""
    axes = (axis_name,) if isinstance(axis_name, str) else axis_name
    if not isinstance(axes, tuple) or not axes or not all(isinstance(x, str) for x in axes):
        raise TypeError(
            f"axis_name: wanted the name of a mesh axis, or a tuple of names, "
            f"got {checks.received(axis_name)}"
        )
    if len(set(axes)) != len(axes):
        raise ValueError(f"axis_name: wanted different mesh axes, got {axes}")
    for axis in axes:
        try:
            lax.axis_size(axis)
        except NameError:
            raise ValueError(
                f"axis_name: wanted mesh axes of the surrounding jax.shard_map, got {axis!r}, "
                f"which is not bound here"
            ) from None
    return axes


def check_topology(topology: object, axes: int) -> None:
    if topology is None:
        return
    if not isinstance(topology, Topology):
        raise TypeError(
            f"topology: wanted a cost.Topology or None, got {checks.received(topology)}"
        )
    if len(topology.links) != axes:
        raise ValueError(
            f"topology: wanted a link for each of the {axes} mesh axes, got {len(topology.links)}"
        )


def fold_across(merge: str, axes: Axes, state: State) -> State:
    return autodiff.function_call(_FoldOfStates(merge, axes), state)


@dataclasses.dataclass(frozen=True)
class _FoldOfStates(autodiff.AbstractFunction):
    merge: str
    axes: Axes

    # (out, F) of all keys from the (out_i, F_i) of each device's keys, as the formula of `merge_across`
    def apply(self, args: State) -> State:
        strategy = STRATEGIES[self.merge]
        if isinstance(args, AttentionState):
            return strategy.fold(args, self.axes)
        assert isinstance(strategy, AbstractMessageMerge)
        return strategy.fold(args, self.axes)

    def jvp(self, primals: State, tangents: Any) -> tuple[State, State]:
        merged: Any = autodiff.function_call(self, primals)
        if isinstance(merged, AttentionState):
            merged = derivatives.with_checkpoint_names(merged)
        return merged, _fold_tangent(
            self.axes, primals, merged, autodiff.with_zeros(tangents, primals)
        )


# With w = e^{F_i - F} and d = out_i - out, all sums over the devices,
#     dF = Σ w dF_i,   dout = Σ w (dout_i + d dF_i),
#     dΣ = Σ w (dΣ_i + (Σ_i + d dᵀ - Σ) dF_i + d dout_iᵀ + dout_i dᵀ).
# The terms of the change of the common mean cancel: Σ w d = 0. One all-reduce sums the devices' terms; its
# transpose sends nothing.
def _fold_tangent(axes: Axes, state: State, merged: State, change: State) -> State:
    dtype = state.lse.dtype
    # a shard without keys has the weight 0; what it holds must not make a NaN
    present = holds_keys(state.lse)
    portion = share(state.lse, merged.lse)
    energy = jnp.where(present, change.lse, 0.0)
    deviation = state.out.astype(dtype) - merged.out.astype(dtype)
    d_out = change.out.astype(dtype)
    out = (d_out + deviation * energy[..., None]) * portion[..., None]
    out = jnp.where(present[..., None], out, 0.0)
    message = AttentionState(out, portion * energy)
    if isinstance(state, CovarianceState):
        assert isinstance(merged, CovarianceState) and isinstance(change, CovarianceState)
        of_matrix = (..., None, None)
        outer = deviation[..., :, None] * d_out[..., None, :]
        covariance = change.covariance.astype(dtype) + outer + outer.swapaxes(-1, -2)
        weighted = covariance_term(state, AttentionState(*merged[1:]))
        weighted -= portion[of_matrix] * merged.covariance.astype(dtype)
        covariance = portion[of_matrix] * covariance + weighted * energy[of_matrix]
        covariance = jnp.where(present[of_matrix], covariance, 0.0)
        message = packed(CovarianceState(covariance, *message))
    total = transfer(lambda x: lax.psum(x, axes), message)
    return narrowed(unpacked(total, state), state)


def resolve_merge(merge: str, state: State, axes: Axes, topology: Topology | None) -> str:
    if isinstance(state, CovarianceState):
        return merge if merge in COVARIANCE_MERGES else "butterfly"
    if state.lse.size == 0:
        return "allreduce"  # HLO exchanges no empty arrays
    if merge == "auto":
        rows, width = state.lse.size, state.out.shape[-1]
        shape = Shape(1, rows, 0, 1, 1, width, dtype=state.out.dtype.name)
        mesh = jax.sharding.get_abstract_mesh()
        return fastest_merge(shape, topology or usual_topology(mesh, axes))
    return merge
