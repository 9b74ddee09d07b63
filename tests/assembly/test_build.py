"""Assembly from tiny parts: what is kept, what is added, what is refused."""

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import tiny
import tiny_parts as parts
import torch
import training
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from stored import weights
from train_data import image_bytes
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor

from normalign_llava import NormAlignLlavaConfig
from normalign_llava.assembly.build import (
    ARMS,
    build_checkpoint,
    retrofit_checkpoint,
)
from normalign_llava.assembly.chat_template import multimodal_chat_template
from normalign_llava.assembly.generation import copied_generation, flags_of, in_words
from normalign_llava.assembly.merge import merge_adapter
from normalign_llava.assembly.parts import (
    _unlike_others as unlike_others,
    check_language_model,
    require_vision_config,
)
from normalign_llava.assembly.processing import arm_of, check_feature_layer
from normalign_llava.checkpoint.notices import fetch_notices
from normalign_llava.checkpoint.opening import open_checkpoint
from normalign_llava.checkpoint.precision import torch_dtype
from normalign_llava.diagnose.data import Sample, batches
from normalign_llava.evaluation.engine import as_lm
from normalign_llava.models import resolve_model


pytestmark = pytest.mark.slow

IMAGES = [Image.linear_gradient("L").convert("RGB"), Image.new("RGB", (20, 30), "red")]
BOS = 3 + ord("Z") - ord(" ")
NORM = "model.multi_modal_projector.norm"


def prompt(processor, question):
    asked = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}]
    return processor.apply_chat_template(asked, add_generation_prompt=True)


@pytest.fixture
def folders(tmp_path):
    vision = parts.vision(tmp_path / "vision")
    language = parts.language(tmp_path / "language")
    return vision, language, tmp_path / "built"


def test_what_is_not_said_is_the_paper_s_arm_in_the_language_model_s_precision(tmp_path):
    vision = parts.vision(tmp_path / "vision")
    language = parts.language(tmp_path / "language")
    for folder, cls in ((language, AutoModelForCausalLM), (vision, transformers.AutoModel)):
        dtype = torch.bfloat16 if folder == language else torch.float32
        cls.from_pretrained(folder).to(dtype).save_pretrained(folder)
    parts.llava(tmp_path / "llava", tiny.llava(tied=False).bfloat16())
    build_checkpoint(vision, language, tmp_path / "built")
    retrofit_checkpoint(str(tmp_path / "llava"), tmp_path / "retrofitted")
    for name in ("built", "retrofitted"):
        config = NormAlignLlavaConfig.from_pretrained(tmp_path / name)
        assert (arm_of(config), config.projector_norm) == ("gwc", "layer_norm")
        assert config.vision_feature_layer == -2
        for tensor, value in weights(tmp_path / name).items():
            assert value.dtype == (torch.float32 if NORM in tensor else torch.bfloat16), tensor


def test_a_seed_decides_the_projector_whatever_was_drawn_before(folders):
    vision, language, output = folders
    made = []
    for number, seed in enumerate([0, 0, 44]):
        torch.rand(number + 1)
        build_checkpoint(vision, language, f"{output}-{number}", seed=seed)
        made.append(weights(f"{output}-{number}")["model.multi_modal_projector.linear_1.weight"])
    assert torch.equal(made[0], made[1]) and not torch.equal(made[0], made[2])


def test_the_projector_begins_at_the_scale_of_the_language_model_s_layers(folders):
    vision, language, output = folders
    build_checkpoint(vision, language, output, seed=0)
    stored = weights(output)
    scale = tiny.text_config().initializer_range
    for name in ("linear_1", "linear_2"):
        projector = f"model.multi_modal_projector.{name}"
        assert stored[f"{projector}.weight"].std().item() == pytest.approx(scale, rel=0.1)
        assert not stored[f"{projector}.bias"].any()


@pytest.mark.parametrize("kind", parts.ENCODERS)
def test_every_encoder_gives_as_many_features_as_placeholders(tmp_path, kind, caplog):
    vision = parts.vision(tmp_path / "vision", kind)
    report = build_checkpoint(vision, parts.language(tmp_path / "language"), tmp_path / "built")
    assert report.tokens_per_image == parts.FEATURES[kind]
    assert "tensors that are not of" not in caplog.text  # such as the text model of a CLIP
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "built")
    processor = AutoProcessor.from_pretrained(tmp_path / "built", trust_remote_code=False)
    assert type(processor) is transformers.LlavaProcessor
    inputs = processor(images=IMAGES[:1], text=prompt(processor, "what is it"), return_tensors="pt")
    assert (inputs["input_ids"] == model.config.image_token_id).sum() == parts.FEATURES[kind]
    assert model.generate(**inputs, max_new_tokens=3).shape[1] == inputs["input_ids"].shape[1] + 3
    assert model.config.image_seq_length == parts.FEATURES[kind]
    expected = {"num_image_tokens": [parts.FEATURES[kind]], "num_image_patches": [1]}
    assert {k: processor._get_num_multimodal_tokens([(30, 40)])[k] for k in expected} == expected
    encoder = parts.ENCODERS[kind]().from_pretrained(vision).state_dict()
    for name, tensor in model.model.vision_tower.state_dict().items():
        if not name.startswith("pooler."):
            assert torch.equal(tensor, encoder.get(name, encoder.get(f"vision_model.{name}"))), name
    model.save_pretrained(tmp_path / "again")
    for path in [*(tmp_path / "built").glob("*.js*"), *(tmp_path / "again").glob("*.js*")]:
        assert str(tmp_path) not in path.read_text(), path  # no local path travels with it


