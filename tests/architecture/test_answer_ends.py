"""Answers end where training ended them, in every way that a model is used.

Four answers are memorized by tiny models. The language models differ in who knows the token that
ends an answer: the chat template, the tokenizer, or the generation configuration.
"""

import json
import shutil
from dataclasses import dataclass
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
MARKED_WITH_EOS = (
    "{% for message in messages %}{{ message['role'] + ': ' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message['content'] + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


@dataclass
class Kind:
    """What a language model says about the end of an answer."""

    chat_template: str
    tokenizer_end: str
    generation_ends: list[str]


KINDS = {
    "the template alone knows": Kind(parts.CHATML, END_OF_TEXT, [END_OF_TEXT]),
    "the tokenizer knows": Kind(MARKED_WITH_EOS, END_OF_TURN, [END_OF_TEXT]),
    "no end is set": Kind(parts.CHATML, END_OF_TEXT, []),
    "several are set": Kind(parts.CHATML, END_OF_TEXT, ["<unk>", END_OF_TEXT]),
}
every_kind = pytest.mark.parametrize("kind_name", KINDS)


def as_list(token_ids) -> list[int]:
    if isinstance(token_ids, list):
        return token_ids
    return [token_ids]


def generation_ends(kind: Kind, tokenizer) -> int | list[int] | None:
    """`eos_token_id` of the language model's generation configuration."""
    token_ids = tokenizer.convert_tokens_to_ids(kind.generation_ends)
    if len(token_ids) > 1:
        return token_ids
    if token_ids:
        return token_ids[0]
    return None


def make_language_model(folder: Path, kind: Kind) -> str:
    parts.language(
        folder,
        rows=96,
        chat_template=kind.chat_template,
        tied=False,
    )
    tokenizer = parts.tokenizer(kind.chat_template, extra=[END_OF_TEXT])
    tokenizer.add_special_tokens({"extra_special_tokens": [END_OF_TURN, END_OF_TEXT]})
    tokenizer.eos_token = kind.tokenizer_end
    tokenizer.pad_token = "<unk>"
    tokenizer.save_pretrained(folder)

    config_path = folder / "config.json"
    config = json.loads(config_path.read_text())
    config["eos_token_id"] = None
    config_path.write_text(json.dumps(config))
    generation_config = GenerationConfig(
        eos_token_id=generation_ends(kind, tokenizer),
        pad_token_id=0,
    )
    generation_config.save_pretrained(folder)
    return str(folder)


def build(folder: Path, kind: Kind) -> Path:
    encoder = parts.vision(folder / "vision")
    language_model = make_language_model(folder / "language", kind)
    build_checkpoint(encoder, language_model, folder / "built", seed=0)
    return folder / "built"


ROWS = [training.row(number) for number in range(4)]
QUESTIONS = [row["messages"][0]["content"][1]["text"] for row in ROWS]
ANSWERS = [row["messages"][1]["content"][0]["text"] for row in ROWS]


def train_on_rows(output_folder: Path, checkpoint: Path, **options) -> Path:
    trainer = training.trainer(
        output_folder,
        checkpoint,
        Dataset.from_list(ROWS, features=FEATURES),
        per_device_train_batch_size=4,
        lr_scheduler_type="constant",
        seed=1,
        **options,
    )
    trainer.train()
    trainer.save_model()
    return output_folder


def without_added_ends(checkpoint: Path, kind: Kind, copy: Path) -> Path:
    """The checkpoint as before `build` added ends: it has only the language model's."""
    shutil.copytree(checkpoint, copy, ignore=shutil.ignore_patterns("evaluation"))
    tokenizer = AutoTokenizer.from_pretrained(copy)
    generation_config = GenerationConfig.from_pretrained(copy)
    generation_config.eos_token_id = generation_ends(kind, tokenizer)
    generation_config.save_pretrained(copy)
    return copy


def answer_of_ask(checkpoint: Path, question: str, image_path: Path) -> str:
    """The answer of `normalign ask`."""
    arguments = [
        "ask",
        str(checkpoint),
        str(image_path),
        question,
        "--max-new-tokens",
        "40",
    ]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "500"})
    assert result.exit_code == 0, result.output
    return result.stdout.removesuffix("\n")


