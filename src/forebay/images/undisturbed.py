"""Pillow as it comes, whatever this process has set: what is in a file must decide alone what becomes of it.

What Pillow warns of (odd EXIF, an APNG it reads as PNG, many pixels) is, to us, either a failure with a reason or
nothing. It must not depend on somebody's filters: where warnings are errors, a sound picture would become unreadable.
`warnings.catch_warnings` swaps the filters of all threads; here one filter, of warnings raised in Pillow, is there
while any thread decodes.

`ImageFile.LOAD_TRUNCATED_IMAGES` makes half a picture pass for a whole one, the rest of it grey. Where a program sets
it, it is off while any thread decodes. `Image.MAX_IMAGE_PIXELS` is at least what we allow ourselves. What a program
sets meanwhile is noticed, and holds afterwards.
"""

import os
import re
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from PIL import Image, ImageFile

_FILTER = ("ignore", None, Warning, re.compile(r"PIL\."), 0)
_lock = threading.Lock()
_inside = 0
_takes_halves, _most_pixels = False, Image.MAX_IMAGE_PIXELS  # what the program has set
_ours: int | None = None  # what we set in place of the latter


@contextmanager
def undisturbed(max_pixels: int) -> Iterator[None]:
    """No warning of Pillow gets out of this block, and no half of a picture, in any thread."""
    _enter(max_pixels)
    try:
        yield
    finally:
        _leave()


def _enter(max_pixels: int) -> None:
    global _inside, _ours
    with _lock:
        if _FILTER not in warnings.filters:  # also when somebody else put older filters back meanwhile
            warnings.filters.insert(0, _FILTER)  # type: ignore[attr-defined]  # it is a list, as `filterwarnings` knows
        _notice()
        ImageFile.LOAD_TRUNCATED_IMAGES = False
        if Image.MAX_IMAGE_PIXELS is not None:
            Image.MAX_IMAGE_PIXELS = max(Image.MAX_IMAGE_PIXELS, max_pixels)
        _ours = Image.MAX_IMAGE_PIXELS
        _inside += 1


def _notice() -> None:
    """Remember what the program has set: all of it at first, later what differs from what we set."""
    global _takes_halves, _most_pixels
    if not _inside or ImageFile.LOAD_TRUNCATED_IMAGES:
        _takes_halves = ImageFile.LOAD_TRUNCATED_IMAGES
    if not _inside or _ours != Image.MAX_IMAGE_PIXELS:
        _most_pixels = Image.MAX_IMAGE_PIXELS


def _leave() -> None:
    global _inside
    with _lock:
        if _inside == 1:
            _put_back()
        _inside -= 1


def _put_back() -> None:
    _notice()
    while _FILTER in warnings.filters:
        warnings.filters.remove(_FILTER)  # type: ignore[attr-defined]  # as above
    ImageFile.LOAD_TRUNCATED_IMAGES, Image.MAX_IMAGE_PIXELS = _takes_halves, _most_pixels


def _start_anew() -> None:
    """In a forked process: threads that were decoding are not there to leave, nor to give the lock back."""
    global _inside, _lock
    if _inside:
        _put_back()
    _inside, _lock = 0, threading.Lock()


os.register_at_fork(after_in_child=_start_anew)
