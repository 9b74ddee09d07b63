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


WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
CARD = "README.md"
BUILD_RECORD = "build.json"  # what `normalign build` built
TRAINING_RECORD = "training.json"  # how a checkpoint was trained: recipe, data, hardware, versions
DYNAMICS = "dynamics.jsonl"  # inter-layer cosines in training, a line per measured step (figure 5)
SAMPLES = "samples.jsonl"  # answers to held-out rows in training
RECORDS = (TRAINING_RECORD, BUILD_RECORD, DYNAMICS)
STATE = "trainer_state.json"  # the Trainer's state, with the log
LOCK = ".normalign.lock"
OLD = ".replaced"  # name of an earlier folder within the temporary folder of the new one
_locked_folders: set[Path] = set()  # by this process


def find_model(
    model: str | os.PathLike, revision: str | None = None, *, remedy: str = "Check the path."
) -> tuple[str, str | None]:
    """Finds a model, and the commit at which to read all its files.

    The Hub is asked once, and only about a valid Hub id. All files must be read at this commit,
    since a branch may move meanwhile.

    Args:
        model: A path or Hub id.
        revision: A branch, tag or commit of the Hub.
        remedy: What to do if there is no such model.

    Returns:
        The path or Hub id, and the commit: None for a path, and the commit in the cache if the Hub
        cannot be reached.

    Raises:
        ValueError: Neither a folder, the Hub nor the cache has the model.
    """
    path = Path(os.path.expanduser(model))  # leaves the name of an unknown user as it is
    if path.exists():
        return str(path), None
    name = os.fspath(model)
    absence = f"{model} is no file or folder here"
    if not is_hub_id(name):
        raise ValueError(f"{absence}. {remedy} A model of the Hub is named owner/name.")
    try:
        resolved = HfApi().resolve_revision(name, revision=revision)
    except (HTTPError, OSError, RevisionResolutionError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"{absence}. {constants.ENDPOINT} has none that you may see, or cannot be asked "
            f"({reason}). {remedy} A private model needs `hf auth login`."
        ) from error
    return name, resolved.resolved


