# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""`push_to_hub` of a training run: real runs, in processes of their own, that push to the tests' hub."""

import hashlib
import json
import signal
from pathlib import Path

import pytest
import stored
import train_data
from huggingface_hub import ModelCard

from normalign_llava.hub_cards.card.hand_written import by_hand, is_ours
from normalign_llava.hub_cards.card.write import render_card
from normalign_llava.hub_cards.push.clean_process import ask_clean_process
from normalign_llava.train.keeping.checkpoints import missing_from


pytestmark = pytest.mark.slow


REPO = "ann/tiny-llava"
HEAD, END = "<!-- by hand: notes -->\n", "<!-- end by hand -->"
MODEL = {
    *(".gitattributes", "README.md", "build.json", "chat_template.jinja", "config.json", "generation_config.json"),
    *("configuration_normalign_llava.py", "modeling_normalign_llava.py", "training.json"),
    *stored.FILES,
    *("processor_config.json", "tokenizer.json", "tokenizer_config.json"),
}
ADAPTER = MODEL - {
    *("config.json", "generation_config.json", "configuration_normalign_llava.py", "modeling_normalign_llava.py"),
    *stored.FILES,
} | {"adapter_config.json", "adapter_model.safetensors"}
RUN = "import sys; from normalign_llava.train.run import main; main(sys.argv[1:])"
KILLED = """
import os, signal, sys

def strike(event, arguments):
    if event == "os.link" and ".push-" in str(arguments):
        os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(strike)
"""


@pytest.fixture
def run(hub, prepared, tmp_path, parts, monkeypatch):
    """A run that pushes, or is killed while it stages a checkpoint."""
    monkeypatch.setenv("HF_ENDPOINT", hub.url)  # of clean processes

    def run(token, killed=False, **options):
        given = {
            "stage": "tune",
            "model_name_or_path": parts / "model",
            "dataset_name": parts / "data" / "data.json",
            "output_dir": tmp_path / "out",
            "global_batch_size": 2,
            "per_device_train_batch_size": 2,
            "learning_rate": 1e-2,
            "vision_learning_rate": 1e-2,
            "max_steps": 2,
            "bf16": False,
            "use_cpu": True,
            "report_to": "none",
            "disable_tqdm": True,
            "push_to_hub": True,
            "hub_model_id": REPO,
            "hub_token": token,
            "hub_always_push": True,
            "save_strategy": "steps",
            "save_steps": 1,
            **options,
        }
        words = (word for name, value in given.items() for word in (f"--{name}", value))
        return prepared.run(["-c", KILLED + RUN if killed else RUN, *words])

    return run


def commits(hub):
    """The commits of a run, oldest first: (title, paths)."""
    return [(commit.title, set(commit.files)) for commit in reversed(hub.repository(REPO).commits())][1:]


def check_published(hub, token):
    """What holds of every commit of every run: our card, no pickle, no token."""
    repository = hub.repository(REPO)
    for commit in repository.commits():
        if "README.md" in commit.files:
            card = ModelCard(repository.read("README.md", commit.oid).decode())
            assert is_ours(card.content) and card.data.tags and "trl" not in card.data.tags
            assert (card.data.library_name, card.data.pipeline_tag) != ("peft", "text-generation")
        assert "training_args.bin" not in {path.rpartition("/")[2] for path in commit.files}
        assert not [path for path in commit.files if "/" not in path and path.endswith((".bin", ".pt", ".pth"))]
    assert not [blob for blob in repository.blobs.values() if token.encode() in blob.read()]


