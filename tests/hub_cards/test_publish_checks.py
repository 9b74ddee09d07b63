"""What of a checkpoint folder is sent, and whether it may be: every fault is made on disk."""

import json
import shutil
from pathlib import Path

import pytest
import stored
import torch
from paths import ROOT
from peft import LoraConfig, get_peft_model
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from safetensors.torch import load_file, save_file

from normalign_llava import NormAlignLlavaForConditionalGeneration
from normalign_llava.checkpoint.files import INDEX, WEIGHTS
from normalign_llava.diagnose.report import SCHEMA_VERSION
from normalign_llava.hub_cards.card import facts
from normalign_llava.hub_cards.push import source
from normalign_llava.hub_cards.push.checks import check_checkpoint, check_private
from normalign_llava.hub_cards.push.source import PublishSource, choose_files


REPORT = ROOT / "docs/quickstart/report.json"
SHARD = "model-vision_tower-00001-of-00001.safetensors"
BUILT = {
    "build.json",
    "chat_template.jinja",
    "config.json",
    "configuration_normalign_llava.py",
    "generation_config.json",
    "modeling_normalign_llava.py",
    "processor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    *stored.FILES,
}
GAIN = "model.multi_modal_projector.norm.weight"
BIAS = "model.multi_modal_projector.norm.bias"
WIDTH = 32  # of the tiny language model
TOKEN = "my-token-0123456789"
SECRET = f"hf_{'AbCdEfGhIj' * 3}KlMn"


def write_texts(folder, *names):
    for file_name in names:
        text_path = folder / file_name
        text_path.parent.mkdir(parents=True, exist_ok=True)
        text_path.write_text("something\n")


def change_json(json_path, **values):
    content = json.loads(json_path.read_text())
    json_path.write_text(json.dumps(content | values, indent=2))


def remove_key(json_path, key):
    content = json.loads(json_path.read_text())
    content.pop(key, None)
    json_path.write_text(json.dumps(content))


SENT = [
    "LICENSE",
    "LICENCE.txt",
    "NOTICE.md",
    "evaluation/summary.json",
    "chat_templates/a.jinja",
    "dynamics.jsonl",
    "training.json",
]
NOT_SENT = [
    ".cache/a",
    ".env",
    "checkpoint-1/a.pt",
    "dropped_rows.jsonl",
    "evaluation/pope/a.jsonl",
    "my.py",
    "notes.txt",
    "optimizer.pt",
    "pytorch_model.bin",
    "samples/1.json",
    "tf/config.json",
    "tokenizer.pkl",
    "trainer_state.json",
    "training_args.bin",
]


@pytest.fixture
def mixed_files(folder):
    """What is chosen of a folder with files that are sent and files that are not."""
    write_texts(folder, *SENT, *NOT_SENT)
    return choose_files(folder, {"README.md": b"# Card"})


def test_of_a_folder_what_is_on_the_list_is_sent(mixed_files):
    assert mixed_files.files.keys() == {"README.md", *BUILT, *SENT}
    assert mixed_files.excluded == [
        ".cache/",
        ".env",
        "checkpoint-1/",
        "dropped_rows.jsonl",
        "evaluation/pope/",
        "my.py",
        "notes.txt",
        "optimizer.pt",
        "pytorch_model.bin",
        "samples/",
        "tf/",
        "tokenizer.pkl",
        "trainer_state.json",
        "training_args.bin",
    ]


def test_weights_are_chosen_as_files_and_others_as_their_content(folder, mixed_files):
    assert mixed_files.files["config.json"] == (folder / "config.json").read_bytes()
    assert mixed_files.files[SHARD] == folder / SHARD
    assert mixed_files.files["README.md"] == b"# Card"


VISION_NOTICE = "notices/vision/LICENSE"
LANGUAGE_NOTICE = "notices/language/NOTICE.txt"


