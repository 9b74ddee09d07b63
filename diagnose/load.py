# SPDX-License-Identifier: Apache-2.0
"""What kind of model a folder or Hub id is, told from its configuration; and loading it."""

import inspect
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_MAPPING,
    PROCESSOR_MAPPING,
    AutoImageProcessor,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    BaseImageProcessor,
    BitsAndBytesConfig,
    PreTrainedConfig,
    PreTrainedModel,
    ProcessorMixin,
)
from transformers.utils import is_torchvision_available

from .. import modeling_normalign_llava  # noqa: F401  (registers our classes, so that ours need no remote code)
from ..assembly.adapter import Adapter, open_adapter
from ..assembly.build import torch_dtype
from ..checkpoint.names import ADAPTER_CONFIG
from ..checkpoint.opening import Checkpoint, open_checkpoint
from ..checkpoint.precision import dtype_to_load, four_bits
from ..checkpoint.untrusted import bytes_of_weights
from ..configuration_normalign_llava import NormAlignLlavaConfig
from ..errors import check_installed


Kind = Literal["vision-language model", "vision encoder", "language model"]


@dataclass(frozen=True)
class ModelHandle:
    """What is known of a folder or Hub id before its weights are loaded.

    Attributes:
        name: Folder or Hub id, without the folders above it.
        source: Folder, file or Hub id to load it from.
        revision: The commit of a Hub id; all its files are read at this one.
        processor, image_processor: The processor of a vision-language model, or of a vision encoder.
        model_class: Class that loads it; None for a language model.
        config: Configuration; None for a single file or a GGUF folder.
        opened: The checkpoint; None for a single file or a GGUF folder.
        adapter: An adapter's folder, which is put on its base as in training, whatever the arguments of `load` say.
    """

    kind: Kind
    name: str
    source: str
    revision: str | None = None
    processor: ProcessorMixin | None = None
    image_processor: BaseImageProcessor | None = None
    model_class: Any = None
    config: PreTrainedConfig | None = None
    opened: Checkpoint | None = None
    adapter: Adapter | None = None

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint to run. Raises ValueError if there is none."""
        if self.opened is None:
            raise ValueError(f"{self.source} is a file of weights, which is not run. Name a folder with safetensors.")
        return self.opened

    def load(self, *, dtype: str | torch.dtype = "auto", load_in_4bit: bool = False) -> PreTrainedModel:
        """Loads the weights, in eval mode, on a GPU if there is one.

        Args:
            dtype: `"float32"`, `"bfloat16"`, `"float16"`, or `"auto"`: the checkpoint's own, unless this CPU only
                emulates it: [`dtype_to_load`].
            load_in_4bit: Quantize the language model's layers to 4 bits while loading: [`four_bits`].
        """
        if self.adapter:
            return self.adapter.load().get_base_model()
        dtype, quantization = self.precision(dtype, load_in_4bit)
        return self.checkpoint.load(
            self.model_class or AutoModelForCausalLM,
            dtype,
            config=self.config,
            device_map="auto" if torch.cuda.is_available() else None,
            quantization_config=quantization,
        ).eval()

    def precision(
        self, dtype: str | torch.dtype, load_in_4bit: bool
    ) -> tuple[str | torch.dtype, BitsAndBytesConfig | None]:
        """The dtype and the quantization in which `load` loads a model that is no adapter, given its arguments.

        Raises:
            ValueError: It cannot be loaded so.
            ImportError: bitsandbytes is not installed.
        """
        dtype, checkpoint = torch_dtype(dtype), self.checkpoint
        if not load_in_4bit:
            size = bytes_of_weights(checkpoint.name, checkpoint.revision)
            return dtype_to_load(dtype, self.config, size), None
        check_installed("bitsandbytes", "qlora", "Quantizing to 4 bits")
        if self.kind == "vision encoder":
            raise ValueError(
                f"{self.name} is a vision encoder, which 4 bits leave as it is. Leave --load-in-4bit out."
            )
        model = checkpoint.without_weights(self.model_class or AutoModelForCausalLM, self.config)
        quantization = four_bits(model, dtype)
        return quantization.bnb_4bit_compute_dtype, quantization


def resolve_model(model: str, revision: str | None = None, *, trust_remote_code: bool = False) -> ModelHandle:
    """Tells from its configuration what `model` is, and loads its processor.

    Models with a vision and a text tower, such as CLIP and SigLIP, are taken for their vision tower.

    Args:
        model: Folder or Hub id; a single file, such as a GGUF file, is a language model.
        revision: Branch, tag or commit of the Hub id.
        trust_remote_code: Run code from the checkpoint if transformers does not have its architecture.
    """
    path = Path(model).expanduser()
    name = path.resolve().name if path.exists() else model
    if path.is_file() or path.is_dir() and not (path / "config.json").exists() and any(path.glob("*.gguf")):
        return ModelHandle("language model", name, str(path))
    if (path / ADAPTER_CONFIG).is_file():
        put = open_adapter(path)
        kind: Kind = "vision-language model"
        return ModelHandle(kind, name, str(path), None, put.processor, config=put.config, adapter=put)
    opened = open_checkpoint(model, revision)
    remote = {} if opened.model_type in CONFIG_MAPPING else opened.stored.get("auto_map", {})
    if remote and not trust_remote_code:
        raise ValueError(
            f"{name} is a {opened.model_type!r} model, which transformers does not know; it comes with code of its "
            "own. Read that code, and pass --trust-remote-code if you trust it."
        )
    opened = replace(opened, trust_remote_code=bool(remote))
    kind, model_class, config = _kind(name, opened.config, remote)
    handle = ModelHandle(
        kind, name, opened.name, opened.revision, model_class=model_class, config=config, opened=opened
    )
    if kind == "language model":
        return handle
    if kind == "vision encoder":
        return replace(handle, image_processor=opened.preprocessor(AutoImageProcessor))
    if config.model_type == NormAlignLlavaConfig.model_type:
        return replace(handle, processor=opened.processor)
    return replace(handle, processor=opened.preprocessor(_processor_class(config)))


def _processor_class(config: PreTrainedConfig) -> Any:
    """The class that loads the processor of a vision-language model.

    transformers has no video processor without torchvision, but image processors for most families. There a processor
    of both is loaded without its part for videos.
    """
    cls = PROCESSOR_MAPPING.get(type(config), AutoProcessor)
    videos = inspect.signature(cls.__init__).parameters.get("video_processor")
    # It cannot be left out of SmolVLM's.
    if is_torchvision_available() or videos is None or videos.default is not None:
        return AutoProcessor
    attributes = [name for name in cls.get_attributes() if name != "video_processor"]
    changed = {"__module__": cls.__module__, "get_attributes": staticmethod(lambda: attributes)}
    return type(cls.__name__, (cls,), changed)


def _kind(name: str, config: PreTrainedConfig, remote: dict) -> tuple[Kind, Any, PreTrainedConfig]:
    """The kind of a model, the class that loads it, and that class's configuration; `remote` is its own `auto_map`."""
    tower = getattr(config, "vision_config", None)
    for cls in (AutoModelForImageTextToText, AutoModelForCausalLM, AutoModel):
        if cls.__name__ in remote:
            if cls is AutoModelForImageTextToText or tower is not None:
                return "vision-language model", cls, config
            return ("language model" if cls is AutoModelForCausalLM else "vision encoder"), cls, config
    if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return "vision-language model", AutoModelForImageTextToText, config
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return "language model", None, config
    tower = tower or config
    encoder: Any = MODEL_MAPPING.get(type(tower), None)
    inputs = () if encoder is None or isinstance(encoder, tuple) else inspect.signature(encoder.forward).parameters
    if "pixel_values" in inputs and "input_ids" not in inputs:
        return "vision encoder", encoder, tower
    raise ValueError(
        f"{name} is a {config.model_type!r} model. Give a vision-language model (AutoModelForImageTextToText), a "
        "vision encoder (AutoModel with pixel_values alone) or a causal language model (AutoModelForCausalLM)."
    )
