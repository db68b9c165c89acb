"""Bytes, memory and seconds of an attention over a mesh, and the choices by them."""

import math
from typing import Unpack

from ..merge._strategies import automatic_merges
from ._methods import (
    ROTATED,
    Derivatives,
    check_sizes,
    kv_shard,
    local_rows,
    shares_heads,
    transfers,
)
from ._shape import Shape
from ._topology import Topology
from ._transfer import Transfer, seconds, sent


def volume(
    method: str,
    merge: str | None,
    shape: Shape,
    topology: Topology,
    **derivatives: Unpack[Derivatives],
) -> float:
    r"""Bytes that one device puts on links for one attention.

    $$V = \sum_c n_c\, \mathrm{count}_c \cdot
      \begin{cases} 2\frac{p-1}{p} & \text{all-reduce (two trees: 2)} \\
      p - 1 & \text{all-gather} \\ \frac{p-1}{p} & \text{reduce-scatter, all-to-all} \\
      1 & \text{permute} \end{cases}$$

    for the payload $n_c$ of each [`Transfer`][energy_attn.distributed.cost.Transfer].

    Args:
        method: as for [`transfers`][energy_attn.distributed.cost.transfers], as all arguments.
        merge: likewise.
        shape: the sizes.
        topology: the mesh, and how it sums.
        **derivatives: those that are counted, too.

    Returns:
        Bytes; of the busiest device, where they differ (`all_reduce="tree"`).

    Raises:
        ValueError: as `transfers`, with its `TypeError`s.

    Source: Tree Attention (arXiv 2408.04093), equations 32 to 35. Of the $p$ hops that equation 32 counts around
        the ring $p - 1$ are needed, and with grouped heads the ring sends $N/K$ times less than its $d$ says.

    Examples:
        >>> from energy_attn.distributed import cost
        >>> shape, mesh = cost.Shape(1, 1, 640_000, 16, 16, 128), cost.topology("ethernet", nodes=8)
        >>> round(cost.volume("ring", "keys", shape, mesh) / cost.volume("tree", "allreduce", shape, mesh))
        315077
    """
    predicted = transfers(method, merge, shape, topology, **derivatives)
    return float(sum(sent(transfer, topology) for transfer in predicted))


def memory(method: str, merge: str | None, shape: Shape, topology: Topology) -> int:
    r"""Peak bytes of one device: its keys and values, queries, states, and receive buffers.

    $$M_\text{tree} = B \tfrac{S}{p} K (H + H_v) b + R H b + R (H_v + 2) w, \qquad
      M_\text{ring} = M_\text{tree} + 2 B \tfrac{S}{p} K (H + H_v) b$$

    A gather of keys in $C \le 8$ pieces holds two of these, of all devices, $\frac{2}{C} B S K (H + H_v) b$; a
    reproducible call those of some heads, one after the other;
    a hybrid the exchanged queries, keys and values, and twice the keys again, where they go around.

    Args:
        method: as for [`transfers`][energy_attn.distributed.cost.transfers], as all arguments.
        merge: likewise.
        shape: the sizes.
        topology: the mesh.

    Returns:
        Bytes, without the result and the local kernel's scratch (in a ring of keys that of a part of the queries,
        whose state is of 8 MiB or of 512 queries). All-reduces work in place; everything else arrives in a
        buffer of its own, or in two in turn where transfers overlap.

    Raises:
        ValueError: as `transfers`, with its `TypeError`s.

    Source: Tree Attention (arXiv 2408.04093), equations 29 and 30, where $d$ of the first terms is that of the
        keys. Equation 29 is a ring that waits for every transfer and lets its own shard go around: one shard less
        than here. It leaves out $2 b n_h$, too.

    Examples:
        >>> from energy_attn.distributed import cost
        >>> shape, mesh = cost.Shape(1, 1, 640_000, 16, 16, 128), cost.topology("ethernet", nodes=8)
        >>> tree, ring = (cost.memory(*way, shape, mesh) for way in (("tree", "gather"), ("ring", "keys")))
        >>> round(ring / tree, 3)
        3.0
    """
    predicted = transfers(method, merge, shape, topology)
    rows = local_rows(shape, topology)
    gathered = method == "tree" and shape.queries_sharded
    states = (rows * topology.devices if gathered else rows) * (shape.state + shape.lse_bytes)
    most = 1 if method == "reproducible" else 2
    arriving = sum(_arriving(transfer, topology, most) for transfer in predicted)
    query = rows * shape.width * shape.bytes
    return sum(kv_shard(shape, topology)) + query + states + arriving


