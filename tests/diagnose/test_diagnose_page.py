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
    drawable,
    dynamics,
    elide,
    interface,
    log_scale,
    new_figure,
    norms,
    ratio_title,
    rotation,
    shown,
)
from normalign_llava.diagnose.findings import findings, verdict
from normalign_llava.diagnose.page import write_page
from normalign_llava.diagnose.report import Attention, Drawing, DynamicsStep, Moments
from normalign_llava.diagnose.run import shown_image


pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("error")]

HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(2)>'


@pytest.fixture
def image_folder(tmp_path):
    Image.new("RGB", (80, 60), (200, 30, 30)).save(tmp_path / "image.png")
    return tmp_path


def with_interface(report, **changes):
    return replace(report, interface=replace(report.interface, **changes))


def only_axes(drawn):
    """The axes of a drawn figure that has one of them."""
    figure, _ = drawn
    (axes,) = figure.axes
    return axes


def file_names(drawings):
    return [drawing.file for drawing in drawings]


def mean_shares(answer):
    """The mean of an answer's attention maps over layers, in percent."""
    return 100 * np.mean(answer.maps, axis=0)


def dotted_lines(axes):
    return [drawn_line for drawn_line in axes.lines if drawn_line.get_linestyle() == ":"]


def test_what_was_measured_is_drawn(image_folder):
    answers = [
        attention_of("$5 是", 30, (3, 4), "image.png"),
        attention_of("Many?", 30, None, "image.png"),
    ]
    report = diagnosed(1.0, layers=30, attention=answers)
    baseline = diagnosed(30.0, layers=30, attention=answers)
    drawings = draw(report, baseline, image_folder)

    assert file_names(drawings) == [
        "interface.png",
        "norms.png",
        "cosine.png",
        "rotation.png",
        "dynamics.png",
        "attention_1.png",
        "attention_2.png",
    ]
    written_names = {path.name for path in image_folder.iterdir()}
    assert written_names == {"image.png", *file_names(drawings)}
    for drawing in drawings:
        with Image.open(image_folder / drawing.file) as image:
            assert np.asarray(image.convert("L")).std() > 10


def test_what_was_not_measured_is_not_drawn(image_folder):
    drawings = draw(diagnosed(dynamics=[], attention=[]), None, image_folder)
    assert file_names(drawings) == ["interface.png", "norms.png", "cosine.png", "rotation.png"]


def test_kinds_of_token_that_do_not_occur_are_not_drawn():
    report = diagnosed(layers=5)
    visual_norms = {"visual": report.depth.norm["visual"]}
    visual_report = replace(report, depth=replace(report.depth, norm=visual_norms))
    models = shown(visual_report, None)
    for draw_figure in (norms, cosine, rotation):
        axes = only_axes(draw_figure(models))
        assert [curve.get_label() for curve in axes.lines] == ["visual, llava-baseline"]


def error_bars(axes):
    """Mean and deviation of each bar by its height in the figure."""
    bars = {}
    for container in axes.containers:
        data_line, _, deviation_lines = container.lines
        (mean,), (height,) = data_line.get_data()
        ((low, _), (high, _)) = deviation_lines[0].get_segments()[0]
        bars[height] = [mean, (high - low) / 2]
    return bars


def test_the_interface_shows_mean_and_deviation_of_each_stage_that_a_model_has():
    # A logarithmic axis cannot show a mean of zero.
    zero = Moments(0.0, 0.0, 4)
    report = with_interface(diagnosed(1.02, "layer_norm", "ours"), special=zero)
    baseline = with_interface(diagnosed(model="base"), special=zero)
    axes = only_axes(interface(shown(report, baseline)))
    labels = [label.get_text() for label in axes.get_yticklabels()]

    stage_of_label = {label: stage for stage, (_, label) in STAGES.items()}
    assert len(stage_of_label) == len(STAGES)
    expected_heights = []
    expected_bars = []
    for stage_row, label in enumerate(labels):
        stage = stage_of_label[label]
        # The baseline's bar is above the model's, and none lies on another.
        for offset, drawn_report in ((-0.17, baseline), (0.17, report)):
            moments = getattr(drawn_report.interface, stage)
            if moments:
                expected_heights.append(stage_row + offset)
                expected_bars.append([moments.mean, moments.std])
    bars = error_bars(axes)
    heights = sorted(bars)
    assert heights == pytest.approx(expected_heights)
    for height, expected_bar in zip(heights, expected_bars, strict=True):
        assert bars[height] == pytest.approx(expected_bar)

    assert "special tokens, as received" not in labels
    assert len(labels) == 7


