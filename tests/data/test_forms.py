"""Data in every form that docs/data.md shows, read as for training and for diagnosing."""

import json
import re
from itertools import islice
from typing import NamedTuple

import paths
import pytest
from datasets import Dataset, DatasetDict
from train_data import answers, assistant, image_bytes, images, llava, read, user, write_json

from normalign_llava.data.rows.checks import Checks
from normalign_llava.data.rows.forms import PROMPT, ROW_FORMS
from normalign_llava.data.rows.images import decode_image
from normalign_llava.data.sources.files import READERS
from normalign_llava.data.sources.mixtures import prepare_rows
from normalign_llava.diagnose.data import load_samples


RED = (255, 0, 0)
DOCS = (paths.DOCS / "data.md").read_text()


class Example(NamedTuple):
    """A block of code in docs/data.md. Some have a file name after their language."""

    language: str
    file_name: str
    text: str

    @property
    def has_options(self) -> bool:
        return "choices" in self.text

    def file_in(self, folder):
        if self.file_name:
            return folder / self.file_name
        if self.language == "csv":
            return folder / "data.csv"
        return folder / "data.jsonl"

    def question(self) -> str:
        question = "What is flying?"
        if self.language == "json" and question not in self.text:
            question = PROMPT
        if "Picture 1" in self.text:
            question = f"Picture 1: \n{question}"
        if self.has_options:
            question += "\nA. a kite\nB. a bird"
        return question

    def answer(self) -> str:
        if self.has_options:
            return "A"
        return "A red kite."


CODE_BLOCKS = re.findall(r"```(json|csv|python)(?: (\S+))?\n(.*?)```", DOCS, re.DOTALL)
EXAMPLES = [Example(*block) for block in CODE_BLOCKS]


def examples_in(*languages) -> list:
    return [
        pytest.param(example, id=f"{example.language}-{number}")
        for number, example in enumerate(EXAMPLES)
        if example.language in languages
    ]


def printed_turns(row) -> list[tuple[str, str]]:
    """Returns role and text of each turn of a parsed row."""
    turns = []
    for turn in row["messages"]:
        texts = [part["text"] or "" for part in turn["content"]]
        turns.append((turn["role"], "".join(texts)))
    return turns


def printed_question(row) -> str:
    _, text = printed_turns(row)[0]
    return text


def test_every_form_has_an_example():
    columns = set()
    for example in EXAMPLES:
        if example.language == "json":
            columns |= json.loads(example.text).keys()
    for form in ROW_FORMS[:-1]:  # The last is only an image, and cannot be trained on.
        first_column = form[0] or form[1]
        assert first_column in columns


def test_the_page_has_examples_in_every_language():
    assert {example.language for example in EXAMPLES} == {"json", "csv", "python"}
    assert len(EXAMPLES) >= 14


@pytest.mark.parametrize("suffix", READERS)
def test_the_page_names_every_suffix(suffix):
    assert suffix in DOCS


@pytest.fixture
def kite_folder(tmp_path):
    """A folder with images, the kite being red."""
    folder = tmp_path / "mine"
    images(folder)
    (folder / "kite.png").write_bytes(image_bytes("red"))
    return folder


def assert_is_read(processor, data_path, example):
    """The file has the example's row, in memory and as a stream. Returns the row."""
    (parsed_row,) = read(data_path, processor).train
    question = example.question()
    assert printed_turns(parsed_row) == [("user", question), ("assistant", example.answer())]
    assert parsed_row["image_count"] == 1
    (image,) = parsed_row["images"]
    assert decode_image(image).getpixel((3, 3)) == RED

    stream = read(data_path, processor, streamed=True).train
    assert next(iter(stream)) == parsed_row

    for data_name in (str(data_path), str(data_path.parent)):
        (shown_sample,) = load_samples(data_name, 1).samples
        assert shown_sample.question == question
        assert shown_sample.image.getpixel((3, 3)) == RED
    return parsed_row


@pytest.mark.parametrize("example", examples_in("json", "csv"))
def test_the_files_of_the_page_are_read(example, processor, kite_folder):
    data_path = example.file_in(kite_folder)
    data_path.write_text(example.text)
    assert_is_read(processor, data_path, example)


