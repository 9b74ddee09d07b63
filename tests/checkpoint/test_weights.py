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
from normalign_llava.checkpoint.weights import COMPARED_ROWS, reusable_files, write_weights


TOWER = "model.vision_tower.layer.weight"
SCALE = "model.vision_tower.scale"
TOWER_FILE = "model-vision_tower-00001-of-00001.safetensors"


@pytest.fixture
def tensors():
    torch.manual_seed(0)
    return {
        TOWER: torch.randn(7, 3),
        SCALE: torch.tensor(2.0),
        "lm_head.weight": torch.randn(5, 2),
    }


def frozen_files(tensors, folder):
    return reusable_files(tensors, ["vision_tower"], [folder])


def assert_same_tensors(actual, expected) -> None:
    assert actual.keys() == expected.keys()
    for tensor_name, expected_tensor in expected.items():
        assert torch.equal(actual[tensor_name], expected_tensor), tensor_name


def test_the_weights_of_a_frozen_module_are_linked(tensors, tmp_path):
    write_weights(tmp_path, tensors)
    expected = {TOWER_FILE: tmp_path / TOWER_FILE}
    assert frozen_files(tensors, tmp_path) == expected
    on_meta = {tensor_name: tensor.to("meta") for tensor_name, tensor in tensors.items()}
    assert frozen_files(on_meta, tmp_path) == expected


def test_the_weights_of_a_module_that_is_trained_are_not_linked(tensors, tmp_path):
    write_weights(tmp_path, tensors)
    assert reusable_files(tensors, [], [tmp_path]) == {}


@pytest.mark.parametrize(
    ("tensor_name", "change"),
    [
        pytest.param(TOWER, lambda tower: tower.half(), id="another-dtype"),
        pytest.param(TOWER, lambda tower: tower[:6], id="another-shape"),
        pytest.param(TOWER, lambda tower: torch.randn(7, 3), id="other-numbers"),
        pytest.param(SCALE, lambda tower: torch.tensor(3.0), id="another-scale"),
        pytest.param("model.vision_tower.more", lambda tower: torch.ones(1), id="one-more"),
    ],
)
def test_weights_that_changed_are_not_linked(tensors, tmp_path, tensor_name, change):
    write_weights(tmp_path, tensors)
    changed = tensors | {tensor_name: change(tensors[TOWER])}
    assert frozen_files(changed, tmp_path) == {}


@pytest.mark.parametrize("changed_row", range(7))
def test_all_rows_of_small_tensors_are_compared(tensors, tmp_path, changed_row):
    write_weights(tmp_path, tensors)
    changed_tower = tensors[TOWER].clone()
    changed_tower[changed_row, 1] += 1e-3
    assert frozen_files(tensors | {TOWER: changed_tower}, tmp_path) == {}


def test_rows_all_over_a_large_tensor_are_compared(tmp_path):
    row_count = 50 * COMPARED_ROWS
    large_tower = torch.randn(row_count, 2)
    write_weights(tmp_path, {TOWER: large_tower})
    for begin in range(0, row_count, 100):
        changed_tower = large_tower.clone()
        changed_tower[begin : begin + 100] += 1
        assert frozen_files({TOWER: changed_tower}, tmp_path) == {}

    changed_tower = large_tower.clone()
    changed_tower[-1] += 1
    assert frozen_files({TOWER: changed_tower}, tmp_path) == {}


def test_weights_replace_those_that_were_there(tensors, tmp_path):
    """Readers take `model.safetensors` before an index; other shards would be sent and counted."""
    older = {tensor_name: tensor + 1 for tensor_name, tensor in tensors.items()}
    stale_files = {
        "model.safetensors",
        "model-00001-of-00002.safetensors",
        TOWER_FILE.replace("1-of", "9-of"),
    }
    for file_name in stale_files:
        save_file(older, tmp_path / file_name)
    write_weights(tmp_path, tensors)

    file_names = {file.name for file in tmp_path.glob("*.safetensors")}
    assert not file_names & stale_files
    assert TOWER_FILE in file_names
    assert_same_tensors(weights(tmp_path), tensors)


def test_weights_replace_a_link_and_not_the_file_of_another_checkpoint(tensors, tmp_path):
    other_path = tmp_path / "other.safetensors"
    save_file(tensors, other_path)
    before = other_path.read_bytes()
    (tmp_path / TOWER_FILE).hardlink_to(other_path)
    changed = {tensor_name: tensor + 1 for tensor_name, tensor in tensors.items()}
    write_weights(tmp_path, changed)
    assert_same_tensors(weights(tmp_path), changed)
    assert other_path.read_bytes() == before


