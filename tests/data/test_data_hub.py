"""Data sets of the Hub: what `datasets` found there itself is read, what a row names is not."""

import json
import shutil

import pyarrow.parquet
import pytest
from datasets import Features, Image, Value
from paths import HELPERS
from train_data import images, inside, llava, write_parquet


pytestmark = pytest.mark.slow


# Reads each data set in memory, streamed and for diagnosing: colours of its images, or the error.
CLIENT = """
import json
import sys
from itertools import islice

sys.path.append(sys.argv[1])
import train_data

from normalign_llava.data.rows.images import decode_image
from normalign_llava.diagnose.data import load_samples


def train_colours(name, streamed):
    rows = train_data.read(name, processor, streamed=streamed).train
    images = [decode_image(row["images"][0]) for row in islice(rows, 2)]
    return [image.getpixel((1, 1)) for image in images]


def sample_colours(name):
    samples = load_samples(name, 2).samples
    return sorted(sample.image.getpixel((1, 1)) for sample in samples)


def result_or_error(function, *arguments):
    try:
        return function(*arguments)
    except ValueError as error:
        return str(error)


processor = train_data.processor()
results = {}
for name in json.loads(sys.argv[2]):
    results[name] = [
        result_or_error(train_colours, name, False),
        result_or_error(train_colours, name, True),
        result_or_error(sample_colours, name),
    ]
data = train_data.read("user/tiny.data", processor, with_eval=True)
rows = [*data.train, *data.eval]
results["rows"] = [[row["source"], row["row"], row["image_count"]] for row in rows]
results["datasets"] = [report.dataset["id"] for report in data.report.sources]
print(json.dumps(results))
"""

RED = [255, 0, 0]
BLUE = [0, 0, 255]
HOSTILE_PATHS = {
    "absolute": "{folder}/secret/red.png",
    "web": "http://127.0.0.1:9/red.png",
    "other": "hf://datasets/user/folder@main/red.png",
    "relative": "red.png",
}
REASONS = {
    "absolute": "leaves the cache of the Hub",
    "web": "is an address; nothing is fetched",
    "other": "is an address; nothing is fetched",
    "relative": "set image_folder",
}
READ_NAMES = ["folder", "zipped", *HOSTILE_PATHS]


def write_image_folders(folder):
    """Writes a folder of images with their rows, and the same in a zip file."""
    images(folder / "folder", "red.png", "blue.png")
    lines = []
    for colour in ("red", "blue"):
        metadata = {
            "file_name": f"{colour}.png",
            "question": "Q",
            "answer": colour,
        }
        lines.append(json.dumps(metadata))
    (folder / "folder" / "metadata.jsonl").write_text("\n".join(lines))
    shutil.make_archive(str(folder / "zipped" / "train"), "zip", folder / "folder")


def write_hostile_data(folder):
    """Writes data sets whose row names an image elsewhere.

    Arrow writes them, since `datasets` would put the images in.
    """
    images(folder / "secret", "red.png")
    features = Features(
        image=Image(),
        question=Value("string"),
        answer=Value("string"),
    )
    for name, path_template in HOSTILE_PATHS.items():
        image = {"path": path_template.format(folder=folder), "bytes": None}
        sample_row = {
            "image": image,
            "question": "Q",
            "answer": "A",
        }
        table = pyarrow.Table.from_pylist([sample_row], schema=features.arrow_schema)
        (folder / name).mkdir()
        pyarrow.parquet.write_table(table, folder / name / "train.parquet")


def write_splits(folder):
    """Writes two training rows, of which the first has an image, and one to hold out."""
    with_image = llava("<image>\nQ", "A", inside("red"))
    without_image = llava("Q", "A")
    write_parquet(folder / "tiny.data" / "train-00000.parquet", [with_image, without_image])
    write_parquet(folder / "tiny.data" / "test-00000.parquet", [without_image])


@pytest.fixture(scope="module")
def results(server, prepared, tmp_path_factory):
    """What one process reads of all data sets."""
    server.clear()
    shutil.rmtree(prepared.environment["HF_HOME"], ignore_errors=True)
    folder = tmp_path_factory.mktemp("hub")
    write_image_folders(folder)
    write_hostile_data(folder)
    write_splits(folder)
    for name in (*READ_NAMES, "tiny.data"):
        server.serve(f"user/{name}", folder / name, kind="dataset")

    data_names = [f"user/{name}" for name in READ_NAMES]
    client = prepared.run(["-c", CLIENT, HELPERS, json.dumps(data_names)])
    assert client.returncode == 0, client.stderr
    return json.loads(client.stdout.splitlines()[-1])


def test_rows_have_the_name_of_their_data_set(results):
    assert results["rows"] == [
        ["user/tiny.data", 0, 1],
        ["user/tiny.data", 1, 0],
        ["user/tiny.data", 0, 0],
    ]
    assert results["datasets"] == ["user/tiny.data", "user/tiny.data"]


@pytest.mark.parametrize("name", ["folder", "zipped"])
def test_images_of_the_data_set_are_read(results, name):
    in_memory, streamed, for_diagnosing = results[f"user/{name}"]
    assert in_memory == [RED, BLUE]
    assert streamed == [RED, BLUE]
    assert for_diagnosing == [BLUE, RED]


@pytest.mark.parametrize("name", HOSTILE_PATHS)
def test_addresses_in_rows_of_a_hub_data_set_are_not_read(results, name):
    for message in results[f"user/{name}"]:
        assert REASONS[name] in message
