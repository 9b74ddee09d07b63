# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""An adapter and the base that it was trained on, with the changes that training made to it."""

import copy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model_state_dict
from safetensors import SafetensorError, safe_open
from transformers import LlavaProcessor

from ..checkpoint.limits import SETTINGS_BYTES
from ..checkpoint.loading import loading
from ..checkpoint.names import ADAPTER_WEIGHTS
from ..checkpoint.opening import Checkpoint, open_checkpoint
from ..checkpoint.precision import dtype_to_load
from ..configuration_normalign_llava import NormAlignLlavaConfig
from ..errors import check_installed
from ..modeling_normalign_llava import NormAlignLlavaForConditionalGeneration
from .adapter_settings import adapter_config, quantization_of_base, training_record
from .processing import pad_left


@dataclass(frozen=True)
class Adapter:
    """An adapter's folder, and its base; see [`open_adapter`].

    Attributes:
        config: The base's configuration as training changed it.
        quantization: bitsandbytes' settings of the base in training, or None.
        realigned: Whether training aligned the norm anew, since it was added or changed.
    """

    folder: Path
    peft_config: LoraConfig
    base: Checkpoint
    config: NormAlignLlavaConfig
    quantization: dict[str, Any] | None
    realigned: bool

    @cached_property
    def processor(self) -> LlavaProcessor:
        """Its own, or else the base's; it pads on the left."""
        trained = (self.folder / "processor_config.json").exists()
        processor = Checkpoint(str(self.folder), None, {}).processor if trained else self.base.processor
        pad_left(processor.tokenizer)
        return processor

    def put_on(self, model: NormAlignLlavaForConditionalGeneration) -> PeftModel:
        """The base, loaded with `config`, with the adapter on it."""
        if self.realigned:
            model.align_projector_norm()  # as the run that changed it did
        with loading(f"The adapter {self.folder}"):
            return PeftModel.from_pretrained(model, self.folder, torch_device=str(model.device))

    def load(self) -> PeftModel:
        """The base, quantized as in training and on a GPU if there is one, with the adapter on it, in eval mode."""
        dtype = (self.quantization or {}).get("bnb_4bit_compute_dtype") or dtype_to_load("auto", self.config)
        device = "auto" if torch.cuda.is_available() else None
        options = {"quantization_config": self.quantization, "device_map": device}
        return self.put_on(self.base.load(dtype=dtype, config=self.config, **options)).eval()


def open_adapter(adapter: Path, base: str | None = None, base_quantization: str | None = None) -> Adapter:
    """Finds an adapter's base, and checks that they fit; no weights are loaded. Arguments and errors are those of
    [`merge_adapter`]."""
    peft_config = adapter_config(adapter)
    record = training_record(adapter)
    quantization = quantization_of_base(adapter, record, base_quantization)
    if quantization:
        check_installed("bitsandbytes", "qlora", "Quantizing the base as in training")
    named = peft_config.base_model_name_or_path
    base = base or named
    if not base:
        raise ValueError(f"The adapter {adapter} does not name its base. Give its folder or Hub id with --base.")
    opened = _open_base(base, adapter, peft_config.revision if base == named else None)
    config = opened.read_config(NormAlignLlavaConfig)
    stored = (config.projector_norm, config.projector_gain_init)
    for name, value in record["config_changes"].items():
        setattr(config, name, value)
    _check_tensors(adapter, peft_config, config, opened.name)
    realigned = stored != (config.projector_norm, config.projector_gain_init) and config.projector_norm != "none"
    return Adapter(adapter, peft_config, opened, config, quantization, realigned)


def _open_base(base: str, adapter: Path, revision: str | None) -> Checkpoint:
    try:
        opened = open_checkpoint(base, revision)
    except ValueError as error:
        raise ValueError(
            f"The base {base!r} of the adapter {adapter} was not found. Give its folder or Hub id with --base. "
            f"({error})"
        ) from error
    if opened.model_type not in (NormAlignLlavaConfig.model_type, "llava"):
        raise ValueError(
            f"The base {base} is a {opened.model_type!r} model, no NormAlign-LLaVA. Give the right one with --base."
        )
    return opened


def _check_tensors(adapter: Path, peft_config: LoraConfig, config: NormAlignLlavaConfig, base: str) -> None:
    """Raises ValueError if names or shapes in the adapter's file do not fit the base, before anything is loaded.

    PEFT only warns of a missing tensor, and ignores one that it does not know.
    """
    peft_config = copy.deepcopy(peft_config)
    peft_config.init_lora_weights = False  # initial values computed from weights cannot be on meta
    with torch.device("meta"):
        with loading(f"The model {base}", memory=SETTINGS_BYTES):
            model = NormAlignLlavaForConditionalGeneration(config)
        with loading(f"The adapter {adapter}", remedy=f"It is not one of the base {base}."):
            adapted = PeftModel(model, peft_config, low_cpu_mem_usage=True)
    places = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    expected = {name: list(tensor.shape) for name, tensor in places.items()}
    try:
        with safe_open(adapter / ADAPTER_WEIGHTS, "pt") as file:
            found = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(
            f"{adapter / ADAPTER_WEIGHTS} cannot be read: {error}. Was it cut short? Take another."
        ) from error
    faults = [f"{name} is missing" for name in sorted(expected.keys() - found.keys())]
    faults += [f"{name} has no place" for name in sorted(found.keys() - expected.keys())]
    faults += [
        f"{name} has shape {found[name]}, not {expected[name]}"
        for name in sorted(expected.keys() & found.keys())
        if found[name] != expected[name]
    ]
    if faults:
        shown = "; ".join(faults[:5]) + (f"; and {len(faults) - 5} more" if faults[5:] else "")
        raise ValueError(f"The adapter {adapter} does not fit the base {base}: {shown}. Is it the right --base?")
