# SPDX-License-Identifier: Apache-2.0
"""Writes a checkpoint of true size whose weights take no disk, for dry runs.

    python benchmarks/sparse_checkpoint.py FOLDER SHAPE

It is FOLDER/checkpoint. SHAPE is one of shapes.py.
"""

import argparse
import json
from pathlib import Path

import torch
from shapes import SHAPES, llava_config
from step import random_checkpoint
from transformers import AutoProcessor

from normalign_llava import (
    NormAlignLlavaConfig,
    NormAlignLlavaForConditionalGeneration,
    stored_tensors,
    write_weights,
)


def sparse_checkpoint(folder: Path, shape: str) -> None:
    """Writes `folder/checkpoint` as `build` does, but weights are a true header and then a hole."""
    random_checkpoint(folder, "tiny")  # for its tokenizer
    checkpoint = folder / "checkpoint"
    config = llava_config(shape, NormAlignLlavaConfig)
    vision_config = config.vision_config
    processor = AutoProcessor.from_pretrained(checkpoint, trust_remote_code=False)
    processor.patch_size = vision_config.patch_size
    image_size = {"height": vision_config.image_size, "width": vision_config.image_size}
    processor.image_processor.size = image_size
    processor.image_processor.crop_size = image_size
    processor.save_pretrained(checkpoint)
    config.image_token_id = processor.image_token_id
    config.image_seq_length = (vision_config.image_size // vision_config.patch_size) ** 2
    for part_config in (config, config.text_config, vision_config):
        part_config.dtype = torch.bfloat16
    config.save_pretrained(checkpoint)
    with torch.device("meta"):
        model = NormAlignLlavaForConditionalGeneration(config).to(torch.bfloat16)
    layout = stored_tensors(model)
    no_numbers = ((name, torch.empty(0)) for name in layout)
    write_weights(checkpoint, layout, no_numbers)
    for weight_file in checkpoint.glob("model-*.safetensors"):
        _extend(weight_file)


def _extend(weight_file: Path) -> None:
    """Extends a file of weights to the size that its header states. The file system stores less."""
    with open(weight_file, "r+b") as file:
        header_length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_length))
        data_length = 0
        for entry in header.values():
            if "data_offsets" in entry:
                data_length = max(data_length, entry["data_offsets"][1])
        file.truncate(8 + header_length + data_length)


def main() -> None:
    """Writes the checkpoint that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("shape", choices=list(SHAPES))
    options = parser.parse_args()
    sparse_checkpoint(options.folder, options.shape)


if __name__ == "__main__":
    main()
