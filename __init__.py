"""NormAlign-LLaVA: vision-language models whose visual tokens have the norm of text embeddings.

Names are imported on first use: `import normalign_llava` and the command line start without torch.
Importing `normalign_llava.modeling_normalign_llava` adds it to transformers' Auto classes.
"""

from importlib import import_module
from typing import TYPE_CHECKING


__version__ = "0.1.0"

_EXPORTS = {
    # The architecture
    "NormAlignLlavaConfig": "configuration_normalign_llava",
    "GlobalWeightCompensatedLayerNorm": "modeling_normalign_llava",
    "GlobalWeightCompensatedRMSNorm": "modeling_normalign_llava",
    "NormAlignLlavaForConditionalGeneration": "modeling_normalign_llava",
    "NormAlignLlavaModel": "modeling_normalign_llava",
    "mean_embedding_norm": "modeling_normalign_llava",
    # Checkpoints
    "build_checkpoint": "assembly.build",
    "retrofit_checkpoint": "assembly.build",
    "merge_adapter": "assembly.merge",
    "embedding_statistics": "assembly.gain",
    "export_gguf": "export.run",
    "half_precision_pays": "checkpoint.precision",
    "stored_tensors": "checkpoint.weights",
    "write_weights": "checkpoint.weights",
    "publish": "hub_cards.push.publish",
    # Training
    "Checks": "data.rows.checks",
    "ConversationCollator": "train.collator",
    "DataArguments": "data.sources.arguments",
    "ModelArguments": "train.options",
    "NormAlignConfig": "train.options",
    "NormAlignTrainer": "train.trainer",
    "load_data": "data.sources.mixtures",
    "make_trainer": "train.run",
    "option_words": "quickstart.train:words",
    "parse_options": "train.options:parse",
    "prepare_rows": "data.sources.mixtures",
    "recipe_options": "quickstart.train:stage",
    "run_training": "train.run:train",
    "static_bytes": "train.modules.sizes",
    "train_stage": "quickstart.train",
    # Measuring
    "AskOptions": "evaluation.ask",
    "Difference": "evaluation.compare",
    "Evaluation": "evaluation.results",
    "ModelScores": "evaluation.compare",
    "ask": "evaluation.ask",
    "compare_models": "evaluation.compare",
    "evaluate": "evaluation.run",
    "load_samples": "diagnose.data",
    "over_seeds": "evaluation.compare",
    "paper_tables": "diagnose.report",
    "probe": "diagnose.measure.probe",
    "read_scores": "evaluation.compare",
    "read_evaluations": "evaluation.results",
    "sample_batches": "diagnose.data:batches",
    "without_spread": "evaluation.compare",
    # Real parts and data without the Hub
    "DATA_FEATURES": "fetched.easy_vqa",
    "Question": "fetched.easy_vqa",
    "conversation": "fetched.easy_vqa",
    "convert_language": "fetched.convert",
    "convert_vision": "fetched.convert",
    "easy_vqa": "fetched.easy_vqa",
    "load_image": "fetched.easy_vqa",
    "training_data": "fetched.easy_vqa",
    "write_stage_data": "quickstart.train",
}
"""The public names: the module of each, and its name there if that is another."""

__all__ = ["__version__", *_EXPORTS]  # noqa: PLE0604

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


def __getattr__(name: str):
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module_name, _, own_name = _EXPORTS[name].partition(":")
    return getattr(import_module(f".{module_name}", __name__), own_name or name)


def __dir__():
    return sorted(__all__)
