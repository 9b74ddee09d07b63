"""Merging loses nothing of an adapter, whatever PEFT trained: compared with PEFT's own model."""

import json
import math
import re
import shutil
from functools import partial

import pytest
import tiny
import tiny_parts as parts
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
from normalign_llava.assembly.merged_layer import MergedLayer, relative_change
from normalign_llava.assembly.merged_tensors import MergedTensors, check_settings
from normalign_llava.checkpoint.files import ADAPTER_WEIGHTS


pytestmark = pytest.mark.slow

Q = r".*\.language_model\..*\.q_proj"
WITH_BIAS = r".*(vision_tower.*fc1|multi_modal_projector\.linear_1)"  # these have a bias
TOKENS = [5, 9, 30]
EMBEDDINGS = r".*\.embed_tokens"
HEAD = r"lm_head"
BOTH = ["embed_tokens", "lm_head"]


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    root = tmp_path_factory.mktemp("bases")
    vision = parts.vision(root / "vision", "siglip")
    sizes = dict(hidden_size=64, intermediate_size=128)
    moe = dict(sizes, cls=MixtralConfig, num_local_experts=3, num_experts_per_tok=2)
    kinds = {
        "tied": dict(sizes, tied=True),
        "untied": dict(sizes, tied=False),
        "experts": dict(moe, tied=False),
        "conv1d": dict(tied=True, cls=GPT2Config, hidden_size=32),
    }
    for name, how in kinds.items():
        language = parts.language(root / f"{name}-language", **how)
        build_checkpoint(vision, language, root / name)
    return {name: root / name for name in kinds}


CASES = [
    # base, what is trained, whether embeddings and head are one tensor in the result
    ("tied", dict(bias="all", lora_dropout=0.5), True),
    ("untied", dict(bias="all", modules_to_save=None), False),
    ("untied", dict(bias="all", use_dora=True), False),
    ("tied", dict(bias="lora_only", target_modules=WITH_BIAS, modules_to_save=None), True),
    ("tied", dict(lora_bias=True, target_modules=WITH_BIAS, modules_to_save=None), True),
    ("tied", dict(target_modules=EMBEDDINGS), False),
    ("tied", dict(target_modules=EMBEDDINGS, use_dora=True), False),
    ("untied", dict(target_modules=EMBEDDINGS), False),
    ("tied", dict(target_modules=HEAD), False),
    ("untied", dict(target_modules=HEAD), False),
    ("tied", dict(target_modules=BOTH), False),
    ("untied", dict(target_modules=BOTH, use_rslora=True), False),
    ("tied", dict(target_modules=["embed_tokens", "q_proj"], ensure_weight_tying=True), True),
    ("tied", dict(trainable_token_indices=TOKENS), True),
    ("tied", dict(trainable_token_indices={"embed_tokens": TOKENS, "lm_head": [7]}), False),
    ("untied", dict(trainable_token_indices=TOKENS), False),
    ("untied", dict(trainable_token_indices={"embed_tokens": [4], "lm_head": TOKENS}), False),
    ("tied", dict(modules_to_save=["embed_tokens"]), False),
    ("tied", dict(modules_to_save=["lm_head"]), False),
    ("tied", dict(modules_to_save=["embed_tokens"], ensure_weight_tying=True), True),
    ("untied", dict(modules_to_save=BOTH), False),
    ("tied", dict(modules_to_save=["lm_head"], bias="all"), False),
    ("tied", dict(rank_pattern={"q_proj": 7}, alpha_pattern={"v_proj": 31, "fc1": 3}), True),
    ("tied", dict(target_modules=r".*patch_embedding"), True),
    ("tied", dict(target_modules=[], target_parameters=["layers.1.self_attn.q_proj.weight"]), True),
    (
        "experts",
        dict(target_modules=Q, target_parameters=["experts.gate_up_proj", "experts.down_proj"]),
        False,
    ),
    ("conv1d", dict(target_modules=r".*language_model.*c_attn", fan_in_fan_out=True), True),
    ("conv1d", dict(target_modules=r".*language_model.*c_fc", bias="all"), True),
]


