"""What the documentation shows runs, and says what it says: examples in docstrings, READMEs and pages.

They run as a reader would run them, with JAX's own settings (float32, NumPy's promotion), on the eight CPU devices of
this suite.
"""

import ast
import codeop
import doctest
import re
import subprocess
import sys
from pathlib import Path

import pytest
from check_structure import ROOMS, module_name, sources

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("papers/*/*.md")])
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SITE = re.compile(r"^```python exec=[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# What a newcomer pastes.
FIRST = ("README.md", "docs/tour.md")
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


def program(text: str, blocks: list[re.Match[str]]) -> str:
    """Blocks in order, with blank lines in place of the prose, so that an error names the line of the page."""
    code = ""
    for block in blocks:
        line = text[: block.start(1)].count("\n")
        code += "\n" * (line - code.count("\n")) + block[1]
    return code


# A newcomer's first pages run on the newest JAX in every landing, all pages in the rotating part.
@pytest.mark.full
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=name, marks=[pytest.mark.readme] if name in FIRST else [])
        for page in PAGES
        if "```python\n" in page.read_text(encoding="utf-8")
        for name in [page.relative_to(ROOT).as_posix()]
    ],
)
def test_page(page, user_settings, unchecked):
    """The blocks marked `python` of a page are one program, run from top to bottom."""
    text = page.read_text(encoding="utf-8")
    blocks = list(BLOCK.finditer(text))
    assert len(blocks) == len(re.findall(r"```python(?! exec=)", text)), (
        "a block is indented or left open"
    )
    exec(compile(program(text, blocks), page, "exec"), {"__name__": "page"})


@pytest.mark.full
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.name)
        for page in PAGES
        if SITE.search(page.read_text(encoding="utf-8"))
    ],
)
def test_what_the_site_executes(page, user_settings, unchecked):
    """A block that stops the documentation when it is published: `make check` builds the pages without running them."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    text = page.read_text(encoding="utf-8")
    blocks = list(SITE.finditer(text))
    assert len(blocks) == text.count("```python exec="), "a block is indented or left open"
    with pyplot.rc_context():
        exec(compile(program(text, blocks), page, "exec"), {"__name__": "page"})


@pytest.mark.parametrize("page", FIRST)
def test_the_first_pages_can_be_pasted_into_a_prompt(page):
    """Python's prompt until 3.12 takes a line at a time: what is indented wants a blank line behind it, none inside."""
    blocks = BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))
    assert blocks
    for block in blocks:
        pending: list[str] = []
        for line in [*block.splitlines(), ""]:
            pending.append(line)
            if codeop.compile_command("\n".join(pending)) is not None:
                pending = []
        assert not pending, pending


FIGURES = """
import re
from figures import INK, svg
from matplotlib import pyplot as plt
page = ""
for label in ("first", 'a "second" < third'):
    figure, axes = plt.subplots()
    axes.plot([0, 1], [1, 0], marker="o", label="$\\zeta$")
    axes.legend()
    page += svg(figure, label)
    assert not plt.get_fignums()
names = re.findall(r'\\bid="([^"]+)"', page)
assert len(names) == len(set(names)) > 20
used = re.findall(r'href="#([^"]+)"', page) + re.findall(r"url[(]#([^)]+)[)]", page)
assert used and set(used) <= set(names)
assert INK not in page and "currentColor" in page
assert page.count("<svg ") == page.count("</svg>") == page.count('role="img"') == 2
assert "<?xml" not in page and "max-width: 100%" in page and "&quot;second&quot; &lt;" in page
"""


def test_figures_of_a_page():
    """Two figures of a page that share identifiers, and so each other's shapes; or black words on a black page."""
    pytest.importorskip("matplotlib")
    # in a process of its own: how figures look is a setting of the whole process
    done = subprocess.run(
        [sys.executable, "-c", FIGURES], cwd=ROOT / "tools", capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
