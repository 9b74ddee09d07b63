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
from normalign_llava.hub_cards import demo
from normalign_llava.hub_cards.card.facts import Part
from normalign_llava.hub_cards.card.write import render_card
from normalign_llava.hub_cards.demo import push_space, require_own_space, space_files
from normalign_llava.hub_cards.push import checks, clean_process
from normalign_llava.hub_cards.push.checks import recorded_base, require_pinned_base
from normalign_llava.hub_cards.push.clean_process import (
    ask_clean_process,
    difference,
    first_logits,
)
from normalign_llava.hub_cards.push.publish import Publication, publish, summary
from normalign_llava.hub_cards.push.record import (
    additions,
    check_files_of_others,
    files_of_others,
    stale_files,
)
from normalign_llava.hub_cards.push.repository import (
    Repository,
    _recorded,
    check_front_matter,
    hub_errors,
)
from normalign_llava.hub_cards.push.source import PublishSource
from normalign_llava.hub_cards.reading import read_public_report


def git(content):
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def sha256(content):
    return hashlib.sha256(content).hexdigest()


OLD = {"config.json": b"{}", "model.safetensors": b"weights", "training.json": b"1"}
OLD |= {"README.md": b"card", "LICENSE": b"terms", "merges.txt": b"a b"}


def repository(kind="model", **files):
    """What a publication of `OLD` left, and what others changed since."""
    ids = {path: git(content) for path, content in OLD.items()}
    ids["model.safetensors"] = sha256(OLD["model.safetensors"])
    written = {path: [sha256(content), git(content)] for path, content in OLD.items()}
    changed = {path.replace("__", "."): git(content) for path, content in files.items()}
    return Repository(HfApi(), "ann/m", kind, files=ids | changed, written=written)


def test_of_an_earlier_publication_what_is_ours_and_not_sent_again_is_stale():
    added = additions({"config.json": b"{...}", "generation_config.json": b"{}"})
    stale = ["merges.txt", "model.safetensors", "training.json"]  # neither card nor LICENSE
    assert stale_files(repository(), added) == stale
    assert stale_files(repository(training__json=b"2"), added) == stale[:2]


def test_what_others_changed_or_added_stands_in_the_way_if_it_is_read_or_overwritten():
    added = additions({"config.json": b"{...}", "notes.md": b"mine", "vocab.json": b"same"})
    assert files_of_others(repository(), added) == []
    theirs = repository(
        config__json=b"theirs", notes__md=b"theirs", README__md=b"theirs", vocab__json=b"same",
        merges__txt=b"theirs", other__md=b"theirs", adapter_config__json=b"theirs",
    )  # fmt: skip
    found = ["adapter_config.json", "config.json", "merges.txt", "notes.md"]
    assert files_of_others(theirs, added) == found
    read = ["adapter_config.json", "config.json", "merges.txt", "vocab.json"]
    assert files_of_others(theirs) == read
    with pytest.raises(ValueError, match="ann/m has files that no publication") as error:
        check_files_of_others(theirs, added)
    listed = str(error.value).splitlines()
    assert "- config.json would be overwritten" in listed
    assert "- merges.txt would be read beside the model" in listed
    with pytest.raises(ValueError, match="ann/m has files that no publication") as error:
        check_files_of_others(theirs)
    assert "- vocab.json would be read beside the model" in str(error.value)
    check_files_of_others(repository())
    # A Space reads nothing beside what it is sent; its card is a file like others.
    space = repository("space", README__md=b"theirs", merges__txt=b"theirs")
    assert files_of_others(space, additions({"README.md": b"ours"})) == ["README.md"]
    check_files_of_others(space, additions({"app.py": b"ours"}))


