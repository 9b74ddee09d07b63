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


@pytest.mark.parametrize(
    ("asked", "used"),
    [
        (1, 1),
        (3, 3),
        (9, 4),
        (None, min(4, cores())),
    ],
)
def test_files_are_read_by_as_many_processes_as_there_are_files_for(tmp_path, asked, used):
    rows = [llava("Q", f"answer {number}") for number in range(20)]
    for number in range(4):
        rows_of_file = rows[5 * number : 5 * number + 5]
        write_parquet(tmp_path / f"data/train-{number:05}-of-00004.parquet", rows_of_file)
    write_parquet(tmp_path / "data/test-00000-of-00001.parquet", rows[:3])

    opened = source.open_source(
        DataSource(str(tmp_path)),
        streaming=False,
        num_proc=asked,
    )
    assert len(opened.data.cache_files) == used  # Each process writes one.
    conversations = [raw_row["conversations"] for _, _, raw_row in opened]
    assert conversations == [row["conversations"] for row in rows]


COUNT = 100
# Noise cannot be compressed.
NOISE = [training.image(number, (40, 40)) for number in range(COUNT)]


def rows_with_noise() -> list[dict]:
    rows = []
    for number in range(COUNT):
        image = {"bytes": NOISE[number], "path": f"{number}.png"}
        rows.append({**llava("<image>\nQ", f"answer {number}"), "image": image})
    return rows


def contents(rows) -> list[bytes]:
    return [row["images"][0]["bytes"] for row in rows]


def part_of_noise(number) -> bytes:
    return NOISE[number][50:90]


def cached_tables(cache) -> list:
    return list(cache.rglob("*.arrow"))


@pytest.mark.parametrize(
    ("data_format", "copy_count"),
    [
        ("saved", 0),
        ("parquet", 1),  # `datasets` itself unpacks parquet.
    ],
)
def test_the_cache_holds_no_image_that_the_data_hold(
    processor, tmp_path, cache, data_format, copy_count
):
    if data_format == "saved":
        data_path = tmp_path / "data"
        parquet_data(rows_with_noise()).save_to_disk(str(data_path))
    else:
        data_path = write_parquet(tmp_path / "data.parquet", rows_with_noise())
    rows = read(data_path, processor).train

    (own_table,) = (cache / "normalign_llava").glob("*.arrow")
    table_size = own_table.stat().st_size
    assert table_size < 20_000
    assert COUNT * len(NOISE[0]) / 20 > 20_000
    for number in (0, 7, COUNT - 1):
        assert part_of_noise(number) not in own_table.read_bytes()

    copies = [path for path in cached_tables(cache) if part_of_noise(7) in path.read_bytes()]
    assert len(copies) == copy_count
    assert contents(rows) == NOISE
    assert rows[0].keys() == FEATURES.keys()


@pytest.fixture
def picked_rows(processor, tmp_path):
    """Rows 5, 3 and 99 of those with noise."""
    rows = read(write_parquet(tmp_path / "data.parquet", rows_with_noise()), processor).train
    return rows.select([5, 3, 99])


def test_selected_rows_have_their_images(picked_rows):
    assert contents(picked_rows) == [NOISE[5], NOISE[3], NOISE[99]]
    reordered = picked_rows[[2, 0, 1]]
    assert reordered["row"] == [99, 5, 3]


def test_rows_are_the_same_after_pickling(picked_rows):
    unpickled = pickle.loads(pickle.dumps(picked_rows))
    assert list(unpickled) == list(picked_rows)


@pytest.mark.parametrize("workers", [0, 2])
def test_rows_are_the_same_in_workers(picked_rows, workers):
    (batch,) = DataLoader(
        picked_rows,
        3,
        num_workers=workers,
        collate_fn=list,
    )
    assert batch == list(picked_rows)


def test_several_processes_make_the_same_table(processor, tmp_path, monkeypatch):
    monkeypatch.setattr(table, "CHUNK", 5)
    monkeypatch.setattr(table, "cores", lambda: 2)
    rows = [llava(f"Question {number}?", "yes " * (number % 7 + 1)) for number in range(33)]
    rows[12] = llava("Q", "")
    data_path = write_json(tmp_path / "data", rows)
    cache = tmp_path / "cache"

    def load(processes):
        data = read(
            data_path,
            processor,
            bad_rows="skip",
            processes=processes,
        )
        return list(data.train), data.report

    # So few rows are checked before another process has started.
    train_rows, report = load(processes=3)
    assert not list(cache.rglob("*_of_*.arrow"))
    numbers = [row["row"] for row in train_rows]
    assert numbers == [*range(12), *range(13, 33)]  # without the bad row

    monkeypatch.setattr(table, "_CHUNKS_PER_PROCESS", 1)
    for asked, used in ((3, 3), (None, 2)):
        cache.rename(tmp_path / f"cache before {used}")
        assert load(asked) == (train_rows, report)
        assert len(list(cache.rglob(f"*_of_{used:05}.arrow"))) == used


