# SPDX-License-Identifier: Apache-2.0
"""Files of checkpoints: names, finding, atomic writing, locks. No torch: errors come quickly."""

import glob
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from textwrap import shorten
from typing import Any

from filelock import FileLock, Timeout
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HTTPError, RevisionResolutionError
from huggingface_hub.utils import HFValidationError, validate_repo_id

from ..errors import writing_to


WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
CARD = "README.md"
BUILD_RECORD = "build.json"  # what `normalign build` built
TRAINING_RECORD = "training.json"  # how a checkpoint was trained: recipe, data, hardware, versions
DYNAMICS = "dynamics.jsonl"  # inter-layer cosines in training, a line per measured step (figure 5)
SAMPLES = "samples.jsonl"  # answers to held-out rows in training
RECORDS = (TRAINING_RECORD, BUILD_RECORD, DYNAMICS)
STATE = "trainer_state.json"  # the Trainer's state, with the log
LOCK, OLD = ".normalign.lock", ".replaced"  # the latter in the temporary folder of what replaces it
_held: set[Path] = set()  # folders whose lock this process has


def find_model(
    model: str | os.PathLike, revision: str | None = None, *, remedy: str = "Check the path."
) -> tuple[str, str | None]:
    """The path or Hub id of a model that exists, and the commit to read all its files at.

    The Hub is asked once, and only about a valid Hub id. All must be read at this commit, since a
    branch may move meanwhile. It is None for a path, and the cache's if the Hub cannot be reached.
    Raises ValueError, with the `remedy`, if neither a folder, the Hub nor the cache has the model.
    """
    path = Path(os.path.expanduser(model))  # which leaves an unknown user as it is
    if path.exists():
        return str(path), None
    absent = f"{model} is no file or folder here"
    if not is_hub_id(name := os.fspath(model)):
        raise ValueError(f"{absent}. {remedy} A model of the Hub is named owner/name.")
    try:
        return name, HfApi().resolve_revision(name, revision=revision).resolved
    except (HTTPError, OSError, RevisionResolutionError) as error:
        raise ValueError(
            f"{absent}. {constants.ENDPOINT} has none that you may see, or cannot be asked "
            f"({str(error).partition(chr(10))[0]}). {remedy} A private model needs `hf auth login`."
        ) from error


