"""lmms-eval finds the model by the package's entry point, and its answers are those of transformers."""

import importlib.util

import demo_parts
import pytest
import scripted_tasks
import tiny
import torch
import training
from datasets import load_dataset

from normalign_llava import NormAlignLlavaForConditionalGeneration


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("lmms_eval") is None, reason="needs lmms-eval"),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = training.checkpoint(tmp_path_factory.mktemp("checkpoint"), tied=False)
    tiny.heeding(NormAlignLlavaForConditionalGeneration.from_pretrained(folder)).save_pretrained(folder)
    return folder


def test_a_task_of_lmms_eval_gets_the_answers_of_transformers(checkpoint, tmp_path):
    from lmms_eval.evaluator import simple_evaluate
    from lmms_eval.tasks import TaskManager

    rows = [{"question": question, "answer": "yes"} for question in ("Is there a cat?", "a dog?", "Is it red?")]
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
        f"task: tiny\ndataset_path: parquet\ndataset_kwargs: {{data_files: {{test: {data}}}}}\ntest_split: test\n"
        "output_type: generate_until\ndoc_to_visual: !function tiny.images\ndoc_to_text: !function tiny.text\n"
        "doc_to_target: answer\nprocess_results: !function tiny.results\n"
        "generation_kwargs: {max_new_tokens: 8, temperature: 0, do_sample: false}\n"
        "metric_list:\n  - {metric: said, aggregation: !function tiny.count, higher_is_better: true}\n"
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
    for number, row in enumerate(load_dataset("parquet", data_files=data, split="train", cache_dir=str(tmp_path))):
        model, processor = demo_parts.load(checkpoint)
        inputs = demo_parts.prompt(processor, row["image"], row["question"])
        with torch.no_grad():
            ids = model.generate(**inputs, max_new_tokens=8, do_sample=False)
        assert said[number] == processor.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert len(set(said.values())) > 1
