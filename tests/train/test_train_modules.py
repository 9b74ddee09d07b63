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
from peft import IA3Config, LoraConfig, LoraRuntimeConfig, get_peft_model
from torch import distributed as dist, nn
from torch.distributed import fsdp
from transformers import BitsAndBytesConfig

from normalign_llava import NormAlignLlavaConfig, NormAlignLlavaForConditionalGeneration
from normalign_llava.assembly.processing import arm_of
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
from normalign_llava.train.modules.sharding import fill_gradients, load_sharded, prepare_sharding
from normalign_llava.train.modules.sizes import (
    memory_shares,
    optimizer_bytes,
    parameter_count,
    tensor_bytes,
)


RATES = {"vision": 1e-6, "projector": 1e-3, "norm": 1e-3, "language": 1e-5}


def with_adapters(model):
    targets = r".*language_model.*q_proj"
    saved = ["multi_modal_projector"]
    return get_peft_model(model, LoraConfig(r=2, target_modules=targets, modules_to_save=saved))


@pytest.mark.parametrize("frozen", [*RATES, "projector norm", "vision language", ""])
def test_what_has_no_learning_rate_is_frozen_and_its_file_is_not_written(frozen):
    model = tiny.model(tied=False)
    rates = {name: 0.0 if name in frozen.split() else rate for name, rate in RATES.items()}
    places = {
        "vision": "vision_tower",
        "projector": "linear_",
        "norm": "multi_modal_projector.norm",
    }
    freeze(model, rates)
    for name, parameter in model.named_parameters():
        module = "language"
        for known, place in places.items():
            module = known if place in name else module
        assert parameter.requires_grad == (rates[module] > 0), name
    assert trained_parameters(model).keys() == {
        name for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    files = {"vision": {"vision_tower"}, "language": {"language_model"}}
    files |= {"projector norm": {"multi_modal_projector"}, "": set()}
    files |= {"vision language": {"vision_tower", "language_model"}}
    assert frozen_modules(model) == files.get(frozen, set())
    freeze(model, RATES)  # what was frozen by hand is trained too
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_beside_adapters_the_layers_below_stay_frozen():
    model = with_adapters(tiny.model())
    freeze(model, RATES)
    trained = trained_parameters(model)
    assert {module_of(name) for name in trained} == {"projector", "norm", "language"}
    for name in trained:
        assert ".lora_" in name or "modules_to_save" in name
    freeze(model, {**RATES, "language": 0.0})
    assert {module_of(name) for name in trained_parameters(model)} == {*("projector", "norm")}
    assert projector_norm(model) is base_model(model).model.multi_modal_projector.norm
    train_in_float32(model)
    saved = base_model(model).model.multi_modal_projector
    original = saved.original_module.linear_1.weight.clone()
    with torch.no_grad():
        saved.modules_to_save["default"].linear_1.weight += 1.0
    assert torch.equal(saved.original_module.linear_1.weight, original)


@pytest.mark.parametrize("bf16", [False, True])
def test_trained_modules_beside_others_in_bfloat16_compute_in_float32(bf16):
    """Unless steps are autocast, what goes into them is cast, and what comes out of a saved one."""
    model = tiny.model(tied=False).to(torch.bfloat16)
    saved = ["lm_head", "multi_modal_projector"]
    targets = r".*language_model.*q_proj"
    options = LoraConfig(r=2, target_modules=targets, modules_to_save=saved)
    model = get_peft_model(model, options, autocast_adapter_dtype=False)
    freeze(model, RATES)
    train_in_float32(model)
    dtypes = {}
    for parameter in model.parameters():
        assert parameter.dtype == (torch.float32 if parameter.requires_grad else torch.bfloat16)
    base = base_model(model)

    def see(name):
        def hook(module, inputs, output):
            dtypes[name] = (inputs[0].dtype, output.dtype)

        return hook

    copied = base.lm_head.modules_to_save["default"]
    copied.register_forward_hook(see("head"))
    base.lm_head.register_forward_hook(see("whole"))
    base.model.multi_modal_projector.linear_1.register_forward_hook(see("projector"))
    inputs = tiny.inputs()
    inputs["pixel_values"] = inputs["pixel_values"].to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        model(**inputs)
    expected = torch.bfloat16 if bf16 else torch.float32
    assert dtypes["head"][1] == dtypes["projector"][1] == expected
    assert dtypes["whole"][1] == torch.bfloat16
    if not bf16:
        assert dtypes["head"][0] == dtypes["projector"][0] == torch.float32


def test_a_norm_is_trained_after_a_frozen_projector_in_bfloat16():
    model = tiny.model(tied=False).to(torch.bfloat16)
    freeze(model, {**dict.fromkeys(RATES, 0.0), "norm": 1e-3})
    train_in_float32(model)
    projector = model.model.multi_modal_projector
    assert projector.norm.weight.dtype == torch.float32
    assert projector.linear_1.weight.dtype == torch.bfloat16
    inputs = tiny.inputs()
    model(**inputs, labels=inputs["input_ids"]).loss.backward()
    assert projector.norm.weight.grad.any()


@pytest.mark.parametrize("fails", [False, True])
def test_after_an_evaluation_modes_and_random_numbers_are_what_they_were(fails):
    model = tiny.model().train()
    model.model.vision_tower.eval()
    modes = {name: module.training for name, module in model.named_modules()}
    args = SimpleNamespace(device=torch.device("cpu"), bf16=False, fp16=False)
    random = torch.get_rng_state()
    raised = None
    try:
        with evaluating(model, args):
            assert not any(module.training for module in model.modules())
            assert not torch.is_grad_enabled()
            torch.rand(3)
            if fails:
                raise KeyError("what went wrong")
    except KeyError as error:
        raised = error
    assert (raised is not None) == fails
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert torch.equal(torch.get_rng_state(), random) and torch.is_grad_enabled()


@pytest.mark.parametrize(
    ("bf16", "fp16", "dtype"),
    [(True, False, torch.bfloat16), (False, True, torch.float16), (False, False, torch.float32)],
)
def test_an_evaluation_is_in_the_precision_of_training(bf16, fp16, dtype):
    layer = nn.Linear(3, 3)
    args = SimpleNamespace(device=torch.device("cpu"), bf16=bf16, fp16=fp16)
    with evaluating(layer, args):
        assert layer(torch.ones(1, 3)).dtype == dtype
    assert layer(torch.ones(1, 3)).dtype == torch.float32


def test_attributes_that_are_replaced_for_a_time_come_back():
    owner = SimpleNamespace(kept=1, changed=2)
    with pytest.raises(KeyError), replaced(owner, changed=3, added=4):
        assert vars(owner) == dict(kept=1, changed=3, added=4)
        raise KeyError
    assert vars(owner) == dict(kept=1, changed=2)


def test_outputs_are_seen_in_order_by_name_until_the_watch_ends():
    class Pair(nn.Module):
        def forward(self, values):
            return {"numbers": values, "ids": torch.ones(2, dtype=torch.long), "name": "a"}

    model = nn.Sequential(nn.Linear(2, 2), Pair())
    seen = []
    with watching_outputs(model, lambda name, outputs: seen.append((name, len(outputs)))):
        model(torch.ones(1, 2))
    assert seen == [("0", 1), ("1", 1)]
    model(torch.ones(1, 2))
    assert len(seen) == 2


def test_modules_under_adapters_are_seen_by_the_names_that_they_have_without():
    seen = []
    model = with_adapters(tiny.model())
    with watching_outputs(model, lambda name, outputs: seen.append(name)):
        model(**tiny.inputs())
    assert seen[-1] == "lm_head"
    assert {name.partition(".")[0] for name in seen} == {"model", "lm_head"}


def test_a_blank_image_is_seen_in_a_pass_of_words_alone_that_is_of_training():
    model = tiny.model()
    words = tiny.inputs(images=0)["input_ids"]
    shown = []
    embedded = model.get_input_embeddings()(words).detach()
    with torch.no_grad():
        expected = model(input_ids=words).logits
        wrap_forward(model, torch.ones(1, 3, 16, 16))
        model.model.vision_tower.register_forward_hook(lambda *args: shown.append(1))
        for passes, inputs in (
            (1, dict(input_ids=words, use_cache=False)),
            (0, dict(input_ids=words, use_cache=True)),
            (0, dict(input_ids=words)),
            (0, dict(inputs_embeds=embedded, use_cache=False)),
        ):
            shown.clear()
            torch.testing.assert_close(model(**inputs).logits, expected)
            assert len(shown) == passes
        shown.clear()
        model(**tiny.inputs(), use_cache=False)
        assert len(shown) == 1  # its own


def test_a_module_that_is_frozen_has_no_dropout_and_the_others_have():
    model = tiny.model().train()
    freeze(model, {**RATES, "vision": 0.0})
    eval_frozen(model)
    inner = model.model
    assert not any(module.training for module in inner.vision_tower.modules())
    assert all(module.training for module in inner.language_model.modules())
    assert inner.multi_modal_projector.training
    freeze(model, {**RATES, "projector": 0.0, "norm": 0.0, "language": 0.0})
    model.train()
    eval_frozen(model)
    assert inner.vision_tower.training
    assert not (inner.language_model.training or inner.multi_modal_projector.training)


def test_parameters_without_a_gradient_get_zeros_in_a_step_that_has_some():
    used, unused, frozen = (nn.Parameter(torch.ones(2)) for _ in range(3))
    frozen.requires_grad_(False)
    groups = [{"params": [used, frozen]}, {"params": [unused]}]
    optimizer = torch.optim.AdamW(groups)
    fill_gradients(optimizer, (), {})
    assert used.grad is None and unused.grad is None  # a step without any
    used.grad = torch.full((2,), 3.0)
    fill_gradients(optimizer, (), {})
    assert used.grad.tolist() == [3.0, 3.0] and unused.grad.tolist() == [0.0, 0.0]
    assert frozen.grad is None


def test_the_labels_that_are_learned_are_where_they_are_predicted():
    labels = torch.tensor([[-100, 7, -100, 8], [5, -100, -100, 9]])
    found = _answers(labels)
    # The first position is predicted by none, and each other one by the position before it.
    assert found["answers"].tolist() == [[True, False, True], [False, False, True]]
    assert found["shift_labels"].tolist() == [[7, 8, 9]]
    none = torch.tensor([[5, -100], [-100, -100]])
    assert [*_answers(none)] == ["labels"]


def bitsandbytes_bytes(cls, parameters, embedding) -> int:
    """What an optimizer of bitsandbytes keeps after a step, without tables that all share."""
    optimizer = cls(parameters)
    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    manager.initialize()  # it knows parameters by their addresses, those of earlier tests too
    manager.override_config(embedding, "optim_bits", 32)
    manager.register_parameters(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return sum(
        value.nbytes
        for state in optimizer.state.values()
        for name, value in state.items()
        if torch.is_tensor(value) and value.dim() and not name.startswith("qmap")
    )


@pytest.mark.parametrize(
    ("name", "cls"),
    [
        ("lion_8bit", "Lion8bit"),
        ("adamw_8bit", "AdamW8bit"),
        ("lion_32bit", "Lion32bit"),
        ("rmsprop_bnb_8bit", "RMSprop8bit"),
        ("ademamix_8bit", "AdEMAMix8bit"),
        ("rmsprop_bnb", "RMSprop"),
    ],
)
def test_states_in_8_bits_are_those_of_large_tensors_but_embeddings(tmp_path, name, cls):
    sizes = (4095, 4096, 4097, 5000)
    parameters = [nn.Parameter(torch.ones(size)) for size in sizes]
    embedding = parameters[-1]
    args = training.settings(tmp_path, optim=name)
    found = optimizer_bytes(parameters, args, None, {embedding})
    optimizer = getattr(bitsandbytes.optim, cls)
    assert found == bitsandbytes_bytes(optimizer, parameters, embedding)


def test_an_optimizer_of_two_averages_has_three_states(tmp_path):
    """On a CPU bitsandbytes takes no step of it: a slow and a fast average, and one of squares."""
    args = training.settings(tmp_path, optim="ademamix")
    parameters = [nn.Parameter(torch.ones(9))]
    assert optimizer_bytes(parameters, args, None, ()) == 3 * 4 * 9


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_states_have_the_precision_of_their_parameters(tmp_path, dtype, size):
    parameters = [nn.Parameter(torch.ones(5, 3, dtype=dtype)) for _ in range(2)]
    momentum = (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})
    args = training.settings(tmp_path)
    assert optimizer_bytes(parameters, args, momentum, ()) == 2 * 15 * size


EACH_PART = ("weights", "adapters", "gradients", "optimizer")


@pytest.mark.parametrize(
    ("kind", "stage", "divided"),
    [
        ("NO", None, ()),
        ("DEEPSPEED", 1, ("optimizer",)),
        ("DEEPSPEED", 2, ("gradients", "optimizer")),
        ("DEEPSPEED", 3, EACH_PART),
        ("FSDP", None, EACH_PART),
        ("MULTI_CPU", None, ()),
        ("MULTI_GPU", None, ()),
    ],
)
def test_of_four_processes_each_has_a_quarter_of_what_is_divided(monkeypatch, kind, stage, divided):
    Accelerator(cpu=True)
    for states in (AcceleratorState._shared_state, PartialState._shared_state):
        monkeypatch.setitem(states, "distributed_type", DistributedType[kind])
    plugins = {"default": SimpleNamespace(zero_stage=stage, selected=True)}
    monkeypatch.setitem(AcceleratorState._shared_state, "deepspeed_plugins", plugins)
    expected = {name: 0.25 if name in divided else 1.0 for name in EACH_PART}
    if kind.startswith("MULTI"):
        expected["gradients"] = 2.0  # and once more in the buckets of DDP
    assert memory_shares(SimpleNamespace(world_size=4)) == expected


def test_weights_in_8_bits_count_with_a_factor_for_each_row(checkpoint):
    load = NormAlignLlavaForConditionalGeneration.from_pretrained
    settings = BitsAndBytesConfig(load_in_8bit=True)
    plain = load(checkpoint, dtype="bfloat16")
    model = load(checkpoint, dtype="bfloat16", quantization_config=settings)
    named = plain.model.language_model.named_parameters()
    linears = [value for name, value in named if name.endswith("_proj.weight")]
    expected = sum(parameter.nbytes for parameter in plain.parameters())
    expected += sum(-value.nbytes + value.numel() + 4 * len(value) for value in linears)
    assert sum(map(tensor_bytes, model.parameters())) == expected
    counts = [sum(map(parameter_count, each.parameters())) for each in (plain, model)]
    assert counts[0] == counts[1] == plain.num_parameters()


def test_fsdp_wraps_layers_and_the_norm_or_what_is_named_and_the_norm():
    layers = ["CLIPEncoderLayer", "LlamaDecoderLayer"]
    for named, expected in ((None, layers), (["LlamaDecoderLayer"], ["LlamaDecoderLayer"])):
        model = tiny.model()
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            state_dict_type="SHARDED_STATE_DICT",
            transformer_cls_names_to_wrap=named,
        )
        wrapped = []

        def prepare(module, wrapped=wrapped):
            wrapped.append(fsdp.fully_shard)
            return module

        accelerator = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin), prepare=prepare)
        prepare_sharding(accelerator, model)
        norm = type(projector_norm(model)).__name__
        assert plugin.transformer_cls_names_to_wrap == sorted([*expected, norm])
        assert plugin.state_dict_type.name == "FULL_STATE_DICT"
        plain = fsdp.fully_shard
        assert accelerator.prepare(model) is model
        assert wrapped[0] is not plain and fsdp.fully_shard is plain


