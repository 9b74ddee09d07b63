"""Started by test_train_distributed.py, as torchrun does: trains by the command's own path, and writes what it saw.

accelerate shards nothing without a GPU unless it is told to, so the first lines stand for the GPUs that are not there.
"""

import json
import math
import os
import sys
from collections import defaultdict
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from normalign_llava.train import run
from normalign_llava.train.modules.model import projector_norm
from normalign_llava.train.trainer import NormAlignTrainer


def main(mode: str, runs: dict[str, list[str]], output: str) -> None:
    if mode in ("ddp", "fsdp2"):
        rank, processes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = dist.TCPStore(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), processes, is_master=rank == 0
        )
    for name, words in runs.items():
        if mode in ("ddp", "fsdp2"):  # each run ends its process group, and the next must not read what it left
            dist.init_process_group("gloo", store=dist.PrefixStore(name, store), rank=rank, world_size=processes)
        if mode == "fsdp2":
            AcceleratorState._reset_state(reset_partial_state=True)
            PartialState(cpu=True, backend="gloo")
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        elif mode in ("zero2", "zero3"):
            PartialState(backend="gloo")
        if mode not in ("one", "ddp"):
            words = [*words, "--accelerator_config", '{"use_configured_state": true}']
        Watched.breaks = name in ("broken", "bad step")
        try:
            run.main(words)
            found = seen(Watched.last)
        except (FloatingPointError, ValueError) as error:  # which all processes meet
            found = {"error": str(error)}
            if dist.is_initialized() and mode in ("ddp", "fsdp2"):
                dist.destroy_process_group()
        Path(f"{output}.{name}.{os.environ.get('RANK', 0)}").write_text(json.dumps(found))


class Watched(NormAlignTrainer):
    """What it is trained on is written down; where it `breaks`, the last process meets NaN in step 2.

    Of the first step, it also writes the gain's dtype and gradient, and in float64 what this process adds to that.
    """

    last: "Watched"
    breaks = False

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.batches: list[tuple[int, bool, list]] = []
        self.gain: dict = {}
        Watched.last = self

    def training_step(self, model, inputs, num_items_in_batch=None):
        self.batches.append((self.state.global_step, "pixel_values" in inputs, inputs["input_ids"].tolist()))
        if self.state.global_step == 0:
            return self.first_step(model, inputs, num_items_in_batch)
        if self.breaks and self.state.global_step == 1 and self.accelerator.is_last_process:
            projector_norm(self.model).register_forward_hook(self.not_a_number, prepend=True)
        return super().training_step(model, inputs, num_items_in_batch)

    def not_a_number(self, module, given, output):
        return output * math.nan if self.state.global_step == 1 else output

    def first_step(self, model, inputs, num_items_in_batch):
        norm = projector_norm(self.model)

        def before(module, given):
            self.gain["dtype"] = str(module.weight.dtype)

        def watch(module, given, output):
            x = given[0].detach().double()
            x = torch.nn.functional.layer_norm(x, x.shape[-1:], eps=module.eps)
            if output.requires_grad:  # not where a checkpointed layer or an evaluation runs it
                output.register_hook(add_to(x.flatten(0, -2)))

        def add_to(x):
            def add(gradient):
                self.gain["own"] = self.gain.get("own", 0) + (x * gradient.double().flatten(0, -2)).sum(0)

            return add

        hooks = norm.register_forward_pre_hook(before), norm.register_forward_hook(watch)
        loss = super().training_step(model, inputs, num_items_in_batch)
        for hook in hooks:
            hook.remove()
        if isinstance(gradient := norm.weight.grad, DTensor):
            gradient = gradient.full_tensor()
        self.gain["gradient"] = None if gradient is None else gradient.tolist()
        return loss


def seen(trainer: Watched) -> dict:
    sharded = "FSDP2" if isinstance(trainer.model_wrapped, FSDPModule) else type(trainer.model_wrapped).__name__
    return {
        "type": trainer.accelerator.distributed_type.value,
        "processes": trainer.accelerator.num_processes,
        "wrapped": sharded,
        "gain dtype": str(projector_norm(trainer.model).weight.dtype),
        "gain": {**trainer.gain, "own": trainer.gain["own"].tolist()} if "own" in trainer.gain else {},
        "batches": trainer.batches,
        "logs": trainer.state.log_history,
    }


if sys.argv[1].startswith("zero"):
    import deepspeed

    deepspeed.ops.__compatible_ops__ = defaultdict(bool)  # gloo's collectives, not own ones, compiled for minutes
run.NormAlignTrainer = Watched
main(sys.argv[1], json.loads(Path(sys.argv[2]).read_text()), sys.argv[3])
sys.stdout.flush()
os._exit(0)  # what was to be seen is written; threads of DeepSpeed sometimes abort the interpreter's end
