"""Data sets in memory and streamed: the same parsed rows, checked, measured, mixed, held out."""

import json
import re
from collections import Counter
from itertools import islice

import numpy as np
import pytest
import train_data
from test_shards import read_both_ways, write_shard
from train_data import answers, images, inside, llava, mixed_rows, read, write_json

from normalign_llava.data.rows import checks
from normalign_llava.data.rows.parse import DroppedRows
from normalign_llava.data.sources import mixtures, table
from normalign_llava.data.sources.arguments import DataSource
from normalign_llava.data.sources.mixtures import prepare_rows
from normalign_llava.train.collator import ConversationCollator


pytestmark = pytest.mark.slow


@pytest.fixture
def load(processor):
    def load_with_processor(path=None, **options):
        return read(path, processor, **options)

    return load_with_processor


@pytest.fixture
def dropped_rows(tmp_path):
    return DroppedRows(tmp_path / "dropped_rows.jsonl")


MIXED = ["green", "Hello!", "blue", "blue", "One two three four five six seven."]


@pytest.mark.parametrize("given", ["llava/data.JSONL", "llava"])
def test_llava_json_may_have_ids_of_several_types_and_rows_without_images(tmp_path, given):
    data_path = write_json(tmp_path / "llava", mixed_rows(), "data.JSONL")
    parsed_rows = read_both_ways(tmp_path / given)

    assert answers(parsed_rows) == MIXED
    assert [row["image_count"] for row in parsed_rows] == [1, 0, 2, 1, 0]
    assert [row["source"] for row in parsed_rows] == [str(data_path)] * 5
    assert [row["row"] for row in parsed_rows] == [0, 1, 2, 3, 4]
    expected_image = {"path": str(tmp_path / "llava/sub/blue.png"), "bytes": None}
    assert parsed_rows[3]["images"] == [expected_image]


def test_a_file_named_test_is_held_out(load, tmp_path):
    data_path = write_json(tmp_path / "llava", mixed_rows(), "data.JSONL")
    write_json(data_path.parent, mixed_rows()[:1], "llava_test.jsonl")
    training_data = load(data_path.parent, with_eval=True)
    assert answers(training_data.train) == MIXED
    assert answers(training_data.eval) == MIXED[:1]


def test_a_named_file_is_held_out_whole(load, tmp_path):
    data_path = write_json(tmp_path / "llava", mixed_rows(), "data.JSONL")
    eval_path = write_json(data_path.parent, mixed_rows()[:1], "llava_test.jsonl")
    held_out = {"with_eval": True, "eval_dataset_name": str(eval_path)}

    trained_on_itself = load(eval_path, **held_out)
    assert answers(trained_on_itself.eval) == MIXED[:1]

    # test_split_size then holds nothing out of training.
    training_data = load(data_path, **held_out, test_split_size=0.4)
    assert answers(training_data.train) == MIXED
    assert answers(training_data.eval) == MIXED[:1]


def test_an_image_inside_is_not_taken_from_a_file_of_its_name(tmp_path, monkeypatch):
    red_row = {**llava("<image>\nQ", "one"), "image": inside("red")}
    data_path = train_data.write_parquet(tmp_path / "data.parquet", [red_row])
    work_folder = tmp_path / "work"
    images(work_folder)
    (work_folder / "red.png").write_bytes(train_data.image_bytes("lime"))
    monkeypatch.chdir(work_folder)

    (parsed_row,) = read_both_ways(data_path)
    assert parsed_row["images"][0]["bytes"] == inside("red")["bytes"]


def test_lengths_are_those_of_the_collator(load, tmp_path, processor):
    data_path = write_json(tmp_path, mixed_rows())
    train_rows = load(data_path).train
    assert len(train_rows) == 5
    batch = ConversationCollator(processor)(list(train_rows))
    expected_lengths = batch["attention_mask"].sum(1).tolist()
    assert train_rows["length"][:] == expected_lengths


def test_rows_that_are_too_long_are_dropped_and_none_is_truncated(load, tmp_path):
    data_path = write_json(tmp_path, mixed_rows())
    # Two rows are at or above it, one of them exactly.
    max_length = sorted(load(data_path).train["length"][:])[3]
    training_data = load(data_path, max_length=max_length)
    (source_report,) = training_data.report.sources

    assert source_report.found == 5
    assert source_report.bad == 0
    assert source_report.too_long == 1
    assert source_report.valid == 4
    assert source_report.used == 4
    assert source_report.images == 2
    assert source_report.text_only == 2
    assert source_report.longest == max_length
    lengths = training_data.train["length"][:]
    assert source_report.shortest == min(lengths)
    assert source_report.median == np.median(lengths)

    (dropped,) = source_report.dropped
    assert dropped.row == 2
    assert dropped.file == "red.png"
    assert dropped.tokens == 75
    assert len(read_both_ways(data_path, max_length=max_length)) == 4


