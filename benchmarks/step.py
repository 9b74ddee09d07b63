# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What a training step costs: ours and stock LLaVA with TRL's `SFTTrainer`, with the same parts, rows and options.

    python benchmarks/step.py [--device cuda] [--parts 1b] [--train projector|lora|all] [--output results.json]

Each variant trains in its own process, and the processes take turns step by step, so that times of the same batch are
compared. A step is everything from one `on_step_begin` to the next: collating, forward, backward, optimizer, callbacks
and logging. Every tenth step is logged, and measured by our callback; these are shown separately.

On a CPU, our trainer computes logits of the answers only, and TRL's of every position; the variant "all scored" does
so too, for a comparison at equal work.
"""

import argparse
import multiprocessing
import os
import random
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from measuring import write
from rich.console import Console
from rich.progress import track
from rich.table import Table


WARM_UP = 2
LOGGING_STEPS = 10
STOCK = "stock"  # LLaVA, with TRL's trainer and collator
OURS = "ours"
ALL_SCORED = "ours, all scored"
NO_NORM = "ours, all scored, no norm"
CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>'"
    " + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def real_parts(folder: Path, rows: int) -> None:
    """The quickstart's untrained checkpoint and rows: SmolLM2-135M, DINOv2-small at 56 pixels, easy-VQA and emoji."""
    from normalign_llava import build_checkpoint
    from normalign_llava.fetched.convert import convert_language, convert_vision
    from normalign_llava.fetched.easy_vqa import training_data

    build_checkpoint(str(convert_vision(56)), str(convert_language()), folder / "checkpoint", feature_layer=-4)
    training_data(rows, emoji_count=40).save_to_disk(folder / "data")


def random_parts(folder: Path, rows: int, vision=None, language=None, words=(120, 360), device="cpu") -> None:
    """A checkpoint with random weights, by default of SigLIP-SO400M at 384 pixels and Llama-3.2-1B in size, and rows.

    Args:
        folder: Gets `checkpoint` and `data`.
        rows: How many rows, each with one image and an answer of words of one letter.
        vision, language: Configurations of a SigLIP encoder and of a language model.
        words: Fewest and most words of an answer.
        device: Where the weights are made.
    """
    from datasets import Dataset
    from PIL import Image
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoModel, AutoModelForCausalLM, LlamaConfig, SiglipImageProcessor, SiglipVisionConfig
    from transformers import PreTrainedTokenizerFast as FastTokenizer

    from normalign_llava import build_checkpoint
    from normalign_llava.fetched.easy_vqa import FEATURES, png

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(["<|im_start|>", "<|im_end|>", *letters])}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = FastTokenizer(
        tokenizer_object=backend, eos_token="<|im_end|>", extra_special_tokens=["<|im_start|>"], chat_template=CHATML
    )
    tokenizer.save_pretrained(folder / "language")
    language = language or LlamaConfig(
        vocab_size=128_256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, tie_word_embeddings=True, eos_token_id=1,
    )  # fmt: skip
    vision = vision or SiglipVisionConfig(
        hidden_size=1152, intermediate_size=4304, num_hidden_layers=27, num_attention_heads=16, image_size=384,
        patch_size=14,
    )  # fmt: skip
    for model, config, name in ((AutoModelForCausalLM, language, "language"), (AutoModel, vision, "vision")):
        with torch.device(device):
            made = model.from_config(config, dtype=torch.bfloat16)
        made.save_pretrained(folder / name)
    side = vision.image_size
    SiglipImageProcessor(size={"height": side, "width": side}).save_pretrained(folder / "vision")
    build_checkpoint(str(folder / "vision"), str(folder / "language"), folder / "checkpoint")

    rng = random.Random(0)
    data = []
    for _ in range(rows):
        user = [{"type": "image"}, {"type": "text", "text": "what is in the image?"}]
        answer = [{"type": "text", "text": " ".join(rng.choices("etaoin", k=rng.randint(*words)))}]
        messages = [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]
        image = Image.frombytes("RGB", (side, side), rng.randbytes(3 * side**2))
        data.append({"images": [{"bytes": png(image)}], "messages": messages})
    Dataset.from_list(data, features=FEATURES).save_to_disk(folder / "data")


PARTS = {"real": real_parts, "1b": random_parts}


