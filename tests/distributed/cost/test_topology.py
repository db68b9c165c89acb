"""The network of a mesh (by name, with custom numbers, from its devices), and what a collective lasts on it."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from energy_attn.distributed import cost, make_mesh, merge_across
from energy_attn.distributed.cost._interconnects import of_sizes, usual_topology
from energy_attn.distributed.internal import network as model
from energy_attn.kernels import AttentionState

NAMES = ("slice", "node", "device")


@dataclasses.dataclass(frozen=True)
class Device:
    """What the network is read from."""

    id: int
    device_kind: str
    platform: str
    process_index: int
    slice_index: int | None = None
    coords: tuple[int, ...] = ()
    client: None = None


def mesh(shape, kind, platform="gpu", per_process=8, slices=None, coords=None):
    """A mesh of devices in their order, so many in a process."""
    count = int(np.prod(shape))
    found = np.empty(count, object)
    for i in range(count):
        process = i // per_process
        at = coords[i] if coords else ()
        found[i] = Device(i, kind, platform, process, slices and slices[i], at)
    return Mesh(found.reshape(shape), NAMES[-len(shape) :])


def seen(topology):
    return topology.name, [link.name for link in topology.links]


@pytest.mark.parametrize(
    ("kind", "platform", "name", "inside"),
    [
        ("NVIDIA H100 80GB HBM3", "gpu", "dgx_h100", "NVLink 4"),
        ("NVIDIA H200", "gpu", "dgx_h200", "NVLink 4"),
        ("AMD Instinct MI300X", "rocm", "mi300x", "Infinity Fabric"),
        ("NVIDIA GeForce RTX 4090", "gpu", "rtx_4090", "PCIe 4.0 x16"),
        ("NVIDIA GH200 480GB", "gpu", "dgx_h100", "NVLink 4"),  # not known: the default
        ("TPU v4", "tpu", "tpu_v4", "ICI"),
        ("TPU v5 lite", "tpu", "tpu_v5e", "ICI"),
        ("TPU v5e", "tpu", "tpu_v5e", "ICI"),
        ("TPU v5", "tpu", "tpu_v5p", "ICI"),
        ("TPU v5p", "tpu", "tpu_v5p", "ICI"),
        ("TPU v6 lite", "tpu", "tpu_v6e", "ICI"),
        ("TPU v6e", "tpu", "tpu_v6e", "ICI"),
        ("TPU7x", "tpu", "tpu_7x", "ICI"),
    ],
)
def test_every_machine_is_known(kind, platform, name, inside):
    """A preset that no device leads to; a mesh of one machine taken for another."""
    coords = [(x, y, 0) for x in range(2) for y in range(4)] if platform == "tpu" else None
    found = cost.topology(mesh((2, 4), kind, platform, coords=coords))
    assert seen(found) == (name, [inside] * 2)
    assert seen(of_sizes((2, 4), platform, kind, 1)) == seen(found)
    assert found.platform == ("tpu" if platform == "tpu" else "gpu")


def test_axes_between_hosts():
    """A slow axis that is not the first, or one that a mesh of one host has; an axis over hosts and devices."""
    hosts = mesh((4, 8), "NVIDIA H100 80GB HBM3")
    assert seen(cost.topology(hosts)) == ("dgx_h100", ["400 Gbit/s", "NVLink 4"])
    turned = Mesh(hosts.devices.T, NAMES[1:])
    assert seen(cost.topology(turned))[1] == ["NVLink 4", "400 Gbit/s"]
    assert [link.devices for link in cost.topology(turned).links] == [8, 4]
    both = cost.topology(mesh((16,), "NVIDIA H100 80GB HBM3"))
    assert seen(both)[1] == ["400 Gbit/s"]
    assert cost.topology(hosts, axes="device").links[0].name == "NVLink 4"
    # a process for each GPU of a host
    alone = mesh((8,), "NVIDIA H200", per_process=1, slices=[0] * 8)
    assert seen(cost.topology(alone)) == ("dgx_h200", ["NVLink 4"])
    # processes of several CPU devices share a card
    # (JAX gives those of one machine one slice)
    cpu = cost.topology(mesh((2, 2, 2), "cpu", "cpu", per_process=4, slices=[0] * 8))
    assert [link.name for link in cpu.links] == ["Ethernet", "loopback", "loopback"]
    assert (cpu.links[0].sharing, cpu.links[0].bandwidth) == (4, 1.25e8 / 4)


def test_slices_are_networks_of_their_own():
    """Several TPU slices taken for one: permutes between them priced as hops of a torus."""
    corners = [(x, y, z) for x in range(2) for y in range(2) for z in range(2)]
    two = mesh(
        (2, 8),
        "TPU v5",
        "tpu",
        slices=[0] * 8 + [1] * 8,
        coords=[*corners, *corners],
        per_process=4,
    )
    found = cost.topology(two)
    assert seen(found) == ("tpu_v5p", ["data-centre network", "ICI"])
    assert [link.torus for link in found.links] == [False, True]
    # XLA finds a ring among the eight, whatever their order
    assert found.links[1] == cost.topology("tpu_v5p", (8,)).links[0]


def test_coordinates():
    """A line of chips taken for a ring; two devices of a chip that each have all of its links."""
    ici = cost.topology("tpu_v5e", (4,)).links[0]
    line = [(x, 0, 0) for x in range(4)]
    found = cost.topology(mesh((4,), "TPU v5 lite", "tpu", coords=line)).links[0]
    assert found == dataclasses.replace(ici, latency=2 * ici.latency, bandwidth=ici.bandwidth / 2)
    joined = cost.topology(mesh((4,), "TPU v5", "tpu", coords=line)).links[0]
    assert joined == cost.topology("tpu_v5p", (4,)).links[0]
    every_second = mesh((2, 2), "TPU v5", "tpu", coords=[line[i] for i in (0, 2, 1, 3)])
    found = cost.topology(every_second).links
    assert [link.latency for link in found] == [joined.latency, 2 * joined.latency]
    cores = [place for place in line for _ in range(2)]
    shared = cost.topology(mesh((4, 2), "TPU7x", "tpu", coords=cores))
    whole = cost.topology("tpu_7x", (4, 2))
    assert shared.links[0].bandwidth == whole.links[0].bandwidth / 2


@pytest.mark.parametrize(
    ("sizes", "platform", "processes", "names"),
    [
        ((8,), "cpu", 1, ("memory",)),
        ((2, 4), "cpu", 2, ("Ethernet", "loopback")),
        ((4,), "cpu", 4, ("Ethernet",)),
        ((16, 8), "gpu", 16, ("400 Gbit/s", "NVLink 4")),
        ((1, 8), "gpu", 2, ("400 Gbit/s", "NVLink 4")),
        ((2, 4), "gpu", 1, ("NVLink 4", "NVLink 4")),
        ((4, 4, 8), "tpu", 32, ("ICI", "ICI", "ICI")),
    ],
)
def test_usual_topologies(sizes, platform, processes, names):
    """A mesh whose devices are not at hand that is taken for another machine."""
    found = of_sizes(sizes, platform, "", processes)
    assert tuple(link.devices for link in found.links) == sizes
    assert tuple(link.name for link in found.links) == names
    assert found.platform == platform


def test_the_mesh_in_force():
    """Devices of all processes asked where a mesh of some is in force; none found inside `jax.jit`."""
    found = {}
    state = AttentionState(np.ones((1, 2, 3), np.float32), np.ones((1, 2), np.float32))

    def fold(*state):
        found["jit"] = usual_topology(jax.sharding.get_abstract_mesh(), ("device",))
        return merge_across(AttentionState(*state), ("device",)).lse

    four = make_mesh((4,), ("device",), devices=jax.devices()[:4])
    run = jax.jit(
        jax.shard_map(fold, mesh=four, in_specs=(P(), P()), out_specs=P(), check_vma=False)
    )
    with jax.set_mesh(four):
        run.lower(*state)
    assert found.pop("jit") == cost.topology("simulated", (4,))
    run = jax.jit(
        jax.shard_map(fold, mesh=four, in_specs=(P(), P()), out_specs=P(), check_vma=False)
    )
    run.lower(*state)  # none is in force
    assert found["jit"] == cost.topology("simulated", (4,))


def test_numbers_of_ones_own():
    """Measured numbers that go to another axis than they are given for, or that a machine's own replace."""
    own = cost.topology("ethernet", (4,), nodes=2)
    assert [link.devices for link in own.links] == [2, 4]
    assert (own.links[0].bandwidth, own.links[0].sharing) == (1.25e8 / 4, 4)
    first = cost.topology("ethernet", (4,), nodes=2, latency=3.0, bandwidth=5.0)
    assert [(x.latency, x.bandwidth) for x in first.links] == [(3, 5), (0, 1e9)]
    each = cost.topology("ethernet", (4,), nodes=2, latency=(3, 1), bandwidth=(5, 7), launch=2)
    assert [(x.latency, x.bandwidth) for x in each.links] == [(3, 5), (1, 7)]
    assert (each.launch, each.overhead, each.links[0].sharing) == (2, own.overhead, 4)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (("token_ring", (2,)), {}, ValueError, "machine: wanted one of 'dgx_h100', .*'token_ring'"),
        (("tpu_v5p", 3), {}, TypeError, "sizes: wanted one for each mesh axis, got int 3"),
        (("tpu_v5p", (2, 0)), {}, ValueError, "sizes: .*at least 1, got 0"),
        (("tpu_v5p",), {}, ValueError, "links: wanted one for each mesh axis, got none"),
        (("dgx_h100", (8,)), {"nodes": 0}, ValueError, "nodes: .*at least 1, got 0"),
        (("dgx_h100", (8,)), {"latency": (1, 2)}, ValueError, r"latency: .*1 axes, got \(1, 2\)"),
        (("dgx_h100", (8,)), {"bandwidth": 0}, ValueError, "bandwidth: .*above 0, got 0"),
        (("dgx_h100", (8,)), {"overhead": -1}, ValueError, "overhead: .*0 or more, got -1"),
    ],
)
def test_wrong_arguments(arguments, options, error, message):
    """Errors that do not say what was wrong, or what there is."""
    with pytest.raises(error, match=message):
        cost.topology(*arguments, **options)