def test_a_run_stops_if_all_rows_are_too_long(load, tmp_path):
    data_path = write_json(tmp_path, mixed_rows())
    with pytest.raises(ValueError, match="no row is left. 5 rows, 0 bad, 5 longer than max_length"):
        load(data_path, max_length=10)


def test_a_row_that_the_template_refuses_is_bad(tmp_path):
    strict = "{% if messages|length > 2 %}{{ raise_exception('too much talk') }}{% endif %}"
    content = "message['content']"
    last_text = train_data.tiny_parts.CHATML.replace(content, f"{content}[-1]['text']|string")
    processor = train_data.processor()
    processor.chat_template = strict + last_text

    data_path = write_json(tmp_path, mixed_rows())
    reasons = r"row 0 .*prints 0 image tokens for 1 images \(2 rows\)(.|\n)*row 2 .*too much talk"
    with pytest.raises(ValueError, match=reasons):
        read(data_path, processor)


def test_a_template_that_prints_an_image_of_its_own_is_refused(tmp_path):
    processor = train_data.processor()
    processor.chat_template = f"{processor.image_token}{processor.chat_template}"
    data_path = write_json(tmp_path, mixed_rows())
    reason = r"row 0 .*prints 2 image tokens for 1 images \(all 5 rows\)"
    with pytest.raises(ValueError, match=reason):
        read(data_path, processor)


REASONS = {
    1: "1 <image>",
    2: "none.png: there is no such image",
    3: r"\.\./outside.png leaves",
    8: "link.png: the image is a link that leaves",
    9: "the answer in turn 1 is empty",
}


def test_bad_rows_stop_a_run_with_row_file_and_reason(load, tmp_path):
    data_path = train_data.bad_rows(tmp_path / "data")
    listed = [f"json, row {number}.*: .*{reason}" for number, reason in REASONS.items()]
    message = r"(.|\n)*".join([*listed, "--bad_rows skip"])
    with pytest.raises(ValueError, match=message):
        load(data_path)


def test_bad_rows_are_skipped_and_counted(load, tmp_path):
    data_path = train_data.bad_rows(tmp_path / "data")
    (source_report,) = load(data_path, bad_rows="skip", max_length=60).report.sources
    assert source_report.found == 10
    assert source_report.bad == 5
    assert source_report.too_long == 2
    assert source_report.valid == 3
    assert [dropped.row for dropped in source_report.dropped] == [*REASONS, 5, 7]
    assert source_report.dropped[1].file == str(tmp_path / "data" / "none.png")


def test_a_skipped_row_is_recorded_once_however_often_it_is_read(load, tmp_path, dropped_rows):
    data_path = train_data.bad_rows(tmp_path / "data")
    load_options = {
        "bad_rows": "skip",
        "dropped_rows": dropped_rows,
        "max_length": 60,
    }
    parsed_rows = read_both_ways(data_path, **load_options)
    assert answers(parsed_rows) == MIXED[:3]
    assert [row["row"] for row in parsed_rows] == [0, 4, 6]

    train_stream = load(data_path, streamed=True, **load_options)
    into_a_third_pass = list(islice(train_stream.train, 7))
    assert len(into_a_third_pass) == 7
    assert train_stream.report.sources[0].found is None

    (source_report,) = load(data_path, bad_rows="skip", max_length=60).report.sources
    expected = sorted(source_report.dropped, key=lambda dropped: dropped.row)
    assert dropped_rows.read() == expected


def test_a_fixed_file_is_read_although_rows_are_cached(load, tmp_path):
    data_path = write_json(tmp_path, mixed_rows())
    (tmp_path / "green.png").unlink()
    with pytest.raises(ValueError, match="row 0: .*green.png: there is no such image"):
        load(data_path)

    images(tmp_path, "green.png")
    assert len(load(data_path).train) == 5

    write_json(tmp_path, mixed_rows()[:2])
    assert len(load(data_path).train) == 2

    of_the_same_size = data_path.read_text().replace('"green"', '"brown"')
    data_path.write_text(of_the_same_size)
    assert answers(load(data_path).train) == ["brown", "Hello!"]


TRUNCATED = train_data.image_bytes("blue", (64, 64))[:70]


