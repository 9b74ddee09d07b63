import json

import pytest
import stored
import torch
import training
from transformers import BitsAndBytesConfig

from normalign_llava import NormAlignLlavaForConditionalGeneration, NormAlignTrainer


pytestmark = pytest.mark.slow


QLORA = dict(use_peft=True, load_in_4bit=True, dtype="bfloat16", lora_dropout=0.0)


FROZEN = dict(vision_learning_rate=0.0, language_learning_rate=0.0)


@pytest.mark.parametrize("bits", [4, 8])
def test_beside_a_frozen_quantized_model_the_projector_is_trained_and_all_is_written_as_it_was(tmp_path, half, bits):
    options = {f"load_in_{bits}bit": True, "bf16": True}
    trainer = training.trainer(tmp_path, half, **FROZEN, **options, save_strategy="steps", save_steps=2)
    kinds = {type(each).__name__ for each in trainer.model.model.language_model.modules()}
    assert {4: "Linear4bit", 8: "Linear8bitLt"}[bits] in kinds
    built, before = stored.weights(half), training.weights(trainer.model)
    projector = {name for name in built if "projector" in name}
    assert all(torch.equal(before[name], built[name]) for name in projector)  # float32, and not rounded
    trainer.train()
    assert training.moved(before, trainer.model) == projector
    for folder in (tmp_path, tmp_path / "checkpoint-2"):
        trainer.save_model() if folder == tmp_path else None
        trained = {name: trainer.model.get_parameter(name).detach() for name in projector}
        training.assert_equal(stored.weights(folder), {**built, **trained})
        config = json.loads((folder / "config.json").read_text())
        assert config["dtype"] == "bfloat16" and "quantization_config" not in config
    assert trainer.record["quantization"][f"load_in_{bits}bit"]
    second = training.trainer(tmp_path / "second", tmp_path, **{**QLORA, "dtype": "auto", "bf16": True})
    second.train()


def test_the_gradient_through_frozen_4_bit_layers_is_that_of_what_they_stand_for(tmp_path, checkpoint):
    trainer = training.trainer(tmp_path, checkpoint, **FROZEN, load_in_4bit=True)
    plain = NormAlignLlavaForConditionalGeneration.from_pretrained(
        checkpoint, quantization_config=trainer.model.config.quantization_config
    ).dequantize()
    inputs = trainer.data_collator([trainer.train_dataset[i] for i in range(2)])
    plain.double()(**{n: v.double() if v.is_floating_point() else v for n, v in inputs.items()}).loss.backward()
    trainer.model.train()
    trainer.compute_loss(trainer.model, dict(inputs)).backward()
    for name, parameter in trainer.model.named_parameters():
        if "projector" in name:
            expected = plain.get_parameter(name).grad
            assert (parameter.grad - expected).norm() < 1e-3 * expected.norm(), name


def test_what_would_train_a_quantized_weight_is_refused_by_name(tmp_path, checkpoint):
    quantization = BitsAndBytesConfig(load_in_4bit=True)
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint, quantization_config=quantization)
    skipping = BitsAndBytesConfig(load_in_4bit=True, llm_int8_skip_modules=["lm_head", "vision_tower"])
    for given, settings, message in (
        (str(checkpoint), quantization, r"language_learning_rate is 0\.001.*Leave out the quantization"),
        (str(checkpoint), skipping, "llm_int8_skip_modules is set here"),
        (model, None, "Give that folder and quantization_config"),
    ):
        args, rows = training.arguments(tmp_path / "out"), training.rows(2)
        with pytest.raises(ValueError, match=message):
            NormAlignTrainer(given, args, train_dataset=rows, quantization_config=settings)
