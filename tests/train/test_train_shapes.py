# SPDX-License-Identifier: Apache-2.0
"""Operations on shapes: which tensors stay real, and the bytes of those that live, by part."""

from collections import Counter

import pytest
import torch
from torch import nn

from normalign_llava.train.memory import _Ledger, _positions, _Shape
from normalign_llava.train.modules.sizes import ACTIVATIONS, COPIES, GRADIENTS


MASK = [True, False, True, True]


def test_the_peak_is_of_the_storages_that_live_at_once_each_counted_once():
    ledger = _Ledger()
    with ledger:
        first_tensor = torch.empty(3, 5)
        assert ledger.parts == {ACTIVATIONS: 60}
        transposed = first_tensor.t()  # the same storage
        second_tensor = transposed.t() + first_tensor
        assert ledger.parts == {ACTIVATIONS: 120}
        del first_tensor, transposed
        third_tensor = second_tensor * 2
        assert ledger.parts == {ACTIVATIONS: 120}
        fourth_tensor = third_tensor[:1] + second_tensor[0]  # 5 numbers more
        assert ledger.parts == {ACTIVATIONS: 140}
        del second_tensor, third_tensor, fourth_tensor
        torch.empty(2)
    assert ledger.parts == {ACTIVATIONS: 140}


def test_what_is_moved_to_another_part_is_counted_there_until_it_is_freed():
    ledger = _Ledger()
    unknown = torch.ones(3)  # the ledger does not see it
    with ledger:
        first_tensor = torch.empty(4)
        second_tensor = torch.empty(6)
        ledger.move(first_tensor[:2], GRADIENTS)  # a part of a storage moves all of it
        third_tensor = torch.empty(8)
        assert ledger.parts == {ACTIVATIONS: 56, GRADIENTS: 16}
        del first_tensor
        fourth_tensor = torch.empty(16)
        assert ledger.parts == {ACTIVATIONS: 120}
        ledger.move(unknown, GRADIENTS)
        del second_tensor, third_tensor, fourth_tensor
        torch.empty(31)
    assert ledger.parts == {ACTIVATIONS: 124}


def transposed_weight(is_trained) -> nn.Parameter:
    weight = nn.Parameter(torch.ones(6, 4).t(), requires_grad=is_trained)
    weight.constants = "of a quantized weight"
    return weight


@pytest.mark.parametrize("is_trained", [True, False])
def test_the_shape_of_a_weight_is_like_the_weight(is_trained):
    weight = transposed_weight(is_trained)
    shape = _Ledger().weight(weight)
    assert isinstance(shape, nn.Parameter)
    assert shape.requires_grad == is_trained
    assert shape.constants == weight.constants
    assert shape.shape == (4, 6)
    assert shape.stride() == (1, 4)
    assert shape.dtype == torch.float32


def test_the_shape_of_a_buffer_is_like_the_buffer_and_counts_nothing():
    ledger = _Ledger()
    shape = ledger.weight(torch.ones(3, dtype=torch.float64))
    assert ledger.parts.total() == 0
    assert not isinstance(shape, nn.Parameter)
    assert shape.shape == (3,)
    assert shape.dtype == torch.float64


@pytest.mark.parametrize("is_trained", [True, False])
def test_a_weight_counts_nothing_and_its_copy_in_half_precision_is_autocast_s(is_trained):
    ledger = _Ledger()
    shape = ledger.weight(transposed_weight(is_trained))
    with ledger:
        ledger.move(shape, GRADIENTS)
        transposed = shape.t()
        assert ledger.parts.total() == 0
        half_copy = transposed.to(torch.bfloat16)
        assert ledger.parts == {COPIES: 48}
        activation = torch.ones(2).to(torch.bfloat16)  # no weight: 8 bytes and 4
        assert ledger.parts == {COPIES: 48, ACTIVATIONS: 12}
        product = half_copy * 2
        assert ledger.parts == {COPIES: 48, ACTIVATIONS: 4 + 48}
        scaled = shape * 2  # no copy
        assert ledger.parts == {COPIES: 48, ACTIVATIONS: 4 + 48 + 96}
    assert activation.dtype == torch.bfloat16
    assert product.dtype == torch.bfloat16
    assert scaled.dtype == torch.float32


def test_numbers_that_depend_on_no_weight_are_real():
    with _Ledger():
        token_ids = torch.arange(3, dtype=torch.long, device="cpu")
        assert token_ids.tolist() == [0, 1, 2]
        assert (token_ids + token_ids).sum().item() == 6
        assert torch.zeros(2, dtype=torch.bool).tolist() == [False, False]
        assert torch.tensor(MASK).sum().item() == 3
        assert token_ids.to(torch.float32).tolist() == [0.0, 1.0, 2.0]


