"""The weights of a checkpoint, in whatever files, and a merge by PEFT of a model in memory."""

from pathlib import Path

import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor

from normalign_llava import NormAlignLlavaForConditionalGeneration
from normalign_llava.checkpoint.weights import write_weights


MODULES = ("language_model", "vision_tower", "multi_modal_projector")
FILES = {f"model-{module}-00001-of-00001.safetensors" for module in MODULES}
FILES |= {"model.safetensors.index.json"}
"""Those with the weights of a small checkpoint."""


def store(folder, tensors) -> None:
    """Replaces the weights of a checkpoint."""
    write_weights(Path(folder), tensors)


def in_one_file(folder) -> None:
    """Puts the weights of a checkpoint into one file, as transformers does."""
    tensors = weights(folder)
    for name in FILES:
        (Path(folder) / name).unlink()
    save_file(tensors, Path(folder) / "model.safetensors", metadata={"format": "pt"})


def weights(folder) -> dict[str, Tensor]:
    """The tensors of a checkpoint or an adapter."""
    tensors = {}
    for file in sorted(Path(folder).glob("*model*.safetensors")):
        tensors |= load_file(file)
    return tensors


def assert_merged(folder, adapter, base, quantization=None, dtype=None, realigned=None) -> None:
    """That a checkpoint is, bit for bit, PEFT's merge of the float32 (dequantized) base, then cast.

    `quantization` is a `BitsAndBytesConfig`; `dtype` the checkpoint's, by default the base's;
    `realigned` another start of the gain.
    """
    in_4_bits = quantization is not None and quantization.load_in_4bit
    loading_dtype = "auto"
    if in_4_bits:
        loading_dtype = quantization.bnb_4bit_compute_dtype
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(
        base,
        dtype=loading_dtype,
        quantization_config=quantization,
        device_map="cpu",
    )
    if dtype is None:
        config_class = NormAlignLlavaForConditionalGeneration.config_class
        dtype = config_class.from_pretrained(base).dtype
    if quantization is not None:
        model = _dequantized(model)
    model = model.float().eval()
    if realigned:
        model.config.projector_gain_init = realigned
        model.align_projector_norm()

    merged = PeftModel.from_pretrained(model, adapter).merge_and_unload(safe_merge=True)
    expected_tensors = merged.state_dict()
    if merged.lm_head.weight is merged.get_input_embeddings().weight:
        del expected_tensors["lm_head.weight"]
    tensors = weights(folder)
    assert tensors.keys() == expected_tensors.keys()
    for tensor_name, expected in expected_tensors.items():
        if "projector.norm." not in tensor_name:
            expected = expected.to(dtype)
        assert tensors[tensor_name].dtype == expected.dtype, tensor_name
        assert torch.equal(tensors[tensor_name], expected), tensor_name


def _dequantized(model):
    for module in model.modules():
        if type(module).__name__ == "Linear4bit":
            module.weight.quant_state.dtype = torch.float32
    model = model.dequantize(dtype=torch.float32)
    model.is_loaded_in_4bit = False
    model.is_loaded_in_8bit = False
    return model
