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
    for name, arm in (("ours", "gwc"), ("none", "none")):
        training.checkpoint(folder / name, arm=arm)
    processor = AutoProcessor.from_pretrained(folder / "ours" / "model")
    llava = tiny.llava()
    llava.config.image_token_id = processor.tokenizer.convert_tokens_to_ids(processor.image_token)
    llava.save_pretrained(folder / "llava")
    processor.save_pretrained(folder / "llava")
    images(folder / "images")
    return folder


def images(folder):
    folder.mkdir()
    rows = [{"file_name": f"{number}.png", "question": f"is it {number}?"} for number in range(8)]
    for number, row in enumerate(rows):
        (folder / row["file_name"]).write_bytes(training.image(number))
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def compared(root):
    """Ours, as training leaves it, against the baseline; and the model's files before."""
    model = root / "ours" / "model"
    baseline = str(root / "none" / "model")
    steps = [{"step": step, "visual": [step / 20, 0.9], "text": [0.4, 0.8]} for step in (0, 10)]
    (model / "dynamics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    before = hashes(model)
    return diagnose(str(model), against=baseline, data=str(root / "images"), samples=6), before


@pytest.fixture(scope="module")
def alone(root):
    return diagnose(str(root / "llava"), data=str(root / "images"), samples=2)


def hashes(folder):
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hash(path.read_bytes()) for path in files}


def stored(folder):
    return json.loads((folder / "report.json").read_bytes(), parse_constant=pytest.fail)


def listed(content):
    """Names of all files that a report speaks of."""
    names = {"report.json", "report.html", *(figure["file"] for figure in content["figures"])}
    for model in filter(None, (content["report"], content["against"])):
        names |= {answer["image"] for answer in model["attention"] if answer["image"]}
    return names


