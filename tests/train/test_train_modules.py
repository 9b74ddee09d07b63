# SPDX-License-Identifier: Apache-2.0
"""The parts of a model to train, by themselves: freezing, precision, modes, bytes, arms, hooks."""

import math
import re
from types import SimpleNamespace

import bitsandbytes
import pytest
import tiny
import torch
import training
from accelerate import (
    Accelerator,
    DistributedType,
    FullyShardedDataParallelPlugin,
    PartialState,
)
from accelerate.state import AcceleratorState
from packaging import version
from peft import IA3Config, LoraConfig, LoraRuntimeConfig, get_peft_model
from torch import distributed as dist, nn
from torch.distributed import fsdp
from transformers import BitsAndBytesConfig

from normalign_llava import NormAlignLlavaConfig, NormAlignLlavaForConditionalGeneration
from normalign_llava.assembly.arms import arm_of
from normalign_llava.checkpoint.opening import open_checkpoint
from normalign_llava.train.modules.adapter import check_quantized, language_adapter
from normalign_llava.train.modules.forward import (
    _answers,
    eval_frozen,
    watching_outputs,
    wrap_forward,
)
from normalign_llava.train.modules.load import (
    check_architecture,
    config_of_arm,
    frozen_dtype,
    load_model,
    settle_float16,
)
from normalign_llava.train.modules.model import (
    base_model,
    freeze,
    frozen_modules,
    module_of,
    projector_norm,
    replaced,
    trained_parameters,
)
from normalign_llava.train.modules.precision import evaluating, train_in_float32
from normalign_llava.train.modules.sharding import (
    fill_missing_gradients,
    load_sharded,
    prepare_sharding,
)
from normalign_llava.train.modules.sizes import (
    memory_factors,
    optimizer_bytes,
    parameter_count,
    tensor_bytes,
)


RATES = {
    "vision": 1e-6,
    "projector": 1e-3,
    "norm": 1e-3,
    "language": 1e-5,
}
NO_RATES = dict.fromkeys(RATES, 0.0)
CPU = torch.device("cpu")


def with_adapters(model):
    lora_config = LoraConfig(
        r=2,
        target_modules=r".*language_model.*q_proj",
        modules_to_save=["multi_modal_projector"],
    )
    return get_peft_model(model, lora_config)


def place_of(parameter_name) -> str:
    """The module of a parameter, independently of `module_of`."""
    if "multi_modal_projector.norm" in parameter_name:
        return "norm"
    if "linear_" in parameter_name:
        return "projector"
    if "vision_tower" in parameter_name:
        return "vision"
    return "language"


@pytest.mark.parametrize(
    "frozen, unwritten",
    [
        pytest.param(["vision"], {"vision_tower"}, id="vision"),
        pytest.param(["projector"], set(), id="projector"),
        pytest.param(["norm"], set(), id="norm"),
        pytest.param(["language"], {"language_model"}, id="language"),
        pytest.param(["projector", "norm"], {"multi_modal_projector"}, id="projector norm"),
        pytest.param(
            ["vision", "language"],
            {"vision_tower", "language_model"},
            id="vision language",
        ),
        pytest.param([], set(), id="nothing"),
    ],
)
def test_what_has_no_learning_rate_is_frozen_and_its_file_is_not_written(frozen, unwritten):
    model = tiny.model(tied=False)
    learning_rates = {**RATES, **dict.fromkeys(frozen, 0.0)}
    freeze(model, learning_rates)
    expected_names = set()
    for parameter_name, parameter in model.named_parameters():
        is_trained = place_of(parameter_name) not in frozen
        assert parameter.requires_grad == is_trained, parameter_name
        if is_trained:
            expected_names.add(parameter_name)
    assert trained_parameters(model).keys() == expected_names
    assert frozen_modules(model) == unwritten
    freeze(model, RATES)  # what was frozen by hand is trained too
    assert all(parameter.requires_grad for parameter in model.parameters())


def trained_modules(model) -> set[str]:
    return {module_of(parameter_name) for parameter_name in trained_parameters(model)}


def test_beside_adapters_the_layers_below_stay_frozen():
    model = with_adapters(tiny.model())
    freeze(model, RATES)
    assert trained_modules(model) == {"projector", "norm", "language"}
    for parameter_name in trained_parameters(model):
        assert ".lora_" in parameter_name or "modules_to_save" in parameter_name
    freeze(model, {**RATES, "language": 0.0})
    assert trained_modules(model) == {"projector", "norm"}
    projector = base_model(model).model.multi_modal_projector
    assert projector_norm(model) is projector.norm


def test_a_module_that_is_saved_beside_adapters_is_a_copy_of_the_original():
    model = with_adapters(tiny.model())
    freeze(model, {**RATES, "language": 0.0})
    train_in_float32(model)
    projector = base_model(model).model.multi_modal_projector
    original_weight = projector.original_module.linear_1.weight
    expected = original_weight.clone()
    with torch.no_grad():
        projector.modules_to_save["default"].linear_1.weight += 1.0
    assert torch.equal(original_weight, expected)


