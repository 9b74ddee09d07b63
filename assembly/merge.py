# SPDX-License-Identifier: Apache-2.0
"""Merges an adapter and the base it was trained on into one checkpoint, tensor by tensor: no model is loaded."""

import ctypes
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper, TrainableTokensWrapper
from rich.console import Console
from rich.progress import track
from rich.table import Table
from safetensors import safe_open
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.pytorch_utils import Conv1D
from transformers.utils import cached_file

from ..checkpoint.files import check_new, finished_folder
from ..checkpoint.loading import loading
from ..checkpoint.names import ADAPTER_WEIGHTS, BUILD_RECORD, CARD, DYNAMICS, TRAINING_RECORD
from ..checkpoint.opening import Checkpoint
from ..checkpoint.weights import (
    check_space,
    index_folder,
    module_of_file,
    no_progress_bar,
    size_of,
    stored_tensors,
    unchanged_files,
    write_weights,
)
from ..errors import Printed
from .adapter import Adapter, on_meta, open_adapter, put_on_meta
from .base_tensors import BaseTensors
from .build import torch_dtype


CARRIED = (CARD, TRAINING_RECORD, BUILD_RECORD)
"""Card and records, copied from the adapter's folder, or else from the base."""

TOLERANCE = 1e-3
"""Largest allowed difference of a layer's outputs after merging in float32, as a share of the largest output."""


@dataclass(frozen=True)
class MergeReport(Printed):
    """The report that `normalign merge` prints.

    Attributes:
        quantization: The base's in training, `"4-bit nf4"` or `"8-bit"`; None if there was none.
        difference: Largest difference between the outputs of a layer with its adapter and of the merged layer, of all
            linear layers and embeddings, for random inputs, in float32 before casting to `dtype`; as a share of the
            layer's largest output.
    """

    output: str
    adapter: str
    base: str
    quantization: str | None
    dtype: str
    difference: float

    def renderable(self) -> Table:
        """The report as a table."""
        table = Table(title="Merged checkpoint", show_header=False)
        table.add_row("adapter", self.adapter)
        table.add_row("base", f"{self.base} ({self.quantization or 'not quantized'} in training)")
        table.add_row("dtype", f"{self.dtype}, norm float32")
        table.add_row("largest relative difference of a layer's outputs", f"{self.difference:.2g}")
        table.add_row("written to", self.output)
        return table


def merge_adapter(
    adapter: str | os.PathLike,
    output: str | os.PathLike,
    *,
    base: str | None = None,
    base_quantization: str | None = None,
    dtype: str | torch.dtype = "auto",
) -> MergeReport:
    """Merges an adapter into the base it was trained on, in float32, and writes a checkpoint that needs no PEFT.

    An adapter of a quantized base (QLoRA) was trained on the quantized weights. So the base is quantized as the
    adapter's `training.json` says and dequantized in float32 before merging: the result is the model that was trained.

    Tensors are read, merged by PEFT and written one at a time: beside the mapped files this takes a few times the
    memory of the largest tensor with an adapter in float32.

    Args:
        adapter: Folder with adapter configuration and weights that training wrote; a trainer's `checkpoint-N` will do.
        output: Folder to create; it must not exist or be empty. It is written as a whole or not at all.
        base: Checkpoint folder or Hub id, if the one in the adapter's configuration does not exist any more.
        base_quantization: The base's quantization in training, one of `BASE_QUANTIZATIONS`, in place of what
            `training.json` says, which TRL alone does not write. The base's weights are quantized in their own dtype.
        dtype: The dtype of the written weights; `"auto"` is the base's. The norm is always float32.

    Raises:
        ValueError: The folder has no LoRA adapter; the base does not exist, or has another architecture or other
            shapes; a tensor of the adapter does not fit it; or its quantization in training is not known. Nothing is
            written.
    """
    adapter, dtype = Path(adapter), torch_dtype(dtype)
    check_new(output)
    opened = open_adapter(adapter, base, base_quantization)
    tensors = BaseTensors(opened)
    dtype = (opened.config.dtype or tensors.dtype) if dtype == "auto" else dtype
    with loading(f"The adapter {adapter}"):
        merged = put_on_meta(on_meta(opened.config), opened.peft_config).merge_and_unload()
    for parameter in merged.parameters():
        parameter.data = parameter.data.to(dtype)
    layout = stored_tensors(merged)
    with safe_open(adapter / ADAPTER_WEIGHTS, "pt") as file:
        adapted = {module_of_file(name) for name in file.keys()}  # noqa: SIM118
    frozen = {"vision_tower"} - adapted if dtype == tensors.dtype else ()
    linked = unchanged_files(layout, frozen, index_folder(opened.base.name, opened.base.revision))
    check_space(Path(output), size_of(layout), "Make room, or write elsewhere.")
    differences = [0.0]
    with finished_folder(output) as folder:
        merged.generation_config = _generation_config(opened.base) or merged.generation_config
        with no_progress_bar():
            merged.save_pretrained(folder, state_dict={})
        values = _merged_tensors(opened, tensors, layout, differences)
        shown = track(values, "Merging", len(layout), console=Console(stderr=True), transient=True)
        write_weights(folder, layout, shown, linked)
        opened.processor.save_pretrained(folder)
        _carry(adapter, opened.base, folder)
    return MergeReport(
        output=str(output),
        adapter=str(adapter),
        base=opened.base.name,
        quantization=tensors.quantization,
        dtype=str(dtype).removeprefix("torch."),
        difference=max(differences),
    )


