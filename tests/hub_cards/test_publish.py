# SPDX-License-Identifier: Apache-2.0
"""`normalign publish` when nothing goes wrong: what is then on the Hub, and whose files stay."""

import pytest
import stored


pytestmark = pytest.mark.slow
OWN_CARD = "---\nlicense: mit\n---\n# My page\n\nWhat nobody else knows.\n"


def test_a_model_is_published_whole_and_loads_from_its_commit(publish, hub, folder, tmp_path):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    status, shown = publish(folder, "--private", "--space", TMPDIR=str(tmp_path))
    assert status == 0, shown
    repository, space = hub.repository("ann/m"), hub.repository("ann/m-demo", "space")
    assert repository.private and space.private
    assert f"{hub.url}/spaces/ann/m-demo/settings." in shown
    assert f"Commit: {repository.commit}" in shown and len(repository.commits()) == 2
    assert repository.commit in space.read("space.json").decode()
    assert set(repository.head().files) == {".gitattributes", "README.md", *before}
    assert all(repository.read(name) == content for name, content in before.items())
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert not list(tmp_path.glob("clean-process-*"))


def test_published_again_nothing_changes_and_one_file_is_one_commit(publish, hub, folder):
    assert publish(folder, "--no-verify")[0] == 0
    repository = hub.repository("ann/m")
    first, received = repository.commit, hub.received.total()
    status, shown = publish(folder, "--no-verify")
    assert status == 0 and "nothing changed" in shown and repository.commit == first
    (folder / "training.json").write_text('{"seconds": 1.5}')
    assert publish(folder, "--no-verify", "--revision", "trial/2")[0] == 0
    assert repository.commit == first == repository.head("trial/2").parent
    assert "training.json" in repository.head("trial/2").files and hub.received.total() == received


def test_a_pull_request(publish, hub, folder):
    theirs = hub.create("bob/m", files={"config.json": b"{}"})
    before = theirs.head()
    status, shown = publish(folder, "--create-pr", "--no-verify", "--repo-id", "bob/m")
    proposed = theirs.head("refs/pr/1")
    assert theirs.head() == before and proposed.parent == before.oid
    assert set(proposed.files) >= stored.FILES
    assert status == 0 and f"Pull request: {hub.url}/bob/m/discussions/1" in shown


def test_an_empty_space_and_one_of_ours_are_written_again(publish, hub, folder):
    files = {"README.md": b"---\nsdk: docker\n---\n"}
    space = hub.create("ann/m-demo", kind="space", files=files)
    hub.fault(500, "POST /api/spaces/.*/commit/")
    status, shown = publish(folder, "--space", "--no-verify")
    assert status == 1 and "The model is published, at" in shown and "its Space is not" in shown
    for number in range(2):
        (folder / "training.json").write_text(f'{{"seconds": {number}.5}}')
        assert publish(folder, "--space", "--no-verify")[0] == 0
        assert hub.repository("ann/m").commit in space.read("space.json").decode()
        space.change({"notes.txt": b"mine"})
    assert b"sdk: gradio" in space.read("README.md") and not space.private


def test_stale_files_of_ours_go_and_files_of_others_stay(publish, hub, folder):
    stale = {
        *("model-00001-of-00002.safetensors", "model.safetensors", "adapter_model.safetensors"),
        *("adapter_config.json", "tokenizer.model", "preprocessor_config.json", "training.json"),
        *("evaluation/summary.json", "diagnostics/report.json", "diagnostics/rotation.png"),
    }
    theirs = {"notes.md", "my.safetensors", "pytorch_model.bin", "LICENSE", "a/b.png", "last/a.pth"}
    repository = hub.create("ann/m", files={path: path.encode() for path in stale | theirs})
    status, shown = publish(folder, "--no-verify")
    assert status == 0, shown
    assert len(repository.commits()) == 3, "deleted and added in one commit"
    here = {path.name for path in folder.iterdir()}
    assert set(repository.head().files) == {".gitattributes", "README.md", *here, *theirs}
    assert all(repository.read(path) == path.encode() for path in theirs)
    assert f"removed: {', '.join(sorted(stale))}." in shown


@pytest.mark.parametrize("place", ["folder", "Hub"])
def test_a_card_of_somebody_else_is_replaced_only_on_request(publish, hub, folder, place):
    if place == "Hub":
        hub.create("ann/m", files={"README.md": OWN_CARD.encode()})
    else:
        (folder / "README.md").write_text(OWN_CARD)
    status, shown = publish(folder)
    assert status == 1 and "was not written by this package" in shown and "--replace-card" in shown
    assert not [line for line in hub.requests if line.startswith(("POST", "PUT"))]
    status, shown = publish(folder, "--no-verify", "--replace-card")
    assert status == 0
    assert b"What nobody else knows" not in hub.repository("ann/m").read("README.md")


def test_a_dry_run_asks_nobody_and_loads_the_folder(publish, hub, folder):
    (folder / "optimizer.pt").write_bytes(b"")
    status, shown = publish(folder, "--dry-run", "--no-verify", token=" ")
    assert status == 0 and "optimizer.pt" in shown and "It was not loaded." in shown, shown
    assert hub.requests == []
    weights = stored.weights(folder)
    name = "model.multi_modal_projector.linear_1.weight"
    del weights[name]  # which only loading shows
    stored.store(folder, weights)
    status, shown = publish(folder, "--dry-run")
    assert status == 1 and name in shown
    assert "does not work in a process without this package" in shown


@pytest.mark.nightly
def test_a_commit_that_nobody_can_load(publish, hub, folder):
    repository = hub.create("ann/m", files={"config.json": b"{}"})
    before = repository.commit
    hub.fault(404, r"(GET|HEAD) /ann/m/resolve/\w{40}/config.json", times=99)
    status, shown = publish(folder)
    assert status == 1 and repository.commit in shown and before in shown


@pytest.mark.parametrize(
    "options, token, words",
    [
        (["--adapter"], None, "not an adapter"),
        (["--space"], None, "is not this package's"),
        (["--public"], None, "is private"),
        ([], " ", "hf auth login"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_sent(publish, hub, folder, options, token, words):
    hub.create("ann/m-demo", kind="space", files={"app.py": b"print()"})
    if "--public" in options:
        hub.create("ann/m", private=True)
    status, shown = publish(folder, *options, token=token)
    assert status == 1 and words in shown
    assert not [line for line in hub.requests if line.startswith(("POST", "PUT"))]
