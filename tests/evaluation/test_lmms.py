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


def test_a_task_of_lmms_eval_gets_the_answers_of_transformers(checkpoint, tmp_path):
    from lmms_eval.evaluator import simple_evaluate
    from lmms_eval.tasks import TaskManager

    questions = ("Is there a cat?", "a dog?", "Is it red?")
    rows = [{"question": question, "answer": "yes"} for question in questions]
    (tmp_path / "data").mkdir()
    scripted_tasks.write_task(tmp_path / "data", "ai2d", rows)
    data = str(tmp_path / "data" / "rows.parquet")
    (tmp_path / "tiny.py").write_text(
        "def text(doc, lmms_eval_specific_kwargs=None):\n    return doc['question']\n"
        "def images(doc):\n    return [doc['image'].convert('RGB')]\n"
        "def results(doc, answers):\n    return {'said': answers[0]}\n"
        "def count(answers):\n    return len(answers)\n"
    )
    (tmp_path / "tiny.yaml").write_text(
        "task: tiny\ndataset_path: parquet\ntest_split: test\noutput_type: generate_until\n"
        f"dataset_kwargs: {{data_files: {{test: {data}}}}}\ndoc_to_target: answer\n"
        "doc_to_visual: !function tiny.images\ndoc_to_text: !function tiny.text\n"
        "generation_kwargs: {max_new_tokens: 8, temperature: 0, do_sample: false}\n"
        "process_results: !function tiny.results\nmetric_list:\n"
        "- {metric: said, aggregation: !function tiny.count, higher_is_better: true}\n"
    )
    output = simple_evaluate(
        "normalign_llava",
        model_args=f"pretrained={checkpoint},dtype=float32",
        batch_size=2,
        device="cpu",
        tasks=["tiny"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
    )
    said = {sample["doc_id"]: sample["resps"][0][0] for sample in output["samples"]["tiny"]}
    asked = load_dataset("parquet", data_files=data, split="train", cache_dir=str(tmp_path))
    for number, row in enumerate(asked):
        expected = generate(checkpoint, row["question"], row["image"].convert("RGB"), tokens=8)
        assert said[number] == expected[0]
    assert len(set(said.values())) > 1
