# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Publishing when nothing goes wrong, against a real hub: what is there afterwards, and what a second time sends."""

import hashlib
import json
import os
import shutil
import subprocess
import sys

import pytest
import training
from hub_server import HubServer
from prepared import Prepared
from publish_worker import Worker
from safetensors.torch import load_file, save_file

from normalign_llava.hub_cards.push.repository import MANIFEST, manifest, read_manifest


pytestmark = pytest.mark.slow


MARK, END = "<!-- by hand: notes -->\n", "<!-- end by hand -->"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return training.checkpoint(tmp_path_factory.mktemp("checkpoint"))


def ask(worker, hub, repo_id="ann/m", token=None, **request):
    arguments = {name: request.pop(name) for name in list(request) if name not in ("folder", "checkpoint")}
    arguments = {"token": token or hub.token("ann"), "endpoint": hub.url, "waits": [0, 0], **arguments}
    source = {name: str(path) for name, path in request.items()}
    return worker.ask({**source, "repo_id": repo_id, "arguments": arguments})


def fill(folder, files):
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def edit(repository, files):
    """A commit of a person who changes `files` on the Hub's page."""
    head = repository.head()
    stored = {name: repository.store(name, content) for name, content in files.items()}
    return repository.advance("main", head.files | stored, "Edit by hand", "ann", parent=head.oid)


# The push alone


def test_what_is_there_afterwards_and_what_a_second_push_sends(worker, hub, tmp_path):
    files = {"model.safetensors": os.urandom(5000), "config.json": b"{}"}
    folder = fill(tmp_path / "files", files)
    done = ask(worker, hub, folder=folder)["done"]
    repository = hub.repository("ann/m")
    assert set(repository.head().files) == {".gitattributes", MANIFEST, *files}
    assert {name: repository.read(name) for name in files} == files
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    assert read_manifest(repository.read(MANIFEST)) == hashes
    assert done["changed"] and done["commit"] == repository.head().oid and done["url"] == f"{hub.url}/ann/m"
    assert done["sent_files"] == [*sorted(files), MANIFEST] and not repository.private
    assert done["files"] == {name: len(repository.read(name)) for name in [*files, MANIFEST]}

    before, bodies = len(hub.requests), hub.request_bytes
    done = ask(worker, hub, folder=folder)["done"]
    assert not done["changed"] and done["sent_files"] == [] and done["commit"] == repository.head().oid
    assert hub.request_bytes == bodies and all(line.startswith(("GET", "HEAD")) for line in hub.requests[before:])

    (folder / "config.json").write_bytes(b'{"a": 1}')
    done = ask(worker, hub, folder=folder)["done"]
    assert done["sent_files"] == ["config.json", MANIFEST] and hub.request_bytes - bodies < 5000
    assert sum(hub.received.values()) == 5000


def test_stale_files_of_ours_go_and_files_of_others_stay(worker, hub, tmp_path):
    old = {
        "model-00001-of-00002.safetensors": b"1", "model-00002-of-00002.safetensors": b"2",
        "model.safetensors.index.json": b"{}", "notes.md": b"by hand", "other.safetensors": b"theirs",
        "pytorch_model.bin": b"theirs too",
    }  # fmt: skip
    hub.create("ann/m", files=old)
    folder = fill(tmp_path / "files", {"model.safetensors": b"new", "extra.json": b"{}"})
    done = ask(worker, hub, folder=folder)["done"]
    assert done["deleted"] == sorted(old)[:3]
    repository = hub.repository("ann/m")
    assert len(repository.commits()) == 3, "deleted and added in one commit"
    assert {"notes.md", "other.safetensors", "pytorch_model.bin", "extra.json"} <= set(repository.head().files)

    fill(folder, {"model-00001-of-00001.safetensors": b"sharded", "model.safetensors.index.json": b"{}"})
    assert ask(worker, hub, folder=folder)["done"]["deleted"] == ["extra.json", "model.safetensors"]
    left = set(repository.head().files) - {".gitattributes", MANIFEST}
    assert left == {"notes.md", "other.safetensors", "pytorch_model.bin", *(path.name for path in folder.iterdir())}


