"""Data sets in memory and streamed: the same parsed rows, checked, measured, mixed, held out."""

import json
import re
from collections import Counter
from itertools import islice

import numpy as np
import pytest
import train_data
from test_shards import both, shard
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
    return lambda path, **options: read(path, processor, **options)


MIXED = ["green", "Hello!", "blue", "blue", "One two three four five six seven."]


def test_llava_json_with_mixed_ids_and_rows_without_images_and_splits_by_name(load, tmp_path):
    path = write_json(tmp_path / "llava", mixed_rows(), "data.JSONL")
    for data in (path, path.parent):
        rows = both(data)
        assert answers(rows) == MIXED
        assert [row["image_count"] for row in rows] == [1, 0, 2, 1, 0]
        assert [(row["source"], row["row"]) for row in rows] == [(str(path), n) for n in range(5)]
        assert rows[3]["images"] == [{"path": str(tmp_path / "llava/sub/blue.png"), "bytes": None}]
    own = str(write_json(path.parent, mixed_rows()[:1], "llava_test.jsonl"))
    data = load(path.parent, with_eval=True)
    assert answers(data.train) == MIXED and answers(data.eval) == MIXED[:1]
    held_out = {"with_eval": True, "eval_dataset_name": own}
    assert answers(load(own, **held_out).eval) == MIXED[:1]
    whole = load(path, **held_out, test_split_size=0.4)  # which has nothing to hold out then
    assert answers(whole.train) == MIXED and answers(whole.eval) == MIXED[:1]


def test_an_image_inside_is_not_taken_from_a_file_of_its_name(tmp_path, monkeypatch):
    row = {**llava("<image>\nQ", "one"), "image": inside("red")}
    file = train_data.write_parquet(tmp_path / "data.parquet", [row])
    images(tmp_path / "work")
    (tmp_path / "work" / "red.png").write_bytes(train_data.image_bytes("lime"))
    monkeypatch.chdir(tmp_path / "work")
    assert both(file)[0]["images"][0]["bytes"] == inside("red")["bytes"]


def test_lengths_are_those_of_the_collator_and_nothing_is_truncated(load, tmp_path, processor):
    path = write_json(tmp_path, mixed_rows())
    data = load(path)
    batch = ConversationCollator(processor)([data.train[number] for number in range(5)])
    assert data.train["length"][:] == batch["attention_mask"].sum(1).tolist()
    limit = sorted(data.train["length"][:])[3]  # two rows are at or above it, one of them exactly
    short = load(path, max_length=limit)
    (source,) = short.report.sources
    assert (source.found, source.bad, source.too_long, source.valid, source.used) == (5, 0, 1, 4, 4)
    assert (source.images, source.text_only, source.longest) == (2, 2, limit)
    lengths = short.train["length"][:]
    assert (source.shortest, source.median) == (min(lengths), np.median(lengths))
    assert [(row.row, row.file, row.tokens) for row in source.dropped] == [(2, "red.png", 75)]
    assert len(both(path, max_length=limit)) == 4
    with pytest.raises(ValueError, match="no row is left. 5 rows, 0 bad, 5 longer than max_length"):
        load(path, max_length=10)


def test_a_row_that_the_template_refuses_is_bad(tmp_path):
    strict = "{% if messages|length > 2 %}{{ raise_exception('too much talk') }}{% endif %}"
    processor = train_data.processor()
    content = "message['content']"
    last_text = train_data.tiny_parts.CHATML.replace(content, f"{content}[-1]['text']|string")
    processor.chat_template = strict + last_text
    reasons = r"row 0 .*prints 0 image tokens for 1 images \(2 rows\)(.|\n)*row 2 .*too much talk"
    with pytest.raises(ValueError, match=reasons):
        read(write_json(tmp_path, mixed_rows()), processor)


def test_a_template_that_prints_an_image_of_its_own_is_refused(tmp_path):
    processor = train_data.processor()
    processor.chat_template = f"{processor.image_token}{processor.chat_template}"
    reason = r"row 0 .*prints 2 image tokens for 1 images \(all 5 rows\)"
    with pytest.raises(ValueError, match=reason):
        read(write_json(tmp_path, mixed_rows()), processor)


REASONS = {1: "1 <image>", 2: "none.png: there is no such image", 3: r"\.\./outside.png leaves"}
REASONS |= {8: "link.png: the image is a link that leaves", 9: "the answer in turn 1 is empty"}