@pytest.mark.parametrize("base, trained, tied", CASES)
def test_everything_that_peft_trained_is_in_the_result(bases, tmp_path, base, trained, tied):
    model = make_adapter(bases[base], tmp_path / "adapter", **trained)
    expected = logits(model, bases[base])
    report = merge_adapter(tmp_path / "adapter", tmp_path / "merged")
    merged = load(tmp_path / "merged")
    # Seen at most 2e-5 of up to 40, from the order of sums.
    torch.testing.assert_close(logits(merged, bases[base]), expected, rtol=1e-5, atol=3e-5)
    assert (logits(load(bases[base]), bases[base]) - expected).abs().max() > 1e-2
    assert report.difference < 1e-5
    assert (merged.lm_head.weight is merged.get_input_embeddings().weight) == tied
    assert ("lm_head.weight" in weights(tmp_path / "merged")) == (not tied)


def of_file(folder, end):
    """The name of a tensor in an adapter's file, by its end."""
    names = [name for name in load_file(folder / ADAPTER_WEIGHTS) if name.endswith(end)]
    assert len(names) == 1, names
    return names[0]


def change(folder, **values):
    """Replaces tensors of an adapter's file."""
    tensors = load_file(folder / ADAPTER_WEIGHTS) | values
    save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})


@pytest.mark.parametrize(
    "base, trained, path",
    [
        ("tied", dict(target_modules=EMBEDDINGS), "embed_tokens"),
        ("untied", dict(target_modules=EMBEDDINGS), "embed_tokens"),
        ("tied", dict(target_modules=HEAD), "lm_head"),
        ("untied", dict(trainable_token_indices=TOKENS), "embed_tokens.token_adapter"),
    ],
)
def test_embeddings_that_peft_saves_besides_are_used(bases, tmp_path, base, trained, path):
    """Whatever they hold in the file, as PEFT loads them into its base."""
    folder = tmp_path / "adapter"
    make_adapter(bases[base], folder, save_embedding_layers=True, **trained)
    name = of_file(folder, f"{path}.base_layer.weight")
    before = load_file(folder / ADAPTER_WEIGHTS)[name]
    change(folder, **{name: before + torch.randn_like(before)})
    expected = logits(PeftModel.from_pretrained(load(bases[base]), folder).eval(), bases[base])
    merge_adapter(folder, tmp_path / "merged")
    got = logits(load(tmp_path / "merged"), bases[base])
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=3e-5)


def test_embeddings_that_are_the_head_are_saved_besides_once_or_alike(bases, tmp_path):
    folder = tmp_path / "adapter"
    make_adapter(bases["tied"], folder, save_embedding_layers=True, target_modules=Q)
    before = load_file(folder / ADAPTER_WEIGHTS)
    both = [of_file(folder, f"{path}.weight") for path in BOTH]
    assert torch.equal(*(before[name] for name in both))
    change(folder, **{name: 2 * before[name] for name in both})
    opened = open_adapter(folder)
    merged = MergedTensors(opened, BaseTensors(opened), torch.float32)
    values = dict(merged)
    merged.check_complete()
    assert "lm_head.weight" not in values
    stored = values["model.language_model.embed_tokens.weight"]
    assert torch.equal(stored, 2 * before[both[0]])
    change(folder, **{both[1]: before[both[0]]})
    with pytest.raises(
        ValueError, match=r"other values for .*embed_tokens.weight than for lm_head"
    ):
        MergedTensors(opened, BaseTensors(opened), torch.float32)


