# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""N_text and the gain of a checkpoint, read from its embedding tensor alone: `normalign gain MODEL`.

Local or on the Hub, a safetensors file is asked for its header and for the bytes of one tensor, some rows at a time.
"""

import json
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import torch
from huggingface_hub import HfFileSystem
from rich.table import Table
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, AutoTokenizer, PreTrainedConfig

from ..checkpoint.find import hub_model
from ..checkpoint.loading import AGAIN, loading
from ..checkpoint.names import INDEX, PICKLES, WEIGHTS
from ..checkpoint.untrusted import check_files, check_inside, json_object, shards
from ..configuration_normalign_llava import NormAlignLlavaConfig
from ..modeling_normalign_llava import embedding_row_norms, embedding_scales, mean_embedding_norm


_NAMES = ("embed_tokens", "wte", "word_embeddings", "tok_embeddings", "embed_in")
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_CHUNK_BYTES = 32 * 2**20

Opener = Callable[[str], IO[bytes]]  # file name -> the file, seekable
TokenText = Callable[[int], str | None]  # row of the embedding matrix -> text of the token


@dataclass(frozen=True)
class EmbeddingStatistics:
    """Norms of a token-embedding matrix `(V, d)`, and the gain that follows from them.

    Rows that are all zero, the image token's row and the vocabulary padding that repeats it do not count.

    Attributes:
        model, tensor: What was measured, and the name of its embedding tensor.
        model_type: The language model's; `None` without a configuration that transformers knows (`scale` is then 1).
        n_text: N_text, the mean norm with which text embeddings enter the decoder (eq. 11).
        gain: What the projector's norm starts from: N_text / sqrt(d), but without a factor that the language model
            applies to visual tokens too (Granite).
        scale: What text embeddings are multiplied by on the way in, so that `n_text = scale * raw_mean`.
        raw_mean, std: Mean and standard deviation of the L2 norms of the rows as stored.
        rows, zero_rows, excluded_rows: V, how many are all zero, how many belong to the image token.
        hidden_size: d.
        top: Token id, text (`None` without a tokenizer) and norm as stored of the rows of largest norm, largest first.
    """

    model: str
    tensor: str
    model_type: str | None
    n_text: float
    gain: float
    scale: float
    raw_mean: float
    std: float
    rows: int
    zero_rows: int
    excluded_rows: int
    hidden_size: int
    top: list[tuple[int, str | None, float]]

    def to_json(self) -> str:
        """All attributes, as a JSON object."""
        return json.dumps(asdict(self), indent=2)

    def tables(self) -> list[Table]:
        """For a terminal: the figures, and the tokens of largest norm if any were asked for."""
        figures = Table(title=self.model, show_header=False)
        scale = f"{self.scale:.4g}" if self.model_type else "1 (assumed: no configuration that transformers knows)"
        for name, value in (
            ("embedding tensor", self.tensor),
            ("language model", self.model_type or "unknown"),
            ("N_text, entering the decoder", f"{self.n_text:.3f}"),
            ("scale on the way in", scale),
            ("row norm as stored, mean and std", f"{self.raw_mean:.4g}, {self.std:.4g}"),
            ("rows (all zero; excluded)", f"{self.rows:,} ({self.zero_rows:,}; {self.excluded_rows:,})"),
            ("d", f"{self.hidden_size:,}"),
            ("gain", f"{self.gain:.4f}"),
        ):
            figures.add_row(name, value)
        if self.top and all(text is None for _, text, _ in self.top):
            figures.add_row("tokenizer", "none that loads: tokens have no text")
        tokens = Table("id", "token", "norm", title="Tokens of largest norm")
        for token_id, text, norm in self.top:
            tokens.add_row(str(token_id), "" if text is None else repr(text), f"{norm:.3f}")
        return [figures, tokens] if self.top else [figures]


def counted_rows(norms: Tensor, image_token: int | None) -> Tensor:
    """Which rows of an embedding matrix count, by their norms `(V,)`: boolean `(V,)`.

    Not those that are all zero, and of a vision-language model neither the image token's nor the padding that repeats
    it, whose norm is the same to the last bit: as in `align_projector_norm`.
    """
    added = norms[:0] if image_token is None else norms[image_token : image_token + 1]
    return (norms != 0) & ~torch.isin(norms, added)


def initial_gain(config: NormAlignLlavaConfig, n_text: float) -> float:
    """What every element of the gain starts from (eq. 11), as `align_projector_norm` sets it.

    Args:
        config: Says whether the gain is aligned, and how the language model scales its embeddings.
        n_text: N_text as it enters the decoder.
    """
    _, scale_all = embedding_scales(config.text_config)
    return 1.0 if config.projector_gain_init == "one" else n_text / scale_all / config.text_config.hidden_size**0.5


def embedding_statistics(model: str, *, top: int = 10, revision: str | None = None) -> EmbeddingStatistics:
    """Measures the token embeddings of a language model, a LLaVA or a NormAlign-LLaVA, reading no other tensor.

    Args:
        model: A folder with safetensors, sharded or not, or with one GGUF file; the path of such a file; or a Hub
            repository, of whose weights only the tensor's byte range is requested (safetensors only).
        top: How many tokens of largest norm to name.
        revision: Branch, tag or commit of the Hub repository.

    Raises:
        ValueError: `model` is not found or has no weights that can be read; no tensor, or more than one, may be its
            token embedding; the tensor is quantized; rows that count have NaN or infinite values; no row counts.
    """
    path = Path(model).expanduser()
    source, revision, files, open_file = _local(path) if path.exists() else _hub(model, revision)
    weights = _weight_file(model, files)
    if weights.endswith(".gguf"):
        if not path.exists():
            raise ValueError(f"{model} has GGUF weights only, which cannot be read in part. Download {weights} first.")
        config, tensor, norms, hidden_size, text_of = _gguf(Path(source) / weights)
    else:
        config, text_of = _config(source, revision), _tokenizer(source, revision)
        tensor, norms, hidden_size = _safetensors(model, weights, open_file)

    text_config = None if config is None else config.get_text_config()
    scale_text, scale_all = (1.0, 1.0) if text_config is None else embedding_scales(text_config)
    image_token = getattr(config, "image_token_id", None)  # of a vision-language model
    counts = counted_rows(norms, image_token)
    raw_mean = mean_embedding_norm(norms, (~counts).nonzero().flatten().tolist())
    largest = norms.where(counts, -1.0).topk(min(top, int(counts.sum())))
    return EmbeddingStatistics(
        model=model,
        tensor=tensor,
        model_type=None if text_config is None else text_config.model_type,
        n_text=raw_mean * scale_text * scale_all,
        gain=raw_mean * scale_text / hidden_size**0.5,
        scale=scale_text * scale_all,
        raw_mean=raw_mean,
        std=norms[counts].std(correction=0).item(),
        rows=len(norms),
        zero_rows=int((norms == 0).sum()),
        excluded_rows=int((norms != 0).sum() - counts.sum()),
        hidden_size=hidden_size,
        top=[(row, text_of(row), norm) for norm, row in zip(*(each.tolist() for each in largest), strict=True)],
    )


def _local(path: Path) -> tuple[str, None, list[str], Opener]:
    folder = path if path.is_dir() else path.parent
    files = sorted(entry.name for entry in folder.iterdir()) if path.is_dir() else [path.name]
    for name in files if path.is_dir() else ():
        check_inside(folder / name)
    return str(folder), None, files, lambda name: (folder / name).open("rb")


def _hub(model: str, revision: str | None) -> tuple[str, str | None, list[str], Opener]:
    info = hub_model(model, revision)
    # By commit, so that every later request sees the same files; without a cache, so that it is for what is read only.
    system, commit = HfFileSystem(), info.sha
    files = [sibling.rfilename for sibling in info.siblings or []]
    return model, commit, files, lambda name: system.open(f"{model}/{name}", revision=commit, cache_type="none")


def _weight_file(model: str, files: list[str]) -> str:
    for standard in (INDEX, WEIGHTS):
        if standard in files:
            return standard
    for suffix in (".safetensors", ".gguf"):
        found = [name for name in files if name.endswith(suffix)]
        if len(found) == 1:
            return found[0]
        if found:
            raise ValueError(f"{model} has {len(found)} {suffix} files and no index: {', '.join(found)}. Name one.")
    if pickles := [name for name in files if name.endswith(PICKLES)]:
        raise ValueError(
            f"{model} has pickled weights only ({', '.join(pickles)}), which run code when read and cannot be read in "
            "part. Load it with transformers and save it again: that writes safetensors."
        )
    raise ValueError(f"{model} has no weights: no safetensors or GGUF file among {', '.join(files) or 'no files'}.")


def _embedding_name(model: str, names: Iterable[str]) -> str:
    found = [name for name in names if name.split(".")[-2:] in [[each, "weight"] for each in _NAMES]]
    # Layers that predict further tokens repeat the table (DeepSeek-V3).
    found = [name for name in found if ".layers." not in name]
    found = [name for name in found if "language_model." in name] or found
    if len(found) > 1:
        raise ValueError(
            f"{model} has {len(found)} tensors that may be its token embedding: {', '.join(found)}. Measure a "
            "checkpoint of the language model alone."
        )
    if not found:
        raise ValueError(
            f"{model} has no token embedding: no tensor is called {' or '.join(_NAMES)} (.weight). Name a language "
            "model or, for an adapter, its base model."
        )
    return found[0]


def _safetensors(model: str, weights: str, open_file: Opener) -> tuple[str, Tensor, int]:
    """Name, row norms `(V,)` and width of the token embedding in a safetensors file, or behind an index of several."""
    if weights == INDEX:
        with open_file(weights) as file:
            index = json_object(file.read(), f"{weights} of {model}")
        shards(index, f"{weights} of {model}")
        weights = index["weight_map"][_embedding_name(model, index["weight_map"])]
    with open_file(weights) as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(0)
        header_bytes = int.from_bytes(file.read(8), "little")
        if not 0 < header_bytes <= 100 * 2**20:  # the format's own limit
            raise ValueError(f"{weights} of {model} is no safetensors file (a Git LFS pointer?). Fetch it again.")
        header = json_object(file.read(header_bytes), f"The header of {weights} of {model}")
        name = _embedding_name(model, header)
        kind, shape, offsets = _entry(header[name])
        if kind not in _DTYPES or len(shape) != 2:
            raise ValueError(
                f"{name} of {model} is {kind} of shape {shape}: quantized, or no matrix of {', '.join(_DTYPES)}. "
                "Measure the checkpoint that was quantized."
            )
        (rows, width), dtype, norms = shape, _DTYPES[kind], []
        if rows < 1 or width < 1 or offsets[1] - offsets[0] != rows * width * dtype.itemsize:
            raise ValueError(f"{weights} of {model} is damaged: {name} is {header[name]} by its header. {AGAIN}")
        if 8 + header_bytes + offsets[1] > end:
            raise ValueError(f"{weights} of {model} ends within {name}: the file is cut off. Fetch it again.")
        file.seek(8 + header_bytes + offsets[0])
        chunk = max(1, _CHUNK_BYTES // (width * dtype.itemsize))
        for start in range(0, rows, chunk):
            data = bytearray(file.read(min(chunk, rows - start) * width * dtype.itemsize))
            norms.append(embedding_row_norms(torch.frombuffer(data, dtype=dtype).view(-1, width)))
    return name, torch.cat(norms), width


def _entry(entry: Any) -> tuple[str, list[int], list[int]]:
    """Type, shape and offsets of a tensor in a header; no shape, which fits nothing, where they are not there."""
    found = entry if isinstance(entry, dict) else {}
    numbers = [each if isinstance(each, list) else [] for each in (found.get("shape"), found.get("data_offsets"))]
    whole = len(numbers[1]) == 2 and all(type(number) is int for number in (*numbers[0], *numbers[1]))
    return str(found.get("dtype")), numbers[0] if whole else [], numbers[1]


def _gguf(path: Path) -> tuple[PreTrainedConfig | None, str, Tensor, int, TokenText]:
    """Configuration, then name, row norms `(V,)` and width of the token embedding, and the texts of the tokens."""
    try:
        from gguf import GGUFReader, dequantize
    except ImportError as error:
        raise ImportError(f"Reading {path} needs the package gguf: `pip install gguf`.") from error
    with loading(str(path)):
        reader = GGUFReader(path)
    tensor = next((tensor for tensor in reader.tensors if tensor.name == "token_embd.weight"), None)
    if tensor is None:
        raise ValueError(f"{path} has no token embedding (token_embd.weight). Name the GGUF file of a language model.")
    width = int(tensor.shape[0])
    chunk = max(1, _CHUNK_BYTES // (4 * width))
    parts = (tensor.data[start : start + chunk] for start in range(0, len(tensor.data), chunk))
    norms = [embedding_row_norms(torch.tensor(dequantize(part, tensor.tensor_type))) for part in parts]

    architecture = reader.fields["general.architecture"].contents()
    config: PreTrainedConfig | None = None
    with suppress(ValueError):  # names that only llama.cpp knows
        config = AutoConfig.for_model(architecture)
        config.get_text_config().hidden_size = width
        if multiplier := reader.fields.get(f"{architecture}.embedding_scale"):
            config.get_text_config().embedding_multiplier = multiplier.contents()
    tokens = reader.fields.get("tokenizer.ggml.tokens")
    return config, tensor.name, torch.cat(norms), width, lambda row: tokens and tokens.contents(row)


def _config(source: str, revision: str | None) -> PreTrainedConfig | None:
    if check_files(source, revision).get("model_type") not in CONFIG_MAPPING:
        return None  # none there, or one that needs code of its own
    with loading(f"The configuration of {source}"):
        return AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=False)


def _tokenizer(source: str, revision: str | None) -> TokenText:
    try:
        with loading(f"The tokenizer of {source}"):
            tokenizer = AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=False)
    except Exception:  # one fails to load in many ways, and only the texts of a few tokens hang on it
        return lambda row: None
    return lambda row: str(tokenizer.decode([row])) if row < len(tokenizer) else None
