"""The model card: filled only from the folder, valid on the Hub, kind to what people write."""

import ast
import re
import shutil
from collections import Counter
from pathlib import Path

import card_folder
import pytest
import tiny
import tiny_parts
from card_folder import (
    data,
    listed,
    metadata_of,
    read_report,
    rows,
    section,
    table_of,
    tokens,
    warnings_of,
)
from diagnosed import diagnosed
from huggingface_hub import ModelCard
from PIL import Image
from safetensors.torch import save_file
from transformers import AutoProcessor

from normalign_llava.assembly.build import retrofit_checkpoint
from normalign_llava.evaluation.results import WEIGHT_FILES, Evaluation, Metric, files_hash
from normalign_llava.hub_cards.card.facts import Part
from normalign_llava.hub_cards.card.metadata import TAGS, by_hand, is_ours
from normalign_llava.hub_cards.card.write import render_card, write_card
from normalign_llava.hub_cards.push.source import choose_files


STALE = "The diagnosis was made of other weights"
PINNED = Part("base model", "user/base", "user/base", "a" * 40)


@pytest.fixture
def bare_card(folder):
    """A card of a folder without any record."""
    (folder / "build.json").unlink()
    return render_card(folder)


def test_a_bare_checkpoint_has_only_general_metadata(bare_card):
    assert data(bare_card) == {
        "library_name": "transformers",
        "pipeline_tag": "image-text-to-text",
        "tags": TAGS,
    }
    assert "license" in bare_card.warnings[0]


def test_a_bare_checkpoint_has_a_short_and_honest_card(bare_card):
    titles = re.findall("^## (.*)", bare_card.text, re.MULTILINE)
    assert titles == ["Use", "Measured alignment", "Limits", "Licence", "Citation"]
    for sentence in (
        "How it was trained is not",
        "No evaluation is",
        "were not measured on this",
    ):
        assert sentence in bare_card.text
    for forbidden_word in ("None", "undefined", "nan", "\n\n\n", "stage 1"):
        assert forbidden_word not in bare_card.text


DROPPED_NORM = "`model.multi_modal_projector.norm.weight | UNEXPECTED`"
"""What transformers prints if a tool calls LLaVA's own class."""


@pytest.mark.parametrize(
    ("norm", "warns"),
    [
        ("layer_norm", True),
        ("rms_norm", True),
        ("none", False),
    ],
)
def test_the_card_warns_of_the_class_that_drops_the_norm(folder, norm, warns):
    card_folder.edit(folder / "config.json", projector_norm=norm)
    use_section = section(render_card(folder), "Use")
    assert (DROPPED_NORM in use_section) is warns


def test_a_full_folder_has_all_metadata(full):
    model_card = render_card(full, repo_id="user/model")
    expected = {
        "base_model": ["google/encoder", "Qwen/decoder"],
        "base_model_relation": "merge",
        "datasets": ["user/data"],
        "language": ["en", "de"],
        "license": "apache-2.0",
    }
    assert data(model_card).items() >= expected.items()


def test_a_full_folder_has_figures_without_samples(full):
    model_card = render_card(full, repo_id="user/model")
    figures = re.findall(r"\]\((diagnostics/.*?)\)", model_card.text)
    assert figures == ["diagnostics/interface.png", "diagnostics/rotation.png"]
    assert card_folder.SECRET not in model_card.text
    assert "What shape is in the image?" not in model_card.text


LICENCES = {
    "all-alike": ("mit", "mit", "mit", "mit"),
    "one-that-allows-others": ("mit", "apache-2.0", "bsd-3-clause", "apache-2.0"),
    "of-data-unknown": ("mit", "bsd-3-clause", None, None),
    "of-vision-unknown": (None, "mit", "mit", None),
    "all-other": ("other", "other", "other", None),
    "of-language-other": ("apache-2.0", "llama3.2", "apache-2.0", "other"),
    "of-data-other": ("apache-2.0", "apache-2.0", "cc-by-nc-4.0", "other"),
}


