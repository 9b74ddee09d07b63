# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Pushing from a training run what `normalign publish` would push, of the result or of a checkpoint."""

import json
import logging
import os
import shlex
import shutil
import tempfile
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, run_as_future
from transformers.trainer_utils import HubStrategy
from transformers.utils import CONFIG_NAME
from transformers.utils.hub import PushInProgress
from trl import SFTTrainer

from ..checkpoint.files import remove_unfinished
from ..checkpoint.names import ADAPTER_CONFIG
from ..hub_cards.card.hand_written import check_replaceable
from ..hub_cards.card.write import AdapterBase, card_in, write_card
from ..hub_cards.push.adapter import Staged
from ..hub_cards.push.client import Client
from ..hub_cards.push.publish import Existing, find_existing, prepare
from ..hub_cards.push.push import Pushed, push_snapshot, take_snapshot


logger = logging.getLogger(__name__)

STAGING = "push"
"""The copy of a checkpoint while it is sent, in a temporary folder `.push-xxxxxxxx` next to the checkpoint."""

SECRET = "training_args.bin"
"""The Trainer's options as a pickle, `hub_token` among them."""


class PushingTrainer(SFTTrainer):
    """[`SFTTrainer`] that pushes what `normalign publish` would: one commit, our card, no pickles."""

    push_in_progress: PushInProgress | None

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Creates the repository, before training.

        Raises:
            ValueError: The token may not push there, or the repository or `output_dir` has a card that somebody else
                wrote. The Trainer itself would find out after training.
            OSError: The Hub or the connection failed.
        """
        if not self.is_world_process_zero():
            return
        remove_unfinished(Path(self.args.output_dir, STAGING))
        client = Client(token or self.args.hub_token)
        name = self.args.hub_model_id or Path(self.args.output_dir).absolute().name
        with client.token_kept():
            with client.step(f"creating {name}", "Nothing was trained."):
                super().init_hf_repo(token=client.token, private=private)
            client.check_account(self.hub_model_id)
            existing = find_existing(client, self.hub_model_id, self.args.hub_revision or "main")
            _check_cards(Path(self.args.output_dir), self.hub_model_id, existing)

    def create_model_card(self, *args, **kwargs) -> None:
        """Writes our card beside the model in `output_dir`, if there is a model.

        TRL's card would call it a text-generation model fine-tuned from None. Its arguments are ignored: our card is
        rendered from the folder, and keeps what was written by hand between its marks.
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
        """Saves the model to `output_dir` and pushes what `normalign publish` would, in one commit.

        Args:
            commit_message: Title of the commit.
            blocking: Wait for the push.
            token: Access token; `hub_token` by default.
            revision: Branch; `hub_revision` by default.
            private: For a new repository; `hub_private_repo` by default.
            **kwargs: Arguments of TRL's card; ignored.

        Returns:
            The push, or its `Future` if not `blocking`; None on other processes than the first.

        Raises:
            ValueError: The folder holds what must not be sent, the token may not write to the repository, or a card
                was written by somebody else. The model is in `output_dir`.
            OSError: The Hub or the connection failed, or another publisher was faster. The model is in `output_dir`.
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
            push_result,
            Path(self.args.output_dir),
            self.hub_model_id,
            message=commit_message,
            token=token,
            revision=revision or self.args.hub_revision,
        )
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
        beside = {HubStrategy.CHECKPOINT: "last-checkpoint", HubStrategy.ALL_CHECKPOINTS: folder.name}.get(strategy)
        job = push_checkpoint(
            folder,
            self.hub_model_id,
            message=f"Training in progress, step {self.state.global_step}",
            token=self.args.hub_token,
            revision=self.args.hub_revision,
            beside=beside,
        )
        self.push_in_progress = PushInProgress([*(running.jobs if running else []), *([job] if job else [])])


def write_run_card(folder: Path, repo_id: str | None) -> None:
    """Writes the card of a finished run into its folder; text written by hand is kept.

    A card that somebody else wrote, or a damaged record, is only a warning: training is done, and the steps that
    follow must not fail because of a card.
    """
    try:
        write_card(folder, repo_id=repo_id)
    except ValueError as error:
        logger.warning(f"The card of {folder} was not written: {error}")


def push_folder(folder: Path, repo_id: str, *, message: str, token: str | None, revision: str | None) -> Pushed:
    """Pushes a checkpoint or an adapter with its card in one commit, as `normalign publish` does.

    Args:
        folder: The checkpoint's folder; it is not changed.
        repo_id: The repository.
        message: Title of the commit.
        token: Access token; by default that of `hf auth login` or HF_TOKEN.
        revision: Branch; None for `main`.

    Raises:
        ValueError: The folder holds what must not be sent, or no model; somebody else wrote the card in the folder or
            on the Hub; or the token may not write there.
        OSError: The Hub or the connection failed, or another publisher was faster; the message says what stands.
    """
    revision = revision or "main"
    client = Client(token)
    with client.token_kept():
        client.check_account(repo_id)
        existing = find_existing(client, repo_id, revision)
        _check_cards(folder, repo_id, existing)
        stage = _stage(folder)
        if stage.base is None and stage.generated:
            logger.warning(
                "The adapter's base is not on the Hub: nobody else can load the adapter. Publish it merged instead, "
                "with `normalign publish`, or train on a base that is on the Hub."
            )
        sent = prepare(stage, repo_id, revision, existing, client.token, logger.warning)
        client.check_card(sent)
        return push_snapshot(
            client, take_snapshot(sent), repo_id, before=existing.remote, revision=revision, message=message,
            notify=logger.info,
        )  # fmt: skip


def push_result(folder: Path, repo_id: str, *, message: str, token: str | None, revision: str | None) -> Pushed:
    """[`push_folder`] of the result of training; its errors also name the folder and the command that sends it."""
    try:
        return push_folder(folder, repo_id, message=message, token=token, revision=revision)
    except (ValueError, OSError) as error:
        words = ["normalign", "publish", str(folder), "--repo-id", repo_id]
        words += ["--revision", revision] if revision not in (None, "main") else []
        words += ["--adapter"] if _stage(folder).base else []
        kind = ValueError if isinstance(error, ValueError) else OSError
        raise kind(
            f"{error}\nThe trained model is complete in {folder}. Once that is fixed, send it with "
            f"`{shlex.join(words)}`; it need not be trained again."
        ) from None


def push_checkpoint(
    checkpoint: Path, repo_id: str, *, message: str, token: str | None, revision: str | None, beside: str | None
) -> Future | None:
    """[`push_folder`] of a trainer's checkpoint, in the background. A failure is a warning, and training continues.

    Args:
        checkpoint: The folder `checkpoint-N`. Links to its files are sent, so it may be removed meanwhile.
        repo_id, message, token, revision: As in `push_folder`.
        beside: Folder of the repository to which the whole checkpoint is sent as well, optimizer state included, to
            resume from; but for `training_args.bin`, which holds the token.

    Returns:
        The job, or None if the links could not be made. Jobs run one after another.
    """

    def warn(error: BaseException) -> None:
        logger.warning(f"{checkpoint.name} was not pushed to {repo_id}: {error} Training continues.")

    def job() -> None:
        with temporary:
            try:
                push_folder(staging, repo_id, message=message, token=token, revision=revision)
                if beside is not None:
                    for path, content in _stage(staging).generated.items():
                        (staging / path).unlink()  # a link to the checkpoint's file
                        (staging / path).write_bytes(content)
                    replace_folder(
                        staging, repo_id, beside, message=f"{message}, checkpoint", token=token, revision=revision
                    )
            except BaseException as error:  # nobody else would see it; a panic of hf_xet is not an Exception
                warn(error)

    with ExitStack() as undone:
        try:
            folder = tempfile.TemporaryDirectory(
                prefix=f".{STAGING}-", dir=checkpoint.parent, ignore_cleanup_errors=True
            )
            staging = Path(undone.enter_context(folder), STAGING)
            _link_files(checkpoint, staging)
            temporary = undone.pop_all()
            return run_as_future(job)
        except Exception as error:
            warn(error)
    return None


def replace_folder(
    folder: Path, repo_id: str, place: str, *, message: str, token: str | None, revision: str | None
) -> None:
    """Replaces the folder `place` of a repository by this one, but for `SECRET`, in one commit.

    `upload_folder` may make several commits, and between them nobody could resume from it.
    """
    api = HfApi(token=token)
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != SECRET]
    sent = {f"{place}/{path.relative_to(folder).as_posix()}": path for path in paths}
    # An earlier run on more processes left more random states.
    existing = [path for path in api.list_repo_files(repo_id, revision=revision) if path.startswith(f"{place}/")]
    added = [CommitOperationAdd(*file) for file in sent.items()]
    deleted = [CommitOperationDelete(path) for path in existing if path not in sent]
    api.create_commit(repo_id, [*added, *deleted], commit_message=message, revision=revision)


def _check_cards(folder: Path, repo_id: str, existing: Existing) -> None:
    """Raises ValueError if the folder or the repository has a card that somebody else wrote."""
    keep = "What you want to keep of it goes between the marks of the card that training"
    check_replaceable(
        existing.card, repo_id, f"Choose another hub_model_id, or delete README.md there. {keep} pushes."
    )
    check_replaceable(card_in(folder), str(folder), f"Move it away. {keep} writes there.")


def _stage(folder: Path) -> Staged:
    """The folder; for an adapter with its base on the Hub, or else a configuration without the local path."""
    file = folder / ADAPTER_CONFIG
    if not file.is_file():
        return Staged(folder)
    config = json.loads(file.read_text(encoding="utf-8"))
    name = config.get("base_model_name_or_path") or ""
    if name and not os.path.exists(name):
        return Staged(folder, base=AdapterBase(name, config.get("revision") or "main"))
    config["base_model_name_or_path"] = Path(name).name
    return Staged(folder, {ADAPTER_CONFIG: (json.dumps(config, indent=2) + "\n").encode()})


def _link_files(source: Path, target: Path) -> None:
    target.mkdir()
    for path in sorted(source.rglob("*")):  # a folder comes before what is in it
        linked = target / path.relative_to(source)
        if path.is_dir():
            linked.mkdir()
            continue
        try:
            os.link(path, linked)
        except OSError:  # a file system without hard links
            shutil.copy2(path, linked)
