"""Merging: adapter plus base, whole, dequantized, in all of PEFT's forms; and what is refused."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import tiny
import tiny_parts
import torch
import training
from adapters import load, logits, make_adapter
from json_files import read_json, update_json
from peft import IA3Config, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from stored import FILES, assert_merged, store, weights
from transformers import AutoProcessor, BitsAndBytesConfig

from normalign_llava import NormAlignLlavaForConditionalGeneration
from normalign_llava.assembly.adapter import open_adapter, read_peft_config
from normalign_llava.assembly.base_tensors import BaseTensors
from normalign_llava.assembly.build import build_checkpoint
from normalign_llava.assembly.merge import MergeReport, merge_adapter
from normalign_llava.checkpoint import weights as weight_files


pytestmark = pytest.mark.slow

NF4 = {
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
}
EMBEDDINGS = "model.language_model.embed_tokens.weight"
TOWER = "model-vision_tower-00001-of-00001.safetensors"


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """The folders of checkpoints by name: tied, untied, wide, bfloat16."""
    root = tmp_path_factory.mktemp("bases")
    vision = tiny_parts.vision(root / "vision", "siglip")
    language_options = {
        "tied": {"tied": True},
        "untied": {"tied": False},
        "wide": {"head_dim": 24},
    }
    for base_name, options in language_options.items():
        language = tiny_parts.language(
            root / f"{base_name}-language",
            hidden_size=64,
            intermediate_size=128,
            **options,
        )
        build_checkpoint(vision, language, root / base_name)
    build_checkpoint(vision, root / "tied-language", root / "bfloat16", dtype="bfloat16")
    return {base_name: root / base_name for base_name in (*language_options, "bfloat16")}


@dataclass
class Merge:
    """A merge that was made, and the model in memory whose weights were merged."""

    base_name: str
    base_path: Path
    adapter_path: Path
    output_path: Path
    trained: PeftModel
    report: MergeReport


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("tied", {}), id="LoRA"),
        pytest.param(("untied", {"use_dora": True}), id="DoRA"),
        pytest.param(("tied", {"use_rslora": True}), id="rsLoRA"),
    ],
)
def merge(request, bases, tmp_path_factory):
    base_name, lora_options = request.param
    root = tmp_path_factory.mktemp("merge")
    adapter_path = root / "adapter"
    output_path = root / "merged"
    trained = make_adapter(bases[base_name], adapter_path, **lora_options)
    report = merge_adapter(adapter_path, output_path)
    return Merge(
        base_name,
        bases[base_name],
        adapter_path,
        output_path,
        trained,
        report,
    )


def test_the_checkpoint_is_adapter_plus_base(merge):
    merged_logits = logits(load(merge.output_path), merge.base_path)
    expected = logits(merge.trained, merge.base_path)
    # Largest differences: LoRA 3e-6, DoRA 1e-6, rsLoRA 3e-6 of up to 15; without the adapter, 8.
    torch.testing.assert_close(merged_logits, expected, rtol=0, atol=1e-5)

    base_logits = logits(load(merge.base_path), merge.base_path)
    assert (base_logits - expected).abs().max() > 0.1

    assert_merged(merge.output_path, merge.adapter_path, merge.base_path)


def test_the_report_names_what_was_merged(merge):
    report = merge.report
    assert report.quantization == "not quantized"
    assert report.dtype == "float32"
    assert report.output == str(merge.output_path)
    assert report.adapter == str(merge.adapter_path)
    assert report.base == str(merge.base_path)
    assert report.difference < 1e-5


def test_only_what_was_trained_is_changed(merge):
    before = weights(merge.base_path)
    after = weights(merge.output_path)
    # Tied embeddings are stored once, as they were.
    assert before.keys() == after.keys()

    trained_modules = ("language_model.layers", "multi_modal_projector")
    for tensor_name in before:
        if not torch.equal(before[tensor_name], after[tensor_name]):
            assert any(module_name in tensor_name for module_name in trained_modules)


def test_embeddings_and_head_are_tied_as_in_the_base(merge):
    merged = load(merge.output_path)
    is_tied = merged.lm_head.weight is merged.get_input_embeddings().weight
    assert is_tied == (merge.base_name == "tied")


def test_a_frozen_tower_is_the_file_of_the_base(merge):
    assert (merge.output_path / TOWER).samefile(merge.base_path / TOWER)


@pytest.mark.parametrize(
    ("base_name", "lora_options", "dtype", "expected_dtype"),
    [
        pytest.param(
            "tied",
            {"modules_to_save": ["multi_modal_projector", "vision_tower"]},
            "auto",
            torch.float32,
            id="trained",
        ),
        pytest.param("bfloat16", {}, "float16", torch.float16, id="another-dtype"),
    ],
)
def test_a_tower_that_was_trained_or_has_another_dtype_is_written_anew(
    bases, tmp_path, base_name, lora_options, dtype, expected_dtype
):
    adapter_path = tmp_path / "adapter"
    output_path = tmp_path / "merged"
    make_adapter(bases[base_name], adapter_path, **lora_options)
    report = merge_adapter(adapter_path, output_path, dtype=dtype)
    assert_merged(output_path, adapter_path, bases[base_name], dtype=expected_dtype)

    expected_name = str(expected_dtype).removeprefix("torch.")
    assert report.dtype == expected_name
    assert read_json(output_path / "config.json")["dtype"] == expected_name


@pytest.fixture
def new_adapter(bases, tmp_path):
    """An adapter of the tied base, as `make_adapter` writes it."""
    make_adapter(bases["tied"], tmp_path / "adapter")
    return tmp_path / "adapter"


@pytest.fixture
def base_copy(bases, tmp_path):
    """A copy of the tied base that a test may change."""
    return shutil.copytree(bases["tied"], tmp_path / "base")


def test_the_folder_holds_what_a_checkpoint_holds_and_no_more(bases, new_adapter, tmp_path):
    base_path = bases["tied"]
    output_path = tmp_path / "merged"
    (new_adapter / "README.md").write_bytes(b"the adapter's card, caf\xe9")  # not in UTF-8
    measured = '{"step": 0, "visual": [0.5], "text": [0.25]}\n'
    (new_adapter / "dynamics.jsonl").write_text(measured)
    trainer_files = (
        "optimizer.pt",
        "rng_state.pth",
        "trainer_state.json",
        "training_args.bin",
    )
    for file_name in trainer_files:
        (new_adapter / file_name).write_text("a checkpoint-N of the Trainer has these besides")
    merge_adapter(new_adapter, output_path)

    from_adapter = ("README.md", "training.json", "dynamics.jsonl")
    expected_names = {file.name for file in base_path.iterdir()} | {*from_adapter}
    assert expected_names > FILES
    assert {file.name for file in output_path.iterdir()} == expected_names

    from_base = (
        "config.json",
        "generation_config.json",
        "build.json",
        "modeling_normalign_llava.py",
    )
    for file_name in from_base:
        assert (output_path / file_name).read_bytes() == (base_path / file_name).read_bytes()
    for file_name in from_adapter:
        assert (output_path / file_name).read_bytes() == (new_adapter / file_name).read_bytes()


def test_a_card_that_peft_wrote_is_left_out(bases, base_copy, new_adapter, tmp_path):
    """It names the base's path and describes no model."""
    model = PeftModel.from_pretrained(load(bases["tied"]), new_adapter)
    model.create_or_update_model_card(str(new_adapter))
    assert str(bases["tied"]) in (new_adapter / "README.md").read_text()

    (base_copy / "README.md").write_text("the base's card")
    merge_adapter(new_adapter, tmp_path / "merged", base=str(base_copy))
    assert not (tmp_path / "merged" / "README.md").exists()


