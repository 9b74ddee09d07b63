# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""After the push: the commit is loaded as others load it, and the code that does so."""

import shutil
import tempfile
from pathlib import Path

from ..card.write import AdapterBase
from .clean_process import Answer, ask_clean_process, difference
from .client import Client
from .push import Pushed


SNIPPET = """\
from transformers import AutoModelForImageTextToText, AutoProcessor

commit = "{commit}"
processor = AutoProcessor.from_pretrained("{repo_id}", revision=commit, code_revision=commit, trust_remote_code=True)
model = AutoModelForImageTextToText.from_pretrained(
    "{repo_id}", revision=commit, code_revision=commit, dtype="auto", trust_remote_code=True
)
"""

ADAPTER_SNIPPET = """\
from peft import PeftModel
from transformers import AutoModelForImageTextToText, AutoProcessor

commit = "{commit}"
base_commit = "{base_commit}"
base = AutoModelForImageTextToText.from_pretrained(
    "{base}", revision=base_commit, code_revision=base_commit, dtype="auto", trust_remote_code=True
)
model = PeftModel.from_pretrained(base, "{repo_id}", revision=commit)
processor = AutoProcessor.from_pretrained("{processor}", revision={processor_commit}, trust_remote_code=True)
"""


def ask(
    client: Client, source: str | Path, revision: str | None, base: AdapterBase | None, token: str | None
) -> Answer:
    """[`ask_clean_process`] on the client's Hub; `token` is only given for a private or gated repository."""
    return ask_clean_process(
        source, revision=revision, base=base.repo_id if base else None,
        base_revision=base.revision if base else None, token=token, endpoint=client.api.endpoint,
    )  # fmt: skip


def check_room(size: int) -> None:
    """Raises OSError unless the temporary folder has room for `size` bytes, as the commit is loaded there."""
    folder = tempfile.gettempdir()
    if (free := shutil.disk_usage(folder).free) < size:
        raise OSError(
            f"{folder} has {free:,} bytes free, and loading the published files there takes {size:,}. Nothing was "
            "sent. Set TMPDIR to a folder with room for the model."
        )


def verify(client: Client, pushed: Pushed, base: AdapterBase | None, before: Answer) -> None:
    """Loads the commit, and compares it with the folder.

    Args:
        client: The client.
        pushed: The push.
        base: The base of an adapter.
        before: The folder's answer.

    Raises:
        OSError: It does not load, or answers differently. It is on the branch nevertheless; the message names the
            commit before.
    """
    try:
        after = ask(
            client, pushed.repo_id, pushed.commit, base, client.token if pushed.private or pushed.gated else None
        )
        found = difference(before, after)
    except OSError as error:  # this machine's failure, not the commit's
        raise OSError(f"{pushed.repo_id} is at {pushed.commit}, but was not checked: {error} Publish again.") from None
    except ValueError as error:
        found = str(error)
    if found is not None:
        earlier = (
            f"The commit before it, {pushed.parent}, still exists: load it with `revision`."
            if pushed.changed
            else "The commit was there before; nothing was sent."
        )
        raise OSError(
            f"{pushed.repo_id} is at {pushed.commit}, but a clean process gets something else from there than from "
            "the folder. "
            f"{found} {earlier} Publish again to load it once more; if that fails in the same way, report a bug."
        )


def snippet(repo_id: str, commit: str, base: AdapterBase | None, has_processor: bool) -> str:
    """Code that loads a commit, and at that commit the code that comes with it.

    Args:
        repo_id: The repository.
        commit: The commit.
        base: Of an adapter.
        has_processor: Whether the repository of an adapter has a processor; else it is the base's.
    """
    if base is None:
        return SNIPPET.format(repo_id=repo_id, commit=commit)
    return ADAPTER_SNIPPET.format(
        repo_id=repo_id,
        commit=commit,
        base=base.repo_id,
        base_commit=base.revision,
        processor=repo_id if has_processor else base.repo_id,
        processor_commit="commit" if has_processor else "base_commit",
    )
