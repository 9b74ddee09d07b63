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
from normalign_llava.train.modules.sharding import fill_missing_gradients
from normalign_llava.train.settings import Precision


pytestmark = pytest.mark.slow
FROZEN = {"vision_learning_rate": 0.0, "language_learning_rate": 0.0}
NF4 = BitsAndBytesConfig(load_in_4bit=True)
HALF = ["bfloat16"]
FULL = ["float32"]
PROJECTOR_WEIGHT = "model.multi_modal_projector.linear_1.weight"


def first_batch(trainer, count=2):
    samples = [trainer.train_dataset[number] for number in range(count)]
    return trainer.data_collator(samples)


def trained_parameters(model) -> dict[str, torch.nn.Parameter]:
    trained = {}
    for parameter_name, parameter in model.named_parameters():
        if parameter.requires_grad:
            trained[parameter_name] = parameter
    return trained


def dtypes_of(tensors) -> set[torch.dtype]:
    return {tensor.dtype for tensor in tensors.values()}


@pytest.mark.parametrize("module", ["vision", "projector", "norm", "language"])
def test_only_the_module_with_a_learning_rate_changes(tmp_path, checkpoint, module):
    learning_rates = {
        "vision_learning_rate": 0.0,
        "projector_learning_rate": 0.0,
        "norm_learning_rate": 0.0,
        "language_learning_rate": 0.0,
    }
    learning_rates[f"{module}_learning_rate"] = 1e-2
    trainer = training.trainer(tmp_path, checkpoint, **learning_rates)
    before = weights(trainer.model)
    trainer.train()
    moved_names = moved(before, trainer.model)
    assert {module_of(name) for name in moved_names} == {module}
    for parameter_name, parameter in trainer.model.named_parameters():
        is_of_module = module_of(parameter_name) == module
        assert parameter.requires_grad == is_of_module, parameter_name
    still = set()
    for parameter_name, weight in before.items():
        # CLIP's last layer and its last norm come after the layer that is read.
        is_read = not re.search(r"encoder\.layers\.2\.|post_layernorm", parameter_name)
        if module_of(parameter_name) == module and weight.ndim > 1 and is_read:
            still.add(parameter_name)
    still -= moved_names
    assert still <= {"model.vision_tower.embeddings.position_embedding.weight"}


@pytest.mark.parametrize(
    "learning_rate, optimizer, momentum",
    [
        pytest.param(1e-5, None, None, id="AdamW"),
        pytest.param(
            3e-3,
            (torch.optim.SGD, {"lr": 1e-5, "momentum": 0.5}),
            0.5,
            id="SGD",
        ),
    ],
)
def test_each_module_has_its_learning_rate_and_no_norm_decays(
    tmp_path, checkpoint, learning_rate, optimizer, momentum
):
    train_options = training.arguments(
        tmp_path,
        weight_decay=0.1,
        learning_rate=learning_rate,
        vision_learning_rate=2e-6,
        projector_learning_rate=3e-4,
        norm_learning_rate=5e-5,
    )
    trainer = NormAlignTrainer(
        str(checkpoint),
        train_options,
        train_dataset=training.rows(2),
        optimizer_cls_and_kwargs=optimizer,
    )
    parameter_names = {
        parameter: parameter_name for parameter_name, parameter in trainer.model.named_parameters()
    }
    expected_rates = {
        "vision": 2e-6,
        "projector": 3e-4,
        "norm": 5e-5,
        "language": 1e-5,
    }
    names_in_groups = []
    for group in trainer.create_optimizer().param_groups:
        assert group.get("momentum") == momentum
        for parameter in group["params"]:
            parameter_name = parameter_names[parameter]
            assert group["lr"] == expected_rates[module_of(parameter_name)], parameter_name
            is_kept = parameter_name.endswith("bias") or "norm" in parameter_name
            expected_decay = 0.0 if is_kept else 0.1
            assert group["weight_decay"] == expected_decay, parameter_name
            names_in_groups.append(parameter_name)
    assert sorted(names_in_groups) == sorted(parameter_names.values())


