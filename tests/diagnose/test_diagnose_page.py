"""Figures show the numbers of the reports, and images as the model received them; the page shows
all numbers, runs no text of data, and loads nothing from outside."""

import math
import re
from base64 import b64decode
from dataclasses import replace
from html import unescape

import numpy as np
import pytest
import tiny_parts
import torch
from browser import chromium, load
from diagnosed import attention_of, diagnosed, embeddings_of
from matplotlib.figure import Figure
from PIL import Image
from transformers import LlavaProcessor

from normalign_llava.diagnose.figures import (
    STAGES,
    attention,
    cosine,
    draw,
    dynamics,
    interface,
    norms,
    rotation,
)
from normalign_llava.diagnose.findings import findings, verdict
from normalign_llava.diagnose.page import write_page
from normalign_llava.diagnose.report import Attention, Drawing, DynamicsStep, Moments
from normalign_llava.diagnose.run import shown_image
from normalign_llava.diagnose.style import (
    drawable,
    elide,
    log_scale,
    new_figure,
    ratio_title,
    shown,
)


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


def test_kinds_of_token_that_do_not_occur_are_not_drawn():
    report = diagnosed(layers=5)
    alone = replace(report.depth, norm={"visual": report.depth.norm["visual"]})
    models = shown(replace(report, depth=alone), None)
    for sketch in (norms, cosine, rotation):
        (axes,) = sketch(models)[0].axes
        assert [curve.get_label() for curve in axes.lines] == ["visual, llava-baseline"]


def test_the_interface_shows_mean_and_deviation_of_each_stage_that_a_model_has():
    ours = diagnosed(1.02, "layer_norm", "ours")
    baseline = diagnosed(model="base")
    special = Moments(0.0, 0.0, 4)  # which a logarithmic axis cannot show
    reports = [
        replace(report, interface=replace(report.interface, special=special))
        for report in (baseline, ours)
    ]
    figure, _ = interface(shown(reports[1], reports[0]))
    (axes,) = figure.axes
    labels = [label.get_text() for label in axes.get_yticklabels()]
    drawn = {}
    for bar in axes.containers:
        (mean,), (place,) = bar.lines[0].get_data()
        (low, _), (high, _) = bar.lines[2][0].get_segments()[0]
        drawn[place] = [mean, (high - low) / 2]
    places = iter(sorted(drawn))  # of a stage, the baseline's is above
    for row, label in enumerate(labels):
        (stage,) = (stage for stage, (_, name) in STAGES.items() if name == label)
        for number, report in enumerate(reports):
            moments = getattr(report.interface, stage)
            if moments:
                place = next(places)
                assert place - row == pytest.approx((-0.17, 0.17)[number])  # none on another
                assert drawn[place] == pytest.approx([moments.mean, moments.std])
    assert next(places, None) is None
    assert "special tokens, as received" not in labels and len(labels) == 7
    (text,) = (line for line in axes.lines if line.get_linestyle() == ":")
    assert list(text.get_xdata()) == [ours.interface.vocabulary.mean] * 2
    assert axes.get_xscale() == "log" and axes.get_ylim()[0] > axes.get_ylim()[1]


def test_the_interface_leaves_out_what_a_logarithm_or_a_model_lacks():
    ours = diagnosed(1.02, "layer_norm", "ours")
    baseline = diagnosed(model="base")
    changes = {"special": Moments(2.0, math.nan, 4), "vocabulary": Moments(2.0, 0.1, 9)}
    ours = replace(ours, interface=replace(ours.interface, **changes))
    baseline = replace(baseline, interface=replace(baseline.interface, special=None))
    (axes,) = interface(shown(ours, baseline))[0].axes
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert "special tokens, as received" not in labels
    (text,) = (line for line in axes.lines if line.get_linestyle() == ":")
    assert list(text.get_xdata()) == [2.0, 2.0]  # N_text of the model, not of its baseline
    unknown = replace(ours, interface=replace(ours.interface, vocabulary=None, ratio=None))
    (axes,) = interface(shown(unknown, None))[0].axes
    assert not [line for line in axes.lines if line.get_linestyle() == ":"]


def test_dynamics_of_the_baseline_alone_are_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(Figure, "savefig", lambda figure, file, **options: None)
    drawings = draw(diagnosed(dynamics=[], attention=[]), diagnosed(attention=[]), tmp_path)
    assert [drawing.file for drawing in drawings][4:] == ["dynamics.png"]


