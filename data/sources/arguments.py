# SPDX-License-Identifier: Apache-2.0
"""Options: which data sets to read, and what to do with bad rows."""

import operator
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ...checkpoint.files import is_hub_id


FILES = (".csv", ".json", ".jsonl", ".parquet", ".tar", ".tsv")  # suffixes of files of rows
_FILTER = re.compile(r"\s*(.+?)\s*(>=|<=|!=|==|=|>|<)\s*(.+?)\s*", re.S)
_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
    "=": operator.eq,
    "!=": operator.ne,
}
_EQUALITIES = ("=", "!=")  # of any values; the others compare only numbers


def option(default: Any, help: str, **settings: Any) -> Any:
    """Returns a field of a dataclass of options. `settings` are further arguments of argparse."""
    return field(default=default, metadata={"help": help, **settings})


@dataclass
class DataSource:
    """One data set of a mixture, under the names of TRL's `DatasetConfig`.

    Raises ValueError if `filters`, `repeat` or `columns` is not valid. `~` in paths is replaced.
    """

    path: str  # Hub id, folder, or file of rows with one of the suffixes `FILES`
    name: str | None = None  # configuration of a Hub data set
    data_dir: str | None = None  # like data_files, as in `datasets.load_dataset`
    data_files: str | list[str] | dict[str, Any] | None = None
    split: str = "train"
    columns: list[str] | dict[str, str] | None = None  # to read, or by known name
    fraction: float | None = None  # share of the mixture
    image_folder: str | None = None  # or zip file; by default the data file's folder
    repeat: int = 1  # how often each row comes in an epoch
    filters: str | list[str] | None = None  # conditions on columns of the data's own names

    def __post_init__(self):
        for path_field in ("path", "data_dir", "data_files", "image_folder"):
            setattr(self, path_field, _with_home(getattr(self, path_field)))
        path = Path(self.path)
        if path.exists():
            self.path = str(path)  # records name `data/` and `./data` as `data`
        if isinstance(self.fraction, str):
            # A text that is not a number stays. The mixture checks all fractions, and refuses it.
            with suppress(ValueError):
                self.fraction = float(self.fraction)
        parse_filters(self.filters)  # raises ValueError now, not only when the data set is opened
        if isinstance(self.repeat, bool) or not isinstance(self.repeat, int) or self.repeat < 1:
            raise ValueError(f"repeat must be a whole number from 1 on, got {self.repeat!r}.")
        if self.columns:
            self.columns = _checked_columns(self.columns)

    @classmethod
    def named(cls, data: str, /, **options: Any) -> "DataSource":
        """Returns the source that `DATA`, `DATA:SPLIT` or `DATA:CONFIG:SPLIT` names.

        A local path that exists may have colons. `options` are other fields.

        Raises:
            ValueError: `data` has more than two colons, or a field is not valid.
        """
        if Path(data).expanduser().exists():
            return cls(data, **options)
        path, *words = data.split(":")
        if len(words) > 2:
            raise ValueError(f"{data} has {len(words)} colons; DATA:CONFIG:SPLIT has two.")
        if words:
            options["split"] = words.pop()
        if words:
            options["name"] = words.pop()
        return cls(path, **options)

    def check_paths(self) -> None:
        """Raises ValueError if a local file or folder does not exist. The Hub is not asked."""
        path = Path(self.path)
        if (path.suffix.lower() in FILES) != path.is_file():
            raise ValueError(f"There is no data file {path}. Data files end in {', '.join(FILES)}.")
        # With data_dir or data_files, the path may be a format that `datasets` knows.
        if not (path.exists() or is_hub_id(self.path) or self.data_dir or self.data_files):
            raise ValueError(
                f"{self.path} is not a file or folder here, nor owner/name of the Hub."
            )
        folder = Path(self.image_folder or os.curdir)
        if folder.is_dir():
            return
        if not folder.is_file() or folder.suffix.lower() != ".zip" or "::" in str(folder):
            raise ValueError(f"There is no image folder or .zip file {folder}. Set image_folder.")
        from ..rows.images import open_zip  # late, so that --help is quick

        open_zip(os.path.abspath(folder))


