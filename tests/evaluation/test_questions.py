"""The questions of `normalign ask`: of a folder, of rows, and of a file that has answers."""

import json

import pytest
import train_data

from normalign_llava.data.sources.arguments import DataSource
from normalign_llava.data.sources.source import open_source
from normalign_llava.evaluation import questions
from normalign_llava.evaluation.ask import (
    AskOptions,
    append_answers,
    ask,
    count_answered,
)
from normalign_llava.evaluation.questions import (
    Question,
    check_images,
    question_about,
    read_questions,
    read_questions_of_words,
    read_words,
)


def roles_and_texts(question):
    turns = []
    for turn in question.turns:
        texts = [part.get("text", "<image>") for part in turn["content"]]
        turns.append((turn["role"], "".join(texts)))
    return turns


def read_rows(data_path, system=None):
    return read_questions(str(data_path), image_folder=None, columns=None, system=system)


@pytest.fixture
def image_folder(tmp_path):
    train_data.images(tmp_path, "red.png", "b/blue.png", "a.d/white.png")
    (tmp_path / "red.png").rename(tmp_path / "RED.PNG")
    (tmp_path / "notes.txt").write_text("mine")
    return tmp_path


def test_each_image_in_a_folder_and_below_is_asked_about_in_order(image_folder):
    asked = read_questions_of_words([image_folder], "what?", "Be brief.")
    assert [question.name for question in asked] == ["RED.PNG", "a.d/white.png", "b/blue.png"]
    for question in asked:
        assert question.text == "what?"
        assert roles_and_texts(question) == [
            ("system", "Be brief."),
            ("user", "<image>what?"),
        ]


def test_the_image_of_a_question_is_not_kept_in_memory(image_folder):
    question_about_blue = read_questions_of_words([image_folder], "what?", "Be brief.")[2]
    user_turn = question_about_blue.conversation()[1]
    assert user_turn["content"][0]["image"].getpixel((0, 0)) == (0, 0, 255)
    assert question_about_blue.turns[1]["content"][0]["image"] is None


def test_images_in_a_folder_need_a_question(image_folder):
    with pytest.raises(ValueError, match="Give the question about each"):
        read_questions_of_words([image_folder], None, None)


def test_besides_a_folder_no_other_images_are_given(image_folder):
    images = [image_folder, image_folder / "RED.PNG"]
    with pytest.raises(ValueError, match="give no other images"):
        read_questions_of_words(images, "what?", None)


def test_a_folder_without_an_image_is_refused(tmp_path):
    with pytest.raises(ValueError, match="has no image"):
        read_questions_of_words([tmp_path], "what?", None)


def test_a_question_about_images_is_named_after_them(tmp_path):
    image_paths = [tmp_path / "a.png", tmp_path / "b.png"]
    question = question_about(image_paths, "what?", None)
    assert question.name == "a.png, b.png"
    assert roles_and_texts(question) == [("user", "<image><image>what?")]
    assert [image["path"] for image in question.images] == [str(path) for path in image_paths]


def test_a_question_without_images_has_a_name():
    assert question_about([], "what?", None).name


def make_turn(role, content):
    return {"role": role, "content": content}


@pytest.fixture
def rows_path(tmp_path):
    """A conversation with a system turn and three further turns, a question, and one in text."""
    messages = [
        make_turn("system", "Own."),
        make_turn("user", "<image>A?"),
        make_turn("assistant", " a "),
        make_turn("user", "<image>B?"),
        make_turn("assistant", "b"),
        make_turn("user", "C?"),
    ]
    rows = [
        {"messages": messages, "images": ["red.png", "blue.png"]},
        {"question": "D?", "image": "red.png"},
        {"question": "E?", "answer": "e"},
    ]
    return train_data.write_json(tmp_path / "mine", rows)


def test_rows_are_asked_up_to_their_first_answer(rows_path):
    asked = read_rows(rows_path, system="Brief.")
    assert [question.name for question in asked] == [
        "data.json, row 0",
        "data.json, row 1",
        "data.json, row 2",
    ]
    conversation, with_image, in_text = asked
    assert roles_and_texts(conversation) == [("system", "Own."), ("user", "<image>A?")]
    assert roles_and_texts(with_image) == [("system", "Brief."), ("user", "<image>D?")]
    assert roles_and_texts(in_text) == [("system", "Brief."), ("user", "E?")]
    assert [len(question.images) for question in asked] == [1, 1, 0]
    assert [question.truth for question in asked] == ["a", None, "e"]
    assert [question.further_turns for question in asked] == [3, 0, 0]