@pytest.mark.parametrize("example", examples_in("python"))
def test_the_code_of_the_page_makes_data_that_are_read(
    example, processor, kite_folder, monkeypatch
):
    monkeypatch.chdir(kite_folder)
    variables = {}
    exec(example.text, variables)
    dataset = variables["data"]
    prepared_rows, _ = prepare_rows(dataset, Checks(processor))
    (prepared_row,) = prepared_rows

    data_path = kite_folder / "data.parquet"
    dataset.to_parquet(str(data_path))
    parsed_row = assert_is_read(processor, data_path, example)
    assert {**prepared_row, "source": parsed_row["source"]} == parsed_row


@pytest.fixture
def split_folder(tmp_path):
    """A folder with the folders train and test, each with one row and its image."""
    folder = tmp_path / "mine"
    for split_name, colour in (("train", "red"), ("test", "blue")):
        images(folder / split_name, f"{colour}.png")
        sample_row = {
            "file_name": f"{colour}.png",
            "question": f"{split_name}?",
            "answer": colour,
        }
        (folder / split_name / "metadata.jsonl").write_text(json.dumps(sample_row))
    return folder


def assert_training_and_diagnosing_read(processor, data, question, image_folder=None):
    """Both have one row, with this question, and the same image."""
    (parsed_row,) = read(data, processor, image_folder=image_folder).train
    (shown_sample,) = load_samples(str(data), 1, image_folder=image_folder).samples
    assert printed_question(parsed_row) == question
    assert shown_sample.question == question
    assert parsed_row["images"][0] == dict(shown_sample.stored)


def test_training_and_diagnosing_read_the_split_for_training(processor, split_folder):
    assert_training_and_diagnosing_read(processor, split_folder, "train?")


def test_training_and_diagnosing_read_a_named_split(processor, split_folder):
    assert_training_and_diagnosing_read(processor, f"{split_folder}:test", "test?")


def test_training_and_diagnosing_read_a_saved_data_set_with_an_image_folder(processor, tmp_path):
    sample_row = {
        "image": "sub/green.png",
        "question": "saved?",
        "answer": "A",
    }
    saved_dataset = Dataset.from_list([sample_row])
    DatasetDict(train=saved_dataset, test=saved_dataset).save_to_disk(str(tmp_path / "saved"))
    image_folder = tmp_path / "there"
    images(image_folder, "sub/green.png")
    assert_training_and_diagnosing_read(
        processor, f"{tmp_path}/saved:test", "saved?", str(image_folder)
    )


def test_another_split_is_held_out(processor, split_folder):
    training_data = read(
        f"{split_folder}:train",
        processor,
        eval_dataset_name=f"{split_folder}:test",
        with_eval=True,
    )
    (train_row,) = training_data.train
    (eval_row,) = training_data.eval
    assert printed_question(train_row) == "train?"
    assert printed_question(eval_row) == "test?"


def test_an_unknown_split_is_refused_with_the_known_ones(processor, split_folder):
    with pytest.raises(ValueError, match="no file in .*mine has 'dev' in its name: test/"):
        read(f"{split_folder}:dev", processor)


def test_folders_that_are_not_splits_are_refused(processor, split_folder):
    for split_name in ("train", "test"):
        (split_folder / split_name).rename(split_folder / f"of {split_name}ers")
    with pytest.raises(ValueError, match="in several folders. Name one: .*testers, .*trainers"):
        read(split_folder, processor)


OWN_ROWS = [
    {
        "path": "sub/red.png",
        "asked": "Q",
        "caption": "one",
        "image": "none.png",
    },
    {
        "asked": "Q2",
        "caption": "two",
        "image": "none.png",
    },
]
RENAMED = {
    "image": "path",
    "question": "asked",
    "answer": "caption",
}


