# SPDX-License-Identifier: Apache-2.0
"""What a GPU changes, checked without a network in less than nine minutes: `make check-gpu`.

    python benchmarks/check_gpu.py [--device cuda] [--minutes 9] [--only PATTERN]
                                   [--output check-gpu.json]

These are checked: the norm against float64. Two steps with the options of each recipe, and with
others, on a model of 135M in size. A resumed run against an uninterrupted one. The merged adapter.
Answers in 4 bits. Predicted against measured memory at 1B, and for what fits on 24 GB at 7B. Then
the tests that use a GPU. Weights are random and made here: 45 GB of disk, in the folder for
temporary files.

It needs torch for CUDA and this package with its extra `dev`, for some rows a C compiler and
flash-attn: carry wheels (`pip wheel -w wheels '.[dev]'`) for `pip install --no-index --find-links
wheels`. If the machine lacks something, a row says so. An error is a row too, and then the exit
status is 1. Without a GPU a tiny model is tried on the CPU.
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
from typing import Any, NamedTuple

import torch
from measuring import FORKS, in_process, machine, quiet
from norm import HookLayerNorm, measured_ratios, step
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file
from shapes import SHAPES
from step import random_checkpoint, write_rows


TESTS = [
    "architecture",
    "checkpoint/test_precision.py",
    "test_models.py",
    "test_cli.py",
    "evaluation/test_ask.py",
    "evaluation/test_evaluate_batches.py",
    "evaluation/test_evaluate_run.py",
]

ALIGN = ["--stage", "align"]
TUNE = ["--stage", "tune"]
LORA = [*TUNE, "--use_peft", "true"]
PADDING_FREE = [*LORA, "--padding_free", "true"]
FLASH = [*PADDING_FREE, "--attn_implementation", "flash_attention_2"]


class Case(NamedTuple):
    """Options of `normalign train`, and what they need besides.

    Attributes:
        words: The options.
        needs: Modules, "cuda" for a GPU, and "cc" for a C compiler.
        shape: The shape of the model whose memory is predicted.
    """

    words: list[str]
    needs: list[str] = []
    shape: str = ""


STEPS = {
    "recipe align": Case(ALIGN),
    "recipe tune": Case(TUNE),
    "recipe quickstart-align": Case(["quickstart-align"]),
    "recipe quickstart-tune": Case(["quickstart-tune"]),
    "recipe lora": Case(["lora"]),
    "recipe qlora": Case(["qlora"], ["bitsandbytes"]),
    "align in 4 bits": Case([*ALIGN, "--load_in_4bit", "true"], ["bitsandbytes"]),
    "float32": Case([*LORA, "--bf16", "false"]),
    "bfloat16": Case([*LORA, "--bf16", "true"]),
    "float16": Case([*LORA, "--fp16", "true"], ["cuda"]),
    "8 bits": Case([*LORA, "--load_in_8bit", "true"], ["bitsandbytes"]),
    "paged_adamw_8bit": Case([*TUNE, "--optim", "paged_adamw_8bit"], ["cuda", "bitsandbytes"]),
    "torch.compile": Case([*ALIGN, "--torch_compile", "true"], ["cuda", "triton", "cc"]),
    "no checkpointing": Case([*LORA, "--gradient_checkpointing", "false"]),
    "2 workers": Case([*ALIGN, "--dataloader_num_workers", "2"]),
    "padding-free": Case(PADDING_FREE),
    "FlashAttention": Case(FLASH, ["cuda", "flash_attn"]),
}
"""The runs of two steps."""

MEMORY = {
    "full, 1b": Case(TUNE, ["cuda"], "1b"),
    "qlora, 1b": Case(["qlora"], ["cuda", "bitsandbytes"], "1b"),
    "align, 7b": Case(ALIGN, ["cuda"], "7b"),
    "align in 4 bits, 7b": Case([*ALIGN, "--load_in_4bit", "true"], ["cuda", "bitsandbytes"], "7b"),
    "qlora, 7b": Case(["qlora"], ["cuda", "bitsandbytes"], "7b"),
}
"""The runs whose memory is predicted."""


def check_norm(device: str) -> str:
    """Compares the compensated norm and its gradients with the paper's form in float64.

    Raises:
        ValueError: They differ.
    """
    torch.manual_seed(0)
    feature_count = 3584
    tokens, upstream = torch.randn(2, 64, feature_count).bfloat16()
    exact = norm_tensors(
        HookLayerNorm(feature_count, 0.0134), tokens, upstream, "cpu", torch.float64
    )
    errors = []
    for dtype in (torch.float32, torch.bfloat16):
        errors.append(norm_error(exact, tokens, upstream, device, dtype))
    full_error, half_error = errors
    timed = argparse.Namespace(device=device, bf16=True, tokens=8192, rounds=4, compile=False)
    ratios = measured_ratios(feature_count, timed)
    _, time_ratio, _ = ratios["LayerNorm, compensated: time / torch's LayerNorm"]
    finding = f"errors {full_error:.0e} in float32, {half_error:.0e} in bfloat16"
    finding += f"; time / torch's LayerNorm {time_ratio:.2f}"
    if not (full_error < 1e-5 and half_error < 2e-2):
        raise ValueError(finding)
    return finding


def norm_tensors(
    norm: torch.nn.Module,
    tokens: torch.Tensor,
    upstream: torch.Tensor,
    device: str,
    dtype: torch.dtype,
) -> list[torch.Tensor]:
    """Makes a forward and a backward pass.

    Args:
        norm: The norm. Its gain is set.
        tokens: Its input, of shape `(tokens, d)`.
        upstream: The gradient at its output, of the same shape.
        device: Where to compute.
        dtype: The dtype of the input.

    Returns:
        The output and the gradients of input, gain and bias, in float64.
    """
    torch.nn.init.constant_(norm.weight, 0.0134)
    norm.to(device)
    if dtype == torch.float64:
        norm.double()
    inputs = tokens.to(device, dtype).requires_grad_()
    step(norm, inputs, upstream.to(device, dtype))
    tensors = [norm(inputs).detach(), inputs.grad, norm.weight.grad, norm.bias.grad]
    return [tensor.double().cpu() for tensor in tensors]


def norm_error(
    exact: list[torch.Tensor],
    tokens: torch.Tensor,
    upstream: torch.Tensor,
    device: str,
    dtype: torch.dtype,
) -> float:
    """Returns the largest relative error of the compensated norm. Its gain is in float32.

    Args:
        exact: What [`norm_tensors`] returns of the paper's form.
        tokens: The input, of shape `(tokens, d)`.
        upstream: The gradient at the output, of the same shape.
        device: Where to compute.
        dtype: The dtype of the input.
    """
    from normalign_llava import GlobalWeightCompensatedLayerNorm

    norm = GlobalWeightCompensatedLayerNorm(tokens.shape[-1])
    largest = 0.0
    for tensor, reference in zip(
        norm_tensors(norm, tokens, upstream, device, dtype), exact, strict=True
    ):
        error = (tensor - reference).norm() / reference.norm()
        largest = max(largest, float(error))
    return largest


def train(folder: Path, words: list[str], device: str, predicts: bool = False) -> str:
    """Trains two steps, and returns losses, tokens a second of the second one, and memory.

    Args:
        folder: The folder of checkpoint and data.
        words: The options. The adapter of `["qlora"]` is saved.
        device: "cpu" or "cuda".
        predicts: Whether memory is predicted too.

    Raises:
        ValueError: A loss is not finite, or the prediction is wrong.
    """
    from transformers import PrinterCallback, TrainerCallback

    from normalign_llava import make_trainer, parse_options

    quiet()
    is_qlora = words == ["qlora"]
    train_options = shared_options(folder, device)
    train_options["output_dir"] = folder / ("adapter" if is_qlora else "run")
    train_options["max_steps"] = 2
    train_options["warmup_steps"] = 0
    train_options["save_strategy"] = "no"
    step_ends: list[tuple[float, int]] = []

    class Times(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if device == "cuda":
                torch.cuda.synchronize()
            step_ends.append((time.perf_counter(), state.num_input_tokens_seen))

    options = parse_options([*words, *as_words(train_options, device)])
    trainer, _ = make_trainer(*options, [Times()])
    trainer.remove_callback(PrinterCallback)
    predicted = 0
    if predicts:
        predicted = trainer.estimate_memory().total
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    (first_end, first_tokens), (second_end, second_tokens) = step_ends
    speed = (second_tokens - first_tokens) / (second_end - first_end)
    finding = f"losses {losses[0]:.2f}, {losses[1]:.2f}; {speed:,.0f} tokens/s"
    measured = torch.cuda.max_memory_allocated()
    if measured:
        finding += f"; {measured / 2**30:.2f} GiB"
    is_as_expected = all(map(math.isfinite, losses))
    if predicts:
        ratio = predicted / measured
        finding += f", predicted {predicted / 2**30:.2f}: {ratio:.2f} of it"
        is_as_expected = is_as_expected and 0.85 <= ratio <= 1.25
    if not is_as_expected:
        raise ValueError(f"a loss or the prediction is wrong: {finding}")
    if is_qlora and not predicts:
        trainer.save_model()
    return finding


def shared_options(folder: Path, device: str) -> dict[str, Any]:
    """Returns the options of all runs."""
    return {
        "model_name_or_path": folder / "checkpoint",
        "dataset_name": folder / "data",
        "global_batch_size": 4,
        "per_device_train_batch_size": 2,
        "logging_steps": 1,
        "disable_tqdm": True,
        "use_cpu": device == "cpu",
    }


def as_words(options: dict[str, Any], device: str) -> list[str]:
    """Returns options as a command line.

    Args:
        options: The options by name.
        device: "cpu" or "cuda". Paged optimizers need the latter.
    """
    from normalign_llava import option_words

    if device == "cpu":
        return option_words({**options, "optim": "adamw_torch"})  # the paged one is CUDA's
    return option_words(options)


def resume(folder: Path, words: list[str], device: str) -> str:
    """Trains twelve steps at once, and again from the sixth. Compares losses and weights.

    Raises:
        ValueError: They differ too much.
    """
    from normalign_llava import parse_options, run_training

    quiet()
    whole_run = folder / "whole"
    resumed_run = folder / "rest"
    whole_options = shared_options(folder, device)
    whole_options["output_dir"] = whole_run
    whole_options["max_steps"] = 12
    whole_options["save_steps"] = 6
    resumed_options = {
        **whole_options,
        "output_dir": resumed_run,
        "resume_from_checkpoint": whole_run / "checkpoint-6",
    }
    for options in (whole_options, resumed_options):
        run_training(*parse_options([*words, *as_words(options, device)]))
    whole_losses = logged_losses(whole_run)
    resumed_losses = logged_losses(resumed_run)
    loss_gap = 0.0
    for whole_loss, resumed_loss in zip(whole_losses, resumed_losses, strict=True):
        loss_gap = max(loss_gap, abs(whole_loss - resumed_loss))
    whole_weights = load_file(whole_run / "adapter_model.safetensors")
    resumed_weights = load_file(resumed_run / "adapter_model.safetensors")
    weight_gap = 0.0
    largest = 0.0
    for name, tensor in whole_weights.items():
        weight_gap = max(weight_gap, float((resumed_weights[name] - tensor).abs().max()))
        if "lora_B" in name:
            largest = max(largest, float(tensor.abs().max()))
    finding = f"{len(whole_losses)} losses differ by {loss_gap:.1g} at most, weights by "
    finding += f"{weight_gap:.1g} (LoRA's B reaches {largest:.1g})"
    if len(resumed_losses) != 12 or not loss_gap < 1e-2 or not weight_gap < 0.1 * largest:
        raise ValueError(finding)
    return finding


def logged_losses(run: Path) -> list[float]:
    """Reads the losses that a run logged."""
    state = json.loads((run / "trainer_state.json").read_text())
    return [entry["loss"] for entry in state["log_history"] if "loss" in entry]


def merge(folder: Path) -> str:
    """Merges an adapter that was trained here, and returns by how much outputs differ."""
    from normalign_llava import merge_adapter

    report = merge_adapter(folder / "adapter", folder / "merged")
    return f"base in {report.quantization}, outputs differ by {report.difference:.0e}"


def answer(folder: Path) -> str:
    """Asks a model in 4 bits. What it answers does not matter."""
    from PIL import Image

    from normalign_llava import AskOptions, ask

    checkpoint = str(folder / "checkpoint")
    image = folder / "image.png"
    Image.new("RGB", (64, 64)).save(image)
    options = AskOptions(max_new_tokens=4, load_in_4bit=True)
    ask(checkpoint, [str(image), "What is it?"], options)
    return "answered"


def run_tests(seconds: float, log: Path) -> str:
    """Runs `TESTS` for so many seconds at most. Keeps pytest's output in `log`.

    Returns:
        The last line of the output.

    Raises:
        ValueError: A test failed.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += [f"tests/{test}" for test in TESTS]
    if find_spec("xdist"):
        workers = min(8, os.cpu_count() or 1)
        command += ["-n", str(workers), "--dist", "loadfile"]
    root = Path(__file__).parents[1]
    completed = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=seconds)
    log.write_text(completed.stdout + completed.stderr, encoding="utf-8")
    output_lines = (completed.stderr + completed.stdout).strip().splitlines()
    summary = output_lines[-1].strip("= ")
    if completed.returncode:
        failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", completed.stdout, re.MULTILINE)
        raise ValueError(", ".join([summary, *failed]))
    return summary


