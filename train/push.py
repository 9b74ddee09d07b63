# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Pushing from a training run: the repository that `normalign publish` makes, of a result or of a checkpoint."""

import json
import logging
import os
import shutil
from concurrent.futures import Future
from pathlib import Path

from huggingface_hub import get_token, hf_hub_download, run_as_future, upload_folder
from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError
from transformers.trainer_utils import HubStrategy
from transformers.utils import CONFIG_NAME
from transformers.utils.hub import PushInProgress
from trl import SFTTrainer

from ..hub_cards.card import AdapterBase, render_card, write_card
from ..hub_cards.checks import check_contents
from ..hub_cards.client import Client
from ..hub_cards.contents import ADAPTER_CONFIG, contents
from ..hub_cards.hand_written import digests
from ..hub_cards.hub import Pushed, push


logger = logging.getLogger(__name__)

CARD = "README.md"
STAGING = ".push"
"""Folder in the output folder that holds checkpoints while they are sent."""

SECRET = "training_args.bin"
"""The Trainer's options as a pickle, `hub_token` among them."""


class PushingTrainer(SFTTrainer):
    """[`SFTTrainer`] that pushes what `normalign publish` would: one commit, this package's card, no pickles."""

    push_in_progress: PushInProgress | None

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Makes the repository, before training.

        Raises:
            ValueError: The token may not push there. The Trainer takes any repository that is there already, and
                would find out when all is trained.
            OSError: The Hub or the connection failed.
        """
        super().init_hf_repo(token=token, private=private)
        if self.is_world_process_zero():
            Client(token or self.args.hub_token).check_account(self.hub_model_id)

    def create_model_card(self, *args, **kwargs) -> None:
        """Writes this package's card beside the model in `output_dir`; before there is one there, nothing.

        TRL's would call it a text-generation model fine-tuned from None. Its arguments are not needed: the card says
        what lies in the folder, and keeps what was written by hand between its marks.
        """
        folder = Path(self.args.output_dir)
        if self.is_world_process_zero() and any((folder / name).exists() for name in (CONFIG_NAME, ADAPTER_CONFIG)):
            write_run_card(folder, self.hub_model_id)

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs,
    ):
        """Saves the model to `output_dir` and pushes what `normalign publish` would send of it, in one commit.

        Args:
            commit_message: Title of the commit.
            blocking: Whether to wait until it is pushed.
            token: Access token; `hub_token` by default.
            revision: Branch; `hub_revision` by default.
            private: For a new repository; `hub_private_repo` by default.
            **kwargs: What TRL's cards are told; not needed.

        Returns:
            What was pushed, or its `Future` if not `blocking`; None on other processes than the first.

        Raises:
            ValueError: The folder holds what must not be sent, or the token may not write to the repository.
            OSError: The Hub or the connection failed. The model is in `output_dir`.
        """
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        token = token or self.args.hub_token
        if self.hub_model_id is None:
            self.init_hf_repo(token=token, private=private)
        self.save_model(_internal_call=True)
        if not self.is_world_process_zero():
            return None
        self._finish_current_push()
        job = run_as_future(
            push_folder,
            Path(self.args.output_dir),
            self.hub_model_id,
            message=commit_message,
            token=token,
            revision=revision or self.args.hub_revision,
        )
        return job.result() if blocking else job

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        # As the Trainer does, but of the checkpoint itself: what it copies to output_dir lacks the code.
        strategy = self.args.hub_strategy
        if not self.is_world_process_zero() or strategy == HubStrategy.END:
            return
        going_on = self.push_in_progress
        if going_on is not None and not going_on.is_done() and not self.args.hub_always_push:
            return
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        folder = Path(checkpoint_folder)
        beside = {HubStrategy.CHECKPOINT: "last-checkpoint", HubStrategy.ALL_CHECKPOINTS: folder.name}.get(strategy)
        job = push_checkpoint(
            folder,
            self.hub_model_id,
            message=f"Training in progress, step {self.state.global_step}",
            token=self.args.hub_token,
            revision=self.args.hub_revision,
            beside=beside,
        )
        self.push_in_progress = PushInProgress([*(going_on.jobs if going_on else []), job])


def write_run_card(folder: Path, repo_id: str | None) -> None:
    """Writes the card of a finished run into its folder; what was written by hand there stays.

    Where that cannot be done, for a card that is not this package's or a damaged record, a warning says so: weights
    that took days to train lie in that folder, and nothing may stop what comes after.
    """
    try:
        write_card(folder, repo_id=repo_id)
    except ValueError as error:
        logger.warning(f"The card of {folder} was not written: {error}")


def push_folder(folder: Path, repo_id: str, *, message: str, token: str | None, revision: str | None) -> Pushed:
    """Sends a checkpoint or an adapter with its card, in one commit that also removes what an earlier push left over.

    Args:
        folder: The checkpoint's folder. Nothing in it is changed.
        repo_id: Where to.
        message: Title of the commit.
        token: Access token; by default that of `hf auth login` or HF_TOKEN.
        revision: Branch; None for `main`.

    Raises:
        ValueError: The folder holds what must not be sent, or no model; or the token may not write there.
        OSError: The Hub or the connection failed; the repository is as it was.
    """
    revision = revision or "main"
    base, generated = _adapter_base(folder)
    card = render_card(folder, repo_id=repo_id, previous=_card_on_hub(repo_id, revision, token), adapter=base)
    for warning in card.warnings:
        logger.warning(warning)
    files = contents(folder, {**generated, **card.files, CARD: card.text.encode()})
    check_contents(files, token or get_token())
    return push(
        files, repo_id, message=message, token=token, revision=revision, hand_written=digests(card.text),
        say=logger.info,
    )  # fmt: skip


def push_checkpoint(
    checkpoint: Path, repo_id: str, *, message: str, token: str | None, revision: str | None, beside: str | None
) -> Future:
    """[`push_folder`] of a trainer's checkpoint, in the background. A failure is a warning, and training goes on.

    Args:
        checkpoint: The folder `checkpoint-N`. Links to its files are sent, so that it may be removed meanwhile.
        repo_id, message, token, revision: As in `push_folder`.
        beside: Folder of the repository that the whole checkpoint is sent to as well, to resume from: optimizer and
            random states are pickles. The one with the Trainer's options stays out, which has the token in it.

    Returns:
        The job, after those that were begun before.
    """
    staging = checkpoint.parent / STAGING / checkpoint.name
    shutil.rmtree(staging, ignore_errors=True)
    shutil.copytree(checkpoint, staging, copy_function=_link)

    def job() -> None:
        try:
            push_folder(staging, repo_id, message=message, token=token, revision=revision)
            if beside is not None:
                upload_folder(
                    repo_id=repo_id,
                    folder_path=staging,
                    path_in_repo=beside,
                    commit_message=f"{message}, checkpoint",
                    token=token,
                    revision=revision,
                    ignore_patterns=[SECRET],
                )
        except Exception as error:  # of a background job nobody else would hear
            logger.warning(f"{checkpoint.name} was not pushed to {repo_id}: {error} Training goes on.")
        finally:
            shutil.rmtree(staging, ignore_errors=True)
            if not any(staging.parent.iterdir()):
                staging.parent.rmdir()

    return run_as_future(job)


def _adapter_base(folder: Path) -> tuple[AdapterBase | None, dict[str, bytes]]:
    """The base of an adapter, where it is on the Hub; and the adapter's configuration without a local path."""
    file = folder / ADAPTER_CONFIG
    if not file.is_file():
        return None, {}
    config = json.loads(file.read_text(encoding="utf-8"))
    name, revision = config["base_model_name_or_path"], config["revision"]
    if not os.path.exists(name):
        return AdapterBase(name, revision or "main"), {}
    config["base_model_name_or_path"] = Path(name).name
    logger.warning(
        f"The adapter's base, {Path(name).name}, is a local folder: nobody else can load the adapter. Publish it "
        "merged instead, with `normalign publish`, or train on a base that is on the Hub."
    )
    return None, {ADAPTER_CONFIG: (json.dumps(config, indent=2) + "\n").encode()}


def _card_on_hub(repo_id: str, revision: str, token: str | None) -> list[str]:
    try:
        file = hf_hub_download(repo_id, CARD, revision=revision, token=token)
    except (EntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError):
        return []
    return [Path(file).read_text(encoding="utf-8")]


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without links
        shutil.copy2(source, target)
