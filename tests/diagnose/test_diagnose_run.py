"""A whole diagnosis, from checkpoints and images on disk to the folder written; docs/report.md."""

import json
import re
import shutil
from dataclasses import asdict
from importlib.metadata import version
from types import SimpleNamespace

import pytest
import tiny
import torch
import training
from paths import ROOT
from transformers import AddedToken, AutoProcessor, LlavaForConditionalGeneration
from typer.testing import CliRunner

from normalign_llava.checkpoint import precision
from normalign_llava.checkpoint.files import DYNAMICS
from normalign_llava.cli import app
from normalign_llava.diagnose import report, run
from normalign_llava.diagnose.data import load_samples
from normalign_llava.diagnose.run import diagnose, read_dynamics
from normalign_llava.models import resolve_model


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """ours/model, none/model, llava (of transformers), and their parts; images with questions."""
    folder = tmp_path_factory.mktemp("home_of_somebody")
    training.checkpoint(folder / "ours", arm="gwc")
    training.checkpoint(folder / "none", arm="none")
    processor = AutoProcessor.from_pretrained(folder / "ours" / "model")
    llava = tiny.llava()
    llava.config.image_token_id = processor.tokenizer.convert_tokens_to_ids(processor.image_token)
    llava.save_pretrained(folder / "llava")
    processor.save_pretrained(folder / "llava")
    write_images(folder / "images")
    return folder


def write_images(folder):
    folder.mkdir()
    lines = []
    for number in range(8):
        file_name = f"{number}.png"
        (folder / file_name).write_bytes(training.image(number))
        row = {"file_name": file_name, "question": f"is it {number}?"}
        lines.append(json.dumps(row) + "\n")
    (folder / "metadata.jsonl").write_text("".join(lines))


def write_dynamics(path):
    steps = [
        {"step": 0, "visual": [0.0, 0.9], "text": [0.4, 0.8]},
        {"step": 10, "visual": [0.5, 0.9], "text": [0.4, 0.8]},
    ]
    path.write_text("".join(json.dumps(step) + "\n" for step in steps))


@pytest.fixture(scope="module")
def hashes_before(root):
    """The files of the model, as training leaves it, before its diagnosis."""
    model_folder = root / "ours" / "model"
    write_dynamics(model_folder / "dynamics.jsonl")
    return file_hashes(model_folder)


@pytest.fixture(scope="module")
def compared(root, hashes_before):
    """The diagnosis of the model with the norm against the baseline."""
    return diagnose(
        str(root / "ours" / "model"),
        against=str(root / "none" / "model"),
        data=str(root / "images"),
        samples=6,
    )


@pytest.fixture(scope="module")
def of_llava(root):
    """The diagnosis of a model without a baseline."""
    return diagnose(str(root / "llava"), data=str(root / "images"), samples=2)


def file_hashes(folder):
    hashes = {}
    for path in folder.rglob("*"):
        if path.is_file():
            hashes[str(path.relative_to(folder))] = hash(path.read_bytes())
    return hashes


def names_in(folder):
    return {path.name for path in folder.iterdir()}


def read_stored(folder):
    """The report in a folder. NaN in it is an error."""
    return json.loads((folder / "report.json").read_bytes(), parse_constant=pytest.fail)


def listed_files(content):
    """Names of all files that a report speaks of."""
    names = {"report.json", "report.html"}
    for figure in content["figures"]:
        names.add(figure["file"])
    for model in (content["report"], content["against"]):
        if model:
            names |= {answer["image"] for answer in model["attention"] if answer["image"]}
    return names


def run_command(*arguments):
    command = ["diagnose", *[str(argument) for argument in arguments]]
    outcome = CliRunner().invoke(app, command, env={"COLUMNS": "1000"})
    assert outcome.exception is None or isinstance(outcome.exception, SystemExit), outcome.exception
    return outcome


def test_the_report_holds_what_the_api_returned(compared):
    content = read_stored(compared.folder)
    assert content["schema_version"] == 2
    assert report.SCHEMA_VERSION == 2

    # Constants of JavaScript, as NaN, are stored as null.
    returned = json.dumps(asdict(compared), default=str)
    expected = json.loads(returned, parse_constant=lambda constant: None)
    assert expected.pop("folder") == str(compared.folder)
    for name, value in expected.items():
        assert content[name] == value, name


def test_the_provenance_has_versions_and_options_and_no_revision_of_folders(compared):
    provenance = read_stored(compared.folder)["provenance"]
    assert provenance["first question"] == compared.report.attention[0].question
    assert provenance["torch"] == version("torch")
    assert provenance["samples asked for"] == "6"
    for name in provenance:
        assert "revision" not in name


