"""`~` in a path is the home folder in Python too, where no shell replaces it."""

import pytest
import stored
import tiny
import tiny_parts
from adapters import make_adapter

from normalign_llava import build_checkpoint, export_gguf, publish, retrofit_checkpoint
from normalign_llava.assembly.merge import merge_adapter


@pytest.fixture
def home(tmp_path, monkeypatch):
    """The home folder. The current folder is another one in it, and is empty at the end."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(elsewhere)
    yield tmp_path
    assert list(elsewhere.iterdir()) == []


def test_a_checkpoint_is_built_merged_and_exported_there(home):
    tiny_parts.siglip(
        home / "siglip", 28, hidden_size=64, intermediate_size=96, num_hidden_layers=3
    )
    tiny_parts.language(home / "language")
    report = build_checkpoint("~/siglip", "~/language", "~/model")
    assert report.output == str(home / "model")
    make_adapter(home / "model", home / "adapter")
    merged = merge_adapter("~/adapter", "~/merged")
    assert merged.output == str(home / "merged")
    assert stored.weights(home / "merged").keys() == stored.weights(home / "model").keys()
    published = publish("~/merged", "bea/kites", dry_run=True, check_loading=False)
    assert "config.json" in published.source.files
    exported = export_gguf("~/merged", "~/gguf")
    assert exported.output == str(home / "gguf")
    assert (home / "gguf" / exported.vision_file).is_file()


def test_a_llava_gets_the_norm_there(home):
    tiny_parts.llava(home / "llava", tiny.llava(tied=False))
    assert retrofit_checkpoint("~/llava", "~/model").output == str(home / "model")
    assert (home / "model" / "config.json").is_file()
