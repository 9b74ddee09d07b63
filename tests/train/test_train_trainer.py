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
from transformers import (
    BitsAndBytesConfig,
    FalconConfig,
    GPT2Config,
    MixtralConfig,
    TrainerCallback,
)
from trl import SFTTrainer

from normalign_llava import NormAlignLlavaForConditionalGeneration, NormAlignTrainer
from normalign_llava.checkpoint.opening import open_checkpoint
from normalign_llava.train import settings as run_settings
from normalign_llava.train.modules.forward import eval_frozen
from normalign_llava.train.modules.load import largest_hidden_state, load_model
from normalign_llava.train.modules.model import base_model, module_of
from normalign_llava.train.modules.sharding import fill_gradients
from normalign_llava.train.settings import Precision


pytestmark = pytest.mark.slow
FROZEN = dict(vision_learning_rate=0.0, language_learning_rate=0.0)
NF4 = BitsAndBytesConfig(load_in_4bit=True)
HALF = ["bfloat16"]
FULL = ["float32"]


def batch(trainer, count=2):
    return trainer.data_collator([trainer.train_dataset[i] for i in range(count)])


@pytest.mark.parametrize("module", ["vision", "projector", "norm", "language"])
def test_a_module_alone_changes_if_it_alone_has_a_learning_rate(tmp_path, checkpoint, module):
    rates = {f"{name}_learning_rate": 0.0 for name in ("vision", "projector", "norm", "language")}
    trainer = training.trainer(tmp_path, checkpoint, **{**rates, f"{module}_learning_rate": 1e-2})
    before = weights(trainer.model)
    trainer.train()
    names = moved(before, trainer.model)
    assert {module_of(name) for name in names} == {module}
    for name, parameter in trainer.model.named_parameters():
        assert parameter.requires_grad == (module_of(name) == module), name
    # CLIP's last layer and its last norm come after the layer that is read.
    expected = {name for name in before if module_of(name) == module and before[name].ndim > 1}
    unread = {name for name in expected if "encoder.layers.2." in name or "post_layernorm" in name}
    still = expected - unread - names
    assert still <= {"model.vision_tower.embeddings.position_embedding.weight"}


@pytest.mark.parametrize("momentum", [None, 0.5], ids=["AdamW", "SGD"])
def test_each_module_has_its_learning_rate_and_no_norm_decays(tmp_path, checkpoint, momentum):
    rates = dict(vision_learning_rate=2e-6, projector_learning_rate=3e-4, norm_learning_rate=5e-5)
    given = dict(train_dataset=training.rows(2))
    if momentum:
        given["optimizer_cls_and_kwargs"] = (torch.optim.SGD, dict(lr=1e-5, momentum=momentum))
    rates["learning_rate"] = 3e-3 if momentum else 1e-5
    args = training.arguments(tmp_path, weight_decay=0.1, **rates)
    trainer = NormAlignTrainer(str(checkpoint), args, **given)
    names = {parameter: name for name, parameter in trainer.model.named_parameters()}
    expected = {"vision": 2e-6, "projector": 3e-4, "norm": 5e-5, "language": 1e-5}
    groups = trainer.create_optimizer().param_groups
    seen = []
    for group in groups:
        assert group.get("momentum") == momentum
        for name in (names[parameter] for parameter in group["params"]):
            assert group["lr"] == expected[module_of(name)], name
            decays = not name.endswith("bias") and "norm" not in name
            assert group["weight_decay"] == (0.1 if decays else 0.0), name
            seen.append(name)
    assert sorted(seen) == sorted(names.values())


def test_under_fsdp_gradients_that_are_missing_are_filled(tmp_path, checkpoint):
    trainer = training.trainer(tmp_path, checkpoint)
    assert not trainer.create_optimizer()._optimizer_step_pre_hooks
    trainer.optimizer = None
    trainer.is_fsdp_enabled = True
    assert [*trainer.create_optimizer()._optimizer_step_pre_hooks.values()] == [fill_gradients]


