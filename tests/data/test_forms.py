"""Data in every form that docs/data.md shows, read as for training and for diagnosing."""

import json
import re
from itertools import islice, product

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


DOCS = (paths.DOCS / "data.md").read_text()
EXAMPLES = re.findall(r"```(json|csv|python)(?: (\S+))?\n(.*?)```", DOCS, re.DOTALL)
QUESTION = "What is flying?"
ANSWER = "A red kite."


def said(row) -> list[tuple[str, str]]:
    turns = ((turn["role"], turn["content"]) for turn in row["messages"])
    return [(role, "".join(part["text"] or "" for part in parts)) for role, parts in turns]


def test_every_form_has_an_example():
    shown = [json.loads(text).keys() for kind, _, text in EXAMPLES if kind == "json"]
    for form in ROW_FORMS[:-1]:  # the last is an image alone, which cannot be trained on
        assert any((form[0] or form[1]) in row for row in shown), form
    assert {kind for kind, *_ in EXAMPLES} == {"json", "csv", "python"} and len(EXAMPLES) >= 14
    assert all(suffix in DOCS for suffix in READERS)


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_the_pages_examples_are_read(example, processor, tmp_path, monkeypatch):
    kind, name, text = example
    folder = tmp_path / "mine"
    images(folder)
    (folder / "kite.png").write_bytes(image_bytes("red"))
    if kind == "python":
        monkeypatch.chdir(folder)
        made = {}
        exec(text, made)
        prepared = list(prepare_rows(made["data"], Checks(processor))[0])
        made["data"].to_parquet("data.parquet")
        path = folder / "data.parquet"
    else:
        path = folder / (name or f"data.{'csv' if kind == 'csv' else 'jsonl'}")
        path.write_text(text)
    (row,) = read(path, processor).train
    captioned = kind == "json" and not re.search("What is flying", text)
    image_number = "Picture 1: \n" if "Picture 1" in text else ""
    options, answer = ("\nA. a kite\nB. a bird", "A") if "choices" in text else ("", ANSWER)
    asked = image_number + (PROMPT if captioned else QUESTION) + options
    assert said(row) == [("user", asked), ("assistant", answer)]
    assert row["image_count"] == len(row["images"]) == 1
    assert decode_image(row["images"][0]).getpixel((3, 3)) == (255, 0, 0)
    assert list(islice(read(path, processor, streamed=True).train, 1)) == [row]
    for data in {str(path), str(folder)}:
        (sample,) = load_samples(data, 1).samples
        assert sample.question == said(row)[0][1] and sample.image.getpixel((3, 3)) == (255, 0, 0)
    if kind == "python":
        assert [{**made, "source": row["source"]} for made in prepared] == [row]


def test_splits_and_image_folder_are_the_same_for_training_and_diagnosing(processor, tmp_path):
    mine = tmp_path / "mine"
    for split, colour in (("train", "red"), ("test", "blue")):
        images(mine / split, f"{colour}.png")
        row = {"file_name": f"{colour}.png", "question": f"{split}?", "answer": colour}
        (mine / split / "metadata.jsonl").write_text(json.dumps(row))
    saved = Dataset.from_list([{"image": "sub/green.png", "question": "saved?", "answer": "A"}])
    DatasetDict(train=saved, test=saved).save_to_disk(str(tmp_path / "saved"))
    images(tmp_path / "there", "sub/green.png")
    for data, folder, question in (
        (mine, None, "train?"),
        (f"{mine}:test", None, "test?"),
        (f"{tmp_path}/saved:test", str(tmp_path / "there"), "saved?"),
    ):
        (row,) = read(data, processor, image_folder=folder).train
        (sample,) = load_samples(str(data), 1, image_folder=folder).samples
        assert said(row)[0][1] == sample.question == question
        assert dict(sample.stored) == row["images"][0]
    data = read(f"{mine}:train", processor, eval_dataset_name=f"{mine}:test", with_eval=True)
    assert [said(row)[0][1] for row in (*data.train, *data.eval)] == ["train?", "test?"]
    with pytest.raises(ValueError, match="no file in .*mine has 'dev' in its name: test/"):
        read(f"{mine}:dev", processor)
    for split in ("train", "test"):
        (mine / split).rename(mine / f"of {split}ers")
    with pytest.raises(ValueError, match="in several folders. Name one: .*testers, .*trainers"):
        read(mine, processor)


OWN = [{"path": "sub/red.png", "asked": "Q", "caption": "one", "image": "none.png"}]
OWN += [{"asked": "Q2", "caption": "two", "image": "none.png"}]
RENAMED = {"image": "path", "question": "asked", "answer": "caption"}


