"""Merging: adapter plus base, whole, dequantized, in all of PEFT's forms; and what is refused."""

import json
import shutil
from pathlib import Path

import pytest
import tiny
import tiny_parts as parts
import torch
import training
from adapters import load, logits, make_adapter
from peft import IA3Config, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from stored import FILES, assert_merged, store, weights
from transformers import AutoProcessor, BitsAndBytesConfig

from normalign_llava import NormAlignLlavaForConditionalGeneration
from normalign_llava.assembly.adapter import open_adapter, read_peft_config
from normalign_llava.assembly.base_tensors import BaseTensors
from normalign_llava.assembly.build import build_checkpoint
from normalign_llava.assembly.merge import merge_adapter
from normalign_llava.checkpoint import weights as weight_files


pytestmark = pytest.mark.slow

NF4 = dict(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    root = tmp_path_factory.mktemp("bases")
    vision = parts.vision(root / "vision", "siglip")
    kinds = {"tied": dict(tied=True), "untied": dict(tied=False), "wide": dict(head_dim=24)}
    for name, how in kinds.items():
        sizes = dict(hidden_size=64, intermediate_size=128, **how)
        language = parts.language(root / f"{name}-language", **sizes)
        build_checkpoint(vision, language, root / name)
    build_checkpoint(vision, root / "tied-language", root / "bfloat16", dtype="bfloat16")
    return {name: root / name for name in (*kinds, "bfloat16")}


@pytest.mark.parametrize(
    "kwargs, base", [({}, "tied"), ({"use_dora": True}, "untied"), ({"use_rslora": True}, "tied")]
)
def test_the_checkpoint_is_adapter_plus_base(bases, tmp_path, kwargs, base):
    trained = make_adapter(bases[base], tmp_path / "adapter", **kwargs)
    report = merge_adapter(tmp_path / "adapter", tmp_path / "merged")
    merged = load(tmp_path / "merged")
    expected = logits(trained, bases[base])
    # Largest differences: LoRA 3e-6, DoRA 1e-6, rsLoRA 3e-6 of up to 15; without the adapter, 8.
    torch.testing.assert_close(logits(merged, bases[base]), expected, rtol=0, atol=1e-5)
    assert (logits(load(bases[base]), bases[base]) - expected).abs().max() > 0.1
    assert (report.quantization, report.dtype) == ("not quantized", "float32")
    places = (tmp_path / "merged", tmp_path / "adapter", bases[base])
    assert (report.output, report.adapter, report.base) == tuple(map(str, places))
    assert report.difference < 1e-5
    assert_merged(tmp_path / "merged", tmp_path / "adapter", bases[base])
    before, after = (weights(folder) for folder in (bases[base], tmp_path / "merged"))
    assert before.keys() == after.keys()  # tied embeddings are stored once, as they were
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    trained = ("language_model.layers", "multi_modal_projector")
    assert all(any(part in name for part in trained) for name in changed)
    assert (merged.lm_head.weight is merged.get_input_embeddings().weight) == (base == "tied")
    tower = "model-vision_tower-00001-of-00001.safetensors"
    assert (tmp_path / "merged" / tower).samefile(bases[base] / tower)


def test_a_trained_tower_is_the_adapter_s_and_one_in_another_dtype_is_no_link(bases, tmp_path):
    modules = ["multi_modal_projector", "vision_tower"]
    make_adapter(bases["tied"], tmp_path / "tied", modules_to_save=modules)
    make_adapter(bases["bfloat16"], tmp_path / "bfloat16")
    cases = (("tied", "auto", torch.float32), ("bfloat16", "float16", torch.float16))
    for name, dtype, written in cases:
        report = merge_adapter(tmp_path / name, tmp_path / dtype, dtype=dtype)
        assert_merged(tmp_path / dtype, tmp_path / name, bases[name], dtype=written)
        stored = json.loads((tmp_path / dtype / "config.json").read_text())["dtype"]
        assert report.dtype == stored == str(written).removeprefix("torch.")


def test_the_folder_holds_what_a_checkpoint_holds_and_no_more(bases, tmp_path):
    adapter = tmp_path / "adapter"
    make_adapter(bases["tied"], adapter)
    (adapter / "README.md").write_bytes(b"the adapter's card, caf\xe9")  # not in UTF-8
    (adapter / "dynamics.jsonl").write_text('{"step": 0, "visual": [0.5], "text": [0.25]}\n')
    for name in ("optimizer.pt", "rng_state.pth", "trainer_state.json", "training_args.bin"):
        (adapter / name).write_text("a checkpoint-N of the Trainer has these besides")
    merge_adapter(adapter, tmp_path / "merged")
    carried = ("README.md", "training.json", "dynamics.jsonl")
    names = {path.name for path in bases["tied"].iterdir()} | {*carried}
    assert names > FILES
    assert {path.name for path in (tmp_path / "merged").iterdir()} == names
    same = ("config.json", "generation_config.json", "build.json", "modeling_normalign_llava.py")
    for names, source in ((same, bases["tied"]), (carried, adapter)):
        for name in names:
            assert (tmp_path / "merged" / name).read_bytes() == (source / name).read_bytes()
    # The card that PEFT writes has the base's path, and is of no model.
    (adapter / "README.md").unlink()
    model = PeftModel.from_pretrained(load(bases["tied"]), adapter)
    model.create_or_update_model_card(str(adapter))
    assert str(bases["tied"]) in (adapter / "README.md").read_text()
    base = shutil.copytree(bases["tied"], tmp_path / "base")
    (base / "README.md").write_text("the base's card")
    merge_adapter(adapter, tmp_path / "cardless", base=str(base))
    assert not (tmp_path / "cardless" / "README.md").exists()
    # Without a card of the adapter's, the base's; but what the base's own training measured stays.
    (adapter / "README.md").unlink()
    (adapter / "dynamics.jsonl").rename(base / "dynamics.jsonl")
    # Nor need a base have a generation configuration; notices may be beside either.
    (base / "generation_config.json").unlink()
    notices = {"notices/vision/LICENSE": base, "notices/language/LICENSE": adapter}
    build = json.loads((base / "build.json").read_text()) | {"notices": [*notices]}
    (base / "build.json").write_text(json.dumps(build))
    for name, place in notices.items():
        (place / name).parent.mkdir(parents=True)
        (place / name).write_text(f"of {place.name}")
    merge_adapter(adapter, tmp_path / "with-card", base=str(base))
    assert (tmp_path / "with-card" / "README.md").read_text() == "the base's card"
    assert not (tmp_path / "with-card" / "dynamics.jsonl").exists()
    for name, place in notices.items():
        assert (tmp_path / "with-card" / name).read_text() == f"of {place.name}"


@pytest.mark.parametrize("base, dora", [("bfloat16", False), ("tied", True)])
def test_a_4_bit_base_is_dequantized_in_float32_and_merged(bases, tmp_path, base, dora):
    quantization = {**NF4, "bnb_4bit_use_double_quant": dora, "bnb_4bit_compute_dtype": "float32"}
    trained = make_adapter(bases[base], tmp_path / "adapter", quantization, use_dora=dora)
    expected = logits(trained, bases["tied"])
    report = merge_adapter(tmp_path / "adapter", tmp_path / "merged", dtype="float32")
    # Largest difference seen: 4e-6, from the adapter on the 4-bit base itself.
    got = logits(load(tmp_path / "merged"), bases["tied"])
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    assert report.quantization.startswith("4-bit NF4") and report.difference < 1e-5
    settings = BitsAndBytesConfig(**quantization)
    assert_merged(tmp_path / "merged", tmp_path / "adapter", bases[base], settings, torch.float32)
    assert "quantization_config" not in (tmp_path / "merged" / "config.json").read_text()
    # Merged with the base before quantization, it would be another model: seen 0.12 to 0.21.
    (tmp_path / "adapter" / "training.json").unlink()  # which TRL alone does not write
    with pytest.raises(ValueError, match="How the base of .*--base-quantization none"):
        merge_adapter(tmp_path / "adapter", tmp_path / "wrong")
    for name, kind in (("right", "nf4-double" if dora else "nf4"), ("wrong", "none")):
        how = dict(dtype="float32", base_quantization=kind)
        merge_adapter(tmp_path / "adapter", tmp_path / name, **how)
    got = logits(load(tmp_path / "right"), bases["tied"])
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    assert (logits(load(tmp_path / "wrong"), bases["tied"]) - expected).abs().max() > 1e-2


def test_a_base_is_quantized_from_the_precision_that_training_loaded(checkpoint, tmp_path):
    """Here that of the file, float32, while steps and products are in bfloat16."""
    options = dict(use_peft=True, load_in_4bit=True, bf16=True)
    trainer = training.trainer(tmp_path / "adapter", checkpoint, **options)
    trainer.train()
    trainer.save_model()
    merge_adapter(tmp_path / "adapter", tmp_path / "merged")
    settings = BitsAndBytesConfig(**NF4, bnb_4bit_compute_dtype="float32")
    assert_merged(tmp_path / "merged", tmp_path / "adapter", checkpoint, settings)


def test_an_8_bit_base_is_dequantized_and_merged(bases, tmp_path):
    make_adapter(bases["tied"], tmp_path / "adapter", quantization={"load_in_8bit": True})
    report = merge_adapter(tmp_path / "adapter", tmp_path / "merged")
    assert report.quantization == "8-bit" and report.difference < 1e-5
    settings = BitsAndBytesConfig(load_in_8bit=True)
    assert_merged(tmp_path / "merged", tmp_path / "adapter", bases["tied"], settings)


def test_an_arm_that_training_changed_is_the_merged_checkpoint_s(bases, tmp_path):
    make_adapter(bases["tied"], tmp_path / "adapter", modules_to_save=None)
    changes = {"projector_gain_init": "one", "gradient_compensation": "none"}
    record = {"config_changes": changes, "quantization": None}
    (tmp_path / "adapter" / "training.json").write_text(json.dumps(record))
    merge_adapter(tmp_path / "adapter", tmp_path / "merged")
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert {name: config[name] for name in changes} == changes
    assert_merged(tmp_path / "merged", tmp_path / "adapter", bases["tied"], realigned="one")


def test_a_stock_llava_gets_the_norm_that_training_gave_it(tmp_path):
    for tied in (True, False):
        stock = parts.llava(tmp_path / f"llava-{tied}", tiny.llava(tied=tied))
        config = json.loads(Path(stock, "config.json").read_text())
        del config["dtype"]  # the files' is used
        Path(stock, "config.json").write_text(json.dumps(config))
        names = load_file(f"{stock}/model.safetensors").keys()
        assert any(name.startswith("language_model.model.") for name in names)  # older versions'
        for projector in (None, ["multi_modal_projector"]):
            adapter, output = (tmp_path / f"{kind}-{tied}-{projector}" for kind in ("in", "out"))
            make_adapter(stock, adapter, modules_to_save=projector)
            merge_adapter(adapter, output, base=stock)
            assert_merged(output, adapter, stock, dtype=torch.float32)
            load(output)


@pytest.mark.parametrize("compute", ["bfloat16", "float32"])
def test_a_base_is_read_in_training_s_precision_from_any_files(bases, tmp_path, compute):
    quantization = {**NF4, "bnb_4bit_compute_dtype": compute}
    base = tmp_path / "sharded"
    make_adapter(bases["untied"], tmp_path / "adapter", quantization=quantization)
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(bases["untied"])
    model.save_pretrained(base, max_shard_size="50KB")
    AutoProcessor.from_pretrained(bases["untied"]).save_pretrained(base)
    assert len(list(base.glob("*.safetensors"))) > 3
    merge_adapter(tmp_path / "adapter", tmp_path / "merged", base=str(base))
    settings = BitsAndBytesConfig(**quantization)
    assert_merged(tmp_path / "merged", tmp_path / "adapter", bases["untied"], settings)


Q_PROJ = "layers.1.self_attn.q_proj.lora_%s.weight"
BIAS = "linear_2.bias"
REFUSED = [
    ({Q_PROJ % "B": None}, {}, "q_proj.lora_B.weight has shape None, on"),
    ({Q_PROJ % "A": torch.ones(4, 7)}, {}, r"lora_A.weight has shape \[4, 7\], on .* \[4, 64\]"),
    ({Q_PROJ % "A": torch.full((4, 64), torch.nan)}, {}, "NaNs detected"),
    ({BIAS: torch.full((64,), torch.nan)}, {}, "linear_2.bias would be NaN or .* in torch.float32"),
    ({BIAS: torch.full((64,), 1e5)}, {"dtype": "float16"}, "bias would be NaN or .* torch.float16"),
    ({"target_modules": r".*\.c_attn"}, {}, "No modules were targeted.*is not one of the base"),
    (
        {"target_modules": r".*\.language_model.*\.k_proj"},
        {},
        r"\.lora_A\.\S+ has shape \[.*\], on the base None",
    ),
    ({"base_model_name_or_path": None}, {}, "does not name its base"),
    ({}, {"base": "untied"}, "does not fit the base .*untied: build.json differs. Give the right"),
    ({}, {"base": "wide"}, "does not fit the base .* Give the right --base"),
    ({}, {"base_quantization": "int4"}, r"not known.*quantization none\|nf4\|nf4-double\|int8"),
    ({}, {"base": "language"}, "language is a 'llama' model. Give the right one"),
    ({}, {"base": "quantized"}, "quantized is stored quantized. Give what it was made from"),
]


@pytest.fixture(scope="module")
def adapter(bases, tmp_path_factory):
    """An adapter, and beside it a base that says that it is stored in 4 bits."""
    root = tmp_path_factory.mktemp("adapter")
    make_adapter(bases["tied"], root / "adapter")
    (root / "adapter" / "build.json").write_bytes((bases["tied"] / "build.json").read_bytes())
    shutil.copytree(bases["tied"].with_name("tied-language"), root / "language")
    config = shutil.copytree(bases["tied"], root / "quantized") / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": NF4}))
    return root


@pytest.mark.parametrize("changes, options, message", REFUSED)
def test_what_does_not_fit_is_refused(bases, adapter, tmp_path, changes, options, message):
    """`changes` are of tensors, by the ends of their names, or of the configuration."""
    folder = shutil.copytree(adapter / "adapter", tmp_path / "adapter")
    settings = json.loads((folder / "adapter_config.json").read_text())
    tensors = weights(folder)
    for end, value in changes.items():
        if name := next((name for name in tensors if name.endswith(end)), None):
            tensors[name] = value
        else:
            settings[end] = value
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    tensors = {name: value for name, value in tensors.items() if value is not None}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    if "base" in options:
        options = {"base": str(bases.get(options["base"], adapter / options["base"]))}
    with pytest.raises(ValueError, match=message):
        merge_adapter(folder, tmp_path / "merged", **options)
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


STARTS = [("pissa", True), ("pissa_niter_16", True), ("olora", True), ("corda", True)]
STARTS += [("lora_ga", True), ("eva", False), ("orthogonal", False), ("gaussian", False)]
STARTS += [("loftq", True), (True, False), (False, False)]


@pytest.mark.parametrize("start, is_refused", STARTS)
def test_an_adapter_whose_start_changed_its_base_is_refused(adapter, tmp_path, start, is_refused):
    folder = shutil.copytree(adapter / "adapter", tmp_path / "adapter")
    settings = json.loads((folder / "adapter_config.json").read_text())
    settings |= {"init_lora_weights": start, "loftq_config": {"loftq_bits": 4}}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    if not is_refused:
        assert open_adapter(folder).peft_config.init_lora_weights == start
        return
    with pytest.raises(ValueError, match=rf"init_lora_weights '{start}'. That changes the base"):
        read_peft_config(folder)


@pytest.mark.parametrize("is_other", [True, False])
def test_embeddings_and_head_of_a_base_are_two_if_its_files_have_them_apart(
    adapter, bases, tmp_path, is_other
):
    """Whatever its configuration says, as transformers loads it."""
    base = shutil.copytree(bases["tied"], tmp_path / "base")
    tensors = weights(base)
    embeddings = tensors["model.language_model.embed_tokens.weight"]
    tensors["lm_head.weight"] = embeddings + 1 if is_other else embeddings.clone()
    store(base, tensors)
    opened = open_adapter(adapter / "adapter", base=str(base))
    read = BaseTensors(opened)
    for config in (opened.config, opened.config.text_config):
        assert config.tie_word_embeddings == (not is_other)
    assert torch.equal(read["lm_head.weight"], tensors["lm_head.weight"])
    assert torch.equal(read["model.language_model.embed_tokens.weight"], embeddings)


EMBEDDINGS = "model.language_model.embed_tokens.weight"
IN_BFLOAT16 = {"load_in_4bit": True, "bnb_4bit_compute_dtype": "bfloat16"}
RECORDS = [
    # training.json, --base-quantization, and the base's quantization and dtype before it
    ({"quantization": None, "options": {"dtype": "bfloat16"}}, None, None, None),
    ({"quantization": IN_BFLOAT16, "options": {"dtype": "float32"}}, None, IN_BFLOAT16, "float32"),
    ({"quantization": IN_BFLOAT16, "options": {"dtype": "auto"}}, None, IN_BFLOAT16, "bfloat16"),
    ({"quantization": IN_BFLOAT16}, None, IN_BFLOAT16, "bfloat16"),
    ({"quantization": NF4, "options": {"dtype": "bfloat16"}}, None, NF4, "bfloat16"),
    ({"quantization": NF4, "options": {"dtype": None}}, None, NF4, None),
    ({"quantization": IN_BFLOAT16}, "none", None, None),
    ({"options": {"dtype": "float16"}}, "int8", {"load_in_8bit": True}, "float16"),
    ({}, "nf4", {**NF4, "bnb_4bit_use_double_quant": False}, None),
    (None, "nf4-double", NF4, None),
]


@pytest.mark.parametrize("record, given, quantization, dtype", RECORDS)
def test_how_the_base_was_loaded_in_training(adapter, tmp_path, record, given, quantization, dtype):
    folder = shutil.copytree(adapter / "adapter", tmp_path / "adapter")
    (folder / "training.json").unlink()
    if record is not None:
        (folder / "training.json").write_text(json.dumps(record))
    opened = open_adapter(folder, base_quantization=given)
    assert (opened.quantization, opened.dtype) == (quantization, dtype)


def test_embeddings_that_are_the_head_are_read_by_both_names_in_training_s_precision(
    adapter, bases, tmp_path
):
    folder = shutil.copytree(adapter / "adapter", tmp_path / "adapter")
    (folder / "training.json").write_text(json.dumps({"quantization": IN_BFLOAT16}))
    opened = open_adapter(folder)
    read = BaseTensors(opened)
    stored = weights(bases["tied"])[EMBEDDINGS].bfloat16()
    for name in (EMBEDDINGS, "lm_head.weight"):
        assert read[name].dtype == torch.bfloat16 and torch.equal(read[name], stored)
    assert opened.load().get_base_model().dtype == torch.bfloat16


def test_a_base_is_read_in_the_precision_that_its_configuration_says(adapter, bases, tmp_path):
    """As transformers loads it, whatever its files have."""
    base = shutil.copytree(bases["tied"], tmp_path / "base")
    file = base / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"dtype": "bfloat16"}))
    read = BaseTensors(open_adapter(adapter / "adapter", base=str(base)))
    name = EMBEDDINGS
    assert read.dtype == read[name].dtype == torch.bfloat16
    assert torch.equal(read[name], weights(base)[name].bfloat16())


