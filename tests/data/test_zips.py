"""Images in a zip file are read in place, by the rules of a folder, by threads and processes."""

import multiprocessing
import os
import stat
import warnings
import zipfile
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from itertools import islice

import pytest
from train_data import image_bytes, llava, read, write_json

from normalign_llava.data.rows import zips
from normalign_llava.data.rows.images import ImageRules, decode_image, image_problem
from normalign_llava.diagnose.data import load_samples


@pytest.fixture
def archive(tmp_path):
    """`sub/red.png` stored, `blue.png` deflated, and `link.png`, a link to the first."""
    link = zipfile.ZipInfo("link.png")
    link.create_system = 3
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(tmp_path / "images.zip", "w") as file:
        file.writestr("sub/red.png", image_bytes("red"))
        file.writestr("blue.png", image_bytes("blue"), zipfile.ZIP_DEFLATED)
        file.writestr(link, "sub/red.png")
    return tmp_path / "images.zip"


def edit(archive, name: str, field: int, value: bytes) -> None:
    """Writes a field of an entry in the directory of a zip file."""
    content = bytearray(archive.read_bytes())
    place = content.rindex(name.encode()) - 46 + field
    content[place : place + len(value)] = value
    archive.write_bytes(content)


@pytest.mark.parametrize("streaming", [False, True])
def test_rows_find_their_images_in_a_zip_file(tmp_path, archive, processor, streaming):
    rows = [llava("<image>Q", "A", name) for name in ("sub/red.png", "./sub/../blue.png")]
    path = write_json(tmp_path / "rows", rows)
    options = {"streamed": streaming, "image_folder": str(archive)}
    parsed = list(islice(read(path, processor, **options).train, 2))
    colours = [decode_image(row["images"][0]).getpixel((3, 3)) for row in parsed]
    assert colours == [(255, 0, 0), (0, 0, 255)]
    assert len(load_samples(str(path), 2, image_folder=str(archive)).samples) == 2
    write_json(tmp_path / "rows", [*rows, llava("<image>Q", "A", "red.png")])
    with pytest.raises(ValueError, match=r"row 2 \(zip://red.png::.*: there is no such image in "):
        list(read(path, processor, **options).train)


@pytest.mark.parametrize(
    "name, edited, reason",
    [
        ("../images.zip", (), "leaves image_folder .*images.zip"),
        ("sub/../../blue.png", (), "leaves image_folder"),
        ("/etc/passwd", (), "leaves image_folder"),
        ("zip://blue.png::other.zip", (), "is an address"),
        ("none.png", (), "no such image in .*. Its first are: sub/red.png, blue.png, link"),
        ("sub", (), "there is no such image"),
        ("link.png", (), "it is a link"),
        ("blue.png", (8, b"\x01\x00"), "encrypted"),
        ("blue.png", (10, b"\x0c\x00"), "not stored or deflated. Zip the images again"),
        ("blue.png", (24, b"\x01\x00\x00\x10"), "the file has more than 256 MiB. Save it smaller"),
        ("blue.png", (16, b"\x00\x00\x00\x00"), "broken in the zip file: its checksum differs"),
        ("blue.png", (42, b"\x00\x00\x00\x70"), "blue.png::.*: "),
    ],
)
def test_an_image_that_may_not_or_cannot_be_read_is_a_bad_row(archive, name, edited, reason):
    (archive.parent / "blue.png").write_bytes(image_bytes("blue"))
    rules = ImageRules(str(archive))
    assert image_problem([rules.image("blue.png")], rules) is None
    if edited:
        edit(archive, name, *edited)
    with pytest.raises(ValueError, match=reason):
        raise ValueError((image_problem([rules.image(name)], rules) or ("", "nothing"))[1])
    assert image_problem([rules.image("sub/red.png")], rules) is None


def test_of_entries_with_one_name_the_last_is_read(tmp_path):
    path = tmp_path / "images.zip"
    with warnings.catch_warnings(), zipfile.ZipFile(path, "w") as file:
        warnings.simplefilter("ignore")  # of `zipfile`, about the name
        for number in range(200):
            file.writestr("a.png", f"old {number}")
            file.writestr(f"{number}.png", "other")
        file.writestr("a.png", "new")
    with zipfile.ZipFile(path) as file:
        assert file.read("a.png") == zips.read_entry(f"zip://a.png::{path}") == b"new"


def test_a_header_that_lies_about_the_size_fills_no_memory(archive, monkeypatch):
    monkeypatch.setattr(zips, "MAX_IMAGE_BYTES", 1000)
    with zipfile.ZipFile(archive, "a", zipfile.ZIP_DEFLATED) as file:
        file.writestr("bomb.png", bytes(200_000))
    edit(archive, "bomb.png", 24, b"\x09\x00\x00\x00")
    assert len(zips.read_entry(f"zip://bomb.png::{archive}")) == 1001  # and refused