def test_dynamics_of_a_single_step_have_a_scale():
    steps = [DynamicsStep(5, [0.1, 0.2], [0.5, 0.6])]
    figure, _ = dynamics(shown(diagnosed(dynamics=steps), None))
    assert figure.axes[-1].get_ylim() == (5.0, 6.0)


@pytest.mark.parametrize("grid", [(3, 4), None])
def test_maps_without_a_grid_are_stretched_and_told_so(images, grid):
    asked = attention_of("Where?", 5, grid, "image.png")
    ((figure, drawing),) = attention(shown(diagnosed(attention=[asked]), None), images)
    assert (figure.axes[1].get_aspect() == "auto") == (grid is None)
    assert ("in order" in drawing.caption) == (grid is None)


def test_titles_have_the_ratio_of_what_is_drawn():
    models = shown(diagnosed(1.02, "layer_norm", "ours"), diagnosed(model="base"))
    ratios = {
        interface: (1.02, 37.0),
        norms: (1.02 * 1.08 / 1.234, 37.0 * 1.08 / 1.234),
        rotation: [model.report.depth.asymmetry for model in reversed(models)],
    }
    for sketch, (ours, base) in ratios.items():
        title = " ".join(sketch(models)[0].get_suptitle().split())
        assert [float(ratio) for ratio in re.findall(r"([\d.]+) ×", title)] == [
            pytest.approx(ours, rel=0.005),
            pytest.approx(base, rel=0.005),
        ]
    means = [np.mean(models[1].report.depth.cosine[kind].mean) for kind in ("visual", "text")]
    title = cosine(models)[0].get_suptitle()
    assert f"{means[0]:.3f} for visual" in title and f"{means[1]:.3f} for text" in title


def test_dynamics_show_each_step_of_the_models_that_recorded_them():
    steps = [DynamicsStep(step, [0.1 * step, 0.2, 0.3], [0.5, 0.6, 0.7]) for step in (1, 2, 4)]
    models = shown(diagnosed(model="ours", dynamics=steps), diagnosed(dynamics=[]))
    figure, _ = dynamics(models)
    panels = {axes.get_title(loc="left"): axes for axes in figure.axes[:-1]}  # and a colour bar
    assert list(panels) == ["visual, ours", "text, ours"]
    for kind, axes in zip(("visual", "text"), panels.values(), strict=True):
        assert [list(line.get_xdata()) for line in axes.lines] == [[1, 2, 3]] * 3
        assert [list(line.get_ydata()) for line in axes.lines] == [
            getattr(step, kind) for step in steps
        ]
        assert len({tuple(line.get_color()) for line in axes.lines}) == 3


def test_layers_show_the_reports_numbers():
    ours = diagnosed(1.0, model="same", layers=5)
    baseline = diagnosed(30.0, model="same", layers=7)
    models = shown(ours, baseline)
    sketches = {"norm": (norms, 1), "cosine": (cosine, 1), "rotation": (rotation, 180 / math.pi)}
    for quantity, (sketch, factor) in sketches.items():
        figure, _ = sketch(models)
        (axes,) = figure.axes
        curves = {curve.get_label(): curve for curve in axes.lines}
        first = 0 if quantity == "norm" else 1
        for label, report in (("same", ours), ("same (baseline)", baseline)):
            for kind in ("visual", "text"):
                curve = curves[f"{kind}, {label}"]
                expected = factor * np.array(getattr(report.depth, quantity)[kind].mean)
                np.testing.assert_allclose(curve.get_ydata(), expected, rtol=1e-12)
                assert list(curve.get_xdata()) == list(range(first, first + len(expected)))
                is_baseline = report is baseline
                assert (curve.get_linestyle() == "--") == is_baseline
                assert (curve.get_markerfacecolor() == "white") == is_baseline
        assert (axes.get_yscale() == "log") == (quantity == "norm")
        assert all(tick == round(tick) for tick in axes.get_xticks())  # it counts layers
        if quantity == "rotation":
            assert axes.get_ylim()[0] == 0
        (legend,) = figure.legends
        assert {text.get_text() for text in legend.get_texts()} == set(curves)
        bands = [band.get_paths()[0].vertices for band in axes.collections]
        assert len(bands) == 2  # ours alone
        for kind, band in zip(("visual", "text"), bands, strict=True):
            moments = getattr(ours.depth, "log_norm" if quantity == "norm" else quantity)[kind]
            low, high = (moments.mean[0] + sign * moments.std[0] for sign in (-1, 1))
            ends = [math.exp(low), math.exp(high)] if first == 0 else [factor * low, factor * high]
            at_first = band[np.isclose(band[:, 0], first), 1]
            assert [at_first.min(), at_first.max()] == pytest.approx(ends)


