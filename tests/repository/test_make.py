"""The Makefile, with interpreters that only note what they are asked to do."""

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


# A target; what its environment is made with, or lies on; the environment, its packages, and what is tested.
TARGETS = """
test-newest PART=tests/a | python3.13 | .venv-newest | .[test] jax | -m smoke and not full or readme tests/a
test-tpu | .venv | .venv-tpu | .[tpu] jax | -m tpu tests/tpu
test-cuda | .venv | .venv-cuda12 | .[cuda12-compiler] jax==0.10.2 jax-cuda12-plugin==0.10.2 | -m cuda tests/cuda
test-cuda CUDA=13 | .venv-newest | .venv-cuda13 | .[cuda13-compiler] jax jax-cuda13-plugin | -m cuda tests/cuda
test-fa4 | python3.13 | .venv-fa4 | .[test,fa4] jax | -m fa4 tests/cuda
test-rest SHARD=2/6 | python3 | .venv | .[test] jax | -m full and not (tpu or cuda or flash or fa4) --shard=2/6
test-rest TOUCHED=a\\ b | python3 | .venv | .[test] jax | fa4) --touched=a --touched=b
test-full OPTIMISE=3 | python3 | .venv | .[test] jax | -m not (tpu or cuda or flash or fa4)
"""


@pytest.mark.parametrize("row", TARGETS.strip().splitlines())
def test_targets(tree, row):
    """Tests on an older Python or JAX than they are for, in others' environment, or not as users compile."""
    target, base, name, packages, tested = row.split(" | ")
    *_, made, installed, ran = make(tree, *shlex.split(target))
    if base.startswith("python"):
        assert made == f"bin/{base} -m venv --clear {name}"
    else:  # it sees the packages of the other one
        assert made == f"{base}/bin/python -m venv --clear --without-pip {name}"
        text = (tree / name / "bin/packages/base.pth").read_text()
        assert text == f"import site; site.addsitedir('{base}/bin/packages')\n"
    assert installed.startswith(f"{name}/bin/python -m pip install -qq --no-compile")
    assert installed.endswith(packages)
    command, flags, no_bytecode = ran.split(" #")
    assert command.startswith(f"{name}/bin/python -m pytest")
    assert re.sub(" +", " ", command).strip().endswith(tested)
    optimised = re.match("test-(tpu|cuda|full OPTIMISE=3)", target) is not None
    assert flags.split() == ["--xla_backend_optimization_level=3"] * optimised
    assert no_bytecode.strip() == ""
