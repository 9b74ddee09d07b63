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
from normalign_llava.train.keeping.disk import check_disk
from normalign_llava.train.run import main


pytestmark = pytest.mark.slow


SAVED = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}


@pytest.fixture(scope="module")
def written(checkpoint, tmp_path_factory):
    """A run with checkpoint-2 and checkpoint-4."""
    root = tmp_path_factory.mktemp("run")
    training.trainer(root, checkpoint, **SAVED).train()
    return root


@pytest.fixture
def run(written, tmp_path):
    """A copy of the run that a test may damage."""
    return shutil.copytree(written, tmp_path / "run")


def test_a_checkpoint_that_lacks_a_file_or_its_end_is_not_complete(run):
    folder = run / "checkpoint-4"
    assert missing_from(folder, 1) == []
    states = {"optimizer.pt": "optimizer", "scheduler.pt": "scheduler", "rng_state.pth": "random"}
    for name, said in {**states, "trainer_state.json": "trainer_state"}.items():
        kept = (folder / name).read_bytes()
        (folder / name).unlink()
        (missing,) = missing_from(folder, 1)
        assert said in missing and newest_complete(run, 1) == run / "checkpoint-2"
        (folder / name).write_bytes(kept)
    for length in (0, -1):
        (folder / "trainer_state.json").write_bytes(kept.rstrip()[:length])
        assert "trainer_state.json" in missing_from(folder, 1)[0]


@pytest.mark.parametrize("optimizer", ["optimizer.bin", "optimizer_0/.metadata", "latest"])
def test_states_of_several_processes_and_of_fsdp_and_deepspeed_count(run, optimizer):
    folder = run / "checkpoint-4"
    (folder / optimizer).parent.mkdir(exist_ok=True)
    (folder / "optimizer.pt").rename(folder / optimizer)
    assert missing_from(folder, 1) == []
    scheduler = (folder / "scheduler.pt").rename(run / "scheduler.pt")
    is_in_folder = optimizer == "latest"  # where DeepSpeed's own states are
    assert missing_from(folder, 1) == ([] if is_in_folder else ["scheduler.pt"])
    scheduler.rename(folder / "scheduler.pt")
    assert "random states of 2 process(es) (it has 1)" in missing_from(folder, 2)[0]
    shutil.copyfile(folder / "rng_state.pth", folder / "rng_state_1.pth")
    (folder / "rng_state.pth").rename(folder / "rng_state_0.pth")
    assert missing_from(folder, 2) == [] and missing_from(folder, 1) and missing_from(folder, 3)


def test_which_checkpoint_a_run_resumes_from(run, tmp_path, capsys):
    assert newest_complete(run / "none", 1) is None
    os.utime(run / "checkpoint-2")
    for name in ("checkpoint-10", "checkpoint-best"):
        (run / name).mkdir()
    (run / "checkpoint-30").touch()
    for value in (None, False, "last"):
        assert resolve_resume(value, tmp_path / "none", 1) is None
    for value in ("last", "true", True):
        assert resolve_resume(value, run, 1) == newest_complete(run, 1) == run / "checkpoint-4"
    with pytest.raises(ValueError, match="holds (an earlier run|a model).*--output_dir"):
        resolve_resume(None, run, 1)
    assert resolve_resume(str(run / "checkpoint-2"), tmp_path / "new", 1) == run / "checkpoint-2"
    (run / "checkpoint-4" / "trainer_state.json").unlink()
    with pytest.raises(ValueError, match="checkpoint-4 lacks trainer_state.*Name a complete one"):
        resolve_resume(str(run / "checkpoint-4"), run, 1)
    assert resolve_resume("last", run, 1) == newest_complete(run, 1) == run / "checkpoint-2"
    assert f"Skipped {run / 'checkpoint-4'}" in capsys.readouterr().err
    for file in (run / "checkpoint-2").glob("rng_state*"):
        file.unlink()
    with pytest.raises(ValueError, match="checkpoint-2.*was it written with save_only_model?"):
        resolve_resume(str(run / "checkpoint-2"), run, 1)


