# SPDX-License-Identifier: Apache-2.0
"""The paper's measurements (tables 1 to 8), for comparison."""

import json
from importlib.resources import files
from typing import Any


def paper_tables() -> dict[str, Any]:
    """The tables by name, as `paper.json` holds them, and `source`, where they were published."""
    return json.loads(files(__package__).joinpath("paper.json").read_text(encoding="utf-8"))


def paper_ratios() -> dict[str, float]:
    """Mean norm of visual tokens, out of the projector, over that of text embeddings, by model."""
    tables = paper_tables()
    ratios = {row["model"]: row["after_mean"] / row["text_mean"] for row in tables["table_2"]}
    ovis = tables["table_3_ovis2_5"]
    return {**ratios, "Ovis2.5": ovis["visual_mean"] / ovis["text_mean"]}
