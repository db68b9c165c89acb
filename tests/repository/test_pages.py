"""Examples in docstrings and blocks of pages: they run as a reader would run them, and give what is shown."""

import ast
import codeop
import doctest
import re
from pathlib import Path

import pages
import pytest
from check_structure import ROOMS, module_name, modules

ROOT = Path(__file__).resolve().parents[2]
# Pages that a newcomer pastes, which run on the newest JAX, too; and two short ones of the default suite.
FIRST = ("README.md", "docs/tour.md")
SHORT = ("README.md", "docs/byte_llama.md")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef)


def examples() -> list:
    """Every docstring that has an example. Read from the sources: decorators hide functions from doctest's finder."""
    found = []
    for _, path, tree in modules(ROOT, *ROOMS):
        module = module_name(ROOT, path).removesuffix(".__init__")
        for node in ast.walk(tree):
            doc = ast.get_docstring(node) if isinstance(node, DOCUMENTED) else None
            if doc and ">>> " in doc:
                name = f"{module}.{getattr(node, 'name', '')}".rstrip(".")
                test = (doc, {}, name, str(path), node.body[0].lineno - 1)
                found.append(pytest.param(doctest.DocTestParser().get_doctest(*test), id=name))
    return found


@pytest.mark.full
@pytest.mark.parametrize("example", examples())
def test_docstring(example, user_settings):
    """An example imports what it uses: nothing else is in sight of it."""
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert runner.run(example, out=report.append).failed == 0, "".join(report)


def when(page: Path):
    """A page whose blocks run in the default suite, on the newest JAX, or seldom."""
    name = page.relative_to(ROOT).as_posix()
    marks = [pytest.mark.readme] * (name in FIRST) + [pytest.mark.full] * (name not in SHORT)
    return pytest.param(page, id=name, marks=marks)


@pytest.mark.parametrize("page", [when(page) for page in pages.pages()])
def test_page(page):
    """A block that raises, or an output or a figure below it that it does not give."""
    pytest.importorskip("matplotlib")
    assert pages.differences(page, pages.run(page)) == []


@pytest.mark.structure
@pytest.mark.parametrize("page", pages.pages(), ids=lambda page: page.name)
def test_text_of_a_page(page):
    """A block that is indented or left open, included lines that have changed, or a figure without a description."""
    text = page.read_text(encoding="utf-8")
    blocks = list(pages.BLOCK.finditer(text))
    assert len(blocks) == len(re.findall(r"```python\b|<!-- python\b", text))
    assert sum(bool(block["below"]) for block in blocks) == text.count("<!-- output")
    assert pages.with_includes(text) == text, "python tools/pages.py"
    images = [image for block in blocks for image in pages.IMAGE.finditer(block["figures"] or "")]
    names = [f"{page.stem}-{i}.svg" for i in range(1, len(images) + 1)]
    assert [image[0].partition("figures/")[2].partition(")")[0] for image in images] == names
    assert set(names) == {x.name for x in (ROOT / "docs/figures").glob(f"{page.stem}-*")}
    assert all(image["label"] for image in images)


@pytest.mark.parametrize("page", FIRST)
def test_the_first_pages_can_be_pasted_into_a_prompt(page):
    """Python's prompt until 3.12 takes a line at a time: what is indented wants a blank line behind it, none inside."""
    blocks = list(pages.BLOCK.finditer((ROOT / page).read_text(encoding="utf-8")))
    assert blocks
    for block in blocks:
        pending: list[str] = []
        for line in [*pages.code_of(block).splitlines(), ""]:
            pending.append(line)
            if codeop.compile_command("\n".join(pending)) is not None:
                pending = []
        assert not pending, pending


PAGE = """# A page

```python
import dataclasses
import matplotlib.pyplot as plt


@dataclasses.dataclass
class Point:
    x: float


print("x is", Point(3.14159).x)
print("in 12.3 ms")
```

Prose.

<!-- python
print("| a |")
figure = plt.figure()
figure.add_subplot().plot([0, 1])
figure.savefig("line.svg")
-->
"""


SVG = "figures/page-1.svg"


VARIES = "<!-- output, varies: ms$ -->"
# What a page is changed to show, and whether a check says so.
CHANGES = [
    ({"\nx is 3.14159": "\nx is 3.14152"}, True),
    ({"\nx is 3.14159": "\nx is 3.14158"}, False),  # the last digit may differ
    ({"\nx is 3": "\nx was 3"}, True),
    ({"\nin 12.3 ms": "\nin 99.9 ms"}, True),
    ({"\n| a |": "\n| b |"}, True),
    ({f"![]({SVG})\n": ""}, True),
    ({"<!-- output -->": VARIES, "\nin 12.3 ms": "\nin 99.9 ms"}, False),
    ({"<!-- output -->": VARIES, "\nx is 3.14159": "\nx is 3"}, True),
]


def test_what_the_tool_writes_and_compares(tmp_path, monkeypatch):
    """Outputs in other places, a figure with a date, or something else than the blocks give that is not found."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(pages, "DOCS", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    results = pages.run(page)
    for _ in range(2):
        pages.write(page, results)
        assert pages.differences(page, results) == []
    text, svg = page.read_text(), (tmp_path / SVG).read_text()
    assert "```\n\n<!-- output -->\n\n```text\nx is 3.14159\nin 12.3 ms\n```\n\nProse." in text
    assert text.endswith(f"-->\n\n<!-- output -->\n\n| a |\n\n<!-- end -->\n\n![]({SVG})\n")
    assert pages.INK in svg and pages.COLOURS[0] in svg and "<dc:date>" not in svg

    for changes, told in CHANGES:
        changed = text
        for old, new in changes.items():
            assert old in changed
            changed = changed.replace(old, new, 1)
        page.write_text(changed)
        assert len(pages.differences(page, results)) == told, changes
    page.write_text(text)
    for pattern, new in ((r"L (\d)", r"L 9\1"), ("<!-- 0.0 -->", "<!-- 0.5 -->")):
        (tmp_path / SVG).write_text(re.sub(pattern, new, svg))  # drawn elsewhere; other words
        assert len(pages.differences(page, results)) == 1

    page.write_text(text.replace("x: float", "y: float"))
    with pytest.raises(RuntimeError, match="page.md: a block failed(.|\n)*has no attribute 'x'"):
        pages.run(page)