@pytest.mark.parametrize(
    "changes, realigned",
    [
        ({}, False),
        ({"projector_gain_init": "text_norm"}, False),  # as the base has it
        ({"gradient_compensation": "none", "text_embedding_norm": 9.0}, False),
        ({"projector_gain_init": "one"}, True),
    ],
)
def test_the_norm_is_aligned_again_if_training_began_it_otherwise(
    adapter, tmp_path, changes, realigned
):
    folder = shutil.copytree(adapter / "adapter", tmp_path / "adapter")
    record = {"quantization": None, "config_changes": changes}
    (folder / "training.json").write_text(json.dumps(record))
    opened = open_adapter(folder)
    assert opened.realigned == realigned
    arm = {name: changes[name] for name in changes if name != "text_embedding_norm"}
    assert {name: getattr(opened.config, name) for name in arm} == arm
    assert opened.config.text_embedding_norm != 9.0
    loaded = opened.load()
    assert not any(module.training for module in loaded.modules())
    (gain,) = (
        value
        for name, value in loaded.named_parameters()
        if name.endswith("original_module.norm.weight")
    )
    assert bool((gain == 1).all()) == realigned


@pytest.mark.parametrize("norm, realigned", [("rms_norm", True), ("none", False)])
def test_another_norm_is_aligned_if_there_is_one(bases, tmp_path, norm, realigned):
    make_adapter(bases["tied"], tmp_path / "adapter", modules_to_save=None)
    record = {"quantization": None, "config_changes": {"projector_norm": norm}}
    (tmp_path / "adapter" / "training.json").write_text(json.dumps(record))
    opened = open_adapter(tmp_path / "adapter")
    assert (opened.config.projector_norm, opened.realigned) == (norm, realigned)


