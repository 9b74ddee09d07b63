# SPDX-License-Identifier: Apache-2.0
"""What a training step costs: ours, and stock LLaVA with TRL's `SFTTrainer`.

    python benchmarks/step.py [--device cuda] [--output results.json]

On the quickstart's parts and rows, each variant trains adapters in its own process. The processes
take turns step by step, so that times of the same batch are compared. A step is everything from one
`on_step_begin` to the next: collating, forward, backward, optimizer, callbacks and logging. Every
tenth step is logged, and measured by our callback.

On a CPU, our trainer computes logits of the answers only, and TRL's computes logits of every
position. The variant "all scored" does so too, for a comparison at equal work. All have weights in
float32.
"""

import argparse
import io
import multiprocessing
import os
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measuring import parser, precision, quartiles, quiet, report, spread
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
MakeTrainer = Callable[[str, Path, argparse.Namespace, int], Any]
"""Returns the trainer of a variant, from a folder, the options and a number of steps."""


def real_parts(folder: Path, rows: int) -> None:
    """Writes the quickstart's untrained checkpoint, of SmolLM2-135M and DINOv2-small, and rows."""
    from normalign_llava import (
        build_checkpoint,
        convert_language,
        convert_vision,
        training_data,
    )

    vision = str(convert_vision(56))
    language = str(convert_language())
    build_checkpoint(vision, language, folder / "checkpoint", feature_layer=-4)
    training_data(rows).save_to_disk(folder / "data")


def random_checkpoint(folder: Path, shape: str, device: str = "cpu") -> None:
    """Writes `folder/checkpoint`: random weights, made on `device`, and a tokenizer of bytes."""
    from transformers import (
        AutoModel,
        AutoModelForCausalLM,
        SiglipImageProcessor,
        SiglipVisionConfig,
    )

    from normalign_llava import build_checkpoint

    vision = folder / "vision"
    language = folder / "language"
    write_tokenizer(language)
    vision_sizes, language_config = SHAPES[shape]
    language_config.eos_token_id = 1  # the tokenizer's
    with torch.device(device):
        language_model = AutoModelForCausalLM.from_config(language_config, dtype=torch.bfloat16)
    language_model.save_pretrained(language)
    del language_model
    with torch.device(device):
        vision_config = SiglipVisionConfig(**vision_sizes)
        vision_model = AutoModel.from_config(vision_config, dtype=torch.bfloat16)
    vision_model.save_pretrained(vision)
    image_size = {"height": vision_sizes["image_size"], "width": vision_sizes["image_size"]}
    SiglipImageProcessor(size=image_size).save_pretrained(vision)
    build_checkpoint(str(vision), str(language), folder / "checkpoint")


def write_tokenizer(folder: Path) -> None:
    """Writes a tokenizer of bytes with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = ["<|im_start|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        extra_special_tokens=["<|im_start|>"],
        chat_template=CHATML,
    )
    tokenizer.save_pretrained(folder)


def write_rows(folder: Path, side: int, sizes: list[tuple[int, int]]) -> None:
    """Writes `folder/data`: rows of images of random pixels, and answers of one-letter words.

    Args:
        folder: The folder.
        side: The side of an image in pixels.
        sizes: How many images and words each row has.
    """
    from datasets import Dataset

    from normalign_llava import DATA_FEATURES

    generator = random.Random(0)
    rows = []
    for image_count, word_count in sizes:
        images = [{"type": "image"}] * image_count
        question = [*images, {"type": "text", "text": "describe"}]
        words = " ".join(generator.choices("etaoin", k=word_count))
        answer = [{"type": "text", "text": words}]
        messages = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
        image_files = [{"bytes": random_png(generator, side)} for _ in range(image_count)]
        rows.append({"images": image_files, "messages": messages})
    Dataset.from_list(rows, features=DATA_FEATURES).save_to_disk(folder / "data")


def random_png(generator: random.Random, side: int) -> bytes:
    """Returns a square PNG file of random pixels."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.frombytes("RGB", (side, side), generator.randbytes(3 * side**2)).save(
        buffer, format="PNG"
    )
    return buffer.getvalue()


def prepared_rows(folder: Path):
    """Reads the rows of `folder/data`, as training reads them."""
    from transformers import AutoProcessor

    from normalign_llava import DataArguments, load_data

    processor = AutoProcessor.from_pretrained(folder / "checkpoint", trust_remote_code=False)
    arguments = DataArguments(dataset_name=str(folder / "data"))
    return load_data(arguments, processor, max_length=None, seed=0, with_eval=False).train


def trainer_settings(options: argparse.Namespace, output: Path, steps: int) -> dict[str, Any]:
    """Returns the options of both trainers.

    Args:
        options: The options of the script.
        output: The folder of the run.
        steps: How many steps are measured.
    """
    return {
        "output_dir": str(output),
        "max_steps": steps + 1,  # nothing is measured in the last one
        "learning_rate": 1e-5,
        "bf16": options.bf16,
        "use_cpu": options.device == "cpu",
        "max_length": None,
        "assistant_only_loss": True,
        "gradient_checkpointing": False,
        "dataloader_num_workers": 0,  # as TRL's; and a daemon can have no processes
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": 0,
    }


