# SPDX-License-Identifier: Apache-2.0
"""`push_to_hub`: real runs, in their own processes, that publish their result on a local hub."""

import json
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import stored
import training

from normalign_llava import NormAlignTrainer
from normalign_llava.hub_cards.card.metadata import by_hand, is_ours
from normalign_llava.hub_cards.card.write import render_card
from normalign_llava.hub_cards.push import checks, publish
from normalign_llava.hub_cards.push.repository import additions


pytestmark = pytest.mark.slow
REPO = "ann/tiny-llava"
HEAD = "<!-- by hand: notes -->\n"
END = "<!-- end by hand -->"
MODEL_FILES = {
    ".gitattributes",
    "publication.json",
    "README.md",
    "build.json",
    "training.json",
    "configuration_normalign_llava.py",
    "modeling_normalign_llava.py",
    "config.json",
    "generation_config.json",
    "chat_template.jinja",
    "processor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    *stored.FILES,
}
RUN = "import sys; from normalign_llava.train.run import main; main(sys.argv[1:])"
PYTHON = """
import sys
from normalign_llava.train.options import parse
from normalign_llava.train.run import make_trainer

trainer, _ = make_trainer(*parse(sys.argv[1:]))
trainer.train()
trainer.save_model(f"{trainer.args.output_dir}-elsewhere")
"""
BY_SAVING = f"{PYTHON}trainer.save_model()"
BY_PUSHING = f"{PYTHON}trainer.push_to_hub('a message', revision='trial')"


@pytest.fixture
def run(hub, prepared, tmp_path, parts, monkeypatch):
    """A run that publishes."""
    monkeypatch.setenv("HF_ENDPOINT", hub.url)  # of clean processes

    def start(token, code=RUN, **options):
        recipe = training.recipe(
            tmp_path,
            parts,
            save_strategy="steps",
            save_steps=1,
            push_to_hub=True,
            hub_model_id=REPO,
            learning_rate=1e-2,
            use_cpu=True,
            **options,
        )
        return prepared.run(["-c", code, recipe, "--hub_token", token])

    return start


def error_text(completed) -> str:
    return " ".join(completed.stderr.split())


def assert_holds_no_token(folder: Path, token: str) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            assert token.encode() not in path.read_bytes(), path


def earlier_publication(checkpoint) -> dict[str, bytes]:
    """A card with notes by Ann, files that are no longer written, and one by a person."""
    card = render_card(checkpoint).text
    card = card.replace(HEAD + END, f"{HEAD}Ask Ann.\n{END}")
    stale_files = {
        "model-00001-of-00002.safetensors": b"x" * 9,
        "model.safetensors.index.json": b"{}",
    }
    *_, publication = additions(stale_files)
    return {
        "README.md": card.encode(),
        "publication.json": publication.path_or_fileobj,
        "notes.txt": b"by a person",
        **stale_files,
    }


def test_a_run_publishes_its_result_once(hub, run, prepared, tmp_path, parts):
    hub_token = hub.token("ann")
    hub.create(REPO, files=earlier_publication(parts / "model"))
    completed = run(f"{hub_token}\n", save_total_limit=1)  # as a block of YAML gives it
    assert completed.returncode == 0, completed.stderr
    assert f"{hub.url}/{REPO}" in "".join(completed.stdout.split())
    assert hub_token not in completed.stdout
    assert hub_token not in completed.stderr
    assert_holds_no_token(tmp_path, hub_token)
    assert_holds_no_token(Path(prepared.environment["HF_HOME"]), hub_token)

    repository = hub.repository(REPO)
    assert len(repository.commits()) == 3
    assert set(repository.head().files) == MODEL_FILES | {"notes.txt"}
    for blob in repository.blobs.values():
        assert hub_token.encode() not in blob
    card = repository.read("README.md").decode()
    assert by_hand(card)["notes"] == "Ask Ann.\n"
    assert is_ours(card)
    output = tmp_path / "out"
    assert is_ours((output / "README.md").read_text())
    for weights_path in output.glob("*.safetensors"):
        assert repository.read(weights_path.name) == weights_path.read_bytes()


def weight_files(repository, branch) -> set[str]:
    return {path for path in repository.head(branch).files if path.endswith(".safetensors")}