def make_trainer(variant: str, folder: Path, options: argparse.Namespace, steps: int):
    """The trainer of a variant on `folder/checkpoint` and `folder/data`."""
    from datasets import load_from_disk
    from transformers import AutoProcessor, LlavaForConditionalGeneration, PrinterCallback
    from trl import SFTConfig, SFTTrainer, get_peft_config

    from normalign_llava.data.sources.arguments import DataArguments
    from normalign_llava.data.sources.mixtures import load_data
    from normalign_llava.train.modules.adapter import language_adapter
    from normalign_llava.train.modules.model import base_model, eval_frozen, freeze
    from normalign_llava.train.options.arguments import ModelArguments, NormAlignConfig
    from normalign_llava.train.trainer import NormAlignTrainer

    class AllScoredTrainer(NormAlignTrainer):
        """Ours with TRL's loss on a CPU, too."""

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            eval_frozen(base_model(self.accelerator.unwrap_model(model)))
            return SFTTrainer.compute_loss(self, model, inputs, return_outputs, num_items_in_batch)

    checkpoint = str(folder / "checkpoint")
    shared: dict[str, Any] = dict(
        output_dir=str(folder / "runs" / variant),
        max_steps=steps + 1,
        per_device_train_batch_size=options.batch,
        learning_rate=options.learning_rate,
        max_length=None,
        assistant_only_loss=True,
        gradient_checkpointing=False,
        bf16=options.bf16,
        use_cpu=options.device == "cpu",
        logging_steps=LOGGING_STEPS,
        save_strategy="no",
        train_sampling_strategy="sequential",
        report_to="none",
        disable_tqdm=True,
        seed=0,
    )
    frozen = {} if options.train == "all" else {"vision_learning_rate": 0.0}
    if options.train == "projector":
        frozen["language_learning_rate"] = 0.0
    ours = NormAlignConfig(**shared, **frozen, arm="none" if variant == NO_NORM else None)
    model_args = ModelArguments(model_name_or_path=checkpoint, use_peft=options.train == "lora", lora_dropout=0.0)
    rates, adapter = ours.learning_rates(model_args.use_peft), get_peft_config(model_args)
    processor = AutoProcessor.from_pretrained(checkpoint, trust_remote_code=False)
    if variant == STOCK:
        model = LlavaForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32)
        freeze(model, rates)
        trainer = SFTTrainer(
            model,
            SFTConfig(**shared),
            train_dataset=load_from_disk(str(folder / "data")),
            processing_class=processor,
            peft_config=adapter and language_adapter(adapter, model, rates),
        )
    else:
        data = load_data(
            DataArguments(dataset_name=str(folder / "data")), processor, max_length=None, seed=0, with_eval=False
        )
        trainer = (NormAlignTrainer if variant == OURS else AllScoredTrainer)(
            checkpoint, ours, train_dataset=data.train, peft_config=adapter
        )
    trainer.remove_callback(PrinterCallback)
    return trainer


