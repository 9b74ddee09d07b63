# SPDX-License-Identifier: Apache-2.0
"""The tensors of an adapter's base as in training: read one at a time, quantized, dequantized."""

from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import BitsAndBytesConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import AutoHfQuantizer

from ..checkpoint.untrusted import AGAIN, check_weights
from ..modeling_normalign_llava import NormAlignLlavaForConditionalGeneration
from .adapter import IN_PRECISION, Adapter, on_meta
from .build import torch_dtype


NORM = "model.multi_modal_projector.norm."


class BaseTensors:
    """The base's tensors as training had them, each read from its file when asked for."""

    def __init__(self, adapter: Adapter):
        self._base, config = adapter.base.name, adapter.config
        model = on_meta(config)
        self._files: dict[str, tuple[Any, str]] = {}
        renamings = get_model_conversion_mapping(model, key_mapping=model._llava_names)
        for path in check_weights(self._base, adapter.base.revision):
            file = safe_open(path, "pt")
            for stored in file.keys():  # noqa: SIM118
                name = stored
                for renaming in renamings:  # an older LLaVA has other names
                    name, _ = renaming.rename_source_key(name)
                self._files[name] = file, stored
        self._tie(model)
        self._quantized: dict[str, Any] = {}  # bitsandbytes' layers on meta by names of weights
        if adapter.quantization:
            settings = BitsAndBytesConfig.from_dict(adapter.quantization)
            settings.llm_int8_skip_modules = settings.llm_int8_skip_modules or IN_PRECISION
            quantizer = AutoHfQuantizer.from_config(settings, pre_quantized=False)
            quantized = on_meta(config)
            quantizer.preprocess_model(model=quantized, device_map={"": "cpu"})
            for name, layer in quantized.named_modules():
                if type(layer).__name__ in ("Linear4bit", "Linear8bitLt"):
                    self._quantized[f"{name}.weight"] = layer
        self._check(model)
        # The weights were quantized from the dtype that training loaded.
        dtype = adapter.dtype or config.dtype or self._stored(next(iter(self._files))).dtype
        self.dtype = torch_dtype(dtype)
        self._parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        self._norm = {name: None for name in self._parameters if name.startswith(NORM)}
        if self._norm and (adapter.realigned or not self._norm.keys() <= self._files.keys()):
            embeddings, norm = model.get_input_embeddings(), model.model.multi_modal_projector.norm
            weight = self[model._tied_weights_keys["lm_head.weight"]]
            embeddings.weight = nn.Parameter(weight, requires_grad=False)
            norm.to_empty(device="cpu")
            model.align_projector_norm()  # as loading does, or the run that changed the arm
            self._norm = {f"{NORM}{name}": value for name, value in norm.state_dict().items()}

    def __getitem__(self, name: str) -> Tensor:
        """A tensor in `dtype`; what was quantized, the norm and buffers in float32 or as stored."""
        if self._norm.get(name) is not None:
            return self._norm[name]
        value = self._stored(name)
        if name in self._parameters and name not in self._norm and value.is_floating_point():
            value = value.to(self.dtype)
        if (layer := self._quantized.get(name)) is None:
            return value
        import bitsandbytes as bnb

        value = value.T if layer.source_cls is Conv1D else value
        settings = {**vars(layer.weight), "requires_grad": False}
        if isinstance(layer, bnb.nn.Linear4bit):
            weight = bnb.nn.Params4bit(value, **settings | {"module": None}).to("cpu")
            weight.quant_state.dtype = torch.float32  # or it would be rounded to the loading dtype
            value = bnb.functional.dequantize_4bit(weight.data, weight.quant_state)
        else:
            weight = bnb.nn.Int8Params(value, **settings).to("cpu")
            value = bnb.functional.int8_vectorwise_dequant(weight.data, weight.SCB)
        return value.T if layer.source_cls is Conv1D else value

    def has_as_stored(self, prefix: str) -> bool:
        """Whether training had all tensors of these names as files have them, but for the dtype."""
        return not any(name.startswith(prefix) for name in self._quantized)

    def _stored(self, name: str) -> Tensor:
        file, stored = self._files[name]
        return file.get_tensor(stored)

    def _tie(self, model: NormAlignLlavaForConditionalGeneration) -> None:
        """Gives tied tensors, of which one is stored, both names."""
        for pair in model.all_tied_weights_keys.items():
            stored = [name for name in pair if name in self._files]
            if len(stored) == 1:
                self._files |= dict.fromkeys(pair, self._files[stored[0]])
            elif stored and not torch.equal(*map(self._stored, stored)):  # nor tied by transformers
                for config in (model.config, model.config.text_config):
                    config.tie_word_embeddings = False

    def _check(self, model: NormAlignLlavaForConditionalGeneration) -> None:
        """Raises ValueError if tensors are missing or of other shapes."""
        faults = []
        for name, expected in model.state_dict().items():
            file, stored = self._files.get(name, (None, name))
            shape = file.get_slice(stored).get_shape() if file else None
            is_new = file is None and name.startswith(NORM)
            if shape != [*expected.shape] and not is_new:
                faults.append(f"{name} has shape {shape}, not {[*expected.shape]}")
        if faults:
            fault = f"{len(faults)} tensors of {self._base} are not config.json's: {faults[0]}"
            raise ValueError(f"{fault}. {AGAIN}")
