"""The model card, sentence by sentence: each follows from what the folder records."""

import re
from pathlib import Path
from urllib.parse import unquote

import card_folder
import pytest
import stored
import torch
import yaml
from card_folder import data, metadata_of, read_report, rows, section, table_of, tokens, warnings_of
from huggingface_hub import ModelCard
from safetensors.torch import save_file

from normalign_llava.checkpoint.files import ADAPTER_WEIGHTS
from normalign_llava.evaluation.results import Evaluation, Metric
from normalign_llava.hub_cards.card.facts import Facts, Part
from normalign_llava.hub_cards.card.metadata import terms
from normalign_llava.hub_cards.card.write import refresh_card, render_card, write_card


HUB = "https://huggingface.co"


def text_of(folder):
    return render_card(folder).text


def change_report(folder, **changes):
    card_folder.edit(folder / "diagnostics" / "report.json", **changes)


def add_metadata(text, lines):
    """Returns a card's text with lines at the beginning of its metadata."""
    return text.replace("---\n", f"---\n{lines}", 1)


QWEN_LICENCE = {
    "license": "other",
    "license_name": "qwen",
    "license_link": "https://qwen.ai/terms",
}
LLAMA_LICENCE = {
    "license": "other",
    "license_name": "llama",
}


def name_licences(folder, vision, language):
    """Names both parts, as the Hub has them, with licences as in its metadata."""
    card_folder.edit(
        folder / "build.json",
        licenses={"vision": vision, "language": language},
        vision="google/encoder",
        language="Qwen/decoder",
    )


def test_a_licence_with_a_name_of_its_own_is_known_by_its_name(folder):
    name_licences(folder, QWEN_LICENCE, dict(QWEN_LICENCE))
    model_card = render_card(folder)
    assert data(model_card).items() >= QWEN_LICENCE.items()
    assert "licence" not in " ".join(model_card.warnings)
    assert "Its author states" not in model_card.text
    assert rows(section(model_card, "Licence"))["language model"] == [
        f"[Qwen/decoder]({HUB}/Qwen/decoder)",
        "[qwen](https://qwen.ai/terms)",
    ]


def test_licences_with_different_names_differ(folder):
    name_licences(folder, QWEN_LICENCE, LLAMA_LICENCE)
    model_card = render_card(folder)
    metadata = data(model_card)
    assert metadata["license"] == "other"
    assert "license_name" not in metadata
    (warning,) = [
        message for message in model_card.warnings if "licences of the parts differ" in message
    ]
    assert "google/encoder (qwen)" in warning
    assert "Qwen/decoder (llama)" in warning


def test_the_author_names_the_licence_where_those_of_the_parts_differ(folder):
    name_licences(folder, QWEN_LICENCE, LLAMA_LICENCE)
    by_author = text_of(folder).replace("license: other\n", "license: other\nlicense_name: mine\n")
    (folder / "README.md").write_text(by_author)
    model_card = render_card(folder)
    assert "Its author states: mine." in model_card.text
    assert "licence" not in " ".join(model_card.warnings)


@pytest.mark.parametrize("unknown", ["unknown", "other", None])
def test_a_licence_that_is_not_known_is_told_by_the_part_s_name(folder, unknown):
    vision_licence = {"license": unknown, "license_name": None}
    name_licences(folder, vision_licence, {"license": "mit"})
    model_card = render_card(folder)
    assert "license" not in data(model_card)
    assert "google/encoder" in model_card.warnings[0]
    assert "Qwen/decoder" not in model_card.warnings[0]
    assert "The licence of google/encoder is not recorded" in section(model_card, "Licence")


def test_an_empty_licence_of_the_author_settles_nothing(folder):
    (folder / "build.json").unlink()
    (folder / "README.md").write_text(add_metadata(text_of(folder), "license: ''\n"))
    model_card = render_card(folder)
    assert "No licence is known for its parts" in model_card.warnings[0]
    assert "Its author states" not in model_card.text


@pytest.fixture
def licence_section(full):
    """The section of a folder whose parts and data have commits."""
    card_folder.edit(full / "build.json", language_revision="e" * 40)
    return section(render_card(full), "Licence")


def linked_commit(name, address, commit):
    return f"[{name}]({address}) ([{commit[:7]}]({address}/tree/{commit}))"


