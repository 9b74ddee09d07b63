import copy
import json
import math
import re
import shutil
from pathlib import Path

import pytest
import tiny
import torch
import training
from stored import weights as weights_of
from training import moved, weights
from transformers import BitsAndBytesConfig, FalconConfig, GPT2Config, MixtralConfig
from trl import SFTTrainer

from normalign_llava import NormAlignLlavaForConditionalGeneration, NormAlignTrainer
from normalign_llava.checkpoint.opening import open_checkpoint
from normalign_llava.train.modules.load import largest_hidden_state, load_model
from normalign_llava.train.modules.model import base_model, eval_frozen, module_of


pytestmark = pytest.mark.slow


def batch(trainer, count=2):
    return trainer.data_collator([trainer.train_dataset[i] for i in range(count)])


@pytest.mark.parametrize("module", ["vision", "projector", "norm", "language"])
def test_a_module_alone_changes_if_it_alone_has_a_learning_rate(tmp_path, checkpoint, module):
    rates = {f"{name}_learning_rate": 0.0 for name in ("vision", "projector", "norm", "language")}
    trainer = training.trainer(tmp_path, checkpoint, **{**rates, f"{module}_learning_rate": 1e-2})
    before = weights(trainer.model)
    trainer.train()
    names = moved(before, trainer.model)
    assert names
    assert {module_of(name) for name in names} == {module}
    for name, parameter in trainer.model.named_parameters():
        assert parameter.requires_grad == (module_of(name) == module), name
    # CLIP's last layer and its last norm come after the layer that is read; everything else of a trained module moves.
    unread = ("encoder.layers.2.", "post_layernorm")
    expected = {name for name in before if module_of(name) == module and not any(part in name for part in unread)}
    still = {name for name in expected - names if before[name].ndim > 1}
    assert still <= {"model.vision_tower.embeddings.position_embedding.weight"}


@pytest.mark.parametrize("optimizer", [None, (torch.optim.SGD, {"lr": 1e-5, "momentum": 0.5})], ids=["AdamW", "SGD"])
def test_each_module_has_its_learning_rate_and_no_norm_decays(tmp_path, checkpoint, optimizer):
    rates = dict(vision_learning_rate=2e-6, projector_learning_rate=3e-4, norm_learning_rate=5e-5)
    args = training.arguments(tmp_path, weight_decay=0.1, learning_rate=3e-3 if optimizer else 1e-5, **rates)
    trainer = NormAlignTrainer(
        str(checkpoint), args, train_dataset=training.rows(2), optimizer_cls_and_kwargs=optimizer
    )
    names = {parameter: name for name, parameter in trainer.model.named_parameters()}
    expected = {"vision": 2e-6, "projector": 3e-4, "norm": 5e-5, "language": 1e-5}
    groups = trainer.create_optimizer().param_groups
    assert sorted(names[parameter] for group in groups for parameter in group["params"]) == sorted(names.values())
    for group in groups:
        assert group.get("momentum") == (0.5 if optimizer else None)
        for name in (names[parameter] for parameter in group["params"]):
            assert group["lr"] == expected[module_of(name)], name
            assert group["weight_decay"] == (0.0 if name.endswith("bias") or "norm" in name else 0.1), name


def test_the_loss_and_every_gradient_are_those_of_trl(tmp_path, checkpoint):
    ours = training.trainer(tmp_path, checkpoint, max_steps=1)
    stock = SFTTrainer(
        model=copy.deepcopy(base_model(ours.model)),
        args=copy.deepcopy(ours.args),
        train_dataset=ours.train_dataset,
        processing_class=ours.processing_class,
        data_collator=ours.data_collator,
    )
    inputs = batch(ours)
    found = []
    for trainer in (ours, stock):
        trainer.model.zero_grad()
        loss = trainer.compute_loss(trainer.model, dict(inputs), num_items_in_batch=None)
        loss.backward()
        found.append((loss.detach(), {n: p.grad for n, p in trainer.model.named_parameters() if p.grad is not None}))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-6, atol=0)
    assert found[0][1].keys() == found[1][1].keys()
    for name, gradient in found[0][1].items():
        torch.testing.assert_close(gradient, found[1][1][name], rtol=1e-4, atol=1e-7, msg=name)


