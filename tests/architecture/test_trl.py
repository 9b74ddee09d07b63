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


IMAGES = [Image.linear_gradient("L").convert("RGB"), Image.new("RGB", (20, 30), "red")]
SHORT = dict(max_steps=1, logging_steps=1, per_device_train_batch_size=2, report_to="none")
SHORT |= dict(save_strategy="no", disable_tqdm=True, use_cpu=True, bf16=False)


def said(role, text):
    return [{"role": role, "content": text}]


def preferences(count=2):
    texts = {"chosen": said("assistant", "a red kite"), "rejected": said("assistant", "no")}
    texts["prompt"] = said("user", "what is it")
    return Dataset.from_list([{"images": [IMAGES[i % 2]], **texts} for i in range(count)])


def dpo(model, folder, processor, **options):
    config = DPOConfig(output_dir=str(folder), max_length=None, **SHORT, **options)
    return DPOTrainer(model, args=config, train_dataset=preferences(), processing_class=processor)


def test_a_llava_folder_gives_no_reference_model(tmp_path, caplog):
    llava = parts.llava(tmp_path / "llava", tiny.llava())
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(llava)
    assert model.name_or_path == model.config.name_or_path == ""
    assert "a reference or an adapter's base loaded by it would differ" in caplog.text
    processor = AutoProcessor.from_pretrained(llava)
    template, _ = multimodal_chat_template(parts.CHATML)
    processor.chat_template = processor.tokenizer.chat_template = template
    with pytest.raises(OSError):
        dpo(model, tmp_path / "dpo", processor)
    retrofit_checkpoint(llava, tmp_path / "ours")
    ours = NormAlignLlavaForConditionalGeneration.from_pretrained(tmp_path / "ours")
    trainer = dpo(ours, tmp_path / "dpo", processor, learning_rate=0.0)
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)


def conversations(count=4):
    rows = []
    for number in range(count):
        turns = said("user", "what is it") + said("assistant", f"a kite {number}")
        rows.append({"images": [IMAGES[number % 2]], "messages": turns})
    return Dataset.from_list(rows)


def sft(model, folder, checkpoint, peft_config, **options):
    arguments = SFTConfig(output_dir=str(folder), max_length=None, **{**SHORT, **options})
    how = dict(processing_class=AutoProcessor.from_pretrained(checkpoint), peft_config=peft_config)
    return SFTTrainer(model, args=arguments, train_dataset=conversations(), **how)


@pytest.mark.parametrize("reentrant", [True, False])
def test_adapters_on_the_tower_move_under_gradient_checkpointing(tmp_path, checkpoint, reentrant):
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint)
    lora = LoraConfig(target_modules=r".*(vision_tower|language_model).*\.(q_proj|v_proj)")
    options = dict(gradient_checkpointing_kwargs={"use_reentrant": reentrant}, learning_rate=1e-2)
    trainer = sft(model, tmp_path, checkpoint, lora, gradient_checkpointing=True, **options)
    after = dict(trainer.model.named_parameters())
    before = {name: after[name].detach().clone() for name in after if "lora_B" in name}
    trainer.train()
    # LLaVA reads the tower's last layer but one.
    read = [name for name in before if "vision_tower.encoder.layers.2" not in name]
    for part in ("vision_tower", "language_model"):
        assert any(part in name for name in read)
    assert all(not torch.equal(after[name], before[name]) for name in read)


def test_a_gain_that_trl_casts_is_told_of_once_with_a_remedy(tmp_path, caplog):
    logging.getLogger("normalign_llava").warning_once.cache_clear()  # of what other tests were told
    checkpoint = training.checkpoint(tmp_path, hidden_size=64, intermediate_size=128, head_dim=32)
    modules = ["multi_modal_projector"]
    lora = LoraConfig(target_modules=r".*language_model.*q_proj", modules_to_save=modules)
    nf4 = dict(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    how = dict(quantization_config=BitsAndBytesConfig(**nf4), dtype=torch.bfloat16)
    options = dict(bf16=True, max_steps=3, learning_rate=2e-5, lr_scheduler_type="constant")
    remedy = ""
    for dtype, changed in ((torch.bfloat16, 0), (torch.float32, 64)):
        model = NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint, **how)
        trainer = sft(model, tmp_path / "out", checkpoint, lora, **options)
        exec(remedy, {"trainer": trainer})
        parameters = dict(trainer.model.named_parameters())
        gain = next(parameters[name] for name in parameters if name.endswith("default.norm.weight"))
        before = gain.detach().cpu().clone()
        assert gain.dtype == dtype
        trainer.train()
        assert int((gain.cpu() != before).sum()) == changed
        told = [text for text in caplog.messages if "The gain is trained in" in text]
        assert ["torch.bfloat16" in text for text in told] == ([] if remedy else [True])
        remedy = "".join(told).partition("Make it float32: ")[2]
        caplog.clear()
