"""Meshes of TPUs that are not there: where their chips are put, and the network that they have."""

import itertools

import pytest
from jax.experimental import topologies

from energy_attn.distributed import cost, make_mesh

NAMES = ("node", "device")
pytestmark = pytest.mark.tpu


def chips(name, **options):
    """From libtpu's own description of them."""
    return topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices


def hops(row) -> list[int]:
    """Links between neighbours of a row, without the wrap-around of a torus."""
    return [
        sum(abs(a - b) for a, b in zip(x.coords, y.coords, strict=True))
        for x, y in itertools.pairwise(row)
    ]


def test_slices_of_a_tpu():
    """`jax.make_mesh` refuses several slices."""
    found = chips("v5p:2x2x2", num_slices=4)
    mesh = make_mesh(devices=found, explicit=True)
    assert dict(mesh.shape) == {"node": 4, "device": 8}
    assert [[d.slice_index for d in row] for row in mesh.devices] == [[i] * 8 for i in range(4)]
    halves = make_mesh((8, 4), devices=found[::-1])
    assert all(len({d.slice_index for d in row}) == 1 for row in halves.devices)
    wide = make_mesh((2, 16), devices=found)
    assert [len({d.slice_index for d in row}) for row in wide.devices] == [2, 2]


@pytest.mark.parametrize("shape", [None, (32, 2), (4, 16), (2, 2, 16)])
def test_one_slice_of_a_tpu(shape):
    """Every chip once, whatever the shape; where an axis of the torus serves, its neighbours are linked."""
    names = NAMES if shape is None or len(shape) == 2 else ("a", "b", "c")
    found = chips("v5p:4x4x4")
    mesh = make_mesh(shape, names, devices=found)
    assert {d.id for d in mesh.devices.flat} == {d.id for d in found}
    if mesh.devices.shape[-1] <= 4:
        assert all(set(hops(row)) == {1} for row in mesh.devices)


def test_compiled_for_pods():
    """Devices of libtpu that lack what is read here; slices that are not told apart."""

    def pod(name, shape=None, **options):
        found = chips(name, **options)
        if name.startswith("v4"):  # a device for each chip, as JAX has them there
            found = [device for device in found if device.core_on_chip == 0]
        shape = shape or (len(found),)
        return cost.topology(make_mesh(shape, ("slice", *NAMES)[-len(shape) :], devices=found))

    assert pod("v5p:2x2x2", (2, 2, 2)).links == cost.topology("tpu_v5p", (2, 2, 2)).links
    assert pod("v5p:2x2x2").links == cost.topology("tpu_v5p", (8,)).links
    assert pod("v5p:4x4x4", (4, 4, 4)).links == cost.topology("tpu_v5p", (4, 4, 4)).links
    several = pod("v5p:2x2x2", (4, 8), num_slices=4)
    assert several.links == cost.topology("tpu_v5p", (8,), nodes=4).links
    assert several.name == "tpu_v5p"
    assert pod("v6e:4x4", (4, 4)).name == "tpu_v6e"
    assert pod("v5e:2x4", (2, 4)).name == "tpu_v5e"
    assert pod("v4:2x2x4").name == "tpu_v4"
    assert pod("tpu7x:2x2x2").name == "tpu_7x"
