# SPDX-License-Identifier: Apache-2.0
"""Figure 5 of a real run, read back from the folder that training left."""

import json
import math

import pytest
import train_data
import training

from normalign_llava.checkpoint.names import DYNAMICS, STATE
from normalign_llava.diagnose.measure.dynamics import read_dynamics
from normalign_llava.train.run import main


@pytest.mark.slow
def test_the_curves_of_a_run_have_the_means_that_it_logged(tmp_path):
    training.checkpoint(tmp_path)
    rows = [train_data.llava(f"<image>\nwhat is {i}?", f"{i * 7 % 13}", "red.png") for i in range(12)]
    (tmp_path / "data").mkdir()
    train_data.write_json(tmp_path / "data", rows)
    options = {"use_peft": True, "lora_r": 2, "global_batch_size": 2, "learning_rate": 1e-2, "max_steps": 4}
    options |= {"logging_steps": 2, "save_steps": 2, "probe_steps": [0, 2, 4], "probe_rows": 8}
    adapter = main([training.recipe(tmp_path, tmp_path, **options)])
    log = json.loads((adapter / STATE).read_text())["log_history"]
    logged = {entry["step"]: entry for entry in log if "cosine/visual" in entry}
    steps = {step.step: step for step in read_dynamics(adapter)}
    assert [*steps] == [0, 2, 4] and [*logged] == [2, 4]
    for step, entry in logged.items():
        for kind in ("visual", "text"):
            layers = getattr(steps[step], kind)
            assert entry[f"cosine/{kind}"] == pytest.approx(math.fsum(layers) / len(layers), rel=1e-9)


def test_a_damaged_file_is_named(tmp_path):
    (tmp_path / DYNAMICS).write_text('{"visual": 0.1}')
    with pytest.raises(ValueError, match=f"{DYNAMICS} is not as training writes it.*Remove it"):
        read_dynamics(tmp_path)
