# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Weights on disk: files of their own for language model, vision tower and projector, with the usual index.

Tensors are written one at a time, so that a model need not be in memory to be saved; `safetensors` writes whole files.
"""

import json
import math
import shutil
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from .files import write_json
from .names import INDEX


SHARD_BYTES = 5 * 10**9
"""Most bytes of one file, unless one tensor has more."""

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def save_settings(model: PreTrainedModel, folder: Path) -> None:
    """`save_pretrained` without the weights: configurations and code."""
    shows = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # it would show that no file is written
    try:
        model.save_pretrained(folder, state_dict={})
    finally:
        if shows:
            logging.enable_progress_bar()


def write_weights(folder: Path, layout: Mapping[str, Tensor], values: Iterable[tuple[str, Tensor]]) -> None:
    """Writes tensors into an empty folder, with the index.

    Args:
        layout: All tensors by name, for shapes and dtypes; on meta they may be.
        values: Name and value of each, in any order. They are cast to the dtype in `layout`.
    """
    files, places = shards_of(layout), {}
    with ExitStack() as opened:
        for file_name, names in files.items():
            # The format wants tensors one after the other; by size of their numbers, each begins at a multiple of it.
            names = sorted(names, key=lambda name: (-layout[name].itemsize, name))
            header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
            end = 0
            for name in names:
                begin, end = end, end + layout[name].nbytes
                kind, shape = _DTYPES[layout[name].dtype], list(layout[name].shape)
                header[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
            text = json.dumps(header, separators=(",", ":")).encode()
            text += b" " * (-len(text) % 8)
            file = opened.enter_context((folder / file_name).open("xb"))
            file.write(len(text).to_bytes(8, "little") + text)
            for name in names:
                places[name] = file, 8 + len(text) + header[name]["data_offsets"][0]
        for name, value in values:
            file, start = places.pop(name)
            value = value.detach().to("cpu", layout[name].dtype).contiguous().reshape(-1)
            file.seek(start)
            file.write(value.view(torch.uint8).numpy())
    if places:
        raise ValueError(f"{len(places)} tensors were not written, among them {min(places)}.")
    sizes = {"total_parameters": sum(math.prod(each.shape) for each in layout.values()), "total_size": size_of(layout)}
    weight_map = {name: file_name for file_name, names in files.items() for name in names}
    write_json(folder / INDEX, {"metadata": sizes, "weight_map": dict(sorted(weight_map.items()))})


def shards_of(layout: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """The names of the tensors in each file: those of one module, in the model's order, up to `SHARD_BYTES`."""
    modules: dict[str, list[list[str]]] = {}
    for name, tensor in layout.items():
        shards = modules.setdefault(_module_of(name), [[]])
        if shards[-1] and sum(layout[each].nbytes for each in shards[-1]) + tensor.nbytes > SHARD_BYTES:
            shards.append([])
        shards[-1].append(name)
    return {
        # Names by which transformers knows files that a later save replaces.
        f"model-{module}-{number:05}-of-{len(shards):05}.safetensors": names
        for module, shards in modules.items()
        for number, names in enumerate(shards, 1)
    }


def size_of(layout: Mapping[str, Tensor]) -> int:
    """Bytes of tensors."""
    return sum(each.nbytes for each in layout.values())


def check_space(folder: Path, size: int, remedy: str) -> None:
    """Raises ValueError if the file system of `folder`, which need not exist, has less than `size` bytes free."""
    folder = next(each for each in (folder.resolve(), *folder.resolve().parents) if each.exists())
    if (free := shutil.disk_usage(folder).free) < size:
        raise ValueError(f"{size / 1e9:.1f} GB are to be written, but {folder} has {free / 1e9:.1f} GB free. {remedy}")


def _module_of(name: str) -> str:
    return next((each for each in ("vision_tower", "multi_modal_projector") if f"{each}." in name), "language_model")
