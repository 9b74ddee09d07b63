# SPDX-License-Identifier: Apache-2.0
"""Publishing with faults: the branch is at the old or the new commit, and a second run ends it."""

import os
import shutil
import signal

import pytest


pytestmark = pytest.mark.slow
CREATE = "POST /api/repos/create"
PUT = "PUT "
COMMIT = "POST .*/commit/"


def published(hub, folder, commits):
    """Whether ann/m holds the folder, after so many commits."""
    repository = hub.repository("ann/m")
    same = all(repository.read(path.name) == path.read_bytes() for path in folder.iterdir())
    return same and len(repository.commits()) == commits


@pytest.mark.parametrize("kind, where", [(403, CREATE), (500, COMMIT)])
def test_a_fault_leaves_the_branch_and_the_next_run_ends_it(publish, hub, folder, kind, where):
    if where != CREATE:
        hub.create("ann/m", files={"notes.md": b"old"})
    before = {name: repository.head() for name, repository in hub.repositories.items()}
    hub.fault(kind, where)
    status, shown = publish(folder, "--no-verify")
    assert status == 1 and f"({kind})" in shown and "Run the command again" in shown
    assert {name: repository.head() for name, repository in hub.repositories.items()} == before
    received = hub.received.total()
    status, shown = publish(folder, "--no-verify")
    assert status == 0 and published(hub, folder, 3 if before else 2)
    assert not received or hub.received.total() == received, "what was uploaded was sent again"


def test_killed_during_the_upload_and_run_again(start, publish, hub, folder):
    before = hub.create("ann/m", files={"notes.md": b"old"}).head()
    pause = hub.fault("pause", PUT)
    process = start(folder, "--no-verify")
    assert pause.reached.wait(60)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    pause.released.set()
    assert hub.repository("ann/m").head() == before
    assert publish(folder, "--no-verify")[0] == 0 and published(hub, folder, 3)


def test_of_two_publishers_the_slower_gets_an_error(start, publish, hub, folder, tmp_path):
    other = shutil.copytree(folder, tmp_path / "other")
    (other / "training.json").write_text('{"seconds": 1.5}')
    repository = hub.create("ann/m", files={"notes.md": b"old"})
    pause = hub.fault("pause", COMMIT)
    slower = start(folder, "--no-verify")
    assert pause.reached.wait(60)
    assert publish(other, "--no-verify")[0] == 0
    theirs = repository.commit
    pause.released.set()
    process = slower.wait()
    assert process.returncode == 1 and "A commit has happened since" in process.stderr
    assert repository.commit == theirs
    assert publish(folder, "--no-verify")[0] == 0 and repository.head().parent == theirs
    assert "training.json" not in repository.head().files