def half_with_adapters():
    """A model in bfloat16 whose head and projector are trained in float32 beside adapters."""
    model = tiny.model(tied=False).to(torch.bfloat16)
    lora_config = LoraConfig(
        r=2,
        target_modules=r".*language_model.*q_proj",
        modules_to_save=["lm_head", "multi_modal_projector"],
    )
    model = get_peft_model(model, lora_config, autocast_adapter_dtype=False)
    freeze(model, RATES)
    train_in_float32(model)
    return model


def test_trained_modules_beside_others_in_bfloat16_are_in_float32():
    for parameter in half_with_adapters().parameters():
        expected = torch.float32 if parameter.requires_grad else torch.bfloat16
        assert parameter.dtype == expected


def record_dtypes(module) -> list[tuple[torch.dtype, torch.dtype]]:
    """What goes into a module and comes out, in each pass from now on."""
    dtypes = []

    def record(module, inputs, output):
        dtypes.append((inputs[0].dtype, output.dtype))

    module.register_forward_hook(record)
    return dtypes


@pytest.mark.parametrize("autocast", [False, True])
def test_trained_modules_beside_others_in_bfloat16_compute_in_float32(autocast):
    """Unless steps are autocast, what goes into them is cast, and what comes out of a saved one."""
    model = half_with_adapters()
    base = base_model(model)
    whole_head_dtypes = record_dtypes(base.lm_head)
    head_dtypes = record_dtypes(base.lm_head.modules_to_save["default"])
    projector_dtypes = record_dtypes(base.model.multi_modal_projector.linear_1)
    inputs = tiny.inputs()
    inputs["pixel_values"] = inputs["pixel_values"].to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        model(**inputs)
    _, whole_head_output = whole_head_dtypes[-1]
    head_input, head_output = head_dtypes[-1]
    projector_input, projector_output = projector_dtypes[-1]
    expected = torch.bfloat16 if autocast else torch.float32
    assert head_output == expected
    assert projector_output == expected
    assert whole_head_output == torch.bfloat16
    if not autocast:
        assert head_input == torch.float32
        assert projector_input == torch.float32


def test_a_norm_is_trained_after_a_frozen_projector_in_bfloat16():
    model = tiny.model(tied=False).to(torch.bfloat16)
    freeze(model, {**NO_RATES, "norm": 1e-3})
    train_in_float32(model)
    projector = model.model.multi_modal_projector
    assert projector.norm.weight.dtype == torch.float32
    assert projector.linear_1.weight.dtype == torch.bfloat16
    inputs = tiny.inputs()
    loss = model(**inputs, labels=inputs["input_ids"]).loss
    loss.backward()
    assert projector.norm.weight.grad.any()


def modes(model) -> dict[str, bool]:
    return {name: module.training for name, module in model.named_modules()}


def options_of_steps(bf16=False, fp16=False):
    return SimpleNamespace(device=CPU, bf16=bf16, fp16=fp16)


def evaluate_on(model) -> None:
    """An evaluation that takes a random number."""
    assert not any(module.training for module in model.modules())
    assert not torch.is_grad_enabled()
    torch.rand(3)


@pytest.mark.parametrize("fails", [False, True])
def test_after_an_evaluation_modes_and_random_numbers_are_what_they_were(fails):
    model = tiny.model().train()
    model.model.vision_tower.eval()
    expected_modes = modes(model)
    expected_random_state = torch.get_rng_state()
    if fails:
        with pytest.raises(KeyError), evaluating(model, options_of_steps()):
            evaluate_on(model)
            raise KeyError("what went wrong")
    else:
        with evaluating(model, options_of_steps()):
            evaluate_on(model)
    assert modes(model) == expected_modes
    assert torch.equal(torch.get_rng_state(), expected_random_state)
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    "precision, expected",
    [
        pytest.param({"bf16": True}, torch.bfloat16, id="bf16"),
        pytest.param({"fp16": True}, torch.float16, id="fp16"),
        pytest.param({}, torch.float32, id="float32"),
    ],
)
def test_an_evaluation_is_in_the_precision_of_training(precision, expected):
    layer = nn.Linear(3, 3)
    with evaluating(layer, options_of_steps(**precision)):
        assert layer(torch.ones(1, 3)).dtype == expected
    assert layer(torch.ones(1, 3)).dtype == torch.float32


def test_attributes_that_are_replaced_for_a_time_come_back():
    owner = SimpleNamespace(kept=1, changed=2)
    with pytest.raises(KeyError), replaced(owner, changed=3, added=4):
        assert vars(owner) == {"kept": 1, "changed": 3, "added": 4}
        raise KeyError
    assert vars(owner) == {"kept": 1, "changed": 2}


def test_outputs_are_seen_in_order_by_name_until_the_watch_ends():
    class NumbersAndIds(nn.Module):
        def forward(self, tensor):
            return {
                "numbers": tensor,
                "ids": torch.ones(2, dtype=torch.long),
                "name": "a",
            }

    model = nn.Sequential(nn.Linear(2, 2), NumbersAndIds())
    seen = []

    def watch(name, outputs):
        seen.append((name, len(outputs)))

    with watching_outputs(model, watch):
        model(torch.ones(1, 2))
    assert seen == [("0", 1), ("1", 1)]
    model(torch.ones(1, 2))
    assert len(seen) == 2


