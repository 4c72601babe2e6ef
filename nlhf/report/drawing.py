"""Drawings for pages: inline SVG that takes its colours from the page, so that one serves dark and light.

Station of the path: metrics -> **report**. What is drawn is up to `nlhf.report` and `nlhf.report.curves`.
"""

import io
import re
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# matplotlib gets a colour of its own for each role, which the SVG then trades for the page's: so one drawing serves
# dark and light. The palette is Okabe and Ito's, told apart also by the colour-blind.
INK = "#010203"
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")


def new_figure(height: float) -> tuple["Figure", Any]:
    """A figure of a report, as wide as a column, with empty axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.4, height), layout="constrained", facecolor="none")
    axes = figure.add_subplot(facecolor="none")
    axes.set_axisbelow(True)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(length=0, colors=INK)
    return figure, axes


def svg(figure: "Figure", axes: Any, n_series: int) -> Markup:
    """The figure as inline SVG in the page's own colours and fonts.

    Args:
        figure: The figure.
        axes: Its axes.
        n_series: How many series there are; several have a legend.
    """
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    if n_series > 1:
        figure.legend(frameon=False, loc="outside lower left", ncols=3, labelcolor=INK)
    axes.xaxis.label.set_color(INK)
    buffer = io.StringIO()
    # Text stays text: the reader's font, selectable, and escaped by the back end (names of runs are user input).
    options = {"svg.fonttype": "none", "svg.hashsalt": "nlhf", "font.family": ["sans-serif"], "text.parse_math": False}
    with matplotlib.rc_context(options):
        FigureCanvasSVG(figure).print_svg(buffer, metadata={"Date": None})
    drawing = buffer.getvalue()
    drawing = drawing[drawing.index("<svg") :]
    drawing = re.sub(r"<metadata>.*?</metadata>", "", drawing, flags=re.DOTALL)
    drawing = re.sub(r'<g id="[^"]*"', "<g", drawing)  # ids of groups would repeat from plot to plot
    drawing = drawing.replace(INK, "currentColor")
    for k, color in enumerate(SERIES):
        drawing = drawing.replace(color, f"var(--series-{k})")
    return Markup(drawing)


def standing_alone(drawing: str) -> str:
    """An inline SVG as a file of its own, in colours that can be read on light and dark."""
    drawing = drawing.replace("currentColor", "#7a8490")
    for k, color in enumerate(SERIES):
        drawing = drawing.replace(f"var(--series-{k})", color)
    return drawing