@pytest.fixture(params=["jsonl", "parquet", "saved"])
def own_path(request, tmp_path):
    """The rows with columns of their own, in several formats."""
    images(tmp_path / "sub", "red.png")
    data_path = tmp_path / f"own.{request.param}"
    if request.param == "jsonl":
        lines = [json.dumps(own_row) for own_row in OWN_ROWS]
        data_path.write_text("\n".join(lines))
    elif request.param == "parquet":
        Dataset.from_list(OWN_ROWS).to_parquet(str(data_path))
    else:
        Dataset.from_list(OWN_ROWS).save_to_disk(str(data_path))
    return data_path


@pytest.fixture(params=[False, True], ids=["in memory", "streamed"])
def read_own(request, own_path, processor, tmp_path):
    def read_with(columns):
        training_data = read(
            own_path,
            processor,
            columns=columns,
            streamed=request.param,
            image_folder=str(tmp_path),
        )
        return list(islice(training_data.train, 2))

    return read_with


def test_columns_may_have_other_names(read_own, tmp_path):
    first_row, second_row = read_own("image=path,question=asked,answer=caption")
    assert printed_turns(first_row) == [("user", "Q"), ("assistant", "one")]
    assert printed_turns(second_row) == [("user", "Q2"), ("assistant", "two")]
    image_paths = [image["path"] for image in first_row["images"]]
    assert image_paths == [str(tmp_path / "sub/red.png")]
    assert second_row["images"] == []

    assert read_own(RENAMED) == [first_row, second_row]


def test_rows_with_other_columns_are_not_taken_from_the_cache(read_own):
    assert answers(read_own(RENAMED)) == ["one", "two"]
    assert answers(read_own(RENAMED | {"answer": "asked"})) == ["Q", "Q2"]


def test_a_column_that_no_row_has_is_refused(read_own):
    with pytest.raises(ValueError, match="'paht', but the columns of the data are: .*asked"):
        read_own({"image": "paht"})
    with pytest.raises(ValueError, match="columns names 'none', but"):
        read_own(["caption", "none"])


@pytest.mark.parametrize("wrong", ["image", "image=", "img=path", {"image": 3}])
def test_columns_are_pairs_of_names(read_own, wrong):
    with pytest.raises(ValueError, match="columns (must be pairs|names 'img', but known)"):
        read_own(wrong)


def test_a_mixture_takes_names_of_columns(processor, tmp_path):
    own_path = write_json(tmp_path, [{**OWN_ROWS[0], "path": "red.png"}])
    other_path = write_json(tmp_path / "b", [llava("Q", "A")])
    datasets = [
        {"path": str(own_path), "columns": RENAMED},
        {"path": str(other_path)},
    ]
    training_data = read(None, processor, datasets=datasets)
    assert answers(training_data.train) == ["one", "A"]


def test_diagnosing_takes_names_of_columns(tmp_path):
    own_path = write_json(tmp_path, [{**OWN_ROWS[0], "path": "red.png"}])
    (shown_sample,) = load_samples(str(own_path), 1, columns="image=path,question=asked").samples
    assert shown_sample.question == "Q"
    assert shown_sample.image.getpixel((3, 3)) == RED


WITHOUT_IMAGE = llava("Q", "A")
WITH_IMAGE = llava("<image>Q2", "A2", "red.png")


@pytest.mark.parametrize("streamed", [False, True])
def test_align_without_an_image_is_an_error(processor, tmp_path, streamed):
    data_path = write_json(tmp_path, [WITHOUT_IMAGE])
    with pytest.raises(ValueError, match="data.json.* have no image. .* nothing .* stage align"):
        read(
            data_path,
            processor,
            need_images=True,
            streamed=streamed,
        )


@pytest.mark.parametrize("streamed", [False, True])
def test_other_stages_need_no_image(processor, tmp_path, streamed):
    data_path = write_json(tmp_path, [WITHOUT_IMAGE])
    train_rows = read(data_path, processor, streamed=streamed).train
    assert len(list(islice(train_rows, 1))) == 1