def test_without_a_card_of_the_adapter_the_card_of_the_base_is_copied(
    base_copy, new_adapter, tmp_path
):
    output_path = tmp_path / "merged"
    (new_adapter / "README.md").unlink()
    (base_copy / "README.md").write_text("the base's card")
    # What the base's own training measured is not copied.
    (base_copy / "dynamics.jsonl").write_text('{"step": 0, "visual": [0.5], "text": [0.25]}\n')
    # A base need not have a generation configuration.
    (base_copy / "generation_config.json").unlink()

    merge_adapter(new_adapter, output_path, base=str(base_copy))
    assert (output_path / "README.md").read_text() == "the base's card"
    assert not (output_path / "dynamics.jsonl").exists()


def test_notices_are_copied_from_the_base_and_from_the_adapter(base_copy, new_adapter, tmp_path):
    output_path = tmp_path / "merged"
    source_by_notice = {
        "notices/vision/LICENSE": base_copy,
        "notices/language/LICENSE": new_adapter,
    }
    update_json(base_copy / "build.json", {"notices": [*source_by_notice]})
    for notice, source_path in source_by_notice.items():
        (source_path / notice).parent.mkdir(parents=True)
        (source_path / notice).write_text(f"of {source_path.name}")

    merge_adapter(new_adapter, output_path, base=str(base_copy))
    for notice, source_path in source_by_notice.items():
        assert (output_path / notice).read_text() == f"of {source_path.name}"


