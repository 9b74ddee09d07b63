"""Run by test_train_distributed.py, as by torchrun: trains by the command's own path, and measures.

accelerate shards nothing without a GPU unless it is told to: `main` stands for the missing GPUs.
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
        ranks = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
        host = os.environ["MASTER_ADDR"]
        port = int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(host, port, ranks["world_size"], is_master=ranks["rank"] == 0)
    for name, words in runs.items():
        if mode in ("ddp", "fsdp2"):  # a run ends its process group; the next reads another store
            dist.init_process_group("gloo", store=dist.PrefixStore(name, store), **ranks)
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
            outcome = seen(Watched.last)
        except (FloatingPointError, ValueError) as error:  # which all processes meet
            outcome = {"error": str(error)}
            if dist.is_initialized() and mode in ("ddp", "fsdp2"):
                dist.destroy_process_group()
        Path(f"{output}.{name}.{os.environ.get('RANK', 0)}").write_text(json.dumps(outcome))


class Watched(NormAlignTrainer):
    """Keeps its batches; where it `breaks`, the last process meets NaN in step 2.

    Of the first step it keeps the gain's dtype and gradient, and this process' own part in float64.
    """

    last: "Watched"
    breaks = False

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.batches: list[tuple[int, bool, list]] = []
        self.gain: dict = {}
        Watched.last = self

    def training_step(self, model, inputs, num_items_in_batch=None):
        has_images = "pixel_values" in inputs
        ids = inputs["input_ids"].tolist()
        self.batches.append((self.state.global_step, has_images, ids))
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
            x = given[0].detach().double().flatten(0, -2)
            x = torch.nn.functional.layer_norm(x, x.shape[-1:], eps=module.eps)

            def add(gradient):
                part = (x * gradient.double().flatten(0, -2)).sum(0)
                self.gain["own"] = self.gain.get("own", 0) + part

            if output.requires_grad:  # not where a checkpointed layer or an evaluation runs it
                output.register_hook(add)

        hooks = norm.register_forward_pre_hook(before), norm.register_forward_hook(watch)
        loss = super().training_step(model, inputs, num_items_in_batch)
        for hook in hooks:
            hook.remove()
        if isinstance(gradient := norm.weight.grad, DTensor):
            gradient = gradient.full_tensor()
        self.gain["gradient"] = None if gradient is None else gradient.tolist()
        return loss


def seen(trainer: Watched) -> dict:
    wrapped = trainer.model_wrapped
    gain = trainer.gain
    return {
        "type": trainer.accelerator.distributed_type.value,
        "processes": trainer.accelerator.num_processes,
        "wrapped": "FSDP2" if isinstance(wrapped, FSDPModule) else type(wrapped).__name__,
        "gain dtype": str(projector_norm(trainer.model).weight.dtype),
        "gain": {**gain, "own": gain["own"].tolist()} if "own" in gain else {},
        "batches": trainer.batches,
        "logs": trainer.state.log_history,
    }


if sys.argv[1].startswith("zero"):
    import deepspeed

    deepspeed.ops.__compatible_ops__ = defaultdict(bool)  # compiles no collectives of its own
run.NormAlignTrainer = Watched
main(sys.argv[1], json.loads(Path(sys.argv[2]).read_text()), sys.argv[3])
sys.stdout.flush()
os._exit(0)  # threads of DeepSpeed sometimes abort the interpreter's end
