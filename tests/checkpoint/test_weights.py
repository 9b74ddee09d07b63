"""Weights on disk: what is linked in place of writing, and what is left of earlier ones."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from stored import weights

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