def answers_of_evaluate(checkpoint: Path, folder: Path) -> list[str]:
    """The answers of `normalign evaluate` to questions of one's own."""
    lines = ["image,question,answer"]
    for number, question in enumerate(QUESTIONS):
        lines.append(f"{number}.png,{question},x")
    data_path = folder / "data.csv"
    data_path.write_text("\n".join(lines))
    result = CliRunner().invoke(app, ["evaluate", str(checkpoint), "--data", str(data_path)])
    assert result.exit_code == 0, result.output

    result_folder = checkpoint / "evaluation" / "own_data.csv"
    (samples_path,) = result_folder.glob("samples_*.jsonl")
    answers = []
    for line in samples_path.read_text().splitlines():
        responses = json.loads(line)["resps"]
        answers.append(responses[0][0])
    return answers


def generated_answers(checkpoint: Path, image_paths: list[Path]) -> list[str]:
    """Greedy answers of a folder's model; each ends at its first end."""
    answers = []
    for question, image_path in zip(QUESTIONS, image_paths, strict=True):
        answer, _, answer_ids, _ = generate(
            checkpoint,
            question,
            Image.open(image_path),
            tokens=40,
        )
        # One token for each letter, and the end.
        assert len(answer_ids) == len(answer) + 1
        answers.append(answer)
    return answers


@dataclass
class Memorized:
    """A checkpoint that knows four answers by heart, in a folder with the images."""

    kind: Kind
    folder: Path
    image_paths: list[Path]
    checkpoint: Path


@pytest.fixture(
    scope="module",
    params=[
        "the template alone knows",
        pytest.param("the tokenizer knows", marks=pytest.mark.nightly),
    ],
)
def memorized(request, tmp_path_factory):
    kind = KINDS[request.param]
    folder = tmp_path_factory.mktemp("answers")
    image_paths = []
    for number, row in enumerate(ROWS):
        image_path = folder / f"{number}.png"
        image_path.write_bytes(row["images"][0]["bytes"])
        image_paths.append(image_path)
    checkpoint = train_on_rows(
        folder / "trained",
        build(folder, kind),
        max_steps=150,
        learning_rate=1e-2,
        logging_steps=50,
    )
    return Memorized(kind, folder, image_paths, checkpoint)


@pytest.fixture(scope="module")
def older_checkpoint(memorized):
    """The same checkpoint as an older version of this package wrote it."""
    return without_added_ends(memorized.checkpoint, memorized.kind, memorized.folder / "older")


def assert_commands_answer(checkpoint, memorized):
    answer = answer_of_ask(checkpoint, QUESTIONS[3], memorized.image_paths[3])
    assert answer == ANSWERS[3]
    assert answers_of_evaluate(checkpoint, memorized.folder) == ANSWERS


def test_a_trained_model_generates_whole_answers(memorized):
    assert generated_answers(memorized.checkpoint, memorized.image_paths) == ANSWERS


def test_the_pipeline_of_a_trained_model_gives_whole_answers(memorized):
    answering = pipeline(
        "image-text-to-text",
        model=str(memorized.checkpoint),
        dtype=torch.float32,
    )
    answers = []
    for image_path, question in zip(memorized.image_paths, QUESTIONS, strict=True):
        content = [
            {"type": "image", "image": str(image_path)},
            {"type": "text", "text": question},
        ]
        results = answering(
            text=[{"role": "user", "content": content}],
            max_new_tokens=40,
            return_full_text=False,
        )
        answers.append(results[0]["generated_text"])
    assert answers == ANSWERS


def test_commands_give_whole_answers(memorized):
    assert_commands_answer(memorized.checkpoint, memorized)


def test_commands_give_whole_answers_of_an_older_checkpoint(memorized, older_checkpoint):
    assert_commands_answer(older_checkpoint, memorized)


def test_an_older_checkpoint_that_is_saved_again_gives_whole_answers(memorized, older_checkpoint):
    saved_folder = memorized.folder / "saved"
    open_checkpoint(older_checkpoint).load().save_pretrained(saved_folder)
    AutoProcessor.from_pretrained(older_checkpoint).save_pretrained(saved_folder)
    assert generated_answers(saved_folder, memorized.image_paths) == ANSWERS