def gradients(model) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_the_loss_and_every_gradient_are_those_of_trl(tmp_path, checkpoint):
    ours = training.trainer(tmp_path, checkpoint, max_steps=1)
    model = copy.deepcopy(base_model(ours.model))
    args = copy.deepcopy(ours.args)
    data = (ours.data_collator, ours.train_dataset, None, ours.processing_class)
    stock = SFTTrainer(model, args, *data)
    losses = []
    for trainer in (ours, stock):
        trainer.model.zero_grad()
        loss = trainer.compute_loss(trainer.model, dict(batch(ours)), num_items_in_batch=None)
        loss.backward()
        losses.append(loss.detach())
    torch.testing.assert_close(*losses, rtol=1e-6, atol=0)
    torch.testing.assert_close(gradients(ours.model), gradients(model), rtol=1e-4, atol=1e-7)
    sizes = []
    ours.model.model.register_forward_hook(
        lambda module, args, output: sizes.append(output.last_hidden_state.shape[:2])
    )
    ours.compute_loss(ours.model, dict(batch(ours)), num_items_in_batch=None)
    base_model(ours.model).only_answers = False  # as on a GPU, where TRL's head sees all positions
    whole = ours.compute_loss(ours.model, dict(batch(ours)), num_items_in_batch=None)
    torch.testing.assert_close(whole.detach(), losses[1], rtol=1e-6, atol=0)
    labels = batch(ours)["labels"]
    assert sizes == [(1, int((labels[:, 1:] != -100).sum())), labels.shape]


def test_without_images_the_loss_is_the_decoders_and_the_tower_learns_nothing(tmp_path, checkpoint):
    trainer = training.trainer(tmp_path, checkpoint, dataset=training.rows(images=lambda number: 0))
    model = trainer.model
    inputs = batch(trainer)
    assert "pixel_values" not in inputs
    language = copy.deepcopy(base_model(model))
    labels = inputs["labels"][:, 1:]
    read = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    logits = language.lm_head(language.model.language_model(**read)[0])[:, :-1]
    learned = labels != -100
    expected = torch.nn.functional.cross_entropy(logits[learned], labels[learned])
    loss = trainer.compute_loss(model, dict(inputs))
    loss.backward()
    torch.testing.assert_close(loss, expected)
    for name, parameter in model.named_parameters():
        if module_of(name) in ("projector", "norm"):
            assert parameter.grad is not None and not parameter.grad.any(), name
    assert model.model.vision_tower.get_input_embeddings().weight.grad is not None


