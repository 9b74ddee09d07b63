# SPDX-License-Identifier: Apache-2.0
"""What a quickstart removes from its folder: what an earlier one left unfinished, and nothing else."""

import pytest
from rich.console import Console
from test_quickstart_run import SHORT

from normalign_llava.quickstart.run import Journal, run_quickstart


@pytest.fixture
def no_archives(monkeypatch, tmp_path):
    """Nothing can be fetched, so a quickstart ends after its first look at the folder."""
    cache = tmp_path / "cache"
    cache.write_text("a file, not a folder")
    monkeypatch.setenv("NORMALIGN_CACHE", str(cache))


@pytest.mark.parametrize("name", [".git/HEAD", "journal.json"])
def test_a_folder_with_anything_else_in_it_is_refused(tmp_path, no_archives, name):
    output = tmp_path / "mine"
    (output / name).parent.mkdir(parents=True)
    (output / name).write_text("{}")
    with pytest.raises(ValueError, match=f"mine holds {name.partition('/')[0]}, which no quickstart wrote"):
        run_quickstart(output, SHORT)
    assert [path for path in output.rglob("*") if path.is_file()] == [output / name]


def test_only_unfinished_folders_of_its_own_are_removed_from_an_earlier_run(tmp_path, no_archives):
    output = tmp_path / "run"
    output.mkdir()
    Journal(output, SHORT, Console())
    unfinished = [output / ".stage1-a1b2c3d4" / "stage1", output / "baseline" / ".model-zzzzzzzz" / "model"]
    own = [output / ".git" / "HEAD", output / ".stage1-a1b2c3d4-old" / "stage1", output / ".model-a1b2c3d4" / "mine"]
    for folder in [*unfinished, *own]:
        folder.mkdir(parents=True)
    with pytest.raises(OSError, match="cache"):
        run_quickstart(output, SHORT)
    assert not any(folder.exists() for folder in unfinished) and all(folder.exists() for folder in own)
