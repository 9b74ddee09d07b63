"""Images with questions from all places, which of them are drawn, and the inputs made of them."""

import json
from random import Random

import pytest
import torch
import train_data
from datasets import Dataset, Image
from train_data import image_bytes, inside
from transformers import AutoProcessor

from normalign_llava import NormAlignLlavaForConditionalGeneration
from normalign_llava.data.rows.forms import PROMPT
from normalign_llava.data.sources.arguments import DataSource
from normalign_llava.data.sources.source import open_source
from normalign_llava.diagnose.data import Sample, Samples, _read_shuffled, batches, load_samples


COLOURS = ("red", "green", "blue", "white", "black", "gray")


def drawn_questions(loaded: Samples) -> dict[str, str]:
    """Questions by the names of their samples."""
    for sample in loaded.samples:
        assert sample.image.mode == "RGB"
    return {sample.name: sample.question for sample in loaded.samples}


@pytest.fixture
def image_folder(tmp_path):
    """Images in folders that `datasets` would take for splits, with questions about three."""
    folder = tmp_path / "mine"
    folder.mkdir()
    train_data.images(folder, "red.png", "train/green.png", "train/blue.png", "white.png")
    (folder / "red.png").rename(folder / "test_red.png")
    data_rows = [
        {"file_name": "test_red.png", "question": "Is it red?"},
        {"file_name": "train/green.png", "question": "Is it green?"},
        {"file_name": "train/blue.png", "question": "Is it blue?"},
    ]
    lines = [json.dumps(data_row) for data_row in data_rows]
    (folder / "metadata.jsonl").write_text("\n".join(lines))
    return folder


def test_a_folder_of_images_with_questions(image_folder, caplog):
    loaded = load_samples(str(image_folder), 3)
    assert loaded.name == "mine"
    assert not caplog.records
    assert drawn_questions(loaded) == {
        "metadata.jsonl, row 0 (test_red.png)": "Is it red?",
        "metadata.jsonl, row 1 (train/green.png)": "Is it green?",
        "metadata.jsonl, row 2 (train/blue.png)": "Is it blue?",
    }
    (red_image,) = [sample.image for sample in loaded.samples if "red" in sample.name]
    assert red_image.getpixel((0, 0)) == (255, 0, 0)


def test_a_folder_of_images_without_questions(image_folder, tmp_path):
    (image_folder / "metadata.jsonl").unlink()
    questions = drawn_questions(load_samples(str(image_folder), 4))
    assert len(questions) == 4
    assert set(questions.values()) == {PROMPT}
    assert "(train/blue.png)" in str(questions)
    assert str(tmp_path) not in str(questions)


