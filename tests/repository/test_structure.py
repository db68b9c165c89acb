"""The checker of structure, which `make check` runs, sees each of its rules broken."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import budgets
import check_structure as rules
import pytest

pytestmark = pytest.mark.structure

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "CONTRIBUTING.md"


@pytest.fixture
def sound(tmp_path):
    """A small repository in which every rule holds."""
    for room in rules.LINKED:
        (tmp_path / "energy_attn").mkdir(exist_ok=True)
        (tmp_path / "energy_attn" / room).symlink_to(Path("..", room))
    files = {
        "kernels/__init__.py": "from ._a import a as a\n",
        "kernels/_a.py": "import jax\nfrom . import _b\nfrom energy_attn.kernels._b import b\n",
        "kernels/_b.py": "class Plan:\n    b: int\n",
        "distributed/__init__.py": "from energy_attn import kernels\n",
        "energy_attn/__init__.py": "from .kernels import a\nfrom . import distributed\n",
        "docs/api/kernels.md": "::: energy_attn.kernels.a\n",
        "tools/budgets.toml": "kernels = 6\ndistributed = 1\nenergy_attn = 2\n",
    }
    for name, text in files.items():
        write(tmp_path, name, text)
    return tmp_path


def write(root, name, text):
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def test_sound_repository(sound):
    assert [finding for rule in rules.RULES for finding in rule(sound)] == []


PRIVATE = [
    "from jax._src import core",
    "import jax._src.core as core",
    "def f():\n    from jax.nn import _private",
    "import jax\nx = jax.lax._convert(1)",
    "from jax.interpreters import mlir\nx = mlir._rules['cuda']",
    "import importlib\nx = importlib.import_module('jax._src.core')",
]
WHOLE_PAGE = "::: energy_attn.kernels\n    options:\n      %s: false\n"
# What breaks a rule: a file, with the line where the finding has one, and its text.
BROKEN = {
    rules.wrong_imports: [
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
    rules.private_names: [("distributed/_b.py", text) for text in PRIVATE],
    rules.long_modules: [("kernels/_b.py", "b = 1\n" * (rules.MAX_LINES + 1))],
    rules.repeated_classes: [("energy_attn/_c.py:2", "def f():\n    class _Plan:\n        pass\n")],
    rules.readers_of_programs: [("kernels/xla/_c.py", "def f(x):\n    return x.jaxpr.eqns")],
    rules.too_many_any: [
        ("kernels/_b.py", "def f(x: Any, " + 18 * "y: int, " + "): ..."),
        ("kernels/_b.py", "async def f(x: typing.Any): ..."),
        ("kernels/_b.py", "def f(x: Any | None = None): ..."),
        ("kernels/_b.py", "def f(x: Optional[Any]): ..."),
        ("kernels/_b.py", "class A:\n    def f(self, *x: 'Any'): ..."),
    ],
    rules.leaning_on_models: [
        ("energy_attn/core/_c.py", "from ..models import Llama"),
        ("energy_attn/core/_c.py", "from .. import models"),
        ("energy_attn/core/_c.py", "def f():\n    import energy_attn.models"),
        ("energy_attn/report/_report.py", "from ..models.decoder._decoder import A"),
    ],
    rules.undocumented_exports: [
        ("docs/api/kernels.md", "::: energy_attn.kernels.ab\n"),
        ("docs/api/kernels.md", WHOLE_PAGE % "members"),  # shows the package's docstring alone
    ],
}
ALLOWED = {
    rules.private_names: [
        (rules.PRIVATE_NAMES, "\n".join([*PRIVATE, "import jax", "v = jax.__version__"]))
    ],
    rules.long_modules: [("kernels/_b.py", "b = 1\n" * rules.MAX_LINES)],
    rules.readers_of_programs: [("kernels/program/_c.py", "def f(x):\n    return x.eqns")],
    rules.too_many_any: [
        ("kernels/_b.py", "def f(x: Any, " + 19 * "y: int, " + "): ..."),
        (
            "kernels/_b.py",
            "def f(a: object, b: list[Any], c: Callable[..., Any], d: Anything): ...",
        ),
    ],
    rules.leaning_on_models: [
        ("energy_attn/report/_report.py", "from ..models import AbstractDecoder"),
        ("energy_attn/cli/_c.py", "from ..models.decoder._decoder import A"),
        ("energy_attn/models/_c.py", "from ._decoder import A"),
    ],
    rules.undocumented_exports: [("docs/api/kernels.md", WHOLE_PAGE % "show_root_heading")],
}


ROWS = [(rule, *row, 1) for rule, found in BROKEN.items() for row in found]
ROWS += [(rule, *row, 0) for rule, found in ALLOWED.items() for row in found]


@pytest.mark.parametrize(("rule", "where", "text", "count"), ROWS)
def test_rules(sound, rule, where, text, count):
    """A broken rule that is not found, or what is allowed and is."""
    write(sound, where.partition(":")[0], text)
    findings = list(rule(sound))
    assert len(findings) == count
    place = "energy_attn.kernels.a`" if where.startswith("docs/api") else where
    assert all(place in finding for finding in findings)


def test_broken_link_is_found(sound):
    link = sound / "energy_attn" / "kernels"
    link.unlink()
    link.symlink_to(sound / "kernels")  # reaches the right folder, on this machine only
    assert len(list(rules.broken_links(sound))) == 1


def test_budgets(sound):
    """A room that grows by half in a year, a mechanism at a time; or a budget that is raised by itself."""
    file = sound / "tools" / "budgets.toml"
    file.write_text("kernels = 5\ndistributed = 1\nvendor = 3\n")
    findings = [finding.split(":")[0] for finding in rules.over_budget(sound)]
    assert findings == ["energy_attn", "kernels", "tools/budgets.toml"]
    file.write_text('# lines\nkernels = 9\n"distributed" = 0\ngone = 7\n')
    budgets.lower(sound)
    assert file.read_text() == '# lines\nkernels = 6\n"distributed" = 0\n'


def test_counts_in_contributing():
    """Counts of a year ago, by which nobody sees that a call has doubled its way."""
    run = [sys.executable, "tools/count_way.py"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    done = subprocess.run(run, cwd=ROOT, env=environment, capture_output=True, text=True)
    (shown,) = re.findall(r"<!-- tools/count_way.py -->\n(.*)<!-- end", PAGE.read_text(), re.DOTALL)
    assert shown in done.stdout, f"python tools/count_way.py --write{done.stdout}{done.stderr}"


# Lowered as tests turn to public names, never raised.
MOST_PRIVATE = 80


def test_imports_of_tests():
    """A helper in another file's tests, which breaks these; or a private name where a public one would do."""
    private = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found = set()
        for line, name in rules.imports(rules.module_name(ROOT, path), tree):
            where = f"{path.relative_to(ROOT)}:{line}: {name}"
            assert not re.match(r"tests\.(.*\.)?test_", name), where  # helpers: tests/support
            if re.match(r"energy_attn\.(.*\.)?_[a-z]", name):
                found.add((line, name.rpartition(".")[0]))
        private += [f"{path.relative_to(ROOT)}:{line}: {module}" for line, module in sorted(found)]
    assert len(private) <= MOST_PRIVATE, "\n".join(private)


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
