"""The tables of docs/options.md."""

import re

from paths import DOCS


PAGE = DOCS / "options.md"


def documented(section: str) -> dict[str, str]:
    """What the table of a section of the page says of each name."""
    table = PAGE.read_text().split(f"## {section}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \| (.*) \|$", table, re.MULTILINE)
    names = [(name, text) for first, text in rows for name in re.findall(r"`([^`]+)`", first)]
    assert len(names) == len(dict(names)), "a name stands in two rows"
    return dict(names)
