"""The Makefile, with interpreters that only note what they are asked to do; and what finds a newer Python."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Makes an environment by putting itself there.
INTERPRETER = """#!/bin/sh
case "$*" in
*pytest*) echo "$0 $* # $XLA_FLAGS" ;;
*) echo "$0 $*" ;;
esac >>"{log}"
case "$*" in
*sys.executable*) [ {minor} -ge 12 ] && echo "$0" ;;
*"print(sys.version)"*) echo 3.{minor} ;;
*"-m venv"*) rm -rf "$4" && mkdir -p "$4/bin" && cp "$0" "$4/bin/python" ;;
esac
"""


@pytest.fixture
def tree(tmp_path):
    """A checkout without sources, and Python 3.11 and 3.13 on its PATH."""
    for name in ("Makefile", "pyproject.toml", "tools/newer_python.sh"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for name, minor in (("python3", 11), ("python3.13", 13)):
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(INTERPRETER.format(log=tmp_path / "log", minor=minor))
        path.chmod(0o755)
    return tmp_path


def make(tree, *arguments):
    """What pip, pytest and venv were asked for, in order."""
    (tree / "log").write_text("")
    path = f"{tree / 'bin'}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["make", "--no-print-directory", *arguments],
        cwd=tree,
        env={"PATH": path},  # variables of the `make` that runs this test are none of this one's
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    lines = (tree / "log").read_text().replace(f"{tree}/", "").splitlines()
    return [line for line in lines if " -m " in line]


def test_installs_when_something_has_changed(tree):
    """An environment without a new dependency, with another JAX than the one asked for, or of another Python."""
    first = make(tree, "test")
    assert [line.split(" -m ")[1].split()[0] for line in first] == ["venv", "pip", "pytest"]
    assert first[0].startswith("bin/python3 ") and first[1].endswith("--editable .[test] jax")
    (again,) = make(tree, "test", "PART=tests/kernels tests/repository/test_make.py")
    assert "--dist=worksteal tests/kernels tests/repository/test_make.py # " in again
    other, _ = make(tree, "test", "JAX=jax>=0.8,<0.9 numpy")
    assert "--upgrade" in other and other.endswith(".[test] jax>=0.8,<0.9 numpy")
    assert len(make(tree, "test", "JAX=jax>=0.8,<0.9 numpy")) == 1
    assert len(make(tree, "test")) == 2
    os.utime(tree / ".venv" / ".installed-test", (0, 0))  # pyproject.toml is newer
    assert len(make(tree, "test")) == 2
    assert len(make(tree, "test", f"PYTHON={tree}/bin/python3")) == 1
    newer = make(tree, "test", f"PYTHON={tree}/bin/python3.13")
    assert len(newer) == 3 and newer[0].startswith("bin/python3.13 ")


@pytest.mark.parametrize(
    ("arguments", "folder", "python", "installed", "tested"),
    [
        (["test-newest", "PART=tests/papers"], "newest", "python3.13", ".[test] jax", "papers"),
        (
            ["test-cuda"],
            "cuda12",
            "python3",
            ".[test,cuda12-compiler] jax==0.10.2 jax-cuda12-plugin==0.10.2",
            "-m cuda",
        ),
        (
            ["test-cuda", "CUDA=13"],
            "cuda13",
            "python3.13",
            ".[test,cuda13-compiler] jax jax-cuda13-plugin",
            "-m cuda",
        ),
        (["test-fa4"], "fa4", "python3.13", ".[test,fa4] jax", "-m fa4 tests"),
        (["test-full"], None, "python3", ".[test] jax", "-m not (tpu or cuda or flash or fa4)"),
        (["test-rest"], None, "python3", ".[test] jax", "-m full"),
        (
            ["test-full", "OPTIMISE=3"],
            None,
            "python3",
            ".[test] jax",
            "(tpu or cuda or flash or fa4)",
        ),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_targets(tree, arguments, folder, python, installed, tested):
    """Tests that run on an older Python or JAX than they are for, in others' environment, or not as users compile."""
    made, asked, ran = make(tree, *arguments)
    environment = f".venv-{folder}" if folder else ".venv"
    assert made == f"bin/{python} -m venv --clear {environment}"
    assert asked.startswith(f"{environment}/bin/python -m pip install")
    assert asked.endswith(installed)
    ran, flags = ran.split(" # ")
    assert ran.startswith(f"{environment}/bin/python -m pytest") and ran.endswith(tested)
    optimised = "OPTIMISE=3" in arguments or arguments[0] == "test-cuda"
    assert flags.split() == ["--xla_backend_optimization_level=3"] * optimised


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"PYTHON": "python3"}, "PYTHON: wanted a Python 3.12 or newer"),
        ({"PYTHON": "nowhere"}, "its venv module, got nowhere"),
        ({}, "found no Python 3.12 or newer on PATH, and no apt-get"),
    ],
    ids=str,
)
def test_no_newer_python(tree, changed, said):
    """A run on an older Python, or an error of some tool, where no newer one can be had."""
    (tree / "bin" / "python3.13").unlink()
    for tool in ("bash", "mkdir"):
        (tree / "bin" / tool).symlink_to(shutil.which(tool))
    done = subprocess.run(
        ["bash", "tools/newer_python.sh", "unpacked"],
        cwd=tree,
        env={"PATH": str(tree / "bin"), **changed},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert said in done.stderr and "make PYTHON=... test-newest" in done.stderr