def test_what_was_done_is_told_and_what_would_be():
    source = PublishSource(None, {"a": b"1", "b": b"2"}, {"a": 1234, "b": 1}, ["notes.txt", "x/"])
    before = Repository(
        HfApi(endpoint="https://huggingface.co"), "ann/m", branch="trial", commit="0" * 40
    )
    planned = summary(Publication(source, before)).splitlines()
    assert planned[1:] == ["  a: 1,234 bytes", "  b: 1 bytes", "Stays here: notes.txt, x/."]
    nothing = PublishSource(None, {}, {}, [])
    assert summary(Publication(nothing, before)).endswith("Stays here: nothing.")

    def told(oid, **more):
        page = more.pop("pr_url", None)
        commit = CommitInfo(f"https://huggingface.co/ann/m/commit/{oid}", "m", "", oid, pr_url=page)
        return summary(Publication(source, before, commit, **more)).splitlines()

    first, *others = told("1" * 40, removed=["c", "d"])
    assert first == "Sent to ann/m: 2 files in one commit; removed: c, d."
    assert others[:2] == [
        f"Commit: {'1' * 40}",
        "Repository: https://huggingface.co/ann/m/tree/trial",
    ]
    assert len(others) == 3 and '"' + "1" * 40 + '"' in others[2]
    first, *others = told(
        "0" * 40,
        space="https://huggingface.co/s",
        pr_url="https://huggingface.co/ann/m/discussions/1",
    )
    assert first == "Sent to ann/m: nothing changed; removed: nothing."
    assert others[2:4] == [
        "Pull request: https://huggingface.co/ann/m/discussions/1",
        "Space: https://huggingface.co/s",
    ]


@pytest.fixture
def found(monkeypatch):
    """Repositories by name that the demo's functions find, and the names that they ask for."""
    repositories = {}
    asked = []

    def find(api, name, kind="model"):
        asked.append((name, kind))
        return repositories[name]

    monkeypatch.setattr(demo, "find_repository", find)
    return repositories, asked


def space(**files):
    """A Space with the files that are to be, and others on top."""
    api = HfApi(endpoint="https://huggingface.co")
    planned = space_files("ann/m", "c" * 40)
    ids = {path: git(content) for path, content in planned.items()}
    written = {path: [sha256(content), git(content)] for path, content in planned.items()}
    changed = {path.replace("__", "."): git(content) for path, content in files.items()}
    return Repository(api, "ann/m-demo", "space", files=ids | changed, written=written)


def test_a_space_of_ours_or_an_empty_one_may_be_written(found):
    repositories, asked = found
    ours = space(notes__md=b"theirs")
    only = replace(ours, files={"README.md": "theirs", ".gitattributes": "theirs"}, written={})
    for state in (ours, only, replace(only, files={})):
        repositories["ann/m-demo"] = state
        for replacing in (False, True):
            assert require_own_space(HfApi(), "ann/m", replacing) is state
    assert {*asked} == {("ann/m-demo", "space")}


def test_a_space_of_others_or_one_that_was_changed_is_not_written(found):
    repositories, _ = found
    repositories["ann/m-demo"] = replace(space(), files={"app.py": "theirs"}, written={})
    for replacing in (False, True):
        with pytest.raises(ValueError, match="ann/m-demo is not this package's"):
            require_own_space(HfApi(), "ann/m", replacing)
    repositories["ann/m-demo"] = changed = space(app__py=b"theirs", README__md=b"theirs")
    with pytest.raises(ValueError, match="- README.md would(.|\n)*- app.py would be over"):
        require_own_space(HfApi(), "ann/m")
    assert require_own_space(HfApi(), "ann/m", replace_files=True) is changed


@pytest.mark.parametrize("private", [True, False])
def test_a_space_is_as_private_as_its_model_and_needs_a_token_then(found, monkeypatch, private):
    repositories, asked = found
    repositories["ann/m"] = replace(space(), private=private)
    sent = []
    told = []
    monkeypatch.setattr(demo, "push", lambda *args, **options: sent.append((args, options)))
    page = push_space(space(), "ann/m", "c" * 40, told.append)
    assert page == "https://huggingface.co/spaces/ann/m-demo" and asked == [("ann/m", "model")]
    (((where, added), options),) = sent
    assert where.repo_id == "ann/m-demo" and options == {"removed": (), "private": private}
    contents = {addition.path_in_repo: addition.path_or_fileobj for addition in added}
    record = json.loads(contents.pop("publication.json"))
    assert contents == space_files("ann/m", "c" * 40) and record["files"].keys() == contents.keys()
    assert len(told) == private and all(f"HF_TOKEN: {page}/settings" in text for text in told)


