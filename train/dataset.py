# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Data sets in any known form as canonical rows, checked, measured and mixed; in memory or streamed.

LLaVA's JSON is read here, since its columns do not have one type each; `datasets` reads everything else. No picture is
decoded on the way. In memory, canonical rows are an Arrow file in the cache of `datasets`, pictures that the source
holds inside included; a stream keeps nothing.
"""

import json
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import PartialState
from accelerate.utils import gather_object
from datasets import (
    Dataset,
    DatasetDict,
    Features,
    IterableDataset,
    List,
    Value,
    concatenate_datasets,
    load_dataset,
    load_from_disk,
)
from datasets.exceptions import DatasetGenerationError, DatasetsError
from datasets.fingerprint import Hasher
from rich.progress import track
from transformers import LlavaProcessor

from . import rows
from .arguments import DataArguments, DataSource
from .pictures import picture_problem
from .rows import FEATURES, DroppedRow, DroppedRows, canonical_row, picture_name, printable


_CHECKED = Features({**FEATURES, "paths": List(Value("string")), "file": Value("string"), "reason": Value("string")})
_CHUNK = 64  # rows tokenized together
_SHOWN = 5  # bad rows in an error
_HELD_OUT_WORDS = {"test", "validation", "valid", "val", "dev", "eval"}
_REMEDY = "Give eval_dataset_name or test_split_size, or leave eval_strategy at 'no'."


@dataclass
class SourceReport:
    """What became of one data set.

    Attributes:
        source: Its name.
        split: `"train"` or `"eval"`.
        found: Rows in it. None for a stream, as are all numbers below: what it drops is in the file of dropped rows.
        bad: Rows that cannot be trained on.
        too_long: Rows with more than `max_length` tokens.
        kept: Rows that are left.
        used: Rows of those that the mixture takes.
        images: Pictures in the rows kept.
        text_only: Rows kept that have no picture.
        shortest, median, longest: Tokens in a kept row, image tokens included.
        dropped: Every row that was bad or too long.
    """

    source: str
    split: str
    found: int | None = None
    bad: int | None = None
    too_long: int | None = None
    kept: int | None = None
    used: int | None = None
    images: int | None = None
    text_only: int | None = None
    shortest: int | None = None
    median: float | None = None
    longest: int | None = None
    dropped: list[DroppedRow] = field(default_factory=list)


@dataclass
class DataReport:
    """What became of all data sets, training data first."""

    sources: list[SourceReport]

    def to_dict(self) -> dict[str, Any]:
        """For JSON, every dropped row included."""
        return asdict(self)


@dataclass
class TrainingData:
    """Canonical rows with the columns of `FEATURES`; `eval` is None where none is asked for."""

    train: Dataset | IterableDataset
    eval: Dataset | IterableDataset | None
    report: DataReport


def load_data(
    arguments: DataArguments,
    processor: LlavaProcessor,
    *,
    max_length: int | None,
    seed: int,
    with_eval: bool,
    dropped_rows: DroppedRows | None = None,
) -> TrainingData:
    """Loads what `arguments` names, checks every row, drops what is too long, and mixes.

    In memory, structure, lengths and the presence of picture files are checked here, with `check_images` also every
    picture. All processes must call this at the same time, since they share that work. With fractions, the mixture is
    the largest with these shares in which no row comes twice; its rows are drawn by `seed`.

    A stream is checked as it is read, and shuffled in a buffer. With fractions it is drawn at random from its sources
    until the first of them ends; without, it reads one after the other. It is a single shard, so that rows and their
    numbers do not depend on the number of processes: each reads all of it and takes its part, in one worker at most.

    Args:
        arguments: Data sets, and what to do with bad rows.
        processor: Decides the length of a row.
        max_length: Tokens, image tokens included, above which a row is dropped; None for no limit.
        seed: Of mixture, shuffle buffer and held-out split.
        with_eval: Whether to load held-out data.
        dropped_rows: Where streams record the rows that they drop.

    Raises:
        ValueError: A data set cannot be read, has bad rows and `bad_rows` is "stop", or has none left; fractions are
            given for some sources only; held-out data is asked for and not found. Bad rows in a stream raise when met.
    """
    streaming = arguments.dataset_streaming
    fractions = _fractions(arguments.sources)
    parting = bool(with_eval and arguments.test_split_size and not arguments.eval_dataset_name)
    if streaming and parting:
        raise ValueError("test_split_size needs data in memory, and dataset_streaming is set. Give eval_dataset_name.")
    held_out = _open_held_out(arguments) if with_eval and not parting else None
    sources = [_open(source, streaming) for source in arguments.sources]
    checks = _Checks(processor, max_length, arguments, dropped_rows)
    reports = [SourceReport(source.name, "train") for source in sources]
    train: Dataset | IterableDataset
    if streaming:
        train = _stream(sources, checks, fractions, seed)
        train = train.shuffle(seed=seed, buffer_size=arguments.shuffle_buffer_size)
    else:
        parts = [_in_memory(source, checks, report) for source, report in zip(sources, reports, strict=True)]
        train = _mixture(parts, fractions, seed, reports)
    held: Dataset | IterableDataset | None = None
    if held_out:
        reports.append(SourceReport(held_out.name, "eval"))
        held = _stream([held_out], checks) if streaming else _in_memory(held_out, checks, reports[-1])
    elif parting:
        parted = train.train_test_split(test_size=arguments.test_split_size, seed=seed)
        train, held = parted["train"], parted["test"]
    return TrainingData(train, held, DataReport(reports))


def token_lengths(processor: LlavaProcessor, conversations: list[dict[str, Any]]) -> list[int | str]:
    """Tokens in each canonical row as the collator gives it, without decoding a picture, or why it has none."""
    per_image = processor._get_num_multimodal_tokens([(1, 1)])["num_image_tokens"][0]
    results: list[int | str] = []
    texts: list[str] = []
    for conversation in conversations:
        try:
            texts.append(str(processor.apply_chat_template(conversation["messages"], tokenize=False)))
            results.append(len(conversation["images"]))
        # Templates refuse a conversation with whatever Jinja or their authors raise.
        except Exception as error:
            results.append(f"the chat template refuses it: {error}")
    encoded = iter(processor.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else [])
    for number, images in enumerate(results):
        if isinstance(images, int):
            tokens = next(encoded)
            results[number] = len(tokens) + images * (per_image - 1)
            if (printed := tokens.count(processor.image_token_id)) != images:
                results[number] = f"the chat template prints {printed} image tokens for {images} pictures"
    return results


# ----------------------------------------------------------------------------------------------------------- sources
@dataclass
class _Source:
    """An opened data set; iterating over it gives the name of file or data set, the number, and the row as it is."""

    name: str
    image_folder: str | None
    columns: list[str] | None
    files: tuple[str, ...] = ()
    data: Dataset | IterableDataset | None = None

    def __iter__(self) -> Iterator[tuple[str, int, Any]]:
        for file in self.files:
            for row, raw in enumerate(_json_rows(file)):
                yield file, row, self._selected(raw)
        if self.data is not None:
            for row, raw in enumerate(_undecoded_rows(self.data)):
                yield self.name, row, self._selected(raw)

    def _selected(self, raw: Any) -> Any:
        return {c: raw[c] for c in self.columns if c in raw} if self.columns and isinstance(raw, dict) else raw

    def identity(self) -> list:
        """What changes when the rows change."""
        stats = [os.stat(file) for file in self.files]
        data = self.data._fingerprint if isinstance(self.data, Dataset) else None
        files = [(file, stat.st_size, stat.st_mtime_ns) for file, stat in zip(self.files, stats, strict=True)]
        return [self.name, os.path.abspath(self.image_folder or ""), self.image_folder, self.columns, files, data]


def _open(source: DataSource, streaming: bool) -> _Source:
    path = Path(source.path)
    is_file = path.suffix in (".json", ".jsonl", ".parquet")
    folder = str(path.parent if is_file else path) if path.exists() else None
    opened = _Source(source.path, source.image_folder or folder, source.columns)
    if is_file and not path.is_file():
        raise ValueError(f"There is no data file {path}.")
    if is_file and source.split != "train":
        raise ValueError(f"{path} is one file, and has no split {source.split!r}.")
    if opened.image_folder and not os.path.isdir(opened.image_folder):
        raise ValueError(f"There is no image folder {opened.image_folder}. Set image_folder.")
    try:
        if path.suffix in (".json", ".jsonl"):
            opened.files = (source.path,)
        elif (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
            opened.data = _saved(path, source.split)
        elif not (source.name or source.data_dir or source.data_files) and (found := _json_files(path)):
            opened.files = _files_of_split(path, found, source.split)
        else:
            opened.data = load_dataset(
                *(("parquet",) if is_file else (source.path, source.name)),
                data_dir=source.data_dir,
                data_files=source.path if is_file else source.data_files,
                split=source.split,
                streaming=streaming,
                verification_mode="no_checks",  # cards are often wrong about the number of rows; they are counted here
            )
    except (OSError, ValueError, DatasetsError) as error:
        reason = error.__cause__ if isinstance(error, DatasetGenerationError) else error
        raise ValueError(f"The data set {source.path}, split {source.split!r}, cannot be read: {reason}") from error
    return opened


def _open_held_out(arguments: DataArguments) -> _Source:
    path = arguments.eval_dataset_name or arguments.dataset_name
    if path is None:
        raise ValueError(f"A mixture has no test split. {_REMEDY}")
    same = path == arguments.dataset_name
    single = not same and (Path(path).is_file() or (Path(path) / "state.json").is_file())
    split = "train" if single else arguments.dataset_test_split
    source = DataSource(path, arguments.dataset_config if same else None, split=split)
    source.image_folder = arguments.image_folder
    try:
        return _open(source, arguments.dataset_streaming)
    except ValueError as error:
        raise ValueError(f"There is no held-out data. {error} {_REMEDY}") from error


def _saved(folder: Path, split: str) -> Dataset:
    saved = load_from_disk(str(folder))
    splits = saved if isinstance(saved, DatasetDict) else {"train": saved}
    if split not in splits:
        raise ValueError(f"it has the splits {', '.join(splits)}.")
    return splits[split]


def _json_files(folder: Path) -> list[Path]:
    """The folder's own files of rows, unless `datasets` knows better what the folder is."""
    files = sorted(folder.glob("*"))
    if any(file.suffix in (".parquet", ".arrow", ".csv") or file.name == "metadata.jsonl" for file in files):
        return []
    return [f for f in files if f.suffix in (".json", ".jsonl") and not f.stem.startswith("dataset_info")]


