# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The hub of the tests, asked by the real client in its own processes, and by plain HTTP where it asks too little."""

import hashlib
import json
import subprocess
import sys
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path

import pytest
from hub_server import HubServer


pytestmark = pytest.mark.slow


WEIGHTS = bytes(range(256)) * 4000
PREAMBLE = """
import json, os, sys
from pathlib import Path
from huggingface_hub import *

api, folder = HfApi(), sys.argv[1]


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
    (tmp_path / "folder" / "README.md").write_text("# Tiny\n")
    (tmp_path / "folder" / "model.safetensors").write_bytes(WEIGHTS)
    (tmp_path / "folder" / "sub" / "an image.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR")
    (tmp_path / "folder" / "sub" / "config.json").write_text("{}")
    return tmp_path


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
    api.upload_file(**to_open, token=stranger, create_pr=True).pr_revision,
    [api.whoami(token=token)["auth"]["accessToken"]["role"] for token in (reader, colleague)],
    api.upload_file(**{**to_open, "repo_id": "user/secret"}, token=colleague).oid,
    str(api.create_repo("user/hidden", private=True, token=colleague)),
)
""",
            **environment,
        )
        hidden, allowed, unknown, *refused, pr, roles, _, _ = told
        assert hidden == [["RepositoryNotFoundError", 404]] * 2 and allowed == ["a", "a"]
        assert unknown == [401, 401] and refused == [[401, 403, 403]] * 2
        assert pr == "refs/pr/1" and roles == ["read", "write"]
        assert hub.repository("user/secret").head().author == "colleague"
        assert hub.repository("user/hidden").private


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


PUSH = 'tell(api.upload_folder(repo_id="user/tiny", folder_path=folder).oid)'


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
        assert run(hub, home, PUSH, token) == [oid]