def test_bad_rows_stop_with_row_file_and_reason_or_are_skipped_and_counted(load, tmp_path):
    path = train_data.bad_rows(tmp_path / "data")
    listed = r"(.|\n)*".join(f"json, row {row}.*: .*{reason}" for row, reason in REASONS.items())
    with pytest.raises(ValueError, match=listed + r"(.|\n)*--bad_rows skip"):
        load(path)
    dropped = DroppedRows(tmp_path / "dropped_rows.jsonl")
    rows = both(path, bad_rows="skip", dropped_rows=dropped, max_length=60)
    assert answers(rows) == MIXED[:3] and [row["row"] for row in rows] == [0, 4, 6]
    (source,) = load(path, bad_rows="skip", max_length=60).report.sources
    assert (source.found, source.bad, source.too_long, source.valid) == (10, 5, 2, 3)
    assert [row.row for row in source.dropped] == [*REASONS, 5, 7]
    assert source.dropped[1].file == str(tmp_path / "data" / "none.png")
    stream = load(path, bad_rows="skip", dropped_rows=dropped, streamed=True, max_length=60)
    assert len(list(islice(stream.train, 7))) == 7  # into a third pass, each row recorded once
    assert dropped.read() == sorted(source.dropped, key=lambda row: row.row)
    assert stream.report.sources[0].found is None


def test_a_fixed_file_is_read_although_rows_are_cached(load, tmp_path):
    path = write_json(tmp_path, mixed_rows())
    (tmp_path / "green.png").unlink()
    with pytest.raises(ValueError, match="row 0: .*green.png: there is no such image"):
        load(path)
    images(tmp_path, "green.png")
    assert len(load(path).train) == 5
    write_json(tmp_path, mixed_rows()[:2])
    assert len(load(path).train) == 2
    path.write_text(path.read_text().replace('"green"', '"brown"'))  # as many bytes
    assert answers(load(path).train) == ["brown", "Hello!"]


TRUNCATED = train_data.image_bytes("blue", (64, 64))[:70]


def with_broken(folder, form, rows, broken, content=TRUNCATED):
    """Data of a form, in which the images of some rows cannot be decoded."""
    good = train_data.image_bytes()
    contents = [content if number in broken else good for number in range(rows)]
    lines = [llava("<image>Q", f"{number}", f"{number}.jpg") for number in range(rows)]
    if form == "shard":
        files = {}
        for number in range(rows):
            files |= {f"{number}.json": lines[number], f"{number}.jpg": contents[number]}
        return shard(folder / "a.tar", files)
    if form == "parquet":
        inside = ({"bytes": image, "path": None} for image in contents)
        lines = [{**line, "image": image} for line, image in zip(lines, inside, strict=True)]
        return train_data.write_parquet(folder / "data.parquet", lines)
    folder.mkdir()
    for number, image in enumerate(contents):
        (folder / f"{number}.jpg").write_bytes(image)
    return write_json(folder, lines)


@pytest.mark.parametrize("form", ["json", "shard", "parquet"])
def test_images_that_cannot_be_decoded_stop_a_run_before_it_begins(load, tmp_path, form):
    one = with_broken(tmp_path / "one", form, 20, {7})
    three = with_broken(tmp_path / "three", form, 20, {7, 8, 9})
    every = with_broken(tmp_path / "every", form, 8, set(range(8)), b"<html>404</html>")
    assert [row.row for row in load(one, bad_rows=0.1).report.sources[0].dropped] == [7]
    share = r" \(3 rows\)\nThese are 3 of 20 rows; a share of 0.1 may be bad"
    for path, bad_rows, reason in (
        (one, None, "row 7.*: .* truncated"),
        (three, 0.1, f"row 7.*: .* truncated.*{share}"),
        (every, "skip", r"cannot identify .* \(all 8 rows\)"),
    ):
        for streaming in (False, True):
            with pytest.raises(ValueError, match=reason):
                load(path, bad_rows=bad_rows, dataset_streaming=streaming)