def test_parts_are_linked_at_their_commits(licence_section):
    licences = rows(licence_section)
    vision = linked_commit("google/encoder", f"{HUB}/google/encoder", "c" * 40)
    language = linked_commit("Qwen/decoder", f"{HUB}/Qwen/decoder", "e" * 40)
    assert licences["vision encoder"][0] == vision
    assert licences["language model"][0] == language


def test_data_are_linked_at_their_commit_and_named_once(licence_section):
    dataset = linked_commit("user/data", f"{HUB}/datasets/user/data", "b" * 40)
    assert rows(licence_section)["data"][0] == dataset
    assert licence_section.count("| data |") == 1  # of two stages


def test_a_part_of_a_folder_has_no_link_and_its_name_is_asked_for(folder):
    card_folder.licensed(folder, "mit", "mit", vision="encoder", language="decoder")
    model_card = render_card(folder)
    assert rows(section(model_card, "Licence"))["vision encoder"][0] == "encoder"
    assert "base_model" not in data(model_card)
    assert "No Hub id is recorded for encoder and decoder." in " ".join(model_card.warnings)


def test_where_one_part_is_of_a_folder_the_other_is_the_base(folder):
    card_folder.licensed(folder, "mit", "mit", vision="encoder")
    model_card = render_card(folder)
    assert data(model_card)["base_model"] == ["Qwen/decoder"]
    assert "base_model_relation" not in data(model_card)
    assert "No Hub id is recorded for encoder. " in " ".join(model_card.warnings)


def test_no_id_of_a_part_is_asked_for_where_training_started_from_the_hub(folder):
    card_folder.licensed(folder, "mit", "mit", vision="encoder")
    card_folder.trained(folder, options={"model_name_or_path": "user/stage1"})
    assert "No Hub id" not in warnings_of(folder)


def test_a_retrofit_is_finetuned_only_from_its_llava(folder):
    card_folder.licensed(
        folder,
        "mit",
        "apache-2.0",
        vision="user/llava",
        from_llava=True,
    )
    model_card = render_card(folder)
    metadata = data(model_card)
    assert metadata["base_model"] == ["user/llava"]
    assert metadata["base_model_relation"] == "finetune"
    assert metadata["license"] == "mit"
    assert "never trained" not in " ".join(model_card.warnings)


NEVER_TRAINED = "never trained: its projector is random"


def test_a_projector_that_was_never_trained_is_warned_of(folder):
    assert NEVER_TRAINED in warnings_of(folder)


def test_a_projector_that_was_trained_is_not_warned_of(folder):
    card_folder.trained(folder)
    model_card = render_card(folder)
    assert NEVER_TRAINED not in " ".join(model_card.warnings)
    assert "datasets" not in data(model_card)
    assert "one training run, seed 42:" in model_card.text  # of both stages


def test_a_gain_that_moved_by_a_little_was_trained(folder):
    card_folder.edit(folder / "config.json", projector_gain_init="one")
    card_folder.normed(folder, 1.0 + 1e-4)
    assert "**not trained**" not in text_of(folder)


def test_where_the_start_of_the_gain_is_unknown_so_is_training(folder):
    card_folder.normed(folder, 1.0)
    card_folder.edit(
        folder / "config.json",
        projector_gain_init="text_norm",
        text_embedding_norm=None,
    )
    model_card = render_card(folder)
    assert "How it was trained is not recorded here." in model_card.text
    assert "never trained" not in " ".join(model_card.warnings)


def shown_recipes(card):
    """Returns the options of each stage, as the card shows them."""
    training_section = section(card, "Training")
    blocks = re.findall("^```yaml\n(.*?)^```$", training_section, re.DOTALL | re.MULTILINE)
    return [yaml.safe_load(yaml_block) for yaml_block in blocks]


def test_a_recipe_is_shown_with_the_learning_rates_that_were_derived(folder):
    options = {
        "seed": 7,
        "name": "a: b # c",
        "learning_rate": None,
    }
    card_folder.trained(
        folder,
        options=options,
        learning_rates={"projector": 0.001, "vision": 1e-05},
    )
    model_card = render_card(folder)
    first_recipe, second_recipe = shown_recipes(model_card)
    assert first_recipe == {
        "seed": 42,
        "weight_decay": 0.0,
        "model_name_or_path": "built",
    }
    # YAML reads 1e-05 as a word.
    assert float(second_recipe.pop("vision_learning_rate")) == 1e-05
    assert second_recipe == {**options, "projector_learning_rate": 0.001}

    titles = re.findall("<summary>Recipe(.*), as", model_card.text)
    assert titles == [" of stage 1", " of stage 2"]
    assert "one training run, seed 42, 7:" in model_card.text