def test_both_models_are_measured_on_the_same_samples(compared):
    measured = compared.report
    baseline = compared.against
    assert measured.norm == "layer_norm"
    assert baseline.norm == "none"
    assert measured.samples == 6
    assert baseline.samples == 6
    assert measured.data == "images"
    assert baseline.data == "images"
    assert measured.tokens == baseline.tokens
    assert measured.tokens["visual"] == 24
    # Two turns begin and one ends.
    assert measured.tokens["special"] == 6 * 3
    assert measured.left_out == []
    assert baseline.left_out == []


def test_the_norm_brings_the_ratio_to_one(compared):
    measured = compared.report
    baseline = compared.against
    assert measured.interface.ratio == pytest.approx(1, abs=1e-4)
    assert baseline.interface.ratio > 10
    assert measured.gain.distance == pytest.approx(0, abs=1e-6)
    assert baseline.gain is None


def test_both_models_are_asked_the_same_questions_and_four_are_drawn(compared):
    answers = compared.report.attention
    questions = [answer.question for answer in answers]
    assert questions == [answer.question for answer in compared.against.attention]
    assert len(questions) == 6
    drawn = [bool(answer.maps and answer.image) for answer in answers]
    assert drawn == [True, True, True, True, False, False]


def test_dynamics_and_texts_of_tokens_are_in_the_report(compared):
    dynamics = read_stored(compared.folder)["report"]["dynamics"]
    assert [step["visual"] for step in dynamics] == [[0.0, 0.9], [0.5, 0.9]]
    tokenizer = AutoProcessor.from_pretrained(compared.folder.parent).tokenizer
    for token in compared.report.embeddings.top:
        assert token.text == tokenizer.decode([token.id])


@pytest.mark.parametrize("diagnosis_name", ["compared", "of_llava"])
def test_every_file_is_listed_and_nobody_named(diagnosis_name, root, request):
    folder = request.getfixturevalue(diagnosis_name).folder
    assert names_in(folder) == listed_files(read_stored(folder))
    for path in folder.iterdir():
        assert root.name.encode() not in path.read_bytes(), path.name

    page = (folder / "report.html").read_text(encoding="utf-8")
    page_without_images = re.sub(r"base64,[^\"]*", "", page)
    stored_text = (folder / "report.json").read_text(encoding="utf-8")
    own_path = re.compile(r"(^|[\s\"'(=])(/|~/|file:)(tmp|home|root|Users|var|work)\b")
    assert not own_path.search(page_without_images)
    assert not own_path.search(stored_text)


def test_dynamics_and_images_of_both_models_are_drawn(compared):
    assert {
        "dynamics.png",
        "attention_4.png",
        "image_4.png",
        "baseline_image_4.png",
    } <= listed_files(read_stored(compared.folder))


def test_the_model_stays_as_it_was(compared, hashes_before):
    hashes_after = {}
    for name, file_hash in file_hashes(compared.folder.parent).items():
        if not name.startswith("diagnostics/"):
            hashes_after[name] = file_hash
    assert hashes_after == hashes_before


def test_files_of_a_diagnosis_are_the_ones_beside_its_report_with_its_names(tmp_path):
    own_names = {
        "report.html",
        "baseline_image_2.png",
        "interface.png",
        "norms.png",
        "cosine.png",
        "rotation.png",
        "dynamics.png",
        "attention_12.png",
        "image_1.png",
    }
    other_names = {"notes.png", "norms.svg", "attention_a.png", "image_1.png.txt"}
    for name in own_names | other_names:
        (tmp_path / name).write_text("")
    # There is no report.
    assert run._written(tmp_path) == set()

    (tmp_path / "report.json").write_text("{}")
    assert run._written(tmp_path) == own_names | {"report.json"}


@pytest.mark.parametrize(
    "line",
    [
        "{",
        '{"visual": 0.1}',
        "3",
        '{"step": "1", "visual": [], "text": []}',
        '{"step": 1, "visual": ["0.5"], "text": []}',
        '{"step": 1, "visual": [], "text": 0.5}',
    ],
)
def test_dynamics_that_training_did_not_write_are_named(tmp_path, line):
    assert read_dynamics(tmp_path / DYNAMICS) == []
    (tmp_path / DYNAMICS).write_text(line)
    with pytest.raises(ValueError, match=f"{DYNAMICS} is not as training writes it.*Remove it"):
        read_dynamics(tmp_path / DYNAMICS)


