"""NormAlign-LLaVA: vision-language models whose visual tokens have the norm of text embeddings.

Names are imported on first use: `import normalign_llava` and the command line start without torch.
Importing `normalign_llava.modeling_normalign_llava` adds it to transformers' Auto classes.
"""

import ast
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING


__version__ = "0.1.0"

if TYPE_CHECKING:
    from .assembly.build import build_checkpoint, retrofit_checkpoint
    from .assembly.gain import embedding_statistics
    from .assembly.merge import merge_adapter
    from .checkpoint.precision import half_precision_pays
    from .checkpoint.weights import stored_tensors, write_weights
    from .configuration_normalign_llava import NormAlignLlavaConfig
    from .data.rows.checks import Checks
    from .data.sources.arguments import DataArguments
    from .data.sources.mixtures import load_data, prepare_rows
    from .diagnose.data import batches as sample_batches, load_samples
    from .diagnose.measure.probe import probe
    from .diagnose.report import paper_tables
    from .evaluation.ask import AskOptions, ask
    from .evaluation.compare import (
        Difference,
        ModelScores,
        compare_models,
        over_seeds,
        read_scores,
        without_spread,
    )
    from .evaluation.results import Evaluation, read_evaluations
    from .evaluation.run import evaluate
    from .export.run import export_gguf
    from .fetched.convert import convert_language, convert_vision
    from .fetched.easy_vqa import (
        DATA_FEATURES,
        Question,
        conversation,
        easy_vqa,
        load_image,
        training_data,
    )
    from .hub_cards.push.publish import publish
    from .modeling_normalign_llava import (
        GlobalWeightCompensatedLayerNorm,
        GlobalWeightCompensatedRMSNorm,
        NormAlignLlavaForConditionalGeneration,
        NormAlignLlavaModel,
        mean_embedding_norm,
    )
    from .quickstart.train import (
        stage as recipe_options,
        train_stage,
        words as option_words,
        write_stage_data,
    )
    from .train.collator import ConversationCollator
    from .train.modules.sizes import static_bytes
    from .train.options import ModelArguments, NormAlignConfig, parse as parse_options
    from .train.run import make_trainer, train as run_training
    from .train.trainer import NormAlignTrainer


def _read_exports() -> dict[str, tuple[str | None, str]]:
    """Reads the imports above: for each public name, the module and the name there."""
    exports = {}
    for statement in ast.walk(ast.parse(Path(__file__).read_text(encoding="utf-8"))):
        if isinstance(statement, ast.ImportFrom) and statement.level:
            for alias in statement.names:
                exports[alias.asname or alias.name] = (statement.module, alias.name)
    return exports


_EXPORTS = _read_exports()
__all__ = ["__version__", *_EXPORTS]  # noqa: PLE0604


def __getattr__(name: str):
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module_name, own_name = _EXPORTS[name]
    return getattr(import_module(f".{module_name}", __name__), own_name)


def __dir__():
    return sorted(__all__)
