# SPDX-License-Identifier: Apache-2.0
"""Trainer checkpoints: complete or not, which one a run resumes from, full disks, links, sizes."""

import json
import os
import re
import shutil
import tempfile
from pathlib import Path

import pytest
import stored
import torch
import training

from normalign_llava import NormAlignLlavaForConditionalGeneration
from normalign_llava.train.keeping import checkpoints
from normalign_llava.train.keeping.checkpoints import missing_from, newest_complete, resolve_resume
from normalign_llava.train.modules.sizes import check_disk
from normalign_llava.train.run import main


pytestmark = pytest.mark.slow


SAVED = {
    "max_steps": 4,
    "save_strategy": "steps",
    "save_steps": 2,
}


@pytest.fixture(scope="module")
def finished_run(checkpoint, tmp_path_factory):
    """A run with checkpoint-2 and checkpoint-4."""
    folder = tmp_path_factory.mktemp("run")
    training.trainer(folder, checkpoint, **SAVED).train()
    return folder


@pytest.fixture
def run(finished_run, tmp_path):
    """A copy of the run that a test may damage."""
    return shutil.copytree(finished_run, tmp_path / "run")


@pytest.fixture
def second(run):
    return run / "checkpoint-2"


@pytest.fixture
def fourth(run):
    return run / "checkpoint-4"


def disk_full() -> OSError:
    return OSError(28, "No space left on device")


def test_a_checkpoint_with_all_its_files_is_complete(fourth):
    assert missing_from(fourth, 1) == []


@pytest.mark.parametrize(
    ("file_name", "message"),
    [
        ("optimizer.pt", "optimizer"),
        ("scheduler.pt", "scheduler"),
        ("rng_state.pth", "random"),
        ("trainer_state.json", "trainer_state"),
    ],
)
def test_a_checkpoint_that_lacks_a_file_is_not_complete(run, second, fourth, file_name, message):
    (fourth / file_name).unlink()
    (missing,) = missing_from(fourth, 1)
    assert message in missing
    assert newest_complete(run, 1) == second


@pytest.mark.parametrize("length", [0, -1], ids=["empty", "without the last character"])
def test_a_checkpoint_that_lacks_the_end_of_its_state_is_not_complete(fourth, length):
    state_file = fourth / "trainer_state.json"
    content = state_file.read_bytes().rstrip()
    state_file.write_bytes(content[:length])
    assert "trainer_state.json" in missing_from(fourth, 1)[0]


def rename_optimizer(checkpoint_folder, new_name) -> None:
    """Stores the optimizer's state as FSDP or DeepSpeed names it."""
    new_path = checkpoint_folder / new_name
    new_path.parent.mkdir(exist_ok=True)
    (checkpoint_folder / "optimizer.pt").rename(new_path)


@pytest.mark.parametrize(
    ("optimizer", "missing_without_scheduler"),
    [
        pytest.param("optimizer.bin", ["scheduler.pt"], id="FSDP in one file"),
        pytest.param("optimizer_0/.metadata", ["scheduler.pt"], id="FSDP in shards"),
        pytest.param("latest", [], id="DeepSpeed, where its own states are"),
    ],
)
def test_states_of_fsdp_and_deepspeed_count(run, fourth, optimizer, missing_without_scheduler):
    rename_optimizer(fourth, optimizer)
    assert missing_from(fourth, 1) == []
    (fourth / "scheduler.pt").rename(run / "scheduler.pt")
    assert missing_from(fourth, 1) == missing_without_scheduler


@pytest.mark.parametrize("optimizer", ["optimizer.bin", "optimizer_0/.metadata", "latest"])
def test_random_states_of_as_many_processes_count(fourth, optimizer):
    rename_optimizer(fourth, optimizer)
    assert "random states of 2 process(es) (it has 1)" in missing_from(fourth, 2)[0]
    shutil.copyfile(fourth / "rng_state.pth", fourth / "rng_state_1.pth")
    (fourth / "rng_state.pth").rename(fourth / "rng_state_0.pth")
    assert missing_from(fourth, 2) == []
    assert missing_from(fourth, 1)
    assert missing_from(fourth, 3)