def _checked_columns(columns: Any) -> Any:
    """Returns the option `columns` as a list or mapping.

    Raises ValueError if it is something else, or names a column that no form has.
    """
    from ..rows.forms import ALIASES, COLUMNS  # late, so that --help is quick

    if isinstance(columns, str):
        pairs = {}
        for pair in columns.split(","):
            name, _, own_name = pair.partition("=")
            pairs[name.strip()] = own_name.strip()
        columns = pairs
    own_names = columns
    unknown = set()
    if isinstance(columns, dict):
        own_names = columns.values()
        unknown = columns.keys() - COLUMNS - ALIASES.keys()
    if not all(isinstance(name, str) and name for name in own_names):
        raise ValueError(f"columns must be pairs like image=path,answer=text, got {columns!r}.")
    if unknown:
        raise ValueError(
            f"columns names {', '.join(map(repr, sorted(unknown)))}, but known are only "
            f"{', '.join(sorted(COLUMNS))}."
        )
    return columns


@dataclass
class DataArguments:
    """Options of the data. `dataset_name` and others are named as in TRL's `ScriptArguments`.

    Raises ValueError if a value is not allowed, or if options contradict each other.
    """

    dataset_name: str | None = option(
        None, f"Hub id, folder or file ({', '.join(FILES)}) to train on. DATA:SPLIT names a split."
    )
    dataset_config: str | None = option(None, "Configuration of a Hub data set.")
    dataset_train_split: str = option("train", "Split to train on.")
    dataset_test_split: str = option("test", "Split of held-out data.")
    dataset_streaming: bool = option(False, "Read rows when they are needed. Needs max_steps.")
    datasets: list[dict] = field(
        default_factory=list,
        metadata={
            "help": "In YAML, in place of dataset_name: data sets with TRL's keys (path, name, "
            "split, data_files, ...), image_folder, columns, filters, fraction (a share of the "
            "mixture) and repeat (how often each row comes)."
        },
    )
    image_folder: str | None = option(
        None, "Folder or .zip file where image paths start. Default: the data file's folder."
    )
    columns: dict | str | list | None = option(
        None, "Your columns: image=path,answer=caption reads the image from your column path."
    )
    filters: str | None = option(
        None,
        "Conditions on columns, such as relevance_min>=4,language=en. Other rows are not read.",
    )
    eval_dataset_name: str | None = option(
        None, "Held-out data, in the forms of dataset_name. Default: its test split."
    )
    test_split_size: float | None = option(None, "Share of training rows held out as a test split.")
    bad_rows: str | None = option(
        None,
        "If rows cannot be trained on: stop, skip them, or skip at most a share, such as 0.01. "
        "Default: 0.01 for data from the Hub or more than 10,000 rows in memory, otherwise stop.",
    )
    check_images: bool = option(False, "Decode every image first, not a sample of 10,000 rows.")
    shuffle_buffer_size: int = option(1000, "Rows in the shuffle buffer of a streamed data set.")

    def __post_init__(self):
        self.dataset_name = _with_home(self.dataset_name)
        self.eval_dataset_name = _with_home(self.eval_dataset_name)
        self.image_folder = _with_home(self.image_folder)
        check_choices(self)
        if bool(self.dataset_name) == bool(self.datasets):
            both = "not both" if self.dataset_name else "to say what to train on"
            raise ValueError(f"Give dataset_name (one data set) or datasets (a mixture), {both}.")
        held_out_share = self.test_split_size
        if held_out_share is not None and not 0 < held_out_share < 1:
            raise ValueError(f"test_split_size must be between 0 and 1, got {held_out_share}.")
        parse_filters(self.filters)  # raises ValueError now, not only when a data set is opened
        keys = set(DataSource.__dataclass_fields__)
        for source in self.datasets:
            if not isinstance(source, dict) or "path" not in source or source.keys() - keys:
                raise ValueError(f"A data set has path and some of {sorted(keys)}; got {source!r}.")
        if self.bad_rows not in (None, "stop", "skip"):
            allowed_share = _number(self.bad_rows) or 0
            if not 0 < allowed_share < 1:
                raise ValueError(
                    "bad_rows must be 'stop', 'skip' or a share between 0 and 1, such as 0.01; got "
                    f"{self.bad_rows!r}."
                )
        if self.shuffle_buffer_size < 1:
            raise ValueError(f"shuffle_buffer_size must be 1 or more: {self.shuffle_buffer_size}.")

    @property
    def sources(self) -> list[DataSource]:
        """The data sets to train on."""
        if self.datasets:
            return [DataSource(**self.shared_options | source) for source in self.datasets]
        options = {"name": self.dataset_config, "split": self.dataset_train_split}
        return [DataSource.named(str(self.dataset_name), **options, **self.shared_options)]

    @property
    def shared_options(self) -> dict[str, Any]:
        """Options for all data sets that do not have their own."""
        return {
            "image_folder": self.image_folder,
            "columns": self.columns,
            "filters": self.filters,
        }


