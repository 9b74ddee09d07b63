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

GROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")
LIMITS = {
    "": ("memory.max", "memory.current"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes"),
}
"""Files with the limit and the usage of a control group, by the folder of its version."""

NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
"""bitsandbytes' settings of `load_in_4bit`, in training and everywhere else, as in QLoRA."""


def torch_dtype(dtype: str | torch.dtype) -> str | torch.dtype:
    """Returns the dtype of a name, and `"auto"` for `"auto"`. Raises ValueError on other names."""
    dtypes = {"auto": "auto", "float32": torch.float32, **HALVES}
    if dtype in dtypes:
        return dtypes[dtype]
    if dtype in dtypes.values():
        return dtype
    raise ValueError(f"dtype must be one of {', '.join(dtypes)}, got {dtype!r}.")


def half_precision_pays(dtype: torch.dtype = torch.bfloat16, device: str | None = None) -> bool:
    """Returns whether half precision is fast on a device: 1.5 times as fast as float32 on a CPU.

    A CPU is measured once in a process, since many only emulate bfloat16. A GPU that only emulates
    it, such as a T4, is slow.

    Args:
        dtype: bfloat16 or float16.
        device: The type of the device. By default, this is the accelerator's, or else "cpu".
    """
    if device is None:
        device = "cpu"
        if torch.accelerator.is_available():
            device = torch.accelerator.current_accelerator().type
    if device == "cuda":
        return dtype == torch.float16 or torch.cuda.is_bf16_supported(including_emulation=False)
    if device != "cpu":
        return dtype == torch.float16 or is_torch_bf16_gpu_available()
    seconds = _seconds()
    return seconds["float32"] > 1.5 * seconds[_name(dtype)]


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def compute_dtype() -> torch.dtype:
    """Returns the dtype of products with 4-bit weights.

    It is bfloat16 where that is fast, else float16 on GPUs and float32 on CPUs.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if half_precision_pays(torch.bfloat16, device):
        return torch.bfloat16
    return torch.float16 if device == "cuda" else torch.float32


def four_bits(model: PreTrainedModel, dtype: str | torch.dtype) -> BitsAndBytesConfig:
    """Returns how to load a model with its decoder's layers in 4 bits, as in training.

    Args:
        model: The model. It may lie on meta.
        dtype: The dtype of products and of the rest of the model. "auto" is [`compute_dtype`].
    """
    if dtype == "auto":
        dtype = compute_dtype()
    decoder = model.get_decoder()
    # Modules beside the decoder and what holds it, such as `lm_head` and `model.vision_tower`.
    outside_modules = []
    for path, holder in model.named_modules():
        if decoder not in holder.modules() or holder is decoder:
            continue
        for name, module in holder.named_children():
            if decoder not in module.modules():
                outside_modules.append(f"{path}.{name}".removeprefix("."))
    return BitsAndBytesConfig(
        **NF4, bnb_4bit_compute_dtype=dtype, llm_int8_skip_modules=outside_modules or None
    )


def quantization_name(settings: dict[str, Any] | None, *, products: bool = True) -> str:
    """Returns settings in words: "4-bit NF4, double quantization, products in bfloat16"."""
    if not settings:
        return "not quantized"
    if not settings.get("load_in_4bit"):
        return "8-bit"
    text = "4-bit " + settings.get("bnb_4bit_quant_type", "fp4").upper()
    if settings.get("bnb_4bit_use_double_quant"):
        text += ", double quantization"
    if products:
        dtype = settings.get("bnb_4bit_compute_dtype", torch.float32)
        text += f", products in {_name(dtype)}"
    return text


def warn_if_slow(dtype: str | torch.dtype | None, device: str) -> None:
    """Warns if a precision that was asked for is slow on this device."""
    dtype_name = _name(dtype)
    if dtype_name in HALVES and not half_precision_pays(HALVES[dtype_name], device):
        problem = f"This machine only emulates {dtype_name}"
        logger.warning_once(f"{problem}. float32 is faster, but larger.")


def dtype_to_load(
    dtype: str | torch.dtype, config: PreTrainedConfig | None, size: int
) -> str | torch.dtype:
    """Returns the dtype to load a model in, to run it on this machine.

    A CPU that only emulates the checkpoint's precision runs float32 if that fits into free memory,
    or else bfloat16 if it is fast in that. Otherwise it runs the checkpoint's own. Its weights are
    then mapped from files, not copied. Warns if the model will be slow.

    Args:
        dtype: The dtype that was asked for. Only "auto" is changed.
        config: The configuration of the checkpoint.
        size: The bytes of its weights.
    """
    if torch.cuda.is_available() or config is None:
        return dtype
    stored_dtype = config.dtype or config.get_text_config().dtype
    if dtype != "auto":
        warn_if_slow(dtype, "cpu")
        return dtype
    if stored_dtype not in HALVES.values() or half_precision_pays(stored_dtype, "cpu"):
        return dtype
    stored_name = _name(stored_dtype)
    loaded_name = stored_name
    free_bytes = max(0, free_memory() - 2**30)  # running takes memory besides weights
    if 2 * size <= free_bytes:
        dtype = loaded_name = "float32"
    elif size <= free_bytes and half_precision_pays(torch.bfloat16, "cpu"):
        dtype = loaded_name = "bfloat16"
    sizes = f"float32 takes {2 * size / 2**30:,.0f} of {free_bytes / 2**30:,.0f} GiB"
    logger.warning_once(f"Loading in {loaded_name}: this CPU only emulates {stored_name}. {sizes}.")
    return dtype


def emulates_float16(model: PreTrainedModel) -> bool:
    """Whether a CPU only emulates a model's float16, but is fast in bfloat16."""
    if model.device.type != "cpu" or model.dtype != torch.float16:
        return False
    return half_precision_pays(device="cpu") and not half_precision_pays(torch.float16, "cpu")


class ProductsInBfloat16(TorchFunctionMode):
    """In this context, float16 products are computed in bfloat16. Their results are float16.

    Weights are cast in each product. That pays for passes of many tokens, not for generation.
    """

    PRODUCTS = (
        F.linear,
        F.conv2d,
        F.scaled_dot_product_attention,
        torch.matmul,
        Tensor.matmul,
        Tensor.__matmul__,
    )

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func not in self.PRODUCTS or args[0].dtype != torch.float16:
            return func(*args, **kwargs)
        args, kwargs = tree_map_only(Tensor, _from_float16, (args, kwargs))
        return func(*args, **kwargs).half()


def _from_float16(tensor: Tensor) -> Tensor:
    return tensor.bfloat16() if tensor.dtype == torch.float16 else tensor


def memory_limit() -> int:
    """Returns the bytes that this process may have, in the machine and in its containers."""
    limits = [psutil.virtual_memory().total]
    for _, limit, _ in _containers():
        limits.append(limit)
    return min(limits)


def free_memory() -> int:
    """Returns the bytes that are free for this process, in the machine and in its containers.

    Memory with pages of files counts as free.
    """
    free_bytes = [psutil.virtual_memory().available]
    for folder, limit, usage_file in _containers():
        with suppress(OSError, ValueError, KeyError):
            usage = int((folder / usage_file).read_text())
            lines = (folder / "memory.stat").read_text().splitlines()
            statistics = dict(line.split() for line in lines)
            file_pages = int(statistics["active_file"]) + int(statistics["inactive_file"])
            free_bytes.append(limit - usage + file_pages)
    return max(0, min(free_bytes))


def _containers() -> Iterator[tuple[Path, int, str]]:
    """Yields the limited control groups of this process, up to the root.

    Each has its folder, its limit in bytes, and the name of its file with the usage.

    `/proc/self/cgroup` has a line for each hierarchy: `0::PATH` of version 2, and of version 1
    `NUMBER:memory:PATH`. In a container, the path may be the host's and not exist.
    """
    group_paths = {"": "/", "memory": "/"}
    with suppress(OSError):
        for hierarchy in OWN_GROUPS.read_text().splitlines():
            _, controllers, group_path = hierarchy.split(":", 2)
            for controller in controllers.split(","):
                group_paths[controller] = group_path
    for controller, (limit_file, usage_file) in LIMITS.items():
        root_folder = GROUPS / controller
        own_folder = root_folder / group_paths[controller].strip("/")
        for folder in (own_folder, *own_folder.parents):
            with suppress(OSError, ValueError):  # there is none, or no limit: "max"
                if folder.is_relative_to(root_folder):
                    yield folder, int((folder / limit_file).read_text()), usage_file


@cache
def _seconds() -> dict[str, float]:
    """Measures products of matrices, of sizes as in training. Returns the shortest by precision."""
    seconds: dict[str, float] = {}
    for _ in range(5):  # in turn, since what else the machine does may change
        for dtype_name, dtype in {"float32": torch.float32, **HALVES}.items():
            features = torch.ones(1024, 576, dtype=dtype)  # a user's random numbers stay
            weight = torch.ones(1536, 576, dtype=dtype)
            duration = timeit.timeit(partial(F.linear, features, weight), number=1)
            seconds[dtype_name] = min(duration, seconds.get(dtype_name, duration))
    return seconds
