"""What publishing decides by itself, without a hub: what stands in the way, and what is said."""

import hashlib
import json
import sys
from dataclasses import replace
from importlib import import_module
from io import StringIO
from pathlib import Path

import pytest
import stored
import torch
from adapters import make_adapter
from httpx import Request, Response
from huggingface_hub import CommitInfo, HfApi, errors
from transformers import AutoModelForImageTextToText, AutoProcessor
from transformers.utils import logging

from normalign_llava import NormAlignLlavaConfig, NormAlignLlavaForConditionalGeneration
from normalign_llava.diagnose.report import SCHEMA_VERSION
from normalign_llava.hub_cards.card.facts import Part, read_public_report
from normalign_llava.hub_cards.card.write import render_card
from normalign_llava.hub_cards.demo import space_files
from normalign_llava.hub_cards.push import checks, clean_process
from normalign_llava.hub_cards.push.checks import recorded_base, require_pinned_base
from normalign_llava.hub_cards.push.clean_process import (
    ask_clean_process,
    difference,
    first_logits,
)
from normalign_llava.hub_cards.push.publish import (
    Publication,
    publish,
    push_space,
    require_own_space,
    summary,
)
from normalign_llava.hub_cards.push.repository import (
    Repository,
    _recorded,
    additions,
    check_files_of_others,
    check_front_matter,
    files_of_others,
    hub_errors,
    stale_files,
)
from normalign_llava.hub_cards.push.source import PublishSource


def git_hash(content):
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def git_hashes(contents):
    return {file_path: git_hash(content) for file_path, content in contents.items()}


def record_of(contents):
    """Returns what a publication records of the files that it wrote."""
    hashes = {}
    for file_path, content in contents.items():
        hashes[file_path] = [sha256(content), git_hash(content)]
    return hashes


PUBLISHED = {
    "config.json": b"{}",
    "model.safetensors": b"weights",
    "training.json": b"1",
    "README.md": b"card",
    "LICENSE": b"terms",
    "merges.txt": b"a b",
}


def repository_with(changed_files, kind="model"):
    """Returns what a publication of `PUBLISHED` left, with files that others changed since."""
    file_hashes = git_hashes(PUBLISHED)
    file_hashes["model.safetensors"] = sha256(PUBLISHED["model.safetensors"])
    return Repository(
        HfApi(),
        "ann/m",
        kind,
        files=file_hashes | git_hashes(changed_files),
        recorded=record_of(PUBLISHED),
    )


def test_files_of_an_earlier_publication_that_are_not_sent_again_are_stale():
    added_files = additions({"config.json": b"{...}", "generation_config.json": b"{}"})
    # Neither the card nor LICENSE is.
    expected = ["merges.txt", "model.safetensors", "training.json"]
    assert stale_files(repository_with({}), added_files) == expected


def test_a_file_that_others_changed_is_not_stale():
    added_files = additions({"config.json": b"{...}", "generation_config.json": b"{}"})
    changed = repository_with({"training.json": b"2"})
    assert stale_files(changed, added_files) == ["merges.txt", "model.safetensors"]


ADDED = {
    "config.json": b"{...}",
    "notes.md": b"mine",
    "vocab.json": b"same",
}


@pytest.fixture
def changed_repository():
    """A repository in which others changed files and added some."""
    return repository_with(
        {
            "config.json": b"theirs",
            "notes.md": b"theirs",
            "README.md": b"theirs",
            "vocab.json": b"same",
            "merges.txt": b"theirs",
            "other.md": b"theirs",
            "adapter_config.json": b"theirs",
        }
    )


def test_nothing_stands_in_the_way_where_others_changed_nothing():
    assert files_of_others(repository_with({}), additions(ADDED)) == []
    check_files_of_others(repository_with({}))


def test_what_others_changed_stands_in_the_way_if_it_is_read_or_overwritten(changed_repository):
    added_files = additions(ADDED)
    expected = ["adapter_config.json", "config.json", "merges.txt", "notes.md"]
    assert files_of_others(changed_repository, added_files) == expected

    with pytest.raises(ValueError, match="ann/m has files that no publication") as raised:
        check_files_of_others(changed_repository, added_files)
    summary_lines = str(raised.value).splitlines()
    assert "- config.json would be overwritten" in summary_lines
    assert "- merges.txt would be read beside the model" in summary_lines


def test_where_nothing_is_known_to_be_added_what_is_read_stands_in_the_way(changed_repository):
    expected = ["adapter_config.json", "config.json", "merges.txt", "vocab.json"]
    assert files_of_others(changed_repository) == expected

    with pytest.raises(ValueError, match="ann/m has files that no publication") as raised:
        check_files_of_others(changed_repository)
    assert "- vocab.json would be read beside the model" in str(raised.value)


def test_a_space_reads_nothing_beside_what_it_is_sent_and_its_card_is_a_file_like_others():
    changed_space = repository_with(
        {"README.md": b"theirs", "merges.txt": b"theirs"},
        kind="space",
    )
    assert files_of_others(changed_space, additions({"README.md": b"ours"})) == ["README.md"]
    check_files_of_others(changed_space, additions({"app.py": b"ours"}))


HUB = "https://huggingface.co"