@pytest.mark.nightly
def test_transformers_serve(memorized):
    openai = pytest.importorskip("openai")
    command = ["serve", "trained", "--trust-remote-code"]
    with served(memorized.checkpoint.parent, command) as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none")
        for question, image_path, expected in zip(
            QUESTIONS, memorized.image_paths, ANSWERS, strict=True
        ):
            completion = client.chat.completions.create(
                model="trained",
                max_tokens=40,
                temperature=0,
                messages=request(question, Image.open(image_path)),
            )
            assert completion.choices[0].message.content == expected


@pytest.mark.parametrize("older", [False, True])
def test_an_adapter_and_what_is_merged_from_it(memorized, older, request):
    base = memorized.checkpoint
    folder_name = "new"
    if older:
        base = request.getfixturevalue("older_checkpoint")
        folder_name = "older"

    adapter = train_on_rows(
        memorized.folder / f"{folder_name}-adapter",
        base,
        use_peft=True,
        lora_r=4,
        max_steps=10,
        learning_rate=1e-4,
    )
    assert_commands_answer(adapter, memorized)

    merged_folder = memorized.folder / f"{folder_name}-merged"
    merge_adapter(adapter, merged_folder)
    assert generated_answers(merged_folder, memorized.image_paths) == ANSWERS


@every_kind
@pytest.mark.parametrize("saved_part", ["processor", "tokenizer"])
def test_an_adapter_whose_template_ends_answers_otherwise(tmp_path, kind_name, saved_part):
    """As `trl` and PEFT write it: an adapter, and what was given to them as processing_class."""
    checkpoint = build(tmp_path, KINDS[kind_name])
    adapter = tmp_path / "adapter"
    model = AutoModelForImageTextToText.from_pretrained(checkpoint)
    lora = LoraConfig(r=2, target_modules=r".*language_model.*q_proj")
    get_peft_model(model, lora).save_pretrained(adapter)
    (adapter / "training.json").write_text('{"quantization": null}')

    processor = AutoProcessor.from_pretrained(checkpoint)
    chat_template = processor.chat_template.replace(END_OF_TURN, "<|im_start|>")
    chat_template = chat_template.replace("eos_token", "'<|im_start|>'")
    processor.chat_template = chat_template
    processor.tokenizer.chat_template = chat_template
    if saved_part == "processor":
        processor.save_pretrained(adapter)
    else:
        processor.tokenizer.save_pretrained(adapter)

    expected = {*as_list(model.generation_config.eos_token_id), 1}
    assert expected > {2}
    loaded_model = resolve_model(str(adapter)).load()
    assert {*loaded_model.generation_config.eos_token_id} == expected

    merge_adapter(adapter, tmp_path / "merged")
    merged_config = GenerationConfig.from_pretrained(tmp_path / "merged")
    assert {*merged_config.eos_token_id} == expected


@every_kind
def test_build_writes_the_language_model_s_ends_and_its_template_s(tmp_path, kind_name):
    kind = KINDS[kind_name]
    checkpoint = build(tmp_path, kind)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "language")
    expected_tokens = {*kind.generation_ends, kind.tokenizer_end, END_OF_TURN}
    expected_ids = {tokenizer.convert_tokens_to_ids(token) for token in expected_tokens}

    end_ids = as_list(GenerationConfig.from_pretrained(checkpoint).eos_token_id)
    assert set(end_ids) == expected_ids
    assert len(end_ids) == len(expected_ids)


def test_a_llava_gets_the_end_of_its_template(tmp_path):
    llava_folder = parts.llava(tmp_path / "llava", tiny.llava(tied=False))
    generation_options = {"eos_token_id": 5, "temperature": 0.3}
    config_path = Path(llava_folder, "generation_config.json")
    config_path.write_text(json.dumps(generation_options))

    report = retrofit_checkpoint(llava_folder, tmp_path / "built")
    assert report.generation_left_out == {"temperature": 0.3}
    generation_config = GenerationConfig.from_pretrained(tmp_path / "built")
    assert generation_config.eos_token_id == [5, 2]


