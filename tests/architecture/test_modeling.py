"""The model classes: where the norm stands, what aligns it, and what the decoder then receives."""

import copy
import math

import pytest
import tiny
import torch
import transformers
from tiny_language_models import LATENT_ATTENTION

from normalign_llava import NormAlignLlavaConfig, modeling_normalign_llava as modeling
from normalign_llava.modeling_normalign_llava import mean_embedding_norm, rows_of_token


def norm_of(model):
    return model.model.multi_modal_projector.norm


def embedding_weight(model) -> torch.Tensor:
    return model.get_input_embeddings().weight


def test_rows_of_a_token_are_those_with_its_norm():
    norms = torch.tensor([2.0, 3.0, 2.0, 1.0])
    assert rows_of_token(norms, 2) == [0, 2]
    assert rows_of_token(norms, 3) == [3]


@pytest.mark.parametrize(
    "token_id",
    [
        4,
        -2,  # Older LLaVAs' image token has the id -200.
    ],
)
def test_a_token_outside_the_vocabulary_has_no_rows(token_id):
    norms = torch.tensor([2.0, 3.0, 2.0, 1.0])
    assert rows_of_token(norms, token_id) == []


def test_mean_embedding_norm_is_the_float64_mean_over_rows_that_count():
    torch.manual_seed(0)
    weight = torch.randn(5000, 2)
    weight[7] = 0.0
    expected = tiny.reference_n_text(weight, excluded=(3, 9))
    assert mean_embedding_norm(weight, exclude_rows=(3, 9)) == pytest.approx(expected, rel=1e-14)

    bfloat16_weight = weight.bfloat16()
    expected = tiny.reference_n_text(bfloat16_weight, excluded=())
    assert mean_embedding_norm(bfloat16_weight) == pytest.approx(expected, rel=1e-14)


ONES = torch.ones(4, 3)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        pytest.param(
            torch.zeros(4, 3),
            "All 4 embedding rows are zero",
            id="zeros",
        ),
        pytest.param(
            torch.tensor([[1.0], [math.nan], [math.inf]]),
            r"2 embedding rows .*\[1, 2\]",
            id="not finite",
        ),
        pytest.param(
            torch.ones(4, 3, device="meta"),
            "on meta",
            id="without data",
        ),
        pytest.param(
            ONES.to(torch.uint8),
            "quantized .*uint8",
            id="uint8",
        ),
        pytest.param(
            ONES.to(torch.float8_e4m3fn),
            "quantized .*8_e4",
            id="float8",
        ),
    ],
)
def test_embeddings_that_cannot_be_measured_are_refused(weight, message):
    with pytest.raises(ValueError, match=message):
        mean_embedding_norm(weight)


@pytest.mark.parametrize(
    ("option", "wrong_value", "message"),
    [
        ("projector_gain_init", "two", "text_norm, one, got 'two'"),
        ("gradient_compensation", "all", "global, none, got 'all'"),
        ("projector_norm", "batch", "layer_norm.*rms_norm.*none.*batch"),
        ("text_embedding_norm", math.nan, "text_embedding_norm .*nan"),
        ("text_embedding_norm", 0.0, "text_embedding_norm .*0.0"),
        ("gain_floor", 0, "gain_floor .* got 0"),
        ("vision_prefix_tokens", 0, "vision_prefix_tokens .* got 0"),
        ("vision_prefix_tokens", 5.0, "vision_prefix_tokens .* got 5.0"),
        ("gain_floor", math.inf, "gain_floor .* got inf"),
        ("gain_floor", None, "gain_floor .* got None"),
        ("projector_norm_eps", 0.0, "projector_norm_eps .* got 0.0"),
        ("projector_norm_eps", -1e-5, "projector_norm_eps .* got -1e"),
    ],
)
def test_wrong_values_of_a_configuration_are_refused_by_name(option, wrong_value, message):
    with pytest.raises(ValueError, match=message):
        NormAlignLlavaConfig(**{option: wrong_value})


def test_defaults_of_a_configuration_are_the_papers():
    config = NormAlignLlavaConfig()
    assert config.projector_norm == "layer_norm"
    assert config.projector_gain_init == "text_norm"
    assert config.gradient_compensation == "global"
    assert config.gain_floor == 1e-3
    assert config.projector_norm_eps == 1e-5
    assert config.text_embedding_norm is None