@pytest.fixture
def two_file_source():
    return PublishSource(
        None,
        {"a": b"1", "b": b"2"},
        {"a": 1234, "b": 1},
        ["notes.txt", "x/"],
    )


@pytest.fixture
def trial_branch():
    return Repository(
        HfApi(endpoint=HUB),
        "ann/m",
        branch="trial",
        commit="0" * 40,
    )


def commit_info(commit_hash, **options):
    return CommitInfo(f"{HUB}/ann/m/commit/{commit_hash}", "m", "", commit_hash, **options)


def test_what_would_be_done_is_told(two_file_source, trial_branch):
    summary_lines = summary(Publication(two_file_source, trial_branch)).splitlines()
    assert summary_lines[1:] == ["  a: 1,234 bytes", "  b: 1 bytes", "Stays here: notes.txt, x/."]


def test_it_is_told_that_nothing_stays(trial_branch):
    nothing = PublishSource(None, {}, {}, [])
    assert summary(Publication(nothing, trial_branch)).endswith("Stays here: nothing.")


def test_what_was_done_is_told(two_file_source, trial_branch):
    publication = Publication(
        two_file_source,
        trial_branch,
        commit_info("1" * 40),
        removed=["c", "d"],
    )
    summary_lines = summary(publication).splitlines()
    assert len(summary_lines) == 4
    assert summary_lines[0] == "Sent to ann/m: 2 files in one commit; removed: c, d."
    assert summary_lines[1] == f"Commit: {'1' * 40}"
    assert summary_lines[2] == f"Repository: {HUB}/ann/m/tree/trial"
    assert f'"{"1" * 40}"' in summary_lines[3]


def test_pages_of_a_pull_request_and_of_a_space_are_told(two_file_source, trial_branch):
    publication = Publication(
        two_file_source,
        trial_branch,
        commit_info("0" * 40, pr_url=f"{HUB}/ann/m/discussions/1"),
        space=f"{HUB}/s",
    )
    summary_lines = summary(publication).splitlines()
    assert summary_lines[0] == "Sent to ann/m: nothing changed; removed: nothing."
    assert summary_lines[3] == f"Pull request: {HUB}/ann/m/discussions/1"
    assert summary_lines[4] == f"Space: {HUB}/s"


@pytest.fixture
def asked_names():
    """The names and kinds of the repositories that the demo's functions ask for."""
    return []


@pytest.fixture
def repositories(asked_names, monkeypatch):
    """Repositories by name that the demo's functions find."""
    by_name = {}

    def find(api, name, kind="model"):
        asked_names.append((name, kind))
        return by_name[name]

    monkeypatch.setattr(f"{PUBLISH_MODULE}.find_repository", find)
    return by_name


def space_with(changed_files=None):
    """Returns a Space with the files that are to be, and those that others changed."""
    planned = space_files("ann/m", "c" * 40)
    return Repository(
        HfApi(endpoint=HUB),
        "ann/m-demo",
        "space",
        files=git_hashes(planned) | git_hashes(changed_files or {}),
        recorded=record_of(planned),
    )


OUR_SPACE = space_with({"notes.md": b"theirs"})
NEW_SPACE = replace(
    OUR_SPACE,
    files={"README.md": "theirs", ".gitattributes": "theirs"},
    recorded={},
)
EMPTY_SPACE = replace(NEW_SPACE, files={})


@pytest.mark.parametrize("replace_files", [False, True])
@pytest.mark.parametrize(
    "space",
    [
        pytest.param(OUR_SPACE, id="ours"),
        pytest.param(NEW_SPACE, id="with-a-card"),
        pytest.param(EMPTY_SPACE, id="empty"),
    ],
)
def test_a_space_of_ours_or_an_empty_one_may_be_written(
    repositories, asked_names, space, replace_files
):
    repositories["ann/m-demo"] = space
    assert require_own_space(HfApi(), "ann/m", replace_files) is space
    assert set(asked_names) == {("ann/m-demo", "space")}


@pytest.mark.parametrize("replace_files", [False, True])
def test_a_space_of_others_is_not_written(repositories, replace_files):
    of_others = replace(space_with(), files={"app.py": "theirs"}, recorded={})
    repositories["ann/m-demo"] = of_others
    with pytest.raises(ValueError, match="ann/m-demo is not this package's"):
        require_own_space(HfApi(), "ann/m", replace_files)


def test_a_space_that_was_changed_is_written_only_if_that_is_asked_for(repositories):
    changed = space_with({"app.py": b"theirs", "README.md": b"theirs"})
    repositories["ann/m-demo"] = changed
    with pytest.raises(ValueError, match="- README.md would(.|\n)*- app.py would be over"):
        require_own_space(HfApi(), "ann/m")
    assert require_own_space(HfApi(), "ann/m", replace_files=True) is changed


@pytest.fixture
def push_calls(monkeypatch):
    """The arguments with which a Space would be sent."""
    recorded_calls = []

    def push(repository, added, **options):
        recorded_calls.append((repository, added, options))

    monkeypatch.setattr(f"{PUBLISH_MODULE}.push", push)
    return recorded_calls


def pushed_contents(added):
    return {addition.path_in_repo: addition.path_or_fileobj for addition in added}


