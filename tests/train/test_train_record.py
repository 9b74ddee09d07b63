# SPDX-License-Identifier: Apache-2.0
"""What a run tells of itself, of the disk and of rows; and what of a record must stay the same."""

import copy
import json
import platform
import subprocess
import sys
from dataclasses import dataclass, field
from enum import Enum
from importlib.metadata import version
from types import SimpleNamespace

import pytest
import tiny
import torch
import training
from accelerate import Accelerator, DistributedType, PartialState
from accelerate.state import AcceleratorState
from peft import LoraConfig, LoraRuntimeConfig, get_peft_model
from transformers.trainer_pt_utils import AcceleratorConfig

from normalign_llava.data.rows.checks import DataReport, SourceReport
from normalign_llava.data.rows.parse import DroppedRow, DroppedRows
from normalign_llava.train.keeping import disk, record, summary
from normalign_llava.train.keeping.same_run import check_resumed
from normalign_llava.train.loading import LoadedModel
from normalign_llava.train.prepare import CheckedData, OpenedModel, Plan
from normalign_llava.train.settings import Precision


MIB = 2**20
GIB = 2**30
LANGUAGE = r".*language_model.*q_proj"


@pytest.mark.parametrize(
    ("size", "read"),
    [
        (0, "0.0 MiB"),
        (3 * MIB // 2, "1.5 MiB"),
        (2**27 - 1, "128.0 MiB"),
        (2**27, "0.1 GiB"),
        (1536 * GIB, "1,536.0 GiB"),
    ],
)
def test_bytes_are_read_in_the_unit_that_suits_them(size, read):
    assert summary.gib(size) == read


def test_dropped_rows_are_counted_and_told_by_kind_of_reason(tmp_path):
    dropped = DroppedRows(tmp_path / "dropped_rows.jsonl")
    assert summary.read_dropped(dropped) == []
    dropped.add(DroppedRow("a.json", 3, "x.png", "x.png: is truncated"))
    said, line = summary.read_dropped(dropped)
    assert said.startswith("1 row ") and str(dropped.path) in said
    assert "a.json, row 3" in line
    for number in range(4, 15):
        dropped.add(DroppedRow("a.json", number, None, f"reason {chr(60 + number)}"))
    said, *lines = summary.read_dropped(dropped)
    assert said.startswith("12 rows ")
    assert len(lines) == 11 and "2 more" in lines[-1]


def git(folder, *words) -> str:
    settings = ["-c", "user.name=a", "-c", "user.email=a@b"]
    command = ["git", "-C", str(folder), *settings, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The root of a checkout in which this package's files are said to lie."""
    root = tmp_path / "checkout"
    (root / "train" / "keeping").mkdir(parents=True)
    file = root / "train" / "keeping" / "record.py"
    file.write_text("a = 1\n")
    monkeypatch.setattr(record, "__file__", str(file))
    return root


def test_the_commit_of_a_checkout_says_whether_files_were_changed(installed, monkeypatch):
    git(installed, "init", "-q")
    git(installed, "add", ".")
    git(installed, "commit", "-q", "-m", "a")
    git(installed, "tag", "v1")  # names of tags are no commits
    head = git(installed, "rev-parse", "HEAD")
    monkeypatch.chdir(installed.parent)
    assert record.code_commit() == head
    (installed / "train" / "keeping" / "record.py").write_text("a = 2\n")
    assert record.code_commit() == f"{head}-dirty"
    (installed / ".git").rename(installed.parent / ".git")  # of what the package is copied into
    assert git(installed, "rev-parse", "HEAD") == head
    assert head not in (record.code_commit() or "")


@pytest.mark.parametrize(
    ("content", "commit"),
    [
        (json.dumps({"url": "https://a", "vcs_info": {"commit_id": "d" * 40}}), "d" * 40),
        (json.dumps({"url": "file:///a", "dir_info": {}}), None),
        ("{", None),
        (None, None),
    ],
)
def test_without_a_checkout_the_commit_is_that_which_pip_installed(
    installed, tmp_path, monkeypatch, content, commit
):
    folder = tmp_path / "site" / "normalign_llava-9.9.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: normalign-llava\nVersion: 9.9\n")
    if content:
        (folder / "direct_url.json").write_text(content)
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert record.code_commit() == commit
    monkeypatch.setenv("PATH", str(tmp_path))  # where git is not installed
    assert record.code_commit() == commit
    monkeypatch.setattr(sys, "path", [])  # nor is this package
    assert record.code_commit() is None


@dataclass
class Options:
    """Options of each kind that a record tells apart."""

    required: str | None
    number: int = 5
    always: int = 3
    names: list[str] = field(default_factory=list)
    text: str | None = "a"
    empty: str | None = None
    switch: bool = False
    derived: int = field(default=0, init=False)


def test_a_record_has_what_was_changed_and_what_is_always_told(tmp_path):
    def changed(**own):
        return record._changed(Options(None, **own), {"always", "empty"})

    assert changed() == {"always": 3}
    assert changed(number=6, names=["b"]) == {"always": 3, "number": 6, "names": ["b"]}
    assert changed(text=None) == {"always": 3, "text": None}  # a default that was taken away
    assert changed(switch=True, empty="x") == {"always": 3, "switch": True, "empty": "x"}
    assert changed(text=object(), empty={}) == {"always": 3}  # what JSON cannot hold, or is empty
    options = Options(None, number=0)
    options.derived = 7
    assert record._changed(options, set()) == {"number": 0}


class Kind(Enum):
    PLAIN = "plain"


def test_no_local_path_is_in_a_record(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("data", "a:b"):
        (tmp_path / name).mkdir()
    folder = str(tmp_path / "data")
    values = {
        "path": folder,
        "split": f"{folder}:train:a",
        "colon": str(tmp_path / "a:b"),
        "kind": Kind.PLAIN,
        "list": (folder, "owner/name"),
        "set": set("bdace"),
        "object": object(),
        "truth": True,
        "number": 0.5,
        "hub": "owner/name:train",
    }
    assert record._plain(values) == {
        "path": "data",
        "split": "data:train:a",
        "colon": "a:b",
        "kind": "plain",
        "list": ["data", "owner/name"],
        "set": [*"abcde"],
        "object": None,
        "truth": True,
        "number": 0.5,
        "hub": "owner/name:train",
    }


def test_of_accelerator_and_adapters_a_record_has_what_is_not_the_default():
    compared = dict(even_batches=False, use_seedable_sampler=False)
    compared["gradient_accumulation_kwargs"] = {"sync_each_batch": True}
    changed = AcceleratorConfig(non_blocking=True, dispatch_batches=True, **compared)
    assert record._changes_of_accelerator(AcceleratorConfig()) == {}
    assert record._changes_of_accelerator(changed) == compared
    config = LoraConfig(r=4, target_modules=["v", "q"], base_model_name_or_path="/here/model")
    config.revision = "v2"
    config.peft_version = "0.1"
    config.runtime_config = LoraRuntimeConfig(ephemeral_gpu_offload=True)
    assert record._changes_of_adapters(config) == {"r": 4, "target_modules": ["q", "v"]}
    switched_off = LoraConfig(init_lora_weights=False)  # which is True by default
    assert record._changes_of_adapters(switched_off) == {"init_lora_weights": False}
    optimizer = (torch.optim.SGD, {"lr": 0.1})
    assert record._optimizer_record(optimizer) == {"class": "torch.optim.sgd.SGD", "lr": 0.1}


def test_a_record_has_options_that_decide_at_their_defaults_too_and_no_secret(
    tmp_path, monkeypatch
):
    told_elsewhere = dict(run_name="mine", hub_token="secret", learning_rate=0.5)
    told_elsewhere |= dict(resume_from_checkpoint="last", logging_nan_inf_filter=False)
    args = training.settings(tmp_path, stage="tune", **told_elsewhere)
    args.do_eval = True
    args.dataloader_pin_memory = not args.dataloader_pin_memory
    args.accelerator_config = AcceleratorConfig(even_batches=False)
    Accelerator(cpu=True)  # the options have made accelerate forget its state
    monkeypatch.setitem(PartialState._shared_state, "num_processes", 2)
    dropped = [DroppedRow("a.json", 3, "x.png", "is truncated")]
    report = DataReport([SourceReport("a.json", "train", dropped=dropped)])
    model = tiny.model()
    rates = {"norm": 1e-3}
    model.config.text_embedding_norm = 0.75
    opened = OpenedModel(model, None, model.config, None, None, None, None)
    data = CheckedData(None, None, None, report)
    float32 = Precision(bf16=False, fp16=False)
    plan = Plan(args, float32, rates, opened, data, optimizer=None)
    loading = LoadedModel(model, args, float32, commit="c" * 40, weights_in=[])
    others = (Options(None, number=6), Options(None, names=["b"]))
    made = record.training_record(plan, loading, others)
    options = made["options"]
    assert (options["number"], options["names"]) == (6, ["b"])  # of the data and of the model
    assert options["accelerator_config"] == {"even_batches": False}
    assert made["config_changes"] == {
        "projector_norm": "layer_norm",
        "projector_gain_init": "text_norm",
        "gradient_compensation": "global",
    }
    assert (made["model_revision"], made["text_embedding_norm"]) == ("c" * 40, 0.75)
    assert made["learning_rates"] == rates and made["processes"] == 2
    assert made["hardware"]["devices"] and made["hardware"]["count"] == 1
    packages = {"torch", "transformers", "trl", "peft", "accelerate"}
    assert {name: made["versions"][name] for name in packages} == {
        name: version(name) for name in packages
    }
    args.model_init_kwargs = {"dtype": "bfloat16", "attn_implementation": None, "revision": "b"}
    loaded = record.training_record(plan, loading)["options"]
    assert loaded["dtype"] == "bfloat16" and not {"attn_implementation", "revision"} & loaded.keys()
    for name in ("max_length", "num_train_epochs", "weight_decay", "global_batch_size"):
        assert options[name] == getattr(args, name)
    left_out = {"output_dir", "use_cpu", "disable_tqdm", "model_name_or_path", *told_elsewhere}
    assert not {*left_out, "do_eval", "dataloader_pin_memory"} & options.keys()
    assert made["data"][0]["dropped"] == [3]
    assert (made["before"], made["optimizer"], made["adapters"]) == (None, None, None)


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        ("processor\t: 0\nmodel name\t: Fast: 3 GHz\nflags\t: a\nmodel name\t: b\n", "Fast: 3 GHz"),
        ("processor\t: 0\nCPU part\t: 0xd0c\n", platform.machine()),  # as on ARM
        (None, platform.machine()),  # as on macOS
    ],
)
def test_a_processor_has_the_name_that_the_system_gives_it(tmp_path, monkeypatch, lines, named):
    file = tmp_path / "cpuinfo"
    if lines:
        file.write_text(lines)
    monkeypatch.setattr(record, "Path", lambda path: file)
    Accelerator(cpu=True)
    assert record.hardware(torch.device("cpu"))["devices"] == [named]


