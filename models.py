# SPDX-License-Identifier: Apache-2.0
"""Any model by its name: a checkpoint of this package or of transformers, or an adapter.

Diagnosing, evaluating and asking open models here.
"""

import inspect
from dataclasses import dataclass, replace
from functools import cached_property
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

from . import modeling_normalign_llava  # noqa: F401  (so that our classes need no remote code)
from .assembly.adapter import Adapter, open_adapter
from .checkpoint.files import ADAPTER_CONFIG
from .checkpoint.opening import Checkpoint, open_checkpoint
from .checkpoint.precision import dtype_to_load, four_bits, torch_dtype
from .configuration_normalign_llava import NormAlignLlavaConfig
from .errors import check_installed


MODEL_CLASSES = {
    AutoModelForImageTextToText: MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM: MODEL_FOR_CAUSAL_LM_MAPPING,
}
"""By the class that loads models, the configurations of its models. The first class that fits
is used."""


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """How a model is opened and loaded.

    Attributes:
        dtype: A dtype's name, or "auto" for the checkpoint's own. An adapter does not use it.
        load_in_4bit: Quantize the decoder's layers, see [`four_bits`]. An adapter does not use it.
        trust_remote_code: Run the checkpoint's code, if transformers lacks its architecture.
        base, base_quantization: The base of an adapter and its quantization, see [`open_adapter`].
    """

    dtype: str = "auto"
    load_in_4bit: bool = False
    trust_remote_code: bool = False
    base: str | None = None
    base_quantization: str | None = None


@dataclass(frozen=True)
class ModelHandle:
    """A model before its weights are loaded.

    Attributes:
        name: The folder's name without the folders above it, or the Hub id.
        checkpoint: What it is loaded from. For an adapter, only its `name` is set: the folder.
        config: The model's configuration.
        processor: The processor, or None for a language model.
        options: How it is loaded.
        model_class: The class that loads the weights, or None for an adapter.
        adapter: The adapter, if it is one. `load` puts it on its base as in training.
    """

    name: str
    checkpoint: Checkpoint
    config: PreTrainedConfig
    processor: ProcessorMixin | None
    options: ModelOptions
    model_class: Any = None
    adapter: Adapter | None = None

    def load(self) -> PreTrainedModel:
        """Loads the weights, in eval mode, on a GPU if there is one.

        Raises:
            ValueError: The files are damaged or lack tensors, or no dtype has the options' name.
            ImportError: The options ask for 4 bits, but bitsandbytes is not installed.
        """
        if self.adapter:
            return self.adapter.load().get_base_model()
        dtype, quantization = self.fetched_precision
        model = self.checkpoint.load(
            self.model_class,
            dtype,
            config=self.config,
            device_map="auto" if torch.cuda.is_available() else None,
            quantization_config=quantization,
        )
        return model.eval()

    @cached_property
    def fetched_precision(self) -> tuple[str | torch.dtype, BitsAndBytesConfig | None]:
        """The dtype and quantization that `load` uses for a model that is not an adapter.

        They are found once, since free memory changes. Weights are fetched from the Hub, because
        [`dtype_to_load`] needs their size.

        Raises:
            ValueError: No dtype has the options' name, or the files cannot be read.
            OSError: The weights cannot be fetched.
            ImportError: The options ask for 4 bits, but bitsandbytes is not installed.
        """
        dtype = torch_dtype(self.options.dtype)
        if not self.options.load_in_4bit:
            return dtype_to_load(dtype, self.config, self.checkpoint.fetched_weight_bytes), None
        check_installed("bitsandbytes", "qlora", "Quantizing to 4 bits")
        model = self.checkpoint.without_weights(self.model_class, self.config)
        quantization = four_bits(model, dtype)
        return quantization.bnb_4bit_compute_dtype, quantization


def resolve_model(
    model: str, options: ModelOptions = ModelOptions(), *, revision: str | None = None
) -> ModelHandle:
    """Reads what a folder or Hub id is, and loads its configuration and processor, not its weights.

    Args:
        model: The folder or Hub id of a model, or the folder of an adapter.
        options: Whether its code may run, the base of an adapter, and how `load` loads it.
        revision: Branch, tag or commit of a Hub id.

    Raises:
        ValueError: The kind of model is not known, its code is not trusted, its files do not fit
            each other, or a base is given for a model that is not an adapter.
        OSError: The files do not exist, or cannot be fetched.
        ImportError: Its processor needs a package that is not installed.
    """
    path = Path(model).expanduser()
    name = path.resolve().name if path.exists() else model
    if (path / ADAPTER_CONFIG).is_file():
        adapter = open_adapter(path, options.base, options.base_quantization)
        folder = Checkpoint(str(path), None, {})
        return ModelHandle(
            name, folder, adapter.config, adapter.processor, options, adapter=adapter
        )
    if options.base or options.base_quantization:
        raise ValueError(f"{name} is not an adapter. Leave out --base and --base-quantization.")
    opened = open_checkpoint(model, revision)
    remote_classes = opened.stored.get("auto_map", {})
    if opened.model_type in CONFIG_MAPPING:
        remote_classes = {}
    if remote_classes and not options.trust_remote_code:
        raise ValueError(
            f"{name} is a {opened.model_type!r} model. transformers does not know it, and it comes "
            "with its own code. Read that code, and pass --trust-remote-code if you trust it."
        )
    opened = replace(opened, trust_remote_code=bool(remote_classes))
    config = opened.config
    for model_class, mapping in MODEL_CLASSES.items():
        if model_class.__name__ in remote_classes or type(config) in mapping:
            break
    else:
        raise ValueError(
            f"{name} is a {config.model_type!r} model. Give a vision-language model "
            "(AutoModelForImageTextToText) or a language model (AutoModelForCausalLM)."
        )
    is_remote_multimodal = bool(remote_classes) and "vision_config" in opened.stored
    processor = None
    if config.model_type == NormAlignLlavaConfig.model_type:
        processor = opened.processor
    elif model_class is AutoModelForImageTextToText or is_remote_multimodal:
        processor = opened.preprocessor(_processor_class(config))
    return ModelHandle(name, opened, config, processor, options, model_class)


def require_processor(handle: ModelHandle) -> ProcessorMixin:
    """Returns a model's processor. Raises ValueError if the model is a language model."""
    if handle.processor is None:
        raise ValueError(
            f"{handle.name} is a language model. Give a vision-language model. "
            f"`normalign gain {handle.checkpoint.name}` measures a language model's embeddings."
        )
    return handle.processor


def _processor_class(config: PreTrainedConfig) -> Any:
    """Returns the class that loads a processor.

    Without torchvision, a processor's optional processor of videos is left out: it needs
    torchvision.
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