def write_with_broken_images(
    folder,
    data_format,
    row_count,
    broken_rows,
    broken=TRUNCATED,
):
    """Writes data in which the images of `broken_rows` cannot be decoded."""
    raw_rows = []
    contents = []
    for number in range(row_count):
        raw_rows.append(llava("<image>Q", f"{number}", f"{number}.jpg"))
        if number in broken_rows:
            contents.append(broken)
        else:
            contents.append(train_data.image_bytes())

    if data_format == "shard":
        files = {}
        for number in range(row_count):
            files[f"{number}.json"] = raw_rows[number]
            files[f"{number}.jpg"] = contents[number]
        return write_shard(folder / "a.tar", files)

    if data_format == "parquet":
        for row, content in zip(raw_rows, contents, strict=True):
            row["image"] = {"bytes": content, "path": None}
        return train_data.write_parquet(folder / "data.parquet", raw_rows)

    folder.mkdir()
    for number, content in enumerate(contents):
        (folder / f"{number}.jpg").write_bytes(content)
    return write_json(folder, raw_rows)


@pytest.mark.parametrize("data_format", ["json", "shard", "parquet"])
def test_images_that_cannot_be_decoded_are_skipped_within_the_share(load, tmp_path, data_format):
    data_path = write_with_broken_images(tmp_path / "one", data_format, 20, {7})
    training_data = load(data_path, bad_rows=0.1)
    (source_report,) = training_data.report.sources
    assert [dropped.row for dropped in source_report.dropped] == [7]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("data_format", ["json", "shard", "parquet"])
@pytest.mark.parametrize(
    ("row_count", "broken_rows", "broken", "bad_rows", "reason"),
    [
        pytest.param(20, {7}, TRUNCATED, None, "row 7.*: .* truncated", id="one"),
        pytest.param(
            20,
            {7, 8, 9},
            TRUNCATED,
            0.1,
            r"row 7.*: .* truncated.* \(3 rows\)\n"
            "These are 3 of 20 rows; a share of 0.1 may be bad",
            id="more-than-the-share",
        ),
        pytest.param(
            8,
            set(range(8)),
            b"<html>404</html>",
            "skip",
            r"cannot identify .* \(all 8 rows\)",
            id="all",
        ),
    ],
)
def test_images_that_cannot_be_decoded_stop_a_run_before_it_begins(
    load, tmp_path, data_format, streaming, row_count, broken_rows, broken, bad_rows, reason
):
    folder = tmp_path / "broken"
    data_path = write_with_broken_images(folder, data_format, row_count, broken_rows, broken)
    with pytest.raises(ValueError, match=reason):
        load(data_path, bad_rows=bad_rows, dataset_streaming=streaming)


def opened_rows(row_count, sample_size) -> list[int]:
    """Returns which rows' images are opened where a sample is."""
    generator = np.random.default_rng(0)
    return generator.choice(row_count, sample_size, replace=False).tolist()


def other_rows(row_count, opened) -> list[int]:
    return sorted(set(range(row_count)) - set(opened))


@pytest.fixture
def sample_of_100(monkeypatch):
    """Of more than 100 images, 100 are opened. Returns those of 300 rows."""
    for module in (checks, table):
        monkeypatch.setattr(module, "MANY_ROWS", 100)
    return opened_rows(300, 100)


@pytest.mark.parametrize(
    ("check_images", "bad_count"),
    [
        pytest.param(False, 1, id="a-sample"),
        pytest.param(True, 10, id="all-as-asked"),
    ],
)
def test_files_outside_the_sample_are_looked_for_and_opened_if_asked(
    load, tmp_path, sample_of_100, check_images, bad_count
):
    broken_rows = other_rows(300, sample_of_100)[:10]
    data_path = write_with_broken_images(tmp_path / "unseen", "json", 300, broken_rows)
    (data_path.parent / f"{min(broken_rows)}.jpg").unlink()

    (source_report,) = load(data_path, bad_rows=0.05, check_images=check_images).report.sources
    assert source_report.bad == bad_count
    assert source_report.skippable == 15 - bad_count


def write_with_3_broken_in_the_sample(folder, sample):
    """Writes 300 rows, of which 13 are broken, 3 of them in the sample."""
    broken_rows = {*other_rows(300, sample)[:10], *sample[:3]}
    return write_with_broken_images(folder / "seen", "json", 300, broken_rows)


