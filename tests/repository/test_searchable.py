"""The check of a built site that is read from a folder."""

import json
import types

import pytest

pytestmark = pytest.mark.structure


@pytest.fixture
def site(tmp_path):
    """A site that is complete."""
    from site_hooks import WORDS

    (tmp_path / "search").mkdir()
    docs = [{"title": "Words", "text": f"<p>{' '.join(WORDS)}</p>"}]
    index = {"config": {"separator": r"[\s\-]+"}, "docs": docs}
    (tmp_path / "search/search_index.js").write_text(f"var __index = {json.dumps(index)}")
    (tmp_path / "a").mkdir()
    (tmp_path / "a/page.html").write_text(
        '<script src="../x.js"></script><a href="https://example.org">elsewhere</a>'
    )
    return tmp_path


def check(site):
    """Run the hook as MkDocs does."""
    from site_hooks import on_post_build

    on_post_build(config=types.SimpleNamespace(site_dir=str(site)))


def test_a_complete_site(site):
    """A check that stops every build."""
    check(site)


@pytest.mark.parametrize(
    "element",
    [
        '<script src="https://example.org/shim.js"></script>',
        '<link rel="stylesheet" href="https://example.org/a.css">',
        '<img alt="" src="http://example.org/a.png">',
    ],
)
def test_a_page_that_needs_the_network(site, element):
    """A search that works only where a script can be fetched, as the theme's own does."""
    from mkdocs.exceptions import PluginError

    (site / "a/page.html").write_text(f"<p>text</p>{element}")
    with pytest.raises(PluginError, match="a/page.html is not complete without a network"):
        check(site)


def test_no_index_for_a_folder(site):
    """A site in which the search box finds nothing when it is opened from a folder."""
    from mkdocs.exceptions import PluginError

    (site / "search/search_index.js").unlink()
    with pytest.raises(PluginError, match="no search/search_index.js"):
        check(site)


@pytest.mark.parametrize("instead", ["server", "(serving)"])
def test_a_word_that_is_not_found(site, instead):
    """A reader's first word, of which the search says that there is nothing: as of FAQ, where it stood in brackets."""
    from mkdocs.exceptions import PluginError

    path = site / "search/search_index.js"
    path.write_text(path.read_text().replace("serving", instead))
    with pytest.raises(PluginError, match="search for: serving"):
        check(site)
