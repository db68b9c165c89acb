"""What the documentation shows runs, and says what it says: examples in docstrings, README and pages.

They run as a reader would run them, with JAX's own settings (float32, NumPy's promotion), on the eight CPU devices of
this suite.
"""

import ast
import doctest
import re
from pathlib import Path

import pytest
from check_structure import ROOMS, module_name, sources

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
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


@pytest.mark.parametrize("example", examples())
def test_docstring(example, user_settings):
    """An example imports what it uses: nothing else is in sight of it."""
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert runner.run(example, out=report.append).failed == 0, "".join(report)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_page(page, user_settings, unchecked):
    """The blocks marked `python` of a page are one program, run from top to bottom."""
    text = page.read_text(encoding="utf-8")
    blocks = list(re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    assert len(blocks) == text.count("```python"), "a block is indented or left open"
    program = ""
    for block in blocks:
        # Blank lines instead of prose, so that an error names the line of the page.
        line = text[: block.start(1)].count("\n")
        program += "\n" * (line - program.count("\n")) + block[1]
    exec(compile(program, page, "exec"), {"__name__": "page"})
