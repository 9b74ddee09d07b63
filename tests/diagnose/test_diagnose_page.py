"""Figures show the numbers of the reports, and images as the model received them; the page shows
all numbers, runs no text of data, and loads nothing from outside."""

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
    grids = {"$5 是": (3, 4), "Many?": None}
    asked = [attention_of(question, 30, grid, "image.png") for question, grid in grids.items()]
    ours, baseline = (diagnosed(ratio, layers=30, attention=asked) for ratio in (1.0, 30.0))
    drawings = draw(ours, baseline, images)
    names = ["interface", "norms", "cosine", "rotation", "dynamics", "attention_1", "attention_2"]
    assert [drawing.file for drawing in drawings] == [f"{name}.png" for name in names]
    assert {path.stem for path in images.iterdir()} == {"image", *names}
    for drawing in drawings:
        with Image.open(images / drawing.file) as image:
            assert np.asarray(image.convert("L")).std() > 10
    bare = draw(diagnosed(dynamics=[], attention=[]), None, images)
    assert [drawing.file for drawing in bare] == [f"{name}.png" for name in names[:4]]


def test_layers_show_the_reports_numbers():
    ours, baseline = diagnosed(1.0, model="same", layers=5), diagnosed(30.0, model="same", layers=7)
    models = shown(ours, baseline)
    sketches = {"norm": (norms, 1), "cosine": (cosine, 1), "rotation": (rotation, 180 / math.pi)}
    for quantity, (sketch, factor) in sketches.items():
        (axes,) = sketch(models)[0].axes
        curves = {curve.get_label(): curve.get_ydata() for curve in axes.lines}
        for label, report in (("same", ours), ("same (baseline)", baseline)):
            for kind in ("visual", "text"):
                expected = factor * np.array(getattr(report.depth, quantity)[kind].mean)
                np.testing.assert_allclose(curves[f"{kind}, {label}"], expected, rtol=1e-12)


def test_attention_maps_are_means_over_layers_on_one_scale(images):
    asked = [attention_of("Where?", 30, (3, 4), "image.png", sharp=sharp) for sharp in (9.0, 2.0)]
    ours, baseline = (diagnosed(attention=[answer]) for answer in asked)
    ((figure, _),) = attention(shown(ours, baseline), images)
    _, *maps, _ = figure.axes
    for axes, report in zip(maps, (baseline, ours), strict=True):
        mean = 100 * np.mean(report.attention[0].maps, axis=0)
        np.testing.assert_allclose(axes.images[-1].get_array(), mean)
    assert len({(axes.images[-1].norm.vmin, axes.images[-1].norm.vmax) for axes in maps}) == 1


@pytest.mark.parametrize("kind", ["clip", "dinov2", "siglip"])
def test_the_image_is_shown_as_the_model_received_it(kind):
    image = Image.linear_gradient("L").rotate(90).resize((32, 16)).convert("RGB")
    whole, cropped = image.resize((16, 16), Image.Resampling.BICUBIC), image.crop((8, 0, 24, 16))
    image_processor = tiny_parts.image_processor(kind)
    tokenizer = tiny_parts.tokenizer(extra=("<image>",))
    processor = LlavaProcessor(image_processor, tokenizer, image_token="<image>")
    inputs = image_processor(images=[image], return_tensors="pt")
    expected = np.asarray(whole if kind == "siglip" else cropped).astype(int)
    seen = np.asarray(shown_image(processor, inputs, image)).astype(int)
    assert seen.shape == expected.shape and np.abs(seen - expected).max() <= 3
    image_processor.do_normalize = False  # so that it cannot be told
    assert shown_image(processor, inputs, image) is shown_image(processor, {}, image) is image


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
    norms = {"71.78 ± 13.95", "28.71 ± 16.87", "39.96 ± 45.58", "12.34 ± 5.678", "37.00", "1.020"}
    others = {"0.8927", "2.281", "0.04000", "0.01520", "0.8765", "1000", "2.459", "1,024"}
    assert norms | others | {"Attention: it takes images.", "easy-VQA at 1a2b3c"} <= cells


def test_in_a_browser_it_loads_nothing_from_outside_and_runs_no_text_of_data(tmp_path):
    endless = "x" * 150
    table = embeddings_of(endless, [(7, HOSTILE, 2.5), (8, endless, 2.0)])
    asked = Attention(HOSTILE + endless, None, None, [[[0.5, 0.5]]], [0.2], [0.9], None, [1])
    changes = {"embeddings": table, "attention": [asked], "left_out": [HOSTILE], "data": endless}
    ours = diagnosed(1.0, "layer_norm", HOSTILE, **changes)
    text = written(tmp_path, ours, diagnosed(model=endless, projector=endless))
    assert HOSTILE not in text and text.count("&lt;script&gt;") >= 2
    assert "default-src 'none'; img-src data:; style-src 'unsafe-inline'" in text
    assert str(tmp_path) not in text
    links, ids, sources = (re.findall(rf' {key}="([^"]*)"', text) for key in ("href", "id", "src"))
    assert {link.removeprefix("#") for link in links} <= {"data:,", *ids}
    assert all(source.startswith("data:image/png;base64,iVBOR") for source in sources)
    address = (tmp_path / "report.html").as_uri()
    with chromium(tmp_path / "profile") as browser:
        for width, dark in ((1280, False), (390, False), (390, True)):
            page = load(browser, address, width, dark=dark)
            assert page.console == page.failed == page.undecoded == []
            assert page.requests == [address]
            assert page.inner_width == width and page.scroll_width <= page.client_width