def our_trainer(folder: Path, settings: dict[str, Any], **own: Any):
    """Returns our trainer with adapters.

    Args:
        folder: The folder of the checkpoint and the rows.
        settings: The options of both trainers.
        own: Options of our trainer only.
    """
    from peft import LoraConfig
    from transformers import PrinterCallback

    from normalign_llava import NormAlignConfig, NormAlignTrainer

    config = NormAlignConfig(
        **settings,
        **own,
        model_init_kwargs={"dtype": "float32"},
        vision_learning_rate=0.0,
    )
    trainer = NormAlignTrainer(
        str(folder / "checkpoint"),
        config,
        train_dataset=prepared_rows(folder),
        peft_config=LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, task_type="CAUSAL_LM"),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def stock_trainer(folder: Path, settings: dict[str, Any]):
    """Returns TRL's trainer on stock LLaVA, with adapters on the same layers as ours.

    Args:
        folder: The folder of the checkpoint and the rows.
        settings: The options of both trainers.
    """
    from datasets import load_from_disk
    from peft import LoraConfig
    from transformers import AutoProcessor, LlavaForConditionalGeneration, PrinterCallback
    from trl import SFTConfig, SFTTrainer

    checkpoint = folder / "checkpoint"
    adapter = LoraConfig(
        r=16,
        lora_alpha=32,
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
        target_modules=r".*language_model.*\.(q|k|v|o|gate|up|down)_proj",
        modules_to_save=["multi_modal_projector"],
    )
    lengths = prepared_rows(folder).with_format(None)["length"][:]
    rows = load_from_disk(str(folder / "data"))
    trainer = SFTTrainer(
        LlavaForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32),
        SFTConfig(**settings, remove_unused_columns=False),  # it would remove the lengths
        train_dataset=rows.add_column("length", lengths),  # TRL groups by it
        processing_class=AutoProcessor.from_pretrained(checkpoint, trust_remote_code=False),
        peft_config=adapter,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def make_trainer(variant: str, folder: Path, options: argparse.Namespace, steps: int):
    """Returns the trainer of a variant.

    Args:
        variant: `STOCK`, `OURS` or `ALL_SCORED`.
        folder: The folder of the checkpoint and the rows.
        options: The options of the script.
        steps: How many steps are measured.
    """
    settings = trainer_settings(options, folder / "runs" / variant, steps)
    settings["per_device_train_batch_size"] = options.batch
    settings["logging_steps"] = LOGGING_STEPS
    settings["train_sampling_strategy"] = "sequential"
    if variant == STOCK:
        return stock_trainer(folder, settings)
    trainer = our_trainer(folder, settings)
    if variant == ALL_SCORED:
        trainer.model.get_base_model().only_answers = False  # as on a GPU
    return trainer


def train(
    make: MakeTrainer,
    variant: str,
    folder: Path,
    options: argparse.Namespace,
    steps: int,
    turns,
) -> None:
    """Trains what `make` returns, in this process.

    Each step sends the seconds of the one before to the pipe `turns`, and waits for it. At the end
    the losses are sent.
    """
    from transformers import TrainerCallback

    quiet()

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
    folder: Path,
    variants: list[str],
    options: argparse.Namespace,
    steps: int,
    make: MakeTrainer = make_trainer,
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Trains all variants in turns.

    Args:
        folder: The folder of the checkpoint and the rows.
        variants: The names of the variants.
        options: The options of the script.
        steps: How many steps are measured.
        make: Is called in each process, and returns its trainer.

    Returns:
        The seconds of every step, and the losses, by variant.
    """
    spawn_context = multiprocessing.get_context("spawn")
    pipe_by_variant = {}
    process_by_variant = {}
    for variant in variants:
        pipe_by_variant[variant], other_end = spawn_context.Pipe()
        arguments = (make, variant, folder, options, steps, other_end)
        process_by_variant[variant] = spawn_context.Process(
            target=train, args=arguments, daemon=True
        )
        process_by_variant[variant].start()
        other_end.close()  # so that recv raises if the process fails
        pipe_by_variant[variant].recv()  # models are loaded one after the other
    step_seconds: dict[str, list[float]] = {variant: [] for variant in variants}
    for _ in track(range(steps), description=", ".join(variants)):
        for variant in random.sample(variants, len(variants)):
            pipe_by_variant[variant].send("go")
            step_seconds[variant].append(pipe_by_variant[variant].recv())
    losses = {}
    for variant, process in process_by_variant.items():
        pipe_by_variant[variant].send("go")
        losses[variant] = pipe_by_variant[variant].recv()
        process.join()
    return step_seconds, losses


def main() -> None:
    """Runs the comparison and prints it."""
    arguments = parser(__doc__, bf16=True)
    arguments.add_argument("--batch", type=int, default=8)
    arguments.add_argument("--steps", type=int, default=30, help="steps of a variant that count")
    options = arguments.parse_args()

    variants = [STOCK, ALL_SCORED, OURS]
    if options.device == "cuda":
        variants.remove(ALL_SCORED)
    steps = WARM_UP + options.steps
    with tempfile.TemporaryDirectory() as temporary:
        os.environ["HF_DATASETS_CACHE"] = f"{temporary}/cache"
        folder = Path(temporary)
        real_parts(folder, options.batch * (steps + 2))
        step_seconds, losses = run(folder, variants, options, steps)
    stock_seconds = step_seconds[STOCK][WARM_UP:]
    table_rows = []
    for variant in variants[1:]:
        ratio = spread(quartiles(step_seconds[variant][WARM_UP:], stock_seconds))
        table_rows.append((f"training step: {variant}", f"time / {STOCK}", ratio))
    title = f"A training step, {precision(options)}, batch {options.batch}, {options.device}"
    report(title, table_rows, options, seconds=step_seconds, losses=losses)


if __name__ == "__main__":
    main()