def test_modules_under_adapters_are_seen_by_the_names_that_they_have_without():
    module_names = []
    model = with_adapters(tiny.model())
    with watching_outputs(model, lambda name, outputs: module_names.append(name)):
        model(**tiny.inputs())
    assert module_names[-1] == "lm_head"
    first_parts = {module_name.partition(".")[0] for module_name in module_names}
    assert first_parts == {"model", "lm_head"}


@pytest.fixture
def wrapped():
    """A model that is shown a blank image if it is shown none, and its passes over images."""
    model = tiny.model()
    wrap_forward(model, torch.ones(1, 3, 16, 16))
    passes = []
    model.model.vision_tower.register_forward_hook(lambda *arguments: passes.append(1))
    return model, passes


@pytest.mark.parametrize(
    "embedded, options, expected_passes",
    [
        pytest.param(False, {"use_cache": False}, 1, id="training"),
        pytest.param(False, {"use_cache": True}, 0, id="generation"),
        pytest.param(False, {}, 0, id="by default"),
        pytest.param(True, {"use_cache": False}, 0, id="embeddings"),
    ],
)
def test_a_training_pass_without_images_sees_a_blank_one(
    wrapped, embedded, options, expected_passes
):
    model, passes = wrapped
    input_ids = tiny.inputs(images=0)["input_ids"]
    inputs = {"input_ids": input_ids}
    if embedded:
        inputs = {"inputs_embeds": model.get_input_embeddings()(input_ids).detach()}
    with torch.no_grad():
        expected = tiny.model()(input_ids=input_ids).logits
        logits = model(**inputs, **options).logits
    torch.testing.assert_close(logits, expected)
    assert len(passes) == expected_passes


def test_no_blank_image_is_seen_beside_an_image(wrapped):
    model, passes = wrapped
    with torch.no_grad():
        model(**tiny.inputs(), use_cache=False)
    assert len(passes) == 1  # its own


def test_a_module_that_is_frozen_has_no_dropout_and_the_others_have():
    model = tiny.model().train()
    vision_tower = model.model.vision_tower
    language_model = model.model.language_model
    projector = model.model.multi_modal_projector
    freeze(model, {**RATES, "vision": 0.0})
    eval_frozen(model)
    assert not any(module.training for module in vision_tower.modules())
    assert all(module.training for module in language_model.modules())
    assert projector.training

    freeze(model, {**NO_RATES, "vision": RATES["vision"]})
    model.train()
    eval_frozen(model)
    assert vision_tower.training
    assert not language_model.training
    assert not projector.training


def test_parameters_without_a_gradient_get_zeros_in_a_step_that_has_some():
    used = nn.Parameter(torch.ones(2))
    unused = nn.Parameter(torch.ones(2))
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    optimizer = torch.optim.AdamW([{"params": [used, frozen]}, {"params": [unused]}])
    fill_missing_gradients(optimizer, (), {})  # a step without any
    assert used.grad is None
    assert unused.grad is None
    used.grad = torch.full((2,), 3.0)
    fill_missing_gradients(optimizer, (), {})
    assert used.grad.tolist() == [3.0, 3.0]
    assert unused.grad.tolist() == [0.0, 0.0]
    assert frozen.grad is None


def test_the_labels_that_are_learned_are_where_they_are_predicted():
    labels = torch.tensor([[-100, 7, -100, 8], [5, -100, -100, 9]])
    selected = _answers(labels)
    # The first position is predicted by none, and each other one by the position before it.
    assert selected["answers"].tolist() == [[True, False, True], [False, False, True]]
    assert selected["shift_labels"].tolist() == [[7, 8, 9]]


def test_labels_of_which_none_is_predicted_stay_as_they_are():
    labels = torch.tensor([[5, -100], [-100, -100]])
    assert list(_answers(labels)) == ["labels"]