def test_of_many_images_a_sample_is_opened_or_all_if_many_may_be_bad(load, tmp_path, monkeypatch):
    """100 of 300. Those that are met when they are used count in the same share."""
    for module in (checks, table):
        monkeypatch.setattr(module, "MANY_ROWS", 100)
    sample = np.random.default_rng(0).choice(300, 100, replace=False).tolist()
    rest = {*sorted({*range(300)} - {*sample})[:10]}
    assert not rest & {*sample}
    unseen = with_broken(tmp_path / "unseen", "json", 300, rest)
    (unseen.parent / f"{min(rest)}.jpg").unlink()  # files are looked for though none is opened
    for check_images, bad in ((False, 1), (True, 10)):
        (report,) = load(unseen, bad_rows=0.05, check_images=check_images).report.sources
        assert (report.bad, report.skippable) == (bad, 15 - bad)
    seen = with_broken(tmp_path / "seen", "json", 300, rest | {*sample[:3]})
    for share, bad in ((0.12, 3), (0.06, 13)):  # 3 are drawn where the mean may be 10.4
        (report,) = load(seen, bad_rows=share).report.sources
        assert (report.bad, report.skippable) == (bad, int(300 * share) - bad)
    for share in ("stop", 0.04):
        with pytest.raises(ValueError, match=r"truncated.* \(13 rows\)"):
            load(seen, bad_rows=share)


def test_files_are_looked_for_of_the_rows_whose_images_are_not_opened(load, tmp_path, monkeypatch):
    """4 of 12 are opened, and the files of the others are looked for 5 rows at a time."""
    monkeypatch.setattr(table, "MANY_ROWS", 4)
    monkeypatch.setattr(checks, "_LISTED", 5)
    sample = np.random.default_rng(0).choice(12, 4, replace=False).tolist()
    others = sorted({*range(12)} - {*sample})
    path = with_broken(tmp_path / "data", "json", 12, others)
    for number in others[::2]:
        (path.parent / f"{number}.jpg").unlink()
    (report,) = load(path, bad_rows="skip").report.sources
    assert [row.row for row in report.dropped] == others[::2]
    with pytest.raises(ValueError, match=f"row {others[1]}: .* truncated"):
        load(path)  # of which all are opened, since none may be bad


def test_a_share_of_a_stream_is_of_its_first_rows_and_of_all(load, tmp_path):
    options = {"bad_rows": 0.05, "streamed": True}
    some = with_broken(tmp_path / "some", "json", 120, {*range(0, 120, 10)})
    many = with_broken(tmp_path / "many", "json", 120, {*range(60)})
    data = load(some, with_eval=True, eval_dataset_name=str(some), **options)
    assert [report.skippable for report in data.report.sources] == [500, 500]  # of 10,000 each
    for held_out in ({}, {"with_eval": True, "eval_dataset_name": str(many)}):
        with pytest.raises(ValueError, match=r"row 0: .*\(60 rows\)\nThese are 60 of 100 rows"):
            load(some if held_out else many, **held_out, **options)
    late = load(with_broken(tmp_path / "late", "json", 103, {102}), streamed=True).train
    assert answers(islice(late, 103))[-1] == "102"  # it is opened when it is used
    path = write_json(tmp_path, [llava("Q", "" if n in (110, 115) else f"{n}") for n in range(120)])
    rows = iter(load(path, bad_rows=0.01, streamed=True).train)
    assert answers(islice(rows, 117))[-1] == "118"  # of 10,000 rows it would be allowed
    with pytest.raises(ValueError, match=r"row 110: .*\(2 rows\)\nThese are 2 of 120 rows"):
        list(rows)


def sources(base, share=None, **counts) -> list[dict]:
    """Sources whose answers are `a0`, `a1`, ..., `b0`, ..., each with the same fraction."""
    rows = {name: [llava("Q", f"{name}{n}") for n in range(counts[name])] for name in counts}
    return [{"path": str(write_json(base / name, rows[name])), "fraction": share} for name in rows]


