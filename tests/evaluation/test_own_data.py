"""One's own questions and answers: scores by hand, refused rows; a model asked and published."""

import json
import shutil

import pytest
import training
from lm_eval import evaluate as harness
from scripted_tasks import Script
from typer.testing import CliRunner

from normalign_llava.cli import app
from normalign_llava.evaluation import own_data
from normalign_llava.evaluation.own_data import contains_any, own_task
from normalign_llava.evaluation.results import read_evaluations
from normalign_llava.hub_cards.card.write import write_card
from normalign_llava.hub_cards.push.checks import check_private
from normalign_llava.hub_cards.push.source import choose_files


SECRET = "Who lives in this house?"
USER_TURN = {"role": "user", "content": "what?"}
ASSISTANT_TURN = {"role": "assistant", "content": "what?"}


def scores(task, *answers):
    """Returns scores and requests, with an answer to each row and the last to every white image."""
    model = Script(answers, lambda prompt: answers[-1])
    task_name = task.config.task
    results = harness(model, {"tasks": {task_name: task}})["results"][task_name]
    values = {}
    for metric, value in results.items():
        if "," in metric:
            values[metric.removesuffix(",none")] = value
    return values, model.asked


def write_lines(file_path, *rows):
    file_path.write_text("".join(json.dumps(data_row) + "\n" for data_row in rows))
    return str(file_path)


def write_folder(folder, *rows):
    """Writes an image folder whose rows have an image each, unless they name their files."""
    folder.mkdir()
    for number in range(2 + len(rows)):
        (folder / f"{number}.png").write_bytes(training.image(number))
    metadata = []
    for number, data_row in enumerate(rows):
        metadata.append({"file_names": [f"{number}.png"], **data_row})
    write_lines(folder / "metadata.jsonl", *metadata)
    return str(folder)


def question_row(question, answer, **fields):
    return {"question": question, "answer": answer, **fields}


def test_exact_match_by_hand(tmp_path):
    folder = write_folder(
        tmp_path / "my images",
        question_row("what?", "a kite"),
        question_row("what?", "A red kite."),
        question_row("what?", "5"),
        question_row("what?", "kite"),
        question_row("and this?", "a kite"),
        question_row("and this?", "?"),
    )
    evaluation_task = own_task(folder)
    answers = (" A  Kite!", "a red kite", "-5", "a kite", "a kite or a bird", "")
    result, requests = scores(evaluation_task, *answers, "A kite.")

    assert evaluation_task.config.task == "own_my-images"
    assert len(requests) == 6 + 2
    assert {request.args[0] for request in requests} == {"<image>what?", "<image>and this?"}
    # The first two are right. To a white image, "A kite." is right to one question of each wording.
    assert result["exact_match"] == pytest.approx(2 / 6)
    assert result["blank"] == pytest.approx(2 / 6)
    assert result["commonest"] == pytest.approx(2 / 6)
    assert result["exact_match_stderr"] == pytest.approx((2 / 6 * 4 / 6 / 5) ** 0.5)
    # "a kite" contains "kite", and "a kite or a bird" contains "a kite"; "-5" is not 5. To a white
    # image, "A kite." contains what is right to the first, the fourth and the fifth.
    assert result["contains"] == pytest.approx(4 / 6)
    assert result["blank_contains"] == pytest.approx(3 / 6)


@pytest.mark.parametrize(
    ("answer", "accepted"),
    [
        ("The shape in the picture is a red circle.", ["circle"]),
        ("It's RED!", ["red"]),
        ("**Red**", ["red"]),
        ("I see 5 kites, in all.", ["5"]),
        ("There are 5.", ["5"]),
        ("It costs 4.50 euros", ["4.50"]),
        ("答案是猫。", ["猫"]),
        ("答案是B", ["b"]),
        ("a kite (a red kite)", ["red kite"]),
        ("a red kite", ["Red"]),
        ("a bird", ["kite", "bird"]),
    ],
)
def test_an_answer_contains_whole_words_in_any_case(answer, accepted):
    assert contains_any(answer, accepted)


