"""`normalign data` says before training: counts, every fault, and what of a row is learned."""

import json
import re

import numpy as np
import pytest
import tiny
import tiny_parts
import train_data
import training
from chat_families import TEMPLATES, byte_tokenizer
from click.testing import Result
from paths import DOCS
from train_data import assistant, image_bytes, inside, llava, mixed_rows, read, user, write_json
from training import image as image_of_noise
from typer.testing import CliRunner

from normalign_llava.checkpoint.opening import open_checkpoint
from normalign_llava.cli import app
from normalign_llava.data.rows import checks
from normalign_llava.data.rows.checks import SourceReport
from normalign_llava.data.rows.parse import parse_row
from normalign_llava.data.sources import table
from normalign_llava.data.sources.arguments import DataSource
from normalign_llava.train.collator import ConversationCollator
from normalign_llava.train.data_check import DataCheck, _example, check_data


pytestmark = pytest.mark.usefixtures("cache")


def command(*words) -> Result:
    """Runs `normalign data` in a terminal of 200 columns."""
    command_line = ["data"]
    for argument in words:
        command_line.append(str(argument))
    return CliRunner().invoke(app, command_line, env={"COLUMNS": "200"})


def check(data_path, checkpoint=None, **options) -> DataCheck:
    model = None
    if checkpoint is not None:
        model = str(checkpoint)
    return check_data(DataSource(str(data_path)), model, **options)


def learned_pieces(pieces) -> list[str]:
    return [text for text, is_learned in pieces if is_learned]


def set_many_rows(monkeypatch, many_rows: int) -> None:
    """Only a sample of the images is opened if there are more rows than this."""
    monkeypatch.setattr(checks, "MANY_ROWS", many_rows)
    monkeypatch.setattr(table, "MANY_ROWS", many_rows)


def test_counts_and_lengths_are_the_same_as_in_training(tmp_path, checkpoint):
    data_path = write_json(tmp_path, mixed_rows())
    checked = check(data_path, checkpoint)
    training_data = read(data_path, open_checkpoint(checkpoint).processor)
    (expected,) = training_data.report.sources
    expected.skippable = 0  # only training sets it
    assert checked.report == expected
    assert expected.found == 5
    assert checked.faults == []


def test_the_marked_text_is_what_the_collator_labels(tmp_path, checkpoint):
    prompt_row = {
        "image": "red.png",
        "prompt": "Which?",
        "completion": "A red one. ",
    }
    data_path = write_json(tmp_path, [llava("No image.", "None."), prompt_row])
    processor = open_checkpoint(checkpoint).processor
    train_rows = read(data_path, processor).train
    batch = ConversationCollator(processor)([train_rows[1]])
    labels = batch["labels"]
    learned = processor.tokenizer.decode(labels[labels >= 0])
    assert "A red one." in learned

    pieces = check(data_path, checkpoint).examples[0].pieces
    assert learned_pieces(pieces) == [learned]
    image_tokens = int((batch["input_ids"] == processor.image_token_id).sum())
    assert (f"{processor.image_token} x {image_tokens}", False) in pieces

    result = command(data_path, "--model", checkpoint)
    assert result.exit_code == 0
    assert f"[[{learned}]]" in result.output
    assert "Which?" in result.output


def test_every_fault_comes_at_once(tmp_path, checkpoint):
    faulty_rows = [
        llava("Q", ""),
        llava("<image>Q", "A"),
        llava("<image>Q", "A", "none.png"),
        {"a": 1},
        "no row",
        llava("<image>Q", "A", "/etc/passwd"),
        {"messages": "Q"},
        llava("Q", ""),
        llava("Q", "<|im_end|>"),
        {"question": "Q", "answer": {"a": 5}},
        {"question": "Q", "answer": {"a": 6}},
    ]
    data_path = write_json(tmp_path, faulty_rows)
    result = command(data_path, "--model", checkpoint)
    assert result.exit_code == 1
    for number in (0, 1, 2, 3, 4, 5, 6, 8, 9):
        assert f"data.json, row {number}" in result.output
    assert "got {'a': 5} (2 rows)" in result.output
    assert "is empty (2 rows)" in result.output


def test_every_fault_comes_at_once_without_a_checkpoint(tmp_path):
    (tmp_path / "broken.png").write_bytes(image_bytes()[:40])
    good_example = llava("<image>Q", "A", "red.png")
    broken = llava("<image>Q", "A", "broken.png")
    result = command(write_json(tmp_path, [{"a": 1}, good_example, broken]))
    assert "row 0: its form" in result.output
    assert "broken.png: " in result.output


