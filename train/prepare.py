# SPDX-License-Identifier: Apache-2.0
"""The plan of a run: what [`NormAlignTrainer`] checks and reads before weights are loaded."""

import copy
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from accelerate.logging import get_logger
from datasets import Dataset, IterableDataset
from peft import LoraConfig, PeftConfig, PeftModel
from torch import nn
from transformers import BitsAndBytesConfig, DataCollator, LlavaProcessor, TrainingArguments
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.trainer_utils import HubStrategy

from ..assembly.arms import arm_of
from ..assembly.processing import normalize_tokenization
from ..checkpoint.files import PICKLES
from ..checkpoint.opening import Checkpoint, open_checkpoint
from ..checkpoint.precision import warn_if_slow
from ..configuration_normalign_llava import NormAlignLlavaConfig
from ..data.rows.checks import MANY_ROWS, Checks, DataReport, SourceReport
from ..data.rows.parse import DroppedRows
from ..data.sources.arguments import DataArguments
from ..data.sources.mixtures import load_data, prepare_rows
from .collator import SKIPPED_ROWS, ConversationCollator, SkippedRows
from .command import NO_MODEL
from .modules.load import check_architecture, config_of_arm, frozen_dtype
from .modules.sizes import OptimizerClass
from .options import NormAlignConfig
from .samplers import passes_in_step, rows_in_step
from .settings import Precision, RunConfig, best_metric, check_fsdp, complete


logger = get_logger(__name__)  # logs in one process only

Rows: TypeAlias = Dataset | IterableDataset

DROPPED_ROWS = "dropped_rows.jsonl"
"""File in `output_dir` with the rows that were dropped, and why."""


@dataclass(frozen=True)
class GivenModel:
    """What a person gives of the model: see [`NormAlignTrainer`]."""

    model: Any
    processor: LlavaProcessor | None = None
    quantization: BitsAndBytesConfig | None = None
    adapters: PeftConfig | None = None


@dataclass(frozen=True)
class GivenData:
    """What a person gives of the data: see [`NormAlignTrainer`]."""

    train: Rows | DataArguments | None
    held_out: Rows | dict[str, Rows] | None = None
    collator: DataCollator | None = None


@dataclass(frozen=True)
class OpenedModel:
    """A model before its weights are loaded.

    Attributes:
        model: The model itself, or the name of its checkpoint.
        checkpoint: The checkpoint, unless the model itself was given.
        config: The configuration that the model has, or will have.
        processor: A LLaVA processor that agrees with the model.
        adapters: The adapters to train.
        quantization: How the model will be quantized when it is loaded.
        init_kwargs: The arguments of `from_pretrained`.
    """

    model: Any
    checkpoint: Checkpoint | None
    config: NormAlignLlavaConfig
    processor: LlavaProcessor
    adapters: LoraConfig | None
    quantization: BitsAndBytesConfig | None
    init_kwargs: dict[str, Any] | None


@dataclass(frozen=True)
class CheckedData:
    """Rows that were checked, what collates them, and what was counted."""

    train: Rows
    held_out: Any
    collator: DataCollator
    report: DataReport


@dataclass(frozen=True)
class Plan:
    """Everything that follows from the arguments of a trainer. Nothing in it changes.

    Attributes:
        settings: All options, with their values on this machine and with these rows.
        precision: The precision of steps, and why.
        learning_rates: The peak learning rate of each module, 0 if it is frozen.
        model: The model before its weights are loaded.
        data: The rows, what collates them, and the report of what was read and dropped.
        optimizer: The optimizer's class and arguments, if they were given.
    """

    settings: RunConfig
    precision: Precision
    learning_rates: dict[str, float]
    model: OpenedModel
    data: CheckedData
    optimizer: OptimizerClass | None

    def trainer_config(self) -> RunConfig:
        """Returns a copy of the options that TRL's trainer may change."""
        config = copy.copy(self.settings)
        config.accelerator_config = copy.copy(config.accelerator_config)
        return config