KEPT = "layers_to_transform layers_pattern exclude_modules target_modules modules_to_save bias r"
KEPT += " lora_alpha lora_dropout use_rslora use_dora fan_in_fan_out lora_bias rank_pattern"
KEPT += " alpha_pattern target_parameters trainable_token_indices ensure_weight_tying revision"
KEPT += " init_lora_weights loftq_config eva_config corda_config lora_ga_config task_type"
KEPT += " runtime_config modules_to_tie target_modules_to_tie megatron_core peft_type"
KEPT += " inference_mode auto_mapping base_model_name_or_path velora_config use_bdlora peft_version"
LOST = "layer_replication alora_invocation_tokens kasa_config use_qalora arrow_config"
LOST += " megatron_config monteclora_config qalora_group_size"


def test_settings_are_merged_if_their_effect_is_in_the_tensors(tmp_path):
    for name in KEPT.split():
        config = LoraConfig()
        setattr(config, name, "changed")
        check_settings(tmp_path, config)
    for name in LOST.split():
        config = LoraConfig()
        setattr(config, name, "changed")
        with pytest.raises(ValueError, match=f"trained with {name} 'changed'. It would be lost"):
            check_settings(tmp_path, config)


def test_a_quantized_layer_whose_weight_is_turned_is_merged(bases, tmp_path):
    """GPT-2's layers have the weights of others, transposed."""
    quantization = dict(load_in_4bit=True, bnb_4bit_compute_dtype="float32")
    how = dict(target_modules=r".*language_model.*c_attn", fan_in_fan_out=True)
    trained = make_adapter(bases["conv1d"], tmp_path / "adapter", quantization, **how)
    expected = logits(trained, bases["conv1d"])
    merge_adapter(tmp_path / "adapter", tmp_path / "merged", dtype="float32")
    got = logits(load(tmp_path / "merged"), bases["conv1d"])
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=3e-5)


def test_a_tensor_that_is_saved_twice_must_be_the_same(bases, tmp_path):
    """With `bias="all"`, PEFT saves biases of modules that are saved whole under two names."""
    folder = tmp_path / "adapter"
    make_adapter(bases["tied"], folder, bias="all")
    name = of_file(folder, "modules_to_save.default.linear_1.bias")
    change(folder, **{name: load_file(folder / ADAPTER_WEIGHTS)[name] + 1})
    with pytest.raises(ValueError, match=r"two values for .*linear_1\.bias"):
        merge_adapter(folder, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_an_adapter_that_is_stored_in_half_precision_is_merged_in_float32(bases, tmp_path):
    folder = tmp_path / "adapter"
    make_adapter(bases["tied"], folder)
    stored = load_file(folder / ADAPTER_WEIGHTS)
    change(folder, **{name: value.bfloat16() for name, value in stored.items()})
    merge_adapter(folder, tmp_path / "merged")
    assert_merged(tmp_path / "merged", folder, bases["tied"])


def test_a_head_that_training_changed_little_is_no_longer_tied(bases, tmp_path):
    folder = tmp_path / "adapter"
    make_adapter(bases["tied"], folder, target_modules=HEAD)
    name = of_file(folder, "lm_head.lora_B.weight")
    change(folder, **{name: load_file(folder / ADAPTER_WEIGHTS)[name] * 1e-3})
    merge_adapter(folder, tmp_path / "merged")
    merged = load(tmp_path / "merged")
    before = load(bases["tied"]).lm_head.weight
    assert 0 < (merged.lm_head.weight - before).abs().max() < 1e-3 * before.abs().max()
    assert torch.equal(merged.get_input_embeddings().weight, before)


REFUSED = [
    (dict(layer_replication=[[0, 2], [1, 2]]), "layer_replication"),
    (dict(alora_invocation_tokens=[5, 6]), "alora_invocation_tokens"),
    (dict(kasa_config={}), "kasa_config"),
    (dict(use_qalora=True), "use_qalora"),
    (dict(lora_bias=True), "the base layer has no bias"),
]


@pytest.mark.parametrize("settings, message", REFUSED)
def test_what_cannot_be_merged_is_refused_by_name(bases, tmp_path, settings, message):
    """`layer_replication`, for one, adds layers; KaSA truncates the base's weights in training."""
    folder = tmp_path / "adapter"
    kept = {} if "lora_bias" not in settings else settings
    make_adapter(bases["tied"], folder, modules_to_save=None, **kept)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | settings))
    with pytest.raises(ValueError, match=message):
        merge_adapter(folder, tmp_path / "merged")
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


