"""The model card, sentence by sentence: each follows from what the folder records."""

import json
import re
from pathlib import Path
from urllib.parse import unquote

import card_folder as made
import pytest
import stored
import torch
import yaml
from card_folder import data, rows, section, tokens
from huggingface_hub import ModelCard
from safetensors.torch import save_file

from normalign_llava.checkpoint.files import ADAPTER_WEIGHTS
from normalign_llava.evaluation.results import Evaluation, Metric
from normalign_llava.hub_cards.card.facts import Facts, Part
from normalign_llava.hub_cards.card.metadata import terms
from normalign_llava.hub_cards.card.write import refresh_card, render_card, write_card


NAMED = {"license": "other", "license_name": "qwen", "license_link": "https://qwen.ai/terms"}
OTHER = {"license": "other", "license_name": "llama"}
HUB = "https://huggingface.co"


def licensed(folder, vision, language):
    """Names both parts, as the Hub has them, with licences as in its metadata."""
    licences = {"vision": vision, "language": language}
    names = {"vision": "google/encoder", "language": "Qwen/decoder"}
    made.edit(folder / "build.json", licenses=licences, **names)


def test_a_licence_with_a_name_of_its_own_is_known_by_that(folder):
    licensed(folder, NAMED, {**NAMED})
    card = render_card(folder)
    assert data(card).items() >= NAMED.items()
    assert "licence" not in " ".join(card.warnings) and "Its author states" not in card.text
    cells = rows(section(card, "Licence"))
    assert cells["language model"] == [f"[Qwen/decoder]({HUB}/Qwen/decoder)", made_link(NAMED)]
    licensed(folder, NAMED, OTHER)
    card = render_card(folder)
    assert data(card)["license"] == "other" and "license_name" not in data(card)
    (warning,) = (said for said in card.warnings if "licences of the parts differ" in said)
    assert "google/encoder (qwen)" in warning and "Qwen/decoder (llama)" in warning
    # Its author settles it.
    text = card.text.replace("license: other\n", "license: other\nlicense_name: mine\n")
    (folder / "README.md").write_text(text)
    card = render_card(folder)
    assert "Its author states: mine." in card.text
    assert not [said for said in card.warnings if "licence" in said]


def made_link(licence):
    return f"[{licence['license_name']}]({licence['license_link']})"


@pytest.mark.parametrize("unknown", ["unknown", "other", None])
def test_a_licence_that_is_not_known_is_told_by_the_part_s_name(folder, unknown):
    licensed(folder, {"license": unknown, "license_name": None}, {"license": "mit"})
    card = render_card(folder)
    assert "license" not in data(card) and "google/encoder" in card.warnings[0]
    assert "Qwen/decoder" not in card.warnings[0]
    assert "The licence of google/encoder is not recorded" in section(card, "Licence")


def test_an_empty_licence_of_the_author_settles_nothing(folder):
    (folder / "build.json").unlink()
    text = render_card(folder).text.replace("---\n", "---\nlicense: ''\n", 1)
    (folder / "README.md").write_text(text)
    card = render_card(folder)
    assert "No licence is known for its parts" in card.warnings[0]
    assert "Its author states" not in card.text


def test_parts_and_data_are_linked_at_their_commits_and_named_once(full):
    made.edit(full / "build.json", language_revision="e" * 40)
    text = section(render_card(full), "Licence")
    cells = rows(text)
    encoder = f"{HUB}/google/encoder"
    commit = "c" * 40
    assert cells["vision encoder"][0] == (
        f"[google/encoder]({encoder}) ([ccccccc]({encoder}/tree/{commit}))"
    )
    assert cells["language model"][0].endswith(f"([eeeeeee]({HUB}/Qwen/decoder/tree/{'e' * 40}))")
    source = f"{HUB}/datasets/user/data"
    commit = "b" * 40
    assert cells["data"][0] == f"[user/data]({source}) ([bbbbbbb]({source}/tree/{commit}))"
    assert text.count("| data |") == 1  # of two stages