@pytest.mark.parametrize(
    ("share", "bad_count", "skippable_count"),
    [
        pytest.param(0.12, 3, 33, id="the-sample-shows-that-few-are-bad"),
        # 3 are drawn where the mean may be 10.4.
        pytest.param(0.06, 13, 5, id="all-are-opened-since-many-may-be-bad"),
    ],
)
def test_a_sample_is_opened_or_all_if_many_may_be_bad(
    load, tmp_path, sample_of_100, share, bad_count, skippable_count
):
    data_path = write_with_3_broken_in_the_sample(tmp_path, sample_of_100)
    (source_report,) = load(data_path, bad_rows=share).report.sources
    assert source_report.bad == bad_count
    assert source_report.skippable == skippable_count


@pytest.mark.parametrize("share", ["stop", 0.04])
def test_all_images_are_opened_before_a_run_stops(load, tmp_path, sample_of_100, share):
    data_path = write_with_3_broken_in_the_sample(tmp_path, sample_of_100)
    with pytest.raises(ValueError, match=r"truncated.* \(13 rows\)"):
        load(data_path, bad_rows=share)


def test_files_are_looked_for_of_the_rows_whose_images_are_not_opened(load, tmp_path, monkeypatch):
    """4 of 12 are opened, and the files of the others are looked for 5 rows at a time."""
    monkeypatch.setattr(table, "MANY_ROWS", 4)
    monkeypatch.setattr(checks, "_LISTED", 5)
    not_opened = other_rows(12, opened_rows(12, 4))
    data_path = write_with_broken_images(tmp_path / "data", "json", 12, not_opened)
    missing = not_opened[::2]
    for number in missing:
        (data_path.parent / f"{number}.jpg").unlink()

    (source_report,) = load(data_path, bad_rows="skip").report.sources
    assert [dropped.row for dropped in source_report.dropped] == missing

    # All are opened, since none may be bad.
    with pytest.raises(ValueError, match=f"row {not_opened[1]}: .* truncated"):
        load(data_path)


def test_a_stream_may_have_a_share_of_bad_rows_as_if_it_had_10_000(load, tmp_path):
    broken_rows = set(range(0, 120, 10))
    data_path = write_with_broken_images(tmp_path / "some", "json", 120, broken_rows)
    training_data = load(
        data_path,
        with_eval=True,
        eval_dataset_name=str(data_path),
        bad_rows=0.05,
        streamed=True,
    )
    assert [source_report.skippable for source_report in training_data.report.sources] == [500, 500]


@pytest.mark.parametrize("part", ["trained", "held-out"])
def test_the_first_rows_of_a_stream_must_keep_the_share(load, tmp_path, part):
    many_path = write_with_broken_images(tmp_path / "many", "json", 120, set(range(60)))
    if part == "trained":
        train_path = many_path
        held_out = {}
    else:
        broken_rows = set(range(0, 120, 10))
        train_path = write_with_broken_images(tmp_path / "some", "json", 120, broken_rows)
        held_out = {"with_eval": True, "eval_dataset_name": str(many_path)}
    with pytest.raises(ValueError, match=r"row 0: .*\(60 rows\)\nThese are 60 of 100 rows"):
        load(
            train_path,
            bad_rows=0.05,
            streamed=True,
            **held_out,
        )


def test_a_late_image_of_a_stream_is_opened_when_it_is_used(load, tmp_path):
    data_path = write_with_broken_images(tmp_path / "late", "json", 103, {102})
    train_stream = load(data_path, streamed=True).train
    assert answers(islice(train_stream, 103))[-1] == "102"


def test_all_rows_of_a_stream_must_keep_the_share_when_it_ends(load, tmp_path):
    raw_rows = [llava("Q", f"{number}") for number in range(120)]
    for number in (110, 115):
        raw_rows[number] = llava("Q", "")
    data_path = write_json(tmp_path, raw_rows)
    train_stream = iter(load(data_path, bad_rows=0.01, streamed=True).train)

    # Of 10,000 rows, two might be bad.
    assert answers(islice(train_stream, 117))[-1] == "118"
    with pytest.raises(ValueError, match=r"row 110: .*\(2 rows\)\nThese are 2 of 120 rows"):
        list(train_stream)


def write_sources(folder, fraction=None, **row_counts) -> list[dict]:
    """Returns a source for each name, with answers such as `a0`, `a1`, and the same fraction."""
    sources = []
    for source_name, row_count in row_counts.items():
        raw_rows = [llava("Q", f"{source_name}{number}") for number in range(row_count)]
        data_path = write_json(folder / source_name, raw_rows)
        sources.append({"path": str(data_path), "fraction": fraction})
    return sources


