# SPDX-License-Identifier: Apache-2.0
"""Figure 5 and the log of a real run, read back from the folder that training left, and from what was merged of it."""

import math

import pytest
import train_data
import training

from normalign_llava.checkpoint.names import DYNAMICS, STATE
from normalign_llava.diagnose.measure.dynamics import read_dynamics, read_training_log
from normalign_llava.train.run import main


pytestmark = pytest.mark.slow


def test_a_run_s_log_over_steps(tmp_path):
    training.checkpoint(tmp_path)
    rows = [train_data.llava(f"<image>\nwhat is {i}?", f"it is {i * 7 % 13}", "red.png") for i in range(12)]
    (tmp_path / "data").mkdir()
    train_data.write_json(tmp_path / "data", rows)
    options = {"use_peft": True, "lora_r": 2, "global_batch_size": 2, "learning_rate": 1e-2, "max_steps": 4}
    options |= {"logging_steps": 2, "save_steps": 2, "probe_steps": [0, 2, 4], "probe_rows": 8}
    adapter = main([training.recipe(tmp_path, tmp_path, **options)])
    curves = read_training_log(adapter)
    for name in ("norm/visual", "norm/text", "gain/l2", "gain/mean_abs", "bias/mean_abs", "loss", "cosine/visual"):
        assert [step for step, _ in curves[name]] == [2, 4], name
    steps = {step.step: step for step in read_dynamics(adapter)}
    for kind in ("visual", "text"):
        for step, mean in curves[f"cosine/{kind}"]:
            layers = getattr(steps[step], kind)
            assert mean == pytest.approx(math.fsum(layers) / len(layers), rel=1e-9)


@pytest.mark.parametrize("read, name", [(read_dynamics, DYNAMICS), (read_training_log, STATE)])
def test_a_damaged_file_is_named(read, name, tmp_path):
    (tmp_path / name).write_text('{"log_history": [[1]], "visual": 0.1}')
    with pytest.raises(ValueError, match=f"{name} is not as training writes it.*Remove it"):
        read(tmp_path)
