"""A Space: what its files say, and whose Space they replace. test_space_browser.py runs them."""

import ast
import json
import sys
import tomllib

import pytest
from huggingface_hub import SpaceCard
from packaging.requirements import Requirement
from paths import ROOT

from normalign_llava.hub_cards.space.publish import GRADIO_VERSION, space_files


pytestmark = pytest.mark.slow


COMMIT = "0123456789abcdef0123456789abcdef01234567"
# Sends the Space of each model that is named, without the model.
SEND = f"""
import json, sys
from huggingface_hub import HfApi, get_token
from normalign_llava.hub_cards.space.publish import check_space, push_space
from normalign_llava.hub_cards.push.repository import Pushed, Repository
api, said = HfApi(token=get_token()), {{}}
for repo_id, private in json.loads(sys.argv[1]).items():
    pushed = Pushed(Repository(api, repo_id, private=private), {COMMIT!r}, [])
    for does in (lambda: check_space(api, repo_id), lambda: push_space(pushed, lambda line: None)):
        try:
            does()
            said.setdefault(repo_id, []).append(None)
        except Exception as error:
            said.setdefault(repo_id, []).append(f"{{type(error).__name__}}: {{error}}")
print(json.dumps(said))
"""


def send(hub, prepared, **private):
    """For each of Ann's models, what `check_space` and `push_space` of its Space said; None if nothing was wrong."""
    models = json.dumps({f"ann/{name}": is_private for name, is_private in private.items()})
    ran = prepared.run(["-c", SEND, models], HF_TOKEN=hub.token("ann"))
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_only_a_space_of_ours_or_an_empty_one_is_taken(hub, prepared):
    card = b"---\nsdk: docker\n---\n"
    others = {
        "gradio": {"app.py": b"print()"},
        "notes": {"notes.txt": b"mine"},
    }
    for name, files in others.items():
        hub.create(f"ann/{name}-demo", kind="space", files=files)
    heads = {name: hub.repository(f"ann/{name}-demo", "space").head() for name in others}
    hub.create("ann/empty-demo", kind="space", files={"README.md": card})
    said = send(hub, prepared, empty=False, new=False, **dict.fromkeys(others, False))
    assert said.pop("ann/empty") == said.pop("ann/new") == [None, None]
    for name in others:
        checked, pushed = said[f"ann/{name}"]
        assert checked.startswith(f"ValueError: The Space ann/{name}-demo exists and was not published by this")
        assert pushed.startswith("OSError: The model is published") and "not published by this package" in pushed
        assert hub.repository(f"ann/{name}-demo", "space").head() == heads[name]
    for name in ("new", "empty"):
        card = SpaceCard(hub.repository(f"ann/{name}-demo", "space").read("README.md").decode())
        assert (card.data.sdk, card.data.models) == ("gradio", [f"ann/{name}"])


def test_a_space_that_is_there_stays_public_or_private_as_it_is(hub, prepared):
    assert send(hub, prepared, hidden=True, shown=False) == dict.fromkeys(["ann/hidden", "ann/shown"], [None, None])
    hidden, shown = (hub.repository(f"ann/{name}-demo", "space") for name in ("hidden", "shown"))
    assert (hidden.private, shown.private) == (True, False)
    assert send(hub, prepared, hidden=False, shown=True) == dict.fromkeys(["ann/hidden", "ann/shown"], [None, None])
    assert (hidden.private, shown.private) == (True, False)


def test_the_files_of_a_space():
    title = 'Ask "my: model" <b> & ünïcode'
    files = space_files("user/my-model.v1.5", COMMIT, title)
    modules = ("__init__", "asking", "figures", "measuring", "model", "page", "images")
    program = {"app.py"} | {f"demo/{module}.py" for module in modules}
    assert set(files) == {"README.md", "requirements.txt", "space.json"} | program
    assert json.loads(files["space.json"]) == {"model": "user/my-model.v1.5", "revision": COMMIT, "title": title}
    card = SpaceCard(files["README.md"].decode())
    assert card.data.title == title
    assert (card.data.sdk, card.data.sdk_version, card.data.app_file) == ("gradio", GRADIO_VERSION, "app.py")
    assert card.data.models == ["user/my-model.v1.5"]
    assert len(card.data.short_description) <= 60  # the Hub's limit
    assert {card.data.colorFrom, card.data.colorTo} <= {
        "red", "yellow", "green", "blue", "indigo", "purple", "pink", "gray",
    }  # fmt: skip
    assert COMMIT in card.text


def test_requirements_name_what_the_program_imports():
    files = space_files("user/model", COMMIT, "Title")
    imported = {}
    for path in (path for path in files if path.endswith(".py")):
        nodes = list(ast.walk(ast.parse(files[path])))
        imported[path] = {
            name.name.split(".")[0] for node in nodes if isinstance(node, ast.Import) for name in node.names
        }
        froms = [node for node in nodes if isinstance(node, ast.ImportFrom)]
        imported[path] |= {node.module.split(".")[0] for node in froms if not node.level}
        assert {node.level for node in froms} <= {0, path.count("/")}, path  # its own folder's, and none outside
    assert "demo" in imported["app.py"]
    imported["app.py"].remove("demo")
    others = set().union(*imported.values()) - sys.stdlib_module_names
    lines = {Requirement(line).name: line for line in files["requirements.txt"].decode().splitlines()}
    provides = {"PIL": "pillow", "gradio": None, "starlette": None}  # gradio and what it needs: sdk_version
    assert set(lines) == {provides.get(name, name) for name in others} - {None}
    package = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    bounds = {Requirement(line).name: line for line in package}
    assert all(lines[name].startswith(bounds[name]) for name in set(lines) & set(bounds))