def _files_of_split(folder: Path, files: list[Path], split: str) -> tuple[str, ...]:
    words = {file: set(re.split(r"[\W_]+", file.stem.lower())) for file in files}
    chosen = [file for file in files if split in words[file]]
    if not chosen and split == "train":
        chosen = [file for file in files if not words[file] & _HELD_OUT_WORDS]
    if not chosen:
        raise ValueError(f"no file in {folder} has {split!r} in its name: {', '.join(file.name for file in files)}.")
    return tuple(map(str, chosen))


def _json_rows(file: str) -> Iterator[Any]:
    with open(file, "rb") as lines:
        if file.endswith(".jsonl"):
            for line in filter(bytes.strip, lines):
                try:
                    yield json.loads(line)
                except ValueError:
                    yield line  # bytes are no row, as the check will say with its number
            return
        try:
            content = json.load(lines)
        except ValueError as error:
            raise ValueError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, list):
        raise ValueError(
            f"{file} must be a JSON list of rows, got {type(content).__name__}. One row a line is .jsonl."
        )
    yield from content


def _undecoded_rows(data: Dataset | IterableDataset) -> Iterator[dict[str, Any]]:
    if isinstance(data, IterableDataset):
        yield from data.decode(False) if data.features else data
        return
    for table in data.with_format("arrow").iter(_CHUNK):
        yield from table.to_pylist()