def numbered(name, *bounds) -> list[str]:
    """Returns the answers `name0`, `name1` and so on, within the bounds of a range."""
    return [f"{name}{number}" for number in range(*bounds)]


def test_a_streamed_mixture_never_ends(load, tmp_path):
    small_source, large_source = write_sources(tmp_path, a=2, b=200)
    train_stream = load(datasets=[small_source, large_source], streamed=True).train
    in_turn = ["a0", "b0", "a1", "b1", *numbered("b", 2, 200)]
    assert answers(islice(train_stream, 404)) == 2 * in_turn


def test_a_source_of_a_stream_is_repeated(load, tmp_path):
    small_source, large_source = write_sources(tmp_path, a=2, b=200)
    train_stream = load(datasets=[small_source | {"repeat": 2}, large_source], streamed=True).train
    in_turn = ["a0", "b0", "a1", "b1", "a0", "b2", "a1", "b3", *numbered("b", 4, 200)]
    assert answers(islice(train_stream, 206)) == [*in_turn, "a0", "b0"]


def test_a_source_of_a_stream_with_a_fraction_has_no_repeat(load, tmp_path):
    small_source, large_source = write_sources(
        tmp_path,
        1,
        a=2,
        b=200,
    )
    with pytest.raises(ValueError, match="Leave repeat of .*a/data.json out"):
        load(datasets=[small_source | {"repeat": 2}, large_source], streamed=True)


def test_a_streamed_mixture_keeps_its_fractions_and_follows_its_seed(load, tmp_path):
    small_source, large_source = write_sources(tmp_path, a=2, b=200)
    datasets = [small_source | {"fraction": 1}, large_source | {"fraction": 3}]

    def draw(seed):
        train_stream = load(
            datasets=datasets,
            streamed=True,
            seed=seed,
        ).train
        return answers(islice(train_stream, 800))

    drawn = draw(seed=0)
    assert draw(seed=0) == drawn
    assert draw(seed=1) != drawn

    for source_name, row_count, mean_count in (("a", 2, 200), ("b", 200, 600)):
        drawn_from_source = [answer for answer in drawn if answer[0] == source_name]
        drawn_count = len(drawn_from_source)
        expected_answers = [f"{source_name}{number % row_count}" for number in range(drawn_count)]
        assert drawn_from_source == expected_answers
        assert abs(drawn_count - mean_count) < 49  # four standard deviations


def test_sources_of_a_stream_that_go_on_keep_their_turns_when_one_ends(load, tmp_path):
    sources = write_sources(
        tmp_path,
        a=1,
        b=3,
        c=3,
    )
    train_stream = load(datasets=sources, streamed=True).train
    assert answers(islice(train_stream, 8)) == ["a0", "b0", "c0", "b1", "c1", "b2", "c2", "a0"]


def test_a_stream_is_shuffled_in_its_buffer(load, tmp_path):
    sources = write_sources(tmp_path, a=200)

    def draw(**options):
        options |= {
            "datasets": sources,
            "dataset_streaming": True,
            "shuffle_buffer_size": 16,
        }
        return answers(islice(load(**options).train, 184))

    drawn = draw()
    assert draw() == drawn
    assert draw(seed=1) != drawn

    numbers = [int(answer[1:]) for answer in drawn]
    assert len(set(numbers)) == 184
    assert numbers != sorted(numbers)
    # A row is read 16 rows before it can be given, so none comes earlier than that.
    for place, number in enumerate(numbers, 1):
        assert number < place + 16


def used_counts(data) -> list[int]:
    return [source_report.used for source_report in data.report.sources]


def test_too_few_rows_for_a_fraction_are_reported_with_the_repeat_that_uses_all(
    load, tmp_path, caplog
):
    big_source, small_source = write_sources(
        tmp_path,
        0.5,
        big=300,
        small=20,
    )
    load(datasets=[big_source, small_source])
    assert f"is 20 rows of {small_source['path']}. So the mixture has 40 rows" in caplog.text
    assert f"280 of the 300 rows of {big_source['path']}" in caplog.text
    proposed = re.search(r"set repeat: (\d+) for (\S+), or", caplog.text)
    assert proposed[2] == small_source["path"]
    assert int(proposed[1]) == 15


def test_a_small_source_is_repeated_so_that_all_rows_are_used(load, tmp_path, caplog):
    big_source, small_source = write_sources(
        tmp_path,
        0.5,
        big=300,
        small=20,
    )
    training_data = load(datasets=[big_source, small_source | {"repeat": 15}])
    expected = dict.fromkeys(numbered("big", 300), 1)
    expected |= dict.fromkeys(numbered("small", 20), 15)
    assert Counter(answers(training_data.train)) == expected
    assert used_counts(training_data) == [300, 300]
    assert "fraction" not in caplog.text