class Stopped(Exception):
    """Raised where the diagnosis would write its folder."""


@pytest.fixture
def stopped_diagnosis(tmp_path, monkeypatch):
    """Keeps how models are opened and where the diagnosis would go, and stops before it."""
    calls = SimpleNamespace(opened=[], folders=[])

    def resolve(model, options):
        calls.opened.append((model, options))
        return SimpleNamespace(name=model, processor="processor")

    def stop(folder, *args):
        calls.folders.append(folder)
        raise Stopped

    monkeypatch.setattr(run, "resolve_model", resolve)
    monkeypatch.setattr(run, "finished_folder", stop)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "here").mkdir()
    return calls


@pytest.mark.parametrize(
    ("model", "output", "expected"),
    [
        ("bea/model", None, "diagnostics/bea/model"),
        ("here", None, "here/diagnostics"),
        ("here", "out", "out"),
        ("~/here", None, "here/diagnostics"),
        ("here", "~/out", "out"),
    ],
)
def test_where_a_diagnosis_is_written(stopped_diagnosis, tmp_path, model, output, expected):
    with pytest.raises(Stopped):
        diagnose(model, against="other", output=output)
    assert stopped_diagnosis.folders == [tmp_path / expected]


def test_how_the_models_of_a_diagnosis_are_opened(stopped_diagnosis):
    with pytest.raises(Stopped):
        diagnose(
            "bea/model",
            against="other",
            trust_remote_code=True,
            base="there",
            base_quantization="none",
        )
    (model, model_options), (other, other_options) = stopped_diagnosis.opened[:2]
    assert (model, other) == ("bea/model", "other")
    assert model_options.trust_remote_code
    assert (model_options.base, model_options.base_quantization) == ("there", "none")
    assert other_options.trust_remote_code
    assert (other_options.base, other_options.base_quantization) == (None, None)


def measure(model_folder, data_folder, image_path, **loading):
    samples = load_samples(str(data_folder), 4)
    options = run.DiagnosisOptions(str(model_folder), batch_size=2, **loading)
    model = resolve_model(str(model_folder), options)
    return run._measure(model, "m", image_path, options, samples)


def test_where_attention_fails_the_questions_before_are_kept(root, tmp_path, monkeypatch):
    questions = []
    attention_maps = run.attention_maps

    def fail_at_the_third(*args, **options):
        questions.append(options["question"])
        if len(questions) == 3:
            raise RuntimeError("no memory\nfor heads")
        return attention_maps(*args, **options)

    monkeypatch.setattr(run, "attention_maps", fail_at_the_third)
    monkeypatch.setattr(run, "QUESTIONS_DRAWN", 1)
    measured = measure(root / "llava", root / "images", tmp_path / "image")

    assert len(questions) == 3
    first_answer, second_answer = measured.attention
    assert first_answer.question == questions[0]
    assert first_answer.image == "image_1.png"
    assert first_answer.maps
    assert second_answer.question == questions[1]
    assert second_answer.image is None
    assert not second_answer.maps
    assert measured.left_out == ["Attention, from question 3 on: no memory"]
    assert names_in(tmp_path) == {"image_1.png"}


COMMAND = """
import sys
for name in list(sys.modules):  # the process has them from the beginning
    if name.partition(".")[0] in ("normalign_llava", "trl"):
        del sys.modules[name]
from normalign_llava.cli import app
app(sys.argv[1:], standalone_mode=False)
print("TRL" if "trl" in sys.modules else "no TRL", "was imported")
"""


def test_the_command_in_another_process_writes_the_same_bytes_without_trl(
    prepared, of_llava, root, tmp_path
):
    """Nothing depends on the process, on the order of a set, or on where the report goes."""
    folder = tmp_path / "a" / "b"
    arguments = [root / "llava", "--data", root / "images", "--samples", 2, "--output", folder]
    # That process has another seed of hashes than this one.
    result = prepared.run(["-c", COMMAND, "diagnose", *arguments], COLUMNS="1000")
    assert result.returncode == 0, result.stderr
    for sentence in of_llava.verdict:
        assert sentence in result.stdout
    assert result.stdout.endswith(f"Report: {folder / 'report.html'}\nno TRL was imported\n")

    stored_bytes = (of_llava.folder / "report.json").read_bytes()
    assert (folder / "report.json").read_bytes() == stored_bytes
    written_names = {path.name for path in tmp_path.rglob("*")}
    assert written_names == {"a", "b", *listed_files(read_stored(of_llava.folder))}