def test_a_base_without_a_record_may_be_any_build(adapter, bases, tmp_path):
    base = shutil.copytree(bases["tied"], tmp_path / "base")
    (base / "build.json").unlink()
    assert (adapter / "adapter" / "build.json").exists()
    assert open_adapter(adapter / "adapter", base=str(base)).base.name == str(base)


def test_a_tokenizer_without_the_image_token_is_not_the_one_of_training(adapter, bases, tmp_path):
    base = AutoProcessor.from_pretrained(bases["tied"])
    for has_image, ends in ((True, "<|im_start|>"), (False, "<|im_end|>")):
        folder = shutil.copytree(adapter / "adapter", tmp_path / f"adapter-{has_image}")
        tokenizer = base.tokenizer if has_image else parts.tokenizer()
        other = base.chat_template.replace("<|im_end|>", "<|im_start|>")
        tokenizer.chat_template = other
        tokenizer.save_pretrained(folder)
        opened = open_adapter(folder)
        assert opened.processor.chat_template == base.chat_template.replace("<|im_end|>", ends)
        assert opened.processor.image_token_id == base.image_token_id
    folder = shutil.copytree(adapter / "adapter", tmp_path / "adapter-without-template")
    tokenizer = AutoProcessor.from_pretrained(bases["tied"]).tokenizer
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    opened = open_adapter(folder)
    assert opened.processor.tokenizer.chat_template is None
    assert opened.processor.chat_template == base.chat_template


