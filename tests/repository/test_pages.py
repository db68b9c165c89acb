"""Examples in docstrings and blocks of pages: they run as a reader would run them, and give what is shown."""

import ast
import codeop
import doctest
import re
from pathlib import Path

import pages
import pytest
from check_structure import ROOMS, module_name, sources

ROOT = Path(__file__).resolve().parents[2]
# Pages that a newcomer pastes, which run on the newest JAX, too; and two short ones of the default suite.
FIRST = ("README.md", "docs/tour.md")
SHORT = ("README.md", "docs/byte_llama.md")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef)


def examples() -> list:
    """Every docstring that has an example. Read from the sources: decorators hide functions from doctest's finder."""
    parser = doctest.DocTestParser()
    found = []
    for path in [path for room in ROOMS for path in sources(ROOT, room)]:
        module = module_name(ROOT, path).removesuffix(".__init__")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            doc = ast.get_docstring(node) if isinstance(node, DOCUMENTED) else None
            if doc and ">>> " in doc:
                name = f"{module}.{getattr(node, 'name', '')}".rstrip(".")
                line = node.body[0].lineno - 1
                test = parser.get_doctest(doc, {}, name, str(path), line)
                found.append(pytest.param(test, id=name))
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
    newest = [pytest.mark.readme] if name in FIRST else []
    return pytest.param(
        page, id=name, marks=newest if name in SHORT else [pytest.mark.full, *newest]
    )


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
    assert pages.with_includes(text) == text, "python tools/pages.py --includes"
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


@pytest.fixture
def written(tmp_path, monkeypatch):
    """A page in a folder of its own, whose outputs have been written, and what its blocks gave."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(pages, "DOCS", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    results = pages.run(page)
    pages.write(page, results)
    assert pages.differences(page, results) == []
    return page, results


def test_what_the_tool_writes(written):
    """Outputs in other places, a page that a second run changes, or a figure with a date or without our colours."""
    page, results = written
    text = page.read_text()
    assert "```\n\n<!-- output -->\n\n```text\nx is 3.14159\nin 12.3 ms\n```\n\nProse." in text
    assert text.endswith(f"-->\n\n<!-- output -->\n\n| a |\n\n<!-- end -->\n\n![]({SVG})\n")
    pages.write(page, results)
    assert page.read_text() == text
    svg = (page.parent / SVG).read_text()
    assert pages.INK in svg and pages.COLOURS[0] in svg and "<dc:date>" not in svg


OUTPUT, VARIES = "<!-- output -->", "<!-- output, varies: ms$ -->"


@pytest.mark.parametrize(
    ("file", "changes", "count"),
    [
        ("page.md", {"\nx is 3.14159": "\nx is 3.14152"}, 1),
        ("page.md", {"\nx is 3.14159": "\nx is 3.14158"}, 0),  # the last digit may differ
        ("page.md", {"\nx is 3": "\nx was 3"}, 1),
        ("page.md", {"\nin 12.3 ms": "\nin 99.9 ms"}, 1),
        ("page.md", {"\n| a |": "\n| b |"}, 1),
        ("page.md", {f"![]({SVG})\n": ""}, 1),
        ("page.md", {OUTPUT: VARIES, "\nin 12.3 ms": "\nin 99.9 ms"}, 0),
        ("page.md", {OUTPUT: VARIES, "\nx is 3.14159": "\nx is 3"}, 1),
        (SVG, {r"L (\d)": r"L 9\1"}, 1),  # drawn elsewhere
        (SVG, {"<!-- 0.0 -->": "<!-- 0.5 -->"}, 1),  # another word on an axis
    ],
)
def test_what_a_page_shows_is_compared(written, file, changes, count):
    """Outputs, tables and figures that the blocks do not give; a time of another machine that is compared."""
    page, results = written
    text = (page.parent / file).read_text()
    for old, new in changes.items():
        pattern = old if file == SVG else re.escape(old)
        assert re.search(pattern, text)
        text = re.sub(pattern, new, text, count=0 if file == SVG else 1)
    (page.parent / file).write_text(text)
    assert len(pages.differences(page, results)) == count


def test_a_block_that_raises(written):
    """A page whose blocks do not run."""
    page, _ = written
    page.write_text(page.read_text().replace("x: float", "y: float"))
    with pytest.raises(RuntimeError, match="page.md: a block failed(.|\n)*has no attribute 'x'"):
        pages.run(page)