def test_other_numbers_are_shapes():
    on_meta = torch.ones(3, device="meta")
    with _Ledger():
        token_ids = torch.arange(3, dtype=torch.long, device="cpu")
        zeros = torch.zeros(2)
        half_ones = torch.ones(2, dtype=torch.float16)
        shapes = [
            zeros,
            half_ones,
            torch.rand(2),
            token_ids * zeros[0],
            on_meta * 2,
        ]
        for shape in shapes:
            assert isinstance(shape, _Shape)
            assert shape.device.type == "cpu"
        assert half_ones.dtype == torch.float16
        assert token_ids.to("meta").device.type == "cpu"
        assert torch.zeros(2, device="meta").device.type == "cpu"


def test_a_shape_has_a_number_for_the_log():
    with _Ledger():
        zeros = torch.zeros(2)
        total_number = zeros.sum().item()
        assert total_number == 1.0
        assert type(total_number) is float
        position = zeros.argmax().item()
        assert position == 1
        assert type(position) is int


def test_a_mask_that_is_known_says_how_many_rows_it_takes():
    mask = torch.tensor(MASK)
    ledger = _Ledger()
    weight = ledger.weight(torch.ones(4, 5))
    with ledger:
        taken = weight[mask]
        assert taken.shape == (3, 5)
        assert weight[:, None][mask, :, 1:].shape == (3, 1, 4)
        mask_of_elements = torch.stack([mask] * 5, 1)
        assert weight[mask_of_elements].shape == (15,)
        assert weight[mask, torch.tensor([4, 0, 1])].shape == (3,)


def test_rows_that_a_mask_takes_are_written():
    mask = torch.tensor(MASK)
    ledger = _Ledger()
    weight = ledger.weight(torch.ones(4, 5))
    with ledger:
        taken = weight[mask]
        scaled = weight * 1
        assert scaled.index_put((mask,), taken).shape == (4, 5)
        scaled[mask] = taken
        assert scaled.add_(1) is scaled


def test_only_masks_are_replaced_by_positions():
    indices = torch.tensor([2, 0])
    mask = torch.tensor([[True, False], [True, True]])
    positions = _positions([None, indices, mask])
    assert len(positions) == 4
    assert positions[0] is None
    assert positions[1] is indices
    assert positions[2].tolist() == [0, 1, 1]
    assert positions[3].tolist() == [0, 0, 1]


def test_a_mask_that_is_a_shape_is_kept():
    mask = _Shape(torch.empty(2, dtype=torch.bool, device="meta"))
    positions = _positions([mask])  # what it marks is not known
    assert len(positions) == 1
    assert positions[0] is mask


def test_a_shape_is_like_its_tensor_and_outside_a_ledger_computes_nothing():
    tensor = torch.empty(4, 6, dtype=torch.float16, device="meta").t()[1:]
    shape = _Shape(tensor)
    assert shape.shape == (5, 4)
    assert shape.stride() == (1, 6)
    assert shape.storage_offset() == 1
    assert shape.dtype == torch.float16
    assert shape.device.type == "cpu"
    with pytest.raises(RuntimeError, match="outside the estimate"):
        shape + 1


def test_a_layer_in_4_bits_unpacks_its_weight_while_it_multiplies():
    pytest.importorskip("bitsandbytes")
    if not hasattr(torch.ops.bitsandbytes, "gemm_4bit"):
        pytest.skip("bitsandbytes 0.48 unpacks a weight by an operation of its own")
    ledger = _Ledger()
    packed_weight = ledger.weight(torch.zeros(64 * 32 // 2, 1, dtype=torch.uint8))
    absmax = ledger.weight(torch.zeros(64 * 32 // 64))
    with ledger:
        inputs = torch.empty(2, 32, dtype=torch.float16)
        product = torch.ops.bitsandbytes.gemm_4bit(
            inputs,
            packed_weight,
            [64, 32],
            absmax,
            64,
            "nf4",
        )
        assert product.shape == (2, 64)
        inputs * 2
    bytes_of_inputs = 2 * 2 * 32
    bytes_of_product = 2 * 2 * 64
    bytes_of_unpacked_weight = 2 * 64 * 32
    expected = bytes_of_inputs + bytes_of_product + bytes_of_unpacked_weight
    assert ledger.parts == Counter({ACTIVATIONS: expected})