@dataclass
class FourBitAdapter:
    """An adapter of a 4-bit base, and what the model in memory computes."""

    base_path: Path
    adapter_path: Path
    settings: BitsAndBytesConfig
    quantization_kind: str
    logits: torch.Tensor


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("bfloat16", False, "nf4"), id="bfloat16-nf4"),
        pytest.param(("tied", True, "nf4-double"), id="tied-DoRA-nf4-double"),
    ],
)
def four_bit_adapter(request, bases, tmp_path_factory):
    base_name, is_double, quantization_kind = request.param
    adapter_path = tmp_path_factory.mktemp("four-bit") / "adapter"
    quantization = {
        **NF4,
        "bnb_4bit_use_double_quant": is_double,
        "bnb_4bit_compute_dtype": "float32",
    }
    trained = make_adapter(bases[base_name], adapter_path, quantization, use_dora=is_double)
    return FourBitAdapter(
        bases[base_name],
        adapter_path,
        BitsAndBytesConfig(**quantization),
        quantization_kind,
        logits(trained, bases["tied"]),
    )


def test_a_4_bit_base_is_dequantized_in_float32_and_merged(bases, four_bit_adapter, tmp_path):
    output_path = tmp_path / "merged"
    report = merge_adapter(four_bit_adapter.adapter_path, output_path, dtype="float32")
    assert report.quantization.startswith("4-bit NF4")
    assert report.difference < 1e-5

    merged_logits = logits(load(output_path), bases["tied"])
    # Largest difference seen: 4e-6, from the adapter on the 4-bit base itself.
    torch.testing.assert_close(merged_logits, four_bit_adapter.logits, rtol=0, atol=1e-5)
    assert_merged(
        output_path,
        four_bit_adapter.adapter_path,
        four_bit_adapter.base_path,
        four_bit_adapter.settings,
        torch.float32,
    )
    assert "quantization_config" not in (output_path / "config.json").read_text()


@pytest.fixture
def unrecorded_adapter(four_bit_adapter, tmp_path):
    """The 4-bit adapter without training.json, as TRL by itself writes one."""
    adapter_path = shutil.copytree(four_bit_adapter.adapter_path, tmp_path / "adapter")
    (adapter_path / "training.json").unlink()
    return adapter_path


def test_how_the_base_was_quantized_must_be_known(unrecorded_adapter, tmp_path):
    with pytest.raises(ValueError, match="How the base of .*--base-quantization none"):
        merge_adapter(unrecorded_adapter, tmp_path / "merged")


def test_an_option_says_how_the_base_was_quantized(
    bases, four_bit_adapter, unrecorded_adapter, tmp_path
):
    merge_adapter(
        unrecorded_adapter,
        tmp_path / "merged",
        dtype="float32",
        base_quantization=four_bit_adapter.quantization_kind,
    )
    merged_logits = logits(load(tmp_path / "merged"), bases["tied"])
    torch.testing.assert_close(merged_logits, four_bit_adapter.logits, rtol=0, atol=1e-5)


def test_merged_with_the_base_before_quantization_it_is_another_model(
    bases, four_bit_adapter, unrecorded_adapter, tmp_path
):
    merge_adapter(
        unrecorded_adapter,
        tmp_path / "merged",
        dtype="float32",
        base_quantization="none",
    )
    merged_logits = logits(load(tmp_path / "merged"), bases["tied"])
    # Seen: 0.12 to 0.21.
    assert (merged_logits - four_bit_adapter.logits).abs().max() > 1e-2


