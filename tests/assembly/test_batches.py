"""A batch of questions is answered as each question alone, by every checkpoint that is written."""

import json

import pytest
import tiny
import tiny_parts as parts
import torch
import train_data
from peft import LoraConfig, get_peft_model
from PIL import Image
from train_data import image_bytes
from transformers import AutoModelForImageTextToText, AutoProcessor, GenerationConfig, pipeline

from normalign_llava.assembly.build import build_checkpoint
from normalign_llava.assembly.merge import merge_adapter
from normalign_llava.diagnose.data import Sample, batches
from normalign_llava.diagnose.load import resolve_model
from normalign_llava.evaluate.engine import as_lm
from normalign_llava.train.run import main


BOS = 3 + ord("Z") - ord(" ")
IMAGES = [Image.linear_gradient("L").convert("RGB"), Image.new("RGB", (20, 30), "red")]
QUESTIONS = ["what is it", "say in more words what there is in the image"]
MODULES = r".*\.language_model\..*\.(q_proj|v_proj)"


def built(folder):
    language = parts.language(folder / "language", tied=False)
    build_checkpoint(parts.vision(folder / "vision"), language, folder / "built")
    model = AutoModelForImageTextToText.from_pretrained(folder / "built")
    tiny.heeding(model).save_pretrained(folder / "built")
    return folder / "built"


def adapter_of(base, folder):
    model = AutoModelForImageTextToText.from_pretrained(base)
    get_peft_model(model, LoraConfig(target_modules=MODULES)).save_pretrained(folder)
    return folder


def train(folder, checkpoint, output):
    rows = [train_data.llava("<image>\nwhat?", f"it is {i}", "red.png") for i in range(4)]
    file = train_data.write_json(folder, rows)
    options = {"stage": "tune", "model_name_or_path": checkpoint, "dataset_name": file, "output_dir": output}
    options |= {"max_steps": 1, "save_steps": 1, "bf16": False, "use_cpu": True, "report_to": "none"}
    return main([word for name, value in options.items() for word in (f"--{name}", str(value))])


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


def check_settled(folder):
    processor = AutoProcessor.from_pretrained(folder)
    assert processor.tokenizer.padding_side == "left"
    assert processor.tokenizer.encode(prompt(processor, "a"))[:2] == [BOS, 1]
    generation = GenerationConfig.from_pretrained(folder)
    assert generation.suppress_tokens == [processor.image_token_id]


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
    answer = pipeline("image-text-to-text", model=str(checkpoint), dtype=torch.float32)
    asked = [
        [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": question}]}]
        for image, question in zip(IMAGES, QUESTIONS, strict=True)
    ]
    said = answer(text=asked, batch_size=2, max_new_tokens=8, do_sample=False, return_full_text=False)
    assert [conversation[0]["generated_text"] for conversation in said] == alone


def test_training_from_an_unsettled_checkpoint_writes_a_settled_one(tmp_path, caplog):
    checkpoint = unsettled(built(tmp_path))
    output = train(tmp_path, checkpoint, tmp_path / "trained")
    for folder in (output, output / "checkpoint-1"):
        check_settled(folder)
    assert caplog.text.count("now prints 'Z', which the tokenizer put before a text") == 1
    assert "If this checkpoint is trained already, it was trained without it" in caplog.text


def test_merging_into_an_unsettled_base_writes_a_settled_checkpoint(tmp_path):
    base = unsettled(built(tmp_path))
    merge_adapter(adapter_of(base, tmp_path / "adapter"), tmp_path / "merged", base_quantization="none")
    check_settled(tmp_path / "merged")


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