def test_every_commit_of_a_run_is_a_repository_that_loads(hub, run, prepared, tmp_path, parts):
    token = hub.token("ann")
    card = render_card(parts / "model").text.replace(HEAD + END, f"{HEAD}Ask Ann.\n{END}")
    stale = {"model-00001-of-00002.safetensors": b"x" * 9, "model.safetensors.index.json": b"{}"}
    hub.create(REPO, files={"README.md": card.encode(), "notes.txt": b"by a person", **stale})
    done = run(f"{token}\n", save_total_limit=1)  # as a block of YAML gives it
    assert done.returncode == 0, done.stderr
    assert token not in done.stdout + done.stderr
    written = [*tmp_path.rglob("*"), *Path(prepared.environment["HF_HOME"]).rglob("*")]
    assert not [path for path in written if path.is_file() and token.encode() in path.read_bytes()]
    assert f"{hub.url}/{REPO}" in "".join(done.stdout.split())

    _, *of_run = commits(hub)
    expected = [f"Training in progress, step {step}" for step in (1, 2)] + ["End of training"]
    assert [title for title, _ in of_run] == expected
    assert all(paths == MODEL | {"notes.txt"} for _, paths in of_run)
    repository = hub.repository(REPO)
    assert by_hand(repository.read("README.md").decode())["notes"] == "Ask Ann.\n"
    assert ModelCard(repository.read("README.md").decode()).data.library_name == "transformers"
    check_published(hub, token)

    out = tmp_path / "out"
    assert is_ours((out / "README.md").read_text()) and not list(out.glob(".push*"))
    final, _, first = (commit.oid for commit in repository.commits()[:3])
    name = "model-multi_modal_projector-00001-of-00001.safetensors"
    early, trained = (repository.read(name, oid) for oid in (first, final))
    assert early != trained == (out / name).read_bytes()
    assert ask_clean_process(REPO, revision=first).logits
    seconds = [json.loads(repository.read("training.json", oid))["seconds"] for oid in (first, final)]
    assert 0 < seconds[0] < seconds[1]


def test_what_is_not_trained_is_sent_once(hub, run, tmp_path):
    done = run(hub.token("ann"), stage="align", vision_learning_rate=0)
    assert done.returncode == 0 and len(commits(hub)) == 3, done.stderr
    sent = {path.name: set() for path in (tmp_path / "out").glob("*.safetensors")}
    for path in (tmp_path / "out").rglob("*.safetensors"):
        sent[path.name].add(digest := hashlib.sha256(path.read_bytes()).hexdigest())
        assert hub.received[digest] == path.stat().st_size
    assert {name.split("-")[1]: len(found) for name, found in sent.items()} == {
        "language_model": 1,
        "vision_tower": 1,
        "multi_modal_projector": 2,  # the second checkpoint's is the result's
    }


def test_a_push_on_the_way_may_fail_and_the_last_may_not(hub, run, tmp_path):
    token = hub.token("ann")
    hub.fault(403, f"POST /api/models/{REPO}/commit", times=1)
    done = run(token, save_steps=2, hub_private_repo=True)
    assert done.returncode == 0, done.stderr
    assert f"checkpoint-2 was not pushed to {REPO}: " in done.stderr and "Training continues." in done.stderr
    assert [title for title, _ in commits(hub)] == ["End of training"] and hub.repository(REPO).private
    check_published(hub, token)

    hub.fault(403, f"POST /api/models/{REPO}/commit", times=1)
    again = run(token, output_dir=tmp_path / "again", hub_strategy="end")
    *_, refused, remedy = again.stderr.splitlines()
    assert again.returncode != 0 and "(403)" in refused
    assert f"`normalign publish {tmp_path / 'again'} --repo-id {REPO}`" in remedy
    assert token not in done.stderr + again.stdout + again.stderr
    assert len(commits(hub)) == 1
    assert missing_from(tmp_path / "again" / "checkpoint-2", 1) == []
    assert stored.weights(tmp_path / "again")


def test_a_resumed_run_removes_what_a_killed_push_has_left(hub, run, tmp_path):
    token, out = hub.token("ann"), tmp_path / "out"
    done = run(token, killed=True)
    assert done.returncode == -signal.SIGKILL and missing_from(out / "checkpoint-1", 1) == []
    (unfinished,) = out.glob(".push*")
    for own in (".push-me", ".push-my_notes"):
        (out / own).mkdir()
        (out / own / "notes.txt").write_text("by a person")
    done = run(token, resume_from_checkpoint="last")
    assert done.returncode == 0 and f"Resuming from {out / 'checkpoint-1'}" in " ".join(done.stderr.split())
    assert not unfinished.exists() and len(list(out.glob(".push*/notes.txt"))) == 2


def test_a_repository_of_someone_else_is_refused_before_training(hub, run, tmp_path):
    hub.create(REPO)
    done = run(token := hub.token("bob"))
    assert done.returncode == 1 and f"{REPO} belongs to ann, and the token to bob" in done.stderr
    assert token not in done.stdout + done.stderr
    assert not list((tmp_path / "out").glob("checkpoint-*")) and not commits(hub)


