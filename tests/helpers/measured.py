"""A tiny model trained by TRL's trainer while its modules are measured."""

import copy

import torch
from datasets import Dataset
from peft import LoraConfig
from PIL import Image
from transformers import AutoProcessor
from trl import SFTConfig, SFTTrainer

from normalign_llava import NormAlignLlavaForConditionalGeneration
from normalign_llava.train.callbacks.measurements import Measurements


LINEARS = r".*language_model.*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"
COLOURS = ("red", "green", "blue")


def rows(count: int, images=True) -> Dataset:
    def row(number):
        colour = COLOURS[number % 3]
        image = [{"type": "image"}] if images else []
        user = [*image, {"type": "text", "text": "which colour" + "?" * (number % 4)}]
        answer = [{"type": "text", "text": colour}]
        messages = [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]
        return {"images": [Image.new("RGB", (16, 16), colour)] * images, "messages": messages}

    return Dataset.from_list([row(number) for number in range(count)])


class Trainer(SFTTrainer):
    """The calls that the room's trainer makes, on TRL's."""

    def __init__(self, *args, measurements=None, **kwargs):
        self.measurements = measurements
        self.batches, self.totals = [], []
        super().__init__(*args, **kwargs)
        self.start = copy.deepcopy(self.model)

    def compute_loss(self, model, inputs, *args, **kwargs):
        if model.training:
            self.batches.append({name: value.clone() for name, value in inputs.items()})
        return super().compute_loss(model, inputs, *args, **kwargs)

    def _clip_grad_norm(self, model):
        total = super()._clip_grad_norm(model)
        self.totals.append(total.item())
        if self.measurements:
            self.measurements.after_clip(total)
        return total

    def log(self, logs, start_time=None):
        if self.measurements:
            logs.update(self.measurements.collect())
        super().log(logs, start_time)


def make_trainer(
    checkpoint, folder, *, measure=True, rank=0, frozen=(), dropout=0.0, callbacks=(), images=True, eval_rows=None,
    **kwargs,
):  # fmt: skip
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32)
    for layer in model.model.language_model.layers:
        layer.self_attn.attention_dropout = dropout
    if not rank:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not any(part in name for part in frozen))
    whole = ["multi_modal_projector"]
    lora = LoraConfig(r=rank, target_modules=LINEARS, lora_dropout=dropout, modules_to_save=whole) if rank else None
    settings = dict(
        output_dir=str(folder), max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=2, seed=3,
        learning_rate=1e-2, lr_scheduler_type="constant", max_length=None, assistant_only_loss=True, bf16=False,
        use_cpu=True, logging_steps=1, save_strategy="no", report_to="none", gradient_checkpointing=False,
        disable_tqdm=True, dataloader_num_workers=0, logging_nan_inf_filter=False,
    )  # fmt: skip
    arguments = SFTConfig(**{**settings, **kwargs})
    measurements = Measurements(arguments) if measure else None
    return Trainer(
        model=model,
        args=arguments,
        train_dataset=rows(12, images),
        eval_dataset=eval_rows,
        processing_class=AutoProcessor.from_pretrained(checkpoint),
        peft_config=lora,
        callbacks=[*([measurements] if measure else []), *callbacks],
        measurements=measurements,
    )


def logs(trainer) -> list[dict]:
    return [entry for entry in trainer.state.log_history if "loss" in entry]
