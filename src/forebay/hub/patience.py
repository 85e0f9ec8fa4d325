"""How often and how long the hub is asked, and what to wait for between two tries."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from forebay.errors import ForebayError, HubUnreachable

T = TypeVar("T")

_LONGEST_ASKED = 600.0  # the hub counts requests over five minutes; who asks for more is not believed
_ADVANCE = 1 << 20  # a try that brought so many new bytes was no failure


@dataclass(frozen=True, slots=True)
class Patience:
    """`retries` after a first try, each up to `timeout` seconds without a byte; longer pauses from try to try."""

    retries: int = 5
    timeout: float = 300.0
    first_wait: float = 0.5
    longest_wait: float = 30.0

    def wait(self, failures: int, asked: float | None) -> float:
        """The pause after so many failures in a row: what the hub asked for, or twice the last, less a random part."""
        if asked is not None:
            return min(asked, _LONGEST_ASKED) + random.uniform(0, self.first_wait)
        return min(self.longest_wait, self.first_wait * 2.0 ** (failures - 1)) * random.uniform(0.5, 1)


class Passing(Exception):
    """Trouble that may pass. `asked` are the seconds that the hub wants to be left alone."""

    def __init__(self, problem: str, asked: float | None = None, final: ForebayError | None = None) -> None:
        self.problem, self.asked, self.final = problem, asked, final
        super().__init__(problem)


def patiently(
    attempt: Callable[[], T], patience: Patience, endpoint: str, what: str, arrived: Callable[[], int] = lambda: 0
) -> T:
    """Try until it succeeds, or until it failed too often in a row; `arrived` tells how many bytes there are."""
    failures, most = 0, arrived()
    while True:
        try:
            return attempt()
        except Passing as trouble:
            failures = 1 if arrived() >= most + _ADVANCE else failures + 1
            most = max(most, arrived())
            if failures > patience.retries:
                tries = f"{trouble.problem} ({failures} tries)"
                raise trouble.final or HubUnreachable(endpoint, what, tries) from trouble
            time.sleep(patience.wait(failures, trouble.asked))