@pytest.mark.parametrize("private", [True, False])
def test_a_space_is_as_private_as_its_model_and_needs_a_token_then(
    repositories, asked_names, push_calls, private
):
    repositories["ann/m"] = replace(space_with(), private=private)
    messages = []
    space_page = push_space(space_with(), "ann/m", "c" * 40, messages.append)
    assert space_page == f"{HUB}/spaces/ann/m-demo"
    assert asked_names == [("ann/m", "model")]
    ((space, _, options),) = push_calls
    assert space.repo_id == "ann/m-demo"
    assert options == {"removed": (), "private": private}

    assert len(messages) == private
    for message in messages:
        assert f"HF_TOKEN: {space_page}/settings" in message


def test_a_space_is_sent_with_a_record_of_its_files(repositories, push_calls):
    repositories["ann/m"] = space_with()
    push_space(space_with(), "ann/m", "c" * 40, print)
    ((_, added_files, _),) = push_calls
    contents = pushed_contents(added_files)
    record = json.loads(contents.pop("publication.json"))
    assert contents == space_files("ann/m", "c" * 40)
    assert record["files"].keys() == contents.keys()


@pytest.mark.parametrize("error", [ValueError("no card"), OSError("no network")])
def test_where_a_space_fails_the_model_is_said_to_be_published(repositories, monkeypatch, error):
    def fail(*arguments, **options):
        raise error

    monkeypatch.setattr(f"{PUBLISH_MODULE}.push", fail)
    repositories["ann/m"] = space_with()
    with pytest.raises(OSError, match=f"published, at {'c' * 40} of ann/m; .* {error}"):
        push_space(space_with(), "ann/m", "c" * 40, print)


def write_adapter_config(folder, **settings):
    folder.mkdir(exist_ok=True)
    content = {"peft_type": "LORA", **settings}
    (folder / "adapter_config.json").write_text(json.dumps(content))
    return folder


@pytest.fixture
def pinned_adapter(tmp_path):
    """An adapter that names a branch of its base."""
    return write_adapter_config(
        tmp_path / "a",
        base_model_name_or_path="lab/base",
        revision="trial",
    )


RECORDED_BASE = Part("base model", "lab/base", "lab/base", "trial")
NAMED_BASE = Part("base model", "my/base", "my/base", "main")


def test_the_base_that_an_adapter_names_is_pinned_as_far_as_it_is_known(pinned_adapter):
    assert recorded_base(pinned_adapter) == RECORDED_BASE
    assert require_pinned_base(pinned_adapter, None, ask_hub=False) == RECORDED_BASE
    assert require_pinned_base(pinned_adapter, "lab/base", ask_hub=False) == RECORDED_BASE


def test_another_base_that_is_given_is_that_of_main(pinned_adapter):
    assert require_pinned_base(pinned_adapter, "my/base", ask_hub=False) == NAMED_BASE


def test_a_folder_that_is_given_as_the_base_is_refused(pinned_adapter, tmp_path):
    with pytest.raises(ValueError, match="base is a folder"):
        require_pinned_base(pinned_adapter, str(tmp_path), ask_hub=False)


@pytest.mark.parametrize("settings", [{}, {"revision": None}], ids=str)
def test_a_base_without_a_revision_is_that_of_main(tmp_path, settings):
    folder = write_adapter_config(
        tmp_path / "a",
        base_model_name_or_path="lab/base",
        **settings,
    )
    assert recorded_base(folder).revision == "main"


@pytest.mark.parametrize("names_folder", [True, False])
def test_a_base_on_the_hub_must_be_given_if_the_adapter_names_none(tmp_path, names_folder):
    settings = {}
    if names_folder:
        settings["base_model_name_or_path"] = str(tmp_path)
    folder = write_adapter_config(tmp_path / "a", **settings)
    assert recorded_base(folder) is None
    with pytest.raises(ValueError, match="base is a folder.* --base user/name"):
        require_pinned_base(folder, None, ask_hub=False)
    assert require_pinned_base(folder, "my/base", ask_hub=False) == NAMED_BASE


@pytest.fixture
def base_on_the_hub(folder, monkeypatch):
    """A folder that stands for the base on the Hub."""
    monkeypatch.setattr(checks, "require_checkpoint", lambda name, revision, remedy: (folder, None))
    return folder


def record_changes(adapter_folder, **changes):
    """Writes how training changed the configuration of the base."""
    record = {"config_changes": changes}
    (adapter_folder / "training.json").write_text(json.dumps(record))


def test_an_adapter_is_pinned_to_the_commit_of_its_base(base_on_the_hub, pinned_adapter):
    expected = Part("base model", base_on_the_hub, base_on_the_hub, None)
    assert require_pinned_base(pinned_adapter, None, ask_hub=True) == expected


def test_an_adapter_is_pinned_to_a_base_that_is_as_in_training(base_on_the_hub, pinned_adapter):
    config = json.loads((base_on_the_hub / "config.json").read_text())
    record_changes(
        pinned_adapter,
        projector_norm=config["projector_norm"],
        gradient_compensation=config["gradient_compensation"],
    )
    expected = Part("base model", base_on_the_hub, base_on_the_hub, None)
    assert require_pinned_base(pinned_adapter, None, ask_hub=True) == expected