@pytest.mark.parametrize("streamed", [False, True])
def test_align_needs_an_image_only_in_some_rows(processor, tmp_path, streamed):
    text_path = write_json(tmp_path, [WITHOUT_IMAGE])
    mixed_path = write_json(tmp_path, [WITHOUT_IMAGE, WITH_IMAGE], "other.json")
    mixed_rows = read(
        mixed_path,
        processor,
        need_images=True,
        streamed=streamed,
    ).train
    assert len(list(islice(mixed_rows, 2))) == 2

    datasets = [
        {"path": str(text_path), "fraction": 1},
        {"path": str(mixed_path), "fraction": 1},
    ]
    mixture = read(
        None,
        processor,
        datasets=datasets,
        need_images=True,
        streamed=streamed,
    ).train
    assert len(list(islice(mixture, 2))) == 2


OPEN_TEXT = {
    "question": "Q",
    "answer": "A",
    "image": None,
}
OPEN_IMAGE = {**OPEN_TEXT, "image": {"path": None, "bytes": image_bytes()}}


@pytest.fixture(params=[False, True], ids=["in memory", "streamed"])
def prepare_open(request, processor):
    """Prepares rows of a data set that is open."""

    def prepare(rows, **options):
        dataset = Dataset.from_list(rows)
        if request.param:
            dataset = dataset.to_iterable_dataset()
        return prepare_rows(dataset, Checks(processor), name="mine", **options)

    return prepare


def test_open_data_need_an_image_if_asked(prepare_open):
    with pytest.raises(ValueError, match="mine have no image. .* stage align"):
        prepare_open([OPEN_TEXT], need_images=True)


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        pytest.param([OPEN_TEXT], {}, id="not-asked"),
        pytest.param([OPEN_TEXT, OPEN_IMAGE], {"need_images": True}, id="asked"),
    ],
)
def test_open_data_are_prepared(prepare_open, rows, options):
    prepared_rows, report = prepare_open(rows, split="eval", **options)
    assert len(list(prepared_rows)) == len(rows)
    assert report.split == "eval"


def test_what_was_changed_in_open_data_is_reported(processor, caplog):
    messages = [
        assistant("Hello."),
        user("Q"),
        assistant("A"),
    ]
    dataset = Dataset.from_list([{"messages": messages}])
    prepare_rows(dataset, Checks(processor), name="mine")
    assert "mine: note: a leading assistant turn is left out (1 row)" in caplog.text


UNREAD = {
    "column img": {"img": "red.png", **llava("Q", "A")},
    "column photo_urls": {"photo_urls": ["http://host/red"], **llava("Q", "A")},
    "column image_id": {
        "question": "Q",
        "answer": "A",
        "image_id": 458752,
    },  # VQA's own JSON
    "column imageId": {**llava("Q", "A"), "imageId": 7},
    "column seen": {"seen": "https://host/red.JPG?size=3", **llava("Q", "A")},
    "column drawing": {"drawing": f"data:image/png;base64,{'A' * 100}", **llava("Q", "A")},
    "text <image_1>": llava("What is in <image_1>?", "A"),
    "text <|image 2|>": llava("Is <|image 2|> red?", "A"),
    "text <Image>": llava("<Image>\nWhat?", "A"),
    "text [IMG]": llava("[IMG] What?", "A"),
}
UNREAD_CASES = [(unread, False) for unread in UNREAD] + [("column img", True)]


@pytest.mark.parametrize(("unread", "streamed"), UNREAD_CASES)
def test_what_looks_like_an_image_in_all_rows_is_an_error(unread, streamed, processor, tmp_path):
    data_path = write_json(tmp_path, [UNREAD[unread]] * 3)
    reason = f"data.json: what .* is not read: {re.escape(unread)} .3 rows.. No other image"
    with pytest.raises(ValueError, match=reason):
        read(data_path, processor, streamed=streamed)


@pytest.mark.parametrize(("unread", "streamed"), UNREAD_CASES)
def test_what_looks_like_an_image_in_some_rows_is_a_warning(
    unread, streamed, processor, tmp_path, caplog
):
    file_name = f"{streamed}.json"  # A warning is given once for each data set.
    raw_rows = [UNREAD[unread], WITH_IMAGE, llava("Q", "B")]
    data_path = write_json(tmp_path, raw_rows, file_name)
    list(islice(read(data_path, processor, streamed=streamed).train, 3))
    assert f"{file_name}: what looks like an image is not read: {unread}" in caplog.text
