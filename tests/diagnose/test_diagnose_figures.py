# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The figures of a diagnosis: every one is drawn from what the reports hold, and shows their numbers."""

import math
import warnings
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from normalign_llava.diagnose.figures.attention import attention_figures
from normalign_llava.diagnose.figures.depth import cosine, norms, predicted, rotation, updates
from normalign_llava.diagnose.figures.draw import draw
from normalign_llava.diagnose.figures.dynamics import dynamics, training
from normalign_llava.diagnose.figures.interface import embeddings, interface, paper_interface
from normalign_llava.diagnose.figures.style import number, printable, shown
from normalign_llava.diagnose.report import (
    Attention,
    Curve,
    Depth,
    DynamicsStep,
    EmbeddingTable,
    Interface,
    Moments,
    Report,
    TopToken,
)


pytestmark = pytest.mark.slow


def curve(values, spread=0.1):
    return Curve(mean=[float(value) for value in values], std=[float(spread * abs(value)) for value in values])


def depth_of(layers, visual_norm, kinds=("visual", "text")):
    """States that grow from `visual_norm` (text: 3), with updates of size 2 at 90 degrees that turn them."""
    start = {"visual": visual_norm, "text": 3.0}
    states = {kind: start[kind] + 4 * np.arange(layers + 1) ** 1.3 for kind in kinds}
    turns = {kind: np.arctan2(2 + 0.1 * np.arange(layers), states[kind][:-1]) for kind in kinds}
    both = {*kinds} == {"visual", "text"}
    return Depth(
        norm={kind: curve(states[kind], 0.3) for kind in kinds},
        final_norm={kind: Moments(30.0 + len(kind), 4.0, 10) for kind in kinds},
        cosine={kind: curve(np.cos(turns[kind]), 0.02) for kind in kinds},
        rotation={kind: curve(turns[kind]) for kind in kinds},
        update_norm={kind: curve(2 + 0.1 * np.arange(layers)) for kind in kinds},
        update_angle={kind: curve(np.full(layers, math.pi / 2)) for kind in kinds},
        log_norm={kind: Curve(np.log(states[kind]).tolist(), [0.2] * (layers + 1)) for kind in kinds},
        log_update={kind: Curve(np.log(2 + 0.1 * np.arange(layers)).tolist(), [0.1] * layers) for kind in kinds},
        asymmetry=float(turns["visual"][:-1].mean() / turns["text"][:-1].mean()) if both else None,
        asymmetry_error=None,
    )


def attention_of(question, layers, grid, image=None, sharp=2.0):
    rows, columns = grid or (1, 40)
    y, x = np.mgrid[:rows, :columns]
    maps = [np.exp(-sharp * ((y / rows - layer / layers) ** 2 + (x / columns - 0.4) ** 2)) for layer in range(layers)]
    maps = [each / each.sum() for each in maps]
    return Attention(
        question=question,
        image=image,
        grid=grid,
        maps=[each.tolist() for each in maps],
        image_share=[0.1 + 0.3 * layer / layers for layer in range(layers)],
        entropy=[float(-(each * np.log(each)).sum() / math.log(each.size)) for each in maps],
        bottom_bias=None if grid is None else [0.5 + layer / layers for layer in range(layers)],
        layers=list(range(1, layers + 1)),
    )


def report_of(model, layers=6, visual_norm=100.0, **fields):
    interface = Interface(
        encoder_output=Moments(45.0, 6.0, 20),
        projector_input=Moments(44.0, 6.0, 20),
        projector_output=Moments(visual_norm, 1.3 * visual_norm, 20),
        visual=Moments(visual_norm, 1.3 * visual_norm, 20),
        text=Moments(2.8, 0.4, 20),
        special=Moments(2.1, 0.1, 20),
        vocabulary=Moments(3.0, 0.5, 20),
        ratio=visual_norm / 3.0,
    )
    given = {"interface": interface, "depth": depth_of(layers, visual_norm)} | fields
    return Report(model=model, model_type="normalign_llava", dtype="float32", hidden_size=64, **given)


def table_of(model, largest):
    texts = ["áveis", ">();\n\n", "是", "$x$", "<|vision_start|>", None, "\x00", "\\"]
    top = [TopToken(row, text, largest - 0.05 * row) for row, text in enumerate(texts)]
    return EmbeddingTable(model=model, mean=0.8, std=0.18, rows=1000, top=top)


