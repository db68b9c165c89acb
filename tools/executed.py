"""MkDocs hook: runs the blocks of pages that are marked ```python exec="1", and keeps what they print.

They run on eight simulated CPU devices, as the tests do, and may import the modules in this folder. A page is run again
when its code, a JSON file of docs/ that it names, a file of the repository that it may use, Python or an installed
package has changed; `EXECUTE=1` in the environment runs every page again. With `EXECUTE=0` none is run: `make check`
builds the pages so, to check links, anchors and signatures.
"""

import hashlib
import json
import linecache
import logging
import os
import re
import sys
import time
import traceback
from collections.abc import Iterator
from functools import partial
from importlib import metadata
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any

import markdown_exec

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / ".docs_cache"
BLOCK = re.compile(r"^```python exec=[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"\bdocs/[\w/.-]+\.json\b")
OPENING = re.compile(r"^```python exec=.*$", re.MULTILINE)
# Files, and folders of files, that the code of a page may use; and this one.
USED = (
    *("energy_attn", "kernels", "distributed", "examples", "papers"),
    *("tools/executed.py", "tools/figures.py"),
)
_log = logging.getLogger("mkdocs.hooks.executed")


class Page:
    """The blocks of a page, which are one program, and what each of them prints."""

    def __init__(self, name: str, blocks: list[str], surroundings: str):
        """`surroundings` stand for everything but the blocks that the output depends on."""
        self.name = name
        self.key = hashlib.sha256(json.dumps([blocks, surroundings]).encode()).hexdigest()
        self.file = (KEPT / name).with_suffix(".json")
        self.module = ModuleType(re.sub(r"\W", "_", name))
        self.printed: list[str] = []
        self.failed = False
        self.start = time.monotonic()
        self.kept = self._read()

    def _read(self) -> Iterator[str] | None:
        """Recorded outputs of the blocks, if they are still current."""
        if os.environ.get("EXECUTE") == "1" or not self.file.exists():
            return None
        kept = json.loads(self.file.read_text(encoding="utf-8"))
        return iter(kept["printed"]) if kept["key"] == self.key else None

    def run(self, code: str) -> str:
        """Output of the next block."""
        if self.kept is not None:
            return next(self.kept)
        block = f"<{self.name}, block {len(self.printed) + 1}>"
        linecache.cache[block] = (len(code), None, code.splitlines(keepends=True), block)
        sys.modules[self.module.__name__] = self.module  # where dataclasses look
        output = StringIO()
        self.module.__dict__["print"] = partial(print, file=output)
        try:
            exec(compile(code, block, "exec"), self.module.__dict__)
        except Exception as error:
            self.failed = True
            shown = markdown_exec.code_block("python", traceback.format_exc())
            raise markdown_exec.ExecutionError(shown) from error
        self.printed.append(output.getvalue())
        return self.printed[-1]

    def finish(self) -> None:
        """Say how long the page took, and keep what it printed unless a block failed."""
        if self.kept is not None:
            _log.info("%-24s as it was", self.name)
            return
        _log.info("%-24s %5.1f s", self.name, time.monotonic() - self.start)
        if not self.failed:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps({"key": self.key, "printed": self.printed})
            self.file.write_text(text, encoding="utf-8")


def surroundings() -> str:
    """Hash of the files that pages may use, Python's version and the installed packages."""
    found = hashlib.sha256(sys.version.encode())
    found.update(repr(sorted((x.name, x.version) for x in metadata.distributions())).encode())
    for path in _used():
        found.update(f"{path.relative_to(ROOT)} ".encode() + path.read_bytes())
    return found.hexdigest()


def _used() -> Iterator[Path]:
    for name in USED:
        if (ROOT / name).is_file():
            yield ROOT / name
        for directory, inside, names in os.walk(ROOT / name):
            inside[:] = sorted(set(inside) - {"__pycache__"})
            yield from (Path(directory, name) for name in sorted(names))


def _read_by(blocks: list[str]) -> str:
    """The JSON files that blocks name."""
    names = sorted({name for block in blocks for name in NAMED.findall(block)})
    return "".join((ROOT / name).read_text(encoding="utf-8") for name in names)


_surroundings: str
_page: Page | None = None


def on_startup(**_: Any) -> None:
    """Called by MkDocs once, before JAX is imported."""
    sys.path.insert(0, str(Path(__file__).parent))
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    flags = "--xla_force_host_platform_device_count=8"
    os.environ["XLA_FLAGS"] = f"{flags} {os.environ.get('XLA_FLAGS', '')}".strip()
    markdown_exec.formatters["python"] = partial(
        markdown_exec.base_format, language="python", run=lambda code, **_: _page.run(code)
    )


def on_pre_build(**_: Any) -> None:
    """Called before each build."""
    global _surroundings
    _surroundings = surroundings()


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Called for each page, before its blocks are run."""
    global _page
    _page = None
    if os.environ.get("EXECUTE") == "0":
        return OPENING.sub("```python", markdown)
    if blocks := BLOCK.findall(markdown):
        _page = Page(page.file.src_uri, blocks, _surroundings + _read_by(blocks))
    return markdown


def on_page_content(content: str, **_: Any) -> str:
    """Called with the HTML of each page."""
    if _page:
        _page.finish()
    return content