def test_an_earlier_run_is_not_written_over(written, run):
    (run / "checkpoint-4" / "optimizer.pt").unlink()
    for resume, processes, message in (
        ("last", 1, "from .*checkpoint-2 would write over .*checkpoint-4.*optimizer"),
        ("last", 2, "from the beginning would write over.*as many processes"),
        (str(written / "checkpoint-4"), 1, "holds another run than .*checkpoint-4"),
    ):
        with pytest.raises(ValueError, match=message):
            resolve_resume(resume, run, processes)
    for step in (2, 4):
        shutil.rmtree(run / f"checkpoint-{step}")
    (run / "config.json").write_text("{}")
    for resume in (None, "last"):
        with pytest.raises(ValueError, match="holds .* model.*--output_dir"):
            resolve_resume(resume, run, 1)
    (run / "checkpoint-2").mkdir()  # without its end, so that a run would begin anew
    with pytest.raises(ValueError, match="holds a model, but no checkpoint"):
        resolve_resume("last", run, 1)


def test_an_earlier_folder_does_not_mix_with_the_new_one_and_a_complete_one_stays(run):
    folder = run / "checkpoint-4"
    with checkpoints.writing_checkpoint(folder, 1):
        assert not folder.exists()
        folder.mkdir()
    for error in (ValueError("no"), OSError(13, "Permission denied"), KeyboardInterrupt()):
        with pytest.raises(type(error)) as raised, checkpoints.writing_checkpoint(folder, 1):
            folder.mkdir()
            raise error
        assert raised.value is error and folder.exists()
    with pytest.raises(OSError, match="No space left"), checkpoints.writing_checkpoint(folder, 1):
        shutil.copytree(run / "checkpoint-2", folder)
        raise OSError(28, "No space left on device")  # as when older checkpoints are removed
    assert missing_from(folder, 1) == []
    full = pytest.raises(OSError, match=r"[\d,.]+ MiB are free.*checkpoint-2")
    with full as raised, checkpoints.writing_checkpoint(folder, 1):
        raise OSError(28, "No space left on device")
    free = re.search(r"([\d,.]+) MiB are free", str(raised.value))[1]
    alone = pytest.raises(OSError, match="then start again")
    with alone, checkpoints.writing_checkpoint(folder, 2):  # checkpoint-2 is of one process
        raise OSError(28, "No space left on device")
    system = os.statvfs(run)
    free_bytes = system.f_bavail * system.f_frsize
    assert float(free.replace(",", "")) * 2**20 == pytest.approx(free_bytes, rel=0.05)


