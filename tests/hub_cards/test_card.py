"""The model card: filled from the folder alone, valid on the Hub, kind to what people write."""

import ast
import json
import re
import shutil
from collections import Counter
from pathlib import Path

import card_folder as made
import pytest
import tiny
import tiny_parts as parts
from card_folder import data, listed, rows, section, tokens
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


def test_a_bare_checkpoint_has_a_short_and_honest_card(folder):
    (folder / "build.json").unlink()
    card = render_card(folder)
    expected = {"library_name": "transformers", "pipeline_tag": "image-text-to-text", "tags": TAGS}
    assert data(card) == expected and "license" in card.warnings[0]
    titles = re.findall("^## (.*)", card.text, re.MULTILINE)
    assert titles == ["Use", "Measured alignment", "Limits", "Licence", "Citation"]
    for words in ("How it was trained is not", "No evaluation is", "were not measured on this"):
        assert words in card.text
    for word in ("None", "undefined", "nan", "\n\n\n", "stage 1"):
        assert word not in card.text


def test_a_full_folder_has_all_metadata_and_figures_without_samples(full):
    card = render_card(full, repo_id="user/model")
    expected = {"base_model": ["google/encoder", "Qwen/decoder"], "base_model_relation": "merge"}
    expected |= {"datasets": ["user/data"], "language": ["en", "de"], "license": "apache-2.0"}
    assert data(card).items() >= expected.items()
    figures = re.findall(r"\]\((diagnostics/.*?)\)", card.text)
    assert figures == ["diagnostics/interface.png", "diagnostics/rotation.png"]
    assert made.SECRET not in card.text and "What shape is in the image?" not in card.text


@pytest.mark.parametrize(
    "vision, language, dataset, expected",
    [
        ("mit", "mit", "mit", "mit"),
        ("mit", "apache-2.0", "bsd-3-clause", "apache-2.0"),
        ("mit", "bsd-3-clause", None, None),
        (None, "mit", "mit", None),
        ("other", "other", "other", None),
        ("apache-2.0", "llama3.2", "apache-2.0", "other"),
        ("apache-2.0", "apache-2.0", "cc-by-nc-4.0", "other"),
    ],
)
def test_licences(folder, vision, language, dataset, expected):
    made.licensed(folder, vision, language)
    made.trained(folder, {"id": "user/data", "license": dataset})
    card = render_card(folder)
    assert data(card).get("license") == expected
    assert bool(card.warnings) == (expected in (None, "other"))
    assert rows(section(card, "Licence"))["language model"][1] == language
    if expected in (None, "other"):
        text = card.text.replace("license: other\n", "")
        (folder / "README.md").write_text(text.replace("---\n", "---\nlicense: gemma\n", 1))
        card = render_card(folder)
        assert data(card)["license"] == "gemma" and not card.warnings
        assert "Its author states: gemma." in card.text


def source(name, split, **dataset):
    return {"source": name, "split": split, "found": 9, "used": 7, "dataset": dataset}


def test_held_out_data_is_not_what_it_was_trained_on(folder):
    made.licensed(folder, "mit", "mit")
    learned = source("a", "train", id="user/data", license="mit", language=["en"])
    held_out = source("b", "eval", id="user/test", license="cc-by-nc-4.0", language=["de"])
    unknown = {"source": "c", "used": 3}
    data_of = [learned, held_out, unknown]
    made.edit(folder / "training.json", stage="align", data=data_of, options={})
    card = render_card(folder)
    content = data(card)
    assert (content["datasets"], content["language"]) == (["user/data"], ["en"])
    assert content["license"] == "mit" and "user/test" not in section(card, "Licence")
    table = rows(section(card, "Training"))
    assert table["Data"] == ["user/data, 7 of 9 rows"]
    assert table["Held-out data"] == ["user/test, 7 of 9 rows; c, 3 rows"]


@pytest.mark.parametrize("second, expected", [(["de"], ["en", "de"]), ([], None), (None, None)])
def test_languages_are_named_if_those_of_all_data_are_known(folder, second, expected):
    sources = [source("a", "train", id="user/a", language=["en"])]
    sources.append(source("b", "train", id="user/b", language=second))
    made.edit(folder / "training.json", stage="align", data=sources, options={})
    assert data(render_card(folder)).get("language") == expected