@pytest.mark.parametrize(("place", "count"), [(7, 3), (2**32 + 7, 70_000)])
def test_a_zip_file_may_begin_anywhere_be_large_and_name_files_in_any_way(tmp_path, place, count):
    names = [*(f"{number}.png" for number in range(count)), "größe.png", "schön.png"]
    with open(tmp_path / "images.zip", "wb") as sparse:
        sparse.seek(place)
        with zipfile.ZipFile(sparse, "w") as file:
            for name in names[:-1]:
                file.writestr(name, name)
            file.writestr(names[-1].encode().decode("cp437"), names[-1])  # without a mark
    for name in (names[0], *names[-3:]):
        assert zips.read_entry(f"zip://{name}::{tmp_path / 'images.zip'}").decode() == name


def test_a_file_that_is_no_zip_file_is_named_at_once(tmp_path, archive):
    path = write_json(tmp_path / "rows", [llava("<image>Q", "A", "a.png")])
    whole = archive.read_bytes()
    for broken in (b"", b"PK\5\6" + b"\xff" * 18, whole[:-30], whole.replace(b"PK\1\2", b"PK\0\0")):
        archive.write_bytes(broken)
        with pytest.raises(ValueError, match="images.zip cannot be read as a zip file: "):
            load_samples(str(path), 1, image_folder=str(archive))


def read_all(file: str) -> bool:
    with ThreadPoolExecutor(8) as threads:
        texts = threads.map(lambda n: zips.read_entry(f"zip://{n % 100}::{file}"), range(4000))
    return list(texts) == [str(n % 100).encode() * (n % 100) for n in range(4000)]


def test_threads_and_forked_processes_read_at_once(tmp_path):
    file = str(tmp_path / "images.zip")
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as written:
        for n in range(100):
            written.writestr(str(n), str(n) * n)
    zips.find_entry(f"zip://7::{file}")  # opened before the fork
    with ProcessPoolExecutor(3, multiprocessing.get_context("fork")) as processes:
        results = [processes.submit(read_all, file) for _ in range(3)]
        assert read_all(file) and all(result.result(60) for result in results)
    assert zips.open_zip(file) is zips.open_zip(file)


def test_names_in_a_zip_file_may_begin_with_dots_and_a_tilde(tmp_path):
    path = tmp_path / "images.zip"
    names = ("..a.png", "~/a.png", "~a.png")
    with zipfile.ZipFile(path, "w") as file:
        for name in names:
            file.writestr(name, image_bytes())
    rules = ImageRules(str(path))
    for name in names:
        shown = rules.image(name)
        assert shown["path"] == f"zip://{name}::{path}"
        assert image_problem([shown], rules) is None
    with pytest.raises(ValueError, match="leaves image_folder"):
        rules.image("../..a.png")


def test_an_address_that_datasets_wrote_into_another_zip_file_is_none_of_this_one(archive):
    rules = ImageRules(str(archive))
    address = f"zip://blue.png::{archive.parent}/other.zip"
    with pytest.raises(ValueError, match="other.zip leaves image_folder"):
        rules.image({"path": address, "bytes": None})
    inner = rules.image({"path": "zip://x.png::blue.png", "bytes": None})  # not blue.png itself
    assert image_problem([inner], rules) is not None


def test_an_image_that_a_zip_file_lacks_is_found_without_opening_any(archive):
    rules = ImageRules(str(archive))
    images = [rules.image("blue.png"), rules.image("none.png")]
    path, reason = image_problem(images, rules, decode=False)
    assert path == images[1]["path"] and "there is no such image in" in reason


def test_an_entry_with_more_in_its_header_is_read(tmp_path):
    """As for sizes above 4 GiB, for which writers of streams leave room in the header."""
    with zipfile.ZipFile(tmp_path / "images.zip", "w") as file:
        with file.open("a.png", "w", force_zip64=True) as entry:
            entry.write(b"content")
        file.writestr("b.png", b"other")
    assert zips.read_entry(f"zip://a.png::{tmp_path / 'images.zip'}") == b"content"


def test_an_empty_zip_file_has_no_image(tmp_path):
    with zipfile.ZipFile(tmp_path / "images.zip", "w"):
        pass
    with pytest.raises(ValueError, match="no such image in .*. Its first are: none"):
        zips.find_entry(f"zip://a.png::{tmp_path / 'images.zip'}")


def test_a_zip_file_that_is_written_anew_is_read_anew(tmp_path):
    path = tmp_path / "images.zip"
    for number, content in enumerate((b"one", b"two")):
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("a.png", content)
        os.utime(path, (number, number))
        assert zips.read_entry(f"zip://a.png::{path}") == content


def test_an_entry_that_says_to_be_packed_into_too_much_is_refused(archive):
    edit(archive, "blue.png", 20, b"\x01\x00\x00\x10")
    with pytest.raises(ValueError, match="more than 256 MiB"):
        zips.find_entry(f"zip://blue.png::{archive}")


def test_a_zip_file_of_a_later_version_is_named(archive):
    edit(archive, "blue.png", 6, b"\xff\x00")
    with pytest.raises(ValueError, match="images.zip cannot be read as a zip file: .*version"):
        zips.open_zip(str(archive))