@pytest.mark.parametrize("kind", ["llama", "gemma", "gpt2"])
def test_the_language_model_is_kept_whole(tmp_path, kind):
    cls = transformers.CONFIG_MAPPING[kind]
    tied = kind == "gemma"
    sizes = dict(n_embd=32, n_layer=2, n_head=2, n_positions=64) if kind == "gpt2" else {}
    language = parts.language(tmp_path / "language", tied=tied, cls=cls, **sizes)
    build_checkpoint(parts.vision(tmp_path / "vision"), language, tmp_path / "built")
    ours = AutoModelForImageTextToText.from_pretrained(tmp_path / "built")
    source = AutoModelForCausalLM.from_pretrained(language)
    ids = torch.arange(5, 20)[None]
    rows = source.get_input_embeddings().num_embeddings
    torch.testing.assert_close(ours(input_ids=ids).logits[..., :rows], source(input_ids=ids).logits)
    assert (ours.lm_head.weight is ours.get_input_embeddings().weight) == tied
    padded = ours.get_input_embeddings().weight
    image = ours.config.image_token_id
    others = [row for row in range(rows, len(padded)) if row != image]
    assert len(padded) % 64 == 0 and (padded[others] == padded[others[0]]).all()
    assert torch.equal(padded[image].abs(), padded[others[0]].abs())
    assert not torch.equal(padded[image], padded[others[0]])
    assert torch.equal(padded[:rows], source.get_input_embeddings().weight)


def test_prompt_lookup_repeats_no_image_token(folders):
    vision, language, output = folders
    transformers.GenerationConfig(suppress_tokens=[5], eos_token_id=2).save_pretrained(language)
    build_checkpoint(vision, language, output)
    model = tiny.heeding(AutoModelForImageTextToText.from_pretrained(output))
    processor = AutoProcessor.from_pretrained(output)
    assert model.generation_config.suppress_tokens == [5, processor.image_token_id]
    options = {"max_new_tokens": 12, "do_sample": False}
    for letter in "abcde":  # after a line break, as the first token of an answer
        text = prompt(processor, letter).replace(f"<image>{letter}", f"{letter}<image>")
        inputs = processor(text=text, images=IMAGES[0], return_tensors="pt")
        answer = model.generate(**inputs, **options)
        assert torch.equal(model.generate(**inputs, **options, prompt_lookup_num_tokens=3), answer)
        with pytest.raises(ValueError, match="features and image tokens do not match"):
            model.generate(**inputs, **options, prompt_lookup_num_tokens=3, suppress_tokens=[5])


FLAGS = {
    "Vicuna's, which draws nothing": (
        {"temperature": 0.9, "top_p": 0.6},
        {},
        {"temperature": 0.9, "top_p": 0.6},
    ),
    "Qwen2.5's, which draws": (
        {"do_sample": True, "temperature": 0.7, "top_k": 20, "repetition_penalty": 1.05},
        {"do_sample": True, "temperature": 0.7, "top_k": 20},
        {"repetition_penalty": 1.05},
    ),
    "of a search that is not made": (
        {"early_stopping": True, "length_penalty": 2.0, "max_length": 4096},
        {"max_length": 4096},
        {"early_stopping": True, "length_penalty": 2.0},
    ),
    "of a search": ({"num_beams": 4, "early_stopping": True},)
    + (
        {},
        {"num_beams": 4, "early_stopping": True},
    ),
    "of what is not returned": ({"output_scores": True}, {}, {"output_scores": True}),
    "of no cache": (
        {"use_cache": False, "cache_implementation": "static"},
        {"use_cache": False},
        {"cache_implementation": "static"},
    ),
    "that transformers does not know": ({"chat_format": "chatml"}, {}, {"chat_format": "chatml"}),
}
"""Flags of a language model's generation_config.json, those that are copied, those that are not."""


