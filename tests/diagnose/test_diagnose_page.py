import re
from html.parser import HTMLParser

from browser import chromium, load
from diagnosed import diagnosed, embeddings_of
from PIL import Image

from normalign_llava.diagnose.page.write import write_page
from normalign_llava.diagnose.report import Attention, Drawing, Report


PROVENANCE = {"transformers": "5.23.0", "Data set": "easy-VQA at 1a2b3c"}
HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(2)>'


class Contents(HTMLParser):
    """Text, tags and attributes of a page."""

    def __init__(self, page: str):
        super().__init__()
        self.tags, self.attributes, self.cells = [], [], []
        self.feed(page)
        self.text = " ".join(" ".join(self.cells).split()).replace("\u00a0", " ")

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *pair) for pair in attrs]

    def handle_data(self, data):
        if self.tags and self.tags[-1] != "style":
            self.cells.append(data.strip())

    def values(self, name: str) -> list[str]:
        return [value for _, attribute, value in self.attributes if attribute == name]


def drawings(folder) -> list[Drawing]:
    Image.new("RGB", (1125, 450), "white").save(folder / "depth.png")
    Image.new("RGB", (600, 900), "white").save(folder / "rotation.png")
    return [
        Drawing("depth.png", "Norms in depth", "Mean norm by layer (figure 4a).", "depth"),
        Drawing("rotation.png", "Rotation", "By layer.", "depth"),
    ]


def written(folder, report, against=None) -> Contents:
    write_page(report, against, drawings(folder), folder, provenance=PROVENANCE)
    return Contents((folder / "report.html").read_text(encoding="utf-8"))


def hostile() -> tuple[Report, Report]:
    """Two reports with words that a page must neither run nor be stretched by."""
    endless = "x" * 150
    table = embeddings_of(endless, [(7, HOSTILE, 2.5), (8, endless, 2.0)])
    asked = Attention(HOSTILE + endless, None, None, [[[0.5, 0.5]]], [0.2], [0.9], None, [1])
    report = diagnosed(
        1.0, "layer_norm", HOSTILE, embeddings=table, attention=[asked], left_out=[HOSTILE], data=endless
    )
    return report, diagnosed(model=endless, projector=endless)


def test_every_number_appears(tmp_path):
    report = diagnosed(1.02, "layer_norm", "with-norm", left_out=["Attention: it takes images."])
    page = written(tmp_path, report, diagnosed())
    norms = {"71.78 ± 13.95", "28.71 ± 16.87", "39.96 ± 45.58", "12.34 ± 5.678", "37.00", "1.020", "0.8927"}
    gain_and_rows = {"2.281", "0.04000", "0.01520", "0.8765", "1000", "' token0'", "2.459", "1,024"}
    assert norms | gain_and_rows <= set(page.cells)
    assert "Attention: it takes images." in page.text and "transformers 5.23.0 Data set" in page.text


def test_the_page_loads_nothing_from_outside_and_runs_no_text_of_data(tmp_path):
    page = written(tmp_path, *hostile())
    assert not {"script", "iframe"} & set(page.tags) and page.tags.count("img") == 2
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    assert page.text.count(HOSTILE) >= 2
    assert all(link.startswith("#") or link == "data:," for link in page.values("href"))
    assert {link[1:] for link in page.values("href") if link[0] == "#"} <= set(page.values("id"))
    sources = page.values("src")
    assert len(sources) == 2 and all(source.startswith("data:image/png;base64,iVBOR") for source in sources)
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "default-src 'none'; img-src data:; style-src 'unsafe-inline'" in text
    assert not re.search(r"https?:|url\(|@import", text) and str(tmp_path) not in text
    assert {path.name for path in tmp_path.iterdir()} == {"report.html", "depth.png", "rotation.png"}


def test_in_a_browser(tmp_path):
    written(tmp_path, *hostile())
    with chromium(tmp_path / "profile") as browser:
        for width, dark in ((1280, False), (390, False), (390, True)):
            page = load(browser, (tmp_path / "report.html").as_uri(), width, dark=dark)
            assert page.inner_width == width
            assert page.console == [] and page.failed == [] and page.undecoded == []
            assert page.requests == [(tmp_path / "report.html").as_uri()]
            assert page.scroll_width <= page.client_width
