# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What goes wrong between a client and the hub of the tests: [`HubServer.fault`] and [`HubServer.pause`]."""

import re
from dataclasses import dataclass
from threading import Event, Lock
from typing import Literal


Kind = Literal["error", "close", "half", "lost"] | int


@dataclass
class Fault:
    """A fault, for `times` of the requests that match `request`, once `after` of them have passed untouched.

    Attributes:
        kind: "error" (status 500) or another status as a number, "close" (the connection ends), "half" (it ends when
            half of the body is read): nothing is done. "lost": done, but the connection ends without an answer.
        request: Regular expression, searched in `"METHOD /path"`.
    """

    kind: Kind
    request: str
    times: int = 1
    after: int = 0

    def strikes(self, line: str) -> bool:
        """Counts the request `line` if it matches; True if the fault happens to it."""
        if self.times == 0 or not re.search(self.request, line):
            return False
        if self.after > 0:
            self.after -= 1
            return False
        self.times -= 1
        return True


class Pause:
    """Holds the requests that match, or the first `times` of them, from when they are read until they are released.

    Nothing is done for a held request whose client has gone by then.

    Attributes:
        reached: Set when a request is held.
    """

    def __init__(self, request: str, times: int | None = None):
        self.request = request
        self.times = times
        self.reached = Event()
        self._released = Event()
        self._lock = Lock()

    def release(self) -> None:
        """Lets the held requests go on, and later ones pass."""
        self._released.set()

    def hold(self, line: str) -> bool:
        """Returns when the request `line` may go on; True if it was held."""
        with self._lock:
            if self._released.is_set() or self.times == 0 or not re.search(self.request, line):
                return False
            if self.times is not None:
                self.times -= 1
        self.reached.set()
        self._released.wait()
        return True

    def __enter__(self) -> "Pause":
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()