def test_without_images_the_loss_is_the_decoders_and_the_towers_gradients_zero(tmp_path, checkpoint):
    trainer = training.trainer(tmp_path, checkpoint, dataset=training.rows(images=lambda number: 0))
    model, inputs = trainer.model, batch(trainer)
    assert "pixel_values" not in inputs
    language = copy.deepcopy(base_model(model))
    logits = language.lm_head(
        language.model.language_model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])[0]
    )
    labels = inputs["labels"][:, 1:]
    expected = torch.nn.functional.cross_entropy(logits[:, :-1][labels != -100], labels[labels != -100])
    loss = trainer.compute_loss(model, dict(inputs))
    loss.backward()
    torch.testing.assert_close(loss, expected)
    for name, parameter in model.named_parameters():
        if module_of(name) in ("projector", "norm"):
            assert parameter.grad is not None and not parameter.grad.any(), name
    assert model.model.vision_tower.get_input_embeddings().weight.grad is not None


def test_a_frozen_decoder_whose_layers_call_dropout_is_checkpointed_without_it():
    """They call `dropout(..., training=self.training)` in the layer that is in training mode for its checkpoint."""
    dropout = {name: 0.5 for name in FalconConfig().to_dict() if "drop" in name}
    sizes = dict(hidden_size=tiny.WIDTH, num_hidden_layers=2, num_attention_heads=2)
    model = tiny.model(text=FalconConfig(vocab_size=tiny.VOCABULARY, **sizes, **dropout), tied=False)
    decoder = model.model.language_model.requires_grad_(False)
    runs, embeddings = [], torch.randn(1, 9, tiny.WIDTH, requires_grad=True)
    first = next(module for module in decoder.modules() if isinstance(module, torch.nn.Linear))
    first.register_forward_hook(lambda *args: runs.append(1))

    def run():
        runs.clear()
        output = decoder(inputs_embeds=embeddings, use_cache=False).last_hidden_state
        (gradient,) = torch.autograd.grad(output.square().sum(), embeddings)
        return output, gradient, len(runs)

    output, gradient, once = run()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for trained in (False, False, True):  # in every step
        decoder.requires_grad_(trained)
        model.train()
        eval_frozen(model)
        found = run()
        assert found[2] == 2 * once
        assert (torch.equal(found[0], output) and torch.equal(found[1], gradient)) != trained


@pytest.mark.parametrize("bits, bf16", [(4, True), (8, True), (16, False)])
def test_what_is_trained_with_adapters_is_float32_and_moves(tmp_path, bits, bf16):
    untied = training.checkpoint(tmp_path / "base", tied=False)
    base = {f"load_in_{bits}bit": True} if bits < 16 else {}
    options = dict(use_peft=True, lora_modules_to_save=["embed_tokens", "lm_head"], dtype="bfloat16", bf16=bf16)
    rates = dict(learning_rate=2e-6, vision_learning_rate=2e-6, lr_scheduler_type="constant")
    trainer = training.trainer(tmp_path, untied, **base, **options, **rates)
    before = weights(trainer.model)
    trained = {name: value for name, value in trainer.model.named_parameters() if value.requires_grad}
    assert {value.dtype for value in trained.values()} == {torch.float32}
    model = base_model(trainer.model).model
    for part in ("multi_modal_projector", "vision_tower"):
        stored = load_model(open_checkpoint(untied), trainer.args, trainer.learning_rates).model.get_submodule(part)
        copied = model.get_submodule(part).modules_to_save["default"].state_dict()
        assert all(torch.equal(copied[name], value) for name, value in stored.state_dict().items())
    trainer.train()
    names = moved(before, trainer.model)
    assert names <= trained.keys()
    saved = ("projector.{}.linear_1", "projector.{}.norm", "vision_tower.{}.encoder", "embed_tokens.{}", "lm_head.{}")
    for part in ("lora_B", *(name.format("modules_to_save.default") for name in saved)):
        shares = [(trained[name] != before[name]).float().mean() for name in names if part in name]
        assert shares and (min(shares) > 0.5 or "embed_tokens" in part), part  # few of whose rows are read
    trainer.save_model()
    assert {value.dtype for value in weights_of(tmp_path).values()} == {torch.float32}


