# SPDX-License-Identifier: Apache-2.0
"""What docs/serving.md says of tools that call LLaVA's own class on a checkpoint of ours."""

import re

import pytest
from paths import DOCS
from remote_code import run_blocked


pytestmark = pytest.mark.nightly

LOAD = """
import io, json
stderr, sys.stderr = sys.stderr, io.StringIO()
from transformers import AutoModelForImageTextToText, LlavaForConditionalGeneration

def norms(model):
    return [name for name, _ in model.named_modules() if name.endswith("projector.norm")]

stock_norms = norms(LlavaForConditionalGeneration.from_pretrained(sys.argv[1]))
warning = sys.stderr.getvalue()
sys.stderr = stderr
try:
    AutoModelForImageTextToText.from_pretrained(sys.argv[1], trust_remote_code=False)
except ValueError as error:
    refusal = str(error)
exec(sys.argv[2])
print(json.dumps({
    "stock_norms": stock_norms,
    "warning": warning,
    "refusal": refusal,
    "own_norms": norms(model),
}))
"""


@pytest.fixture
def page_section():
    page = (DOCS / "serving.md").read_text()
    return page.partition("## Tools that call LLaVA's class\n")[2]


def code_block(text, language):
    (block,) = re.findall(f"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return block


def on_one_line(text):
    return " ".join(text.split())


def test_llava_s_class_warns_in_these_words_and_the_auto_class_has_the_norm(
    page_section, folder, tmp_path
):
    snippet = code_block(page_section, "python")
    local_snippet = snippet.replace('"user/my-model"', repr(str(folder)))
    assert local_snippet != snippet
    shown = run_blocked(tmp_path, LOAD, folder, local_snippet)

    for line in code_block(page_section, "text").splitlines():
        assert on_one_line(line) in on_one_line(shown["warning"])
    assert shown["stock_norms"] == []
    assert shown["own_norms"] == ["model.multi_modal_projector.norm"]
    assert "trust_remote_code=True" in shown["refusal"]
