# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""A server with OpenAI's API for one checkpoint. No field of a request is trusted."""

from .run import serve


__all__ = ["serve"]
