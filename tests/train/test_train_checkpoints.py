# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Trainer checkpoints, written by TRL's trainer: complete or not, which one to resume from, full disks and kills."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import tiny_parts as parts
import torch
import torch.distributed.checkpoint as dcp
from datasets import Dataset
from paths import HELPERS
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import AutoProcessor, TrainerCallback
from trl import SFTConfig, SFTTrainer

from normalign_llava import NormAlignLlavaForConditionalGeneration
from normalign_llava.assembly.build import build_checkpoint
from normalign_llava.assembly.merge import merge_adapter
from normalign_llava.train.checkpoints import missing_from, newest_complete, writing_checkpoint
from normalign_llava.train.resume import resolve_resume


pytestmark = pytest.mark.slow


class SafeTrainer(SFTTrainer):
    def _save_checkpoint(self, model, trial):
        with writing_checkpoint(Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}", 1):
            super()._save_checkpoint(model, trial)


class LimitFileSize(TrainerCallback):
    """From the third step on, no file may grow beyond `limit` bytes; trying is an error, or deadly."""

    def __init__(self, limit, deadly=False):
        self.limit, self.deadly = limit, deadly

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 2:
            if self.deadly:
                signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.limit, resource.RLIM_INFINITY))


def make_trainer(untrained, output, cls=SafeTrainer, peft=False, callbacks=None, **options):
    options = {"max_steps": 4, "save_steps": 2, **options}
    arguments = SFTConfig(
        output_dir=str(output), per_device_train_batch_size=2, logging_steps=1, report_to="none", use_cpu=True,
        bf16=False, gradient_checkpointing=False, max_length=None, disable_tqdm=True, **options,
    )  # fmt: skip
    lora = LoraConfig(r=2, target_modules=r".*language_model.*q_proj", modules_to_save=["multi_modal_projector"])
    return cls(
        model=NormAlignLlavaForConditionalGeneration.from_pretrained(untrained, dtype=torch.float32),
        args=arguments,
        train_dataset=Dataset.from_dict({"text": ["the quick brown fox", "jumps over the lazy dog"] * 8}),
        processing_class=AutoProcessor.from_pretrained(untrained),
        peft_config=lora if peft else None,
        callbacks=callbacks,
    )


@pytest.fixture(scope="module")
def untrained(tmp_path_factory):
    """A tiny checkpoint, and a larger one whose saving takes long enough to be interrupted."""
    root = tmp_path_factory.mktemp("parts")
    vision = parts.vision(root / "vision", "siglip")
    for name, sizes in {"tiny": {}, "large": dict(hidden_size=256, intermediate_size=2048, head_dim=128)}.items():
        build_checkpoint(vision, parts.language(root / f"{name}-language", **sizes), root / name)
    return root


@pytest.fixture(scope="module")
def runs(untrained, tmp_path_factory):
    """Two runs with checkpoint-2 and checkpoint-4 each: everything trained, and LoRA."""
    root = tmp_path_factory.mktemp("runs")
    for name in ("full", "lora"):
        make_trainer(untrained / "tiny", root / name, peft=name == "lora").train()
    return root


NEEDED = {
    "full": ["model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"],
    "lora": [
        "adapter_model.safetensors", "adapter_config.json", "optimizer.pt", "scheduler.pt", "rng_state.pth",
        "trainer_state.json",
    ],
}  # fmt: skip


