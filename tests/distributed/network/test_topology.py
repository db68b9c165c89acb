"""The network of a mesh from its devices, and from files."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from energy_attn.distributed import cost, make_mesh, merge_across
from energy_attn.distributed.network._devices import usual_topology
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
        ("NVIDIA H100 80GB HBM3", "gpu", "DGX H100", "NVLink 4"),
        ("NVIDIA H200", "gpu", "DGX H200", "NVLink 4"),
        ("AMD Instinct MI300X", "rocm", "MI300X", "Infinity Fabric"),
        ("NVIDIA GeForce RTX 4090", "gpu", "RTX 4090", "PCIe 4.0 x16"),
        ("NVIDIA GH200 480GB", "gpu", "DGX H100", "NVLink 4"),  # not known: the default
        ("TPU v4", "tpu", "TPU v4", "ICI"),
        ("TPU v5 lite", "tpu", "TPU v5e", "ICI"),
        ("TPU v5e", "tpu", "TPU v5e", "ICI"),
        ("TPU v5", "tpu", "TPU v5p", "ICI"),
        ("TPU v5p", "tpu", "TPU v5p", "ICI"),
        ("TPU v6 lite", "tpu", "TPU v6e", "ICI"),
        ("TPU v6e", "tpu", "TPU v6e", "ICI"),
        ("TPU7x", "tpu", "TPU tpu7x", "ICI"),
    ],
)
def test_every_machine_is_known(kind, platform, name, inside):
    """A preset that no device leads to; a mesh of one machine taken for another."""
    coords = [(x, y, 0) for x in range(2) for y in range(4)] if platform == "tpu" else None
    found = cost.topology_of_mesh(mesh((2, 4), kind, platform, coords=coords))
    assert seen(found) == (name, [inside] * 2)
    assert seen(cost.topology_of(NAMES[1:], (2, 4), platform, kind=kind)) == seen(found)
    assert found.platform == ("tpu" if platform == "tpu" else "gpu")


def test_axes_between_hosts():
    """A slow axis that is not the first, or one that a mesh of one host has; an axis over hosts and devices."""
    hosts = mesh((4, 8), "NVIDIA H100 80GB HBM3")
    assert seen(cost.topology_of_mesh(hosts)) == (
        "4 hosts of DGX H100",
        ["400 Gbit/s", "NVLink 4"],
    )
    turned = Mesh(hosts.devices.T, NAMES[1:])
    assert seen(cost.topology_of_mesh(turned))[1] == ["NVLink 4", "400 Gbit/s"]
    assert [link.devices for link in cost.topology_of_mesh(turned).links] == [8, 4]
    both = cost.topology_of_mesh(mesh((16,), "NVIDIA H100 80GB HBM3"))
    assert seen(both)[1] == ["400 Gbit/s"]
    assert cost.topology_of_mesh(hosts, "device").links[0].name == "NVLink 4"
    # a process for each GPU of a host
    alone = mesh((8,), "NVIDIA H200", per_process=1, slices=[0] * 8)
    assert seen(cost.topology_of_mesh(alone)) == ("DGX H200", ["NVLink 4"])
    # processes of several CPU devices share a card
    # (JAX gives those of one machine one slice)
    cpu = cost.topology_of_mesh(mesh((2, 2, 2), "cpu", "cpu", per_process=4, slices=[0] * 8))
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
    found = cost.topology_of_mesh(two)
    assert seen(found) == ("2 slices of TPU v5p", ["data-centre network", "ICI"])
    assert [link.torus for link in found.links] == [False, True]
    # XLA finds a ring among the eight, whatever their order
    assert found.links[1] == cost.tpu("v5p", (8,)).links[0]


def test_coordinates():
    """A line of chips taken for a ring; two devices of a chip that each have all of its links."""
    ici = cost.tpu("v5e", (4,)).links[0]
    line = [(x, 0, 0) for x in range(4)]
    found = cost.topology_of_mesh(mesh((4,), "TPU v5 lite", "tpu", coords=line)).links[0]
    assert found == dataclasses.replace(ici, latency=2 * ici.latency, bandwidth=ici.bandwidth / 2)
    joined = cost.topology_of_mesh(mesh((4,), "TPU v5", "tpu", coords=line)).links[0]
    assert joined == cost.tpu("v5p", (4,)).links[0]
    every_second = mesh((2, 2), "TPU v5", "tpu", coords=[line[i] for i in (0, 2, 1, 3)])
    found = cost.topology_of_mesh(every_second).links
    assert [link.latency for link in found] == [joined.latency, 2 * joined.latency]
    cores = [place for place in line for _ in range(2)]
    shared = cost.topology_of_mesh(mesh((4, 2), "TPU7x", "tpu", coords=cores))
    whole = cost.tpu("tpu7x", (4, 2))
    assert shared.links[0].bandwidth == whole.links[0].bandwidth / 2


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
    assert found.pop("jit") == cost.simulated(4)
    run = jax.jit(
        jax.shard_map(fold, mesh=four, in_specs=(P(), P()), out_specs=P(), check_vma=False)
    )
    run.lower(*state)  # none is in force
    assert found["jit"] == cost.simulated(4)


def test_files(tmp_path, monkeypatch):
    """A file that is read as another network, or not at all; one for another mesh."""
    path = tmp_path / "here.json"
    kept = dataclasses.replace(cost.ethernet(2, 4), name="measured")
    cost.save_topology(path, kept, ("node", "device"), measured={"seconds": [1.0]})
    assert cost.load_topology(path) == kept
    assert cost.load_topology(path, ("device", "node")).links == kept.links[::-1]
    monkeypatch.setenv("ENERGY_ATTN_TOPOLOGY", str(path))
    grid = make_mesh((2, 4)).abstract_mesh
    assert usual_topology(grid, ("node", "device")) == kept
    assert usual_topology(grid, ("device",)).links == kept.links[1:]
    with pytest.raises(ValueError, match="ENERGY_ATTN_TOPOLOGY: wanted 4 devices along 'node'"):
        usual_topology(make_mesh((4, 2)).abstract_mesh, ("node", "device"))
    with pytest.raises(
        ValueError, match=r"ENERGY_ATTN_TOPOLOGY: axes: .*\('node', 'device'\).*'x'"
    ):
        usual_topology(make_mesh((8,), ("x",)).abstract_mesh, ("x",))
    monkeypatch.setenv("ENERGY_ATTN_TOPOLOGY", str(tmp_path / "none.json"))
    with pytest.raises(ValueError, match=r"ENERGY_ATTN_TOPOLOGY: .*none\.json"):
        usual_topology(grid, ("node",))
    monkeypatch.delenv("ENERGY_ATTN_TOPOLOGY")
    assert usual_topology(grid, ("node",)) == cost.simulated(2)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x.pop("launch"), "launch: wanted in .*here.json, got none"),
        (lambda x: x.update(overhead=-1.0), "overhead: wanted seconds, 0 or more, got -1.0, in"),
        (lambda x: x.update(lunch=1), "lunch: wanted one of the keys"),
        (lambda x: x.update(launch="1"), "launch: .*got str '1'"),
        (lambda x: x.update(all_reduce="star"), "all_reduce: wanted one of 'ring'"),
        (lambda x: x.update(axes=["node"]), "axes: wanted a name for each of the 2 links"),
        (lambda x: x.update(links=3), "links: wanted a list, got int 3"),
        (lambda x: x["links"][1].pop("latency"), r"links\[1\].latency: wanted in"),
        (lambda x: x["links"][1].update(bandwidth=0), "bandwidth: .*above 0, got 0, in"),
        (lambda x: x["links"].append(3), r"links\[2\]: wanted an object"),
    ],
)
def test_wrong_files(tmp_path, change, message):
    """A file that is taken for a topology although a key is missing, unknown or wrong; errors that do not name it."""
    path = tmp_path / "here.json"
    cost.save_topology(path, cost.ethernet(2, 4), ("node", "device"))
    kept = json.loads(path.read_text())
    change(kept)
    path.write_text(json.dumps(kept))
    with pytest.raises(ValueError, match=message):
        cost.load_topology(path)
    path.write_text("{")
    with pytest.raises(ValueError, match=r"path: wanted a file of JSON, got .*here\.json"):
        cost.load_topology(path)
