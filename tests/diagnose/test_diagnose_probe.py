# SPDX-License-Identifier: Apache-2.0
"""The probe against a plain reference that keeps all states of all batches, in all families."""

import math
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import tiny
import torch
import vlm_families
from accelerate import cpu_offload
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from transformers import BitsAndBytesConfig, GraniteConfig, PreTrainedTokenizerFast
from transformers.models.mllama import MllamaConfig, MllamaForConditionalGeneration
from vlm_families import BOS, END, EOS, IMAGE, INDICATORS, START, WORDS

from normalign_llava import NormAlignLlavaForConditionalGeneration
from normalign_llava.diagnose.measure.depth import QUANTITIES, quantities
from normalign_llava.diagnose.measure.families import (
    PROJECTORS,
    boundary_ids,
    find_parts,
    token_positions,
    tokenizer_ids,
)
from normalign_llava.diagnose.measure.probe import probe
from normalign_llava.diagnose.report import Moments


pytestmark = pytest.mark.slow


@pytest.fixture
def text_batch():
    return {"input_ids": torch.tensor([[1, 5, 6, 7]])}


@pytest.mark.parametrize("family", vlm_families.FAMILIES)
def test_every_number_equals_the_reference(family):
    model, batch = vlm_families.make(family)
    _, other_batch = vlm_families.make(family, seed=1)
    batches = [batch, other_batch]
    report = probe(model, batches, tokenizer=make_tokenizer())
    expected = reference(model, batches)

    assert report.samples == len(batch["input_ids"]) + len(other_batch["input_ids"])
    check_norms_of_kinds(report, expected)
    check_curves(report.depth, expected)
    check_asymmetry(report.depth, model, batches)
    check_interface(report, model, batches, family)


def check_norms_of_kinds(report, expected):
    for kind, tokens in expected.items():
        assert report.tokens[kind] == len(tokens), kind
        final_norms = [token["final_norm"] for token in tokens]
        check_moments(report.depth.final_norm[kind], final_norms)
        first_norms = [token["norm"][0] for token in tokens]
        check_moments(getattr(report.interface, kind), first_norms)


CURVES = (
    "norm",
    "cosine",
    "rotation",
    "update_norm",
    "update_angle",
    "log_norm",
    "log_update",
)


def check_curves(depth, expected):
    for quantity in CURVES:
        curves = getattr(depth, quantity)
        assert set(curves) == set(expected), quantity
        for kind, tokens in expected.items():
            curve = curves[kind]
            assert len(curve.mean) == len(tokens[0][quantity])
            for layer, measured in enumerate(zip(curve.mean, curve.std, strict=True)):
                layer_moments = moments([token[quantity][layer] for token in tokens])
                approximately = pytest.approx(layer_moments, rel=1e-6, abs=1e-7)
                assert measured == approximately, (quantity, kind)


def check_asymmetry(depth, model, batches):
    visual_rotation = sum(depth.rotation["visual"].mean[:-1])
    text_rotation = sum(depth.rotation["text"].mean[:-1])
    assert depth.asymmetry == pytest.approx(visual_rotation / text_rotation, rel=1e-12)

    first_batch, last_batch = batches
    first_depth = probe(model, [first_batch], tokenizer=make_tokenizer()).depth
    last_depth = probe(model, [last_batch], tokenizer=make_tokenizer()).depth
    expected_error = abs(first_depth.asymmetry - last_depth.asymmetry) / 2
    assert depth.asymmetry_error == pytest.approx(expected_error, rel=1e-6)
    assert first_depth.asymmetry_error is None


