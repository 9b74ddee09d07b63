# SPDX-License-Identifier: Apache-2.0
"""A model of lmms-eval, `--model normalign_llava`, found by this package's entry point."""

from itertools import groupby
from typing import Any

import torch
from lmms_eval.api.instance import Instance
from lmms_eval.api.model import lmms
from lmms_eval.protocol import ChatMessages
from tqdm import tqdm

from ..assembly.processing import pad_left
from ..diagnose.load import resolve_model


class NormAlignLlava(lmms):
    """Answers of the vision-language model `pretrained`, folder or Hub id, by its chat template."""

    is_simple = False  # it takes messages

    def __init__(
        self,
        pretrained: str,
        batch_size: int | str = 1,
        dtype: str = "auto",
        device: str | None = None,
    ):
        super().__init__()
        handle = resolve_model(pretrained)
        if handle.processor is None:
            raise ValueError(f"{handle.name} is a language model. Give a vision-language model.")
        self.processor = handle.processor
        pad_left(self.processor.tokenizer)
        self.model = handle.load(dtype=dtype)
        if device:
            self.model.to(device)
        self.batch_size = int(batch_size)

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """The model's answers, in batches of requests with the same options."""
        answers = []
        with tqdm(total=len(requests), disable=self.rank != 0) as bar:
            for _, alike in groupby(requests, key=lambda request: repr(request.args[2])):
                group = list(alike)
                for start in range(0, len(group), self.batch_size):
                    batch = group[start : start + self.batch_size]
                    answers += self._answers(batch)
                    bar.update(len(batch))
        return answers

    @torch.no_grad()
    def _answers(self, batch: list[Instance]) -> list[str]:
        conversations = []
        for _, messages_of, _, document, task, split in (request.args for request in batch):
            messages = messages_of(self.task_dict[task][split][document])
            conversations.append(ChatMessages(messages=messages).to_hf_messages())
        options = batch[0].args[2]
        form = dict(tokenize=True, return_dict=True, return_tensors="pt")
        form |= dict(add_generation_prompt=True, processor_kwargs={"padding": True})
        inputs = self.processor.apply_chat_template(conversations, **form)
        inputs = inputs.to(self.model.device, self.model.dtype)
        length = inputs["input_ids"].shape[1]
        named = ("temperature", "top_p") if options.get("temperature") else ()
        given = {name: options[name] for name in named if options.get(name) is not None}
        drawn = {"do_sample": bool(given), **given}
        most, beams = options.get("max_new_tokens", 1024), options.get("num_beams", 1)
        ids = self.model.generate(**inputs, max_new_tokens=most, num_beams=beams, **drawn)
        answers = self.processor.batch_decode(ids[:, length:], skip_special_tokens=True)
        until = options.get("until", [])
        for stop in [until] if isinstance(until, str) else until:
            answers = [answer.split(stop)[0] for answer in answers]
        return answers

    def loglikelihood(self, requests: list[Instance]) -> Any:
        raise NotImplementedError("normalign_llava only generates text. See `normalign evaluate`.")

    generate_until_multi_round = loglikelihood