@pytest.mark.parametrize(
    ("answer", "accepted"),
    [
        ("It is a category.", ["cat"]),
        ("-5", ["5"]),
        ("5.2", ["5"]),
        ("4.5", ["5"]),
        ("15", ["5"]),
        ("It is red-brown.", ["brown"]),
        ("a redder kite", ["red"]),
        ("naïveté", ["na"]),
        ("a red-brown kite", ["red"]),
        ("", ["cat"]),
        ("anything", [""]),
        ("?!", [""]),
        ("a bird", []),
    ],
)
def test_an_answer_does_not_contain_a_part_of_a_word_or_number(answer, accepted):
    assert not contains_any(answer, accepted)


def turn_pair(question, answer):
    return {"user": question, "assistant": answer}


def test_turns_of_finevision_s_rows_are_questions_by_themselves(tmp_path, caplog):
    kind_turn = turn_pair("what?", "kite")
    colour_turn = turn_pair("which colour?", "red")
    count_turn = turn_pair("how many?", "1")
    folder = write_folder(
        tmp_path / "images",
        {"texts": [kind_turn, colour_turn, count_turn]},
        {"texts": [turn_pair("what?", "bird")]},
        {"file_names": ["0.png", "1.png"], "texts": [kind_turn, colour_turn]},
    )
    evaluation_task = own_task(folder)
    result, requests = scores(evaluation_task, "a kite", "red", "1", "bird", "kite", "blue", "kite")

    with_images = [request for request in requests if request.idx == 0]
    assert [request.args[0] for request in with_images] == [
        "<image>what?",
        "<image>which colour?",
        "<image>how many?",
        "<image>what?",
        "<image><image>what?",
        "<image><image>which colour?",
    ]
    image_counts = [len(request.args[2]["visual"]) for request in with_images]
    assert image_counts == [1, 1, 1, 1, 2, 2]
    assert evaluation_task.eval_docs["answer"] == ["kite", "red", "1", "bird", "kite", "red"]
    assert result["exact_match"] == pytest.approx(4 / 6)
    assert result["contains"] == pytest.approx(5 / 6)
    assert "2 of 3 rows have several questions" in caplog.text
    assert "own data of 3 rows, 6 questions" in evaluation_task.config.dataset_path


def test_turns_with_an_image_within_are_not_questions_by_themselves(tmp_path):
    """There a later turn may need the turns before it."""
    data_row = {"texts": [turn_pair("So, <image>?", "a"), turn_pair("b?", "b")]}
    folder = write_folder(tmp_path / "within", data_row)
    with pytest.raises(ValueError, match="it has 2 questions"):
        own_task(folder)


CHOICE_PROMPT = (
    "So?\nA. yes\nB. no\nAnswer with the option's letter from the given choices directly."
)


def test_choices_by_hand(tmp_path):
    file_path = write_lines(
        tmp_path / "rows.jsonl",
        question_row("So?", "Yes.", choices=["yes", "no"]),
        question_row("So?", "yes", choices=["no", "yes"]),
        question_row("So?", "b", choices=["no", "yes"]),
        question_row("So?", "no", choices=["no", "yes"]),
    )
    evaluation_task = own_task(file_path)
    result, requests = scores(evaluation_task, "A", "yes", "A", "The answer is A.", "A")

    assert requests[0].args[0] == CHOICE_PROMPT
    assert evaluation_task.eval_docs["answer"] == ["A", "B", "B", "A"]
    # The answer to a blank image is right to the first and the last; each letter is right to two.
    assert result["acc"] == 3 / 4
    assert result["blank"] == 2 / 4
    assert result["commonest"] == 2 / 4


def test_choices_may_have_a_column_each(tmp_path):
    data_row = question_row("So?", "B", A="yes", B="no", C="nan")
    evaluation_task = own_task(write_lines(tmp_path / "rows.jsonl", data_row))
    assert evaluation_task.eval_docs[0]["prompt"] == CHOICE_PROMPT
    result, _ = scores(evaluation_task, "no", "")
    assert result["acc"] == 1


def test_any_of_several_accepted_answers_is_right(tmp_path, caplog):
    caplog.set_level("INFO")
    file_path = write_lines(
        tmp_path / "rows.jsonl",
        question_row("what?", None, answers=["a kite", "kite", "kite"]),
        question_row("what?", None, answers=["bird"]),
        question_row("what?", "bird", answers=["bird", "a bird"], tools="x"),
    )
    evaluation_task = own_task(file_path)
    # The commonest of several.
    assert evaluation_task.eval_docs["answer"] == ["kite", "bird", "bird"]

    result, _ = scores(evaluation_task, "A kite.", "kite", "a bird", "kite")
    # The first and the last are right; to a white image, "kite" is right to the first of three.
    assert result["exact_match"] == pytest.approx(2 / 3)
    assert result["blank"] == pytest.approx(1 / 3)
    assert result["commonest"] == pytest.approx(2 / 3)
    assert "rows.jsonl: columns not used: tools (1 row)" in caplog.text
    # Each accepted answer is right, so none is chosen to be learned.
    assert "is learned" not in caplog.text


