"""lmms-eval finds the model by the package's entry point; its answers are transformers'."""

import importlib.util

import pytest
import scripted_tasks
import tiny
import training
from asking import generate
from datasets import load_dataset

from normalign_llava import NormAlignLlavaForConditionalGeneration


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("lmms_eval") is None, reason="needs lmms-eval"),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = training.checkpoint(tmp_path_factory.mktemp("checkpoint"), tied=False)
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(folder)
    tiny.heeding(model).save_pretrained(folder)
    return folder


FUNCTIONS = """
def text(doc, lmms_eval_specific_kwargs=None):
    return doc['question']

def images(doc):
    return [doc['image'].convert('RGB')]

def results(doc, answers):
    return {'said': answers[0]}

def count(answers):
    return len(answers)
"""

TASK = """
task: tiny
dataset_path: parquet
dataset_kwargs: {{data_files: {{test: {data_path}}}}}
test_split: test
output_type: generate_until
doc_to_target: answer
doc_to_visual: !function tiny.images
doc_to_text: !function tiny.text
generation_kwargs: {{max_new_tokens: 8, temperature: 0, do_sample: false}}
process_results: !function tiny.results
metric_list:
- {{metric: said, aggregation: !function tiny.count, higher_is_better: true}}
"""


def write_task(folder, data_path):
    (folder / "tiny.py").write_text(FUNCTIONS)
    (folder / "tiny.yaml").write_text(TASK.format(data_path=data_path))


def test_a_task_of_lmms_eval_gets_the_answers_of_transformers(checkpoint, tmp_path):
    from lmms_eval.evaluator import simple_evaluate
    from lmms_eval.tasks import TaskManager

    rows = [
        {"question": "Is there a cat?", "answer": "yes"},
        {"question": "a dog?", "answer": "yes"},
        {"question": "Is it red?", "answer": "yes"},
    ]
    data_folder = tmp_path / "data"
    data_folder.mkdir()
    scripted_tasks.write_task(data_folder, "ai2d", rows)
    data_path = str(data_folder / "rows.parquet")
    write_task(tmp_path, data_path)

    output = simple_evaluate(
        "normalign_llava",
        model_args=f"pretrained={checkpoint},dtype=float32",
        batch_size=2,
        device="cpu",
        tasks=["tiny"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
    )
    answers = {sample["doc_id"]: sample["resps"][0][0] for sample in output["samples"]["tiny"]}
    written_rows = load_dataset(
        "parquet",
        data_files=data_path,
        split="train",
        cache_dir=str(tmp_path),
    )
    for number, row in enumerate(written_rows):
        image = row["image"].convert("RGB")
        expected, *_ = generate(checkpoint, row["question"], image, tokens=8)
        assert answers[number] == expected
    assert len(set(answers.values())) > 1
