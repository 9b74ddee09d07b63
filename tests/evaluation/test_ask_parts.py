"""What `normalign ask` makes of its command line and of the lines of a conversation.

The model does not answer here: what would be asked is kept.
"""

import io
import json
from types import SimpleNamespace

import pytest
import train_data
from transformers import AutoConfig, AutoProcessor

from normalign_llava import NormAlignLlavaForConditionalGeneration
from normalign_llava.evaluation import ask as ask_module
from normalign_llava.evaluation.answering import user_turn
from normalign_llava.evaluation.ask import (
    AskOptions,
    answer_all,
    append_answers,
    ask,
    converse,
    print_answer,
)
from normalign_llava.evaluation.questions import Question


LOADING = {"dtype": "float16", "load_in_4bit": True}


@pytest.fixture
def handle(checkpoint):
    """A model whose weights are not loaded; `LOADING` stands for them."""
    return SimpleNamespace(
        processor=AutoProcessor.from_pretrained(checkpoint),
        config=AutoConfig.from_pretrained(checkpoint),
        name="m",
    )


@pytest.fixture
def ask_and_keep(handle, monkeypatch):
    """Asks, and returns how it ended.

    These are the options that opened the model, the name of the function that would have
    answered, the model and what it would have been asked.
    """
    calls = []

    def resolve(model, options):
        calls.append(options)
        handle.load = lambda: {name: getattr(options, name) for name in LOADING}
        return handle

    def keep_call(function_name):
        def keep(model, processor, asked, *arguments):
            calls.append((function_name, model, asked))

        monkeypatch.setattr(ask_module, function_name, keep)

    monkeypatch.setattr(ask_module, "resolve_model", resolve)
    for function_name in ("print_answer", "answer_all", "converse"):
        keep_call(function_name)

    def ask_words(words, *ask_options, **options):
        calls.clear()
        all_options = AskOptions(*ask_options, **LOADING, **options)
        ask("m", [str(word) for word in words], all_options)
        opened_with, (function_name, model, asked) = calls
        return SimpleNamespace(
            opened_with=opened_with,
            function_name=function_name,
            model=model,
            asked=asked,
        )

    return ask_words


@pytest.fixture
def image_folder(tmp_path):
    train_data.images(tmp_path / "images", "red.png", "blue.png")
    return tmp_path / "images"


SYSTEM_TURN = {"role": "system", "content": [{"type": "text", "text": "Be brief."}]}


@pytest.mark.parametrize(
    ("words", "function_name"),
    [
        (["images/red.png", "what?"], "print_answer"),
        (["images/red.png"], "converse"),
        ([], "converse"),
    ],
)
def test_one_question_is_printed_and_none_is_a_conversation(
    ask_and_keep, image_folder, monkeypatch, words, function_name
):
    monkeypatch.chdir(image_folder.parent)
    outcome = ask_and_keep(words, "Be brief.")
    assert outcome.function_name == function_name
    assert outcome.model == LOADING
    assert outcome.asked[0] == SYSTEM_TURN


@pytest.mark.parametrize(
    ("words", "output_name"),
    [
        pytest.param(["images/red.png", "what?"], "a.jsonl", id="a file"),
        pytest.param(["images", "what?"], None, id="several images"),
    ],
)
def test_several_questions_or_a_file_are_answered_in_turn(
    ask_and_keep, image_folder, monkeypatch, words, output_name
):
    monkeypatch.chdir(image_folder.parent)
    output = None
    if output_name:
        output = image_folder / output_name
    outcome = ask_and_keep(words, "Be brief.", output=output)
    assert outcome.function_name == "answer_all"
    assert outcome.model == LOADING
    assert outcome.asked[0].turns[0] == SYSTEM_TURN


def test_what_opens_the_model_is_told_of_code_and_of_the_base(ask_and_keep):
    options = {
        "trust_remote_code": True,
        "base": "there",
        "base_quantization": "none",
    }
    opened_with = ask_and_keep(["what?"], **options).opened_with
    assert {name: getattr(opened_with, name) for name in options} == options


@pytest.fixture
def table_options(image_folder):
    """Data with other columns, and images in a folder of their own."""
    table_path = image_folder.parent / "mine.csv"
    table_path.write_text("path,asked\nred.png,A?\nblue.png,B?\n")
    return {
        "data": str(table_path),
        "image_folder": str(image_folder),
        "columns": "image=path,question=asked",
    }


def test_data_are_asked_with_their_columns_their_images_and_the_system_turn(
    ask_and_keep, table_options
):
    outcome = ask_and_keep([], "Brief.", **table_options)
    assert outcome.function_name == "answer_all"
    assert [question.text for question in outcome.asked] == ["A?", "B?"]
    system_turn = outcome.asked[1].turns[0]
    assert system_turn["content"][0]["text"] == "Brief."


def test_data_with_the_image_token_are_refused(ask_and_keep, handle, table_options):
    handle.processor.image_token = "B"
    with pytest.raises(ValueError, match="B. It stands for an image"):
        ask_and_keep([], **table_options)