@pytest.fixture
def base_by_default(base_on_the_hub):
    """The base without a setting, which is then as by default."""
    config_path = base_on_the_hub / "config.json"
    config = json.loads(config_path.read_text())
    del config["gradient_compensation"]
    config_path.write_text(json.dumps(config))
    return base_on_the_hub


def test_a_base_that_lacks_a_setting_fits_training_with_its_default(
    base_by_default, pinned_adapter
):
    record_changes(
        pinned_adapter,
        gradient_compensation=NormAlignLlavaConfig.gradient_compensation,
    )
    expected = Part("base model", base_by_default, base_by_default, None)
    assert require_pinned_base(pinned_adapter, None, ask_hub=True) == expected


def test_a_base_of_other_settings_than_training_is_refused(base_by_default, pinned_adapter):
    default = NormAlignLlavaConfig.gradient_compensation
    (other,) = {"none", "global"} - {default}
    record_changes(pinned_adapter, gradient_compensation=other)
    with pytest.raises(ValueError, match=f"compensation '{other}', not '{default}' as in its"):
        require_pinned_base(pinned_adapter, None, ask_hub=True)


def test_a_base_without_its_code_is_refused(base_on_the_hub, pinned_adapter):
    (base_on_the_hub / "modeling_normalign_llava.py").unlink()
    with pytest.raises(ValueError, match="would run code .*: modeling_normalign_llava.py. Publish"):
        require_pinned_base(pinned_adapter, None, ask_hub=True)


@pytest.fixture
def trained_adapter(folder, tmp_path):
    """The folder of a trained adapter on `folder`."""
    adapter_folder = tmp_path / "adapter"
    make_adapter(folder, adapter_folder)
    return adapter_folder


def test_a_plan_of_an_adapter_names_its_base_and_does_not_load_it(folder, trained_adapter):
    (trained_adapter / "README.md").unlink()  # PEFT's
    messages = []
    publication = publish(
        trained_adapter,
        "ann/m",
        as_adapter=True,
        base="lab/base",
        dry_run=True,
        notify=messages.append,
    )
    files = publication.source.files
    settings = json.loads(files["adapter_config.json"])
    assert settings["base_model_name_or_path"] == "lab/base"
    assert settings["revision"] == "main"
    assert settings["r"] == 4
    assert b'"lab/base", "main"' in files["README.md"]
    assert messages[-1] == "It passed the checks. It was not loaded."
    assert publication.commit is None
    assert publication.space is None
    assert publication.removed == []

    local_settings = json.loads((trained_adapter / "adapter_config.json").read_text())
    assert local_settings["base_model_name_or_path"] == str(folder)


COMMIT = "1" * 40
PUBLISH_MODULE = "normalign_llava.hub_cards.push.publish"


class PublishSteps:
    """The steps of `publish`, which are recorded instead of done.

    `found` is the repository on the Hub. `logits` are those of the folder and those of the commit.
    """

    def __init__(self):
        self.api = HfApi(endpoint=HUB, token="my-token")
        self.calls = {}
        self.found = {
            "commit": "0" * 40,
            "private": True,
            "branch": "trial",
        }
        self.logits = [[1.0, 2.0], [1.0, 2.0]]

    def record(self, name, arguments, options):
        self.calls.setdefault(name, []).append((arguments, options))

    def log_in(self, *arguments, **options):
        self.record("log_in", arguments, options)
        return self.api

    def find_repository(self, *arguments, **options):
        self.record("find_repository", arguments, options)
        return Repository(self.api, "ann/m", **self.found)

    def require_own_space(self, *arguments, **options):
        self.record("require_own_space", arguments, options)
        return "the Space"

    def push_space(self, *arguments, **options):
        self.record("push_space", arguments, options)
        return "its page"

    def push(self, *arguments, **options):
        self.record("push", arguments, options)
        return commit_info(COMMIT)

    def ask_clean_process(self, *arguments, **options):
        self.record("ask_clean_process", arguments, options)
        call_number = len(self.calls["ask_clean_process"]) - 1
        return self.logits[call_number]


@pytest.fixture
def publish_steps(monkeypatch):
    recorded = PublishSteps()
    module = import_module(PUBLISH_MODULE)
    for step_name in (
        "log_in",
        "find_repository",
        "require_own_space",
        "push_space",
        "push",
        "ask_clean_process",
    ):
        monkeypatch.setattr(module, step_name, getattr(recorded, step_name))
    return recorded


@pytest.fixture
def messages():
    return []


@pytest.fixture
def published(publish_steps, folder, messages):
    """A publication on a branch, with a Space, over a card with notes."""
    hub_card = render_card(folder).text.replace("notes -->\n", "notes -->\nOf Ann.\n")
    publish_steps.found["card"] = hub_card
    return publish(
        str(folder),
        "ann/m",
        private=True,
        revision="trial",
        space=True,
        token="given",
        notify=messages.append,
    )


def test_a_publication_has_a_commit_and_a_space(published):
    assert published.commit.oid == COMMIT
    assert published.space == "its page"
    assert published.removed == []


def test_a_publication_is_prepared_on_its_branch(published, publish_steps):
    hub_api = published.repository.api
    recorded_calls = publish_steps.calls
    assert recorded_calls["log_in"] == [(("ann/m", "given", False), {})]
    assert recorded_calls["find_repository"] == [((hub_api, "ann/m"), {"branch": "trial"})]
    assert recorded_calls["require_own_space"] == [((hub_api, "ann/m", False), {})]


