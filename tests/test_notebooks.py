"""The notebooks, run whole by a kernel: on tiny parts, with a hub of their own."""

import os
import re
from pathlib import Path

import nbformat
import pytest
import tiny
import tiny_parts as parts
from diagnosed import diagnosed
from jupyter_client import AsyncKernelManager
from jupyter_client.provisioning import LocalProvisioner
from nbclient import NotebookClient
from paths import ROOT

from normalign_llava.diagnose.run import Diagnosis


class ForkedKernel(LocalProvisioner):
    """A kernel that is a fork of the `prepared` process, which has imported the package."""

    async def launch_kernel(self, cmd, cwd, **ignored):
        self.process = self.parent.prepared.start(cmd[1:], Path(cwd), **self.parent.variables)
        return self.connection_info

    async def send_signal(self, number):
        os.kill(self.process.pid, number)

    async def wait(self):
        self.process.wait()
        self.process = None


class RunNotebook:
    """The outputs of a notebook's cells."""

    def __init__(self, notebook):
        self.outputs = {}
        for cell in notebook.cells:
            if cell.cell_type == "code":
                self.outputs[cell.id] = cell.outputs

    def shown(self, cell_id: str, media_type: str) -> list[str]:
        """What a cell shows of a type."""
        shown = []
        for output in self.outputs[cell_id]:
            contents = output.get("data", {})
            if media_type in contents:
                shown.append(contents[media_type])
        return shown

    def printed(self, cell_id: str) -> str:
        text = ""
        for output in self.outputs[cell_id]:
            if output.get("name") == "stdout":
                text += output.text
        return text


def set_parameters(notebook, parameters):
    """Adds assignments to the notebook's cell of parameters."""
    (cell,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ())]
    defined_names = set(re.findall(r"^(\w+) =", cell.source, flags=re.M))
    assert parameters.keys() <= defined_names
    for parameter_name, value in parameters.items():
        cell.source += f"\n{parameter_name} = {value!r}"


@pytest.fixture
def run(prepared, tmp_path):
    """A function that runs a notebook with other parameters in the folder `here`."""
    work_folder = tmp_path / "here"

    def run_notebook(notebook_name, environment=None, **parameters) -> RunNotebook:
        notebook_path = ROOT / "notebooks" / f"{notebook_name}.ipynb"
        notebook = nbformat.read(notebook_path, as_version=4)
        set_parameters(notebook, parameters)

        kernel = AsyncKernelManager(connection_file=str(tmp_path / "kernel.json"))
        kernel.prepared = prepared
        kernel.variables = {**(environment or {}), "IPYTHONDIR": str(tmp_path)}
        kernel.provisioner = ForkedKernel(kernel_spec=kernel.kernel_spec, parent=kernel)
        work_folder.mkdir()
        client = NotebookClient(
            notebook,
            km=kernel,
            timeout=300,
            resources={"metadata": {"path": work_folder}},
        )
        client.execute(cleanup_kc=True)
        return RunNotebook(notebook)

    return run_notebook


@pytest.mark.nightly
def test_a_model_is_built_trained_merged_compared_published_and_asked(run, hub, tmp_path):
    notebook = run(
        "finetune",
        {"HF_TOKEN": hub.token("ann")},
        VISION=parts.vision(tmp_path / "vision", "siglip"),
        LANGUAGE=parts.language(tmp_path / "language"),
        DRAWN={"train": 4, "test": 2},
        STEPS=1,
        BATCH=2,
        REPO_ID="ann/m",
        CHECK_LOADING=False,
    )
    assert notebook.shown("images", "image/png")
    assert notebook.shown("curves", "image/png")
    for cell_id in ("build", "recipe", "merge", "compare"):
        assert "<pre" in "".join(notebook.shown(cell_id, "text/html"))
    assert notebook.printed("chat")

    repository = hub.repository("ann/m")
    weight_files = list((tmp_path / "here" / "my-model").glob("*.safetensors"))
    assert weight_files
    for weight_file in weight_files:
        assert repository.read(weight_file.name) == weight_file.read_bytes()
    card = repository.read("README.md").decode()
    assert "No evaluation is recorded" not in card


@pytest.mark.slow
def test_any_model_is_diagnosed_with_figures_and_claims(run, checkpoint, tmp_path):
    llava_folder = parts.llava(tmp_path / "llava", tiny.llava())
    # This template knows no images.
    Path(llava_folder, "chat_template.jinja").unlink()
    notebook = run(
        "diagnose",
        MODEL=str(checkpoint),
        AGAINST=llava_folder,
        SAMPLES=2,
        BATCH=2,
    )
    for cell_id in ("norms", "paper", "rotation", "attention"):
        assert notebook.shown(cell_id, "image/png")
    assert "<pre" in "".join(notebook.shown("diagnose", "text/html"))
    assert (tmp_path / "here" / "diagnosis" / "report.html").exists()


def test_names_in_a_notebook_are_neither_html_nor_markup(tmp_path):
    verdict = ["<i>[red]a[/b] & \x1b[31m"]
    diagnosis = Diagnosis(verdict, [], diagnosed(), None, tmp_path)
    html = diagnosis._repr_mimebundle_([], [])["text/html"]
    assert "&lt;i&gt;[red]a[/b] &amp; \\x1b[31m" in html
    assert "the paper" in html
