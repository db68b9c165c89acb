"""The suite `network` of `bench`: what it fits, over simulated devices and over processes. Never how fast."""

import dataclasses
import json

import jax
import pytest

from energy_attn.__main__ import main
from energy_attn.cli.bench import _network
from energy_attn.distributed import cost, make_mesh
from energy_attn.distributed.internal import seconds
from energy_attn.distributed.network._devices import usual_topology
from tests.support.launch import launch

AXES = ("node", "device")
KINDS = {"collective-permute", "all-gather", "all-reduce", "all-to-all"}


@pytest.mark.parametrize(
    "kept",
    [
        cost.Topology(
            "levels",
            (cost.Link(2, 3e-4, 2e9), cost.Link(4, 2e-5, 7e9)),
            "levels",
            5e-5,
            "cpu",
        ),
        cost.ethernet(8, 2, latency=5e-4),
        cost.tpu("v5p", (4, 8)),
        cost.tpu("v6e", (4, 1)),
    ],
    ids=lambda topology: topology.name,
)
def test_what_is_fitted(kept):
    """A network that is not found again in the times that the model says of it."""
    timings = [
        _network.Timing(axis, kind, size, seconds(cost.Transfer(kind, size, (i,)), kept))
        for i, axis in enumerate(AXES)
        if kept.links[i].devices > 1
        for kind in KINDS
        for size in (4096, 1 << 18, 1 << 22)
    ]
    usual = dataclasses.replace(
        kept,
        launch=1.0,
        links=tuple(dataclasses.replace(x, latency=1.0, bandwidth=1.0) for x in kept.links),
    )
    found = _network.fit(timings, AXES, usual)
    assert found.launch == pytest.approx(kept.launch, rel=0.01)
    assert found.overhead == pytest.approx(kept.overhead, rel=0.01, abs=1e-8)
    for link, wanted in zip(found.links, kept.links, strict=True):
        if wanted.devices > 1:
            assert link.latency == pytest.approx(wanted.latency, rel=0.01, abs=1e-8)
            assert link.bandwidth == pytest.approx(wanted.bandwidth, rel=0.01)
            assert (link.torus, link.sharing) == (wanted.torus, wanted.sharing)
    assert (found.all_reduce, found.platform) == (kept.all_reduce, kept.platform)


def test_simulated_devices(tmp_path, capsys, monkeypatch):
    """A file that `auto` does not read, that leaves out a collective, or that says nothing of what was measured."""
    sizes = {size: 1 for size in (min(_network.SIZES), max(_network.SIZES))}
    monkeypatch.setattr(_network, "SIZES", sizes)
    arguments = ["--suite", "network", "--mesh", "node=2,device=4", "--repeats", "2"]
    assert main(["bench", *arguments, "--shrink", "256", "--out", str(tmp_path)]) == 0
    path = tmp_path / "topology.json"
    said = capsys.readouterr().out
    assert f"ENERGY_ATTN_TOPOLOGY={path}" in said
    found = cost.load_topology(path)
    assert [link.devices for link in found.links] == [2, 4]
    assert found.platform == "cpu"
    times = json.loads(path.read_text())["measured"]["times"]
    assert {(row["axis"], row["kind"]) for row in times} == {(a, k) for a in AXES for k in KINDS}
    assert all(row["seconds"] > 0 and row["fitted"] > 0 for row in times)
    monkeypatch.setenv("ENERGY_ATTN_TOPOLOGY", str(path))
    assert usual_topology(make_mesh((2, 4)).abstract_mesh, AXES) == found


@pytest.mark.full
def test_processes(tmp_path):
    """Processes that time another number of collectives, and so wait for each other forever; two that write."""
    arguments = ["-m", "energy_attn", "bench", "--suite", "network", "--repeats", "2"]
    options = ["--shrink", "256", "--out", tmp_path]
    ended = launch("-n", 2, "--devices", 2, "--", *arguments, *options)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = cost.load_topology(tmp_path / "topology.json")
    assert [link.devices for link in found.links] == [2, 2]
    assert (found.all_reduce, found.links[0].sharing) == ("ring", 2)
    assert ended.stdout.count("wrote") == 1


def test_wrong_options(capsys, monkeypatch):
    """A mesh of no sizes; one for a suite that has none; a network of one device."""
    with pytest.raises(SystemExit):
        main(["bench", "--suite", "network", "--mesh", "node"])
    assert "wanted NAME=SIZE,..., got 'node'" in capsys.readouterr().err
    assert main(["bench", "--suite", "masks", "--mesh", "node=8"]) == 2
    assert "--mesh is for --suite network" in capsys.readouterr().err
    monkeypatch.setattr(
        _network, "make_mesh", lambda *_: make_mesh((1,), ("x",), devices=jax.devices()[:1])
    )
    assert main(["bench", "--suite", "network"]) == 2
    assert "a network wants two or more devices" in capsys.readouterr().err
