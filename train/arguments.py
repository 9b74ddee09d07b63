# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What a training run can be told: TRL's options under TRL's names, and ours, in YAML and on the command line."""

from dataclasses import dataclass, field
from typing import Literal

from trl import ModelConfig, ScriptArguments, SFTConfig
from trl.scripts.utils import DatasetConfig


@dataclass
class DataSource(DatasetConfig):
    """One data set of a mixture: TRL's `DatasetConfig` (`path`, `name`, `split`, `fraction`, ...) and its pictures.

    Args:
        image_folder: folder that relative picture paths start from; the data file's own folder by default.
    """

    image_folder: str | None = None


@dataclass
class DataArguments(ScriptArguments):
    """TRL's `ScriptArguments` (`dataset_name`, `dataset_config`, `dataset_train_split`, ...) and ours.

    Raises:
        ValueError: a data set is missing or named twice, or a number is out of range.
    """

    dataset_name: str | None = field(
        default=None, metadata={"help": "Data to train on: a Hub id, a folder, or a .json, .jsonl or .parquet file."}
    )
    datasets: list[dict] = field(
        default_factory=list,
        metadata={
            "help": "In place of dataset_name, several data sets: in YAML, a list of mappings with TRL's keys (path, "
            "name, split, data_files, fraction, ...) and image_folder. Fractions are shares of the mixture."
        },
    )
    image_folder: str | None = field(
        default=None, metadata={"help": "Folder that picture paths start from. Default: the data file's folder."}
    )
    eval_dataset_name: str | None = field(
        default=None, metadata={"help": "Held-out data, in the forms of dataset_name. Default: its test split."}
    )
    test_split_size: float | None = field(
        default=None, metadata={"help": "Share of the training rows to hold out in place of a test split."}
    )
    bad_rows: Literal["stop", "skip"] = field(
        default="stop",
        metadata={"help": "At a row that cannot be trained on: stop with its number and the reason, or skip it."},
    )
    check_images: bool = field(
        default=False, metadata={"help": "Decode every picture before training, not when it is met."}
    )
    max_image_pixels: int = field(
        default=89_478_485, metadata={"help": "Pictures with more pixels are bad rows. Default: Pillow's own limit."}
    )
    shuffle_buffer_size: int = field(
        default=1000, metadata={"help": "Rows in the shuffle buffer of a streamed data set."}
    )

    def __post_init__(self):
        if bool(self.dataset_name) == bool(self.datasets):
            raise ValueError("Give either dataset_name or datasets: one names a data set, the other a mixture.")
        if self.test_split_size is not None and not 0 < self.test_split_size < 1:
            raise ValueError(f"test_split_size is a share between 0 and 1, got {self.test_split_size}.")
        for name in ("max_image_pixels", "shuffle_buffer_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")

    @property
    def sources(self) -> list[DataSource]:
        """The data sets to train on; one without a `fraction` unless it is a mixture."""
        if self.datasets:
            return [DataSource(**{"image_folder": self.image_folder, **source}) for source in self.datasets]
        single = DataSource(self.dataset_name, self.dataset_config, split=self.dataset_train_split)
        single.image_folder = self.image_folder
        return [single]


@dataclass
class TrainArguments(SFTConfig):
    """TRL's `SFTConfig`, with the stage, the arm, a learning rate for each module, and what is shown on the way.

    `max_length` drops longer rows; nothing is truncated. Labels are on assistant turns alone.

    Raises:
        ValueError: a rate is negative, nothing is trained, or an option would put image tokens into the labels.
    """

    stage: Literal["align", "tune"] = field(
        default="tune",
        metadata={"help": "The paper's stage, whose values are the defaults: align (projector, norm) or tune (all)."},
    )
    arm: Literal["none", "unit", "aligned", "gwc"] | None = field(
        default=None, metadata={"help": "Arm to train, where it is not what the checkpoint was built as."}
    )
    global_batch_size: int | None = field(
        default=None,
        metadata={"help": "Rows in an optimizer step over all processes; accumulation steps are derived from it."},
    )
    vision_learning_rate: float | None = field(
        default=None,
        metadata={"help": "Rate of the vision tower; 0 freezes. Default: learning_rate, 0 with use_peft."},
    )
    projector_learning_rate: float | None = field(
        default=None, metadata={"help": "Rate of the projector's linear layers; 0 freezes. Default: learning_rate."}
    )
    norm_learning_rate: float | None = field(
        default=None, metadata={"help": "Rate of the norm's gain and bias; 0 freezes. Default: learning_rate."}
    )
    language_learning_rate: float | None = field(
        default=None,
        metadata={"help": "Rate of the language model, or of its adapters; 0 freezes. Default: learning_rate."},
    )
    max_length: int | None = field(
        default=2048, metadata={"help": "Rows with more tokens, image tokens included, are dropped and counted."}
    )
    assistant_only_loss: bool = field(
        default=True, metadata={"help": "Always true here: the loss is on what the model has to say."}
    )
    remove_unused_columns: bool = field(default=False, metadata={"help": "Always false here: the collator needs all."})
    sample_count: int = field(
        default=4, metadata={"help": "Held-out examples answered at each evaluation, and written with their pictures."}
    )
    sample_max_new_tokens: int = field(default=64, metadata={"help": "Longest answer of such an example, in tokens."})
    probe_steps: list[int] | None = field(
        default=None, metadata={"help": "Steps at which inter-layer cosines are recorded on a fixed batch (figure 5)."}
    )
    probe_rows: int = field(default=4, metadata={"help": "Rows in that batch."})
    resume_from_checkpoint: str | None = field(
        default=None,
        metadata={
            "nargs": "?",
            "const": "last",
            "help": "Go on from the newest complete checkpoint in output_dir, or from the one named.",
        },
    )

    def __post_init__(self):
        super().__post_init__()
        for module, rate in self.rates(use_peft=False).items():
            if rate < 0:
                raise ValueError(f"{module}_learning_rate must not be negative, got {rate}.")
        if not self.assistant_only_loss or self.remove_unused_columns:
            raise ValueError(
                "assistant_only_loss must be true and remove_unused_columns false: otherwise the labels would hold "
                "image tokens and the user's words. Leave both out."
            )
        if self.packing or self.padding_free:
            raise ValueError("packing and padding_free are not for pictures: TRL refuses them. Leave both out.")

    def rates(self, use_peft: bool) -> dict[str, float]:
        """The peak learning rate of each module; 0 is frozen.

        Args:
            use_peft: Adapters stand for the language model; the vision tower is frozen unless it was given a rate.
        """
        given = {
            "vision": self.vision_learning_rate,
            "projector": self.projector_learning_rate,
            "norm": self.norm_learning_rate,
            "language": self.language_learning_rate,
        }
        rates = {}
        for module, rate in given.items():
            default = 0.0 if use_peft and module == "vision" else self.learning_rate
            rates[module] = default if rate is None else rate
        return rates


@dataclass
class ModelArguments(ModelConfig):
    """TRL's `ModelConfig`: which checkpoint, in which precision, with which adapters."""

    use_bnb_nested_quant: bool = field(
        default=True, metadata={"help": "Whether to quantize the constants of 4-bit quantization as well."}
    )
