# SPDX-License-Identifier: Apache-2.0
"""Opens adapters: finds the base, and checks that both fit before weights are loaded."""

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
from ..checkpoint.untrusted import check_files, json_object, refuse_unreadable
from ..configuration_normalign_llava import NormAlignLlavaConfig
from ..errors import check_installed
from ..modeling_normalign_llava import NormAlignLlavaForConditionalGeneration
from .arms import ARM_FIELDS, restarts_norm
from .processing import normalize_tokenization


LORA_SETTINGS = {
    "r",
    "lora_alpha",
    "lora_dropout",
    "use_rslora",
    "use_dora",
    "fan_in_fan_out",
    "task_type",
    "layers_to_transform",
    "target_modules",
    "exclude_modules",
    "modules_to_save",
    "trainable_token_indices",
    "ensure_weight_tying",
    "init_lora_weights",
    "peft_version",
    "base_model_name_or_path",
    "revision",
    "runtime_config",
}
"""Fields of a `LoraConfig` that training accepts and merging keeps."""

BASE_QUANTIZATIONS = {
    "none": None,
    "nf4": NF4 | {"bnb_4bit_use_double_quant": False},
    "nf4-double": NF4,
    "int8": {"load_in_8bit": True},
}
"""bitsandbytes' settings by names of `--base-quantization`. `double` quantizes constants too."""


@dataclass(frozen=True)
class Adapter:
    """An adapter, and its base as in training.

    Attributes:
        folder: The adapter's folder.
        peft_config: Its configuration.
        base: The base's checkpoint.
        config: The base's configuration, with the arm that was trained.
        quantization: bitsandbytes' settings that quantized the base, or None.
        dtype: The dtype that training loaded, before quantization. None if it is not known.
        realigned: Whether training aligned the base's norm again, since it changed the arm.
        processor: The adapter's processor.
    """

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
        """The base's processor, if it has one, and the adapter's. Both say how answers end."""
        with suppress(OSError, ValueError):
            return [self.base.processor, self.processor]
        return [self.processor]

    def load_on_meta(self) -> tuple[PeftModel, dict[str, str]]:
        """Loads the adapter's weights onto a base without weights, on meta.

        Returns:
            The model, and the names of tensors in it by their names in the adapter's file.

        Raises:
            ValueError: If the file has two values for one of them.
        """
        with refuse_unreadable(f"The adapter {self.folder}"):
            adapted = put_on_meta(on_meta(self.config), self.peft_config)
            tensors = load_file(self.folder / ADAPTER_WEIGHTS)
            places = _places_of_saved(adapted, tensors)
            values: dict[str, Tensor] = {}
            for name, value in tensors.items():
                place = places[name]
                if place in values and not torch.equal(values[place], value):
                    raise ValueError(
                        f"{self.folder} has two values for {place}, one of them {name}. Save the "
                        "adapter again with its model."
                    )
                values[place] = value
            adapted.load_state_dict(values, strict=False, assign=True)
        return adapted, places

    def load(self) -> PeftModel:
        """Loads the base as in training and the adapter on it, on a GPU if any, in eval mode.

        Raises ValueError if files are damaged, and OSError if the Hub cannot be reached.
        """
        dtype = self.dtype or dtype_to_load("auto", self.config, self.base.fetched_weight_bytes)
        model = self.base.load(
            dtype=dtype,
            device_map="auto" if torch.cuda.is_available() else None,
            config=self.config,
            quantization_config=self.quantization,
        )
        if self.realigned:
            model.align_projector_norm()  # as the run that changed it did
        for processor in self.processors:
            stop_as_trained(model, processor)
        device = str(model.device)
        with refuse_unreadable(f"The adapter {self.folder}"):
            adapted = PeftModel.from_pretrained(model, self.folder, torch_device=device)
        return adapted.eval()


def read_peft_config(adapter: Path) -> LoraConfig:
    """Reads the configuration of a LoRA adapter.

    Raises:
        ValueError: If the folder does not hold an adapter, or one that cannot be merged.
    """
    check_adapter(adapter)
    check_files(adapter)
    with refuse_unreadable(f"The configuration of the adapter {adapter}"):
        peft_config = PeftConfig.from_pretrained(adapter)
    kind = peft_config.peft_type
    if kind != PeftType.LORA:
        raise ValueError(f"{adapter} is a {kind} adapter. Only LoRA, DoRA and rsLoRA are merged.")
    method = str(peft_config.init_lora_weights)
    if method.startswith(("pissa", "olora", "corda", "loftq", "lora_ga")):
        raise ValueError(
            f"{adapter} was trained with init_lora_weights {method!r}. That changes the base. Save "
            "it as plain LoRA, by PEFT's path_initial_model_for_weight_conversion."
        )
    return peft_config


