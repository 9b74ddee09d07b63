# SPDX-License-Identifier: Apache-2.0
"""What a training step costs: ours and stock LLaVA with TRL's `SFTTrainer`.

    python benchmarks/step.py [--device cuda] [--output results.json]

On the quickstart's parts and rows, each variant trains adapters in its own process, and the
processes take turns step by step, so that times of the same batch are compared. A step is
everything from one `on_step_begin` to the next: collating, forward, backward, optimizer, callbacks
and logging. Every tenth step is logged, and measured by our callback.

On a CPU, our trainer computes logits of the answers only, and TRL's of every position; the variant
"all scored" does so too, for a comparison at equal work. All have weights in float32.
"""

import argparse
import multiprocessing
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from measuring import parser, quartiles, report, spread
from rich.progress import track
from shapes import SHAPES


WARM_UP = 2
LOGGING_STEPS = 10
STOCK = "stock"  # LLaVA, with TRL's trainer and collator
OURS = "this package"
ALL_SCORED = "all scored"
CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def real_parts(folder: Path, rows: int) -> None:
    """The quickstart's untrained checkpoint, of SmolLM2-135M and DINOv2-small, and its rows."""
    from normalign_llava import build_checkpoint
    from normalign_llava.fetched.convert import convert_language, convert_vision
    from normalign_llava.fetched.easy_vqa import training_data

    vision = str(convert_vision(56))
    language = str(convert_language())
    build_checkpoint(vision, language, folder / "checkpoint", feature_layer=-4)
    training_data(rows).save_to_disk(folder / "data")


def random_checkpoint(folder: Path, shape: str, device: str = "cpu") -> None:
    """Writes `folder/checkpoint`: random weights, made on `device`, and a tokenizer of bytes."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    from normalign_llava import build_checkpoint

    tokens = ["<|im_start|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = dict(eos_token="<|im_end|>", extra_special_tokens=["<|im_start|>"])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, **special, chat_template=CHATML
    )
    tokenizer.save_pretrained(folder / "language")
    sizes, language = SHAPES[shape]
    language.eos_token_id = 1  # of the tokenizer
    vision = transformers.SiglipVisionConfig(**sizes)
    side = sizes["image_size"]
    for model, config, name in (
        (transformers.AutoModelForCausalLM, language, "language"),
        (transformers.AutoModel, vision, "vision"),
    ):
        with torch.device(device):
            made = model.from_config(config, dtype=torch.bfloat16)
        made.save_pretrained(folder / name)
    images = transformers.SiglipImageProcessor(size={"height": side, "width": side})
    images.save_pretrained(folder / "vision")
    build_checkpoint(str(folder / "vision"), str(folder / "language"), folder / "checkpoint")


def write_rows(folder: Path, side: int, sizes: list[tuple[int, int]]) -> None:
    """Writes `folder/data`: rows of so many images of random pixels, and words of one letter."""
    from datasets import Dataset
    from PIL import Image

    from normalign_llava.fetched.easy_vqa import DATA_FEATURES, png

    rng = random.Random(0)
    data = []
    for images, words in sizes:
        user = [{"type": "image"}] * images + [{"type": "text", "text": "describe"}]
        answer = [{"type": "text", "text": " ".join(rng.choices("etaoin", k=words))}]
        pixels = [rng.randbytes(3 * side**2) for _ in range(images)]
        stored = [{"bytes": png(Image.frombytes("RGB", (side, side), image))} for image in pixels]
        messages = [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]
        data.append({"images": stored, "messages": messages})
    Dataset.from_list(data, features=DATA_FEATURES).save_to_disk(folder / "data")


def prepared_rows(folder: Path):
    """The rows of `folder/data`, as training reads them."""
    from transformers import AutoProcessor

    from normalign_llava.data.sources.arguments import DataArguments
    from normalign_llava.data.sources.mixtures import load_data

    processor = AutoProcessor.from_pretrained(folder / "checkpoint", trust_remote_code=False)
    arguments = DataArguments(dataset_name=str(folder / "data"))
    return load_data(arguments, processor, max_length=None, seed=0, with_eval=False).train


def trainer_of(folder: Path, settings: dict[str, Any], *, stock: bool, cls=None, **own: Any):
    """TRL's trainer on stock LLaVA, or ours, with adapters.

    Args:
        folder: Where the checkpoint and the rows are.
        settings: Options of both trainers, and `own`, those of ours alone.
        stock: Which of the two.
        cls: Class of ours, if another.
    """
    from datasets import load_from_disk
    from transformers import AutoProcessor, LlavaForConditionalGeneration, PrinterCallback
    from trl import SFTConfig, SFTTrainer, get_peft_config

    from normalign_llava import NormAlignLlavaConfig
    from normalign_llava.train.modules.adapter import language_adapter
    from normalign_llava.train.modules.model import freeze
    from normalign_llava.train.options import ModelArguments, NormAlignConfig
    from normalign_llava.train.trainer import NormAlignTrainer

    checkpoint = str(folder / "checkpoint")
    data = prepared_rows(folder)
    shared: dict[str, Any] = dict(
        max_length=None,
        assistant_only_loss=True,
        gradient_checkpointing=False,
        dataloader_num_workers=0,  # as TRL's; and a daemon can have no processes
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=0,
        **settings,
    )
    own |= {"model_init_kwargs": {"dtype": "float32"}, "vision_learning_rate": 0.0}
    ours = NormAlignConfig(**shared, **own)
    model_args = ModelArguments(model_name_or_path=checkpoint, use_peft=True)
    model_args.lora_dropout = 0.0
    rates = ours.learning_rates(True)
    adapter = get_peft_config(model_args)
    if stock:
        model = LlavaForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32)
        freeze(model, rates)
        config = NormAlignLlavaConfig.from_pretrained(checkpoint)  # the same layers
        rows = load_from_disk(str(folder / "data"))
        rows = rows.add_column("length", data.with_format(None)["length"][:])  # TRL groups by it
        trainer = SFTTrainer(
            model,
            SFTConfig(**shared, remove_unused_columns=False),  # it would remove the lengths
            train_dataset=rows,
            processing_class=AutoProcessor.from_pretrained(checkpoint, trust_remote_code=False),
            peft_config=language_adapter(adapter, config, rates),
        )
    else:
        cls = cls or NormAlignTrainer
        trainer = cls(checkpoint, ours, train_dataset=data, peft_config=adapter)
    trainer.remove_callback(PrinterCallback)
    return trainer


def make_trainer(variant: str, folder: Path, options: argparse.Namespace, steps: int):
    """The trainer of a variant."""
    from trl import SFTTrainer

    from normalign_llava.train.modules.forward import eval_frozen
    from normalign_llava.train.modules.model import base_model
    from normalign_llava.train.trainer import NormAlignTrainer

    class AllScoredTrainer(NormAlignTrainer):
        """Ours with TRL's loss on a CPU, too."""

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            eval_frozen(base_model(self.accelerator.unwrap_model(model)))
            return SFTTrainer.compute_loss(self, model, inputs, return_outputs, num_items_in_batch)

    settings = dict(
        output_dir=str(folder / "runs" / variant),
        max_steps=steps + 1,
        per_device_train_batch_size=options.batch,
        learning_rate=1e-5,
        bf16=options.bf16,
        use_cpu=options.device == "cpu",
        logging_steps=LOGGING_STEPS,
        train_sampling_strategy="sequential",
    )
    cls = NormAlignTrainer if variant == OURS else AllScoredTrainer
    return trainer_of(folder, settings, stock=variant == STOCK, cls=cls)


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
    turns.send([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])


