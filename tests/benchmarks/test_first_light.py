"""`python -m benchmarks.first_light`: what it records of kernels that are right, wrong, and worse. Never how fast."""

import json
import os
import sys
import time

import jax.numpy as jnp
import kernels_page
import pytest

from benchmarks.first_light import __main__ as command
from benchmarks.first_light._bench import Bench
from benchmarks.first_light._steps import STEPS as NAMES
from benchmarks.runner import OURS
from tests.support.flags import spawn


def bench(folder, seconds=600):
    return Bench(str(folder), time.time() + seconds, 1)


def read(folder):
    return json.loads((folder / "first_light.json").read_text())["steps"]


def declines(x):
    raise NotImplementedError("query: wanted a better day")


def raises(x):
    raise ValueError("not lowered")


KERNELS = {
    "right": jnp.sin,
    "declines": declines,
    "wrong": lambda x: jnp.sin(x) + 0.1,
    "raises": raises,
    "nan": lambda x: jnp.sin(x) + jnp.nan,
}


@pytest.mark.usefixtures("user_settings")
def test_measurements(tmp_path, monkeypatch):
    """A wrong kernel called right, a failing one that ends the step, one that declines among the failures.

    And a result that is on disk too late, or is measured again by a later call.
    """
    put, sizes, exacts = Bench.put, [], []

    def put_and_read(*args):
        put(*args)
        sizes.append(len(read(tmp_path)["step"]))

    monkeypatch.setattr(Bench, "put", put_and_read)
    x = jnp.arange(8.0)

    def exact():
        exacts.append(jnp.sin(x))
        return exacts[-1]

    programs = [({"kernel": name}, function) for name, function in KERNELS.items()]
    arguments = "step", programs, [x], lambda s: {"twice": 2 * s}, exact
    bench(tmp_path).measure(*arguments)
    found = read(tmp_path)["step"]
    assert sizes == [1, 2, 3, 4, 5] and list(found) == list(KERNELS)
    right, wrong = found["right"], found["wrong"]
    assert right["good"] and right["twice"] == 2 * right["seconds"] > 0
    assert not wrong["good"] and wrong["of_tolerance"] == pytest.approx(5, rel=0.1)
    assert not found["nan"]["good"] and found["nan"]["of_tolerance"] == "nan"
    assert found["declines"] == {"kernel": "declines", "declined": "query: wanted a better day"}
    assert found["raises"]["error"].startswith("ValueError: not lowered")
    bench(tmp_path).measure(*arguments)
    assert read(tmp_path)["step"] == found and len(exacts) == 3


TESTS = """
import pytest

@pytest.mark.parametrize("implementation", ["right", "wrong", "declines", "raises"])
def test_it(implementation):
    if implementation == "declines":
        pytest.skip("wanted a GPU")
    if implementation == "raises":
        raise ValueError("not lowered")
    assert implementation == "right", "off"
"""
RUN = """
import sys, time
from benchmarks.first_light import _check
from benchmarks.first_light._bench import Bench

_check.run_tests(Bench(sys.argv[1], time.time() + 600), (sys.argv[2],))
"""


def test_checks(tmp_path):
    """A test that fails and is recorded as right, or one that is run again by a later call."""
    (tmp_path / "test_kernel.py").write_text(TESTS)
    for run in range(2):
        said = spawn("-c", RUN, str(tmp_path), str(tmp_path / "test_kernel.py"))
        assert ("check: " in said) == (run == 0)
    found = {x["kernel"]: x for x in read(tmp_path)["check"].values()}
    assert found["right"] == {"kernel": "right", "good": True}
    assert not found["wrong"]["good"] and "off" in found["wrong"]["said"]
    assert found["declines"] == {"kernel": "declines", "declined": "wanted a GPU"}
    assert found["raises"]["error"] == "ValueError: not lowered"


CHILD = """
import json, os, sys, time
from benchmarks.first_light._bench import COMPILING, Bench

bench = Bench(*json.loads(sys.argv[2]))
if not bench.known("step", COMPILING):
    bench.begin("step", COMPILING)
    os._exit(3)
for label in [x for x in ("ends", "hangs", "good") if not bench.known("step", x)]:
    bench.begin("step", label)
    if label == "ends":
        os._exit(4)
    if label == "hangs":
        time.sleep(600)
    bench.put("step", label, {"seconds": 1.0})
"""


@pytest.mark.full
def test_processes_that_end_or_hang(tmp_path, monkeypatch):
    """A measurement that takes all others with it, is blamed for another's end, or is tried forever."""
    monkeypatch.setattr(command, "PATIENCE", 15)
    child = (sys.executable, "-c", CHILD)
    assert command.supervise("step", bench(tmp_path), dict(os.environ), child)
    assert read(tmp_path)["step"] == {
        "several programs": {"error": "the process ended with status 3"},
        "ends": {"error": "the process ended with status 4"},
        "hangs": {"error": "the process hung, and was killed"},
        "good": {"seconds": 1.0},
    }


LATE = """
import time
from benchmarks.first_light._bench import Bench

Bench({!r}, 0).begin('step', 'x')
time.sleep(600)
"""


