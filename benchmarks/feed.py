# SPDX-License-Identifier: Apache-2.0
"""How fast training gets its data: batches, and the checks before the first step.

    python benchmarks/feed.py [--images 128] [--rows 20000 200000] [--rounds 4]
                              [--output results.json]

Batches are of 8 rows with an image each, JPEGs of 640 x 480 pixels that become 384 x 384, 729
tokens. Bare is opening and decoding the same files, and the image processor. All three take turns
in one process, and their CPU time counts.

Rows are checked as before training, each number of rows in a process of its own, twice: cold, and
warm with the cache of the first. Images are hard links to few files. Bytes a row are the difference
of the peaks of both numbers of rows.
"""

import json
import os
import random
import resource
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from measuring import in_process, in_turns, parser, quartiles, report, spread
from PIL import Image
from shapes import TINY


BATCH = 8
LINKS = 10_000
WORDS = ["a", "the", "of", "on", "with", "red", "blue", "dog", "cat", "street", "sign", "photo"]
WORDS += ["people", "white"]
STARTS = ("cold", "warm")
QUESTION = "Provide a brief description of the given image."


def write_checkpoint(folder: Path) -> None:
    """Writes `folder/checkpoint`: SmolLM2, and a tiny vision encoder with 729 patches.

    Args:
        folder: The folder. The vision encoder is written into it too.
    """
    from transformers import AutoModel, SiglipImageProcessor, SiglipVisionConfig

    from normalign_llava import build_checkpoint, convert_language

    vision = folder / "vision"
    config = SiglipVisionConfig(**TINY, image_size=384, patch_size=14)
    AutoModel.from_config(config).save_pretrained(vision)
    SiglipImageProcessor(size={"height": 384, "width": 384}).save_pretrained(vision)
    build_checkpoint(str(vision), str(convert_language()), folder / "checkpoint")


def write_rows(folder: Path, count: int) -> None:
    """Writes `folder/COUNT.json` in LLaVA's form, and its images.

    Args:
        folder: The folder. Images that are there are not written again.
        count: The number of rows.
    """
    generator = random.Random(0)
    rows = []
    for number in range(count):
        image = Path("images", f"{number // 1000:05}", f"{number:09}.jpg")
        if not (folder / image).exists():
            (folder / image).parent.mkdir(parents=True, exist_ok=True)
            source = folder / f"{number // LINKS:05}.jpg"  # a file has a largest number of links
            if not source.exists():
                write_image(source, number)
            os.link(source, folder / image)
        question = {"from": "human", "value": f"{QUESTION}\n<image>"}
        answer = {"from": "gpt", "value": " ".join(generator.choices(WORDS, k=12))}
        row = {"id": f"{number:09}", "image": str(image), "conversations": [question, answer]}
        rows.append(row)
    (folder / f"{count}.json").write_text(json.dumps(rows))


def write_image(path: Path, seed: int) -> None:
    """Writes a JPEG of 640 x 480 pixels and some 60 kB, like a photograph.

    Args:
        path: The file.
        seed: The seed of its random pixels.
    """
    generator = np.random.default_rng(seed)
    coarse = Image.fromarray(generator.integers(0, 256, (30, 40, 3), dtype=np.uint8))
    smooth = coarse.resize((640, 480), Image.Resampling.BICUBIC)
    pixels = np.asarray(smooth).astype(int) + generator.integers(-8, 9, (480, 640, 3))
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path, quality=85)


def read_rows(folder: Path, count: int):
    """Reads the processor and the rows.

    Args:
        folder: The folder of the checkpoint and the rows.
        count: The number of rows, in the name of their file.

    Returns:
        The processor, and the rows as training has them.
    """
    from transformers import AutoProcessor

    from normalign_llava import DataArguments, load_data

    processor = AutoProcessor.from_pretrained(folder / "checkpoint", trust_remote_code=False)
    arguments = DataArguments(dataset_name=str(folder / f"{count}.json"))
    data = load_data(arguments, processor, max_length=2048, seed=0, with_eval=False)
    return processor, data.train


def cpu_seconds() -> float:
    """Returns the CPU time of this process, and of those that it has waited for."""
    seconds = 0.0
    for processes in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(processes)
        seconds += usage.ru_utime + usage.ru_stime
    return seconds


def peak() -> int:
    """Returns the bytes of this process's peak. `getrusage` has its parent's too."""
    status = Path("/proc/self/status").read_text()
    _, _, after = status.partition("VmHWM:")
    return int(after.split()[0]) * 1024