def test_a_tensor_without_a_value_is_refused(tensors, tmp_path):
    values = [(TOWER, tensors[TOWER]), (SCALE, tensors[SCALE])]
    with pytest.raises(ValueError, match="1 tensors have no value, among them lm_head.weight"):
        write_weights(tmp_path, tensors, values=values)
    assert not list(tmp_path.glob("*.safetensors"))


def test_linked_files_are_the_same_file(tensors, tmp_path):
    first_path = tmp_path / "first"
    second_path = tmp_path / "second"
    first_path.mkdir()
    second_path.mkdir()
    write_weights(first_path, tensors)
    linked = frozen_files(tensors, first_path)
    write_weights(second_path, tensors, linked=linked)
    assert (second_path / TOWER_FILE).samefile(first_path / TOWER_FILE)
    linked_tensors = load_file(second_path / TOWER_FILE)
    assert torch.equal(linked_tensors[TOWER], tensors[TOWER])


def assert_stored(stored, expected) -> None:
    """All but the tied head is stored in bfloat16, and the norm in float32."""
    assert stored.keys() == expected.keys() - {"lm_head.weight"}
    for tensor_name, tensor in stored.items():
        expected_dtype = torch.bfloat16
        if "projector.norm." in tensor_name:
            expected_dtype = torch.float32
        assert tensor.dtype == expected_dtype
        assert torch.equal(tensor, expected[tensor_name].to(expected_dtype))


def test_the_tensors_of_a_model_are_stored():
    model = tiny.model().bfloat16()
    stored = weight_files.stored_tensors(model, None)
    assert_stored(stored, model.state_dict())


def test_what_was_gathered_of_a_model_is_stored(tmp_path):
    model = tiny.model().bfloat16()
    gathered = {tensor_name: tensor + 1 for tensor_name, tensor in model.state_dict().items()}
    names_before = list(gathered)
    stored = weight_files.stored_tensors(model, gathered)
    assert_stored(stored, gathered)
    assert list(gathered) == names_before

    weight_files.save_model(model, tmp_path / "model", stored)
    assert_same_tensors(weights(tmp_path / "model"), stored)


def test_a_head_that_is_not_tied_is_stored():
    untied_model = tiny.model(tied=False)
    assert "lm_head.weight" in weight_files.stored_tensors(untied_model)


def refuse_links(*paths):
    raise OSError("links across devices")


@pytest.mark.parametrize("can_link", [True, False])
def test_a_linked_file_is_no_symbolic_link(tensors, tmp_path, monkeypatch, can_link):
    """The Hub's cache has symbolic links. Without hard links, a file is copied."""
    blobs_path = tmp_path / "blobs"
    cached_path = tmp_path / "cached"
    output_path = tmp_path / "output"
    for folder in (blobs_path, cached_path, output_path):
        folder.mkdir()
    write_weights(blobs_path, tensors)
    (cached_path / TOWER_FILE).symlink_to(blobs_path / TOWER_FILE)

    # The first folder has no such file.
    linked = reusable_files(tensors, ["vision_tower"], [output_path, cached_path])
    assert linked == {TOWER_FILE: cached_path / TOWER_FILE}

    if not can_link:
        monkeypatch.setattr(os, "link", refuse_links)
    write_weights(output_path, tensors, linked=linked)
    written_file = output_path / TOWER_FILE
    assert not written_file.is_symlink()
    assert written_file.samefile(blobs_path / TOWER_FILE) == can_link
    written_tensors = load_file(written_file)
    assert torch.equal(written_tensors[TOWER], tensors[TOWER])
    assert weights(output_path).keys() == tensors.keys()


@pytest.fixture
def layout_of_all_kinds(tmp_path):
    """Tensors of all dtypes. Those in `tmp_path` were written in another order and dtype."""
    torch.manual_seed(0)
    layout = {}
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.bool,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
    ):
        numbers = torch.randn(3, 5) * 50
        layout[str(dtype)] = numbers.to(dtype)
    layout["scale"] = torch.tensor(2.5)
    layout["empty"] = torch.zeros(0, 3)
    layout["turned"] = torch.randn(4, 6).T

    values = []
    for tensor_name, tensor in reversed(layout.items()):
        trained_tensor = tensor.double().requires_grad_()
        values.append((tensor_name, trained_tensor))
    on_meta = {tensor_name: tensor.to("meta") for tensor_name, tensor in layout.items()}
    write_weights(tmp_path, on_meta, values)
    return layout