def test_an_image_that_cannot_be_read_is_named(image_folder):
    (image_folder / "train" / "green.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"jsonl, row 1 \(train/green.png\) cannot .*identify"):
        load_samples(str(image_folder), 3)


def test_a_folder_whose_rows_have_no_image_is_refused(image_folder):
    (image_folder / "metadata.jsonl").write_text('{"question": "no file?"}')
    with pytest.raises(ValueError, match="mine has no row with an image"):
        load_samples(str(image_folder), 3)


@pytest.fixture
def parquet_path(tmp_path):
    """Forty rows whose question is their number."""
    data_rows = []
    for number in range(40):
        data_rows.append({"image": inside(COLOURS[number % 6]), "question": f"{number}?"})
    file_path = tmp_path / "rows.parquet"
    Dataset.from_list(data_rows).cast_column("image", Image()).to_parquet(str(file_path))
    return str(file_path)


def test_the_seed_decides_which_are_drawn(parquet_path):
    def draw_names(seed):
        samples = load_samples(parquet_path, 5, seed=seed).samples
        return tuple(sample.name for sample in samples)

    assert draw_names(1) == draw_names(1)
    assert len(set(draw_names(1))) == 5
    names_of_seeds = {draw_names(seed) for seed in range(5)}
    assert len(names_of_seeds) == 5


def test_row_file_and_question_of_a_sample_belong_together(parquet_path):
    samples = load_samples(parquet_path, 40).samples
    assert len(samples) == 40
    for sample in samples:
        number = int(sample.question.rstrip("?"))
        assert sample.name == f"rows.parquet, row {number} ({COLOURS[number % 6]}.png)"


def test_a_row_gives_its_first_image_and_question(tmp_path):
    messages = [
        {"role": "system", "content": "no"},
        {"role": "user", "content": "<image>A?<image>"},
        {"role": "assistant", "content": "no"},
        {"role": "user", "content": "B?"},
    ]
    data_row = {"messages": messages, "images": ["red.png", "blue.png"]}
    train_data.write_json(tmp_path / "mine", [data_row])
    (sample,) = load_samples(str(tmp_path / "mine"), 9).samples
    assert sample.question == "A?"
    assert "red.png" in sample.name


def test_rows_without_an_image_are_skipped(tmp_path, caplog):
    data_rows = [
        {"question": "no image?", "answer": "a"},
        {"question": "  what?\n", "image": "red.png"},
        {"question": "no image?"},
    ]
    train_data.write_json(tmp_path / "mine", data_rows)
    loaded = load_samples(str(tmp_path / "mine"), 2)
    assert drawn_questions(loaded) == {"data.json, row 1 (red.png)": "what?"}
    assert "has only 1 samples, not 2" in caplog.text


def test_a_row_without_a_question_is_refused(tmp_path):
    data_row = {"messages": [{"role": "user", "content": "<image>"}], "images": ["red.png"]}
    train_data.write_json(tmp_path / "silent", [data_row])
    with pytest.raises(ValueError, match=r"row 0 \(red.png\) has no question"):
        load_samples(str(tmp_path / "silent"), 1)


def test_a_row_whose_image_is_missing_is_refused(tmp_path):
    data_row = {"question": "what?", "image": str(tmp_path / "gone.png")}
    train_data.write_json(tmp_path / "gone", [data_row])
    with pytest.raises(ValueError, match=r"row 0 \(gone.png\) cannot be used: "):
        load_samples(str(tmp_path / "gone"), 1)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"question": "what?", "image": "https://host/sub/a.png"},
            r"row 0 \(a.png\) cannot be ",
        ),
        ({"image": "red.png", "messages": 3}, "row 0.* cannot be used"),
        ({"images": ["red.png"], "messages": 3}, "row 0.* cannot be used"),
        ({"messages": 3}, "no row with an image"),
        ({"messages": 3, "picture": "red.png"}, "row 0.* cannot be used"),
        (3, "row 0 cannot be used"),
    ],
    ids=str,
)
def test_a_row_that_cannot_be_read_is_an_error_if_it_has_an_image(tmp_path, row, message):
    train_data.images(tmp_path, "red.png")
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match=message):
        load_samples(str(tmp_path / "rows.jsonl"), 1)


@pytest.fixture
def data_root(tmp_path):
    """Data in two splits, and in a folder with a colon in its name."""
    data_row = {"question": "what\ud83d?", "image": "red.png"}
    for file_name in ("mine/train.jsonl", "mine/val.jsonl", "one:two/train.jsonl"):
        file_path = tmp_path / file_name
        file_path.parent.mkdir(exist_ok=True)
        file_path.write_text(json.dumps(data_row) + "\n")
        train_data.images(file_path.parent, "red.png")
    return tmp_path


@pytest.mark.parametrize("data", ["mine:val", "one:two"])
def test_data_are_called_by_their_folder_and_split(data_root, data):
    assert load_samples(f"{data_root}/{data}", 1).name == data


@pytest.mark.parametrize("data", ["mine:val", "one:two"])
def test_half_a_character_is_a_question_mark(data_root, data):
    (sample,) = load_samples(f"{data_root}/{data}", 1).samples
    assert sample.question == "what??"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (".", "mine"),
        ("~/one:two", "one:two"),
    ],
)
def test_data_in_short_paths_are_called_by_their_folder(data_root, monkeypatch, data, expected):
    monkeypatch.setenv("HOME", str(data_root))
    monkeypatch.chdir(data_root / "mine")
    assert load_samples(data, 1).name == expected


@pytest.mark.parametrize(("streaming", "expected_count"), [(True, 3), (False, 8)])
def test_of_a_stream_the_first_rows_are_read_shuffled(tmp_path, streaming, expected_count):
    file_path = tmp_path / "rows.parquet"
    Dataset.from_dict({"number": list(range(8))}).to_parquet(str(file_path))
    source = open_source(DataSource.named(str(file_path)), streaming=streaming)

    orders = set()
    for seed in range(4):
        data_rows = _read_shuffled(source, 3, Random(seed))
        order = tuple(raw_row["number"] for _, _, raw_row in data_rows)
        assert sorted(order) == list(range(expected_count))
        orders.add(order)
    assert len(orders) > 1


@pytest.mark.usefixtures("archives")
def test_the_built_in_images():
    loaded = load_samples(None, 40)
    questions = drawn_questions(loaded)
    assert loaded.name == "easy-VQA and emoji"
    assert len(set(questions.values())) > 5
    kinds = set()
    for sample_name in questions:
        kind, file_name = sample_name.split(" (")[:2]
        kinds.add(kind)
        assert "/" not in file_name
    assert kinds == {"shape", "colour", "yes/no", "emoji"}


