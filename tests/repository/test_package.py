"""The installed files: one package with the two linked folders inside, and nothing beside it."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from check_structure import LINKED, ROOMS, sources

ROOT = Path(__file__).resolve().parents[2]


def build(kind: str, tree: Path, to: Path) -> Path:
    """Build `tree` as pip does, in a process of its own; no network is needed."""
    code = f"import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"
    to.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-c", code, str(to)], cwd=tree, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (built,) = to.iterdir()
    return built


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[set[str], Path]:
    """The names in the sdist of this tree, and the wheel made from that sdist, unpacked; it has 2 MB at most."""
    work = tmp_path_factory.mktemp("build")
    tree = work / "tree"
    tree.mkdir()
    for name in (*ROOMS, "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md"):
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(ROOT / name, tree)
    shutil.copy(ROOT / "CITATION.cff", tree)
    sdist = build("sdist", tree, work / "sdist")
    names = set()
    with tarfile.open(sdist) as archive:
        for member in filter(tarfile.TarInfo.isfile, archive):
            names.add(member.name.split("/", 1)[1])
            path = work / "unpacked" / member.name.split("/", 1)[1]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(archive.extractfile(member).read())
    wheel = build("wheel", work / "unpacked", work / "wheel")
    assert wheel.stat().st_size <= 2e6
    installed = work / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    return names, installed


def modules() -> set[str]:
    """Where every source file of the three rooms belongs in an installed package."""
    return {
        ("energy_attn/" if room in LINKED else "") + path.relative_to(ROOT).as_posix()
        for room in ROOMS
        for path in sources(ROOT, room)
    }


def test_sdist(built):
    names, _ = built
    missing = modules() | {"energy_attn/py.typed", "LICENSE", "CITATION.cff", "CHANGELOG.md"}
    assert missing - names == set()
    assert {name for name in names if name.startswith(tuple(f"{r}/" for r in LINKED))} == set()


def test_wheel(built):
    _, installed = built
    files = {p.relative_to(installed).as_posix() for p in installed.rglob("*") if p.is_file()}
    package = {name for name in files if not name.split("/")[0].endswith(".dist-info")}
    model = {f"cli/demo/model/{name}" for name in ("config.json", "model.safetensors")}
    data = {"py.typed", *model}
    assert package == modules() | {f"energy_attn/{name}" for name in data}


def test_wheel_imports(built, tmp_path):
    _, installed = built
    code = "import energy_attn.kernels, energy_attn.distributed as d; print(d.__file__, end='')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout) == installed / "energy_attn" / "distributed" / "__init__.py"


# Prefixes of modules that `import energy_attn` does not import.
LATE = (
    "energy_attn.cli",
    "energy_attn.distributed.cache",
    "energy_attn.distributed.hlo._collectives",
    "energy_attn.distributed.runtime._initialize",
    "energy_attn.distributed.runtime._safetensors",
    "energy_attn.hopfield",
    "energy_attn.models",
    "energy_attn.plot",
    "energy_attn.prefix_tree",
    "energy_attn.report",
    "jax.experimental.pallas",
    "matplotlib",
    "safetensors",
    "tokenizers",
    *(
        f"energy_attn.kernels.pallas.{chip}._{name}"
        for chip in ("gpu", "tpu")
        for name in ("forward", "backward")
    ),
)


def test_import_is_light():
    """Pallas, or another part that few programs need, imported in all of them."""
    code = "import sys, energy_attn; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert [name for name in done.stdout.split() if name.startswith(LATE)] == []
