# SPDX-License-Identifier: Apache-2.0
"""`push_to_hub`: real runs, in processes of their own, that publish their result on the tests' hub."""

import json
from pathlib import Path

import pytest
import stored
import train_data
import training
from huggingface_hub import ModelCard

from normalign_llava.hub_cards.card.metadata import by_hand, is_ours
from normalign_llava.hub_cards.card.write import render_card


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
CALL = """
import sys
from normalign_llava.train.options.arguments import parse
from normalign_llava.train.run import make_trainer

trainer, _ = make_trainer(*parse(sys.argv[1:]))
trainer.push_to_hub(private=True)
"""


@pytest.fixture
def run(hub, prepared, tmp_path, parts, monkeypatch):
    """A run that publishes."""
    monkeypatch.setenv("HF_ENDPOINT", hub.url)  # of clean processes

    def run(token, script=RUN, **options):
        published = dict(push_to_hub=True, hub_model_id=REPO, save_strategy="steps", save_steps=1, use_cpu=True)
        file = training.recipe(tmp_path, parts, **{"learning_rate": 1e-2, **published, **options})
        return prepared.run(["-c", script, file, "--hub_token", token])

    return run


def test_a_run_publishes_its_result_once(hub, run, prepared, tmp_path, parts):
    token = hub.token("ann")
    card = render_card(parts / "model").text.replace(HEAD + END, f"{HEAD}Ask Ann.\n{END}")
    stale = {"model-00001-of-00002.safetensors": b"x" * 9, "model.safetensors.index.json": b"{}"}
    hub.create(REPO, files={"README.md": card.encode(), "notes.txt": b"by a person", **stale})
    done = run(f"{token}\n", save_total_limit=1)  # as a block of YAML gives it
    assert done.returncode == 0, done.stderr
    assert f"{hub.url}/{REPO}" in "".join(done.stdout.split())
    written = [*tmp_path.rglob("*"), *Path(prepared.environment["HF_HOME"]).rglob("*")]
    assert not [path for path in written if path.is_file() and token.encode() in path.read_bytes()]
    assert token not in done.stdout + done.stderr

    repository, out = hub.repository(REPO), tmp_path / "out"
    assert len(repository.commits()) == 3 and set(repository.head().files) == MODEL | {"notes.txt"}
    assert not [blob for blob in repository.blobs.values() if token.encode() in blob]
    assert by_hand(text := repository.read("README.md").decode())["notes"] == "Ask Ann.\n"
    assert is_ours(text) and is_ours((out / "README.md").read_text())
    for path in out.glob("*.safetensors"):
        assert repository.read(path.name) == path.read_bytes()


def test_what_is_not_published_is_complete_and_its_command_is_named(hub, run, tmp_path):
    hub.fault(403, f"POST /api/models/{REPO}/commit")
    done = run(token := hub.token("ann"), hub_revision="trial", hub_private_repo=True)
    *_, refused, remedy = done.stderr.splitlines()
    assert done.returncode != 0 and "(403)" in refused and token not in done.stdout + done.stderr
    assert f"`normalign publish {tmp_path / 'out'} --repo-id {REPO} --revision trial`" in remedy
    repository = hub.repository(REPO)
    assert repository.private and set(repository.head().files) == {".gitattributes"}
    assert stored.weights(tmp_path / "out")


@pytest.mark.parametrize(
    ("account", "role", "card", "reason"),
    [
        ("ann", "read", None, "The token of ann may only read"),
        ("bob", "write", None, f"bob may publish as bob/..., not as {REPO}"),
        ("ann", "write", b"# By hand", "not written by this package"),
    ],
)
def test_a_run_that_could_not_publish_is_refused_before_it_trains(hub, run, tmp_path, account, role, card, reason):
    options = {"dataset_name": str(tmp_path / "none.json")}  # who may not publish is told before it is looked for
    if card:
        options = {}
        hub.create(REPO, files={"README.md": card})
    done = run(token := hub.token(account, role), **options)
    assert done.returncode == 1 and reason in " ".join(done.stderr.split())
    assert token not in done.stdout + done.stderr and len(hub.repositories) == bool(card)
    assert not list((tmp_path / "out").glob("checkpoint-*"))


def test_a_call_publishes_an_adapter_with_its_base_s_commit_as_private_as_it_asks(hub, run, tmp_path, parts):
    base = hub.serve("bea/base", parts / "model")
    red = {"bytes": train_data.image_bytes("red"), "path": "red.png"}
    rows = [train_data.llava(f"<image>\nwhat is {i}?", f"it is {i}", red) for i in range(8)]
    train_data.write_parquet(tmp_path / "data" / "train.parquet", rows)
    (tmp_path / "data" / "README.md").write_text("---\nlicense: cc-by-4.0\nlanguage: en\n---\n")
    data = hub.serve("cyd/data", tmp_path / "data", kind="dataset")
    named = dict(model_name_or_path="bea/base", dataset_name="cyd/data", use_peft=True, push_to_hub=False)
    done = run(hub.token("ann"), script=CALL, **named)
    assert done.returncode == 0, done.stderr
    repository = hub.repository(REPO)
    assert repository.private and set(repository.head().files) == ADAPTER
    settings = json.loads(repository.read("adapter_config.json"))
    assert (settings["base_model_name_or_path"], settings["revision"]) == ("bea/base", base.commit)
    record = json.loads(repository.read("training.json"))
    assert record["model_revision"] == base.commit and record["before"] is None
    expected = {"id": "cyd/data", "revision": data.commit, "license": "cc-by-4.0", "language": ["en"]}
    assert record["data"][0]["dataset"] == expected
    card = ModelCard(repository.read("README.md").decode())
    assert "bea/base" in card.data.base_model and card.data.library_name == "peft"
