"""What a checkpoint says of where it comes from: parts, code, machine, time, earlier stages."""

import copy
import json
import os
import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
import tiny
import tiny_parts
import torch
import train_data
import training
from huggingface_hub import ModelCard, constants
from paths import ROOT
from safetensors.torch import save_file
from stored import store, weights
from transformers import (
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
    vision = tiny_parts.vision(tmp_path / "vision")
    language = tiny_parts.language(tmp_path / "language")
    terms = "license: other\nlicense_name: llama3.2\nlicense_link: LICENSE.txt"
    (tmp_path / "language" / "README.md").write_text(f"---\n{terms}\n---\n")
    (tmp_path / "language" / "LICENSE.txt").write_text("of the language model")
    (tmp_path / "vision" / "NOTICE").write_text("of the encoder")
    (tmp_path / "vision" / "LICENSE").write_text("x" * (2**20 + 1))  # no licence is so long
    (tmp_path / "vision" / "licenses").mkdir()
    (tmp_path / "vision" / "licenses" / "MIT.txt").write_text("in a folder")
    hub.serve("user/vit", Path(vision))
    hub.serve("user/lm", Path(language))
    assert prepared.run(["-c", BUILD, "user/vit", "user/lm", tmp_path / "built"]).returncode == 0
    commits = [hub.repository(name).commit for name in ("user/vit", "user/lm")]
    link = f"{hub.url}/user/lm/blob/{commits[1]}/LICENSE.txt"
    record = json.loads((tmp_path / "built" / "build.json").read_text())
    assert [record["vision_revision"], record["language_revision"]] == commits
    licence = {"license": "other", "license_name": "llama3.2", "license_link": link}
    assert record["licenses"] == {"vision": None, "language": licence}
    texts = {path: (tmp_path / "built" / path).read_text() for path in record["notices"]}
    expected = {"notices/language/LICENSE.txt": "of the language model"}
    assert texts == {**expected, "notices/vision/NOTICE": "of the encoder"}
    assert hub.sent["user/vit/LICENSE"] == 0


def test_the_licence_of_a_folder_is_its_card_s(tmp_path):
    for card, licence in (
        ("---\nlicense: mit\nlicense_link: LICENSE\n---\n", ("mit", None, None)),
        ("---\nlicense: [mit, cc0-1.0]\n---\n", ("other", "mit, cc0-1.0", None)),
        ("---\nlicense: [: \n---\n", None),
        ("---\nlicense_name: mine\n---\n", None),
        ("---\nlicense: []\n---\n", None),
        ("a card without metadata", None),
        ("---\nlicense: [mit]\nlicense_name: one\n---\n", ("mit", "one", None)),
        (
            "---\nlicense: other\nlicense_name: 3\nlicense_link: https://a.b/c\n---\n",
            ("other", "3", "https://a.b/c"),
        ),
    ):
        (tmp_path / "README.md").write_text(card)
        names = ("license", "license_name", "license_link")
        assert fetch_licence(str(tmp_path)) == (licence and dict(zip(names, licence, strict=True)))


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """Puts a file of a repository into the Hub's cache, at a commit that `main` then is."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))

    def put(kind, name, commit, text, file="README.md"):
        repository = tmp_path / "hub" / f"{kind}s--{name.replace('/', '--')}"
        for folder in (repository / "snapshots" / commit, repository / "refs"):
            folder.mkdir(parents=True, exist_ok=True)
        (repository / "snapshots" / commit / file).write_text(text)
        (repository / "refs" / "main").write_text(commit)

    return put


OLD = "a" * 40
NEW = "b" * 40


def test_the_licence_of_a_repository_is_that_of_the_commit_that_is_asked_for(cached):
    named = "---\nlicense: other\nlicense_name: {}\nlicense_link: TERMS.md\n---\n"
    for commit, name in ((OLD, "first"), (NEW, "second")):
        cached("model", "user/lm", commit, named.format(name))
    for revision, name, place in ((OLD, "first", OLD), (None, "second", "main")):
        found = fetch_licence("user/lm", revision)
        assert found["license_name"] == name
        assert found["license_link"] == f"{constants.ENDPOINT}/user/lm/blob/{place}/TERMS.md"
    cached("model", "user/bare", NEW, "a card without metadata")
    assert fetch_licence("user/bare") is fetch_licence("user/none") is None


def test_a_data_set_is_named_with_what_its_card_says(cached, tmp_path, monkeypatch):
    cards = {
        "user/one": ("license: mit\nlanguage: en", "mit", ["en"]),
        "user/two": ("license: [mit, cc0-1.0]\nlanguage: [en, de]", "mit, cc0-1.0", ["en", "de"]),
        "user/three": ("tags: [a]", None, None),
    }
    for name, (card, licence, languages) in cards.items():
        cached("dataset", name, NEW, f"---\n{card}\n---\n")
        told = {"id": name, "revision": NEW, "license": licence, "language": languages}
        assert hub_dataset(name) == told
    folder = tmp_path / "user" / "one"  # here by chance, of the same name
    folder.mkdir(parents=True)
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    monkeypatch.chdir(tmp_path)
    assert hub_dataset("user/one")["license"] == "mit"
    assert fetch_licence("user/one")["license"] == "apache-2.0"
    broken = {"id": "user/four", "license": None, "language": None}
    cached("dataset", "user/four", NEW, "---\nlicense: [: \n---\n")
    assert hub_dataset("user/four").items() >= broken.items()


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
    known = hub.serve("user/known", tmp_path, kind="dataset")
    bare = hub.create("user/bare", kind="dataset")
    done = prepared.run(["-c", DATA_SETS, "user/known", "user/bare"])
    with_card, without, unknown = json.loads(done.stdout)
    assert unknown == {"id": "user/other", "revision": None, "license": None, "language": None}
    assert (with_card["license"], with_card["revision"]) == ("mit", known.commit)
    assert (without["license"], without["revision"]) == (None, bare.commit)
    asked = [request for request in hub.requests if "/api/datasets/" in request]
    assert asked and not any("user/known" in request for request in asked)


def test_a_record_of_a_repository_is_that_of_the_commit_that_is_asked_for(cached):
    for commit in (OLD, NEW):
        cached("model", "user/lm", commit, json.dumps({"of": commit}), "build.json")
    assert read_record("user/lm", "build.json", OLD) == {"of": OLD}
    assert read_record("user/lm", "build.json") == {"of": NEW}
    for commit in (OLD, NEW):
        cached("model", "user/lm", commit, json.dumps({"of": commit}), "config.json")
    assert open_checkpoint("user/lm", OLD).stored == {"of": OLD}
    assert require_checkpoint("user/lm", OLD) == ("user/lm", OLD)
    assert require_checkpoint("user/lm") == ("user/lm", NEW)
    for commit in (OLD, NEW):
        cached("model", "user/lm", commit, "{}", INDEX)
    assert [folder.name for folder in fetch_index_folder("user/lm", OLD)] == [OLD]
    assert [folder.name for folder in fetch_index_folder("user/lm", None)] == [NEW]


def test_records_go_from_build_through_both_stages_to_the_merged_checkpoint(tmp_path):
    built = training.checkpoint(tmp_path / "parts")
    notice = "notices/language/LICENSE"
    (built / notice).parent.mkdir(parents=True)
    (built / notice).write_text("terms")
    record = json.loads((built / "build.json").read_text()) | {"notices": [notice]}
    (built / "build.json").write_text(json.dumps(record))
    rows = [train_data.llava(f"<image>\nwhat is {i}?", f"it is {i}", "red.png") for i in range(8)]
    train_data.write_json(tmp_path / "parts" / "data", rows)
    first, second, merged = (tmp_path / name for name in ("first", "second", "merged"))
    for folder, options in ((first, {"stage": "align"}), (second, {"use_peft": True})):
        folder.mkdir()
        options["model_name_or_path"] = str(built if folder == first else first / "out")
        main([training.recipe(folder, tmp_path / "parts", use_cpu=True, **options)])
    first = first / "out"
    second = second / "out"
    merge_adapter(second, merged)
    refresh_card(merged)
    folders = (first, second, merged)
    records = [json.loads((folder / "training.json").read_text()) for folder in folders]
    assert records[0]["before"] is None and records[0]["stage"] == "align"
    assert records[1]["before"] == records[0] and records[2] == records[1]
    assert records[1]["seconds"] > 0 and records[1]["model_revision"] is None
    assert {"torch", "transformers", "trl", "peft", "normalign_llava"} <= {*records[1]["versions"]}
    if head := git(ROOT, "rev-parse", "HEAD"):  # in a checkout
        assert records[1]["commit"] in (head, f"{head}-dirty")
    lines = subprocess.run(["lscpu"], capture_output=True, text=True, check=True).stdout
    (processor,) = re.findall(r"^\s*Model name:\s+(.+)$", lines, re.M)
    kernel = os.uname()
    machine = f"{kernel.sysname}, {kernel.machine}, {os.sysconf('SC_NPROCESSORS_ONLN')} cores"
    assert records[1]["hardware"] == {"devices": [processor], "count": 1, "machine": machine}
    for folder in folders:
        assert json.loads((folder / "build.json").read_text()) == record
        assert (folder / notice).read_text() == "terms"
        card = (folder / "README.md").read_text()
        assert is_ours(card) and str(tmp_path) not in (folder / "training.json").read_text() + card
        library = "peft" if folder == second else "transformers"  # the merged model too
        assert ModelCard(card).data.library_name == library


@pytest.mark.parametrize(
    "per_byte, fault", [(5, "parameters, its weights"), (3, "lacks|cannot be")]
)
def test_a_configuration_of_more_parameters_than_weights_could_hold_is_refused(
    tmp_path, per_byte, fault
):
    """Weights of 2 bits have four parameters a byte; 16 million more are always allowed."""
    folder = training.checkpoint(tmp_path) / "config.json"
    tensors = {"unused": torch.zeros(2**25, dtype=torch.int8)}
    for file in folder.parent.glob("model*"):
        file.unlink()
    save_file(tensors, folder.parent / "model.safetensors", metadata={"format": "pt"})
    config = json.loads(folder.read_text())
    width = config["text_config"]["hidden_size"]
    config["text_config"]["vocab_size"] = per_byte * 2**25 // width
    folder.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=fault):
        open_checkpoint(folder.parent).load()


def test_records_are_json_objects(tmp_path):
    assert read_record(str(tmp_path), "build.json") is None
    for content, expected in (('{"a": 1}', {"a": 1}), ("[1]", None), ("{", None), ("{}", {})):
        (tmp_path / "build.json").write_text(content)
        assert read_record(str(tmp_path), "build.json") == expected
    assert read_record("user/none", "build.json") is None  # on a Hub that cannot be asked
    assert read_record("no name!", "build.json") is fetch_licence("no name!") is None


@pytest.fixture
def opened(checkpoint):
    return open_checkpoint(checkpoint)


def test_a_processor_with_another_image_token_is_refused(opened):
    processor = AutoProcessor.from_pretrained(opened.name)
    number = processor.image_token_id
    opened.check_image_token(processor)
    processor.image_token_id = 5
    with pytest.raises(ValueError, match=f"is {number} in config.json and 5 in its tokenizer"):
        opened.check_image_token(processor)


def test_a_folder_with_a_tokenizer_alone_has_no_processor(tmp_path):
    tiny_parts.tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    alone = open_checkpoint(tmp_path)
    assert len(alone.preprocessor(AutoTokenizer)) == len(tiny_parts.tokenizer())
    with pytest.raises(ValueError, match="no processor for images.*AutoProcessor.from_pretrained"):
        alone.preprocessor(AutoProcessor)


def test_loading_sets_back_what_transformers_logs(opened):
    before = logging.get_verbosity()
    try:
        logging.set_verbosity_info()
        model = opened.load(dtype=torch.bfloat16)
        assert logging.get_verbosity() == logging.INFO and model.dtype == torch.bfloat16
        with pytest.raises(ValueError, match="The model .* cannot be loaded"):
            opened.load(dtype="float31")
        assert logging.get_verbosity() == logging.INFO
    finally:
        logging.set_verbosity(before)
    files = Path(opened.name).glob("*.safetensors")
    assert opened.weight_bytes == sum(file.stat().st_size for file in files)


def test_tokens_are_compared_with_the_features_of_the_model(opened):
    model = opened.load()
    processor = opened.processor
    assert check_processor(processor) == check_processor(processor, model) == 4
    assert check_processor(processor, opened.load(dtype=torch.bfloat16)) == 4
    processor.vision_feature_select_strategy = "full"  # the class token too
    assert check_processor(processor) == 5
    with pytest.raises(ValueError, match="has 5 image tokens in the prompt, and 5 and 4 by"):
        check_processor(processor, model)
    processor.image_processor.do_center_crop = False  # images keep their shapes
    processor.image_processor.do_resize = False
    with pytest.raises(ValueError, match="image tokens in the prompt, and 5 by"):
        check_processor(processor)


def test_a_processor_is_checked_and_its_prompts_have_a_fixed_date(opened, tmp_path):
    folder = shutil.copytree(opened.name, tmp_path / "model")
    processor = opened.processor
    processor.chat_template = "{{ strftime_now('%d') }}" + processor.chat_template
    processor.save_pretrained(folder)
    dated = open_checkpoint(folder).processor
    assert fixes_the_date(dated.chat_template)
    assert dated.tokenizer.chat_template == dated.chat_template
    processor.image_processor.do_center_crop = False
    processor.image_processor.do_resize = False
    processor.save_pretrained(folder)
    with pytest.raises(ValueError, match="must give all images one size"):
        _ = open_checkpoint(folder).processor


def test_tensors_that_are_not_of_the_model_are_told_of(opened, tmp_path, caplog):
    folder = shutil.copytree(opened.name, tmp_path / "model")
    store(folder, {**weights(folder), "model.more.weight": torch.ones(2)})
    spoilt = open_checkpoint(folder)
    spoilt.load(config=spoilt.config)  # as of a part, which reads some of them
    assert not caplog.messages
    spoilt.load()
    assert "has 1 tensors that are not of" in caplog.text and "model.more.weight" in caplog.text


@pytest.mark.parametrize("lost", [("processor_config.json",), ("tokenizer.json",)])
def test_a_model_without_a_processor_is_loaded(opened, tmp_path, lost):
    folder = shutil.copytree(opened.name, tmp_path / "model")
    for name in lost:
        (folder / name).unlink()
    assert open_checkpoint(folder).load().num_parameters() == opened.load().num_parameters()


def test_a_model_is_loaded_in_its_own_precision_as_the_class_of_this_package(tmp_path):
    tiny.model().bfloat16().save_pretrained(tmp_path)
    model = open_checkpoint(tmp_path).load()
    assert (type(model), model.dtype) == (NormAlignLlavaForConditionalGeneration, torch.bfloat16)


def test_a_model_that_does_not_generate_is_loaded(opened):
    bare = opened.load(NormAlignLlavaModel)
    assert type(bare) is NormAlignLlavaModel and not bare.can_generate()


def test_an_adapter_s_processor_is_read_where_no_configuration_is(opened, tmp_path):
    folder = shutil.copytree(opened.name, tmp_path / "adapter")
    (folder / "config.json").unlink()
    processor = Checkpoint(str(folder), None, {}).processor
    assert processor.image_token_id == opened.processor.image_token_id


@pytest.mark.skipif(find_spec("num2words") is not None, reason="num2words is installed")
@pytest.mark.parametrize("kind", [ImportError, OSError, ValueError])
def test_a_processor_that_needs_a_package_names_it(opened, kind):
    class Needs:
        @classmethod
        def from_pretrained(cls, name, **options):
            raise kind("Package `Num2Words` is required")

    with pytest.raises(ImportError, match="needs num2words, but it is not installed"):
        opened.preprocessor(Needs)


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


def test_a_model_of_code_of_its_own_is_not_built_before_it_is_loaded(opened):
    class Own:
        @classmethod
        def from_pretrained(cls, name, **options):
            assert options["trust_remote_code"] is True
            return tiny.model(), {"unexpected_keys": set(), "missing_keys": set()}

        @classmethod
        def from_config(cls, config, **options):
            raise TypeError("built")

    trusted = Checkpoint(opened.name, None, opened.stored, trust_remote_code=True)
    assert trusted.load(Own).num_parameters() > 0
    with pytest.raises(ValueError, match="TypeError: built"):
        opened.load(Own)


def test_a_pooling_layer_and_the_norm_of_a_llava_may_be_absent(tmp_path):
    config = ViTConfig(**tiny.ENCODER)
    ViTModel(config, add_pooling_layer=False).save_pretrained(tmp_path / "vit")
    assert open_checkpoint(tmp_path / "vit").load(AutoModel).num_parameters() > 0
    llava = tiny_parts.llava(tmp_path / "llava", tiny.llava())
    assert open_checkpoint(llava).load().model.multi_modal_projector.norm.weight.any()


def test_a_stock_llava_ends_answers_as_its_own_configuration_says(tmp_path):
    folder = Path(tiny_parts.llava(tmp_path / "llava", tiny.llava()))
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text().replace("<|im_end|>", "<|im_start|>"))
    opened = open_checkpoint(folder)
    ends = answer_ends(opened.processor.tokenizer, opened.processor.chat_template)
    model = opened.load(LlavaForConditionalGeneration)
    assert model.generation_config.eos_token_id == 2 and ends == [2, 1]


def test_another_configuration_is_used_in_place_of_its_own(opened):
    config = copy.deepcopy(opened.config)
    config.text_config.num_hidden_layers = 1
    whole, less = (
        opened.without_weights(NormAlignLlavaForConditionalGeneration, own)
        for own in (None, config)
    )
    assert less.num_parameters() < whole.num_parameters()
    assert opened.config.text_config.num_hidden_layers == 2


def test_a_checkpoint_that_is_not_there_has_the_remedy_that_is_given():
    with pytest.raises(ValueError, match=r"none does not exist here\. Look again"):
        open_checkpoint("none", remedy="Look again.")