@pytest.mark.parametrize("run", NEEDED)
def test_a_checkpoint_lacks_nothing_until_a_file_is_deleted_or_cut(runs, tmp_path, run):
    written = runs / run / "checkpoint-4"
    assert missing_from(written, 1) == []
    for name in NEEDED[run]:
        folder = tmp_path / name / "checkpoint-4"
        shutil.copytree(written, folder)
        size = (folder / name).stat().st_size
        last = size - 2 if name.endswith(".json") else size - 1  # JSON may end in a newline
        for length in (last, size - 30, size // 2, 9, 1, 0):
            os.truncate(folder / name, length)
            (found,) = missing_from(folder, 1)
            assert found.startswith(f"{name} (cut short"), (length, found)
        (folder / name).unlink()
        (found,) = missing_from(folder, 1)
        assert name in found


def test_every_file_that_shows_its_end_is_looked_at(runs, tmp_path):
    folder = tmp_path / "checkpoint-4"
    shutil.copytree(runs / "full" / "checkpoint-4", folder)
    names = ("config.json", "tokenizer.json", "processor_config.json", "training_args.bin")
    for name in names:
        os.truncate(folder / name, (folder / name).stat().st_size - 2)
    assert sorted(missing_from(folder, 1)) == sorted(f"{name} (cut short)" for name in names)
    assert missing_from(tmp_path / "checkpoint-9", 1) == ["the folder itself"]


def test_a_checkpoint_in_another_s_folder_is_named(runs, tmp_path):
    shutil.copytree(runs / "full" / "checkpoint-2", tmp_path / "checkpoint-4")
    assert missing_from(tmp_path / "checkpoint-4", 1) == ["trainer_state.json of step 4 (it is of step 2)"]
    shutil.copytree(runs / "full" / "checkpoint-2", tmp_path / "kept")  # under a name of the user's own
    assert missing_from(tmp_path / "kept", 1) == []


def test_shards_that_an_index_names(runs, tmp_path):
    folder = tmp_path / "checkpoint-4"
    shutil.copytree(runs / "full" / "checkpoint-4", folder)
    (folder / "model.safetensors").unlink()
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(runs / "full" / "checkpoint-4")
    model.save_pretrained(folder, max_shard_size="30KB")
    first, second, *_ = sorted(path.name for path in folder.glob("model-*.safetensors"))
    assert missing_from(folder, 1) == []
    os.truncate(folder / first, 500)
    (folder / second).unlink()
    cut, absent = sorted(missing_from(folder, 1))
    assert cut.startswith(f"{first} (cut short")
    assert absent == f"model.safetensors.index.json (the shards {second} are missing)"


def test_the_random_states_are_those_of_as_many_processes(runs, tmp_path):
    one = runs / "full" / "checkpoint-4"
    assert missing_from(one, 2) == [
        "rng_state_0.pth, rng_state_1.pth of a run of 2 process(es) (it holds random states of 1)"
    ]
    two = tmp_path / "checkpoint-4"
    shutil.copytree(one, two)
    shutil.copyfile(two / "rng_state.pth", two / "rng_state_1.pth")
    (two / "rng_state.pth").rename(two / "rng_state_0.pth")
    assert missing_from(two, 2) == []
    assert missing_from(two, 1) == ["rng_state.pth of a run of 1 process(es) (it holds random states of 2)"]
    shutil.copyfile(two / "rng_state_0.pth", two / "rng_state_2.pth")
    assert missing_from(two, 2) == ["random states of a run of 2 process(es) (it holds random states of 3)"]
    (two / "rng_state_1.pth").unlink()
    assert missing_from(two, 3) == ["rng_state_1.pth of a run of 3 process(es) (it holds random states of 2)"]


def test_fsdp_s_folders_of_shards(runs, tmp_path):
    folder = tmp_path / "checkpoint-4"
    shutil.copytree(runs / "full" / "checkpoint-4", folder)
    model = load_file(folder / "model.safetensors")
    for name in ("model.safetensors", "optimizer.pt"):
        (folder / name).unlink()
    for name in ("pytorch_model_fsdp_0", "optimizer_0"):
        dcp.save({"state": model}, storage_writer=dcp.FileSystemWriter(folder / name), no_dist=True)
    assert missing_from(folder, 1) == []
    (shard,) = (folder / "optimizer_0").glob("*.distcp")
    os.truncate(shard, shard.stat().st_size // 2)
    assert missing_from(folder, 1) == [f"optimizer_0/.metadata ({shard.name} missing or cut short)"]
    os.truncate(folder / "pytorch_model_fsdp_0" / ".metadata", 40)
    assert missing_from(folder, 1)[1].startswith("pytorch_model_fsdp_0/.metadata (cut short")
    for name in ("pytorch_model_fsdp_0", "optimizer_0"):
        (folder / name / ".metadata").unlink()
    assert missing_from(folder, 1) == ["pytorch_model_fsdp_0/.metadata", "optimizer_0/.metadata"]
    shutil.rmtree(folder / "optimizer_0")
    assert missing_from(folder, 1) == ["pytorch_model_fsdp_0/.metadata", "optimizer_0/.metadata"]

    shutil.rmtree(folder / "pytorch_model_fsdp_0")
    for name in ("pytorch_model_fsdp.bin", "optimizer.bin"):
        torch.save(model, folder / name)
    assert missing_from(folder, 1) == []
    (folder / "pytorch_model_fsdp.bin").unlink()
    shutil.copyfile(runs / "full" / "checkpoint-4" / "model.safetensors", folder / "model.safetensors")
    assert missing_from(folder, 1) == ["pytorch_model_fsdp.bin"]  # FSDP does not go on from the other


def test_deepspeed_s_folder(runs, tmp_path):
    folder = tmp_path / "checkpoint-4"
    shutil.copytree(runs / "full" / "checkpoint-4", folder)
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        (folder / name).unlink()
    states = folder / "global_step4"
    states.mkdir()
    assert missing_from(folder, 2)[0] == "latest"
    for rank in range(2):
        torch.save({}, states / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        torch.save({}, folder / f"rng_state_{rank}.pth")
    torch.save({}, states / "mp_rank_00_model_states.pt")
    (folder / "latest").write_text("global_step4")
    assert missing_from(folder, 2) == []
    os.truncate(states / "mp_rank_00_model_states.pt", 100)
    (states / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    assert missing_from(folder, 2) == [
        "global_step4/mp_rank_00_model_states.pt (cut short)",
        "global_step4/*zero_pp_rank_1_*optim_states.pt",
    ]


def test_the_newest_complete_one_is_found_by_number(runs, tmp_path):
    assert newest_complete(tmp_path / "none", 1) == (None, {})
    for step in (2, 4):
        shutil.copytree(runs / "full" / f"checkpoint-{step}", tmp_path / f"checkpoint-{step}")
    os.utime(tmp_path / "checkpoint-2")
    (tmp_path / "checkpoint-10").mkdir()
    (tmp_path / "checkpoint-best").mkdir()
    (tmp_path / "checkpoint-30").touch()
    found, passed_over = newest_complete(tmp_path, 1)
    assert found == tmp_path / "checkpoint-4"
    assert (
        list(passed_over) == [tmp_path / "checkpoint-10"] and "optimizer.pt" in passed_over[tmp_path / "checkpoint-10"]
    )
    (tmp_path / "checkpoint-4" / "optimizer.pt").unlink()
    assert newest_complete(tmp_path, 1)[0] == tmp_path / "checkpoint-2"
    assert (tmp_path / "checkpoint-10").exists()  # nothing is removed by looking


def test_what_is_gone_on_from(runs, tmp_path, capsys):
    assert resolve_resume(None, tmp_path / "none", 1) is None and resolve_resume(False, tmp_path, 1) is None
    assert resolve_resume("last", tmp_path, 1) is None
    assert f"from the beginning: {tmp_path} holds no complete checkpoint" in capsys.readouterr().err
    for step in (2, 4):
        shutil.copytree(runs / "full" / f"checkpoint-{step}", tmp_path / f"checkpoint-{step}")
    for value in ("last", "true", "True", True):
        assert resolve_resume(value, tmp_path, 1) == tmp_path / "checkpoint-4"
    with pytest.raises(ValueError, match="checkpoint-2, checkpoint-4.*--resume_from_checkpoint.*--output_dir"):
        resolve_resume(None, tmp_path, 1)
    assert resolve_resume(str(tmp_path / "checkpoint-2"), tmp_path / "elsewhere", 1) == tmp_path / "checkpoint-2"

    (tmp_path / "checkpoint-4" / "optimizer.pt").unlink()
    with pytest.raises(ValueError, match="checkpoint-4 is not complete. It lacks: optimizer.pt. Name a complete one"):
        resolve_resume(str(tmp_path / "checkpoint-4"), tmp_path, 1)
    capsys.readouterr()
    assert resolve_resume("last", tmp_path, 1) == tmp_path / "checkpoint-2"
    said = capsys.readouterr().err
    assert f"Passed over {tmp_path / 'checkpoint-4'}, which is not complete. It lacks: optimizer.pt." in said
    assert f"Resuming from {tmp_path / 'checkpoint-2'}." in said


def test_a_checkpoint_of_weights_alone_cannot_be_gone_on_from(untrained, tmp_path):
    make_trainer(untrained / "tiny", tmp_path, max_steps=1, save_steps=1, save_only_model=True).train()
    with pytest.raises(ValueError, match="was it written with save_only_model?"):
        resolve_resume(str(tmp_path / "checkpoint-1"), tmp_path, 1)
    with pytest.raises(ValueError, match="would write over checkpoints that were saved whole.*checkpoint-1"):
        resolve_resume("last", tmp_path, 1)


def test_what_lies_in_the_folder_is_not_lost(runs, tmp_path):
    shutil.copytree(runs / "full" / "checkpoint-2", tmp_path / "checkpoint-2")
    (tmp_path / "checkpoint-2" / "rng_state.pth").rename(tmp_path / "checkpoint-2" / "rng_state_0.pth")
    with pytest.raises(ValueError, match="from the beginning would write over.*as many processes as wrote them"):
        resolve_resume("last", tmp_path, 1)
    with pytest.raises(ValueError, match="holds checkpoints of another run"):
        resolve_resume(str(runs / "full" / "checkpoint-4"), tmp_path, 1)
    shutil.rmtree(tmp_path / "checkpoint-2")
    (tmp_path / "config.json").write_text("{}")
    for resume in (None, "last"):
        with pytest.raises(ValueError, match="Choose another|choose another"):
            resolve_resume(resume, tmp_path, 1)
    with pytest.raises(ValueError, match="config.json is a file"):
        resolve_resume(None, tmp_path / "config.json", 1)


def test_why_the_trainer_s_own_choice_will_not_do(untrained, runs, tmp_path):
    """Without optimizer.pt the Trainer goes on, says nothing, and counts Adam's steps from 1."""
    shutil.copytree(runs / "full" / "checkpoint-4", tmp_path / "checkpoint-4")
    counts = []
    for _ in range(2):
        trainer = make_trainer(untrained / "tiny", tmp_path, cls=SFTTrainer, max_steps=5, save_strategy="no")
        trainer.train(resume_from_checkpoint=True)
        counts.append({int(state["step"]) for state in trainer.optimizer.state.values()})
        (tmp_path / "checkpoint-4" / "optimizer.pt").unlink(missing_ok=True)
    assert counts == [{5}, {1}]


def test_a_checkpoint_of_an_adapter_merges(untrained, runs, tmp_path):
    report = merge_adapter(runs / "lora" / "checkpoint-4", tmp_path / "merged", base_quantization="none")
    assert (report.rank, report.base) == (2, str(untrained / "tiny")) and report.difference < 1e-5
    assert not list((tmp_path / "merged").glob("*.pt*"))  # no optimizer, no arguments


def test_a_folder_of_that_name_does_not_mix_with_the_new_one(runs, tmp_path):
    folder = tmp_path / "checkpoint-4"
    shutil.copytree(runs / "full" / "checkpoint-4", folder)
    with writing_checkpoint(folder, 1):
        assert not folder.exists()
        folder.mkdir()
        (folder / "new").touch()
    assert [path.name for path in folder.iterdir()] == ["new"]
    for error in (ValueError("no"), OSError(13, "Permission denied"), KeyboardInterrupt()):
        with pytest.raises(type(error)) as raised, writing_checkpoint(folder, 1):
            folder.mkdir(exist_ok=True)
            raise error
        assert raised.value is error and folder.exists()


CHILD = """
    import json, resource, sys
    from pathlib import Path
    sys.path[:0] = {tests!r}
    from test_train_checkpoints import LimitFileSize, make_trainer
    what, untrained, output = sys.argv[1], Path(sys.argv[2]) / "large", Path(sys.argv[3])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if what == "run":
        make_trainer(untrained, output, max_steps=50).train()
    for number in map(int, sys.argv[4:]):
        limit = LimitFileSize(number, deadly=what == "die")
        try:
            make_trainer(untrained, output / str(number), callbacks=[limit], save_total_limit=1).train()
        except OSError as error:
            print(json.dumps(["limit", number, type(error).__name__, str(error), type(error.__cause__).__name__]))
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
"""


def start(what, untrained, *arguments):
    source = textwrap.dedent(CHILD).format(tests=[str(HELPERS), str(Path(__file__).parent)])
    command = [sys.executable, "-c", source, what, str(untrained), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_full_disk_is_an_error_that_says_what_to_do_and_leaves_the_last_checkpoint(untrained, tmp_path):
    weights = (untrained / "large" / "model.safetensors").stat().st_size
    # The first file that cannot be written is text, the weights, or the optimizer's, which is twice as large.
    limits = {300: "OSError", weights // 2: "SafetensorError", weights * 3 // 2: "RuntimeError"}
    out, err = start("full disk", untrained, tmp_path, *limits).communicate()
    reports = [json.loads(line) for line in out.splitlines() if line.startswith('["limit"')]
    assert [(number, cause) for _, number, _, _, cause in reports] == list(limits.items()), err
    for _, number, kind, said, _ in reports:
        output = tmp_path / str(number)
        assert kind == "OSError"
        assert f"The checkpoint {output / 'checkpoint-4'} could not be written: " in said
        assert "MiB are free there" in said and "checkpoint-2 takes" in said
        assert f"The last complete checkpoint is {output / 'checkpoint-2'}." in said
        for option in ("--save_total_limit", "--output_dir", f"--resume_from_checkpoint {output / 'checkpoint-2'}"):
            assert option in said
        assert [path.name for path in output.glob("*checkpoint*")] == ["checkpoint-2"]
        assert resolve_resume("last", output, 1) == output / "checkpoint-2"


def loads(folder: Path) -> bool:
    """Whether all that going on needs can be read, by reading all of it."""
    try:
        load_file(folder / "model.safetensors")
        for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
            torch.load(folder / name, weights_only=False)
        return json.loads((folder / "trainer_state.json").read_text())["global_step"] > 0
    except Exception:
        return False


@pytest.mark.parametrize("share, last", [(0.5, "model.safetensors"), (1.5, "optimizer.pt")])
def test_death_in_the_middle_of_a_file_leaves_a_checkpoint_that_is_passed_over(untrained, tmp_path, share, last):
    limit = int(share * (untrained / "large" / "model.safetensors").stat().st_size)
    process = start("die", untrained, tmp_path, limit)
    _, err = process.communicate()
    assert process.returncode == -signal.SIGXFSZ, err
    output = tmp_path / str(limit)
    found, passed_over = newest_complete(output, 1)
    assert found == output / "checkpoint-2" and loads(found) and not loads(output / "checkpoint-4")
    (missing,) = passed_over.values()
    assert any(last in phrase for phrase in missing) and "trainer_state.json" in missing


def test_a_kill_while_saving_leaves_what_is_judged_rightly(untrained, tmp_path):
    process = start("run", untrained, tmp_path)
    while process.poll() is None and not (tmp_path / "checkpoint-6" / "model.safetensors").exists():
        time.sleep(0.0005)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    folders = {int(path.name.rpartition("-")[2]): path for path in tmp_path.glob("checkpoint-*")}
    verdicts = {step: not missing_from(path, 1) for step, path in folders.items()}
    assert verdicts == {step: loads(path) for step, path in folders.items()}
    assert verdicts[2] and verdicts[4] and 6 in verdicts
    newest = max(step for step, complete in verdicts.items() if complete)
    assert resolve_resume("last", tmp_path, 1) == folders[newest]
