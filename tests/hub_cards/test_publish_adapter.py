# SPDX-License-Identifier: Apache-2.0
"""Publishing adapters: merged, which is the default, and as adapters with their base pinned."""

import json
import shutil

import pytest
import train_data
import training

from normalign_llava.train.run import main


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def adapter(checkpoint, tmp_path_factory):
    """What training wrote, and a file that is not to be sent. Its base is named by its folder."""
    folder = tmp_path_factory.mktemp("parts")
    train_rows = []
    for number in range(4):
        train_rows.append(train_data.llava(f"<image>\nand {number}?", f"it is {number}", "red.png"))
    train_data.write_json(folder / "data", train_rows)
    recipe = training.recipe(
        folder,
        folder,
        model_name_or_path=str(checkpoint),
        global_batch_size=2,
        max_steps=1,
        use_peft=True,
        lora_r=2,
    )
    adapter_folder = main([recipe])
    (adapter_folder / "optimizer.pt").write_bytes(b"not to be sent")
    return adapter_folder


def read_adapter_config(adapter_folder):
    return json.loads((adapter_folder / "adapter_config.json").read_text())


def assert_nothing_sent(hub):
    for request in hub.requests:
        assert not request.startswith(("POST", "PUT"))


@pytest.fixture
def repository_of_others(hub):
    """A repository with an adapter's configuration, which would be read beside the model."""
    files = {"adapter_config.json": b"{}", "notes.md": b"mine"}
    return hub.create("ann/m", files=files)


def test_files_of_others_are_found_before_an_adapter_is_merged(
    publish, adapter, repository_of_others, tmp_path
):
    absent_base = tmp_path / "absent"
    status, printed_text = publish(adapter, "--no-verify", "--base", str(absent_base))
    assert status == 1
    assert "- adapter_config.json would be read beside" in printed_text
    assert len(repository_of_others.commits()) == 2


def test_by_default_the_merged_model_is_published(publish, adapter, repository_of_others, tmp_path):
    status, printed_text = publish(adapter, "--no-verify", "--replace-files", TMPDIR=str(tmp_path))
    assert status == 0, printed_text
    assert "removed: adapter_config.json." in printed_text
    published = set(repository_of_others.head().files)
    assert "model.safetensors.index.json" in published
    assert "modeling_normalign_llava.py" in published
    assert "README.md" in published
    for file_path in published:
        assert not file_path.startswith(("adapter", "optimizer"))


@pytest.fixture
def measured_adapter(adapter, tmp_path):
    """A copy of the adapter that was evaluated and diagnosed."""
    copied = shutil.copytree(adapter, tmp_path / "measured")
    (copied / "evaluation").mkdir()
    (copied / "diagnostics").mkdir()
    return copied


def test_results_of_an_adapter_are_not_those_of_the_merged_model(
    publish, measured_adapter, tmp_path
):
    status, printed_text = publish(
        measured_adapter,
        "--dry-run",
        "--no-verify",
        TMPDIR=str(tmp_path),
    )
    assert status == 0, printed_text
    assert "model.safetensors" in printed_text
    assert "evaluation of the adapter stays here" in printed_text
    assert "diagnostics of the adapter stays here" in printed_text
    assert not list(tmp_path.glob("normalign-merged-*"))


@pytest.fixture
def base_repository(hub, checkpoint):
    """The base of the adapter on the Hub."""
    return hub.serve("lab/base", checkpoint)


def test_an_adapter_is_published_after_its_base(publish, hub, adapter):
    status, printed_text = publish(adapter, "--adapter")
    assert status == 1
    assert "Publish the base first" in printed_text
    assert_nothing_sent(hub)


def test_an_adapter_is_not_published_on_a_base_of_other_settings(
    publish, hub, base_repository, adapter, tmp_path
):
    changed = shutil.copytree(adapter, tmp_path / "other-settings")
    record = json.loads((changed / "training.json").read_text())
    record["config_changes"]["projector_gain_init"] = "one"
    (changed / "training.json").write_text(json.dumps(record))
    status, printed_text = publish(changed, "--adapter", "--base", "lab/base")
    assert status == 1
    assert "projector_gain_init 'one', not 'text_norm'" in printed_text
    assert_nothing_sent(hub)


def test_an_adapter_is_not_published_on_a_base_with_other_code(
    publish, hub, checkpoint, adapter, tmp_path
):
    foreign_base = shutil.copytree(checkpoint, tmp_path / "foreign")
    (foreign_base / "modeling_normalign_llava.py").write_text("# other code")
    hub.serve("lab/foreign", foreign_base)
    status, printed_text = publish(adapter, "--adapter", "--base", "lab/foreign")
    assert status == 1
    assert "would run code" in printed_text
    assert "modeling_normalign_llava.py" in printed_text
    assert_nothing_sent(hub)


@pytest.fixture
def published_adapter(publish, hub, base_repository, adapter):
    """The repository of the adapter, published as one."""
    status, printed_text = publish(adapter, "--adapter", "--base", "lab/base", "--no-verify")
    assert status == 0, printed_text
    return hub.repository("ann/m")


def test_as_an_adapter_with_its_base_pinned(
    published_adapter, base_repository, checkpoint, adapter
):
    published_config = json.loads(published_adapter.read("adapter_config.json"))
    assert published_config["base_model_name_or_path"] == "lab/base"
    assert published_config["revision"] == base_repository.commit
    assert base_repository.commit in published_adapter.read("README.md").decode()

    published = published_adapter.head().files
    assert "model.safetensors" not in published
    assert "optimizer.pt" not in published
    assert read_adapter_config(adapter)["base_model_name_or_path"] == str(checkpoint)


def test_the_merged_model_takes_the_place_of_an_adapter_that_was_published(
    publish, published_adapter, adapter
):
    status, printed_text = publish(adapter, "--no-verify")
    assert status == 0, printed_text
    assert "removed: adapter_config.json, adapter_model.safetensors." in printed_text
    assert len(published_adapter.commits()) == 3
    published = published_adapter.head().files
    assert "adapter_config.json" not in published
    assert "adapter_model.safetensors" not in published


@pytest.mark.nightly
def test_an_adapter_loads_from_its_commit_on_its_base(publish, hub, base_repository, adapter):
    status, printed_text = publish(adapter, "--adapter", "--base", "lab/base")
    assert status == 0, printed_text
    assert f"at {hub.repository('ann/m').commit}" in printed_text
