"""Data sets in memory: what is cached of them; rows are made of their sources when read."""

import gc
import pickle
import shutil

import pytest
import tiny_parts
import train_data
import training
from datasets import Dataset
from paths import HELPERS
from torch.utils.data import DataLoader
from train_data import (
    answers,
    image_bytes,
    images,
    inside,
    llava,
    parquet_data,
    read,
    write_json,
    write_parquet,
)

from normalign_llava.assembly import chat_template
from normalign_llava.data.rows.checks import Checks
from normalign_llava.data.rows.images import ImageRules
from normalign_llava.data.rows.parse import FEATURES
from normalign_llava.data.sources import source, table
from normalign_llava.data.sources.arguments import DataSource, cores
from normalign_llava.data.sources.mixtures import prepare_rows
from normalign_llava.train.collator import ConversationCollator


COUNT = 100


@pytest.mark.parametrize(("asked", "used"), [(1, 1), (3, 3), (9, 4), (None, min(4, cores()))])
def test_files_are_read_by_as_many_processes_as_there_are_files_for(tmp_path, asked, used):
    rows = [llava("Q", f"answer {number}") for number in range(20)]
    for number in range(4):
        write_parquet(tmp_path / f"data/train-{number:05}-of-00004.parquet", rows[5 * number :][:5])
    write_parquet(tmp_path / "data/test-00000-of-00001.parquet", rows[:3])
    opened = source.open_source(DataSource(str(tmp_path)), streaming=False, num_proc=asked)
    assert len(opened.data.cache_files) == used  # each writes one
    assert [row["conversations"] for _, _, row in opened] == [row["conversations"] for row in rows]


NOISE = [training.image(number, (40, 40)) for number in range(COUNT)]  # which cannot be compressed


def with_noise() -> list[dict]:
    rows = [llava("<image>\nQ", f"answer {number}") for number in range(COUNT)]
    return [{**row, "image": {"bytes": NOISE[n], "path": f"{n}.png"}} for n, row in enumerate(rows)]


def contents(rows) -> list[bytes]:
    return [row["images"][0]["bytes"] for row in rows]


@pytest.mark.parametrize("form", ["saved", "parquet"])
def test_the_cache_holds_no_image_that_the_data_hold(form, processor, tmp_path, cache):
    if form == "saved":
        parquet_data(with_noise()).save_to_disk(str(tmp_path / "data"))
        rows = read(tmp_path / "data", processor).train
    else:
        rows = read(write_parquet(tmp_path / "data.parquet", with_noise()), processor).train
    ours = list((cache / "normalign_llava").glob("*.arrow"))
    assert len(ours) == 1 and ours[0].stat().st_size < 20_000 < COUNT * len(NOISE[0]) / 20
    assert not any(NOISE[n][50:90] in file.read_bytes() for file in ours for n in (0, 7, COUNT - 1))
    copies = [file for file in cache.rglob("*.arrow") if NOISE[7][50:90] in file.read_bytes()]
    assert len(copies) == (form == "parquet")  # in which `datasets` itself unpacks parquet
    assert contents(rows) == NOISE and rows[0].keys() == FEATURES.keys()


def test_rows_are_the_same_in_workers_and_after_pickling(processor, tmp_path):
    rows = read(write_parquet(tmp_path / "data.parquet", with_noise()), processor).train
    picked = rows.select([5, 3, 99])
    expected = list(picked)
    assert contents(expected) == [NOISE[row["row"]] for row in expected]
    assert list(pickle.loads(pickle.dumps(picked))) == expected
    assert picked[[2, 0, 1]]["row"] == [99, 5, 3]
    for workers in (0, 2):
        (batch,) = DataLoader(picked, 3, num_workers=workers, collate_fn=list)
        assert batch == expected