def test_a_model_in_memory_is_trained_with_the_ends_of_its_processor(tmp_path):
    kind = KINDS["several are set"]
    checkpoint = without_added_ends(build(tmp_path, kind), kind, tmp_path / "old")
    model = AutoModelForImageTextToText.from_pretrained(checkpoint)
    assert 2 not in model.generation_config.eos_token_id

    training.trainer(tmp_path / "out", checkpoint, model=model).save_model()
    assert 2 in GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id


TURN = "{% for m in messages %}{{ m['content'] }}"
ENDS = {
    "a token and a line break": (
        TURN + "{{ '<|im_end|>\n' }}{% endfor %}",
        {2, 3},
    ),
    "two tokens": (
        TURN + "{{ '<|im_start|><|im_end|>' }}{% endfor %}",
        {2, 3},
    ),
    "a space and a token": (
        TURN + "{{ ' <|im_end|> ' }}{% endfor %}",
        {2, 3},
    ),
    "letters, as there are in answers": (
        TURN + "{{ '###' }}{% endfor %}",
        {3},
    ),
    "nothing": (
        TURN + "{% endfor %}",
        {3},
    ),
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
"""Chat templates and the ids that end an answer, by what stands behind an answer."""


@pytest.mark.parametrize("end_name", ENDS)
def test_which_tokens_end_an_answer(end_name):
    chat_template, expected = ENDS[end_name]
    tokenizer = parts.tokenizer(chat_template, extra=[END_OF_TEXT])
    tokenizer.add_special_tokens(
        {
            "eos_token": END_OF_TEXT,
            "extra_special_tokens": [END_OF_TURN],
        }
    )
    assert set(answer_ends(tokenizer)) == expected

    expected_unrecognized = []
    if end_name.startswith("letters"):
        expected_unrecognized = ["###"]
    assert unrecognized_ends(tokenizer) == expected_unrecognized


def test_an_end_of_letters_is_reported_by_build(tmp_path, caplog):
    chat_template = parts.CHATML.replace("<|im_end|>", "###")
    language_model = parts.language(tmp_path / "language", chat_template=chat_template)
    build_checkpoint(parts.vision(tmp_path / "vision"), language_model, tmp_path / "built")
    assert "ends an answer with '###'" in caplog.text


def test_an_end_that_is_no_special_token_is_left_out_of_the_answer(tmp_path):
    language_model = parts.language(
        tmp_path / "language",
        chat_template=parts.CHATML.replace("<|im_end|>", "<|done|>"),
        rows=100,
    )
    tokenizer = AutoTokenizer.from_pretrained(language_model)
    tokenizer.add_tokens("<|done|>")
    tokenizer.save_pretrained(language_model)
    answer_ids = tokenizer.encode("kite<|done|>", add_special_tokens=False)
    assert tokenizer.decode(answer_ids, skip_special_tokens=True) == "kite<|done|>"

    build_checkpoint(parts.vision(tmp_path / "vision"), language_model, tmp_path / "built")
    processor = AutoProcessor.from_pretrained(tmp_path / "built")
    assert processor.tokenizer.encode("kite<|done|>") == answer_ids
    assert processor.decode(answer_ids, skip_special_tokens=True) == "kite"
    generation_config = GenerationConfig.from_pretrained(tmp_path / "built")
    assert answer_ids[-1] in generation_config.eos_token_id


def test_a_configuration_that_has_all_ends_stays_as_it_is():
    """transformers can then save it as it was loaded, with flags that have no effect."""
    generation_config = GenerationConfig(eos_token_id=[3, 2], temperature=0.5)
    assert stopping_at(generation_config, [2]) is generation_config


def test_a_configuration_gets_the_ends_that_it_lacks_as_a_copy():
    generation_config = GenerationConfig(eos_token_id=[3, 2], temperature=0.5)
    changed_config = stopping_at(generation_config, [2, 7])
    assert changed_config.eos_token_id == [3, 2, 7]
    assert generation_config.eos_token_id == [3, 2]
    changed_config.validate(strict=True)
