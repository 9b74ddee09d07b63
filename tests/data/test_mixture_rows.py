"""How many rows of each data set are in a mixture, which, and what is told of the others."""

import re

import pytest
from datasets import Dataset
from train_data import answers, llava, read, write_json

from normalign_llava.data.rows.checks import Checks
from normalign_llava.data.rows.images import ImageRules
from normalign_llava.data.rows.once import warn_once
from normalign_llava.data.sources import mixtures, source, streams
from normalign_llava.data.sources.arguments import DataSource
from normalign_llava.data.sources.mixtures import ShortRows, prepare_rows
from normalign_llava.data.sources.source import Source
from normalign_llava.data.sources.streams import valid_rows


@pytest.mark.parametrize(
    ("counts", "repeats", "fractions", "expected"),
    [
        ([300, 20], [1, 3], [], [300, 60]),
        ([10, 10], [1, 1], [0.5, 0.5], [10, 10]),
        ([100, 7], [1, 1], [0.75, 0.25], [21, 7]),
        ([100, 7], [1, 2], [0.75, 0.25], [42, 14]),
        ([5, 100], [1, 1], [0.57, 0.43], [5, 4]),  # 3.77 of the second
    ],
)
def test_the_largest_mixture_of_fractions(counts, repeats, fractions, expected):
    assert mixtures._counts_of_mixture(counts, repeats, fractions) == expected


def test_rows_are_drawn_as_often_as_each_other_but_for_a_rest():
    drawn = mixtures._drawn_rows(5, 12, [0, 1])
    assert drawn == sorted(drawn) and len(drawn) == 12
    assert sorted(drawn.count(number) for number in range(5)) == [2, 2, 2, 3, 3]
    assert mixtures._drawn_rows(5, 5, [0, 1]) == [*range(5)]
    few = mixtures._drawn_rows(100, 50, [3, 1])
    assert len({*few}) == 50 and few == mixtures._drawn_rows(100, 50, [3, 1])


def test_what_is_drawn_differs_between_seeds_and_data_sets(processor, tmp_path):
    listed = []
    for name, count in (("a", 30), ("b", 30), ("c", 10)):
        rows = [llava("Q", f"{name}{number}") for number in range(count)]
        listed.append({"path": str(write_json(tmp_path / name, rows)), "fraction": 1})
    drawn = []
    for seed in (0, 0, 1):
        said = answers(read(None, processor, datasets=listed, seed=seed).train)
        drawn.append([[text[1:] for text in said if text[0] == name] for name in "ab"])
    first, again, other = drawn
    assert first == again and [len(numbers) for numbers in first] == [10, 10]
    assert first[0] != first[1]
    assert first[0] != other[0] and first[1] != other[1]


def test_rows_that_are_left_out_are_told_with_what_uses_all():
    def told(counts, repeats, fractions):
        names = [f"{number}.json" for number in range(len(counts))]
        return mixtures._unused_rows(names, counts, repeats, fractions)

    assert told([10, 20], [1, 1], []) is told([10, 10], [2, 2], [0.5, 0.5]) is None
    assert told([10, 20], [2, 1], [0.5, 0.5]) is None
    text = told([1, 15], [1, 1], [0.1, 0.9])
    assert re.findall(r"repeat: (\d+) for (\S+),", text) == [("2", "0.json")]
    assert "each" not in text and "mixture has 10 rows" in text
    assert "of the 15 rows of 1.json" in text and "of the 1 rows" not in text
    text = told([1, 30], [1, 1], [0.1, 0.9])  # the second is 30.000000000000004 rows of all
    assert re.findall(r"repeat: (\d+) for (\S+),", text) == [("4", "0.json")]
    text = told([10, 100], [3, 1], [0.25, 0.75])
    assert "fraction 0.25 of the mixture is 10 rows of 0.json, each 3 times" in text
    assert "10 of the 100 rows of 1.json" in text and "repeat: 4 for 0.json" in text


def test_copies_of_a_row_are_held_out_together_and_as_the_seed_says():
    table = Dataset.from_dict({"part": [0, 1, 1, 2, 2, 3], "index": [0, 0, 0, 0, 1, 1]})
    rows = [(row["part"], row["index"]) for row in table]
    chosen = []
    for seed in range(8):
        kept, out = mixtures._split(table, 0.4, seed)
        held = [(row["part"], row["index"]) for row in out]
        assert len(held) == len({*held}) == 2  # of five rows
        trained = [(row["part"], row["index"]) for row in kept]
        assert sorted(trained) == [row for row in rows if row not in held]
        again = mixtures._split(table, 0.4, seed)[1]
        assert again[:] == out[:]
        chosen.append((*held,))
    assert len({*chosen}) > 1


