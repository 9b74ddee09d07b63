"""One's own questions and answers: scores by hand, rows that are refused; a tiny model is asked and published."""

import io
import json
import shutil

import pytest
import training
from asking import data_url
from datasets import Dataset
from lm_eval import evaluate as harness
from PIL import Image as Picture
from scripted_tasks import Script
from typer.testing import CliRunner

from normalign_llava.cli import app
from normalign_llava.evaluate.own_data import own_task
from normalign_llava.evaluate.results import read_evaluations
from normalign_llava.hub_cards.card.write import write_card
from normalign_llava.hub_cards.push.leaks import check_private
from normalign_llava.hub_cards.push.source import choose_files


SECRET = "Who lives in this house?"


class Asked(Script):
    """Answers the n-th row with the n-th answer, and everything with a white image alike."""

    def __init__(self, answers, of_blank):
        super().__init__(answers)
        self.of_blank = of_blank

    def generate_until(self, requests, disable_tqdm=False):
        said = []
        for request in requests:
            colours = [image.getcolors(10**6) for image in request.args[2]["visual"]]
            is_white = [[colour for _, colour in each] == [(255, 255, 255)] for each in colours]
            assert is_white == [request.idx == 1] * len(is_white)
            said.append(self.of_blank if request.idx else self.answers[request.doc_id])
        self.asked = requests
        return said


def scores(task, answers, of_blank):
    model, name = Asked(answers, of_blank), task.config.task
    found = harness(model, {"tasks": {name: task}})["results"][name]
    return {key.removesuffix(",none"): value for key, value in found.items() if "," in key}, model.asked


def folder_of(folder, rows):
    """A folder of images with `metadata.jsonl`."""
    folder.mkdir()
    for number in range(len(rows)):
        (folder / f"{number}.png").write_bytes(training.image(number))
    lines(folder / "metadata.jsonl", *({"file_name": f"{number}.png", **row} for number, row in enumerate(rows)))
    return folder


def lines(file, *rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def uri(number):
    return data_url(Picture.open(io.BytesIO(training.image(number))))


def asked(question, answer, **others):
    return {"question": question, "answer": answer, **others}


def test_exact_match_by_hand(tmp_path):
    true = ["a kite", "A red kite.", "5", "kite", "a kite", "?"]
    rows = [asked("what?" if number < 4 else "and this?", answer) for number, answer in enumerate(true)]
    task = own_task(str(folder_of(tmp_path / "my images", rows)))
    answers = [" A  Kite!", "a red kite", "-5", "a kite", "a kite or a bird", ""]
    found, requests = scores(task, answers, "A kite.")
    assert task.config.task == "own_my-images" and len(requests) == 6 + 2
    assert {request.args[0] for request in requests} == {"<image>what?", "<image>and this?"}
    # Right are the first two. Of a white image "A kite." is right to one question of each wording.
    assert found["exact_match"] == pytest.approx(2 / 6)
    assert found["exact_match_stderr"] == pytest.approx((2 / 6 * 4 / 6 / 5) ** 0.5)
    assert (found["blank"], found["commonest"]) == (pytest.approx(2 / 6), pytest.approx(2 / 6))


def test_choices_by_hand(tmp_path):
    options = [["yes", "no"], ["no", "yes"], ["no", "yes"], ["no", "yes"]]
    true = ["Yes.", "yes", "b", "no"]
    rows = [asked("Is it?", text, choices=each) for text, each in zip(true, options, strict=True)]
    task = own_task(lines(tmp_path / "rows.jsonl", *rows))
    found, requests = scores(task, ["A", "yes", "A", "The answer is A."], "A")
    prompt = "Is it?\nA. yes\nB. no\nAnswer with the option's letter from the given choices directly."
    assert requests[0].args[0] == prompt and task.eval_docs["answer"] == ["A", "B", "B", "A"]
    # The answer to a blank image is right to the first and the last; "yes" to three, each letter to two.
    assert (found["acc"], found["blank"], found["commonest"]) == (3 / 4, 2 / 4, 3 / 4)
    lettered = own_task(lines(tmp_path / "rows.jsonl", asked("Is it?", "B", A="yes", B="no", C="nan")))
    assert lettered.eval_docs[0]["prompt"] == prompt and scores(lettered, ["no"], "")[0]["acc"] == 1


def test_several_images_and_a_system_turn_are_asked(tmp_path):
    image, text = {"type": "image"}, {"type": "text", "text": "or"}
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [image, text, image]}]
    turns.append({"role": "assistant", "content": "both"})
    task = own_task(lines(tmp_path / "rows.jsonl", {"images": [uri(0), uri(1)], "messages": turns}))
    found, requests = scores(task, ["Both"], "one")
    assert requests[0].args[0] == "Be brief.<image>or<image>" and found["exact_match"] == 1
    assert [len(each.args[2]["visual"]) for each in requests] == [2, 2]