@pytest.fixture(scope="module")
def trainer(checkpoint, tmp_path_factory):
    """A trainer that trains everything, two passes a step."""
    options = dict(global_batch_size=4, warmup_steps=0.25, max_steps=8)
    return training.trainer(tmp_path_factory.mktemp("run"), checkpoint, **options)


@pytest.fixture
def used(trainer, tmp_path):
    """Counts the disk that a run with some options takes."""

    def count(steps=100, **options) -> dict:
        args = training.settings(tmp_path, max_steps=steps, **options)
        Accelerator(cpu=True)  # the options have made accelerate forget its state
        return disk.disk_use(trainer.model, args, steps, [])

    return count


@pytest.fixture
def weights(trainer) -> int:
    return sum(value.nbytes for value in trainer.model.parameters())


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        (dict(save_strategy="no"), 0),
        (dict(save_strategy="epoch", num_train_epochs=2.5), 3),
        (dict(save_strategy="steps", save_steps=30), 4),  # the last step is saved too
        (dict(save_strategy="steps", save_steps=0.1), 10),
        (dict(save_strategy="steps", save_steps=0.035), 25),  # after every fourth
        (dict(save_strategy="steps", save_steps=1), 100),
        (dict(save_strategy="steps", save_steps=0.1, save_total_limit=3), 4),
        (dict(save_strategy="steps", save_steps=30, save_total_limit=9), 4),
    ],
)
def test_as_many_checkpoints_count_as_are_there_at_a_time(used, weights, options, kept):
    size = weights + 2 * weights  # with AdamW's two moments
    total = kept * size + weights
    assert used(**options) == {"checkpoint": size, "checkpoints": kept, "total": total}


