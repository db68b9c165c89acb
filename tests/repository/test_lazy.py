"""Names that are imported when they are first used: type checkers read one list of them, users get another."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import check_structure
import pytest

import energy_attn

pytestmark = pytest.mark.structure

ROOT = Path(__file__).resolve().parents[2]


def lazy_names(tree: ast.Module) -> list[str]:
    """The names in a module's call of `lazy`."""
    return [
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "_lazy"
        for keyword in node.keywords
        for name in ast.literal_eval(keyword.value)
    ]


LAZY = {
    check_structure.module_name(ROOT, path).removesuffix(".__init__"): tree
    for room in check_structure.ROOMS
    for path in check_structure.sources(ROOT, room)
    for tree in [ast.parse(path.read_text(encoding="utf-8"))]
    if lazy_names(tree) and check_structure.lazy_block(tree)
}


def test_there_are_some():
    """A finder that finds nothing."""
    assert {"energy_attn", "energy_attn.distributed", "energy_attn.distributed.internal"} <= {*LAZY}


@pytest.mark.parametrize("name", LAZY)
def test_both_lists_agree(name):
    """A name that users get and type checkers do not see, or the other way round, or another thing of the same name."""
    module = importlib.import_module(name)
    found: dict[str, object] = {"__package__": module.__package__}
    block = ast.Module(check_structure.lazy_block(LAZY[name]), [])
    exec(compile(block, name, "exec"), found)
    wanted = {key: value for key, value in found.items() if not key.startswith("_")}
    assert sorted(lazy_names(LAZY[name])) == sorted(wanted)
    for key, value in wanted.items():
        assert module.__getattr__(key) is value


@pytest.mark.parametrize("name", LAZY)
def test_no_folder_has_the_name_of_what_is_in_it(name):
    """`record`, a function of a folder `record`, which is the folder for whoever asks after the folder's import."""
    package = importlib.import_module(name)
    for key in lazy_names(LAZY[name]):
        if Path(package.__file__ or "").with_name(key).is_dir():
            assert getattr(package, key).__name__ == f"{package.__name__}.{key}"


def test_names_are_listed_before_they_are_used():
    """Names that an interactive shell does not complete, or whose listing imports them."""
    code = (
        "import sys, energy_attn as ea, energy_attn.distributed as d;"
        "print(*{'models', 'landscape', 'attention'} - {*dir(ea)}, *{'KVCache'} - {*dir(d)});"
        "print('energy_attn.models' in sys.modules, ea.models.Llama.__name__, d.KVCache.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "\nFalse Llama KVCache\n"


def test_any_other_name_is_an_error():
    with pytest.raises(AttributeError, match="module 'energy_attn' has no attribute 'nothing'"):
        _ = energy_attn.nothing  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ImportError, match="cannot import name 'nothing' from 'energy_attn.dis"):
        from energy_attn.distributed import nothing  # noqa: F401  # pyright: ignore[reportAttributeAccessIssue]
