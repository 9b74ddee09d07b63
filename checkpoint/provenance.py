# SPDX-License-Identifier: Apache-2.0
"""Provenance of a checkpoint: licences and commits of its parts and data, and its records; None if unknown."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import HfApi, constants, hf_hub_download
from huggingface_hub.errors import HTTPError
from huggingface_hub.repocard import metadata_load
from transformers.utils import cached_file

from .files import json_or_none
from .names import CARD


FAILURES = (OSError, ValueError, HTTPError, yaml.YAMLError)  # of the Hub client, and of reading a card


def licence_of(name: str, revision: str | None = None) -> dict[str, str | None] | None:
    """The licence in the card of a model: `license`, `license_name` and `license_link`, as in its metadata.

    Several licences become "other", with all of them in `license_name`. A relative link becomes absolute, or None.
    """
    card, _ = _card(name, revision, "model")
    licence, called, link = (card.get(key) for key in ("license", "license_name", "license_link"))
    if isinstance(licence, list) and licence:
        licence, called = (licence[0], called) if len(licence) == 1 else ("other", ", ".join(map(str, licence)))
    if link and "://" not in str(link):
        link = None if os.path.isdir(name) else f"{constants.ENDPOINT}/{name}/blob/{revision or 'main'}/{link}"
    terms = {"license": licence, "license_name": called, "license_link": link}
    return {key: str(value) if value else None for key, value in terms.items()} if licence else None


def hub_dataset(name: str) -> dict[str, Any]:
    """A Hub data set as it is now: `id`, `revision` (the commit), `license` and `language` of its card."""
    card, commit = _card(name, None, "dataset")
    if commit is None:
        with suppress(*FAILURES):
            commit = HfApi().dataset_info(name).sha
    licence, language = card.get("license"), card.get("language")
    return {
        "id": name,
        "revision": commit,
        "license": ", ".join(map(str, licence)) if isinstance(licence, list) else licence,
        "language": [language] if isinstance(language, str) else language,
    }


def read_record(checkpoint: str, name: str, revision: str | None = None) -> dict[str, Any] | None:
    """The JSON object in the file `name` of a checkpoint folder or Hub repository, or None."""
    with suppress(*FAILURES):
        file = cached_file(checkpoint, name, revision=revision, _raise_exceptions_for_missing_entries=False)
        content = json_or_none(Path(file)) if file else None
        return content if isinstance(content, dict) else None
    return None


def _card(name: str, revision: str | None, kind: str) -> tuple[dict[str, Any], str | None]:
    """The metadata of a card, and its commit if it is on the Hub."""
    try:
        local = kind == "model" and os.path.isdir(name)
        file = Path(name, CARD) if local else Path(hf_hub_download(name, CARD, revision=revision, repo_type=kind))
        return metadata_load(file) or {}, None if local else file.parent.name
    except FAILURES:
        return {}, None