def test_a_layer_of_another_kind_is_refused(tmp_path):
    """SigLIP's pooling head, which LLaVA does not use, has torch's attention."""
    torch.manual_seed(0)
    llava = tiny.llava(vision="siglip")
    llava.config.vision_config.vision_use_head = True
    base = parts.llava(tmp_path / "base", LlavaForConditionalGeneration(llava.config))
    how = dict(target_modules=r".*head\.attention", modules_to_save=None)
    make_adapter(base, tmp_path / "adapter", **how)
    with pytest.raises(ValueError, match=r"vision_tower.*head\.attention"):
        merge_adapter(tmp_path / "adapter", tmp_path / "merged", base=base)
    assert not (tmp_path / "merged").exists()


def test_a_tensor_that_is_left_out_is_an_error(bases, tmp_path):
    """As it would be if a later version forgot one: each is counted as it is written."""
    make_adapter(bases["tied"], tmp_path / "adapter", bias="all")
    opened = open_adapter(tmp_path / "adapter")
    merged = MergedTensors(opened, BaseTensors(opened), torch.float32)
    in_file = len(load_file(tmp_path / "adapter" / ADAPTER_WEIGHTS))
    with pytest.raises(ValueError, match=f"{in_file} tensors of .*adapter_model.safetensors"):
        merged.check_complete()
    values = iter(merged)
    names = [next(values)[0] for _ in range(len(merged.layout) - 1)]
    with pytest.raises(ValueError, match="1 tensors have no value"):
        merged.check_complete()
    names += [name for name, _ in values]
    merged.check_complete()
    assert sorted(names) == sorted(merged.layout)


def share(values, expected):
    """The largest change, as a share of the largest number."""
    change = (values - expected).abs().max().item()
    return change and change / expected.abs().max().item()


def test_a_change_is_a_share_of_the_largest_number_of_its_tensor():
    expected = {"a": torch.tensor([4.0, -8.0]), "b": torch.tensor([1.0, 0.5])}
    same = {name: value.clone() for name, value in expected.items()}
    assert relative_change(same, expected) == relative_change({}, {}) == 0.0
    for name, value, change in (
        ("a", [3.0, -8.0], 1 / 8),
        ("a", [4.0, -6.0], 2 / 8),
        ("b", [1.25, 0.5], 1 / 4),
        ("b", [1.0, 0.25], 1 / 4),
    ):
        changed = {"a": same["a"], "b": same["b"], name: torch.tensor(value)}
        assert relative_change(changed, expected) == change
        half = {kind: number.half() for kind, number in changed.items()}
        assert relative_change(half, expected) == change
    both = {"a": torch.tensor([3.0, -8.0]), "b": torch.tensor([1.5, 0.5])}
    assert relative_change(both, expected) == 0.5
    # Whole numbers, empty tensors and zeros have no share.
    others = {"a": torch.tensor([1]), "b": torch.zeros(0), "c": torch.zeros(2)}
    assert relative_change({name: value + 1 for name, value in others.items()}, others) == 0.0


