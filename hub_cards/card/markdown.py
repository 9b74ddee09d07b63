# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Names and sentences that others wrote, escaped: Markdown and HTML in them are shown, not rendered."""

import json
import re
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

import yaml
from markupsafe import Markup

from .facts import Part


_ENTITIES = {character: f"&#{ord(character)};" for character in "<>|`\\$"} | {"&": "&amp;"}


def text(value: Any) -> Markup:
    """`value` on one line, every character that Markdown or HTML would read as markup escaped."""
    if isinstance(value, Markup):
        return value
    line = " ".join(str(value).split())
    line = "".join(_ENTITIES.get(character, character) for character in line if character.isprintable())
    line = re.sub(r"([*\[\]~])", r"\\\1", line)
    line = re.sub(r"(?<![^\W_])_|_(?![^\W_])", r"\\_", line)  # inside a word it is not markup
    # At the start of a line a mark makes a heading, a rule or a list; a number such as -0.5 does not.
    line = re.sub(r"^(?=[#=]|[+-](?:[\s-]|$))", r"\\", line)
    line = re.sub(r"^(\d+)(?=[.)](?:\s|$))", r"\1\\", line)
    return Markup(line)


def link(name: str, address: str) -> Markup:
    """`name` as a link to `address`."""
    return Markup(f"[{text(name)}]({quote(address, safe='/:@#?&=%+')})")


def part_link(part: Part) -> Markup:
    """A part's name, linked if the Hub has it, with its commit if known."""
    if part.hub_id is None:
        return text(part.name)
    address = f"https://huggingface.co/{'datasets/' if part.role == 'data' else ''}{part.hub_id}"
    commit = f" ({link(part.revision[:7], f'{address}/tree/{part.revision}')})" if part.revision else ""
    return Markup(link(part.name, address) + commit)


def literal(value: str) -> Markup:
    """`value` as a Python literal on one line."""
    return Markup(json.dumps(value))


def yaml_block(content: dict[str, Any]) -> Markup:
    """`content` as a fenced block of YAML."""
    body = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
    longest = max(map(len, re.findall("`+", body)), default=0)
    fence = "`" * max(3, longest + 1)
    return Markup(f"{fence}yaml\n{body}{fence}")


def table(columns: Sequence[Any], rows: Sequence[Sequence[Any]]) -> Markup:
    """A table, or nothing without rows. Numbers are aligned to the right, each with its error on one line."""
    if not rows:
        return Markup()
    cells = [[text(cell).replace(" ± ", "\xa0±\xa0") for cell in line] for line in (columns, *rows)]
    figures = [all(re.match(r"[\d–−-]", line[column]) for line in cells[1:]) for column in range(len(columns))]
    cells.insert(1, [Markup("---:" if each else "---") for each in figures])
    return Markup("".join(f"| {' | '.join(line)} |\n" for line in cells))
