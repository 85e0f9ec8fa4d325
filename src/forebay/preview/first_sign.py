"""The first sign of life: a line on a terminal that is replaced by the first real output.

It imports nothing heavy, so that it can be shown before the libraries of a verb are imported.
"""

import sys
from typing import TextIO

_ERASE = "\r\x1b[2K"
_shown: list[TextIO] = []  # the terminal that shows the line; a progress bar replaces `sys.stderr`


def show_first_sign(line: str) -> None:
    """Show a line on standard error, which must be a terminal."""
    _shown[:] = [sys.stderr]
    sys.stderr.write(f"{_ERASE}{line}")
    sys.stderr.flush()


def clear_first_sign() -> None:
    """Erase the line, before something else is printed."""
    while _shown:
        stream = _shown.pop()
        stream.write(_ERASE)
        stream.flush()