def test_fsdp_gathers_the_gain_in_float32_and_other_layers_in_the_precision_of_steps():
    model = tiny.model()
    inner = model.model.multi_modal_projector
    half = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)

    def prepare(model):
        for module in (inner.norm, inner.linear_1):
            fsdp.fully_shard(module, mp_policy=half)
        return model

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    accelerator = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin), prepare=prepare)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        prepare_sharding(accelerator, model)
        accelerator.prepare(model)
        for module, dtype in ((inner.norm, torch.float32), (inner.linear_1, torch.bfloat16)):
            module.unshard()
            assert {parameter.dtype for parameter in module.parameters()} == {dtype}
    finally:
        dist.destroy_process_group()


def test_weights_are_read_into_a_model_that_fsdp_divides(checkpoint):
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint)
    expected = training.weights(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        fsdp.fully_shard(model)
        load_sharded(model, checkpoint)
        found = {name: part.full_tensor().detach() for name, part in model.named_parameters()}
    finally:
        dist.destroy_process_group()
    training.assert_equal(found, expected)


ARMS = ("none", "unit", "aligned", "gwc")


@pytest.fixture(scope="module")
def of_arms(tmp_path_factory):
    """A checkpoint's configuration as each arm, with an RMS norm but for the one without."""
    fields = {
        "none": dict(projector_norm="none"),
        "unit": dict(projector_gain_init="one", gradient_compensation="none"),
        "aligned": dict(gradient_compensation="none"),
        "gwc": {},
    }
    return {
        arm: tiny.config(**{"projector_norm": "rms_norm", **own}) for arm, own in fields.items()
    }


@pytest.mark.parametrize("asked", [None, *ARMS])
@pytest.mark.parametrize("stored", ARMS)
def test_a_configuration_becomes_the_arm_that_is_asked_for(tmp_path, of_arms, stored, asked):
    config = of_arms[stored]
    before = config.to_dict()
    opened = SimpleNamespace(config=config, name=str(tmp_path))
    found = config_of_arm(opened, asked)
    arm = asked or stored
    assert arm_of(found) == arm and config.to_dict() == before and found is not config
    # Without a norm there was none to keep.
    norms = {"none": "none"} | dict.fromkeys(ARMS[1:], "rms_norm")
    kept = "layer_norm" if stored == "none" and arm != "none" else norms[arm]
    assert found.projector_norm == kept
    if arm != stored:
        neutral = dict(projector_gain_init="text_norm", gradient_compensation="global")
        of_arm = {"unit": dict(projector_gain_init="one", gradient_compensation="none")}
        of_arm["aligned"] = dict(gradient_compensation="none")
        for name, value in {**neutral, **of_arm.get(arm, {})}.items():
            assert getattr(found, name) == value
    (tmp_path / "training.json").write_text("{}")
    if arm == stored or {arm, stored} == {"aligned", "gwc"}:
        assert arm_of(config_of_arm(opened, asked)) == arm
    else:
        with pytest.raises(ValueError, match=f"trained as arm '{stored}'; arm '{asked}' would"):
            config_of_arm(opened, asked)


@pytest.mark.parametrize("arm", [None, *ARMS])
def test_a_gain_is_kept_unless_the_arm_has_another(tmp_path, checkpoint, arm):
    args = training.settings(tmp_path, arm=arm)
    args.model_init_kwargs = {"dtype": "float32"}
    opened = open_checkpoint(checkpoint)
    model = load_model(opened, args, RATES)
    assert model.name_or_path == model.config.name_or_path == str(checkpoint)
    assert arm_of(model.config) == (arm or "gwc")
    norm = projector_norm(model)
    if arm == "none":
        assert not [*norm.parameters()]
    elif arm == "unit":
        assert torch.equal(norm.weight, torch.ones(32)) and not norm.bias.any()
    else:
        stored = NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint)
        assert torch.equal(norm.weight, projector_norm(stored).weight)
    assert type(model) is NormAlignLlavaForConditionalGeneration


