"""Adapters that PEFT wrote, with weights that matter, and what a model with one computes."""

import json

import torch
from peft import LoraConfig, get_peft_model
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, BitsAndBytesConfig

from normalign_llava import NormAlignLlavaForConditionalGeneration


LINEARS = r".*\.language_model\..*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"


def make_adapter(base, folder, quantization=None, save_embedding_layers="auto", **kwargs):
    """An adapter's folder as PEFT saves it, with weights that matter; the model as trained."""
    settings = BitsAndBytesConfig(**quantization) if quantization else None
    dtype = settings.bnb_4bit_compute_dtype if settings else "auto"
    how = dict(dtype=dtype, quantization_config=settings)
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(base, **how)
    torch.manual_seed(5)
    lora = dict(r=4, target_modules=LINEARS, modules_to_save=["multi_modal_projector"])
    trained = get_peft_model(model, LoraConfig(**{**lora, **kwargs})).eval()
    with torch.no_grad():
        for parameter in trained.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn_like(parameter)
    trained.save_pretrained(folder, save_embedding_layers=save_embedding_layers)
    record = {"quantization": settings and json.loads(settings.to_json_string())}
    (folder / "training.json").write_text(json.dumps(record))
    return trained


def logits(model, base):
    processor = AutoProcessor.from_pretrained(base)
    image = Image.radial_gradient("L").convert("RGB")
    text = ["one <image> here", "and <image> there, which is longer"]
    images = [image, image.rotate(90)]
    inputs = processor(images=images, text=text, padding=True, return_tensors="pt")
    inputs["pixel_values"] = inputs["pixel_values"].to(model.dtype)
    with torch.no_grad():
        return model(**inputs).logits[inputs["attention_mask"].bool()].float()


def load(folder):
    how = dict(dtype="float32", output_loading_info=True)
    model, report = AutoModelForImageTextToText.from_pretrained(folder, **how)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    return model
