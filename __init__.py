"""NormAlign-LLaVA: vision-language models whose visual tokens have the norm of text embeddings.

Names are imported on first use: `import normalign_llava` and the command line start without torch.
Importing `normalign_llava.modeling_normalign_llava` adds it to transformers' Auto classes.
"""

from importlib import import_module
from typing import TYPE_CHECKING


__version__ = "0.1.0"

_EXPORTS = {
    "NormAlignLlavaConfig": "configuration_normalign_llava",
    "GlobalWeightCompensatedLayerNorm": "modeling_normalign_llava",
    "GlobalWeightCompensatedRMSNorm": "modeling_normalign_llava",
    "NormAlignLlavaForConditionalGeneration": "modeling_normalign_llava",
    "NormAlignLlavaModel": "modeling_normalign_llava",
    "mean_embedding_norm": "modeling_normalign_llava",
    "build_checkpoint": "assembly.build",
    "retrofit_checkpoint": "assembly.build",
    "merge_adapter": "assembly.merge",
    "embedding_statistics": "assembly.gain",
    "export_gguf": "export.run",
    "half_precision_pays": "checkpoint.precision",
    "probe": "diagnose.measure.probe",
    "publish": "hub_cards.push.publish",
    "ConversationCollator": "train.collator",
    "NormAlignConfig": "train.options",
    "NormAlignTrainer": "train.trainer",
}

__all__ = ["__version__", *_EXPORTS]  # noqa: PLE0604

if TYPE_CHECKING:
    from .assembly.build import build_checkpoint, retrofit_checkpoint
    from .assembly.gain import embedding_statistics
    from .assembly.merge import merge_adapter
    from .checkpoint.precision import half_precision_pays
    from .configuration_normalign_llava import NormAlignLlavaConfig
    from .diagnose.measure.probe import probe
    from .export.run import export_gguf
    from .hub_cards.push.publish import publish
    from .modeling_normalign_llava import (
        GlobalWeightCompensatedLayerNorm,
        GlobalWeightCompensatedRMSNorm,
        NormAlignLlavaForConditionalGeneration,
        NormAlignLlavaModel,
        mean_embedding_norm,
    )
    from .train.collator import ConversationCollator
    from .train.options import NormAlignConfig
    from .train.trainer import NormAlignTrainer


def __getattr__(name: str):
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_EXPORTS[name]}", __name__), name)


def __dir__():
    return sorted(__all__)
