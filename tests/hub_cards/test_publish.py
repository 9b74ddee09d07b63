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

NOT_OF_THE_FOLDER = {".gitattributes", "publication.json"}
OWN_CARD = "---\nlicense: mit\n---\n# My page\n\nWhat nobody else knows.\n"
TRAINING_RECORD = '{"seconds": 1.5}'


def names_in(folder):
    return {file_path.name for file_path in folder.iterdir()}


def contents_of(folder):
    return {file_path.name: file_path.read_bytes() for file_path in folder.iterdir()}


def assert_nothing_sent(hub):
    for request in hub.requests:
        assert not request.startswith(("POST", "PUT"))


def change_training_record(folder):
    (folder / "training.json").write_text(TRAINING_RECORD)


@pytest.fixture
def publish_ok(publish):
    """Publishes without loading the commit, and returns the output. It must succeed."""

    def publish_without_error(folder, *options):
        status, printed_text = publish(folder, "--no-verify", *options)
        assert status == 0, printed_text
        return printed_text

    return publish_without_error


def test_a_model_is_published_whole_and_loads_from_its_commit(publish, hub, folder, tmp_path):
    contents = contents_of(folder)
    status, printed_text = publish(folder, "--private", "--space", TMPDIR=str(tmp_path))
    assert status == 0, printed_text

    repository = hub.repository("ann/m")
    assert repository.private
    assert f"Commit: {repository.commit}" in printed_text
    assert len(repository.commits()) == 2
    assert set(repository.head().files) == {*NOT_OF_THE_FOLDER, "README.md", *contents}
    for name, content in contents.items():
        assert repository.read(name) == content

    space = hub.repository("ann/m-demo", "space")
    assert space.private
    assert f"{hub.url}/spaces/ann/m-demo/settings." in printed_text
    assert repository.commit in space.read("space.json").decode()

    assert contents_of(folder) == contents
    assert not list(tmp_path.glob("clean-process-*"))


def test_published_again_nothing_changes(publish_ok, hub, folder):
    publish_ok(folder)
    repository = hub.repository("ann/m")
    first_commit = repository.commit
    printed_text = publish_ok(folder)
    assert "nothing changed" in printed_text
    assert repository.commit == first_commit


def test_a_new_file_is_one_commit_on_a_new_branch(publish_ok, hub, folder):
    publish_ok(folder)
    repository = hub.repository("ann/m")
    first_commit = repository.commit
    received = hub.received.total()

    change_training_record(folder)
    publish_ok(folder, "--revision", "trial/2")
    assert repository.commit == first_commit
    branch_head = repository.head("trial/2")
    assert branch_head.parent == first_commit
    assert "training.json" in branch_head.files
    assert hub.received.total() == received


def test_a_pull_request_is_refused_if_it_would_overwrite_a_file(publish, hub, folder):
    theirs = hub.create("bob/m", files={"config.json": b"{}"})
    status, printed_text = publish(folder, "--create-pr", "--no-verify", "--repo-id", "bob/m")
    assert status == 1
    assert "- config.json would be overwritten" in printed_text
    assert set(theirs.branches) == {"main"}


def test_a_pull_request_is_a_branch_of_its_own(publish_ok, hub, folder):
    theirs = hub.create("bob/m", files={"config.json": b"{}"})
    main_head = theirs.head()
    printed_text = publish_ok(folder, "--create-pr", "--repo-id", "bob/m", "--replace-files")
    assert f"Pull request: {hub.url}/bob/m/discussions/1" in printed_text
    assert theirs.head() == main_head
    proposed = theirs.head("refs/pr/1")
    assert proposed.parent == main_head.oid
    assert set(proposed.files) >= stored.FILES


@pytest.fixture
def empty_space(hub):
    """A Space with only a card."""
    space_card = b"---\nsdk: docker\n---\n"
    return hub.create("ann/m-demo", kind="space", files={"README.md": space_card})