def test_the_best_checkpoint_stays_beside_the_newest_and_weights_may_be_all(used, weights):
    saves = dict(save_strategy="steps", save_steps=10)
    best = dict(eval_strategy="steps", eval_steps=10, load_best_model_at_end=True)
    counts = [used(save_total_limit=limit, **saves, **best)["checkpoints"] for limit in (1, 2)]
    assert counts == [3, 3]
    assert used(save_total_limit=1, **saves)["checkpoints"] == 2
    assert used(save_only_model=True, **saves)["checkpoint"] == weights


@pytest.mark.parametrize(
    ("kind", "stage", "whole", "adapters"),
    [
        ("NO", None, 12, 12),  # bytes of a parameter: the weight and AdamW's two moments
        ("MULTI_CPU", None, 12, 12),
        ("FSDP", None, 12, 16),  # adapters are saved once more with these states
        ("DEEPSPEED", 3, 16, 16),  # and here all that is trained
        ("DEEPSPEED", 2, 20, 20),  # which has a copy in float32
    ],
)
def test_a_checkpoint_has_the_states_of_all_processes(
    tmp_path, trainer, monkeypatch, kind, stage, whole, adapters
):
    args = training.settings(tmp_path, save_strategy="steps", save_steps=10)
    Accelerator(cpu=True)
    states = AcceleratorState._shared_state
    for shared in (states, PartialState._shared_state):
        monkeypatch.setitem(shared, "distributed_type", DistributedType[kind])
    plugin = SimpleNamespace(zero_stage=stage, selected=True)
    monkeypatch.setitem(states, "deepspeed_plugins", {"default": plugin})
    monkeypatch.setitem(PartialState._shared_state, "num_processes", 2)
    assert args.world_size == 2
    adapted = get_peft_model(tiny.model(), LoraConfig(r=2, target_modules=LANGUAGE))
    for model, size in ((trainer.model, whole), (adapted, adapters)):
        trained = sum(value.numel() for value in model.parameters() if value.requires_grad)
        assert disk.disk_use(model, args, 20, [])["checkpoint"] == size * trained


