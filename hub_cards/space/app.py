# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The program of a Hugging Face Space: the page of the folder `demo`, for the model that `space.json` names."""

import json
from pathlib import Path

from demo import build_app, launch, load


settings = json.loads(Path(__file__).with_name("space.json").read_text(encoding="utf-8"))
model, processor = load(settings["model"], settings["revision"])
source = f"Model: [{settings['model']}](https://huggingface.co/{settings['model']})."
launch(build_app(model, processor, title=settings["title"], source=source))
