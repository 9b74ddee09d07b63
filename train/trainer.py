# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""`NormAlignTrainer`: prepares and checks its arguments, and passes them to TRL's `SFTTrainer`."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from peft import PeftConfig
from torch import nn
from torch.utils.data import DataLoader
from transformers import (
    BitsAndBytesConfig,
    DataCollator,
    EvalPrediction,
    LlavaProcessor,
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
    TrainingArguments,
)
from transformers.integrations import is_deepspeed_zero3_enabled
from trl import SFTConfig

from ..checkpoint.find import find_checkpoint
from ..checkpoint.names import BUILD_RECORD
from ..checkpoint.precision import warn_if_slow
from ..checkpoint.provenance import read_beside
from ..data.rows.images import ImageRules, image_problem
from ..data.rows.reports import DataReport
from ..modeling_normalign_llava import NormAlignLlavaForConditionalGeneration
from .adapter import language_adapter, train_in_float32
from .callbacks import Measurements
from .collator import ConversationCollator
from .command import NO_MODEL
from .depth_probe import CosineProbe
from .inputs import (
    check_one_gpu,
    checked_datasets,
    checked_rows,
    model_processor,
    model_to_train,
    normalign_config,
    optimizer_learning_rates,
)
from .model import MODULES, base_model, freeze, projector_norm
from .options import accumulation_steps, check_stream
from .padding_free import RowsApart
from .progress import ProgressLines
from .record import Clock, training_record
from .samples import SampleCallback
from .sharding import name_fsdp_units
from .steps import SteppingTrainer
from .suite import SuiteCallback
from .summary import summary