def test_a_base_is_quantized_from_the_precision_that_training_loaded(checkpoint, tmp_path):
    """Here the file's precision, float32, while steps and products are in bfloat16."""
    adapter_path = tmp_path / "adapter"
    trainer = training.trainer(
        adapter_path,
        checkpoint,
        use_peft=True,
        load_in_4bit=True,
        bf16=True,
    )
    trainer.train()
    trainer.save_model()
    merge_adapter(adapter_path, tmp_path / "merged")
    settings = BitsAndBytesConfig(**NF4, bnb_4bit_compute_dtype="float32")
    assert_merged(tmp_path / "merged", adapter_path, checkpoint, settings)


def test_an_8_bit_base_is_dequantized_and_merged(bases, tmp_path):
    adapter_path = tmp_path / "adapter"
    make_adapter(bases["tied"], adapter_path, quantization={"load_in_8bit": True})
    report = merge_adapter(adapter_path, tmp_path / "merged")
    assert report.quantization == "8-bit"
    assert report.difference < 1e-5

    settings = BitsAndBytesConfig(load_in_8bit=True)
    assert_merged(tmp_path / "merged", adapter_path, bases["tied"], settings)


def test_the_merged_checkpoint_has_the_arm_that_training_changed(bases, tmp_path):
    adapter_path = tmp_path / "adapter"
    make_adapter(bases["tied"], adapter_path, modules_to_save=None)
    changes = {
        "projector_gain_init": "one",
        "gradient_compensation": "none",
    }
    record = {"config_changes": changes, "quantization": None}
    (adapter_path / "training.json").write_text(json.dumps(record))
    merge_adapter(adapter_path, tmp_path / "merged")

    config = read_json(tmp_path / "merged" / "config.json")
    assert config["projector_gain_init"] == "one"
    assert config["gradient_compensation"] == "none"
    assert_merged(tmp_path / "merged", adapter_path, bases["tied"], realigned="one")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("saved_modules", [None, ["multi_modal_projector"]])
def test_a_stock_llava_gets_the_norm_that_training_gave_it(tmp_path, tied, saved_modules):
    stock = tiny_parts.llava(tmp_path / "llava", tiny.llava(tied=tied))
    config_path = Path(stock, "config.json")
    config = read_json(config_path)
    del config["dtype"]  # the files' dtype is used
    config_path.write_text(json.dumps(config))
    tensor_names = load_file(f"{stock}/model.safetensors").keys()
    # Names as older versions wrote them.
    assert any(name.startswith("language_model.model.") for name in tensor_names)

    adapter_path = tmp_path / "adapter"
    output_path = tmp_path / "merged"
    make_adapter(stock, adapter_path, modules_to_save=saved_modules)
    merge_adapter(adapter_path, output_path, base=stock)
    assert_merged(output_path, adapter_path, stock, dtype=torch.float32)
    load(output_path)


@pytest.mark.parametrize("compute_dtype", ["bfloat16", "float32"])
def test_a_base_is_read_in_training_s_precision_from_any_files(bases, tmp_path, compute_dtype):
    quantization = {**NF4, "bnb_4bit_compute_dtype": compute_dtype}
    sharded_path = tmp_path / "sharded"
    adapter_path = tmp_path / "adapter"
    make_adapter(bases["untied"], adapter_path, quantization=quantization)
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(bases["untied"])
    model.save_pretrained(sharded_path, max_shard_size="50KB")
    AutoProcessor.from_pretrained(bases["untied"]).save_pretrained(sharded_path)
    assert len(list(sharded_path.glob("*.safetensors"))) > 3

    merge_adapter(adapter_path, tmp_path / "merged", base=str(sharded_path))
    settings = BitsAndBytesConfig(**quantization)
    assert_merged(tmp_path / "merged", adapter_path, bases["untied"], settings)


@pytest.fixture(scope="module")
def adapter_root(bases, tmp_path_factory):
    """Holds an adapter, its language model, and a base that says that it is stored in 4 bits."""
    root = tmp_path_factory.mktemp("adapter")
    base_path = bases["tied"]
    make_adapter(base_path, root / "adapter")
    (root / "adapter" / "build.json").write_bytes((base_path / "build.json").read_bytes())
    shutil.copytree(base_path.with_name("tied-language"), root / "language")
    shutil.copytree(base_path, root / "quantized")
    update_json(root / "quantized" / "config.json", {"quantization_config": NF4})
    return root


@pytest.fixture(scope="module")
def shared_adapter(adapter_root):
    """An adapter that tests only read."""
    return adapter_root / "adapter"


