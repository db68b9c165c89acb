"""The gate: which tests guard a file, what it prints of its stages, and that it ends where one fails."""

import json
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
    """A change whose tests are not those that run more often for a day."""
    assert gate.tests_of(name) == guard


def test_touched_folders_are_named_once():
    """A folder inside one that is named already, whose cases would count twice."""
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
        asked = (tmp_path / "log").read_text().splitlines()
        return (
            status,
            capfd.readouterr().out,
            [x.removeprefix("--no-print-directory ") for x in asked],
        )

    return run


def test_all_stages(stages):
    """A stage that is not run, or whose seconds and cases are not told."""
    status, said, asked = stages()
    assert status == 0
    assert set(asked[:2]) == {"environments", "check"}
    assert asked[2:] == [
        "test",
        "test-newest",
        "test-rest SHARD=2/6 TOUCHED=tests/a",
        "test-emulated",
        "test-tpu SHARD=2/6",
        "test-cuda CUDA=12 CUDA_TESTS=toolkits SHARD=2/6",
        "test-cuda CUDA=13 SHARD=2/6",
    ]
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


def test_a_survivor_is_told(tmp_path, monkeypatch, capsys):
    """A fault that no test finds and that is counted as killed."""
    source, tests = tmp_path / "kernels/_a.py", tmp_path / "tests/kernels/test_a.py"
    for path in (source, tests, tmp_path / "tests/mutants/a.toml"):
        path.parent.mkdir(parents=True, exist_ok=True)
    source.write_text("def double(x):\n    return 2 * x\n\n\ndef half(x):\n    return x / 2\n")
    tests.write_text(
        "import sys\nsys.path.insert(0, 'kernels')\nimport _a\n\n\n"
        "def test_double():\n    assert _a.double(2) == 4\n"
    )
    row = {"file": "kernels/_a.py", "guard": "tests/kernels"}
    killer = "tests/kernels/test_a.py::test_double"
    rows = [
        row | {"name": "killed", "old": "2 * x", "new": "3 * x", "killed_by": killer},
        row | {"name": "survives", "old": "x / 2", "new": "x / 3", "killed_by": killer},
    ]
    text = "".join(
        "[[mutant]]\n" + "".join(f"{k} = {json.dumps(x)}\n" for k, x in row.items()) for row in rows
    )
    (tmp_path / "tests/mutants/a.toml").write_text(text)
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    monkeypatch.setattr(mutants, "mutants", lambda: [mutants.Mutant(**row) for row in rows])
    assert mutants.main(["--jobs", "1"]) == 1
    said = capsys.readouterr().out
    assert f"killed: killed by {killer}" in said and "survives: SURVIVED tests/kernels" in said
    assert "1 of 2" in said
    assert source.read_text().count("2 * x") == 1  # the checkout itself is left alone
