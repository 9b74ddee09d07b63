# SPDX-License-Identifier: Apache-2.0
"""Models whose configuration has an infinite float, such as Mamba2's `time_step_limit`.

JSON has none, so transformers writes it as `{"__float__": "Infinity"}`.
"""

import math

import pytest
import tiny_language_models
import tiny_parts as parts
from adapters import make_adapter
from json_files import read_json

from normalign_llava.assembly.build import build_checkpoint
from normalign_llava.assembly.merge import merge_adapter
from normalign_llava.hub_cards.card.facts import read_config
from normalign_llava.hub_cards.card.write import refresh_card, write_card
from normalign_llava.hub_cards.push.publish import publish


@pytest.fixture(scope="module", params=["mamba2", "falcon_h1"])
def with_infinity(request, tmp_path_factory):
    """A checkpoint with an infinite float in its configuration."""
    root = tmp_path_factory.mktemp(request.param)
    assert tiny_language_models.language(root / "language", request.param) is None
    build_checkpoint(parts.vision(root / "vision"), str(root / "language"), root / "built")
    stored_text = read_json(root / "built" / "config.json")["text_config"]
    assert stored_text["time_step_limit"] == [0.0, {"__float__": "Infinity"}]
    return root / "built"


def test_the_configuration_has_the_float(with_infinity):
    config = read_config(with_infinity)[1]
    assert list(config.text_config.time_step_limit) == [0.0, math.inf]


def test_it_gets_a_card_and_is_published(with_infinity):
    write_card(with_infinity, replace=True)
    publish(with_infinity, "ann/m", dry_run=True, check_loading=False)


def test_it_gets_a_card_after_a_merge(with_infinity, tmp_path):
    projections = r".*\.language_model\..*\.in_proj"
    make_adapter(with_infinity, tmp_path / "adapter", target_modules=projections)
    write_card(tmp_path / "adapter", replace=True)
    merge_adapter(tmp_path / "adapter", tmp_path / "merged")
    refresh_card(tmp_path / "merged")
    card = (tmp_path / "merged" / "README.md").read_text()
    assert "library_name: transformers" in card
