"""The tables of docs/options.md, read and made; as a script, writes those that are made from the options' fields."""

import re
from dataclasses import MISSING, fields

from paths import DOCS

from normalign_llava.data.sources.arguments import DataArguments
from normalign_llava.train.options.fields import REFUSED, ModelOptions, TrainingOptions


PAGE = DOCS / "options.md"


def documented(section: str) -> dict[str, str]:
    """What the table of a section of the page says of each name."""
    table = PAGE.read_text().split(f"## {section}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \| (.*) \|$", table, re.MULTILINE)
    names = [(name, text) for first, text in rows for name in re.findall(r"`([^`]+)`", first)]
    assert len(names) == len(dict(names)), "a name stands in two rows"
    return dict(names)


def shown(default) -> str:
    return "" if default in (None, MISSING) else f"`{default}`"


def page_from_fields(page: str) -> str:
    """The page with its tables of options made again."""
    known = [each for options in (ModelOptions, DataArguments, TrainingOptions) for each in fields(options)]
    used = [each for each in known if not each.metadata["help"].startswith(REFUSED)]
    refused = sorted((each for each in known if each not in used), key=lambda each: each.name)
    made = {
        "option | default | what it does": [
            f"`{each.name}` | {shown(each.default)} | {each.metadata['help']}" for each in used
        ],
        "refused option | why": [f"`{each.name}` | {each.metadata['help'].removeprefix(REFUSED)}" for each in refused],
    }
    for head, rows in made.items():
        before, after = page.split(f"| {head} |\n")
        marks, rest = after.split("\n", 1)[0], after.split("\n\n", 1)[1]
        page = f"{before}| {head} |\n{marks}\n" + "".join(f"| {row} |\n" for row in rows) + f"\n{rest}"
    return page


if __name__ == "__main__":
    PAGE.write_text(page_from_fields(PAGE.read_text()))