def test_only_an_adapter_is_sent_if_its_base_is_on_the_hub(hub, run, parts):
    base_repository = hub.serve("lab/base", parts / "model")
    completed = run(
        hub.token("ann"),
        BY_SAVING,
        use_peft=True,
        lora_r=2,
        model_name_or_path="lab/base",
    )
    assert completed.returncode == 0, completed.stderr
    repository = hub.repository(REPO)
    # What is saved elsewhere is not published.
    assert len(repository.commits()) == 2
    assert weight_files(repository, "main") == {"adapter_model.safetensors"}
    config = json.loads(repository.read("adapter_config.json"))
    assert config["base_model_name_or_path"] == "lab/base"
    assert config["revision"] == base_repository.commit


@pytest.mark.nightly
def test_an_adapter_is_merged_to_be_sent_if_its_base_is_not_on_the_hub(hub, run, parts):
    hub.serve("lab/base", parts / "model")
    completed = run(hub.token("ann"), BY_PUSHING, use_peft=True, lora_r=2)
    assert completed.returncode == 0, completed.stderr
    repository = hub.repository(REPO)
    # What is saved elsewhere is not published, nor anything on another branch.
    assert len(repository.commits()) == 1
    expected = stored.FILES - {"model.safetensors.index.json"}
    assert weight_files(repository, "trial") == expected


def test_what_is_not_published_is_complete_and_its_command_is_named(hub, run, tmp_path):
    hub.fault(403, f"POST /api/models/{REPO}/commit")
    hub_token = hub.token("ann")
    completed = run(hub_token, hub_revision="trial", hub_private_repo=True)
    *_, refusal, remedy = completed.stderr.splitlines()
    assert completed.returncode != 0
    assert "(403)" in refusal
    assert hub_token not in completed.stdout
    assert hub_token not in completed.stderr
    output = tmp_path / "out"
    assert f"`normalign publish {output} --repo-id {REPO} --revision trial`" in remedy
    repository = hub.repository(REPO)
    assert repository.private
    assert set(repository.head().files) == {".gitattributes"}
    assert stored.weights(output)


def test_a_dry_run_checks_the_repository_and_creates_none(hub, run):
    completed = run(hub.token("bob"), dry_run=True)
    assert completed.returncode == 1
    assert f"not as {REPO}" in error_text(completed)
    completed = run(hub.token("ann"), dry_run=True)
    assert completed.returncode == 0, completed.stderr
    assert not hub.repositories, completed.stderr


def test_a_dry_run_checks_the_branch_that_is_published_to(hub, run):
    repository = hub.create(REPO, files={"README.md": b"# By hand"})
    repository.branches["trial"] = repository.head().oid
    repository.change({"README.md": b""})  # on main
    completed = run(hub.token("ann"), dry_run=True, hub_revision="trial")
    assert completed.returncode == 1
    assert "not written by this package" in error_text(completed)


@pytest.mark.parametrize(
    "account, role, files, reason",
    [
        pytest.param("ann", "read", {}, "The token of ann may only read", id="token"),
        pytest.param(
            "bob",
            "write",
            {},
            f"bob may publish as bob/... or lab/..., not as {REPO}",
            id="account",
        ),
        pytest.param(
            "ann",
            "write",
            {"README.md": b"# By hand"},
            "not written by this package",
            id="card",
        ),
        pytest.param(
            "ann",
            "write",
            {"model.safetensors": b"theirs"},
            "- model.safetensors would be",
            id="weights",
        ),
    ],
)
def test_a_run_that_could_not_publish_stops_at_once(hub, run, account, role, files, reason):
    if files:
        hub.create(REPO, files=files)
    hub_token = hub.token(account, role)
    completed = run(hub_token, dataset_name="none.json")
    assert completed.returncode == 1
    assert reason in error_text(completed)
    assert hub_token not in completed.stdout
    assert hub_token not in completed.stderr
    assert len(hub.repositories) == bool(files)


