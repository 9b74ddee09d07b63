# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Publishing: a checkpoint folder to a Hub repository in one commit, checked before and loaded after.

`normalign publish` is [`publish`].
"""

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub import HfApi
from rich.table import Table

from ...checkpoint.find import check_folder, check_repo_id
from ...checkpoint.lock import LOCK, check_free
from ...checkpoint.names import ADAPTER_CONFIG, CARD
from ..card.hand_written import check_replaceable
from ..card.write import AdapterBase, card_in, render_card
from ..demo import check_space, push_space
from .adapter import pinned_base, published_config
from .checkpoint_checks import check_checkpoint
from .clean_process import Answer, ask_clean_process, difference
from .leaks import check_private
from .repository import Pushed, Repository, find_repository, log_in, push
from .source import DIAGNOSTICS, EVALUATION, PublishSource, choose_files


SNIPPET = """\
from transformers import AutoModelForImageTextToText, AutoProcessor

commit = "{commit}"
processor = AutoProcessor.from_pretrained("{repo_id}", revision=commit, code_revision=commit, trust_remote_code=True)
model = AutoModelForImageTextToText.from_pretrained(
    "{repo_id}", revision=commit, code_revision=commit, dtype="auto", trust_remote_code=True
)
"""


@dataclass(frozen=True)
class Publication:
    """What was published, or by a dry run would be.

    Attributes:
        pushed: The commit; None for a dry run.
        space: Page of the Space, if one was published.
    """

    source: PublishSource
    pushed: Pushed | None
    space: str | None = None


def publish(
    checkpoint: str | os.PathLike,
    repo_id: str,
    *,
    private: bool | None = None,
    revision: str = "main",
    create_pr: bool = False,
    space: bool = False,
    as_adapter: bool = False,
    base: str | None = None,
    dry_run: bool = False,
    check_loading: bool = True,
    replace_card: bool = False,
    token: str | None = None,
    notify: Callable[[str], object] = print,
) -> Publication:
    """Checks a checkpoint, sends it with its card in one commit, and loads that commit in a clean process.

    It may be repeated at any time, also after a failure: only what the Hub does not have is sent. Model, code,
    processor, card, figures and results are sent, never optimizer states and the like. Files that an earlier
    publication sent and this one does not are removed in the same commit; files of other names stay.

    Args:
        checkpoint: Folder of a checkpoint, or of an adapter, which is merged into its base first.
        repo_id: `"namespace/name"`. The repository is created if it does not exist.
        private: For a new repository; None leaves it to the namespace's default.
        revision: Branch; created if it does not exist.
        create_pr: Open a pull request against the branch, in anyone's repository.
        space: Publish the demo as well, as the Space `{repo_id}-demo`.
        as_adapter: Publish an adapter as one, with its base pinned to a commit. The base must be on the Hub.
        base: The adapter's base, if it has moved: a folder or a Hub id.
        dry_run: Check, and list what would be sent. Needs neither token nor network, unless an adapter's base does.
        check_loading: Load the folder before, and the commit after, in a clean process. Each takes the memory of the
            whole model, and the second its size on disk (of an adapter twice). All other checks are made in any case.
        replace_card: Replace a card, on the Hub or in the folder, that this package did not write.
        token: Access token; by default that of `hf auth login` or HF_TOKEN.
        notify: Receives messages about the progress.

    Raises:
        ValueError: The checkpoint, the token, the repository or an option is not valid. Nothing was committed.
        OSError: The Hub, the connection or the disk failed, another publisher was faster, or the commit loads
            differently from the folder. The message says what was done. No message shows the token.
    """
    checkpoint = Path(checkpoint)
    check_repo_id(repo_id)
    check_folder(checkpoint)
    check_free(checkpoint)
    is_adapter = (checkpoint / ADAPTER_CONFIG).is_file()
    if (as_adapter or base) and not is_adapter:
        raise ValueError(
            f"{checkpoint} has no {ADAPTER_CONFIG}, so it is not an adapter: leave out --adapter and --base."
        )
    if space and (create_pr or as_adapter):
        raise ValueError(
            "A Space needs a whole model that is published: leave out --space, or --create-pr and --adapter."
        )
    repository = Repository(HfApi(token=token), repo_id, branch=revision)
    if not dry_run:
        api = log_in(repo_id, token, create_pr)
        repository = find_repository(api, repo_id, branch=revision)
        if repository.commit and private not in (None, repository.private):
            is_now = "private" if repository.private else "public"
            raise ValueError(f"{repo_id} exists and is {is_now}. Change that in its settings on the Hub.")
        if space:
            check_space(api, repo_id)
    check_cards(checkpoint, repository, replace=replace_card)
    with ExitStack() as temporary:
        folder, pinned = checkpoint, None
        if as_adapter:
            pinned = pinned_base(checkpoint, base, ask_hub=not dry_run)
        elif is_adapter:
            from ...assembly.merge import merge_adapter

            merged = temporary.enter_context(TemporaryDirectory(prefix="normalign-merged-"))
            folder = Path(merged, checkpoint.resolve().name)
            merge_adapter(checkpoint, folder, base=base)
            if measured := [name for name in (EVALUATION, DIAGNOSTICS) if (checkpoint / name).exists()]:
                notify(f"Warning: {' and '.join(measured)} of the adapter stay here, since it is merged.")
        check_checkpoint(folder)
        done = send(
            folder,
            repository,
            pinned,
            notify=notify,
            warn=lambda text: notify(f"Warning: {text}"),
            replace_card=replace_card,
            check_loading=check_loading,
            dry_run=dry_run,
            private=private,
            create_pr=create_pr,
        )
    if done.pushed and not check_loading:
        notify(f"{repo_id} was not loaded, neither from the folder nor from the Hub: whether others can is unknown.")
    return replace(done, space=push_space(done.pushed, notify) if space and done.pushed else None)


def send(
    folder: Path,
    repository: Repository,
    base: AdapterBase | None,
    *,
    notify: Callable[[str], object],
    warn: Callable[[str], object],
    replace_card: bool = False,
    check_loading: bool = False,
    dry_run: bool = False,
    path_in_repo: str | None = None,
    **how: Any,
) -> Publication:
    """Sends a folder with its card in one commit, for `normalign publish` and for training runs.

    Args:
        base: That of an adapter, None if it is not on the Hub.
        notify, warn: Receive messages about the progress, and what the author should know.
        replace_card, check_loading, dry_run: As in [`publish`].
        path_in_repo: Folder of the repository to which the whole checkpoint is sent as well, optimizer state included,
            to resume from; but for `training_args.bin`, which holds the token.
        how: Arguments of [`push`].
    """
    check_cards(folder, repository, replace=replace_card)
    card = render_card(
        folder, repo_id=repository.repo_id, revision=repository.branch, hub_card=repository.card, adapter=base
    )
    for warning in card.warnings:
        warn(warning)
    generated = {CARD: card.text.encode()}
    if (folder / ADAPTER_CONFIG).is_file():
        generated[ADAPTER_CONFIG] = published_config(folder, base)
    source = choose_files(folder, generated, repository.files)
    check_private(source, str(repository.api.token or ""))
    before = None
    if check_loading and not (dry_run and base):
        notify("Loading it in a clean process.")
        before = _ask(folder, None, base, repository.api)
    if dry_run:
        notify("It passed the checks." if before else "It passed the other checks, but was not loaded.")
        return Publication(source, None)
    files, stale = source.files, source.stale
    if path_in_repo is not None:
        paths = [path for path in folder.rglob("*") if path.is_file() and path.name not in ("training_args.bin", LOCK)]
        inside = {path.relative_to(folder).as_posix(): path for path in paths}
        # Of what is published too, as that is: an adapter's configuration without a path of this machine.
        files = files | {f"{path_in_repo}/{name}": files.get(name, path) for name, path in inside.items()}
        # An earlier run on more processes left more random states.
        stale += [path for path in repository.files if path.startswith(f"{path_in_repo}/") and path not in files]
    pushed = push(repository, files, stale, notify=notify, **how)
    if before:
        notify(f"Loading {repository.repo_id} in the same way, at {pushed.commit}.")
        verify(pushed, base, before)
    return Publication(source, pushed)


def unsent_tables(done: Publication, repo_id: str) -> list[Table]:
    """Of a dry run: the files that would be sent, and those that would not, with the reason."""
    files = Table("file", title=f"Would be sent to {repo_id}", title_justify="left")
    files.add_column("bytes", justify="right")
    for path, size in done.source.sizes.items():
        files.add_row(path, f"{size:,}")
    excluded = Table("file", "why", title="Stays here", title_justify="left")
    for path, reason in done.source.excluded.items():
        excluded.add_row(path, reason)
    return [files, *([excluded] if done.source.excluded else [])]


def summary(done: Publication) -> str:
    """What was sent and where to, and how to load exactly that."""
    pushed = done.pushed
    assert pushed is not None
    repository, commit = pushed.repository, pushed.commit
    sent = f"{len(done.source.files)} files in one commit" if commit != repository.commit else "nothing changed"
    lines = [f"Sent to {repository.repo_id}: {sent}; removed: {', '.join(pushed.deleted) or 'nothing'}."]
    lines += [f"Commit: {commit}", f"Repository: {repository.url}"]
    lines += [f"Pull request: {pushed.pull_request}"] if pushed.pull_request else []
    lines += [f"Space: {done.space}"] if done.space else []
    if ADAPTER_CONFIG in done.source.files:
        return "\n".join([*lines, f'Load exactly this as its card says, with revision = "{commit}".'])
    return "\n".join([*lines, "Load exactly this:", "", SNIPPET.format(repo_id=repository.repo_id, commit=commit)])


def check_cards(folder: Path, repository: Repository, *, replace: bool = False) -> None:
    """Raises ValueError if somebody else wrote the card of the folder or of the repository, unless to `replace` it."""
    if not replace:
        check_replaceable(card_in(folder), str(folder))
        check_replaceable(repository.card, repository.repo_id)


def verify(pushed: Pushed, base: AdapterBase | None, before: Answer) -> None:
    """Loads the commit. Raises OSError if that fails, or if it answers differently from the folder."""
    repository = pushed.repository
    try:
        found = difference(before, _ask(repository.repo_id, pushed.commit, base, repository.api))
    except (OSError, ValueError) as error:
        found = str(error)
    if found is not None:
        raise OSError(
            f"{repository.repo_id} is at {pushed.commit}, but a clean process does not get from there what it gets "
            f"from the folder. {found} The commit before it, {repository.commit}, still exists. Publish again to load "
            "it once more; if that fails in the same way, report a bug."
        )


def _ask(source: str | Path, revision: str | None, base: AdapterBase | None, api: HfApi) -> Answer:
    base_id, base_revision = (base.repo_id, base.revision) if base else (None, None)
    token = str(api.token) if api.token else None
    return ask_clean_process(source, revision=revision, base=base_id, base_revision=base_revision, token=token)
