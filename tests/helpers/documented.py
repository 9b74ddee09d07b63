"""The tables of docs/options.md, read and made. As a script, writes its lists of options."""

import re
import textwrap
from dataclasses import MISSING, fields

from paths import DOCS

from normalign_llava.data.sources.arguments import DataArguments
from normalign_llava.train.command import REFUSED, ModelOptions, TrainingOptions


PAGE = DOCS / "options.md"


def documented(section: str) -> dict[str, str]:
    """What the table of a section of the page says of each name."""
    table = PAGE.read_text().split(f"## {section}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \| (.*) \|$", table, re.MULTILINE)
    names = [(name, text) for first, text in rows for name in re.findall(r"`([^`]+)`", first)]
    assert len(names) == len(dict(names)), "a name stands in two rows"
    return dict(names)


def item(option) -> str:
    """What the page says of an option."""
    default = "" if option.default in (None, MISSING) else f" (`{option.default}`)"
    text = f"- `{option.name}`{default}: {option.metadata['help']}"
    return textwrap.fill(text, 128, subsequent_indent="  ")


def refusal(option) -> str:
    """A refused option and the only value that it may have, as YAML writes that."""
    value = option.default
    if value is None or isinstance(value, bool):
        value = "null" if value is None else str(value).lower()
    return f"`{option.name}: {value}`"


def page_from_fields(page: str) -> str:
    """The page with its lists of options made again."""
    known = [*fields(ModelOptions), *fields(DataArguments), *fields(TrainingOptions)]
    used = [option for option in known if not option.metadata["help"].startswith(REFUSED)]
    refused = ", ".join(sorted(refusal(option) for option in known if option not in used))
    for head, text in {
        "defaults in brackets:\n": "\n".join(map(item, used)),
        "the reason:\n": textwrap.fill(refused, 128, break_on_hyphens=False),
    }.items():
        before, after = page.split(f"{head}\n")
        page = f"{before}{head}\n{text}\n\n" + after.split("\n\n", 1)[1]
    return page


if __name__ == "__main__":
    PAGE.write_text(page_from_fields(PAGE.read_text()))