def test_a_data_set_that_is_held_out_whole_is_not_used(processor, tmp_path):
    several = write_json(tmp_path / "a", [llava("Q", f"a{number}") for number in range(3)])
    one = write_json(tmp_path / "b", [llava("Q", "b0")])
    listed = [{"path": str(several)}, {"path": str(one)}]
    table = Dataset.from_dict({"part": [0, 0, 0, 1], "index": [0, 1, 2, 0]})
    seeds = [seed for seed in range(50) if mixtures._split(table, 0.25, seed)[1]["part"][0] == 1]
    options = {"with_eval": True, "test_split_size": 0.25, "seed": seeds[0]}
    data = read(None, processor, datasets=listed, **options)
    assert answers(data.eval) == ["b0"]
    assert [report.used for report in data.report.sources] == [3, 0, 1]


@pytest.mark.parametrize("wrong", [0, -1, float("inf"), float("nan"), "half", None])
def test_fractions_are_numbers_above_0_of_all_data_sets(wrong):
    sources = [DataSource("a", fraction=1), DataSource("b", fraction=wrong)]
    with pytest.raises(ValueError, match="Give all data sets a fraction, a number above 0"):
        mixtures._checked_fractions(sources)


def test_fractions_are_shares_of_their_sum():
    assert mixtures._checked_fractions([DataSource("a"), DataSource("b")]) == ()
    sources = [DataSource("a", fraction=1), DataSource("b", fraction="3")]
    assert mixtures._checked_fractions(sources) == (0.25, 0.75)


@pytest.mark.parametrize(
    ("count", "fractions", "warns"), [(1, (), False), (2, (0.5, 0.5), False), (2, (), True)]
)
def test_that_a_stream_takes_turns_is_told_where_it_does(caplog, count, fractions, warns):
    warn_once.cache_clear()
    mixtures._check_streams([DataSource(name) for name in "ab"[:count]], fractions, None)
    assert ("a row of each in turn" in caplog.text) == warns


def test_a_stream_whose_rows_are_too_long_ends_after_many_in_a_row(caplog, monkeypatch):
    monkeypatch.setattr(mixtures, "MANY_ROWS", 2)
    keeps = ShortRows("mine", Checks(None, max_length=3))
    long, short = ({"source": "a", "row": 0, "length": length} for length in (4, 3))
    assert [keeps(row) for row in (long, long, short, long, long)] == [False] * 2 + [True] + [
        False
    ] * 2
    assert "mine: rows longer than 3 tokens are dropped" in caplog.text
    with pytest.raises(ValueError, match="mine: no row is left"):
        keeps(long)


def test_a_row_that_is_dropped_of_data_in_memory_is_told(processor, caplog):
    rows = [{"question": "Q", "answer": "A"}, {"question": "Q", "answer": "A" * 99}]
    checks = Checks(processor, max_length=99)
    prepare_rows(Dataset.from_list(rows), checks, name="mine")
    assert "mine: 1 of 2 rows dropped. First: mine, row 1: " in caplog.text
    caplog.clear()
    prepare_rows(Dataset.from_list(rows[:1]), checks, name="mine")
    assert "dropped" not in caplog.text


def test_prepared_rows_of_any_length_are_kept_without_a_limit(processor):
    rows = Dataset.from_list([{"question": "Q", "answer": "A" * 5000}])
    prepared, _ = prepare_rows(rows, Checks(processor))
    again, report = prepare_rows(prepared, Checks(processor))
    assert len(again) == report.valid == 1 and report.dropped == []


def test_files_are_read_by_as_many_processes_as_check_rows(processor, tmp_path, monkeypatch):
    asked = []

    def noted(opens):
        def opening(*args):
            asked.append(args[-1])
            return opens(*args)

        return opening

    for module in (mixtures, source):  # training data and held-out data
        monkeypatch.setattr(module, "open_source", noted(module.open_source))
    path = write_json(tmp_path / "data", [llava("Q", "A")])
    read(path, processor, with_eval=True, eval_dataset_name=str(path), processes=1)
    assert asked == [1, 1]


def test_what_is_not_read_of_a_stream_is_told_of_late_rows_too(processor, tmp_path, caplog):
    unread = {"photo": "b.png", "question": "Q", "answer": "A", "query": "x", "score": 3}
    opened = Source("mine", ImageRules(), Dataset.from_list([unread]))
    assert len(list(valid_rows(opened, Checks(processor)))) == 1
    told = [record.message for record in caplog.records]
    assert told == [
        "mine: what looks like an image is not read: column photo.",
        "mine: column not used: query, like a question.",
    ]


def test_of_a_stream_with_many_rows_the_share_is_of_those_that_came(processor, monkeypatch):
    monkeypatch.setattr(streams, "MANY_ROWS", 20)
    bad = (50, 51, 52)
    rows = [{"question": "Q", "answer": "" if number in bad else "A"} for number in range(60)]
    data = Dataset.from_list(rows).to_iterable_dataset()
    opened = Source("mine", ImageRules(), data)
    assert len(list(valid_rows(opened, Checks(processor, bad_rows=0.06)))) == 57
    with pytest.raises(ValueError, match="These are 3 of 53 rows"):
        list(valid_rows(opened, Checks(processor, bad_rows=0.05)))