def test_the_interface_has_a_logarithmic_axis_with_a_line_at_n_text():
    report = diagnosed(1.02, "layer_norm", "ours")
    axes = only_axes(interface(shown(report, diagnosed(model="base"))))
    (drawn_line,) = dotted_lines(axes)
    assert list(drawn_line.get_xdata()) == [report.interface.vocabulary.mean] * 2
    assert axes.get_xscale() == "log"
    first_end, second_end = axes.get_ylim()
    assert first_end > second_end


def test_the_interface_leaves_out_what_a_logarithm_or_a_model_lacks():
    report = with_interface(
        diagnosed(1.02, "layer_norm", "ours"),
        special=Moments(2.0, math.nan, 4),
        vocabulary=Moments(2.0, 0.1, 9),
    )
    baseline = with_interface(diagnosed(model="base"), special=None)
    axes = only_axes(interface(shown(report, baseline)))
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert "special tokens, as received" not in labels
    # N_text of the model, not of its baseline.
    (drawn_line,) = dotted_lines(axes)
    assert list(drawn_line.get_xdata()) == [2.0, 2.0]


def test_the_interface_has_no_line_if_n_text_is_not_known():
    report = with_interface(diagnosed(1.02, "layer_norm", "ours"), vocabulary=None, ratio=None)
    axes = only_axes(interface(shown(report, None)))
    assert dotted_lines(axes) == []


def test_dynamics_of_only_the_baseline_are_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(Figure, "savefig", lambda figure, file, **options: None)
    drawings = draw(diagnosed(dynamics=[], attention=[]), diagnosed(attention=[]), tmp_path)
    assert file_names(drawings)[4:] == ["dynamics.png"]


def test_dynamics_of_a_single_step_have_a_scale():
    steps = [DynamicsStep(5, [0.1, 0.2], [0.5, 0.6])]
    figure, _ = dynamics(shown(diagnosed(dynamics=steps), None))
    assert figure.axes[-1].get_ylim() == (5.0, 6.0)


@pytest.mark.parametrize("grid", [(3, 4), None])
def test_maps_without_a_grid_are_stretched_and_told_so(image_folder, grid):
    answer = attention_of("Where?", 5, grid, "image.png")
    models = shown(diagnosed(attention=[answer]), None)
    ((figure, drawing),) = attention(models, image_folder)
    is_stretched = figure.axes[1].get_aspect() == "auto"
    assert is_stretched == (grid is None)
    is_told = "in order" in drawing.caption
    assert is_told == (grid is None)


@pytest.mark.parametrize(
    ("draw_figure", "expected"),
    [
        pytest.param(interface, [1.02, 37.0], id="interface"),
        pytest.param(norms, [1.02 * 1.08 / 1.234, 37.0 * 1.08 / 1.234], id="norms"),
    ],
)
def test_titles_have_the_ratio_of_norms_that_are_drawn(draw_figure, expected):
    models = shown(diagnosed(1.02, "layer_norm", "ours"), diagnosed(model="base"))
    assert ratios_in_title(draw_figure(models)) == pytest.approx(expected, rel=0.005)


def test_the_title_of_rotation_has_the_asymmetry():
    models = shown(diagnosed(1.02, "layer_norm", "ours"), diagnosed(model="base"))
    baseline_model, model = models
    expected = [model.report.depth.asymmetry, baseline_model.report.depth.asymmetry]
    assert ratios_in_title(rotation(models)) == pytest.approx(expected, rel=0.005)


def ratios_in_title(drawn):
    figure, _ = drawn
    title = " ".join(figure.get_suptitle().split())
    return [float(ratio_text) for ratio_text in re.findall(r"([\d.]+) ×", title)]


def test_the_title_of_cosine_has_the_means_of_the_model():
    models = shown(diagnosed(1.02, "layer_norm", "ours"), diagnosed(model="base"))
    curves = models[1].report.depth.cosine
    figure, _ = cosine(models)
    title = figure.get_suptitle()
    assert f"{np.mean(curves['visual'].mean):.3f} for visual" in title
    assert f"{np.mean(curves['text'].mean):.3f} for text" in title


