# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What a diagnosis found: the dataclasses that `report.json` is made of. docs/report.md describes every field."""

import json
from dataclasses import dataclass, field
from typing import Any


SCHEMA_VERSION = 1
"""Of `report.json`; it grows when a field is renamed, removed or changes its meaning, not when one is added."""

REPORT, PAGE = "report.json", "report.html"
"""Files in the folder that a diagnosis writes: the numbers and the page."""

KINDS = ("visual", "text", "special", "newline", "indicator")
"""The kinds of token, as docs/report.md describes them; padding is none."""


@dataclass(frozen=True)
class Moments:
    """Mean and standard deviation (of the population, not of a sample) of `count` values."""

    mean: float
    std: float
    count: int


@dataclass(frozen=True)
class Curve:
    """Mean and standard deviation over tokens, one of each for every layer or state, in order of depth."""

    mean: list[float]
    std: list[float]


@dataclass(frozen=True)
class Interface:
    """L2 norms from the encoder to the decoder (tables 1 to 3); None for what this model or these data do not have.

    `scale` is None if it differs between tokens; `vocabulary` and `ratio` are then None too. The input of a visual
    embedding table is a probability vector, whose norm means nothing: there `projector_input` is None.
    """

    encoder_output: Moments | None = None
    projector_input: Moments | None = None
    projector_output: Moments | None = None
    norm_input: Moments | None = None
    visual: Moments | None = None
    text: Moments | None = None
    special: Moments | None = None
    newline: Moments | None = None
    indicator: Moments | None = None
    text_raw: Moments | None = None
    vocabulary_raw: Moments | None = None
    vocabulary: Moments | None = None
    scale: float | None = None
    visual_table: Moments | None = None
    indicator_table: Moments | None = None
    ratio: float | None = None
    ratio_data: float | None = None


@dataclass(frozen=True)
class Depth:
    """What the decoder's L layers do to tokens, by kind (figures 1b to 4); kinds that the data lack are no keys.

    `norm` and `log_norm` have a value for each of L + 1 states, the others one for each layer. Angles are in radians
    (eqs. 8, 13); that of an update of size 0 is NaN. `cosine` is that of two states also where features are added
    between layers (Qwen3-VL).
    """

    norm: dict[str, Curve]
    final_norm: dict[str, Moments]
    cosine: dict[str, Curve]
    rotation: dict[str, Curve]
    update_norm: dict[str, Curve]
    update_angle: dict[str, Curve]
    log_norm: dict[str, Curve]
    log_update: dict[str, Curve]
    asymmetry: float | None
    asymmetry_error: float | None


@dataclass(frozen=True)
class TopToken:
    """A row of an embedding matrix: its id, its text (None without a tokenizer), its L2 norm as stored."""

    id: int
    text: str | None
    norm: float


@dataclass(frozen=True)
class EmbeddingTable:
    """Norms of the rows of a language model's embedding matrix, as stored, and the largest (tables 6 to 8)."""

    model: str
    mean: float
    std: float
    rows: int
    top: list[TopToken]


@dataclass(frozen=True)
class Gain:
    """Gain and bias of the norm after the projector (table 5); the gain started from `start`, the bias from 0."""

    l2: float
    mean_abs: float
    bias_mean_abs: float | None
    start: float
    distance: float
    bias_distance: float | None


@dataclass(frozen=True)
class DynamicsStep:
    """Inter-layer cosines recorded during training (figure 5): the optimizer step, and a value for each layer."""

    step: int
    visual: list[float]
    text: list[float]


@dataclass(frozen=True)
class Attention:
    """Where the text tokens after an image look, by layer (appendix G); `layers` are those that see all of it."""

    question: str
    image: str | None
    grid: tuple[int, int] | None
    maps: list[list[list[float]]]
    image_share: list[float]
    entropy: list[float]
    bottom_bias: list[float] | None
    layers: list[int]


@dataclass(frozen=True)
class Report:
    """The measurements of one model; None or empty where something does not apply."""

    model: str
    model_type: str
    dtype: str
    hidden_size: int
    projector: str | None = None
    data: str | None = None
    samples: int = 0
    tokens: dict[str, int] = field(default_factory=dict)
    interface: Interface = field(default_factory=Interface)
    depth: Depth | None = None
    embeddings: EmbeddingTable | None = None
    gain: Gain | None = None
    dynamics: list[DynamicsStep] = field(default_factory=list)
    attention: list[Attention] = field(default_factory=list)
    training: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    norm: str | None = None


def report_json(content: dict[str, Any]) -> str:
    """The text of `report.json`: a line for each key, since maps with a number on each line would fill thousands.

    NaN and infinity, which JSON does not have, become null.
    """
    finite = json.loads(json.dumps(content), parse_constant=lambda constant: None)
    lines = (f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in finite.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


@dataclass(frozen=True)
class Drawing:
    """A PNG file in the folder of `report.json`, and the section of the page that shows it."""

    file: str
    title: str
    caption: str
    section: str
