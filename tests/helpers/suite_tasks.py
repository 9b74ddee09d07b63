"""Two tiny tasks, written into a folder."""

import training
import yaml
from datasets import Dataset, Image


def write(tasks) -> None:
    """One with images, and one of likelihoods."""
    data_folder = tasks / "my-questions"
    data_folder.mkdir(parents=True)
    rows = []
    for number in range(5):
        row = {
            "image": {"bytes": training.image(number), "path": None},
            "question": f"what is in {number}?",
            "answer": "red",
        }
        rows.append(row)
    dataset = Dataset.from_list(rows).cast_column("image", Image())
    dataset.to_parquet(data_folder / "test.parquet")

    shared = {
        "dataset_path": str(data_folder),
        "test_split": "test",
        "doc_to_target": "{{answer}}",
        "metadata": {"version": 3},
    }
    looking = {
        "task": "tiny_looking",
        "output_type": "generate_until",
        "doc_to_image": ["image"],
        "doc_to_text": "<image>{{question}}",
        "metric_list": [{"metric": "exact_match"}],
        "generation_kwargs": {"until": [], "do_sample": False, "max_gen_toks": 6},
    }
    choosing = {
        "task": "tiny_choosing",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": ["red", "green", "blue"],
        "metric_list": [{"metric": "acc"}],
    }
    for task in (looking, choosing):
        task_path = tasks / f"{task['task']}.yaml"
        task_path.write_text(yaml.safe_dump({**shared, **task}))
