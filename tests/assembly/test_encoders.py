"""Vision encoders of every kind: built, trained, saved, reloaded elsewhere. Others are refused."""

import json
import os
import re
import subprocess
import sys

import pytest
import tiny
import tiny_encoders
import tiny_parts as parts
import torch
import training
import transformers
from json_files import update_json
from PIL import Image
from remote_code import BLOCK
from safetensors.torch import load_file, save_file
from tiny_encoders import ENCODERS, SIZES, SQUARE
from transformers import AutoModel, AutoModelForImageTextToText, AutoProcessor

from normalign_llava.assembly.build import build_checkpoint, retrofit_checkpoint
from normalign_llava.assembly.encoder import (
    make_size_constant,
    plain_image_processor,
    require_vision_config,
    token_layout,
)
from normalign_llava.assembly.merge import merge_adapter
from normalign_llava.checkpoint.opening import check_processor, open_checkpoint
from normalign_llava.diagnose.measure.probe import probe


pytestmark = pytest.mark.slow

PATCHES = 4  # 2 x 2 in images of 16 pixels
PICTURE = Image.linear_gradient("L").convert("RGB")
QUESTION = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what"}]}]
SEVERAL = "RADIO"  # with the most tokens before its patches
IN_MAKE_TEST = ("MetaCLIP 2", "DINOv3", "InternViT", "data2vec", SEVERAL)


def ask(processor):
    """The inputs of a question about a picture."""
    text = processor.apply_chat_template(QUESTION, add_generation_prompt=True)
    return processor(images=[PICTURE], text=text, return_tensors="pt")


def build(folder, name, **options):
    """Builds a checkpoint with an encoder by its name, and returns the report."""
    vision = tiny_encoders.save(folder / "vision", name)
    language = parts.language(folder / "language")
    return build_checkpoint(vision, language, folder / "built", seed=0, **options)


def assert_features(folder, name):
    """The features are the projected patches of the encoder by itself, counted alike everywhere."""
    kind = ENCODERS[name]
    torch.manual_seed(1)
    encoder = kind.model().eval()
    for part in ("vision_model", "vision_tower"):
        encoder = dict(encoder.named_modules()).get(part, encoder)
        encoder = getattr(getattr(encoder, "model", encoder), part, encoder)
    model = AutoModelForImageTextToText.from_pretrained(folder)
    assert model.config.vision_config.model_type == kind.model_type.replace("metaclip_2", "clip")
    processor = AutoProcessor.from_pretrained(folder, trust_remote_code=False)
    inputs = ask(processor)
    assert [*inputs] == ["input_ids", "attention_mask", "pixel_values"]
    with torch.no_grad():
        states = encoder(inputs["pixel_values"], output_hidden_states=True).hidden_states
        assert states[-2].shape[1] == kind.prefix + PATCHES
        expected = model.model.multi_modal_projector(states[-2][:, kind.prefix :])
        features = model.get_image_features(inputs["pixel_values"]).pooler_output
    torch.testing.assert_close(torch.stack([*features]), expected, rtol=1e-5, atol=1e-6)
    assert check_processor(processor, model) == PATCHES == model.config.image_seq_length


@pytest.mark.parametrize("name", IN_MAKE_TEST)
def test_the_patches_are_selected_and_what_is_before_them_is_not(tmp_path, name):
    report = build(tmp_path, name)
    assert (report.prefix_tokens, report.tokens_per_image) == (ENCODERS[name].prefix, PATCHES)
    assert json.loads((tmp_path / "built" / "build.json").read_text())["prefix_tokens"] == (
        ENCODERS[name].prefix
    )
    assert_features(tmp_path / "built", name)


