"""GGUF files of `normalign export` in a card and on the Hub."""

import shutil

import gguf
import numpy as np
import pytest
import stored
import tiny_parts
from huggingface_hub import ModelCard

from normalign_llava import build_checkpoint
from normalign_llava.export.run import export_gguf
from normalign_llava.hub_cards.card.write import render_card
from normalign_llava.hub_cards.push.publish import publish


SIZES = {"gguf/mmproj-kite.gguf": 2**19, "gguf/kite.gguf": 2**20, "other.gguf": 1}
"""Numbers in the tensor of each GGUF file, in float32."""
FILES = {*SIZES, "gguf/Modelfile"}


def write_gguf(file, size, description=None):
    writer = gguf.GGUFWriter(file, "qwen2")
    if description:
        writer.add_description(description)
    if size:
        writer.add_tensor("token_embd.weight", np.ones(size, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def exported(folder):
    (folder / "gguf").mkdir()
    for path, size in SIZES.items():
        write_gguf(folder / path, size)
    (folder / "gguf" / "Modelfile").write_text("FROM ./kite.gguf\nFROM ./mmproj-kite.gguf\n")
    return folder


def planned(folder, **options):
    messages = []
    publication = publish(
        folder, "ann/m", dry_run=True, check_loading=False, notify=messages.append, **options
    )
    return publication.source


def test_a_card_lists_gguf_files_with_their_sizes_and_the_tag_of_the_hub(exported):
    card = ModelCard(render_card(exported).text)
    assert "gguf" in card.data.tags
    assert "- `gguf/kite.gguf`, 4 MiB\n" in card.text
    described = "vision encoder, projector and norm, for llama.cpp's `--mmproj`"
    assert f"- `gguf/mmproj-kite.gguf`, 2 MiB: {described}\n" in card.text


def commands(folder, repo_id=None):
    """The lines for llama.cpp and Ollama in a card."""
    section = render_card(folder, repo_id=repo_id).text.split("With llama.cpp")[1]
    return section.split("```bash\n")[1].split("\n```")[0].splitlines()


def test_a_card_has_the_lines_that_start_llama_server_and_make_a_model_for_ollama(exported):
    (exported / "other.gguf").unlink()
    assert commands(exported) == [
        "llama-server -m gguf/kite.gguf --mmproj gguf/mmproj-kite.gguf",
        f"ollama create {exported.name} -f gguf/Modelfile",
    ]


def test_a_card_on_the_hub_downloads_the_files_first(exported):
    (exported / "other.gguf").unlink()
    download, enter, *_, ollama = commands(exported, "ann/m")
    files = "gguf/kite.gguf gguf/mmproj-kite.gguf gguf/Modelfile"
    assert download == f"hf download ann/m {files} --local-dir m"
    assert enter == "cd m"
    assert ollama == "ollama create m -f gguf/Modelfile"


@pytest.mark.parametrize("missing", ["Modelfile", "a file that it names"])
def test_a_card_has_no_line_for_ollama_if_it_would_fail(exported, missing):
    (exported / "other.gguf").unlink()
    modelfile = exported / "gguf" / "Modelfile"
    if missing == "Modelfile":
        modelfile.unlink()
    else:
        modelfile.write_text("FROM ./kite.gguf\nFROM ./mmproj-other.gguf\n")
    download, *_, last = commands(exported, "ann/m")
    assert "Modelfile" not in download
    assert last.startswith("llama-server")


def test_a_card_without_gguf_files_has_no_tag(folder):
    card = ModelCard(render_card(folder).text)
    assert "gguf" not in card.data.tags
    assert "llama.cpp" not in card.text


def test_gguf_files_are_published_on_request(exported):
    source = planned(exported, gguf=True)
    assert source.files.keys() >= FILES
    assert source.files["gguf/kite.gguf"] == (exported / "gguf" / "kite.gguf").resolve()
    assert source.sizes["gguf/kite.gguf"] == (exported / "gguf" / "kite.gguf").stat().st_size
    assert b"gguf/kite.gguf" in source.files["README.md"]


def test_gguf_files_stay_here_and_out_of_the_card_otherwise(exported):
    source = planned(exported)
    assert not source.files.keys() & FILES
    assert set(source.excluded) >= FILES
    assert b"gguf" not in source.files["README.md"]


def test_gguf_files_that_do_not_exist_cannot_be_published(folder):
    with pytest.raises(ValueError, match="has no GGUF files that can be published. Write them"):
        planned(folder, gguf=True)


def test_an_adapter_is_merged_before_its_gguf_files_are_published(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "kite.gguf").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match="Merge it first: `normalign merge"):
        planned(tmp_path, gguf=True)


def test_a_local_path_in_a_gguf_file_is_refused(exported):
    write_gguf(exported / "gguf" / "kite.gguf", 1, description=f"made in {exported}")
    with pytest.raises(ValueError, match="gguf/kite.gguf, line 1: a local path"):
        planned(exported, gguf=True)


@pytest.fixture(scope="module")
def with_its_gguf(tmp_path_factory):
    """A checkpoint, with the vision part that `normalign export` wrote and a text part."""
    folder = tmp_path_factory.mktemp("exported")
    vision = tiny_parts.siglip(
        folder / "siglip", 28, hidden_size=64, intermediate_size=96, num_hidden_layers=3
    )
    language = tiny_parts.language(folder / "language")
    build_checkpoint(vision, language, folder / "kite")
    export_gguf(folder / "kite", folder / "kite" / "gguf")
    write_gguf(folder / "kite" / "gguf" / "kite.gguf", 4)
    return folder / "kite"


def test_gguf_files_of_these_weights_are_published_without_their_record(with_its_gguf):
    source = planned(with_its_gguf, gguf=True)
    assert source.files.keys() >= {"gguf/kite.gguf", "gguf/mmproj-kite.gguf", "gguf/Modelfile"}
    assert "gguf/export.json" in source.excluded


def test_gguf_files_of_other_weights_are_refused(with_its_gguf, tmp_path):
    trained = shutil.copytree(with_its_gguf, tmp_path / "kite")
    tensors = stored.weights(trained)
    tensors["model.multi_modal_projector.norm.weight"] *= 1.5
    stored.store(trained, tensors)
    with pytest.raises(ValueError, match="kite/gguf was exported from other weights than .*again"):
        planned(trained, gguf=True)
    assert "gguf/kite.gguf" in planned(trained).excluded


@pytest.mark.parametrize("content", ["zeros", "too short", "no tensors"])
def test_a_file_that_is_no_gguf_file_with_tensors_is_refused(exported, content):
    file = exported / "gguf" / "kite.gguf"
    if content == "no tensors":
        write_gguf(file, 0)
    else:
        file.write_bytes({"zeros": bytes(1000), "too short": b"GGUF"}[content])
    with pytest.raises(ValueError, match="gguf/kite.gguf is not a GGUF file with tensors"):
        planned(exported, gguf=True)


def test_a_modelfile_that_names_a_missing_file_is_refused(exported):
    (exported / "gguf" / "mmproj-kite.gguf").unlink()
    expected = "gguf/Modelfile names ./mmproj-kite.gguf, but this file does not exist"
    with pytest.raises(ValueError, match=expected):
        planned(exported, gguf=True)
