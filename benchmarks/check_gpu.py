# SPDX-License-Identifier: Apache-2.0
"""What a GPU changes, checked without a network in less than nine minutes: `make check-gpu`.

    python benchmarks/check_gpu.py [--device cuda] [--minutes 9] [--only PATTERN]
                                   [--output check-gpu.json]

The norm against float64; two steps with the options of each recipe, and with others, on a model of
135M in size; a resumed run against an uninterrupted one; the merged adapter; answers in 4 bits;
predicted against measured memory at 1B, and at 7B of what fits on 24 GB; then the tests in which a
GPU is used. Weights are random and made here: 45 GB of disk, in the folder for temporary files.

It needs torch for CUDA and this package with its extra `dev`, for some rows a C compiler and
flash-attn: carry wheels (`pip wheel -w wheels '.[dev]'`) for `pip install --no-index --find-links
wheels`. What a machine lacks is a row that says so. An error is one too, and then the exit status
is 1. Without a GPU a tiny model is tried on the CPU.
"""

import argparse
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from measuring import FORKS, in_process, machine
from norm import HookLayerNorm, measured_ratios, step
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file
from shapes import SHAPES
from step import random_checkpoint, write_rows


TESTS = ["architecture", "checkpoint/test_precision.py", "test_models.py"]
TESTS += ["test_cli.py"]
TESTS += [f"evaluation/test_{name}.py" for name in ("ask", "evaluate_batches", "evaluate_run")]

ALIGN, TUNE = (["--stage", stage] for stage in ("align", "tune"))
LORA = [*TUNE, "--use_peft", "true"]
FLASH = [*LORA, "--padding_free", "true", "--attn_implementation", "flash_attention_2"]
OPTIONS: dict[str, tuple[list[str], list[str]]] = {
    "recipe align": (ALIGN, []),
    "recipe tune": (TUNE, []),
    **{f"recipe {name}": ([name], []) for name in ("quickstart-align", "quickstart-tune", "lora")},
    "recipe qlora": (["qlora"], ["bitsandbytes"]),
    "align in 4 bits": ([*ALIGN, "--load_in_4bit", "true"], ["bitsandbytes"]),
    "float32": ([*LORA, "--bf16", "false"], []),
    "bfloat16": ([*LORA, "--bf16", "true"], []),
    "float16": ([*LORA, "--fp16", "true"], ["cuda"]),
    "8 bits": ([*LORA, "--load_in_8bit", "true"], ["bitsandbytes"]),
    "paged_adamw_8bit": ([*TUNE, "--optim", "paged_adamw_8bit"], ["cuda", "bitsandbytes"]),
    "torch.compile": ([*ALIGN, "--torch_compile", "true"], ["cuda", "triton", "cc"]),
    "no checkpointing": ([*LORA, "--gradient_checkpointing", "false"], []),
    "2 workers": ([*ALIGN, "--dataloader_num_workers", "2"], []),
    "padding-free": ([*LORA, "--padding_free", "true"], []),
    "FlashAttention": (FLASH, ["cuda", "flash_attn"]),
}
"""Options of `normalign train`, and what they need besides."""

MEMORY = {
    "full, 1b": ("1b", TUNE, ["cuda"]),
    "qlora, 1b": ("1b", ["qlora"], ["cuda", "bitsandbytes"]),
    "align, 7b": ("7b", ALIGN, ["cuda"]),
    "align in 4 bits, 7b": ("7b", [*ALIGN, "--load_in_4bit", "true"], ["cuda", "bitsandbytes"]),
    "qlora, 7b": ("7b", ["qlora"], ["cuda", "bitsandbytes"]),
}
"""Model, options and needs of the runs whose memory is predicted."""


def check_norm(device: str) -> str:
    """The compensated norm and its gradients against the paper's form in float64, and its time."""
    from normalign_llava import GlobalWeightCompensatedLayerNorm

    torch.manual_seed(0)
    width = 3584
    all_tensors = []
    x, upstream = torch.randn(2, 64, width).bfloat16()
    forms = [(HookLayerNorm(width, 0.0134), "cpu", torch.float64)]
    for dtype in (torch.float32, torch.bfloat16):
        forms.append((GlobalWeightCompensatedLayerNorm(width), device, dtype))
    for norm, place, dtype in forms:
        torch.nn.init.constant_(norm.weight, 0.0134)
        norm.to(place, None if dtype == torch.bfloat16 else dtype)  # the gain stays float32
        tokens = x.to(place, dtype).requires_grad_()
        step(norm, tokens, upstream.to(place, dtype))
        tensors = [norm(tokens).detach(), tokens.grad, norm.weight.grad, norm.bias.grad]
        all_tensors.append([tensor.double().cpu() for tensor in tensors])
    exact, *ours = all_tensors
    errors = []
    for tensors in ours:
        pairs = zip(tensors, exact, strict=True)
        errors.append(max(float((tensor - other).norm() / other.norm()) for tensor, other in pairs))
    timed = argparse.Namespace(device=device, bf16=True, tokens=8192, rounds=4, compile=False)
    ratio = measured_ratios(width, timed)["LayerNorm, compensated: time / torch's LayerNorm"][1]
    text = f"errors {errors[0]:.0e} in float32, {errors[1]:.0e} in bfloat16"
    text += f"; time / torch's LayerNorm {ratio:.2f}"
    if not (errors[0] < 1e-5 and errors[1] < 2e-2):
        raise ValueError(text)
    return text