@pytest.fixture
def adapter_path(shared_adapter, tmp_path):
    """A copy of the adapter that a test may change."""
    return shutil.copytree(shared_adapter, tmp_path / "adapter")


def assert_refused(adapter_path, message, **options):
    """Merging raises the message, and nothing is left beside the adapter."""
    root = adapter_path.parent
    with pytest.raises(ValueError, match=message):
        merge_adapter(adapter_path, root / "merged", **options)
    assert [folder.name for folder in root.iterdir()] == ["adapter"]


LORA_A = "layers.1.self_attn.q_proj.lora_A.weight"
LORA_B = "layers.1.self_attn.q_proj.lora_B.weight"
BIAS = "linear_2.bias"


@pytest.mark.parametrize(
    ("name_end", "new_tensor", "options", "message"),
    [
        pytest.param(
            LORA_B,
            None,
            {},
            "q_proj.lora_B.weight has shape None, on",
            id="missing",
        ),
        pytest.param(
            LORA_A,
            torch.ones(4, 7),
            {},
            r"lora_A.weight has shape \[4, 7\], on .* \[4, 64\]",
            id="another-shape",
        ),
        pytest.param(
            LORA_A,
            torch.full((4, 64), torch.nan),
            {},
            "NaNs detected",
            id="factor-nan",
        ),
        pytest.param(
            BIAS,
            torch.full((64,), torch.nan),
            {},
            "linear_2.bias would be NaN or .* in torch.float32",
            id="bias-nan",
        ),
        pytest.param(
            BIAS,
            torch.full((64,), 1e5),
            {"dtype": "float16"},
            "bias would be NaN or .* torch.float16",
            id="bias-overflows",
        ),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused(
    adapter_path, name_end, new_tensor, options, message
):
    tensors = weights(adapter_path)
    (changed_name,) = [name for name in tensors if name.endswith(name_end)]
    if new_tensor is None:
        del tensors[changed_name]
    else:
        tensors[changed_name] = new_tensor
    weights_path = adapter_path / "adapter_model.safetensors"
    save_file(tensors, weights_path, metadata={"format": "pt"})
    assert_refused(adapter_path, message, **options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"target_modules": r".*\.c_attn"},
            "No modules were targeted.*is not one of the base",
        ),
        (
            {"target_modules": r".*\.language_model.*\.k_proj"},
            r"\.lora_A\.\S+ has shape \[.*\], on the base None",
        ),
        (
            {"base_model_name_or_path": None},
            "does not name its base",
        ),
    ],
    ids=["no-module", "other-modules", "no-base"],
)
def test_a_configuration_that_does_not_fit_is_refused(adapter_path, changes, message):
    update_json(adapter_path / "adapter_config.json", changes)
    assert_refused(adapter_path, message)


@pytest.mark.parametrize(
    ("base_name", "message"),
    [
        ("untied", "does not fit the base .*untied: build.json differs. Give the right"),
        ("wide", "does not fit the base .* Give the right --base"),
        ("language", "language is a 'llama' model. Give the right one"),
        ("quantized", "quantized is stored quantized. Give what it was made from"),
    ],
)
def test_a_base_that_does_not_fit_is_refused(bases, adapter_root, adapter_path, base_name, message):
    base_path = bases.get(base_name, adapter_root / base_name)
    assert_refused(adapter_path, message, base=str(base_path))


def test_a_quantization_that_is_not_known_is_refused(adapter_path):
    message = r"not known.*quantization none\|nf4\|nf4-double\|int8"
    assert_refused(adapter_path, message, base_quantization="int4")


def set_start(adapter_path, start) -> None:
    """Sets how LoRA's matrices were initialized."""
    changes = {
        "init_lora_weights": start,
        "loftq_config": {"loftq_bits": 4},
    }
    update_json(adapter_path / "adapter_config.json", changes)


@pytest.mark.parametrize(
    "start",
    [
        "pissa",
        "pissa_niter_16",
        "olora",
        "corda",
        "lora_ga",
        "loftq",
    ],
)
def test_an_adapter_whose_start_changed_its_base_is_refused(adapter_path, start):
    set_start(adapter_path, start)
    with pytest.raises(ValueError, match=rf"init_lora_weights '{start}'. That changes the base"):
        read_peft_config(adapter_path)


@pytest.mark.parametrize("start", ["eva", "orthogonal", "gaussian", True, False])
def test_an_adapter_whose_start_left_its_base_is_opened(adapter_path, start):
    set_start(adapter_path, start)
    assert open_adapter(adapter_path).peft_config.init_lora_weights == start