def add_what_is_no_checkpoint(run) -> None:
    """Adds names like checkpoint-N, and makes checkpoint-2 the one that was changed last."""
    os.utime(run / "checkpoint-2")
    (run / "checkpoint-10").mkdir()
    (run / "checkpoint-best").mkdir()
    (run / "checkpoint-30").touch()


@pytest.mark.parametrize("resume", [None, False, "last"])
def test_a_run_in_a_new_folder_begins_anew(tmp_path, resume):
    assert newest_complete(tmp_path / "none", 1) is None
    assert resolve_resume(resume, tmp_path / "none", 1) is None


@pytest.mark.parametrize("resume", ["last", "true", True])
def test_a_run_resumes_from_the_newest_complete_checkpoint(run, fourth, resume):
    add_what_is_no_checkpoint(run)
    assert newest_complete(run, 1) == fourth
    assert resolve_resume(resume, run, 1) == fourth


def test_a_run_in_the_folder_of_an_earlier_one_is_refused(run):
    add_what_is_no_checkpoint(run)
    with pytest.raises(ValueError, match="holds (an earlier run|a model).*--output_dir"):
        resolve_resume(None, run, 1)


def test_a_run_in_a_new_folder_resumes_from_a_named_checkpoint(second, tmp_path):
    assert resolve_resume(str(second), tmp_path / "new", 1) == second


def test_a_run_does_not_resume_from_an_incomplete_checkpoint(run, second, fourth, capsys):
    add_what_is_no_checkpoint(run)
    (fourth / "trainer_state.json").unlink()
    with pytest.raises(ValueError, match="checkpoint-4 lacks trainer_state.*Name a complete one"):
        resolve_resume(str(fourth), run, 1)
    assert newest_complete(run, 1) == second
    assert resolve_resume("last", run, 1) == second
    assert f"Skipped {fourth}" in capsys.readouterr().err


def test_a_checkpoint_without_random_states_is_perhaps_only_a_model(run, second, fourth):
    (fourth / "trainer_state.json").unlink()
    for random_state in second.glob("rng_state*"):
        random_state.unlink()
    with pytest.raises(ValueError, match="checkpoint-2.*was it written with save_only_model?"):
        resolve_resume(str(second), run, 1)


@pytest.mark.parametrize(
    ("processes", "message"),
    [
        (1, "from .*checkpoint-2 would write over .*checkpoint-4.*optimizer"),
        (2, "from the beginning would write over.*as many processes"),
    ],
)
def test_an_earlier_run_is_not_written_over(run, fourth, processes, message):
    (fourth / "optimizer.pt").unlink()
    with pytest.raises(ValueError, match=message):
        resolve_resume("last", run, processes)


def test_a_run_is_not_resumed_in_the_folder_of_another(finished_run, run, fourth):
    (fourth / "optimizer.pt").unlink()
    with pytest.raises(ValueError, match="holds another run than .*checkpoint-4"):
        resolve_resume(str(finished_run / "checkpoint-4"), run, 1)


@pytest.fixture
def run_without_checkpoints(run, second, fourth):
    """What a run leaves whose checkpoints were removed."""
    shutil.rmtree(second)
    shutil.rmtree(fourth)
    (run / "config.json").write_text("{}")
    return run


@pytest.mark.parametrize("resume", [None, "last"])
def test_a_model_without_checkpoints_is_not_written_over(run_without_checkpoints, resume):
    with pytest.raises(ValueError, match="holds .* model.*--output_dir"):
        resolve_resume(resume, run_without_checkpoints, 1)


def test_a_model_beside_an_incomplete_checkpoint_is_not_written_over(run_without_checkpoints):
    (run_without_checkpoints / "checkpoint-2").mkdir()  # so that a run would begin anew
    with pytest.raises(ValueError, match="holds a model, but no checkpoint"):
        resolve_resume("last", run_without_checkpoints, 1)


def test_an_earlier_folder_does_not_mix_with_the_new_one(fourth):
    with checkpoints.writing_checkpoint(fourth, 1):
        assert not fourth.exists()
        fourth.mkdir()


@pytest.mark.parametrize(
    "error",
    [
        ValueError("no"),
        OSError(13, "Permission denied"),
        KeyboardInterrupt(),
    ],
)
def test_a_checkpoint_stays_if_another_error_comes(fourth, error):
    with pytest.raises(type(error)) as raised, checkpoints.writing_checkpoint(fourth, 1):
        fourth.mkdir()
        raise error
    assert raised.value is error
    assert fourth.exists()


