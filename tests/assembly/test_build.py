"""Assembly from tiny parts: what is kept, what is added, what is refused."""

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import tiny
import tiny_parts
import torch
import training
import transformers
from json_files import read_json, update_json
from PIL import Image
from safetensors.torch import load_file, save_file
from stored import weights
from train_data import image_bytes
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    GenerationConfig,
    LlavaForConditionalGeneration,
)

from normalign_llava import NormAlignLlavaConfig
from normalign_llava.assembly.arms import arm_of
from normalign_llava.assembly.build import (
    ARMS,
    build_checkpoint,
    retrofit_checkpoint,
)
from normalign_llava.assembly.chat_template import multimodal_chat_template
from normalign_llava.assembly.encoder import require_vision_config
from normalign_llava.assembly.merge import merge_adapter
from normalign_llava.assembly.parts import (
    _unlike_others as unlike_others,
    check_language_model,
    flags_of,
    generation_for_checkpoint,
    in_words,
)
from normalign_llava.assembly.processing import check_feature_layer
from normalign_llava.checkpoint.notices import fetch_notices
from normalign_llava.checkpoint.opening import open_checkpoint
from normalign_llava.checkpoint.precision import torch_dtype
from normalign_llava.diagnose.data import Sample, batches
from normalign_llava.evaluation.engine import as_lm
from normalign_llava.models import resolve_model


pytestmark = pytest.mark.slow

IMAGES = [
    Image.linear_gradient("L").convert("RGB"),
    Image.new("RGB", (20, 30), "red"),
]
BOS = 3 + ord("Z") - ord(" ")
NORM = "model.multi_modal_projector.norm"
EMBEDDINGS = "model.language_model.embed_tokens.weight"


def prompt(processor, question):
    content = [
        {"type": "image"},
        {"type": "text", "text": question},
    ]
    messages = [{"role": "user", "content": content}]
    return processor.apply_chat_template(messages, add_generation_prompt=True)


def load_model(checkpoint_path):
    return AutoModelForImageTextToText.from_pretrained(checkpoint_path)


def load_processor(checkpoint_path):
    return AutoProcessor.from_pretrained(checkpoint_path)


@pytest.fixture
def vision(tmp_path):
    return tiny_parts.vision(tmp_path / "vision")


@pytest.fixture
def language(tmp_path):
    return tiny_parts.language(tmp_path / "language")


@pytest.fixture
def output_path(tmp_path):
    return tmp_path / "built"


def assert_paper_s_arm_in_bfloat16(checkpoint_path) -> None:
    config = NormAlignLlavaConfig.from_pretrained(checkpoint_path)
    assert arm_of(config) == "gwc"
    assert config.projector_norm == "layer_norm"
    assert config.vision_feature_layer == -2
    for tensor_name, tensor in weights(checkpoint_path).items():
        if NORM in tensor_name:
            assert tensor.dtype == torch.float32, tensor_name
        else:
            assert tensor.dtype == torch.bfloat16, tensor_name


def test_a_build_is_by_default_the_paper_s_arm_in_the_language_model_s_precision(
    vision, language, output_path
):
    language_model = AutoModelForCausalLM.from_pretrained(language)
    language_model.to(torch.bfloat16).save_pretrained(language)
    encoder = AutoModel.from_pretrained(vision)
    encoder.to(torch.float32).save_pretrained(vision)
    build_checkpoint(vision, language, output_path)
    assert_paper_s_arm_in_bfloat16(output_path)


def test_a_retrofit_is_by_default_the_paper_s_arm_in_the_llava_s_precision(tmp_path, output_path):
    tiny_parts.llava(tmp_path / "llava", tiny.llava(tied=False).bfloat16())
    retrofit_checkpoint(str(tmp_path / "llava"), output_path)
    assert_paper_s_arm_in_bfloat16(output_path)


def test_a_seed_decides_the_projector_whatever_was_drawn_before(vision, language, tmp_path):
    projector_weights = []
    for build_number, seed in enumerate([0, 0, 44]):
        torch.rand(build_number + 1)
        output_path = tmp_path / f"built-{build_number}"
        build_checkpoint(vision, language, output_path, seed=seed)
        tensors = weights(output_path)
        projector_weights.append(tensors["model.multi_modal_projector.linear_1.weight"])

    first_weight, same_seed_weight, other_seed_weight = projector_weights
    assert torch.equal(first_weight, same_seed_weight)
    assert not torch.equal(first_weight, other_seed_weight)


def test_the_projector_begins_at_the_scale_of_the_language_model_s_layers(
    vision, language, output_path
):
    build_checkpoint(vision, language, output_path, seed=0)
    tensors = weights(output_path)
    expected = tiny.text_config().initializer_range
    for layer in ("linear_1", "linear_2"):
        layer_name = f"model.multi_modal_projector.{layer}"
        deviation = tensors[f"{layer_name}.weight"].std().item()
        assert deviation == pytest.approx(expected, rel=0.1)
        assert not tensors[f"{layer_name}.bias"].any()


def assert_tower_is_the_encoder(model, kind, vision) -> None:
    expected = tiny_parts.ENCODERS[kind]().from_pretrained(vision).state_dict()
    for tensor_name, tensor in model.model.vision_tower.state_dict().items():
        if tensor_name.startswith("pooler."):
            continue
        name_in_encoder = tensor_name
        if tensor_name not in expected:
            name_in_encoder = f"vision_model.{tensor_name}"
        assert torch.equal(tensor, expected[name_in_encoder]), tensor_name


def assert_names_no_local_path(checkpoint_path, local_path) -> None:
    for json_path in checkpoint_path.glob("*.js*"):
        assert str(local_path) not in json_path.read_text(), json_path