def full_report(model, layers, visual_norm):
    """With everything a report may hold; question 1 has a grid, question 2 is of tiles."""
    return report_of(
        model,
        layers,
        visual_norm,
        embeddings=table_of(f"{model}-language", 1 + visual_norm / 100),
        dynamics=[DynamicsStep(step, [0.9 + step / 1e4] * layers, [0.7] * layers) for step in (0, 50, 200)],
        attention=[
            attention_of("Which colour is at the left? $5 是", layers, (3, 4), "image.png"),
            attention_of("How many?", layers, None),
        ],
    )


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
    return [drawing.file for drawing in drawings]


def line(axes, label):
    (found,) = [each for each in axes.lines if each.get_label() == label]
    return found.get_ydata()


@pytest.mark.parametrize("layers", [2, 30])
@pytest.mark.parametrize("compared", [False, True])
def test_everything_is_drawn(images, layers, compared):
    there = set(images.iterdir())
    baseline = full_report("baseline", layers, 90.0) if compared else None
    drawings = draw(full_report("ours", layers, 3.1), baseline, images)
    expected = ["interface", "paper_interface", "norms", "cosine", "rotation", "updates", "embeddings", "dynamics"]
    expected += ["attention_1", "attention_2", "attention_depth", "predicted"]
    assert names(drawings) == [f"{name}.png" for name in expected]
    assert sorted(path.name for path in set(images.iterdir()) - there) == sorted(
        names(drawings)
    )  # nothing half-written either
    sections = {"interface", "depth", "embeddings", "dynamics", "attention", "theory"}
    assert {drawing.section for drawing in drawings} == sections
    assert all(drawing.title and drawing.caption.endswith((".", "?", "是")) for drawing in drawings)
    for name in names(drawings):
        with Image.open(images / name) as image:
            image.load()
            assert (image.format, image.width) == ("PNG", 1125)
            assert 300 <= image.height <= 2400
            assert np.asarray(image.convert("L")).std() > 10


def test_only_what_was_measured_is_drawn(tmp_path):
    empty = report_of("nothing", interface=Interface(), depth=None)
    assert draw(empty, None, tmp_path) == []
    text = report_of("text", interface=Interface(vocabulary=Moments(0.8, 0.2, 9)), depth=None)
    assert names(draw(text, None, tmp_path)) == ["interface.png", "paper_interface.png"]
    encoder = report_of("encoder", interface=Interface(encoder_output=Moments(59.4, 106.1, 9)), depth=None)
    assert names(draw(encoder, text, tmp_path)) == ["interface.png", "paper_interface.png"]
    blind = report_of("blind", interface=Interface(), depth=depth_of(3, 9.0, kinds=("visual",)))
    depth = ["norms.png", "cosine.png", "rotation.png", "updates.png", "predicted.png"]
    assert names(draw(blind, report_of("baseline", 4), tmp_path))[2:] == depth
    assert names(draw(blind, None, tmp_path)) == depth
    assert names(draw(blind, empty, tmp_path)) == depth


def test_layers_show_the_reports_numbers():
    ours, baseline = report_of("same", 5, 3.1), report_of("same", 7, 90.0)
    models = shown(ours, baseline)
    factor = {"rotation": 180 / math.pi}
    for quantity, sketch in (("norm", norms), ("cosine", cosine), ("rotation", rotation)):
        (axes,) = sketch(models).figure.axes
        for label, report in (("same", ours), ("same (baseline)", baseline)):
            for kind in ("visual", "text"):
                expected = np.array(getattr(report.depth, quantity)[kind].mean) * factor.get(quantity, 1)
                np.testing.assert_allclose(line(axes, f"{kind}, {label}"), expected, rtol=1e-12)
    size, angle = updates(models).figure.axes
    np.testing.assert_allclose(line(size, "text, same"), ours.depth.update_norm["text"].mean)
    np.testing.assert_allclose(line(angle, "visual, same (baseline)"), 90.0)
    finals = [each.get_ydata()[0] for each in norms(models).figure.axes[0].lines if each.get_linestyle() == "None"]
    assert finals == [36.0, 34.0, 36.0, 34.0]


def test_scales_follow_the_range():
    narrow, wide = report_of("narrow", 4, 20.0), report_of("wide", 4, 900.0)
    grown = {kind: curve([1.0, 10.0, 100.0, 1000.0], spread=2.0) for kind in ("visual", "text")}
    logs = {kind: Curve(np.log(grown[kind].mean).tolist(), [0.5] * 4) for kind in grown}
    wide = replace(wide, depth=replace(wide.depth, update_norm=grown, log_update=logs))
    for report, scale in ((narrow, "linear"), (wide, "log")):
        models = shown(report, None)
        for axes in (norms(models).figure.axes[0], updates(models).figure.axes[0]):
            assert axes.get_yscale() == scale
            ends = [float(band.get_paths()[0].vertices[:, 1].min()) for band in axes.collections]
            bottom = axes.get_ylim()[0]
            assert 0 < bottom < min(ends) if scale == "log" else bottom == 0
            if axes.get_ylabel().startswith("L2 norm of the update"):
                first = grown["text"].mean[0] * math.exp(-0.5) if scale == "log" else 2 * math.exp(-0.1)
                np.testing.assert_allclose(ends, first)


