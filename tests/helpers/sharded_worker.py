"""Run by test_sharded.py, as by torchrun: aligns a model with sharded embeddings, and measures."""

import json
import os
import sys
from collections import defaultdict
from pathlib import Path

import torch
import torch.distributed as dist


mode, checkpoint, output = sys.argv[1:4]
if mode == "zero3":
    import deepspeed
    from transformers.integrations import HfDeepSpeedConfig

    deepspeed.ops.__compatible_ops__ = defaultdict(bool)  # compiles no collectives of its own
    deepspeed.init_distributed("gloo")
    stage3 = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1}
    configuration = HfDeepSpeedConfig(stage3)
else:
    dist.init_process_group("gloo")

from normalign_llava import NormAlignLlavaForConditionalGeneration  # noqa: E402


model = NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint)
embeddings = model.get_input_embeddings()
norm = model.model.multi_modal_projector.norm
found = {"world": dist.get_world_size(), "loaded": model.config.text_embedding_norm}
if mode == "dtensor":
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    fully_shard(embeddings, mesh=mesh)
    fully_shard(norm, mesh=mesh)
    found["kind"] = type(embeddings.weight).__name__
    found["rows here"] = len(embeddings.weight.to_local())
else:
    found["kind"] = "ds" if hasattr(embeddings.weight, "ds_id") else "whole"
    found["rows here"] = len(embeddings.weight)
    with deepspeed.zero.GatheredParameters([norm.weight]):
        found["gain loaded"] = norm.weight.tolist()
    with deepspeed.zero.GatheredParameters(list(norm.parameters()), modifier_rank=0):
        torch.nn.init.normal_(norm.weight)
found["aligned"] = model.align_projector_norm()
if mode == "dtensor":
    found["gain"] = norm.weight.full_tensor().tolist()
else:
    with deepspeed.zero.GatheredParameters([norm.weight]):
        found["gain"] = norm.weight.tolist()
Path(f"{output}.{dist.get_rank()}").write_text(json.dumps(found))
dist.barrier()
dist.destroy_process_group()
os._exit(0)  # threads of DeepSpeed sometimes abort the interpreter's end