@pytest.mark.parametrize("kind", tiny_parts.ENCODERS)
def test_every_encoder_gives_as_many_features_as_placeholders(
    tmp_path, language, output_path, kind, caplog
):
    expected_count = tiny_parts.FEATURES[kind]
    vision = tiny_parts.vision(tmp_path / "vision", kind)
    report = build_checkpoint(vision, language, output_path)
    assert report.tokens_per_image == expected_count
    assert "tensors that are not of" not in caplog.text  # such as the text model of a CLIP

    processor = AutoProcessor.from_pretrained(output_path, trust_remote_code=False)
    assert type(processor) is transformers.LlavaProcessor
    multimodal_tokens = processor._get_num_multimodal_tokens([(30, 40)])
    assert multimodal_tokens["num_image_tokens"] == [expected_count]
    assert multimodal_tokens["num_image_patches"] == [1]

    model = load_model(output_path)
    assert model.config.image_seq_length == expected_count
    inputs = processor(
        images=IMAGES[:1],
        text=prompt(processor, "what is it"),
        return_tensors="pt",
    )
    input_ids = inputs["input_ids"]
    assert (input_ids == model.config.image_token_id).sum() == expected_count
    generated = model.generate(**inputs, max_new_tokens=3)
    assert generated.shape[1] == input_ids.shape[1] + 3

    assert_tower_is_the_encoder(model, kind, vision)
    model.save_pretrained(tmp_path / "again")
    assert_names_no_local_path(output_path, tmp_path)
    assert_names_no_local_path(tmp_path / "again", tmp_path)


@pytest.mark.parametrize(
    ("kind", "tied", "sizes"),
    [
        pytest.param("llama", False, {}, id="llama"),
        pytest.param("gemma", True, {}, id="gemma"),
        pytest.param(
            "gpt2",
            False,
            {
                "n_embd": 32,
                "n_layer": 2,
                "n_head": 2,
                "n_positions": 64,
            },
            id="gpt2",
        ),
    ],
)
def test_the_language_model_is_kept_whole(tmp_path, vision, output_path, kind, tied, sizes):
    language = tiny_parts.language(
        tmp_path / "language",
        tied=tied,
        cls=transformers.CONFIG_MAPPING[kind],
        **sizes,
    )
    build_checkpoint(vision, language, output_path)
    model = load_model(output_path)
    source = AutoModelForCausalLM.from_pretrained(language)
    source_embeddings = source.get_input_embeddings().weight
    row_count = len(source_embeddings)

    input_ids = torch.arange(5, 20)[None]
    logits = model(input_ids=input_ids).logits[..., :row_count]
    expected_logits = source(input_ids=input_ids).logits
    torch.testing.assert_close(logits, expected_logits)

    embeddings = model.get_input_embeddings().weight
    assert (model.lm_head.weight is embeddings) == tied
    assert len(embeddings) % 64 == 0
    assert torch.equal(embeddings[:row_count], source_embeddings)

    image_token_id = model.config.image_token_id
    padding_rows = [row for row in range(row_count, len(embeddings)) if row != image_token_id]
    first_padding = embeddings[padding_rows[0]]
    assert (embeddings[padding_rows] == first_padding).all()
    assert torch.equal(embeddings[image_token_id].abs(), first_padding.abs())
    assert not torch.equal(embeddings[image_token_id], first_padding)


def test_prompt_lookup_repeats_no_image_token(vision, language, output_path):
    generation_config = GenerationConfig(suppress_tokens=[5], eos_token_id=2)
    generation_config.save_pretrained(language)
    build_checkpoint(vision, language, output_path)
    model = tiny.heeding(load_model(output_path))
    processor = load_processor(output_path)
    assert model.generation_config.suppress_tokens == [5, processor.image_token_id]

    options = {"max_new_tokens": 12, "do_sample": False}
    lookup_options = {**options, "prompt_lookup_num_tokens": 3}
    for letter in "abcde":
        # The image is behind a line break, like the first token of an answer.
        text = prompt(processor, letter).replace(f"<image>{letter}", f"{letter}<image>")
        inputs = processor(text=text, images=IMAGES[0], return_tensors="pt")
        expected = model.generate(**inputs, **options)
        assert torch.equal(model.generate(**inputs, **lookup_options), expected)
        with pytest.raises(ValueError, match="features and image tokens do not match"):
            model.generate(**inputs, **lookup_options, suppress_tokens=[5])


@pytest.mark.parametrize(
    ("stored", "copied", "left_out"),
    [
        pytest.param(
            {"temperature": 0.9, "top_p": 0.6},
            {},
            {"temperature": 0.9, "top_p": 0.6},
            id="Vicuna's, which draws nothing",
        ),
        pytest.param(
            {
                "do_sample": True,
                "temperature": 0.7,
                "top_k": 20,
                "repetition_penalty": 1.05,
            },
            {"do_sample": True, "temperature": 0.7, "top_k": 20},
            {"repetition_penalty": 1.05},
            id="Qwen2.5's, which draws",
        ),
        pytest.param(
            {"early_stopping": True, "length_penalty": 2.0, "max_length": 4096},
            {"max_length": 4096},
            {"early_stopping": True, "length_penalty": 2.0},
            id="of a search that is not made",
        ),
        pytest.param(
            {"num_beams": 4, "early_stopping": True},
            {},
            {"num_beams": 4, "early_stopping": True},
            id="of a search",
        ),
        pytest.param(
            {"output_scores": True},
            {},
            {"output_scores": True},
            id="of what is not returned",
        ),
        pytest.param(
            {"use_cache": False, "cache_implementation": "static"},
            {"use_cache": False},
            {"cache_implementation": "static"},
            id="of no cache",
        ),
        pytest.param(
            {"chat_format": "chatml"},
            {},
            {"chat_format": "chatml"},
            id="that transformers does not know",
        ),
    ],
)
def test_flags_of_generation_that_are_copied_and_those_that_are_named(
    vision, language, output_path, stored, copied, left_out, caplog
):
    token_ids = {"eos_token_id": 2, "pad_token_id": 0}
    stored_path = Path(language, "generation_config.json")
    stored_path.write_text(json.dumps({**token_ids, **stored}))
    report = build_checkpoint(vision, language, output_path)

    image_token_id = load_processor(output_path).image_token_id
    expected = {**token_ids, "suppress_tokens": [image_token_id], **copied}
    written = read_json(output_path / "generation_config.json")
    written.pop("transformers_version")
    assert written == expected
    assert report.generation == expected
    assert report.generation_left_out == left_out

    record = read_json(output_path / "build.json")
    assert record["generation"] == expected
    assert record["generation_left_out"] == left_out
    for flag, setting in left_out.items():
        assert f"{flag} {setting}" in caplog.text

    model = load_model(output_path)
    model.generation_config.max_new_tokens = 3
    # A changed configuration may refuse to be saved.
    model.save_pretrained(output_path.with_name("again"))