def check_interface(report, model, batches, family):
    norms = report.interface
    assert report.projector in dict(model.named_modules())
    assert norms.projector_output is not None

    encoded_norms = []
    word_ids = []
    for batch in batches:
        encoded_norms += encoder_norms(model, batch, dim=1 if family == "fast_vlm" else -1)
        for token_id in batch["input_ids"].flatten().tolist():
            if token_id in WORDS:
                word_ids.append(token_id)
    check_moments(norms.encoder_output, encoded_norms)
    weight = model.get_input_embeddings().weight.detach().double()
    check_moments(norms.text_raw, weight[word_ids].norm(dim=-1).tolist())

    stored_norms = []
    for token_id, embedding in enumerate(weight):
        if token_id != IMAGE and embedding.any():
            stored_norms.append(embedding.norm().item())
    check_moments(norms.vocabulary_raw, stored_norms)

    width = model.config.get_text_config().hidden_size
    scales = {
        "paligemma": width**0.5,
        "gemma3": width**0.5,
        "llava_next_granite": 3.0,
    }
    scale = scales.get(family, 1.0)
    assert norms.scale == pytest.approx(scale, rel=1e-5)
    scaled_norms = [scale * norm for norm in stored_norms]
    check_moments(norms.vocabulary, scaled_norms, rel=1e-5)
    mean_norm, _ = moments(stored_norms)
    assert norms.ratio == pytest.approx(norms.visual.mean / (scale * mean_norm), rel=1e-5)
    assert norms.ratio_data == pytest.approx(norms.visual.mean / norms.text.mean)


def encoder_norms(model, batch, dim):
    image_inputs = {}
    for name, value in batch.items():
        if name.startswith(("pixel", "image_")):
            image_inputs[name] = value
    with torch.no_grad():
        features = model.get_image_features(**image_inputs, return_dict=True).last_hidden_state
    return features.double().norm(dim=dim).flatten().tolist()


def test_projector_is_measured_on_both_sides_and_the_norm_before_it():
    model, batch = vlm_families.make("normalign_llava")
    norms = probe(model, [batch]).interface

    projector = model.model.multi_modal_projector
    with torch.no_grad():
        encoded = model.model.vision_tower(batch["pixel_values"], output_hidden_states=True)
        projector_input = encoded.hidden_states[-2][:, 1:]
        activation = projector.act(projector.linear_1(projector_input))
        norm_input = projector.linear_2(activation)
        projector_output = projector.norm(norm_input)
    check_moments(norms.projector_input, row_norms(projector_input))
    check_moments(norms.norm_input, row_norms(norm_input))
    check_moments(norms.projector_output, row_norms(projector_output))
    assert norms.ratio == pytest.approx(1.0, abs=0.02)


def test_of_a_visual_vocabulary_the_table_is_measured():
    """Ovis projects by a table with a row for each visual word."""
    model, batch = vlm_families.make("ovis2")
    norms = probe(model, [batch]).interface
    assert norms.projector_input is None
    assert norms.projector_output.count == norms.visual.count

    table_norms = row_norms(model.model.visual_embeddings_table.weight.detach())
    check_moments(norms.visual_table, table_norms[: -len(INDICATORS)])
    check_moments(norms.indicator_table, table_norms[-len(INDICATORS) :])


def test_the_model_is_left_as_it_was_found():
    model, batch = vlm_families.make("qwen2_5_vl")
    with torch.no_grad():
        logits = model(**batch).logits
    decoder = model.train().get_decoder()
    decoder.layers[0].eval()
    modes = [module.training for module in model.modules()]

    states_of_probe = []

    def keep_states(module, inputs, states):
        states_of_probe.append(states)

    with decoder.norm.register_forward_hook(keep_states):
        probe(model, [batch])
    assert states_of_probe
    for states in states_of_probe:
        assert not states.requires_grad

    check_left_as_found(model, modes)
    with torch.no_grad():
        assert torch.equal(model.eval()(**batch).logits, logits)


def test_the_model_is_left_as_it_was_found_after_an_error():
    model, batch = vlm_families.make("qwen2_5_vl")
    decoder = model.train().get_decoder()
    decoder.layers[0].eval()
    modes = [module.training for module in model.modules()]

    def fail(module, inputs, states):
        raise ZeroDivisionError

    with decoder.norm.register_forward_hook(fail), pytest.raises(ZeroDivisionError):
        probe(model, [batch])
    check_left_as_found(model, modes)


def check_left_as_found(model, modes):
    assert [module.training for module in model.modules()] == modes
    assert "get_image_features" not in vars(model.model)
    # transformers leaves some hooks of its own.
    for module in model.modules():
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            assert not hook.__module__.startswith("normalign_llava")


def check_rotation_of_other_precision(report, model, batch, plain_report):
    """The reference computes in float64, whatever the precision."""
    tokens = reference(model, [batch])["visual"]
    expected_rotation, _ = moments([token["rotation"][1] for token in tokens])
    assert report.projector == "model.multi_modal_projector"
    rotation = report.depth.rotation
    assert rotation["visual"].mean[1] == pytest.approx(expected_rotation, rel=1e-6)
    assert rotation["text"].mean != plain_report.depth.rotation["text"].mean


