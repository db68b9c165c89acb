"""The list of sharding methods, and the user's `parallel=`, which names one."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from energy_attn.kernels.internal import checks

from ..cost._network import Topology
from ..merge._strategies import MergeOption, check_merge
from ._abstract import AbstractMethod
from ._gather import Gather
from ._merge import check_topology
from ._reproducible import Reproducible
from ._ring import Ring
from ._tree import Tree
from ._ulysses import Hybrid, Ulysses

# Type checkers need a literal; a test compares it with the list below.
MethodName = Literal["tree", "ring", "ulysses", "hybrid", "gather"]
MethodOption = MethodName | Literal["auto"]

METHODS: dict[str, type[AbstractMethod]] = {
    kind.name: kind for kind in (Tree, Ring, Ulysses, Hybrid, Gather, Reproducible)
}
METHOD_OPTIONS = tuple(name for name, kind in METHODS.items() if kind.is_option)
# By the names that `method` and `merge` have for them in the cost model.
VARIANTS: Mapping[str, Mapping[str | None, AbstractMethod]] = {
    name: kind.variants() for name, kind in METHODS.items()
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
        method: a name, or a method with options of its own, as `methods.Ring(rotate="keys")`:
            [`"tree"`][energy_attn.distributed.methods.Tree]: local states, then one reduction.
            [`"ring"`][energy_attn.distributed.methods.Ring]: keys or queries pass all devices.
            [`"ulysses"`][energy_attn.distributed.methods.Ulysses]: heads are exchanged for sequence.
            [`"hybrid"`][energy_attn.distributed.methods.Hybrid]: heads for sequence along the last axis, and keys
            around a ring over the others. [`"gather"`][energy_attn.distributed.methods.Gather]: keys are gathered,
            piece by piece. `"auto"`: the tree for queries that are on all devices, else the fastest by
            [`cost`][energy_attn.distributed.cost.choose_method].
        merge: the strategy by which a tree folds, a name of
            [`cost.MERGES`][energy_attn.distributed.cost.MERGES]; see
            [`merge_across`][energy_attn.distributed.merge_across]. `"auto"`: the fastest by `cost`.
        layout: the order of the sequence over the devices: `"contiguous"`, `"striped"`
            or `"zigzag"`; see [`shard_sequence`][energy_attn.distributed.shard_sequence]. Queries of
            another order than this one need `query_positions`.
        topology: latency and bandwidth of the axes, for `"auto"`; None: the usual ones of
            the platform in use.
        queries_sharded: whether queries are sharded; None: where there are as many as keys. Set it
            for a chunk of a prompt that continues from a cache. Where there are as many queries as keys,
            attention takes them to be in the order of `layout` even if this is False; for queries in the
            order of the text, pass `query_positions`. Inside a `jax.shard_map`, queries that are not
            sharded are in the order of the text.
        heads: other mesh axes, over which the heads are sharded, in a cache too: for tensor
            parallelism. Heads are independent, so this adds no communication.
        batch: other mesh axes, over which the rows of the batch are sharded, in a cache too: for data
            parallelism. Name them where they are automatic, as XLA may gather rows that are sharded
            over axes that nobody named; of explicit axes the types of the arrays tell. Rows that a `jax.vmap`
            maps over are no rows of the call: a `jax.shard_map` over all axes, around the `vmap`, splits these.

    Raises:
        TypeError: `axes`, `heads` or `batch` are not names, `method` neither a name nor a method, `topology` not a
            topology, or `queries_sharded` not a boolean.
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
    method: str | AbstractMethod
    merge: str
    layout: str
    topology: Topology | None
    queries_sharded: bool | None
    heads: tuple[str, ...]
    batch: tuple[str, ...]

    def __init__(
        self,
        axes: str | Sequence[str] = ("node", "device"),
        method: MethodOption | AbstractMethod = "auto",
        merge: MergeOption = "auto",
        layout: Literal["contiguous", "striped", "zigzag"] = "contiguous",
        *,
        topology: Topology | None = None,
        queries_sharded: bool | None = None,
        heads: str | Sequence[str] = (),
        batch: str | Sequence[str] = (),
    ) -> None:
        names = checks.check_names("axes", axes, "mesh axes")
        checks.check_choice("layout", layout, ("contiguous", "striped", "zigzag"))
        check_merge(merge, len(names))
        check_topology(topology, len(names))
        if not isinstance(method, AbstractMethod):
            checks.check_choice("method", method, (*METHOD_OPTIONS, "auto"))
        elif isinstance(method, Tree):
            for name, x, usual in (("merge", merge, "auto"), ("topology", topology, None)):
                if x not in (usual, getattr(method, name)):
                    raise ValueError(
                        f"{name}: wanted {usual!r} beside a methods.Tree, which has its own, got {x!r}"
                    )
            merge, topology = method.merge, method.topology
        if method != "auto":
            check_method(method).check_axes(names)
        if queries_sharded is not None:
            checks.check_flag("queries_sharded", queries_sharded)
        others: dict[str, tuple[str, ...]] = {}
        taken = set(names)
        for name, axes_of in {"batch": batch, "heads": heads}.items():
            none = isinstance(axes_of, (tuple, list)) and not axes_of
            found = () if none else checks.check_names(name, axes_of, "mesh axes")
            if taken.intersection(found):
                raise ValueError(
                    f"{name}: wanted other mesh axes than {sorted(taken)}, got {found}"
                )
            taken.update(found)
            others[name] = found
        vars(self).update(
            others, axes=names, method=method, merge=merge, layout=layout, topology=topology
        )
        vars(self)["queries_sharded"] = queries_sharded


def check_method(method: object) -> AbstractMethod:
    """Returns a method, or the one of a name. Raises `TypeError` or `ValueError` for anything else."""
    if isinstance(method, AbstractMethod):
        return method
    if not isinstance(method, str):
        raise TypeError(
            f"method: wanted a name or one of distributed.methods, as methods.Ring(), got {checks.received(method)}"
        )
    checks.check_choice("method", method, METHOD_OPTIONS)
    return named_method(method)


def named_method(
    name: str, merge: Any = "auto", topology: Topology | None = None
) -> AbstractMethod:
    """The method of this name, with its defaults; a tree that folds by `merge` on `topology`."""
    kind = METHODS[name]
    return kind(merge, topology) if kind is Tree else kind()
