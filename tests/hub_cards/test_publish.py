# SPDX-License-Identifier: Apache-2.0
"""`normalign publish` when nothing goes wrong: what is then on the Hub, and whose files stay."""

import hashlib
import json
import shutil

import pytest
import stored
import torch

from normalign_llava import NormAlignLlavaForConditionalGeneration
from normalign_llava.hub_cards.card.write import render_card


pytestmark = pytest.mark.slow
OTHERS = {".gitattributes", "publication.json"}  # beside what the folder has
SUMMARY = b'{"schema_version": 2, "evaluations": []}'
OWN_CARD = "---\nlicense: mit\n---\n# My page\n\nWhat nobody else knows.\n"


def test_a_model_is_published_whole_and_loads_from_its_commit(publish, hub, folder, tmp_path):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    status, shown = publish(folder, "--private", "--space", TMPDIR=str(tmp_path))
    assert status == 0, shown
    repository = hub.repository("ann/m")
    space = hub.repository("ann/m-demo", "space")
    assert repository.private and space.private
    assert f"{hub.url}/spaces/ann/m-demo/settings." in shown
    assert f"Commit: {repository.commit}" in shown and len(repository.commits()) == 2
    assert repository.commit in space.read("space.json").decode()
    assert set(repository.head().files) == {*OTHERS, "README.md", *before}
    assert all(repository.read(name) == content for name, content in before.items())
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert not list(tmp_path.glob("clean-process-*"))


def test_published_again_nothing_changes_and_one_file_is_one_commit(publish, hub, folder):
    assert publish(folder, "--no-verify")[0] == 0
    repository = hub.repository("ann/m")
    first = repository.commit
    received = hub.received.total()
    status, shown = publish(folder, "--no-verify")
    assert status == 0 and "nothing changed" in shown and repository.commit == first
    (folder / "training.json").write_text('{"seconds": 1.5}')
    assert publish(folder, "--no-verify", "--revision", "trial/2")[0] == 0
    assert repository.commit == first == repository.head("trial/2").parent
    assert "training.json" in repository.head("trial/2").files and hub.received.total() == received


def test_a_pull_request(publish, hub, folder):
    theirs = hub.create("bob/m", files={"config.json": b"{}"})
    before = theirs.head()
    proposal = ["--create-pr", "--no-verify", "--repo-id", "bob/m"]
    status, shown = publish(folder, *proposal)
    assert status == 1 and "- config.json would be overwritten" in shown
    assert set(theirs.branches) == {"main"}
    status, shown = publish(folder, *proposal, "--replace-files")
    proposed = theirs.head("refs/pr/1")
    assert theirs.head() == before and proposed.parent == before.oid
    assert set(proposed.files) >= stored.FILES
    assert status == 0 and f"Pull request: {hub.url}/bob/m/discussions/1" in shown


def test_an_empty_space_and_one_of_ours_are_written_again(publish, hub, folder):
    files = {"README.md": b"---\nsdk: docker\n---\n"}
    space = hub.create("ann/m-demo", kind="space", files=files)
    hub.fault(500, "POST /api/spaces/.*/commit/")
    status, shown = publish(folder, "--space", "--no-verify")
    assert status == 1 and "The model is published, at" in shown and "its Space is not" in shown
    for number in range(2):
        (folder / "training.json").write_text(f'{{"seconds": {number}.5}}')
        assert publish(folder, "--space", "--no-verify")[0] == 0
        assert hub.repository("ann/m").commit in space.read("space.json").decode()
        space.change({"notes.txt": b"mine"})
    assert b"sdk: gradio" in space.read("README.md") and not space.private


def shards(folder):
    """The folder's weights in several files, and its index, as they are in a repository."""
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(folder)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    model.save_pretrained(folder, max_shard_size="40KB")
    return {path.name for path in folder.glob("*.safetensors*")}