def test_a_change_that_is_not_a_number_is_not_taken_for_none():
    """As of outputs that overflow: infinity less infinity is NaN, and merging is then refused."""
    expected = {"a": torch.tensor([1.0, torch.inf]), "b": torch.tensor([1.0, 2.0])}
    changed = {"a": torch.tensor([1.5, torch.inf]), "b": torch.tensor([1.5, 2.0])}
    assert math.isnan(relative_change(changed, expected))
    assert relative_change({"a": expected["a"].clone(), "b": changed["b"]}, expected) == 0.25


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_difference_is_that_of_what_was_written(bases, tmp_path, dtype):
    """Of layers with an adapter, on inputs of our own, in float64; others are not changed here."""
    base = bases["untied"]
    rounded = weights(base)
    half = {name: value.half().bfloat16().float() for name, value in rounded.items()}
    half |= {name: value for name, value in rounded.items() if "projector.norm" in name}
    exact = shutil.copytree(base, tmp_path / "base")  # whose numbers have few digits
    store(exact, {name: value.to(torch.float16).float() for name, value in half.items()})
    make_adapter(exact, tmp_path / "adapter", modules_to_save=None)
    merge_adapter(tmp_path / "adapter", tmp_path / "float32", dtype="float32")
    report = merge_adapter(tmp_path / "adapter", tmp_path / "merged", dtype=dtype)
    wide, written = (weights(tmp_path / name) for name in ("float32", "merged"))
    torch.manual_seed(1)
    shares = []
    for name in wide:
        if re.fullmatch(LINEARS + r"\.weight", name):
            inputs = torch.randn(500, wide[name].shape[1], dtype=torch.float64)
            expected = inputs @ wide[name].double().T
            shares.append(share(inputs @ written[name].double().T, expected))
        elif "projector.norm" not in name:
            assert share(written[name].double(), wide[name].double()) < 1e-6
    if dtype == "float32":
        assert max(shares) == 0 and report.difference < 1e-5
    else:
        assert max(shares) > 1e-4
        assert max(shares) / 3 < report.difference < max(shares) * 3


def test_the_difference_counts_tensors_without_an_adapter(bases, tmp_path):
    make_adapter(bases["tied"], tmp_path / "adapter", target_modules=Q)
    merge_adapter(tmp_path / "adapter", tmp_path / "float32", dtype="float32")
    report = merge_adapter(tmp_path / "adapter", tmp_path / "merged", dtype="bfloat16")
    wide, written = (weights(tmp_path / name) for name in ("float32", "merged"))
    names = [name for name in wide if "q_proj" not in name or "vision" in name]
    shares = [share(written[name].double(), wide[name].double()) for name in names]
    assert report.difference == pytest.approx(max(shares), rel=1e-5)


def test_the_difference_counts_tokens_that_were_trained(bases, tmp_path):
    """Of a base that bfloat16 holds exactly, so that nothing else is rounded."""
    base = shutil.copytree(bases["untied"], tmp_path / "base")
    held = {name: value.bfloat16().float() for name, value in weights(base).items()}
    store(base, held)
    tokens = [5, 30]  # which are not among the inputs that are drawn
    how = dict(target_modules=Q, modules_to_save=None, trainable_token_indices=tokens)
    make_adapter(base, tmp_path / "adapter", **how)
    trained = load_file(tmp_path / "adapter" / ADAPTER_WEIGHTS)
    idle = {name: torch.zeros_like(trained[name]) for name in trained if "lora_B" in name}
    change(tmp_path / "adapter", **idle)
    merge_adapter(tmp_path / "adapter", tmp_path / "float32", dtype="float32")
    report = merge_adapter(tmp_path / "adapter", tmp_path / "merged", dtype="bfloat16")
    wide, written = (weights(tmp_path / name) for name in ("float32", "merged"))
    changed = [name for name in wide if not torch.equal(wide[name], written[name].float())]
    assert changed == ["model.language_model.embed_tokens.weight"]
    expected, got = (table[changed[0]].float() for table in (wide, written))
    rounding = (got - expected).abs().max().item()
    assert rounding / expected.abs().max().item() <= report.difference
    assert report.difference <= rounding / expected[tokens].abs().max().item()


