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


def drawn(loaded: Samples) -> dict[str, str]:
    assert all(sample.image.mode == "RGB" for sample in loaded.samples)
    return {sample.name: sample.question for sample in loaded.samples}


def test_a_folder_of_images_with_questions(tmp_path, caplog):
    """Images in folders that `datasets` would take for splits, with questions about some."""
    folder = tmp_path / "mine"
    files = ("test_red.png", "train/green.png", "train/blue.png")
    folder.mkdir()
    train_data.images(folder, "red.png", *files[1:], "white.png")
    (folder / "red.png").rename(folder / "test_red.png")
    metadata = folder / "metadata.jsonl"
    questions = {file: f"Is it {file}?" for file in files}
    rows = [json.dumps({"file_name": file, "question": questions[file]}) for file in files]
    metadata.write_text("\n".join(rows))
    loaded = load_samples(str(folder), 3)
    assert loaded.name == "mine" and not caplog.records
    names = [f"metadata.jsonl, row {row} ({file})" for row, file in enumerate(files)]
    assert drawn(loaded) == dict(zip(names, questions.values(), strict=True))
    (red,) = [sample.image for sample in loaded.samples if "red" in sample.name]
    assert red.getpixel((0, 0)) == (255, 0, 0)
    metadata.unlink()
    without = drawn(load_samples(str(folder), 4))
    assert len(without) == 4 and set(without.values()) == {PROMPT}
    assert "(train/blue.png)" in str(without) and str(tmp_path) not in str(without)
    metadata.write_text("\n".join(rows))
    (folder / "train" / "green.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"jsonl, row 1 \(train/green.png\) cannot .*identify"):
        load_samples(str(folder), 3)
    metadata.write_text('{"question": "no file?"}')
    with pytest.raises(ValueError, match="mine has no row with an image"):
        load_samples(str(folder), 3)


def test_the_seed_decides_which_are_drawn(tmp_path):
    path = tmp_path / "rows.parquet"
    rows = [{"image": inside(COLOURS[i % 6]), "question": f"{i}?"} for i in range(40)]
    Dataset.from_list(rows).cast_column("image", Image()).to_parquet(str(path))

    def chosen(seed):
        return [sample.name for sample in load_samples(str(path), 5, seed=seed).samples]

    assert chosen(1) == chosen(1) and len(set(chosen(1))) == 5
    assert len({tuple(chosen(seed)) for seed in range(5)}) == 5
    for sample in load_samples(str(path), 40).samples:  # row, file and question belong together
        row = int(sample.question.rstrip("?"))
        assert sample.name == f"rows.parquet, row {row} ({COLOURS[row % 6]}.png)"


def test_a_row_gives_its_first_image_and_question(tmp_path):
    turns = [("system", "no"), ("user", "<image>A?<image>"), ("assistant", "no"), ("user", "B?")]
    row = {"messages": [{"role": role, "content": content} for role, content in turns]}
    train_data.write_json(tmp_path / "mine", [row | {"images": ["red.png", "blue.png"]}])
    (sample,) = load_samples(str(tmp_path / "mine"), 9).samples
    assert sample.question == "A?" and "red.png" in sample.name


def test_rows_without_an_image_are_skipped_and_questions_are_needed(tmp_path, caplog):
    shown = {"question": "  what?\n", "image": "red.png"}
    rows = [{"question": "no image?", "answer": "a"}, shown, {"question": "no image?"}]
    train_data.write_json(tmp_path / "mine", rows)
    loaded = load_samples(str(tmp_path / "mine"), 2)
    assert drawn(loaded) == {"data.json, row 1 (red.png)": "what?"}
    assert "has only 1 samples, not 2" in caplog.text
    silent = {"messages": [{"role": "user", "content": "<image>"}], "images": ["red.png"]}
    train_data.write_json(tmp_path / "silent", [silent])
    with pytest.raises(ValueError, match=r"row 0 \(red.png\) has no question"):
        load_samples(str(tmp_path / "silent"), 1)
    gone = {"question": "what?", "image": str(tmp_path / "gone.png")}
    train_data.write_json(tmp_path / "gone", [gone])
    with pytest.raises(ValueError, match=r"row 0 \(gone.png\) cannot be used: "):
        load_samples(str(tmp_path / "gone"), 1)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"question": "what?", "image": "https://host/sub/a.png"}, r"row 0 \(a.png\) cannot be "),
        ({"image": "red.png", "messages": 3}, "row 0.* cannot be used"),
        ({"images": ["red.png"], "messages": 3}, "row 0.* cannot be used"),
        ({"messages": 3}, "no row with an image"),
        ({"messages": 3, "picture": "red.png"}, "row 0.* cannot be used"),
        (3, "row 0 cannot be used"),
    ],
    ids=str,
)
def test_a_row_that_cannot_be_read_is_an_error_if_it_has_an_image(tmp_path, row, said):
    train_data.images(tmp_path, "red.png")
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match=said):
        load_samples(str(tmp_path / "rows.jsonl"), 1)