# --- seconds and bytes of a collective

LATENCY, BANDWIDTH, SIZE = 3.0, 2.0, 16


def network(*devices, torus=False, all_reduce="tree", **options):
    links = tuple(cost.Link(n, LATENCY, BANDWIDTH, torus=torus) for n in devices)
    return cost.Topology("test", links, all_reduce, **options)


@pytest.mark.parametrize(("distance", "hops"), [(1, 1), (3, 3), (5, 3), (7, 1), (9, 1)])
def test_a_message(distance, hops):
    """A torus that is crossed the long way round; a switch that is taken for one."""
    transfer = model.Transfer("collective-permute", SIZE, (0,), distance=distance)
    assert model.seconds(transfer, network(8, torus=True)) == hops * (LATENCY + SIZE / BANDWIDTH)
    assert model.seconds(transfer, network(8)) == LATENCY + SIZE / BANDWIDTH
    taken = model.seconds(transfer, network(8, launch=0.5, overhead=0.25))
    assert taken == 0.5 + LATENCY + 0.25 + SIZE / BANDWIDTH


def test_a_message_over_two_networks():
    """The slow one of two that are crossed at once, whose card one device has for itself."""
    slow = cost.Link(2, 10.0, 0.5, sharing=4)
    found = cost.Topology("test", (slow, cost.Link(4, LATENCY, BANDWIDTH)))
    transfer = model.Transfer("collective-permute", SIZE, (0, 1))
    assert model.seconds(transfer, found) == 10 + SIZE / (0.5 * 4)


