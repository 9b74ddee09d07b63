"""Data sets of the Hub: what `datasets` found there itself is read, what a row names is not."""

import json
import shutil

import pyarrow.parquet
import pytest
from datasets import Features, Image, Value
from paths import HELPERS
from train_data import images, inside, llava, write_parquet


CLIENT = """
import json, sys
from itertools import islice
sys.path.append(sys.argv[1])
import train_data
from normalign_llava.data.rows.images import decode_image
from normalign_llava.diagnose.data import load_samples
processor, results = train_data.processor(), {}
for name in json.loads(sys.argv[2]):
    results[name] = []
    for streaming in (False, True):
        try:
            rows = train_data.read(name, processor, streamed=streaming).train
            images = [decode_image(row["images"][0]) for row in islice(rows, 2)]
            results[name].append([image.getpixel((1, 1)) for image in images])
        except ValueError as error:
            results[name].append(str(error))
    try:
        samples = load_samples(name, 2).samples
        results[name].append(sorted(sample.image.getpixel((1, 1)) for sample in samples))
    except ValueError as error:
        results[name].append(str(error))
data = train_data.read("user/tiny.data", processor, with_eval=True)
rows = [*data.train, *data.eval]
results["rows"] = [[row["source"], row["row"], row["image_count"]] for row in rows]
results["datasets"] = [report.dataset["id"] for report in data.report.sources]
print(json.dumps(results))
"""


@pytest.mark.slow
def test_addresses_in_rows_of_a_hub_data_set_are_not_read(hub, prepared, tmp_path_factory):
    base = tmp_path_factory.mktemp("hub")
    images(base / "folder", "red.png", "blue.png")
    lines = [dict(file_name=f"{name}.png", question="Q", answer=name) for name in ("red", "blue")]
    (base / "folder" / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))
    shutil.make_archive(str(base / "zipped" / "train"), "zip", base / "folder")
    images(base / "secret", "red.png")
    hostile = {"absolute": f"{base}/secret/red.png", "web": "http://127.0.0.1:9/red.png"}
    hostile |= {"other": "hf://datasets/user/folder@main/red.png", "relative": "red.png"}
    features = Features(image=Image(), question=Value("string"), answer=Value("string"))
    for name, path in hostile.items():  # written by Arrow: `datasets` would put the files in
        (base / name).mkdir()
        row = {"image": {"path": path, "bytes": None}, "question": "Q", "answer": "A"}
        table = pyarrow.Table.from_pylist([row], schema=features.arrow_schema)
        pyarrow.parquet.write_table(table, base / name / "train.parquet")
    names = ("folder", "zipped", *hostile)
    rows = [llava("<image>\nQ", "A", inside("red")), llava("Q", "A")]
    write_parquet(base / "tiny.data" / "train-00000.parquet", rows)
    write_parquet(base / "tiny.data" / "test-00000.parquet", rows[1:])
    for name in (*names, "tiny.data"):
        hub.serve(f"user/{name}", base / name, kind="dataset")
    client = prepared.run(["-c", CLIENT, HELPERS, json.dumps([f"user/{name}" for name in names])])
    assert client.returncode == 0, client.stderr
    results = json.loads(client.stdout.splitlines()[-1])
    assert results["rows"] == [["user/tiny.data", *numbers] for numbers in ([0, 1], [1, 0], [0, 0])]
    assert results["datasets"] == ["user/tiny.data"] * 2
    red = [255, 0, 0]
    blue = [0, 0, 255]
    for name in ("folder", "zipped"):
        assert results[f"user/{name}"] == [[red, blue], [red, blue], [blue, red]], name
    reasons = {"absolute": "leaves the cache of the Hub", "relative": "set image_folder"}
    for name in hostile:
        for told in results[f"user/{name}"]:
            assert reasons.get(name, "is an address; nothing is fetched") in told, (name, told)