def open_adapter(
    adapter: Path, base: str | None = None, base_quantization: str | None = None
) -> Adapter:
    """Finds an adapter's base and checks that both fit. Loads no weights.

    Args:
        adapter: The adapter's folder.
        base: The base's folder or Hub id, if the one that the adapter names is gone.
        base_quantization: The base's quantization in training, one of `BASE_QUANTIZATIONS`. It
            takes precedence over the record of training.

    Raises:
        ValueError: If the adapter or its base cannot be read, if they do not fit, or if the base's
            quantization in training is not known.
        ImportError: If bitsandbytes is missing.
        OSError: If the Hub cannot be reached.
    """
    peft_config = read_peft_config(adapter)
    record: dict[str, Any] = {}
    record_path = adapter / TRAINING_RECORD
    if record_path.is_file():
        record = json_object(record_path.read_bytes(), str(record_path))
    remedy = f"Give --base-quantization {'|'.join(BASE_QUANTIZATIONS)}."
    quantization = record.get("quantization")
    if base_quantization:
        if base_quantization not in BASE_QUANTIZATIONS:
            raise ValueError(f"The base quantization {base_quantization!r} is not known. {remedy}")
        quantization = BASE_QUANTIZATIONS[base_quantization]
    elif "quantization" not in record:
        raise ValueError(
            f"How the base of {adapter} was quantized in training is not known. {remedy}"
        )
    dtype = None
    if quantization:
        check_installed("bitsandbytes", "qlora", "Quantizing the base as in training")
        dtype = record.get("options", {}).get("dtype")
        if dtype not in ("bfloat16", "float16", "float32"):
            dtype = quantization.get("bnb_4bit_compute_dtype")  # TRL loads the base in it
    opened = _open_base(adapter, peft_config, base)
    config = opened.read_config(NormAlignLlavaConfig)
    stored_config = copy.deepcopy(config)
    for name, value in record.get("config_changes", {}).items():
        if name in ARM_FIELDS:
            setattr(config, name, value)
    _check_tensors(adapter, peft_config, config, opened.name)
    processor = _load_processor(adapter, opened)
    normalize_tokenization(processor)
    return Adapter(
        folder=adapter,
        peft_config=peft_config,
        base=opened,
        config=config,
        quantization=quantization,
        dtype=dtype,
        realigned=restarts_norm(stored_config, config),
        processor=processor,
    )


def _open_base(adapter: Path, peft_config: LoraConfig, base: str | None) -> Checkpoint:
    """Opens `base`, or the base that an adapter names. Raises ValueError if it does not fit."""
    named_base = peft_config.base_model_name_or_path
    base = base or named_base
    if not base:
        raise ValueError(f"The adapter {adapter} does not name its base. Give it with --base.")
    revision = peft_config.revision if base == named_base else None
    remedy = f"It is the base of {adapter}: if it has moved, give --base."
    opened = open_checkpoint(base, revision, remedy=remedy)
    kind = opened.model_type
    if kind not in (NormAlignLlavaConfig.model_type, "llava"):
        raise ValueError(f"The base {base} is a {kind!r} model. Give the right one with --base.")
    adapter_record = read_record(str(adapter), BUILD_RECORD)
    if adapter_record:
        base_record = read_record(opened.name, BUILD_RECORD, opened.revision)
        if base_record and base_record != adapter_record:
            raise ValueError(
                f"{adapter} does not fit the base {base}: {BUILD_RECORD} differs. Give the right "
                "--base."
            )
    return opened


def _load_processor(adapter: Path, base: Checkpoint) -> LlavaProcessor:
    """Loads the adapter's processor, or the base's with the adapter's tokenizer, if it has one.

    A tokenizer without the base's image token was not the one of training, and is not used.
    """
    saved = Checkpoint(str(adapter), None, {})
    if (adapter / "processor_config.json").exists():
        return saved.processor
    processor = base.processor
    if (adapter / "tokenizer_config.json").exists():
        tokenizer = saved.preprocessor(AutoTokenizer)
        image_token_id = tokenizer.get_vocab().get(processor.image_token)
        if image_token_id == processor.image_token_id:
            processor = copy.copy(processor)
            processor.tokenizer = tokenizer
            if tokenizer.chat_template:
                processor.chat_template = tokenizer.chat_template
    return processor


def on_meta(config: NormAlignLlavaConfig) -> NormAlignLlavaForConditionalGeneration:
    """Returns the model of a configuration without weights, in evaluation mode."""
    with torch.device("meta"):
        return NormAlignLlavaForConditionalGeneration(config).eval()


def put_on_meta(model: NormAlignLlavaForConditionalGeneration, config: LoraConfig) -> PeftModel:
    """Puts an adapter on a model on meta. Initial values that need weights are left out."""
    config = copy.deepcopy(config)
    config.init_lora_weights = False
    with torch.device("meta"), warnings.catch_warnings(action="ignore"):  # PEFT repeats them
        return PeftModel(model, config)


def _check_tensors(
    adapter: Path, peft_config: LoraConfig, config: NormAlignLlavaConfig, base: str
) -> None:
    """Raises ValueError if names or shapes do not fit the base. PEFT only warns, or ignores it."""
    with refuse_unreadable(f"The model {base}"):
        model = on_meta(config)
    with refuse_unreadable(f"The adapter {adapter}", remedy=f"It is not one of the base {base}."):
        adapted = put_on_meta(model, peft_config)
    weights_path = adapter / ADAPTER_WEIGHTS
    with refuse_unreadable(f"{weights_path}"), safe_open(weights_path, "pt") as file:
        stored_shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    tensors = adapted.state_dict()
    places = _places_of_saved(adapted, stored_shapes)
    expected_shapes = {name: list(tensors[place].shape) for name, place in places.items()}
    for name in sorted(expected_shapes | stored_shapes):
        if stored_shapes.get(name) != expected_shapes.get(name):
            raise ValueError(
                f"{adapter} does not fit the base {base}: {name} has shape "
                f"{stored_shapes.get(name)}, on the base {expected_shapes.get(name)}. Give the "
                "right --base."
            )


def _places_of_saved(adapted: PeftModel, stored: Collection[str]) -> dict[str, str]:
    """Returns names of tensors in an adapted model, by the names under which PEFT saves them.

    PEFT may also save the whole embeddings that an adapter changes. They count if `stored`.
    """
    tensors = adapted.state_dict()
    names_in_model = {id(tensor): name for name, tensor in tensors.items()}
    places = {}
    for with_embeddings in (True, False):
        saved = get_peft_model_state_dict(adapted, tensors, save_embedding_layers=with_embeddings)
        for name, tensor in saved.items():
            if name in stored or not with_embeddings:
                places[name] = names_in_model[id(tensor)]
    return places