class NormAlignTrainer(SteppingTrainer):
    """[`SFTTrainer`] for NormAlign-LLaVA, with the same arguments in the same order.

    Args:
        model: Folder or Hub id of a checkpoint, loaded in float32 unless `args.model_init_kwargs` says otherwise, or a
            model without adapters.
        args: `NormAlignConfig`, or an `SFTConfig`, whose `learning_rate` is then every module's; by default
            `NormAlignConfig()`. A copy of it is used.
        data_collator: By default a [`ConversationCollator`] that stops at an image that cannot be read. A collator of
            another kind gets the rows as they are.
        train_dataset: Rows in memory or a stream, in any form that `normalign train` reads. They are checked first,
            and those with more tokens than `max_length` are dropped. A stream needs `max_steps`.
        eval_dataset: Held-out rows, or several data sets by name.
        processing_class: The model's processor, by default the one in its folder.
        compute_loss_func, compute_metrics, callbacks, optimizer_cls_and_kwargs, preprocess_logits_for_metrics: As in
            [`SFTTrainer`]. A learning rate in the arguments of an optimizer class replaces `learning_rate`.
        optimizers: An optimizer and a schedule. The parameters of the optimizer are trained, at its learning rates.
        quantization_config: How to quantize a model that is loaded here.
        peft_config: A `LoraConfig`. Adapters are limited to the language model; projector and norm are trained in full
            and saved with them, and so is the vision tower if it has a learning rate.
        formatting_func: Refused, since it turns rows into text.
        report: How many rows were used and dropped, if rows are canonical already.
        options: More dataclasses of options, to be kept in `training.json`.

    Raises:
        ValueError: An argument, the model or the data is wrong; it is named.
    """

    def __init__(
        self,
        model: str | os.PathLike | NormAlignLlavaForConditionalGeneration,
        args: SFTConfig | TrainingArguments | None = None,
        data_collator: DataCollator | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Dataset | IterableDataset | dict[str, Dataset | IterableDataset] | None = None,
        processing_class: LlavaProcessor | None = None,
        compute_loss_func: Callable | None = None,
        compute_metrics: Callable[[EvalPrediction], dict] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LambdaLR | None] = (None, None),
        optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
        quantization_config: BitsAndBytesConfig | None = None,
        peft_config: PeftConfig | None = None,
        formatting_func: Callable | None = None,
        *,
        report: DataReport | None = None,
        options: Sequence[Any] = (),
    ):
        if formatting_func is not None:
            raise ValueError("formatting_func turns rows into text, without images. Give rows with messages instead.")
        if peft_config is not None and optimizers[0] is not None:
            raise ValueError("optimizers cannot hold adapters that are created later. Give optimizer_cls_and_kwargs.")
        args = normalign_config(args, model)
        if getattr(model, "hf_device_map", None) is None:
            check_one_gpu(args)
        if args.process_index == 0:
            for asked in ("bfloat16" if args.bf16 else None, (args.model_init_kwargs or {}).get("dtype")):
                warn_if_slow(asked, args.device.type)
        args.gradient_accumulation_steps = accumulation_steps(args)
        if optimizer_cls_and_kwargs is not None and "lr" in optimizer_cls_and_kwargs[1]:
            args.learning_rate, args.learning_rate_is_given = optimizer_cls_and_kwargs[1]["lr"], True
        suite = [SuiteCallback(args, self.log)] if args.eval_suite else []
        loaded_here = not isinstance(model, nn.Module)
        commit = None
        if loaded_here:
            kwargs = args.model_init_kwargs or {}
            model, commit = find_checkpoint(model, kwargs.get("revision"), remedy=NO_MODEL)
            args.model_init_kwargs = {**kwargs, "revision": commit}
        model = model_to_train(model, args, quantization_config)
        learning_rates = args.explained_learning_rates(use_peft=peft_config is not None)
        if optimizers[0] is not None:
            given = optimizer_learning_rates(optimizers[0], model, args)
            learning_rates = {module: (value, "optimizer") for module, value in given.items()}
        self.learning_rates = {module: value for module, (value, _) in learning_rates.items()}
        # That of the optimizer's first group: it is logged, and schedules take min_lr as a share of it.
        trained = (self.learning_rates[name] for name in MODULES if self.learning_rates[name])
        args.learning_rate = next(trained, args.learning_rate)
        if peft_config is not None:
            peft_config = language_adapter(peft_config, model, self.learning_rates, commit)
        processing_class = model_processor(processing_class, model, commit)
        data_collator = data_collator or ConversationCollator(
            processing_class, pad_to_multiple_of=args.pad_to_multiple_of, padding_free=args.padding_free
        )
        if args.packing and not isinstance(data_collator, ConversationCollator):
            raise ValueError(
                "packing needs rows with their lengths. Leave data_collator out, or give a ConversationCollator."
            )
        if args.padding_free and not getattr(data_collator, "padding_free", False):
            name = "packing" if args.packing else "padding_free"
            raise ValueError(f"{name} is given, but data_collator pads. Set padding_free there, or leave {name} out.")
        args.padding_free = getattr(data_collator, "padding_free", False)
        if args.padding_free and compute_metrics is not None:
            raise ValueError("compute_metrics compares rows, and padding_free leaves none. Leave one of them out.")
        if report is None:
            need_images = args.stage == "align" or not self.learning_rates["language"]
            train_dataset, eval_dataset, report = checked_datasets(
                train_dataset, eval_dataset, data_collator, args.max_length, need_images
            )
        check_stream(isinstance(train_dataset, IterableDataset), args)
        self.record = training_record(model, commit, args, self.learning_rates, report, options)
        self.build = read_beside(model.name_or_path, BUILD_RECORD, commit)
        self.clock = Clock()
        self.measurements = Measurements(args)
        norm = projector_norm(model)
        if any(parameter.is_meta for parameter in norm.parameters()):
            # A norm that the checkpoint lacks, under FSDP, where other processes get the first one's values later:
            # accelerate takes two parameters on meta for one, and would step the bias twice and the gain never.
            norm.to_empty(device="cpu")
        model_init_kwargs = args.model_init_kwargs
        if loaded_here:  # with these, which TRL would report as ignored
            args.model_init_kwargs = quantization_config = None
        # TRL does so for a stream of training rows alone; held-out rows may be one too.
        args.accelerator_config.dispatch_batches = False
        # TRL refuses both for images (huggingface/trl#4339).
        (padding_free, packing), args.padding_free, args.packing = (args.padding_free, args.packing), False, False
        super().__init__(
            model=model,
            args=args,
            data_collator=data_collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            compute_loss_func=compute_loss_func,
            compute_metrics=compute_metrics,
            callbacks=[self.clock, self.measurements, *suite, *(callbacks or [])],
            optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
            quantization_config=quantization_config,
            peft_config=peft_config,
        )
        args.model_init_kwargs, args.padding_free, args.packing = model_init_kwargs, padding_free, packing
        if padding_free:
            self.add_callback(RowsApart)
        for stock in (PrinterCallback, ProgressCallback):  # a notebook has neither, but a table
            if self.pop_callback(stock):
                self.add_callback(ProgressLines)
        if peft_config is not None and not is_deepspeed_zero3_enabled():  # which takes no quantized base
            train_in_float32(self.model, autocast=args.bf16 or args.fp16)
        freeze(self.model, self.learning_rates)
        self._register_hooks(processing_class)
        if self.is_fsdp_enabled:
            name_fsdp_units(self.accelerator.state.fsdp_plugin, base_model(self.model))
        if args.tokens_per_device:
            self._derive_accumulation()
        batch_size, drop_last = args.train_batch_size * args.world_size, args.dataloader_drop_last
        batches = DataLoader(self.train_dataset, batch_size, drop_last=drop_last)  # counted, never read
        if packing and not isinstance(train_dataset, IterableDataset):
            batches = DataLoader(self.train_dataset, batch_sampler=self._get_train_sampler())
        self.facts = summary(
            self.model,
            args,
            learning_rates,
            report,
            rows=self.get_total_train_batch_size(args),
            tokens_per_device=args.tokens_per_device,
            steps=self.set_initial_training_values(args, batches)[-1],
            tokens_per_image=model.config.image_seq_length,
        )
        self.record["run"] = {name: value for name, value in self.facts.items() if name != "data"}
        self._add_samples_and_probe()

    def _add_samples_and_probe(self) -> None:
        args, collator = self.args, self.data_collator
        held_out = self.eval_dataset
        if isinstance(held_out, dict):
            held_out = next(iter(held_out.values()))
        if held_out is not None and args.sample_count and isinstance(collator, ConversationCollator):
            trackers = self.callback_handler.callbacks
            pixels, skip = collator.max_image_pixels, collator.bad_rows == "skip"
            readable = (row for row in held_out if not skip or not image_problem(row["images"], ImageRules(), pixels))
            examples = list(islice(readable, args.sample_count))
            self.add_callback(SampleCallback(examples, args.sample_max_new_tokens, pixels, trackers))
        if args.probe_steps:
            if isinstance(collator, ConversationCollator):
                collator = replace(collator, padding_free=False)
            batch = collator(list(islice(self.train_dataset, args.probe_rows)))
            self.add_callback(CosineProbe(args.probe_steps, batch))

    def get_eval_dataloader(self, eval_dataset: str | Dataset | IterableDataset | None = None) -> DataLoader:
        """The Trainer's data loader, of rows in any form that the constructor takes."""
        if isinstance(eval_dataset, Dataset | IterableDataset):
            eval_dataset, _ = checked_rows(
                eval_dataset, "eval_dataset", self.data_collator, self.args.max_length, split="eval"
            )
        return super().get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Dataset | IterableDataset) -> DataLoader:
        """The Trainer's data loader, of rows in any form that the constructor takes."""
        rows, _ = checked_rows(test_dataset, "test_dataset", self.data_collator, self.args.max_length, split="eval")
        return super().get_test_dataloader(rows)