def test_a_part_of_a_folder_has_no_link_and_its_name_is_asked_for(folder):
    made.licensed(folder, "mit", "mit", vision="encoder", language="decoder")
    card = render_card(folder)
    assert rows(section(card, "Licence"))["vision encoder"][0] == "encoder"
    assert "base_model" not in data(card)
    assert "No Hub id is recorded for encoder and decoder." in " ".join(card.warnings)
    made.licensed(folder, "mit", "mit", vision="encoder")
    card = render_card(folder)
    assert data(card)["base_model"] == ["Qwen/decoder"] and "base_model_relation" not in data(card)
    assert "No Hub id is recorded for encoder. " in " ".join(card.warnings)
    made.trained(folder, options={"model_name_or_path": "user/stage1"})
    assert "No Hub id" not in " ".join(render_card(folder).warnings)


def test_a_retrofit_is_finetuned_from_its_llava_alone(folder):
    made.licensed(folder, "mit", "apache-2.0", vision="user/llava", from_llava=True)
    card = render_card(folder)
    content = data(card)
    assert content["base_model"] == ["user/llava"] and content["base_model_relation"] == "finetune"
    assert content["license"] == "mit"
    assert "never trained" not in " ".join(card.warnings)


def test_a_projector_that_was_never_trained_is_warned_of(folder):
    warned = "never trained: its projector is random"
    assert warned in " ".join(render_card(folder).warnings)
    made.trained(folder)
    card = render_card(folder)
    assert warned not in " ".join(card.warnings) and "datasets" not in data(card)
    assert "one training run, seed 42:" in card.text  # of both stages


def test_a_gain_that_moved_by_a_little_was_trained(folder):
    made.edit(folder / "config.json", projector_gain_init="one")
    made.normed(folder, 1.0 + 1e-4)
    assert "**not trained**" not in render_card(folder).text
    made.normed(folder, 1.0)
    made.edit(folder / "config.json", projector_gain_init="text_norm", text_embedding_norm=None)
    card = render_card(folder)
    assert "How it was trained is not recorded here." in card.text  # its start is unknown
    assert "never trained" not in " ".join(card.warnings)


def recipes(card):
    """The options of each stage, as the card shows them."""
    blocks = re.findall("^```yaml\n(.*?)^```$", section(card, "Training"), re.DOTALL | re.MULTILINE)
    return [yaml.safe_load(block) for block in blocks]


def test_a_recipe_is_shown_with_the_learning_rates_that_were_derived(folder):
    options = {"seed": 7, "name": "a: b # c", "learning_rate": None}
    rates = {"projector": 0.001, "vision": 1e-05}
    made.trained(folder, options=options, learning_rates=rates)
    card = render_card(folder)
    first, second = recipes(card)
    assert first == {"seed": 42, "weight_decay": 0.0, "model_name_or_path": "built"}
    shown = {key: value if isinstance(value, str) else value for key, value in second.items()}
    assert float(shown.pop("vision_learning_rate")) == 1e-05  # YAML reads 1e-05 as a word
    assert shown == {**options, "projector_learning_rate": 0.001}
    assert re.findall("<summary>Recipe(.*), as", card.text) == [" of stage 1", " of stage 2"]
    assert "one training run, seed 42, 7:" in card.text


@pytest.mark.parametrize(("stage", "title"), [("align", "align"), (None, "training")])
def test_a_training_of_one_stage_is_called_by_its_name(folder, stage, title):
    made.trained(folder, before=None, stage=stage, steps_done=32, seconds=59.6, hardware=None)
    card = render_card(folder)
    table = rows(section(card, "Training"))
    assert table[""] == [title] and table["Steps"] == ["32"] and table["Time"] == ["0:01:00"]
    assert "Hardware" not in table and "<summary>Recipe, as" in card.text
    made.trained(folder, before=None, hardware={"machine": "x86_64 Linux"}, steps_done=0)
    table = rows(section(render_card(folder), "Training"))
    assert table["Hardware"] == ["x86_64 Linux"] and table["Steps"] == ["0 of 32"]


@pytest.mark.parametrize(
    ("counts", "shown"),
    [
        ({}, "a"),
        ({"found": 9}, "a"),
        ({"used": 7000}, "a, 7,000 rows"),
        ({"used": 0, "found": 9, "bad": 9}, "a, 0 of 9 rows (9 bad)"),
        ({"used": 5, "found": 9, "too_long": 4, "bad": 0}, "a, 5 of 9 rows (4 too long)"),
        ({"used": 5, "found": 9, "dataset": {"id": "user/a"}}, "user/a, 5 of 9 rows"),
    ],
    ids=str,
)
def test_rows_that_were_used_are_told_as_far_as_they_were_counted(folder, counts, shown):
    sources = [{"source": "a", "split": "train", **counts}, {"source": "b", "split": "train"}]
    made.trained(folder, data=sources, before=None)
    assert rows(section(render_card(folder), "Training"))["Data"] == [f"{shown}; b"]


