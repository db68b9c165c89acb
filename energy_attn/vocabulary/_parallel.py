"""`parallel=` of losses over a vocabulary: words over some mesh axes, tokens over others."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec, auto_axes
from jaxtyping import Array, PyTree

from energy_attn.distributed.internal import (
    mesh_axes_of,
    other_explicit_axes,
    reshard_explicit,
    warn_of_cache,
)
from energy_attn.kernels.internal import checks

Axes = tuple[str, ...]


@dataclasses.dataclass(frozen=True, init=False)
class VocabularyParallel:
    r"""How the output layer of a model is sharded over a mesh.

    Each device has the logits of its own words for its own tokens. Partition functions and means of the devices with
    the same tokens are merged by two all-reduces of a few numbers for each token; the gradient of hidden states is
    summed over those devices, the gradient of the output matrix over devices with the same words. No logits are sent.

    An axis may split both, as with weights in parts over the axis of the data (FSDP). The output matrix is then
    gathered over this axis in blocks of words, and its gradient is summed in blocks: no device ever has all of it.

    On explicit mesh axes the types of the arrays decide, and `parallel` is not needed. Inside a `jax.shard_map` over
    all axes of `parallel` arrays are shards.

    Attributes:
        words: the mesh axes that words, rows of the output matrix, are sharded over, slow ones first.
        tokens: the mesh axes that the first axis of hidden states is sharded over; or a `jax.P` with the axes of each
            of their leading axes, as `jax.P("data", "sequence")`.

    Raises:
        TypeError: axes that are no names.
        ValueError: axes that repeat.

    Source: Megatron-LM (arXiv 1909.08053), section 3: a cross-entropy over a vocabulary that is sharded.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import energy_attn as ea
        >>> hidden, weight, labels = jnp.ones((4, 8)), jnp.ones((16, 8)), jnp.arange(4)
        >>> with jax.set_mesh(ea.distributed.make_mesh((jax.device_count(),), ("model",))):
        ...     parallel = ea.VocabularyParallel("model")
        ...     loss = ea.softmax_cross_entropy(hidden, weight, labels, parallel=parallel)
        >>> bool(jnp.allclose(loss, jnp.log(16.0)))
        True
    """

    words: Axes
    tokens: tuple[Axes, ...]

    def __init__(
        self, words: str | Sequence[str] = (), tokens: str | Sequence[str] | PartitionSpec = ()
    ) -> None:
        parts: Any = tokens if isinstance(tokens, PartitionSpec) else (tokens,)
        vars(self).update(
            words=_names("words", words), tokens=tuple(_names("tokens", x) for x in parts)
        )
        each = [axis for part in self.tokens for axis in part]
        if len(set(each)) < len(each):
            raise ValueError(f"tokens: wanted each mesh axis once, got {checks.received(tokens)}")


def _names(name: str, axes: Any) -> Axes:
    return (
        ()
        if axes is None or axes == () or axes == []
        else checks.check_names(name, axes, "mesh axes")
    )


class Plan(NamedTuple):
    """The mesh axes over which an output layer is sharded; static."""

    mesh: AbstractMesh
    words: Axes  # as the output matrix is sharded
    tokens: tuple[Axes, ...]  # of each leading axis of hidden states
    local: bool  # whether the call is inside a `jax.shard_map`, where arrays are shards

    @property
    def gathered(self) -> Axes:
        """Axes that split words and tokens, over which blocks of words are gathered."""
        tokens = {axis for part in self.tokens for axis in part}
        return tuple(axis for axis in self.words if axis in tokens)

    @property
    def merged(self) -> Axes:
        """Axes whose devices have other words of the same tokens."""
        return tuple(axis for axis in self.words if axis not in self.gathered)

    @property
    def axes(self) -> Axes:
        return tuple(dict.fromkeys((*self.words, *(axis for part in self.tokens for axis in part))))


def plan_of(parallel: object, hidden: Array, weight: Array) -> Plan | None:
    """The plan of a call, from `parallel` or from the types of its arrays; None if nothing is sharded."""
    if parallel is not None and not isinstance(parallel, VocabularyParallel):
        raise TypeError(
            f"parallel: wanted a VocabularyParallel or None, got {checks.received(parallel)}"
        )
    mesh: Any = jax.sharding.get_abstract_mesh()
    if parallel is None:
        if mesh.empty:
            return None
        words = mesh_axes_of(weight, 0)
        tokens = tuple(mesh_axes_of(hidden, i) for i in range(hidden.ndim - 1))
        for name, x in ("hidden", hidden), ("weight", weight):
            if axes := mesh_axes_of(x, x.ndim - 1):
                raise ValueError(
                    f"{name}: wanted its last axis whole, got one that is sharded over {axes}"
                )
        plan = Plan(mesh, words, tokens, local=False)
        return plan if plan.axes or other_explicit_axes(mesh, ()) else None
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    plan = Plan(mesh, parallel.words, parallel.tokens, local=False)
    for axis in plan.axes:
        if axis not in kinds:
            raise ValueError(
                f"parallel: wanted axes of the mesh in force, {tuple(kinds)}, got {axis!r}"
                f"{'; use jax.set_mesh(mesh)' if mesh.empty else ''}"
            )
    if len(plan.tokens) >= hidden.ndim:
        raise ValueError(
            f"parallel: wanted tokens with axes of the {hidden.ndim - 1} leading axes of hidden, "
            f"got {len(plan.tokens)}"
        )
    manual = [axis for axis in plan.axes if kinds[axis] == AxisType.Manual]
    if manual and len(manual) < len(plan.axes):
        raise ValueError(
            f"parallel: wanted axes that a surrounding jax.shard_map has taken all, or none of them, got {manual} of "
            f"{plan.axes}"
        )
    plan = plan._replace(local=bool(manual))
    if not plan.local:
        _check_share("weight", "words", len(weight), plan.mesh, plan.words)
        for size, axes in zip(hidden.shape, plan.tokens, strict=False):
            _check_share("hidden", "tokens", size, plan.mesh, axes)
    return plan if plan.axes else None


def _check_share(name: str, what: str, number: int, mesh: AbstractMesh, axes: Axes) -> None:
    devices = math.prod(mesh.shape[axis] for axis in axes)
    if number % devices:
        raise ValueError(
            f"{name}: wanted a number of {what} that is a multiple of the {devices} devices over {axes}, got {number}; "
            + ("pad it, and hide the padding by mask=" if what == "words" else "pad them")
        )


def over_devices(
    plan: Plan | None, f: Callable[..., Any], tokens: PyTree, words: PyTree, whole: PyTree
) -> Any:
    """`f(tokens, words, whole)` on the shards of each device; results are sharded as tokens are."""
    if plan is None or plan.local:
        return f(tokens, words, whole)
    token_spec = PartitionSpec(*(part or None for part in plan.tokens))
    warn_of_cache(plan.mesh)
    rest = other_explicit_axes(plan.mesh, plan.axes)
    # JAX cannot compute on types with other explicit axes; inside `auto_axes` the types do not have them
    if rest:

        def within(*args: PyTree) -> Any:
            inner = plan._replace(mesh=jax.sharding.get_abstract_mesh())
            return over_devices(inner, f, *args)

        explicit = PartitionSpec(
            *(tuple(x for x in part if _is_explicit(plan.mesh, x)) or None for part in plan.tokens)
        )
        sharding = NamedSharding(plan.mesh, explicit)
        mapped: Any = auto_axes(within, axes=rest, out_sharding=sharding)
        return mapped(tokens, words, whole)
    if not plan.axes:
        return f(tokens, words, whole)
    word_spec = PartitionSpec(plan.words or None)
    specs = token_spec, word_spec, PartitionSpec()
    args = (
        reshard_explicit(plan.mesh, plan.axes, x, spec)
        for x, spec in zip((tokens, words, whole), specs, strict=True)
    )
    return jax.shard_map(
        f, mesh=plan.mesh, in_specs=specs, out_specs=token_spec, axis_names=set(plan.axes)
    )(*args)


def _is_explicit(mesh: AbstractMesh, axis: str) -> bool:
    return dict(zip(mesh.axis_names, mesh.axis_types, strict=True))[axis] == AxisType.Explicit
