"""How many and which rows of each data set are in a mixture, and the report about the others."""

import re

import pytest
from datasets import Dataset
from train_data import answers, llava, read, write_json

from normalign_llava.data.rows.checks import Checks, warn_once
from normalign_llava.data.rows.images import ImageRules
from normalign_llava.data.sources import mixtures, source, streams
from normalign_llava.data.sources.arguments import DataSource
from normalign_llava.data.sources.mixtures import ShortRows, prepare_rows
from normalign_llava.data.sources.source import Source
from normalign_llava.data.sources.streams import valid_rows


@pytest.mark.parametrize(
    ("row_counts", "repeats", "fractions", "expected"),
    [
        ([300, 20], [1, 3], [], [300, 60]),
        ([10, 10], [1, 1], [0.5, 0.5], [10, 10]),
        ([100, 7], [1, 1], [0.75, 0.25], [21, 7]),
        ([100, 7], [1, 2], [0.75, 0.25], [42, 14]),
        ([5, 100], [1, 1], [0.57, 0.43], [5, 4]),  # 3.77 of the second
    ],
)
def test_the_largest_mixture_of_fractions(row_counts, repeats, fractions, expected):
    assert mixtures._counts_of_mixture(row_counts, repeats, fractions) == expected


def test_rows_are_drawn_as_often_as_each_other_but_for_a_rest():
    drawn_rows = mixtures._drawn_rows(5, 12, [0, 1])
    assert drawn_rows == sorted(drawn_rows)
    assert len(drawn_rows) == 12
    times_each = [drawn_rows.count(number) for number in range(5)]
    assert sorted(times_each) == [2, 2, 2, 3, 3]


def test_each_row_is_drawn_once_if_as_many_are_drawn():
    drawn_rows = mixtures._drawn_rows(5, 5, [0, 1])
    assert drawn_rows == [0, 1, 2, 3, 4]


def test_the_same_rows_are_drawn_again():
    drawn_rows = mixtures._drawn_rows(100, 50, [3, 1])
    assert len(set(drawn_rows)) == 50
    assert mixtures._drawn_rows(100, 50, [3, 1]) == drawn_rows


def test_what_is_drawn_differs_between_seeds_and_data_sets(processor, tmp_path):
    datasets = []
    for name, row_count in (("a", 30), ("b", 30), ("c", 10)):
        raw_rows = [llava("Q", f"{name}{number}") for number in range(row_count)]
        data_path = write_json(tmp_path / name, raw_rows)
        datasets.append({"path": str(data_path), "fraction": 1})

    def draw(seed):
        """Returns the numbers of the rows of a and b."""
        train_rows = read(
            None,
            processor,
            datasets=datasets,
            seed=seed,
        ).train
        numbers = {
            "a": [],
            "b": [],
            "c": [],
        }
        for answer in answers(train_rows):
            numbers[answer[0]].append(answer[1:])
        return numbers["a"], numbers["b"]

    rows_of_a, rows_of_b = draw(seed=0)
    assert len(rows_of_a) == 10
    assert len(rows_of_b) == 10
    assert rows_of_a != rows_of_b
    assert draw(seed=0) == (rows_of_a, rows_of_b)

    other_rows_of_a, other_rows_of_b = draw(seed=1)
    assert other_rows_of_a != rows_of_a
    assert other_rows_of_b != rows_of_b


def report_of_unused_rows(row_counts, repeats, fractions):
    """Returns the report on `0.json`, `1.json` and so on."""
    names = [f"{number}.json" for number in range(len(row_counts))]
    return mixtures._warning_of_unused_rows(names, row_counts, repeats, fractions)


@pytest.mark.parametrize(
    ("row_counts", "repeats", "fractions"),
    [
        ([10, 20], [1, 1], []),
        ([10, 10], [2, 2], [0.5, 0.5]),
        ([10, 20], [2, 1], [0.5, 0.5]),
    ],
)
def test_nothing_is_reported_where_all_rows_are_used(row_counts, repeats, fractions):
    assert report_of_unused_rows(row_counts, repeats, fractions) is None