@pytest.mark.parametrize("kind", FLAGS)
def test_flags_of_generation_that_are_copied_and_those_that_are_named(folders, kind, caplog):
    vision, language, output = folders
    stored, copied, left_out = FLAGS[kind]
    file = Path(language, "generation_config.json")
    file.write_text(json.dumps({"eos_token_id": 2, "pad_token_id": 0, **stored}))
    report = build_checkpoint(vision, language, output)
    written = json.loads((output / "generation_config.json").read_text())
    written.pop("transformers_version")
    image = AutoProcessor.from_pretrained(output).image_token_id
    known = {"eos_token_id": 2, "pad_token_id": 0, "suppress_tokens": [image]}
    assert written == report.generation == {**known, **copied}
    assert report.generation_left_out == left_out
    record = json.loads((output / "build.json").read_text())
    assert record["generation"] == written and record["generation_left_out"] == left_out
    for name, value in left_out.items():
        assert f"{name} {value}" in caplog.text
    model = AutoModelForImageTextToText.from_pretrained(output)
    model.generation_config.max_new_tokens = 3
    model.save_pretrained(output.with_name("again"))  # which a changed configuration may refuse


def test_an_added_token_is_not_taken_for_an_image_among_embeddings(tmp_path):
    vision = parts.vision(tmp_path / "vision")
    for kind in ("grown", "of zeros", "alike"):
        folder = tmp_path / kind
        parts.language(folder / "language", rows=None if kind == "grown" else 128)
        if kind != "grown":
            source = AutoModelForCausalLM.from_pretrained(folder / "language")
            with torch.no_grad():
                reserved = source.get_input_embeddings().weight[95:]
                reserved.copy_(reserved[:1] * (kind == "alike"))
            source.save_pretrained(folder / "language")
        build_checkpoint(vision, str(folder / "language"), folder / "built")
        processor = AutoProcessor.from_pretrained(folder / "built")
        model = AutoModelForImageTextToText.from_pretrained(folder / "built")
        processor.tokenizer.add_tokens(["<cat>"])
        assert len(processor.tokenizer) <= model.get_input_embeddings().num_embeddings
        text = prompt(processor, "a <cat> and a <cat>")
        inputs = processor(images=IMAGES[:1], text=text, return_tensors="pt")
        expected = model.generate(**inputs, max_new_tokens=5, do_sample=False)
        ids = inputs.pop("input_ids")
        embeddings = model.get_input_embeddings()(ids).detach()
        options = dict(max_new_tokens=5, do_sample=False)
        answer = model.generate(inputs_embeds=embeddings, **inputs, **options)
        assert torch.equal(answer, expected[:, ids.shape[1] :]), kind
        source = AutoModelForCausalLM.from_pretrained(folder / "language")
        weight = source.get_input_embeddings().weight
        n_text = tiny.reference_n_text(weight, excluded=range(95, 128))
        assert model.config.text_embedding_norm == pytest.approx(n_text, rel=1e-6), kind


def test_a_row_is_changed_only_where_others_are_the_same():
    weight = torch.tensor([[0.0, 3.0, 4.0], [0.0, 3.0, 4.0], [1.0, 2.0, 2.0], [0.0, 0.0, 0.0]])
    assert unlike_others(weight, 0).tolist() == [0.0, -3.0, 4.0]  # of the same norm
    assert unlike_others(weight, 2).tolist() == [1.0, 2.0, 2.0]
    assert unlike_others(weight, 3).tolist() == weight.mean(dim=0).tolist()
    assert unlike_others(weight.clone(), 0).norm() == weight[0].norm()


def test_the_pooling_head_of_siglip_is_not_loaded(tmp_path):
    transformers.SiglipVisionConfig(**tiny.ENCODER, vision_use_head=True).save_pretrained(tmp_path)
    assert require_vision_config(open_checkpoint(tmp_path)).vision_use_head is False


def test_a_head_that_the_file_has_apart_stays_apart(folders):
    """Whatever the configuration says; its embeddings grow, which ties what it calls tied."""
    vision, _, output = folders
    language = parts.language(output.with_name("apart"), tied=False)
    head = weights(language)["lm_head.weight"]
    file = Path(language, "config.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tie_word_embeddings": True}))
    build_checkpoint(vision, language, output)
    assert torch.equal(weights(output)["lm_head.weight"][: len(head)], head)


@pytest.mark.parametrize("tied", [False, True])
def test_no_row_that_is_added_to_the_vocabulary_is_ever_said(tmp_path, tied):
    language = parts.language(tmp_path / "language", tied=tied)
    build_checkpoint(parts.vision(tmp_path / "vision"), language, tmp_path / "built")
    source = AutoModelForCausalLM.from_pretrained(language)
    head = source.get_output_embeddings().weight.detach().double()
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "built")
    grown = model.lm_head.weight.detach()
    added = torch.arange(len(head), len(grown))
    if tied:  # the image token's embedding is no other's
        added = added[added != model.config.image_token_id]
    expected = head.mean(dim=0).float().expand(len(added), -1)
    torch.testing.assert_close(grown[added], expected, rtol=1e-5, atol=1e-6)
    torch.manual_seed(0)
    logits = torch.randn(1000, head.shape[1]) @ grown.T
    assert logits.argmax(dim=-1).max() < len(head)