FIRST_RESERVED = 95
"""The tiny tokenizers have 95 tokens. Further rows of the embeddings are reserved."""


def fill_reserved_rows(language, scale) -> None:
    """Makes all reserved embeddings the first one, times `scale`."""
    source = AutoModelForCausalLM.from_pretrained(language)
    with torch.no_grad():
        reserved = source.get_input_embeddings().weight[FIRST_RESERVED:]
        reserved.copy_(reserved[:1] * scale)
    source.save_pretrained(language)


@pytest.mark.parametrize("kind", ["grown", "of zeros", "alike"])
def test_an_added_token_is_not_taken_for_an_image_among_embeddings(
    tmp_path, vision, output_path, kind
):
    row_count = None if kind == "grown" else 128
    language = tiny_parts.language(tmp_path / "language", rows=row_count)
    if kind == "of zeros":
        fill_reserved_rows(language, scale=0)
    if kind == "alike":
        fill_reserved_rows(language, scale=1)
    build_checkpoint(vision, language, output_path)
    processor = load_processor(output_path)
    model = load_model(output_path)
    processor.tokenizer.add_tokens(["<cat>"])
    assert len(processor.tokenizer) <= model.get_input_embeddings().num_embeddings

    text = prompt(processor, "a <cat> and a <cat>")
    inputs = processor(images=IMAGES[:1], text=text, return_tensors="pt")
    options = {"max_new_tokens": 5, "do_sample": False}
    generated = model.generate(**inputs, **options)
    input_ids = inputs.pop("input_ids")
    embeddings = model.get_input_embeddings()(input_ids).detach()
    answer = model.generate(inputs_embeds=embeddings, **inputs, **options)
    expected_answer = generated[:, input_ids.shape[1] :]
    assert torch.equal(answer, expected_answer)

    source = AutoModelForCausalLM.from_pretrained(language)
    source_embeddings = source.get_input_embeddings().weight
    n_text = tiny.reference_n_text(source_embeddings, excluded=range(FIRST_RESERVED, 128))
    assert model.config.text_embedding_norm == pytest.approx(n_text, rel=1e-6)


def test_a_row_is_changed_only_where_others_are_the_same():
    weight = torch.tensor(
        [
            [0.0, 3.0, 4.0],
            [0.0, 3.0, 4.0],
            [1.0, 2.0, 2.0],
            [0.0, 0.0, 0.0],
        ]
    )
    assert unlike_others(weight, 0).tolist() == [0.0, -3.0, 4.0]
    assert unlike_others(weight, 2).tolist() == [1.0, 2.0, 2.0]
    assert unlike_others(weight, 3).tolist() == weight.mean(dim=0).tolist()
    # The norm stays.
    assert unlike_others(weight.clone(), 0).norm() == weight[0].norm()


def test_the_pooling_head_of_siglip_is_not_loaded(tmp_path):
    config = transformers.SiglipVisionConfig(**tiny.ENCODER, vision_use_head=True)
    config.save_pretrained(tmp_path)
    assert require_vision_config(open_checkpoint(tmp_path)).vision_use_head is False


def test_a_head_that_the_file_has_apart_stays_apart(tmp_path, vision, output_path):
    """Whatever the configuration says. Its embeddings grow, and that ties what it calls tied."""
    language = tiny_parts.language(tmp_path / "apart", tied=False)
    head = weights(language)["lm_head.weight"]
    update_json(f"{language}/config.json", {"tie_word_embeddings": True})
    build_checkpoint(vision, language, output_path)
    built_head = weights(output_path)["lm_head.weight"]
    assert torch.equal(built_head[: len(head)], head)


@pytest.mark.parametrize("tied", [False, True])
def test_no_row_that_is_added_to_the_vocabulary_is_ever_said(tmp_path, vision, output_path, tied):
    language = tiny_parts.language(tmp_path / "language", tied=tied)
    build_checkpoint(vision, language, output_path)
    source = AutoModelForCausalLM.from_pretrained(language)
    head = source.get_output_embeddings().weight.detach().double()
    model = load_model(output_path)
    grown_head = model.lm_head.weight.detach()

    added_rows = torch.arange(len(head), len(grown_head))
    if tied:
        # The image token's embedding differs from all others.
        added_rows = added_rows[added_rows != model.config.image_token_id]
    mean_row = head.mean(dim=0).float()
    expected = mean_row.expand(len(added_rows), -1)
    torch.testing.assert_close(grown_head[added_rows], expected, rtol=1e-5, atol=1e-6)

    torch.manual_seed(0)
    hidden_states = torch.randn(1000, head.shape[1])
    logits = hidden_states @ grown_head.T
    assert logits.argmax(dim=-1).max() < len(head)


