# SPDX-License-Identifier: Apache-2.0
"""What [`NormAlignTrainer`] checks before weights are loaded: options, model, adapters, rows."""

import copy
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from accelerate.logging import get_logger
from datasets import Dataset, IterableDataset
from peft import LoraConfig, PeftConfig, PeftModel
from torch import nn
from transformers import BitsAndBytesConfig, DataCollator, LlavaProcessor, TrainingArguments
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.trainer_utils import HubStrategy

from ..assembly.processing import arm_of, settle
from ..checkpoint.files import PICKLES
from ..checkpoint.opening import Checkpoint, open_checkpoint
from ..checkpoint.precision import warn_if_slow
from ..configuration_normalign_llava import NormAlignLlavaConfig
from ..data.rows.checks import MANY_ROWS, Checks, DataReport, SourceReport
from ..data.rows.parse import DroppedRows
from ..data.sources.arguments import DataArguments
from ..data.sources.mixtures import load_data, prepare_rows
from .collator import ConversationCollator, passes_in_step, rows_in_step
from .command import NO_MODEL
from .keeping.skipped import SKIPPED_ROWS, SkippedRows
from .modules.load import check_architecture, config_of_arm, frozen_dtype
from .options import NormAlignConfig, best_metric, check_fsdp


logger = get_logger(__name__)  # logs in one process only

Rows: TypeAlias = Dataset | IterableDataset

DROPPED_ROWS = "dropped_rows.jsonl"
"""File in `output_dir` with the rows that were dropped, and why."""


def normalign_config(
    args: TrainingArguments | None, model: Any, collator: Any = None
) -> NormAlignConfig:
    """A copy of the options as `NormAlignConfig`. An `SFTConfig` means what it does in TRL, but:

    The loss is on the assistant's turns, unless another collator makes the labels. Long rows are
    dropped, not cut. `packing` keeps the rows of each step. Only the end is pushed.
    """
    if args is None:
        return NormAlignConfig(f"{Path(str(getattr(model, 'name_or_path', model))).name}-SFT")
    if isinstance(args, NormAlignConfig):
        own = copy.copy(args)
        own.accelerator_config = copy.copy(args.accelerator_config)
        return own
    known = {field.name for field in fields(NormAlignConfig) if field.init}
    options = {name: value for name, value in vars(args).items() if name in known}
    is_ours = collator is None or isinstance(collator, ConversationCollator)
    if is_ours and not options.get("assistant_only_loss"):
        fact = "assistant_only_loss is False, but the loss is on the assistant's turns"
        logger.warning(f"{fact}. Set it to True.")
    options |= {"assistant_only_loss": True, "remove_unused_columns": False}
    options["sample_count"] = 0  # TRL's trainer answers nothing
    if options.get("hub_strategy") == HubStrategy.EVERY_SAVE:  # TRL's default
        options["hub_strategy"] = HubStrategy.END
    return NormAlignConfig(**options)


def check_options(args: NormAlignConfig, model: Any) -> None:
    """Checks that options can be used here and by this account; sets the accumulation."""
    check_fsdp(args)
    init_kwargs = args.model_init_kwargs or {}
    is_placed = getattr(model, "hf_device_map", None) or "device_map" in init_kwargs
    if args.n_gpu > 1 and not is_placed:  # which TRL refuses after loading
        several = f"normalign train RECIPE --accelerate_config ddp --num_processes {args.n_gpu}"
        raise ValueError(
            f"This process sees {args.n_gpu} GPUs and trains on one. Set CUDA_VISIBLE_DEVICES=0, "
            f"or start a process for each: `{several}`."
        )
    if args.dry_run and is_deepspeed_zero3_enabled():
        raise ValueError("dry_run cannot count ZeRO-3. Count with fsdp2, which divides as much.")
    if args.packing and args.max_length is None:
        raise ValueError("packing fills forward passes up to max_length tokens. Set --max_length.")
    args.let_follow("gradient_accumulation_steps", accumulation_steps(args))
    if args.process_index != 0:
        return
    if args.push_to_hub:
        from ..hub_cards.card.metadata import check_replaceable
        from ..hub_cards.push.record import check_files_of_others
        from ..hub_cards.push.repository import find_repository, log_in

        name = args.hub_model_id or Path(args.output_dir).absolute().name
        api = log_in(name, args.hub_token)
        name = name if "/" in name else f"{api.whoami()['name']}/{name}"
        repository = find_repository(api, name, branch=args.hub_revision or "main")
        check_replaceable(repository.card, name)
        check_files_of_others(repository)
    if not args.dry_run:
        for dtype in ("bfloat16" if args.bf16 else None, init_kwargs.get("dtype")):
            warn_if_slow(dtype, args.device.type)