def test_data_are_called_by_their_file_and_split_and_half_a_character_is_a_question_mark(
    tmp_path, monkeypatch
):
    train_data.images(tmp_path, "red.png")
    row = json.dumps({"question": "what\ud83d?", "image": "red.png"}) + "\n"
    for folder, file in (("mine", "train"), ("mine", "val"), ("one:two", "train")):
        (tmp_path / folder).mkdir(exist_ok=True)
        train_data.images(tmp_path / folder, "red.png")
        (tmp_path / folder / f"{file}.jsonl").write_text(row)
    for data in ("mine:val", "one:two"):
        loaded = load_samples(f"{tmp_path}/{data}", 1)
        assert loaded.name == data and loaded.samples[0].question == "what??"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path / "mine")
    assert [load_samples(data, 1).name for data in (".", "~/one:two")] == ["mine", "one:two"]


@pytest.mark.parametrize(("streaming", "expected"), [(True, 3), (False, 8)])
def test_of_a_stream_the_first_rows_are_read_shuffled(tmp_path, streaming, expected):
    path = tmp_path / "rows.parquet"
    Dataset.from_dict({"number": list(range(8))}).to_parquet(str(path))
    source = open_source(DataSource.named(str(path)), streaming=streaming)
    orders = [
        [raw["number"] for _, _, raw in _read_shuffled(source, 3, Random(seed))]
        for seed in range(4)
    ]
    assert all(sorted(order) == list(range(expected)) for order in orders)
    assert len({tuple(order) for order in orders}) > 1


@pytest.mark.usefixtures("archives")
def test_the_built_in_images(caplog):
    loaded = load_samples(None, 40)
    asked = drawn(loaded)
    assert loaded.name == "easy-VQA and emoji" and len(set(asked.values())) > 5
    again, other = (list(drawn(load_samples(None, 40, seed=seed))) for seed in (0, 1))
    assert list(asked) == again != other
    assert {name.split(" (")[0] for name in asked} == {"shape", "colour", "yes/no", "emoji"}
    assert not any("/" in name.split(" (")[1] for name in asked)
    assert len(load_samples(None, 1000).samples) == 312 and "only 312" in caplog.text


def samples(*questions) -> list[Sample]:
    images = ({"path": None, "bytes": image_bytes(colour, (20, 16))} for colour in COLOURS)
    asked = enumerate(zip(questions, images, strict=False))
    return [Sample(f"row {row}", question, image) for row, (question, image) in asked]


def test_batches_are_what_the_chat_template_says_padded_on_the_left(checkpoint):
    processor = AutoProcessor.from_pretrained(checkpoint)
    processor.tokenizer.pad_token = None  # so the end of the sequence pads
    processor.tokenizer.padding_side = "right"
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint)
    asked = samples("Long question here?", "Short?", "Last?")
    first, last = batches(processor, asked, 2)
    pairs = [zip(made["input_ids"], made["attention_mask"], strict=True) for made in (first, last)]
    texts = [processor.decode(ids[mask.bool()]) for rows in pairs for ids, mask in rows]
    turns = [f"user\n{'<image>' * 4}{sample.question}<|im_end|>" for sample in asked]
    assert texts == [f"<|im_start|>{turn}\n<|im_start|>assistant\n" for turn in turns]
    assert first["attention_mask"][1, 0] == 0 and first["attention_mask"][:, -1].all()
    assert first["input_ids"][1, 0] == processor.tokenizer.eos_token_id
    pixels = processor.image_processor(images=[asked[2].image], return_tensors="pt")["pixel_values"]
    assert torch.equal(last["pixel_values"], pixels)
    with torch.no_grad():
        alone = model(**next(batches(processor, asked[1:2], 1))).logits[0, -1]
        assert torch.allclose(model(**first).logits[1, -1], alone, atol=1e-4)
    with pytest.raises(ValueError, match="fails for row 0, row 1: .*"):
        list(batches(processor, samples("Fine?", "Is <image> <image> one?"), 2))


def test_a_padding_token_of_the_tokenizer_pads_and_labels_are_left_out(checkpoint, monkeypatch):
    processor = AutoProcessor.from_pretrained(checkpoint)
    processor.tokenizer.pad_token = "z"
    made = processor.apply_chat_template

    def with_labels(*args, **kwargs):
        inputs = made(*args, **kwargs)
        inputs["labels"] = inputs["input_ids"]
        return inputs

    monkeypatch.setattr(processor, "apply_chat_template", with_labels)
    (inputs,) = batches(processor, samples("Long question here?", "Short?"), 2)
    assert processor.decode(inputs["input_ids"][1, :2]) == "zz" and "labels" not in inputs


def test_without_a_chat_template_a_line_break_parts_image_and_question(checkpoint):
    processor = AutoProcessor.from_pretrained(checkpoint)
    processor.chat_template = None
    processor.tokenizer.padding_side = "right"
    asked = samples("Long question here?", "Short?")
    (made,) = batches(processor, asked, 2)
    pairs = zip(made["input_ids"], made["attention_mask"], strict=True)
    texts = [processor.decode(ids[mask.bool()]) for ids, mask in pairs]
    assert texts == [f"{'<image>' * 4}\n{sample.question}" for sample in asked]
    assert made["attention_mask"][1, 0] == 0 and made["attention_mask"][:, -1].all()
    images = [sample.image for sample in asked]
    pixels = processor.image_processor(images=images, return_tensors="pt")["pixel_values"]
    assert torch.equal(made["pixel_values"], pixels)
