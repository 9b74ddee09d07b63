"""Task files run by lm-evaluation-harness on data made here, by a script instead of a model."""

import re

import numpy as np
from datasets import Dataset, Image
from lm_eval import evaluate
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager
from paths import ROOT
from PIL import Image as Picture


TASKS = ROOT / "evaluation" / "tasks"


class Script(LM):
    """Answers document n with answer n, and a white image by its prompt; keeps the requests."""

    MULTIMODAL = True

    def __init__(self, answers, of_blank=None):
        super().__init__()
        self.answers = answers
        self.of_blank = of_blank

    def generate_until(self, requests, disable_tqdm=False):
        self.asked = sorted(requests, key=lambda request: request.doc_id)
        answers = []
        for request in requests:
            for image in request.args[2]["visual"]:
                white = {colour for _, colour in image.getcolors(10**6)} == {(255, 255, 255)}
                assert white == (request.idx == 1)
            own = self.answers[request.doc_id]
            answers.append(self.of_blank(request.args[0]) if request.idx else own)
        return answers

    def loglikelihood(self, requests):
        raise NotImplementedError

    loglikelihood_rolling = loglikelihood


def run(folder, task, rows, model):
    """lm-eval's results of a task file on rows of ours: dicts of the data set's columns."""
    write_task(folder, task, rows)
    tasks = TaskManager(include_path=str(folder), include_defaults=False)
    return evaluate(model, tasks.load([task]))  # simple_evaluate takes 2 seconds more


def write_task(folder, task, rows):
    """Writes rows, and a task file that only says where they lie. Rows without `image` get one."""
    rows = [{"image": picture(), **row} for row in rows]
    Dataset.from_list(rows).cast_column("image", Image()).to_parquet(folder / "rows.parquet")
    split = re.search(r"^test_split: (\w+)", (TASKS / f"{task}.yaml").read_text(), re.M)[1]
    data = f"data_files: {{{split}: {folder / 'rows.parquet'}}}, cache_dir: {folder / 'cache'}"
    (folder / f"{task}.yaml").write_text(
        f"include: {TASKS / task}.yaml\ntask: {task}\ndataset_path: parquet\ndataset_name: null\n"
        f"dataset_kwargs: {{{data}}}\n"
    )


def picture() -> Picture.Image:
    return Picture.fromarray(np.full((12, 12, 4), 90, dtype=np.uint8), "RGBA")
