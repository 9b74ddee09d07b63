# SPDX-License-Identifier: Apache-2.0
"""Publishing a checkpoint folder to the Hub in one commit, checked before and loaded after."""

import json
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub import CommitInfo, CommitOperationAdd, HfApi

from ...checkpoint.files import ADAPTER_CONFIG, CARD, check_folder, check_free, check_repo_id
from ..card.metadata import card_in, check_replaceable
from ..card.write import render_card
from ..demo import find_space, push_space
from .checks import check_checkpoint, check_private, pinned_base
from .clean_process import ask_clean_process, difference
from .record import additions, check_files_of_others, files_of_others, stale_files
from .repository import Repository, find_repository, log_in, push
from .source import DIAGNOSTICS, EVALUATION, PublishSource, choose_files, read_json


@dataclass(frozen=True)
class Publication:
    """What was published to `repository`, the branch before, or would be by a dry run.

    `commit` holds the files: a new one, or the head if nothing had to change; None for a dry run.
    `removed` are the paths that it took away; `space` is the page of the Space, if one was
    published.
    """

    source: PublishSource
    repository: Repository
    commit: CommitInfo | None = None
    space: str | None = None
    removed: list[str] = field(default_factory=list)


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
    base_quantization: str | None = None,
    dry_run: bool = False,
    check_loading: bool = True,
    replace_card: bool = False,
    replace_files: bool = False,
    token: str | None = None,
    notify: Callable[[str], object] = print,
) -> Publication:
    """Checks a checkpoint, sends it with its card in one commit, and loads that in a clean process.

    It may be repeated at any time, also after a failure: only what the Hub lacks is sent. The same
    commit writes `publication.json`, a record of its files, and removes those that an earlier
    record names, that nobody has changed since, and that this publication lacks. Files of others
    stay; it is refused if they would be overwritten, or read beside the model.

    Args:
        checkpoint: Folder of a checkpoint, or of an adapter, which is merged into its base first.
        repo_id: `"namespace/name"`. The repository is created if it does not exist.
        private: For a new repository; None leaves it to the namespace's default.
        revision: Branch; created if it does not exist.
        create_pr: Open a pull request against the branch, in anyone's repository.
        space: Publish the demo as well, as the Space `{repo_id}-demo`.
        as_adapter: Publish an adapter as one, with its base, on the Hub, pinned to a commit.
        base: The adapter's base, if it has moved: a folder or a Hub id.
        base_quantization: How that was quantized in training, see [`merge_adapter`].
        dry_run: Check, and list what would be sent. Needs no token, and a network only for a base.
        check_loading: Load the folder before, and the commit after, in a clean process. Each takes
            the model's memory, and the second its size on disk (of an adapter twice).
        replace_card: Replace a card, on the Hub or in the folder, that this package did not write.
        replace_files: Overwrite files of others on the Hub, and remove those that would be read
            beside the model. Without it, the error lists them.
        token: Access token; by default that of `hf auth login` or HF_TOKEN.
        notify: Receives messages about the progress.

    Raises:
        ValueError: Checkpoint, token, repository or an option is not valid; nothing was committed.
        OSError: The Hub, the connection or the disk failed, another publisher was faster, or the
            commit loads differently from the folder. It says what was sent, and never the token.
    """
    checkpoint = Path(checkpoint)
    check_repo_id(repo_id)
    check_folder(checkpoint)
    check_free(checkpoint)
    is_adapter = (checkpoint / ADAPTER_CONFIG).is_file()
    if (as_adapter or base or base_quantization) and not is_adapter:
        raise ValueError(f"{checkpoint} is not an adapter: leave out --adapter and --base.")
    if space and (create_pr or as_adapter):
        remedy = "Leave out --space, or --create-pr and --adapter"
        raise ValueError(f"A Space needs a published whole model. {remedy}.")
    repository, demo = Repository(HfApi(token=token), repo_id, branch=revision), None
    if not dry_run:
        repository = find_repository(log_in(repo_id, token, create_pr), repo_id, branch=revision)
        if repository.commit and private not in (None, repository.private):
            is_now = "private" if repository.private else "public"
            raise ValueError(f"{repo_id} is {is_now}. Change that in its settings on the Hub.")
        if is_adapter and not as_adapter and not replace_files:  # before it is merged
            check_files_of_others(repository)
        demo = find_space(repository.api, repo_id, replace_files) if space else None
    if not replace_card:
        check_replaceable(card_in(checkpoint), str(checkpoint))
        check_replaceable(repository.card, repo_id)
    with ExitStack() as temporary:
        folder, pinned, generated = checkpoint, None, dict[str, bytes]()
        access: dict[str, Any] = {"token": str(repository.api.token or "") or None}
        if as_adapter:
            pinned = pinned_base(checkpoint, base, ask_hub=not dry_run)
            access |= {"base": pinned.hub_id, "base_revision": pinned.revision}
            named = {"base_model_name_or_path": pinned.hub_id, "revision": pinned.revision}
            settings = read_json(checkpoint / ADAPTER_CONFIG) | named
            generated[ADAPTER_CONFIG] = json.dumps(settings, indent=2, sort_keys=True).encode()
        elif is_adapter:
            from ...assembly.merge import merge_adapter

            merged = temporary.enter_context(TemporaryDirectory(prefix="normalign-merged-"))
            folder = Path(merged, checkpoint.resolve().name)
            merge_adapter(checkpoint, folder, base=base, base_quantization=base_quantization)
            for name in (EVALUATION, DIAGNOSTICS):
                if (checkpoint / name).exists():
                    notify(f"Warning: {name} of the adapter stays here, since it is merged.")
        check_checkpoint(folder)
        theirs = repository.card
        card = render_card(folder, repo_id=repo_id, revision=revision, hub_card=theirs, base=pinned)
        for warning in card.warnings:
            notify(f"Warning: {warning}")
        source = choose_files(folder, {**generated, CARD: card.text.encode()})
        check_private(source, access["token"] or "")
        added: list[CommitOperationAdd] = []
        removed: list[str] = []
        if not dry_run:
            added = additions(source.files)
            removed = _to_remove(repository, added, replace_files)
        before = None
        if check_loading and not (dry_run and pinned):
            notify("Loading it in a clean process.")
            before = ask_clean_process(folder, **access)
        if dry_run:
            notify("It passed the checks." + ("" if before else " It was not loaded."))
            return Publication(source, repository)
        notify(f"Sending those of {len(source.files)} files that {repo_id} lacks.")
        commit = push(repository, added, removed, private=private, create_pr=create_pr)
    if before:
        notify(f"Loading {repo_id} in the same way, at {commit.oid}.")
        try:
            problem = difference(before, ask_clean_process(repo_id, revision=commit.oid, **access))
        except (OSError, ValueError) as error:
            problem = str(error)
        if problem is not None:
            raise OSError(
                f"{repo_id} is at {commit.oid}, but does not load as the folder does. {problem} "
                f"Publish again to load it once more. The commit before is {repository.commit}."
            )
    else:
        notify(f"{repo_id} was loaded neither from the folder nor from the Hub: it may not load.")
    page = push_space(demo, repo_id, commit.oid, notify) if demo else None
    return Publication(source, repository, commit, page, removed)


