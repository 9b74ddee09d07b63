# SPDX-License-Identifier: Apache-2.0
"""Publishing a checkpoint folder to the Hub in one commit, checked before and loaded after."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub import CommitInfo, HfApi

from ...checkpoint.files import ADAPTER_CONFIG, CARD, check_folder, check_free, check_repo_id
from ...evaluation.results import EVALUATION
from ...keywords import takes_fields
from ..card.facts import DIAGNOSTICS, GGUF, Part, gguf_files, read_json
from ..card.metadata import check_replaceable, read_card
from ..card.write import render_card
from ..demo import space_files
from .checks import check_checkpoint, check_gguf, check_private, require_pinned_base
from .clean_process import ask_clean_process, difference
from .repository import (
    Repository,
    additions,
    check_files_of_others,
    content_ids,
    files_of_others,
    find_repository,
    log_in,
    push,
    stale_files,
)
from .source import PublishSource, choose_files


@dataclass(frozen=True)
class Publication:
    """What was published, or what a dry run would publish.

    Attributes:
        source: The files, and what stays in the folder.
        repository: The branch as it was before.
        commit: The commit that holds the files. It is new, or the head if nothing had to change.
            None for a dry run.
        space: The page of the Space, if one was published.
        removed: The paths that the commit removed.
    """

    source: PublishSource
    repository: Repository
    commit: CommitInfo | None = None
    space: str | None = None
    removed: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class PublishOptions:
    """The arguments of [`publish`]. Its docstring explains them."""

    checkpoint: str | os.PathLike
    repo_id: str
    _: KW_ONLY
    private: bool | None = None
    revision: str = "main"
    create_pr: bool = False
    space: bool = False
    as_adapter: bool = False
    gguf: bool = False
    base: str | None = None
    base_quantization: str | None = None
    dry_run: bool = False
    check_loading: bool = True
    replace_card: bool = False
    replace_files: bool = False
    token: str | None = None
    notify: Callable[[str], object] = print


@takes_fields(PublishOptions)
def publish(options: PublishOptions) -> Publication:
    """Checks a checkpoint, sends it with its card in one commit, and loads that in a clean process.

    It may be repeated at any time, also after a failure. Only what the Hub lacks is sent. The same
    commit writes `publication.json`, a record of its files. It also removes the files that an
    earlier record names, if nobody has changed them since and this publication lacks them. Files
    of others stay. Publishing is refused if they would be overwritten, or read beside the model.

    Args:
        checkpoint: Folder of a checkpoint or adapter. An adapter is merged into its base first.
        repo_id: `"namespace/name"`. The repository is created if it does not exist.
        private: Whether a new repository is private. By default the namespace decides.
        revision: Branch, by default `"main"`. It is created if it does not exist.
        create_pr: Open a pull request against the branch, in anyone's repository.
        space: Publish the demo as well, as the Space `{repo_id}-demo`.
        as_adapter: Publish an adapter as one, with its base, on the Hub, pinned to a commit.
        gguf: Send the GGUF files in the folder, or in its folder `gguf`, and the Modelfile too.
        base: The adapter's base, if it has moved: a folder or a Hub id.
        base_quantization: How the base was quantized in training, see [`merge_adapter`].
        dry_run: Check, and list what would be sent. Needs no token, and a network only for a base.
        check_loading: Load the folder before, and the commit after, in a clean process (the
            default). Each needs memory for the model, and the second also disk space for it (for
            an adapter twice).
        replace_card: Replace a card, on the Hub or in the folder, that this package did not write.
        replace_files: Overwrite files of others on the Hub, and remove those that would be read
            beside the model. Without it, the error lists them.
        token: Access token, by default from `hf auth login` or HF_TOKEN.
        notify: Receives messages about the progress, by default `print`.

    Returns:
        What was sent, and the commit.

    Raises:
        TypeError: An option does not exist.
        ValueError: Checkpoint, token, repository or an option is not valid. Nothing was committed.
        OSError: The Hub, the connection or the disk failed, another publisher was faster, or the
            commit loads differently from the folder. It says what was sent, and never the token.
    """
    checkpoint = Path(os.path.expanduser(options.checkpoint))
    repo_id = options.repo_id
    check_repo_id(repo_id)
    check_folder(checkpoint)
    check_free(checkpoint)
    is_adapter = (checkpoint / ADAPTER_CONFIG).is_file()
    _check_options(checkpoint, is_adapter, options)
    needs_merge = is_adapter and not options.as_adapter
    repository = _require_repository(repo_id, needs_merge, options)
    space = None
    if options.space and not options.dry_run:
        space = require_own_space(repository.api, repo_id, options.replace_files)
    if not options.replace_card:
        check_replaceable(read_card(checkpoint), str(checkpoint))
        check_replaceable(repository.card, repo_id)
    # How a clean process gets at the model: arguments of `ask_clean_process`.
    loading_options: dict[str, Any] = {"token": repository.api.token or None}
    base = None
    if options.as_adapter:
        base = require_pinned_base(checkpoint, options.base, ask_hub=not options.dry_run)
        loading_options["base"] = base.hub_id
        loading_options["base_revision"] = base.revision
    with _merged_if_needed(checkpoint, needs_merge, options) as folder:
        source = _render_and_choose(folder, repository, base, options)
        if not options.dry_run:
            added = additions(source.files)
            if not options.replace_files:
                check_files_of_others(repository, added)
            removable = {*stale_files(repository, added), *files_of_others(repository, added)}
            removed_paths = sorted(removable - content_ids(added).keys())
        folder_logits = None
        is_base_absent = options.dry_run and options.as_adapter  # the Hub has it
        if options.check_loading and not is_base_absent:
            options.notify("Loading it in a clean process.")
            folder_logits = ask_clean_process(folder, **loading_options)
        if options.dry_run:
            unloaded = "" if folder_logits else " It was not loaded."
            options.notify(f"It passed the checks.{unloaded}")
            return Publication(source, repository)
        options.notify(f"Sending what {repo_id} lacks of {len(source.files)} files.")
        new_commit = push(
            repository, added, removed_paths, private=options.private, create_pr=options.create_pr
        )
    if folder_logits is None:
        options.notify(
            f"{repo_id} was loaded neither from the folder nor from the Hub: it may not load."
        )
    else:
        options.notify(f"Loading {repo_id} in the same way, at {new_commit.oid}.")
        _check_commit(repository, new_commit, folder_logits, loading_options)
    space_page = None
    if space is not None:
        space_page = push_space(space, repo_id, new_commit.oid, options.notify)
    return Publication(source, repository, new_commit, space_page, removed_paths)


def _check_options(checkpoint: Path, is_adapter: bool, options: PublishOptions) -> None:
    """Raises ValueError if options contradict each other or the checkpoint's files."""
    adapter_options = options.as_adapter or options.base or options.base_quantization
    if adapter_options and not is_adapter:
        raise ValueError(f"{checkpoint} is not an adapter: leave out --adapter and --base.")
    if options.gguf and (is_adapter or not gguf_files(checkpoint)):
        remedy = f"Merge it first: `normalign merge {checkpoint} --output MODEL`."
        if not is_adapter:
            command = f"normalign export {checkpoint} --output {checkpoint / GGUF}"
            remedy = f"Write them first: `{command}`."
        raise ValueError(f"{checkpoint} has no GGUF files that can be published. {remedy}")
    if options.gguf:
        check_gguf(checkpoint)
    if options.space and (options.create_pr or options.as_adapter):
        raise ValueError(
            "A Space needs a published whole model. Leave out --space, or --create-pr and "
            "--adapter."
        )