@pytest.mark.parametrize(
    ("stage", "title"),
    [
        ("align", "align"),
        (None, "training"),
    ],
)
def test_a_training_of_one_stage_is_called_by_its_name(folder, stage, title):
    card_folder.trained(
        folder,
        before=None,
        stage=stage,
        steps_done=32,
        seconds=59.6,
        hardware=None,
    )
    model_card = render_card(folder)
    training_table = rows(section(model_card, "Training"))
    assert training_table[""] == [title]
    assert training_table["Steps"] == ["32"]
    assert training_table["Time"] == ["0:01:00"]
    assert "Hardware" not in training_table
    assert "<summary>Recipe, as" in model_card.text


def test_hardware_without_devices_and_a_training_without_steps_are_told(folder):
    card_folder.trained(
        folder,
        before=None,
        hardware={"machine": "x86_64 Linux"},
        steps_done=0,
    )
    training_table = table_of(folder, "Training")
    assert training_table["Hardware"] == ["x86_64 Linux"]
    assert training_table["Steps"] == ["0 of 32"]


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
    sources = [
        {"source": "a", "split": "train", **counts},
        {"source": "b", "split": "train"},
    ]
    card_folder.trained(folder, data=sources, before=None)
    assert table_of(folder, "Training")["Data"] == [f"{shown}; b"]


@pytest.mark.parametrize(
    ("norm", "gain_init", "compensation", "sentences"),
    [
        ("layer_norm", "text_norm", "global", ["a LayerNorm", "N_text", "In training, its gr"]),
        ("rms_norm", "text_norm", "none", ["a RMSNorm", "Its gradients", "ablation"]),
        ("layer_norm", "one", "none", ["A LayerNorm with a gain of 1", "ablation"]),
        ("layer_norm", "one", "global", ["a gain of 1", "compensated for the small", "ablation"]),
        ("none", "one", "none", ["projector alone, without a norm after it"]),
    ],
)
def test_the_method_is_told_by_the_configuration(folder, norm, gain_init, compensation, sentences):
    card_folder.edit(
        folder / "config.json",
        projector_norm=norm,
        projector_gain_init=gain_init,
        text_embedding_norm=3.2,
        gradient_compensation=compensation,
    )
    card_text = text_of(folder)
    for sentence in sentences:
        assert sentence in card_text
    assert ("ablation" in card_text) == ("ablation" in sentences)
    assert ("compensated for the small gain" in card_text) == (compensation == "global")


def test_the_verdict_is_quoted_once(full):
    change_report(full, verdict=["First.", "Second."])
    assert "> **Measured:** First.\n> Second.\n" in text_of(full)


def test_a_figure_that_is_absent_is_not_shown(full):
    (full / "diagnostics" / "rotation.png").unlink()
    card_text = text_of(full)
    assert re.findall(r"\]\((diagnostics/.*?)\)", card_text) == ["diagnostics/interface.png"]
    figures = {figure["file"]: figure for figure in read_report(full)["figures"]}
    caption = figures["interface.png"]["caption"]
    assert f"*Interface.* {caption}" in card_text


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"date": "2026-01-02", "versions": {"torch": "2.13", "lm_eval": "0.5"}},
            "Run on 2026-01-02 with torch 2.13, lm\\_eval 0.5.",
        ),
        ({"date": "2026-01-02"}, "Run on 2026-01-02."),
        ({"versions": {"torch": "2.13"}}, "Run with torch 2.13."),
    ],
    ids=["date-and-versions", "date", "versions"],
)
def test_an_evaluation_says_when_and_with_what_it_was_run(full, changes, line):
    card_folder.evaluated(full, **changes)
    card_text = text_of(full).replace("lm_eval", "lm\\_eval")
    assert f"\n- {line}\n" in card_text


def test_an_evaluation_without_a_date_and_versions_does_not_say_when_it_was_run(full):
    card_folder.evaluated(full)
    assert "- Run" not in text_of(full)


