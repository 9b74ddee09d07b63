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

VISION = OFFLINE[:2]
ITEMS = dict(  # task: questions, those asked again with a white image, SHA-256 of all
    offline_easy_vqa=(300, 56, "b614ece022ef49b9ac65e2f33b21501460b2a980e074626b59a384304bfdf294"),
    offline_emoji=(48, 1, "781d37b8f1dd9eec4ffbdf8494e71fad35c59fd1491b2318c68de217c3a301cd"),
    offline_perplexity=(32, 0, "0d883a1748b1a5e39f88df2ce086c9dbb914704cc8108502e16a2acd1ce313d6"),
)

manager = cache(lambda: TaskManager(include_path=str(TASKS), include_defaults=False))


@cache
def documents(task):
    return manager().load([task])["tasks"][task].eval_docs


def scores(task, answers, of_blank, limit=None):
    output = harness(Script(answers, of_blank), manager().load([task]), limit=limit)
    assert output["n-samples"][task]["effective"] == (limit or len(documents(task)))
    raw = output["results"][task].items()
    return {key[:-5]: value for key, value in raw if key.endswith(",none") and "_std" not in key}


@pytest.mark.parametrize("task", OFFLINE)
def test_items_are_those_pinned_here(task):
    digest = hashlib.sha256()
    for document in documents(task):
        if image := document.pop("image", None):
            digest.update(f"{image.size}".encode() + image.convert("RGB").tobytes())
        digest.update(json.dumps(document).encode())
    again = sum(bool(document.get("blank")) for document in documents(task))
    assert (len(documents(task)), again, digest.hexdigest()) == ITEMS[task]


def test_easy_vqa_and_emoji_by_hand():
    right = [f"it is {answer}" for answer in documents("offline_easy_vqa")["answer"]]
    result = scores("offline_easy_vqa", right, lambda prompt: "red circle, not blue, yes")
    # The share of the commonest answer is the one that docs/quickstart.md has of these questions.
    for part, share in {"_shape": 0.40, "_colour": 0.17, "_yes_no": 0.5, "": 50 / 300}.items():
        assert [result[f"acc{part}"], result[f"commonest{part}"]] == pytest.approx([1, share])
    circles = Counter(documents("offline_easy_vqa")["answer"])["circle"]
    assert result["blank_shape"] == circles / 100 and result["blank_colour"] == 0
    assert result["blank_yes_no"] == 0.5 and result["blank"] == pytest.approx((circles + 50) / 300)
    names = documents("offline_emoji")["answer"]
    assert Counter(names) == dict.fromkeys(names[:12], 4)
    said = [f"A {name}." for name in names[:10]] + ["?"] * 38
    result = scores("offline_emoji", said, lambda prompt: names[0])
    assert result == pytest.approx({"acc": 10 / 48, "blank": 1 / 12, "commonest": 1 / 12})


def test_half_of_the_drawings_are_the_others_in_a_mirror():
    images = [image.convert("RGB") for image in documents("offline_emoji")["image"]]
    for image, mirrored in zip(images[:24], images[24:], strict=True):
        assert ImageOps.mirror(image).tobytes() == mirrored.tobytes()
    assert len({image.tobytes() for image in images[:24]}) == 24


def test_the_word_that_an_answer_names():
    red = ("red", "Red.", "It is a red circle.", "blue, red", "I think, red", "red, I think")
    none = ("red or blue", "reddish", "", "red circle, not blue, no", "red, not blue, I think")
    words = dict.fromkeys(red, "red") | dict.fromkeys(none)
    assert {answer: named(answer, ("red", "blue")) for answer in words} == words


def test_a_tiny_model_is_evaluated(checkpoint, tmp_path):
    ended = evaluate(str(checkpoint), suites=["offline"], limit=3, batch_size=3, output=tmp_path)
    assert not ended.failed and [result.task for result in ended.results] == list(OFFLINE)
    for result in ended.results:
        assert (result.samples, result.total, result.partial) == (3, ITEMS[result.task][0], True)
        prompts = "through the chat template" if result.task in VISION else "as plain text"
        assert any(prompts in sentence for sentence in result.protocol)
        for metric in result.metrics:
            vision = result.task in VISION and metric.name.startswith("acc")
            assert [*metric.references] == ["blank image", "commonest answer"] * vision
            assert metric.samples == (1 if metric.name.startswith("acc_") else 3)
    processor = AutoProcessor.from_pretrained(checkpoint)
    (file,) = (tmp_path / "evaluation" / "offline_emoji").glob("samples_*.jsonl")
    for sample in map(json.loads, file.read_text().splitlines()):
        asked = processor.apply_chat_template(prompt("what is this?"), add_generation_prompt=True)
        assert sample["arguments"]["gen_args_0"]["arg_0"] == asked  # as in the quickstart


def test_a_language_model_alone_is_evaluated_on_the_texts(tmp_path):
    folder = parts.language(tmp_path / "language", max_position_embeddings=2048)  # fits a passage
    evaluated = evaluate(str(folder), tasks=[*OFFLINE[2:], VISION[1]], output=tmp_path, limit=2)
    assert set(evaluated.failed) == {VISION[1]}
    (perplexity,) = evaluated.results
    bits, words = perplexity.metrics
    tokenizer = AutoTokenizer.from_pretrained(folder)
    language = AutoModelForCausalLM.from_pretrained(folder)
    total = 0.0
    shares = []
    for text in documents("offline_perplexity")["text"][:2]:
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        # The first token is predicted from the end-of-text token.
        tokens = torch.tensor([tokenizer.eos_token_id, *tokens])
        with torch.no_grad():
            likelihoods = language(tokens[None]).logits[0, :-1].log_softmax(-1)
        likelihood = likelihoods.gather(1, tokens[1:, None]).sum().item()
        total += likelihood
        shares.append(-likelihood / math.log(2) / len(text.encode()))
    assert bits.value == pytest.approx(sum(shares) / 2, rel=1e-5)
    assert words.value == pytest.approx(math.exp(-total / 256), rel=1e-4)


def test_a_checkpoint_reads_texts_as_its_language_model_alone(tmp_path):
    folder = parts.language(tmp_path / "language", rows=128, max_position_embeddings=2048)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.bos_token = "<|im_start|>"
    tokenizer.add_bos_token = True
    tokenizer.save_pretrained(folder)
    build_checkpoint(parts.vision(tmp_path / "vision"), folder, tmp_path / "built")
    alone, built = (
        evaluate(str(model), tasks=OFFLINE[2:], output=tmp_path / "results", limit=2).results
        for model in (folder, tmp_path / "built")
    )
    for result, same in zip(alone, built, strict=True):
        expected = [metric.value for metric in result.metrics]
        assert [metric.value for metric in same.metrics] == pytest.approx(expected)
