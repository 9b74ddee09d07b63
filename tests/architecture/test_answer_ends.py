"""Answers end where training ended them, in every way that a model is used.

Four answers are memorized by tiny models. The language models differ in who knows the token that
ends an answer: the chat template, the tokenizer, or the generation configuration.
"""

import json
import shutil
from pathlib import Path

import pytest
import tiny
import tiny_parts as parts
import torch
import training
from asking import generate, request
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from PIL import Image
from served import served
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    GenerationConfig,
    pipeline,
)
from typer.testing import CliRunner

from normalign_llava.assembly.build import build_checkpoint, retrofit_checkpoint
from normalign_llava.assembly.merge import merge_adapter
from normalign_llava.checkpoint.opening import open_checkpoint
from normalign_llava.checkpoint.prompts import answer_ends, stopping_at, unrecognized_ends
from normalign_llava.cli import app
from normalign_llava.data.rows.parse import FEATURES
from normalign_llava.models import resolve_model


pytestmark = pytest.mark.slow

END_OF_TEXT = "<|endoftext|>"
END_OF_TURN = "<|im_end|>"
WITH_EOS = parts.CHATML.replace("'<|im_end|>'", "eos_token")
MARKED_WITH_EOS = (
    "{% for message in messages %}{{ message['role'] + ': ' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message['content'] + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
KINDS = {
    "the template alone knows": (parts.CHATML, END_OF_TEXT, END_OF_TEXT),
    "the tokenizer knows": (MARKED_WITH_EOS, END_OF_TURN, END_OF_TEXT),
    "no end is set": (parts.CHATML, END_OF_TEXT, None),
    "several are set": (parts.CHATML, END_OF_TEXT, ["<unk>", END_OF_TEXT]),
}
"""Chat template, the tokenizer's end, and the generation configuration's."""


def language(folder: Path, kind: str) -> str:
    """A language model of one of the kinds."""
    template, of_tokenizer, of_generation = KINDS[kind]
    parts.language(folder, rows=96, chat_template=template, tied=False)
    tokenizer = parts.tokenizer(template, extra=[END_OF_TEXT])
    tokenizer.add_special_tokens({"extra_special_tokens": [END_OF_TURN, END_OF_TEXT]})
    tokenizer.eos_token = of_tokenizer
    tokenizer.pad_token = "<unk>"
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text()) | {"eos_token_id": None}
    (folder / "config.json").write_text(json.dumps(config))
    ends = tokenizer.convert_tokens_to_ids(of_generation) if of_generation else None
    GenerationConfig(eos_token_id=ends, pad_token_id=0).save_pretrained(folder)
    return str(folder)


def built(folder: Path, kind: str) -> Path:
    encoder = parts.vision(folder / "vision")
    model = language(folder / "language", kind)
    build_checkpoint(encoder, model, folder / "built", seed=0)
    return folder / "built"


ROWS = [training.row(number) for number in range(4)]
QUESTIONS = [row["messages"][0]["content"][1]["text"] for row in ROWS]
ANSWERS = [row["messages"][1]["content"][0]["text"] for row in ROWS]


BY_HEART = dict(max_steps=150, learning_rate=1e-2, logging_steps=50)


def trained_on_rows(folder: Path, checkpoint: Path, **options) -> Path:
    """A run on the four rows."""
    rows = Dataset.from_list(ROWS, features=FEATURES)
    options |= dict(per_device_train_batch_size=4, lr_scheduler_type="constant", seed=1)
    trainer = training.trainer(folder, checkpoint, rows, **options)
    trainer.train()
    trainer.save_model()
    return folder


def forgotten(checkpoint: Path, kind: str, copy: Path) -> Path:
    """The checkpoint as it was before `build` added ends: with the language model's alone."""
    shutil.copytree(checkpoint, copy)
    _, of_tokenizer, of_generation = KINDS[kind]
    tokenizer = AutoTokenizer.from_pretrained(copy)
    config = GenerationConfig.from_pretrained(copy)
    config.eos_token_id = tokenizer.convert_tokens_to_ids(of_generation)
    config.save_pretrained(copy)
    return copy


def asked(model: Path, question: str, image: Path) -> str:
    """The answer of `normalign ask`."""
    words = ["ask", str(model), str(image), question, "--max-new-tokens", "40"]
    result = CliRunner().invoke(app, words, env={"COLUMNS": "500"})
    assert result.exit_code == 0, result.output
    return result.stdout.removesuffix("\n")


def evaluated(model: Path, folder: Path) -> list[str]:
    """The answers of `normalign evaluate` to questions of one's own."""
    lines = ["image,question,answer"]
    lines += [f"{number}.png,{question},x" for number, question in enumerate(QUESTIONS)]
    (data := folder / "data.csv").write_text("\n".join(lines))
    result = CliRunner().invoke(app, ["evaluate", str(model), "--data", str(data)])
    assert result.exit_code == 0, result.output
    (file,) = (model / "evaluation" / "own_data.csv").glob("samples_*.jsonl")
    answers = [json.loads(line)["resps"] for line in file.read_text().splitlines()]
    return [answer[0][0] for answer in answers]