def optimizer_hooks(trainer):
    return list(trainer.create_optimizer()._optimizer_step_pre_hooks.values())


def test_under_fsdp_gradients_that_are_missing_are_filled(tmp_path, checkpoint):
    trainer = training.trainer(tmp_path, checkpoint)
    assert optimizer_hooks(trainer) == []
    trainer.optimizer = None
    trainer.is_fsdp_enabled = True
    assert optimizer_hooks(trainer) == [fill_missing_gradients]


def gradients(model) -> dict[str, torch.Tensor]:
    found = {}
    for parameter_name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[parameter_name] = parameter.grad
    return found


def batch_loss(trainer) -> torch.Tensor:
    """The loss of the first batch."""
    inputs = first_batch(trainer)
    return trainer.compute_loss(trainer.model, dict(inputs), num_items_in_batch=None)


def trainer_of_trl(trainer: NormAlignTrainer) -> SFTTrainer:
    """TRL's trainer with a copy of a trainer's model, and its data."""
    return SFTTrainer(
        copy.deepcopy(base_model(trainer.model)),
        copy.deepcopy(trainer.args),
        trainer.data_collator,
        trainer.train_dataset,
        None,
        trainer.processing_class,
    )


def test_the_loss_and_every_gradient_equal_trl_s(tmp_path, checkpoint):
    trainer = training.trainer(tmp_path, checkpoint, max_steps=1)
    reference = trainer_of_trl(trainer)
    inputs = first_batch(trainer)
    losses = []
    for compared in (trainer, reference):
        compared.model.zero_grad()
        loss = compared.compute_loss(compared.model, dict(inputs), num_items_in_batch=None)
        loss.backward()
        losses.append(loss.detach())
    loss, expected_loss = losses
    torch.testing.assert_close(loss, expected_loss, rtol=1e-6, atol=0)
    expected_gradients = gradients(reference.model)
    torch.testing.assert_close(
        gradients(trainer.model),
        expected_gradients,
        rtol=1e-4,
        atol=1e-7,
    )

    sizes = []

    def record_size(module, inputs, output):
        sizes.append(output.last_hidden_state.shape[:2])

    trainer.model.model.register_forward_hook(record_size)
    batch_loss(trainer)
    # On a GPU TRL's head sees all positions.
    base_model(trainer.model).only_answers = False
    loss_of_all_positions = batch_loss(trainer).detach()
    torch.testing.assert_close(loss_of_all_positions, expected_loss, rtol=1e-6, atol=0)
    labels = inputs["labels"]
    answer_positions = labels[:, 1:] != -100
    assert sizes == [(1, int(answer_positions.sum())), labels.shape]


def test_without_images_the_loss_is_the_decoders_and_the_tower_learns_nothing(tmp_path, checkpoint):
    text_rows = training.rows(images=lambda number: 0)
    trainer = training.trainer(tmp_path, checkpoint, dataset=text_rows)
    model = trainer.model
    inputs = first_batch(trainer)
    assert "pixel_values" not in inputs
    reference = copy.deepcopy(base_model(model))
    hidden_states = reference.model.language_model(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
    )[0]
    logits = reference.lm_head(hidden_states)[:, :-1]
    labels = inputs["labels"][:, 1:]
    learned = labels != -100
    expected = torch.nn.functional.cross_entropy(logits[learned], labels[learned])
    loss = trainer.compute_loss(model, dict(inputs))
    loss.backward()
    torch.testing.assert_close(loss, expected)
    for parameter_name, parameter in model.named_parameters():
        if module_of(parameter_name) in ("projector", "norm"):
            assert parameter.grad is not None, parameter_name
            assert not parameter.grad.any(), parameter_name
    vision_embeddings = model.model.vision_tower.get_input_embeddings()
    assert vision_embeddings.weight.grad is not None


def falcon_with_dropout():
    """A model with a decoder that drops half of whatever it may drop."""
    dropouts = {name: 0.5 for name in FalconConfig().to_dict() if "drop" in name}
    text_config = FalconConfig(
        vocab_size=tiny.VOCABULARY,
        hidden_size=tiny.WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        **dropouts,
    )
    return tiny.model(text=text_config, tied=False)