def test_the_right_choice_may_be_given_by_its_number(tmp_path):
    file_path = write_lines(
        tmp_path / "rows.jsonl",
        question_row("Which?", 1, choices=["yes", "no"]),
        question_row("Which?", None, options=["yes", "no"], correct_choice_idx=0),
    )
    assert own_task(file_path).eval_docs["answer"] == ["B", "A"]


def test_short_answers_get_sixty_four_tokens_and_greedy_decoding(tmp_path):
    evaluation_task = own_task(
        write_lines(tmp_path / "short.jsonl", question_row("what?", "a kite"))
    )
    assert evaluation_task.config.generation_kwargs == {
        "until": [],
        "do_sample": False,
        "temperature": 0.0,
        "max_gen_toks": 64,
    }


LONG_ANSWER = "zwölf Äpfel " * 20 + "是"


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(
            [question_row("what?", "a kite"), question_row("what?", LONG_ANSWER)],
            id="answer",
        ),
        pytest.param(
            [
                question_row("what?", "a kite"),
                question_row("what?", "kite", answers=["kite", LONG_ANSWER]),
            ],
            id="accepted answer",
        ),
        pytest.param([question_row("what?", "B", choices=[LONG_ANSWER, "no"])], id="choice"),
    ],
)
def test_the_longest_true_answer_can_be_generated(tmp_path, rows):
    """A token may be one byte, and the end of the turn is a token too."""
    evaluation_task = own_task(write_lines(tmp_path / "long.jsonl", *rows))
    tokens_needed = len(LONG_ANSWER.encode()) + 2
    assert evaluation_task.config.generation_kwargs["max_gen_toks"] >= tokens_needed
    assert tokens_needed > len(LONG_ANSWER) + 20


def test_the_version_depends_on_questions_answers_and_images(tmp_path):
    data_row = question_row("what?", "kite")
    version = own_task(write_folder(tmp_path / "a", data_row)).VERSION
    same_folder = write_folder(tmp_path / "b", data_row)
    same_version = own_task(same_folder).VERSION
    assert same_version == version

    (tmp_path / "b" / "0.png").write_bytes(training.image(9))
    other_image = own_task(same_folder).VERSION
    other_question = own_task(write_folder(tmp_path / "c", question_row("who?", "kite"))).VERSION
    other_answer = own_task(write_folder(tmp_path / "d", question_row("what?", "bird"))).VERSION
    assert len({version, other_image, other_question, other_answer}) == 4


def test_a_task_is_called_by_its_folder_and_split(tmp_path, monkeypatch):
    folder = tmp_path / "mine"
    folder.mkdir()
    write_lines(folder / "train.jsonl", question_row("what?", "kite"))
    write_lines(folder / "test.jsonl", question_row("what?", "bird"))

    evaluation_task = own_task(f"{folder}:test")
    assert evaluation_task.config.task == "own_mine-test"
    assert evaluation_task.eval_docs["answer"] == ["bird"]

    monkeypatch.chdir(folder)
    assert own_task(".").config.task == "own_mine"


def test_a_task_of_a_file_is_called_by_its_whole_name(tmp_path):
    data_row = question_row("what?", "bird")
    evaluation_task = own_task(write_lines(tmp_path / "my rows-1.v2.jsonl", data_row))
    assert evaluation_task.config.task == "own_my-rows-1.v2.jsonl"


def test_scores_of_the_model_are_good_and_scores_without_it_are_not(tmp_path):
    evaluation_task = own_task(write_lines(tmp_path / "rows.jsonl", question_row("what?", "bird")))
    assert evaluation_task.higher_is_better() == {
        "exact_match": True,
        "contains": True,
        "blank": False,
        "blank_contains": False,
        "commonest": False,
    }


