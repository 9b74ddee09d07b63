"""The image that attention is drawn on is the one that the model was shown."""

import numpy as np
import pytest
import tiny_parts
from PIL import Image
from transformers import LlavaProcessor

from normalign_llava.diagnose.run import shown_image


def processor(kind, **changes):
    image_processor = tiny_parts.image_processor(kind)
    for name, value in changes.items():
        setattr(image_processor, name, value)
    return LlavaProcessor(image_processor, tiny_parts.tokenizer(extra=("<image>",)), image_token="<image>")


def image():
    """Twice as wide as high, of a colour that tells left from right."""
    return Image.linear_gradient("L").rotate(90).resize((32, 16)).convert("RGB")


def shown(kind, **changes):
    made = processor(kind, **changes)
    inputs = {"pixel_values": made.image_processor(images=[image()], return_tensors="pt")["pixel_values"]}
    return np.asarray(shown_image(made, inputs, image())).astype(int)


@pytest.mark.parametrize("kind", ["clip", "dinov2"])
def test_a_cropped_image_is_shown_cropped(kind):
    assert np.abs(shown(kind) - np.asarray(image().crop((8, 0, 24, 16))).astype(int)).max() <= 1


@pytest.mark.parametrize("kind", ["siglip", "vit"])
def test_a_squeezed_image_is_shown_squeezed(kind):
    found = shown(kind)
    assert found.shape == (16, 16, 3)
    assert found[8, 0, 0] < 20 and found[8, -1, 0] > 235 and (np.diff(found[8, :, 0]) > 0).all()


@pytest.mark.parametrize("switched_off", ["do_normalize", "do_rescale"])
def test_where_it_cannot_be_told_the_image_itself_is_shown(switched_off):
    assert np.array_equal(shown("clip", **{switched_off: False}), np.asarray(image()))
    assert shown_image(processor("clip"), {}, image()).size == (32, 16)
