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
from normalign_llava.train.keeping import record, summary
from normalign_llava.train.keeping.record import check_resumed
from normalign_llava.train.modules import sizes
from normalign_llava.train.modules.load import LoadedModel
from normalign_llava.train.prepare import CheckedData, OpenedModel, Plan
from normalign_llava.train.settings import Precision


MIB = 2**20
GIB = 2**30
LANGUAGE = r".*language_model.*q_proj"


@pytest.mark.parametrize(
    "size, expected",
    [
        (0, "0.0 MiB"),
        (3 * MIB // 2, "1.5 MiB"),
        (2**27 - 1, "128.0 MiB"),
        (2**27, "0.1 GiB"),
        (1536 * GIB, "1,536.0 GiB"),
    ],
)
def test_bytes_are_read_in_the_unit_that_suits_them(size, expected):
    assert summary.gib(size) == expected


def test_dropped_rows_are_counted_and_told_by_kind_of_reason(tmp_path):
    dropped_rows = DroppedRows(tmp_path / "dropped_rows.jsonl")
    assert summary.read_dropped(dropped_rows) == []

    dropped_rows.add(DroppedRow("a.json", 3, "x.png", "x.png: is truncated"))
    lines = summary.read_dropped(dropped_rows)
    assert len(lines) == 2
    assert lines[0].startswith("1 row ")
    assert str(dropped_rows.path) in lines[0]
    assert "a.json, row 3" in lines[1]

    for number in range(4, 15):
        letter = chr(60 + number)
        dropped_rows.add(DroppedRow("a.json", number, None, f"reason {letter}"))
    lines = summary.read_dropped(dropped_rows)
    assert lines[0].startswith("12 rows ")
    assert len(lines) == 1 + 11
    assert "2 more" in lines[-1]


def git(folder, *words) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    done = subprocess.run(
        ["git", "-C", str(folder), *identity, *words],
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout.strip()


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The root of a checkout in which this package's files are said to lie."""
    checkout = tmp_path / "checkout"
    folder = checkout / "train" / "keeping"
    folder.mkdir(parents=True)
    module_path = folder / "record.py"
    module_path.write_text("a = 1\n")
    monkeypatch.setattr(record, "__file__", str(module_path))
    return checkout


@pytest.fixture
def commit(installed):
    """The only commit of the checkout."""
    git(installed, "init", "-q")
    git(installed, "add", ".")
    git(installed, "commit", "-q", "-m", "a")
    git(installed, "tag", "v1")  # names of tags are no commits
    return git(installed, "rev-parse", "HEAD")


def test_the_commit_of_a_checkout_says_whether_files_were_changed(installed, commit, monkeypatch):
    monkeypatch.chdir(installed.parent)
    assert record.code_commit() == commit
    (installed / "train" / "keeping" / "record.py").write_text("a = 2\n")
    assert record.code_commit() == f"{commit}-dirty"


def test_the_commit_of_a_checkout_that_the_package_is_copied_into_is_not_its_own(
    installed, commit, monkeypatch
):
    monkeypatch.chdir(installed.parent)
    (installed / "train" / "keeping" / "record.py").write_text("a = 2\n")
    (installed / ".git").rename(installed.parent / ".git")
    assert git(installed, "rev-parse", "HEAD") == commit
    found = record.code_commit() or ""
    assert commit not in found


@pytest.mark.parametrize(
    "direct_url, expected",
    [
        pytest.param(
            json.dumps({"url": "https://a", "vcs_info": {"commit_id": "d" * 40}}),
            "d" * 40,
            id="from a repository",
        ),
        pytest.param(
            json.dumps({"url": "file:///a", "dir_info": {}}),
            None,
            id="from a folder",
        ),
        pytest.param("{", None, id="damaged"),
        pytest.param(None, None, id="no file"),
    ],
)
def test_without_a_checkout_the_commit_is_that_which_pip_installed(
    installed, tmp_path, monkeypatch, direct_url, expected
):
    site_packages = tmp_path / "site"
    metadata_folder = site_packages / "normalign_llava-9.9.dist-info"
    metadata_folder.mkdir(parents=True)
    (metadata_folder / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: normalign-llava\nVersion: 9.9\n"
    )
    if direct_url:
        (metadata_folder / "direct_url.json").write_text(direct_url)
    monkeypatch.syspath_prepend(site_packages)
    assert record.code_commit() == expected
    monkeypatch.setenv("PATH", str(tmp_path))  # where git is not installed
    assert record.code_commit() == expected
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


@pytest.mark.parametrize(
    "options, expected",
    [
        pytest.param({}, {}, id="defaults"),
        pytest.param(
            {"number": 6, "names": ["b"]},
            {"number": 6, "names": ["b"]},
            id="changed",
        ),
        pytest.param({"text": None}, {"text": None}, id="a default that was taken away"),
        pytest.param(
            {"switch": True, "empty": "x"},
            {"switch": True, "empty": "x"},
            id="switched on",
        ),
        pytest.param(
            {"text": object(), "empty": {}},
            {},
            id="what JSON cannot hold, or is empty",
        ),
    ],
)
def test_a_record_has_what_was_changed_and_what_is_always_told(options, expected):
    recorded = record._changed(Options(None, **options), {"always", "empty"})
    assert recorded == {"always": 3, **expected}


def test_a_record_has_no_values_that_are_derived():
    options = Options(None, number=0)
    options.derived = 7
    assert record._changed(options, set()) == {"number": 0}


class Kind(Enum):
    PLAIN = "plain"


def test_no_local_path_is_in_a_record(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data_folder = tmp_path / "data"
    data_folder.mkdir()
    folder_with_colon = tmp_path / "a:b"
    folder_with_colon.mkdir()
    values = {
        "path": str(data_folder),
        "split": f"{data_folder}:train:a",
        "colon": str(folder_with_colon),
        "kind": Kind.PLAIN,
        "list": (str(data_folder), "owner/name"),
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
        "set": ["a", "b", "c", "d", "e"],
        "object": None,
        "truth": True,
        "number": 0.5,
        "hub": "owner/name:train",
    }


FLOAT32 = Precision(bf16=False, fp16=False)
TOLD_ELSEWHERE = {
    "run_name": "mine",
    "hub_token": "secret",
    "learning_rate": 0.5,
    "resume_from_checkpoint": "last",
    "logging_nan_inf_filter": False,
}


@pytest.fixture
def recorded_settings(tmp_path, monkeypatch):
    """Options of one of two processes, some of which no record has."""
    settings = training.settings(tmp_path, stage="tune", **TOLD_ELSEWHERE)
    settings.do_eval = True
    settings.dataloader_pin_memory = not settings.dataloader_pin_memory
    settings.accelerator_config = AcceleratorConfig(even_batches=False)
    Accelerator(cpu=True)  # the options have made accelerate forget its state
    monkeypatch.setitem(PartialState._shared_state, "num_processes", 2)
    return settings


@pytest.fixture
def make_record(recorded_settings):
    """Records a plan of the settings for a tiny model."""
    model = tiny.model()
    model.config.text_embedding_norm = 0.75

    def make(*other_options, adapters=None, optimizer=None):
        dropped = [DroppedRow("a.json", 3, "x.png", "is truncated")]
        report = DataReport([SourceReport("a.json", "train", dropped=dropped)])
        plan = Plan(
            recorded_settings,
            FLOAT32,
            {"norm": 1e-3},
            OpenedModel(model, None, model.config, None, adapters, None, None),
            CheckedData(None, None, None, report),
            optimizer,
        )
        loaded_model = LoadedModel(
            model,
            recorded_settings,
            FLOAT32,
            commit="c" * 40,
            weights_in=[],
        )
        return record.training_record(plan, loaded_model, *other_options)

    return make


def test_a_record_says_what_is_trained_on_what(make_record):
    training_record = make_record()
    assert training_record["config_changes"] == {
        "projector_norm": "layer_norm",
        "projector_gain_init": "text_norm",
        "gradient_compensation": "global",
    }
    assert training_record["model_revision"] == "c" * 40
    assert training_record["text_embedding_norm"] == 0.75
    assert training_record["learning_rates"] == {"norm": 1e-3}
    assert training_record["data"][0]["dropped"] == [3]
    assert training_record["before"] is None
    assert training_record["optimizer"] is None
    assert training_record["adapters"] is None


def test_a_record_says_what_a_run_runs_on(make_record):
    training_record = make_record()
    assert training_record["processes"] == 2
    assert training_record["hardware"]["devices"]
    assert training_record["hardware"]["count"] == 1
    for package in ("torch", "transformers", "trl", "peft", "accelerate"):
        assert training_record["versions"][package] == version(package)


def test_a_record_has_options_that_decide_at_their_defaults_too_and_no_secret(
    make_record, recorded_settings
):
    data_options = Options(None, number=6)
    model_options = Options(None, names=["b"])
    options = make_record((data_options, model_options))["options"]
    assert options["number"] == 6
    assert options["names"] == ["b"]
    assert options["accelerator_config"] == {"even_batches": False}
    for name in ("max_length", "num_train_epochs", "weight_decay", "global_batch_size"):
        assert options[name] == getattr(recorded_settings, name)
    left_out = {
        "output_dir",
        "use_cpu",
        "disable_tqdm",
        "model_name_or_path",
        "do_eval",
        "dataloader_pin_memory",
        *TOLD_ELSEWHERE,
    }
    assert not left_out & options.keys()


def test_a_record_has_how_the_model_is_loaded_and_no_revision(make_record, recorded_settings):
    recorded_settings.model_init_kwargs = {
        "dtype": "bfloat16",
        "attn_implementation": None,
        "revision": "b",
    }
    options = make_record()["options"]
    assert options["dtype"] == "bfloat16"
    assert "attn_implementation" not in options
    assert "revision" not in options


def test_of_the_accelerator_a_record_has_what_is_not_the_default(make_record, recorded_settings):
    expected = {
        "even_batches": False,
        "use_seedable_sampler": False,
        "gradient_accumulation_kwargs": {"sync_each_batch": True},
    }
    config = AcceleratorConfig(non_blocking=True, dispatch_batches=True, **expected)
    recorded_settings.accelerator_config = config
    assert make_record()["options"]["accelerator_config"] == expected
    recorded_settings.accelerator_config = AcceleratorConfig()
    assert "accelerator_config" not in make_record()["options"]


def test_of_adapters_a_record_has_what_is_not_the_default(make_record):
    config = LoraConfig(r=4, target_modules=["v", "q"], base_model_name_or_path="/here/model")
    config.revision = "v2"
    config.peft_version = "0.1"
    config.runtime_config = LoraRuntimeConfig(ephemeral_gpu_offload=True)
    assert make_record(adapters=config)["adapters"] == {"r": 4, "target_modules": ["q", "v"]}


def test_of_adapters_a_record_has_what_was_switched_off(make_record):
    config = LoraConfig(init_lora_weights=False)  # the default is True
    assert make_record(adapters=config)["adapters"] == {"init_lora_weights": False}


def test_a_record_has_the_class_and_the_options_of_an_optimizer(make_record):
    training_record = make_record(optimizer=(torch.optim.SGD, {"lr": 0.1}))
    assert training_record["optimizer"] == {"class": "torch.optim.sgd.SGD", "lr": 0.1}


@pytest.mark.parametrize(
    "lines, expected",
    [
        pytest.param(
            "processor\t: 0\nmodel name\t: Fast: 3 GHz\nflags\t: a\nmodel name\t: b\n",
            "Fast: 3 GHz",
            id="named",
        ),
        pytest.param("processor\t: 0\nCPU part\t: 0xd0c\n", platform.machine(), id="ARM"),
        pytest.param(None, platform.machine(), id="macOS"),
    ],
)
def test_a_processor_has_the_name_that_the_system_gives_it(tmp_path, monkeypatch, lines, expected):
    cpuinfo = tmp_path / "cpuinfo"
    if lines:
        cpuinfo.write_text(lines)
    monkeypatch.setattr(record, "Path", lambda path: cpuinfo)
    Accelerator(cpu=True)
    assert record.hardware(torch.device("cpu"))["devices"] == [expected]


@pytest.fixture(scope="module")
def trainer(checkpoint, tmp_path_factory):
    """A trainer that trains everything, two passes a step."""
    return training.trainer(
        tmp_path_factory.mktemp("run"),
        checkpoint,
        global_batch_size=4,
        warmup_steps=0.25,
        max_steps=8,
    )


@pytest.fixture
def disk_use(trainer, tmp_path):
    """Counts the disk that a run of 100 steps with some options takes."""

    def count(**options) -> dict:
        settings = training.settings(tmp_path, max_steps=100, **options)
        Accelerator(cpu=True)  # the options have made accelerate forget its state
        return sizes.disk_use(trainer.model, settings, 100, [])

    return count


@pytest.fixture
def weight_bytes(trainer) -> int:
    return sum(parameter.nbytes for parameter in trainer.model.parameters())


@pytest.mark.parametrize(
    "options, checkpoints",
    [
        ({"save_strategy": "no"}, 0),
        ({"save_strategy": "epoch", "num_train_epochs": 2.5}, 3),
        # The last step is saved too.
        ({"save_strategy": "steps", "save_steps": 30}, 4),
        ({"save_strategy": "steps", "save_steps": 0.1}, 10),
        # After every fourth.
        ({"save_strategy": "steps", "save_steps": 0.035}, 25),
        ({"save_strategy": "steps", "save_steps": 1}, 100),
        ({"save_strategy": "steps", "save_steps": 0.1, "save_total_limit": 3}, 4),
        ({"save_strategy": "steps", "save_steps": 30, "save_total_limit": 9}, 4),
    ],
)
def test_as_many_checkpoints_count_as_are_there_at_a_time(
    disk_use, weight_bytes, options, checkpoints
):
    moments = 2 * weight_bytes  # AdamW has two
    checkpoint_bytes = weight_bytes + moments
    assert disk_use(**options) == {
        "checkpoint": checkpoint_bytes,
        "checkpoints": checkpoints,
        "total": checkpoints * checkpoint_bytes + weight_bytes,
    }


SAVES = {"save_strategy": "steps", "save_steps": 10}


@pytest.mark.parametrize("limit", [1, 2])
def test_the_best_checkpoint_stays_beside_the_newest(disk_use, limit):
    counted = disk_use(
        save_total_limit=limit,
        eval_strategy="steps",
        eval_steps=10,
        load_best_model_at_end=True,
        **SAVES,
    )
    assert counted["checkpoints"] == 3


def test_a_new_checkpoint_is_written_before_the_last_is_removed(disk_use):
    assert disk_use(save_total_limit=1, **SAVES)["checkpoints"] == 2


def test_a_checkpoint_may_have_weights_only(disk_use, weight_bytes):
    assert disk_use(save_only_model=True, **SAVES)["checkpoint"] == weight_bytes


@pytest.mark.parametrize(
    "distributed_type, zero_stage, bytes_of_whole, bytes_of_adapters",
    [
        # Bytes of a parameter: the weight and AdamW's two moments.
        ("NO", None, 12, 12),
        ("MULTI_CPU", None, 12, 12),
        # Adapters are saved once more with these states.
        ("FSDP", None, 12, 16),
        # Here all that is trained is.
        ("DEEPSPEED", 3, 16, 16),
        # It has a copy in float32.
        ("DEEPSPEED", 2, 20, 20),
    ],
)
def test_a_checkpoint_has_the_states_of_all_processes(
    tmp_path, trainer, monkeypatch, distributed_type, zero_stage, bytes_of_whole, bytes_of_adapters
):
    settings = training.settings(tmp_path, save_strategy="steps", save_steps=10)
    Accelerator(cpu=True)
    accelerator_state = AcceleratorState._shared_state
    partial_state = PartialState._shared_state
    distributed_type = DistributedType[distributed_type]
    monkeypatch.setitem(accelerator_state, "distributed_type", distributed_type)
    monkeypatch.setitem(partial_state, "distributed_type", distributed_type)
    plugin = SimpleNamespace(zero_stage=zero_stage, selected=True)
    monkeypatch.setitem(accelerator_state, "deepspeed_plugins", {"default": plugin})
    monkeypatch.setitem(partial_state, "num_processes", 2)
    assert settings.world_size == 2

    def bytes_of_parameter(model):
        trained_count = 0
        for parameter in model.parameters():
            if parameter.requires_grad:
                trained_count += parameter.numel()
        return sizes.disk_use(model, settings, 20, [])["checkpoint"] / trained_count

    lora_config = LoraConfig(r=2, target_modules=LANGUAGE)
    adapted_model = get_peft_model(tiny.model(), lora_config)
    assert bytes_of_parameter(trainer.model) == bytes_of_whole
    assert bytes_of_parameter(adapted_model) == bytes_of_adapters


def cells_of_rows(table) -> list[list[str]]:
    """The cells of a table's rows."""
    columns = []
    for column in table.columns:
        columns.append([str(cell) for cell in column.cells])
    return [list(cells) for cells in zip(*columns, strict=True)]


def justified(table) -> list[str]:
    return [column.justify for column in table.columns]


DATA = {
    "source": "/far/away/a.json",
    "split": "train",
    "found": 1010,
    "bad": 11,
    "too_long": 0,
    "used": 987,
    "images": 1400,
    "shortest": 7,
    "median": 30.6,
    "longest": 2048,
    "files": {},
    "changed": {},
    "left_out": {"tools": 5},
}
STREAM = {
    **dict.fromkeys(DATA, None),
    "source": "s",
    "split": "eval",
    "left_out": {},
    "changed": {},
    "files": {"/far/one.parquet": 6, "/far/two.parquet": 4},
}
TOWER = {
    "module": "vision tower",
    "parameters": 1500,
    "trained": 0,
    "dtypes": ["nf4", "bfloat16"],
    "learning_rate": 0.0,
}
NORM = {
    "module": "norm",
    "parameters": 64,
    "trained": 64,
    "dtypes": ["float32"],
    "learning_rate": 1e-3,
}
BATCH = {
    "rows": 256,
    "per_device": 2,
    "processes": 4,
    "accumulation": 32,
    "packed": False,
}
FACTS = {
    "modules": [TOWER, NORM],
    "data": [DATA, STREAM],
    "batch": BATCH,
    "disk": {"checkpoint": 3 * GIB, "checkpoints": 2, "total": 7 * GIB},
    "tokens_per_image": 576,
    "steps": 2180,
    "warmup_steps": 66,
    "autocast": None,
    "precision_because": "bfloat16 is slow",
}


@pytest.fixture
def rendered(tmp_path):
    """The parts of a summary: title, options, modules, data, a line for each source, the run."""
    about = {"stage": "align", "arm": "gwc", "options": {"seed": 3}}
    parts = summary.RunSummary(about, FACTS, tmp_path).renderable().renderables
    assert len(parts) == 7
    return SimpleNamespace(
        options=parts[1],
        modules=parts[2],
        data=parts[3],
        source_lines=[str(line) for line in parts[4:6]],
        run=dict(cells_of_rows(parts[6])),
    )


def test_the_summary_has_options_and_modules(rendered):
    assert cells_of_rows(rendered.options) == [
        ["stage", "align"],
        ["arm", "gwc"],
        ["seed", "3"],
    ]
    assert cells_of_rows(rendered.modules) == [
        ["vision tower", "1,500", "0", "nf4 + bfloat16", "frozen"],
        ["norm", "64", "64", "float32", "0.001"],
        ["all", "1,564", "64", "", ""],
    ]
    assert justified(rendered.modules) == ["left", "right", "right", "right", "right"]


def test_the_summary_has_each_figure_of_the_data_in_its_column(rendered):
    headers = [column.header for column in rendered.data.columns[2:7]]
    assert headers == ["rows", "bad", "too long", "used", "images"]
    sides = justified(rendered.data)
    assert sides[0] == "left"
    assert set(sides[1:]) == {"right"}
    assert cells_of_rows(rendered.data) == [
        ["a.json", "train", "1,010", "11", "0", "987", "1,400", "7 to 2,048 (31)"],
        ["s", "eval", "", "", "", "", "", "streamed"],
    ]


def test_the_summary_has_a_line_about_each_source(rendered):
    line_of_file, line_of_stream = rendered.source_lines
    assert line_of_file.startswith("a.json,")
    assert "tools (5 rows)" in line_of_file
    assert line_of_stream.startswith("s,")
    assert "one.parquet (6 rows), two.parquet (4 rows)" in line_of_stream


def test_the_summary_has_the_figures_of_the_run(rendered):
    cells = rendered.run
    assert cells["Tokens per image"] == "576"
    expected_batch = "256 rows = 2 per device x 4 process(es) x 32 accumulation step(s)"
    assert cells["Batch"] == expected_batch
    assert cells["Steps"] == "2,180, 66 of them warm-up"
    assert cells["Autocast"] == "none (bfloat16 is slow)"
    assert cells["Disk"].startswith("7.0 GiB (2 checkpoint(s) of 3.0 GiB at a time); ")


def test_a_packed_batch_is_not_told_as_rows_of_a_pass(tmp_path):
    about = {"stage": None, "arm": None, "options": {}}
    facts = {
        **FACTS,
        "batch": {**BATCH, "packed": True},
        "autocast": "float16",
        "precision_because": "",
    }
    run_table = summary.RunSummary(about, facts, tmp_path).renderable().renderables[-1]
    cells = dict(cells_of_rows(run_table))
    assert cells["Batch"] == "256 rows packed into 4 process(es) x 32 accumulation step(s)"
    assert cells["Autocast"] == "float16"


def test_a_trainer_has_the_figures_of_a_summary(trainer):
    facts = trainer.facts
    assert facts["batch"] == {
        "rows": 4,
        "per_device": 2,
        "processes": 1,
        "accumulation": 2,
        "packed": False,
    }
    assert facts["tokens_per_image"] == 4
    assert facts["steps"] == 8
    assert facts["warmup_steps"] == 2
    assert facts["autocast"] is None
    assert facts["precision_because"] == ""


def test_a_trainer_has_the_figures_of_its_data(trainer):
    lengths = sorted(training.rows()["length"])
    assert len(trainer.facts["data"]) == 1
    data_facts = trainer.facts["data"][0]
    assert data_facts["shortest"] == lengths[0]
    assert data_facts["longest"] == lengths[-1]
    assert data_facts["median"] == (lengths[7] + lengths[8]) / 2
    assert data_facts["found"] == 16
    assert data_facts["used"] == 16
    assert data_facts["images"] == 16
    assert data_facts["text_only"] == 0
    assert data_facts["dropped"] == 0


TRAINED = {
    "source": "a.json",
    "split": "train",
    "used": 8,
    "images": 5,
    "shortest": 3,
    "median": 4,
    "longest": 9,
}
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


def changed(key_path: str, value) -> dict:
    """The record with one value changed, or taken away."""
    changed_record = copy.deepcopy(BEFORE)
    *parents, name = key_path.split("/")
    place = changed_record
    for parent in parents:
        key = int(parent) if isinstance(place, list) else parent
        place = place[key]
    if value is None:
        place.pop(name)
    else:
        place[name] = value
    return changed_record


@pytest.fixture
def resume(tmp_path):
    """Resumes a run of one record from a checkpoint with another."""

    def check(before: dict, now: dict, vision_before="a", vision="a") -> float:
        build_record = {"vision": vision_before}
        (tmp_path / "training.json").write_text(json.dumps(before))
        (tmp_path / "build.json").write_text(json.dumps(build_record))
        return check_resumed(now, {"vision": vision}, tmp_path)

    return check


@pytest.mark.parametrize(
    "key_path, value, message",
    [
        ("options/seed", 4, r"seed \(was 3, is 4\)"),
        ("options/seed", None, r"seed \(was 3, is the default\)"),
        ("options/max_grad_norm", 0.5, r"max_grad_norm \(was the default, is 0.5\)"),
        ("options/an_option_of_tomorrow", 1, "an_option_of_tomorrow"),
        ("stage", "align", r"stage \(was tune, is align\)"),
        ("arm", "unit", r"arm \(was gwc, is unit\)"),
        ("quantization", {"load_in_4bit": True}, "quantization"),
        ("learning_rates/norm", 2e-3, r"learning rate of norm \(was 0.001, is 0.002\)"),
        ("data/0/source", 77, "the data"),
        ("data/0/used", 77, "the data"),
        ("data/0/images", 77, "the data"),
        ("data/0/shortest", 77, "the data"),
        ("data/0/median", 77, "the data"),
        ("data/0/longest", 77, "the data"),
        ("before", {"stage": "align"}, "records of the model to train"),
        ("optimizer", {"class": "SGD"}, "optimizer"),
        ("adapters", {"r": 4}, "adapters"),
        ("row_lengths", "cd", "row_lengths"),
        ("sharding", "FSDP2", "sharding"),
    ],
)
def test_a_run_that_differs_is_refused_by_what_differs(resume, key_path, value, message):
    now = changed(key_path, value)
    with pytest.raises(ValueError, match=f"differs in {message}|differs in .*{message}"):
        resume(BEFORE, now)


@pytest.mark.parametrize(
    "key_path, value",
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
def test_a_run_that_differs_in_what_changes_no_step_is_resumed(resume, key_path, value):
    other = changed(key_path, value)
    assert resume(BEFORE, other) == BEFORE["seconds"]
    assert resume(other, BEFORE) == other["seconds"]


def test_the_model_that_was_built_must_be_the_same(resume):
    assert resume(BEFORE, BEFORE) == 41.5
    with pytest.raises(ValueError, match="records of the model to train"):
        resume(BEFORE, BEFORE, vision_before="a", vision="b")


def record_of_passes(passes, packing) -> dict:
    passes_record = copy.deepcopy(BEFORE)
    passes_record["options"]["packing"] = packing
    passes_record["options"]["gradient_accumulation_steps"] = passes
    return passes_record


def test_the_passes_of_a_packed_run_may_change(resume):
    before = record_of_passes(2, packing=True)
    now = record_of_passes(3, packing=True)
    assert resume(before, now) == before["seconds"]


def test_the_passes_of_a_run_without_packing_may_not_change(resume):
    before = record_of_passes(2, packing=False)
    now = record_of_passes(3, packing=False)
    with pytest.raises(ValueError, match="gradient_accumulation_steps .was 2, is 3"):
        resume(before, now)


def test_a_record_without_seconds_begins_at_none(resume):
    assert resume(changed("seconds", None), BEFORE) == 0.0


def test_the_hash_of_lengths_tells_their_order():
    dataset = training.rows(4)
    backwards = dataset.select([3, 2, 1, 0])
    digest = record.digest_of_lengths(dataset)
    assert record.digest_of_lengths(training.rows(4)) == digest
    assert record.digest_of_lengths(backwards) != digest


def test_rows_without_lengths_in_memory_have_no_hash():
    dataset = training.rows(4)
    assert record.digest_of_lengths(None) is None
    assert record.digest_of_lengths(dataset.remove_columns("length")) is None
    assert record.digest_of_lengths(dataset.to_iterable_dataset()) is None


def test_parameters_count_at_the_rate_of_their_module():
    parameter = torch.nn.Parameter(torch.zeros(3))
    named_parameters = [
        ("model.language_model.a.lora_A.weight", parameter),
        ("model.language_model.a.original_module.weight", parameter),
    ]
    model = SimpleNamespace(named_parameters=lambda: named_parameters)
    modules = summary.modules(model, {"vision": 0.0, "language": 2e-4})
    assert modules == [
        {
            "module": "adapters",
            "parameters": 3,
            "trained": 3,
            "learning_rate": 2e-4,
            "dtypes": ["float32"],
        }
    ]
