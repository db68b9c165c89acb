"""The Makefile, with interpreters that only note what they are asked to do; and what finds a newer Python."""

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Makes an environment by putting itself there.
INTERPRETER = """#!/bin/sh
case "$*" in
*pytest*) echo "$0 $* # $XLA_FLAGS # $PYTHONDONTWRITEBYTECODE" ;;
*) echo "$0 $*" ;;
esac >>"{log}"
case "$*" in
*sys.executable*) [ {minor} -ge 12 ] && echo "$0" ;;
*"print(sys.version)"*) echo 3.{minor} ;;
*purelib*) printf '%s/packages' "$(dirname "$0")" ;;
*"-m venv"*)
    for folder; do :; done
    rm -rf "$folder" && mkdir -p "$folder/bin/packages" && cp "$0" "$folder/bin/python" ;;
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
        # variables of the `make` that runs this test are none of this one's
        env={"PATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
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
    # what lies on it is made anew, too
    assert len(make(tree, "test-tpu", f"PYTHON={tree}/bin/python3.13")) == 3
    assert len(make(tree, "test-tpu", f"PYTHON={tree}/bin/python3.13")) == 1
    older = make(tree, "test-tpu", f"PYTHON={tree}/bin/python3")
    assert [line.split(" -m ")[1].split()[0] for line in older] == ["venv", "pip"] * 2 + ["pytest"]


MADE = {
    "": "bin/python3 -m venv --clear .venv",
    "-newest": "bin/python3.13 -m venv --clear .venv-newest",
    "-tpu": ".venv/bin/python -m venv --clear --without-pip .venv-tpu",
    "-cuda12": ".venv/bin/python -m venv --clear --without-pip .venv-cuda12",
    "-cuda13": ".venv-newest/bin/python -m venv --clear --without-pip .venv-cuda13",
    "-fa4": "bin/python3.13 -m venv --clear .venv-fa4",
}
INSTALLED = {
    "": ".[test] jax",
    "-newest": ".[test] jax",
    "-tpu": ".[tpu] jax",
    "-cuda12": ".[cuda12-compiler] jax==0.10.2 jax-cuda12-plugin==0.10.2",
    "-cuda13": ".[cuda13-compiler] jax jax-cuda13-plugin",
    "-fa4": ".[test,fa4] jax",
}


ELSEWHERE = "(tpu or cuda or flash or fa4)"


@pytest.mark.parametrize(
    ("arguments", "environments", "tested"),
    [
        ("test-newest PART=tests/a", ["-newest"], "-m smoke and not full or readme tests/a"),
        ("test-tpu", ["", "-tpu"], "-m tpu tests/tpu"),
        ("test-cuda", ["", "-cuda12"], "-m cuda tests/cuda"),
        ("test-cuda CUDA=13", ["-newest", "-cuda13"], "-m cuda tests/cuda"),
        ("test-fa4", ["-fa4"], "-m fa4 tests/cuda"),
        ("test-full", [""], f"-m not {ELSEWHERE}"),
        ("test-rest", [""], f"-m full and not {ELSEWHERE}"),
        ("test-rest SHARD=2/6", [""], f"{ELSEWHERE} --shard=2/6"),
        ("test-rest TOUCHED=a\\ b", [""], f"{ELSEWHERE} --touched=a --touched=b"),
        ("test-full OPTIMISE=3", [""], ELSEWHERE),
    ],
)
def test_targets(tree, arguments, environments, tested):
    """Tests on an older Python or JAX than they are for, in others' environment, or not as users compile."""
    arguments = shlex.split(arguments)
    *made, ran = make(tree, *arguments)
    for name, venv, pip in zip(environments, made[::2], made[1::2], strict=True):
        assert venv == MADE[name]
        assert pip.startswith(f".venv{name}/bin/python -m pip install -qq --no-compile")
        assert pip.endswith(INSTALLED[name])
    command, flags, no_bytecode = ran.split(" #")
    assert command.startswith(f".venv{environments[-1]}/bin/python -m pytest")
    assert re.sub(" +", " ", command).strip().endswith(tested)
    optimised = "OPTIMISE=3" in arguments or arguments[0] in ("test-cuda", "test-tpu")
    assert flags.split() == ["--xla_backend_optimization_level=3"] * optimised
    assert no_bytecode.strip() == ""
    if environments[0] != environments[-1]:  # which sees the packages of the first
        text = (tree / f".venv{environments[-1]}/bin/packages/base.pth").read_text()
        assert text == f"import site; site.addsitedir('.venv{environments[0]}/bin/packages')\n"


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
