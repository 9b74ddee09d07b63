# SPDX-License-Identifier: Apache-2.0
"""A search for what must not be published: tokens, paths of this machine, and pickles."""

import json
import re
from pathlib import Path

from safetensors import SafetensorError, safe_open

from ...checkpoint.names import PICKLES
from .source import PublishSource


_HUB_TOKEN = r"\b(?:hf|api_org)_(?!(.)\1+\b)[A-Za-z0-9]{30,}\b"  # but not a placeholder: hf_xxx...
_PICKLED = (b"\x80", b"PK")  # how pickles begin, and the zip archives that torch.save puts them in


def check_private(source: PublishSource, token: str) -> None:
    """Refuses tokens, that of the publisher among them, paths of this machine, and pickles.

    Of weights only the metadata is read.

    Raises:
        ValueError: There are some; the message lists every place. Of a token it shows the first 4 characters.
    """
    own = _own_paths(source.folder)
    needles = "|".join([*([re.escape(token)] if token else []), _HUB_TOKEN, *map(re.escape, own)])
    faults = ["This must not be published:"]
    for path, content in source.files.items():
        try:
            text = _text(path, content)
        except ValueError as error:
            faults.append(f"- {path}: {error}")
            continue
        for match in re.finditer(needles, text):
            secret, line = match[0], text.count("\n", 0, match.start()) + 1
            if secret in own:
                what = f"a local path, {secret}. Write the name that others know it by, or remove it."
            else:
                whose = "your token" if secret == token else "a Hugging Face token"
                shown = f"{secret[:4]}... ({len(secret)} characters)"
                what = f"{whose}, {shown}. Remove it, and revoke it: others may have read it."
            faults.append(f"- {path}, line {line}: {what}")
    if faults[1:]:
        raise ValueError("\n".join(faults))


def _text(path: str, content: bytes | Path) -> str:
    """The text of a file, of weights the metadata. Raises ValueError for a pickle, whatever its name is."""
    if isinstance(content, Path):
        try:
            with safe_open(content, "pt") as file:
                return json.dumps(file.metadata())
        except SafetensorError as error:
            raise ValueError("not a safetensors file (a Git LFS pointer?). Fetch or save it again.") from error
    if path.endswith(PICKLES) or content.startswith(_PICKLED):
        raise ValueError("a pickle, which runs code when it is read. Save it as safetensors.")
    return content.decode("utf-8", "replace")


def _own_paths(folder: Path) -> list[str]:
    """The home folder, the checkpoint's folder and its parent, unless they are as common as "/root"."""
    own = {Path.home(), Path.home().resolve(), folder, folder.parent}
    paths = {str(path) for path in own if len(path.parts) > 2}
    paths |= {json.dumps(path)[1:-1] for path in paths}  # as JSON escapes letters beyond ASCII
    return sorted(paths, key=len, reverse=True)