def test_what_a_dry_run_cannot_count_is_refused(tmp_path, checkpoint):
    args = training.settings(tmp_path, dry_run=True)
    args.model_init_kwargs = {"dtype": "float32"}
    eight_bits = BitsAndBytesConfig(load_in_8bit=True)
    with pytest.raises(ValueError, match="dry_run cannot count load_in_8bit"):
        load_model(open_checkpoint(checkpoint), args, RATES, eight_bits, use_peft=True)


@pytest.mark.parametrize("bf16", [False, True])
def test_the_settings_of_4_bits_are_copied_and_products_are_in_the_precision_of_steps(
    tmp_path, checkpoint, bf16
):
    args = training.settings(tmp_path, dry_run=True, bf16=bf16)
    args.model_init_kwargs = {"dtype": "float32", "revision": "main"}
    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float16)
    given = settings.to_dict()
    rates = {**RATES, "language": 0.0}
    model = load_model(open_checkpoint(checkpoint), args, rates, settings)
    assert settings.to_dict() == given
    products = {m.compute_dtype for m in model.modules() if type(m).__name__ == "Linear4bit"}
    assert products == {torch.bfloat16 if bf16 else torch.float32}
    named = model.named_modules()
    quantized = {name for name, module in named if type(module).__name__ == "Linear4bit"}
    assert len(quantized) == 2 * 7  # two layers of the decoder
    assert all(name.startswith("model.language_model.layers.") for name in quantized)
    assert not model.is_quantized  # which transformers would refuse to train
    assert not any(parameter.requires_grad for parameter in model.parameters())
    args.arm = "unit"  # a gain that is not read need not be set
    beside = load_model(open_checkpoint(checkpoint), args, rates, settings, use_peft=True)
    assert beside.is_quantized  # for PEFT


