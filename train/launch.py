# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""`normalign train --accelerate_config NAME`: the same run in several processes, started by `accelerate launch`."""

import signal
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from ..errors import Terminated, check_installed
from .command import read_recipe


CONFIGS = files(__package__) / "accelerate_configs"


def launch(config: str, processes: int | None, arguments: Sequence[str]) -> None:
    """Runs `accelerate launch --config_file CONFIG [--num_processes N] -m normalign_llava.train ARGUMENTS`."""
    own = {Path(entry.name).stem: str(entry) for entry in CONFIGS.iterdir()}
    file = config if Path(config).is_file() else own.get(config)
    if file is None:
        raise ValueError(f"There is no file {config}, and no configuration of that name: {', '.join(sorted(own))}.")
    if read_recipe(file).get("distributed_type") == "DEEPSPEED":
        check_installed("deepspeed", "deepspeed", config)
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing import SignalException

    number = [] if processes is None else ["--num_processes", str(processes)]
    words = ["--quiet", "--config_file", file, *number, "-m", "normalign_llava.train", *arguments]
    try:
        launch_command(launch_command_parser().parse_args(words))
    except SignalException as error:  # the processes have ended
        raise (KeyboardInterrupt if error.sigval == signal.SIGINT else Terminated) from None