def run(
    folder: Path, variants: list[str], options: argparse.Namespace, steps: int, make=make_trainer
) -> tuple[dict, dict]:
    """Trains all variants in turns: the seconds of every step, and the losses of each process.

    `make` is called in each process with the variant, `folder`, `options` and `steps`, and returns
    its trainer.
    """
    spawn = multiprocessing.get_context("spawn")
    pipes = {}
    processes = []
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
    losses = {}
    for variant, process in zip(variants, processes, strict=True):
        pipes[variant].send("go")
        losses[variant] = pipes[variant].recv()
        process.join()
    return seconds, losses


def main() -> None:
    """Runs the comparison and prints it."""
    arguments = parser(__doc__, bf16=True)
    arguments.add_argument("--batch", type=int, default=8)
    arguments.add_argument("--steps", type=int, default=30, help="steps of a variant that count")
    options = arguments.parse_args()

    variants = [STOCK, OURS] if options.device == "cuda" else [STOCK, ALL_SCORED, OURS]
    with tempfile.TemporaryDirectory() as name:
        os.environ["HF_DATASETS_CACHE"] = f"{name}/cache"
        real_parts(Path(name), options.batch * (WARM_UP + options.steps + 2))
        seconds, losses = run(Path(name), variants, options, WARM_UP + options.steps)
    counted = {variant: times[WARM_UP:] for variant, times in seconds.items()}
    rows = []
    for variant in variants[1:]:
        ratio = spread(quartiles(counted[variant], counted[STOCK]))
        rows.append((f"training step: {variant}", f"time / {STOCK}", ratio))
    precision = "bfloat16" if options.bf16 else "float32"
    title = f"A training step, {precision}, batch {options.batch}, {options.device}"
    report(title, rows, options, seconds=seconds, losses=losses)


if __name__ == "__main__":
    main()