@pytest.mark.parametrize("tied", [False, True])
def test_the_parameters_of_the_parts_add_up(tmp_path, tied):
    language = parts.language(tmp_path / "language", tied=tied)
    report = build_checkpoint(parts.vision(tmp_path / "v"), language, tmp_path / "built")
    stored = weights(tmp_path / "built")  # a tied head is stored once
    parameters = sum(tensor.numel() for tensor in stored.values())
    counts = (report.vision_parameters, report.projector_parameters, report.language_parameters)
    assert sum(counts) == parameters
    of_language = {
        name for name in stored if "vision_tower" not in name and "projector" not in name
    }
    assert report.language_parameters == sum(stored[name].numel() for name in of_language)
    assert ("lm_head.weight" in of_language) == (not tied)


def test_the_date_of_prompts_is_recorded(folders):
    vision, language, output = folders
    assert build_checkpoint(vision, language, output).prompt_date is None
    dated = "{{ strftime_now('%d %b %Y') }}" + parts.CHATML
    other = parts.language(output.with_name("dated"), chat_template=dated)
    report = build_checkpoint(vision, other, output.with_name("dated-model"))
    record = json.loads((output.with_name("dated-model") / "build.json").read_text())
    assert report.prompt_date == record["prompt_date"] == "2024-07-26"
    processor = AutoProcessor.from_pretrained(output.with_name("dated-model"))
    assert prompt(processor, "a").startswith("26 Jul 2024")


NOTICES = {
    **{
        name: b"terms" for name in ("LICENSE", "license.md", "NOTICE.txt", "COPYING", "LICENCE-2.0")
    },
    "USE_POLICY.md": b"what for",
}
OTHERS = {"license.py": b"code", "notices.json": b"{}", "LICENSE.txt": b"x" * (2**20 + 1)}
OTHERS |= {"README.md": b"---\nlicense: mit\n---\n", "my LICENSE": b"not by its name"}


def test_notices_of_both_parts_are_copied_and_no_other_files(folders):
    vision, language, output = folders
    for name, content in (NOTICES | OTHERS).items():
        Path(language, name).write_bytes(content)
    Path(vision, "LICENSE").write_bytes(b"of the encoder")
    report = build_checkpoint(vision, language, output)
    expected = {f"notices/language/{name}": content for name, content in NOTICES.items()}
    expected["notices/vision/LICENSE"] = b"of the encoder"
    found = [path for path in (output / "notices").rglob("*") if path.is_file()]
    assert {path.relative_to(output).as_posix(): path.read_bytes() for path in found} == expected
    record = json.loads((output / "build.json").read_text())
    assert record["notices"] == report.notices == sorted(expected)
    assert report.licenses["language"]["license"] == "mit" and report.licenses["vision"] is None


def test_places_of_notices_are_not_believed(tmp_path):
    """What `build.json` names is read from the checkpoint's folder, and written to another."""
    model = tmp_path / "model"
    (model / "notices" / "vision").mkdir(parents=True)
    (model / "notices" / "vision" / "LICENSE").write_bytes(b"terms")
    (model / "notices" / "vision" / "code.py").write_bytes(b"code")
    for name in ("LICENSE", "model/LICENSE"):
        (tmp_path / name).write_bytes(b"private")
    named = ["notices/vision/LICENSE", "notices/vision/../../../LICENSE", "../LICENSE", "LICENSE"]
    named += [str(tmp_path / "LICENSE"), "notices/vision/code.py", "notices/language/LICENSE", 3]
    found = fetch_notices({"notices": named}, str(model))
    assert found == {"notices/vision/LICENSE": b"terms"}
    assert fetch_notices({"notices": "LICENSE"}, str(model)) == {}
    assert fetch_notices(None, str(model)) == {}


@pytest.mark.parametrize("arm, norm", [*((arm, "layer_norm") for arm in ARMS), ("gwc", "rms_norm")])
def test_arms(folders, arm, norm):
    vision, language, output = folders
    report = build_checkpoint(vision, language, output, arm=arm, norm=norm)
    model = AutoModelForImageTextToText.from_pretrained(output)
    source = AutoModelForCausalLM.from_pretrained(language)
    n_text = tiny.reference_n_text(source.get_input_embeddings().weight, excluded=())
    assert report.n_text == pytest.approx(n_text, rel=1e-9)  # without image token and padding
    assert model.config.text_embedding_norm == pytest.approx(n_text, rel=1e-9)
    if arm == "none":
        assert report.gain is None and model.config.projector_norm == "none"
        return
    gain = 1.0 if arm == "unit" else n_text / 32**0.5
    norm_layer = model.model.multi_modal_projector.norm
    torch.testing.assert_close(norm_layer.weight, torch.full((32,), gain))
    assert report.gain == pytest.approx(gain, rel=1e-6)
    assert norm_layer.compensate == (arm == "gwc") and model.config.projector_norm == norm
    record = json.loads((output / "build.json").read_text())
    assert record["arm"] == arm and "output" not in record
    assert report.output == str(output) and not report.from_llava