def test_where_a_space_fails_the_model_is_said_to_be_published(publish, hub, folder, empty_space):
    hub.fault(500, "POST /api/spaces/.*/commit/")
    status, printed_text = publish(folder, "--space", "--no-verify")
    assert status == 1
    assert "The model is published, at" in printed_text
    assert "its Space is not" in printed_text


def test_an_empty_space_and_one_of_ours_are_written_again(publish_ok, hub, folder, empty_space):
    for number in range(2):
        (folder / "training.json").write_text(f'{{"seconds": {number}.5}}')
        publish_ok(folder, "--space")
        commit = hub.repository("ann/m").commit
        assert commit in empty_space.read("space.json").decode()
        empty_space.change({"notes.txt": b"mine"})
    assert b"sdk: gradio" in empty_space.read("README.md")
    assert not empty_space.private


def shard_weights(folder):
    """Saves the folder's weights in several files, and returns their names and the index's."""
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(folder)
    for weights_path in folder.glob("*.safetensors*"):
        weights_path.unlink()
    model.save_pretrained(folder, max_shard_size="40KB")
    return {file_path.name for file_path in folder.glob("*.safetensors*")}


OLD_RECORDS = {
    "LICENSE": b"terms",
    "dynamics.jsonl": b"{}\n",
    "evaluation/summary.json": b'{"schema_version": 2, "evaluations": []}',
    "notices/vision/LICENSE": b"terms of the encoder",
    "training.json": TRAINING_RECORD.encode(),
}
CHANGED_BY_OTHERS = {
    "notes.md": b"theirs",
    "my.safetensors": b"their weights",
    "a/b.png": b"their image",
    "last/a.pth": b"their state",
    "diagnostics/mine.png": b"their figure",
    # It was published, and was changed since; nothing reads or overwrites it.
    "evaluation/summary.json": b"mine",
}


def test_what_an_earlier_publication_wrote_is_removed_unless_it_was_changed(
    publish_ok, hub, folder
):
    whole_folder = shutil.copytree(folder, folder.parent / "whole" / folder.name)
    stored.in_one_file(whole_folder)
    old_weights = shard_weights(folder)
    assert len(old_weights) > 2
    for file_path, content in OLD_RECORDS.items():
        (folder / file_path).parent.mkdir(parents=True, exist_ok=True)
        (folder / file_path).write_bytes(content)
    publish_ok(folder)
    repository = hub.repository("ann/m")
    assert old_weights <= repository.files().keys()
    repository.change(CHANGED_BY_OTHERS)

    printed_text = publish_ok(whole_folder)
    assert len(repository.commits()) == 4, "deleted and added in one commit"
    whole_names = names_in(whole_folder)
    assert set(repository.head().files) == {
        *NOT_OF_THE_FOLDER,
        *whole_names,
        *CHANGED_BY_OTHERS,
        "README.md",
        "LICENSE",
    }
    for file_path, content in CHANGED_BY_OTHERS.items():
        assert repository.read(file_path) == content

    old_names = {*old_weights, "training.json", "dynamics.jsonl", "notices/vision/LICENSE"}
    removed = sorted(old_names - whole_names)
    assert f"removed: {', '.join(removed)}." in printed_text


def test_what_the_repository_ignores_is_sent_all_the_same(publish_ok, hub, folder):
    repository = hub.create("ann/m", files={".gitignore": b"*.safetensors\n*.json\n"})
    publish_ok(folder)
    assert names_in(folder) <= set(repository.head().files)
    for weights_path in folder.glob("*.safetensors"):
        assert repository.read(weights_path.name) == weights_path.read_bytes()


def test_front_matter_that_the_hub_refuses_is_found_before_the_upload(publish, hub, folder):
    card = b"---\nlicense: my own\n---\n<!-- normalign card, metadata: tags -->\n"
    repository = hub.create("ann/m", files={"README.md": card})
    status, printed_text = publish(folder, "--no-verify")
    assert status == 1
    assert "front matter" in printed_text, printed_text
    assert "must be one of" in printed_text, printed_text
    assert hub.received.total() == 0
    assert repository.read("README.md") == card