def shown(table) -> list[list[str]]:
    """The cells of a table's rows."""
    columns = [[str(cell) for cell in column.cells] for column in table.columns]
    return [list(cells) for cells in zip(*columns, strict=True)]


def facts() -> dict:
    data = dict(source="/far/away/a.json", split="train", found=1010, bad=11, too_long=0, used=987)
    data |= dict(images=1400, shortest=7, median=30.6, longest=2048, files={}, changed={})
    data["left_out"] = {"tools": 5}
    stream = dict.fromkeys(data, None) | dict(source="s", split="eval", left_out={}, changed={})
    stream["files"] = {"/far/one.parquet": 6, "/far/two.parquet": 4}
    names = ("module", "parameters", "trained", "dtypes", "learning_rate")
    norm = ("norm", 64, 64, ["float32"], 1e-3)
    tower = ("vision tower", 1500, 0, ["nf4", "bfloat16"], 0.0)
    rows = [dict(zip(names, values, strict=True)) for values in (tower, norm)]
    batch = dict(rows=256, per_device=2, processes=4, accumulation=32, packed=False)
    disk = dict(checkpoint=3 * GIB, checkpoints=2, total=7 * GIB)
    rest = dict(tokens_per_image=576, steps=2180, warmup_steps=66, autocast=None)
    rest |= dict(precision_because="bfloat16 is slow")
    return dict(modules=rows, data=[data, stream], batch=batch, disk=disk, **rest)