def test_what_an_earlier_publication_wrote_is_removed_unless_it_was_changed(publish, hub, folder):
    whole = shutil.copytree(folder, folder.parent / "whole" / folder.name)
    stored.in_one_file(whole)
    old_weights = shards(folder)
    old = {
        "notices/vision/LICENSE": b"terms of the encoder",
        "training.json": b'{"seconds": 1.5}',
        "evaluation/summary.json": SUMMARY,
    }
    for path, content in {**old, "LICENSE": b"terms", "dynamics.jsonl": b"{}\n"}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    assert publish(folder, "--no-verify")[0] == 0
    repository = hub.repository("ann/m")
    assert len(old_weights) > 2 and old_weights <= repository.files().keys()
    theirs = {"notes.md", "my.safetensors", "a/b.png", "last/a.pth", "diagnostics/mine.png"}
    # The last is of ours, and was changed since; nothing reads or overwrites it.
    changed = {path: path.encode() for path in theirs} | {"evaluation/summary.json": b"mine"}
    repository.change(changed)
    status, shown = publish(whole, "--no-verify")
    assert status == 0, shown
    assert len(repository.commits()) == 4, "deleted and added in one commit"
    here = {path.name for path in whole.iterdir()}
    kept = {*OTHERS, "README.md", "LICENSE", *here, *changed}
    assert set(repository.head().files) == kept
    assert all(repository.read(path) == content for path, content in changed.items())
    gone = {*old_weights, "training.json", "dynamics.jsonl", "notices/vision/LICENSE"} - here
    assert f"removed: {', '.join(sorted(gone))}." in shown


def test_what_the_repository_ignores_is_sent_all_the_same(publish, hub, folder):
    ignored = {".gitignore": b"*.safetensors\n*.json\n"}
    repository = hub.create("ann/m", files=ignored)
    assert publish(folder, "--no-verify")[0] == 0
    assert {path.name for path in folder.iterdir()} <= set(repository.head().files)
    for path in folder.glob("*.safetensors"):
        assert repository.read(path.name) == path.read_bytes()


def test_front_matter_that_the_hub_refuses_is_found_before_the_upload(publish, hub, folder):
    card = b"---\nlicense: my own\n---\n<!-- normalign card, metadata: tags -->\n"
    repository = hub.create("ann/m", files={"README.md": card})
    status, shown = publish(folder, "--no-verify")
    assert status == 1
    assert "front matter" in shown and "must be one of" in shown, shown
    assert hub.received.total() == 0 and repository.read("README.md") == card


THEIRS = {
    "config.json": b'{"model_type": "llama"}',
    "model-00001-of-00002.safetensors": b"their first half",
    "model-00002-of-00002.safetensors": b"their second half",
    "tokenizer.model": b"their words",
    "adapter_config.json": b"{}",
    "adapter_model.safetensors": b"their adapter",
    "pytorch_model.bin": b"their older weights",
    "custom_generate/generate.py": b"print()",
    "LICENSE": b"their terms",
}
OWN = {"notes.md": b"theirs", "images/a.png": b"theirs", "my.safetensors": b"theirs"}


@pytest.mark.parametrize("card_of_ours", [False, True])
@pytest.mark.parametrize("options", [[], ["--revision", "trial"]])
def test_files_of_somebody_else_are_neither_removed_nor_overwritten(
    publish, hub, folder, card_of_ours, options
):
    (folder / "LICENSE").write_text("other terms")
    card = {"README.md": render_card(folder).text.encode()} if card_of_ours else {}
    repository = hub.create("ann/m", files={**THEIRS, **OWN, **card})
    before = repository.head()
    branches = dict(repository.branches)
    status, shown = publish(folder, *options)
    assert status == 1 and "--replace-files" in shown
    for path in THEIRS:
        fate = "overwritten" if path in ("config.json", "LICENSE") else "read beside the model"
        assert f"- {path} would be {fate}" in shown
    assert not [path for path in OWN if path in shown]
    assert repository.branches == branches
    assert not [line for line in hub.requests if line.startswith(("POST", "PUT"))]
    status, shown = publish(folder, "--no-verify", "--replace-files", *options)
    assert status == 0, shown
    after = repository.head(options[-1] if options else "main")
    here = {path.name for path in folder.iterdir()}
    assert set(after.files) == {*OTHERS, "README.md", *here, *OWN} and after.parent == before.oid
    removed = sorted(THEIRS.keys() - {"config.json", "LICENSE"})
    assert f"removed: {', '.join(removed)}." in shown


