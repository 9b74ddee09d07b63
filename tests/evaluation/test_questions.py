"""The questions of `normalign ask`: of a folder, of rows, and those a file has answers to."""

import json

import pytest
import train_data

from normalign_llava.data.sources.arguments import DataSource
from normalign_llava.data.sources.source import open_source
from normalign_llava.evaluation import questions
from normalign_llava.evaluation.ask import (
    AskOptions,
    answer_rows,
    append_rows,
    ask,
    count_answered,
)
from normalign_llava.evaluation.questions import (
    Question,
    check_images,
    question_about,
    read_questions,
    read_questions_about_each,
    read_words,
)


def roles_and_texts(question):
    return [
        (turn["role"], "".join(part.get("text", "<image>") for part in turn["content"]))
        for turn in question.turns
    ]


def test_each_image_in_a_folder_and_below_is_asked_about_in_order(tmp_path):
    train_data.images(tmp_path, "red.png", "b/blue.png", "a.d/white.png")
    (tmp_path / "red.png").rename(tmp_path / "RED.PNG")
    (tmp_path / "notes.txt").write_text("mine")
    asked = read_questions_about_each(tmp_path, [], "what?", "Be brief.")
    assert [question.name for question in asked] == ["RED.PNG", "a.d/white.png", "b/blue.png"]
    for question in asked:
        turns = [("system", "Be brief."), ("user", "<image>what?")]
        assert roles_and_texts(question) == turns and question.text == "what?"
    image = asked[2].conversation()[1]["content"][0]["image"]
    assert image.getpixel((0, 0)) == (0, 0, 255)
    assert asked[2].turns[1]["content"][0]["image"] is None  # it is not kept in memory
    (tmp_path / "empty").mkdir()
    for folder, further, text, said in (
        (tmp_path, [], None, "Give the question about each"),
        (tmp_path, [tmp_path / "RED.PNG"], "what?", "give no other images"),
        (tmp_path / "empty", [], "what?", "has no image"),
    ):
        with pytest.raises(ValueError, match=said):
            read_questions_about_each(folder, further, text, None)


def test_a_question_about_images_is_named_after_them(tmp_path):
    one = question_about([tmp_path / "a.png", tmp_path / "b.png"], "what?", None)
    assert one.name == "a.png, b.png" and roles_and_texts(one) == [("user", "<image><image>what?")]
    paths = [str(tmp_path / name) for name in ("a.png", "b.png")]
    assert [image["path"] for image in one.images] == paths
    assert question_about([], "what?", None).name


def turn(role, content):
    return {"role": role, "content": content}


def test_rows_are_asked_up_to_their_first_answer(tmp_path):
    said = [turn("user", "<image>A?"), turn("assistant", " a ")]
    later = [turn("user", "<image>B?"), turn("assistant", "b"), turn("user", "C?")]
    rows = [
        {"messages": [turn("system", "Own."), *said, *later], "images": ["red.png", "blue.png"]},
        {"question": "D?", "image": "red.png"},
        {"question": "E?", "answer": "e"},
    ]
    path = train_data.write_json(tmp_path / "mine", rows)
    asked = read_questions(str(path), image_folder=None, columns=None, system="Brief.")
    assert [question.name for question in asked] == [f"data.json, row {row}" for row in range(3)]
    assert [roles_and_texts(question) for question in asked] == [
        [("system", "Own."), ("user", "<image>A?")],
        [("system", "Brief."), ("user", "<image>D?")],
        [("system", "Brief."), ("user", "E?")],
    ]
    assert [len(question.images) for question in asked] == [1, 1, 0]
    assert [question.truth for question in asked] == ["a", None, "e"]
    assert [question.further_turns for question in asked] == [3, 0, 0]
    (plain, *_) = read_questions(str(path), image_folder=None, columns=None, system=None)
    assert roles_and_texts(plain)[0] == ("system", "Own.")
    for row, reason in (
        ({"messages": [turn("system", "x"), turn("assistant", "a")]}, "it has no question"),
        ({"messages": [turn("user", "<image>")], "images": ["red.png"]}, "it has no question"),
        ({"messages": [turn("user", "A?"), turn("system", "x")]}, ""),
        ({"question": "A?", "image": "gone.png"}, "gone.png"),
    ):
        bad = train_data.write_json(tmp_path / "bad", [{"question": "A?"}, row])
        with pytest.raises(ValueError, match=f"data.json, row 1 cannot be asked: .*{reason}"):
            read_questions(str(bad), image_folder=None, columns=None, system=None)


