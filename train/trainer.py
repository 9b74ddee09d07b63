# SPDX-License-Identifier: Apache-2.0
"""`NormAlignTrainer`: TRL's `SFTTrainer` for a model with a norm, and what it does differently."""

import os
import re
import shlex
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import reduce, save_fsdp_optimizer
from peft import PeftConfig, PeftModel
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
from ..console import Console
from ..data.rows.checks import DataReport
from ..data.sources.arguments import DataArguments
from ..data.sources.mixtures import is_prepared
from ..modeling_normalign_llava import NormAlignLlavaForConditionalGeneration
from .callbacks.checks import FiniteCheck, PackedAttentionCheck
from .callbacks.measurements import Measurements
from .callbacks.progress import LossCurve, show, show_lines
from .collator import (
    ConversationCollator,
    batch_examples,
    blank_image,
    count_rows_with_labels,
    marked,
)
from .keeping.checkpoints import (
    is_resumed,
    only_run,
    read_precision,
    reading_checkpoint,
    resolve_resume,
    writing_checkpoint,
)
from .keeping.record import check_resumed, data_record, digest_of_lengths, training_record
from .keeping.summary import RunSummary, summary
from .memory import MemoryEstimate, estimate_memory
from .modules.forward import eval_frozen, wrap_forward
from .modules.load import LoadedModel, load, load_model
from .modules.model import (
    PLACES,
    base_model,
    freeze,
    frozen_modules,
    module_of,
    replaced,
    trained_parameters,
)
from .modules.precision import train_in_float32
from .modules.sharding import fill_missing_gradients, load_sharded, prepare_sharding, sharding
from .modules.sizes import OptimizerClass, check_disk, disk_use
from .prepare import (
    GivenData,
    GivenModel,
    Plan,
    Rows,
    checked_rows,
    prepare,
    read_data,
)
from .samplers import passes_in_step, rows_in_step, train_sampler
from .settings import best_metric, keep_float32


logger = get_logger(__name__)  # logs in one process only


def refuse_arguments(formatting_func: Callable | None, optimizers: tuple) -> None:
    """Raises ValueError for arguments of `SFTTrainer` that cannot be used here."""
    if formatting_func is not None:
        raise ValueError("formatting_func makes text without images. Give rows of messages.")
    if optimizers != (None, None):
        raise ValueError("optimizers have other learning rates. Give optimizer_cls_and_kwargs.")


def options_for_trl(plan: Plan) -> dict[str, Any]:
    """Returns the values of options that TRL's constructor sees in place of the plan's."""
    # TRL refuses the first two for images (huggingface/trl#4339), and ignores the third.
    replacements: dict[str, Any] = dict(padding_free=False, packing=False, model_init_kwargs=None)
    if not isinstance(plan.data.collator, ConversationCollator):  # another checks its rows itself
        replacements["assistant_only_loss"] = False
        replacements["dataset_kwargs"] = {"skip_prepare_dataset": True}
    if plan.settings.dry_run:  # the Trainer would create both
        replacements["output_dir"] = gettempdir()
        replacements["push_to_hub"] = False
    return replacements


def pass_over_frozen(model: nn.Module, keys: Any) -> None:
    """Removes frozen parameters from the missing keys: DeepSpeed's checkpoints lack them."""
    keys.missing_keys[:] = trained_parameters(model).keys() & keys.missing_keys