@pytest.mark.parametrize(
    ("norm", "start", "compensation", "said"),
    [
        ("layer_norm", "text_norm", "global", ["a LayerNorm", "N_text", "In training, its gr"]),
        ("rms_norm", "text_norm", "none", ["a RMSNorm", "Its gradients", "ablation"]),
        ("layer_norm", "one", "none", ["A LayerNorm with a gain of 1", "ablation"]),
        ("layer_norm", "one", "global", ["a gain of 1", "compensated for the small", "ablation"]),
        ("none", "one", "none", ["projector alone, without a norm after it"]),
    ],
)
def test_the_method_is_told_by_the_configuration(folder, norm, start, compensation, said):
    fields = {"projector_norm": norm, "projector_gain_init": start, "text_embedding_norm": 3.2}
    made.edit(folder / "config.json", **fields, gradient_compensation=compensation)
    text = render_card(folder).text
    for words in said:
        assert words in text
    assert ("ablation" in text) == ("ablation" in said)
    assert ("compensated for the small gain" in text) == (compensation == "global")


def test_the_verdict_is_quoted_once(full):
    report = json.loads((full / "diagnostics" / "report.json").read_text())
    made.edit(full / "diagnostics" / "report.json", verdict=["First.", "Second."])
    assert "> **Measured:** First.\n> Second.\n" in render_card(full).text
    (full / "diagnostics" / "rotation.png").unlink()
    card = render_card(full)
    assert re.findall(r"\]\((diagnostics/.*?)\)", card.text) == ["diagnostics/interface.png"]
    (caption,) = (drawn["caption"] for drawn in report["figures"] if "interface" in drawn["file"])
    assert f"*Interface.* {caption}" in card.text


def test_an_evaluation_says_when_and_with_what_it_was_run(full):
    made.evaluated(full, date="2026-01-02", versions={"torch": "2.13", "lm_eval": "0.5"})
    assert "\n- Run on 2026-01-02 with torch 2.13, lm\\_eval 0.5.\n" in card_of(full)
    made.evaluated(full, date="2026-01-02")
    assert "\n- Run on 2026-01-02.\n" in card_of(full)
    made.evaluated(full, versions={"torch": "2.13"})
    assert "\n- Run with torch 2.13.\n" in card_of(full)
    made.evaluated(full)
    assert "- Run" not in card_of(full)


def card_of(folder):
    return render_card(folder).text.replace("lm_eval", "lm\\_eval")


def test_a_result_of_a_model_on_the_hub_counts_and_one_without_samples_is_told_so(full):
    metrics = [Metric("accuracy", 0.25, samples=1234), Metric("f1", 0.5)]
    Evaluation("gqa", "GQA", metrics, 9, 9, [], weights="user/m@" + "a" * 40).write(full)
    card = render_card(full, repo_id="user/model")
    results = ModelCard(card.text).data.eval_results
    assert {result.dataset_type for result in results} == {"gqa", "pope"}
    assert "Evaluated with other weights" not in card.text
    table = section(card, "Evaluation").partition("### GQA")[2].partition("<details>")[0]
    assert re.findall(r"^\| all .*", table, re.MULTILINE) == [
        "| all | accuracy | 0.250 | 1,234 |",
        "| all | f1 | 0.500 | – |",
    ]


def test_numbers_stand_on_the_right_and_words_on_the_left(full):
    table = section(render_card(full), "Evaluation")
    assert "\n| --- | --- | ---: | ---: | ---: | ---: |\n" in table


PROMPTS = ["# a", "1. b", "12) c", "- d", "+ e", "= f", "-", "---", "_g_ h_i", "~~j~~", "&amp; $k$"]
PROMPTS += ["1.5 l", "-m", "<n> [o](p)", "*q* `r`", "s\nt\u200b"]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_sentence_is_text_wherever_markup_could_begin(full, prompt):
    made.evaluated(full, protocol=[prompt])
    card = render_card(full).text
    folded = re.search("<summary>Protocol</summary>\n\n(.*?)\n\n</details>", card, re.DOTALL)[1]
    parsed = tokens(folded)
    kinds = {token.type.removesuffix("_open").removesuffix("_close") for token in parsed}
    assert kinds == {"bullet_list", "list_item", "paragraph", "inline"}
    (inline,) = (token for token in parsed if token.type == "inline")
    assert {child.type for child in inline.children} <= {"text", "text_special"}
    shown = "".join(child.content for child in inline.children)
    assert shown == prompt.replace("\n", " ").replace("\u200b", "")
    assert not re.search(r"(?<!\\)\$", folded)  # between two the Hub typesets a formula


