"""Folders that are replaced whole, or not at all."""

import pytest

from normalign_llava.checkpoint.files import replaced_folder


def test_a_folder_is_replaced_only_when_the_block_ends(tmp_path):
    target = tmp_path / "target"
    for text in ("one", "two"):
        with replaced_folder(target, lambda folder: ["file"]) as staging:
            (staging / "file").write_text(text)
            assert target.exists() == (text == "two")
        assert (target / "file").read_text() == text
    with pytest.raises(KeyboardInterrupt), replaced_folder(target, lambda folder: ["file"]):
        raise KeyboardInterrupt
    assert (target / "file").read_text() == "two" and list(tmp_path.iterdir()) == [target]


def test_what_a_killed_run_left_is_removed_and_nothing_else(tmp_path):
    left, own, other = (tmp_path / name for name in (".out-ab12_xyz", ".out-backup99", ".out-notes"))
    (left / "out").mkdir(parents=True)
    for folder in (own, other):
        folder.mkdir()
        (folder / "mine.txt").write_text("mine")
    with replaced_folder(tmp_path / "out", lambda folder: []) as staging:
        (staging / "file").write_text("new")
    assert {path.name for path in tmp_path.iterdir()} == {"out", own.name, other.name}


def test_a_block_that_fails_leaves_what_was_there(tmp_path):
    target = tmp_path / "out"
    target.mkdir()
    (target / "file").write_text("old")
    with pytest.raises(RuntimeError), replaced_folder(target, lambda folder: ["file"]) as staging:
        (staging / "file").write_text("new")
        raise RuntimeError
    assert (target / "file").read_text() == "old" and list(tmp_path.iterdir()) == [target]
