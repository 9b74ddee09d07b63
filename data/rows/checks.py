# SPDX-License-Identifier: Apache-2.0
"""Checks the form, the length and the images of rows before training, and counts them."""

import functools
import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

from accelerate import PartialState
from accelerate.utils import gather_object
from datasets import Dataset
from rich.markup import escape
from rich.progress import track
from transformers import LlavaProcessor, PreTrainedTokenizerBase

from ...assembly.chat_template import without_preamble
from ...console import Console, escaped, printable
from .forms import PROMPT, image_name, is_row_metadata, looks_like, unread_image
from .images import ImageRules, PlainFiles, Problem, open_and_find_problem
from .parse import BadRow, DroppedRow, DroppedRows, ParsedRow, any_of, control_tokens, parse_row
from .turns import Row


if TYPE_CHECKING:
    from ..sources.source import Source


logger = logging.getLogger(__name__)

DEFAULT_SHARE = 0.01
"""The share of bad rows that is skipped by default, in Hub data or more than `MANY_ROWS` rows."""
MANY_ROWS = 10_000
"""The least number of rows that the share of a stream is computed from.

In memory, the images of so many rows are opened.
"""

NOT_USED = "columns not used"  # title of the columns, and keys of turns, that are not read
_CHUNK = 16  # rows whose images are read and opened together
_LISTED = 5000  # rows whose files are looked for together
_SHOWN = 5  # reasons in an error
_VALUES = re.compile(r"\d+|, got .*")  # they differ between reasons of one kind


@dataclass
class Checks:
    """Options of the checks. `DataArguments` describes the fields without a comment."""

    processor: LlavaProcessor | None  # None to count no tokens
    max_length: int | None = None  # tokens, with image tokens; longer rows are dropped
    bad_rows: str | float | None = None
    check_images: bool = False
    dropped_rows: DroppedRows | None = None  # records dropped rows
    processes: int | None = None  # number that checks rows in memory; by default one for each core

    def too_long(self, row: ParsedRow) -> DroppedRow | None:
        """Returns the row as a dropped one if it has too many tokens, or None."""
        length = row["length"]
        if self.max_length is None or length <= self.max_length:
            return None
        reason = f"{length} tokens, more than max_length {self.max_length}"
        return DroppedRow(row["source"], row["row"], row.get("file"), reason, length)


@dataclass
class SourceReport:
    """Counts of the rows of one data set.

    The counts of a stream are None, and its dropped rows are in a file. Values of the mappings are
    numbers of valid rows, except for `files`.
    """

    source: str
    split: str  # "train" or "eval"
    found: int | None = None  # all rows; valid without bad and too_long ones
    bad: int | None = None
    too_long: int | None = None
    valid: int | None = None
    used: int | None = None  # valid rows that are in the mixture and not held out of it
    images: int | None = None
    text_only: int | None = None
    shortest: int | None = None  # tokens in a valid row, image tokens included
    median: float | None = None
    longest: int | None = None
    dropped: list[DroppedRow] = field(default_factory=list)
    dataset: dict[str, Any] | None = None  # id, commit and licence: see [`hub_dataset`]
    forms: dict[str, int] = field(default_factory=dict)  # by the column that identifies it
    unread: dict[str, int] = field(default_factory=dict)  # by what looks like an image
    left_out: dict[str, int] = field(default_factory=dict)  # by column or key
    changed: dict[str, int] = field(default_factory=dict)  # by what was changed
    files: dict[str, int] = field(default_factory=dict)  # if there are several
    skippable: int = 0  # rows that may still turn out bad while training, by `bad_rows`


@dataclass
class DataReport:
    """Counts of all data sets, training data first."""

    sources: list[SourceReport]


def share_of_bad_rows(
    option: str | float | None, source: "Source", rows: int | None = None
) -> float:
    """Returns the largest share of a source's rows that may be bad.

    Args:
        option: The option `bad_rows`.
        source: A data set.
        rows: The number of its rows, or None for a stream.
    """
    if option == "stop":
        return 0.0
    if option == "skip":
        return 1.0
    if option is not None:
        return float(option)
    return DEFAULT_SHARE if source.rules.hub or (rows or 0) > MANY_ROWS else 0.0


def check_share(
    source: "Source", bad: list[DroppedRow], rows: int, share: float, deviations: float = 0.0
) -> None:
    """Raises [`BadRow`] if all rows of a source are bad, or [`too_many`] of them.

    Args:
        source: A data set.
        bad: Its bad rows.
        rows: The number of all its rows.
        share: The share of them that may be bad.
        deviations: See [`too_many`].
    """
    if 0 < rows == len(bad) or too_many(len(bad), rows, share, deviations):
        raise BadRow(bad_rows_message(source, bad, rows, share=share))


