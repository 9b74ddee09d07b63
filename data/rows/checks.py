# SPDX-License-Identifier: Apache-2.0
"""Checks of rows before training: their form, length and images; and counts of what was seen."""

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from accelerate import PartialState
from accelerate.utils import gather_object
from rich.markup import escape
from rich.progress import track
from transformers import LlavaProcessor, PreTrainedTokenizerBase

from ...assembly.chat_template import without_preamble
from ...errors import Console, escaped, printable
from ..sources.source import Source, warn_once
from .forms import PROMPT, image_name, is_about, looks_like, unread_image
from .images import ImageRules, PlainFiles, image_problem
from .parse import BadRow, DroppedRow, DroppedRows, control_tokens, parse_row
from .turns import Row


DEFAULT_SHARE, MANY_ROWS = 0.01, 10_000
"""By default, this share of bad rows is skipped of Hub data, or of more than `MANY_ROWS` rows.

The share of a stream is taken of `MANY_ROWS` rows at least. In memory, the images of `MANY_ROWS`
rows are opened.
"""

NOT_USED = "columns not used"  # title of the columns, and keys of turns, that are not read
_CHUNK = 16  # rows whose images are read and opened together
_LISTED = 5000  # rows whose files are looked for together
_SHOWN = 5  # reasons in an error
_VALUES = re.compile(r"\d+|, got .*")  # which differ between reasons of one kind


@dataclass
class Checks:
    """Options of the checks; those that are not described here are options of the data."""

    processor: LlavaProcessor | None  # None to count no tokens
    max_length: int | None = None  # tokens, image tokens included, above which a row is dropped
    bad_rows: str | float | None = None
    check_images: bool = False
    dropped_rows: DroppedRows | None = None  # records dropped rows
    processes: int | None = None  # that check rows in memory; by default one for each core

    def too_long(self, row: dict[str, Any]) -> DroppedRow | None:
        """The row as a dropped one if it has too many tokens, or None."""
        if self.max_length is None or row["length"] <= self.max_length:
            return None
        reason = f"{row['length']} tokens, more than max_length {self.max_length}"
        return DroppedRow(row["source"], row["row"], row["file"], reason, row["length"])


@dataclass
class SourceReport:
    """Counts of the rows of one data set; None for a stream, whose dropped rows are in a file.

    The mappings have numbers of rows: of valid ones, but for `files`.
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


def share_of_bad_rows(option: str | float | None, source: Source, rows: int | None = None) -> float:
    """The share of a source's rows that may be bad by `bad_rows`; `rows` is None for a stream."""
    if option is None:
        return DEFAULT_SHARE if source.rules.hub or (rows or 0) > MANY_ROWS else 0.0
    return 0.0 if option == "stop" else 1.0 if option == "skip" else float(option)


def check_share(
    source: Source, bad: list[DroppedRow], rows: int, share: float, deviations: float = 0.0
) -> None:
    """Raises ValueError if bad rows are [`too_many`], or all."""
    if too_many(len(bad), rows, share, deviations) or len(bad) == rows > 0:
        raise BadRow(bad_rows_message(source, bad, rows, share=share))


def too_many(bad: int, rows: int, share: float, deviations: float = 0.0) -> bool:
    """Whether bad rows and so many standard deviations of them are more than a share of `rows`."""
    # The root of a count has a standard deviation of 1/2: of m the mean may be (m**0.5 + 3/2) ** 2.
    return bad + deviations * bad**0.5 + max(0, deviations) ** 2 / 4 > share * rows


def parse_rows(
    stored: Iterable[tuple[str, int, Any]], rules: ImageRules, processor: LlavaProcessor | None
) -> list[dict]:
    """Parses rows (source, number, content); those that cannot be trained on have a `reason`."""
    tokens: dict[str, Any] = {}
    if processor:
        tokens["image_token"] = processor.image_token
        tokens["control_tokens"] = control_tokens(processor.tokenizer)
    rows = []
    for name, number, raw in stored:
        row = {**vars(Row("")), "source": name, "row": number, "file": image_name(raw)}
        row |= {"reason": None, "length": 0}
        try:
            row |= parse_row(raw, rules, **tokens)
        except ValueError as error:
            row["reason"] = printable(str(error))
        row["image_count"] = len(row["images"])
        row["paths"] = [image["path"] for image in row["images"] if image["bytes"] is None]
        row["unread"] = None if row["images"] else unread_image(raw, row["messages"])
        row["left_out"] = [name for name in row["left_out"] if f"column {name}" != row["unread"]]
        if row["reason"] and row["unread"]:
            row["reason"] += f"; the {row['unread']} looks like an image and is not read"
        rows.append(row)
    parsed = [row for row in rows if row["reason"] is None]
    lengths = token_lengths(processor, parsed) if processor else [0] * len(parsed)
    for row, length in zip(parsed, lengths, strict=True):
        row["reason" if isinstance(length, str) else "length"] = length
    return rows


