# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Norms of token embeddings: of a base language model and its vision-language descendant (tables 6 to 8)."""

from pathlib import Path

from accelerate.utils import align_module_device
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...assembly.embedding_table import known_config
from ...assembly.gain import counted_rows, embedding_statistics
from ...modeling_normalign_llava import embedding_row_norms, mean_embedding_norm
from ..report import EmbeddingTable, Interface, Moments, Report, TopToken


def embedding_table_of(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None, *, name: str, top: int = 10
) -> EmbeddingTable:
    """The table of a model in memory, which may be sharded or offloaded, without the image token's row."""
    embeddings = model.get_input_embeddings()
    with align_module_device(embeddings):
        norms = embedding_row_norms(embeddings.weight)
    image_token = getattr(model.config, "image_token_id", None)  # of a vision-language model
    counts = counted_rows(norms, image_token)
    mean = mean_embedding_norm(norms, (~counts).nonzero().flatten().tolist())
    rows = int(counts.sum())
    largest = norms.where(counts, -1.0).topk(min(top, rows))

    def text(row: int) -> str | None:
        return None if tokenizer is None or row >= len(tokenizer) else str(tokenizer.decode([row]))

    return EmbeddingTable(
        model=name,
        mean=mean,
        std=norms[counts].std(correction=0).item(),
        rows=rows,
        top=[TopToken(row, text(row), norm) for norm, row in zip(*(each.tolist() for each in largest), strict=True)],
    )


def probe_language(
    model: str | Path, *, name: str | None = None, top: int = 10, revision: str | None = None
) -> Report:
    """Norms of the embeddings of a language model alone, as stored and as its decoder receives them.

    Takes what [`~normalign_llava.assembly.gain.embedding_statistics`] does, and raises the same. The report has
    `embeddings`, and of `interface` `vocabulary_raw`, `vocabulary` and `scale`; `left_out` names the rest.
    """
    statistics = embedding_statistics(str(model), top=top, revision=revision)
    scale, path = statistics.scale, Path(model).expanduser()
    table = EmbeddingTable(
        model=name or (path.resolve().name if path.exists() else str(model)),
        mean=statistics.raw_mean,
        std=statistics.std,
        rows=statistics.rows - statistics.zero_rows - statistics.excluded_rows,
        top=[TopToken(*token) for token in statistics.top],
    )
    config = known_config(str(path.parent if path.is_file() else path if path.exists() else model), revision)
    left_out = [
        "Visual tokens, the projector and the ratio of norms: a language model alone has none of them.",
        "Norms and rotation in depth, and attention: only the token embeddings were read.",
    ]
    if statistics.model_type is None:
        left_out.append("Any scale of embeddings in the decoder: transformers knows no configuration; 1 is assumed.")
    return Report(
        model=table.model,
        model_type=statistics.model_type or "unknown",
        dtype=str(config.dtype).removeprefix("torch.") if config and config.dtype else "unknown",
        hidden_size=statistics.hidden_size,
        interface=Interface(
            vocabulary_raw=Moments(table.mean, table.std, table.rows),
            vocabulary=Moments(scale * table.mean, scale * table.std, table.rows),
            scale=scale,
        ),
        embeddings=table,
        left_out=left_out,
    )