@pytest.fixture
def licensed_folder(folder):
    """Names the licences of the parts and of the data."""

    def set_licences(vision, language, dataset):
        card_folder.licensed(folder, vision, language)
        card_folder.trained(folder, {"id": "user/data", "license": dataset})
        return folder

    return set_licences


@pytest.mark.parametrize(
    ("vision", "language", "dataset", "expected"),
    LICENCES.values(),
    ids=LICENCES.keys(),
)
def test_the_licence_follows_from_the_parts_and_the_data(
    licensed_folder, vision, language, dataset, expected
):
    model_card = render_card(licensed_folder(vision, language, dataset))
    assert data(model_card).get("license") == expected
    assert bool(model_card.warnings) == (expected in (None, "other"))
    assert rows(section(model_card, "Licence"))["language model"][1] == language


@pytest.mark.parametrize(
    ("vision", "language", "dataset"),
    [licences[:3] for licences in LICENCES.values() if licences[-1] in (None, "other")],
)
def test_the_author_settles_a_licence_that_does_not_follow(
    licensed_folder, vision, language, dataset
):
    folder = licensed_folder(vision, language, dataset)
    card_text = render_card(folder).text.replace("license: other\n", "")
    by_author = card_text.replace("---\n", "---\nlicense: gemma\n", 1)
    (folder / "README.md").write_text(by_author)

    model_card = render_card(folder)
    assert data(model_card)["license"] == "gemma"
    assert not model_card.warnings
    assert "Its author states: gemma." in model_card.text


def data_source(name, split, **dataset):
    return {
        "source": name,
        "split": split,
        "found": 9,
        "used": 7,
        "dataset": dataset,
    }


@pytest.fixture
def folder_with_held_out_data(folder):
    """A folder trained on one data set, with another held out and one of unknown use."""
    sources = [
        data_source("a", "train", id="user/data", license="mit", language=["en"]),
        data_source("b", "eval", id="user/test", license="cc-by-nc-4.0", language=["de"]),
        {"source": "c", "used": 3},
    ]
    card_folder.licensed(folder, "mit", "mit")
    card_folder.edit(folder / "training.json", stage="align", data=sources, options={})
    return folder


def test_metadata_are_of_the_data_that_it_was_trained_on(folder_with_held_out_data):
    model_card = render_card(folder_with_held_out_data)
    metadata = data(model_card)
    assert metadata["datasets"] == ["user/data"]
    assert metadata["language"] == ["en"]
    assert metadata["license"] == "mit"
    assert "user/test" not in section(model_card, "Licence")


def test_held_out_data_has_a_row_of_its_own(folder_with_held_out_data):
    training_table = table_of(folder_with_held_out_data, "Training")
    assert training_table["Data"] == ["user/data, 7 of 9 rows"]
    assert training_table["Held-out data"] == ["user/test, 7 of 9 rows; c, 3 rows"]


@pytest.mark.parametrize(
    ("second_languages", "expected"),
    [
        (["de"], ["en", "de"]),
        ([], None),
        (None, None),
    ],
)
def test_languages_are_named_if_those_of_all_data_are_known(folder, second_languages, expected):
    sources = [
        data_source("a", "train", id="user/a", language=["en"]),
        data_source("b", "train", id="user/b", language=second_languages),
    ]
    card_folder.edit(folder / "training.json", stage="align", data=sources, options={})
    assert metadata_of(folder).get("language") == expected


NOTICES = "licences and notices that came with the parts"


@pytest.fixture
def untrained_folder(folder):
    """A folder with licences and an empty record of training."""
    card_folder.licensed(folder, "mit", "apache-2.0")
    card_folder.edit(folder / "training.json", stage="align", data=[], options={})
    return folder


def test_no_notices_are_claimed_where_there_are_none(untrained_folder):
    card_text = render_card(untrained_folder).text
    assert NOTICES not in card_text
    assert "notices stay" not in card_text


