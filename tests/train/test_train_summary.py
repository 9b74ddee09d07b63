# SPDX-License-Identifier: Apache-2.0
"""The table before training: counts against the tensors themselves, in training and in four bits; memory; width."""

import pytest
import torch
import training
from measured import make_trainer
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


def test_full_tuning_trains_every_parameter_at_its_modules_learning_rate(checkpoint, tmp_path):
    model = make_trainer(checkpoint, tmp_path, frozen=("vision",)).model
    rows = table(model, {**RATES, "vision": 0.0})
    assert list(rows) == ["vision tower", "projector", "norm", "language model"]
    assert rows["vision tower"]["parameters"] == elements(model, "vision_tower")
    assert rows["projector"]["parameters"] == elements(model, "linear_1", "linear_2") == 16 * 32 + 32 + 32 * 32 + 32
    assert rows["norm"]["parameters"] == 2 * 32
    assert sum(row["parameters"] for row in rows.values()) == model.num_parameters()
    assert sum(row["trained"] for row in rows.values()) == model.num_parameters(only_trainable=True)
    assert rows["vision tower"]["trained"] == 0 and rows["vision tower"]["learning_rate"] == 0.0
    assert [rows[name]["learning_rate"] for name in ("projector", "norm", "language model")] == [1e-3, 3e-4, 2e-5]
    assert {tuple(row["dtypes"]) for row in rows.values()} == {("float32",)}


def test_adapters_have_a_row_and_untrained_copies_none(checkpoint, tmp_path):
    plain = table(make_trainer(checkpoint, tmp_path).model)
    model = make_trainer(checkpoint, tmp_path, rank=2).model
    rows = table(model)
    for name in ("vision tower", "projector", "norm", "language model"):
        assert rows[name]["parameters"] == plain[name]["parameters"]
    assert rows["adapters"]["parameters"] == rows["adapters"]["trained"] == elements(model, "lora_")
    assert rows["adapters"]["learning_rate"] == 2e-5
    assert rows["language model"]["trained"] == 0 and rows["projector"]["trained"] == plain["projector"]["parameters"]
    assert sum(row["trained"] for row in rows.values()) == model.get_nb_trainable_parameters()[0]


def quantized(checkpoint, **kwargs):
    config = BitsAndBytesConfig(**kwargs)
    return NormAlignLlavaForConditionalGeneration.from_pretrained(
        checkpoint, dtype=torch.bfloat16, quantization_config=config
    )


def test_four_bits_count_as_the_parameters_they_stand_for(wide, tmp_path):
    pytest.importorskip("bitsandbytes")
    plain = NormAlignLlavaForConditionalGeneration.from_pretrained(wide, dtype=torch.bfloat16)
    model = quantized(
        wide, load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )  # fmt: skip
    found, expected = table(model), table(plain)
    assert {name: row["parameters"] for name, row in found.items()} == {
        name: row["parameters"] for name, row in expected.items()
    }
    assert found["language model"]["dtypes"] == ["nf4", "bfloat16"]
    assert found["norm"]["dtypes"] == ["float32"]
    arguments = make_trainer(wide, tmp_path).args
    linears = [p.numel() for n, p in plain.model.language_model.named_parameters() if n.endswith("_proj.weight")]
    # Half a byte each; a byte for every 64, whose constants are a float for every 256; two tables of floats.
    quantized_bytes = sum(n // 2 + n // 64 + 4 * -(-n // 64 // 256) + 4 * 16 + 4 * 256 for n in linears)
    expected_bytes = static_bytes(plain, arguments)["weights"] - 2 * sum(linears) + quantized_bytes
    assert static_bytes(model, arguments)["weights"] == expected_bytes


class Bytes(TrainerCallback):
    """Bytes of gradients when all are there."""

    gradients = 0

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize(
    ("optimizer", "rank"),
    [("adamw_torch_fused", 0), ("adamw_8bit", 0), ("adafactor", 0), ("paged_adamw_32bit", 8)],
)
def test_weights_gradients_and_states_take_what_was_counted(wide, tmp_path, optimizer, rank):
    counted = Bytes()
    trainer = make_trainer(
        wide, tmp_path, optim=optimizer, rank=rank, max_steps=1, callbacks=[counted],
        frozen=("vision",),
    )  # fmt: skip
    found = static_bytes(trainer.model, trainer.args)
    trainer.train()
    tensors = [*trainer.model.parameters(), *trainer.model.buffers()]
    states = 0
    for state in trainer.optimizer.state.values():
        # Tables that all tensors share, and the step, aside.
        states += sum(
            value.nbytes
            for name, value in state.items()
            if torch.is_tensor(value) and value.dim() and not name.startswith("qmap")
        )
    weights = found["weights"] + found["adapters"]
    assert weights == sum(tensor.nbytes for tensor in tensors)
    assert found["gradients"] == counted.gradients
    assert found["optimizer"] == states
