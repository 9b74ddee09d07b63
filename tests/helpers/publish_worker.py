"""A process that publishes: `Worker` starts one, this file is also its script.

Requests come as lines of JSON on stdin, answers go as lines of JSON to stdout: what was done, or the error with its
traceback as Python prints it. All loggers say all they can on stderr.
"""

import json
import logging
import os
import subprocess
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path


class Worker:
    """A process of its own, with an empty cache and no token but those in requests.

    Args:
        folder: For its cache and what it logs.
        xet: Whether to upload by Xet where the hub offers it.
        variables: Further environment variables.
    """

    def __init__(self, folder: Path, xet: bool = False, **variables: str):
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING_FACE"))}
        environment = inherited | {"HF_HOME": str(folder / "home"), **variables}
        if not xet:
            environment["HF_HUB_DISABLE_XET"] = "1"
        self.log = folder / "log.txt"
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log.open("a"),
            text=True,
            env=environment,
        )

    def start(self, request: dict) -> None:
        """Sends a request, and does not wait."""
        self.request = json.dumps(request)
        self.process.stdin.write(self.request + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict:
        """Waits for what became of it. No token of the request is in the answer or in any log."""
        line = self.process.stdout.readline()
        assert line, f"the worker ended: {self.log.read_text()[-3000:]}"
        request = json.loads(self.request)
        for each in request.get("at_once", [request]):
            for part in each.get("arguments", {}).get("token", "").split():
                assert part not in line and part not in self.log.read_text()
        reply = json.loads(line)
        print(reply)  # which pytest shows of a test that fails
        return reply

    def ask(self, request: dict) -> dict:
        """`start`, then `answer`."""
        self.start(request)
        return self.answer()

    def stop(self) -> None:
        """Kills the process, wherever it is."""
        self.process.kill()
        self.process.wait()


def run(request: dict) -> dict:
    """Pushes all files of `request["folder"]`, or publishes `request["checkpoint"]`."""
    arguments = dict(request["arguments"])
    said: list[str] = []
    try:
        if "checkpoint" in request:
            from normalign_llava.hub_cards.push.publish import publish

            done = publish(request["checkpoint"], request["repo_id"], notify=said.append, **arguments)
        else:
            done = _push(Path(request["folder"]), request["repo_id"], said, arguments)
        return {"done": {**asdict(done), "changed": done.changed}, "said": said}
    except Exception as error:
        shown = "".join(traceback.format_exception(error))
        return {
            "error": str(error),
            "type": type(error).__name__,
            "repr": repr(error),
            "traceback": shown,
            "said": said,
        }


def _push(folder: Path, repo_id: str, said: list[str], arguments: dict):
    from normalign_llava.checkpoint.find import check_repo_id
    from normalign_llava.hub_cards.push.client import Client
    from normalign_llava.hub_cards.push.contents import Content, Contents
    from normalign_llava.hub_cards.push.push import push_snapshot, take_snapshot
    from normalign_llava.hub_cards.push.repository import read_repository

    files = sorted(path for path in folder.rglob("*") if path.is_file())
    sent = [Content(path.relative_to(folder).as_posix(), path, path.stat().st_size, "record") for path in files]
    contents = Contents(sent, {})
    check_repo_id(repo_id)
    kind, revision = arguments.get("kind", "model"), arguments.get("revision", "main")
    client = Client(**{name: arguments.pop(name) for name in ("token", "endpoint", "waits") if name in arguments})
    with client.token_kept():
        client.check_account(repo_id, arguments.get("create_pr", False))
        client.check_card(contents, kind)
        snapshot = take_snapshot(contents)
        with client.step(f"looking at {repo_id}", "Nothing was sent."):
            before = read_repository(client, repo_id, kind, revision)
        return push_snapshot(client, snapshot, repo_id, before=before, notify=said.append, **arguments)


if __name__ == "__main__":
    logging.basicConfig(level=logging.DEBUG, stream=sys.stderr)
    replies, sys.stdout = sys.stdout, sys.stderr  # some libraries print
    for line in sys.stdin:
        asked = json.loads(line)
        if "at_once" in asked:
            with ThreadPoolExecutor() as threads:
                reply: dict = {"all": list(threads.map(run, asked["at_once"]))}
        else:
            reply = run(asked)
        print(json.dumps(reply), file=replies, flush=True)
