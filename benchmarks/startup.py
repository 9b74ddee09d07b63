# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What starting costs: the import, the command's help, `from_pretrained`, and `normalign gain` on a model of 7B.

    python benchmarks/startup.py [--output results.json]

Import and help run in fresh processes, in turns with a bare interpreter. `from_pretrained` loads ours and stock LLaVA
of the same shape in turns: ours with its norm on disk, and from LLaVA's checkpoint, where the norm is aligned.
`normalign gain` reads a checkpoint in the shape of Qwen2.5-7B in four files; what a file holds besides the embeddings
is a hole, which takes no disk. Bytes read and peak memory are those of the process, from Linux's `/proc`.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from measuring import Row, in_turns, parser, quartiles, report, seconds, spread
from safetensors.torch import save_file
from shapes import SHAPES
from transformers import (
    AutoModelForCausalLM,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedConfig,
)
from transformers.utils import logging

from normalign_llava import NormAlignLlavaConfig, NormAlignLlavaForConditionalGeneration


VISION = CLIPVisionConfig(hidden_size=256, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=4)
EMBEDDINGS = "model.embed_tokens.weight"
SHARDS = 4
MEASURED_GAIN = """
import json, sys
from pathlib import Path
from time import perf_counter
from normalign_llava.cli import app

def figure(file, name):
    return int(next(line.split()[1] for line in Path("/proc/self", file).open() if line.startswith(name)))

small, large, output = sys.argv[1:]
app(["gain", small], standalone_mode=False)
read, start = figure("io", "rchar"), perf_counter()
app(["gain", large], standalone_mode=False)
found = {"seconds": perf_counter() - start, "bytes": figure("io", "rchar") - read}
Path(output).write_text(json.dumps({**found, "peak": 1024 * figure("status", "VmHWM")}))
"""
"""The command on a small checkpoint first, so that what Python reads of its own files does not count as read."""


def python(*words: str) -> None:
    """Runs Python to its end in a fresh process."""
    subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)


def compare_processes(rounds: int) -> tuple[list[Row], dict[str, list[float]]]:
    """Seconds of a bare interpreter, of the import and of the help."""
    words = {
        "python -c pass": ("-c", "pass"),
        "import normalign_llava": ("-c", "import normalign_llava"),
        "normalign --help": ("-m", "normalign_llava", "--help"),
    }
    calls = {name: lambda each=each: python(*each) for name, each in words.items()}
    times = in_turns(calls, rounds, lambda call: seconds(call, "cpu"))
    rows = []
    for name in words:
        low, middle, high = quartiles(times[name], [1.0] * rounds)
        rows.append((name, "seconds", f"{middle:.2f} ({low:.2f} to {high:.2f})"))
    return rows, times


def compare_loading(folder: Path, layers: int, rounds: int) -> tuple[list[Row], dict[str, list[float]]]:
    """Times of loading relative to stock LLaVA's."""
    sizes = dict(hidden_size=1024, intermediate_size=2816, num_hidden_layers=layers, num_attention_heads=8)
    parts = {"vision_config": VISION, "text_config": LlamaConfig(**sizes)}
    LlavaForConditionalGeneration(LlavaConfig(**parts)).save_pretrained(folder / "llava")
    NormAlignLlavaForConditionalGeneration(NormAlignLlavaConfig(**parts)).save_pretrained(folder / "ours")
    loaders = {
        "stock LLaVA": (LlavaForConditionalGeneration, "llava"),
        "from_pretrained": (NormAlignLlavaForConditionalGeneration, "ours"),
        "from_pretrained, aligning LLaVA": (NormAlignLlavaForConditionalGeneration, "llava"),
    }
    calls = {name: lambda c=cls, f=file: c.from_pretrained(folder / f) for name, (cls, file) in loaders.items()}
    times = in_turns(calls, rounds, lambda call: seconds(call, "cpu"))
    reference = times["stock LLaVA"]
    rows = [(name, "time / stock LLaVA", spread(quartiles(times[name], reference))) for name in list(loaders)[1:]]
    return rows, times


def sharded_checkpoint(folder: Path, config: PreTrainedConfig) -> int:
    """Writes a checkpoint of this configuration in bfloat16 whose embeddings alone are real; their size in bytes."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    config.save_pretrained(folder)
    tensors = model.state_dict()
    names = sorted(tensors)
    place = {
        name: f"model-{1 + number * SHARDS // len(names):05}-of-{SHARDS:05}.safetensors"
        for number, name in enumerate(names)
    }
    for file in sorted(set(place.values())):
        header, offset = {}, 0
        for name in (name for name in names if place[name] == file):
            end = offset + tensors[name].nbytes
            header[name] = {"dtype": "BF16", "shape": list(tensors[name].shape), "data_offsets": [offset, end]}
            offset = end
        written = json.dumps(header).encode()
        with (folder / file).open("wb") as shard:
            shard.write(len(written).to_bytes(8, "little") + written)
            start = shard.tell()
            shard.truncate(start + offset)
            if EMBEDDINGS in header:
                shard.seek(start + header[EMBEDDINGS]["data_offsets"][0])
                for rows in tensors[EMBEDDINGS].split(4096):
                    values = torch.randn(rows.shape, dtype=torch.bfloat16)
                    shard.write(values.view(torch.uint8).numpy().tobytes())
    index = {"metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())}, "weight_map": place}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return tensors[EMBEDDINGS].nbytes


def measure_gain(folder: Path, config: PreTrainedConfig) -> tuple[list[Row], dict[str, float]]:
    """What `normalign gain` reads of a sharded checkpoint, how long it takes, and the peak of its memory."""
    (folder / "small").mkdir()
    (folder / "large").mkdir()
    save_file({EMBEDDINGS: torch.ones(8, 8)}, folder / "small" / "model.safetensors")
    size = sharded_checkpoint(folder / "large", config)
    python("-c", MEASURED_GAIN, *(str(folder / name) for name in ("small", "large", "found.json")))
    found = json.loads((folder / "found.json").read_text())
    what = f"normalign gain, {config.vocab_size:,} x {config.hidden_size:,} in {SHARDS} files"
    rows = [
        (what, "bytes read / bytes of the embeddings", f"{found['bytes'] / size:.4f}"),
        (what, "peak memory of the process", f"{found['peak'] / 10**6:.0f} MB"),
    ]
    return rows, {**found, "embeddings": size}


def main() -> None:
    """Measures and prints."""
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=10)
    arguments.add_argument("--layers", type=int, default=16, help="of the language model that is loaded")
    arguments.add_argument("--shape", default="7b", choices=list(SHAPES), help="of the model whose gain is measured")
    options = arguments.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    processes, process_times = compare_processes(options.rounds)
    with tempfile.TemporaryDirectory() as name:
        loading, loading_times = compare_loading(Path(name), options.layers, options.rounds)
        gain, found = measure_gain(Path(name), SHAPES[options.shape][1])
    figures = {"processes": process_times, "from_pretrained": loading_times, "gain": found}
    report("Starting", [*processes, *loading, *gain], options, **figures)


if __name__ == "__main__":
    main()
