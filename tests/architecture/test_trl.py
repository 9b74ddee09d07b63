"""TRL's own trainers on our checkpoints: references are the model itself, all trained moves."""

import logging
import math

import pytest
import tiny
import tiny_parts as parts
import torch
import training
from datasets import Dataset
from peft import LoraConfig
from PIL import Image
from transformers import AutoProcessor, BitsAndBytesConfig
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from normalign_llava import NormAlignLlavaForConditionalGeneration
from normalign_llava.assembly.build import retrofit_checkpoint
from normalign_llava.assembly.chat_template import multimodal_chat_template


IMAGES = [
    Image.linear_gradient("L").convert("RGB"),
    Image.new("RGB", (20, 30), "red"),
]
SHORT_RUN = {
    "max_length": None,
    "max_steps": 1,
    "logging_steps": 1,
    "per_device_train_batch_size": 2,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
    "use_cpu": True,
    "bf16": False,
}


def turn(role, text) -> dict:
    return {"role": role, "content": text}


def make_preferences() -> Dataset:
    rows = []
    for image in IMAGES:
        row = {
            "images": [image],
            "prompt": [turn("user", "what is it")],
            "chosen": [turn("assistant", "a red kite")],
            "rejected": [turn("assistant", "no")],
        }
        rows.append(row)
    return Dataset.from_list(rows)


def make_conversations() -> Dataset:
    rows = []
    for number in range(4):
        messages = [
            turn("user", "what is it"),
            turn("assistant", f"a kite {number}"),
        ]
        rows.append({"images": [IMAGES[number % 2]], "messages": messages})
    return Dataset.from_list(rows)


def make_dpo_trainer(model, output_folder, processor, **options) -> DPOTrainer:
    return DPOTrainer(
        model,
        args=DPOConfig(output_dir=str(output_folder), **SHORT_RUN, **options),
        train_dataset=make_preferences(),
        processing_class=processor,
    )


def make_sft_trainer(model, output_folder, checkpoint, peft_config, **options) -> SFTTrainer:
    train_options = {**SHORT_RUN, **options}
    return SFTTrainer(
        model,
        args=SFTConfig(output_dir=str(output_folder), **train_options),
        train_dataset=make_conversations(),
        processing_class=AutoProcessor.from_pretrained(checkpoint),
        peft_config=peft_config,
    )


@pytest.fixture
def llava_folder(tmp_path):
    return parts.llava(tmp_path / "llava", tiny.llava())


@pytest.fixture
def llava_processor(llava_folder):
    """Its chat template reads images."""
    processor = AutoProcessor.from_pretrained(llava_folder)
    chat_template, _ = multimodal_chat_template(parts.CHATML)
    processor.chat_template = chat_template
    processor.tokenizer.chat_template = chat_template
    return processor


def test_a_llava_folder_gives_no_reference_model(tmp_path, caplog, llava_folder, llava_processor):
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(llava_folder)
    assert model.name_or_path == ""
    assert model.config.name_or_path == ""
    assert "a reference or an adapter's base loaded by it would differ" in caplog.text
    with pytest.raises(OSError):
        make_dpo_trainer(model, tmp_path / "dpo", llava_processor)


def test_a_retrofitted_llava_is_its_own_reference_model(tmp_path, llava_folder, llava_processor):
    retrofit_checkpoint(llava_folder, tmp_path / "retrofitted")
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(tmp_path / "retrofitted")
    trainer = make_dpo_trainer(
        model,
        tmp_path / "dpo",
        llava_processor,
        learning_rate=0.0,
    )
    trainer.train()
    loss = trainer.state.log_history[0]["loss"]
    assert loss == pytest.approx(math.log(2), abs=1e-6)


@pytest.mark.parametrize("reentrant", [True, False])
def test_adapters_on_the_tower_move_under_gradient_checkpointing(tmp_path, checkpoint, reentrant):
    trainer = make_sft_trainer(
        NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint),
        tmp_path,
        checkpoint,
        LoraConfig(target_modules=r".*(vision_tower|language_model).*\.(q_proj|v_proj)"),
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": reentrant},
        learning_rate=1e-2,
    )
    before = {}
    for parameter_name, parameter in trainer.model.named_parameters():
        # LLaVA reads the tower's last layer but one.
        is_used = "vision_tower.encoder.layers.2" not in parameter_name
        if "lora_B" in parameter_name and is_used:
            before[parameter_name] = parameter.detach().clone()
    all_names = " ".join(before)
    assert "vision_tower" in all_names
    assert "language_model" in all_names

    trainer.train()
    for parameter_name, value_before in before.items():
        assert not torch.equal(trainer.model.get_parameter(parameter_name), value_before)


@pytest.fixture
def make_quantized_trainer(tmp_path):
    """Makes TRL's trainer of a quantized model, of which it casts the gain to bfloat16."""
    checkpoint = training.checkpoint(
        tmp_path,
        hidden_size=64,
        intermediate_size=128,
        head_dim=32,
    )

    def make():
        quantization = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
        model = NormAlignLlavaForConditionalGeneration.from_pretrained(
            checkpoint,
            quantization_config=quantization,
            dtype=torch.bfloat16,
        )
        lora = LoraConfig(
            target_modules=r".*language_model.*q_proj",
            modules_to_save=["multi_modal_projector"],
        )
        return make_sft_trainer(
            model,
            tmp_path / "out",
            checkpoint,
            lora,
            bf16=True,
            max_steps=3,
            learning_rate=2e-5,
            lr_scheduler_type="constant",
        )

    return make


def trained_gain(model) -> torch.nn.Parameter:
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("default.norm.weight"):
            return parameter
    raise AssertionError("the adapter has no gain")


def count_changes(trainer) -> int:
    """Trains, and returns how many values of the gain have changed."""
    gain = trained_gain(trainer.model)
    gain_before = gain.detach().cpu().clone()
    trainer.train()
    return int((gain.cpu() != gain_before).sum())


def test_a_gain_that_trl_casts_is_warned_of_once_with_a_remedy(caplog, make_quantized_trainer):
    # Other tests may have been warned.
    logging.getLogger("normalign_llava").warning_once.cache_clear()

    trainer = make_quantized_trainer()
    assert trained_gain(trainer.model).dtype == torch.bfloat16
    assert count_changes(trainer) == 0
    (warning,) = [text for text in caplog.messages if "The gain is trained in" in text]
    assert "torch.bfloat16" in warning
    remedy = warning.partition("Make it float32: ")[2]

    caplog.clear()
    trainer = make_quantized_trainer()
    exec(remedy, {"trainer": trainer})
    assert trained_gain(trainer.model).dtype == torch.float32
    assert count_changes(trainer) == 64
    assert "The gain is trained in" not in caplog.text