def test_notices_are_claimed_where_they_are(folder):
    made.licensed(folder, "mit", "apache-2.0")
    made.edit(folder / "training.json", stage="align", data=[], options={})
    told = "licences and notices that came with the parts"
    assert told not in (text := render_card(folder).text) and "notices stay" not in text
    file = folder / "notices" / "vision" / "LICENSE"
    file.parent.mkdir(parents=True)
    file.write_text("terms")
    card = render_card(folder)
    sentence = section(card, "Licence")
    assert told in sentence and "[notices/vision/LICENSE](notices/vision/LICENSE)." in sentence
    assert "notices/vision/LICENSE" in choose_files(folder, {}).files


def test_scores_on_whole_tasks_are_in_the_metadata(full):
    whole = [Metric("accuracy", 0.25)]
    of_part = [Metric("accuracy", 0.75)]
    Evaluation("gqa", "GQA", whole, 9, 9, [], weights="0" * 64).write(full)  # of other weights
    Evaluation("textvqa", "TextVQA", of_part, 5, 9, []).write(full)
    card = render_card(full, repo_id="user/model")
    content = ModelCard(card.text).data
    results = [
        (result.dataset_type, result.dataset_name, result.metric_name, result.metric_value)
        for result in content.eval_results
    ]
    assert content.model_name == "model"
    assert results == [
        ("pope", "POPE", "accuracy", 0.8125),
        ("pope", "POPE", "accuracy, adversarial", 0.7),
    ]
    assert "TextVQA" in card.text and "GQA" in card.text  # with what is wrong with them
    (full / "README.md").write_text(card.text)
    shutil.rmtree(full / "evaluation")
    assert "model-index" not in data(render_card(full))


def test_the_table_of_an_evaluation_has_what_was_recorded(full):
    text = section(render_card(full), "Evaluation")
    assert rows(text) == {
        "": ["metric", "this model", "blank image", "commonest answer", "n"],
        "all": ["accuracy", "0.81\xa0±\xa00.02", "0.500", "0.510", "500"],
        "adversarial": ["accuracy", "0.70\xa0±\xa00.03", "0.400", "–", "250"],
    }
    assert "**Partial" not in text
    Evaluation("pope", "POPE", [Metric("accuracy", 0.5)], 5, 9, []).write(full)
    assert "**Partial: 5 of 9 samples.**" in section(render_card(full), "Evaluation")


def test_the_table_of_training_has_what_was_recorded(full):
    made.trained(full, steps_done=30)
    table = rows(section(render_card(full), "Training"))
    trained = "projector 0.001, norm 0.002"
    frozen = "vision tower, language model"
    first, second = table.pop("Data")
    assert first == "first, 500 of 505 rows (3 bad, 2 too long)"
    assert second == "second, 60 of 60 rows"
    assert table == {
        "": ["stage 1 (align)", "stage 2 (tune)"],
        "Trained, at a peak learning rate": [trained] * 2,
        "Frozen": [frozen] * 2,
        "Steps": ["32", "30 of 32"],
        "Rows a step: a device × processes × accumulated": ["16 (4 × 2 × 2)"] * 2,
        "Hardware": ["2 × NVIDIA H200, x86_64 Linux"] * 2,
        "Time": ["1:30:00", "0:00:42"],
        "Software": ["torch 2.13.0, normalign_llava 0.1.0"] * 2,
        "Commit of the code": ["d" * 40] * 2,
    }


def test_the_number_of_visual_tokens_is_the_processor_s(folder):
    (told,) = re.findall(r"^An image is ([\d,]+) visual tokens", render_card(folder).text, re.M)
    processor = AutoProcessor.from_pretrained(folder)
    inputs = processor(images=Image.new("RGB", (30, 20)), text="<image>", return_tensors="pt")
    assert int(told) == (inputs["input_ids"] == processor.image_token_id).sum()


