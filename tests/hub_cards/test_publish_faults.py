# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Pushing while something goes wrong: the branch is at the old commit or at the new one, and a second run ends it."""

import hashlib
import os
import signal
import traceback

import pytest
from hub_server import HubServer
from publish_worker import Worker

from normalign_llava.hub_cards.push.client import Client


pytestmark = pytest.mark.slow


COMMIT, PUT = r"POST .*/commit/", r"PUT "


@pytest.fixture(scope="module")
def second(prepared):
    return Worker(prepared)


@pytest.fixture
def folder(tmp_path):
    return fill(tmp_path / "files")


def fill(folder, **more):
    folder.mkdir()
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(os.urandom(5000))
    for name, content in more.items():
        (folder / name).write_bytes(content)
    return folder


def asked(hub, folder, token=None, repo_id="ann/m", **arguments):
    token = token or hub.token("ann")
    return {
        "folder": str(folder),
        "repo_id": repo_id,
        "arguments": {"token": token, "endpoint": hub.url, "waits": [0, 0], **arguments},
    }


def published(hub, folder, branch="main", commits=2):
    """The branch holds the folder, and has `commits` commits."""
    repository = hub.repository("ann/m")
    assert len(repository.commits(branch)) == commits
    for path in folder.iterdir():
        assert repository.read(path.name, branch) == path.read_bytes()
    return repository.head(branch).oid


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    "kind, request_, arguments",
    [
        ("error", r"GET /api/whoami", {}),
        (429, r"GET /api/models/ann/m/revision", {}),
        ("close", r"GET /api/models/ann/m/tree", {}),
        ("error", r"POST /api/repos/create", {}),
        ("close", r"POST /api/repos/create", {}),
        ("lost", r"POST /api/repos/create", {}),
        ("error", r"POST .*/branch/", {"revision": "v2"}),
        ("lost", r"POST .*/branch/", {"revision": "v2"}),
        ("error", r"POST .*/preupload/", {}),
        ("error", r"POST .*/objects/batch", {}),
        ("error", PUT, {}),
        ("half", PUT, {}),
        ("lost", PUT, {}),
        ("error", r"POST /api/validate-yaml", {}),
        ("error", COMMIT, {}),
        ("close", COMMIT, {}),
        ("half", COMMIT, {}),
        ("lost", COMMIT, {}),
    ],
)
def test_what_fails_once_is_asked_again(worker, hub, folder, kind, request_, arguments):
    hub.fault(kind, request_)
    said = worker.ask(asked(hub, folder, **arguments))
    assert hub.faults[0].times == 0, "the fault did not happen"
    branch = arguments.get("revision", "main")
    assert said["done"]["commit"] == published(hub, folder, branch)
    assert said["done"]["changed"] and not said["done"]["deleted"]


def test_a_lost_answer_to_a_commit_to_which_the_hub_added(worker, hub, folder):
    (folder / "tokenizer.json").write_bytes(b"\0 in LFS, as a large one")  # of which .gitattributes says nothing yet
    hub.fault("lost", COMMIT)
    said = worker.ask(asked(hub, folder))
    assert said["done"]["commit"] == published(hub, folder)
    assert b"tokenizer.json filter=lfs" in hub.repository("ann/m").read(".gitattributes")


@pytest.mark.parametrize(
    "kind, request_, status",
    [
        ("error", r"POST /api/repos/create", "500"),
        (429, r"GET /api/models/ann/m/revision", "429"),
        ("error", COMMIT, "500"),
        ("close", COMMIT, None),
    ],
)
def test_what_fails_each_time_is_a_sentence_and_the_branch_is_as_it_was(worker, hub, folder, kind, request_, status):
    before = hub.create("ann/m", files={"config.json": b"old"}).head().oid if "create" not in request_ else None
    hub.fault(kind, request_, times=99)
    logged = len(worker.log)
    request = asked(hub, folder)
    said = worker.ask(request)
    assert said["type"] == "OSError" and "\n" not in said["error"]
    assert status is None or f"({status})" in said["error"]
    waited = worker.log[logged:].count(f"(status {status}). Trying again" if status else "Trying again in")
    assert waited == len(request["arguments"]["waits"])
    if before:
        assert hub.repository("ann/m").head().oid == before
        assert hub.repository("ann/m").read("config.json") == b"old"
    sent_before = sum(hub.received.values())
    hub.faults.clear()
    said = worker.ask(request)
    assert said["done"]["commit"] == published(hub, folder, commits=3 if before else 2)
    assert sum(hub.received.values()) == 5000 and (request_ != COMMIT or sent_before == 5000)