@pytest.mark.parametrize("is_other", [True, False])
def test_embeddings_and_head_of_a_base_are_two_if_its_files_have_them_apart(
    shared_adapter, base_copy, is_other
):
    """Whatever its configuration says, as transformers loads it."""
    tensors = weights(base_copy)
    embeddings = tensors[EMBEDDINGS]
    head = embeddings.clone()
    if is_other:
        head += 1
    tensors["lm_head.weight"] = head
    store(base_copy, tensors)

    opened = open_adapter(shared_adapter, base=str(base_copy))
    base_tensors = BaseTensors(opened)
    assert base_tensors.config.tie_word_embeddings == (not is_other)
    assert base_tensors.config.text_config.tie_word_embeddings == (not is_other)
    assert opened.config.tie_word_embeddings
    assert torch.equal(base_tensors["lm_head.weight"], head)
    assert torch.equal(base_tensors[EMBEDDINGS], embeddings)


IN_BFLOAT16 = {
    "load_in_4bit": True,
    "bnb_4bit_compute_dtype": "bfloat16",
}


@pytest.mark.parametrize(
    ("record", "expected_quantization", "expected_dtype"),
    [
        pytest.param(
            {"quantization": None, "options": {"dtype": "bfloat16"}},
            None,
            None,
            id="not-quantized",
        ),
        pytest.param(
            {"quantization": IN_BFLOAT16, "options": {"dtype": "float32"}},
            IN_BFLOAT16,
            "float32",
            id="dtype",
        ),
        pytest.param(
            {"quantization": IN_BFLOAT16, "options": {"dtype": "auto"}},
            IN_BFLOAT16,
            "bfloat16",
            id="dtype-auto",
        ),
        pytest.param(
            {"quantization": IN_BFLOAT16},
            IN_BFLOAT16,
            "bfloat16",
            id="no-options",
        ),
        pytest.param(
            {"quantization": NF4, "options": {"dtype": "bfloat16"}},
            NF4,
            "bfloat16",
            id="no-compute-dtype",
        ),
        pytest.param(
            {"quantization": NF4, "options": {"dtype": None}},
            NF4,
            None,
            id="no-dtype",
        ),
    ],
)
def test_the_record_says_how_training_loaded_the_base(
    adapter_path, record, expected_quantization, expected_dtype
):
    (adapter_path / "training.json").write_text(json.dumps(record))
    opened = open_adapter(adapter_path)
    assert opened.quantization == expected_quantization
    assert opened.dtype == expected_dtype


@pytest.mark.parametrize(
    ("record", "base_quantization", "expected_quantization", "expected_dtype"),
    [
        pytest.param(
            {"quantization": IN_BFLOAT16},
            "none",
            None,
            None,
            id="none",
        ),
        pytest.param(
            {"options": {"dtype": "float16"}},
            "int8",
            {"load_in_8bit": True},
            "float16",
            id="int8",
        ),
        pytest.param(
            {},
            "nf4",
            {**NF4, "bnb_4bit_use_double_quant": False},
            None,
            id="nf4",
        ),
        pytest.param(
            None,
            "nf4-double",
            NF4,
            None,
            id="nf4-double",
        ),
    ],
)
def test_an_option_takes_precedence_over_the_record(
    adapter_path, record, base_quantization, expected_quantization, expected_dtype
):
    record_path = adapter_path / "training.json"
    record_path.unlink()
    if record is not None:
        record_path.write_text(json.dumps(record))

    opened = open_adapter(adapter_path, base_quantization=base_quantization)
    assert opened.quantization == expected_quantization
    assert opened.dtype == expected_dtype


def test_embeddings_that_are_the_head_are_read_by_both_names_in_training_s_precision(
    adapter_path, bases
):
    record = {"quantization": IN_BFLOAT16}
    (adapter_path / "training.json").write_text(json.dumps(record))
    opened = open_adapter(adapter_path)
    base_tensors = BaseTensors(opened)
    expected = weights(bases["tied"])[EMBEDDINGS].bfloat16()
    for tensor_name in (EMBEDDINGS, "lm_head.weight"):
        assert base_tensors[tensor_name].dtype == torch.bfloat16
        assert torch.equal(base_tensors[tensor_name], expected)
    assert opened.load().get_base_model().dtype == torch.bfloat16