@pytest.mark.parametrize("tied", [False, True])
def test_the_parameters_of_the_parts_add_up(tmp_path, vision, output_path, tied):
    language = tiny_parts.language(tmp_path / "language", tied=tied)
    report = build_checkpoint(vision, language, output_path)
    language_total = 0
    other_total = 0
    tensors = weights(output_path)
    for tensor_name, tensor in tensors.items():
        if "vision_tower" in tensor_name or "projector" in tensor_name:
            other_total += tensor.numel()
        else:
            language_total += tensor.numel()
    assert report.language_parameters == language_total
    assert report.vision_parameters + report.projector_parameters == other_total
    # A tied head is stored once.
    assert ("lm_head.weight" in tensors) == (not tied)


def test_a_template_without_a_date_has_none_in_the_record(vision, language, output_path):
    assert build_checkpoint(vision, language, output_path).prompt_date is None


def test_the_date_of_prompts_is_recorded(tmp_path, vision, output_path):
    dated_template = "{{ strftime_now('%d %b %Y') }}" + tiny_parts.CHATML
    language = tiny_parts.language(tmp_path / "dated", chat_template=dated_template)
    report = build_checkpoint(vision, language, output_path)
    assert report.prompt_date == "2024-07-26"
    assert read_json(output_path / "build.json")["prompt_date"] == "2024-07-26"
    assert prompt(load_processor(output_path), "a").startswith("26 Jul 2024")


NOTICES = {
    "LICENSE": b"terms",
    "license.md": b"terms",
    "NOTICE.txt": b"terms",
    "COPYING": b"terms",
    "LICENCE-2.0": b"terms",
    "USE_POLICY.md": b"what for",
}
NOT_NOTICES = {
    "license.py": b"code",
    "notices.json": b"{}",
    "LICENSE.txt": b"x" * (2**20 + 1),
    "README.md": b"---\nlicense: mit\n---\n",
    "my LICENSE": b"not by its name",
}


def test_notices_of_both_parts_are_copied_and_no_other_files(vision, language, output_path):
    for file_name, content in (NOTICES | NOT_NOTICES).items():
        Path(language, file_name).write_bytes(content)
    Path(vision, "LICENSE").write_bytes(b"of the encoder")
    report = build_checkpoint(vision, language, output_path)

    expected = {"notices/vision/LICENSE": b"of the encoder"}
    for file_name, content in NOTICES.items():
        expected[f"notices/language/{file_name}"] = content
    copied = {}
    for notice_path in (output_path / "notices").rglob("*"):
        if notice_path.is_file():
            notice_name = notice_path.relative_to(output_path).as_posix()
            copied[notice_name] = notice_path.read_bytes()
    assert copied == expected

    assert report.notices == sorted(expected)
    assert read_json(output_path / "build.json")["notices"] == sorted(expected)
    assert report.licenses["language"]["license"] == "mit"
    assert report.licenses["vision"] is None


def test_places_of_notices_are_not_believed(tmp_path):
    """What `build.json` names is read from the checkpoint's folder, and written to another."""
    model_path = tmp_path / "model"
    vision_notices = model_path / "notices" / "vision"
    vision_notices.mkdir(parents=True)
    (vision_notices / "LICENSE").write_bytes(b"terms")
    (vision_notices / "code.py").write_bytes(b"code")
    for file_name in ("LICENSE", "model/LICENSE"):
        (tmp_path / file_name).write_bytes(b"private")

    named = [
        "notices/vision/LICENSE",
        "notices/vision/../../../LICENSE",
        "../LICENSE",
        "LICENSE",
        str(tmp_path / "LICENSE"),
        "notices/vision/code.py",
        "notices/language/LICENSE",
        3,
    ]
    fetched = fetch_notices({"notices": named}, str(model_path))
    assert fetched == {"notices/vision/LICENSE": b"terms"}
    assert fetch_notices({"notices": "LICENSE"}, str(model_path)) == {}
    assert fetch_notices(None, str(model_path)) == {}


def assert_n_text_of(language, report, model) -> float:
    """Checks N_text, measured without image token and padding, and returns it."""
    source = AutoModelForCausalLM.from_pretrained(language)
    expected = tiny.reference_n_text(source.get_input_embeddings().weight, excluded=())
    assert report.n_text == pytest.approx(expected, rel=1e-9)
    assert model.config.text_embedding_norm == pytest.approx(expected, rel=1e-9)
    return expected


def test_the_arm_none_has_no_norm(vision, language, output_path):
    report = build_checkpoint(vision, language, output_path, arm="none", norm="layer_norm")
    model = load_model(output_path)
    assert_n_text_of(language, report, model)
    assert report.gain is None
    assert model.config.projector_norm == "none"


ARMS_WITH_NORM = [(arm, "layer_norm") for arm in ARMS if arm != "none"]


@pytest.mark.parametrize(("arm", "norm"), [*ARMS_WITH_NORM, ("gwc", "rms_norm")])
def test_arms_with_a_norm(vision, language, output_path, arm, norm):
    report = build_checkpoint(vision, language, output_path, arm=arm, norm=norm)
    model = load_model(output_path)
    n_text = assert_n_text_of(language, report, model)
    expected_gain = 1.0
    if arm != "unit":
        expected_gain = n_text / 32**0.5
    assert report.gain == pytest.approx(expected_gain, rel=1e-6)
    assert report.output == str(output_path)
    assert not report.from_llava

    norm_layer = model.model.multi_modal_projector.norm
    torch.testing.assert_close(norm_layer.weight, torch.full((32,), expected_gain))
    assert norm_layer.compensate == (arm == "gwc")
    assert model.config.projector_norm == norm

    record = read_json(output_path / "build.json")
    assert record["arm"] == arm
    assert "output" not in record


def assert_build_is_refused(folder, message, **options) -> None:
    """Building raises the message, and nothing is written into the folder."""
    before = sorted(folder.iterdir())
    with pytest.raises(ValueError, match=message):
        build_checkpoint(output=folder / "built", **options)
    assert sorted(folder.iterdir()) == before