def test_numbers_of_all_kinds_are_read_as_they_were(layout_of_all_kinds, tmp_path):
    stored = weights(tmp_path)
    assert_same_tensors(stored, layout_of_all_kinds)
    for tensor_name, tensor in layout_of_all_kinds.items():
        assert stored[tensor_name].dtype == tensor.dtype, tensor_name


def test_tensors_are_aligned_in_their_file(layout_of_all_kinds, tmp_path):
    (weights_path,) = tmp_path.glob("*.safetensors")
    with safe_open(weights_path, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}

    content = weights_path.read_bytes()
    header_size = int.from_bytes(content[:8], "little")
    header_end = 8 + header_size
    header = json.loads(content[8:header_end])
    for tensor_name, tensor in layout_of_all_kinds.items():
        begin, _ = header[tensor_name]["data_offsets"]
        assert (header_end + begin) % tensor.itemsize == 0, tensor_name


def test_the_index_counts_what_was_written(layout_of_all_kinds, tmp_path):
    (weights_path,) = tmp_path.glob("*.safetensors")
    total_parameters = 0
    total_size = 0
    for tensor in layout_of_all_kinds.values():
        total_parameters += tensor.numel()
        total_size += tensor.numel() * tensor.itemsize

    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {
        "total_parameters": total_parameters,
        "total_size": total_size,
    }
    assert index["weight_map"] == dict.fromkeys(layout_of_all_kinds, weights_path.name)


def test_a_module_s_tensors_are_spread_over_files_of_at_most_the_limit(tmp_path, monkeypatch):
    # 10 numbers in float32 to a file.
    monkeypatch.setattr(weight_files, "SHARD_BYTES", 40)
    sizes = {
        "model.language_model.a": 6,
        "model.vision_tower.a": 1,
        "model.language_model.b": 4,
        "model.multi_modal_projector.a": 20,
        "lm_head.weight": 1,
        "model.language_model.c": 9,
    }
    layout = {}
    for tensor_name, size in sizes.items():
        layout[tensor_name] = torch.full((size,), float(size))

    expected_shards = {
        "model-language_model-00001-of-00002.safetensors": [
            "model.language_model.a",
            "model.language_model.b",
        ],
        "model-language_model-00002-of-00002.safetensors": [
            "lm_head.weight",
            "model.language_model.c",
        ],
        "model-vision_tower-00001-of-00001.safetensors": ["model.vision_tower.a"],
        "model-multi_modal_projector-00001-of-00001.safetensors": ["model.multi_modal_projector.a"],
    }
    assert weight_files.shards_of(layout) == expected_shards
    assert weight_files.size_of(layout) == 4 * sum(sizes.values())

    write_weights(tmp_path, layout)
    for file_name, tensor_names in expected_shards.items():
        assert load_file(tmp_path / file_name).keys() == set(tensor_names)
    assert_same_tensors(weights(tmp_path), layout)


def test_space_is_that_of_the_file_system_though_a_folder_is_not_there(tmp_path):
    folder = tmp_path / "not" / "there"
    free_bytes = weight_files.free_space(folder)
    file_system = os.statvfs(tmp_path)
    expected_bytes = file_system.f_bavail * file_system.f_frsize
    assert free_bytes == pytest.approx(expected_bytes, rel=0.05)

    weight_files.check_space(folder, free_bytes // 2, "Make room.")
    needed_gb = f"{2 * free_bytes / 1e9:,.1f}"
    message = rf"^{needed_gb} GB are .* to {folder}, where (.*) GB are free\. Make room"
    with pytest.raises(ValueError, match=message) as error:
        weight_files.check_space(folder, 2 * free_bytes, "Make room.")
    message_parts = re.match(message, str(error.value))
    free_gb = float(message_parts[1].replace(",", ""))
    assert free_gb == pytest.approx(free_bytes / 1e9, rel=0.05)
    assert not folder.parent.exists()


@pytest.fixture
def restored_progress_bar():
    """Progress bars are as they were when a test ends."""
    was_enabled = logging.is_progress_bar_enabled()
    yield
    if was_enabled:
        logging.enable_progress_bar()
    else:
        logging.disable_progress_bar()


@pytest.mark.parametrize(
    "set_progress_bar",
    [
        pytest.param(logging.enable_progress_bar, id="shown"),
        pytest.param(logging.disable_progress_bar, id="hidden"),
    ],
)
def test_a_progress_bar_is_shown_again_if_it_was(restored_progress_bar, set_progress_bar):
    set_progress_bar()
    was_enabled = logging.is_progress_bar_enabled()
    with pytest.raises(RuntimeError), weight_files.no_progress_bar():
        assert not logging.is_progress_bar_enabled()
        raise RuntimeError
    assert logging.is_progress_bar_enabled() == was_enabled