def test_a_source_without_a_fraction_is_repeated(load, tmp_path):
    big_source, small_source = write_sources(tmp_path, big=300, small=20)
    datasets = [
        {"path": big_source["path"]},
        {"path": small_source["path"], "repeat": 2},
    ]
    training_data = load(datasets=datasets)
    assert used_counts(training_data) == [300, 40]
    assert len(training_data.train) == 340


@pytest.mark.parametrize(
    ("fractions", "row_counts"),
    [
        (
            (0.9, 0.05, 0.05),
            {
                "a": 50,
                "b": 30,
                "c": 20,
            },
        ),
        (
            (1, 2, 4),
            {
                "a": 7,
                "b": 100,
                "c": 11,
            },
        ),
    ],
)
def test_the_proposed_repeats_use_all_rows_in_the_fractions(
    load, tmp_path, caplog, fractions, row_counts
):
    sources = write_sources(tmp_path, **row_counts)
    for source, fraction in zip(sources, fractions, strict=True):
        source["fraction"] = fraction
    load(datasets=sources)
    source_by_path = {source["path"]: source for source in sources}
    for repeat, data_path in re.findall(r"repeat: (\d+) for (\S+\.json)", caplog.text):
        source_by_path[data_path]["repeat"] = int(repeat)

    trained = Counter(answers(load(datasets=sources).train))
    total = sum(trained.values())
    for (source_name, row_count), fraction in zip(row_counts.items(), fractions, strict=True):
        times_each = [trained[answer] for answer in numbered(source_name, row_count)]
        assert min(times_each) > 0
        assert abs(sum(times_each) - total * fraction / sum(fractions)) <= 1


def test_an_empty_text_beside_an_image_is_not_a_second_image(load, processor, tmp_path):
    question = [
        {"type": "image"},
        {"type": "text", "text": ""},
        {"type": "text", "text": "What?"},
    ]
    turns = [train_data.user(question), train_data.assistant("red")]
    images(tmp_path, "red.png")
    sample_row = {"image": "red.png", "messages": turns}
    data_path = write_json(tmp_path, [sample_row, sample_row])
    train_rows = load(data_path).train
    batch = ConversationCollator(processor)(list(train_rows))
    expected_lengths = batch["attention_mask"].sum(1).tolist()
    assert train_rows["length"][:] == expected_lengths


@pytest.mark.parametrize("wrong", [0, 1.5, "2", True])
def test_repeat_is_a_whole_number(load, tmp_path, wrong):
    (source,) = write_sources(tmp_path, a=2)
    with pytest.raises(ValueError, match="repeat must be a whole number from 1 on"):
        load(datasets=[source | {"repeat": wrong}])


def test_a_row_that_is_repeated_is_trained_on_or_held_out(load, tmp_path):
    few_source, many_source = write_sources(tmp_path, few=8, many=24)
    datasets = [few_source | {"repeat": 3}, many_source]
    training_data = load(
        datasets=datasets,
        with_eval=True,
        test_split_size=0.25,
    )
    trained = Counter(answers(training_data.train))
    held_out = Counter(answers(training_data.eval))

    assert trained.keys() | held_out.keys() == {*numbered("few", 8), *numbered("many", 24)}
    assert not trained.keys() & held_out.keys()
    assert set(held_out.values()) == {1}
    assert len(held_out) == 8

    used = Counter()
    for answer, count in trained.items():
        if answer.startswith("few"):
            assert count == 3
            used["few"] += count
        else:
            assert count == 1
            used["many"] += count
    assert used_counts(training_data)[:2] == [used["few"], used["many"]]


@pytest.fixture
def load_four_lengths(load, tmp_path, monkeypatch):
    """Loads 12 rows with answers of one to four words, in memory or streamed."""
    monkeypatch.setattr(mixtures, "MANY_ROWS", 100)
    raw_rows = [llava("Q", "yes " * (1 + number % 4)) for number in range(12)]
    data_path = write_json(tmp_path, raw_rows)

    def load_rows(streamed):
        train_rows = load(data_path, streamed=streamed).train
        lengths = sorted({row["length"] for row in islice(train_rows, 12)})
        return train_rows, lengths

    return load_rows