def test_dynamics_show_each_step_of_the_models_that_recorded_them():
    steps = []
    for step in (1, 2, 4):
        steps.append(DynamicsStep(step, [0.1 * step, 0.2, 0.3], [0.5, 0.6, 0.7]))
    models = shown(diagnosed(model="ours", dynamics=steps), diagnosed(dynamics=[]))
    figure, _ = dynamics(models)

    # The last axes are of the colour bar.
    visual_axes, text_axes = figure.axes[:-1]
    assert visual_axes.get_title(loc="left") == "visual, ours"
    assert text_axes.get_title(loc="left") == "text, ours"
    check_lines_of_steps(visual_axes, [step.visual for step in steps])
    check_lines_of_steps(text_axes, [step.text for step in steps])


def check_lines_of_steps(axes, expected):
    assert [list(drawn_line.get_xdata()) for drawn_line in axes.lines] == [[1, 2, 3]] * 3
    assert [list(drawn_line.get_ydata()) for drawn_line in axes.lines] == expected
    colours = {tuple(drawn_line.get_color()) for drawn_line in axes.lines}
    assert len(colours) == 3


DEPTH_FIGURES = {
    "norm": norms,
    "cosine": cosine,
    "rotation": rotation,
}


@pytest.fixture(params=DEPTH_FIGURES)
def depth_figure(request):
    """A figure by layer: its quantity, its axes, and the reports of the model and its baseline."""
    report = diagnosed(1.0, model="same", layers=5)
    baseline = diagnosed(30.0, model="same", layers=7)
    axes = only_axes(DEPTH_FIGURES[request.param](shown(report, baseline)))
    return request.param, axes, report, baseline


def unit(quantity):
    """Rotations are stored in radians and drawn in degrees."""
    if quantity == "rotation":
        return 180 / math.pi
    return 1


def first_layer(quantity):
    """Norms start before the first layer."""
    if quantity == "norm":
        return 0
    return 1


def test_layers_show_the_reports_numbers(depth_figure):
    quantity, axes, report, baseline = depth_figure
    curves = {curve.get_label(): curve for curve in axes.lines}
    for kind in ("visual", "text"):
        report_curve = curves[f"{kind}, same"]
        check_curve(report_curve, quantity, getattr(report.depth, quantity)[kind])
        assert report_curve.get_linestyle() != "--"
        assert report_curve.get_markerfacecolor() != "white"

        baseline_curve = curves[f"{kind}, same (baseline)"]
        check_curve(baseline_curve, quantity, getattr(baseline.depth, quantity)[kind])
        assert baseline_curve.get_linestyle() == "--"
        assert baseline_curve.get_markerfacecolor() == "white"


def check_curve(curve, quantity, expected):
    expected_heights = unit(quantity) * np.array(expected.mean)
    np.testing.assert_allclose(curve.get_ydata(), expected_heights, rtol=1e-12)
    first = first_layer(quantity)
    expected_layers = list(range(first, first + len(expected_heights)))
    assert list(curve.get_xdata()) == expected_layers


def test_axes_by_layer_count_layers(depth_figure):
    _, axes, _, _ = depth_figure
    for tick in axes.get_xticks():
        assert tick == round(tick)


def test_only_norms_have_a_logarithmic_axis(depth_figure):
    quantity, axes, _, _ = depth_figure
    is_logarithmic = axes.get_yscale() == "log"
    assert is_logarithmic == (quantity == "norm")


def test_rotation_starts_at_zero():
    axes = only_axes(rotation(shown(diagnosed(1.0, layers=5), diagnosed(30.0, layers=7))))
    assert axes.get_ylim()[0] == 0


def test_figures_by_layer_have_one_legend_of_all_curves(depth_figure):
    _, axes, _, _ = depth_figure
    (legend,) = axes.figure.legends
    legend_texts = {text.get_text() for text in legend.get_texts()}
    assert legend_texts == {curve.get_label() for curve in axes.lines}


def test_bands_show_the_deviation_of_only_the_model(depth_figure):
    quantity, axes, report, _ = depth_figure
    visual_band, text_band = [band.get_paths()[0].vertices for band in axes.collections]
    for kind, band in (("visual", visual_band), ("text", text_band)):
        at_first_layer = np.isclose(band[:, 0], first_layer(quantity))
        ends = band[at_first_layer, 1]
        expected = band_at_first_layer(report.depth, quantity, kind)
        assert [ends.min(), ends.max()] == pytest.approx(expected)


def band_at_first_layer(depth, quantity, kind):
    if quantity == "norm":
        curve = depth.log_norm[kind]
        low = curve.mean[0] - curve.std[0]
        high = curve.mean[0] + curve.std[0]
        return [math.exp(low), math.exp(high)]
    curve = getattr(depth, quantity)[kind]
    low = curve.mean[0] - curve.std[0]
    high = curve.mean[0] + curve.std[0]
    return [unit(quantity) * low, unit(quantity) * high]