def _require_repository(repo_id: str, needs_merge: bool, options: PublishOptions) -> Repository:
    """Reads the repository. A dry run does not, and returns one without files.

    Raises ValueError if its visibility is not the requested one. Merging an adapter takes long, so
    before it, this also refuses files of others that are read with any model.
    """
    if options.dry_run:
        return Repository(HfApi(token=options.token), repo_id, branch=options.revision)
    api = log_in(repo_id, options.token, options.create_pr)
    repository = find_repository(api, repo_id, branch=options.revision)
    if repository.commit and options.private not in (None, repository.private):
        visibility = "private" if repository.private else "public"
        raise ValueError(f"{repo_id} is {visibility}. Change that in its settings on the Hub.")
    if needs_merge and not options.replace_files:
        check_files_of_others(repository)
    return repository


@contextmanager
def _merged_if_needed(
    checkpoint: Path, needs_merge: bool, options: PublishOptions
) -> Iterator[Path]:
    """Yields the folder to publish: the checkpoint, or a temporary folder with the merged model."""
    if not needs_merge:
        yield checkpoint
        return
    from ...assembly.merge import merge_adapter

    with TemporaryDirectory(prefix="normalign-merged-") as temporary:
        merged_folder = Path(temporary, checkpoint.resolve().name)
        merge_adapter(
            checkpoint,
            merged_folder,
            base=options.base,
            base_quantization=options.base_quantization,
        )
        for name in (EVALUATION, DIAGNOSTICS):
            if (checkpoint / name).exists():
                options.notify(f"Warning: {name} of the adapter stays here, since it is merged.")
        yield merged_folder


