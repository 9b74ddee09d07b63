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


METRICS = ("exact_match", "blank", "commonest")
CHATTY = ("contains", "blank_contains")
SECRET = "Who lives in this house?"
TURNS = [{"role": role, "content": "what?"} for role in ("user", "assistant")]


def scores(task, *answers):
    """With each answer to a row, and the last to every white image."""
    model = Script(answers, lambda prompt: answers[-1])
    name = task.config.task
    results = harness(model, {"tasks": {name: task}})["results"][name].items()
    return {key.removesuffix(",none"): score for key, score in results if "," in key}, model.asked


def lines(file, *rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def folder_of(folder, *rows):
    folder.mkdir()
    for number in range(2 + len(rows)):
        (folder / f"{number}.png").write_bytes(training.image(number))
    rows = [{"file_names": [f"{number}.png"], **row} for number, row in enumerate(rows)]
    lines(folder / "metadata.jsonl", *rows)
    return str(folder)


def asked(question, answer, **others):
    return {"question": question, "answer": answer, **others}


def test_exact_match_by_hand(tmp_path):
    rows = [asked("what?", answer) for answer in ("a kite", "A red kite.", "5", "kite")]
    rows += [asked("and this?", "a kite"), asked("and this?", "?")]
    task = own_task(folder_of(tmp_path / "my images", *rows))
    said = (" A  Kite!", "a red kite", "-5", "a kite", "a kite or a bird", "")
    result, requests = scores(task, *said, "A kite.")
    assert task.config.task == "own_my-images" and len(requests) == 6 + 2
    assert {request.args[0] for request in requests} == {"<image>what?", "<image>and this?"}
    # Right are the first two. Of a white image "A kite." is right to one question of each wording.
    assert [result[name] for name in METRICS] == pytest.approx([2 / 6] * 3)
    assert result["exact_match_stderr"] == pytest.approx((2 / 6 * 4 / 6 / 5) ** 0.5)
    # "a kite" contains "kite", and "a kite or a bird" contains "a kite"; "-5" is not 5. Of a white
    # image "A kite." contains what is right to the first, the fourth and the fifth.
    assert [result[name] for name in CHATTY] == pytest.approx([4 / 6, 3 / 6])


def test_what_an_answer_contains():
    within = {
        "The shape in the picture is a red circle.": "circle",
        "It's RED!": "red",
        "**Red**": "red",
        "I see 5 kites, in all.": "5",
        "There are 5.": "5",
        "It costs 4.50 euros": "4.50",
        "答案是猫。": "猫",
        "答案是B": "b",
        "a kite (a red kite)": "red kite",
    }
    outside = {
        "It is a category.": "cat",
        "-5": "5",
        "5.2": "5",
        "4.5": "5",
        "15": "5",
        "It is red-brown.": "brown",
        "a redder kite": "red",
        "naïveté": "na",
        "a red-brown kite": "red",
        "": "cat",
        "anything": "",
        "?!": "",
    }
    assert all(contains_any(answer, [text]) for answer, text in within.items())
    assert not any(contains_any(answer, [text]) for answer, text in outside.items())
    assert contains_any("a red kite", ["Red"])
    assert contains_any("a bird", ["kite", "bird"]) and not contains_any("a bird", [])


def test_turns_of_finevision_s_rows_are_questions_by_themselves(tmp_path, caplog):
    """Each with the row's images; of other forms a later turn may need those before it."""
    pairs = [("what?", "kite"), ("which colour?", "red"), ("how many?", "1")]
    turns = [{"user": question, "assistant": answer} for question, answer in pairs]
    rows = [{"texts": turns}, {"texts": [{"user": "what?", "assistant": "bird"}]}]
    rows.append({"file_names": ["0.png", "1.png"], "texts": turns[:2]})
    task = own_task(folder_of(tmp_path / "images", *rows))
    result, requests = scores(task, "a kite", "red", "1", "bird", "kite", "blue", "kite")
    asked_of = [request for request in requests if request.idx == 0]
    prompts = [request.args[0] for request in asked_of]
    one = ["<image>what?", "<image>which colour?", "<image>how many?"]
    two = ["<image><image>what?", "<image><image>which colour?"]
    assert prompts == [*one, "<image>what?", *two]
    counts = [len(request.args[2]["visual"]) for request in asked_of]
    assert counts == [1, 1, 1, 1, 2, 2]
    assert task.eval_docs["answer"] == ["kite", "red", "1", "bird", "kite", "red"]
    assert (result["exact_match"], result["contains"]) == pytest.approx((4 / 6, 5 / 6))
    assert "2 of 3 rows have several questions" in caplog.text
    assert "own data of 3 rows, 6 questions" in task.config.dataset_path
    within = [{"user": "So, <image>?", "assistant": "a"}, {"user": "b?", "assistant": "b"}]
    with pytest.raises(ValueError, match="it has 2 questions"):
        own_task(folder_of(tmp_path / "within", {"texts": within}))


def test_choices_by_hand(tmp_path):
    options = ["yes", "no"]
    others = ["no", "yes"]
    rows = [asked("So?", "Yes.", choices=options), asked("So?", "yes", choices=others)]
    rows += [asked("So?", "b", choices=others), asked("So?", "no", choices=others)]
    task = own_task(lines(tmp_path / "rows.jsonl", *rows))
    result, requests = scores(task, "A", "yes", "A", "The answer is A.", "A")
    prompt = "So?\nA. yes\nB. no\nAnswer with the option's letter from the given choices directly."
    assert requests[0].args[0] == prompt and task.eval_docs["answer"] == ["A", "B", "B", "A"]
    # The answer to a blank image is right to the first and the last; each letter is right to two.
    assert (result["acc"], result["blank"], result["commonest"]) == (3 / 4, 2 / 4, 2 / 4)
    lettered = own_task(lines(tmp_path / "b.jsonl", asked("So?", "B", A="yes", B="no", C="nan")))
    assert lettered.eval_docs[0]["prompt"] == prompt and scores(lettered, "no", "")[0]["acc"] == 1


def test_any_of_several_accepted_answers_is_right_and_choices_may_be_numbers(tmp_path, caplog):
    caplog.set_level("INFO")
    accepted = (["a kite", "kite", "kite"], ["bird"])
    rows = [asked("what?", None, answers=answers) for answers in accepted]
    rows.append(asked("what?", "bird", answers=["bird", "a bird"], tools="x"))
    task = own_task(lines(tmp_path / "rows.jsonl", *rows))
    assert task.eval_docs["answer"] == ["kite", "bird", "bird"]  # of several the commonest
    result, _ = scores(task, "A kite.", "kite", "a bird", "kite")
    # Right are the first and the last; of a white image, "kite" is right to the first of three.
    assert [result[name] for name in METRICS] == pytest.approx([2 / 3, 1 / 3, 2 / 3])
    assert "rows.jsonl: columns not used: tools (1 row)" in caplog.text
    assert "is learned" not in caplog.text  # each accepted answer is right
    numbers = [asked("Which?", 1, choices=["yes", "no"])]
    numbers.append(asked("Which?", None, options=["yes", "no"], correct_choice_idx=0))
    assert own_task(lines(tmp_path / "rows.jsonl", *numbers)).eval_docs["answer"] == ["B", "A"]


def test_the_longest_true_answer_can_be_generated(tmp_path):
    """A token may be one byte, and the end of the turn is a token too."""
    short_answers = own_task(lines(tmp_path / "short.jsonl", asked("what?", "a kite")))
    greedy = {"until": [], "do_sample": False, "temperature": 0.0}
    assert short_answers.config.generation_kwargs == {**greedy, "max_gen_toks": 64}
    long_answer = "zwölf Äpfel " * 20 + "是"
    for row in (asked("what?", long_answer), asked("what?", "kite", answers=["kite", long_answer])):
        task = own_task(lines(tmp_path / "long.jsonl", asked("what?", "a kite"), row))
        allowed = task.config.generation_kwargs["max_gen_toks"]
        assert allowed >= len(long_answer.encode()) + 2 > len(long_answer) + 20
    chosen = asked("what?", "B", choices=[long_answer, "no"])
    task = own_task(lines(tmp_path / "long.jsonl", chosen))
    assert task.config.generation_kwargs["max_gen_toks"] >= len(long_answer.encode()) + 2


def test_the_version_is_that_of_questions_answers_and_images(tmp_path):
    row = asked("what?", "kite")
    same = [own_task(folder_of(tmp_path / name, row)).VERSION for name in ("a", "b")]
    (tmp_path / "b" / "0.png").write_bytes(training.image(9))
    others = [own_task(str(tmp_path / "b"))]
    for number, change in enumerate((asked("who?", "kite"), asked("what?", "bird"))):
        others.append(own_task(folder_of(tmp_path / f"c{number}", change)))
    assert same[0] == same[1]
    assert len({same[0], *(task.VERSION for task in others)}) == 4


def test_what_a_task_is_called_and_which_scores_are_good(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    for split, answer in (("train", "kite"), ("test", "bird")):
        lines(tmp_path / "mine" / f"{split}.jsonl", asked("what?", answer))
    task = own_task(f"{tmp_path}/mine:test")
    assert task.config.task == "own_mine-test" and task.eval_docs["answer"] == ["bird"]
    monkeypatch.chdir(tmp_path / "mine")
    assert own_task(".").config.task == "own_mine"
    dotted = own_task(lines(tmp_path / "my rows-1.v2.jsonl", asked("what?", "bird")))
    assert dotted.config.task == "own_my-rows-1.v2.jsonl"
    good = task.higher_is_better()
    assert good == dict.fromkeys(("exact_match", "contains"), True) | dict.fromkeys(
        ("blank", "blank_contains", "commonest"), False
    )


def test_an_answer_of_marks_alone_is_read_as_it_is(tmp_path):
    task = own_task(lines(tmp_path / "rows.jsonl", asked("what?", "?"), asked("what?", "!")))
    result, _ = scores(task, " ? ", "", "")
    assert result["exact_match"] == 1 / 2


def test_the_commonest_answer_is_counted_as_answers_are_compared(tmp_path):
    rows = [asked("what?", answer) for answer in ("A kite.", "a kite", "bird")]
    result, _ = scores(own_task(lines(tmp_path / "rows.jsonl", *rows)), "", "", "", "")
    assert result["commonest"] == 2 / 3


def test_captions_are_all_right_and_choices_may_be_more_than_four(tmp_path, caplog):
    caplog.set_level("INFO")
    captioned = {"caption": ["a kite", "a red kite"], "image": "0.png"}
    task = own_task(lines(tmp_path / "captions.jsonl", captioned), image_folder=images(tmp_path))
    assert task.eval_docs["answers"] == [["a kite", "a red kite"]]
    assert "is learned" not in caplog.text
    six = asked("which?", "6", choices=[*"123456"])
    task = own_task(lines(tmp_path / "six.jsonl", six))
    assert scores(task, "F", "")[0]["acc"] == scores(task, "6", "")[0]["acc"] == 1


def images(folder):
    return folder_of(folder / "images", {"question": "?", "answer": "it"})


def test_data_that_have_no_rows_or_whose_images_are_not_read_are_refused(tmp_path, monkeypatch):
    file = lines(tmp_path / "rows.jsonl", asked("what?", "it", figure="0.png"))
    with pytest.raises(ValueError, match="what looks like an image is not read: column figure"):
        own_task(file)
    monkeypatch.setattr(own_data, "parse_rows", lambda *args: [])
    with pytest.raises(ValueError, match="rows.jsonl has no rows"):
        own_task(file)


def test_several_images_and_a_system_turn_are_asked(tmp_path):
    image = {"type": "image"}
    text = {"type": "text", "text": "or"}
    turns = [{"role": "system", "content": "Brief."}, TURNS[0] | {"content": [image, text, image]}]
    row = {"file_names": ["0.png", "1.png"], "messages": [*turns, TURNS[1]]}
    result, requests = scores(own_task(folder_of(tmp_path / "images", row)), "What", "")
    assert requests[0].args[0] == "Brief.<image>or<image>" and result["exact_match"] == 1
    assert [len(request.args[2]["visual"]) for request in requests] == [2, 2]


def test_rows_that_cannot_be_evaluated_are_named(tmp_path):
    cases = {
        "it has 2 questions; save each with its answer as a row": {"messages": TURNS * 2},
        "no assistant turn": {"question": "what?"},
        "there is no such image": asked("what?", "it", image="gone.png"),
        "the answer 'C' is not just one of": asked("what?", "C", choices=["dog", "cat"]),
        "or whether it has choices, differs": asked("what?", "a", choices=["a", "b"]),
        "its system turn, or": {"messages": [{"role": "system", "content": "Shout."}, *TURNS]},
    }
    for reason, row in cases.items():
        with pytest.raises(ValueError, match="Rows that cannot be evaluated") as error:
            own_task(lines(tmp_path / "rows.jsonl", asked("what?", "it"), row))
        assert "rows.jsonl, row 1" in str(error.value) and reason in str(error.value)
    with pytest.raises(ValueError) as error:
        own_task(lines(tmp_path / "rows.jsonl", *cases.values()))
    assert all(f"rows.jsonl, row {number}" in str(error.value) for number in range(4))


@pytest.mark.slow
def test_a_model_is_asked_compared_and_published(checkpoint, tmp_path):
    model = shutil.copytree(checkpoint, tmp_path / "model")
    data = folder_of(tmp_path / "my-images", asked(SECRET, "Ann"), asked(SECRET, "Bob"))

    def run(*words):
        return CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "200"}).output

    shown = run("evaluate", model, "--data", data, "--batch-size", 2)
    assert "own_my-images exact_match" in shown and "own_my-images contains" in shown
    examples = shown.partition("The first answers of own_my-images")[2]
    (samples,) = (model / "evaluation" / "own_my-images").glob("samples_*.jsonl")
    for line in samples.read_text().splitlines():
        sample = json.loads(line)
        (row,) = (row for row in examples.splitlines() if row.rstrip().endswith(sample["target"]))
        said = sample["filtered_resps"][0] or "(nothing)"
        assert SECRET in row and " ".join(said.split())[:20] in row
    long = lines(tmp_path / "long.jsonl", asked("what " * 400, "it", image="0.png"))
    said = run("evaluate", model, "--data", long, "--image-folder", data)
    assert "its 2,023 tokens are more than 192." in said
    (result,) = read_evaluations(model)
    assert (result.title, result.total, result.metrics[0].samples) == ("my-images (own data)", 2, 2)
    assert result.metrics[0].references == {"blank image": 0, "commonest answer": 0.5}
    references = {metric.name: metric.references for metric in result.metrics}
    assert references["contains"] == {"blank image": 0} and len(references) == 2
    other = shutil.copytree(model, tmp_path / "other")
    shutil.make_archive(str(tmp_path / "images"), "zip", data)  # the same in other forms
    table = tmp_path / "my-images.csv"
    table.write_text(f"path,asked,label\n0.png,{SECRET},Ann\n1.png,{SECRET},Bob\n")
    named = {"columns": "image=path,question=asked,answer=label"}
    same = own_task(str(table), image_folder=str(tmp_path / "images.zip"), **named)
    assert result.versions["own_my-images"] == same.VERSION
    assert "own_my-images: done" in run("evaluate", model, "--data", data, "--batch-size", 2)
    assert "Differences from model" in run("compare", model, other, "--output", tmp_path / "two")

    write_card(model)
    check_private(sent := choose_files(model, {}), "")
    card, summary = (sent.files[name].decode() for name in ("README.md", "evaluation/summary.json"))
    assert "### my-images (own data)" in card and "own data of 2 rows (SHA-256 " in card
    assert not any(word in card + summary for word in (SECRET, "Ann", str(tmp_path)))

    (tmp_path / "my-images" / "1.png").write_bytes(training.image(7))  # same answers, other images
    assert "done before" not in run("evaluate", other, "--data", data)
    assert "asked the models different questions" in run(
        "compare", model, other, "--output", tmp_path / "three"
    )
