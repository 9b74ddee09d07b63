"""What was forgotten in training: which checkpoint before it is meant, and when it is said."""

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from normalign_llava.checkpoint.names import TRAINING_RECORD
from normalign_llava.evaluate.forgetting import forgotten, with_before
from normalign_llava.evaluate.results import Evaluation, Metric, read_evaluations
from normalign_llava.evaluate.run import evaluate, render


def evaluated(folder, bits, record=None, samples=32):
    folder.mkdir()
    result = Evaluation("offline_perplexity", "texts", [Metric("bits_per_byte", bits)], samples, 32, [])
    result.write(folder)
    if record:
        (folder / TRAINING_RECORD).write_text(json.dumps(record))
    return result


def stage(name, before=None):
    return {"options": {"model_name_or_path": name}, "before": before}


def test_the_checkpoint_before_the_first_stage_counts(tmp_path):
    align = stage("base")
    evaluated(tmp_path / "base", 1.0)
    evaluated(tmp_path / "align", 1.1, align)
    result = evaluated(tmp_path / "model", 1.2, stage("align", align))

    def before():
        return with_before(result, tmp_path / "model").metrics[0].references.get("before training")

    assert before() == 1.0
    (tmp_path / "base" / TRAINING_RECORD).write_text("{}")  # another checkpoint of that name
    assert before() == 1.1
    shutil.rmtree(tmp_path / "align")
    evaluated(tmp_path / "align", 1.1, align, samples=3)  # a part of the text
    assert before() is None


@pytest.mark.parametrize(("bits", "said"), [(1.09, None), (1.11, "from 1.00 to 1.11, by 11%"), (0.5, None)])
def test_a_rise_by_more_than_a_tenth_is_said(bits, said):
    metric = Metric("bits_per_byte", bits, references={"before training": 1.0})
    found = forgotten([Evaluation("offline_perplexity", "texts", [metric], 32, 32, [])])
    assert found == (said and f"It forgot text in training: bits per byte of a speech rose {said}.")


@pytest.mark.slow
def test_a_trained_checkpoint_is_held_against_its_base(archives, checkpoint, tmp_path):
    base, model = (shutil.copytree(checkpoint, tmp_path / name) for name in ("base", "model"))
    weights = load_file(model / "model.safetensors")
    weights |= {name: 5 * weight for name, weight in weights.items() if name.endswith("language_model.norm.weight")}
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    (model / TRAINING_RECORD).write_text(json.dumps(stage("base")))

    def run(folder):
        return evaluate(str(folder), tasks=["offline_perplexity"], limit=1)

    (note,) = run(model).notes
    assert "is not known. Evaluate base, from which it was trained, on offline_perplexity" in note
    before = run(base).results[0].metrics[0].value
    done = run(model)  # which was evaluated already
    (bits, _) = done.results[0].metrics
    assert read_evaluations(model) == done.results and bits.references == {"before training": before}
    assert f"rose from {before:.2f} to {bits.value:.2f}" in done.notes[0] and bits.value > before
    assert "before training" in [column.header for column in render(done).columns]
