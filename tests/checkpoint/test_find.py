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


CLIENT = """
import json, sys
from huggingface_hub import hf_hub_download
from normalign_llava.checkpoint.files import find_model
for name, revision in json.load(sys.stdin):
    try:
        said, _ = find_model(name, revision)
        hf_hub_download(name, "config.json")
    except ValueError as error:
        said = str(error)
    print(json.dumps(said))
"""


def asked(names, environment):
    run = subprocess.run(
        [sys.executable, "-c", CLIENT], input=json.dumps(names), env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


def test_the_hub_is_asked_once_and_only_of_what_may_be_there(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    paths = ["none", "./user/none", "user/none/", "a/b/c", "../model", "~/model"]
    absent, known = ["user/none", None], ["user/model", None]
    with HubServer({"user/model": tmp_path / "model"}) as hub:
        environment = hub.environment(tmp_path / "home")
        names = [*([path, None] for path in paths), absent, ["user/model", "v9"], known]
        *no_names, unknown, unversioned, model = asked(names, environment)
        assert all(said.startswith(f"{path} is no file or f") for path, said in zip(paths, no_names, strict=True))
        for name, said in (("user/none", unknown), ("user/model", unversioned)):
            assert said.startswith(f"{name} is no file or folder here, and the Hub ({hub.url}) has none")
        assert model == "user/model"
        about = [request.split("?")[0] for request in hub.requests if "/api/models/" in request]
        assert about.count("GET /api/models/user/none") == 1 and {path.split("/")[3] for path in about} == {"user"}
    for changes, why in (({}, f"({hub.url})"), ({"HF_HUB_OFFLINE": "1"}, "offline")):
        unreachable, kept = asked([absent, known], environment | changes)
        assert unreachable.startswith("user/none is no file or folder here, and the Hub") and why in unreachable
        assert kept == "user/model"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Parts, a LLaVA and a NormAlign-LLaVA; an adapter of it, images, data, and a recipe."""
    folder = tmp_path_factory.mktemp("trained")
    training.checkpoint(folder)
    parts.llava(folder / "llava", tiny.llava(tied=False))
    trainer = training.trainer(folder / "adapter", folder / "model", max_steps=1, use_peft=True)
    trainer.train()
    trainer.save_model()
    train_data.images(folder / "images", "red.png")
    train_data.write_json(folder / "data", [train_data.llava("<image>\nwhat is it?", "it is red", "red.png")] * 2)
    training.recipe(folder, folder, model_name_or_path="bea/model", max_steps=1, use_cpu=True)
    return folder


COMMANDS = {
    "build --vision bea/vision --language bea/language --output {new}": {"vision", "language"},
    "build --from-llava bea/llava --output {new}": {"llava"},
    "merge {folder}/adapter --base bea/model --output {new}": {"model"},
    "diagnose bea/model --data {folder}/images --output {new}": {"model"},
    "gain bea/language --critical --revision main": {"language"},
    "train {folder}/recipe.yaml --output_dir {new}": {"model"},
}


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_all_files_of_a_repository_that_moves_are_of_one_commit(hub, prepared, trained, tmp_path, command):
    for name in ("vision", "language", "llava", "model"):
        repository = hub.serve(f"bea/{name}", trained / name)
        repository.resolve = partial(resolve_and_move, repository, repository.resolve)
    words = command.format(folder=trained, new=tmp_path / "new").split()
    done = prepared.run(["-m", "normalign_llava", *words])
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
