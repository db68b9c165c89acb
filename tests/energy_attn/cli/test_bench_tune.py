"""The suite `tune` of `bench`: what it measures and keeps, interpreted. Never how fast."""

import json
import re

import jax
import pytest

from energy_attn.__main__ import main
from energy_attn.cli._tiles import Sizes
from energy_attn.cli.bench import _tune
from energy_attn.kernels import GPUPlan, GPUTiles, PallasGPU
from energy_attn.kernels.internal import platform_here

SMALL = Sizes(32, 16, 4, 2), Sizes(16, 16, 4, 2), Sizes(64, 1024, 4, 8)
CALL = _tune.Call("forward", 40, 600, 4, 2, 16, "float32", SMALL, False)


def printed(capsys):
    """The kernel with the tiles that are kept, as the last line has it."""
    names = {"GPUPlan": GPUPlan, "GPUTiles": GPUTiles, "PallasGPU": PallasGPU}
    return eval(capsys.readouterr().out.rpartition("its tiles: ")[2], names)


@pytest.mark.full
def test_dry_run(tmp_path, capsys):
    """A kernel that is not tuned, or tiles that are printed in a form that no program takes."""
    arguments = ["bench", "--suite", "tune", "--repeats", "1", "--out", str(tmp_path)]
    assert main([*arguments, "--dry-run"]) == 0
    assert isinstance(printed(capsys), PallasGPU)
    times = json.loads((tmp_path / "tune.json").read_text())["times"]
    assert [row["call"].split(",")[0] for row in times] == [
        *("forward", "query", "key", "tangent", "forward")
    ]
    for row in times:
        assert not row["absent"] and len(row["seconds"]) == 2
    assert "16 x 16, 4 warps, 2 stages, 1 of 1" in times[-1]["seconds"]


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

    side, sides = _tune._side, {}

    def compiled_once(call, arrays, tiles):
        return sides.setdefault(tiles, side(call, arrays, tiles))

    monkeypatch.setattr(_tune, "measure", measure)
    monkeypatch.setattr(_tune, "_side", compiled_once)
    best, row = _tune.tune(CALL, 2)
    assert best == GPUTiles(
        *("forward", 16, 16, 4, 2, 132),
        device=jax.devices()[0].device_kind,
        dtype="float32",
        width=16,
        value_width=16,
        call_rows=128,
        score=False,
        few_keys=False,
    )
    assert row["times_faster"] == 3.0
    assert "which take 900" in row["absent"]["64 x 1024, 4 warps, 8 stages, 1"]
    by_name["32 x 16"] = 2.95
    assert _tune.tune(CALL._replace(candidates=SMALL[:1]), 2)[0] is None
    monkeypatch.setattr(_tune, "TOLERANCE", -1.0)
    best, row = _tune.tune(CALL._replace(candidates=SMALL[1:2]), 2)
    assert best is None and "differs by" in row["absent"]["16 x 16, 4 warps, 2 stages, 1"]


def test_candidates():
    """Sizes that the kernels cannot have, or the same twice; or rows of a class that is not tuned."""
    rows = [call.call_rows for call in _tune.calls()]
    assert rows == [256] * 8 + [16, 16, 32, 32, 64, 64, 128, 128]
    for dtype in ("bfloat16", "float32"):
        for call in _tune.calls(dtype=dtype):
            assert len(set(call.candidates)) == len(call.candidates) == len(call.tiles(132))


def test_dtypes_and_widths(tmp_path, capsys, monkeypatch):
    """A plan for other calls than were asked for, or measured: one that no call finds, or a wrong one."""
    tried = []

    def tune(call, repeats):
        tried.append(call)
        return call.tiles(132)[call.candidates[0].label], {"call": call.label}

    monkeypatch.setattr(_tune, "tune", tune)
    monkeypatch.setattr(_tune, "_line", str)
    asked = [
        "--dtype",
        "float16",
        "--width",
        "40",
        "--width",
        "16",
        "--dtype",
        "float32",
        "--width",
        "40",
    ]
    run = ["bench", "--suite", "tune", "--dry-run", "--out", str(tmp_path)]
    with monkeypatch.context() as patch:
        patch.setattr(_tune, "declined", lambda call: None)  # traces each of twenty
        assert main([*run, *asked]) == 0
    plan = printed(capsys).plan
    assert plan.tiles == tuple(call.tiles(132)[call.candidates[0].label] for call in tried)
    sides = [(call.dtype, call.width) for call in tried[:: len(tried) // 4]]
    assert sides == [("float16", 40), ("float16", 16), ("float32", 40), ("float32", 16)]
    assert {x.dtype.name for call in tried for x in call.shapes} == {"float16", "float32"}
    assert [call.arrays()[0].shape[-1] for call in tried[:6]] == [40] * 5 + [16]
    for wrong, said in (
        (["--dtype", "float64"], "--dtype float64 --width 128: pallas_gpu declines .* got float64"),
        (
            ["--width", "8192"],
            "--dtype float32 --width 8192: pallas_gpu declines .* got 8192 beside",
        ),
    ):
        assert main([*run, *wrong]) == 2
        assert re.search(said, capsys.readouterr().err)
    for wrong, said in (
        (["--dtype", "int8"], "argument --dtype: invalid choice: 'int8'"),
        (["--width", "0"], "argument --width: wanted a number of at least 1, got '0'"),
    ):
        with pytest.raises(SystemExit):
            main([*run, *wrong])
        assert said in capsys.readouterr().err
    assert main(["bench", "--suite", "cpu", "--width", "64"]) == 2
    assert "--width is for --suite tune" in capsys.readouterr().err