def test_the_same_data_are_the_same_task_in_every_form(tmp_path):
    folder = folder_of(tmp_path / "images", [asked("what?", f"it is {number}") for number in range(3)])
    shutil.make_archive(str(tmp_path / "images"), "zip", folder)
    for suffix, comma in (("csv", ","), ("tsv", "\t")):
        rows = [["path", "asked", "label"], *([f"{number}.png", "what?", f"it is {number}"] for number in range(3))]
        (tmp_path / f"rows.{suffix}").write_text("".join(comma.join(row) + "\n" for row in rows))
    stored = [asked("what?", f"it is {number}", image=Picture.open(folder / f"{number}.png")) for number in range(3)]
    Dataset.from_list(stored).to_parquet(tmp_path / "rows.parquet")
    names = "image=path,question=asked,answer=label"
    tasks = [
        own_task(str(folder)),
        own_task(str(tmp_path / "rows.csv"), image_folder=str(folder), columns=names),
        own_task(str(tmp_path / "rows.tsv"), image_folder=str(tmp_path / "images.zip"), columns=names),
        own_task(str(tmp_path / "rows.parquet")),
    ]
    assert len({task.VERSION for task in tasks}) == 1
    (folder / "1.png").write_bytes(training.image(7))
    assert own_task(str(folder)).VERSION != tasks[0].VERSION


TURNS = [{"role": role, "content": "what?"} for role in ("user", "assistant")]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": TURNS * 2}, "it has 2 questions; save each, with its answer, as a row of its own"),
        ({"question": "what?"}, "it has no assistant turn"),
        (asked("what?", "it", image="gone.png"), "there is no such image"),
        (asked("what?", "C", choices=["a dog", "a cat"]), "the answer 'C' is not one of the choices ['a dog',"),
        (asked("what?", "a", choices="a|b"), "choices must be a list of texts, got 'a|b'; in CSV, use columns A to D"),
        (asked("what?", "a", choices=["a"]), "it has 1 choices; from 2 to 26 are allowed"),
        (asked("what?", "a", choices=["a", "b"]), "it has choices, and the first row has none; save the two kinds"),
        ({"messages": [{"role": "system", "content": "Shout."}, *TURNS]}, "its system turn is 'Shout.', not that of"),
    ],
)  # fmt: skip
def test_rows_that_cannot_be_evaluated_are_named(tmp_path, row, reason):
    with pytest.raises(ValueError, match="Rows that cannot be evaluated") as error:
        own_task(lines(tmp_path / "rows.jsonl", asked("what?", "it"), row))
    assert "rows.jsonl, row 1" in str(error.value) and reason in str(error.value)


def test_captions_are_called_what_they_are(tmp_path, caplog):
    folder = folder_of(tmp_path / "images", [{"caption": "A red kite that flies high above a green field of grass."}])
    found, _ = scores(own_task(str(folder)), ["A red kite."], "")
    assert found["exact_match"] == 0 and "have 12 words (median). exact_match counts" in caplog.text


@pytest.mark.slow
def test_a_model_is_asked_compared_and_published(checkpoint, tmp_path):
    model = shutil.copytree(checkpoint, tmp_path / "model")
    data = folder_of(tmp_path / "my-images", [asked(SECRET, "Ann"), asked(SECRET, "Bob")])

    def run(*words):
        return CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "200"})

    def evaluate(folder=model):
        return run("evaluate", folder, "--data", data, "--batch-size", 2)

    first = evaluate()
    assert first.exit_code == 0 and "own_my-images exact_match" in first.output, first.output
    (result,) = read_evaluations(model)
    (metric,) = result.metrics
    assert (result.title, result.total, metric.samples) == ("my-images (own data)", 2, 2)
    assert metric.references == {"blank image": 0, "commonest answer": 0.5}
    assert "own_my-images: done before." in evaluate().output
    other = shutil.copytree(model, tmp_path / "other")
    done = run("compare", model, other, "--output", tmp_path / "comparison")
    assert done.exit_code == 0 and "own_my-images" in done.output

    write_card(model)
    sent = choose_files(model, {})
    check_private(sent, "")
    card, summary = (sent.files[name].decode() for name in ("README.md", "evaluation/summary.json"))
    assert "### my-images (own data)" in card and "own data of 2 rows (SHA-256 " in card
    assert not any(word in text for word in (SECRET, "Ann", str(tmp_path)) for text in (card, summary))

    (data / "1.png").write_bytes(training.image(7))  # the same answers to other images
    assert "done before" not in evaluate(other).output
    assert "asked the models other questions" in run("compare", model, other).output
