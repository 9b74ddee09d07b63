# SPDX-License-Identifier: Apache-2.0
"""Merges an adapter and its base into one checkpoint, tensor by tensor: no model is loaded."""

import ctypes
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper, TrainableTokensWrapper
from rich.console import Console
from rich.progress import track
from safetensors import safe_open
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.pytorch_utils import Conv1D

from ..checkpoint import weights
from ..checkpoint.files import (
    ADAPTER_WEIGHTS,
    BUILD_RECORD,
    CARD,
    DYNAMICS,
    RECORDS,
    finished_folder,
    json_or_none,
)
from ..checkpoint.notices import checkpoint_notices, write_notices
from ..checkpoint.precision import quantization_name
from ..checkpoint.prompts import stop_as_trained
from ..checkpoint.untrusted import files_of, loading
from ..errors import Printed
from .adapter import Adapter, on_meta, open_adapter, put_on_meta
from .base_tensors import BaseTensors
from .build import torch_dtype


@dataclass(frozen=True)
class MergeReport(Printed):
    """The report that `normalign merge` prints.

    Attributes:
        quantization: How the base was quantized in training, in words.
        dtype: The dtype of all weights but the norm's, which are float32.
        difference: Largest difference between a layer's outputs with its adapter and after merging,
            for random inputs in float32, as a share of the layer's largest output.
    """

    output: str
    adapter: str
    base: str
    quantization: str
    dtype: str
    difference: float


def merge_adapter(
    adapter: str | os.PathLike,
    output: str | os.PathLike,
    *,
    base: str | None = None,
    base_quantization: str | None = None,
    dtype: str | torch.dtype = "auto",
) -> MergeReport:
    """Merges an adapter into its base, in float32, and writes a checkpoint that needs no PEFT.

    An adapter of a quantized base (QLoRA) was trained on the quantized weights. So the base is
    quantized as the adapter's `training.json` says and dequantized in float32 before merging: the
    result is the model that was trained. Tensors are read, merged by PEFT and written one at a
    time: this takes a few times the memory of the largest tensor with an adapter in float32.

    Args:
        adapter: Folder that training wrote, or a trainer's `checkpoint-N`.
        output: Folder to create, or an empty one. It is written as a whole or not at all.
        base: Checkpoint folder or Hub id, if the one that the adapter names is gone.
        base_quantization: The base's quantization in training, one of `BASE_QUANTIZATIONS`, in
            place of what `training.json` says, which TRL alone does not write. The base's weights
            are quantized in their own dtype.
        dtype: The dtype of the written weights; `"auto"` is the base's. The norm is always float32.

    Raises ValueError, with nothing written, if there is no LoRA adapter, or no base that it fits,
    or if the base's quantization in training is not known.
    """
    adapter, dtype = Path(adapter), torch_dtype(dtype)
    with finished_folder(output) as folder:
        opened = open_adapter(adapter, base, base_quantization)
        base, revision = opened.base.name, opened.base.revision
        if opened.base.stored.get("quantization_config"):
            remedy = "Give what it was made from, and --base-quantization."
            raise ValueError(f"{base} is stored quantized. {remedy}")
        tensors = BaseTensors(opened)
        dtype = (opened.config.dtype or tensors.dtype) if dtype == "auto" else dtype
        with loading(f"The adapter {adapter}"):
            merged = put_on_meta(on_meta(opened.config), opened.peft_config).merge_and_unload()
        for parameter in merged.parameters():
            parameter.data = parameter.data.to(dtype)
        layout = weights.stored_tensors(merged)
        weights.check_space(Path(output), weights.size_of(layout), "Make room, or write elsewhere.")
        with safe_open(adapter / ADAPTER_WEIGHTS, "pt") as file:
            adapted = {weights.module_of_file(name) for name in file.keys()}  # noqa: SIM118
        frozen = {"vision_tower"} - adapted if dtype == tensors.dtype else ()
        linked = weights.unchanged_files(layout, frozen, weights.index_folder(base, revision))
        with suppress(OSError), loading(f"The generation configuration of {base}"):
            merged.generation_config = GenerationConfig.from_pretrained(base, revision=revision)
        for processor in opened.processors:
            stop_as_trained(merged, processor)
        differences = [0.0]
        values = _finite(_merged_tensors(opened, tensors, layout, differences), layout)
        shown = track(values, "Merging", len(layout), console=Console(stderr=True), transient=True)
        weights.save_model(merged, folder, layout, values=shown, linked=linked)
        opened.processor.save_pretrained(folder)
        for name in (CARD, *RECORDS):
            if (file := adapter / name).is_file():
                text = file.read_text("utf-8", "replace") if name == CARD else ""
                by_peft = "# Model Card for Model ID" in text  # and has local paths
                files = [] if by_peft else [file]
            else:  # the base's DYNAMICS are those of its own run
                files = files_of(base, [name], revision) if name != DYNAMICS else []
            for file in files:
                shutil.copyfile(file, folder / name)
        build = json_or_none(folder / BUILD_RECORD)
        notices = checkpoint_notices(build, base, revision)
        write_notices(folder, notices | checkpoint_notices(build, str(adapter)))
    return MergeReport(
        output=str(output),
        adapter=str(adapter),
        base=base,
        quantization=quantization_name(opened.quantization),
        dtype=str(dtype).removeprefix("torch."),
        difference=max(differences),
    )


