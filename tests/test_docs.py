"""Commands and snippets of README and docs, run as printed: on tiny models and data so named."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import tiny_parts as parts
import yaml
from datasets import Dataset
from paths import DOCS, ROOT
from PIL import Image
from transformers import AutoProcessor, LlavaForConditionalGeneration

from normalign_llava.assembly.build import build_checkpoint


pytestmark = pytest.mark.slow

NOT_RUN = (
    "pip install",
    "make ",
    "vllm serve",
    "hf download",
)
"""CI runs `make`; the pages say that the others are not run."""

ON_TINY = {
    "normalign train": "--use_cpu --bf16 false --max_steps 1 --global_batch_size 2 "
    "--per_device_train_batch_size 1 --optim adamw_torch --max_length 512",
    "normalign diagnose": "--samples 1 --batch-size 1",
    "normalign publish": "--no-verify",
    "normalign ask": "--max-new-tokens 4",
}
"""Options for a tiny model, by the start of a command."""

GIVEN = {
    "diagnose.md": """
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor
processor = AutoProcessor.from_pretrained("my-model")
model = AutoModelForImageTextToText.from_pretrained("my-model", trust_remote_code=True)
data = [(Image.open("kite.png"), "What is this?")]
"""
}
"""What the snippets of a page take for granted."""


def read_blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), flags=re.S)


def read_commands(page: Path) -> list[str]:
    """The commands that run here, without their comments."""
    commands = []
    for block in read_blocks(page, "bash"):
        for line in block.splitlines():
            is_run_here = "# not run" not in line and not line.startswith(NOT_RUN)
            if line.strip() and is_run_here:
                commands.append(line.split(" #")[0].strip())
    return commands


IMAGE_NAMES = [f"{number}.png" for number in range(4)]
CONVERSATION = [
    {"from": "human", "value": "<image>\nwhat is it"},
    {"from": "gpt", "value": "a kite"},
]


def write_models(folder, vision, language):
    """The checkpoints that the pages name."""
    build_checkpoint(vision, language, folder / "qwen2.5-7b")
    build_checkpoint(
        vision,
        language,
        folder / "my-baseline",
        arm="none",
    )
    for copy_name in ("qwen2.5-7b-align", "my-model", "outputs/quickstart/model"):
        shutil.copytree(folder / "qwen2.5-7b", folder / copy_name)


def write_images(folder):
    """The images that the pages name, and questions about them."""
    image_path = folder / "kite.png"
    Image.linear_gradient("L").convert("RGB").save(image_path)
    for copy_name in ("before.png", "after.png", "photos/one.png", "photos/two.png"):
        copy_path = folder / copy_name
        copy_path.parent.mkdir(exist_ok=True)
        shutil.copyfile(image_path, copy_path)
    question = '{"image": "kite.png", "question": "What is it?"}\n'
    (folder / "questions.jsonl").write_text(question)

    image_folder = folder / "my-images"
    image_folder.mkdir()
    metadata = ""
    for image_name in IMAGE_NAMES:
        shutil.copyfile(image_path, image_folder / image_name)
        row = {
            "file_name": image_name,
            "question": "what is it",
            "answer": "a kite",
        }
        metadata += json.dumps(row) + "\n"
    (image_folder / "metadata.jsonl").write_text(metadata)


def write_pretraining_data(folder):
    """LLaVA-Pretrain, with its images in an archive."""
    data_folder = folder / "LLaVA-Pretrain"
    shutil.make_archive(str(data_folder / "images"), "zip", folder / "my-images")
    rows = [{"image": image_name, "conversations": CONVERSATION} for image_name in IMAGE_NAMES]
    (data_folder / "blip_laion_cc_sbu_558k.json").write_text(json.dumps(rows))


def write_tuning_data(data_folder, image_path):
    """LLaVA-NeXT-Data, with its images in the rows."""
    data_folder.mkdir()
    rows = []
    for _ in IMAGE_NAMES:
        image = Image.open(image_path).copy()
        rows.append({"image": image, "conversations": CONVERSATION})
    data_path = data_folder / "train-00000-of-00001.parquet"
    Dataset.from_list(rows).to_parquet(str(data_path))


@pytest.fixture(scope="module")
def prepared_folder(tmp_path_factory, archives, server):
    """A folder with what the pages assume to be there, and a hub with what they load from it."""
    root = tmp_path_factory.mktemp("docs")
    vision = parts.vision(root / "vision", "siglip")
    language = parts.language(root / "language", tied=False)
    folder = root / "here"
    write_models(folder, vision, language)
    write_images(folder)
    write_pretraining_data(folder)
    write_tuning_data(root / "data", folder / "kite.png")

    llava_folder = root / "llava"
    for part in (LlavaForConditionalGeneration, AutoProcessor):
        part.from_pretrained(folder / "my-baseline").save_pretrained(llava_folder)

    server.clear()
    server.serve("google/siglip-so400m-patch14-384", Path(vision))
    server.serve("Qwen/Qwen2.5-7B-Instruct", Path(language))
    server.serve("llava-hf/llava-1.5-7b-hf", llava_folder)
    server.serve("Qwen/Qwen2.5-VL-3B-Instruct", llava_folder)
    server.serve("lmms-lab/LLaVA-NeXT-Data", root / "data", kind="dataset")
    return folder


class Workplace:
    """A copy of the folder, in which Python runs as `user` of the hub."""

    def __init__(self, folder, prepared, variables):
        self.folder = folder
        self.prepared = prepared
        self.variables = variables
        self.run_commands = set()

    def run(self, words: list[str]) -> None:
        process = self.prepared.run(words, self.folder, **self.variables)
        output = f"{process.stdout[-2000:]}\n{process.stderr[-3000:]}"
        assert process.returncode == 0, f"{' '.join(words)}\n{output}"

    def remove_output(self, command: str) -> None:
        """Removes the folder that a command writes."""
        output = re.search(r"--output(?:_dir)? (\S+)", command)
        if output:
            shutil.rmtree(self.folder / output[1], ignore_errors=True)
        elif command.startswith("normalign train"):
            recipe_name = command.split()[2]
            recipe_text = (ROOT / "train" / "recipes" / f"{recipe_name}.yaml").read_text()
            recipe = yaml.safe_load(recipe_text)
            shutil.rmtree(self.folder / recipe["output_dir"], ignore_errors=True)

    def run_command(self, command: str) -> None:
        """Runs a command with settings for a tiny model."""
        self.remove_output(command)
        program, *words = shlex.split(command)
        assert program == "normalign"
        for start, options in ON_TINY.items():
            if command.startswith(start):
                words += options.split()
        self.run(["-m", "normalign_llava", *words])

    def run_page(self, page: Path) -> None:
        """Runs the commands that have not run before, and the snippets."""
        for command in read_commands(page):
            if command not in self.run_commands and not command.startswith("normalign demo"):
                self.run_command(command)
                self.run_commands.add(command)
        for snippet in read_blocks(page, "python"):
            given = GIVEN.get(page.name, "")
            self.run(["-c", given + snippet])


@pytest.fixture
def workplace(prepared_folder, server, prepared, tmp_path):
    folder = tmp_path / "here"
    shutil.copytree(prepared_folder, folder)
    for repository_name in list(server.repositories):
        if repository_name.startswith("user/"):
            del server.repositories[repository_name]
    variables = {"CI": "1", "HF_TOKEN": server.token("user")}
    return Workplace(folder, prepared, variables)


def test_readme_and_the_pages_on_training_and_publishing_run(workplace, server):
    workplace.run_page(ROOT / "README.md")
    workplace.run_page(DOCS / "train.md")
    workplace.run_page(DOCS / "evaluate.md")
    workplace.run_page(DOCS / "publish.md")

    run_names = {command.split()[1] for command in workplace.run_commands}
    assert run_names == {
        "build",
        "train",
        "merge",
        "publish",
        "diagnose",
        "card",
        "gain",
        "evaluate",
        "ask",
    }
    assert server.repository("user/my-model").read("README.md")


def test_recipes_on_the_page_on_training_can_be_read():
    for recipe in read_blocks(DOCS / "train.md", "yaml"):
        assert yaml.safe_load(recipe)


@pytest.mark.nightly
def test_the_page_on_diagnosis(workplace):
    workplace.run_page(DOCS / "diagnose.md")
    assert (workplace.folder / "my-model" / "diagnostics" / "report.html").exists()


def anchors_of(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    anchors = set()
    for heading in re.findall(r"^#+ (.*)$", page.read_text().lower(), flags=re.M):
        anchors.add(re.sub(r"[^\w\- ]", "", heading).replace(" ", "-"))
    return anchors


PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(#[^)]*)?\)", page.read_text()):
        if target.startswith("http"):
            continue
        linked_path = page
        if target:
            linked_path = (page.parent / target).resolve()
        assert linked_path.exists(), target
        if anchor and linked_path.suffix == ".md":
            assert anchor.removeprefix("#") in anchors_of(linked_path), f"{target}{anchor}"