@pytest.mark.parametrize("form", ["jsonl", "parquet", "saved"])
@pytest.mark.parametrize("streaming", [False, True])
def test_columns_have_names_of_ones_own(processor, tmp_path, form, streaming):
    images(tmp_path / "sub", "red.png")
    path = tmp_path / f"own.{form}"
    if form == "jsonl":
        path.write_text("\n".join(map(json.dumps, OWN)))
    elif form == "parquet":
        Dataset.from_list(OWN).to_parquet(str(path))
    else:
        Dataset.from_list(OWN).save_to_disk(str(path))
    options = {"streamed": streaming, "image_folder": str(tmp_path)}

    def rows(**columns):
        return list(islice(read(path, processor, **columns, **options).train, 2))

    named = rows(columns="image=path,question=asked,answer=caption")
    assert [[text for _, text in said(row)] for row in named] == [["Q", "one"], ["Q2", "two"]]
    shown = [[image["path"] for image in row["images"]] for row in named]
    assert shown == [[str(tmp_path / "sub/red.png")], []] and rows(columns=RENAMED) == named
    assert answers(rows(columns=RENAMED | {"answer": "asked"})) == ["Q", "Q2"]  # nothing cached
    with pytest.raises(ValueError, match="'paht', but the columns of the data are: .*asked"):
        rows(columns={"image": "paht"})
    with pytest.raises(ValueError, match="columns names 'none', but"):
        rows(columns=["caption", "none"])
    for wrong in ("image", "image=", "img=path", {"image": 3}):
        with pytest.raises(ValueError, match="columns (must be pairs|names 'img', but known)"):
            rows(columns=wrong)


def test_a_mixture_and_diagnosing_take_names_of_columns(processor, tmp_path):
    path = write_json(tmp_path, [{**OWN[0], "path": "red.png"}])
    other = write_json(tmp_path / "b", [llava("Q", "A")])
    listed = [{"path": str(path), "columns": RENAMED}, {"path": str(other)}]
    assert answers(read(None, processor, datasets=listed).train) == ["one", "A"]
    (sample,) = load_samples(str(path), 1, columns="image=path,question=asked").samples
    assert sample.question == "Q" and sample.image.getpixel((3, 3)) == (255, 0, 0)


@pytest.mark.parametrize("streamed", [False, True])
def test_align_without_an_image_is_an_error(processor, tmp_path, streamed):
    path = write_json(tmp_path, [llava("Q", "A")])
    with pytest.raises(ValueError, match="data.json.* have no image. .* nothing .* stage align"):
        read(path, processor, need_images=True, streamed=streamed)
    assert len(list(islice(read(path, processor, streamed=streamed).train, 1))) == 1
    shown = [llava("Q", "A"), llava("<image>Q2", "A2", "red.png")]
    other = write_json(tmp_path, shown, "other.json")
    read(other, processor, need_images=True, streamed=streamed)
    listed = [{"path": str(file), "fraction": 1} for file in (path, other)]
    read(None, processor, datasets=listed, need_images=True, streamed=streamed)


@pytest.mark.parametrize("streamed", [False, True])
def test_data_that_are_open_need_an_image_if_that_is_asked_for(processor, caplog, streamed):
    def prepared(rows, **options):
        data = Dataset.from_list(rows)
        data = data.to_iterable_dataset() if streamed else data
        return prepare_rows(data, Checks(processor), name="mine", **options)

    text = {"question": "Q", "answer": "A", "image": None}
    shown = {**text, "image": {"path": None, "bytes": image_bytes()}}
    with pytest.raises(ValueError, match="mine have no image. .* stage align"):
        prepared([text], need_images=True)
    for rows, options in (([text], {}), ([text, shown], {"need_images": True})):
        made, report = prepared(rows, split="eval", **options)
        assert len(list(made)) == len(rows) and report.split == "eval"


def test_what_was_changed_in_data_that_are_open_is_told(processor, caplog):
    said = [assistant("Hello."), user("Q"), assistant("A")]
    prepare_rows(Dataset.from_list([{"messages": said}]), Checks(processor), name="mine")
    assert "mine: note: a leading assistant turn is left out (1 row)" in caplog.text


UNREAD = {
    "column img": {"img": "red.png", **llava("Q", "A")},
    "column photo_urls": {"photo_urls": ["http://host/red"], **llava("Q", "A")},
    "column image_id": {"question": "Q", "answer": "A", "image_id": 458752},  # VQA's own JSON
    "column imageId": {**llava("Q", "A"), "imageId": 7},
    "column seen": {"seen": "https://host/red.JPG?size=3", **llava("Q", "A")},
    "column drawing": {"drawing": f"data:image/png;base64,{'A' * 100}", **llava("Q", "A")},
    "text <image_1>": llava("What is in <image_1>?", "A"),
    "text <|image 2|>": llava("Is <|image 2|> red?", "A"),
    "text <Image>": llava("<Image>\nWhat?", "A"),
    "text [IMG]": llava("[IMG] What?", "A"),
}


@pytest.mark.parametrize(("what", "streamed"), [*product(UNREAD, [False]), ("column img", True)])
def test_what_looks_like_an_image_is_named(what, streamed, processor, tmp_path, caplog):
    path = write_json(tmp_path, [UNREAD[what]] * 3)
    reason = f"data.json: what .* is not read: {re.escape(what)} .3 rows.. No other image"
    with pytest.raises(ValueError, match=reason):
        read(path, processor, streamed=streamed)
    name = f"{streamed}.json"  # a warning is given once for each data set
    rows = [UNREAD[what], llava("<image>Q", "A", "red.png"), llava("Q", "B")]
    path = write_json(tmp_path, rows, name)
    list(islice(read(path, processor, streamed=streamed).train, 3))
    assert f"{name}: what looks like an image is not read: {what}" in caplog.text