STRANGER = """
import json, torch, traceback
from PIL import Image
from transformers import AutoModel, AutoModelForImageTextToText, AutoProcessor

def answer(folder, messages):
    processor = AutoProcessor.from_pretrained(folder, trust_remote_code=True)
    model = AutoModelForImageTextToText.from_pretrained(folder, trust_remote_code=True)
    picture = Image.linear_gradient("L").convert("RGB")
    text = processor.apply_chat_template(messages, add_generation_prompt=True)
    inputs = processor(images=[picture], text=text, return_tensors="pt")
    with torch.no_grad():
        logits = model(**inputs).logits[0, -1].tolist()
    ids = model.generate(**inputs, max_new_tokens=8, do_sample=False)[0].tolist()
    # As vLLM: the base class, made from the configuration, filled, and run in bfloat16.
    base = AutoModel.from_config(model.config, trust_remote_code=True, dtype=torch.bfloat16)
    base.load_state_dict(model.model.state_dict())
    pixels = inputs["pixel_values"].bfloat16()
    features = base.get_image_features(pixel_values=pixels).pooler_output
    counted = processor._get_num_multimodal_tokens([(256, 256)])["num_image_tokens"]
    counted.append(len(torch.cat(list(features))))
    return type(model).__module__.split(".")[0], logits, ids, counted

for line in sys.stdin:
    try:
        answered = answer(*json.loads(line))
    except Exception:
        answered = traceback.format_exc()
    print("answer:", json.dumps(answered), flush=True)
"""


@pytest.fixture(scope="module")
def stranger(tmp_path_factory):
    """Asks a process that cannot import the package about a checkpoint."""
    home = tmp_path_factory.mktemp("stranger")
    environment = {**os.environ, "HF_HOME": str(home / "home"), "HF_HUB_OFFLINE": "1"}
    words = [sys.executable, "-c", BLOCK + STRANGER]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen(words, **pipes, env=environment, cwd=home)

    def answer(folder):
        process.stdin.write(json.dumps([str(folder), QUESTION]) + "\n")
        process.stdin.flush()
        line = next(line for line in process.stdout if line.startswith("answer: "))
        return json.loads(line.removeprefix("answer: "))

    yield answer
    process.stdin.close()
    process.wait()


@pytest.mark.nightly
@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_is_built_and_trained_and_a_stranger_answers_the_same(tmp_path, stranger, name):
    report = build(tmp_path, name)
    assert (report.prefix_tokens, report.tokens_per_image) == (ENCODERS[name].prefix, PATCHES)
    assert_features(tmp_path / "built", name)
    options = {"max_steps": 1, "vision_learning_rate": 1e-3, "gradient_checkpointing": True}
    trainer = training.trainer(tmp_path / "trained", tmp_path / "built", **options)
    before = training.weights(trainer.model)
    trainer.train()
    moved = training.moved(before, trainer.model)
    assert any("patch" in parameter for parameter in moved)  # the encoder's first layer
    trainer.save_model()
    module, logits, ids, counted = stranger(tmp_path / "trained")
    assert module == "transformers_modules" and counted == [PATCHES, PATCHES]
    inputs = ask(AutoProcessor.from_pretrained(tmp_path / "trained"))
    again = AutoModelForImageTextToText.from_pretrained(tmp_path / "trained")
    for model in (trainer.model.eval(), again):
        with torch.no_grad():
            torch.testing.assert_close(model(**inputs).logits[0, -1], torch.tensor(logits))
        assert model.generate(**inputs, max_new_tokens=8, do_sample=False)[0].tolist() == ids


def test_all_tokens_are_kept_if_asked(tmp_path):
    report = build(tmp_path, "DINOv3", select_strategy="full")
    assert (report.prefix_tokens, report.tokens_per_image) == (5, 5 + PATCHES)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "built")
    processor = AutoProcessor.from_pretrained(tmp_path / "built")
    assert check_processor(processor, model) == 5 + PATCHES


def test_a_strategy_that_is_given_to_a_call_selects_its_own_tokens(tmp_path):
    build(tmp_path, "DINOv3")
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "built")
    pixels = torch.randn(2, 3, 16, 16)
    for strategy, count in (("full", 5 + PATCHES), ("default", PATCHES), (None, PATCHES)):
        features = model.get_image_features(pixels, vision_feature_select_strategy=strategy)
        assert [len(one) for one in features.pooler_output] == [count, count]


