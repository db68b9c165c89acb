"""`python -m benchmarks.network`: what it fits, over simulated devices and over processes. Never how fast."""

import dataclasses
import json

import jax
import pytest

from benchmarks import network
from energy_attn.distributed import cost, make_mesh
from energy_attn.distributed.internal import network as modelled
from tests.support.flags import launch

AXES = ("node", "device")
KINDS = {"collective-permute", "all-gather", "all-reduce", "all-to-all"}


def links(*given):
    return tuple(cost.Link(devices, 1e-5 * devices, 1e9 * devices, **x) for devices, x in given)


@pytest.mark.parametrize(
    "kept",
    [
        cost.Topology("levels", links((2, {}), (4, {})), "levels", 5e-5, "cpu"),
        cost.Topology("ring", links((8, {"sharing": 2}), (2, {})), "ring", 1e-4, "cpu", 5e-4),
        cost.Topology("torus", links((4, {"torus": True}), (8, {"torus": True})), "levels", 1e-6),
        cost.Topology("one axis", links((4, {"torus": True}), (1, {})), "levels", 1e-6),
    ],
    ids=lambda topology: topology.name,
)
def test_what_is_fitted(kept):
    """A network that is not found again in the times that the model says of it."""
    timings = [
        network.Timing(
            axis, kind, size, modelled.seconds(modelled.Transfer(kind, size, (i,)), kept)
        )
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
    found = network.fit(timings, AXES, usual)
    assert found.launch == pytest.approx(kept.launch, rel=0.01)
    assert found.overhead == pytest.approx(kept.overhead, rel=0.01, abs=1e-8)
    for link, wanted in zip(found.links, kept.links, strict=True):
        if wanted.devices > 1:
            assert link.latency == pytest.approx(wanted.latency, rel=0.01, abs=1e-8)
            assert link.bandwidth == pytest.approx(wanted.bandwidth, rel=0.01)
            assert (link.torus, link.sharing) == (wanted.torus, wanted.sharing)
    assert (found.all_reduce, found.platform) == (kept.all_reduce, kept.platform)


def printed(said):
    """The topology that is printed."""
    return eval(said.split("measured: ")[1].split("\n")[0], dict(vars(cost)))


def test_simulated_devices(tmp_path, capsys, monkeypatch):
    """A topology that no program takes, or that says nothing of what was measured; a collective that is left out."""
    sizes = {size: 1 for size in (min(network.SIZES), max(network.SIZES))}
    monkeypatch.setattr(network, "SIZES", sizes)
    arguments = ["--mesh", "node=2,device=4", "--repeats", "2"]
    assert network.main([*arguments, "--shrink", "256", "--out", str(tmp_path)]) == 0
    found = printed(capsys.readouterr().out)
    kept = json.loads((tmp_path / "network.json").read_text())
    assert [link.devices for link in found.links] == [2, 4] and found.platform == "cpu"
    assert kept["topology"] == json.loads(json.dumps(dataclasses.asdict(found)))
    times = kept["times"]
    assert {(row["axis"], row["kind"]) for row in times} == {(a, k) for a in AXES for k in KINDS}
    assert all(row["seconds"] > 0 and row["fitted"] > 0 for row in times)


@pytest.mark.full
def test_processes(tmp_path):
    """Processes that time another number of collectives, and so wait for each other forever; two that write."""
    arguments = ["-m", "benchmarks.network", "--repeats", "2"]
    options = ["--shrink", "256", "--out", tmp_path]
    ended = launch("-n", 2, "--devices", 2, "--", *arguments, *options)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = printed(ended.stdout)
    assert [link.devices for link in found.links] == [2, 2]
    assert (found.all_reduce, found.links[0].sharing) == ("ring", 2)
    assert ended.stdout.count("wrote") == 1


def test_wrong_options(capsys, monkeypatch):
    """A mesh of no sizes; a network of one device."""
    alone = make_mesh((1,), ("x",), devices=jax.devices()[:1])
    monkeypatch.setattr(network, "make_mesh", lambda *_: alone)
    for arguments, said in (
        (["--mesh", "node"], "wanted NAME=SIZE,..., got 'node'"),
        ([], "--mesh: wanted two or more devices, got one"),
    ):
        with pytest.raises(SystemExit):
            network.main(arguments)
        assert said in capsys.readouterr().err
