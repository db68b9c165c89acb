"""Runs the Python blocks of documentation pages, and writes or compares the outputs below them.

    python tools/pages.py           rewrite the included lines of all pages, in seconds
    python tools/pages.py PAGES     run these pages and rewrite their outputs and figures, too

The blocks of a page are one program, which runs on eight simulated CPU devices.

| in a page | what it means |
|---|---|
| `<!-- output -->` below a block | then its output, in a fence `text`, and its figures, files of `docs/figures/` |
| `<!-- output, varies -->` | as above, but the output is not compared |
| `<!-- output, varies: PATTERN -->` | lines that match PATTERN are not compared, for example timings |
| `<!-- python` to `-->` | a block that readers do not see; it prints Markdown, up to `<!-- end -->` |
| `<!-- include FILE:SECTION -->` to `<!-- end -->` | lines of FILE from `--8<-- [start:SECTION]` to `[end:SECTION]` |

A block draws a figure by `plt.show()` or `figure.savefig(name)`.
"""

import contextlib
import io
import itertools
import json
import linecache
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
DEVICES = "--xla_force_host_platform_device_count=8"
# A block, and what the tool wrote below it.
BLOCK = re.compile(
    r"^(?:```python\n(?P<shown>.*?)^```\n|<!-- python\n(?P<hidden>.*?)^-->\n)"
    r"(?P<summary>\n</details>\n)?(?P<below>\n<!-- output(?P<varies>, varies(?:: (?P<pattern>.*?))?)? -->\n\n"
    r"(?:```text\n(?P<text>.*?)^```\n|(?P<markdown>(?!!\[).*?)\n<!-- end -->\n)?"
    r"(?P<figures>(?:\n?!\[[^\]\n]*\]\(figures/[^\n]*\n)*))?",
    re.MULTILINE | re.DOTALL,
)
IMAGE = re.compile(r"!\[(?P<label>[^\]\n]*)\]\(figures/[\w-]+\.svg\)(?P<attributes>.*)")
INCLUDE = re.compile(
    r"^(<!-- include (?P<path>\S+):(?P<section>\w+) -->\n).*?^(?=<!-- end -->$)",
    re.MULTILINE | re.DOTALL,
)
NUMBER = re.compile(r"(?<![\w.])[-−]?\d+(?:\.\d+)?(?:e[-+]\d+)?")
# The colour-blind safe palette of Okabe and Ito, with a lighter blue. Words and axes are of a grey for light and dark.
COLOURS = ("#1f86cc", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")
INK = "#7a7a7a"
STYLE: dict[Any, Any] = {
    **dict.fromkeys(
        ("axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "grid.color", "text.color"), INK
    ),
    **dict.fromkeys(("xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("axes.facecolor", "figure.facecolor", "savefig.facecolor"), "none"),
    **dict.fromkeys(("axes.spines.right", "axes.spines.top", "legend.frameon"), False),
    "figure.constrained_layout.use": True,
    "figure.figsize": (7.2, 3.2),
    "font.size": 9,
    "grid.alpha": 0.25,
    "path.simplify": False,
    "svg.fonttype": "path",
    "svg.hashsalt": "energy_attn",
}


@dataclass(frozen=True)
class Result:
    """The output of one block, and its figures as SVG."""

    text: str
    figures: list[str]


def code_of(block: re.Match[str]) -> str:
    """The program of a block."""
    return block["hidden"] if block["shown"] is None else block["shown"]


def pages() -> list[Path]:
    """All pages that have blocks."""
    files = [*ROOT.glob("*.md"), *sorted(DOCS.rglob("*.md")), *sorted(ROOT.glob("papers/*/*.md"))]
    return [path for path in files if BLOCK.search(path.read_text(encoding="utf-8"))]


def with_includes(text: str) -> str:
    """The text of a page with the present lines of the files that it includes."""

    def lines_of(include: re.Match[str]) -> str:
        source = (ROOT / include["path"]).read_text(encoding="utf-8").splitlines()
        start, end = (
            next(i for i, line in enumerate(source) if f"--8<-- [{x}:{include['section']}]" in line)
            for x in ("start", "end")
        )
        lines = textwrap.dedent("\n".join(source[start + 1 : end])).strip("\n")
        # `{.py}`: code that is neither run nor formatted here, but where it is from
        if include["path"].endswith(".py"):
            return f"{include[1]}\n``` {{.py}}\n{lines}\n```\n\n"
        return f"{include[1]}\n{lines.replace('```python', '``` {.py}')}\n\n"

    return INCLUDE.sub(lines_of, text)


def as_svg(figure) -> str:
    """The figure as deterministic text: without dates and random names."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", text.getvalue(), flags=re.DOTALL)
    return re.sub(r"[ \t]+$", "", svg, flags=re.MULTILINE)


def captured_figures() -> list[str]:
    """The list of the figures that blocks show or save from now on, in the documentation's style."""
    import matplotlib

    matplotlib.use("svg")
    from cycler import cycler
    from matplotlib import pyplot as plt
    from matplotlib.figure import Figure

    figures: list[str] = []
    style: Any = STYLE | {"axes.prop_cycle": cycler(color=COLOURS)}
    plt.rcParams.update(style)
    save = Figure.savefig

    def savefig(figure, file, **options):
        if isinstance(file, str):
            figures.append(as_svg(figure))
        else:
            save(figure, file, **options)

    def show(**_):
        figures.extend(as_svg(plt.figure(number)) for number in plt.get_fignums())
        plt.close("all")

    setattr(Figure, "savefig", savefig)  # noqa: B010 (its parameters have other names)
    plt.show = show
    return figures


def execute(page: Path) -> list[Result]:
    """Runs the blocks of a page in this process, whose figures are captured from then on."""
    module = ModuleType("page")
    sys.modules[module.__name__] = module  # where dataclasses look
    results, figures = [], captured_figures()
    for block in BLOCK.finditer(page.read_text(encoding="utf-8")):
        line = block.string[: block.start()].count("\n") + 1
        code = "\n" * line + code_of(block)
        lines = code.splitlines(keepends=True)
        linecache.cache[str(page)] = (len(code), None, lines, str(page))
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(code, str(page), "exec"), module.__dict__)
        results.append(Result(printed.getvalue(), figures.copy()))
        figures.clear()
    return results


def run(page: Path) -> list[Result]:
    """Runs the blocks of a page in a process of its own, from the root of the repository."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "XLA_FLAGS": DEVICES,
    }
    command = [sys.executable, __file__, "--run", str(page)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{page.name}: a block failed\n{done.stderr[-3000:]}")
    return [Result(**result) for result in json.loads(done.stdout.splitlines()[-1])]


def number_close(old: str, new: str) -> bool:
    """Whether a new number agrees to one unit of the last digit printed; an error, such as `3e-07`, may be smaller."""
    old, new = (x.replace("−", "-") for x in (old, new))
    x, y = float(old), float(new)
    if "e-" in old + new and max(abs(x), abs(y)) < 1e-3:
        return abs(y) <= 20 * max(abs(x), 1e-7)
    mantissa, _, exponent = old.partition("e")
    decimals = len(mantissa.partition(".")[2])
    return abs(x - y) <= 1.01 * 10.0 ** (int(exponent or 0) - decimals) * bool(decimals)


def text_close(old: str, new: str) -> bool:
    """Whether two outputs have the same words, and numbers that agree to their printed digits."""
    if NUMBER.sub("#", " ".join(old.split())) != NUMBER.sub("#", " ".join(new.split())):
        return False
    pairs = zip(NUMBER.findall(old), NUMBER.findall(new), strict=True)
    return all(number_close(*pair) for pair in pairs)


def figure_close(old: str, new: str, tolerance: float = 4.0) -> bool:
    """Whether two figures have the same words, and their shapes the same extents up to some points."""

    def drawn(svg: str) -> tuple[list[str], list[float]]:
        paths = re.findall(r'<path d="([^"]+)" clip-path', svg)
        shapes = [[float(x) for x in re.findall(r"-?\d+\.?\d*", path)] for path in paths]
        extents = [f(x[i::2]) for x in shapes if len(x) > 3 for i in (0, 1) for f in (min, max)]
        return re.findall(r"<!-- (.*?) -->", svg), extents

    (words, extents), (new_words, new_extents) = drawn(old), drawn(new)
    if words != new_words or len(extents) != len(new_extents):
        return False
    return all(abs(x - y) <= tolerance for x, y in zip(extents, new_extents, strict=True))


def below(page: Path, block: re.Match[str], result: Result, count: Iterator[int]) -> str:
    """The output and figures of a block as Markdown, with the labels that the page has."""
    if not result.text.strip() and not result.figures:
        return ""
    lines = [f"\n<!-- output{block['varies'] or ''} -->\n"]
    if result.text.strip():
        text = result.text.strip("\n")
        hidden = block["hidden"] is not None
        lines.append(f"\n{text}\n\n<!-- end -->\n" if hidden else f"\n```text\n{text}\n```\n")
    old = [IMAGE.search(line) for line in (block["figures"] or "").split("\n") if line]
    for image, _ in itertools.zip_longest(old[: len(result.figures)], result.figures):
        label, attributes = (image["label"], image["attributes"]) if image else ("", "")
        lines.append(f"\n![{label}](figures/{page.stem}-{next(count)}.svg){attributes}\n")
    return "".join(lines)


def write(page: Path, results: list[Result]) -> None:
    """Rewrites the outputs of a page and the files of its figures; those that are close to a new run stay."""
    text, new, end = page.read_text(encoding="utf-8"), "", 0
    numbers = itertools.count(1)
    for block, result in zip(BLOCK.finditer(text), results, strict=True):
        shown = block["below"] or ""
        new += text[end : block.end() - len(shown)]
        kept = block["markdown"] if block["text"] is None else block["text"]
        if kept is not None and result.text.strip() and text_close(kept, result.text):
            result = Result(kept, result.figures)
        new += below(page, block, result, numbers)
        end = block.end()
    page.write_text(new + text[end:], encoding="utf-8")
    figures = [svg for result in results for svg in result.figures]
    for number, svg in enumerate(figures, 1):
        file = DOCS / "figures" / f"{page.stem}-{number}.svg"
        if not (file.exists() and figure_close(file.read_text(encoding="utf-8"), svg)):
            file.parent.mkdir(exist_ok=True)
            file.write_text(svg, encoding="utf-8")
    for file in (DOCS / "figures").glob(f"{page.stem}-*.svg"):
        if int(file.stem.rpartition("-")[2]) > len(figures):
            file.unlink()


def differences(page: Path, results: list[Result]) -> list[str]:
    """The places at which a page differs from a run."""
    text, wrong = page.read_text(encoding="utf-8"), []
    numbers = itertools.count(1)
    for block, result in zip(BLOCK.finditer(text), results, strict=True):
        place = f"{page.name}, line {text[: block.start()].count(chr(10)) + 1}"
        shown = (block["markdown"] if block["text"] is None else block["text"]) or ""
        printed = result.text
        names = re.findall(r"\((figures/[^)]*)\)", block["figures"] or "")
        if [f"figures/{page.stem}-{next(numbers)}.svg" for _ in result.figures] != names:
            wrong.append(f"{place}: drew {len(result.figures)} figures, the page shows {names}")
        if block["varies"] and not block["pattern"]:
            continue
        if block["pattern"]:
            skip = re.compile(block["pattern"])
            shown, printed = (
                "\n".join(line for line in x.splitlines() if not skip.search(line))
                for x in (shown, printed)
            )
        if not text_close(shown, printed):
            wrong.append(f"{place}: the page shows\n{shown}\nthe block printed\n{printed}")
        for name, svg in zip(names, result.figures, strict=False):
            if not figure_close((DOCS / name).read_text(encoding="utf-8"), svg):
                wrong.append(f"{place}: {name} shows something else than the block drew")
    return wrong


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        print(json.dumps([vars(result) for result in execute(Path(sys.argv[2]))]))
        sys.exit()
    for page in map(Path.resolve, map(Path, sys.argv[1:])):
        write(page, run(page))
        print(f"{page.name}: its blocks ran")
    for page in DOCS.glob("*.md"):
        page.write_text(with_includes(page.read_text(encoding="utf-8")), encoding="utf-8")