def bitsandbytes_bytes(optimizer_class, parameters, embedding) -> int:
    """What an optimizer of bitsandbytes keeps after a step, without tables that all share."""
    optimizer = optimizer_class(parameters)
    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    manager.initialize()  # it knows parameters by their addresses, from earlier tests too
    manager.override_config(embedding, "optim_bits", 32)
    manager.register_parameters(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    total = 0
    for state in optimizer.state.values():
        for name, entry in state.items():
            if torch.is_tensor(entry) and entry.dim() and not name.startswith("qmap"):
                total += entry.nbytes
    return total


@pytest.mark.skipif(
    version.parse(bitsandbytes.__version__) < version.parse("0.50"),
    reason="the optimizers of bitsandbytes 0.48 take no step on a CPU",
)
@pytest.mark.parametrize(
    "name, class_name",
    [
        ("lion_8bit", "Lion8bit"),
        ("adamw_8bit", "AdamW8bit"),
        ("lion_32bit", "Lion32bit"),
        ("rmsprop_bnb_8bit", "RMSprop8bit"),
        ("ademamix_8bit", "AdEMAMix8bit"),
        ("rmsprop_bnb", "RMSprop"),
    ],
)
def test_large_tensors_except_embeddings_have_states_in_8_bits(tmp_path, name, class_name):
    sizes = (4095, 4096, 4097, 5000)
    parameters = [nn.Parameter(torch.ones(size)) for size in sizes]
    embedding = parameters[-1]
    settings = training.settings(tmp_path, optim=name)
    counted = optimizer_bytes(parameters, settings, None, {embedding})
    optimizer_class = getattr(bitsandbytes.optim, class_name)
    assert counted == bitsandbytes_bytes(optimizer_class, parameters, embedding)


def test_an_optimizer_of_two_averages_has_three_states(tmp_path):
    """On a CPU bitsandbytes takes no step of it: a slow and a fast average, and one of squares."""
    settings = training.settings(tmp_path, optim="ademamix")
    parameters = [nn.Parameter(torch.ones(9))]
    states = 3
    bytes_of_number = 4
    expected = states * bytes_of_number * 9
    assert optimizer_bytes(parameters, settings, None, ()) == expected


@pytest.mark.parametrize("dtype, bytes_of_number", [(torch.float32, 4), (torch.bfloat16, 2)])
def test_states_have_the_precision_of_their_parameters(tmp_path, dtype, bytes_of_number):
    parameters = [nn.Parameter(torch.ones(5, 3, dtype=dtype)) for _ in range(2)]
    optimizer = (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})
    settings = training.settings(tmp_path)
    expected = 2 * 15 * bytes_of_number
    assert optimizer_bytes(parameters, settings, optimizer, ()) == expected


WHOLE = {
    "weights": 1.0,
    "adapters": 1.0,
    "gradients": 1.0,
    "optimizer": 1.0,
}
QUARTERS = dict.fromkeys(WHOLE, 0.25)
TWO_GRADIENTS = {**WHOLE, "gradients": 2.0}
"""DDP has them once more, in its buckets."""


@pytest.mark.parametrize(
    "distributed_type, zero_stage, expected",
    [
        ("NO", None, WHOLE),
        ("DEEPSPEED", 1, {**WHOLE, "optimizer": 0.25}),
        ("DEEPSPEED", 2, {**WHOLE, "gradients": 0.25, "optimizer": 0.25}),
        ("DEEPSPEED", 3, QUARTERS),
        ("FSDP", None, QUARTERS),
        ("MULTI_CPU", None, TWO_GRADIENTS),
        ("MULTI_GPU", None, TWO_GRADIENTS),
    ],
)
def test_of_four_processes_each_has_a_quarter_of_what_is_divided(
    monkeypatch, distributed_type, zero_stage, expected
):
    Accelerator(cpu=True)
    accelerator_state = AcceleratorState._shared_state
    for shared_state in (accelerator_state, PartialState._shared_state):
        monkeypatch.setitem(
            shared_state,
            "distributed_type",
            DistributedType[distributed_type],
        )
    plugin = SimpleNamespace(zero_stage=zero_stage, selected=True)
    monkeypatch.setitem(accelerator_state, "deepspeed_plugins", {"default": plugin})
    assert memory_factors(SimpleNamespace(world_size=4)) == expected


def expected_8_bit_bytes(plain_model) -> int:
    """In the language model's linear layers a byte a weight, and 4 bytes a row."""
    total = sum(parameter.nbytes for parameter in plain_model.parameters())
    language_model = plain_model.model.language_model
    for parameter_name, parameter in language_model.named_parameters():
        if parameter_name.endswith("_proj.weight"):
            total -= parameter.nbytes
            total += parameter.numel() + 4 * len(parameter)
    return total


def test_weights_in_8_bits_count_with_a_factor_for_each_row(checkpoint):
    plain_model = NormAlignLlavaForConditionalGeneration.from_pretrained(
        checkpoint,
        dtype="bfloat16",
    )
    quantized_model = NormAlignLlavaForConditionalGeneration.from_pretrained(
        checkpoint,
        dtype="bfloat16",
        quantization_config=BitsAndBytesConfig(load_in_8bit=True),
    )
    quantized_bytes = sum(map(tensor_bytes, quantized_model.parameters()))
    assert quantized_bytes == expected_8_bit_bytes(plain_model)
    expected_count = plain_model.num_parameters()
    assert sum(map(parameter_count, plain_model.parameters())) == expected_count
    assert sum(map(parameter_count, quantized_model.parameters())) == expected_count


@pytest.mark.parametrize(
    "named, expected",
    [
        pytest.param(None, ["CLIPEncoderLayer", "LlamaDecoderLayer"], id="none named"),
        pytest.param(["LlamaDecoderLayer"], ["LlamaDecoderLayer"], id="named"),
    ],
)
def test_fsdp_wraps_layers_and_the_norm_or_what_is_named_and_the_norm(named, expected):
    model = tiny.model()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        state_dict_type="SHARDED_STATE_DICT",
        transformer_cls_names_to_wrap=named,
    )
    shard_functions = []

    def prepare(module):
        shard_functions.append(fsdp.fully_shard)
        return module

    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        prepare=prepare,
    )
    prepare_sharding(accelerator, model)
    norm_class = type(projector_norm(model)).__name__
    assert plugin.transformer_cls_names_to_wrap == sorted([*expected, norm_class])
    assert plugin.state_dict_type.name == "FULL_STATE_DICT"
    torch_fully_shard = fsdp.fully_shard
    assert accelerator.prepare(model) is model
    assert shard_functions[0] is not torch_fully_shard
    assert fsdp.fully_shard is torch_fully_shard