def test_a_frozen_decoder_whose_layers_call_dropout_is_checkpointed_without_it():
    """They call `dropout(..., training=self.training)` in a layer that is in training mode."""
    model = falcon_with_dropout()
    decoder = model.model.language_model.requires_grad_(False)
    linear_layers = [module for module in decoder.modules() if isinstance(module, torch.nn.Linear)]
    calls = []
    linear_layers[0].register_forward_hook(lambda *arguments: calls.append(1))
    embeddings = torch.randn(1, 9, tiny.WIDTH, requires_grad=True)

    def run():
        calls.clear()
        output = decoder(inputs_embeds=embeddings, use_cache=False).last_hidden_state
        (gradient,) = torch.autograd.grad(output.square().sum(), embeddings)
        return output, gradient

    expected_output, expected_gradient = run()
    calls_without_checkpointing = len(calls)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for is_trained in (False, False, True):  # in every step
        decoder.requires_grad_(is_trained)
        model.train()
        eval_frozen(model)
        output, gradient = run()
        assert len(calls) == 2 * calls_without_checkpointing
        is_same_output = torch.equal(output, expected_output)
        is_same_gradient = torch.equal(gradient, expected_gradient)
        assert (is_same_output and is_same_gradient) != is_trained


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    """A checkpoint whose head has weights of its own. Nothing writes to it."""
    return training.checkpoint(tmp_path_factory.mktemp("untied"), tied=False)


def train_with_adapters(tmp_path, untied, quantization, bf16):
    """A trainer of adapters, and of embeddings and the head, that has not yet trained."""
    return training.trainer(
        tmp_path,
        untied,
        dtype="bfloat16",
        use_peft=True,
        lora_modules_to_save=["embed_tokens", "lm_head"],
        bf16=bf16,
        learning_rate=2e-6,
        vision_learning_rate=2e-6,
        lr_scheduler_type="constant",
        **quantization,
    )


def assert_copies_are_as_stored(trainer, checkpoint):
    """The copies of modules that are trained beside adapters have the stored weights."""
    model = base_model(trainer.model).model
    stored_model = load_model(
        open_checkpoint(checkpoint),
        trainer.args,
        trainer.learning_rates,
    ).model
    for module_name in ("multi_modal_projector", "vision_tower"):
        module = model.get_submodule(module_name)
        copied_weights = module.modules_to_save["default"].state_dict()
        stored_weights = stored_model.get_submodule(module_name).state_dict()
        for weight_name, stored_weight in stored_weights.items():
            assert torch.equal(copied_weights[weight_name], stored_weight), weight_name


def assert_weights_have_moved(before, trained, moved_names):
    """In each module most weights are changed, of the embeddings any: few of them are read."""
    least_shares = {
        "lora_B": 0.5,
        "embed_tokens.modules_to_save.default": 0,
        "projector.modules_to_save.default.linear_1": 0.5,
        "projector.modules_to_save.default.norm": 0.5,
        "vision_tower.modules_to_save.default.encoder": 0.5,
        "lm_head.modules_to_save.default": 0.5,
    }
    for module_name, least_share in least_shares.items():
        shares = []
        for parameter_name in moved_names:
            if module_name in parameter_name:
                changed = trained[parameter_name] != before[parameter_name]
                shares.append(changed.float().mean())
        assert min(shares) > least_share, module_name


@pytest.mark.parametrize(
    "quantization, bf16",
    [
        pytest.param({"load_in_4bit": True}, True, id="4 bits"),
        pytest.param({"load_in_8bit": True}, True, id="8 bits"),
        pytest.param({}, False, id="16 bits"),
    ],
)
def test_what_is_trained_with_adapters_is_float32_and_moves(tmp_path, untied, quantization, bf16):
    trainer = train_with_adapters(tmp_path, untied, quantization, bf16)
    before = weights(trainer.model)
    trained = trained_parameters(trainer.model)
    assert dtypes_of(trained) == {torch.float32}
    assert_copies_are_as_stored(trainer, untied)
    trainer.train()
    moved_names = moved(before, trainer.model)
    assert moved_names <= trained.keys()
    assert_weights_have_moved(before, trained, moved_names)
    trainer.save_model()
    assert dtypes_of(weights_of(tmp_path)) == {torch.float32}


