"""What a plan costs, as it is added up and printed."""

from types import SimpleNamespace

import cost
import pytest
import yaml
from cost import StageCost, memory_on, print_cost, run_cost
from plan import read_plan

from normalign_llava.train.memory import MemoryEstimate
from normalign_llava.train.modules.sizes import BATCHES, GRADIENTS


STAGE_ROWS = {
    "rows": 9,
    "text": 5,
    "longest": 9,
}
PLAN = {
    "stage1": {"recipe": "quickstart-align"},
    "stage2": {"recipe": "quickstart-tune"},
    "tasks": ["pope"],
    "optional": ["never"],
    "rows": {
        "stage1": STAGE_ROWS,
        "stage2": STAGE_ROWS,
    },
    "downloads": {
        "some/model": 6.5,
        "some/data": 2,
    },
    "groups": {
        "one": {
            "question": "?",
            "seeds": [1, 2],
            "variants": {
                "none": {"arm": "none"},
                "gwc": None,
                "long": {"stage1": {"max_steps": 9}},
                "never": None,
            },
        },
        "two": {
            "question": "?",
            "seeds": [3],
            "variants": {"gwc": None},
        },
    },
}


def write_plan(folder, **changes):
    plan_path = folder / "plan.yaml"
    plan_path.write_text(yaml.safe_dump(PLAN | changes, sort_keys=False))
    return read_plan(plan_path)


@pytest.mark.parametrize(
    ("device_count", "sharded", "expected"),
    [
        (1, False, 2400),
        (1, True, 2400),
        (4, False, 2400 - 600 + 400),
        (2, True, 2400 - 400 - (3200 + 400) / 2),
    ],
)
def test_memory_on_several_devices(device_count, sharded, expected):
    parts = {
        BATCHES: 800,
        GRADIENTS: 400,
        "weights": 1200,
    }
    static = {
        "weights": 1200,
        "optimizer": 2000,
        GRADIENTS: 100,
    }
    estimate = MemoryEstimate(parts, "", "", 9999)
    memory = memory_on(device_count, estimate=estimate, static=static, sharded=sharded)
    assert memory == expected


def cost_of_run(run):
    """Returns the cost of a run's stages and the bytes of its untrained model."""
    hours = 1
    disk_bytes = 3e9
    if run.name == "long":
        hours = 3
        disk_bytes = 30e9

    memory_bytes = 1e12
    if run.group == "one":
        memory_bytes = 4e9

    first_cost = StageCost(
        10,
        1e3,
        1.8e15 * hours,
        lambda gpus: memory_bytes / gpus,
        1e9,
        disk_bytes,
    )
    second_cost = StageCost(
        20,
        2e3,
        3.6e15,
        lambda gpus: 5e8,
        2e9,
        5e9,
    )
    return {"stage1": first_cost, "stage2": second_cost}, 5e8


@pytest.fixture
def asked_runs(monkeypatch):
    """The runs whose cost is asked for, in place of dry runs."""
    asked = []

    def known_cost(plan, run, device_memory):
        asked.append((run.cell, device_memory))
        return cost_of_run(run)

    monkeypatch.setattr(cost, "run_cost", known_cost)
    return asked


@pytest.fixture
def print_plan(tmp_path, asked_runs, capsys):
    """Returns what is printed of a plan.

    At half of 1e12 operations a second, 1.8e15 operations take an hour.
    """

    def print_changed_plan(only=(), **changes):
        options = SimpleNamespace(
            only=list(only),
            gpus=2,
            device_memory="3GB",
            tflops=1.0,
            mfu=0.5,
        )
        print_cost(write_plan(tmp_path, **changes), options)
        return capsys.readouterr().out

    return print_changed_plan


@pytest.fixture
def cost_table(print_plan):
    """The cells of each row of the printed table by its name.

    They are runs, steps, tokens, operations, hours of one GPU and of two, a step's memory, disk.
    """
    cells_by_name = {}
    for line in print_plan().splitlines():
        if line.startswith("| "):
            name, *cells = line.strip("| ").split(" | ")
            cells_by_name[name] = cells
    return cells_by_name