@pytest.fixture
def siglip(tmp_path):
    return tiny_parts.vision(tmp_path / "vision", "siglip")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"feature_layer": 9}, "feature_layer 9 does not exist. Hidden states are 0 to 3"),
        ({"select_strategy": "default"}, "drops the first token"),
    ],
)
def test_options_that_do_not_fit_the_encoder_are_refused(
    tmp_path, siglip, language, options, message
):
    assert_build_is_refused(tmp_path, message, vision=siglip, language=language, **options)


def test_a_language_model_is_refused_as_an_encoder(tmp_path, siglip, language):
    message = "'llama' model, and it reads input_ids, not pixel_values"
    assert_build_is_refused(tmp_path, message, vision=language, language=language)


def test_an_encoder_is_refused_as_a_language_model(tmp_path, siglip, language):
    message = "'siglip_vision_model' model, not a causal language model"
    assert_build_is_refused(tmp_path, message, vision=siglip, language=siglip)


def build_with_full_features(vision, language, output_path, feature_layer):
    """Returns the model, its hidden states of an image, and the features of that image."""
    build_checkpoint(
        vision,
        language,
        output_path,
        feature_layer=feature_layer,
        select_strategy="full",
    )
    model = load_model(output_path)
    pixel_values = tiny.inputs()["pixel_values"]
    with torch.no_grad():
        encoded = model.model.vision_tower(pixel_values, output_hidden_states=True)
        (features,) = model.get_image_features(pixel_values).pooler_output
    return model, encoded.hidden_states, features


def test_one_hidden_state_is_projected_with_its_class_token(vision, language, output_path):
    model, hidden_states, features = build_with_full_features(vision, language, output_path, -1)
    assert model.config.vision_feature_layer == -1
    with torch.no_grad():
        expected = model.model.multi_modal_projector(hidden_states[-1])
    torch.testing.assert_close(features, expected[0])


