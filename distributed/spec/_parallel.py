"""How the keys of an attention are sharded over a mesh: the user's `parallel=`."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from energy_attn.kernels.internal import check_choice, check_flag, check_names, received

from .. import cost
from ..cost._methods import METHODS, check_method
from ..merge._strategies import MergeOption, check_merge

_CHOICES = {
    "method": (*METHODS, "auto"),
    "layout": ("contiguous", "striped", "zigzag"),
}


@dataclasses.dataclass(frozen=True, init=False)
class SequenceParallel:
    r"""How an attention is sharded along its sequence over a mesh.

    Device $i$ of the axes holds a part of keys and values. Queries are sharded in the same way
    where there are as many as keys (training), and are on all devices otherwise (decoding), unless
    `queries_sharded` says otherwise. On explicit mesh axes the type of the query decides, as it does
    inside a `jax.shard_map` over the axes, where arrays are this device's part.

    Attributes:
        axes: the mesh axes that the sequence is sharded over, slow ones first.
        method: `"tree"`: local states, then one reduction; see
            [`tree_attention`][energy_attn.distributed.tree_attention]. `"ring"`: keys or queries
            pass all devices; see [`ring_attention`][energy_attn.distributed.ring_attention].
            `"ulysses"`: heads are exchanged for sequence; see
            [`ulysses_attention`][energy_attn.distributed.ulysses_attention]. `"hybrid"`: heads for
            sequence along the last axis, and keys around a ring over the others; see
            [`hybrid_attention`][energy_attn.distributed.hybrid_attention]. `"gather"`: keys are gathered,
            piece by piece; see [`gather_attention`][energy_attn.distributed.gather_attention].
            `"auto"`: the tree for queries that are on all devices, else the fastest by
            [`cost`][energy_attn.distributed.cost.choose_method].
        merge: the strategy by which a tree folds, a name of
            [`cost.MERGES`][energy_attn.distributed.cost.MERGES]; see
            [`merge_across`][energy_attn.distributed.merge_across]. `"auto"`: the fastest by `cost`.
        layout: the order of the sequence over the devices: `"contiguous"`, `"striped"`
            or `"zigzag"`; see [`shard_sequence`][energy_attn.distributed.shard_sequence].
        topology: latency and bandwidth of the axes, for `"auto"`; None: the usual ones of
            the platform in use.
        queries_sharded: whether queries are sharded; None: where there are as many as keys. Set it
            for a chunk of a prompt that continues from a cache.
        heads: other mesh axes, over which the heads are sharded, in a cache too: for tensor
            parallelism. Heads do not meet, so that it costs nothing here.
        batch: other mesh axes, over which the rows of the batch are sharded, in a cache too: for data
            parallelism. Name them where they are automatic, as XLA may gather rows that are sharded
            over axes that nobody named; of explicit axes the types of the arrays tell. Rows that a `jax.vmap`
            maps over are no rows of the call: a `jax.shard_map` over all axes, around the `vmap`, splits these.
        narrow_gradients: whether gradients of keys and values that go around a ring (`"ring"`,
            `"hybrid"`) are sent in the dtypes of these, which for 16 bits is half of the bytes, rounded in
            each hop; False: in that of `lse`, rounded once.
        bidirectional: whether keys around a ring go both ways, those of half of the heads each, so that
            both links of a torus axis carry them; see
            [`ring_attention`][energy_attn.distributed.ring_attention].

    Raises:
        TypeError: `axes`, `heads` or `batch` are not names, `topology` not a topology, or `queries_sharded`,
            `narrow_gradients` or `bidirectional` not a boolean.
        ValueError: axes that repeat, an unknown method, merge or layout, or `"hierarchical"` or
            `"hybrid"` over one axis.

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
    topology: cost.Topology | None
    queries_sharded: bool | None
    heads: tuple[str, ...]
    batch: tuple[str, ...]
    narrow_gradients: bool
    bidirectional: bool

    def __init__(
        self,
        axes: str | Sequence[str] = ("node", "device"),
        method: Literal["tree", "ring", "ulysses", "hybrid", "gather", "auto"] = "auto",
        merge: MergeOption = "auto",
        layout: Literal["contiguous", "striped", "zigzag"] = "contiguous",
        *,
        topology: cost.Topology | None = None,
        queries_sharded: bool | None = None,
        heads: str | Sequence[str] = (),
        batch: str | Sequence[str] = (),
        narrow_gradients: bool = False,
        bidirectional: bool = False,
    ) -> None:
        names = check_names("axes", axes, "mesh axes")
        given: dict[str, Any] = {"method": method, "layout": layout}
        for field, choices in _CHOICES.items():
            check_choice(field, given[field], choices)
        check_merge(merge, len(names))
        check_method(method, len(names))
        check_topology(topology, len(names))
        if queries_sharded is not None:
            check_flag("queries_sharded", queries_sharded)
        given["narrow_gradients"] = check_flag("narrow_gradients", narrow_gradients)
        given["bidirectional"] = check_flag("bidirectional", bidirectional)
        taken = set(names)
        for name, axes_of in {"batch": batch, "heads": heads}.items():
            none = isinstance(axes_of, (tuple, list)) and not axes_of
            found = () if none else check_names(name, axes_of, "mesh axes")
            if taken.intersection(found):
                raise ValueError(
                    f"{name}: wanted other mesh axes than {sorted(taken)}, got {found}"
                )
            taken.update(found)
            given[name] = found
        given |= {"axes": names, "merge": merge, "topology": topology}
        given |= {"queries_sharded": queries_sharded}
        for field, value in given.items():
            object.__setattr__(self, field, value)


def check_topology(topology: object, axes: int) -> None:
    """Raises `TypeError` unless `topology` is one, `ValueError` for another number of axes."""
    if topology is None:
        return
    if not isinstance(topology, cost.Topology):
        raise TypeError(f"topology: wanted a cost.Topology or None, got {received(topology)}")
    if len(topology.links) != axes:
        raise ValueError(
            f"topology: wanted a link for each of the {axes} mesh axes, got {len(topology.links)}"
        )