def test_a_notice_with_spaces_in_its_name_is_linked(folder):
    file = folder / "notices" / "vision" / "LICENSE of (it).txt"
    file.parent.mkdir(parents=True)
    file.write_text("terms")
    parsed = tokens(section(render_card(folder), "Licence"))
    links = [
        child for token in parsed for child in token.children or () if child.type == "link_open"
    ]
    assert "notices/vision/LICENSE of (it).txt" in [unquote(link.attrs["href"]) for link in links]


@pytest.fixture
def adapter(tmp_path):
    """What a card of an adapter is made of."""
    folder = tmp_path / "adapter"
    folder.mkdir()
    made.trained(folder, options={"model_name_or_path": "user/stage1"})
    made.edit(folder / "adapter_config.json", peft_type="LORA", r=8)
    save_file({}, folder / "adapter_model.safetensors")
    return folder


def test_an_adapter_s_card_tells_what_training_recorded(adapter):
    text = render_card(adapter).text
    assert "This is an adapter of rank 8 with the projector in full" in text
    assert 'base, base_revision = "user/stage1", "main"' in text and "is not pinned here" in text
    assert "AutoProcessor.from_pretrained(base, revision=base_revision" in text
    assert "its gain starts from N_text" in text and "An image is" not in text
    assert "not compensated for the gain" in text and 'dtype="auto"' in text
    changes = {"gradient_compensation": "global", "projector_norm": "rms_norm"}
    changes["projector_gain_init"] = "text_norm"
    made.edit(adapter / "training.json", config_changes=changes, learning_rates={"vision": 1e-5})
    (adapter / "processor_config.json").write_text("{}")
    text = render_card(adapter).text
    assert "with the projector and the vision tower in full" in text
    assert "a RMSNorm after the projector" in text and "compensated for the small gain" in text
    assert "ablation" not in text
    assert '    gradient_compensation="global",  # as in training\n' in text
    assert "AutoProcessor.from_pretrained(adapter, revision=revision" in text
    pinned = Part("base model", "user/base", "user/base", "a" * 40)
    text = render_card(adapter, base=pinned, revision="trial", repo_id="me/adapter").text
    assert 'adapter, revision = "me/adapter", "trial"' in text and "is pinned here" in text


def test_of_an_adapter_the_norm_is_measured_and_its_settings_are_those_of_training(adapter):
    name = "base_model.model.model.multi_modal_projector.norm.weight"
    save_file({name: torch.tensor([-0.5, 0.25])}, adapter / ADAPTER_WEIGHTS)
    facts = Facts(adapter)
    assert facts.gain == {"start": None, "mean_abs": 0.375, "bias_mean_abs": None}
    assert facts.norm_moved is facts.config is None
    assert facts.setting("text_embedding_norm") == 3.2  # beside what was changed
    assert facts.setting("projector_norm") == "layer_norm"


def test_a_norm_without_a_bias_is_as_it_was_built(folder):
    weights = stored.weights(folder)
    del weights["model.multi_modal_projector.norm.bias"]
    stored.store(folder, weights)
    made.edit(folder / "config.json", projector_norm="rms_norm")
    facts = Facts(folder)
    assert facts.norm_moved is False and facts.gain["bias_mean_abs"] is None
    assert facts.gain["mean_abs"] == pytest.approx(facts.gain["start"])


def test_what_records_do_not_say_is_empty(full, monkeypatch):
    made.edit(full / "build.json", licenses=None)
    (full / "training.json").write_text('{"stage": "align"}')
    report = json.loads((full / "diagnostics" / "report.json").read_text())
    del report["report"]["norm"], report["report"]["gain"]
    made.edit(full / "diagnostics" / "report.json", **report)
    monkeypatch.chdir(full)
    facts = Facts(Path("."))
    assert facts.name == full.name and facts.data == [] and not facts.report_is_stale
    assert facts.stages == [{"stage": "align", "versions": {}, "options": {}}]
    assert [part.licence for part in facts.parts] == [{}, {}]
    assert facts.started_from is None and facts.setting("projector_norm") == "layer_norm"