def test_the_folder_and_its_commit_are_loaded(published, publish_steps, folder):
    of_folder, of_commit = publish_steps.calls["ask_clean_process"]
    assert of_folder == ((folder,), {"token": "my-token"})
    assert of_commit == (("ann/m",), {"revision": COMMIT, "token": "my-token"})


def test_all_files_are_sent_with_a_record_of_them(published, publish_steps):
    (((repository, added_files, removed), options),) = publish_steps.calls["push"]
    assert repository is published.repository
    assert removed == []
    assert options == {"private": True, "create_pr": False}
    sent_names = {addition.path_in_repo for addition in added_files}
    assert sent_names == {*published.source.files, "publication.json"}


def test_the_card_of_a_publication_names_its_branch_and_keeps_what_is_on_the_hub(published):
    hub_card = published.source.files["README.md"].decode()
    assert '"ann/m", "trial"' in hub_card
    assert "Of Ann." in hub_card


def test_a_space_is_sent_for_the_commit(published, publish_steps, messages):
    expected = (("the Space", "ann/m", COMMIT, messages.append), {})
    assert publish_steps.calls["push_space"] == [expected]


def test_a_proposal_without_checks_is_loaded_nowhere_and_has_no_space(
    publish_steps, folder, messages
):
    publish_steps.found["private"] = False
    publication = publish(
        folder,
        "ann/m",
        create_pr=True,
        check_loading=False,
        private=False,
        notify=messages.append,
    )
    recorded_calls = publish_steps.calls
    assert publication.space is None
    assert "ask_clean_process" not in recorded_calls
    assert "require_own_space" not in recorded_calls
    assert "may not load" in messages[-1]

    assert recorded_calls["log_in"] == [(("ann/m", None, True), {})]
    _, push_options = recorded_calls["push"][0]
    assert push_options == {"private": False, "create_pr": True}


@pytest.mark.parametrize(
    "logits",
    [
        pytest.param([1.0, 3.0], id="differs"),
        pytest.param([], id="fails"),
    ],
)
def test_a_commit_that_does_not_answer_as_the_folder_does_is_named(publish_steps, folder, logits):
    publish_steps.logits[1] = logits
    with pytest.raises(OSError, match=f"ann/m is at {COMMIT}, but does not load.* {'0' * 40}"):
        publish(folder, "ann/m", space=True, notify=list)
    assert len(publish_steps.calls["push"]) == 1
    assert "push_space" not in publish_steps.calls


@pytest.mark.parametrize(("private", "known"), [(True, "public"), (False, "private")])
def test_the_visibility_of_a_repository_that_is_there_is_not_changed(
    publish_steps, folder, private, known
):
    publish_steps.found["private"] = not private
    with pytest.raises(ValueError, match=f"ann/m is {known}. Change that in its settings"):
        publish(folder, "ann/m", private=private, notify=list)


@pytest.mark.parametrize("private", [True, False])
def test_the_visibility_of_a_new_repository_is_as_asked(publish_steps, folder, private):
    publish_steps.found["private"] = not private
    publish_steps.found["commit"] = None
    publish(folder, "ann/m", private=private, check_loading=False, notify=list)
    _, push_options = publish_steps.calls["push"][0]
    assert push_options["private"] == private


@pytest.fixture
def repository_of_others(publish_steps):
    """A repository with a card of somebody else, their files and one of an earlier publication."""
    publish_steps.found |= {
        "card": "# Mine\n",
        "files": {
            "README.md": "a",
            "pytorch_model.bin": "b",
            "config.json": "c",
            "merges.txt": "d",
        },
        "recorded": {"merges.txt": ["d"]},
    }


def test_a_card_of_others_on_the_hub_is_replaced_only_on_request(
    publish_steps, repository_of_others, folder
):
    with pytest.raises(ValueError, match="README.md of ann/m was not written by this package"):
        publish(folder, "ann/m", replace_files=True, check_loading=False, notify=list)
    assert "push" not in publish_steps.calls


def test_files_of_others_on_the_hub_are_replaced_only_on_request(
    publish_steps, repository_of_others, folder
):
    with pytest.raises(ValueError, match="pytorch_model.bin would be read beside"):
        publish(folder, "ann/m", replace_card=True, check_loading=False, notify=list)
    assert "push" not in publish_steps.calls


def test_what_would_be_read_beside_the_model_is_removed_on_request(
    publish_steps, repository_of_others, folder
):
    publication = publish(
        folder,
        "ann/m",
        replace_card=True,
        replace_files=True,
        check_loading=False,
        notify=list,
    )
    (_, _, removed), _ = publish_steps.calls["push"][0]
    assert removed == ["merges.txt", "pytorch_model.bin"]
    assert publication.removed == removed


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"as_adapter": True}, "is not an adapter"),
        ({"base": "lab/base"}, "is not an adapter"),
        ({"base_quantization": "nf4"}, "is not an adapter"),
        ({"space": True, "create_pr": True}, "A Space needs"),
        ({"repo_id": "a b/c"}, "a b/c"),
    ],
    ids=str,
)
def test_options_that_cannot_be_are_refused_at_once(folder, options, reason):
    with pytest.raises(ValueError, match=reason):
        publish(folder, **{"repo_id": "ann/m", "dry_run": True, **options})