def test_several_processes_make_the_same_table(processor, tmp_path, monkeypatch):
    monkeypatch.setattr(table, "CHUNK", 5)
    monkeypatch.setattr(table, "cores", lambda: 2)
    rows = [llava(f"Question {number}?", "yes " * (number % 7 + 1)) for number in range(33)]
    rows[12] = llava("Q", "")
    path = write_json(tmp_path / "data", rows)

    def loaded(processes):
        data = read(path, processor, bad_rows="skip", processes=processes)
        return list(data.train), data.report

    one = loaded(3)  # few rows are checked before another process has started
    assert not list((tmp_path / "cache").rglob("*_of_*.arrow"))
    assert [row["row"] for row in one[0]] == [n for n in range(33) if n != 12]
    monkeypatch.setattr(table, "_CHUNKS_PER_PROCESS", 1)
    for asked, used in ((3, 3), (None, 2)):
        (tmp_path / "cache").rename(tmp_path / f"cache before {used}")
        assert loaded(asked) == one
        assert len(list((tmp_path / "cache").rglob(f"*_of_{used:05}.arrow"))) == used


SECOND = """
import sys

import datasets
sys.path.append(sys.argv[1])
datasets.config.HF_DATASETS_CACHE = sys.argv[2]
import train_data
print(len(train_data.read(sys.argv[3], train_data.processor()).train))
"""


@pytest.mark.slow
def test_a_second_start_reads_the_cache(prepared, processor, tmp_path, cache):
    path = write_json(tmp_path / "data", [llava(f"Q{n}?", "yes") for n in range(9)])
    assert len(read(path, processor).train) == 9
    written = {file: file.stat().st_mtime_ns for file in cache.rglob("*.arrow")}
    # That process has another seed of hashes than this one.
    process = prepared.run(["-c", SECOND, HELPERS, cache, path])
    assert process.stdout.split() == ["9"] and len(written) == 2, process.stderr
    assert {file: file.stat().st_mtime_ns for file in cache.rglob("*.arrow")} == written


def test_another_chat_template_has_its_own_lengths(tmp_path, processor):
    path = write_json(tmp_path / "data", [llava("Q", "yes"), llava("<image>Q", "no", "red.png")])
    other = train_data.processor()
    other.chat_template += "!!!"
    for used in (processor, other, processor):
        rows = read(path, used).train
        batches = [ConversationCollator(used)([row]) for row in rows]
        lengths = [len(batch["input_ids"][0]) for batch in batches]
        assert rows.with_format(None)["length"][:] == lengths
    assert read(path, processor).train["length"][:] != read(path, other).train["length"][:]


def test_a_relative_image_folder_is_that_of_the_working_directory(tmp_path, processor, monkeypatch):
    for name in ("one", "two"):
        images(tmp_path / name / "shown", "red.png")
    inside_one = str(tmp_path / "one" / "shown" / "red.png")
    path = write_json(tmp_path / "data", [llava("<image>Q", "A", inside_one)])
    monkeypatch.chdir(tmp_path / "two")
    with pytest.raises(ValueError, match="leaves image_folder shown"):
        read(path, processor, image_folder="shown")
    monkeypatch.chdir(tmp_path / "one")  # what was found in the other is not taken from the cache
    (row,) = read(path, processor, image_folder="shown").train
    assert row["images"][0]["path"] == inside_one


def test_a_transform_of_the_data_set_is_kept(processor):
    def answered(answer):
        def transform(batch):
            return {"question": batch["q"], "answer": [answer], "image": [inside("red")]}

        data = Dataset.from_dict({"q": ["Q"]}).with_transform(transform)
        return prepare_rows(data, Checks(processor))[0][0]

    rows = [answered("yes"), answered("no")]
    assert answers(rows) == ["yes", "no"]
    assert rows[1]["images"] == [{"path": None, "bytes": inside("red")["bytes"]}]