def train(folder: Path, words: list[str], device: str, predicts: bool = False) -> str:
    """Trains two steps: losses, tokens a second of the second one, and memory."""
    from transformers import PrinterCallback, TrainerCallback, logging

    from normalign_llava.train.parsing import parse
    from normalign_llava.train.run import make_trainer

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    output = folder / ("adapter" if words == ["qlora"] else "run")  # only the former is saved
    own = shared_options(folder, device)
    own |= dict(output_dir=output, max_steps=2, warmup_steps=0, save_strategy="no")
    marks: list[tuple[float, int]] = []

    class Times(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            torch.cuda.synchronize() if device == "cuda" else None
            marks.append((time.perf_counter(), state.num_input_tokens_seen))

    trainer, _ = make_trainer(*parse([*words, *as_words(own, device)]), [Times()])
    trainer.remove_callback(PrinterCallback)
    predicted = trainer.estimate_memory().total if predicts else 0
    torch.cuda.reset_peak_memory_stats() if device == "cuda" else None
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    (before, seen), (after, all_seen) = marks
    speed = (all_seen - seen) / (after - before)
    text = f"losses {losses[0]:.2f}, {losses[1]:.2f}; {speed:,.0f} tokens/s"
    measured = torch.cuda.max_memory_allocated()
    ratio = 1.0
    text += f"; {measured / 2**30:.2f} GiB" if measured else ""
    if predicts:
        ratio = predicted / measured
        text += f", predicted {predicted / 2**30:.2f}: {ratio:.2f} of it"
    if not all(map(math.isfinite, losses)) or predicts and not 0.85 <= ratio <= 1.25:
        raise ValueError(f"a loss or the prediction is wrong: {text}")
    if words == ["qlora"] and not predicts:
        trainer.save_model()
    return text


def shared_options(folder: Path, device: str) -> dict[str, Any]:
    """Options of all runs."""
    return dict(
        model_name_or_path=folder / "checkpoint",
        dataset_name=folder / "data",
        global_batch_size=4,
        per_device_train_batch_size=2,
        logging_steps=1,
        disable_tqdm=True,
        use_cpu=device == "cpu",
    )


def as_words(options: dict[str, Any], device: str) -> list[str]:
    """Options as a command line."""
    options |= {"optim": "adamw_torch"} if device == "cpu" else {}  # the paged one is CUDA's
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def resume(folder: Path, words: list[str], device: str) -> str:
    """Trains twelve steps at once, and again from the sixth: how far losses and weights differ."""
    from transformers import logging

    from normalign_llava.train.parsing import parse
    from normalign_llava.train.run import train as run

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    whole = folder / "whole"
    rest = folder / "rest"
    own = shared_options(folder, device) | dict(max_steps=12, save_steps=6)
    for output, more in ((whole, {}), (rest, {"resume_from_checkpoint": whole / "checkpoint-6"})):
        run(*parse([*words, *as_words({**own, "output_dir": output, **more}, device)]))
    losses = []
    for output in (whole, rest):
        log = json.loads((output / "trainer_state.json").read_text())["log_history"]
        losses.append([entry["loss"] for entry in log if "loss" in entry])
    expected, weights = (load_file(path / "adapter_model.safetensors") for path in (whole, rest))
    loss = max(abs(a - b) for a, b in zip(*losses, strict=True))
    apart = max(float((weights[name] - value).abs().max()) for name, value in expected.items())
    moved = max(float(value.abs().max()) for name, value in expected.items() if "lora_B" in name)
    text = f"{len(losses[0])} losses differ by {loss:.1g} at most, weights by {apart:.1g}"
    text += f" (LoRA's B reaches {moved:.1g})"
    if len(losses[1]) != 12 or not loss < 1e-2 or not apart < 0.1 * moved:
        raise ValueError(text)
    return text


def merge(folder: Path) -> str:
    """Merges an adapter that was trained here, and says by how much outputs differ."""
    from normalign_llava.assembly.merge import merge_adapter

    report = merge_adapter(folder / "adapter", folder / "merged")
    return f"base in {report.quantization}, outputs differ by {report.difference:.0e}"


def answer(folder: Path) -> str:
    """Asks a model in 4 bits; what it answers does not matter."""
    from PIL import Image

    from normalign_llava.evaluation.ask import AskOptions, ask

    checkpoint = str(folder / "checkpoint")
    image = folder / "image.png"
    Image.new("RGB", (64, 64)).save(image)
    options = AskOptions(max_new_tokens=4)
    ask(checkpoint, [str(image), "What is it?"], options, load_in_4bit=True)
    return "answered"


def run_tests(seconds: float, log: Path) -> str:
    """Runs `TESTS` for so many seconds at most: the last line of pytest's output, kept in `log`."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += [f"tests/{test}" for test in TESTS]
    if find_spec("xdist"):
        command += ["-n", str(min(8, os.cpu_count() or 1)), "--dist", "loadfile"]
    root = Path(__file__).parents[1]
    run = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=seconds)
    log.write_text(run.stdout + run.stderr, encoding="utf-8")
    last = (run.stderr + run.stdout).strip().splitlines()[-1].strip("= ")
    if run.returncode:
        failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", run.stdout, re.MULTILINE)
        raise ValueError(", ".join([last, *failed]))
    return last


def made(folder: Path, shape: str, device: str) -> str:
    """Writes a checkpoint of random weights and its rows into a folder."""
    random_checkpoint(folder, shape, device)
    write_rows(folder, SHAPES[shape][0]["image_size"], [(1, 256)] * 8)
    for part in ("vision", "language"):
        shutil.rmtree(folder / part)
    size = sum(file.stat().st_size for file in (folder / "checkpoint").glob("*.safetensors"))
    return f"{size / 2**30:.1f} GiB"


def main() -> None:
    """Runs the checks, prints the table, and exits with 1 if one failed."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cpu", "cuda"], default=default)
    parser.add_argument("--minutes", type=float, default=9.0, help="later checks are left out")
    parser.add_argument("--only", default="", help="pattern of checks; weights are made for all")
    parser.add_argument("--output", type=Path, default=Path("check-gpu.json"))
    options = parser.parse_args()
    # Without bitsandbytes, which begins with CUDA.
    FORKS.set_forkserver_preload(["torch", "transformers.modeling_utils", "datasets"])
    wanted = ("bitsandbytes", "triton", "flash_attn", "pytest", "cc")
    lacking = {name for name in wanted if find_spec(name) is None and shutil.which(name) is None}
    lacking |= {"cuda"} - {device := options.device}
    shape = "135m" if device == "cuda" else "tiny"
    here = machine(device)
    rows = []
    console = Console()
    end = time.monotonic() + 60 * options.minutes

    def check(name: str, needs: list[str], function: Callable[..., str], *arguments: Any) -> bool:
        if function is not made and not re.search(options.only, name):
            return False
        began = time.monotonic()
        absent = ", ".join(sorted(lacking & {*needs}))
        text = f"needs {absent}" if absent else f"{options.minutes:g} minutes are over"
        status = "left out"
        if not absent and end - began > 5:
            try:
                status = "ok"
                text = in_process(function, *arguments, seconds=end - began)
            except RuntimeError as error:
                status = "failed"
                text = str(error)
        seconds = round(time.monotonic() - began, 1)
        rows.append({"check": name, "status": status, "found": text, "seconds": seconds})
        console.print(*rows[-1].values(), sep=" | ", markup=False, soft_wrap=True)
        content = json.dumps({"machine": here, "checks": rows}, indent=2) + "\n"
        options.output.write_text(content, encoding="utf-8")
        return status == "ok"

    check("norm", [], check_norm, device)
    with tempfile.TemporaryDirectory() as name:
        os.environ["HF_DATASETS_CACHE"] = f"{name}/cache"
        small = Path(name, "small")
        if check(f"random weights, {shape}", [], made, small, shape, device):
            for options_of, (words, needs) in OPTIONS.items():
                check(options_of, needs, train, small, words, device)
                if words == ["qlora"]:
                    check("merge", needs, merge, small)
                    check("resume", needs, resume, small, words, device)
            check("ask in 4 bits", ["bitsandbytes"], answer, small)
        for run, (size, words, needs) in MEMORY.items():
            folder = Path(name, size)
            line = f"memory: {run}"
            runs = re.search(options.only, line) and not lacking & {*needs}
            weights = (f"random weights, {size}", needs, made, folder, size, device)
            if runs and not folder.exists() and not check(*weights):
                continue
            check(line, needs, train, folder, words, device, True)
    log = options.output.with_suffix(".log")
    check("tests", ["pytest"], run_tests, end - time.monotonic() - 5, log)
    title = here["accelerator"] or "No GPU: on the CPU, without what needs CUDA"
    table = Table("", "", "found", "s", title=title)
    for row in rows:
        table.add_row(*map(str, row.values()))
    console.print(table, f"Written to {options.output}.", sep="\n")
    sys.exit(any(row["status"] == "failed" for row in rows))


if __name__ == "__main__":
    main()
