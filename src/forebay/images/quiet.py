"""Keeping Pillow's warnings in.

What Pillow warns of (odd EXIF, an APNG it reads as PNG, many pixels) is, to us, either a failure with a reason or
nothing. It must not depend on somebody's filters: where warnings are errors, a sound picture would become unreadable.
`warnings.catch_warnings` swaps the filters of all threads; here one filter, of warnings raised in Pillow, is there
while any thread decodes.
"""

import re
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_FILTER = ("ignore", None, Warning, re.compile(r"PIL\."), 0)
_lock = threading.Lock()
_inside = 0


@contextmanager
def quiet() -> Iterator[None]:
    """No warning of Pillow gets out of this block, in any thread."""
    _enter()
    try:
        yield
    finally:
        _leave()


def _enter() -> None:
    global _inside
    with _lock:
        _inside += 1
        if _FILTER not in warnings.filters:  # also when somebody else put older filters back meanwhile
            warnings.filters.insert(0, _FILTER)  # type: ignore[attr-defined]  # it is a list, as `filterwarnings` knows


def _leave() -> None:
    global _inside
    with _lock:
        _inside -= 1
        while not _inside and _FILTER in warnings.filters:
            warnings.filters.remove(_FILTER)  # type: ignore[attr-defined]
