"""Adapters that PEFT wrote, with weights that matter, and what a model with one computes."""

import json

import torch
from peft import LoraConfig, get_peft_model
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, BitsAndBytesConfig

from normalign_llava import NormAlignLlavaForConditionalGeneration


LINEARS = r".*\.language_model\..*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"


def make_adapter(base, folder, quantization=None, save_embedding_layers="auto", **lora_options):
    """An adapter's folder as PEFT saves it, with weights that matter; the model as trained."""
    settings = None
    dtype = "auto"
    if quantization:
        settings = BitsAndBytesConfig(**quantization)
        dtype = settings.bnb_4bit_compute_dtype
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(
        base,
        dtype=dtype,
        quantization_config=settings,
    )
    torch.manual_seed(5)
    lora_options = {
        "r": 4,
        "target_modules": LINEARS,
        "modules_to_save": ["multi_modal_projector"],
        **lora_options,
    }
    adapted_model = get_peft_model(model, LoraConfig(**lora_options)).eval()
    with torch.no_grad():
        for parameter in adapted_model.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn_like(parameter)
    adapted_model.save_pretrained(folder, save_embedding_layers=save_embedding_layers)
    write_training_record(folder, settings)
    return adapted_model


def write_training_record(folder, settings: BitsAndBytesConfig | None):
    """Writes how the base was quantized, as a training run does."""
    quantization_record = None
    if settings is not None:
        quantization_record = json.loads(settings.to_json_string())
    training_record = {"quantization": quantization_record}
    (folder / "training.json").write_text(json.dumps(training_record))


def logits(model, base):
    processor = AutoProcessor.from_pretrained(base)
    image = Image.radial_gradient("L").convert("RGB")
    inputs = processor(
        images=[image, image.rotate(90)],
        text=["one <image> here", "and <image> there, which is longer"],
        padding=True,
        return_tensors="pt",
    )
    inputs["pixel_values"] = inputs["pixel_values"].to(model.dtype)
    is_token = inputs["attention_mask"].bool()
    with torch.no_grad():
        outputs = model(**inputs)
    return outputs.logits[is_token].float()


def load(folder):
    model, loading_report = AutoModelForImageTextToText.from_pretrained(
        folder,
        dtype="float32",
        output_loading_info=True,
    )
    assert not loading_report["missing_keys"]
    assert not loading_report["unexpected_keys"]
    return model
