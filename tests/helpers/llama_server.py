"""An unmodified llama.cpp in this process, and transformers beside it."""

import base64
import io
import json
from dataclasses import dataclass

import torch
import xllamacpp


@dataclass(frozen=True)
class Answer:
    """A greedy answer.

    Attributes:
        ids: Its tokens.
        log_probabilities: For each token, the log-probabilities of the likeliest ids.
        prompt_tokens: Number of tokens before it.
    """

    ids: list[int]
    log_probabilities: list[dict[int, float]]
    prompt_tokens: int


class LlamaServer:
    """llama.cpp's server for two GGUF files, without a port that anyone must know."""

    def __init__(self, text_file, vision_file):
        options = xllamacpp.CommonParams()
        options.model.path = str(text_file)
        options.mmproj.path = str(vision_file)
        options.mmproj_use_gpu = False
        options.n_ctx = 512
        options.n_parallel = 1
        options.cpuparams.n_threads = 1
        options.cpuparams_batch.n_threads = 1
        options.cache_type_k = xllamacpp.ggml_type.GGML_TYPE_F32
        options.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        options.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        options.warmup = False
        options.use_jinja = True
        options.verbosity = 0
        self.server = xllamacpp.Server(options)

    def answer(self, messages, tokens=12, banned=()):
        """Returns the greedy answer to messages with `{"image": PIL image}` parts.

        The server leaves out bytes that are no whole character. Ban such tokens to count all.
        """
        request = {
            "messages": [self._message(message) for message in messages],
            "temperature": 0,
            "max_tokens": tokens,
            "logprobs": True,
            "top_logprobs": 10,
            "cache_prompt": False,
            "logit_bias": [[token_id, False] for token_id in banned],
        }
        response = self.server.handle_chat_completions(request)
        if isinstance(response, str | bytes):
            response = json.loads(response)
        assert "choices" in response, response
        content = response["choices"][0]["logprobs"]["content"]
        log_probabilities = []
        for token in content:
            likeliest = {other["id"]: other["logprob"] for other in token["top_logprobs"]}
            log_probabilities.append(likeliest)
        return Answer(
            ids=[token["id"] for token in content],
            log_probabilities=log_probabilities,
            prompt_tokens=response["usage"]["prompt_tokens"],
        )

    def _message(self, message):
        parts = []
        for part in message["content"]:
            if part["type"] == "image":
                parts.append({"type": "image_url", "image_url": {"url": _data_uri(part["image"])}})
            else:
                parts.append(part)
        return {"role": message["role"], "content": parts}


def _data_uri(image):
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()


@torch.no_grad()
def answer_here(model, processor, messages, tokens=12, banned=()):
    """Returns the greedy answer of transformers."""
    inputs = processor.apply_chat_template(
        messages, tokenize=True, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    generated = model.generate(
        **inputs,
        max_new_tokens=tokens,
        do_sample=False,
        suppress_tokens=list(banned) or None,
        output_logits=True,
        return_dict_in_generate=True,
    )
    prompt_tokens = inputs["input_ids"].shape[1]
    log_probabilities = []
    for scores in generated.logits:
        values = scores.log_softmax(-1)[0]
        log_probabilities.append(dict(enumerate(values.tolist())))
    ids = generated.sequences[0, prompt_tokens:].tolist()
    return Answer(ids, log_probabilities, prompt_tokens)


def largest_difference(answer, expected):
    """The largest difference of log-probabilities, up to the first token that differs."""
    largest = 0.0
    for index, likeliest in enumerate(answer.log_probabilities):
        for token_id, log_probability in likeliest.items():
            difference = log_probability - expected.log_probabilities[index][token_id]
            largest = max(largest, abs(difference))
        if answer.ids[index] != expected.ids[index]:
            break
    return largest