def test_a_checkpoint_from_before_keeps_its_registers(tmp_path):
    """Built when "default" left out the first token only, without the field that counts them."""
    build(tmp_path, "DINOv2 with registers")
    file = tmp_path / "built" / "config.json"
    config = json.loads(file.read_text())
    assert config.pop("vision_prefix_tokens") == 5
    file.write_text(json.dumps(config | {"image_seq_length": 4 + PATCHES}))
    file = tmp_path / "built" / "processor_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps(settings | {"num_additional_image_tokens": 5}))
    opened = open_checkpoint(tmp_path / "built")
    assert check_processor(opened.processor, opened.load()) == 4 + PATCHES


def test_a_llava_whose_encoder_has_registers_keeps_them(tmp_path):
    torch.manual_seed(0)
    encoder = transformers.Dinov2WithRegistersConfig(**SIZES, num_register_tokens=4)
    config = tiny.config(cls=transformers.LlavaConfig, tied=False)
    config.vision_config = encoder
    llava = transformers.LlavaForConditionalGeneration(config)
    parts.llava(tmp_path / "llava", llava)
    file = tmp_path / "llava" / "processor_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps(settings | {"num_additional_image_tokens": 5}))
    report = retrofit_checkpoint(str(tmp_path / "llava"), tmp_path / "built", arm="none")
    assert (report.prefix_tokens, report.tokens_per_image) == (5, 4 + PATCHES)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "built")
    processor = AutoProcessor.from_pretrained(tmp_path / "built")
    inputs = processor(images=[PICTURE], text="<image>what", return_tensors="pt")
    stock = transformers.LlavaForConditionalGeneration.from_pretrained(tmp_path / "llava").eval()
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, stock(**inputs).logits)


@pytest.mark.parametrize("stored, dtype", [("float32", "bfloat16"), ("float16", "float32")])
def test_an_encoder_takes_the_dtype_of_the_checkpoint(tmp_path, stored, dtype):
    vision = tiny_encoders.save(tmp_path / "vision", SEVERAL)
    AutoModel.from_pretrained(vision, dtype=stored).save_pretrained(vision)
    language = parts.language(tmp_path / "language")
    build_checkpoint(vision, language, tmp_path / "built", dtype=dtype)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "built")
    expected = getattr(torch, dtype)
    assert model.model.vision_tower.dtype == model.config.vision_config.dtype == expected
    inputs = ask(AutoProcessor.from_pretrained(tmp_path / "built")).to(expected)
    assert model.generate(**inputs, max_new_tokens=2).shape[1] == inputs["input_ids"].shape[1] + 2


def test_diagnose_measures_the_patches_that_the_projector_reads(tmp_path):
    build(tmp_path, SEVERAL)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "built")
    inputs = ask(AutoProcessor.from_pretrained(tmp_path / "built"))
    interface = probe(model, [inputs]).interface
    with torch.no_grad():
        states = model.model.vision_tower(inputs["pixel_values"], output_hidden_states=True)
    norms = states.hidden_states[-2][0, ENCODERS[SEVERAL].prefix :].double().norm(dim=-1)
    assert interface.projector_input.count == interface.visual.count == PATCHES
    assert interface.projector_input.mean == pytest.approx(norms.mean().item(), rel=1e-6)
    assert interface.encoder_output.count == ENCODERS[SEVERAL].prefix + PATCHES


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["DINOv3", SEVERAL])
def test_an_adapter_on_four_bits_is_estimated_trained_and_merged(tmp_path, name):
    """DINOv3's names would change again if the renaming of older files were applied to them."""
    build(tmp_path, name)
    options = {"use_peft": True, "load_in_4bit": True, "max_steps": 1}
    shapes = training.trainer(tmp_path / "dry", tmp_path / "built", dry_run=True, **options)
    trainer = training.trainer(tmp_path / "adapter", tmp_path / "built", **options)
    assert trainer.estimate_memory().parts == shapes.estimate_memory().parts
    quantized = set()
    for module_path, module in trainer.model.named_modules():
        if type(module).__name__ == "Linear4bit":
            quantized.add("language_model" in module_path)
    assert quantized == {True}
    trainer.train()
    trainer.save_model()
    merge_adapter(tmp_path / "adapter", tmp_path / "merged", base=str(tmp_path / "built"))
    encoder = AutoModelForImageTextToText.from_pretrained(tmp_path / "built").model.vision_tower
    merged = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged")
    assert merged.config.vision_prefix_tokens == ENCODERS[name].prefix
    training.assert_equal(merged.model.vision_tower.state_dict(), encoder.state_dict())
    assert check_processor(AutoProcessor.from_pretrained(tmp_path / "merged"), merged) == PATCHES