def test_several_hidden_states_are_projected_together(vision, language, output_path):
    layers = (-2, -1, 1)
    model, hidden_states, features = build_with_full_features(vision, language, output_path, layers)
    assert model.config.vision_feature_layer == [-2, -1, 1]
    selected = torch.cat([hidden_states[layer] for layer in layers], dim=-1)
    with torch.no_grad():
        expected = model.model.multi_modal_projector(selected)
    torch.testing.assert_close(features, expected[0])


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(partial(build_checkpoint, "vision", "language"), id="build"),
        pytest.param(partial(retrofit_checkpoint, "llava"), id="retrofit"),
    ],
)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"arm": "full"}, "none, unit, aligned, gwc, .* got 'full', 'layer_norm'"),
        ({"norm": "batch_norm"}, "got 'gwc', 'batch_norm'"),
        ({"norm": "none"}, "got 'gwc', 'none'"),
        ({"dtype": "int8"}, "float32, bfloat16, float16, got 'int8'"),
        ({"dtype": torch.float64}, "got torch.float64"),
    ],
)
def test_options_that_do_not_exist_are_refused_before_anything_is_read(
    tmp_path, build, options, message
):
    with pytest.raises(ValueError, match=message):
        build(tmp_path / "built", **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dtype_name", ["float32", "bfloat16", "float16"])
def test_dtypes_by_name_and_by_themselves(dtype_name):
    expected = getattr(torch, dtype_name)
    assert torch_dtype(dtype_name) is expected
    assert torch_dtype(expected) is expected


def test_the_dtype_auto_stays():
    assert torch_dtype("auto") == "auto"


@pytest.mark.parametrize("arm", ARMS)
def test_the_arm_of_a_configuration_is_the_one_that_it_was_made_for(arm):
    assert arm_of(NormAlignLlavaConfig(**ARMS[arm])) == arm


def test_a_gain_of_1_with_compensation_is_the_arm_of_its_compensation():
    config = NormAlignLlavaConfig(projector_gain_init="one", gradient_compensation="global")
    assert arm_of(config) == "gwc"


def test_what_is_no_llava_gets_no_norm(language, output_path):
    with pytest.raises(ValueError, match="language is a 'llama' model. --from-llava"):
        retrofit_checkpoint(language, output_path)


def test_flags_that_are_off_are_not_named():
    config = GenerationConfig(
        use_cache=False,
        top_k=9,
        do_sample=True,
    )
    config.chat_format = False
    config.remove_invalid_values = False
    config.forced_eos_token_id = 5
    config.temperature = 0.7
    config.forced_bos_token_id = 0  # which is a token
    copied, left_out = generation_for_checkpoint(config)
    assert left_out == {"forced_eos_token_id": 5, "forced_bos_token_id": 0}
    assert copied.forced_eos_token_id is None
    assert not hasattr(copied, "chat_format")

    copied_flags = flags_of(copied)
    assert copied_flags == {
        "do_sample": True,
        "temperature": 0.7,
        "top_k": 9,
        "use_cache": False,
    }
    assert list(copied_flags) == sorted(copied_flags)
    assert in_words(copied_flags) == "do_sample True, temperature 0.7, top_k 9, use_cache False"


def test_flags_that_draw_answers_and_end_them_are_copied():
    flags = {
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 3,
        "decoder_start_token_id": 4,
        "suppress_tokens": [5],
        "max_length": 70,
        "max_new_tokens": 60,
        "do_sample": True,
        "temperature": 0.7,
        "top_k": 9,
        "top_p": 0.8,
        "min_p": 0.1,
        "top_h": 0.4,
        "typical_p": 0.9,
        "epsilon_cutoff": 0.01,
        "eta_cutoff": 0.02,
        "cache_implementation": "static",
        "cache_config": {"max_cache_len": 80},
    }
    config = GenerationConfig(**flags)
    config._from_model_config = True
    config._commit_hash = "a" * 40  # of its file
    copied, left_out = generation_for_checkpoint(config)
    assert flags_of(copied) == flags
    assert left_out == {}


def test_the_report_shows_what_was_copied_and_what_was_not(vision, language, output_path):
    Path(language, "LICENSE").write_text("terms")
    Path(vision, "NOTICE").write_text("of the encoder")
    generation_config = GenerationConfig(
        top_k=9,
        do_sample=True,
        repetition_penalty=1.5,
    )
    generation_config.save_pretrained(language)
    report = build_checkpoint(vision, language, output_path)

    label_column, content_column = report.renderable().columns
    content_by_label = dict(zip(label_column.cells, content_column.cells, strict=True))
    assert "top_k 9" in content_by_label["generation"]
    assert "repetition" not in content_by_label["generation"]
    assert content_by_label["generation_left_out"] == "repetition_penalty 1.5"
    assert content_by_label["notices"] == "notices/language/LICENSE, notices/vision/NOTICE"

    bare_report = replace(report, notices=[], generation_left_out={})
    bare_labels = list(bare_report.renderable().columns[0].cells)
    assert "notices" not in bare_labels
    assert "generation_left_out" not in bare_labels


@pytest.mark.parametrize(
    ("kind", "has_warning"),
    [
        ("bloom", True),
        ("nanochat", True),
        ("llama", False),
    ],
)
def test_a_language_model_that_undoes_the_gain_gives_a_warning(tmp_path, caplog, kind, has_warning):
    config = tiny.text_config(cls=transformers.CONFIG_MAPPING[kind])
    config.save_pretrained(tmp_path / kind)
    check_language_model(open_checkpoint(tmp_path / kind))
    assert ("the gain has no effect" in caplog.text) == has_warning


def test_a_language_model_that_reads_images_itself_is_refused(tmp_path):
    text_config = tiny.text_config(cls=transformers.Gemma3TextConfig)
    transformers.Gemma3Config(text_config=text_config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="'gemma3' model, not a causal language model"):
        check_language_model(open_checkpoint(tmp_path))


def test_a_language_model_with_damaged_weights_is_refused(vision, language, output_path):
    weights_path = f"{language}/model.safetensors"
    tensors = load_file(weights_path)
    tensors["model.norm.weight"][3] = torch.inf
    save_file(tensors, weights_path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="NaN or infinite: weights are damaged"):
        build_checkpoint(vision, language, output_path)


def test_the_count_of_tokens_follows_from_the_encoder_and_not_from_its_settings(
    tmp_path, language, output_path
):
    vision = tiny_parts.vision(tmp_path / "vision", "dinov2")
    update_json(f"{vision}/config.json", {"num_register_tokens": 4})
    report = build_checkpoint(vision, language, output_path)
    assert report.tokens_per_image == 4
    assert report.prefix_tokens == 1


@pytest.mark.parametrize("layer", [1, 3, -1, -4, [1, 3], [-4, -1]])
def test_hidden_states_that_exist_are_accepted(layer):
    # An encoder of 3 layers has 4 hidden states.
    check_feature_layer(layer, tiny.vision_config("clip"))


@pytest.mark.parametrize("layers", [[-2, -2], [-2, 2], [1, -1, 3]])
def test_a_hidden_state_that_is_given_twice_is_refused(layers):
    message = re.escape(f"feature_layer {layers} has hidden state {layers[-1] % 4} twice")
    with pytest.raises(ValueError, match=message):
        check_feature_layer(layers, tiny.vision_config("clip"))


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("feature_layer", [], "a whole number"),
        ("feature_layer", "-2", "a whole number"),
        ("feature_layer", 1.0, "a whole number"),
        ("feature_layer", True, "a whole number"),
        ("feature_layer", [-2, None], "a whole number"),
        ("select_strategy", "patch", "'default', 'full' or None"),
    ],
)
def test_an_option_of_python_that_is_not_allowed_is_named_before_parts_are_opened(
    output_path, option, value, allowed
):
    message = f"{option} is {allowed}.*got {re.escape(repr(value))}"
    with pytest.raises(ValueError, match=message):
        build_checkpoint("no vision", "no language", output_path, **{option: value})


@pytest.mark.parametrize("layer", [4, -5, [1, 4], [-5, -1], 0])
def test_hidden_states_that_do_not_exist_are_refused(layer):
    with pytest.raises(ValueError, match="feature_layer"):
        check_feature_layer(layer, tiny.vision_config("clip"))


@pytest.mark.parametrize(
    ("kind", "sizes", "message"),
    [
        (
            "opt",
            {"word_embed_proj_dim": 16, "ffn_dim": 48},
            "embeddings are not as wide as",
        ),
        (
            "phi",
            {},
            "its head has a bias",
        ),
        (
            "bart",
            {
                "encoder_layers": 1,
                "encoder_ffn_dim": 48,
                "encoder_attention_heads": 2,
                "decoder_layers": 1,
                "decoder_ffn_dim": 48,
                "decoder_attention_heads": 2,
            },
            "AutoModel does not know its base model",
        ),
        (
            "openai-gpt",
            {},
            "'openai-gpt' model, not a causal .* with a cache",
        ),
        # Falcon-H1 multiplies embeddings only where it looks them up itself, as LLaVA does for it.
        (
            "falcon_h1",
            {
                "mamba_d_ssm": 32,
                "mamba_n_heads": 2,
                "mamba_d_head": 16,
                "mamba_d_state": 8,
                "mamba_chunk_size": 8,
                "embedding_multiplier": 5.65,
            },
            "other logits than by itself",
        ),
        (
            "inkling_text",
            {"n_routed_experts": 8},
            "embeddings are more than a matrix",
        ),
    ],
    ids=["opt", "phi", "bart", "openai-gpt", "falcon_h1", "inkling_text"],
)
def test_language_models_that_llava_would_change_or_cannot_hold_are_refused(
    tmp_path, vision, output_path, kind, sizes, message
):
    language = tiny_parts.language(
        tmp_path / kind,
        cls=transformers.CONFIG_MAPPING[kind],
        **sizes,
    )
    with pytest.raises(ValueError, match=message):
        build_checkpoint(vision, language, output_path)
    assert not output_path.exists()