def test_what_the_repository_ignores_is_sent_all_the_same(worker, hub, tmp_path):
    hub.create("ann/m", files={".gitignore": b"*.safetensors\n*.json\n"})
    folder = fill(tmp_path / "files", {"model.safetensors": b"1", "config.json": b"{}"})
    ask(worker, hub, folder=folder)
    assert {"model.safetensors", "config.json", MANIFEST, ".gitignore"} <= set(hub.repository("ann/m").head().files)


def test_a_card_that_the_hub_refuses_is_an_error_before_anything_is_made(worker, hub, tmp_path):
    card = b"---\nlicense: All rights reserved!\n---\n"
    folder = fill(tmp_path / "files", {"model.safetensors": b"1", "README.md": card})
    said = ask(worker, hub, folder=folder)
    assert said["type"] == "ValueError" and "All rights reserved!" in said["error"] and "front matter" in said["error"]
    assert not hub.repositories and not hub.received


def test_a_manifest_that_is_damaged_or_of_another_schema_lists_nothing():
    files = {"b": "2", "a": "1"}
    assert read_manifest(manifest(files)) == files
    earlier = b'{"schema_version": 1, "files": {"a": "1", "b": "2"}, "hand_written": {"notes": "3"}}'
    assert read_manifest(earlier) == files
    for content in (
        b"",
        b"[]",
        b'{"schema_version": 2, "files": {}}',
        b'{"schema_version": 1, "files": ["a"]}',
        b"\xff",
    ):
        assert read_manifest(content) == {}


def test_what_a_person_edited_is_not_removed(worker, hub, tmp_path):
    folder = fill(tmp_path / "files", {"a.json": b"{}", "edited": b"1", "LICENSE": b"old"})
    ask(worker, hub, folder=folder)
    repository = hub.repository("ann/m")
    mine = {"edited": b"2", "by a person": b"mine"}
    edit(repository, mine)
    fill(folder, {"b.json": b"{}"})
    assert ask(worker, hub, folder=folder)["done"]["deleted"] == ["LICENSE", "a.json"]

    edit(repository, {MANIFEST: manifest({name: hashlib.sha256(b"").hexdigest() for name in mine})})
    fill(folder, {"c.json": b"{}"})
    assert ask(worker, hub, folder=folder)["done"]["deleted"] == []
    assert {name: repository.read(name) for name in mine} == mine


def test_private_and_branches_and_spaces(worker, hub, tmp_path):
    folder = fill(tmp_path / "files", {"config.json": b"{}"})
    assert ask(worker, hub, folder=folder, private=True)["done"]["private"]
    assert hub.repository("ann/m").private
    said = ask(worker, hub, folder=folder, private=False)
    assert said["type"] == "ValueError" and "private" in said["error"] and "settings" in said["error"]
    assert ask(worker, hub, folder=folder)["done"]["private"]

    main = hub.repository("ann/m").head()
    (folder / "config.json").write_bytes(b"other")
    done = ask(worker, hub, folder=folder, revision="trial/2")["done"]
    assert hub.repository("ann/m").head() == main
    assert hub.repository("ann/m").read("config.json", "trial/2") == b"other"
    assert (done["parent"], done["commit"]) == (main.oid, hub.repository("ann/m").branches["trial/2"])

    hub.repository("ann/m").tags["v1"] = main.oid
    for revision in ("v1", main.oid):
        said = ask(worker, hub, folder=folder, revision=revision)
        assert said["type"] == "ValueError" and f"{revision} of ann/m is a tag or a commit" in said["error"]

    done = ask(worker, hub, folder=folder, repo_id="ann/m-demo", kind="space")["done"]
    assert hub.repository("ann/m-demo", "space").read("config.json") == b"other"
    assert done["url"] == f"{hub.url}/spaces/ann/m-demo"


