# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The lock of a folder for a run in one process or several."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from accelerate import PartialState
from accelerate.utils import broadcast_object_list

from ...checkpoint.lock import only_writer


@contextmanager
def only_run(output_dir: str | os.PathLike) -> Iterator[None]:
    """[`only_writer`] for all processes of a run, which must call this: the first takes the lock, or all stop."""
    problem = [""]
    with ExitStack() as held:
        if PartialState().is_main_process:
            try:
                held.enter_context(only_writer(output_dir, wait=0))
            except ValueError as error:
                problem = [str(error)]
            except OSError as error:
                problem = [f"The --output_dir {output_dir} cannot be written to: {error}. Choose another."]
        broadcast_object_list(problem)
        if problem[0]:
            raise ValueError(problem[0])
        yield
