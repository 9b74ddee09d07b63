"""A model that is not there is said at once, and what a folder lacks is named."""

import json
import re
import subprocess
import sys
from functools import partial

import pytest
import tiny
import tiny_parts as parts
import train_data
import training
from hub_server import HubServer

from normalign_llava.train.run import main as train


CLIENT = """
import json, sys
from huggingface_hub import hf_hub_download
from normalign_llava.checkpoint.find import find_model
for name, revision, download in json.load(sys.stdin):
    try:
        said, _ = find_model(name, revision)
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


def test_the_hub_is_asked_once_and_only_of_what_may_be_there(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    paths = ["none", "./user/none", "/user/none", "user/none/", "a/b/c", "../model", "~/model", "user/a..b"]
    with HubServer({"user/model": tmp_path / "model"}) as hub:
        environment = hub.environment(tmp_path / "home")
        names = [["user/none", None, False], ["user/model", "v9", False], ["user/model", None, True]]
        *said, absent, unversioned, found = asked([[path, None, False] for path in paths] + names, environment)
        for path, text in zip(paths, said, strict=True):
            assert text == f"{path} is no file or folder here. Check the path. A model of the Hub is named owner/name."
        for name, text in (("user/none", absent), ("user/model", unversioned)):
            assert text.startswith(f"{name} is no file or folder here, and the Hub has no model of that name and revi")
        assert found == "user/model"
        about = [request.split("?")[0] for request in hub.requests if "/api/models/" in request]
        assert about.count("GET /api/models/user/none") == 1 and {each.split("/")[3] for each in about} == {"user"}
        count = len(hub.requests)
        assert asked([["user/model", None, False]], environment) == ["user/model"]
        of_the_model = [request for request in hub.requests[count:] if "user/model" in request]
        assert of_the_model == ["GET /api/models/user/model"]  # which commit is the newest
    both = [["user/none", None, False], ["user/model", None, False]]
    unreachable, kept = asked(both, environment)
    assert unreachable.startswith(f"user/none is no file or folder here, and the Hub ({hub.url}) cannot be asked: ")
    assert unreachable.endswith(". Check the name and your connection.") and kept == "user/model"
    offline, kept = asked(both, environment | {"HF_HUB_OFFLINE": "1"})
    assert offline.startswith("user/none is no file or folder here, and the Hub") and "offline" in offline
    assert kept == "user/model"


TRAIN = {"max_steps": 1, "learning_rate": 1e-3, "bf16": False, "use_cpu": True, "report_to": "none"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Parts, a LLaVA and a NormAlign-LLaVA; and an adapter, data and the words of training on them."""
    folder = tmp_path_factory.mktemp("trained")
    training.checkpoint(folder)
    parts.llava(folder / "llava", tiny.llava(tied=False))
    rows = [train_data.llava("<image>\nwhat is it?", f"it is {number}", "red.png") for number in range(2)]
    train_data.images(folder / "images", "red.png")
    options = {**TRAIN, "dataset_name": train_data.write_json(folder / "data", rows)}
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    adapter = ["--output_dir", folder / "adapter", "--model_name_or_path", folder / "model", "--use_peft", "true"]
    train([*words, *map(str, adapter)])
    return folder, words


COMMANDS = {
    "build --vision bea/vision --language bea/language --output {new}": {"vision", "language"},
    "build --from-llava bea/llava --output {new}": {"llava"},
    "merge {folder}/adapter --base bea/model --output {new}": {"model"},
    "diagnose bea/model --data {folder}/images --output {new}": {"model"},
    "gain bea/language --critical --revision main": {"language"},
    "train --model_name_or_path bea/model --output_dir {new}": {"model"},
}


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_all_files_of_a_repository_that_moves_are_of_one_commit(hub, prepared, trained, tmp_path, command):
    folder, options = trained
    for name in ("vision", "language", "llava", "model"):
        repository = hub.serve(f"bea/{name}", folder / name)
        repository.resolve = partial(resolve_and_move, repository, repository.resolve)
    words = command.format(folder=folder, new=tmp_path / "new").split()
    done = prepared.run(["-m", "normalign_llava", *words, *(options if words[0] == "train" else ())])
    assert done.returncode == 0, done.stderr
    read = re.findall(r"bea/(\w+)/resolve/(\w+)/", "\n".join(hub.requests))
    assert {name for name, _ in read} == COMMANDS[command] and "main" not in dict(read).values()
    assert len(set(read)) == len(COMMANDS[command]), set(read)


def resolve_and_move(repository, resolve, revision):
    """The commit of `revision`. When it is `main`, that has another configuration from now on."""
    commit = resolve(revision)
    if revision == "main":
        settings = {**json.loads(repository.blobs[commit.files["config.json"]]), "after": commit.oid}
        repository.change({"config.json": json.dumps(settings).encode()})
    return commit
