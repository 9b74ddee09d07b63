"""The model classes: where the norm stands, what aligns it, and what the decoder then receives."""

import copy
import math

import pytest
import tiny
import torch
import transformers

from normalign_llava import NormAlignLlavaConfig, modeling_normalign_llava as modeling
from normalign_llava.modeling_normalign_llava import mean_embedding_norm, rows_of_token


def test_rows_of_a_token_are_those_with_its_norm_and_none_if_it_is_outside():
    norms = torch.tensor([2.0, 3.0, 2.0, 1.0])
    assert rows_of_token(norms, 2) == [0, 2] and rows_of_token(norms, 3) == [3]
    assert rows_of_token(norms, 4) == rows_of_token(norms, -2) == []  # -200: older LLaVAs' image


def test_mean_embedding_norm_is_the_float64_mean_over_rows_that_count():
    torch.manual_seed(0)
    weight = torch.randn(5000, 2)
    weight[7] = 0.0
    expected = tiny.reference_n_text(weight, excluded=(3, 9))
    assert mean_embedding_norm(weight, exclude_rows=(3, 9)) == pytest.approx(expected, rel=1e-14)
    half = weight.bfloat16()
    expected = tiny.reference_n_text(half, excluded=())
    assert mean_embedding_norm(half) == pytest.approx(expected, rel=1e-14)


