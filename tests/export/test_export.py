import resource
import shutil

import gguf
import gguf_text
import numpy as np
import pytest
import tiny_parts
import torch
import transformers
from adapters import make_adapter
from llama_server import LlamaServer, answer_here, largest_difference
from PIL import Image

from normalign_llava import NormAlignLlavaForConditionalGeneration, build_checkpoint
from normalign_llava.errors import NotWritable
from normalign_llava.export.run import export_gguf


SIDE = 28


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts")
    vision = tiny_parts.siglip(
        folder / "siglip", SIDE, hidden_size=64, intermediate_size=96, num_hidden_layers=3
    )
    return vision, gguf_text.language(folder / "qwen2")


def build(parts, folder, **options):
    vision, language = parts
    build_checkpoint(vision=vision, language=language, output=folder, **options)
    return folder


def load(folder):
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    return model.eval(), transformers.AutoProcessor.from_pretrained(folder)


def picture(seed=0):
    numbers = np.random.default_rng(seed)
    return Image.fromarray(numbers.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8))


def user(*contents):
    parts = []
    for content in contents:
        if isinstance(content, str):
            parts.append({"type": "text", "text": content})
        else:
            parts.append({"type": "image", "image": content})
    return {"role": "user", "content": parts}


CONVERSATIONS = {
    "one image": [user(picture(), "what is this?")],
    "two images": [user(picture(1), picture(2), "which colour?")],
    "a system turn": [
        {"role": "system", "content": [{"type": "text", "text": "a red kite"}]},
        user(picture(3), "where are they?"),
    ],
    "a second question": [
        user(picture(4), "what is this?"),
        {"role": "assistant", "content": [{"type": "text", "text": "a kite"}]},
        user("which colour has it?"),
    ],
    "no image": [user("what is the sea?")],
}


def smooth_picture(width, height):
    """A picture of a few large patches: interpolation keeps more of it than of noise."""
    numbers = np.random.default_rng(width)
    patches = Image.fromarray(numbers.integers(0, 256, (3, 4, 3), dtype=np.uint8))
    return patches.resize((width, height))


def parts_of_characters(tokenizer):
    """Ids of tokens that are bytes of a character."""
    texts = [tokenizer.decode([token_id]) for token_id in range(len(tokenizer))]
    return [token_id for token_id, text in enumerate(texts) if "\ufffd" in text]


def check_answers(server, model, processor, largest):
    banned = parts_of_characters(processor.tokenizer)
    for name, messages in CONVERSATIONS.items():
        expected = answer_here(model, processor, messages, banned=banned)
        answer = server.answer(messages, banned=banned)
        assert answer.prompt_tokens == expected.prompt_tokens, name
        assert largest_difference(answer, expected) < largest, name


@pytest.mark.parametrize("arm", ["none", "unit", "aligned", "gwc"])
def test_llama_cpp_answers_as_transformers(tmp_path, parts, arm):
    checkpoint = build(parts, tmp_path / "model", arm=arm)
    report = export_gguf(checkpoint, tmp_path / "gguf", dtype="float32")
    model, processor = load(checkpoint)
    text_file = tmp_path / "gguf" / "model.gguf"
    gguf_text.write(model, processor, text_file)
    server = LlamaServer(text_file, tmp_path / "gguf" / report.vision_file)
    check_answers(server, model, processor, largest=0.02)


@pytest.fixture(scope="module")
def exported(parts, tmp_path_factory):
    """A checkpoint, and its vision part for llama.cpp in float16."""
    folder = tmp_path_factory.mktemp("exported")
    checkpoint = build(parts, folder / "model")
    report = export_gguf(checkpoint, folder / "gguf", name="kite")
    return checkpoint, folder / "gguf", report


@pytest.mark.parametrize(
    ("text_type", "largest"),
    [("F32", 0.02), ("Q8_0", 0.2)],
)
def test_a_tower_in_float16_and_a_quantized_language_model_answer_alike(
    tmp_path, exported, text_type, largest
):
    checkpoint, folder, report = exported
    model, processor = load(checkpoint)
    text_file = tmp_path / "text.gguf"
    gguf_text.write(model, processor, text_file, gguf.GGMLQuantizationType[text_type])
    server = LlamaServer(text_file, folder / report.vision_file)
    messages = CONVERSATIONS["one image"]
    banned = parts_of_characters(processor.tokenizer)
    expected = answer_here(model, processor, messages, 3, banned)
    answer = server.answer(messages, 3, banned)
    assert answer.prompt_tokens == expected.prompt_tokens
    assert largest_difference(answer, expected) < largest


