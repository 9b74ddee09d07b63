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


def shard(path, files: dict, links=()):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, content in files.items():
            content = json.dumps(content) if isinstance(content, (dict, list)) else content
            content = content.encode() if isinstance(content, str) else content
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        for name, target, kind in links:
            member = tarfile.TarInfo(name)
            member.type = kind
            member.linkname = target
            archive.addfile(member)
    return path


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


def test_a_text_that_is_no_utf_8_is_not_learned(tmp_path, processor):
    photo = image_bytes("red", form="JPEG")
    path = shard(tmp_path / "a.tar", {"0.jpg": photo, "0.txt": "Caf\u00e9.".encode("latin-1")})
    with pytest.raises(ValueError, match="row 0 .*: turn 1, the assistant's, is not valid Unicode"):
        read(path, processor)


def both(path, **options) -> list[dict]:
    """Rows in memory, which must be those of the stream, which begins again when it ends."""
    processor = train_data.processor()
    in_memory = read(path, processor, **options).train
    rows = list(in_memory)
    stream = read(path, processor, streamed=True, **options).train
    assert list(islice(stream, 2 * len(rows))) == 2 * rows
    assert all(row.keys() == FEATURES.keys() for row in rows)
    columns = {column: [row[column] for row in rows] for column in FEATURES}
    assert in_memory[list(range(len(rows)))] == columns
    return rows


@pytest.mark.parametrize("name", ["rows.tar", "folder/00000.tar"])
def test_a_shard_has_the_rows_of_its_files(tmp_path, name):
    path = shard(tmp_path / name, FILES)
    if "/" in name:
        shard(tmp_path / "folder/00001.tar", {"0.json": {"question": "Q"}, "0.answer": "last"})
    rows = both(path.parent if "/" in name else path)
    assert answers(rows) == ["A red square.", "None.", "Three.", "A", *["last"] * ("/" in name)]
    assert [row["image_count"] for row in rows[:4]] == [1, 0, 3, 0]
    images = [decode_image(image) for row in rows for image in row["images"]]
    names = ["a/0.JPG", "a/2.1.png", "a/2.2.webp", "a/2.10.jpeg"]
    for image, name in zip(images, names, strict=True):
        expected = Image.open(io.BytesIO(FILES[name])).convert("RGB")
        np.testing.assert_array_equal(np.asarray(image), np.asarray(expected))
    assert len(load_samples(str(path), 2).samples) == 2
    (report,) = read(path, train_data.processor()).report.sources
    assert report.left_out.keys() == {"id", "more", "cls", "audio", "jpg.gz"}


def test_names_and_links_in_a_shard_reach_nothing_outside(tmp_path):
    (tmp_path / "secret.png").write_bytes(image_bytes("red"))
    (tmp_path / "secret.txt").write_text("secret")
    files = {"../secret.json": llava("<image>Q", "A", "secret.png")}
    files |= {"b.json": llava("<image>Q", "B", "../secret.png")}
    links = [("b.png", str(tmp_path / "secret.png"), tarfile.SYMTYPE)]
    links += [("b.txt", "../secret.txt", tarfile.LNKTYPE)]
    path = shard(tmp_path / "data" / "rows.tar", files, links)
    for streaming in (False, True):
        opened = open_source(DataSource(str(path)), streaming)
        assert [raw for _, _, raw in opened] == list(files.values())
    with pytest.raises(ValueError, match=r"row 0.*/data/secret.png: there is(.|\n)*row 1.* leaves"):
        both(path)


def test_broken_text_is_a_bad_row(tmp_path):
    files = {
        "0.json": "{",
        "1.json": [1],
        "1.png": image_bytes(),
        "2.json": b"\xff",
        "3.json": llava("Q", "A"),
    }
    path = shard(tmp_path / "rows.tar", files)
    reasons = r"row 0: .* not valid JSON(.|\n)*row 1: a row must be a(.|\n)*row 2: .* not valid"
    with pytest.raises(ValueError, match=reasons):
        both(path)
    assert len(both(path, bad_rows="skip")) == 1


# At the border of a file, in its header, in its content; the last is no tar file.
@pytest.mark.parametrize("cut", [2048, 2600, 2748, 300])
def test_a_shard_that_is_cut_off_is_named(tmp_path, cut):
    path = shard(tmp_path / "rows.tar", {f"{number}.txt": "A" * 600 for number in range(3)})
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ValueError, match=f"rows.tar.* {'be read' if cut == 300 else 'cut off'}"):
        both(path)


def test_a_file_in_a_shard_fills_no_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("normalign_llava.data.sources.source.MAX_IMAGE_BYTES", 1000)
    monkeypatch.setattr("normalign_llava.data.rows.images.MAX_IMAGE_BYTES", 1000)
    path = shard(tmp_path / "rows.tar", {"0.png": bytes(10**6), "0.txt": bytes(10**6)})
    ((_, _, row),) = open_source(DataSource(str(path)), streaming=False)
    assert len(row["caption"]) == 1001
    with pytest.raises(ValueError, match="the file has more than"):
        decode_image(row["images"][0])