def test_an_answer_of_marks_only_is_read_as_it_is(tmp_path):
    data_rows = [question_row("what?", "?"), question_row("what?", "!")]
    evaluation_task = own_task(write_lines(tmp_path / "rows.jsonl", *data_rows))
    result, _ = scores(evaluation_task, " ? ", "", "")
    assert result["exact_match"] == 1 / 2


def test_the_commonest_answer_is_counted_as_answers_are_compared(tmp_path):
    data_rows = [question_row("what?", answer) for answer in ("A kite.", "a kite", "bird")]
    evaluation_task = own_task(write_lines(tmp_path / "rows.jsonl", *data_rows))
    result, _ = scores(evaluation_task, "", "", "", "")
    assert result["commonest"] == 2 / 3


def test_captions_are_all_right(tmp_path, caplog):
    caplog.set_level("INFO")
    image_folder = write_folder(tmp_path / "images", question_row("?", "it"))
    data_row = {"caption": ["a kite", "a red kite"], "image": "0.png"}
    file_path = write_lines(tmp_path / "captions.jsonl", data_row)

    evaluation_task = own_task(file_path, image_folder=image_folder)
    assert evaluation_task.eval_docs["answers"] == [["a kite", "a red kite"]]
    assert "is learned" not in caplog.text


@pytest.mark.parametrize("answer", ["F", "6"])
def test_choices_may_be_more_than_four(tmp_path, answer):
    data_row = question_row("which?", "6", choices=["1", "2", "3", "4", "5", "6"])
    evaluation_task = own_task(write_lines(tmp_path / "six.jsonl", data_row))
    result, _ = scores(evaluation_task, answer, "")
    assert result["acc"] == 1


def test_data_whose_images_are_not_read_are_refused(tmp_path):
    data_row = question_row("what?", "it", figure="0.png")
    file_path = write_lines(tmp_path / "rows.jsonl", data_row)
    with pytest.raises(ValueError, match="what looks like an image is not read: column figure"):
        own_task(file_path)


def test_data_without_rows_are_refused(tmp_path, monkeypatch):
    data_row = question_row("what?", "it", figure="0.png")
    file_path = write_lines(tmp_path / "rows.jsonl", data_row)
    monkeypatch.setattr(own_data, "parse_rows", lambda *args: [])
    with pytest.raises(ValueError, match="rows.jsonl has no rows"):
        own_task(file_path)


def test_several_images_and_a_system_turn_are_asked(tmp_path):
    image = {"type": "image"}
    text = {"type": "text", "text": "or"}
    turns = [
        {"role": "system", "content": "Brief."},
        {"role": "user", "content": [image, text, image]},
        ASSISTANT_TURN,
    ]
    data_row = {"file_names": ["0.png", "1.png"], "messages": turns}
    evaluation_task = own_task(write_folder(tmp_path / "images", data_row))
    result, requests = scores(evaluation_task, "What", "")

    assert requests[0].args[0] == "Brief.<image>or<image>"
    assert result["exact_match"] == 1
    image_counts = [len(request.args[2]["visual"]) for request in requests]
    assert image_counts == [2, 2]


REFUSED_ROWS = {
    "it has 2 questions; save each with its answer as a row": {
        "messages": [USER_TURN, ASSISTANT_TURN, USER_TURN, ASSISTANT_TURN]
    },
    "no assistant turn": {"question": "what?"},
    "there is no such image": question_row("what?", "it", image="gone.png"),
    "the answer 'C' is not just one of": question_row("what?", "C", choices=["dog", "cat"]),
    "or whether it has choices, differs": question_row("what?", "a", choices=["a", "b"]),
    "its system turn, or": {
        "messages": [{"role": "system", "content": "Shout."}, USER_TURN, ASSISTANT_TURN]
    },
}


@pytest.mark.parametrize("reason", REFUSED_ROWS)
def test_a_row_that_cannot_be_evaluated_is_named(tmp_path, reason):
    good_row = question_row("what?", "it")
    file_path = write_lines(tmp_path / "rows.jsonl", good_row, REFUSED_ROWS[reason])
    with pytest.raises(ValueError, match="Rows that cannot be evaluated") as error:
        own_task(file_path)
    assert "rows.jsonl, row 1" in str(error.value)
    assert reason in str(error.value)


def test_several_rows_that_cannot_be_evaluated_are_named_at_once(tmp_path):
    file_path = write_lines(tmp_path / "rows.jsonl", *REFUSED_ROWS.values())
    with pytest.raises(ValueError) as error:
        own_task(file_path)
    for number in range(4):
        assert f"rows.jsonl, row {number}" in str(error.value)