@pytest.mark.parametrize(
    "how",
    [
        dict(target_modules=[], target_parameters=["experts.weight"]),
        dict(target_modules=["other"], modules_to_save=["experts"]),
    ],
    ids=["experts", "saved whole"],
)
def test_the_difference_of_what_takes_several_inputs_or_is_whole_is_its_tensors_own(how):
    torch.manual_seed(0)
    experts = nn.Module()
    experts.weight = nn.Parameter(torch.randn(3, 4, 8))
    model = nn.ModuleDict({"experts": experts, "other": nn.Linear(2, 2)})
    config = LoraConfig(**how, init_lora_weights=False)
    wrapper = PeftModel(model, config).base_model.model["experts"]
    layer = MergedLayer("experts", wrapper, {"experts.weight": experts.weight}.__getitem__)
    merged = layer.values["weight"].clone()
    assert layer.error < 1e-6
    written = {"weight": merged.bfloat16()}
    expected = (written["weight"].float() - merged).abs().max() / merged.abs().max()
    assert 1e-4 < layer.difference(written) == pytest.approx(expected.item(), rel=1e-2)


def test_the_difference_of_embeddings_that_are_scaled_is_that_of_what_they_hold():
    """Gemma's scale is computed from its configuration, so it has no value on meta."""
    with torch.device("meta"):
        table = Gemma3TextScaledWordEmbedding(20, 8, padding_idx=0, embed_scale=3.0)
        model = nn.ModuleDict({"table": table, "other": nn.Linear(2, 2)})
        adapted = PeftModel(model, LoraConfig(r=2, target_modules=["table"]))
    wrapper = adapted.base_model.model["table"]
    torch.manual_seed(0)
    factors = {"lora_embedding_A.default": torch.randn(2, 20)}
    factors["lora_embedding_B.default"] = torch.randn(8, 2)
    wrapper.load_state_dict(factors, strict=False, assign=True)
    layer = MergedLayer("table", wrapper, {"table.weight": torch.randn(20, 8)}.__getitem__)
    assert layer.error < 1e-6
    rounded = {"weight": layer.values["weight"].bfloat16()}
    assert 1e-4 < layer.difference(rounded) < 1e-2


@pytest.mark.parametrize("left, is_refused", [(1e-2, False), (1e-5, True)])
def test_an_adapter_that_rounding_changes_is_refused(bases, tmp_path, left, is_refused):
    """One that cancels its layer but for a share `left`: products and weights round otherwise."""
    folder = tmp_path / "adapter"
    path = "layers.0.self_attn.q_proj"
    how = dict(target_modules=rf".*language_model.{path}", modules_to_save=None)
    make_adapter(bases["tied"], folder, r=64, lora_alpha=64, **how)
    base = weights(bases["tied"])[f"model.language_model.{path}.weight"]
    torch.manual_seed(3)
    turn = torch.linalg.qr(torch.randn(64, 64)).Q
    factors = {"lora_A": turn, "lora_B": -(1 - left) * base @ turn.T}
    tensors = {of_file(folder, f"{end}.weight"): value for end, value in factors.items()}
    change(folder, **{name: value.contiguous() for name, value in tensors.items()})
    if is_refused:
        with pytest.raises(ValueError, match="Merging changed outputs of .*q_proj by"):
            merge_adapter(folder, tmp_path / "merged")
        assert [path.name for path in tmp_path.iterdir()] == ["adapter"]
    else:
        merge_adapter(folder, tmp_path / "merged")


@pytest.mark.parametrize("infinite", [1e5, -1e5])
def test_one_infinite_number_among_finite_ones_is_refused(bases, tmp_path, infinite):
    make_adapter(bases["tied"], tmp_path / "adapter")
    name = of_file(tmp_path / "adapter", "projector.linear_2.bias")
    value = load_file(tmp_path / "adapter" / ADAPTER_WEIGHTS)[name]
    value[3] = infinite
    change(tmp_path / "adapter", **{name: value})
    with pytest.raises(ValueError, match="linear_2.bias would be NaN or infinite"):
        merge_adapter(tmp_path / "adapter", tmp_path / "merged", dtype="float16")
    assert not (tmp_path / "merged").exists()


