# SPDX-License-Identifier: Apache-2.0
"""What [`NormAlignTrainer`] checks before weights are loaded: options, model, adapters, rows."""

import copy
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal

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
from .collator import ConversationCollator
from .command import NO_MODEL
from .modules.load import check_architecture, config_of_arm, frozen_dtype
from .options import NormAlignConfig


logger = get_logger(__name__)  # logs in one process only

DROPPED_ROWS = "dropped_rows.jsonl"
"""File in `output_dir` with the rows that were dropped, and why."""


def normalign_config(args: TrainingArguments | None, model: Any, collator: Any = None) -> NormAlignConfig:
    """A copy of the options as `NormAlignConfig`. An `SFTConfig` means what it does in TRL, but:

    The loss is on the assistant's turns, or image tokens would be labels, unless another collator makes
    them. Long rows are dropped, not cut. `packing` keeps the rows of each step. Only the end is pushed.
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


def check_options(args: NormAlignConfig, model: Any) -> None:
    """Raises ValueError if options cannot be used here or with this account; sets the accumulation."""
    is_placed = getattr(model, "hf_device_map", None) is not None or "device_map" in (args.model_init_kwargs or {})
    if args.n_gpu > 1 and not is_placed:  # which TRL refuses after loading
        raise ValueError(
            f"This process sees {args.n_gpu} GPUs and trains on one. Show it one with CUDA_VISIBLE_DEVICES=0, or "
            f"start a process for each: `normalign train RECIPE --accelerate_config ddp --num_processes {args.n_gpu}`."
        )
    if args.dry_run and is_deepspeed_zero3_enabled():
        raise ValueError("dry_run cannot count ZeRO-3. Count with fsdp2, which divides as much.")
    args.gradient_accumulation_steps = accumulation_steps(args)
    if args.process_index == 0 and not args.dry_run:
        if args.push_to_hub:
            from ..hub_cards.card.metadata import check_replaceable
            from ..hub_cards.push.repository import find_repository, log_in

            name = args.hub_model_id or Path(args.output_dir).absolute().name
            api = log_in(name, args.hub_token)
            name = name if "/" in name else f"{api.whoami()['name']}/{name}"
            check_replaceable(find_repository(api, name, branch=args.hub_revision or "main").card, name)
        for dtype in ("bfloat16" if args.bf16 else None, (args.model_init_kwargs or {}).get("dtype")):
            warn_if_slow(dtype, args.device.type)


def open_model(
    model: Any,
    processor: LlavaProcessor | None,
    args: NormAlignConfig,
    quantization: BitsAndBytesConfig | None,
    adapters: PeftConfig | None,
) -> tuple[Checkpoint | None, NormAlignLlavaConfig, LlavaProcessor, LoraConfig | None]:
    """The checkpoint of a name, the model's configuration and processor, and that of its adapters."""
    checkpoint = None
    if isinstance(model, nn.Module):
        if quantization is not None:
            raise ValueError("quantization_config is for a model loaded here. Load yours with it.")
        if isinstance(model, PeftModel):
            raise ValueError("The model has adapters. Give peft_config, or merge them first.")
        if adapters is None and getattr(model.config, "quantization_config", None) is not None:
            raise ValueError("Give a quantized model without adapters by folder and quantization_config.")
        check_architecture(model.config.model_type, model.name_or_path or type(model).__name__)
        config = model.config
        if args.arm not in (None, arm := arm_of(config)):
            raise ValueError(f"The model is of arm {arm!r}. To train arm {args.arm!r}, give its path.")
    else:
        if quantization is not None and is_deepspeed_zero3_enabled():
            raise ValueError("load_in_4bit and load_in_8bit do not go with ZeRO-3. Use ddp or zero2.")
        checkpoint = open_checkpoint(model, (args.model_init_kwargs or {}).get("revision"), remedy=NO_MODEL)
        folder = Path(checkpoint.name)
        if folder.exists() and folder.resolve() == Path(args.output_dir).resolve():
            raise ValueError(f"--output_dir is the checkpoint to train, {folder}. Choose another.")
        check_architecture(checkpoint.model_type, checkpoint.name)
        if not args.dry_run or any(file.suffix in (".safetensors", *PICKLES) for file in folder.glob("*model*")):
            checkpoint.weight_bytes  # noqa: B018  (checked as loading does, but before rows are read)
        config = config_of_arm(checkpoint, args.arm)
        args.model_init_kwargs = dict(args.model_init_kwargs or {}, revision=checkpoint.revision)
        args.model_init_kwargs["dtype"] = frozen_dtype(config, args)
    if adapters is not None or quantization is not None:
        from .modules.adapter import check_quantized, language_adapter  # late: few runs have them
    if adapters is not None:
        adapters = language_adapter(adapters, config, args.learning_rates(use_peft=True))
        adapters.revision = checkpoint.revision if checkpoint else None  # PEFT stores the base's name alone
    if quantization is not None:
        check_quantized(config, quantization, args, adapters)
    if processor is None:
        if checkpoint is None and not model.name_or_path:
            raise ValueError("The model names no folder with its processor. Give processing_class.")
        processor = (checkpoint or open_checkpoint(model.name_or_path)).processor
    if not isinstance(processor, LlavaProcessor):
        raise ValueError(f"processing_class is a {type(processor).__name__}. Give a LlavaProcessor, or none.")
    settle(processor)
    return checkpoint, config, processor, adapters