def test_an_adapter_has_no_space(pinned_adapter):
    with pytest.raises(ValueError, match="A Space needs"):
        publish(pinned_adapter, "ann/m", as_adapter=True, space=True)


def test_a_folder_that_is_absent_is_not_published(tmp_path):
    with pytest.raises(ValueError, match="absent"):
        publish(tmp_path / "absent", "ann/m")


def test_how_an_adapter_s_base_was_quantized_may_be_said_where_it_is_published(trained_adapter):
    # TRL does not write it.
    (trained_adapter / "training.json").unlink()
    options = {
        "dry_run": True,
        "check_loading": False,
        "replace_card": True,
        "notify": list,
    }
    with pytest.raises(ValueError, match="not known. Give --base-quantization"):
        publish(trained_adapter, "ann/m", **options)
    publication = publish(trained_adapter, "ann/m", base_quantization="none", **options)
    assert any(file_name.startswith("model") for file_name in publication.source.files)


@pytest.fixture
def clean_logits(monkeypatch, capsys):
    """Runs the script of the clean process here, and returns its logits of a request."""
    monkeypatch.setitem(sys.modules, "normalign_llava", sys.modules["normalign_llava"])

    def run_request(checkpoint, revision=None, base=None, base_revision=None):
        request = []
        for value in (checkpoint, revision, base, base_revision):
            if value is None:
                request.append(None)
            else:
                request.append(str(value))
        monkeypatch.setattr("sys.stdin", StringIO(json.dumps(request)))
        clean_process.main()
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    yield run_request
    logging.enable_progress_bar()


@torch.inference_mode()
def logits_of(model, processor):
    return first_logits(model, processor)


def test_a_checkpoint_is_loaded_whole_and_an_adapter_on_its_base(folder, tmp_path, clean_logits):
    adapter_folder = tmp_path / "adapter"
    adapted_model = make_adapter(folder, adapter_folder)
    processor = AutoProcessor.from_pretrained(folder)
    whole_model = AutoModelForImageTextToText.from_pretrained(folder)
    whole = logits_of(whole_model, processor)
    adapted = logits_of(adapted_model, processor)
    processor.chat_template += "{{ 'a' }}"
    with_own_processor = logits_of(adapted_model, processor)
    assert len({max(whole), max(adapted), max(with_own_processor)}) == 3

    assert clean_logits(folder) == pytest.approx(whole, abs=1e-6)
    assert clean_logits(adapter_folder, base=folder) == pytest.approx(adapted, abs=1e-6)
    processor.save_pretrained(adapter_folder)
    shown_figures = clean_logits(adapter_folder, base=folder)
    assert shown_figures == pytest.approx(with_own_processor, abs=1e-6)


def test_tensors_that_the_model_lacks_are_refused(folder, clean_logits):
    weights = stored.weights(folder)
    weights["model.another"] = torch.zeros(2)
    stored.store(folder, weights)
    with pytest.raises(ValueError, match="not in the model of config.json: .*model.another"):
        clean_logits(folder)


def test_missing_tensors_are_refused(folder, clean_logits):
    weights = stored.weights(folder)
    del weights["model.multi_modal_projector.linear_1.weight"]
    stored.store(folder, weights)
    with pytest.raises(ValueError, match="tensors missing.*linear_1.weight"):
        clean_logits(folder)


def hub_response(status, headers):
    request = Request("GET", "https://huggingface.co/x")
    return Response(status, headers=headers, request=request)


def hub_error_text(error, cause=None):
    """Returns the text of the error that a failure of the Hub becomes."""
    with pytest.raises(OSError) as caught, hub_errors("It was sent."):
        raise error from cause
    return str(caught.value)


@pytest.fixture
def refusal():
    return errors.HfHubHTTPError(
        "403 ...",
        response=hub_response(403, {"X-Error-Message": "No\nwrite access."}),
        server_message="No\nwrite access.",
    )


def test_a_failure_of_the_hub_is_a_line_with_its_status_and_its_reason(refusal):
    error_text = hub_error_text(refusal)
    assert error_text.endswith(" failed: (403) No write access. It was sent.")


def test_a_failure_of_the_hub_without_a_reason_is_named_as_the_client_does():
    silent = errors.HfHubHTTPError("503 of it", response=hub_response(503, {}))
    assert hub_error_text(silent).endswith(" failed: (503) 503 of it. It was sent.")


def test_the_reason_of_a_failed_upload_is_its_cause(refusal):
    upload_error = RuntimeError("while uploading")
    assert hub_error_text(upload_error, refusal) == hub_error_text(refusal)


def test_a_failed_upload_without_a_cause_is_told():
    error_text = hub_error_text(RuntimeError("while uploading"))
    assert error_text.endswith(" failed: while uploading. It was sent.")


def test_an_error_of_this_package_is_not_taken_for_the_hub_s():
    with pytest.raises(ValueError, match="ours"), hub_errors():
        raise ValueError("ours")


def test_front_matter_is_checked_only_of_the_card():
    other_page = additions({"other.md": b"---\nlicense: 3\n---\n"})
    assert check_front_matter(other_page, "model") is None