def test_notices_are_linked_and_published(untrained_folder):
    notice_path = untrained_folder / "notices" / "vision" / "LICENSE"
    notice_path.parent.mkdir(parents=True)
    notice_path.write_text("terms")
    licence_section = section(render_card(untrained_folder), "Licence")
    assert NOTICES in licence_section
    assert "[notices/vision/LICENSE](notices/vision/LICENSE)." in licence_section
    assert "notices/vision/LICENSE" in choose_files(untrained_folder, {}).files


@pytest.fixture
def full_with_other_results(full):
    """A folder with results of other weights, and of a part of a task."""
    of_other_weights = Evaluation(
        "gqa", "GQA", [Metric("accuracy", 0.25)], 9, 9, [], weights="0" * 64
    )
    of_a_part = Evaluation("textvqa", "TextVQA", [Metric("accuracy", 0.75)], 5, 9, [])
    of_other_weights.write(full)
    of_a_part.write(full)
    return full


def test_scores_on_whole_tasks_are_in_the_metadata(full_with_other_results):
    model_card = render_card(full_with_other_results, repo_id="user/model")
    content = ModelCard(model_card.text).data
    assert content.model_name == "model"
    results = []
    for result in content.eval_results:
        values = (
            result.dataset_type,
            result.dataset_name,
            result.metric_name,
            result.metric_value,
        )
        results.append(values)
    assert results == [
        ("pope", "POPE", "accuracy", 0.8125),
        ("pope", "POPE", "accuracy, adversarial", 0.7),
    ]
    # They are in the text, with what is wrong with them.
    assert "TextVQA" in model_card.text
    assert "GQA" in model_card.text


def test_scores_that_are_gone_are_removed_from_the_metadata(full_with_other_results):
    model_card = render_card(full_with_other_results, repo_id="user/model")
    assert "model-index" in data(model_card)
    (full_with_other_results / "README.md").write_text(model_card.text)
    shutil.rmtree(full_with_other_results / "evaluation")
    assert "model-index" not in metadata_of(full_with_other_results)


def test_the_table_of_an_evaluation_has_what_was_recorded(full):
    evaluation_section = section(render_card(full), "Evaluation")
    assert rows(evaluation_section) == {
        "": ["metric", "this model", "blank image", "commonest answer", "n"],
        "all": ["accuracy", "0.81\xa0±\xa00.02", "0.500", "0.510", "500"],
        "adversarial": ["accuracy", "0.70\xa0±\xa00.03", "0.400", "–", "250"],
    }
    assert "**Partial" not in evaluation_section


def test_an_evaluation_of_a_part_is_called_so(full):
    Evaluation("pope", "POPE", [Metric("accuracy", 0.5)], 5, 9, []).write(full)
    assert "**Partial: 5 of 9 samples.**" in section(render_card(full), "Evaluation")


def test_the_table_of_training_has_what_was_recorded(full):
    card_folder.trained(full, steps_done=30)
    trained = "projector 0.001, norm 0.002"
    frozen = "vision tower, language model"
    rows_of_step = "16 (4 × 2 × 2)"
    hardware = "2 × NVIDIA H200, x86_64 Linux"
    software = "torch 2.13.0, normalign_llava 0.1.0"
    commit = "d" * 40
    assert table_of(full, "Training") == {
        "": ["stage 1 (align)", "stage 2 (tune)"],
        "Data": ["first, 500 of 505 rows (3 bad, 2 too long)", "second, 60 of 60 rows"],
        "Trained, at a peak learning rate": [trained, trained],
        "Frozen": [frozen, frozen],
        "Steps": ["32", "30 of 32"],
        "Rows a step: a device × processes × accumulated": [rows_of_step, rows_of_step],
        "Hardware": [hardware, hardware],
        "Time": ["1:30:00", "0:00:42"],
        "Software": [software, software],
        "Commit of the code": [commit, commit],
    }


