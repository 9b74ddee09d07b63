# SPDX-License-Identifier: Apache-2.0
"""Publishing an adapter folder: merged into its base, or as an adapter whose base is pinned to a commit."""

import json
from pathlib import Path

from transformers.utils.hub import cached_files

from ...checkpoint.find import find_checkpoint
from ...checkpoint.names import ADAPTER_CONFIG, TRAINING_RECORD
from ...checkpoint.untrusted import check_files
from ...configuration_normalign_llava import NormAlignLlavaConfig
from ..card.facts import Part
from .source import CODE, PACKAGE, read_json


REMEDY = "Publish the base first, and name it: --base user/name. Or publish the merged model, without --adapter."


def recorded_base(adapter: Path) -> Part | None:
    """The base that an adapter names; None for a folder of this machine, and for an adapter that names none."""
    config = read_json(adapter / ADAPTER_CONFIG) or {}
    name = config.get("base_model_name_or_path")
    return (
        Part("base model", name, name, config.get("revision") or "main") if name and not Path(name).exists() else None
    )


def published_config(adapter: Path, base: Part) -> bytes:
    """`adapter_config.json` as it is published: naming `base`."""
    config = read_json(adapter / ADAPTER_CONFIG) or {}
    config |= {"base_model_name_or_path": base.hub_id, "revision": base.revision}
    return (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()


def pinned_base(adapter: Path, base: str | None, *, ask_hub: bool) -> Part:
    """The base of an adapter that is published as one: `base`, or the one that it names; with `ask_hub` its commit."""
    part = recorded_base(adapter)
    if base is not None and (part is None or base != part.hub_id):
        part = None if Path(base).exists() else Part("base model", base, base, "main")
    if part is None:
        raise ValueError(f"The adapter's base is a folder, not on the Hub, so nobody else could load it. {REMEDY}")
    if not ask_hub:
        return part
    base, commit = find_checkpoint(part.name, part.revision, remedy=REMEDY)
    config = check_files(base, commit)
    files = cached_files(base, CODE, revision=commit, _raise_exceptions_for_missing_entries=False) or []
    code = {Path(file).name: Path(file).read_bytes() for file in files}
    foreign = [name for name in CODE if code.get(name) != (PACKAGE / name).read_bytes()]
    if config.get("auto_map") != NormAlignLlavaConfig.auto_map_entries:
        foreign.append("auto_map in config.json")
    if foreign:
        raise ValueError(
            f"Loading the adapter's base, {base} at {commit}, would run code that is not this version's of this "
            f"package: {', '.join(foreign)}. Publish the base anew, or the merged model, without --adapter."
        )
    record = read_json(adapter / TRAINING_RECORD) or {}
    changed = [
        f"{name} {value!r}, not {base_value!r}"
        for name, value in record.get("config_changes", {}).items()
        if value != (base_value := config.get(name, getattr(NormAlignLlavaConfig, name)))
    ]
    if changed:  # PEFT would load it on the base as that is
        raise ValueError(
            f"The adapter was trained with {'; '.join(changed)} as in config.json of its base {base}. Publish the "
            "merged model, without --adapter."
        )
    return Part("base model", base, base, commit)