def test_predicted_beside_measured():
    report = report_of("ours", 4, 20.0)
    (axes,) = predicted(shown(report, None)).figure.axes
    for kind in ("visual", "text"):
        states = np.array(report.depth.norm[kind].mean[:-1])
        expected = np.degrees(np.arctan2(2 + 0.1 * np.arange(4), states))  # updates of that size at 90 degrees
        np.testing.assert_allclose(line(axes, f"{kind}, predicted"), expected, rtol=1e-9)
        np.testing.assert_allclose(line(axes, f"{kind}, measured"), expected, rtol=1e-9)


def test_interface_shows_mean_and_deviation():
    (axes,) = interface(shown(report_of("ours", visual_norm=100.0), None)).figure.axes
    rows = [label.get_text() for label in axes.get_yticklabels()]
    assert rows[0] == "encoder output" and "text in the data, as stored" not in rows
    dots = {round(dot.get_ydata()[0]): dot.get_xdata()[0] for dot in axes.lines if len(dot.get_xdata()) == 1}
    assert [dots[row] for row in range(len(rows))] == [45.0, 44.0, 100.0, 100.0, 2.8, 3.0, 2.1]
    whiskers = [tuple(whisker.get_xdata()) for whisker in axes.lines if len(whisker.get_xdata()) == 2]
    assert whiskers[0] == (39.0, 51.0)
    left = axes.get_xlim()[0]
    assert whiskers[2] == (left, 230.0) and left > 0  # the mean less the deviation is negative
    assert {"100", "2.8"} <= {text.get_text() for text in axes.texts}


def test_stored_rows_are_shown_where_they_are_scaled():
    scaled = Interface(vocabulary=Moments(64.0, 1.0, 9), vocabulary_raw=Moments(1.0, 0.1, 9), scale=64.0)
    (axes,) = interface(shown(report_of("gemma", interface=scaled, depth=None), None)).figure.axes
    rows = [label.get_text() for label in axes.get_yticklabels()]
    assert rows == ["vocabulary, as received", "vocabulary, as stored"]


def test_beside_the_paper():
    encoders, texts, ratios = paper_interface(shown(report_of("ours", visual_norm=6.0), None)).figure.axes
    labels = [label.get_text() for label in ratios.get_yticklabels()]
    assert labels == ["LLaVA-v1.5", "Qwen-2.5-VL", "KimiVL", "GLM-4.1V", "Ovis2.5", "ours"]
    values = [dot.get_xdata()[0] for dot in ratios.lines if len(dot.get_xdata()) == 1]
    np.testing.assert_allclose(values, [39.96 / 1.08, 56.88 / 0.86, 4.78 / 0.85, 4.58 / 0.8, 64 / 1.38, 2.0])
    assert [dot.get_xdata()[0] for dot in encoders.lines if len(dot.get_xdata()) == 1][0::4] == [29.3, 45.0]
    assert [dot.get_xdata()[0] for dot in texts.lines if len(dot.get_xdata()) == 1] == [0.8, 1.38, 1.09, 3.0]


def test_embeddings_and_their_texts():
    base = report_of("base", embeddings=table_of("base", 1.1))
    left, right = embeddings(shown(report_of("vl", embeddings=table_of("vl", 2.4)), base)).figure.axes
    np.testing.assert_allclose([bar.get_width() for bar in left.patches[1:]], 1.1 - 0.05 * np.arange(8))
    np.testing.assert_allclose([bar.get_width() for bar in right.patches[1:]], 2.4 - 0.05 * np.arange(8))
    texts = [label.get_text() for label in right.get_yticklabels()]
    assert texts[:3] == ["'áveis'", r"'>();\n\n'", r"'\u662f'"]
    assert texts[3:] == [r"'\$x\$'", "'<|vision_start|>'", "#5", r"'\x00'", r"'\\'"]