@pytest.mark.parametrize(
    ("file_name", "content", "message"),
    [
        pytest.param(
            "empty.jsonl",
            "",
            "empty.jsonl has no rows.",
            id="a file without rows",
        ),
        pytest.param(
            "unread.jsonl",
            json.dumps({**llava("Q", "A"), "img": "red.png"}),
            "what looks like an image is not read: column img",
            id="a column that is not read",
        ),
        pytest.param(
            "images",
            None,
            "add a metadata.csv with file_name, question and answer",
            id="a folder of images",
        ),
        pytest.param(
            "none.jsonl",
            None,
            "There is no data file",
            id="no file",
        ),
    ],
)
def test_data_without_rows_and_images_that_are_not_read_are_faults(
    tmp_path, file_name, content, message
):
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "red.png").write_bytes(image_bytes())
    if content is not None:
        (tmp_path / file_name).write_text(content)
    result = command(tmp_path / file_name)
    assert result.exit_code == 1
    assert message in result.output


def marked(processor, parsed_row) -> str:
    """The text of a row with what is learned in brackets, token by token."""
    batch = ConversationCollator(processor)([parsed_row])
    token_ids = batch["input_ids"][0].tolist()
    labels = batch["labels"][0].tolist()
    text = ""
    in_brackets = False
    for token_id, label in zip(token_ids, labels, strict=True):
        is_learned = label >= 0
        if is_learned and not in_brackets:
            text += "[["
        if in_brackets and not is_learned:
            text += "]]"
        in_brackets = is_learned
        if token_id != processor.image_token_id:
            text += processor.tokenizer.decode([token_id])
    if in_brackets:
        text += "]]"
    return text


@pytest.fixture
def nine_rows(tmp_path):
    """Row 4 has the only image; row 6 cannot be trained on."""
    raw_rows = [llava(f"Question {number}?", f"answer {number}") for number in range(9)]
    raw_rows[4] = llava("<image>Which?", "red", "red.png")
    raw_rows[6] = llava("Q", "")
    return write_json(tmp_path, raw_rows)


@pytest.mark.parametrize(
    ("options", "expected_numbers"),
    [
        pytest.param({"examples": 4}, [0, 2, 5, 8], id="four examples"),
        pytest.param({"examples": 1}, [4], id="one example"),
        pytest.param({}, [4], id="by default"),
        pytest.param({"rows": [2]}, [2], id="one row"),
        pytest.param({"rows": [8, 4]}, [8, 4], id="two rows"),
    ],
)
def test_several_rows_or_one_of_a_number_are_shown(
    nine_rows, checkpoint, options, expected_numbers
):
    processor = open_checkpoint(checkpoint).processor
    expected = {}
    for parsed_row in read(nine_rows, processor, bad_rows="skip").train:
        expected[parsed_row["row"]] = marked(processor, parsed_row).strip()
    rendered = str(check(nine_rows, checkpoint, **options).rendered())
    text = re.sub(r"<image> x \d+", "", rendered)
    examples = re.findall(r"row (\d+)[^\n]*:\n\n(.*?)(?=\s*data.json, row|\Z)", text, re.S)
    assert [int(number) for number, _ in examples] == expected_numbers
    for number, example in examples:
        assert example.strip() == expected[int(number)]


def test_a_row_that_is_not_trained_on_is_shown_with_the_reason(nine_rows):
    rendered = str(check(nine_rows, rows=[6]).rendered())
    assert "row 6" in rendered
    assert "Not trained on: the answer in turn 1 is empty" in rendered


def test_a_number_beyond_the_rows_is_refused(nine_rows):
    with pytest.raises(ValueError, match="has no row 9. It has 9, from 0 on"):
        check(nine_rows, rows=[9])


@pytest.fixture
def scored_rows(tmp_path):
    raw_rows = []
    for number in range(6):
        raw_rows.append({"question": f"Q{number}", "answer": f"A{number}", "score": number})
    raw_rows[1]["prompt"] = "unused"
    return write_json(tmp_path, raw_rows)


def test_the_command_shows_turns_without_a_checkpoint(scored_rows):
    result = command(scored_rows, "--row", 1, "--row", 4)
    assert result.exit_code == 0, result.output
    assert "row 1:\n\nuser: Q1\nassistant: [[A1]]" in result.output
    assert "user: Q4\nassistant: [[A4]]" in result.output
    assert "Q2" not in result.output
    assert re.search(r"columns not used.*prompt, like a question \(1 row\), score", result.output)


def test_the_command_reads_what_filters_say(scored_rows):
    result = command(scored_rows, "--filters", "score>=4", "--examples", 5)
    assert re.findall(r"assistant: \[\[(A\d)\]\]", result.output) == ["A4", "A5"]


def test_the_command_refuses_a_row_that_is_not_there(scored_rows):
    result = command(scored_rows, "--row", 7)
    assert result.exit_code == 1
    assert "has no row 7" in result.output