def test_the_number_of_visual_tokens_is_the_processor_s(folder):
    card_text = render_card(folder).text
    (shown,) = re.findall(r"^An image is ([\d,]+) visual tokens", card_text, re.M)
    processor = AutoProcessor.from_pretrained(folder)
    inputs = processor(images=Image.new("RGB", (30, 20)), text="<image>", return_tensors="pt")
    expected = (inputs["input_ids"] == processor.image_token_id).sum()
    assert int(shown) == expected


def add_text(text, slot, words):
    """Returns a card's text with words in a place that the author fills."""
    return text.replace(f"{slot} -->\n", f"{slot} -->\n{words}")


@pytest.fixture
def edited_card(full):
    """A card that was written again after its author had added texts and metadata."""
    card_text = write_card(full).text
    card_text = add_text(card_text, "introduction", INTRODUCTION)
    card_text = add_text(card_text, "notes", NOTES)
    card_text = card_text.replace("tags:\n", "tags:\n- mine\n")
    card_text = card_text.replace("---\n", "---\nthumbnail: a.png\nextra: [1, {b: c}]\n", 1)
    (full / "README.md").write_bytes(card_text.encode())
    return write_card(full)


INTRODUCTION = "Hello | <b>you</b> {{ x }} {% y %}\r\n\n\n\n"
NOTES = "```\n<!-- a -->\n``` \u00e9\n"


def test_a_new_card_has_empty_places_for_the_author(full):
    assert by_hand(write_card(full).text) == {"introduction": "", "notes": ""}


def test_what_the_author_wrote_is_kept_byte_for_byte(full, edited_card):
    assert by_hand(edited_card.text) == {"introduction": INTRODUCTION, "notes": NOTES}
    assert (full / "README.md").read_bytes() == edited_card.text.encode()
    assert write_card(full).text == edited_card.text


def test_metadata_that_the_author_added_are_kept(edited_card):
    metadata = data(edited_card)
    assert metadata["thumbnail"] == "a.png"
    assert metadata["extra"] == [1, {"b": "c"}]
    assert "mine" in metadata["tags"]


def test_what_no_longer_follows_from_the_folder_is_not_taken_for_the_author_s(full, edited_card):
    assert data(edited_card).keys() >= {"datasets", "language", "model-index"}
    (full / "training.json").unlink()
    shutil.rmtree(full / "evaluation")
    metadata = data(write_card(full))
    assert metadata.keys().isdisjoint({"datasets", "language", "model-index"})


@pytest.fixture
def card_text(full):
    """The text of a card without notes."""
    return render_card(full).text


@pytest.mark.parametrize("local_notes", ["", "mine\n", "theirs\n"])
@pytest.mark.parametrize("hub_notes", ["", " \n", "theirs\n"])
def test_the_text_on_the_hub_is_kept_if_it_has_one(full, card_text, local_notes, hub_notes):
    expected = local_notes
    if hub_notes.strip():
        expected = hub_notes
    (full / "README.md").write_text(add_text(card_text, "notes", local_notes))
    model_card = render_card(full, hub_card=add_text(card_text, "notes", hub_notes))
    assert by_hand(model_card.text) == {"introduction": "", "notes": expected}
    warned = "Text by hand on the Hub is kept: notes." in " ".join(model_card.warnings)
    assert warned == (bool(local_notes) and local_notes != expected)


@pytest.mark.parametrize("notes", ["", "mine\n", "theirs\n"])
def test_a_card_of_others_on_the_hub_has_no_text_that_is_kept(full, card_text, notes):
    (full / "README.md").write_text(add_text(card_text, "notes", notes))
    model_card = render_card(full, hub_card="# Of somebody else")
    assert by_hand(model_card.text)["notes"] == notes


@pytest.mark.parametrize("notes", ["", " \n", "theirs\n"])
def test_a_card_on_the_hub_whose_text_has_no_end_is_refused(full, card_text, notes):
    hub_card = add_text(card_text, "notes", notes).replace("<!-- end by hand -->", "")
    with pytest.raises(ValueError, match="README.md of ann/m on the Hub has .* without end"):
        render_card(full, repo_id="ann/m", hub_card=hub_card)