@pytest.fixture
def evaluated_on_the_hub(full):
    """A card with results of a model on the Hub."""
    metrics = [Metric("accuracy", 0.25, samples=1234), Metric("f1", 0.5)]
    evaluation = Evaluation("gqa", "GQA", metrics, 9, 9, [], weights=f"user/m@{'a' * 40}")
    evaluation.write(full)
    return render_card(full, repo_id="user/model")


def test_a_result_of_a_model_on_the_hub_counts(evaluated_on_the_hub):
    results = ModelCard(evaluated_on_the_hub.text).data.eval_results
    assert {result.dataset_type for result in results} == {"gqa", "pope"}
    assert "Evaluated with other weights" not in evaluated_on_the_hub.text


def test_a_result_without_a_count_of_samples_has_none_in_its_row(evaluated_on_the_hub):
    evaluation_section = section(evaluated_on_the_hub, "Evaluation")
    gqa_table = evaluation_section.partition("### GQA")[2].partition("<details>")[0]
    assert re.findall(r"^\| all .*", gqa_table, re.MULTILINE) == [
        "| all | accuracy | 0.250 | 1,234 |",
        "| all | f1 | 0.500 | – |",
    ]


def test_numbers_stand_on_the_right_and_words_on_the_left(full):
    evaluation_section = section(render_card(full), "Evaluation")
    assert "\n| --- | --- | ---: | ---: | ---: | ---: |\n" in evaluation_section


PROTOCOL = re.compile("<summary>Protocol</summary>\n\n(.*?)\n\n</details>", re.DOTALL)
PROMPTS = [
    "# a",
    "1. b",
    "12) c",
    "- d",
    "+ e",
    "= f",
    "-",
    "---",
    "_g_ h_i",
    "~~j~~",
    "&amp; $k$",
    "1.5 l",
    "-m",
    "<n> [o](p)",
    "*q* `r`",
    "s\nt\u200b",
]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_sentence_is_text_wherever_markup_could_begin(full, prompt):
    card_folder.evaluated(full, protocol=[prompt])
    card_text = text_of(full)
    folded = PROTOCOL.search(card_text)[1]
    parsed_tokens = tokens(folded)
    token_kinds = {
        parsed.type.removesuffix("_open").removesuffix("_close") for parsed in parsed_tokens
    }
    assert token_kinds == {"bullet_list", "list_item", "paragraph", "inline"}

    (inline,) = [parsed for parsed in parsed_tokens if parsed.type == "inline"]
    assert {inner_token.type for inner_token in inline.children} <= {"text", "text_special"}
    shown = "".join(inner_token.content for inner_token in inline.children)
    assert shown == prompt.replace("\n", " ").replace("\u200b", "")
    # Between two such signs the Hub typesets a formula.
    assert not re.search(r"(?<!\\)\$", folded)


def linked_addresses(text):
    addresses = []
    for markdown_token in tokens(text):
        for inner_token in markdown_token.children or ():
            if inner_token.type == "link_open":
                addresses.append(unquote(inner_token.attrs["href"]))
    return addresses


def test_a_notice_with_spaces_in_its_name_is_linked(folder):
    notice_path = folder / "notices" / "vision" / "LICENSE of (it).txt"
    notice_path.parent.mkdir(parents=True)
    notice_path.write_text("terms")
    addresses = linked_addresses(section(render_card(folder), "Licence"))
    assert "notices/vision/LICENSE of (it).txt" in addresses


@pytest.fixture
def adapter(tmp_path):
    """What a card of an adapter is made of."""
    folder = tmp_path / "adapter"
    folder.mkdir()
    card_folder.trained(folder, options={"model_name_or_path": "user/stage1"})
    card_folder.edit(folder / "adapter_config.json", peft_type="LORA", r=8)
    save_file({}, folder / "adapter_model.safetensors")
    return folder


def test_an_adapter_s_card_tells_what_training_recorded(adapter):
    card_text = text_of(adapter)
    assert "This is an adapter of rank 8 with the projector in full" in card_text
    assert "its gain starts from N_text" in card_text
    assert "not compensated for the gain" in card_text
    assert "An image is" not in card_text


def test_an_adapter_s_card_loads_its_base(adapter):
    card_text = text_of(adapter)
    assert 'base, base_revision = "user/stage1", "main"' in card_text
    assert "is not pinned here" in card_text
    assert "AutoProcessor.from_pretrained(base, revision=base_revision" in card_text
    assert 'dtype="auto"' in card_text


