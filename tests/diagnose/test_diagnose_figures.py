# SPDX-License-Identifier: Apache-2.0
"""Figures show the numbers of the reports, and images as the model received them."""

import math

import numpy as np
import pytest
import tiny_parts
from diagnosed import attention_of, diagnosed
from PIL import Image
from transformers import LlavaProcessor

from normalign_llava.diagnose.figures import attention, cosine, draw, interface, norms, rotation
from normalign_llava.diagnose.run import shown_image
from normalign_llava.diagnose.style import shown


pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("error")]


@pytest.fixture
def images(tmp_path):
    Image.new("RGB", (80, 60), (200, 30, 30)).save(tmp_path / "image.png")
    return tmp_path


def test_what_was_measured_is_drawn_and_nothing_else(images):
    asked = [attention_of("$5 是", 30, (3, 4), "image.png"), attention_of("Many?", 30, None, "image.png")]
    ours, baseline = (diagnosed(ratio, layers=30, attention=asked) for ratio in (1.0, 30.0))
    drawings = draw(ours, baseline, images)
    names = ["interface", "norms", "cosine", "rotation", "dynamics", "attention_1", "attention_2"]
    assert [drawing.file for drawing in drawings] == [f"{name}.png" for name in names]
    assert {path.name for path in images.iterdir()} == {drawing.file for drawing in drawings} | {"image.png"}
    for drawing in drawings:
        with Image.open(images / drawing.file) as image:
            assert np.asarray(image.convert("L")).std() > 10
    bare = draw(diagnosed(dynamics=[], attention=[]), None, images)
    assert [drawing.file for drawing in bare] == [f"{name}.png" for name in names[:4]]


def test_layers_show_the_reports_numbers():
    ours, baseline = diagnosed(1.0, model="same", layers=5), diagnosed(30.0, model="same", layers=7)
    models = shown(ours, baseline)
    for quantity, sketch, factor in (("norm", norms, 1), ("cosine", cosine, 1), ("rotation", rotation, 180 / math.pi)):
        (axes,) = sketch(models)[0].axes
        curves = {curve.get_label(): curve.get_ydata() for curve in axes.lines}
        for label, report in (("same", ours), ("same (baseline)", baseline)):
            for kind in ("visual", "text"):
                expected = factor * np.array(getattr(report.depth, quantity)[kind].mean)
                np.testing.assert_allclose(curves[f"{kind}, {label}"], expected, rtol=1e-12)


def test_interface_shows_mean_and_deviation():
    (axes,) = interface(shown(diagnosed(37.0), None))[0].axes
    rows = [label.get_text() for label in axes.get_yticklabels()]
    assert rows[0] == "encoder output" and "text in the data, as stored" not in rows
    dots = {round(dot.get_ydata()[0]): dot.get_xdata()[0] for dot in axes.lines if len(dot.get_xdata()) == 1}
    assert [dots[row] for row in range(len(rows))] == pytest.approx([71.78, 28.71, 39.96, 39.96, 1.234, 1.08, 3.24])
    whiskers = [bars.get_segments()[0][:, 0] for bars in axes.collections]
    assert whiskers[0] == pytest.approx([57.83, 85.73]) and axes.get_xlim()[0] > 0


def test_attention_maps_are_means_over_layers_on_one_scale(images):
    ours, baseline = (
        diagnosed(attention=[attention_of("Where?", 30, (3, 4), "image.png", sharp=sharp)]) for sharp in (9.0, 2.0)
    )
    ((figure, _),) = attention(shown(ours, baseline), images)
    _, *maps, _ = figure.axes
    for axes, report in zip(maps, (baseline, ours), strict=True):
        mean = 100 * np.mean(report.attention[0].maps, axis=0)
        np.testing.assert_allclose(axes.images[-1].get_array(), mean)
    assert len({(axes.images[-1].norm.vmin, axes.images[-1].norm.vmax) for axes in maps}) == 1


@pytest.mark.parametrize(
    ("kind", "changes"), [("clip", {}), ("dinov2", {}), ("siglip", {}), ("clip", {"do_normalize": False})]
)
def test_the_image_is_shown_as_the_model_received_it(kind, changes):
    image = Image.linear_gradient("L").rotate(90).resize((32, 16)).convert("RGB")  # from black to white
    shapes = {"clip": image.crop((8, 0, 24, 16)), "siglip": image.resize((16, 16), Image.Resampling.BICUBIC)}
    expected = image if changes else shapes["siglip" if kind == "siglip" else "clip"]  # or it cannot be told
    image_processor = tiny_parts.image_processor(kind)
    for name, value in changes.items():
        setattr(image_processor, name, value)
    processor = LlavaProcessor(image_processor, tiny_parts.tokenizer(extra=("<image>",)), image_token="<image>")
    inputs = image_processor(images=[image], return_tensors="pt")
    seen, expected = (np.asarray(one).astype(int) for one in (shown_image(processor, inputs, image), expected))
    assert seen.shape == expected.shape and np.abs(seen - expected).max() <= 3
    assert shown_image(processor, {}, image) is image