def test_a_complete_checkpoint_stays_if_the_disk_is_full(second, fourth):
    with pytest.raises(OSError, match="No space left"), checkpoints.writing_checkpoint(fourth, 1):
        shutil.copytree(second, fourth)
        raise disk_full()  # as when older checkpoints are removed
    assert missing_from(fourth, 1) == []


def test_a_full_disk_is_reported_with_the_bytes_that_are_free(run, fourth):
    disk_error = pytest.raises(OSError, match=r"[\d,.]+ MiB are free.*checkpoint-2")
    with disk_error as raised, checkpoints.writing_checkpoint(fourth, 1):
        raise disk_full()
    free_mib = re.search(r"([\d,.]+) MiB are free", str(raised.value))[1]
    reported_bytes = float(free_mib.replace(",", "")) * 2**20
    file_system = os.statvfs(run)
    free_bytes = file_system.f_bavail * file_system.f_frsize
    assert reported_bytes == pytest.approx(free_bytes, rel=0.05)


def test_after_a_full_disk_a_run_of_more_processes_starts_again(fourth):
    disk_error = pytest.raises(OSError, match="then start again")
    with disk_error, checkpoints.writing_checkpoint(fourth, 2):  # checkpoint-2 is of one process
        raise disk_full()


FULL_DISK = """
import json, os, resource, sys
from transformers import TrainerCallback
from normalign_llava.train.options import parse
from normalign_llava.train.run import train

stdout = os.dup(1)
for number in (1, 2):  # files of this process, which the limit is for too
    os.dup2(os.open(os.devnull, os.O_WRONLY), number)

class Limit(TrainerCallback):
    def limit(self):
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), resource.RLIM_INFINITY))

    def on_step_begin(self, args, state, control, **kwargs):
        if when == "step" and state.global_step == 2:
            self.limit()

    def on_train_end(self, args, state, control, **kwargs):
        if when == "end":
            self.limit()

reports = []
for folder in sys.argv[2:]:
    when, limit = folder.split("-")
    try:
        train(*parse([sys.argv[1], "--output_dir", folder]), [Limit()])
    except OSError as error:
        reports.append([folder, str(error), type(error.__cause__).__name__])
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
os.write(stdout, json.dumps(reports).encode())
"""
"""Trains to folders WHEN-LIMIT: after two steps or the last one, no file may have more bytes."""


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A checkpoint whose language model outweighs the rest."""
    return training.checkpoint(
        tmp_path_factory.mktemp("large"),
        hidden_size=256,
        intermediate_size=2048,
        head_dim=128,
    )


class FullDisks:
    """Runs of `FULL_DISK`, and what each of them reports."""

    def __init__(self, prepared, folder, parts, large):
        weight_files = large.glob("*.safetensors")
        half = max(weight_file.stat().st_size for weight_file in weight_files) // 2
        self.folder = folder
        # What is too large first: text, the weights, or the optimizer's state, twice their size.
        self.causes = {
            "step-300": "OSError",
            f"step-{half}": "NotWritable",
            f"step-{half * 3}": "RuntimeError",
        }
        # The trainer's state, and the weights.
        self.ends = ["end-300", f"end-{half}"]
        self.recipe = training.recipe(
            folder,
            parts,
            use_cpu=True,
            model_name_or_path=str(large),
            max_steps=4,
            save_steps=2,
            save_total_limit=1,
        )
        arguments = ["-c", FULL_DISK, self.recipe, *self.causes, *self.ends]
        completed = prepared.run(arguments, folder)
        self.messages = {}
        self.caught = {}
        for output_name, message, cause in json.loads(completed.stdout):
            self.messages[output_name] = message
            self.caught[output_name] = cause


@pytest.fixture(scope="module")
def full_disks(prepared, tmp_path_factory, parts, large):
    return FullDisks(prepared, tmp_path_factory.mktemp("full"), parts, large)


def test_on_a_full_disk_every_run_fails(full_disks):
    assert [*full_disks.messages] == [*full_disks.causes, *full_disks.ends]


def test_a_full_disk_leaves_the_last_checkpoint(full_disks):
    for output_name, cause in full_disks.causes.items():
        output = full_disks.folder / output_name
        message = full_disks.messages[output_name]
        assert full_disks.caught[output_name] == cause
        assert f"{output_name}/checkpoint-4 could not be written: " in message
        assert f"--resume_from_checkpoint {output_name}/checkpoint-2" in message
        assert [file_path.name for file_path in output.glob("*checkpoint*")] == ["checkpoint-2"]
        assert resolve_resume("last", output, 1) == output / "checkpoint-2"


def test_a_full_disk_leaves_no_half_of_a_model(full_disks):
    for output_name in full_disks.ends:
        message = full_disks.messages[output_name]
        expected = f"The trained model could not be written to {output_name}: File too large. Make"
        assert expected in message
        file_names = os.listdir(full_disks.folder / output_name)
        assert "config.json" not in file_names
        assert "training.json" not in file_names


def test_a_run_goes_on_after_the_disk_was_full(full_disks, tmp_path):
    output = shutil.copytree(full_disks.folder / full_disks.ends[-1], tmp_path / "out")
    arguments = [full_disks.recipe, "--resume_from_checkpoint", "--output_dir", str(output)]
    model_folder = main(arguments)
    assert NormAlignLlavaForConditionalGeneration.from_pretrained(model_folder)


FROZEN = ("language_model", "vision_tower")


def weight_file(folder, module):
    return folder / f"model-{module}-00001-of-00001.safetensors"


def aligned(folder, checkpoint, resume=None, **options):
    """A run of stage 1 with two checkpoints."""
    train_options = {
        "language_learning_rate": 0.0,
        "vision_learning_rate": 0.0,
        "save_strategy": "steps",
        "max_steps": 2,
        "save_steps": 1,
        **options,
    }
    trainer = training.trainer(folder, checkpoint, **train_options)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model()
    return trainer


def linked(folder, other_folder) -> set[str]:
    """The modules whose files in two folders are one."""
    modules = set()
    for module in (*FROZEN, "multi_modal_projector"):
        if weight_file(folder, module).samefile(weight_file(other_folder, module)):
            modules.add(module)
    return modules


def contents(folder) -> dict[str, bytes]:
    files = {}
    for file_path in folder.iterdir():
        if file_path.is_file():
            files[file_path.name] = file_path.read_bytes()
    return files


@pytest.fixture
def base(checkpoint, tmp_path):
    """A copy of a checkpoint that a test may change."""
    return shutil.copytree(checkpoint, tmp_path / "base")


class AlignedRun:
    """A run of stage 1 from `base`; its folder holds `first`, `second` and the result."""

    def __init__(self, folder, base, **options):
        self.folder = folder
        self.first = folder / "checkpoint-1"
        self.second = folder / "checkpoint-2"
        self.base = base
        self.trainer = aligned(folder, base, **options)


@pytest.fixture(scope="module")
def aligned_run(checkpoint, tmp_path_factory):
    """A run in a folder that has a card, to which nothing writes."""
    parent = tmp_path_factory.mktemp("aligned")
    folder = parent / "run"
    folder.mkdir()
    (folder / "README.md").write_text("another card")
    return AlignedRun(folder, shutil.copytree(checkpoint, parent / "base"))


def test_a_card_that_is_there_stays_and_checkpoints_have_none(aligned_run):
    card_texts = [file_path.read_text() for file_path in aligned_run.folder.rglob("README.md")]
    assert card_texts == ["another card"]  # nor TRL's


def test_frozen_modules_are_links_to_the_base(aligned_run):
    expected = training.weights(aligned_run.trainer.model)
    for folder in (aligned_run.first, aligned_run.second, aligned_run.folder):
        assert linked(folder, aligned_run.base) == {*FROZEN}
        assert {file_path.name for file_path in folder.glob("model[.-]*")} == stored.FILES
        loaded = NormAlignLlavaForConditionalGeneration.from_pretrained(folder)
    training.assert_equal(training.weights(loaded), expected)


def test_a_run_of_stage_1_changes_only_the_projector(aligned_run):
    before = stored.weights(aligned_run.base)
    changed = set()
    for parameter_name, tensor in stored.weights(aligned_run.folder).items():
        if (tensor != before[parameter_name]).any():
            changed.add(parameter_name)
    assert changed
    for parameter_name in changed:
        assert "multi_modal_projector" in parameter_name


def test_frozen_modules_stay_whatever_becomes_of_the_base(base, tmp_path):
    written = AlignedRun(tmp_path / "run", base)
    first_contents = contents(written.first)
    second_contents = contents(written.second)
    result_contents = contents(written.folder)

    other_weights = {}
    for parameter_name, tensor in stored.weights(base).items():
        other_weights[parameter_name] = tensor + 1
    stored.store(base, other_weights)  # as every save of ours
    assert not linked(written.folder, base)
    assert contents(written.first) == first_contents
    assert contents(written.second) == second_contents
    assert contents(written.folder) == result_contents

    next_run = aligned(tmp_path / "again", written.folder)
    next_run.save_model(str(written.first))  # into a folder whose files are others' too
    shutil.rmtree(base)
    assert contents(written.second) == second_contents
    assert contents(written.folder) == result_contents
    assert linked(written.first, written.folder) == {*FROZEN}


def assert_saved_once(written: AlignedRun) -> None:
    """The checkpoints and the result hold what was trained, and share their frozen modules."""
    saved_weights = stored.weights(written.folder)
    for parameter_name, tensor in written.trainer.model.state_dict().items():
        if parameter_name != "lm_head.weight":
            assert torch.equal(saved_weights[parameter_name], tensor), parameter_name
    assert linked(written.folder, written.first) == {*FROZEN}
    assert linked(written.second, written.folder) == {*FROZEN}


def test_modules_of_a_base_in_one_file_are_written_once(base, tmp_path):
    stored.in_one_file(base)
    written = AlignedRun(tmp_path / "run", base)
    assert_saved_once(written)
    saved_weights = stored.weights(written.folder)
    shutil.rmtree(written.second)
    aligned(written.folder, base, resume=str(written.first))
    # A resumed run links to the checkpoint that it resumes from.
    assert linked(written.second, written.first) == {*FROZEN}
    assert linked(written.folder, written.first) == {*FROZEN}
    training.assert_equal(stored.weights(written.folder), saved_weights)


def test_modules_that_were_changed_by_hand_are_written_once(base, tmp_path):
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(base)
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    written = AlignedRun(tmp_path / "run", base, model=model)
    assert_saved_once(written)
    assert not linked(written.folder, base)


def test_modules_in_the_hub_s_cache_are_linked_and_not_its_links(base, tmp_path):
    model_cache = tmp_path / "models--a--b"
    snapshot = model_cache / "snapshots" / "c"
    snapshot.mkdir(parents=True)
    for cached_file in base.rename(model_cache / "blobs").iterdir():
        (snapshot / cached_file.name).symlink_to(Path("../../blobs") / cached_file.name)
    written = AlignedRun(tmp_path / "run", snapshot)
    assert_saved_once(written)
    assert linked(written.folder, snapshot) == {*FROZEN}
    for module in FROZEN:
        assert not weight_file(written.folder, module).is_symlink()


def test_frozen_modules_are_copied_where_links_cannot_be(checkpoint, tmp_path):
    shared_memory = Path("/dev/shm")
    if not shared_memory.is_dir() or shared_memory.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is no other file system")
    with tempfile.TemporaryDirectory(dir=shared_memory) as other_folder:
        aligned(tmp_path, shutil.copytree(checkpoint, Path(other_folder) / "base"))
    expected = contents(checkpoint)
    for folder in (tmp_path / "checkpoint-1", tmp_path):
        for module in FROZEN:
            copied = weight_file(folder, module)
            assert copied.read_bytes() == expected[copied.name]


def bytes_of(folder) -> int:
    """Bytes of weights and optimizer, without links."""
    total_bytes = 0
    for file_path in [*folder.rglob("*.safetensors"), *folder.rglob("optimizer.pt")]:
        file_status = file_path.stat()
        if file_status.st_nlink == 1:
            total_bytes += file_status.st_size
    return total_bytes


def assert_disk_was_predicted(folder, base, linked_bytes_of=(), **options) -> None:
    """The bytes of a run are as predicted; the modules in `linked_bytes_of` are written once."""
    trainer = aligned(folder, base, max_steps=5, save_total_limit=2, **options)
    predicted = trainer.facts["disk"]
    newest = folder / "checkpoint-5"
    assert predicted["checkpoints"] == 3  # while the newest is written
    assert bytes_of(newest) == pytest.approx(predicted["checkpoint"], rel=0.05)
    total_bytes = bytes_of(folder) + predicted["checkpoint"]
    for module in linked_bytes_of:
        total_bytes += weight_file(newest, module).stat().st_size
    assert total_bytes == pytest.approx(predicted["total"], rel=0.05)


def test_what_a_run_of_stage_1_writes_is_known_before_it_starts(tmp_path, large):
    assert_disk_was_predicted(tmp_path / "run", large)


def test_what_a_run_of_adapters_writes_is_known_before_it_starts(tmp_path, large):
    assert_disk_was_predicted(
        tmp_path / "run",
        large,
        use_peft=True,
        lora_r=32,
        language_learning_rate=1e-3,
        vision_learning_rate=None,
    )


def test_what_a_run_from_one_file_writes_is_known_before_it_starts(tmp_path, large):
    in_one_file = shutil.copytree(large, tmp_path / "large")
    stored.in_one_file(in_one_file)
    assert_disk_was_predicted(tmp_path / "run", in_one_file, linked_bytes_of=FROZEN)


def test_a_run_that_does_not_fit_the_disk_is_refused_before_its_first_step(checkpoint, tmp_path):
    trainer = training.trainer(tmp_path / "run", checkpoint, **SAVED)
    trainer.facts["disk"]["total"] = 10**15
    with pytest.raises(ValueError, match="1,000,000.0 GB .* to .*/run, where .*--save_total_limit"):
        trainer.train()
    assert trainer.state.global_step == 0
    assert not list((tmp_path / "run").glob("*"))


def sparse_file(path) -> Path:
    """A file whose size is beyond the disk's, and which takes none of it."""
    path.parent.mkdir(parents=True)
    path.touch()
    os.truncate(path, 10**12)
    return path