def test_a_model_in_four_bits_is_measured(tmp_path):
    model, batch = vlm_families.make("normalign_llava")
    model.save_pretrained(tmp_path)
    quantized_model = NormAlignLlavaForConditionalGeneration.from_pretrained(
        tmp_path,
        quantization_config=BitsAndBytesConfig(load_in_4bit=True),
        dtype=torch.float32,
    )
    report = probe(quantized_model, [batch])
    assert report.dtype == "4-bit FP4, products in float32"
    check_rotation_of_other_precision(report, quantized_model, batch, probe(model, [batch]))


def test_a_model_with_adapters_is_measured():
    model, batch = vlm_families.make("normalign_llava")
    plain_report = probe(model, [batch])
    lora = LoraConfig(target_modules=r".*language_model.*\.q_proj", init_lora_weights=False)
    adapted_model = get_peft_model(model, lora)
    report = probe(adapted_model, [batch])
    assert report.dtype == "float32"
    base_model = adapted_model.get_base_model()
    check_rotation_of_other_precision(report, base_model, batch, plain_report)


def test_a_model_in_bfloat16_is_measured():
    model, batch = vlm_families.make("normalign_llava")
    half_model, _ = vlm_families.make("llava")
    half_model.to(torch.bfloat16)
    report = probe(half_model, [batch])
    assert report.dtype == "bfloat16"
    check_rotation_of_other_precision(report, half_model, batch, probe(model, [batch]))


def test_an_offloaded_model_is_measured():
    model, batch = vlm_families.make("normalign_llava")
    plain_report = probe(model, [batch])
    offloaded_model, _ = vlm_families.make("normalign_llava")
    cpu_offload(offloaded_model)
    assert offloaded_model.device.type == "meta"
    assert asdict(probe(offloaded_model, [batch])) == asdict(plain_report)


def test_sequences_without_text_or_without_an_image(text_batch):
    model, batch = vlm_families.make("llava")
    image_batch = {
        "input_ids": torch.tensor([[1, IMAGE, IMAGE, IMAGE, IMAGE]]),
        "pixel_values": batch["pixel_values"][:1],
    }
    report = probe(model, [image_batch])
    norms = report.interface
    assert report.tokens == {"visual": 4, "special": 1}
    assert norms.text is None
    assert norms.ratio_data is None
    assert report.depth.asymmetry is None
    assert norms.ratio == pytest.approx(norms.visual.mean / norms.vocabulary.mean)

    tokens_of_both = probe(model, [image_batch, text_batch]).tokens
    assert tokens_of_both == {"visual": 4, "text": 3, "special": 2}


def test_a_sequence_without_an_image_has_no_newline_tokens(text_batch):
    """In LLaVA-NeXT an image's rows end in newlines."""
    model, batch = vlm_families.make("llava_next")
    tokens = probe(model, [batch]).tokens
    tokens_of_both = probe(model, [batch, text_batch]).tokens
    expected = tokens | {"text": tokens["text"] + 3, "special": tokens["special"] + 1}
    assert tokens_of_both == expected


def test_special_tokens_of_zero_have_a_norm_and_no_direction():
    """A padding token's row may be all zero, and be used as another special token."""
    model, batch = vlm_families.make("llava")
    with torch.no_grad():
        model.get_input_embeddings().weight[[BOS, EOS]] = 0.0
    report = probe(model, [batch])
    assert report.interface.special.mean == 0.0
    assert report.interface.special.count == 4
    assert set(report.depth.norm) == {"visual", "text"}
    assert set(report.depth.rotation) == {"visual", "text"}


@pytest.mark.parametrize(("zero_token", "other_token"), [(BOS, EOS), (EOS, BOS)])
def test_tokens_of_zero_among_others_of_their_kind_count_only_for_the_norm(zero_token, other_token):
    """The first of a sequence stays zero, and the last does not."""
    model, batch = vlm_families.make("llava")
    weight = model.get_input_embeddings().weight
    with torch.no_grad():
        weight[zero_token] = 0.0
    report = probe(model, [batch])
    assert report.interface.special.count == 4
    for quantity in ("norm", "log_norm", "cosine", "rotation", "update_angle"):
        curve = getattr(report.depth, quantity)["special"]
        for value in (*curve.mean, *curve.std):
            assert math.isfinite(value), quantity
    other_norm = weight[other_token].detach().double().norm().item()
    assert report.depth.log_norm["special"].mean[0] == pytest.approx(math.log(other_norm))


