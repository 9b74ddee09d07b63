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
    """What training wrote; its base is named by its folder."""
    parts = tmp_path_factory.mktemp("parts")
    rows = [train_data.llava(f"<image>\nand {i}?", f"it is {i}", "red.png") for i in range(4)]
    train_data.write_json(parts / "data", rows)
    options = {"global_batch_size": 2, "max_steps": 1, "use_peft": True, "lora_r": 2}
    folder = main([training.recipe(parts, parts, model_name_or_path=str(checkpoint), **options)])
    (folder / "optimizer.pt").write_bytes(b"not to be sent")
    return folder


def test_by_default_the_merged_model_is_published(publish, hub, adapter, tmp_path):
    theirs = hub.create("ann/m", files={"adapter_config.json": b"{}", "notes.md": b"mine"})
    absent = ["--base", str(tmp_path / "absent")]  # which merging would need
    status, shown = publish(adapter, "--no-verify", *absent)
    assert status == 1 and "- adapter_config.json would be read beside" in shown
    assert len(theirs.commits()) == 2
    replacing = ["--no-verify", "--replace-files"]
    status, shown = publish(adapter, *replacing, TMPDIR=str(tmp_path))
    assert status == 0 and "removed: adapter_config.json." in shown, shown
    files = set(hub.repository("ann/m").head().files) - {".gitattributes"}
    assert {"model.safetensors.index.json", "modeling_normalign_llava.py", "README.md"} <= files
    assert not [path for path in files if path.startswith(("adapter", "optimizer"))]
    measured = ("evaluation", "diagnostics")
    for name in measured:
        (adapter / name).mkdir()
    status, shown = publish(adapter, "--dry-run", "--no-verify", TMPDIR=str(tmp_path))
    for name in measured:
        (adapter / name).rmdir()
    assert status == 0 and "model.safetensors" in shown, shown
    assert all(f"{name} of the adapter stays here" in shown for name in measured)
    assert not list(tmp_path.glob("normalign-merged-*"))


def test_as_an_adapter_with_its_base_pinned(publish, hub, checkpoint, adapter, tmp_path):
    served = hub.serve("lab/base", checkpoint)
    status, shown = publish(adapter, "--adapter")
    assert status == 1 and "Publish the base first" in shown
    other = shutil.copytree(adapter, tmp_path / "other-settings")
    record = json.loads((other / "training.json").read_text())
    record["config_changes"]["projector_gain_init"] = "one"
    (other / "training.json").write_text(json.dumps(record))
    status, shown = publish(other, "--adapter", "--base", "lab/base")
    assert status == 1 and "projector_gain_init 'one', not 'text_norm'" in shown
    foreign = shutil.copytree(checkpoint, tmp_path / "foreign")
    (foreign / "modeling_normalign_llava.py").write_text("# other code")
    hub.serve("lab/foreign", foreign)
    status, shown = publish(adapter, "--adapter", "--base", "lab/foreign")
    assert status == 1 and "would run code" in shown and "modeling_normalign_llava.py" in shown
    assert not [line for line in hub.requests if line.startswith(("POST", "PUT"))]

    status, shown = publish(adapter, "--adapter", "--base", "lab/base", "--no-verify")
    assert status == 0, shown
    repository = hub.repository("ann/m")
    config = json.loads(repository.read("adapter_config.json"))
    assert (config["base_model_name_or_path"], config["revision"]) == ("lab/base", served.commit)
    here = json.loads((adapter / "adapter_config.json").read_text())
    assert here["base_model_name_or_path"] == str(checkpoint)
    assert not {"model.safetensors", "optimizer.pt"} & set(repository.head().files)
    assert served.commit in repository.read("README.md").decode()

    # The merged model takes the place of the adapter, which this package published.
    status, shown = publish(adapter, "--no-verify")
    assert status == 0, shown
    gone = ["adapter_config.json", "adapter_model.safetensors"]
    assert f"removed: {', '.join(gone)}." in shown and len(repository.commits()) == 3
    assert not {*gone} & set(repository.head().files)


@pytest.mark.nightly
def test_an_adapter_loads_from_its_commit_on_its_base(publish, hub, checkpoint, adapter):
    hub.serve("lab/base", checkpoint)
    status, shown = publish(adapter, "--adapter", "--base", "lab/base")
    assert status == 0 and f"at {hub.repository('ann/m').commit}" in shown, shown