def more_than_is_free(folder) -> int:
    return shutil.disk_usage(folder).free + 5 * 10**11


def test_files_of_earlier_checkpoints_become_free(tmp_path):
    output = tmp_path / "run"
    sparse_file(weight_file(output / "checkpoint-1", "language_model"))
    check_disk(output, more_than_is_free(tmp_path))


def test_files_in_folders_of_earlier_checkpoints_become_free(tmp_path):
    output = tmp_path / "run"
    sparse_file(output / "checkpoint-1" / "optimizer_0" / "shard")
    check_disk(output, more_than_is_free(tmp_path))


def test_files_that_others_hold_too_do_not_become_free(tmp_path):
    output = tmp_path / "run"
    weights = sparse_file(weight_file(output / "checkpoint-1", "language_model"))
    os.link(weights, tmp_path / "base.safetensors")
    with pytest.raises(ValueError, match="are to be written to .*/run.*--save_total_limit 1"):
        check_disk(output, more_than_is_free(tmp_path))


def test_after_a_stop_before_the_first_step_nothing_was_trained(run):
    assert checkpoints.after_stop(run, 1, 0) == "Nothing was trained."


def test_after_a_stop_it_is_said_how_to_go_on(run):
    message = checkpoints.after_stop(run, 1, 4)
    assert "Step 4 " in message
    assert message.count(f"--resume_from_checkpoint {run}/checkpoint-4") == 1


