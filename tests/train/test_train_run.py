import json
import shlex

import numpy as np
import pytest
import torch
import train_data
import training
from typer.testing import CliRunner

from normalign_llava import NormAlignLlavaForConditionalGeneration
from normalign_llava.assembly.arms import arm_of
from normalign_llava.cli import app
from normalign_llava.data.sources import table
from normalign_llava.train.run import main


pytestmark = pytest.mark.slow


def test_what_is_trained_is_shown_first_and_kept_beside_the_checkpoint(tmp_path, parts, capsys):
    output = main([training.recipe(tmp_path, parts, stage="align"), "--seed", "5"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "4 rows = 2 per device x 1 process(es) x 2 accumulation step(s)" in shown
    record = json.loads((output / "training.json").read_text())
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(output)
    linears = sum(p.numel() for n, p in model.named_parameters() if "projector.linear" in n)
    assert {row["module"]: (row["trained"], row["learning_rate"]) for row in record["run"]["modules"]} == {
        "vision tower": (0, 0), "projector": (linears, 1e-3), "norm": (64, 1e-3), "language model": (0, 0)
    }  # fmt: skip
    assert record["run"]["disk"]["checkpoints"] == 2
    assert (record["options"]["seed"], record["options"]["warmup_steps"]) == (5, 0.03)
    assert (record["stage"], record["arm"], record["quantization"]) == ("align", "gwc", None)
    assert str(tmp_path) not in json.dumps(record) and str(parts) not in json.dumps(record)


def test_a_checkpoint_of_the_hub_is_asked_for_once(hub, prepared, tmp_path, parts):
    hub.serve("bea/base", parts / "model")
    file = training.recipe(tmp_path, parts, model_name_or_path="bea/base", max_steps=1)
    hub.requests.clear()
    done = prepared.run(["-m", "normalign_llava", "train", file])
    assert done.returncode == 0, done.stderr
    asked = [request for request in hub.requests if request.startswith("GET /api/models/bea/base/rev")]
    assert asked == ["GET /api/models/bea/base/revision/main"]


def test_the_commands_named_next_lead_from_parts_to_report(tmp_path, parts, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = ["--max_steps", "1", "--global_batch_size", "2", "--bf16", "false"]
    words = ["build", "--vision", str(parts / "vision"), "--language", str(parts / "language"), "--output", "a model"]
    ran = []
    for extra in ([], rows, [*rows, "--use_peft"], []):
        done = CliRunner().invoke(app, [*words, *extra])
        assert done.exit_code == 0, done.output
        ran.append(words[0])
        line = done.output.strip().splitlines()[-1].removeprefix("Next: ")
        command, *words = shlex.split(line.replace("DATA", str(parts / "data" / "data.json")))
        assert command == "normalign"
    assert ran == ["build", "train", "train", "merge"] and words == ["diagnose", "a model-align-tune-merged"]
    assert (tmp_path / words[1] / "config.json").is_file()


def test_an_untrained_checkpoint_can_be_trained_as_another_arm_and_a_trained_one_keeps_its_gain(tmp_path, parts):
    def gain(name, checkpoint, *words, **options):
        file = training.recipe(tmp_path, parts, model_name_or_path=str(checkpoint), **options)
        model = NormAlignLlavaForConditionalGeneration.from_pretrained(
            main([file, "--output_dir", str(tmp_path / name), *words])
        )
        assert "arm" not in options or arm_of(model.config) == options["arm"]
        return model.model.multi_modal_projector.norm.weight, model.config.text_embedding_norm / 32**0.5

    still = dict(learning_rate=0.0, vision_learning_rate=1e-9)  # a rate that moves nothing in float32
    untrained = training.checkpoint(tmp_path, arm="none")
    assert torch.equal(gain("unit", untrained, arm="unit", **still)[0], torch.ones(32))
    found, ratio = gain("gwc", untrained, arm="gwc", **still)
    torch.testing.assert_close(found, torch.full((32,), ratio))
    trained, _ = gain("trained", parts / "model")
    with pytest.raises(ValueError, match="was trained as arm 'gwc'; arm 'unit' would discard its gain"):
        gain("again", tmp_path / "trained", arm="unit")
    assert torch.equal(gain("again", tmp_path / "trained", arm="aligned", **still)[0], trained)


def test_a_bad_image_met_in_training_stops_or_is_listed(tmp_path, parts, capsys, monkeypatch):
    """Images of 8 of 16 rows alone are opened first, as long as they can tell enough."""
    monkeypatch.setattr(table, "MANY_ROWS", 8)
    unopened = sorted({*range(16)} - {*np.random.default_rng(0).choice(16, 8, replace=False)})
    data, bad, folders = tmp_path / "data" / "data.json", unopened[0], []

    def run(cut, *words):
        images = ["cut.png" if number in cut else "red.png" for number in range(16)]
        train_data.write_json(data.parent, [train_data.llava("<image>\nwhat?", "red", image) for image in images])
        (data.parent / "cut.png").write_bytes(train_data.image_bytes()[:60])
        folders.append(tmp_path / str(len(folders)))
        return main([file, "--output_dir", str(folders[-1]), "--bad_rows", *words])

    file = training.recipe(tmp_path, parts, dataset_name=str(data), max_steps=4)
    with pytest.raises(ValueError, match=f"Rows that cannot be trained on:\n.*row {bad}: .*cut.png"):
        run({bad}, "stop")
    for more in ([], ["--dataloader_num_workers", "2"]):
        with pytest.raises(ValueError, match=r"skipped as many rows before as it may:\n.*truncated"):
            run(unopened[:5], "0.3", *more)
    capsys.readouterr()
    run({bad}, "0.3")
    shown = " ".join(capsys.readouterr().out.split())
    assert "1 row was dropped, listed in" in shown and f"row {bad}: " in shown
    output = run({bad}, "skip", "--check_images", "--dataset_name", f"{data.parent}:train")
    record = json.loads((output / "training.json").read_text())
    assert record["data"][0]["dropped"] == [bad] and record["options"]["dataset_name"] == "data:train"
    assert str(tmp_path) not in json.dumps(record)
