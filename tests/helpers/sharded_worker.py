"""Run by test_sharded.py, as by torchrun: aligns a model with sharded embeddings, and measures.

Arguments: the mode, the checkpoint, and how the names of the results begin.
"""

import json
import os
import sys
from collections import defaultdict
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


mode, checkpoint, output = sys.argv[1:4]
if mode == "zero3":
    import deepspeed
    from transformers.integrations import HfDeepSpeedConfig

    deepspeed.ops.__compatible_ops__ = defaultdict(bool)  # compiles no collectives of its own
    deepspeed.init_distributed("gloo")
    # While this object lives, models are sharded as they are loaded.
    deepspeed_config = HfDeepSpeedConfig(
        {
            "zero_optimization": {"stage": 3},
            "train_micro_batch_size_per_gpu": 1,
        }
    )
else:
    dist.init_process_group("gloo")

from normalign_llava import NormAlignLlavaForConditionalGeneration  # noqa: E402


def shard_by_dtensor(embeddings, norm) -> dict:
    device_mesh = init_device_mesh("cpu", (2,))
    fully_shard(embeddings, mesh=device_mesh)
    fully_shard(norm, mesh=device_mesh)
    return {
        "kind": type(embeddings.weight).__name__,
        "rows here": len(embeddings.weight.to_local()),
    }


def vary_gain_sharded_by_deepspeed(embeddings, norm) -> dict:
    """Keeps the gain as it was loaded, then gives it other values."""
    weight_kind = "whole"
    if hasattr(embeddings.weight, "ds_id"):
        weight_kind = "ds"
    measured = {
        "kind": weight_kind,
        "rows here": len(embeddings.weight),
        "gain loaded": whole_gain(norm),
    }
    with deepspeed.zero.GatheredParameters(list(norm.parameters()), modifier_rank=0):
        torch.nn.init.normal_(norm.weight)
    return measured


def whole_gain(norm) -> list[float]:
    if mode == "dtensor":
        return norm.weight.full_tensor().tolist()
    with deepspeed.zero.GatheredParameters([norm.weight]):
        return norm.weight.tolist()


model = NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint)
embeddings = model.get_input_embeddings()
norm = model.model.multi_modal_projector.norm
results = {
    "world": dist.get_world_size(),
    "loaded": model.config.text_embedding_norm,
}
if mode == "dtensor":
    results |= shard_by_dtensor(embeddings, norm)
else:
    results |= vary_gain_sharded_by_deepspeed(embeddings, norm)
results["aligned"] = model.align_projector_norm()
results["gain"] = whole_gain(norm)

results_path = Path(f"{output}.{dist.get_rank()}")
results_path.write_text(json.dumps(results))
dist.barrier()
dist.destroy_process_group()
os._exit(0)  # threads of DeepSpeed sometimes abort the interpreter's end