def test_what_the_client_gives_up_leaves_the_branch_and_only_the_rest_is_sent(worker, tmp_path):
    """The client itself asks again for 23 s, so these fail side by side."""
    faults = [("error", r"POST .*/preupload/"), ("error", r"POST .*/objects/batch"), ("error", None), ("close", None)]
    folder = fill(tmp_path / "files", **{"other.safetensors": os.urandom(3000)})
    other = digest(folder / "other.safetensors")
    hubs = [HubServer() for _ in faults]
    try:
        requests, heads = [], []
        for hub, (kind, request_) in zip(hubs, faults, strict=True):
            hub.__enter__()
            heads.append(hub.create("ann/m", files={"config.json": b"old"}).head().oid)
            hub.fault(kind, request_ or f"PUT .*{other}", times=99)
            requests.append(asked(hub, folder))
        for said in worker.ask({"at_once": requests})["all"]:
            assert said["type"] == "OSError"
            assert "ann/m is unchanged" in said["error"] and "Publish again" in said["error"]
        for hub, request, head, (_, request_) in zip(hubs, requests, heads, faults, strict=True):
            assert hub.repository("ann/m").head().oid == head
            assert sum(hub.received.values()) == (0 if request_ else 5000)
            hub.faults.clear()
            assert worker.ask(request)["done"]["commit"] == published(hub, folder, commits=3)
            assert sum(hub.received.values()) == 8000
    finally:
        for hub in hubs:
            hub.__exit__()


def test_killed_during_the_upload_and_run_again(worker, second, hub, tmp_path):
    folder = fill(tmp_path / "files", **{"other.safetensors": os.urandom(3000)})
    before = hub.create("ann/m", files={"config.json": b"old"}).head()
    first, other = digest(folder / "model.safetensors"), digest(folder / "other.safetensors")
    verified = hub.pause(r"POST .*/objects/verify")  # reached when the first is there
    pause = hub.pause(f"PUT .*{other}")
    request = asked(hub, folder)
    second.start(request)
    assert pause.reached.wait(60) and verified.reached.wait(60)
    os.kill(second.process.pid, signal.SIGKILL)
    second.process.wait()
    pause.release()
    verified.release()
    assert hub.repository("ann/m").head() == before
    assert worker.ask(request)["done"]["commit"] == published(hub, folder, commits=3)
    assert hub.received[first] == 5000


def test_no_network(worker, folder):
    with HubServer() as hub:
        request = asked(hub, folder)
    said = worker.ask(request)
    assert said["type"] == "OSError" and hub.url in said["error"] and "Nothing was sent" in said["error"]
    assert "During handling" not in said["traceback"]


def test_tokens_that_may_not_publish(worker, hub, folder):
    said = worker.ask(asked(hub, folder, token=hub.token("ann", role="read")))
    assert said["type"] == "ValueError" and "may only read" in said["error"]
    said = worker.ask(asked(hub, folder, token="hf_" + "Unknown" * 5))
    assert said["type"] == "OSError" and "401" in said["error"] and "hf auth login" in said["error"]
    said = worker.ask(asked(hub, folder, token="hf_" + "First" * 5 + "\n" + "Second" * 5))
    assert said["type"] == "ValueError" and "line break" in said["error"]
    said = worker.ask({**asked(hub, folder), "arguments": {"endpoint": hub.url}})
    assert said["type"] == "ValueError" and "hf auth login" in said["error"]
    assert not [line for line in hub.requests if line.startswith(("POST", "PUT"))]


