"""Where `make_mesh` puts devices: parts that a slow network joins on the first axis, neighbours on the last."""

import itertools
import os
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from energy_attn.distributed import make_mesh
from energy_attn.distributed.runtime._mesh import _arranged, _default_shape

NAMES = ("node", "device")


def devices(platform: str, process: list[int], slices: list[int] | None = None) -> list:
    """Devices of several processes, as the real ones show themselves; on the CPU none has a slice."""
    kind = {"cpu": "cpu", "gpu": "NVIDIA H100"}[platform]
    several = [
        SimpleNamespace(id=i, platform=platform, device_kind=kind, process_index=p)
        for i, p in enumerate(process)
    ]
    for device, number in zip(several, slices or [], strict=False):
        device.slice_index = number
    return several


def ids(shape, found) -> list:
    return np.vectorize(lambda d: d.id)(_arranged(shape, found)).tolist()


def test_processes_on_the_slow_axis():
    """Interleaved, as some runtimes number them: every row is one process."""
    found = devices("cpu", [0, 1, 0, 1, 0, 1, 0, 1])
    assert _default_shape(found, NAMES) == (2, 4)
    assert ids((2, 4), found) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert ids((4, 2), found) == [[0, 2], [4, 6], [1, 3], [5, 7]]
    assert ids((8,), found) == [0, 2, 4, 6, 1, 3, 5, 7]


def test_slow_network_goes_along_the_first_axis_that_it_divides():
    """Six parts over a first axis of two: the rest of them along the next one, neighbours still innermost."""
    found = devices("cpu", [p for p in range(6) for _ in range(2)])
    rows = np.array(ids((2, 6), found))
    assert (rows[0] < 6).all() and (rows[1] >= 6).all()
    assert rows[0].reshape(3, 2).tolist() == [[0, 1], [2, 3], [4, 5]]


def test_hosts_and_not_processes_of_gpus():
    """A process for each GPU, as SLURM starts them: the slow network joins hosts (`slice_index`)."""
    found = devices("gpu", list(range(8)), [0, 1] * 4)
    assert _default_shape(found, NAMES) == (2, 4)
    assert ids((2, 4), found) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    one_host = devices("gpu", list(range(8)), [0] * 8)
    assert _default_shape(one_host, NAMES) == (1, 8)
    assert _default_shape(devices("cpu", list(range(8))), NAMES) == (8, 1)


def test_processes_of_different_sizes():
    found = devices("cpu", [0, 0, 0, 1])
    with pytest.raises(ValueError, match=r"shape: wanted the size of each axis, .*\(3, 1\)"):
        _default_shape(found, NAMES)
    assert ids((4,), found) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="devices: wanted as many of each slice, got 3, 1"):
        _arranged((4,), devices("gpu", [0, 0, 0, 1], [0, 0, 0, 1]))


def test_one_process_keeps_the_order_that_it_is_given():
    backwards = jax.devices()[::-1]
    assert make_mesh((2, 4), devices=backwards).devices.ravel().tolist() == backwards
    assert dict(make_mesh().shape) == {"node": 1, "device": 8}
    with pytest.raises(ValueError, match="devices: wanted at least one"):
        make_mesh(devices=[])


@pytest.fixture(scope="module")
def topology():
    """TPU chips without hardware, from libtpu's own description of them."""
    from jax.experimental import topologies

    quiet = {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_ACCELERATOR_TYPE": "v5litepod-4"}
    quiet |= {"TPU_LOG_DIR": "disabled", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    for name, value in quiet.items():
        os.environ.setdefault(name, value)
    return lambda name, **options: (
        topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices
    )


def hops(row) -> list[int]:
    """Links between neighbours of a row, without the wrap-around of a torus."""
    return [
        sum(abs(a - b) for a, b in zip(x.coords, y.coords, strict=True))
        for x, y in itertools.pairwise(row)
    ]


@pytest.mark.tpu
def test_slices_of_a_tpu(topology):
    """`jax.make_mesh` refuses several slices."""
    found = topology("v5p:2x2x2", num_slices=4)
    mesh = make_mesh(devices=found, explicit=True)
    assert dict(mesh.shape) == {"node": 4, "device": 8}
    assert [[d.slice_index for d in row] for row in mesh.devices] == [[i] * 8 for i in range(4)]
    halves = make_mesh((8, 4), devices=found[::-1])
    assert all(len({d.slice_index for d in row}) == 1 for row in halves.devices)
    wide = make_mesh((2, 16), devices=found)
    assert [len({d.slice_index for d in row}) for row in wide.devices] == [2, 2]


@pytest.mark.tpu
@pytest.mark.parametrize("shape", [None, (32, 2), (4, 16), (2, 2, 16)])
def test_one_slice_of_a_tpu(topology, shape):
    """Every chip once, whatever the shape; where an axis of the torus serves, its neighbours are linked."""
    names = NAMES if shape is None or len(shape) == 2 else ("a", "b", "c")
    found = topology("v5p:4x4x4")
    mesh = make_mesh(shape, names, devices=found)
    assert {d.id for d in mesh.devices.flat} == {d.id for d in found}
    if mesh.devices.shape[-1] <= 4:
        assert all(set(hops(row)) == {1} for row in mesh.devices)
