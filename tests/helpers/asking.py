"""One question about images, as requests to a server have it and as `generate` answers it."""

import base64
import io

from transformers import AutoModelForImageTextToText, AutoProcessor


def request(text, *images):
    """A conversation as OpenAI's API has it."""
    content = []
    for image in images:
        png = io.BytesIO()
        image.save(png, "PNG")
        encoded_image = base64.b64encode(png.getvalue()).decode()
        url = f"data:image/png;base64,{encoded_image}"
        content.append({"type": "image_url", "image_url": {"url": url}})
    content.append({"type": "text", "text": text})
    return [{"role": "user", "content": content}]


def generate(checkpoint, text, *images, tokens=8):
    """A greedy answer: its text, the length of the prompt, its ids and their log-probabilities."""
    processor = AutoProcessor.from_pretrained(checkpoint)
    model = AutoModelForImageTextToText.from_pretrained(checkpoint)
    content = [{"type": "image", "image": image} for image in images]
    content.append({"type": "text", "text": text})
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": content}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    outputs = model.generate(
        **inputs,
        max_new_tokens=tokens,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    prompt_length = inputs["input_ids"].shape[1]
    answer_ids = outputs.sequences[0, prompt_length:].tolist()
    log_probabilities = []
    for logits, token_id in zip(outputs.logits, answer_ids, strict=True):
        log_probabilities.append(logits[0].log_softmax(-1)[token_id].item())
    answer = processor.decode(answer_ids, skip_special_tokens=True)
    return answer, prompt_length, answer_ids, log_probabilities
