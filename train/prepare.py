# SPDX-License-Identifier: Apache-2.0
"""How a run is prepared, from options and from Python alike: everything is checked before weights are loaded."""

import copy
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from accelerate.logging import get_logger
from datasets import Dataset, IterableDataset
from peft import PeftConfig, PeftModel
from torch import nn
from transformers import BitsAndBytesConfig, DataCollator, LlavaProcessor, TrainingArguments
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.trainer_utils import HubStrategy

from ..assembly.arms import arm_of
from ..assembly.processing import settle
from ..checkpoint.opening import Checkpoint, open_checkpoint
from ..checkpoint.precision import warn_if_slow
from ..configuration_normalign_llava import NormAlignLlavaConfig
from ..data.rows.checks import MANY_ROWS, Checks
from ..data.rows.parse import DroppedRows
from ..data.rows.reports import DataReport, SourceReport
from ..data.sources.arguments import DataArguments
from ..data.sources.mixtures import load_data, prepare_rows
from ..modeling_normalign_llava import NormAlignLlavaForConditionalGeneration
from .collator import ConversationCollator
from .command import NO_MODEL
from .memory import largest_batch
from .modules.load import (
    check_architecture,
    check_checkpoint,
    check_quantized,
    config_of_arm,
    frozen_dtype,
    load_model,
    settle_float16,
)
from .modules.model import MODULES
from .options.arguments import NormAlignConfig


logger = get_logger(__name__)  # logs in one process only

DROPPED_ROWS = "dropped_rows.jsonl"
"""File in `output_dir` with the rows that were dropped, and why."""


@dataclass(frozen=True)
class Prepared:
    """A run that is checked and loaded; `checkpoint` is None if a model was passed in place of its folder."""

    model: NormAlignLlavaForConditionalGeneration
    collator: DataCollator
    train_dataset: Dataset | IterableDataset
    eval_dataset: Dataset | IterableDataset | dict[str, Dataset | IterableDataset] | None
    processor: LlavaProcessor
    peft_config: PeftConfig | None
    learning_rates: dict[str, float]
    report: DataReport
    checkpoint: Checkpoint | None


