"""Weights on disk: what is linked in place of writing, and what is left of earlier ones."""

import json
import os
import re

import pytest
import tiny
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from stored import weights
from transformers.utils import logging

from normalign_llava.checkpoint import weights as weight_files
from normalign_llava.checkpoint.weights import COMPARED_ROWS, unchanged_files, write_weights


TOWER = "model.vision_tower.layer.weight"
FILE = "model-vision_tower-00001-of-00001.safetensors"


@pytest.fixture
def tensors():
    torch.manual_seed(0)
    tower = {TOWER: torch.randn(7, 3), "model.vision_tower.scale": torch.tensor(2.0)}
    return {**tower, "lm_head.weight": torch.randn(5, 2)}


def test_only_the_same_weights_of_a_frozen_module_are_linked(tensors, tmp_path):
    write_weights(tmp_path, tensors)

    def linked(layout, frozen=("vision_tower",)):
        return unchanged_files(layout, frozen, [tmp_path])

    assert linked(tensors) == {FILE: tmp_path / FILE}
    assert linked(tensors, frozen=()) == {}
    on_meta = {name: tensor.to("meta") for name, tensor in tensors.items()}
    assert linked(on_meta) == {FILE: tmp_path / FILE}
    others = {
        "another dtype": tensors[TOWER].half(),
        "another shape": tensors[TOWER][:6],
        "other numbers": torch.randn(7, 3),
    }
    for row in range(7):  # all rows of small tensors are compared
        others[f"another row {row}"] = tensors[TOWER].clone()
        others[f"another row {row}"][row, 1] += 1e-3
    for kind, value in others.items():
        assert linked(tensors | {TOWER: value}) == {}, kind
    assert linked(tensors | {"model.vision_tower.scale": torch.tensor(3.0)}) == {}
    assert linked(tensors | {"model.vision_tower.more": torch.ones(1)}) == {}


def test_rows_all_over_a_large_tensor_are_compared(tmp_path):
    tensors = {TOWER: torch.randn(50 * COMPARED_ROWS, 2)}
    write_weights(tmp_path, tensors)
    for begin in range(0, 50 * COMPARED_ROWS, 100):
        changed = tensors[TOWER].clone()
        changed[begin : begin + 100] += 1
        assert unchanged_files({TOWER: changed}, ["vision_tower"], [tmp_path]) == {}
    changed = tensors[TOWER].clone()
    changed[-1] += 1
    assert unchanged_files({TOWER: changed}, ["vision_tower"], [tmp_path]) == {}


def test_weights_replace_those_that_were_there(tensors, tmp_path):
    """Readers take `model.safetensors` before an index; other shards would be sent and counted."""
    old = {name: tensor + 1 for name, tensor in tensors.items()}
    stale = ["model.safetensors", "model-00001-of-00002.safetensors", FILE.replace("1-of", "9-of")]
    for name in stale:
        save_file(old, tmp_path / name)
    other = tmp_path / "other.safetensors"
    save_file(old, other)
    kept = other.read_bytes()
    (tmp_path / FILE).hardlink_to(other)  # as of another checkpoint
    write_weights(tmp_path, tensors)
    found = {path.name for path in tmp_path.glob("*.safetensors")}
    assert not found & set(stale) and FILE in found
    written = weights(tmp_path)
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[name], tensors[name]) for name in tensors)
    assert other.read_bytes() == kept


def test_a_tensor_without_a_value_is_refused(tensors, tmp_path):
    with pytest.raises(ValueError, match="1 tensors have no value, among them lm_head.weight"):
        values = [item for item in tensors.items() if item[0] != "lm_head.weight"]
        write_weights(tmp_path, tensors, values=values)
    assert not list(tmp_path.glob("*.safetensors"))


def test_linked_files_are_the_same_file(tensors, tmp_path):
    for folder in ("first", "second"):
        (tmp_path / folder).mkdir()
    write_weights(tmp_path / "first", tensors)
    linked = unchanged_files(tensors, ["vision_tower"], [tmp_path / "first"])
    write_weights(tmp_path / "second", tensors, linked=linked)
    assert (tmp_path / "second" / FILE).samefile(tmp_path / "first" / FILE)
    assert torch.equal(load_file(tmp_path / "second" / FILE)[TOWER], tensors[TOWER])


def test_what_is_stored_is_the_model_s_or_what_was_gathered_of_it(tmp_path):
    model = tiny.model().bfloat16()
    gathered = {name: value + 1 for name, value in model.state_dict().items()}
    gathered_names = [*gathered]
    for given, expected in ((None, model.state_dict()), (gathered, gathered)):
        stored = weight_files.stored_tensors(model, given)
        assert stored.keys() == expected.keys() - {"lm_head.weight"}  # tied to the embeddings
        for name, value in stored.items():
            wide = "projector.norm." in name
            assert value.dtype == (torch.float32 if wide else torch.bfloat16)
            assert torch.equal(value, expected[name].to(value.dtype))
    assert [*gathered] == gathered_names
    weight_files.save_model(model, tmp_path / "model", stored)
    written = weights(tmp_path / "model")
    assert written.keys() == stored.keys()
    assert all(torch.equal(written[name], stored[name]) for name in stored)
    apart = tiny.model(tied=False)
    assert "lm_head.weight" in weight_files.stored_tensors(apart)


