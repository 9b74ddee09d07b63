# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""TRL's `SFTTrainer` with what it lacks: rates by module, a float32 gain, batches without pictures, safe saves."""

import json
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig
from PIL import Image
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import LlavaProcessor, TrainerCallback
from transformers.integrations import is_deepspeed_zero3_enabled

from ..build import BUILD_RECORD
from ..modeling_normalign_llava import NormAlignLlavaForConditionalGeneration
from ..provenance import read_beside
from .arguments import TrainArguments
from .callbacks import Measurements
from .checkpoints import write_failure, writing_checkpoint
from .collator import ConversationCollator
from .model import MODULES, RECORD, base_model, eval_frozen, freeze, module_of, projector_norm, restore_projector
from .probe import CosineProbe
from .push import PushingTrainer
from .record import Clock
from .sampler import ModalityLengthGroupedSampler
from .sharding import fill_gradients, name_as_unsharded, name_fsdp_units
from .stages import accumulation_steps


class NormAlignTrainer(PushingTrainer):
    """[`SFTTrainer`] for NormAlign-LLaVA.

    Args:
        model: the model, without adapters.
        args: options; `args.global_batch_size` decides the accumulation steps for the number of processes at hand.
        train_dataset: canonical rows, as [`load_data`] gives them.
        processing_class: the model's processor.
        peft_config: adapters to train in place of the language model, as [`lora_config`] makes it.
        eval_dataset: held-out rows in the same form.
        data_collator: makes batches of rows; by default one that stops at a picture that cannot be read.
        record: what to keep beside every checkpoint, in `training.json`, as [`training_record`] gives it; the seconds
            of training are added. The card tells of the training by it.
        callbacks: more callbacks.

    Raises:
        ValueError: the global batch does not divide among the processes.
    """

    def __init__(
        self,
        model: NormAlignLlavaForConditionalGeneration,
        args: TrainArguments,
        train_dataset,
        processing_class: LlavaProcessor,
        *,
        peft_config: PeftConfig | None = None,
        eval_dataset=None,
        data_collator: ConversationCollator | None = None,
        record: dict[str, Any] | None = None,
        callbacks: list[TrainerCallback] | None = None,
    ):
        args.gradient_accumulation_steps = accumulation_steps(args)
        self.rates = args.rates(use_peft=peft_config is not None)
        self.record = record or {}
        self.build = read_beside(model.name_or_path, BUILD_RECORD, self.record.get("model_revision"))
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
        super().__init__(
            model=model,
            args=args,
            data_collator=data_collator or ConversationCollator(processing_class),
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            callbacks=[self.clock, self.measurements, *(callbacks or [])],
            peft_config=peft_config,
        )
        if peft_config is not None and not is_deepspeed_zero3_enabled():  # which keeps float32 copies of its own
            restore_projector(self.model, projector, wide=args.bf16 or args.fp16)
        freeze(self.model, self.rates)
        self._answers: torch.Tensor | None = None
        self._without_pictures = False
        picture = processing_class.image_processor(Image.new("RGB", (32, 32)), return_tensors="pt")
        self._picture_shape = picture["pixel_values"].shape
        inner = base_model(self.model).model
        inner.language_model.register_forward_pre_hook(self._show_a_picture, with_kwargs=True)
        inner.register_forward_hook(self._keep_answers)
        if self.is_fsdp_enabled:
            name_fsdp_units(self.accelerator.state.fsdp_plugin, base_model(self.model))

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The Trainer's optimizer, its parameter groups split by module, each with the module's own rate.

        The Trainer knows one learning rate only (huggingface/transformers#10140). Weight decay stays what it made it:
        none on biases and norms, so none on the gain.
        """
        if self.optimizer is None:
            optimizer = super().create_optimizer(model)
            names = {parameter: name for name, parameter in (model or self.model).named_parameters()}
            groups = []
            for group in optimizer.param_groups:
                for module in MODULES:
                    parameters = [p for p in group["params"] if module_of(names[p]) == module]
                    if parameters:
                        groups.append({**group, "params": parameters, "lr": self.rates[module]})
            optimizer.param_groups = groups
            if self.is_fsdp_enabled:
                optimizer.register_step_pre_hook(fill_gradients)
        return self.optimizer

    def _get_train_sampler(self, train_dataset=None):
        # TRL's vision data has no token lengths and knows no modalities, so the Trainer's own sampler cannot be used.
        train_dataset = self.train_dataset if train_dataset is None else train_dataset
        if self.args.train_sampling_strategy != "group_by_length" or "length" not in (
            train_dataset.column_names or []
        ):
            return super()._get_train_sampler(train_dataset)
        return ModalityLengthGroupedSampler(
            train_dataset["length"],
            [count > 0 for count in train_dataset["image_count"]],
            batch_size=self.args.train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size,
            seed=self.args.seed if self.args.data_seed is None else self.args.data_seed,
        )

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """TRL's loss, with what is frozen in evaluation mode, and off CUDA only the answers through the head.

        TRL's fused head scores every position where there is no Triton, which on a CPU is two thirds of the time of a
        small model's step; the decoder's output is therefore cut to the answers before it gets there.
        """
        if self.model.training:
            eval_frozen(base_model(self.model))
        answers = inputs["labels"][:, 1:] != -100
        shortened = not return_outputs and self.label_smoother is None
        if answers.device.type == "cpu" and shortened and answers.any():
            inputs["shift_labels"] = inputs.pop("labels")[:, 1:][answers][None]
            self._answers = answers
        self._without_pictures = "pixel_values" not in inputs
        try:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        finally:
            self._answers, self._without_pictures = None, False

    def _show_a_picture(self, module, args, kwargs):
        # A batch without pictures, in training or evaluation. Other processes may have pictures, and under FSDP2 and
        # ZeRO-3 all must gather the tower's weights, in the same order: after the embeddings', before the decoder's.
        # So the tower runs on one blank picture, whose features go nowhere and whose gradients are zero.
        if self._without_pictures:
            embeddings = kwargs["inputs_embeds"]
            blank = embeddings.new_zeros(self._picture_shape)
            features = base_model(self.model).model.get_image_features(pixel_values=blank).pooler_output[0]
            nowhere = torch.zeros_like(embeddings, dtype=torch.bool)
            kwargs["inputs_embeds"] = embeddings.masked_scatter(nowhere, features.to(embeddings.dtype))
        return args, kwargs

    def _keep_answers(self, module, args, output):
        if self._answers is not None:
            output.last_hidden_state = output.last_hidden_state[:, :-1][self._answers][None]
        return output

    def _clip_grad_norm(self, model):
        # No callback is told the norm of the gradients before clipping.
        total = super()._clip_grad_norm(model)
        self.measurements.after_clip(total)
        return total

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds the measurements of this step to what TRL and the Trainer log."""
        if self.model.training:
            for callback in self.callback_handler.callbacks:
                if isinstance(callback, Measurements | CosineProbe):
                    logs.update(callback.collect())
        super().log(logs, start_time)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves what the Trainer saves, the records of how it was built and trained, and in `output_dir` the card.

        With `push_to_hub`, a call of the user's pushes `output_dir` too, as the Trainer does.

        Raises:
            OSError: There is no room, or the Hub or the connection failed.
            ValueError: What [`push_to_hub`] raises.
        """
        folder = Path(output_dir or self.args.output_dir)
        if isinstance(self.model, FSDPModule):
            name_as_unsharded(self.model)
        try:
            readme = folder / "README.md"
            card = readme.read_bytes() if readme.exists() else None
            super().save_model(str(folder), _internal_call=True)
            if self.args.should_save:
                if card is not None:
                    readme.write_bytes(card)
                else:  # PEFT's own names the base by its local path
                    readme.unlink(missing_ok=True)
                for name, content in {RECORD: self._record_so_far(), BUILD_RECORD: self.build}.items():
                    if content is not None:
                        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
            if folder == Path(self.args.output_dir):
                self.create_model_card()
        except Exception as error:
            if _internal_call or (cause := write_failure(error)) is None:
                raise
            remedy = "Make room, and go on from the last checkpoint with --resume_from_checkpoint."
            raise OSError(f"{folder} could not be written: {cause}. {remedy}") from error
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save")

    def _record_so_far(self) -> dict[str, Any] | None:
        seconds = round(self.record.get("seconds", 0.0) + self.clock.seconds, 3)
        return {**self.record, "seconds": seconds, "steps_done": self.state.global_step} if self.record else None

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None) -> None:
        # PEFT makes an adapter float32, and all of it trainable, as it loads it: the run would not go on as it was.
        dtypes = {name: parameter.dtype for name, parameter in self.model.named_parameters()}
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        for name, parameter in self.model.named_parameters():
            if parameter.dtype != dtypes[name]:
                parameter.data = parameter.data.to(dtypes[name])
        freeze(self.model, self.rates)

    def _save_checkpoint(self, model, trial) -> None:
        # A save that fails says what to do and leaves no half-written folder behind.
        folder = Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
        with writing_checkpoint(folder, self.args.world_size):
            self.accelerator.wait_for_everyone()  # the first process removes what an earlier run left there
            super()._save_checkpoint(model, trial)