def prepare(
    model: Any,
    args: NormAlignConfig,
    *,
    collator: DataCollator | None,
    train_dataset: Any,
    eval_dataset: Any,
    processor: Any,
    quantization_config: BitsAndBytesConfig | None,
    peft_config: PeftConfig | None,
    optimizer_cls_and_kwargs: tuple[Any, dict[str, Any]] | None,
    compares_rows: bool,
) -> Prepared:
    """Checks the arguments of [`NormAlignTrainer`], reads what they name, and completes `args` in place.

    Options come first, then checkpoint and adapters, then the rows, and last the weights.
    """
    if getattr(model, "hf_device_map", None) is None:
        check_one_gpu(args)
    if args.dry_run and is_deepspeed_zero3_enabled():
        raise ValueError("dry_run cannot count ZeRO-3. Count with fsdp2, which divides as much.")
    if optimizer_cls_and_kwargs is not None and "lr" in optimizer_cls_and_kwargs[1]:
        args.learning_rate, args.learning_rate_is_given = optimizer_cls_and_kwargs[1]["lr"], True
    if args.push_to_hub and args.process_index == 0 and not args.dry_run:
        from ..hub_cards.push.repository import log_in

        log_in(args.hub_model_id or Path(args.output_dir).absolute().name, args.hub_token)
    args.gradient_accumulation_steps = accumulation_steps(args)
    if args.process_index == 0 and not args.dry_run:
        for dtype in ("bfloat16" if args.bf16 else None, (args.model_init_kwargs or {}).get("dtype")):
            warn_if_slow(dtype, args.device.type)

    checkpoint, config = _checkpoint_and_config(model, args, quantization_config, peft_config)
    if checkpoint is not None:
        settled = {"revision": checkpoint.revision, "dtype": frozen_dtype(config, args)}
        args.model_init_kwargs = {**(args.model_init_kwargs or {}), **settled}
    if peft_config is not None:
        from .modules.adapter import language_adapter

        peft_config = language_adapter(peft_config, config, args.learning_rates(use_peft=True))
        peft_config.revision = checkpoint.revision if checkpoint else None  # PEFT stores the base's name alone
    if quantization_config is not None:
        check_quantized(config, quantization_config, args, peft_config)
    rates = args.learning_rates(peft_config is not None)
    # That of the optimizer's first group: it is logged, and schedules take min_lr as a share of it.
    args.learning_rate = next((rates[module] for module in MODULES if rates[module]), args.learning_rate)

    processor = _processor(processor, model, checkpoint)
    named = train_dataset if isinstance(train_dataset, DataArguments) else None
    if named and (collator or eval_dataset):
        raise ValueError("DataArguments name held-out rows too, and have a collator. Leave eval_dataset and that out.")
    collator = collator or _collator(processor, args, named)
    check_collator(collator, args, compares_rows)
    args.padding_free = getattr(collator, "padding_free", False)
    need_images = args.stage == "align" or not rates["language"]
    if named:
        data = load_data(
            named,
            processor,
            max_length=args.max_length,
            seed=args.seed,
            with_eval=args.eval_strategy != "no",
            need_images=need_images,
            dropped_rows=collator.dropped_rows,
            num_proc=args.dataset_num_proc,
        )
        train_dataset, eval_dataset, report = data.train, data.eval, data.report
    else:
        train_dataset, eval_dataset, report = _checked_data(train_dataset, eval_dataset, collator, args, need_images)
    streams = isinstance(train_dataset, IterableDataset)
    if streams:
        prepare_stream(args)
    if isinstance(collator, ConversationCollator):
        readers = args.world_size * max(1, args.dataloader_num_workers or 0)  # each counts what it skips
        skippable = sum(source.skippable for source in report.sources)
        share = skippable / (MANY_ROWS * max(1, len(report.sources))) if streams else 0.0
        collator = replace(collator, skippable=skippable // readers, share=share)
    _warn_of_length(report, config)
    # TRL does so for a stream of training rows alone; held-out rows may be one too.
    args.accelerator_config.dispatch_batches = False

    if checkpoint is not None:
        model = load_model(checkpoint, args, rates, quantization_config, peft_config is not None)
    if args.fp16_is_tried and not args.dry_run:
        settle_float16(model, args, largest_batch(args, train_dataset, collator))
    return Prepared(model, collator, train_dataset, eval_dataset, processor, peft_config, rates, report, checkpoint)


def _checkpoint_and_config(
    model: Any,
    args: NormAlignConfig,
    quantization_config: BitsAndBytesConfig | None,
    peft_config: PeftConfig | None,
) -> tuple[Checkpoint | None, NormAlignLlavaConfig]:
    """The checkpoint that is named, if one is, and the configuration of the model to train.

    Raises:
        ValueError: It has another architecture, another arm than `args` says, or adapters, or cannot be quantized.
    """
    if not isinstance(model, nn.Module):
        if quantization_config is not None and is_deepspeed_zero3_enabled():
            raise ValueError("load_in_4bit and load_in_8bit cannot be used with ZeRO-3. Use ddp or zero2.")
        checkpoint = open_checkpoint(model, (args.model_init_kwargs or {}).get("revision"), remedy=NO_MODEL)
        check_checkpoint(checkpoint, args)
        return checkpoint, config_of_arm(checkpoint, args.arm)
    if quantization_config is not None:
        raise ValueError("quantization_config is for a model that is loaded here. Load yours with it.")
    if isinstance(model, PeftModel):
        raise ValueError(
            "The model has adapters. Give it without them and peft_config, or merge them first with `normalign merge` "
            "or model.merge_and_unload()."
        )
    if peft_config is None and getattr(model.config, "quantization_config", None) is not None:
        raise ValueError(
            "Without adapters, what is quantized is saved as the model's folder has it. Give that folder and "
            "quantization_config in place of the model."
        )
    check_architecture(model.config.model_type, model.name_or_path or type(model).__name__)
    if args.arm not in (None, arm := arm_of(model.config)):
        raise ValueError(f"The model is of arm {arm!r}. To train it as arm {args.arm!r}, give its path.")
    return None, model.config


def _processor(processor: Any, model: Any, checkpoint: Checkpoint | None) -> LlavaProcessor:
    """The processor, by default the one in the model's folder or commit."""
    if processor is None:
        if checkpoint is None and not model.name_or_path:
            raise ValueError("The model names no folder to load its processor from. Give processing_class.")
        processor = (checkpoint or open_checkpoint(model.name_or_path)).processor
    if not isinstance(processor, LlavaProcessor):
        raise ValueError(
            f"processing_class is a {type(processor).__name__}, which reads no images. Give a LlavaProcessor, or "
            "leave it out: it is loaded from the checkpoint."
        )
    settle(processor)
    return processor


def _collator(processor: LlavaProcessor, args: NormAlignConfig, named: DataArguments | None) -> ConversationCollator:
    """The collator of rows that options name, or of others. Of the former, dropped ones are listed in `output_dir`."""
    collator = ConversationCollator(processor, args.pad_to_multiple_of, padding_free=args.padding_free)
    if named is None:
        return collator
    dropped = None if args.dry_run else DroppedRows(Path(args.output_dir) / DROPPED_ROWS)
    return replace(collator, max_image_pixels=named.max_image_pixels, bad_rows=named.bad_rows, dropped_rows=dropped)


def _checked_data(
    train: Any, held_out: Any, collator: DataCollator, args: NormAlignConfig, need_images: bool
) -> tuple[Dataset | IterableDataset, Any, DataReport]:
    """[`checked_rows`] of the training and the held-out data (one data set or several by name), and one report."""
    train, *reports = checked_rows(train, "train_dataset", collator, args, need_images=need_images)
    several = held_out if isinstance(held_out, dict) else {"eval_dataset": held_out}
    checked = {}
    for name, rows in several.items() if held_out is not None else ():
        checked[name], report = checked_rows(rows, name, collator, args, split="eval")
        reports.append(report)
    held_out = checked if isinstance(held_out, dict) else checked.get("eval_dataset")
    return train, held_out, DataReport([report for report in reports if report is not None])


def checked_rows(
    rows: Any,
    name: str,
    collator: DataCollator,
    args: NormAlignConfig,
    *,
    split: Literal["train", "eval"] = "train",
    need_images: bool = False,
) -> tuple[Dataset | IterableDataset, SourceReport | None]:
    """Rows in the form that `collator` takes, and a report; for a collator of another kind, rows as they are."""
    if not isinstance(rows, Dataset | IterableDataset):
        raise TypeError(
            f"{name} is a {type(rows).__name__}. Give a Dataset, as Dataset.from_list makes, or a stream, "
            f"by name: {name}=ROWS."
        )
    if not isinstance(collator, ConversationCollator):
        if args.train_sampling_strategy == "group_by_length" and "length" not in (rows.column_names or ()):
            raise ValueError(
                "train_sampling_strategy group_by_length needs the lengths of rows, which a data_collator of your own "
                f"does not give. Give {name} a column length, or leave it out."
            )
        return rows, None
    checks = Checks(
        collator.processor,
        args.max_length,
        collator.bad_rows,
        max_image_pixels=collator.max_image_pixels,
        dropped_rows=collator.dropped_rows,
        processes=args.dataset_num_proc,
    )
    return prepare_rows(rows, checks, name=name, split=split, need_images=need_images)


def _warn_of_length(report: DataReport, config: NormAlignLlavaConfig) -> None:
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions and (longest := max([source.longest or 0 for source in report.sources], default=0)) > positions:
        logger.warning(
            f"Rows have up to {longest:,} tokens, and the language model has {positions:,} positions. Longer rows are "
            f"dropped with --max_length {positions}."
        )


def prepare_stream(args: NormAlignConfig) -> None:
    """Has one process at most read a stream. Raises ValueError if options need its length, or that of its rows."""
    if args.max_steps <= 0:
        raise ValueError("A streamed data set has no length. Set max_steps.")
    grouped = args.train_sampling_strategy == "group_by_length"
    if grouped or args.packing:
        name = "train_sampling_strategy group_by_length" if grouped else "packing"
        raise ValueError(f"{name} needs the lengths of all rows, and a stream has none. Leave one of them out.")
    args.dataloader_num_workers = min(1, args.dataloader_num_workers or 0)  # it has a single shard


def check_collator(collator: DataCollator, args: NormAlignConfig, compares_rows: bool) -> None:
    """Raises ValueError if options need a collator of another kind."""
    padding_free = getattr(collator, "padding_free", False)
    has_lengths = isinstance(collator, ConversationCollator)
    if args.padding_free and not (padding_free and (has_lengths or not args.packing)):
        name = "packing" if args.packing else "padding_free"
        raise ValueError(f"{name} needs a ConversationCollator with padding_free. Give it, or no data_collator.")
    if unread := (args.dataset_kwargs or {}).keys() - {"skip_prepare_dataset"}:
        logger.warning(f"dataset_kwargs has {', '.join(sorted(unread))}, which nothing reads. Leave it out.")
    if padding_free and compares_rows:
        raise ValueError("compute_metrics compares rows, and padding_free leaves none. Leave one of them out.")


def normalign_config(
    args: TrainingArguments | None, model: Any, collator: DataCollator | None = None
) -> NormAlignConfig:
    """A copy of the options as `NormAlignConfig`. An `SFTConfig` means what it means in TRL, with four exceptions.

    The loss is on the assistant's turns even if `assistant_only_loss` is false, with a warning: on every token, image
    tokens would be labels. (A collator of another kind makes its own labels.) Rows longer than `max_length` are
    dropped, not cut. `packing` keeps the rows of each step. Nothing is pushed before the end of training.
    """
    if args is None:
        return NormAlignConfig(f"{Path(str(getattr(model, 'name_or_path', model))).name}-SFT")
    if isinstance(args, NormAlignConfig):
        return copy.copy(args)
    known = {field.name for field in fields(NormAlignConfig) if field.init}
    options = {field.name: getattr(args, field.name) for field in fields(args) if field.name in known}
    if not options.get("assistant_only_loss") and (collator is None or isinstance(collator, ConversationCollator)):
        logger.warning("assistant_only_loss is False, but the loss is on the assistant's turns alone: set it to True.")
    options |= {"assistant_only_loss": True, "remove_unused_columns": False}
    if options.get("hub_strategy") == HubStrategy.EVERY_SAVE:  # TRL's default
        options["hub_strategy"] = HubStrategy.END
    return NormAlignConfig(**options)


def check_one_gpu(args: TrainingArguments) -> None:
    """Raises ValueError if this process sees several GPUs, which TRL refuses after loading, without a device_map."""
    if args.n_gpu > 1 and "device_map" not in (args.model_init_kwargs or {}):
        raise ValueError(
            f"This process sees {args.n_gpu} GPUs and trains on one. Show it one with CUDA_VISIBLE_DEVICES=0, or "
            f"start a process for each: `normalign train RECIPE --accelerate_config ddp --num_processes {args.n_gpu}`."
        )


def accumulation_steps(args: NormAlignConfig, world_size: int | None = None) -> int:
    """Forward passes per optimizer step that give the global batch on any number of processes."""
    config = args.accelerator_config
    if config.split_batches or config.dispatch_batches or "num_steps" in (config.gradient_accumulation_kwargs or {}):
        raise ValueError(
            "accelerator_config's split_batches, dispatch_batches and num_steps would change the rows in an optimizer "
            "step. Leave them out, and set global_batch_size."
        )
    if args.global_batch_size is None:
        return args.gradient_accumulation_steps
    world_size = world_size or args.world_size
    together = args.per_device_train_batch_size * world_size
    steps, rest = divmod(args.global_batch_size, together)
    product = f"per_device_train_batch_size {args.per_device_train_batch_size} x {world_size} process(es)"
    if rest or not steps:
        raise ValueError(
            f"global_batch_size {args.global_batch_size} is not a multiple of {product} = {together}. Change one."
        )
    if args.gradient_accumulation_steps not in (1, steps):
        raise ValueError(
            f"{product} x gradient_accumulation_steps {args.gradient_accumulation_steps} is not global_batch_size "
            f"{args.global_batch_size}. Leave gradient_accumulation_steps out: it is derived, and would be {steps}."
        )
    return steps