@pytest.mark.parametrize(
    ("streamed", "dropped_count"),
    [
        (False, 6),
        (True, 4),  # The last two are not met.
    ],
)
def test_prepared_rows_that_are_too_long_are_dropped(
    load_four_lengths, processor, dropped_rows, streamed, dropped_count
):
    train_rows, lengths = load_four_lengths(streamed)
    row_checks = checks.Checks(processor, lengths[1], dropped_rows=dropped_rows)
    prepared_rows, _ = prepare_rows(train_rows, row_checks)
    assert [row["row"] for row in islice(prepared_rows, 6)] == [0, 1, 4, 5, 8, 9]

    recorded = dropped_rows.read()
    assert [dropped.row for dropped in recorded] == [2, 3, 6, 7, 10, 11][:dropped_count]
    assert recorded[0].tokens == lengths[2]


def test_the_report_counts_prepared_rows_that_are_too_long(load_four_lengths, processor):
    train_rows, lengths = load_four_lengths(streamed=False)
    prepared_rows, source_report = prepare_rows(train_rows, checks.Checks(processor, lengths[1]))
    assert source_report.found == 12
    assert source_report.bad == 0
    assert source_report.too_long == 6
    assert source_report.valid == 6
    assert source_report.longest == lengths[1]
    assert len(prepared_rows) == 6


@pytest.mark.parametrize("streamed", [False, True])
def test_prepared_rows_of_which_all_are_too_long_are_refused(
    load_four_lengths, processor, streamed
):
    train_rows, _ = load_four_lengths(streamed)
    with pytest.raises(ValueError, match="no row is left. All are longer than max_length 3"):
        prepared_rows, _ = prepare_rows(train_rows, checks.Checks(processor, 3))
        next(iter(prepared_rows))


@pytest.mark.parametrize("streamed", [False, True])
def test_prepared_rows_of_at_most_max_length_are_kept(load_four_lengths, processor, streamed):
    train_rows, lengths = load_four_lengths(streamed)
    row_checks = checks.Checks(processor, lengths[-1])
    prepared_rows, _ = prepare_rows(train_rows, row_checks, need_images=True)
    assert len(list(islice(prepared_rows, 12))) == 12


@pytest.fixture
def two_configurations(tmp_path):
    """A folder of the configurations `first`, the default, and `other`."""
    folder = tmp_path / "data"
    configs = []
    for config_name in ("first", "other"):
        data_files = []
        for split in ("train", "test"):
            sample_row = {**llava("Q", f"{config_name} {split}"), "image": None}
            train_data.write_parquet(folder / config_name / f"{split}.parquet", [sample_row])
            data_files.append({"split": split, "path": f"{config_name}/{split}.parquet"})
        configs.append({"config_name": config_name, "data_files": data_files})
    configs[0]["default"] = True
    (folder / "README.md").write_text(f"---\nconfigs: {json.dumps(configs)}\n---\n")
    return folder


def test_held_out_rows_are_of_the_configuration_that_an_option_names(load, two_configurations):
    training_data = load(two_configurations, dataset_config="other", with_eval=True)
    assert answers(training_data.train) == ["other train"]
    assert answers(training_data.eval) == ["other test"]


def test_held_out_rows_are_of_the_configuration_that_the_name_has(load, two_configurations):
    training_data = load(f"{two_configurations}:other:train", with_eval=True)
    assert answers(training_data.train) == ["other train"]
    assert answers(training_data.eval) == ["other test"]


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home folder with rows, and with images elsewhere in it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    write_json(tmp_path / "rows", [llava("<image>Q", "A", "red.png")])
    images(tmp_path / "shown", "red.png")
    return tmp_path


IN_HOME = {"path": "~/rows/data.json", "image_folder": "~/shown"}


def image_path(row) -> str:
    return row["images"][0]["path"]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            {"dataset_name": "~/rows/data.json", "image_folder": "~/shown"}, id="dataset_name"
        ),
        pytest.param({"datasets": [IN_HOME]}, id="datasets"),
        pytest.param({"datasets": [IN_HOME], "streamed": True}, id="datasets-streamed"),
    ],
)
def test_a_home_folder_is_found_in_options(load, home, options):
    (first_row,) = islice(load(**options).train, 1)
    assert image_path(first_row) == str(home / "shown" / "red.png")


def test_a_home_folder_is_found_in_the_name_of_held_out_data(load, home):
    training_data = load(
        datasets=[IN_HOME],
        with_eval=True,
        eval_dataset_name="~/rows/data.json",
    )
    assert image_path(training_data.eval[0]) == str(home / "rows" / "red.png")


