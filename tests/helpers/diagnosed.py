"""Reports made by hand: a baseline with large, slow visual tokens, and a model with the norm."""

import math
from dataclasses import replace

import numpy as np

from normalign_llava.assembly.gain import EmbeddingStatistics, TopToken
from normalign_llava.diagnose import report
from normalign_llava.diagnose.critical import rotation_angle


TEXT = 1.08


def embeddings_of(model: str, top: list[tuple[int, str | None, float]]) -> EmbeddingStatistics:
    """Norms of the embedding matrix of `model`, with these rows on top."""
    top_tokens = [TopToken(*top_row) for top_row in top]
    return EmbeddingStatistics(
        model,
        0.6908,
        0.161,
        49152,
        top_tokens,
        tensor="",
        model_type="llama",
        hidden_size=576,
        zero_rows=0,
        excluded_rows=0,
        n_text=0.6908,
        gain=0.0288,
        scale=1.0,
    )


def diagnosed(ratio=37.0, norm="none", model="llava-baseline", layers=30, **changes):
    """A report of a model whose visual tokens enter at `ratio` times the norm of text."""
    has_norm = norm not in (None, "none")
    visual_spread = 0.0213
    bottom_bias = 1.07
    if norm == "none":
        visual_spread = 45.58 * ratio / 37
        bottom_bias = 1.61
    norm_input = None
    gain = None
    if has_norm:
        norm_input = report.Moments(12.34, 5.678, 1024)
        gain = report.Gain(2.2812, 0.04, 0.0152, 0.0197, 0.8765, 0.4321)

    entry_norms = {
        "visual": ratio * TEXT,
        "text": TEXT,
        "special": 3 * TEXT,
    }
    top_rows = []
    for index in range(10):
        top_rows.append((1000 + index, f" token{index}", 2.459 - index / 8))
    shape_attention = attention_of("What shape is in the image?", layers, bottom=bottom_bias)
    colour_attention = replace(
        shape_attention,
        question="Which colour is it?",
        image=None,
        maps=[],
    )
    values = {
        "model": model,
        "model_type": "normalign_llava",
        "dtype": "bfloat16",
        "hidden_size": 576,
        "projector": "model.multi_modal_projector",
        "data": "easy-VQA, held out",
        "samples": 64,
        "tokens": {"visual": 1024, "text": 713, "special": 192},
        "interface": interface_of(ratio, visual_spread, norm_input),
        "depth": depth_of(entry_norms, layers),
        "embeddings": embeddings_of("SmolLM2", top_rows),
        "gain": gain,
        "dynamics": [dynamics_step(step, layers) for step in (0, 100, 1000)],
        "attention": [shape_attention, colour_attention],
        "left_out": ["Visual embedding tables: this model has none."],
        "norm": norm,
        **changes,
    }
    return report.Report(**values)


def interface_of(ratio, visual_spread, norm_input) -> report.Interface:
    visual = report.Moments(ratio * TEXT, visual_spread, 1024)
    text = report.Moments(1.234, 0.1113, 713)
    return report.Interface(
        encoder_output=report.Moments(71.78, 13.95, 1088),
        projector_input=report.Moments(28.71, 16.87, 1024),
        projector_output=visual,
        norm_input=norm_input,
        visual=visual,
        text=text,
        special=report.Moments(3.24, 0.001234, 192),
        text_raw=text,
        vocabulary_raw=report.Moments(TEXT, 0.1801, 49152),
        vocabulary=report.Moments(TEXT, 0.1801, 49152),
        scale=1.0,
        ratio=ratio,
        ratio_data=ratio * TEXT / 1.234,
    )


def dynamics_step(step: int, layers: int) -> report.DynamicsStep:
    cosines = [0.91 + step / 1e5 + layer / 1000 for layer in range(layers)]
    return report.DynamicsStep(step, cosines, [0.7] * layers)


UPDATE_ANGLE = 1.7


def next_norm(norm: float, update_size: float) -> float:
    """The norm of a state after an update at this angle."""
    across = update_size * math.sin(UPDATE_ANGLE)
    along = norm + update_size * math.cos(UPDATE_ANGLE)
    return math.hypot(across, along)


def make_curves(values: dict[str, list[float]], function=float) -> dict[str, report.Curve]:
    """Curves of a function of these values, whose errors are a tenth of it."""
    curves = {}
    for kind, values_of_kind in values.items():
        means = [function(value) for value in values_of_kind]
        errors = [mean / 10 for mean in means]
        curves[kind] = report.Curve(means, errors)
    return curves


def depth_of(entry: dict[str, float], layers: int) -> report.Depth:
    """A layer's update has one size and angle for all: rotation follows from the norm (eq. 13)."""
    update_sizes = [0.9 * (1 + layer / 10) for layer in range(layers)]
    norms = {}
    rotations = {}
    for kind, entry_norm in entry.items():
        norms[kind] = [entry_norm]
        rotations[kind] = []
        for update_size in update_sizes:
            norm = norms[kind][-1]
            rotations[kind].append(rotation_angle(norm, update_size, UPDATE_ANGLE))
            norms[kind].append(next_norm(norm, update_size))

    updates = dict.fromkeys(entry, update_sizes)
    angles = dict.fromkeys(entry, [UPDATE_ANGLE] * layers)
    visual_rotation = sum(rotations["visual"][:-1])
    text_rotation = sum(rotations["text"][:-1])
    return report.Depth(
        norm=make_curves(norms),
        final_norm={kind: report.Moments(55.5, 4.4, 100) for kind in entry},
        cosine=make_curves(rotations, math.cos),
        rotation=make_curves(rotations),
        update_norm=make_curves(updates),
        update_angle=make_curves(angles),
        log_norm=make_curves(norms, math.log),
        log_update=make_curves(updates, math.log),
        asymmetry=visual_rotation / text_rotation,
        asymmetry_error=0.01,
    )


def spot_map(layer: int, layers: int, shape: tuple[int, int], sharp: float) -> list[list[float]]:
    """A layer's map: a spot that moves down by layer, and is even where `sharp` is 0."""
    rows, columns = shape
    row_numbers, column_numbers = np.mgrid[:rows, :columns]
    across = (column_numbers / columns - 0.4) ** 2
    down = (row_numbers / rows - layer / layers) ** 2
    shares = np.exp(-sharp * (down + across))
    return (shares / shares.sum()).tolist()


def attention_of(question: str, layers: int, grid=(4, 4), image=None, bottom=1.0, sharp=0.0):
    """Even maps or, with `sharp`, a spot that moves down by layer; without a grid, 16 tokens."""
    shape = grid
    bottom_bias = [bottom] * layers
    if grid is None:
        shape = (1, 16)
        bottom_bias = None
    return report.Attention(
        question=question,
        image=image,
        grid=grid,
        maps=[spot_map(layer, layers, shape, sharp) for layer in range(layers)],
        image_share=[0.18] * layers,
        entropy=[0.93] * layers,
        bottom_bias=bottom_bias,
        layers=list(range(1, layers + 1)),
    )
