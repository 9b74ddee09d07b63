# SPDX-License-Identifier: Apache-2.0
"""What frozen weights in bfloat16 save: the time of a step of stage 1, against them in float32.

    python benchmarks/frozen.py [--output results.json]

Both multiply in bfloat16 autocast, on the quickstart's parts and rows, and train projector and norm
in float32. They take turns step by step, as in step.py.
"""

import argparse
import os
import tempfile
from pathlib import Path

from measuring import parser, quartiles, report, spread
from step import WARM_UP, real_parts, run


def make_trainer(variant: str, folder: Path, options: argparse.Namespace, steps: int):
    """Returns the trainer whose frozen weights have the dtype `variant`."""
    from datasets import load_from_disk

    from normalign_llava import NormAlignConfig, NormAlignTrainer

    config = NormAlignConfig(
        str(folder / variant),
        model_init_kwargs={"dtype": variant},
        language_learning_rate=0.0,
        vision_learning_rate=0.0,
        bf16=True,
        use_cpu=options.device == "cpu",
        max_steps=steps + 1,
        per_device_train_batch_size=options.batch,
        gradient_checkpointing=False,
        dataloader_num_workers=0,  # a daemon can have no processes
        train_sampling_strategy="sequential",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    rows = load_from_disk(str(folder / "data"))
    return NormAlignTrainer(str(folder / "checkpoint"), config, train_dataset=rows)


def main() -> None:
    """Runs the comparison and prints it."""
    arguments = parser(__doc__)
    arguments.add_argument("--batch", type=int, default=8)
    arguments.add_argument("--steps", type=int, default=30, help="steps of a variant that count")
    options = arguments.parse_args()
    steps = WARM_UP + options.steps
    with tempfile.TemporaryDirectory() as temporary:
        os.environ["HF_DATASETS_CACHE"] = f"{temporary}/cache"
        folder = Path(temporary)
        real_parts(folder, options.batch * (steps + 2))
        step_seconds, losses = run(folder, ["float32", "bfloat16"], options, steps, make_trainer)
    half_precision = step_seconds["bfloat16"][WARM_UP:]
    full_precision = step_seconds["float32"][WARM_UP:]
    ratio = spread(quartiles(half_precision, full_precision))
    table_rows = [("step of stage 1, frozen bfloat16", "time / frozen float32", ratio)]
    title = f"A step of stage 1, batch {options.batch}, {options.device}"
    report(title, table_rows, options, seconds=step_seconds, losses=losses)


if __name__ == "__main__":
    main()