@pytest.mark.parametrize("error", [ValueError("no card"), OSError("no network")])
def test_where_a_space_fails_the_model_is_said_to_be_published(found, monkeypatch, error):
    repositories, _ = found
    repositories["ann/m"] = space()

    def fail(*args, **options):
        raise error

    monkeypatch.setattr(demo, "push", fail)
    with pytest.raises(OSError, match=f"published, at {'c' * 40} of ann/m; .* {error}"):
        push_space(space(), "ann/m", "c" * 40, print)


def adapter(folder, **settings):
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", **settings}))
    return folder


def test_the_base_that_an_adapter_names_is_pinned_as_far_as_it_is_known(tmp_path):
    name = "base_model_name_or_path"
    pinned = adapter(tmp_path / "a", **{name: "lab/base"}, revision="trial")
    expected = Part("base model", "lab/base", "lab/base", "trial")
    assert recorded_base(pinned) == expected
    assert require_pinned_base(pinned, None, ask_hub=False) == expected
    assert require_pinned_base(pinned, "lab/base", ask_hub=False) == expected
    other = Part("base model", "my/base", "my/base", "main")
    assert require_pinned_base(pinned, "my/base", ask_hub=False) == other
    for revision in ({}, {"revision": None}):
        plain = adapter(tmp_path / "a", **{name: "lab/base"}, **revision)
        assert recorded_base(plain).revision == "main"
    here = adapter(tmp_path / "a", **{name: str(tmp_path)})
    for folder in (here, adapter(tmp_path / "b")):
        assert recorded_base(folder) is None
        with pytest.raises(ValueError, match="base is a folder.* --base user/name"):
            require_pinned_base(folder, None, ask_hub=False)
        assert require_pinned_base(folder, "my/base", ask_hub=False) == other
    with pytest.raises(ValueError, match="base is a folder"):
        require_pinned_base(pinned, str(tmp_path), ask_hub=False)


def test_an_adapter_is_pinned_to_the_commit_of_a_base_that_is_as_in_training(
    folder, tmp_path, monkeypatch
):
    """A folder stands for the base on the Hub."""
    monkeypatch.setattr(checks, "require_checkpoint", lambda name, revision, remedy: (folder, None))
    saved = adapter(tmp_path / "a", base_model_name_or_path="lab/base", revision="trial")
    expected = Part("base model", folder, folder, None)
    assert require_pinned_base(saved, None, ask_hub=True) == expected
    config = json.loads((folder / "config.json").read_text())
    changes = {name: config[name] for name in ("projector_norm", "gradient_compensation")}
    (saved / "training.json").write_text(json.dumps({"config_changes": changes}))
    assert require_pinned_base(saved, None, ask_hub=True) == expected
    default = NormAlignLlavaConfig.gradient_compensation
    other = {"none": "global", "global": "none"}[default]
    del config["gradient_compensation"]  # as by default
    (folder / "config.json").write_text(json.dumps(config))
    for value, fits in ((default, True), (other, False)):
        changes = {"config_changes": {"gradient_compensation": value}}
        (saved / "training.json").write_text(json.dumps(changes))
        if fits:
            assert require_pinned_base(saved, None, ask_hub=True) == expected
            continue
        with pytest.raises(ValueError, match=f"compensation '{value}', not '{default}' as in its"):
            require_pinned_base(saved, None, ask_hub=True)
    (folder / "modeling_normalign_llava.py").unlink()
    with pytest.raises(ValueError, match="would run code .*: modeling_normalign_llava.py. Publish"):
        require_pinned_base(saved, None, ask_hub=True)


def test_a_plan_of_an_adapter_names_its_base_and_does_not_load_it(folder, tmp_path):
    saved = tmp_path / "adapter"
    told = []
    make_adapter(folder, saved)
    (saved / "README.md").unlink()  # PEFT's
    planned = dict(as_adapter=True, base="lab/base", dry_run=True, notify=told.append)
    publication = publish(saved, "ann/m", **planned)
    files = publication.source.files
    settings = json.loads(files["adapter_config.json"])
    assert (settings["base_model_name_or_path"], settings["revision"]) == ("lab/base", "main")
    assert settings["r"] == 4 and b'"lab/base", "main"' in files["README.md"]
    assert told[-1] == "It passed the checks. It was not loaded."
    assert publication.commit is publication.space is None and publication.removed == []
    here = json.loads((saved / "adapter_config.json").read_text())
    assert here["base_model_name_or_path"] == str(folder)


OID = "1" * 40


