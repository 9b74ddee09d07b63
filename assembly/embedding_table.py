# SPDX-License-Identifier: Apache-2.0
"""The token-embedding matrix of a checkpoint, read without its other tensors, some rows at a time.

Of a safetensors file only the header and the bytes of one tensor are read, on the Hub too: `safetensors` opens local
files only, and `huggingface_hub` does not tell how long the header is, from which the tensors' offsets count.
"""

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from huggingface_hub import HfApi, HfFileSystem
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.utils import cached_file

from ..checkpoint.find import find_model
from ..checkpoint.loading import AGAIN, loading
from ..checkpoint.names import INDEX, PICKLES, WEIGHTS
from ..checkpoint.opening import Checkpoint
from ..checkpoint.untrusted import check_files, check_inside, json_object, shards
from ..modeling_normalign_llava import embedding_row_norms


_NAMES = ("embed_tokens", "wte", "word_embeddings", "tok_embeddings", "embed_in")
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_CHUNK_BYTES = 32 * 2**20
_LARGEST_HEADER = 100 * 2**20  # the format's own limit


class EmbeddingRows(NamedTuple):
    """An embedding matrix `(V, d)`: its name, L2 norms of its rows `(V,)` in float64, and d.

    `config` is None if transformers does not know the model, `tokenizer` if there is none.
    """

    tensor: str
    norms: Tensor
    hidden_size: int
    config: PreTrainedConfig | None
    tokenizer: PreTrainedTokenizerBase | None


def read_embeddings(model: str, revision: str | None = None) -> EmbeddingRows:
    """Reads the token embeddings of a folder, a weight file or a Hub repository."""
    source, commit = find_model(model, revision)
    path = Path(source)
    folder = path.parent if path.is_file() else path
    if not path.exists():
        files = HfApi().list_repo_files(model, revision=commit)
    else:
        files = [path.name] if path.is_file() else sorted(entry.name for entry in path.iterdir())
        for name in files:
            check_inside(folder / name)
    weights = _weight_file(model, files)
    source = str(folder) if path.exists() else model
    opened, tokenizer = Checkpoint(source, commit, check_files(source, commit)), None
    # Only the texts of tokens depend on it.
    with suppress(Exception), loading(f"The tokenizer of {source}"):
        tokenizer = AutoTokenizer.from_pretrained(source, revision=commit, trust_remote_code=False)
    config = opened.config if opened.model_type in CONFIG_MAPPING else None
    if weights == INDEX:
        index = json_object(Path(cached_file(source, INDEX, revision=commit)).read_bytes(), f"{INDEX} of {model}")
        shards(index, f"{INDEX} of {model}")
        weights = index["weight_map"][_embedding_name(model, index["weight_map"])]
    where = f"{weights} of {model}"
    # Without read-ahead only the requested bytes are fetched.
    hub = None if path.exists() else HfFileSystem().open(f"{model}/{weights}", revision=commit, cache_type="none")
    with loading(where), hub or (folder / weights).open("rb") as file:
        return EmbeddingRows(*_safetensors(model, file, where), config, tokenizer)


def _weight_file(model: str, files: list[str]) -> str:
    for standard in (INDEX, WEIGHTS):
        if standard in files:
            return standard
    single = [name for name in files if name.endswith(".safetensors")]
    if len(single) == 1:
        return single[0]
    if single:
        raise ValueError(f"{model} has {len(single)} .safetensors files and no index: {', '.join(single)}. Name one.")
    raise ValueError(
        f"{model} has no weights in safetensors among {', '.join(files) or 'no files'}. Pickled weights "
        f"(*{', *'.join(PICKLES)}) run code when read: load the model where you trust it, and save it again."
    )


def _embedding_name(model: str, names: Iterable[str]) -> str:
    tables = [name for name in names if name.split(".")[-2:] in [[table, "weight"] for table in _NAMES]]
    # Layers that predict further tokens repeat the table (DeepSeek-V3).
    tables = [name for name in tables if ".layers." not in name]
    tables = [name for name in tables if "language_model." in name] or tables
    if len(tables) != 1:
        raise ValueError(
            f"{model} has {len(tables)} tensors called {' or '.join(_NAMES)} (.weight), of which one would be its "
            f"embedding: {', '.join(tables) or 'none'}. Name a language model alone; for an adapter, its base model."
        )
    return tables[0]


def _safetensors(model: str, file: BinaryIO, where: str) -> tuple[str, Tensor, int]:
    """Name, row norms `(V,)` and width of the token embedding in an open safetensors file."""
    start = 8 + int.from_bytes(file.read(8), "little")  # of the tensors' bytes
    if not 8 < start <= _LARGEST_HEADER:
        raise ValueError(f"{where} is not a safetensors file. {AGAIN}")
    header = json_object(file.read(start - 8), f"The header of {where}")
    name = _embedding_name(model, header)
    kind, shape, (begin, stop) = (header[name][key] for key in ("dtype", "shape", "data_offsets"))
    if kind not in _DTYPES or len(shape) != 2 or min(shape) < 1:
        raise ValueError(
            f"{name} of {model} is {kind} of shape {shape}: quantized, or not a matrix of {', '.join(_DTYPES)}. "
            "Measure the checkpoint that was quantized."
        )
    (rows, width), dtype = shape, _DTYPES[kind]
    if stop - begin != rows * width * dtype.itemsize or start + stop > file.seek(0, os.SEEK_END):
        raise ValueError(f"{where} is damaged: {name} is {header[name]} by its header. {AGAIN}")
    file.seek(start + begin)
    step, norms = max(1, _CHUNK_BYTES // (width * dtype.itemsize)), []
    for first in range(0, rows, step):
        content = bytearray(file.read(min(step, rows - first) * width * dtype.itemsize))
        norms.append(embedding_row_norms(torch.frombuffer(content, dtype=dtype).view(-1, width)))
    return name, torch.cat(norms), width
