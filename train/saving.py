# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Saving and loading: the model with its records and card, and complete checkpoints."""

import json
from pathlib import Path
from typing import Any

from torch.distributed.fsdp import FSDPModule

from ..checkpoint.files import write_failure
from ..checkpoint.names import BUILD_RECORD, TRAINING_RECORD
from .checkpoints import reading_checkpoint, writing_checkpoint
from .finite import FiniteCheck
from .model import freeze
from .push import PushingTrainer
from .record import Clock
from .sharding import name_as_unsharded


class SavingTrainer(PushingTrainer):
    """[`SFTTrainer`] that saves how the model was built and trained, and removes a checkpoint it cannot complete."""

    learning_rates: dict[str, float]
    record: dict[str, Any]
    build: dict[str, Any] | None
    clock: Clock
    finite: FiniteCheck

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves what the Trainer saves, the records of building and training, and in `output_dir` the card.

        With `push_to_hub`, a user's call also pushes `output_dir`, as the Trainer does. Under FSDP and ZeRO-3 all
        processes must call it, as the Trainer's; otherwise the first one alone may.

        Raises:
            OSError: The disk is full, or the Hub or the connection failed.
            ValueError: What [`push_to_hub`] raises.
            FloatingPointError: Training made weights NaN or infinite.
        """
        self.finite.check_weights(self.model)
        folder = Path(output_dir or self.args.output_dir)
        if isinstance(self.model, FSDPModule):
            name_as_unsharded(self.model)
        try:
            readme = folder / "README.md"
            card = readme.read_bytes() if readme.exists() else None
            token, self.args.hub_token = self.args.hub_token, None  # the options are saved too
            try:
                super().save_model(str(folder), _internal_call=True)
            finally:
                self.args.hub_token = token
            if self.args.should_save:
                # In place of PEFT's card, which has the base's local path.
                if card is not None:
                    readme.write_bytes(card)
                else:
                    readme.unlink(missing_ok=True)
                for name, content in {TRAINING_RECORD: self._record_so_far(), BUILD_RECORD: self.build}.items():
                    if content is not None:
                        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
            if folder == Path(self.args.output_dir):
                self.create_model_card()
        except Exception as error:
            if _internal_call or (cause := write_failure(error)) is None:
                raise
            remedy = "Make room, and resume from the last checkpoint with --resume_from_checkpoint."
            raise OSError(f"{folder} could not be written: {cause}. {remedy}") from error
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save")

    def _record_so_far(self) -> dict[str, Any]:
        seconds = round(self.record.get("seconds", 0.0) + self.clock.seconds, 3)
        return {**self.record, "seconds": seconds, "steps_done": self.state.global_step}

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None) -> None:
        # PEFT loads an adapter in float32 and makes all of it trainable: the run would not resume as it was.
        dtypes = {name: parameter.dtype for name, parameter in self.model.named_parameters()}
        with reading_checkpoint(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        for name, parameter in self.model.named_parameters():
            if parameter.dtype != dtypes[name]:
                parameter.data = parameter.data.to(dtypes[name])
        freeze(self.model, self.learning_rates)

    def _load_optimizer_and_scheduler(self, checkpoint) -> None:
        with reading_checkpoint(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_rng_state(self, checkpoint) -> None:
        with reading_checkpoint(checkpoint):
            super()._load_rng_state(checkpoint)

    def _save_checkpoint(self, model, trial) -> None:
        folder = Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
        with writing_checkpoint(folder, self.args.world_size):
            self.accelerator.wait_for_everyone()  # until the first process has removed an earlier folder
            super()._save_checkpoint(model, trial)

    def _save_rng_state(self, output_dir) -> None:
        # The first process writes trainer_state.json next, which marks the checkpoint as complete for all.
        super()._save_rng_state(output_dir)
        self.accelerator.wait_for_everyone()