def test_pictures_of_other_sizes_are_stretched_as_in_training(tmp_path, exported):
    checkpoint, folder, report = exported
    model, processor = load(checkpoint)
    text_file = tmp_path / "text.gguf"
    gguf_text.write(model, processor, text_file)
    server = LlamaServer(text_file, folder / report.vision_file)
    banned = parts_of_characters(processor.tokenizer)
    for size in [(90, 30), (20, 64), (200, 200), (12, 12)]:
        messages = [user(smooth_picture(*size), "what is this?")]
        expected = answer_here(model, processor, messages, 2, banned)
        answer = server.answer(messages, 2, banned)
        assert answer.prompt_tokens == expected.prompt_tokens, size
        assert largest_difference(answer, expected) < 0.02, size


def tensors_of(file):
    return {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}


def test_only_matrices_of_the_tower_are_float16(exported):
    _, folder, report = exported
    for name, tensor in tensors_of(folder / report.vision_file).items():
        is_matrix = name.startswith("v.blk") and len(tensor.shape) == 2
        expected = "F16" if is_matrix or name == "v.patch_embd.weight" else "F32"
        assert tensor.tensor_type.name == expected, name


def test_the_tower_ends_at_the_layer_that_is_read(exported):
    _, folder, report = exported
    names = tensors_of(folder / report.vision_file)
    assert "v.blk.1.ln1.weight" in names
    assert "v.blk.2.ln1.weight" not in names  # of three layers, -2 reads what the second gives
    assert "v.post_ln.weight" not in names
    fields = gguf.GGUFReader(folder / report.vision_file).fields
    assert fields["clip.vision.block_count"].contents() == 2
    assert fields["clip.vision.feature_layer"].contents() == [2]


@pytest.mark.parametrize("feature_layer", [-1, [1, 3]])
def test_other_feature_layers_are_exported(tmp_path, parts, feature_layer):
    checkpoint = build(parts, tmp_path / "model", feature_layer=feature_layer)
    report = export_gguf(checkpoint, tmp_path / "gguf", dtype="float32")
    model, processor = load(checkpoint)
    text_file = tmp_path / "text.gguf"
    gguf_text.write(model, processor, text_file)
    server = LlamaServer(text_file, tmp_path / "gguf" / report.vision_file)
    messages = CONVERSATIONS["one image"]
    banned = parts_of_characters(processor.tokenizer)
    expected = answer_here(model, processor, messages, 3, banned)
    answer = server.answer(messages, 3, banned)
    assert largest_difference(answer, expected) < 0.02


def test_the_report_has_what_to_run_next(exported):
    checkpoint, folder, report = exported
    assert report.vision_file == "mmproj-kite.gguf"
    assert report.next_commands == [
        f"python LLAMA_CPP/convert_hf_to_gguf.py {checkpoint} "
        f"--outfile {folder}/kite.gguf --outtype f16",
        f"llama-server -m {folder}/kite.gguf --mmproj {folder}/mmproj-kite.gguf",
        f"ollama create kite -f {folder}/Modelfile",
    ]
    assert report.resizing == "stretched, as in training"
    assert {file.name for file in folder.iterdir()} == {
        "mmproj-kite.gguf",
        "Modelfile",
        "export.json",
    }


def test_an_adapter_is_merged_on_the_way(tmp_path, exported):
    checkpoint, _, _ = exported
    trained = make_adapter(checkpoint, tmp_path / "adapter")
    processor = transformers.AutoProcessor.from_pretrained(checkpoint)
    processor.save_pretrained(tmp_path / "adapter")
    folder = tmp_path / "gguf"
    report = export_gguf(tmp_path / "adapter", folder, name="kite", dtype="float32")
    assert report.next_commands[0].startswith(
        f"python LLAMA_CPP/convert_hf_to_gguf.py {folder}/merged --outfile {folder}/kite.gguf"
    )
    merged, _ = load(folder / "merged")
    gguf_text.write(merged, processor, folder / "kite.gguf")
    server = LlamaServer(folder / "kite.gguf", folder / report.vision_file)
    messages = CONVERSATIONS["one image"]
    banned = parts_of_characters(processor.tokenizer)
    expected = answer_here(trained.base_model.model, processor, messages, 3, banned)
    answer = server.answer(messages, 3, banned)
    assert largest_difference(answer, expected) < 0.02