def test_a_batch_without_an_image_does_not_count_in_the_error_of_the_asymmetry(text_batch):
    model, batch = vlm_families.make("llava")
    _, other_batch = vlm_families.make("llava", seed=1)
    depth = probe(model, [batch, other_batch]).depth
    depth_with_text = probe(model, [batch, text_batch, other_batch]).depth
    assert depth_with_text.asymmetry_error == pytest.approx(depth.asymmetry_error)
    assert depth.asymmetry_error != pytest.approx(0)
    assert depth_with_text.asymmetry != depth.asymmetry


def test_without_text_the_scale_of_embeddings_is_the_configuration_s():
    text_config = tiny.text_config(cls=GraniteConfig, embedding_multiplier=12.0)
    image_batch = {
        "input_ids": torch.tensor([[1, IMAGE, IMAGE, IMAGE, IMAGE]]),
        "pixel_values": tiny.inputs()["pixel_values"][:1],
    }
    norms = probe(tiny.llava(text=text_config), [image_batch]).interface
    assert norms.text is None
    assert norms.scale == pytest.approx(12.0)
    assert norms.vocabulary.mean == pytest.approx(12.0 * norms.vocabulary_raw.mean)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        pytest.param(
            [3.0, 0.0],
            [3.0, 3.0],
            {
                "norm": 3,
                "rotation": math.pi / 4,
                "update_norm": 3,
                "update_angle": math.pi / 2,
                "log_norm": math.log(3),
                "log_update": math.log(3),
            },
            id="across",
        ),
        pytest.param(
            [3.0, 0.0],
            [5.0, 0.0],
            {
                "norm": 3,
                "rotation": 0,
                "update_norm": 2,
                "update_angle": 0,
                "log_norm": math.log(3),
                "log_update": math.log(2),
            },
            id="along",
        ),
        pytest.param(
            [3.0, 0.0],
            [1.0, 0.0],
            {
                "norm": 3,
                "rotation": 0,
                "update_norm": 2,
                "update_angle": math.pi,
                "log_norm": math.log(3),
                "log_update": math.log(2),
            },
            id="against",
        ),
        pytest.param(
            [3.0, 0.0],
            [-3.0, 0.0],
            {
                "norm": 3,
                "rotation": math.pi,
                "update_norm": 6,
                "update_angle": math.pi,
                "log_norm": math.log(3),
                "log_update": math.log(6),
            },
            id="beyond",
        ),
        pytest.param(
            [0.0, 2.0],
            [0.0, 2.0],
            {
                "norm": 2,
                "rotation": 0,
                "update_norm": 0,
                "update_angle": None,
                "log_norm": math.log(2),
                "log_update": None,
            },
            id="no update",
        ),
        pytest.param(
            [0.0, 0.0],
            [0.0, 1.0],
            {
                "norm": 0,
                "rotation": None,
                "update_norm": 1,
                "update_angle": None,
                "log_norm": None,
                "log_update": 0,
            },
            id="from zero",
        ),
        pytest.param(
            [3.0, 4.0],
            [0.0, 0.0],
            {
                "norm": 5,
                "rotation": None,
                "update_norm": 5,
                "update_angle": math.pi,
                "log_norm": math.log(5),
                "log_update": math.log(5),
            },
            id="to zero",
        ),
    ],
)
def test_what_a_layer_does_to_a_state_by_hand(before, after, expected):
    # The state stands among others of other directions, as in a batch.
    states_before = torch.tensor([[1.0, 2.0], before, [0.0, 0.0]]).double()
    states_after = torch.tensor([[2.0, 1.0], after, [1.0, 1.0]]).double()
    values, exist = quantities(states_before, states_after)
    assert set(QUANTITIES) == set(expected)
    for position, quantity in enumerate(QUANTITIES):
        expected_value = expected[quantity]
        assert exist[position, 1].item() == (expected_value is not None), quantity
        if expected_value is not None:
            assert values[position, 1].item() == pytest.approx(expected_value), quantity