def test_the_norm_of_a_base_in_half_precision_is_not_rounded(adapter, bases, tmp_path):
    folder = shutil.copytree(adapter / "adapter", tmp_path / "adapter")
    (folder / "build.json").unlink()  # of another build
    opened = open_adapter(folder, base=str(bases["bfloat16"]))
    read = BaseTensors(opened)
    stored_by_name = weights(bases["bfloat16"])
    gain = "model.multi_modal_projector.norm.weight"
    assert not torch.equal(stored_by_name[gain], stored_by_name[gain].bfloat16().float())
    for name in (gain, "model.multi_modal_projector.linear_1.weight"):
        assert read[name].dtype == stored_by_name[name].dtype
        assert torch.equal(read[name], stored_by_name[name])


NORMS = ["model.language_model.norm.weight", "model.multi_modal_projector.norm.weight"]


@pytest.mark.parametrize(
    "name, kept, shape",
    [(NORMS[0], None, "None"), (NORMS[0], 5, r"\[5\]"), (NORMS[1], 5, r"\[5\]")],
)
def test_a_base_whose_tensors_are_not_its_configuration_s_is_refused(
    adapter, bases, tmp_path, name, kept, shape
):
    base = shutil.copytree(bases["tied"], tmp_path / "base")
    (base / "build.json").unlink()  # as it is told that the adapter's base is this one
    tensors = weights(base)
    whole = tensors.pop(name)
    store(base, tensors if kept is None else {**tensors, name: whole[:kept].clone()})
    with pytest.raises(ValueError, match=rf"^1 tensors of {base} .*{name} has shape {shape}, not"):
        merge_adapter(adapter / "adapter", tmp_path / "merged", base=str(base))


