"""`python -m benchmarks.first_light`: what it records of kernels that are right, wrong, and worse. Never how fast."""

import json
import sys
import time

import kernels_page
import numpy as np
import pytest

from benchmarks.first_light import __main__ as command
from benchmarks.first_light import _bench, _check, _steps
from benchmarks.runner import OURS
from energy_attn.kernels import AttentionState
from energy_attn.kernels.dispatch import _registry
from energy_attn.kernels.xla._blockwise import Blockwise
from tests.support.flags import spawn
from tests.support.selection import few

CASES = [
    _check.Case("causal", (1, 9, 2, 8), (1, 9, 1, 8), "float32", options={"is_causal": True}),
    _check.Case("tangent", (1, 3, 2, 8), (1, 5, 2, 8), "float32", mode="tangent"),
    _check.Case(
        *("lengths", (2, 3, 2, 8), (2, 5, 1, 8), "bfloat16"),
        options={"key_value_seq_lengths": np.array([4, 0], np.int32)},
    ),
]


class Named(Blockwise):
    """The blockwise kernel by another name, as one of a platform, which is chosen when a program is lowered."""

    platforms = ("cpu",)

    def __init__(self, name):
        super().__init__()
        object.__setattr__(self, "name", name)

    def __eq__(self, other):
        return self is other

    def __hash__(self):
        return id(self)


class Declines(Named):
    def check(self, call):
        raise NotImplementedError("query: wanted a better day")


class Raises(Named):
    def forward_and_rest(self, call):
        raise NotImplementedError("not lowered")


class Wrong(Named):
    """Energies of the first query that are a hundredth too large."""

    def forward_and_rest(self, call):
        (out, lse), rest = super().forward_and_rest(call)
        return AttentionState(out, lse.at[:, 0].add(0.01)), rest


@pytest.fixture
def kernels(monkeypatch):
    """Kernels of XLA's operations in the place of those for GPUs; how often each was called."""
    classes = {"right": Named, "declines": Declines, "raises": Raises, "wrong": Wrong}
    found = {name: kind(name) for name, kind in classes.items()}
    for name, kernel in found.items():
        monkeypatch.setitem(_registry._REGISTRY, name, kernel)
    monkeypatch.setattr(_bench, "GPU_KERNELS", tuple(found))


def bench(folder, *steps, seconds=600):
    return _bench.Bench(str(folder), None, steps, time.time() + seconds, 1, 128)


def read(folder):
    return json.loads((folder / "first_light.json").read_text())["steps"]


@pytest.mark.usefixtures("user_settings")
@pytest.mark.parametrize("case", few(CASES, CASES[1]), ids=lambda case: case.label)
def test_check(case, tmp_path, kernels, monkeypatch):
    """A wrong kernel called right, a failing one that ends the suite, one that declines among the failures.

    And a later call that repeats what is known, or never repeats what failed.
    """
    monkeypatch.setattr(_check, "small_cases", lambda bench: iter([case]))
    put, sizes = _bench.Bench.put, []

    def put_and_read(*args):
        put(*args)
        sizes.append(len(read(tmp_path)["check"]))

    monkeypatch.setattr(_bench.Bench, "put", put_and_read)
    assert _steps.take(bench(tmp_path, "check")) == 0
    found = read(tmp_path)["check"]
    assert sizes == [*range(1, len(found) + 1)]  # on disk after each
    assert set(found) == {f"{case.label} {name}" for name in _bench.GPU_KERNELS}
    right = found[f"{case.label} right"]
    derived = ("dout", "dlse") if case.mode == "tangent" else ("dq", "dk", "dv")
    assert {"out", "lse", *derived} <= set(right)
    assert right["good"] and right["of_tolerance"] <= 1 and right["moved"] == [], right
    wrong = found[f"{case.label} wrong"]
    assert not wrong["good"] and float(wrong["of_tolerance"]) > 1, wrong
    assert found[f"{case.label} declines"]["declined"] == "query: wanted a better day"
    raises = found[f"{case.label} raises"]
    assert "not lowered" in raises["error"] and raises["kernel"] == "raises"

    made, compiled = [], _bench._compiled
    monkeypatch.setattr(_bench, "_compiled", lambda jobs, n: made.extend(jobs) or compiled(jobs, n))
    _steps.take(bench(tmp_path, "check"))
    assert [job.label for job in made] == [f"{case.label} raises"]
    assert read(tmp_path)["check"] == found


@pytest.mark.usefixtures("user_settings")
@pytest.mark.parametrize("mode", ["forward", "backward", "tangent"])
def test_a_case_too_large_for_the_judge(mode, monkeypatch):
    """Heads in another order, a gradient of one head of a group, or an energy that is not in float64."""
    case = _check.Case(
        "all", (2, 5, 4, 8), (2, 7, 2, 8), "float32", mode, options={"is_causal": True}
    )
    wanted = case.reference
    del case.__dict__["reference"]
    monkeypatch.setattr(_check, "MOST_SCORES", 0)
    found = case.reference
    assert set(found) == set(wanted)
    for name, x in wanted.items():
        np.testing.assert_allclose(found[name], x, rtol=1e-12, atol=1e-14, err_msg=name)


