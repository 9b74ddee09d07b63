# SPDX-License-Identifier: Apache-2.0
"""The style of the figures: colours, markers, labels and legends.

Colours are Okabe and Ito's, which colour-blind readers can tell apart. In grey print, kinds of
token differ by marker and lightness, and a baseline by dashes and hollow markers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import fill

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from .report import KINDS, Drawing, Report, number


WIDTH, DPI = 7.5, 150
COLORS = dict(zip(KINDS, ("#E69F00", "#0072B2", "#CC79A7", "#009E73", "#D55E00"), strict=True))
MARKERS = dict(zip(KINDS, ("o", "s", "D", "^", "v"), strict=True))
MUTED = "#808080"

Sketch = tuple[Figure, Drawing]  # not yet written, with file name, title and caption


@dataclass(frozen=True)
class Shown:
    """A model in the figures: its report, its label in legends, and whether it is the baseline."""

    report: Report
    label: str
    baseline: bool = False

    def face(self, color: str) -> str:
        """The colour of a marker's face."""
        return "white" if self.baseline else color


def shown(report: Report, against: Report | None) -> list[Shown]:
    """The models, baseline first as in the paper, with names that fit and matplotlib can draw."""
    model = Shown(report, elide(drawable(report.model), 30))
    baseline = against and Shown(against, f"{elide(drawable(against.model), 30)} (baseline)", True)
    return [baseline, model] if baseline else [model]


def drawable(text: str) -> str:
    """`text`, with what matplotlib's font lacks escaped, and dollars, which begin formulas."""
    font = get_font(findfont(FontProperties()))
    drawn = (c if c.isprintable() and font.get_char_index(ord(c)) else ascii(c)[1:-1] for c in text)
    return "".join(drawn).replace("$", r"\$")


def elide(text: str, length: int) -> str:
    """`text` in at most `length` characters, without its middle if it is longer."""
    return text if len(text) <= length else f"{text[: length // 2]}…{text[1 - length // 2 :]}"


def new_figure(height: float, title: str) -> Figure:
    """An empty figure, `height` inches high, under a title that wraps."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    lines = "\n".join(fill(line, 80) for line in title.split("\n"))
    figure.suptitle(lines, x=0.01, ha="left", fontsize=11, fontweight="bold")
    return figure


def tidy(axes: Axes, x: str, y: str, title: str = "") -> None:
    """Labels `axes`, and removes two spines and lightens the grid."""
    if axes.get_xscale() == "linear":  # it counts layers
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(x, fontsize=9.5)
    axes.set_ylabel(y, fontsize=9.5)
    axes.set_title(title, fontsize=9.5, loc="left")
    axes.tick_params(labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)


def ratio_title(values: Sequence[float | None], sentence: str, otherwise: str) -> str:
    """`sentence` with the model's ratio for {}, then the baseline's; without one, `otherwise`."""
    *baseline, ratio = (None if value is None else f"{number(value, 3)} ×" for value in values)
    if ratio is None:
        return otherwise
    return sentence.format(ratio) + "".join(f" (baseline {value})" for value in baseline if value)


def log_scale(axes: Axes, which: str) -> None:
    """Makes axis `which` ("x" or "y") logarithmic, with plain numbers at its ticks."""
    axes.set(**{f"{which}scale": "log"})
    axis = axes.xaxis if which == "x" else axes.yaxis
    narrow = max(axis.get_data_interval()) < 1000 * axis.get_minpos()
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if narrow else (1.0,), numticks=12))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


def legend(figure: Figure, axes: Axes, columns: int) -> None:
    """A legend of what `axes` shows, below the figure."""
    entries = axes.get_legend_handles_labels()
    figure.legend(*entries, ncols=columns, loc="outside lower left", fontsize=9, frameon=False)