ODD = torch.tensor([[1.0], [math.nan], [math.inf]])


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: mean_embedding_norm(torch.zeros(4, 3)), "All 4 embedding rows are zero"),
        (lambda: mean_embedding_norm(ODD), r"2 embedding rows .*\[1, 2\]"),
        (lambda: mean_embedding_norm(torch.ones(4, 3, device="meta")), "on meta"),
        (lambda: mean_embedding_norm(torch.ones(4, 3, dtype=torch.uint8)), "quantized .*uint8"),
        (lambda: mean_embedding_norm(torch.ones(4, 3).to(torch.float8_e4m3fn)), "quantized .*8_e4"),
        (lambda: NormAlignLlavaConfig(projector_gain_init="two"), "text_norm, one, got 'two'"),
        (lambda: NormAlignLlavaConfig(gradient_compensation="all"), "global, none, got 'all'"),
        (lambda: NormAlignLlavaConfig(projector_norm="batch"), "layer_norm.*rms_norm.*none.*batch"),
        (lambda: NormAlignLlavaConfig(text_embedding_norm=math.nan), "text_embedding_norm .*nan"),
        (lambda: NormAlignLlavaConfig(text_embedding_norm=0.0), "text_embedding_norm .*0.0"),
        (lambda: NormAlignLlavaConfig(gain_floor=0), "gain_floor .* got 0"),
        (lambda: NormAlignLlavaConfig(vision_prefix_tokens=0), "vision_prefix_tokens .* got 0"),
        (lambda: NormAlignLlavaConfig(vision_prefix_tokens=5.0), "vision_prefix_tokens .* got 5.0"),
        (lambda: NormAlignLlavaConfig(gain_floor=math.inf), "gain_floor .* got inf"),
        (lambda: NormAlignLlavaConfig(gain_floor=None), "gain_floor .* got None"),
        (lambda: NormAlignLlavaConfig(projector_norm_eps=0.0), "projector_norm_eps .* got 0.0"),
        (lambda: NormAlignLlavaConfig(projector_norm_eps=-1e-5), "projector_norm_eps .* got -1e"),
    ],
)
def test_wrong_values_are_refused_by_name(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_defaults_are_the_papers_and_configurations_do_not_share_what_they_hold():
    config = NormAlignLlavaConfig(text_embedding_norm=1)  # whole numbers are numbers
    assert (config.gain_floor, config.projector_norm_eps, config.text_embedding_norm) == (
        *(1e-3, 1e-5),
        1,
    )
    kinds = (config.projector_norm, config.projector_gain_init, config.gradient_compensation)
    assert kinds == ("layer_norm", "text_norm", "global")
    assert NormAlignLlavaConfig().text_embedding_norm is None
    for name in ("LayerNorm", "RMSNorm"):
        norm = getattr(modeling, f"GlobalWeightCompensated{name}")(8)
        assert (norm.gain_floor, norm.eps, norm.compensate) == (1e-3, 1e-5, True)
    config.auto_map["AutoModel"] = "other.Model"
    named = NormAlignLlavaConfig().auto_map
    assert named == NormAlignLlavaConfig.auto_map_entries
    assert named["AutoModel"] == "modeling_normalign_llava.NormAlignLlavaModel"
    again = NormAlignLlavaConfig(**config.to_dict())
    assert (again.model_type, again.auto_map) == ("normalign_llava", config.auto_map_entries)


@pytest.mark.parametrize("vision, tied", [("clip", True), ("siglip", False)])
@pytest.mark.parametrize("norm, kind", [("layer_norm", "LayerNorm"), ("rms_norm", "RMSNorm")])
def test_a_model_made_from_a_config_is_aligned(vision, tied, norm, kind):
    model = tiny.model(vision=vision, tied=tied, projector_norm=norm)
    n_text = tiny.reference_n_text(model.get_input_embeddings().weight)
    layer = model.model.multi_modal_projector.norm
    assert isinstance(layer, getattr(modeling, f"GlobalWeightCompensated{kind}"))
    assert model.config.text_embedding_norm == pytest.approx(n_text, rel=1e-12)
    expected = torch.full_like(layer.weight, n_text / tiny.WIDTH**0.5)
    torch.testing.assert_close(layer.weight, expected)
    features = model.get_image_features(tiny.inputs()["pixel_values"]).pooler_output[0]
    norms = features.norm(dim=-1)
    torch.testing.assert_close(norms, torch.full_like(norms, n_text), rtol=2e-3, atol=0.0)


def test_align_projector_norm_measures_again_and_leaves_padding_out():
    model = tiny.model(tied=False)
    norm = model.model.multi_modal_projector.norm
    with torch.no_grad():
        weight = model.get_input_embeddings().weight
        weight *= 3.0
        weight[5] = 0.0
        weight[98] = weight[tiny.IMAGE]  # padding repeats the image token's row
        norm.weight.normal_()
        norm.bias.normal_()
    expected = tiny.reference_n_text(weight, excluded=(tiny.IMAGE, 98))
    assert model.align_projector_norm() == pytest.approx(expected, rel=1e-12)
    assert model.config.text_embedding_norm == pytest.approx(expected, rel=1e-12)
    gain = torch.full_like(norm.weight, expected / tiny.WIDTH**0.5)
    torch.testing.assert_close(norm.weight, gain)
    assert not norm.bias.any()
    assert model.model.align_projector_norm() == pytest.approx(expected, rel=1e-12)


def test_measuring_changes_nothing():
    model = tiny.model()
    gain = model.model.multi_modal_projector.norm.weight.detach().clone()
    before = copy.deepcopy(model.config.to_dict())
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(1.5)
    expected = tiny.reference_n_text(model.get_input_embeddings().weight)
    assert model.measure_text_embedding_norm() == pytest.approx(expected, rel=1e-12)
    assert model.config.to_dict() == before
    assert torch.equal(model.model.multi_modal_projector.norm.weight, gain)


def test_an_image_token_outside_the_vocabulary_leaves_no_row_out():
    model = tiny.model()
    model.config.image_token_id = tiny.VOCABULARY
    expected = tiny.reference_n_text(model.get_input_embeddings().weight, excluded=())
    assert model.measure_text_embedding_norm() == pytest.approx(expected, rel=1e-12)


def test_the_papers_arms():
    unit = tiny.model(projector_gain_init="one")
    gain = unit.model.multi_modal_projector.norm.weight
    assert gain.eq(1).all() and unit.config.text_embedding_norm > 0
    assert unit.align_projector_norm() > 0 and gain.eq(1).all()
    plain = tiny.model(projector_norm="none")
    assert not [name for name, _ in plain.named_parameters() if "projector.norm" in name]
    with pytest.raises(ValueError, match='projector_norm="none"'):
        plain.align_projector_norm()
    norm = tiny.model(gradient_compensation="none").model.multi_modal_projector.norm
    assert norm.compensate is False
    floored = tiny.model(gain_floor=0.5, projector_norm_eps=1e-3).model.multi_modal_projector.norm
    assert floored.compensate and floored.gain_floor == 0.5 and floored.eps == 1e-3


MAMBA = dict(mamba_d_ssm=32, mamba_n_heads=2, mamba_d_head=16, mamba_d_state=8, mamba_chunk_size=8)
LATENT = dict(num_key_value_heads=2, q_lora_rank=16, kv_lora_rank=16)
LATENT |= dict(qk_nope_head_dim=8, qk_rope_head_dim=8)
EXPERTS = dict(num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16)
SCALING = {
    "afmoe": (transformers.AfmoeConfig, dict(mup_enabled=True, **EXPERTS)),
    "falcon_h1": (transformers.FalconH1Config, dict(embedding_multiplier=5.65, **MAMBA)),
    "gemma": (transformers.GemmaConfig, {}),
    "gemma2": (transformers.Gemma2Config, {}),
    "gemma3": (transformers.Gemma3TextConfig, {}),
    "granite": (transformers.GraniteConfig, dict(embedding_multiplier=12.0)),
    "hrm_text": (transformers.HrmTextConfig, dict(embedding_scale=7.0)),
    "hyperclovax": (transformers.HyperCLOVAXConfig, dict(embedding_multiplier=10.0)),
    "minicpm3": (transformers.MiniCPM3Config, dict(scale_emb=3, **LATENT)),
    "recurrent_gemma": (transformers.RecurrentGemmaConfig, {}),
    "vaultgemma": (transformers.VaultGemmaConfig, {}),
}


def entering(model) -> list[torch.Tensor]:
    """What the first layer of a decoder receives in each forward pass from now on."""
    states = []
    layers = next(part for part in model.modules() if isinstance(part, torch.nn.ModuleList))

    def keep(module, args, kwargs):
        states.append(args[0] if args else kwargs["hidden_states"])

    layers[0].register_forward_pre_hook(keep, with_kwargs=True)
    return states


@pytest.mark.parametrize("family", ["gemma2", "granite"])
def test_visual_tokens_enter_the_decoder_with_the_norm_of_text(family):
    cls, extra = SCALING[family]
    model = tiny.model(text=tiny.text_config(cls=cls, **extra))
    states = entering(model.model.language_model)
    ids = torch.tensor([[i for i in range(tiny.VOCABULARY) if i != tiny.IMAGE] + [tiny.IMAGE] * 4])
    model(input_ids=ids, pixel_values=torch.randn(1, 3, 16, 16), use_cache=False)
    norms = states[0][0].double().norm(dim=-1)
    text = norms[:-4]
    n_text = text[text > 0].mean().item()
    assert model.config.text_embedding_norm == pytest.approx(n_text, rel=1e-6)
    torch.testing.assert_close(norms[-4:], torch.full_like(norms[-4:], n_text), rtol=2e-3, atol=0.0)


@pytest.mark.parametrize("family", SCALING)
def test_scales_are_what_the_language_model_does_to_embeddings(family):
    cls, extra = SCALING[family]
    config = tiny.text_config(cls=cls, **extra)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval().base_model
    states = entering(model)
    ids = torch.arange(3, 90)[None]
    rows = model.get_input_embeddings().weight[ids].detach()
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
        of_text = states[0]
        states.clear()
        model(inputs_embeds=rows.clone(), use_cache=False)
    text, both = modeling.embedding_scales(config)
    for state, scale in ((of_text, text * both), (states[0], both)):
        expected = rows.norm(dim=-1) * scale
        torch.testing.assert_close(state.norm(dim=-1), expected, rtol=1e-3, atol=0.0)


@pytest.mark.parametrize(
    "cls, extra, expected",
    [
        (transformers.XGLMConfig, dict(scale_embedding=True), (6.0, 1.0)),
        (transformers.BioGptConfig, dict(scale_embedding=True), (6.0, 1.0)),
        (transformers.BioGptConfig, dict(scale_embedding=False), (1.0, 1.0)),
        (transformers.AfmoeConfig, dict(mup_enabled=False), (1.0, 1.0)),
        (transformers.GraniteMoeConfig, dict(embedding_multiplier=12), (1.0, 12.0)),
        (transformers.Qwen2Config, {}, (1.0, 1.0)),
    ],
)
def test_scales_that_a_configuration_switches(cls, extra, expected):
    assert modeling.embedding_scales(cls(hidden_size=36, **extra)) == expected


def test_the_dtype_is_the_language_model_s():
    model = tiny.model()
    model.model.vision_tower.half()
    model.model.multi_modal_projector.linear_1.double()
    assert model.dtype == model.model.dtype == torch.float32
    model.model.language_model.bfloat16()
    assert model.dtype == model.model.dtype == torch.bfloat16


@pytest.mark.parametrize("tower_trains", [False, True])
def test_gradients_of_inputs_go_into_the_tower_only_if_it_is_trained(tower_trains):
    model = tiny.model().requires_grad_(False)
    model.model.vision_tower.encoder.layers[1].mlp.fc1.weight.requires_grad_(tower_trains)
    model.enable_input_require_grads()
    seen = {}
    parts = {"text": model.get_input_embeddings()}
    parts["tower"] = model.model.vision_tower.get_input_embeddings()
    for name, part in parts.items():
        part.register_forward_hook(
            lambda module, args, output, name=name: seen.update({name: output.requires_grad})
        )
    model(**tiny.inputs())
    assert seen == {"text": True, "tower": tower_trains}
    model.disable_input_require_grads()
    model(**tiny.inputs())
    assert seen == {"text": False, "tower": False}


def test_only_the_gradient_behind_the_norm_differs_between_the_arms():
    arms = {name: tiny.model(gradient_compensation=name).train() for name in ("global", "none")}
    batch = tiny.inputs()
    logits = {}
    for name, model in arms.items():
        out = model(**batch, labels=batch["input_ids"])
        out.loss.backward()
        logits[name] = out.logits
    assert torch.equal(logits["global"], logits["none"])
    ours, plain = (dict(arms[name].named_parameters()) for name in ("global", "none"))
    factor = 1.0 / plain["model.multi_modal_projector.norm.weight"].abs().mean()
    for name, parameter in plain.items():
        if parameter.grad is None:
            assert ours[name].grad is None
            continue
        behind = "vision_tower" in name or "projector.linear" in name
        expected = parameter.grad * (factor if behind else 1.0)
        torch.testing.assert_close(ours[name].grad, expected, rtol=1e-3, atol=1e-6)


def test_everything_cast_to_bfloat16_still_runs_right():
    model = tiny.model()
    batch = tiny.inputs()
    expected = model(**batch).logits
    cast = tiny.model().to(torch.bfloat16)
    assert cast.model.multi_modal_projector.norm.weight.dtype == torch.bfloat16
    batch["pixel_values"] = batch["pixel_values"].bfloat16()
    got = cast(**batch).logits.float()
    assert (got - expected).norm() <= 3e-2 * expected.norm()