@pytest.mark.parametrize(("size", "heights"), [((10, 1000), (7, 9)), ((1000, 10), (2, 4))])
def test_long_words_and_images_leave_room_for_the_maps(tmp_path, size, heights):
    Image.new("RGB", size).save(tmp_path / "image.png")
    asked = attention_of("why? " * 200, 5, (3, 4), "image.png")
    ((figure, drawing),) = attention(shown(diagnosed(attention=[asked]), None), tmp_path)
    assert heights[0] < figure.get_figheight() < heights[1]
    assert figure.get_suptitle().count("\n") == 3 and len(drawing.caption) < 500
    lines = new_figure(3, "first\n" + "word " * 50).get_suptitle().split("\n")
    assert lines[0] == "first" and max(map(len, lines)) <= 80 < sum(map(len, lines))


def test_attention_maps_are_means_over_layers_on_one_scale(images):
    asked = [attention_of("Where?", 30, (3, 4), "image.png", sharp=sharp) for sharp in (9.0, 2.0)]
    ours, baseline = (diagnosed(attention=[answer]) for answer in asked)
    ((figure, _),) = attention(shown(ours, baseline), images)
    _, *maps, _ = figure.axes
    for axes, report in zip(maps, (baseline, ours), strict=True):
        mean = 100 * np.mean(report.attention[0].maps, axis=0)
        np.testing.assert_allclose(axes.images[-1].get_array(), mean)
    assert len({(axes.images[-1].norm.vmin, axes.images[-1].norm.vmax) for axes in maps}) == 1
    shares = [100 * np.mean(report.attention[0].maps, axis=0) for report in (ours, baseline)]
    brightest = np.quantile(np.ravel(shares), 0.995)
    assert maps[0].images[-1].norm.vmax == pytest.approx(brightest)


def test_each_question_is_drawn_with_its_own_maps(images):
    """The second has no maps of ours, and the baseline was not asked the third."""
    sharps = (1.0, 4.0, 9.0)
    asked = [attention_of(f"{sharp}?", 5, (3, 4), "image.png", sharp=sharp) for sharp in sharps]
    asked[1] = replace(asked[1], maps=[])
    others = [
        attention_of(f"{sharp}?", 5, (3, 4), "image.png", sharp=2 * sharp) for sharp in sharps
    ]
    ours = diagnosed(attention=asked)
    baseline = diagnosed(attention=others[:2])
    first, third = attention(shown(ours, baseline), images)
    assert [drawing.file for _, drawing in (first, third)] == ["attention_1.png", "attention_3.png"]
    assert "1.0?" in first[0].get_suptitle() and "9.0?" in third[1].caption
    for (figure, _), answers in ((first, [others[0], asked[0]]), (third, [asked[2]])):
        maps = [axes.images[-1].get_array() for axes in figure.axes[1:] if axes.images]
        for shares, answer in zip(maps, answers, strict=True):
            np.testing.assert_allclose(shares, 100 * np.mean(answer.maps, axis=0))


def test_names_fit_and_can_be_drawn():
    assert elide("abcde", 5) == "abcde"
    short = elide("0123456789", 7)
    assert len(short) <= 7 and short.startswith("01") and short.endswith("89") and "…" in short
    assert drawable("$5 是\n") == r"\$5 \u662f\n"
    assert drawable("soft\xadhyphen") == r"soft\xadhyphen"  # which the font has
    ours = diagnosed(model="o" * 50)
    baseline = diagnosed(model="是")
    assert [(each.label, each.baseline) for each in shown(ours, baseline)] == [
        (r"\u662f (baseline)", True),
        (elide("o" * 50, 30), False),
    ]
    assert [each.baseline for each in shown(ours, None)] == [False]


@pytest.mark.parametrize(
    ("ratios", "title"),
    [
        ([1.02], "at 1.02 ×"),
        ([37.0, 1.02], "at 1.02 × (baseline 37.0 ×)"),
        ([None, 1.02], "at 1.02 ×"),
        ([37.0, None], "Norms"),
    ],
)
def test_a_title_has_the_ratios_that_there_are(ratios, title):
    assert ratio_title(ratios, "at {}", "Norms") == title


