"""Bytes, memory and seconds of an attention over a mesh, and the choices by them."""

import math

from ..merge._strategies import automatic_merges
from ..network._shape import Shape
from ..network._topology import Link, Topology
from ..network._transfer import Transfer
from ._transfers import ROTATED, check_sizes, kv_shard, local_rows, transfers


def volume(
    method: str,
    merge: str | None,
    shape: Shape,
    topology: Topology,
    *,
    tangent: bool = False,
) -> float:
    r"""Bytes that one device puts on links for one attention.

    $$V = \sum_c n_c\, \mathrm{count}_c \cdot
      \begin{cases} 2\frac{p-1}{p} & \text{all-reduce (two trees: 2)} \\
      p - 1 & \text{all-gather} \\ \frac{p-1}{p} & \text{reduce-scatter, all-to-all} \\
      1 & \text{permute} \end{cases}$$

    for the payload $n_c$ of each [`Transfer`][energy_attn.distributed.cost.Transfer].

    Args:
        method: `"tree"`, `"ring"` or `"ulysses"`.
        merge: as for [`transfers`][energy_attn.distributed.cost.transfers].
        shape: the sizes.
        topology: the mesh, and how it sums.
        tangent: as for [`transfers`][energy_attn.distributed.cost.transfers].

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
    found = transfers(method, merge, shape, topology, tangent=tangent)
    return float(sum(_sent(transfer, topology) for transfer in found))


def memory(method: str, merge: str | None, shape: Shape, topology: Topology) -> int:
    r"""Peak bytes of one device: its keys and values, queries, states, and receive buffers.

    $$M_\text{tree} = B \tfrac{S}{p} K (H + H_v) b + R H b + R (H_v + 2) w, \qquad
      M_\text{ring} = M_\text{tree} + 2 B \tfrac{S}{p} K (H + H_v) b$$

    Args:
        method: `"tree"`, `"ring"` or `"ulysses"`.
        merge: as for [`transfers`][energy_attn.distributed.cost.transfers].
        shape: the sizes.
        topology: the mesh.

    Returns:
        Bytes, without the local kernel's scratch. All-reduces work in place; everything else arrives
        in a buffer of its own, or in two in turn where transfers overlap.

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
) -> float:
    r"""Seconds of communication for one attention, if nothing overlaps.

    $$t = \sum_c \mathrm{count}_c \left(\text{launch} + \text{hops}_c\, \alpha
      + \frac{\text{bytes}_c}{\beta}\right)$$

    with the latencies $\alpha$ and bandwidths $\beta$ of the links that each collective crosses; how
    many hops and bytes those are, [`Topology`][energy_attn.distributed.cost.Topology] says. A ring
    over hosts of several devices crosses the network once per host, with all of its bandwidth.

    Args:
        method: `"tree"`, `"ring"` or `"ulysses"`.
        merge: as for [`transfers`][energy_attn.distributed.cost.transfers].
        shape: the sizes.
        topology: the mesh.
        tangent: as for [`transfers`][energy_attn.distributed.cost.transfers].

    Returns:
        Seconds, for comparing strategies on one network; no promise for any machine. Measured exchanges
        took 1.1 to 3.4 times as long, and those of one ring 0.7 to 0.8 times.

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
    found = transfers(method, merge, shape, topology, tangent=tangent)
    return sum(transfer.count * _seconds(transfer, topology) for transfer in found)


def choose_merge(shape: Shape, topology: Topology) -> str:
    """The merge strategy with the least time by the model: what `merge="auto"` means.

    Args:
        shape: the sizes.
        topology: the mesh.

    Returns:
        The name of the strategy, of equally fast ones the first in `MERGES`; never `"ring"`, which a
        gather beats, nor `"remote"`, which no TPU has run.

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
    queries on every device). Ulysses takes part where the devices divide the heads of keys.

    Args:
        shape: the sizes.
        topology: the mesh.

    Returns:
        `"tree"`, `"ring"` or `"ulysses"`.

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
    if shape.kv_heads % topology.devices == 0:
        merges["ulysses"] = None
    held = {method: memory(method, merge, shape, topology) for method, merge in merges.items()}
    lean = [method for method in merges if held[method] <= 2 * min(held.values())]
    return min(lean, key=lambda method: latency(method, merges[method], shape, topology))


