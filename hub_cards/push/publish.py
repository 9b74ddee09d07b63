# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Publishing: from a checkpoint folder to a Hub repository that anyone can load, by one commit, verified."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from huggingface_hub import get_token

from ...checkpoint.find import check_folder, check_repo_id
from ...checkpoint.names import CARD
from ..card.hand_written import check_own, insert_parts, settle
from ..card.write import by_hand, decoded, is_ours, render_card
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
    """What was published; of a dry run what would be, with no commit.

    Attributes:
        space: The Space's page, where one was published.
        snippet: Code that loads this commit.
        left: What of the folder is not sent -> why.
    """

    space: str | None = None
    snippet: str = ""
    left: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Existing:
    """What a publication finds on the Hub.

    Attributes:
        remote: The repository, None where it is not there.
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

    It may be run again at any moment, after a failure too: only what the Hub does not have is sent. Model, code,
    processor, card, figures and results are sent; optimizer states and the like never are. What an earlier publication
    sent and this one does not is removed in the same commit; what people added on the Hub stays.

    Args:
        checkpoint: Folder of a checkpoint, or of an adapter, which is merged into its base first.
        repo_id: `"namespace/name"`. The repository is made where it is not there.
        private: For a new repository; None leaves it to the namespace's default.
        revision: Branch; it is made where it is not there.
        create_pr: Open a pull request against the branch, in anyone's repository.
        space: Publish the demo as well, as the Space `{repo_id}-demo`.
        as_adapter: Publish an adapter as one, with its base pinned to a commit. The base must be on the Hub.
        base: The adapter's base, where it has moved: a folder or a Hub id.
        dry_run: Check, and tell what would be sent. Needs neither token nor network, unless an adapter's base does.
        check_loading: Load the folder before, and the commit after, in a clean process; each takes the memory of the
            whole model, and the second its room on the disk. All other checks are made in any case.
        replace_card: Write over a card, there or in the folder, that is none of ours.
        token: Access token; by default that of `hf auth login` or HF_TOKEN.
        endpoint: URL of the Hub, by default that of huggingface_hub.
        waits: Seconds to wait before each further try of what failed.
        notify: Is told what happens.

    Returns:
        What was published.

    Raises:
        ValueError: The checkpoint, the token, the repository or an option is not fit; files changed meanwhile. Nothing
            was committed.
        OSError: The Hub, the connection or the disk failed, another publisher was faster, or the commit does not give
            others what the folder gives. The message says what stands. The token is in no message or traceback.
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
    check_own(card_in(checkpoint), str(checkpoint), None if replace_card else remedy)
    if dry_run:
        with staged(checkpoint, as_adapter=as_adapter, base=base, client=None) as stage:
            check_checkpoint(stage.folder)
            sent = prepare(stage, repo_id, revision, Existing(), token or get_token(), notify)
            files = take_snapshot(sent).sizes
            loaded = check_loading and stage.base is None
            if loaded:
                notify(LOADING)
                ask_clean_process(stage.folder)
        unloaded = "as --no-verify asks" if not check_loading else "its base is on the Hub"
        notify("It passed the checks." if loaded else f"It passed the other checks, but was not loaded: {unloaded}.")
        if space:
            notify(
                f"The Space {space_of(repo_id)} would be published too, with the demo's program and the model's name."
            )
        pushed = Pushed(repo_id, "", "", "", revision, False, False, files, list(files), sum(files.values()))
        return Publication(**vars(pushed), left=sent.left)

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
        check_own(existing.card, repo_id, None if replace_card else remedy)
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
                f"{repo_id} was not loaded, neither from the folder nor from the Hub: whether others can is not known."
            )
        else:
            notify(f"Loading {repo_id} in the same way, at {pushed.commit}.")
            verify(client, pushed, stage.base, before)
        page = push_space(client, pushed, notify) if space else None
    code = snippet(repo_id, pushed.commit, stage.base, "processor_config.json" in pushed.files)
    return Publication(**vars(pushed), space=page, snippet=code, left=sent.left)


def card_in(folder: Path) -> str | None:
    """README.md of a folder, whoever wrote it. Raises ValueError if it is no text."""
    file = folder / CARD
    return decoded(file.read_bytes(), str(folder)) if file.is_file() else None


def find_existing(client: Client, repo_id: str, revision: str) -> Existing:
    """What is on the Hub now.

    Raises:
        ValueError: `revision` is a tag or a commit, or the card there is no text.
        OSError: The Hub or the connection failed.
    """
    with client.step(f"looking at {repo_id}", "Nothing was sent."):
        remote = read_repository(client, repo_id, branch=revision)
        if remote is None:
            return Existing()
        card = decoded(remote.read(client, CARD), repo_id) if CARD in remote.files else None
    return Existing(remote, card)


def prepare(
    stage: Staged, repo_id: str, revision: str, existing: Existing, token: str | None, notify: Callable[[str], object]
) -> Contents:
    """What is sent of a folder, with the card, which keeps what was written by hand on the Hub or else here.

    Args:
        stage: What is published.
        repo_id, revision: Where.
        existing: What is there. A card that is none of ours is replaced, so [`check_own`] comes before.
        token: Must not be in what is sent.
        notify: Is told warnings.

    Raises:
        ValueError: The folder is no checkpoint or holds what must not be sent, or a mark of what is written by hand
            is damaged.
    """
    theirs = existing.card if existing.card and is_ours(existing.card) else None
    here = card_in(stage.folder)
    written = settle(here, theirs, repo_id)
    for name, text in by_hand(here or "").items():
        if text.strip() and text.strip() != written[name].strip():
            notify(f"Warning: What is written under {name} in {repo_id} stays; that of the folder is not sent.")
    card = render_card(
        stage.folder, repo_id=repo_id, revision=revision, previous=[theirs] if theirs else [], adapter=stage.base
    )
    text = insert_parts(card.text, written)
    for warning in card.warnings:
        notify(f"Warning: {warning}")
    sent = contents(stage.folder, {CARD: text.encode(), **stage.generated})
    check_contents(sent, token)
    return sent