def test_a_file_that_was_changed_on_the_hub_is_not_overwritten(publish, hub, folder):
    assert publish(folder, "--no-verify")[0] == 0
    repository = hub.repository("ann/m")
    edited = b'{"max_new_tokens": 9}'
    repository.change({"generation_config.json": edited})
    (folder / "training.json").write_text('{"seconds": 1.5}')
    status, shown = publish(folder, "--no-verify")
    assert status == 1 and "- generation_config.json would be overwritten" in shown
    assert repository.read("generation_config.json") == edited
    # The same content is no conflict: it was published from elsewhere.
    (folder / "generation_config.json").write_bytes(edited)
    assert publish(folder, "--no-verify")[0] == 0
    assert repository.read("training.json") == b'{"seconds": 1.5}'


@pytest.mark.parametrize(
    "content",
    [
        b"[1]",
        b"not JSON",
        b'{"schema_version": 1, "files": {"notes.json": ["a"]}}',
        b'{"schema_version": 2, "written_by": "normalign-llava", "files": {"a": ["a"]}}',
        b'{"schema_version": 1, "written_by": "normalign-llava", "files": [1]}',
    ],
)
def test_a_record_that_is_not_ours_is_not_believed(publish, hub, folder, content):
    repository = hub.create("ann/m", files={"publication.json": content})
    status, shown = publish(folder, "--no-verify")
    assert status == 1 and "- publication.json would be overwritten" in shown
    assert repository.read("publication.json") == content


@pytest.mark.parametrize("name", ["ANN/m", "lab/m"])
def test_an_owner_is_the_same_in_other_letters_and_may_be_an_organisation(
    publish, hub, folder, name
):
    assert publish(folder, "--no-verify", "--repo-id", name)[0] == 0
    assert hub.repository(name).files()


def test_a_record_names_ids_that_the_hub_gives(publish, hub, folder):
    assert publish(folder, "--no-verify")[0] == 0
    repository = hub.repository("ann/m")
    recorded = json.loads(repository.read("publication.json"))["files"]
    assert recorded.keys() == repository.files().keys() - OTHERS
    for path, ids in recorded.items():
        content = repository.read(path)
        sha256 = hashlib.sha256(content).hexdigest()
        git = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        assert ids == ([sha256] if path.endswith(".safetensors") else [sha256, git])


def test_a_space_that_somebody_changed_is_not_overwritten(publish, hub, folder):
    assert publish(folder, "--space", "--no-verify")[0] == 0
    repository = hub.repository("ann/m")
    space = hub.repository("ann/m-demo", "space")
    space.change({"app.py": b"print('mine')", "notes.txt": b"mine"})
    before = repository.commit, space.commit
    (folder / "training.json").write_text('{"seconds": 1.5}')
    status, shown = publish(folder, "--space", "--no-verify")
    assert status == 1 and "- app.py would be overwritten" in shown
    assert "notes.txt" not in shown and (repository.commit, space.commit) == before
    assert publish(folder, "--space", "--no-verify", "--replace-files")[0] == 0
    assert b"gradio" in space.read("app.py") and space.read("notes.txt") == b"mine"


@pytest.mark.parametrize("place", ["folder", "Hub"])
def test_a_card_of_somebody_else_is_replaced_only_on_request(publish, hub, folder, place):
    if place == "Hub":
        hub.create("ann/m", files={"README.md": OWN_CARD.encode()})
    else:
        (folder / "README.md").write_text(OWN_CARD)
    status, shown = publish(folder)
    assert status == 1 and "was not written by this package" in shown and "--replace-card" in shown
    assert not [line for line in hub.requests if line.startswith(("POST", "PUT"))]
    status, shown = publish(folder, "--no-verify", "--replace-card")
    assert status == 0
    assert b"What nobody else knows" not in hub.repository("ann/m").read("README.md")