def _fastest(method: str, shape: Shape, topology: Topology) -> str:
    merges = {"tree": automatic_merges(len(topology.links)), "ring": ROTATED}[method]
    return min(merges, key=lambda merge: latency(method, merge, shape, topology))


def _sent(transfer: Transfer, topology: Topology) -> float:
    devices = math.prod(topology.links[axis].devices for axis in transfer.axes)
    others = devices - 1
    part = {
        "all-reduce": 2.0 if topology.all_reduce == "tree" else 2 * others / devices,
        "all-gather": others,
        "reduce-scatter": others / devices,
        "all-to-all": others / devices,
        "collective-permute": 1,
    }
    return part[transfer.kind] * transfer.bytes * transfer.count


def _arriving(transfer: Transfer, topology: Topology) -> int:
    devices = math.prod(topology.links[axis].devices for axis in transfer.axes)
    part = {
        "all-reduce": 0,
        "all-gather": devices,
        "reduce-scatter": 0,
        "all-to-all": 1,
        "collective-permute": min(transfer.count, 2),
    }
    return part[transfer.kind] * transfer.bytes


def _seconds(transfer: Transfer, topology: Topology) -> float:
    """Of one run of a transfer."""
    links = [topology.links[axis] for axis in transfer.axes]
    joined = [link for link in links if link.devices > 1]
    steps = {"collective-permute": _permute, "all-to-all": _exchange}.get(transfer.kind)
    if steps is None:
        steps = _levels if topology.all_reduce == "levels" else _around
    return topology.launch + steps(transfer, joined, topology)


def _around(transfer: Transfer, links: list[Link], topology: Topology) -> float:
    """One ring over all devices; or, for sums, two trees."""
    devices = math.prod(link.devices for link in links)
    hops, above, slowest = 0.0, 0, math.inf
    for i, link in enumerate(links):
        blocks = math.prod(x.devices for x in links[: i + 1])
        hops += (blocks - above) / devices * link.latency  # the ring's hops at this level
        above = blocks
        slowest = min(slowest, link.bandwidth * (devices // blocks))
    hops *= devices - 1
    if transfer.kind == "all-reduce":
        hops *= 2
        if topology.all_reduce == "tree":
            hops = 2 * sum(math.ceil(math.log2(link.devices)) * link.latency for link in links)
    once = Transfer(transfer.kind, transfer.bytes, transfer.axes)
    return hops + _sent(once, topology) / slowest


def _levels(transfer: Transfer, links: list[Link], topology: Topology) -> float:
    """Axis by axis, each holding what the slower ones gathered, or the faster ones cut."""
    seconds, above = 0.0, 1
    devices = math.prod(link.devices for link in links)
    for link in links:
        gathers = 2 if transfer.kind == "all-reduce" else 1
        shard = transfer.bytes if transfer.kind == "all-gather" else transfer.bytes / devices
        payload = shard * above * (link.devices - 1)
        seconds += gathers * (_rounds(link) * link.latency + payload / link.bandwidth)
        above *= link.devices
    return seconds


def _permute(transfer: Transfer, links: list[Link], topology: Topology) -> float:
    places = transfer.distance % links[-1].devices
    hops = min(places, links[-1].devices - places) if links[-1].torus and len(links) == 1 else 1
    # messages that pass through others' links share them
    seconds = hops * (links[-1].latency + transfer.bytes / links[-1].bandwidth)
    slow = [link.latency + transfer.bytes / link.bandwidth for link in links[:-1]]
    return max([seconds, *slow])


def _exchange(transfer: Transfer, links: list[Link], topology: Topology) -> float:
    """All to all: each device's part for every other, over the links between them."""
    seconds, rest = 0.0, float(transfer.bytes)
    for link in links:
        crossing = rest * (link.devices - 1) / link.devices
        # around a torus a part travels a quarter of the way on average, in both directions
        crowd = max(1.0, link.devices / 4) if link.torus else 1.0
        seconds = max(seconds, _rounds(link) * link.latency) + crowd * crossing / link.bandwidth
        rest -= crossing
    return seconds


def _rounds(link: Link) -> int:
    return link.devices // 2 if link.torus else 1