@pytest.fixture
def compensated_adapter(adapter):
    """An adapter whose training changed settings, with the vision tower and its own processor."""
    changes = {
        "gradient_compensation": "global",
        "projector_norm": "rms_norm",
        "projector_gain_init": "text_norm",
    }
    card_folder.edit(
        adapter / "training.json",
        config_changes=changes,
        learning_rates={"vision": 1e-5},
    )
    (adapter / "processor_config.json").write_text("{}")
    return adapter


def test_an_adapter_s_card_tells_of_settings_that_training_changed(compensated_adapter):
    card_text = text_of(compensated_adapter)
    assert "with the projector and the vision tower in full" in card_text
    assert "a RMSNorm after the projector" in card_text
    assert "compensated for the small gain" in card_text
    assert "ablation" not in card_text


def test_an_adapter_is_loaded_with_its_settings_and_its_processor(compensated_adapter):
    card_text = text_of(compensated_adapter)
    assert '    gradient_compensation="global",  # as in training\n' in card_text
    assert "AutoProcessor.from_pretrained(adapter, revision=revision" in card_text


def test_an_adapter_on_a_pinned_base_says_so(compensated_adapter):
    pinned = Part("base model", "user/base", "user/base", "a" * 40)
    model_card = render_card(
        compensated_adapter,
        base=pinned,
        revision="trial",
        repo_id="me/adapter",
    )
    assert 'adapter, revision = "me/adapter", "trial"' in model_card.text
    assert "is pinned here" in model_card.text


def test_of_an_adapter_the_norm_is_measured_and_its_settings_are_those_of_training(adapter):
    parameter_name = "base_model.model.model.multi_modal_projector.norm.weight"
    save_file({parameter_name: torch.tensor([-0.5, 0.25])}, adapter / ADAPTER_WEIGHTS)
    card_facts = Facts(adapter)
    assert card_facts.gain == {
        "start": None,
        "mean_abs": 0.375,
        "bias_mean_abs": None,
    }
    assert card_facts.norm_moved is None
    assert card_facts.config is None
    assert card_facts.setting("text_embedding_norm") == 3.2  # beside what was changed
    assert card_facts.setting("projector_norm") == "layer_norm"


def test_a_norm_without_a_bias_is_as_it_was_built(folder):
    weights = stored.weights(folder)
    del weights["model.multi_modal_projector.norm.bias"]
    stored.store(folder, weights)
    card_folder.edit(folder / "config.json", projector_norm="rms_norm")
    card_facts = Facts(folder)
    assert card_facts.norm_moved is False
    assert card_facts.gain["bias_mean_abs"] is None
    assert card_facts.gain["mean_abs"] == pytest.approx(card_facts.gain["start"])


def test_what_records_do_not_say_is_empty(full, monkeypatch):
    card_folder.edit(full / "build.json", licenses=None)
    (full / "training.json").write_text('{"stage": "align"}')
    report = read_report(full)
    del report["report"]["norm"]
    del report["report"]["gain"]
    change_report(full, **report)

    monkeypatch.chdir(full)
    card_facts = Facts(Path("."))
    assert card_facts.name == full.name
    assert card_facts.data == []
    assert not card_facts.report_is_stale
    assert card_facts.stages == [{"stage": "align", "versions": {}, "options": {}}]
    assert [part.licence for part in card_facts.parts] == [{}, {}]
    assert card_facts.started_from is None
    assert card_facts.setting("projector_norm") == "layer_norm"


def test_a_part_of_unknown_licence_is_named_once():
    unknown_parts = [
        Part("vision encoder", "a"),
        Part("language model", "a"),
        Part("data", "b"),
        Part("data", "c", licence={"license": "mit"}),
    ]
    licence, sentence, warning = terms(unknown_parts)
    assert licence == {}
    assert "of a, b is not recorded" in sentence
    assert "for a, b." in warning