# ------------------------------------------------------------------------------------------------------------ checks
@dataclass
class _Checks:
    processor: LlavaProcessor
    max_length: int | None
    arguments: DataArguments
    dropped_rows: DroppedRows | None

    def too_long(self, row: dict[str, Any]) -> DroppedRow | None:
        if self.max_length is None or row["length"] <= self.max_length:
            return None
        reason = f"{row['length']} tokens, more than max_length {self.max_length}"
        return DroppedRow(row["source"], row["row"], row["file"], reason, row["length"])


def _checked_rows(source: _Source, processor: LlavaProcessor) -> Iterator[dict[str, Any]]:
    """All rows of a source, in order; those that cannot be trained on are empty and have a reason."""
    found = iter(source)
    while chunk := list(islice(found, _CHUNK)):
        checked = []
        for name, number, raw in chunk:
            row: dict[str, Any] = {"source": name, "row": number, "file": picture_name(raw), "reason": None}
            row |= {"images": [], "messages": [], "prompt_turns": 0, "length": 0, "image_count": 0, "paths": []}
            try:
                row |= canonical_row(raw, image_folder=source.image_folder, image_token=processor.image_token)
            except ValueError as error:
                row["reason"] = printable(str(error))
            checked.append(row)
        good = [row for row in checked if row["reason"] is None]
        for row, length in zip(good, token_lengths(processor, good), strict=True):
            row["reason" if isinstance(length, str) else "length"] = length
            row["image_count"] = len(row["images"])
            row["paths"] = [image["path"] for image in row["images"] if image["bytes"] is None]
        yield from checked