@pytest.mark.parametrize(
    "options, vision, projector, language",
    [
        pytest.param(FROZEN, HALF, FULL, HALF, id="frozen"),
        pytest.param(
            {"learning_rate": 0.0, "norm_learning_rate": 1e-3},
            HALF,
            HALF,
            HALF,
            id="all but the norm frozen",
        ),
        pytest.param(
            {"projector_learning_rate": 0.0, "norm_learning_rate": 0.0},
            FULL,
            HALF,
            FULL,
            id="frozen projector",
        ),
        pytest.param({"use_peft": True}, HALF, FULL, HALF, id="adapters"),
        pytest.param({"dtype": "bfloat16"}, FULL, FULL, FULL, id="bfloat16"),
        pytest.param({**FROZEN, "bf16": False}, FULL, FULL, FULL, id="frozen, float32"),
        pytest.param(
            {**FROZEN, "bf16": False, "dtype": "bfloat16"},
            HALF,
            FULL,
            HALF,
            id="frozen in bfloat16",
        ),
        pytest.param(
            {"language_learning_rate": 0.0, "bf16": False, "dtype": "float16"},
            FULL,
            FULL,
            ["float16"],
            id="frozen language model in float16",
        ),
    ],
)
def test_what_is_trained_is_float32(tmp_path, half, options, vision, projector, language):
    expected_dtypes = {
        "norm": FULL,
        "vision tower": vision,
        "projector": projector,
        "language model": language,
    }
    if "use_peft" in options:
        expected_dtypes["adapters"] = FULL
    options = {"bf16": True, **options}
    for dry_run in (True, False):
        trainer = training.trainer(tmp_path, half, **options, dry_run=dry_run)
        dtypes = {entry["module"]: entry["dtypes"] for entry in trainer.facts["modules"]}
        assert dtypes == expected_dtypes
    before = weights(trainer.model)
    trainer.train()
    trained = trained_parameters(trainer.model)
    assert moved(before, trainer.model) <= trained.keys()
    moments = {state["exp_avg"].dtype for state in trainer.optimizer.state.values()}
    assert moments == {torch.float32}


def test_two_half_precisions_are_not_mixed(tmp_path, half):
    with pytest.raises(ValueError, match="dtype float16 and .* bfloat16 .* Use --dtype bfloat16"):
        training.trainer(tmp_path / "out", half, bf16=True, dtype="float16", **FROZEN)


def is_rounded_to_bfloat16(tensor) -> bool:
    return torch.equal(tensor, tensor.bfloat16().float())


@pytest.mark.parametrize(
    "quantization, layer_class",
    [
        pytest.param({"load_in_4bit": True}, "Linear4bit", id="4 bits"),
        pytest.param({"load_in_8bit": True}, "Linear8bitLt", id="8 bits"),
        pytest.param({}, "Linear", id="16 bits"),
    ],
)
def test_a_projector_is_trained_beside_a_model_that_is_written_as_it_was(
    tmp_path, half, quantization, layer_class
):
    options = {"bf16": True, **quantization}
    trainer = training.trainer(
        tmp_path,
        half,
        save_strategy="steps",
        save_steps=2,
        **FROZEN,
        **options,
    )
    language_model = trainer.model.model.language_model
    layer_classes = {type(module).__name__ for module in language_model.modules()}
    assert layer_class in layer_classes
    built = weights_of(half)
    before = weights(trainer.model)
    projector_names = {name for name in built if "projector" in name}
    for parameter_name in projector_names:  # not rounded
        assert torch.equal(before[parameter_name], built[parameter_name])
    trainer.train()
    assert moved(before, trainer.model) == projector_names
    trained = {name: trainer.model.get_parameter(name).detach() for name in projector_names}
    for tensor in trained.values():
        assert not is_rounded_to_bfloat16(tensor)
    trainer.save_model()
    for folder in (tmp_path, tmp_path / "checkpoint-2"):
        training.assert_equal(weights_of(folder), {**built, **trained})
        config = json.loads((folder / "config.json").read_text())
        assert config["dtype"] == "bfloat16"
        assert "quantization_config" not in config

    tuned_folder = tmp_path / "tuned"
    tuning = training.trainer(tuned_folder, tmp_path, **options, use_peft=bool(quantization))
    tuning.train()
    tuning.save_model()
    tuned = {}
    for parameter_name, tensor in weights_of(tuned_folder).items():
        if "vision_tower" not in parameter_name:
            tuned[parameter_name] = tensor
    assert dtypes_of(tuned) == {torch.float32}


