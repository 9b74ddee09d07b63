"""Merging loses nothing of an adapter, whatever PEFT trained: compared with PEFT's own model."""

import json
import math
import re
import shutil
from functools import partial

import pytest
import tiny
import tiny_parts
import torch
from adapters import LINEARS, load, logits, make_adapter
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file
from stored import assert_merged, store, weights
from torch import nn
from transformers import (
    BitsAndBytesConfig,
    GPT2Config,
    LlavaForConditionalGeneration,
    MixtralConfig,
)
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding
from transformers.trainer_utils import sort_checkpoints

from normalign_llava.assembly.adapter import open_adapter
from normalign_llava.assembly.base_tensors import BaseTensors
from normalign_llava.assembly.build import build_checkpoint, retrofit_checkpoint
from normalign_llava.assembly.merge import merge_adapter
from normalign_llava.assembly.merged_tensors import (
    MergedLayer,
    MergedTensors,
    check_settings,
    relative_change,
)
from normalign_llava.checkpoint.files import ADAPTER_WEIGHTS


pytestmark = pytest.mark.slow

Q_PROJ = r".*\.language_model\..*\.q_proj"
WITH_BIAS = r".*(vision_tower.*fc1|multi_modal_projector\.linear_1)"  # these have a bias
TOKENS = [5, 9, 30]
EMBEDDINGS = r".*\.embed_tokens"
EMBEDDINGS_NAME = "model.language_model.embed_tokens.weight"
HEAD = r"lm_head"
BOTH = ["embed_tokens", "lm_head"]
TOWER = "model-vision_tower-00001-of-00001.safetensors"


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """The folders of checkpoints by name: tied, untied, experts, conv1d."""
    root = tmp_path_factory.mktemp("bases")
    vision = tiny_parts.vision(root / "vision", "siglip")
    sizes = {"hidden_size": 64, "intermediate_size": 128}
    language_options = {
        "tied": {**sizes, "tied": True},
        "untied": {**sizes, "tied": False},
        "experts": {
            **sizes,
            "cls": MixtralConfig,
            "num_local_experts": 3,
            "num_experts_per_tok": 2,
            "tied": False,
        },
        "conv1d": {"tied": True, "cls": GPT2Config, "hidden_size": 32},
    }
    base_paths = {}
    for base_name, options in language_options.items():
        language = tiny_parts.language(root / f"{base_name}-language", **options)
        base_paths[base_name] = root / base_name
        build_checkpoint(vision, language, base_paths[base_name])
    return base_paths


@pytest.fixture
def adapter_path(tmp_path):
    """Where a test writes its adapter."""
    return tmp_path / "adapter"


@pytest.fixture
def output_path(tmp_path):
    return tmp_path / "merged"


def assert_close(merged_logits, expected) -> None:
    # Seen at most 2e-5 of up to 40, from the order of sums.
    torch.testing.assert_close(merged_logits, expected, rtol=1e-5, atol=3e-5)


