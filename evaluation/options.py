# SPDX-License-Identifier: Apache-2.0
"""Options of `normalign ask` and `normalign evaluate`."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """How a model is opened and loaded.

    Attributes:
        dtype: Type of the weights, see [`ModelHandle.load`]. An adapter does not use it.
        load_in_4bit: Quantizes the model, see [`ModelHandle.load`]. An adapter does not use it.
        trust_remote_code: Lets code from the checkpoint run, see [`resolve_model`].
        base: Base model of an adapter, see [`resolve_model`].
        base_quantization: Quantization of an adapter's base, see [`resolve_model`].
    """

    dtype: str = "auto"
    load_in_4bit: bool = False
    trust_remote_code: bool = False
    base: str | None = None
    base_quantization: str | None = None


@dataclass(frozen=True)
class EvaluateOptions(ModelOptions):
    """The arguments of [`evaluate`]. Its docstring explains them."""

    model: str
    _: KW_ONLY
    suites: Sequence[str] = ()
    tasks: Sequence[str] = ()
    include_path: Path | None = None
    data: str | None = None
    image_folder: str | None = None
    columns: str | None = None
    limit: int | None = None
    output: Path | None = None
    batch_size: int = 1


@dataclass(frozen=True)
class AskOptions(ModelOptions):
    """How `normalign ask` asks, beside the options of [`ModelOptions`].

    Attributes:
        system: The system turn. If None, it is left to the chat template.
        max_new_tokens: Longest answer, in tokens.
        batch_size: Questions that are answered together, where there are several.
        output: File that gets a JSON object for each answer. If None, answers are only printed.
        data: Data whose rows are asked, in any form that training reads.
        image_folder: Folder of the images of `data`, as in training.
        columns: Columns of `data`, as in training.
    """

    system: str | None = None
    max_new_tokens: int = 128
    batch_size: int = 1
    output: Path | None = None
    _: KW_ONLY
    data: str | None = None
    image_folder: str | None = None
    columns: str | None = None
