# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What was measured, drawn and in words."""

import io
from typing import Any

import gradio as gr
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from PIL import Image

from .measuring import Measured


# Colours that colour-blind readers can tell apart, and wide under narrow, so that curves can be seen on each other.
STYLES: dict[str, dict[str, Any]] = {
    "visual": {"color": "#E69F00", "marker": "o", "linewidth": 2.6, "markersize": 5.5},
    "text": {"color": "#0072B2", "marker": "s", "linewidth": 1.4, "markersize": 3.5},
}


def show_layer(measured: Measured | None, layer: int) -> Any:
    """The heat map of a layer, or of the mean over layers if `layer` is 0, for the page's image."""
    if measured is None:
        return gr.skip()
    title, shares = attention(measured, layer)
    return gr.Image(draw_map(measured, title, shares), alt_text=f"{title}.")


def attention(measured: Measured, layer: int) -> tuple[str, np.ndarray | None]:
    """A sentence, and each visual token's share of the attention on the image, or None where there is no map.

    With `layer` 0 the shares are averaged over layers, each of which counts the same.
    """
    name = f"Layer {layer}" if layer else "Mean over layers"
    rows = [row for number, row in measured.shares.items() if layer in (0, number)]
    if not rows:
        return f"{name}: no attention map reaches the whole image", None
    falls = np.mean([row.sum() for row in rows])
    shares = np.mean([row / row.sum() for row in rows], axis=0)
    return f"{name}: {falls:.1%} of the text's attention is on the image", shares


def draw_map(measured: Measured, title: str, shares: np.ndarray | None) -> Image.Image:
    """The image as the encoder received it, and in grey under the map; the map is a strip if there is no grid."""
    height, width = measured.image.shape[:2]
    figure = Figure(figsize=(5.2, 2.9), layout="constrained")
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    left, right = figure.subplots(1, 2)
    left.imshow(measured.image, interpolation="bicubic")
    left.set_title(f"as the model gets it, {width} × {height}", fontsize=9)
    left.set_axis_off()
    right.set_axis_off()
    if shares is None:
        return _image(figure)
    if measured.grid is None:
        extent, cells, opacity = (0.0, float(len(shares)), 0.0, 1.0), shares[None], 1.0
        right.set_title("by visual token, in order", fontsize=9)
    else:
        right.imshow(measured.image @ [0.299, 0.587, 0.114], cmap="gray", vmin=0, vmax=1, interpolation="bicubic")
        extent, cells, opacity = (-0.5, width - 0.5, height - 0.5, -0.5), shares.reshape(measured.grid), 0.7
        right.set_title("attention of the text", fontsize=9)
    drawn = right.imshow(100 * cells, cmap="magma", vmin=0, extent=extent, alpha=opacity, interpolation="nearest")
    right.set_aspect("auto" if measured.grid is None else "equal")
    bar = figure.colorbar(drawn, ax=right, shrink=0.85)
    bar.set_label("share of the attention\nto the image (%)", fontsize=9)
    bar.ax.tick_params(labelsize=8)
    return _image(figure)


def draw_norms(measured: Measured) -> Image.Image:
    """The norms of visual and text tokens over the layers, on a logarithmic axis."""
    figure = Figure(figsize=(5.2, 3.1), layout="constrained")
    axes = figure.subplots()
    for kind, norms in measured.norms.items():
        axes.plot(range(len(norms)), norms, label=f"{kind} tokens", **STYLES[kind])
    axes.set_yscale("log")
    values = [value for norms in measured.norms.values() for value in norms]
    narrow = max(values) < 1000 * min(values)
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if narrow else (1.0,), numticks=12))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("after layer (0: on entry)", fontsize=10)
    axes.set_ylabel("mean L2 norm", fontsize=10)
    axes.tick_params(labelsize=9)
    axes.grid(True, color="#DDDDDD", linewidth=0.6)
    axes.set_title("visual and text tokens, logarithmic axis", fontsize=10, loc="left")
    axes.legend(fontsize=9, frameon=False)
    return _image(figure)


def summary(measured: Measured) -> str:
    """The norms on entry and their ratio, as Markdown."""
    (visual, *_), (text, *_), known = measured.norms["visual"], measured.norms["text"], measured.vocabulary
    return (
        f"Norm on entry to the language model: visual tokens **{_number(visual)}**, text tokens "
        f"**{_number(text)}**, ratio **{_number(visual / text)}**."
        + ("" if known is None else f" Text over the whole vocabulary: **{_number(known)}**.")
    )


def _number(value: float) -> str:
    return f"{value:#.3g}".rstrip(".")  # three digits, the zeros at the end among them


def _image(figure: Figure) -> Image.Image:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=200)
    return Image.open(file, formats=("PNG",))