def test_the_cost_of_runs_that_differ_in_their_arm_is_asked_once(print_plan, asked_runs):
    print_plan()
    assert asked_runs == [
        ("one/none/1", "3GB"),
        ("one/long/1", "3GB"),
        ("two/gwc/3", "3GB"),
    ]


def test_the_price_of_a_stage(cost_table):
    assert cost_table["one, stage1"] == [
        "1",
        "10",
        "1e+03",
        "1.8e+15",
        "1",
        "0.5",
        "1.9 GiB, does not fit; on 4 GPUs",
        "3.0",
    ]
    assert cost_table["one, stage2"][-2:] == ["0.5 GiB, fits", "5.0"]
    assert "on more than 64 GPUs" in cost_table["two, stage1"][-2]


def test_the_price_of_a_group_is_the_sum_of_its_runs(cost_table):
    assert cost_table["one, all"][:6] == ["4", "120", "1.2e+04", "2.16e+16", "12", "6"]
    # Each keeps the untrained model, 0.5, and the results, 1 and 2.
    assert cost_table["one, all"][-1] == "14.0"
    assert cost_table["one/long, all"][:6] == ["2", "60", "6e+03", "1.8e+16", "10", "5"]


def test_the_price_of_a_plan_is_the_sum_of_its_runs(cost_table):
    assert cost_table["the plan"][:6] == ["7", "210", "2.1e+04", "4.5e+16", "25", "12.5"]
    # The last long run has checkpoints, 30 and 5 with its results, beside what five others keep.
    assert cost_table["the plan"][-1] == f"{5 * 3.5 + 0.5 + 30 + 5:.1f}"


def test_downloads_and_speed_are_printed(print_plan):
    printed = print_plan()
    assert "Downloads: 8.5 GB: some/model 6.5 GB, some/data 2 GB." in printed
    assert "50% of 1 TFLOP/s" in printed


def test_runs_that_are_not_asked_for_are_not_printed(print_plan):
    printed = print_plan(only=["two"], downloads={})
    assert "Downloads: none." in printed
    assert "one," not in printed


def test_the_price_of_a_plan_without_a_count_of_rows_is_refused(print_plan):
    with pytest.raises(ValueError, match="plan does not say how many rows"):
        print_plan(rows={"stage1": {}})


TINY_ROWS = {
    "rows": 9,
    "text": 50,
    "longest": 60,
}
TINY_STEPS = {
    "global_batch_size": 4,
    "per_device_train_batch_size": 2,
    "image_folder": "gone",
}


@pytest.mark.slow
def test_what_a_run_takes_is_counted_by_dry_runs_of_its_stages(tmp_path):
    """An image is 16 tokens here. Nine rows in batches of four are three steps."""
    plan = write_plan(
        tmp_path,
        stage1={
            **TINY_STEPS,
            "recipe": "quickstart-align",
            "max_steps": 5,
            "save_steps": 5,
        },
        stage2={
            **TINY_STEPS,
            "recipe": "quickstart-tune",
            "max_steps": -1,
            "num_train_epochs": 1,
        },
        rows={
            "stage1": TINY_ROWS,
            "stage2": {**TINY_ROWS, "images": 2},
        },
        groups={
            "one": {
                "question": "?",
                "shape": "tiny",
                "seeds": [1],
                "variants": {"gwc": None},
            },
        },
        accelerate={"stage2": "fsdp2"},
    )
    costs, untrained_bytes = run_cost(plan, plan.runs()[0], "80GB")
    align = costs["stage1"]
    tune = costs["stage2"]
    assert align.steps == 5
    assert tune.steps == 3
    assert align.tokens == 5 * 4 * (16 + 50)
    assert tune.tokens == 3 * 4 * (2 * 16 + 50)

    assert align.kept < untrained_bytes
    assert untrained_bytes < tune.kept  # with the model that the adapter is merged into
    # A sharded checkpoint has the whole model's weights beside the states.
    assert align.disk - align.kept < untrained_bytes
    assert untrained_bytes < tune.disk - tune.kept

    assert align.memory(2) > align.memory(1)  # with buffers of gradients
    assert tune.memory(4) < tune.memory(1) - untrained_bytes