def _with_home(value: Any) -> Any:
    """Returns a path, or a list or mapping of paths, with the home folder in place of `~`."""
    if isinstance(value, str):
        return os.path.expanduser(value)
    if isinstance(value, list):
        return [_with_home(path) for path in value]
    if isinstance(value, dict):
        return {name: _with_home(path) for name, path in value.items()}
    return value


def check_choices(options: Any) -> None:
    """Raises ValueError if a value is not in its `Literal`. argparse checks no values from YAML."""
    for option_name, annotation in get_type_hints(type(options)).items():
        value = getattr(options, option_name)
        allowed_values: list[Any] = []
        for choice_type in (annotation, *get_args(annotation)):
            if get_origin(choice_type) is Literal:
                allowed_values.extend(get_args(choice_type))
        if not allowed_values or value in allowed_values:
            continue
        if value is not None or type(None) not in get_args(annotation):
            raise ValueError(
                f"{option_name} must be one of {', '.join(map(repr, allowed_values))}, got "
                f"{value!r}."
            )


def cores() -> int:
    """Returns the number of processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@dataclass(frozen=True)
class Filter:
    """One condition, such as `relevance_min>=4`."""

    column: str  # as the data names it
    comparison: str  # one of `_COMPARISONS`
    value: str

    def keeps(self, row: Mapping[str, Any]) -> bool:
        """Whether a row meets the condition. A row without a value only meets `!=`.

        Raises ValueError if a value is compared by size, but is not a number.
        """
        value = row.get(self.column)
        if value is None or value != value:  # NaN
            return self.comparison == "!="
        number = _number(value)
        wanted = _number(self.value)
        compare = _COMPARISONS[self.comparison]
        if number is not None and wanted is not None:
            return compare(number, wanted)
        if self.comparison not in _EQUALITIES:
            raise ValueError(f"{self.column} is {str(value)[:40]!r} in a row, not a number")
        return compare(str(value).lower(), self.value.lower())

    def __str__(self) -> str:
        return f"{self.column}{self.comparison}{self.value}"


def parse_filters(texts: str | list[str] | None) -> tuple[Filter, ...]:
    """Returns the conditions in a list of texts, or in a text where commas separate them.

    Raises ValueError if one is not valid.
    """
    if isinstance(texts, str):
        texts = texts.split(",")
    filters = []
    for text in texts or ():
        match = isinstance(text, str) and _FILTER.fullmatch(text)
        if not match:
            raise ValueError(
                f"filters has {text!r}, not a condition. Write filters as relevance_min>=4, "
                "language=en or split!=test."
            )
        column, comparison, value = match.groups()
        comparison = comparison.replace("==", "=")
        if comparison not in _EQUALITIES and _number(value) is None:
            raise ValueError(f"filters compares {column} with {value!r}, not with a number.")
        filters.append(Filter(column, comparison, value))
    return tuple(filters)


def _number(value: Any) -> float | None:
    """Returns a number, or the number that a text holds, or None."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value)
    except ValueError:
        return None