def test_a_dry_run_leaves_no_table_without_values_to_later_quantization(
    tmp_path, checkpoint, monkeypatch
):
    tables = bitsandbytes.functional.name2qmap
    monkeypatch.delitem(tables, "dynamic", raising=False)
    args = training.settings(tmp_path, dry_run=True)
    args.model_init_kwargs = {"dtype": "float32"}
    twice = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True)
    load_model(open_checkpoint(checkpoint), args, {**RATES, "language": 0.0}, twice)
    assert torch.equal(tables["dynamic"], bitsandbytes.functional.create_dynamic_map())


def test_states_that_are_loaded_leave_quantized_and_other_frozen_weights(tmp_path, checkpoint):
    args = training.settings(tmp_path)
    rates = {**dict.fromkeys(RATES, 0.0), "norm": 1e-3}
    args.model_init_kwargs = {"dtype": "float32"}
    settings = BitsAndBytesConfig(load_in_4bit=True)
    model = load_model(open_checkpoint(checkpoint), args, rates, settings)
    freeze(model, rates)
    before = training.weights(model)
    plain = NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint)
    model.load_state_dict({name: value + 1 for name, value in plain.state_dict().items()}, False)
    names = {f"model.multi_modal_projector.norm.{name}" for name in ("weight", "bias")}
    assert training.moved(before, model) == names