def _stream(sources: list[_Source], checks: _Checks, fractions: tuple = (), seed: int = 0) -> IterableDataset:
    # One generator, and no list among its arguments, makes one shard: `datasets` and accelerate would deal several out
    # to workers and processes, each of which would then see other sources, number rows anew and end at another time.
    drawn = {"sources": tuple(sources), "checks": checks, "fractions": fractions, "seed": seed}
    return IterableDataset.from_generator(_streamed_rows, features=FEATURES, gen_kwargs=drawn)


def _streamed_rows(
    sources: tuple[_Source, ...], checks: _Checks, fractions: tuple[float, ...], seed: int
) -> Iterator[dict[str, Any]]:
    streams = [_kept_rows(source, checks) for source in sources]
    if not fractions:
        yield from chain.from_iterable(streams)
        return
    random = np.random.default_rng(seed)
    while (row := next(streams[random.choice(len(streams), p=fractions)], None)) is not None:
        yield row


def _kept_rows(source: _Source, checks: _Checks) -> Iterator[dict[str, Any]]:
    for row in _checked_rows(source, checks.processor):
        dropped = checks.too_long(row)
        problem = (row["file"], row["reason"]) if row["reason"] else None
        if problem := problem or picture_problem(_files(row["paths"]), source.image_folder):
            dropped = DroppedRow(row["source"], row["row"], *problem)
            if checks.arguments.bad_rows == "stop":
                raise ValueError(_stopped([dropped]))
        if not dropped:
            yield {column: row[column] for column in FEATURES}
        elif checks.dropped_rows:
            checks.dropped_rows.add(dropped)


