"""Run by torchrun in test_train_distributed.py: trains by the command's own path and writes what each rank saw."""

import json
import os
import sys
from pathlib import Path


mode, runs, output = sys.argv[1:4]
# accelerate takes a process without a GPU for one of DDP, or for the only one; these make it do what it does on GPUs.
BY_MODE = {
    "ddp": ["--use_cpu", "true"],
    "fsdp2": ["--use_cpu", "true", "--accelerator_config", '{"use_configured_state": true}'],
    "zero": ["--use_cpu", "false", "--ddp_backend", "gloo"],
}
if mode == "fsdp2":
    os.environ |= {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_RESHARD_AFTER_FORWARD": "true",
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
        "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
    }
elif mode.startswith("zero"):
    os.environ |= {
        "DS_ACCELERATOR": "cpu",
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": mode[-1],
        "ACCELERATE_DEEPSPEED_ZERO3_INIT": "true" if mode == "zero3" else "false",
        "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true",
    }

from accelerate import PartialState  # noqa: E402
from accelerate.state import AcceleratorState  # noqa: E402
from accelerate.utils import DistributedType  # noqa: E402

from normalign_llava.train import run  # noqa: E402
from normalign_llava.train.model import projector_norm  # noqa: E402


class Seen(run.NormAlignTrainer):
    last = None

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        Seen.last = self


run.NormAlignTrainer = Seen
rank = int(os.environ["RANK"])
for name, words in json.loads(Path(runs).read_text()).items():
    if mode == "fsdp2":
        AcceleratorState._reset_state(reset_partial_state=True)
        PartialState(cpu=True, backend="gloo")
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    run.main([*words, *BY_MODE[mode.rstrip("23") if mode.startswith("zero") else mode]])
    trainer = Seen.last
    found = {
        "type": str(trainer.accelerator.distributed_type),
        "world": trainer.accelerator.num_processes,
        "wrapped": type(trainer.model_wrapped).__name__,
        "gain": type(projector_norm(trainer.model).weight).__name__,
        "dtype": str(projector_norm(trainer.model).weight.dtype),
    }
    Path(f"{output}.{name}.{rank}").write_text(json.dumps(found))