def _render_and_choose(
    folder: Path, repository: Repository, base: Part | None, options: PublishOptions
) -> PublishSource:
    """Checks a folder, renders its card, and chooses and checks the files to send.

    Args:
        folder: Folder of a model, or of an adapter if there is a `base`.
        repository: The repository, whose card may have text by hand.
        base: The base that an adapter is pinned to.
        options: The options of the publication.

    Raises:
        ValueError: The folder is not a valid checkpoint, or has what must not be published.
    """
    check_checkpoint(folder)
    card = render_card(
        folder,
        repo_id=repository.repo_id,
        revision=options.revision,
        hub_card=repository.card,
        base=base,
        with_gguf=options.gguf,
    )
    for warning in card.warnings:
        options.notify(f"Warning: {warning}")
    generated = {CARD: card.text.encode()}
    if base is not None:
        adapter_config = read_json(folder / ADAPTER_CONFIG)
        adapter_config["base_model_name_or_path"] = base.hub_id
        adapter_config["revision"] = base.revision
        generated[ADAPTER_CONFIG] = json.dumps(adapter_config, indent=2, sort_keys=True).encode()
    source = choose_files(folder, generated, with_gguf=options.gguf)
    check_private(source, str(repository.api.token or ""))
    return source


def _check_commit(
    repository: Repository,
    commit: CommitInfo,
    folder_logits: list[float],
    loading_options: dict[str, Any],
) -> None:
    """Raises OSError unless a commit loads, and answers with the logits of the folder."""
    repo_id = repository.repo_id
    try:
        commit_logits = ask_clean_process(repo_id, revision=commit.oid, **loading_options)
        problem = difference(folder_logits, commit_logits)
    except (OSError, ValueError) as error:
        problem = str(error)
    if problem is not None:
        raise OSError(
            f"{repo_id} is at {commit.oid}, but does not load as the folder does. {problem} "
            f"Publish again to load it once more. The commit before is {repository.commit}."
        )


def require_own_space(api: HfApi, repo_id: str, replace_files: bool = False) -> Repository:
    """Reads the Space of a model, and returns it if it may be written.

    Args:
        api: The client of the account that publishes.
        repo_id: Hub id of the model.
        replace_files: Whether files that others have changed may be overwritten.

    Raises:
        ValueError: This package did not publish it. Or somebody has changed a file that would be
            overwritten, and `replace_files` is False.
        OSError: The Hub or the connection failed.
    """
    space = find_repository(api, f"{repo_id}-demo", kind="space")
    if space.files.keys() <= {".gitattributes", "README.md"}:  # it is new
        return space
    if "space.json" not in space.files:
        raise ValueError(f"{space.repo_id} is not this package's. Rename it, or leave out --space.")
    if not replace_files:
        planned = space_files(repo_id, "the commit that is about to be made")
        check_files_of_others(space, additions(planned))
    return space


def push_space(space: Repository, model: str, commit: str, notify: Callable[[str], object]) -> str:
    """Publishes a Space. A new one is private if the model is.

    Args:
        space: The Space as it is now.
        model: Hub id of the model.
        commit: The model's commit.
        notify: Receives a message if the Space needs a token.

    Returns:
        The address of its page.

    Raises:
        OSError: It could not be published. The message says that the model is.
    """
    try:
        is_private = find_repository(space.api, model).private
        push(space, additions(space_files(model, commit)), removed=(), private=is_private)
    except (ValueError, OSError) as error:
        raise OSError(
            f"The model is published, at {commit} of {model}; its Space is not. {error}"
        ) from None
    space_page = f"{space.api.endpoint}/spaces/{space.repo_id}"
    if is_private:
        notify(
            f"To read the model, the Space needs a token as secret HF_TOKEN: {space_page}/settings."
        )
    return space_page


def summary(publication: Publication) -> str:
    """Returns what was sent and where to. For a dry run, it says what would be sent."""
    repository = publication.repository
    source = publication.source
    commit = publication.commit
    if commit is None:
        lines = [f"Would be sent to {repository.repo_id}:"]
        lines += [f"  {repo_path}: {size:,} bytes" for repo_path, size in source.sizes.items()]
        excluded_paths = ", ".join(source.excluded) or "nothing"
        lines.append(f"Stays here: {excluded_paths}.")
        return "\n".join(lines)
    sent = "nothing changed"
    if commit.oid != repository.commit:
        sent = f"{len(source.files)} files in one commit"
    removed_paths = ", ".join(publication.removed) or "nothing"
    lines = [
        f"Sent to {repository.repo_id}: {sent}; removed: {removed_paths}.",
        f"Commit: {commit.oid}",
        f"Repository: {repository.url}",
    ]
    if commit.pr_url:
        lines.append(f"Pull request: {commit.pr_url}")
    if publication.space:
        lines.append(f"Space: {publication.space}")
    lines.append(f'To load exactly this, set revision = "{commit.oid}" in the code of its card.')
    return "\n".join(lines)