def write_model(folder: Path, shape: str, device: str) -> str:
    """Writes a checkpoint of random weights and its rows.

    Args:
        folder: The folder of both.
        shape: The shape of the model.
        device: Where the weights are made.

    Returns:
        The size of the weights, as text.
    """
    random_checkpoint(folder, shape, device)
    vision_sizes, _ = SHAPES[shape]
    write_rows(folder, vision_sizes["image_size"], [(1, 256)] * 8)
    for part in ("vision", "language"):
        shutil.rmtree(folder / part)
    size = 0
    for weight_file in (folder / "checkpoint").glob("*.safetensors"):
        size += weight_file.stat().st_size
    return f"{size / 2**30:.1f} GiB"


class Checker:
    """Runs checks in processes of their own, until the time is over, and keeps a row for each.

    Args:
        options: The options of the script.
    """

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.machine = machine(options.device)
        self.rows: list[dict[str, Any]] = []
        self.console = Console()
        self.end = time.monotonic() + 60 * options.minutes
        self.lacking = set()
        if options.device != "cuda":
            self.lacking.add("cuda")
        for name in ("bitsandbytes", "triton", "flash_attn", "pytest", "cc"):
            if find_spec(name) is None and shutil.which(name) is None:
                self.lacking.add(name)

    def is_chosen(self, name: str) -> bool:
        """Returns whether `--only` names a check."""
        return re.search(self.options.only, name) is not None

    def check(self, name: str, needs: list[str], function: Callable[..., str], *arguments) -> bool:
        """Runs a check if `--only` names it, and stores its row. Returns whether it is ok.

        Args:
            name: The name of the check.
            needs: What the machine must have.
            function: Returns what was found, or raises.
            arguments: Its arguments.
        """
        if not self.is_chosen(name):
            return False
        return self.run(name, needs, function, *arguments)

    def run(self, name: str, needs: list[str], function: Callable[..., str], *arguments) -> bool:
        """Runs a check as [`check`] does, whatever `--only` names."""
        start = time.monotonic()
        missing = sorted(self.lacking.intersection(needs))
        status = "left out"
        if missing:
            finding = f"needs {', '.join(missing)}"
        elif self.seconds_left() <= 5:
            finding = f"{self.options.minutes:g} minutes are over"
        else:
            try:
                finding = in_process(function, *arguments, seconds=self.seconds_left())
                status = "ok"
            except RuntimeError as error:
                finding = str(error)
                status = "failed"
        seconds = round(time.monotonic() - start, 1)
        check_row = {"check": name, "status": status, "found": finding, "seconds": seconds}
        self.rows.append(check_row)
        self.console.print(*check_row.values(), sep=" | ", markup=False, soft_wrap=True)
        content = json.dumps({"machine": self.machine, "checks": self.rows}, indent=2)
        self.options.output.write_text(content + "\n", encoding="utf-8")
        return status == "ok"

    def seconds_left(self) -> float:
        """Returns the seconds until the time is over."""
        return self.end - time.monotonic()

    def print_table(self) -> None:
        """Prints all rows."""
        title = self.machine["accelerator"] or "No GPU: on the CPU, without what needs CUDA"
        table = Table("", "", "found", "s", title=title)
        for check_row in self.rows:
            table.add_row(*map(str, check_row.values()))
        self.console.print(table, f"Written to {self.options.output}.", sep="\n")