def prepare(
    args: TrainingArguments | None,
    model: GivenModel,
    data: GivenData,
    *,
    optimizer: OptimizerClass | None = None,
    has_metrics: bool = False,
) -> Plan:
    """Checks everything that can be checked before weights are loaded, and plans the run.

    All processes of a run must call it together. It may open the process group, and fetches files
    of the checkpoint and data from the Hub.

    Args:
        args: The options. `None` means the defaults. They are not changed.
        model: The model, and how it is loaded.
        data: The rows, and what collates them.
        optimizer: The optimizer's class and arguments. Its `lr` replaces `learning_rate`.
        has_metrics: Whether the trainer was given `compute_metrics`.

    Raises:
        ValueError: Options, model or rows cannot be used, or do not go together.
        TypeError: The options, the model, its quantization or the rows have the wrong type.
        OSError: A file of the checkpoint or the data cannot be read or fetched.
    """
    given = given_options(args, model.model, data.collator)
    if optimizer is not None and "lr" in optimizer[1]:
        given = replace(given, learning_rate=optimizer[1]["lr"])
    settings, precision = complete(given)
    if has_metrics and getattr(data.collator or settings, "padding_free", False):
        raise ValueError("compute_metrics needs rows, but padding_free joins them. Leave one out.")
    check_options(settings, model.model)
    settings.set_derived(gradient_accumulation_steps=accumulation_steps(settings))

    opened = open_model(model, settings)
    settings.set_derived(model_init_kwargs=opened.init_kwargs)
    learning_rates = settings.learning_rates(opened.adapters is not None)

    checked = read_data(data, opened.processor, settings, learning_rates)
    check_best_metric(settings, checked.held_out, has_metrics)
    longest = max([source.longest or 0 for source in checked.report.sources], default=0)
    positions = getattr(opened.config.get_text_config(), "max_position_embeddings", None)
    if positions and longest > positions:
        logger.warning(
            f"Rows have up to {longest:,} tokens, and the language model has {positions:,} "
            f"positions. --max_length {positions} drops longer rows."
        )
    settings.set_derived(
        padding_free=getattr(checked.collator, "padding_free", False),
        # Each process reads its rows itself, and gets no batches from another. TRL sets this only
        # for a stream of training rows, and held-out rows may be a stream too.
        accelerator_config=replace(settings.accelerator_config, dispatch_batches=False),
    )
    if isinstance(checked.train, IterableDataset):  # a stream has one shard, for one worker
        settings.set_derived(dataloader_num_workers=min(1, settings.dataloader_num_workers or 0))
    if settings.packing:
        settings.set_derived(
            global_batch_size=rows_in_step(settings),
            gradient_accumulation_steps=passes_in_step(settings, checked.train),
        )
    return Plan(settings, precision, learning_rates, opened, checked, optimizer)


def given_options(
    args: TrainingArguments | None, model: Any, collator: DataCollator | None = None
) -> NormAlignConfig:
    """Returns the options as `NormAlignConfig`.

    An `SFTConfig` means the same as in TRL, with four exceptions. The loss is on the assistant's
    turns, unless another collator makes the labels. Long rows are dropped, not cut. `packing` keeps
    the rows of each step. Only the final model is pushed to the Hub.

    Raises:
        ValueError: An option has a value that is refused.
        TypeError: The options have another type.
    """
    if args is None:
        return NormAlignConfig(f"{Path(str(getattr(model, 'name_or_path', model))).name}-SFT")
    if isinstance(args, RunConfig):
        return args.to_give()
    if isinstance(args, NormAlignConfig):
        return args
    if not isinstance(args, TrainingArguments):
        raise TypeError(f"args is a {type(args).__name__}. Give a NormAlignConfig.")
    known = NormAlignConfig.__dataclass_fields__
    options = {option: value for option, value in vars(args).items() if option in known}
    is_ours = collator is None or isinstance(collator, ConversationCollator)
    if is_ours and not options.get("assistant_only_loss"):
        problem = "assistant_only_loss is False, but the loss is on the assistant's turns"
        logger.warning(f"{problem}. Set it to True.")
    options.update(
        assistant_only_loss=True,
        remove_unused_columns=False,
        sample_count=0,  # TRL's trainer answers nothing
    )
    if options.get("hub_strategy") == HubStrategy.EVERY_SAVE:  # TRL's default
        options["hub_strategy"] = HubStrategy.END
    return NormAlignConfig(**options)