TIED_RESULTS = [
    ("tied", {"bias": "all", "lora_dropout": 0.5}),
    ("tied", {"bias": "lora_only", "target_modules": WITH_BIAS, "modules_to_save": None}),
    ("tied", {"lora_bias": True, "target_modules": WITH_BIAS, "modules_to_save": None}),
    ("tied", {"target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True}),
    ("tied", {"trainable_token_indices": TOKENS}),
    ("tied", {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}),
    ("tied", {"rank_pattern": {"q_proj": 7}, "alpha_pattern": {"v_proj": 31, "fc1": 3}}),
    ("tied", {"target_modules": r".*patch_embedding"}),
    (
        "tied",
        {
            "target_modules": [],
            "target_parameters": ["layers.1.self_attn.q_proj.weight"],
        },
    ),
    ("conv1d", {"target_modules": r".*language_model.*c_attn", "fan_in_fan_out": True}),
    ("conv1d", {"target_modules": r".*language_model.*c_fc", "bias": "all"}),
]
"""A base and what is trained. Embeddings and head are one tensor in the result."""

UNTIED_RESULTS = [
    ("untied", {"bias": "all", "modules_to_save": None}),
    ("untied", {"bias": "all", "use_dora": True}),
    ("tied", {"target_modules": EMBEDDINGS}),
    ("tied", {"target_modules": EMBEDDINGS, "use_dora": True}),
    ("untied", {"target_modules": EMBEDDINGS}),
    ("tied", {"target_modules": HEAD}),
    ("untied", {"target_modules": HEAD}),
    ("tied", {"target_modules": BOTH}),
    ("untied", {"target_modules": BOTH, "use_rslora": True}),
    ("tied", {"trainable_token_indices": {"embed_tokens": TOKENS, "lm_head": [7]}}),
    ("untied", {"trainable_token_indices": TOKENS}),
    ("untied", {"trainable_token_indices": {"embed_tokens": [4], "lm_head": TOKENS}}),
    ("tied", {"modules_to_save": ["embed_tokens"]}),
    ("tied", {"modules_to_save": ["lm_head"]}),
    ("untied", {"modules_to_save": BOTH}),
    ("tied", {"modules_to_save": ["lm_head"], "bias": "all"}),
    (
        "experts",
        {
            "target_modules": Q_PROJ,
            "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
        },
    ),
]
"""A base and what is trained. Embeddings and head are two tensors in the result."""


def assert_merges_all(base_path, adapter_path, output_path, lora_options):
    """Merges what was trained, checks what the result computes, and returns the result."""
    trained = make_adapter(base_path, adapter_path, **lora_options)
    expected = logits(trained, base_path)
    base_logits = logits(load(base_path), base_path)
    assert (base_logits - expected).abs().max() > 1e-2

    report = merge_adapter(adapter_path, output_path)
    assert report.difference < 1e-5
    merged = load(output_path)
    assert_close(logits(merged, base_path), expected)
    return merged


@pytest.mark.parametrize(("base_name", "lora_options"), TIED_RESULTS)
def test_everything_that_peft_trained_is_in_a_tied_result(
    bases, adapter_path, output_path, base_name, lora_options
):
    merged = assert_merges_all(bases[base_name], adapter_path, output_path, lora_options)
    assert merged.lm_head.weight is merged.get_input_embeddings().weight
    assert "lm_head.weight" not in weights(output_path)


@pytest.mark.parametrize(("base_name", "lora_options"), UNTIED_RESULTS)
def test_everything_that_peft_trained_is_in_an_untied_result(
    bases, adapter_path, output_path, base_name, lora_options
):
    merged = assert_merges_all(bases[base_name], adapter_path, output_path, lora_options)
    assert merged.lm_head.weight is not merged.get_input_embeddings().weight
    assert "lm_head.weight" in weights(output_path)


def adapter_tensors(adapter_path):
    return load_file(adapter_path / ADAPTER_WEIGHTS)


def tensor_name_with_end(adapter_path, name_end):
    """The name of a tensor in an adapter's file, by its end."""
    names = [name for name in adapter_tensors(adapter_path) if name.endswith(name_end)]
    assert len(names) == 1, names
    return names[0]


def replace_tensors(adapter_path, replaced: dict) -> None:
    """Replaces tensors of an adapter's file."""
    tensors = adapter_tensors(adapter_path) | replaced
    save_file(tensors, adapter_path / ADAPTER_WEIGHTS, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("base_name", "lora_options", "module_name"),
    [
        ("tied", {"target_modules": EMBEDDINGS}, "embed_tokens"),
        ("untied", {"target_modules": EMBEDDINGS}, "embed_tokens"),
        ("tied", {"target_modules": HEAD}, "lm_head"),
        ("untied", {"trainable_token_indices": TOKENS}, "embed_tokens.token_adapter"),
    ],
)
def test_embeddings_that_peft_saves_besides_are_used(
    bases, adapter_path, output_path, base_name, lora_options, module_name
):
    """Whatever they hold in the file, as PEFT loads them into its base."""
    base_path = bases[base_name]
    make_adapter(base_path, adapter_path, save_embedding_layers=True, **lora_options)
    changed_name = tensor_name_with_end(adapter_path, f"{module_name}.base_layer.weight")
    before = adapter_tensors(adapter_path)[changed_name]
    replace_tensors(adapter_path, {changed_name: before + torch.randn_like(before)})

    with_peft = PeftModel.from_pretrained(load(base_path), adapter_path).eval()
    expected = logits(with_peft, base_path)
    merge_adapter(adapter_path, output_path)
    assert_close(logits(load(output_path), base_path), expected)


@pytest.fixture
def saved_twice(bases, adapter_path):
    """An adapter with embeddings and head that are one in the base: their names in its file."""
    make_adapter(
        bases["tied"],
        adapter_path,
        save_embedding_layers=True,
        target_modules=Q_PROJ,
    )
    embeddings_name = tensor_name_with_end(adapter_path, "embed_tokens.weight")
    head_name = tensor_name_with_end(adapter_path, "lm_head.weight")
    saved = adapter_tensors(adapter_path)
    assert torch.equal(saved[embeddings_name], saved[head_name])
    return embeddings_name, head_name


def test_embeddings_that_are_the_head_and_are_saved_twice_alike_are_merged_once(
    saved_twice, adapter_path
):
    embeddings_name, head_name = saved_twice
    doubled = 2 * adapter_tensors(adapter_path)[embeddings_name]
    replace_tensors(adapter_path, {embeddings_name: doubled, head_name: doubled.clone()})
    opened = open_adapter(adapter_path)
    merged_tensors = MergedTensors(opened, BaseTensors(opened), torch.float32)
    merged = dict(merged_tensors)
    merged_tensors.check_complete()
    assert "lm_head.weight" not in merged
    assert torch.equal(merged[EMBEDDINGS_NAME], doubled)


def test_embeddings_that_are_the_head_and_are_saved_otherwise_are_refused(
    saved_twice, adapter_path
):
    embeddings_name, _ = saved_twice
    doubled = 2 * adapter_tensors(adapter_path)[embeddings_name]
    replace_tensors(adapter_path, {embeddings_name: doubled})
    opened = open_adapter(adapter_path)
    message = r"other values for .*embed_tokens.weight than for lm_head"
    with pytest.raises(ValueError, match=message):
        MergedTensors(opened, BaseTensors(opened), torch.float32)


def config_with(setting):
    lora_config = LoraConfig()
    setattr(lora_config, setting, "changed")
    return lora_config


@pytest.mark.parametrize(
    "setting",
    [
        "layers_to_transform",
        "layers_pattern",
        "exclude_modules",
        "target_modules",
        "modules_to_save",
        "bias",
        "r",
        "lora_alpha",
        "lora_dropout",
        "use_rslora",
        "use_dora",
        "fan_in_fan_out",
        "lora_bias",
        "rank_pattern",
        "alpha_pattern",
        "target_parameters",
        "trainable_token_indices",
        "ensure_weight_tying",
        "revision",
        "init_lora_weights",
        "loftq_config",
        "eva_config",
        "corda_config",
        "lora_ga_config",
        "task_type",
        "runtime_config",
        "modules_to_tie",
        "target_modules_to_tie",
        "megatron_core",
        "peft_type",
        "inference_mode",
        "auto_mapping",
        "base_model_name_or_path",
        "velora_config",
        "use_bdlora",
        "peft_version",
    ],
)
def test_settings_are_merged_if_their_effect_is_in_the_tensors(tmp_path, setting):
    check_settings(tmp_path, config_with(setting))


@pytest.mark.parametrize(
    "setting",
    [
        "layer_replication",
        "alora_invocation_tokens",
        "kasa_config",
        "use_qalora",
        "arrow_config",
        "megatron_config",
        "monteclora_config",
        "qalora_group_size",
    ],
)
def test_settings_are_refused_if_their_effect_is_not_in_the_tensors(tmp_path, setting):
    message = f"trained with {setting} 'changed'. It would be lost"
    with pytest.raises(ValueError, match=message):
        check_settings(tmp_path, config_with(setting))


def test_a_quantized_layer_whose_weight_is_turned_is_merged(bases, adapter_path, output_path):
    """GPT-2's layers have their weights transposed."""
    base_path = bases["conv1d"]
    quantization = {"load_in_4bit": True, "bnb_4bit_compute_dtype": "float32"}
    trained = make_adapter(
        base_path,
        adapter_path,
        quantization,
        target_modules=r".*language_model.*c_attn",
        fan_in_fan_out=True,
    )
    expected = logits(trained, base_path)
    merge_adapter(adapter_path, output_path, dtype="float32")
    assert_close(logits(load(output_path), base_path), expected)


def test_a_tensor_that_is_saved_twice_must_be_the_same(bases, adapter_path, output_path):
    """With `bias="all"`, PEFT saves biases of modules that are saved whole under two names."""
    make_adapter(bases["tied"], adapter_path, bias="all")
    bias_name = tensor_name_with_end(adapter_path, "modules_to_save.default.linear_1.bias")
    bias = adapter_tensors(adapter_path)[bias_name]
    replace_tensors(adapter_path, {bias_name: bias + 1})
    with pytest.raises(ValueError, match=r"two values for .*linear_1\.bias"):
        merge_adapter(adapter_path, output_path)
    assert not output_path.exists()


def test_an_adapter_that_is_stored_in_half_precision_is_merged_in_float32(
    bases, adapter_path, output_path
):
    make_adapter(bases["tied"], adapter_path)
    in_half = {}
    for tensor_name, tensor in adapter_tensors(adapter_path).items():
        in_half[tensor_name] = tensor.bfloat16()
    replace_tensors(adapter_path, in_half)
    merge_adapter(adapter_path, output_path)
    assert_merged(output_path, adapter_path, bases["tied"])


def test_a_head_that_training_changed_little_is_no_longer_tied(bases, adapter_path, output_path):
    make_adapter(bases["tied"], adapter_path, target_modules=HEAD)
    factor_name = tensor_name_with_end(adapter_path, "lm_head.lora_B.weight")
    factor = adapter_tensors(adapter_path)[factor_name]
    replace_tensors(adapter_path, {factor_name: factor * 1e-3})
    merge_adapter(adapter_path, output_path)

    merged = load(output_path)
    before = load(bases["tied"]).lm_head.weight
    largest_change = (merged.lm_head.weight - before).abs().max()
    assert 0 < largest_change < 1e-3 * before.abs().max()
    assert torch.equal(merged.get_input_embeddings().weight, before)


@pytest.mark.parametrize(
    ("trained_with", "settings", "message"),
    [
        pytest.param(
            {},
            {"layer_replication": [[0, 2], [1, 2]]},
            "layer_replication",
            id="layer_replication",
        ),
        pytest.param(
            {},
            {"alora_invocation_tokens": [5, 6]},
            "alora_invocation_tokens",
            id="alora_invocation_tokens",
        ),
        pytest.param(
            {},
            {"kasa_config": {}},
            "kasa_config",
            id="kasa_config",
        ),
        pytest.param(
            {},
            {"use_qalora": True},
            "use_qalora",
            id="use_qalora",
        ),
        pytest.param(
            {"lora_bias": True},
            {"lora_bias": True},
            "the base layer has no bias",
            id="lora_bias",
        ),
    ],
)
def test_what_cannot_be_merged_is_refused_by_name(
    bases, tmp_path, adapter_path, output_path, trained_with, settings, message
):
    """`layer_replication`, for one, adds layers; KaSA truncates the base's weights in training."""
    make_adapter(bases["tied"], adapter_path, modules_to_save=None, **trained_with)
    config_path = adapter_path / "adapter_config.json"
    stored_settings = json.loads(config_path.read_text())
    config_path.write_text(json.dumps(stored_settings | settings))
    with pytest.raises(ValueError, match=message):
        merge_adapter(adapter_path, output_path)
    assert [folder.name for folder in tmp_path.iterdir()] == ["adapter"]


def test_a_layer_of_another_kind_is_refused(tmp_path, adapter_path, output_path):
    """SigLIP's pooling head, which LLaVA does not use, has torch's attention."""
    torch.manual_seed(0)
    llava_config = tiny.llava(vision="siglip").config
    llava_config.vision_config.vision_use_head = True
    base = tiny_parts.llava(tmp_path / "base", LlavaForConditionalGeneration(llava_config))
    make_adapter(
        base,
        adapter_path,
        target_modules=r".*head\.attention",
        modules_to_save=None,
    )
    with pytest.raises(ValueError, match=r"vision_tower.*head\.attention"):
        merge_adapter(adapter_path, output_path, base=base)
    assert not output_path.exists()


def test_a_tensor_that_is_left_out_is_an_error(bases, adapter_path):
    """As it would be if a later version forgot one: each is counted as it is written."""
    make_adapter(bases["tied"], adapter_path, bias="all")
    opened = open_adapter(adapter_path)
    merged_tensors = MergedTensors(opened, BaseTensors(opened), torch.float32)
    stored_count = len(adapter_tensors(adapter_path))
    message = f"{stored_count} tensors of .*adapter_model.safetensors"
    with pytest.raises(ValueError, match=message):
        merged_tensors.check_complete()

    written_names = []
    remaining = iter(merged_tensors)
    for _ in range(len(merged_tensors.layout) - 1):
        tensor_name, _ = next(remaining)
        written_names.append(tensor_name)
    with pytest.raises(ValueError, match="1 tensors have no value"):
        merged_tensors.check_complete()

    for tensor_name, _ in remaining:
        written_names.append(tensor_name)
    merged_tensors.check_complete()
    assert sorted(written_names) == sorted(merged_tensors.layout)


def share_of_change(changed, expected) -> float:
    """The largest change, as a share of the largest number."""
    largest_change = (changed - expected).abs().max().item()
    if largest_change == 0:
        return 0.0
    return largest_change / expected.abs().max().item()


OUTPUTS = {
    "a": torch.tensor([4.0, -8.0]),
    "b": torch.tensor([1.0, 0.5]),
}


@pytest.mark.parametrize(
    ("tensor_name", "changed_values", "expected"),
    [
        ("a", [3.0, -8.0], 1 / 8),
        ("a", [4.0, -6.0], 2 / 8),
        ("b", [1.25, 0.5], 1 / 4),
        ("b", [1.0, 0.25], 1 / 4),
    ],
)
def test_a_change_is_a_share_of_the_largest_number_of_its_tensor(
    tensor_name, changed_values, expected
):
    changed = OUTPUTS | {tensor_name: torch.tensor(changed_values)}
    assert relative_change(changed, OUTPUTS) == expected

    in_half = {name: tensor.half() for name, tensor in changed.items()}
    assert relative_change(in_half, OUTPUTS) == expected


def test_of_several_changes_the_largest_share_counts():
    changed = {
        "a": torch.tensor([3.0, -8.0]),
        "b": torch.tensor([1.5, 0.5]),
    }
    assert relative_change(changed, OUTPUTS) == 0.5


def test_what_is_the_same_has_no_change():
    same = {tensor_name: tensor.clone() for tensor_name, tensor in OUTPUTS.items()}
    assert relative_change(same, OUTPUTS) == 0.0
    assert relative_change({}, {}) == 0.0


def test_whole_numbers_empty_tensors_and_zeros_have_no_share():
    expected = {
        "whole": torch.tensor([1]),
        "empty": torch.zeros(0),
        "zeros": torch.zeros(2),
    }
    changed = {tensor_name: tensor + 1 for tensor_name, tensor in expected.items()}
    assert relative_change(changed, expected) == 0.0


def test_a_change_that_is_not_a_number_is_not_taken_for_none():
    """Outputs may overflow. Infinity less infinity is NaN, and merging is then refused."""
    expected = {
        "a": torch.tensor([1.0, torch.inf]),
        "b": torch.tensor([1.0, 2.0]),
    }
    changed = {
        "a": torch.tensor([1.5, torch.inf]),
        "b": torch.tensor([1.5, 2.0]),
    }
    assert math.isnan(relative_change(changed, expected))


def test_infinite_outputs_that_stay_have_no_change():
    expected = {
        "a": torch.tensor([1.0, torch.inf]),
        "b": torch.tensor([1.0, 2.0]),
    }
    changed = {
        "a": expected["a"].clone(),
        "b": torch.tensor([1.5, 2.0]),
    }
    assert relative_change(changed, expected) == 0.25


def merge_in_float32_and(dtype, adapter_path):
    """Merges an adapter twice. Returns the report in `dtype`, and the weights of both merges."""
    exact_path = adapter_path.with_name("exact")
    rounded_path = adapter_path.with_name("rounded")
    merge_adapter(adapter_path, exact_path, dtype="float32")
    report = merge_adapter(adapter_path, rounded_path, dtype=dtype)
    return report, weights(exact_path), weights(rounded_path)


@pytest.fixture
def base_of_few_digits(bases, tmp_path):
    """A copy of the untied base whose numbers both half precisions hold, except the norm's."""
    base_path = shutil.copytree(bases["untied"], tmp_path / "base")
    rounded = {}
    for tensor_name, tensor in weights(base_path).items():
        if "projector.norm" in tensor_name:
            rounded[tensor_name] = tensor.half().float()
        else:
            rounded[tensor_name] = tensor.half().bfloat16().float().half().float()
    store(base_path, rounded)
    return base_path


def largest_output_change(exact, written) -> float:
    """The largest share by which layers with an adapter change outputs, computed in float64.

    Checks that other tensors do not change.
    """
    torch.manual_seed(1)
    largest_share = 0.0
    for tensor_name, tensor in exact.items():
        exact_weight = tensor.double()
        written_weight = written[tensor_name].double()
        if re.fullmatch(LINEARS + r"\.weight", tensor_name):
            inputs = torch.randn(500, tensor.shape[1], dtype=torch.float64)
            output_share = share_of_change(inputs @ written_weight.T, inputs @ exact_weight.T)
            largest_share = max(largest_share, output_share)
        elif "projector.norm" not in tensor_name:
            assert share_of_change(written_weight, exact_weight) < 1e-6
    return largest_share


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_difference_is_the_change_of_outputs_by_what_was_written(
    base_of_few_digits, adapter_path, dtype
):
    make_adapter(base_of_few_digits, adapter_path, modules_to_save=None)
    report, exact, written = merge_in_float32_and(dtype, adapter_path)
    expected = largest_output_change(exact, written)
    assert expected > 1e-4
    assert expected / 3 < report.difference < expected * 3


def test_there_is_no_difference_in_float32(base_of_few_digits, adapter_path):
    make_adapter(base_of_few_digits, adapter_path, modules_to_save=None)
    report, exact, written = merge_in_float32_and("float32", adapter_path)
    assert largest_output_change(exact, written) == 0
    assert report.difference < 1e-5


def test_the_difference_counts_tensors_without_an_adapter(bases, adapter_path):
    make_adapter(bases["tied"], adapter_path, target_modules=Q_PROJ)
    report, exact, written = merge_in_float32_and("bfloat16", adapter_path)
    expected = 0.0
    for tensor_name, tensor in exact.items():
        if "q_proj" not in tensor_name or "vision" in tensor_name:
            rounding = share_of_change(written[tensor_name].double(), tensor.double())
            expected = max(expected, rounding)
    assert report.difference == pytest.approx(expected, rel=1e-5)


def test_the_difference_counts_tokens_that_were_trained(bases, tmp_path, adapter_path):
    # bfloat16 holds this base exactly, so that nothing else is rounded.
    base_path = shutil.copytree(bases["untied"], tmp_path / "base")
    base_weights = {}
    for tensor_name, tensor in weights(base_path).items():
        base_weights[tensor_name] = tensor.bfloat16().float()
    store(base_path, base_weights)

    trained_tokens = [5, 30]  # which are not among the inputs that are drawn
    make_adapter(
        base_path,
        adapter_path,
        target_modules=Q_PROJ,
        modules_to_save=None,
        trainable_token_indices=trained_tokens,
    )
    without_effect = {}
    for tensor_name, tensor in adapter_tensors(adapter_path).items():
        if "lora_B" in tensor_name:
            without_effect[tensor_name] = torch.zeros_like(tensor)
    replace_tensors(adapter_path, without_effect)
    report, exact, written = merge_in_float32_and("bfloat16", adapter_path)

    changed_names = []
    for tensor_name, tensor in exact.items():
        if not torch.equal(tensor, written[tensor_name].float()):
            changed_names.append(tensor_name)
    assert changed_names == [EMBEDDINGS_NAME]

    exact_embeddings = exact[EMBEDDINGS_NAME].float()
    written_embeddings = written[EMBEDDINGS_NAME].float()
    rounding = (written_embeddings - exact_embeddings).abs().max().item()
    largest_number = exact_embeddings.abs().max().item()
    largest_trained = exact_embeddings[trained_tokens].abs().max().item()
    assert rounding / largest_number <= report.difference
    assert report.difference <= rounding / largest_trained


@pytest.mark.parametrize(
    "lora_options",
    [
        pytest.param(
            {"target_modules": [], "target_parameters": ["experts.weight"]},
            id="experts",
        ),
        pytest.param(
            {"target_modules": ["other"], "modules_to_save": ["experts"]},
            id="saved whole",
        ),
    ],
)
def test_the_difference_of_what_takes_several_inputs_or_is_whole_is_its_tensors_own(lora_options):
    torch.manual_seed(0)
    experts = nn.Module()
    experts.weight = nn.Parameter(torch.randn(3, 4, 8))
    model = nn.ModuleDict({"experts": experts, "other": nn.Linear(2, 2)})
    lora_config = LoraConfig(**lora_options, init_lora_weights=False)
    wrapper = PeftModel(model, lora_config).base_model.model["experts"]
    base_tensors = {"experts.weight": experts.weight}
    layer = MergedLayer("experts", wrapper, base_tensors.__getitem__)
    assert layer.error < 1e-6

    merged_weight = layer.values["weight"].clone()
    written_weight = merged_weight.bfloat16()
    rounding = (written_weight.float() - merged_weight).abs().max()
    expected = (rounding / merged_weight.abs().max()).item()
    difference = layer.difference({"weight": written_weight})
    assert difference > 1e-4
    assert difference == pytest.approx(expected, rel=1e-2)


def test_the_difference_of_embeddings_that_are_scaled_is_that_of_what_they_hold():
    """Gemma's scale is computed from its configuration, so it has no value on meta."""
    with torch.device("meta"):
        embeddings = Gemma3TextScaledWordEmbedding(20, 8, padding_idx=0, embed_scale=3.0)
        model = nn.ModuleDict({"table": embeddings, "other": nn.Linear(2, 2)})
        adapted = PeftModel(model, LoraConfig(r=2, target_modules=["table"]))
    wrapper = adapted.base_model.model["table"]
    torch.manual_seed(0)
    factors = {
        "lora_embedding_A.default": torch.randn(2, 20),
        "lora_embedding_B.default": torch.randn(8, 2),
    }
    wrapper.load_state_dict(factors, strict=False, assign=True)
    base_tensors = {"table.weight": torch.randn(20, 8)}
    layer = MergedLayer("table", wrapper, base_tensors.__getitem__)
    assert layer.error < 1e-6

    written = {"weight": layer.values["weight"].bfloat16()}
    assert 1e-4 < layer.difference(written) < 1e-2


def make_cancelling_adapter(base_path, adapter_path, remaining_share) -> None:
    """An adapter that cancels its layer up to a share: products and weights round otherwise."""
    layer_name = "layers.0.self_attn.q_proj"
    make_adapter(
        base_path,
        adapter_path,
        r=64,
        lora_alpha=64,
        target_modules=rf".*language_model.{layer_name}",
        modules_to_save=None,
    )
    base_weight = weights(base_path)[f"model.language_model.{layer_name}.weight"]
    torch.manual_seed(3)
    rotation = torch.linalg.qr(torch.randn(64, 64)).Q
    cancelling = -(1 - remaining_share) * base_weight @ rotation.T
    factors = {
        tensor_name_with_end(adapter_path, "lora_A.weight"): rotation.contiguous(),
        tensor_name_with_end(adapter_path, "lora_B.weight"): cancelling.contiguous(),
    }
    replace_tensors(adapter_path, factors)


def test_an_adapter_that_rounding_changes_is_refused(bases, tmp_path, adapter_path, output_path):
    make_cancelling_adapter(bases["tied"], adapter_path, remaining_share=1e-5)
    with pytest.raises(ValueError, match="Merging changed outputs of .*q_proj by"):
        merge_adapter(adapter_path, output_path)
    assert [folder.name for folder in tmp_path.iterdir()] == ["adapter"]


def test_an_adapter_that_rounding_changes_little_is_merged(bases, adapter_path, output_path):
    make_cancelling_adapter(bases["tied"], adapter_path, remaining_share=1e-2)
    merge_adapter(adapter_path, output_path)
    layer_weight = "model.language_model.layers.0.self_attn.q_proj.weight"
    expected = 1e-2 * weights(bases["tied"])[layer_weight]
    torch.testing.assert_close(weights(output_path)[layer_weight], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("overflowing", [1e5, -1e5])
def test_one_infinite_number_among_finite_ones_is_refused(
    bases, adapter_path, output_path, overflowing
):
    make_adapter(bases["tied"], adapter_path)
    bias_name = tensor_name_with_end(adapter_path, "projector.linear_2.bias")
    bias = adapter_tensors(adapter_path)[bias_name]
    bias[3] = overflowing
    replace_tensors(adapter_path, {bias_name: bias})
    with pytest.raises(ValueError, match="linear_2.bias would be NaN or infinite"):
        merge_adapter(adapter_path, output_path, dtype="float16")
    assert not output_path.exists()


@pytest.mark.parametrize(
    "quantization",
    [
        pytest.param(
            {
                "load_in_4bit": True,
                "bnb_4bit_quant_type": "nf4",
                "bnb_4bit_compute_dtype": "bfloat16",
            },
            id="rounded",
        ),
        pytest.param(
            {
                "load_in_4bit": True,
                "bnb_4bit_quant_type": "nf4",
                "bnb_4bit_compute_dtype": "float32",
                "llm_int8_skip_modules": ["lm_head", "model.multi_modal_projector"],
            },
            id="quantized",
        ),
    ],
)
def test_a_tower_that_training_rounded_or_quantized_is_not_linked(
    bases, adapter_path, output_path, quantization
):
    base_path = bases["tied"]
    make_adapter(base_path, adapter_path, quantization)
    merge_adapter(adapter_path, output_path, dtype="float32")
    settings = BitsAndBytesConfig(**quantization)
    assert_merged(output_path, adapter_path, base_path, settings, torch.float32)

    assert not (output_path / TOWER).samefile(base_path / TOWER)
    before = load_file(base_path / TOWER)
    after = load_file(output_path / TOWER)
    assert any(not torch.equal(before[tensor_name], after[tensor_name]) for tensor_name in before)


def test_another_base_is_not_read_at_the_revision_of_the_adapter_s(
    bases, hub, prepared, tmp_path, adapter_path
):
    other_base = shutil.copytree(bases["tied"], tmp_path / "other")
    other_weights = {}
    for tensor_name, tensor in weights(other_base).items():
        other_weights[tensor_name] = tensor * 1.5
    store(other_base, other_weights)
    (other_base / "build.json").unlink()
    hub.serve("user/base", bases["tied"])
    hub.serve("user/other", other_base)

    make_adapter(bases["tied"], adapter_path)
    config_path = adapter_path / "adapter_config.json"
    named = {
        "base_model_name_or_path": "user/base",
        "revision": hub.repository("user/base").commit,
    }
    config_path.write_text(json.dumps(json.loads(config_path.read_text()) | named))

    def run_merge(output_path, *options):
        command = ["-m", "normalign_llava", "merge", adapter_path, "--output", output_path]
        process = prepared.run([*command, *options])
        assert process.returncode == 0, process.stderr

    run_merge(tmp_path / "merged")
    assert_merged(tmp_path / "merged", adapter_path, bases["tied"])
    run_merge(tmp_path / "merged-other", "--base", "user/other")
    assert_merged(tmp_path / "merged-other", adapter_path, other_base)


@pytest.mark.parametrize(
    "place",
    ["checkpoint-6-merged", "checkpoint-7", "checkpoint-6/merged"],
)
def test_a_place_that_a_run_takes_for_its_checkpoint_is_refused(bases, tmp_path, place):
    run_path = tmp_path / "run"
    checkpoint_path = run_path / "checkpoint-6"
    make_adapter(bases["tied"], checkpoint_path)
    (checkpoint_path / "trainer_state.json").write_text("{}")
    before = sorted(run_path.rglob("*"))
    with pytest.raises(ValueError, match=re.escape(f"the run in {run_path}")):
        merge_adapter(checkpoint_path, run_path / place)
    assert sorted(run_path.rglob("*")) == before

    # The Trainer does not touch these.
    merge_adapter(checkpoint_path, run_path / "merged-6")
    merge_adapter(checkpoint_path, tmp_path / "elsewhere" / place)
    assert sort_checkpoints(run_path) == [str(checkpoint_path)]


@pytest.fixture
def run_without_checkpoints(bases, tmp_path):
    """A run that kept no checkpoint. A later one would take `checkpoint-*` for its own."""
    make_adapter(bases["tied"], tmp_path / "run")
    return tmp_path / "run"


def test_a_merge_into_a_checkpoint_beside_a_run_s_result_is_refused(run_without_checkpoints):
    output_path = run_without_checkpoints / "checkpoint-6-merged"
    with pytest.raises(ValueError, match="Choose a folder outside"):
        merge_adapter(run_without_checkpoints, output_path)
    assert not list(run_without_checkpoints.glob("checkpoint-*"))


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(partial(build_checkpoint, "vision", "language"), id="build"),
        pytest.param(partial(retrofit_checkpoint, "llava"), id="retrofit"),
    ],
)
def test_a_build_into_a_checkpoint_beside_a_run_s_result_is_refused(run_without_checkpoints, build):
    with pytest.raises(ValueError, match="Choose a folder outside"):
        build(run_without_checkpoints / "checkpoint-6-built")
    assert not list(run_without_checkpoints.glob("checkpoint-*"))