def test_what_the_author_wrote_is_kept_byte_for_byte(full):
    card = write_card(full)
    assert by_hand(card.text) == {"introduction": "", "notes": ""}
    introduction = "Hello | <b>you</b> {{ x }} {% y %}\r\n\n\n\n"
    notes = "```\n<!-- a -->\n``` \u00e9\n"
    text = card.text.replace("introduction -->\n", f"introduction -->\n{introduction}")
    text = text.replace("notes -->\n", f"notes -->\n{notes}").replace("tags:\n", "tags:\n- mine\n")
    text = text.replace("---\n", "---\nthumbnail: a.png\nextra: [1, {b: c}]\n", 1)
    (full / "README.md").write_bytes(text.encode())
    again = write_card(full)
    assert by_hand(again.text) == {"introduction": introduction, "notes": notes}
    assert (full / "README.md").read_bytes() == again.text.encode()
    content = data(again)
    assert content["thumbnail"] == "a.png" and content["extra"] == [1, {"b": "c"}]
    assert "mine" in content["tags"] and write_card(full).text == again.text
    # What followed from the folder and does no more is not taken for the author's.
    (full / "training.json").unlink()
    shutil.rmtree(full / "evaluation")
    assert not data(write_card(full)).keys() & {"datasets", "language", "model-index"}


@pytest.mark.parametrize("here", ["", "mine\n", "theirs\n"])
@pytest.mark.parametrize("there", ["", " \n", "theirs\n"])
def test_the_text_on_the_hub_is_kept_if_it_has_one(full, here, there):
    text = render_card(full).text
    expected = there if there.strip() else here
    hub_card = text.replace("notes -->\n", f"notes -->\n{there}")
    (full / "README.md").write_text(text.replace("notes -->\n", f"notes -->\n{here}"))
    card = render_card(full, hub_card=hub_card)
    assert by_hand(card.text) == {"introduction": "", "notes": expected}
    warned = "Text by hand on the Hub is kept: notes." in " ".join(card.warnings)
    assert warned == (bool(here) and here != expected)
    assert by_hand(render_card(full, hub_card="# Of somebody else").text)["notes"] == here
    with pytest.raises(ValueError, match="README.md of ann/m on the Hub has .* without end"):
        render_card(full, repo_id="ann/m", hub_card=hub_card.replace("<!-- end by hand -->", ""))


@pytest.mark.parametrize(
    "old, new",
    [("<!-- end by hand -->", ""), ("notes -->", "note -->"), ("notes -->", "introduction -->")],
)
def test_nothing_by_hand_is_lost_to_a_slip(full, old, new):
    text = write_card(full).text.replace(old, new)
    (full / "README.md").write_text(text)
    with pytest.raises(ValueError, match="by hand"):
        write_card(full)
    assert (full / "README.md").read_text() == text


def test_a_card_of_others_is_not_written_over(full):
    theirs = "---\nlicence: license\ntags: [trl]\n---\n# Model Card for stage2\n"
    (full / "README.md").write_text(theirs)
    with pytest.raises(ValueError, match="--replace"):
        write_card(full)
    assert (full / "README.md").read_text() == theirs
    card = write_card(full, replace=True)
    assert is_ours(card.text) and not is_ours(theirs) and "trl" not in data(card)["tags"]
    assert (full / "README.md").read_bytes() == card.text.encode()


EVIL = "a|b <script>alert(1)</script> `c` {{ 7 * 7 }} *d* [e](f) ~~g~~ $h$\n\n---\n# i "
EVIL += "<!-- end by hand --> \\| \u202e"
KINDS = ["s_open", "link_open", "image", "html_inline"]
KINDS += ["table_open", "th_open", "heading_open", "hr"]


def test_names_are_text_whatever_is_in_them(full):
    clean = render_card(full)
    made.licensed(full, EVIL, None, vision=EVIL, language=EVIL)
    options = {"dataset_name": EVIL + "\n```\n# j", "seed": EVIL}
    made.trained(full, {"id": EVIL, "license": EVIL}, options=options)
    made.evaluated(full, date=EVIL, versions={EVIL: EVIL})
    report = json.loads((full / "diagnostics" / "report.json").read_text())
    report["report"]["data"] = report["against"]["model"] = report["verdict"][0] = EVIL
    report["figures"][0] |= {"title": EVIL, "caption": EVIL}
    made.edit(full / "diagnostics" / "report.json", **report)
    card = render_card(full, repo_id=EVIL)
    structures = []
    for rendered in (card, clean):
        parsed = tokens(ModelCard(rendered.text).text)
        parsed += [child for token in parsed for child in token.children or ()]
        assert not [token for token in parsed if "html" in token.type and "script" in token.content]
        structures.append(Counter(token.type for token in parsed if token.type in KINDS))
    # The encoder, the language model and the data have lost the links that their Hub ids had.
    evil, plain = structures
    assert {*(plain - evil)} <= {"link_open"} and not evil - plain
    assert by_hand(card.text) == by_hand(clean.text)
    (snippet,) = re.findall(r"^checkpoint, revision = (.*), \"main\"$", card.text, re.MULTILINE)
    assert ast.literal_eval(snippet) == EVIL and "\u202e" not in snippet
    assert "alert(1)" in card.text and "{{ 7 * 7 }}" in card.text
    assert data(card)["tags"] == data(clean)["tags"]