def check_steps(checker: Checker, folder: Path, device: str) -> None:
    """Checks two steps with all options, resuming, merging and asking, on a small model.

    Args:
        checker: Runs the checks.
        folder: A folder for the model and its runs.
        device: "cpu" or "cuda".
    """
    shape = "135m" if device == "cuda" else "tiny"
    if not checker.run(f"random weights, {shape}", [], write_model, folder, shape, device):
        return
    for name, case in STEPS.items():
        checker.check(name, case.needs, train, folder, case.words, device)
        if case.words == ["qlora"]:
            checker.check("merge", case.needs, merge, folder)
            checker.check("resume", case.needs, resume, folder, case.words, device)
    checker.check("ask in 4 bits", ["bitsandbytes"], answer, folder)


def check_memory(checker: Checker, folder: Path, device: str) -> None:
    """Checks the prediction of memory on larger models. Each is made when it is first needed.

    Args:
        checker: Runs the checks.
        folder: A folder for the models.
        device: "cpu" or "cuda".
    """
    for name, case in MEMORY.items():
        check_name = f"memory: {name}"
        model_folder = folder / case.shape
        can_run = checker.is_chosen(check_name) and checker.lacking.isdisjoint(case.needs)
        if can_run and not model_folder.exists():
            weights = f"random weights, {case.shape}"
            arguments = (model_folder, case.shape, device)
            if not checker.run(weights, case.needs, write_model, *arguments):
                continue
        checker.check(check_name, case.needs, train, model_folder, case.words, device, True)


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
    # Not bitsandbytes, since it starts CUDA when it is imported.
    FORKS.set_forkserver_preload(["torch", "transformers.modeling_utils", "datasets"])
    checker = Checker(options)
    checker.check("norm", [], check_norm, options.device)
    with tempfile.TemporaryDirectory() as temporary:
        os.environ["HF_DATASETS_CACHE"] = f"{temporary}/cache"
        folder = Path(temporary)
        check_steps(checker, folder / "small", options.device)
        check_memory(checker, folder, options.device)
    log = options.output.with_suffix(".log")
    checker.check("tests", ["pytest"], run_tests, checker.seconds_left() - 5, log)
    checker.print_table()
    sys.exit(any(check_row["status"] == "failed" for check_row in checker.rows))


if __name__ == "__main__":
    main()
