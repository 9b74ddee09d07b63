"""Reports made by hand: a baseline whose visual tokens are large and slow, and a model with the norm."""

import math

from normalign_llava.diagnose.measure.theory import rotation_angle
from normalign_llava.diagnose.report import (
    Attention,
    Curve,
    Depth,
    DynamicsStep,
    EmbeddingTable,
    Gain,
    Interface,
    Moments,
    Report,
    TopToken,
)


LAYERS = 30
TEXT = 1.08


def diagnosed(ratio: float = 37.0, norm: str | None = "none", model: str = "llava-baseline", **changes) -> Report:
    """A report of a model of 30 layers whose visual tokens enter at `ratio` times the norm of text."""
    depth = _depth({"visual": ratio * TEXT, "text": TEXT, "special": 3 * TEXT})
    visual = Moments(ratio * TEXT, 45.58 if norm == "none" else 0.0213, 1024)
    aligned = norm not in (None, "none")
    values = dict(
        model=model,
        model_type="normalign_llava",
        dtype="bfloat16",
        hidden_size=576,
        projector="model.multi_modal_projector",
        data="easy-VQA, held out",
        samples=64,
        tokens={"visual": 1024, "text": 713, "special": 192},
        interface=Interface(
            encoder_output=Moments(71.78, 13.95, 1088),
            projector_input=Moments(28.71, 16.87, 1024),
            projector_output=visual,
            norm_input=Moments(12.34, 5.678, 1024) if aligned else None,
            visual=visual,
            text=Moments(1.234, 0.1113, 713),
            special=Moments(3.24, 0.001234, 192),
            text_raw=Moments(1.234, 0.1113, 713),
            vocabulary_raw=Moments(TEXT, 0.1801, 49152),
            vocabulary=Moments(TEXT, 0.1801, 49152),
            scale=1.0,
            ratio=ratio,
            ratio_data=ratio * TEXT / 1.234,
        ),
        depth=depth,
        embeddings=EmbeddingTable(
            "SmolLM2-135M-Instruct",
            0.6908,
            0.161,
            49152,
            [TopToken(1000 + place, f" token{place}", 2.459 - place / 8) for place in range(10)],
        ),
        gain=Gain(2.2812, 0.04, 0.0152, 0.0197, 0.8765, 0.4321) if aligned else None,
        dynamics=[
            DynamicsStep(step, [0.91 + step / 1e5 + layer / 1000 for layer in range(LAYERS)], [0.7] * LAYERS)
            for step in (0, 100, 1000)
        ],
        attention=[_attention("What shape is in the image?", 1.61 if norm == "none" else 1.07)],
        left_out=["Visual embedding tables: this model has none."],
        norm=norm,
    )
    return Report(**{**values, **changes})


def _depth(entry: dict[str, float]) -> Depth:
    """Every layer adds an update of one size at one angle, so that rotation follows from the norm alone (eq. 13)."""
    update, angle = 0.9, 1.7
    norms = {kind: [norm] for kind, norm in entry.items()}
    rotation: dict[str, list[float]] = {kind: [] for kind in entry}
    for layer in range(LAYERS):
        size = update * (1 + layer / 10)
        for kind, states in norms.items():
            rotation[kind].append(rotation_angle(states[-1], size, angle))
            states.append(math.hypot(size * math.sin(angle), states[-1] + size * math.cos(angle)))
    sizes, angles = [update * (1 + layer / 10) for layer in range(LAYERS)], [angle] * LAYERS
    mean = {kind: sum(values[:-1]) / (LAYERS - 1) for kind, values in rotation.items()}

    def curve(values: list[float]) -> Curve:
        return Curve(list(values), [value / 10 for value in values])

    return Depth(
        norm={kind: curve(values) for kind, values in norms.items()},
        final_norm={kind: Moments(55.5, 4.4, 100) for kind in entry},
        cosine={kind: curve([math.cos(value) for value in values]) for kind, values in rotation.items()},
        rotation={kind: curve(values) for kind, values in rotation.items()},
        update_norm={kind: curve(sizes) for kind in entry},
        update_angle={kind: curve(angles) for kind in entry},
        log_norm={kind: curve([math.log(value) for value in values]) for kind, values in norms.items()},
        log_update={kind: curve([math.log(size) for size in sizes]) for kind in entry},
        asymmetry=mean["visual"] / mean["text"],
        asymmetry_error=None,
    )


def _attention(question: str, bottom: float) -> Attention:
    even = [[1 / 16] * 4] * 4
    curves = [0.18] * LAYERS, [0.93] * LAYERS, [bottom] * LAYERS
    return Attention(question, None, (4, 4), [even] * LAYERS, *curves, list(range(1, LAYERS + 1)))