def test_a_protocol_is_folded_and_its_prompt_is_text(full):
    prompt = 'The first prompt is "<image>\\nWhat is $5 & `a_b`? A|B **or** [c](d)"'
    made.evaluated(full, protocol=[prompt])
    card = render_card(full).text
    folded = re.search("<summary>Protocol</summary>\n\n(.*?)\n\n</details>", card, re.DOTALL)[1]
    (inline,) = (token for token in tokens(folded) if token.type == "inline")
    assert "".join(child.content for child in inline.children) == prompt
    assert not re.search(r"&#?\w+;", card)


def test_an_adapter_says_what_it_is_loaded_on(tmp_path):
    made.trained(tmp_path)
    settings = {"peft_type": "LORA", "r": 8, "base_model_name_or_path": "outputs/stage1"}
    made.edit(tmp_path / "adapter_config.json", **settings)
    save_file({}, tmp_path / "adapter_model.safetensors")
    card = render_card(tmp_path, repo_id="user/adapter", base=PINNED)
    content = data(card)
    assert content["base_model"] == ["user/base"] and content["base_model_relation"] == "adapter"
    assert content["library_name"] == "peft" and "license" not in content
    assert f'base, base_revision = "user/base", "{"a" * 40}"' in card.text
    made.licensed(tmp_path, "mit", "mit", vision="encoder")  # it has the base's record of building
    built = render_card(tmp_path, base=PINNED)
    assert "base model" not in rows(section(built, "Licence"))
    assert "No Hub id is recorded" not in " ".join(built.warnings)
    (tmp_path / "build.json").unlink()
    alone = render_card(tmp_path)
    assert "outputs" not in alone.text and "```python" not in alone.text
    assert "normalign merge" in alone.text and data(alone)["library_name"] == "peft"
    assert not data(alone).keys() & {"base_model", "base_model_relation"}
    assert "base is not on the Hub" in " ".join(alone.warnings)


def test_a_model_trained_on_from_the_hub_names_what_it_started_from(full):
    made.trained(full, options={"model_name_or_path": "user/stage1"}, model_revision="f" * 40)
    content = data(render_card(full))
    assert content["base_model"] == ["user/stage1"] and content["base_model_relation"] == "finetune"
    (full / "config.json").unlink()
    made.edit(full / "adapter_config.json", peft_type="LORA", r=8)
    save_file({}, full / "adapter_model.safetensors")
    assert f'base, base_revision = "user/stage1", "{"f" * 40}"' in render_card(full).text


def test_a_retrofit_is_one_part(tmp_path):
    llava = Path(parts.llava(tmp_path / "llava", tiny.llava(tied=False)))
    (llava / "README.md").write_text("---\nlicense: mit\n---\n")
    retrofit_checkpoint(str(llava), tmp_path / "built")
    card = render_card(tmp_path / "built")
    assert rows(section(card, "Licence"))["LLaVA checkpoint"] == ["llava", "mit"]
    assert data(card)["license"] == "mit" and "**not been trained since**" in card.text
    retrofit_checkpoint(str(llava), tmp_path / "none", arm="none")  # no norm added: it was trained
    told = "How it was trained is not recorded here.\nIt is made from llava."
    assert told in render_card(tmp_path / "none").text


def test_a_base_that_the_author_names_is_kept(folder):
    made.edit(folder / "build.json", vision="google/encoder")
    card = write_card(folder)
    assert data(card)["base_model"] == ["google/encoder"] and "base_model:" in str(card.warnings)
    line = "- google/encoder\n"
    (folder / "README.md").write_text(card.text.replace(line, f"{line}- Qwen/decoder\n", 1))
    for _ in range(2):
        card = write_card(folder)
        assert data(card)["base_model"] == ["google/encoder", "Qwen/decoder"]
        assert "base_model:" not in str(card.warnings)
    made.edit(folder / "build.json", language="Qwen/decoder")
    assert data(write_card(folder))["base_model_relation"] == "merge"
    text = (folder / "README.md").read_text().replace("- Qwen/decoder\n", "- my/decoder\n", 1)
    (folder / "README.md").write_text(text)  # what follows from the folder is not the author's
    assert data(write_card(folder))["base_model"] == ["google/encoder", "Qwen/decoder"]


