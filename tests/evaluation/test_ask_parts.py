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
    append_rows,
    ask,
    converse,
    print_answer,
)
from normalign_llava.evaluation.questions import Question


ENDS = ("print_answer", "answer_all", "converse")
LOADING = {"dtype": "float16", "load_in_4bit": True}


@pytest.fixture
def handle(checkpoint):
    """A model whose weights are not loaded; `LOADING` stands for them."""
    processor, config = (cls.from_pretrained(checkpoint) for cls in (AutoProcessor, AutoConfig))
    known = {"processor": processor, "config": config, "name": "m"}
    return SimpleNamespace(**known, load=lambda **loading: loading)


@pytest.fixture
def ended(handle, monkeypatch):
    """How `ask` ended: what opened the model, the function's name, and its arguments."""
    calls = []

    def resolve(model, **options):
        calls.append(("resolve_model", options))
        return handle

    monkeypatch.setattr(ask_module, "resolve_model", resolve)
    for name in ENDS:
        monkeypatch.setattr(ask_module, name, lambda *args, name=name: calls.append((name, *args)))

    def ended(words, options, **others):
        calls.clear()
        ask("m", [str(word) for word in words], options, **{**LOADING, **others})
        resolved, end = calls
        assert resolved[0] == "resolve_model"
        return [resolved[1], *end]

    return ended


@pytest.fixture
def images(tmp_path):
    train_data.images(tmp_path / "images", "red.png", "blue.png")
    return tmp_path / "images"


@pytest.mark.parametrize(
    ("words", "output", "end"),
    [
        (["images/red.png", "what?"], False, "print_answer"),
        (["images/red.png", "what?"], True, "answer_all"),
        (["images", "what?"], False, "answer_all"),
        (["images/red.png"], False, "converse"),
        ([], False, "converse"),
    ],
)
def test_one_question_is_printed_several_or_a_file_are_answered_in_turn(
    ended, images, monkeypatch, words, output, end
):
    monkeypatch.chdir(images.parent)
    options = AskOptions("Be brief.", output=images / "a.jsonl" if output else None)
    _, name, loaded, _, asked, *_ = ended(words, options)
    assert (name, loaded) == (end, LOADING)
    first = asked[0].turns[0] if end == "answer_all" else asked[0]
    assert first == {"role": "system", "content": [{"type": "text", "text": "Be brief."}]}


def test_what_opens_the_model_is_told_of_code_and_of_the_base(ended):
    given = {"trust_remote_code": True, "base": "there", "base_quantization": "none"}
    assert ended(["what?"], AskOptions(), **given)[0] == given


def test_data_are_asked_with_their_columns_their_images_and_the_system_turn(ended, handle, images):
    table = images.parent / "mine.csv"
    table.write_text("path,asked\nred.png,A?\nblue.png,B?\n")
    named = {"image_folder": str(images), "columns": "image=path,question=asked"}
    _, end, _, _, questions, *_ = ended([], AskOptions("Brief."), data=str(table), **named)
    assert end == "answer_all" and [question.text for question in questions] == ["A?", "B?"]
    assert questions[1].turns[0]["content"][0]["text"] == "Brief."
    handle.processor.image_token = "B"
    with pytest.raises(ValueError, match="B. It stands for an image"):
        ended([], AskOptions(), data=str(table), **named)


def test_a_folder_is_given_alone_and_a_conversation_must_leave_room(ended, images):
    with pytest.raises(ValueError, match="give no other images"):
        ended([images, images / "red.png", "what?"], AskOptions())
    with pytest.raises(ValueError, match="m cannot be asked this. .*the model reads 256"):
        ended([images / "red.png"], AskOptions("Be brief. " * 30))


@pytest.fixture(scope="module")
def asked(checkpoint):
    """A model that says nothing but what it is told to, and its processor."""
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint)
    return model, AutoProcessor.from_pretrained(checkpoint)


def say(model, processor, token):
    others = {*range(model.config.text_config.vocab_size)}
    others -= {processor.tokenizer.convert_tokens_to_ids(token)}
    model.generation_config.suppress_tokens = sorted(others)


def test_several_answers_are_printed_with_what_was_asked(asked, capsys):
    model, processor = asked
    say(model, processor, "A")
    names = ("red\x1b.png", "blue.png", "green.png")
    questions = [Question(name, [user_turn("what?")], further_turns=2) for name in names]
    answer_all(model, processor, questions, AskOptions(None, 2, batch_size=2), "m", 0)
    printed = capsys.readouterr()
    assert printed.out.splitlines() == ["red\\x1b.png: AA", "blue.png: AA", "green.png: AA"]
    assert "Of 3 rows with several questions" in printed.err


def test_an_answer_is_printed_whole_and_returned_without_the_spaces_at_its_ends(asked, capsys):
    model, processor = asked
    say(model, processor, " ")
    assert print_answer(model, processor, [user_turn("what?")], 3) == ""
    assert capsys.readouterr().out == "   \n"


def test_answers_are_appended_whatever_is_in_them_and_wherever_the_file_is(tmp_path):
    file = tmp_path / "a" / "b" / "c.jsonl"
    append_rows(file, [{"answer": "half \ud83d"}, {"answer": "ä"}])
    first, second = (json.loads(line)["answer"] for line in file.read_text("utf-8").splitlines())
    assert (first, second) == ("half ?", "ä")


@pytest.fixture
def said(monkeypatch):
    """Converses in these lines; what the model was asked each time, as roles, texts and images."""

    def said(*lines, start=(), images=(), stopped=None):
        conversations = []

        def answer(model, processor, conversation, limit):
            turns = []
            for turn in conversation:
                shown = [part["image"] for part in turn["content"] if part["type"] == "image"]
                turns.append((turn["role"], turn["content"][-1]["text"], shown))
            conversations.append(turns)
            if turns[-1][1] == stopped:
                raise KeyboardInterrupt
            return f"answer {len(conversations)}"

        monkeypatch.setattr(ask_module, "print_answer", answer)
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        converse(None, None, start, images, 5)
        return conversations

    return said


def test_a_conversation_goes_on_without_spaces_and_starts_again_with_its_images(said):
    start = [{"role": "system", "content": [{"type": "text", "text": "Brief."}]}]
    brief = ("system", "Brief.", [])
    first, second, third = said("  a? ", "b?", " /new ", "", "c?", start=start, images=["image"])
    assert first == [brief, ("user", "a?", ["image"])]
    assert second == [*first, ("assistant", "answer 1", []), ("user", "b?", [])]
    assert third == [brief, ("user", "c?", ["image"])]


def test_an_image_is_found_by_its_path_and_waits_for_the_next_turn(said, images, monkeypatch):
    monkeypatch.setenv("HOME", str(images))
    ((turn,),) = said("/image ~/red.png", f"/image   {images}/blue.png", "which?")
    assert [image.getpixel((0, 0)) for image in turn[2]] == [(255, 0, 0), (0, 0, 255)]


def test_an_answer_that_is_interrupted_is_left_out_and_an_interrupt_at_the_prompt_ends(
    said, monkeypatch
):
    _, second = said("a?", "b?", images=["image"], stopped="a?")
    assert second == [("user", "b?", ["image"])]

    def interrupt(prompt):
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupt)
    assert said("a?") == []
