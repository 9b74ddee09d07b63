# SPDX-License-Identifier: Apache-2.0
"""Finds out from its configuration which kind of model a folder or Hub id is, and loads it."""

import inspect
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    PROCESSOR_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    BitsAndBytesConfig,
    PreTrainedConfig,
    PreTrainedModel,
    ProcessorMixin,
)
from transformers.utils import is_torchvision_available

from .. import modeling_normalign_llava  # noqa: F401  (so that our classes need no remote code)
from ..assembly.adapter import Adapter, open_adapter
from ..assembly.build import torch_dtype
from ..checkpoint.files import ADAPTER_CONFIG
from ..checkpoint.opening import Checkpoint, open_checkpoint
from ..checkpoint.precision import dtype_to_load, four_bits
from ..configuration_normalign_llava import NormAlignLlavaConfig
from ..extras import check_installed


MODEL_CLASSES = {
    AutoModelForImageTextToText: MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM: MODEL_FOR_CAUSAL_LM_MAPPING,
}
"""The classes that load models, the first that fits, and the configurations of their models."""


@dataclass(frozen=True)
class ModelHandle:
    """A model before its weights are loaded."""

    name: str  # folder or Hub id, without the folders above it
    checkpoint: Checkpoint  # the folder or Hub id to load it from; for an adapter, only its folder
    config: PreTrainedConfig
    processor: ProcessorMixin | None  # of a vision-language model
    model_class: Any = None  # the class that loads the weights; None for an adapter
    adapter: Adapter | None = None  # `load` puts it on its base as in training

    def load(
        self, *, dtype: str | torch.dtype = "auto", load_in_4bit: bool = False
    ) -> PreTrainedModel:
        """Loads the weights, in eval mode, on a GPU if there is one; see [`precision`]."""
        if self.adapter:
            return self.adapter.load().get_base_model()
        dtype, quantization = self.precision(dtype, load_in_4bit)
        model = self.checkpoint.load(
            self.model_class,
            dtype,
            config=self.config,
            device_map="auto" if torch.cuda.is_available() else None,
            quantization_config=quantization,
        )
        return model.eval()

    def precision(
        self, dtype: str | torch.dtype, load_in_4bit: bool
    ) -> tuple[str | torch.dtype, BitsAndBytesConfig | None]:
        """The dtype and quantization that `load` uses for a model that is not an adapter.

        See [`dtype_to_load`] and [`four_bits`].
        """
        dtype = torch_dtype(dtype)
        if not load_in_4bit:
            return dtype_to_load(dtype, self.config, self.checkpoint.weight_bytes), None
        check_installed("bitsandbytes", "qlora", "Quantizing to 4 bits")
        model = self.checkpoint.without_weights(self.model_class, self.config)
        quantization = four_bits(model, dtype)
        return quantization.bnb_4bit_compute_dtype, quantization


def resolve_model(
    model: str,
    revision: str | None = None,
    *,
    trust_remote_code: bool = False,
    base: str | None = None,
    base_quantization: str | None = None,
) -> ModelHandle:
    """Finds out what a folder, Hub id or adapter's folder is, and loads its processor.

    Args:
        model: The folder or Hub id.
        revision: Branch, tag or commit of a Hub id.
        trust_remote_code: Run the checkpoint's code, if transformers lacks its architecture.
        base, base_quantization: The base of an adapter and its quantization: [`open_adapter`].

    Raises:
        ValueError: The kind of model is not known, its code is not trusted, or a base is given for
            a model that is not an adapter.
    """
    path = Path(model).expanduser()
    name = path.resolve().name if path.exists() else model
    if (path / ADAPTER_CONFIG).is_file():
        adapter = open_adapter(path, base, base_quantization)
        folder = Checkpoint(str(path), None, {})
        return ModelHandle(name, folder, adapter.config, adapter.processor, adapter=adapter)
    if base or base_quantization:
        raise ValueError(f"{name} is no adapter. Leave out --base and --base-quantization.")
    opened = open_checkpoint(model, revision)
    remote_classes: Mapping[str, Any] = {}
    if opened.model_type not in CONFIG_MAPPING:
        remote_classes = opened.stored.get("auto_map", {})
    if remote_classes and not trust_remote_code:
        raise ValueError(
            f"{name} is a {opened.model_type!r} model, which transformers does not know; it comes "
            "with code of its own. Read that code, and pass --trust-remote-code if you trust it."
        )
    opened = replace(opened, trust_remote_code=bool(remote_classes))
    config = opened.config
    model_class = _model_class(name, config, remote_classes)
    is_remote_multimodal = bool(remote_classes) and "vision_config" in opened.stored
    processor = None
    if config.model_type == NormAlignLlavaConfig.model_type:
        processor = opened.processor
    elif model_class is AutoModelForImageTextToText or is_remote_multimodal:
        processor = opened.preprocessor(_processor_class(config))
    return ModelHandle(name, opened, config, processor, model_class)


def _model_class(name: str, config: PreTrainedConfig, remote_classes: Container[str]) -> Any:
    """Returns the class that loads a model: of vision-language models, or of language models.

    Raises ValueError if neither does.
    """
    for auto_class, mapping in MODEL_CLASSES.items():
        if auto_class.__name__ in remote_classes or type(config) in mapping:
            return auto_class
    raise ValueError(
        f"{name} is a {config.model_type!r} model. Give a vision-language model "
        "(AutoModelForImageTextToText) or a language model (AutoModelForCausalLM)."
    )


def _processor_class(config: PreTrainedConfig) -> Any:
    """Returns the class that loads a processor.

    Without torchvision, this is one that needs no processor of videos.
    """
    processor_class = PROCESSOR_MAPPING.get(type(config), AutoProcessor)
    videos = inspect.signature(processor_class.__init__).parameters.get("video_processor")
    # SmolVLM's video processor cannot be left out.
    if is_torchvision_available() or videos is None or videos.default is not None:
        return AutoProcessor
    attributes = [name for name in processor_class.get_attributes() if name != "video_processor"]
    overrides = {
        "__module__": processor_class.__module__,
        "get_attributes": staticmethod(lambda: attributes),
    }
    return type(processor_class.__name__, (processor_class,), overrides)