OURS = {"written_by": "normalign-llava", "schema_version": 1}


@pytest.mark.parametrize(
    ("record", "written"),
    [
        (OURS | {"files": {"a": ["1", "2"], "b": "3"}}, {"a": ["1", "2"]}),
        (OURS | {"files": ["a"]}, {}),
        (OURS, {}),
        (OURS | {"files": {"a": ["1"]}, "schema_version": 2}, {}),
        (OURS | {"files": {"a": ["1"]}, "written_by": "somebody"}, {}),
        ({"schema_version": 1, "files": {"a": ["1"]}}, {}),
        (["a"], {}),
    ],
    ids=str,
)
def test_what_a_publication_wrote_is_read_only_from_a_record_of_ours(record, written):
    assert _recorded(json.dumps(record).encode()) == written


@pytest.mark.parametrize("content", [b"{", b"\xff", b"[" * 100_000])
def test_a_file_that_is_not_a_record_says_nothing(content):
    assert _recorded(content) == {}


def report_text(**changes):
    attention = {
        "question": "who?",
        "image": "a.png",
        "maps": [1],
    }
    content = {
        "schema_version": SCHEMA_VERSION,
        "against": None,
        "figures": [],
        "provenance": {},
        "report": {"attention": [attention]},
        **changes,
    }
    return json.dumps(content)


def store_report(folder, text):
    (folder / "diagnostics").mkdir()
    (folder / "diagnostics" / "report.json").write_text(text)


def test_a_folder_without_a_report_has_none_to_publish(tmp_path):
    assert read_public_report(tmp_path) == {}


def test_of_a_report_figures_of_samples_and_of_other_folders_stay_here(tmp_path):
    figures = []
    for file_name in (
        "interface.png",
        "attention_1.png",
        "image_2.png",
        "baseline_image_1.png",
        "../a.png",
        "a/b.png",
        ".a.png",
        "a.svg",
        "images.png",
        "baseline_norms.png",
    ):
        figures.append({"file": file_name, "title": "T"})
    store_report(tmp_path, report_text(figures=figures))
    public_figures = read_public_report(tmp_path)["figures"]
    shown_figures = [figure["file"] for figure in public_figures]
    assert shown_figures == ["interface.png", "images.png", "baseline_norms.png"]


def test_of_a_report_questions_and_images_stay_here(tmp_path):
    store_report(tmp_path, report_text())
    attention = read_public_report(tmp_path)["report"]["attention"]
    assert attention == [{"question": "", "image": None, "maps": []}]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            report_text(schema_version=SCHEMA_VERSION - 1),
            f"has schema {SCHEMA_VERSION - 1}, not",
        ),
        ("{", "diagnostics/report.json"),
        ("[]", "diagnostics/report.json"),
        (json.dumps({"schema_version": SCHEMA_VERSION}), "Diagnose again, or remove it"),
    ],
)
def test_a_report_that_cannot_be_read_is_named(tmp_path, text, reason):
    store_report(tmp_path, text)
    with pytest.raises(ValueError, match=reason):
        read_public_report(tmp_path)


def test_logits_that_are_not_finite_are_refused(folder):
    model = AutoModelForImageTextToText.from_pretrained(folder)
    processor = AutoProcessor.from_pretrained(folder)
    assert len(first_logits(model, processor)) == model.config.text_config.vocab_size
    # Only the logit of a token that is not in the question changes.
    other_token = processor.tokenizer.convert_tokens_to_ids("z")
    model.lm_head.weight.data[other_token, 0] = float("inf")
    with pytest.raises(ValueError, match="NaN or infinite"):
        first_logits(model, processor)


PYTHON = sys.executable


@pytest.fixture
def replace_python(tmp_path, monkeypatch):
    """Puts a script in the place of Python, which the clean process would run."""

    def write_script(script):
        script_path = tmp_path / "python"
        script_path.write_text(f"#!{PYTHON}\n{script}")
        script_path.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script_path))

    return write_script


ECHO = """
import json, os, sys
request = json.load(sys.stdin)
print("loading")
print(json.dumps({
    "request": request,
    "arguments": sys.argv[1:],
    "folder": os.getcwd(),
    "files": os.listdir(),
    "environment": dict(os.environ),
}))
"""
REMOVED_VARIABLES = [
    "HF_TOKEN",
    "HF_HUB_CACHE",
    "HF_HUB_OFFLINE",
    "TRANSFORMERS_CACHE",
    "HUGGING_FACE_HUB_TOKEN",
    "HF_TOKEN_PATH",
    "TRANSFORMERS_OFFLINE",
]


@pytest.fixture
def ask_echo(replace_python, tmp_path, monkeypatch):
    """Asks a process that says what it was given."""
    replace_python(ECHO)
    monkeypatch.chdir(tmp_path)
    for variable in REMOVED_VARIABLES:
        monkeypatch.setenv(variable, "1")
    monkeypatch.setenv("HF_ENDPOINT", "http://host")
    monkeypatch.setenv("MY_HF_TOKEN", "mine")
    return ask_clean_process