@pytest.mark.parametrize("repo_id", ["m", "ann/m/x", "ann/", "ann/a--b", "ann/m.git"])
def test_names_that_no_repository_has(worker, hub, tmp_path, repo_id):
    said = ask(worker, hub, folder=fill(tmp_path / "files", {"config.json": b"{}"}), repo_id=repo_id)
    assert said["type"] == "ValueError" and "user/name" in said["error"] and hub.requests == []


def test_by_xet(tmp_path):
    folder = fill(tmp_path / "files", {"model.safetensors": os.urandom(2**20), "config.json": b"{}"})
    with HubServer(xet=tmp_path / "store") as hub:
        by_xet = Prepared(hub.environment(tmp_path / "home"))
        worker = Worker(by_xet)
        try:
            done = ask(worker, hub, folder=folder)["done"]
            assert hub.repository("ann/m").read("model.safetensors") == (folder / "model.safetensors").read_bytes()
            assert not [line for line in hub.requests if line.startswith("PUT")]
            assert ask(worker, hub, folder=folder)["done"] == {
                **done, "parent": done["commit"], "changed": False, "sent_files": [], "sent_bytes": 0
            }  # fmt: skip
        finally:
            by_xet.stop()


def card(notes):
    return f"---\nlicense: mit\n---\n<!-- normalign card, metadata:  -->\n# Title\n{MARK}{notes}{END}\n"


# All of it


def test_publish_from_the_check_to_the_snippet(worker, hub, checkpoint, tmp_path):
    written = card("Mine,\r\nof two lines.\r\n").encode()
    checkpoint = shutil.copytree(checkpoint, tmp_path / "model")
    (checkpoint / "README.md").write_bytes(written)
    said = ask(worker, hub, checkpoint=checkpoint, space=True, private=True)
    done, repository = said["done"], hub.repository("ann/m")
    assert f"its secret HF_TOKEN: {hub.url}/spaces/ann/m-demo/settings." in said["said"][-1]
    assert repository.private and hub.repository("ann/m-demo", "space").private
    assert done["commit"] == repository.head().oid and len(repository.commits()) == 2
    existing = set(repository.head().files) - {".gitattributes"}
    assert existing == set(done["files"]) == set(done["sent_files"])
    assert {"README.md", "modeling_normalign_llava.py", "model.safetensors"} <= existing
    assert done["commit"] in json.dumps(hub.repository("ann/m-demo", "space").read("space.json").decode())

    assert (checkpoint / "README.md").read_bytes() == written
    assert f"{MARK}Mine,\r\nof two lines.\r\n{END}".encode() in repository.read("README.md")

    # It becomes public and gated, a person edits the card and adds a file there, and the folder is published again.
    repository.private, repository.gated = False, True
    text = repository.read("README.md").decode().replace(MARK, f"{MARK}Seen on the Hub.\n")
    edited = edit(repository, {"notes.txt": b"mine", "README.md": text.encode()})
    received = sum(hub.received.values())
    done = ask(worker, hub, checkpoint=checkpoint, check_loading=False)["done"]
    assert repository.head().parent == edited.oid and done["sent_files"] == [MANIFEST]
    assert repository.read("README.md").decode() == text and repository.read("notes.txt") == b"mine"
    assert sum(hub.received.values()) == received
    assert not ask(worker, hub, checkpoint=checkpoint, check_loading=False)["done"]["changed"]
    assert repository.read("README.md").decode() == text

    code = f"import sys\nsys.modules['normalign_llava'] = None\n{done['snippet']}\nprint(type(model))"
    environment = hub.environment(tmp_path / "home", hub.token("ann"))
    ran = subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert "transformers_modules" in ran.stdout and done["commit"] in ran.stdout, ran.stderr


