"""MkDocs hook: a signature that is not broken into lines stops the build with an error that names the page.

mkdocstrings breaks them with a formatter; without one it only warns.
"""

import html
import re
from typing import Any

from mkdocs.exceptions import PluginError

SIGNATURE = re.compile(r'<div class="doc-signature highlight">.*?<code>(.*?)</code>', re.DOTALL)
# The number of characters that fit on a page; more than `line_length` in mkdocs.yml, as long types cannot be broken.
LONGEST = 80


def on_page_content(content: str, *, page: Any, **_: Any) -> str:
    """Called by MkDocs with the HTML of a page, docstrings included."""
    for signature in SIGNATURE.findall(content):
        lines = html.unescape(re.sub("<[^>]*>", "", signature)).splitlines()
        for line in lines:
            if len(line) > LONGEST:
                raise PluginError(
                    f"{page.file.src_uri}: a line of {len(line)} characters in the signature of {lines[0][:40]!r}; "
                    "is ruff installed, which the extra `docs` names?"
                )
    return content
