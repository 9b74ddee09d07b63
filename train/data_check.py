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
from ..data.sources.source import open_source
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
        return self.examples[0].pieces if self.examples else []

    def table(self, name: str) -> Table:
        report, table = self.report, Table(title=name, show_header=False)
        table.add_row("rows", f"{report.found:,}")
        for file, count in report.files.items():
            table.add_row(f"in {Path(file).name}", f"{count:,}")
        skipped = ", which training skips by default" if report.bad and not self.stops else ""
        table.add_row("that cannot be trained on", f"{report.bad:,}{skipped}")
        for form, count in sorted(report.forms.items(), key=lambda form: -form[1]):
            table.add_row(f"of the form {form}", f"{count:,}")
        table.add_row("images in the others", f"{report.images or 0:,}")
        size = "give a checkpoint with --model to count tokens" if report.valid else "none"
        if self.has_lengths and report.valid:
            size = f"{report.shortest:,} to {report.longest:,} tokens, median {report.median:,.0f}"
        table.add_row("lengths", size)
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
    """Checks all rows of a data set as training does, and every image with `check_images`.

    The processor of a checkpoint `model` is read for lengths, control tokens and examples. Without
    it, the turns of examples are shown in place of what the chat template makes of them.

    `examples` is how many rows are shown, by default one if there is a `model`; `rows` are numbers
    of rows in their file, from 0, to show instead. Raises ValueError if there is no such row.
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
    faults = list[str]()
    share = checks.share_of_bad_rows(None, opened, len(table))
    stops = len(report.dropped) > share * len(table)
    if report.bad:
        share = share if stops else 0.0
        bad = checks.bad_rows_message(opened, report.dropped, len(table), shown=None, share=share)
        faults.append(bad)
    try:
        checks.check_images_are_read(opened.name, len(valid), report.images or 0, report.unread)
    except ValueError as error:
        faults.append(str(error))
        stops = True
    checks.warn_of_captions(opened.name, report.forms)
    shown: list[Example] = []
    if rows:
        shown = [example for row in rows for example in _row(row, valid, reader, report, collator)]
    elif examples or collator:
        parsed = rows_on_access(valid, reader)
        shown = [_example(parsed[place], collator) for place in _places(valid, examples or 1)]
    return DataCheck(report, faults, stops, shown, collator is not None)


def _places(valid: Dataset, count: int) -> list[int]:
    """Places of rows to show: the first with an image, or several at equal distances."""
    if not len(valid):
        return []
    if count == 1:
        return [next((place for place, images in enumerate(valid["image_count"]) if images), 0)]
    return np.unique(np.linspace(0, len(valid) - 1, count).round().astype(int)).tolist()


def _row(
    number: int,
    valid: Dataset,
    reader: RowReader,
    report: checks.SourceReport,
    collator: ConversationCollator | None,
) -> list[Example]:
    """The rows of a number, one of each file that has it, or why it cannot be trained on."""
    places = np.flatnonzero(np.array(valid["row"][:]) == number)
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
        title += f" ({', '.join(files)})"
    if collator is None:
        return Example(title, _turns(row))
    batch = collator([row])
    return Example(title, pieces(batch["input_ids"][0], batch["labels"][0], collator.processor))


def _turns(row: dict[str, Any]) -> list[tuple[str, bool]]:
    """The turns of a row, a line each, in pieces that are learned or not."""
    pieces: list[tuple[str, bool]] = []
    learned = iter(row["learned"])
    for message in row["messages"]:
        is_learned = message["role"] == "assistant" and next(learned)
        pieces.append((f"{message['role']}: ", False))
        for part in message["content"]:
            is_image = part["type"] == "image"
            pieces.append((MARKER if is_image else part["text"], is_learned))
        pieces.append(("\n", False))
    return pieces
