"""A whole diagnosis, from checkpoints and images on disk to the folder that it writes; and docs/report.md."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import asdict
from importlib.metadata import version

import pytest
import tiny
import torch
import training
from paths import ROOT
from transformers import AutoProcessor, LlavaForConditionalGeneration
from typer.testing import CliRunner

from normalign_llava.checkpoint import precision
from normalign_llava.checkpoint.files import DYNAMICS
from normalign_llava.cli import app
from normalign_llava.diagnose import report
from normalign_llava.diagnose.run import diagnose, read_dynamics


pytestmark = pytest.mark.slow


DOCS = (ROOT / "docs" / "report.md").read_text(encoding="utf-8")


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
    rows = [{"file_name": f"{number}.png", "question": f"is it {number * 5 % 7}?"} for number in range(8)]
    for number, row in enumerate(rows):
        (folder / row["file_name"]).write_bytes(training.image(number))
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def compared(root):
    """Ours, as training leaves it, against the baseline, in the default folder; and the model's files before."""
    model = root / "ours" / "model"
    steps = [{"step": step, "visual": [0.5 + step / 100, 0.9], "text": [0.4, 0.8]} for step in (0, 10)]
    (model / "dynamics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    before = hashes(model)
    return diagnose(str(model), against=str(root / "none" / "model"), data=str(root / "images"), samples=6), before


@pytest.fixture(scope="module")
def alone(root):
    return diagnose(str(root / "llava"), data=str(root / "images"), samples=2)


def hashes(folder):
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def stored(folder):
    return json.loads((folder / "report.json").read_text(encoding="utf-8"), parse_constant=pytest.fail)


def listed(content):
    """Names of all files that a report speaks of."""
    asked = [answer for model in (content["report"], content["against"]) if model for answer in model["attention"]]
    drawn = (figure["file"] for figure in content["figures"])
    return {"report.json", "report.html", *(answer["image"] for answer in asked if answer["image"]), *drawn}


def cli(*arguments):
    result = CliRunner().invoke(app, ["diagnose", *map(str, arguments)], env={"COLUMNS": "1000"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def test_the_report_holds_what_the_api_returned(compared):
    diagnosis, content = compared[0], stored(compared[0].folder)
    assert content["schema_version"] == report.SCHEMA_VERSION == 1
    finite = json.loads(json.dumps(asdict(diagnosis), default=str), parse_constant=lambda constant: None)
    assert finite.pop("folder") == str(diagnosis.folder) and content == {**content, **finite}
    assert content["provenance"]["first question"] == diagnosis.report.attention[0].question
    assert content["provenance"]["torch"] == version("torch") and content["provenance"]["samples asked for"] == "6"

    ours, none = diagnosis.report, diagnosis.against
    assert (ours.norm, none.norm, ours.samples, none.samples) == ("layer_norm", "none", 6, 6)
    assert ours.data == none.data == "images" and ours.tokens == none.tokens and ours.tokens["visual"] == 24
    assert ours.interface.ratio == pytest.approx(1, abs=1e-4) and none.interface.ratio > 10
    assert ours.gain.distance == pytest.approx(0, abs=1e-6) and none.gain is None
    questions = [answer.question for answer in ours.attention]
    assert questions == [answer.question for answer in none.attention] and len(questions) == 6
    assert [bool(answer.maps and answer.image) for answer in ours.attention] == [True] * 4 + [False] * 2  # drawn
    assert ours.left_out == none.left_out == []
    assert [step["visual"] for step in content["report"]["dynamics"]] == [[0.5, 0.9], [0.6, 0.9]]
    decode = AutoProcessor.from_pretrained(diagnosis.folder.parent).tokenizer.decode
    assert all(row.text == decode([row.id]) for row in ours.embeddings.top)


def test_every_file_is_listed_the_model_as_it_was_and_nobody_named(compared, alone, root):
    for diagnosis in (compared[0], alone):
        assert {path.name for path in diagnosis.folder.iterdir()} == listed(stored(diagnosis.folder))
        for path in diagnosis.folder.iterdir():
            assert root.name.encode() not in path.read_bytes(), path.name
        page = re.sub(r"base64,[^\"]*", "", (diagnosis.folder / "report.html").read_text(encoding="utf-8"))
        for text in (page, (diagnosis.folder / "report.json").read_text(encoding="utf-8")):
            assert not re.search(r"(^|[\s\"'(=])(/|~/|file:)(tmp|home|root|Users|var|work)\b", text)
    diagnosis, before = compared
    names = {f"{kind}_{number}.png" for kind in ("attention", "image", "baseline_image") for number in (1, 4)}
    names |= {f"{name}.png" for name in ("interface", "norms", "cosine", "rotation", "dynamics")}
    assert names <= listed(stored(diagnosis.folder))
    after = hashes(diagnosis.folder.parent)
    assert {name: value for name, value in after.items() if not name.startswith("diagnostics/")} == before


COMMAND = """
import sys
from normalign_llava.cli import app
app(sys.argv[1:], standalone_mode=False)
print("TRL" if "trl" in sys.modules else "no TRL", "was imported")
"""


def test_the_command_in_another_process_writes_the_same_bytes_without_trl(alone, root, tmp_path):
    """Nothing depends on the process, on the order of a set, or on where the report goes."""
    arguments = [root / "llava", "--data", root / "images", "--samples", 2, "--output", tmp_path / "a" / "b"]
    result = subprocess.run(
        [sys.executable, "-c", COMMAND, "diagnose", *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "1000", "PYTHONHASHSEED": "7"},
    )
    assert result.returncode == 0, result.stderr
    assert all(sentence in result.stdout for sentence in alone.verdict)
    assert result.stdout.endswith(f"Report: {tmp_path / 'a' / 'b' / 'report.html'}\nno TRL was imported\n")
    assert (tmp_path / "a/b/report.json").read_bytes() == (alone.folder / "report.json").read_bytes()
    assert {path.name for path in tmp_path.rglob("*")} == {"a", "b", *listed(stored(alone.folder))}


def test_another_run_replaces_the_first_whole_and_a_failing_one_leaves_it(alone, root, tmp_path):
    folder, bad = tmp_path / "diagnostics", tmp_path / "bad"
    shutil.copytree(alone.folder, folder)
    first = hashes(folder)
    images(bad)
    (bad / "3.png").write_bytes(b"no image")
    failing = cli(root / "llava", "--data", bad, "--output", folder)
    assert failing.exit_code == 1 and "3.png" in failing.output
    assert hashes(folder) == first and {path.name for path in tmp_path.iterdir()} == {"diagnostics", "bad"}

    result = cli(root / "llava", "--data", root / "images", "--samples", 1, "--output", folder)
    assert result.exit_code == 0, result.output
    content = stored(folder)
    assert content["report"]["samples"] == 1 and {path.name for path in folder.iterdir()} == listed(content)
    assert "attention_2.png" in first.keys() - listed(content)


def test_what_cannot_be_diagnosed_is_refused_before_weights_are_read(alone, root, tmp_path):
    model, notes = tmp_path / "model", tmp_path / "notes"
    shutil.copytree(root / "llava", model, ignore=shutil.ignore_patterns("*.safetensors", "diagnostics"))
    shutil.copytree(alone.folder, notes)
    (notes / "thoughts.txt").write_text("mine")
    before = hashes(tmp_path)
    for source, output, words in (
        (model, notes, "holds thoughts.txt, which is not"),
        (model, model, "holds chat_template.jinja, which is not"),
        (root / "ours" / "language", tmp_path / "new", "`normalign gain "),
        (root / "ours" / "vision", tmp_path / "new", "Give a vision-language model"),
    ):
        result = cli(source, "--data", root / "images", "--output", output)
        assert result.exit_code == 1 and words in result.output, result.output
    assert hashes(tmp_path) == before
    (tmp_path / DYNAMICS).write_text('{"visual": 0.1}')
    with pytest.raises(ValueError, match=f"{DYNAMICS} is not as training writes it.*Remove it"):
        read_dynamics(tmp_path / DYNAMICS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs every checkpoint in its own precision")
def test_products_of_a_float16_that_is_emulated_are_in_bfloat16(root, tmp_path, processor, monkeypatch):
    processor(0.3, float16=5.0)
    model, options = str(root / "half"), dict(data=str(root / "images"), samples=4)
    LlavaForConditionalGeneration.from_pretrained(root / "llava", dtype=torch.float16).save_pretrained(model)
    AutoProcessor.from_pretrained(root / "llava").save_pretrained(model)
    exact = diagnose(model, output=tmp_path / "exact", dtype="float32", **options).report
    monkeypatch.setattr(precision, "free_memory", lambda: 0)
    cast = diagnose(model, output=tmp_path / "cast", **options).report
    assert cast.dtype == "float16, products in bfloat16"
    assert cast.interface.ratio == pytest.approx(exact.interface.ratio, rel=0.02)
    assert cast.depth.asymmetry == pytest.approx(exact.depth.asymmetry, rel=0.02)


def test_the_documentation_names_keys_and_kinds_of_token_and_its_example_runs(compared, root, monkeypatch, capsys):
    sections = re.split(r"^## ", DOCS, flags=re.MULTILINE)
    keys, kinds = (re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) for section in sections[1:])
    assert keys == list(stored(compared[0].folder)) and tuple(kinds) == report.KINDS
    (example,) = re.findall(r"```python\n(.+?)```", DOCS, re.DOTALL)
    monkeypatch.chdir(root / "ours")
    exec(compile(example, "report.md", "exec"), {})
    ratio, printed = compared[0].against.interface.ratio, capsys.readouterr().out.splitlines()
    assert printed[0] == f"other model: visual tokens enter at {ratio:.3g} x the norm of text"
    assert len(printed) == 6 and printed[5].startswith("  layer 2: they rotate ")