@pytest.mark.parametrize(
    "change, message",
    [
        ({"feature_layer": 9}, "feature_layer 9 does not exist. Hidden states are 0 to 3"),
        ({"select_strategy": "default"}, "drops the first token"),
        ({"vision": "language"}, "'llama' model. .*siglip_vision_model"),
        ({"language": "vision"}, "'siglip_vision_model' model, not a causal language model"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_is_written(tmp_path, change, message):
    folders = parts.vision(tmp_path / "vision", "siglip"), parts.language(tmp_path / "language")
    before = sorted(tmp_path.iterdir())
    arguments = dict(zip(("vision", "language"), folders, strict=True))
    arguments |= {name: arguments.get(value, value) for name, value in change.items()}
    with pytest.raises(ValueError, match=message):
        build_checkpoint(output=tmp_path / "built", **arguments)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("layers", [-1, (-2, -1, 2)])
def test_hidden_states_that_are_projected(folders, layers):
    vision, language, output = folders
    build_checkpoint(vision, language, output, feature_layer=layers, select_strategy="full")
    model = AutoModelForImageTextToText.from_pretrained(output)
    chosen = layers if isinstance(layers, int) else [*layers]
    assert model.config.vision_feature_layer == chosen
    pixels = tiny.inputs()["pixel_values"]
    with torch.no_grad():
        states = model.model.vision_tower(pixels, output_hidden_states=True).hidden_states
        read = [states[layer] for layer in ([layers] if isinstance(layers, int) else layers)]
        expected = model.model.multi_modal_projector(torch.cat(read, dim=-1))  # with class token
        (features,) = model.get_image_features(pixels).pooler_output
    torch.testing.assert_close(features, expected[0])


@pytest.mark.parametrize(
    "options, message",
    [
        ({"arm": "full"}, "none, unit, aligned, gwc, .* got 'full', 'layer_norm'"),
        ({"norm": "batch_norm"}, "got 'gwc', 'batch_norm'"),
        ({"norm": "none"}, "got 'gwc', 'none'"),
        ({"dtype": "int8"}, "float32, bfloat16, float16, got 'int8'"),
        ({"dtype": torch.float64}, "got torch.float64"),
    ],
)
def test_options_that_do_not_exist_are_refused_before_anything_is_read(tmp_path, options, message):
    how = [partial(build_checkpoint, "vision", "language")]
    how += [partial(retrofit_checkpoint, "llava")]
    for build in how:
        with pytest.raises(ValueError, match=message):
            build(tmp_path / "built", **options)
    assert not list(tmp_path.iterdir())


def test_dtypes_by_name_and_by_themselves():
    for name in ("float32", "bfloat16", "float16"):
        dtype = getattr(torch, name)
        assert torch_dtype(name) is dtype and torch_dtype(dtype) is dtype
    assert torch_dtype("auto") == "auto"


@pytest.mark.parametrize("arm", ARMS)
def test_the_arm_of_a_configuration_is_the_one_that_it_was_made_for(arm):
    assert arm_of(NormAlignLlavaConfig(**ARMS[arm])) == arm


def test_a_gain_of_1_with_compensation_is_the_arm_of_its_compensation():
    config = NormAlignLlavaConfig(projector_gain_init="one", gradient_compensation="global")
    assert arm_of(config) == "gwc"


def test_what_is_no_llava_gets_no_norm(folders):
    _, language, output = folders
    with pytest.raises(ValueError, match="language is a 'llama' model. --from-llava"):
        retrofit_checkpoint(language, output)


def test_flags_that_are_off_are_not_named():
    config = transformers.GenerationConfig(use_cache=False, top_k=9, do_sample=True)
    config.chat_format = config.remove_invalid_values = False
    config.forced_eos_token_id = 5
    config.temperature = 0.7
    config.forced_bos_token_id = 0  # which is a token
    kept, left_out = copied_generation(config)
    assert left_out == {"forced_eos_token_id": 5, "forced_bos_token_id": 0}
    assert kept.forced_eos_token_id is None and not hasattr(kept, "chat_format")
    expected = {"do_sample": True, "temperature": 0.7, "top_k": 9, "use_cache": False}
    assert flags_of(kept) == expected and [*flags_of(kept)] == sorted(expected)
    assert in_words(flags_of(kept)) == "do_sample True, temperature 0.7, top_k 9, use_cache False"


def test_flags_that_draw_answers_and_end_them_are_copied():
    flags = dict(bos_token_id=1, eos_token_id=2, pad_token_id=3, decoder_start_token_id=4)
    flags |= dict(suppress_tokens=[5], max_length=70, max_new_tokens=60, do_sample=True)
    flags |= dict(temperature=0.7, top_k=9, top_p=0.8, min_p=0.1, top_h=0.4, typical_p=0.9)
    flags |= dict(epsilon_cutoff=0.01, eta_cutoff=0.02, cache_implementation="static")
    flags["cache_config"] = {"max_cache_len": 80}
    config = transformers.GenerationConfig(**flags)
    config._from_model_config = True
    config._commit_hash = "a" * 40  # of its file
    kept, left_out = copied_generation(config)
    assert flags_of(kept) == flags and left_out == {}


def test_the_report_shows_what_was_copied_and_what_was_not(folders, capsys):
    vision, language, output = folders
    Path(language, "LICENSE").write_text("terms")
    Path(vision, "NOTICE").write_text("of the encoder")
    flags = {"top_k": 9, "do_sample": True, "repetition_penalty": 1.5}
    transformers.GenerationConfig(**flags).save_pretrained(language)
    report = build_checkpoint(vision, language, output)
    table = report.renderable()
    rows = dict(zip(*(column.cells for column in table.columns), strict=True))
    assert "top_k 9" in rows["generation"] and "repetition" not in rows["generation"]
    assert rows["generation_left_out"] == "repetition_penalty 1.5"
    assert rows["notices"] == "notices/language/LICENSE, notices/vision/NOTICE"
    bare = replace(report, notices=[], generation_left_out={}).renderable()
    assert not {"notices", "generation_left_out"} & {*bare.columns[0].cells}


@pytest.mark.parametrize("kind, norms", [("bloom", True), ("nanochat", True), ("llama", False)])
def test_a_language_model_that_undoes_the_gain_is_told_of(tmp_path, caplog, kind, norms):
    config = tiny.text_config(cls=transformers.CONFIG_MAPPING[kind])
    config.save_pretrained(tmp_path / kind)
    check_language_model(open_checkpoint(tmp_path / kind))
    assert ("the gain has no effect" in caplog.text) == norms


def test_a_language_model_that_reads_images_itself_is_refused(tmp_path):
    text = tiny.text_config(cls=transformers.Gemma3TextConfig)
    transformers.Gemma3Config(text_config=text).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="'gemma3' model, not a causal language model"):
        check_language_model(open_checkpoint(tmp_path))


def test_a_language_model_with_damaged_weights_is_refused(folders):
    vision, language, output = folders
    file = f"{language}/model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][3] = torch.inf
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="NaN or infinite: weights are damaged"):
        build_checkpoint(vision, language, output)


def test_an_encoder_with_other_features_than_placeholders_is_refused(tmp_path):
    """The count of placeholders follows from the configuration, that of features from the model."""
    vision = parts.vision(tmp_path / "vision", "dinov2")
    file = Path(vision, "config.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_register_tokens": 4}))
    language = parts.language(tmp_path / "language")
    with pytest.raises(ValueError, match="An image has 8 image tokens in the prompt, and 8 and 4"):
        build_checkpoint(vision, language, tmp_path / "built")
    assert not (tmp_path / "built").exists()