@pytest.mark.parametrize(
    ("mark", "slip"),
    [
        ("<!-- end by hand -->", ""),
        ("notes -->", "note -->"),
        ("notes -->", "introduction -->"),
    ],
)
def test_nothing_by_hand_is_lost_to_a_slip(full, mark, slip):
    card_text = write_card(full).text.replace(mark, slip)
    (full / "README.md").write_text(card_text)
    with pytest.raises(ValueError, match="by hand"):
        write_card(full)
    assert (full / "README.md").read_text() == card_text


THEIRS = "---\nlicence: license\ntags: [trl]\n---\n# Model Card for stage2\n"


def test_a_card_of_others_is_not_written_over(full):
    (full / "README.md").write_text(THEIRS)
    with pytest.raises(ValueError, match="--replace"):
        write_card(full)
    assert (full / "README.md").read_text() == THEIRS
    assert not is_ours(THEIRS)


def test_a_card_of_others_is_replaced_if_that_is_asked_for(full):
    (full / "README.md").write_text(THEIRS)
    model_card = write_card(full, replace=True)
    assert is_ours(model_card.text)
    assert "trl" not in data(model_card)["tags"]
    assert (full / "README.md").read_bytes() == model_card.text.encode()


EVIL = (
    "a|b <script>alert(1)</script> `c` {{ 7 * 7 }} *d* [e](f) ~~g~~ $h$\n\n---\n# i "
    "<!-- end by hand --> \\| \u202e"
)
COUNTED_TOKENS = (
    "s_open",
    "link_open",
    "image",
    "html_inline",
    "table_open",
    "th_open",
    "heading_open",
    "hr",
)


def write_evil_records(folder):
    """Sets every name that a card shows to one that has markup in it."""
    card_folder.licensed(folder, EVIL, None, vision=EVIL, language=EVIL)
    card_folder.trained(
        folder,
        {"id": EVIL, "license": EVIL},
        options={"dataset_name": f"{EVIL}\n```\n# j", "seed": EVIL},
    )
    card_folder.evaluated(folder, date=EVIL, versions={EVIL: EVIL})
    report = read_report(folder)
    report["report"]["data"] = EVIL
    report["against"]["model"] = EVIL
    report["verdict"][0] = EVIL
    report["figures"][0] |= {"title": EVIL, "caption": EVIL}
    card_folder.edit(folder / "diagnostics" / "report.json", **report)


@pytest.fixture
def clean_and_evil_cards(full):
    clean_card = render_card(full)
    write_evil_records(full)
    return clean_card, render_card(full, repo_id=EVIL)


def all_tokens(card):
    """Returns the tokens of a card's text and those inside them."""
    parsed_tokens = tokens(ModelCard(card.text).text)
    for markdown_token in list(parsed_tokens):
        parsed_tokens += markdown_token.children or ()
    return parsed_tokens


def count_structure(card):
    """Counts the tokens that make links, tables, titles. None may be a script."""
    counts = Counter()
    for markdown_token in all_tokens(card):
        assert not ("html" in markdown_token.type and "script" in markdown_token.content)
        if markdown_token.type in COUNTED_TOKENS:
            counts[markdown_token.type] += 1
    return counts


def test_names_add_no_structure_whatever_is_in_them(clean_and_evil_cards):
    clean_card, evil_card = clean_and_evil_cards
    clean_counts = count_structure(clean_card)
    evil_counts = count_structure(evil_card)
    assert not evil_counts - clean_counts
    # The encoder, the language model and the data have lost the links that their Hub ids had.
    lost = clean_counts - evil_counts
    assert set(lost) <= {"link_open"}


def test_names_do_not_end_what_is_by_hand_nor_change_the_tags(clean_and_evil_cards):
    clean_card, evil_card = clean_and_evil_cards
    assert by_hand(evil_card.text) == by_hand(clean_card.text)
    assert data(evil_card)["tags"] == data(clean_card)["tags"]