@pytest.mark.parametrize(
    ("size", "lowest", "highest"),
    [
        pytest.param((10, 1000), 7, 9, id="tall"),
        pytest.param((1000, 10), 2, 4, id="wide"),
    ],
)
def test_long_words_and_images_leave_room_for_the_maps(tmp_path, size, lowest, highest):
    Image.new("RGB", size).save(tmp_path / "image.png")
    answer = attention_of("why? " * 200, 5, (3, 4), "image.png")
    ((figure, drawing),) = attention(shown(diagnosed(attention=[answer]), None), tmp_path)
    assert lowest < figure.get_figheight() < highest
    assert figure.get_suptitle().count("\n") == 3
    assert len(drawing.caption) < 500


def test_a_long_title_is_wrapped_and_keeps_its_lines():
    figure = new_figure(3, "first\n" + "word " * 50)
    lines = figure.get_suptitle().split("\n")
    lengths = [len(line) for line in lines]
    assert lines[0] == "first"
    assert max(lengths) <= 80 < sum(lengths)


def test_attention_maps_are_means_over_layers_on_one_scale(image_folder):
    answer = attention_of("Where?", 30, (3, 4), "image.png", sharp=9.0)
    baseline_answer = attention_of("Where?", 30, (3, 4), "image.png", sharp=2.0)
    models = shown(diagnosed(attention=[answer]), diagnosed(attention=[baseline_answer]))
    ((figure, _),) = attention(models, image_folder)
    _, baseline_axes, axes, _ = figure.axes
    baseline_map = baseline_axes.images[-1]
    model_map = axes.images[-1]

    np.testing.assert_allclose(baseline_map.get_array(), mean_shares(baseline_answer))
    np.testing.assert_allclose(model_map.get_array(), mean_shares(answer))
    assert model_map.norm.vmin == baseline_map.norm.vmin
    assert model_map.norm.vmax == baseline_map.norm.vmax
    all_shares = np.ravel([mean_shares(answer), mean_shares(baseline_answer)])
    assert baseline_map.norm.vmax == pytest.approx(np.quantile(all_shares, 0.995))


def test_each_question_is_drawn_with_its_own_maps(image_folder):
    """The second has no maps of the model, and the baseline was not asked the third."""

    def answer_to(question, sharp):
        return attention_of(question, 5, (3, 4), "image.png", sharp=sharp)

    first_answer = answer_to("1.0?", sharp=1.0)
    second_answer = replace(answer_to("4.0?", sharp=4.0), maps=[])
    third_answer = answer_to("9.0?", sharp=9.0)
    report = diagnosed(attention=[first_answer, second_answer, third_answer])
    first_of_baseline = answer_to("1.0?", sharp=2.0)
    second_of_baseline = answer_to("4.0?", sharp=8.0)
    baseline = diagnosed(attention=[first_of_baseline, second_of_baseline])

    first, third = attention(shown(report, baseline), image_folder)
    first_figure, first_drawing = first
    third_figure, third_drawing = third
    assert first_drawing.file == "attention_1.png"
    assert third_drawing.file == "attention_3.png"
    assert "1.0?" in first_figure.get_suptitle()
    assert "9.0?" in third_drawing.caption
    check_maps(first_figure, [first_of_baseline, first_answer])
    check_maps(third_figure, [third_answer])


def check_maps(figure, answers):
    map_axes = [axes for axes in figure.axes[1:] if axes.images]
    for axes, answer in zip(map_axes, answers, strict=True):
        np.testing.assert_allclose(axes.images[-1].get_array(), mean_shares(answer))


def test_a_long_name_keeps_its_ends():
    assert elide("abcde", 5) == "abcde"
    short_name = elide("0123456789", 7)
    assert len(short_name) <= 7
    assert short_name.startswith("01")
    assert short_name.endswith("89")
    assert "…" in short_name


def test_characters_that_the_font_lacks_are_escaped():
    assert drawable("$5 是\n") == r"\$5 \u662f\n"
    assert drawable("soft\xadhyphen") == r"soft\xadhyphen"


def test_the_baseline_is_drawn_first_and_labels_fit():
    baseline_model, model = shown(diagnosed(model="o" * 50), diagnosed(model="是"))
    assert baseline_model.label == r"\u662f (baseline)"
    assert baseline_model.baseline is True
    assert model.label == elide("o" * 50, 30)
    assert model.baseline is False


