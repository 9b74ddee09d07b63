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
from normalign_llava.hub_cards.push.record import additions


pytestmark = pytest.mark.slow
REPO = "ann/tiny-llava"
HEAD = "<!-- by hand: notes -->\n"
END = "<!-- end by hand -->"
MODEL = {
    *(".gitattributes", "publication.json", "README.md", "build.json", "training.json"),
    *("configuration_normalign_llava.py", "modeling_normalign_llava.py", *stored.FILES),
    *("config.json", "generation_config.json", "chat_template.jinja"),
    *("processor_config.json", "tokenizer.json", "tokenizer_config.json"),
}
RUN = "import sys; from normalign_llava.train.run import main; main(sys.argv[1:])"
PYTHON = """
import sys
from normalign_llava.train.parsing import parse
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

    def run(token, code=RUN, **options):
        options |= dict(push_to_hub=True, hub_model_id=REPO, learning_rate=1e-2, use_cpu=True)
        file = training.recipe(tmp_path, parts, save_strategy="steps", save_steps=1, **options)
        return prepared.run(["-c", code, file, "--hub_token", token])

    return run


def test_a_run_publishes_its_result_once(hub, run, prepared, tmp_path, parts):
    token = hub.token("ann")
    card = render_card(parts / "model").text.replace(HEAD + END, f"{HEAD}Ask Ann.\n{END}")
    stale = {"model-00001-of-00002.safetensors": b"x" * 9, "model.safetensors.index.json": b"{}"}
    *_, record = additions(stale)  # of an earlier publication
    files = {"README.md": card.encode(), "publication.json": record.path_or_fileobj}
    hub.create(REPO, files={**files, "notes.txt": b"by a person", **stale})
    done = run(f"{token}\n", save_total_limit=1)  # as a block of YAML gives it
    assert done.returncode == 0, done.stderr
    assert f"{hub.url}/{REPO}" in "".join(done.stdout.split())
    written = [*tmp_path.rglob("*"), *Path(prepared.environment["HF_HOME"]).rglob("*")]
    assert not [path for path in written if path.is_file() and token.encode() in path.read_bytes()]
    assert token not in done.stdout + done.stderr

    repository = hub.repository(REPO)
    out = tmp_path / "out"
    assert len(repository.commits()) == 3 and set(repository.head().files) == MODEL | {"notes.txt"}
    assert not [blob for blob in repository.blobs.values() if token.encode() in blob]
    assert by_hand(text := repository.read("README.md").decode())["notes"] == "Ask Ann.\n"
    assert is_ours(text) and is_ours((out / "README.md").read_text())
    for path in out.glob("*.safetensors"):
        assert repository.read(path.name) == path.read_bytes()


@pytest.mark.parametrize("on_hub", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_an_adapter_is_sent_alone_if_its_base_is_on_the_hub(hub, run, parts, on_hub):
    base = {"model_name_or_path": "lab/base"} if on_hub else {}
    served = hub.serve("lab/base", parts / "model")
    code, branch = (BY_SAVING, "main") if on_hub else (BY_PUSHING, "trial")
    done = run(hub.token("ann"), code, use_peft=True, lora_r=2, **base)
    assert done.returncode == 0, done.stderr
    repository = hub.repository(REPO)
    files = repository.head(branch).files
    weights = {path for path in files if path.endswith(".safetensors")}
    # What is saved elsewhere is not published, nor anything on another branch.
    assert len(repository.commits()) == (2 if on_hub else 1)
    if not on_hub:
        assert weights == stored.FILES - {"model.safetensors.index.json"}
        return
    assert weights == {"adapter_model.safetensors"}
    config = json.loads(repository.read("adapter_config.json"))
    assert (config["base_model_name_or_path"], config["revision"]) == ("lab/base", served.commit)


def test_what_is_not_published_is_complete_and_its_command_is_named(hub, run, tmp_path):
    hub.fault(403, f"POST /api/models/{REPO}/commit")
    done = run(token := hub.token("ann"), hub_revision="trial", hub_private_repo=True)
    *_, refused, remedy = done.stderr.splitlines()
    assert done.returncode != 0 and "(403)" in refused and token not in done.stdout + done.stderr
    assert f"`normalign publish {tmp_path / 'out'} --repo-id {REPO} --revision trial`" in remedy
    repository = hub.repository(REPO)
    assert repository.private and set(repository.head().files) == {".gitattributes"}
    assert stored.weights(tmp_path / "out")


def test_a_dry_run_checks_the_repository_and_creates_none(hub, run):
    done = run(hub.token("bob"), dry_run=True)
    assert done.returncode == 1 and f"not as {REPO}" in " ".join(done.stderr.split())
    done = run(hub.token("ann"), dry_run=True)
    assert done.returncode == 0 and not hub.repositories, done.stderr
    repository = hub.create(REPO, files={"README.md": b"# By hand"})
    repository.branches["trial"] = repository.head().oid
    repository.change({"README.md": b""})  # on main
    done = run(hub.token("ann"), dry_run=True, hub_revision="trial")
    assert done.returncode == 1 and "not written by this package" in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("account", "role", "files", "reason"),
    [
        ("ann", "read", {}, "The token of ann may only read"),
        ("bob", "write", {}, f"bob may publish as bob/... or lab/..., not as {REPO}"),
        ("ann", "write", {"README.md": b"# By hand"}, "not written by this package"),
        ("ann", "write", {"model.safetensors": b"theirs"}, "- model.safetensors would be"),
    ],
)
def test_a_run_that_could_not_publish_stops_at_once(hub, run, account, role, files, reason):
    if files:
        hub.create(REPO, files=files)
    done = run(token := hub.token(account, role), dataset_name="none.json")
    assert done.returncode == 1 and reason in " ".join(done.stderr.split())
    assert token not in done.stdout + done.stderr and len(hub.repositories) == bool(files)


def test_adapters_of_a_base_on_the_hub_name_its_commit(hub, prepared, tmp_path, parts):
    """PEFT itself stores the name alone, and the base may change later."""
    base = hub.serve("ann/base", parts / "model")
    commit = base.commits()[0].oid
    options = dict(model_name_or_path="ann/base", use_peft=True, use_cpu=True, max_steps=1)
    done = prepared.run(["-c", RUN, training.recipe(tmp_path, parts, **options)])
    assert done.returncode == 0, done.stderr
    adapter = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == "ann/base"
    assert adapter["revision"] == commit


class Pusher:
    """What a trainer needs to publish, and what was done with it in order."""

    def __init__(self, repo_id=REPO, revision=None, first=True):
        self.args = SimpleNamespace(output_dir="my run", hub_revision=revision)
        self.hub_model_id = repo_id
        self.hub_token = "of the options"
        self.done = []
        self.is_world_process_zero = lambda: first

    def init_hf_repo(self, **given):
        self.done.append(("init", given))

    def save_model(self, *args, **given):
        self.done.append(("save", args, given))

    def publish(self, *args):
        self.done.append(("publish", *args))
        return "published"


@pytest.fixture
def sent(monkeypatch):
    """Publishes nothing: returns what would be sent, or raises an error that a test puts there."""
    calls = []

    def send(*args, **given):
        calls.append((args, given))
        if isinstance(calls[0], Exception):
            raise calls[0]
        return "sent"

    monkeypatch.setattr(publish, "publish", send)
    monkeypatch.setattr(checks, "recorded_base", lambda folder: None)
    return calls


@pytest.mark.parametrize(
    ("of_options", "given", "expected"),
    [(None, None, "main"), ("trial", None, "trial"), ("trial", "other", "other")],
)
def test_a_revision_and_a_token_that_are_given_come_first(sent, of_options, given, expected):
    for token in (None, "given"):
        pusher = Pusher(revision=of_options)
        assert NormAlignTrainer.publish(pusher, token, given) == "sent"
        named = dict(revision=expected, as_adapter=False, token=token or "of the options")
        assert sent.pop() == (("my run", REPO), named)


def test_another_process_than_the_first_publishes_nothing(sent):
    assert NormAlignTrainer.publish(Pusher(first=False)) is None
    assert not sent


@pytest.mark.parametrize("base", [None, "lab/base"])
@pytest.mark.parametrize("error", [ValueError("no"), PermissionError(13, "denied")], ids=str)
def test_what_was_not_published_can_be_by_the_command_that_is_named(sent, monkeypatch, error, base):
    monkeypatch.setattr(checks, "recorded_base", lambda folder: base)
    sent.append(error)
    kind = ValueError if isinstance(error, ValueError) else OSError
    with pytest.raises(kind) as caught:
        NormAlignTrainer.publish(Pusher(revision="trial"))
    assert type(caught.value) is kind and caught.value.__cause__ is error
    command = shlex.split(str(caught.value).split("`")[1])
    words = ["normalign", "publish", "my run", "--repo-id", REPO, "--revision", "trial"]
    assert command == words + ["--adapter"] * (base is not None)


def test_a_push_makes_the_repository_if_needed_saves_and_then_publishes():
    pusher = Pusher()
    assert NormAlignTrainer.push_to_hub(pusher, "a message", revision="trial") == "published"
    saved = ("save", (), {"_internal_call": True})
    assert pusher.done == [saved, ("publish", None, "trial")]
    for token in (None, "given"):
        pusher = Pusher(repo_id=None)
        NormAlignTrainer.push_to_hub(pusher, token=token, private=True)
        made = ("init", {"token": token or "of the options", "private": True})
        assert pusher.done == [made, saved, ("publish", token, None)]