class NormAlignTrainer(SFTTrainer):
    """[`SFTTrainer`] for NormAlign-LLaVA, with the same arguments in the same order.

    Args:
        model: Folder or Hub id of a checkpoint, or a model without adapters. What is trained is
            made float32. The rest is `args.model_init_kwargs["dtype"]`, or [`frozen_dtype`].
        args: `NormAlignConfig`, or an `SFTConfig`. With the latter, all modules get its learning
            rate. It is copied.
        data_collator: By default a [`ConversationCollator`]. Another one gets rows as they are.
        train_dataset: Rows in memory or a stream, in any form that `normalign train` reads, or
            `DataArguments` that name training and held-out rows.
        eval_dataset: Held-out rows, or several data sets by name.
        processing_class: The model's processor, by default the one in its folder.
        optimizer_cls_and_kwargs: As in [`SFTTrainer`]. Its `lr` replaces `learning_rate`.
        quantization_config: How to quantize a model that is loaded here.
        peft_config: A `LoraConfig`: see [`language_adapter`].
        formatting_func, optimizers: Refused, as they make text and have other learning rates.
        options: More dataclasses of options. They are recorded in `training.json`.

    Attributes:
        plan: What follows from the arguments: see [`Plan`].
        learning_rates: The peak learning rate of each module.
        facts: The [`summary`] (modules, data, batch, steps) and the disk that the run takes.

    Raises:
        ValueError: An argument, the model or the data is wrong. The message names it.
        TypeError: An argument has the wrong type.
        OSError: A file cannot be read or fetched.
    """

    train_dataset: Any
    data_collator: Any

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
        optimizer_cls_and_kwargs: OptimizerClass | None = None,
        preprocess_logits_for_metrics: Callable[[Tensor, Tensor], Tensor] | None = None,
        quantization_config: BitsAndBytesConfig | None = None,
        peft_config: PeftConfig | None = None,
        formatting_func: Callable | None = None,
        *,
        options: Sequence[Any] = (),
    ):
        refuse_arguments(formatting_func, optimizers)
        plan = prepare(
            args,
            GivenModel(model, processing_class, quantization_config, peft_config),
            GivenData(train_dataset, eval_dataset, data_collator),
            optimizer=optimizer_cls_and_kwargs,
            has_metrics=compute_metrics is not None,
        )
        loaded = load(plan)
        self._keep_and_fetch(plan, loaded, options)
        with replaced(loaded.settings, **options_for_trl(plan)):
            super().__init__(
                loaded.model,
                loaded.settings,
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
        self.hub_token = self.args.hub_token
        self.args.hub_token = None  # options are saved too
        self.args.set_derived()
        self._set_up_model()
        self._add_callbacks()
        # The rows that `facts` and `record` describe.
        self._checked_train_rows = self.train_dataset
        self._set_facts_and_record(plan.data.report)

    def _keep_and_fetch(self, plan: Plan, loaded: LoadedModel, options: Sequence[Any]) -> None:
        """Keeps what the plan and the model say, before TRL's trainer is made.

        Reads records and notices of the checkpoint, and fetches them if it is on the Hub.
        """
        self.plan = plan
        self.checkpoint = plan.model.checkpoint
        self.learning_rates = plan.learning_rates
        self.precision = loaded.precision
        self.weights_in = loaded.weights_in
        self.unquantized_on_meta: nn.Module | None = None  # the model as it is saved, on meta
        self.record = training_record(plan, loaded, options)
        model_name = loaded.model.name_or_path
        self.build = read_record(model_name, BUILD_RECORD, loaded.commit)
        self.notices = fetch_notices(self.build, model_name, loaded.commit)
        self.measurements = Measurements(loaded.settings)
        self.probe: Any = None
        self.current_gradient_accumulation_steps = plan.settings.gradient_accumulation_steps
        self._best: dict[str, Any] | None = None  # the step of the weights, if not the last one
        # While rows are evaluated: the sum of their losses, their number, the number of skipped.
        self._evaluated: Tensor | None = None
        self._will_show_batch = False  # whether the first batch is still to be shown

    def _set_facts_and_record(self, report: DataReport) -> None:
        """Counts the steps of a run on the training rows, and sets `facts` and `record`."""
        train_loader = self.get_train_dataloader()
        steps = self.set_initial_training_values(self.args, train_loader)[-1]
        self.facts = summary(self, report, steps)
        self.facts["disk"] = disk_use(
            self.model, self.args, steps, self.weights_in, self.optimizer_cls_and_kwargs
        )
        self.record["data"] = data_record(report)
        self.record["row_lengths"] = digest_of_lengths(self.train_dataset)
        self.record["sharding"] = sharding()
        self.record["run"] = {name: value for name, value in self.facts.items() if name != "data"}

    def _check_new_train_rows(self) -> None:
        """Checks training rows that were set since the trainer was made, and sets the facts anew.

        Raises ValueError or TypeError if they cannot be trained on.
        """
        new_rows = self.train_dataset
        if new_rows is self._checked_train_rows:
            return
        if isinstance(new_rows, DataArguments):
            raise TypeError("train_dataset is a DataArguments. Set a Dataset or a stream.")
        args = self.args
        given = GivenData(new_rows, collator=self.data_collator)
        checked = read_data(given, self.processing_class, args, self.learning_rates)
        rows = checked.train
        if args.packing:  # as many passes in a step as these rows need
            passes = passes_in_step(args, rows)
            args.set_derived(gradient_accumulation_steps=passes)
            self.current_gradient_accumulation_steps = passes
        self.train_dataset = self._checked_train_rows = rows
        self.data_collator = checked.collator
        held_out = [source for source in self.plan.data.report.sources if source.split != "train"]
        self._set_facts_and_record(DataReport(checked.report.sources + held_out))
        if self.probe is not None:
            self.probe.batch = type(self.probe).of_rows(rows, checked.collator, args).batch

    def _set_up_model(self) -> None:
        """Freezes modules, makes the others float32, and wraps the forward pass."""
        args = self.args
        model = base_model(self.model)
        if isinstance(self.model, PeftModel):  # its card would have the base's local path
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
        """Adds the callbacks that the options ask for."""
        args = self.args
        self.finite = FiniteCheck(args)
        self.add_callback(self.finite)
        if args.padding_free:
            self.add_callback(PackedAttentionCheck)
        if args.early_stopping_patience is not None:
            self.add_callback(
                EarlyStoppingCallback(
                    args.early_stopping_patience, args.early_stopping_threshold or 0.0
                )
            )
        self.add_callback(LossCurve)
        show_lines(self)
        if args.probe_steps:
            from .callbacks.depth_probe import CosineProbe  # late: few runs have one

            self.probe = CosineProbe.of_rows(self.train_dataset, self.data_collator, args)
            self.add_callback(self.probe)
        # The rows of another collator are unknown.
        if self.eval_dataset is not None and isinstance(self.data_collator, ConversationCollator):
            from .callbacks.samples import sample_callback  # late: it imports what answers

            is_sharded = self.is_fsdp_enabled or is_deepspeed_zero3_enabled()
            samples = sample_callback(self.eval_dataset, args, is_sharded=is_sharded)
            if samples is not None:
                self.add_callback(samples)

    def create_accelerator_and_postprocess(self) -> None:
        """Makes the accelerator. Removes the section `bf16` that the Trainer adds for DeepSpeed."""
        super().create_accelerator_and_postprocess()
        if self.is_deepspeed_enabled:
            keep_float32(self.accelerator.state.deepspeed_plugin, self.args)

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """Makes the optimizer with a rate for each module (huggingface/transformers#10140)."""
        if self.optimizer is not None:
            return self.optimizer
        modules = {}
        trained = set()
        for parameter_name, parameter in (model or self.model).named_parameters():
            modules[parameter] = module_of(parameter_name)
            if parameter.requires_grad:
                trained.add(modules[parameter])
        first_module = next((module for module in PLACES if module in trained), "")
        # The optimizer's own rate is the rate of its first group. min_lr is a share of it.
        first_rate = self.learning_rates.get(first_module, self.args.learning_rate)
        with replaced(self.args, learning_rate=first_rate):
            optimizer = super().create_optimizer(model)
        groups = []
        for group, module in product(optimizer.param_groups, PLACES):
            parameters = [value for value in group["params"] if modules[value] == module]
            if parameters:
                groups.append(group | {"params": parameters, "lr": self.learning_rates[module]})
        # The Trainer logs the rate of the first group. A norm has no group with weight decay.
        for place, group in enumerate(groups):
            if modules[group["params"][0]] == first_module:
                groups.insert(0, groups.pop(place))
                break
        optimizer.param_groups = groups
        if self.is_fsdp_enabled:
            optimizer.register_step_pre_hook(fill_missing_gradients)
        return self.optimizer

    def _get_dataloader(self, *args, **kwargs) -> DataLoader:
        # A loader that begins an epoch draws a number. Drawn from the common random state, it would
        # change dropout with the number of readers, with evaluations, and when a run is resumed.
        loader = super()._get_dataloader(*args, **kwargs)
        own_loader = getattr(loader, "base_dataloader", loader)
        own_loader.generator = torch.Generator().manual_seed(self.args.seed)
        return loader

    def _get_train_sampler(self, train_dataset=None):
        if train_dataset is None:
            train_dataset = self.train_dataset
        return train_sampler(self.args, train_dataset) or super()._get_train_sampler(train_dataset)

    def get_total_train_batch_size(self, args) -> int:
        """Returns the rows of an optimizer step, over all processes."""
        return rows_in_step(args)

    def get_train_dataloader(self) -> DataLoader:
        """Returns a data loader of rows in any form that the constructor takes.

        Raises ValueError or TypeError if rows were set that cannot be trained on.
        """
        self._check_new_train_rows()
        return super().get_train_dataloader()

    def get_eval_dataloader(self, eval_dataset: str | Rows | None = None) -> DataLoader:
        """Returns a data loader of rows in any form that the constructor takes."""
        if isinstance(eval_dataset, Rows):  # the Trainer would keep their loader for other rows
            return self.get_test_dataloader(eval_dataset)
        rows = self.eval_dataset
        if isinstance(eval_dataset, str):
            rows = rows[eval_dataset]
        is_ours = isinstance(self.data_collator, ConversationCollator)
        if is_ours and isinstance(rows, Rows) and not is_prepared(rows):  # set by a user
            return self.get_test_dataloader(rows)
        return super().get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Rows) -> DataLoader:
        """Returns a data loader of rows in any form that the constructor takes.

        Raises ValueError or TypeError if the rows cannot be used.
        """
        rows, _ = checked_rows(test_dataset, "eval_dataset", self.data_collator, self.args)
        return super().get_test_dataloader(rows)

    def estimate_memory(self, gradient_checkpointing: bool | None = None) -> MemoryEstimate:
        """Returns the memory of a step on the longest rows: see [`estimate_memory`]."""
        self._check_new_train_rows()
        return estimate_memory(self, gradient_checkpointing)

    def summary(self) -> RunSummary:
        """Returns the tables that `normalign train` prints before its first step."""
        self._check_new_train_rows()
        return RunSummary(self.record, self.facts, Path(self.args.output_dir))

    def check_resumed(self, checkpoint: Path) -> None:
        """Checks that this run can go on from a checkpoint, and takes over its seconds.

        Raises:
            ValueError: The checkpoint belongs to another run.
        """
        self.record["seconds"] = check_resumed(self.record, self.build, checkpoint)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args, **kwargs):
        """Trains. `True` resumes from the newest complete checkpoint in `output_dir`.

        Raises:
            ValueError: Another run writes to `output_dir`, the disk has too little space, a
                checkpoint is damaged, or the checkpoint to resume from belongs to another run or
                had another precision.
            FloatingPointError: Weights or a step are not finite.
        """
        settings = self.args
        if settings.dry_run:
            raise ValueError("With dry_run no weights are loaded. To train, leave it out.")
        self._check_new_train_rows()
        is_new = not is_resumed(resume_from_checkpoint)
        output = Path(settings.output_dir)
        if not is_new:
            checkpoint = resolve_resume(resume_from_checkpoint, output, settings.world_size)
            if checkpoint is None:
                raise ValueError(f"{output} holds no complete checkpoint to resume from.")
            resume_from_checkpoint = str(checkpoint)
            precision = read_precision(resume_from_checkpoint, settings.output_dir)
            is_given = self.plan.settings.given.bf16 is not None
            if not is_given and precision not in (None, (settings.bf16, settings.fp16)):
                bf16, fp16 = precision
                raise ValueError(
                    f"The run to resume began with bf16={bf16} and fp16={fp16}, and this one has "
                    f"bf16={settings.bf16} and fp16={settings.fp16}. Give NormAlignConfig "
                    "resume_from_checkpoint too, or bf16 and fp16."
                )
            self.check_resumed(checkpoint)
        if settings.should_save:
            check_disk(output, self.facts["disk"]["total"])
        self._best = None
        self._will_show_batch = settings.show_first_batch
        self._began = time.perf_counter() - self.record["seconds"]  # as if it had not stopped
        with only_run(output):
            if is_new and isinstance(self.data_collator, ConversationCollator):
                # The count of rows with bad images begins at 0, in all processes at once.
                self.accelerator.wait_for_everyone()
                self.data_collator.skipped_rows.clear()
                self.accelerator.wait_for_everyone()
            result = super().train(resume_from_checkpoint, *args, **kwargs)
        self.record["seconds"] = round(time.perf_counter() - self._began, 3)
        return result

    # TRL's own count would start again when a run is resumed. The Trainer saves its state.
    _total_train_tokens = property(
        lambda self: self.state.num_input_tokens_seen,
        lambda self, count: setattr(self.state, "num_input_tokens_seen", count),
    )

    def training_step(self, model, inputs, *args, **kwargs):
        """Takes a step, after showing the first batch. Errors say how large the pass was."""
        if self._will_show_batch and {"input_ids", "labels"} <= inputs.keys():
            self._will_show_batch = False
            console = Console(quiet=not self.is_world_process_zero())
            examples = batch_examples(inputs, self.processing_class)
            console.print(marked(examples, console.is_terminal), soft_wrap=True)
        try:
            return super().training_step(model, inputs, *args, **kwargs)
        except RuntimeError as error:
            if "input_ids" in inputs:
                rows, tokens = inputs["input_ids"].shape
                error.add_note(f"a forward and backward pass of {rows:,} x {tokens:,} tokens")
            raise

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Returns TRL's loss, with frozen modules in evaluation mode."""
        if self.model.training:
            eval_frozen(base_model(self.model))
            if self.label_smoother is not None and num_items_in_batch is not None:
                # The label smoother divides by this number, and a step may have no labels.
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
        """Evaluates. Rows without labels, such as skipped rows, are in no average."""
        self._evaluated = torch.zeros(3, device=self.args.device)
        try:
            output = super().evaluation_loop(
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
            )
            losses, rows_with_labels, other_rows = reduce(self._evaluated, "sum").tolist()
        finally:
            self._evaluated = None
        loss_name = f"{metric_key_prefix}_loss"
        if not other_rows or loss_name not in output.metrics:
            return output
        output.metrics[loss_name] = float("nan")
        if rows_with_labels:
            output.metrics[loss_name] = losses / rows_with_labels
        # For a batch without labels TRL has kept zeros. They are left out of the averages.
        averages = self._metrics["eval"]
        pairs = zip(averages["entropy"], averages["mean_token_accuracy"], strict=True)
        pairs_with_labels = [pair for pair in pairs if pair != (0.0, 0.0)]
        if pairs_with_labels:
            entropies, accuracies = zip(*pairs_with_labels, strict=True)
            averages["entropy"] = list(entropies)
            averages["mean_token_accuracy"] = list(accuracies)
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
        if not self.finite.may_take_step(self.model, grad_norm, self.accelerator.scaler):
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

        With `push_to_hub`, a user's call that saves to `output_dir` publishes it too. Under FSDP
        and ZeRO-3 all processes must call it. Otherwise the first one may, as with the Trainer's.

        Raises:
            FloatingPointError: Weights are NaN or infinite.
            ValueError: Publishing fails, as in [`publish`].
            OSError: Writing fails, or publishing.
        """
        self.finite.check_weights(self.model)
        folder = Path(output_dir or self.args.output_dir)
        if isinstance(self.model, FSDPModule):  # FSDP2 derives a class, and its name is saved
            sharded_class = type(self.model)
            for attribute in ("__name__", "__qualname__", "__module__"):
                setattr(sharded_class, attribute, getattr(sharded_class.__bases__[-1], attribute))
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
        """Writes our card into `output_dir`, unless training is under way.

        Arguments of TRL's card are ignored.
        """
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
        """Publishes `output_dir`, in the first process. It returns None in the others.

        If the base of an adapter is on the Hub, only the adapter is published.

        Raises:
            ValueError: The folder cannot be published. The message has the command to run later.
            OSError: The Hub cannot be reached, or refuses. The message has that command too.
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
            error_class = ValueError if isinstance(error, ValueError) else OSError
            command = (
                f"normalign publish {shlex.quote(folder)} --repo-id {repo_id} --revision {revision}"
            )
            if adapter:
                command += " --adapter"
            result = f"The trained model is complete in {folder}."
            raise error_class(f"{error}\n{result} Once that is fixed: `{command}`.") from error

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
        linked = weights.reusable_files(layout, frozen, self.weights_in)
        weights.write_weights(folder, layout, linked=linked)
        self.weights_in.insert(0, folder)
        if model is not self.model:
            self.unquantized_on_meta = model.to("meta")
            self.unquantized_on_meta.tie_weights()

    def _unquantized_model(self, checkpoint: Checkpoint, frozen: set[str]) -> nn.Module:
        """Returns the quantized model in the precision that it was read in, with trained weights.

        Frozen modules are written as they were read. They are on meta if an earlier save has their
        files.
        """
        trained_state = self.model.state_dict()
        for tensor_name in list(trained_state):
            if weights.module_of_tensor(tensor_name) in frozen:
                del trained_state[tensor_name]
        if self.unquantized_on_meta is not None:
            layout = weights.stored_tensors(self.unquantized_on_meta)
            shards = weights.shards_of(layout)
            frozen_files = {
                file for file in shards if weights.module_of_tensor(shards[file][0]) in frozen
            }
            if frozen_files <= weights.reusable_files(layout, frozen, self.weights_in).keys():
                self.unquantized_on_meta.load_state_dict(trained_state, strict=False, assign=True)
                return self.unquantized_on_meta
        model = load_model(checkpoint, self.args, self.learning_rates)
        model.load_state_dict(trained_state, strict=False)
        return model

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None) -> None:
        # PEFT loads an adapter in float32 and makes all of it trainable. Both are undone.
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
        if not folder.exists():  # the Trainer has warned that it is missing
            return
        step = int(folder.name.rpartition("-")[2])
        last_step = self.state.global_step
        metric = best_metric(self.args)
        value = self.state.best_metric
        self._best = {"step": step, "of_steps": last_step, "metric": metric, "value": value}
        kept = f"The weights of step {step} of {last_step} are kept"
        show(self.state, f"{kept}: {metric} {value:.4g}, the best.")

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


OURS = {
    "_add_callbacks",
    "_check_new_train_rows",
    "_count_evaluated",
    "_keep_and_fetch",
    "_set_facts_and_record",
    "_set_up_model",
    "_unquantized_model",
}
"""Private methods that override none."""

# If theirs was renamed, a method of ours that overrides it would silently have no effect.
private = {name for name in vars(NormAlignTrainer) if re.match("_[a-z]", name)}
theirs = {*dir(SFTTrainer), *SFTTrainer.__init__.__code__.co_names}
if renamed := ", ".join(sorted(private - theirs - OURS)):
    raise ImportError(f"TRL's SFTTrainer has no {renamed} any more. Install an older transformers.")
