"""The suite `tune` of `bench`: what it measures and keeps, interpreted. Never how fast."""

import json

import jax
import pytest

from energy_attn.__main__ import main
from energy_attn.cli.bench import _tune
from energy_attn.kernels import GPUPlan, GPUTiles, load_gpu_plan
from energy_attn.kernels.internal import platform_here

SMALL = (32, 16, 4, 2, 1), (16, 16, 4, 2, 1), (64, 1024, 4, 8, 1)
CALL = _tune.Call("forward", 40, 600, 4, 2, 16, SMALL)


def test_dry_run(tmp_path, capsys):
    """A kernel that is not tuned, or a file that `pallas_gpu` does not read."""
    arguments = ["bench", "--suite", "tune", "--repeats", "1", "--out", str(tmp_path)]
    assert main([*arguments, "--dry-run"]) == 0
    path = tmp_path / "gpu_plan.json"
    assert f"ENERGY_ATTN_GPU_PLAN={path}" in capsys.readouterr().out
    assert isinstance(load_gpu_plan(path), GPUPlan)
    times = json.loads(path.read_text())["measured"]["times"]
    assert [row["call"].split(",")[0] for row in times] == ["forward", "query", "key", "tangent"]
    for row in times:
        assert not row["absent"] and len(row["seconds"]) == 2


@pytest.mark.skipif(platform_here() == "cuda", reason="there is a GPU")
def test_without_a_gpu(capsys):
    """Times of the interpreter, which say nothing, in a plan."""
    assert main(["bench", "--suite", "tune"]) == 2
    said = f"measures a GPU of NVIDIA's, got {platform_here()}; --dry-run"
    assert said in capsys.readouterr().err


def test_what_is_kept(monkeypatch):
    """Tiles that are slower, wrong or do not fit; or conditions that make them those of other calls."""
    by_name = dict(zip(("32 x 16", "16 x 16", "64 x 1024"), (2.0, 1.0, 0.1), strict=True))

    def measure(sides, repeats):
        return {name: [by_name.get(name.split(",")[0], 3.0)] * repeats for name in sides}

    monkeypatch.setattr(_tune, "measure", measure)
    best, row = _tune.tune(CALL, "float32", 2)
    assert best == GPUTiles(
        *("forward", 16, 16, 4, 2, 132),
        device=jax.devices()[0].device_kind,
        dtype="float32",
        width=16,
        value_width=16,
        call_rows=128,
        score=False,
    )
    assert row["times_faster"] == 3.0
    assert "which take 900" in row["absent"]["64 x 1024, 4 warps, 8 stages, 1"]
    by_name["32 x 16"] = 2.95
    assert _tune.tune(CALL._replace(candidates=SMALL[:1]), "float32", 2)[0] is None
    monkeypatch.setattr(_tune, "TOLERANCE", -1.0)
    best, row = _tune.tune(CALL._replace(candidates=SMALL[1:2]), "float32", 2)
    assert best is None and "differs by" in row["absent"]["16 x 16, 4 warps, 2 stages, 1"]


def test_candidates():
    """Sizes that the kernels cannot have, or the same twice; or rows of a class that is not tuned."""
    rows = [call.call_rows for call in _tune.calls()]
    assert rows == [256] * 8 + [16, 32, 64, 128]
    for call in _tune.calls():
        assert len(set(call.candidates)) == len(call.candidates)
        for rows, keys, warps, stages, each in call.candidates:
            GPUTiles(call.kind, rows, keys, warps, stages, 132 * each)