def test_a_model_that_was_not_trained_is_called_so(folder):
    assert "**not trained**" in render_card(folder).text
    made.edit(folder / "config.json", projector_gain_init="one")
    card = render_card(folder)
    assert "How it was trained is not recorded here." in card.text
    assert rows(section(card, "Licence"))["data"] == ["what it was trained on", "not recorded"]
    made.normed(folder, 1.0)
    assert "**not trained**" in render_card(folder).text
    made.normed(folder, 1.0, bias=0.5)
    assert "**not trained**" not in render_card(folder).text


def limits(folder):
    return listed(section(render_card(folder), "Limits"))[:-1]  # the last is the same in every card


def test_measured_alignment(full):
    made.normed(full, -0.25, 0.5)
    made.edit(full / "config.json", text_embedding_norm=3.2)  # 3.2 / √32 is 0.5657
    made.measured(full, diagnosed(37.0, "layer_norm", "other"))
    table = rows(section(render_card(full), "Measured alignment").partition("A ± ")[0])
    text = "1.23 (σ 0.11)"
    rotation, _, error = table.pop("Rotation by layer, visual over text")[1].split()
    assert float(rotation) < 0.9 and float(error) == 0.01
    assert table == {
        "": ["this model", "baseline: other"],
        "Mean norm of text embeddings, N_text": ["3.200", "1.080"],
        "Gain at the start, every element": ["0.5657", "0.01970"],
        "Gain now, mean magnitude": ["0.2500", "0.04000"],
        "Bias now, mean magnitude (0 at the start)": ["0.50", "0.015"],
        "Norm of visual tokens as they enter": ["1.10 (σ 0.021)", "40.0 (σ 0.021)"],
        "Norm of text tokens in the same data": [text, text],
        "Norm, visual over N_text": ["1.02", "37.0"],
        "Norm, visual over text in the same data": ["0.893", "32.4"],
    }


def test_what_a_diagnosis_lacks_has_no_number(full):
    report = json.loads((full / "diagnostics" / "report.json").read_text())
    for model in (report["report"], report["against"]):
        model["interface"] |= {"text": None, "ratio_data": None}
    report["against"]["interface"]["vocabulary"] = None
    made.edit(full / "diagnostics" / "report.json", **report)
    table = rows(section(render_card(full), "Measured alignment").partition("A ± ")[0])
    assert table["Mean norm of text embeddings, N_text"][1] == "–"
    assert not [name for name in table if name.startswith("Norm of text tokens")]
    assert not [name for name in table if "over text in the same data" in name]
    assert len(table["Norm of visual tokens as they enter"]) == 2


def test_limits(full):
    def assert_limits(*expected):
        for words, sentence in zip(expected, limits(full), strict=True):
            assert words in sentence

    run = ["one training run, seed 42"]
    measured = ["Bias, safety", "64 samples of easy-VQA, held out, in bfloat16"]
    left_out = "Not measured: Visual embedding tables: this model has none."
    assert_limits(*run, *measured, left_out)
    made.measured(full, baseline=None)
    assert_limits(*run, *measured, "No baseline", left_out)


def test_a_diagnosis_and_results_of_other_weights_are_called_so(full):
    def told():
        return [words for words in (STALE, "Evaluated with other") if words in str(limits(full))]

    made.evaluated(full, weights=files_hash(full, WEIGHT_FILES))
    assert not told() and "Diagnose again" not in " ".join(render_card(full).warnings)
    made.normed(full, 3.0)
    assert len(told()) == 2 and "Diagnose again" in " ".join(render_card(full).warnings)
    made.measured(full)
    assert STALE not in told()
    gain = json.loads((full / "diagnostics" / "report.json").read_text())["report"]["gain"]
    for factor, is_stale in ((1.005, False), (1.02, True), (1 / 1.02, True)):
        made.normed(full, gain["mean_abs"] * factor)
        assert (STALE in told()) == is_stale
    made.measured(full)
    assert STALE not in told()
    made.edit(full / "config.json", projector_norm="rms_norm")
    assert STALE in told()