OVERWRITTEN = {
    "config.json": b'{"model_type": "llama"}',
    "LICENSE": b"their terms",
}
READ_BESIDE = {
    "model-00001-of-00002.safetensors": b"their first half",
    "model-00002-of-00002.safetensors": b"their second half",
    "tokenizer.model": b"their words",
    "adapter_config.json": b"{}",
    "adapter_model.safetensors": b"their adapter",
    "pytorch_model.bin": b"their older weights",
    "custom_generate/generate.py": b"print()",
}
HARMLESS = {
    "notes.md": b"theirs",
    "images/a.png": b"theirs",
    "my.safetensors": b"theirs",
}


@pytest.fixture(params=[False, True], ids=["without-card", "with-our-card"])
def repository_of_others(request, hub, folder):
    """A repository with files of somebody else, with or without a card of ours."""
    (folder / "LICENSE").write_text("other terms")
    their_files = {**OVERWRITTEN, **READ_BESIDE, **HARMLESS}
    if request.param:
        their_files["README.md"] = render_card(folder).text.encode()
    return hub.create("ann/m", files=their_files)


either_branch = pytest.mark.parametrize(
    ("branch", "options"),
    [
        ("main", []),
        ("trial", ["--revision", "trial"]),
    ],
)


@either_branch
def test_files_of_somebody_else_are_neither_removed_nor_overwritten(
    publish, hub, folder, repository_of_others, branch, options
):
    branches = dict(repository_of_others.branches)
    status, printed_text = publish(folder, *options)
    assert status == 1
    assert "--replace-files" in printed_text
    for file_path in OVERWRITTEN:
        assert f"- {file_path} would be overwritten" in printed_text
    for file_path in READ_BESIDE:
        assert f"- {file_path} would be read beside the model" in printed_text
    for file_path in HARMLESS:
        assert file_path not in printed_text
    assert repository_of_others.branches == branches
    assert_nothing_sent(hub)


@either_branch
def test_files_of_somebody_else_are_replaced_on_request(
    publish_ok, folder, repository_of_others, branch, options
):
    before = repository_of_others.head()
    printed_text = publish_ok(folder, "--replace-files", *options)
    after = repository_of_others.head(branch)
    expected = {*NOT_OF_THE_FOLDER, *names_in(folder), *HARMLESS, "README.md"}
    assert set(after.files) == expected
    assert after.parent == before.oid
    assert f"removed: {', '.join(sorted(READ_BESIDE))}." in printed_text


EDITED_SETTINGS = b'{"max_new_tokens": 9}'


@pytest.fixture
def edited_repository(publish_ok, hub, folder):
    """A published repository, of which a file was changed since there, and another here."""
    publish_ok(folder)
    repository = hub.repository("ann/m")
    repository.change({"generation_config.json": EDITED_SETTINGS})
    change_training_record(folder)
    return repository


def test_a_file_that_was_changed_on_the_hub_is_not_overwritten(publish, folder, edited_repository):
    status, printed_text = publish(folder, "--no-verify")
    assert status == 1
    assert "- generation_config.json would be overwritten" in printed_text
    assert edited_repository.read("generation_config.json") == EDITED_SETTINGS


def test_the_same_content_on_the_hub_is_no_conflict(publish_ok, folder, edited_repository):
    """It was published from elsewhere."""
    (folder / "generation_config.json").write_bytes(EDITED_SETTINGS)
    publish_ok(folder)
    assert edited_repository.read("training.json") == TRAINING_RECORD.encode()


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
    status, printed_text = publish(folder, "--no-verify")
    assert status == 1
    assert "- publication.json would be overwritten" in printed_text
    assert repository.read("publication.json") == content


@pytest.mark.parametrize("repo_id", ["ANN/m", "lab/m"])
def test_an_owner_is_the_same_in_other_letters_and_may_be_an_organisation(
    publish_ok, hub, folder, repo_id
):
    publish_ok(folder, "--repo-id", repo_id)
    assert hub.repository(repo_id).files()