def test_notices_of_the_parts_are_sent(folder):
    write_texts(
        folder,
        LANGUAGE_NOTICE,
        "notices/other/LICENSE",
        "notices/vision/deep/a",
        "notices/vision/.a",
    )
    vision_path = folder / VISION_NOTICE
    vision_path.write_text("Copyright \u00a9 somebody\n", "utf-8")
    chosen = choose_files(folder, {})
    chosen_notices = {file_path for file_path in chosen.files if file_path.startswith("notices")}
    assert chosen_notices == {VISION_NOTICE, LANGUAGE_NOTICE}
    assert chosen.files[VISION_NOTICE] == vision_path.read_bytes()
    assert chosen.excluded == ["notices/other/", "notices/vision/.a", "notices/vision/deep/"]
    assert facts.notices(folder) == [LANGUAGE_NOTICE, VISION_NOTICE]


def test_a_notice_may_have_a_mebibyte(folder):
    write_texts(folder, LANGUAGE_NOTICE)
    (folder / LANGUAGE_NOTICE).write_bytes(b"a" * 2**20)
    assert len(choose_files(folder, {}).files[LANGUAGE_NOTICE]) == 2**20


WRITTEN_AND_READ = {
    "adapter_config.json",
    "adapter_model.safetensors",
    "added_tokens.json",
    "build.json",
    "chat_template.jinja",
    "chat_template.json",
    "chat_templates/a.jinja",
    "config.json",
    "configuration_normalign_llava.py",
    "dynamics.jsonl",
    "generation_config.json",
    "merges.txt",
    "model-1-of-2.safetensors",
    "model.safetensors",
    "model.safetensors.index.json",
    "modeling_normalign_llava.py",
    "preprocessor_config.json",
    "processor_config.json",
    "sentencepiece.bpe.model",
    "special_tokens_map.json",
    "spiece.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "training.json",
    "vocab.json",
    "vocab.txt",
}
ONLY_READ = {
    "adapter_model.bin",
    "chat_templates/a.txt",
    "custom_generate/generate.py",
    "flax_model.msgpack",
    "pytorch_model-1-of-2.bin",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "tf_model.h5",
    "video_preprocessor_config.json",
}
ONLY_WRITTEN = {
    "diagnostics/a.png",
    "diagnostics/report.json",
    "evaluation/summary.json",
}
OF_PEOPLE = {
    "LICENSE",
    "README.md",
    "a/config.json",
    "model.py",
    "my.safetensors",
    "notes.md",
}
ALL_NAMES = WRITTEN_AND_READ | ONLY_READ | ONLY_WRITTEN | OF_PEOPLE


def test_what_is_written_beside_a_model():
    written_names = {
        file_name for file_name in ALL_NAMES if source.matches(file_name, source.OWN_NAMES)
    }
    assert written_names == WRITTEN_AND_READ | ONLY_WRITTEN


def test_what_is_read_beside_a_model():
    """What transformers would read, or run, must not be left there by somebody else."""
    read_names = {file_name for file_name in ALL_NAMES if source.matches(file_name, source.READ)}
    assert read_names == WRITTEN_AND_READ | ONLY_READ


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\xff\xfe latin", "cannot be loaded"),
        (b"a\0b", "null character"),
        (b"a" * (2**20 + 1), "1,048,577 bytes"),
    ],
)
def test_a_notice_that_is_not_a_short_text_is_refused(folder, content, reason):
    write_texts(folder, VISION_NOTICE)
    (folder / VISION_NOTICE).write_bytes(content)
    with pytest.raises(ValueError, match=f"{VISION_NOTICE}.*{reason}"):
        choose_files(folder, {})


@pytest.fixture
def sharded_folder(folder, tmp_path):
    """A copy of the folder with its weights in several files."""
    copied = Path(shutil.copytree(folder, tmp_path / "sharded"))
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(folder)
    model.save_pretrained(copied, max_shard_size="40KB")
    return copied


