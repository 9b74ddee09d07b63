# SPDX-License-Identifier: Apache-2.0
"""Opens adapters: finds the base, and checks that both fit before anything is loaded."""

import copy
import warnings
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel, PeftType, get_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer, LlavaProcessor

from ..checkpoint.files import ADAPTER_WEIGHTS, BUILD_RECORD, TRAINING_RECORD, check_adapter
from ..checkpoint.opening import Checkpoint, open_checkpoint, read_record
from ..checkpoint.precision import NF4, dtype_to_load
from ..checkpoint.prompts import stop_as_trained
from ..checkpoint.untrusted import check_files, json_object, loading
from ..configuration_normalign_llava import NormAlignLlavaConfig
from ..errors import check_installed
from ..modeling_normalign_llava import NormAlignLlavaForConditionalGeneration
from .processing import ARM_FIELDS, settle


IN_PRECISION = ["lm_head", "model.vision_tower", "model.multi_modal_projector"]
"""Modules that bitsandbytes does not quantize, unless `llm_int8_skip_modules` is set."""

BASE_QUANTIZATIONS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "nf4": NF4 | {"bnb_4bit_use_double_quant": False},
    "nf4-double": NF4,
    "int8": {"load_in_8bit": True},
}
"""bitsandbytes' settings by names of `--base-quantization`; `double` quantizes constants too."""


@dataclass(frozen=True)
class Adapter:
    """An adapter, and its base as in training; `dtype`, if known, is from before quantization."""

    folder: Path
    peft_config: LoraConfig
    base: Checkpoint
    config: NormAlignLlavaConfig
    quantization: dict[str, Any] | None
    dtype: str | None
    realigned: bool
    processor: LlavaProcessor

    @property
    def processors(self) -> list[LlavaProcessor]:
        """The base's processor, if it has one, and the adapter's: answers end as both end them."""
        with suppress(OSError, ValueError):
            return [self.base.processor, self.processor]
        return [self.processor]

    def on_meta(self) -> tuple[PeftModel, dict[str, str]]:
        """The base on meta, without weights, and on it the adapter, with its weights.

        And the names of the tensors in that model by their names in the adapter's file. Raises
        ValueError if the file has two values for one of them.
        """
        with loading(f"The adapter {self.folder}"):
            adapted = put_on_meta(on_meta(self.config), self.peft_config)
            tensors = load_file(self.folder / ADAPTER_WEIGHTS)
            saved = _saved_tensors(adapted, tensors)
            places = {name: saved[name] for name in tensors}
            values: dict[str, Tensor] = {}
            for name, value in tensors.items():
                place = places[name]
                if place in values and not torch.equal(values[place], value):
                    fault = f"{self.folder} has two values for {place}, one of them {name}"
                    raise ValueError(f"{fault}. Save the adapter again with its model.")
                values[place] = value
            adapted.load_state_dict(values, strict=False, assign=True)
        return adapted, places

    def load(self) -> PeftModel:
        """The base as in training and the adapter on it, on a GPU if there is one, in eval mode."""
        settings = {"config": self.config, "quantization_config": self.quantization}
        dtype = self.dtype or dtype_to_load("auto", self.config, self.base.weight_bytes)
        device = "auto" if torch.cuda.is_available() else None
        model = self.base.load(dtype=dtype, device_map=device, **settings)
        if self.realigned:
            model.align_projector_norm()  # as the run that changed it did
        for processor in self.processors:
            stop_as_trained(model, processor)
        device = str(model.device)
        with loading(f"The adapter {self.folder}"):
            return PeftModel.from_pretrained(model, self.folder, torch_device=device).eval()


def read_peft_config(adapter: Path) -> LoraConfig:
    """The configuration of a LoRA adapter; raises ValueError for another, or one that is none."""
    check_adapter(adapter)
    check_files(adapter)
    with loading(f"The configuration of the adapter {adapter}"):
        peft_config = PeftConfig.from_pretrained(adapter)
    if (kind := peft_config.peft_type) != PeftType.LORA:
        raise ValueError(f"{adapter} is a {kind} adapter. Only LoRA, DoRA and rsLoRA are merged.")
    start = str(peft_config.init_lora_weights)
    if start.startswith(("pissa", "olora", "corda", "loftq", "lora_ga")):
        remedy = "Save it as plain LoRA, by PEFT's path_initial_model_for_weight_conversion."
        fault = f"{adapter} was trained with init_lora_weights {start!r}, which changes the base"
        raise ValueError(f"{fault}. {remedy}")
    return peft_config


