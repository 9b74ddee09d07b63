"""JSON files of a test: reading them, and changing some of their keys."""

import json
from pathlib import Path


def read_json(path) -> dict:
    return json.loads(Path(path).read_text())


def update_json(path, changes: dict) -> None:
    """Sets keys of a JSON file that is there."""
    Path(path).write_text(json.dumps(read_json(path) | changes))