def test_the_summary_has_each_figure_in_its_column(tmp_path):
    about = {"stage": "align", "arm": "gwc", "options": {"seed": 3}}
    _, options, modules, data, *lines, run = (
        summary.RunSummary(about, facts(), tmp_path).renderable().renderables
    )
    assert shown(options) == [["stage", "align"], ["arm", "gwc"], ["seed", "3"]]
    assert shown(modules) == [
        ["vision tower", "1,500", "0", "nf4 + bfloat16", "frozen"],
        ["norm", "64", "64", "float32", "0.001"],
        ["all", "1,564", "64", "", ""],
    ]
    assert [column.header for column in data.columns[2:7]] == [
        *("rows", "bad", "too long", "used", "images")
    ]
    for table in (modules, data):
        sides = [column.justify for column in table.columns]
        assert sides == ["left"] + ["right"] * (len(sides) - 1)
    assert shown(data) == [
        ["a.json", "train", "1,010", "11", "0", "987", "1,400", "7 to 2,048 (31)"],
        ["s", "eval", "", "", "", "", "", "streamed"],
    ]
    assert [str(line).partition(",")[0] for line in lines] == ["a.json", "s"]
    assert "tools (5 rows)" in str(lines[0])
    assert "one.parquet (6 rows), two.parquet (4 rows)" in str(lines[1])
    cells = dict(shown(run))
    assert cells["Tokens per image"] == "576"
    batch = "256 rows = 2 per device x 4 process(es) x 32 accumulation step(s)"
    assert cells["Batch"] == batch
    assert cells["Steps"] == "2,180, 66 of them warm-up"
    assert cells["Autocast"] == "none (bfloat16 is slow)"
    assert cells["Disk"].startswith("7.0 GiB (2 checkpoint(s) of 3.0 GiB at a time); ")


def test_a_packed_batch_is_not_told_as_rows_of_a_pass(tmp_path):
    told = facts()
    told["batch"]["packed"] = True
    told |= dict(autocast="float16", precision_because="")
    run = (
        summary.RunSummary({"stage": None, "arm": None, "options": {}}, told, tmp_path)
        .renderable()
        .renderables[-1]
    )
    cells = dict(shown(run))
    packed = "256 rows packed into 4 process(es) x 32 accumulation step(s)"
    assert (cells["Batch"], cells["Autocast"]) == (packed, "float16")


def test_the_figures_of_a_summary_are_those_of_the_trainer(trainer):
    found = trainer.facts
    assert found["batch"] == {
        **{"rows": 4, "per_device": 2, "processes": 1, "accumulation": 2, "packed": False}
    }
    assert (found["tokens_per_image"], found["steps"], found["warmup_steps"]) == (4, 8, 2)
    assert (found["autocast"], found["precision_because"]) == (None, "")
    rows = training.rows()
    lengths = sorted(rows["length"])
    (data,) = found["data"]
    assert (data["shortest"], data["longest"]) == (lengths[0], lengths[-1])
    assert data["median"] == (lengths[7] + lengths[8]) / 2
    counts = [data[name] for name in ("found", "used", "images", "text_only", "dropped")]
    assert counts == [16, 16, 16, 0, 0]


TRAINED = dict(source="a.json", split="train", used=8, images=5, shortest=3, median=4, longest=9)
BEFORE = {
    "stage": "tune",
    "arm": "gwc",
    "quantization": None,
    "options": {"seed": 3, "logging_steps": 1, "packing": False},
    "learning_rates": {"norm": 1e-3, "vision": 0.0},
    "data": [TRAINED, {**TRAINED, "split": "eval", "used": 2}],
    "before": None,
    "optimizer": None,
    "adapters": None,
    "row_lengths": "ab",
    "sharding": "none",
    "seconds": 41.5,
}


def changed(path: str, value) -> dict:
    """The record with one value changed, or taken away."""
    made = copy.deepcopy(BEFORE)
    *above, name = path.split("/")
    place = made
    for key in above:
        place = place[int(key) if isinstance(place, list) else key]
    if value is None:
        place.pop(name)
    else:
        place[name] = value
    return made