def generated(model: Path, files: list[Path]) -> list[str]:
    """Greedy answers of a folder's model; each ends at its first end."""
    answers = []
    for question, file in zip(QUESTIONS, files, strict=True):
        text, _, ids, _ = generate(model, question, Image.open(file), tokens=40)
        assert len(ids) == len(text) + 1  # one token a letter, and the end
        answers.append(text)
    return answers


@pytest.fixture(
    scope="module",
    params=[
        "the template alone knows",
        pytest.param("the tokenizer knows", marks=pytest.mark.nightly),
    ],
)
def made(request, tmp_path_factory):
    """The kind, a folder with the pictures, and a checkpoint that knows four answers by heart."""
    folder = tmp_path_factory.mktemp("answers")
    for number, row in enumerate(ROWS):
        (folder / f"{number}.png").write_bytes(row["images"][0]["bytes"])
    files = [folder / f"{number}.png" for number in range(4)]
    checkpoint = built(folder, request.param)
    trained = trained_on_rows(folder / "trained", checkpoint, **BY_HEART)
    return request.param, folder, files, trained


def test_a_model_trained_in_full(made):
    kind, folder, files, trained = made
    assert generated(trained, files) == ANSWERS
    chats = []
    for file, question in zip(files, QUESTIONS, strict=True):
        content = [{"type": "image", "image": str(file)}, {"type": "text", "text": question}]
        chats.append([{"role": "user", "content": content}])
    answering = pipeline("image-text-to-text", model=str(trained), dtype=torch.float32)
    made_by = [answering(text=chat, max_new_tokens=40, return_full_text=False) for chat in chats]
    assert [answers[0]["generated_text"] for answers in made_by] == ANSWERS
    older = forgotten(trained, kind, folder / "older")
    for model in (trained, older):
        assert asked(model, QUESTIONS[3], files[3]) == ANSWERS[3]
        assert evaluated(model, folder) == ANSWERS
    opened = open_checkpoint(older).load()
    opened.save_pretrained(folder / "saved")
    AutoProcessor.from_pretrained(older).save_pretrained(folder / "saved")
    assert generated(folder / "saved", files) == ANSWERS


@pytest.mark.nightly
def test_transformers_serve(made):
    openai = pytest.importorskip("openai")
    _, _, files, trained = made
    command = ["serve", "trained", "--trust-remote-code"]
    with served(trained.parent, command) as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none")
        for question, file, answer in zip(QUESTIONS, files, ANSWERS, strict=True):
            chat = request(question, Image.open(file))
            options = dict(model="trained", max_tokens=40, temperature=0, messages=chat)
            choice = client.chat.completions.create(**options).choices[0]
            assert choice.message.content == answer


@pytest.mark.parametrize("older", [False, True])
def test_an_adapter_and_what_is_merged_from_it(made, older):
    kind, folder, files, checkpoint = made
    name = "older" if older else "new"
    if older:
        checkpoint = forgotten(checkpoint, kind, folder / "older-base")
    lora = dict(use_peft=True, lora_r=4, max_steps=10, learning_rate=1e-4)
    adapter = trained_on_rows(folder / f"{name}-adapter", checkpoint, **lora)
    assert asked(adapter, QUESTIONS[3], files[3]) == ANSWERS[3]
    assert evaluated(adapter, folder) == ANSWERS
    merge_adapter(adapter, folder / f"{name}-merged")
    assert generated(folder / f"{name}-merged", files) == ANSWERS


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("added", ["processor", "tokenizer"])
def test_an_adapter_whose_template_ends_answers_otherwise(tmp_path, kind, added):
    """As `trl` and PEFT write it: an adapter, and what was given to them as processing_class."""
    checkpoint = built(tmp_path, kind)
    adapter = tmp_path / "adapter"
    model = AutoModelForImageTextToText.from_pretrained(checkpoint)
    lora = LoraConfig(r=2, target_modules=r".*language_model.*q_proj")
    get_peft_model(model, lora).save_pretrained(adapter)
    (adapter / "training.json").write_text('{"quantization": null}')
    processor = AutoProcessor.from_pretrained(checkpoint)
    other = processor.chat_template.replace(END_OF_TURN, "<|im_start|>")
    processor.chat_template = processor.tokenizer.chat_template = other.replace(
        "eos_token", "'<|im_start|>'"
    )
    (processor if added == "processor" else processor.tokenizer).save_pretrained(adapter)
    expected = {*as_list(model.generation_config.eos_token_id), 1}
    assert {2} < expected
    loaded = resolve_model(str(adapter)).load()
    assert {*loaded.generation_config.eos_token_id} == expected
    merge_adapter(adapter, tmp_path / "merged")
    merged = GenerationConfig.from_pretrained(tmp_path / "merged")
    assert {*merged.eos_token_id} == expected


def as_list(ends) -> list[int]:
    return ends if isinstance(ends, list) else [ends]