def saved(folder, config):
    """The folder of an encoder with random weights."""
    torch.manual_seed(0)
    AutoModel.from_config(config).save_pretrained(folder)
    return folder


SIDES = {name: size for name, size in SIZES.items() if name != "image_size"}
SAM = transformers.SamVisionConfig(**SIZES, global_attn_indexes=[1], window_size=2)
SWIN = transformers.SwinConfig(
    image_size=16, patch_size=4, window_size=2, embed_dim=8, depths=[1, 1], num_heads=[1, 1]
)
SHUFFLING = transformers.ViTMAEConfig(**SIZES | {"image_size": 64}, mask_ratio=0.0)
REFUSED = {
    "NaFlex": (transformers.Siglip2VisionConfig(**SIDES, num_patches=4), "no fixed grid"),
    "SAM": (SAM, "maps .*of windows or convolutions"),
    "ViTDet": (transformers.VitDetConfig(**tiny_encoders.BY_RATIO), "maps .*of windows"),
    "Hiera": (transformers.HieraConfig(image_size=[16, 16], embed_dim=8), "no num_hidden_layers"),
    "Swin": (SWIN, "tokens are merged on the way"),
    "Pixtral": (transformers.PixtralVisionConfig(**SIZES), "join the images of a batch"),
    "ViT-MAE": (transformers.ViTMAEConfig(**SIZES), "it gives 2 tokens for an image"),
    "shuffled": (SHUFFLING, "not in the order of a grid"),
    "YOLOS": (transformers.YolosConfig(**SIZES | {"image_size": [16, 16]}), "not the last ones"),
    "video": (transformers.VideoMAEConfig(**SIZES), "does not run on them"),
    "other size": (transformers.CLIPVisionConfig(**SIZES | {"image_size": 32}), "doesn't match"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_encoder_whose_tokens_are_no_grid_is_refused_with_the_reason(tmp_path, name):
    config, reason = REFUSED[name]
    torch.manual_seed(0)
    vision = saved(tmp_path / "vision", config)
    side = 64 if name == "shuffled" else 16  # by chance, few patches may stay in order
    transformers.ViTImageProcessor(size={"height": side, "width": side}).save_pretrained(vision)
    language = parts.language(tmp_path / "language")
    with pytest.raises(ValueError, match=f"cannot be the vision encoder.*{reason}"):
        build_checkpoint(str(vision), language, tmp_path / "built")
    assert not (tmp_path / "built").exists()


@pytest.mark.parametrize(
    "config, reason",
    [
        (transformers.OwlViTVisionConfig(**SIZES), "AutoModel has no class for it"),
        (transformers.BertConfig(), "it reads input_ids, not pixel_values"),
        (transformers.ViTConfig(patch_size=[8, 4]), r"patch_size is \[8, 4\]"),
    ],
)
def test_a_configuration_shows_that_an_encoder_does_not_fit(tmp_path, config, reason):
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"cannot be the vision encoder.*{reason}"):
        require_vision_config(open_checkpoint(tmp_path))


@pytest.mark.parametrize(
    "settings",
    [
        {"model_type": "timm_wrapper"},
        {"pretrained_cfg": {"tag": "augreg"}},
        {"model_type": "llava", "vision_config": {"model_type": "timm_wrapper"}},
    ],
)
def test_a_model_of_timm_is_refused_without_asking_for_timm(tmp_path, settings):
    wrapped = {"architecture": "vit_tiny_patch16_224", "num_classes": 1000}  # needs timm to be read
    (tmp_path / "config.json").write_text(json.dumps(wrapped | settings))
    with pytest.raises(ValueError, match=r"a model of timm .*maps \(B, d, height, width\)"):
        require_vision_config(open_checkpoint(tmp_path))


def test_an_encoder_with_damaged_weights_is_refused():
    tower = transformers.CLIPVisionModel(tiny.vision_config("clip"))
    with torch.no_grad():
        tower.encoder.layers[1].mlp.fc2.bias[0] = torch.nan
    with pytest.raises(ValueError, match="hidden state -2 is NaN or infinite"):
        token_layout(tower, (16, 16), -2, "damaged")
    assert token_layout(tower, (16, 16), 1, "damaged").prefix == 1  # before the damage


def assert_same_tower(folder, other_folder) -> None:
    """The encoders of two checkpoints have one class, and the same tensors."""
    towers = []
    for checkpoint in (folder, other_folder):
        model = AutoModelForImageTextToText.from_pretrained(checkpoint)
        towers.append(model.model.vision_tower)
    assert type(towers[0]) is type(towers[1])
    training.assert_equal(towers[0].state_dict(), towers[1].state_dict())


@pytest.mark.parametrize("name", ["DINOv3", "TIPSv2", "CLIP"])
def test_the_encoder_of_a_built_checkpoint_is_built_in_again(tmp_path, name):
    """transformers would rename DINOv3's and TIPSv2's tensors a second time."""
    build(tmp_path, name)
    language = str(tmp_path / "language")
    report = build_checkpoint(str(tmp_path / "built"), language, tmp_path / "again")
    assert report.prefix_tokens == ENCODERS[name].prefix
    assert_same_tower(tmp_path / "built", tmp_path / "again")


BEHIND_THE_FEATURES = (
    "vision_model.encoder.layers.2.mlp.fc1.weight",
    "vision_model.post_layernorm.bias",
)


@pytest.mark.parametrize("tensor_name", BEHIND_THE_FEATURES)
def test_damage_behind_the_feature_layer_is_refused_before_the_language_model_is_read(
    tmp_path, tensor_name
):
    vision = parts.vision(tmp_path / "vision", "siglip")
    stored = load_file(f"{vision}/model.safetensors")
    [stored_name] = [name for name in stored if tensor_name.endswith(name)]
    stored[stored_name].view(-1)[-1] = torch.inf
    save_file(stored, f"{vision}/model.safetensors", metadata={"format": "pt"})
    language = parts.language(tmp_path / "language")
    (tmp_path / "language" / "model.safetensors").write_bytes(b"unread")
    in_encoder = re.escape(tensor_name.removeprefix("vision_model."))
    with pytest.raises(ValueError, match=f"its tensor {in_encoder} has NaN or infinite values"):
        build_checkpoint(vision, language, tmp_path / "built")
    assert not (tmp_path / "built").exists()


def test_damage_behind_the_feature_layer_of_a_llava_is_refused(tmp_path):
    llava = tiny.llava(tied=False)
    last_layer = llava.model.vision_tower.encoder.layers[-1]
    with torch.no_grad():
        last_layer.mlp.fc1.weight[0, 0] = torch.nan
    parts.llava(tmp_path / "llava", llava)
    with pytest.raises(ValueError, match=r"its tensor encoder.layers.\d.mlp.fc1.weight has NaN"):
        retrofit_checkpoint(str(tmp_path / "llava"), tmp_path / "built")
    assert not (tmp_path / "built").exists()


@pytest.mark.parametrize("kind", ["siglip", "clip"])
def test_an_image_processor_of_another_size_is_named_with_the_encoder_s_size(kind):
    towers = {"siglip": transformers.SiglipVisionModel, "clip": transformers.CLIPVisionModel}
    tower = towers[kind](tiny.vision_config(kind))
    with pytest.raises(ValueError) as caught:
        token_layout(tower, (24, 32), -2, "FOLDER")
    message = str(caught.value)
    assert message.startswith("FOLDER cannot be the vision encoder")
    assert "its image processor makes images of 24 x 32 pixels, and the encoder does not" in message
    assert "match" in message  # the reason that transformers gives
    assert message.endswith(
        "Its config.json has images of 16 x 16 pixels: set this size in its "
        "preprocessor_config.json."
    )
    assert ".." not in message


def test_pixels_beyond_the_last_patch_are_no_patch():
    """As in SigLIP of patches of 14 and images of 384 pixels."""
    config = transformers.SiglipVisionConfig(**SIZES | {"image_size": 20}, vision_use_head=False)
    tower = transformers.SiglipVisionModel(config)
    layout = token_layout(tower, (20, 20), [-2, 1], "SigLIP")
    assert (layout.prefix, layout.patches, layout.patch_size) == (0, PATCHES, 8)


def test_patches_that_do_not_see_their_pixels_are_refused():
    tower = transformers.SiglipVisionModel(tiny.vision_config("siglip"))
    with torch.no_grad():
        tower.embeddings.patch_embedding.weight.zero_()
    with pytest.raises(ValueError, match="0 of its 4 tokens follow the pixels"):
        token_layout(tower, (16, 16), -2, "blind")


def test_an_image_processor_needs_one_size():
    odd = parts.image_processor("siglip")
    odd.size = {"shortest_edge": 16}
    with pytest.raises(ValueError, match="size .*shortest_edge.* has no height and width"):
        make_size_constant(odd)
    high = parts.image_processor("siglip")
    high.size = {"height": 16, "width": 24}
    assert make_size_constant(high) == (16, 24)
    assert (high.crop_size["height"], high.crop_size["width"]) == (16, 24)
    unused = transformers.BeitImageProcessor(size=SQUARE, do_center_crop=False)
    assert unused.crop_size["height"] == 224 and make_size_constant(unused) == (16, 16)
    assert unused.crop_size["height"] == 16


@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"image_std": [0.0, 0.0, 0.0]}, r"NaN or infinite .*image_std .0.0, 0.0, 0.0."),
        ({"image_mean": [float("nan")] * 3}, "NaN or infinite .*image_mean"),
        ({"rescale_factor": 0.0}, "the same everywhere .*rescale_factor 0.0"),
    ],
)
def test_an_image_processor_that_makes_no_usable_pixels_is_refused(tmp_path, settings, message):
    vision = parts.vision(tmp_path / "vision", "siglip")
    update_json(f"{vision}/preprocessor_config.json", settings)
    language = parts.language(tmp_path / "language")
    with pytest.raises(ValueError, match=message):
        build_checkpoint(vision, language, tmp_path / "built")
    assert not (tmp_path / "built").exists()


