"""The architecture and its alignment: the same numbers as on the CPU."""

import pytest
import tiny
import torch
from strict_device import STRICT, close, on_device

from normalign_llava import NormAlignLlavaForConditionalGeneration


NO_NORM = {"projector_norm": "none", "gradient_compensation": "none"}


@pytest.mark.parametrize("norm", [{}, {"projector_norm": "rms_norm"}, NO_NORM])
@pytest.mark.parametrize("images", [0, 2])
def test_forward_backward_and_generation(norm, images):
    model = tiny.model(**norm)
    batch = tiny.inputs(images=images, batch=2)
    loss = model(**batch, labels=batch["input_ids"]).loss
    loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    answer = model.generate(**batch, max_new_tokens=4, do_sample=False)
    model.zero_grad()

    model = model.to(STRICT)
    batch = on_device(batch)
    loss_there = model(**batch, labels=batch["input_ids"]).loss
    loss_there.backward()
    close(loss_there, loss)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        close(gradient, expected[name], rtol=1e-4, atol=1e-5)
    close(model.generate(**batch, max_new_tokens=4, do_sample=False), answer)


def test_a_llava_checkpoint_is_aligned_as_it_is_loaded(tmp_path):
    tiny.llava().save_pretrained(tmp_path)
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(tmp_path, device_map=STRICT)
    n_text = tiny.reference_n_text(model.get_input_embeddings().weight)
    gain = model.base_model.multi_modal_projector.norm.weight.detach()
    close(gain, torch.full((tiny.WIDTH,), n_text / tiny.WIDTH**0.5))
