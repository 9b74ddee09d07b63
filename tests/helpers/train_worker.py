"""Run by test_train_distributed.py, as by torchrun: trains by the command's own path, and measures.

Arguments: the mode, a JSON file with a command line for each run, and how names of results begin.
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


GLOO_MODES = ("ddp", "fsdp2")
DEEPSPEED_MODES = ("zero2", "zero3")
CONFIGURED_MODES = ("fsdp2", *DEEPSPEED_MODES)
"""Modes in which accelerate takes the state that is set here."""

RUNS_THAT_MEET_NAN = ("broken", "bad step")


def main(mode: str, command_lines: dict[str, list[str]], output: str) -> None:
    if mode in GLOO_MODES:
        store = rendezvous_store()
    for run_name, command_line in command_lines.items():
        if mode in GLOO_MODES:
            join_process_group(store, run_name)
        if mode in CONFIGURED_MODES:
            configure_state(mode)
            use_state = ["--accelerator_config", '{"use_configured_state": true}']
            command_line = [*command_line, *use_state]
        WatchedTrainer.meets_nan = run_name in RUNS_THAT_MEET_NAN
        outcome = outcome_of_run(mode, command_line)
        rank = os.environ.get("RANK", 0)
        outcome_path = Path(f"{output}.{run_name}.{rank}")
        outcome_path.write_text(json.dumps(outcome))


def rendezvous_store() -> dist.TCPStore:
    return dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        int(os.environ["WORLD_SIZE"]),
        is_master=os.environ["RANK"] == "0",
    )


def join_process_group(store: dist.TCPStore, run_name: str) -> None:
    """A run ends its process group; the next reads another store."""
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(run_name, store),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )


def configure_state(mode: str) -> None:
    if mode in DEEPSPEED_MODES:
        PartialState(backend="gloo")
        return
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState(cpu=True, backend="gloo")
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def outcome_of_run(mode: str, command_line: list[str]) -> dict:
    """What was measured in a run, or the error that all processes meet."""
    try:
        run.main(command_line)
        return measured(WatchedTrainer.newest)
    except (FloatingPointError, ValueError) as error:
        if dist.is_initialized() and mode in GLOO_MODES:
            dist.destroy_process_group()
        return {"error": str(error)}


class WatchedTrainer(NormAlignTrainer):
    """Keeps its batches; where it `meets_nan`, the last process meets NaN in step 2.

    Of the first step it keeps the gain's dtype and gradient, and this process' own part in float64.
    """

    newest: "WatchedTrainer"
    meets_nan = False

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.batches: list[tuple[int, bool, list]] = []
        self.gain: dict = {}
        WatchedTrainer.newest = self

    def training_step(self, model, inputs, num_items_in_batch=None):
        step = self.state.global_step
        has_images = "pixel_values" in inputs
        input_ids = inputs["input_ids"].tolist()
        self.batches.append((step, has_images, input_ids))
        if step == 0:
            return self.first_step(model, inputs, num_items_in_batch)
        if self.meets_nan and step == 1 and self.accelerator.is_last_process:
            norm = projector_norm(self.model)
            norm.register_forward_hook(self.nan_in_second_step, prepend=True)
        return super().training_step(model, inputs, num_items_in_batch)

    def nan_in_second_step(self, module, inputs, output):
        if self.state.global_step == 1:
            return output * math.nan
        return output

    def first_step(self, model, inputs, num_items_in_batch):
        norm = projector_norm(self.model)
        dtype_hook = norm.register_forward_pre_hook(self.keep_dtype)
        gradient_hook = norm.register_forward_hook(self.add_own_gradient)
        loss = super().training_step(model, inputs, num_items_in_batch)
        dtype_hook.remove()
        gradient_hook.remove()

        gradient = norm.weight.grad
        self.gain["gradient"] = None
        if isinstance(gradient, DTensor):
            gradient = gradient.full_tensor()
        if gradient is not None:
            self.gain["gradient"] = gradient.tolist()
        return loss

    def keep_dtype(self, module, inputs):
        self.gain["dtype"] = str(module.weight.dtype)

    def add_own_gradient(self, module, inputs, output):
        """The gain's gradient is the sum over tokens of normalized input times gradient."""
        hidden_states = inputs[0].detach().double().flatten(0, -2)
        normalized = torch.nn.functional.layer_norm(
            hidden_states,
            hidden_states.shape[-1:],
            eps=module.eps,
        )

        def add(output_gradient):
            gradients = normalized * output_gradient.double().flatten(0, -2)
            self.gain["own"] = self.gain.get("own", 0) + gradients.sum(0)

        if output.requires_grad:  # not where a checkpointed layer or an evaluation runs it
            output.register_hook(add)


def measured(trainer: WatchedTrainer) -> dict:
    gain = {}
    if "own" in trainer.gain:
        gain = {**trainer.gain, "own": trainer.gain["own"].tolist()}
    wrapper_name = type(trainer.model_wrapped).__name__
    if isinstance(trainer.model_wrapped, FSDPModule):
        wrapper_name = "FSDP2"
    return {
        "type": trainer.accelerator.distributed_type.value,
        "processes": trainer.accelerator.num_processes,
        "wrapped": wrapper_name,
        "gain dtype": str(projector_norm(trainer.model).weight.dtype),
        "gain": gain,
        "batches": trainer.batches,
        "logs": trainer.state.log_history,
    }


mode, runs_file, output = sys.argv[1:]
if mode in DEEPSPEED_MODES:
    import deepspeed

    deepspeed.ops.__compatible_ops__ = defaultdict(bool)  # compiles no collectives of its own
run.NormAlignTrainer = WatchedTrainer
main(mode, json.loads(Path(runs_file).read_text()), output)
sys.stdout.flush()
os._exit(0)  # threads of DeepSpeed sometimes abort the interpreter's end
