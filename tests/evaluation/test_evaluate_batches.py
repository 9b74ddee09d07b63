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
from normalign_llava.models import ModelOptions, resolve_model


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
MAX_NEW_TOKENS = 12


def make_images():
    """For each question its images, each with more noise than the one before."""
    images = []
    noise = 0
    for question in QUESTIONS:
        images_of_question = []
        for _ in range(question.count("<image>")):
            noise += 60
            picture = Picture.effect_noise((16, 16), noise)
            images_of_question.append(picture.convert("RGB"))
        images.append(images_of_question)
    return images


IMAGES = make_images()


def checkpoint_with_first_token(folder):
    """Our own model; both tokenizer and template write a first token."""
    checkpoint = training.checkpoint(folder, tied=False)
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint)
    tiny.heeding(model).save_pretrained(checkpoint)
    processor = AutoProcessor.from_pretrained(checkpoint)
    tokenizer = processor.tokenizer
    first_token = "<|im_start|>"
    tokenizer.bos_token = first_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{first_token} $A",
        special_tokens=[(first_token, tokenizer.bos_token_id)],
    )
    processor.save_pretrained(checkpoint)
    return checkpoint


def checkpoint_with_other_end(folder):
    """A LLaVA of transformers; its tokenizer has another end than the model."""
    own_checkpoint = training.checkpoint(folder, tied=False)
    template = AutoProcessor.from_pretrained(own_checkpoint).chat_template
    checkpoint = parts.llava(folder / "llava", tiny.heeding(tiny.llava(tied=False)))
    processor = AutoProcessor.from_pretrained(checkpoint)
    processor.chat_template = template
    processor.tokenizer.eos_token = "T"
    # As in training elsewhere.
    processor.tokenizer.padding_side = "right"
    processor.save_pretrained(checkpoint)
    return checkpoint


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(checkpoint_with_first_token, id="ours, with a first token"),
        pytest.param(checkpoint_with_other_end, id="llava, with another end"),
    ],
)
def checkpoint(request, tmp_path_factory):
    return request.param(tmp_path_factory.mktemp("checkpoint"))


def message_content(question, images):
    """The texts between images and the images, in their order."""
    first_text, *further_texts = question.split("<image>")
    content = []
    if first_text:
        content.append({"type": "text", "text": first_text})
    for image, text in zip(images, further_texts, strict=True):
        content.append({"type": "image", "image": image})
        if text:
            content.append({"type": "text", "text": text})
    return content


def answer_of_transformers(model, processor, question, images):
    """What transformers itself gives for one question: chat template, then `generate`."""
    message = {"role": "user", "content": message_content(question, images)}
    inputs = processor.apply_chat_template(
        [message],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    sequences = model.generate(
        **inputs,
        max_new_tokens=MAX_NEW_TOKENS,
        do_sample=False,
        eos_token_id=processor.tokenizer.eos_token_id,
    )
    prompt_length = inputs["input_ids"].shape[1]
    answer = processor.decode(sequences[0, prompt_length:], skip_special_tokens=True)
    return answer.split("\n")[0]


def write_task(folder, answers):
    """Questions whose right answers are what the model says, but for every third."""
    right_answers = list(answers)
    right_answers[::3] = ["wrong"] * len(right_answers[::3])
    rows = Dataset.from_dict(
        {
            "images": IMAGES,
            "question": QUESTIONS,
            "answer": right_answers,
        }
    )
    rows_path = folder / "rows.parquet"
    rows.cast_column("images", List(Image())).to_parquet(rows_path)
    task = {
        "task": "tiny_mixed",
        "dataset_path": "parquet",
        "dataset_kwargs": {
            "data_files": {"test": str(rows_path)},
            "cache_dir": str(folder / "cache"),
        },
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_image": "images",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {
            "until": ["\n"],
            "do_sample": False,
            "max_gen_toks": MAX_NEW_TOKENS,
        },
        "metric_list": [{"metric": "exact_match"}],
    }
    (folder / "tiny_mixed.yaml").write_text(yaml.safe_dump(task))


def limit_answers_to_one_token(checkpoint):
    """The task's own limit counts, and not the model's."""
    config = GenerationConfig.from_pretrained(checkpoint)
    config.max_new_tokens = 1
    config.save_pretrained(checkpoint)


def test_answers_in_batches_are_the_answers_to_one_question_at_a_time(checkpoint, tmp_path):
    model = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32)
    processor = AutoProcessor.from_pretrained(checkpoint)
    expected = []
    for question, images in zip(QUESTIONS, IMAGES, strict=True):
        expected.append(answer_of_transformers(model, processor, question, images))
    # An answer depends on the question.
    assert len(set(expected)) > len(QUESTIONS) // 2

    write_task(tmp_path, expected)
    limit_answers_to_one_token(checkpoint)
    handle = resolve_model(str(checkpoint), ModelOptions(dtype="float32"))
    tasks = TaskManager(include_path=str(tmp_path), include_defaults=False)
    for batch_size in (1, 4):
        lm = as_lm(handle, batch_size=batch_size)
        result = evaluate(lm, tasks.load(["tiny_mixed"]), apply_chat_template=True)
        samples = sorted(result["samples"]["tiny_mixed"], key=lambda sample: sample["doc_id"])
        assert [sample["resps"][0][0] for sample in samples] == expected
        assert result["results"]["tiny_mixed"]["exact_match,none"] == pytest.approx(6 / 9)


@pytest.fixture
def encode(checkpoint):
    """Encodes two questions without images."""
    lm = as_lm(resolve_model(str(checkpoint), ModelOptions(dtype="float32")), batch_size=2)

    def encode_texts(first_question, second_question, **options):
        return lm.tok_batch_multimodal_encode(
            [first_question, second_question], [[], []], **options
        )

    return encode_texts


def test_questions_without_images_are_padded_on_the_left(encode):
    inputs = encode("what is two and two?", "and?")
    long_mask, short_mask = inputs["attention_mask"].tolist()
    assert all(long_mask)
    assert short_mask == sorted(short_mask)
    assert not short_mask[0]


def test_a_question_longer_than_the_limit_is_refused_and_not_cut(encode):
    length = encode("and?", "what is two and two?")["input_ids"].shape[1]
    fitting = encode("and?", "what is two and two?", left_truncate_len=length)
    assert fitting["input_ids"].shape[1] == length
    with pytest.raises(ValueError, match="Shorten 'what is two and two"):
        encode("and?", "what is two and two?", left_truncate_len=length - 1)
