# SPDX-License-Identifier: Apache-2.0
"""What docs/serving.md says of tools that call LLaVA's own class on a checkpoint of ours."""

import re

import pytest
from paths import DOCS
from remote_code import run_blocked


pytestmark = pytest.mark.nightly
SECTION = "## Tools that call LLaVA's class\n"
RUN = """
import io, json
told, sys.stderr = sys.stderr, io.StringIO()
from transformers import AutoModelForImageTextToText, LlavaForConditionalGeneration
def norms(model):
    return [name for name, _ in model.named_modules() if name.endswith("projector.norm")]
stock = norms(LlavaForConditionalGeneration.from_pretrained(sys.argv[1]))
warned, sys.stderr = sys.stderr.getvalue(), told
try:
    AutoModelForImageTextToText.from_pretrained(sys.argv[1], trust_remote_code=False)
except ValueError as error:
    refused = str(error)
exec(sys.argv[2])
print(json.dumps([stock, warned, refused, norms(model)]))
"""


def test_llava_s_class_warns_in_these_words_and_the_auto_class_has_the_norm(folder, tmp_path):
    section = (DOCS / "serving.md").read_text().partition(SECTION)[2]
    (warning,) = re.findall("^```text\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    (snippet,) = re.findall("^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    right = snippet.replace('"user/my-model"', repr(str(folder)))
    assert right != snippet
    stock, warned, refused, own = run_blocked(tmp_path, RUN, folder, right)
    said = " ".join(warned.split())
    for line in warning.splitlines():
        assert " ".join(line.split()) in said
    assert stock == [] and own == ["model.multi_modal_projector.norm"]
    assert "trust_remote_code=True" in refused
