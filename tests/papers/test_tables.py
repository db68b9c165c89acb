"""The tables of papers/*/README.md: every name in them resolves, and nothing that has a number is missing."""

import ast
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
READMES = sorted(ROOT.glob("papers/*/README.md"))
# A row that has neither function nor test says why.
EXCUSES = ("not reproduced: ", "notation: ")


def rows(text: str) -> list[dict[str, str]]:
    """The rows of all tables that say which code and which test belong to something of the paper."""
    found, columns = [], None
    for line in text.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if not line.startswith("|"):
            columns = None
        elif columns is None:
            columns = cells
        elif not set(line) <= set("|-: ") and {"code", "test"} <= set(columns):
            assert len(cells) == len(columns), f"a row of {len(cells)} cells: {line}"
            found.append(dict(zip(columns, cells, strict=True)))
    return found


def resolve(name: str) -> None:
    """Imports what a dotted name says; raises where it is gone."""
    parts = name.split(".")
    for split in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:split]))
        except ModuleNotFoundError:
            continue
        for part in parts[split:]:
            found = getattr(found, part)
        return
    raise ModuleNotFoundError(name)


def functions_of(path: Path) -> set[str]:
    """The test functions of a file, those of classes as `Class::test`."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            functions = [x for x in node.body if isinstance(x, ast.FunctionDef)]
            found |= {f"{node.name}::{function.name}" for function in functions}
    return found


def broken(row: dict[str, str]) -> list[str]:
    """What does not hold of a row."""
    wrong = []
    names = re.findall(r"`(energy_attn(?:\.\w+)+)`", row["code"])
    for name in names:
        try:
            resolve(name)
        except (ImportError, AttributeError):
            wrong.append(f"{name} is gone")
    for path in re.findall(r"`((?:papers|tools|examples)/[\w/.]+)`", row["code"]):
        names.append(path)
        if not (ROOT / path).is_file():
            wrong.append(f"{path} is gone")
    checks = re.findall(r"`(tests/[\w/]+\.py)::([\w:]+)`", row["test"])
    for path, name in checks:
        if not (ROOT / path).is_file() or name not in functions_of(ROOT / path):
            wrong.append(f"{path}::{name} is gone")
    if not row["code"].startswith(EXCUSES) and not (names and checks):
        wrong.append("wants a function and a test, or to say why there is none")
    if len(re.findall("`tests/", row["test"])) != len(checks):
        wrong.append("wants tests as `tests/file.py::test_name`")
    return wrong


def numbers(text: str) -> set[int]:
    """1, 2–4 as {1, 2, 3, 4}."""
    found = set()
    for first, last in re.findall(r"(\d+)(?:–(\d+))?", text):
        found |= set(range(int(first), int(last or first) + 1))
    return found


@pytest.mark.parametrize("readme", READMES, ids=lambda path: path.parent.name)
def test_names_resolve(readme):
    """A function renamed, or a test deleted, that a reader of the paper is still sent to."""
    found = rows(readme.read_text(encoding="utf-8"))
    assert found
    wrong = {next(iter(row.values())): broken(row) for row in found}
    assert not {what: why for what, why in wrong.items() if why}


def test_a_broken_row_is_found():
    """A walk over the table that would pass whatever stands there."""
    good = {"code": "`energy_attn.attention`", "test": "`tests/papers/test_tables.py::rows`"}
    assert broken(good) == []
    assert broken({**good, "code": "`energy_attn.distributed.cost.volume`"}) == []
    assert broken({**good, "code": "not reproduced: no such machine", "test": ""}) == []
    for change in (
        {"code": "`energy_attn.atention`"},
        {"code": "`energy_attn.distributed.nothing.volume`"},
        {"code": "`papers/tree_attention/none.py`"},
        {"code": "by hand"},
        {"test": ""},
        {"test": "`tests/papers/test_tables.py`"},
        {"test": "`tests/papers/test_tables.py::test_that_is_gone`"},
        {"test": "`tests/papers/test_none.py::test_names_resolve`"},
    ):
        assert broken({**good, **change}), change


def test_all_of_tree_attention():
    """An equation, algorithm, statement, figure or table of either version of the paper that nobody looked at."""
    text = (ROOT / "papers/tree_attention/README.md").read_text(encoding="utf-8")
    first, later = set(), set()
    named = " ".join(row["paper"] for row in rows(text))
    for row in rows(text):
        own, _, other = row["paper"].partition("; later ")
        if own.startswith("eq"):
            assert not first & numbers(own), f"twice: {own}"
            first |= numbers(own)
            later |= numbers(other)
    assert first == set(range(1, 40)) and later == set(range(1, 39))
    for what in (
        *(f"Algorithm {i}" for i in (1, 2, 3)),
        *(f"Figure {i}" for i in (1, 2, 3, 4)),
        *(f"Table {i}" for i in ("I", "II", "1 (later)", "2 (later)")),
        "Theorem 1",
        "Observation 1",
    ):
        assert re.search(rf"{re.escape(what)}(?!\w)", named), what


def test_every_erratum_has_a_cell():
    """A claim against the paper that nothing shows."""
    text = (ROOT / "papers/tree_attention/README.md").read_text(encoding="utf-8")
    errata = text.split("## Errata\n")[1].split("\n### ")[1:]
    assert len(errata) >= 14
    for erratum in errata:
        title = erratum.split("\n")[0]
        assert "**Printed:**" in erratum and "**Right:**" in erratum, title
        assert re.search(r"^```python\n.*^assert ", erratum, re.MULTILINE | re.DOTALL) or (
            re.search(r"^```python\n.*^    assert ", erratum, re.MULTILINE | re.DOTALL)
        ), title
