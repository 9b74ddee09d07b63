# SPDX-License-Identifier: Apache-2.0
"""Checks data as training does, without a model's weights: `normalign data`."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from datasets import Dataset
from rich.table import Table
from rich.text import Text

from ..checkpoint.opening import open_checkpoint
from ..data.rows import checks
from ..data.rows.forms import MARKER
from ..data.rows.parse import ParsedRow
from ..data.sources.arguments import DataSource
from ..data.sources.source import open_source
from ..data.sources.table import RowReader, all_rows, rows_on_access, sift_rows
from .collator import ConversationCollator, Example, marked, pieces
from .command import NO_MODEL
from .modules.load import check_architecture


@dataclass
class DataCheck:
    """What is in a data set.

    Attributes:
        report: Counts of its rows.
        faults: The reasons why some rows cannot be trained on.
        would_stop: Whether training would stop at these rows. It skips a few rows of large data.
        examples: The requested rows, or one row if a checkpoint counts tokens.
        has_lengths: Whether tokens were counted.
    """

    report: checks.SourceReport
    faults: list[str]
    would_stop: bool
    examples: list[Example]
    has_lengths: bool

    def table(self, name: str) -> Table:
        """Returns the counts as a table with a title."""
        report = self.report
        table = Table(title=name, show_header=False)
        table.add_row("rows", f"{report.found:,}")
        for file, count in report.files.items():
            table.add_row(f"in {Path(file).name}", f"{count:,}")
        bad_rows = f"{report.bad:,}"
        if report.bad and not self.would_stop:
            bad_rows += " (training skips them by default)"
        table.add_row("that cannot be trained on", bad_rows)
        for form, count in Counter(report.forms).most_common():
            table.add_row(f"of the form {form}", f"{count:,}")
        table.add_row("images in the others", f"{report.images or 0:,}")
        lengths = "none"
        if report.valid and self.has_lengths:
            lengths = f"{report.shortest:,} to {report.longest:,} tokens"
            lengths += f", median {report.median:,.0f}"
        elif report.valid:
            lengths = "give a checkpoint with --model to count tokens"
        table.add_row("lengths", lengths)
        for title, text in checks.unused_and_changed(report.left_out, report.changed).items():
            table.add_row(title, text)
        return table

    def rendered(self, terminal: bool = False) -> Text:
        """Returns the examples with learned text underlined, or in brackets without a terminal."""
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
        model: A checkpoint. Its processor gives lengths, control tokens and examples. Without it,
            examples are turns, without the chat template.
        check_images: Whether every image is opened.
        examples: How many rows are shown, by default one if there is a `model`.
        rows: Numbers of rows in their file, from 0, that are shown instead.

    Raises:
        ValueError: A row does not exist, or the data or the checkpoint cannot be used.
        OSError: A file cannot be read or fetched.
    """
    collator = None
    processor = None
    if model:
        checkpoint = open_checkpoint(model, remedy=NO_MODEL)
        check_architecture(checkpoint.model_type, checkpoint.name)
        processor = checkpoint.processor
        collator = ConversationCollator(processor, bad_rows="skip")
    opened = open_source(source, streaming=False)
    reader = RowReader((opened,))
    options = checks.Checks(processor, check_images=check_images)
    table = all_rows(opened, 0, options)
    checked = sift_rows(table, reader, opened, options, "train")
    report = checked.report
    checks.warn_of_captions(opened.name, report.forms)

    count = len(table)
    allowed_share = checks.share_of_bad_rows(None, opened, count)
    would_stop = len(report.dropped) > allowed_share * count
    faults = []
    if report.bad:
        allowed = allowed_share if would_stop else 0.0
        faults.append(
            checks.bad_rows_message(opened, report.dropped, count, shown=None, share=allowed)
        )
    valid_count = count - len(report.dropped)
    try:
        checks.check_images_are_read(opened.name, valid_count, report.images or 0, report.unread)
    except ValueError as error:
        faults.append(str(error))
        would_stop = True

    valid_rows = rows_on_access(checked.table, reader)
    shown_examples = []
    if rows:
        for row in rows:
            shown_examples += _examples_of_number(row, valid_rows, report, collator)
    elif examples or collator:
        for place in _places(checked.table, examples or 1):
            shown_examples.append(_example(valid_rows[place], collator))
    return DataCheck(report, faults, would_stop, shown_examples, collator is not None)


def _places(table: Dataset, count: int) -> list[int]:
    """Returns places of rows to show: the first with an image, or several at equal distances."""
    if not len(table):
        return []
    if count > 1:
        spread = np.linspace(0, len(table) - 1, count).round().astype(int)
        return np.unique(spread).tolist()
    has_images = np.array(table["image_count"][:]) > 0
    return [int(has_images.argmax())]


def _examples_of_number(
    number: int,
    valid_rows: Dataset,
    report: checks.SourceReport,
    collator: ConversationCollator | None,
) -> list[Example]:
    """Returns the rows of a number, one for each file, or why they cannot be trained on.

    Raises ValueError if no row has the number.
    """
    row_numbers = np.array(valid_rows.with_format(None)["row"][:])
    examples = []
    for place in np.flatnonzero(row_numbers == number):
        examples.append(_example(valid_rows[int(place)], collator))
    for dropped in report.dropped:
        if dropped.row == number:
            title = f"{Path(dropped.source).name}, row {number}"
            examples.append(Example(title, [(f"Not trained on: {dropped.reason}", False)]))
    if not examples:
        raise ValueError(
            f"{report.source} has no row {number}. It has {report.found:,}, from 0 on."
        )
    return examples


def _example(row: ParsedRow, collator: ConversationCollator | None) -> Example:
    title = f"{Path(row['source']).name}, row {row['row']}"
    file_names = [Path(image["path"]).name for image in row["images"] if image["path"]]
    if file_names:
        joined_names = ", ".join(file_names)
        title += f" ({joined_names})"
    if collator is not None:
        batch = collator([row])
        return Example(title, pieces(batch["input_ids"][0], batch["labels"][0], collator.processor))
    row_pieces = []
    learned = iter(row["learned"])
    for message in row["messages"]:  # a line each
        is_learned = message["role"] == "assistant" and next(learned)
        row_pieces.append((f"{message['role']}: ", False))
        for part in message["content"]:
            text = MARKER if part["type"] == "image" else part["text"]
            row_pieces.append((text, is_learned))
        row_pieces.append(("\n", False))
    return Example(title, row_pieces)
