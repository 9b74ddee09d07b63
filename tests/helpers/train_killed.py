"""Run by tests: `normalign train`, which stops itself in a step or a save, or waits in a step.

The first argument says what happens and when: `SIGTERM:5`, or another signal, after step 5;
`wait:3` after step 3; `save:4` as checkpoint-4 is saved. `normalign train` gets the others.
"""

import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import torch

import normalign_llava.train.run as run
from normalign_llava.cli import app
from normalign_llava.train.trainer import NormAlignTrainer


moment, *train_arguments = sys.argv[1:]
event, step_text = moment.split(":")


class KilledTrainer(NormAlignTrainer):
    """Ends as on a machine that is taken away."""

    def training_step(self, *args, **kwargs):
        if self.state.global_step == int(step_text):
            if event.startswith("SIG"):
                send_to_all(signal.Signals[event])
            elif event == "wait":
                wait_until_told(self.args.output_dir)
        return super().training_step(*args, **kwargs)

    def _save_optimizer_and_scheduler(self, output_dir):
        super()._save_optimizer_and_scheduler(output_dir)
        if event == "save" and output_dir.endswith(f"-{step_text}"):
            cut_in_half(Path(output_dir) / "optimizer.pt")
            os.kill(os.getpid(), signal.SIGKILL)


def send_to_all(signal_number: signal.Signals) -> None:
    """Signals the readers and this process, as a terminal does."""
    reader_ids = [reader.pid for reader in multiprocessing.active_children()]
    print("readers", *reader_ids, flush=True)
    for reader_id in reader_ids:
        os.kill(reader_id, signal_number)
    signal.raise_signal(signal_number)


def wait_until_told(output_dir: str) -> None:
    """Says that it waits by a file beside the output, and waits for another file there."""
    Path(f"{output_dir}-waiting").touch()
    while not Path(f"{output_dir}-go-on").exists():
        time.sleep(0.01)


def cut_in_half(file_path: Path) -> None:
    """Leaves a file as a save that was interrupted."""
    half_size = file_path.stat().st_size // 2
    os.truncate(file_path, half_size)


torch.set_num_threads(1)
run.NormAlignTrainer = KilledTrainer
app(["train", *train_arguments])
