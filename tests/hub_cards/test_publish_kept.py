# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What people wrote, in the folder or on the Hub, is not lost without a word when a checkpoint is published."""

import shutil

import pytest
import training
from huggingface_hub import ModelCard, ModelCardData


pytestmark = pytest.mark.slow


HEAD, END = "<!-- by hand: notes -->\n", "<!-- end by hand -->"
CREATE = "POST /api/repos/create"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return training.checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def checkpoint(built, tmp_path):
    return shutil.copytree(built, tmp_path / "model")


def request(hub, folder, source="checkpoint", **arguments):
    arguments = {"token": hub.token("ann"), "endpoint": hub.url, "waits": [0, 0], **arguments}
    if source == "checkpoint":
        arguments["check_loading"] = False
    return {source: str(folder), "repo_id": "ann/m", "arguments": arguments}


@pytest.mark.parametrize("author", ["a person", "PEFT"])
def test_a_card_in_the_folder_that_this_package_did_not_write(worker, hub, checkpoint, author):
    text = "---\nlicense: mit\n---\n# My page\n\nWhat nobody else knows.\n"
    if author == "PEFT":
        text = str(ModelCard.from_template(ModelCardData(library_name="peft")))
    (checkpoint / "README.md").write_text(text)
    for arguments in ({}, {"dry_run": True}):
        said = worker.ask(request(hub, checkpoint, **arguments))
        assert said["type"] == "ValueError" and f"README.md of {checkpoint} was not written by" in said["error"]
        assert "--replace-card" in said["error"] and f"`normalign card {checkpoint}`" in said["error"]
    assert not hub.repositories and (checkpoint / "README.md").read_text() == text
    assert "done" in worker.ask(request(hub, checkpoint, dry_run=True, replace_card=True))

    (checkpoint / "README.md").write_text("---\nlicense: mit\n---\n")
    assert "done" in worker.ask(request(hub, checkpoint, dry_run=True))


def test_what_was_written_between_the_marks_stays_and_the_rest_is_written_anew(worker, hub, checkpoint):
    assert "done" in worker.ask(request(hub, checkpoint))
    repository = hub.repository("ann/m")

    def edited(**replaced):
        head, card = repository.head(), repository.read("README.md").decode()
        for old, new in replaced.values():
            assert old in card
            card = card.replace(old, new, 1)
        stored = {"README.md": repository.store("README.md", card.encode())}
        return repository.advance("main", head.files | stored, "Edit by hand", "ann", parent=head.oid).oid

    by_hand, added = (HEAD, f"{HEAD}By hand.\n"), ("---\n", "---\nlicense: mit\ndatasets: ann/data\n")
    edited(by_hand=by_hand, added=added)
    assert "done" in worker.ask(request(hub, checkpoint))
    card = repository.read("README.md").decode()
    assert "By hand." in card and ModelCard(card).data.datasets == "ann/data" and "Its author states: mit" in card

    edited(by_hand=by_hand, tag=("pipeline_tag: image-text-to-text", "pipeline_tag: image-to-text"))
    assert "done" in worker.ask(request(hub, checkpoint))
    card = repository.read("README.md").decode()
    assert card.count("By hand.") == 2 and ModelCard(card).data.pipeline_tag == "image-text-to-text"


@pytest.mark.parametrize("made", ["public", "with a card"])
def test_a_repository_that_appears_meanwhile_is_left_alone(worker, hub, checkpoint, made):
    files = {"public": {}, "with a card": {"README.md": b"---\nlicense: mit\n---\nWhat Bob wrote.\n"}}[made]
    pause = hub.pause(CREATE, times=1)
    worker.start(request(hub, checkpoint, "folder", **({"private": True} if made == "public" else {})))
    assert pause.reached.wait(60)
    before = hub.create("ann/m", files=files).head()
    pause.release()
    said = worker.answer()
    assert hub.repository("ann/m").head() == before and not hub.received
    if made == "public":
        assert said["type"] == "ValueError" and "ann/m exists and is public" in said["error"]
    else:
        assert said["type"] == "OSError" and "Another publisher was faster" in said["error"]
        assert before.oid in said["error"] and "Upload files" in said["error"]
