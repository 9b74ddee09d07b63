# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Publishing: from a checkpoint folder to a Hub repository that a stranger can load, by one commit, verified."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from huggingface_hub import get_token

from .adapter import Staged, staged
from .card import decoded, render_card
from .checks import check_checkpoint, check_contents
from .client import WAITS, Client, check_repo_id
from .contents import CARD, Contents, contents
from .demo_space import check_space, push_space, space_of
from .facts import hub_id
from .hand_written import digests, own_card, put, settle
from .hub import Pushed, check_remote, push_snapshot, with_manifest
from .remote import look
from .snapshot import take_snapshot
from .verify import ask, check_room, snippet, verify


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
    replace_card: bool = False,
    token: str | None = None,
    endpoint: str | None = None,
    waits: Sequence[float] = WAITS,
    say: Callable[[str], object] = print,
) -> Publication:
    """Checks a checkpoint, sends it with its card in one commit, and loads that commit as a stranger would.

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
        replace_card: Write over a card there that is none of ours.
        token: Access token; by default that of `hf auth login` or HF_TOKEN.
        endpoint: URL of the Hub, by default that of huggingface_hub.
        waits: Seconds to wait before each further try of what failed.
        say: Is told what happens.

    Returns:
        What was published.

    Raises:
        ValueError: The checkpoint, the token, the repository or an option is not fit; files changed meanwhile. Nothing
            was committed.
        OSError: The Hub, the connection or the disk failed, another publisher was faster, or the commit does not give
            a stranger what the folder gives. The message says what stands. The token is in no message or traceback.
    """
    checkpoint = Path(checkpoint)
    check_repo_id(repo_id)
    if not checkpoint.is_dir():
        fetch = f" What is on the Hub is fetched with `hf download {checkpoint} --local-dir FOLDER`."
        raise ValueError(
            f"{checkpoint} is no folder. Give the folder of a checkpoint or of an adapter."
            f"{'' if checkpoint.exists() or not hub_id(checkpoint.as_posix()) else fetch}"
        )
    if space and (create_pr or as_adapter):
        raise ValueError(
            "A Space needs a whole model that is published: leave out --space, or --create-pr and --adapter."
        )
    if space:
        check_repo_id(space_of(repo_id))
    if dry_run:
        with staged(checkpoint, as_adapter=as_adapter, base=base, client=None) as stage:
            sent, hand_written = _contents(stage, repo_id, None, {}, token or get_token(), say)
            files = {file.path: file.size for file in with_manifest(take_snapshot(sent), hand_written)}
        if space:
            say(f"The Space {space_of(repo_id)} would be published too, with the demo's program and the model's name.")
        pushed = Pushed(repo_id, "", "", "", revision, False, False, files, list(files), sum(files.values()))
        return Publication(**vars(pushed), left=sent.left)

    client = Client(token, endpoint=endpoint, waits=waits)
    with client.token_kept():
        client.check_account(repo_id, create_pr)
        with client.step(f"looking at {repo_id}", "Nothing was sent."):
            remote = look(client, repo_id, branch=revision)
            check_remote(remote, repo_id, private, create_pr)
            if space:
                check_space(client, repo_id)
            theirs = decoded(remote.read(client, CARD), repo_id) if remote and CARD in remote.files else None
            manifest = remote.manifest(client) if remote else None
        theirs = own_card(theirs, repo_id, replace_card)
        published = manifest.hand_written if manifest else {}
        token_needed = client.token if private or (remote and (remote.private or remote.gated)) else None
        with staged(checkpoint, as_adapter=as_adapter, base=base, client=client) as stage:
            sent, hand_written = _contents(stage, repo_id, theirs, published, client.token, say)
            check_room(sum(content.size for content in sent.sent))
            client.check_card(sent)
            snapshot = take_snapshot(sent)
            say("Loading it in a process of its own, as a stranger would.")
            before = ask(client, stage.folder, None, stage.base, token_needed)
            pushed = push_snapshot(
                client, snapshot, repo_id, private=private, revision=revision, create_pr=create_pr,
                parent=remote.commit if remote else None, hand_written=hand_written, say=say,
            )  # fmt: skip
        say(f"Loading {repo_id} in the same way, at {pushed.commit}.")
        verify(client, pushed, stage.base, before)
        page = push_space(client, pushed, say) if space else None
    code = snippet(repo_id, pushed.commit, stage.base, "processor_config.json" in pushed.files)
    return Publication(**vars(pushed), space=page, snippet=code, left=sent.left)


def _contents(
    stage: Staged,
    repo_id: str,
    theirs: str | None,
    published: dict[str, str],
    token: str | None,
    say: Callable[[str], object],
) -> tuple[Contents, dict[str, str]]:
    """What is sent, checked, with the card; and the digests of what is written by hand in that.

    Args:
        stage: What is published.
        repo_id: Where.
        theirs: The card there, if it is one of ours.
        published: Digests of what was written by hand in the card that was published last.
        token: Must not be in what is sent.
        say: Is told warnings.
    """
    check_checkpoint(stage.folder)
    local = stage.folder / CARD
    here = decoded(local.read_bytes(), str(stage.folder)) if local.is_file() else None
    written = settle(here, theirs, published, repo_id)
    card = render_card(stage.folder, repo_id=repo_id, previous=[theirs] if theirs else [], adapter=stage.base)
    text = put(card.text, written)
    for warning in card.warnings:
        say(f"Warning: {warning}")
    sent = contents(stage.folder, {CARD: text.encode(), **card.files, **stage.generated})
    check_contents(sent, token)
    return sent, digests(text)
