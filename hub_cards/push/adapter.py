# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Publishing an adapter folder: merged into its base, or as an adapter whose base is pinned to a commit."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import ModelInfo
from huggingface_hub.errors import HTTPError, RepositoryNotFoundError, RevisionNotFoundError

from ...checkpoint.find import check_repo_id
from ...checkpoint.names import ADAPTER_CONFIG, TRAINING_RECORD
from ...checkpoint.untrusted import check_files, has_auto_map, json_object
from ...configuration_normalign_llava import NormAlignLlavaConfig
from ..card.facts import read_json
from ..card.write import AdapterBase
from .client import Client
from .contents import CODE
from .repository import read_file


@dataclass(frozen=True)
class Staged:
    """A folder that can be published.

    Attributes:
        folder: The checkpoint's, a merged one in the temporary folder, or the adapter's.
        generated: Path -> content of files to send instead of the folder's.
        base: The base of an adapter that is published as one.
    """

    folder: Path
    generated: dict[str, bytes] = field(default_factory=dict)
    base: AdapterBase | None = None


@contextmanager
def staged(checkpoint: Path, *, as_adapter: bool, base: str | None, client: Client | None) -> Iterator[Staged]:
    """The folder to publish for `checkpoint`: itself, or an adapter merged into its base.

    Args:
        checkpoint: Folder of a checkpoint or an adapter.
        as_adapter: Do not merge an adapter.
        base: The adapter's base, if it is not the one that it names.
        client: Resolves the base's revision to a commit; None for a dry run.

    Raises:
        ValueError: `as_adapter` or `base` without an adapter; an adapter that cannot be merged; a base that is not on
            the Hub, has other code than this package's, or has other settings than the adapter was trained with.
        OSError: The base cannot be read, or there is no room for the merged model, which is removed.
    """
    if not (checkpoint / ADAPTER_CONFIG).is_file():
        if as_adapter or base:
            raise ValueError(
                f"{checkpoint} has no {ADAPTER_CONFIG}, so it is not an adapter: leave out --adapter and --base."
            )
        yield Staged(checkpoint)
    elif as_adapter:
        yield _with_base(checkpoint, base, client)
    else:
        from ...assembly.merge import merge_adapter
        from ...checkpoint.files import write_failure

        with tempfile.TemporaryDirectory(prefix="normalign-merged-") as folder:
            merged = Path(folder) / checkpoint.resolve().name
            try:
                merge_adapter(checkpoint, merged, base=base)
            except HTTPError:
                raise
            except OSError as error:
                full = write_failure(error) is not None
                where = f" in {tempfile.gettempdir()}" if full else ""
                remedy = " Set TMPDIR to a folder with room for the model." if full else ""
                raise OSError(f"The adapter could not be merged{where}: {error} Nothing was sent.{remedy}") from error
            try:
                yield Staged(merged)
            except (ValueError, OSError) as error:
                if str(merged) not in str(error):
                    raise
                kind = ValueError if isinstance(error, ValueError) else OSError
                raise kind(str(error).replace(str(merged), f"{checkpoint}, merged,")) from error


def _with_base(adapter: Path, base: str | None, client: Client | None) -> Staged:
    check_files(adapter)
    config = json_object((adapter / ADAPTER_CONFIG).read_bytes(), str(adapter / ADAPTER_CONFIG))
    named = config.get("base_model_name_or_path")
    base = base or named
    remedy = "Publish the base first, and name it: --base user/name. Or publish the merged model, without --adapter."
    if not base or Path(base).exists():
        raise ValueError(f"The adapter's base, {base!r}, is not on the Hub, so nobody else could load it. {remedy}")
    try:
        check_repo_id(base)
    except ValueError as error:
        raise ValueError(f"The adapter's base cannot be on the Hub: {error} {remedy}") from None
    revision = config.get("revision") if base == named else None
    if client is not None:
        try:
            with client.step(f"looking for the base {base}", "Nothing was sent."):
                info = _info(client, base, revision)
                revision = str(info.sha)
                its_config = json.loads(read_file(client, base, "config.json", revision))
                foreign = _foreign_code(client, info, its_config)
        except LookupError as error:
            raise ValueError(f"The adapter's base, {base}, is not on the Hub: {error}. {remedy}") from None
        if foreign:
            raise ValueError(
                f"Loading the adapter's base, {base} at {revision}, would run code that is not this version's of this "
                f"package: {', '.join(foreign)}. Publish the base with this version, or the merged model, without "
                "--adapter."
            )
        _check_arm(adapter, base, its_config)
    pinned = AdapterBase(base, revision or "main")
    config |= {"base_model_name_or_path": pinned.repo_id, "revision": pinned.revision}
    return Staged(adapter, {ADAPTER_CONFIG: (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()}, pinned)


def _check_arm(adapter: Path, base: str, config: dict[str, Any]) -> None:
    """Raises ValueError if training changed settings of the base, which PEFT would load unchanged."""
    record = read_json(adapter / TRAINING_RECORD) or {}
    changed = [
        f"{name} {value!r}, not {base_value!r}"
        for name, value in record.get("config_changes", {}).items()
        if value != (base_value := config.get(name, getattr(NormAlignLlavaConfig, name)))
    ]
    if changed:
        raise ValueError(
            f"The adapter was trained with {'; '.join(changed)} as in config.json of its base {base}: as an adapter "
            "it would be loaded on a different model. Publish the merged model, without --adapter."
        )


def _info(client: Client, repo_id: str, revision: str | None) -> ModelInfo:
    try:
        return client.retry(client.api.model_info, repo_id, revision=revision)
    except RevisionNotFoundError:
        raise LookupError(f"it has no revision {revision}") from None
    except RepositoryNotFoundError:
        raise LookupError("there is no such repository, or the token has no access to it") from None


def _foreign_code(client: Client, info: ModelInfo, config: dict[str, Any]) -> list[str]:
    """Files and fields of a base that would run code other than this package's."""

    def content(name: str) -> bytes:
        return read_file(client, info.id, name, str(info.sha))

    names = {file.rfilename for file in info.siblings or []}
    package = Path(__file__).resolve().parents[2]
    foreign = [name for name in CODE if name not in names or content(name) != (package / name).read_bytes()]
    if config.get("auto_map") != NormAlignLlavaConfig.auto_map_entries:
        foreign.append("auto_map in config.json")
    processor = {"processor_config.json", "preprocessor_config.json", "tokenizer_config.json"}
    settings = {name: json_object(content(name), f"{name} of {info.id}") for name in sorted(names & processor)}
    return foreign + [f"auto_map in {name}" for name in settings if has_auto_map(settings[name])]