def test_the_line_of_the_page_shows_rows_in_python(tmp_path, checkpoint, monkeypatch, capsys):
    page_text = (DOCS / "data.md").read_text()
    (documented_line,) = re.findall(r"`(print\(check_data\(.*?)`", page_text)
    write_json(tmp_path, mixed_rows(), "my-data.json")
    (tmp_path / "my-checkpoint").symlink_to(checkpoint)
    monkeypatch.chdir(tmp_path)
    exec(documented_line, {"check_data": check_data, "DataSource": DataSource})
    printed = capsys.readouterr().out
    assert printed.count("my-data.json, row ") == 5
    assert "[[green" in printed


def cells(data_check: DataCheck) -> dict[str, str]:
    """The rows of its table of two columns."""
    title_column, text_column = data_check.table("my data").columns
    return dict(zip(title_column.cells, text_column.cells, strict=True))


@pytest.fixture
def full_check():
    """A check with every count set."""
    report = SourceReport(
        "data",
        "train",
        found=1234,
        bad=2,
        valid=1232,
        images=1500,
        shortest=3,
        median=7.0,
        longest=1024,
        forms={"few": 2, "most": 1230},
        files={"in/one.json": 1000, "two.json": 234},
    )
    return DataCheck(report, [], would_stop=True, examples=[], has_lengths=True)


def test_the_table_has_every_count(full_check):
    counts = cells(full_check)
    assert counts == {
        "rows": "1,234",
        "in one.json": "1,000",
        "in two.json": "234",
        "that cannot be trained on": "2",
        "of the form most": "1,230",
        "of the form few": "2",
        "images in the others": "1,500",
        "lengths": "3 to 1,024 tokens, median 7",
    }
    commonest_first = [*counts][4:6]
    assert commonest_first == ["of the form most", "of the form few"]


def test_the_table_says_that_training_skips_bad_rows(full_check):
    full_check.would_stop = False
    bad_rows = cells(full_check)["that cannot be trained on"]
    assert bad_rows.startswith("2 (")
    assert "skips" in bad_rows
    full_check.report.bad = 0
    assert cells(full_check)["that cannot be trained on"] == "0"


def test_the_table_says_how_tokens_are_counted(full_check):
    full_check.has_lengths = False
    assert "--model" in cells(full_check)["lengths"]


@pytest.mark.parametrize("has_lengths", [True, False])
def test_the_table_has_no_lengths_without_valid_rows(full_check, has_lengths):
    full_check.has_lengths = has_lengths
    full_check.report.valid = 0
    assert cells(full_check)["lengths"] == "none"


def test_the_table_says_what_is_not_read(full_check):
    full_check.report.left_out = {"score": 5}
    full_check.report.changed = {"it was cut": 3}
    full_check.report.images = None
    counts = cells(full_check)
    assert counts["images in the others"] == "0"
    assert "score" in counts["columns not used"]
    assert "it was cut" in counts["note"]


@pytest.mark.parametrize(("bad", "stops"), [(1, False), (2, False), (3, True)])
def test_of_many_rows_training_skips_a_hundredth(tmp_path, monkeypatch, bad, stops):
    set_many_rows(monkeypatch, 150)
    raw_rows = [llava(f"Question {number}?", "yes") for number in range(200)]
    for number in range(bad):
        raw_rows[10 * number] = llava("Q", "")
    data_path = write_json(tmp_path, raw_rows)
    checked = check(data_path)
    assert checked.would_stop == stops
    (fault_message,) = checked.faults
    assert ("a share of 0.01 may be bad" in fault_message) == stops
    result = command(data_path)
    assert result.exit_code == int(stops)
    assert "row 0: " in result.output


