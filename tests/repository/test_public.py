"""Public names: what is shown, documented, typed, checked at the signature, and imported when it is first used."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
import types
import typing
from functools import partial
from pathlib import Path

import check_structure
import jax.numpy as jnp
import jaxtyping
import pytest

import energy_attn.distributed
import energy_attn.kernels

pytestmark = pytest.mark.structure

ROOT = Path(__file__).resolve().parents[2]
EXPORTS = check_structure.exports(ROOT)
PACKAGES = {package for package, _ in EXPORTS}
MODULES = {package: importlib.import_module(package) for package in PACKAGES}
PUBLIC = {f"{package}.{name}": getattr(MODULES[package], name) for package, name in EXPORTS}
# Public parameters that may be anything at all, and why.
ANYTHING = {"energy_attn.energy_report(options)": "the overloads of its three forms say which"}


def functions_of(public) -> list[types.FunctionType]:
    """A public function, or the methods of a public class that are public too."""
    if inspect.isclass(public):
        own = [n for n in vars(public) if n == "__call__" or not n.startswith("_")]
        return [f for f in (getattr(public, n) for n in own) if inspect.isfunction(f)]
    return [f for f in [inspect.unwrap(public)] if inspect.isfunction(f)]


def test_packages_show_what_they_export():
    """A module that is imported to be used, a helper, or a name in one of two lists of a package's names alone."""
    assert {"energy_attn", "energy_attn.kernels", "energy_attn.distributed"} <= PACKAGES
    for package in {*PACKAGES, "energy_attn.distributed.cost"}:
        module = importlib.import_module(package)
        exported = {name for other, name in EXPORTS if other == package}
        assert package not in PACKAGES or {*getattr(module, "__all__", exported)} == exported
        shown = {name for name in dir(module) if not name.startswith("_")}
        shown -= {"jaxtyping"}  # which the type checks of this suite put there
        modules = {name for name in shown if inspect.ismodule(getattr(module, name))}
        folders = {name for name in modules if hasattr(getattr(module, name), "__path__")}
        alone = {getattr(module, n).__name__ for n in modules - folders - {check_structure.DOOR}}
        assert alone <= {*PACKAGES, "energy_attn.distributed.cost"}, package
        assert package not in PACKAGES or shown - modules <= exported, package


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
    functions = [f for public in PUBLIC.values() for f in functions_of(public)]
    found = {(f.__qualname__, *by_place(f)) for f in functions if by_place(f)}
    # as jax.nn and Equinox have it, whose places these take
    assert found == {("attention", "bias", "mask"), ("MultiheadAttention.__call__", "mask")}


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_documented_and_typed(name):
    """An example, a docstring or an annotation that is not there, or one that says nothing to a reader or an editor."""
    public = PUBLIC[name]
    if isinstance(public, tuple):  # a constant has no docstring of its own
        return
    doc = inspect.cleandoc(public.__doc__ or "")
    assert re.search("^Examples:\n    >>> ", doc, re.MULTILINE), "wants a section `Examples:`"
    constructors = [public.__init__] if inspect.isclass(public) else []
    for function in [*functions_of(public), *filter(inspect.isfunction, constructors)]:
        # Annotations that cannot be resolved would be passed over by the type checks.
        hints = typing.get_type_hints(function, include_extras=True)
        for parameter, hint in hints.items():
            union = typing.get_origin(hint) in (typing.Union, types.UnionType)
            anything = typing.Any in (typing.get_args(hint) if union else (hint,))
            assert not anything or parameter == "return" or f"{name}({parameter})" in ANYTHING
        if function in constructors:
            continue
        # an override does what the docstring of its base says
        assert inspect.getdoc(function), f"{function.__qualname__} wants a docstring"
        bare = set(inspect.signature(function).parameters) - set(hints) - {"self"}
        assert not bare, f"{function.__qualname__}: annotate {sorted(bare)}"
        assert "return" in hints, f"{function.__qualname__}: annotate what it returns"


def test_shapes_are_checked_in_every_room():
    """Arrays that do not fit together are stopped at the signature, through the links too."""
    sharded = partial(energy_attn.distributed.sharded_attention, axis_name="device")
    query = jnp.zeros((2, 3, 4, 5))
    for attend in (energy_attn.attention, energy_attn.kernels.local_attention, sharded):
        with pytest.raises(jaxtyping.TypeCheckError, match="attention"):
            attend(query, query, query[:, :2])


def lazy_names(tree: ast.Module) -> list[str]:
    """The names in a module's call of `lazy`."""
    calls = [x for x in ast.walk(tree) if isinstance(x, ast.Call)]
    keywords = [y for x in calls if ast.unparse(x.func) == "_lazy" for y in x.keywords]
    return [name for keyword in keywords for name in ast.literal_eval(keyword.value)]


LAZY = {
    check_structure.module_name(ROOT, path).removesuffix(".__init__"): tree
    for _, path, tree in check_structure.modules(ROOT, *check_structure.ROOMS)
    if lazy_names(tree) and check_structure.lazy_block(tree)
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


# Prefixes of modules that `import energy_attn` does not import.
LATE = (
    *("matplotlib", "jax.experimental.pallas", "safetensors", "tokenizers"),
    *(f"energy_attn.{x}" for x in "cli hopfield models plot prefix_tree report".split()),
    *(f"energy_attn.distributed.{x}" for x in ("cache", "hlo._collectives", "runtime._initialize")),
    "energy_attn.distributed.runtime._safetensors",
    *(
        f"energy_attn.kernels.pallas.{x}._{y}"
        for x in ("gpu", "tpu")
        for y in ("forward", "backward")
    ),
)


def test_names_in_a_shell():
    """A part that few programs need, imported in all or by listing names; a name that a shell does not complete."""
    code = (
        "import sys, energy_attn as ea, energy_attn.distributed as d;"
        "print(*{'models', 'landscape', 'attention'} - {*dir(ea)}, *{'KVCache'} - {*dir(d)});"
        "print(*sys.modules);"
        "print(ea.models.Llama.__name__, d.KVCache.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    missing, imported, late = done.stdout.splitlines()
    assert (missing, late) == ("", "Llama KVCache")
    assert [name for name in imported.split() if name.startswith(LATE)] == []
    with pytest.raises(AttributeError, match="module 'energy_attn' has no attribute 'nothing'"):
        _ = importlib.import_module("energy_attn").nothing
    with pytest.raises(ImportError, match="cannot import name 'nothing' from 'energy_attn.dis"):
        from energy_attn.distributed import nothing  # noqa: F401  # pyright: ignore[reportAttributeAccessIssue]
