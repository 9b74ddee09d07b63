# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Opening a data set: a file or folder of LLaVA's JSON, or whatever `datasets` reads."""

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, IterableDataset, load_dataset, load_from_disk
from datasets.exceptions import DatasetGenerationError, DatasetsError

from ..provenance import hub_dataset
from .arguments import DataArguments, DataSource


_HELD_OUT_WORDS = {"test", "validation", "valid", "val", "dev", "eval"}
_REMEDY = "Give eval_dataset_name or test_split_size, or leave eval_strategy at 'no'."


@dataclass
class Source:
    """An opened data set; iterating over it gives the name of file or data set, the number, and the row as it is.

    Of one from the Hub, `dataset` says which it is: see [`hub_dataset`].
    """

    name: str
    image_folder: str | None
    columns: list[str] | None
    files: tuple[str, ...] = ()
    data: Dataset | IterableDataset | None = None
    dataset: dict[str, Any] | None = None

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


def open_source(source: DataSource, streaming: bool) -> Source:
    """Opens what `source` names, reading no row of it yet.

    Raises:
        ValueError: it is not there, or cannot be read.
    """
    path = Path(source.path)
    suffix = path.suffix.lower()
    is_file = suffix in (".json", ".jsonl", ".parquet")
    folder = str(path.parent if is_file else path) if path.exists() else None
    opened = Source(source.path, source.image_folder or folder, source.columns)
    if is_file and not path.is_file():
        raise ValueError(f"There is no data file {path}.")
    if is_file and source.split != "train":
        raise ValueError(f"{path} is one file, and has no split {source.split!r}.")
    if opened.image_folder and not os.path.isdir(opened.image_folder):
        raise ValueError(f"There is no image folder {opened.image_folder}. Set image_folder.")
    try:
        if suffix in (".json", ".jsonl"):
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
            opened.dataset = None if folder or is_file else hub_dataset(source.path)
    except (OSError, ValueError, DatasetsError) as error:
        reason = error.__cause__ if isinstance(error, DatasetGenerationError) else error
        raise ValueError(f"The data set {source.path}, split {source.split!r}, cannot be read: {reason}") from error
    return opened


def open_held_out(arguments: DataArguments) -> Source:
    """Opens the held-out data: `eval_dataset_name`, or the test split of `dataset_name`.

    Where the first has no splits, it is held-out data as a whole, even if it is what is trained on.

    Raises:
        ValueError: there is none.
    """
    path = arguments.eval_dataset_name or arguments.dataset_name
    if path is None:
        raise ValueError(f"A mixture has no test split. {_REMEDY}")
    same = path == arguments.dataset_name
    whole = Path(path).is_file() or (Path(path) / "state.json").is_file()
    split = "train" if arguments.eval_dataset_name and whole else arguments.dataset_test_split
    source = DataSource(path, arguments.dataset_config if same else None, split=split)
    source.image_folder = arguments.image_folder
    try:
        return open_source(source, arguments.dataset_streaming)
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
    if any(file.suffix.lower() in (".parquet", ".arrow", ".csv") or file.name == "metadata.jsonl" for file in files):
        return []
    return [f for f in files if f.suffix.lower() in (".json", ".jsonl") and not f.stem.startswith("dataset_info")]


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
        if file.lower().endswith(".jsonl"):
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
    for table in data.with_format("arrow").iter(64):
        yield from table.to_pylist()
