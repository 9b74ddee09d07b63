"""WebDataset's shards become rows, in memory and streamed; nothing outside of them is read."""

import io
import json
import tarfile
from itertools import islice

import numpy as np
import pytest
import train_data
from PIL import Image
from train_data import answers, image_bytes, llava, read

from normalign_llava.data.rows.images import decode_image
from normalign_llava.data.rows.parse import FEATURES
from normalign_llava.data.sources.arguments import DataSource
from normalign_llava.data.sources.source import open_source
from normalign_llava.diagnose.data import load_samples


def write_shard(path, files: dict, links=()):
    """Writes a tar file of `files` by name: bytes, text, or what becomes JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for file_name, content in files.items():
            if isinstance(content, (dict, list)):
                content = json.dumps(content)
            if isinstance(content, str):
                content = content.encode()
            tar_member = tarfile.TarInfo(file_name)
            tar_member.size = len(content)
            archive.addfile(tar_member, io.BytesIO(content))
        for file_name, target, link_type in links:
            tar_member = tarfile.TarInfo(file_name)
            tar_member.type = link_type
            tar_member.linkname = target
            archive.addfile(tar_member)
    return path


def read_both_ways(path, **options) -> list[dict]:
    """Returns the rows in memory; the stream has the same, and begins again when it ends."""
    processor = train_data.processor()
    in_memory = read(path, processor, **options).train
    parsed_rows = list(in_memory)

    row_stream = read(path, processor, streamed=True, **options).train
    assert list(islice(row_stream, 2 * len(parsed_rows))) == 2 * parsed_rows

    for parsed_row in parsed_rows:
        assert parsed_row.keys() == FEATURES.keys()
    columns = {}
    for column in FEATURES:
        columns[column] = [parsed_row[column] for parsed_row in parsed_rows]
    assert in_memory[list(range(len(parsed_rows)))] == columns
    return parsed_rows


FILES = {
    "a/0.JPG": image_bytes("red", form="JPEG"),
    "a/0.TXT": "A red square.\n",
    "a/1.json": llava("No image?", "None.", id=7),
    "a/2.10.jpeg": image_bytes("red", form="JPEG"),
    "a/2.2.webp": image_bytes("blue", form="WEBP"),
    "a/2.1.png": image_bytes("lime"),
    "a/2.json": '\ufeff{"question": "Q", "answer": "Old.", "image": "lost.png", "more": [1, "x"]}',
    "a/2.answer.txt": "\ufeffThree.",
    "a/2.cls": "7",
    "a/2.wav": b"x",
    "a/2.jpg.gz": b"no gzip",
    "a/3.question": "Q",
    "a/3.answer": "A",
}
ANSWERS = ["A red square.", "None.", "Three.", "A"]


def assert_rows_of_files(rows):
    """The first rows have the images of `FILES`, several in the order of their numbers."""
    image_counts = [parsed_row["image_count"] for parsed_row in rows[:4]]
    assert image_counts == [1, 0, 3, 0]

    decoded_images = []
    for parsed_row in rows:
        decoded_images += [decode_image(decoded_image) for decoded_image in parsed_row["images"]]
    image_names = ["a/0.JPG", "a/2.1.png", "a/2.2.webp", "a/2.10.jpeg"]
    for decoded_image, file_name in zip(decoded_images, image_names, strict=True):
        expected = Image.open(io.BytesIO(FILES[file_name])).convert("RGB")
        np.testing.assert_array_equal(np.asarray(decoded_image), np.asarray(expected))


def test_a_shard_has_the_rows_of_its_files(tmp_path, processor):
    shard_path = write_shard(tmp_path / "rows.tar", FILES)
    parsed_rows = read_both_ways(shard_path)
    assert answers(parsed_rows) == ANSWERS
    assert_rows_of_files(parsed_rows)

    assert len(load_samples(str(shard_path), 2).samples) == 2

    (source_report,) = read(shard_path, processor).report.sources
    assert source_report.left_out.keys() == {"id", "more", "cls", "audio", "jpg.gz"}


def test_a_folder_of_shards_has_the_rows_of_all(tmp_path, processor):
    shard_folder = tmp_path / "folder"
    shard_path = write_shard(shard_folder / "00000.tar", FILES)
    last_row = {"0.json": {"question": "Q"}, "0.answer": "last"}
    write_shard(shard_folder / "00001.tar", last_row)

    parsed_rows = read_both_ways(shard_folder)
    assert answers(parsed_rows) == [*ANSWERS, "last"]
    assert_rows_of_files(parsed_rows)

    assert len(load_samples(str(shard_path), 2).samples) == 2

    (source_report,) = read(shard_path, processor).report.sources
    assert source_report.left_out.keys() == {"id", "more", "cls", "audio", "jpg.gz"}


def test_a_text_that_is_not_utf_8_is_not_learned(tmp_path, processor):
    shard_files = {
        "0.jpg": image_bytes("red", form="JPEG"),
        "0.txt": "Caf\u00e9.".encode("latin-1"),
    }
    shard_path = write_shard(tmp_path / "a.tar", shard_files)
    with pytest.raises(ValueError, match="row 0 .*: turn 1, the assistant's, is not valid Unicode"):
        read(shard_path, processor)


def test_names_and_links_in_a_shard_reach_nothing_outside(tmp_path):
    (tmp_path / "secret.png").write_bytes(image_bytes("red"))
    (tmp_path / "secret.txt").write_text("secret")
    shard_files = {
        "../secret.json": llava("<image>Q", "A", "secret.png"),
        "b.json": llava("<image>Q", "B", "../secret.png"),
    }
    links = [
        ("b.png", str(tmp_path / "secret.png"), tarfile.SYMTYPE),
        ("b.txt", "../secret.txt", tarfile.LNKTYPE),
    ]
    shard_path = write_shard(tmp_path / "data" / "rows.tar", shard_files, links)

    for streaming in (False, True):
        opened_source = open_source(DataSource(str(shard_path)), streaming)
        raw_rows = [raw_row for _, _, raw_row in opened_source]
        assert raw_rows == list(shard_files.values())

    with pytest.raises(ValueError, match=r"row 0.*/data/secret.png: there is(.|\n)*row 1.* leaves"):
        read_both_ways(shard_path)


def test_broken_text_is_a_bad_row(tmp_path):
    shard_files = {
        "0.json": "{",
        "1.json": [1],
        "1.png": image_bytes(),
        "2.json": b"\xff",
        "3.json": llava("Q", "A"),
    }
    shard_path = write_shard(tmp_path / "rows.tar", shard_files)

    reasons = r"row 0: .* not valid JSON(.|\n)*row 1: a row must be a(.|\n)*row 2: .* not valid"
    with pytest.raises(ValueError, match=reasons):
        read_both_ways(shard_path)

    parsed_rows = read_both_ways(shard_path, bad_rows="skip")
    assert len(parsed_rows) == 1


@pytest.mark.parametrize(
    ("size", "reason"),
    [
        pytest.param(2048, "cut off", id="at-the-border-of-a-file"),
        pytest.param(2600, "cut off", id="in-a-header"),
        pytest.param(2748, "cut off", id="in-a-content"),
        pytest.param(300, "be read", id="not-a-tar-file"),
    ],
)
def test_a_shard_that_is_cut_off_is_named(tmp_path, size, reason):
    shard_files = {f"{number}.txt": "A" * 600 for number in range(3)}
    shard_path = write_shard(tmp_path / "rows.tar", shard_files)
    complete = shard_path.read_bytes()
    shard_path.write_bytes(complete[:size])
    with pytest.raises(ValueError, match=f"rows.tar.* {reason}"):
        read_both_ways(shard_path)


def test_a_file_in_a_shard_fills_no_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("normalign_llava.data.sources.source.MAX_IMAGE_BYTES", 1000)
    monkeypatch.setattr("normalign_llava.data.rows.images.MAX_IMAGE_BYTES", 1000)
    shard_files = {"0.png": bytes(10**6), "0.txt": bytes(10**6)}
    shard_path = write_shard(tmp_path / "rows.tar", shard_files)

    ((_, _, raw_row),) = open_source(DataSource(str(shard_path)), streaming=False)
    assert len(raw_row["caption"]) == 1001
    with pytest.raises(ValueError, match="the file has more than"):
        decode_image(raw_row["images"][0])
