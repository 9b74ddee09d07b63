# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What a training run can be told: TRL's options under TRL's names, and ours, in YAML and on the command line."""

from dataclasses import dataclass, field
from typing import Any, Literal

from trl import ModelConfig, ScriptArguments, SFTConfig
from trl.scripts.utils import DatasetConfig


STAGES: dict[str, dict[str, Any]] = {
    "align": {
        "learning_rate": 1e-3,
        "vision_learning_rate": 0.0,
        "language_learning_rate": 0.0,
        "global_batch_size": 256,
        "per_device_train_batch_size": 2,
    },
    "tune": {
        "learning_rate": 1e-5,
        "vision_learning_rate": 2e-6,
        "global_batch_size": 128,
        "per_device_train_batch_size": 1,
    },
}
"""What the paper's two stages set (appendix E) where nothing else is said."""

BOTH_STAGES: dict[str, Any] = {
    "num_train_epochs": 1.0,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 0.03,  # a ratio, since it is below 1
    "weight_decay": 0.0,
    "seed": 42,
}
"""What the stages share."""


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
        _check_choice(self, "bad_rows", ("stop", "skip"))
        if bool(self.dataset_name) == bool(self.datasets):
            raise ValueError("Give either dataset_name or datasets: one names a data set, the other a mixture.")
        if self.test_split_size is not None and not 0 < self.test_split_size < 1:
            raise ValueError(f"test_split_size is a share between 0 and 1, got {self.test_split_size}.")
        keys = set(DataSource.__dataclass_fields__)
        for source in self.datasets:
            if not isinstance(source, dict) or "path" not in source or source.keys() - keys:
                raise ValueError(
                    f"Each of datasets is a mapping with path and others of {sorted(keys)}; got {source!r}."
                )
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

    stage: Literal["align", "tune"] | None = field(
        default=None,
        metadata={"help": "The paper's stage, which decides what is not given: align (projector, norm), tune (all)."},
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
    learning_rate: float = field(default=None, metadata={"help": "Rate of what has none of its own."})  # type: ignore[assignment]
    per_device_train_batch_size: int = field(default=None, metadata={"help": "Rows in a forward pass."})  # type: ignore[assignment]
    num_train_epochs: float = field(default=None, metadata={"help": "Passes over the data."})  # type: ignore[assignment]
    lr_scheduler_type: str = field(default=None, metadata={"help": "Schedule of the rates."})  # type: ignore[assignment]
    warmup_steps: float = field(  # type: ignore[assignment]
        default=None, metadata={"help": "Steps of linear warm-up, or their share of all steps if below 1."}
    )
    weight_decay: float = field(default=None, metadata={"help": "Of weights; never of gain, biases, norms."})  # type: ignore[assignment]
    seed: int = field(default=None, metadata={"help": "Of everything drawn."})  # type: ignore[assignment]
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
        _check_choice(self, "stage", (None, *STAGES))
        _check_choice(self, "arm", (None, "none", "unit", "aligned", "gwc"))
        decided = {**BOTH_STAGES, **STAGES[self.stage]} if self.stage else {}
        for name in ("learning_rate", "per_device_train_batch_size", "global_batch_size", *BOTH_STAGES):
            if getattr(self, name) is None:
                default = SFTConfig.__dataclass_fields__[name].default if name != "global_batch_size" else None
                setattr(self, name, decided.get(name, default))
        super().__post_init__()
        self.hub_token = self.hub_token and self.hub_token.strip()  # a block of YAML ends in a line break
        self.probe_steps = None if self.probe_steps is None else [int(step) for step in _as_list(self.probe_steps)]
        rates = self.rates(use_peft=False)
        for module, rate in rates.items():
            if rate < 0:
                raise ValueError(f"{module}_learning_rate must not be negative, got {rate}.")
        if not any(rates.values()):
            raise ValueError("Every learning rate is 0, so nothing would be trained. Give some module a rate.")
        least_of = {"per_device_train_batch_size": 1, "global_batch_size": 1, "probe_rows": 1, "sample_count": 0}
        for name, least in least_of.items():
            if (value := getattr(self, name)) is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}.")
        refused = {
            "packing": "TRL packs no rows with pictures",
            "padding_free": "TRL's is not for pictures",
            "remove_unused_columns": "the collator needs every column",
            "auto_find_batch_size": "the global batch would not stay what it is; lower per_device_train_batch_size",
            "chat_template_path": "the checkpoint has a template, which `normalign build --chat-template` sets",
            "router_aux_loss_coef": "LLaVA's outputs have no router logits",
        }
        for name, reason in refused.items():
            if getattr(self, name):
                raise ValueError(f"{name} cannot be used here: {reason}. Leave it out.")
        if not self.assistant_only_loss:
            raise ValueError("assistant_only_loss must be true, or labels would hold image tokens. Leave it out.")
        self.router_aux_loss_coef = 0.0  # which TRL would take from the language model's configuration

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
        decided = STAGES.get(self.stage or "", {})
        rates = {}
        for module, rate in given.items():
            default = decided.get(f"{module}_learning_rate", self.learning_rate)
            default = 0.0 if use_peft and module == "vision" else default
            rates[module] = default if rate is None else rate
        return rates


@dataclass
class ModelArguments(ModelConfig):
    """TRL's `ModelConfig`: which checkpoint, in which precision, with which adapters."""

    use_bnb_nested_quant: bool = field(
        default=True, metadata={"help": "Whether to quantize the constants of 4-bit quantization as well."}
    )


def _check_choice(options: Any, name: str, choices: tuple) -> None:
    # argparse checks no choice that comes from a YAML file.
    if (value := getattr(options, name)) not in choices:
        named = ", ".join(repr(choice) for choice in choices if choice is not None)
        raise ValueError(f"{name} must be one of {named}, got {value!r}.")


def _as_list(value: Any) -> list:
    return list(value) if isinstance(value, list | tuple) else [value]
