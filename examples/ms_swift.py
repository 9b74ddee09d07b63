# SPDX-License-Identifier: Apache-2.0
"""Makes NormAlign-LLaVA known to ms-swift, with its norm and the checkpoint's own chat template.

    swift sft --external_plugins examples/ms_swift.py --model MODEL --dataset DATA.jsonl

ms-swift's own LLaVA would load the checkpoint without the norm. This package is not needed.
"""

import torch
from swift.model import ModelLoader, ModelMeta, register_model
from swift.template import Template, TemplateMeta, register_template
from transformers import AutoModelForImageTextToText


class CheckpointLoader(ModelLoader):
    """Loads a checkpoint with the code that lies in it."""

    def get_model(self, *args, **kwargs):
        self.auto_model_cls = AutoModelForImageTextToText
        return super().get_model(*args, **kwargs)


class CheckpointTemplate(Template):
    """The checkpoint's chat template. What it marks with `{% generation %}` is learned."""

    def _encode(self, inputs):
        turns = [turn for turn in inputs.messages if turn["content"] is not None]
        system = inputs.system
        if system is None:
            system = self.template_meta.default_system
        if system:
            turns.insert(0, {"role": "system", "content": system})
        self._refuse_what_is_not_read(inputs, turns)

        images = iter(inputs.images)
        conversation = []
        for turn in turns:
            parts = _parts(turn["content"], images)
            conversation.append({"role": turn["role"], "content": parts})
        encoded = self.processor.apply_chat_template(
            conversation,
            add_generation_prompt=turns[-1]["role"] != "assistant",
            return_assistant_tokens_mask=self.is_training,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )
        input_ids = encoded["input_ids"][0]
        row = {"input_ids": input_ids.tolist(), "labels": None, "loss_scale": None}
        if self.is_training:
            is_learned = torch.as_tensor(encoded["assistant_masks"])[0] == 1
            if not is_learned.any():
                raise ValueError("The chat template marks no answer with {% generation %}.")
            row["labels"] = input_ids.where(is_learned, -100).tolist()
        if inputs.images:
            row["pixel_values"] = encoded["pixel_values"].to(self.model_info.torch_dtype)
        return row

    def _refuse_what_is_not_read(self, inputs, turns):
        has_weights = any(turn.get("loss") is False or turn.get("loss_scale") for turn in turns)
        if has_weights or self._loss_scale != "default":
            raise ValueError("All answers are learned alike: remove loss and loss_scale.")
        if inputs.tools or inputs.videos or inputs.audios or inputs.objects:
            raise ValueError("Rows have text and images: remove tools, videos, audios, objects.")


def _parts(text, images):
    """One part for each `<image>`, and for each text between them."""
    first, *others = text.split("<image>")
    parts = [{"type": "text", "text": first}]
    for other in others:
        parts.append({"type": "image", "image": next(images)})
        parts.append({"type": "text", "text": other})
    return parts


register_template(
    TemplateMeta(
        "normalign_llava",
        template_cls=CheckpointTemplate,
        prefix=[],
        system_prefix=["{{SYSTEM}}"],  # these three are not used, but must be given
        prompt=["{{QUERY}}"],
        chat_sep=[],
    )
)
register_model(
    ModelMeta(
        "normalign_llava",
        model_groups=[],
        loader=CheckpointLoader,
        template="normalign_llava",
        model_arch="llava_hf",
        architectures=["NormAlignLlavaForConditionalGeneration"],
        is_multimodal=True,
    )
)
