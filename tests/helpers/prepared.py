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
    "normalign_llava.cli",
    "normalign_llava.train.run",
    "normalign_llava.diagnose.run",
    "normalign_llava.assembly.merge",
    "normalign_llava.hub_cards.push.publish",
    "normalign_llava.hub_cards.card.write",
    "transformers.models.llava.modeling_llava",
    "transformers.models.llama.modeling_llama",
    "transformers.models.clip.modeling_clip",
    "transformers.models.siglip.modeling_siglip",
    "transformers.models.llava.processing_llava",
    "transformers.tokenization_utils_tokenizers",
    "trl.trainer.sft_trainer",
    "matplotlib.pyplot",
    "bitsandbytes",
]
"""What commands import, most of it when they run."""

LONGEST_RANKS_MAY_TAKE = 180  # seconds


class Started:
    """A process that runs, of id `pid`."""

    def __init__(
        self,
        prepared: "Prepared",
        words: list[str],
        pid: int,
        output_folder: tempfile.TemporaryDirectory,
    ):
        self.prepared = prepared
        self.words = words
        self.pid = pid
        self.output_folder = output_folder
        self.status: int | None = None

    def poll(self, seconds: float | None = 0) -> int | None:
        """Its status, negative for a signal; None if it runs for longer."""
        if self.status is None:
            request = {"wait": self.pid, "seconds": seconds}
            self.status = self.prepared.ask(request)
        return self.status

    def wait(self) -> subprocess.CompletedProcess:
        """Waits for its end: its status, and what it wrote."""
        self.poll(None)
        output_path = Path(self.output_folder.name)
        return subprocess.CompletedProcess(
            self.words,
            self.status,
            stdout=(output_path / "stdout").read_text(),
            stderr=(output_path / "stderr").read_text(),
        )


class Prepared:
    """A process that has imported what commands need, and forks.

    Its forks share what libraries read as they are imported, such as `HF_ENDPOINT` and `HF_HOME`.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ):
        # Threads do not outlast a fork.
        self.environment = {**environment, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, __file__, *MODULES],
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, request: dict) -> int | None:
        """What the process answers."""
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def start(self, words: list, cwd: Path | None = None, **environment: str) -> Started:
        """Starts what `python WORDS` would: `-m MODULE ...`, `-c CODE ...` or `FILE ...`."""
        output_folder = tempfile.TemporaryDirectory()
        words = [str(word) for word in words]
        request = {
            "words": words,
            "working_folder": str(cwd or Path.cwd()),
            "environment": {**self.environment, **environment},
            "output_folder": output_folder.name,
        }
        pid = self.ask(request)
        return Started(self, words, pid, output_folder)

    def run(self, *args, **kwargs) -> subprocess.CompletedProcess:
        """`start`, then `wait`."""
        return self.start(*args, **kwargs).wait()

    def run_ranks(self, words: list, **environment: str) -> list[subprocess.CompletedProcess]:
        """Two processes as torchrun starts them; AssertionError if they take three minutes."""
        with socket.create_server(("127.0.0.1", 0)) as free_socket:
            port = free_socket.getsockname()[1]
        environment = {
            **environment,
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        processes = []
        for rank in ("0", "1"):
            process = self.start(words, **environment, RANK=rank, LOCAL_RANK=rank)
            processes.append(process)

        statuses = _wait_for_all_or_a_failure(processes)
        for process, status in zip(processes, statuses, strict=True):
            if status is None:
                os.kill(process.pid, signal.SIGKILL)
        completed_processes = [process.wait() for process in processes]

        error_text = "\n".join(process.stderr[-3000:] for process in completed_processes)
        one_failed = any(statuses)
        all_ended = None not in statuses
        assert one_failed or all_ended, f"They hang.\n{error_text}"
        return completed_processes

    def stop(self) -> None:
        """Ends the process that forks."""
        self._process.communicate()


def _wait_for_all_or_a_failure(processes: list[Started]) -> list[int | None]:
    """Statuses when all have ended, when one has failed, or when the time is over."""
    deadline = time.monotonic() + LONGEST_RANKS_MAY_TAKE
    while True:
        time.sleep(0.05)
        statuses = [process.poll() for process in processes]
        one_failed = any(statuses)
        all_ended = None not in statuses
        if one_failed or all_ended or time.monotonic() >= deadline:
            return statuses


def _become(
    words: list[str],
    working_folder: str,
    environment: dict[str, str],
    output_folder: str,
) -> None:
    """Makes a fork the process that `python WORDS` would be."""
    _redirect(0, os.devnull, os.O_RDONLY)
    _redirect(1, Path(output_folder, "stdout"), os.O_WRONLY | os.O_CREAT)
    _redirect(2, Path(output_folder, "stderr"), os.O_WRONLY | os.O_CREAT)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # it may be of another TMPDIR
    os.chdir(working_folder)
    _run_python(words)


def _redirect(descriptor: int, target_path: str | Path, flags: int) -> None:
    target_descriptor = os.open(target_path, flags)
    os.dup2(target_descriptor, descriptor)


def _run_python(words: list[str]) -> None:
    sys.path[0] = ""
    if words[0] == "-m":
        sys.argv = ["-m", *words[2:]]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        code = compile(words[1], "<string>", "exec")
        exec(code, {"__name__": "__main__"})
    else:
        sys.argv = words
        sys.path[0] = str(Path(words[0]).parent)
        runpy.run_path(words[0], run_name="__main__")


def _serve(module_names: list[str]) -> None:
    """Imports the modules, then forks and waits as stdin asks, until stdin ends."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # some libraries print
    for module_name in module_names:
        import_module(module_name)
    gc.freeze()

    fork_context = multiprocessing.get_context("fork")
    processes = {}
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            process = processes[request["wait"]]
            process.join(request["seconds"])
            answer = process.exitcode
        else:
            process = fork_context.Process(target=_become, kwargs=request)
            process.start()
            processes[process.pid] = process
            answer = process.pid
        print(json.dumps(answer), file=replies, flush=True)
    for process in processes.values():  # of tests that failed
        process.kill()


if __name__ == "__main__":
    _serve(sys.argv[1:])
