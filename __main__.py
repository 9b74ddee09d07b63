"""`python -m normalign_llava`, the same as `normalign`."""

from .cli import app


app()