def test_a_part_of_unknown_licence_is_named_once():
    parts = [Part("vision encoder", "a"), Part("language model", "a"), Part("data", "b")]
    licence, sentence, warning = terms([*parts, Part("data", "c", licence={"license": "mit"})])
    assert licence == {} and "of a, b is not recorded" in sentence and "for a, b." in warning


FOUR = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}


@pytest.mark.parametrize(
    ("quantization", "options"),
    [
        (FOUR, {"load_in_4bit": "True", "quant_type": '"nf4"', "use_double_quant": "True"}),
        ({"load_in_4bit": True}, {"quant_type": '"fp4"', "use_double_quant": "False"}),
        ({"load_in_8bit": True}, {"load_in_8bit": "True"}),
    ],
)
def test_the_base_of_an_adapter_is_quantized_as_in_training(adapter, quantization, options):
    made.edit(adapter / "training.json", quantization=quantization)
    text = render_card(adapter).text
    (snippet,) = re.findall("^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    compile(snippet, "snippet", "exec")
    for name, value in options.items():
        assert f"{name}={value}" in snippet
    assert ("4bit" in snippet) == ("load_in_4bit" in quantization)
    assert "dtype=half" in snippet and "import BitsAndBytesConfig" in snippet.replace(
        "AutoModelForImageTextToText, AutoProcessor, ", ""
    )


def test_what_the_author_added_on_the_hub_comes_before_the_folder_s(full):
    text = write_card(full).text
    here, there = (
        text.replace("---\n", f"---\nthumbnail: {name}.png\n{name}: 1\n", 1) for name in "ab"
    )
    (full / "README.md").write_text(here)
    content = data(render_card(full, hub_card=there))
    assert (content["thumbnail"], content["a"], content["b"]) == ("b.png", 1, 1)
    somebody = "---\nthumbnail: c.png\n---\n# Mine\n"
    assert data(render_card(full, hub_card=somebody))["thumbnail"] == "a.png"


def test_a_card_of_front_matter_alone_is_replaced(folder):
    file = folder / "README.md"
    file.write_text("---\nlicense: mit\n---\n\n")  # as the Hub makes one
    assert write_card(folder).text == file.read_text()
    assert "\n# tiny-normalign\n" in file.read_text()


def test_a_card_is_read_with_a_mark_of_its_encoding(folder):
    text = write_card(folder).text.replace("---\n", "---\nthumbnail: a.png\n", 1)
    (folder / "README.md").write_text(text, encoding="utf-8-sig")
    assert data(render_card(folder))["thumbnail"] == "a.png"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"---\nlicense: \xff\n---\n", "README.md.* Save it as UTF-8"),
        (b"---\na: [\n---\n<!-- normalign card, metadata: tags -->\n", "front matter of README.md"),
    ],
)
def test_a_card_that_cannot_be_read_is_named_and_stays(folder, content, said):
    (folder / "README.md").write_bytes(content)
    with pytest.raises(ValueError, match=said):
        write_card(folder)
    assert (folder / "README.md").read_bytes() == content


def test_a_card_is_written_for_a_name_that_the_hub_could_have(folder):
    with pytest.raises(ValueError, match="a b/c"):
        write_card(folder, repo_id="a b/c")
    with pytest.raises(ValueError, match="absent"):
        write_card(folder / "absent")
    assert not (folder / "README.md").exists()
    text = write_card(folder, repo_id="user/m").text
    assert 'checkpoint, revision = "user/m", "main"' in text and "\n# m\n" in text


def test_a_card_of_ours_is_rendered_again_and_no_other(folder):
    file = folder / "README.md"
    refresh_card(folder)
    assert not file.exists()
    file.write_text("# Mine\n")
    refresh_card(folder)
    assert file.read_text() == "# Mine\n"
    write_card(folder, replace=True)
    made.trained(folder)
    refresh_card(folder)
    assert "## Training" in file.read_text()


def test_records_of_any_type_are_a_fault_of_the_folder(folder):
    made.edit(folder / "training.json", stage="align", data=3)
    with pytest.raises(ValueError, match=f"What {re.escape(str(folder))} records of itself"):
        render_card(folder)
    assert Path(folder).is_dir()