def _in_memory(source: _Source, checks: _Checks, report: SourceReport) -> Dataset:
    processor = checks.processor
    known = [source.identity(), processor.chat_template, processor.tokenizer.get_vocab(), type(processor.tokenizer)]
    code = [Path(module).read_bytes() for module in (__file__, str(rows.__file__))]
    tokens_per_image = processor._get_num_multimodal_tokens([(1, 1)])["num_image_tokens"]
    try:
        # Processes that start together wait for the first, and find its file in the cache.
        checked = Dataset.from_generator(
            _checked_rows,
            features=_CHECKED,
            gen_kwargs={"source": source, "processor": processor},
            fingerprint=Hasher.hash([known, tokens_per_image, processor.image_token, code]),
        )
    except DatasetGenerationError as error:
        raise error.__cause__ if isinstance(error.__cause__, (ValueError, OSError)) else error from None
    except ValueError as error:  # what `datasets` says of no rows; errors of ours come in one of its own
        raise ValueError(f"{source.name} has no rows.") from error
    problems = _picture_problems(checked, source, checks.arguments)
    about = checked.select_columns(["source", "row", "file", "reason", "length", "image_count"]).to_list()
    bad, long, kept = [], [], []
    for number, row in enumerate(about):
        if row["reason"] or number in problems:
            file, reason = problems.get(number, (row["file"], row["reason"]))
            bad.append(DroppedRow(row["source"], row["row"], file, reason))
        elif dropped := checks.too_long(row):
            long.append(dropped)
        else:
            kept.append(number)
    if bad and checks.arguments.bad_rows == "stop":
        raise ValueError(_stopped(bad))
    if not kept:
        first = f" The first: {(bad + long)[0]}." if bad or long else ""
        raise ValueError(
            f"{source.name} has no row to train on: {len(about)} found, {len(bad)} bad, {len(long)} longer than "
            f"max_length {checks.max_length}.{first}"
        )
    report.found, report.bad, report.too_long, report.dropped = len(about), len(bad), len(long), bad + long
    _measure(report, [about[number] for number in kept])
    return checked.select(kept).select_columns(list(FEATURES))


def _measure(report: SourceReport, kept: list[dict[str, Any]]) -> None:
    lengths, images = (np.array([row[column] for row in kept]) for column in ("length", "image_count"))
    report.kept = report.used = len(kept)
    report.images, report.text_only = int(images.sum()), int((images == 0).sum())
    report.shortest, report.median, report.longest = int(lengths.min()), float(np.median(lengths)), int(lengths.max())


def _stopped(bad: list[DroppedRow]) -> str:
    shown = "\n".join(f"  {row}" for row in bad[:_SHOWN])
    more = f"\n  and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
    return f"Rows that cannot be trained on:\n{shown}{more}\nMend them, or pass over such rows with --bad_rows skip."


def _picture_problems(checked: Dataset, source: _Source, arguments: DataArguments) -> dict[int, tuple]:
    """File and reason by number of the row. Not cached, because files come and go; shared among the processes."""
    state = PartialState()
    max_pixels = arguments.max_image_pixels if arguments.check_images else None
    paths = [] if arguments.check_images else checked["paths"][:]

    def problem(number: int) -> tuple[int, tuple | None]:
        images = checked[number]["images"] if arguments.check_images else _files(paths[number])
        return number, picture_problem(images, source.image_folder, max_pixels)

    numbers = range(state.process_index, len(checked), state.num_processes)
    with ThreadPoolExecutor() as threads:
        results = track(
            threads.map(problem, numbers),
            f"Checking the pictures of {source.name}",
            total=len(numbers),
            disable=not (arguments.check_images and state.is_local_main_process),
        )
        found = [(number, problem) for number, problem in results if problem]
    return dict(gather_object(found))


def _files(paths: list[str]) -> list[dict[str, Any]]:
    return [{"path": path, "bytes": None} for path in paths]


# ----------------------------------------------------------------------------------------------------------- mixture
def _fractions(sources: list[DataSource]) -> tuple[float, ...]:
    """Shares that sum to 1, or none."""
    given = [source.fraction for source in sources]
    if all(fraction is None for fraction in given):
        return ()
    if any(fraction is None or fraction <= 0 for fraction in given):
        raise ValueError(f"Every data set of a mixture has a fraction above 0, or none has one; got {given}.")
    return tuple(fraction / sum(filter(None, given)) for fraction in given if fraction)


def _mixture(parts: list[Dataset], fractions: tuple[float, ...], seed: int, reports: list[SourceReport]) -> Dataset:
    if fractions:
        total = min(len(part) / fraction for part, fraction in zip(parts, fractions, strict=True))
        for number, (part, fraction) in enumerate(zip(parts, fractions, strict=True)):
            drawn = np.random.default_rng([seed, number]).permutation(len(part))[: round(total * fraction)]
            parts[number] = part.select(sorted(drawn))
            reports[number].used = len(drawn)
    return concatenate_datasets(parts)