def test_names_are_text_whatever_is_in_them(clean_and_evil_cards):
    _, evil_card = clean_and_evil_cards
    assert "alert(1)" in evil_card.text
    assert "{{ 7 * 7 }}" in evil_card.text
    (literal,) = re.findall(
        r"^checkpoint, revision = (.*), \"main\"$",
        evil_card.text,
        re.MULTILINE,
    )
    assert ast.literal_eval(literal) == EVIL
    assert "\u202e" not in literal


PROTOCOL = re.compile("<summary>Protocol</summary>\n\n(.*?)\n\n</details>", re.DOTALL)


def test_a_protocol_is_folded_and_its_prompt_is_text(full):
    prompt = 'The first prompt is "<image>\\nWhat is $5 & `a_b`? A|B **or** [c](d)"'
    card_folder.evaluated(full, protocol=[prompt])
    card_text = render_card(full).text
    folded = PROTOCOL.search(card_text)[1]
    (inline,) = [parsed for parsed in tokens(folded) if parsed.type == "inline"]
    shown = "".join(inner_token.content for inner_token in inline.children)
    assert shown == prompt
    assert not re.search(r"&#?\w+;", card_text)


@pytest.fixture
def adapter_folder(tmp_path):
    """The folder of an adapter that was trained on a folder."""
    card_folder.trained(tmp_path)
    card_folder.edit(
        tmp_path / "adapter_config.json",
        peft_type="LORA",
        r=8,
        base_model_name_or_path="outputs/stage1",
    )
    save_file({}, tmp_path / "adapter_model.safetensors")
    return tmp_path


def test_an_adapter_says_what_it_is_loaded_on(adapter_folder):
    model_card = render_card(adapter_folder, repo_id="user/adapter", base=PINNED)
    metadata = data(model_card)
    assert metadata["base_model"] == ["user/base"]
    assert metadata["base_model_relation"] == "adapter"
    assert metadata["library_name"] == "peft"
    assert "license" not in metadata
    assert f'base, base_revision = "user/base", "{"a" * 40}"' in model_card.text


def test_an_adapter_with_its_base_s_record_of_building_has_the_parts_licences(adapter_folder):
    card_folder.licensed(adapter_folder, "mit", "mit", vision="encoder")
    model_card = render_card(adapter_folder, base=PINNED)
    assert "base model" not in rows(section(model_card, "Licence"))
    assert "No Hub id is recorded" not in " ".join(model_card.warnings)


def test_an_adapter_on_a_folder_is_to_be_merged(adapter_folder):
    model_card = render_card(adapter_folder)
    assert "outputs" not in model_card.text
    assert "```python" not in model_card.text
    assert "normalign merge" in model_card.text
    metadata = data(model_card)
    assert metadata["library_name"] == "peft"
    assert "base_model" not in metadata
    assert "base_model_relation" not in metadata
    assert "base is not on the Hub" in " ".join(model_card.warnings)


@pytest.fixture
def trained_from_the_hub(full):
    """A folder whose training started from a commit of a model on the Hub."""
    card_folder.trained(
        full,
        options={"model_name_or_path": "user/stage1"},
        model_revision="f" * 40,
    )
    return full


def test_a_model_trained_on_from_the_hub_names_what_it_started_from(trained_from_the_hub):
    metadata = metadata_of(trained_from_the_hub)
    assert metadata["base_model"] == ["user/stage1"]
    assert metadata["base_model_relation"] == "finetune"


def test_an_adapter_trained_from_the_hub_is_loaded_on_that_commit(trained_from_the_hub):
    folder = trained_from_the_hub
    (folder / "config.json").unlink()
    card_folder.edit(folder / "adapter_config.json", peft_type="LORA", r=8)
    save_file({}, folder / "adapter_model.safetensors")
    expected = f'base, base_revision = "user/stage1", "{"f" * 40}"'
    assert expected in render_card(folder).text


@pytest.fixture
def llava_folder(tmp_path):
    folder = Path(tiny_parts.llava(tmp_path / "llava", tiny.llava(tied=False)))
    (folder / "README.md").write_text("---\nlicense: mit\n---\n")
    return folder