@pytest.mark.parametrize("size", [20_000.0, -20_000.0, float("nan")])
def test_hidden_states_near_the_end_of_float16_of_either_sign_turn_it_off(size):
    model = tiny.model()
    cpu = torch.device("cpu")
    Accelerator(cpu=True)  # earlier options have made accelerate forget its state
    model.config.quantization_config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_compute_dtype=torch.float16
    )
    model.packed = bitsandbytes.nn.Linear4bit(4, 4, compute_dtype=torch.float16)
    assert settle_float16(model, cpu, tiny.inputs()).fp16
    with torch.no_grad():
        model.model.multi_modal_projector.linear_2.bias.fill_(12_000.0)
    assert settle_float16(model, cpu, tiny.inputs()).fp16  # it is below a quarter of 65,504
    model.frozen = nn.Linear(2, 2, dtype=torch.bfloat16).requires_grad_(False)
    with torch.no_grad():
        model.model.multi_modal_projector.linear_2.bias.fill_(size)
    settled = settle_float16(model, cpu, tiny.inputs())
    assert (settled.bf16, settled.fp16, settled.is_tried) == (False, False, False)
    assert model.config.quantization_config.bnb_4bit_compute_dtype == torch.float32
    assert model.packed.compute_dtype == model.frozen.weight.dtype == torch.float32
    assert ("overflow" in settled.because) == math.isnan(size)


