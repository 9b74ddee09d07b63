"""Answers and scores do not depend on how many questions are answered together. All in float32."""

import pytest
import tiny
import tiny_parts as parts
import torch
import training
import yaml
from datasets import Dataset, Image, List
from lm_eval import evaluate
from lm_eval.tasks import TaskManager
from PIL import Image as Picture
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForImageTextToText, AutoProcessor, GenerationConfig

from normalign_llava import NormAlignLlavaForConditionalGeneration
from normalign_llava.evaluation.engine import as_lm
from normalign_llava.models import resolve_model


pytestmark = pytest.mark.slow


# By length: in fours, the first four have images and the last have none, but for one of them.
QUESTIONS = [
    "<image>what is in this one, and what is in that one?<image>",
    "and here, <image>, what do you see there, if anything?",
    "<image><image><image>which of the three is red?",
    "say in one word what two and two are",
    "<image>which colour?",
    "a or b?",
    "and?",
    "?",
    "<image>",
]
LONGEST = 12  # tokens of an answer
pictures = (Picture.effect_noise((16, 16), 60 * number).convert("RGB") for number in range(1, 9))
IMAGES = [[next(pictures) for _ in range(text.count("<image>"))] for text in QUESTIONS]


@pytest.fixture(scope="module", params=["ours, with a first token", "llava, with another end"])
def checkpoint(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    ours = training.checkpoint(folder, tied=False)
    tiny.heeding(NormAlignLlavaForConditionalGeneration.from_pretrained(ours)).save_pretrained(ours)
    if request.param == "ours, with a first token":  # which the tokenizer writes, and the template
        processor = AutoProcessor.from_pretrained(ours)
        processor.tokenizer.bos_token = first = "<|im_start|>"
        processor.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{first} $A", special_tokens=[(first, processor.tokenizer.bos_token_id)]
        )
        processor.save_pretrained(ours)
        return ours
    template = AutoProcessor.from_pretrained(ours).chat_template
    stock = parts.llava(folder / "llava", tiny.heeding(tiny.llava(tied=False)))
    processor = AutoProcessor.from_pretrained(stock)
    processor.chat_template = template
    processor.tokenizer.eos_token = "T"  # another end than the model's
    processor.tokenizer.padding_side = "right"  # as in training elsewhere
    processor.save_pretrained(stock)
    return stock


def alone(model, processor, text, images):
    """What transformers itself gives for one question: chat template, then `generate`."""
    words = [{"type": "text", "text": part} if part else None for part in text.split("<image>")]
    shown = [{"type": "image", "image": image} for image in images]
    content = [part for pair in zip(words, [*shown, None], strict=True) for part in pair if part]
    options = dict(add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt")
    inputs = processor.apply_chat_template([{"role": "user", "content": content}], **options)
    end = processor.tokenizer.eos_token_id
    length = inputs["input_ids"].shape[1]
    ids = model.generate(**inputs, max_new_tokens=LONGEST, do_sample=False, eos_token_id=end)
    return processor.decode(ids[0, length:], skip_special_tokens=True).split("\n")[0]


def write_task(folder, answers):
    """Questions whose right answers are what the model says, but for every third."""
    right = [answer if number % 3 else "wrong" for number, answer in enumerate(answers)]
    rows = Dataset.from_dict({"images": IMAGES, "question": QUESTIONS, "answer": right})
    file = folder / "rows.parquet"
    rows.cast_column("images", List(Image())).to_parquet(file)
    files = {"data_files": {"test": str(file)}, "cache_dir": str(folder / "cache")}
    task = {"task": "tiny_mixed", "dataset_path": "parquet", "dataset_kwargs": files}
    task |= {"doc_to_image": "images", "doc_to_text": "{{question}}", "doc_to_target": "{{answer}}"}
    task |= {"generation_kwargs": {"until": ["\n"], "do_sample": False, "max_gen_toks": LONGEST}}
    task |= {"test_split": "test", "metric_list": [{"metric": "exact_match"}]}
    task["output_type"] = "generate_until"
    (folder / "tiny_mixed.yaml").write_text(yaml.safe_dump(task))


def test_answers_in_batches_are_those_to_one_question_at_a_time(checkpoint, tmp_path):
    model = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32)
    processor = AutoProcessor.from_pretrained(checkpoint)
    asked = zip(QUESTIONS, IMAGES, strict=True)
    expected = [alone(model, processor, text, images) for text, images in asked]
    assert len(set(expected)) > len(QUESTIONS) // 2  # an answer depends on the question
    write_task(tmp_path, expected)
    limited = GenerationConfig.from_pretrained(checkpoint)
    limited.max_new_tokens = 1  # the task's own limit counts
    limited.save_pretrained(checkpoint)
    handle = resolve_model(str(checkpoint))
    tasks = TaskManager(include_path=str(tmp_path), include_defaults=False)
    for batch_size in (1, 4):
        lm = as_lm(handle, batch_size=batch_size, dtype="float32")
        result = evaluate(lm, tasks.load(["tiny_mixed"]), apply_chat_template=True)
        samples = sorted(result["samples"]["tiny_mixed"], key=lambda sample: sample["doc_id"])
        assert [sample["resps"][0][0] for sample in samples] == expected
        assert result["results"]["tiny_mixed"]["exact_match,none"] == pytest.approx(6 / 9)


def test_questions_without_images_are_padded_on_the_left(checkpoint):
    lm = as_lm(resolve_model(str(checkpoint)), batch_size=2, dtype="float32")
    inputs = lm.tok_batch_multimodal_encode(["what is two and two?", "and?"], [[], []])
    long, short = inputs["attention_mask"].tolist()
    assert all(long) and short == sorted(short) and not short[0]
    asked = ["and?", "what is two and two?"], [[], []]
    fits = lm.tok_batch_multimodal_encode(*asked, left_truncate_len=len(long))
    assert fits["input_ids"].shape[1] == len(long)
    with pytest.raises(ValueError, match="Shorten 'what is two and two"):
        lm.tok_batch_multimodal_encode(*asked, left_truncate_len=len(long) - 1)
