"""MkDocs hook: sets up the blocks of pages that are executed when the documentation is built.

They run on eight simulated CPU devices, as the tests do, and may import the modules in this folder. With `EXECUTE=0` in
the environment they are not run: `make check` builds the pages so, to check links, anchors and signatures.
"""

import os
import re
import sys
from pathlib import Path
from typing import Any

EXECUTED = re.compile(r"^```python exec=.*$", re.MULTILINE)


def on_startup(**_: Any) -> None:
    """Called by MkDocs once, before JAX is imported."""
    sys.path.insert(0, str(Path(__file__).parent))
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    flags = "--xla_force_host_platform_device_count=8"
    os.environ["XLA_FLAGS"] = f"{flags} {os.environ.get('XLA_FLAGS', '')}".strip()


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called for each page, before its blocks are run."""
    return EXECUTED.sub("```python", markdown) if os.environ.get("EXECUTE") == "0" else markdown