def test_a_base_is_read_in_the_precision_that_its_configuration_says(shared_adapter, base_copy):
    """Whatever its files have, as transformers loads it."""
    update_json(base_copy / "config.json", {"dtype": "bfloat16"})
    base_tensors = BaseTensors(open_adapter(shared_adapter, base=str(base_copy)))
    expected = weights(base_copy)[EMBEDDINGS].bfloat16()
    assert base_tensors.dtype == torch.bfloat16
    assert base_tensors[EMBEDDINGS].dtype == torch.bfloat16
    assert torch.equal(base_tensors[EMBEDDINGS], expected)


@pytest.mark.parametrize(
    ("changes", "realigned"),
    [
        pytest.param(
            {},
            False,
            id="no-change",
        ),
        pytest.param(
            {"projector_gain_init": "text_norm"},
            False,
            id="as-the-base-has-it",
        ),
        pytest.param(
            {"gradient_compensation": "none", "text_embedding_norm": 9.0},
            False,
            id="another-arm",
        ),
        pytest.param(
            {"projector_gain_init": "one"},
            True,
            id="another-start",
        ),
    ],
)
def test_the_norm_is_aligned_again_if_training_began_it_otherwise(adapter_path, changes, realigned):
    record = {"quantization": None, "config_changes": changes}
    (adapter_path / "training.json").write_text(json.dumps(record))
    opened = open_adapter(adapter_path)
    assert opened.realigned == realigned

    for setting_name, expected in changes.items():
        if setting_name != "text_embedding_norm":
            assert getattr(opened.config, setting_name) == expected
    assert opened.config.text_embedding_norm != 9.0

    model = opened.load()
    assert not any(module.training for module in model.modules())
    parameters = dict(model.named_parameters())
    gain_end = "original_module.norm.weight"
    (gain_name,) = [name for name in parameters if name.endswith(gain_end)]
    is_one = bool((parameters[gain_name] == 1).all())
    assert is_one == realigned


@pytest.mark.parametrize(("norm", "realigned"), [("rms_norm", True), ("none", False)])
def test_another_norm_is_aligned_if_there_is_one(bases, tmp_path, norm, realigned):
    adapter_path = tmp_path / "adapter"
    make_adapter(bases["tied"], adapter_path, modules_to_save=None)
    record = {"quantization": None, "config_changes": {"projector_norm": norm}}
    (adapter_path / "training.json").write_text(json.dumps(record))
    opened = open_adapter(adapter_path)
    assert opened.config.projector_norm == norm
    assert opened.realigned == realigned


def test_a_base_without_a_record_may_be_any_build(shared_adapter, base_copy):
    (base_copy / "build.json").unlink()
    assert (shared_adapter / "build.json").exists()
    assert open_adapter(shared_adapter, base=str(base_copy)).base.name == str(base_copy)


@pytest.mark.parametrize(
    ("has_image", "expected_end"),
    [
        (True, "<|im_start|>"),
        (False, "<|im_end|>"),
    ],
)
def test_a_tokenizer_without_the_image_token_is_not_the_one_of_training(
    adapter_path, bases, has_image, expected_end
):
    base_processor = AutoProcessor.from_pretrained(bases["tied"])
    base_template = base_processor.chat_template
    tokenizer = base_processor.tokenizer if has_image else tiny_parts.tokenizer()
    tokenizer.chat_template = base_template.replace("<|im_end|>", "<|im_start|>")
    tokenizer.save_pretrained(adapter_path)

    processor = open_adapter(adapter_path).processor
    assert processor.chat_template == base_template.replace("<|im_end|>", expected_end)
    assert processor.image_token_id == base_processor.image_token_id


def test_a_tokenizer_without_a_template_gets_none(adapter_path, bases):
    base_processor = AutoProcessor.from_pretrained(bases["tied"])
    base_template = base_processor.chat_template
    base_processor.tokenizer.chat_template = None
    base_processor.tokenizer.save_pretrained(adapter_path)

    processor = open_adapter(adapter_path).processor
    assert processor.tokenizer.chat_template is None
    assert processor.chat_template == base_template