SECOND_START = """
import sys

import datasets
sys.path.append(sys.argv[1])
datasets.config.HF_DATASETS_CACHE = sys.argv[2]
import train_data
print(len(train_data.read(sys.argv[3], train_data.processor()).train))
"""


def written_times(cache) -> dict:
    return {path: path.stat().st_mtime_ns for path in cached_tables(cache)}


@pytest.mark.slow
def test_a_second_start_reads_the_cache(prepared, processor, tmp_path, cache):
    rows = [llava(f"Q{number}?", "yes") for number in range(9)]
    data_path = write_json(tmp_path / "data", rows)
    assert len(read(data_path, processor).train) == 9
    expected = written_times(cache)
    assert len(expected) == 2

    # That process has another seed of hashes than this one.
    process = prepared.run(["-c", SECOND_START, HELPERS, cache, data_path])
    assert process.stdout.split() == ["9"], process.stderr
    assert written_times(cache) == expected


def test_another_chat_template_has_its_own_lengths(tmp_path, processor):
    rows = [llava("Q", "yes"), llava("<image>Q", "no", "red.png")]
    data_path = write_json(tmp_path / "data", rows)
    other_processor = train_data.processor()
    other_processor.chat_template += "!!!"

    for used_processor in (processor, other_processor, processor):
        train_rows = read(data_path, used_processor).train
        collator = ConversationCollator(used_processor)
        expected = []
        for row in train_rows:
            batch = collator([row])
            expected.append(len(batch["input_ids"][0]))
        assert train_rows.with_format(None)["length"][:] == expected

    lengths = read(data_path, processor).train["length"][:]
    other_lengths = read(data_path, other_processor).train["length"][:]
    assert lengths != other_lengths


def test_another_chat_template_of_the_same_tokenizer_has_its_own_lengths(tmp_path):
    """The cache holds the lengths of the first."""
    data_path = write_json(tmp_path / "data", [llava("Q", "yes"), llava("Q", "no")])
    longer_template = tiny_parts.CHATML.replace("<|im_start|>", "<|im_start|>12345 ")
    lengths_by_template = []
    for template in (tiny_parts.CHATML, longer_template):
        processor = train_data.processor(template=template)
        train_rows = read(data_path, processor).train
        lengths = train_rows["length"][:]
        for row, length in zip(train_rows, lengths, strict=True):
            text = processor.apply_chat_template(row["messages"], tokenize=False)
            tokens = processor.tokenizer(text, add_special_tokens=False)["input_ids"]
            assert length == len(tokens)
        lengths_by_template.append(lengths)
    assert lengths_by_template[0] != lengths_by_template[1]


def test_a_relative_image_folder_is_in_the_working_directory(tmp_path, processor, monkeypatch):
    for name in ("one", "two"):
        images(tmp_path / name / "shown", "red.png")
    image_path = str(tmp_path / "one" / "shown" / "red.png")
    data_path = write_json(tmp_path / "data", [llava("<image>Q", "A", image_path)])

    monkeypatch.chdir(tmp_path / "two")
    with pytest.raises(ValueError, match="leaves image_folder shown"):
        read(data_path, processor, image_folder="shown")

    # What was found in the other is not taken from the cache.
    monkeypatch.chdir(tmp_path / "one")
    (row,) = read(data_path, processor, image_folder="shown").train
    assert row["images"][0]["path"] == image_path


def stored_paths(cache, folder) -> list[str]:
    """Returns the paths of images in the cached tables that are in the folder."""
    image_paths = []
    for table_path in (cache / "normalign_llava").glob("*.arrow"):
        for row in Dataset.from_file(str(table_path)):
            image_paths += row["paths"]
    return [image_path for image_path in image_paths if image_path.startswith(f"{folder}/")]