@pytest.mark.parametrize(
    ("quantization", "options"),
    [
        pytest.param(
            {
                "load_in_4bit": True,
                "bnb_4bit_quant_type": "nf4",
                "bnb_4bit_use_double_quant": True,
            },
            ["load_in_4bit=True", 'quant_type="nf4"', "use_double_quant=True"],
            id="nf4",
        ),
        pytest.param(
            {"load_in_4bit": True},
            ['quant_type="fp4"', "use_double_quant=False"],
            id="4-bit",
        ),
        pytest.param(
            {"load_in_8bit": True},
            ["load_in_8bit=True"],
            id="8-bit",
        ),
    ],
)
def test_the_base_of_an_adapter_is_quantized_as_in_training(adapter, quantization, options):
    card_folder.edit(adapter / "training.json", quantization=quantization)
    (snippet,) = re.findall("^```python\n(.*?)^```$", text_of(adapter), re.DOTALL | re.MULTILINE)
    compile(snippet, "snippet", "exec")
    for option in options:
        assert option in snippet
    assert ("4bit" in snippet) == ("load_in_4bit" in quantization)
    assert "dtype=half" in snippet
    other_imports = "AutoModelForImageTextToText, AutoProcessor, "
    assert "import BitsAndBytesConfig" in snippet.replace(other_imports, "")


@pytest.fixture
def hub_card(full):
    """A card on the Hub with other metadata of its author than the folder's."""
    card_text = write_card(full).text
    (full / "README.md").write_text(add_metadata(card_text, "thumbnail: a.png\na: 1\n"))
    return add_metadata(card_text, "thumbnail: b.png\nb: 1\n")


def test_what_the_author_added_on_the_hub_comes_before_the_folder_s(full, hub_card):
    metadata = data(render_card(full, hub_card=hub_card))
    assert metadata["thumbnail"] == "b.png"
    assert metadata["a"] == 1
    assert metadata["b"] == 1


def test_metadata_of_a_card_of_others_on_the_hub_are_not_taken(full, hub_card):
    of_somebody = "---\nthumbnail: c.png\n---\n# Mine\n"
    assert data(render_card(full, hub_card=of_somebody))["thumbnail"] == "a.png"


def test_a_card_that_has_only_front_matter_is_replaced(folder):
    card_path = folder / "README.md"
    card_path.write_text("---\nlicense: mit\n---\n\n")  # as the Hub makes one
    card_text = write_card(folder).text
    assert card_path.read_text() == card_text
    assert "\n# tiny-normalign\n" in card_text


def test_a_card_is_read_with_a_mark_of_its_encoding(folder):
    card_text = add_metadata(write_card(folder).text, "thumbnail: a.png\n")
    (folder / "README.md").write_text(card_text, encoding="utf-8-sig")
    assert metadata_of(folder)["thumbnail"] == "a.png"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"---\nlicense: \xff\n---\n", "README.md.* Save it as UTF-8"),
        (b"---\na: [\n---\n<!-- normalign card, metadata: tags -->\n", "front matter of README.md"),
    ],
)
def test_a_card_that_cannot_be_read_is_named_and_stays(folder, content, reason):
    (folder / "README.md").write_bytes(content)
    with pytest.raises(ValueError, match=reason):
        write_card(folder)
    assert (folder / "README.md").read_bytes() == content


def test_a_card_for_a_name_that_the_hub_cannot_have_is_not_written(folder):
    with pytest.raises(ValueError, match="a b/c"):
        write_card(folder, repo_id="a b/c")
    assert not (folder / "README.md").exists()


def test_a_card_of_an_absent_folder_is_not_written(folder):
    with pytest.raises(ValueError, match="absent"):
        write_card(folder / "absent")


def test_a_card_is_written_for_its_name_on_the_hub(folder):
    card_text = write_card(folder, repo_id="user/m").text
    assert 'checkpoint, revision = "user/m", "main"' in card_text
    assert "\n# m\n" in card_text


def test_a_card_that_is_absent_is_not_rendered_again(folder):
    refresh_card(folder)
    assert not (folder / "README.md").exists()


def test_a_card_of_others_is_not_rendered_again(folder):
    (folder / "README.md").write_text("# Mine\n")
    refresh_card(folder)
    assert (folder / "README.md").read_text() == "# Mine\n"


def test_a_card_of_ours_is_rendered_again(folder):
    write_card(folder)
    card_folder.trained(folder)
    refresh_card(folder)
    assert "## Training" in (folder / "README.md").read_text()


def test_records_of_any_type_are_a_fault_of_the_folder(folder):
    card_folder.edit(folder / "training.json", stage="align", data=3)
    with pytest.raises(ValueError, match=f"What {re.escape(str(folder))} records of itself"):
        render_card(folder)
    assert folder.is_dir()
