# SPDX-License-Identifier: Apache-2.0
"""The results of a diagnosis: the dataclasses of `report.json`, and the text of their numbers.

docs/report.md defines states and layers. Equations, tables, figures and appendices are the paper's.
"""

import json
import math
from dataclasses import dataclass, field
from importlib.resources import files
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from ..assembly.gain import EmbeddingStatistics


SCHEMA_VERSION = 2  # grows when a field is renamed, removed or changes its meaning: docs/report.md
REPORT = "report.json"
PAGE = "report.html"
KINDS = ("visual", "text", "special", "newline", "indicator")  # of token: see docs/report.md


@dataclass(frozen=True)
class Moments:
    """Mean and standard deviation (of the population, not of a sample) of `count` values."""

    mean: float
    std: float
    count: int


@dataclass(frozen=True)
class Curve:
    """Mean and standard deviation over tokens, by layer or state."""

    mean: list[float]
    std: list[float]


@dataclass(frozen=True)
class Interface:
    """L2 norms from the encoder to the decoder (tables 1 to 3), None for what a model lacks.

    "As received" means: as the first decoder layer receives it. `scale`, `vocabulary` and `ratio`
    are None if scaling differs between tokens. `projector_input` is None for rows of probabilities
    (Ovis).
    """

    encoder_output: Moments | None = None  # the encoder's last_hidden_state, class token included
    projector_input: Moments | None = None  # rows that enter the projector
    projector_output: Moments | None = None  # rows that leave it
    norm_input: Moments | None = None  # rows that enter the norm after the projector
    visual: Moments | None = None  # visual tokens in the data, as received, as the next four
    text: Moments | None = None
    special: Moments | None = None
    newline: Moments | None = None
    indicator: Moments | None = None
    text_raw: Moments | None = None  # embedding rows of the text tokens in the data, as stored
    vocabulary_raw: Moments | None = None  # rows as stored, without zeros, image token, padding
    vocabulary: Moments | None = None  # the same rows as received. The mean is N_text (eq. 11)
    scale: float | None = None  # of text tokens: as received over as stored
    visual_table: Moments | None = None  # rows of a visual embedding table (Ovis)
    indicator_table: Moments | None = None  # the indicators' rows in it
    ratio: float | None = None  # visual.mean / vocabulary.mean: 1 is aligned
    ratio_data: float | None = None  # visual.mean / text.mean


@dataclass(frozen=True)
class Depth:
    """Measures of tokens in the decoder's L layers, by the kinds in the data (figures 1b to 4).

    `norm` and `log_norm` have values for L + 1 states, the others for L layers. An update is a
    layer's output minus its input. Angles are in radians. An update of size 0 has the angle NaN.
    `cosine` compares two states, even if features are added between layers (Qwen3-VL).
    """

    norm: dict[str, Curve]
    final_norm: dict[str, Moments]  # norm after the language model's final norm
    cosine: dict[str, Curve]  # of state l - 1 and state l
    rotation: dict[str, Curve]  # angle between the layer's input and output (eqs. 8, 13)
    update_norm: dict[str, Curve]
    update_angle: dict[str, Curve]  # between a state and its update
    log_norm: dict[str, Curve]  # natural logarithm of the norm of the states
    log_update: dict[str, Curve]  # natural logarithm of the norm of the updates
    asymmetry: float | None  # mean rotation of visual tokens over text's, in layers 1 to L - 1
    asymmetry_error: float | None  # its standard error, over batches


@dataclass(frozen=True)
class Gain:
    """Gain and bias of the norm after the projector (table 5). They began at `start` and 0."""

    l2: float
    mean_abs: float  # mean of the absolute values
    bias_mean_abs: float | None
    start: float
    distance: float  # norm of the gain minus its start
    bias_distance: float | None  # norm of the bias


@dataclass(frozen=True)
class DynamicsStep:
    """Inter-layer cosines, by layer, that training recorded at an optimizer step (figure 5)."""

    step: int
    visual: list[float]  # mean cosine of the layer's input and output over visual tokens
    text: list[float]