@pytest.fixture
def resumed(tmp_path):
    """Resumes a run of one record from a checkpoint with another."""

    def resume(before: dict, now: dict, built=("a", "a")) -> float:
        (tmp_path / "training.json").write_text(json.dumps(before))
        (tmp_path / "build.json").write_text(json.dumps({"vision": built[0]}))
        return check_resumed(now, {"vision": built[1]}, tmp_path)

    return resume


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("options/seed", 4, r"seed \(was 3, is 4\)"),
        ("options/seed", None, r"seed \(was 3, is the default\)"),
        ("options/max_grad_norm", 0.5, r"max_grad_norm \(was the default, is 0.5\)"),
        ("options/an_option_of_tomorrow", 1, "an_option_of_tomorrow"),
        ("stage", "align", r"stage \(was tune, is align\)"),
        ("arm", "unit", r"arm \(was gwc, is unit\)"),
        ("quantization", {"load_in_4bit": True}, "quantization"),
        ("learning_rates/norm", 2e-3, r"learning rate of norm \(was 0.001, is 0.002\)"),
        *((f"data/0/{name}", 77, "the data") for name in ("source", "used", "images")),
        *((f"data/0/{name}", 77, "the data") for name in ("shortest", "median", "longest")),
        ("before", {"stage": "align"}, "records of the model to train"),
        ("optimizer", {"class": "SGD"}, "optimizer"),
        ("adapters", {"r": 4}, "adapters"),
        ("row_lengths", "cd", "row_lengths"),
        ("sharding", "FSDP2", "sharding"),
    ],
)
def test_a_run_that_differs_is_refused_by_what_differs(resumed, path, value, named):
    with pytest.raises(ValueError, match=f"differs in {named}|differs in .*{named}"):
        resumed(BEFORE, changed(path, value))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("options/logging_steps", 7),
        ("options/output_dir", "elsewhere"),
        ("options/max_steps", 900),
        ("data/1/used", 3),
        ("row_lengths", None),
        ("seconds", 1.0),
        ("versions", {"torch": "9"}),
    ],
)
def test_a_run_that_differs_in_what_changes_no_step_is_resumed(resumed, path, value):
    for before, now in ((BEFORE, changed(path, value)), (changed(path, value), BEFORE)):
        assert resumed(before, now) == before.get("seconds", 0.0)


def test_the_model_that_was_built_must_be_the_same(resumed):
    assert resumed(BEFORE, BEFORE) == 41.5
    with pytest.raises(ValueError, match="records of the model to train"):
        resumed(BEFORE, BEFORE, built=("a", "b"))


def test_the_passes_of_a_packed_run_may_change_and_those_of_others_may_not(resumed):
    for packing in (True, False):
        before = copy.deepcopy(BEFORE)
        now = copy.deepcopy(BEFORE)
        for made, passes in ((before, 2), (now, 3)):
            made["options"] |= {"packing": packing, "gradient_accumulation_steps": passes}
        if packing:
            resumed(before, now)
        else:
            with pytest.raises(ValueError, match="gradient_accumulation_steps .was 2, is 3"):
                resumed(before, now)


def test_a_record_without_seconds_begins_at_none(resumed):
    assert resumed(changed("seconds", None), BEFORE) == 0.0


def test_the_hash_of_lengths_tells_their_order():
    rows = training.rows(4)
    backwards = rows.select([3, 2, 1, 0])
    assert record.digest_of_lengths(rows) == record.digest_of_lengths(training.rows(4))
    assert record.digest_of_lengths(rows) != record.digest_of_lengths(backwards)
    for other in (None, rows.remove_columns("length"), rows.to_iterable_dataset()):
        assert record.digest_of_lengths(other) is None


def test_parameters_count_at_the_rate_of_their_module():
    parameter = torch.nn.Parameter(torch.zeros(3))
    named = [("model.language_model.a.lora_A.weight", parameter)]
    named.append(("model.language_model.a.original_module.weight", parameter))
    model = SimpleNamespace(named_parameters=lambda: named)
    (row,) = summary.modules(model, {"vision": 0.0, "language": 2e-4})
    assert row == {
        **{"module": "adapters", "parameters": 3, "trained": 3},
        **{"learning_rate": 2e-4, "dtypes": ["float32"]},
    }
