# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What goes wrong between a client and the hub of the tests: [`HubServer.fault`] and [`HubServer.pause`]."""

import re
from dataclasses import dataclass, field
from threading import Event
from typing import Literal


Kind = Literal["close", "lost"] | int


@dataclass
class Fault:
    """A fault, for the first `times` of the requests that match the regular expression `request`.

    Attributes:
        kind: A status, or "close" (the connection ends): nothing is done. "lost": done, but the connection ends
            without an answer.
    """

    kind: Kind
    request: str
    times: int = 1

    def strikes(self, line: str) -> bool:
        """Whether the fault happens to the request `line`, `"METHOD /path"`."""
        if self.times == 0 or not re.search(self.request, line):
            return False
        self.times -= 1
        return True


@dataclass
class Pause:
    """Holds the first request that matches, until it is released. Nothing is done if its client has gone by then.

    Attributes:
        reached: Set when a request is held.
    """

    request: str
    reached: Event = field(default_factory=Event)
    released: Event = field(default_factory=Event)

    def release(self) -> None:
        """Lets the held request go on."""
        self.released.set()

    def hold(self, line: str) -> bool:
        """Returns when the request `line` may go on; True if it was held."""
        if self.reached.is_set() or not re.search(self.request, line):
            return False
        self.reached.set()
        self.released.wait()
        return True