def _merged_tensors(
    adapter: Adapter, base: BaseTensors, layout: dict[str, Tensor], differences: list[float]
) -> Iterator[tuple[str, Tensor]]:
    """Names and values of `layout`; `differences` gets those that [`MergeReport`] tells the largest of."""
    rest, adapted = set(layout), adapter.on_meta().get_base_model()
    wrapped: list[str] = []
    for path, module in adapted.named_modules():
        wraps = isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper)
        if not wraps or path.startswith(tuple(f"{name}." for name in wrapped)):
            continue
        wrapped.append(path)
        with loading(f"The adapter {adapter.folder}"):
            values, difference = _merged_layer(path, module, base)
        if not difference <= TOLERANCE:  # nor NaN
            raise ValueError(f"Merging {adapter.folder} changed {path} by {difference:.3g}. Nothing was written.")
        differences.append(difference)
        for name, value in values.items():
            if (name := f"{path}.{name}") in rest:  # no tied one
                rest.remove(name)
                yield name, _finite(name, value.to(layout[name].dtype), adapter)
        del values
        module.to("meta")
        _give_memory_back()
    for name in [name for name in layout if name in rest]:
        yield name, _finite(name, base[name].to(layout[name].dtype), adapter)


def _merged_layer(path: str, module: nn.Module, base: BaseTensors) -> tuple[dict[str, Tensor], float]:
    """The tensors of a layer with an adapter after PEFT merged it, and how much that changed what it computes."""
    if isinstance(module, ModulesToSaveWrapper):
        return module.modules_to_save["default"].state_dict(), 0.0
    layer = (module.token_adapter if isinstance(module, TrainableTokensWrapper) else module).get_base_layer()
    absent = {name: base[f"{path}.{name}"].float() for name, tensor in layer.state_dict().items() if tensor.is_meta}
    layer.load_state_dict(absent, strict=False, assign=True)
    for name, buffer in layer.named_buffers():
        if buffer.is_meta:  # computed from the configuration, such as Gemma's scale
            setattr(layer, name, torch.ones_like(buffer, device="cpu"))
    module.float().eval()
    random = torch.Generator().manual_seed(0)
    if isinstance(layer, nn.Embedding):
        trained = module.token_adapter.token_indices["default"] if isinstance(module, TrainableTokensWrapper) else []
        inputs = torch.tensor([*trained, *torch.randint(layer.num_embeddings, (16,), generator=random)])
    else:
        inputs = torch.randn(4, module.in_features, generator=random)
    with torch.no_grad():
        known = isinstance(layer, nn.Linear | Conv1D | nn.Embedding)  # not the experts of target_parameters
        expected = module(inputs) if known else torch.ones(())
        if isinstance(module, ParamWrapper | TrainableTokensWrapper):
            module.unload_and_optionally_merge_module(merge=True, safe_merge=True, adapter_names=None)
        else:
            module.merge(safe_merge=True)
        difference = (layer(inputs) if known else expected) - expected
    return layer.state_dict(), (difference.abs().max() / expected.abs().max()).item()


def _give_memory_back() -> None:
    """Gives freed memory back: what glibc keeps of tensors below 32 MiB adds up to more than a gigabyte."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL("libc.so.6").malloc_trim(0)


def _finite(name: str, value: Tensor, adapter: Adapter) -> Tensor:
    if value.is_floating_point() and value.numel() and not all(limit.isfinite() for limit in value.aminmax()):
        raise ValueError(
            f"{name} would be NaN or infinite in {value.dtype} after merging {adapter.folder}. Nothing was written."
        )
    return value


def _generation_config(base: Checkpoint) -> GenerationConfig | None:
    try:
        with loading(f"The generation configuration of {base.name}"):
            return GenerationConfig.from_pretrained(base.name, revision=base.revision)
    except OSError:  # it has none
        return None


def _carry(adapter: Path, base: Checkpoint, folder: Path) -> None:
    for name in CARRIED:
        theirs = cached_file(base.name, name, revision=base.revision, _raise_exceptions_for_missing_entries=False)
        own = adapter / name
        if name == CARD and own.is_file() and "# Model Card for Model ID" in own.read_text("utf-8", "replace"):
            continue  # PEFT's, which has local paths
        if file := own if own.is_file() else theirs:
            shutil.copyfile(file, folder / name)
    if (adapter / DYNAMICS).is_file():  # the adapter's alone: the base's are another run's
        shutil.copyfile(adapter / DYNAMICS, folder / DYNAMICS)
