"""Images in a zip file are read in place, by the rules of a folder, by threads and processes."""

import multiprocessing
import os
import re
import stat
import warnings
import zipfile
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from itertools import islice

import pytest
from train_data import image_bytes, llava, read, write_json

from normalign_llava.data.rows import images
from normalign_llava.data.rows.images import ImageRules, decode_image, open_and_find_problem
from normalign_llava.diagnose.data import load_samples


@pytest.fixture
def archive_path(tmp_path):
    """`sub/red.png` stored, `blue.png` deflated, and `link.png`, a link to the first."""
    link = zipfile.ZipInfo("link.png")
    link.create_system = 3
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(tmp_path / "images.zip", "w") as archive:
        archive.writestr("sub/red.png", image_bytes("red"))
        archive.writestr("blue.png", image_bytes("blue"), zipfile.ZIP_DEFLATED)
        archive.writestr(link, "sub/red.png")
    return tmp_path / "images.zip"


def write_field(archive_path, name: str, offset: int, value: bytes) -> None:
    """Writes a field of an entry in the directory of a zip file."""
    content = bytearray(archive_path.read_bytes())
    place = content.rindex(name.encode()) - 46 + offset
    content[place : place + len(value)] = value
    archive_path.write_bytes(content)


ROWS = [
    llava("<image>Q", "A", "sub/red.png"),
    llava("<image>Q", "A", "./sub/../blue.png"),
]


@pytest.mark.parametrize("streaming", [False, True])
def test_rows_find_their_images_in_a_zip_file(tmp_path, archive_path, processor, streaming):
    data_path = write_json(tmp_path / "rows", ROWS)
    training_data = read(
        data_path,
        processor,
        streamed=streaming,
        image_folder=str(archive_path),
    )
    colours = []
    for row in islice(training_data.train, 2):
        image = decode_image(row["images"][0])
        colours.append(image.getpixel((3, 3)))
    assert colours == [(255, 0, 0), (0, 0, 255)]


def test_samples_find_their_images_in_a_zip_file(tmp_path, archive_path):
    data_path = write_json(tmp_path / "rows", ROWS)
    samples = load_samples(str(data_path), 2, image_folder=str(archive_path)).samples
    assert len(samples) == 2


@pytest.mark.parametrize("streaming", [False, True])
def test_an_image_that_a_zip_file_lacks_stops_a_run(tmp_path, archive_path, processor, streaming):
    data_path = write_json(tmp_path / "rows", [*ROWS, llava("<image>Q", "A", "red.png")])
    with pytest.raises(ValueError, match=r"row 2 \(zip://red.png::.*: there is no such image in "):
        read(
            data_path,
            processor,
            streamed=streaming,
            image_folder=str(archive_path),
        )


def reason_of_problem(rules, name) -> str:
    problem = open_and_find_problem([rules.image(name)], rules)
    assert problem is not None
    _, reason = problem
    return reason


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("../images.zip", "leaves image_folder .*images.zip"),
        ("sub/../../blue.png", "leaves image_folder"),
        ("/etc/passwd", "leaves image_folder"),
        ("zip://blue.png::other.zip", "is an address"),
    ],
)
def test_a_name_outside_of_the_zip_file_is_refused(archive_path, name, reason):
    (archive_path.parent / "blue.png").write_bytes(image_bytes("blue"))
    image_rules = ImageRules(str(archive_path))
    with pytest.raises(ValueError, match=reason):
        image_rules.image(name)
    assert open_and_find_problem([image_rules.image("blue.png")], image_rules) is None
    assert open_and_find_problem([image_rules.image("sub/red.png")], image_rules) is None


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("none.png", "no such image in .*. Its first are: sub/red.png, blue.png, link"),
        ("sub", "there is no such image"),
        ("link.png", "it is a link"),
    ],
)
def test_a_name_of_no_image_is_a_bad_row(archive_path, name, reason):
    image_rules = ImageRules(str(archive_path))
    assert re.search(reason, reason_of_problem(image_rules, name))
    assert open_and_find_problem([image_rules.image("blue.png")], image_rules) is None
    assert open_and_find_problem([image_rules.image("sub/red.png")], image_rules) is None


