import pytest
import transformers
from gguf import GGUFReader
from tiny_parts import language, vision

from normalign_llava import build_checkpoint
from normalign_llava.export.requirements import describe_resizing
from normalign_llava.export.run import export_gguf


SQUARE = {"height": 16, "width": 16}
EDGE = {"shortest_edge": 16}


@pytest.mark.parametrize(
    ("image_processor", "description"),
    [
        (transformers.SiglipImageProcessor(size=SQUARE), "stretched, as in training"),
        (
            transformers.SiglipImageProcessor(size=SQUARE, resample=2),
            "stretched with bicubic interpolation, but with bilinear in training",
        ),
        (
            transformers.CLIPImageProcessor(size=EDGE, crop_size=SQUARE),
            "stretched, but cropped in training",
        ),
        (
            transformers.LlavaImageProcessor(size=EDGE, crop_size=SQUARE, do_pad=True),
            "padded, as in training",
        ),
    ],
)
def test_what_is_done_with_pictures_of_other_sizes_is_described(image_processor, description):
    assert describe_resizing(image_processor) == description


@pytest.mark.parametrize("is_padded", [True, False])
def test_llama_cpp_pads_pictures_if_training_padded_them(tmp_path, is_padded):
    encoder = vision(tmp_path / "vision", "siglip")
    image_processor = transformers.LlavaImageProcessor(
        size=EDGE, crop_size=SQUARE, do_pad=is_padded
    )
    image_processor.save_pretrained(encoder)
    text = language(tmp_path / "language")
    build_checkpoint(vision=encoder, language=text, output=tmp_path / "model")
    report = export_gguf(tmp_path / "model", tmp_path / "gguf")
    fields = GGUFReader(tmp_path / "gguf" / report.vision_file).fields
    pads = "clip.vision.image_grid_pinpoints" not in fields
    assert pads == is_padded
