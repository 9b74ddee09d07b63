"""The offline suite: its items, scores by hand, and a tiny model that is evaluated on it."""

import hashlib
import json
import math
from collections import Counter
from functools import cache

import pytest
import tiny_parts as parts
import torch
from lm_eval import evaluate as harness
from lm_eval.tasks import TaskManager
from PIL import ImageOps
from scripted_tasks import TASKS, Script
from transformers import AutoModelForCausalLM, AutoProcessor, AutoTokenizer

from normalign_llava import build_checkpoint
from normalign_llava.evaluation.answers import named
from normalign_llava.evaluation.engine import OFFLINE
from normalign_llava.evaluation.run import evaluate
from normalign_llava.fetched.easy_vqa import prompt


pytestmark = [pytest.mark.usefixtures("archives"), pytest.mark.slow]

VISION_TASKS = ("offline_easy_vqa", "offline_emoji")
TEXT_TASK = "offline_perplexity"
QUESTION_COUNTS = {
    "offline_easy_vqa": 300,
    "offline_emoji": 48,
    "offline_perplexity": 32,
}
# Questions that are asked again with a white image.
BLANK_COUNTS = {
    "offline_easy_vqa": 56,
    "offline_emoji": 1,
    "offline_perplexity": 0,
}
HASHES = {
    "offline_easy_vqa": "b614ece022ef49b9ac65e2f33b21501460b2a980e074626b59a384304bfdf294",
    "offline_emoji": "781d37b8f1dd9eec4ffbdf8494e71fad35c59fd1491b2318c68de217c3a301cd",
    "offline_perplexity": "0d883a1748b1a5e39f88df2ce086c9dbb914704cc8108502e16a2acd1ce313d6",
}


@cache
def task_manager():
    return TaskManager(include_path=str(TASKS), include_defaults=False)


@cache
def documents(task):
    return task_manager().load([task])["tasks"][task].eval_docs


def scores(task, answers, answer_to_blank):
    """The scores of a task without their standard errors."""
    model = Script(answers, lambda prompt: answer_to_blank)
    output = harness(model, task_manager().load([task]), limit=None)
    assert output["n-samples"][task]["effective"] == len(documents(task))
    values = {}
    for metric, value in output["results"][task].items():
        if metric.endswith(",none") and "_std" not in metric:
            values[metric.removesuffix(",none")] = value
    return values


def test_the_suite_has_two_tasks_of_images_and_one_of_texts():
    assert (*VISION_TASKS, TEXT_TASK) == OFFLINE


@pytest.mark.parametrize("task", OFFLINE)
def test_items_are_the_pinned_ones(task):
    digest = hashlib.sha256()
    for document in documents(task):
        image = document.pop("image", None)
        if image:
            digest.update(f"{image.size}".encode() + image.convert("RGB").tobytes())
        digest.update(json.dumps(document).encode())
    with_blank = [document for document in documents(task) if document.get("blank")]
    assert len(documents(task)) == QUESTION_COUNTS[task]
    assert len(with_blank) == BLANK_COUNTS[task]
    assert digest.hexdigest() == HASHES[task]


@cache
def easy_vqa_scores():
    """Every question is answered right; the answer to a white image is always the same."""
    right_answers = [f"it is {answer}" for answer in documents("offline_easy_vqa")["answer"]]
    return scores("offline_easy_vqa", right_answers, "red circle, not blue, yes")


@pytest.mark.parametrize(
    ("part", "share"),
    [
        ("_shape", 0.40),
        ("_colour", 0.17),
        ("_yes_no", 0.5),
        ("", 50 / 300),
    ],
)
def test_right_answers_to_easy_vqa_and_the_commonest_answer(part, share):
    """Shares of the commonest answer are the ones that docs/quickstart.md has."""
    result = easy_vqa_scores()
    assert result[f"acc{part}"] == pytest.approx(1)
    assert result[f"commonest{part}"] == pytest.approx(share)


def test_answers_to_a_white_image_of_easy_vqa():
    result = easy_vqa_scores()
    circle_count = Counter(documents("offline_easy_vqa")["answer"])["circle"]
    assert result["blank_shape"] == circle_count / 100
    assert result["blank_colour"] == 0
    assert result["blank_yes_no"] == 0.5
    assert result["blank"] == pytest.approx((circle_count + 50) / 300)


def test_emoji_by_hand():
    emoji_names = documents("offline_emoji")["answer"]
    assert Counter(emoji_names) == dict.fromkeys(emoji_names[:12], 4)
    right_answers = [f"A {name}." for name in emoji_names[:10]]
    result = scores("offline_emoji", right_answers + ["?"] * 38, emoji_names[0])
    expected = {
        "acc": 10 / 48,
        "blank": 1 / 12,
        "commonest": 1 / 12,
    }
    assert result == pytest.approx(expected)


