# SPDX-License-Identifier: Apache-2.0
"""The kind of model that a folder or Hub id is, by its configuration; and loading it."""

import inspect
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
from ..errors import check_installed


@dataclass(frozen=True)
class ModelHandle:
    """A model before its weights are loaded."""

    name: str  # folder or Hub id, without the folders above it
    checkpoint: Checkpoint  # the folder or Hub id to load it from; of an adapter, its folder alone
    config: PreTrainedConfig
    processor: ProcessorMixin | None  # of a vision-language model
    model_class: Any = None  # the class that loads the weights; None for an adapter
    adapter: Adapter | None = None  # put on its base as in training, whatever `load` is told

    def load(
        self, *, dtype: str | torch.dtype = "auto", load_in_4bit: bool = False
    ) -> PreTrainedModel:
        """Loads the weights, in eval mode, on a GPU if there is one; see [`precision`]."""
        if self.adapter:
            return self.adapter.load().get_base_model()
        dtype, quantization = self.precision(dtype, load_in_4bit)
        device = "auto" if torch.cuda.is_available() else None
        options = {"config": self.config, "device_map": device, "quantization_config": quantization}
        return self.checkpoint.load(self.model_class, dtype, **options).eval()

    def precision(
        self, dtype: str | torch.dtype, load_in_4bit: bool
    ) -> tuple[str | torch.dtype, BitsAndBytesConfig | None]:
        """What `load` loads a model in that is no adapter: [`dtype_to_load`], [`four_bits`]."""
        dtype, checkpoint = torch_dtype(dtype), self.checkpoint
        if not load_in_4bit:
            return dtype_to_load(dtype, self.config, checkpoint.weight_bytes), None
        check_installed("bitsandbytes", "qlora", "Quantizing to 4 bits")
        quantization = four_bits(checkpoint.without_weights(self.model_class, self.config), dtype)
        return quantization.bnb_4bit_compute_dtype, quantization


def resolve_model(
    model: str,
    revision: str | None = None,
    *,
    trust_remote_code: bool = False,
    base: str | None = None,
    base_quantization: str | None = None,
) -> ModelHandle:
    """Tells what a folder, Hub id or adapter's folder is, and loads its processor.

    Code from the checkpoint runs with `trust_remote_code`, if transformers lacks its architecture.
    `base` and `base_quantization` are those of an adapter, see [`open_adapter`]. Raises ValueError
    if the model is of no known kind, or is no adapter and these two are given.
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
    remote = {} if opened.model_type in CONFIG_MAPPING else opened.stored.get("auto_map", {})
    if remote and not trust_remote_code:
        raise ValueError(
            f"{name} is a {opened.model_type!r} model, which transformers does not know; it comes "
            "with code of its own. Read that code, and pass --trust-remote-code if you trust it."
        )
    opened = replace(opened, trust_remote_code=bool(remote))
    config, processor = opened.config, None
    kind = type(config)
    classes = {
        AutoModelForImageTextToText: MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        AutoModelForCausalLM: MODEL_FOR_CAUSAL_LM_MAPPING,
    }
    fitting = (cls for cls, mapping in classes.items() if cls.__name__ in remote or kind in mapping)
    if (cls := next(fitting, None)) is None:
        raise ValueError(
            f"{name} is a {config.model_type!r} model. Give a vision-language model "
            "(AutoModelForImageTextToText) or a language model (AutoModelForCausalLM)."
        )
    if config.model_type == NormAlignLlavaConfig.model_type:
        processor = opened.processor
    elif cls is AutoModelForImageTextToText or remote and "vision_config" in opened.stored:
        processor = opened.preprocessor(_processor_class(config))
    return ModelHandle(name, opened, config, processor, cls)


def _processor_class(config: PreTrainedConfig) -> Any:
    """The class that loads a processor: without torchvision, one that makes do without videos."""
    cls = PROCESSOR_MAPPING.get(type(config), AutoProcessor)
    videos = inspect.signature(cls.__init__).parameters.get("video_processor")
    # It cannot be left out of SmolVLM's.
    if is_torchvision_available() or videos is None or videos.default is not None:
        return AutoProcessor
    attributes = [name for name in cls.get_attributes() if name != "video_processor"]
    changed = {"__module__": cls.__module__, "get_attributes": staticmethod(lambda: attributes)}
    return type(cls.__name__, (cls,), changed)