@pytest.fixture
def steps(monkeypatch):
    """`publish` with its steps told instead of done; `found` is the repository on the Hub."""
    calls = {}
    found = {"commit": "0" * 40, "private": True, "branch": "trial"}
    logits = [[1.0, 2.0]]

    def step(name, value):
        def call(*args, **options):
            calls.setdefault(name, []).append((args, options))
            return value(*args, **options) if callable(value) else value

        module = import_module("normalign_llava.hub_cards.push.publish")
        monkeypatch.setattr(module, name, call)

    api = HfApi(endpoint="https://huggingface.co", token="my-token")
    step("log_in", api)
    step("find_repository", lambda *args, **options: Repository(api, "ann/m", **found))
    step("require_own_space", "the Space")
    step("push_space", "its page")
    step("push", CommitInfo(f"https://huggingface.co/ann/m/commit/{OID}", "m", "", OID))
    step("ask_clean_process", lambda *args, **options: logits[len(calls["ask_clean_process"]) % 2])
    logits.append(logits[0])
    return calls, found, logits


def test_the_steps_of_a_publication_are_of_its_branch_and_its_commit(steps, folder):
    calls, found, _ = steps
    found["card"] = render_card(folder).text.replace("notes -->\n", "notes -->\nOf Ann.\n")
    told = []
    options = dict(private=True, revision="trial", space=True, token="given", notify=told.append)
    done = publish(str(folder), "ann/m", **options)
    assert (done.commit.oid, done.space, done.removed) == (OID, "its page", [])
    api = done.repository.api
    assert calls["log_in"] == [(("ann/m", "given", False), {})]
    assert calls["find_repository"] == [((api, "ann/m"), {"branch": "trial"})]
    assert calls["require_own_space"] == [((api, "ann/m", False), {})]
    first, second = calls["ask_clean_process"]
    assert first == ((folder,), {"token": "my-token"})
    assert second == (("ann/m",), {"revision": OID, "token": "my-token"})
    (((repository, added, removed), sent),) = calls["push"]
    assert repository is done.repository and removed == []
    assert sent == {"private": True, "create_pr": False}
    names = {addition.path_in_repo for addition in added}
    assert names == {*done.source.files, "publication.json"}
    card = done.source.files["README.md"].decode()
    assert '"ann/m", "trial"' in card and "Of Ann." in card
    assert calls["push_space"] == [(("the Space", "ann/m", OID, told.append), {})]


def test_a_proposal_without_checks_is_loaded_nowhere_and_has_no_space(steps, folder):
    calls, found, _ = steps
    found["private"] = False
    told = []
    options = dict(create_pr=True, check_loading=False, private=False, notify=told.append)
    done = publish(folder, "ann/m", **options)
    assert (
        done.space is None and "ask_clean_process" not in calls and "require_own_space" not in calls
    )
    assert calls["log_in"] == [(("ann/m", None, True), {})] and "may not load" in told[-1]
    assert calls["push"][0][1] == {"private": False, "create_pr": True}


@pytest.mark.parametrize("problem", ["differs", "fails"])
def test_a_commit_that_does_not_answer_as_the_folder_does_is_named(steps, folder, problem):
    calls, _, logits = steps
    if problem == "differs":
        logits[0] = [1.0, 3.0]
    else:
        logits[0] = []  # other logits than those before
    with pytest.raises(OSError, match=f"ann/m is at {OID}, but does not load.* {'0' * 40}"):
        publish(folder, "ann/m", space=True, notify=list)
    assert len(calls["push"]) == 1 and "push_space" not in calls


@pytest.mark.parametrize(("private", "known"), [(True, "public"), (False, "private")])
def test_the_visibility_of_a_repository_that_is_there_is_not_changed(steps, folder, private, known):
    calls, found, _ = steps
    found["private"] = not private
    with pytest.raises(ValueError, match=f"ann/m is {known}. Change that in its settings"):
        publish(folder, "ann/m", private=private, notify=list)
    found["commit"] = None  # there is none yet
    publish(folder, "ann/m", private=private, check_loading=False, notify=list)
    assert calls["push"][0][1]["private"] == private


