# SPDX-License-Identifier: Apache-2.0
"""Options: which data sets to read, and what to do with bad rows."""

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ...checkpoint.find import is_hub_id


FILES = (".csv", ".json", ".jsonl", ".parquet", ".tar", ".tsv")
"""Suffixes of files of rows."""


def option(default: Any, help: str, **others: Any) -> Any:
    """A field of a dataclass of options, with its default, its help, and what else argparse takes."""
    return field(default=default, metadata={"help": help, **others})


@dataclass
class DataSource:
    """One data set of a mixture, under the names of TRL's `DatasetConfig`.

    Args:
        path: Hub id, folder, or file of rows with one of the suffixes `FILES`.
        name: Configuration of a Hub data set.
        data_dir, data_files: Options of `datasets.load_dataset`.
        split: Split to read.
        columns: Columns to read, by default all; or, by the column of [`FORMS`], the data's column it is read from.
        fraction: Share of the mixture.
        image_folder: Folder or zip file that relative image paths start from; by default the data file's own.
    """

    path: str
    name: str | None = None
    data_dir: str | None = None
    data_files: str | list[str] | dict[str, Any] | None = None
    split: str = "train"
    columns: list[str] | dict[str, str] | None = None
    fraction: float | None = None
    image_folder: str | None = None

    def __post_init__(self):
        if self.columns:
            self.columns = _columns(self.columns)

    @classmethod
    def named(cls, data: str, /, **others: Any) -> "DataSource":
        """The source of `DATA`, `DATA:SPLIT` or `DATA:CONFIG:SPLIT`, with other attributes.

        The path of a local file or folder may have colons.

        Raises:
            ValueError: There are too many colons.
        """
        path, *rest = [data] if Path(data).expanduser().exists() else data.split(":")
        if len(rest) > 2:
            raise ValueError(f"{data} has {len(rest)} colons; DATA:SPLIT or DATA:CONFIG:SPLIT names a split.")
        others |= {"name": rest[0]} if len(rest) == 2 else {}
        others |= {"split": rest[-1]} if rest else {}
        local = Path(path).expanduser()
        return cls(str(local) if local.exists() else path, **others)

    def check_paths(self) -> None:
        """Raises ValueError if a local file or folder does not exist; the Hub is not asked."""
        path = Path(self.path)
        if path.suffix.lower() in FILES and not path.is_file():
            raise ValueError(f"There is no data file {path}.")
        if path.is_file() and path.suffix.lower() not in FILES:
            raise ValueError(
                f"The data file {path} has the suffix {path.suffix!r}, which is not known. Save its rows as one of "
                f"{', '.join(FILES)}."
            )
        # With data_dir or data_files, the path may be a format that `datasets` knows.
        if not (path.exists() or is_hub_id(self.path) or self.data_dir or self.data_files):
            name, colon, split = self.path.rpartition(":")
            named = f" In a mixture a split has a key of its own: path: {name}, split: {split}." if colon else ""
            raise ValueError(
                f"{self.path} is no file or folder here. Check the path. A data set of the Hub is named owner/name."
                f"{named}"
            )
        if not self.image_folder or (folder := Path(self.image_folder)).is_dir():
            return
        if not folder.is_file() or folder.suffix.lower() != ".zip" or "::" in str(folder):
            raise ValueError(f"There is no image folder {folder}, nor .zip file of images. Set image_folder.")
        from ..rows.zips import opened  # late, so that --help is quick

        opened(os.path.abspath(folder))