def test_after_a_stop_no_checkpoint_of_another_number_of_processes_is_named(run):
    assert "--resume" not in checkpoints.after_stop(run, 2, 4)


def test_after_a_stop_without_a_checkpoint_it_is_said_what_is_lost(tmp_path):
    assert "it is lost" in checkpoints.after_stop(tmp_path / "none", 1, 3)


@pytest.mark.parametrize(
    "record",
    [
        {"steps_done": 4, "best": None},
        {"steps_done": 2, "best": {"of_steps": 4}},
    ],
    ids=["the last", "the best"],
)
def test_after_a_stop_with_a_result_it_is_complete(run, record):
    (run / "training.json").write_text(json.dumps(record))
    assert f"complete in {run}" in checkpoints.after_stop(run, 1, 4)
    assert "--resume" in checkpoints.after_stop(run, 1, 3)


def test_after_a_stop_a_checkpoint_is_named_as_a_shell_reads_it(run, tmp_path):
    folder = run.rename(tmp_path / "my run")
    assert f"'{folder}/checkpoint-4'" in checkpoints.after_stop(folder, 1, 5)


def write_options(folder, **options) -> None:
    """The record of a run with these options."""
    folder.mkdir(parents=True)
    (folder / "training.json").write_text(json.dumps({"options": options}))