def test_a_frozen_decoder_whose_layers_call_dropout_is_checkpointed_without_it():
    """They call `dropout(..., training=self.training)` in a layer that is in training mode."""
    sizes = {name: 0.5 for name in FalconConfig().to_dict() if "drop" in name}
    sizes |= dict(hidden_size=tiny.WIDTH, num_hidden_layers=2, num_attention_heads=2)
    model = tiny.model(text=FalconConfig(vocab_size=tiny.VOCABULARY, **sizes), tied=False)
    decoder = model.model.language_model.requires_grad_(False)
    runs = []
    embeddings = torch.randn(1, 9, tiny.WIDTH, requires_grad=True)
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
    options = {f"load_in_{bits}bit": True} if bits < 16 else {}
    options |= dict(use_peft=True, lora_modules_to_save=["embed_tokens", "lm_head"], bf16=bf16)
    options |= dict(learning_rate=2e-6, vision_learning_rate=2e-6, lr_scheduler_type="constant")
    trainer = training.trainer(tmp_path, untied, dtype="bfloat16", **options)
    before = weights(trainer.model)
    named = trainer.model.named_parameters()
    trained = {name: value for name, value in named if value.requires_grad}
    assert {value.dtype for value in trained.values()} == {torch.float32}
    model = base_model(trainer.model).model
    stored = load_model(open_checkpoint(untied), trainer.args, trainer.learning_rates).model
    for part in ("multi_modal_projector", "vision_tower"):
        copied = model.get_submodule(part).modules_to_save["default"].state_dict()
        for name, value in stored.get_submodule(part).state_dict().items():
            assert torch.equal(copied[name], value), name
    trainer.train()
    names = moved(before, trainer.model)
    assert names <= trained.keys()
    saved = ["projector.{}.linear_1", "projector.{}.norm", "vision_tower.{}.encoder", "lm_head.{}"]
    for part in ("lora_B", "embed_tokens.{}", *saved):
        part = part.format("modules_to_save.default")
        shares = [(trained[name] != before[name]).float().mean() for name in names if part in name]
        assert min(shares) > (0 if "embed_tokens" in part else 0.5), part  # few are read
    trainer.save_model()
    assert {value.dtype for value in weights_of(tmp_path).values()} == {torch.float32}


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
def test_what_is_trained_is_float32(tmp_path, half, options, vision, projector, language):
    for dry_run in (True, False):
        trainer = training.trainer(tmp_path, half, **{"bf16": True, **options}, dry_run=dry_run)
        found = {row["module"]: row["dtypes"] for row in trainer.facts["modules"]}
        adapters = {"adapters": FULL} if "use_peft" in options else {}
        expected = {"vision tower": vision, "projector": projector, "language model": language}
        assert found == {"norm": FULL, **expected, **adapters}
    before = weights(trainer.model)
    trainer.train()
    still = {name for name, value in trainer.model.named_parameters() if not value.requires_grad}
    assert not still & moved(before, trainer.model)
    assert {state["exp_avg"].dtype for state in trainer.optimizer.state.values()} == {torch.float32}


def test_two_half_precisions_are_not_mixed(tmp_path, half):
    with pytest.raises(ValueError, match="dtype float16 and .* bfloat16 .* Use --dtype bfloat16"):
        training.trainer(tmp_path / "out", half, bf16=True, dtype="float16", **FROZEN)


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_a_projector_is_trained_beside_a_model_that_is_written_as_it_was(tmp_path, half, bits):
    options = {"bf16": True} | ({f"load_in_{bits}bit": True} if bits < 16 else {})
    saves = dict(save_strategy="steps", save_steps=2)
    trainer = training.trainer(tmp_path, half, **FROZEN, **options, **saves)
    kinds = {type(module).__name__ for module in trainer.model.model.language_model.modules()}
    assert {4: "Linear4bit", 8: "Linear8bitLt", 16: "Linear"}[bits] in kinds
    built = weights_of(half)
    before = weights(trainer.model)
    projector = {name for name in built if "projector" in name}
    assert all(torch.equal(before[name], built[name]) for name in projector)  # not rounded
    trainer.train()
    assert moved(before, trainer.model) == projector
    for folder in (tmp_path, tmp_path / "checkpoint-2"):
        trainer.save_model() if folder == tmp_path else None
        trained = {name: trainer.model.get_parameter(name).detach() for name in projector}
        assert not any(torch.equal(value, value.bfloat16().float()) for value in trained.values())
        training.assert_equal(weights_of(folder), {**built, **trained})
        config = json.loads((folder / "config.json").read_text())
        assert config["dtype"] == "bfloat16" and "quantization_config" not in config
    tuned = training.trainer(tmp_path / "tuned", tmp_path, **options, use_peft=bits < 16)
    tuned.train()
    tuned.save_model()
    saved = {name: value.dtype for name, value in weights_of(tmp_path / "tuned").items()}
    assert {saved[name] for name in saved if "vision_tower" not in name} == {torch.float32}


class TakesWeightsAway(TrainerCallback):
    """Moves the base's weights away after the first save."""

    def __init__(self, base):
        self.base = base

    def on_save(self, args, state, control, **kwargs):
        if state.global_step == 1:
            for file in self.base.glob("*.safetensors"):
                file.rename(file.with_suffix(".away"))