FROZEN = dict(vision_learning_rate=0.0, language_learning_rate=0.0)
HALF, FULL = ["bfloat16"], ["float32"]


@pytest.mark.parametrize(
    ("options", "vision", "projector", "language"),
    [
        (FROZEN, HALF, FULL, HALF),
        (dict(learning_rate=0.0, norm_learning_rate=1e-3), HALF, HALF, HALF),
        (dict(projector_learning_rate=0.0, norm_learning_rate=0.0), FULL, HALF, FULL),
        (dict(use_peft=True), HALF, FULL, HALF),
        (dict(dtype="bfloat16"), FULL, FULL, FULL),
        (dict(**FROZEN, bf16=False), FULL, FULL, FULL),
        (dict(**FROZEN, bf16=False, dtype="bfloat16"), HALF, FULL, HALF),
        (dict(language_learning_rate=0.0, bf16=False, dtype="float16"), FULL, FULL, ["float16"]),
    ],
    ids=str,
)
def test_what_is_trained_is_float32_and_what_is_frozen_as_it_was_read(
    tmp_path, half, options, vision, projector, language
):
    for dry_run in (True, False):
        trainer = training.trainer(tmp_path, half, **{"bf16": True, **options}, dry_run=dry_run)
        found = {row["module"]: row["dtypes"] for row in trainer.facts["modules"]}
        adapters = {"adapters": FULL} if "use_peft" in options else {}
        expected = {"vision tower": vision, "projector": projector, "norm": FULL, "language model": language}
        assert found == expected | adapters
    before = weights(trainer.model)
    trainer.train()
    trained = {name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad}
    assert moved(before, trainer.model) <= trained
    assert {state["exp_avg"].dtype for state in trainer.optimizer.state.values()} == {torch.float32}


def test_two_half_precisions_are_not_mixed(tmp_path, half):
    with pytest.raises(ValueError, match="dtype float16 and steps in bfloat16 .* Use --dtype bfloat16, or float32"):
        training.trainer(tmp_path / "out", half, bf16=True, dtype="float16", **FROZEN)


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_beside_a_frozen_model_the_projector_is_trained_and_all_is_written_as_it_was(tmp_path, half, bits):
    options = {f"load_in_{bits}bit": True} if bits < 16 else {}
    trainer = training.trainer(tmp_path, half, **FROZEN, **options, bf16=True, save_strategy="steps", save_steps=2)
    kinds = {type(module).__name__ for module in trainer.model.model.language_model.modules()}
    assert {4: "Linear4bit", 8: "Linear8bitLt", 16: "Linear"}[bits] in kinds
    built, before = weights_of(half), weights(trainer.model)
    projector = {name for name in built if "projector" in name}
    assert all(torch.equal(before[name], built[name]) for name in projector)  # float32, and not rounded
    trainer.train()
    assert moved(before, trainer.model) == projector
    for folder in (tmp_path, tmp_path / "checkpoint-2"):
        trainer.save_model() if folder == tmp_path else None
        trained = {name: trainer.model.get_parameter(name).detach() for name in projector}
        assert not any(torch.equal(value, value.bfloat16().float()) for value in trained.values())
        training.assert_equal(weights_of(folder), {**built, **trained})
        config = json.loads((folder / "config.json").read_text())
        assert config["dtype"] == "bfloat16" and "quantization_config" not in config
    tuned = training.trainer(tmp_path / "tuned", tmp_path, **options, use_peft=bits < 16, bf16=True)
    tuned.train()
    tuned.save_model()
    saved = {name: value.dtype for name, value in weights_of(tmp_path / "tuned").items()}
    assert {saved[name] for name in saved if "vision_tower" not in name} == {torch.float32}