def test_a_text_embedding_norm_may_be_a_whole_number():
    config = NormAlignLlavaConfig(text_embedding_norm=1)
    assert config.text_embedding_norm == 1


@pytest.mark.parametrize(
    "norm_class",
    [
        modeling.GlobalWeightCompensatedLayerNorm,
        modeling.GlobalWeightCompensatedRMSNorm,
    ],
)
def test_defaults_of_a_norm_are_the_papers(norm_class):
    norm = norm_class(8)
    assert norm.gain_floor == 1e-3
    assert norm.eps == 1e-5
    assert norm.compensate is True


def test_configurations_do_not_share_what_they_hold():
    changed_config = NormAlignLlavaConfig(text_embedding_norm=1)
    changed_config.auto_map["AutoModel"] = "other.Model"

    new_auto_map = NormAlignLlavaConfig().auto_map
    assert new_auto_map == NormAlignLlavaConfig.auto_map_entries
    assert new_auto_map["AutoModel"] == "modeling_normalign_llava.NormAlignLlavaModel"

    from_changed = NormAlignLlavaConfig(**changed_config.to_dict())
    assert from_changed.model_type == "normalign_llava"
    assert from_changed.auto_map == changed_config.auto_map_entries


@pytest.mark.parametrize(("vision", "tied"), [("clip", True), ("siglip", False)])
@pytest.mark.parametrize(
    ("norm", "norm_class"),
    [
        ("layer_norm", modeling.GlobalWeightCompensatedLayerNorm),
        ("rms_norm", modeling.GlobalWeightCompensatedRMSNorm),
    ],
)
def test_a_model_made_from_a_config_is_aligned(vision, tied, norm, norm_class):
    model = tiny.model(vision=vision, tied=tied, projector_norm=norm)
    text_norm = tiny.reference_n_text(embedding_weight(model))
    assert isinstance(norm_of(model), norm_class)
    assert model.config.text_embedding_norm == pytest.approx(text_norm, rel=1e-12)

    gain = norm_of(model).weight
    expected_gain = torch.full_like(gain, text_norm / tiny.WIDTH**0.5)
    torch.testing.assert_close(gain, expected_gain)

    pixel_values = tiny.inputs()["pixel_values"]
    image_features = model.get_image_features(pixel_values).pooler_output[0]
    feature_norms = image_features.norm(dim=-1)
    expected_norms = torch.full_like(feature_norms, text_norm)
    torch.testing.assert_close(feature_norms, expected_norms, rtol=2e-3, atol=0.0)


def test_align_projector_norm_measures_again_and_leaves_padding_out():
    model = tiny.model(tied=False)
    norm = norm_of(model)
    with torch.no_grad():
        weight = embedding_weight(model)
        weight *= 3.0
        weight[5] = 0.0
        weight[98] = weight[tiny.IMAGE]  # padding repeats the image token's row
        norm.weight.normal_()
        norm.bias.normal_()

    expected = tiny.reference_n_text(weight, excluded=(tiny.IMAGE, 98))
    assert model.align_projector_norm() == pytest.approx(expected, rel=1e-12)
    assert model.config.text_embedding_norm == pytest.approx(expected, rel=1e-12)
    expected_gain = torch.full_like(norm.weight, expected / tiny.WIDTH**0.5)
    torch.testing.assert_close(norm.weight, expected_gain)
    assert not norm.bias.any()
    assert model.model.align_projector_norm() == pytest.approx(expected, rel=1e-12)


def test_measuring_changes_nothing():
    model = tiny.model()
    gain_before = norm_of(model).weight.detach().clone()
    config_before = copy.deepcopy(model.config.to_dict())
    with torch.no_grad():
        embedding_weight(model).mul_(1.5)

    expected = tiny.reference_n_text(embedding_weight(model))
    assert model.measure_text_embedding_norm() == pytest.approx(expected, rel=1e-12)
    assert model.config.to_dict() == config_before
    assert torch.equal(norm_of(model).weight, gain_before)


def test_an_image_token_outside_the_vocabulary_leaves_no_row_out():
    model = tiny.model()
    model.config.image_token_id = tiny.VOCABULARY
    expected = tiny.reference_n_text(embedding_weight(model), excluded=())
    assert model.measure_text_embedding_norm() == pytest.approx(expected, rel=1e-12)


def test_the_arm_with_a_gain_of_one_measures_and_keeps_its_gain():
    model = tiny.model(projector_gain_init="one")
    gain = norm_of(model).weight
    assert gain.eq(1).all()
    assert model.config.text_embedding_norm > 0

    assert model.align_projector_norm() > 0
    assert gain.eq(1).all()


