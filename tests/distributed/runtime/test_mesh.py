"""Where `make_mesh` puts devices: parts that a slow network joins on the first axis, neighbours on the last."""

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