@dataclass(frozen=True)
class Attention:
    """Attention of the text after an image (appendix G), by layer: means over tokens and heads."""

    question: str
    image: str | None  # PNG file: the image as shown to the model
    grid: tuple[int, int] | None  # rows and columns of visual tokens; None without a single grid
    # Shares of attention to the image, [layer][row][column]; a layer sums to 1. No grid: one row.
    maps: list[list[list[float]]]  # empty for questions that are not drawn
    image_share: list[float]  # share of all attention that is on the image
    entropy: list[float]  # entropy of the map over the entropy of an even map
    bottom_bias: list[float] | None  # attention to the bottom third over an even map's
    layers: list[int]  # the layers of `maps` and of the lists: all that see the whole image


@dataclass(frozen=True)
class Report:
    """The measurements of a vision-language model.

    A field is None or empty if it does not apply.
    """

    model: str
    model_type: str  # of its configuration, or "unknown"
    dtype: str  # of the decoder's weights: "bfloat16", "4-bit NF4, ...", "8-bit", "unknown", ...
    hidden_size: int  # of the language model
    interface: Interface
    depth: Depth
    projector: str | None = None  # name of the projector's module, if known
    data: str | None = None  # name of the data
    samples: int = 0  # questions with images
    tokens: dict[str, int] = field(default_factory=dict)  # number by kind
    embeddings: "EmbeddingStatistics | None" = None  # of the language model's embedding matrix
    gain: Gain | None = None
    dynamics: list[DynamicsStep] = field(default_factory=list)  # of `train --probe_steps`
    attention: list[Attention] = field(default_factory=list)  # of the first questions
    left_out: list[str] = field(default_factory=list)  # what was not measured and why
    norm: str | None = None  # "layer_norm", "rms_norm" or "none" for models of this package

    @property
    def has_norm(self) -> bool:
        """Whether it is a model of this package with the norm after its projector."""
        return self.norm not in (None, "none")

    @property
    def entry_ratio(self) -> float | None:
        """Norm of visual tokens over text's, as received: `ratio` or, without it, `ratio_data`."""
        norms = self.interface
        return norms.ratio_data if norms.ratio is None else norms.ratio

    @property
    def layers(self) -> int:
        """The number of the decoder's layers."""
        return len(self.depth.rotation["visual"].mean)


def report_json(content: dict[str, Any]) -> str:
    """Returns the text of `report.json`, a line per key.

    NaN and infinity become null, since JSON has no such numbers.
    """
    finite = json.loads(json.dumps(content), parse_constant=lambda constant: None)
    lines = [
        f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}"
        for key, value in finite.items()
    ]
    return "{\n" + ",\n".join(lines) + "\n}\n"


@dataclass(frozen=True)
class Drawing:
    """A PNG file in the folder of `report.json`, and the section of the page that shows it."""

    file: str
    title: str
    caption: str
    section: str  # "interface", "depth", "dynamics" or "attention"


def number(value: float | None, digits: int = 4) -> str:
    """Writes `value` with `digits` significant digits, but whole numbers in full.

    Returns – without a finite value.
    """
    if value is None or not math.isfinite(value):
        return "–"
    text = f"{value:.{digits - 1}e}"
    exponent = int(text.partition("e")[2])
    if exponent >= -4:
        text = f"{value:,.{max(digits - 1 - exponent, 0)}f}"
    return text.replace("-", "−")


def spread(moments: "Moments | EmbeddingStatistics | None") -> str:
    """Writes mean and standard deviation as [`number`] does."""
    if moments is None:
        return "–"
    return f"{number(moments.mean)} ± {number(moments.std)}"


def with_error(value: float | None, error: float | None, digits: int = 2) -> str:
    """Writes `value` with one digit of its standard error.

    Without an error, `value` has `digits` significant digits.
    """
    if value is None or not error:
        return number(value, digits)
    places = max(0, -math.floor(math.log10(error)))
    return f"{value:.{places}f} ± {error:.{places}f}"


def paper_tables() -> dict[str, Any]:
    """Returns the paper's tables 1 to 8 by name, and `source`, where they were published."""
    return json.loads(files(__package__).joinpath("paper.json").read_text("utf-8"))


def paper_ratios() -> dict[str, float]:
    """Returns the mean norm of the projector's output over the mean norm of text, by model."""
    tables = paper_tables()
    ratios = {row["model"]: row["after_mean"] / row["text_mean"] for row in tables["table_2"]}
    ovis = tables["table_3_ovis2_5"]
    ratios["Ovis2.5"] = ovis["visual_mean"] / ovis["text_mean"]
    return ratios
