# SPDX-License-Identifier: Apache-2.0
"""The precision to load and run a model in: whether half precision is fast here is measured."""

import timeit
from collections.abc import Iterator
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from transformers import BitsAndBytesConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import is_torch_bf16_gpu_available, logging


logger = logging.get_logger(__name__)

HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}

GROUPS, OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
LIMITS = {"": ("memory.max", "memory.current")}
LIMITS |= {"memory": ("memory.limit_in_bytes", "memory.usage_in_bytes")}
"""Files with the limit and the usage of a control group, by the folder of its version."""

NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
"""bitsandbytes' settings of `load_in_4bit`, in training and everywhere else: those of QLoRA."""


def half_precision_pays(dtype: torch.dtype = torch.bfloat16, device: str | None = None) -> bool:
    """Whether a device multiplies matrices in half precision 1.5 times as fast as in float32.

    A CPU is measured once in a process, since many only emulate bfloat16. GPUs are asked; one that
    only emulates bfloat16, such as a T4, counts as slow. `dtype` is bfloat16 or float16; `device`
    is a type, by default the accelerator's, or else "cpu".
    """
    if device is None:
        accelerator = torch.accelerator.is_available() and torch.accelerator.current_accelerator()
        device = accelerator.type if accelerator else "cpu"
    if device == "cuda":
        return dtype == torch.float16 or torch.cuda.is_bf16_supported(including_emulation=False)
    if device != "cpu":
        return dtype == torch.float16 or is_torch_bf16_gpu_available()
    seconds = _seconds()
    return seconds["float32"] > 1.5 * seconds[str(dtype).removeprefix("torch.")]


def compute_dtype() -> torch.dtype:
    """The dtype of products with 4-bit weights: bfloat16, else float16 on GPUs, float32 on CPUs."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if half_precision_pays(torch.bfloat16, device):
        return torch.bfloat16
    return torch.float16 if device == "cuda" else torch.float32


def four_bits(model: PreTrainedModel, dtype: str | torch.dtype = "auto") -> BitsAndBytesConfig:
    """How to load a model, which may lie on meta, in 4 bits: its decoder's layers, as in training.

    `dtype` is that of products and of the rest of the model; "auto" is [`compute_dtype`].
    """
    dtype = compute_dtype() if dtype == "auto" else dtype
    path = next(name for name, module in model.named_modules() if module is model.get_decoder())
    # Modules beside the decoder and what holds it, such as `lm_head` and `model.vision_tower`.
    outside, holder = [], ""
    for part in path.split(".") if path else ():
        beside = (name for name, _ in model.get_submodule(holder).named_children() if name != part)
        outside += [f"{holder}.{name}".lstrip(".") for name in beside]
        holder = f"{holder}.{part}".lstrip(".")
    settings = {**NF4, "bnb_4bit_compute_dtype": dtype}
    return BitsAndBytesConfig(**settings, llm_int8_skip_modules=outside or None)


def quantization_name(settings: dict[str, Any] | None, *, products: bool = True) -> str:
    """bitsandbytes' settings in words: "4-bit NF4, double quantization, products in bfloat16"."""
    if not settings:
        return "not quantized"
    if not settings.get("load_in_4bit"):
        return "8-bit"
    nested = ", double quantization" if settings.get("bnb_4bit_use_double_quant") else ""
    dtype = str(settings.get("bnb_4bit_compute_dtype", torch.float32)).removeprefix("torch.")
    kind = settings.get("bnb_4bit_quant_type", "fp4").upper()
    return f"4-bit {kind}{nested}{f', products in {dtype}' * products}"


def warn_if_slow(dtype: str | torch.dtype | None, device: str | None = None) -> None:
    """Warns in one line if a precision that was asked for is slow on this device."""
    name = str(dtype).removeprefix("torch.")
    if name in HALVES and not half_precision_pays(HALVES[name], device):
        logger.warning_once(f"This machine only emulates {name}. float32 is faster, but larger.")


