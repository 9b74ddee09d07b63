"""A device that computes on the CPU and refuses, as CUDA does, to mix its tensors with the CPU's.

Importing this registers `strict` as torch's private device, for the whole process. Its tensors lie
in the CPU's memory, and the CPU's kernels compute. An operation on tensors of both devices raises
RuntimeError, but for copies, indices on the CPU, and 0-dimensional CPU tensors where CUDA allows
them. It has no autocast and no pinned memory.
"""

import ctypes
from pathlib import Path

import pytest
import torch
import torchgen
from torch.nn.attention import SDPBackend
from torch.utils import backend_registration
from torch.utils._pytree import tree_leaves, tree_map_only


CPU = 1
PRIVATE = 12  # DLDeviceType of dlpack.h
INDEXED = [f"aten::{name}" for name in ("index", "_unsafe_index", "index_put", "index_put_")]
INDEXED += ["aten::_index_put_impl_"]

# For every operation but these, torch generates a check of all tensors before CUDA's kernel.
_packaged = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
CHECK_THEMSELVES = {
    f"aten::{declared.partition('(')[0]}"
    for declared in _packaged.read_text().split("\n- func: ")
    if "device_check: NoCheck" in declared
}

_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype = ctypes.c_void_p
_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


def _on(kind: int, tensor: torch.Tensor) -> torch.Tensor:
    """The same memory on the other device: a DLPack tensor begins with its address and device."""
    capsule = torch._C._to_dlpack(tensor)
    kind_of_device = _pointer(capsule, b"dltensor") + ctypes.sizeof(ctypes.c_void_p)
    ctypes.c_int32.from_address(kind_of_device).value = kind
    with torch.inference_mode(False):  # views of ordinary tensors are ordinary
        return torch._C._from_dlpack(capsule)


def _check(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> None:
    name = op._schema.name
    scalars_may_mix = f"{name}.{op._schema.overload_name}".rstrip(".") in CHECK_THEMSELVES
    for value in tree_leaves((args[0], args[2:], kwargs) if name in INDEXED else (args, kwargs)):
        on_cpu = isinstance(value, torch.Tensor) and value.device.type == "cpu"
        if on_cpu and not (scalars_may_mix and value.dim() == 0):
            raise RuntimeError(f"Expected all tensors on the same device: {op} got the CPU's, too.")


def _run(op: torch._ops.OpOverload, *args, **kwargs):
    _check(op, args, kwargs)
    given = {}

    def to_cpu(tensor):
        if tensor.device.type == "cpu":
            return tensor
        # A result may be written to an empty one, which grows; memory from DLPack cannot.
        on_cpu = _on(CPU, tensor) if tensor.numel() else torch.empty_like(tensor, device="cpu")
        given[on_cpu] = tensor
        return on_cpu

    def to_strict(tensor):
        if tensor not in given:
            return _on(PRIVATE, tensor)
        own = given[tensor]
        if (own.shape, own.stride()) != (tensor.shape, tensor.stride()):
            own.data = _on(PRIVATE, tensor)
        return own

    # A number given for a tensor comes here as a number.
    args = list(args)
    for place, (argument, value) in enumerate(zip(op._schema.arguments, args, strict=False)):
        if isinstance(value, int | float) and isinstance(argument.type, torch.TensorType):
            args[place] = torch.tensor(value)
    args, kwargs = tree_map_only(torch.Tensor, to_cpu, (args, kwargs))
    if "device" in kwargs:
        kwargs["device"] = "cpu"
    return tree_map_only(torch.Tensor, to_strict, op(*args, **kwargs))


def _copy(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    _on(CPU, target).copy_(_on(CPU, source))
    return target


def _set(tensor: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
    memory = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
    memory.owner = storage
    tensor.data = _on(PRIVATE, torch.frombuffer(memory, dtype=tensor.dtype))
    return tensor


def _convolution_backward(gradient, x, weight, *options):
    return _run(torch.ops.aten.convolution_backward.default, gradient, x, weight, None, *options)


class _Backend(backend_registration._DummyBackendModule):
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return []


KERNELS = {
    "_copy_from": _copy,
    "set_.source_Storage": _set,  # saving does so
    "convolution_overrideable": lambda *args: _run(torch.ops.aten.convolution.default, *args),
    "convolution_backward_overrideable": _convolution_backward,
    "_fused_sdp_choice": lambda *args, **kwargs: SDPBackend.MATH.value,
}
"""What torch calls differently on private devices, or asks of them."""

backend_registration._setup_privateuseone_for_python_backend("strict", _Backend())
_fallback = torch.library.Library("_", "IMPL")
_kernels = torch.library.Library("aten", "IMPL")
_fallback.fallback(_run, "PrivateUse1")
for _name, _kernel in KERNELS.items():
    _kernels.impl(_name, _kernel, "PrivateUse1")
# `module.to` keeps parameters the same objects, so that tied ones stay tied, as it does on CUDA.
torch.__future__.set_swap_module_params_on_conversion(True)
STRICT = torch.device("strict:0")


def on_device(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.to(STRICT) for name, value in batch.items()}


def close(found: torch.Tensor, expected: torch.Tensor, **tolerance: float) -> None:
    """Asserts that a tensor is on the device and has the values of one on the CPU."""
    assert found.device == STRICT
    torch.testing.assert_close(found.cpu(), expected, **tolerance)


def same(found: object, expected: object) -> None:
    """Asserts that numbers of two reports are the same, at any depth."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        found = [*found.values()]
        expected = [*expected.values()]
    if isinstance(expected, list):
        for one, other in zip(found, expected, strict=True):
            same(one, other)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
    else:
        assert found == expected
