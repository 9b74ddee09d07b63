"""Which files of a part are licence texts and notices, and what a checkpoint says of them."""

import pytest

from normalign_llava.checkpoint.notices import (
    LARGEST_NOTICE,
    fetch_notices,
    fetch_part_notices,
    place_of,
    write_notices,
)


NOTICES = ["LICENSE", "LICENSE-MIT", "LICENSE.MIT", "License 2.txt", "licenses.rst", "Copyright"]
NOTICES += [
    "licence_model.md",
    "NOTICES.TXT",
    "Notice.Txt",
    "COPYING.3",
    "use_policy",
    "LICENCES-2.0",
]
OTHERS = ["license.yaml", "LICENSED.txt", "NOTE.txt", "UNLICENSE", "LICENSE.tar.gz", "licensetext"]
OTHERS += ["COPYING.py", "use_policies.md"]


def test_notices_are_known_by_their_names(tmp_path):
    for name in (*NOTICES, *OTHERS):
        (tmp_path / name).write_text(name)
    (tmp_path / "LICENSE.md").mkdir()
    expected = {name: name.encode() for name in NOTICES}
    found = fetch_part_notices(str(tmp_path), None)
    assert found == expected and [*found] == sorted(found)


def test_notices_are_small(tmp_path):
    (tmp_path / "LICENSE").write_bytes(b"x" * LARGEST_NOTICE)
    (tmp_path / "NOTICE").write_bytes(b"x" * (LARGEST_NOTICE + 1))
    assert fetch_part_notices(str(tmp_path), None).keys() == {"LICENSE"}
    for name in ("LICENSE", "NOTICE"):
        write_notices(tmp_path, {place_of("vision", name): (tmp_path / name).read_bytes()})
    named = {"notices": ["notices/vision/LICENSE", "notices/vision/NOTICE"]}
    assert fetch_notices(named, str(tmp_path)).keys() == {"notices/vision/LICENSE"}


def test_notices_are_carried_from_checkpoint_to_checkpoint(tmp_path):
    paths = {place_of(part, name) for part in ("vision", "language") for name in NOTICES}
    written = {path: path.encode() for path in paths}
    write_notices(tmp_path, written)
    assert {path: (tmp_path / path).read_bytes() for path in paths} == written
    assert fetch_notices({"notices": sorted(paths)}, str(tmp_path)) == written
    for path in ("notices/other/LICENSE", "notices/LICENSE", "notices/vision/a/LICENSE"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("not where one is put")
        assert fetch_notices({"notices": [path]}, str(tmp_path)) == {}


def test_a_hub_that_cannot_be_asked_for_notices_is_told_of(caplog):
    assert fetch_part_notices("user/model", None) == {}
    (line,) = caplog.messages
    assert "user/model" in line


@pytest.mark.parametrize(
    "build", [None, {}, {"notices": None}, {"notices": {"a": 1}}, {"notices": [3]}]
)
def test_a_record_without_a_list_of_notices_has_none(tmp_path, build):
    assert fetch_notices(build, str(tmp_path)) == {}
