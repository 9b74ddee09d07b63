"""The page shows the numbers, runs no text of data, and loads nothing from outside."""

import re

from browser import chromium, load
from diagnosed import diagnosed, embeddings_of
from PIL import Image

from normalign_llava.diagnose.page import write_page
from normalign_llava.diagnose.report import Attention, Drawing


HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(2)>'


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
