"""The rules of tools/check_structure.py hold here, and the checker sees each of them broken."""

import ast
import importlib
import inspect
import os
import re
import subprocess
import sys
import tomllib
import types
import typing
from functools import partial
from pathlib import Path

import budgets
import check_structure
import jax.numpy as jnp
import jaxtyping
import pytest

import energy_attn.distributed
import energy_attn.kernels

pytestmark = pytest.mark.structure

ROOT = Path(__file__).resolve().parents[2]
EXPORTS = check_structure.exports(ROOT)


@pytest.mark.parametrize("rule", check_structure.RULES, ids=lambda rule: rule.__name__)
def test_repository(rule):
    assert list(rule(ROOT)) == []


@pytest.fixture
def sound(tmp_path):
    """A small repository in which every rule holds."""
    for folder in (*check_structure.ROOMS, "docs/api", "tools"):
        (tmp_path / folder).mkdir(parents=True)
    for room in check_structure.LINKED:
        (tmp_path / "energy_attn" / room).symlink_to(Path("..", room))
    files = {
        "kernels/__init__.py": "from ._a import a as a\n",
        "kernels/_a.py": "import jax\nfrom . import _b\nfrom energy_attn.kernels._b import b\n",
        "kernels/_b.py": "b = 1\n",
        "distributed/__init__.py": "from energy_attn import kernels\n",
        "energy_attn/__init__.py": "from .kernels import a\nfrom . import distributed\n",
        "docs/api/kernels.md": "::: energy_attn.kernels.a\n",
        "tools/budgets.toml": "kernels = 5\ndistributed = 1\nenergy_attn = 2\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def test_sound_repository(sound):
    assert [finding for rule in check_structure.RULES for finding in rule(sound)] == []


@pytest.mark.parametrize(
    ("where", "line"),
    [
        ("kernels/_b.py", "import energy_attn"),
        ("kernels/_b.py", "from energy_attn import distributed"),
        ("kernels/_b.py", "def f():\n    import energy_attn.distributed.runtime._mesh"),
        ("kernels/_b.py", "from ..distributed import merge_across"),
        ("kernels/__init__.py", "from .._energy import free_energy"),
        ("distributed/_b.py", "from energy_attn._energy import free_energy"),
        ("distributed/_b.py", "from kernels import merge"),
        ("energy_attn/_b.py", "import distributed"),
        ("tests/test_b.py", "import kernels._b"),
    ],
)
def test_wrong_import_is_found(sound, where, line):
    (sound / where).parent.mkdir(exist_ok=True)
    (sound / where).write_text(line + "\n")
    (finding,) = check_structure.wrong_imports(sound)
    assert finding.startswith(f"{where}:")


@pytest.mark.parametrize(
    "line",
    [
        "from jax._src import core",
        "import jax._src.core as core",
        "def f():\n    from jax.nn import _private",
        "import jax\nx = jax.lax._convert(1)",
        "from jax.interpreters import mlir\nx = mlir._rules['cuda']",
        "import importlib\nx = importlib.import_module('jax._src.core')",
    ],
)
def test_private_name_is_found(sound, line):
    """An update of JAX that breaks what nobody knows to depend on it."""
    (sound / "distributed" / "_b.py").write_text(line + "\n")
    (finding,) = check_structure.private_names(sound)
    assert finding.startswith("distributed/_b.py:")
    (sound / "distributed" / "_b.py").unlink()
    (sound / check_structure.PRIVATE_NAMES).write_text(line + "\nimport jax\nv = jax.__version__\n")
    assert list(check_structure.private_names(sound)) == []


def test_broken_link_is_found(sound):
    link = sound / "energy_attn" / "kernels"
    link.unlink()
    link.symlink_to(sound / "kernels")  # reaches the right folder, on this machine only
    assert [f.split(":")[0] for f in check_structure.broken_links(sound)] == ["energy_attn/kernels"]
    link.unlink()
    link.mkdir()
    assert [f.split(":")[0] for f in check_structure.broken_links(sound)] == ["energy_attn/kernels"]


def test_long_module_is_found(sound):
    (sound / "kernels" / "_b.py").write_text("b = 1\n" * check_structure.MAX_LINES)
    assert list(check_structure.long_modules(sound)) == []
    (sound / "kernels" / "_b.py").write_text("b = 1\n" * (check_structure.MAX_LINES + 1))
    (finding,) = check_structure.long_modules(sound)
    assert finding.startswith("kernels/_b.py:")


def test_folder_above_its_budget_is_found(sound):
    """A room that grows by half in a year, a mechanism at a time."""
    (sound / "tools" / "budgets.toml").write_text("kernels = 4\ndistributed = 1\nvendor = 3\n")
    findings = [finding.split(":")[0] for finding in check_structure.over_budget(sound)]
    assert findings == ["energy_attn", "kernels", "tools/budgets.toml"]


def test_budgets_are_lowered_and_never_raised(sound):
    file = sound / "tools" / "budgets.toml"
    file.write_text('# lines\nkernels = 9\n"distributed" = 0\ngone = 7\n')
    budgets.lower(sound)
    assert file.read_text() == '# lines\nkernels = 5\n"distributed" = 0\n'


def test_counts_in_contributing():
    """Counts of a year ago, by which nobody sees that a call has doubled its way."""
    run = [sys.executable, "tools/count_way.py", "--check"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    done = subprocess.run(run, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr


def test_repeated_class_is_found(sound):
    """Two meanings of one name, one of them private."""
    (sound / "kernels" / "_b.py").write_text("class Plan:\n    pass\n")
    assert list(check_structure.repeated_classes(sound)) == []
    (sound / "energy_attn" / "_c.py").write_text("def f():\n    class _Plan:\n        pass\n")
    (finding,) = check_structure.repeated_classes(sound)
    assert finding.startswith("kernels/_b.py:1: class Plan is defined 2 times")
    assert "energy_attn/_c.py:2" in finding


@pytest.mark.parametrize(
    ("where", "line", "allowed"),
    [
        ("energy_attn/core/_c.py", "from ..models import Llama", False),
        ("energy_attn/core/_c.py", "from .. import models", False),
        ("energy_attn/core/_c.py", "def f():\n    import energy_attn.models", False),
        ("energy_attn/report/_report.py", "from ..models.decoder._decoder import A", False),
        ("energy_attn/report/_report.py", "from ..models import AbstractDecoder", True),
        ("energy_attn/cli/_c.py", "from ..models.decoder._decoder import A", True),
        ("energy_attn/models/_c.py", "from ._decoder import A", True),
    ],
)
def test_who_leans_on_models_is_found(sound, where, line, allowed):
    path = sound / where
    path.parent.mkdir(exist_ok=True)
    path.write_text(line + "\n")
    assert len(list(check_structure.leaning_on_models(sound))) == (not allowed)


def test_undocumented_export_is_found(sound):
    (sound / "docs" / "api" / "kernels.md").write_text("::: energy_attn.kernels.ab\n")
    (finding,) = check_structure.undocumented_exports(sound)
    assert "energy_attn.kernels.a`" in finding


def test_page_of_a_whole_package(sound):
    """A page that shows all that a package exports, and so names nothing; not one that shows its docstring alone."""
    page = sound / "docs" / "api" / "kernels.md"
    page.write_text("::: energy_attn.kernels\n    options:\n      show_root_heading: false\n")
    assert not list(check_structure.undocumented_exports(sound))
    page.write_text("::: energy_attn.kernels\n    options:\n      members: false\n")
    assert list(check_structure.undocumented_exports(sound))


def test_all_is_what_is_exported():
    """Two lists of a package's names that differ: the documentation shows one, users import by the other."""
    for package in {package for package, _ in EXPORTS}:
        listed = getattr(importlib.import_module(package), "__all__", None)
        assert listed is None or set(listed) == {x for other, x in EXPORTS if other == package}


def test_every_room_exports_something():
    rooms = {"energy_attn", "energy_attn.kernels", "energy_attn.distributed"}
    assert rooms <= {package for package, _ in EXPORTS}


def functions_of(public) -> list[types.FunctionType]:
    """A public function, or the methods of a public class that are public too."""
    if inspect.isclass(public):
        own = [n for n in vars(public) if n == "__call__" or not n.startswith("_")]
        return [f for f in (getattr(public, n) for n in own) if inspect.isfunction(f)]
    return [f for f in [inspect.unwrap(public)] if inspect.isfunction(f)]


def test_no_stray_public_names():
    """A module that is imported to be used, or a helper, among the names that a package shows."""
    packages = {package for package, _ in EXPORTS}
    public = {*packages, "energy_attn.distributed.cost"}
    for package in public:
        module = importlib.import_module(package)
        shown = {name for name in dir(module) if not name.startswith("_")}
        shown -= {"jaxtyping"}  # which the type checks of this suite put there
        modules = {name for name in shown if inspect.ismodule(getattr(module, name))}
        folders = {name for name in modules if hasattr(getattr(module, name), "__path__")}
        modules_alone = modules - folders - {check_structure.DOOR}
        assert {getattr(module, name).__name__ for name in modules_alone} <= public, package
        if package in packages:
            assert shown - modules <= {name for p, name in EXPORTS if p == package}, package


def by_place(function) -> list[str]:
    """The arguments that may be given by place behind the value, or that hide something."""
    parameters = inspect.signature(function).parameters.values()
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if {"query", "value"} & set(names):
        last = max(i for i, n in enumerate(names) if n in ("query", "key", "key_", "value"))
        return names[last + 1 :]
    return [name for name in names[1:] if name in ("bias", "mask", "where")]  # not what is asked


def test_arguments_after_value_are_given_by_name():
    """A source where a bias was meant, or a tangent: where shapes agree, another function without a word."""
    found = {
        f"{package}.{function.__qualname__}": names
        for package, name in EXPORTS
        for function in functions_of(getattr(importlib.import_module(package), name))
        if (names := by_place(function))
    }
    # as jax.nn and Equinox have it, whose places these take
    assert found == {
        "energy_attn.attention": ["bias", "mask"],
        "energy_attn.nn.MultiheadAttention.__call__": ["mask"],
    }


# A constant has no docstring of its own.
DOCUMENTED = [
    (package, name)
    for package, name in EXPORTS
    if not isinstance(getattr(importlib.import_module(package), name), tuple)
]


@pytest.mark.parametrize(("package", "name"), DOCUMENTED)
def test_public_names_are_documented_and_typed(package, name):
    public = getattr(importlib.import_module(package), name)
    doc = inspect.cleandoc(public.__doc__ or "")
    assert re.search("^Examples:\n    >>> ", doc, re.MULTILINE), "wants a section `Examples:`"
    for function in functions_of(public):
        # an override does what the docstring of its base says
        assert inspect.getdoc(function), f"{function.__qualname__} wants a docstring"
        # Annotations that cannot be resolved would be passed over by the type checks.
        hints = typing.get_type_hints(function, include_extras=True)
        bare = set(inspect.signature(function).parameters) - set(hints) - {"self"}
        assert not bare, f"{function.__qualname__}: annotate {sorted(bare)}"
        assert "return" in hints, f"{function.__qualname__}: annotate what it returns"


@pytest.mark.parametrize(
    "attend",
    [
        energy_attn.attention,
        energy_attn.kernels.local_attention,
        partial(energy_attn.distributed.sharded_attention, axis_name="device"),
    ],
)
def test_shapes_are_checked_in_every_room(attend):
    """Arrays that do not fit together are stopped at the signature, through the links too."""
    query = jnp.zeros((2, 3, 4, 5))
    with pytest.raises(jaxtyping.TypeCheckError, match="attention"):
        attend(query, query, query[:, :2])


def test_type_checks_can_be_switched_off(unchecked):
    """Then the library's own error is met, which names the argument."""
    query = jnp.zeros((2, 3, 4, 5))
    with pytest.raises(ValueError, match="value"):
        energy_attn.attention(query, query, query[:, :2])


def test_version_is_written_once():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert energy_attn.__version__ == version


def test_tests_import_no_tests():
    """A helper in another file's tests: what is changed there breaks these; helpers stand in tests/support."""
    for path in sorted((ROOT / "tests").rglob("*.py")):
        module = check_structure.module_name(ROOT, path)
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for line, name in check_structure.imports(module, tree):
            parts = name.split(".")
            ours = parts[0] == "tests" and any(x.startswith("test_") for x in parts)
            assert not ours, f"{path.relative_to(ROOT)}:{line}: {name}"


# Lowered as tests turn to public names, never raised.
MOST_PRIVATE = 208


def test_few_private_imports():
    """A test that breaks when the library is rearranged, where a public name would do."""
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for line, name in {
            (line, name.rpartition(".")[0])
            for line, name in check_structure.imports(
                check_structure.module_name(ROOT, path), ast.parse(path.read_text(encoding="utf-8"))
            )
            if name.startswith("energy_attn.") and re.search(r"\._[a-z]", name)
        }
    ]
    assert len(found) <= MOST_PRIVATE, "\n".join(found)


def test_collecting_compiles_nothing():
    """Arrays of JAX that are made when a module is imported: each process of each run compiles programs for them."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-qsp", "no:xdist", "-p", "no:logging", "--collect-only"],
        cwd=ROOT,
        env=os.environ | {"JAX_LOG_COMPILES": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    said = re.findall(r"Compiling (?:module )?\w+", done.stdout + done.stderr)
    assert said == []
