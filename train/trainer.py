# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The trainer as a whole: what it is given is prepared, checked and handed to TRL's `SFTTrainer`."""

import os
from collections.abc import Callable, Sequence
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

from ..checkpoint.names import BUILD_RECORD
from ..checkpoint.provenance import hub_commit, read_beside
from ..data.images import ImageRules, image_problem
from ..data.reports import DataReport
from ..modeling_normalign_llava import NormAlignLlavaForConditionalGeneration
from .adapter import language_adapter, restore_projector
from .callbacks import Measurements
from .collator import ConversationCollator
from .depth_probe import CosineProbe
from .inputs import own_config, own_data, own_model, own_processor, own_rows, rates_of
from .model import MODULES, base_model, freeze, projector_norm
from .options import accumulation_steps, check_stream
from .progress import ProgressLines
from .record import Clock, training_record
from .samples import SampleCallback
from .sharding import name_fsdp_units
from .steps import SteppingTrainer
from .summary import summary


class NormAlignTrainer(SteppingTrainer):
    """[`SFTTrainer`] for NormAlign-LLaVA. It takes what that takes, in the same order, and prepares it.

    Args:
        model: folder or Hub id of a checkpoint, loaded in float32 unless `args.model_init_kwargs` says otherwise, or
            a model without adapters.
        args: `NormAlignConfig`, or an `SFTConfig`, whose `learning_rate` is then every module's; by default
            `NormAlignConfig()`. A copy of it is used.
        data_collator: makes batches of rows; by default a [`ConversationCollator`] that stops at an image that cannot
            be read. To one of another kind, rows go as they are.
        train_dataset: rows in memory or a stream, in any form that `normalign train` reads. They are checked first,
            and those with more tokens than `max_length` are dropped. A stream needs `max_steps`.
        eval_dataset: held-out rows, or several data sets by name.
        processing_class: the model's processor, by default the one that lies beside it.
        compute_loss_func, compute_metrics, callbacks, optimizer_cls_and_kwargs, preprocess_logits_for_metrics: as in
            [`SFTTrainer`]. A learning rate in the arguments of an optimizer class takes `learning_rate`'s place.
        optimizers: an optimizer and a schedule. What the optimizer holds is trained, at its learning rates.
        quantization_config: of a model that is loaded here.
        peft_config: a `LoraConfig`. Adapters are kept to the language model; projector and norm are trained in full
            and saved with them, and so is the vision tower where it has a learning rate.
        formatting_func: refused, since it makes text of rows.
        report: what became of the data, where rows are canonical already.
        options: more dataclasses of options, to be kept beside every checkpoint in `training.json`.

    Raises:
        ValueError: an argument, the model or the data does not fit; it is named.
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
            raise ValueError("formatting_func makes text of rows, without images. Give rows with messages instead.")
        if peft_config is not None and optimizers[0] is not None:
            raise ValueError("optimizers cannot hold adapters that are yet to be made. Give optimizer_cls_and_kwargs.")
        args = own_config(args, model)
        args.gradient_accumulation_steps = accumulation_steps(args)
        if optimizer_cls_and_kwargs is not None and "lr" in optimizer_cls_and_kwargs[1]:
            args.learning_rate, args.learning_rate_is_given = optimizer_cls_and_kwargs[1]["lr"], True
        loaded_here = not isinstance(model, nn.Module)
        model = own_model(model, args, quantization_config)
        revision = (args.model_init_kwargs or {}).get("revision")
        commit = hub_commit(model.name_or_path, revision) if loaded_here else None
        rates = args.explained_rates(use_peft=peft_config is not None)
        if optimizers[0] is not None:
            rates = {module: (rate, "optimizer") for module, rate in rates_of(optimizers[0], model, args).items()}
        self.rates = {module: rate for module, (rate, _) in rates.items()}
        # That of the optimizer's first group, which is logged, and of which schedules take min_lr as a share.
        args.learning_rate = next((self.rates[name] for name in MODULES if self.rates[name]), args.learning_rate)
        if peft_config is not None:
            peft_config = language_adapter(peft_config, model, self.rates, commit)
        processing_class = own_processor(processing_class, model, commit)
        data_collator = data_collator or ConversationCollator(
            processing_class, pad_to_multiple_of=args.pad_to_multiple_of
        )
        if report is None:
            need_images = args.stage == "align" or not self.rates["language"]
            train_dataset, eval_dataset, report = own_data(
                train_dataset, eval_dataset, data_collator, args.max_length, need_images
            )
        check_stream(isinstance(train_dataset, IterableDataset), args)
        self.record = training_record(model, commit, args, self.rates, report, options)
        self.build = read_beside(model.name_or_path, BUILD_RECORD, commit)
        self.clock = Clock()
        self.measurements = Measurements(args)
        norm = projector_norm(model)
        if any(parameter.is_meta for parameter in norm.parameters()):
            # A norm that the checkpoint lacks, and FSDP, where other processes than the first get values from it only
            # later: accelerate takes two parameters on meta for one, and would step the bias twice, the gain never.
            norm.to_empty(device="cpu")
        # TRL casts what is trained on a quantized base to bfloat16 (huggingface/trl#7268 spares DoRA's magnitudes).
        # A gain that was cast has lost its value and would not move, so the projector is kept from before.
        projector = {name: value.clone() for name, value in model.model.multi_modal_projector.state_dict().items()}
        model_init_kwargs = args.model_init_kwargs
        if loaded_here:  # with what TRL would say is ignored
            args.model_init_kwargs = quantization_config = None
        super().__init__(
            model=model,
            args=args,
            data_collator=data_collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            compute_loss_func=compute_loss_func,
            compute_metrics=compute_metrics,
            callbacks=[self.clock, self.measurements, *(callbacks or [])],
            optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
            quantization_config=quantization_config,
            peft_config=peft_config,
        )
        args.model_init_kwargs = model_init_kwargs
        for stock in (PrinterCallback, ProgressCallback):  # in a notebook there is neither, but a table
            if self.pop_callback(stock):
                self.add_callback(ProgressLines)
        if peft_config is not None and not is_deepspeed_zero3_enabled():  # which keeps float32 copies of its own
            restore_projector(self.model, projector, wide=args.bf16 or args.fp16)
        freeze(self.model, self.rates)
        self._hook(processing_class)
        if self.is_fsdp_enabled:
            name_fsdp_units(self.accelerator.state.fsdp_plugin, base_model(self.model))
        batch_size, drop_last = args.train_batch_size * args.world_size, args.dataloader_drop_last
        batches = DataLoader(self.train_dataset, batch_size, drop_last=drop_last)  # counted, never read
        self.facts = summary(
            self.model,
            args,
            rates,
            report,
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
            batch = collator(list(islice(self.train_dataset, args.probe_rows)))
            self.add_callback(CosineProbe(args.probe_steps, batch))

    def get_eval_dataloader(self, eval_dataset: str | Dataset | IterableDataset | None = None) -> DataLoader:
        """The Trainer's, of rows in any form that the constructor takes."""
        if isinstance(eval_dataset, Dataset | IterableDataset):
            eval_dataset, _ = own_rows(
                eval_dataset, "eval_dataset", self.data_collator, self.args.max_length, split="eval"
            )
        return super().get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Dataset | IterableDataset) -> DataLoader:
        """The Trainer's, of rows in any form that the constructor takes."""
        rows, _ = own_rows(test_dataset, "test_dataset", self.data_collator, self.args.max_length, split="eval")
        return super().get_test_dataloader(rows)
