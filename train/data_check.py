# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Checks data as training does, without a model's weights: `normalign data`."""

from collections import Counter
from dataclasses import dataclass, field
from itertools import chain, groupby, islice
from pathlib import Path
from statistics import median
from typing import Any

from rich.progress import track
from rich.table import Table
from rich.text import Text

from ..checkpoint.opening import open_checkpoint
from ..data.rows.checks import (
    bad_rows_message,
    check_images_are_read,
    image_files,
    parse_rows,
    share_of_bad_rows,
    warn_of_captions,
)
from ..data.rows.images import image_problem
from ..data.rows.parse import DroppedRow
from ..data.rows.reports import not_read
from ..data.sources.arguments import DataArguments, DataSource
from ..data.sources.source import CHUNK, open_source
from ..errors import Console
from .collator import ConversationCollator
from .command import NO_MODEL
from .modules.load import check_architecture


@dataclass
class DataCheck:
    """What is in a data set.

    Attributes:
        rows: All rows.
        bad: Those that cannot be trained on.
        forms: Valid rows of each form, by the column that identifies it.
        images: Images in the valid rows.
        lengths: Tokens of each valid row; None without a checkpoint.
        faults: The reasons, each once, with its first row and their number; empty if all is well.
        example: Text of a valid row in pieces that are learned or not; empty without a checkpoint.
        left_out, changed: Valid rows in which something is not read or was changed, by what.
        files: Rows of each file.
        stops: Whether training would stop at a fault; it skips a few bad rows of large data.
    """

    rows: int = 0
    bad: list[DroppedRow] = field(default_factory=list)
    forms: Counter[str] = field(default_factory=Counter)
    images: int = 0
    lengths: list[int] | None = None
    faults: list[str] = field(default_factory=list)
    example: list[tuple[str, bool]] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    changed: Counter[str] = field(default_factory=Counter)
    files: Counter[str] = field(default_factory=Counter)
    stops: bool = False

    def table(self, name: str) -> Table:
        """The numbers."""
        table = Table(title=name, show_header=False)
        table.add_row("rows", f"{self.rows:,}")
        for file, count in self.files.items() if len(self.files) > 1 else ():
            table.add_row(f"in {Path(file).name}", f"{count:,}")
        skipped = ", which training skips by default" * bool(self.bad and not self.stops)
        table.add_row("that cannot be trained on", f"{len(self.bad):,}{skipped}")
        for form, count in self.forms.most_common():
            table.add_row(f"of the form {form}", f"{count:,}")
        table.add_row("images in the others", f"{self.images:,}")
        lengths = "none" if self.lengths == [] else "give a checkpoint with --model to count tokens"
        if self.lengths:
            lengths = f"{min(self.lengths):,} to {max(self.lengths):,} tokens, median {median(self.lengths):,.0f}"
        table.add_row("lengths", lengths)
        for title, text in not_read(self.left_out, self.changed).items():
            table.add_row(title, text)
        return table

    def rendered(self, terminal: bool) -> Text:
        """The example; what is learned is underlined, or in double brackets if it is not for a terminal."""
        pieces = ((text if terminal or not learned else f"[[{text}]]", learned) for text, learned in self.example)
        return Text.assemble(*((text, "bold underline" if learned else "") for text, learned in pieces))


def check_data(source: DataSource, model: str | None = None, check_images: bool = False) -> DataCheck:
    """Checks all rows of a data set as training does. Images are decoded with `check_images`, else only found.

    Args:
        source: The data set.
        model: Folder or Hub id of a checkpoint, of which the processor is read: for lengths, tokens that no text may
            contain, and the example.
        check_images: Whether to decode every image.

    Raises:
        ValueError: The data set or the checkpoint cannot be read.
    """
    collator = None
    if model:
        checkpoint = open_checkpoint(model, remedy=NO_MODEL)
        check_architecture(checkpoint.model_type, checkpoint.name)
        collator = ConversationCollator(checkpoint.processor)
    opened, check = open_source(source, streaming=False), DataCheck(lengths=[] if collator else None)
    found, unread, example = iter(opened), Counter[str](), None
    chunks = iter(lambda: parse_rows(islice(found, CHUNK), opened.rules, collator and collator.processor), [])
    for row in track(chain.from_iterable(chunks), "Checking rows", console=Console(stderr=True), transient=True):
        check.rows += 1
        check.files[row["source"]] += 1
        # Of rows that may be shown, images are decoded too.
        may_be_shown = collator and not (example and example["images"])
        limit = DataArguments.max_image_pixels if check_images or may_be_shown else None
        problem = (row["file"], row["reason"]) if row["reason"] else None
        files = image_files(row["paths"]) if limit is None else row["images"]
        if problem := problem or image_problem(files, opened.rules, limit):
            check.bad.append(DroppedRow(row["source"], row["row"], *problem))
            continue
        if may_be_shown and (row["images"] or not example):
            example = row
        check.forms[row["form"]] += 1
        check.left_out.update(row["left_out"])
        check.changed.update(row["changed"])
        check.images += row["image_count"]
        if check.lengths is not None:
            check.lengths.append(row["length"])
        unread.update([row["unread"]] if row["unread"] else [])
    share = share_of_bad_rows(None, opened, check.rows)
    check.stops = not check.rows or len(check.bad) > share * check.rows
    if not check.rows:
        check.faults.append(f"{opened.name} has no rows.")
    if check.bad:
        check.faults.append(bad_rows_message(opened, check.bad, check.rows, shown=None))
    try:
        check_images_are_read(opened.name, check.rows - len(check.bad), check.images, unread)
    except ValueError as error:
        check.faults.append(str(error))
        check.stops = True
    warn_of_captions(opened.name, check.forms)
    if collator and example:
        check.example = _pieces(collator, example)
    return check


def _pieces(collator: ConversationCollator, row: dict[str, Any]) -> list[tuple[str, bool]]:
    """The text of a row in pieces, and whether each is learned, by the ids and labels that training has."""
    batch, processor = collator([row]), collator.processor
    tokens = zip(batch["input_ids"][0].tolist(), (batch["labels"][0] >= 0).tolist(), strict=True)
    pieces = []
    for (is_image, learned), some in groupby(tokens, lambda token: (token[0] == processor.image_token_id, token[1])):
        ids = [token for token, _ in some]
        text = f"{processor.image_token} x {len(ids)}" if is_image else processor.tokenizer.decode(ids)
        pieces.append((text, learned))
    return pieces
