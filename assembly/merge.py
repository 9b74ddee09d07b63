# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Merges an adapter and the base it was trained on into one checkpoint."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from rich.table import Table
from torch import Tensor
from transformers.utils import cached_file

from ..checkpoint.files import check_new, finished_folder, json_or_none, write_json
from ..checkpoint.loading import loading
from ..checkpoint.names import BUILD_RECORD, CARD, DYNAMICS, STATE, TRAINING_RECORD
from ..checkpoint.opening import Checkpoint
from ..html_tables import html_table
from ..modeling_normalign_llava import NormAlignLlavaForConditionalGeneration
from .adapter import Adapter, open_adapter
from .build import torch_dtype


CARRIED = (CARD, TRAINING_RECORD, BUILD_RECORD)
"""Card and records, copied from the adapter's folder, or else from the base."""

TOLERANCE = 1e-3
"""Largest allowed difference of logits after merging in float32, as a share of the largest logit."""


@dataclass(frozen=True)
class MergeReport:
    """What `normalign merge` prints.

    Attributes:
        quantization: The base's in training, `"4-bit nf4"` or `"8-bit"`; None if there was none.
        difference: Largest difference between the logits of the merged model and of the adapter on its (dequantized)
            base, for one image and sentence, in float32 before casting to `dtype`.
    """

    output: str
    adapter: str
    base: str
    quantization: str | None
    dtype: str
    difference: float

    def table(self) -> Table:
        """The report, for `rich.console.Console.print`."""
        table = Table(title="Merged checkpoint", show_header=False)
        table.add_row("adapter", self.adapter)
        table.add_row("base", f"{self.base} ({self.quantization or 'not quantized'} in training)")
        table.add_row("dtype", f"{self.dtype}, norm float32")
        table.add_row("largest difference of logits", f"{self.difference:.2g}")
        table.add_row("written to", self.output)
        return table

    def _repr_html_(self) -> str:
        return html_table(self.table())


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

    Args:
        adapter: Folder with adapter configuration and weights that training wrote; a trainer's `checkpoint-N` will do.
        output: Folder to create; it must not exist or be empty. It is written as a whole or not at all.
        base: Checkpoint folder or Hub id, if the one in the adapter's configuration does not exist any more.
        base_quantization: The base's quantization in training, one of `BASE_QUANTIZATIONS`, in place of what
            `training.json` says, which TRL alone does not write. The base's weights are quantized in their own dtype.
        dtype: Of the written weights; `"auto"` is the base's. The norm is always float32.

    Raises:
        ValueError: The folder has no LoRA adapter; the base does not exist, or has another architecture or other
            shapes; a tensor of the adapter does not fit it; or its quantization in training is not known. Nothing is
            written.
    """
    adapter, dtype = Path(adapter), torch_dtype(dtype)
    check_new(output)
    opened = open_adapter(adapter, base, base_quantization)
    with finished_folder(output) as folder:
        processor = opened.processor
        model, quantized, loaded_dtype = _load_base(opened)
        dtype = (opened.config.dtype or loaded_dtype) if dtype == "auto" else dtype
        adapted = opened.put_on(model)
        image, text = Image.linear_gradient("L").convert("RGB"), f"{processor.image_token} What is in the image?"
        inputs = processor(images=image, text=text, return_tensors="pt")
        expected = _logits(adapted, inputs)
        with loading(f"The adapter {adapter}"):
            merged = adapted.merge_and_unload(safe_merge=True)
        difference = (_logits(merged, inputs) - expected).abs().max().item()
        if not difference <= TOLERANCE * expected.abs().max().item():  # nor NaN
            raise ValueError(f"Merging {adapter} changed the model's logits by {difference:.3g}. Nothing was written.")
        for name, parameter in merged.named_parameters():
            if "multi_modal_projector.norm." not in name:
                parameter.data = parameter.data.to(dtype)
        merged.save_pretrained(folder)
        processor.save_pretrained(folder)
        _carry(adapter, opened.base, folder)
    return MergeReport(
        output=str(output),
        adapter=str(adapter),
        base=opened.base.name,
        quantization=quantized,
        dtype=str(dtype).removeprefix("torch."),
        difference=difference,
    )


def _load_base(adapter: Adapter) -> tuple[NormAlignLlavaForConditionalGeneration, str | None, torch.dtype]:
    """The base in float32 on the CPU, dequantized if it was quantized, what the quantization was, and its dtype."""
    settings, config = adapter.quantization, adapter.config
    model = adapter.base.load(
        dtype=adapter.dtype or "auto", config=config, quantization_config=settings, device_map="cpu"
    )
    described, loaded = None, model.dtype
    settings = getattr(model.config, "quantization_config", None)
    if settings is not None:
        described = f"4-bit {settings.bnb_4bit_quant_type}" if settings.load_in_4bit else "8-bit"
        for module in model.modules():
            if type(module).__name__ == "Linear4bit":
                module.weight.quant_state.dtype = torch.float32  # dequantizes without rounding to the loading dtype
        model = model.dequantize(dtype=torch.float32)
        model.is_loaded_in_4bit = model.is_loaded_in_8bit = False  # PEFT still looks at these
    return model.float().eval(), described, loaded


@torch.no_grad()
def _logits(model, inputs: dict[str, Tensor]) -> Tensor:
    return model(**inputs).logits


def _carry(adapter: Path, base: Checkpoint, folder: Path) -> None:
    for name in CARRIED:
        theirs = cached_file(base.name, name, revision=base.revision, _raise_exceptions_for_missing_entries=False)
        own = adapter / name
        if name == CARD and own.is_file() and "# Model Card for Model ID" in own.read_text("utf-8", "replace"):
            continue  # PEFT's, which has local paths
        if found := own if own.is_file() else theirs:
            shutil.copyfile(found, folder / name)
    if (adapter / DYNAMICS).is_file():  # curves and log are the adapter's alone: the base's are another run's
        shutil.copyfile(adapter / DYNAMICS, folder / DYNAMICS)
    if isinstance(state := json_or_none(adapter / STATE), dict):
        state["best_model_checkpoint"] = None  # a local path
        write_json(folder / STATE, state)
