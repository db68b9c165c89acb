"""The rules of tools/check_types.py hold here, and the checker sees each broken; `make check` runs pyright."""

import ast
import importlib
import inspect
import json
import types
import typing
from pathlib import Path

import check_structure
import check_types
import pytest

pytestmark = pytest.mark.structure

ROOT = Path(__file__).resolve().parents[2]
EXPORTS = check_structure.exports(ROOT)

# Public parameters that may be anything at all, and why.
ANYTHING = {"energy_attn.energy_report(options)": "the overloads of its three forms say which"}


def test_few_parameters_are_any():
    assert list(check_types.too_many_any(ROOT)) == []


@pytest.mark.parametrize(
    "function",
    [
        "def f(x: Any): ...",
        "def f(x: typing.Any): ...",
        "def f(x: Any | None = None): ...",
        "def f(x: Optional[Any]): ...",
        "def f(*x: Any): ...",
        "async def f(x: Any): ...",
        "class A:\n    def f(self, x: Any): ...",
        "def g():\n    def f(x: Any): ...",
    ],
)
def test_an_any_is_found(tmp_path, function):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "_a.py").write_text(function)
    total, (found,) = check_types.any_parameters(tmp_path, "kernels")
    assert total == 1 and found.endswith(": f(x)")


@pytest.mark.parametrize("annotation", ["object", "list[Any]", "Callable[..., Any]", "Anything"])
def test_what_says_something_is_not_found(annotation):
    assert not check_types.says_nothing(ast.parse(annotation, mode="eval").body)


def test_too_many_any_are_found(tmp_path):
    for room in check_types.ROOMS:
        (tmp_path / room).mkdir()
    most = int(1 / check_types.MOST)
    source = ["def f(x: Any): ...", *["def f(x: int): ..."] * (most - 1)]
    (tmp_path / "kernels" / "_a.py").write_text("\n".join(source))
    assert list(check_types.too_many_any(tmp_path)) == []
    (tmp_path / "kernels" / "_a.py").write_text("\n".join(source[:-1]))
    message, where = check_types.too_many_any(tmp_path)
    assert message.startswith("kernels: ") and where == "kernels/_a.py:1: f(x)"


def report(*lines: int) -> str:
    """What pyright says of errors on these lines, and of a warning on the first."""
    found = [("error", line) for line in lines] + [("warning", 1)]
    places = [(kind, {"start": {"line": line - 1}}) for kind, line in found]
    diagnostics = [{"severity": k, "message": "no\nreally", "range": r} for k, r in places]
    return json.dumps({"generalDiagnostics": diagnostics})


def test_mistakes_are_compared_with_what_pyright_finds():
    """A mistake that is overlooked, and a complaint about what is right."""
    source = f"right\nwrong  {check_types.MARK}\nright\n"
    assert list(check_types.misjudged(source, report(2))) == []
    assert ["overlooks" in line for line in check_types.misjudged(source, report())] == [True]
    (complaint,) = check_types.misjudged(source, report(2, 3))
    assert complaint.endswith(":3: no")
    assert "marks no mistake" in next(check_types.misjudged("right\n", report()))


def test_many_mistakes_are_planted():
    """A file of mistakes that has lost them."""
    source = (ROOT / check_types.MISTAKES).read_text()
    assert source.count(check_types.MARK) > 20


def callables_of(public) -> list:
    """A public function; a public class, as it is constructed, and its public methods."""
    if not inspect.isclass(public):
        return [public] if callable(public) else []
    own = [name for name in vars(public) if name == "__call__" or not name.startswith("_")]
    return [public, *(f for f in (getattr(public, name) for name in own) if inspect.isroutine(f))]


def hints_of(function) -> dict[str, typing.Any]:
    """The annotations of the parameters of a function, or of a class's constructor."""
    parameters = inspect.signature(function).parameters
    hints = typing.get_type_hints(function)
    if inspect.isclass(function) and inspect.isfunction(function.__init__):
        hints |= typing.get_type_hints(function.__init__)
    return {name: hints[name] for name in parameters if name in hints}


def members(hint) -> tuple:
    """The types of a union, or the one type that it is."""
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if union else (hint,)


def test_no_public_parameter_is_any():
    """An argument about which neither a reader nor an editor learns anything."""
    found = {
        f"{package}.{function.__qualname__}({name})"
        for package, public in EXPORTS
        for function in callables_of(getattr(importlib.import_module(package), public))
        for name, hint in hints_of(function).items()
        if typing.Any in members(hint)
    }
    assert found == set(ANYTHING)