def test_whatever_the_error_the_token_is_not_in_it():
    token = "hf_" + "Secret" * 6
    client = Client(token, endpoint="http://127.0.0.1:9")
    for kind, expected in ((ValueError, ValueError), (RuntimeError, OSError), (OSError, OSError)):
        try:
            with client.token_kept():
                try:
                    raise KeyError(f"header {token}")
                except KeyError as cause:
                    raise kind(f"{token} is not a header") from cause
        except Exception as error:
            assert type(error) is expected and str(error) == "<token> is not a header"
            assert token not in traceback.format_exc() + repr(error)
    with pytest.raises(RuntimeError, match="another") as raised, client.token_kept():
        raise RuntimeError("another")
    assert raised.value.__cause__ is None and token not in repr(client) + repr(client.api)


def test_a_repository_of_someone_else(worker, hub, folder):
    before = hub.create("bob/m", files={"config.json": b"his"}).head()
    said = worker.ask(asked(hub, folder, token=hub.token("ann", orgs=("lab",)), repo_id="bob/m"))
    assert said["type"] == "ValueError"
    assert all(name in said["error"] for name in ("bob", "ann/...", "lab/...", "--create-pr"))
    assert hub.repository("bob/m").head() == before and not hub.received

    said = worker.ask(asked(hub, folder, repo_id="bob/m", create_pr=True))
    repository = hub.repository("bob/m")
    assert repository.head() == before and said["done"]["pull_request"].startswith(f"{hub.url}/bob/m/discussions/")
    assert repository.branches["refs/pr/1"] == said["done"]["commit"]
    assert repository.read("config.json", "refs/pr/1") == b"{}"


@pytest.mark.parametrize("kind", ["error", "lost"])
def test_a_pull_request_is_not_opened_twice(worker, hub, folder, kind):
    hub.create("bob/m")
    hub.fault(kind, COMMIT)
    said = worker.ask(asked(hub, folder, repo_id="bob/m", create_pr=True))
    assert said["type"] == "OSError" and "pull request" in said["error"]
    assert len([line for line in hub.requests if "/commit/" in line]) == 1


def test_two_publishers_at_once(worker, second, hub, tmp_path, folder):
    other = fill(tmp_path / "other")
    hub.create("lab/m", files={"config.json": b"old"})
    ann, bob = (hub.token(name, orgs=("lab",)) for name in ("ann", "bob"))
    pause = hub.pause(COMMIT, times=1)
    worker.start(asked(hub, folder, token=ann, repo_id="lab/m"))
    assert pause.reached.wait(60)
    theirs = second.ask(asked(hub, other, token=bob, repo_id="lab/m"))["done"]["commit"]
    pause.release()
    said = worker.answer()
    repository = hub.repository("lab/m")
    assert said["type"] == "OSError" and theirs in said["error"] and "bob" in said["error"]
    assert repository.head().oid == theirs
    assert repository.read("model.safetensors") == (other / "model.safetensors").read_bytes()
    worker.ask(asked(hub, folder, token=ann, repo_id="lab/m"))
    assert repository.head().parent == theirs
    assert repository.read("model.safetensors") == (folder / "model.safetensors").read_bytes()


def test_two_publishers_of_the_same(worker, second, hub, folder):
    hub.create("ann/m")
    pause = hub.pause(COMMIT, times=1)
    worker.start(asked(hub, folder))
    assert pause.reached.wait(60)
    theirs = second.ask(asked(hub, folder))["done"]["commit"]
    pause.release()
    assert worker.answer()["done"]["commit"] == theirs == published(hub, folder)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_file_that_changes_meanwhile(worker, hub, folder, name):
    before = hub.create("ann/m").head()
    pause = hub.pause(PUT)
    worker.start(asked(hub, folder))
    assert pause.reached.wait(60)
    with (folder / name).open("ab") as file:
        file.write(b" ")
    pause.release()
    said = worker.answer()
    assert said["type"] == "ValueError" and str(folder / name) in said["error"]
    assert hub.repository("ann/m").head() == before
    assert worker.ask(asked(hub, folder))["done"]["commit"] == published(hub, folder)