def test_a_streamed_mixture_never_ends_and_keeps_its_shares(load, tmp_path):
    small, large = sources(tmp_path, a=2, b=200)
    plain = load(None, datasets=[small, large], streamed=True).train
    in_turn = ["a0", "b0", "a1", "b1", *(f"b{n}" for n in range(2, 200))]
    assert answers(islice(plain, 404)) == 2 * in_turn
    repeated = load(None, datasets=[small | {"repeat": 2}, large], streamed=True).train
    in_turn[4:6] = ["a0", "b2", "a1", "b3"]
    assert answers(islice(repeated, 206)) == [*in_turn, "a0", "b0"]
    with pytest.raises(ValueError, match="Leave repeat of .*a/data.json out"):
        again = [{**small, "fraction": 1, "repeat": 2}, {**large, "fraction": 1}]
        load(None, datasets=again, streamed=True)
    options = {"datasets": [{**small, "fraction": 1}, {**large, "fraction": 3}], "streamed": True}
    streams = (load(None, seed=seed, **options).train for seed in (0, 0, 1))
    drawn, again, other = (answers(islice(stream, 800)) for stream in streams)
    assert drawn == again != other
    for name, count, expected in (("a", 2, 200), ("b", 200, 600)):
        rows = [answer for answer in drawn if answer[0] == name]
        assert rows == [f"{name}{n % count}" for n in range(len(rows))]
        assert abs(len(rows) - expected) < 49  # four standard deviations


def test_sources_of_a_stream_that_go_on_keep_their_turns_when_one_ends(load, tmp_path):
    listed = sources(tmp_path, a=1, b=3, c=3)
    rows = load(None, datasets=listed, streamed=True).train
    assert answers(islice(rows, 8)) == ["a0", "b0", "c0", "b1", "c1", "b2", "c2", "a0"]


def test_a_stream_is_shuffled_in_its_buffer(load, tmp_path):
    (listed,) = sources(tmp_path, a=200)
    options = {"datasets": [listed], "dataset_streaming": True, "shuffle_buffer_size": 16}
    first = answers(islice(load(None, **options).train, 184))
    assert answers(islice(load(None, **options).train, 184)) == first
    numbers = [int(answer[1:]) for answer in first]
    assert len({*numbers}) == 184 and numbers != sorted(numbers)
    # A row is read 16 rows before it can be given, so none comes earlier than that.
    assert all(number < place + 16 for place, number in enumerate(numbers, 1))
    other = load(None, seed=1, **options).train
    assert answers(islice(other, 184)) != first


def test_too_few_rows_for_a_fraction_are_told_with_what_uses_all(load, tmp_path, caplog):
    big, small = sources(tmp_path, 0.5, big=300, small=20)
    load(None, datasets=[big, small])
    assert f"is 20 rows of {small['path']}. So the mixture has 40 rows" in caplog.text
    assert f"280 of the 300 rows of {big['path']}" in caplog.text
    repeats = re.search(r"set repeat: (\d+) for (\S+), or", caplog.text)
    assert repeats[2] == small["path"] and int(repeats[1]) == 15
    caplog.clear()
    data = load(None, datasets=[big, small | {"repeat": 15}])
    counts = Counter(answers(data.train))
    assert {counts[f"big{n}"] for n in range(300)} == {1}
    assert {counts[f"small{n}"] for n in range(20)} == {15} and len(counts) == 320
    assert [report.used for report in data.report.sources] == [300, 300]
    assert "fraction" not in caplog.text
    data = load(None, datasets=[{"path": big["path"]}, {"path": small["path"], "repeat": 2}])
    assert [report.used for report in data.report.sources] == [300, 40] and len(data.train) == 340
    for shares, sizes in (((0.9, 0.05, 0.05), (50, 30, 20)), ((1, 2, 4), (7, 100, 11))):
        names = dict(zip("abc", sizes, strict=True))
        listed = sources(tmp_path / str(sizes[0]), **names)
        listed = [row | {"fraction": share} for row, share in zip(listed, shares, strict=True)]
        caplog.clear()
        load(None, datasets=listed)
        for times, path in re.findall(r"repeat: (\d+) for (\S+\.json)", caplog.text):
            (few,) = (row for row in listed if row["path"] == path)
            few["repeat"] = int(times)
        counts = Counter(answers(load(None, datasets=listed).train))
        shown = {name: sum(counts[f"{name}{n}"] > 0 for n in range(names[name])) for name in names}
        assert shown == names
        exact = [sum(counts[f"{name}{n}"] for n in range(names[name])) for name in names]
        total = sum(exact)
        assert all(
            abs(count - total * share / sum(shares)) <= 1
            for count, share in zip(exact, shares, strict=True)
        )