def test_a_dry_run_checks_the_repository_and_creates_none(hub, run):
    done = run(hub.token("bob"), dry_run=True)
    assert done.returncode == 1 and f"{REPO} belongs to ann, and the token to bob" in done.stderr
    name = REPO.partition("/")[2]
    assert run(hub.token("ann"), dry_run=True, hub_model_id=name).returncode == 0 and not hub.repositories
    hub.create(REPO, files={"README.md": b"# By hand"})
    done = run(hub.token("ann"), dry_run=True, hub_model_id=name)
    assert done.returncode == 1 and REPO in done.stderr and "card" in done.stderr


def test_the_last_checkpoint_is_pushed_and_can_be_resumed_from(hub, run, tmp_path):
    token = hub.token("ann")
    hub.create(REPO, files={f"last-checkpoint/rng_state_{rank}.pth": b"of a run on two processes" for rank in (0, 1)})
    options = {"hub_strategy": "checkpoint", "hub_revision": "trial", "save_strategy": "steps", "save_steps": 2}
    done = run(token, **options)
    assert done.returncode == 0, done.stderr
    repository = hub.repository(REPO)
    inside = {path for path in repository.head("trial").files if path.startswith("last-checkpoint/")}
    assert set(repository.head("trial").files) - inside == MODEL
    assert len(repository.commits("main")) == 2
    folder = tmp_path / "checkpoint-2"
    for path in inside:
        folder.mkdir(exist_ok=True)
        (folder / path.rpartition("/")[2]).write_bytes(repository.read(path, "trial"))
    assert missing_from(folder, 1) == [] and not (folder / "training_args.bin").exists()
    assert not [blob for blob in repository.blobs.values() if token.encode() in blob.read()]

    options = {"resume_from_checkpoint": folder, "output_dir": tmp_path / "resumed", "hub_strategy": "end"}
    resumed = run(token, **{**options, "max_steps": 3})
    assert resumed.returncode == 0, resumed.stderr
    assert json.loads((tmp_path / "resumed" / "trainer_state.json").read_text())["global_step"] == 3


def test_an_adapter_names_its_base_on_the_hub_by_its_commit(hub, run, tmp_path, parts):
    token = hub.token("ann")
    base = hub.serve("bea/base", parts / "model")
    red = {"bytes": train_data.image_bytes("red"), "path": "red.png"}
    rows = [train_data.llava(f"<image>\nwhat is {i}?", f"it is {i}", red) for i in range(8)]
    train_data.write_parquet(tmp_path / "data" / "train.parquet", rows)
    (tmp_path / "data" / "README.md").write_text("---\nlicense: cc-by-4.0\nlanguage: en\n---\n")
    data = hub.serve("cyd/data", tmp_path / "data", kind="dataset")
    options = {"model_name_or_path": "bea/base", "dataset_name": "cyd/data", "use_peft": True, "save_steps": 2}
    done = run(token, **options)
    assert done.returncode == 0, done.stderr
    assert all(paths == ADAPTER for _, paths in commits(hub)) and len(commits(hub)) == 2
    repository = hub.repository(REPO)
    settings = json.loads(repository.read("adapter_config.json"))
    assert (settings["base_model_name_or_path"], settings["revision"]) == ("bea/base", base.commit)
    record = json.loads(repository.read("training.json"))
    assert record["model_revision"] == base.commit and record["before"] is None
    expected = {"id": "cyd/data", "revision": data.commit, "license": "cc-by-4.0", "language": ["en"]}
    assert record["data"][0]["dataset"] == expected
    card = ModelCard(repository.read("README.md").decode())
    assert card.data.base_model == "bea/base" or "bea/base" in card.data.base_model
    check_published(hub, token)


def test_an_adapter_of_a_local_folder_is_pushed_without_its_path(hub, run, prepared, tmp_path, parts):
    token = hub.token("ann")
    done = run(token, use_peft=True, save_steps=2, hub_strategy="checkpoint")
    assert done.returncode == 0, done.stderr
    assert "nobody else can load the adapter" in done.stderr and "`normalign publish`" in done.stderr
    repository = hub.repository(REPO)
    assert json.loads(repository.read("adapter_config.json"))["base_model_name_or_path"] == "model"
    assert not [blob for blob in repository.blobs.values() if str(parts).encode() in blob.read()]
    assert "last-checkpoint/adapter_config.json" in repository.head().files
    for folder in (tmp_path / "out", tmp_path / "out" / "checkpoint-2"):
        kept = json.loads((folder / "adapter_config.json").read_text())
        assert kept["base_model_name_or_path"] == str(parts / "model")  # which merging needs
    check_published(hub, token)