def test_hidden_states_that_exist_and_those_that_do_not():
    config = tiny.vision_config("clip")  # of 3 layers, so of 4 hidden states
    for layer in (1, 3, -1, -4, [1, 3], [-4, -1]):
        check_feature_layer(layer, config)
    for layer in (4, -5, [1, 4], [-5, -1], 0):
        with pytest.raises(ValueError, match="feature_layer"):
            check_feature_layer(layer, config)


def test_language_models_that_llava_would_change_or_cannot_hold_are_refused(tmp_path):
    vision = parts.vision(tmp_path / "vision")
    mamba = dict(mamba_d_ssm=32, mamba_n_heads=2, mamba_d_head=16, mamba_d_state=8)
    mamba |= dict(mamba_chunk_size=8, embedding_multiplier=5.65)
    bart = dict(encoder_layers=1, encoder_ffn_dim=48, encoder_attention_heads=2)
    bart |= dict(decoder_layers=1, decoder_ffn_dim=48, decoder_attention_heads=2)
    for kind, sizes, message in (
        ("opt", dict(word_embed_proj_dim=16, ffn_dim=48), "embeddings are not as wide as"),
        ("phi", {}, "its head has a bias"),
        ("bart", bart, "AutoModel does not know its base model"),
        ("openai-gpt", {}, "'openai-gpt' model, not a causal .* with a cache"),
        # Falcon-H1 multiplies embeddings only where it looks them up itself, as LLaVA does for it.
        ("falcon_h1", mamba, "other logits than by itself"),
        ("inkling_text", dict(n_routed_experts=8), "embeddings are more than a matrix"),
    ):
        language = parts.language(tmp_path / kind, cls=transformers.CONFIG_MAPPING[kind], **sizes)
        with pytest.raises(ValueError, match=message):
            build_checkpoint(vision, language, tmp_path / "built")
    assert not (tmp_path / "built").exists()


