# SPDX-License-Identifier: Apache-2.0
"""A model of lmms-eval: `--model normalign_llava`, by this package's entry point."""

from itertools import groupby
from typing import Any

import torch
from lmms_eval.api.instance import Instance
from lmms_eval.api.model import lmms
from lmms_eval.protocol import ChatMessages
from tqdm import tqdm

from ..models import ModelOptions, require_processor, resolve_model
from .answering import model_inputs


class NormAlignLlava(lmms):
    """Answers questions of lmms-eval through the chat template.

    Args:
        pretrained: Folder or Hub id of a vision-language model.
        batch_size: Questions that are answered together.
        dtype: Type of the weights, see [`ModelOptions`].
        device: Device that the model is moved to. By default, it stays where it was loaded.

    Raises:
        ValueError: The model cannot be used, or has no vision.
        OSError: The model cannot be fetched.
    """

    is_simple = False  # it takes messages

    def __init__(
        self,
        pretrained: str,
        batch_size: int | str = 1,
        dtype: str = "auto",
        device: str | None = None,
    ):
        super().__init__()
        handle = resolve_model(pretrained, ModelOptions(dtype=dtype))
        self.processor = require_processor(handle)
        self.model = handle.load()
        if device:
            self.model.to(device)
        self.batch_size = int(batch_size)

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """Returns the model's answers, in batches of requests with the same options."""
        answers = []
        with tqdm(total=len(requests), disable=self.rank != 0) as progress:
            for _, alike in groupby(requests, key=lambda request: repr(request.args[2])):
                group = list(alike)
                for start in range(0, len(group), self.batch_size):
                    batch = group[start : start + self.batch_size]
                    answers += self._answers(batch)
                    progress.update(len(batch))
        return answers

    @torch.no_grad()
    def _answers(self, batch: list[Instance]) -> list[str]:
        conversations = []
        for request in batch:
            _, messages_of_document, _, document_id, task, split = request.args
            document = self.task_dict[task][split][document_id]
            messages = ChatMessages(messages=messages_of_document(document))
            conversations.append(messages.to_hf_messages())
        inputs = model_inputs(self.processor, conversations)
        inputs = inputs.to(self.model.device, self.model.dtype)
        prompt_length = inputs["input_ids"].shape[1]
        options = batch[0].args[2]
        sampling = {"do_sample": False}
        if options.get("temperature"):  # temperature 0 is greedy
            sampling = {"do_sample": True, "temperature": options["temperature"]}
            if options.get("top_p") is not None:
                sampling["top_p"] = options["top_p"]
        token_ids = self.model.generate(
            **inputs,
            max_new_tokens=options.get("max_new_tokens", 1024),
            num_beams=options.get("num_beams", 1),
            **sampling,
        )
        answer_ids = token_ids[:, prompt_length:]
        answers = self.processor.batch_decode(answer_ids, skip_special_tokens=True)
        stop_texts = options.get("until", [])
        if isinstance(stop_texts, str):
            stop_texts = [stop_texts]
        for stop_text in stop_texts:
            answers = [answer.split(stop_text)[0] for answer in answers]
        return answers

    def loglikelihood(self, requests: list[Instance]) -> Any:
        raise NotImplementedError("normalign_llava only generates text. See `normalign evaluate`.")

    generate_until_multi_round = loglikelihood