def test_quantities_of_a_scaled_state_are_finite():
    """Rounding makes the part across less than nothing."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(200, 64, generator=generator, dtype=torch.float64)
    values, _ = quantities(states, 1.7 * states)
    assert values.isfinite().all()


def test_special_tokens_of_a_tokenizer_are_those_that_it_calls_special():
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["plain"])
    special_ids = tokenizer_ids(tokenizer)
    assert {START, END} <= special_ids
    assert tokenizer.convert_tokens_to_ids("plain") not in special_ids


def test_no_tokenizer_has_no_special_tokens():
    assert tokenizer_ids(None) == set()


def test_a_tokenizer_may_list_its_special_tokens_without_adding_them():
    tokenizer = SimpleNamespace(added_tokens_decoder={}, all_special_ids=[3])
    assert tokenizer_ids(tokenizer) == {3}


def test_a_decoder_of_one_layer_has_no_asymmetry():
    model = tiny.llava(text=tiny.text_config(num_hidden_layers=1))
    depth = probe(model, [tiny.inputs()]).depth
    assert depth.asymmetry is None
    assert depth.asymmetry_error is None
    assert len(depth.rotation["text"].mean) == 1
    assert len(depth.norm["text"].mean) == 2


def test_a_model_whose_projector_is_not_known_is_measured_without_it(monkeypatch):
    monkeypatch.setitem(PROJECTORS, "llava", "elsewhere")
    model, batch = vlm_families.make("llava")
    report = probe(model, [batch])
    assert report.projector is None
    assert report.interface.projector_output is None
    assert report.interface.visual
    assert "'llava'" in report.left_out[0]


def test_a_report_names_the_model_and_the_data():
    model, batch = vlm_families.make("llava")
    report_of_type = probe(model, [batch], data="mine")
    assert report_of_type.model == "llava"
    assert report_of_type.data == "mine"

    model.config.name_or_path = "somebody/tiny"
    assert probe(model, [batch]).model == "tiny"
    assert probe(model, [batch], name="given").model == "given"


def zero_updates(layer):
    with torch.no_grad():
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()


def test_a_layer_that_changes_nothing():
    model, batch = vlm_families.make("llava")
    zero_updates(model.get_decoder().layers[1])
    depth = probe(model, [batch]).depth
    assert depth.rotation["text"].mean[1] == 0
    assert depth.cosine["text"].mean[1] == pytest.approx(1)
    update_angles = depth.update_angle["text"].mean
    assert math.isnan(update_angles[1])
    assert not math.isnan(update_angles[2])


def test_rows_that_are_more_than_scaled_have_no_n_text():
    model, batch = vlm_families.make("llava")
    lora = LoraConfig(target_modules=["embed_tokens"], r=4, lora_alpha=64, init_lora_weights=False)
    report = probe(get_peft_model(model, lora), [batch])
    norms = report.interface
    assert norms.scale is None
    assert norms.vocabulary is None
    assert norms.ratio is None
    assert norms.vocabulary_raw
    assert norms.ratio_data == pytest.approx(norms.visual.mean / norms.text.mean)
    assert "N_text" in report.left_out[0]


def make_mllama():
    """Llama 3.2 Vision sees images by cross-attention: no token of the sequence stands for one."""
    text_config = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "cross_attention_layers": [1],
    }
    vision_config = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_global_layers": 1,
        "attention_heads": 2,
    }
    config = MllamaConfig(vision_config=vision_config, text_config=text_config)
    return MllamaForConditionalGeneration(config)


def make_decoder():
    return tiny.llava().get_decoder()


def make_prompt_tuned():
    prompt = PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    return get_peft_model(tiny.llava(), prompt)


@pytest.mark.parametrize(
    ("make_model", "message"),
    [
        (make_mllama, "cannot be read. .* without cross-attention"),
        (make_decoder, "cannot be read. It must be a vision-language model"),
        (make_prompt_tuned, "Prompt tuning"),
    ],
)
def test_models_that_cannot_be_measured_are_refused(make_model, message):
    _, batch = vlm_families.make("llava")
    with pytest.raises(ValueError, match=message):
        probe(make_model(), [batch])


@pytest.mark.parametrize("field", ["pixel_values_videos", "input_features"])
def test_batches_with_other_modalities_are_refused(field):
    model, batch = vlm_families.make("llava")
    with pytest.raises(ValueError, match=field):
        probe(model, [{**batch, field: batch["pixel_values"]}])


def test_batches_without_an_image_are_refused(text_batch):
    model, _ = vlm_families.make("llava")
    with pytest.raises(ValueError, match=r"visual token.*97"):
        probe(model, [text_batch])


def test_what_is_no_list_of_batches_is_refused():
    model, batch = vlm_families.make("llava")
    pixels_first = {"pixel_values": batch["pixel_values"], **batch}
    without_ids = [{"pixel_values": batch["pixel_values"]}]
    for batches in (batch, pixels_first, without_ids):
        with pytest.raises(ValueError, match="input_ids.*Give a list of batches"):
            probe(model, batches)


@pytest.mark.parametrize(
    ("bias", "message"),
    [
        (0.0, "visual tokens are zero"),
        (math.inf, "visual.*NaN.*in state 0"),
    ],
)
def test_visual_tokens_that_are_zero_or_infinite_are_refused(bias, message):
    model, batch = vlm_families.make("llava")
    last_linear = model.model.multi_modal_projector.linear_2
    with torch.no_grad():
        last_linear.weight.zero_()
        last_linear.bias.fill_(bias)
    with pytest.raises(ValueError, match=message):
        probe(model, [batch])


def test_layers_that_change_nothing_have_no_asymmetry():
    model, batch = vlm_families.make("llava")
    for layer in model.get_decoder().layers:
        zero_updates(layer)
    assert probe(model, [batch]).depth.asymmetry is None


def test_text_of_zero_is_refused():
    model, batch = vlm_families.make("llava")
    for layer in model.get_decoder().layers:
        zero_updates(layer)
    with torch.no_grad():
        model.get_input_embeddings().weight.zero_()
    with pytest.raises(ValueError, match="All text tokens are zero in state 0"):
        probe(model, [batch])


def test_labels_and_the_cache_are_left_out():
    model, batch = vlm_families.make("llava")
    training_batch = {**batch, "labels": batch["input_ids"], "use_cache": True}
    report = probe(model, [batch], tokenizer=make_tokenizer())
    training_report = probe(model, [training_batch], tokenizer=make_tokenizer())
    assert asdict(training_report) == asdict(report)


def test_a_processor_names_its_tokenizer_s_tokens():
    model, batch = vlm_families.make("llava")
    report = probe(model, [batch], tokenizer=make_tokenizer())
    processor = SimpleNamespace(tokenizer=make_tokenizer())
    assert probe(model, [batch], tokenizer=processor).tokens == report.tokens


def test_a_model_in_eight_bits_is_named_so():
    model, batch = vlm_families.make("llava")
    model.is_loaded_in_8bit = True
    model.config.quantization_config = BitsAndBytesConfig(load_in_8bit=True)
    assert probe(model, [batch]).dtype.startswith("8-bit")


def test_ids_of_a_configuration_are_in_its_token_fields():
    config = tiny.config()
    known_ids = boundary_ids(config)
    config.video_token_index = 71
    config.own_token_ids = [72, None, "x"]
    config.flag_token_id = "none"
    assert boundary_ids(config) - known_ids == {71, 72}
    assert IMAGE not in known_ids


def test_the_projector_is_found_in_a_model_and_in_its_base_model():
    model = tiny.llava()
    assert find_parts(model).projector_name == "model.multi_modal_projector"
    assert find_parts(model.model).projector_name == "multi_modal_projector"


def test_a_family_whose_learned_rows_cannot_be_told_is_refused():
    model = tiny.llava()
    model.config.model_type = "hunyuan_vl"
    with pytest.raises(ValueError, match="learned rows cannot be distinguished"):
        find_parts(model)


def test_a_mask_of_pairs_of_tokens_pads_nothing():
    token_ids = torch.tensor([[5, IMAGE, 6]])
    pair_mask = torch.zeros(1, 1, 3, 3, dtype=torch.bool)
    positions = token_positions(token_ids, pair_mask, IMAGE)
    assert positions["visual"].tolist() == [[False, True, False]]
    assert positions["text"].tolist() == [[True, False, True]]


def test_a_mask_of_tokens_pads_the_masked_ones():
    token_ids = torch.tensor([[5, IMAGE, 6]])
    positions = token_positions(token_ids, torch.tensor([[0, 1, 1]]), IMAGE)
    assert positions["text"].tolist() == [[False, False, True]]


def make_tokenizer():
    """Knows the special tokens that not every family's configuration names."""
    vocabulary = {f"word{number}": number for number in range(tiny.VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="word0"))
    special_tokens = [AddedToken(f"word{number}", special=True) for number in (START, END)]
    tokenizer.add_special_tokens(special_tokens)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def row_norms(states):
    return states.double().norm(dim=-1).flatten().tolist()