def test_the_gradient_through_frozen_4_bit_layers_is_that_of_what_they_stand_for(tmp_path, checkpoint):
    trainer = training.trainer(tmp_path, checkpoint, **FROZEN, load_in_4bit=True)
    plain = NormAlignLlavaForConditionalGeneration.from_pretrained(
        checkpoint, quantization_config=trainer.model.config.quantization_config
    ).dequantize()
    inputs = batch(trainer)
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
        (str(checkpoint), quantization, r"language_learning_rate 0\.001 would train quantized weights"),
        (str(checkpoint), skipping, "llm_int8_skip_modules is set here"),
        (model, None, "Give a quantized model without adapters by folder"),
    ):
        args, rows = training.arguments(tmp_path / "out"), training.rows(2)
        with pytest.raises(ValueError, match=message):
            NormAlignTrainer(given, args, train_dataset=rows, quantization_config=settings)


def large(folder: Path, half: Path, size: float) -> str:
    """The checkpoint with hidden states of about this size."""
    shutil.copytree(half, folder)
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(half)
    with torch.no_grad():
        for part in ("up_proj", "down_proj"):  # one alone would itself be beyond float16
            model.model.language_model.layers[0].mlp.get_submodule(part).weight *= (size / 0.002) ** 0.5
    model.save_pretrained(folder)
    return str(folder)


def test_the_largest_hidden_state_is_that_of_the_model_in_float64(half, tmp_path):
    trainer, beyond = (
        training.trainer(tmp_path, large(tmp_path / str(size), half, size), **FROZEN) for size in (100.0, 1e6)
    )
    inputs = batch(trainer)
    found = largest_hidden_state(trainer.model, inputs)
    exact = {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}
    states = trainer.model.double()(**exact, output_hidden_states=True).hidden_states
    assert found == pytest.approx(max(state.abs().max().item() for state in states), rel=0.01) and found > 10
    assert largest_hidden_state(beyond.model, inputs) == math.inf


@pytest.mark.parametrize("quantization", [None, BitsAndBytesConfig(load_in_4bit=True)], ids=["16", "4"])
def test_without_bfloat16_float16_is_taken_only_if_hidden_states_stay_well_below_its_end(tmp_path, half, quantization):
    for size, holds, reach in (
        (1000.0, True, r"\d?,?\d{3}"),
        (15_000.0, False, r"\d\d,\d{3}"),
        (1e6, False, "overflow"),
    ):
        args = training.arguments(tmp_path, **FROZEN, fp16=True, bf16=None)
        args.fp16_is_tried = True  # as on a GPU without bfloat16
        checkpoint = large(tmp_path / str(size), half, size)
        trainer = NormAlignTrainer(checkpoint, args, train_dataset=training.rows(), quantization_config=quantization)
        model, recorded = trainer.model, trainer.record["options"]
        assert trainer.args.fp16 == recorded["fp16"] == holds
        assert re.search(f"hidden states .* (reach )?{reach}, .* ends at 65,504", trainer.facts["precision_because"])
        products = {m.compute_dtype for m in model.modules() if type(m).__name__ == "Linear4bit"}
        assert products <= {torch.float16 if holds else torch.float32} and bool(products) == bool(quantization)
        if not holds:
            assert trainer.accelerator.mixed_precision == "no" and recorded["dtype"] == "float32"
            assert {p.dtype for p in model.parameters()} <= {torch.float32, torch.uint8}
        trainer.train()


def test_language_models_of_experts_and_of_convolutions_as_linear_layers_train(tmp_path):
    sizes = dict(num_local_experts=2, num_experts_per_tok=1)
    experts = training.checkpoint(tmp_path / "experts", cls=MixtralConfig, **sizes)
    training.trainer(tmp_path / "a", experts, max_steps=1).train()
    gpt2 = training.checkpoint(tmp_path / "gpt2", cls=GPT2Config)
    trainer = training.trainer(tmp_path / "b", gpt2, use_peft=True, max_steps=1)
    trainer.train()
    assert any("c_attn.lora_A" in name for name, _ in trainer.model.named_parameters())


def test_the_steps_that_are_announced_are_those_of_the_run(checkpoint, tmp_path):
    rows = training.rows(13)
    options = dict(max_steps=-1, num_train_epochs=1.5, global_batch_size=4, dataloader_drop_last=True)
    trainer = training.trainer(tmp_path, checkpoint, rows, **options)
    trainer.train()
    assert trainer.facts["steps"] == trainer.state.max_steps == trainer.state.global_step == 5
