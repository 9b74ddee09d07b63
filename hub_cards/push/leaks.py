# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What must not be published, looked for in what is sent: tokens, other secrets, and paths of a machine."""

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image, UnidentifiedImageError

from ...checkpoint.names import ADAPTER_CONFIG, PICKLES
from .contents import Content, Contents


SECRETS = {
    "a Hugging Face token": r"\b(?:hf|api_org)_(?!(.)\1+\b)[A-Za-z0-9]{30,}\b",
    "a GitHub token": r"\b(?:gh[pousr]_[A-Za-z0-9]{36,}|github_pat_[A-Za-z0-9_]{50,})\b",
    "an AWS access key": r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b",
    "an OpenAI API key": r"\bsk-[\w-]{10,}T3BlbkFJ[\w-]{10,}",
    "an Anthropic API key": r"\bsk-ant-[\w-]{40,}",
    "a Google API key": r"\bAIza[\w-]{35}\b",
    "a Slack token": r"\bxox[abeprs]-[\w-]{20,}",
    # By itself it looks like a commit: 40 hexadecimal digits.
    "a Weights & Biases API key": r"(?i)\bwandb[_ -]?api[_ -]?key\W{1,6}[0-9a-f]{40}\b|\bwandb_v1_\w{20,}",
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY-----",
}
"""What secrets look like that can be told from anything else. There are others."""

_START, _REST = r"(?<![\w.~:/%})-])", r"[^\s\"'`<>,;)\]}|]*"  # not in the middle of a URL, a relative path or a word
_HOMES = (
    rf"{_START}/(?:home|Users)/[^\s/\"'`<>{{}}$\\]{_REST}|\bfile://{_REST}"
    rf"|\b[A-Za-z]:(?:\\{{1,4}}|/)Users(?:\\{{1,4}}|/)\w{_REST}"
)
_ROOTS = (
    rf"{_START}/(?:root|tmp|private|var|mnt|media|data\d*|scratch|workspace|content|kaggle|gpfs|lustre|fsx|nfs|dev/shm)"
    rf"/[\w.@-]{_REST}"
)


def find_private(contents: Contents, token: str | None) -> list[str]:
    """Everything in what is sent that must not be, one sentence each: file, line, what it is, what to do.

    Looked through are texts, and the metadata of weights and of figures; of weights nothing but the header is read.
    Vocabularies and chat templates hold paths for good reasons ("/home" is a token of many): there only `token`, the
    checkpoint's own path and, in templates, secrets are looked for. A card may speak of `/data`, but of no home.

    Args:
        contents: What is sent.
        token: That of the person who publishes; it is looked for everywhere.
    """
    own = _own_paths(contents)
    return [fault for content in contents.sent for fault in _faults(content, token, own)]


def shown(secret: str) -> str:
    """A secret as messages may name it."""
    return f"{secret[:4]}... ({len(secret)} characters)"


def _faults(content: Content, token: str | None, own: list[str]) -> Iterator[str]:
    if content.path.endswith(PICKLES):
        yield f"{content.path}: a pickle, which runs code when it is read. Save it as safetensors."
        return
    try:
        texts = list(_texts(content))
    except ValueError as error:
        yield f"{content.path}: {error}"
        return
    for place, text in texts:
        if token and token in text:
            yield f"{place}: your token, {shown(token)}. Remove it there, and revoke it: others may have read it."
            text = text.replace(token, "")
        for what, found in _search(content, text, own):
            yield f"{place}: {what}{found}."


def _search(content: Content, text: str, own: list[str]) -> Iterator[tuple[str, str]]:
    template = content.path.endswith(".jinja")
    vocabulary = content.kind == "processor" and not content.path.endswith("_config.json") and not template
    if not vocabulary:
        for what, pattern in SECRETS.items():
            for match in re.finditer(pattern, text):
                yield what, f", {shown(match[0])}. Remove it, and revoke it: others may have read it"
    paths = [path for path in own if path in text]
    paths = [path for path in paths if not any(path != other and path in other for other in paths)]
    if not (vocabulary or template):
        patterns = [_HOMES] if content.kind == "card" else [_HOMES, _ROOTS]
        matches = [match[0] for pattern in patterns for match in re.finditer(pattern, text)]
        paths = [path for path in paths if not any(path in match for match in matches)] + matches
    for path in dict.fromkeys(paths):
        remedy = "Write the name that others know it by, or remove it"
        if content.path == ADAPTER_CONFIG:
            remedy = "Publish the base first and name its repository, or publish the merged model"
        yield "a local path", f", {path}. {remedy}"


def _texts(content: Content) -> Iterator[tuple[str, str]]:
    """Place -> text of everything in a file that is text: lines, or entries of its metadata.

    Raises:
        ValueError: it is not what its name says.
    """
    path, source = content.path, content.source
    if path.endswith(".safetensors"):
        with io.BytesIO(source) if isinstance(source, bytes) else source.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = file.read(size) if 0 < size <= 100 * 2**20 else b""  # the format's own limit
        try:
            metadata = json.loads(header).get("__metadata__", {})
        except (ValueError, AttributeError, RecursionError) as error:
            raise ValueError("no safetensors file (a Git LFS pointer?). Fetch or save it again.") from error
        yield from ((f"{path}, metadata {name}", f"{name}: {value}") for name, value in metadata.items())
        return
    data = source if isinstance(source, bytes) else source.read_bytes()
    if path.endswith(".png"):
        try:
            with Image.open(io.BytesIO(data), formats=["PNG"]) as image:
                image.load()  # texts may follow the pixels
                found: dict[Any, Any] = {**image.info, **dict(image.getexif())}
        except (UnidentifiedImageError, OSError, SyntaxError) as error:
            raise ValueError("no PNG image that can be read. Draw it again.") from error
        yield from ((f"{path}, {name}", f"{name}: {value}") for name, value in found.items())
    elif path.endswith(".model"):  # a vocabulary of sentencepiece
        if data.startswith((b"\x80", b"PK")):
            raise ValueError("a pickle, which runs code when it is read. Save the tokenizer again.")
        yield path, data.decode("utf-8", "replace")
    else:
        try:
            lines = data.decode("utf-8").splitlines()
        except UnicodeDecodeError as error:
            raise ValueError(f"no text in UTF-8 (byte {error.start}). Save it as that.") from error
        yield from ((f"{path}, line {number}", line) for number, line in enumerate(lines, start=1))


def _own_paths(contents: Contents) -> list[str]:
    """The checkpoint's folder and the one above it, and the home: where they are no common name such as "/root"."""
    own = {Path.home(), Path.home().resolve()}
    for content in contents.sent:
        if isinstance(content.source, Path):
            folder = content.source.parents[content.path.count("/")]
            own |= {folder, folder.parent}
    paths = {str(path) for path in own if len(path.parts) > 2}
    paths |= {json.dumps(path)[1:-1] for path in paths}  # as JSON has letters beyond ASCII
    return sorted(paths, key=len, reverse=True)
