import pytest
import tiny
import tiny_encoders
import tiny_parts
import torch
import transformers

from normalign_llava import build_checkpoint
from normalign_llava.export.requirements import check_exportable
from normalign_llava.export.run import export_gguf


SQUARE = {"height": 16, "width": 16}


def config(**options):
    vision = options.pop("vision", "siglip")
    return tiny.config(vision=vision, **options)


def image_processor(**options):
    return transformers.SiglipImageProcessor(**{"size": SQUARE, **options})


def refusal(model_config, processor=None):
    with pytest.raises(ValueError) as error:
        check_exportable("kite", model_config, processor or image_processor())
    return str(error.value)


@pytest.mark.parametrize("norm", ["layer_norm", "none"])
def test_siglip_with_or_without_a_layer_norm_is_exportable(norm):
    check_exportable("kite", config(projector_norm=norm), image_processor())


def test_a_class_token_is_refused_with_the_reason():
    message = refusal(config(vision="clip"))
    assert "its vision encoder (clip_vision_model) has a class token" in message
    assert "drops the first patch" in message


@pytest.mark.parametrize("name", tiny_encoders.ENCODERS)
def test_only_siglip_is_in_llama_cpp_and_class_tokens_are_named(name):
    model_config = config()
    kind = tiny_encoders.ENCODERS[name]
    model_config.vision_config.model_type = kind.model_type
    if kind.model_type == "siglip_vision_model":
        check_exportable("mine", model_config, image_processor())
    elif kind.prefix:
        assert f"({kind.model_type}) has a class token" in refusal(model_config)
    else:  # I-JEPA, AIMv2
        reason = f"has no vision encoder of type {kind.model_type}. Train with SigLIP"
        assert reason in refusal(model_config)


@pytest.mark.parametrize("part_name", ["text_config", None])
@pytest.mark.parametrize("method", ["bitsandbytes", "gptq"])
def test_stored_quantized_weights_are_refused(part_name, method):
    model_config = config()
    part = getattr(model_config, part_name) if part_name else model_config
    part.quantization_config = {"quant_method": method}
    message = refusal(model_config)
    assert f"its weights are stored quantized ({method})" in message
    assert "Export the checkpoint before it is quantized" in message


def test_an_rms_norm_is_refused():
    message = refusal(config(projector_norm="rms_norm"))
    assert "its norm is an RMSNorm" in message
    assert "with a LayerNorm, `normalign build`'s default" in message


def test_other_activations_are_refused():
    in_projector = config(projector_hidden_act="relu")
    assert "this one has relu" in refusal(in_projector)
    in_tower = config()
    in_tower.vision_config.hidden_act = "relu"
    assert "no activation relu in a vision encoder" in refusal(in_tower)


@pytest.mark.parametrize("layers", [[-1, -2], [2, 2]])
def test_feature_layers_that_do_not_rise_are_refused(layers):
    assert "in rising order" in refusal(with_layers(layers))


def with_layers(layers):
    model_config = config()
    model_config.vision_feature_layer = layers
    return model_config


def test_a_language_model_that_scales_text_only_is_refused():
    text = tiny.text_config(scale_emb=12.0)
    assert "would scale visual tokens of llama by 12" in refusal(config(text=text))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"size": {"height": 32, "width": 16}}, "llama.cpp makes 16 x 16 pixels"),
        ({"do_rescale": False}, "not scaled by 1 / 255"),
        ({"rescale_factor": 1 / 128}, "not scaled by 1 / 255"),
        ({"do_normalize": False}, "not scaled by 1 / 255"),
    ],
)
def test_other_pixels_are_refused(options, problem):
    assert problem in refusal(config(), image_processor(**options))


def test_a_processor_that_crops_is_judged_by_its_crop():
    processor = transformers.CLIPImageProcessor(size={"shortest_edge": 20}, crop_size=SQUARE)
    check_exportable("kite", config(), processor)


def test_another_model_is_refused():
    message = refusal(transformers.Qwen2Config())
    assert "kite is a qwen2 model" in message


def test_a_refused_model_leaves_nothing_behind(tmp_path):
    vision = tiny_parts.vision(tmp_path / "clip")
    language = tiny_parts.language(tmp_path / "language")
    build_checkpoint(vision=vision, language=language, output=tmp_path / "model")
    with pytest.raises(ValueError, match="has a class token"):
        export_gguf(tmp_path / "model", tmp_path / "gguf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["clip", "language", "model"]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"dtype": "auto"}, "dtype must be one of bfloat16, float16, float32, got 'auto'"),
        ({"dtype": "int8"}, "dtype must be one of bfloat16, float16, float32, got 'int8'"),
        ({"dtype": torch.int8}, "dtype must be one of bfloat16, float16, float32, got torch.int8"),
        ({"text_type": "q4_k_m"}, "text_type must be one of f16, bf16, f32, q8_0, got 'q4_k_m'"),
        ({"name": "a/b"}, "name must be a file's name without spaces, got 'a/b'"),
        ({"llama_cpp": "nowhere"}, "nowhere has no convert_hf_to_gguf.py"),
    ],
)
def test_bad_options_are_refused_before_a_model_is_opened(tmp_path, options, problem):
    with pytest.raises(ValueError, match=problem):
        export_gguf(tmp_path / "no-model", tmp_path / "gguf", **options)


def test_a_folder_whose_name_has_a_space_needs_the_option_name(tmp_path):
    problem = r"without spaces, got 'my model'. Give one with --name \(name=...\)"
    with pytest.raises(ValueError, match=problem):
        export_gguf(tmp_path / "my model", tmp_path / "gguf")