def _to_remove(
    repository: Repository, added: list[CommitOperationAdd], replace_files: bool
) -> list[str]:
    """What the commit takes away. Raises ValueError if files of others stand in the way."""
    if not replace_files:
        check_files_of_others(repository, added)
    sent = {addition.path_in_repo for addition in added}
    beside = set(files_of_others(repository, added)) - sent
    return sorted({*stale_files(repository, added), *beside})


def summary(publication: Publication) -> str:
    """What was sent and where to; of a dry run what would be sent, and what would not."""
    repository, source, commit = publication.repository, publication.source, publication.commit
    if commit is None:
        files = (f"  {path}: {size:,} bytes" for path, size in source.sizes.items())
        kept = f"Stays here: {', '.join(source.excluded) or 'nothing'}."
        return "\n".join([f"Would be sent to {repository.repo_id}:", *files, kept])
    changed = commit.oid != repository.commit
    sent = f"{len(source.files)} files in one commit" if changed else "nothing changed"
    removed = ", ".join(publication.removed) or "nothing"
    lines = [f"Sent to {repository.repo_id}: {sent}; removed: {removed}."]
    lines += [f"Commit: {commit.oid}", f"Repository: {repository.url}"]
    lines += [f"Pull request: {commit.pr_url}"] if commit.pr_url else []
    lines += [f"Space: {publication.space}"] if publication.space else []
    lines += [f'To load exactly this, set revision = "{commit.oid}" in the code of its card.']
    return "\n".join(lines)
