"""Tiny data sets on disk, in every form that training reads, and a real processor for them."""

import io
import json
import struct
import zlib
from pathlib import Path

import tiny_parts
from datasets import Dataset, Features, Image, List, Value
from PIL import Image as PILImage
from transformers import AddedToken, LlavaProcessor
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from normalign_llava.assembly.chat_template import multimodal_chat_template
from normalign_llava.data.sources.arguments import DataArguments
from normalign_llava.data.sources.mixtures import TrainingData, load_data


def processor(tokenizer=None, template=tiny_parts.CHATML) -> LlavaProcessor:
    """16-pixel images of 4 tokens; by default one token a letter, padded with its end of turn."""
    tokenizer = tokenizer or tiny_parts.tokenizer()
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    image_token = AddedToken("<image>", special=True, normalized=False)
    tokenizer.add_tokens(image_token, special_tokens=True)
    image_processor = CLIPImageProcessorPil(
        size={"shortest_edge": 16},
        crop_size={"height": 16, "width": 16},
    )
    chat_template, _ = multimodal_chat_template(template)
    return LlavaProcessor(
        image_processor,
        tokenizer,
        patch_size=8,
        chat_template=chat_template,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )


def make_labels(processor, monkeypatch) -> None:
    """Has a processor make labels, as some models' own do."""
    apply_chat_template = processor.apply_chat_template

    def apply_with_labels(*args, **kwargs):
        inputs = apply_chat_template(*args, **kwargs)
        inputs["labels"] = inputs["input_ids"]
        return inputs

    monkeypatch.setattr(processor, "apply_chat_template", apply_with_labels)


def arguments(path, **kwargs) -> DataArguments:
    return DataArguments(dataset_name=str(path), **kwargs)


OPTIONS_OF_LOADING = {
    "max_length",
    "seed",
    "with_eval",
    "need_images",
    "dropped_rows",
    "processes",
}


def read(path, processor, *, streamed=False, **options) -> TrainingData:
    """The data of a path or of `datasets`; `options` are of `DataArguments` and `load_data`."""
    load_options = {
        "max_length": None,
        "seed": 0,
        "with_eval": False,
    }
    data_options = {}
    for option_name, value in options.items():
        if option_name in OPTIONS_OF_LOADING:
            load_options[option_name] = value
        else:
            data_options[option_name] = value
    if streamed:
        data_options["dataset_streaming"] = True
        data_options["shuffle_buffer_size"] = 1
    if path:
        data_options["dataset_name"] = str(path)
    return load_data(DataArguments(**data_options), processor, **load_options)


def answers(rows) -> list[str]:
    """The last answer of each parsed row."""
    return [row["messages"][-1]["content"][0]["text"] for row in rows]


def image_bytes(colour="red", size=(20, 20), form="PNG") -> bytes:
    buffer = io.BytesIO()
    PILImage.new("RGB", size, colour).save(buffer, form)
    return buffer.getvalue()


def images(folder: Path, *names: str) -> None:
    """Images of one colour each, `red.png` being red."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        image_path = folder / name
        image_path.parent.mkdir(parents=True, exist_ok=True)
        image_path.write_bytes(image_bytes(image_path.stem, form="PNG"))


def gigantic_png(width=65_000, height=65_000) -> bytes:
    """A PNG file that says in its header how large it is, and holds next to nothing."""
    return _png(struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0), b"")


def _png(header: bytes, pixels: bytes) -> bytes:
    signature = b"\x89PNG\r\n\x1a\n"
    image_data = zlib.compress(pixels)
    return signature + _chunk(b"IHDR", header) + _chunk(b"IDAT", image_data) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, content: bytes) -> bytes:
    length = struct.pack(">I", len(content))
    checksum = struct.pack(">I", zlib.crc32(kind + content))
    return length + kind + content + checksum


def deep_png(colour: list[int]) -> bytes:
    """A PNG file of one pixel, its three colours of 16 bits, which Pillow does not write."""
    header = struct.pack(">IIBBBBB", 1, 1, 16, 2, 0, 0, 0)
    return _png(header, struct.pack(">B3H", 0, *colour))


def llava(question: str, answer: str, image=None, **more) -> dict:
    row = {
        "id": "000",
        "conversations": turn(question, answer),
    }
    if image is not None:
        row["image"] = image
    return {**row, **more}


def turn(question: str, answer: str) -> list[dict]:
    return [
        {"from": "human", "value": question},
        {"from": "gpt", "value": answer},
    ]


def mixed_rows() -> list[dict]:
    """As in LLaVA-665K: ids of several types, no image, one or several, one turn or several."""
    two_turns = llava("<image>\nWhat is this?", "red", ["red.png", "blue.png"], id=7)
    two_turns["conversations"] += turn("And <image>?", "blue")
    return [
        llava("<image>\nWhich colour?", "green", "green.png", id="000000033471"),
        llava("Say hello.", "Hello!", id=3),
        two_turns,
        llava("Which colour?\n<image>", "blue", "sub/blue.png", id=None, model=""),
        llava("Count.", "One two three four five six seven.", id=1.5),
    ]


def write_json(folder: Path, rows: list, name="data.json") -> Path:
    """Writes rows as JSON or, by the name, as JSON lines; and images beside them."""
    images(folder, "red.png", "green.png", "blue.png", "sub/blue.png")
    data_path = folder / name
    if name.lower().endswith(".jsonl"):
        lines = [json.dumps(row) + "\n" for row in rows]
        data_path.write_text("".join(lines))
    else:
        data_path.write_text(json.dumps(rows))
    return data_path


def bad_rows(folder: Path) -> Path:
    """Mixed rows, and five among them that cannot be trained on: 1 to 3, 8 and 9."""
    outside_path = folder.parent / "outside.png"
    outside_path.write_bytes(image_bytes("red"))
    first_row, *other_rows = mixed_rows()
    rows = [
        first_row,
        llava("<image>Q", "A", None),
        llava("<image>Q", "A", "none.png"),
        llava("<image>Q", "A", "../outside.png"),
        *other_rows,
        llava("<image>Q", "A", "link.png"),
        llava("Q", ""),
    ]
    data_path = write_json(folder, rows)
    (folder / "link.png").symlink_to(outside_path)
    return data_path


TURNS = List({"from": Value("string"), "value": Value("string")})
PARQUET = Features(
    {
        "id": Value("string"),
        "image": Image(),
        "conversations": TURNS,
    }
)


def parquet_data(rows: list[dict]) -> Dataset:
    """LLaVA-NeXT's form: images inside, or none."""
    columns = {
        "id": [str(number) for number in range(len(rows))],
        "image": [row.get("image") for row in rows],
        "conversations": [row["conversations"] for row in rows],
    }
    return Dataset.from_dict(columns, features=PARQUET)


def write_parquet(path: Path, rows: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet_data(rows).to_parquet(str(path))
    return path


def inside(colour: str) -> dict:
    return {"bytes": image_bytes(colour), "path": f"{colour}.png"}


def user(content) -> dict:
    return {"role": "user", "content": content}


def assistant(content) -> dict:
    return {"role": "assistant", "content": content}
