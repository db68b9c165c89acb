"""The gate: which tests guard a file, what it prints of its stages, and that it ends where one fails."""

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
        ("kernels/masks/_ready.py", "tests/kernels/masks"),
        ("kernels/pallas/gpu/_tile.py", "tests/kernels/pallas"),
        ("kernels/_checks.py", "tests/kernels"),
        ("energy_attn/masks/__init__.py", "tests/kernels/masks"),
        ("tests/distributed/cache/test_cache.py", "tests/distributed/cache"),
        ("tests/support/compare.py", None),
        ("docs/api/masks.md", "tests/repository"),
        ("README.md", "tests/repository"),
        ("papers/hopfield/capacity.py", "tests/papers"),
    ],
)
def test_what_guards_a_file(name, guard):
    """A change whose tests are not those that run more often for a day; a folder that counts twice, inside another."""
    assert gate.tests_of(name) == guard
    names = ["kernels/_checks.py", "kernels/masks/_ready.py", "distributed/cache/_cache.py"]
    assert gate.touched(names) == ["tests/distributed/cache", "tests/kernels"]


MAKE = """#!/bin/sh
echo "$*" >>"$LOG"
echo "ran $*"
case "$*" in *" test") echo '{"tests/a": [1.5, 3]}' >>"$GATE_SECONDS" ;; esac
case "$*" in *" $FAILS"*) exit 3 ;; esac
"""


@pytest.fixture
def stages(tmp_path, monkeypatch, capfd):
    """Runs the gate with a `make` that only notes what it is asked for: status, what was printed, what was asked."""
    (tmp_path / "make").write_text(MAKE)
    (tmp_path / "make").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("LOG", str(tmp_path / "log"))
    monkeypatch.setattr(gate, "rotation", lambda: ("SHARD=2/6", "TOUCHED=tests/a"))

    def run(fails="nothing"):
        monkeypatch.setenv("FAILS", fails)
        (tmp_path / "log").write_text("")
        try:
            status = gate.main()
        except SystemExit as error:
            status = error.code
        asked = (tmp_path / "log").read_text().replace("--no-print-directory ", "").splitlines()
        return status, capfd.readouterr().out, asked

    return run


STAGES = """test
test-newest
test-rest SHARD=2/6 TOUCHED=tests/a
test-emulated
test-tpu SHARD=2/6
test-cuda CUDA=12 CUDA_TESTS=toolkits SHARD=2/6
test-cuda CUDA=13 SHARD=2/6"""


def test_all_stages(stages):
    """A stage that is not run, or whose seconds and cases are not told."""
    status, said, asked = stages()
    assert status == 0
    assert set(asked[:2]) == {"environments", "check"} and asked[2:] == STAGES.splitlines()
    assert "make test-rest SHARD=2/6 TOUCHED=tests/a\n" in said
    assert "ran --no-print-directory environments\n" in said
    rows = [line.split() for line in said.splitlines()]
    assert ["2", "3", "tests/a"] in rows
    assert any(row[2:] == ["3", "tests"] for row in rows)


@pytest.mark.parametrize("fails", ["check", "environments", "test-newest"])
def test_a_stage_that_fails(stages, fails):
    """A failure that later stages hide, or that leaves no table of what was spent."""
    status, said, asked = stages(fails)
    assert status not in (0, None)
    assert len(asked) == {"check": 2, "environments": 2, "test-newest": 4}[fails]
    assert "CPU s" in said and "all stages" in said


def test_ci_runs_the_gate():
    """A gate that continuous integration does not run, or runs with programs that were compiled before."""
    text = (ROOT / ".ci/run").read_text()
    assert "tools/gate.py" in text and "export CI=1" in text
    done = subprocess.run(["bash", "-n", str(ROOT / ".ci/run")], check=False)
    assert done.returncode == 0


def test_planted_faults_still_fit():
    """A fault whose line has changed since, so that nothing is planted; or a killer that is gone."""
    assert list(mutants.wrong_entries(ROOT)) == []
    assert len(mutants.mutants(ROOT)) >= 40


SURVIVOR = """
[[mutant]]
name = "%s"
file = "kernels/_a.py"
guard = "tests/kernels"
old = "%s"
new = "%s"
killed_by = "tests/kernels/test_a.py::test_double"
"""
TEST = """import sys
sys.path.insert(0, "kernels")
import _a


def test_double():
    assert _a.double(2) == 4
"""


def test_a_survivor_is_told(tmp_path, monkeypatch, capsys):
    """A fault that no test finds and that is counted as killed."""
    files = {
        "kernels/_a.py": "def double(x):\n    return 2 * x\n\n\ndef half(x):\n    return x / 2\n",
        "tests/kernels/test_a.py": TEST,
        "tests/mutants/a.toml": SURVIVOR % ("killed", "2 * x", "3 * x")
        + SURVIVOR % ("survives", "x / 2", "x / 3"),
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    planted = mutants.mutants(tmp_path)
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    monkeypatch.setattr(mutants, "mutants", lambda: planted)
    assert mutants.main(["--jobs", "1"]) == 1
    said = capsys.readouterr().out
    assert "killed: killed by tests/kernels/test_a.py::test_double" in said
    assert "survives: SURVIVED tests/kernels" in said and "1 of 2" in said
    assert (tmp_path / "kernels/_a.py").read_text() == files["kernels/_a.py"]  # left alone