def test_the_norm_of_a_base_in_half_precision_is_not_rounded(adapter_path, bases):
    (adapter_path / "build.json").unlink()  # of another build
    opened = open_adapter(adapter_path, base=str(bases["bfloat16"]))
    base_tensors = BaseTensors(opened)
    stored_tensors = weights(bases["bfloat16"])
    gain_name = "model.multi_modal_projector.norm.weight"
    stored_gain = stored_tensors[gain_name]
    assert not torch.equal(stored_gain, stored_gain.bfloat16().float())

    for tensor_name in (gain_name, "model.multi_modal_projector.linear_1.weight"):
        stored_tensor = stored_tensors[tensor_name]
        assert base_tensors[tensor_name].dtype == stored_tensor.dtype
        assert torch.equal(base_tensors[tensor_name], stored_tensor)


LANGUAGE_NORM = "model.language_model.norm.weight"
PROJECTOR_NORM = "model.multi_modal_projector.norm.weight"


@pytest.mark.parametrize(
    ("tensor_name", "kept_count", "shape"),
    [
        (LANGUAGE_NORM, None, "None"),
        (LANGUAGE_NORM, 5, r"\[5\]"),
        (PROJECTOR_NORM, 5, r"\[5\]"),
    ],
)
def test_a_base_whose_tensors_are_not_its_configuration_s_is_refused(
    shared_adapter, base_copy, tmp_path, tensor_name, kept_count, shape
):
    # As if the adapter's base were this one.
    (base_copy / "build.json").unlink()
    tensors = weights(base_copy)
    whole_tensor = tensors.pop(tensor_name)
    if kept_count is not None:
        tensors[tensor_name] = whole_tensor[:kept_count].clone()
    store(base_copy, tensors)

    message = rf"^1 tensors of {base_copy} .*{tensor_name} has shape {shape}, not"
    with pytest.raises(ValueError, match=message):
        merge_adapter(shared_adapter, tmp_path / "merged", base=str(base_copy))


def test_a_merge_that_has_no_room_is_refused(shared_adapter, bases, tmp_path, monkeypatch):
    needed_bytes = sum(tensor.nbytes for tensor in weights(bases["tied"]).values())
    monkeypatch.setattr(weight_files, "free_space", lambda folder: needed_bytes - 1)
    output_path = tmp_path / "merged"
    with pytest.raises(ValueError, match=f"are to be written to {output_path}, where"):
        merge_adapter(shared_adapter, output_path)
    assert not output_path.exists()


@pytest.fixture
def run_path(tmp_path):
    """A run's folder without an adapter of its own, with one in checkpoint-5."""
    run_path = tmp_path / "run"
    (run_path / "checkpoint-5").mkdir(parents=True)
    (run_path / "checkpoint-5" / "adapter_config.json").touch()
    return run_path


def test_a_folder_without_an_adapter_is_refused_and_its_checkpoints_named(run_path, tmp_path):
    with pytest.raises(ValueError, match="no adapter_config.json.*It has checkpoint-5"):
        merge_adapter(run_path, tmp_path / "merged")


def test_an_adapter_that_is_not_lora_is_refused(run_path, tmp_path):
    adapter_path = tmp_path / "ia3"
    ia3_config = IA3Config(target_modules=["k_proj"], feedforward_modules=[])
    get_peft_model(tiny.model(), ia3_config).save_pretrained(adapter_path)
    with pytest.raises(ValueError, match="IA3 adapter. Only LoRA"):
        merge_adapter(adapter_path, tmp_path / "merged")

    # The output is looked at first.
    with pytest.raises(ValueError, match="run holds checkpoint-5. It is not"):
        merge_adapter(adapter_path, run_path)
    assert [folder.name for folder in run_path.iterdir()] == ["checkpoint-5"]


@pytest.mark.parametrize("is_lost", [True, False])
def test_where_the_base_has_no_processor_that_fits_the_adapters_counts(bases, tmp_path, is_lost):
    base_path = shutil.copytree(bases["untied"], tmp_path / "base")
    adapter_path = tmp_path / "adapter"
    make_adapter(base_path, adapter_path)
    AutoProcessor.from_pretrained(base_path).save_pretrained(adapter_path)
    assert len(open_adapter(adapter_path).processors) == 2

    processor_path = base_path / "processor_config.json"
    if is_lost:
        processor_path.unlink()
    else:
        update_json(processor_path, {"image_token": "<|im_end|>"})
    opened = open_adapter(adapter_path)
    assert opened.processors == [opened.processor]