def test_the_arm_without_a_norm_has_none_to_align():
    model = tiny.model(projector_norm="none")
    for parameter_name, _ in model.named_parameters():
        assert "projector.norm" not in parameter_name
    with pytest.raises(ValueError, match='projector_norm="none"'):
        model.align_projector_norm()


def test_the_arm_without_compensation_does_not_compensate():
    model = tiny.model(gradient_compensation="none")
    assert norm_of(model).compensate is False


def test_floor_and_epsilon_reach_the_norm():
    norm = norm_of(tiny.model(gain_floor=0.5, projector_norm_eps=1e-3))
    assert norm.compensate
    assert norm.gain_floor == 0.5
    assert norm.eps == 1e-3


SCALING = {
    "afmoe": (
        transformers.AfmoeConfig,
        {
            "mup_enabled": True,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 16,
        },
    ),
    "falcon_h1": (
        transformers.FalconH1Config,
        {
            "embedding_multiplier": 5.65,
            "mamba_d_ssm": 32,
            "mamba_n_heads": 2,
            "mamba_d_head": 16,
            "mamba_d_state": 8,
            "mamba_chunk_size": 8,
        },
    ),
    "gemma": (transformers.GemmaConfig, {}),
    "gemma2": (transformers.Gemma2Config, {}),
    "gemma3": (transformers.Gemma3TextConfig, {}),
    "granite": (transformers.GraniteConfig, {"embedding_multiplier": 12.0}),
    "hrm_text": (transformers.HrmTextConfig, {"embedding_scale": 7.0}),
    "hyperclovax": (transformers.HyperCLOVAXConfig, {"embedding_multiplier": 10.0}),
    "minicpm3": (transformers.MiniCPM3Config, {"scale_emb": 3, **LATENT_ATTENTION}),
    "recurrent_gemma": (transformers.RecurrentGemmaConfig, {}),
    "vaultgemma": (transformers.VaultGemmaConfig, {}),
}
"""Language models that scale embeddings: the configuration's class and options for it."""


def text_config_of(family):
    config_class, options = SCALING[family]
    return tiny.text_config(cls=config_class, **options)


def record_decoder_inputs(model) -> list[torch.Tensor]:
    """What the first layer of a decoder receives in each forward pass from now on."""
    recorded = []

    def record(module, arguments, keyword_arguments):
        if arguments:
            recorded.append(arguments[0])
        else:
            recorded.append(keyword_arguments["hidden_states"])

    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList):
            first_layer = module[0]
            break
    first_layer.register_forward_pre_hook(record, with_kwargs=True)
    return recorded


@pytest.mark.parametrize("family", ["gemma2", "granite"])
def test_visual_tokens_enter_the_decoder_with_the_norm_of_text(family):
    model = tiny.model(text=text_config_of(family))
    decoder_inputs = record_decoder_inputs(model.model.language_model)
    text_ids = [token_id for token_id in range(tiny.VOCABULARY) if token_id != tiny.IMAGE]
    input_ids = torch.tensor([text_ids + [tiny.IMAGE] * 4])
    model(
        input_ids=input_ids,
        pixel_values=torch.randn(1, 3, 16, 16),
        use_cache=False,
    )

    norms = decoder_inputs[0][0].double().norm(dim=-1)
    text_norms = norms[:-4]
    image_norms = norms[-4:]
    mean_text_norm = text_norms[text_norms > 0].mean().item()
    assert model.config.text_embedding_norm == pytest.approx(mean_text_norm, rel=1e-6)
    expected_norms = torch.full_like(image_norms, mean_text_norm)
    torch.testing.assert_close(image_norms, expected_norms, rtol=2e-3, atol=0.0)


