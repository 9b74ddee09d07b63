"""Every causal language model of transformers: built and equal, or refused with the reason."""

import re
from pathlib import Path

import paths
import pytest
import tiny_language_models
import tiny_parts as parts
import torch
from PIL import Image
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from normalign_llava.assembly.build import build_checkpoint
from normalign_llava.configuration_normalign_llava import embedding_scales


pytestmark = pytest.mark.nightly
PAGE = (paths.DOCS / "language_models.md").read_text(encoding="utf-8")


def documented(section: str) -> dict[str, str]:
    """Returns the first cell of the row of each model type in a section's table."""
    lines = PAGE.partition(f"## {section}\n")[2].partition("\n## ")[0].splitlines()
    cells_by_row = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    return {kind: cells[0] for cells in cells_by_row for kind in re.findall("`(.*?)`", cells[-1])}


BUILT = documented("Built")
REFUSED = documented("Refused")
OTHER_WITH_CACHE = ("moshi",)
"""Models whose answers with a cache are others than without, also by themselves."""

IMAGE = Image.linear_gradient("L").convert("RGB")


def test_the_page_has_every_model_type_once():
    """Fails on another version of transformers, and says which models it has more or fewer."""
    named = [*BUILT, *REFUSED]
    assert sorted(named) == sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert f"{len(BUILT)} of {len(named)} are built" in PAGE


@pytest.fixture(scope="module")
def vision(tmp_path_factory):
    return parts.vision(tmp_path_factory.mktemp("vision"))


@pytest.mark.parametrize("model_type", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
def test_built_and_equal_or_refused_with_the_documented_reason(model_type, vision, tmp_path):
    found, reason = outcome(model_type, vision, tmp_path)
    if model_type in REFUSED:
        pattern = re.escape(REFUSED[model_type]).replace(re.escape("..."), ".*")
        assert found == "refused" and re.search(pattern, reason), reason
    else:
        assert found == "built" and model_type in BUILT, reason


def outcome(model_type: str, vision: str, folder: Path) -> tuple[str, str]:
    """Returns "built", "refused" or "not made", and the reason. What is wrong raises."""
    language = str(folder / "language")
    built = folder / "built"
    not_made = tiny_language_models.language(folder / "language", model_type)
    try:
        build_checkpoint(vision, language, built, seed=0)
    except ValueError as error:
        assert not built.exists()
        message = str(error).replace(language, "LANGUAGE")
        if not_made and "not a causal language model" not in message:
            return "not made", not_made
        return "refused", message
    compare(language, built)
    return "built", ""


@torch.no_grad()
def compare(language: str, built: Path) -> None:
    """Compares the language model in a checkpoint with itself, then looks at an image."""
    theirs = AutoModelForCausalLM.from_pretrained(language)
    ours = AutoModelForImageTextToText.from_pretrained(built)
    rows = theirs.get_input_embeddings().num_embeddings
    ids = torch.arange(5, 29)[None]
    expected = theirs(input_ids=ids, use_cache=False).logits
    assert expected.std() > 1e-3
    logits = ours(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(logits[..., :rows], expected, rtol=1e-4, atol=1e-5)
    norms = theirs.get_input_embeddings()(torch.arange(rows)).norm(dim=-1)
    norms[ours.config.image_token_id :] = 0.0  # a row that only the image token has
    _, scale_all = embedding_scales(ours.config.text_config)
    n_text = norms[norms > 0].mean().item() * scale_all
    assert ours.config.text_embedding_norm == pytest.approx(n_text, rel=1e-4)
    greedy = dict(max_new_tokens=4, do_sample=False, eos_token_id=None)
    greedy |= dict(output_logits=True, return_dict_in_generate=True)
    for use_cache in (True, False):
        alone = theirs.generate(ids, use_cache=use_cache, **greedy)
        inside = ours.generate(ids, use_cache=use_cache, **greedy)
        assert torch.equal(alone.sequences, inside.sequences)
    processor = AutoProcessor.from_pretrained(built)
    inputs = processor(images=IMAGE, text="<image>what is it", return_tensors="pt")
    with_image = ours(**inputs).logits
    assert with_image.isfinite().all()
    cached = ours.generate(**inputs, use_cache=True, **greedy)
    whole = ours.generate(**inputs, use_cache=False, **greedy)
    assert cached.sequences.shape[1] == inputs["input_ids"].shape[1] + 4
    if theirs.config.model_type in OTHER_WITH_CACHE:
        return
    assert torch.equal(cached.sequences, whole.sequences)
    torch.testing.assert_close(cached.logits, whole.logits, rtol=1e-4, atol=1e-4)