def test_a_template_without_marks_makes_an_inference_checkpoint_with_a_warning(tmp_path, caplog):
    odd = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{% endfor %}"
    language = parts.language(tmp_path / "language", chat_template=odd)
    vision = parts.vision(tmp_path / "vision")
    assert not build_checkpoint(vision, language, tmp_path / "built").generation_marks
    assert "--chat-template" in caplog.text
    caplog.clear()
    file = tmp_path / "marked.jinja"
    file.write_text(multimodal_chat_template(parts.CHATML)[0])
    assert build_checkpoint(vision, language, tmp_path / "new", chat_template=file).generation_marks
    assert "--chat-template" not in caplog.text


@pytest.mark.parametrize("arm", ["gwc", "none"])
def test_retrofit_keeps_every_tensor_of_a_llava_checkpoint(tmp_path, arm, caplog):
    parts.llava(tmp_path / "llava", tiny.llava(tied=False))
    report = retrofit_checkpoint(str(tmp_path / "llava"), tmp_path / "built", arm=arm)
    assert "LOAD REPORT" not in caplog.text and report.tokens_per_image == 4
    assert "Not copied" not in caplog.text
    assert report.from_llava and report.generation_left_out == {}
    generation = json.loads((tmp_path / "built" / "generation_config.json").read_text())
    assert not {"projector_norm", "projector_gain_init", "gradient_compensation"} & {*generation}
    ours = AutoModelForImageTextToText.from_pretrained(tmp_path / "built").state_dict()
    stock = transformers.LlavaForConditionalGeneration.from_pretrained(tmp_path / "llava")
    assert all(torch.equal(ours.pop(name), value) for name, value in stock.state_dict().items())
    assert [*ours] == [f"{NORM}.weight", f"{NORM}.bias"] * (arm != "none")
    assert AutoProcessor.from_pretrained(tmp_path / "built").chat_template == parts.CHATML


@pytest.mark.parametrize("template", [None, multimodal_chat_template(parts.CHATML)[0]])
def test_a_llava_s_own_marks_are_reported(tmp_path, template):
    folder = tmp_path / "llava"
    parts.llava(folder, tiny.llava(tied=False))
    processor = AutoProcessor.from_pretrained(folder)
    processor.chat_template = processor.tokenizer.chat_template = template
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    processor.save_pretrained(folder)
    report = retrofit_checkpoint(str(folder), tmp_path / "built")
    assert report.generation_marks == (template is not None)
    assert AutoProcessor.from_pretrained(tmp_path / "built").chat_template == template


def test_a_vocabulary_with_room_for_the_image_token_stays(folders):
    vision, _, output = folders
    rows = len(parts.tokenizer()) + 1
    language = parts.language(output.with_name("with-room"), rows=rows)
    build_checkpoint(vision, language, output)
    assert len(weights(output)["model.language_model.embed_tokens.weight"]) == rows


def test_retrofit_reads_the_features_that_its_llava_reads_in_the_dtype_that_is_asked(tmp_path):
    llava = tiny.llava(tied=False)
    llava.config.vision_feature_select_strategy = "full"
    parts.llava(tmp_path / "llava", llava)
    report = retrofit_checkpoint(str(tmp_path / "llava"), tmp_path / "built", dtype="bfloat16")
    assert report.tokens_per_image == 5  # the class token's too
    assert (
        AutoProcessor.from_pretrained(tmp_path / "built").vision_feature_select_strategy == "full"
    )
    dtypes = {name: value.dtype for name, value in weights(tmp_path / "built").items()}
    wide = {name for name, dtype in dtypes.items() if dtype == torch.float32}
    assert wide == {f"{NORM}.weight", f"{NORM}.bias"}
    assert {*dtypes.values()} == {torch.float32, torch.bfloat16}


def test_an_end_of_answers_that_a_llava_shows_is_left_out_after_its_retrofit(tmp_path):
    """The end is told by its template, which older versions stored for the processor alone."""
    folder = tmp_path / "llava"
    parts.llava(folder, tiny.llava(tied=False))
    processor = AutoProcessor.from_pretrained(folder)
    processor.tokenizer.add_tokens(["<end>"])
    processor.tokenizer.chat_template = processor.chat_template = None
    processor.save_pretrained(folder)
    template = parts.CHATML.replace("<|im_end|>", "<end>")
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    before = AutoProcessor.from_pretrained(folder)
    assert before.chat_template == template
    retrofit_checkpoint(str(folder), tmp_path / "built")
    after = AutoProcessor.from_pretrained(tmp_path / "built")
    said = [5, before.tokenizer.convert_tokens_to_ids("<end>")]
    shown = [made.tokenizer.decode(said, skip_special_tokens=True) for made in (before, after)]
    assert shown[0] == shown[1] + "<end>"
    assert "<end>" in after.tokenizer.chat_template


