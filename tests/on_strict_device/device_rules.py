"""The device itself: what it refuses and what it allows."""

import pytest
import tiny
import torch
from strict_device import STRICT, close, on_device


MIXED = "same device|device type tensor|either on cpu or on the same|should be the same"
C, PLACES = torch.arange(1.0, 7.0).reshape(2, 3), torch.tensor([0, 1])
X = C.to(STRICT)


@pytest.mark.parametrize(
    "mixed",
    [
        lambda: X + C,
        lambda: torch.stack([X.sum(), C.sum()]),
        lambda: X.masked_scatter(C > 1, X),
        lambda: C[PLACES.to(STRICT)],
        lambda: X.index_put((PLACES,), C),
        lambda: torch.nn.functional.embedding(PLACES, X),
        lambda: X.numpy(),
    ],
)
def test_tensors_of_two_devices_are_refused(mixed):
    with pytest.raises((RuntimeError, TypeError), match=MIXED):
        mixed()


def test_what_cuda_allows_is_allowed():
    two = torch.tensor(2.0)
    close(X * two, 2 * C)
    close(X[PLACES], C[PLACES])
    assert C.copy_(X).device.type == "cpu" and X.sum().item() == 21


def test_a_forgotten_transfer_is_found():
    model, batch = tiny.model().to(STRICT), tiny.inputs()
    model(**on_device(batch))
    with pytest.raises(RuntimeError, match=MIXED):
        model(**on_device(batch) | {"pixel_values": batch["pixel_values"]})
    with pytest.raises(RuntimeError, match=MIXED):
        model(**on_device(batch) | {"input_ids": batch["input_ids"]})
