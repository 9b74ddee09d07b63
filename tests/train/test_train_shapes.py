# SPDX-License-Identifier: Apache-2.0
"""Operations on shapes: which tensors stay real, and the bytes of those that live, by part."""

from collections import Counter

import pytest
import torch
from torch import nn

from normalign_llava.train.modules.sizes import ACTIVATIONS, COPIES, GRADIENTS
from normalign_llava.train.shapes import _Ledger, _positions, _Shape


MASK = [True, False, True, True]


def test_the_peak_is_of_the_storages_that_live_at_once_each_counted_once():
    ledger = _Ledger()
    with ledger:
        first = torch.empty(3, 5)
        assert ledger.parts == {ACTIVATIONS: 60}
        turned = first.t()  # the same storage
        second = turned.t() + first
        assert ledger.parts == {ACTIVATIONS: 120}
        del first, turned
        third = second * 2
        assert ledger.parts == {ACTIVATIONS: 120}
        fourth = third[:1] + second[0]  # 5 numbers more
        assert ledger.parts == {ACTIVATIONS: 140}
        del second, third, fourth
        torch.empty(2)
    assert ledger.parts == {ACTIVATIONS: 140}


def test_what_is_moved_to_another_part_is_counted_there_until_it_is_freed():
    ledger = _Ledger()
    unknown = torch.ones(3)
    with ledger:
        first = torch.empty(4)
        second = torch.empty(6)
        ledger.move(first[:2], GRADIENTS)  # a part of a storage moves all of it
        third = torch.empty(8)
        assert ledger.parts == {ACTIVATIONS: 56, GRADIENTS: 16}
        del first
        fourth = torch.empty(16)
        assert ledger.parts == {ACTIVATIONS: 120}
        ledger.move(unknown, GRADIENTS)  # which the ledger has not seen
        del second, third, fourth
        torch.empty(31)
    assert ledger.parts == {ACTIVATIONS: 124}


@pytest.mark.parametrize("trained", [True, False])
def test_a_weight_counts_nothing_and_its_copy_in_half_precision_is_autocast_s(trained):
    weight = nn.Parameter(torch.ones(6, 4).t(), requires_grad=trained)
    weight.constants = "of a quantized weight"
    ledger = _Ledger()
    shape = ledger.weight(weight)
    buffer = ledger.weight(torch.ones(3, dtype=torch.float64))
    assert isinstance(shape, nn.Parameter) and not isinstance(buffer, nn.Parameter)
    assert shape.requires_grad == trained and shape.constants == weight.constants
    assert (shape.shape, shape.stride(), shape.dtype) == ((4, 6), (1, 4), torch.float32)
    assert (buffer.shape, buffer.dtype) == ((3,), torch.float64)
    with ledger:
        ledger.move(shape, GRADIENTS)
        turned = shape.t()
        assert not ledger.parts.total()
        copied = turned.to(torch.bfloat16)
        assert ledger.parts == {COPIES: 48}
        read = torch.ones(2).to(torch.bfloat16)  # no weight: 8 bytes and 4
        assert ledger.parts == {COPIES: 48, ACTIVATIONS: 12}
        product = copied * 2
        assert ledger.parts == {COPIES: 48, ACTIVATIONS: 4 + 48}
        scaled = shape * 2  # no copy
        assert ledger.parts == {COPIES: 48, ACTIVATIONS: 4 + 48 + 96}
    assert read.dtype == product.dtype == torch.bfloat16 and scaled.dtype == torch.float32


def test_numbers_that_depend_on_no_weight_are_real_and_others_are_shapes():
    on_meta = torch.ones(3, device="meta")
    with _Ledger():
        mask = torch.tensor(MASK)
        ids = torch.arange(3, dtype=torch.long, device="cpu")
        assert ids.tolist() == [0, 1, 2] and (ids + ids).sum().item() == 6
        assert torch.zeros(2, dtype=torch.bool).tolist() == [False, False]
        assert mask.sum().item() == 3
        made = [torch.zeros(2), torch.ones(2, dtype=torch.float16), torch.rand(2)]
        assert ids.to(torch.float32).tolist() == [0.0, 1.0, 2.0]
        made += [ids * made[0][0], on_meta * 2, ids.to("meta"), torch.zeros(2, device="meta")]
        assert all(isinstance(value, _Shape) for value in made[:5])
        assert all(value.device.type == "cpu" for value in made)
        assert made[1].dtype == torch.float16
        for value, number in ((made[0].sum(), 1.0), (made[0].argmax(), 1)):
            read = value.item()  # for the log
            assert read == number and type(read) is type(number)


def test_a_mask_that_is_known_says_how_many_rows_it_takes():
    mask = torch.tensor(MASK)
    ledger = _Ledger()
    weight = ledger.weight(torch.ones(4, 5))
    with ledger:
        taken = weight[mask]
        assert taken.shape == (3, 5)
        assert weight[:, None][mask, :, 1:].shape == (3, 1, 4)
        both = torch.stack([mask] * 5, 1)
        assert weight[both].shape == (15,)
        assert weight[mask, torch.tensor([4, 0, 1])].shape == (3,)
        other = weight * 1
        assert other.index_put((mask,), taken).shape == (4, 5)
        other[mask] = taken
        assert other.add_(1) is other


def test_positions_take_the_place_of_masks_alone():
    ids = torch.tensor([2, 0])
    both = torch.tensor([[True, False], [True, True]])
    first, second, third, fourth = _positions([None, ids, both])
    assert first is None and second is ids
    assert (third.tolist(), fourth.tolist()) == ([0, 1, 1], [0, 0, 1])
    shape = _Shape(torch.empty(2, dtype=torch.bool, device="meta"))
    (kept,) = _positions([shape])  # what it marks is not known
    assert kept is shape


def test_a_shape_is_like_its_tensor_and_outside_a_ledger_computes_nothing():
    meta = torch.empty(4, 6, dtype=torch.float16, device="meta").t()[1:]
    shape = _Shape(meta)
    assert (shape.shape, shape.stride(), shape.storage_offset()) == ((5, 4), (1, 6), 1)
    assert (shape.dtype, shape.device.type) == (torch.float16, "cpu")
    with pytest.raises(RuntimeError, match="outside the estimate"):
        shape + 1


def test_a_layer_in_4_bits_unpacks_its_weight_while_it_multiplies():
    pytest.importorskip("bitsandbytes")
    ledger = _Ledger()
    packed = ledger.weight(torch.zeros(64 * 32 // 2, 1, dtype=torch.uint8))
    absmax = ledger.weight(torch.zeros(64 * 32 // 64))
    with ledger:
        read = torch.empty(2, 32, dtype=torch.float16)
        product = torch.ops.bitsandbytes.gemm_4bit(read, packed, [64, 32], absmax, 64, "nf4")
        assert product.shape == (2, 64)
        read * 2
    # What is read, the product, and the weight in float16 beside them.
    assert ledger.parts == Counter({ACTIVATIONS: 2 * 2 * 32 + 2 * 2 * 64 + 2 * 64 * 32})