def moments(values):
    """Mean and population standard deviation by plain sums."""
    mean = math.fsum(values) / len(values)
    squares = [(value - mean) ** 2 for value in values]
    return mean, math.sqrt(math.fsum(squares) / len(values))


def check_moments(measured: Moments, values, rel=1e-6):
    mean, deviation = moments(values)
    assert measured.mean == pytest.approx(mean, rel=rel)
    assert measured.std == pytest.approx(deviation, rel=rel, abs=1e-7 * mean)
    assert measured.count == len(values)


class StateRecorder:
    """Keeps what the layers of a decoder take and give in one forward pass, in float64."""

    def __init__(self, decoder):
        self.clear()
        for layer in decoder.layers:
            layer.register_forward_hook(self.keep_layer)
        decoder.norm.register_forward_hook(self.keep_final)

    def clear(self):
        self.inputs = []
        self.outputs = []
        self.final = None

    def keep_layer(self, module, arguments, output):
        states = output
        if isinstance(output, tuple):
            states = output[0]
        self.inputs.append(arguments[0].double())
        self.outputs.append(states.double())

    def keep_final(self, module, arguments, output):
        self.final = output.double()

    def token(self, sequence, position):
        """Every quantity of a token, as a list over layers, by plain formulas."""
        before = [states[sequence, position] for states in self.inputs]
        after = [states[sequence, position] for states in self.outputs]
        updates = []
        for state_before, state_after in zip(before, after, strict=True):
            updates.append(state_after - state_before)
        states = [*before, after[-1]]
        norms = [state.norm().item() for state in states]
        update_norms = [update.norm().item() for update in updates]
        return {
            "norm": norms,
            "cosine": cosines(states[:-1], states[1:]),
            "rotation": angles(before, after),
            "update_norm": update_norms,
            "update_angle": angles(before, updates),
            "final_norm": self.final[sequence, position].norm().item(),
            "log_norm": [math.log(norm) for norm in norms],
            "log_update": [math.log(norm) for norm in update_norms],
        }