def test_an_adapter_that_cannot_be_exported_is_refused_before_it_is_merged(tmp_path):
    vision = tiny_parts.vision(tmp_path / "clip")
    language = tiny_parts.language(tmp_path / "language")
    build_checkpoint(vision=vision, language=language, output=tmp_path / "model")
    make_adapter(tmp_path / "model", tmp_path / "adapter")
    with pytest.raises(ValueError, match="adapter cannot be exported .* has a class token"):
        export_gguf(tmp_path / "adapter", tmp_path / "gguf")
    assert not (tmp_path / "gguf").exists()


def test_a_checkpoint_that_bitsandbytes_quantized_is_refused_and_leaves_nothing(tmp_path, exported):
    pytest.importorskip("bitsandbytes")
    checkpoint, _, _ = exported
    quantized = NormAlignLlavaForConditionalGeneration.from_pretrained(
        checkpoint, quantization_config=transformers.BitsAndBytesConfig(load_in_4bit=True)
    )
    quantized.save_pretrained(tmp_path / "quantized")
    transformers.AutoProcessor.from_pretrained(checkpoint).save_pretrained(tmp_path / "quantized")
    with pytest.raises(ValueError, match=r"stored quantized \(bitsandbytes\).* before it is quan"):
        export_gguf(tmp_path / "quantized", tmp_path / "gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["quantized"]


def test_an_adapter_of_a_base_that_training_quantized_is_merged_to_full_precision(
    tmp_path, exported
):
    pytest.importorskip("bitsandbytes")
    checkpoint, _, _ = exported
    quantization = {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.float32}
    make_adapter(checkpoint, tmp_path / "adapter", quantization)
    report = export_gguf(tmp_path / "adapter", tmp_path / "gguf")
    assert (tmp_path / "gguf" / report.vision_file).is_file()
    merged_config = (tmp_path / "gguf" / "merged" / "config.json").read_text()
    assert "quantization_config" not in merged_config


def test_a_full_disk_is_named_and_nothing_is_left(tmp_path, exported):
    checkpoint, _, _ = exported
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, hard))
    try:
        with pytest.raises(NotWritable, match=rf"{tmp_path} cannot be written to: .* Make room"):
            export_gguf(checkpoint, tmp_path / "gguf")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


SCRIPT = """
import sys
folder, option, file = sys.argv[1:4]
if "fails" in folder:
    sys.exit("this model is not known")
open(file, "w").write(" ".join(sys.argv[4:]))
"""


def test_the_script_of_llama_cpp_writes_the_language_model(tmp_path, exported):
    """The script is called as documented; a nightly test calls llama.cpp's own."""
    checkpoint, _, _ = exported
    (tmp_path / "convert_hf_to_gguf.py").write_text(SCRIPT)
    folder = tmp_path / "gguf"
    report = export_gguf(checkpoint, folder, name="kite", llama_cpp=tmp_path, text_type="q8_0")
    assert (folder / "kite.gguf").read_text() == "--outtype q8_0"
    assert report.text_file == "kite.gguf"
    assert [command.split()[0] for command in report.next_commands] == ["llama-server", "ollama"]


def test_a_failing_script_is_quoted_and_nothing_is_written(tmp_path, exported):
    checkpoint, _, _ = exported
    failing = tmp_path / "fails"
    shutil.copytree(checkpoint, failing)
    (tmp_path / "convert_hf_to_gguf.py").write_text(SCRIPT)
    with pytest.raises(ValueError, match="failed on the language model of .*fails") as error:
        export_gguf(failing, tmp_path / "gguf", llama_cpp=tmp_path)
    assert str(error.value).endswith("this model is not known")
    assert not (tmp_path / "gguf").exists()


def test_an_adapter_without_a_record_needs_its_base_s_quantization(tmp_path, exported):
    checkpoint, _, _ = exported
    make_adapter(checkpoint, tmp_path / "adapter")
    (tmp_path / "adapter" / "training.json").unlink()
    with pytest.raises(ValueError, match="--base-quantization"):
        export_gguf(tmp_path / "adapter", tmp_path / "gguf")
    report = export_gguf(tmp_path / "adapter", tmp_path / "gguf", base_quantization="none")
    assert (tmp_path / "gguf" / report.vision_file).is_file()