class TakesWeightsAway(TrainerCallback):
    """Moves the base's weights away after the first save."""

    def __init__(self, base):
        self.base = base

    def on_save(self, args, state, control, **kwargs):
        if state.global_step == 1:
            for weight_file in self.base.glob("*.safetensors"):
                weight_file.rename(weight_file.with_suffix(".away"))


def test_a_quantized_base_is_read_only_for_the_first_save(tmp_path, half):
    base = shutil.copytree(half, tmp_path / "base")
    output = tmp_path / "out"
    built = weights_of(base)
    trainer = training.trainer(
        output,
        base,
        save_strategy="steps",
        save_steps=1,
        max_steps=3,
        load_in_4bit=True,
        bf16=True,
        **FROZEN,
    )
    trainer.add_callback(TakesWeightsAway(base))
    trainer.train()
    projector_weights = []
    for step in (1, 2, 3):
        saved = weights_of(output / f"checkpoint-{step}")
        assert saved.keys() == built.keys()
        for parameter_name, tensor in saved.items():
            if "projector" not in parameter_name:
                training.assert_equal(tensor, built[parameter_name])
        projector_weights.append(saved[PROJECTOR_WEIGHT])
    assert not torch.equal(projector_weights[0], projector_weights[1])
    assert not torch.equal(projector_weights[1], projector_weights[2])
    last_weight = trainer.model.get_parameter(PROJECTOR_WEIGHT).detach()
    assert torch.equal(projector_weights[2], last_weight)

    # Where no earlier file is left, the base is read again.
    for step in (1, 2, 3):
        shutil.rmtree(output / f"checkpoint-{step}")
    for weight_file in base.glob("*.away"):
        weight_file.rename(weight_file.with_suffix(".safetensors"))
    trainer.save_model()
    training.assert_equal(weights_of(output), saved)


@pytest.mark.parametrize("arm", ["aligned", "gwc"])
def test_an_untrained_unit_norm_gets_the_gain_of_the_arm(tmp_path, arm):
    checkpoint = training.checkpoint(tmp_path / "unit", arm="unit")
    trainer = training.trainer(tmp_path / "out", checkpoint, arm=arm)
    embeddings = weights_of(checkpoint)["model.language_model.embed_tokens.weight"].double()
    # The image token, and rows that pad the vocabulary, are added.
    image_token = trainer.model.config.image_token_id
    norms = embeddings[:image_token].norm(dim=1)
    norms = norms[norms > 0]  # the row of padding is zero
    expected = (norms.mean() / embeddings.shape[1] ** 0.5).item()
    gain = trainer.model.model.multi_modal_projector.norm.weight.detach()
    expected_gain = torch.full_like(gain, expected)
    torch.testing.assert_close(gain.double(), expected_gain.double())


def in_float64(inputs: dict) -> dict:
    converted = {}
    for name, tensor in inputs.items():
        converted[name] = tensor.double() if tensor.is_floating_point() else tensor
    return converted