def test_a_card_on_the_hub_is_replaced_on_request_and_files_of_others_too(steps, folder):
    calls, found, _ = steps
    files = {"README.md": "a", "pytorch_model.bin": "b", "config.json": "c", "merges.txt": "d"}
    found |= {"card": "# Mine\n", "files": files, "written": {"merges.txt": ["d"]}}
    known = dict(check_loading=False, notify=list)
    with pytest.raises(ValueError, match="README.md of ann/m was not written by this package"):
        publish(folder, "ann/m", replace_files=True, **known)
    with pytest.raises(ValueError, match="pytorch_model.bin would be read beside"):
        publish(folder, "ann/m", replace_card=True, **known)
    assert "push" not in calls
    done = publish(folder, "ann/m", replace_card=True, replace_files=True, **known)
    assert done.removed == calls["push"][0][0][2] == ["merges.txt", "pytorch_model.bin"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"as_adapter": True}, "is not an adapter"),
        ({"base": "lab/base"}, "is not an adapter"),
        ({"base_quantization": "nf4"}, "is not an adapter"),
        ({"space": True, "create_pr": True}, "A Space needs"),
        ({"repo_id": "a b/c"}, "a b/c"),
    ],
    ids=str,
)
def test_options_that_cannot_be_are_refused_at_once(folder, options, said):
    with pytest.raises(ValueError, match=said):
        publish(folder, **{"repo_id": "ann/m", "dry_run": True, **options})


def test_an_adapter_has_no_space_and_a_folder_that_is_written_to_is_not_published(tmp_path, folder):
    saved = adapter(tmp_path / "adapter", base_model_name_or_path="lab/base")
    with pytest.raises(ValueError, match="A Space needs"):
        publish(saved, "ann/m", as_adapter=True, space=True)
    with pytest.raises(ValueError, match="absent"):
        publish(tmp_path / "absent", "ann/m")


def test_how_an_adapter_s_base_was_quantized_may_be_said_where_it_is_published(tmp_path, folder):
    saved = tmp_path / "adapter"
    make_adapter(folder, saved)
    (saved / "training.json").unlink()  # which TRL alone does not write
    planned = dict(dry_run=True, check_loading=False, replace_card=True, notify=list)
    with pytest.raises(ValueError, match="not known. Give --base-quantization"):
        publish(saved, "ann/m", **planned)
    publication = publish(saved, "ann/m", base_quantization="none", **planned)
    assert any(name.startswith("model") for name in publication.source.files)


@pytest.fixture
def loaded_alone(monkeypatch, capsys):
    """Runs the script of the clean process here: its logits of a request."""
    monkeypatch.setitem(sys.modules, "normalign_llava", sys.modules["normalign_llava"])

    def loaded_alone(*request):
        words = [None if word is None else str(word) for word in request]
        monkeypatch.setattr("sys.stdin", StringIO(json.dumps(words)))
        clean_process.main()
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    yield loaded_alone
    logging.enable_progress_bar()


def test_a_checkpoint_is_loaded_whole_and_an_adapter_on_its_base(folder, tmp_path, loaded_alone):
    trained = make_adapter(folder, saved := tmp_path / "adapter")
    processor = AutoProcessor.from_pretrained(folder)
    whole = AutoModelForImageTextToText.from_pretrained(folder)
    with torch.inference_mode():
        alone, adapted = (first_logits(model, processor) for model in (whole, trained))
        processor.chat_template += "{{ 'a' }}"
        otherwise = first_logits(trained, processor)
    assert len({max(logits) for logits in (alone, adapted, otherwise)}) == 3
    assert loaded_alone(folder, None, None, None) == pytest.approx(alone, abs=1e-6)
    assert loaded_alone(saved, None, folder, None) == pytest.approx(adapted, abs=1e-6)
    processor.save_pretrained(saved)  # the adapter has its own
    assert loaded_alone(saved, None, folder, None) == pytest.approx(otherwise, abs=1e-6)
    weights = stored.weights(folder)
    stored.store(folder, weights | {"model.another": torch.zeros(2)})
    with pytest.raises(ValueError, match="not in the model of config.json: .*model.another"):
        loaded_alone(folder, None, None, None)
    del weights["model.multi_modal_projector.linear_1.weight"]
    stored.store(folder, weights)
    with pytest.raises(ValueError, match="tensors missing.*linear_1.weight"):
        loaded_alone(folder, None, None, None)


def response(status, headers):
    request = Request("GET", "https://huggingface.co/x")
    return Response(status, headers=headers, request=request)