def test_a_record_names_ids_that_the_hub_gives(publish_ok, hub, folder):
    publish_ok(folder)
    repository = hub.repository("ann/m")
    recorded = json.loads(repository.read("publication.json"))["files"]
    assert recorded.keys() == repository.files().keys() - NOT_OF_THE_FOLDER
    for file_path, recorded_ids in recorded.items():
        content = repository.read(file_path)
        expected = [hashlib.sha256(content).hexdigest()]
        if not file_path.endswith(".safetensors"):
            blob = b"blob %d\0" % len(content) + content
            expected.append(hashlib.sha1(blob).hexdigest())
        assert recorded_ids == expected


@pytest.fixture
def edited_space(publish_ok, hub, folder):
    """A published Space that somebody changed since. The folder has changed, too."""
    publish_ok(folder, "--space")
    space = hub.repository("ann/m-demo", "space")
    space.change({"app.py": b"print('mine')", "notes.txt": b"mine"})
    change_training_record(folder)
    return space


def test_a_space_that_somebody_changed_is_not_overwritten(publish, hub, folder, edited_space):
    repository = hub.repository("ann/m")
    model_commit = repository.commit
    space_commit = edited_space.commit
    status, printed_text = publish(folder, "--space", "--no-verify")
    assert status == 1
    assert "- app.py would be overwritten" in printed_text
    assert "notes.txt" not in printed_text
    assert repository.commit == model_commit
    assert edited_space.commit == space_commit


def test_a_space_that_somebody_changed_is_overwritten_on_request(publish_ok, folder, edited_space):
    publish_ok(folder, "--space", "--replace-files")
    assert b"gradio" in edited_space.read("app.py")
    assert edited_space.read("notes.txt") == b"mine"


@pytest.mark.parametrize("place", ["folder", "Hub"])
def test_a_card_of_somebody_else_is_replaced_only_on_request(
    publish, publish_ok, hub, folder, place
):
    if place == "Hub":
        hub.create("ann/m", files={"README.md": OWN_CARD.encode()})
    else:
        (folder / "README.md").write_text(OWN_CARD)
    status, printed_text = publish(folder)
    assert status == 1
    assert "was not written by this package" in printed_text
    assert "--replace-card" in printed_text
    assert_nothing_sent(hub)

    publish_ok(folder, "--replace-card")
    card = hub.repository("ann/m").read("README.md")
    assert b"What nobody else knows" not in card


def test_the_card_that_is_kept_or_replaced_is_the_branch_s(publish_ok, hub, folder):
    repository = hub.create("ann/m", files={"README.md": OWN_CARD.encode()})
    publish_ok(folder, "--revision", "trial", "--replace-card")
    first_head = repository.head("trial")
    change_training_record(folder)
    publish_ok(folder, "--revision", "trial")
    assert repository.head("trial").parent == first_head.oid
    assert repository.read("README.md") == OWN_CARD.encode()


def test_a_dry_run_asks_nobody(publish, hub, folder):
    (folder / "optimizer.pt").write_bytes(b"")
    status, printed_text = publish(folder, "--dry-run", "--no-verify", token=" ")
    assert status == 0, printed_text
    assert "optimizer.pt" in printed_text
    assert "It was not loaded." in printed_text
    assert hub.requests == []


def test_a_dry_run_loads_the_folder(publish, folder):
    weights = stored.weights(folder)
    missing = "model.multi_modal_projector.linear_1.weight"
    del weights[missing]
    weights["model.another"] = torch.zeros(2)
    stored.store(folder, weights)
    status, printed_text = publish(folder, "--dry-run")
    assert status == 1
    assert missing in printed_text
    assert "model.another" in printed_text
    assert "does not work in a process without this package" in printed_text