def check_options(settings: RunConfig, model: Any) -> None:
    """Checks that options can be used here, with this model and by this account.

    The Hub is asked if the result is to be pushed.

    Raises:
        ValueError: An option cannot be used, or this account cannot publish to the repository.
        OSError: The Hub cannot be reached.
    """
    check_fsdp(settings)
    init_kwargs = settings.model_init_kwargs or {}
    is_placed = getattr(model, "hf_device_map", None) or "device_map" in init_kwargs
    if settings.n_gpu > 1 and not is_placed:  # TRL refuses several GPUs after loading
        gpus = settings.n_gpu
        raise ValueError(
            f"This process sees {gpus} GPUs and trains on one. Set CUDA_VISIBLE_DEVICES=0, or "
            "start a process for each: `normalign train RECIPE --accelerate_config ddp "
            f"--num_processes {gpus}`."
        )
    if settings.dry_run and is_deepspeed_zero3_enabled():
        raise ValueError("dry_run cannot count ZeRO-3. Count with fsdp2: it divides as much.")
    if settings.packing and settings.max_length is None:
        raise ValueError("packing fills forward passes up to max_length tokens. Set --max_length.")
    if settings.process_index != 0:
        return
    if settings.push_to_hub:
        check_repository(settings)
    if not settings.dry_run:
        warn_if_slow("bfloat16" if settings.bf16 else None, settings.device.type)
        warn_if_slow(init_kwargs.get("dtype"), settings.device.type)


def check_repository(settings: RunConfig) -> None:
    """Raises ValueError or OSError unless this account can publish to the repository of a run."""
    from ..hub_cards.card.metadata import check_replaceable
    from ..hub_cards.push.repository import check_files_of_others, find_repository, log_in

    repository_name = settings.hub_model_id or Path(settings.output_dir).absolute().name
    api = log_in(repository_name, settings.hub_token)
    if "/" not in repository_name:
        repository_name = f"{api.whoami()['name']}/{repository_name}"
    repository = find_repository(api, repository_name, branch=settings.hub_revision or "main")
    check_replaceable(repository.card, repository_name)
    check_files_of_others(repository)


def open_model(given: GivenModel, settings: RunConfig) -> OpenedModel:
    """Opens the model, its processor and its adapters, and checks them.

    Raises:
        ValueError: One of them cannot be used.
        TypeError: The model or the quantization has the wrong type.
        OSError: A file of the checkpoint cannot be read or fetched.
    """
    checkpoint = None
    init_kwargs = settings.model_init_kwargs
    if isinstance(given.model, nn.Module):
        check_model(given, settings.arm)
        config = given.model.config
    else:
        checkpoint = open_named(given, settings)
        config = config_of_arm(checkpoint, settings.arm)
        dtype = frozen_dtype(config, settings)
        init_kwargs = {**(init_kwargs or {}), "revision": checkpoint.revision, "dtype": dtype}

    if not isinstance(given.quantization, BitsAndBytesConfig | None):
        kind = type(given.quantization).__name__
        raise TypeError(f"quantization_config is a {kind}. Give a BitsAndBytesConfig.")
    adapters = None
    if given.adapters is not None:
        from .modules.adapter import language_adapter  # late: few runs have one

        rates = settings.learning_rates(use_peft=True)
        adapters = language_adapter(given.adapters, config, rates)
        adapters.revision = checkpoint.revision if checkpoint else None  # PEFT stores only a name
    if given.quantization is not None:
        from .modules.adapter import check_quantized

        rate = settings.learning_rates(use_peft=False)["language"]
        check_quantized(config, given.quantization, rate, adapters)

    processor = given.processor
    if processor is None:
        if checkpoint is None and not given.model.name_or_path:
            raise ValueError("The model names no folder with its processor. Give processing_class.")
        processor = (checkpoint or open_checkpoint(given.model.name_or_path)).processor
    if not isinstance(processor, LlavaProcessor):
        type_name = type(processor).__name__
        raise ValueError(f"processing_class is a {type_name}. Give a LlavaProcessor, or none.")
    normalize_tokenization(processor)
    return OpenedModel(
        model=given.model,
        checkpoint=checkpoint,
        config=config,
        processor=processor,
        adapters=adapters,
        quantization=given.quantization,
        init_kwargs=init_kwargs,
    )


def check_model(given: GivenModel, arm: str | None) -> None:
    """Raises ValueError unless a model that was loaded before can be trained as `arm`."""
    model = given.model
    if given.quantization is not None:
        raise ValueError("quantization_config is for a model loaded here. Load yours with it.")
    if isinstance(model, PeftModel):
        raise ValueError("The model has adapters. Give peft_config, or merge them first.")
    is_quantized = getattr(model.config, "quantization_config", None) is not None
    if given.adapters is None and is_quantized:
        raise ValueError("To quantize without adapters, give a folder and quantization_config.")
    check_architecture(model.config.model_type, model.name_or_path or type(model).__name__)
    own_arm = arm_of(model.config)
    if arm not in (None, own_arm):
        raise ValueError(f"The model is of arm {own_arm!r}. To train {arm!r}, give its path.")


