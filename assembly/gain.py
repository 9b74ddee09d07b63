# SPDX-License-Identifier: Apache-2.0
"""N_text and the gain of a checkpoint, from its token embeddings alone: `normalign gain MODEL`."""

from dataclasses import dataclass

import torch
from rich.table import Table
from torch import Tensor

from ..configuration_normalign_llava import embedding_scales
from ..modeling_normalign_llava import mean_embedding_norm
from .embedding_table import EmbeddingRows, read_embeddings


@dataclass(frozen=True)
class TopToken:
    """A row of an embedding matrix: its id, its text (None without a tokenizer), its L2 norm as stored."""

    id: int
    text: str | None
    norm: float


@dataclass(frozen=True)
class EmbeddingStatistics:
    """Norms of a token-embedding matrix `(V, d)`, and the gain that follows from them (tables 6 to 8).

    Rows that are all zero, the image token's row and vocabulary padding that repeats it do not count.

    Attributes:
        mean, std: Mean and standard deviation of the L2 norms of the rows as stored.
        rows: Number of rows that count.
        top: The rows of largest norm, largest first.
        tensor: Name of the embedding tensor; empty for a model in memory.
        model_type: The language model's; None without a configuration that transformers knows (`scale` is then 1).
        n_text: N_text, the mean norm with which text embeddings enter the decoder (eq. 11).
        gain: The start of the projector's gain: N_text / sqrt(d), without a factor that the language model applies to
            visual tokens too (Granite).
        scale: The factor on text embeddings on their way into the decoder: `n_text = scale * mean`.
        zero_rows, excluded_rows: Number of rows that are all zero, and of those of the image token.
        hidden_size: d.
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

    def tables(self) -> list[Table]:
        """Tables for the terminal: the numbers, and the tokens with the largest norms if `top` has any."""
        figures = Table(title=self.model, show_header=False)
        scale = f"{self.scale:.4g}" if self.model_type else "1 (assumed: no configuration that transformers knows)"
        for name, value in (
            ("embedding tensor", self.tensor),
            ("language model", self.model_type or "unknown"),
            ("N_text, entering the decoder", f"{self.n_text:.3f}"),
            ("scale on the way in", scale),
            ("row norm as stored, mean and std", f"{self.mean:.4g}, {self.std:.4g}"),
            ("rows counted (all zero; image token)", f"{self.rows:,} ({self.zero_rows:,}; {self.excluded_rows:,})"),
            ("d", f"{self.hidden_size:,}"),
            ("gain", f"{self.gain:.4f}"),
        ):
            figures.add_row(name, value)
        tokens = Table("id", "token", "norm", title="Tokens of largest norm")
        for token in self.top:
            tokens.add_row(str(token.id), "" if token.text is None else repr(token.text), f"{token.norm:.3f}")
        return [figures, tokens] if self.top else [figures]


def counted_rows(norms: Tensor, image_token: int | None) -> Tensor:
    """A mask `(V,)` of the rows of an embedding matrix that count, from their norms `(V,)`.

    Rows that are all zero do not count, nor the image token's row and padding that repeats it, which has the same norm
    to the last bit: as in `align_projector_norm`.
    """
    added = norms[:0] if image_token is None else norms[image_token : image_token + 1]
    return (norms != 0) & ~torch.isin(norms, added)


def embedding_statistics(model: str, *, top: int = 10, revision: str | None = None) -> EmbeddingStatistics:
    """Measures the token embeddings of a language model, a LLaVA or a NormAlign-LLaVA; reads no other tensor.

    Args:
        model: Folder with safetensors, sharded or not; the path of such a file; or a Hub repository, of whose weights
            only the embeddings are fetched.
        top: Number of tokens of largest norm to name.
        revision: Branch, tag or commit of the Hub repository.

    Raises:
        ValueError: `model` does not exist or has no weights that can be read; no tensor, or more than one, may be its
            token embedding; the tensor is quantized; rows that count have NaN or infinite values; no row counts.
    """
    return statistics_of(read_embeddings(model, revision), model, top)


def statistics_of(read: EmbeddingRows, model: str, top: int) -> EmbeddingStatistics:
    """[`embedding_statistics`] of embeddings that were read, or are in memory."""
    tensor, norms, hidden_size, config, tokenizer = read
    text_config = None if config is None else config.get_text_config()
    scale_text, scale_all = (1.0, 1.0) if text_config is None else embedding_scales(text_config)
    counts = counted_rows(norms, getattr(config, "image_token_id", None))
    mean = mean_embedding_norm(norms, (~counts).nonzero().flatten().tolist())
    largest = norms.where(counts, -1.0).topk(min(top, int(counts.sum())))

    top_rows = zip(*map(Tensor.tolist, largest), strict=True)

    def text(row: int) -> str | None:
        return str(tokenizer.decode([row])) if tokenizer and row < len(tokenizer) else None

    return EmbeddingStatistics(
        model=model,
        mean=mean,
        std=norms[counts].std(correction=0).item(),
        rows=int(counts.sum()),
        top=[TopToken(row, text(row), norm) for norm, row in top_rows],
        tensor=tensor,
        model_type=None if text_config is None else text_config.model_type,
        n_text=mean * scale_text * scale_all,
        gain=mean * scale_text / hidden_size**0.5,
        scale=scale_text * scale_all,
        zero_rows=int((norms == 0).sum()),
        excluded_rows=int((norms != 0).sum() - counts.sum()),
        hidden_size=hidden_size,
    )