@pytest.mark.usefixtures("archives")
def test_the_seed_decides_which_built_in_images_are_drawn():
    names_by_default = list(drawn_questions(load_samples(None, 40)))
    names_of_seed_0 = list(drawn_questions(load_samples(None, 40, seed=0)))
    names_of_seed_1 = list(drawn_questions(load_samples(None, 40, seed=1)))
    assert names_by_default == names_of_seed_0
    assert names_of_seed_0 != names_of_seed_1


@pytest.mark.usefixtures("archives")
def test_more_than_all_built_in_images_are_not_drawn(caplog):
    assert len(load_samples(None, 1000).samples) == 312
    assert "only 312" in caplog.text


def make_samples(*questions) -> list[Sample]:
    samples = []
    for number, question in enumerate(questions):
        image = {"path": None, "bytes": image_bytes(COLOURS[number], (20, 16))}
        samples.append(Sample(f"row {number}", question, image))
    return samples


def decode_without_padding(processor, batch):
    decoded_texts = []
    for token_ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
        decoded_texts.append(processor.decode(token_ids[mask.bool()]))
    return decoded_texts


def check_padded_on_the_left(batch):
    """The second of two sequences is shorter."""
    assert batch["attention_mask"][1, 0] == 0
    assert batch["attention_mask"][:, -1].all()


@pytest.fixture
def processor(checkpoint):
    """Pads on the right, unless told otherwise."""
    processor = AutoProcessor.from_pretrained(checkpoint)
    processor.tokenizer.padding_side = "right"
    return processor


@pytest.fixture
def samples():
    return make_samples("Long question here?", "Short?", "Last?")


def test_batches_are_what_the_chat_template_says(processor, samples):
    # So the end of the sequence pads.
    processor.tokenizer.pad_token = None
    decoded_texts = []
    for model_inputs in batches(processor, samples, 2):
        decoded_texts.append(decode_without_padding(processor, model_inputs))
    prompts = []
    for sample in samples:
        question = f"{'<image>' * 4}{sample.question}"
        prompts.append(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")
    assert decoded_texts == [prompts[:2], prompts[2:]]


def test_batches_are_padded_on_the_left_with_the_end_of_the_sequence(processor, samples):
    processor.tokenizer.pad_token = None
    first_batch, _ = batches(processor, samples, 2)
    check_padded_on_the_left(first_batch)
    assert first_batch["input_ids"][1, 0] == processor.tokenizer.eos_token_id


def test_batches_have_the_pixels_of_their_images(processor, samples):
    _, last_batch = batches(processor, samples, 2)
    expected = processor.image_processor(images=[samples[2].image], return_tensors="pt")
    assert torch.equal(last_batch["pixel_values"], expected["pixel_values"])


def test_padding_does_not_change_what_a_model_answers(processor, samples, checkpoint):
    processor.tokenizer.pad_token = None
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint)
    first_batch, _ = batches(processor, samples, 2)
    (short_batch,) = batches(processor, samples[1:2], 1)
    with torch.no_grad():
        padded_logits = model(**first_batch).logits[1, -1]
        logits = model(**short_batch).logits[0, -1]
    assert torch.allclose(padded_logits, logits, atol=1e-4)


def test_rows_of_a_batch_that_cannot_be_made_are_named(processor):
    samples = make_samples("Fine?", "Is <image> <image> one?")
    with pytest.raises(ValueError, match="fails for row 0, row 1: .*"):
        list(batches(processor, samples, 2))


def test_a_padding_token_of_the_tokenizer_pads(processor):
    processor.tokenizer.pad_token = "z"
    (model_inputs,) = batches(processor, make_samples("Long question here?", "Short?"), 2)
    assert processor.decode(model_inputs["input_ids"][1, :2]) == "zz"


def test_labels_are_left_out(processor, monkeypatch):
    train_data.make_labels(processor, monkeypatch)
    (model_inputs,) = batches(processor, make_samples("Long question here?", "Short?"), 2)
    assert "labels" not in model_inputs


def test_without_a_chat_template_a_line_break_parts_image_and_question(processor):
    processor.chat_template = None
    samples = make_samples("Long question here?", "Short?")
    (model_inputs,) = batches(processor, samples, 2)
    expected = [f"{'<image>' * 4}\n{sample.question}" for sample in samples]
    assert decode_without_padding(processor, model_inputs) == expected
    check_padded_on_the_left(model_inputs)
    images = [sample.image for sample in samples]
    image_inputs = processor.image_processor(images=images, return_tensors="pt")
    assert torch.equal(model_inputs["pixel_values"], image_inputs["pixel_values"])
