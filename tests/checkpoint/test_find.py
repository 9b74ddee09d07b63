"""A model that is not there is said at once, and what a folder lacks is named."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import tiny_parts as parts
from hub_server import HubServer
from typer.testing import CliRunner

from normalign_llava import build_checkpoint
from normalign_llava.checkpoint.find import find_checkpoint, find_model
from normalign_llava.cli import app


CLIENT = """
import json, sys
from huggingface_hub import hf_hub_download
from normalign_llava.checkpoint.find import find_model
for name, revision, download in json.load(sys.stdin):
    try:
        said = find_model(name, revision)
        if download:
            hf_hub_download(name, "config.json")
    except ValueError as error:
        said = str(error)
    print(json.dumps(said))
"""


def asked(names, environment):
    done = subprocess.run(
        [sys.executable, "-c", CLIENT], input=json.dumps(names), env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts")
    vision, language = parts.vision(folder / "vision"), parts.language(folder / "language")
    build_checkpoint(vision, language, folder / "model")
    return folder


def test_what_is_here_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "user" / "model").mkdir(parents=True)
    assert find_model("user/model") == "user/model"
    assert find_model("~/user") == str(tmp_path / "user")
    with pytest.raises(ValueError, match="user/model has no config.json"):
        find_checkpoint("user/model")


def test_the_hub_is_asked_once_and_only_of_what_may_be_there(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    paths = ["none", "./user/none", "/user/none", "user/none/", "a/b/c", "../model", "~/model", "user/a..b"]
    with HubServer({"user/model": tmp_path / "model"}) as hub:
        environment = hub.environment(tmp_path / "home")
        for path, said in zip(paths, asked([[path, None, False] for path in paths], environment), strict=True):
            assert said == f"{path} is no file or folder here. Check the path. A model of the Hub is named owner/name."
        assert hub.requests == []

        names = [["user/none", None, False], ["user/model", "v9", False], ["user/model", None, True]]
        absent, unversioned, found = asked(names, environment)
        assert absent.startswith("user/none is no file or folder here, and the Hub has no model of that name")
        assert unversioned == "user/model is no file or folder here, and on the Hub it has no revision 'v9'."
        assert found == "user/model"
        assert len([request for request in hub.requests if "/api/models/user/none" in request]) == 1
        count = len(hub.requests)
        assert asked([["user/model", None, False]], environment) == ["user/model"]  # it is in the cache
        assert len(hub.requests) == count
    (unreachable,) = asked([["user/none", None, False]], environment)
    assert unreachable.startswith(f"user/none is no file or folder here, and the Hub ({hub.url}) cannot be asked: ")
    assert unreachable.endswith(". Check the name and your connection.")
    (offline,) = asked([["user/none", None, False]], environment | {"HF_HUB_OFFLINE": "1"})
    assert offline.startswith("user/none is no file or folder here, and the Hub") and "offline" in offline
    assert asked([["user/model", None, False]], environment) == ["user/model"]


@pytest.mark.parametrize(
    "command",
    [
        "build --vision {vision} --language {folder} --output new",
        "train --model_name_or_path {folder} --dataset_name rows.json --output_dir new --stage align --use_cpu",
        "diagnose {folder}",
        "serve {folder}",
    ],
)
def test_a_folder_without_a_tokenizer_is_named(folders, tmp_path, monkeypatch, command):
    folder = tmp_path / "silent"
    shutil.copytree(folders / ("language" if command.startswith("build") else "model"), folder)
    for file in folder.glob("tokenizer*"):
        os.remove(file)
    (tmp_path / "rows.json").write_text('[{"image": "a.png", "text": "A red kite."}]')
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, command.format(folder="silent", vision=folders / "vision").split())
    assert done.exit_code == 1
    kind = "tokenizer" if command.startswith("build") else "processor"
    assert f"Error: The {kind} of silent cannot be loaded: " in done.stderr and "save_pretrained" in done.stderr


def test_gain_says_why_tokens_have_no_text(folders, tmp_path):
    shutil.copytree(folders / "language", tmp_path / "silent", ignore=shutil.ignore_patterns("tokenizer*"))
    line = "none that loads: tokens have no text"
    assert line in CliRunner().invoke(app, ["gain", str(tmp_path / "silent")]).output
    assert line not in CliRunner().invoke(app, ["gain", str(folders / "language")]).output