def cli(*arguments):
    result = CliRunner().invoke(app, ["diagnose", *map(str, arguments)], env={"COLUMNS": "1000"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def test_the_report_holds_what_the_api_returned(compared):
    diagnosis = compared[0]
    content = stored(compared[0].folder)
    assert content["schema_version"] == report.SCHEMA_VERSION == 2
    finite = json.loads(json.dumps(asdict(diagnosis), default=str), parse_constant=lambda _: None)
    assert finite.pop("folder") == str(diagnosis.folder) and content == {**content, **finite}
    provenance = content["provenance"]
    ours = diagnosis.report
    none = diagnosis.against
    assert provenance["first question"] == ours.attention[0].question
    assert provenance["torch"] == version("torch") and provenance["samples asked for"] == "6"
    assert not [name for name in provenance if "revision" in name]  # of folders

    assert (ours.norm, none.norm, ours.samples, none.samples) == ("layer_norm", "none", 6, 6)
    assert ours.data == none.data == "images"
    assert ours.tokens == none.tokens and ours.tokens["visual"] == 24
    assert ours.tokens["special"] == 6 * 3  # two turns begin and one ends
    assert ours.interface.ratio == pytest.approx(1, abs=1e-4) and none.interface.ratio > 10
    assert ours.gain.distance == pytest.approx(0, abs=1e-6) and none.gain is None
    questions = [answer.question for answer in ours.attention]
    assert questions == [answer.question for answer in none.attention] and len(questions) == 6
    drawn = [bool(answer.maps and answer.image) for answer in ours.attention]
    assert drawn == [True] * 4 + [False] * 2 and ours.left_out == none.left_out == []
    assert [step["visual"] for step in content["report"]["dynamics"]] == [[0.0, 0.9], [0.5, 0.9]]
    decode = AutoProcessor.from_pretrained(diagnosis.folder.parent).tokenizer.decode
    assert all(row.text == decode([row.id]) for row in ours.embeddings.top)


def test_every_file_is_listed_the_model_as_it_was_and_nobody_named(compared, alone, root):
    diagnosis, before = compared
    for folder in (diagnosis.folder, alone.folder):
        assert {path.name for path in folder.iterdir()} == listed(stored(folder))
        for path in folder.iterdir():
            assert root.name.encode() not in path.read_bytes(), path.name
        page = re.sub(r"base64,[^\"]*", "", (folder / "report.html").read_text(encoding="utf-8"))
        for text in (page, (folder / "report.json").read_text(encoding="utf-8")):
            assert not re.search(r"(^|[\s\"'(=])(/|~/|file:)(tmp|home|root|Users|var|work)\b", text)
    names = {"dynamics.png", "attention_4.png", "image_4.png", "baseline_image_4.png"}
    assert names <= listed(stored(diagnosis.folder))
    after = hashes(diagnosis.folder.parent)
    assert {name: after[name] for name in after if not name.startswith("diagnostics/")} == before


def test_files_of_a_diagnosis_are_those_beside_its_report_with_its_names(tmp_path):
    drawn = ["interface", "norms", "cosine", "rotation", "dynamics", "attention_12", "image_1"]
    ours = {"report.html", "baseline_image_2.png", *(f"{name}.png" for name in drawn)}
    for name in (*ours, "notes.png", "norms.svg", "attention_a.png", "image_1.png.txt"):
        (tmp_path / name).write_text("")
    assert run._written(tmp_path) == set()  # there is no report
    (tmp_path / "report.json").write_text("{}")
    assert run._written(tmp_path) == ours | {"report.json"}


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


def test_where_a_diagnosis_is_written_and_how_its_models_are_opened(tmp_path, monkeypatch):
    opened = []
    folders = []

    def resolve(model, **options):
        opened.append((model, options))
        return SimpleNamespace(name=model, processor="processor")

    def stop(folder, *args):
        folders.append(folder)
        raise ValueError("so far")

    monkeypatch.setattr(run, "resolve_model", resolve)
    monkeypatch.setattr(run, "finished_folder", stop)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    adapted = {"base": "there", "base_quantization": "none"}
    monkeypatch.setenv("HOME", str(tmp_path))
    asked = [("bea/model", None), ("here", None), ("here", "out")]
    for model, output in (*asked, ("~/here", None), ("here", "~/out")):
        with pytest.raises(ValueError, match="so far"):
            diagnose(model, against="other", output=output, trust_remote_code=True, **adapted)
    expected = ["diagnostics/bea/model", "here/diagnostics", "out", "here/diagnostics", "out"]
    assert folders == [tmp_path / name for name in expected]
    trusted = {"trust_remote_code": True}
    assert opened[:2] == [("bea/model", trusted | adapted), ("other", trusted)]


def measured(model, data, images, count=4, **loading):
    drawn = load_samples(str(data), count)
    options = run.DiagnosisOptions(str(model), batch_size=2, **loading)
    return run._measure(resolve_model(str(model)), "m", images, options, drawn)


def test_where_attention_fails_the_questions_before_are_kept(root, tmp_path, monkeypatch):
    asked = []
    measure = run.attention_maps

    def maps(*args, **options):
        asked.append(options["question"])
        if len(asked) == 3:
            raise RuntimeError("no memory\nfor heads")
        return measure(*args, **options)

    monkeypatch.setattr(run, "attention_maps", maps)
    monkeypatch.setattr(run, "QUESTIONS_DRAWN", 1)
    report = measured(root / "llava", root / "images", tmp_path / "image")
    assert [answer.question for answer in report.attention] == asked[:2] and len(asked) == 3
    assert [(answer.image, bool(answer.maps)) for answer in report.attention] == [
        ("image_1.png", True),
        (None, False),
    ]
    assert report.left_out == ["Attention, from question 3 on: no memory"]
    assert [file.name for file in tmp_path.iterdir()] == ["image_1.png"]


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
    prepared, alone, root, tmp_path
):
    """Nothing depends on the process, on the order of a set, or on where the report goes."""
    folder = tmp_path / "a" / "b"
    arguments = [root / "llava", "--data", root / "images", "--samples", 2, "--output", folder]
    # That process has another seed of hashes than this one.
    result = prepared.run(["-c", COMMAND, "diagnose", *arguments], COLUMNS="1000")
    assert result.returncode == 0, result.stderr
    assert all(sentence in result.stdout for sentence in alone.verdict)
    assert result.stdout.endswith(f"Report: {folder / 'report.html'}\nno TRL was imported\n")
    assert (folder / "report.json").read_bytes() == (alone.folder / "report.json").read_bytes()
    assert {path.name for path in tmp_path.rglob("*")} == {"a", "b", *listed(stored(alone.folder))}


def test_another_run_replaces_the_first_whole_and_a_failing_one_leaves_it(alone, root, tmp_path):
    folder = tmp_path / "diagnostics"
    bad = tmp_path / "bad"
    shutil.copytree(alone.folder, folder)
    first = hashes(folder)
    images(bad)
    (bad / "3.png").write_bytes(b"no image")
    failing = cli(root / "llava", "--data", bad, "--output", folder)
    assert failing.exit_code == 1 and "3.png" in failing.output
    assert hashes(folder) == first and set(tmp_path.iterdir()) == {folder, bad}

    result = cli(root / "llava", "--data", root / "images", "--samples", 1, "--output", folder)
    assert result.exit_code == 0, result.output
    content = stored(folder)
    assert {path.name for path in folder.iterdir()} == listed(content)
    assert content["report"]["samples"] == 1 and "attention_2.png" in first.keys() - listed(content)


def test_what_cannot_be_diagnosed_is_refused_before_weights_are_read(alone, root, tmp_path):
    model = tmp_path / "model"
    notes = tmp_path / "notes"
    ignored = shutil.ignore_patterns("*.safetensors", "diagnostics")
    shutil.copytree(root / "llava", model, ignore=ignored)
    shutil.copytree(alone.folder, notes)
    (notes / "thoughts.txt").write_text("mine")
    before = hashes(tmp_path)
    for source, output, words in (
        (model, notes, "holds thoughts.txt. It is not"),
        (model, model, "holds chat_template.jinja. It is not"),
        (root / "ours" / "language", tmp_path / "new", "`normalign gain "),
        (root / "ours" / "vision", tmp_path / "new", "Give a vision-language model"),
    ):
        result = cli(source, "--data", root / "images", "--output", output)
        assert result.exit_code == 1 and words in result.output, result.output
    assert hashes(tmp_path) == before
    (tmp_path / DYNAMICS).write_text('{"visual": 0.1}')
    with pytest.raises(ValueError, match=f"{DYNAMICS} is not as training writes it.*Remove it"):
        read_dynamics(tmp_path / DYNAMICS)


def test_options_reach_the_measurement_and_what_is_left_out_is_said(root, tmp_path):
    """Where but a special token comes after the image, attention cannot be measured."""
    model = tmp_path / "model"
    table = tmp_path / "mine.csv"
    shutil.copytree(root / "llava", model)
    processor = AutoProcessor.from_pretrained(model)
    mark = AddedToken("?", special=True, normalized=False)  # which the configuration does not know
    processor.tokenizer.add_tokens(mark, special_tokens=True)
    processor.chat_template = (
        "{% set text = messages[0]['content'][1]['text'] %}{{ text[:-1] }}<image>{{ text[-1] }}"
    )
    processor.save_pretrained(model)
    table.write_text(
        "path,asked\n" + "".join(f"{number}.png,is it {number}?\n" for number in range(8))
    )
    options = dict(image_folder=str(root / "images"), columns="image=path,question=asked")
    options |= dict(samples=3, seed=5, batch_size=2, dtype="bfloat16", name="mine")
    diagnosis = diagnose(str(model), data=str(table), output=tmp_path / "out", **options)
    report = diagnosis.report
    provenance = stored(tmp_path / "out")["provenance"]
    assert (report.model, report.dtype, report.samples) == ("mine", "bfloat16", 3)
    assert report.tokens["special"] == 3
    assert report.depth.asymmetry_error is not None  # over two batches
    named = ("seed of the sample", "batch size", "precision asked for", "samples asked for")
    assert [provenance[name] for name in named] == ["5", "2", "bfloat16", "3"]
    drawn = load_samples(
        str(table), 3, seed=5, image_folder=options["image_folder"], columns=options["columns"]
    )
    first = load_samples(
        str(table), 3, image_folder=options["image_folder"], columns=options["columns"]
    )
    questions = [loaded.samples[0].question for loaded in (drawn, first)]
    assert provenance["first question"] == questions[0] != questions[1]
    (reason,) = report.left_out
    assert report.attention == [] and "from question 1 on: No text comes after" in reason
    assert diagnosis.summary() == [
        *diagnosis.verdict,
        reason,
        f"Report: {tmp_path / 'out' / 'report.html'}",
    ]
    *_, claims = diagnosis.renderable().renderables
    cells = zip(*(column.cells for column in claims.columns), strict=True)
    assert list(cells) == [(each.claim, each.outcome, each.sentence) for each in diagnosis.findings]
    assert {path.name for path in (tmp_path / "out").iterdir()} == listed(stored(tmp_path / "out"))
    with pytest.raises(ValueError, match="dtype must be one of"):
        diagnose(str(model), data=str(table), dtype="float8")
    (model / DYNAMICS).write_text('{"step": 1}')
    with pytest.raises(ValueError, match=f"{DYNAMICS} is not as training writes it"):
        diagnose(str(model), data=str(table), output=tmp_path / "out", **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU computes in float16")
def test_products_of_emulated_float16_are_in_bfloat16(root, tmp_path, processor, monkeypatch):
    processor(0.3, float16=5.0)
    model = str(root / "half")
    options = dict(data=str(root / "images"), samples=4)
    half = LlavaForConditionalGeneration.from_pretrained(root / "llava", dtype=torch.float16)
    half.save_pretrained(model)
    AutoProcessor.from_pretrained(root / "llava").save_pretrained(model)
    monkeypatch.setattr(run, "QUESTIONS", 3)
    exact = diagnose(model, output=tmp_path / "exact", dtype="float32", **options).report
    assert len(exact.attention) == 3 and exact.dtype == "float32"
    monkeypatch.setattr(precision, "free_memory", lambda: 0)
    cast = diagnose(model, output=tmp_path / "cast", **options).report
    assert cast.dtype == "float16, products in bfloat16"
    asked = measured(model, root / "images", tmp_path / "image", dtype="float16")
    assert asked.dtype == "float16"  # by name, and so as it is
    assert cast.interface.ratio == pytest.approx(exact.interface.ratio, rel=0.02)
    assert cast.depth.asymmetry == pytest.approx(exact.depth.asymmetry, rel=0.02)


def test_docs_name_keys_and_kinds_and_their_example_runs(compared, root, monkeypatch, capsys):
    docs = (ROOT / "docs" / "report.md").read_text(encoding="utf-8")
    sections = re.split(r"^## ", docs, flags=re.MULTILINE)
    keys, kinds = (re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) for section in sections[1:])
    assert keys == list(stored(compared[0].folder)) and tuple(kinds) == report.KINDS
    (example,) = re.findall(r"```python\n(.+?)```", docs, re.DOTALL)
    monkeypatch.chdir(root / "ours")
    exec(compile(example, "report.md", "exec"), {})
    ratio = compared[0].against.interface.ratio
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == f"other model: visual tokens enter at {ratio:.3g} x the norm of text"
    assert len(printed) == 6 and printed[5].startswith("  layer 2: they rotate ")
