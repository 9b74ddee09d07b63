"""Task files run by lm-evaluation-harness on data made here. The model is a script: what is tested is the task."""

import numpy as np
from datasets import Dataset, Features, Image, Sequence, Value
from lm_eval import evaluate
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager
from paths import ROOT
from PIL import Image as Picture


TASKS = ROOT / "evaluate" / "tasks"


class Script(LM):
    """Answers the n-th document of a task with the n-th answer, and keeps what it was asked."""

    MULTIMODAL = True

    def __init__(self, answers):
        super().__init__()
        self.answers = answers
        self.asked = []

    def generate_until(self, requests, disable_tqdm=False):
        self.asked = sorted(requests, key=lambda request: request.doc_id)
        return [self.answers[request.doc_id] for request in requests]

    def loglikelihood(self, requests):
        raise NotImplementedError

    loglikelihood_rolling = loglikelihood


def run(folder, task, rows, model):
    """lm-eval's results of a task file on rows of ours, which are dicts of the data set's columns."""
    write_task(folder, task, rows)
    tasks = TaskManager(include_path=str(folder), include_defaults=False)
    return evaluate(model, tasks.load([task]))  # simple_evaluate without its two seconds of asking the machine


def write_task(folder, task, rows):
    """Writes the rows, and a task file that changes nothing but where the data lie. Rows without `image` get one."""
    rows = [{"image": picture(), **row} for row in rows]
    features = Features({name: _feature(name, value) for name, value in rows[0].items()})
    Dataset.from_list(rows, features=features).to_parquet(folder / "rows.parquet")
    split = next(
        line.split()[1] for line in (TASKS / f"{task}.yaml").read_text().splitlines() if line.startswith("test_split:")
    )
    (folder / f"{task}.yaml").write_text(
        f"include: {TASKS / task}.yaml\ntask: {task}\ndataset_path: parquet\ndataset_name: null\n"
        f"dataset_kwargs: {{data_files: {{{split}: {folder / 'rows.parquet'}}}, cache_dir: {folder / 'cache'}}}\n"
    )


def picture() -> Picture.Image:
    return Picture.fromarray(np.full((12, 12, 4), 90, dtype=np.uint8), "RGBA")


def _feature(name, value):
    if name == "image":
        return Image()
    return (
        Sequence(Value("string"))
        if isinstance(value, list)
        else Value("int64" if isinstance(value, int) else "string")
    )