def test_training_dynamics():
    report, plain = full_report("ours", 4, 3.1), report_of("plain")
    visual, text = dynamics(shown(report, plain)).figure.axes[:2]
    assert [tuple(each.get_ydata()) for each in visual.lines] == [tuple(s.visual) for s in report.dynamics]
    assert [tuple(each.get_ydata()) for each in text.lines] == [tuple(s.text) for s in report.dynamics]
    assert dynamics(shown(plain, None)) is None


def test_the_course_of_training():
    logged = {"norm/visual": [(1, 9.0), (2, 4.0)], "norm/text": [(1, 3.0), (2, 3.0)], "loss": [(1, 1.0)]}
    ours = report_of("ours", training={**logged, "gain/mean_abs": [(1, 0.13), (2, 0.14)]})
    sketch = training(shown(ours, report_of("theirs", training=logged)))
    norms_, gain = sketch.figure.axes
    assert [line.get_ydata().tolist() for line in norms_.lines] == [[9.0, 4.0], [3.0, 3.0]] * 2
    assert [line.get_ydata().tolist() for line in gain.lines] == [[0.13, 0.14]]
    assert [line.get_xdata().tolist() for line in gain.lines] == [[1, 2]]
    assert training(shown(report_of("untrained"), None)) is None


def test_attention_maps_share_their_scale(images):
    ours, baseline = full_report("ours", 30, 3.1), full_report("baseline", 30, 90.0)
    ours = replace(ours, attention=[attention_of(ours.attention[0].question, 30, (3, 4), "image.png", sharp=9.0)])
    first, depth = attention_figures(shown(ours, baseline), images)
    drawn = [axes for axes in first.figure.axes if axes.get_title().startswith("layer ")]
    chosen = [0, 3, 5, 8, 11, 13, 16, 18, 21, 24, 26, 29]
    assert [axes.get_title() for axes in drawn] == [f"layer {layer + 1}" for layer in chosen] * 2
    for axes, (report, layer) in zip(drawn, [(r, i) for r in (baseline, ours) for i in chosen], strict=True):
        np.testing.assert_allclose(axes.images[-1].get_array(), 100 * np.array(report.attention[0].maps[layer]))
    assert len({(axes.images[-1].norm.vmin, axes.images[-1].norm.vmax) for axes in drawn}) == 1
    share = depth.figure.axes[0]
    np.testing.assert_allclose(line(share, "ours"), 100 * np.array(ours.attention[0].image_share))


def test_layers_that_were_left_out_keep_their_numbers(tmp_path):
    answer = replace(attention_of("Where?", 3, (4, 4)), layers=[2, 5, 9])
    report = report_of("hybrid", layers=9, attention=[answer, replace(answer, question="When?")])
    maps, _, depth = (sketch.figure for sketch in attention_figures(shown(report, None), tmp_path))
    titles = [axes.get_title() for part in maps.subfigs[1:] for axes in part.axes]
    assert [title for title in titles if title.startswith("layer")] == ["layer 2", "layer 5", "layer 9"]
    assert all(axes.lines[0].get_xdata().tolist() == [2, 5, 9] for axes in depth.axes)
    tiled = replace(attention_of("Where?", 3, None), layers=[2, 5, 9])
    (by_order, _) = (
        sketch.figure for sketch in attention_figures(shown(replace(report, attention=[tiled]), None), tmp_path)
    )
    (axes,) = (axes for part in by_order.subfigs[1:] for axes in part.axes if axes.get_ylabel() == "layer")
    assert [label.get_text() for label in axes.get_yticklabels()] == ["2", "5", "9"]


def test_another_question_is_no_baseline(images):
    ours = report_of("ours", attention=[attention_of("What?", 3, (2, 2))])
    baseline = report_of("baseline", attention=[attention_of("Where?", 3, (2, 2))])
    first, _ = attention_figures(shown(ours, baseline), images)
    assert sum(axes.get_title().startswith("layer ") for axes in first.figure.axes) == 3


def test_image_that_is_gone_is_named(tmp_path):
    with pytest.raises(OSError, match="image.png"):
        draw(full_report("ours", 2, 3.1), None, tmp_path)


def test_names_long_equal_and_of_any_script():
    long = "a-very-long-name-of-a-checkpoint-that-goes-on-and-on"
    labels = [model.label for model in shown(report_of(long), report_of(long))]
    assert labels[0] == f"{labels[1]} (baseline)" and len(labels[1]) == 30
    assert labels[1].startswith("a-very-long") and labels[1].endswith("on-and-on")
    assert printable("é\t模$") == r"é\t\u6a21\$"
    assert [number(value) for value in (4051.2, 37.0, 0.41234, 1.0)] == ["4,051", "37", "0.412", "1"]