def open_model(
    model: Any,
    processor: LlavaProcessor | None,
    args: NormAlignConfig,
    quantization: BitsAndBytesConfig | None,
    adapters: PeftConfig | None,
) -> tuple[Checkpoint | None, NormAlignLlavaConfig, LlavaProcessor, LoraConfig | None]:
    """The checkpoint, if `model` is a name; configuration, processor; configuration of adapters."""
    checkpoint = None
    if isinstance(model, nn.Module):
        if quantization is not None:
            raise ValueError("quantization_config is for a model loaded here. Load yours with it.")
        if isinstance(model, PeftModel):
            raise ValueError("The model has adapters. Give peft_config, or merge them first.")
        if adapters is None and getattr(model.config, "quantization_config", None) is not None:
            raise ValueError("To quantize without adapters, give a folder and quantization_config.")
        check_architecture(model.config.model_type, model.name_or_path or type(model).__name__)
        config = model.config
        if args.arm not in (None, arm := arm_of(config)):
            raise ValueError(f"The model is of arm {arm!r}. To train {args.arm!r}, give its path.")
    else:
        if quantization is not None and is_deepspeed_zero3_enabled():
            raise ValueError("load_in_4bit and load_in_8bit do not go with ZeRO-3. Use zero2.")
        init_kwargs = dict(args.model_init_kwargs or {})
        checkpoint = open_checkpoint(model, init_kwargs.get("revision"), remedy=NO_MODEL)
        folder = Path(checkpoint.name)
        if folder.exists() and folder.resolve() == Path(args.output_dir).resolve():
            raise ValueError(f"--output_dir is the checkpoint to train, {folder}. Choose another.")
        check_architecture(checkpoint.model_type, checkpoint.name)
        suffixes = {file.suffix for file in folder.glob("*model*")}
        if not args.dry_run or suffixes & {".safetensors", *PICKLES}:
            checkpoint.weight_bytes  # noqa: B018  (checked as in loading, before rows are read)
        config = config_of_arm(checkpoint, args.arm)
        args.model_init_kwargs = {**init_kwargs, "revision": checkpoint.revision}
        args.model_init_kwargs["dtype"] = frozen_dtype(config, args)
    if adapters is not None or quantization is not None:
        from .modules.adapter import check_quantized, language_adapter  # late: few runs have them
    if adapters is not None:
        adapters = language_adapter(adapters, config, args.learning_rates(use_peft=True))
        adapters.revision = checkpoint.revision if checkpoint else None  # PEFT stores a name alone
    if quantization is not None:
        check_quantized(config, quantization, args, adapters)
    if processor is None:
        if checkpoint is None and not model.name_or_path:
            raise ValueError("The model names no folder with its processor. Give processing_class.")
        processor = (checkpoint or open_checkpoint(model.name_or_path)).processor
    if not isinstance(processor, LlavaProcessor):
        kind = type(processor).__name__
        raise ValueError(f"processing_class is a {kind}. Give a LlavaProcessor, or none.")
    settle(processor)
    return checkpoint, config, processor, adapters


def read_data(
    train: Rows | DataArguments | None,
    held_out: Rows | dict[str, Rows] | None,
    collator: DataCollator | None,
    processor: LlavaProcessor,
    config: NormAlignLlavaConfig,
    args: NormAlignConfig,
    need_images: bool,
) -> tuple[Rows, Any, DataCollator, DataReport]:
    """Training rows, held-out rows (or several data sets by name), their collator, and a report."""
    named = train if isinstance(train, DataArguments) else None
    if named and (collator or held_out):
        raise ValueError("DataArguments name all rows. Leave eval_dataset and data_collator out.")
    multiple, free = args.pad_to_multiple_of, args.padding_free
    collator = collator or ConversationCollator(processor, multiple, padding_free=free)
    is_ours = isinstance(collator, ConversationCollator)
    args.padding_free = getattr(collator, "padding_free", False)
    if free and not (args.padding_free and (is_ours or not args.packing)):
        name = "packing" if args.packing else "padding_free"
        raise ValueError(f"{name} needs a ConversationCollator with padding_free, or no collator.")
    if named:
        dropped = None if args.dry_run else DroppedRows(Path(args.output_dir) / DROPPED_ROWS)
        collator = replace(collator, bad_rows=named.bad_rows, dropped_rows=dropped)
        data = load_data(
            named,
            processor,
            seed=args.seed,
            with_eval=args.eval_strategy != "no",
            need_images=need_images,
            max_length=args.max_length,
            dropped_rows=dropped,
            processes=args.dataset_num_proc,
        )
        train, held_out, report = data.train, data.eval, data.report
    else:
        train, *reports = checked_rows(train, "train_dataset", collator, args, "train", need_images)
        several = held_out if isinstance(held_out, dict) else {"eval_dataset": held_out}
        checked = {}
        for name, rows in several.items() if held_out is not None else ():
            checked[name], counted = checked_rows(rows, name, collator, args, "eval")
            reports.append(counted)
        held_out = checked if isinstance(held_out, dict) else checked.get("eval_dataset")
        report = DataReport([source for source in reports if source is not None])
    longest = max([source.longest or 0 for source in report.sources], default=0)
    positions = getattr(config.get_text_config(), "max_position_embeddings", None) or longest
    if longest > positions:
        logger.warning(
            f"Rows have up to {longest:,} tokens, and the language model has {positions:,} "
            f"positions. --max_length {positions} drops longer rows."
        )
    if streams := isinstance(train, IterableDataset):
        check_stream(args)
        args.dataloader_num_workers = min(1, args.dataloader_num_workers or 0)  # it has one shard
    if args.packing:
        args.let_follow("global_batch_size", rows_in_step(args))
        args.let_follow("gradient_accumulation_steps", passes_in_step(args, train))
    # TRL does so for a stream of training rows alone; held-out rows may be one too.
    args.accelerator_config.dispatch_batches = False
    if is_ours:
        skippable = sum(source.skippable for source in report.sources)
        share = skippable / (MANY_ROWS * max(1, len(report.sources))) if streams else 0.0
        collator = replace(collator, skippable=skippable, share=share)
        if not args.dry_run:  # all processes of the run have this file, and a resumed run has it
            skipped = SkippedRows(Path(args.output_dir) / SKIPPED_ROWS)
            collator = replace(collator, skipped_rows=skipped)
    return train, held_out, collator, report