def run_command(*words):
    command = [str(word) for word in words]
    return CliRunner().invoke(app, command, env={"COLUMNS": "200"}).output


@pytest.fixture
def model_folder(checkpoint, tmp_path):
    return shutil.copytree(checkpoint, tmp_path / "model")


@pytest.fixture
def image_folder(tmp_path):
    data_rows = [question_row(SECRET, "Ann"), question_row(SECRET, "Bob")]
    return write_folder(tmp_path / "my-images", *data_rows)


@pytest.mark.slow
def test_a_model_is_asked_compared_and_published(model_folder, image_folder, tmp_path):
    evaluate_command = ("evaluate", model_folder, "--data", image_folder, "--batch-size", 2)
    check_shown_answers(run_command(*evaluate_command), model_folder)
    check_question_that_is_too_long(model_folder, image_folder, tmp_path)

    (evaluation,) = read_evaluations(model_folder)
    check_own_evaluation(evaluation)
    check_same_data_in_other_forms(evaluation, image_folder, tmp_path)
    assert "own_my-images: done" in run_command(*evaluate_command)

    other_model = shutil.copytree(model_folder, tmp_path / "other")
    compare_command = ("compare", model_folder, other_model, "--output")
    assert "Differences from model" in run_command(*compare_command, tmp_path / "two")

    check_published_files(model_folder, tmp_path)

    # The same answers to other images.
    (tmp_path / "my-images" / "1.png").write_bytes(training.image(7))
    assert "done before" not in run_command("evaluate", other_model, "--data", image_folder)
    refusal = run_command(*compare_command, tmp_path / "three")
    assert "asked the models different questions" in refusal


def check_shown_answers(shown, model_folder):
    assert "own_my-images exact_match" in shown
    assert "own_my-images contains" in shown
    _, _, examples = shown.partition("The first answers of own_my-images")
    example_lines = [line.rstrip() for line in examples.splitlines()]
    (samples_path,) = (model_folder / "evaluation" / "own_my-images").glob("samples_*.jsonl")
    for sample_line in samples_path.read_text().splitlines():
        sample = json.loads(sample_line)
        (example_line,) = (line for line in example_lines if line.endswith(sample["target"]))
        answer = sample["filtered_resps"][0] or "(nothing)"
        assert SECRET in example_line
        assert " ".join(answer.split())[:20] in example_line


def check_question_that_is_too_long(model_folder, image_folder, tmp_path):
    data_row = question_row("what " * 400, "it", image="0.png")
    file_path = write_lines(tmp_path / "long.jsonl", data_row)
    shown = run_command(
        "evaluate", model_folder, "--data", file_path, "--image-folder", image_folder
    )
    assert "its 2,023 tokens are more than 192." in shown


def check_own_evaluation(evaluation):
    assert evaluation.title == "my-images (own data)"
    assert evaluation.total == 2
    assert evaluation.metrics[0].samples == 2
    assert evaluation.metrics[0].references == {"blank image": 0, "commonest answer": 0.5}
    references = {metric.name: metric.references for metric in evaluation.metrics}
    assert references["contains"] == {"blank image": 0}
    assert len(references) == 2


def check_same_data_in_other_forms(evaluation, image_folder, tmp_path):
    """A table with other columns, and a zip file of the images."""
    shutil.make_archive(str(tmp_path / "images"), "zip", image_folder)
    table_path = tmp_path / "my-images.csv"
    table_path.write_text(f"path,asked,label\n0.png,{SECRET},Ann\n1.png,{SECRET},Bob\n")
    same_task = own_task(
        str(table_path),
        image_folder=str(tmp_path / "images.zip"),
        columns="image=path,question=asked,answer=label",
    )
    assert evaluation.versions["own_my-images"] == same_task.VERSION


def check_published_files(model_folder, tmp_path):
    write_card(model_folder)
    source = choose_files(model_folder, {})
    check_private(source, "")
    card = source.files["README.md"].decode()
    summary = source.files["evaluation/summary.json"].decode()
    assert "### my-images (own data)" in card
    assert "own data of 2 rows (SHA-256 " in card
    for private in (SECRET, "Ann", str(tmp_path)):
        assert private not in card
        assert private not in summary
