"""Names that are imported when they are first used: type checkers read one list of them, users get another."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import check_structure
import pytest

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
    check_structure.module_name(ROOT, module.path).removesuffix(".__init__"): module.tree
    for module in check_structure.modules(ROOT, *check_structure.ROOMS)
    if lazy_names(module.tree) and check_structure.lazy_block(module.tree)
}
assert {"energy_attn", "energy_attn.distributed", "energy_attn.distributed.internal"} <= {*LAZY}


@pytest.mark.parametrize("name", LAZY)
def test_both_lists_agree(name):
    """A name that users get and type checkers do not see, another thing of the same name, or a folder in its place."""
    module = importlib.import_module(name)
    found: dict[str, object] = {"__package__": module.__package__}
    block = ast.Module(check_structure.lazy_block(LAZY[name]), [])
    exec(compile(block, name, "exec"), found)
    wanted = {key: value for key, value in found.items() if not key.startswith("_")}
    assert sorted(lazy_names(LAZY[name])) == sorted(wanted)
    for key, value in wanted.items():
        assert module.__getattr__(key) is value
        # `record`, a function of a folder `record`, which is the folder for whoever asks after the folder's import
        if Path(module.__file__ or "").with_name(key).is_dir():
            assert getattr(module, key).__name__ == f"{module.__name__}.{key}"


def test_names_in_a_shell():
    """Names that a shell does not complete, whose listing imports them, or an error that does not say which is none."""
    code = (
        "import sys, energy_attn as ea, energy_attn.distributed as d;"
        "print(*{'models', 'landscape', 'attention'} - {*dir(ea)}, *{'KVCache'} - {*dir(d)});"
        "print('energy_attn.models' in sys.modules, ea.models.Llama.__name__, d.KVCache.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "\nFalse Llama KVCache\n"
    with pytest.raises(AttributeError, match="module 'energy_attn' has no attribute 'nothing'"):
        _ = importlib.import_module("energy_attn").nothing
    with pytest.raises(ImportError, match="cannot import name 'nothing' from 'energy_attn.dis"):
        from energy_attn.distributed import nothing  # noqa: F401  # pyright: ignore[reportAttributeAccessIssue]
