"""How keys are spread over a mesh, and attention over keys that are."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array

from energy_attn.kernels import AttentionState
from energy_attn.kernels._arguments import Call, Operands, Settings
from energy_attn.kernels._errors import received
from energy_attn.kernels._registry import attend

from ._merge import merge_across

_CHOICES = {
    "method": ("tree", "auto"),
    "merge": ("allreduce", "auto"),
    "layout": ("contiguous",),
}


@dataclasses.dataclass(frozen=True, init=False)
class SequenceParallel:
    r"""How the keys of an attention are spread along their sequence over a mesh.

    Device $i$ of the axes holds a contiguous part of keys and values; queries are replicated.
    Free energies of the parts add by logaddexp, so one associative reduction gives the whole.

    Attributes:
        axes: the mesh axes that the sequence of keys is sharded over, slow ones first.
        method: `"tree"`: local states, then one reduction. `"auto"` chooses; today it is `"tree"`.
        merge: `"allreduce"`: one pmax, then numerator and denominator in one psum. `"auto"`
            chooses; today it is `"allreduce"`.
        layout: `"contiguous"`: device $i$ holds the $i$-th part of the sequence.

    Raises:
        TypeError: `axes` are no names.
        ValueError: axes that repeat, or an unknown method, merge or layout.

    Source: Tree Attention (arXiv 2408.04093), section 5.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import energy_attn as ea
        >>> from energy_attn.distributed import SequenceParallel, make_mesh
        >>> q, k = jnp.ones((1, 1, 2, 4)), jnp.ones((1, 64, 2, 4))
        >>> with jax.set_mesh(make_mesh((jax.device_count(),), ("device",))):
        ...     ea.attention(q, k, k, parallel=SequenceParallel("device")).shape
        (1, 1, 2, 4)
    """

    axes: tuple[str, ...]
    method: str
    merge: str
    layout: str

    def __init__(
        self,
        axes: str | Sequence[str] = ("node", "device"),
        method: Literal["tree", "auto"] = "auto",
        merge: Literal["allreduce", "auto"] = "auto",
        layout: Literal["contiguous"] = "contiguous",
    ) -> None:
        names = (axes,) if isinstance(axes, str) else axes
        if (
            not isinstance(names, Sequence)
            or not names
            or not all(isinstance(name, str) for name in names)
        ):
            raise TypeError(f"axes: wanted names of mesh axes, got {received(axes)}")
        if len(set(names)) != len(names):
            raise ValueError(f"axes: wanted different names, got {tuple(names)}")
        given = {"method": method, "merge": merge, "layout": layout}
        for field, choices in _CHOICES.items():
            if given[field] not in choices:
                raise ValueError(
                    f"{field}: wanted one of {', '.join(map(repr, choices))}, got {given[field]!r}"
                )
        for field, value in {"axes": tuple(names), **given}.items():
            object.__setattr__(self, field, value)


def sharding_of(key: Any, sequence_axis: int) -> SequenceParallel | None:
    """The way in which `key`'s type says that its sequence is sharded; None if it does not say.

    Only explicit mesh axes are part of an array's type (`jax.typeof`). Raises nothing.
    """
    if not isinstance(key, jax.Array):
        return None
    sharding = jax.typeof(key).sharding
    spec = sharding.spec
    axes = spec[sequence_axis] if sequence_axis < len(spec) else None
    if not axes or sharding.mesh.empty:
        return None
    return SequenceParallel(axes)


def check_mesh(parallel: Any) -> int:
    """The number of devices that `parallel` spreads over, on the mesh in force.

    Raises `TypeError` if it is no `SequenceParallel`, and `ValueError` if no mesh is in force,
    an axis is not in it, or an axis is already taken by a surrounding `shard_map`.
    """
    if not isinstance(parallel, SequenceParallel):
        raise TypeError(f"parallel: wanted a SequenceParallel or None, got {received(parallel)}")
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        raise ValueError(
            f"parallel: wanted a mesh in force with the axes {parallel.axes}, got none; "
            "use jax.set_mesh(mesh)"
        )
    for axis in parallel.axes:
        if axis not in mesh.axis_names:
            raise ValueError(
                f"parallel: wanted axes of the mesh in force, {mesh.axis_names}, got {axis!r}"
            )
        if mesh._name_to_type[axis] == AxisType.Manual:
            raise ValueError(
                f"parallel: the axis {axis!r} belongs to a surrounding jax.shard_map; "
                "call energy_attn.distributed.tree_attention inside it"
            )
    return math.prod(mesh.shape[axis] for axis in parallel.axes)


def spread_attention(
    parallel: SequenceParallel, names: Sequence[str], call: Call
) -> AttentionState:
    """The state of `call` with its keys spread over the mesh in force.

    A number of keys that the devices do not divide is padded with keys that are not there. Queries
    are replicated; the result is equal on all devices. Raises as `check_mesh` and the kernels do.
    """
    check_mesh(parallel)
    return _spread(parallel, tuple(names), call.settings, call.operands)


# Compiled here, so that a call outside of jit is traced and compiled once for its shapes.
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _spread(
    parallel: SequenceParallel, names: tuple[str, ...], settings: Settings, operands: Operands
) -> AttentionState:
    operands = _pad_keys(operands, check_mesh(parallel))
    specs = _specs(operands, parallel.axes)

    def local(operands: Operands) -> AttentionState:
        return merge_across(attend(names, settings, operands), parallel.axes)

    spread = jax.shard_map(
        local,
        in_specs=(specs,),
        out_specs=PartitionSpec(),
        axis_names=set(parallel.axes),
    )
    return spread(_reshard(operands, specs, parallel.axes))


def _pad_keys(operands: Operands, devices: int) -> Operands:
    columns = operands.key.shape[1]
    missing = -columns % devices
    if missing == 0:
        return operands
    query_positions, key_positions = operands.query_positions, operands.key_positions
    if query_positions is None or key_positions is None:
        query_positions = jnp.zeros((1, operands.query.shape[1]), jnp.int32)
        key_positions = jnp.zeros((1, columns), jnp.int32)

    def pad(x: Array | None, axis: int, fill: Any = 0) -> Any:
        if x is None or x.shape[axis] != columns:
            return x
        widths = [(0, missing if i == axis else 0) for i in range(x.ndim)]
        return jnp.pad(x, widths, constant_values=fill)

    return Operands(
        query=operands.query,
        key=pad(operands.key, 1),
        value=pad(operands.value, 1),
        bias=pad(operands.bias, 3),
        mask=pad(operands.mask, 3, False),
        query_positions=query_positions,
        key_positions=pad(key_positions, 1, -1),
    )


def _specs(operands: Operands, axes: tuple[str, ...]) -> Operands:
    # operands whose leaves are the specs of the arrays in their place
    columns = operands.key.shape[1]
    whole: Any = PartitionSpec()
    keys: Any = PartitionSpec(None, axes)

    def scores(x: Array | None) -> Any:
        sharded = x is not None and x.shape[3] == columns
        return PartitionSpec(None, None, None, axes) if sharded else whole

    return Operands(
        query=whole,
        key=keys,
        value=keys,
        bias=scores(operands.bias),
        mask=scores(operands.mask),
        query_positions=whole,
        key_positions=keys,
    )


def _reshard(operands: Operands, specs: Operands, axes: tuple[str, ...]) -> Operands:
    # Arrays on explicit axes must arrive as they are taken: their types keep what they say of
    # other axes (a batch axis, say), and say of ours what `specs` does.
    mesh = jax.sharding.get_abstract_mesh()
    if not any(mesh._name_to_type[axis] == AxisType.Explicit for axis in axes):
        return operands

    def place(x: Array | None, spec: Any) -> Any:
        if x is None:
            return None
        kept = [_without(part, axes) for part in jax.typeof(x).sharding.spec]
        wanted = [*spec, *[None] * (x.ndim - len(spec))]
        parts = [mine or other for mine, other in zip(wanted, kept, strict=True)]
        return jax.reshard(x, PartitionSpec(*parts))

    return Operands(*map(place, operands, specs))


def _without(part: Any, axes: tuple[str, ...]) -> tuple[str, ...] | None:
    names = (part,) if isinstance(part, str) else part or ()
    return tuple(name for name in names if name not in axes) or None