@pytest.fixture
def two_precisions(tmp_path):
    """A run whose second checkpoint is in bfloat16, and the first is not."""
    output = tmp_path / "out"
    write_options(output / "checkpoint-2", bf16=False)
    write_options(output / "checkpoint-10", bf16=True)
    return output


def test_a_new_run_has_no_precision_yet(tmp_path):
    assert checkpoints.read_precision(True, str(tmp_path / "out")) is None


def test_a_run_has_the_precision_of_the_named_checkpoint(two_precisions, tmp_path):
    named_folder = tmp_path / "named"
    write_options(named_folder, bf16=False, fp16=True)
    assert checkpoints.read_precision(str(named_folder), str(two_precisions)) == (False, True)


def test_a_run_has_the_precision_of_the_newest_checkpoint(two_precisions):
    assert checkpoints.read_precision("last", str(two_precisions)) == (True, False)


@pytest.mark.parametrize("content", ["{", "{}", '{"options": {"seed": 3}}'])
def test_a_run_has_the_precision_of_an_earlier_checkpoint_if_the_newest_has_none(
    two_precisions, content
):
    (two_precisions / "checkpoint-10" / "training.json").write_text(content)
    assert checkpoints.read_precision("last", str(two_precisions)) == (False, False)


def test_a_run_without_an_output_folder_has_the_precision_in_transformers_own(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    write_options(Path("trainer_output/checkpoint-2"), bf16=False)
    assert checkpoints.read_precision("last", None) == (False, False)


def test_a_run_without_an_output_folder_has_the_precision_of_the_named_checkpoint(tmp_path):
    named_folder = tmp_path / "brief"
    write_options(named_folder, bf16=True)
    assert checkpoints.read_precision(str(named_folder), None) == (True, False)


def write_result(folder) -> None:
    for file_name in ("config.json", "adapter_config.json", "training.json", "README.md"):
        (folder / file_name).touch()


def file_names(folder) -> list[str]:
    return [file_path.name for file_path in folder.iterdir()]


@pytest.mark.parametrize("error", [ValueError("no"), OSError(13, "Permission denied")])
def test_a_result_stays_if_another_error_comes(tmp_path, error):
    with pytest.raises(type(error)) as raised, checkpoints.writing_result(tmp_path):
        write_result(tmp_path)
        raise error
    assert raised.value is error
    assert len(file_names(tmp_path)) == 4


def test_a_result_is_no_model_if_the_disk_is_full(tmp_path):
    with pytest.raises(OSError, match="No space left"), checkpoints.writing_result(tmp_path):
        write_result(tmp_path)
        raise disk_full()
    assert file_names(tmp_path) == ["README.md"]


def test_the_first_file_of_a_result_is_removed_if_the_disk_is_full(tmp_path):
    (tmp_path / "README.md").touch()
    with pytest.raises(OSError, match="No space left"), checkpoints.writing_result(tmp_path):
        (tmp_path / "config.json").touch()
        raise disk_full()
    assert file_names(tmp_path) == ["README.md"]


@pytest.fixture(params=["optimizer.bin", "scaler.pt", "rng_state_1.pth"])
def state_file(request, fourth):
    """A state in checkpoint-4 that is sound."""
    return shutil.copyfile(fourth / "optimizer.pt", fourth / request.param)


@pytest.fixture
def damaged_state(state_file):
    content = bytearray(state_file.read_bytes())
    content[80:140] = b"\xff" * 60
    state_file.write_bytes(content)
    return state_file


def test_an_error_where_every_state_is_sound_stays_as_it_is(fourth, state_file):
    with pytest.raises(KeyError), checkpoints.reading_checkpoint(fourth):
        raise KeyError("of something else")


def test_a_state_of_any_kind_that_is_damaged_is_named(fourth, damaged_state):
    refusal = pytest.raises(ValueError, match=f"{damaged_state} is damaged: what happened ")
    with refusal, checkpoints.reading_checkpoint(fourth):
        raise RuntimeError("what happened\nin many lines")


def test_a_damaged_state_is_named_for_an_error_without_a_text(fourth, damaged_state):
    refusal = pytest.raises(ValueError, match=f"{damaged_state.name} is damaged: KeyError")
    with refusal, checkpoints.reading_checkpoint(fourth):
        raise KeyError


def test_a_state_that_is_cut_off_is_named(fourth, damaged_state):
    os.truncate(damaged_state, 200)
    missing = checkpoints.missing_from(fourth, 1)
    assert f"a whole {damaged_state.name} (it is damaged)" in missing
    refusal = pytest.raises(ValueError, match=f"{damaged_state} is damaged: what happened ")
    with refusal, checkpoints.reading_checkpoint(fourth):
        raise RuntimeError("what happened")


def test_the_states_of_a_checkpoint_are_in_three_files(fourth):
    states = [file_path.name for file_path in checkpoints.state_files(fourth)]
    assert states == ["optimizer.pt", "rng_state.pth", "scheduler.pt"]


def damage(weights) -> None:
    weights.write_bytes(b"\xff" * 60)


def link_to_nothing(weights) -> None:
    weights.symlink_to(weights.parent / "none")


@pytest.mark.parametrize("spoil", [damage, link_to_nothing])
def test_weights_that_cannot_be_read_are_named(tmp_path, spoil):
    weights = tmp_path / "model.safetensors"
    spoil(weights)
    refusal = pytest.raises(ValueError, match=f"{weights} is damaged: what happened")
    with refusal, checkpoints.reading_checkpoint(tmp_path):
        raise RuntimeError("what happened")


def test_an_error_without_a_checkpoint_stays_as_it_is():
    with pytest.raises(KeyError, match="else"), checkpoints.reading_checkpoint(None):
        raise KeyError("something else")


def test_only_the_first_process_removes_an_earlier_folder(fourth, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with checkpoints.writing_checkpoint(fourth, 1):
        assert missing_from(fourth, 1) == []


def test_a_folder_that_cannot_be_written_to_is_named_with_its_option(tmp_path):
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "out"
    refusal = pytest.raises(ValueError, match=f"{folder}.* cannot be written to")
    with refusal, checkpoints.only_run(folder):
        raise AssertionError("it began")


def test_a_checkpoint_that_is_not_there_is_refused_with_those_that_are(run):
    message = f"checkpoint-7 does not exist.*{run}.*checkpoint-2, checkpoint-4"
    with pytest.raises(ValueError, match=message):
        resolve_resume(str(run / "checkpoint-7"), run, 1)


def test_a_checkpoint_that_is_not_there_is_refused_in_a_new_folder(run, tmp_path):
    output = tmp_path / "new"
    with pytest.raises(ValueError, match=f"checkpoint-7 does not exist.*{output}.*no checkpoint"):
        resolve_resume(str(run / "checkpoint-7"), output, 1)


def test_a_path_from_here_is_the_checkpoint_that_it_leads_to(run, fourth, monkeypatch):
    monkeypatch.chdir(run)
    assert resolve_resume("checkpoint-4", run, 1) == Path("checkpoint-4")
    with pytest.raises(ValueError, match="holds checkpoint-4. A later resume"):
        resolve_resume("checkpoint-2", run, 1)
    (fourth / "trainer_state.json").unlink()
    assert resolve_resume("checkpoint-2", run, 1) == Path("checkpoint-2")


@pytest.mark.parametrize("file_name", checkpoints.RESULT)
@pytest.mark.parametrize("resume", [None, "last"])
def test_a_model_is_not_written_over(tmp_path, file_name, resume):
    (tmp_path / file_name).write_text("{}")
    with pytest.raises(ValueError, match="holds a model"):
        resolve_resume(resume, tmp_path, 1)


@pytest.mark.parametrize("file_name", checkpoints.RESULT)
def test_a_run_with_a_model_goes_on(run, fourth, file_name):
    (run / file_name).write_text("{}")
    assert resolve_resume("last", run, 1) == fourth


@pytest.mark.parametrize("resume", ["yes", "ON"])
def test_a_resumption_is_printed(run, fourth, capsys, resume):
    assert resolve_resume(resume, run, 1) == fourth
    assert f"Resuming from {fourth}." in capsys.readouterr().err


def test_only_the_first_process_prints_a_resumption(run, fourth, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    assert resolve_resume("last", run, 1) == fourth
    assert capsys.readouterr().err == ""