@pytest.mark.parametrize(
    ("source", "options", "expected"),
    [
        ("own", {}, ["{}/own", None, None, None]),
        ("lab/m", {"revision": "0c"}, ["lab/m", "0c", None, None]),
        ("own", {"base": "../b"}, ["{}/own", None, "../b", None]),
        ("own", {"base": "lab/b", "base_revision": "1d"}, ["{}/own", None, "lab/b", "1d"]),
        ("lab/m", {"revision": "0c", "token": "secret"}, ["lab/m", "0c", None, None]),
    ],
)
def test_a_clean_process_is_given_the_request(ask_echo, tmp_path, source, options, expected):
    process_facts = ask_echo(source, **options)
    checkpoint, *others = expected
    assert process_facts["request"] == [checkpoint.format(tmp_path), *others]


@pytest.mark.parametrize(
    ("source", "options", "is_offline"),
    [
        ("own", {}, True),
        ("lab/m", {"revision": "0c"}, False),
        ("own", {"base": "../b"}, True),
        ("own", {"base": "lab/b", "base_revision": "1d"}, False),
        ("lab/m", {"revision": "0c", "token": "secret"}, False),
    ],
)
def test_a_clean_process_is_given_no_setting_of_the_cache(ask_echo, source, options, is_offline):
    environment = ask_echo(source, **options)["environment"]
    expected = dict.fromkeys(REMOVED_VARIABLES)
    expected["HF_TOKEN"] = options.get("token")
    if is_offline:
        expected["HF_HUB_OFFLINE"] = "1"
    assert {variable: environment.get(variable) for variable in REMOVED_VARIABLES} == expected

    implicit_token = environment.get("HF_HUB_DISABLE_IMPLICIT_TOKEN")
    if "token" in options:
        assert implicit_token is None
    else:
        assert implicit_token == "1"


def test_a_clean_process_is_in_an_empty_folder_of_its_own_which_is_removed(ask_echo):
    process_facts = ask_echo("own")
    assert process_facts["arguments"] == ["-P", clean_process.__file__]
    assert process_facts["files"] == []
    assert process_facts["environment"]["HF_HOME"] == f"{process_facts['folder']}/home"
    assert not Path(process_facts["folder"]).exists()


def test_a_clean_process_keeps_other_settings(ask_echo):
    environment = ask_echo("own")["environment"]
    assert environment["HF_ENDPOINT"] == "http://host"
    assert environment["MY_HF_TOKEN"] == "mine"


def test_the_status_of_a_clean_process_is_in_the_error(replace_python):
    replace_python("import sys; sys.exit(3)")
    with pytest.raises(ValueError, match="own does not work .*\nIt ended with status 3"):
        ask_clean_process("own")


def test_what_a_clean_process_said_last_is_in_the_error(replace_python):
    replace_python("import sys; sys.stderr.write('first' + 'x' * 1993 + 'last\\n'); sys.exit(1)")
    with pytest.raises(ValueError, match="\nstx{1993}last$"):
        ask_clean_process("own")


def test_logits_differ_by_a_share_of_the_largest():
    logits = [-2000.0, 1.0]
    assert difference(logits, [-2000.0, 1.019]) is None
    assert difference(logits, [-2000.0, 0.979]) is not None
    assert difference([0.0, 0.5], [1e-4, 0.5]) is not None


@pytest.fixture
def asked_logits(monkeypatch, tmp_path):
    """Returns what `main` prints for a request, in this process and with its own module cache."""

    def run_request(checkpoint, revision=None, base=None, base_revision=None):
        request = [checkpoint, revision, base, base_revision]
        printed = StringIO()
        module_cache = str(tmp_path / "modules")
        with monkeypatch.context() as module_patch:
            module_patch.setitem(sys.modules, "normalign_llava", sys.modules["normalign_llava"])
            module_patch.setattr(sys, "stdin", StringIO(json.dumps(request)))
            module_patch.setattr(sys, "stdout", printed)
            module_patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", module_cache)
            clean_process.main()
        return json.loads(printed.getvalue())

    return run_request


def test_a_folder_is_asked_with_its_own_code(folder, asked_logits):
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(folder).eval()
    expected = logits_of(model, AutoProcessor.from_pretrained(folder))
    assert asked_logits(str(folder)) == pytest.approx(expected, abs=1e-6)


def test_a_folder_without_its_norm_is_refused(folder, asked_logits):
    weights = stored.weights(folder)
    parameter_name = "model.multi_modal_projector.norm.weight"
    del weights[parameter_name]
    stored.store(folder, weights)
    with pytest.raises(ValueError, match=f"tensors missing, .*{parameter_name}"):
        asked_logits(str(folder))


@pytest.mark.parametrize("has_processor", [False, True])
def test_an_adapter_is_asked_on_its_base_with_its_own_processor_if_it_has_one(
    folder, tmp_path, asked_logits, has_processor
):
    adapter_folder = tmp_path / "adapter"
    adapted_model = make_adapter(folder, adapter_folder)
    processor = AutoProcessor.from_pretrained(folder)
    if has_processor:
        processor.chat_template = f"!{processor.chat_template}"
        processor.save_pretrained(adapter_folder)
    expected = logits_of(adapted_model, processor)
    logits = asked_logits(str(adapter_folder), base=str(folder))
    assert logits == pytest.approx(expected, abs=1e-6)