def test_a_retrofit_is_one_part(tmp_path, llava_folder):
    retrofit_checkpoint(str(llava_folder), tmp_path / "built")
    model_card = render_card(tmp_path / "built")
    assert rows(section(model_card, "Licence"))["LLaVA checkpoint"] == ["llava", "mit"]
    assert data(model_card)["license"] == "mit"
    assert "**not been trained since**" in model_card.text


def test_a_retrofit_without_a_norm_was_trained(tmp_path, llava_folder):
    retrofit_checkpoint(str(llava_folder), tmp_path / "none", arm="none")
    expected = "How it was trained is not recorded here.\nIt is made from llava."
    assert expected in render_card(tmp_path / "none").text


@pytest.fixture
def one_base_card(folder):
    """A card of a model of which only the encoder's Hub id is known."""
    card_folder.edit(folder / "build.json", vision="google/encoder")
    return write_card(folder)


def name_second_base(folder):
    """Adds a base by hand."""
    card_path = folder / "README.md"
    card_text = card_path.read_text()
    line = "- google/encoder\n"
    card_path.write_text(card_text.replace(line, f"{line}- Qwen/decoder\n", 1))


def test_a_base_that_is_not_known_is_asked_for(one_base_card):
    assert data(one_base_card)["base_model"] == ["google/encoder"]
    assert "base_model:" in str(one_base_card.warnings)


def test_a_base_that_the_author_names_is_kept(folder, one_base_card):
    name_second_base(folder)
    for _ in range(2):
        model_card = write_card(folder)
        assert data(model_card)["base_model"] == ["google/encoder", "Qwen/decoder"]
        assert "base_model:" not in str(model_card.warnings)


def test_bases_that_follow_from_the_folder_are_not_the_author_s(folder, one_base_card):
    name_second_base(folder)
    write_card(folder)
    card_folder.edit(folder / "build.json", language="Qwen/decoder")
    assert data(write_card(folder))["base_model_relation"] == "merge"

    card_path = folder / "README.md"
    by_author = card_path.read_text().replace("- Qwen/decoder\n", "- my/decoder\n", 1)
    card_path.write_text(by_author)
    assert data(write_card(folder))["base_model"] == ["google/encoder", "Qwen/decoder"]


NOT_TRAINED = "**not trained**"


def test_a_model_that_was_not_trained_is_called_so(folder):
    assert NOT_TRAINED in render_card(folder).text


def test_a_model_whose_gain_is_not_at_its_start_was_trained(folder):
    card_folder.edit(folder / "config.json", projector_gain_init="one")
    assert "How it was trained is not recorded here." in render_card(folder).text
    licences = table_of(folder, "Licence")
    assert licences["data"] == ["what it was trained on", "not recorded"]


def test_a_model_whose_bias_is_not_at_its_start_was_trained(folder):
    card_folder.edit(folder / "config.json", projector_gain_init="one")
    card_folder.normed(folder, 1.0)
    assert NOT_TRAINED in render_card(folder).text
    card_folder.normed(folder, 1.0, bias=0.5)
    assert NOT_TRAINED not in render_card(folder).text


def measurements_of(folder):
    """Returns the table of measured alignment."""
    return rows(section(render_card(folder), "Measured alignment").partition("A ± ")[0])


