"""The gate: which tests guard a file, and that it ends where a stage fails; planted faults, and that survivors show."""

import os
import subprocess
from pathlib import Path

import gate
import mutants
import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("name", "guard"),
    [
        ("kernels/pallas/gpu/_tile.py", "tests/kernels/pallas"),
        ("kernels/_checks.py", "tests/kernels"),
        ("energy_attn/masks/__init__.py", "tests/kernels/masks"),
        ("tests/distributed/cache/test_cache.py", "tests/distributed/cache"),
        ("tests/support/compare.py", None),
        ("docs/api/masks.md", "tests/repository"),
        (".ci/run", None),
        ("README.md", "tests/repository"),
        ("papers/hopfield/capacity.py", "tests/papers"),
    ],
)
def test_what_guards_a_file(name, guard):
    """A change whose tests are not those that run more often for a day; a folder that counts twice, inside another."""
    assert gate.tests_of(name) == guard
    names = ["kernels/_checks.py", "kernels/masks/_ready.py", "distributed/cache/_cache.py"]
    assert gate.touched(names) == ["tests/distributed/cache", "tests/kernels"]


# Only notes what it is asked for.
MAKE = """#!/bin/sh
shift
echo "$*" >>"$LOG"
echo "ran $*"
case "$*" in test) echo '{"tests/a": [1.5, 3]}' >>"$GATE_SECONDS" ;; esac
case "$*" in "$FAILS"*) exit 3 ;; esac
"""
STAGES = """test
test-newest
test-rest SHARD=2/6 TOUCHED=tests/a
test-emulated
test-tpu SHARD=2/6
test-cuda CUDA=12 CUDA_TESTS=toolkits SHARD=2/6
test-cuda CUDA=13 SHARD=2/6"""


@pytest.mark.parametrize(
    ("fails", "asked"),
    [("nothing", 9), ("check", 2), ("environments", 2), ("test-newest", 4)],
)
def test_stages(tmp_path, monkeypatch, capfd, fails, asked):
    """A stage that is not run or whose cost is not told; a failure that later stages hide, or that leaves no table."""
    (tmp_path / "make").write_text(MAKE)
    (tmp_path / "make").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("LOG", str(tmp_path / "log"))
    monkeypatch.setenv("FAILS", fails)
    monkeypatch.setattr(gate, "rotation", lambda: ("SHARD=2/6", "TOUCHED=tests/a"))
    assert gate.main() == (fails != "nothing")
    log, said = (tmp_path / "log").read_text().splitlines(), capfd.readouterr().out
    assert {*log[:2]} == {"environments", "check"} and log[2:] == STAGES.splitlines()[: asked - 2]
    assert "ran environments\n" in said and ("gate: " in said) == (fails != "nothing")
    rows = [line.split() for line in said.splitlines()]
    assert ["wall", "s", "CPU", "s", "cases"] in rows
    if asked > 2:
        assert ["2", "3", "tests/a"] in rows and any(row[2:] == ["3", "tests"] for row in rows)


def test_ci_runs_the_gate():
    """A gate that continuous integration does not run, or runs with programs that were compiled before."""
    text = (ROOT / ".ci/run").read_text()
    assert "tools/gate.py" in text and "export CI=1" in text


def test_planted_faults_still_fit():
    """A fault whose line has changed since, so that nothing is planted; or a killer that is gone."""
    assert list(mutants.wrong_entries(ROOT)) == []
    assert len(mutants.mutants(ROOT)) >= 40


SOURCE = "def double(x):\n    return 2 * x\n\n\ndef half(x):\n    return x / 2\n"
TEST = "import runpy\n\n\ndef test_double():\n    assert runpy.run_path('a.py')['double'](2) == 4\n"


def test_a_survivor_is_told(tmp_path, monkeypatch, capsys):
    """A fault that no test finds and that is counted as killed."""
    for name, text in {"a.py": SOURCE, "test_a.py": TEST}.items():
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    planted = [
        mutants.Mutant(old, "a.py", old, f"3 + {old}", "test_a.py", "test_a.py::test_double")
        for old in ("2 * x", "x / 2")
    ]
    monkeypatch.setattr(mutants, "mutants", lambda: planted)
    assert mutants.main(["--jobs", "1"]) == 1
    said = capsys.readouterr().out
    assert "2 * x: killed by test_a.py::test_double" in said
    assert "x / 2: SURVIVED test_a.py" in said and "1 of 2" in said
    assert (tmp_path / "a.py").read_text() == SOURCE  # left alone