def test_an_energy_where_there_are_no_keys():
    """A state of no keys that is not, in a comparison of finite numbers alone."""
    wanted = {"lse": np.array([0.0, -np.inf])}
    found = _check.judged({"lse": np.array([0.0, 1.0])}, wanted, "float32")
    assert found == {"good": False, "of_tolerance": np.inf, "lse": np.inf}
    found = _check.judged({"lse": np.array([0.5, -np.inf])}, wanted, "float32")
    assert not found["good"] and found["lse"] == pytest.approx(0.5)


@pytest.mark.usefixtures("user_settings")
def test_time_is_spent(tmp_path, kernels, monkeypatch):
    """A measurement that is begun too late; and one that is lost because of it."""
    monkeypatch.setattr(_check, "small_cases", lambda bench: iter(CASES))
    assert _steps.take(bench(tmp_path, "check", seconds=-1)) == 0
    assert not (tmp_path / "first_light.json").exists()


CHILD = """
import json, os, sys, time
from benchmarks.first_light._bench import Bench

bench = Bench(*json.loads(sys.argv[1]))
labels = [x for x in ("ends", "hangs", "good") if not bench.known("step", x)]
if not bench.alone:
    bench.begin("step", labels, 60)
    os._exit(3)
for label in labels:
    bench.begin("step", [label], 2)
    if label == "ends":
        os._exit(4)
    if label == "hangs":
        time.sleep(600)
    bench.put("step", label, {"seconds": 1.0})
bench.end()
"""


@pytest.mark.full
def test_processes_that_end_or_hang(tmp_path):
    """A measurement that takes all others with it, is blamed for another's end, or is tried forever."""
    child = (sys.executable, "-c", CHILD)
    assert command.supervise(bench(tmp_path, "about"), child) == 0
    assert read(tmp_path)["step"] == {
        "ends": {"error": "the process ended with status 4", "final": True},
        "hangs": {"error": "the process hung, and was killed", "final": True},
        "good": {"seconds": 1.0},
    }
    assert not (tmp_path / "first_light.now").exists()


def test_a_process_that_does_not_start(tmp_path, capsys):
    """One that is started again and again."""
    assert command.supervise(bench(tmp_path), (sys.executable, "-c", "raise SystemExit(7)")) == 1
    assert "ended with status 7" in capsys.readouterr().out


@pytest.mark.full
def test_dry_run(tmp_path):
    """A step that raises on the way to its first program; a kernel for GPUs that no step names."""
    copied = tmp_path / "copy"
    copied.mkdir()
    out = "--out", str(tmp_path), "--copy", str(copied)
    printed = spawn("-m", "benchmarks.first_light", "--dry-run", *out)
    found = read(tmp_path)
    assert read(copied) == found and "failed" not in found
    assert set(found) == set(_steps.STEPS)
    swept = [(x["call"].split(",")[0], x["tiles"], x["good"]) for x in found["sweep"].values()]
    tiles = OURS, "16 x 16, 4 warps, 2 stages, 1"
    short = OURS, f"{tiles[1]} of 1"
    assert swept == [
        *((kind, x, True) for kind in ("forward", "query", "key", "tangent") for x in tiles),
        *(("forward", x, True) for x in short),
    ]
    for step in ("about", "check", "check_large", "decode", "prefill", "rules"):
        kernels = {x.get("kernel") for x in found[step].values()}
        assert "pallas_gpu" in kernels and "cudnn" in kernels, step
    for step in ("check", "check_large"):
        ran = [x for x in found[step].values() if "good" in x]
        assert {"pallas_gpu"} <= {x["kernel"] for x in ran}
        assert all(x["good"] and not x["moved"] for x in ran), step
    assert {"copy", "read", "matmul", "nothing"} == set(found["roof"])
    assert all("error" in x for x in found["torch"].values())  # there is no GPU
    said = "\n".join(command.summary(found))
    assert "WRONG: 0" in said and said in printed
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
    "sweep": {
        f"s {tiles}": {"call": "s", "tiles": tiles, "good": good, "seconds": seconds}
        for tiles, seconds, good in (
            *((OURS, 2e-4, True), ("fast", 1e-4, True), ("slow", 4e-4, True)),
            ("wrong", 1e-5, False),
        )
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
    kernels_page.main(tmp_path)
    assert "Not measured yet" in path.read_text() and "old" not in path.read_text()
    assert not (tmp_path / kernels_page.PICTURE).exists()
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
    assert "Not measured" not in text
    assert "</svg>" in (tmp_path / kernels_page.PICTURE).read_text()
    said = list(command.summary(STEPS))
    assert "== WRONG: 2" in said and "  s: k 512, l 99" in said
    assert "  s: fast: 100.0 us, 2.00 times as fast" in said
    assert not any("s: wrong: 10.0 us" in line for line in said)