def test_rows_have_their_own_system_turn_without_another(rows_path):
    conversation = read_rows(rows_path)[0]
    assert roles_and_texts(conversation)[0] == ("system", "Own.")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        pytest.param(
            {"messages": [make_turn("system", "x"), make_turn("assistant", "a")]},
            "it has no question",
            id="no user turn",
        ),
        pytest.param(
            {"messages": [make_turn("user", "<image>")], "images": ["red.png"]},
            "it has no question",
            id="no text",
        ),
        pytest.param(
            {"messages": [make_turn("user", "A?"), make_turn("system", "x")]},
            "",
            id="a system turn within",
        ),
        pytest.param(
            {"question": "A?", "image": "gone.png"},
            "gone.png",
            id="a missing image",
        ),
    ],
)
def test_a_row_that_cannot_be_asked_is_named(tmp_path, row, reason):
    data_path = train_data.write_json(tmp_path / "bad", [{"question": "A?"}, row])
    with pytest.raises(ValueError, match=f"data.json, row 1 cannot be asked: .*{reason}"):
        read_rows(data_path)


@pytest.fixture
def two_files(tmp_path):
    for file_name in ("a.jsonl", "b.jsonl"):
        (tmp_path / file_name).write_text('{"question": "A?"}\n{"question": "B?"}\n')
    return tmp_path


def test_rows_of_several_files_are_named_by_their_file(two_files):
    asked = read_rows(two_files)
    assert [question.name for question in asked] == [
        "a.jsonl, row 0",
        "a.jsonl, row 1",
        "b.jsonl, row 0",
        "b.jsonl, row 1",
    ]


def test_rows_of_the_hub_are_named_by_their_data_set(two_files, monkeypatch):
    source = open_source(DataSource.named(str(two_files / "a.jsonl")), streaming=False)
    monkeypatch.setattr(questions, "open_source", lambda named_source, streaming: source)
    first_question, _ = read_rows("bea/a")
    assert first_question.name == "bea/a, row 0"


def test_data_without_rows_are_refused(monkeypatch):
    monkeypatch.setattr(questions, "open_source", lambda named_source, streaming: [])
    with pytest.raises(ValueError, match="bea/a has no rows"):
        read_rows("bea/a")


def test_columns_and_the_image_folder_of_data_can_be_named(tmp_path):
    train_data.images(tmp_path / "images", "red.png")
    table_path = tmp_path / "mine.csv"
    table_path.write_text("path,asked\nred.png,A?\n")
    (question,) = read_questions(
        str(table_path),
        image_folder=str(tmp_path / "images"),
        columns="image=path,question=asked",
        system=None,
    )
    assert question.text == "A?"
    check_images([question])


def test_an_image_that_cannot_be_decoded_is_named_with_its_question(tmp_path):
    train_data.images(tmp_path, "red.png")
    good_path = tmp_path / "red.png"
    bad_path = tmp_path / "bad.png"
    bad_path.write_bytes(b"no image")
    good_question = question_about([good_path], "?", None)
    bad_question = question_about([bad_path], "?", None)
    question_about_both = question_about([good_path, bad_path], "?", None)

    check_images([good_question])
    with pytest.raises(ValueError, match="bad.png cannot be used"):
        check_images([good_question, bad_question])
    with pytest.raises(ValueError, match="red.png, bad.png cannot be used"):
        check_images([question_about_both])


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_words_are_images_and_a_question(home):
    train_data.images(home, "red.png")
    assert read_words(["~/red.png", "What?"]) == ([home / "red.png"], "What?")


def test_a_folder_needs_no_ending(home):
    assert read_words(["~"]) == ([home], None)


@pytest.mark.parametrize("word", ["kite.PNG", "~/kite.jpg", " kite.png"])
def test_a_word_that_looks_like_an_image_is_no_question(home, word):
    with pytest.raises(ValueError, match="File .*kite.* does not exist"):
        read_words([word])


