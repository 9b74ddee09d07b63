# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""`normalign train --accelerate_config NAME`: the same run in several processes, started by `accelerate launch`."""

import logging
import signal
from collections.abc import Sequence
from importlib.resources import files

from ..errors import Terminated, check_installed
from .command import read_recipe, recipe_file


CONFIGS = files(__package__) / "accelerate_configs"


def launch(config: str, processes: int | None, arguments: Sequence[str]) -> None:
    """Runs `accelerate launch --config_file CONFIG [--num_processes N] -m normalign_llava.train ARGUMENTS`."""
    file = recipe_file(config, CONFIGS)
    if read_recipe(file).get("distributed_type") == "DEEPSPEED":
        check_installed("deepspeed", "deepspeed", config)
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    number = [] if processes is None else ["--num_processes", str(processes)]
    words = ["--quiet", "--config_file", str(file), *number, "-m", "normalign_llava.train", *arguments]
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)  # of ended processes
    try:
        launch_command(launch_command_parser().parse_args(words))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode >= 0:  # the process has said why
            raise SystemExit(failure.exitcode) from None
        raise ChildProcessError(
            f"Process {rank} was ended by {failure.signal_name()}. SIGKILL is often for using too much memory."
        ) from None
    except SignalException as error:  # the processes have ended
        raise (KeyboardInterrupt if error.sigval == signal.SIGINT else Terminated) from None
