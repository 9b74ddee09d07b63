"""The tables of docs/options.md, read and made. As a script, writes its lists of options."""

import re
import textwrap
from dataclasses import MISSING, Field, fields

from paths import DOCS

from normalign_llava.data.sources.arguments import DataArguments
from normalign_llava.train.command import REFUSED, ModelOptions, TrainingOptions


PAGE = DOCS / "options.md"
LINE_LENGTH = 128


def documented(section: str) -> dict[str, str]:
    """What the table of a section of the page says of each name."""
    after_heading = PAGE.read_text().split(f"## {section}\n")[1]
    section_text = after_heading.split("\n## ")[0]
    descriptions = {}
    table_rows = re.findall(r"^\| (`.*?) \| (.*) \|$", section_text, re.MULTILINE)
    for first_cell, description in table_rows:
        for option_name in re.findall(r"`([^`]+)`", first_cell):
            assert option_name not in descriptions, f"{option_name} stands in two rows"
            descriptions[option_name] = description
    return descriptions


def is_refused(option: Field) -> bool:
    return option.metadata["help"].startswith(REFUSED)


def list_item(option: Field) -> str:
    """What the page says of an option."""
    heading = f"`{option.name}`"
    if option.default not in (None, MISSING):
        heading += f" (`{option.default}`)"
    item_text = f"- {heading}: {option.metadata['help']}"
    return textwrap.fill(item_text, LINE_LENGTH, subsequent_indent="  ")


def refusal(option: Field) -> str:
    """A refused option and the only value that it may have, as YAML writes that."""
    yaml_value = option.default
    if option.default is None:
        yaml_value = "null"
    elif isinstance(option.default, bool):
        yaml_value = str(option.default).lower()
    return f"`{option.name}: {yaml_value}`"


def page_from_fields(page: str) -> str:
    """The page with its lists of options made again."""
    list_items = []
    refusals = []
    for options_class in (ModelOptions, DataArguments, TrainingOptions):
        for option in fields(options_class):
            if is_refused(option):
                refusals.append(refusal(option))
            else:
                list_items.append(list_item(option))
    refusals_text = ", ".join(sorted(refusals))
    refusals_text = textwrap.fill(refusals_text, LINE_LENGTH, break_on_hyphens=False)
    page = with_paragraph(page, "defaults in brackets:\n", "\n".join(list_items))
    return with_paragraph(page, "the reason:\n", refusals_text)


def with_paragraph(page: str, introduction: str, paragraph: str) -> str:
    """The page with another paragraph after the line that introduces it."""
    before, after = page.split(f"{introduction}\n")
    after_paragraph = after.split("\n\n", 1)[1]
    return f"{before}{introduction}\n{paragraph}\n\n{after_paragraph}"


if __name__ == "__main__":
    PAGE.write_text(page_from_fields(PAGE.read_text()))
