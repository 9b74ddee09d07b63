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
)  # CI runs `make`; of others the pages say so
ON_TINY = {
    "normalign train": "--use_cpu --bf16 false --max_steps 1 --global_batch_size 2 "
    "--per_device_train_batch_size 1 --optim adamw_torch --max_length 512",
    "normalign diagnose": "--samples 1 --batch-size 1",
    "normalign publish": "--no-verify",
    "normalign ask": "--max-new-tokens 4",
}
GIVEN = {  # what a snippet takes for granted
    "diagnose.md": """
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor
processor = AutoProcessor.from_pretrained("my-model")
model = AutoModelForImageTextToText.from_pretrained("my-model", trust_remote_code=True)
data = [(Image.open("kite.png"), "What is this?")]
"""
}


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), flags=re.S)


def commands(page: Path) -> list[str]:
    """Those that run here, without their comments."""
    lines = [line for block in blocks(page, "bash") for line in block.splitlines() if line.strip()]
    run_here = [line for line in lines if "# not run" not in line and not line.startswith(NOT_RUN)]
    return [line.split(" #")[0].strip() for line in run_here]


@pytest.fixture(scope="module")
def made(tmp_path_factory, archives, server):
    """A folder with what the pages assume to be there, and a hub with what they load from it."""
    root = tmp_path_factory.mktemp("docs")
    vision = parts.vision(root / "vision", "siglip")
    language = parts.language(root / "language", tied=False)
    here = root / "here"
    build_checkpoint(vision, language, here / "qwen2.5-7b")
    build_checkpoint(vision, language, here / "my-baseline", arm="none")
    for name in ("qwen2.5-7b-align", "my-model", "outputs/quickstart/model"):
        shutil.copytree(here / "qwen2.5-7b", here / name)
    for part in (LlavaForConditionalGeneration, AutoProcessor):
        part.from_pretrained(here / "my-baseline").save_pretrained(root / "llava")
    images = here / "my-images"
    images.mkdir()
    Image.linear_gradient("L").convert("RGB").save(here / "kite.png")
    for name in ("before.png", "after.png", "photos/one.png", "photos/two.png"):
        (here / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(here / "kite.png", here / name)
    (here / "questions.jsonl").write_text('{"image": "kite.png", "question": "What is it?"}\n')
    names = [f"{number}.png" for number in range(4)]
    for name in names:
        shutil.copyfile(here / "kite.png", images / name)
    asked = [{"file_name": name, "question": "what is it", "answer": "a kite"} for name in names]
    (images / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    said = [{"from": "human", "value": "<image>\nwhat is it"}, {"from": "gpt", "value": "a kite"}]
    rows = [{"image": name, "conversations": said} for name in names]
    pretrain = here / "LLaVA-Pretrain"
    shutil.make_archive(str(pretrain / "images"), "zip", images)
    (pretrain / "blip_laion_cc_sbu_558k.json").write_text(json.dumps(rows))
    (root / "data").mkdir()
    next_data = [{**row, "image": Image.open(here / "kite.png").copy()} for row in rows]
    Dataset.from_list(next_data).to_parquet(str(root / "data" / "train-00000-of-00001.parquet"))
    server.clear()
    server.serve("google/siglip-so400m-patch14-384", Path(vision))
    server.serve("Qwen/Qwen2.5-7B-Instruct", Path(language))
    for name in ("llava-hf/llava-1.5-7b-hf", "Qwen/Qwen2.5-VL-3B-Instruct"):
        server.serve(name, root / "llava")
    server.serve("lmms-lab/LLaVA-NeXT-Data", root / "data", kind="dataset")
    return here


@pytest.fixture
def world(made, server, prepared, tmp_path):
    """A copy of the folder, and what runs Python there, as `user`."""
    shutil.copytree(made, tmp_path / "here")
    for name in list(server.repositories):
        if name.startswith("user/"):
            del server.repositories[name]
    return tmp_path / "here", prepared, {"CI": "1", "HF_TOKEN": server.token("user")}


def run(words: list[str], world) -> None:
    folder, prepared, variables = world
    done = prepared.run(words, folder, **variables)
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"


def run_command(command: str, world) -> None:
    """Runs it with settings for a tiny model; what it makes is taken away first."""
    if made := re.search(r"--output(?:_dir)? (\S+)", command):
        shutil.rmtree(world[0] / made[1], ignore_errors=True)
    elif command.startswith("normalign train"):
        recipe = (ROOT / "train" / "recipes" / f"{command.split()[2]}.yaml").read_text()
        shutil.rmtree(world[0] / yaml.safe_load(recipe)["output_dir"], ignore_errors=True)
    tiny = next((options for name, options in ON_TINY.items() if command.startswith(name)), "")
    program, *words = shlex.split(command)
    assert program == "normalign"
    run(["-m", "normalign_llava", *words, *tiny.split()], world)


def run_page(page: Path, world, done: set[str]) -> None:
    """Runs the commands that are not in `done`, adds them, and runs the snippets."""
    for line in commands(page):
        if line not in done and not line.startswith("normalign demo"):
            run_command(line, world)
            done.add(line)
    for snippet in blocks(page, "python"):
        run(["-c", GIVEN.get(page.name, "") + snippet], world)


def test_readme_and_the_pages_on_training_and_publishing_run(world, server):
    done: set[str] = set()
    for page in (ROOT / "README.md", DOCS / "train.md", DOCS / "evaluate.md", DOCS / "publish.md"):
        run_page(page, world, done)
    names = {"build", "train", "merge", "publish", "diagnose", "card", "gain", "evaluate", "ask"}
    assert names == {line.split()[1] for line in done}
    assert server.repository("user/my-model").read("README.md")
    assert all(yaml.safe_load(recipe) for recipe in blocks(DOCS / "train.md", "yaml"))


@pytest.mark.nightly
def test_the_page_on_diagnosis(world):
    run_page(DOCS / "diagnose.md", world, set())
    assert (world[0] / "my-model/diagnostics/report.html").exists()


def test_links_lead_somewhere():
    for page in [ROOT / "README.md", *DOCS.glob("*.md")]:
        for file, anchor in re.findall(r"\]\(([^)#\s]*)(#[^)]*)?\)", page.read_text()):
            if file.startswith("http"):
                continue
            found = (page.parent / file).resolve() if file else page
            assert found.exists(), f"{page.name}: {file}"
            if anchor and found.suffix == ".md":
                heads = re.findall(r"^#+ (.*)$", found.read_text().lower(), flags=re.M)
                anchors = {re.sub(r"[^\w\- ]", "", head).replace(" ", "-") for head in heads}
                assert anchor[1:] in anchors, f"{page.name}: {file}{anchor}"
