# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Pushing from a training run what `normalign publish` would push, of the result or of a checkpoint."""

import logging
import shlex
import shutil
import tempfile
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from huggingface_hub import run_as_future
from transformers.trainer_utils import HubStrategy
from transformers.utils import CONFIG_NAME
from transformers.utils.hub import PushInProgress
from trl import SFTTrainer

from ..checkpoint.files import remove_unfinished
from ..checkpoint.lock import only_writer
from ..checkpoint.names import ADAPTER_CONFIG
from ..checkpoint.weights import link_or_copy
from ..hub_cards.card.write import write_card
from ..hub_cards.push.adapter import recorded_base
from ..hub_cards.push.publish import check_cards, send
from ..hub_cards.push.repository import Pushed, find_repository, hub_errors, log_in
from .keeping.checkpoints import writing_result


logger = logging.getLogger(__name__)

STAGING = "push"
"""The copy of a checkpoint while it is sent, in a temporary folder `.push-xxxxxxxx` next to the checkpoint."""


class PushingTrainer(SFTTrainer):
    """[`SFTTrainer`] that pushes what `normalign publish` would: one commit, our card, no pickles."""

    push_in_progress: PushInProgress | None

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Checks token and cards before it creates the repository; the Trainer would find out after training."""
        if not self.is_world_process_zero():
            return
        output = Path(self.args.output_dir)
        remove_unfinished(output / STAGING)
        check_hub(output, self.args.hub_model_id, token or self.args.hub_token, self.args.hub_revision)
        with hub_errors("Creating the repository", "Nothing was trained."):
            super().init_hf_repo(token=token, private=private)

    def create_model_card(self, *args, **kwargs) -> None:
        """Writes our card into `output_dir`, if there is a model; text written by hand is kept. Arguments are ignored.

        TRL's card would call it a text-generation model fine-tuned from None. A card that somebody else wrote, or a
        damaged record, is only a warning: training is done, and the steps that follow must not fail because of it.
        """
        folder = Path(self.args.output_dir)
        if self.is_world_process_zero() and any((folder / name).exists() for name in (CONFIG_NAME, ADAPTER_CONFIG)):
            try:
                write_card(folder, repo_id=self.hub_model_id)
            except ValueError as error:
                logger.warning(f"The card of {folder} was not written: {error}")

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs,
    ):
        """Saves the model to `output_dir` and pushes what `normalign publish` would, in one commit.

        Arguments are the Trainer's; those of TRL's card are ignored. Returns a [`Pushed`] or, if not `blocking`, its
        `Future`; None on other processes than the first.

        Raises:
            ValueError, OSError: It was not pushed. The model is in `output_dir`; the message names the command that
                sends it.
        """
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        token = token or self.args.hub_token
        if self.hub_model_id is None:
            self.init_hf_repo(token=token, private=private)
        with writing_result(Path(self.args.output_dir)):
            self.save_model(_internal_call=True)
        if not self.is_world_process_zero():
            return None
        self._finish_current_push()
        options = {"message": commit_message, "token": token, "revision": revision or self.args.hub_revision}
        job = run_as_future(push_result, Path(self.args.output_dir), self.hub_model_id, **options)
        return job.result() if blocking else job

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        # As the Trainer, but from the checkpoint itself: the Trainer's copies in output_dir lack the code.
        strategy = self.args.hub_strategy
        if not self.is_world_process_zero() or strategy == HubStrategy.END:
            return
        running = self.push_in_progress
        if running is not None and not running.is_done() and not self.args.hub_always_push:
            return
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        folder = Path(checkpoint_folder)
        whole = {HubStrategy.CHECKPOINT: "last-checkpoint", HubStrategy.ALL_CHECKPOINTS: folder.name}
        job = push_checkpoint(
            folder,
            self.hub_model_id,
            message=f"Training in progress, step {self.state.global_step}",
            token=self.args.hub_token,
            revision=self.args.hub_revision,
            path_in_repo=whole.get(strategy),
        )
        self.push_in_progress = PushInProgress([*(running.jobs if running else []), *([job] if job else [])])


def check_hub(output: Path, repo_id: str | None, token: str | None, revision: str | None) -> None:
    """Checks token and cards before a run that pushes; the repository, by default named as `output`, need not exist.

    Raises:
        ValueError: There is no token, it may not write, or somebody else wrote a card.
        OSError: The Hub or the connection failed.
    """
    name = repo_id or output.absolute().name
    api = log_in(name, (token or "").strip() or None)
    name = name if "/" in name else api.get_full_repo_name(name)
    check_cards(output, find_repository(api, name, branch=revision or "main"))


def push_folder(folder: Path, repo_id: str, *, token: str | None, revision: str | None, **how: Any) -> Pushed:
    """[`send`]s a checkpoint or an adapter, which is neither changed nor loaded; `how` are arguments of [`send`]."""
    repository = find_repository(log_in(repo_id, token), repo_id, branch=revision or "main")
    base = recorded_base(folder)
    if base is None and (folder / ADAPTER_CONFIG).is_file():
        logger.warning(
            "The adapter's base is not on the Hub: nobody else can load the adapter. Publish it merged instead, "
            "with `normalign publish`, or train on a base that is on the Hub."
        )
    done = send(folder, repository, base, notify=logger.info, warn=logger.warning, **how)
    assert done.pushed is not None
    return done.pushed


def push_result(folder: Path, repo_id: str, *, message: str, token: str | None, revision: str | None) -> Pushed:
    """[`push_folder`] of the result of training; its errors also name the folder and the command that sends it."""
    try:
        return push_folder(folder, repo_id, message=message, token=token, revision=revision)
    except (ValueError, OSError) as error:
        words = ["normalign", "publish", str(folder), "--repo-id", repo_id]
        words += ["--revision", revision] if revision not in (None, "main") else []
        words += ["--adapter"] if recorded_base(folder) else []
        kind = ValueError if isinstance(error, ValueError) else OSError
        raise kind(
            f"{error}\nThe trained model is complete in {folder}. Once that is fixed, send it with "
            f"`{shlex.join(words)}`; it need not be trained again."
        ) from None


def push_checkpoint(folder: Path, repo_id: str, **options: Any) -> Future | None:
    """[`push_folder`] of a trainer's checkpoint, in the background. A failure is a warning, and training continues.

    Links to its files are sent, so it may be removed meanwhile. Jobs run one after another. Returns the job, or None
    if the links could not be made.
    """

    def warn(error: BaseException) -> None:
        logger.warning(f"{folder.name} was not pushed to {repo_id}: {error} Training continues.")

    def job() -> None:
        with temporary:
            try:
                push_folder(staging, repo_id, **options)
            except BaseException as error:  # nobody else would see it; a panic of hf_xet is not an Exception
                warn(error)

    with ExitStack() as undone:
        try:
            parent = tempfile.TemporaryDirectory(prefix=f".{STAGING}-", dir=folder.parent, ignore_cleanup_errors=True)
            staging = Path(undone.enter_context(parent), STAGING)
            undone.enter_context(only_writer(staging.parent))
            shutil.copytree(folder, staging, copy_function=link_or_copy)
            temporary = undone.pop_all()
            return run_as_future(job)
        except Exception as error:
            warn(error)
    return None