def test_without_options_a_checkpoint_is_loaded_in_its_own_precision(tmp_path, checkpoint):
    args = training.settings(tmp_path)
    args.model_init_kwargs = None
    model = load_model(open_checkpoint(checkpoint), args, RATES)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def of_language(config, **rates):
    """The configuration of adapters that is used of another one, with these learning rates."""
    rates = {**dict.fromkeys(RATES, 0.0), "language": 1e-4, **rates}
    return language_adapter(config, tiny.config(tied=False), rates)


@pytest.mark.parametrize(
    ("rates", "saved"),
    [
        ({}, None),
        ({"norm": 1e-3}, ["multi_modal_projector"]),
        ({"projector": 1e-3}, ["multi_modal_projector"]),
        ({"vision": 1e-3}, ["vision_tower"]),
        ({"vision": 1e-3, "norm": 1e-3}, ["vision_tower", "multi_modal_projector"]),
    ],
)
def test_what_is_trained_in_full_beside_adapters_is_saved_with_them(rates, saved):
    assert of_language(LoraConfig(), **rates).modules_to_save == saved


def test_the_configuration_of_adapters_is_a_copy_to_its_last_part():
    given = LoraConfig(trainable_token_indices={"embed_tokens": [5]}, modules_to_save=["lm_head"])
    used = of_language(given, norm=1e-3)
    used.trainable_token_indices["embed_tokens"].append(6)
    assert given.trainable_token_indices == {"embed_tokens": [5]}
    assert given.modules_to_save == ["lm_head"] and given.exclude_modules is None