def _merged_tensors(
    adapter: Adapter, base: BaseTensors, layout: dict[str, Tensor], differences: list[float]
) -> Iterator[tuple[str, Tensor]]:
    """Names and values of `layout`; [`MergeReport`] has the largest of the `differences`."""
    rest, adapted = set(layout), adapter.on_meta().get_base_model()
    wrapped: list[str] = []
    for path, module in adapted.named_modules():
        wraps = isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper)
        if not wraps or path.startswith(tuple(f"{name}." for name in wrapped)):
            continue
        wrapped.append(path)
        with loading(f"The adapter {adapter.folder}"):
            values, difference = _merged_layer(path, module, base)
        if not difference <= 1e-3:  # or it is NaN
            changed = f"Merging changed outputs of {path} by {difference:.3g} of the largest"
            raise ValueError(f"{changed}. Nothing was written.")
        differences.append(difference)
        for name, value in values.items():
            if (name := f"{path}.{name}") in rest:  # no tied one
                rest.remove(name)
                yield name, value
        del values
        module.to("meta")
        if sys.platform == "linux":  # glibc would keep more than a gigabyte of small tensors
            with suppress(OSError, AttributeError):  # another C library
                ctypes.CDLL("libc.so.6").malloc_trim(0)
    yield from ((name, base[name]) for name in layout if name in rest)


def _merged_layer(
    path: str, module: nn.Module, base: BaseTensors
) -> tuple[dict[str, Tensor], float]:
    """A layer's tensors after PEFT merged its adapter, and how much that changed its outputs."""
    if isinstance(module, ModulesToSaveWrapper):
        return module.modules_to_save["default"].state_dict(), 0.0
    adapter = module.token_adapter if isinstance(module, TrainableTokensWrapper) else module
    layer = adapter.get_base_layer()
    absent = [name for name, tensor in layer.state_dict().items() if tensor.is_meta]
    read = {name: base[f"{path}.{name}"].float() for name in absent}
    layer.load_state_dict(read, strict=False, assign=True)
    for name, buffer in layer.named_buffers():
        if buffer.is_meta:  # computed from the configuration, such as Gemma's scale
            setattr(layer, name, torch.ones_like(buffer, device="cpu"))
    module.float().eval()
    random = torch.Generator().manual_seed(0)
    if isinstance(layer, nn.Embedding):
        inputs = torch.randint(layer.num_embeddings, (16,), generator=random)
        if adapter is not module:
            inputs = torch.tensor([*adapter.token_indices["default"], *inputs])
    else:
        inputs = torch.randn(4, module.in_features, generator=random)
    with torch.no_grad():
        known = isinstance(layer, nn.Linear | Conv1D | nn.Embedding)  # not MoE experts
        expected = module(inputs) if known else torch.ones(())
        if isinstance(module, ParamWrapper | TrainableTokensWrapper):
            module.unload_and_optionally_merge_module(True, safe_merge=True, adapter_names=None)
        else:
            module.merge(safe_merge=True)
        difference = (layer(inputs) if known else expected) - expected
    return layer.state_dict(), (difference.abs().max() / expected.abs().max()).item()


def _finite(
    values: Iterable[tuple[str, Tensor]], layout: dict[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    for name, value in values:
        value = value.to(layout[name].dtype)
        limits = value.aminmax() if value.is_floating_point() and value.numel() else ()
        if not all(limit.isfinite() for limit in limits):
            fault = f"{name} would be NaN or infinite in {value.dtype} after merging"
            raise ValueError(f"{fault}. Nothing was written.")
        yield name, value
