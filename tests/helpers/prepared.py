"""Processes that have imported the package when they begin: forks of one that did, once.

`Prepared` starts that one, and this file is its script: it reads requests from stdin and writes
answers to stdout, a line of JSON each. A test of how a process begins, or of what the package
imports, starts a fresh interpreter instead.
"""

import gc
import json
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path


MODULES = [
    *(f"normalign_llava.{name}" for name in ("cli", "train.run", "diagnose.run", "assembly.merge")),
    *(f"normalign_llava.hub_cards.{name}" for name in ("push.publish", "card.write")),
    *(f"transformers.models.{key}.modeling_{key}" for key in ("llava", "llama", "clip", "siglip")),
    *("transformers.models.llava.processing_llava", "transformers.tokenization_utils_tokenizers"),
    *("trl.trainer.sft_trainer", "matplotlib.pyplot", "bitsandbytes"),
]
"""What commands import, most of it when they run."""


class Started:
    """A process that runs, of id `pid`."""

    def __init__(self, prepared: "Prepared", words: list[str], pid: int, folder):
        self.prepared = prepared
        self.words = words
        self.pid = pid
        self.folder = folder
        self.status: int | None = None

    def poll(self, seconds: float | None = 0) -> int | None:
        """Its status, negative for a signal; None if it runs for longer."""
        if self.status is None:
            self.status = self.prepared.ask({"wait": self.pid, "seconds": seconds})
        return self.status

    def wait(self) -> subprocess.CompletedProcess:
        """Waits for its end: its status, and what it wrote."""
        self.poll(None)
        out, err = (Path(self.folder.name, name).read_text() for name in ("stdout", "stderr"))
        return subprocess.CompletedProcess(self.words, self.status, out, err)


class Prepared:
    """A process that has imported what commands need, and forks.

    Its forks share what libraries read as they are imported, such as `HF_ENDPOINT` and `HF_HOME`.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ):
        self.environment = {**environment, "OMP_NUM_THREADS": "1"}  # threads do not outlast a fork
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        words = [sys.executable, __file__, *MODULES]
        self._process = subprocess.Popen(words, env=self.environment, **pipes)

    def ask(self, request: dict) -> int | None:
        """What the process answers."""
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def start(self, words: list, cwd: Path | None = None, **environment: str) -> Started:
        """Starts what `python WORDS` would: `-m MODULE ...`, `-c CODE ...` or `FILE ...`."""
        folder = tempfile.TemporaryDirectory()
        words = [str(word) for word in words]
        request = {"words": words, "cwd": str(cwd or Path.cwd()), "to": folder.name}
        request["environment"] = {**self.environment, **environment}
        return Started(self, words, self.ask(request), folder)

    def run(self, *args, **kwargs) -> subprocess.CompletedProcess:
        """`start`, then `wait`."""
        return self.start(*args, **kwargs).wait()

    def run_ranks(self, words: list, **environment: str) -> list[subprocess.CompletedProcess]:
        """Two processes as torchrun starts them; AssertionError if they take three minutes."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        environment |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        both = [self.start(words, **environment, RANK=rank, LOCAL_RANK=rank) for rank in ("0", "1")]
        deadline = time.monotonic() + 180
        statuses = [None, None]
        while None in statuses and not any(statuses) and time.monotonic() < deadline:
            time.sleep(0.05)
            statuses = [process.poll() for process in both]
        for process, status in zip(both, statuses, strict=True):
            if status is None:
                os.kill(process.pid, signal.SIGKILL)
        ended = [process.wait() for process in both]
        stderr = "\n".join(process.stderr[-3000:] for process in ended)
        assert any(statuses) or None not in statuses, f"They hang.\n{stderr}"
        return ended

    def stop(self) -> None:
        """Ends the process that forks."""
        self._process.communicate()


def _become(words: list[str], cwd: str, environment: dict[str, str], to: str) -> None:
    for number, name in enumerate(("stdout", "stderr"), start=1):
        os.dup2(os.open(Path(to, name), os.O_WRONLY | os.O_CREAT), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # it may be of another TMPDIR
    os.chdir(cwd)
    kind = words[0]
    sys.argv = words if words[0] not in ("-m", "-c") else [words[0], *words[2:]]
    sys.path[0] = ""
    if kind == "-m":
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.path[0] = str(Path(kind).parent)
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # some libraries print
    for module in sys.argv[1:]:
        import_module(module)
    gc.freeze()
    running = {}
    for line in sys.stdin:
        asked = json.loads(line)
        if "wait" in asked:
            process = running[asked["wait"]]
            process.join(asked["seconds"])
            reply = process.exitcode
        else:
            process = multiprocessing.get_context("fork").Process(target=_become, kwargs=asked)
            process.start()
            running[reply := process.pid] = process
        print(json.dumps(reply), file=replies, flush=True)
    for process in running.values():  # of tests that failed
        process.kill()
