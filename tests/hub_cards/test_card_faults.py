"""What a card makes of records that are odd, old or wrong, and of folders that do not fit together."""

from pathlib import Path

import card_folder as made
import pytest
import stored
import tiny
import tiny_parts as parts
from card_folder import data, rows, section, tokens

from normalign_llava.assembly.build import build_checkpoint, retrofit_checkpoint
from normalign_llava.hub_cards.card.write import render_card, write_card


def test_a_retrofit_is_one_part(tmp_path):
    llava = Path(parts.llava(tmp_path / "llava", tiny.llava(tied=False)))
    (llava / "README.md").write_text("---\nlicense: mit\n---\n")
    retrofit_checkpoint(str(llava), tmp_path / "built")
    card = render_card(tmp_path / "built")
    assert rows(section(card, "Licence"))["LLaVA checkpoint"] == ["llava", "mit"] and data(card)["license"] == "mit"
    assert "It is made from llava." in card.text and "**not been trained since**" in card.text
    retrofit_checkpoint(str(llava), tmp_path / "none", arm="none")  # no norm was added, and it was trained before
    assert "How it was trained is not recorded here.\nIt is made from llava." in render_card(tmp_path / "none").text


def test_a_base_that_the_author_names_is_kept(folder):
    made.edit(folder / "build.json", vision="google/encoder")
    card = write_card(folder)
    assert data(card)["base_model"] == ["google/encoder"] and "`base_model:`" in " ".join(card.warnings)
    (folder / "README.md").write_text(card.text.replace("- google/encoder\n", "- google/encoder\n- Qwen/decoder\n", 1))
    for _ in range(2):
        card = write_card(folder)
        assert data(card)["base_model"] == ["google/encoder", "Qwen/decoder"]
        assert "`base_model:`" not in " ".join(card.warnings)
    made.edit(folder / "build.json", language="Qwen/decoder")
    assert data(write_card(folder))["base_model_relation"] == "merge"
    text = (folder / "README.md").read_text().replace("- Qwen/decoder\n", "- my/decoder\n", 1)
    (folder / "README.md").write_text(text)  # what follows from the folder is not the author's
    assert data(write_card(folder))["base_model"] == ["google/encoder", "Qwen/decoder"]


@pytest.mark.parametrize("start", ["# a", "1. a", "---", "=== a", "```", "| a |", "<b>", "[a]: b", "a_b_ _"])
def test_what_begins_like_markup_is_text(full, start):
    made.evaluated(full, date=start, protocol=[start], title=start)
    parsed = tokens(f"{section(render_card(full), 'Evaluation')}")
    clean = [token.type for token in parsed]
    made.evaluated(full, date=start, protocol=["a"], title="a")
    assert clean == [token.type for token in tokens(section(render_card(full), "Evaluation"))]
    shown = ["".join(child.content for child in token.children) for token in parsed if token.type == "inline"]
    assert shown.count(" ".join(start.split())) == 2


def test_an_arm_that_was_not_trained(tmp_path):
    vision, language = parts.vision(tmp_path / "vision"), parts.language(tmp_path / "language")
    build_checkpoint(vision, language, tmp_path / "built", arm="unit")
    assert "**not trained**" in render_card(tmp_path / "built").text
    weights = stored.weights(tmp_path / "built")
    weights |= {name: tensor + 0.1 for name, tensor in weights.items() if "projector.norm" in name}
    stored.store(tmp_path / "built", weights)
    card = render_card(tmp_path / "built")
    assert "How it was trained is not recorded here." in card.text
    assert rows(section(card, "Licence"))["data"] == ["what it was trained on", "not recorded"]
