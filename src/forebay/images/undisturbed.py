"""Pillow as it comes, whatever this process has set: what is in a file must decide alone what becomes of it.

What Pillow warns of (odd EXIF, an APNG it reads as PNG, many pixels) is, to us, either a failure with a reason or
nothing. It must not depend on somebody's filters: where warnings are errors, a sound picture would become unreadable.
`warnings.catch_warnings` swaps the filters of all threads; here one filter, of warnings raised in Pillow, is there
while any thread decodes.

`ImageFile.LOAD_TRUNCATED_IMAGES` makes half a picture pass for a whole one, the rest of it grey. Where a program sets
it, it is off while any thread decodes.
"""

import re
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from PIL import ImageFile

_FILTER = ("ignore", None, Warning, re.compile(r"PIL\."), 0)
_lock = threading.Lock()
_inside = 0
_takes_halves = False  # what the program has set


@contextmanager
def undisturbed() -> Iterator[None]:
    """No warning of Pillow gets out of this block, and no half of a picture, in any thread."""
    _enter()
    try:
        yield
    finally:
        _leave()


def _enter() -> None:
    global _inside, _takes_halves
    with _lock:
        _inside += 1
        if _FILTER not in warnings.filters:  # also when somebody else put older filters back meanwhile
            warnings.filters.insert(0, _FILTER)  # type: ignore[attr-defined]  # it is a list, as `filterwarnings` knows
        _takes_halves |= ImageFile.LOAD_TRUNCATED_IMAGES
        ImageFile.LOAD_TRUNCATED_IMAGES = False


def _leave() -> None:
    global _inside, _takes_halves
    with _lock:
        _inside -= 1
        if _inside:
            return
        while _FILTER in warnings.filters:
            warnings.filters.remove(_FILTER)  # type: ignore[attr-defined]
        ImageFile.LOAD_TRUNCATED_IMAGES, _takes_halves = _takes_halves, False