def test_half_of_the_drawings_are_the_others_in_a_mirror():
    drawings = [image.convert("RGB") for image in documents("offline_emoji")["image"]]
    first_half = drawings[:24]
    second_half = drawings[24:]
    for drawing, mirrored in zip(first_half, second_half, strict=True):
        assert ImageOps.mirror(drawing).tobytes() == mirrored.tobytes()
    assert len({drawing.tobytes() for drawing in first_half}) == 24


@pytest.mark.parametrize(
    "answer",
    [
        "red",
        "Red.",
        "It is a red circle.",
        "blue, red",
        "I think, red",
        "red, I think",
    ],
)
def test_an_answer_names_a_word(answer):
    assert named(answer, ("red", "blue")) == "red"


@pytest.mark.parametrize(
    "answer",
    [
        "red or blue",
        "reddish",
        "",
        "red circle, not blue, no",
        "red, not blue, I think",
    ],
)
def test_an_answer_names_no_word(answer):
    assert named(answer, ("red", "blue")) is None


def test_a_tiny_model_is_evaluated(checkpoint, tmp_path):
    evaluated = evaluate(
        str(checkpoint),
        suites=["offline"],
        limit=3,
        batch_size=3,
        output=tmp_path,
    )
    assert not evaluated.failed
    assert [result.task for result in evaluated.results] == list(OFFLINE)
    for result in evaluated.results:
        assert result.samples == 3
        assert result.total == QUESTION_COUNTS[result.task]
        assert result.partial is True
        is_vision = result.task in VISION_TASKS
        protocol = " ".join(result.protocol)
        assert ("through the chat template" in protocol) == is_vision
        assert ("as plain text" in protocol) == (not is_vision)
        check_metrics(result.metrics, is_vision)
    check_prompts_of_the_quickstart(checkpoint, tmp_path)


def check_metrics(metrics, is_vision):
    for metric in metrics:
        expected_references = []
        if is_vision and metric.name.startswith("acc"):
            expected_references = ["blank image", "commonest answer"]
        assert list(metric.references) == expected_references

        is_part = metric.name.startswith("acc_")
        expected_samples = 1 if is_part else 3
        assert metric.samples == expected_samples


def check_prompts_of_the_quickstart(checkpoint, folder):
    processor = AutoProcessor.from_pretrained(checkpoint)
    conversation = prompt("what is this?")
    expected = processor.apply_chat_template(conversation, add_generation_prompt=True)
    (samples_path,) = (folder / "evaluation" / "offline_emoji").glob("samples_*.jsonl")
    for line in samples_path.read_text().splitlines():
        sample = json.loads(line)
        assert sample["arguments"]["gen_args_0"]["arg_0"] == expected


def test_a_language_model_by_itself_is_evaluated_on_the_texts(tmp_path):
    # A whole passage fits into 2048 tokens.
    folder = parts.language(tmp_path / "language", max_position_embeddings=2048)
    tasks = [TEXT_TASK, "offline_emoji"]
    evaluated = evaluate(str(folder), tasks=tasks, output=tmp_path, limit=2)
    assert set(evaluated.failed) == {"offline_emoji"}
    (perplexity,) = evaluated.results
    bits_per_byte, word_perplexity = perplexity.metrics

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    total_likelihood = 0.0
    bits_of_texts = []
    for text in documents(TEXT_TASK)["text"][:2]:
        likelihood = log_likelihood(model, tokenizer, text)
        total_likelihood += likelihood
        bits_of_texts.append(-likelihood / math.log(2) / len(text.encode()))
    assert bits_per_byte.value == pytest.approx(sum(bits_of_texts) / 2, rel=1e-5)
    assert word_perplexity.value == pytest.approx(math.exp(-total_likelihood / 256), rel=1e-4)


def log_likelihood(model, tokenizer, text):
    """The first token is predicted from the end-of-text token."""
    text_tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    tokens = torch.tensor([tokenizer.eos_token_id, *text_tokens])
    with torch.no_grad():
        logits = model(tokens[None]).logits[0, :-1]
    likelihoods = logits.log_softmax(-1)
    return likelihoods.gather(1, tokens[1:, None]).sum().item()


def test_a_checkpoint_reads_texts_as_its_language_model_does(tmp_path):
    folder = parts.language(tmp_path / "language", rows=128, max_position_embeddings=2048)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.bos_token = "<|im_start|>"
    tokenizer.add_bos_token = True
    tokenizer.save_pretrained(folder)
    build_checkpoint(parts.vision(tmp_path / "vision"), folder, tmp_path / "built")

    language_values = perplexity_values(folder, tmp_path / "results")
    built_values = perplexity_values(tmp_path / "built", tmp_path / "results")
    assert built_values == pytest.approx(language_values)


def perplexity_values(model_folder, output):
    evaluated = evaluate(str(model_folder), tasks=[TEXT_TASK], output=output, limit=2)
    (result,) = evaluated.results
    return [metric.value for metric in result.metrics]