def find_checkpoint(
    model: str | os.PathLike, revision: str | None = None, *, remedy: str = "Check the path."
) -> tuple[str, str | None]:
    """[`find_model`], which also raises ValueError for a folder without `config.json`."""
    source, commit = find_model(model, revision, remedy=remedy)
    folder = Path(source)
    if (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").exists():
        merge = f"normalign merge {model} --output DIR"
        raise ValueError(f"{model} is an adapter. Merge it first: `{merge}`.")
    if folder.exists():
        _check_holds(folder, "config.json", f"It is no model of transformers. {remedy}")
    return source, commit


def check_folder(folder: str | os.PathLike) -> None:
    """Raises ValueError unless `folder` is that of a checkpoint or an adapter."""
    if not (Path(folder) / ADAPTER_CONFIG).is_file():
        _check_holds(folder, "config.json", f"Without {ADAPTER_CONFIG} it is no adapter either.")


def check_adapter(adapter: str | os.PathLike) -> None:
    """Raises ValueError unless the folder holds an adapter: its configuration and its weights."""
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        _check_holds(adapter, name, "Give an adapter's folder, which training with use_peft wrote.")


def _check_holds(folder: str | os.PathLike, name: str, remedy: str) -> None:
    if not Path(folder).exists():
        raise ValueError(f"{folder} is no folder here. Check the path.")
    if not (Path(folder) / name).is_file():
        inside = sorted(file.parent.name for file in Path(folder).glob(f"checkpoint-*/{name}"))
        instead = f" It has {', '.join(inside)}: name one of them." if inside else ""
        raise ValueError(f"{folder} has no {name}. {remedy}{instead}")


def check_repo_id(repo_id: str) -> None:
    """Raises ValueError unless `repo_id` is `"namespace/name"` as the Hub allows it."""
    validate_repo_id(repo_id)
    if "/" not in repo_id:
        raise ValueError(f"{repo_id!r} lacks the repository's owner. Give user/name.")


def is_hub_id(name: str) -> bool:
    """Whether `name` is a valid Hub id, owner/name."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return "/" in name


def cache_dir() -> Path:
    """`$NORMALIGN_CACHE`, or `normalign-llava` in `$XDG_CACHE_HOME` or `~/.cache`."""
    if override := os.environ.get("NORMALIGN_CACHE"):
        return Path(override).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "normalign-llava"


@contextmanager
def atomic_write(target: str | os.PathLike) -> Iterator[Path]:
    """Yields the path of a temporary file that becomes `target` when the block ends without error.

    It has the mode of any new file, since nobody can foresee the name of the folder that it is in.
    """
    target = Path(target)
    remove_unfinished(target)
    with _temporary(target) as temporary:
        yield temporary / target.name
        os.replace(temporary / target.name, target)


@contextmanager
def finished_folder(
    target: str | os.PathLike, written: Callable[[Path], Collection[str]] | None = None
) -> Iterator[Path]:
    """Yields a temporary folder that becomes `target` if the block ends without error.

    Otherwise it is removed. With `written`, `target` lies in a checkpoint, and an earlier version
    of it is replaced as a whole, unless it holds other names than `written` returns. If that is
    interrupted, the next run takes the second step.

    Raises ValueError if another process is making `target`, or it holds something else, and
    FileExistsError if it was filled meanwhile: the message says where the new one is kept.
    """
    target = Path(target).resolve()

    def foreign() -> str:
        names = {path.name for path in target.iterdir()} if target.exists() else set()
        others = sorted(names - set(written(target) if written else ()))
        return f"{target} holds {others[0]}, which is not to be replaced." if others else ""

    if written:
        check_free(target.parent)
    if locks := remove_unfinished(target):
        raise ValueError(busy(target, locks[0]))
    if problem := foreign():
        raise ValueError(f"{problem} Choose another folder, or move that away first.")
    with _temporary(target) as temporary:
        made = temporary / target.name
        made.mkdir()
        yield made
        if problem := foreign():
            kept = temporary.with_name(f"{target.name}-{temporary.name[-8:]}")
            os.replace(made, kept)
            raise FileExistsError(f"{problem} What was made is in {kept}.")
        if target.exists():
            os.replace(target, temporary / OLD)
        os.replace(made, target)


@contextmanager
def _temporary(target: Path) -> Iterator[Path]:
    """Yields a new folder beside `target`, with a lock, and clears it up."""
    with writing_to(target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        try:
            with only_writer(temporary):
                yield temporary
        finally:
            _clear(temporary, target)


def remove_unfinished(target: Path) -> list[Path]:
    """Removes killed processes' temporary folders for `target`; returns the locks of those in use.

    Their names end in eight letters of `tempfile`'s, and they hold nothing but `target`, the folder
    that it replaces, and the lock.
    """
    locks = []
    for unfinished in target.parent.glob(f".{glob.escape(target.name)}-" + "[a-z0-9_]" * 8):
        if unfinished.is_symlink() or not unfinished.is_dir():
            continue
        try:
            names = {path.name for path in unfinished.iterdir()}
        except OSError:  # another user's, or removed by now
            continue
        if names - {LOCK} and names <= {target.name, OLD, LOCK}:  # a lone lock may soon be taken
            lock = FileLock(unfinished / LOCK, thread_local=False)
            try:
                lock.acquire(timeout=0)
            except OSError:  # a process has it, or another user
                locks.append(unfinished / LOCK)
                continue
            lock.release()
            _clear(unfinished, target)
    return locks


def _clear(temporary: Path, target: Path) -> None:
    """Takes the second step of a replacement that was begun, and removes what is left."""
    if (temporary / OLD).exists() and not target.exists():
        os.replace(temporary / target.name, target)
    shutil.rmtree(temporary, ignore_errors=True)


def check_not_in_run(folder: Path) -> None:
    """Raises ValueError if a training run takes a folder for one of its checkpoints, or has it in.

    The Trainer reads the beginning of names: `checkpoint-6-merged` is step 6 to it. It resumes from
    such folders, and deletes the oldest.
    """
    folder = folder.resolve()
    for taken in (folder, *folder.parents):
        if re.match(r"checkpoint-\d", taken.name) and _is_run(taken.parent, taken):
            inside = "is named as" if taken == folder else f"lies in {taken.name}, which is"
            remedy = f"Choose a folder outside {taken.parent}, or another name in it."
            raise ValueError(
                f"{folder} {inside} a checkpoint of the run in {taken.parent}, which may delete it "
                f"and would try to resume from it. {remedy}"
            )


def _is_run(folder: Path, candidate: Path) -> bool:
    """Whether a folder is a training run's: it holds a trained model, or other checkpoints."""
    trained = any((folder / name).is_file() for name in (ADAPTER_CONFIG, TRAINING_RECORD, STATE))
    beside = [path for path in folder.glob("checkpoint-*") if path != candidate]
    return trained or any((path / STATE).is_file() for path in [candidate, *beside])


def json_or_none(path: Path) -> Any:
    """The content of a JSON file, or None if it does not exist or is not valid."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def write_json(path: Path, content: Any) -> None:
    """Writes `content` to `path` atomically."""
    with atomic_write(path) as partial:
        partial.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", "utf-8")


@contextmanager
def only_writer(folder: str | os.PathLike, wait: float = 10.0) -> Iterator[None]:
    """Keeps other processes from writing to a folder, which is created, and removed if still empty.

    A process that has the lock may ask for it again; the operating system releases it when it ends,
    even if killed. Raises ValueError, which names the process, if another has the lock for longer
    than `wait` seconds: results are written in less, training takes longer.
    """
    folder = Path(folder).resolve()
    if folder in _held:
        yield
        return
    is_new, file = not folder.exists(), folder / LOCK
    lock = FileLock(file, thread_local=False)
    with writing_to(folder):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=wait)
        except Timeout as error:
            raise ValueError(busy(folder, file)) from error
    _held.add(folder)
    try:
        command = shlex.join([Path(sys.argv[0]).name or "python", *sys.argv[1:]])
        command = shorten(command, 120, placeholder=" ...")
        file.write_text(f"`{command}`, process {os.getpid()}", "utf-8")
        yield
    finally:
        _held.discard(folder)
        file.unlink(missing_ok=True)
        lock.release()
        if is_new:
            with suppress(OSError):  # it is not empty
                folder.rmdir()


def check_free(folder: Path) -> None:
    """Raises ValueError if another process has a folder's lock; a read-only folder is free."""
    if (folder / LOCK).exists() and os.access(folder, os.W_OK):
        with only_writer(folder):
            pass


def busy(folder: Path, lock: Path) -> str:
    """The text of an error: which process writes to a folder, as its file `lock` says."""
    writer = "another process"
    with suppress(OSError, ValueError):
        writer = lock.read_text("utf-8") or writer
    return f"{folder} is being written to by {writer}. Wait for its end, or use another folder."