def test_rows_that_are_left_out_are_reported_with_what_uses_all():
    message = report_of_unused_rows([1, 15], [1, 1], [0.1, 0.9])
    assert re.findall(r"repeat: (\d+) for (\S+),", message) == [("2", "0.json")]
    assert "each" not in message
    assert "mixture has 10 rows" in message
    assert "of the 15 rows of 1.json" in message
    assert "of the 1 rows" not in message


def test_a_rounding_error_proposes_no_more_repeats():
    """The second data set is 30.000000000000004 rows of all."""
    message = report_of_unused_rows([1, 30], [1, 1], [0.1, 0.9])
    assert re.findall(r"repeat: (\d+) for (\S+),", message) == [("4", "0.json")]


def test_repeats_are_in_the_report_of_rows_that_are_left_out():
    message = report_of_unused_rows([10, 100], [3, 1], [0.25, 0.75])
    assert "fraction 0.25 of the mixture is 10 rows of 0.json, each 3 times" in message
    assert "10 of the 100 rows of 1.json" in message
    assert "repeat: 4 for 0.json" in message


def places(table) -> list[tuple[int, int]]:
    """Returns part and index of each row."""
    return [(row["part"], row["index"]) for row in table]


def test_copies_of_a_row_are_held_out_together_and_as_the_seed_says():
    columns = {
        "part": [0, 1, 1, 2, 2, 3],
        "index": [0, 0, 0, 0, 1, 1],
    }
    whole_table = Dataset.from_dict(columns)
    held_out_by_seed = []
    for seed in range(8):
        train_table, eval_table = mixtures._split(whole_table, 0.4, seed)
        held_out = places(eval_table)
        assert len(held_out) == 2  # of five rows
        assert len(set(held_out)) == 2
        expected = [place for place in places(whole_table) if place not in held_out]
        assert sorted(places(train_table)) == expected

        _, again = mixtures._split(whole_table, 0.4, seed)
        assert again[:] == eval_table[:]
        held_out_by_seed.append(tuple(held_out))
    assert len(set(held_out_by_seed)) > 1


def test_a_data_set_that_is_held_out_whole_is_not_used(processor, tmp_path):
    rows_of_a = [llava("Q", f"a{number}") for number in range(3)]
    datasets = [
        {"path": str(write_json(tmp_path / "a", rows_of_a))},
        {"path": str(write_json(tmp_path / "b", [llava("Q", "b0")]))},
    ]
    seed = seed_that_holds_out_the_last_row()
    options = {
        "with_eval": True,
        "test_split_size": 0.25,
        "seed": seed,
    }
    training_data = read(None, processor, datasets=datasets, **options)
    assert answers(training_data.eval) == ["b0"]
    assert [source_report.used for source_report in training_data.report.sources] == [3, 0, 1]


def seed_that_holds_out_the_last_row() -> int:
    """Of three rows of one data set and one of another."""
    whole_table = Dataset.from_dict({"part": [0, 0, 0, 1], "index": [0, 1, 2, 0]})
    for seed in range(50):
        _, eval_table = mixtures._split(whole_table, 0.25, seed)
        if eval_table["part"][0] == 1:
            return seed
    raise AssertionError("no seed of 50 holds the last row out")


@pytest.mark.parametrize(
    "wrong",
    [
        0,
        -1,
        float("inf"),
        float("nan"),
        "half",
        None,
    ],
)
def test_fractions_are_numbers_above_0_of_all_data_sets(wrong):
    sources = [DataSource("a", fraction=1), DataSource("b", fraction=wrong)]
    with pytest.raises(ValueError, match="Give all data sets a fraction, a number above 0"):
        mixtures._checked_fractions(sources)


def test_data_sets_may_have_no_fractions():
    assert mixtures._checked_fractions([DataSource("a"), DataSource("b")]) == ()


def test_fractions_are_shares_of_their_sum():
    sources = [DataSource("a", fraction=1), DataSource("b", fraction="3")]
    assert mixtures._checked_fractions(sources) == (0.25, 0.75)


@pytest.mark.parametrize(
    ("names", "fractions", "warns"),
    [
        (["a"], (), False),
        (["a", "b"], (0.5, 0.5), False),
        (["a", "b"], (), True),
    ],
)
def test_a_stream_warns_that_it_takes_turns_where_it_does(caplog, names, fractions, warns):
    warn_once.cache_clear()
    sources = [DataSource(name) for name in names]
    mixtures._check_streams(sources, fractions, None)
    warned = "a row of each in turn" in caplog.text
    assert warned == warns


