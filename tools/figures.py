"""Figures of the documentation, drawn while it is built: matplotlib's, as SVG inside the page.

Import this module before drawing: lines, ticks and words then have the colour of the page's text, on a transparent
background.
"""

import html
import io
import re

import matplotlib

matplotlib.use("svg")
from cycler import cycler
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

# The colour-blind safe palette of Okabe and Ito, with a lighter blue for dark backgrounds.
COLOURS = ("#1f86cc", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")
# A placeholder that is replaced by the colour of the text.
INK = "#7f7e7d"

plt.rcParams.update(
    {
        "axes.edgecolor": INK,
        "axes.facecolor": "none",
        "axes.labelcolor": INK,
        "axes.prop_cycle": cycler(color=COLOURS),
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.titlecolor": INK,
        "figure.facecolor": "none",
        "figure.figsize": (7.2, 3.2),
        "figure.constrained_layout.use": True,
        "font.size": 9,
        "grid.alpha": 0.25,
        "grid.color": INK,
        "legend.frameon": False,
        "savefig.facecolor": "none",
        "svg.fonttype": "path",
        "text.color": INK,
        "xtick.color": INK,
        "ytick.color": INK,
    }
)

_drawn = 0


def svg(figure: Figure, label: str = "") -> str:
    """The figure as an `<svg>` element, as wide as the page at most; it is closed.

    `label` says what it shows, to those who do not see it. Identifiers are unique within a page.
    """
    global _drawn
    _drawn += 1
    prefix = f"figure{_drawn}-"
    text = io.StringIO()
    with plt.rc_context({"svg.hashsalt": "energy_attn"}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    plt.close(figure)
    _, element = text.getvalue().split("<svg ", 1)
    element = re.sub(r"<metadata>.*?</metadata>\s*", "", element, flags=re.DOTALL)
    element = re.sub(r'\bid="', f'id="{prefix}', element)
    element = re.sub(r'\bhref="#', f'href="#{prefix}', element)
    element = element.replace("url(#", f"url(#{prefix}").replace(INK, "currentColor")
    # viewBox has the size, too; the width shrinks on a narrow page
    element = re.sub(r'\bheight="[\d.]+pt"', "", element, count=1)
    element = re.sub(
        r'\bwidth="([\d.]+)pt"', r'style="width: \1pt; max-width: 100%"', element, count=1
    )
    label = html.escape(label, quote=True)
    return f'<svg role="img" aria-label="{label}" class="figure" {element}'