def open_adapter(
    adapter: Path, base: str | None = None, base_quantization: str | None = None
) -> Adapter:
    """Finds an adapter's base and checks that both fit; loads nothing. See [`merge_adapter`]."""
    peft_config = read_peft_config(adapter)
    quantization, dtype, changes = _training_settings(adapter, base_quantization)
    if quantization:
        check_installed("bitsandbytes", "qlora", "Quantizing the base as in training")
    named = peft_config.base_model_name_or_path
    if not (base := base or named):
        raise ValueError(f"The adapter {adapter} does not name its base. Give it with --base.")
    revision = peft_config.revision if base == named else None
    remedy = f"It is the base of {adapter}: if it has moved, give --base."
    opened = open_checkpoint(base, revision, remedy=remedy)
    if (kind := opened.model_type) not in (NormAlignLlavaConfig.model_type, "llava"):
        raise ValueError(f"The base {base} is a {kind!r} model. Give the right one with --base.")
    build = read_record(str(adapter), BUILD_RECORD)
    if build and build != (read_record(opened.name, BUILD_RECORD, opened.revision) or build):
        misfit = f"{adapter} does not fit the base {base}: {BUILD_RECORD} differs"
        raise ValueError(f"{misfit}. Give the right --base.")
    config = opened.read_config(NormAlignLlavaConfig)
    before = (config.projector_norm, config.projector_gain_init)
    for name, value in changes.items():
        setattr(config, name, value)
    _check_tensors(adapter, peft_config, config, opened.name)
    changed = before != (config.projector_norm, config.projector_gain_init)
    realigned = changed and config.projector_norm != "none"
    processor = _processor(adapter, opened)
    settle(processor)
    return Adapter(adapter, peft_config, opened, config, quantization, dtype, realigned, processor)


def _processor(adapter: Path, base: Checkpoint) -> LlavaProcessor:
    """The adapter's processor, or the base's with the adapter's tokenizer, if that alone is saved.

    A tokenizer without the base's image token cannot be the one of training, and is not used.
    """
    saved = Checkpoint(str(adapter), None, {})
    if (adapter / "processor_config.json").exists():
        return saved.processor
    processor = base.processor
    if (adapter / "tokenizer_config.json").exists():
        tokenizer = saved.preprocessor(AutoTokenizer)
        image = tokenizer.get_vocab().get(processor.image_token)
        if image == processor.image_token_id:
            processor = copy.copy(processor)
            processor.tokenizer = tokenizer
            processor.chat_template = tokenizer.chat_template or processor.chat_template
    return processor


def on_meta(config: NormAlignLlavaConfig) -> NormAlignLlavaForConditionalGeneration:
    """The model of a configuration without weights, in evaluation mode."""
    with torch.device("meta"):
        return NormAlignLlavaForConditionalGeneration(config).eval()


def put_on_meta(model: NormAlignLlavaForConditionalGeneration, config: LoraConfig) -> PeftModel:
    """A model on meta with an adapter on it, without values that are computed from weights."""
    config = copy.deepcopy(config)
    config.init_lora_weights = False
    with torch.device("meta"), warnings.catch_warnings(action="ignore"):  # PEFT repeats them
        return PeftModel(model, config)


def _check_tensors(
    adapter: Path, peft_config: LoraConfig, config: NormAlignLlavaConfig, base: str
) -> None:
    """Raises ValueError if names or shapes do not fit the base; PEFT only warns, or ignores it."""
    with loading(f"The model {base}"):
        model = on_meta(config)
    with loading(f"The adapter {adapter}", remedy=f"It is not one of the base {base}."):
        adapted = put_on_meta(model, peft_config)
    weights = adapter / ADAPTER_WEIGHTS
    with loading(f"{weights}"), safe_open(weights, "pt") as file:
        stored = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    shapes = {name: [*tensor.shape] for name, tensor in adapted.state_dict().items()}
    expected = {name: shapes[place] for name, place in _saved_tensors(adapted, stored).items()}
    if odd := sorted(name for name in expected | stored if stored.get(name) != expected.get(name)):
        shape = f"{odd[0]} has shape {stored.get(odd[0])}, on the base {expected.get(odd[0])}"
        raise ValueError(f"{adapter} does not fit the base {base}: {shape}. Give the right --base.")


def _saved_tensors(adapted: PeftModel, stored: Collection[str]) -> dict[str, str]:
    """The names under which PEFT saves an adapter's tensors, and those in its model.

    Embeddings with an adapter may be saved whole besides; these are named if they are `stored`.
    """
    tensors, saved = adapted.state_dict(), dict[str, str]()
    names = {id(tensor): name for name, tensor in tensors.items()}
    for whole in (True, False):
        places = get_peft_model_state_dict(adapted, tensors, save_embedding_layers=whole)
        kept = [name for name in places if name in stored or not whole]
        saved |= {name: names[id(places[name])] for name in kept}
    return saved


def _training_settings(
    adapter: Path, base_quantization: str | None
) -> tuple[dict | None, str | None, dict]:
    """The base's quantization in training, its dtype before, and changes of its configuration."""
    file = adapter / TRAINING_RECORD
    record = json_object(file.read_bytes(), str(file)) if file.is_file() else {}
    quantization, stored = record.get("quantization"), record.get("config_changes", {})
    changes = {name: stored[name] for name in ARM_FIELDS if name in stored}
    if base_quantization in BASE_QUANTIZATIONS:
        quantization = BASE_QUANTIZATIONS[base_quantization]
    elif base_quantization or "quantization" not in record:
        unknown = f"How the base of {adapter} was quantized in training is not known"
        raise ValueError(f"{unknown}. Give --base-quantization {'|'.join(BASE_QUANTIZATIONS)}.")
    dtype = record.get("options", {}).get("dtype")
    if not quantization or dtype not in ("bfloat16", "float16", "float32"):
        dtype = (quantization or {}).get("bnb_4bit_compute_dtype")  # in which TRL loads
    return quantization, dtype, changes
