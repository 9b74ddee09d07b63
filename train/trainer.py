# SPDX-License-Identifier: Apache-2.0
"""`NormAlignTrainer`: TRL's `SFTTrainer` for a model with a norm, and what it does differently."""

import io
import os
import re
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import reduce, save_fsdp_optimizer
from datasets import IterableDataset
from peft import PeftConfig, PeftModel
from rich.console import Group
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import BitsAndBytesConfig, DataCollator, EvalPrediction, LlavaProcessor
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.trainer import SCHEDULER_NAME
from transformers.trainer_callback import EarlyStoppingCallback, TrainerCallback
from transformers.training_args import TrainingArguments
from trl import SFTConfig, SFTTrainer

from ..checkpoint import weights
from ..checkpoint.files import BUILD_RECORD, TRAINING_RECORD, write_json
from ..checkpoint.notices import fetch_notices, write_notices
from ..checkpoint.opening import Checkpoint, read_record
from ..console import Console, Printed
from ..data.rows.checks import DataReport
from ..data.sources.arguments import DataArguments
from ..data.sources.mixtures import is_prepared
from ..modeling_normalign_llava import NormAlignLlavaForConditionalGeneration
from .callbacks.finite import FiniteCheck
from .callbacks.loss_curve import LossCurve
from .callbacks.measurements import Measurements
from .callbacks.packed_attention import PackedAttentionCheck
from .callbacks.progress import show, show_lines
from .collator import ConversationCollator, blank_image, count_rows_with_labels
from .keeping.checkpoints import (
    began_in,
    is_resumed,
    only_run,
    reading_checkpoint,
    resolve_resume,
    writing_checkpoint,
)
from .keeping.disk import check_disk, disk_use
from .keeping.record import data_record, digest_of_lengths, training_record
from .keeping.same_run import check_resumed
from .keeping.summary import render, summary
from .loading import LoadedModel, load
from .marked import batch_examples, marked
from .memory import MemoryEstimate, estimate_memory
from .modules.forward import eval_frozen, wrap_forward
from .modules.load import load_model
from .modules.model import (
    MODULES,
    base_model,
    freeze,
    frozen_modules,
    module_of,
    replaced,
    trained_parameters,
)
from .modules.precision import train_in_float32
from .modules.sharding import fill_gradients, load_sharded, prepare_sharding, sharding
from .prepare import (
    GivenData,
    GivenModel,
    Plan,
    Rows,
    check_stream,
    checked_rows,
    needs_images,
    prepare,
)
from .samplers import passes_in_step, train_sampler
from .settings import best_metric, keep_float32


logger = get_logger(__name__)  # logs in one process only


@dataclass(frozen=True)
class RunSummary(Printed):
    """The options, modules, data, batch, steps and disk of a run, as tables in 100 columns."""

    record: dict[str, Any]
    facts: dict[str, Any]
    output_dir: str

    def renderable(self) -> Group:
        """What `rich` and a notebook show."""
        return render(self.record, self.facts, self.output_dir)

    def __str__(self) -> str:
        text = io.StringIO()
        Console(file=text, width=100).print(self.renderable())
        return text.getvalue()


def refuse(formatting_func: Callable | None, optimizers: tuple) -> None:
    """Raises ValueError for arguments of `SFTTrainer` that cannot be used here."""
    if formatting_func is not None:
        raise ValueError("formatting_func makes text without images. Give rows of messages.")
    if optimizers != (None, None):
        raise ValueError("optimizers have other learning rates. Give optimizer_cls_and_kwargs.")


def refused_by_trl(plan: Plan) -> dict[str, Any]:
    """Returns options that TRL's constructor must not see as they are, with what it sees."""
    # TRL refuses the first two for images (huggingface/trl#4339), and ignores the third.
    seen: dict[str, Any] = dict(padding_free=False, packing=False, model_init_kwargs=None)
    if not isinstance(plan.data.collator, ConversationCollator):  # another checks its rows itself
        seen["assistant_only_loss"] = False
        seen["dataset_kwargs"] = {"skip_prepare_dataset": True}
    if plan.settings.dry_run:  # the Trainer would create both
        seen["output_dir"] = gettempdir()
        seen["push_to_hub"] = False
    return seen