def latency(
    method: str,
    merge: str | None,
    shape: Shape,
    topology: Topology,
    **derivatives: Unpack[Derivatives],
) -> float:
    r"""Seconds of communication for one attention, if nothing overlaps.

    $$t = \sum_c \mathrm{count}_c \left(\text{launch} + \text{hops}_c\, \alpha
      + \frac{\text{bytes}_c}{\beta}\right)$$

    with the latencies $\alpha$ and bandwidths $\beta$ of the links that each collective crosses, and the
    numbers of hops and bytes of [`Topology`][energy_attn.distributed.cost.Topology].

    Args:
        method: as for [`transfers`][energy_attn.distributed.cost.transfers], as all arguments.
        merge: likewise.
        shape: the sizes.
        topology: the mesh.
        **derivatives: those that are counted, too.

    Returns:
        Seconds, for comparing strategies on one network; no promise for any machine. Exchanges by gloo took as
        long within a factor of 1.5 (of 3.1 where cores were busy); those of GPUs and TPUs were not measured.

    Raises:
        ValueError: as `transfers`, with its `TypeError`s.

    Source: Tree Attention (arXiv 2408.04093), section 5.2: Theorem 1's $\log p$ steps are those of a tree.

    Examples:
        >>> from energy_attn.distributed import cost
        >>> mesh = cost.topology("ethernet", nodes=8, latency=4e-3)
        >>> shape = cost.Shape(1, 1, 640_000, 16, 16, 128)
        >>> merges = ("allreduce", "gather", "butterfly")
        >>> min(merges, key=lambda merge: cost.latency("tree", merge, shape, mesh))
        'butterfly'
    """
    predicted = transfers(method, merge, shape, topology, **derivatives)
    return sum(transfer.count * seconds(transfer, topology) for transfer in predicted)


def choose_merge(shape: Shape, topology: Topology) -> str:
    """The merge strategy with the least time by the model: the one of `merge="auto"`.

    Args:
        shape: the sizes.
        topology: the mesh.

    Returns:
        Its name, of equally fast ones the first in `MERGES`; never `"ring"`, which a gather beats.

    Raises:
        TypeError: `shape` is not a `Shape`, or `topology` not a `Topology`.

    Source: none: see [`latency`][energy_attn.distributed.cost.latency].

    Examples:
        >>> from energy_attn.distributed import cost
        >>> shape = cost.Shape(1, 1, 32_768, 16, 16, 64, dtype="float32")
        >>> cost.choose_merge(shape, cost.topology("ethernet", nodes=8))
        'butterfly'
    """
    check_sizes(shape, topology)
    return _fastest("tree", shape, topology)


def choose_method(shape: Shape, topology: Topology) -> str:
    """The method for an attention: the one of `method="auto"`.

    For queries on all devices (decode) it is the tree, which sends nothing that grows with the keys.
    For sharded queries it is the method with the least time by the model, each with its best merge,
    among those that need at most twice the memory of the smallest (a tree holds the states of all
    queries on every device, a gather two pieces of all keys). Ulysses and the hybrid are considered if the
    devices can divide the heads.

    Args:
        shape: the sizes.
        topology: the mesh.

    Returns:
        Its name, of equally fast ones the first in the list of `SequenceParallel`.

    Raises:
        TypeError: `shape` is not a `Shape`, or `topology` not a `Topology`.

    Source: none: see [`latency`][energy_attn.distributed.cost.latency].

    Examples:
        >>> from energy_attn.distributed import cost
        >>> shape = cost.Shape(1, 1, 640_000, 32, 8, 128)
        >>> cost.choose_method(shape, cost.topology("dgx_h100", (8,), nodes=16))
        'tree'
    """
    check_sizes(shape, topology)
    if not shape.queries_sharded:
        return "tree"
    merges: dict[str, str | None] = {
        method: _fastest(method, shape, topology) for method in ("tree", "ring")
    }
    for method in ("ulysses", "hybrid", "gather"):
        levels = method != "hybrid" or len(topology.links) > 1
        if levels and shares_heads(method, shape, topology):
            merges[method] = None
    bytes_by_method = {
        method: memory(method, merge, shape, topology) for method, merge in merges.items()
    }
    lean = [
        method for method in merges if bytes_by_method[method] <= 2 * min(bytes_by_method.values())
    ]
    return min(lean, key=lambda method: latency(method, merges[method], shape, topology))


def _fastest(method: str, shape: Shape, topology: Topology) -> str:
    merges = {"tree": automatic_merges(len(topology.links)), "ring": ROTATED}[method]
    return min(merges, key=lambda merge: latency(method, merge, shape, topology))


def _arriving(transfer: Transfer, topology: Topology, most: int) -> int:
    devices = math.prod(topology.links[axis].devices for axis in transfer.axes)
    turns = min(transfer.count, most)
    part = {"all-gather": devices * turns, "all-to-all": 1, "collective-permute": turns}
    return part.get(transfer.kind, 0) * transfer.bytes  # reductions work in place
