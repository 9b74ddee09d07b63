# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What TRL's `SFTTrainer` lacks in its steps: a learning rate for each module, and batches without images."""

from math import ceil

import torch
from accelerate.data_loader import SeedableRandomSampler
from datasets import IterableDataset
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, RandomSampler
from transformers import LlavaProcessor

from .callbacks import Measurements
from .deepspeed import keep_float32
from .depth_probe import CosineProbe
from .finite import FiniteCheck
from .model import MODULES, base_model, eval_frozen, module_of
from .packing import BalancedSampler, packed_stream
from .padding_free import ROW_LENGTHS
from .sampler import ModalityLengthGroupedSampler
from .saving import SavingTrainer
from .sharding import fill_gradients


class SteppingTrainer(SavingTrainer):
    """[`SFTTrainer`] with a learning rate for each module, and batches without images.

    Attributes:
        only_answers: Whether only the answers go through the head, not every position. By default on a CPU, where
            TRL's fused head lacks Triton.
    """

    measurements: Measurements
    only_answers: bool

    def _register_hooks(self, processor: LlavaProcessor) -> None:
        self.finite = FiniteCheck(self.model, self.args)
        self.add_callback(self.finite)
        self.only_answers = self.args.device.type == "cpu"
        self._answers: torch.Tensor | None = None
        self._without_images = False
        image = processor.image_processor(Image.new("RGB", (32, 32)), return_tensors="pt")
        self._image_shape = image["pixel_values"].shape
        inner = base_model(self.model).model
        inner.language_model.register_forward_pre_hook(self._run_tower_without_images, with_kwargs=True)
        inner.register_forward_hook(self._keep_answers_only)

    @property
    def _total_train_tokens(self) -> int:
        # TRL's own count would start again when a run is resumed; the Trainer saves its state.
        return self.state.num_input_tokens_seen

    @_total_train_tokens.setter
    def _total_train_tokens(self, count: int) -> None:
        self.state.num_input_tokens_seen = count

    def create_accelerator_and_postprocess(self) -> None:
        """The Trainer's, which puts a section `bf16` into DeepSpeed's configuration again."""
        super().create_accelerator_and_postprocess()
        if self.is_deepspeed_enabled:
            keep_float32(self.accelerator.state.deepspeed_plugin, self.args)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The Trainer's optimizer, its parameter groups split by module, each with the module's learning rate.

        The Trainer has one learning rate only (huggingface/transformers#10140). Weight decay stays as it sets it: none
        on biases and norms, so none on the gain.
        """
        if self.optimizer is None:
            optimizer = super().create_optimizer(model)
            names = {parameter: name for name, parameter in (model or self.model).named_parameters()}
            groups = []
            for group in optimizer.param_groups:
                for module in MODULES:
                    parameters = [p for p in group["params"] if module_of(names[p]) == module]
                    if parameters:
                        groups.append({**group, "params": parameters, "lr": self.learning_rates[module]})
            optimizer.param_groups = groups
            if self.is_fsdp_enabled:
                optimizer.register_step_pre_hook(fill_gradients)
        return self.optimizer

    def _get_train_sampler(self, train_dataset=None):
        args = self.args
        train_dataset = self.train_dataset if train_dataset is None else train_dataset
        grouped = args.train_sampling_strategy == "group_by_length"
        if not (grouped or args.packing) or "length" not in (train_dataset.column_names or []):
            return super()._get_train_sampler(train_dataset)
        columns = train_dataset.with_format(None)  # reads the columns alone, without building rows
        lengths, rows_per_step = columns["length"][:], self.get_total_train_batch_size(args)
        if grouped:  # the Trainer's own sampler knows no modalities
            has_image = [count > 0 for count in columns["image_count"]]
            seed = args.seed if args.data_seed is None else args.data_seed
            sampler = ModalityLengthGroupedSampler(lengths, has_image, batch_size=rows_per_step, seed=seed)
        else:
            sampler = super()._get_train_sampler(train_dataset)
        if not args.packing:
            return sampler
        if isinstance(sampler, RandomSampler):  # in the order that accelerate gives it later
            sampler = SeedableRandomSampler(train_dataset, data_seed=args.data_seed)
        return BalancedSampler(
            sampler,
            lengths,
            rows_per_step=rows_per_step,
            rows_per_pass=args.train_batch_size,
            accumulation=args.gradient_accumulation_steps,
            processes=args.world_size,
            rank=args.process_index,
            drop_last=args.dataloader_drop_last,
        )

    def get_train_dataloader(self) -> DataLoader:
        """The Trainer's data loader; with packing, of a stream of forward passes if the data are a stream."""
        args = self.args
        if args.tokens_per_device:  # again: the order of rows depends on torch's seed, which may have been set since
            self._derive_accumulation()
        if not (args.packing and isinstance(self.train_dataset, IterableDataset)):
            return super().get_train_dataloader()
        passes = packed_stream(
            self.train_dataset, args.train_batch_size, args.gradient_accumulation_steps, args.world_size
        )
        return self._get_dataloader(passes, description="Training", batch_size=1, is_training=True)

    def _derive_accumulation(self) -> None:
        args, sampler = self.args, self._get_train_sampler()
        sampler.grad_accum = 1
        epochs = args.max_steps / sampler.steps_per_epoch if args.max_steps > 0 else args.num_train_epochs
        args.gradient_accumulation_steps = sampler.fit(args.tokens_per_device, ceil(epochs))

    def get_total_train_batch_size(self, args) -> int:
        """Rows in an optimizer step, over all processes."""
        return args.global_batch_size or super().get_total_train_batch_size(args)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """TRL's loss, with frozen modules in evaluation mode, and on a CPU with the answers alone through the head.

        Without Triton, TRL's fused head scores every position, which on a CPU is two thirds of a small model's step.
        The decoder's output is therefore cut to the answers first.
        """
        inputs.pop(ROW_LENGTHS, None)
        if self.model.training:
            eval_frozen(base_model(self.model))
        answers = inputs["labels"][:, 1:] != -100
        shortened = not return_outputs and self.label_smoother is None and self.compute_loss_func is None
        if self.only_answers and shortened and answers.any():
            inputs["shift_labels"] = inputs.pop("labels")[:, 1:][answers][None]
            self._answers = answers
        self._without_images = "pixel_values" not in inputs
        try:
            loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            if self.model.training:
                self.finite.check_loss(loss[0] if return_outputs else loss)
            return loss
        finally:
            self._answers, self._without_images = None, False

    def _run_tower_without_images(self, module, args, kwargs):
        # Other processes may have images, and under FSDP2 and ZeRO-3 all must gather the tower's weights in the same
        # order: after the embeddings', before the decoder's. So a batch without images, in training or evaluation,
        # runs the tower on one blank image, whose features go nowhere and whose gradients are zero.
        if self._without_images:
            embeddings = kwargs["inputs_embeds"]
            blank = embeddings.new_zeros(self._image_shape)
            features = base_model(self.model).model.get_image_features(pixel_values=blank).pooler_output[0]
            nowhere = torch.zeros_like(embeddings, dtype=torch.bool)
            kwargs["inputs_embeds"] = embeddings.masked_scatter(nowhere, features.to(embeddings.dtype))
        return args, kwargs

    def _keep_answers_only(self, module, args, output):
        if self._answers is not None:
            output.last_hidden_state = output.last_hidden_state[:, :-1][self._answers][None]
        return output

    def _run_epoch(self, model, epoch, train_dataloader, **kwargs) -> None:
        # In several processes, accelerate does not tell a sampler of ours the epoch in which a run is resumed.
        sampler = getattr(train_dataloader, "batch_sampler", None)
        while sampler is not None:
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
            sampler = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)
        # The Trainer checks for the end of a run only after a step: resumed at the end, it would take one more.
        if self.state.global_step < self.state.max_steps:
            super()._run_epoch(model, epoch, train_dataloader, **kwargs)
        else:
            self.control.should_training_stop = True

    def _clip_grad_norm(self, model):
        # No callback gets the norm of the gradients before clipping.
        total = super()._clip_grad_norm(model)
        self.measurements.after_clip(total)
        return total

    def _get_grad_norm(self, model, grad_norm=None):
        grad_norm = super()._get_grad_norm(model, grad_norm)
        if not self.finite.may_step(grad_norm, self.accelerator.scaler):
            model.zero_grad()  # the optimizer skips parameters without a gradient
        return grad_norm

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds the measurements of this step to what TRL and the Trainer log."""
        if self.model.training:
            for callback in self.callback_handler.callbacks:
                if isinstance(callback, Measurements | CosineProbe):
                    logs.update(callback.collect())
        super().log(logs, start_time)