def test_a_relative_image_folder_is_another_one_in_another_working_directory(
    processor, tmp_path, monkeypatch
):
    data_path = write_json(tmp_path / "data", [llava("<image>Q", "yes", "own.png")])
    for name in ("one", "two"):
        work_folder = tmp_path / name
        image_path = work_folder / "images" / "own.png"
        image_path.parent.mkdir(parents=True)
        image_path.write_bytes(image_bytes())
        monkeypatch.chdir(work_folder)

        (row,) = read(data_path, processor, image_folder="images").train
        assert row["images"][0]["path"] == str(image_path)
        assert stored_paths(tmp_path / "cache", work_folder) == [str(image_path)]


def test_a_transform_of_the_data_set_is_kept(processor):
    def prepare_with_answer(answer):
        def transform(batch):
            return {
                "question": batch["q"],
                "answer": [answer],
                "image": [inside("red")],
            }

        data = Dataset.from_dict({"q": ["Q"]}).with_transform(transform)
        prepared_rows, _ = prepare_rows(data, Checks(processor))
        return prepared_rows[0]

    rows = [prepare_with_answer("yes"), prepare_with_answer("no")]
    assert answers(rows) == ["yes", "no"]
    assert rows[1]["images"] == [{"path": None, "bytes": inside("red")["bytes"]}]


def test_rows_of_several_sources_are_read_together_and_in_their_places(tmp_path):
    rows = [llava(f"Q{number}", f"{number}") for number in range(30)]
    even_path = write_json(tmp_path / "even", rows[0::2])
    odd_path = write_json(tmp_path / "odd", rows[1::2])
    even = source.open_source(DataSource(str(even_path)), streaming=False)
    odd = source.open_source(DataSource(str(odd_path)), streaming=False)
    reader = table.RowReader((even, odd))

    def read_answers(parts, indices):
        batch = reader(
            {
                "part": parts,
                "index": indices,
                "row": indices,
            }
        )
        return [messages[1]["content"][0]["text"] for messages in batch["messages"]]

    several_of_each = read_answers(parts=[0, 1, 1, 0, 0, 1], indices=[7, 14, 0, 2, 2, 3])
    assert several_of_each == ["14", "29", "1", "4", "4", "7"]

    one_of_each = read_answers(parts=[0, 1], indices=[3, 5])
    assert one_of_each == ["6", "11"]


def test_the_opened_sample_is_read_in_few_parts(processor, tmp_path, monkeypatch):
    rows = [{**llava("<image>Q", f"{number}"), "image": inside("red")} for number in range(64)]
    data_path = write_parquet(tmp_path / "data.parquet", rows)
    part_sizes = []
    rows_at = source.Source.rows_at

    def recording_rows_at(self, numbers):
        part_sizes.append(len(numbers))
        return rows_at(self, numbers)

    monkeypatch.setattr(source.Source, "rows_at", recording_rows_at)
    read(
        data_path,
        processor,
        check_images=True,
        processes=1,
    )
    assert sum(part_sizes) == 2 * 64  # parsed once, and opened once
    assert len(part_sizes) < 10


@pytest.mark.parametrize("enabled", [True, False])
def test_no_garbage_is_collected_while_rows_are_checked(processor, tmp_path, monkeypatch, enabled):
    enabled_meanwhile = []
    facts = table._facts

    def recording_facts(*arguments, **options):
        enabled_meanwhile.append(gc.isenabled())
        return facts(*arguments, **options)

    monkeypatch.setattr(table, "_facts", recording_facts)
    data_path = write_json(tmp_path / "data", [llava("Q?", "yes")])
    if not enabled:
        gc.disable()
    try:
        read(data_path, processor)
        assert enabled_meanwhile == [False]
        assert gc.isenabled() is enabled
    finally:
        gc.enable()


def test_files_are_counted_if_there_are_several(processor, tmp_path):
    folder = tmp_path / "data"
    first_path = write_json(folder, [llava("Q", "A")], "a.json")
    (report,) = read(first_path, processor).report.sources
    assert report.files == {}

    second_rows = [llava("Q", "B"), llava("Q", "")]
    second_path = write_json(folder, second_rows, "b.json")
    (report,) = read(folder, processor, bad_rows="skip").report.sources
    assert report.files == {str(first_path): 1, str(second_path): 2}


@pytest.fixture
def facts():
    """Returns facts of a row with an image and the word `yes` twice, from the cache if there."""
    sample_row = {
        "image": {"path": "/a.png", "bytes": None},
        "question": "yes",
        "answer": "yes",
    }
    data = Dataset.from_list([sample_row])

    def facts_of_row(processor, name="mine", **rules):
        opened = source.Source(name, ImageRules(**rules), data)
        (row_facts,) = table.all_rows(opened, 0, Checks(processor))
        return row_facts

    return facts_of_row


