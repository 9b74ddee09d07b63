# SPDX-License-Identifier: Apache-2.0
"""N_text and the gain of a checkpoint, only from its token embeddings: `normalign gain MODEL`."""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from rich.console import RenderableType
from rich.table import Table
from safetensors import safe_open
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from ..checkpoint.opening import open_checkpoint
from ..checkpoint.untrusted import fetch_checked_weights, refuse_unreadable
from ..configuration_normalign_llava import embedding_scales
from ..console import Printed
from ..modeling_normalign_llava import embedding_row_norms, mean_embedding_norm, rows_of_token


_TABLES = ("embed_tokens", "wte", "word_embeddings", "tok_embeddings", "embed_in")


@dataclass(frozen=True)
class TopToken:
    """A row of an embedding matrix. `text` is None without a tokenizer."""

    id: int
    text: str | None
    norm: float


@dataclass(frozen=True)
class EmbeddingStatistics(Printed):
    """Norms of token embeddings `(V, hidden_size)`, and the gain that follows (tables 6-8).

    Rows that are all zero, the image token's row and padding that repeats it do not count.

    Attributes:
        mean, std: Mean and standard deviation of the L2 norms of the rows as stored.
        rows: Number of rows that count.
        top: The rows of largest norm, largest first.
        tensor: Name of the embedding tensor. Empty for a model in memory.
        model_type: The language model's. None if transformers does not know it: `scale` is then 1.
        n_text: N_text, the mean norm of text embeddings as they enter the decoder (eq. 11).
        gain: The start of the projector's gain: N_text / sqrt(hidden_size), without a factor that
            the language model applies to visual tokens too (Granite).
        scale: The factor on text embeddings on their way into the decoder: `n_text = scale * mean`.
        zero_rows, excluded_rows: Numbers of rows that are all zero, and of rows that have the image
            token's norm.
    """

    model: str
    mean: float
    std: float
    rows: int
    top: list[TopToken]
    tensor: str
    model_type: str | None
    n_text: float
    gain: float
    scale: float
    zero_rows: int
    excluded_rows: int
    hidden_size: int

    def tables(self) -> list[RenderableType]:
        """Returns the table of the numbers, and a table of the tokens in `top` if there are any."""
        tables = [self.renderable()]
        if self.top:
            token_table = Table("id", "token", "norm", title="Tokens of largest norm")
            for token in self.top:
                token_text = "" if token.text is None else repr(token.text)
                token_table.add_row(str(token.id), token_text, f"{token.norm:.3f}")
            tables.append(token_table)
        return tables


def embedding_statistics(
    model: str, *, top: int = 10, revision: str | None = None
) -> EmbeddingStatistics:
    """Measures the token embeddings of a language model or (NormAlign-)LLaVA.

    No other weights are read, and only the file with the embeddings is fetched.

    Args:
        model: Folder with safetensors, or Hub id.
        top: Number of tokens of largest norm to name.
        revision: Branch, tag or commit of the Hub repository.

    Raises:
        ValueError: If `model` has no weights that can be read, or not exactly one token embedding,
            or if that is quantized, has NaN or infinite values, or has no row that counts.
        OSError: If the Hub cannot be reached.
    """
    opened = open_checkpoint(model, revision)
    (weights_file,) = fetch_checked_weights(
        opened.name, opened.revision, partial(_require_embedding, model)
    )
    tokenizer = None
    with suppress(Exception):  # only the texts of tokens depend on it
        tokenizer = opened.preprocessor(AutoTokenizer)
    config = opened.config if opened.model_type in CONFIG_MAPPING else None
    with refuse_unreadable(str(weights_file)), safe_open(weights_file, "pt") as tensors:
        tensor_name = _require_embedding(model, tensors.keys())
        weight = tensors.get_tensor(tensor_name)  # mapped, not read yet
        row_norms = embedding_row_norms(weight)
        return statistics_of(model, tensor_name, row_norms, weight.shape[1], config, tokenizer, top)


def statistics_of(
    model: str,
    tensor: str,
    norms: Tensor,
    hidden_size: int,
    config: PreTrainedConfig | None,
    tokenizer: PreTrainedTokenizerBase | None,
    top: int = 10,
) -> EmbeddingStatistics:
    """Returns [`embedding_statistics`] of the L2 norms `(V,)` of a matrix's rows, float64.

    Raises ValueError if no row counts, or if one that counts is NaN or infinite.
    """
    model_type = None
    scale_text = 1.0
    scale_all = 1.0
    if config is not None:
        text_config = config.get_text_config()
        model_type = text_config.model_type
        scale_text, scale_all = embedding_scales(text_config)
    is_counted = counted_rows(norms, getattr(config, "image_token_id", None))
    number_of_rows = int(is_counted.sum())
    zero_rows = int((norms == 0).sum())
    mean_norm = mean_embedding_norm(norms, (~is_counted).nonzero().flatten().tolist())
    largest = norms.where(is_counted, -1.0).topk(min(top, number_of_rows))
    top_tokens = []
    for token_id in largest.indices.tolist():
        token_text = None
        if tokenizer and token_id < len(tokenizer):
            token_text = str(tokenizer.decode([token_id]))
        top_tokens.append(TopToken(token_id, token_text, norms[token_id].item()))
    return EmbeddingStatistics(
        model=model,
        mean=mean_norm,
        std=norms[is_counted].std(correction=0).item(),
        rows=number_of_rows,
        top=top_tokens,
        tensor=tensor,
        model_type=model_type,
        n_text=mean_norm * scale_text * scale_all,
        gain=mean_norm * scale_text / hidden_size**0.5,
        scale=scale_text * scale_all,
        zero_rows=zero_rows,
        excluded_rows=len(norms) - zero_rows - number_of_rows,
        hidden_size=hidden_size,
    )


def counted_rows(norms: Tensor, image_token: int | None) -> Tensor:
    """Returns a mask `(V,)` of the rows that count, by their norms `(V,)`.

    Rows of zeros, the image token's row and padding that repeats it do not count.
    """
    is_counted = norms != 0
    if image_token is not None:
        is_counted[rows_of_token(norms, image_token)] = False
    return is_counted


def _require_embedding(model: str, names: Iterable[str]) -> str:
    """Returns the token embedding among names of tensors. Raises ValueError if it is not clear."""
    endings = tuple(f".{table}.weight" for table in _TABLES)
    # Layers that predict further tokens repeat the table (DeepSeek-V3).
    candidates = [name for name in names if f".{name}".endswith(endings) and ".layers." not in name]
    if any("language_model." in name for name in candidates):
        candidates = [name for name in candidates if "language_model." in name]
    if len(candidates) != 1:
        listed = ", ".join(candidates) or f"none called {' or '.join(_TABLES)}"
        raise ValueError(
            f"{model} has {len(candidates)} tensors that may be its token embedding: {listed}. "
            "Name a language model by itself, or an adapter's base model."
        )
    return candidates[0]
