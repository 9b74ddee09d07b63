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
    rows = [TopToken(*row) for row in top]
    about = dict(tensor="", model_type="llama", hidden_size=576, zero_rows=0, excluded_rows=0)
    norms = dict(n_text=0.6908, gain=0.0288, scale=1.0)
    return EmbeddingStatistics(model, 0.6908, 0.161, 49152, rows, **about, **norms)


def diagnosed(ratio=37.0, norm="none", model="llava-baseline", layers=30, **changes):
    """A report of a model whose visual tokens enter at `ratio` times the norm of text."""
    spread, bottom = (45.58 * ratio / 37, 1.61) if norm == "none" else (0.0213, 1.07)
    visual = report.Moments(ratio * TEXT, spread, 1024)
    text = report.Moments(1.234, 0.1113, 713)
    aligned = norm not in (None, "none")
    top = [(1000 + row, f" token{row}", 2.459 - row / 8) for row in range(10)]
    drawn = attention_of("What shape is in the image?", layers, bottom=bottom)
    asked = [drawn, replace(drawn, question="Which colour is it?", image=None, maps=[])]
    dynamics = []
    for step in (0, 100, 1000):
        cosines = [0.91 + step / 1e5 + layer / 1000 for layer in range(layers)]
        dynamics.append(report.DynamicsStep(step, cosines, [0.7] * layers))
    about = dict(model=model, model_type="normalign_llava", dtype="bfloat16", hidden_size=576)
    about |= dict(projector="model.multi_modal_projector", data="easy-VQA, held out", samples=64)
    values = dict(
        **about,
        tokens={"visual": 1024, "text": 713, "special": 192},
        interface=report.Interface(
            encoder_output=report.Moments(71.78, 13.95, 1088),
            projector_input=report.Moments(28.71, 16.87, 1024),
            projector_output=visual,
            norm_input=report.Moments(12.34, 5.678, 1024) if aligned else None,
            visual=visual,
            text=text,
            special=report.Moments(3.24, 0.001234, 192),
            text_raw=text,
            vocabulary_raw=report.Moments(TEXT, 0.1801, 49152),
            vocabulary=report.Moments(TEXT, 0.1801, 49152),
            scale=1.0,
            ratio=ratio,
            ratio_data=ratio * TEXT / 1.234,
        ),
        depth=depth_of({"visual": ratio * TEXT, "text": TEXT, "special": 3 * TEXT}, layers),
        embeddings=embeddings_of("SmolLM2", top),
        gain=report.Gain(2.2812, 0.04, 0.0152, 0.0197, 0.8765, 0.4321) if aligned else None,
        dynamics=dynamics,
        attention=asked,
        left_out=["Visual embedding tables: this model has none."],
        norm=norm,
    )
    return report.Report(**{**values, **changes})


def depth_of(entry: dict[str, float], layers: int) -> report.Depth:
    """A layer's update has one size and angle for all: rotation follows from the norm (eq. 13)."""
    angle = 1.7
    sizes = [0.9 * (1 + layer / 10) for layer in range(layers)]
    norms = {kind: [norm] for kind, norm in entry.items()}
    rotation = {kind: [] for kind in entry}
    for size in sizes:
        for kind, states in norms.items():
            rotation[kind].append(rotation_angle(states[-1], size, angle))
            states.append(math.hypot(size * math.sin(angle), states[-1] + size * math.cos(angle)))

    def curves(values: dict[str, list[float]], function=float) -> dict[str, report.Curve]:
        means = {kind: list(map(function, of_kind)) for kind, of_kind in values.items()}
        return {kind: report.Curve(mean, [x / 10 for x in mean]) for kind, mean in means.items()}

    return report.Depth(
        norm=curves(norms),
        final_norm={kind: report.Moments(55.5, 4.4, 100) for kind in entry},
        cosine=curves(rotation, math.cos),
        rotation=curves(rotation),
        update_norm=curves(dict.fromkeys(entry, sizes)),
        update_angle=curves(dict.fromkeys(entry, [angle] * layers)),
        log_norm=curves(norms, math.log),
        log_update=curves(dict.fromkeys(entry, sizes), math.log),
        asymmetry=sum(rotation["visual"][:-1]) / sum(rotation["text"][:-1]),
        asymmetry_error=0.01,
    )


def attention_of(question: str, layers: int, grid=(4, 4), image=None, bottom=1.0, sharp=0.0):
    """Even maps or, with `sharp`, a spot that moves down by layer; without a grid, 16 tokens."""
    rows, columns = grid or (1, 16)
    y, x = np.mgrid[:rows, :columns]
    across = (x / columns - 0.4) ** 2
    maps = [np.exp(-sharp * ((y / rows - layer / layers) ** 2 + across)) for layer in range(layers)]
    return report.Attention(
        question=question,
        image=image,
        grid=grid,
        maps=[(shares / shares.sum()).tolist() for shares in maps],
        image_share=[0.18] * layers,
        entropy=[0.93] * layers,
        bottom_bias=None if grid is None else [bottom] * layers,
        layers=list(range(1, layers + 1)),
    )
