# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Publishing: a checkpoint folder to a Hub repository in one commit, checked before and loaded after."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from huggingface_hub import get_token

from ...checkpoint.find import check_folder, check_repo_id
from ...checkpoint.names import CARD
from ..card.hand_written import check_replaceable, decode_card
from ..card.write import card_in, render_card
from ..space.publish import check_space, push_space, space_of
from .adapter import Staged, staged
from .checkpoint_checks import check_checkpoint, check_contents
from .clean_process import ask_clean_process
from .client import WAITS, Client
from .contents import Contents, contents
from .push import Pushed, check_remote, push_snapshot, take_snapshot
from .repository import Repository, read_repository
from .verify import ask, check_room, snippet, verify


LOADING = "Loading it in a clean process."


@dataclass(frozen=True)
class Publication(Pushed):
    """What was published, or by a dry run would be.

    Attributes:
        space: Page of the Space, if one was published.
        snippet: Code that loads this commit.
        left: Files of the folder that are not sent -> why.
    """

    space: str | None = None
    snippet: str = ""
    left: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Existing:
    """The repository before publishing.

    Attributes:
        remote: None if it does not exist.
        card: Its `README.md`, whoever wrote it.
    """

    remote: Repository | None = None
    card: str | None = None


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
    endpoint: str | None = None,
    waits: Sequence[float] = WAITS,
    notify: Callable[[str], object] = print,
) -> Publication:
    """Checks a checkpoint, sends it with its card in one commit, and loads that commit in a clean process.

    It may be repeated at any time, also after a failure: only what the Hub does not have is sent. Model, code,
    processor, card, figures and results are sent, never optimizer states and the like. Files that an earlier
    publication sent and this one does not are removed in the same commit; files that people added on the Hub stay.

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
            whole model, and the second its size on disk. All other checks are made in any case.
        replace_card: Replace a card, on the Hub or in the folder, that this package did not write.
        token: Access token; by default that of `hf auth login` or HF_TOKEN.
        endpoint: URL of the Hub, by default that of huggingface_hub.
        waits: Seconds to wait before each retry.
        notify: Receives messages about the progress.

    Raises:
        ValueError: The checkpoint, the token, the repository or an option is not valid, or files changed meanwhile.
            Nothing was committed.
        OSError: The Hub, the connection or the disk failed, another publisher was faster, or the commit loads
            differently from the folder. The message says what was done. No message or traceback shows the token.
    """
    checkpoint = Path(checkpoint)
    check_repo_id(repo_id)
    check_folder(checkpoint)
    if space and (create_pr or as_adapter):
        raise ValueError(
            "A Space needs a whole model that is published: leave out --space, or --create-pr and --adapter."
        )
    if space:
        check_repo_id(space_of(repo_id))
    remedy = (
        "If you want to keep nothing of it, publish with --replace-card. Else move it away, run `normalign card "
        f"{checkpoint}`, and copy what you want to keep between the marks of the card that this writes."
    )
    check_replaceable(card_in(checkpoint), str(checkpoint), None if replace_card else remedy)
    if dry_run:
        done = _dry_run(checkpoint, repo_id, revision, as_adapter, base, check_loading, token or get_token(), notify)
        if space:
            notify(f"The Space {space_of(repo_id)} would be published too.")
        return done

    client = Client(token, endpoint=endpoint, waits=waits)
    with client.token_kept():
        client.check_account(repo_id, create_pr)
        existing = find_existing(client, repo_id, revision)
        remote = existing.remote
        check_remote(remote, repo_id, private, create_pr)
        if space:
            with client.step(f"looking at {space_of(repo_id)}", "Nothing was sent."):
                check_space(client, repo_id)
        remedy = (
            "Copy what you want to keep of it between the marks of the card that `normalign card` writes into the "
            "folder, and publish with --replace-card."
        )
        check_replaceable(existing.card, repo_id, None if replace_card else remedy)
        token_needed = client.token if private or (remote and (remote.private or remote.gated)) else None
        with staged(checkpoint, as_adapter=as_adapter, base=base, client=client) as stage:
            check_checkpoint(stage.folder)
            sent = prepare(stage, repo_id, revision, existing, client.token, notify)
            if check_loading:
                check_room(sum(content.size for content in sent.sent))
            client.check_card(sent)
            snapshot = take_snapshot(sent)
            before = None
            if check_loading:
                notify(LOADING)
                before = ask(client, stage.folder, None, stage.base, token_needed)
            pushed = push_snapshot(
                client, snapshot, repo_id, before=remote, private=private, revision=revision, create_pr=create_pr,
                notify=notify,
            )  # fmt: skip
        if before is None:
            notify(
                f"{repo_id} was not loaded, neither from the folder nor from the Hub: whether others can is unknown."
            )
        else:
            notify(f"Loading {repo_id} in the same way, at {pushed.commit}.")
            verify(client, pushed, stage.base, before)
        page = push_space(client, pushed, notify) if space else None
    code = snippet(repo_id, pushed.commit, stage.base, "processor_config.json" in pushed.files)
    return Publication(**vars(pushed), space=page, snippet=code, left=sent.left)


def _dry_run(
    checkpoint: Path,
    repo_id: str,
    revision: str,
    as_adapter: bool,
    base: str | None,
    check_loading: bool,
    token: str | None,
    notify: Callable[[str], object],
) -> Publication:
    with staged(checkpoint, as_adapter=as_adapter, base=base, client=None) as stage:
        check_checkpoint(stage.folder)
        sent = prepare(stage, repo_id, revision, Existing(), token, notify)
        files = take_snapshot(sent).sizes
        if check_loading and stage.base is None:
            notify(LOADING)
            ask_clean_process(stage.folder)
            notify("It passed the checks.")
        else:
            reason = "its base is on the Hub" if check_loading else "as --no-verify asks"
            notify(f"It passed the other checks, but was not loaded: {reason}.")
    return Publication(
        repo_id, "", "", "", revision, False, False, files, list(files), sum(files.values()), left=sent.left
    )


def find_existing(client: Client, repo_id: str, revision: str) -> Existing:
    """The repository and its card as they are now.

    Raises:
        ValueError: `revision` is a tag or a commit, or the card there is not text.
        OSError: The Hub or the connection failed.
    """
    with client.step(f"looking at {repo_id}", "Nothing was sent."):
        remote = read_repository(client, repo_id, branch=revision)
        if remote is None:
            return Existing()
        card = decode_card(remote.read(client, CARD), repo_id) if CARD in remote.files else None
    return Existing(remote, card)


def prepare(
    stage: Staged, repo_id: str, revision: str, existing: Existing, token: str | None, notify: Callable[[str], object]
) -> Contents:
    """The files to send of a folder, with its card, which keeps what was written by hand on the Hub or else here.

    Args:
        stage: The folder.
        repo_id, revision: Where it is published.
        existing: What is there. [`check_replaceable`] has to come first: a card that is not ours is replaced.
        token: Must not be in any file.
        notify: Receives warnings.

    Raises:
        ValueError: The folder is not a checkpoint or holds what must not be sent, or a mark in a card is damaged.
    """
    card = render_card(stage.folder, repo_id=repo_id, revision=revision, hub_card=existing.card, adapter=stage.base)
    for warning in card.warnings:
        notify(f"Warning: {warning}")
    sent = contents(stage.folder, {CARD: card.text.encode(), **stage.generated})
    check_contents(sent, token)
    return sent