def check_stream(args: NormAlignConfig) -> None:
    """Raises ValueError if a stream of training rows does not go with the options."""
    if args.max_steps <= 0:
        raise ValueError("A streamed data set has no length. Set max_steps.")
    if args.packing or args.train_sampling_strategy == "group_by_length":
        raise ValueError("A stream lacks lengths for packing and group_by_length. Use neither.")


def check_best_metric(args: NormAlignConfig, held_out: Any, has_metrics: bool) -> None:
    """Raises ValueError if what tells the best step is not measured on the held-out rows.

    The Trainer would find out when it saves its first checkpoint. Several data sets have their
    names in their metrics, and metrics of somebody's own are not known before.
    """
    if not args.load_best_model_at_end:
        return
    if held_out is None:
        raise ValueError("load_best_model_at_end needs held-out rows. Give eval_dataset.")
    metric = best_metric(args)
    names = [f"{name}_" for name in held_out] if isinstance(held_out, dict) else [""]
    losses = [f"eval_{name}loss" for name in names]
    is_own = has_metrics and metric.startswith(tuple(f"eval_{name}" for name in names))
    if metric not in losses and not is_own:
        raise ValueError(
            f"metric_for_best_model {metric} is not measured here. Set it to {' or '.join(losses)}."
        )


def checked_rows(
    rows: Rows | None,
    name: str,
    collator: DataCollator,
    args: NormAlignConfig,
    split: Literal["train", "eval"],
    need_images: bool = False,
) -> tuple[Rows, SourceReport | None]:
    """Rows for a [`ConversationCollator`], and a report; for another collator, rows as they are."""
    if not isinstance(rows, Rows):
        kind = type(rows).__name__
        raise TypeError(f"{name} is a {kind}. Give a Dataset (Dataset.from_list) or a stream.")
    if not isinstance(collator, ConversationCollator):
        return rows, None
    bad_rows, dropped = collator.bad_rows, collator.dropped_rows
    processes = args.dataset_num_proc
    checks = Checks(collator.processor, args.max_length, bad_rows, False, dropped, processes)
    return prepare_rows(rows, checks, name=name, split=split, need_images=need_images)


def accumulation_steps(args: NormAlignConfig, world_size: int | None = None) -> int:
    """Forward passes per optimizer step that give the global batch on any number of processes."""
    config, accumulation = args.accelerator_config, args.gradient_accumulation_steps
    total, rows = args.global_batch_size, args.per_device_train_batch_size
    in_config = config.gradient_accumulation_kwargs or {}
    if config.split_batches or config.dispatch_batches or "num_steps" in in_config:
        raise ValueError("accelerator_config would change the rows in a step. Leave it out.")
    if total is None:
        return accumulation
    world_size = world_size or args.world_size
    steps, rest = divmod(total, rows * world_size)
    if rest or not steps:
        product = f"per_device_train_batch_size {rows} x {world_size} process(es)"
        raise ValueError(f"global_batch_size {total} is not a multiple of {product}. Change one.")
    if accumulation not in (1, steps):
        raise ValueError(
            f"gradient_accumulation_steps {accumulation} contradicts global_batch_size {total}. "
            f"Leave gradient_accumulation_steps out: {steps} would be derived."
        )
    return steps