def test_rows_of_several_sources_are_read_together_and_in_their_places(processor, tmp_path):
    rows = [llava(f"Q{number}", f"{number}") for number in range(30)]
    paths = [write_json(tmp_path / name, rows[start::2]) for start, name in enumerate("ab")]
    sources = tuple(source.open_source(DataSource(str(path)), streaming=False) for path in paths)
    reader = table.RowReader(sources)
    parts = [0, 1, 1, 0, 0, 1]
    indices = [7, 14, 0, 2, 2, 3]
    read_together = reader({"part": parts, "index": indices, "row": indices})
    found = [messages[1]["content"][0]["text"] for messages in read_together["messages"]]
    assert found == [str(2 * index + part) for part, index in zip(parts, indices, strict=True)]
    one_of_each = reader({"part": [0, 1], "index": [3, 5], "row": [3, 5]})
    found = [messages[1]["content"][0]["text"] for messages in one_of_each["messages"]]
    assert found == ["6", "11"]


def test_the_opened_sample_is_read_in_few_parts(processor, tmp_path, monkeypatch):
    shown = [{**llava("<image>Q", f"{n}"), "image": inside("red")} for n in range(64)]
    path = write_parquet(tmp_path / "data.parquet", shown)
    calls = []
    rows_at = source.Source.rows_at

    def counted(self, numbers):
        calls.append(len(numbers))
        return rows_at(self, numbers)

    monkeypatch.setattr(source.Source, "rows_at", counted)
    read(path, processor, check_images=True, processes=1)
    assert sum(calls) == 2 * 64  # parsed once, and opened once
    assert len(calls) < 10


def test_another_chat_template_has_lengths_of_its_own(tmp_path):
    """Of the same rows and tokenizer, where the cache holds those of the first."""
    path = write_json(tmp_path / "data", [llava("Q", "yes"), llava("Q", "no")])
    longer = tiny_parts.CHATML.replace("<|im_start|>", "<|im_start|>12345 ")
    lengths = []
    for template in (tiny_parts.CHATML, longer):
        processor = train_data.processor(template=template)
        rows = read(path, processor).train
        lengths.append(rows["length"][:])
        for row, length in zip(rows, lengths[-1], strict=True):
            text = processor.apply_chat_template(row["messages"], tokenize=False)
            assert length == len(processor.tokenizer(text, add_special_tokens=False)["input_ids"])
    assert lengths[0] != lengths[1]


def test_a_relative_image_folder_is_another_one_in_another_working_directory(
    processor, tmp_path, monkeypatch
):
    path = write_json(tmp_path / "data", [llava("<image>Q", "yes", "own.png")])
    found = []
    for name in ("one", "two"):
        (tmp_path / name / "images").mkdir(parents=True)
        (tmp_path / name / "images" / "own.png").write_bytes(image_bytes())
        monkeypatch.chdir(tmp_path / name)
        (row,) = read(path, processor, image_folder="images").train
        (paths,) = stored_paths(tmp_path / "cache", str(tmp_path / name))
        found.append((row["images"][0]["path"], paths))
    expected = [str(tmp_path / name / "images" / "own.png") for name in ("one", "two")]
    assert found == [(path, path) for path in expected]


def stored_paths(cache, start: str) -> list[str]:
    """Paths of images in the cached tables that begin so."""
    paths = []
    for file in (cache / "normalign_llava").glob("*.arrow"):
        for row in Dataset.from_file(str(file)):
            paths += [path for path in row["paths"] if path.startswith(start + "/")]
    return paths


@pytest.mark.parametrize("enabled", [True, False])
def test_no_garbage_is_collected_while_rows_are_checked(processor, tmp_path, monkeypatch, enabled):
    seen = []
    facts = table._facts

    def watched(*args, **kwargs):
        seen.append(gc.isenabled())
        return facts(*args, **kwargs)

    monkeypatch.setattr(table, "_facts", watched)
    if not enabled:
        gc.disable()
    try:
        read(write_json(tmp_path / "data", [llava("Q?", "yes")]), processor)
        assert seen == [False] and gc.isenabled() is enabled
    finally:
        gc.enable()