@pytest.mark.parametrize("setting", ["do_normalize", "do_rescale"])
def test_an_image_processor_may_leave_out_a_step(setting):
    image_processor = parts.image_processor("siglip")
    setattr(image_processor, setting, False)
    assert make_size_constant(image_processor) == (16, 16)


def test_an_image_processor_that_also_counts_is_replaced_by_one_with_the_same_pixels():
    counting = transformers.GotOcr2ImageProcessor(size=SQUARE)
    picture = Image.linear_gradient("L").convert("RGB").resize((50, 90))
    made = counting(picture, return_tensors="pt")
    assert "num_patches" in made
    plain = plain_image_processor(counting)(picture, return_tensors="pt")
    assert [*plain] == ["pixel_values"]
    assert torch.equal(plain["pixel_values"], made["pixel_values"])
    clip = parts.image_processor("clip")
    assert plain_image_processor(clip) is clip
    cropping = transformers.GotOcr2ImageProcessor(size=SQUARE, crop_to_patches=True)
    with pytest.raises(ValueError, match="GotOcr2.* does more than resize.* Set .crop_to_patches"):
        plain_image_processor(cropping)


OF_SEVERAL_SIZES = [
    "Siglip2ImageProcessor",
    "Qwen2VLImageProcessor",
    "LlavaNextImageProcessor",
    "PixtralImageProcessor",  # a plain image processor does not take its size
]


@pytest.mark.parametrize("processor_name", OF_SEVERAL_SIZES)
def test_an_image_processor_of_crops_or_many_sizes_has_a_remedy_that_applies(processor_name):
    image_processor = getattr(transformers, processor_name)()
    with pytest.raises(ValueError, match="does more than resize.* of the same family") as refusal:
        plain_image_processor(image_processor)
    assert "crop_to_patches" not in str(refusal.value)