def test_a_quantized_base_is_read_for_one_save_alone(tmp_path, half):
    base = shutil.copytree(half, tmp_path / "base")
    built = weights_of(base)
    options = dict(save_strategy="steps", save_steps=1, max_steps=3, load_in_4bit=True, bf16=True)
    trainer = training.trainer(tmp_path / "out", base, **FROZEN, **options)
    trainer.add_callback(TakesWeightsAway(base))
    trainer.train()
    ends = []
    for step in (1, 2, 3):
        saved = weights_of(tmp_path / "out" / f"checkpoint-{step}")
        assert saved.keys() == built.keys()
        frozen = {name: value for name, value in saved.items() if "projector" not in name}
        training.assert_equal(frozen, {name: built[name] for name in frozen})
        ends.append(saved["model.multi_modal_projector.linear_1.weight"])
    assert not torch.equal(ends[0], ends[1]) and not torch.equal(ends[1], ends[2])
    now = trainer.model.get_parameter("model.multi_modal_projector.linear_1.weight").detach()
    assert torch.equal(ends[2], now)
    # Where no earlier file is left, the base is read again.
    for step in (1, 2, 3):
        shutil.rmtree(tmp_path / "out" / f"checkpoint-{step}")
    for file in base.glob("*.away"):
        file.rename(file.with_suffix(".safetensors"))
    trainer.save_model()
    training.assert_equal(weights_of(tmp_path / "out"), saved)


@pytest.mark.parametrize("arm", ["aligned", "gwc"])
def test_an_untrained_unit_norm_gets_the_gain_of_the_arm(tmp_path, arm):
    unit = training.checkpoint(tmp_path / "unit", arm="unit")
    trainer = training.trainer(tmp_path / "out", unit, arm=arm)
    embeddings = weights_of(unit)["model.language_model.embed_tokens.weight"].double()
    image_token = trainer.model.config.image_token_id
    norms = embeddings.norm(dim=1)
    kept = norms[:image_token]  # the image token, and rows that pad the vocabulary, are added
    kept = kept[kept > 0]  # the row of padding is zero
    expected = (kept.mean() / embeddings.shape[1] ** 0.5).item()
    gain = trainer.model.model.multi_modal_projector.norm.weight
    torch.testing.assert_close(gain.detach().double(), torch.full_like(gain, expected).double())


def in_float64(inputs: dict) -> dict:
    return {name: v.double() if v.is_floating_point() else v for name, v in inputs.items()}


def test_the_gradient_through_frozen_4_bit_layers_is_that_of_full_ones(tmp_path, checkpoint):
    trainer = training.trainer(tmp_path, checkpoint, **FROZEN, load_in_4bit=True)
    quantized = {"quantization_config": trainer.model.config.quantization_config}
    plain = NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint, **quantized)
    plain = plain.dequantize().double().train()
    inputs = batch(trainer)
    plain(**in_float64(inputs)).loss.backward()
    trainer.model.train()
    trainer.compute_loss(trainer.model, dict(inputs)).backward()
    inner = trainer.model.model
    parts = (inner.multi_modal_projector, inner.vision_tower, inner.language_model)
    assert [part.training for part in parts] == [True, False, False]
    for name, parameter in trainer.model.named_parameters():
        if "projector" in name:
            expected = plain.get_parameter(name).grad
            assert (parameter.grad - expected).norm() < 1e-3 * expected.norm(), name


def test_what_would_train_a_quantized_weight_is_refused_by_name(tmp_path, checkpoint):
    path = str(checkpoint)
    load = NormAlignLlavaForConditionalGeneration.from_pretrained
    skipping = BitsAndBytesConfig(load_in_4bit=True, llm_int8_skip_modules=["lm_head"])
    for given, settings, message in (
        (path, NF4, r"language_learning_rate 0\.001 would train quantized weights"),
        (path, skipping, "llm_int8_skip_modules is set here"),
        (load(path, quantization_config=NF4), None, "To quantize without adapters, give a folder"),
    ):
        args = training.arguments(tmp_path / "out")
        rows = training.rows(2)
        with pytest.raises(ValueError, match=message):
            NormAlignTrainer(given, args, train_dataset=rows, quantization_config=settings)