def test_a_llava_whose_image_token_is_another_than_its_processor_s_is_refused(tmp_path):
    parts.llava(tmp_path / "llava", tiny.llava(tied=False))
    file = tmp_path / "llava" / "config.json"
    config = json.loads(file.read_text())
    (name,) = {"image_token_index", "image_token_id"} & config.keys()
    file.write_text(json.dumps(config | {name: 7}))
    with pytest.raises(ValueError, match="image token"):
        retrofit_checkpoint(str(tmp_path / "llava"), tmp_path / "built")


def test_a_tensor_that_llava_lacks_is_reported_and_refused(tmp_path, caplog):
    file = f"{parts.llava(tmp_path / 'llava', tiny.llava(tied=False))}/model.safetensors"
    tensors = load_file(file)
    bias = tensors.pop(next(name for name in tensors if name.endswith("linear_2.bias")))
    save_file(tensors | {"value_head": bias}, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="lacks 1 tensors of .*projector.linear_2.bias"):
        retrofit_checkpoint(str(tmp_path / "llava"), tmp_path / "built")
    assert re.search("llava has 1 tensors that are not of .*: value_head", caplog.text)


def unsettled(folder):
    """Turns a checkpoint into one from before padding side and first token were settled."""
    tokenizer = AutoProcessor.from_pretrained(folder).tokenizer
    tokenizer.bos_token = "Z"
    tokenizer.add_bos_token = True
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    del settings["padding_side"]
    file.write_text(json.dumps(settings))
    processor = AutoProcessor.from_pretrained(folder)
    assert processor.tokenizer.padding_side == "right" and processor.tokenizer.encode("a")[0] == BOS
    assert not prompt(processor, "a").startswith("Z")
    return folder


def test_a_batch_is_answered_as_its_questions_are_alone(tmp_path):
    language = parts.language(tmp_path / "language", tied=False)
    output = tmp_path / "built"
    build_checkpoint(parts.vision(tmp_path / "vision"), language, output)
    model = tiny.heeding(AutoModelForImageTextToText.from_pretrained(output))
    processor = AutoProcessor.from_pretrained(output)
    texts = [prompt(processor, text) for text in ("what is it", "say in more words what there is")]

    def answers(images, texts):
        inputs = processor(images=images, text=texts, padding=True, return_tensors="pt")
        made = model.generate(**inputs, max_new_tokens=8, do_sample=False)
        made = made[:, inputs["input_ids"].shape[1] :]
        return processor.batch_decode(made, skip_special_tokens=True)

    alone = [*answers(IMAGES[:1], texts[:1]), *answers(IMAGES[1:], texts[1:])]
    assert alone[0] != alone[1] and all(alone)
    assert answers(IMAGES, texts) == alone


@pytest.mark.parametrize("use_peft", [False, True])
def test_training_from_an_unsettled_checkpoint_writes_settled_ones(tmp_path, caplog, use_peft):
    checkpoint = unsettled(training.checkpoint(tmp_path))
    output = tmp_path / "trained"
    options = dict(max_steps=1, save_strategy="steps", save_steps=1, use_peft=use_peft)
    trainer = training.trainer(output, checkpoint, **options)
    trainer.train()
    trainer.save_model()
    assert caplog.text.count("The tokenizer put 'Z' before a text") == 1
    folders = [output, output / "checkpoint-1"]
    if use_peft:
        merge_adapter(output, tmp_path / "merged", base=str(checkpoint))
        folders = [tmp_path / "merged"]
    for folder in folders:
        processor = AutoProcessor.from_pretrained(folder)
        assert processor.tokenizer.padding_side == "left"
        assert processor.tokenizer.encode(prompt(processor, "a"))[:2] == [BOS, 1]
        generation = transformers.GenerationConfig.from_pretrained(folder)
        assert generation.suppress_tokens == [processor.image_token_id]


def test_an_unsettled_checkpoint_is_asked_with_one_first_token(tmp_path):
    handle = resolve_model(str(unsettled(training.checkpoint(tmp_path))))
    image = {"bytes": image_bytes(), "path": None}
    (asked,) = batches(handle.processor, [Sample("a", "what", image)], 1)
    lm = as_lm(handle, batch_size=1)
    text = prompt(handle.processor, "a")
    shown = lm.tok_batch_multimodal_encode([text], [IMAGES[:1]])
    alone = lm.tok_batch_multimodal_encode([text.replace("<image>", "")], [[]])
    for inputs in (asked, shown, alone):
        assert inputs["input_ids"][0].tolist()[:2] == [BOS, 1]