@pytest.mark.full
def test_time_is_spent(tmp_path):
    """A measurement that counts as a failure as there was no time left for it, and is never made."""
    child = (sys.executable, "-c", LATE.format(str(tmp_path)))
    assert command.supervise("step", bench(tmp_path, seconds=15), dict(os.environ), child)
    assert read(tmp_path) == {"step": {}}


def test_a_process_that_does_not_start(tmp_path, capsys):
    """One that is started again and again."""
    child = (sys.executable, "-c", "raise SystemExit(7)")
    assert not command.supervise("step", bench(tmp_path), dict(os.environ), child)
    assert "ended with status 7" in capsys.readouterr().out


@pytest.mark.full
def test_dry_run(tmp_path):
    """A step that raises on the way to its first program; a kernel for GPUs that no step names."""
    printed = spawn("-m", "benchmarks.first_light", "--dry-run", "--out", str(tmp_path))
    found = read(tmp_path)
    assert set(found) == set(NAMES) and not any("failed" in x for x in found.values())
    swept = [(x["call"].split(",")[0], x["tiles"], x["good"]) for x in found["sweep"].values()]
    tiles = OURS, "16 x 16, 4 warps, 2 stages, 1"
    short = OURS, f"{tiles[1]} of 1"
    assert swept == [
        *((kind, x, True) for kind in ("forward", "query", "key", "tangent") for x in tiles),
        *(("forward", x, True) for x in short),
    ]
    for step in ("check", "decode", "prefill", "rules"):
        ran = [x for x in found[step].values() if "good" in x]
        assert "pallas_gpu" in {x["kernel"] for x in ran} and all(x["good"] for x in ran), step
    for step in ("decode", "prefill", "rules"):
        assert "cudnn" in {x["kernel"] for x in found[step].values()}, step
    assert {"copy", "read", "matmul", "nothing"} == set(found["roof"])
    said = "\n".join(command.summary(found))
    assert ", 0 WRONG" in said and said in printed
    kernels_page.draw(found, tmp_path / "picture.svg")
    assert "| `pallas_gpu` | " in kernels_page.first_light(found)


def test_wrong_options(capsys):
    """A step that there is not."""
    with pytest.raises(SystemExit):
        command.main(["--steps", "about,paint"])
    assert "got 'paint'" in capsys.readouterr().err


STEPS = {
    "about": {"versions": {"device": "NVIDIA H200", "date": "2030-01-02", "jax": "0.11.0"}},
    "roof": {"copy": {"bytes_per_s": 4.1e12}, "matmul": {"error": "out of memory"}},
    "check": {
        "a k": {"kernel": "k", "good": True, "of_tolerance": 0.25},
        "b k": {"kernel": "k", "good": False, "of_tolerance": "inf"},
        "a l": {"kernel": "l", "declined": "query: wanted less"},
        "b l": {"kernel": "l", "error": "XlaRuntimeError: x"},
    },
    "prefill": {
        f"s {name}": {
            **dict(batch=2, length=8192, heads=16, width=128, causal=True),
            **{"pass": "forward", "kernel": name, "seconds": 1.0, "tflop_per_s": rate},
        }
        for name, rate in (("k", 512.3), ("l", 99.0))
    },
    "decode": {
        "c k": {
            **dict(batch=1, queries=1, heads=32, kv_heads=8, keys=65536, kernel="k"),
            **dict(us_per_step=70.26, of_copy=0.913, bytes_per_s=4e12, cached=False),
        },
        "c l": {"kernel": "l", "error": "x"},
    },
    "rules": {
        "d k": {
            **dict(
                rule="documents", length=8192, heads=16, width=128, kernel="k", seconds=2.163e-4
            ),
            "pass": "forward",
        },
        "d l": {"kernel": "l", "declined": "query_segments: wanted None"},
    },
}


def test_page(tmp_path, monkeypatch):
    """A page with other numbers than the file's; a table that loses a kernel; a picture without a number."""
    (tmp_path / "benchmarks").mkdir()
    path = tmp_path / "kernels.md"
    ((begin, end),) = parts = {
        x: y for x, y in kernels_page.PARTS.items() if y is kernels_page.first_light
    }
    monkeypatch.setattr(kernels_page, "PARTS", parts)
    path.write_text(f"before\n{begin}old\n{end}\nafter\n")
    (tmp_path / kernels_page.FILE).write_text(json.dumps({"steps": STEPS}))
    for _ in range(2):  # the second call finds the first one's page
        kernels_page.main(tmp_path)
    text = path.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n")
    for line in (
        "Measured on NVIDIA H200, 2030-01-02: jax 0.11.0, copying 4.1 TB/s.",
        "| `k` | 1 | 1 | 0 | 0 | inf |",
        "| `l` | 0 | 0 | 1 | 1 |  |",
        "| forward, causal, width 128, 2 × 8192 | 512 | 99 |",
        "| 1 × 1 queries, 32/8 heads, 65536 keys | 70.3 (91%) |",
        "| documents, forward, width 128, 8192 tokens | 216 |",
    ):
        assert line in text, line
    assert "old" not in text
    assert "</svg>" in (tmp_path / kernels_page.PICTURE).read_text()
    said = list(command.summary(STEPS))
    assert "check: 2 measured, 1 declined, 1 failed, 1 WRONG" in said
    assert "  failed: b l: XlaRuntimeError: x" in said