def test_the_card_that_is_kept_or_replaced_is_that_of_the_branch(publish, hub, folder):
    repository = hub.create("ann/m", files={"README.md": OWN_CARD.encode()})
    trial = ["--no-verify", "--revision", "trial"]
    assert publish(folder, *trial, "--replace-card")[0] == 0
    first = repository.head("trial")
    (folder / "training.json").write_text('{"seconds": 1.5}')
    status, shown = publish(folder, *trial)
    assert status == 0 and repository.head("trial").parent == first.oid, shown
    assert repository.read("README.md") == OWN_CARD.encode()


def test_a_dry_run_asks_nobody_and_loads_the_folder(publish, hub, folder):
    (folder / "optimizer.pt").write_bytes(b"")
    status, shown = publish(folder, "--dry-run", "--no-verify", token=" ")
    assert status == 0 and "optimizer.pt" in shown and "It was not loaded." in shown, shown
    assert hub.requests == []
    weights = stored.weights(folder)
    name = "model.multi_modal_projector.linear_1.weight"
    del weights[name]  # which only loading shows
    stored.store(folder, weights | {"model.another": torch.zeros(2)})
    status, shown = publish(folder, "--dry-run")
    assert status == 1 and name in shown and "model.another" in shown
    assert "does not work in a process without this package" in shown


@pytest.mark.nightly
def test_a_commit_that_nobody_can_load(publish, hub, folder):
    repository = hub.create("ann/m", files={"notes.md": b"mine"})
    before = repository.commit
    hub.fault(404, r"(GET|HEAD) /ann/m/resolve/\w{40}/config.json", times=99)
    status, shown = publish(folder)
    assert status == 1 and repository.commit in shown and before in shown


@pytest.mark.parametrize(
    "options, token, words",
    [
        (["--adapter"], None, "not an adapter"),
        (["--space"], None, "is not this package's"),
        (["--space", "--create-pr"], None, "A Space needs a published whole model"),
        (["--repo-id", "bob/m"], None, "ann may publish as ann/... or lab/..., not as"),
        ([], "read", "The token of ann may only read"),
        (["--public"], None, "is private"),
        ([], " ", "hf auth login"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_sent(publish, hub, folder, options, token, words):
    hub.create("ann/m-demo", kind="space", files={"app.py": b"print()"})
    if "--public" in options:
        hub.create("ann/m", private=True)
    if token == "read":
        token = hub.token("ann", token)
    status, shown = publish(folder, *options, token=token)
    assert status == 1 and words in shown
    assert not [line for line in hub.requests if line.startswith(("POST", "PUT"))]


READ = """
import json, sys
from normalign_llava.hub_cards.push.record import additions
from normalign_llava.hub_cards.push.repository import check_front_matter, find_repository, log_in

api = log_in("ann/m", f" {sys.argv[1]}\\n")
for words in ("ann/m main", "ann/m trial", "ann/none main", "ann/b main"):
    name, branch = words.split()
    found = find_repository(api, name, branch=branch)
    files = sorted(found.files)
    print(json.dumps([found.branch, found.commit, found.private, found.card, found.written, files]))
added = additions({"a.md": b"", "README.md": b"---\\nlicense: my own\\n---\\n"})
for attempt in (lambda: check_front_matter(added, "model"), lambda: log_in("ann/m")):
    try:
        attempt()
    except ValueError as error:
        print(error)
"""


def test_a_repository_is_read_as_it_is(prepared, hub):
    """Its card, with a mark of its encoding and what is no UTF-8; and somebody's own record."""
    files = {"README.md": b"\xef\xbb\xbfhello \xff", "publication.json": b'{"files": {}}'}
    first = hub.create("ann/m", private=True, files=files)
    second = hub.create("ann/b", files={"a.safetensors": b"weights"})
    ended = prepared.run(["-c", READ, hub.token("ann")])
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    main, trial, none, other = map(json.loads, lines[:4])
    known = [first.commit, True, "hello \ufffd", {}, [".gitattributes", *sorted(files)]]
    assert main == ["main", *known] and trial == ["trial", *known]  # there is no such branch
    assert none == ["main", None, False, None, {}, []]
    assert other[1:4] == [second.commit, False, None]
    assert "front matter of README.md" in lines[4]
    assert "A token is needed to publish" in lines[-1]