def token_lengths(processor: LlavaProcessor, rows: list[dict[str, Any]]) -> list[int | str]:
    """Tokens of each parsed row as the collator makes them, or why it has none; opens no image."""
    per_image, tokenizer = tokens_per_image(processor), processor.tokenizer
    texts = rendered(processor, [row["messages"] for row in rows])
    printed = [text for text in texts if isinstance(text, str)]
    ids = iter(encoded(tokenizer, printed))
    results: list[int | str] = []
    for row, text in zip(rows, texts, strict=True):
        if isinstance(text, Exception):
            results.append(f"the chat template refuses it: {text}")
            continue
        tokens, images = next(ids), len(row["images"])
        results.append(len(tokens) + images * (per_image - 1))
        if (places := tokens.count(processor.image_token_id)) != images:
            results[-1] = f"the chat template prints {places} image tokens for {images} images"
    return results


def encoded(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    """Token ids of each text; of a piece that several texts have, such as a question, once.

    Pieces begin with special tokens. What a tokenizer makes of a piece depends on nothing before
    it, unless an option of its special token says so: such tokens divide no text.
    """
    dividing = []
    for token in tokenizer.added_tokens_decoder.values():
        if token.special and not (token.normalized or token.lstrip or token.single_word):
            dividing.append(token.content)
    longest_first = sorted(dividing, key=len, reverse=True)
    special = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")
    pieces_of_texts = []
    for text in texts:
        first, *others = special.split(text)
        pieces = [token + rest for token, rest in zip(others[::2], others[1::2], strict=True)]
        pieces_of_texts.append([first, *pieces])
    distinct = list(dict.fromkeys(chain.from_iterable(pieces_of_texts)))
    backend = tokenizer.backend_tokenizer
    backend.no_padding()  # as the tokenizer does before each call
    backend.no_truncation()
    encodings = backend.encode_batch_fast(distinct, add_special_tokens=False)
    ids = {piece: found.ids for piece, found in zip(distinct, encodings, strict=True)}
    return [list(chain.from_iterable(ids[piece] for piece in own)) for own in pieces_of_texts]


def rendered(
    processor: LlavaProcessor, conversations: list[list[dict[str, Any]]]
) -> list[str | Exception]:
    """The text of each conversation, or the error with which the chat template refuses it."""
    if not conversations:
        return []
    joined = []
    for messages in conversations:
        template, texts = without_preamble(processor.chat_template, messages, processor.image_token)
        joined.append(texts)
    options: Any = {"chat_template": template, "tokenize": False}
    try:
        return processor.tokenizer.apply_chat_template(joined, **options)
    except Exception as error:  # a template may raise any
        if len(conversations) == 1:
            return [error]
    results: list[str | Exception] = []
    for messages in conversations:
        results += rendered(processor, [messages])
    return results


def tokens_per_image(processor: LlavaProcessor) -> int:
    """Number of image tokens of an image, whatever its size."""
    return processor._get_num_multimodal_tokens([(1, 1)])["num_image_tokens"][0]


def image_problems(
    images: Callable[[range], list[list[dict]]], count: int, name: str, rules: ImageRules
) -> dict[int, tuple[str | None, str]]:
    """Opens the images of `count` rows: file and reason by number of the rows with bad ones.

    `images` gives those of some rows that follow each other. The processes share the work.
    """
    state = PartialState()
    mine = _own_rows(count)

    def problems(start: int) -> list[tuple[int, tuple[str | None, str]]]:
        few = range(start, min(start + _CHUNK, mine.stop))
        checked = [image_problem(of_row, rules) for of_row in images(few)]
        return [(number, found) for number, found in zip(few, checked, strict=True) if found]

    starts = range(mine.start, mine.stop, _CHUNK)
    with ThreadPoolExecutor() as threads:
        results = track(
            threads.map(problems, starts),
            f"Checking the images of {escape(escaped(name))}",
            total=len(starts),
            console=Console(),
            transient=True,
            disable=not state.is_local_main_process,
        )
        return dict(gather_object([problem for some in results for problem in some]))


def file_problems(
    paths: Callable[[range], list[list[str]]], count: int, rules: ImageRules
) -> dict[int, tuple[str | None, str]]:
    """File and reason by number of the rows with images that do not exist, or are not allowed.

    `paths` gives those of some of the `count` rows, which follow each other. No image is opened.
    Folders are listed, and what is not a plain file in an allowed folder is looked at by itself.
    The processes share the work.
    """
    mine = _own_rows(count)
    chunks = []
    for start in range(mine.start, mine.stop, _LISTED):
        chunks.append(range(start, min(start + _LISTED, mine.stop)))
    folders = Counter[str]()
    for few in chunks:
        for path in chain.from_iterable(paths(few)):
            folders[path.rpartition("/")[0]] += 1
    plain = PlainFiles(folders, rules)
    problems: dict[int, tuple[str | None, str]] = {}
    for few in chunks:
        rows = paths(few)
        is_plain = iter(plain.include(list(chain.from_iterable(rows))).tolist())
        for number, of_row in zip(few, rows, strict=True):
            others = [path for path in of_row if not next(is_plain)]
            images = [{"path": path, "bytes": None} for path in others]
            if problem := image_problem(images, rules, decode=False):
                problems[number] = problem
    return dict(gather_object(list(problems.items())))


def _own_rows(count: int) -> range:
    """Of so many rows, those that this process checks. They follow each other."""
    state = PartialState()
    rank, ranks = state.process_index, state.num_processes
    return range(count * rank // ranks, count * (rank + 1) // ranks)


def bad_rows_message(
    source: Source,
    bad: list[DroppedRow],
    total: int,
    shown: int | None = _SHOWN,
    use: str = "trained on",
    share: float = 0.0,
) -> str:
    """The message of a run that stops at bad rows; `shown` kinds of reason at most, None for all.

    `share` is the share of bad rows that is skipped at most, `use` what the rows are read for.
    """
    lines = [f"Rows that cannot be {use}:", *by_kind(bad, shown, total)]
    if 0 < share < 1:
        lines.append(f"These are {len(bad):,} of {total:,} rows; a share of {share:g} may be bad.")
    if any(row.source != source.name for row in bad):
        lines.append("To read another file alone, name it.")
    skip = "skip them: `normalign train --bad_rows skip`" if use == "trained on" else "remove them"
    lines.append("Fix them." if len(bad) == total else f"Fix them, or {skip}.")
    return "\n".join(lines)


def check_images_are_read(name: str, rows: int, images: int, unread: dict[str, int]) -> None:
    """Warns of images that are not read; ValueError if most rows have one and none is read."""
    if not unread:
        return
    most = counted(dict(Counter(unread).most_common(_SHOWN)))
    message = f"{name}: what looks like an image is not read: {most}."
    if not images and 2 * sum(unread.values()) > rows:
        raise ValueError(f"{message} No other image was found. docs/data.md shows what is read.")
    warn_once(message)


def warn_of_captions(name: str, forms: Iterable[str]) -> None:
    """Warns once with which question captions are trained, if a data set has captions."""
    if not {"caption", "text"}.isdisjoint(forms):
        other = "For other questions, give question and answer."
        warn_once(f"{name}: captions are trained as answers to {PROMPT!r}. {other}")


def not_read(left_out: Mapping[str, int], changed: Mapping[str, int]) -> dict[str, str]:
    """Texts by title: the columns that are not used, and what was changed or is to be known.

    Columns that look like an image, a question or an answer come first, and those that tell about a
    row, such as ids, last.
    """
    looks = {name: looks_like(name) for name in left_out}
    loud = {f"{name}, like {looks[name]}": left_out[name] for name in left_out if looks[name]}
    quiet = {name: left_out[name] for name in left_out if not looks[name] and not is_about(name)}
    about = [name for name in left_out if not looks[name] and is_about(name)]
    columns = [counted(loud), counted(quiet), ", ".join(about)]
    lines = {NOT_USED: ", ".join(filter(None, columns)), "note": counted(changed)}
    return {title: text for title, text in lines.items() if text}


def log_not_read(
    logger: logging.Logger, name: str, left_out: Mapping[str, int], changed: Mapping[str, int]
) -> None:
    """Logs [`not_read`]: unused columns as a warning only if one looks as if it should be used."""
    for title, text in not_read(left_out, changed).items():
        is_quiet = title == NOT_USED and not any(map(looks_like, left_out))
        logger.log(logging.INFO if is_quiet else logging.WARNING, f"{name}: {title}: {text}")


def counted(rows: Mapping[str, int]) -> str:
    """Numbers of rows, most first: "tools (12 rows), history (1 row)"."""
    ordered = sorted(rows.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} ({count:,} row{'s' * (count != 1)})" for name, count in ordered)


def by_kind(rows: list[DroppedRow], most: int | None = None, total: int | None = None) -> list[str]:
    """A line for each of at most `most` kinds of reason: the first row, and how many of `total`."""
    kinds: dict[tuple[str, str], list[DroppedRow]] = {}
    for row in rows:
        kind = _VALUES.sub("", row.reason.replace(row.file or "", ""))
        kinds.setdefault((row.source, kind), []).append(row)
    listed = list(kinds.values())[:most]
    lines = []
    for alike in listed:
        count = f" ({'all ' * (len(alike) == total)}{len(alike):,} rows)" if len(alike) > 1 else ""
        lines.append(f"  {alike[0]}{count}")
    more = len(rows) - sum(map(len, listed))
    return lines + ([f"  and {more:,} more"] if more else [])