@pytest.fixture
def language_without_marks(tmp_path):
    """A language model whose template gets no generation marks."""
    template = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{% endfor %}"
    return tiny_parts.language(tmp_path / "language", chat_template=template)


def test_a_template_without_marks_makes_an_inference_checkpoint_with_a_warning(
    vision, language_without_marks, output_path, caplog
):
    report = build_checkpoint(vision, language_without_marks, output_path)
    assert not report.generation_marks
    assert "--chat-template" in caplog.text


def test_a_template_of_a_file_may_have_marks_instead(
    tmp_path, vision, language_without_marks, output_path, caplog
):
    template_path = tmp_path / "marked.jinja"
    marked_template, _ = multimodal_chat_template(tiny_parts.CHATML)
    template_path.write_text(marked_template)
    report = build_checkpoint(
        vision,
        language_without_marks,
        output_path,
        chat_template=template_path,
    )
    assert report.generation_marks
    assert "--chat-template" not in caplog.text


@pytest.fixture
def llava(tmp_path):
    """The folder of a stock LLaVA checkpoint."""
    return Path(tiny_parts.llava(tmp_path / "llava", tiny.llava(tied=False)))


@pytest.mark.parametrize(
    ("arm", "added_names"),
    [
        ("gwc", [f"{NORM}.weight", f"{NORM}.bias"]),
        ("none", []),
    ],
)
def test_retrofit_keeps_every_tensor_of_a_llava_checkpoint(
    llava, output_path, arm, added_names, caplog
):
    report = retrofit_checkpoint(str(llava), output_path, arm=arm)
    assert "LOAD REPORT" not in caplog.text
    assert "Not copied" not in caplog.text
    assert report.tokens_per_image == 4
    assert report.from_llava
    assert report.generation_left_out == {}

    generation_config = read_json(output_path / "generation_config.json")
    assert "projector_norm" not in generation_config
    assert "projector_gain_init" not in generation_config
    assert "gradient_compensation" not in generation_config
    assert load_processor(output_path).chat_template == tiny_parts.CHATML

    retrofitted = load_model(output_path).state_dict()
    stock_model = LlavaForConditionalGeneration.from_pretrained(llava)
    for tensor_name, expected in stock_model.state_dict().items():
        assert torch.equal(retrofitted.pop(tensor_name), expected)
    assert list(retrofitted) == added_names


MARKED_CHATML = multimodal_chat_template(tiny_parts.CHATML)[0]


@pytest.mark.parametrize(
    ("template", "has_marks"),
    [
        pytest.param(None, False, id="no-template"),
        pytest.param(MARKED_CHATML, True, id="marked"),
    ],
)
def test_a_llava_s_own_marks_are_reported(llava, output_path, template, has_marks):
    processor = load_processor(llava)
    processor.chat_template = template
    processor.tokenizer.chat_template = template
    (llava / "chat_template.jinja").unlink(missing_ok=True)
    processor.save_pretrained(llava)
    report = retrofit_checkpoint(str(llava), output_path)
    assert report.generation_marks == has_marks
    assert load_processor(output_path).chat_template == template


def test_a_vocabulary_with_room_for_the_image_token_stays(tmp_path, vision, output_path):
    row_count = len(tiny_parts.tokenizer()) + 1
    language = tiny_parts.language(tmp_path / "with-room", rows=row_count)
    build_checkpoint(vision, language, output_path)
    assert len(weights(output_path)[EMBEDDINGS]) == row_count


def test_retrofit_reads_the_features_that_its_llava_reads_in_the_dtype_that_is_asked(
    tmp_path, output_path
):
    llava_model = tiny.llava(tied=False)
    llava_model.config.vision_feature_select_strategy = "full"
    tiny_parts.llava(tmp_path / "llava", llava_model)
    report = retrofit_checkpoint(str(tmp_path / "llava"), output_path, dtype="bfloat16")
    assert report.tokens_per_image == 5  # with the class token
    assert load_processor(output_path).vision_feature_select_strategy == "full"

    dtypes = {tensor_name: tensor.dtype for tensor_name, tensor in weights(output_path).items()}
    assert dtypes.pop(f"{NORM}.weight") == torch.float32
    assert dtypes.pop(f"{NORM}.bias") == torch.float32
    assert set(dtypes.values()) == {torch.bfloat16}


def test_an_end_of_answers_that_a_llava_shows_is_left_out_after_its_retrofit(llava, output_path):
    """Its template says what the end is. Older versions stored it only for the processor."""
    processor = load_processor(llava)
    processor.tokenizer.add_tokens(["<end>"])
    processor.tokenizer.chat_template = None
    processor.chat_template = None
    processor.save_pretrained(llava)
    template = tiny_parts.CHATML.replace("<|im_end|>", "<end>")
    (llava / "chat_template.jinja").unlink(missing_ok=True)
    (llava / "chat_template.json").write_text(json.dumps({"chat_template": template}))

    before = load_processor(llava)
    assert before.chat_template == template
    retrofit_checkpoint(str(llava), output_path)
    after = load_processor(output_path)
    assert "<end>" in after.tokenizer.chat_template

    answer_ids = [5, before.tokenizer.convert_tokens_to_ids("<end>")]
    shown_before = before.tokenizer.decode(answer_ids, skip_special_tokens=True)
    shown_after = after.tokenizer.decode(answer_ids, skip_special_tokens=True)
    assert shown_before == shown_after + "<end>"