def test_a_stream_whose_rows_are_too_long_ends_after_many_in_a_row(caplog, monkeypatch):
    monkeypatch.setattr(mixtures, "MANY_ROWS", 2)
    keeps_row = ShortRows("mine", Checks(None, max_length=3))
    long_row = {
        "source": "a",
        "row": 0,
        "length": 4,
    }
    short_row = {
        "source": "a",
        "row": 0,
        "length": 3,
    }

    assert not keeps_row(long_row)
    assert not keeps_row(long_row)
    assert keeps_row(short_row)
    assert not keeps_row(long_row)
    assert not keeps_row(long_row)
    assert "mine: rows longer than 3 tokens are dropped" in caplog.text
    with pytest.raises(ValueError, match="mine: no row is left"):
        keeps_row(long_row)


def test_a_row_that_is_dropped_of_data_in_memory_is_reported(processor, caplog):
    short_row = {"question": "Q", "answer": "A"}
    long_row = {"question": "Q", "answer": "A" * 99}
    prepare_rows(
        Dataset.from_list([short_row, long_row]), Checks(processor, max_length=99), name="mine"
    )
    assert "mine: 1 of 2 rows dropped. First: mine, row 1: " in caplog.text


def test_nothing_is_reported_where_no_row_is_dropped(processor, caplog):
    short_row = {"question": "Q", "answer": "A"}
    prepare_rows(Dataset.from_list([short_row]), Checks(processor, max_length=99), name="mine")
    assert "dropped" not in caplog.text


def test_prepared_rows_of_any_length_are_kept_without_a_limit(processor):
    raw_rows = Dataset.from_list([{"question": "Q", "answer": "A" * 5000}])
    prepared_rows, _ = prepare_rows(raw_rows, Checks(processor))
    prepared_again, source_report = prepare_rows(prepared_rows, Checks(processor))
    assert len(prepared_again) == 1
    assert source_report.valid == 1
    assert source_report.dropped == []


def test_files_are_read_by_as_many_processes_as_check_rows(processor, tmp_path, monkeypatch):
    process_counts = []

    def recording(open_source):
        def open_and_record(*arguments):
            process_counts.append(arguments[-1])
            return open_source(*arguments)

        return open_and_record

    for module in (mixtures, source):  # training data and held-out data
        monkeypatch.setattr(module, "open_source", recording(module.open_source))
    data_path = write_json(tmp_path / "data", [llava("Q", "A")])
    read(
        data_path,
        processor,
        with_eval=True,
        eval_dataset_name=str(data_path),
        processes=1,
    )
    assert process_counts == [1, 1]


def test_columns_of_a_stream_that_are_not_read_are_reported(processor, tmp_path, caplog):
    sample_row = {
        "photo": "b.png",
        "question": "Q",
        "answer": "A",
        "query": "x",
        "score": 3,
    }
    opened_source = Source("mine", ImageRules(), Dataset.from_list([sample_row]))
    assert len(list(valid_rows(opened_source, Checks(processor)))) == 1
    messages = [record.message for record in caplog.records]
    assert messages == [
        "mine: what looks like an image is not read: column photo.",
        "mine: column not used: query, like a question.",
    ]


def test_of_a_stream_with_many_rows_the_share_is_of_those_that_came(processor, monkeypatch):
    monkeypatch.setattr(streams, "MANY_ROWS", 20)
    raw_rows = [{"question": "Q", "answer": "A"} for _ in range(60)]
    for number in (50, 51, 52):
        raw_rows[number]["answer"] = ""
    row_stream = Dataset.from_list(raw_rows).to_iterable_dataset()
    opened_source = Source("mine", ImageRules(), row_stream)

    kept_rows = list(valid_rows(opened_source, Checks(processor, bad_rows=0.06)))
    assert len(kept_rows) == 57
    with pytest.raises(ValueError, match="These are 3 of 53 rows"):
        list(valid_rows(opened_source, Checks(processor, bad_rows=0.05)))
