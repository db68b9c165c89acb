"""Bytes, memory and seconds of an attention over a mesh, and the choices by them."""

import math

from ..merge._strategies import automatic_merges
from ..network._seconds import seconds, sent
from ..network._shape import Shape
from ..network._topology import Topology
from ..network._transfer import Transfer
from ._transfers import (
    ROTATED,
    check_sizes,
    kv_shard,
    least_axes,
    local_rows,
    shares_heads,
    transfers,
)


def volume(
    method: str,
    merge: str | None,
    shape: Shape,
    topology: Topology,
    *,
    tangent: bool = False,
    gradient: bool = False,
    narrow_gradients: bool = False,
) -> float:
    r"""Bytes that one device puts on links for one attention.

    $$V = \sum_c n_c\, \mathrm{count}_c \cdot
      \begin{cases} 2\frac{p-1}{p} & \text{all-reduce (two trees: 2)} \\
      p - 1 & \text{all-gather} \\ \frac{p-1}{p} & \text{reduce-scatter, all-to-all} \\
      1 & \text{permute} \end{cases}$$

    for the payload $n_c$ of each [`Transfer`][energy_attn.distributed.cost.Transfer].

    Args:
        method: `"tree"`, `"ring"`, `"ulysses"`, `"hybrid"` or `"gather"`.
        merge: as for [`transfers`][energy_attn.distributed.cost.transfers].
        shape: the sizes.
        topology: the mesh, and how it sums.
        tangent: as for [`transfers`][energy_attn.distributed.cost.transfers].
        gradient: likewise.
        narrow_gradients: likewise.

    Returns:
        Bytes; where devices differ (`all_reduce="tree"`), those of the busiest.

    Raises:
        TypeError: as `transfers`.
        ValueError: as `transfers`.

    Source: Tree Attention (arXiv 2408.04093), equations 32 to 35, with two corrections.
        Equation 33, $2 \frac{p-1}{p}(bd + 2 b n_h)$, is the volume of a ring all-reduce, and of
        recursive halving and doubling. Equation 32 counts $p$ hops around the ring, of which
        $p - 1$ are needed. And $d$ there means keys with as many heads as queries: with grouped
        heads the ring sends $N/K$ times less, and the ratio shrinks as much.

    Examples:
        >>> from energy_attn.distributed import cost
        >>> shape, mesh = cost.Shape(1, 1, 640_000, 16, 16, 128), cost.ethernet(8)
        >>> round(cost.volume("ring", "keys", shape, mesh) / cost.volume("tree", "allreduce", shape, mesh))
        315077
    """
    asked = {"tangent": tangent, "gradient": gradient, "narrow_gradients": narrow_gradients}
    found = transfers(method, merge, shape, topology, **asked)
    return float(sum(sent(transfer, topology) for transfer in found))


def memory(method: str, merge: str | None, shape: Shape, topology: Topology) -> int:
    r"""Peak bytes of one device: its keys and values, queries, states, and receive buffers.

    $$M_\text{tree} = B \tfrac{S}{p} K (H + H_v) b + R H b + R (H_v + 2) w, \qquad
      M_\text{ring} = M_\text{tree} + 2 B \tfrac{S}{p} K (H + H_v) b$$

    A gather of keys in $C \le 8$ pieces holds two of these, of all devices, $\frac{2}{C} B S K (H + H_v) b$;
    a hybrid the exchanged queries, keys and values, and twice the keys again, where they go around.

    Args:
        method: `"tree"`, `"ring"`, `"ulysses"`, `"hybrid"` or `"gather"`.
        merge: as for [`transfers`][energy_attn.distributed.cost.transfers].
        shape: the sizes.
        topology: the mesh.

    Returns:
        Bytes, without the result and the local kernel's scratch. States of parts are in $w$ bytes a
        number, `lse`'s. All-reduces work in place; everything else arrives in a buffer of its own, or
        in two in turn where transfers overlap. In a ring of keys the scratch is that of a part of the
        queries, whose state is of 32 MiB or of 512 queries.

    Raises:
        TypeError: as `transfers`.
        ValueError: as `transfers`.

    Source: Tree Attention (arXiv 2408.04093), equations 29 and 30: $4btd + 2bd$ and
        $2btd + 2bd + 2bn_h$ numbers, where $d$ of the first terms is that of the keys. Equation 29
        is a ring that waits for every transfer and lets its own shard go around: one shard less
        than here, where transfers overlap with computation. It leaves out $2 b n_h$, too.

    Examples:
        >>> from energy_attn.distributed import cost
        >>> shape, mesh = cost.Shape(1, 1, 640_000, 16, 16, 128), cost.ethernet(8)
        >>> ways = ("tree", "allreduce"), ("ring", "keys")
        >>> tree, ring = (cost.memory(*way, shape, mesh) for way in ways)
        >>> round(ring / tree, 3)
        3.0
    """
    found = transfers(method, merge, shape, topology)
    mine = local_rows(shape, topology)
    gathered = method == "tree" and shape.queries_sharded
    rows = mine * topology.devices if gathered else mine
    states = rows * (shape.state + shape.wide_bytes)
    arriving = sum(_arriving(transfer, topology) for transfer in found)
    query = mine * shape.width * shape.bytes
    return sum(kv_shard(shape, topology)) + query + states + arriving