def test_a_dry_run_needs_neither_token_nor_network(worker, checkpoint, tmp_path):
    said = worker.ask(
        {"checkpoint": str(checkpoint), "repo_id": "ann/m", "arguments": {"endpoint": "x:/", "dry_run": True}}
    )
    assert {"README.md", "config.json", "model.safetensors", MANIFEST} <= set(said["done"]["sent_files"])
    assert not said["done"]["changed"] and said["done"]["commit"] == ""
    assert said["said"][-1] == "It passed the checks."
    broken = shutil.copytree(checkpoint, tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    weights["model.multi_modal_projector.linear_1.weight"][0] = float("nan")
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    said = worker.ask({"checkpoint": str(broken), "repo_id": "ann/m", "arguments": {"dry_run": True}})
    assert (
        said["type"] == "ValueError" and f"{broken} does not work in a process without this package" in said["error"]
    )


def test_what_is_not_to_be_loaded_is_checked_otherwise_and_said_to_be_unloaded(worker, hub, checkpoint, tmp_path):
    broken = shutil.copytree(checkpoint, tmp_path / "broken")  # in a way that only loading it shows
    weights = load_file(broken / "model.safetensors")
    weights["model.multi_modal_projector.linear_1.weight"][0] = float("nan")
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    said = ask(worker, hub, checkpoint=broken, check_loading=False, dry_run=True)
    assert said["said"][-1] == "It passed the other checks, but was not loaded: as --no-verify asks."
    said = ask(worker, hub, checkpoint=broken, check_loading=False)
    assert said["done"]["commit"] == hub.repository("ann/m").head().oid
    lines = "\n".join(said["said"])
    assert "ann/m was not loaded" in lines and "Loading" not in lines
    assert not [line for line in hub.requests if "/resolve/" in line and "model.safetensors" in line]
    (broken / "modeling_normalign_llava.py").unlink()
    said = ask(worker, hub, checkpoint=broken, repo_id="ann/other", check_loading=False)
    assert said["type"] == "ValueError" and "cannot be published" in said["error"]


def test_a_card_of_someone_else_and_a_commit_that_strangers_cannot_load(worker, hub, checkpoint):
    hub.create("bob/m", files={"README.md": b"---\nlicense: mit\n---\nWhat Bob wrote.\n"})
    before = hub.repository("bob/m").head()
    said = ask(worker, hub, checkpoint=checkpoint, repo_id="bob/m", create_pr=True)
    assert said["type"] == "ValueError" and "--replace-card" in said["error"]
    hub.fault(404, r"(GET|HEAD) /bob/m/resolve/\w{40}/config.json", times=99)
    said = ask(worker, hub, checkpoint=checkpoint, repo_id="bob/m", create_pr=True, replace_card=True)
    repository = hub.repository("bob/m")
    commit = repository.head("refs/pr/1")
    assert repository.head() == before == repository.commits("refs/pr/1")[1] and "config.json" in commit.files
    assert said["type"] == "OSError" and commit.oid in said["error"] and before.oid in said["error"]
    hub.faults.clear()
    options = {"create_pr": True, "replace_card": True, "check_loading": False}
    done = ask(worker, hub, checkpoint=checkpoint, repo_id="bob/m", **options)["done"]
    assert done["commit"] == repository.head("refs/pr/2").oid and repository.head() == before
    assert done["pull_request"].endswith("/bob/m/discussions/2")


def test_what_is_wrong_before_anything_is_sent(worker, hub, checkpoint, tmp_path):
    hub.create("ann/m-demo", kind="space", files={"app.py": b"print()"})
    for arguments, words in {
        (("checkpoint", tmp_path / "nowhere"),): "is no folder",
        (("checkpoint", "ann/other"),): "hf download ann/other",
        (("as_adapter", True),): "not an adapter",
        (("base", "ann/base"),): "not an adapter",
        (("space", True),): "was not published by this package",
        (("space", True), ("create_pr", True)): "leave out --space",
        (("create_pr", True),): "does not exist",
    }.items():
        said = ask(worker, hub, **{"checkpoint": checkpoint, **dict(arguments)})
        assert said["type"] == "ValueError" and words in said["error"], arguments
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{}")
    assert "cannot be published" in ask(worker, hub, checkpoint=tmp_path / "broken")["error"]
    assert not [line for line in hub.requests if line.startswith(("POST", "PUT"))]