def test_files_are_counted_if_there_are_several(processor, tmp_path):
    one = write_json(tmp_path / "data", [llava("Q", "A")], "a.json")
    assert read(one, processor).report.sources[0].files == {}
    other = write_json(tmp_path / "data", [llava("Q", "B"), llava("Q", "")], "b.json")
    (report,) = read(tmp_path / "data", processor, bad_rows="skip").report.sources
    assert report.files == {str(one): 1, str(other): 2}


def test_facts_of_rows_are_cached_for_all_that_they_depend_on(tmp_path, monkeypatch):
    """Of the same rows, read by other names, rules, processors and code."""
    rows = [{"image": {"path": "/a.png", "bytes": None}, "question": "yes", "answer": "yes"}]
    data = Dataset.from_list(rows)

    def facts(processor, name="mine", **rules):
        opened = source.Source(name, ImageRules(**rules), data)
        (row,) = table.all_rows(opened, 0, Checks(processor))
        return row

    made = train_data.processor(template="{{ bos_token }}" + tiny_parts.CHATML)
    first = facts(made)
    assert facts(made, name="other")["source"] == "other"
    assert first["reason"] is None and first["source"] == "mine"
    assert "leaves the cache" in facts(made, hub="user/data")["reason"]
    made.patch_size = 4  # of 16 pixels: 16 tokens in place of 4
    small = facts(made)
    assert small["length"] == first["length"] + 12
    made.tokenizer.add_tokens(["yes"])
    merged = facts(made)
    assert merged["length"] == small["length"] - 4
    made.tokenizer.bos_token = "<unk>"
    begun = facts(made)
    assert begun["length"] == merged["length"] + 1
    code = tmp_path / "rows"
    shutil.copytree(table._ROWS, code)
    (code / "turns.py").write_text((code / "turns.py").read_text() + "# changed\n")
    cached = [*(tmp_path / "cache").rglob("*.arrow")]
    monkeypatch.setattr(table, "_ROWS", code)
    assert facts(made) == begun
    assert len([*(tmp_path / "cache").rglob("*.arrow")]) == len(cached) + 1
    for number, module in enumerate((source, chat_template), 2):
        copy = tmp_path / f"{number}.py"
        shutil.copy(module.__file__, copy)
        copy.write_text(copy.read_text() + "# changed\n")
        monkeypatch.setattr(module, "__file__", str(copy))
        assert facts(made) == begun
        assert len([*(tmp_path / "cache").rglob("*.arrow")]) == len(cached) + number
    made.image_token = "yes"
    assert "has yes where no image is" in facts(made)["reason"]


def test_dropped_rows_are_told_in_their_order_whatever_is_wrong(processor, tmp_path):
    rows = [llava("Q", f"{number}") for number in range(70)]
    rows[1] = llava("Q", "")
    rows[33] = llava("<image>Q", "A", "none.png")
    rows[65] = llava("<image>Q", "A", "none.png")
    path = write_json(tmp_path / "data", rows)
    (report,) = read(path, processor, bad_rows="skip").report.sources
    assert [row.row for row in report.dropped] == [1, 33, 65]
    (report,) = read(path, processor, bad_rows=0.05).report.sources
    assert report.skippable == 0  # of 3.5 rows, 3 of which are bad


def test_a_row_that_is_bad_and_too_long_is_a_bad_one(processor, tmp_path):
    rows = [llava("Q", "A"), llava("<image>Q", "A" * 99, "none.png"), llava("Q", "A" * 99)]
    path = write_json(tmp_path / "data", rows)
    (report,) = read(path, processor, bad_rows="skip", max_length=60).report.sources
    assert (report.bad, report.too_long) == (1, 1)
    assert [(row.row, row.tokens is None) for row in report.dropped] == [(1, True), (2, False)]
    assert report.forms == {"conversations": 1} and report.left_out == {"id": 1}  # of valid rows
    with pytest.raises(ValueError, match="row 1: .*there is no such image"):
        read(path, processor, streamed=True, max_length=60)
