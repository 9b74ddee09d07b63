"""The image that attention is drawn on is the one that the model was shown."""

import numpy as np
import pytest
import tiny_parts
from PIL import Image
from transformers import LlavaProcessor

from normalign_llava.diagnose.run import shown_image


IMAGE = Image.linear_gradient("L").rotate(90).resize((32, 16)).convert("RGB")  # black at the left, white at the right


@pytest.mark.parametrize(
    ("kind", "changes", "expected"),
    [
        ("clip", {}, IMAGE.crop((8, 0, 24, 16))),
        ("dinov2", {}, IMAGE.crop((8, 0, 24, 16))),
        ("siglip", {}, IMAGE.resize((16, 16), Image.Resampling.BICUBIC)),
        ("clip", {"do_normalize": False}, IMAGE),  # it cannot be told
        ("clip", {"do_rescale": False}, IMAGE),
    ],
)
def test_the_image_is_shown_as_the_model_received_it(kind, changes, expected):
    image_processor = tiny_parts.image_processor(kind)
    for name, value in changes.items():
        setattr(image_processor, name, value)
    processor = LlavaProcessor(image_processor, tiny_parts.tokenizer(extra=("<image>",)), image_token="<image>")
    inputs = {"pixel_values": image_processor(images=[IMAGE], return_tensors="pt")["pixel_values"]}
    shown, expected = (np.asarray(image).astype(int) for image in (shown_image(processor, inputs, IMAGE), expected))
    assert shown.shape == expected.shape and np.abs(shown - expected).max() <= 3
    assert shown_image(processor, {}, IMAGE) is IMAGE