def test_tokens_are_those_that_the_embeddings_have():
    last = tiny.VOCABULARY - 1
    assert of_language(LoraConfig(trainable_token_indices=[0, last])).r
    with pytest.raises(ValueError, match=f"names token {last + 1}, but this would have no effect"):
        of_language(LoraConfig(trainable_token_indices=[last + 1]))


def test_what_a_stored_configuration_says_of_its_origin_is_no_setting():
    stored = LoraConfig(r=3, base_model_name_or_path="/here/model")
    stored.revision = "v2"
    stored.peft_version = "0.1"
    stored.runtime_config = LoraRuntimeConfig(ephemeral_gpu_offload=True)
    assert of_language(stored).r == 3


def test_modules_that_hold_those_with_learning_rates_of_their_own_are_not_saved():
    for name in ("model", "multi_modal_projector.linear_1", "encoder.layers.0"):
        with pytest.raises(ValueError, match=f"modules_to_save names {name}: model"):
            of_language(LoraConfig(modules_to_save=[name]))
    for rates in ({"norm": 1e-3}, {"projector": 1e-3}):  # which saves it anyway
        asked = LoraConfig(modules_to_save=["multi_modal_projector"])
        assert of_language(asked, **rates).modules_to_save == ["multi_modal_projector"]


def test_adapters_of_another_kind_or_without_a_learning_rate_are_refused():
    with pytest.raises(ValueError, match="peft_config is a IA3Config"):
        of_language(IA3Config())
    with pytest.raises(ValueError, match="its learning rate is 0"):
        of_language(LoraConfig(), language=0.0)


def test_what_is_quantized_is_not_trained_in_full_and_what_is_not_may_be():
    four_bits = BitsAndBytesConfig(load_in_4bit=True)
    config = tiny.config(tied=False)
    rate = 1e-5
    for saved in (None, ["embed_tokens"], ["lm_head"], ["norm"]):
        check_quantized(config, four_bits, rate, LoraConfig(modules_to_save=saved))
    check_quantized(config, four_bits, 0.0, None)
    for saved in ("gate_proj", "mlp"):
        with pytest.raises(ValueError, match=f"{saved}. It would be quantized"):
            check_quantized(config, four_bits, rate, LoraConfig(modules_to_save=[saved]))
    with pytest.raises(ValueError, match="language_learning_rate 1e-05 would train"):
        check_quantized(config, four_bits, rate, None)
    four_bits.llm_int8_skip_modules = ["lm_head"]
    with pytest.raises(ValueError, match="llm_int8_skip_modules is set here"):
        check_quantized(config, four_bits, rate, LoraConfig())