def refuse_links(*paths):
    raise OSError("links across devices")


@pytest.mark.parametrize("can_link", [True, False])
def test_a_linked_file_is_no_symbolic_link(tensors, tmp_path, monkeypatch, can_link):
    """As one in the Hub's cache is; without hard links it is copied."""
    for folder in ("blobs", "first", "second"):
        (tmp_path / folder).mkdir()
    write_weights(tmp_path / "blobs", tensors)
    (tmp_path / "first" / FILE).symlink_to(tmp_path / "blobs" / FILE)
    folders = [tmp_path / "second", tmp_path / "first"]  # of which the first has no such file
    linked = unchanged_files(tensors, ["vision_tower"], folders)
    assert linked == {FILE: tmp_path / "first" / FILE}
    if not can_link:
        monkeypatch.setattr(os, "link", refuse_links)
    write_weights(tmp_path / "second", tensors, linked=linked)
    written = tmp_path / "second" / FILE
    assert not written.is_symlink()
    assert written.samefile(tmp_path / "blobs" / FILE) == can_link
    assert torch.equal(load_file(written)[TOWER], tensors[TOWER])
    assert weights(tmp_path / "second").keys() == tensors.keys()


def test_numbers_of_all_kinds_are_read_as_they_were(tmp_path):
    kinds = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool]
    kinds += [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
    torch.manual_seed(0)
    layout = {f"{kind}".lower(): (torch.randn(3, 5) * 50).to(kind) for kind in kinds}
    layout |= {"scale": torch.tensor(2.5), "empty": torch.zeros(0, 3)}
    layout["turned"] = torch.randn(4, 6).T
    # Other orders and dtypes than the layout's; tensors that are trained.
    values = [(name, value.double()) for name, value in reversed(layout.items())]
    values = [(name, value.requires_grad_()) for name, value in values]
    write_weights(tmp_path, {name: value.to("meta") for name, value in layout.items()}, values)
    read = weights(tmp_path)
    assert read.keys() == layout.keys()
    for name, value in layout.items():
        assert read[name].dtype == value.dtype and torch.equal(read[name], value), name
    (file,) = tmp_path.glob("*.safetensors")
    with safe_open(file, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    for name, value in layout.items():
        assert (8 + size + header[name]["data_offsets"][0]) % value.itemsize == 0, name
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    bytes_of_all = sum(value.numel() * value.itemsize for value in layout.values())
    numbers = sum(value.numel() for value in layout.values())
    assert index["metadata"] == {"total_parameters": numbers, "total_size": bytes_of_all}
    assert index["weight_map"] == dict.fromkeys(layout, file.name)


def test_a_module_s_tensors_are_spread_over_files_of_at_most_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(weight_files, "SHARD_BYTES", 40)
    names = ["model.language_model.a", "model.vision_tower.a", "model.language_model.b"]
    names += ["model.multi_modal_projector.a", "lm_head.weight", "model.language_model.c"]
    sizes = dict(zip(names, (6, 1, 4, 20, 1, 9), strict=True))  # of float32, so 10 to a file
    layout = {name: torch.full((size,), float(size)) for name, size in sizes.items()}
    names_in = {
        "model-language_model-00001-of-00002.safetensors": [names[0], names[2]],
        "model-language_model-00002-of-00002.safetensors": [names[4], names[5]],
        "model-vision_tower-00001-of-00001.safetensors": [names[1]],
        "model-multi_modal_projector-00001-of-00001.safetensors": [names[3]],
    }
    assert weight_files.shards_of(layout) == names_in
    assert weight_files.size_of(layout) == 4 * sum(sizes.values())
    write_weights(tmp_path, layout)
    for file, inside in names_in.items():
        assert load_file(tmp_path / file).keys() == {*inside}
    assert all(torch.equal(value, layout[name]) for name, value in weights(tmp_path).items())


def test_space_is_that_of_the_file_system_though_a_folder_is_not_there(tmp_path):
    folder = tmp_path / "not" / "there"
    free = weight_files.free_space(folder)
    system = os.statvfs(tmp_path)
    assert free == pytest.approx(system.f_bavail * system.f_frsize, rel=0.05)
    weight_files.check_space(folder, free // 2, "Make room.")
    said = rf"^{2 * free / 1e9:,.1f} GB are .* to {folder}, where (.*) GB are free\. Make room"
    with pytest.raises(ValueError, match=said) as error:
        weight_files.check_space(folder, 2 * free, "Make room.")
    left = re.match(said, str(error.value))[1].replace(",", "")
    assert float(left) == pytest.approx(free / 1e9, rel=0.05)
    assert not folder.parent.exists()


def test_a_progress_bar_is_shown_again_if_it_was():
    shown = logging.is_progress_bar_enabled()
    try:
        for shows in (logging.enable_progress_bar, logging.disable_progress_bar):
            shows()
            before = logging.is_progress_bar_enabled()
            with pytest.raises(RuntimeError), weight_files.no_progress_bar():
                assert not logging.is_progress_bar_enabled()
                raise RuntimeError
            assert logging.is_progress_bar_enabled() == before
    finally:
        logging.enable_progress_bar() if shown else logging.disable_progress_bar()