FULL_DISK = """
import json, os, resource, sys
from transformers import TrainerCallback
from normalign_llava.train.parsing import parse
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
    sizes = dict(hidden_size=256, intermediate_size=2048, head_dim=128)
    return training.checkpoint(tmp_path_factory.mktemp("large"), **sizes)


def test_a_full_disk_leaves_the_last_checkpoint_and_no_half_of_a_model(
    prepared, tmp_path, parts, large
):
    half = max(file.stat().st_size for file in large.glob("*.safetensors")) // 2
    # What is too large first: text, the weights, or the optimizer's state, twice their size.
    limits = ["step-300", f"step-{half}", f"step-{half * 3}"]
    causes = dict(zip(limits, ("OSError", "NotWritable", "RuntimeError"), strict=True))
    ends = ["end-300", f"end-{half}"]  # the trainer's state, and the weights
    options = dict(model_name_or_path=str(large), max_steps=4, save_steps=2, save_total_limit=1)
    file = training.recipe(tmp_path, parts, use_cpu=True, **options)
    done = prepared.run(["-c", FULL_DISK, file, *causes, *ends], tmp_path)
    reports = json.loads(done.stdout)
    assert [folder for folder, *_ in reports] == [*causes, *ends]
    for folder, said, cause in reports[:3]:
        output = tmp_path / folder
        assert cause == causes[folder] and f"{folder}/checkpoint-4 could not be written: " in said
        assert f"--resume_from_checkpoint {folder}/checkpoint-2" in said
        assert [path.name for path in output.glob("*checkpoint*")] == ["checkpoint-2"]
        assert resolve_resume("last", output, 1) == output / "checkpoint-2"
    for folder, said, _ in reports[3:]:
        assert f"The trained model could not be written to {folder}: File too large. Make" in said
        assert not {"config.json", "training.json"} & {*os.listdir(tmp_path / folder)}
    output = main([file, "--resume_from_checkpoint", "--output_dir", str(tmp_path / folder)])
    assert NormAlignLlavaForConditionalGeneration.from_pretrained(output)


FROZEN = ("language_model", "vision_tower")
ADAPTERS = dict(use_peft=True, lora_r=32, language_learning_rate=1e-3, vision_learning_rate=None)


def weight_file(folder, module):
    return folder / f"model-{module}-00001-of-00001.safetensors"


def aligned(folder, checkpoint, resume=None, **options):
    """A run of stage 1 with two checkpoints."""
    fixed = dict(language_learning_rate=0.0, vision_learning_rate=0.0, save_strategy="steps")
    options = {**fixed, "max_steps": 2, "save_steps": 1, **options}
    trainer = training.trainer(folder, checkpoint, **options)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model()
    return trainer


def linked(folder, other) -> set[str]:
    """The modules whose files in two folders are one."""
    parts = (*FROZEN, "multi_modal_projector")
    return {part for part in parts if weight_file(folder, part).samefile(weight_file(other, part))}


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_frozen_modules_are_links_to_the_base_and_stay_whatever_becomes_of_it(checkpoint, tmp_path):
    base = shutil.copytree(checkpoint, tmp_path / "base")
    run = tmp_path / "run"
    run.mkdir()
    (run / "README.md").write_text("another card")
    trainer = aligned(run, base)
    assert [path.read_text() for path in run.rglob("README.md")] == ["another card"]  # nor TRL's
    saved = [run / "checkpoint-1", run / "checkpoint-2", run]
    for folder in saved:
        assert linked(folder, base) == {*FROZEN}
        assert {path.name for path in folder.glob("model[.-]*")} == stored.FILES
        loaded = NormAlignLlavaForConditionalGeneration.from_pretrained(folder)
    training.assert_equal(training.weights(loaded), training.weights(trainer.model))
    before = stored.weights(base)
    changed = {name for name, value in stored.weights(run).items() if (value != before[name]).any()}
    assert changed and all("multi_modal_projector" in name for name in changed)

    kept = [contents(folder) for folder in saved]
    stored.store(base, {name: value + 1 for name, value in before.items()})  # as every save of ours
    assert not linked(run, base) and [contents(folder) for folder in saved] == kept
    again = aligned(tmp_path / "again", run)
    again.save_model(str(saved[0]))  # into a folder whose files are others' too
    shutil.rmtree(base)
    assert [contents(folder) for folder in saved[1:]] == kept[1:]
    assert linked(saved[0], run) == {*FROZEN}


@pytest.mark.parametrize("how", ["in one file", "changed by hand", "from the Hub's cache"])
def test_what_the_base_does_not_hold_is_written_once(checkpoint, tmp_path, how):
    base = shutil.copytree(checkpoint, tmp_path / "base")
    run = tmp_path / "run"
    model = None
    if how == "in one file":
        stored.in_one_file(base)
    elif how == "changed by hand":
        model = NormAlignLlavaForConditionalGeneration.from_pretrained(base)
        with torch.no_grad():
            model.lm_head.weight.mul_(1.5)
    else:
        cache = tmp_path / "models--a--b"
        (cache / "snapshots" / "c").mkdir(parents=True)
        blobs = base.rename(cache / "blobs")
        base = cache / "snapshots" / "c"
        for file in blobs.iterdir():
            (base / file.name).symlink_to(Path("../../blobs") / file.name)
    trainer = aligned(run, base, model=model)
    saved = stored.weights(run)
    for name, value in trainer.model.state_dict().items():
        assert name == "lm_head.weight" or torch.equal(saved[name], value), name
    assert linked(run, run / "checkpoint-1") == linked(run / "checkpoint-2", run) == {*FROZEN}
    if how == "changed by hand":
        assert not linked(run, base)
    elif how == "from the Hub's cache":
        assert linked(run, base) == {*FROZEN}
        assert not any(weight_file(run, part).is_symlink() for part in FROZEN)
    else:  # a resumed run links to the checkpoint that it resumes from
        first = run / "checkpoint-1"
        second = run / "checkpoint-2"
        shutil.rmtree(second)
        aligned(run, base, resume=str(first))
        assert linked(second, first) == linked(run, first) == {*FROZEN}
        training.assert_equal(stored.weights(run), saved)


def test_frozen_modules_are_copied_where_links_cannot_be(checkpoint, tmp_path):
    shared = Path("/dev/shm")
    if not shared.is_dir() or shared.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is no other file system")
    with tempfile.TemporaryDirectory(dir=shared) as other:
        aligned(tmp_path, shutil.copytree(checkpoint, Path(other) / "base"))
    base = contents(checkpoint)
    for folder in (tmp_path / "checkpoint-1", tmp_path):
        for file in (weight_file(folder, module) for module in FROZEN):
            assert file.read_bytes() == base[file.name]


def bytes_of(folder) -> int:
    """Bytes of weights and optimizer, without links."""
    paths = [*folder.rglob("*.safetensors"), *folder.rglob("optimizer.pt")]
    return sum(path.stat().st_size for path in paths if path.stat().st_nlink == 1)


@pytest.mark.parametrize("how", ["align", "adapters", "one file"])
def test_what_a_run_writes_is_known_before_it_starts(tmp_path, large, how):
    options = {"max_steps": 5, "save_total_limit": 2, **(ADAPTERS if how == "adapters" else {})}
    if how == "one file":
        large = shutil.copytree(large, tmp_path / "large")
        stored.in_one_file(large)
    trainer = aligned(tmp_path / "run", large, **options)
    disk = trainer.facts["disk"]
    newest = tmp_path / "run" / "checkpoint-5"
    assert disk["checkpoints"] == 3  # while the newest is written
    assert bytes_of(newest) == pytest.approx(disk["checkpoint"], rel=0.05)
    written_once = FROZEN if how == "one file" else ()
    frozen = sum(weight_file(newest, part).stat().st_size for part in written_once)
    total = bytes_of(tmp_path / "run") + frozen + disk["checkpoint"]
    assert total == pytest.approx(disk["total"], rel=0.05)


def test_a_run_that_does_not_fit_the_disk_is_refused_before_its_first_step(checkpoint, tmp_path):
    trainer = training.trainer(tmp_path / "run", checkpoint, **SAVED)
    trainer.facts["disk"]["total"] = 10**15
    with pytest.raises(ValueError, match="1,000,000.0 GB .* to .*/run, where .*--save_total_limit"):
        trainer.train()
    assert trainer.state.global_step == 0 and not list((tmp_path / "run").glob("*"))


def test_files_that_others_hold_too_do_not_become_free(tmp_path):
    """A sparse file has a size beyond the disk, and takes none of it."""
    folder = tmp_path / "run" / "checkpoint-1"
    folder.mkdir(parents=True)
    weights = folder / "model-language_model-00001-of-00001.safetensors"
    weights.touch()
    os.truncate(weights, 10**12)
    needed = shutil.disk_usage(tmp_path).free + 5 * 10**11
    check_disk(tmp_path / "run", needed)  # the earlier checkpoint is removed meanwhile
    os.link(weights, tmp_path / "base.safetensors")
    with pytest.raises(ValueError, match="are to be written to .*/run.*--save_total_limit 1"):
        check_disk(tmp_path / "run", needed)


def test_after_a_stop_it_is_said_what_is_lost_and_how_to_go_on(run, tmp_path):
    assert checkpoints.after_stop(run, 1, 0) == "Nothing was trained."
    said = checkpoints.after_stop(run, 1, 4)
    assert "Step 4 " in said and said.count(f"--resume_from_checkpoint {run}/checkpoint-4") == 1
    assert "--resume" not in checkpoints.after_stop(run, 2, 4)  # of another number of processes
    assert "it is lost" in checkpoints.after_stop(tmp_path / "none", 1, 3)
    best = {"of_steps": 4}
    for record in ({"steps_done": 4, "best": None}, {"steps_done": 2, "best": best}):
        (run / "training.json").write_text(json.dumps(record))
        assert f"complete in {run}" in checkpoints.after_stop(run, 1, 4)
        assert "--resume" in checkpoints.after_stop(run, 1, 3)
    spaced = run.rename(tmp_path / "my run")
    assert f"'{spaced}/checkpoint-4'" in checkpoints.after_stop(spaced, 1, 5)  # as a shell reads it


def test_the_precision_of_a_run_is_that_of_the_named_or_newest_checkpoint(tmp_path, monkeypatch):
    def write(folder, **options):
        folder.mkdir(parents=True)
        (folder / "training.json").write_text(json.dumps({"options": options}))

    out = tmp_path / "out"
    named = tmp_path / "named"
    assert checkpoints.read_precision(True, str(out)) is None
    write(named, bf16=False, fp16=True)
    for step, bf16 in ((2, False), (10, True)):
        write(out / f"checkpoint-{step}", bf16=bf16)
    assert checkpoints.read_precision(str(named), str(out)) == (False, True)
    assert checkpoints.read_precision("last", str(out)) == (True, False)
    for content in ("{", "{}", json.dumps({"options": {"seed": 3}})):
        (out / "checkpoint-10" / "training.json").write_text(content)
        assert checkpoints.read_precision("last", str(out)) == (False, False)
    (tmp_path / "alone" / "trainer_output").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "alone")  # transformers' own folder
    (out / "checkpoint-2").rename("trainer_output/checkpoint-2")
    assert checkpoints.read_precision("last", None) == (False, False)
    write(tmp_path / "brief", bf16=True)
    assert checkpoints.read_precision(str(tmp_path / "brief"), None) == (True, False)


@pytest.mark.parametrize("error", [ValueError("no"), OSError(13, "Permission denied")])
def test_a_result_is_no_model_if_the_disk_is_full_and_stays_otherwise(tmp_path, error):
    def write():
        for name in ("config.json", "adapter_config.json", "training.json", "README.md"):
            (tmp_path / name).touch()

    with pytest.raises(type(error)) as raised, checkpoints.writing_result(tmp_path):
        write()
        raise error
    assert raised.value is error and len(list(tmp_path.iterdir())) == 4
    with pytest.raises(OSError, match="No space left"), checkpoints.writing_result(tmp_path):
        write()
        raise OSError(28, "No space left on device")
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]
    with pytest.raises(OSError, match="No space left"), checkpoints.writing_result(tmp_path):
        (tmp_path / "config.json").touch()  # the first of its files
        raise OSError(28, "No space left on device")
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]


@pytest.mark.parametrize("name", ["optimizer.bin", "scaler.pt", "rng_state_1.pth"])
def test_a_state_of_any_kind_that_is_damaged_is_named(run, name):
    folder = run / "checkpoint-4"
    shutil.copyfile(folder / "optimizer.pt", folder / name)
    with pytest.raises(KeyError), checkpoints.reading_checkpoint(folder):
        raise KeyError("of something else")  # every file is sound
    content = bytearray((folder / name).read_bytes())
    content[80:140] = b"\xff" * 60
    (folder / name).write_bytes(content)
    damaged = pytest.raises(ValueError, match=f"{folder}/{name} is damaged: what happened ")
    with damaged, checkpoints.reading_checkpoint(folder):
        raise RuntimeError("what happened\nin many lines")
    without_text = pytest.raises(ValueError, match=f"{name} is damaged: KeyError")
    with without_text, checkpoints.reading_checkpoint(folder):
        raise KeyError
    os.truncate(folder / name, 200)
    assert f"a whole {name} (it is damaged)" in checkpoints.missing_from(folder, 1)
    damaged = pytest.raises(ValueError, match=f"{folder}/{name} is damaged: what happened ")
    with damaged, checkpoints.reading_checkpoint(folder):
        raise RuntimeError("what happened")
    (folder / name).unlink()
    states = [path.name for path in checkpoints.state_files(folder)]
    assert states == sorted({"optimizer.pt", "rng_state.pth", "scheduler.pt"})


@pytest.mark.parametrize("how", ["damaged", "a link to nothing"])
def test_weights_that_cannot_be_read_are_named(tmp_path, how):
    file = tmp_path / "model.safetensors"
    if how == "damaged":
        file.write_bytes(b"\xff" * 60)
    else:
        file.symlink_to(tmp_path / "none")
    damaged = pytest.raises(ValueError, match=f"{file} is damaged: what happened")
    with damaged, checkpoints.reading_checkpoint(tmp_path):
        raise RuntimeError("what happened")


def test_an_error_that_is_no_checkpoint_s_stays_as_it_is():
    with pytest.raises(KeyError, match="else"), checkpoints.reading_checkpoint(None):
        raise KeyError("something else")


def test_the_first_process_alone_removes_an_earlier_folder(run, monkeypatch):
    folder = run / "checkpoint-4"
    monkeypatch.setenv("RANK", "1")
    with checkpoints.writing_checkpoint(folder, 1):
        assert missing_from(folder, 1) == []


def test_a_folder_that_cannot_be_written_to_is_named_with_its_option(tmp_path):
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "out"
    refused = pytest.raises(ValueError, match=f"{folder}.* cannot be written to")
    with refused, checkpoints.only_run(folder):
        raise AssertionError("it began")


def test_a_checkpoint_that_is_not_there_is_refused_with_those_that_are(run, tmp_path):
    for output, known in ((run, "checkpoint-2, checkpoint-4"), (tmp_path / "new", "no checkpoint")):
        with pytest.raises(ValueError, match=f"checkpoint-7 does not exist.*{output}.*{known}"):
            resolve_resume(str(run / "checkpoint-7"), output, 1)


def test_a_path_from_here_is_the_checkpoint_that_it_leads_to(run, monkeypatch):
    monkeypatch.chdir(run)
    assert resolve_resume("checkpoint-4", run, 1) == Path("checkpoint-4")
    with pytest.raises(ValueError, match="holds checkpoint-4. A later resume"):
        resolve_resume("checkpoint-2", run, 1)
    (run / "checkpoint-4" / "trainer_state.json").unlink()
    assert resolve_resume("checkpoint-2", run, 1) == Path("checkpoint-2")


@pytest.mark.parametrize("name", checkpoints.RESULT)
def test_a_model_is_not_written_over_and_a_run_with_one_goes_on(run, tmp_path, name):
    (tmp_path / "model").mkdir()
    for folder in (tmp_path / "model", run):
        (folder / name).write_text("{}")
    for resume in (None, "last"):
        with pytest.raises(ValueError, match="holds a model"):
            resolve_resume(resume, tmp_path / "model", 1)
    assert resolve_resume("last", run, 1) == run / "checkpoint-4"


def test_a_resumption_is_printed_by_the_first_process(run, monkeypatch, capsys):
    for word in ("yes", "ON"):
        assert resolve_resume(word, run, 1) == run / "checkpoint-4"
        assert f"Resuming from {run / 'checkpoint-4'}." in capsys.readouterr().err
    monkeypatch.setenv("RANK", "1")
    assert resolve_resume("last", run, 1) == run / "checkpoint-4"
    assert capsys.readouterr().err == ""


def test_what_earlier_checkpoints_hold_in_folders_becomes_free_too(tmp_path):
    folder = tmp_path / "run" / "checkpoint-1" / "optimizer_0"
    folder.mkdir(parents=True)
    (folder / "shard").touch()
    os.truncate(folder / "shard", 10**12)  # in a folder of a checkpoint too
    check_disk(tmp_path / "run", shutil.disk_usage(tmp_path).free + 5 * 10**11)
