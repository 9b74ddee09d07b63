# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""WebDataset's shards: tar files in which the files of one name, such as `7.jpg` and `7.json`, are a row."""

import io
from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath
from typing import Any, BinaryIO, ClassVar

from datasets import DatasetInfo, Features, Image, List, Value
from datasets.packaged_modules.webdataset.webdataset import WebDataset

from ...checkpoint.limits import MAX_IMAGE_BYTES
from ..rows.forms import SUFFIXES
from .files import loaded


_TEXTS = (".json", ".txt")
_SAMPLE = Features(
    {
        "__key__": Value("string"),
        "__url__": Value("string"),
        "images": List(Image(decode=False)),
        "json": Value("string"),
        "txt": Value("string"),
    }
)


class Shards(WebDataset):
    """The builder of `datasets`, for rows whose files differ; other files than images and texts are not read."""

    DECODERS: ClassVar[dict] = {}

    def _info(self) -> DatasetInfo:
        return DatasetInfo(features=_SAMPLE)

    @classmethod
    def _get_pipeline_from_tar(
        cls, tar_path: str, tar_iterator: Iterable[tuple[str, BinaryIO]]
    ) -> Iterator[dict[str, Any]]:
        read = (  # a file may be sparse, or packed
            (name, io.BytesIO(file.read(MAX_IMAGE_BYTES + 1)))
            for name, file in tar_iterator
            if PurePosixPath(name).suffix.lower() in (*SUFFIXES, *_TEXTS)
        )
        for sample in super()._get_pipeline_from_tar(tar_path, read):
            key, url = sample.pop("__key__"), sample.pop("__url__")
            texts = {f".{name}".lower(): content for name, content in sample.items()}
            json, txt = (texts[name].decode(errors="backslashreplace") if name in texts else None for name in _TEXTS)
            images = [
                {"path": f"{key}.{name}", "bytes": content}
                for name, content in sample.items()
                if f".{name}".lower().endswith(SUFFIXES)
            ]
            yield {"__key__": key, "__url__": url, "images": images, "json": json, "txt": txt}


def row_of_sample(raw: Any) -> Any:
    """The row of a sample of [`Shards`]; any other row unchanged.

    The columns are those of its .json file; `caption` is its .txt file; images in the shard replace named ones.
    """
    if not isinstance(raw, dict) or raw.keys() != _SAMPLE.keys():
        return raw
    row = {} if raw["json"] is None else loaded(raw["json"])
    if not isinstance(row, dict):
        return row
    if raw["images"]:
        row = {column: value for column, value in row.items() if column != "image"} | {"images": raw["images"]}
    return row if raw["txt"] is None else {"caption": raw["txt"], **row}
