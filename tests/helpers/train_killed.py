"""Run by tests: `normalign train`, which stops itself in a step or a save, or waits in a step."""

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


when, number = sys.argv[1].split(":")


class Killed(NormAlignTrainer):
    """Ends as on a machine that is taken away."""

    def training_step(self, *args, **kwargs):
        if when.startswith("SIG") and str(self.state.global_step) == number:
            readers = multiprocessing.active_children()
            print("readers", *(reader.pid for reader in readers), flush=True)
            for reader in readers:  # a terminal sends it to all
                os.kill(reader.pid, signal.Signals[when])
            signal.raise_signal(signal.Signals[when])
        if when == "wait" and self.state.global_step == int(number):
            Path(f"{self.args.output_dir}-waiting").touch()
            while not Path(f"{self.args.output_dir}-go-on").exists():
                time.sleep(0.01)
        return super().training_step(*args, **kwargs)

    def _save_optimizer_and_scheduler(self, output_dir):
        super()._save_optimizer_and_scheduler(output_dir)
        if when == "save" and output_dir.endswith(f"-{number}"):
            file = Path(output_dir) / "optimizer.pt"
            os.truncate(file, file.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)


torch.set_num_threads(1)
run.NormAlignTrainer = Killed
app(["train", *sys.argv[2:]])
