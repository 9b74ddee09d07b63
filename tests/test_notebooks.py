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


@pytest.fixture
def run(prepared, tmp_path):
    """A function that runs a notebook with other parameters; it returns cells' outputs by id."""

    def run(name: str, variables: dict[str, str], **parameters) -> dict[str, list]:
        notebook = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
        (cell,) = (cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ()))
        assert parameters.keys() <= set(re.findall(r"^(\w+) =", cell.source, flags=re.M))
        cell.source += "".join(f"\n{name} = {value!r}" for name, value in parameters.items())
        kernel = AsyncKernelManager(connection_file=str(tmp_path / "kernel.json"))
        kernel.prepared = prepared
        kernel.variables = variables | {"IPYTHONDIR": str(tmp_path)}
        kernel.provisioner = ForkedKernel(kernel_spec=kernel.kernel_spec, parent=kernel)
        (tmp_path / "here").mkdir()
        place = {"metadata": {"path": tmp_path / "here"}}
        client = NotebookClient(notebook, km=kernel, timeout=300, resources=place)
        client.execute(cleanup_kc=True)
        return {cell.id: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}

    return run


def shown(outputs: list, kind: str) -> list[str]:
    return [output.data[kind] for output in outputs if kind in output.get("data", ())]


@pytest.mark.nightly
def test_a_model_is_built_trained_merged_compared_published_and_asked(run, hub, tmp_path):
    small = dict(VISION=parts.vision(tmp_path / "vision", "siglip"), STEPS=1, BATCH=2)
    small |= dict(LANGUAGE=parts.language(tmp_path / "language"), DRAWN={"train": 4, "test": 2})
    variables = {"HF_TOKEN": hub.token("ann")}
    cells = run("finetune", variables, **small, REPO_ID="ann/m", CHECK_LOADING=False)
    assert all(shown(cells[name], "image/png") for name in ("images", "curves"))
    tables = [shown(cells[name], "text/html") for name in ("build", "recipe", "merge", "compare")]
    assert all("<pre" in "".join(table) for table in tables)
    assert "".join(output.text for output in cells["chat"] if output.get("name") == "stdout")
    published = hub.repository("ann/m")
    weights = list((tmp_path / "here/my-model").glob("*.safetensors"))
    assert weights and all(published.read(file.name) == file.read_bytes() for file in weights)
    assert "No evaluation is recorded" not in published.read("README.md").decode()


@pytest.mark.slow
def test_any_model_is_diagnosed_with_figures_and_claims(run, checkpoint, tmp_path):
    llava = parts.llava(tmp_path / "llava", tiny.llava())
    Path(llava, "chat_template.jinja").unlink()  # which knows no images
    cells = run("diagnose", {}, MODEL=str(checkpoint), AGAINST=llava, SAMPLES=2, BATCH=2)
    figures = ("norms", "paper", "rotation", "attention")
    assert all(shown(cells[name], "image/png") for name in figures)
    assert "<pre" in "".join(shown(cells["diagnose"], "text/html"))
    assert (tmp_path / "here/diagnosis/report.html").exists()


def test_names_in_a_notebook_are_neither_html_nor_markup(tmp_path):
    done = Diagnosis(["<i>[red]a[/b] & \x1b[31m"], [], diagnosed(), None, tmp_path)
    html = done._repr_mimebundle_([], [])["text/html"]
    assert "&lt;i&gt;[red]a[/b] &amp; \\x1b[31m" in html and "the paper" in html