def failed(error, cause=None):
    with pytest.raises(OSError) as caught, hub_errors("It was sent."):
        raise error from cause
    return str(caught.value)


def test_a_failure_of_the_hub_is_a_line_with_its_status_and_its_reason():
    refused = response(403, {"X-Error-Message": "No\nwrite access."})
    of_hub = errors.HfHubHTTPError("403 ...", response=refused, server_message="No\nwrite access.")
    assert failed(of_hub).endswith(" failed: (403) No write access. It was sent.")
    silent = errors.HfHubHTTPError("503 of it", response=response(503, {}))
    assert failed(silent).endswith(" failed: (503) 503 of it. It was sent.")
    upload = RuntimeError("while uploading")
    assert failed(upload, of_hub) == failed(of_hub)
    assert failed(RuntimeError("while uploading")).endswith(
        " failed: while uploading. It was sent."
    )
    with pytest.raises(ValueError, match="ours"), hub_errors():
        raise ValueError("ours")
    assert check_front_matter(additions({"other.md": b"---\nlicense: 3\n---\n"}), "model") is None


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
def test_what_a_publication_wrote_is_read_from_a_record_of_ours_alone(record, written):
    assert _recorded(json.dumps(record).encode()) == written


@pytest.mark.parametrize("record", [b"{", b"\xff", b"[" * 100_000])
def test_what_is_no_record_says_nothing(record):
    assert _recorded(record) == {}


def a_report(**changes):
    content = {"schema_version": SCHEMA_VERSION, "against": None, "figures": [], "provenance": {}}
    content["report"] = {"attention": [{"question": "who?", "image": "a.png", "maps": [1]}]}
    return json.dumps(content | changes)


def store_report(folder, text):
    (folder / "diagnostics").mkdir()
    (folder / "diagnostics" / "report.json").write_text(text)


def test_of_a_report_figures_of_samples_and_of_other_folders_stay_here(tmp_path):
    names = ["interface.png", "attention_1.png", "image_2.png", "baseline_image_1.png"]
    names += ["../a.png", "a/b.png", ".a.png", "a.svg", "images.png", "baseline_norms.png"]
    figures = [{"file": name, "title": "T"} for name in names]
    assert read_public_report(tmp_path) == {}
    store_report(tmp_path, a_report(figures=figures))
    stored = read_public_report(tmp_path)
    shown = ["interface.png", "images.png", "baseline_norms.png"]
    assert [drawn["file"] for drawn in stored["figures"]] == shown
    assert stored["report"]["attention"] == [{"question": "", "image": None, "maps": []}]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (a_report(schema_version=SCHEMA_VERSION - 1), f"has schema {SCHEMA_VERSION - 1}, not"),
        ("{", "diagnostics/report.json"),
        ("[]", "diagnostics/report.json"),
        (json.dumps({"schema_version": SCHEMA_VERSION}), "Diagnose again, or remove it"),
    ],
)
def test_a_report_that_cannot_be_read_is_named(tmp_path, text, said):
    store_report(tmp_path, text)
    with pytest.raises(ValueError, match=said):
        read_public_report(tmp_path)


def test_logits_that_are_not_finite_are_no_answer(folder):
    model = AutoModelForImageTextToText.from_pretrained(folder)
    processor = AutoProcessor.from_pretrained(folder)
    assert len(first_logits(model, processor)) == model.config.text_config.vocab_size
    unasked = processor.tokenizer.convert_tokens_to_ids("z")  # alone among the logits
    model.lm_head.weight.data[unasked, 0] = float("inf")
    with pytest.raises(ValueError, match="NaN or infinite"):
        first_logits(model, processor)


PYTHON = sys.executable


def stand_in(folder, monkeypatch, script: str) -> None:
    """A script in place of Python, which the clean process would be."""
    (folder / "python").write_text(f"#!{PYTHON}\n{script}")
    (folder / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))


TELLS = """
import json, os, sys
request = json.load(sys.stdin)
print("loading")
print(json.dumps([request, sys.argv[1:], os.getcwd(), os.listdir(), dict(os.environ)]))
"""