def test_facts_are_cached_for_each_name_and_rule_of_images(facts, processor):
    first = facts(processor)
    assert first["reason"] is None
    assert first["source"] == "mine"
    assert facts(processor, name="other")["source"] == "other"
    assert "leaves the cache" in facts(processor, hub="user/data")["reason"]


def test_facts_are_cached_for_each_state_of_the_processor(facts):
    processor = train_data.processor(template="{{ bos_token }}" + tiny_parts.CHATML)
    first_length = facts(processor)["length"]

    processor.patch_size = 4  # of 16 pixels: 16 tokens in place of 4
    length_of_small_patches = facts(processor)["length"]
    assert length_of_small_patches == first_length + 12

    processor.tokenizer.add_tokens(["yes"])
    length_of_merged_words = facts(processor)["length"]
    assert length_of_merged_words == length_of_small_patches - 4

    processor.tokenizer.bos_token = "<unk>"
    length_with_beginning = facts(processor)["length"]
    assert length_with_beginning == length_of_merged_words + 1

    processor.image_token = "yes"
    assert "has yes where no image is" in facts(processor)["reason"]


def append_comment(code_path):
    code_path.write_text(code_path.read_text() + "# changed\n")


def test_facts_are_cached_for_each_state_of_the_folder_of_row_code(
    facts, processor, tmp_path, cache, monkeypatch
):
    expected = facts(processor)
    cached_count = len(cached_tables(cache))

    code_folder = shutil.copytree(table._ROWS, tmp_path / "rows")
    append_comment(code_folder / "turns.py")
    monkeypatch.setattr(table, "_ROWS", code_folder)
    assert facts(processor) == expected
    assert len(cached_tables(cache)) == cached_count + 1


@pytest.mark.parametrize("module", [source, chat_template])
def test_facts_are_cached_for_each_state_of_a_module(
    facts, processor, tmp_path, cache, monkeypatch, module
):
    expected = facts(processor)
    cached_count = len(cached_tables(cache))

    changed_code = shutil.copy(module.__file__, tmp_path / "changed.py")
    append_comment(changed_code)
    monkeypatch.setattr(module, "__file__", str(changed_code))
    assert facts(processor) == expected
    assert len(cached_tables(cache)) == cached_count + 1


def test_dropped_rows_are_reported_in_their_order_whatever_is_wrong(processor, tmp_path):
    rows = [llava("Q", f"{number}") for number in range(70)]
    rows[1] = llava("Q", "")
    rows[33] = llava("<image>Q", "A", "none.png")
    rows[65] = llava("<image>Q", "A", "none.png")
    data_path = write_json(tmp_path / "data", rows)

    (report,) = read(data_path, processor, bad_rows="skip").report.sources
    assert [dropped.row for dropped in report.dropped] == [1, 33, 65]

    # Of 70 rows, 3.5 may be bad, and 3 are.
    (report,) = read(data_path, processor, bad_rows=0.05).report.sources
    assert report.skippable == 0


@pytest.fixture
def too_long_and_bad(tmp_path):
    """Three rows: a valid one, one that is bad and too long, and one that is only too long."""
    rows = [
        llava("Q", "A"),
        llava("<image>Q", "A" * 99, "none.png"),
        llava("Q", "A" * 99),
    ]
    return write_json(tmp_path / "data", rows)


@pytest.fixture
def report_of_bad_and_long(processor, too_long_and_bad):
    data = read(too_long_and_bad, processor, bad_rows="skip", max_length=60)
    (report,) = data.report.sources
    return report


def test_a_row_that_is_bad_and_too_long_is_a_bad_one(report_of_bad_and_long):
    report = report_of_bad_and_long
    assert report.bad == 1
    assert report.too_long == 1

    bad_row, long_row = report.dropped
    assert bad_row.row == 1
    assert bad_row.tokens is None
    assert long_row.row == 2
    assert long_row.tokens is not None


def test_forms_and_columns_of_only_the_valid_rows_are_reported(report_of_bad_and_long):
    assert report_of_bad_and_long.forms == {"conversations": 1}
    assert report_of_bad_and_long.left_out == {"id": 1}


def test_a_row_of_a_stream_that_is_bad_and_too_long_stops_a_run(processor, too_long_and_bad):
    with pytest.raises(ValueError, match="row 1: .*there is no such image"):
        read(
            too_long_and_bad,
            processor,
            streamed=True,
            max_length=60,
        )
