"""Processes that publish: `Worker` starts them, this file is also their script.

A request is JSON, an answer is JSON on stdout: what was done, or the error with its traceback as Python prints it. All
loggers say all they can on stderr.
"""

import json
import logging
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from prepared import Prepared


class Worker:
    """Publishes in processes of their own, which have no token but those in requests.

    Args:
        prepared: Starts them.
        variables: Further environment variables.

    Attributes:
        process: The last one.
        log: What all of them said on stderr.
    """

    def __init__(self, prepared: Prepared, **variables: str):
        self.prepared, self.variables, self.log = prepared, variables, ""

    def start(self, request: dict) -> None:
        """Sends a request, and does not wait."""
        self.request = request
        self.process = self.prepared.start([__file__, json.dumps(request)], **self.variables)

    def answer(self) -> dict:
        """Waits for what became of it. No token of the request is in the answer or in any log."""
        done = self.process.wait()
        self.log += done.stderr
        assert done.returncode == 0, f"the worker ended: {done.stderr[-3000:]}"
        for each in self.request.get("at_once", [self.request]):
            for part in each.get("arguments", {}).get("token", "").split():
                assert part not in done.stdout and part not in self.log
        reply = json.loads(done.stdout)
        print(reply)  # which pytest shows of a test that fails
        return reply

    def ask(self, request: dict) -> dict:
        """`start`, then `answer`."""
        self.start(request)
        return self.answer()


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
    logging.basicConfig(level=logging.DEBUG, stream=sys.stderr, force=True)
    replies, sys.stdout = sys.stdout, sys.stderr  # some libraries print
    asked = json.loads(sys.argv[1])
    if "at_once" in asked:
        with ThreadPoolExecutor() as threads:
            reply: dict = {"all": list(threads.map(run, asked["at_once"]))}
    else:
        reply = run(asked)
    print(json.dumps(reply), file=replies, flush=True)
