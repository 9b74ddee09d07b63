"""What a checkpoint says of where it comes from: parts, code, machine, time, earlier stages."""

import copy
import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
import tiny
import tiny_parts
import torch
import train_data
import training
from huggingface_hub import ModelCard, constants
from json_files import read_json, update_json
from paths import ROOT
from safetensors.torch import save_file
from stored import store, weights
from transformers import (
    AutoImageProcessor,
    AutoModel,
    AutoProcessor,
    AutoTokenizer,
    LlavaForConditionalGeneration,
    ViTConfig,
    ViTModel,
)
from transformers.utils import logging

from normalign_llava import NormAlignLlavaForConditionalGeneration, NormAlignLlavaModel
from normalign_llava.assembly.merge import merge_adapter
from normalign_llava.checkpoint.files import INDEX, require_checkpoint
from normalign_llava.checkpoint.opening import (
    Checkpoint,
    check_processor,
    fetch_licence,
    hub_dataset,
    open_checkpoint,
    read_record,
)
from normalign_llava.checkpoint.prompts import answer_ends, fixes_the_date
from normalign_llava.checkpoint.weights import fetch_index_folder
from normalign_llava.hub_cards.card.metadata import is_ours
from normalign_llava.hub_cards.card.write import refresh_card
from normalign_llava.train.run import main


pytestmark = pytest.mark.slow

BUILD = "import sys; from normalign_llava import build_checkpoint; build_checkpoint(*sys.argv[1:])"


def git(folder, *words):
    command = ["git", "-C", str(folder), *words]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def test_parts_of_the_hub_are_named_with_commit_and_licence(hub, prepared, tmp_path):
    vision = Path(tiny_parts.vision(tmp_path / "vision"))
    language = Path(tiny_parts.language(tmp_path / "language"))
    metadata = "license: other\nlicense_name: llama3.2\nlicense_link: LICENSE.txt"
    (language / "README.md").write_text(f"---\n{metadata}\n---\n")
    (language / "LICENSE.txt").write_text("of the language model")
    (vision / "NOTICE").write_text("of the encoder")
    (vision / "LICENSE").write_text("x" * (2**20 + 1))  # no licence is so long
    (vision / "licenses").mkdir()
    (vision / "licenses" / "MIT.txt").write_text("in a folder")
    hub.serve("user/vit", vision)
    hub.serve("user/lm", language)
    built_path = tmp_path / "built"
    process = prepared.run(["-c", BUILD, "user/vit", "user/lm", built_path])
    assert process.returncode == 0

    record = read_json(built_path / "build.json")
    language_commit = hub.repository("user/lm").commit
    assert record["vision_revision"] == hub.repository("user/vit").commit
    assert record["language_revision"] == language_commit
    assert record["licenses"] == {
        "vision": None,
        "language": {
            "license": "other",
            "license_name": "llama3.2",
            "license_link": f"{hub.url}/user/lm/blob/{language_commit}/LICENSE.txt",
        },
    }

    notices = {place: (built_path / place).read_text() for place in record["notices"]}
    assert notices == {
        "notices/language/LICENSE.txt": "of the language model",
        "notices/vision/NOTICE": "of the encoder",
    }
    assert hub.sent["user/vit/LICENSE"] == 0


@pytest.mark.parametrize(
    ("card", "expected_license", "expected_name", "expected_link"),
    [
        (
            "---\nlicense: mit\nlicense_link: LICENSE\n---\n",
            "mit",
            None,
            None,
        ),
        (
            "---\nlicense: [mit, cc0-1.0]\n---\n",
            "other",
            "mit, cc0-1.0",
            None,
        ),
        (
            "---\nlicense: [mit]\nlicense_name: one\n---\n",
            "mit",
            "one",
            None,
        ),
        (
            "---\nlicense: other\nlicense_name: 3\nlicense_link: https://a.b/c\n---\n",
            "other",
            "3",
            "https://a.b/c",
        ),
    ],
    ids=["mit", "two", "one-of-a-list", "named"],
)
def test_the_licence_of_a_folder_is_its_card_s(
    tmp_path, card, expected_license, expected_name, expected_link
):
    (tmp_path / "README.md").write_text(card)
    assert fetch_licence(str(tmp_path)) == {
        "license": expected_license,
        "license_name": expected_name,
        "license_link": expected_link,
    }