@pytest.fixture
def process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_fsdp_gathers_the_gain_in_float32_and_other_layers_in_the_precision_of_steps():
    model = tiny.model()
    projector = model.model.multi_modal_projector
    half_precision = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)

    def prepare(model):
        fsdp.fully_shard(projector.norm, mp_policy=half_precision)
        fsdp.fully_shard(projector.linear_1, mp_policy=half_precision)
        return model

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        prepare=prepare,
    )
    prepare_sharding(accelerator, model)
    accelerator.prepare(model)
    projector.norm.unshard()
    norm_dtypes = {parameter.dtype for parameter in projector.norm.parameters()}
    assert norm_dtypes == {torch.float32}
    projector.linear_1.unshard()
    linear_dtypes = {parameter.dtype for parameter in projector.linear_1.parameters()}
    assert linear_dtypes == {torch.bfloat16}


@pytest.mark.usefixtures("process_group")
def test_weights_are_read_into_a_model_that_fsdp_divides(checkpoint):
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint)
    expected = training.weights(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    fsdp.fully_shard(model)
    load_sharded(model, checkpoint)
    weights = {}
    for parameter_name, parameter in model.named_parameters():
        weights[parameter_name] = parameter.full_tensor().detach()
    training.assert_equal(weights, expected)


ARMS = ("none", "unit", "aligned", "gwc")
FIELDS_OF_ARMS = {
    "none": {"projector_norm": "none"},
    "unit": {"projector_gain_init": "one", "gradient_compensation": "none"},
    "aligned": {"gradient_compensation": "none"},
    "gwc": {},
}
KEEP_THE_GAIN = {"aligned", "gwc"}
"""These arms differ in training only."""


def config_of(arm) -> NormAlignLlavaConfig:
    """An arm's configuration, with an RMS norm unless the arm has none."""
    return tiny.config(**{"projector_norm": "rms_norm", **FIELDS_OF_ARMS[arm]})


def expected_norm(stored_arm, arm) -> str:
    if arm == "none":
        return "none"
    if stored_arm == "none":
        return "layer_norm"  # without a norm there was none to keep
    return "rms_norm"


each_stored_arm = pytest.mark.parametrize("stored_arm", ARMS)
each_arm_or_none = pytest.mark.parametrize("asked", [None, *ARMS])


@each_arm_or_none
@each_stored_arm
def test_a_configuration_becomes_the_arm_that_is_asked_for(tmp_path, stored_arm, asked):
    stored_config = config_of(stored_arm)
    before = stored_config.to_dict()
    opened = SimpleNamespace(config=stored_config, name=str(tmp_path))
    config = config_of_arm(opened, asked)
    arm = asked or stored_arm
    assert arm_of(config) == arm
    assert stored_config.to_dict() == before
    assert config is not stored_config
    assert config.projector_norm == expected_norm(stored_arm, arm)
    if arm != stored_arm:
        expected_fields = {
            "projector_gain_init": "text_norm",
            "gradient_compensation": "global",
            **FIELDS_OF_ARMS[arm],
        }
        for name, expected in expected_fields.items():
            assert getattr(config, name) == expected


@each_arm_or_none
@each_stored_arm
def test_a_trained_checkpoint_becomes_an_arm_that_keeps_its_gain(tmp_path, stored_arm, asked):
    opened = SimpleNamespace(config=config_of(stored_arm), name=str(tmp_path))
    (tmp_path / "training.json").write_text("{}")
    arm = asked or stored_arm
    if arm == stored_arm or {arm, stored_arm} == KEEP_THE_GAIN:
        assert arm_of(config_of_arm(opened, asked)) == arm
    else:
        message = f"trained as arm '{stored_arm}'; arm '{asked}' would"
        with pytest.raises(ValueError, match=message):
            config_of_arm(opened, asked)


@pytest.fixture
def settings(tmp_path):
    """Options that load a model in float32."""

    def make(**options):
        run_config = training.settings(tmp_path, **options)
        run_config.model_init_kwargs = {"dtype": "float32"}
        return run_config

    return make


@pytest.fixture
def opened(checkpoint):
    return open_checkpoint(checkpoint)


@each_arm_or_none
def test_a_model_is_loaded_as_the_arm_that_is_asked_for(checkpoint, opened, settings, asked):
    model = load_model(opened, settings(arm=asked), RATES)
    assert type(model) is NormAlignLlavaForConditionalGeneration
    assert model.name_or_path == str(checkpoint)
    assert model.config.name_or_path == str(checkpoint)
    assert arm_of(model.config) == (asked or "gwc")


@pytest.mark.parametrize("arm", [None, "aligned", "gwc"])
def test_a_gain_is_kept_unless_the_arm_has_another(checkpoint, opened, settings, arm):
    model = load_model(opened, settings(arm=arm), RATES)
    stored_model = NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint)
    assert torch.equal(projector_norm(model).weight, projector_norm(stored_model).weight)