def test_the_gradient_through_frozen_4_bit_layers_equals_full_ones(tmp_path, checkpoint):
    trainer = training.trainer(tmp_path, checkpoint, **FROZEN, load_in_4bit=True)
    reference = NormAlignLlavaForConditionalGeneration.from_pretrained(
        checkpoint,
        quantization_config=trainer.model.config.quantization_config,
    )
    reference = reference.dequantize().double().train()
    inputs = first_batch(trainer)
    reference(**in_float64(inputs)).loss.backward()
    trainer.model.train()
    trainer.compute_loss(trainer.model, dict(inputs)).backward()
    model = trainer.model.model
    assert model.multi_modal_projector.training
    assert not model.vision_tower.training
    assert not model.language_model.training
    for parameter_name, parameter in trainer.model.named_parameters():
        if "projector" in parameter_name:
            expected = reference.get_parameter(parameter_name).grad
            difference = parameter.grad - expected
            assert difference.norm() < 1e-3 * expected.norm(), parameter_name


@pytest.mark.parametrize(
    "quantization, message",
    [
        pytest.param(
            NF4,
            r"language_learning_rate 0\.001 would train quantized weights",
            id="trained",
        ),
        pytest.param(
            BitsAndBytesConfig(load_in_4bit=True, llm_int8_skip_modules=["lm_head"]),
            "llm_int8_skip_modules is set here",
            id="skipped modules",
        ),
    ],
)
def test_what_would_train_a_quantized_weight_is_refused_by_name(
    tmp_path, checkpoint, quantization, message
):
    with pytest.raises(ValueError, match=message):
        NormAlignTrainer(
            str(checkpoint),
            training.arguments(tmp_path / "out"),
            train_dataset=training.rows(2),
            quantization_config=quantization,
        )


def test_a_quantized_model_without_adapters_is_refused(tmp_path, checkpoint):
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(
        checkpoint,
        quantization_config=NF4,
    )
    train_options = training.arguments(tmp_path / "out")
    with pytest.raises(ValueError, match="To quantize without adapters, give a folder"):
        NormAlignTrainer(model, train_options, train_dataset=training.rows(2))


def write_large(folder: Path, half: Path, size: float) -> str:
    """The checkpoint with hidden states of about this size."""
    shutil.copytree(half, folder)
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(half)
    mlp = model.model.language_model.layers[0].mlp
    # One of them with the whole factor would itself be beyond float16.
    with torch.no_grad():
        for layer in (mlp.up_proj, mlp.down_proj):
            layer.weight *= (size / 0.002) ** 0.5
    model.save_pretrained(folder)
    return str(folder)


def test_the_largest_hidden_state_is_as_in_float64(half, tmp_path):
    checkpoint = write_large(tmp_path / "large", half, 100.0)
    trainer = training.trainer(tmp_path, checkpoint, **FROZEN)
    inputs = first_batch(trainer)
    largest = largest_hidden_state(trainer.model, inputs)
    exact_model = trainer.model.double()
    outputs = exact_model(**in_float64(inputs), output_hidden_states=True)
    expected = max(state.abs().max().item() for state in outputs.hidden_states)
    assert largest == pytest.approx(expected, rel=0.01)
    assert largest > 10


def test_a_hidden_state_beyond_float16_is_infinite(half, tmp_path):
    checkpoint = write_large(tmp_path / "large", half, 1e6)
    trainer = training.trainer(tmp_path, checkpoint, **FROZEN)
    inputs = first_batch(trainer)
    assert largest_hidden_state(trainer.model, inputs) == math.inf


@pytest.fixture
def float16_is_tried(monkeypatch):
    """As on a GPU without bfloat16."""
    precision = Precision(bf16=False, fp16=True, fp16_needs_check=True)
    monkeypatch.setattr(run_settings, "choose_precision", lambda given, use_cpu: precision)


def large_trainer(tmp_path, half, quantization, size):
    """A trainer on a checkpoint with hidden states of about a size."""
    train_options = training.arguments(
        tmp_path,
        bf16=None,
        model_init_kwargs={"attn_implementation": "eager"},
        **FROZEN,
    )
    return NormAlignTrainer(
        write_large(tmp_path / "large", half, size),
        train_options,
        train_dataset=training.rows(),
        quantization_config=quantization,
    )