def test_sums_and_gathers():
    """Hops or bytes of another algorithm than the platform's: two trees, one ring, or axis by axis."""
    summed, gathered = (model.Transfer(x, SIZE, (0,)) for x in ("all-reduce", "all-gather"))
    assert model.seconds(summed, network(8)) == 2 * 3 * LATENCY + 2 * SIZE / BANDWIDTH
    ring = 7 * LATENCY + 7 / 8 * SIZE / BANDWIDTH
    assert model.seconds(summed, network(8, all_reduce="ring")) == 2 * ring
    levels = network(8, torus=True, all_reduce="levels")
    assert model.seconds(summed, levels) == 2 * (4 * LATENCY + 7 / 8 * SIZE / BANDWIDTH)
    assert model.seconds(gathered, levels) == 4 * LATENCY + 7 * SIZE / BANDWIDTH
    # two of gloo's that send to each other take turns
    two = LATENCY + SIZE / BANDWIDTH
    assert model.seconds(gathered, network(2, all_reduce="ring")) == two + SIZE / BANDWIDTH


def test_an_exchange():
    """Parts for all others that travel further than a quarter of a torus, or wait for none."""
    transfer = model.Transfer("all-to-all", SIZE, (0,))
    crossing = 7 / 8 * SIZE / BANDWIDTH
    assert model.seconds(transfer, network(8)) == LATENCY + crossing
    assert model.seconds(transfer, network(8, torus=True)) == 4 * LATENCY + 2 * crossing
    late = model.seconds(transfer, network(8, overhead=0.25))
    assert late == LATENCY + 0.25 + crossing + 6 * 0.25


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        ("all-reduce", 7 / 4),
        ("all-gather", 7),
        ("reduce-scatter", 7 / 8),
        ("all-to-all", 7 / 8),
        ("collective-permute", 1),
    ],
)
def test_bytes(kind, part):
    """What one of eight devices puts on links: of a sum twice the share that is not its own."""
    transfer = model.Transfer(kind, SIZE, (0, 1), count=3)
    assert model.sent(transfer, network(2, 4, all_reduce="ring")) == 3 * part * SIZE
