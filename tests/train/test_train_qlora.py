import pytest
import torch
import training
from safetensors import safe_open
from transformers import BitsAndBytesConfig

from normalign_llava.train.modules.model import base_model, load_model, projector_norm


pytestmark = pytest.mark.slow


QLORA = dict(use_peft=True, load_in_4bit=True, dtype="bfloat16", lora_dropout=0.0)


def gain_and_bias(model):
    norm = projector_norm(model)
    return norm.weight.detach().clone(), norm.bias.detach().clone()


def test_what_is_quantized_and_what_is_left_alone(tmp_path, checkpoint):
    trainer = training.trainer(tmp_path, checkpoint, **QLORA)
    model = base_model(trainer.model)
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    quantized = {name for name, kind in kinds.items() if "4bit" in kind and "lora_" not in name}
    assert quantized and all(".language_model.layers." in name for name in quantized)
    quantization = model.config.quantization_config
    assert (quantization.bnb_4bit_quant_type, quantization.bnb_4bit_use_double_quant) == ("nf4", True)


def test_a_device_map_of_one_s_own_is_kept(tmp_path, checkpoint):
    args = training.arguments(tmp_path)
    args.model_init_kwargs = {"device_map": {"model": "cpu", "lm_head": "disk"}}  # which bitsandbytes refuses
    with pytest.raises(ValueError, match="Some modules are dispatched on the CPU or the disk"):
        load_model(checkpoint, args, BitsAndBytesConfig(load_in_4bit=True))


@pytest.mark.parametrize("base", [dict(load_in_4bit=True), dict(load_in_8bit=True)])
def test_gain_and_bias_are_float32_with_float32_optimizer_state_and_adapter_file(tmp_path, checkpoint, base):
    options = {**QLORA, "load_in_4bit": False, **base}
    trainer = training.trainer(tmp_path, checkpoint, save_strategy="steps", save_steps=2, **options)
    before = gain_and_bias(trainer.model)
    stored = load_model(checkpoint, trainer.args)
    assert all(torch.equal(ours, kept) for ours, kept in zip(before, gain_and_bias(stored), strict=True))
    trainer.train()
    norm = projector_norm(trainer.model)
    for parameter in (norm.weight, norm.bias):
        assert parameter.dtype == torch.float32
        state = trainer.optimizer.state[parameter]
        assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.float32
    with safe_open(tmp_path / "checkpoint-2" / "adapter_model.safetensors", "pt") as file:
        saved = {name: file.get_tensor(name) for name in file.keys() if ".norm." in name}  # noqa: SIM118
    assert len(saved) == 2
    assert all(tensor.dtype == torch.float32 for tensor in saved.values())
    assert any(torch.equal(tensor, norm.weight) for tensor in saved.values())


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
    assert all(gradient is not None for gradient in gradients[1].values())
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name]), name