def test_patterns_name_modules_as_peft_reads_them():
    ahead = r"(?!.*up_proj).*_proj"  # which names what it leaves out
    assert of_language(LoraConfig(target_modules=ahead)).target_modules == ahead
    listed = of_language(LoraConfig(target_modules="q_proj, v_proj"))  # as TRL writes a list
    assert listed.target_modules == {"q_proj", "v_proj"}
    first = r"model\.language_model\.layers\.0\..*"
    excluded = of_language(LoraConfig(exclude_modules=first)).exclude_modules
    assert re.fullmatch(excluded, "model.language_model.layers.0.mlp.up_proj")
    assert not re.fullmatch(excluded, "model.language_model.layers.1.mlp.up_proj")
    all_of_them = of_language(LoraConfig()).target_modules
    assert of_language(LoraConfig(target_modules="all-linear")).target_modules == all_of_them
    for pattern in (
        *(r".*\.[qkv]_[proj]+", r".*\bdown_proj", r".*layers\.\d\D*v_proj"),
        r".*\.(q|kv)_proj",  # of models that have the one or the other
    ):
        assert of_language(LoraConfig(target_modules=pattern)).target_modules == pattern
    with pytest.raises(ValueError, match="peft_config names proj, but this would have no effect"):
        of_language(LoraConfig(exclude_modules=["proj"]))  # the end of names, not a name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("use_peft", [True, False])
def test_weights_that_are_not_read_have_the_precision_of_those_that_are(
    tmp_path, checkpoint, dtype, use_peft
):
    """What is trained in full is float32, the norm always, the rest as asked."""
    rates = {**RATES, "vision": 0.0}
    loaded = []
    for dry_run in (True, False):
        args = training.settings(tmp_path, dry_run=dry_run)
        args.model_init_kwargs = {"dtype": dtype}
        model = load_model(open_checkpoint(checkpoint), args, rates, use_peft=use_peft)
        loaded.append({name: value.dtype for name, value in model.named_parameters()})
        assert {value.is_meta for value in model.parameters()} == {dry_run}
    assert loaded[0] == loaded[1]
    frozen = ["vision", "language"] if use_peft else ["vision"]
    for name, found in loaded[1].items():
        is_frozen = module_of(name) in frozen
        assert found == (getattr(torch, dtype) if is_frozen else torch.float32), name


def test_a_layer_that_the_encoder_lacks_is_refused_before_weights_are_loaded(tmp_path):
    config = tiny.config()
    config.vision_feature_layer = -9
    with pytest.raises(ValueError, match="feature_layer -9 does not exist"):
        config_of_arm(SimpleNamespace(config=config, name=str(tmp_path)), None)


def test_a_model_of_another_kind_leads_to_building_one():
    check_architecture("normalign_llava", "mine")
    for kind in ("llava", None):
        with pytest.raises(ValueError, match=f"mine is a {kind!r} model.*normalign build"):
            check_architecture(kind, "mine")


@pytest.mark.parametrize(
    ("stored", "asked", "steps", "expected"),
    [
        ("bfloat16", "auto", "bf16", "bfloat16"),
        ("bfloat16", None, "bf16", "bfloat16"),
        ("bfloat16", "auto", None, "float32"),
        ("float16", "auto", "bf16", "float32"),
        ("float16", "auto", "fp16", "float16"),
        ("float32", "auto", "bf16", "float32"),
        (None, "auto", "bf16", "bfloat16"),  # the language model's, which is named alone
        ("float32", "bfloat16", "bf16", "bfloat16"),
        ("float32", "bfloat16", None, "bfloat16"),
        ("bfloat16", torch.float32, "bf16", "float32"),
        ("bfloat16", torch.float16, "fp16", "float16"),
        ("bfloat16", "float16", "bf16", None),
        ("bfloat16", "bfloat16", "fp16", None),
    ],
)
def test_the_precision_of_what_is_frozen(tmp_path, stored, asked, steps, expected):
    config = NormAlignLlavaConfig(text_config=tiny.text_config(dtype="bfloat16"))
    config.dtype = stored
    own = {"bf16": False} | ({steps: True} if steps else {})
    args = training.settings(tmp_path, **own)
    args.model_init_kwargs = {"dtype": asked} if asked else None
    if expected:
        assert frozen_dtype(config, args) == expected
    else:
        autocast = {"bf16": "bfloat16", "fp16": "float16"}[steps]
        with pytest.raises(ValueError, match=f"steps in {autocast} do not mix"):
            frozen_dtype(config, args)
