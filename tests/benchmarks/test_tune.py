"""`python -m benchmarks.tune`: what it measures and keeps, interpreted. Never how fast."""

import json
import re

import pytest

from benchmarks import runner, tune
from benchmarks.runner import OURS
from benchmarks.tiles import Call, Sizes, calls
from energy_attn.kernels.internal import GPUTiles, platform_here

SMALL = Sizes(32, 16, 4, 2), Sizes(16, 16, 4, 2), Sizes(64, 1024, 4, 8)
NO_GPU = pytest.mark.skipif(platform_here() == "cuda", reason="there is a GPU")
CALL = Call("forward", 40, 600, 4, 2, 16, "float32", SMALL, False)


@pytest.mark.full
def test_dry_run(tmp_path):
    """A kernel that is not tuned."""
    assert tune.main(["--repeats", "1", "--out", str(tmp_path), "--dry-run"]) == 0
    times = json.loads((tmp_path / "tune.json").read_text())["times"]
    kinds = [row["name"].split(",")[0] for row in times]
    assert kinds == ["forward", "query", "key", "tangent", "forward"]
    assert all(not row["absent"] and len(row["median_ms"]) == 2 for row in times)
    assert "16 x 16, 4 warps, 2 stages, 1 of 1" in times[-1]["median_ms"]


def test_what_is_kept(monkeypatch):
    """Tiles that are slower, wrong or do not fit."""
    times = {"32 x 16": 2.0, "16 x 16": 1.0}
    differs = {"32 x 16": 0.0, "16 x 16": 0.0}

    def compare(case, repeats):
        sides = case.sides()  # the largest, which do not fit, are absent
        assert list(sides) == [OURS, *(x.label for x in SMALL)]
        found = {x: x.partition(",")[0] for x in (OURS, *(y.label for y in SMALL[:2]))}
        median = {name: times.get(size, 3.0) for name, size in found.items()}
        others = {name: size for name, size in found.items() if name != OURS}
        return {
            "median_ms": median,
            "times_faster": {name: 3.0 / median[name] for name in others},
            "largest_difference": {name: differs[size] for name, size in others.items()},
        }

    monkeypatch.setattr(tune, "compare", compare)
    best, row = tune.tune(CALL, 2)
    assert row["best"] == "16 x 16, 4 warps, 2 stages, 1"
    assert best == GPUTiles("forward", 16, 16, 4, 2, 132)
    differs["16 x 16"] = float("inf")
    kept, row = tune.tune(CALL, 2)
    assert kept is not None and row["best"] == "32 x 16, 4 warps, 2 stages, 1"
    times["32 x 16"] = 2.95
    assert tune.tune(CALL, 2)[0] is None


@pytest.mark.full
def test_tiles_that_do_not_fit():
    """A candidate that ends the tuning, or is compared with other tiles than the library's own."""
    row = runner.compare(tune.compared(CALL), 1)
    assert "which take 900" in row["absent"]["64 x 1024, 4 warps, 8 stages, 1"]
    assert len(row["largest_difference"]) == 2 and max(row["largest_difference"].values()) < 1e-5


def test_candidates():
    """Sizes that the kernels cannot have, or the same twice; or rows of a class that is not tuned."""
    rows = [call.call_rows for call in calls()]
    assert rows == [256] * 8 + [16, 16, 32, 32, 64, 64, 128, 128]
    for dtype in ("bfloat16", "float32"):
        for call in calls(dtype=dtype):
            assert len(set(call.candidates)) == len(call.candidates) == len(call.tiles(132))


def test_dtypes_and_widths(tmp_path, capsys, monkeypatch):
    """Tiles for other calls than were asked for, or of another call than is printed."""
    tried = []

    def tuned(call, repeats):
        tried.append(call)
        return call.tiles(132)[call.candidates[0].label], {"absent": {}, "best": "x"}

    monkeypatch.setattr(tune, "tune", tuned)
    monkeypatch.setattr(tune, "line", str)
    run = ["--dry-run", "--out", str(tmp_path)]
    asked = "--dtype float16 --width 40 --width 16 --dtype float32 --width 40".split()
    with monkeypatch.context() as patch:
        patch.setattr(tune, "declined", lambda call: None)  # traces each of twenty
        assert tune.main([*run, *asked]) == 0
    kept = [f"{x.label}: {x.tiles(132)[x.candidates[0].label]}" for x in tried]
    assert capsys.readouterr().out.splitlines()[-len(tried) :] == kept
    sides = [(call.dtype, call.width) for call in tried[:: len(tried) // 4]]
    assert sides == [("float16", 40), ("float16", 16), ("float32", 40), ("float32", 16)]
    assert [call.shape["H"] for call in tried[:6]] == [40] * 5 + [16]
    assert [call.arrays()[0].dtype.name for call in (tried[0], tried[-1])] == ["float16", "float32"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param([], "wanted a GPU of NVIDIA's, got .*; --dry-run", marks=NO_GPU),
        (
            ["--dry-run", "--dtype", "float64"],
            "--dtype float64 --width 128: pallas_gpu declines .* got float64",
        ),
        (["--dry-run", "--width", "8192"], "--width 8192: pallas_gpu declines .* got 8192 with"),
        (["--dtype", "int8"], "argument --dtype: invalid choice: 'int8'"),
        (["--width", "0"], "argument --width: wanted a number of at least 1, got '0'"),
    ],
)
def test_wrong_options(arguments, message, capsys):
    """Times of the interpreter, which say nothing; tiles for calls that the kernel does not take."""
    with pytest.raises(SystemExit):
        tune.main(arguments)
    assert re.search(message, " ".join(capsys.readouterr().err.split()))
