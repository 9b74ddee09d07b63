# SPDX-License-Identifier: Apache-2.0
"""Checks data as training does, without a model's weights: `normalign data`."""

from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from ..checkpoint.opening import open_checkpoint
from ..data.rows import checks
from ..data.sources.arguments import DataSource
from ..data.sources.source import open_source
from ..data.sources.table import RowReader, all_rows, check_rows, rows_on_access
from .collator import ConversationCollator
from .command import NO_MODEL
from .modules.load import check_architecture


@dataclass
class DataCheck:
    """What is in a data set: counts of its rows, and the reasons why some cannot be trained on.

    `stops` is whether training would stop at them; of large data it skips a few. With a checkpoint
    there is an example: the text of a row, in pieces that are learned or not.
    """

    report: checks.SourceReport
    faults: list[str]
    stops: bool
    example: list[tuple[str, bool]]

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
        if self.example:
            size = f"{report.shortest:,} to {report.longest:,} tokens, median {report.median:,.0f}"
        table.add_row("lengths", size)
        for title, text in checks.not_read(report.left_out, report.changed).items():
            table.add_row(title, text)
        return table

    def rendered(self, terminal: bool) -> Text:
        """The example; what is learned is underlined, or in double brackets without a terminal."""
        mark, style = "{}" if terminal else "[[{}]]", "bold underline"
        pieces = [(mark.format(text), style) if learned else text for text, learned in self.example]
        return Text.assemble(*pieces)


def check_data(
    source: DataSource, model: str | None = None, check_images: bool = False
) -> DataCheck:
    """Checks all rows of a data set as training does, and every image with `check_images`.

    The processor of a checkpoint `model` is read for lengths, control tokens and the example.
    """
    collator = None
    if model:
        checkpoint = open_checkpoint(model, remedy=NO_MODEL)
        check_architecture(checkpoint.model_type, checkpoint.name)
        collator = ConversationCollator(checkpoint.processor, bad_rows="skip")
    opened = open_source(source, streaming=False)
    report, reader = checks.SourceReport(opened.name, "train"), RowReader((opened,))
    options = checks.Checks(collator and collator.processor, check_images=check_images)
    rows = all_rows(opened, 0, options)
    valid = check_rows(rows, reader, opened, options, report)
    faults, example = list[str](), list[tuple[str, bool]]()
    share = checks.share_of_bad_rows(None, opened, len(rows))
    stops = len(report.dropped) > share * len(rows)
    if report.bad:
        share = share if stops else 0.0
        bad = checks.bad_rows_message(opened, report.dropped, len(rows), shown=None, share=share)
        faults.append(bad)
    try:
        checks.check_images_are_read(opened.name, len(valid), report.images or 0, report.unread)
    except ValueError as error:
        faults.append(str(error))
        stops = True
    checks.warn_of_captions(opened.name, report.forms)
    if collator and len(valid):
        first = next((number for number, count in enumerate(valid["image_count"]) if count), 0)
        example = _pieces(collator, rows_on_access(valid, reader)[first])
    return DataCheck(report, faults, stops, example)


def _pieces(collator: ConversationCollator, row: dict[str, Any]) -> list[tuple[str, bool]]:
    """The text of a row in pieces that are learned or not, by the ids and labels of training."""
    batch, processor, pieces = collator([row]), collator.processor, []
    image, decode = processor.image_token_id, processor.tokenizer.decode
    tokens = zip(batch["input_ids"][0].tolist(), (batch["labels"][0] >= 0).tolist(), strict=True)
    for (is_image, learned), group in groupby(tokens, lambda token: (token[0] == image, token[1])):
        ids = [token for token, _ in group]
        text = f"{processor.image_token} x {len(ids)}" if is_image else decode(ids)
        pieces.append((text, learned))
    return pieces