def train(make, variant: str, folder: Path, options: argparse.Namespace, steps: int, turns) -> None:
    """Trains what `make` returns, in this process.

    Each step sends the seconds of the one before to the pipe `turns`, and waits for it.
    """
    from transformers import TrainerCallback, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()

    class InTurns(TrainerCallback):
        started = 0.0

        def on_step_begin(self, args, state, control, **kwargs):
            if options.device == "cuda":
                torch.cuda.synchronize()
            turns.send(time.perf_counter() - self.started)
            turns.recv()
            self.started = time.perf_counter()

    trainer = make(variant, folder, options, steps)
    trainer.add_callback(InTurns())
    trainer.train()
    unit = 1 if sys.platform == "darwin" else 1024
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    turns.send(
        {
            "bytes": torch.cuda.max_memory_allocated() if options.device == "cuda" else own,
            "trained": sum(p.numel() for p in trainer.model.parameters() if p.requires_grad),
            "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        }
    )


def run(
    folder: Path, variants: list[str], options: argparse.Namespace, steps: int, make=make_trainer
) -> tuple[dict, dict]:
    """Trains all variants in turns: the seconds of every step, and the last message of each process.

    `make` is called in each process with the variant, `folder`, `options` and `steps`, and returns its trainer.
    """
    spawn = multiprocessing.get_context("spawn")
    pipes, processes = {}, []
    for variant in variants:
        pipes[variant], theirs = spawn.Pipe()
        arguments = (make, variant, folder, options, steps, theirs)
        processes.append(spawn.Process(target=train, args=arguments, daemon=True))
        processes[-1].start()
        theirs.close()  # so that recv raises if the process fails
        pipes[variant].recv()  # models are loaded one after the other
    seconds: dict[str, list[float]] = {variant: [] for variant in variants}
    for _ in track(range(steps), description=", ".join(variants)):
        for variant in random.sample(variants, len(variants)):
            pipes[variant].send("go")
            seconds[variant].append(pipes[variant].recv())
    ends = {}
    for variant, process in zip(variants, processes, strict=True):
        pipes[variant].send("go")
        ends[variant] = pipes[variant].recv()
        process.join()
    return seconds, ends


def compare(runs: list[dict[str, list[float]]], variant: str, reference: str) -> dict[str, Any]:
    """Ratios of times of the same batch: medians over steps and runs."""
    plain, logged = [], []
    for seconds in runs:
        for number, (ours, theirs) in enumerate(zip(seconds[variant], seconds[reference], strict=True), start=1):
            if number > WARM_UP:
                (plain if number % LOGGING_STEPS else logged).append(ours / theirs)
    quarter, middle, three_quarters = statistics.quantiles(plain, n=4)
    at_logged = statistics.median(logged)
    return {
        "step": middle,
        "step, quartiles": [quarter, three_quarters],
        "logged step": at_logged,
        "all steps": middle + (at_logged - middle) / LOGGING_STEPS,
    }


def main() -> None:
    """Runs the comparison and prints it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--parts", default="real", choices=list(PARTS), help="real: the quickstart's; 1b: random")
    parser.add_argument("--train", default="lora", choices=["projector", "lora", "all"])
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=True, help="multiply in bfloat16")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--learning_rate", type=float, default=1e-5)
    parser.add_argument("--steps", type=int, default=30, help="steps that count, of each variant; at least 18")
    parser.add_argument("--repeats", type=int, default=2, help="runs, each with processes of its own")
    parser.add_argument("--output", help="also write the figures to this file")
    options = parser.parse_args()
    if options.steps < 18:
        parser.error(f"--steps is {options.steps}; two logged steps, for which it takes 18, are the least to compare")

    variants = [STOCK, OURS, NO_NORM] if options.device == "cuda" else [STOCK, ALL_SCORED, NO_NORM, OURS]
    runs, ends, peaks = [], {}, {variant: [] for variant in variants}
    with tempfile.TemporaryDirectory() as name:
        os.environ["HF_DATASETS_CACHE"] = f"{name}/cache"
        PARTS[options.parts](Path(name), options.batch * (WARM_UP + options.steps + 2))
        for _ in range(options.repeats):
            seconds, ends = run(Path(name), variants, options, WARM_UP + options.steps)
            runs.append(seconds)
        # glibc keeps some freed memory. With a fixed threshold the peak is what was in use; since that takes time,
        # peaks are measured in separate runs, up to the first logged step.
        os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**16)
        for _ in range(options.repeats):
            for variant in variants:
                peaks[variant].append(run(Path(name), [variant], options, LOGGING_STEPS)[1][variant]["bytes"])

    with_norm = OURS if options.device == "cuda" else ALL_SCORED
    pairs = [(variant, STOCK) for variant in variants if variant != STOCK] + [(with_norm, NO_NORM)]
    peak = {variant: statistics.median(values) for variant, values in peaks.items()}
    found = {}
    for variant, reference in pairs:
        memory = {"peak memory": peak[variant] / peak[reference]}
        found[f"{variant} / {reference}"] = compare(runs, variant, reference) | memory
    console = Console()
    precision = "bfloat16" if options.bf16 else "float32"
    what = f"{options.parts} parts, {options.train} trained, batch {options.batch}, {precision}, {options.device}"
    table = Table("", title=f"A training step, {what}: ratios")
    for column in ("step", "quartiles", f"logged step (1 in {LOGGING_STEPS})", "all steps", "peak memory"):
        table.add_column(column, justify="right")
    for pair, row in found.items():
        spread = " to ".join(f"{value:.3f}" for value in row["step, quartiles"])
        cells = [f"{row[key]:.3f}" for key in ("logged step", "all steps", "peak memory")]
        table.add_row(pair, f"{row['step']:.3f}", spread, *cells)
    console.print(table)
    stock = statistics.median(runs[-1][STOCK][WARM_UP:])
    console.print(
        f"Stock: {stock:.3f} s a step, {peak[STOCK] / 2**30:.2f} GiB at the peak, "
        f"{ends[STOCK]['trained']:,} parameters trained; ours {ends[with_norm]['trained']:,}."
    )
    for variant in variants:
        console.print(f"Losses, {variant}: {', '.join(f'{loss:.3f}' for loss in ends[variant]['losses'])}")
    rows = []
    for pair, row in found.items():
        variant, reference = pair.split(" / ")
        name = f"training step, {options.train} trained, {precision}: {variant}"
        rows.append((name, f"time, peak memory / {reference}", f"{row['all steps']:.3f}, {row['peak memory']:.3f}"))
    write(rows, options, ratios=found, seconds=runs, peak_bytes=peaks)


if __name__ == "__main__":
    main()
