# SPDX-License-Identifier: Apache-2.0
"""What `normalign train --dry_run` says of each recipe at true size: the table of docs/train.md.

    python benchmarks/dry_runs.py [--device_memory 24GiB] [--recipes align-qwen2.5-7b ...]
                                  [OPTIONS OF normalign train]

The checkpoints' weights take no disk. Rows have one image and 2,037 tokens.
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch
from shapes import llava_config
from step import random_checkpoint, write_rows

from normalign_llava import NormAlignLlavaConfig, NormAlignLlavaForConditionalGeneration
from normalign_llava.checkpoint.weights import stored_tensors, write_weights


SHAPES = {
    "align-llama-3.2-3b": "3b",
    "align-qwen2.5-7b": "7b",
    "tune-llama-3.2-3b": "3b",
    "tune-qwen2.5-7b": "7b",
    "lora": "7b",
    "qlora": "7b",
}


def sparse_checkpoint(folder: Path, shape: str) -> None:
    """Writes `folder/checkpoint` as `build` does, but weights are a true header and then a hole."""
    from transformers import AutoProcessor

    random_checkpoint(folder, "tiny")  # for its tokenizer
    config = llava_config(shape, NormAlignLlavaConfig)
    made = folder / "checkpoint"
    vision = config.vision_config
    processor = AutoProcessor.from_pretrained(made, trust_remote_code=False)
    processor.patch_size = vision.patch_size
    image = processor.image_processor
    image.size = image.crop_size = {"height": vision.image_size, "width": vision.image_size}
    processor.save_pretrained(made)
    config.image_token_id = processor.image_token_id
    config.image_seq_length = (vision.image_size // vision.patch_size) ** 2
    config.dtype = config.text_config.dtype = vision.dtype = torch.bfloat16
    config.save_pretrained(made)
    with torch.device("meta"):
        layout = stored_tensors(NormAlignLlavaForConditionalGeneration(config).to(torch.bfloat16))
    write_weights(made, layout, ((name, torch.empty(0)) for name in layout))
    for path in made.glob("model-*.safetensors"):
        with open(path, "r+b") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
            ends = [entry.get("data_offsets", [0, 0])[1] for entry in header.values()]
            file.truncate(8 + length + max(ends))


def main() -> None:
    """Prints the verdict of each recipe."""
    from normalign_llava.train.command import read_command
    from normalign_llava.train.run import dry_run

    formatter = argparse.RawDescriptionHelpFormatter
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    arguments.add_argument("--device_memory", default="24GiB")
    arguments.add_argument("--recipes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    options, words = arguments.parse_known_args()
    with tempfile.TemporaryDirectory() as name:
        for shape in {SHAPES[recipe] for recipe in options.recipes}:
            sparse_checkpoint(Path(name, shape), shape)
            write_rows(Path(name, shape), 384, [(1, 640)] * 4)
        for recipe in options.recipes:
            folder = Path(name, SHAPES[recipe])
            own = {
                "model_name_or_path": folder / "checkpoint",
                "dataset_name": folder / "data",
                "image_folder": "",
                "output_dir": Path(name, "run"),
                "dry_run": True,
                "device_memory": options.device_memory,
            }
            print(f"\n== {' '.join([recipe, *words])}", flush=True)
            own_words = [word for key, value in own.items() for word in (f"--{key}", str(value))]
            dry_run(*read_command([recipe, *own_words, *words]))


if __name__ == "__main__":
    main()