def pass_over_frozen(model: nn.Module, keys: Any) -> None:
    """Takes frozen parameters from the missing keys: DeepSpeed's checkpoints lack them."""
    keys.missing_keys[:] = trained_parameters(model).keys() & keys.missing_keys


def by_module(
    groups: list[dict[str, Any]], modules: dict[nn.Parameter, str], rates: dict[str, float]
) -> list[dict[str, Any]]:
    """Returns an optimizer's groups, divided into modules, each with its learning rate."""
    divided = []
    for group, module in product(groups, MODULES):
        parameters = [value for value in group["params"] if modules[value] == module]
        if parameters:
            divided.append(group | {"params": parameters, "lr": rates[module]})
    return divided


class NormAlignTrainer(SFTTrainer):
    """[`SFTTrainer`] for NormAlign-LLaVA, with the same arguments in the same order.

    Args:
        model: Folder or Hub id of a checkpoint, or a model without adapters. What is trained is
            made float32; the rest is `args.model_init_kwargs["dtype"]`, or [`frozen_dtype`].
        args: `NormAlignConfig`, or an `SFTConfig`, whose learning rate all modules get; copied.
        data_collator: By default a [`ConversationCollator`]. Another one gets rows as they are.
        train_dataset: Rows in memory or a stream, in any form that `normalign train` reads, or
            `DataArguments`, which name held-out rows too.
        eval_dataset: Held-out rows, or several data sets by name.
        processing_class: The model's processor, by default the one in its folder.
        optimizer_cls_and_kwargs: As in [`SFTTrainer`]; its `lr` replaces `learning_rate`.
        quantization_config: How to quantize a model that is loaded here.
        peft_config: A `LoraConfig`: see [`language_adapter`].
        formatting_func, optimizers: Refused, as they make text and have other learning rates.
        options: More dataclasses of options, to be kept in `training.json`.

    Attributes:
        plan: What follows from the arguments: see [`Plan`].
        learning_rates: The peak learning rate of each module.
        facts: The [`summary`]: modules, data, batch, steps; and the disk that the run takes.

    Raises:
        ValueError: An argument, the model or the data is wrong; it is named.
    """

    train_dataset: Any

    def __init__(
        self,
        model: str | os.PathLike | NormAlignLlavaForConditionalGeneration,
        args: SFTConfig | TrainingArguments | None = None,
        data_collator: DataCollator | None = None,
        train_dataset: Rows | DataArguments | None = None,
        eval_dataset: Rows | dict[str, Rows] | None = None,
        processing_class: LlavaProcessor | None = None,
        compute_loss_func: Callable | None = None,
        compute_metrics: Callable[[EvalPrediction], dict] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Optimizer | None, LambdaLR | None] = (None, None),
        optimizer_cls_and_kwargs: tuple[type[Optimizer], dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[[Tensor, Tensor], Tensor] | None = None,
        quantization_config: BitsAndBytesConfig | None = None,
        peft_config: PeftConfig | None = None,
        formatting_func: Callable | None = None,
        *,
        options: Sequence[Any] = (),
    ):
        refuse(formatting_func, optimizers)
        plan = prepare(
            args,
            GivenModel(model, processing_class, quantization_config, peft_config),
            GivenData(train_dataset, eval_dataset, data_collator),
            optimizer=optimizer_cls_and_kwargs,
            has_metrics=compute_metrics is not None,
        )
        loaded = load(plan)
        self._take_over(plan, loaded, options)
        own = loaded.settings
        with replaced(own, **refused_by_trl(plan)):
            super().__init__(
                loaded.model,
                own,
                plan.data.collator,
                plan.data.train,
                plan.data.held_out,
                plan.model.processor,
                compute_loss_func=compute_loss_func,
                compute_metrics=compute_metrics,
                callbacks=[self.measurements, *(callbacks or [])],
                optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
                preprocess_logits_for_metrics=preprocess_logits_for_metrics,
                peft_config=plan.model.adapters,
            )
        self._set_up()

    def _take_over(self, plan: Plan, loaded: LoadedModel, options: Sequence[Any]) -> None:
        """Keeps what the plan and the model say, before TRL's trainer is made."""
        self.plan = plan
        self.checkpoint = plan.model.checkpoint
        self.learning_rates = plan.learning_rates
        self.precision = loaded.precision
        self.weights_in = loaded.weights_in
        self.unquantized: nn.Module | None = None  # the model as it is saved, on meta
        self.record = training_record(plan, loaded, options)
        name = loaded.model.name_or_path
        self.build = read_record(name, BUILD_RECORD, loaded.commit)
        self.notices = fetch_notices(self.build, name, loaded.commit)
        self.measurements = Measurements(loaded.settings)
        self.probe: Any = None
        self.current_gradient_accumulation_steps = plan.settings.gradient_accumulation_steps
        self._best: dict[str, Any] | None = None  # of which step the weights are, if not the last
        # While rows are evaluated: the sum of their losses, their number, and that of skipped ones.
        self._evaluated: Tensor | None = None
        self._shows_batch = False  # of the run that begins

    def _set_up(self) -> None:
        """Prepares the model and the callbacks, and counts the steps of the run."""
        self.hub_token = self.args.hub_token
        self.args.hub_token = None  # options are saved too
        self.args.settle()
        self._set_up_model()
        self._add_callbacks()
        self._described: Any = self.train_dataset  # the rows that `facts` and `record` tell of
        self._describe(self.plan.data.report)

    def _describe(self, report: DataReport) -> None:
        """Counts the steps of a run on the training rows, for `facts` and `record`."""
        loader = self.get_train_dataloader()
        steps = self.set_initial_training_values(self.args, loader)[-1]
        self.facts = summary(self, report, steps)
        self.facts["disk"] = disk_use(
            self.model, self.args, steps, self.weights_in, self.optimizer_cls_and_kwargs
        )
        self.record["row_lengths"] = digest_of_lengths(self.train_dataset)
        self.record["sharding"] = sharding()
        self.record["run"] = {name: value for name, value in self.facts.items() if name != "data"}

    def _take_train_rows(self) -> None:
        """Checks training rows that were set since the trainer was made, and describes the run."""
        if self.train_dataset is self._described:
            return
        if isinstance(self.train_dataset, IterableDataset):
            check_stream(self.args)
        need_images = needs_images(self.args, self.learning_rates)
        rows, counted = checked_rows(
            self.train_dataset,
            "train_dataset",
            self.data_collator,
            self.args,
            "train",
            need_images,
        )
        self.train_dataset = rows
        self._described = rows
        if self.args.packing:  # as many passes in a step as these rows need
            passes = passes_in_step(self.args, rows)
            self.args.settle(gradient_accumulation_steps=passes)
            self.current_gradient_accumulation_steps = passes
        if isinstance(self.data_collator, ConversationCollator) and counted is not None:
            self.data_collator.skippable = counted.skippable
        sources = []
        if counted is not None:
            sources.append(counted)
        report = DataReport(sources)
        held_out_facts = [source for source in self.facts["data"] if source["split"] != "train"]
        self._describe(report)
        self.facts["data"] += held_out_facts
        held_out = [source for source in self.record["data"] if source["split"] != "train"]
        self.record["data"] = data_record(report) + held_out
        if self.probe is not None:
            self.probe.batch = type(self.probe).of_rows(rows, self.data_collator, self.args).batch

    def _set_up_model(self) -> None:
        """Freezes modules, makes the others float32, and wraps the forward pass."""
        args = self.args
        model = base_model(self.model)
        if isinstance(self.model, PeftModel):  # whose card would have the base's local path
            self.model.create_or_update_model_card = lambda folder: None
        freeze(self.model, self.learning_rates)
        train_in_float32(self.model)
        # On a CPU, TRL's head lacks Triton: scoring all positions takes two thirds of a small step.
        model.only_answers = args.device.type == "cpu"
        wrap_forward(model, blank_image(self.processing_class))
        if self.is_fsdp_enabled:
            prepare_sharding(self.accelerator, model)
        if self.is_deepspeed_enabled:
            self.model.register_load_state_dict_post_hook(pass_over_frozen)

    def _add_callbacks(self) -> None:
        """Adds what watches a run, records it and draws it, as the options ask."""
        args = self.args
        self.finite = FiniteCheck(args)
        self.add_callback(self.finite)
        if args.padding_free:
            self.add_callback(PackedAttentionCheck)
        if args.early_stopping_patience is not None:
            self.add_callback(
                EarlyStoppingCallback(args.early_stopping_patience, args.early_stopping_threshold)
            )
        self.add_callback(LossCurve)
        show_lines(self)
        if args.probe_steps:
            from .callbacks.depth_probe import CosineProbe  # late: few runs have one

            self.probe = CosineProbe.of_rows(self.train_dataset, self.data_collator, args)
            self.add_callback(self.probe)
        is_ours = isinstance(self.data_collator, ConversationCollator)  # others' rows are unknown
        if self.eval_dataset is not None and is_ours and args.sample_count != 0:
            from .callbacks.samples import sample_callback  # late: it imports what answers

            is_sharded = self.is_fsdp_enabled or is_deepspeed_zero3_enabled()
            samples = sample_callback(self.eval_dataset, args, is_sharded=is_sharded)
            if samples is not None:
                self.add_callback(samples)

    def create_accelerator_and_postprocess(self) -> None:
        """The Trainer's, which puts a section `bf16` into DeepSpeed's configuration again."""
        super().create_accelerator_and_postprocess()
        if self.is_deepspeed_enabled:
            keep_float32(self.accelerator.state.deepspeed_plugin, self.args)

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """The Trainer's, with a learning rate for each module (huggingface/transformers#10140)."""
        if self.optimizer is None:
            named = list((model or self.model).named_parameters())
            modules = {parameter: module_of(name) for name, parameter in named}
            trained = {modules[value] for _, value in named if value.requires_grad}
            first = next((module for module in MODULES if module in trained), "")
            # The optimizer's own rate, of which min_lr is a share, is that of its first group.
            rate = self.learning_rates.get(first, self.args.learning_rate)
            with replaced(self.args, learning_rate=rate):
                optimizer = super().create_optimizer(model)
            groups = by_module(optimizer.param_groups, modules, self.learning_rates)
            # The Trainer logs the rate of the first group. A norm has no group with weight decay.
            for place, group in enumerate(groups):
                if modules[group["params"][0]] == first:
                    groups.insert(0, groups.pop(place))
                    break
            optimizer.param_groups = groups
            if self.is_fsdp_enabled:
                optimizer.register_step_pre_hook(fill_gradients)
        return self.optimizer

    def _get_dataloader(self, *args, **kwargs) -> DataLoader:
        # A loader that begins an epoch draws a number. Drawn from the common random state, it would
        # change dropout with the number of readers, with evaluations, and when a run is resumed.
        loader = super()._get_dataloader(*args, **kwargs)
        own = getattr(loader, "base_dataloader", loader)
        own.generator = torch.Generator().manual_seed(self.args.seed)
        return loader

    def _get_train_sampler(self, train_dataset=None):
        rows = self.train_dataset
        if train_dataset is not None:
            rows = train_dataset
        return train_sampler(self.args, rows) or super()._get_train_sampler(rows)

    def get_total_train_batch_size(self, args) -> int:
        """Rows in an optimizer step, over all processes."""
        return args.global_batch_size or super().get_total_train_batch_size(args)

    def get_train_dataloader(self) -> DataLoader:
        """The Trainer's data loader, of rows in any form that the constructor takes."""
        self._take_train_rows()
        return super().get_train_dataloader()

    def get_eval_dataloader(self, eval_dataset: str | Rows | None = None) -> DataLoader:
        """The Trainer's data loader, of rows in any form that the constructor takes."""
        if isinstance(eval_dataset, Rows):  # the Trainer would keep their loader for other rows
            return self.get_test_dataloader(eval_dataset)
        rows = self.eval_dataset
        if isinstance(eval_dataset, str):
            rows = rows[eval_dataset]
        is_ours = isinstance(self.data_collator, ConversationCollator)
        if is_ours and isinstance(rows, Rows) and not is_prepared(rows):  # set since
            return self.get_test_dataloader(rows)
        return super().get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Rows) -> DataLoader:
        """The Trainer's data loader, of rows in any form that the constructor takes."""
        rows, _ = checked_rows(test_dataset, "eval_dataset", self.data_collator, self.args, "eval")
        return super().get_test_dataloader(rows)

    def estimate_memory(self, gradient_checkpointing: bool | None = None) -> MemoryEstimate:
        """The memory of a step on the longest rows: see [`estimate_memory`]."""
        self._take_train_rows()
        return estimate_memory(self, gradient_checkpointing)

    def summary(self) -> RunSummary:
        """The tables that `normalign train` prints before its first step: `print` shows them."""
        self._take_train_rows()
        return RunSummary(self.record, self.facts, str(self.args.output_dir))

    def check_resumed(self, checkpoint: Path) -> None:
        """Raises ValueError unless this run can go on from a checkpoint; takes over its seconds."""
        self.record["seconds"] = check_resumed(self.record, self.build, checkpoint)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args, **kwargs):
        """The Trainer's. `True` resumes from the newest complete checkpoint in `output_dir`.

        Raises:
            ValueError: Another run writes to `output_dir`; the disk is full; or a resumed run is
                another one, or would go on in another precision, which nobody chose.
        """
        if self.args.dry_run:
            raise ValueError("With dry_run no weights are loaded. To train, leave it out.")
        self._take_train_rows()
        self._check_precision(resume_from_checkpoint)
        if is_resumed(resume_from_checkpoint):
            output = Path(self.args.output_dir)
            checkpoint = resolve_resume(resume_from_checkpoint, output, self.args.world_size)
            if checkpoint is None:
                raise ValueError(f"{output} holds no complete checkpoint to resume from.")
            self.check_resumed(checkpoint)
            resume_from_checkpoint = str(checkpoint)
        if self.args.should_save:
            check_disk(self.args.output_dir, self.facts["disk"]["total"])
        self._best = None
        self._shows_batch = self.args.show_first_batch
        self._began = time.perf_counter() - self.record["seconds"]  # of a resumed run, those before
        with only_run(self.args.output_dir):
            if not is_resumed(resume_from_checkpoint):
                self._forget_skipped_rows()
            result = super().train(resume_from_checkpoint, *args, **kwargs)
        self.record["seconds"] = round(time.perf_counter() - self._began, 3)
        return result

    def _check_precision(self, resume: str | bool | None) -> None:
        if not is_resumed(resume) or self.plan.settings.given.bf16 is not None:
            return
        began = began_in(resume, self.args.output_dir)
        if began not in (None, (self.args.bf16, self.args.fp16)):
            bf16, fp16 = began
            raise ValueError(
                f"The run to resume began with bf16={bf16} and fp16={fp16}, and this one has "
                f"bf16={self.args.bf16} and fp16={self.args.fp16}. Give NormAlignConfig "
                "resume_from_checkpoint too, or bf16 and fp16."
            )

    def _forget_skipped_rows(self) -> None:
        """Has the count of rows with bad images begin at 0, in all processes at once."""
        if isinstance(self.data_collator, ConversationCollator):
            self.accelerator.wait_for_everyone()
            self.data_collator.skipped_rows.clear()
            self.accelerator.wait_for_everyone()

    # TRL's own count would start again when a run is resumed; the Trainer saves its state.
    _total_train_tokens = property(
        lambda self: self.state.num_input_tokens_seen,
        lambda self, count: setattr(self.state, "num_input_tokens_seen", count),
    )

    def training_step(self, model, inputs, *args, **kwargs):
        """The Trainer's, whose errors say how large the pass was."""
        if self._shows_batch and {"input_ids", "labels"} <= inputs.keys():
            self._shows_batch = False
            self._show_batch(inputs)
        try:
            return super().training_step(model, inputs, *args, **kwargs)
        except RuntimeError as error:
            if "input_ids" in inputs:
                rows, tokens = inputs["input_ids"].shape
                error.add_note(f"a forward and backward pass of {rows:,} x {tokens:,} tokens")
            raise

    def _show_batch(self, batch: dict[str, Any]) -> None:
        """Prints the rows of a batch, of the first process."""
        if self.is_world_process_zero():
            console = Console()
            examples = batch_examples(batch, self.processing_class)
            console.print(marked(examples, console.is_terminal), soft_wrap=True)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """TRL's loss, with frozen modules in evaluation mode."""
        if self.model.training:
            eval_frozen(base_model(self.model))
            if self.label_smoother is not None and num_items_in_batch is not None:
                # The label smoother divides by it, and a step may have no labels.
                num_items_in_batch = torch.as_tensor(num_items_in_batch).clamp(min=1)
        result = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        loss = result[0] if return_outputs else result
        if self.model.training:
            self.finite.check_loss(loss, inputs)
        else:
            self._count_evaluated(inputs, loss)
        return result

    def _count_evaluated(self, inputs: dict[str, Any], loss: Tensor) -> None:
        """Adds a batch to the sums of [`evaluation_loop`]: its loss counts for rows with labels."""
        if "labels" not in inputs or self._evaluated is None:
            return
        with_labels, others = count_rows_with_labels(inputs)
        counts = torch.stack([loss.detach() * with_labels, with_labels, others])
        self._evaluated += counts.to(self._evaluated)

    def evaluation_loop(
        self,
        dataloader,
        description,
        prediction_loss_only=None,
        ignore_keys=None,
        metric_key_prefix="eval",
    ):
        """The Trainer's. Rows without labels, as those that are skipped, are in no average."""
        self._evaluated = torch.zeros(3, device=self.args.device)
        try:
            output = super().evaluation_loop(
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
            )
            losses, with_labels, others = reduce(self._evaluated, "sum").tolist()
        finally:
            self._evaluated = None
        name = f"{metric_key_prefix}_loss"
        if not others or name not in output.metrics:
            return output
        output.metrics[name] = float("nan")
        if with_labels:
            output.metrics[name] = losses / with_labels
        # TRL has zeros for a batch without labels.
        averages = self._metrics["eval"]
        pairs = zip(averages["entropy"], averages["mean_token_accuracy"], strict=True)
        with_label = [pair for pair in pairs if pair != (0.0, 0.0)]
        if with_label:
            averages["entropy"] = [entropy for entropy, _ in with_label]
            averages["mean_token_accuracy"] = [accuracy for _, accuracy in with_label]
        return output

    def _run_epoch(self, model, epoch, train_dataloader, **kwargs) -> None:
        # In several processes, accelerate does not tell our samplers the epoch of a resumed run.
        sampler = getattr(train_dataloader, "batch_sampler", None)
        while sampler is not None:
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
            sampler = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)
        # The Trainer looks for the end after a step: resumed at the end, it would take one more.
        if self.state.global_step < self.state.max_steps:
            super()._run_epoch(model, epoch, train_dataloader, **kwargs)
        else:
            self.control.should_training_stop = True

    def _get_grad_norm(self, model, grad_norm=None):
        self.measurements.after_clip(grad_norm)  # no callback gets the norm before clipping
        grad_norm = super()._get_grad_norm(model, grad_norm)
        if not self.finite.is_step_finite(self.model, grad_norm, self.accelerator.scaler):
            model.zero_grad()  # the optimizer skips parameters without a gradient
        return grad_norm

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds the measurements of this step to what TRL and the Trainer log."""
        if self.model.training:
            logs |= self.measurements.collect()
            if self.probe:
                logs |= self.probe.collect()
        super().log(logs, start_time)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves what the Trainer does, the records, and in `output_dir` the card.

        With `push_to_hub`, a user's call that saves to `output_dir` publishes it too. As with the
        Trainer's, all processes must call it under FSDP and ZeRO-3; otherwise the first one may.
        Raises FloatingPointError if weights are NaN or infinite.
        """
        self.finite.check_weights(self.model)
        folder = Path(output_dir or self.args.output_dir)
        if isinstance(self.model, FSDPModule):  # a class that FSDP2 derives, whose name is saved
            sharded = type(self.model)
            for name in ("__name__", "__qualname__", "__module__"):
                setattr(sharded, name, getattr(sharded.__bases__[-1], name))
        super().save_model(str(folder), _internal_call=True)
        if self.args.should_save:
            if self.is_in_train:
                self.record["seconds"] = round(time.perf_counter() - self._began, 3)
            record = {**self.record, "steps_done": self.state.global_step}
            if self._best is not None:
                record |= {"steps_done": self._best["step"], "best": self._best}
            write_json(folder / TRAINING_RECORD, record)
            if self.build is not None:
                write_json(folder / BUILD_RECORD, self.build)
                write_notices(folder, self.notices)
        if folder == Path(self.args.output_dir):
            self.create_model_card()
            if self.args.push_to_hub and not _internal_call:
                self.publish()

    def create_model_card(self, *args, **kwargs) -> None:
        """Writes our card into `output_dir` after training; arguments of TRL's card are ignored."""
        if self.is_world_process_zero() and not self.is_in_train:
            from ..hub_cards.card.write import write_card

            try:
                write_card(Path(self.args.output_dir), repo_id=self.hub_model_id)
            except ValueError as error:  # a card by somebody else must not stop what follows
                logger.warning(f"The card of {self.args.output_dir} was not written: {error}")

    def push_to_hub(
        self, *args, token: str | None = None, revision: str | None = None, private=None, **kwargs
    ) -> Any:
        """Saves the model, and [`publish`]es it. Other arguments of the Trainer's are ignored."""
        if self.hub_model_id is None:
            self.init_hf_repo(token=token or self.hub_token, private=private)
        self.save_model(_internal_call=True)
        return self.publish(token, revision)

    def publish(self, token: str | None = None, revision: str | None = None) -> Any:
        """Publishes `output_dir`, in the first process; an adapter alone if its base is on the Hub.

        If that fails, raises ValueError or OSError, with the command to run later.
        """
        if not self.is_world_process_zero():
            return None
        from ..hub_cards.push.checks import recorded_base
        from ..hub_cards.push.publish import publish

        folder = self.args.output_dir
        repo_id = self.hub_model_id
        token = token or self.hub_token
        revision = revision or self.args.hub_revision or "main"
        adapter = recorded_base(Path(folder)) is not None
        try:
            return publish(folder, repo_id, revision=revision, as_adapter=adapter, token=token)
        except (ValueError, OSError) as error:
            words = ["normalign", "publish", folder, "--repo-id", repo_id, "--revision", revision]
            if adapter:
                words.append("--adapter")
            kind = ValueError if isinstance(error, ValueError) else OSError
            result = f"The trained model is complete in {folder}."
            raise kind(f"{error}\n{result} Once that is fixed: `{shlex.join(words)}`.") from error

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        # PEFT saves adapters. DeepSpeed gives an empty state if it does not gather weights.
        if isinstance(self.model, PeftModel) or state_dict == {} or not self.args.should_save:
            super()._save(output_dir, state_dict)
            return
        folder = Path(output_dir or self.args.output_dir)
        model = self.model
        frozen = frozen_modules(model)
        if self.checkpoint and getattr(model.config, "quantization_config", None) is not None:
            model = self._unquantized_model(self.checkpoint, frozen)
            state_dict = None
        with weights.no_progress_bar(), replaced(self, model=model):
            super()._save(str(folder), {})
        layout = weights.stored_tensors(model, state_dict)
        linked = weights.unchanged_files(layout, frozen, self.weights_in)
        weights.write_weights(folder, layout, linked=linked)
        self.weights_in.insert(0, folder)
        if model is not self.model:
            self.unquantized = model.to("meta")
            self.unquantized.tie_weights()

    def _unquantized_model(self, checkpoint: Checkpoint, frozen: set[str]) -> nn.Module:
        """The quantized model in the precision that it was read in, with what was trained.

        What is frozen is written as it was read. It is on meta if an earlier save has its files.
        """
        own = self.model.state_dict()
        now = {name: own[name] for name in own if weights.module_of_file(name) not in frozen}
        if self.unquantized is not None:
            layout = weights.stored_tensors(self.unquantized)
            needed = set()
            for file, names in weights.shards_of(layout).items():
                if weights.module_of_file(names[0]) in frozen:
                    needed.add(file)
            if needed <= weights.unchanged_files(layout, frozen, self.weights_in).keys():
                self.unquantized.load_state_dict(now, strict=False, assign=True)
                return self.unquantized
        model = load_model(checkpoint, self.args, self.learning_rates)
        model.load_state_dict(now, strict=False)
        return model

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None) -> None:
        # PEFT loads an adapter in float32, and makes all of it trainable: both are undone.
        dtypes = {name: parameter.dtype for name, parameter in self.model.named_parameters()}
        with reading_checkpoint(resume_from_checkpoint):
            if isinstance(self.model, FSDPModule) and not isinstance(self.model, PeftModel):
                load_sharded(self.model, Path(resume_from_checkpoint))
            else:
                super()._load_from_checkpoint(resume_from_checkpoint, model)
        for name, parameter in self.model.named_parameters():
            if parameter.dtype != dtypes[name]:
                parameter.data = parameter.data.to(dtypes[name])
        freeze(self.model, self.learning_rates)
        self.weights_in.insert(0, Path(resume_from_checkpoint))

    def _load_optimizer_and_scheduler(self, checkpoint) -> None:
        with reading_checkpoint(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_rng_state(self, checkpoint) -> None:
        with reading_checkpoint(checkpoint):
            super()._load_rng_state(checkpoint)

    def _load_scaler(self, checkpoint) -> None:
        with reading_checkpoint(checkpoint):
            super()._load_scaler(checkpoint)

    def _load_best_model(self) -> None:
        if self.is_fsdp_enabled:
            self._load_from_checkpoint(self.state.best_model_checkpoint, self.model)
        else:
            super()._load_best_model()
        folder = Path(self.state.best_model_checkpoint)
        if not folder.exists():  # of which the Trainer warns
            return
        self._best = {
            "step": int(folder.name.rpartition("-")[2]),
            "of_steps": self.state.global_step,
            "metric": best_metric(self.args),
            "value": self.state.best_metric,
        }
        metric = f"{self._best['metric']} {self._best['value']:.4g}"
        steps = f"step {self._best['step']} of {self._best['of_steps']}"
        show(self.state, f"The weights of {steps} are kept: {metric}, the best.")

    def _save_optimizer_and_scheduler(self, output_dir) -> None:
        # The Trainer's saves all weights again where they are divided among processes.
        if self.is_deepspeed_enabled:

            def trained(**kwargs: bool) -> dict[str, Tensor]:
                parameters = trained_parameters(self.model)
                return {name: value.data for name, value in parameters.items()}

            with replaced(self.model_wrapped, module_state_dict=trained):
                self.model_wrapped.save_checkpoint(output_dir, exclude_frozen_parameters=True)
        elif isinstance(self.model, FSDPModule) and not isinstance(self.model, PeftModel):
            plugin = self.accelerator.state.fsdp_plugin
            save_fsdp_optimizer(plugin, self.accelerator, self.optimizer, self.model, output_dir)
        else:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _save_checkpoint(self, model, trial) -> None:
        folder = Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
        with writing_checkpoint(folder, self.args.world_size):
            self.accelerator.wait_for_everyone()  # until an earlier folder is removed
            super()._save_checkpoint(model, trial)

    def _save_rng_state(self, output_dir) -> None:
        # The first process writes trainer_state.json next: the mark of a complete checkpoint.
        super()._save_rng_state(output_dir)
        self.accelerator.wait_for_everyone()


OURS = {"_check_precision", "_describe", "_set_up", "_set_up_model", "_take_train_rows"}
OURS |= {"_add_callbacks", "_take_over"}
OURS |= {"_unquantized_model", "_count_evaluated", "_forget_skipped_rows", "_show_batch"}
"""Private methods that override none."""

# A method of ours that overrides none of theirs any more would be passed over without a word.
private = {name for name in vars(NormAlignTrainer) if re.match("_[a-z]", name)}
theirs = {*dir(SFTTrainer), *SFTTrainer.__init__.__code__.co_names}
if renamed := ", ".join(sorted(private - theirs - OURS)):
    raise ImportError(f"TRL's SFTTrainer has no {renamed} any more. Install an older transformers.")
