"""Where tests of damage strike: in `make test` at every few bytes, in `make test-long` at every single one."""

import re

import pytest

# The step between bytes struck; no step divides 8, so that every bit of a byte is among them.
STRIDES = [pytest.param(11, id="some"), pytest.param(1, id="every", marks=pytest.mark.long)]
_PADDING = re.compile(rb"( {48,}|\0{48,})")
_PADDING_STRIDE = 61


def struck(value: bytes, stride: int) -> list[int]:
    """Positions in a file, the first and the last among them; fewer in its padding, where all bytes are alike."""
    if stride == 1 or not value:
        return list(range(len(value)))
    at: set[int] = {0, len(value) - 1}
    for run in _PADDING.finditer(value):
        at |= {run.start(), run.end() - 1, *range(run.start(), run.end(), _PADDING_STRIDE)}
    start = 0
    for piece in _PADDING.split(value):
        if not _PADDING.fullmatch(piece):
            at |= set(range(start, start + len(piece), stride))
        start += len(piece)
    return sorted(at)
