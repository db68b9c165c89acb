"""Pages whose code runs when the site is built: run when they have to, and only then."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.structure

SETTINGS = """
site_name: site
theme: {name: null, custom_dir: theme}
hooks: [tools/executed.py]
markdown_extensions: [pymdownx.superfences]
plugins: [markdown-exec: {languages: [python]}]
"""
# Each run leaves a letter in a file.
PAGE = """# A page

```python exec="1" session="page"
from pathlib import Path
x = open("runs", "a").write("x") + 20
seen = Path("docs/seen.json").read_text()
```

```python exec="1" source="above" result="text" session="page"
print("it says", 2 * x)
```
"""


@pytest.fixture
def tree(tmp_path):
    """A repository of a library and a page, whose site has been built once."""
    for name, text in {
        "mkdocs.yml": SETTINGS,
        "theme/main.html": "{{ page.content }}",
        "docs/index.md": PAGE,
        "docs/seen.json": "1",
        "energy_attn/__init__.py": "",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools/executed.py", tmp_path / "tools")
    build(tmp_path)
    assert runs(tmp_path) == 1
    return tmp_path


def build(tree, fails=False, **environment):
    """Build the site; what was said, and the page."""
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict"],
        cwd=tree,
        env=os.environ | {"EXECUTE": ""} | environment,
        capture_output=True,
        text=True,
    )
    assert (done.returncode != 0) == fails, done.stderr
    return done.stderr, (tree / "site/index.html").read_text()


def runs(tree):
    """How often the page's code has run."""
    return len((tree / "runs").read_text())


def change(path, old, new):
    """Replace a piece of a file."""
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_an_unchanged_page_is_not_run_again(tree):
    """Minutes for every page when the prose of one has changed; or a page without what its code printed."""
    change(tree / "docs/index.md", "# A page", "# A better page")
    said, page = build(tree)
    assert runs(tree) == 1
    assert "index.md" in said and "A better page" in page and "it says 42" in page


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("docs/index.md", "2 * x", "2 * x + 0"),
        ("docs/seen.json", "1", "2"),
        ("energy_attn/__init__.py", "", "x = 1"),
        ("tools/executed.py", "\n\nimport", "\n\n\nimport"),
    ],
)
def test_a_change_runs_the_page_again(tree, name, old, new):
    """A page that shows what its code, or the library, said before the change."""
    change(tree / name, old, new)
    build(tree)
    assert runs(tree) == 2


def test_a_page_can_be_forced_to_run(tree):
    """A page that cannot be run again without a change to it; or one that runs when only links are checked."""
    build(tree, EXECUTE="1")
    assert runs(tree) == 2
    build(tree, EXECUTE="0")
    assert runs(tree) == 2


def test_a_failure_is_not_kept(tree):
    """An error that the next build does not see, as the page has not changed since."""
    change(tree / "docs/index.md", "2 * x", "2 * y")
    for n in (2, 3):
        said, _ = build(tree, fails=True)
        assert runs(tree) == n
        assert 'print("it says", 2 * y)' in said and "NameError" in said


def test_what_pages_import_is_noticed():
    """A page that shows the work of a module in tools/ as it was before the module changed."""
    from executed import BLOCK, USED

    pages = (ROOT / "docs").glob("*.md")
    code = "\n".join(x for page in pages for x in BLOCK.findall(page.read_text(encoding="utf-8")))
    imported = set(re.findall(r"^(?:from|import) (\w+)", code, re.MULTILINE))
    tools = {
        f"tools/{path.name}" for path in (ROOT / "tools").glob("*.py") if path.stem in imported
    }
    assert tools and tools <= set(USED)
