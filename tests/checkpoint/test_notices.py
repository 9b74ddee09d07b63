"""Which files of a part are licence texts and notices, and what a checkpoint says of them."""

import pytest

from normalign_llava.checkpoint.notices import (
    LARGEST_NOTICE,
    fetch_notices,
    fetch_part_notices,
    place_of,
    write_notices,
)


NOTICES = [
    "LICENSE",
    "LICENSE-MIT",
    "LICENSE.MIT",
    "License 2.txt",
    "licenses.rst",
    "Copyright",
    "licence_model.md",
    "NOTICES.TXT",
    "Notice.Txt",
    "COPYING.3",
    "use_policy",
    "LICENCES-2.0",
]
OTHER_FILES = [
    "license.yaml",
    "LICENSED.txt",
    "NOTE.txt",
    "UNLICENSE",
    "LICENSE.tar.gz",
    "licensetext",
    "COPYING.py",
    "use_policies.md",
]


def test_notices_are_known_by_their_names(tmp_path):
    for file_name in (*NOTICES, *OTHER_FILES):
        (tmp_path / file_name).write_text(file_name)
    (tmp_path / "LICENSE.md").mkdir()

    expected = {}
    for file_name in sorted(NOTICES):
        expected[file_name] = file_name.encode()
    fetched = fetch_part_notices(str(tmp_path), None)
    assert fetched == expected
    assert list(fetched) == list(expected)


@pytest.fixture
def large_notice(tmp_path):
    """A folder with LICENSE of the largest size that is read, and NOTICE of one byte more."""
    (tmp_path / "LICENSE").write_bytes(b"x" * LARGEST_NOTICE)
    (tmp_path / "NOTICE").write_bytes(b"x" * (LARGEST_NOTICE + 1))
    return tmp_path


def test_notices_of_a_part_are_small(large_notice):
    assert fetch_part_notices(str(large_notice), None).keys() == {"LICENSE"}


def test_notices_of_a_checkpoint_are_small(large_notice):
    license_place = place_of("vision", "LICENSE")
    notice_place = place_of("vision", "NOTICE")
    write_notices(large_notice, {license_place: (large_notice / "LICENSE").read_bytes()})
    write_notices(large_notice, {notice_place: (large_notice / "NOTICE").read_bytes()})
    record = {"notices": ["notices/vision/LICENSE", "notices/vision/NOTICE"]}
    fetched = fetch_notices(record, str(large_notice))
    assert fetched.keys() == {"notices/vision/LICENSE"}


def test_notices_are_carried_from_checkpoint_to_checkpoint(tmp_path):
    expected = {}
    for part in ("vision", "language"):
        for file_name in NOTICES:
            place = place_of(part, file_name)
            expected[place] = place.encode()
    write_notices(tmp_path, expected)
    for place, content in expected.items():
        assert (tmp_path / place).read_bytes() == content

    record = {"notices": sorted(expected)}
    assert fetch_notices(record, str(tmp_path)) == expected


@pytest.mark.parametrize(
    "place",
    ["notices/other/LICENSE", "notices/LICENSE", "notices/vision/a/LICENSE"],
)
def test_a_notice_where_none_is_put_is_left_out(tmp_path, place):
    notice_path = tmp_path / place
    notice_path.parent.mkdir(parents=True)
    notice_path.write_text("not where one is put")
    assert fetch_notices({"notices": [place]}, str(tmp_path)) == {}


def test_a_hub_that_cannot_be_asked_for_notices_gives_a_warning(caplog):
    assert fetch_part_notices("user/model", None) == {}
    (warning,) = caplog.messages
    assert "user/model" in warning


@pytest.mark.parametrize(
    "record",
    [
        None,
        {},
        {"notices": None},
        {"notices": {"a": 1}},
        {"notices": [3]},
    ],
)
def test_a_record_without_a_list_of_notices_has_none(tmp_path, record):
    assert fetch_notices(record, str(tmp_path)) == {}