def test_a_home_folder_is_found_in_data_files_and_data_dir(home):
    source = DataSource(
        "json",
        data_files={"train": ["~/rows/data.json"]},
        data_dir="~/rows",
    )
    assert source.data_files == {"train": [f"{home}/rows/data.json"]}
    assert source.data_dir == f"{home}/rows"


def test_a_home_folder_is_found_in_a_row(load, home):
    write_json(home / "rows", [llava("<image>Q", "A", "~/shown/red.png")])
    (parsed_row,) = load(dataset_name="~/rows/data.json", image_folder="~/shown").train
    assert image_path(parsed_row) == str(home / "shown" / "red.png")

    with pytest.raises(ValueError, match="leaves image_folder"):
        load("~/rows/data.json")


@pytest.fixture
def one_image_source(tmp_path):
    """A source of one row, beside which others are checked too."""
    (source,) = write_sources(tmp_path, 0.5, a=2)
    write_json(tmp_path / "a", [llava("<image>Q", "a0", "red.png")])
    return source


def test_a_streamed_source_without_rows_is_named(load, tmp_path, one_image_source):
    (empty_source,) = write_sources(tmp_path, 0.5, empty=0)
    load_options = {"bad_rows": "skip", "dataset_streaming": True}
    reason = f"^{empty_source['path']}: no row .* or all are dropped.$"
    with pytest.raises(ValueError, match=reason):
        list(islice(load(datasets=[one_image_source, empty_source], **load_options).train, 100))


def test_a_streamed_source_with_only_bad_rows_is_named(load, tmp_path, one_image_source):
    (bad_source,) = write_sources(tmp_path, 0.5, dropped=1)
    write_json(tmp_path / "dropped", [llava("Q", "")])
    load_options = {"bad_rows": "skip", "dataset_streaming": True}
    reason = f"^Rows .*:\n  {bad_source['path']}, row 0: .*\nFix them.$"
    with pytest.raises(ValueError, match=reason):
        load(datasets=[one_image_source, bad_source], **load_options)


@pytest.mark.parametrize("streamed", [False, True])
def test_nothing_is_held_out_where_nothing_is_evaluated(load, tmp_path, streamed):
    (source,) = write_sources(tmp_path, a=8)
    training_data = load(
        source["path"],
        streamed=streamed,
        test_split_size=0.25,
    )
    assert set(answers(islice(training_data.train, 8))) == set(numbered("a", 8))
    assert training_data.eval is None
    assert len(training_data.report.sources) == 1


def test_what_is_held_out_is_not_reported_as_used(load, tmp_path):
    sources = write_sources(
        tmp_path,
        1,
        a=30,
        b=10,
    )
    training_data = load(
        datasets=sources,
        with_eval=True,
        test_split_size=0.25,
    )
    report_of_a, report_of_b, held_out = training_data.report.sources
    trained = answers(training_data.train)

    initials = Counter(answer[0] for answer in trained)
    assert report_of_a.used == initials["a"]
    assert report_of_b.used == initials["b"]
    assert report_of_a.used + report_of_b.used == 15
    assert report_of_a.valid == 30
    assert len({*trained, *answers(training_data.eval)}) == 20

    assert held_out.source == "held out of training"
    assert held_out.found == 5
    assert held_out.used == 5
    assert held_out.split == "eval"
    assert held_out.longest == max(training_data.eval["length"])


def test_images_of_held_out_rows_are_decoded_first(load, tmp_path, monkeypatch, dropped_rows):
    # Fewer images of training rows are opened, and none of these.
    monkeypatch.setattr(table, "MANY_ROWS", 20)
    broken_rows = other_rows(100, opened_rows(100, 20))[::3]
    broken_path = write_with_broken_images(tmp_path / "data", "json", 100, broken_rows)
    good_path = write_json(tmp_path / "other", mixed_rows())

    for train_path, load_options in (
        (good_path, {"eval_dataset_name": str(broken_path)}),
        (broken_path, {"test_split_size": 0.5}),
    ):
        load_options["with_eval"] = True
        with pytest.raises(ValueError, match="row [0-9]+: .* truncated"):
            load(train_path, bad_rows="stop", **load_options)

        training_data = load(
            train_path,
            bad_rows="skip",
            dropped_rows=dropped_rows,
            **load_options,
        )
        held_out = training_data.report.sources[-1]
        assert held_out.valid == len(training_data.eval)
        assert held_out.bad == held_out.found - held_out.valid
        assert held_out.bad > 0
        for answer in answers(training_data.eval):
            assert int(answer) not in broken_rows

    assert [dropped.row for dropped in dropped_rows.read()] == broken_rows