@pytest.mark.parametrize(
    ("offset", "value", "reason"),
    [
        pytest.param(
            8,
            b"\x01\x00",
            "encrypted",
            id="flags",
        ),
        pytest.param(
            10,
            b"\x0c\x00",
            "not stored or deflated. Zip the images again",
            id="compression",
        ),
        pytest.param(
            24,
            b"\x01\x00\x00\x10",
            "the file has more than 256 MiB. Save it smaller",
            id="size",
        ),
        pytest.param(
            16,
            b"\x00\x00\x00\x00",
            "broken in the zip file: its checksum differs",
            id="checksum",
        ),
        pytest.param(
            42,
            b"\x00\x00\x00\x70",
            "blue.png::.*: ",
            id="place",
        ),
    ],
)
def test_an_image_that_cannot_be_read_is_a_bad_row(archive_path, offset, value, reason):
    image_rules = ImageRules(str(archive_path))
    assert open_and_find_problem([image_rules.image("blue.png")], image_rules) is None
    write_field(archive_path, "blue.png", offset, value)
    assert re.search(reason, reason_of_problem(image_rules, "blue.png"))
    assert open_and_find_problem([image_rules.image("sub/red.png")], image_rules) is None


def test_of_entries_with_one_name_the_last_is_read(tmp_path):
    archive_path = tmp_path / "images.zip"
    with warnings.catch_warnings(), zipfile.ZipFile(archive_path, "w") as archive:
        warnings.simplefilter("ignore")  # of `zipfile`, about the name
        for number in range(200):
            archive.writestr("a.png", f"old {number}")
            archive.writestr(f"{number}.png", "other")
        archive.writestr("a.png", "new")
    with zipfile.ZipFile(archive_path) as archive:
        assert archive.read("a.png") == b"new"
    assert images.read_entry(f"zip://a.png::{archive_path}") == b"new"