def test_the_gain_of_the_arm_unit_is_one(opened, settings):
    norm = projector_norm(load_model(opened, settings(arm="unit"), RATES))
    assert torch.equal(norm.weight, torch.ones(32))
    assert not norm.bias.any()


def test_the_arm_none_has_no_gain(opened, settings):
    norm = projector_norm(load_model(opened, settings(arm="none"), RATES))
    assert not list(norm.parameters())


def test_what_a_dry_run_cannot_count_is_refused(opened, settings):
    eight_bits = BitsAndBytesConfig(load_in_8bit=True)
    with pytest.raises(ValueError, match="dry_run cannot count load_in_8bit"):
        load_model(opened, settings(dry_run=True), RATES, eight_bits, use_peft=True)


FROZEN_LANGUAGE = {**RATES, "language": 0.0}


def layers_in_4_bits(model) -> dict[str, nn.Module]:
    layers = {}
    for module_name, module in model.named_modules():
        if type(module).__name__ == "Linear4bit":
            layers[module_name] = module
    return layers


@pytest.fixture
def float16_products():
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float16)


@pytest.mark.parametrize("bf16, expected", [(False, torch.float32), (True, torch.bfloat16)])
def test_the_settings_of_4_bits_are_copied_and_products_are_in_the_precision_of_steps(
    opened, settings, float16_products, bf16, expected
):
    given = float16_products.to_dict()
    train_options = settings(dry_run=True, bf16=bf16)
    train_options.model_init_kwargs["revision"] = "main"
    model = load_model(opened, train_options, FROZEN_LANGUAGE, float16_products)
    assert float16_products.to_dict() == given
    layers = layers_in_4_bits(model)
    compute_dtypes = {layer.compute_dtype for layer in layers.values()}
    assert compute_dtypes == {expected}
    assert len(layers) == 2 * 7  # two layers of the decoder
    for layer_name in layers:
        assert layer_name.startswith("model.language_model.layers.")
    assert not model.is_quantized  # transformers would refuse to train it
    assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("bf16", [False, True])
def test_a_model_in_4_bits_is_quantized_for_peft(opened, settings, float16_products, bf16):
    # A gain that is not read need not be set.
    train_options = settings(dry_run=True, bf16=bf16, arm="unit")
    train_options.model_init_kwargs["revision"] = "main"
    model = load_model(opened, train_options, FROZEN_LANGUAGE, float16_products, use_peft=True)
    assert model.is_quantized


def test_a_dry_run_leaves_no_table_without_values_to_later_quantization(
    opened, settings, monkeypatch
):
    tables = bitsandbytes.functional.name2qmap
    monkeypatch.delitem(tables, "dynamic", raising=False)
    twice_quantized = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True)
    load_model(opened, settings(dry_run=True), FROZEN_LANGUAGE, twice_quantized)
    assert torch.equal(tables["dynamic"], bitsandbytes.functional.create_dynamic_map())


def test_states_that_are_loaded_leave_quantized_and_other_frozen_weights(
    checkpoint, opened, settings
):
    learning_rates = {**NO_RATES, "norm": 1e-3}
    four_bits = BitsAndBytesConfig(load_in_4bit=True)
    model = load_model(opened, settings(), learning_rates, four_bits)
    freeze(model, learning_rates)
    before = training.weights(model)
    plain_model = NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint)
    state = {name: tensor + 1 for name, tensor in plain_model.state_dict().items()}
    model.load_state_dict(state, False)
    assert training.moved(before, model) == {
        "model.multi_modal_projector.norm.weight",
        "model.multi_modal_projector.norm.bias",
    }


def set_hidden_states(model, size) -> None:
    """Makes hidden states at least about so large."""
    with torch.no_grad():
        model.model.multi_modal_projector.linear_2.bias.fill_(size)


@pytest.mark.parametrize("size", [20_000.0, -20_000.0, float("nan")])
def test_hidden_states_near_the_end_of_float16_of_either_sign_turn_it_off(float16_products, size):
    Accelerator(cpu=True)  # earlier options have made accelerate forget its state
    model = tiny.model()
    model.config.quantization_config = float16_products
    model.packed = bitsandbytes.nn.Linear4bit(16, 16, compute_dtype=torch.float16)
    assert settle_float16(model, CPU, tiny.inputs()).fp16
    set_hidden_states(model, 12_000.0)
    assert settle_float16(model, CPU, tiny.inputs()).fp16  # it is below a quarter of 65,504
    model.frozen = nn.Linear(2, 2, dtype=torch.bfloat16).requires_grad_(False)
    set_hidden_states(model, size)
    settled = settle_float16(model, CPU, tiny.inputs())
    assert settled.bf16 is False
    assert settled.fp16 is False
    assert settled.fp16_needs_check is False
    assert model.config.quantization_config.bnb_4bit_compute_dtype == torch.float32
    assert model.packed.compute_dtype == torch.float32
    assert model.frozen.weight.dtype == torch.float32
    assert ("overflow" in settled.because) == math.isnan(size)