def test_the_shards_that_are_loaded_are_sent(sharded_folder):
    shards = sorted(file_path.name for file_path in sharded_folder.glob("model-*.safetensors"))
    assert len(shards) > 1
    stale_shard = "model-00009-of-00009.safetensors"
    shutil.copyfile(sharded_folder / shards[0], sharded_folder / stale_shard)
    chosen = choose_files(sharded_folder, {})
    chosen_weights = {file_path for file_path in chosen.files if "safetensors" in file_path}
    assert chosen_weights == {*shards, INDEX}
    assert chosen.excluded == [stale_shard]


def test_of_two_saves_the_one_that_is_loaded_is_sent(folder, sharded_folder):
    stored.in_one_file(folder)
    shutil.copyfile(sharded_folder / INDEX, folder / INDEX)
    chosen = choose_files(folder, {})
    assert WEIGHTS in chosen.files
    assert chosen.excluded == [INDEX]


@pytest.fixture
def local_report():
    """A report with questions and images of samples."""
    report = json.loads(REPORT.read_text("utf-8"))
    assert report["report"]["attention"][0]["question"]
    assert report["against"]["attention"][3]["maps"]
    return report


@pytest.fixture
def diagnosed_files(folder, local_report):
    """What is chosen of a folder with that report, its images and others."""
    diagnostics = folder / "diagnostics"
    write_texts(diagnostics, "report.html")
    shutil.copyfile(REPORT, diagnostics / "report.json")

    image_names = {"stray.png", "image_9.png"}
    for figure in local_report["figures"]:
        image_names.add(figure["file"])
    for model_name in ("report", "against"):
        for question in local_report[model_name]["attention"][:4]:
            if question["image"]:
                image_names.add(question["image"])
    for image_name in image_names:
        Image.new("RGB", (4, 4)).save(diagnostics / image_name)
    return choose_files(folder, {})


@pytest.fixture
def public_report(diagnosed_files):
    return json.loads(diagnosed_files.files["diagnostics/report.json"])


@pytest.fixture
def public_figures(local_report):
    """The names of the figures that show no sample."""
    all_figures = {figure["file"] for figure in local_report["figures"]}
    public = {file_name for file_name in all_figures if not file_name.startswith("attention_")}
    assert len(public) < len(all_figures)
    return public


def test_figures_are_sent_without_samples(diagnosed_files, public_report, public_figures):
    sent_paths = {file_path for file_path in diagnosed_files.files if "/" in file_path}
    expected = {f"diagnostics/{file_name}" for file_name in public_figures}
    assert sent_paths == {*expected, "diagnostics/report.json"}
    assert {figure["file"] for figure in public_report["figures"]} == public_figures
    for file_name in ("report.html", "image_9.png", "stray.png"):
        assert f"diagnostics/{file_name}" in diagnosed_files.excluded


def test_a_report_is_sent_without_questions(local_report, public_report):
    assert "first question" in local_report["provenance"]
    assert "first question" not in public_report["provenance"]
    for model_name in ("report", "against"):
        local_attention = local_report[model_name]["attention"]
        public_attention = public_report[model_name]["attention"]
        for public_question, local_question in zip(public_attention, local_attention, strict=True):
            assert public_question["question"] == ""
            assert public_question["image"] is None
            assert public_question["maps"] == []
            assert public_question["image_share"] == local_question["image_share"]
            assert public_question.keys() == local_question.keys()


def test_all_else_of_a_report_is_sent(local_report, public_report):
    for model_name in ("report", "against"):
        del local_report[model_name]["attention"]
        del public_report[model_name]["attention"]
        assert public_report[model_name] == local_report[model_name]
    assert public_report["findings"] == local_report["findings"]
    assert public_report["schema_version"] == SCHEMA_VERSION


def assert_faults(folder, *expected):
    """Asserts that the faults are these, in this order: `expected` has words of each."""
    with pytest.raises(ValueError, match="cannot be published") as error:
        check_checkpoint(folder)
    fault_lines = str(error.value).splitlines()[1:]
    for fault_line, words in zip(fault_lines, expected, strict=True):
        assert words in fault_line


