"""One question about images, as requests to a server have it and as `generate` answers it."""

import base64
import io

from transformers import AutoModelForImageTextToText, AutoProcessor


def request(text, *images):
    """A conversation as OpenAI's API has it."""
    shown = []
    for image in images:
        png = io.BytesIO()
        image.save(png, "PNG")
        url = "data:image/png;base64," + base64.b64encode(png.getvalue()).decode()
        shown.append({"type": "image_url", "image_url": {"url": url}})
    return [{"role": "user", "content": [*shown, {"type": "text", "text": text}]}]


def generate(checkpoint, text, *images, tokens=8):
    """A greedy answer: its text, the length of the prompt, its ids and their log-probabilities."""
    processor = AutoProcessor.from_pretrained(checkpoint)
    model = AutoModelForImageTextToText.from_pretrained(checkpoint)
    shown = [{"type": "image", "image": image} for image in images]
    messages = [{"role": "user", "content": [*shown, {"type": "text", "text": text}]}]
    as_tensors = dict(tokenize=True, return_dict=True, return_tensors="pt")
    inputs = processor.apply_chat_template(messages, add_generation_prompt=True, **as_tensors)
    length = inputs["input_ids"].shape[1]
    greedy = dict(max_new_tokens=tokens, do_sample=False)
    answer = model.generate(**inputs, **greedy, return_dict_in_generate=True, output_logits=True)
    ids = answer.sequences[0, length:].tolist()
    steps = zip(answer.logits, ids, strict=True)
    logprobs = [logits[0].log_softmax(-1)[token].item() for logits, token in steps]
    return processor.decode(ids, skip_special_tokens=True), length, ids, logprobs
