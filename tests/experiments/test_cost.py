"""What a plan costs, as it is added up and printed."""

from types import SimpleNamespace

import cost
import pytest
import yaml
from cost import StageCost, memory_on, print_cost, run_cost
from plan import read_plan

from normalign_llava.train.memory import MemoryEstimate
from normalign_llava.train.modules.sizes import BATCHES, GRADIENTS


PLAN = {
    "stage1": {"recipe": "quickstart-align"},
    "stage2": {"recipe": "quickstart-tune"},
    "tasks": ["pope"],
    "optional": ["never"],
    "rows": {"stage1": {"rows": 9, "text": 5, "longest": 9}},
    "downloads": {"some/model": 6.5, "some/data": 2},
    "groups": {
        "one": {
            "question": "?",
            "seeds": [1, 2],
            "variants": {
                **{"none": {"arm": "none"}, "gwc": None},
                **{"long": {"stage1": {"max_steps": 9}}, "never": None},
            },
        },
        "two": {"question": "?", "seeds": [3], "variants": {"gwc": None}},
    },
}
PLAN["rows"]["stage2"] = PLAN["rows"]["stage1"]
OPTIONS = {"only": [], "gpus": 2, "device_memory": "3GB", "tflops": 1.0, "mfu": 0.5}


def test_memory_on_several_devices():
    parts = {BATCHES: 800, GRADIENTS: 400, "weights": 1200}
    static = {"weights": 1200, "optimizer": 2000, GRADIENTS: 100}
    known = {"estimate": MemoryEstimate(parts, "", "", 9999), "static": static}
    for sharded in (False, True):
        assert memory_on(1, **known, sharded=sharded) == 2400
    assert memory_on(4, **known, sharded=False) == 2400 - 600 + 400
    assert memory_on(2, **known, sharded=True) == 2400 - 400 - (3200 + 400) / 2


def read(tmp_path, **changes):
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(PLAN | changes, sort_keys=False))
    return read_plan(tmp_path / "plan.yaml")


def test_the_price_of_a_plan_is_the_sum_of_its_runs(tmp_path, monkeypatch, capsys):
    """An hour is 1.8e15 operations here, at half of 1e12 a second."""
    asked = []

    def run_cost(plan, run, device_memory):
        asked.append((run.cell, device_memory))
        longer, disk = (3, 30e9) if run.name == "long" else (1, 3e9)
        size = 4e9 if run.group == "one" else 1e12
        first = StageCost(10, 1e3, 1.8e15 * longer, lambda gpus: size / gpus, 1e9, disk)
        second = StageCost(20, 2e3, 3.6e15, lambda gpus: 5e8, 2e9, 5e9)
        return {"stage1": first, "stage2": second}, 5e8

    monkeypatch.setattr(cost, "run_cost", run_cost)
    print_cost(read(tmp_path), SimpleNamespace(**OPTIONS))
    said = capsys.readouterr().out
    assert asked == [("one/none/1", "3GB"), ("one/long/1", "3GB"), ("two/gwc/3", "3GB")]
    lines = [line.strip("| ").split(" | ") for line in said.splitlines() if line.startswith("| ")]
    rows = {name: cells for name, *cells in lines[1:]}
    # Runs, steps, tokens, operations; hours of one GPU and of two; a step's memory; disk.
    assert rows["one, stage1"] == [
        *("1", "10", "1e+03", "1.8e+15", "1", "0.5"),
        *("1.9 GiB, does not fit; on 4 GPUs", "3.0"),
    ]
    assert rows["one, stage2"][-2:] == ["0.5 GiB, fits", "5.0"]
    assert rows["one, all"][:6] == ["4", "120", "1.2e+04", "2.16e+16", "12", "6"]
    assert rows["one, all"][-1] == "14.0"  # of each: untrained 0.5, the results 1 and 2
    assert rows["one/long, all"][:6] == ["2", "60", "6e+03", "1.8e+16", "10", "5"]
    assert "on more than 64 GPUs" in rows["two, stage1"][-2]
    assert rows["the plan"][:6] == ["7", "210", "2.1e+04", "4.5e+16", "25", "12.5"]
    # The last long run has checkpoints, 30 and 5 with its results, beside what five others keep.
    assert rows["the plan"][-1] == f"{5 * 3.5 + 0.5 + 30 + 5:.1f}"
    assert "Downloads: 8.5 GB: some/model 6.5 GB, some/data 2 GB." in said
    assert "50% of 1 TFLOP/s" in said
    print_cost(read(tmp_path, downloads={}), SimpleNamespace(**{**OPTIONS, "only": ["two"]}))
    said = capsys.readouterr().out
    assert "Downloads: none." in said and "one," not in said
    with pytest.raises(ValueError, match="plan does not say how many rows"):
        print_cost(read(tmp_path, rows={"stage1": {}}), SimpleNamespace(**OPTIONS))


@pytest.mark.slow
def test_what_a_run_takes_is_counted_by_dry_runs_of_its_stages(tmp_path):
    """An image is 16 tokens here. Nine rows in batches of four are three steps."""
    shared = {"global_batch_size": 4, "per_device_train_batch_size": 2, "image_folder": "gone"}
    changes = {
        "stage1": {"recipe": "quickstart-align", **shared, "max_steps": 5, "save_steps": 5},
        "stage2": {"recipe": "quickstart-tune", **shared, "max_steps": -1, "num_train_epochs": 1},
        "rows": {name: {"rows": 9, "text": 50, "longest": 60} for name in ("stage1", "stage2")},
        "groups": {
            "one": {"question": "?", "shape": "tiny", "seeds": [1], "variants": {"gwc": None}}
        },
    }
    changes["rows"]["stage2"]["images"] = 2
    plan = read(tmp_path, **changes, accelerate={"stage2": "fsdp2"})
    costs, untrained = run_cost(plan, plan.runs()[0], "80GB")
    align = costs["stage1"]
    tune = costs["stage2"]
    assert (align.steps, tune.steps) == (5, 3)
    assert (align.tokens, tune.tokens) == (5 * 4 * (16 + 50), 3 * 4 * (2 * 16 + 50))
    assert align.kept < untrained < tune.kept  # with the model that the adapter is merged into
    # A sharded checkpoint has the whole model's weights beside the states.
    assert align.disk - align.kept < untrained < tune.disk - tune.kept
    assert align.memory(2) > align.memory(1)  # with buffers of gradients
    assert tune.memory(4) < tune.memory(1) - untrained