def test_without_options_a_checkpoint_is_loaded_in_its_own_precision(opened, settings):
    train_options = settings()
    train_options.model_init_kwargs = None
    model = load_model(opened, train_options, RATES)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def used_adapters(lora_config, **rates):
    """The configuration of adapters that is used of another one, with these learning rates."""
    learning_rates = {**NO_RATES, "language": 1e-4, **rates}
    return language_adapter(lora_config, tiny.config(tied=False), learning_rates)


@pytest.mark.parametrize(
    "rates, expected",
    [
        ({}, None),
        ({"norm": 1e-3}, ["multi_modal_projector"]),
        ({"projector": 1e-3}, ["multi_modal_projector"]),
        ({"vision": 1e-3}, ["vision_tower"]),
        ({"vision": 1e-3, "norm": 1e-3}, ["vision_tower", "multi_modal_projector"]),
    ],
)
def test_what_is_trained_in_full_beside_adapters_is_saved_with_them(rates, expected):
    assert used_adapters(LoraConfig(), **rates).modules_to_save == expected


def test_the_configuration_of_adapters_is_a_copy_to_its_last_part():
    given = LoraConfig(
        trainable_token_indices={"embed_tokens": [5]},
        modules_to_save=["lm_head"],
    )
    used = used_adapters(given, norm=1e-3)
    used.trainable_token_indices["embed_tokens"].append(6)
    assert given.trainable_token_indices == {"embed_tokens": [5]}
    assert given.modules_to_save == ["lm_head"]
    assert given.exclude_modules is None


def test_tokens_are_those_that_the_embeddings_have():
    last_token = tiny.VOCABULARY - 1
    unknown_token = tiny.VOCABULARY
    assert used_adapters(LoraConfig(trainable_token_indices=[0, last_token])).r
    message = f"names token {unknown_token}, but this would have no effect"
    with pytest.raises(ValueError, match=message):
        used_adapters(LoraConfig(trainable_token_indices=[unknown_token]))


def test_what_a_stored_configuration_says_of_its_origin_is_not_a_setting():
    stored_config = LoraConfig(r=3, base_model_name_or_path="/here/model")
    stored_config.revision = "v2"
    stored_config.peft_version = "0.1"
    stored_config.runtime_config = LoraRuntimeConfig(ephemeral_gpu_offload=True)
    assert used_adapters(stored_config).r == 3


@pytest.mark.parametrize(
    "module_name",
    ["model", "multi_modal_projector.linear_1", "encoder.layers.0"],
)
def test_modules_that_hold_those_with_learning_rates_of_their_own_are_not_saved(module_name):
    lora_config = LoraConfig(modules_to_save=[module_name])
    with pytest.raises(ValueError, match=f"modules_to_save names {module_name}: model"):
        used_adapters(lora_config)


@pytest.mark.parametrize("rates", [{"norm": 1e-3}, {"projector": 1e-3}], ids=["norm", "projector"])
def test_a_module_that_is_saved_anyway_may_be_named(rates):
    lora_config = LoraConfig(modules_to_save=["multi_modal_projector"])
    used = used_adapters(lora_config, **rates)
    assert used.modules_to_save == ["multi_modal_projector"]


def test_adapters_of_another_kind_are_refused():
    with pytest.raises(ValueError, match="peft_config is a IA3Config"):
        used_adapters(IA3Config())


def test_adapters_without_a_learning_rate_are_refused():
    with pytest.raises(ValueError, match="its learning rate is 0"):
        used_adapters(LoraConfig(), language=0.0)


def check_4_bits(learning_rate, lora_config, skipped_modules=None):
    four_bits = BitsAndBytesConfig(load_in_4bit=True, llm_int8_skip_modules=skipped_modules)
    check_quantized(tiny.config(tied=False), four_bits, learning_rate, lora_config)


@pytest.mark.parametrize("saved", [None, ["embed_tokens"], ["lm_head"], ["norm"]])
def test_what_is_not_quantized_may_be_trained_in_full(saved):
    check_4_bits(1e-5, LoraConfig(modules_to_save=saved))


def test_what_is_quantized_may_be_frozen():
    check_4_bits(0.0, None)


@pytest.mark.parametrize("saved", ["gate_proj", "mlp"])
def test_what_is_quantized_is_not_trained_in_full_beside_adapters(saved):
    with pytest.raises(ValueError, match=f"{saved}. It would be quantized"):
        check_4_bits(1e-5, LoraConfig(modules_to_save=[saved]))


def test_what_is_quantized_is_not_trained_in_full():
    with pytest.raises(ValueError, match="language_learning_rate 1e-05 would train"):
        check_4_bits(1e-5, None)


def test_modules_that_quantization_skips_are_chosen_here():
    with pytest.raises(ValueError, match="llm_int8_skip_modules is set here"):
        check_4_bits(1e-5, LoraConfig(), skipped_modules=["lm_head"])


@pytest.mark.parametrize(
    "pattern",
    [
        # It names what it leaves out.
        r"(?!.*up_proj).*_proj",
        r".*\.[qkv]_[proj]+",
        r".*\bdown_proj",
        r".*layers\.\d\D*v_proj",
        # Models have the one or the other.
        r".*\.(q|kv)_proj",
    ],
)
def test_patterns_name_modules_as_peft_reads_them(pattern):
    lora_config = LoraConfig(target_modules=pattern)
    assert used_adapters(lora_config).target_modules == pattern


