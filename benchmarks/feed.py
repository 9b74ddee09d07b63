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
from pathlib import Path

import numpy as np
from measuring import in_process, in_turns, parser, quartiles, report, spread
from PIL import Image
from shapes import TINY


BATCH = 8
LINKS = 10_000
WORDS = ["a", "the", "of", "on", "with", "red", "blue", "dog", "cat", "street", "sign", "photo"]
WORDS += ["people", "white"]
QUESTION = "Provide a brief description of the given image."


def write_checkpoint(folder: Path) -> None:
    """`folder/checkpoint`, of SmolLM2's tokenizer and a tiny vision encoder with 729 patches."""
    from transformers import AutoModel, SiglipImageProcessor, SiglipVisionConfig

    from normalign_llava import build_checkpoint
    from normalign_llava.fetched.convert import convert_language

    config = SiglipVisionConfig(**TINY, image_size=384, patch_size=14)
    AutoModel.from_config(config).save_pretrained(folder / "vision")
    SiglipImageProcessor(size={"height": 384, "width": 384}).save_pretrained(folder / "vision")
    build_checkpoint(str(folder / "vision"), str(convert_language()), folder / "checkpoint")


def write_rows(folder: Path, count: int) -> None:
    """`folder/COUNT.json` in LLaVA's form, and its images."""
    rng = random.Random(0)
    rows = []
    for number in range(count):
        image = Path("images", f"{number // 1000:05}", f"{number:09}.jpg")
        if not (folder / image).exists():
            (folder / image).parent.mkdir(parents=True, exist_ok=True)
            source = folder / f"{number // LINKS:05}.jpg"  # a file has a largest number of links
            if not source.exists():
                write_image(source, number)
            os.link(source, folder / image)
        answer = " ".join(rng.choices(WORDS, k=12))
        question = {"from": "human", "value": f"{QUESTION}\n<image>"}
        turns = [question, {"from": "gpt", "value": answer}]
        rows.append({"id": f"{number:09}", "image": str(image), "conversations": turns})
    (folder / f"{count}.json").write_text(json.dumps(rows))


def write_image(path: Path, seed: int) -> None:
    """A JPEG of 640 x 480 pixels and some 60 kB, as of a photograph."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (30, 40, 3), dtype=np.uint8))
    smooth = coarse.resize((640, 480), Image.Resampling.BICUBIC)
    pixels = np.asarray(smooth).astype(int) + rng.integers(-8, 9, (480, 640, 3))
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path, quality=85)


def loaded(folder: Path, count: int):
    """The processor, and the rows as training has them."""
    from transformers import AutoProcessor

    from normalign_llava.data.sources.arguments import DataArguments
    from normalign_llava.data.sources.mixtures import load_data

    processor = AutoProcessor.from_pretrained(folder / "checkpoint", trust_remote_code=False)
    arguments = DataArguments(dataset_name=str(folder / f"{count}.json"))
    data = load_data(arguments, processor, max_length=2048, seed=0, with_eval=False)
    return processor, data.train


def cpu_seconds() -> float:
    """CPU time of this process, and of those that it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def peak() -> int:
    """Bytes of this process's peak, without its parent's, which `getrusage` has."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def check_rows(folder: Path, count: int) -> dict[str, float]:
    """Time and memory of the checks, in this process."""
    before = cpu_seconds()
    _, rows = loaded(folder, count)
    others = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    return {"cpu": cpu_seconds() - before, "rows": len(rows), "peak": peak(), "others": others}


def loaders(folder: Path, images: int) -> dict[str, Callable[[], object]]:
    """What reads all images once: our loader, TRL's collator, and the image processor alone."""
    from datasets import Dataset, Image as ImageFeature, List
    from torch.utils.data import DataLoader
    from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

    from normalign_llava.train.collator import ConversationCollator

    processor, rows = loaded(folder, images)
    listed = [{"images": row["images"], "messages": row["messages"]} for row in rows]
    files = [row["images"][0]["path"] for row in listed]
    stock = Dataset.from_list(listed)
    stock = stock.cast_column("images", List(ImageFeature()))

    def bare(paths: list[str]) -> object:
        images = [Image.open(path).convert("RGB") for path in paths]
        return processor.image_processor(images, return_tensors="pt")

    def trl(batch: list[dict]) -> object:
        collator = DataCollatorForVisionLanguageModeling(processor, assistant_only_loss=True)
        return collator([{**row, "messages": plain(row["messages"])} for row in batch])

    def reader(rows, collate) -> Callable[[], object]:
        return lambda: [None for _ in DataLoader(rows, BATCH, collate_fn=collate)]

    ours = ConversationCollator(processor)
    readers = {"bare": reader(files, bare), "this package": reader(rows, ours)}
    return readers | {"TRL": reader(stock, trl)}


def plain(messages: list[dict]) -> list[dict]:
    """Messages without the empty texts that Arrow gives image parts."""
    kept = []
    for message in messages:
        parts = message["content"]
        content = [{k: v for k, v in part.items() if v is not None} for part in parts]
        kept.append({"role": message["role"], "content": content})
    return kept


def cpu_time(function: Callable[[], object]) -> float:
    """CPU seconds of a call in this process."""
    start = time.process_time()
    function()
    return time.process_time() - start


def main() -> None:
    """Runs all of it and prints it."""
    arguments = parser(__doc__)
    arguments.add_argument("--images", type=int, default=128)
    numbers = "a smaller and a larger number"
    arguments.add_argument("--rows", type=int, nargs=2, default=[20_000, 200_000], help=numbers)
    arguments.add_argument("--rounds", type=int, default=4)
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checks = {}
        os.environ["HF_DATASETS_CACHE"] = f"{name}/cache"
        write_checkpoint(folder)
        for count in sorted({options.images, *options.rows}):
            write_rows(folder, count)
        for count in options.rows:
            for start in ("cold", "warm"):
                checks[f"{count:,} rows, {start}"] = in_process(check_rows, folder, count)
        cpu = in_turns(loaders(folder, options.images), options.rounds, cpu_time)
    compared = ("this package", "TRL")
    of_cpu = "; ".join(spread(quartiles(cpu["bare"], cpu[kind])) for kind in compared)
    rows = [("batches", f"images per second of CPU / bare decoding: {'; '.join(compared)}", of_cpu)]
    shown = []
    for start in ("cold", "warm"):
        small, large = (checks[f"{count:,} rows, {start}"] for count in options.rows)
        more = large["rows"] - small["rows"]
        figures = [1e3 * (large["cpu"] - small["cpu"]) / more]
        figures += [max(0, large[name] - small[name]) / more for name in ("peak", "others")]
        shown.append("{:.3f}, {:.0f}, {:.0f}".format(*figures))
    what = "ms of CPU, bytes a row, in the process and others: cold; warm"
    rows.append(("before the first step", what, "; ".join(shown)))
    report("Feeding", rows, options, checks=checks, cpu_seconds=cpu)


if __name__ == "__main__":
    main()
