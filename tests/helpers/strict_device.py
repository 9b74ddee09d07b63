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


# Kinds of device, DLDeviceType of dlpack.h.
CPU = 1
PRIVATE = 12

TAKE_INDICES_ON_CPU = {
    "aten::index",
    "aten::_unsafe_index",
    "aten::index_put",
    "aten::index_put_",
    "aten::_index_put_impl_",
}


def _operations_that_check_themselves() -> set[str]:
    """torch generates a check of all tensors before CUDA's kernel, but not for these."""
    declarations_path = (
        Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
    )
    operation_names = set()
    for declaration in declarations_path.read_text().split("\n- func: "):
        if "device_check: NoCheck" in declaration:
            operation_name = declaration.partition("(")[0]
            operation_names.add(f"aten::{operation_name}")
    return operation_names


CHECK_THEMSELVES = _operations_that_check_themselves()

_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype = ctypes.c_void_p
_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


def _on(device_kind: int, tensor: torch.Tensor) -> torch.Tensor:
    """The same memory on the other device: a DLPack tensor begins with its address and device."""
    capsule = torch._C._to_dlpack(tensor)
    tensor_address = _pointer(capsule, b"dltensor")
    device_address = tensor_address + ctypes.sizeof(ctypes.c_void_p)
    ctypes.c_int32.from_address(device_address).value = device_kind
    with torch.inference_mode(False):  # views of ordinary tensors are ordinary
        return torch._C._from_dlpack(capsule)


def _check(operation: torch._ops.OpOverload, args: tuple, kwargs: dict) -> None:
    """RuntimeError if the operation has a tensor on the CPU that CUDA would refuse."""
    schema = operation._schema
    full_name = f"{schema.name}.{schema.overload_name}".rstrip(".")
    scalars_may_mix = full_name in CHECK_THEMSELVES
    checked_arguments = (args, kwargs)
    if schema.name in TAKE_INDICES_ON_CPU:
        tensor_argument = args[0]
        after_indices = args[2:]
        checked_arguments = (tensor_argument, after_indices, kwargs)
    for value in tree_leaves(checked_arguments):
        if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
            continue
        if scalars_may_mix and value.dim() == 0:
            continue
        raise RuntimeError(
            f"Expected all tensors on the same device: {operation} got the CPU's, too."
        )


def _numbers_as_tensors(operation: torch._ops.OpOverload, args: tuple) -> list:
    """A number given for a tensor comes to a kernel as a number."""
    arguments = list(args)
    # `arguments` has fewer where the operation takes defaults.
    declared = zip(operation._schema.arguments, args, strict=False)
    for position, (declared_argument, value) in enumerate(declared):
        wants_tensor = isinstance(declared_argument.type, torch.TensorType)
        if wants_tensor and isinstance(value, int | float):
            arguments[position] = torch.tensor(value)
    return arguments


def _run(operation: torch._ops.OpOverload, *args, **kwargs):
    """Computes on the CPU. A tensor that was written to stays the same object on the device."""
    _check(operation, args, kwargs)
    strict_tensors = {}  # by their tensors on the CPU

    def to_cpu(tensor):
        if tensor.device.type == "cpu":
            return tensor
        if tensor.numel() == 0:
            # A result may be written to an empty one, which grows; memory from DLPack cannot.
            cpu_tensor = torch.empty_like(tensor, device="cpu")
        else:
            cpu_tensor = _on(CPU, tensor)
        strict_tensors[cpu_tensor] = tensor
        return cpu_tensor

    def to_strict(cpu_tensor):
        if cpu_tensor not in strict_tensors:
            return _on(PRIVATE, cpu_tensor)
        strict_tensor = strict_tensors[cpu_tensor]
        same_shape = strict_tensor.shape == cpu_tensor.shape
        same_stride = strict_tensor.stride() == cpu_tensor.stride()
        if not (same_shape and same_stride):
            strict_tensor.data = _on(PRIVATE, cpu_tensor)
        return strict_tensor

    arguments = _numbers_as_tensors(operation, args)
    cpu_args = tree_map_only(torch.Tensor, to_cpu, arguments)
    cpu_kwargs = tree_map_only(torch.Tensor, to_cpu, kwargs)
    if "device" in cpu_kwargs:
        cpu_kwargs["device"] = "cpu"
    result = operation(*cpu_args, **cpu_kwargs)
    return tree_map_only(torch.Tensor, to_strict, result)


def _copy(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    _on(CPU, target).copy_(_on(CPU, source))
    return target


def _set(tensor: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
    memory = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
    memory.owner = storage
    cpu_tensor = torch.frombuffer(memory, dtype=tensor.dtype)
    tensor.data = _on(PRIVATE, cpu_tensor)
    return tensor


def _convolution(*args):
    return _run(torch.ops.aten.convolution.default, *args)


def _convolution_backward(gradient, inputs, weight, *options):
    bias_sizes = None
    return _run(
        torch.ops.aten.convolution_backward.default,
        gradient,
        inputs,
        weight,
        bias_sizes,
        *options,
    )


def _attention_choice(*args, **kwargs) -> int:
    return SDPBackend.MATH.value


class _Backend(backend_registration._DummyBackendModule):
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return []


KERNELS = {
    "_copy_from": _copy,
    "set_.source_Storage": _set,  # saving does so
    "convolution_overrideable": _convolution,
    "convolution_backward_overrideable": _convolution_backward,
    "_fused_sdp_choice": _attention_choice,
}
"""What torch calls differently on private devices, or asks of them."""

backend_registration._setup_privateuseone_for_python_backend("strict", _Backend())
_fallback_library = torch.library.Library("_", "IMPL")
_fallback_library.fallback(_run, "PrivateUse1")
_kernel_library = torch.library.Library("aten", "IMPL")
for _operation_name, _kernel in KERNELS.items():
    _kernel_library.impl(_operation_name, _kernel, "PrivateUse1")
# `module.to` keeps parameters the same objects, so that tied ones stay tied, as it does on CUDA.
torch.__future__.set_swap_module_params_on_conversion(True)
STRICT = torch.device("strict:0")


def on_device(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.to(STRICT) for name, value in batch.items()}


def assert_close_on_device(
    actual: torch.Tensor,
    expected: torch.Tensor,
    **tolerance: float,
) -> None:
    """A tensor is on the device and has the values of one on the CPU."""
    assert actual.device == STRICT
    torch.testing.assert_close(actual.cpu(), expected, **tolerance)


def assert_same_report(actual: object, expected: object) -> None:
    """Numbers of two reports are the same, at any depth."""
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for key, expected_value in expected.items():
            assert_same_report(actual[key], expected_value)
    elif isinstance(expected, list):
        for actual_item, expected_item in zip(actual, expected, strict=True):
            assert_same_report(actual_item, expected_item)
    elif isinstance(expected, float):
        assert actual == pytest.approx(expected, rel=1e-4, abs=1e-6)
    else:
        assert actual == expected