@dataclass
class DataArguments:
    """Options of the data, those of TRL's `ScriptArguments` (`dataset_name`, ...) among them.

    Raises:
        ValueError: A data set is missing or named twice, or a number is out of range.
    """

    dataset_name: str | None = option(
        None, f"Data to train on: a Hub id, a folder, or a file ({', '.join(FILES)}). DATA:SPLIT names a split."
    )
    dataset_config: str | None = option(None, "Configuration of a Hub data set.")
    dataset_train_split: str = option("train", "Split to train on.")
    dataset_test_split: str = option("test", "Split that is held-out data.")
    dataset_streaming: bool = option(False, "Read rows when they are needed; needs max_steps.")
    datasets: list[dict] = field(
        default_factory=list,
        metadata={
            "help": "In place of dataset_name, in YAML: a list of data sets, each with TRL's keys (path, name, split, "
            "data_files, fraction, ...), image_folder and columns. Fractions are shares of the mixture."
        },
    )
    image_folder: str | None = option(
        None, "Folder or .zip file that image paths start from. Default: the data file's folder."
    )
    columns: dict | str | list | None = option(
        None, "Names of your own: image=image_path,answer=caption reads the column image from the data's image_path."
    )
    eval_dataset_name: str | None = option(
        None, "Held-out data, in the forms of dataset_name. Default: its test split."
    )
    test_split_size: float | None = option(None, "Share of the training rows to hold out in place of a test split.")
    bad_rows: str | None = option(
        None,
        "Rows that cannot be trained on: stop at one, skip them, or skip at most a share, such as 0.01. Default: 0.01 "
        "if data are from the Hub or have more than 10,000 rows in memory, else stop.",
    )
    check_images: bool = option(False, "Decode every image before training, not a sample of 10,000 rows.")
    max_image_pixels: int = option(89_478_485, "Images with more pixels are bad rows. Default: Pillow's own limit.")
    shuffle_buffer_size: int = option(1000, "Rows in the shuffle buffer of a streamed data set.")

    def __post_init__(self):
        check_choices(self)
        if bool(self.dataset_name) == bool(self.datasets):
            both = "not both" if self.dataset_name else "to say what to train on"
            raise ValueError(f"Give dataset_name (one data set) or datasets (a mixture), {both}.")
        if self.test_split_size is not None and not 0 < self.test_split_size < 1:
            raise ValueError(f"test_split_size is a share between 0 and 1, got {self.test_split_size}.")
        keys = set(DataSource.__dataclass_fields__)
        for source in self.datasets:
            if not isinstance(source, dict) or "path" not in source or source.keys() - keys:
                raise ValueError(
                    f"Each of datasets is a mapping with path and others of {sorted(keys)}; got {source!r}."
                )
        check_bad_rows(self.bad_rows)
        for name in ("max_image_pixels", "shuffle_buffer_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")

    @property
    def sources(self) -> list[DataSource]:
        """The data sets to train on."""
        shared = {"image_folder": self.image_folder, "columns": self.columns}
        if self.datasets:
            return [DataSource(**{**shared, **source}) for source in self.datasets]
        plain = {"name": self.dataset_config, "split": self.dataset_train_split}
        return [DataSource.named(str(self.dataset_name), **shared, **plain)]


def _columns(columns: Any) -> list[str] | dict[str, str]:
    """The attribute `columns` of a data set. Raises ValueError if it is neither a list of names nor a mapping."""
    from ..rows.forms import ALIASES, COLUMNS  # late, so that --help is quick

    if isinstance(columns, str):
        pairs = (pair.partition("=") for pair in columns.split(","))
        columns = {own.strip(): column.strip() for own, _, column in pairs}
    named = columns.items() if isinstance(columns, dict) else [(None, name) for name in columns]
    if not all(isinstance(name, str) and name for _, name in named):
        raise ValueError(f"columns must be pairs such as image=image_path,answer=caption, got {columns!r}.")
    if isinstance(columns, dict) and (unknown := columns.keys() - COLUMNS - ALIASES.keys()):
        raise ValueError(
            f"columns names {', '.join(map(repr, sorted(unknown)))}, which no form has. Before the = stands one of "
            f"{', '.join(sorted(COLUMNS))}; after it, a column of the data."
        )
    return columns


def map_collecting_errors(function: Callable[[Any], Any], sources: Iterable[Any]) -> list[Any]:
    """The results of a function for data sets; raises one ValueError with the errors of all."""
    results, errors = [], []
    for source in sources:
        try:
            results.append(function(source))
        except ValueError as error:
            errors.append(error)
    if errors:
        raise ValueError("\n".join(map(str, errors))) from errors[0]
    return results


def check_bad_rows(option: str | float | None) -> None:
    """Raises ValueError if `bad_rows` is neither "stop" nor "skip" nor a share."""
    if option not in (None, "stop", "skip"):
        with suppress(ValueError):
            if 0 < float(option) < 1:
                return
        raise ValueError(f"bad_rows must be 'stop', 'skip' or a share between 0 and 1, such as 0.01; got {option!r}.")


def check_choices(options: Any) -> None:
    """Raises ValueError if an option is none of its `Literal`'s values: argparse does not check those from YAML."""
    for name, kind in get_type_hints(type(options)).items():
        values = [value for part in (kind, *get_args(kind)) if get_origin(part) is Literal for value in get_args(part)]
        value = getattr(options, name)
        if values and value not in values and (value is not None or type(None) not in get_args(kind)):
            raise ValueError(f"{name} must be one of {', '.join(map(repr, values))}, got {value!r}.")


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
