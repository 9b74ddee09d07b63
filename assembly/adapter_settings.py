# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What an adapter's folder says about its training: its configuration, the changes to the base, its quantization."""

from pathlib import Path
from typing import Any

from peft import LoraConfig, PeftConfig, PeftType

from ..checkpoint.find import check_adapter
from ..checkpoint.loading import loading
from ..checkpoint.names import ADAPTER_CONFIG, ADAPTER_WEIGHTS, TRAINING_RECORD
from ..checkpoint.untrusted import check_files, check_inside, json_object
from .build import ARM_FIELDS


NF4, FP4 = ({"load_in_4bit": True, "bnb_4bit_quant_type": kind} for kind in ("nf4", "fp4"))
DOUBLE = {"bnb_4bit_use_double_quant": True}
BASE_QUANTIZATIONS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "nf4": NF4,
    "nf4-double": NF4 | DOUBLE,
    "fp4": FP4,
    "fp4-double": FP4 | DOUBLE,
    "int8": {"load_in_8bit": True},
}
"""bitsandbytes' settings by the names of `--base-quantization`; `double`: its constants are quantized too."""


def adapter_config(adapter: Path) -> LoraConfig:
    """The configuration of a LoRA, DoRA or rsLoRA adapter. Raises ValueError if the folder has no such adapter."""
    check_adapter(adapter)
    check_files(adapter)
    check_inside(adapter / ADAPTER_WEIGHTS)
    with loading(f"{adapter / ADAPTER_CONFIG}"):
        config = PeftConfig.from_pretrained(adapter)
    if config.peft_type != PeftType.LORA:
        raise ValueError(f"{adapter} is a {config.peft_type} adapter. Only LoRA, DoRA and rsLoRA can be merged here.")
    return config


def training_record(adapter: Path) -> dict[str, Any]:
    """The adapter's `training.json`, with `config_changes`. Raises ValueError if it is not valid."""
    file = adapter / TRAINING_RECORD
    record = json_object(file.read_bytes(), str(file)) if file.is_file() else {}
    changes = record.setdefault("config_changes", {})
    if not isinstance(changes, dict) or changes.keys() - {*ARM_FIELDS}:
        raise ValueError(f"config_changes in {file} may have {', '.join(ARM_FIELDS)}, got {changes!r}.")
    return record


def quantization_of_base(adapter: Path, record: dict[str, Any], given: str | None) -> dict[str, Any] | None:
    """bitsandbytes' settings of the base in training, from the record or else from the option."""
    kinds = ", ".join(BASE_QUANTIZATIONS)
    if "quantization" in record:
        if given is not None:
            raise ValueError(
                f"{TRAINING_RECORD} in {adapter} says how its base was quantized. Leave out --base-quantization."
            )
        if not isinstance(settings := record["quantization"], dict | None):
            raise ValueError(
                f"quantization in {adapter / TRAINING_RECORD} must be settings or null, got {settings!r}."
            )
        return settings
    if given is None:
        raise ValueError(
            f"{adapter} does not say whether its base was quantized in training, on which the merged model depends. "
            f"Give it: `normalign merge {adapter} --output DIR --base-quantization KIND`, where KIND is one of "
            f"{kinds}."
        )
    if given not in BASE_QUANTIZATIONS:
        raise ValueError(f"--base-quantization must be one of {kinds}, got {given!r}.")
    return BASE_QUANTIZATIONS[given]
