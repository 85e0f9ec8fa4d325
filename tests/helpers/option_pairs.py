"""Cases of several choices: in `make test` every choice is met at least once, in `make test-long` with every other."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest

LONG = [pytest.mark.long]


def more(*cases: Any) -> list[Any]:
    """Cases that are in the long run only, beside one that is in every run and guards the same."""
    return [pytest.param(case, marks=LONG) for case in cases]


def dealt(*choices: Sequence[Any]) -> list[Any]:
    """All combinations, as parameters; as many as the longest list are in every run, and the others are long.

    >>> [case.values for case in dealt("ab", "xyz") if not case.marks]
    [('a', 'x'), ('a', 'z'), ('b', 'y')]
    """
    first = {tuple(at % len(each) for each in choices) for at in range(max(map(len, choices)))}
    return [
        pytest.param(*(each[at] for each, at in zip(choices, case, strict=True)), marks=[] if case in first else LONG)
        for case in product(*(range(len(each)) for each in choices))
    ]
