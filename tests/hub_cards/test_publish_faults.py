# SPDX-License-Identifier: Apache-2.0
"""Publishing with faults: the branch is at the old or the new commit, and a second run ends it."""

import os
import shutil
import signal

import pytest


pytestmark = pytest.mark.slow

UPLOAD = "PUT "
COMMIT = "POST .*/commit/"


@pytest.fixture
def old_repository(hub):
    """The repository before it is published to."""
    return hub.create("ann/m", files={"notes.md": b"old"})


def assert_published(repository, folder, commit_count):
    """Asserts that a repository holds the folder, after so many commits."""
    for local_path in folder.iterdir():
        assert repository.read(local_path.name) == local_path.read_bytes()
    assert len(repository.commits()) == commit_count


def test_a_repository_that_cannot_be_made_is_made_by_the_next_run(publish, hub, folder):
    hub.fault(403, "POST /api/repos/create")
    status, printed_text = publish(folder, "--no-verify")
    assert status == 1
    assert "(403)" in printed_text
    assert "Run the command again" in printed_text
    assert not hub.repositories

    status, _ = publish(folder, "--no-verify")
    assert status == 0
    assert_published(hub.repository("ann/m"), folder, 2)


def test_a_fault_leaves_the_branch_and_the_next_run_ends_it(publish, hub, folder, old_repository):
    old_head = old_repository.head()
    hub.fault(500, COMMIT)
    status, printed_text = publish(folder, "--no-verify")
    assert status == 1
    assert "(500)" in printed_text
    assert "Run the command again" in printed_text
    assert list(hub.repositories.values()) == [old_repository]
    assert old_repository.head() == old_head
    received = hub.received.total()
    assert received

    status, _ = publish(folder, "--no-verify")
    assert status == 0
    assert_published(old_repository, folder, 3)
    assert hub.received.total() == received, "what was uploaded was sent again"


def test_killed_during_the_upload_and_run_again(start, publish, hub, folder, old_repository):
    old_head = old_repository.head()
    paused_request = hub.fault("pause", UPLOAD)
    process = start(folder, "--no-verify")
    assert paused_request.reached.wait(60)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    paused_request.released.set()
    assert old_repository.head() == old_head

    status, _ = publish(folder, "--no-verify")
    assert status == 0
    assert_published(old_repository, folder, 3)


def test_of_two_publishers_the_slower_gets_an_error(
    start, publish, hub, folder, tmp_path, old_repository
):
    other_folder = shutil.copytree(folder, tmp_path / "other")
    (other_folder / "training.json").write_text('{"seconds": 1.5}')
    paused_request = hub.fault("pause", COMMIT)
    slower = start(folder, "--no-verify")
    assert paused_request.reached.wait(60)
    status, _ = publish(other_folder, "--no-verify")
    assert status == 0
    faster_commit = old_repository.commit
    paused_request.released.set()
    ended_process = slower.wait()
    assert ended_process.returncode == 1
    assert "A commit has happened since" in ended_process.stderr
    assert old_repository.commit == faster_commit

    status, _ = publish(folder, "--no-verify")
    assert status == 0
    assert old_repository.head().parent == faster_commit
    assert "training.json" not in old_repository.head().files
