# SPDX-License-Identifier: Apache-2.0
"""Checks data as training does, without a model's weights: `normalign data`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from rich.table import Table
from rich.text import Text

from ..checkpoint.opening import open_checkpoint
from ..data.rows import checks
from ..data.rows.forms import MARKER
from ..data.sources.arguments import DataSource
from ..data.sources.source import Source, open_source
from ..data.sources.table import RowReader, all_rows, check_rows, rows_on_access
from .collator import ConversationCollator
from .command import NO_MODEL
from .marked import Example, marked, pieces
from .modules.load import check_architecture


@dataclass
class DataCheck:
    """What is in a data set: counts of its rows, and the reasons why some cannot be trained on.

    `stops` is whether training would stop at them; of large data it skips a few. `examples` are
    rows that were asked for, or one, if there is a checkpoint to count tokens with.
    """

    report: checks.SourceReport
    faults: list[str]
    stops: bool
    examples: list[Example]
    has_lengths: bool

    @property
    def example(self) -> list[tuple[str, bool]]:
        """The pieces of the first example; empty without one."""
        if not self.examples:
            return []
        return self.examples[0].pieces

    def table(self, name: str) -> Table:
        """Returns the counts as a table with a title."""
        report = self.report
        table = Table(title=name, show_header=False)
        table.add_row("rows", f"{report.found:,}")
        for file, count in report.files.items():
            table.add_row(f"in {Path(file).name}", f"{count:,}")
        bad_rows = f"{report.bad:,}"
        if report.bad and not self.stops:
            bad_rows += ", which training skips by default"
        table.add_row("that cannot be trained on", bad_rows)
        most_rows_first = sorted(report.forms.items(), key=lambda form: -form[1])
        for form, count in most_rows_first:
            table.add_row(f"of the form {form}", f"{count:,}")
        table.add_row("images in the others", f"{report.images or 0:,}")
        lengths = "none"
        if report.valid and self.has_lengths:
            shortest_to_longest = f"{report.shortest:,} to {report.longest:,} tokens"
            lengths = f"{shortest_to_longest}, median {report.median:,.0f}"
        elif report.valid:
            lengths = "give a checkpoint with --model to count tokens"
        table.add_row("lengths", lengths)
        for title, text in checks.not_read(report.left_out, report.changed).items():
            table.add_row(title, text)
        return table

    def rendered(self, terminal: bool = False) -> Text:
        """The examples; what is learned is underlined, or in double brackets without a terminal."""
        return marked(self.examples, terminal)


def check_data(
    source: DataSource,
    model: str | None = None,
    check_images: bool = False,
    *,
    examples: int | None = None,
    rows: Sequence[int] = (),
) -> DataCheck:
    """Checks all rows of a data set as training does.

    Args:
        source: The data set.
        model: A checkpoint, whose processor gives lengths, control tokens and examples. Without it,
            examples show turns in place of what the chat template makes of them.
        check_images: Whether every image is opened.
        examples: How many rows are shown; by default one if there is a `model`.
        rows: Numbers of rows in their file, from 0, that are shown instead.

    Raises:
        ValueError: There is no such row, or the data cannot be read.
    """
    collator = None
    if model:
        checkpoint = open_checkpoint(model, remedy=NO_MODEL)
        check_architecture(checkpoint.model_type, checkpoint.name)
        collator = ConversationCollator(checkpoint.processor, bad_rows="skip")
    opened = open_source(source, streaming=False)
    reader = RowReader((opened,))
    options = checks.Checks(collator and collator.processor, check_images=check_images)
    table = all_rows(opened, 0, options)
    checked = check_rows(table, reader, opened, options, "train")
    valid = checked.table
    report = checked.report
    faults, stops = _faults(opened, report, len(table))
    checks.warn_of_captions(opened.name, report.forms)
    shown: list[Example] = []
    if rows:
        for row in rows:
            shown += _row(row, valid, reader, report, collator)
    elif examples or collator:
        parsed = rows_on_access(valid, reader)
        shown = [_example(parsed[place], collator) for place in _places(valid, examples or 1)]
    return DataCheck(report, faults, stops, shown, collator is not None)


def _faults(source: Source, report: checks.SourceReport, count: int) -> tuple[list[str], bool]:
    """Returns what is wrong with the `count` rows of a source, and whether training would stop."""
    faults = list[str]()
    share = checks.share_of_bad_rows(None, source, count)
    stops = len(report.dropped) > share * count
    if report.bad:
        allowed = share if stops else 0.0
        faults.append(
            checks.bad_rows_message(source, report.dropped, count, shown=None, share=allowed)
        )
    valid = count - len(report.dropped)
    try:
        checks.check_images_are_read(source.name, valid, report.images or 0, report.unread)
    except ValueError as error:
        faults.append(str(error))
        stops = True
    return faults, stops


def _places(valid: Dataset, count: int) -> list[int]:
    """Returns places of rows to show: the first with an image, or several at equal distances."""
    if not len(valid):
        return []
    if count > 1:
        spread = np.linspace(0, len(valid) - 1, count).round().astype(int)
        return np.unique(spread).tolist()
    for place, images in enumerate(valid["image_count"]):
        if images:
            return [place]
    return [0]


def _row(
    number: int,
    valid: Dataset,
    reader: RowReader,
    report: checks.SourceReport,
    collator: ConversationCollator | None,
) -> list[Example]:
    """The rows of a number, one of each file that has it, or why it cannot be trained on."""
    numbers = np.array(valid["row"][:])
    places = np.flatnonzero(numbers == number)
    parsed = rows_on_access(valid, reader)
    examples = [_example(parsed[int(place)], collator) for place in places]
    for dropped in report.dropped:
        if dropped.row == number:
            title = f"{Path(dropped.source).name}, row {number}"
            examples.append(Example(title, [(f"Not trained on: {dropped.reason}", False)]))
    if not examples:
        raise ValueError(
            f"{report.source} has no row {number}; it has {report.found:,}, from 0 on."
        )
    return examples


def _example(row: dict[str, Any], collator: ConversationCollator | None) -> Example:
    title = f"{Path(row['source']).name}, row {row['row']}"
    files = [Path(image["path"]).name for image in row["images"] if image["path"]]
    if files:
        names = ", ".join(files)
        title += f" ({names})"
    if collator is None:
        return Example(title, _turns(row))
    batch = collator([row])
    ids = batch["input_ids"][0]
    labels = batch["labels"][0]
    return Example(title, pieces(ids, labels, collator.processor))


def _turns(row: dict[str, Any]) -> list[tuple[str, bool]]:
    """The turns of a row, a line each, in pieces that are learned or not."""
    pieces: list[tuple[str, bool]] = []
    learned = iter(row["learned"])
    for message in row["messages"]:
        is_learned = message["role"] == "assistant" and next(learned)
        pieces.append((f"{message['role']}: ", False))
        for part in message["content"]:
            if part["type"] == "image":
                pieces.append((MARKER, is_learned))
            else:
                pieces.append((part["text"], is_learned))
        pieces.append(("\n", False))
    return pieces