def test_a_llava_whose_image_token_is_another_than_its_processor_s_is_refused(llava, output_path):
    config_path = llava / "config.json"
    possible_names = {"image_token_index", "image_token_id"}
    (setting_name,) = possible_names & read_json(config_path).keys()
    update_json(config_path, {setting_name: 7})
    with pytest.raises(ValueError, match="image token"):
        retrofit_checkpoint(str(llava), output_path)


def test_a_tensor_that_llava_lacks_is_reported_and_refused(llava, output_path, caplog):
    weights_path = llava / "model.safetensors"
    tensors = load_file(weights_path)
    (bias_name,) = [tensor_name for tensor_name in tensors if tensor_name.endswith("linear_2.bias")]
    tensors["value_head"] = tensors.pop(bias_name)
    save_file(tensors, weights_path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="lacks 1 tensors of .*projector.linear_2.bias"):
        retrofit_checkpoint(str(llava), output_path)
    assert re.search("llava has 1 tensors that are not of .*: value_head", caplog.text)


def unsettled(checkpoint_path):
    """Turns a checkpoint into one from before padding side and first token were settled."""
    tokenizer = load_processor(checkpoint_path).tokenizer
    tokenizer.bos_token = "Z"
    tokenizer.add_bos_token = True
    tokenizer.save_pretrained(checkpoint_path)
    settings_path = checkpoint_path / "tokenizer_config.json"
    settings = read_json(settings_path)
    del settings["padding_side"]
    settings_path.write_text(json.dumps(settings))

    processor = load_processor(checkpoint_path)
    assert processor.tokenizer.padding_side == "right"
    assert processor.tokenizer.encode("a")[0] == BOS
    assert not prompt(processor, "a").startswith("Z")
    return checkpoint_path


def test_a_batch_is_answered_as_its_questions_are_one_by_one(tmp_path, vision, output_path):
    language = tiny_parts.language(tmp_path / "language", tied=False)
    build_checkpoint(vision, language, output_path)
    model = tiny.heeding(load_model(output_path))
    processor = load_processor(output_path)

    def answers(images, questions):
        inputs = processor(
            images=images,
            text=[prompt(processor, question) for question in questions],
            padding=True,
            return_tensors="pt",
        )
        generated = model.generate(**inputs, max_new_tokens=8, do_sample=False)
        answer_ids = generated[:, inputs["input_ids"].shape[1] :]
        return processor.batch_decode(answer_ids, skip_special_tokens=True)

    first_question = "what is it"
    second_question = "say in more words what there is"
    (first_answer,) = answers(IMAGES[:1], [first_question])
    (second_answer,) = answers(IMAGES[1:], [second_question])
    assert first_answer
    assert second_answer
    assert first_answer != second_answer
    assert answers(IMAGES, [first_question, second_question]) == [first_answer, second_answer]


def assert_settled(checkpoint_path) -> None:
    processor = load_processor(checkpoint_path)
    assert processor.tokenizer.padding_side == "left"
    first_ids = processor.tokenizer.encode(prompt(processor, "a"))[:2]
    assert first_ids == [BOS, 1]
    generation_config = GenerationConfig.from_pretrained(checkpoint_path)
    assert generation_config.suppress_tokens == [processor.image_token_id]


def train_one_step(checkpoint_path, output_path, **options) -> None:
    trainer = training.trainer(
        output_path,
        checkpoint_path,
        max_steps=1,
        save_strategy="steps",
        save_steps=1,
        **options,
    )
    trainer.train()
    trainer.save_model()


def test_training_from_an_unsettled_checkpoint_writes_settled_ones(tmp_path, caplog):
    checkpoint_path = unsettled(training.checkpoint(tmp_path))
    trained_path = tmp_path / "trained"
    train_one_step(checkpoint_path, trained_path)
    assert caplog.text.count("The tokenizer put 'Z' before a text") == 1
    assert_settled(trained_path)
    assert_settled(trained_path / "checkpoint-1")


def test_an_adapter_of_an_unsettled_checkpoint_is_merged_into_a_settled_one(tmp_path, caplog):
    checkpoint_path = unsettled(training.checkpoint(tmp_path))
    adapter_path = tmp_path / "trained"
    train_one_step(checkpoint_path, adapter_path, use_peft=True)
    assert caplog.text.count("The tokenizer put 'Z' before a text") == 1
    merge_adapter(adapter_path, tmp_path / "merged", base=str(checkpoint_path))
    assert_settled(tmp_path / "merged")


@pytest.fixture(scope="module")
def unsettled_model(tmp_path_factory):
    """An unsettled checkpoint, opened."""
    checkpoint_path = training.checkpoint(tmp_path_factory.mktemp("unsettled"))
    return resolve_model(str(unsettled(checkpoint_path)))


def assert_one_first_token(inputs) -> None:
    first_ids = inputs["input_ids"][0, :2].tolist()
    assert first_ids == [BOS, 1]


def test_an_unsettled_checkpoint_is_asked_with_one_first_token(unsettled_model):
    image = {"bytes": image_bytes(), "path": None}
    sample = Sample("a", "what", image)
    (inputs,) = batches(unsettled_model.processor, [sample], 1)
    assert_one_first_token(inputs)


def test_an_unsettled_checkpoint_is_evaluated_with_one_first_token(unsettled_model):
    language_model = as_lm(unsettled_model, batch_size=1)
    text = prompt(unsettled_model.processor, "a")
    with_image = language_model.tok_batch_multimodal_encode([text], [IMAGES[:1]])
    assert_one_first_token(with_image)

    text_only = text.replace("<image>", "")
    without_image = language_model.tok_batch_multimodal_encode([text_only], [[]])
    assert_one_first_token(without_image)