def check_rows(folder: Path, count: int) -> dict[str, float]:
    """Measures time and memory of the checks, in this process.

    Args:
        folder: The folder of the checkpoint and the rows.
        count: The number of rows.

    Returns:
        `cpu` seconds, the number of `rows`, and bytes at the `peak` of this process and of the
        largest one that it has waited for, `others`.
    """
    before = cpu_seconds()
    _, rows = read_rows(folder, count)
    return {
        "cpu": cpu_seconds() - before,
        "rows": len(rows),
        "peak": peak(),
        "others": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
    }


def loaders(folder: Path, images: int) -> dict[str, Callable[[], object]]:
    """Returns functions that read all images once.

    Args:
        folder: The folder of the checkpoint and the rows.
        images: The number of rows, with an image each.

    Returns:
        Our loader, TRL's, and the bare image processor, by name.
    """
    from datasets import Dataset, Image as ImageFeature, List
    from torch.utils.data import DataLoader
    from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

    from normalign_llava import ConversationCollator

    processor, rows = read_rows(folder, images)
    row_list = [{"images": row["images"], "messages": row["messages"]} for row in rows]
    image_files = [row["images"][0]["path"] for row in row_list]
    stock_rows = Dataset.from_list(row_list).cast_column("images", List(ImageFeature()))

    def collate_images(paths: list[str]) -> object:
        decoded = [Image.open(path).convert("RGB") for path in paths]
        return processor.image_processor(decoded, return_tensors="pt")

    def collate_with_trl(batch: list[dict[str, Any]]) -> object:
        collator = DataCollatorForVisionLanguageModeling(processor, assistant_only_loss=True)
        return collator([{**row, "messages": plain(row["messages"])} for row in batch])

    def read(dataset, collate) -> None:
        for _ in DataLoader(dataset, BATCH, collate_fn=collate):
            pass

    return {
        "bare": partial(read, image_files, collate_images),
        "this package": partial(read, rows, ConversationCollator(processor)),
        "TRL": partial(read, stock_rows, collate_with_trl),
    }


def plain(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns messages without the empty texts that Arrow gives image parts."""
    plain_messages = []
    for message in messages:
        content = []
        for part in message["content"]:
            content.append({key: value for key, value in part.items() if value is not None})
        plain_messages.append({"role": message["role"], "content": content})
    return plain_messages


def cpu_time(function: Callable[[], object]) -> float:
    """Measures the CPU seconds of a call in this process."""
    start = time.process_time()
    function()
    return time.process_time() - start


def costs_of_a_row(smaller: dict[str, float], larger: dict[str, float]) -> str:
    """Returns what each further row costs.

    Args:
        smaller: What [`check_rows`] measured on fewer rows.
        larger: What it measured on more rows.

    Returns:
        Milliseconds of CPU, bytes in the process and bytes in others, as text.
    """
    further_rows = larger["rows"] - smaller["rows"]
    milliseconds = 1e3 * (larger["cpu"] - smaller["cpu"]) / further_rows
    own_bytes = max(0, larger["peak"] - smaller["peak"]) / further_rows
    other_bytes = max(0, larger["others"] - smaller["others"]) / further_rows
    return f"{milliseconds:.3f}, {own_bytes:.0f}, {other_bytes:.0f}"


def main() -> None:
    """Runs all of it and prints it."""
    arguments = parser(__doc__)
    arguments.add_argument("--images", type=int, default=128)
    numbers = "a smaller and a larger number"
    arguments.add_argument("--rows", type=int, nargs=2, default=[20_000, 200_000], help=numbers)
    arguments.add_argument("--rounds", type=int, default=4)
    options = arguments.parse_args()
    smaller, larger = options.rows
    checks = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        os.environ["HF_DATASETS_CACHE"] = f"{temporary}/cache"
        write_checkpoint(folder)
        for count in sorted({options.images, smaller, larger}):
            write_rows(folder, count)
        for count in (smaller, larger):
            for start in STARTS:
                checks[f"{count:,} rows, {start}"] = in_process(check_rows, folder, count)
        cpu = in_turns(loaders(folder, options.images), options.rounds, cpu_time)
    ratios = []
    for loader in ("this package", "TRL"):
        ratios.append(spread(quartiles(cpu["bare"], cpu[loader])))
    measured = "images per second of CPU / bare decoding: this package; TRL"
    table_rows = [("batches", measured, "; ".join(ratios))]
    row_costs = []
    for start in STARTS:
        smaller_check = checks[f"{smaller:,} rows, {start}"]
        larger_check = checks[f"{larger:,} rows, {start}"]
        row_costs.append(costs_of_a_row(smaller_check, larger_check))
    measured = f"ms of CPU, bytes a row, in the process and others: {'; '.join(STARTS)}"
    table_rows.append(("before the first step", measured, "; ".join(row_costs)))
    report("Feeding", table_rows, options, checks=checks, cpu_seconds=cpu)


if __name__ == "__main__":
    main()