def test_a_tower_that_training_rounded_or_quantized_is_no_link(bases, tmp_path):
    tower = "model-vision_tower-00001-of-00001.safetensors"
    nf4 = dict(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    rounded = dict(nf4, bnb_4bit_compute_dtype="bfloat16")
    beside = ["lm_head", "model.multi_modal_projector"]
    quantized = dict(nf4, bnb_4bit_compute_dtype="float32", llm_int8_skip_modules=beside)
    for name, settings in (("rounded", rounded), ("quantized", quantized)):
        adapter = tmp_path / name
        output = tmp_path / f"{name}-merged"
        make_adapter(bases["tied"], adapter, settings)
        merge_adapter(adapter, output, dtype="float32")
        read = BitsAndBytesConfig(**settings)
        assert_merged(output, adapter, bases["tied"], read, torch.float32)
        assert not (output / tower).samefile(bases["tied"] / tower)
        before, after = (load_file(folder / tower) for folder in (bases["tied"], output))
        assert any(not torch.equal(before[name], after[name]) for name in before)


def test_another_base_is_not_read_at_the_revision_of_the_adapter_s(bases, hub, prepared, tmp_path):
    other = shutil.copytree(bases["tied"], tmp_path / "other")
    store(other, {name: value * 1.5 for name, value in weights(other).items()})
    (other / "build.json").unlink()
    hub.serve("user/base", bases["tied"])
    hub.serve("user/other", other)
    make_adapter(bases["tied"], tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_config.json"
    named = {"base_model_name_or_path": "user/base", "revision": hub.repository("user/base").commit}
    file.write_text(json.dumps(json.loads(file.read_text()) | named))
    command = ["-m", "normalign_llava", "merge", tmp_path / "adapter", "--output"]
    for words, base in (([], bases["tied"]), (["--base", "user/other"], other)):
        output = tmp_path / f"merged-{len(words)}"
        ended = prepared.run([*command, output, *words])
        assert ended.returncode == 0, ended.stderr
        assert_merged(output, tmp_path / "adapter", base)


RUN = ["checkpoint-6-merged", "checkpoint-7", "checkpoint-6/merged"]


@pytest.mark.parametrize("place", RUN)
def test_a_place_that_a_run_takes_for_its_checkpoint_is_refused(bases, tmp_path, place):
    run = tmp_path / "run"
    make_adapter(bases["tied"], run / "checkpoint-6")
    (run / "checkpoint-6" / "trainer_state.json").write_text("{}")
    before = sorted(run.rglob("*"))
    with pytest.raises(ValueError, match=re.escape(f"the run in {run}")):
        merge_adapter(run / "checkpoint-6", run / place)
    assert sorted(run.rglob("*")) == before
    merge_adapter(run / "checkpoint-6", run / "merged-6")  # which the Trainer leaves alone
    merge_adapter(run / "checkpoint-6", tmp_path / "elsewhere" / place)
    assert sort_checkpoints(run) == [str(run / "checkpoint-6")]


def test_a_checkpoint_of_its_name_beside_a_run_s_result_is_refused(bases, tmp_path):
    """A run that kept no checkpoint; a later one would take the folder for its own."""
    make_adapter(bases["tied"], tmp_path / "run")
    with pytest.raises(ValueError, match="Choose a folder outside"):
        merge_adapter(tmp_path / "run", tmp_path / "run" / "checkpoint-6-merged")
    for build in (
        partial(build_checkpoint, "vision", "language"),
        partial(retrofit_checkpoint, "llava"),
    ):
        with pytest.raises(ValueError, match="Choose a folder outside"):
            build(tmp_path / "run" / "checkpoint-6-built")
    assert not list((tmp_path / "run").glob("checkpoint-*"))
