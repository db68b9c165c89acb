"""What the documentation refers to is there, and what it quotes is what was measured."""

import pydoc
import re
import tomllib
import types
from pathlib import Path

import check_structure
import kernels_page
import pages
import pytest

from benchmarks import losses

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("papers/*/*.md")])
BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
# What the theme's column of text shows of a line of code, in a window of 1400 pixels.
COLUMNS = 80


def read(name: str) -> str:
    """A file of the repository."""
    return (ROOT / name).read_text(encoding="utf-8")


def anchors(page: Path) -> set[str]:
    """What a link into a page may name: its headings, as Python-Markdown and GitHub write them."""
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall("^#+ (.*)$", text, re.MULTILINE)
    titles = {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", title).lower()) for title in headings}
    return titles | set(re.findall(r"^::: (\S+)$", text, re.MULTILINE))


def documented(page: Path, name: str) -> bool:
    """Whether a page of the API reference has a class or a module with this public member."""
    parts = name.split(".")
    parents = {".".join(parts[:i]) for i in range(2, len(parts))}
    return page.parent.name == "api" and bool(parents & anchors(page)) and bool(pydoc.locate(name))


def dangling(page: Path) -> list[str]:
    """The links of a page to files or to sections that are not there."""
    prose = re.sub(r"`[^`\n]+`", "", BLOCK.sub("", page.read_text(encoding="utf-8")))
    wrong = []
    for link in re.findall(r"\]\((?!https?:|mailto:)([^)\s]+)\)", prose):
        path, _, section = link.partition("#")
        target = page.parent / path if path else page
        known = not section or section in anchors(target) or documented(target, section)
        if not target.exists() or not known:
            wrong.append(link)
    return wrong


def wide(page: Path) -> list[str]:
    """The lines of a page's blocks of code that its column of text cuts off; included files have lines of their own."""
    blocks = BLOCK.findall(pages.INCLUDE.sub("", page.read_text(encoding="utf-8")))
    code = [x for x in blocks if not x.startswith("```text\n")]  # an output is as wide as it is
    return [line for block in code for line in block.splitlines()[1:] if len(line) > COLUMNS]


@pytest.mark.structure
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_pages(page):
    """A link to a file or a section that is gone; code whose right end a reader has to scroll to."""
    assert dangling(page) == []
    if page.relative_to(ROOT).parts[0] in ("README.md", "docs"):
        assert wide(page) == []


def test_what_is_wrong_with_a_page_is_found(tmp_path):
    """A search for links, or for wide lines, that would pass whatever stands there, or that finds them in prose."""
    gibbs = ROOT / "docs/api/energy_attn.md"
    names = ("energy_attn.Gibbs.entropy", "energy_attn.Gibbs.lost", "energy_attn.masks.Causal")
    assert [documented(gibbs, name) for name in names] == [True, False, False]
    page, long = tmp_path / "page.md", "x" * (COLUMNS + 1)
    links = "[a](page.md#two-words-code) [b](#lost) [c](none.md) `[d](none.md)`"
    page.write_text(f"# Two words: `code`\n{links}\n{long}\n```python\n{long[1:]}\n{long}\n```\n")
    assert dangling(page) == ["#lost", "none.md"]
    assert wide(page) == [long]


def test_the_start_page_has_every_page():
    """A page that only the navigation leads to, as those of a GPT, of second derivatives and of QK-clip once."""
    navigation = read("mkdocs.yml").partition("\nnav:\n")[2].partition("\n\n")[0]
    names = re.findall(r"[\w/]+\.md", navigation)
    links = r"\]\(((?:\w+/)?\w+\.md)"
    start, api = read("docs/index.md"), read("docs/api/index.md")
    found = {*re.findall(links, start), *(f"api/{name}" for name in re.findall(links, api))}
    assert len(names) == len(set(names)) > 40
    assert set(names) - found == {"index.md"}
    titles = re.findall(r"^  - (\w.*):$", navigation, re.MULTILINE)
    assert titles == [*re.findall("^## (.*)", start, re.MULTILINE), "API"]


# What people type who look for a library of attention.
SEARCHED = """batch invariance, on-policy, train-inference mismatch, double backward, meta-learning, MLA, `cu_seqlens`,
    MeanFlow, interpretability, GRPO, KV cache, ring attention, sliding window, context parallelism, FlashAttention,
    log2 LSE, `merge_state`, remat, distillation, GQA, FSDP, speculative decoding, attention sinks"""


def test_words_that_people_search_for():
    """A term that the page for searchers lacks, or that the page it sends them to does not begin with."""
    rows = [row for row in read("docs/if_you_came_for.md").splitlines() if row.startswith("| ")]
    for term in re.split(r",\s+", SEARCHED):
        (row,) = [row for row in rows if f"**{term}**" in row.partition(" | ")[0]]
        answer = row.partition(" | ")[2]
        assert len(re.sub(r"\]\([^)]*\)", "", answer)) <= 160, term
        pages_named = re.findall(r"\]\(([\w/]+\.md)", answer)
        beginnings = [(ROOT / "docs" / name).read_text("utf-8")[:800] for name in pages_named]
        assert any(term.lower() in text.lower() for text in beginnings), term


def test_where_others_are_faster():
    """A row of the benchmarks in which another library is faster that the pages leave out, or other figures there."""
    rows = read("docs/compare.md").partition("<!-- python -m benchmarks.losses -->\n")[2]
    assert rows.partition("<!-- end -->")[0].strip() == losses.table()
    loops = [times for times, peer, _ in losses.compared("loops") if peer == "PyTorch"]
    slower = [times for times in loops if times < 1]
    compiled = [x for x, _, row in losses.compared("cpu") if row["name"].startswith("compilation")]
    with_amx = min(times for times, _, _ in losses.compared("cpu-amx"))
    front = " ".join(read("README.md").partition("## Where we lose")[2].split())
    assert f"in {len(slower)} of {len(loops)} [programs" in front
    assert f"{min(slower):.2f} to {max(slower):.2f} of its speed" in front
    assert f"With AMX, prefill in bfloat16 had {with_amx:.2f} of its speed" in front
    assert f"compile at {min(compiled):.2f} to {max(compiled):.2f} of the speed" in front


@pytest.mark.usefixtures("user_settings")
def test_tables_of_kernels():
    """Tables of kernels and machines that the registry or the measurements have left behind."""
    page = read("docs/kernels.md")
    assert kernels_page.page(page, kernels_page.kept()) == page
    # a kernel is not called right on hardware where it was wrong once, nor on other hardware
    right, wrong = ({"kernel": "pallas_gpu", "good": good} for good in (True, False))
    check = {"a": {"kernel": "cudnn", "good": True}, "b": wrong, "c": right}
    steps = {"about": {"versions": {"capability": "9.0"}}, "check": check}
    last = kernels_page.runs(steps).splitlines()[-1]
    assert last == "| right on hardware so far | none | none | `cudnn` | none | none | those |"


# What is said of hardware that nothing was measured on.
UNMEASURED = r"(?i)nothing (?:has been|was) measured on (?:an? )?(GPU|TPU)|no (GPU|TPU)s? (?:of ours )?ha(?:s|ve) run"


@pytest.mark.structure
def test_hardware_that_pages_speak_of():
    """A page without figures that another one has: benchmarks were said to have none of a GPU where an H100 had run."""
    devices = {}  # the accelerator that each committed file of measurements is from; `TPU v5p:2x2x1` only compiled
    for path in sorted((ROOT / "docs/benchmarks").glob("*.json")):
        if device := re.search(r'"device": "NVIDIA (\w+)|"device": "(TPU \w+)"', path.read_text()):
            devices[path.name] = device[1] or device[2]
    assert {"first_light.json", "loops-h200.json"} <= set(devices)
    page = read("docs/benchmarks.md")
    rows = [row.split(" | ") for row in re.findall(r"(?m)^\| (?:NVIDIA|TPU) .*", page)]
    for file, device in devices.items():
        assert any(device in row[0] and f"(benchmarks/{file})" in row[-1] for row in rows), file
    kinds = {device.partition(" ")[0] if "TPU" in device else "GPU" for device in devices.values()}
    for path in PAGES:
        for gpu, tpu in re.findall(UNMEASURED, path.read_text(encoding="utf-8")):
            assert (gpu or tpu) not in kinds, path
    for name in ("README", "docs/compare", "docs/faq", "docs/versions", "docs/install"):
        assert set(devices.values()) <= set(re.findall(r"\b(?:TPU )?\w+", read(f"{name}.md"))), name


def test_what_is_installed():
    """Advice to install a name that no index has, in a page or an error; an extra that Install has not, or one gone."""
    folders = ("benchmarks", "docs", "examples", "papers", *check_structure.ROOMS)
    sources = [path for name in folders for path in check_structure.sources(ROOT, name)]
    for path in [*PAGES, *sources]:
        assert not re.search(r"pip install ['\"]?energy_attn\b", path.read_text("utf-8")), path
    project = tomllib.loads(read("pyproject.toml"))["project"]
    rows = re.findall("(?m)^\\| (`.*?) \\|", read("docs/install.md").split("## Extras")[1])
    named = {name for row in rows for name in re.findall("`([a-z0-9-]+)`", row)}
    assert named == set(project["optional-dependencies"])


def test_entries_of_the_changelog():
    """A release that is too long to read, an entry of several sentences, or a name since the release without one."""
    log = read("CHANGELOG.md")
    for release in re.split("^## ", log, flags=re.MULTILINE)[1:]:
        assert len(release.splitlines()) <= 30
        entries = re.findall(r"^- (.*(?:\n  .*)*)", release, re.MULTILINE)
        assert not any(". " in re.sub("`[^`]*`", "", entry) for entry in entries)
    named = {word for code in re.findall("`([^`]+)`", log) for word in re.findall(r"\w+", code)}
    released = read("tests/repository/released.txt").split()
    assert {name for _, name in check_structure.exports(ROOT)} - named - set(released) == set()


@pytest.mark.structure
def test_a_site_that_is_read_from_a_folder(tmp_path):
    """A check of the built site that stops every build, or passes what a reader without a network does not find."""
    from mkdocs.exceptions import PluginError
    from site_hooks import on_post_build

    page, index = tmp_path / "page.html", tmp_path / "search/search_index.js"
    config = types.SimpleNamespace(site_dir=str(tmp_path))
    page.write_text('<script src="../x.js"></script><a href="https://example.org">elsewhere</a>')
    with pytest.raises(PluginError, match="no search/search_index.js"):
        on_post_build(config=config)
    index.parent.mkdir()
    index.write_text("var __index = {}")
    on_post_build(config=config)
    for tag in ("script src=", "link rel='stylesheet' href=", "img alt='' src="):
        page.write_text(f"<{tag}'https://example.org/x'>")
        with pytest.raises(PluginError, match="page.html is not complete without a network"):
            on_post_build(config=config)
