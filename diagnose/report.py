# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What a diagnosis found: the dataclasses that `report.json` is made of."""

from dataclasses import asdict, dataclass, field
from typing import Any


SCHEMA_VERSION = 1
"""Of `report.json`; it grows when a field is renamed, removed or changes its meaning, not when one is added."""

REPORT, PAGE = "report.json", "report.html"
"""Files in the folder that a diagnosis writes: the numbers and the page."""

KINDS = ("visual", "text", "special", "newline", "indicator")
"""The kinds of token; padding is none of them.

- `visual`: features of an image, at the image token's positions.
- `text`: all other attended tokens.
- `special`: the tokenizer's special tokens, and the boundary tokens that the configuration names.
- `newline`: rows at image positions that are the learned end of a row of patches (LLaVA-NeXT, LLaVA-OneVision).
- `indicator`: Ovis' visual indicators, before and after an image.
"""


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

    "As received" means at the input of the first decoder layer, after every scaling.

    Attributes:
        encoder_output: Rows of the encoder's `last_hidden_state`, class token included.
        projector_input, projector_output: Rows that enter and leave the projector. The input of a visual embedding
            table is a probability vector, whose norm means nothing: there `projector_input` is None.
        norm_input: Rows that enter the norm at the end of the projector of this package's models.
        visual, text, special, newline, indicator: Tokens in the data as received, by kind (`KINDS`).
        text_raw: Rows of the embedding matrix for the `text` tokens in the data, as stored.
        vocabulary_raw: Rows of the embedding matrix as stored: all that are not zero, without the image token's and
            the padding that repeats it.
        vocabulary: The same as received: `scale * vocabulary_raw`. Its mean is N_text (eq. 11).
        scale: Norm of text tokens as received over that of their rows as stored; 1 if nothing scales them. None if the
            ratio differs between tokens; `vocabulary` and `ratio` are then None too.
        visual_table, indicator_table: Rows of the visual embedding table (Ovis, table 3).
        ratio: `visual.mean / vocabulary.mean`: 1 is aligned.
        ratio_data: `visual.mean / text.mean`.
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

    State l (0 to L) is the input of layer l + 1; state L is the last layer's output, before the final norm. Layers are
    counted from 1. An update is a layer's output minus its own input.

    Attributes:
        norm: L2 norm of the states, L + 1 values (figures 1b, 4a).
        final_norm: L2 norm of the last state after the language model's final norm.
        cosine: Cosine similarity of state l - 1 and state l, L values (figures 2, 3, 4b). Models that add features
            between layers (Qwen3-VL) change a state after the layer that made it; for all others this is the cosine
            of a layer's input and output.
        rotation: Effective rotation angle of each layer's update (eqs. 8, 13), radians, L values.
        update_norm: L2 norm of the updates, L values.
        log_norm, log_update: Natural logarithm of the norms of states (L + 1 values) and of updates (L values). The
            exponential of their means is the geometric mean, which a few tokens of huge norm (attention sinks) affect
            little.
        update_angle: Angle between a state and its update, radians, L values; NaN for a layer that changes nothing.
        asymmetry: Mean rotation of visual over mean rotation of text tokens, over layers 1 to L - 1; below 1 visual
            tokens rotate less. None if either kind is missing.
        asymmetry_error: Its standard error, from its spread over batches; None with fewer than two.
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

    Attributes:
        l2: L2 norm of the gain.
        mean_abs: Mean of |gain|.
        bias_mean_abs: Mean of |bias|; None for an RMSNorm, which has none.
        start: The value that every element of the gain started from: N_text / sqrt(d), or 1.
        distance: L2 norm of gain - start.
        bias_distance: L2 norm of the bias, which started from 0.
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
    """Where the text tokens after an image look, by layer (appendix G).

    Attention is averaged over heads and over the text positions that come after the image.

    Attributes:
        question: The question that was asked.
        image: PNG file beside `report.json` of the image as the model received it; None if it was not kept.
        grid: Rows and columns of the image's visual tokens; None if they form no single grid (tiles): `maps` then have
            one row, in token order.
        maps: `[layer][row][column]`: share of the attention to the image that falls on each visual token; each
            layer sums to 1. Empty for questions that are not drawn.
        image_share: Share of all attention that falls on the image, by layer.
        entropy: Entropy of each layer's map over that of an even one: 1 is even, 0 is one token.
        layers: Numbers, from 1, of the layers that `maps` and the lists belong to: those that see the whole image, in
            most models all.
        bottom_bias: By layer, attention on the bottom third of the grid over what an even map has there: 1 is no bias.
            None without a grid.
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
    """The measurements of one model.

    Attributes:
        model: Folder or Hub id, without the folders above it.
        model_type: The configuration's `model_type`.
        dtype: Of the decoder's weights, such as "bfloat16" or "4-bit".
        hidden_size: d of the language model, or of the encoder if there is none.
        projector: Name of the projector's module; None if it is not known for this family.
        data: Name of the data.
        samples: How many questions with images were asked.
        tokens: How many tokens of each kind were measured.
        interface, depth, embeddings, gain: What was measured; None where it does not apply.
        dynamics, attention: One entry for each recorded step, and for each question asked; may be empty.
        training: What training logged, by name: `(step, value)` in order.
        left_out: What was not measured and why, one sentence each.
        norm: The norm after the projector, of this package's models: "layer_norm", "rms_norm" or "none".
    """

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


@dataclass(frozen=True)
class Drawing:
    """A figure beside `report.json`.

    Attributes:
        file: Name of the PNG file.
        title: A few words.
        caption: What it shows, and which figure or table of the paper it corresponds to.
        section: Section of the page: "interface", "depth", "embeddings", "dynamics", "attention" or "theory".
    """

    file: str
    title: str
    caption: str
    section: str