@pytest.mark.parametrize("family", SCALING)
def test_scales_are_what_the_language_model_does_to_embeddings(family):
    config = text_config_of(family)
    torch.manual_seed(0)
    language_model = transformers.AutoModelForCausalLM.from_config(config).eval().base_model
    decoder_inputs = record_decoder_inputs(language_model)
    input_ids = torch.arange(3, 90)[None]
    embeddings = embedding_weight(language_model)[input_ids].detach()
    with torch.no_grad():
        language_model(input_ids=input_ids, use_cache=False)
        from_ids = decoder_inputs[0]
        # Some models pass through their first layer several times.
        decoder_inputs.clear()
        language_model(inputs_embeds=embeddings.clone(), use_cache=False)
        from_embeddings = decoder_inputs[0]

    text_scale, common_scale = modeling.embedding_scales(config)
    embedding_norms = embeddings.norm(dim=-1)
    tolerance = {"rtol": 1e-3, "atol": 0.0}
    expected_norms = embedding_norms * text_scale * common_scale
    torch.testing.assert_close(from_ids.norm(dim=-1), expected_norms, **tolerance)
    expected_norms = embedding_norms * common_scale
    torch.testing.assert_close(from_embeddings.norm(dim=-1), expected_norms, **tolerance)


@pytest.mark.parametrize(
    ("config_class", "options", "expected"),
    [
        (transformers.XGLMConfig, {"scale_embedding": True}, (6.0, 1.0)),
        (transformers.BioGptConfig, {"scale_embedding": True}, (6.0, 1.0)),
        (transformers.BioGptConfig, {"scale_embedding": False}, (1.0, 1.0)),
        (transformers.AfmoeConfig, {"mup_enabled": False}, (1.0, 1.0)),
        (transformers.GraniteMoeConfig, {"embedding_multiplier": 12}, (1.0, 12.0)),
        (transformers.Qwen2Config, {}, (1.0, 1.0)),
    ],
)
def test_scales_that_a_configuration_switches(config_class, options, expected):
    config = config_class(hidden_size=36, **options)
    assert modeling.embedding_scales(config) == expected


def test_the_dtype_is_the_language_model_s():
    model = tiny.model()
    model.model.vision_tower.half()
    model.model.multi_modal_projector.linear_1.double()
    assert model.dtype == torch.float32
    assert model.model.dtype == torch.float32

    model.model.language_model.bfloat16()
    assert model.dtype == torch.bfloat16
    assert model.model.dtype == torch.bfloat16


@pytest.mark.parametrize("tower_trains", [False, True])
def test_gradients_of_inputs_go_into_the_tower_only_if_it_is_trained(tower_trains):
    model = tiny.model().requires_grad_(False)
    vision_tower = model.model.vision_tower
    vision_tower.encoder.layers[1].mlp.fc1.weight.requires_grad_(tower_trains)
    model.enable_input_require_grads()

    embeddings = {
        "text": model.get_input_embeddings(),
        "tower": vision_tower.get_input_embeddings(),
    }
    outputs = {}
    for part_name, module in embeddings.items():

        def keep_output(module, arguments, output, part_name=part_name):
            outputs[part_name] = output

        module.register_forward_hook(keep_output)

    model(**tiny.inputs())
    assert outputs["text"].requires_grad
    assert outputs["tower"].requires_grad == tower_trains

    model.disable_input_require_grads()
    model(**tiny.inputs())
    assert not outputs["text"].requires_grad
    assert not outputs["tower"].requires_grad


def test_only_the_gradient_behind_the_norm_differs_between_the_arms():
    batch = tiny.inputs()
    logits = {}
    parameters = {}
    for compensation in ("global", "none"):
        model = tiny.model(gradient_compensation=compensation).train()
        output = model(**batch, labels=batch["input_ids"])
        output.loss.backward()
        logits[compensation] = output.logits
        parameters[compensation] = dict(model.named_parameters())
    assert torch.equal(logits["global"], logits["none"])

    gain = parameters["none"]["model.multi_modal_projector.norm.weight"]
    compensation_factor = 1.0 / gain.abs().mean()
    for parameter_name, parameter in parameters["none"].items():
        compensated_gradient = parameters["global"][parameter_name].grad
        if parameter.grad is None:
            assert compensated_gradient is None
            continue
        expected = parameter.grad
        if "vision_tower" in parameter_name or "projector.linear" in parameter_name:
            expected = expected * compensation_factor
        torch.testing.assert_close(compensated_gradient, expected, rtol=1e-3, atol=1e-6)


def test_everything_cast_to_bfloat16_still_runs_right():
    batch = tiny.inputs()
    expected = tiny.model()(**batch).logits
    bfloat16_model = tiny.model().to(torch.bfloat16)
    assert norm_of(bfloat16_model).weight.dtype == torch.bfloat16

    batch["pixel_values"] = batch["pixel_values"].bfloat16()
    logits = bfloat16_model(**batch).logits.float()
    assert (logits - expected).norm() <= 3e-2 * expected.norm()