def read_data(
    train: Any,
    held_out: Any,
    collator: DataCollator | None,
    processor: LlavaProcessor,
    config: NormAlignLlavaConfig,
    args: NormAlignConfig,
    *,
    need_images: bool,
) -> tuple[Dataset | IterableDataset, Any, DataCollator, DataReport]:
    """Training and held-out rows (one data set or several by name), their collator, and a report."""
    named = train if isinstance(train, DataArguments) else None
    if named and (collator or held_out):
        raise ValueError("DataArguments name held-out rows too, and have a collator. Leave eval_dataset and that out.")
    collator = collator or ConversationCollator(processor, args.pad_to_multiple_of, padding_free=args.padding_free)
    padding_free, own = getattr(collator, "padding_free", False), isinstance(collator, ConversationCollator)
    if args.padding_free and not (padding_free and (own or not args.packing)):
        name = "packing" if args.packing else "padding_free"
        raise ValueError(f"{name} needs a ConversationCollator with padding_free. Give it, or no data_collator.")
    args.padding_free = padding_free
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
        train, *reports = checked_rows(train, "train_dataset", collator, args, need_images=need_images)
        several = held_out if isinstance(held_out, dict) else {"eval_dataset": held_out}
        checked = {}
        for name, rows in several.items() if held_out is not None else ():
            checked[name], counted = checked_rows(rows, name, collator, args, split="eval")
            reports.append(counted)
        held_out = checked if isinstance(held_out, dict) else checked.get("eval_dataset")
        report = DataReport([source for source in reports if source is not None])
    longest = max([source.longest or 0 for source in report.sources], default=0)
    positions = getattr(config.get_text_config(), "max_position_embeddings", None) or longest
    if longest > positions:
        logger.warning(
            f"Rows have up to {longest:,} tokens, and the language model has {positions:,} positions. Longer rows are "
            f"dropped with --max_length {positions}."
        )
    if streams := isinstance(train, IterableDataset):
        if args.max_steps <= 0:
            raise ValueError("A streamed data set has no length. Set max_steps.")
        if args.packing or args.train_sampling_strategy == "group_by_length":
            raise ValueError(
                "packing and group_by_length need the lengths of rows, and a stream has none. Use neither."
            )
        args.dataloader_num_workers = min(1, args.dataloader_num_workers or 0)  # it has a single shard
    # TRL does so for a stream of training rows alone; held-out rows may be one too.
    args.accelerator_config.dispatch_batches = False
    if own:
        readers = args.world_size * max(1, args.dataloader_num_workers or 0)  # each counts what it skips
        skippable = sum(source.skippable for source in report.sources)
        share = skippable / (MANY_ROWS * max(1, len(report.sources))) if streams else 0.0
        collator = replace(collator, skippable=skippable // readers, share=share)
    return train, held_out, collator, report


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
        raise TypeError(f"{name} is a {type(rows).__name__}. Give a Dataset, as Dataset.from_list makes, or a stream.")
    if not isinstance(collator, ConversationCollator):
        return rows, None
    dropped, processes = collator.dropped_rows, args.dataset_num_proc
    checks = Checks(collator.processor, args.max_length, collator.bad_rows, False, dropped, processes)
    return prepare_rows(rows, checks, name=name, split=split, need_images=need_images)


def accumulation_steps(args: NormAlignConfig, world_size: int | None = None) -> int:
    """Forward passes per optimizer step that give the global batch on any number of processes."""
    config = args.accelerator_config
    if config.split_batches or config.dispatch_batches or "num_steps" in (config.gradient_accumulation_kwargs or {}):
        raise ValueError("accelerator_config's values would change the rows in an optimizer step. Leave it out.")
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