def test_a_header_that_lies_about_the_size_fills_no_memory(archive_path, monkeypatch):
    monkeypatch.setattr(images, "MAX_IMAGE_BYTES", 1000)
    with zipfile.ZipFile(archive_path, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("bomb.png", bytes(200_000))
    write_field(archive_path, "bomb.png", 24, b"\x09\x00\x00\x00")
    content = images.read_entry(f"zip://bomb.png::{archive_path}")
    assert len(content) == 1001  # So it is refused.


@pytest.mark.parametrize(
    ("start", "count"),
    [
        pytest.param(7, 3, id="small"),
        pytest.param(2**32 + 7, 70_000, id="large"),
    ],
)
def test_a_zip_file_may_begin_anywhere_be_large_and_name_files_in_any_way(tmp_path, start, count):
    archive_path = tmp_path / "images.zip"
    marked_names = [*(f"{number}.png" for number in range(count)), "größe.png"]
    unmarked_name = "schön.png"  # UTF-8 without the mark that says so
    with open(archive_path, "wb") as sparse_file:
        sparse_file.seek(start)
        with zipfile.ZipFile(sparse_file, "w") as archive:
            for entry_name in marked_names:
                archive.writestr(entry_name, entry_name)
            archive.writestr(unmarked_name.encode().decode("cp437"), unmarked_name)

    for entry_name in (marked_names[0], *marked_names[-2:], unmarked_name):
        content = images.read_entry(f"zip://{entry_name}::{archive_path}")
        assert content.decode() == entry_name


def empty(content):
    return b""


def only_end_of_directory(content):
    return b"PK\5\6" + b"\xff" * 18


def without_its_end(content):
    return content[:-30]


def without_its_entries(content):
    return content.replace(b"PK\1\2", b"PK\0\0")


@pytest.mark.parametrize(
    "break_content",
    [
        empty,
        only_end_of_directory,
        without_its_end,
        without_its_entries,
    ],
)
def test_a_file_that_is_not_a_zip_file_is_named_at_once(tmp_path, archive_path, break_content):
    data_path = write_json(tmp_path / "rows", [llava("<image>Q", "A", "a.png")])
    complete = archive_path.read_bytes()
    archive_path.write_bytes(break_content(complete))
    with pytest.raises(ValueError, match="images.zip cannot be read as a zip file: "):
        load_samples(str(data_path), 1, image_folder=str(archive_path))


def text_of_entry(number) -> bytes:
    return str(number).encode() * number


def read_entries_in_threads(archive_path: str) -> bool:
    """Reads 100 entries 40 times. Returns whether all have their text."""
    entries = [number % 100 for number in range(4000)]

    def read_entry(entry):
        return images.read_entry(f"zip://{entry}::{archive_path}")

    with ThreadPoolExecutor(8) as threads:
        contents = list(threads.map(read_entry, entries))
    return contents == [text_of_entry(entry) for entry in entries]


def test_threads_and_forked_processes_read_at_once(tmp_path):
    archive_path = str(tmp_path / "images.zip")
    with zipfile.ZipFile(archive_path, "w", zipfile.ZIP_DEFLATED) as archive:
        for number in range(100):
            archive.writestr(str(number), text_of_entry(number))
    images.find_entry(f"zip://7::{archive_path}")  # opened before the fork

    with ProcessPoolExecutor(3, multiprocessing.get_context("fork")) as processes:
        futures = [processes.submit(read_entries_in_threads, archive_path) for _ in range(3)]
        assert read_entries_in_threads(archive_path)
        for future in futures:
            assert future.result(60)
    assert images.open_zip(archive_path) is images.open_zip(archive_path)


@pytest.mark.parametrize("name", ["..a.png", "~/a.png", "~a.png"])
def test_names_in_a_zip_file_may_begin_with_dots_and_a_tilde(tmp_path, name):
    archive_path = tmp_path / "images.zip"
    with zipfile.ZipFile(archive_path, "w") as archive:
        archive.writestr(name, image_bytes())
    image_rules = ImageRules(str(archive_path))
    image = image_rules.image(name)
    assert image["path"] == f"zip://{name}::{archive_path}"
    assert open_and_find_problem([image], image_rules) is None


def test_a_name_that_goes_up_leaves_a_zip_file(tmp_path):
    archive_path = tmp_path / "images.zip"
    with zipfile.ZipFile(archive_path, "w") as archive:
        archive.writestr("..a.png", image_bytes())
    image_rules = ImageRules(str(archive_path))
    with pytest.raises(ValueError, match="leaves image_folder"):
        image_rules.image("../..a.png")


def test_an_address_in_another_zip_file_leaves_this_one(archive_path):
    """`datasets` writes such addresses."""
    image_rules = ImageRules(str(archive_path))
    address = f"zip://blue.png::{archive_path.parent}/other.zip"
    with pytest.raises(ValueError, match="other.zip leaves image_folder"):
        image_rules.image({"path": address, "bytes": None})


def test_an_address_inside_an_entry_is_not_the_entry(archive_path):
    image_rules = ImageRules(str(archive_path))
    image = image_rules.image({"path": "zip://x.png::blue.png", "bytes": None})
    assert open_and_find_problem([image], image_rules) is not None


def test_an_image_that_a_zip_file_lacks_is_found_without_opening_any(archive_path):
    image_rules = ImageRules(str(archive_path))
    present = image_rules.image("blue.png")
    missing = image_rules.image("none.png")
    image_path, reason = open_and_find_problem([present, missing], image_rules, decode=False)
    assert image_path == missing["path"]
    assert "there is no such image in" in reason


def test_an_entry_with_more_in_its_header_is_read(tmp_path):
    """As for sizes above 4 GiB, for which writers of streams leave room in the header."""
    archive_path = tmp_path / "images.zip"
    with zipfile.ZipFile(archive_path, "w") as archive:
        with archive.open("a.png", "w", force_zip64=True) as entry:
            entry.write(b"content")
        archive.writestr("b.png", b"other")
    assert images.read_entry(f"zip://a.png::{archive_path}") == b"content"


def test_an_empty_zip_file_has_no_image(tmp_path):
    archive_path = tmp_path / "images.zip"
    with zipfile.ZipFile(archive_path, "w"):
        pass
    with pytest.raises(ValueError, match="no such image in .*. Its first are: none"):
        images.find_entry(f"zip://a.png::{archive_path}")


def test_a_zip_file_that_is_written_anew_is_read_anew(tmp_path):
    archive_path = tmp_path / "images.zip"
    for modified_time, content in enumerate((b"one", b"two")):
        with zipfile.ZipFile(archive_path, "w") as archive:
            archive.writestr("a.png", content)
        os.utime(archive_path, (modified_time, modified_time))
        assert images.read_entry(f"zip://a.png::{archive_path}") == content


def test_an_entry_that_says_to_be_packed_into_too_much_is_refused(archive_path):
    write_field(archive_path, "blue.png", 20, b"\x01\x00\x00\x10")
    with pytest.raises(ValueError, match="more than 256 MiB"):
        images.find_entry(f"zip://blue.png::{archive_path}")


def test_a_zip_file_of_a_later_version_is_named(archive_path):
    write_field(archive_path, "blue.png", 6, b"\xff\x00")
    with pytest.raises(ValueError, match="images.zip cannot be read as a zip file: .*version"):
        images.open_zip(str(archive_path))
