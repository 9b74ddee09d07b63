import json

import pytest
import stored
import torch
import training
from transformers import BitsAndBytesConfig

from normalign_llava import NormAlignLlavaForConditionalGeneration, NormAlignTrainer
from normalign_llava.train.modules.model import base_model


pytestmark = pytest.mark.slow


QLORA = dict(use_peft=True, load_in_4bit=True, dtype="bfloat16", lora_dropout=0.0)


def test_what_is_quantized_and_what_is_left_alone(tmp_path, checkpoint):
    trainer = training.trainer(tmp_path, checkpoint, **QLORA)
    model = base_model(trainer.model)
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    quantized = {name for name, kind in kinds.items() if "4bit" in kind and "lora_" not in name}
    assert quantized and all(".language_model.layers." in name for name in quantized)
    quantization = model.config.quantization_config
    assert (quantization.bnb_4bit_quant_type, quantization.bnb_4bit_use_double_quant) == ("nf4", True)


def test_a_4_bit_step_after_generating_and_evaluating_has_the_same_gradients(tmp_path, checkpoint):
    gradients = []
    for first in (False, True):
        trainer = training.trainer(tmp_path, checkpoint, **QLORA)
        inputs = trainer.data_collator([trainer.train_dataset[i] for i in range(2)])
        if first:
            trainer.model.eval()
            trainer.model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2)
            trainer.evaluate(training.rows(4))
        trainer.model.train()
        trainer.compute_loss(trainer.model, dict(inputs)).backward()
        gradients.append({n: p.grad for n, p in trainer.model.named_parameters() if p.requires_grad})
    training.assert_equal(*gradients)


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


@pytest.mark.parametrize(
    ("skipped", "named"),
    [
        (None, r"language_learning_rate is 0\.001.*Leave out the quantization"),
        (["lm_head", "vision_tower"], "llm_int8_skip_modules is set here"),
    ],
)
def test_what_would_train_a_quantized_weight_is_refused_by_name_before_it_is_loaded(
    tmp_path, checkpoint, skipped, named, capfd
):
    quantization = BitsAndBytesConfig(load_in_4bit=True, llm_int8_skip_modules=skipped)
    args = training.arguments(tmp_path / "out")
    with pytest.raises(ValueError, match=named):
        NormAlignTrainer(str(checkpoint), args, train_dataset=training.rows(2), quantization_config=quantization)
    assert "Loading weights" not in capfd.readouterr().err
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint, quantization_config=quantization)
    with pytest.raises(ValueError, match="Give that folder and quantization_config"):
        NormAlignTrainer(model, args, train_dataset=training.rows(2))
