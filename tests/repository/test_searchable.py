"""The check of a built site that is read from a folder."""

import contextlib
import json
import types

import pytest

pytestmark = pytest.mark.structure
PAGE, INDEX = "a/page.html", "search/search_index.js"
FETCHES = f"{PAGE} is not complete without a network"


@pytest.mark.parametrize(
    ("name", "old", "new", "complaint"),
    [
        (PAGE, "", "", None),
        # a search that works only where a script can be fetched, as the theme's own does
        (PAGE, "../x.js", "https://example.org/shim.js", FETCHES),
        (PAGE, "<a ", "<link rel='stylesheet' ", FETCHES),
        (PAGE, "<a href", '<img alt="" src', FETCHES),
        (INDEX, None, None, "no search/search_index.js"),
        # a reader's first word, of which the search says that there is nothing
        (INDEX, "serving", "server", "search for: serving"),
        (INDEX, "serving", "(serving)", "search for: serving"),  # as of FAQ, in brackets once
    ],
)
def test_a_built_site(tmp_path, name, old, new, complaint):
    """A check that stops every build, or that passes what a reader without a network does not find."""
    from mkdocs.exceptions import PluginError
    from site_hooks import WORDS, on_post_build

    docs = [{"title": "Words", "text": f"<p>{' '.join(WORDS)}</p>"}]
    index = {"config": {"separator": r"[\s\-]+"}, "docs": docs}
    page = '<script src="../x.js"></script><a href="https://example.org">elsewhere</a>'
    for file, text in {PAGE: page, INDEX: f"var __index = {json.dumps(index)}"}.items():
        (tmp_path / file).parent.mkdir()
        if file != name:
            (tmp_path / file).write_text(text)
        elif old is not None:
            assert old in text
            (tmp_path / file).write_text(text.replace(old, new, 1))
    expected = (
        pytest.raises(PluginError, match=complaint) if complaint else contextlib.nullcontext()
    )
    with expected:
        on_post_build(config=types.SimpleNamespace(site_dir=str(tmp_path)))