def test_a_logarithmic_axis_has_ticks_between_powers_of_ten_if_it_is_short():
    for largest, expected in ((80.0, {1, 2, 5, 10, 20, 50}), (1e5, {1, 10, 100, 1000, 10000, 1e5})):
        axes = new_figure(3, "Norms").subplots()
        axes.plot([1, 2], [1, largest])
        log_scale(axes, "y")
        axes.set_ylim(0.9, 1.1 * largest)
        ticks = {round(tick, 6) for tick in axes.get_yticks() if 0.9 <= tick <= 1.1 * largest}
        assert ticks == expected
        assert (axes.get_xscale(), axes.get_yscale()) == ("linear", "log")


@pytest.mark.parametrize("kind", ["clip", "dinov2", "siglip"])
def test_the_image_is_shown_as_the_model_received_it(kind):
    image = Image.linear_gradient("L").rotate(90).resize((32, 16)).convert("RGB")
    whole = image.resize((16, 16), Image.Resampling.BICUBIC)
    cropped = image.crop((8, 0, 24, 16))
    image_processor = tiny_parts.image_processor(kind)
    tokenizer = tiny_parts.tokenizer(extra=("<image>",))
    processor = LlavaProcessor(image_processor, tokenizer, image_token="<image>")
    inputs = image_processor(images=[image], return_tensors="pt")
    expected = np.asarray(whole if kind == "siglip" else cropped).astype(int)
    seen = np.asarray(shown_image(processor, inputs, image)).astype(int)
    assert seen.shape == expected.shape and np.abs(seen - expected).max() <= 3
    for value, shade in ((100.0, 255), (-100.0, 0)):
        extreme = {"pixel_values": torch.full((1, 3, 16, 16), value)}
        assert shown_image(processor, extreme, image).getextrema() == ((shade, shade),) * 3
    pixels = inputs["pixel_values"]
    for several in (torch.cat([pixels, pixels]), pixels[0], pixels[None]):
        assert shown_image(processor, {"pixel_values": several}, image) is image
    for setting in ("do_normalize", "do_rescale"):
        setattr(image_processor, setting, False)  # so that it cannot be told
        assert shown_image(processor, inputs, image) is shown_image(processor, {}, image) is image
        setattr(image_processor, setting, True)


def written(folder, report, against) -> str:
    drawings = []
    for name, size in (("norms", (1125, 450)), ("rotation", (600, 900))):
        Image.new("RGB", size, "white").save(folder / f"{name}.png")
        drawings.append(Drawing(f"{name}.png", name, "By layer (figure 4a).", "depth"))
    write_page(report, against, drawings, folder, provenance={"Data set": "easy-VQA at 1a2b3c"})
    return (folder / "report.html").read_text(encoding="utf-8")


def test_every_number_appears(tmp_path):
    report = diagnosed(1.02, "layer_norm", "with-norm", left_out=["Attention: it takes images."])
    baseline = diagnosed(left_out=["N_text", "Attention: it takes images."])
    text = written(tmp_path, report, baseline)
    cells = set(re.findall(r">([^<>\n]+)<", text))
    norms = {"71.78 ± 13.95", "28.71 ± 16.87", "39.96 ± 45.58", "12.34 ± 5.678", "37.00", "1.020"}
    others = {"0.8927", "2.281", "0.04000", "0.01520", "0.8765", "1000", "2.459", "1,024"}
    assert norms | others | {"Attention: it takes images.", "easy-VQA at 1a2b3c"} <= cells
    said = unescape(text).replace("\u00a0", " ")
    assert all(sentence in said for sentence in verdict(report, baseline))
    for finding in findings(report, baseline):
        assert finding.sentence in said and finding.claim in said
    reasons = re.findall(
        r"<li>([^<]+)</li>", said.partition('id="left-out"')[2].partition("</ul>")[0]
    )
    assert reasons == ["Attention: it takes images.", "N_text"]
    shown = dict(re.findall(r'src="data:image/png;base64,([^"]*)" alt="([^"]*)"', text))
    assert {title: b64decode(encoded) for encoded, title in shown.items()} == {
        name: (tmp_path / f"{name}.png").read_bytes() for name in ("norms", "rotation")
    }


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
