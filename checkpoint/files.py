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
from huggingface_hub.utils import validate_repo_id

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
REPLACED = ".replaced"  # an earlier folder, while another takes its place
_locked_folders: set[Path] = set()  # by this process


def require_model(
    model: str | os.PathLike, revision: str | None = None, *, remedy: str = "Check the path."
) -> tuple[str, str | None]:
    """Finds a model, and the commit to read all its files at, since a branch may move meanwhile.

    The Hub is asked once, and only about a valid Hub id that is not a path here.

    Args:
        model: A path or Hub id.
        revision: A branch, tag or commit of the Hub.
        remedy: What to do if the model does not exist.

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
    absence = f"{model} does not exist here"
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


def require_checkpoint(
    model: str | os.PathLike, revision: str | None = None, *, remedy: str = "Check the path."
) -> tuple[str, str | None]:
    """Finds a model as [`require_model`] does, and refuses a folder that does not hold one.

    What a repository of the Hub holds is not checked.

    Raises:
        ValueError: The model does not exist, or the folder holds an adapter or no `config.json`.
    """
    path_or_id, commit = require_model(model, revision, remedy=remedy)
    folder = Path(path_or_id)
    if not folder.exists():  # a Hub id
        return path_or_id, commit
    if (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").exists():
        raise ValueError(
            f"{model} is an adapter. Merge it first: `normalign merge {model} --output DIR`."
        )
    _require_file(folder, "config.json", f"It is not a model of transformers. {remedy}")
    return path_or_id, commit


def check_folder(folder: str | os.PathLike) -> None:
    """Raises ValueError unless the folder holds a checkpoint or an adapter."""
    if not (Path(folder) / ADAPTER_CONFIG).is_file():
        _require_file(folder, "config.json", f"It has no {ADAPTER_CONFIG} either.")


def check_adapter(adapter: str | os.PathLike) -> None:
    """Raises ValueError unless the folder holds an adapter: its configuration and its weights."""
    for file_name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        _require_file(adapter, file_name, "Give a folder that training with use_peft wrote.")


def _require_file(folder: str | os.PathLike, name: str, remedy: str) -> None:
    """Raises ValueError unless the folder exists and has the file. Names those inside that do."""
    folder = Path(folder)
    if not folder.exists():
        raise ValueError(f"{folder} does not exist here. Check the path.")
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
    """Whether `name` is a valid Hub id, owner/name."""
    try:
        check_repo_id(name)
    except ValueError:
        return False
    return True


def cache_dir() -> Path:
    """Returns `$NORMALIGN_CACHE`, or else `normalign-llava` in `$XDG_CACHE_HOME` or `~/.cache`."""
    own_folder = os.environ.get("NORMALIGN_CACHE")
    if own_folder:
        return Path(own_folder).expanduser()
    cache_folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache_folder) / "normalign-llava"


@contextmanager
def atomic_write(target: str | os.PathLike) -> Iterator[Path]:
    """Yields the path of a temporary file that becomes `target` when the block ends without error.

    The file has the mode of any new file: nobody can foresee the name of the folder that it is in.

    Raises:
        NotWritable: The folder is read-only, or the disk is full.
    """
    target = Path(target)
    complete_or_remove_unfinished(target)
    with _replacing(target) as partial_file:
        yield partial_file


@contextmanager
def finished_folder(
    target: str | os.PathLike, replaceable: Callable[[Path], Collection[str]] | None = None
) -> Iterator[Path]:
    """Yields a temporary folder that becomes `target` if the block ends without error.

    Otherwise it is removed.

    Args:
        target: The folder to make. It may lie in a checkpoint, if `replaceable` is given.
        replaceable: Returns the names in an earlier `target` that may be replaced, as a whole.
            Without it, nothing is replaced.

    Raises:
        ValueError: Another process is making `target`, or it holds something else.
        FileExistsError: It was filled meanwhile. The message says where the new one is kept.
        NotWritable: The folder around it is read-only, or the disk is full.
    """
    target = Path(target).resolve()
    if replaceable:
        check_free(target.parent)
    locks_in_use = complete_or_remove_unfinished(target)
    if locks_in_use:
        raise ValueError(busy_message(target, locks_in_use[0]))
    problem = _problem_with_earlier(target, replaceable)
    if problem:
        raise ValueError(f"{problem} Choose another folder, or move that away first.")
    with _replacing(target) as new_folder:
        new_folder.mkdir()
        yield new_folder
        problem = _problem_with_earlier(target, replaceable)
        if problem:
            kept_folder = target.with_name(f"{target.name}-{new_folder.parent.name[-8:]}")
            os.replace(new_folder, kept_folder)
            raise FileExistsError(f"{problem} What was made is in {kept_folder}.")


def _problem_with_earlier(
    target: Path, replaceable: Callable[[Path], Collection[str]] | None
) -> str | None:
    """Returns a sentence about what an earlier folder holds that may not be replaced, or None."""
    if not target.exists():
        return None
    foreign_names = {path.name for path in target.iterdir()}
    if replaceable:
        foreign_names -= set(replaceable(target))
    if not foreign_names:
        return None
    return f"{target} holds {min(foreign_names)}. It is not overwritten."


@contextmanager
def _replacing(target: Path) -> Iterator[Path]:
    """Yields a path in a temporary folder beside `target`: what is made there becomes `target`.

    If the block ends with an error, it is removed. A folder that is there already is moved into the
    temporary folder first. If the process is killed between these two moves, the next one that
    makes `target` does the second one: see [`complete_or_remove_unfinished`].
    """
    with writing_to(target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        new = folder / target.name
        try:
            with lock_folder(folder):
                yield new
                if new.is_dir() and target.exists():
                    os.replace(target, folder / REPLACED)
                os.replace(new, target)
        finally:
            _complete_or_remove(target, folder)


def _complete_or_remove(target: Path, folder: Path) -> None:
    """Removes a temporary folder. If `target` was moved into it, the new one takes its place."""
    if (folder / REPLACED).exists() and not target.exists():
        os.replace(folder / target.name, target)
    shutil.rmtree(folder, ignore_errors=True)


def complete_or_remove_unfinished(target: Path) -> list[Path]:
    """Removes temporary folders for `target` of killed processes.

    Their names end in eight letters from `tempfile`.

    Returns:
        The locks of the temporary folders that are in use.
    """
    locks_in_use = []
    for folder in target.parent.glob(f".{glob.escape(target.name)}-" + "[a-z0-9_]" * 8):
        try:
            names_inside = {path.name for path in folder.iterdir()}
        except OSError:  # a file, another user's, or removed by now
            continue
        if folder.is_symlink() or not names_inside <= {target.name, REPLACED, LOCK}:
            continue
        if names_inside <= {LOCK}:  # the process that made it may be about to take the lock
            continue
        lock = FileLock(folder / LOCK, thread_local=False)
        try:
            lock.acquire(timeout=0)
        except OSError:  # a process has it, or another user
            locks_in_use.append(folder / LOCK)
            continue
        lock.release()
        _complete_or_remove(target, folder)
    return locks_in_use


def check_not_in_run(folder: Path) -> None:
    """Raises ValueError if a training run would take a folder, or one around it, for a checkpoint.

    The Trainer reads the beginning of names: it takes `checkpoint-6-merged` for step 6. It resumes
    from such folders, and deletes the oldest.
    """
    folder = folder.resolve()
    for checkpoint in (folder, *folder.parents):
        if not re.match(r"checkpoint-\d", checkpoint.name):
            continue
        # A folder of a run has a trained model, or checkpoints, whatever the name of this one is.
        run_folder = checkpoint.parent
        evidence = [run_folder / name for name in (ADAPTER_CONFIG, TRAINING_RECORD, STATE)]
        evidence += [path / STATE for path in (checkpoint, *run_folder.glob("checkpoint-*"))]
        if not any(file.is_file() for file in evidence):
            continue
        relation = "is named as"
        if checkpoint != folder:
            relation = f"lies in {checkpoint.name},"
        raise ValueError(
            f"{folder} {relation} a checkpoint of the run in {run_folder}. The run may delete it, "
            f"and would try to resume from it. Choose a folder outside {run_folder}, or another "
            "name in it."
        )


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
def lock_folder(folder: str | os.PathLike, wait: float = 10.0) -> Iterator[None]:
    """Locks a folder against other processes in the block.

    The folder is created if needed, and then removed if it is still empty. A process that has the
    lock may ask for it again. The operating system releases the lock of a killed process.

    Args:
        folder: The folder to lock.
        wait: The seconds to wait for a process that has the lock. Writing results takes less, but
            training takes longer.

    Raises:
        ValueError: Another process still has the lock. The message names it.
        NotWritable: The folder cannot be made or locked.
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
            raise ValueError(busy_message(folder, lock_file)) from error
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
    """Raises ValueError if another process has a folder's lock. A read-only folder is free."""
    if (folder / LOCK).exists() and os.access(folder, os.W_OK):
        with lock_folder(folder):
            pass


def busy_message(folder: Path, lock_file: Path) -> str:
    """Returns the text of an error that names the process in a folder's lock file."""
    writer = "another process"
    with suppress(OSError, ValueError):
        writer = lock_file.read_text("utf-8") or writer
    return f"{folder} is being written to by {writer}. Wait for its end, or use another folder."