def test_an_empty_text_beside_an_image_is_no_second_image(load, processor, tmp_path):
    parts = [{"type": "image"}, {"type": "text", "text": ""}, {"type": "text", "text": "What?"}]
    turns = [{"role": "user", "content": parts}, {"role": "assistant", "content": "red"}]
    images(tmp_path, "red.png")
    row = {"image": "red.png", "messages": turns}
    path = write_json(tmp_path, [row, row])
    data = load(path)
    batch = ConversationCollator(processor)(list(data.train))
    assert data.train["length"][:] == batch["attention_mask"].sum(1).tolist()


@pytest.mark.parametrize("wrong", [0, 1.5, "2", True])
def test_repeat_is_a_whole_number(load, tmp_path, wrong):
    (listed,) = sources(tmp_path, a=2)
    with pytest.raises(ValueError, match="repeat must be a whole number from 1 on"):
        load(None, datasets=[listed | {"repeat": wrong}])


def test_a_row_that_is_repeated_is_trained_on_or_held_out(load, tmp_path):
    few, many = sources(tmp_path, few=8, many=24)
    listed = [few | {"repeat": 3}, many]
    data = load(None, datasets=listed, with_eval=True, test_split_size=0.25)
    trained = Counter(answers(data.train))
    out = Counter(answers(data.eval))
    assert trained.keys() | out.keys() == {*(f"few{n}" for n in range(8))} | {
        *(f"many{n}" for n in range(24))
    }
    assert not trained.keys() & out.keys() and {*out.values()} == {1} and len(out) == 8
    assert all(count == (3 if name < "g" else 1) for name, count in trained.items())
    kept = [sum(count for name, count in trained.items() if name[0] == first) for first in "fm"]
    assert [report.used for report in data.report.sources[:2]] == kept


@pytest.mark.parametrize("streamed", [False, True])
def test_prepared_rows_that_are_too_long_are_dropped(
    load, processor, tmp_path, streamed, monkeypatch
):
    monkeypatch.setattr(mixtures, "MANY_ROWS", 100)
    path = write_json(tmp_path, [llava("Q", "yes " * (1 + number % 4)) for number in range(12)])
    rows = load(path, streamed=streamed).train
    lengths = sorted({row["length"] for row in islice(rows, 12)})
    dropped = DroppedRows(tmp_path / "dropped_rows.jsonl")
    limit = lengths[1]
    short, report = prepare_rows(rows, checks.Checks(processor, limit, dropped_rows=dropped))
    kept = [row["row"] for row in islice(short, 6)]
    assert kept == [number for number in range(12) if number % 4 < 2]
    assert [row.row for row in dropped.read()] == [2, 3, 6, 7, 10, 11][: 4 if streamed else 6]
    assert dropped.read()[0].tokens == lengths[2]
    if not streamed:
        assert (report.found, report.too_long, report.valid) == (12, 6, 6) == (12, 6, len(short))
        assert report.bad == 0
        assert report.longest == limit
    with pytest.raises(ValueError, match="no row is left. All are longer than max_length 3"):
        list(islice(prepare_rows(rows, checks.Checks(processor, 3))[0], 1))
    same, _ = prepare_rows(rows, checks.Checks(processor, lengths[-1]), need_images=True)
    assert len(list(islice(same, 12))) == 12


def test_held_out_rows_are_of_the_same_configuration(load, tmp_path):
    parts = {}
    for name in ("first", "other"):
        for split in ("train", "test"):
            row = {**llava("Q", f"{name} {split}"), "image": None}
            file = tmp_path / "data" / name / f"{split}.parquet"
            train_data.write_parquet(file, [row])
            parts.setdefault(name, []).append({"split": split, "path": f"{name}/{file.name}"})
    configs = [{"config_name": name, "data_files": files} for name, files in parts.items()]
    configs[0]["default"] = True
    (tmp_path / "data" / "README.md").write_text(f"---\nconfigs: {json.dumps(configs)}\n---\n")
    data = load(tmp_path / "data", dataset_config="other", with_eval=True)
    assert answers(data.train) == ["other train"] and answers(data.eval) == ["other test"]
    named = load(f"{tmp_path / 'data'}:other:train", with_eval=True)
    assert answers(named.train) == ["other train"] and answers(named.eval) == ["other test"]