def test_a_text_too_long_for_the_name_of_a_file_is_a_question(home):
    assert read_words(["x" * 5000]) == ([], "x" * 5000)


@pytest.mark.parametrize("word", ["", " "])
def test_an_empty_word_is_refused(home, word):
    """As a path, the first would be this folder."""
    with pytest.raises(ValueError, match="is empty"):
        read_words([word])


def test_no_words_are_neither_image_nor_question():
    assert read_words([]) == ([], None)


QUESTIONS = [
    question_about([], "A?", None),
    question_about([], "B?", None),
]


def test_a_file_of_answers_is_continued_after_its_last_answer(tmp_path):
    output_path = tmp_path / "new" / "a.jsonl"
    assert count_answered(output_path, QUESTIONS, "m") == 0

    append_answers(output_path, "m", QUESTIONS[:1], ["ä"])
    assert count_answered(output_path, QUESTIONS, "m") == 1
    assert "ä" in output_path.read_text(encoding="utf-8")

    append_answers(output_path, "m", QUESTIONS[1:], ["b"])
    assert count_answered(output_path, QUESTIONS, "m") == 2
    first_row, second_row = map(json.loads, output_path.read_text(encoding="utf-8").splitlines())
    assert first_row["answer"] == "ä"
    assert second_row["answer"] == "b"
    assert "truth" not in first_row


def test_a_row_of_an_answer_has_the_true_answer_if_it_is_known(tmp_path):
    question = Question("row", QUESTIONS[0].turns, truth="")
    append_answers(tmp_path / "a.jsonl", "m", [question], ["a"])
    assert json.loads((tmp_path / "a.jsonl").read_text()) == {
        "model": "m",
        "name": "row",
        "question": "A?",
        "answer": "a",
        "truth": "",
    }


FIRST_ROW = {"model": "m", "name": "the question", "question": "A?", "answer": "a"}
SECOND_ROW = {"model": "m", "name": "the question", "question": "B?", "answer": "b"}
FIRST_ROW_OF_OTHER_MODEL = {**FIRST_ROW, "model": "n"}
ROW_WITHOUT_ANSWER = {name: value for name, value in FIRST_ROW.items() if name != "answer"}


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param([FIRST_ROW, SECOND_ROW, SECOND_ROW], id="more rows than questions"),
        pytest.param([SECOND_ROW], id="another order"),
        pytest.param([FIRST_ROW_OF_OTHER_MODEL], id="another model"),
        pytest.param([FIRST_ROW_OF_OTHER_MODEL, SECOND_ROW], id="two models"),
        pytest.param([ROW_WITHOUT_ANSWER], id="no answer"),
        pytest.param([["answer"]], id="a list"),
        pytest.param(["x"], id="a text"),
    ],
)
def test_a_file_of_other_answers_is_left_alone(tmp_path, rows):
    output_path = tmp_path / "answers.jsonl"
    output_path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    with output_path.open("a") as opened:
        opened.write('{"not whole')
    before = output_path.read_bytes()
    with pytest.raises(ValueError, match="Give another --output"):
        count_answered(output_path, QUESTIONS, "m")
    assert output_path.read_bytes() == before


def test_a_file_without_answers_is_refused(tmp_path):
    output_path = tmp_path / "notes.jsonl"
    output_path.write_text("my notes\n")
    with pytest.raises(ValueError, match="Give another --output"):
        count_answered(output_path, QUESTIONS, "m")


def test_questions_come_from_one_place(tmp_path):
    data_path = train_data.write_json(tmp_path / "mine", [{"question": "A?"}])
    with pytest.raises(ValueError, match="--data has the images and questions"):
        ask("gone", ["what?"], AskOptions(data=str(data_path)))


def test_an_output_needs_questions(tmp_path):
    with pytest.raises(ValueError, match="--output needs questions"):
        ask("gone", [], AskOptions(output=tmp_path / "a.jsonl"))


def test_an_output_is_checked_before_the_model_is_opened(tmp_path):
    output_path = tmp_path / "a.jsonl"
    output_path.write_text("{}\n")
    with pytest.raises(ValueError, match="Give another --output"):
        ask("gone", ["what?"], AskOptions(output=output_path))