def test_a_model_without_a_baseline_is_drawn_by_itself():
    (model,) = shown(diagnosed(model="o" * 50), None)
    assert model.baseline is False


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


@pytest.mark.parametrize(
    ("largest", "expected"),
    [
        pytest.param(80.0, {1, 2, 5, 10, 20, 50}, id="short"),
        pytest.param(1e5, {1, 10, 100, 1000, 10000, 1e5}, id="long"),
    ],
)
def test_a_logarithmic_axis_has_ticks_between_powers_of_ten_if_it_is_short(largest, expected):
    axes = new_figure(3, "Norms").subplots()
    axes.plot([1, 2], [1, largest])
    log_scale(axes, "y")
    axes.set_ylim(0.9, 1.1 * largest)
    ticks = set()
    for tick in axes.get_yticks():
        if 0.9 <= tick <= 1.1 * largest:
            ticks.add(round(tick, 6))
    assert ticks == expected
    assert axes.get_xscale() == "linear"
    assert axes.get_yscale() == "log"


@pytest.fixture
def gradient():
    image = Image.linear_gradient("L").rotate(90)
    return image.resize((32, 16)).convert("RGB")


def make_processor(kind):
    tokenizer = tiny_parts.tokenizer(extra=("<image>",))
    image_processor = tiny_parts.image_processor(kind)
    return LlavaProcessor(image_processor, tokenizer, image_token="<image>")


@pytest.mark.parametrize(
    ("kind", "is_cropped"),
    [
        ("clip", True),
        ("dinov2", True),
        ("siglip", False),
    ],
)
def test_the_image_is_shown_as_the_model_received_it(gradient, kind, is_cropped):
    expected_image = gradient.resize((16, 16), Image.Resampling.BICUBIC)
    if is_cropped:
        expected_image = gradient.crop((8, 0, 24, 16))
    processor = make_processor(kind)
    inputs = processor.image_processor(images=[gradient], return_tensors="pt")
    received_image = shown_image(processor, inputs, gradient)

    expected = np.asarray(expected_image).astype(int)
    received = np.asarray(received_image).astype(int)
    assert received.shape == expected.shape
    assert np.abs(received - expected).max() <= 3


@pytest.mark.parametrize(("value", "shade"), [(100.0, 255), (-100.0, 0)])
@pytest.mark.parametrize("kind", ["clip", "dinov2", "siglip"])
def test_pixels_beyond_white_and_black_are_shown_as_white_and_black(gradient, kind, value, shade):
    inputs = {"pixel_values": torch.full((1, 3, 16, 16), value)}
    received_image = shown_image(make_processor(kind), inputs, gradient)
    assert received_image.getextrema() == ((shade, shade),) * 3


@pytest.mark.parametrize("kind", ["clip", "dinov2", "siglip"])
def test_of_inputs_that_are_not_one_image_the_given_image_is_shown(gradient, kind):
    processor = make_processor(kind)
    inputs = processor.image_processor(images=[gradient], return_tensors="pt")
    pixel_values = inputs["pixel_values"]
    two_images = torch.cat([pixel_values, pixel_values])
    without_batch = pixel_values[0]
    tiles = pixel_values[None]
    for other_values in (two_images, without_batch, tiles):
        other_inputs = {"pixel_values": other_values}
        assert shown_image(processor, other_inputs, gradient) is gradient
    assert shown_image(processor, {}, gradient) is gradient


@pytest.mark.parametrize("setting", ["do_normalize", "do_rescale"])
@pytest.mark.parametrize("kind", ["clip", "dinov2", "siglip"])
def test_of_a_processor_whose_scale_is_not_known_the_given_image_is_shown(gradient, kind, setting):
    processor = make_processor(kind)
    inputs = processor.image_processor(images=[gradient], return_tensors="pt")
    setattr(processor.image_processor, setting, False)
    assert shown_image(processor, inputs, gradient) is gradient
    assert shown_image(processor, {}, gradient) is gradient


def write_report(folder, report, baseline) -> str:
    """Writes a page with two figures, and returns its text."""
    Image.new("RGB", (1125, 450), "white").save(folder / "norms.png")
    Image.new("RGB", (600, 900), "white").save(folder / "rotation.png")
    drawings = [
        Drawing("norms.png", "norms", "By layer (figure 4a).", "depth"),
        Drawing("rotation.png", "rotation", "By layer (figure 4a).", "depth"),
    ]
    provenance = {"Data set": "easy-VQA at 1a2b3c"}
    write_page(report, baseline, drawings, folder, provenance=provenance)
    return (folder / "report.html").read_text(encoding="utf-8")