def test_a_merge_that_has_no_room_is_refused(adapter, bases, tmp_path, monkeypatch):
    size = sum(tensor.nbytes for tensor in weights(bases["tied"]).values())
    monkeypatch.setattr(weight_files, "free_space", lambda folder: size - 1)
    output = tmp_path / "merged"
    with pytest.raises(ValueError, match=f"are to be written to {output}, where"):
        merge_adapter(adapter / "adapter", output)
    assert not output.exists()


def test_what_is_no_adapter_is_refused(tmp_path):
    (tmp_path / "run" / "checkpoint-5").mkdir(parents=True)
    (tmp_path / "run" / "checkpoint-5" / "adapter_config.json").touch()
    with pytest.raises(ValueError, match="no adapter_config.json.*It has checkpoint-5"):
        merge_adapter(tmp_path / "run", tmp_path / "merged")
    ia3 = IA3Config(target_modules=["k_proj"], feedforward_modules=[])
    get_peft_model(tiny.model(), ia3).save_pretrained(tmp_path / "ia3")
    with pytest.raises(ValueError, match="IA3 adapter. Only LoRA"):
        merge_adapter(tmp_path / "ia3", tmp_path / "merged")
    with pytest.raises(ValueError, match="run holds checkpoint-5. It is not"):
        merge_adapter(tmp_path / "ia3", tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["checkpoint-5"]


@pytest.mark.parametrize("lost", [True, False])
def test_where_the_base_has_no_processor_that_fits_the_adapters_counts(bases, tmp_path, lost):
    base = shutil.copytree(bases["untied"], tmp_path / "base")
    make_adapter(base, tmp_path / "adapter")
    AutoProcessor.from_pretrained(base).save_pretrained(tmp_path / "adapter")
    assert len(open_adapter(tmp_path / "adapter").processors) == 2
    file = base / "processor_config.json"
    settings = json.loads(file.read_text()) | {"image_token": "<|im_end|>"}
    file.unlink() if lost else file.write_text(json.dumps(settings))
    opened = open_adapter(tmp_path / "adapter")
    assert opened.processors == [opened.processor]
