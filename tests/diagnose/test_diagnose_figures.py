# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The figures of a diagnosis: every one is drawn from what the reports hold, and shows their numbers."""

import math
import warnings
from dataclasses import replace

import numpy as np
import pytest
from diagnosed import attention_of, depth_of, diagnosed
from PIL import Image

from normalign_llava.diagnose.figures import draw
from normalign_llava.diagnose.figures.attention import attention_figures
from normalign_llava.diagnose.figures.depth import cosine, norms, rotation, updates
from normalign_llava.diagnose.figures.interface import interface
from normalign_llava.diagnose.figures.style import shown
from normalign_llava.diagnose.report import Interface, Moments, Report


pytestmark = pytest.mark.slow


def asking(model, layers, ratio):
    """Question 1 has a grid and an image, question 2 is of tiles."""
    words = "Which colour is at the left? $5 是"
    asked = [attention_of(words, layers, (3, 4), "image.png", sharp=2.0), attention_of("How many?", layers, None)]
    return diagnosed(ratio, model=model, layers=layers, attention=asked)


def part(model, interface=Interface(), depth=None):  # noqa: B008  (frozen)
    return Report(model, "normalign_llava", "float32", 64, interface=interface, depth=depth)


@pytest.fixture(autouse=True)
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.fixture
def images(tmp_path):
    Image.new("RGB", (80, 60), (200, 30, 30)).save(tmp_path / "image.png")
    return tmp_path


def names(drawings):
    return [drawing.file.removesuffix(".png") for drawing in drawings]


def line(axes, label):
    (found,) = [each for each in axes.lines if each.get_label() == label]
    return found.get_ydata()


def test_everything_is_drawn(images):
    ours, baseline = asking("ours", 30, 1.0), asking("baseline", 30, 30.0)
    drawings = draw(ours, baseline, images)
    expected = ["interface", "norms", "cosine", "rotation", "updates", "dynamics"]
    assert names(drawings) == [*expected, "attention_1", "attention_2", "attention_depth", "predicted"]
    assert {path.name for path in images.iterdir()} == {drawing.file for drawing in drawings} | {"image.png"}
    for drawing in drawings:
        with Image.open(images / drawing.file) as image:
            assert np.asarray(image.convert("L")).std() > 10
    (images / "image.png").unlink()
    with pytest.raises(OSError, match="image.png"):
        draw(ours, None, images)


def test_only_what_was_measured_is_drawn(tmp_path):
    empty, text = part("nothing"), part("text", Interface(vocabulary=Moments(0.8, 0.2, 9)))
    assert draw(empty, None, tmp_path) == []
    assert names(draw(text, None, tmp_path)) == ["interface"]
    assert names(draw(part("encoder", Interface(encoder_output=Moments(59.4, 106.1, 9))), text, tmp_path)) == [
        "interface"
    ]
    without_text = part("without text", depth=depth_of({"visual": 9.0}, 3))
    depth = ["norms", "cosine", "rotation", "updates", "predicted"]
    assert (
        names(draw(without_text, part("baseline", depth=depth_of({"visual": 9.0, "text": 3.0}, 4)), tmp_path)) == depth
    )
    assert names(draw(without_text, empty, tmp_path)) == depth


def test_layers_show_the_reports_numbers():
    ours, baseline = diagnosed(1.0, model="same", layers=5), diagnosed(30.0, model="same", layers=7)
    models = shown(ours, baseline)
    for quantity, sketch, factor in (("norm", norms, 1), ("cosine", cosine, 1), ("rotation", rotation, 180 / math.pi)):
        (axes,) = sketch(models)[0].axes
        for label, report in (("same", ours), ("same (baseline)", baseline)):
            for kind in ("visual", "text"):
                expected = factor * np.array(getattr(report.depth, quantity)[kind].mean)
                np.testing.assert_allclose(line(axes, f"{kind}, {label}"), expected, rtol=1e-12)
    size, angle = updates(models)[0].axes
    np.testing.assert_allclose(line(size, "text, same"), ours.depth.update_norm["text"].mean)
    np.testing.assert_allclose(line(angle, "visual, same (baseline)"), np.degrees(1.7))
    finals = [each.get_ydata()[0] for each in norms(models)[0].axes[0].lines if each.get_linestyle() == "None"]
    assert finals == [55.5] * 4


def test_interface_shows_mean_and_deviation():
    (axes,) = interface(shown(diagnosed(37.0), None))[0].axes
    rows = [label.get_text() for label in axes.get_yticklabels()]
    assert rows[0] == "encoder output" and "text in the data, as stored" not in rows
    dots = {round(dot.get_ydata()[0]): dot.get_xdata()[0] for dot in axes.lines if len(dot.get_xdata()) == 1}
    assert [dots[row] for row in range(len(rows))] == pytest.approx([71.78, 28.71, 39.96, 39.96, 1.234, 1.08, 3.24])
    whiskers = [tuple(whisker.get_xdata()) for whisker in axes.lines if len(whisker.get_xdata()) == 2]
    assert whiskers[0] == pytest.approx((57.83, 85.73))
    left = axes.get_xlim()[0]
    assert whiskers[2] == pytest.approx((left, 85.54)) and left > 0  # the mean less the deviation is negative


def test_attention_maps_share_their_scale(images):
    ours, baseline = (
        diagnosed(layers=30, attention=[attention_of("Where?", 30, (3, 4), "image.png", sharp=sharp)])
        for sharp in (9.0, 2.0)
    )
    first, depth = attention_figures(shown(ours, baseline), images)
    drawn = [axes for axes in first[0].axes if axes.get_title().startswith("layer ")]
    chosen = [0, 3, 5, 8, 11, 13, 16, 18, 21, 24, 26, 29]
    titles = [f"layer {layer + 1}{model}" for model in (", baseline", "") for layer in chosen]
    assert [axes.get_title() for axes in drawn] == titles
    for axes, (report, layer) in zip(drawn, [(r, i) for r in (baseline, ours) for i in chosen], strict=True):
        np.testing.assert_allclose(axes.images[-1].get_array(), 100 * np.array(report.attention[0].maps[layer]))
    assert len({(axes.images[-1].norm.vmin, axes.images[-1].norm.vmax) for axes in drawn}) == 1
    np.testing.assert_allclose(line(depth[0].axes[0], ours.model), 100 * np.array(ours.attention[0].image_share))


def test_layers_that_were_left_out_keep_their_numbers(tmp_path):
    answer = replace(attention_of("Where?", 3), layers=[2, 5, 9])
    tiled = replace(attention_of("When?", 3, None), layers=[2, 5, 9])
    report = diagnosed(layers=9, attention=[answer, tiled])
    *maps, depth = (figure for figure, _ in attention_figures(shown(report, None), tmp_path))
    for figure in maps:
        titles = [axes.get_title() for axes in figure.axes]
        assert [title for title in titles if title.startswith("layer")] == ["layer 2", "layer 5", "layer 9"]
    assert all(axes.lines[0].get_xdata().tolist() == [2, 5, 9] for axes in depth.axes)