@pytest.mark.nightly
def test_a_commit_that_nobody_can_load(publish, hub, folder):
    repository = hub.create("ann/m", files={"notes.md": b"mine"})
    earlier_commit = repository.commit
    hub.fault(404, r"(GET|HEAD) /ann/m/resolve/\w{40}/config.json", times=99)
    status, printed_text = publish(folder)
    assert status == 1
    assert repository.commit in printed_text
    assert earlier_commit in printed_text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--adapter"], "not an adapter"),
        (["--space"], "is not this package's"),
        (["--space", "--create-pr"], "A Space needs a published whole model"),
        (["--repo-id", "bob/m"], "ann may publish as ann/... or lab/..., not as"),
    ],
)
def test_options_that_cannot_be_are_refused_before_anything_is_sent(
    publish, hub, folder, options, message
):
    hub.create("ann/m-demo", kind="space", files={"app.py": b"print()"})
    status, printed_text = publish(folder, *options)
    assert status == 1
    assert message in printed_text
    assert_nothing_sent(hub)


def test_a_token_that_may_only_read_is_refused_before_anything_is_sent(publish, hub, folder):
    status, printed_text = publish(folder, token=hub.token("ann", "read"))
    assert status == 1
    assert "The token of ann may only read" in printed_text
    assert_nothing_sent(hub)


def test_a_private_repository_is_not_made_public(publish, hub, folder):
    hub.create("ann/m", private=True)
    status, printed_text = publish(folder, "--public")
    assert status == 1
    assert "is private" in printed_text
    assert_nothing_sent(hub)


def test_who_is_not_logged_in_is_told_how(publish, hub, folder):
    status, printed_text = publish(folder, token=" ")
    assert status == 1
    assert "hf auth login" in printed_text
    assert_nothing_sent(hub)


READ = """
import json, sys
from normalign_llava.hub_cards.push.repository import (
    additions,
    check_front_matter,
    find_repository,
    log_in,
)

api = log_in("ann/m", f" {sys.argv[1]}\\n")
found = []
for name, branch in (
    ("ann/m", "main"),
    ("ann/m", "trial"),
    ("ann/none", "main"),
    ("ann/b", "main"),
):
    repository = find_repository(api, name, branch=branch)
    found.append({
        "branch": repository.branch,
        "commit": repository.commit,
        "private": repository.private,
        "card": repository.card,
        "written": repository.recorded,
        "files": sorted(repository.files),
    })
errors = []
added = additions({"a.md": b"", "README.md": b"---\\nlicense: my own\\n---\\n"})
for attempt in (lambda: check_front_matter(added, "model"), lambda: log_in("ann/m")):
    try:
        attempt()
    except ValueError as error:
        errors.append(str(error))
print(json.dumps([found, errors]))
"""


def test_a_repository_is_read_as_it_is(prepared, hub):
    their_files = {
        "README.md": b"\xef\xbb\xbfhello \xff",  # with a mark of its encoding, and not UTF-8
        "publication.json": b'{"files": {}}',  # somebody's own
    }
    first_repository = hub.create("ann/m", private=True, files=their_files)
    second_repository = hub.create("ann/b", files={"a.safetensors": b"weights"})
    ended = prepared.run(["-c", READ, hub.token("ann")])
    assert ended.returncode == 0, ended.stderr
    found, read_errors = json.loads(ended.stdout.splitlines()[-1])
    on_main, on_trial, absent, other_found = found

    assert on_main == {
        "branch": "main",
        "commit": first_repository.commit,
        "private": True,
        "card": "hello \ufffd",
        "written": {},
        "files": [".gitattributes", *sorted(their_files)],
    }
    assert on_trial == {**on_main, "branch": "trial"}  # there is no such branch
    assert absent == {
        "branch": "main",
        "commit": None,
        "private": False,
        "card": "",
        "written": {},
        "files": [],
    }
    assert other_found["commit"] == second_repository.commit
    assert other_found["private"] is False
    assert other_found["card"] == ""

    of_front_matter, of_token = read_errors
    assert "front matter of README.md" in of_front_matter
    assert "A token is needed to publish" in of_token
