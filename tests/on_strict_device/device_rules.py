"""The device itself: what it refuses and what it allows."""

import pytest
import tiny
import torch
from strict_device import STRICT, close, on_device


def values(*shape, dtype=torch.float32):
    return torch.arange(1, 1 + torch.Size(shape).numel()).reshape(shape).to(dtype)


MIXED = "same device|device type tensor|either on cpu or on the same|should be the same"
X, C, PLACES = values(2, 3).to(STRICT), values(2, 3), torch.tensor([0, 1])


@pytest.mark.parametrize(
    "mixed",
    [
        lambda: X + C,
        lambda: C.add_(X),
        lambda: X @ C.T,
        lambda: torch.cat([X, C]),
        lambda: torch.stack([X.sum(), C.sum()]),
        lambda: torch.where(C > 0, X, 0.0),
        lambda: torch.isin(X, C),
        lambda: X.masked_fill(C > 1, 0.0),
        lambda: X.masked_scatter(C > 1, X),
        lambda: C[PLACES.to(STRICT)],
        lambda: X.index_put((PLACES,), C),
        lambda: X.index_select(0, PLACES),
        lambda: X.gather(0, PLACES[None].expand(1, 2)),
        lambda: torch.nn.functional.embedding(PLACES, X),
        lambda: torch.nn.functional.layer_norm(X, (3,), torch.ones(3)),
        lambda: torch.nn.functional.cross_entropy(X, PLACES),
        lambda: torch.nn.Linear(3, 2)(X),
        lambda: X.numpy(),
    ],
)
def test_tensors_of_two_devices_are_refused(mixed):
    with pytest.raises((RuntimeError, TypeError), match=MIXED):
        mixed()


def test_what_cuda_allows_is_allowed():
    two = torch.tensor(2.0)
    close(X * two, 2 * C)
    close(torch.where(X > 1, X, two), torch.where(C > 1, C, two))
    close(X.masked_fill(X > 1, two), C.masked_fill(C > 1, two))
    close(X[PLACES], C[PLACES])
    close(X[torch.tensor([True, False])], C[:1])
    x = X.clone()
    x[0] = values(3, dtype=torch.bfloat16)
    x.view(-1)[PLACES + 4] = two
    close(x, torch.tensor([[1.0, 2.0, 3.0], [4.0, 2.0, 2.0]]))
    assert C.copy_(X).device.type == "cpu" and X.sum().item() == 21


def test_a_forgotten_transfer_is_found():
    model, batch = tiny.model().to(STRICT), tiny.inputs()
    model(**on_device(batch))
    with pytest.raises(RuntimeError, match=MIXED):
        model(**on_device(batch) | {"pixel_values": batch["pixel_values"]})
    with pytest.raises(RuntimeError, match=MIXED):
        model(**on_device(batch) | {"input_ids": batch["input_ids"]})