def test_a_failing_run_leaves_the_report_before(of_llava, root, tmp_path):
    folder = tmp_path / "diagnostics"
    shutil.copytree(of_llava.folder, folder)
    before = file_hashes(folder)
    bad_images = tmp_path / "bad"
    write_images(bad_images)
    (bad_images / "3.png").write_bytes(b"no image")

    outcome = run_command(root / "llava", "--data", bad_images, "--output", folder)
    assert outcome.exit_code == 1
    assert "3.png" in outcome.output
    assert file_hashes(folder) == before
    assert set(tmp_path.iterdir()) == {folder, bad_images}


def test_another_run_replaces_the_first_whole(of_llava, root, tmp_path):
    folder = tmp_path / "diagnostics"
    shutil.copytree(of_llava.folder, folder)
    names_before = names_in(folder)
    options = ("--data", root / "images", "--samples", 1, "--output", folder)
    outcome = run_command(root / "llava", *options)

    assert outcome.exit_code == 0, outcome.output
    content = read_stored(folder)
    assert names_in(folder) == listed_files(content)
    assert content["report"]["samples"] == 1
    assert "attention_2.png" in names_before
    assert "attention_2.png" not in listed_files(content)


@pytest.fixture
def refused_folders(of_llava, root, tmp_path):
    """A model without weights, and a diagnosis to which somebody added notes."""
    without_weights = shutil.ignore_patterns("*.safetensors", "diagnostics")
    shutil.copytree(root / "llava", tmp_path / "model", ignore=without_weights)
    shutil.copytree(of_llava.folder, tmp_path / "notes")
    (tmp_path / "notes" / "thoughts.txt").write_text("mine")
    return tmp_path


@pytest.mark.parametrize("output_name", ["notes", "model"])
def test_a_folder_with_other_files_is_refused_before_weights_are_read(
    refused_folders, root, output_name
):
    other_files = {"notes": "thoughts.txt", "model": "chat_template.jinja"}
    before = file_hashes(refused_folders)
    output = refused_folders / output_name
    model_folder = refused_folders / "model"
    outcome = run_command(model_folder, "--data", root / "images", "--output", output)
    assert outcome.exit_code == 1
    assert f"holds {other_files[output_name]}. It is not" in outcome.output, outcome.output
    assert file_hashes(refused_folders) == before


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("language", "`normalign gain "),
        ("vision", "Give a vision-language model"),
    ],
)
def test_a_part_of_a_model_is_refused(root, tmp_path, part, message):
    part_folder = root / "ours" / part
    options = ("--data", root / "images", "--output", tmp_path / "new")
    outcome = run_command(part_folder, *options)
    assert outcome.exit_code == 1
    assert message in outcome.output, outcome.output
    assert file_hashes(tmp_path) == {}


@pytest.fixture(scope="module")
def asking_model(root, tmp_path_factory):
    """A model whose template prints only a special token after the image."""
    folder = tmp_path_factory.mktemp("asking") / "model"
    shutil.copytree(root / "llava", folder)
    processor = AutoProcessor.from_pretrained(folder)
    # The configuration does not know this special token.
    question_mark = AddedToken("?", special=True, normalized=False)
    processor.tokenizer.add_tokens(question_mark, special_tokens=True)
    processor.chat_template = (
        "{% set text = messages[0]['content'][1]['text'] %}{{ text[:-1] }}<image>{{ text[-1] }}"
    )
    processor.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def question_table(tmp_path_factory):
    table_path = tmp_path_factory.mktemp("table") / "mine.csv"
    lines = ["path,asked\n"]
    for number in range(8):
        lines.append(f"{number}.png,is it {number}?\n")
    table_path.write_text("".join(lines))
    return str(table_path)


@pytest.fixture(scope="module")
def columns(root):
    """How the table's rows are read."""
    return {
        "image_folder": str(root / "images"),
        "columns": "image=path,question=asked",
    }


@pytest.fixture(scope="module")
def with_options(asking_model, question_table, columns, tmp_path_factory):
    return diagnose(
        str(asking_model),
        data=question_table,
        output=tmp_path_factory.mktemp("with_options") / "out",
        samples=3,
        seed=5,
        batch_size=2,
        dtype="bfloat16",
        name="mine",
        **columns,
    )


def test_options_reach_the_measurement(with_options):
    measured = with_options.report
    assert measured.model == "mine"
    assert measured.dtype == "bfloat16"
    assert measured.samples == 3
    assert measured.tokens["special"] == 3
    # Only over several batches there is an error.
    assert measured.depth.asymmetry_error is not None