def test_besides_a_folder_no_other_image_is_given(ask_and_keep, image_folder):
    command_words = [image_folder, image_folder / "red.png", "what?"]
    with pytest.raises(ValueError, match="give no other images"):
        ask_and_keep(command_words)


def test_a_conversation_must_leave_room(ask_and_keep, image_folder):
    command_words = [image_folder / "red.png"]
    with pytest.raises(ValueError, match="m cannot be asked this. .*the model reads 256"):
        ask_and_keep(command_words, "Be brief. " * 30)


@pytest.fixture(scope="module")
def model(checkpoint):
    return NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint)


@pytest.fixture(scope="module")
def processor(checkpoint):
    return AutoProcessor.from_pretrained(checkpoint)


def allow_only(model, processor, token):
    """Lets the model say nothing else."""
    suppressed = set(range(model.config.text_config.vocab_size))
    suppressed.remove(processor.tokenizer.convert_tokens_to_ids(token))
    model.generation_config.suppress_tokens = sorted(suppressed)


def test_several_answers_are_printed_with_what_was_asked(model, processor, capsys):
    allow_only(model, processor, "A")
    questions = []
    for name in ("red\x1b.png", "blue.png", "green.png"):
        questions.append(Question(name, [user_turn("what?")], further_turns=2))
    answer_all(model, processor, questions, AskOptions(None, 2, batch_size=2), "m", 0)
    printed = capsys.readouterr()
    assert printed.out.splitlines() == ["red\\x1b.png: AA", "blue.png: AA", "green.png: AA"]
    assert "Of 3 rows with several questions" in printed.err


def test_an_answer_is_printed_whole_and_returned_without_the_spaces_at_its_ends(
    model, processor, capsys
):
    allow_only(model, processor, " ")
    assert print_answer(model, processor, [user_turn("what?")], 3) == ""
    assert capsys.readouterr().out == "   \n"


def test_answers_are_appended_whatever_is_in_them_and_wherever_the_file_is(tmp_path):
    output_path = tmp_path / "a" / "b" / "c.jsonl"
    questions = [Question("a row", [user_turn("what?")])] * 2
    append_answers(output_path, "m", questions, ["half \ud83d", "ä"])
    rows = [json.loads(line) for line in output_path.read_text("utf-8").splitlines()]
    assert [row["answer"] for row in rows] == ["half ?", "ä"]


def roles_texts_and_images(conversation):
    turns = []
    for turn in conversation:
        images = [part["image"] for part in turn["content"] if part["type"] == "image"]
        turns.append((turn["role"], turn["content"][-1]["text"], images))
    return turns


@pytest.fixture
def converse_in(monkeypatch):
    """Converses in lines, and returns what the model was asked each time."""

    def converse_in_lines(*lines, start=(), images=(), interrupted_at=None):
        conversations = []

        def answer(model, processor, conversation, max_new_tokens):
            turns = roles_texts_and_images(conversation)
            conversations.append(turns)
            _, last_text, _ = turns[-1]
            if last_text == interrupted_at:
                raise KeyboardInterrupt
            return f"answer {len(conversations)}"

        typed_text = "".join(f"{line}\n" for line in lines)
        monkeypatch.setattr(ask_module, "print_answer", answer)
        monkeypatch.setattr("sys.stdin", io.StringIO(typed_text))
        converse(None, None, start, images, 5)
        return conversations

    return converse_in_lines


def test_a_conversation_goes_on_without_spaces_and_starts_again_with_its_images(converse_in):
    conversations = converse_in(
        "  a? ",
        "b?",
        " /new ",
        "",
        "c?",
        start=[SYSTEM_TURN],
        images=["image"],
    )
    system_turn = ("system", "Be brief.", [])
    first_turn = ("user", "a?", ["image"])
    first, second, after_new = conversations
    assert first == [system_turn, first_turn]
    assert second == [
        system_turn,
        first_turn,
        ("assistant", "answer 1", []),
        ("user", "b?", []),
    ]
    assert after_new == [system_turn, ("user", "c?", ["image"])]


def test_an_image_is_found_by_its_path_and_waits_for_the_next_turn(
    converse_in, image_folder, monkeypatch
):
    monkeypatch.setenv("HOME", str(image_folder))
    typed_lines = ("/image ~/red.png", f"/image   {image_folder}/blue.png", "which?")
    ((turn,),) = converse_in(*typed_lines)
    _, _, (red_image, blue_image) = turn
    assert red_image.getpixel((0, 0)) == (255, 0, 0)
    assert blue_image.getpixel((0, 0)) == (0, 0, 255)


def test_an_answer_that_is_interrupted_is_left_out(converse_in):
    _, second = converse_in("a?", "b?", images=["image"], interrupted_at="a?")
    assert second == [("user", "b?", ["image"])]


def test_an_interrupt_at_the_prompt_ends_the_conversation(converse_in, monkeypatch):
    def interrupt(prompt):
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupt)
    assert converse_in("a?") == []
