"""MkDocs hook: the built site can be read and searched from a folder, without a server and without the network.

Otherwise the build stops: where a page fetches something from another place, where the search index is not a script,
and where it lacks a word that readers look for.
"""

import json
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.plugins import event_priority

# A sample of what people ask a library of attention for.
WORDS = ("FAQ", "Flax", "FSDP", "GQA", "induction", "mask", "NaN", "Qwen", "serving", "sharding")
FETCHED = re.compile(
    r"<(?:script|img|iframe)\b[^>]*\bsrc=[\"']?https?:|<link\b[^>]*\brel=[\"']?stylesheet[^>]*https?:"
)


@event_priority(-200)  # after the theme's plugin, which makes a script of the index
def on_post_build(*, config: Any, **_: Any) -> None:
    """Called by MkDocs when all files are written."""
    site = Path(config.site_dir)
    for page in site.rglob("*.html"):
        if found := FETCHED.search(page.read_text(encoding="utf-8")):
            raise PluginError(
                f"{page.relative_to(site)} is not complete without a network: {found[0]}"
            )
    index = site / "search" / "search_index.js"
    if not index.exists():
        raise PluginError(
            "there is no search/search_index.js, so that pages of a folder have no search"
        )
    found = json.loads(index.read_text(encoding="utf-8").partition("=")[2])
    text = " ".join(f"{x['title']} {x['text']}" for x in found["docs"])
    # As the theme's search does it: "(FAQ)" begins with a bracket, and is not found.
    tokens = re.split(found["config"]["separator"], re.sub("<[^>]*>", " ", text).lower())
    missing = [word for word in WORDS if not any(x.startswith(word.lower()) for x in tokens)]
    if missing:
        raise PluginError(f"no page has what readers search for: {', '.join(missing)}")
