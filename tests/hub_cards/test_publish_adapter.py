# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Publishing adapter folders: merged, which is what happens by default, and as adapters with their base pinned."""

import json
import shutil
import subprocess
import sys

import pytest
import train_data
import training
from disk import small_disk
from publish_worker import Worker

from normalign_llava.hub_cards.push.contents import CODE
from normalign_llava.train.run import main


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts")
    training.checkpoint(folder)
    train_data.write_json(
        folder / "data", [train_data.llava(f"<image>\nand {i}?", f"it is {i}", "red.png") for i in range(4)]
    )
    return folder


@pytest.fixture(scope="module")
def base(parts):
    return parts / "model"


@pytest.fixture(scope="module")
def adapter(parts):
    """What training wrote; its base is named by its folder."""
    options = {"global_batch_size": 2, "learning_rate": 1e-2, "max_steps": 1, "use_peft": True, "lora_r": 2}
    folder = main([training.recipe(parts, parts, **options)])
    (folder / "optimizer.pt").write_bytes(b"not to be sent")
    return folder


def request(hub, adapter, **arguments):
    arguments = {"token": hub.token("ann"), "endpoint": hub.url, "waits": [0, 0], **arguments}
    return {"checkpoint": str(adapter), "repo_id": "ann/m", "arguments": arguments}


def test_by_default_the_merged_model_is_published_from_the_command_line(hub, prepared, adapter, tmp_path):
    token, command = hub.token("ann"), ["-m", "normalign_llava", "publish", adapter, "--repo-id", "ann/m"]
    ran = prepared.run(command, HF_TOKEN=token, TMPDIR=str(tmp_path), COLUMNS="60")
    assert ran.returncode == 0, ran.stderr
    files = set(hub.repository("ann/m").head().files) - {".gitattributes"}
    assert {"model.safetensors", "modeling_normalign_llava.py", "README.md"} <= files
    assert not [path for path in files if path.startswith(("adapter", "optimizer"))]
    assert f": {len(files)} of {len(files)} files" in ran.stdout
    assert f"Loading ann/m in the same way, at {hub.repository('ann/m').head().oid}.\n" in ran.stdout
    assert f'commit = "{hub.repository("ann/m").head().oid}"' in ran.stdout
    assert "AutoModelForImageTextToText" in ran.stdout and "Peft" not in ran.stdout
    assert not set("\r\x1b") & set(ran.stdout) and "LFS" not in ran.stderr and token not in ran.stdout + ran.stderr
    assert not list(tmp_path.glob("normalign-merged-*")) + list(tmp_path.glob("clean-process-*"))


def test_as_an_adapter_with_its_base_pinned(worker, hub, base, adapter, tmp_path):
    served = hub.serve("lab/base", base)
    unfit = shutil.copytree(adapter, tmp_path / "unfit")
    (unfit / "chat_template.jinja").write_text("no image")
    said = worker.ask(request(hub, unfit, dry_run=True))
    assert said["type"] == "ValueError" and f"The checkpoint {unfit}, merged, cannot be published" in said["error"]
    assert "normalign-merged" not in said["error"]
    said = worker.ask(request(hub, adapter, as_adapter=True))
    assert said["type"] == "ValueError" and "Publish the base first" in said["error"]
    said = worker.ask(request(hub, adapter, as_adapter=True, base="lab/other"))
    assert said["type"] == "ValueError" and "lab/other" in said["error"] and "--base" in said["error"]
    other = shutil.copytree(adapter, tmp_path / "other-arm")
    record = json.loads((other / "training.json").read_text())
    record["config_changes"]["projector_gain_init"] = "one"
    (other / "training.json").write_text(json.dumps(record))
    said = worker.ask(request(hub, other, as_adapter=True, base="lab/base"))
    assert said["type"] == "ValueError" and "projector_gain_init 'one', not 'text_norm'" in said["error"]
    assert "lab/base" in said["error"] and "without --adapter" in said["error"]
    for name, content in {
        "modeling_normalign_llava.py": served.read("modeling_normalign_llava.py") + b"open('ran', 'w')\n",
        "tokenizer_config.json": b'{"auto_map": {"AutoTokenizer": ["x.X", null]}}',
    }.items():
        hub.create("lab/foreign", files={path: served.read(path) for path in served.head().files} | {name: content})
        said = worker.ask(request(hub, adapter, as_adapter=True, base="lab/foreign"))
        assert said["type"] == "ValueError" and "would run code that is not this" in said["error"]
        assert name in said["error"] and "or the merged model, without --adapter" in said["error"]
    empty = {"config.json": (base / "config.json").read_bytes()}
    hub.create("lab/empty", files=empty | {name: served.read(name) for name in CODE})
    said = worker.ask(request(hub, adapter, base="lab/empty"))
    assert said["type"] == "ValueError" and "lab/empty has no weights in safetensors" in said["error"]
    assert not [line for line in hub.requests if line.startswith("POST")]
    done = worker.ask(request(hub, adapter, as_adapter=True, base="lab/base"))["done"]
    repository, commit = hub.repository("ann/m"), served.head().oid
    config = json.loads(repository.read("adapter_config.json"))
    assert (config["base_model_name_or_path"], config["revision"]) == ("lab/base", commit)
    assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
    assert "model.safetensors" not in repository.head().files and "optimizer.pt" in done["left"]
    assert "lab/base" in repository.read("README.md").decode() and commit in repository.read("README.md").decode()

    code = (
        f"import sys\nsys.modules['normalign_llava'] = None\n{done['snippet']}\nprint(type(model).__name__, processor)"
    )
    environment = hub.environment(tmp_path / "empty")
    ran = subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert ran.stdout.startswith("Peft") and "LlavaProcessor" in ran.stdout, ran.stderr


def test_a_disk_that_is_full_while_merging(hub, prepared, adapter, tmp_path):
    with small_disk(tmp_path / "disk", "size=64k") as disk:
        said = Worker(prepared, TMPDIR=str(disk)).ask(request(hub, adapter))
        left = list(disk.iterdir())
    assert said["type"] == "OSError" and str(disk) in said["error"] and "TMPDIR" in said["error"]
    assert "No space left" in said["error"] and not left
    assert not [line for line in hub.requests if line.startswith(("POST", "PUT"))]


def test_a_disk_without_room_for_what_is_loaded_afterwards(hub, prepared, base, tmp_path):
    with small_disk(tmp_path / "disk", "size=100k") as disk:
        said = Worker(prepared, TMPDIR=str(disk)).ask(request(hub, base))
        # Nobody knows beforehand what code and the base of an adapter take.
        code = f"from normalign_llava.hub_cards.push.clean_process import *; ask_clean_process({str(base)!r})"
        (disk / "full").write_bytes(bytes(90_000))
        ran = prepared.run(["-c", code], TMPDIR=str(disk))
        left = [path.name for path in disk.iterdir()]
    assert said["type"] == "OSError" and f"{disk} has " in said["error"] and "Set TMPDIR" in said["error"]
    assert not [line for line in hub.requests if line.startswith(("POST", "PUT"))]
    assert f"OSError: {disk} has no room to load {base}. Set TMPDIR" in ran.stderr and left == ["full"]