def large(folder: Path, half: Path, size: float) -> str:
    """The checkpoint with hidden states of about this size."""
    shutil.copytree(half, folder)
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(half)
    layer = model.model.language_model.layers[0].mlp
    with torch.no_grad():
        for part in (layer.up_proj, layer.down_proj):  # one alone would itself be beyond float16
            part.weight *= (size / 0.002) ** 0.5
    model.save_pretrained(folder)
    return str(folder)


def test_the_largest_hidden_state_is_that_of_the_model_in_float64(half, tmp_path):
    folders = [large(tmp_path / str(size), half, size) for size in (100.0, 1e6)]
    trainer, beyond = (training.trainer(tmp_path, folder, **FROZEN) for folder in folders)
    inputs = batch(trainer)
    found = largest_hidden_state(trainer.model, inputs)
    exact = trainer.model.double()(**in_float64(inputs), output_hidden_states=True)
    largest = max(state.abs().max().item() for state in exact.hidden_states)
    assert found == pytest.approx(largest, rel=0.01) and found > 10
    assert largest_hidden_state(beyond.model, inputs) == math.inf


@pytest.mark.parametrize("settings", [None, NF4], ids=["16", "4"])
def test_float16_is_taken_only_if_hidden_states_stay_well_below_its_end(
    tmp_path, half, settings, monkeypatch
):
    tried = Precision(bf16=False, fp16=True, is_tried=True)  # as on a GPU without bfloat16
    monkeypatch.setattr(run_settings, "choose_precision", lambda given, use_cpu: tried)
    cases = [(1e3, True, r"\d?,?\d{3}"), (15e3, False, r"\d\d,\d{3}"), (1e6, False, "overflow")]
    for size, holds, reach in cases:
        eager = {"attn_implementation": "eager"}
        args = training.arguments(tmp_path, **FROZEN, bf16=None, model_init_kwargs=eager)
        given = dict(train_dataset=training.rows(), quantization_config=settings)
        trainer = NormAlignTrainer(large(tmp_path / str(size), half, size), args, **given)
        model = trainer.model
        recorded = trainer.record["options"]
        assert trainer.args.fp16 == recorded["fp16"] == holds
        because = f"hidden states .* (reach )?{reach}, .* ends at 65,504"
        assert re.search(because, trainer.facts["precision_because"])
        products = {m.compute_dtype for m in model.modules() if type(m).__name__ == "Linear4bit"}
        assert products == ({torch.float16 if holds else torch.float32} if settings else set())
        if not holds:
            assert trainer.accelerator.mixed_precision == "no" and recorded["dtype"] == "float32"
            assert recorded["attn_implementation"] == "eager"
            assert {p.dtype for p in model.parameters()} <= {torch.float32, torch.uint8}
        trainer.train()


def test_a_dry_run_computes_nothing_to_choose_float16(tmp_path, half, monkeypatch):
    tried = Precision(bf16=False, fp16=True, is_tried=True)
    monkeypatch.setattr(run_settings, "choose_precision", lambda given, use_cpu: tried)
    args = training.arguments(tmp_path, **FROZEN, bf16=None, dry_run=True)
    trainer = NormAlignTrainer(large(tmp_path / "large", half, 1e6), args, None, training.rows(2))
    assert trainer.args.fp16 and not trainer.precision.because


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
    options = dict(num_train_epochs=1.5, global_batch_size=4, dataloader_drop_last=True)
    trainer = training.trainer(tmp_path, checkpoint, rows, max_steps=-1, **options)
    trainer.train()
    assert trainer.facts["steps"] == trainer.state.max_steps == trainer.state.global_step == 5
