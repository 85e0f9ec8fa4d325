"""Format numbers and ranges, escape untrusted text, and show a first line that real output replaces.

It imports nothing heavy, so that a line can be shown before the libraries of a verb are imported.
"""

import shlex
import sys
from collections.abc import Iterable
from itertools import groupby
from typing import TextIO

_BYTE_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def human_bytes(count: float) -> str:
    """
    >>> human_bytes(812), human_bytes(4_490_000), human_bytes(16e9)
    ('812 B', '4.5 MB', '16.0 GB')
    """
    power = 0
    while count >= 999.95 and power < len(_BYTE_UNITS) - 1:
        count, power = count / 1000, power + 1
    return f"{count:.0f} B" if power == 0 else f"{count:.1f} {_BYTE_UNITS[power]}"


def human_time(seconds: float) -> str:
    """
    >>> human_time(0.42), human_time(12), human_time(200), human_time(7500)
    ('0.4 s', '12 s', '3 min 20 s', '2 h 05 min')
    """
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes == 0:
        return f"{rest} s"
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def counted(count: int, noun: str) -> str:
    """
    >>> counted(1, "chunk"), counted(1200, "chunk")
    ('1 chunk', '1,200 chunks')
    """
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def in_ranges(numbers: Iterable[int]) -> str:
    """
    >>> in_ranges([3, 35, 36, 37, 40, 41])
    '3, 35–37, 40–41'
    """
    runs = groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0])
    edges = [[number for _, number in run] for _, run in runs]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in edges)


def printable(text: str) -> str:
    """Untrusted text on one line, with control characters escaped.

    >>> printable("red \\x1b[31m name\\nnext")
    'red \\\\x1b[31m name\\\\nnext'
    """
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def harmless(text: str) -> str:
    """Lines of text with control characters escaped, except newlines and tabs.

    >>> harmless("red \\x1b[31m name\\nnext")
    'red \\\\x1b[31m name\\nnext'
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in "\n\t" else repr(char)[1:-1] for char in text)


def command_line(*words: str) -> str:
    """A forebay command, quoted for the shell.

    >>> command_line("repair", "my caches/raw")
    "forebay repair 'my caches/raw'"
    """
    return shlex.join(["forebay", *words])


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