def test_rows_of_several_files_are_named_by_their_file(tmp_path, monkeypatch):
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text('{"question": "A?"}\n{"question": "B?"}\n')
    options = {"image_folder": None, "columns": None, "system": None}
    asked = read_questions(str(tmp_path), **options)
    expected = [f"{name}.jsonl, row {row}" for name in "ab" for row in range(2)]
    assert [question.name for question in asked] == expected
    opened = open_source(DataSource.named(str(tmp_path / "a.jsonl")), streaming=False)
    monkeypatch.setattr(questions, "open_source", lambda source, streaming: opened)
    (first, _) = read_questions("bea/a", **options)  # of the Hub
    assert first.name == "bea/a, row 0"
    monkeypatch.setattr(questions, "open_source", lambda source, streaming: [])
    with pytest.raises(ValueError, match="bea/a has no rows"):
        read_questions("bea/a", **options)


def test_columns_and_images_of_data_are_those_that_are_named(tmp_path):
    train_data.images(tmp_path / "images", "red.png")
    table = tmp_path / "mine.csv"
    table.write_text("path,asked\nred.png,A?\n")
    named = {"image_folder": str(tmp_path / "images"), "columns": "image=path,question=asked"}
    (asked,) = read_questions(str(table), system=None, **named)
    assert asked.text == "A?"
    check_images([asked])


def test_an_image_that_cannot_be_decoded_is_named_with_its_question(tmp_path):
    train_data.images(tmp_path, "red.png")
    (tmp_path / "bad.png").write_bytes(b"no image")
    good, bad = (question_about([tmp_path / f"{name}.png"], "?", None) for name in ("red", "bad"))
    check_images([good])
    with pytest.raises(ValueError, match="bad.png cannot be used"):
        check_images([good, bad])
    both = question_about([tmp_path / "red.png", tmp_path / "bad.png"], "?", None)
    with pytest.raises(ValueError, match="red.png, bad.png cannot be used"):
        check_images([both])


def test_a_word_that_looks_like_an_image_is_no_question(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    train_data.images(tmp_path, "red.png")
    assert read_words(["~/red.png", "What?"]) == ([tmp_path / "red.png"], "What?")
    assert read_words(["~"]) == ([tmp_path], None)  # a folder has no ending
    for word in ("kite.PNG", "~/kite.jpg", " kite.png"):
        with pytest.raises(ValueError, match="File .*kite.* does not exist"):
            read_words([word])
    assert read_words(["x" * 5000]) == ([], "x" * 5000)  # too long for the name of a file
    for empty in ("", " "):  # of which the first would be this folder
        with pytest.raises(ValueError, match="is empty"):
            read_words([empty])
    assert read_words([]) == ([], None)


QUESTIONS = [question_about([], text, None) for text in ("A?", "B?")]


def stored(file, *rows):
    append_rows(file, rows)
    return file


def test_a_file_of_answers_is_continued_after_those_it_has(tmp_path):
    file = tmp_path / "new" / "a.jsonl"
    assert count_answered(file, QUESTIONS, "m") == 0
    both = list(answer_rows("m", QUESTIONS, ["ä", "b"]))
    assert [row["answer"] for row in both] == ["ä", "b"] and "truth" not in both[0]
    stored(file, both[0])
    assert count_answered(file, QUESTIONS, "m") == 1 and "ä" in file.read_text(encoding="utf-8")
    stored(file, both[1])
    assert count_answered(file, QUESTIONS, "m") == 2
    known = Question("row", QUESTIONS[0].turns, truth="")
    (row,) = answer_rows("m", [known], ["a"])
    assert row == {"model": "m", "name": "row", "question": "A?", "answer": "a", "truth": ""}


def test_a_file_of_other_answers_is_left_alone(tmp_path):
    first, second = answer_rows("m", QUESTIONS, ["a", "b"])
    without = {name: value for name, value in first.items() if name != "answer"}
    cases = (
        [first, second, second],
        [second],
        [first | {"model": "n"}],
        [first | {"model": "n"}, second],
        [without],
        [["answer"]],
        ["x"],
    )
    for number, rows in enumerate(cases):
        file = stored(tmp_path / f"{number}.jsonl", *rows)
        with file.open("a") as opened:
            opened.write('{"not whole')
        before = file.read_bytes()
        with pytest.raises(ValueError, match="Give another --output"):
            count_answered(file, QUESTIONS, "m")
        assert file.read_bytes() == before
    (file := tmp_path / "notes.jsonl").write_text("my notes\n")
    with pytest.raises(ValueError, match="Give another --output"):
        count_answered(file, QUESTIONS, "m")


def test_questions_come_from_one_place(tmp_path):
    data = train_data.write_json(tmp_path / "mine", [{"question": "A?"}])
    with pytest.raises(ValueError, match="--data has the images and questions"):
        ask("gone", ["what?"], AskOptions(), data=str(data))
    with pytest.raises(ValueError, match="--output needs questions"):
        ask("gone", [], AskOptions(output=tmp_path / "a.jsonl"))
    stored(tmp_path / "a.jsonl", json.loads("{}"))
    with pytest.raises(ValueError, match="Give another --output"):  # before the model is opened
        ask("gone", ["what?"], AskOptions(output=tmp_path / "a.jsonl"))