@pytest.mark.parametrize(
    ("source", "options", "asked", "is_offline"),
    [
        ("own", {}, ["{}/own", None, None, None], True),
        ("lab/m", {"revision": "0c"}, ["lab/m", "0c", None, None], False),
        ("own", {"base": "../b"}, ["{}/own", None, "../b", None], True),
        ("own", {"base": "lab/b", "base_revision": "1d"}, ["{}/own", None, "lab/b", "1d"], False),
        ("lab/m", {"revision": "0c", "token": "secret"}, ["lab/m", "0c", None, None], False),
    ],
)
def test_a_clean_process_is_given_the_request_and_no_setting_of_the_cache(
    tmp_path, monkeypatch, source, options, asked, is_offline
):
    stand_in(tmp_path, monkeypatch, TELLS)
    monkeypatch.chdir(tmp_path)
    removed = ["HF_TOKEN", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_CACHE"]
    removed += ["HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH", "TRANSFORMERS_OFFLINE"]
    for name in removed:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_ENDPOINT", "http://host")
    monkeypatch.setenv("MY_HF_TOKEN", "mine")
    request, words, place, files, environment = ask_clean_process(source, **options)
    assert request == [part and part.format(tmp_path) for part in asked]
    assert words == ["-P", clean_process.__file__]
    assert files == [] and not Path(place).exists()  # a folder of its own, removed afterwards
    given = {name: environment.get(name) for name in removed}
    expected = dict.fromkeys(removed)
    expected["HF_TOKEN"] = options.get("token")
    expected["HF_HUB_OFFLINE"] = "1" if is_offline else None
    assert given == expected
    implicit = environment.get("HF_HUB_DISABLE_IMPLICIT_TOKEN")
    assert implicit == (None if "token" in options else "1")
    assert environment["HF_HOME"] == f"{place}/home"
    assert (environment["HF_ENDPOINT"], environment["MY_HF_TOKEN"]) == ("http://host", "mine")


def test_what_a_clean_process_said_last_is_in_the_error(tmp_path, monkeypatch):
    stand_in(tmp_path, monkeypatch, "import sys; sys.exit(3)")
    with pytest.raises(ValueError, match="own does not work .*\nIt ended with status 3"):
        ask_clean_process("own")
    said = "import sys; sys.stderr.write('first' + 'x' * 1993 + 'last\\n'); sys.exit(1)"
    stand_in(tmp_path, monkeypatch, said)
    with pytest.raises(ValueError, match="\nstx{1993}last$"):
        ask_clean_process("own")


def test_logits_differ_by_a_share_of_the_largest():
    before = [-2000.0, 1.0]
    assert difference(before, [-2000.0, 1.019]) is None
    assert difference(before, [-2000.0, 0.979]) is not None
    assert difference([0.0, 0.5], [1e-4, 0.5]) is not None


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """What `main` prints for a request, in this process."""

    def asked(*request):
        monkeypatch.setitem(sys.modules, "normalign_llava", sys.modules["normalign_llava"])
        monkeypatch.setattr(sys, "stdin", StringIO(json.dumps(request)))
        said = StringIO()
        monkeypatch.setattr(sys, "stdout", said)
        cache = str(tmp_path / "modules")
        monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", cache)
        try:
            clean_process.main()
        finally:
            monkeypatch.undo()
        return json.loads(said.getvalue())

    return asked


def test_a_folder_is_asked_with_its_own_code(folder, asked):
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(folder).eval()
    with torch.inference_mode():
        here = first_logits(model, AutoProcessor.from_pretrained(folder))
    assert asked(str(folder), None, None, None) == pytest.approx(here, abs=1e-6)
    weights = stored.weights(folder)
    name = "model.multi_modal_projector.norm.weight"
    del weights[name]
    stored.store(folder, weights)
    with pytest.raises(ValueError, match=f"tensors missing, .*{name}"):
        asked(str(folder), None, None, None)


def test_an_adapter_is_asked_on_its_base_with_its_own_processor_if_it_has_one(
    folder, tmp_path, asked
):
    adapter = tmp_path / "adapter"
    trained = make_adapter(folder, adapter)
    processor = AutoProcessor.from_pretrained(folder)
    for own in (False, True):
        if own:
            processor.chat_template = "!" + processor.chat_template
            processor.save_pretrained(adapter)
        with torch.inference_mode():
            here = first_logits(trained, processor)
        assert asked(str(adapter), None, str(folder), None) == pytest.approx(here, abs=1e-6)