def test_measured_alignment(full):
    card_folder.normed(full, -0.25, 0.5)
    card_folder.edit(full / "config.json", text_embedding_norm=3.2)  # 3.2 / √32 is 0.5657
    card_folder.measured(full, diagnosed(37.0, "layer_norm", "other"))
    measurements = measurements_of(full)

    rotation_cells = measurements.pop("Rotation by layer, visual over text")
    rotation, _, standard_error = rotation_cells[1].split()
    assert float(rotation) < 0.9
    assert float(standard_error) == 0.01
    assert measurements == {
        "": ["this model", "baseline: other"],
        "Mean norm of text embeddings, N_text": ["3.200", "1.080"],
        "Gain at the start, every element": ["0.5657", "0.01970"],
        "Gain now, mean magnitude": ["0.2500", "0.04000"],
        "Bias now, mean magnitude (0 at the start)": ["0.50", "0.015"],
        "Norm of visual tokens as they enter": ["1.10 (σ 0.021)", "40.0 (σ 0.021)"],
        "Norm of text tokens in the same data": ["1.23 (σ 0.11)", "1.23 (σ 0.11)"],
        "Norm, visual over N_text": ["1.02", "37.0"],
        "Norm, visual over text in the same data": ["0.893", "32.4"],
    }


def test_what_a_diagnosis_lacks_has_no_number(full):
    report = read_report(full)
    for model_report in (report["report"], report["against"]):
        model_report["interface"] |= {"text": None, "ratio_data": None}
    report["against"]["interface"]["vocabulary"] = None
    card_folder.edit(full / "diagnostics" / "report.json", **report)

    measurements = measurements_of(full)
    assert measurements["Mean norm of text embeddings, N_text"][1] == "–"
    assert len(measurements["Norm of visual tokens as they enter"]) == 2
    for measure in measurements:
        assert not measure.startswith("Norm of text tokens")
        assert "over text in the same data" not in measure


def limits_of(folder):
    limits = listed(section(render_card(folder), "Limits"))
    return limits[:-1]  # the last is the same in every card


def assert_limits(folder, *expected):
    for words, sentence in zip(expected, limits_of(folder), strict=True):
        assert words in sentence


def test_limits(full):
    assert_limits(
        full,
        "one training run, seed 42",
        "Bias, safety",
        "64 samples of easy-VQA, held out, in bfloat16",
        "Not measured: Visual embedding tables: this model has none.",
    )


def test_a_diagnosis_without_a_baseline_is_a_limit(full):
    card_folder.measured(full, baseline=None)
    assert_limits(
        full,
        "one training run, seed 42",
        "Bias, safety",
        "64 samples of easy-VQA, held out, in bfloat16",
        "No baseline",
        "Not measured: Visual embedding tables: this model has none.",
    )


def is_called_stale(folder):
    return STALE in str(limits_of(folder))


def has_results_of_other_weights(folder):
    return "Evaluated with other" in str(limits_of(folder))


@pytest.fixture
def evaluated_folder(full):
    """A folder whose diagnosis and results are of its weights."""
    card_folder.evaluated(full, weights=files_hash(full, WEIGHT_FILES))
    return full


def test_a_diagnosis_and_results_of_the_weights_are_no_limit(evaluated_folder):
    assert not is_called_stale(evaluated_folder)
    assert not has_results_of_other_weights(evaluated_folder)
    assert "Diagnose again" not in warnings_of(evaluated_folder)


def test_a_diagnosis_and_results_of_other_weights_are_called_so(evaluated_folder):
    card_folder.normed(evaluated_folder, 3.0)
    assert is_called_stale(evaluated_folder)
    assert has_results_of_other_weights(evaluated_folder)
    assert "Diagnose again" in warnings_of(evaluated_folder)
    card_folder.measured(evaluated_folder)
    assert not is_called_stale(evaluated_folder)


@pytest.mark.parametrize(
    ("factor", "is_stale"),
    [
        (1.005, False),
        (1.02, True),
        (1 / 1.02, True),
    ],
)
def test_a_diagnosis_is_of_other_weights_if_the_gain_is_2_percent_apart(full, factor, is_stale):
    card_folder.normed(full, 3.0)
    card_folder.measured(full)
    gain = read_report(full)["report"]["gain"]["mean_abs"]
    card_folder.normed(full, gain * factor)
    assert is_called_stale(full) == is_stale


def test_a_diagnosis_with_another_norm_is_stale(full):
    assert not is_called_stale(full)
    card_folder.edit(full / "config.json", projector_norm="rms_norm")
    assert is_called_stale(full)
