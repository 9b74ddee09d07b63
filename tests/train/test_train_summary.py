# SPDX-License-Identifier: Apache-2.0
"""The table before training: counts against the tensors themselves, in training and in four bits; memory."""

from functools import partial

import pytest
import torch
import training
from transformers import BitsAndBytesConfig, TrainerCallback

from normalign_llava import NormAlignLlavaForConditionalGeneration
from normalign_llava.train.keeping.summary import modules
from normalign_llava.train.memory import static_bytes


pytestmark = pytest.mark.slow


RATES = {"vision": 2e-6, "projector": 1e-3, "norm": 3e-4, "language": 2e-5}


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Wide enough for bitsandbytes to keep states in 8 bits, and for 4-bit layers of several blocks."""
    return training.checkpoint(tmp_path_factory.mktemp("wide"), hidden_size=128, intermediate_size=192, head_dim=64)


def table(model, rates=RATES):
    return {row["module"]: row for row in modules(model, rates)}


def elements(model, *pieces: str) -> int:
    return sum(p.numel() for name, p in model.named_parameters() if any(piece in name for piece in pieces))


def test_every_parameter_counts_in_its_module_at_its_learning_rate(checkpoint, tmp_path):
    model = training.trainer(tmp_path, checkpoint, vision_learning_rate=0.0).model
    rows = table(model, {**RATES, "vision": 0.0})
    assert rows["vision tower"]["parameters"] == elements(model, "vision_tower")
    assert rows["projector"]["parameters"] == elements(model, "linear_1", "linear_2") == 16 * 32 + 32 + 32 * 32 + 32
    assert rows["norm"]["parameters"] == 2 * 32
    assert sum(row["parameters"] for row in rows.values()) == model.num_parameters()
    assert sum(row["trained"] for row in rows.values()) == model.num_parameters(only_trainable=True)
    assert rows["vision tower"]["trained"] == 0
    assert [row["learning_rate"] for row in rows.values()] == [0.0, 1e-3, 3e-4, 2e-5]

    model = training.trainer(tmp_path, checkpoint, use_peft=True).model
    adapted = table(model)
    adapters = adapted.pop("adapters")
    assert [row["parameters"] for row in adapted.values()] == [row["parameters"] for row in rows.values()]
    assert adapters["parameters"] == adapters["trained"] == elements(model, "lora_")
    assert adapters["learning_rate"] == 2e-5 and adapted["language model"]["trained"] == 0
    trained = sum(row["trained"] for row in (*adapted.values(), adapters))
    assert trained == model.get_nb_trainable_parameters()[0]


def test_four_bits_count_as_the_parameters_they_stand_for(wide, tmp_path):
    load = partial(NormAlignLlavaForConditionalGeneration.from_pretrained, wide, dtype=torch.bfloat16)
    nf4 = dict(bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16)
    plain, model = load(), load(quantization_config=BitsAndBytesConfig(load_in_4bit=True, **nf4))
    found, expected = table(model), table(plain)
    assert [row["parameters"] for row in found.values()] == [row["parameters"] for row in expected.values()]
    assert found["language model"]["dtypes"] == ["nf4", "bfloat16"] and found["norm"]["dtypes"] == ["float32"]
    arguments = training.trainer(tmp_path, wide).args
    linears = [p.numel() for n, p in plain.model.language_model.named_parameters() if n.endswith("_proj.weight")]
    # Half a byte each; a byte for every 64, whose constants are a float for every 256; two tables of floats.
    quantized = sum(n // 2 + n // 64 + 4 * -(-n // 64 // 256) + 4 * 16 + 4 * 256 for n in linears)
    expected_bytes = static_bytes(plain, arguments)["weights"] - 2 * sum(linears) + quantized
    assert static_bytes(model, arguments)["weights"] == expected_bytes


class Bytes(TrainerCallback):
    """Bytes of gradients when all are there."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize(
    ("optimizer", "use_peft"),
    [("adamw_torch_fused", False), ("adamw_8bit", False), ("adafactor", False), ("paged_adamw_32bit", True)],
)
def test_weights_gradients_and_states_take_what_was_counted(wide, tmp_path, optimizer, use_peft):
    counted = Bytes()
    options = dict(optim=optimizer, use_peft=use_peft, max_steps=1, vision_learning_rate=0.0)
    trainer = training.trainer(tmp_path, wide, **options)
    trainer.add_callback(counted)
    found = static_bytes(trainer.model, trainer.args)
    trainer.train()
    # Tables that all tensors share, and the step, aside.
    states = sum(
        value.nbytes
        for state in trainer.optimizer.state.values()
        for name, value in state.items()
        if torch.is_tensor(value) and value.dim() and not name.startswith("qmap")
    )
    weights = sum(tensor.nbytes for tensor in [*trainer.model.parameters(), *trainer.model.buffers()])
    assert found["weights"] + found["adapters"] == weights
    assert (found["gradients"], found["optimizer"]) == (counted.gradients, states)