def test_every_image_is_opened_if_that_is_asked_for(tmp_path, monkeypatch, checkpoint):
    set_many_rows(monkeypatch, 100)
    monkeypatch.setattr(checks, "DEFAULT_SHARE", 0.1)
    sample = np.random.default_rng(0).choice(np.arange(120), 100, replace=False)
    unopened = int(np.setdiff1d(np.arange(120), sample)[0])
    raw_rows = [llava("<image>Q", "A", "red.png") for _ in range(120)]
    raw_rows[unopened]["image"] = "broken.png"
    data_path = write_json(tmp_path, raw_rows)
    whole_image = image_of_noise(1)
    (tmp_path / "broken.png").write_bytes(whole_image[: len(whole_image) // 2])
    assert check(data_path).faults == []
    (fault_message,) = check(data_path, check_images=True).faults
    assert f"row {unopened}: " in fault_message
    assert "broken.png" in fault_message
    (example,) = check(data_path, checkpoint, rows=[unopened]).examples
    assert "broken.png" in example.title
    assert learned_pieces(example.pieces) == []


def test_captions_are_warned_of(tmp_path, caplog):
    data_path = write_json(tmp_path, [{"image": "red.png", "caption": "A red square."}])
    assert check(data_path).faults == []
    assert "captions are trained as answers" in caplog.text
    assert str(data_path) in caplog.text


def test_a_checkpoint_that_is_not_there_is_named(tmp_path):
    data_path = write_json(tmp_path, [{"image": "red.png", "caption": "A red square."}])
    with pytest.raises(ValueError, match="none .*normalign build"):
        check(data_path, tmp_path / "none")


def test_an_image_in_a_row_has_no_name_and_the_first_token_of_all_may_be_learned():
    processor = train_data.processor(byte_tokenizer(), TEMPLATES["smollm2"])
    first_letter = processor.tokenizer.decode([0])
    assert first_letter.strip()
    parsed = parse_row(llava("<image>Q", first_letter, inside("red")))
    sample_row = {**training.row(3), **parsed}
    example = _example(sample_row, ConversationCollator(processor))
    assert example.title == "tiny, row 3"
    learned = "".join(learned_pieces(example.pieces))
    assert learned.startswith(first_letter)
    assert len(learned) > 1


def test_turns_are_shown_with_images_in_their_places_and_what_is_learned_marked(tmp_path):
    question = [
        {"type": "text", "text": "Compare "},
        {"type": "image"},
        {"type": "image"},
    ]
    sample_row = {
        "images": ["red.png", "sub/blue.png"],
        "prompt": [user(question), assistant("first"), user("and now?")],
        "completion": [assistant("second")],
    }
    data_path = write_json(tmp_path, [sample_row])
    (example,) = check(data_path, rows=[0]).examples
    assert example.title == "data.json, row 0 (red.png, blue.png)"
    text = "".join(piece_text for piece_text, _ in example.pieces)
    assert text.splitlines() == [
        "user: Compare <image><image>",
        "assistant: first",
        "user: and now?",
        "assistant: second",
    ]
    assert learned_pieces(example.pieces) == ["second"]


def test_what_is_learned_is_underlined_in_a_terminal_and_rows_are_apart(tmp_path):
    data_path = write_json(tmp_path, [llava("what?", "this"), llava("and?", "that")])
    checked = check(data_path, rows=[0, 1])
    text = checked.rendered(terminal=True)
    underlined = []
    for span in text.spans:
        assert "underline" in span.style
        underlined.append(text.plain[span.start : span.end])
    assert underlined == ["this", "that"]
    assert "[[" not in text.plain
    rendered = str(checked.rendered())
    assert rendered.replace("[[", "").replace("]]", "") == text.plain
    assert not rendered.startswith("\n")
    assert rendered.count("\n\ndata.json, row 1:") == 1


def test_without_a_checkpoint_there_is_no_example(tmp_path):
    data_path = write_json(tmp_path, [llava("what?", "this"), llava("and?", "that")])
    checked = check(data_path)
    assert checked.examples == []


@pytest.fixture
def two_files(tmp_path):
    """A folder of two files of two rows without images; the last row cannot be trained on."""
    folder = tmp_path / "data"
    write_json(folder, [llava("one?", "1"), llava("two?", "2")], "a.jsonl")
    write_json(folder, [llava("three?", "3"), llava("", "")], "b.jsonl")
    for image_path in folder.rglob("*.png"):
        image_path.unlink()
    return folder


def test_a_number_stands_for_a_row_in_each_file(two_files):
    examples = check(two_files, rows=[0]).examples
    titles = [example.title for example in examples]
    assert titles == ["a.jsonl, row 0", "b.jsonl, row 0"]
    good_example, bad_example = check(two_files, rows=[1]).examples
    assert good_example.title == "a.jsonl, row 1"
    assert bad_example.title == "b.jsonl, row 1"
    text, is_learned = bad_example.pieces[0]
    assert text.startswith("Not trained on: ")
    assert not is_learned


def test_the_first_row_is_shown_if_none_has_an_image(two_files, checkpoint):
    examples = check(two_files, checkpoint).examples
    assert examples[0].title == "a.jsonl, row 0"


def test_no_row_is_shown_if_none_can_be_trained_on(tmp_path, checkpoint):
    data_path = tmp_path / "bad.jsonl"
    data_path.write_text(json.dumps(llava("", "")))
    assert check(data_path, checkpoint).examples == []


def test_a_checkpoint_of_another_kind_counts_no_tokens(tmp_path):
    llava_folder = tiny_parts.llava(tmp_path / "llava", tiny.llava())
    data_path = write_json(tmp_path, mixed_rows())
    with pytest.raises(ValueError, match="is a 'llava' model"):
        check(data_path, llava_folder)
