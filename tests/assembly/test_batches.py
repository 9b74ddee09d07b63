"""A batch of questions is answered as each question alone, by every checkpoint that is written."""

import json

import pytest
import tiny
import tiny_parts as parts
import torch
import training
from PIL import Image
from train_data import image_bytes
from transformers import AutoModelForImageTextToText, AutoProcessor, GenerationConfig

from normalign_llava.assembly.build import build_checkpoint
from normalign_llava.assembly.merge import merge_adapter
from normalign_llava.diagnose.data import Sample, batches
from normalign_llava.diagnose.load import resolve_model
from normalign_llava.evaluate.engine import as_lm


BOS = 3 + ord("Z") - ord(" ")
IMAGES = [Image.linear_gradient("L").convert("RGB"), Image.new("RGB", (20, 30), "red")]
QUESTIONS = ["what is it", "say in more words what there is in the image"]


def built(folder):
    language = parts.language(folder / "language", tied=False)
    build_checkpoint(parts.vision(folder / "vision"), language, folder / "built")
    model = AutoModelForImageTextToText.from_pretrained(folder / "built")
    tiny.heeding(model).save_pretrained(folder / "built")
    return folder / "built"


def unsettled(folder):
    """Turns a checkpoint into one from before padding side and first token were settled."""
    tokenizer = AutoProcessor.from_pretrained(folder).tokenizer
    tokenizer.bos_token, tokenizer.add_bos_token = "Z", True
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps({key: value for key, value in settings.items() if key != "padding_side"}))
    processor = AutoProcessor.from_pretrained(folder)
    assert processor.tokenizer.padding_side == "right" and processor.tokenizer.encode("a")[0] == BOS
    assert not prompt(processor, "a").startswith("Z")
    return folder


def prompt(processor, question):
    asked = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}]
    return processor.apply_chat_template(asked, add_generation_prompt=True)


def answers(checkpoint, images, questions):
    """Of a batch, made by the processor as it comes."""
    processor = AutoProcessor.from_pretrained(checkpoint)
    model = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32)
    texts = [prompt(processor, question) for question in questions]
    inputs = processor(images=images, text=texts, padding=True, return_tensors="pt")
    made = model.generate(**inputs, max_new_tokens=8, do_sample=False)[:, inputs["input_ids"].shape[1] :]
    return processor.batch_decode(made, skip_special_tokens=True)


def test_a_batch_is_answered_as_its_questions_are_alone(tmp_path):
    checkpoint = built(tmp_path)
    alone = [answers(checkpoint, [image], [text])[0] for image, text in zip(IMAGES, QUESTIONS, strict=True)]
    assert alone[0] != alone[1] and all(alone)
    assert answers(checkpoint, IMAGES, QUESTIONS) == alone


@pytest.mark.parametrize("use_peft", [False, True])
def test_training_from_an_unsettled_checkpoint_writes_settled_ones(tmp_path, caplog, use_peft):
    checkpoint, output = unsettled(built(tmp_path)), tmp_path / "trained"
    options = dict(max_steps=1, save_strategy="steps", save_steps=1, use_peft=use_peft)
    trainer = training.trainer(output, checkpoint, **options)
    trainer.train()
    trainer.save_model()
    assert caplog.text.count("now prints 'Z', which the tokenizer put before a text") == 1
    folders = [output, output / "checkpoint-1"]
    if use_peft:
        merge_adapter(output, tmp_path / "merged", base=str(checkpoint))
        folders = [tmp_path / "merged"]
    for folder in folders:
        processor = AutoProcessor.from_pretrained(folder)
        assert processor.tokenizer.padding_side == "left"
        assert processor.tokenizer.encode(prompt(processor, "a"))[:2] == [BOS, 1]
        assert GenerationConfig.from_pretrained(folder).suppress_tokens == [processor.image_token_id]


@pytest.mark.parametrize("prints", [False, True])
def test_an_unsettled_checkpoint_is_asked_with_one_first_token(tmp_path, prints):
    folder = unsettled(built(tmp_path))
    stored = AutoProcessor.from_pretrained(folder)
    if prints:  # and the tokenizer puts another before it
        stored.chat_template = stored.tokenizer.chat_template = "{{ bos_token }}" + stored.chat_template
        stored.save_pretrained(folder)
        assert stored.tokenizer.encode(prompt(stored, "a"))[:3] == [BOS, BOS, 1]
    handle = resolve_model(str(folder))
    (asked,) = batches(handle.processor, [Sample("a", "what", {"bytes": image_bytes(), "path": None})], 1)
    lm, texts = as_lm(handle, batch_size=1), [prompt(handle.processor, "a")]
    shown = lm.tok_batch_multimodal_encode(texts, [IMAGES[:1]])
    alone = lm.tok_batch_multimodal_encode([text.replace("<image>", "") for text in texts], [[]])
    assert [inputs["input_ids"][0].tolist()[:2] for inputs in (asked, shown, alone)] == [[BOS, 1]] * 3