def dtype_to_load(
    dtype: str | torch.dtype, config: PreTrainedConfig | None, size: int
) -> str | torch.dtype:
    """What a `dtype` of "auto" means on this machine, to run a model of `size` bytes.

    A CPU that only emulates the checkpoint's precision runs float32 if that fits into free memory,
    else bfloat16 if it is fast in that, else the checkpoint's own, mapped from files, not copied.
    """
    if torch.cuda.is_available() or config is None:
        return dtype
    stored = config.dtype or config.get_text_config().dtype
    if dtype != "auto":
        warn_if_slow(dtype, "cpu")
    elif stored in HALVES.values() and not half_precision_pays(stored, "cpu"):
        name = str(stored).removeprefix("torch.")
        room = max(0, free_memory() - 2**30)  # which running takes besides weights
        if 2 * size <= room:
            dtype = "float32"
        elif size <= room and half_precision_pays(torch.bfloat16, "cpu"):
            dtype = "bfloat16"
        loaded = f"Loading in {name if dtype == 'auto' else dtype}: this CPU only emulates {name}"
        sizes = f"float32 takes {2 * size / 2**30:,.0f} of {room / 2**30:,.0f} GiB"
        logger.warning_once(f"{loaded}. {sizes}.")
    return dtype


def emulates_float16(model: PreTrainedModel) -> bool:
    """Whether a model is in float16 on a CPU that only emulates it, but is fast in bfloat16."""
    if (model.device.type, model.dtype) != ("cpu", torch.float16):
        return False
    return half_precision_pays(device="cpu") and not half_precision_pays(torch.float16, "cpu")


class ProductsInBfloat16(TorchFunctionMode):
    """A context in which float16 products are computed in bfloat16, with float16 results.

    Weights are cast in each product: that pays for passes of many tokens, not for generation.
    """

    _MATMULS = (torch.matmul, Tensor.matmul, Tensor.__matmul__)
    PRODUCTS = (F.linear, F.conv2d, F.scaled_dot_product_attention, *_MATMULS)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func not in self.PRODUCTS or args[0].dtype != torch.float16:
            return func(*args, **kwargs)
        args, kwargs = tree_map_only(
            Tensor, lambda t: t.bfloat16() if t.dtype == torch.float16 else t, (args, kwargs)
        )
        return func(*args, **kwargs).half()


def memory_limit() -> int:
    """Bytes that this process may have: the machine's, or the least limit of its containers."""
    limits = [psutil.virtual_memory().total]
    for folder, (name, _) in _containers():
        with suppress(OSError, ValueError):  # there is none, or no limit: "max"
            limits.append(int((folder / name).read_text()))
    return min(limits)


def free_memory() -> int:
    """Bytes free for this process in machine and containers; pages of files count."""
    free = [psutil.virtual_memory().available]
    for folder, names in _containers():
        with suppress(OSError, ValueError, KeyError):  # there is none, or no limit: "max"
            most, taken = (int((folder / name).read_text()) for name in names)
            lines = (folder / "memory.stat").read_text().splitlines()
            counted = dict(line.split() for line in lines)
            free.append(most - taken + int(counted["active_file"]) + int(counted["inactive_file"]))
    return max(0, min(free))


def _containers() -> Iterator[tuple[Path, tuple[str, str]]]:
    """Folders of this process's control groups up to the root, and names of limit and usage.

    `/proc/self/cgroup` has a line for each hierarchy: `0::PATH` of version 2, and of version 1
    `NUMBER:memory:PATH`. In a container the path may be the host's, which is not there.
    """
    paths = {"": "/", "memory": "/"}
    with suppress(OSError):
        for line in OWN_GROUPS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if "memory" in controllers.split(","):
                paths["memory"] = path
            elif not controllers:
                paths[""] = path
    for controller, names in LIMITS.items():
        root = GROUPS / controller
        own = root / paths[controller].strip("/")
        for folder in (own, *own.parents):
            if folder.is_relative_to(root):
                yield folder, names


@cache
def _seconds() -> dict[str, float]:
    """The shortest time of a product of matrices of sizes common in training, by precision."""
    seconds: dict[str, float] = {}
    for _ in range(5):  # in turn, since what else the machine does may change
        for name, dtype in {"float32": torch.float32, **HALVES}.items():
            x, weight = torch.randn(1024, 576, dtype=dtype), torch.randn(1536, 576, dtype=dtype)
            taken = timeit.timeit(partial(F.linear, x, weight), number=1)
            seconds[name] = min(taken, seconds.get(name, taken))
    return seconds
