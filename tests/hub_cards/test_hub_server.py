# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The hub of the tests, asked by the real client in its own processes, and by plain HTTP where it asks too little."""

import hashlib
import json
import os
import signal
import subprocess
import sys
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path

import pytest
from hub_server import HubServer


pytestmark = pytest.mark.slow


WEIGHTS = bytes(range(256)) * 4000
CARD = "---\nlicense: mit\ntags:\n- tiny\nbase_model: acme/base\npipeline_tag: image-text-to-text\n---\n# Tiny\n"
PREAMBLE = """
import json, os, sys
from pathlib import Path
from huggingface_hub import *

api, folder = HfApi(), sys.argv[1]


def add(path, content):
    return CommitOperationAdd(path, content)


def error(act, *args, **kwargs):
    try:
        act(*args, **kwargs)
    except Exception as raised:
        status = getattr(getattr(raised, "response", None), "status_code", None)
        return [type(raised).__name__, status, str(raised)]
    raise AssertionError("no error")


def tell(*values):
    print(json.dumps(values))
"""


def start(hub: HubServer, home: Path, code: str, token: str | None = None, **environment: str) -> subprocess.Popen:
    """A process of the real client that runs `code` on `home / "folder"`, with a cache in `home`."""
    return subprocess.Popen(
        [sys.executable, "-c", PREAMBLE + code, str(home / "folder")],
        env={**hub.environment(home, token), "HF_HUB_DISABLE_PROGRESS_BARS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(client: subprocess.Popen) -> list:
    """What the process told."""
    stdout, stderr = client.communicate()
    assert client.returncode == 0, stderr
    return json.loads(stdout.splitlines()[-1])


def run(hub: HubServer, home: Path, code: str, token: str | None = None, **environment: str) -> list:
    return finish(start(hub, home, code, token, **environment))


@pytest.fixture
def home(tmp_path):
    """A client's home, with a folder to push."""
    (tmp_path / "folder" / "sub").mkdir(parents=True)
    (tmp_path / "folder" / "README.md").write_text(CARD)
    (tmp_path / "folder" / "model.safetensors").write_bytes(WEIGHTS)
    (tmp_path / "folder" / "sub" / "an image.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR")
    (tmp_path / "folder" / "sub" / "config.json").write_text("{}")
    return tmp_path


def test_push_and_pull(home):
    with HubServer() as hub:
        told = run(
            hub,
            home,
            """
name = api.whoami()["name"]
urls = [api.create_repo("user/tiny", exist_ok=exist_ok) for exist_ok in (False, True)]
first = api.upload_folder(repo_id="user/tiny", folder_path=folder, commit_message="Weights")
again = api.upload_folder(repo_id="user/tiny", folder_path=folder)
info = api.model_info("user/tiny", files_metadata=True)
snapshot = snapshot_download("user/tiny")
paths = [path for path in Path(snapshot).rglob("*.*") if path.is_file()]
pulled = {str(path.relative_to(snapshot)): path.read_bytes().hex() for path in paths}
weights = next(file for file in info.siblings if file.rfilename == "model.safetensors")
listed = [file.path for file in api.list_repo_tree("user/tiny", recursive=True)]
below = [file.path for file in api.list_repo_tree("user/tiny", "sub")]
asked = [file.path for file in api.get_paths_info("user/tiny", ["sub", "README.md", "none"])]
exists = [api.file_exists("user/tiny", path) for path in ("sub/an image.png", "none")]
card = info.card_data.to_dict()
tell(name, urls, first.oid, again.oid, info.tags, card, weights.lfs.sha256, pulled, listed, below, asked, exists)
""",
            hub.token("user"),
        )
        name, urls, first, again, tags, card, sha256, pulled, listed, below, asked, exists = told
        repository = hub.repository("user/tiny")
        assert name == "user" and urls == [f"{hub.url}/user/tiny"] * 2 and first == again == repository.head().oid
        paths = [path for path in (home / "folder").rglob("*") if path.is_file()]
        files = {str(path.relative_to(home / "folder")): path.read_bytes().hex() for path in paths}
        assert pulled.pop(".gitattributes") and pulled == files
        assert listed == sorted([".gitattributes", "sub", *files])
        assert below == ["sub/an image.png", "sub/config.json"] and asked == ["sub", "README.md"]
        assert exists == [True, False]
        assert {"tiny", "license:mit", "base_model:acme/base", "image-text-to-text"} <= {*tags}
        assert card["base_model"] == "acme/base"
        assert sha256 == hashlib.sha256(WEIGHTS).hexdigest() == repository.head().files["model.safetensors"]
        assert hub.received[sha256] == hub.sent["user/tiny/model.safetensors"] == len(WEIGHTS)
        assert len(WEIGHTS) < hub.request_bytes < len(WEIGHTS) + 5000
        assert [(commit.title, commit.author) for commit in repository.commits()] == [
            ("Weights", "user"),
            ("initial commit", "user"),
        ]
        assert [request for request in hub.requests if "/commit/" in request] == [
            "POST /api/models/user/tiny/commit/main"
        ]


def test_commits_branches_tags_and_pull_requests(home):
    with HubServer() as hub:
        hub.create("user/tiny", files={"old-1.safetensors": b"1", "old/2.txt": b"2", "keep.txt": b"k"})
        told = run(
            hub,
            home,
            """
first = api.model_info("user/tiny").sha
api.create_branch("user/tiny", branch="next/one")
api.create_branch("user/tiny", branch="next/one", exist_ok=True)
twice = error(api.create_branch, "user/tiny", branch="next/one")
operations = [CommitOperationDelete("old-1.safetensors"), CommitOperationDelete("old/"), add("new.txt", b"new")]
on_branch = dict(repo_id="user/tiny", commit_message="Swap", commit_description="Why", revision="next/one")
done = api.create_commit(operations=operations, **on_branch)
missing = error(api.delete_file, "none.txt", "user/tiny")
stale = error(api.create_commit, operations=[add("x", b"x")], parent_commit=first, **on_branch)
api.create_tag("user/tiny", tag="v1", revision="next/one")
by_tag = Path(hf_hub_download("user/tiny", "new.txt", revision="v1")).read_text()
by_oid = Path(hf_hub_download("user/tiny", "keep.txt", revision=done.oid)).read_text()
nowhere = error(hf_hub_download, "user/tiny", "keep.txt", revision="v9")
nothing = error(hf_hub_download, "user/tiny", "none.txt")
request = api.create_commit("user/tiny", [add("pr.txt", b"pr")], commit_message="Ask", create_pr=True)
by_request = Path(hf_hub_download("user/tiny", "pr.txt", revision=request.pr_revision)).read_text()
listed = api.list_repo_commits("user/tiny", revision="v1")
commits = [[commit.title, commit.message, commit.authors] for commit in listed]
refs = api.list_repo_refs("user/tiny", include_pull_requests=True)
names = [[ref.name for ref in kind] for kind in (refs.branches, refs.tags, refs.pull_requests)]
api.delete_branch("user/tiny", branch="next/one")
api.delete_tag("user/tiny", tag="v1")
api.super_squash_history("user/tiny", commit_message="One")
tell(twice, missing, stale, nowhere, nothing, by_tag, by_oid, by_request, request.pr_url, commits, names)
""",
            hub.token("user"),
        )
        twice, missing, stale, nowhere, nothing, by_tag, by_oid, by_request, pr_url, commits, names = told
        assert twice[:2] == ["HfHubHTTPError", 409] and stale[:2] == ["HfHubHTTPError", 412]
        assert "A commit has happened since" in stale[2]
        assert missing[0] == nothing[0] == "RemoteEntryNotFoundError" and nowhere[0] == "RevisionNotFoundError"
        assert (by_tag, by_oid, by_request, pr_url) == ("new", "k", "pr", f"{hub.url}/user/tiny/discussions/1")
        assert commits[0] == ["Swap", "Why", ["user"]] and len(commits) == 3
        assert names == [["main", "next/one"], ["v1"], ["refs/pr/1"]]
        repository = hub.repository("user/tiny")
        assert {*repository.branches} == {"main", "refs/pr/1"} and not repository.tags
        assert [commit.title for commit in repository.commits()] == ["One"]
        assert [*repository.head().files] == [".gitattributes", "keep.txt", "old-1.safetensors", "old/2.txt"]
        assert repository.read("pr.txt", "refs/pr/1") == b"pr"


def test_who_may_do_what(home):
    with HubServer() as hub:
        hub.create("user/secret", private=True, files={"a.txt": b"a"})
        hub.create("user/open", files={"a.txt": b"a"})
        environment = {
            "READER": hub.token("user", "read"),
            "STRANGER": hub.token("other"),
            "COLLEAGUE": hub.token("colleague", orgs=("user",)),
        }
        told = run(
            hub,
            home,
            """
reader, stranger, colleague = (os.environ[name] for name in ("READER", "STRANGER", "COLLEAGUE"))
to_open = dict(path_or_fileobj=b"b", path_in_repo="b", repo_id="user/open")
tell(
    [error(api.model_info, "user/secret", token=token)[:2] for token in (False, stranger)],
    [Path(hf_hub_download("user/secret", "a.txt", token=token)).read_text() for token in (reader, colleague)],
    [error(api.whoami, token="hf_wrong")[1], error(api.model_info, "user/open", token="hf_wrong")[1]],
    [error(api.create_repo, "user/new", token=token)[1] for token in (False, reader, stranger)],
    [error(api.upload_file, **to_open, token=token)[1] for token in (False, reader, stranger)],
    [error(api.delete_repo, "user/open", token=token)[1] for token in (False, reader, stranger)],
    api.upload_file(**to_open, token=stranger, create_pr=True).pr_revision,
    [api.whoami(token=token)["auth"]["accessToken"]["role"] for token in (reader, colleague)],
    api.upload_file(**{**to_open, "repo_id": "user/secret"}, token=colleague).oid,
    api.update_repo_settings("user/secret", private=False, token=colleague),
    str(api.create_repo("user/hidden", private=True, token=colleague)),
    api.delete_repo("user/open", token=colleague),
)
""",
            **environment,
        )
        hidden, allowed, unknown, *refused, pr, roles, _, _, _, _ = told
        assert hidden == [["RepositoryNotFoundError", 404]] * 2 and allowed == ["a", "a"]
        assert unknown == [401, 401] and refused == [[401, 403, 403]] * 3
        assert pr == "refs/pr/1" and roles == ["read", "write"]
        assert hub.repository("user/secret").head().author == "colleague"
        assert hub.repository("user/hidden").private and not hub.repository("user/secret").private
        with pytest.raises(KeyError):
            hub.repository("user/open")


def test_cards_spaces_and_data_sets(home):
    with HubServer() as hub:
        token = hub.token("user")
        told = run(
            hub,
            home,
            """
for kind in ("space", "dataset"):
    api.create_repo("user/tiny", repo_type=kind, space_sdk="gradio" if kind == "space" else None)
    api.upload_file(path_or_fileobj=kind.encode() * 9, path_in_repo="a.bin", repo_id="user/tiny", repo_type=kind)
api.create_repo("user/tiny")
RepoCard("---\\nlicense: mit\\n---\\n# A card").push_to_hub("user/tiny")
files = [Path(hf_hub_download("user/tiny", "a.bin", repo_type=kind)).read_text() for kind in ("space", "dataset")]
cards = ["---\\nlicense: [mit\\n---\\n", "---\\njust text\\n---\\n", "---\\ntags: one\\n---\\n",
         "---\\nbase_model: /tmp/base\\n---\\n", "---\\nmodel-index:\\n- name: x\\n  results: [{}]\\n---\\n"]
readme = dict(path_in_repo="README.md", repo_id="user/tiny")
broken = [error(api.upload_file, path_or_fileobj=card.encode(), **readme) for card in cards]
tell(files, broken, ModelCard.load("user/tiny").data.license, api.space_info("user/tiny").sha)
""",
            token,
        )
        files, broken, licence, sha = told
        assert files == ["space" * 9, "dataset" * 9] and licence == "mit"
        assert [error[0] for error in broken] == ["ValueError"] * 5
        assert "Invalid metadata" in broken[0][2] and "mapping" in broken[1][2]
        assert all(
            name in said[2] for name, said in zip(("tags", "base_model", "model-index"), broken[2:], strict=True)
        )
        assert len(hub.repository("user/tiny").commits()) == 2
        assert (
            sha == hub.repository("user/tiny", "space").head().oid != hub.repository("user/tiny", "dataset").head().oid
        )


def ask(hub: HubServer, method: str, path: str, body: bytes = b"", token: str | None = None, **headers: str):
    """Status, headers and body of an answer, by plain HTTP."""
    connection = HTTPConnection(hub.url.removeprefix("http://"))
    if token:
        headers["Authorization"] = f"Bearer {token}"
    with closing(connection):
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()


def test_ranges_and_headers(home):
    with HubServer({"user/tiny": home / "folder"}) as hub:
        path, sha256 = "/user/tiny/resolve/main/model.safetensors", hashlib.sha256(WEIGHTS).hexdigest()
        status, headers, body = ask(hub, "HEAD", path)
        assert (status, body, headers["Content-Length"]) == (200, b"", str(len(WEIGHTS)))
        assert headers["X-Linked-Etag"] == headers["ETag"] == f'"{sha256}"'
        assert headers["X-Linked-Size"] == str(len(WEIGHTS))
        assert headers["X-Repo-Commit"] == hub.repository("user/tiny").head().oid and not hub.sent
        status, headers, body = ask(hub, "GET", path, Range="bytes=5-8")
        assert (status, body, headers["Content-Range"]) == (206, WEIGHTS[5:9], f"bytes 5-8/{len(WEIGHTS)}")
        assert ask(hub, "GET", path, Range=f"bytes={len(WEIGHTS) - 2}-")[2] == WEIGHTS[-2:]
        assert ask(hub, "GET", path, Range=f"bytes={len(WEIGHTS)}-")[0] == 416
        assert hub.sent == {"user/tiny/model.safetensors": 6}
        regular = ask(hub, "HEAD", "/user/tiny/resolve/main/sub/config.json")[1]
        git = subprocess.run(["git", "hash-object", "--stdin"], input=b"{}", capture_output=True).stdout.decode()
        assert regular["ETag"] == f'"{git.strip()}"' and "X-Linked-Etag" not in regular


def test_content_is_checked(home):
    with HubServer() as hub:
        token, content = hub.token("user"), b"\0content"
        hub.create("user/tiny")
        sha256, lfs = hashlib.sha256(content).hexdigest(), "/user/tiny.git/info/lfs/objects"
        objects = json.dumps({"objects": [{"oid": sha256, "size": len(content)}]}).encode()
        (before,) = json.loads(ask(hub, "POST", f"{lfs}/batch", objects, token)[2])["objects"]
        href = before["actions"]["upload"]["href"].removeprefix(hub.url)
        line = {"key": "lfsFile", "value": {"path": "a.bin", "algo": "sha256", "oid": sha256, "size": len(content)}}
        commit = b'{"key": "header", "value": {"summary": "s"}}\n' + json.dumps(line).encode()
        assert ask(hub, "PUT", href, content[:-1])[0] == 400
        assert ask(hub, "POST", "/api/models/user/tiny/commit/main", commit, token)[0] == 400
        assert not hub.received and len(hub.repository("user/tiny").commits()) == 1
        assert ask(hub, "PUT", href, content)[0] == 200
        wrong = json.dumps({"oid": sha256, "size": 1}).encode()
        assert ask(hub, "POST", f"{lfs}/verify", wrong, token)[0] == 400
        (after,) = json.loads(ask(hub, "POST", f"{lfs}/batch", objects, token)[2])["objects"]
        assert "actions" not in after and hub.received == {sha256: len(content)}
        assert ask(hub, "POST", "/api/models/user/tiny/commit/main", commit, token)[0] == 200
        assert hub.repository("user/tiny").read("a.bin") == content


def test_faults(home):
    with HubServer() as hub:
        hub.fault("close", "POST /api/repos/create")
        hub.fault("half", "^PUT ")
        hub.fault("error", "/commit/")
        hub.fault("lost", "/commit/")
        # The client keeps what came in whole pieces of 10 MiB, and asks for the rest.
        large, piece = bytes(24 * 2**20), 10 * 2**20
        hub.create("user/large", files={"a.bin": large})
        hub.fault("truncated", "GET .*/a.bin")
        hub.fault(403, "GET .*/sub/config.json", after=1)
        told = run(
            hub,
            home,
            """
closed = error(api.create_repo, "user/tiny")
api.create_repo("user/tiny")
push = dict(repo_id="user/tiny", folder_path=folder)
refused = error(api.upload_folder, **push)
lost = error(api.upload_folder, **push)
rerun = api.upload_folder(**push)
large = Path(hf_hub_download("user/large", "a.bin")).read_bytes()
config = hf_hub_download("user/tiny", "sub/config.json")
denied = error(hf_hub_download, "user/tiny", "sub/config.json", force_download=True)
tell(closed, refused, lost, rerun.oid, large == bytes(len(large)), len(large), denied)
""",
            hub.token("user"),
        )
        closed, refused, lost, rerun, *resumed, denied = told
        assert closed[:2] == lost[:2] == ["RemoteProtocolError", None] and refused[:2] == ["HfHubHTTPError", 500]
        assert denied[1] == 403
        repository = hub.repository("user/tiny")
        assert len(repository.commits()) == 2 and rerun == repository.head().oid
        assert len([line for line in hub.requests if line.startswith("PUT ")]) == 3
        assert hub.received[hashlib.sha256(WEIGHTS).hexdigest()] == len(WEIGHTS) < hub.request_bytes
        assert resumed == [True, len(large)]
        assert hub.sent["user/large/a.bin"] == len(large) // 2 + len(large) - piece


PUSH = 'tell(api.upload_folder(repo_id="user/tiny", folder_path=folder).oid)'


def test_a_client_killed_while_it_uploads(home):
    with HubServer() as hub:
        hub.create("user/tiny")
        token, first = hub.token("user"), hub.repository("user/tiny").head()
        with hub.pause("^PUT ") as pause:
            client = start(hub, home, PUSH, token)
            assert pause.reached.wait(60)
            os.kill(client.pid, signal.SIGKILL)
            client.communicate()
        assert run(hub, home, PUSH, token) == [hub.repository("user/tiny").head().oid]
        assert [commit.parent for commit in hub.repository("user/tiny").commits()] == [first.oid, None]
        assert hub.repository("user/tiny").read("model.safetensors") == WEIGHTS
        assert set(hub.received.values()) == {len(WEIGHTS), 16}


def test_two_clients_at_once(home):
    with HubServer() as hub:
        hub.create("user/tiny")
        token, first = hub.token("user"), hub.repository("user/tiny").head()
        add = f'api.create_commit("user/tiny", [add(%r, b"1")], commit_message="m", parent_commit="{first.oid}")'
        with hub.pause("/commit/", times=1) as pause:
            late = start(hub, home, "tell(error(lambda: " + add % "late" + "))", token)
            assert pause.reached.wait(60)
            (oid,) = run(hub, home, "tell(" + add % "early" + ".oid)", token)
            pause.release()
            ((name, status, _),) = finish(late)
        assert (name, status) == ("HfHubHTTPError", 412)
        assert hub.repository("user/tiny").head().oid == oid
        assert [*hub.repository("user/tiny").head().files] == [".gitattributes", "early"]


def test_xet_is_the_default_path(home):
    """Pushed by one process, pulled by a second, and by a third that has no Xet; pushed again, nothing moves."""
    pull = 'tell(Path(hf_hub_download("user/tiny", "model.safetensors")).read_bytes().hex())'
    (home / "xet").mkdir()
    with HubServer(xet=home / "xet") as hub:
        hub.create("user/tiny")
        token, sha256 = hub.token("user"), hashlib.sha256(WEIGHTS).hexdigest()
        (oid,) = run(hub, home, PUSH, token)
        repository = hub.repository("user/tiny")
        assert repository.head().oid == oid and repository.head().files["model.safetensors"] == sha256
        assert repository.read("model.safetensors") == WEIGHTS
        assert not hub.received and not any(line.startswith("PUT ") for line in hub.requests)
        assert hub.request_bytes < 5000
        assert run(hub, home, pull) == [WEIGHTS.hex()]
        assert not hub.sent and "GET /api/models/user/tiny/xet-read-token/" + oid in hub.requests
        assert run(hub, home / "other", pull, HF_HUB_DISABLE_XET="1") == [WEIGHTS.hex()]
        assert hub.sent == {"user/tiny/model.safetensors": len(WEIGHTS)}
        again = """
weights = add("copy.safetensors", folder + "/model.safetensors")
request = api.create_commit("user/tiny", [weights], commit_message="Copy", create_pr=True)
tell(api.upload_folder(repo_id="user/tiny", folder_path=folder).oid, request.pr_revision,
     api.upload_folder(repo_id="user/tiny", folder_path=folder, path_in_repo="b", create_pr=True).pr_url)
"""
        assert run(hub, home, again, token) == [oid, "refs/pr/1", f"{hub.url}/user/tiny/discussions/2"]
        assert repository.read("copy.safetensors", "refs/pr/1") == repository.read("b/model.safetensors", "refs/pr/2")