@pytest.fixture
def compared_reports():
    report = diagnosed(1.02, "layer_norm", "with-norm", left_out=["Attention: it takes images."])
    baseline = diagnosed(left_out=["N_text", "Attention: it takes images."])
    return report, baseline


def test_every_number_appears(tmp_path, compared_reports):
    page_text = write_report(tmp_path, *compared_reports)
    cells = set(re.findall(r">([^<>\n]+)<", page_text))
    assert {
        "71.78 ± 13.95",
        "28.71 ± 16.87",
        "39.96 ± 45.58",
        "12.34 ± 5.678",
        "37.00",
        "1.020",
    } <= cells
    assert {
        "0.8927",
        "2.281",
        "0.04000",
        "0.01520",
        "0.8765",
        "1000",
        "2.459",
        "1,024",
    } <= cells
    assert "Attention: it takes images." in cells
    assert "easy-VQA at 1a2b3c" in cells


def test_every_sentence_of_verdict_and_findings_appears(tmp_path, compared_reports):
    report, baseline = compared_reports
    page_text = unescape(write_report(tmp_path, report, baseline)).replace("\u00a0", " ")
    for sentence in verdict(report, baseline):
        assert sentence in page_text
    for finding in findings(report, baseline):
        assert finding.sentence in page_text
        assert finding.claim in page_text


def test_what_was_left_out_appears_once(tmp_path, compared_reports):
    page_text = write_report(tmp_path, *compared_reports)
    _, _, after_heading = page_text.partition('id="left-out"')
    section, _, _ = after_heading.partition("</ul>")
    reasons = re.findall(r"<li>([^<]+)</li>", section)
    assert reasons == ["Attention: it takes images.", "N_text"]


def test_every_figure_is_within_the_page(tmp_path, compared_reports):
    page_text = write_report(tmp_path, *compared_reports)
    encoded_figures = re.findall(r'src="data:image/png;base64,([^"]*)" alt="([^"]*)"', page_text)
    figures = {title: b64decode(encoded) for encoded, title in encoded_figures}
    assert figures == {
        "norms": (tmp_path / "norms.png").read_bytes(),
        "rotation": (tmp_path / "rotation.png").read_bytes(),
    }


LONG_WORD = "x" * 150


def write_hostile_report(folder):
    answer = Attention(HOSTILE + LONG_WORD, None, None, [[[0.5, 0.5]]], [0.2], [0.9], None, [1])
    report = diagnosed(
        1.0,
        "layer_norm",
        HOSTILE,
        embeddings=embeddings_of(LONG_WORD, [(7, HOSTILE, 2.5), (8, LONG_WORD, 2.0)]),
        attention=[answer],
        left_out=[HOSTILE],
        data=LONG_WORD,
    )
    baseline = diagnosed(model=LONG_WORD, projector=LONG_WORD)
    return write_report(folder, report, baseline)


def test_the_page_escapes_text_of_data(tmp_path):
    page_text = write_hostile_report(tmp_path)
    assert HOSTILE not in page_text
    assert page_text.count("&lt;script&gt;") >= 2


def test_the_page_refers_to_nothing_outside(tmp_path):
    page_text = write_hostile_report(tmp_path)
    assert "default-src 'none'; img-src data:; style-src 'unsafe-inline'" in page_text
    assert str(tmp_path) not in page_text
    element_ids = re.findall(r' id="([^"]*)"', page_text)
    for link in re.findall(r' href="([^"]*)"', page_text):
        assert link.removeprefix("#") in {"data:,", *element_ids}
    for source in re.findall(r' src="([^"]*)"', page_text):
        assert source.startswith("data:image/png;base64,iVBOR")


def test_in_a_browser_it_loads_nothing_from_outside_and_runs_no_text_of_data(tmp_path):
    write_hostile_report(tmp_path)
    address = (tmp_path / "report.html").as_uri()
    with chromium(tmp_path / "profile") as browser:
        for width, dark in ((1280, False), (390, False), (390, True)):
            browser_page = load(browser, address, width, dark=dark)
            assert browser_page.console == []
            assert browser_page.failed == []
            assert browser_page.undecoded == []
            assert browser_page.requests == [address]
            assert browser_page.inner_width == width
            assert browser_page.scroll_width <= browser_page.client_width