def open_named(given: GivenModel, settings: RunConfig) -> Checkpoint:
    """Opens the checkpoint to load.

    Raises:
        ValueError: The checkpoint cannot be trained.
        TypeError: The model has the wrong type.
        OSError: A file of the checkpoint cannot be read or fetched.
    """
    if not isinstance(given.model, str | os.PathLike):
        raise TypeError(f"model is a {type(given.model).__name__}. Give a folder, Hub id or model.")
    if given.quantization is not None and is_deepspeed_zero3_enabled():
        raise ValueError("load_in_4bit and load_in_8bit do not go with ZeRO-3. Use zero2.")
    revision = (settings.model_init_kwargs or {}).get("revision")
    checkpoint = open_checkpoint(os.path.expanduser(given.model), revision, remedy=NO_MODEL)
    folder = Path(checkpoint.name)
    if folder.exists() and folder.resolve() == Path(settings.output_dir).resolve():
        raise ValueError(f"--output_dir is the checkpoint to train, {folder}. Choose another.")
    check_architecture(checkpoint.model_type, checkpoint.name)
    suffixes = {file.suffix for file in folder.glob("*model*")}
    if not settings.dry_run or suffixes & {".safetensors", *PICKLES}:
        checkpoint.fetched_weight_bytes  # noqa: B018  (checked as in loading, before rows are read)
    return checkpoint


def make_collator(data: GivenData, processor: LlavaProcessor, settings: RunConfig) -> DataCollator:
    """Returns the given collator, or our own.

    Raises:
        ValueError: The collator does not go with the data or the options.
    """
    if isinstance(data.train, DataArguments) and (data.collator or data.held_out):
        raise ValueError("DataArguments name all rows. Leave eval_dataset and data_collator out.")
    joins_rows = settings.padding_free
    collator = data.collator or ConversationCollator(
        processor, settings.pad_to_multiple_of, padding_free=joins_rows
    )
    is_ours = isinstance(collator, ConversationCollator)
    can_join = getattr(collator, "padding_free", False) and (is_ours or not settings.packing)
    if joins_rows and not can_join:
        name = "packing" if settings.packing else "padding_free"
        raise ValueError(f"{name} needs a ConversationCollator with padding_free, or no collator.")
    return collator


def read_data(
    data: GivenData,
    processor: LlavaProcessor,
    settings: RunConfig,
    learning_rates: dict[str, float],
) -> CheckedData:
    """Reads and checks the rows, and gives a collator what it needs to count bad ones.

    The collator is the given one, or our own.

    Raises:
        ValueError: The rows cannot be trained on, or they or the collator do not go with the
            options.
        TypeError: The rows are not a data set.
        OSError: A file of the data cannot be read or fetched.
    """
    collator = make_collator(data, processor, settings)
    output_dir = Path(settings.output_dir)
    # Without an image, a row would train nothing.
    need_images = settings.stage == "align" or not learning_rates["language"]
    if isinstance(data.train, DataArguments):
        dropped_rows = None
        if not settings.dry_run:
            dropped_rows = DroppedRows(output_dir / DROPPED_ROWS)
        collator = replace(collator, bad_rows=data.train.bad_rows, dropped_rows=dropped_rows)
        named_data = load_data(
            data.train,
            processor,
            seed=settings.seed,
            with_eval=settings.eval_strategy != "no",
            need_images=need_images,
            max_length=settings.max_length,
            dropped_rows=dropped_rows,
            processes=settings.dataset_num_proc,
        )
        checked = CheckedData(named_data.train, named_data.eval, collator, named_data.report)
    else:
        checked = check_given(data, collator, settings, need_images)
    sources = checked.report.sources
    skippable = sum(source.skippable for source in sources)
    share = 0.0
    if isinstance(checked.train, IterableDataset):
        check_stream(settings)
        share = skippable / (MANY_ROWS * max(1, len(sources)))
    if not isinstance(collator, ConversationCollator):
        return checked
    collator = replace(collator, skippable=skippable, share=share)
    if not settings.dry_run:  # all processes of the run have this file, and a resumed run has it
        collator.skipped_rows = SkippedRows(output_dir / SKIPPED_ROWS)
    return replace(checked, collator=collator)


