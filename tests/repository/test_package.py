"""What is released: one package with the two linked folders inside, nothing beside it, and what an index shows."""

import email
import os
import re
import shutil
import subprocess
import sys
import tomllib
import types
from pathlib import Path

import pytest
import release
from check_structure import LINKED, ROOMS, sources

import energy_attn

ROOT = Path(__file__).resolve().parents[2]
FILES = ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff")


def run(*command: str | Path, **options) -> str:
    """What a program prints, which does not fail."""
    done = subprocess.run([str(x) for x in command], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def copy(tree: Path) -> None:
    """What is tracked, by and large: all sources, the tests, too, but nothing that was built or compiled."""
    for name in (*ROOMS, "tests", "tools"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=ignored)
    for name in FILES:
        shutil.copy(ROOT / name, tree)


def build(kind: str, tree: Path, to: Path) -> Path:
    """Build `tree` as pip does, in a process of its own; no network is needed."""
    code = f"import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"
    to.mkdir(exist_ok=True)
    run(sys.executable, "-c", code, to, cwd=tree)
    (built,) = to.iterdir()
    return built


def files_of(folder: Path) -> set[str]:
    """The files below a folder."""
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> types.SimpleNamespace:
    """The sdist of this tree, the wheel made from it, and both unpacked; the wheel has 2.2 MB at most."""
    work = tmp_path_factory.mktemp("build")
    copy(work / "tree")
    sdist = build("sdist", work / "tree", work / "sdist")
    shutil.unpack_archive(sdist, work / "unpacked", filter="data")
    (unpacked,) = (work / "unpacked").iterdir()
    names = files_of(unpacked)
    wheel = build("wheel", unpacked, work / "wheel")
    assert wheel.stat().st_size <= 2.2e6
    shutil.unpack_archive(wheel, work / "installed", "zip")
    return types.SimpleNamespace(
        sdist=sdist, wheel=wheel, names=names, installed=work / "installed"
    )


def modules() -> set[str]:
    """Where every source file of the three rooms belongs in an installed package."""
    return {
        ("energy_attn/" if room in LINKED else "") + path.relative_to(ROOT).as_posix()
        for room in ROOMS
        for path in sources(ROOT, room)
    }


def test_sdist(built):
    """A source, the data, or a file that building needs, left out; tests, or a linked folder twice."""
    assert (modules() | {"energy_attn/py.typed", *FILES}) - built.names == set()
    assert {name for name in built.names if name.startswith((*LINKED, "tests", "tools"))} == set()


def test_wheel(built, tmp_path):
    """A package, `py.typed` or the demo's model left out, anything that is not of the package, or a room not found."""
    package = {x for x in files_of(built.installed) if ".dist-info/" not in x}
    data = ("py.typed", "cli/demo/model/config.json", "cli/demo/model/model.safetensors")
    assert package == modules() | {f"energy_attn/{name}" for name in data}
    code = "import energy_attn.kernels, energy_attn.distributed as d; print(d.__file__, end='')"
    environment = os.environ | {"PYTHONPATH": str(built.installed)}
    file = run(sys.executable, "-c", code, cwd=tmp_path, env=environment)
    assert Path(file) == built.installed / "energy_attn/distributed/__init__.py"


def check_strictly(*files: Path) -> None:
    """What an index would refuse, or show as it was not meant."""
    run(sys.executable, "-m", "twine", "check", "--strict", *files)


def test_metadata(built):
    """What an index refuses, or would show of another version, license or Python, or without its long description."""
    check_strictly(built.sdist, built.wheel)
    (path,) = built.installed.glob("*.dist-info/METADATA")
    found = email.message_from_string(path.read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = "Name", "Version", "Summary", "Requires-Python", "License-Expression", "License-File"
    assert [found[name] for name in names] == [
        *(project[key] for key in ("name", "version", "description", "requires-python")),
        *("Apache-2.0", "LICENSE"),
    ]
    assert found["Description-Content-Type"] == "text/markdown"
    assert found.get_payload() == (ROOT / "README.md").read_text(encoding="utf-8")
    wanted = {x for x in found.get_all("Requires-Dist") if "extra ==" not in x}
    assert wanted == set(project["dependencies"])


def test_long_description():
    """Links that lead nowhere on an index, an equation that Markdown takes for text, or other code than in README."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = release.long_description(readme, "https://example.org/us/ours", "v1.2")
    prose = re.sub("^```.*?^```$", "", shown, flags=re.M | re.S)
    links = re.findall(r"\]\(([^)]*)\)", prose)
    assert len(links) >= 12 and all(link.startswith("https://") for link in links)
    assert "(https://example.org/us/ours/blob/v1.2/docs/compare.md#where-we-lose)" in prose
    assert "over the decoded text](https://example.org/us/ours/raw/" in prose
    assert "$" not in re.sub("`[^`]*`", "", prose)
    code = re.compile(r"^```(?:python|console)\n.*?^```$", re.M | re.S)
    assert code.findall(readme) == code.findall(shown) and "```latex\nF(" in shown


def test_the_version():
    """A package of another version, or one that the changelog does not have on top, below what is unreleased."""
    assert energy_attn.__version__ == release.newest() == release.version()
    headings = re.findall("^## (.*)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    assert headings[0] == "Unreleased" and headings[1].startswith(f"{release.version()} - ")


@pytest.mark.parametrize("wrong", ["tag", "pyproject.toml", "CHANGELOG.md"])
def test_a_tag_of_another_version(tmp_path, capsys, wrong):
    """A release whose tag, package and changelog do not agree, or one that leaves the README as it was."""
    for name in FILES:
        shutil.copy(ROOT / name, tmp_path)
    tag, address = f"v{release.version()}", "https://example.org/ours/"
    assert release.main([tag, address], tmp_path) == 0
    assert "](https://example.org/ours/blob/v" in (tmp_path / "README.md").read_text()
    if wrong != "tag":
        text = (tmp_path / wrong).read_text()
        (tmp_path / wrong).write_text(text.replace(tag[1:], "0.0.9", 1))
    assert release.main(["v99.0" if wrong == "tag" else tag, address], tmp_path) == 1
    assert "release.py: the tag is v" in capsys.readouterr().err


@pytest.mark.full
def test_a_release(tmp_path):
    """A wheel that lacks something where nothing else is installed. Needs the package index, as installing does."""
    copy(tmp_path / "tree")
    ours = re.compile("JAX_|XLA_|PYTHON|VIRTUAL_ENV")  # variables of this suite, none of a user's
    options = {"cwd": tmp_path, "env": {k: x for k, x in os.environ.items() if not ours.match(k)}}
    run(sys.executable, "-m", "build", "tree", "--outdir", "dist", **options)
    sdist, wheel = sorted((tmp_path / "dist").iterdir(), key=lambda x: x.suffix)
    check_strictly(sdist, wheel)
    run(sys.executable, "-m", "venv", "empty", **options)
    python = tmp_path / "empty" / "bin" / "python"
    run(python, "-m", "pip", "install", "-qq", "--no-compile", wheel, **options)
    assert "bytes equal to dense decoding" in run(python, "-m", "energy_attn", "demo", **options)