def test_a_built_checkpoint_has_no_fault(folder):
    check_checkpoint(folder)


def test_every_fault_is_listed(folder):
    code_path = folder / "modeling_normalign_llava.py"
    code_path.write_text(code_path.read_text() + "# changed\n")
    (folder / "configuration_normalign_llava.py").unlink()
    config = json.loads((folder / "config.json").read_text())
    del config["auto_map"]["AutoModel"]
    config["text_config"]["tie_word_embeddings"] = False
    change_json(folder / "config.json", **config)
    change_json(folder / "tokenizer_config.json", padding_side=None)
    weights = stored.weights(folder)
    weights[GAIN] = torch.full((WIDTH,), torch.nan)
    weights[BIAS] = torch.zeros(WIDTH, dtype=torch.bfloat16)
    stored.store(folder, weights)

    assert_faults(
        folder,
        "configuration_normalign_llava.py is not this version's",
        "modeling_normalign_llava.py is not this version's",
        "auto_map in config.json is not this version's",
        "pads on the right",
        "ties embeddings otherwise",
        f"{BIAS} is torch.bfloat16",
        f"{GAIN} has 32 NaN",
    )


def test_a_model_of_another_type_is_refused(folder):
    change_json(folder / "config.json", model_type="llava")
    with pytest.raises(ValueError, match="is a 'llava' model"):
        check_checkpoint(folder)


def test_what_a_configuration_does_not_say_is_a_fault(folder):
    remove_key(folder / "tokenizer_config.json", "padding_side")
    remove_key(folder / "config.json", "auto_map")
    remove_key(folder / "config.json", "tie_word_embeddings")
    assert_faults(
        folder,
        "auto_map in config.json",
        "pads on the right",
        "ties embeddings other",
    )


def test_one_infinite_element_of_the_gain_is_a_fault(folder):
    weights = stored.weights(folder)
    weights[GAIN][3] = torch.inf
    stored.store(folder, weights)
    with pytest.raises(ValueError, match=f"{GAIN} has 1 NaN or infinite"):
        check_checkpoint(folder)


@pytest.fixture
def adapter_weights(built, tmp_path):
    """The weights' file of an adapter without faults."""
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(built)
    settings = LoraConfig(target_modules=["v_proj"], modules_to_save=["multi_modal_projector"])
    folder = tmp_path / "adapter"
    get_peft_model(model, settings).save_pretrained(folder)
    check_checkpoint(folder)
    return folder / "adapter_model.safetensors"


def test_the_norm_of_an_adapter_is_finite(adapter_weights):
    tensors = load_file(adapter_weights)
    (gain_name,) = [
        parameter_name for parameter_name in tensors if parameter_name.endswith("norm.weight")
    ]
    tensors[gain_name] = torch.full((WIDTH,), float("nan"))
    save_file(tensors, adapter_weights)
    assert_faults(adapter_weights.parent, f"{gain_name} has 32 NaN or infinite values")


def test_the_weights_of_an_adapter_are_whole(adapter_weights):
    adapter_weights.write_bytes(adapter_weights.read_bytes()[:100])
    with pytest.raises(ValueError, match="adapter_model.safetensors cannot be loaded"):
        check_checkpoint(adapter_weights.parent)


def private_faults(chosen):
    """Returns what must not be published of chosen files. No fault shows a secret."""
    with pytest.raises(ValueError, match="must not be published") as error:
        check_private(chosen, TOKEN)
    message = str(error.value)
    assert TOKEN not in message
    assert SECRET not in message
    return message.splitlines()[1:]