def too_many(bad: int, rows: int, share: float, deviations: float = 0.0) -> bool:
    """Whether more than a share of rows is bad.

    Args:
        bad: The number of bad rows.
        rows: The number of all rows.
        share: The share that may be bad.
        deviations: Standard deviations of the number of bad rows that are added to it. A negative
            number makes the check milder, for a sample of rows.
    """
    # The square root of a count has a standard deviation of 1/2. If m rows are bad and `deviations`
    # is 3, the mean may be (m**0.5 + 3/2) ** 2.
    margin = deviations * bad**0.5
    if deviations > 0:
        margin += deviations**2 / 4
    return bad + margin > share * rows


def parse_rows(
    stored: Iterable[tuple[str, int, Any]], rules: ImageRules, processor: LlavaProcessor | None
) -> list[ParsedRow]:
    """Parses rows and counts their tokens.

    Args:
        stored: Source, number and content of each row.
        rules: Which files images may be.
        processor: Counts tokens, and refuses texts with control tokens. None for neither.

    Returns:
        The rows with the columns of [`parse_row`], their sources, their numbers, and facts about
        their images. If a row cannot be trained on, `reason` says why. If it cannot be parsed, the
        columns of [`parse_row`] are empty.
    """
    token_options: dict[str, Any] = {}
    if processor:
        token_options["image_token"] = processor.image_token
        token_options["control_tokens"] = control_tokens(processor.tokenizer)
    rows = []
    for source, number, raw in stored:
        row: ParsedRow = {
            **vars(Row("", [], [], [], {}, [], [], [])),
            "source": source,
            "row": number,
            "file": image_name(raw),
            "reason": None,
            "length": 0,
        }
        try:
            row.update(parse_row(raw, rules, **token_options))
        except ValueError as error:
            row["reason"] = printable(str(error))
        images = row["images"]
        unread = None if images else unread_image(raw, row["messages"])
        row["image_count"] = len(images)
        row["paths"] = [image["path"] for image in images if image["bytes"] is None]
        row["unread"] = unread
        row["left_out"] = [name for name in row["left_out"] if f"column {name}" != unread]
        if row["reason"] and unread:
            row["reason"] += f"; the {unread} looks like an image and is not read"
        rows.append(row)
    if processor:
        parsed_rows = [row for row in rows if row["reason"] is None]
        for row, length in zip(parsed_rows, token_lengths(processor, parsed_rows), strict=True):
            result_column = "reason" if isinstance(length, str) else "length"
            row[result_column] = length
    return rows


def token_lengths(processor: LlavaProcessor, rows: list[ParsedRow]) -> list[int | str]:
    """Returns the number of tokens of each parsed row, or the reason why it has none.

    It is the number that the collator makes. No image is opened.
    """
    added_by_image = tokens_per_image(processor) - 1
    row_texts: list[str | Exception] = []
    for row in rows:
        template, joined_parts = without_preamble(
            processor.chat_template, row["messages"], processor.image_token
        )
        options: Any = {"chat_template": template, "tokenize": False}
        try:
            row_texts.append(processor.tokenizer.apply_chat_template(joined_parts, **options))
        except Exception as error:  # a template may raise any
            row_texts.append(error)
    printed_texts = [row_text for row_text in row_texts if isinstance(row_text, str)]
    token_ids = iter(encoded(processor.tokenizer, printed_texts))
    results: list[int | str] = []
    for row, row_text in zip(rows, row_texts, strict=True):
        if isinstance(row_text, Exception):
            results.append(f"the chat template refuses it: {row_text}")
            continue
        tokens = next(token_ids)
        image_count = len(row["images"])
        place_count = tokens.count(processor.image_token_id)
        if place_count == image_count:
            results.append(len(tokens) + image_count * added_by_image)
        else:
            results.append(
                f"the chat template prints {place_count} image tokens for {image_count} images"
            )
    return results


