"""An encoder alone: norms of its output, for each family, against a reference that keeps every row."""

import numpy as np
import pytest
import tiny_parts
import torch
from PIL import Image
from transformers import AutoModel, Siglip2VisionConfig, Siglip2VisionModel
from transformers.models.siglip2.image_processing_pil_siglip2 import Siglip2ImageProcessorPil

from normalign_llava.diagnose.data import Sample, image_batches
from normalign_llava.diagnose.load import resolve_model
from normalign_llava.diagnose.measure.encoder import probe_encoder


NAFLEX = dict(
    hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, patch_size=8, num_patches=16
)


def noise(seed, size=(24, 16)):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8))


def samples(folder, sizes):
    made = []
    for number, size in enumerate(sizes):
        noise(number, size).save(folder / f"{number}.png")
        made.append(Sample(f"row {number}", "?", {"path": str(folder / f"{number}.png"), "bytes": None}))
    return made


def assert_moments(moments, norms):
    """`norms` are all of them, from plain NumPy."""
    assert moments.count == len(norms)
    assert moments.mean == pytest.approx(norms.mean(), rel=1e-9)
    assert moments.std == pytest.approx(norms.std(), rel=1e-9)
    assert moments.std > 0


def row_norms(rows):
    return np.sqrt((rows.detach().numpy().astype(np.float64) ** 2).sum(-1)).ravel()


@pytest.mark.parametrize("kind", tiny_parts.ENCODERS)
def test_norms_of_an_encoder_equal_those_of_all_its_rows(kind, tmp_path):
    folder = tiny_parts.vision(tmp_path / kind, kind)
    handle = resolve_model(folder)
    images = samples(tmp_path, [(24, 16)] * 5)
    report = probe_encoder(handle.load(), image_batches(handle.image_processor, images, 2), name=kind, data="noise")

    reference = AutoModel.from_pretrained(folder)
    reference = reference.vision_model if kind == "clip_full" else reference
    rows = []
    for batch in (images[:2], images[2:4], images[4:]):
        pixels = handle.image_processor(images=[each.image for each in batch], return_tensors="pt")["pixel_values"]
        rows.append(reference.eval()(pixels).last_hidden_state)
    assert_moments(report.interface.encoder_output, row_norms(torch.cat(rows)))
    class_tokens = {"siglip": 0, "registers": 5}.get(kind, 1)
    assert report.interface.encoder_output.count == 5 * (4 + class_tokens)
    assert (report.model, report.data, report.samples) == (kind, "noise", 5)
    assert (report.dtype, report.hidden_size) == ("float32", 16)
    assert len(report.left_out) == 1 and report.interface.ratio is None and report.depth is None


def test_padding_of_naflex_does_not_count(tmp_path):
    torch.manual_seed(0)
    made = Siglip2VisionModel(Siglip2VisionConfig(**NAFLEX)).eval()
    made.save_pretrained(tmp_path)
    Siglip2ImageProcessorPil(patch_size=8, max_num_patches=16).save_pretrained(tmp_path)
    handle = resolve_model(str(tmp_path))
    images = samples(tmp_path, [(8, 64), (64, 24), (40, 40)])
    given = list(image_batches(handle.image_processor, images, 3))
    assert not given[0]["pixel_attention_mask"].all()
    report = probe_encoder(handle.load(), given, name="naflex")

    norms = row_norms(made(**given[0]).last_hidden_state).reshape(3, 16)
    kept = np.concatenate([of[: h * w] for of, (h, w) in zip(norms, given[0]["spatial_shapes"].tolist(), strict=True)])
    assert_moments(report.interface.encoder_output, kept)
    assert len(kept) < 48 and report.samples == 3