def reference(model, batches):
    """Tokens by kind, as dicts of lists over layers, from all states and plain formulas."""
    recorder = StateRecorder(model.get_decoder())
    newline = newline_embedding(model)
    tokens = {}
    for batch in batches:
        recorder.clear()
        with torch.no_grad():
            model(**batch)
        for sequence, position in (batch["attention_mask"] > 0).nonzero().tolist():
            token_id = batch["input_ids"][sequence, position].item()
            embedding = recorder.inputs[0][sequence, position]
            kind = token_kind(token_id, embedding, newline)
            tokens.setdefault(kind, []).append(recorder.token(sequence, position))
    return tokens


def newline_embedding(model):
    parameters = dict(model.base_model.named_parameters(recurse=False))
    newline = parameters.get("image_newline")
    if newline is None:
        return None
    scale = getattr(model.config.text_config, "embedding_multiplier", 1)
    return newline.detach().double() * scale


def token_kind(token_id, embedding, newline):
    if token_id == IMAGE:
        if newline is not None and torch.allclose(embedding, newline):
            return "newline"
        return "visual"
    if token_id in WORDS:
        return "text"
    if token_id in INDICATORS:
        return "indicator"
    return "special"


def cosines(first_states, second_states):
    values = []
    for first, second in zip(first_states, second_states, strict=True):
        cosine = (first @ second / (first.norm() * second.norm())).item()
        values.append(max(-1.0, min(1.0, cosine)))
    return values


def angles(first_states, second_states):
    return [math.acos(cosine) for cosine in cosines(first_states, second_states)]
