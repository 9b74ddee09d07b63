import copy
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
from transformers import AutoConfig, BitsAndBytesConfig, FalconConfig, GPT2Config, MixtralConfig
from trl import SFTTrainer

from normalign_llava import NormAlignLlavaForConditionalGeneration, NormAlignTrainer
from normalign_llava.assembly.merge import merge_adapter
from normalign_llava.checkpoint.opening import open_checkpoint
from normalign_llava.hub_cards.card.metadata import is_ours
from normalign_llava.train.modules.load import largest_hidden_state, load_model
from normalign_llava.train.modules.model import base_model, eval_frozen, module_of


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    return training.checkpoint(tmp_path_factory.mktemp("untied"), tied=False)


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


def test_each_module_has_its_learning_rate_and_no_norm_decays(tmp_path, checkpoint):
    rates = dict(vision_learning_rate=2e-6, projector_learning_rate=3e-4, norm_learning_rate=5e-5)
    trainer = training.trainer(tmp_path, checkpoint, weight_decay=0.1, learning_rate=1e-5, **rates)
    optimizer = trainer.create_optimizer()
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    expected = {"vision": 2e-6, "projector": 3e-4, "norm": 5e-5, "language": 1e-5}
    seen = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names[id(parameter)]
            seen.append(name)
            assert group["lr"] == expected[module_of(name)], name
            free = name.endswith("bias") or "norm" in name
            assert group["weight_decay"] == (0.0 if free else 0.1), name
    assert sorted(seen) == sorted(names.values())


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


@pytest.mark.parametrize("frozen", ["vision", "language"])
def test_a_frozen_module_has_no_dropout_and_a_trained_one_has(tmp_path, checkpoint, frozen):
    model = training.trainer(tmp_path, checkpoint).model
    for layer in model.model.vision_tower.modules():
        if type(layer).__name__ == "CLIPAttention":
            layer.dropout = 0.5
    for layer in model.model.language_model.layers:
        layer.self_attn.attention_dropout = 0.5
    rates = {"vision_learning_rate": 1e-3, "language_learning_rate": 1e-3, f"{frozen}_learning_rate": 0.0}
    trainer = training.trainer(tmp_path, checkpoint, model=model, gradient_checkpointing=True, **rates)
    trainer.model.train()
    eval_frozen(model)
    inputs = batch(trainer)
    tower = [model.get_image_features(inputs["pixel_values"]).pooler_output[0] for _ in range(2)]
    text = [model.model.language_model(inputs_embeds=torch.ones(1, 9, 32)).last_hidden_state for _ in range(2)]
    assert torch.equal(*tower) == (frozen == "vision")
    assert torch.equal(*text) == (frozen == "language")


def test_a_frozen_decoder_whose_layers_call_dropout_is_checkpointed_without_it():
    """They call `dropout(..., training=self.training)` in the layer that is in training mode for its checkpoint."""
    dropout = {name: 0.5 for name in FalconConfig().to_dict() if "drop" in name}
    sizes = dict(hidden_size=tiny.WIDTH, num_hidden_layers=2, num_attention_heads=2)
    model = tiny.model(text=FalconConfig(vocab_size=tiny.VOCABULARY, **sizes, **dropout), tied=False)
    decoder = model.model.language_model.requires_grad_(False)
    runs, embeddings = [], torch.randn(1, 9, tiny.WIDTH, requires_grad=True)
    projections = [module for module in decoder.modules() if isinstance(module, torch.nn.Linear)]
    projections[0].register_forward_hook(lambda *args: runs.append(1))

    def run():
        runs.clear()
        output = decoder(inputs_embeds=embeddings, use_cache=False).last_hidden_state
        (gradient,) = torch.autograd.grad(output.square().sum(), embeddings)
        return output, gradient, len(runs)

    *expected, once = run()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for _ in range(2):  # in every step
        model.train()
        eval_frozen(model)
        *found, twice = run()
        assert twice == 2 * once
        for got, wanted in zip(found, expected, strict=True):
            assert torch.equal(got, wanted)
    decoder.requires_grad_(True)
    model.train()
    eval_frozen(model)
    assert not torch.equal(run()[0], run()[0])


def test_under_adapters_and_gradient_checkpointing_a_frozen_tower_carries_no_gradient(tmp_path, checkpoint):
    options = dict(load_in_4bit=True, dtype="float32")
    trainer = training.trainer(tmp_path, checkpoint, use_peft=True, gradient_checkpointing=True, **options)
    wanted = []
    model = base_model(trainer.model)
    model.model.vision_tower.register_forward_hook(
        lambda m, a, out: wanted.append(out.last_hidden_state.requires_grad)
    )
    model.get_input_embeddings().register_forward_hook(lambda m, a, out: wanted.append(out.requires_grad))
    trainer.train()
    assert wanted == [True, False] * (len(wanted) // 2)
    trained = [name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad]
    assert {module_of(name) for name in trained} == {"projector", "norm", "language"}
    assert all("lora_" in name for name in trained if module_of(name) == "language")


def test_the_card_is_ours_and_one_by_hand_stays(tmp_path, checkpoint, caplog):
    trainer = training.trainer(tmp_path, checkpoint, save_strategy="steps", save_steps=1, max_steps=1)
    trainer.train()
    card = tmp_path / "README.md"
    assert not list(tmp_path.rglob("README.md"))  # nor TRL's, which it writes at each save
    trainer.save_model()
    assert is_ours(card.read_text())
    card.write_text("another card")
    trainer.save_model()
    assert card.read_text() == "another card" and "was not written by this package" in caplog.text


@pytest.mark.parametrize("bits, bf16", [(4, True), (8, True), (16, True), (16, False)])
def test_what_is_trained_with_adapters_is_float32_and_moves_and_is_merged(tmp_path, untied, bits, bf16):
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
    for parameter, state in trainer.optimizer.state.items():
        assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == parameter.dtype
    trainer.model.eval()
    trainer.model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2)
    trainer.save_model()
    written = weights_of(tmp_path)
    assert {value.dtype for value in written.values()} == {torch.float32}
    merge_adapter(tmp_path, tmp_path / "merged")
    merged = weights_of(tmp_path / "merged")
    for part in ("multi_modal_projector", "vision_tower"):
        for name, value in model.get_submodule(part).modules_to_save["default"].named_parameters():
            assert torch.equal(merged[f"model.{part}.{name}"], value), name


