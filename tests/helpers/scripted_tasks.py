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

    def __init__(self, answers, answer_of_blank=None):
        super().__init__()
        self.answers = answers
        self.answer_of_blank = answer_of_blank

    def generate_until(self, requests, disable_tqdm=False):
        self.asked = sorted(requests, key=lambda request: request.doc_id)
        return [self.answer(request) for request in requests]

    def answer(self, request):
        """A document is asked once with its images, then once with white ones."""
        is_blank = request.idx == 1
        prompt = request.args[0]
        for image in request.args[2]["visual"]:
            assert is_white(image) == is_blank
        if request.idx:
            return self.answer_of_blank(prompt)
        return self.answers[request.doc_id]

    def loglikelihood(self, requests):
        raise NotImplementedError

    loglikelihood_rolling = loglikelihood


def is_white(image: Picture.Image) -> bool:
    colours = {colour for _, colour in image.getcolors(10**6)}
    return colours == {(255, 255, 255)}


def run(folder, task, rows, model):
    """lm-eval's results of a task file on rows of ours: dicts of the data set's columns."""
    write_task(folder, task, rows)
    task_manager = TaskManager(include_path=str(folder), include_defaults=False)
    loaded_tasks = task_manager.load([task])
    return evaluate(model, loaded_tasks)  # simple_evaluate takes 2 seconds more


def write_task(folder, task, rows):
    """Writes rows, and a task file that only says where they lie. Rows without `image` get one."""
    data_path = folder / "rows.parquet"
    complete_rows = []
    for data_row in rows:
        complete_rows.append({"image": picture(), **data_row})
    dataset = Dataset.from_list(complete_rows)
    dataset.cast_column("image", Image()).to_parquet(data_path)

    task_text = (TASKS / f"{task}.yaml").read_text()
    split = re.search(r"^test_split: (\w+)", task_text, re.M)[1]
    lines = [
        f"include: {TASKS / task}.yaml",
        f"task: {task}",
        "dataset_path: parquet",
        "dataset_name: null",
        "dataset_kwargs:",
        f"  data_files: {{{split}: {data_path}}}",
        f"  cache_dir: {folder / 'cache'}",
    ]
    task_path = folder / f"{task}.yaml"
    task_path.write_text("\n".join(lines) + "\n")


def picture() -> Picture.Image:
    pixels = np.full((12, 12, 4), 90, dtype=np.uint8)
    return Picture.fromarray(pixels, "RGBA")
