"""Figures show the numbers of the reports, and images as the model received them; the page shows all numbers, runs no
text of data, and loads nothing from outside."""

import math
import re

import numpy as np
import pytest
import tiny_parts
from browser import chromium, load
from diagnosed import attention_of, diagnosed, embeddings_of
from PIL import Image
from transformers import LlavaProcessor

from normalign_llava.diagnose.figures import attention, cosine, draw, norms, rotation
from normalign_llava.diagnose.page import write_page
from normalign_llava.diagnose.report import Attention, Drawing
from normalign_llava.diagnose.run import shown_image
from normalign_llava.diagnose.style import shown


pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("error")]

HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(2)>'


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


def written(folder, report, against) -> str:
    drawings = []
    for name, size in (("norms", (1125, 450)), ("rotation", (600, 900))):
        Image.new("RGB", size, "white").save(folder / f"{name}.png")
        drawings.append(Drawing(f"{name}.png", name, "By layer (figure 4a).", "depth"))
    write_page(report, against, drawings, folder, provenance={"Data set": "easy-VQA at 1a2b3c"})
    return (folder / "report.html").read_text(encoding="utf-8")


def test_every_number_appears(tmp_path):
    report = diagnosed(1.02, "layer_norm", "with-norm", left_out=["Attention: it takes images."])
    cells = set(re.findall(r">([^<>\n]+)<", written(tmp_path, report, diagnosed())))
    norms = {"71.78 ± 13.95", "28.71 ± 16.87", "39.96 ± 45.58", "12.34 ± 5.678", "37.00", "1.020", "0.8927"}
    gain_and_rows = {"2.281", "0.04000", "0.01520", "0.8765", "1000", "2.459", "1,024"}
    assert norms | gain_and_rows | {"Attention: it takes images.", "easy-VQA at 1a2b3c"} <= cells


def test_in_a_browser_it_loads_nothing_from_outside_and_runs_no_text_of_data(tmp_path):
    endless = "x" * 150
    table = embeddings_of(endless, [(7, HOSTILE, 2.5), (8, endless, 2.0)])
    asked = Attention(HOSTILE + endless, None, None, [[[0.5, 0.5]]], [0.2], [0.9], None, [1])
    changes = {"embeddings": table, "attention": [asked], "left_out": [HOSTILE], "data": endless}
    ours = diagnosed(1.0, "layer_norm", HOSTILE, **changes)
    text = written(tmp_path, ours, diagnosed(model=endless, projector=endless))
    assert HOSTILE not in text and text.count("&lt;script&gt;") >= 2
    assert "default-src 'none'; img-src data:; style-src 'unsafe-inline'" in text and str(tmp_path) not in text
    links = re.findall(r' href="([^"]*)"', text)
    assert {link.removeprefix("#") for link in links} - {"data:,"} <= set(re.findall(r' id="([^"]*)"', text))
    assert all(source.startswith("data:image/png;base64,iVBOR") for source in re.findall(r' src="([^"]*)"', text))
    address = (tmp_path / "report.html").as_uri()
    with chromium(tmp_path / "profile") as browser:
        for width, dark in ((1280, False), (390, False), (390, True)):
            page = load(browser, address, width, dark=dark)
            assert page.console == [] and page.failed == [] and page.undecoded == [] and page.requests == [address]
            assert page.inner_width == width and page.scroll_width <= page.client_width