def test_a_list_of_modules_may_be_written_as_trl_does():
    lora_config = LoraConfig(target_modules="q_proj, v_proj")
    assert used_adapters(lora_config).target_modules == {"q_proj", "v_proj"}


def test_modules_that_a_pattern_excludes_have_no_adapters():
    first_layer = r"model\.language_model\.layers\.0\..*"
    excluded = used_adapters(LoraConfig(exclude_modules=first_layer)).exclude_modules
    assert re.fullmatch(excluded, "model.language_model.layers.0.mlp.up_proj")
    assert not re.fullmatch(excluded, "model.language_model.layers.1.mlp.up_proj")


def test_all_linear_layers_have_adapters_by_default():
    expected = used_adapters(LoraConfig()).target_modules
    lora_config = LoraConfig(target_modules="all-linear")
    assert used_adapters(lora_config).target_modules == expected


def test_a_name_of_no_module_is_refused():
    lora_config = LoraConfig(exclude_modules=["proj"])  # the end of names, not a name
    with pytest.raises(ValueError, match="peft_config names proj, but this would have no effect"):
        used_adapters(lora_config)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "use_peft, frozen",
    [
        (True, {"vision", "language"}),
        (False, {"vision"}),
    ],
)
def test_weights_that_are_not_read_have_the_precision_of_those_that_are(
    opened, settings, dtype, use_peft, frozen
):
    """What is trained in full is float32, the norm always, the rest as asked."""
    learning_rates = {**RATES, "vision": 0.0}
    loaded_dtypes = {}
    for dry_run in (True, False):
        train_options = settings(dry_run=dry_run)
        train_options.model_init_kwargs["dtype"] = dtype
        model = load_model(opened, train_options, learning_rates, use_peft=use_peft)
        assert {parameter.is_meta for parameter in model.parameters()} == {dry_run}
        loaded_dtypes[dry_run] = {
            parameter_name: parameter.dtype
            for parameter_name, parameter in model.named_parameters()
        }
    assert loaded_dtypes[True] == loaded_dtypes[False]
    for parameter_name, found in loaded_dtypes[False].items():
        is_frozen = module_of(parameter_name) in frozen
        expected = getattr(torch, dtype) if is_frozen else torch.float32
        assert found == expected, parameter_name


def test_a_layer_that_the_encoder_lacks_is_refused_before_weights_are_loaded(tmp_path):
    config = tiny.config()
    config.vision_feature_layer = -9
    opened = SimpleNamespace(config=config, name=str(tmp_path))
    with pytest.raises(ValueError, match="feature_layer -9 does not exist"):
        config_of_arm(opened, None)


def test_a_model_of_this_package_is_accepted():
    check_architecture("normalign_llava", "mine")


@pytest.mark.parametrize("model_type", ["llava", None])
def test_a_model_of_another_kind_leads_to_building_one(model_type):
    with pytest.raises(ValueError, match=f"mine is a {model_type!r} model.*normalign build"):
        check_architecture(model_type, "mine")


def precision_options(tmp_path, asked, steps):
    """Options with a dtype for weights and a precision of steps."""
    precision = {"bf16": False}
    if steps:
        precision[steps] = True
    train_options = training.settings(tmp_path, **precision)
    train_options.model_init_kwargs = {"dtype": asked} if asked else None
    return train_options


def config_stored_in(dtype):
    """A configuration whose language model is stored in bfloat16."""
    config = NormAlignLlavaConfig(text_config=tiny.text_config(dtype="bfloat16"))
    config.dtype = dtype
    return config


@pytest.mark.parametrize(
    "stored, asked, steps, expected",
    [
        ("bfloat16", "auto", "bf16", "bfloat16"),
        ("bfloat16", None, "bf16", "bfloat16"),
        ("bfloat16", "auto", None, "float32"),
        ("float16", "auto", "bf16", "float32"),
        ("float16", "auto", "fp16", "float16"),
        ("float32", "auto", "bf16", "float32"),
        # Only the language model's is named.
        (None, "auto", "bf16", "bfloat16"),
        ("float32", "bfloat16", "bf16", "bfloat16"),
        ("float32", "bfloat16", None, "bfloat16"),
        ("bfloat16", torch.float32, "bf16", "float32"),
        ("bfloat16", torch.float16, "fp16", "float16"),
    ],
)
def test_the_precision_of_what_is_frozen(tmp_path, stored, asked, steps, expected):
    train_options = precision_options(tmp_path, asked, steps)
    assert frozen_dtype(config_stored_in(stored), train_options) == expected


@pytest.mark.parametrize(
    "asked, steps, autocast",
    [
        ("float16", "bf16", "bfloat16"),
        ("bfloat16", "fp16", "float16"),
    ],
)
def test_two_half_precisions_do_not_mix(tmp_path, asked, steps, autocast):
    train_options = precision_options(tmp_path, asked, steps)
    with pytest.raises(ValueError, match=f"steps in {autocast} do not mix"):
        frozen_dtype(config_stored_in("bfloat16"), train_options)