def latency(
    method: str,
    merge: str | None,
    shape: Shape,
    topology: Topology,
    *,
    tangent: bool = False,
    gradient: bool = False,
    narrow_gradients: bool = False,
) -> float:
    r"""Seconds of communication for one attention, if nothing overlaps.

    $$t = \sum_c \mathrm{count}_c \left(\text{launch} + \text{hops}_c\, \alpha
      + \frac{\text{bytes}_c}{\beta}\right)$$

    with the latencies $\alpha$ and bandwidths $\beta$ of the links that each collective crosses; how
    many hops and bytes those are, [`Topology`][energy_attn.distributed.cost.Topology] says. A ring
    over hosts of several devices crosses the network once per host, with the bandwidth of a card that
    its devices share.

    Args:
        method: `"tree"`, `"ring"`, `"ulysses"`, `"hybrid"` or `"gather"`.
        merge: as for [`transfers`][energy_attn.distributed.cost.transfers].
        shape: the sizes.
        topology: the mesh.
        tangent: as for [`transfers`][energy_attn.distributed.cost.transfers].
        gradient: likewise.
        narrow_gradients: likewise.

    Returns:
        Seconds, for comparing strategies on one network; no promise for any machine. Measured exchanges
        by gloo took as long within a factor of 1.5 where cores were idle (of 3.1 where they were busy);
        those of GPUs and TPUs have not been measured.

    Raises:
        TypeError: as `transfers`.
        ValueError: as `transfers`.

    Source: Tree Attention (arXiv 2408.04093), section 5.2: Theorem 1's $\log p$ steps are those of
        a tree, or of halving and doubling; a ring all-reduce takes $2(p-1)$.

    Examples:
        >>> from energy_attn.distributed import cost
        >>> shape, mesh = cost.Shape(1, 1, 640_000, 16, 16, 128), cost.ethernet(8, latency=2e-3)
        >>> seconds = {m: cost.latency("tree", m, shape, mesh) for m in ("allreduce", "gather", "butterfly")}
        >>> min(seconds, key=seconds.get)
        'butterfly'
    """
    asked = {"tangent": tangent, "gradient": gradient, "narrow_gradients": narrow_gradients}
    found = transfers(method, merge, shape, topology, **asked)
    return sum(transfer.count * seconds(transfer, topology) for transfer in found)


def choose_merge(shape: Shape, topology: Topology) -> str:
    """The merge strategy with the least time by the model: what `merge="auto"` means.

    Args:
        shape: the sizes.
        topology: the mesh.

    Returns:
        The name of the strategy, of equally fast ones the first in `MERGES`; never `"ring"`, which a
        gather beats.

    Raises:
        TypeError: `shape` is not a `Shape`, or `topology` not a `Topology`.

    Source: none: see [`latency`][energy_attn.distributed.cost.latency].

    Examples:
        >>> from energy_attn.distributed import cost
        >>> shape = cost.Shape(1, 1, 32_768, 16, 16, 64, dtype="float32")
        >>> cost.choose_merge(shape, cost.ethernet(8, latency=2e-4))
        'butterfly'
    """
    check_sizes(shape, topology)
    return _fastest("tree", shape, topology)


def choose_method(shape: Shape, topology: Topology) -> str:
    """The method for an attention: what `method="auto"` means.

    For queries on all devices (decode) it is the tree, which sends nothing that grows with the keys.
    For sharded queries it is the method with the least time by the model, each with its best merge,
    among those that need at most twice the memory of the leanest (a tree holds the states of all
    queries on every device, a gather two pieces of all keys). Ulysses and the hybrid take part where the
    devices that exchange heads can share them out.

    Args:
        shape: the sizes.
        topology: the mesh.

    Returns:
        The method's name, of equally fast ones the first in the list of `SequenceParallel`.

    Raises:
        TypeError: `shape` is not a `Shape`, or `topology` not a `Topology`.

    Source: none: see [`latency`][energy_attn.distributed.cost.latency].

    Examples:
        >>> from energy_attn.distributed import cost
        >>> cost.choose_method(cost.Shape(1, 1, 640_000, 32, 8, 128), cost.dgx_h100(16))
        'tree'
    """
    check_sizes(shape, topology)
    if not shape.queries_sharded:
        return "tree"
    merges: dict[str, str | None] = {
        method: _fastest(method, shape, topology) for method in ("tree", "ring")
    }
    for method in ("ulysses", "hybrid", "gather"):
        if len(topology.links) >= least_axes(method) and shares_heads(method, shape, topology):
            merges[method] = None
    held = {method: memory(method, merge, shape, topology) for method, merge in merges.items()}
    lean = [method for method in merges if held[method] <= 2 * min(held.values())]
    return min(lean, key=lambda method: latency(method, merges[method], shape, topology))


def _fastest(method: str, shape: Shape, topology: Topology) -> str:
    merges = {"tree": automatic_merges(len(topology.links)), "ring": ROTATED}[method]
    return min(merges, key=lambda merge: latency(method, merge, shape, topology))


def _arriving(transfer: Transfer, topology: Topology) -> int:
    devices = math.prod(topology.links[axis].devices for axis in transfer.axes)
    part = {
        "all-reduce": 0,
        "all-gather": devices * min(transfer.count, 2),
        "reduce-scatter": 0,
        "all-to-all": 1,
        "collective-permute": min(transfer.count, 2),
    }
    return part[transfer.kind] * transfer.bytes
