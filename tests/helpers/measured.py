"""A tiny model trained while its modules are measured."""

import copy

from datasets import Dataset
from peft import LoraConfig
from PIL import Image
from training import SHORT

from normalign_llava import NormAlignConfig, NormAlignLlavaForConditionalGeneration, NormAlignTrainer


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


class Watched(NormAlignTrainer):
    """Keeps the model that it starts from, its batches, and the norms of all gradients before clipping."""

    def __init__(self, *args, **kwargs):
        self.batches, self.totals = [], []
        super().__init__(*args, **kwargs)
        self.start = copy.deepcopy(self.model)

    def compute_loss(self, model, inputs, *args, **kwargs):
        if model.training:
            self.batches.append({name: value.clone() for name, value in inputs.items()})
        return super().compute_loss(model, inputs, *args, **kwargs)

    def _get_grad_norm(self, model, grad_norm=None):
        self.totals += [] if grad_norm is None else [float(grad_norm)]
        return super()._get_grad_norm(model, grad_norm)


def make_trainer(
    checkpoint, folder, *, rank=0, frozen=(), dropout=0.0, callbacks=(), images=True, eval_rows=None, **kwargs
) -> Watched:
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint)
    for layer in model.model.language_model.layers:
        layer.self_attn.attention_dropout = dropout
    steps = dict(max_steps=3, gradient_accumulation_steps=2, learning_rate=1e-2, lr_scheduler_type="constant", seed=3)
    rates = {f"{module}_learning_rate": 0.0 for module in frozen}
    return Watched(
        model,
        NormAlignConfig(str(folder), **{**SHORT, **steps, **rates, "sample_count": 0, **kwargs}),
        train_dataset=rows(12, images),
        eval_dataset=eval_rows,
        peft_config=LoraConfig(r=rank, lora_dropout=dropout) if rank else None,
        callbacks=list(callbacks),
    )


def logs(trainer) -> list[dict]:
    return [entry for entry in trainer.state.log_history if "loss" in entry]