def check_given(
    data: GivenData, collator: DataCollator, settings: RunConfig, need_images: bool
) -> CheckedData:
    """Checks rows that were given in memory or as a stream. Raises what [`read_data`] raises."""
    train, reports = checked_rows(
        data.train, "train_dataset", collator, settings, "train", need_images
    )
    held_out: Any = None
    if isinstance(data.held_out, dict):
        held_out = {}
        for data_name, held_out_rows in data.held_out.items():
            held_out[data_name], further_reports = checked_rows(
                held_out_rows, data_name, collator, settings
            )
            reports += further_reports
    elif data.held_out is not None:
        held_out, further_reports = checked_rows(data.held_out, "eval_dataset", collator, settings)
        reports += further_reports
    return CheckedData(train, held_out, collator, DataReport(reports))


def check_stream(settings: RunConfig) -> None:
    """Raises ValueError if a stream of training rows does not go with the options."""
    if settings.max_steps <= 0:
        raise ValueError("A streamed data set has no length. Set max_steps.")
    if settings.packing or settings.train_sampling_strategy == "group_by_length":
        raise ValueError("A stream lacks lengths for packing and group_by_length. Use neither.")


def check_best_metric(settings: RunConfig, held_out: Any, has_metrics: bool) -> None:
    """Raises ValueError if the metric of the best step is not measured on the held-out rows.

    The Trainer would find out when it saves its first checkpoint. Several data sets have their
    names in their metrics. The names of a person's own metrics are not known.
    """
    if not settings.load_best_model_at_end:
        return
    if held_out is None:
        raise ValueError("load_best_model_at_end needs held-out rows. Give eval_dataset.")
    metric = best_metric(settings)
    prefixes = ["eval_"]
    if isinstance(held_out, dict):
        prefixes = [f"eval_{name}_" for name in held_out]
    losses = [f"{prefix}loss" for prefix in prefixes]
    is_own = has_metrics and metric.startswith(tuple(prefixes))
    if metric not in losses and not is_own:
        raise ValueError(
            f"metric_for_best_model {metric} is not measured here. Set it to {' or '.join(losses)}."
        )


def checked_rows(
    rows: Rows | None,
    name: str,
    collator: DataCollator,
    settings: RunConfig,
    split: Literal["train", "eval"] = "eval",
    need_images: bool = False,
) -> tuple[Rows, list[SourceReport]]:
    """Returns rows for a [`ConversationCollator`], and their report.

    Rows for another collator stay as they are, and have no report.

    Raises:
        ValueError: The rows cannot be trained on.
        TypeError: The rows are not a data set.
    """
    if not isinstance(rows, Rows):
        type_name = type(rows).__name__
        raise TypeError(f"{name} is a {type_name}. Give a Dataset (Dataset.from_list) or a stream.")
    if not isinstance(collator, ConversationCollator):
        return rows, []
    checks = Checks(
        collator.processor,
        settings.max_length,
        collator.bad_rows,
        False,
        collator.dropped_rows,
        settings.dataset_num_proc,
    )
    prepared, report = prepare_rows(rows, checks, name=name, split=split, need_images=need_images)
    return prepared, [report]


def accumulation_steps(settings: RunConfig) -> int:
    """Returns the forward passes of an optimizer step that give the global batch.

    Raises:
        ValueError: No number of passes gives it, or another number was asked for.
    """
    accelerator = settings.accelerator_config
    accumulation = settings.gradient_accumulation_steps
    in_config = accelerator.gradient_accumulation_kwargs or {}
    if accelerator.split_batches or accelerator.dispatch_batches or "num_steps" in in_config:
        raise ValueError("accelerator_config would change the rows in a step. Leave it out.")
    global_batch = settings.global_batch_size
    if global_batch is None:
        return accumulation
    rows_in_pass = settings.per_device_train_batch_size
    passes, remainder = divmod(global_batch, rows_in_pass * settings.world_size)
    if remainder or not passes:
        product = f"per_device_train_batch_size {rows_in_pass} x {settings.world_size} process(es)"
        raise ValueError(
            f"global_batch_size {global_batch} is not a multiple of {product}. Change one."
        )
    if accumulation not in (1, passes):
        raise ValueError(
            f"gradient_accumulation_steps {accumulation} contradicts global_batch_size "
            f"{global_batch}. Leave gradient_accumulation_steps out: {passes} would be derived."
        )
    return passes