def test_a_home_folder_is_found_wherever_a_path_is_given(load, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_json(tmp_path / "rows", [llava("<image>Q", "A", "red.png")])
    images(tmp_path / "shown", "red.png")
    given = {"path": "~/rows/data.json", "image_folder": "~/shown"}
    options = [{"dataset_name": "~/rows/data.json", "image_folder": "~/shown"}]
    options += [{"datasets": [given]}, {"datasets": [given], "streamed": True}]
    for option in options:
        (row,) = islice(load(None, **option).train, 1)
        assert row["images"][0]["path"] == str(tmp_path / "shown" / "red.png")
    held = load(None, datasets=[given], with_eval=True, eval_dataset_name="~/rows/data.json").eval
    assert held[0]["images"][0]["path"] == str(tmp_path / "rows" / "red.png")
    files = DataSource("json", data_files={"train": ["~/rows/data.json"]}, data_dir="~/rows")
    assert files.data_files == {"train": [f"{tmp_path}/rows/data.json"]}
    assert files.data_dir == f"{tmp_path}/rows"
    write_json(tmp_path / "rows", [llava("<image>Q", "A", "~/shown/red.png")])
    (row,) = load(None, **options[0]).train
    assert row["images"][0]["path"] == str(tmp_path / "shown" / "red.png")
    with pytest.raises(ValueError, match="leaves image_folder"):
        load("~/rows/data.json")


def test_a_streamed_source_that_gives_no_row_is_named_alone(load, tmp_path):
    good, empty, dropped = sources(tmp_path, 0.5, a=2, empty=0, dropped=1)
    write_json(tmp_path / "a", [llava("<image>Q", "a0", "red.png")])  # and others are looked at too
    write_json(tmp_path / "dropped", [llava("Q", "")])
    options = {"bad_rows": "skip", "dataset_streaming": True}
    with pytest.raises(ValueError, match=f"^{empty['path']}: no row .* or all are dropped.$"):
        list(islice(load(None, datasets=[good, empty], **options).train, 100))
    with pytest.raises(ValueError, match=f"^Rows .*:\n  {dropped['path']}, row 0: .*\nFix them.$"):
        load(None, datasets=[good, dropped], **options)


@pytest.mark.parametrize("streamed", [False, True])
def test_nothing_is_held_out_where_nothing_is_evaluated(load, tmp_path, streamed):
    (only,) = sources(tmp_path, a=8)
    data = load(only["path"], streamed=streamed, test_split_size=0.25)
    assert {*answers(islice(data.train, 8))} == {f"a{n}" for n in range(8)}
    assert data.eval is None and len(data.report.sources) == 1


def test_what_is_held_out_is_not_reported_as_used(load, tmp_path):
    mixed = sources(tmp_path, 1, a=30, b=10)
    data = load(None, datasets=mixed, with_eval=True, test_split_size=0.25)
    first, second, held = data.report.sources
    trained = answers(data.train)
    out = answers(data.eval)
    assert [first.used, second.used] == [sum(text[0] == name for text in trained) for name in "ab"]
    assert first.used + second.used == 15 and first.valid == 30 and len({*trained, *out}) == 20
    assert (held.source, held.found, held.used) == ("held out of training", 5, 5)
    assert held.split == "eval" and held.longest == max(data.eval["length"])


def test_images_of_held_out_rows_are_decoded_first(load, tmp_path, monkeypatch):
    monkeypatch.setattr(table, "MANY_ROWS", 20)  # fewer are opened of training rows, none of these
    bad = sorted({*range(100)} - {*np.random.default_rng(0).choice(100, 20, replace=False)})[::3]
    path = with_broken(tmp_path / "data", "json", 100, bad)
    other = write_json(tmp_path / "other", mixed_rows())
    held_out = {"eval_dataset_name": str(path)}
    dropped = DroppedRows(tmp_path / "dropped_rows.jsonl")
    for trained, options in ((other, held_out), (path, {"test_split_size": 0.5})):
        with pytest.raises(ValueError, match="row [0-9]+: .* truncated"):
            load(trained, with_eval=True, bad_rows="stop", **options)
        data = load(trained, with_eval=True, bad_rows="skip", dropped_rows=dropped, **options)
        held = data.report.sources[-1]
        assert held.valid == len(data.eval) and held.bad == held.found - held.valid > 0
        assert all(int(answer) not in bad for answer in answers(data.eval))
    assert [row.row for row in dropped.read()] == bad
