"""Where the repository, its pages and the helpers of the tests are."""

from pathlib import Path


HELPERS = Path(__file__).resolve().parent
ROOT = HELPERS.parents[1]
DOCS = ROOT / "docs"