def encoded(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    """Returns the token ids of each text.

    Texts are divided before special tokens. A piece that several texts have, such as a question, is
    encoded only once. This gives the same tokens, because a special token ends the text before it.
    Texts are not divided at special tokens whose options change that.
    """
    dividing_tokens = []
    for token in tokenizer.added_tokens_decoder.values():
        depends_on_text = token.normalized or token.lstrip or token.single_word
        if token.special and not depends_on_text:
            dividing_tokens.append(token.content)
    dividing_pattern = any_of(dividing_tokens)
    pieces_by_text = []
    for text in texts:
        token_starts = (match.start() for match in dividing_pattern.finditer(text))
        boundaries = [0, *token_starts, len(text)]
        pieces_by_text.append([text[start:end] for start, end in pairwise(boundaries)])
    distinct_pieces = list(dict.fromkeys(chain.from_iterable(pieces_by_text)))
    backend = tokenizer.backend_tokenizer
    backend.no_padding()  # as the tokenizer does before each call
    backend.no_truncation()
    encodings = backend.encode_batch_fast(distinct_pieces, add_special_tokens=False)
    ids_by_piece = {
        piece: encoding.ids for piece, encoding in zip(distinct_pieces, encodings, strict=True)
    }
    return [
        list(chain.from_iterable(map(ids_by_piece.__getitem__, pieces)))
        for pieces in pieces_by_text
    ]


def tokens_per_image(processor: LlavaProcessor) -> int:
    """Returns the number of image tokens of an image. It does not depend on the image's size."""
    return processor._get_num_multimodal_tokens([(1, 1)])["num_image_tokens"][0]


def image_problems(rows: Dataset, name: str, rules: ImageRules) -> dict[int, Problem]:
    """Opens the images of rows. The processes share the work.

    Args:
        rows: Rows in parsed form.
        name: The name of the data set, to be shown.
        rules: Which files images may be.

    Returns:
        The file and the reason, by number of the rows with bad images.
    """

    def find_problems(numbers: range) -> list[tuple[int, Problem]]:
        row_problems = []
        for row_number, row_images in enumerate(rows[numbers]["images"], numbers.start):
            row_problem = open_and_find_problem(row_images, rules)
            if row_problem:
                row_problems.append((row_number, row_problem))
        return row_problems

    chunks = _own_chunks(len(rows), _CHUNK)
    with ThreadPoolExecutor() as threads:
        results = track(
            threads.map(find_problems, chunks),
            f"Checking the images of {escape(escaped(name))}",
            total=len(chunks),
            console=Console(),
            transient=True,
            disable=not PartialState().is_local_main_process,
        )
        return dict(gather_object(list(chain.from_iterable(results))))


def unopened_image_problems(paths: Sequence[list[str]], rules: ImageRules) -> dict[int, Problem]:
    """Finds images that do not exist or are not allowed. No image is opened.

    Folders are listed. Only paths that are not plain files in an allowed folder are looked at one
    by one. The processes share the work.

    Args:
        paths: The paths of the images of each row. They are read a slice at a time.
        rules: Which files images may be.

    Returns:
        The file and the reason, by number of the rows with such images.
    """
    chunks = _own_chunks(len(paths), _LISTED)
    images_by_folder = Counter[str]()
    for numbers in chunks:
        for path in chain.from_iterable(paths[numbers.start : numbers.stop]):
            images_by_folder[path.rpartition("/")[0]] += 1
    plain_files = PlainFiles(images_by_folder, rules)
    problems: list[tuple[int, Problem]] = []
    for numbers in chunks:
        paths_by_row = paths[numbers.start : numbers.stop]
        other_paths = plain_files.missing(list(chain.from_iterable(paths_by_row)))
        for row_number, row_paths in enumerate(paths_by_row, numbers.start):
            images = [{"path": path, "bytes": None} for path in row_paths if path in other_paths]
            row_problem = open_and_find_problem(images, rules, decode=False)
            if row_problem:
                problems.append((row_number, row_problem))
    return dict(gather_object(problems))


def _own_chunks(count: int, size: int) -> list[range]:
    """Returns the ranges of at most `size` rows that this process checks, of `count` rows."""
    chunks = [range(count)[start : start + size] for start in range(0, count, size)]
    with PartialState().split_between_processes(chunks) as own_chunks:
        return own_chunks


def bad_rows_message(
    source: "Source",
    bad: list[DroppedRow],
    total: int,
    shown: int | None = _SHOWN,
    use: str = "trained on",
    share: float = 0.0,
) -> str:
    """Returns the message of a run that stops at bad rows.

    Args:
        source: A data set.
        bad: Its bad rows.
        total: The number of all its rows.
        shown: How many kinds of reason are shown at most. None shows all.
        use: What the rows are read for.
        share: The share of bad rows that is skipped at most.
    """
    lines = [f"Rows that cannot be {use}:", *by_kind(bad, shown, total)]
    if 0 < share < 1:
        lines.append(f"These are {len(bad):,} of {total:,} rows; a share of {share:g} may be bad.")
    if any(row.source != source.name for row in bad):
        lines.append("To read only one file, name it.")
    remedy = "Fix them, or remove them."
    if len(bad) == total:
        remedy = "Fix them."
    elif use == "trained on":
        remedy = "Fix them, or skip them: `normalign train --bad_rows skip`."
    return "\n".join([*lines, remedy])


def check_images_are_read(name: str, rows: int, images: int, unread: dict[str, int]) -> None:
    """Warns of images that are not read.

    Args:
        name: The name of a data set.
        rows: The number of its rows.
        images: The number of images that are read.
        unread: The number of rows for each column or text that looks like an image.

    Raises:
        ValueError: If no image is read, and most rows have something that looks like one.
    """
    if not unread:
        return
    most_common = counted(dict(Counter(unread).most_common(_SHOWN)))
    message = f"{name}: what looks like an image is not read: {most_common}."
    if not images and 2 * sum(unread.values()) > rows:
        raise ValueError(f"{message} No other image was found. docs/data.md shows what is read.")
    warn_once(message)


def warn_of_captions(name: str, forms: Iterable[str]) -> None:
    """Warns once that captions are trained as answers to a fixed question, if there are any."""
    if not {"caption", "text"}.isdisjoint(forms):
        warn_once(
            f"{name}: captions are trained as answers to {PROMPT!r}. For other questions, give "
            "question and answer."
        )


def unused_and_changed(left_out: Mapping[str, int], changed: Mapping[str, int]) -> dict[str, str]:
    """Returns texts by title: the columns that are not used, and what was changed.

    Columns that look like an image, a question or an answer come first. Columns with information
    about a row, such as ids, come last, without numbers of rows. A title without a text is left
    out.

    Args:
        left_out: The number of rows for each column that is not read.
        changed: The number of rows for each note on what was changed or is to be known.
    """
    likely_columns = {}  # that should perhaps be used
    other_columns = {}
    columns_about_rows = []
    for column_name, row_count in left_out.items():
        known_kind = looks_like(column_name)
        if known_kind:
            likely_columns[f"{column_name}, like {known_kind}"] = row_count
        elif is_row_metadata(column_name):
            columns_about_rows.append(column_name)
        else:
            other_columns[column_name] = row_count
    column_texts = [counted(likely_columns), counted(other_columns), ", ".join(columns_about_rows)]
    texts = {NOT_USED: ", ".join(filter(None, column_texts)), "note": counted(changed)}
    return {title: text for title, text in texts.items() if text}


def log_unused_and_changed(
    logger: logging.Logger, name: str, left_out: Mapping[str, int], changed: Mapping[str, int]
) -> None:
    """Logs [`unused_and_changed`] as warnings.

    Unused columns are logged as information, unless one looks as if it should be used.
    """
    for title, text in unused_and_changed(left_out, changed).items():
        is_quiet = title == NOT_USED and not any(map(looks_like, left_out))
        level = logging.INFO if is_quiet else logging.WARNING
        logger.log(level, f"{name}: {title}: {text}")


def counted(rows: Mapping[str, int]) -> str:
    """Returns numbers of rows, most first: "tools (12 rows), history (1 row)"."""
    return ", ".join(
        f"{name} ({row_count:,} row{'' if row_count == 1 else 's'})"
        for name, row_count in Counter(rows).most_common()
    )


def by_kind(rows: list[DroppedRow], most: int | None = None, total: int | None = None) -> list[str]:
    """Returns a line for each kind of reason, with the first row and the number of rows.

    Args:
        rows: Rows that cannot be trained on.
        most: How many kinds are listed at most. None lists all.
        total: The number of all rows. If all of them have one reason, the line says so.
    """
    kinds: dict[tuple[str, str], list[DroppedRow]] = {}
    for row in rows:
        bare_reason = _VALUES.sub("", row.reason.replace(row.file or "", ""))
        kinds.setdefault((row.source, bare_reason), []).append(row)
    kind_lines = []
    unlisted = len(rows)
    for similar in list(kinds.values())[:most]:
        kind_line = f"  {similar[0]}"
        if len(similar) > 1:
            kind_line += f" ({'all ' if len(similar) == total else ''}{len(similar):,} rows)"
        kind_lines.append(kind_line)
        unlisted -= len(similar)
    if unlisted:
        kind_lines.append(f"  and {unlisted:,} more")
    return kind_lines


@functools.cache
def warn_once(message: str) -> None:
    """Logs a warning in the main process, the first time."""
    if PartialState().is_main_process:
        logger.warning(message)
