# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Norms of token embeddings: of a base language model and its vision-language descendant (tables 6 to 8)."""

from pathlib import Path

from accelerate.utils import align_module_device
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...assembly.embedding_table import EmbeddingRows, known_config
from ...assembly.gain import EmbeddingStatistics, embedding_statistics, statistics_of
from ...modeling_normalign_llava import embedding_row_norms
from ..report import EmbeddingTable, Interface, Moments, Report, TopToken


def embedding_table_of(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None, *, name: str, top: int = 10
) -> EmbeddingTable:
    """The table of a model in memory, which may be sharded or offloaded, without the image token's row."""
    embeddings = model.get_input_embeddings()
    with align_module_device(embeddings):
        norms = embedding_row_norms(embeddings.weight)

    def text(row: int) -> str | None:
        return None if tokenizer is None or row >= len(tokenizer) else str(tokenizer.decode([row]))

    rows = EmbeddingRows("", norms, model.config.get_text_config().hidden_size, model.config, text)
    return _table(statistics_of(rows, name, top), name)


def probe_language(
    model: str | Path, *, name: str | None = None, top: int = 10, revision: str | None = None
) -> Report:
    """Norms of the embeddings of a language model alone, as stored and as its decoder receives them.

    Takes what [`~normalign_llava.assembly.gain.embedding_statistics`] does, and raises the same. The report has
    `embeddings`, and of `interface` `vocabulary_raw`, `vocabulary` and `scale`; `left_out` names the rest.
    """
    statistics = embedding_statistics(str(model), top=top, revision=revision)
    scale, path = statistics.scale, Path(model).expanduser()
    table = _table(statistics, name or (path.resolve().name if path.exists() else str(model)))
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


def _table(statistics: EmbeddingStatistics, name: str) -> EmbeddingTable:
    return EmbeddingTable(
        model=name,
        mean=statistics.raw_mean,
        std=statistics.std,
        rows=statistics.rows - statistics.zero_rows - statistics.excluded_rows,
        top=[TopToken(*token) for token in statistics.top],
    )
