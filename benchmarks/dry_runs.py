# SPDX-License-Identifier: Apache-2.0
"""What `normalign train --dry_run` says of each recipe at true size: the table of docs/train.md.

    python benchmarks/dry_runs.py [--device_memory 24GiB] [--recipes align-qwen2.5-7b ...]
                                  [OPTIONS OF normalign train]

The checkpoints' weights take no disk. Rows have one image and 2,037 tokens.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from sparse_checkpoint import sparse_checkpoint
from step import write_rows

from normalign_llava import option_words


SHAPES = {
    "align-llama-3.2-3b": "3b",
    "align-qwen2.5-7b": "7b",
    "tune-llama-3.2-3b": "3b",
    "tune-qwen2.5-7b": "7b",
    "lora": "7b",
    "qlora": "7b",
}


def dry_run(recipe: str, folder: Path, device_memory: str, words: list[str]) -> bool:
    """Prints the dry run of a recipe, and returns whether it was made. It may say "Does not fit".

    Args:
        recipe: The name of the recipe.
        folder: The folder of `checkpoint` and `data`.
        device_memory: The memory of the GPU.
        words: Further options.
    """
    options = {
        "model_name_or_path": folder / "checkpoint",
        "dataset_name": folder / "data",
        "image_folder": "",
        "output_dir": folder / "run",
        "dry_run": True,
        "device_memory": device_memory,
    }
    command = [sys.executable, "-m", "normalign_llava", "train", recipe]
    print(f"\n== {' '.join([recipe, *words])}", flush=True)
    completed = subprocess.run(
        [*command, *option_words(options), *words], stdout=subprocess.PIPE, text=True
    )
    print(completed.stdout, end="", flush=True)
    return completed.returncode == 0 or "Does not fit:" in completed.stdout


def main() -> None:
    """Prints the verdict of each recipe. Exits with 1 if a dry run failed."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--device_memory", default="24GiB")
    parser.add_argument("--recipes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    options, words = parser.parse_known_args()
    failed = []
    with tempfile.TemporaryDirectory() as temporary:
        for shape in {SHAPES[recipe] for recipe in options.recipes}:
            folder = Path(temporary, shape)
            sparse_checkpoint(folder, shape)
            write_rows(folder, 384, [(1, 640)] * 4)
        for recipe in options.recipes:
            folder = Path(temporary, SHAPES[recipe])
            if not dry_run(recipe, folder, options.device_memory, words):
                failed.append(recipe)
    if failed:
        sys.exit(f"Failed: {', '.join(failed)}.")


if __name__ == "__main__":
    main()
