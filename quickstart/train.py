# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The quickstart's two training stages, each one call of TRL's `SFTTrainer` that goes on where it was stopped."""

import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel
from transformers import AutoProcessor
from trl import SFTConfig, SFTTrainer

from ..modeling_normalign_llava import NormAlignLlavaForConditionalGeneration
from .fetch import finished_folder


LANGUAGE_LINEARS = r".*language_model.*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"
PROJECTOR = "multi_modal_projector"


@dataclass(frozen=True)
class Stage:
    """What tells one stage from the other.

    Attributes:
        steps: Optimizer steps.
        learning_rate: Peak of the cosine schedule.
        lora_rank: Rank of the adapters on the language model; 0 trains projector and norm alone.
        batch_size: Conversations in one forward pass.
        accumulation: Forward passes per step.
        save_steps: Steps between two trainer checkpoints.
    """

    steps: int
    learning_rate: float
    lora_rank: int = 0
    batch_size: int = 8
    accumulation: int = 2
    save_steps: int = 20

    @property
    def rows(self) -> int:
        """Conversations that make one pass."""
        return self.steps * self.batch_size * self.accumulation


def train_stage(
    stage: Stage, checkpoint: Path, output: Path, dataset: Dataset, *, bf16: bool = False, seed: int = 0
) -> Path:
    """Trains `checkpoint` on `dataset` and leaves the result, merged, in `output`, which appears whole or not at all.

    Args:
        stage: Steps, learning rate and adapter rank.
        checkpoint: Folder of model and processor.
        output: Folder of the result. Trainer checkpoints lie beside it until it is finished.
        dataset: Columns `images` and `messages`; `stage.rows` rows are one pass.
        bf16: Multiply in bfloat16; parameters, gain and bias among them, stay float32.
        seed: Of the order of the rows and of the adapters' initial values.

    Returns:
        `output`.
    """
    if output.exists():
        return output
    trainer_folder = output.with_name(output.name + "-trainer")
    trainer = make_trainer(stage, checkpoint, trainer_folder, dataset, bf16=bf16, seed=seed)
    last = last_complete_checkpoint(trainer_folder)
    trainer.train(resume_from_checkpoint=str(last) if last else None)
    model = trainer.model.merge_and_unload() if stage.lora_rank else trainer.model
    with finished_folder(output) as folder:
        model.save_pretrained(folder)
        trainer.processing_class.save_pretrained(folder)
        trainer.state.save_to_json(str(folder / "trainer_state.json"))
    shutil.rmtree(trainer_folder)
    return output


def make_trainer(
    stage: Stage, checkpoint: Path, folder: Path, dataset: Dataset, *, bf16: bool = False, seed: int = 0
) -> SFTTrainer:
    """The stage's trainer, which writes its checkpoints to `folder`; other arguments are those of `train_stage`.

    Stage 1 (`lora_rank` 0) trains the projector with its norm. With a rank, adapters on the language model's linear
    layers are trained besides; they are named by a pattern, since PEFT's "all-linear" would reach into the vision
    tower as well. The loss is on the assistant's turns only.
    """
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32)
    peft_config = None
    if stage.lora_rank:
        peft_config = LoraConfig(
            r=stage.lora_rank,
            lora_alpha=2 * stage.lora_rank,
            target_modules=LANGUAGE_LINEARS,
            modules_to_save=[PROJECTOR],  # its linear layers and norm in full, in the adapter
        )
    else:
        model.requires_grad_(False)
        model.model.multi_modal_projector.requires_grad_(True)
    arguments = SFTConfig(
        output_dir=str(folder),
        max_steps=stage.steps,
        per_device_train_batch_size=stage.batch_size,
        gradient_accumulation_steps=stage.accumulation,
        learning_rate=stage.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=max(1, stage.steps // 20),
        weight_decay=0.0,
        max_length=None,  # a truncated row would lose image placeholders
        assistant_only_loss=True,
        gradient_checkpointing=False,
        bf16=bf16,
        use_cpu=not torch.cuda.is_available(),
        save_steps=stage.save_steps,
        save_total_limit=1,
        logging_steps=10,
        report_to="none",
        seed=seed,
    )
    return AnswerLossTrainer(
        model=model,
        args=arguments,
        train_dataset=dataset,
        processing_class=AutoProcessor.from_pretrained(checkpoint),
        peft_config=peft_config,
    )


class AnswerLossTrainer(SFTTrainer):
    """`SFTTrainer` with the same loss, for which only the tokens of answers go through the language model's head.

    Without Triton, TRL's fused head scores every position of a conversation and masks all but the answers' afterwards;
    with a vocabulary of 49,216 and two answer tokens in thirty, that was two thirds of a step's time.
    """

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Cross entropy over the labelled tokens: their sum, divided by how many the optimizer step has."""
        labels = inputs["labels"][:, 1:]
        answered = labels != -100
        model = self.accelerator.unwrap_model(model)
        model = model.get_base_model() if isinstance(model, PeftModel) else model
        backbone_inputs = {name: value for name, value in inputs.items() if name != "labels"}
        with self.accelerator.autocast():
            hidden = model.model(**backbone_inputs, use_cache=False).last_hidden_state[:, :-1]
            logits = model.lm_head(hidden[answered]).float()
        count = answered.sum() if num_items_in_batch is None else num_items_in_batch
        loss = torch.nn.functional.cross_entropy(logits, labels[answered], reduction="sum") / count
        return (loss, {"logits": logits}) if return_outputs else loss


def last_complete_checkpoint(folder: Path) -> Path | None:
    """The newest trainer checkpoint that was written to its end, or None.

    The trainer writes `trainer_state.json` last, so a checkpoint during which the process was killed has none that
    parses. Such folders are removed: the trainer would otherwise count them among those it keeps.
    """
    complete = []
    for candidate in folder.glob("checkpoint-*"):
        try:
            step = json.loads((candidate / "trainer_state.json").read_text(encoding="utf-8"))["global_step"]
        except (FileNotFoundError, json.JSONDecodeError):
            shutil.rmtree(candidate)
        else:
            complete.append((step, candidate))
    return max(complete)[1] if complete else None


def bfloat16_pays() -> bool:
    """Whether this machine multiplies bfloat16 matrices at least twice as fast as float32 ones.

    Processors with AVX512-BF16 or AMX do, by a factor of three and more; others emulate it and lose.
    """
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported()
    return best_seconds(torch.float32) > 2 * best_seconds(torch.bfloat16)


def best_seconds(dtype: torch.dtype, repeats: int = 10) -> float:
    """Shortest time of a product of the size that training is made of."""
    x, weight = torch.randn(1024, 576, dtype=dtype), torch.randn(1536, 576, dtype=dtype)
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        torch.nn.functional.linear(x, weight)
        seconds.append(time.perf_counter() - start)
    return min(seconds)
