# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What a diagnosis found: the dataclasses that `report.json` is made of. docs/report.md describes every field."""

import json
from dataclasses import asdict, dataclass, field
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

    Tokens by kind, and `vocabulary`, whose mean is N_text (eq. 11), are as the first decoder layer receives them,
    after every scaling; "raw" norms are of the embedding matrix as stored. `scale` is the ratio of the two, 1 if
    nothing scales text, and None if it differs between tokens; `vocabulary` and `ratio` are then None too. The input
    of a visual embedding table is a probability vector, whose norm means nothing: there `projector_input` is None.
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
    """What the decoder's L layers do to tokens, by kind; kinds that do not occur in the data are no keys.

    State l (0 to L) is the input of layer l + 1; state L is the last layer's output, before the final norm. An update
    is a layer's output minus its own input. `norm` and `log_norm` have a value for each state, the others one for each
    layer. Angles are in radians (eqs. 8, 13); that of an update of size 0 is NaN.

    `cosine` is that of state l - 1 and state l (figures 2, 3, 4b), also where features are added to a state between
    layers (Qwen3-VL). `asymmetry` leaves the last layer out; its standard error is from its spread over batches.
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
    """Gain and bias of the norm after the projector, and how far they are from their start (table 5).

    The gain started from `start` in every element, N_text / sqrt(d) or 1, the bias from 0; an RMSNorm has no bias.
    """

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
    """Where the text tokens after an image look, by layer (appendix G), averaged over heads and these tokens.

    `layers`, counted from 1, are those that see the whole image. `maps` are `[layer][row][column]`, and each layer
    sums to 1; visual tokens that form no single grid (tiles) are one row, in token order.
    """

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

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, numbers and strings, as `report.json` has them."""
        return asdict(self)


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