@pytest.mark.parametrize(
    "card",
    [
        "---\nlicense: [: \n---\n",
        "---\nlicense_name: mine\n---\n",
        "---\nlicense: []\n---\n",
        "a card without metadata",
    ],
)
def test_a_folder_whose_card_names_no_licence_has_none(tmp_path, card):
    (tmp_path / "README.md").write_text(card)
    assert fetch_licence(str(tmp_path)) is None


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """Puts a file of a repository into the Hub's cache, at a commit that `main` then is."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))

    def put(kind, repo_id, commit, text, file_name="README.md"):
        repository = tmp_path / "hub" / f"{kind}s--{repo_id.replace('/', '--')}"
        snapshot = repository / "snapshots" / commit
        snapshot.mkdir(parents=True, exist_ok=True)
        (snapshot / file_name).write_text(text)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / "main").write_text(commit)

    return put


OLD = "a" * 40
NEW = "b" * 40


@pytest.mark.parametrize(
    ("revision", "expected_name", "expected_revision"),
    [
        (OLD, "first", OLD),
        (None, "second", "main"),
    ],
)
def test_the_licence_of_a_repository_is_that_of_the_commit_that_is_asked_for(
    cached, revision, expected_name, expected_revision
):
    card = "---\nlicense: other\nlicense_name: {}\nlicense_link: TERMS.md\n---\n"
    cached("model", "user/lm", OLD, card.format("first"))
    cached("model", "user/lm", NEW, card.format("second"))
    licence = fetch_licence("user/lm", revision)
    assert licence["license_name"] == expected_name
    expected_link = f"{constants.ENDPOINT}/user/lm/blob/{expected_revision}/TERMS.md"
    assert licence["license_link"] == expected_link


def test_a_repository_without_metadata_or_that_is_not_there_has_no_licence(cached):
    cached("model", "user/bare", NEW, "a card without metadata")
    assert fetch_licence("user/bare") is None
    assert fetch_licence("user/none") is None


@pytest.mark.parametrize(
    ("metadata", "expected_license", "expected_languages"),
    [
        (
            "license: mit\nlanguage: en",
            "mit",
            ["en"],
        ),
        (
            "license: [mit, cc0-1.0]\nlanguage: [en, de]",
            "mit, cc0-1.0",
            ["en", "de"],
        ),
        (
            "tags: [a]",
            None,
            None,
        ),
    ],
    ids=["one", "several", "none"],
)
def test_a_data_set_is_named_with_what_its_card_says(
    cached, metadata, expected_license, expected_languages
):
    cached("dataset", "user/data", NEW, f"---\n{metadata}\n---\n")
    assert hub_dataset("user/data") == {
        "id": "user/data",
        "revision": NEW,
        "license": expected_license,
        "language": expected_languages,
    }


def test_a_data_set_whose_card_is_broken_has_no_licence(cached):
    cached("dataset", "user/data", NEW, "---\nlicense: [: \n---\n")
    named = hub_dataset("user/data")
    assert named["id"] == "user/data"
    assert named["license"] is None
    assert named["language"] is None


def test_a_folder_that_has_a_data_set_s_name_by_chance_is_not_asked(cached, tmp_path, monkeypatch):
    cached("dataset", "user/one", NEW, "---\nlicense: mit\n---\n")
    folder = tmp_path / "user" / "one"
    folder.mkdir(parents=True)
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    monkeypatch.chdir(tmp_path)
    assert hub_dataset("user/one")["license"] == "mit"
    assert fetch_licence("user/one")["license"] == "apache-2.0"


DATA_SETS = """
import json, sys
from huggingface_hub import constants
from normalign_llava.checkpoint.opening import hub_dataset
found = [hub_dataset(name) for name in sys.argv[1:]]
constants.ENDPOINT = "http://127.0.0.1:9"  # where nobody answers
print(json.dumps([*found, hub_dataset("user/other")]))
"""


def test_a_data_set_s_commit_is_that_of_its_card_or_else_the_one_that_is_named(
    hub, prepared, tmp_path
):
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n")
    with_card = hub.serve("user/known", tmp_path, kind="dataset")
    without_card = hub.create("user/bare", kind="dataset")
    process = prepared.run(["-c", DATA_SETS, "user/known", "user/bare"])
    named_with_card, named_without_card, named_unknown = json.loads(process.stdout)

    assert named_with_card["license"] == "mit"
    assert named_with_card["revision"] == with_card.commit
    assert named_without_card["license"] is None
    assert named_without_card["revision"] == without_card.commit
    assert named_unknown == {
        "id": "user/other",
        "revision": None,
        "license": None,
        "language": None,
    }

    requests = [request for request in hub.requests if "/api/datasets/" in request]
    assert requests
    assert not any("user/known" in request for request in requests)


def cache_both_commits(cached, file_name, texts=("{}", "{}")) -> None:
    old_text, new_text = texts
    cached("model", "user/lm", OLD, old_text, file_name)
    cached("model", "user/lm", NEW, new_text, file_name)


COMMITS_IN_JSON = (json.dumps({"of": OLD}), json.dumps({"of": NEW}))


def test_a_record_of_a_repository_is_that_of_the_commit_that_is_asked_for(cached):
    cache_both_commits(cached, "build.json", COMMITS_IN_JSON)
    assert read_record("user/lm", "build.json", OLD) == {"of": OLD}
    assert read_record("user/lm", "build.json") == {"of": NEW}


def test_a_checkpoint_of_a_repository_is_that_of_the_commit_that_is_asked_for(cached):
    cache_both_commits(cached, "config.json", COMMITS_IN_JSON)
    assert open_checkpoint("user/lm", OLD).stored == {"of": OLD}
    assert require_checkpoint("user/lm", OLD) == ("user/lm", OLD)
    assert require_checkpoint("user/lm") == ("user/lm", NEW)


def test_an_index_of_a_repository_is_that_of_the_commit_that_is_asked_for(cached):
    cache_both_commits(cached, INDEX)
    (old_folder,) = fetch_index_folder("user/lm", OLD)
    assert old_folder.name == OLD
    (new_folder,) = fetch_index_folder("user/lm", None)
    assert new_folder.name == NEW


NOTICE = "notices/language/LICENSE"


@dataclass
class Stages:
    """A checkpoint that went through both stages of training and was merged."""

    root: Path
    build_record: dict
    aligned: Path
    adapter: Path
    merged: Path


@pytest.fixture(scope="module")
def stages(tmp_path_factory):
    root = tmp_path_factory.mktemp("stages")
    parts_path = root / "parts"
    built_path = training.checkpoint(parts_path)
    (built_path / NOTICE).parent.mkdir(parents=True)
    (built_path / NOTICE).write_text("terms")
    update_json(built_path / "build.json", {"notices": [NOTICE]})
    train_rows = []
    for number in range(8):
        question = f"<image>\nwhat is {number}?"
        train_rows.append(train_data.llava(question, f"it is {number}", "red.png"))
    train_data.write_json(parts_path / "data", train_rows)

    def train(folder, model_path, **options):
        folder.mkdir()
        recipe = training.recipe(
            folder,
            parts_path,
            use_cpu=True,
            model_name_or_path=str(model_path),
            **options,
        )
        main([recipe])
        return folder / "out"

    aligned = train(root / "first", built_path, stage="align")
    adapter = train(root / "second", aligned, use_peft=True)
    merge_adapter(adapter, root / "merged")
    refresh_card(root / "merged")
    build_record = read_json(built_path / "build.json")
    return Stages(root, build_record, aligned, adapter, root / "merged")


def test_records_go_from_build_through_both_stages_to_the_merged_checkpoint(stages):
    aligned_record = read_json(stages.aligned / "training.json")
    assert aligned_record["before"] is None
    assert aligned_record["stage"] == "align"

    adapter_record = read_json(stages.adapter / "training.json")
    assert adapter_record["before"] == aligned_record
    assert read_json(stages.merged / "training.json") == adapter_record

    for folder in (stages.aligned, stages.adapter, stages.merged):
        assert read_json(folder / "build.json") == stages.build_record
        assert (folder / NOTICE).read_text() == "terms"


def test_cards_and_records_of_all_stages_name_no_local_path(stages):
    for folder in (stages.aligned, stages.adapter, stages.merged):
        card = (folder / "README.md").read_text()
        assert is_ours(card)
        assert str(stages.root) not in card
        assert str(stages.root) not in (folder / "training.json").read_text()


def test_only_the_card_of_an_adapter_names_peft(stages):
    def library_name(folder):
        return ModelCard((folder / "README.md").read_text()).data.library_name

    assert library_name(stages.aligned) == "transformers"
    assert library_name(stages.adapter) == "peft"
    assert library_name(stages.merged) == "transformers"


def test_a_record_of_training_names_code_and_machine(stages):
    record = read_json(stages.adapter / "training.json")
    assert record["seconds"] > 0
    assert record["model_revision"] is None
    libraries = {"torch", "transformers", "trl", "peft", "normalign_llava"}
    assert libraries <= record["versions"].keys()

    head = git(ROOT, "rev-parse", "HEAD")
    if head:  # in a checkout
        assert record["commit"] in (head, f"{head}-dirty")

    lscpu = subprocess.run(["lscpu"], capture_output=True, text=True, check=True).stdout
    (processor_name,) = re.findall(r"^\s*Model name:\s+(.+)$", lscpu, re.M)
    kernel = os.uname()
    core_count = os.sysconf("SC_NPROCESSORS_ONLN")
    assert record["hardware"] == {
        "devices": [processor_name],
        "count": 1,
        "machine": f"{kernel.sysname}, {kernel.machine}, {core_count} cores",
    }


@pytest.mark.parametrize(
    ("parameters_per_byte", "message"),
    [
        (5, "parameters, its weights"),
        (3, "lacks|cannot be"),
    ],
)
def test_a_configuration_of_more_parameters_than_weights_could_hold_is_refused(
    tmp_path, parameters_per_byte, message
):
    """Weights of 2 bits have four parameters a byte; 16 million more are always allowed."""
    model_path = training.checkpoint(tmp_path)
    for weights_path in model_path.glob("model*"):
        weights_path.unlink()
    tensors = {"unused": torch.zeros(2**25, dtype=torch.int8)}
    save_file(tensors, model_path / "model.safetensors", metadata={"format": "pt"})

    text_config = read_json(model_path / "config.json")["text_config"]
    text_config["vocab_size"] = parameters_per_byte * 2**25 // text_config["hidden_size"]
    update_json(model_path / "config.json", {"text_config": text_config})
    with pytest.raises(ValueError, match=message):
        open_checkpoint(model_path).load()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('{"a": 1}', {"a": 1}),
        ("[1]", None),
        ("{", None),
        ("{}", {}),
    ],
)
def test_records_are_json_objects(tmp_path, content, expected):
    (tmp_path / "build.json").write_text(content)
    assert read_record(str(tmp_path), "build.json") == expected


def test_a_folder_without_a_record_has_none(tmp_path):
    assert read_record(str(tmp_path), "build.json") is None


def test_a_hub_that_cannot_be_asked_has_no_record():
    assert read_record("user/none", "build.json") is None


def test_what_is_no_repository_s_name_has_no_record_and_no_licence():
    assert read_record("no name!", "build.json") is None
    assert fetch_licence("no name!") is None


@pytest.fixture
def opened(checkpoint):
    return open_checkpoint(checkpoint)


@pytest.fixture
def model_copy(checkpoint, tmp_path):
    """A copy of the checkpoint that a test may change."""
    return shutil.copytree(checkpoint, tmp_path / "model")


def test_a_processor_with_another_image_token_is_refused(opened):
    processor = AutoProcessor.from_pretrained(opened.name)
    image_token_id = processor.image_token_id
    opened.check_image_token(processor)
    processor.image_token_id = 5
    message = f"is {image_token_id} in config.json and 5 in its tokenizer"
    with pytest.raises(ValueError, match=message):
        opened.check_image_token(processor)


def test_a_folder_with_only_a_tokenizer_has_no_processor(tmp_path):
    tokenizer = tiny_parts.tokenizer()
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    language_model = open_checkpoint(tmp_path)
    assert len(language_model.preprocessor(AutoTokenizer)) == len(tokenizer)
    with pytest.raises(ValueError, match="no processor for images.*AutoProcessor.from_pretrained"):
        language_model.preprocessor(AutoProcessor)


def test_a_folder_without_an_image_processor_is_named_with_the_remedy(tmp_path):
    vision = Path(tiny_parts.vision(tmp_path / "vision"))
    (vision / "preprocessor_config.json").unlink()
    message = "vision has no image processor: preprocessor_config.json is missing.*save_pretrained"
    with pytest.raises(FileNotFoundError, match=message):
        open_checkpoint(vision).preprocessor(AutoImageProcessor)


@pytest.fixture
def logs_of_info():
    """transformers logs what is of level INFO, in this test only."""
    before = logging.get_verbosity()
    logging.set_verbosity_info()
    yield
    logging.set_verbosity(before)


def test_loading_sets_back_what_transformers_logs(opened, logs_of_info):
    model = opened.load(dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert logging.get_verbosity() == logging.INFO
    with pytest.raises(ValueError, match="The model .* cannot be loaded"):
        opened.load(dtype="float31")
    assert logging.get_verbosity() == logging.INFO


def test_the_bytes_of_weights_are_the_files_sizes(opened):
    weight_files = Path(opened.name).glob("*.safetensors")
    assert opened.fetched_weight_bytes == sum(file.stat().st_size for file in weight_files)


def test_tokens_are_counted_like_the_features_of_the_model(opened):
    processor = opened.processor
    assert check_processor(processor) == 4
    assert check_processor(processor, opened.load()) == 4
    assert check_processor(processor, opened.load(dtype=torch.bfloat16)) == 4


def test_tokens_that_differ_from_the_features_of_the_model_are_refused(opened):
    processor = opened.processor
    processor.vision_feature_select_strategy = "full"  # with the class token
    assert check_processor(processor) == 5
    with pytest.raises(ValueError, match="has 5 image tokens in the prompt, and 5 and 4 by"):
        check_processor(processor, opened.load())


def keep_image_shapes(processor) -> None:
    processor.image_processor.do_center_crop = False
    processor.image_processor.do_resize = False


def test_tokens_that_differ_from_image_to_image_are_refused(opened):
    processor = opened.processor
    processor.vision_feature_select_strategy = "full"
    keep_image_shapes(processor)
    with pytest.raises(ValueError, match="image tokens in the prompt, and 5 by"):
        check_processor(processor)


def test_prompts_of_a_processor_have_a_fixed_date(opened, model_copy):
    processor = opened.processor
    processor.chat_template = "{{ strftime_now('%d') }}" + processor.chat_template
    processor.save_pretrained(model_copy)
    dated_processor = open_checkpoint(model_copy).processor
    assert fixes_the_date(dated_processor.chat_template)
    assert dated_processor.tokenizer.chat_template == dated_processor.chat_template


def test_a_processor_that_keeps_the_shapes_of_images_is_refused(opened, model_copy):
    processor = opened.processor
    keep_image_shapes(processor)
    processor.save_pretrained(model_copy)
    with pytest.raises(ValueError, match="must give all images one size"):
        _ = open_checkpoint(model_copy).processor


@pytest.fixture
def with_one_tensor_more(model_copy):
    store(model_copy, {**weights(model_copy), "model.more.weight": torch.ones(2)})
    return open_checkpoint(model_copy)


def test_tensors_that_are_not_of_the_model_give_a_warning(with_one_tensor_more, caplog):
    with_one_tensor_more.load()
    assert "has 1 tensors that are not of" in caplog.text
    assert "model.more.weight" in caplog.text


def test_tensors_that_a_part_does_not_read_give_no_warning(with_one_tensor_more, caplog):
    with_one_tensor_more.load(config=with_one_tensor_more.config)
    assert not caplog.messages


def test_tensors_of_other_shapes_than_the_configuration_s_are_named(model_copy):
    config_file = model_copy / "config.json"
    config = json.loads(config_file.read_text())
    inner_width = config["text_config"]["intermediate_size"]
    config["text_config"]["intermediate_size"] = inner_width + 8
    config_file.write_text(json.dumps(config))

    opened = open_checkpoint(model_copy)
    with pytest.raises(ValueError, match="of other shapes than its configuration says") as refusal:
        opened.load()
    message = str(refusal.value)
    width = config["text_config"]["hidden_size"]
    first_down = "model.language_model.layers.0.mlp.down_proj.weight"
    assert f"{first_down} {[width, inner_width]}, not {[width, inner_width + 8]}" in message
    assert "above report" not in message


@pytest.mark.parametrize("lost_file", ["processor_config.json", "tokenizer.json"])
def test_a_model_without_a_processor_is_loaded(opened, model_copy, lost_file):
    (model_copy / lost_file).unlink()
    expected = opened.load().num_parameters()
    assert open_checkpoint(model_copy).load().num_parameters() == expected


def test_a_model_is_loaded_in_its_own_precision_as_the_class_of_this_package(tmp_path):
    tiny.model().bfloat16().save_pretrained(tmp_path)
    model = open_checkpoint(tmp_path).load()
    assert type(model) is NormAlignLlavaForConditionalGeneration
    assert model.dtype == torch.bfloat16


def test_a_model_that_does_not_generate_is_loaded(opened):
    bare_model = opened.load(NormAlignLlavaModel)
    assert type(bare_model) is NormAlignLlavaModel
    assert not bare_model.can_generate()


def test_an_adapter_s_processor_is_read_where_no_configuration_is(opened, model_copy):
    (model_copy / "config.json").unlink()
    processor = Checkpoint(str(model_copy), None, {}).processor
    assert processor.image_token_id == opened.processor.image_token_id


@pytest.mark.skipif(find_spec("num2words") is not None, reason="num2words is installed")
@pytest.mark.parametrize("error_class", [ImportError, OSError, ValueError])
def test_a_processor_that_needs_a_package_names_it(opened, error_class):
    class NeedsPackage:
        @classmethod
        def from_pretrained(cls, name, **options):
            raise error_class("Package `Num2Words` is required")

    with pytest.raises(ImportError, match="needs num2words, but it is not installed"):
        opened.preprocessor(NeedsPackage)


def test_a_processor_that_fails_with_a_package_that_is_there_says_why(
    opened, tmp_path, monkeypatch
):
    class Fails:
        @classmethod
        def from_pretrained(cls, name, **options):
            raise ImportError("num2words has no language xx")

    (tmp_path / "num2words.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match="^num2words has no language xx$"):
        opened.preprocessor(Fails)


class OfItsOwnCode:
    """A class of models whose code comes with a checkpoint."""

    @classmethod
    def from_pretrained(cls, name, **options):
        assert options["trust_remote_code"] is True
        loading_info = {"unexpected_keys": set(), "missing_keys": set(), "mismatched_keys": set()}
        return tiny.model(), loading_info

    @classmethod
    def from_config(cls, config, **options):
        raise TypeError("built")


def test_a_model_of_code_of_its_own_is_not_built_before_it_is_loaded(opened):
    trusted = Checkpoint(opened.name, None, opened.stored, trust_remote_code=True)
    assert trusted.load(OfItsOwnCode).num_parameters() > 0


def test_a_model_of_other_code_is_built_before_it_is_loaded(opened):
    with pytest.raises(ValueError, match="TypeError: built"):
        opened.load(OfItsOwnCode)


def test_a_pooling_layer_may_be_absent(tmp_path):
    config = ViTConfig(**tiny.ENCODER)
    ViTModel(config, add_pooling_layer=False).save_pretrained(tmp_path)
    assert open_checkpoint(tmp_path).load(AutoModel).num_parameters() > 0


def test_the_norm_of_a_llava_may_be_absent(tmp_path):
    llava = tiny_parts.llava(tmp_path / "llava", tiny.llava())
    projector = open_checkpoint(llava).load().model.multi_modal_projector
    assert projector.norm.weight.any()


def test_a_stock_llava_ends_answers_as_its_own_configuration_says(tmp_path):
    llava_path = Path(tiny_parts.llava(tmp_path / "llava", tiny.llava()))
    template_path = llava_path / "chat_template.jinja"
    template = template_path.read_text().replace("<|im_end|>", "<|im_start|>")
    template_path.write_text(template)
    opened = open_checkpoint(llava_path)
    model = opened.load(LlavaForConditionalGeneration)
    assert model.generation_config.eos_token_id == 2
    processor = opened.processor
    assert answer_ends(processor.tokenizer, processor.chat_template) == [2, 1]


def test_another_configuration_is_used_in_place_of_its_own(opened):
    config = copy.deepcopy(opened.config)
    config.text_config.num_hidden_layers = 1
    whole_model = opened.without_weights(NormAlignLlavaForConditionalGeneration, None)
    smaller_model = opened.without_weights(NormAlignLlavaForConditionalGeneration, config)
    assert smaller_model.num_parameters() < whole_model.num_parameters()
    assert opened.config.text_config.num_hidden_layers == 2


def test_a_checkpoint_that_is_not_there_has_the_remedy_that_is_given():
    with pytest.raises(ValueError, match=r"none does not exist here\. Look again"):
        open_checkpoint("none", remedy="Look again.")