def test_adapters_of_a_base_on_the_hub_name_its_commit(hub, prepared, tmp_path, parts):
    """PEFT itself stores only the name, and the base may change later."""
    base_repository = hub.serve("ann/base", parts / "model")
    base_commit = base_repository.commits()[0].oid
    recipe = training.recipe(
        tmp_path,
        parts,
        model_name_or_path="ann/base",
        use_peft=True,
        use_cpu=True,
        max_steps=1,
    )
    completed = prepared.run(["-c", RUN, recipe])
    assert completed.returncode == 0, completed.stderr
    adapter_config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert adapter_config["base_model_name_or_path"] == "ann/base"
    assert adapter_config["revision"] == base_commit


class Pusher:
    """What a trainer needs to publish, and what was done with it in order."""

    def __init__(self, repo_id=REPO, revision=None, is_first=True):
        self.args = SimpleNamespace(output_dir="my run", hub_revision=revision)
        self.hub_model_id = repo_id
        self.hub_token = "of the options"
        self.calls = []
        self.is_world_process_zero = lambda: is_first

    def init_hf_repo(self, **options):
        self.calls.append(("init", options))

    def save_model(self, *arguments, **options):
        self.calls.append(("save", arguments, options))

    def publish(self, *arguments):
        self.calls.append(("publish", *arguments))
        return "published"


@pytest.fixture
def publications(monkeypatch):
    """Publishes nothing: what would be sent."""
    calls = []

    def send(*arguments, **options):
        calls.append((arguments, options))
        return "sent"

    monkeypatch.setattr(publish, "publish", send)
    monkeypatch.setattr(checks, "recorded_base", lambda folder: None)
    return calls


@pytest.mark.parametrize(
    "revision_of_options, revision, expected_revision",
    [
        (None, None, "main"),
        ("trial", None, "trial"),
        ("trial", "other", "other"),
    ],
)
@pytest.mark.parametrize(
    "token, expected_token",
    [
        (None, "of the options"),
        ("given", "given"),
    ],
)
def test_a_revision_and_a_token_that_are_given_come_first(
    publications, revision_of_options, revision, expected_revision, token, expected_token
):
    pusher = Pusher(revision=revision_of_options)
    assert NormAlignTrainer.publish(pusher, token, revision) == "sent"
    expected_options = {
        "revision": expected_revision,
        "as_adapter": False,
        "token": expected_token,
    }
    assert publications == [(("my run", REPO), expected_options)]


def test_another_process_than_the_first_publishes_nothing(publications):
    assert NormAlignTrainer.publish(Pusher(is_first=False)) is None
    assert not publications


@pytest.mark.parametrize(
    "base, adapter_words",
    [
        (None, []),
        ("lab/base", ["--adapter"]),
    ],
)
@pytest.mark.parametrize(
    "error, expected_class",
    [
        pytest.param(ValueError("no"), ValueError, id="no"),
        pytest.param(PermissionError(13, "denied"), OSError, id="denied"),
    ],
)
def test_what_was_not_published_can_be_by_the_command_that_is_named(
    monkeypatch, error, expected_class, base, adapter_words
):
    def fail(*arguments, **options):
        raise error

    monkeypatch.setattr(publish, "publish", fail)
    monkeypatch.setattr(checks, "recorded_base", lambda folder: base)
    with pytest.raises(expected_class) as caught:
        NormAlignTrainer.publish(Pusher(revision="trial"))
    assert type(caught.value) is expected_class
    assert caught.value.__cause__ is error
    command = str(caught.value).split("`")[1]
    expected_words = ["normalign", "publish", "my run", "--repo-id", REPO, "--revision", "trial"]
    assert shlex.split(command) == expected_words + adapter_words


SAVED = ("save", (), {"_internal_call": True})


def test_a_push_saves_and_then_publishes():
    pusher = Pusher()
    assert NormAlignTrainer.push_to_hub(pusher, "a message", revision="trial") == "published"
    assert pusher.calls == [SAVED, ("publish", None, "trial")]


@pytest.mark.parametrize(
    "token, expected_token",
    [
        (None, "of the options"),
        ("given", "given"),
    ],
)
def test_a_push_makes_the_repository_first_if_needed(token, expected_token):
    pusher = Pusher(repo_id=None)
    NormAlignTrainer.push_to_hub(pusher, token=token, private=True)
    made = ("init", {"token": expected_token, "private": True})
    assert pusher.calls == [made, SAVED, ("publish", token, None)]