def find_checkpoint(
    model: str | os.PathLike, revision: str | None = None, *, remedy: str = "Check the path."
) -> tuple[str, str | None]:
    """Finds a model as [`find_model`] does, and refuses a folder that holds none.

    Args:
        model: A path or Hub id.
        revision: A branch, tag or commit of the Hub.
        remedy: What to do if there is no such model.

    Raises:
        ValueError: There is no such model, or the folder holds an adapter or no `config.json`.
    """
    source, commit = find_model(model, revision, remedy=remedy)
    folder = Path(source)
    if (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").exists():
        merge_command = f"normalign merge {model} --output DIR"
        raise ValueError(f"{model} is an adapter. Merge it first: `{merge_command}`.")
    if folder.exists():
        _check_holds(folder, "config.json", f"It is no model of transformers. {remedy}")
    return source, commit


def check_folder(folder: str | os.PathLike) -> None:
    """Raises ValueError unless the folder holds a checkpoint or an adapter."""
    if not (Path(folder) / ADAPTER_CONFIG).is_file():
        _check_holds(folder, "config.json", f"Without {ADAPTER_CONFIG} it is no adapter either.")


def check_adapter(adapter: str | os.PathLike) -> None:
    """Raises ValueError unless the folder holds an adapter: its configuration and its weights."""
    remedy = "Give an adapter's folder, which training with use_peft wrote."
    for file_name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        _check_holds(adapter, file_name, remedy)


def _check_holds(folder: str | os.PathLike, name: str, remedy: str) -> None:
    folder = Path(folder)
    if not folder.exists():
        raise ValueError(f"{folder} is no folder here. Check the path.")
    if (folder / name).is_file():
        return
    message = f"{folder} has no {name}. {remedy}"
    checkpoints_inside = sorted(file.parent.name for file in folder.glob(f"checkpoint-*/{name}"))
    if checkpoints_inside:
        message += f" It has {', '.join(checkpoints_inside)}: name one of them."
    raise ValueError(message)


def check_repo_id(repo_id: str) -> None:
    """Raises ValueError unless `repo_id` is `"namespace/name"` as the Hub allows it."""
    validate_repo_id(repo_id)
    if "/" not in repo_id:
        raise ValueError(f"{repo_id!r} lacks the repository's owner. Give user/name.")


def is_hub_id(name: str) -> bool:
    """Returns whether `name` is a valid Hub id, owner/name."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return "/" in name


def cache_dir() -> Path:
    """Returns `$NORMALIGN_CACHE`, or `normalign-llava` in `$XDG_CACHE_HOME` or `~/.cache`."""
    own_folder = os.environ.get("NORMALIGN_CACHE")
    if own_folder:
        return Path(own_folder).expanduser()
    cache_folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache_folder) / "normalign-llava"


@contextmanager
def atomic_write(target: str | os.PathLike) -> Iterator[Path]:
    """Yields the path of a temporary file that becomes `target` when the block ends without error.

    The file has the mode of any new file: nobody can foresee the name of the folder that it is in.
    """
    target = Path(target)
    remove_unfinished(target)
    with _temporary(target) as temporary_folder:
        yield temporary_folder / target.name
        os.replace(temporary_folder / target.name, target)


@contextmanager
def finished_folder(
    target: str | os.PathLike, written: Callable[[Path], Collection[str]] | None = None
) -> Iterator[Path]:
    """Yields a temporary folder that becomes `target` if the block ends without error.

    Otherwise it is removed. An earlier `target` is moved into the temporary folder before the new
    one takes its place. If the process is killed between these two steps, the next one that makes
    `target` takes the second step: see [`remove_unfinished`].

    Args:
        target: The folder to make.
        written: Returns the names in an earlier version of `target` that may be replaced, as a
            whole. It is given if `target` lies in a checkpoint. Without it, nothing is replaced.

    Raises:
        ValueError: Another process is making `target`, or it holds something else.
        FileExistsError: It was filled meanwhile. The message says where the new one is kept.
    """
    target = Path(target).resolve()
    if written:
        check_free(target.parent)
    used_locks = remove_unfinished(target)
    if used_locks:
        raise ValueError(busy(target, used_locks[0]))
    problem = _held_by_others(target, written)
    if problem:
        raise ValueError(f"{problem} Choose another folder, or move that away first.")
    with _temporary(target) as temporary_folder:
        new_folder = temporary_folder / target.name
        new_folder.mkdir()
        yield new_folder
        problem = _held_by_others(target, written)
        if problem:
            kept_folder = temporary_folder.with_name(f"{target.name}-{temporary_folder.name[-8:]}")
            os.replace(new_folder, kept_folder)
            raise FileExistsError(f"{problem} What was made is in {kept_folder}.")
        if target.exists():
            os.replace(target, temporary_folder / OLD)
        os.replace(new_folder, target)


def _held_by_others(folder: Path, written: Callable[[Path], Collection[str]] | None) -> str | None:
    """Returns what a folder holds that is not to be replaced, as a sentence, or None."""
    if not folder.exists():
        return None
    foreign_names = {path.name for path in folder.iterdir()}
    if written:
        foreign_names -= set(written(folder))
    if not foreign_names:
        return None
    return f"{folder} holds {min(foreign_names)}, which is not to be replaced."


@contextmanager
def _temporary(target: Path) -> Iterator[Path]:
    """Yields a new folder beside `target`, locked by this process, and removes it at the end."""
    with writing_to(target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary_folder = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        try:
            with only_writer(temporary_folder):
                yield temporary_folder
        finally:
            _clear(temporary_folder, target)


def remove_unfinished(target: Path) -> list[Path]:
    """Removes temporary folders for `target` of killed processes.

    Their names end in eight letters from `tempfile`, and they hold nothing but `target`, the folder
    that it replaces, and the lock.

    Returns:
        The locks of the temporary folders that are in use.
    """
    used_locks = []
    for unfinished in target.parent.glob(f".{glob.escape(target.name)}-" + "[a-z0-9_]" * 8):
        if not _is_unfinished(unfinished, target):
            continue
        lock = FileLock(unfinished / LOCK, thread_local=False)
        try:
            lock.acquire(timeout=0)
        except OSError:  # a process has it, or another user
            used_locks.append(unfinished / LOCK)
            continue
        lock.release()
        _clear(unfinished, target)
    return used_locks


def _is_unfinished(folder: Path, target: Path) -> bool:
    """Returns whether a folder was made by [`_temporary`] and holds more than a lock."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    try:
        names_inside = {path.name for path in folder.iterdir()}
    except OSError:  # another user's, or removed by now
        return False
    if names_inside <= {LOCK}:  # the process that made it may be about to take the lock
        return False
    return names_inside <= {target.name, OLD, LOCK}


def _clear(temporary: Path, target: Path) -> None:
    """Takes the second step of a replacement that was begun, and removes what is left."""
    if (temporary / OLD).exists() and not target.exists():
        os.replace(temporary / target.name, target)
    shutil.rmtree(temporary, ignore_errors=True)


def check_not_in_run(folder: Path) -> None:
    """Raises ValueError if a training run would take a folder, or one around it, for a checkpoint.

    The Trainer reads the beginning of names: it takes `checkpoint-6-merged` for step 6. It resumes
    from such folders, and deletes the oldest.
    """
    folder = folder.resolve()
    for checkpoint in (folder, *folder.parents):
        run_folder = checkpoint.parent
        if not re.match(r"checkpoint-\d", checkpoint.name) or not _is_run(run_folder, checkpoint):
            continue
        relation_of_parent = f"lies in {checkpoint.name}, which is"
        relation = "is named as" if checkpoint == folder else relation_of_parent
        raise ValueError(
            f"{folder} {relation} a checkpoint of the run in {run_folder}, which may delete it "
            f"and would try to resume from it. Choose a folder outside {run_folder}, or another "
            "name in it."
        )


def _is_run(folder: Path, candidate: Path) -> bool:
    """Returns whether a folder holds a trained model or checkpoints of a run.

    The folder `candidate` counts as a checkpoint whatever its name is.
    """
    for file_name in (ADAPTER_CONFIG, TRAINING_RECORD, STATE):
        if (folder / file_name).is_file():
            return True
    checkpoints = [candidate, *folder.glob("checkpoint-*")]
    return any((path / STATE).is_file() for path in checkpoints)


def json_or_none(path: Path) -> Any:
    """Returns the content of a JSON file, or None if it does not exist or is not valid."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def write_json(path: Path, content: Any) -> None:
    """Writes `content` to `path` atomically."""
    text = json.dumps(content, indent=2, ensure_ascii=False)
    with atomic_write(path) as partial_file:
        partial_file.write_text(text + "\n", "utf-8")


@contextmanager
def only_writer(folder: str | os.PathLike, wait: float = 10.0) -> Iterator[None]:
    """Locks a folder against other processes. Creates it, and removes it if it is still empty.

    A process that has the lock may ask for it again. The operating system releases the lock when
    the process ends, even if it is killed.

    Args:
        folder: The folder to lock.
        wait: For how many seconds to wait for a process that has the lock. Results are written in
            less; training takes longer.

    Raises:
        ValueError: Another process still has the lock. The message names it.
    """
    folder = Path(folder).resolve()
    if folder in _locked_folders:
        yield
        return
    is_new = not folder.exists()
    lock_file = folder / LOCK
    lock = FileLock(lock_file, thread_local=False)
    with writing_to(folder):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=wait)
        except Timeout as error:
            raise ValueError(busy(folder, lock_file)) from error
    _locked_folders.add(folder)
    try:
        program = Path(sys.argv[0]).name or "python"
        command = shorten(shlex.join([program, *sys.argv[1:]]), 120, placeholder=" ...")
        lock_file.write_text(f"`{command}`, process {os.getpid()}", "utf-8")
        yield
    finally:
        _locked_folders.discard(folder)
        lock_file.unlink(missing_ok=True)
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
    """Returns the text of an error that names the process in a folder's file `lock`."""
    writer = "another process"
    with suppress(OSError, ValueError):
        writer = lock.read_text("utf-8") or writer
    return f"{folder} is being written to by {writer}. Wait for its end, or use another folder."