@pytest.mark.parametrize("kind", KINDS)
def test_build_writes_the_language_model_s_ends_and_those_of_its_template(tmp_path, kind):
    _, of_tokenizer, of_generation = KINDS[kind]
    checkpoint = built(tmp_path, kind)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "language")
    named = of_generation if isinstance(of_generation, list) else [of_generation]
    names = {*named, of_tokenizer, END_OF_TURN} - {None}
    expected = {tokenizer.convert_tokens_to_ids(name) for name in names}
    ends = GenerationConfig.from_pretrained(checkpoint).eos_token_id
    assert {*as_list(ends)} == expected and len(as_list(ends)) == len(expected)


def test_a_llava_gets_the_end_of_its_template(tmp_path):
    folder = parts.llava(tmp_path / "llava", tiny.llava(tied=False))
    flags = {"eos_token_id": 5, "temperature": 0.3}
    Path(folder, "generation_config.json").write_text(json.dumps(flags))
    report = retrofit_checkpoint(folder, tmp_path / "built")
    config = GenerationConfig.from_pretrained(tmp_path / "built")
    assert config.eos_token_id == [5, 2] and report.generation_left_out == {"temperature": 0.3}


def test_a_model_in_memory_is_trained_with_the_ends_of_its_processor(tmp_path):
    checkpoint = forgotten(built(tmp_path, "several are set"), "several are set", tmp_path / "old")
    model = AutoModelForImageTextToText.from_pretrained(checkpoint)
    assert 2 not in model.generation_config.eos_token_id
    training.trainer(tmp_path / "out", checkpoint, model=model).save_model()
    assert 2 in GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id


TURN = "{% for m in messages %}{{ m['content'] }}"
ENDS = {
    "a token and a line break": (TURN + "{{ '<|im_end|>\n' }}{% endfor %}", {2, 3}),
    "two tokens": (TURN + "{{ '<|im_start|><|im_end|>' }}{% endfor %}", {2, 3}),
    "a space and a token": (TURN + "{{ ' <|im_end|> ' }}{% endfor %}", {2, 3}),
    "letters, as there are in answers": (TURN + "{{ '###' }}{% endfor %}", {3}),
    "nothing": (TURN + "{% endfor %}", {3}),
    "its end of text, which is not of a turn": (
        TURN + "{{ '<|im_end|>\n' }}{% endfor %}{{ eos_token }}",
        {2, 3},
    ),
    "one end between turns and another at the end, both of which are marked": (
        "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}{% else %}"
        "{% generation %}{{ m['content'] }}{{ eos_token if loop.last else '<|im_end|>' }}"
        "{% endgeneration %}{% endif %}{% endfor %}",
        {2, 3},
    ),
    "a token behind what is marked": (
        "{% for m in messages %}{% generation %}{{ m['content'] + '<|im_end|>' }}"
        "{% endgeneration %}{{ '<|im_start|>' }}{% endfor %}",
        {2, 3},
    ),
}


@pytest.mark.parametrize("name", ENDS)
def test_which_tokens_end_an_answer(name):
    template, expected = ENDS[name]
    tokenizer = parts.tokenizer(template, extra=[END_OF_TEXT])
    tokenizer.add_special_tokens({"eos_token": END_OF_TEXT, "extra_special_tokens": [END_OF_TURN]})
    assert {*answer_ends(tokenizer)} == expected
    letters = ["###"] if name.startswith("letters") else []
    assert unrecognized_ends(tokenizer) == letters


def test_an_end_of_letters_is_reported_by_build(tmp_path, caplog):
    template = parts.CHATML.replace("<|im_end|>", "###")
    model = parts.language(tmp_path / "language", chat_template=template)
    build_checkpoint(parts.vision(tmp_path / "vision"), model, tmp_path / "built")
    assert "ends an answer with '###'" in caplog.text


def test_an_end_that_is_no_special_token_is_left_out_of_the_answer(tmp_path):
    template = parts.CHATML.replace("<|im_end|>", "<|done|>")
    model = parts.language(tmp_path / "language", chat_template=template, rows=100)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens("<|done|>")
    tokenizer.save_pretrained(model)
    ids = tokenizer.encode("kite<|done|>", add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "kite<|done|>"
    build_checkpoint(parts.vision(tmp_path / "vision"), model, tmp_path / "built")
    processor = AutoProcessor.from_pretrained(tmp_path / "built")
    assert processor.tokenizer.encode("kite<|done|>") == ids
    assert processor.decode(ids, skip_special_tokens=True) == "kite"
    assert ids[-1] in GenerationConfig.from_pretrained(tmp_path / "built").eos_token_id


def test_a_configuration_that_has_all_ends_stays_as_it_is():
    """So that transformers saves one with flags that have no effect, as it was loaded."""
    config = GenerationConfig(eos_token_id=[3, 2], temperature=0.5)
    assert stopping_at(config, [2]) is config
    changed = stopping_at(config, [2, 7])
    assert changed.eos_token_id == [3, 2, 7] and config.eos_token_id == [3, 2]
    changed.validate(strict=True)
