# SPDX-License-Identifier: Apache-2.0
"""The style of the figures: colours, markers, labels and legends.

Colours are Okabe and Ito's: colour-blind readers can tell them apart. In grey print, kinds of
token differ by marker and lightness, and a baseline by dashes and hollow markers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import fill

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from .report import Drawing, Report, number


WIDTH = 7.5  # of a figure, in inches
DPI = 150
COLORS = {
    "visual": "#E69F00",
    "text": "#0072B2",
    "special": "#CC79A7",
    "newline": "#009E73",
    "indicator": "#D55E00",
}
MARKERS = {
    "visual": "o",
    "text": "s",
    "special": "D",
    "newline": "^",
    "indicator": "v",
}
MUTED = "#808080"

Sketch = tuple[Figure, Drawing]  # not yet written, with file name, title and caption


@dataclass(frozen=True)
class Shown:
    """A model in the figures: its report, its label in legends, and whether it is the baseline."""

    report: Report
    label: str
    baseline: bool = False

    def face(self, color: str) -> str:
        """Returns the colour of a marker's face."""
        return "white" if self.baseline else color


def shown(report: Report, against: Report | None) -> list[Shown]:
    """Returns the models, the baseline first as in the paper, with names that can be drawn."""
    model = Shown(report, elide(drawable(report.model), 30))
    if against is None:
        return [model]
    name = elide(drawable(against.model), 30)
    return [Shown(against, f"{name} (baseline)", baseline=True), model]


def drawable(text: str) -> str:
    """Escapes what matplotlib's font lacks, and dollar signs, since they begin formulas."""
    font = get_font(findfont(FontProperties()))
    escaped_text = ""
    for character in text:
        if character == "$":
            escaped_text += r"\$"
        elif character.isprintable() and font.get_char_index(ord(character)):
            escaped_text += character
        else:
            escaped_text += ascii(character)[1:-1]
    return escaped_text


def elide(text: str, length: int) -> str:
    """Shortens `text` to `length` characters by leaving out its middle."""
    if len(text) <= length:
        return text
    half = length // 2
    return f"{text[:half]}…{text[1 - half :]}"


def new_figure(height: float, title: str) -> Figure:
    """Returns an empty figure, `height` inches high, under a title that wraps."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    wrapped_lines = [fill(line, 80) for line in title.split("\n")]
    figure.suptitle(
        "\n".join(wrapped_lines),
        x=0.01,
        ha="left",
        fontsize=11,
        fontweight="bold",
    )
    return figure


def tidy(axes: Axes, x: str, y: str, title: str = "") -> None:
    """Labels `axes`, removes two spines and lightens the grid."""
    if axes.get_xscale() == "linear":  # it counts layers
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(x, fontsize=9.5)
    axes.set_ylabel(y, fontsize=9.5)
    axes.set_title(title, fontsize=9.5, loc="left")
    axes.tick_params(labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)


def ratio_title(ratios: Sequence[float | None], sentence: str, otherwise: str) -> str:
    """Returns `sentence` with the model's ratio, the last one, for {}, and the baseline's after it.

    Returns `otherwise` if the model has no ratio.
    """
    *baseline_ratios, ratio = ratios
    if ratio is None:
        return otherwise
    title = sentence.format(f"{number(ratio, 3)} ×")
    for baseline_ratio in baseline_ratios:
        if baseline_ratio is not None:
            title += f" (baseline {number(baseline_ratio, 3)} ×)"
    return title


def log_scale(axes: Axes, which: str) -> None:
    """Makes axis `which` ("x" or "y") logarithmic, with plain numbers at its ticks."""
    axes.set(**{f"{which}scale": "log"})
    axis = getattr(axes, f"{which}axis")
    multiples: tuple[float, ...] = (1.0,)
    if max(axis.get_data_interval()) < 1000 * axis.get_minpos():
        multiples = (1.0, 2.0, 5.0)
    axis.set_major_locator(LogLocator(subs=multiples, numticks=12))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


def legend(figure: Figure, axes: Axes, columns: int) -> None:
    """Adds a legend of what `axes` shows, below the figure."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        ncols=columns,
        loc="outside lower left",
        fontsize=9,
        frameon=False,
    )
