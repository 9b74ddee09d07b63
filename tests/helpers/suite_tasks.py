"""Two tiny tasks, written into a folder."""

import training
import yaml
from datasets import Dataset, Image


def write(tasks) -> None:
    """One with images, and one of likelihoods."""
    (tasks / "my-questions").mkdir(parents=True)
    columns = {"image": [{"bytes": training.image(number), "path": None} for number in range(5)]}
    columns |= {"question": [f"what is in {number}?" for number in range(5)], "answer": ["red"] * 5}
    data = Dataset.from_dict(columns).cast_column("image", Image())
    data.to_parquet(tasks / "my-questions" / "test.parquet")
    shared = {"dataset_path": str(tasks / "my-questions"), "test_split": "test"}
    shared |= {"doc_to_target": "{{answer}}", "metadata": {"version": 3}}
    looking = {"task": "tiny_looking", "output_type": "generate_until", "doc_to_image": ["image"]}
    looking |= {"doc_to_text": "<image>{{question}}", "metric_list": [{"metric": "exact_match"}]}
    looking |= {"generation_kwargs": {"until": [], "do_sample": False, "max_gen_toks": 6}}
    choosing = {"task": "tiny_choosing", "output_type": "multiple_choice"}
    choosing |= {"doc_to_text": "{{question}}", "doc_to_choice": ["red", "green", "blue"]}
    choosing |= {"metric_list": [{"metric": "acc"}]}
    for task in (looking, choosing):
        (tasks / f"{task['task']}.yaml").write_text(yaml.safe_dump(shared | task))