def test_options_are_in_the_provenance(with_options):
    provenance = read_stored(with_options.folder)["provenance"]
    assert provenance["seed of the sample"] == "5"
    assert provenance["batch size"] == "2"
    assert provenance["precision asked for"] == "bfloat16"
    assert provenance["samples asked for"] == "3"


def test_the_seed_decides_the_first_question(with_options, question_table, columns):
    drawn = load_samples(question_table, 3, seed=5, **columns)
    drawn_by_default = load_samples(question_table, 3, **columns)
    first_question = drawn.samples[0].question
    provenance = read_stored(with_options.folder)["provenance"]
    assert provenance["first question"] == first_question
    assert first_question != drawn_by_default.samples[0].question


def test_attention_is_left_out_if_only_a_special_token_comes_after_the_image(with_options):
    assert with_options.report.attention == []
    (reason,) = with_options.report.left_out
    assert "from question 1 on: No text comes after" in reason
    assert with_options.summary() == [
        *with_options.verdict,
        reason,
        f"Report: {with_options.folder / 'report.html'}",
    ]
    assert names_in(with_options.folder) == listed_files(read_stored(with_options.folder))


def test_the_terminal_shows_a_row_for_each_claim(with_options):
    *_, claims_table = with_options.renderable().renderables
    cells = [list(column.cells) for column in claims_table.columns]
    assert cells == [
        [finding.claim for finding in with_options.findings],
        [finding.outcome for finding in with_options.findings],
        [finding.sentence for finding in with_options.findings],
    ]


def test_an_unknown_precision_is_refused(asking_model, question_table):
    with pytest.raises(ValueError, match="dtype must be one of"):
        diagnose(str(asking_model), data=question_table, dtype="float8")


def test_a_model_with_dynamics_of_another_form_is_refused(
    asking_model, question_table, columns, tmp_path
):
    model_folder = shutil.copytree(asking_model, tmp_path / "model")
    (model_folder / DYNAMICS).write_text('{"step": 1}')
    with pytest.raises(ValueError, match=f"{DYNAMICS} is not as training writes it"):
        diagnose(str(model_folder), data=question_table, output=tmp_path / "out", **columns)


@pytest.fixture
def half_model(root):
    folder = root / "half"
    model = LlavaForConditionalGeneration.from_pretrained(root / "llava", dtype=torch.float16)
    model.save_pretrained(folder)
    AutoProcessor.from_pretrained(root / "llava").save_pretrained(folder)
    return str(folder)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU computes in float16")
def test_products_of_emulated_float16_are_in_bfloat16(
    half_model, root, tmp_path, processor, monkeypatch
):
    processor(0.3, float16=5.0)
    data = {"data": str(root / "images"), "samples": 4}
    monkeypatch.setattr(run, "QUESTIONS", 3)
    exact = diagnose(half_model, output=tmp_path / "exact", dtype="float32", **data).report
    assert len(exact.attention) == 3
    assert exact.dtype == "float32"

    monkeypatch.setattr(precision, "free_memory", lambda: 0)
    cast = diagnose(half_model, output=tmp_path / "cast", **data).report
    assert cast.dtype == "float16, products in bfloat16"
    assert cast.interface.ratio == pytest.approx(exact.interface.ratio, rel=0.02)
    assert cast.depth.asymmetry == pytest.approx(exact.depth.asymmetry, rel=0.02)

    # A precision that is asked for by name is kept.
    in_float16 = measure(half_model, root / "images", tmp_path / "image", dtype="float16")
    assert in_float16.dtype == "float16"


@pytest.fixture(scope="module")
def docs():
    return (ROOT / "docs" / "report.md").read_text(encoding="utf-8")


def test_docs_name_keys_and_kinds(compared, docs):
    _, key_section, kind_section = re.split(r"^## ", docs, flags=re.MULTILINE)
    first_cell = re.compile(r"^\| `(\w+)` \|", re.MULTILINE)
    assert first_cell.findall(key_section) == list(read_stored(compared.folder))
    assert tuple(first_cell.findall(kind_section)) == report.KINDS


def test_the_example_of_the_docs_runs(compared, docs, root, monkeypatch, capsys):
    (example,) = re.findall(r"```python\n(.+?)```", docs, re.DOTALL)
    monkeypatch.chdir(root / "ours")
    exec(compile(example, "report.md", "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    ratio = compared.against.interface.ratio
    assert printed[0] == f"other model: visual tokens enter at {ratio:.3g} x the norm of text"
    assert len(printed) == 6
    assert printed[5].startswith("  layer 2: they rotate ")