def assert_reason(trainer, reach):
    reason = rf"hidden states .* (reach )?{reach}, .* ends at 65,504"
    assert re.search(reason, trainer.facts["precision_because"])


def compute_dtypes(model) -> set[torch.dtype]:
    """The dtypes in which 4-bit layers compute."""
    dtypes = set()
    for module in model.modules():
        if type(module).__name__ == "Linear4bit":
            dtypes.add(module.compute_dtype)
    return dtypes


quantized_or_not = pytest.mark.parametrize("quantization", [None, NF4], ids=["16", "4"])


@pytest.mark.usefixtures("float16_is_tried")
@quantized_or_not
def test_float16_is_taken_if_hidden_states_stay_well_below_its_end(tmp_path, half, quantization):
    trainer = large_trainer(tmp_path, half, quantization, size=1e3)
    assert trainer.args.fp16 is True
    assert trainer.record["options"]["fp16"] is True
    assert_reason(trainer, r"\d?,?\d{3}")
    expected_dtypes = {torch.float16} if quantization else set()
    assert compute_dtypes(trainer.model) == expected_dtypes
    trainer.train()


@pytest.mark.usefixtures("float16_is_tried")
@quantized_or_not
@pytest.mark.parametrize(
    "size, reach",
    [
        pytest.param(15e3, r"\d\d,\d{3}", id="near its end"),
        pytest.param(1e6, "overflow", id="beyond its end"),
    ],
)
def test_float16_is_not_taken_if_hidden_states_come_near_its_end(
    tmp_path, half, quantization, size, reach
):
    trainer = large_trainer(tmp_path, half, quantization, size)
    recorded_options = trainer.record["options"]
    assert trainer.args.fp16 is False
    assert recorded_options["fp16"] is False
    assert_reason(trainer, reach)
    expected_dtypes = {torch.float32} if quantization else set()
    assert compute_dtypes(trainer.model) == expected_dtypes
    assert trainer.accelerator.mixed_precision == "no"
    assert recorded_options["dtype"] == "float32"
    assert recorded_options["attn_implementation"] == "eager"
    parameter_dtypes = {parameter.dtype for parameter in trainer.model.parameters()}
    assert parameter_dtypes <= {torch.float32, torch.uint8}
    trainer.train()


@pytest.mark.usefixtures("float16_is_tried")
def test_a_dry_run_computes_nothing_to_choose_float16(tmp_path, half):
    train_options = training.arguments(tmp_path, **FROZEN, bf16=None, dry_run=True)
    checkpoint = write_large(tmp_path / "large", half, 1e6)
    trainer = NormAlignTrainer(checkpoint, train_options, train_dataset=training.rows(2))
    assert trainer.args.fp16
    assert not trainer.precision.because


def test_a_language_model_of_experts_trains(tmp_path):
    checkpoint = training.checkpoint(
        tmp_path / "experts",
        cls=MixtralConfig,
        num_local_experts=2,
        num_experts_per_tok=1,
    )
    trainer = training.trainer(tmp_path / "out", checkpoint, max_steps=1)
    before = training.weights(trainer.model)
    trainer.train()
    assert training.moved(before, trainer.model)


def test_a_language_model_of_convolutions_as_linear_layers_trains(tmp_path):
    checkpoint = training.checkpoint(tmp_path / "gpt2", cls=GPT2Config)
    trainer = training.trainer(tmp_path / "out", checkpoint, use_peft=True, max_steps=1)
    trainer.train()
    parameter_names = [parameter_name for parameter_name, _ in trainer.model.named_parameters()]
    assert any("c_attn.lora_A" in parameter_name for parameter_name in parameter_names)


def test_a_run_takes_the_steps_that_are_announced(checkpoint, tmp_path):
    trainer = training.trainer(
        tmp_path,
        checkpoint,
        training.rows(13),
        max_steps=-1,
        num_train_epochs=1.5,
        global_batch_size=4,
        dataloader_drop_last=True,
    )
    trainer.train()
    assert trainer.facts["steps"] == 5
    assert trainer.state.max_steps == 5
    assert trainer.state.global_step == 5