FROZEN = dict(vision_learning_rate=0.0, language_learning_rate=0.0)
HALF, FULL = ["bfloat16"], ["float32"]


@pytest.mark.parametrize(
    ("options", "vision", "projector", "language"),
    [
        (FROZEN, HALF, FULL, HALF),
        (dict(learning_rate=0.0, norm_learning_rate=1e-3), HALF, HALF, HALF),
        (dict(language_learning_rate=0.0), FULL, FULL, HALF),
        (dict(projector_learning_rate=0.0, norm_learning_rate=0.0), FULL, HALF, FULL),
        (dict(use_peft=True), HALF, FULL, HALF),
        (dict(dtype="bfloat16"), FULL, FULL, FULL),
        (dict(**FROZEN, dtype="float32"), FULL, FULL, FULL),
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
    stored = tmp_path / "float16"
    shutil.copytree(half, stored)
    NormAlignLlavaForConditionalGeneration.from_pretrained(half, dtype="float16").save_pretrained(stored)
    trainer = training.trainer(tmp_path / "out", stored, bf16=True, **FROZEN, dry_run=True)
    assert {dtype for row in trainer.facts["modules"] for dtype in row["dtypes"]} == {"float32"}
    with pytest.raises(ValueError, match="dtype float16 and steps in bfloat16 .* Use --dtype bfloat16, or float32"):
        training.trainer(tmp_path / "out", stored, bf16=True, dtype="float16", **FROZEN)


def test_a_checkpoint_of_two_precisions_is_written_and_read_as_it_is(tmp_path, half):
    trainer = training.trainer(tmp_path / "aligned", half, bf16=True, **FROZEN)
    trainer.train()
    trainer.save_model()
    built, aligned = weights_of(half), weights_of(tmp_path / "aligned")
    trained = {name: tensor for name, tensor in aligned.items() if "projector" in name}
    assert {tensor.dtype for tensor in trained.values()} == {torch.float32}
    assert not any(torch.equal(tensor, tensor.bfloat16().float()) for tensor in trained.values())
    training.assert_equal(aligned, {**built, **trained})
    config = AutoConfig.from_pretrained(tmp_path / "aligned")
    assert {each.dtype for each in (config, config.text_config, config.vision_config)} == {torch.bfloat16}
    loaded = NormAlignLlavaForConditionalGeneration.from_pretrained(tmp_path / "aligned")
    assert {p.dtype for name, p in loaded.named_parameters() if ".norm." not in name} == {torch.bfloat16}
    tuned = training.trainer(tmp_path / "tuned", tmp_path / "aligned", bf16=True, vision_learning_rate=0.0)
    for name, value in base_model(tuned.model).model.multi_modal_projector.named_parameters():
        assert torch.equal(value, aligned[f"model.multi_modal_projector.{name}"])
    tuned.save_model()
    assert AutoConfig.from_pretrained(tmp_path / "tuned").dtype == torch.float32
    written = weights_of(tmp_path / "tuned")
    assert {written[name].dtype for name in written if "vision_tower" in name} == {torch.bfloat16}
    assert {written[name].dtype for name in written if "vision_tower" not in name} == {torch.float32}


@pytest.fixture(scope="module")
def large(half, tmp_path_factory):
    """A function that gives the checkpoint with hidden states of about this size."""

    def scaled(size: float) -> Path:
        folder = tmp_path_factory.mktemp("large") / "model"
        shutil.copytree(half, folder)
        model = NormAlignLlavaForConditionalGeneration.from_pretrained(half)
        with torch.no_grad():
            for part in ("up_proj", "down_proj"):  # one alone would itself be beyond float16
                model.model.language_model.layers[0].mlp.get_submodule(part).weight *= (size / 0.002) ** 0.5
        model.save_pretrained(folder)
        return folder

    return scaled


def test_the_largest_hidden_state_is_that_of_the_model_in_float64(large, tmp_path):
    trainer = training.trainer(tmp_path, large(100.0), **FROZEN)
    inputs = batch(trainer)
    found = largest_hidden_state(trainer.model, inputs)
    exact = {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}
    states = trainer.model.double()(**exact, output_hidden_states=True).hidden_states
    assert found == pytest.approx(max(each.abs().max().item() for each in states), rel=0.01) and found > 10
    assert largest_hidden_state(training.trainer(tmp_path, large(1e6), **FROZEN).model, inputs) == math.inf


@pytest.mark.parametrize("quantization", [None, BitsAndBytesConfig(load_in_4bit=True)], ids=["16", "4"])
def test_without_bfloat16_float16_is_taken_only_if_hidden_states_stay_well_below_its_end(
    tmp_path, large, quantization
):
    for size, holds, reach in (
        (1000.0, True, r"\d?,?\d{3}"),
        (15_000.0, False, r"\d\d,\d{3}"),
        (1e6, False, "overflow"),
    ):
        args = training.arguments(tmp_path, **FROZEN, fp16=True, bf16=None)
        args.fp16_is_tried = True  # as on a GPU without bfloat16
        trainer = NormAlignTrainer(
            str(large(size)), args, train_dataset=training.rows(), quantization_config=quantization
        )
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
