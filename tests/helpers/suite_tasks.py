"""Two tiny tasks, written into a folder."""

import training
import yaml
from datasets import Dataset, Image


def write(tasks) -> None:
    """One with images, and one of likelihoods."""
    (tasks / "my-questions").mkdir(parents=True)
    asked = [
        {"image": {"bytes": training.image(i), "path": None}, "question": f"what is in {i}?", "answer": "red"}
        for i in range(5)
    ]
    Dataset.from_list(asked).cast_column("image", Image()).to_parquet(tasks / "my-questions" / "test.parquet")
    shared = {"dataset_path": str(tasks / "my-questions"), "test_split": "test", "doc_to_target": "{{answer}}"}
    shared |= {"metadata": {"version": 3}}
    looking = shared | {"task": "tiny_looking", "output_type": "generate_until", "doc_to_image": ["image"]}
    looking |= {"doc_to_text": "<image>{{question}}", "metric_list": [{"metric": "exact_match"}]}
    looking |= {"generation_kwargs": {"until": [], "do_sample": False, "max_gen_toks": 6}}
    choosing = shared | {"task": "tiny_choosing", "output_type": "multiple_choice", "doc_to_text": "{{question}}"}
    choosing |= {"doc_to_choice": ["red", "green", "blue"], "metric_list": [{"metric": "acc"}]}
    (tasks / "tiny_choosing.yaml").write_text(yaml.safe_dump(choosing))
    (tasks / "tiny_looking.yaml").write_text(yaml.safe_dump(looking))