def test_tokens_are_found_anywhere(folder):
    (folder / "README.md").write_text(f"# Model\n\n{TOKEN}\nand {SECRET}\nnot hf_{'x' * 34}\n")
    (folder / "chat_template.jinja").write_text(f"{{# {SECRET} #}}")
    save_file(load_file(folder / SHARD), folder / SHARD, {"format": "pt", "by": TOKEN})
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"][TOKEN] = 999
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))

    fault_lines = private_faults(choose_files(folder, {}))
    places = [fault_line.removeprefix("- ").split(":")[0] for fault_line in fault_lines]
    assert sorted(places) == [
        "README.md, line 3",
        "README.md, line 4",
        "chat_template.jinja, line 1",
        f"{SHARD}, line 1",
        "tokenizer.json, line 1",
    ]
    assert "your token, my-t..." in fault_lines[0]
    assert "a Hugging Face token, hf_A..." in fault_lines[1]


def test_paths_of_this_machine_are_found(folder, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    change_json(folder / "config.json", _name_or_path="/home/me/models/base")
    (folder / "vocab.txt").write_text(f"it was at {folder.parent}/x\n")
    of_home, of_folder = private_faults(choose_files(folder, {}))
    assert "config.json, line" in of_home
    assert "a local path, /home/me. " in of_home
    assert str(folder.parent) in of_folder


def test_paths_are_found_whose_letters_json_escapes(folder):
    moved_folder = folder.rename(folder.parent / "Modèle ß")
    escaped = json.dumps(str(moved_folder)).strip('"')
    (moved_folder / "vocab.json").write_text(f'{{"at": "{escaped}/x"}}')
    (fault_line,) = private_faults(choose_files(moved_folder, {}))
    assert f"vocab.json, line 1: a local path, {escaped}. " in fault_line


def source_of_texts(folder, *contents):
    """Returns files of these texts, as they would be sent from a folder."""
    files = {}
    for number, content in enumerate(contents):
        files[f"{number}.txt"] = content.encode()
    return PublishSource(folder, files, {}, [])


def test_the_longest_path_is_named_also_if_the_home_is_a_link(tmp_path, monkeypatch):
    real_home = tmp_path / "real"
    real_home.mkdir()
    linked_home = tmp_path / "home"
    linked_home.symlink_to(real_home)
    monkeypatch.setenv("HOME", str(linked_home))

    folder = tmp_path / "models" / "m"
    places = [real_home, linked_home, folder, folder.parent]
    contents = [f"at {place}/x" for place in places]
    fault_lines = private_faults(source_of_texts(folder, *contents))
    for place, fault_line in zip(places, fault_lines, strict=True):
        assert f"a local path, {place}. " in fault_line


@pytest.mark.parametrize("token", [TOKEN, ""])
def test_a_home_as_common_as_root_and_a_missing_token_are_in_no_file(tmp_path, monkeypatch, token):
    monkeypatch.setenv("HOME", "/root")
    common = source_of_texts(tmp_path / "m", "/root/x and /home", "nothing")
    check_private(common, token)


def test_a_token_of_an_organisation_is_found(tmp_path):
    text = f"api_org_{'AbCdEfGhIj' * 3}KlMn"
    (fault_line,) = private_faults(source_of_texts(tmp_path / "m", text))
    assert "a Hugging Face token, api_..." in fault_line


def test_disguised_files_and_figures_are_looked_into(tmp_path):
    comment = PngInfo()
    comment.add_text("Comment", f"drawn in {tmp_path}/plots")
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png", pnginfo=comment)
    (tmp_path / "b.png").write_bytes(b"\x80\x04pickle")
    torch.save({"a": 1}, tmp_path / "tokenizer.model")
    expected = {
        "a.png": f"path, {tmp_path}. ",
        "b.png": "a pickle",
        "tokenizer.model": "a pickle",
    }
    files = {file_name: (tmp_path / file_name).read_bytes() for file_name in expected}
    fault_lines = private_faults(PublishSource(tmp_path, files, {}, []))
    for fault_line, (file_name, reason) in zip(fault_lines, expected.items(), strict=True):
        assert fault_line.startswith(f"- {file_name}")
        assert reason in fault_line
